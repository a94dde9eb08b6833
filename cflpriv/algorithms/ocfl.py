"""OCFL: FedAvg until the clients' updates begin to point apart; then clients are clustered, once, by the density of their cosines.

Source: Zuziak, Pellungrini, Rinzivillo 2025, "One-Shot Clustering for Federated Learning" (arXiv 2503.04231; extended: arXiv 2509.01587),
and the authors' code (`energy_oneshot`). With Γ the matrix of cosine distances 1 − cos(Δ_i, Δ_j) of n clients' updates, the clustering
temperature is T(Γ) = ‖Γ‖_2 / λ with λ = √(4n(n − 1)) and the entrywise norm. In the first round whose temperature is above that of the
round before, HDBSCAN on Γ gives the clusters. Each starts from the shared model, and that round's updates are averaged inside clusters.

Deviations, each for a reason:
- Temperatures are real numbers, which a key holder does not release. So every client is compared by its updates of this round and of the
  one before, and both temperatures are taken where the comparison may be seen. That doubles what is compared. They are of the clients that
  have both.
- The method takes any clustering algorithm. This is HDBSCAN with clusters of `min_cluster_size` clients or more, 3 as in the authors'
  example, one of the two that the paper reports as best. Clients that it calls noise form one cluster, as in the authors' code.
- Until the clusters are there, all clients present train in every round, as in the authors' experiments. After that `[training]`
  decides who takes part.
- Clusters below the minimum cohort size join the nearest by mean cosine distance.
- The server's rate is 1. Averages are unweighted by default, as in the authors' code.
- A client whose training diverged in the deciding round (and is skipped), and one that was absent, joins the largest cluster. Newcomers
  before the clustering take part as all do. After it they train from the model that the deciding updates were computed at, and join the
  cluster to whose mean update theirs has the largest cosine. The paper has no newcomers.

What it reveals, by which operation: until the clusters are there, `gram` in every round but the first, two updates of everybody or under a
protection their angles and norms; the cluster of everybody; what FedAvg's `mean` shows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np

from ..clustering.cuts import merge_small
from ..contract.handles import Held, Shared
from ..contract.operations import Federation, GramView, Results
from ..contract.schedule import Schedule, request, scores
from ..contract.transcript import RoundRecord
from ..engine import Result, TaskInput
from ..keys import Key, ranged
from ..tasks.evaluation import Evaluate
from ..tasks.training import Train
from ..types import Array, Clustering, Parts
from .fedavg import Weights, average_within
from .flexcfl import PlaceByCosine
from .interface import Algorithm, AlgorithmSpec, BeforeRun, ComparedValue, Served
from .one_shot import with_late
from .shared.around import TrainApart
from .shared.attempts import try_mean
from .shared.steps import mean_notes, moved

__all__ = ["Beside", "ClusterByTemperature", "cosine_distances", "ocfl", "temperature"]

ROWS = 2
"""An update of the round before, and one of this round."""


def cosine_distances(products: Array) -> Array:
    """1 − cos (n, n) of vectors with inner products (n, n), in [0, 2], 0 on the diagonal. A vector of length 0 has cosine 0 with others."""
    lengths = np.sqrt(np.maximum(np.diag(products), 0.0))
    scale = lengths[:, None] * lengths[None, :]
    distances: Array = 1 - np.clip(np.divide(products, scale, out=np.zeros_like(products), where=scale > 0), -1.0, 1.0)
    distances = (distances + distances.T) / 2
    np.fill_diagonal(distances, 0.0)
    return distances


def temperature(distances: Array) -> float:
    """T(Γ) of cosine distances (n, n), in [0, 1]; 0 for fewer than two clients."""
    n = len(distances)
    return float(np.linalg.norm(distances) / np.sqrt(4 * n * (n - 1))) if n > 1 else 0.0


@dataclass(frozen=True)
class Beside:
    """The given updates "before" (d,) and "now" (d,), under one handle. Part: "rows" (2, d)."""

    uses_data: ClassVar[bool] = False

    parts: ClassVar[Parts] = {"rows": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, task_input: TaskInput) -> Result:
        return {"rows": np.stack([task_input.array("before"), task_input.array("now")])}


@dataclass(frozen=True)
class BesideItself:
    """The given update "now" (d,) twice, of a client that joins. Part: "rows" (2, d)."""

    uses_data: ClassVar[bool] = False

    parts: ClassVar[Parts] = {"rows": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, task_input: TaskInput) -> Result:
        return {"rows": np.stack([task_input.array("now")] * ROWS)}


@dataclass(frozen=True)
class ClusterByTemperature:
    """Public code run where the Gram may be seen: whether the temperature rose, and if so the clusters.

    Result: labels by first client, k, and `risen`, 1 where the temperature of the second rows is above that of the first. Evidence: the
    distances of this round and both temperatures.
    """

    results: ClassVar[Results] = {"labels": "all", "k": "one", "risen": "one"}

    min_cluster_size: int
    at_least: int = 1

    def __call__(self, view: GramView) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        n, everyone = view.gram.n, slice(0, view.gram.n)
        block = np.asarray(view.gram.block(everyone, everyone), np.float64)
        before, now = (cosine_distances(block[:, row, :, row].reshape(n, n)) for row in range(ROWS))
        risen = temperature(now) > temperature(before)
        labels = merge_small(self._dense(now), now, self.at_least) if risen else np.zeros(n, dtype=np.int64)
        view.memory["labels"] = labels
        result = {"labels": labels, "k": int(labels.max()) + 1, "risen": int(risen)}
        return result, {"distance": now, "clients": view.gram.clients, "temperature": temperature(now), "before": temperature(before)}

    def _dense(self, distances: Array) -> Array:
        """HDBSCAN's clusters, −1 for noise; one cluster of too few clients."""
        from sklearn.cluster import HDBSCAN  # slow to import

        if len(distances) < max(2, self.min_cluster_size):
            return np.zeros(len(distances), dtype=np.int64)
        return np.asarray(HDBSCAN(min_cluster_size=self.min_cluster_size, metric="precomputed", copy=True).fit(distances).labels_)


@dataclass(frozen=True, eq=False)
class OcflState:
    """One model, or after the clustering one a cluster, and who is in which.

    `last`: what clients hold of the last round's updates, before the clustering. `fired_at` and `compared`: the model that the deciding
    updates were computed at, and those that were compared, which stay with their owners.
    """

    models: tuple[Shared, ...]
    clustering: Clustering | None = None
    last: Held | None = None
    fired_at: Shared | None = None
    compared: Held | None = None
    evidence: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class OcflSettings:
    """What is fixed in a run."""

    train: Train
    min_cluster_size: int
    weights: Weights
    seed: int


@ranged("algorithm")
def ocfl(
    train: Train,
    *,
    min_cluster_size: Annotated[int, Key("Clients that a cluster of HDBSCAN has at least.", "[2, inf)", "clients")] = 3,
    weights: Weights = "equal",
    seed: int = 0,
) -> Algorithm:
    """OCFL with HDBSCAN. Raises `InputError` for parameters that cannot be."""
    settings = OcflSettings(train, min_cluster_size, weights, seed)
    return Algorithm(
        "ocfl", ("gram", "mean"),
        partial(_init, settings), partial(_round, settings), partial(_serve, settings), partial(_admit, settings), _describe,
        public_groups=True,
        schedule=Schedule(
            round=(request(train, {"update": "sum"}), request(Beside(), {"rows": "gram"})),
            joining=(request(TrainApart(train)), request(BesideItself(), {"rows": "gram"})), serving=(scores(Evaluate(train.model)),),
        ),
    )  # fmt: skip


def _init(settings: OcflSettings, federation: Federation) -> OcflState:
    return OcflState((Shared(settings.train.model.init(settings.seed)),))


def _round(settings: OcflSettings, federation: Federation, state: OcflState) -> tuple[OcflState, RoundRecord]:
    """A round of FedAvg, before the clustering with everybody and a look at the temperature, after it inside clusters."""
    if state.clustering is not None:
        models, record = average_within(federation, state.models, state.clustering, settings.train, settings.weights)
        return replace(state, models=models), replace(record, notes={**record.notes, "clustered": True})
    (model,) = state.models
    held = federation.compute(settings.train.at(federation.round), {"model": model})["update"]
    state, notes = _looked(settings, federation, state, held)
    clustering = state.clustering or Clustering(held.clients, (0,) * len(held.clients), 1)
    means = try_mean(federation, held, settings.weights, clustering, clustering.k)
    models = moved(federation, (model,) * clustering.k, means, "update", clustering, held.clients)
    record = RoundRecord(
        federation.round, held.clients, tuple(clustering[client] for client in held.clients), {**mean_notes(means), **notes}
    )
    return replace(state, models=models, last=None if state.clustering else held), record


def _looked(settings: OcflSettings, federation: Federation, state: OcflState, held: Held) -> tuple[OcflState, dict[str, Any]]:
    """Whether the temperature of these updates exceeds the previous temperature, and the clusters in that case."""
    both = () if state.last is None else tuple(client for client in held.clients if client in state.last.clients)
    if len(both) < 2 or state.last is None:
        return state, {"clustered": False}
    rows = federation.compute(Beside(), {"before": state.last, "now": held}, on=both)["rows"]
    released = federation.gram(rows, then=ClusterByTemperature(settings.min_cluster_size, federation.merge_below))
    evidence = released.evidence
    notes = {"clustered": bool(released.result["risen"])} | ({} if evidence is None else {"temperature": evidence["temperature"]})
    if not int(released.result["risen"]):
        federation.close(rows)
        return state, notes
    labels = tuple(int(label) for label in released.result["labels"])
    clustering = with_late(Clustering(rows.clients, labels, int(released.result["k"])), sorted({*federation.clients, *held.clients}))
    return replace(state, clustering=clustering, fired_at=state.models[0], compared=rows, evidence=evidence), notes


def _serve(settings: OcflSettings, state: OcflState) -> Served:
    model = state.models[0] if state.clustering is None else list(state.models)
    return Served(Evaluate(settings.train.model), {"model": model}, state.clustering)


def _admit(
    settings: OcflSettings, federation: Federation, state: OcflState, newcomers: Sequence[int]
) -> tuple[OcflState, Mapping[str, Any]]:
    if state.clustering is None or state.fired_at is None or state.compared is None:
        return state, {}
    task = TrainApart(settings.train.at(federation.round))
    held = federation.compute(task, {"model": state.fired_at}, on=newcomers)["update"]
    rows = federation.compute(BesideItself(), {"now": held}, on=held.clients)["rows"]
    released = federation.gram(rows, then=PlaceByCosine(), against=state.compared)
    labels = [int(label) for label in released.result["labels"]]
    return replace(state, clustering=with_late(state.clustering.extended(rows.clients, labels), newcomers)), {"joined": labels}


def _describe(state: OcflState) -> Mapping[str, Any]:
    """Whether there are clear clusters is not known before the first round."""
    described = {"clustering": state.clustering, "evidence": state.evidence, "rule": "HDBSCAN in the first round whose temperature rises"}
    return described if state.clustering is None and state.last is None else {**described, "clear": state.clustering is not None}


def _never_clusters(settings: Mapping[str, Any], before: BeforeRun) -> str:
    return f"it compares the temperatures of two rounds, and the run has {before.rounds} rounds" if 0 < before.rounds < ROWS else ""


OCFL = AlgorithmSpec(
    "ocfl", ocfl, "FedAvg until updates point apart, then one clustering by density of cosines (Zuziak et al. 2025)",
    states=(OcflState,), tasks=(Beside, BesideItself, TrainApart), functions=(ClusterByTemperature, PlaceByCosine),
    compared=lambda settings: ComparedValue(ROWS), never_clusters=_never_clusters,
    knowledge=lambda settings: f"a density, min_cluster_size = {settings.get('min_cluster_size', 3)}",
)  # fmt: skip
