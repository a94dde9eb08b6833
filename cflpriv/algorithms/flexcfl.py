"""FlexCFL: clients are grouped once by the directions of their first updates, seen along the main directions of all of them.

Source: Duan et al. 2021, "Flexible Clustered Federated Learning for Client-Level Data Distribution Shift" (IEEE TPDS 2022, arXiv
2108.09749): group cold start by the Euclidean distance of decomposed cosine similarities (EDC), and newcomer cold start, as in the authors'
code (`flearn/trainer/fedgroup.py`). The clustering is that of FedGroup (arXiv 2010.06870).

Before the first round α·m clients train from one w₀. With ΔW their updates and v_1 … v_m the first m right singular vectors of ΔW,
client i has the coordinates cos(Δw_i, v_j). k-means on these coordinates gives the m groups, which start from the mean of their
members' models. Every other client, and every newcomer, trains from w₀ once and joins the group to whose mean update its own has the
largest cosine. Then FedAvg runs inside each group.

Directions and cosines follow from inner products: with ΔW ΔWᵀ = U S² Uᵀ, cos(Δw_i, v_j) = s_j u_ij / ‖Δw_i‖. So updates go through `gram`,
and the server need not see one.

Deviations, each for a reason:
- Inter-group aggregation (its rate η_g) is left out: with η_g = 0, which the paper calls the pluralistic setting, there is none.
- Migration is left out: it answers data that change during training, and here a client's data stay.
- A client joins by the groups' mean updates from w₀. The authors' code takes the groups' latest updates.
- k-means starts `starts` times and the best is kept. A first training is one round of `[training]`.
- Groups start from the weighted mean of all their members. In the authors' code it is the plain mean of those that were clustered.
- A client whose first training diverged (and is skipped) joins the largest group. A group that cannot be averaged starts from w₀.

What it reveals, by which operation: `gram`, once, all first updates or under a protection their angles and norms; the group of everybody;
then what FedAvg's `mean` shows inside groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from .one_shot import STARTS, with_late
from .shared.around import TrainApart
from .shared.attempts import try_mean
from .shared.checks import enough_clients
from .shared.steps import moved

__all__ = ["ClusterByDirections", "PlaceByCosine", "decomposed_cosines", "flexcfl", "last_products"]

PRETRAIN_SCALE = 20
"""α: at most so many clients a group are clustered, all others are placed. The authors' code."""


def last_products(view: GramView) -> Array:
    """The inner products (n, n), symmetric, of the last vector of each client."""
    everyone = slice(0, view.gram.n)
    block = np.asarray(view.gram.block(everyone, everyone), dtype=np.float64)[:, -1, :, -1].reshape(view.gram.n, view.gram.n)
    return (block + block.T) / 2


def decomposed_cosines(products: Array, m: int) -> Array:
    """The cosines (n, min(m, n)) of vectors with inner products (n, n) with the first m right singular vectors of their matrix.

    A vector of length 0 has cosines 0, and so has everything with a direction of length 0.
    """
    values, vectors = np.linalg.eigh(products)
    lengths = np.sqrt(np.maximum(np.diag(products), 0.0))
    first = np.sqrt(np.maximum(values[::-1][:m], 0.0)) * vectors[:, ::-1][:, :m]
    return np.asarray(np.divide(first, lengths[:, None], out=np.zeros_like(first), where=lengths[:, None] > 0))


@dataclass(frozen=True)
class ClusterByDirections:
    """k-means on decomposed cosines where the Gram may be seen. Result: labels by first client; evidence: EDC and the inertia.

    EDC(i, j) is the Euclidean distance of the rows of i and j over √m.
    """

    results: ClassVar[Results] = {"labels": "all"}

    k: int
    starts: int
    seed: int

    def __call__(self, view: GramView) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        from sklearn.cluster import KMeans  # slow to import

        points = decomposed_cosines(last_products(view), self.k)
        fit = KMeans(self.k, n_init=self.starts, random_state=self.seed % 2**32).fit(points)
        _, first, raw = np.unique(fit.labels_, return_index=True, return_inverse=True)
        labels = np.argsort(np.argsort(first))[raw]
        view.memory["labels"] = labels
        distances = np.linalg.norm(points[:, None] - points[None, :], axis=2) / np.sqrt(self.k)
        return {"labels": labels}, {"distance": distances, "clients": view.gram.clients, "inertia": float(fit.inertia_)}


@dataclass(frozen=True)
class PlaceByCosine:
    """New clients join the group of clustered clients to whose mean their vector has the largest cosine, the first of equals.

    Result: their labels.
    """

    results: ClassVar[Results] = {"labels": "new"}

    def __call__(self, view: GramView) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        products, old = last_products(view), view.memory["labels"]
        member = np.eye(int(old.max()) + 1)[:, old] / np.bincount(old)[:, None]  # (groups, clustered clients)
        fresh = range(view.gram.n - len(view.new), view.gram.n)
        inside = np.einsum("gi,ij,gj->g", member, products[: len(old), : len(old)], member)
        lengths = np.sqrt(np.maximum(inside, 0.0))
        with_groups = products[fresh.start :, : len(old)] @ member.T  # over the newcomer's own length, which changes no order
        cosines = np.divide(with_groups, lengths, out=np.zeros_like(with_groups), where=lengths > 0)
        return {"labels": cosines.argmax(axis=1)}, {}


@dataclass(frozen=True, eq=False)
class FlexCflState:
    """Group models, who is in which, and the first updates, still with their owners."""

    models: tuple[Shared, ...]
    clustering: Clustering
    updates: Held
    evidence: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class FlexCflSettings:
    """What is fixed in a run."""

    train: Train
    k: int
    pretrain_scale: int
    starts: int
    weights: Weights
    seed: int


@ranged("algorithm")
def flexcfl(
    train: Train,
    *,
    k: Annotated[int, Key("Number of clusters.", "[1, inf)", "clusters")] = 2,
    pretrain_scale: Annotated[
        int, Key("At most so many clients for each cluster are clustered; all others are placed.", "[1, inf)", "clients")
    ] = PRETRAIN_SCALE,
    starts: Annotated[int, Key("Random starts of k-means.", "[1, inf)", "starts")] = STARTS,
    weights: Weights = "examples",
    seed: int = 0,
) -> Algorithm:
    """FlexCFL with `k` groups. Raises `InputError` for parameters that cannot be."""
    settings = FlexCflSettings(train, k, pretrain_scale, starts, weights, seed)
    return Algorithm(
        "flexcfl", ("gram", "mean"),
        partial(_init, settings), partial(_round, settings), partial(_serve, settings), partial(_admit, settings),
        partial(_describe, settings), public_groups=k > 1,
        schedule=schedule_of_averaging(
            train, Evaluate(train.model), start=[request(train.at(0), {"update": ("gram", "sum")})],
            joining=[request(TrainApart(train.at(0)), {"update": "gram"})],
        ),
    )  # fmt: skip


def _start(settings: FlexCflSettings) -> Shared:
    return Shared(settings.train.model.init(settings.seed))


def _init(settings: FlexCflSettings, federation: Federation) -> FlexCflState:
    """Group cold start, and the client cold start of all who were not drawn for it."""
    k, start = settings.k, _start(settings)
    enough_clients(k, len(federation.clients))
    held = federation.compute(settings.train.at(0), {"model": start})["update"]
    order = federation.stream("flexcfl cold start").permutation(len(held.clients))
    clustered = tuple(sorted(held.clients[at] for at in order[: settings.pretrain_scale * k]))
    released = federation.gram(held, then=ClusterByDirections(min(k, len(clustered)), settings.starts, settings.seed), on=clustered)
    labels = {client: int(label) for client, label in zip(clustered, released.result["labels"], strict=True)}
    if others := tuple(client for client in held.clients if client not in labels):
        placed = federation.gram(held, then=PlaceByCosine(), against=held, on=others).result["labels"]
        labels |= {client: int(label) for client, label in zip(others, placed, strict=True)}
    clustering = Clustering(held.clients, tuple(labels[client] for client in held.clients), k)
    clustering = with_late(clustering, federation.clients)
    means = try_mean(federation, held, settings.weights, clustering, k)
    models = moved(federation, (start,) * k, means, "update", clustering, held.clients)
    return FlexCflState(models, clustering, held, released.evidence)


def _round(settings: FlexCflSettings, federation: Federation, state: FlexCflState) -> tuple[FlexCflState, RoundRecord]:
    models, record = average_within(federation, state.models, state.clustering, settings.train, settings.weights)
    return replace(state, models=models), record


def _serve(settings: FlexCflSettings, state: FlexCflState) -> Served:
    return Served(Evaluate(settings.train.model), {"model": list(state.models)}, state.clustering)


def _admit(
    settings: FlexCflSettings, federation: Federation, state: FlexCflState, newcomers: Sequence[int]
) -> tuple[FlexCflState, Mapping[str, Any]]:
    """Newcomer cold start."""
    held = federation.compute(TrainApart(settings.train.at(0)), {"model": _start(settings)}, on=newcomers)["update"]
    released = federation.gram(held, then=PlaceByCosine(), against=state.updates)
    labels = [int(label) for label in released.result["labels"]]
    return replace(state, clustering=with_late(state.clustering.extended(held.clients, labels), newcomers)), {"joined": labels}


def _describe(settings: FlexCflSettings, state: FlexCflState) -> Mapping[str, Any]:
    return {"clustering": state.clustering, "evidence": state.evidence, "rule": f"k = {settings.k}"}


FLEXCFL = AlgorithmSpec(
    "flexcfl", flexcfl, "k-means on decomposed cosines of first updates, then FedAvg in each cluster (Duan et al. 2021)",
    states=(FlexCflState,), tasks=(TrainApart,), functions=(ClusterByDirections, PlaceByCosine),
    knowledge=lambda settings: f"the number of groups, k = {settings.get('k', 2)}",
)  # fmt: skip
