"""R-DPCFL: clusters drawn from a mixture of noisy gradients first, then chosen by clients, under sample-level differential privacy.

Source: Malekmohammadi, Taïk & Farnadi 2025 (TMLR), "Differentially Private Clustered Federated Learning". Every client trains by DP-SGD
with noise of its own. The noise of a step is smallest beside its signal with the full batch, so each client takes one such step first.
The server projects what it gets on its first two principal components, scales each to [0, 1], and fits a Gaussian mixture with k spherical
components. The separation of two components is the distance of their means over twice the larger deviation, their overlap
1 − erf(separation / √2). Three stages follow, of T rounds in all:

1. For ⌊(1 − largest overlap) T / 2⌋ rounds each client's cluster is drawn from its posterior, anew in each round.
2. For ⌈T / 10⌉ rounds clients choose the model with the lowest loss, privately, as in IFCA.
3. Then the last choice stays.

Without `k` the number of components is the one, of 2 to 10, whose smallest pairwise separation is largest. It is never one.

Deviations, each for a reason:
- The first step is compared by `gram`, so that every protection of comparisons applies. A step is minus the rate times the mean gradient,
  and principal components follow from inner products. Under sample-level privacy this is the noisy sum of clipped gradients at the initial
  model in `privacy.sketch_dim` dimensions, in which there is less noise. It is not divided by the number of samples, which is private:
  numbers that differ much would show. Without privacy gradients of large models are sketched, too.
- The first step moves no model: what is compared is not averaged. All models start from the initial one, and T rounds of training follow.
  They come apart in the first round, so stage 1 has one round at least.
- Only labels reach the server: where the Gram may be seen each round's are drawn, by public randomness, and the stage is reported.
- No more components than half of the clients are tried, because a component of one client is separated from all. Fewer than four
  clients are one cluster.
- Posteriors have equal weights of the components, as in the authors' program.
- Clients choose by the exponential mechanism on sums of losses that are cut at a cap (`tasks.evaluation.Losses`), in place of training
  accuracies with Gumbel noise. All choices together cost `privacy.choice_share` (the authors: 3 % of ε each), the first step
  `privacy.signature_share`.
- A client that was not compared (it came later, or its training diverged) takes part in stage 2, or once it was admitted. Newcomers join
  the cluster whose model has the lowest training loss.
- Members of drawn clusters below the size at which clusters should merge take their next most probable cluster for that round.

What it reveals, by which operation: `gram`, once, a gradient of each client, or under a protection its products with others. The cluster of
everybody, drawn anew in each round of stage 1, which in time shows its posterior. `gather`, the choices of stage 2. Then what `mean` shows
inside clusters.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np

from ..contract.handles import Held, Shared
from ..contract.operations import Federation, GramView, Results
from ..contract.schedule import Schedule, at_round, request, scores
from ..contract.transcript import RoundRecord
from ..keys import Key, ranged
from ..privacy.settings import Releases
from ..randomness import Stream, stream
from ..tasks.evaluation import Evaluate, Losses
from ..tasks.training import Gradient, Train
from ..types import Array
from .fedavg import Weights, average_within
from .interface import Algorithm, AlgorithmSpec, Served
from .one_shot import STARTS
from .shared.attempts import choices, try_mean
from .shared.checks import RunLength, enough_clients, length_of_run
from .shared.choosing import EvaluateLowest, PickAndTrain, WithoutWork
from .shared.steps import clustering_of, mean_notes, moved
from .stocfl.representing import Represent
from .stocfl.stocfl import SKETCH_ABOVE, SKETCH_DIM

__all__ = ["DrawByMixture", "Mixture", "choice_rounds", "drawn", "fitted", "principal_points", "r_dpcfl"]

MOST_COMPONENTS = 10
COMPONENTS = 2
"""The number of principal components."""
ROUNDING = 1e-12
"""An eigenvalue below so much of the trace cannot be distinguished from zero."""


# --- the mixture


def principal_points(products: Array, error: float = 0.0) -> Array:
    """The first two principal components (n, 2) of vectors with inner products (n, n), each scaled to [0, 1].

    A component is zero where it cannot be distinguished from rounding, or from errors of the products of standard deviation `error`.
    """
    n = len(products)
    products = (products + products.T) / 2
    rows = products.mean(axis=0)
    values, vectors = np.linalg.eigh(products - rows[:, None] - rows[None, :] + rows.mean())
    points = np.zeros((n, COMPONENTS))
    least = max(ROUNDING * float(np.trace(products)), 2 * np.sqrt(n) * error)
    for component in range(min(n, COMPONENTS)):
        column = vectors[:, -1 - component]
        width = float(np.ptp(column))
        if values[-1 - component] > least and width > 0:
            points[:, component] = (column - column.min()) / width
    return points


@dataclass(frozen=True, eq=False)
class Mixture:
    """k spherical Gaussians of equal weight: `means` (k, r) and `deviations` (k,), the same along each axis."""

    means: Array
    deviations: Array

    @property
    def separation(self) -> float:
        """The smallest over pairs of components: the distance of their means over twice the larger deviation. Infinite for one."""
        first, second = np.triu_indices(len(self.means), 1)
        if not len(first):
            return float("inf")
        distances = np.linalg.norm(self.means[first] - self.means[second], axis=1)
        return float((distances / (2 * np.maximum(self.deviations[first], self.deviations[second]))).min())

    @property
    def overlap(self) -> float:
        """The largest over pairs of components, 1 − erf(separation / √2), in [0, 1]."""
        from scipy.special import erfc  # slow to import

        return float(erfc(self.separation / np.sqrt(2)))

    def log_posteriors(self, points: Array) -> Array:
        """The logarithm of the probability (n, k) that each of the points (n, r) is from each component."""
        from scipy.special import logsumexp  # slow to import

        squares = ((points[:, None, :] - self.means[None]) ** 2).sum(axis=2)
        logs = -squares / (2 * self.deviations**2) - points.shape[1] * np.log(self.deviations)
        return np.asarray(logs - logsumexp(logs, axis=1, keepdims=True))


def fitted(points: Array, k: int | None, seed: int, starts: int = STARTS) -> Mixture:
    """The most likely mixture of `k` components on points (n, r), by expectation-maximisation; components are numbered by first point.

    Without `k` the one of 2 to 10 components, at most n / 2, with the largest separation; one component for fewer than four points. With
    fewer different points than components these are all alike. `starts`: how often k-means is begun for each k, from a public `seed`.
    """
    from sklearn.exceptions import ConvergenceWarning  # slow to import
    from sklearn.mixture import GaussianMixture

    if k is None:
        numbers = range(2, min(MOST_COMPONENTS, len(points) // 2) + 1)
        tried = [fitted(points, number, seed, starts) for number in numbers]
        return max(tried, key=lambda mixture: mixture.separation) if tried else fitted(points, 1, seed, starts)
    if k == 1 or len(np.unique(points, axis=0)) < k:
        return Mixture(np.zeros((k, points.shape[1])), np.ones(k))
    model = GaussianMixture(k, covariance_type="spherical", n_init=starts, max_iter=200, random_state=seed % 2**32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(points)
    estimate = Mixture(np.asarray(model.means_), np.sqrt(model.covariances_))
    nearest = estimate.log_posteriors(points).argmax(axis=1)
    met = list(dict.fromkeys(int(label) for label in nearest))
    order = met + [label for label in range(k) if label not in met]
    return Mixture(estimate.means[order], estimate.deviations[order])


def drawn(log_posteriors: Array, rng: Stream, smallest: int = 1) -> Array:
    """A label (n,) for each row of `log_posteriors` (n, k), drawn from it.

    Members of clusters with fewer than `smallest` take the most probable of the clusters that are left, the smallest cluster first.
    """
    n, k = log_posteriors.shape
    sums = np.exp(log_posteriors).cumsum(axis=1)
    labels = np.minimum((sums < rng.random((n, 1))).sum(axis=1), k - 1)
    left = np.ones(k, dtype=bool)
    while left.sum() > 1:
        sizes = np.bincount(labels, minlength=k)
        small = np.flatnonzero((sizes > 0) & (sizes < smallest))
        if not len(small):
            break
        gone = small[sizes[small].argmin()]
        left[gone] = False
        labels[labels == gone] = np.where(left, log_posteriors[labels == gone], -np.inf).argmax(axis=1)
    return np.asarray(labels, dtype=np.int64)


@dataclass(frozen=True)
class DrawByMixture:
    """Public code run where the Gram may be seen: each client's cluster for `round`, drawn from its posterior.

    The mixture, of `k` components or as many as are separated best, is fitted at the first call and remembered. `rounds` is T. Result:
    labels and k; `soft`, 1 while stage 1 lasts, else 0. Evidence: distances, the posteriors (n, k), the separation and the overlap.
    """

    results: ClassVar[Results] = {"labels": "all", "k": "one", "soft": "one"}

    k: int | None
    rounds: int
    round: int
    seed: int
    at_least: int = 1
    starts: int = STARTS

    def __call__(self, view: GramView) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        everyone = slice(0, view.gram.n)
        products = np.asarray(view.gram.block(everyone, everyone), np.float64).reshape(view.gram.n, view.gram.n)
        memory = view.memory
        if "log_posteriors" not in memory:
            points = principal_points(products, view.gram.error)
            mixture = fitted(points, self.k, self.seed, self.starts)
            memory["log_posteriors"] = mixture.log_posteriors(points)
            memory["separation"], memory["overlap"] = mixture.separation, mixture.overlap
        logs: Array = memory["log_posteriors"]
        labels = drawn(logs, stream(self.seed, "r_dpcfl draw", self.round), self.at_least)
        soft = self.round < max(1, int((1 - memory["overlap"]) * self.rounds / 2))
        own = np.diag(products)
        evidence = {
            "distance": np.sqrt(np.maximum(own[:, None] + own[None, :] - products - products.T, 0.0)), "clients": view.gram.clients,
            "posteriors": np.exp(logs), "separation": memory["separation"], "overlap": memory["overlap"],
        }  # fmt: skip
        return {"labels": labels, "k": logs.shape[1], "soft": int(soft)}, evidence


# --- the algorithm


@dataclass(frozen=True, eq=False)
class RDpcflState:
    """Cluster models, and the cluster of each client that has one: drawn for the next round, or chosen.

    `signatures` are what clients that were compared hold. `chosen_from`: the first round of stage 2, None before it.
    """

    models: tuple[Shared, ...]
    labels: Mapping[int, int]
    signatures: Held
    evidence: Mapping[str, Any] | None = None
    chosen_from: int | None = None


@dataclass(frozen=True)
class RDpcflSettings:
    """What is fixed in a run: training, k, T (`rounds`), the first step, and the model that all begin with."""

    train: Train
    k: int | None
    rounds: int
    represent: Represent
    start: Array
    weights: Weights
    seed: int


@ranged("algorithm")
def r_dpcfl(
    train: Train,
    *,
    k: Annotated[int | None, Key("Number of clusters.", "[1, inf)", "clusters", default="as many as are separated best")] = None,
    rounds: RunLength = 50,
    weights: Weights = "equal",
    seed: int = 0,
) -> Algorithm:
    """R-DPCFL with `k` clusters, or as many as are separated best, over a run of `rounds` rounds, by which the stages are dealt.

    In a configuration `rounds` follows from `training.rounds`. Raises `InputError` for parameters that cannot be.
    """
    model = train.model
    sketch = SKETCH_DIM if model.dimension > SKETCH_ABOVE else 0
    represent = Represent(Gradient(model, train.on_divergence), normalise=False, sketch=sketch, seed=seed)
    settings = RDpcflSettings(train, k, rounds, represent, model.init(seed), weights, seed)
    return Algorithm(
        "r_dpcfl", ("gram", "gather", "mean"),
        partial(_init, settings), partial(_round, settings), partial(_serve, settings), partial(_admit, settings),
        partial(_describe, settings), public_groups=True, schedule=_schedule(settings),
    )  # fmt: skip


def _schedule(settings: RDpcflSettings) -> Schedule:
    """A first step once; each round a training, in stage 2 of a model that the client chooses."""
    train = settings.train
    chosen = [request(_picking(settings), {"step": "sum", "choice": "gather"})] if choice_rounds(settings.rounds) else []
    return Schedule(
        (request(settings.represent, {"representation": "gram"}),), (request(train, {"update": "sum"}), *chosen),
        (request(_choosing(settings), {"choice": "gather"}),), (scores(_evaluating(settings)),),
    )  # fmt: skip


def _picking(settings: RDpcflSettings) -> PickAndTrain:
    return PickAndTrain(Losses(settings.train.model), settings.train, "update")


def _choosing(settings: RDpcflSettings) -> PickAndTrain:
    return PickAndTrain(Losses(settings.train.model), WithoutWork(), "nothing")


def _evaluating(settings: RDpcflSettings) -> EvaluateLowest:
    return EvaluateLowest(Losses(settings.train.model), Evaluate(settings.train.model))


def choice_rounds(rounds: int) -> int:
    """In how many of T `rounds` clients choose: a tenth, rounded up; none of a single round, which is of stage 1."""
    return min(-(-rounds // 10), max(0, rounds - 1))


def _init(settings: RDpcflSettings, federation: Federation) -> RDpcflState:
    """The first step of all clients, and the clusters that are drawn for the first round."""
    enough_clients(settings.k, len(federation.clients))
    start = Shared(settings.start)
    held = federation.compute(settings.represent, {"model": start})["representation"]
    released = federation.gram(held, then=_draw(settings, federation, 0))
    labels = {client: int(label) for client, label in zip(held.clients, released.result["labels"], strict=True)}
    return RDpcflState((start,) * int(released.result["k"]), labels, held, released.evidence)


def _draw(settings: RDpcflSettings, federation: Federation, round: int) -> DrawByMixture:
    return DrawByMixture(settings.k, settings.rounds, round, settings.seed, federation.merge_below)


def _round(settings: RDpcflSettings, federation: Federation, state: RDpcflState) -> tuple[RDpcflState, RoundRecord]:
    """The clusters are drawn, chosen, or stay; then clients train the model of theirs."""
    if state.chosen_from is None and federation.round > 0:
        state = _redrawn(settings, federation, state)
    if state.chosen_from is not None and federation.round < state.chosen_from + choice_rounds(settings.rounds):
        return _chosen(settings, federation, state)
    clustering = clustering_of(state.labels, len(state.models))
    models, record = average_within(federation, state.models, clustering, settings.train, settings.weights)
    stage = "drawn" if state.chosen_from is None else "fixed"
    return replace(state, models=models), replace(record, notes={**record.notes, "stage": stage})


def _redrawn(settings: RDpcflSettings, federation: Federation, state: RDpcflState) -> RDpcflState:
    """The clusters of this round; those of the last one where stage 2 begins."""
    held = state.signatures
    result = federation.gram(held, then=_draw(settings, federation, federation.round), against=held, on=()).result
    if not int(result["soft"]):
        return replace(state, chosen_from=federation.round)
    labels = {client: int(label) for client, label in zip(held.clients, result["labels"], strict=True)}
    return replace(state, labels={**state.labels, **labels})


def _chosen(settings: RDpcflSettings, federation: Federation, state: RDpcflState) -> tuple[RDpcflState, RoundRecord]:
    """A round of stage 2: clients choose a model and train it."""
    k = len(state.models)
    cohort = federation.cohort({client: state.labels.get(client, k) for client in federation.clients})
    held = federation.compute(at_round(_picking(settings), federation.round), {"model": list(state.models)}, on=cohort)
    chosen = choices(federation, held["choice"], k) or {}
    held, labels = held.of(chosen), {**state.labels, **chosen}
    means = try_mean(federation, held["step"], settings.weights, labels, k)  # what was chosen, and paid for, stays without a mean, too
    models = moved(federation, state.models, means, "step", chosen, held.clients)
    changed = sum(state.labels.get(client) != label for client, label in chosen.items())
    notes = {**mean_notes(means), "stage": "chosen", "changed_identities": changed}
    record = RoundRecord(federation.round, held.clients, tuple(chosen[client] for client in held.clients), notes)
    return replace(state, models=models, labels=labels), record


def _serve(settings: RDpcflSettings, state: RDpcflState) -> Served:
    """The model of a client's cluster, or that of lowest training loss for a client without one."""
    which = _Among({client: (label,) for client, label in state.labels.items()}, tuple(range(len(state.models))))
    return Served(_evaluating(settings), {"model": list(state.models)}, which)


@dataclass(frozen=True, eq=False)
class _Among:
    """The models that each client picks from, and `otherwise` those of all others."""

    labels: Mapping[int, tuple[int, ...]]
    otherwise: tuple[int, ...]

    def __getitem__(self, client: int, /) -> tuple[int, ...]:
        return self.labels.get(client, self.otherwise)


def _admit(
    settings: RDpcflSettings, federation: Federation, state: RDpcflState, newcomers: Sequence[int]
) -> tuple[RDpcflState, Mapping[str, Any]]:
    """Newcomers choose the model of lowest training loss, without training."""
    held = federation.compute(_choosing(settings), {"model": list(state.models)}, on=newcomers)
    labels = choices(federation, held["choice"], len(state.models)) or {}
    return replace(state, labels={**state.labels, **labels}), {"joined": [labels[client] for client in sorted(labels)]}


def _describe(settings: RDpcflSettings, state: RDpcflState) -> Mapping[str, Any]:
    rule = "largest separation" if settings.k is None else f"k = {settings.k}"
    return {"clustering": clustering_of(state.labels, len(state.models)), "evidence": state.evidence, "rule": rule}


def _sample_releases(rounds: int, settings: Mapping[str, Any]) -> Releases:
    """The first step, then an update in each round and a choice in those of stage 2."""
    return Releases(signatures=1, trainings=rounds, choices=choice_rounds(rounds), mechanism="total")


def _knowledge(settings: Mapping[str, Any]) -> str:
    k = settings.get("k")
    return f"none: the best separated mixture of 2 to {MOST_COMPONENTS}" if k is None else f"the number of groups, k = {k}"


R_DPCFL = AlgorithmSpec(
    "r_dpcfl", r_dpcfl, "clusters drawn from a mixture of noisy gradients, then chosen (Malekmohammadi et al. 2025)",
    states=(RDpcflState,), tasks=(EvaluateLowest, PickAndTrain, Represent, WithoutWork), functions=(DrawByMixture,),
    sample_releases=_sample_releases, cohorts="labelled", defaults=length_of_run, knowledge=_knowledge,
)  # fmt: skip
