"""Differential-privacy mechanisms: noisy releases with stated sensitivity. Each returns its value with the event that prices it.

A value and its sensitivity travel together: a mechanism bounds its own input (it clips), adds the noise, and reports the event that prices
it. Noise comes from a cryptographic source (`entropy`: any callable that gives bytes), one fresh key for each call.

**Floating point** (Mironov 2012). A Gaussian sample computed in floating point leaves holes: which doubles can occur reveals the value
without noise. So a noisy value is rounded to a public grid of spacing 2^⌊log2(σ/8)⌋ before anybody sees it. Rounding is post-processing: it
costs no privacy and 0.13 % of variance at most. What remains is that the probability of a cell is right to some 2^-52 only, and nothing
beyond 8.2 σ occurs: together less than η = 2e-13 of total variation a coordinate for values below 100 σ. It is not part of the reported δ;
for d coordinates add (1 + e^ε) d η. Choices (noisy argmin) are drawn from their probabilities by one 52-bit uniform: what has less than
2^-53 never occurs, so beyond ε = 36 they are not private in the pure sense. Running times are not constant: an observer with a clock is not
covered.

All of it is unaudited research code.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from .entropy import Entropy, gaussians, uniforms
from .events import ChoiceEvent, Event, GaussianEvent, Relation, SkellamEvent, Unit

__all__ = [
    "CLIP_SLACK", "MOST_VARIANCE", "Noised", "SkellamPlan", "argmin_probabilities", "clip", "clip_rows", "gaussian", "gaussian_delta",
    "gaussian_epsilon", "gaussian_multiplier", "gaussian_noise", "gaussian_sum", "hadamard", "noisy_argmin", "rounded_norms",
    "second_moment", "skellam_noise", "skellam_open", "skellam_plan", "skellam_share", "snap",
]  # fmt: skip

Floats = NDArray[np.float64]
Value = TypeVar("Value")

CLIP_SLACK = 1e-12
"""A clipped vector's true norm exceeds the bound by no more than this share of it (float64, up to 10⁶ coordinates)."""
MOST_VARIANCE = 1e10
"""Of Skellam noise: the table of a larger one would not fit."""
LARGE_VARIANCE = 1e6
"""Of Skellam noise: from here on its table is an asymptotic series. scipy's Bessel functions are NaN from 2^30 on."""
ROUNDINGS = 1000
"""Of a clipped vector each rounding is short enough with a probability of 1 − β at least: so many cannot all be too long."""
GRID = 8
"""Noisy values are rounded to a grid of at most σ / GRID."""


@dataclass(frozen=True, eq=False)
class Noised(Generic[Value]):
    """A value that may be seen, and what it costs."""

    value: Value = field(repr=False)
    event: Event


# --- clipping -----------------------------------------------------------------------------------------------------------------------


def clip(vector: NDArray[Any], norm: float) -> Floats:
    """The vector (any shape), scaled down to Euclidean length `norm` if it is longer; float64.

    Guarantee: its true norm is at most (1 + `CLIP_SLACK`) · `norm`. Raises `ValueError` for a norm that is not above 0 or values that are
    not finite (a norm cannot bound these).
    """
    return clip_rows(np.asarray(vector, dtype=np.float64).reshape(1, -1), norm).reshape(np.shape(vector))


def clip_rows(rows: NDArray[Any], norm: float) -> Floats:
    """Each row of (n, d) clipped as by `clip`."""
    if not (math.isfinite(norm) and norm > 0):
        raise ValueError(f"clip_norm: {norm} is not a finite number above 0")
    x = np.asarray(rows, dtype=np.float64)
    if x.ndim != 2:
        raise ValueError(f"rows: expected shape (n, d), got {x.shape}")
    if not np.isfinite(x).all():
        raise ValueError("rows: not all values are finite, so no norm bounds them")
    # |x| = m |x / m| with m the largest value: no overflow and no underflow of squares, nor of a factor norm / |x|
    most = np.abs(x).max(axis=1, initial=0.0)
    scale = np.where(most > 0, most, 1.0)
    relative = x / scale[:, None]
    lengths = np.where(most > 0, np.sqrt(np.square(relative).sum(axis=1)), 1.0)  # at least 1, up to rounding
    with np.errstate(over="ignore"):
        longer = (most > 0) & (scale * lengths > norm)
    return np.where(longer[:, None], relative * (norm / lengths)[:, None], x)


# --- the Gaussian mechanism -----------------------------------------------------------------------------------------------------------


def gaussian_delta(noise_multiplier: float, epsilon: float) -> float:
    """The exact δ of one Gaussian release at ε: Φ(1/2z − εz) − e^ε Φ(−1/2z − εz), z the noise multiplier (Balle & Wang 2018, Theorem 8)."""
    from scipy.special import log_ndtr

    z = noise_multiplier
    first, second = log_ndtr(0.5 / z - epsilon * z), epsilon + log_ndtr(-0.5 / z - epsilon * z)
    # a − b = a (1 − b/a), which keeps what is left of their digits
    return float(np.exp(first) * -np.expm1(min(0.0, second - first)))


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """The exact ε ≥ 0 of one Gaussian release at δ, the inverse of `gaussian_delta`, rounded up by 1e-12 at most."""
    _check_delta(delta)
    if gaussian_delta(noise_multiplier, 0.0) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(noise_multiplier, high) > delta:
        high *= 2
    return _least(lambda epsilon: gaussian_delta(noise_multiplier, epsilon) <= delta, 0.0, high, 1e-12)


def gaussian_multiplier(epsilon: float, delta: float) -> float:
    """The least noise, in sensitivities, that makes one Gaussian release (ε, δ)-private: the analytic Gaussian mechanism.

    Rounded up by 1e-12 of it at most. Raises `ValueError` for ε ≤ 0 or δ outside (0, 1). Source: Balle & Wang 2018, section 3.
    """
    _check_delta(delta)
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"epsilon: {epsilon} is not a finite number above 0")
    high = 1.0
    while gaussian_delta(high, epsilon) > delta:
        high *= 2
    low = high / 2
    while low > 0 and gaussian_delta(low, epsilon) <= delta:
        low /= 2
    return _least(lambda z: gaussian_delta(z, epsilon) <= delta, low, high, 0.0)


def _least(suffices: Callable[[float], bool], low: float, high: float, absolute: float) -> float:
    """The least of (low, high] that suffices, where larger ones do, rounded up by 1e-12 of it or `absolute`, whichever is more."""
    while high - low > max(1e-12 * high, absolute):
        middle = (low + high) / 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta: {delta} is outside (0, 1)")


def gaussian_noise(scale: float, count: int, entropy: Entropy) -> Floats:
    """`count` values N(0, scale²) from one fresh key of `entropy`; to be added and then rounded by `snap`, or used where stated."""
    return gaussians(entropy(32), count) * scale


def snap(values: Floats, scale: float) -> Floats:
    """Noisy values on the public grid of spacing 2^⌊log2(scale/8)⌋, where `scale` is the noise's standard deviation."""
    step = 2.0 ** math.floor(math.log2(scale / GRID))
    return np.asarray(np.rint(values / step) * step)


def gaussian(
    value: NDArray[Any], sensitivity: float, noise_multiplier: float, relation: Relation, unit: Unit, entropy: Entropy
) -> Noised[Floats]:
    """`value` (any shape) with Gaussian noise of noise_multiplier · sensitivity on each coordinate, on a grid.

    Guarantee: that of the event, if the value moves by no more than `sensitivity` (L2) between neighbours; the caller answers for that.
    Reveals: the value, up to the noise. Source: Balle & Wang 2018.
    """
    event = GaussianEvent(noise_multiplier, sensitivity, relation, unit)
    x = np.asarray(value, dtype=np.float64)
    scale = noise_multiplier * sensitivity
    return Noised(snap(x + gaussian_noise(scale, x.size, entropy).reshape(x.shape), scale), event)


def gaussian_sum(
    rows: NDArray[Any], clip_norm: float, noise_multiplier: float, relation: Relation, unit: Unit, entropy: Entropy
) -> Noised[Floats]:
    """Σ of the rows (n, d), each clipped to `clip_norm`, with noise of noise_multiplier · sensitivity.

    Sensitivity: `clip_norm` under "add_remove", twice that under "replace_one" (x and −x). The number of rows is not released.
    """
    sensitivity = clip_norm if relation == "add_remove" else 2 * clip_norm
    return gaussian(clip_rows(rows, clip_norm).sum(axis=0), sensitivity, noise_multiplier, relation, unit, entropy)


def second_moment(rows: NDArray[Any], noise_multiplier: float, relation: Relation, unit: Unit, entropy: Entropy) -> Noised[Floats]:
    """Σ x xᵀ over the rows (n, d), each clipped to norm 1, with symmetric noise: (d, d).

    The noise is that of a Gaussian orthogonal ensemble: σ on the diagonal, σ/√2 off it, which is isotropic in the Frobenius norm. Not
    centred and not divided by n, which would both need budget of their own.

    Sensitivity in that norm: 1 under "add_remove" (|x xᵀ| = |x|²); √2 under "replace_one" (|x xᵀ − y yᵀ|² = |x|⁴ + |y|⁴ − 2⟨x,y⟩²).
    Reveals: the second moment up to the noise. Source: Dwork et al. 2014 ("Analyze Gauss"), Algorithm 1, with the noise shaped as above.
    """
    x = clip_rows(rows, 1.0)
    d = x.shape[1]
    upper = np.triu_indices(d)
    # coordinates in which the Euclidean norm is the Frobenius norm: entries off the diagonal count twice
    weights = np.where(upper[0] == upper[1], 1.0, math.sqrt(2))
    coordinates = (x.T @ x)[upper] * weights
    sensitivity = 1.0 if relation == "add_remove" else math.sqrt(2)
    noised = gaussian(coordinates, sensitivity, noise_multiplier, relation, unit, entropy)
    matrix = np.zeros((d, d))
    matrix[upper] = noised.value / weights
    return Noised(matrix + np.triu(matrix, 1).T, noised.event)


# --- choices --------------------------------------------------------------------------------------------------------------------------


def _draw(probabilities: Floats, entropy: Entropy) -> int:
    """An index by its probability (they add up to 1 within rounding)."""
    edges = np.cumsum(probabilities)
    return int(min(np.searchsorted(edges, uniforms(entropy(32), 1)[0] * edges[-1], side="right"), len(edges) - 1))


def noisy_argmin(
    scores: Sequence[float] | NDArray[Any], sensitivity: float, epsilon: float, relation: Relation, unit: Unit, entropy: Entropy
) -> Noised[int]:
    """The index of a low score: exponential mechanism, the law of argmin(score + Gumbel noise) in one draw.

    Scores are sums over records of non-negative terms of at most `sensitivity`, the caller answers for that. Under "add_remove" they then
    all move the same way, and P(j) ∝ exp(−ε s_j / sensitivity); under "replace_one" some rise while others fall: half of it.

    Guarantee: pure ε, and ε-bounded-range, by which it is priced (`bounded_range`). Source: McSherry & Talwar 2007, Theorem 6; for monotone
    scores see Dwork & Roth 2014, section 3.4.
    """
    event = ChoiceEvent(epsilon, relation, unit)
    return Noised(_draw(argmin_probabilities(np.asarray(scores, dtype=np.float64), sensitivity, epsilon, relation), entropy), event)


def argmin_probabilities(s: Floats, sensitivity: float, epsilon: float, relation: Relation) -> Floats:
    """The law (k,) of `noisy_argmin` on scores (k,)."""
    if not (math.isfinite(sensitivity) and sensitivity > 0):
        raise ValueError(f"sensitivity: {sensitivity} is not a finite number above 0")
    if s.ndim != 1 or len(s) == 0 or not np.isfinite(s).all():
        raise ValueError("scores: expected finite numbers in one row")
    rate = epsilon / sensitivity if relation == "add_remove" else epsilon / (2 * sensitivity)
    weights = np.exp(-rate * (s - s.min()))
    return np.asarray(weights / weights.sum())


# --- Skellam noise for sums of integers --------------------------------------------------------------------------------------------


def rounded_norms(norm: float, dimension: int, beta: float) -> tuple[float, float]:
    """(L2, L1) bounds of a vector of L2 `norm` after stochastic rounding to integers that is repeated until the L2 bound holds.

    Rounding meets the bound with probability at least 1 − β (β = 0: always), so few repeats are needed and the rounding's bias is at most
    β / (1 − β) of the norm. L1 ≤ min(√d · L2, L2²) for integer vectors. Source: Kairouz, Liu & Steinke 2021, Theorem 1.
    """
    always = norm + math.sqrt(dimension)
    if beta <= 0:
        l2 = always
    else:
        l2 = min(always, math.sqrt(norm**2 + dimension / 4 + math.sqrt(2 * math.log(1 / beta)) * (norm + math.sqrt(dimension) / 2)))
    return l2, min(math.sqrt(dimension) * l2, l2 * l2)


def skellam_noise(variance: float, count: int, entropy: Entropy) -> NDArray[np.int64]:
    """`count` integers of the Skellam law with mean 0 and this variance (the difference of two Poisson numbers of half of it each).

    By table: the distribution function within 12 standard deviations, in float64, and one 52-bit uniform each. The probability of a number
    is right to 1e-12; what lies beyond the table would have less than 1e-30.
    """
    if not (math.isfinite(variance) and variance > 0):
        raise ValueError(f"variance: {variance} is not a finite number above 0")
    if variance > MOST_VARIANCE:
        raise ValueError(f"variance: {variance:g} is beyond {MOST_VARIANCE:g}, where the table would not fit; use fewer levels")
    edges = _skellam_edges(variance)
    draws = np.searchsorted(edges, uniforms(entropy(32), count) * edges[-1], side="right")
    return np.asarray(np.minimum(draws, len(edges) - 1) - len(edges) // 2, dtype=np.int64)


@lru_cache(maxsize=8)
def _skellam_edges(variance: float) -> Floats:
    """The distribution function at −reach … reach. Raises `ValueError` where it does not end at 1: wrong noise is refused."""
    # tails of a Skellam law are heavier than Gaussian for small variances: exp(-k log(k / e variance)), hence the constant
    reach = math.ceil(12 * math.sqrt(variance)) + 40
    edges = np.cumsum(_skellam_law(np.abs(np.arange(-reach, reach + 1)), variance))
    if not abs(edges[-1] - 1.0) < 1e-9:  # NaN is not either
        raise ValueError(f"variance: {variance:g}: its table ends at {edges[-1]} instead of 1; nothing is drawn")
    return np.asarray(edges)


def _skellam_law(number: NDArray[np.int64], variance: float) -> Floats:
    """The probabilities e^−v I_k(v) of numbers k ≥ 0; for large v by three terms of Debye's expansion (DLMF 10.41.3), to 1e-13."""
    if variance < LARGE_VARIANCE:
        from scipy.special import ive

        return np.asarray(ive(number, variance))
    t = number / variance
    root = np.sqrt(1 + t * t)  # w / v, with w² = k² + v²
    exponent = variance * (t * t / (1 + root) - t * np.arcsinh(t))  # w − k asinh(k / v) − v, without its cancellation
    w, p = variance * root, np.square(t / root)
    series = 1 + (3 - 5 * p) / (24 * w) + (81 - 462 * p + 385 * p * p) / (1152 * w * w)
    return np.asarray(np.exp(exponent) / np.sqrt(2 * np.pi * w) * series)


@dataclass(frozen=True)
class SkellamPlan:
    """How clients make integers of vectors (dimension,) of L2 norm up to `clip_norm`, and which noise each adds.

    `levels_per_unit` integers make 1.0; `dimension` is that after flattening (a power of two). `local_variance` is each client's share, of
    which `survivors` make the variance that the event counts. Who knows some of the shares, as each client does its own, takes them off:
    the guarantee holds as long as so many are there that it does not know.
    """

    clip_norm: float
    levels_per_unit: float
    dimension: int
    beta: float
    local_variance: float
    survivors: int
    relation: Relation

    @property
    def norms(self) -> tuple[float, float]:
        """(L2, L1) of one client's integers."""
        return rounded_norms(self.clip_norm * self.levels_per_unit, self.dimension, self.beta)

    @property
    def event(self) -> SkellamEvent:
        """The price of the sum over at least `survivors` clients. Replacing a client moves the sum by twice what removing it does."""
        l2, l1 = self.norms
        times = 1 if self.relation == "add_remove" else 2
        return SkellamEvent(self.survivors * self.local_variance, times * l2, times * l1, self.relation, "client")


def skellam_plan(
    clip_norm: float, noise_multiplier: float, dimension: int, levels_per_unit: float, survivors: int, relation: Relation,
    beta: float = math.exp(-0.5),
) -> SkellamPlan:  # fmt: skip
    """Shares whose sum over `survivors` clients has noise_multiplier · (rounded L2 bound) as its standard deviation."""
    if not (math.isfinite(clip_norm) and clip_norm > 0):
        raise ValueError(f"clip_norm: {clip_norm} is not a finite number above 0")
    if survivors < 1:
        raise ValueError(f"survivors: {survivors} is below 1")
    if dimension < 1 or dimension & (dimension - 1):
        raise ValueError(f"dimension: {dimension} is no power of two; pad first")
    l2, _ = rounded_norms(clip_norm * levels_per_unit, dimension, beta)
    return SkellamPlan(clip_norm, levels_per_unit, dimension, beta, (noise_multiplier * l2) ** 2 / survivors, survivors, relation)


def skellam_share(vector: NDArray[Any], plan: SkellamPlan, signs: Floats, entropy: Entropy) -> NDArray[np.int64]:
    """One client's integers (dimension,) for the secure sum: clip, flatten, round, add its share of the noise.

    `signs` (dimension,) of ±1 are public and the same for all: with the Walsh-Hadamard transform they spread a vector over its coordinates.
    Guarantee: none by itself; the *sum* of at least `survivors` shares is as private as `plan.event` says against who sees only sums.
    Raises `ValueError` for values that are not finite, and rather than hand out what is longer than the plan counts on.
    Source: Agarwal, Kairouz & Liu 2021, Algorithm 1; conditional rounding as in Kairouz, Liu & Steinke 2021, section 4.1.
    """
    x = np.zeros(plan.dimension)
    x[: np.size(vector)] = clip(np.ravel(vector), plan.clip_norm)
    scaled = plan.levels_per_unit * hadamard(x * signs)
    limit, _ = plan.norms
    low = np.floor(scaled)
    for _ in range(ROUNDINGS):
        rounded = low + (uniforms(entropy(32), plan.dimension) < scaled - low)
        if np.square(rounded).sum() <= limit * limit:
            return np.asarray(rounded.astype(np.int64) + skellam_noise(plan.local_variance, plan.dimension, entropy))
    raise ValueError(f"vector: no rounding has a norm up to {limit:.1f}, so it is not clipped to {plan.clip_norm}; nothing is released")


def skellam_open(total: NDArray[Any], plan: SkellamPlan, signs: Floats, size: int) -> Floats:
    """The sum of vectors (size,) that a sum of shares stands for, noise included."""
    return np.asarray((hadamard(np.asarray(total, dtype=np.float64)) * signs)[:size] / plan.levels_per_unit)


def hadamard(vector: Floats) -> Floats:
    """The orthonormal Walsh-Hadamard transform of a vector whose length is a power of two; it is its own inverse."""
    x, n, half = vector.copy(), len(vector), 1
    while half < n:
        pairs = x.reshape(-1, 2, half)
        x = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
        half *= 2
    return np.asarray(x / math.sqrt(n))
