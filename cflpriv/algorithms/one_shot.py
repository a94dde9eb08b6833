"""One-shot clustering: everybody trains alone, k-means on the local models, then FedAvg inside each cluster.

Source: Ghosh et al. 2019 ("Robust federated learning in a heterogeneous environment") as IFCA's Algorithm 1 and section 6.3 use it.

Distances between local models that started from one θ⁰ are those between their updates, and k-means needs nothing but inner products:
so the updates go through `gram`, and the server need not see one. Cluster models start from the mean of their members' local models.

Deviations, each for a reason:
- k-means (k-means++, the best of `starts` starts by inertia) runs on coordinates made from the Gram matrix: the same distances.
- "Local ERM" is `local_epochs` of SGD for all clients present, before the first round.
- A client whose local training diverged (and is skipped) joins the largest cluster, a newcomer too.
- A cluster whose members' models cannot be averaged (too few, or dropped out) starts from the initial model.
- Newcomers train alone once and join the cluster whose mean their update is nearest to; old clients stay.

What it reveals, by which operation: `gram`, once, all updates or under a protection their angles and norms; the cluster of everybody; then
what FedAvg's `mean` shows inside clusters. Under a rotation or CKKS the one shot is as hidden as PACFL's signatures are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np

from ..contract.handles import Held, Shared
from ..contract.operations import Federation, GramView, Results
from ..contract.schedule import request
from ..contract.transcript import RoundRecord
from ..keys import Key, ranged
from ..tasks.evaluation import Evaluate
from ..tasks.training import Train
from ..types import Array, Clustering
from .fedavg import Weights, average_within, schedule_of_averaging
from .interface import Algorithm, AlgorithmSpec, Served
from .shared.around import TrainApart
from .shared.attempts import try_mean
from .shared.checks import enough_clients
from .shared.steps import moved

__all__ = ["STARTS", "ClusterByMeans", "PlaceByMeans", "one_shot", "with_late"]

STARTS = 10
"""How often k-means is begun; the best result is kept."""


def _products(view: GramView) -> Array:
    """The inner products of the clients' updates (n, n), symmetric."""
    everyone = slice(0, view.gram.n)
    block = np.asarray(view.gram.block(everyone, everyone), dtype=np.float64).reshape(view.gram.n, view.gram.n)
    return (block + block.T) / 2


def _squared_distances(products: Array, labels: Array, row: int) -> Array:
    """‖u_row − mean of cluster z‖² for each cluster of `labels`, from inner products alone."""
    distances = []
    for label in range(int(labels.max()) + 1):
        members = np.flatnonzero(labels == label)
        inside = products[np.ix_(members, members)].mean()
        distances.append(products[row, row] - 2 * products[row, members].mean() + inside)
    return np.array(distances)


@dataclass(frozen=True)
class ClusterByMeans:
    """k-means where the Gram may be seen. Result: labels by first client; evidence: Euclidean distances and the inertia."""

    results: ClassVar[Results] = {"labels": "all"}

    k: int
    starts: int
    seed: int

    def __call__(self, view: GramView) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        from sklearn.cluster import KMeans  # slow to import

        products = _products(view)
        values, vectors = np.linalg.eigh(products)
        points = vectors * np.sqrt(np.maximum(values, 0.0))  # rows with these inner products
        fit = KMeans(self.k, n_init=self.starts, random_state=self.seed % 2**32).fit(points)
        _, first, raw = np.unique(fit.labels_, return_index=True, return_inverse=True)
        labels = np.argsort(np.argsort(first))[raw]
        view.memory["labels"] = labels
        squares = np.maximum(np.diag(products)[:, None] + np.diag(products)[None, :] - 2 * products, 0.0)
        evidence = {"distance": np.sqrt(squares), "clients": view.gram.clients, "inertia": float(fit.inertia_)}
        return {"labels": labels}, evidence


@dataclass(frozen=True)
class PlaceByMeans:
    """New clients join the cluster with the nearest mean (of the clients clustered at first). Result: their labels."""

    results: ClassVar[Results] = {"labels": "new"}

    def __call__(self, view: GramView) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        products, old = _products(view), view.memory["labels"]
        fresh = range(view.gram.n - len(view.new), view.gram.n)
        labels = [int(np.argmin(_squared_distances(products, old, row))) for row in fresh]
        return {"labels": np.array(labels, dtype=np.int64)}, {}


def with_late(clustering: Clustering, clients: Sequence[int]) -> Clustering:
    """The clustering, with missing `clients` added to the largest cluster."""
    late = [client for client in clients if client not in clustering.clients]
    return clustering.extended(late, [int(np.bincount(clustering.labels).argmax())] * len(late)) if late else clustering


@dataclass(frozen=True, eq=False)
class OneShotState:
    """Cluster models, who is in which, and the updates of the one shot, still with their owners."""

    models: tuple[Shared, ...]
    clustering: Clustering
    updates: Held
    evidence: Mapping[str, Any] | None = None


@ranged("algorithm")
def one_shot(
    train: Train,
    *,
    k: Annotated[int, Key("Number of clusters.", "[1, inf)", "clusters")] = 2,
    local_epochs: Annotated[int, Key("Epochs of the local training whose models are clustered.", "[1, inf)", "epochs")] = 10,
    starts: Annotated[int, Key("Random starts of k-means.", "[1, inf)", "starts")] = STARTS,
    weights: Weights = "examples",
    seed: int = 0,
) -> Algorithm:
    """k-means with `k` clusters on models of `local_epochs` of local training. Raises `InputError` for parameters that cannot be."""
    erm = replace(train, epochs=local_epochs).at(0)
    initial = Shared(train.model.init(seed))

    def init(federation: Federation) -> OneShotState:
        enough_clients(k, len(federation.clients))
        held = federation.compute(erm, {"model": initial})["update"]
        released = federation.gram(held, then=ClusterByMeans(min(k, len(held.clients)), starts, seed))
        clustering = Clustering(held.clients, tuple(int(label) for label in released.result["labels"]), k)
        clustering = with_late(clustering, federation.clients)
        means = try_mean(federation, held, weights, clustering, k)  # over those who have an update
        models = moved(federation, (initial,) * k, means, "update", clustering, clustering.clients)
        return OneShotState(models, clustering, held, released.evidence)

    def round(federation: Federation, state: OneShotState) -> tuple[OneShotState, RoundRecord]:
        models, record = average_within(federation, state.models, state.clustering, train, weights)
        return replace(state, models=models), record

    def serve(state: OneShotState) -> Served:
        return Served(Evaluate(train.model), {"model": list(state.models)}, state.clustering)

    def admit(federation: Federation, state: OneShotState, newcomers: Sequence[int]) -> tuple[OneShotState, Mapping[str, Any]]:
        held = federation.compute(TrainApart(erm), {"model": initial}, on=newcomers)["update"]
        released = federation.gram(held, then=PlaceByMeans(), against=state.updates)
        labels = [int(label) for label in released.result["labels"]]
        return replace(state, clustering=with_late(state.clustering.extended(held.clients, labels), newcomers)), {"joined": labels}

    def describe(state: OneShotState) -> Mapping[str, Any]:
        return {"clustering": state.clustering, "evidence": state.evidence, "rule": f"k = {k}"}

    schedule = schedule_of_averaging(
        train, Evaluate(train.model), start=[request(erm, {"update": ("gram", "sum")})],
        joining=[request(TrainApart(erm), {"update": "gram"})],
    )  # fmt: skip
    return Algorithm("one_shot", ("gram", "mean"), init, round, serve, admit, describe, public_groups=k > 1, schedule=schedule)


ONE_SHOT = AlgorithmSpec(
    "one_shot", one_shot, "k-means on local models once, then FedAvg in each cluster (Ghosh et al. 2019)",
    states=(OneShotState,), tasks=(TrainApart,), functions=(ClusterByMeans, PlaceByMeans),
    knowledge=lambda settings: f"the number of groups, k = {settings.get('k', 2)}",
)  # fmt: skip
