"""Random allocation ("balls in bins"): each pass over the samples puts each sample into one of m batches, drawn evenly and secretly.

Poisson batches draw each sample for each batch by itself, so a sample may be in many batches of a pass. The price pays for that. Here a
sample is in exactly one batch of a pass, and where noise is low one pass costs less: by up to a quarter of the noise for a few batches.

**Law.** With a sample's clipped gradient of norm 1 and noise N(0, z² I), one pass over m batches is dominated by the pair
P = (1/m) Σ_i N(e_i, z² I_m) with the sample and Q = N(0, z² I_m) without it, whatever later batches see of earlier results (Chua et al.
2025, "Balls-and-Bins Sampling for DP-SGD"; Feldman & Shenfeld 2025, "Privacy Amplification by Random Allocation"). Under Q the likelihood
ratio R = dP/dQ is the mean of m independent log-normal variables exp(x_i/z² − 1/2z²), each of mean 1.

**Bound.** δ at ε is E_Q (R − e^ε)₊ with the sample against without it, and E_Q (1 − e^ε R)₊ the other way round. Both are convex in R. So
each log-normal variable, and each sum of two of these, is moved to the neighbouring points of a geometric grid, its mean kept: that makes
no convex function of the sum smaller. What lies beyond the grid goes to 0 and to infinity, its mean kept, too. The result is an upper bound
up to rounding of floats, and its error falls with the square of the spacing. Passes are independent, so they compose. (Feldman & Shenfeld
2026, "Efficient Privacy Loss Accounting for Subsampling and Random Allocation", round up instead.)

"k of t steps, drawn at random" costs no more than k passes of ⌊t/k⌋ batches (Feldman & Shenfeld 2025, Theorem 5.2).

All of it is unaudited research code.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["Ratio", "allocated_moments", "allocated_ratio", "allocated_renyi", "refined"]

Floats = NDArray[np.float64]
SIGMAS = 9.0
"""Standard deviations of log-normal variables that the first grid covers; 1e-19 of their mass lies beyond."""
TRIMMED = 1e-20
"""Mass that each end of a grid may give to 0 or to infinity."""
MOST_POINTS = 3000
"""Points of a grid. Sums vary less than their terms, so later grids are finer; where the last one is too coarse, the bound is looser."""
ROUGH = 2.0**-5
"""The spacing for moments."""


@dataclass(frozen=True, eq=False)
class Ratio:
    """A distribution that dominates R under Q: probability `zero` of 0, and `masses` (n,) of exp((first + j) · spacing), j = 0 … n − 1.

    What its mean lacks to 1 is a probability of infinity under P.
    """

    spacing: float
    first: int
    masses: Floats
    zero: float

    @property
    def losses(self) -> Floats:
        """log R (n,) at the points above 0."""
        return np.asarray((self.first + np.arange(len(self.masses))) * self.spacing, np.float64)


@lru_cache(maxsize=256)
def allocated_ratio(noise_multiplier: float, batches: int, spacing: float) -> Ratio:
    """The ratio of one pass over `batches` ≥ 2 batches, on a grid of `spacing` times a power of two."""
    slope, coarse = 1 / noise_multiplier, spacing
    while 2 * SIGMAS * slope / coarse > MOST_POINTS:
        coarse *= 2
    power, whole = _log_normal(slope, math.log(batches), coarse), None
    while batches:
        if batches & 1:
            whole = power if whole is None else _added(whole, power, spacing)
        batches >>= 1
        power = _added(power, power, spacing) if batches else power
    assert whole is not None  # a number above 0 has a bit
    return whole


def _log_normal(slope: float, less: float, spacing: float) -> Ratio:
    """exp(slope · x − slope²/2 − less), x standard normal, on a grid: each interval's mass goes to its ends, its mean kept."""
    from scipy.special import ndtr

    first = math.floor((-(slope**2) / 2 - SIGMAS * slope - less) / spacing)
    count = math.ceil((slope**2 / 2 + SIGMAS * slope - less) / spacing) - first + 1
    edges = np.asarray((first + np.arange(count)) * spacing, np.float64)

    def between(ends: Floats) -> Floats:
        """Standard normal mass (n + 1,) below, between and above points (n,), from the tail that loses no digits."""
        low, high = np.concatenate([[-np.inf], ends]), np.concatenate([ends, [np.inf]])
        return np.where(low > 0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low))

    mass, tilted = between((edges + less) / slope + slope / 2), between((edges + less) / slope - slope / 2)
    relative = tilted[1:-1] * np.exp(-less - edges[:-1])  # an interval's part of the mean, in units of its lower end
    upper = np.clip((relative - mass[1:-1]) / math.expm1(spacing), 0.0, mass[1:-1])
    masses = np.zeros(count)
    masses[1:] += upper
    masses[:-1] += mass[1:-1] - upper
    lowest = min(mass[0], tilted[0] * math.exp(-less - edges[0]))
    masses[0] += lowest
    return Ratio(spacing, first, masses, float(mass[0] - lowest + mass[-1]))


def _added(one: Ratio, other: Ratio, finest: float) -> Ratio:
    """The sum of two independent ratios, on a grid as fine as the points allow, down to `finest`."""
    spacing = min(one.spacing, other.spacing)
    one, other = refined(one, spacing), refined(other, spacing)
    first = min(one.first, other.first)
    counts = len(one.masses), len(other.masses)
    last = max(one.first + counts[0], other.first + counts[1]) + math.ceil(math.log(2) / spacing)
    masses = np.zeros(last - first + 1)
    masses[one.first - first :][: counts[0]] += other.zero * one.masses
    masses[other.first - first :][: counts[1]] += one.zero * other.masses
    shift = other.first - one.first
    for apart in range(shift - counts[0] + 1, shift + counts[1]):  # how many points the second lies above the first
        low, high = max(0, shift - apart), min(counts[0], counts[1] + shift - apart)
        products = one.masses[low:high] * other.masses[low + apart - shift : high + apart - shift]
        above = math.log1p(math.exp(-abs(apart) * spacing)) / spacing  # where the sum lies above the larger, in spacings
        whole = math.floor(above)
        share = math.expm1((above - whole) * spacing) / math.expm1(spacing)
        start = one.first - first + low + max(0, apart) + whole
        masses[start : start + len(products)] += products * (1 - share)
        masses[start + 1 : start + 1 + len(products)] += products * share
    summed = _trimmed(Ratio(spacing, first, masses, one.zero * other.zero))
    while summed.spacing > finest and 2 * len(summed.masses) <= MOST_POINTS:
        summed = refined(summed, summed.spacing / 2)
    return summed


def _trimmed(ratio: Ratio) -> Ratio:
    """The ratio without ends of next to no mass. The lower end goes to 0 and the first point kept, the upper one to 0 and infinity."""
    present = ratio.masses * np.exp(ratio.losses)
    low = int(np.searchsorted(np.cumsum(ratio.masses), TRIMMED))
    high = len(present) - int(np.searchsorted(np.cumsum(present[::-1]), TRIMMED))
    masses = ratio.masses[low:high].copy()
    up = float(ratio.masses[:low] @ np.exp((np.arange(low) - low) * ratio.spacing))
    masses[0] += up
    return Ratio(ratio.spacing, ratio.first + low, masses, ratio.zero + float(ratio.masses[:low].sum() + ratio.masses[high:].sum()) - up)


def refined(ratio: Ratio, spacing: float) -> Ratio:
    """The same distribution on a grid finer by a power of two."""
    every = round(ratio.spacing / spacing)
    masses = np.zeros((len(ratio.masses) - 1) * every + 1)
    masses[::every] = ratio.masses
    return Ratio(spacing, ratio.first * every, masses, ratio.zero)


@lru_cache(maxsize=256)
def allocated_moments(noise_multiplier: float, batches: int) -> tuple[float, float, float]:
    """Variance, mean and E |l| of the loss l of one pass with the sample, about."""
    ratio = allocated_ratio(noise_multiplier, batches, ROUGH)
    losses, weights = ratio.losses, ratio.masses * np.exp(ratio.losses)
    weights = weights / weights.sum()
    mean = float(weights @ losses)
    return max(float(weights @ (losses - mean) ** 2), 1e-300), mean, float(weights @ np.abs(losses))


@lru_cache(maxsize=256)
def allocated_renyi(noise_multiplier: float, batches: int, orders: tuple[int, ...]) -> Floats:
    """Upper bounds (n,) of the Rényi divergences of one pass at whole `orders` above 1, in both directions.

    With the sample: E_Q R^α, exactly, is α! m^−α times the coefficient of t^α in (Σ_j e^{j(j−1)/2z²} t^j / j!)^m. Without it: R is at least
    the geometric mean of its terms, so the divergence is at most (1 + (α − 1)/m)/2z². Neither is above α/2z², that of known batches.
    """
    plain = 1 / (2 * noise_multiplier**2)
    highest = max(order for order in orders if order <= 64)
    powers = np.arange(highest + 1)
    factorials = np.cumsum(np.log(np.maximum(powers, 1)))
    coefficients = _log_power(powers * (powers - 1) * plain - factorials, batches)
    bounds = []
    for order in orders:
        known = order * plain
        if order <= highest:
            moment = coefficients[order] + factorials[order] - order * math.log(batches)
            known = min(known, max(moment / (order - 1), (1 + (order - 1) / batches) * plain))
        bounds.append(known * (1 + 1e-9))
    return np.array(bounds)


def _log_power(series: Floats, exponent: int) -> Floats:
    """Logarithms (n,) of the first coefficients of a power of a series, given by those of its coefficients, which are all above 0."""

    def times(one: Floats, other: Floats) -> Floats:
        return np.array([np.logaddexp.reduce(one[: k + 1] + other[k::-1]) for k in range(len(one))])

    power = np.full(len(series), -np.inf)
    power[0] = 0.0
    while exponent:
        if exponent & 1:
            power = times(power, series)
        series, exponent = times(series, series), exponent >> 1
    return power
