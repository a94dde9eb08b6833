"""The updates in a view: of single clients or means of clusters, with the model and training they started from.

Every attack on updates reads updates here (`steps_in`): a client's own updates where these travel alone (in which forms, `trained_models`
has), else the updates that follow from sums and from the coalition's knowledge, with their uncertainty.

A step is an update with its origin: the model that was sent and the training that clients were asked for (`local_training`). Gradients that
are sent as such become movements: a gradient is one full-batch step of rate 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...algorithms.fesem import TrainAndAssign
from ...contract.transcript import Message, payload_rows
from ...engine.models import Model
from ...types import Array
from ..adversary import UPDATES, AdversaryView, hidden_by, parts_in, updates_sent
from ..figures.leakage import Case, Prior
from ..figures.payloads import data_parts, depends_on_data
from .coalition import cohorts_of, deviating, known_means
from .local_training import LocalTraining, NotRecorded, Trainings, training_of, trainings_in
from .sums import CohortSum, means_in, means_of_parts_in, models_sent
from .trained_models import OWN, Declared, Trained, declared_by, models_of_round, own_initial_model, trained_in

__all__ = [
    "ADDED", "ClientStep", "asked_in", "blind", "hidden_updates", "less_known", "local_of", "mean_updates", "of_several", "only_a_part",
    "public_model", "single_steps", "step_of", "steps_in", "trainings_of", "unread", "unread_movement", "updates_in",
]  # fmt: skip

ADDED = ("origin", "anchor", "control")
"""What clients may be sent beside a model, of its size."""


@dataclass(frozen=True, eq=False)
class ClientStep:
    """One client's training in one round, as the adversary knows it: what it was sent, how it moved; `members` share a mean.

    `beside` is what else it was sent: StoCFL's "anchor" (d,), SCAFFOLD's "control" (d,) and the round "summed" () of the client's last
    change of it. `local` is the training that it was asked for, None where the transcript does not say. `known` (d,) is that part of the
    update which follows from these, see `less_known`. `deviation` is the standard deviation of a coordinate of an update that was solved
    from sums, 0 for one that was read. `part`: the parameters from this place on are known, those before are those of the initial model.
    `chain` are the (round, clients) of the trainings whose mean updates add up to this one, where there are several. `stated` are the
    members' label shares (classes,), where they come beside the update.
    """

    start: Array
    update: Array
    members: tuple[int, ...]
    round: int = 0
    beside: Mapping[str, Array] = field(default_factory=dict)
    known: Array | None = None
    local: LocalTraining | None = None
    deviation: float = 0.0
    part: int = 0
    chain: tuple[tuple[int, tuple[int, ...]], ...] = ()
    stated: Array | None = None

    @property
    def trainings(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The (round, clients) of each training in the update."""
        return self.chain or ((self.round, self.members),)

    def known_part(self, vectors: Array) -> Array:
        """Vectors (..., d) with zeros in place of the parameters that are not known."""
        if not self.part:
            return vectors
        return np.concatenate([np.zeros_like(vectors[..., : self.part]), vectors[..., self.part :]], axis=-1)


def asked_in(step: ClientStep) -> LocalTraining:
    """The training of a step. Raises `NotRecorded`."""
    if step.local is None:
        raise NotRecorded("the transcript does not say how clients were asked to train")
    return step.local


def local_of(step: ClientStep, prior: Prior) -> LocalTraining:
    """The training of a step, clipped as clients of the run clip. Raises `NotRecorded`."""
    assert prior.config is not None  # checked by the caller
    return asked_in(step).clipped(prior.config)


def steps_in(view: AdversaryView, dimension: int, case: Case | None = None, parts: bool = False) -> dict[int, list[ClientStep]]:
    """Each client's steps in the order of rounds: single ones where updates of others can be read, else those of its cluster's mean.

    With the `case` that the view is of, means are without what its colluders can take off, and of fewer clients where several say so;
    compared updates and relayed models are read as well. With `parts`, also updates and means of the last parameters alone
    (`ClientStep.part`).
    """
    single = _single_steps(view, dimension, case, parts)
    return single if set(single) - set(view.coalition) else _mean_steps(view, dimension, case, parts) | single


def single_steps(steps: Mapping[int, Sequence[ClientStep]]) -> dict[int, list[ClientStep]]:
    """The steps that are one client's own, of clients that have any."""
    single = {client: [step for step in client_steps if len(step.members) == 1] for client, client_steps in steps.items()}
    return {client: client_steps for client, client_steps in single.items() if client_steps}


def trainings_of(case: Case, dimension: int) -> Trainings:
    """The trainings whose results were averaged on the unprotected run; where nobody was sent a task, what the schedule declares."""
    trainings = trainings_in(case.reference)
    if trainings.by_round:
        return trainings
    steps = [of_client[0] for of_client in single_steps(steps_in(case.reference, dimension, case)).values()]
    declared = [step.local for step in sorted(steps, key=lambda step: step.round) if step.local is not None]
    return Trainings({steps[0].round: declared[0]}, (declared[0],)) if declared else trainings


def updates_in(view: AdversaryView, dimension: int) -> dict[tuple[int, int], Array]:
    """What clients sent for a mean by (round, client), as far as it can be read; of several in a round, the last."""
    return {
        (message.round, trained.client): trained.vector
        for message in view.messages if message.operation == "mean" for trained in trained_in(view, message, dimension, ())
    }  # fmt: skip


def hidden_updates(view: AdversaryView) -> str:
    """The kind of the transform that hides the coordinates of others' updates from the adversary; empty where none does."""
    blind = (message for message in view.select("mean", "blind update") if set(payload_rows(message)) - set(view.coalition))
    return next((kind for message in blind if (kind := hidden_by(view, str(message.context.get("transform", "")), "mean"))), "")


def blind(view: AdversaryView) -> str:
    """Why an attack on the coordinates of updates is not attempted: the transform that hides them. Empty if no transform does."""
    kind = hidden_updates(view)
    return f"not attempted: updates are under a secret {kind}, which hides their coordinates" if kind else ""


def unread(view: AdversaryView, dimension: int) -> str:
    """Why an attack on updates of whole models is not attempted although a view has clients' updates: their form. Empty otherwise."""
    if of_several(view, dimension):
        return "not attempted: what each client sends for means is in this view, but of several models at once; these may show it"
    if any(row.shape != (dimension,) for row in updates_in(view, dimension).values()):
        return PART_UNREAD if hidden_updates(view) else only_a_part(view, dimension) or PART_UNREAD
    for message in view.select("mean", "update"):
        if "transform" not in message.context and set(payload_rows(message)) - set(view.coalition) and updates_sent(view, message) is None:
            names = ", ".join(repr(name) for name in sorted(set(message.payload or {}) - {"clients"}))
            return f"not attempted: what each client sends for means is in this view, as {names}, which no attack reads"
    if part := only_a_part(view, dimension):
        return part
    if _of_other_sizes(view, dimension):
        return "not attempted: models are in this view, but of another size than the whole model; how clients change these may show it"
    return ""


def unread_movement(view: AdversaryView, dimension: int) -> str:
    """Why an attack on updates of cohorts is not attempted where a view has their results alone, as released models are; else as `unread`.

    The initial model is public, so that one later model shows how all rounds together moved it.
    """
    messages = list(view.select("compute", "parameters"))
    if any(message.context.get("blind") and not models_sent(view, message) for message in messages):
        return BLIND if view.is_server else BLIND_HERE
    sent = [vector for message in messages for vector in models_sent(view, message).values()]
    is_trained = any(operation == "compute" for operation, _, _ in data_parts(view))
    if is_trained and any(vector.shape == (dimension,) for vector in sent) and not means_in(view, dimension):
        return "not attempted: trained models are in this view without those before; how they moved from the public initial one may show it"
    return unread(view, dimension)


BLIND = "not attempted: models in this view have a part under a secret transform"
BLIND_HERE = f"{BLIND}, whose secret clients have and this view has not; runs with [run] audit_parties write it"
PART_UNREAD = "not attempted: updates are in this view, but of a part of the model only; this part may show it"
PART_READ = (
    "not attempted: only a part of each model travels, and this attack reads whole models; of the attacks, label_inference, membership "
    "and source_inference read updates of the part"
)


def only_a_part(view: AdversaryView, dimension: int) -> str:
    """Why an attack on whole models is not attempted where only the last parameters travel (LG-FedAvg).

    Empty where whole models travel, and where the view has nothing of clients' data.
    """
    if not depends_on_data(view):
        return ""
    sent = {vector.size for message in view.select("compute", "parameters") for vector in models_sent(view, message).values()}
    return PART_READ if sent and max(sent) < dimension and _initial_model(view, dimension) is not None else ""


def _initial_model(view: AdversaryView, dimension: int) -> Array | None:
    """The initial model (dimension,) whose first parameters clients keep, from a public seed; None where no task of a view names one."""
    named = (own_initial_model(message) for message in view.messages if message.operation == "compute")
    return next((initial for initial in named if initial is not None and initial.shape == (dimension,)), None)


def _of_other_sizes(view: AdversaryView, dimension: int) -> bool:
    """Whether a view has models that clients trained, but of several at once (FedRC)."""
    sent = [m for m in view.select("compute", "parameters") if m.source == "server"]
    sizes = {vector.size for message in sent for vector in models_sent(view, message).values()}
    return bool(sizes) and dimension not in sizes and depends_on_data(view)


def of_several(view: AdversaryView, dimension: int) -> bool:
    """Whether what other clients send for means can be read and is of several models at once (FedSoft, FedRC)."""
    for message in view.select("mean", "update"):
        if "transform" not in message.context and set(payload_rows(message)) - set(view.coalition):
            rows, parts = updates_sent(view, message), parts_in(view, message).values()
            stacks = [part for part in parts if part.ndim == 3 and part[0].size > dimension] if rows is None else [rows]
            if any(part[0].size > dimension for part in stacks):
                return True
    return False


@dataclass(frozen=True, eq=False)
class _Sent:
    """What a client was sent last: the task by class name, its training, the models by name, what stood beside them, and the initial model
    that the task names."""

    task: str = ""
    local: LocalTraining | None = None
    models: Mapping[str, Array] = field(default_factory=dict)
    beside: Mapping[str, Array] = field(default_factory=dict)
    initial: Array | None = None
    part: int = 0

    def start(self, label: int) -> Array | None:
        """The model that training for `label` started from."""
        return next(iter(self.models.values())) if len(self.models) == 1 else self.models.get(f"model/{label}")

    @property
    def ordered(self) -> list[Array]:
        """The models by number."""
        return [self.models[name] for name in sorted(self.models, key=lambda name: int(name.partition("/")[2] or 0))]


@dataclass(eq=False)
class _Walk:
    """What is known of each client while messages are read in order."""

    sent: dict[int, _Sent] = field(default_factory=dict)
    before: dict[int, _Sent] = field(default_factory=dict)  # for StoCFL's "global", which is sent along
    chosen: dict[int, int] = field(default_factory=dict)
    own: dict[int, Array] = field(default_factory=dict)
    initial: Array | None = None
    steps: dict[int, list[ClientStep]] = field(default_factory=dict)

    def add(self, client: int, step: ClientStep) -> None:
        """Append a step, once: what is compared may also be sent for a mean."""
        steps = self.steps.setdefault(client, [])
        if not any(step.round == other.round and np.array_equal(step.update, other.update) for other in steps):
            steps.append(step)


def _single_steps(view: AdversaryView, dimension: int, case: Case | None = None, parts: bool = False) -> dict[int, list[ClientStep]]:
    """Each client's steps as far as single updates can be read.

    Where a client was sent an "origin" it sends its movement from there (pFedLIA's neighbourhoods), and FeSEM's clients theirs from the
    centre that they chose after training: what lies between that and the model it started from is taken off. FeSEM's clients start from the
    centre of their last choice, and at first from the initial model. Whoever sends a whole model, in blocks with weights or to other
    clients, started from the last model that it sent, and at first from the initial one.
    """
    walk = _Walk()
    config = None if case is None or case.prior.private else case.prior.config
    declared: Declared | None = None
    for message in view.messages:
        if message.payload is None:
            continue
        if message.operation == "compute" and message.kind == "parameters":  # FeSEM's may have a label alone in between
            if any(part.partition("/")[0] == "model" for part in message.payload):
                _sent(view, message, dimension, walk)
            continue
        if message.operation == "relay" and message.kind == OWN and declared is None:
            declared = Declared() if config is None or case is None else declared_by(config, public_model(case.prior))
        if message.operation != "gram" or config is not None:
            _read(view, message, dimension, walk, declared or Declared(), parts)
    return walk.steps


def _sent(view: AdversaryView, message: Message, dimension: int, walk: _Walk) -> None:
    """Note what clients were sent."""
    payload = message.payload or {}
    local = training_of(message)
    classes = 0 if local is None else local.train.model.classes
    models, part = models_of_round(view, message, dimension, classes), 0
    initial = own_initial_model(message)
    if not models and initial is not None and (last := models_sent(view, message).get("model")) is not None and len(last) < dimension:
        part = dimension - len(last)  # clients keep the parameters before
        models = {"model": np.concatenate([initial[:part], last])}
    others = ({name: vector for name, vector in models_sent(view, message, of).items() if vector.shape == (dimension,)} for of in ADDED)
    beside = {name: vector for parts in others for name, vector in parts.items()}
    walk.initial = next(iter(models.values()), None) if walk.initial is None else walk.initial
    summed = {int(client): number for client, number in np.asarray(payload.get("summed", np.zeros((0, 2), int)))}
    for client in message.clients:
        last_change = {"summed": np.asarray(summed[client])} if client in summed else {}
        walk.before[client] = walk.sent.get(client, _Sent())
        walk.sent[client] = _Sent(str(message.context.get("task")), local, models, beside | last_change, initial, part)


def _read(view: AdversaryView, message: Message, dimension: int, walk: _Walk, declared: Declared, parts: bool) -> None:
    """Add what a message holds of single clients' training."""
    for client, trained in trained_by_client(view, message, dimension, walk.before, ("global",)):
        _add(walk, walk.before.get(client, _Sent()), message, trained, dimension)
    for client, trained in trained_by_client(view, message, dimension, walk.sent):
        asked = walk.sent.get(client, _Sent())
        if message.operation == "relay" and not asked.models:  # a member is sent what the others are, or an update would not help it
            asked = next((sent for member, sent in walk.sent.items() if member in view.coalition), asked)
        if message.operation == "relay" and trained.whole and not asked.models:
            _add_relayed(walk, message, trained, declared)
        elif asked.part and trained.vector.shape == (dimension - asked.part,):
            if parts and client not in walk.steps and (start := asked.start(0)) is not None:  # later, clients' own parameters are not known
                moved = np.concatenate([np.zeros(asked.part), trained.vector])
                walk.add(client, ClientStep(start, moved, (client,), message.round, local=asked.local, part=asked.part))
        elif trained.whole:
            _add_whole(walk, asked, message, trained)
        else:
            _add(walk, asked, message, trained, dimension)


def trained_by_client(
    view: AdversaryView, message: Message, dimension: int, sent: Mapping[int, _Sent], named: Sequence[str] = UPDATES
) -> list[tuple[int, Trained]]:
    """What a message holds of each client's training, read by the models that the clients of the message were `sent`."""
    first = next((sent[client] for client in message.clients if client in sent), _Sent())
    classes = 0 if first.local is None else first.local.train.model.classes
    return [(trained.client, trained) for trained in trained_in(view, message, dimension, first.ordered, classes, named)]


def _add(walk: _Walk, asked: _Sent, message: Message, trained: Trained, dimension: int) -> None:
    """Add a movement from the model that the client was sent."""
    start = asked.start(trained.label)
    base = asked.beside.get("origin", start)
    if asked.task == TrainAndAssign.__name__:
        start = walk.initial
        if trained.client in walk.chosen:
            start = asked.models.get(f"model/{walk.chosen[trained.client]}")
        walk.chosen[trained.client] = trained.label
    if base is not None and start is not None and trained.vector.shape == (dimension,):
        gradient = asked.local is not None and asked.local.gradient
        update = -trained.vector if gradient else trained.vector - (start - base)
        walk.add(trained.client, ClientStep(start, update, (trained.client,), message.round, asked.beside, local=asked.local))


def _add_whole(walk: _Walk, asked: _Sent, message: Message, trained: Trained) -> None:
    """Add the training of a client's own model, drawn to the mean of the models that it was sent by its weights."""
    start = walk.own.get(trained.client, asked.initial)
    walk.own[trained.client] = trained.vector
    if start is None:
        return
    beside = dict(asked.beside)
    if trained.weights is not None:
        anchor = sum(share * model for share, model in zip(trained.weights / trained.weights.sum(), asked.ordered, strict=True))
        beside["anchor"] = np.asarray(anchor)
    walk.add(trained.client, ClientStep(start, trained.vector - start, (trained.client,), message.round, beside, local=asked.local))


def _add_relayed(walk: _Walk, message: Message, trained: Trained, declared: Declared) -> None:
    """Add the first model that a client relays: its movement from the initial model in all rounds before.

    What it took from other clients' models in between is not known, so later ones tell less.
    """
    if trained.client in walk.steps or declared.initial is None or declared.local is None:
        return
    rounds, local = max(1, message.round), declared.local
    train = replace(local.train.at(0), epochs=local.train.epochs * rounds)
    beyond = "" if rounds == 1 else "what clients take from each other's models"
    step = ClientStep(
        declared.initial, trained.vector - declared.initial, (trained.client,), max(0, message.round - 1),
        local=replace(local, train=train, beyond=beyond, alone=local.alone and not beyond),
    )  # fmt: skip
    walk.add(trained.client, step)


def mean_updates(view: AdversaryView, dimension: int, case: Case | None = None) -> list[CohortSum]:
    """The mean updates (dimension,) in a view, of whole models or of the part that travels; with the `case` as in `steps_in`."""
    means = means_in(view, dimension) if case is None else known_means(case, view, dimension)
    initial = None if means else _initial_model(view, dimension)
    if initial is None or case is None:
        return means if initial is None else means_of_parts_in(view, initial)
    return [deviating(mean, view, case.prior) for mean in means_of_parts_in(view, initial, cohorts_of(case, view))]


def step_of(mean: CohortSum) -> ClientStep:
    """A mean update as a step of its members."""
    assert mean.start is not None  # there is a mean
    assert mean.mean is not None
    return ClientStep(
        mean.start, mean.mean, mean.members, mean.round, local=mean.local, deviation=mean.deviation, part=mean.part,
        stated=mean.stated,
    )  # fmt: skip


def _mean_steps(view: AdversaryView, dimension: int, case: Case | None, parts: bool) -> dict[int, list[ClientStep]]:
    """From cluster models alone: the sums over a client that two models tell."""
    steps: dict[int, list[ClientStep]] = {}
    for mean in mean_updates(view, dimension, case):
        step = step_of(mean)
        for client in mean.members if parts or not mean.part else ():
            steps.setdefault(client, []).append(step)
    return steps


def less_known(steps: Sequence[ClientStep], prior: Prior, model: Model) -> list[ClientStep]:
    """A client's steps, in order, with what of each update is `known`: that of a part of all its gradients which does not depend on data.

    Such are StoCFL's λ (θ − ω) at the model sent, ω the anchor, and SCAFFOLD's c − c_i: c is sent, and c_i is the mean gradient of the turn
    whose change is the client's last in c. Where that turn is not in the view the step is left out.
    """
    assert prior.config is not None  # checked by the caller
    if prior.config.privacy.unit == "client":  # clipped, so that nothing can be taken off
        return list(steps)
    controls: dict[int, Array] = {-1: np.zeros(model.dimension)}
    less = []
    for step in steps:
        if not step.beside:
            less.append(step)
            continue
        local, pull = local_of(step, prior), None
        carried = local.carried(prior.samples_per_client[step.members[0]])
        if "anchor" in step.beside:
            pull = local.train.prox * (step.start - step.beside["anchor"])
        elif "control" in step.beside:
            own = controls.get(int(step.beside["summed"])) if "summed" in step.beside else None
            if own is None:
                continue
            pull = step.beside["control"] - own
            controls[step.round] = -step.update / carried - pull
        less.append(step if pull is None else replace(step, known=-carried * pull))
    return less


def public_model(prior: Prior) -> Model:
    """The model that everybody trains, from the public configuration."""
    assert prior.config is not None  # checked by the caller
    numbers = prior.config.data.label_type == "number"
    return prior.config.model.build(prior.shape, prior.classes, prior.mean, prior.std, numbers)
