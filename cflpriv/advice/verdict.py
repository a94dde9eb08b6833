"""What to deploy: the rule, over sums of clients' scores on held-out samples.

The score is the report's, but for rare classes and heavy clients: balanced accuracy of all clients' samples together, a ratio of two sums
over clients (`tasks.balanced_scores`).

Each client has one vector, its weight and one number for each option. The mean of these vectors and the mean of their outer products give
every score, every paired difference and its standard error (of a ratio, linearised: Cochran 1977, 2.11; the weights of classes count as
known), so no single client's score is needed. Intervals of differences between options hold together (family-wise, 95 %): the critical
value is that of the largest |t| of all, from a multivariate t distribution with the correlations that the moments give. The control decides
before options are compared, so its interval is one of its own. Clients of unequal weight have fewer degrees of freedom
(`Moments.effective`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..randomness import Stream
from ..tasks.balanced_scores import HEAVIEST
from ..types import Array

__all__ = [
    "CLUSTERS", "CLUSTERS_MIXTURE", "FEWEST_CLIENTS", "LEVEL", "LOCAL", "ONE", "ONE_MIXTURE", "OPTIONS", "RANDOM", "RANDOM_MIXTURE",
    "STABLE", "TOLERANCE", "Advice", "Difference", "Moments", "cannot_tell", "differences", "moments_of", "verdict_of",
    "would_use_clusters",
]  # fmt: skip

LOCAL, ONE, ONE_MIXTURE = "local models", "one model", "one model + own mixture"
CLUSTERS, CLUSTERS_MIXTURE = "cluster models", "cluster models + own mixture"
OPTIONS = (LOCAL, ONE, ONE_MIXTURE, CLUSTERS, CLUSTERS_MIXTURE)
"""What can be advised, in the order of what it reveals: nothing; sums; sums within groups and a comparison of all clients."""
RANDOM, RANDOM_MIXTURE = "random clusters", "random clusters + own mixture"
"""The control: clusters of the sizes found, dealt to random clients."""
TOLERANCE, LEVEL, STABLE = 0.01, 0.05, 0.5
"""An option this near to the best mean is as good; level of the intervals; least mean ARI of three searches for groups."""
FEWEST_CLIENTS = 5
"""With fewer clients nothing can be told."""
DRAWS = 20_000
LEAST_ERROR, LEAST_FREEDOM = 1e-3, 0.5
"""No standard error counts as smaller: scores of small held-out parts take few values. Nor do degrees of freedom."""


@dataclass(frozen=True, eq=False)
class Moments:
    """Of the scores of `clients` clients by option: means (options,) and covariance between clients (options, options).

    effective: how many clients of equal weight they are worth, (Σ weights)² / Σ weights².
    """

    names: tuple[str, ...]
    means: Array
    covariance: Array
    clients: int
    effective: float


@dataclass(frozen=True)
class Difference:
    """The mean difference of scores between two options, `better` minus `other`, with its simultaneous interval."""

    better: str
    other: str
    mean: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the interval does not hold 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, eq=False)
class Advice:
    """What to deploy.

    advice: an option. decided: whether anything can be told; if not, `advice` is the simplest choice. clear: the advice is above every
    simpler allowed option with the interval of the difference. close: allowed options that cannot be told apart from it. means: by option.
    differences: all pairs, and those of the control. allowed: the options that the control allows. reasons: sentences on what is not
    allowed, or why nothing can be told.
    """

    advice: str
    decided: bool
    clear: bool
    close: tuple[str, ...] = ()
    means: Mapping[str, float] | None = None
    differences: tuple[Difference, ...] = ()
    allowed: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    clients: int = 0


def moments_of(names: Sequence[str], mean: Array, clients: int) -> Moments:
    """The moments from the mean over so many clients of their contributions (`tasks.balanced_scores.contribution`)."""
    size = len(names) + 1
    rows, columns = np.triu_indices(size)
    products = np.zeros((size, size))
    products[rows, columns] = products[columns, rows] = mean[size:] * HEAVIEST**2
    weight = max(float(mean[0]) * HEAVIEST, np.finfo(np.float64).tiny)
    means = mean[1:size] * HEAVIEST / weight
    beyond = np.hstack([-means[:, None], np.eye(size - 1)]) / weight  # what a client's scores are above those of its weight at the mean
    covariance = beyond @ products @ beyond.T * clients / max(1, clients - 1)
    effective = clients * min(1.0, weight**2 / max(float(products[0, 0]), np.finfo(np.float64).tiny))
    return Moments(tuple(names), means, covariance, clients, effective)


def _parts(moments: Moments, option: str) -> Array:
    """The weights (options,) with which an option's score is made of those that were summed: random clusters have several deals."""
    places = [i for i, name in enumerate(moments.names) if name == option]
    weights = np.zeros(len(moments.names))
    weights[places] = 1 / len(places)
    return weights


def differences(moments: Moments, pairs: Sequence[tuple[str, str]], draws: Stream) -> list[Difference]:
    """The simultaneous intervals of these pairs (better, other).

    Several deals of random clusters have one name; the standard error of their mean, from the spread between deals, is added to the error
    of a difference to them.
    """
    contrasts = np.array([_parts(moments, better) - _parts(moments, other) for better, other in pairs])
    means = contrasts @ moments.means
    covariance = contrasts @ moments.covariance @ contrasts.T
    deviations = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    errors = np.maximum(deviations / np.sqrt(moments.clients), LEAST_ERROR)
    luck = np.array([max(_luck(moments, better), _luck(moments, other)) for better, other in pairs])
    critical = _largest_t(covariance, deviations, max(moments.effective - 1, LEAST_FREEDOM), draws)
    reach = critical * np.hypot(errors, luck)
    return [
        Difference(better, other, float(mean), float(mean - width), float(mean + width))
        for (better, other), mean, width in zip(pairs, means, reach, strict=True)
    ]


def _luck(moments: Moments, option: str) -> float:
    """The standard error of the mean over several deals, 0 for an option with one."""
    values = [mean for name, mean in zip(moments.names, moments.means, strict=True) if name == option]
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def _largest_t(covariance: Array, deviations: Array, freedom: float, draws: Stream) -> float:
    """The quantile 1 − `LEVEL` of the largest |t| of differences with this covariance and so many degrees of freedom."""
    scale = np.maximum(np.outer(deviations, deviations), 1e-12)
    correlation = np.clip(covariance / scale, -1, 1)
    np.fill_diagonal(correlation, 1.0)
    values, vectors = np.linalg.eigh(correlation)
    normal = draws.standard_normal((DRAWS, len(deviations))) @ (vectors * np.sqrt(np.maximum(values, 0.0))).T
    t = normal / np.sqrt(draws.chisquare(freedom, DRAWS) / freedom)[:, None]
    return float(np.quantile(np.abs(t).max(1), 1 - LEVEL))


def would_use_clusters(moments: Moments) -> bool:
    """Whether the rule would advise a cluster option if the control allowed all: only then is the control worth its cost."""
    means = {name: float(mean) for name, mean in zip(moments.names, moments.means, strict=True)}
    return _first_good([option for option in OPTIONS if option in means], means) in (CLUSTERS, CLUSTERS_MIXTURE)


def _first_good(options: Sequence[str], means: Mapping[str, float]) -> str:
    """The first option whose mean is within the tolerance of the best."""
    best = max(means[option] for option in options)
    return next(option for option in options if best - means[option] <= TOLERANCE)


def cannot_tell(reason: str, clients: int = 0) -> Advice:
    """Nothing can be decided, and the simplest choice is named."""
    return Advice(OPTIONS[0], decided=False, clear=False, reasons=(reason,), clients=clients)


def verdict_of(moments: Moments, stability: float | None, draws: Stream) -> Advice:
    """The rule.

    1. Cluster models are allowed if the interval of their difference to random clusters is above 0, or above `TOLERANCE` where three
    searches do not agree in the mean (ARI below `STABLE`; searches that cannot be repeated count as agreeing): what is deployed are the
    clusters that were scored, but another search would find others. Their mixture is allowed if they are and its mean is above that of the
    random clusters' mixture. 2. The advice is the first allowed option, in the order of what options reveal, whose mean is
    within `TOLERANCE` of the best allowed mean. 3. With fewer than `FEWEST_CLIENTS` clients nothing can be told.
    """
    if moments.clients < FEWEST_CLIENTS:
        return cannot_tell(f"{moments.clients} clients have held-out scores; fewer than {FEWEST_CLIENTS} tell nothing", moments.clients)
    options = [option for option in OPTIONS if option in moments.names]
    pairs = [(later, earlier) for i, earlier in enumerate(options) for later in options[i + 1 :]]
    control = [pair for pair in ((CLUSTERS, RANDOM), (CLUSTERS_MIXTURE, RANDOM_MIXTURE)) if set(pair) <= set(moments.names)]
    intervals = [*differences(moments, pairs, draws), *(own for pair in control for own in differences(moments, [pair], draws))]
    by_pair = {(difference.better, difference.other): difference for difference in intervals}
    means = {name: float(_parts(moments, name) @ moments.means) for name in moments.names}
    reasons = _against_clusters(by_pair, stability) if CLUSTERS in options else []
    refused = {CLUSTERS, CLUSTERS_MIXTURE} if reasons else set[str]()
    if not reasons and CLUSTERS_MIXTURE in options and means[CLUSTERS_MIXTURE] <= means.get(RANDOM_MIXTURE, np.inf):
        reasons.append("the mixture with cluster models is no better than that with random clusters")
        refused = {CLUSTERS_MIXTURE}
    allowed = [option for option in options if option not in refused]
    advice = _first_good(allowed, means)
    simpler = allowed[: allowed.index(advice)]
    close = tuple(option for option in allowed if option != advice and not (by_pair.get((advice, option)) or by_pair[option, advice]).clear)
    clear = all(by_pair[advice, option].low > 0 for option in simpler) and not set(close) & set(simpler)
    return Advice(advice, True, clear, close, means, tuple(intervals), tuple(allowed), tuple(reasons), moments.clients)


def _against_clusters(by_pair: Mapping[tuple[str, str], Difference], stability: float | None) -> list[str]:
    """Why cluster models are not allowed; empty if they are."""
    control = by_pair.get((CLUSTERS, RANDOM))
    if control is None:
        return ["cluster models were not compared with random clusters: other options are as good, or the server does not know the groups"]
    if control.low <= 0:
        return ["nothing shows that the groups help: random clusters of the same sizes may do as well"]
    if stability is not None and stability < STABLE and control.low <= TOLERANCE:
        return [f"the groups are not stable (three searches agree by a mean ARI of {stability:.2f}), and help by too little for that"]
    return []
