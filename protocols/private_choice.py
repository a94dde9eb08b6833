"""Private choice: the price of releasing only the best of several private runs on the same data.

**The mechanism.** One run Q draws a setting uniformly from a public list, trains under differential privacy and gets a score. The choice A
draws how many runs K there are, from a public distribution, makes K independent runs, and releases the one with the best score. K and all
other runs stay secret. The score must be part of what a run releases, or follow from that and from public data. A run that fails is a run
with the worst score. If K = 0, A releases nothing.

Guarantee: A is (ε, δ)-private, with ε = `epsilon_of_choice`, towards whoever sees the released run and nothing of the others. A run whose
setting is drawn at random has a Rényi divergence, and a δ at each ε, of at most the largest among the settings. Whoever sees all runs (the
server and the clients that took part in them) has seen as many releases as there were; for them the prices of all runs add up.

**Why.** Let f be the generating function of K, and s and s′ the probabilities, under two neighbours, that a run is better than some y. The
density of A at y is that of Q at y times f′(1 − s), and f′ is known:

- Truncated negative binomial (η > −1, 0 < γ < 1; η = 1 is the geometric, η = 0 the logarithmic distribution):
  f′(1 − s) = E[K] (γ / (γ + (1 − γ) s))^(1 + η).
- Poisson of mean μ: f′(1 − s) = μ e^(−μ s).

Three bounds follow:

1. Negative binomial, Rényi: for all orders λ > 1 and λ̂ ≥ 1
   ε′(λ) = ε(λ) + (1 + η) (1 − 1/λ̂) ε(λ̂) + (1 + η) log(1/γ) / λ̂ + log E[K] / (λ − 1).
2. Negative binomial, by δ as a function of ε: let T(s) be the largest s′ that Q allows for s, and c = (1 + η) log of the largest
   (γ + (1 − γ) T(s)) / (γ + (1 − γ) s). Then f′(1 − s′) / f′(1 − s) is at least e^−c and f′ at most E[K], so δ_A(ε) ≤ E[K] δ_Q(ε − c).
3. Poisson, Rényi: where Q is (ε̂, δ̂)-private with e^ε̂ ≤ 1 + 1/(λ − 1),
   ε′(λ) = log(e^−μ + μ exp((λ − 1) (ε(λ) + μ δ̂))) / (λ − 1).
   e^−μ is the share of K = 0, which is the same under both neighbours; without it the bound would be below 0 for μ < 1.

Sources: Liu & Talwar 2019, "Private selection from private candidates"; Papernot & Steinke 2022, "Hyperparameter tuning with Rényi
differential privacy", Theorems 2 (bound 1) and 6 (bound 3); Koskela, Redberg & Wang 2024, "Privacy profiles for private selection", for the
form of bound 2, which is proved above.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from .accounting import delta_of, epsilon_of, epsilon_of_renyi, renyi_of
from .entropy import Entropy, uniforms
from .events import Event

__all__ = [
    "Distribution", "NegativeBinomial", "Poisson", "Runs", "draw_index", "draw_runs", "epsilon_by_profile", "epsilon_of_choice",
    "most_runs", "renyi_of_best", "runs_of",
]  # fmt: skip

Floats = NDArray[np.float64]
Distribution = Literal["geometric", "logarithmic", "poisson"]
LARGEST_POISSON = 500.0
"""Of the mean; e^−mean must be a floating-point number."""
POISSON_ORDERS = 24
"""So many Rényi orders are tried for a Poisson number of runs, where each takes a δ."""
SHARES = (1.0, 0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4, 1e-5)
"""δ at which T is bounded, in units of γ / (1 − γ)."""


@dataclass(frozen=True)
class NegativeBinomial:
    """The number of runs K ≥ 1: P(K = k) is proportional to (1 − γ)^k Π_{l<k} (l + η) / (l + 1).

    η = 1 is the geometric, η = 0 the logarithmic distribution. Raises `ValueError` for η ≤ −1 or γ outside (0, 1).
    """

    eta: float
    gamma: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.eta) and self.eta > -1):
            raise ValueError(f"eta: {self.eta} is not a finite number above -1")
        if not 0 < self.gamma < 1:
            raise ValueError(f"gamma: {self.gamma} is outside (0, 1)")

    @property
    def mean(self) -> float:
        """E[K]."""
        if self.eta == 0:
            return (1 - self.gamma) / (self.gamma * -math.log(self.gamma))
        return self.eta * (1 - self.gamma) / (self.gamma * -math.expm1(self.eta * math.log(self.gamma)))

    def probabilities(self) -> Iterator[tuple[int, float]]:
        """k and P(K = k), for k = 1, 2, ..., without end."""
        norm = -math.log(self.gamma) if self.eta == 0 else math.expm1(-self.eta * math.log(self.gamma)) / self.eta
        p = (1 - self.gamma) / norm
        for k in count(1):
            yield k, p
            p *= (1 - self.gamma) * (k + self.eta) / (k + 1)


@dataclass(frozen=True)
class Poisson:
    """The number of runs K ≥ 0, Poisson of mean `mean`. Raises `ValueError` for a mean outside (0, `LARGEST_POISSON`]."""

    mean: float

    def __post_init__(self) -> None:
        if not 0 < self.mean <= LARGEST_POISSON:
            raise ValueError(f"mean: {self.mean} is outside (0, {LARGEST_POISSON:g}]")

    def probabilities(self) -> Iterator[tuple[int, float]]:
        """k and P(K = k), for k = 0, 1, ..., without end."""
        p = math.exp(-self.mean)
        for k in count():
            yield k, p
            p *= self.mean / (k + 1)


Runs = NegativeBinomial | Poisson


def runs_of(distribution: Distribution, mean: float) -> Runs:
    """The distribution of a name with E[K] = `mean`. Raises `ValueError` for another name, and for a mean that it cannot have."""
    if distribution not in get_args(Distribution):
        raise ValueError(f"distribution: {distribution!r} is not known; known are {', '.join(get_args(Distribution))}")
    if distribution == "poisson":
        return Poisson(mean)
    if not (math.isfinite(mean) and mean > 1):
        raise ValueError(f"mean: {mean} is not a finite number above 1")
    if distribution == "geometric":
        return NegativeBinomial(1.0, 1 / mean)
    from scipy.optimize import brentq

    log_gamma = brentq(lambda x: NegativeBinomial(0.0, math.exp(x)).mean / mean - 1, -700.0, -1e-9, xtol=1e-14)
    return NegativeBinomial(0.0, math.exp(float(log_gamma)))


# --- drawing --------------------------------------------------------------------------------------------------------------------------


def draw_runs(runs: Runs, entropy: Entropy) -> int:
    """K, by the inverse distribution function of a 52-bit uniform from `entropy`.

    A probability is right to about 1e-15; no draw is beyond what a 52-bit uniform reaches.
    """
    return _quantile(runs, float(uniforms(entropy(32), 1)[0]))


def most_runs(runs: Runs, share: float = 0.99) -> int:
    """The number that K does not exceed with probability `share`."""
    return _quantile(runs, share)


def _quantile(runs: Runs, u: float) -> int:
    total = 0.0
    for k, p in runs.probabilities():
        total += p
        if total >= u or (k > runs.mean and p < 1e-20):
            return k
    raise AssertionError("the probabilities have no end")


def draw_index(size: int, entropy: Entropy) -> int:
    """A number from 0 to `size` − 1, each equally likely. Raises `ValueError` for a size below 1."""
    if size < 1:
        raise ValueError(f"size: {size} is below 1")
    limit = 2**64 - 2**64 % size
    while (word := int.from_bytes(entropy(8), "little")) >= limit:
        pass
    return word % size


# --- the price ------------------------------------------------------------------------------------------------------------------------


def epsilon_of_choice(candidates: Sequence[Sequence[Event]], delta: float, runs: Runs) -> float:
    """The ε at `delta` of the best of K runs, each of which draws one of the `candidates` (the events of each setting) uniformly.

    The smaller of bounds 1 and 2 for a negative binomial number of runs, bound 3 for a Poisson one. Raises `ValueError` for no candidate, a
    δ outside (0, 1), and candidates of different relations or units; `TypeError` for an unknown event.
    """
    bills = list(dict.fromkeys(tuple(events) for events in candidates))
    if not bills:
        raise ValueError("candidates: there are none to choose among")
    kinds = {(event.relation, event.unit) for events in bills for event in events}
    if len(kinds) > 1:
        raise ValueError(f"candidates of different (relation, unit) have no common price: {sorted(kinds)}")
    if not any(bills):
        return 0.0

    def epsilon_at(delta: float) -> float:
        return max(epsilon_of(events, delta) for events in bills)

    def delta_at(epsilon: float) -> float:
        return max(delta_of(events, epsilon) for events in bills)

    by_profile = epsilon_by_profile(runs, delta, epsilon_at) if isinstance(runs, NegativeBinomial) else math.inf
    curves = [renyi_of(events) for events in bills]
    orders, renyi = curves[0][0], np.max([values for _, values in curves], axis=0)
    if isinstance(runs, Poisson):
        kept = np.unique(np.linspace(0, len(orders) - 1, POISSON_ORDERS).round().astype(int))
        orders, renyi = orders[kept], renyi[kept]
    return min(by_profile, epsilon_of_renyi(orders, renyi_of_best(runs, orders, renyi, delta_at), delta))


def renyi_of_best(runs: Runs, orders: Floats, renyi: Floats, delta_at: Callable[[float], float]) -> Floats:
    """The Rényi divergences (n,) of the best of K runs at `orders` (n,), each above 1, from those of one run.

    Bounds 1 and 3. `delta_at(ε)` is a δ of one run at ε; the negative binomial does not ask for it.
    """
    orders, renyi = np.asarray(orders, dtype=np.float64), np.asarray(renyi, dtype=np.float64)
    if isinstance(runs, NegativeBinomial):
        log_gamma = -math.log(runs.gamma)
        once = min(log_gamma, float(np.min((1 - 1 / orders) * renyi + log_gamma / orders)))  # of λ̂ = 1, or the best order
        return np.asarray(renyi + (1 + runs.eta) * once + math.log(runs.mean) / (orders - 1))
    deltas = np.array([delta_at(math.log1p(1 / (order - 1))) for order in orders])
    ran = math.log(runs.mean) + (orders - 1) * (renyi + runs.mean * deltas)
    return np.asarray(np.logaddexp(-runs.mean, ran) / (orders - 1))


def epsilon_by_profile(runs: NegativeBinomial, delta: float, epsilon_at: Callable[[float], float]) -> float:
    """Bound 2: an ε at `delta` of the best of K runs, from `epsilon_at(δ)`, an ε of one run at δ under both orders of two neighbours."""
    gamma = runs.gamma
    wanted = sorted({min(0.5, share * gamma / (1 - gamma)) for share in SHARES})
    lines = [(epsilon_at(order), order) for order in wanted]
    rise = (1 + runs.eta) * math.log(_largest_ratio([line for line in lines if line[0] < 600], gamma))
    return rise + epsilon_at(delta / runs.mean)


def _largest_ratio(lines: Sequence[tuple[float, float]], gamma: float) -> float:
    """The largest (γ + (1 − γ) T) / (γ + (1 − γ) s) over s in [0, 1], where T is the least of 1 and e^ε s + δ over the (ε, δ) in `lines`.

    T is piecewise linear, and on a piece the ratio is monotone: the largest is at s = 0 or where two of the lines meet.
    """
    slopes = np.array([0.0, *(math.exp(epsilon) for epsilon, _ in lines)])
    starts = np.array([1.0, *(delta for _, delta in lines)])
    with np.errstate(divide="ignore", invalid="ignore"):
        meet = (starts[:, None] - starts) / (slopes - slopes[:, None])
    s = np.unique(np.concatenate([[0.0, 1.0], meet[np.isfinite(meet) & (meet >= 0) & (meet <= 1)]]))
    reached = np.min(starts[:, None] + slopes[:, None] * s, axis=0)
    return float(np.max((gamma + (1 - gamma) * reached) / (gamma + (1 - gamma) * s)))
