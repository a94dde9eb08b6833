"""The updates in a view: of single clients or means of clusters, with the model and training they started from.

Every attack on updates reads updates here (`steps_in`): a client's own updates where these travel alone, else the updates that follow from
sums and from the coalition's knowledge, with their uncertainty.

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
from .coalition import known_means
from .local_training import LocalTraining, NotRecorded, training_of
from .sums import means_in, models_sent

__all__ = [
    "ClientStep", "asked_in", "blind", "data_dependent", "hidden_updates", "less_known", "local_of", "of_several", "public_model",
    "single_steps", "steps_in", "unread", "updates_in", "why_nothing",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class ClientStep:
    """One client's training in one round, as the adversary knows it: what it was sent, how it moved; `members` share a mean.

    `beside` is what else it was sent: StoCFL's "anchor" (d,), SCAFFOLD's "control" (d,) and the round "summed" () of the client's last
    change of it. `local` is the training that it was asked for, None where the transcript does not say. `known` (d,) is that part of the
    update which follows from these, see `less_known`. `deviation` is the standard deviation of a coordinate of an update that was solved
    from sums, 0 for one that was read.
    """

    start: Array
    update: Array
    members: tuple[int, ...]
    round: int = 0
    beside: Mapping[str, Array] = field(default_factory=dict)
    known: Array | None = None
    local: LocalTraining | None = None
    deviation: float = 0.0


def asked_in(step: ClientStep) -> LocalTraining:
    """The training of a step. Raises `NotRecorded`."""
    if step.local is None:
        raise NotRecorded("the transcript does not say how clients were asked to train")
    return step.local


def local_of(step: ClientStep, prior: Prior) -> LocalTraining:
    """The training of a step, clipped as clients of the run clip. Raises `NotRecorded`."""
    assert prior.config is not None  # checked by the caller
    return asked_in(step).clipped(prior.config)


def steps_in(view: AdversaryView, dimension: int, case: Case | None = None) -> dict[int, list[ClientStep]]:
    """Each client's steps in the order of rounds: single ones where updates of others can be read, else those of its cluster's mean.

    With the `case` that the view is of, means are without what its colluders can take off, and of fewer clients where several say so.
    """
    single = _single_steps(view, dimension)
    return single if set(single) - set(view.coalition) else _mean_steps(view, dimension, case) | single


def single_steps(steps: Mapping[int, Sequence[ClientStep]]) -> dict[int, list[ClientStep]]:
    """The steps that are one client's own, of clients that have any."""
    single = {client: [step for step in client_steps if len(step.members) == 1] for client, client_steps in steps.items()}
    return {client: client_steps for client, client_steps in single.items() if client_steps}


def updates_in(view: AdversaryView, dimension: int) -> dict[tuple[int, int], Array]:
    """What clients sent for a mean by (round, client), as far as it can be read; of several in a round, the last."""
    return {(message.round, client): row for message in view.messages for client, _, row in _updates(view, message, dimension)}


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
        return "not attempted: updates are in this view, but of a part of the model only; this part may show it"
    for message in view.select("mean", "update"):
        if "transform" not in message.context and set(payload_rows(message)) - set(view.coalition) and updates_sent(view, message) is None:
            names = ", ".join(repr(name) for name in sorted(set(message.payload or {}) - {"clients"}))
            return f"not attempted: what each client sends for means is in this view, as {names}, which no attack reads"
    return ""


def why_nothing(view: AdversaryView, dimension: int, why: str) -> str:
    """Why an attack that found nothing to read in a view has no figure: `why`, as "not attempted" where the view holds clients' numbers.

    See `data_dependent`.
    """
    if words := unread(view, dimension):
        return words
    numbers = data_dependent(view)
    if not numbers:
        return f"{why}; no number in this view depends on another client's data"
    return f"not attempted: {why}; what is in it is of other kinds ({', '.join(numbers)})"


def data_dependent(view: AdversaryView) -> list[str]:
    """The kinds of messages in a view whose payload may depend on the data of clients other than the coalition's.

    What the server sends depends on no data before the first message of a client, in the first round.
    """
    kinds: dict[str, None] = {}
    answered = False
    for message in view.messages:
        if message.source == "clients":
            answered, depends = True, bool(set(payload_rows(message)) - set(view.coalition))
        else:
            depends = answered or message.round > 0
        if message.payload is not None and depends:
            kinds[f"{message.operation} {message.kind.partition(' ')[0]}"] = None
    return list(kinds)


def of_several(view: AdversaryView, dimension: int) -> bool:
    """Whether what other clients send for means can be read and is of several models at once (FedSoft, FedRC)."""
    for message in view.select("mean", "update"):
        if "transform" not in message.context and set(payload_rows(message)) - set(view.coalition):
            rows, parts = updates_sent(view, message), parts_in(view, message).values()
            stacks = [part for part in parts if part.ndim == 3 and part[0].size > dimension] if rows is None else [rows]
            if any(part[0].size > dimension for part in stacks):
                return True
    return False


def _single_steps(view: AdversaryView, dimension: int) -> dict[int, list[ClientStep]]:
    """Each client's steps as far as single updates can be read.

    Where a client was sent an "origin" it sends its movement from there (pFedLIA's neighbourhoods), and FeSEM's clients theirs from the
    centre that they chose after training: what lies between that and the model it started from is taken off. FeSEM's clients start from the
    centre of their last choice, and at first from the initial model.
    """
    steps: dict[int, list[ClientStep]] = {}
    sent: dict[int, tuple[str, LocalTraining | None, dict[str, Array], dict[str, Array]]] = {}
    before: dict[int, tuple[str, LocalTraining | None, dict[str, Array], dict[str, Array]]] = {}  # for StoCFL's "global", sent along
    chosen: dict[int, int] = {}
    initial: Array | None = None
    for message in view.messages:
        if message.payload is None:
            continue
        named = {part.partition("/")[0] for part in message.payload}
        if message.operation == "compute" and message.kind == "parameters" and "model" in named:  # FeSEM's has a label alone in between
            models, *others = (
                {name: vector for name, vector in models_sent(view, message, of).items() if vector.shape == (dimension,)}
                for of in ("model", "origin", "anchor", "control")
            )
            initial = next(iter(models.values()), None) if initial is None else initial
            local, beside = training_of(message), {name: vector for parts in others for name, vector in parts.items()}
            summed = {int(client): number for client, number in np.asarray(message.payload.get("summed", np.zeros((0, 2), int)))}
            for client in message.clients:
                last = {"summed": np.asarray(summed[client])} if client in summed else {}
                before[client] = sent.get(client, ("", None, {}, {}))
                sent[client] = str(message.context.get("task")), local, models, beside | last
        both = [(before, row) for row in _updates(view, message, dimension, ("global",))]
        for asked, (client, label, row) in [*both, *((sent, row) for row in _updates(view, message, dimension))]:
            task, local, models, beside = asked.get(client, ("", None, {}, {}))
            start = next(iter(models.values())) if len(models) == 1 else models.get(f"model/{label}")
            base = beside.get("origin", start)
            if task == TrainAndAssign.__name__:
                start = models.get(f"model/{chosen[client]}") if client in chosen else initial
                chosen[client] = label
            if base is not None and start is not None and row.shape == (dimension,):
                update = -row if local is not None and local.gradient else row - (start - base)
                steps.setdefault(client, []).append(ClientStep(start, update, (client,), message.round, beside, local=local))
    return steps


def _updates(
    view: AdversaryView, message: Message, dimension: int, named: Sequence[str] = UPDATES
) -> list[tuple[int, int, Array]]:  # fmt: skip
    """(client, group, update) of each client in a message of updates; of what stays blind, as many numbers as a model has."""
    context = message.context
    if message.payload is None or message.operation != "mean" or message.kind not in ("update", "blind update"):
        return []
    rows = updates_sent(view, message, named)
    if rows is None:
        return []
    if "transform" in context:
        rows = rows[:, :dimension]  # a blind one may be padded, or hold other parts as well
    groups = context.get("labels") or [[context.get("group", 0)]] * len(message.clients)
    labels = {client: int(listed[0]) if listed else 0 for client, listed in zip(message.clients, groups, strict=False)}
    return [(client, labels.get(client, 0), row) for client, row in zip(payload_rows(message), rows, strict=False)]


def _mean_steps(view: AdversaryView, dimension: int, case: Case | None = None) -> dict[int, list[ClientStep]]:
    """From cluster models alone: the sums over a client that two models tell."""
    steps: dict[int, list[ClientStep]] = {}
    for sum_ in means_in(view, dimension) if case is None else known_means(case, view, dimension):
        assert sum_.start is not None  # there is a mean
        assert sum_.mean is not None
        for client in sum_.members:
            made = ClientStep(sum_.start, sum_.mean, sum_.members, sum_.round, local=sum_.local, deviation=sum_.deviation)
            steps.setdefault(client, []).append(made)
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
    return prior.config.model.build(prior.shape, prior.classes, prior.mean, prior.std)
