"""FedAvg, one model for all, and the step it shares with everything that averages inside known clusters.

Source: McMahan et al. 2017, Algorithm 1. Deviations: clients send updates (local minus received), not models, which gives the same mean; a
client's optimiser starts afresh each round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from ..contract.handles import Shared
from ..contract.operations import Federation
from ..contract.schedule import Schedule, TaskRequest, request, scores
from ..contract.transcript import RoundRecord
from ..engine import Task
from ..keys import Key, ranged
from ..privacy.settings import updates_only
from ..tasks.evaluation import Evaluate
from ..tasks.training import Train
from ..types import Clustering
from .interface import Algorithm, AlgorithmSpec, BeforeRun, Served, no_groups
from .shared.steps import mean_notes, moved

__all__ = ["Weights", "average_all", "average_within", "fedavg", "schedule_of_averaging"]

Weights = Literal["equal", "examples"]
Average = Annotated[
    float, Key("Clients use an average of the models; the larger, the more weight late rounds have; 0: the last.", "[0, inf)")
]
LATE = 8.0
"""Of private training: about the last fifth of the rounds has half of the weight."""


@dataclass(frozen=True, eq=False)
class FedAvgState:
    """One model for all. `average` is over the models of `rounds` rounds, late ones more; None where the last model is used."""

    model: Shared
    average: Shared | None = None
    rounds: int = 0


@ranged("algorithm")
def fedavg(train: Train, *, weights: Weights = "examples", average: Average = 0.0, seed: int = 0) -> Algorithm:
    """One shared model. `weights`: by sample counts (the paper's), or equal, which releases no counts.

    With `average` η above 0 clients use a running average of the models, θ̄ ← (1 − w) θ̄ + w θ with w = (η + 1) / (t + η) in round t
    (Shamir & Zhang 2013, polynomial decay): it smooths privacy noise, needs no number of rounds, and costs no privacy.
    """

    def init(federation: Federation) -> FedAvgState:
        return FedAvgState(Shared(train.model.init(seed)))

    def round(federation: Federation, state: FedAvgState) -> tuple[FedAvgState, RoundRecord]:
        everyone = Clustering(federation.clients, (0,) * len(federation.clients), 1)
        (model,), record = average_within(federation, (state.model,), everyone, train, weights)
        state = replace(state, model=model, rounds=state.rounds + 1)
        if average:
            weight = (average + 1) / (state.rounds + average)
            mixed = model if state.average is None else state.average * (1 - weight) + model * weight
            state = replace(state, average=federation.fold(mixed, on=everyone.clients[0]))
        return state, replace(record, labels=None)

    def serve(state: FedAvgState) -> Served:
        return Served(Evaluate(train.model), {"model": state.model if state.average is None else state.average})

    def admit(federation: Federation, state: FedAvgState, newcomers: Sequence[int]) -> tuple[FedAvgState, Mapping[str, object]]:
        return state, {}

    return Algorithm("fedavg", ("mean",), init, round, serve, admit, schedule=schedule_of_averaging(train, Evaluate(train.model)))


def schedule_of_averaging(
    train: Task, served: Task, *, start: Sequence[TaskRequest] = (), again: Sequence[TaskRequest] = (), joining: Sequence[TaskRequest] = ()
) -> Schedule:  # fmt: skip
    """The schedule of `average_within` and `average_all`: one training a round, whose update is summed, and what is asked `again` in each.

    Clients are scored by `served`.
    """
    return Schedule(tuple(start), (request(train, {"update": "sum"}), *again), tuple(joining), (scores(served),))


def average_within(
    federation: Federation, models: Sequence[Shared], clustering: Clustering, train: Train, weights: Weights
) -> tuple[tuple[Shared, ...], RoundRecord]:
    """One round of FedAvg inside each cluster: sampled clients train their cluster's model, each cluster averages its own updates.

    θ_z ← θ_z + Σ_{k ∈ S ∩ C_z} w_k (θ_k − θ_z) / Σ w_k. A cluster without enough sampled clients keeps its model. Who is in no cluster
    (it came, and was not admitted yet) takes no part.
    """
    placed = set(clustering.clients)
    strata = {client: clustering[client] if client in placed else len(models) for client in federation.clients}
    cohort = tuple(client for client in federation.cohort(strata) if client in placed)
    task = train.at(federation.round)
    held = federation.compute(task, {"model": list(models)}, which=clustering, on=cohort)
    means = federation.mean(held["update"], weights=weights, groups=clustering, k=len(models))
    labels = tuple(clustering[client] for client in cohort)
    updated = moved(federation, models, means, "update", clustering, cohort)
    return updated, RoundRecord(federation.round, cohort, labels, mean_notes(means))


def average_all(federation: Federation, state: FedAvgState, task: Task, weights: Weights) -> tuple[FedAvgState, RoundRecord]:
    """One round of one model for all, by the mean of the cohort's "update" in the results of `task`."""
    cohort = federation.cohort(dict.fromkeys(federation.clients, 0))
    held = federation.compute(task, {"model": state.model}, on=cohort)
    means = federation.mean(held["update"], weights=weights)
    (model,) = moved(federation, (state.model,), means, "update", None, held.clients)
    return FedAvgState(model), RoundRecord(federation.round, cohort, None, mean_notes(means))


def _defaults(settings: Mapping[str, Any], before: BeforeRun) -> Mapping[str, Any]:
    """Noise of every step is in the last model; an average has less of it."""
    return {"average": LATE} if before.unit == "sample" else {}


FEDAVG = AlgorithmSpec(
    "fedavg", fedavg, "one shared model (McMahan et al. 2017)",
    states=(FedAvgState,), sample_releases=updates_only,
    cohorts="one", serves_released=True, knowledge=no_groups, defaults=_defaults,
)  # fmt: skip
