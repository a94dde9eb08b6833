"""Clusters fixed from outside: the true groups (oracle), and random groups of the same sizes (shuffled).

The oracle is what clustering can reach at best. Shuffled groups are the control that every clustering claim needs: they have the same
number and sizes of clusters, so what they gain is not due to finding who is alike. Where no true groups are known there is no oracle, and
the sizes are those that `crossfit` finds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..contract.handles import Shared
from ..contract.operations import Federation
from ..contract.transcript import RoundRecord
from ..errors import InputError
from ..privacy.settings import updates_only
from ..randomness import stream
from ..tasks.evaluation import Evaluate
from ..tasks.training import Train
from ..types import Clustering
from .crossfit import crossfit
from .fedavg import Weights, average_within, schedule_of_averaging
from .interface import Algorithm, AlgorithmSpec, Served

__all__ = ["oracle", "shuffled"]


@dataclass(frozen=True, eq=False)
class FixedState:
    models: tuple[Shared, ...]
    clustering: Clustering


def oracle(train: Train, *, groups: Mapping[int, int], weights: Weights = "examples", seed: int = 0) -> Algorithm:
    """FedAvg inside the true groups. `groups` is truth that no server has: `groups[client]`.

    Raises `InputError` where the true groups are unknown.
    """
    if not groups:
        raise InputError("algorithm 'oracle': the true groups of these clients are unknown; 'shuffled' takes the sizes of those found")
    return _fixed("oracle", train, weights, seed, lambda federation: groups, len(set(groups.values())) > 1)


def shuffled(train: Train, *, groups: Mapping[int, int], weights: Weights = "examples", seed: int = 0) -> Algorithm:
    """FedAvg inside random groups with the sizes of the true ones. Where these are unknown (`groups` is empty), with the sizes of the
    groups that `crossfit` finds before the first round.
    """
    search = None if groups else crossfit(train, weights=weights, seed=seed)

    def dealt(federation: Federation) -> Mapping[int, int]:
        sizes = groups
        if search is not None:
            clustering = search.describe(search.init(federation))["clustering"]
            sizes = dict(zip(clustering.clients, clustering.labels, strict=True))
        labels = stream(seed, "shuffled groups").permutation([sizes[client] for client in sorted(sizes)])
        return {client: int(label) for client, label in zip(sorted(sizes), labels, strict=True)}

    made = _fixed("shuffled", train, weights, seed, dealt, search is not None or len(set(groups.values())) > 1)
    if search is None or search.schedule is None or made.schedule is None:
        return made
    return replace(made, operations=search.operations, schedule=replace(made.schedule, start=search.schedule.start))


def _fixed(
    name: str, train: Train, weights: Weights, seed: int, groups_of: Callable[[Federation], Mapping[int, int]], several: bool
) -> Algorithm:  # fmt: skip
    """FedAvg inside the groups that `groups_of` gives before the first round; `several`: there may be more than one."""

    def init(federation: Federation) -> FixedState:
        groups = groups_of(federation)
        missing = [client for client in federation.clients if client not in groups]
        if missing:
            raise InputError(f"algorithm {name!r}: no group given for clients {missing}")
        _, labels = np.unique([groups[client] for client in federation.clients], return_inverse=True)
        k = int(labels.max()) + 1
        clustering = Clustering(federation.clients, tuple(int(label) for label in labels), k)
        return FixedState((Shared(train.model.init(seed)),) * k, clustering)

    def round(federation: Federation, state: FixedState) -> tuple[FixedState, RoundRecord]:
        models, record = average_within(federation, state.models, state.clustering, train, weights)
        return replace(state, models=models), record

    def serve(state: FixedState) -> Served:
        return Served(Evaluate(train.model), {"model": state.models}, state.clustering)

    def describe(state: FixedState) -> Mapping[str, Any]:
        return {"clustering": state.clustering}

    schedule = schedule_of_averaging(train, Evaluate(train.model))
    return Algorithm(name, ("mean",), init, round, serve, None, describe, public_groups=several, schedule=schedule)


ORACLE = AlgorithmSpec(
    "oracle", oracle, "FedAvg inside the true groups: the best a clustering can do",
    states=(FixedState,), sample_releases=updates_only, cohorts="labelled", serves_released=True,
    knowledge=lambda settings: "the true groups",
)  # fmt: skip
SHUFFLED = AlgorithmSpec(
    "shuffled", shuffled, "FedAvg inside random groups of the true sizes, or of those found: the control for every clustering claim",
    states=(FixedState,), sample_releases=updates_only, cohorts="labelled", serves_released=True,
    knowledge=lambda settings: "the sizes of the true groups, where they are known",
)  # fmt: skip
