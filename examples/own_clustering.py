"""An own algorithm that clusters: FedAvg that divides the clients in two by their updates (own_clustering.toml runs it)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

import cflpriv
from cflpriv.algorithms.interface import Algorithm, Served
from cflpriv.clustering.similarity import cosines
from cflpriv.contract.handles import Shared
from cflpriv.contract.transcript import RoundRecord
from cflpriv.tasks.evaluation import Evaluate
from cflpriv.types import Clustering


@dataclass(frozen=True)
class Halve:  # runs where the inner products may be seen: at the server, or at a key holder
    results: ClassVar = {"labels": "all"}  # whole numbers, one for each client

    def __call__(self, view):
        values = cosines(view.gram).values  # or view.gram.matrix(); rows are view.gram.clients
        centred = values - values.mean(axis=0) - values.mean(axis=1)[:, None] + values.mean()
        labels = (np.linalg.eigh(centred)[1][:, -1] > 0).astype(int)
        return {"labels": labels}, {"cosines": values}  # the result, and evidence, which only an unprotected run shows


@dataclass(frozen=True, eq=False)
class State:
    models: tuple[Shared, ...]
    clustering: Clustering


def halves(train, *, after: int = 1, weights: str = "equal", seed: int = 0) -> Algorithm:
    """FedAvg that splits the clients in two."""

    def init(federation):
        clients = federation.clients
        return State((Shared(train.model.init(seed)),), Clustering(clients, (0,) * len(clients), 1))

    def round(federation, state):
        models, clustering = state.models, state.clustering
        cohort = federation.cohort(clustering)
        held = federation.compute(train.at(federation.round), {"model": models}, which=clustering, on=cohort)
        if federation.round == after:
            released = federation.gram(held["update"], Halve())
            clustering = Clustering(cohort, tuple(int(label) for label in released.result["labels"]), 2)
            models = models * 2
        means = federation.mean(held["update"], weights=weights, groups=clustering, k=clustering.k, on=cohort)
        steps = [None if mean is None else federation.fold(old + mean.parts["update"]) for old, mean in zip(models, means, strict=True)]
        models = tuple(old if step is None else step for old, step in zip(models, steps, strict=True))  # None: the group is too small
        return State(models, clustering), RoundRecord(federation.round, cohort, tuple(clustering[client] for client in cohort))

    def serve(state):
        return Served(Evaluate(train.model), {"model": state.models}, state.clustering)

    return Algorithm("halves", ("gram", "mean"), init, round, serve, describe=lambda state: {"clustering": state.clustering})


cflpriv.register_algorithm(cflpriv.AlgorithmSpec("halves", halves, "FedAvg, then two groups", states=(State,), functions=(Halve,)))
