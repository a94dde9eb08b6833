"""FedGWC: clients whose losses are usual in the same cohorts belong together; a matrix of such rewards is clustered, again and again.

Source: Licciardi et al. 2025 (ICML), "Interaction-Aware Gaussian Weighting for Clustered Federated Learning" (arXiv 2502.03340), and the
authors' code (`agents/servers.py`, `ServerFedGWC`). In each round and cluster, with the losses l_is of the cohort's clients at local
steps s, their mean m_s and variance σ_s² over the cohort:

- reward r_i = mean over s of exp(−(l_is − m_s)² / 2σ_s²), weight ω_i = r_i / Σ r;
- interaction matrix P_ij ← (1 − α) P_ij + α ω_i for all i, j of the cohort, α being its share of the cluster;
- the mean squared change of P over the cohort is averaged in the same way. After so many rounds below ε in a row as make every client
  expected once, the cluster is split: the affinity of two clients is exp(−γ d²), d being the distance of their columns of P, scaled to
  [0, 1], without the entries of these two; spectral clustering into 2 to 4 parts, and the number of parts with the lowest Davies-Bouldin
  index, if that is below 1.

The parts start from the cluster's model and its P, and are split further while they have more clients than a cohort.

Deviations, each for a reason:
- Losses are of all training samples, before and after the local training (two steps s). The authors take the loss of each batch, of which
  a client's work leaves no record here. The mean and variance over the cohort are unweighted: the server does not know sample counts.
- Who takes part follows from `[training]`. The authors draw equally many clients from every cluster.
- A round with fewer than two clients of a cluster leaves its P as it is; a client whose loss is no number does not count. A split into
  a part below the minimum cohort size is not made, nor one of a matrix whose affinities are all equal: rounding would decide it.
- γ = 0.1 and ε = 1e-5 as in the authors' configuration.
- Newcomers join the cluster of lowest training loss, with the mean of P in their row and column. The paper has no newcomers.

With full participation every column of P is the same and no cluster is ever split: the method lives on who meets whom.

What it reveals, by which operation: `gather` shows two losses of everybody in every round, under secure sums, too; the cluster of
everybody; then what FedAvg's `mean` shows inside clusters.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np

from ..contract.handles import Shared
from ..contract.operations import Federation
from ..contract.schedule import Schedule, request, scores
from ..contract.transcript import RoundRecord
from ..engine import Device, Result, TaskInput
from ..keys import Key, ranged
from ..tasks.evaluation import Evaluate, Losses
from ..tasks.training import Train
from ..types import Array, Clustering, Parts
from .fedavg import Weights
from .interface import Algorithm, AlgorithmSpec, BeforeRun, Served
from .shared.around import AroundTraining
from .shared.attempts import choices
from .shared.choosing import PickAndTrain, WithoutWork
from .shared.steps import mean_notes, moved

__all__ = ["GwcCluster", "TrainAndTell", "affinities", "best_parts", "fedgwc", "gaussian_weights", "interacted"]

GAMMA, EPS = 0.1, 1e-5
MOST_PARTS = 4
"""A cluster is split into so many parts at most."""
LEAST_VARIANCE = 1e-16
ALIKE = 1e-9
"""Affinities that differ by less are equal."""


def gaussian_weights(losses: Array) -> Array:
    """ω (n,), which sum to 1, of the losses (n, steps) of a cohort."""
    variance = losses.var(axis=0) + LEAST_VARIANCE
    rewards = np.exp(-((losses - losses.mean(axis=0)) ** 2) / (2 * variance)).mean(axis=1)
    return np.asarray(rewards / rewards.sum())


def interacted(matrix: Array, here: Sequence[int], weights: Array) -> tuple[Array, float]:
    """P (n, n) after a round in which the clients `here` (positions) had `weights`, and the mean squared change of their entries."""
    alpha, updated = len(here) / len(matrix), matrix.copy()
    places = np.ix_(list(here), list(here))
    updated[places] = (1 - alpha) * matrix[places] + alpha * weights[:, None]
    return updated, float(np.square(updated[places] - matrix[places]).mean())


def affinities(matrix: Array, gamma: float) -> Array:
    """The affinity (n, n), 0 on the diagonal, of the columns of P (n, n)."""
    columns = matrix.T
    columns = (columns - columns.min()) / max(float(np.ptp(columns)), 1e-8)
    columns = columns - columns.mean(axis=0)
    own, norms = np.diag(columns), np.square(columns).sum(axis=1)
    squares = norms[:, None] + norms[None, :] - 2 * columns @ columns.T
    # left out are the entry of the first of the two and that of the second
    left_out = np.square(own[:, None] - columns.T) + np.square(columns - own[None, :])
    kernel: Array = np.exp(-gamma * np.maximum(squares - left_out, 0.0))
    np.fill_diagonal(kernel, 0.0)
    return kernel


def best_parts(affinity: Array, most: int, seed: int) -> Array | None:
    """Labels (n,) of the spectral clustering into 2 to `most` parts with the lowest Davies-Bouldin index; None if none is below 1."""
    from sklearn.cluster import SpectralClustering  # slow to import
    from sklearn.manifold import SpectralEmbedding
    from sklearn.metrics import davies_bouldin_score

    n, best, lowest = len(affinity), None, 1.0
    others = affinity[~np.eye(n, dtype=bool)]
    if n < 3 or float(np.ptp(others)) < ALIKE:
        return None
    for parts in range(2, min(most, n - 1) + 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a graph in several pieces
            warnings.filterwarnings("ignore", "k >= N", RuntimeWarning)  # of few clients, whose eigenvectors are all computed
            points = SpectralEmbedding(parts, affinity="precomputed", random_state=seed % 2**32).fit_transform(affinity)
            clustering = SpectralClustering(
                parts, n_components=parts, affinity="precomputed", assign_labels="cluster_qr", random_state=seed % 2**32
            )
            labels = clustering.fit(affinity).labels_
        if len(np.unique(labels)) > 1 and (index := float(davies_bouldin_score(points, labels))) < lowest:
            best, lowest = np.asarray(np.unique(labels, return_inverse=True)[1]), index
    return best


@dataclass(frozen=True)
class TrainAndTell(AroundTraining):
    """Train the given "model". Parts: "update" (d,), and "losses" (2,) float64, the mean training loss before and after."""

    gives: ClassVar[Parts] = {"update": "summed", "losses": "score"}
    beyond = ""

    def after(self, task_input: TaskInput, inner: TaskInput, result: Result) -> Result:
        start = task_input.array("model")
        both = replace(task_input, params={"model": [start, start + np.asarray(result["update"])]})
        return {"update": result["update"], "trained": result["trained"], "losses": Losses(self.train.model).run(both)["losses"]}

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        results, path = self.train.run_many(inputs, device)
        return [
            self.after(task_input, task_input, result) if result else {} for task_input, result in zip(inputs, results, strict=True)
        ], path


@dataclass(frozen=True, eq=False)
class GwcCluster:
    """One cluster: its clients in the order of `matrix` (n, n), and the average `change` of it, for `calm` rounds small.

    A cluster that is not `open` is never split.
    """

    clients: tuple[int, ...]
    matrix: Array
    change: float = 1.0
    calm: int = 0
    open: bool = True


@dataclass(frozen=True, eq=False)
class FedGwcState:
    """Models of the clusters, and the clusters."""

    models: tuple[Shared, ...]
    clusters: tuple[GwcCluster, ...]

    @property
    def clustering(self) -> Clustering:
        """Who is in which cluster, clients ascending."""
        labels = {client: label for label, cluster in enumerate(self.clusters) for client in cluster.clients}
        clients = tuple(sorted(labels))
        return Clustering(clients, tuple(labels[client] for client in clients), len(self.clusters))


@dataclass(frozen=True)
class FedGwcSettings:
    """What is fixed in a run."""

    train: Train
    gamma: float
    eps: float
    weights: Weights
    seed: int


@ranged("algorithm")
def fedgwc(
    train: Train,
    *,
    gamma: Annotated[float, Key("Of the affinity exp(−γ d²) of two clients.", "(0, inf)")] = GAMMA,
    eps: Annotated[float, Key("A cluster may split where the mean squared change of its matrix is below this.", "(0, inf)")] = EPS,
    weights: Weights = "examples",
    seed: int = 0,
) -> Algorithm:
    """FedGWC. Raises `InputError` for parameters that cannot be."""
    settings = FedGwcSettings(train, gamma, eps, weights, seed)
    return Algorithm(
        "fedgwc", ("gather", "mean"),
        partial(_init, settings), partial(_round, settings), partial(_serve, settings), partial(_admit, settings), _describe,
        public_groups=True, schedule=_schedule(train),
    )  # fmt: skip


def _schedule(train: Train) -> Schedule:
    """A training each round, whose losses are shown; who joins shows a choice."""
    return Schedule(
        round=(request(TrainAndTell(train), {"update": "sum", "losses": "gather"}),),
        joining=(request(_choosing(train), {"choice": "gather"}),), serving=(scores(Evaluate(train.model)),),
    )  # fmt: skip


def _choosing(train: Train) -> PickAndTrain:
    return PickAndTrain(Losses(train.model), WithoutWork(), "nothing")


def _init(settings: FedGwcSettings, federation: Federation) -> FedGwcState:
    n = len(federation.clients)
    everyone = GwcCluster(tuple(federation.clients), np.full((n, n), 1 / n**2 if n else 0.0))
    return FedGwcState((Shared(settings.train.model.init(settings.seed)),), (everyone,))


def _round(settings: FedGwcSettings, federation: Federation, state: FedGwcState) -> tuple[FedGwcState, RoundRecord]:
    """FedAvg inside each cluster, then the losses, and the splits of clusters whose matrix has settled."""
    clustering = state.clustering
    placed, k = set(clustering.clients), clustering.k
    strata = {client: clustering[client] if client in placed else k for client in federation.clients}
    cohort = tuple(client for client in federation.cohort(strata) if client in placed)
    task = TrainAndTell(settings.train.at(federation.round))
    held = federation.compute(task, {"model": list(state.models)}, which=clustering, on=cohort)
    means = federation.mean(held["update"], weights=settings.weights, groups=clustering, k=k)
    models = moved(federation, state.models, means, "update", clustering, held.clients)
    gathered = {client: row["losses"] for client, row in federation.gather(held["losses"]).items() if np.isfinite(row["losses"]).all()}
    kept, opened, parents = list[GwcCluster](), list[GwcCluster](), list[int]()
    for label, cluster in enumerate(state.clusters):
        losses = {client: gathered[client] for client in cluster.clients if client in gathered}
        first, *others = _parts(settings, _with_losses(settings, cluster, losses), len(losses), federation.merge_below)
        kept.append(first)
        opened += others
        parents += [label] * len(others)
    notes = {**mean_notes(means), "split": parents}
    record = RoundRecord(federation.round, held.clients, tuple(clustering[client] for client in held.clients), notes)
    return FedGwcState((*models, *(models[label] for label in parents)), (*kept, *opened)), record


def _with_losses(settings: FedGwcSettings, cluster: GwcCluster, losses: Mapping[int, Array]) -> GwcCluster:
    """The cluster after its clients' losses (2,) of a round."""
    if not cluster.open or len(losses) < 2:
        return cluster
    here = [at for at, client in enumerate(cluster.clients) if client in losses]
    rows = np.stack([np.asarray(losses[cluster.clients[at]], np.float64) for at in here])
    matrix, change = interacted(cluster.matrix, here, gaussian_weights(rows))
    alpha = len(here) / len(cluster.clients)
    average = (1 - alpha) * cluster.change + alpha * change
    return replace(cluster, matrix=matrix, change=average, calm=cluster.calm + 1 if average < settings.eps else 0)


def _parts(settings: FedGwcSettings, cluster: GwcCluster, here: int, at_least: int) -> list[GwcCluster]:
    """The cluster itself, or its parts if it splits after a round with `here` of its clients."""
    n = len(cluster.clients)
    if not cluster.open or here < 2 or cluster.calm < max(1, round(n / here)):
        return [cluster]
    labels = best_parts(affinities(cluster.matrix, settings.gamma), min(MOST_PARTS, n // here), settings.seed)
    if labels is None or int(np.bincount(labels).min()) < at_least:
        return [replace(cluster, change=1.0, calm=0)]
    parts = []
    for label in range(int(labels.max()) + 1):
        positions = np.flatnonzero(labels == label)
        clients = tuple(cluster.clients[at] for at in positions)
        parts.append(GwcCluster(clients, cluster.matrix[np.ix_(positions, positions)], open=len(positions) > here))
    return parts


def _serve(settings: FedGwcSettings, state: FedGwcState) -> Served:
    return Served(Evaluate(settings.train.model), {"model": list(state.models)}, state.clustering)


def _admit(
    settings: FedGwcSettings, federation: Federation, state: FedGwcState, newcomers: Sequence[int]
) -> tuple[FedGwcState, Mapping[str, Any]]:
    """Newcomers choose the cluster of lowest training loss, without training; one whose choice did not come joins the first."""
    held = federation.compute(_choosing(settings.train), {"model": list(state.models)}, on=newcomers)
    chosen = choices(federation, held["choice"], len(state.models)) or {}
    clusters = list(state.clusters)
    for client in newcomers:
        label = chosen.get(client, 0)
        clusters[label] = _with_newcomer(clusters[label], client)
    return replace(state, clusters=tuple(clusters)), {"joined": [chosen.get(client, 0) for client in newcomers]}


def _with_newcomer(cluster: GwcCluster, client: int) -> GwcCluster:
    matrix = np.pad(cluster.matrix, (0, 1), constant_values=float(cluster.matrix.mean()) if cluster.matrix.size else 0.0)
    return replace(cluster, clients=(*cluster.clients, client), matrix=matrix)


def _describe(state: FedGwcState) -> Mapping[str, Any]:
    return {"clustering": state.clustering, "rule": "spectral clustering with the lowest Davies-Bouldin index"}


def _never_clusters(settings: Mapping[str, Any], before: BeforeRun) -> str:
    return "all clients meet in every round (training.participation = 1), so nothing tells them apart" if before.participation == 1 else ""


FEDGWC = AlgorithmSpec(
    "fedgwc", fedgwc, "recursive spectral clustering of who has usual losses with whom (Licciardi et al. 2025)",
    states=(GwcCluster, FedGwcState), tasks=(PickAndTrain, TrainAndTell, WithoutWork), cohorts="labelled",
    renumbers=True, serves_released=True,
    sample_refused="no private form of its losses is written", never_clusters=_never_clusters, begins={"training.participation": 0.5},
    knowledge=lambda settings: f"a settled matrix of rewards, eps = {settings.get('eps', EPS):g}, and the lowest Davies-Bouldin index",
)  # fmt: skip
