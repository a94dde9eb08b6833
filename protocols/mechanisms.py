"""Differential-privacy mechanisms: noisy releases with stated sensitivity. Each returns its value with the event that prices it.

A value and its sensitivity travel together: a mechanism bounds its own input (it clips), adds the noise, and reports the event that prices
it. Noise comes from a cryptographic source (`entropy`: any callable that gives bytes), one fresh key for each call.

**Floating point** (Mironov 2012). A Gaussian sample computed in floating point leaves holes: which doubles can occur reveals the value
without noise. So a noisy value is rounded to a public grid of spacing 2^⌊log2(σ/8)⌋ before anybody sees it. Rounding is post-processing: it
costs no privacy and 0.13 % of variance at most. What remains is that the probability of a cell is right only up to a factor of about
1 ± 1e-14 (samples have 52 digits of their tail's probability, out to 12.4 σ), and that what lies beyond has less than 2^-117. So δ has no
part for it; ε may be 1e-13 d larger for d coordinates (and steps), which is not counted: 2e-7 for 44,426 coordinates in 50 steps. Choices
(noisy argmin) are drawn from their probabilities by one 52-bit uniform: what has less than 2^-53 never occurs, so beyond ε = 36 they are
not private in the pure sense. Running times are not constant: an observer with a clock is not covered.

All of it is unaudited research code.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from .entropy import Entropy, normals, uniforms
from .events import ChoiceEvent, Event, GaussianEvent, Relation, Unit

__all__ = [
    "CLIP_SLACK", "Noised", "argmin_probabilities", "clip", "clip_rows", "gaussian", "gaussian_delta", "gaussian_epsilon",
    "gaussian_multiplier", "gaussian_noise", "gaussian_sum", "noisy_argmin", "second_moment", "snap", "spacing",
]  # fmt: skip

Floats = NDArray[np.float64]
Value = TypeVar("Value")

CLIP_SLACK = 1e-12
"""A clipped vector's true norm exceeds the bound by no more than this share of it (float64, up to 10⁶ coordinates)."""
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
    return normals(entropy(32), count) * scale


def snap(values: Floats, scale: float) -> Floats:
    """Noisy values on the public grid of spacing 2^⌊log2(scale/8)⌋, where `scale` is the noise's standard deviation."""
    step = spacing(scale)
    return np.asarray(np.rint(values / step) * step)


def spacing(scale: float) -> float:
    """The spacing of the grid of `snap`."""
    return float(2.0 ** math.floor(math.log2(scale / GRID)))


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
