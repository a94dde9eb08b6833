"""Clusters fixed from outside: the true groups (oracle), and random groups of the same sizes (shuffled).

The oracle is what clustering can reach at best. Shuffled groups are the control that every clustering claim needs: they have the same
number and sizes of clusters, so what they gain is not due to finding who is alike.
"""

from collections.abc import Mapping
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
from .fedavg import Weights, average_within, schedule_of_averaging
from .interface import Algorithm, AlgorithmSpec, Served

__all__ = ["oracle", "shuffled"]


@dataclass(frozen=True, eq=False)
class FixedState:
    models: tuple[Shared, ...]
    clustering: Clustering


def oracle(train: Train, *, groups: Mapping[int, int], weights: Weights = "examples", seed: int = 0) -> Algorithm:
    """FedAvg inside the true groups. `groups` is truth that no server has: `groups[client]`."""
    return _fixed("oracle", train, groups, weights, seed)


def shuffled(train: Train, *, groups: Mapping[int, int], weights: Weights = "examples", seed: int = 0) -> Algorithm:
    """FedAvg inside random groups with the sizes of the true ones."""
    clients = sorted(groups)
    dealt = stream(seed, "shuffled groups").permutation([groups[client] for client in clients])
    return _fixed("shuffled", train, {client: int(label) for client, label in zip(clients, dealt, strict=True)}, weights, seed)


def _fixed(name: str, train: Train, groups: Mapping[int, int], weights: Weights, seed: int) -> Algorithm:
    def init(federation: Federation) -> FixedState:
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
    return Algorithm(name, ("mean",), init, round, serve, None, describe, public_groups=len(set(groups.values())) > 1, schedule=schedule)


ORACLE = AlgorithmSpec(
    "oracle", oracle, "FedAvg inside the true groups: the best a clustering can do",
    states=(FixedState,), sample_releases=updates_only, cohorts="labelled", serves_released=True,
    knowledge=lambda settings: "the true groups",
)  # fmt: skip
SHUFFLED = AlgorithmSpec(
    "shuffled", shuffled, "FedAvg inside random groups of the true sizes: the control for every clustering claim",
    states=(FixedState,), sample_releases=updates_only, cohorts="labelled", serves_released=True,
    knowledge=lambda settings: "the sizes of the true groups",
)  # fmt: skip
