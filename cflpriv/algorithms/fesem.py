"""FeSEM: k centres, each the mean of the local models nearest to it.

Source: Xie et al. 2020 ("Multi-center federated learning"), Algorithm 1: expectation, r_i = argmin_k ‖W_i − W̃_k‖² over the local
models W_i; maximisation, W̃_k = mean of the W_i assigned to it; then every client trains on from its centre.

Which operation? The distance between one local model and k centres needs the local model. The server could `gather` it (everything shows),
or see the Gram matrix of updates and centres (all angles show). The client has both itself once it is sent all centres: so it finds its
own r_i, as in IFCA, and only r_i leaves. That is the least that can leave; it costs k downloads a client.

Deviations, each for a reason:
- The assignment is the client's, as above. A round is: train from your centre, find the nearest centre, send the movement from it.
- The first centres: the first cohort trains from one θ⁰; k-means on the Gram matrix of its updates gives the groups whose means they are
  (`start = "means"`, as in `one_shot`). With `start = "random"` the groups are random: nothing more is shown, but a client leans to
  the centre that it is part of, and often no structure is found. A centre that is a single client's model, as k-means++ would take, would
  show that model.
- The first round's groups are kept by their clients once their means are there: of a first round below the minimum cohort size nothing
  stays, since the next one numbers its groups afresh.
- A client met later trains from θ⁰ at first, so that its W_i is its own before it has a centre.
- Averages are unweighted by default.
- A client that has no centre yet is served the one of lowest training loss.

What it reveals, by which operation: once the Gram matrix of the first cohort's updates, through `gram` (not with "random"); the choices
through `gather` (not at all where sums are oblivious, which takes "random"), who is in which mean, and what `mean` shows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from ..contract.handles import Held, Shared
from ..contract.operations import Federation
from ..contract.schedule import Leaving, Schedule, request, scores
from ..contract.transcript import RoundRecord
from ..engine import Result, TaskInput
from ..keys import Key, ranged
from ..tasks.evaluation import EvaluateUsed, Losses
from ..tasks.training import Train
from ..types import Array, Parts
from .fedavg import Weights
from .interface import Algorithm, AlgorithmSpec, Served
from .one_shot import STARTS, ClusterByMeans
from .shared.around import AroundTraining
from .shared.attempts import choices
from .shared.checks import enough_clients
from .shared.steps import clustering_of, mean_notes, moved

__all__ = ["EvaluateAssigned", "TrainAndAssign", "centres_of", "fesem", "nearest_centre"]

MEMORY = "fesem centre"
"""Under this name clients keep r_i."""


def nearest_centre(model: Array, centres: Sequence[Array]) -> int:
    """argmin_k ‖model − centre_k‖ in float64, the first of equals."""
    return int(np.argmin([float(np.linalg.norm(np.asarray(model, dtype=np.float64) - centre)) for centre in centres]))


@dataclass(frozen=True)
class TrainAndAssign(AroundTraining):
    """Train from the own centre of the given list "model" (from the initial model of `seed` without one), then find the nearest.

    With `first` the new choice is random, and not kept yet. Parts: "choice" (); "step" (d,), the local model minus the chosen centre.
    Kept: "trained" (d,), and the choice under `MEMORY`.
    """

    gives: ClassVar[Parts] = {"choice": "choice", "step": "summed"}
    remembers = (MEMORY,)
    chooses: ClassVar[str] = "choice"
    beyond = ""  # whoever reads the choices knows the centre that a step is from

    seed: int
    first: bool = False

    @property
    def keeps(self) -> tuple[str, ...]:
        return self.train.keeps if self.first else (*self.train.keeps, *self.remembers)

    def before(self, task_input: TaskInput) -> TaskInput:
        start = centres_of(task_input)[int(task_input.memory[MEMORY])] if MEMORY in task_input.memory else self.train.model.init(self.seed)
        return replace(task_input, params={"model": start})

    def after(self, task_input: TaskInput, inner: TaskInput, result: Result) -> Result:
        trained = inner.array("model") + np.asarray(result["update"])
        centres = centres_of(task_input)
        choice = int(task_input.streams("fesem start").integers(len(centres))) if self.first else nearest_centre(trained, centres)
        return {"choice": np.array(choice), "step": trained - centres[choice], "trained": trained, MEMORY: np.array(choice)}


@dataclass(frozen=True)
class Assign(TrainAndAssign):
    """`TrainAndAssign` of a client that joins, of which no step is summed."""


@dataclass(frozen=True)
class Remember:
    """Keep the given "label" () under `MEMORY`. No parts."""

    parts: ClassVar[Parts] = {}
    keeps: ClassVar[tuple[str, ...]] = (MEMORY,)

    def run(self, task_input: TaskInput) -> Result:
        return {MEMORY: task_input.array("label").copy()}


@dataclass(frozen=True)
class EvaluateAssigned(EvaluateUsed):
    """`Evaluate` of the client's centre in the given list "model", or of that with the lowest training loss. Parts: those of `Evaluate`."""

    @property
    def reads(self) -> tuple[str, ...]:
        return (MEMORY,)

    def used(self, task_input: TaskInput) -> Array:
        centres = centres_of(task_input)
        if MEMORY in task_input.memory:
            return centres[int(task_input.memory[MEMORY])]
        return centres[int(Losses(self.model).run(task_input)["choice"])]


def centres_of(task_input: TaskInput) -> list[Array]:
    """The list "model" that a client is sent, as arrays. Raises `TypeError` if it is no list."""
    centres = task_input.params["model"]
    if not isinstance(centres, list):
        raise TypeError("parameter 'model': expected the list of centres")
    return [np.asarray(centre) for centre in centres]


@dataclass(frozen=True, eq=False)
class FesemState:
    """The centres, the choices as far as the server learns them, and whether anybody has chosen yet."""

    models: tuple[Shared, ...]
    labels: Mapping[int, int]
    begun: bool = False


@ranged("algorithm")
def fesem(
    train: Train,
    *,
    k: Annotated[int, Key("Number of centres.", "[1, inf)", "clusters")] = 2,
    start: Annotated[Literal["means", "random"], Key("Begin by k-means on the first cohort's updates, or by random groups.")] = "means",
    weights: Weights = "equal",
    seed: int = 0,
) -> Algorithm:
    """FeSEM with `k` centres, begun by k-means on the first cohort's updates or by random groups.

    Raises `InputError` for parameters that cannot be.
    """

    def init(federation: Federation) -> FesemState:
        enough_clients(k, len(federation.clients))
        return FesemState((Shared(train.model.init(seed)),) * k, {})

    def round(federation: Federation, state: FesemState) -> tuple[FesemState, RoundRecord]:
        strata = {client: state.labels.get(client, k) for client in federation.clients}
        cohort = federation.cohort(strata)
        task = TrainAndAssign(train.at(federation.round), seed, first=not state.begun)
        held = federation.compute(task, {"model": list(state.models)}, on=cohort)
        # E-step: the clients' own, but for the first centres
        labels = by_means(federation, held["step"]) if start == "means" and not state.begun else choices(federation, held["choice"], k)
        if labels is not None:
            held = held.of(labels)  # without those whose choice did not come
        means = federation.mean(held["step"], weights, held["choice"] if labels is None else labels, k)  # M-step
        if not state.begun:  # not before: a round that ended above has changed nothing at the clients either
            keep(federation, held["choice"], labels if start == "means" else None)
        models = moved(federation, state.models, means, "step", labels, held.clients)
        notes = {"chosen": [0 if mean is None else mean.count for mean in means], **mean_notes(means)}
        assigned = None if labels is None else tuple(labels[client] for client in held.clients)
        return FesemState(models, {**state.labels, **(labels or {})}, True), RoundRecord(federation.round, held.clients, assigned, notes)

    def by_means(federation: Federation, steps: Held) -> Mapping[int, int]:
        """The groups of the first centres."""
        released = federation.gram(steps, then=ClusterByMeans(min(k, len(steps.clients)), STARTS, seed))
        federation.close(steps)
        return {client: int(label) for client, label in zip(steps.clients, released.result["labels"], strict=True)}

    def keep(federation: Federation, choice: Held, labels: Mapping[int, int] | None) -> None:
        """Clients keep what they chose at random, or the `labels` of the first centres, which they are sent."""
        if labels is None:
            federation.compute(Remember(), {"label": choice}, on=choice.clients)
        else:
            federation.compute(Remember(), {"label": [np.array(j) for j in range(k)]}, which=labels, on=choice.clients)

    def serve(state: FesemState) -> Served:
        return Served(EvaluateAssigned(train.model), {"model": list(state.models)})

    def admit(federation: Federation, state: FesemState, newcomers: Sequence[int]) -> tuple[FesemState, Mapping[str, Any]]:
        """Newcomers train from θ⁰ and choose the nearest centre; their models stay with them, centres do not move."""
        held = federation.compute(Assign(train.at(federation.round), seed), {"model": list(state.models)}, on=newcomers)
        labels = choices(federation, held["choice"], k) or {}
        return replace(state, labels={**state.labels, **labels}), {"joined": [labels[client] for client in sorted(labels)]}

    def describe(state: FesemState) -> Mapping[str, Any]:
        if not state.labels:
            return {"clustering": None}
        return {"clustering": clustering_of(state.labels, k), "rule": f"k = {k}"}

    operations = ("gram", "gather", "mean") if start == "means" else ("gather", "mean")
    return Algorithm(
        "fesem",
        operations,
        init,
        round,
        serve,
        admit,
        describe,
        public_groups=start == "means" and k > 1,
        schedule=_schedule(train, start, seed),
    )


def _schedule(train: Train, start: Literal["means", "random"], seed: int) -> Schedule:
    """One training a round; in the first one its steps are compared, or choices are random, and clients are sent what to remember."""
    leaves: Mapping[str, Leaving | tuple[Leaving, ...]] = {"choice": "gather", "step": "sum"}
    first = request(TrainAndAssign(train, seed, first=True), {"step": ("gram", "sum")} if start == "means" else leaves)
    return Schedule(
        round=(first, request(Remember()), request(TrainAndAssign(train, seed), leaves)),
        joining=(request(Assign(train, seed), {"choice": "gather"}),), serving=(scores(EvaluateAssigned(train.model)),),
    )  # fmt: skip


FESEM = AlgorithmSpec(
    "fesem", fesem, "k centres, each the mean of the local models nearest to it (Xie et al. 2020)",
    states=(FesemState,), tasks=(Assign, EvaluateAssigned, Remember, TrainAndAssign), functions=(ClusterByMeans,),
    knowledge=lambda settings: f"the number of groups, k = {settings.get('k', 2)}",
)  # fmt: skip
