"""Lower and upper bounds of ε for Gaussian steps on Poisson batches, computed apart from the product's accountants.

A step has the law (1 − q) N(0, z²) + q N(1, z²) with the record and N(0, z²) without it. The line is divided into intervals by the
loss, log of the ratio of both densities; masses are Gauss-Legendre integrals. Losses are then put on a grid, and steps are composed by a
Fourier transform on a circle that is wide enough.

upper
    Between two points of the grid the masses under both laws are kept and go to the ends (Doroshenko et al. 2022): no δ becomes smaller.
lower
    Outcomes of an interval are merged, as any observer may do: no δ becomes larger. The intervals are chosen so that their joint losses lie
    on a grid nearly. What is left is made exact by outcomes of the heaviest interval, a part of which an observer merges with the others,
    or else by leaving out mass of the first law.

Both allow for `ROUNDING` of the transforms.
"""

import math

import numpy as np
from numpy.typing import NDArray
from scipy import fft, special

__all__ = ["ENOUGH", "SMALLEST", "bracket", "gaussian_bracket"]

Floats = NDArray[np.float64]
Law = tuple[float, Floats]
"""The loss of the first point of a grid, and the masses (n,) of its points."""
NODES, WEIGHTS = np.polynomial.legendre.leggauss(6)
SIGMAS, PIECES = 9, 60
"""Standard deviations of noise on each side that are integrated, and pieces of one standard deviation at least."""
ROUNDING, CUT = 3e-12, 1e-13
"""What transforms may round off δ, and the mass beyond each end of the circle."""
ENOUGH = 2e-3
"""Bounds are this near to each other, relative to ε, or the grid is made finer."""
SMALLEST = 0.01
"""An ε below it is not bounded more closely."""


def losses(x: Floats, z: float, q: float) -> Floats:
    """Log of the ratio of densities with and without the record, at points x (n,)."""
    shift = (2 * x - 1) / (2 * z * z)
    return np.where(shift > 600, shift + math.log(q), np.log1p(q * np.expm1(np.minimum(shift, 600))))


def points(loss: Floats, z: float, q: float) -> Floats:
    """The outputs x (n,) of these losses (n,)."""
    with np.errstate(invalid="ignore", divide="ignore"):
        shift = np.where(loss > 500, loss - math.log(q), np.log1p(np.expm1(np.minimum(loss, 500)) / q))
    return np.nan_to_num(z * z * shift + 0.5, nan=-np.inf)


def span(z: float, q: float, turned: bool) -> tuple[float, float]:
    """The least and the largest loss that are integrated; `turned`: of the law without the record over the law with it."""
    low, high = (float(loss) for loss in losses(np.array([-SIGMAS * z - 1, SIGMAS * z + 1]), z, q))
    return (-high, -low) if turned else (low, high)


def masses(edges: Floats, z: float, q: float, turned: bool) -> tuple[Floats, Floats]:
    """Masses (n,) of losses between edges (n + 1,), under the first law and under the second."""
    ends = SIGMAS * z + 1
    cut = np.clip(points(-edges[::-1] if turned else edges, z, q), -ends, ends)
    x = np.union1d(np.linspace(-ends, ends, int(PIECES * ends / z) + 1), cut)
    middle, half = (x[1:] + x[:-1]) / 2, (x[1:] - x[:-1]) / 2
    with_, without = np.zeros(len(middle)), np.zeros(len(middle))
    for node, weight in zip(NODES, WEIGHTS, strict=True):
        at = middle + half * node
        scale = weight * half / (z * math.sqrt(2 * math.pi))
        without += scale * np.exp(-(at**2) / (2 * z * z))
        with_ += scale * np.exp(-(at**2) / (2 * z * z) + losses(at, z, q))
    place = np.clip(np.searchsorted(cut, middle) - 1, 0, len(edges) - 2)
    first, second = (np.asarray(np.bincount(place, mass, len(edges) - 1), np.float64) for mass in (with_, without))
    return (second[::-1], first[::-1]) if turned else (first, second)


def upper_law(z: float, q: float, turned: bool, spacing: float) -> Law:
    """Losses of one step on multiples of `spacing`, none of their δ too small."""
    low, high = span(z, q, turned)
    first = math.floor(low / spacing) - 1
    grid = np.asarray((first + np.arange(math.ceil(high / spacing) + 2 - first)) * spacing, np.float64)
    one, other = masses(grid, z, q, turned)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.nan_to_num(np.where(one > 0, np.exp(np.log(other) + grid[:-1] - np.log(one)), 1.0), nan=1.0)
    above = np.clip((1 - ratio) / -math.expm1(-spacing), 0, 1) * one
    return first * spacing, np.append(one - above, 0.0) + np.insert(above, 0, 0.0)


def lower_law(z: float, q: float, turned: bool, spacing: float) -> Law:
    """Losses of one step on a grid of `spacing`, none of their δ too large."""
    low, high = span(z, q, turned)
    count = math.ceil((high - low) / spacing) + 4
    start = high - (count - 2) * spacing if turned else low - 2 * spacing
    edges = np.asarray(start + np.arange(count + 1) * spacing, np.float64)
    grid, moved = (edges[1:] + edges[:-1]) / 2, np.zeros(count + 1)
    one, other = masses(edges, z, q, turned)
    grid += _beyond(one, other, grid)[int(one.argmax())]
    for _ in range(4):  # to edges whose intervals have the losses of the grid, and a little more
        beyond = np.clip(_beyond(one, other, grid), -0.4 * spacing, 0.4 * spacing) - 1e-7 * spacing
        moved[1:-1] = np.clip(moved[1:-1] - (beyond[1:] + beyond[:-1]) / 2, -0.45 * spacing, 0.45 * spacing)
        one, other = masses(edges + moved, z, q, turned)
    grid += _beyond(one, other, grid)[int(one.argmax())] - 1e-9 * spacing
    return float(grid[0]), _on_grid(one, other, grid, spacing)


def _beyond(one: Floats, other: Floats, grid: Floats) -> Floats:
    """How far the loss of each merged outcome lies above its point; 0 for one without mass."""
    known = (one > 1e-40) & (other > 1e-300)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(known, np.log(one) - np.log(other) - grid, 0.0)


def _on_grid(one: Floats, other: Floats, grid: Floats, spacing: float) -> Floats:
    """Masses (n,) of merged outcomes on the grid: a part of the heaviest one joins another, else the first law loses mass."""
    numbers, heaviest = np.arange(len(grid)), int(one.argmax())
    steps = _beyond(one, other, grid) / spacing
    below, above = (np.clip(numbers + whole.astype(np.int64), 0, len(grid) - 1) for whole in (np.floor(steps), np.ceil(steps - 1e-5)))
    with np.errstate(all="ignore"):
        down, up = np.exp(grid[below]), np.exp(grid[above])
        lowered = np.where(below > heaviest, (one - down * other) / (down * other[heaviest] - one[heaviest]), 0.0)
        raised = np.where((above < heaviest) & (above > below), (up * other - one) / (one[heaviest] - up * other[heaviest]), 0.0)
    lowered, raised = (np.maximum(np.nan_to_num(lent), 0.0) for lent in (lowered, raised))
    order, allowed = np.argsort(-one), np.zeros(len(grid), bool)
    allowed[order] = np.cumsum((lowered + raised)[order]) < 0.9
    lent = np.where(allowed, lowered + raised, 0.0)
    place = np.where((lent > 0) & (raised > 0), above, below)
    left = one * np.exp(np.minimum(grid[place] - grid - steps * spacing, 0.0))
    kept = np.where(lent > 0, one + lent * one[heaviest], left)
    kept[heaviest] *= 1 - lent.sum()
    return np.asarray(np.bincount(place, kept, len(grid)), np.float64)


def composed(law: Law, steps: int, spacing: float, size: int) -> tuple[Floats, Floats]:
    """The losses (size,) of all steps together around their mean, and their masses."""
    start, mass = law
    numbers = np.arange(size)
    circle = np.bincount(np.arange(len(mass)) % size, mass, size)
    mean = float(mass @ np.arange(len(mass))) / float(mass.sum()) * steps
    turns = np.round((mean - numbers) / size)
    return (numbers + size * turns) * spacing + steps * start, fft.irfft(fft.rfft(circle) ** steps, size)


def _epsilon(at: Floats, mass: Floats, delta: float) -> float:
    low, high = 0.0, 1e3
    for _ in range(50):
        middle = (low + high) / 2
        above = at > middle
        enough = float((mass[above] * -np.expm1(middle - at[above])).sum()) > delta
        low, high = (middle, high) if enough else (low, middle)
    return high


def _half_width(z: float, q: float, steps: int) -> float:
    """How far from their mean the losses of all steps together lie, but for `CUT`, and a tenth more: by coarse grids.

    At least an eighth of the largest loss of one step, so that grids of one step are not much larger than those of all.
    """
    variance = min(q * q * math.expm1(min(z**-2, 50.0)) * steps, 1e4)
    largest, size = span(z, q, False)[1], 1 << 16
    width = largest + 24 * math.sqrt(variance) + variance
    for _ in range(3):
        far, spacing = 0.0, 2 * width / size
        for turned in (False, True):
            law = upper_law(z, q, turned, spacing)
            at, mass = composed(law, steps, spacing, size)
            order = np.argsort(at)
            beneath = np.cumsum(np.maximum(mass[order], 0.0))
            low, high = (at[order][min(int(np.searchsorted(beneath, part)), size - 1)] for part in (CUT, beneath[-1] - CUT))
            mean = steps * (law[0] + spacing * float(law[1] @ np.arange(len(law[1]))))
            far = max(far, high - mean, mean - low)
        width, before = max(1.1 * far, largest / 8), width
        if width > before / 2:
            break
    return width


def bracket(z: float, q: float, steps: int, delta: float) -> tuple[float, float]:
    """Bounds of the ε of `steps` steps with noise multiplier z at rate q < 1, under "add_remove"."""
    width, low, high = _half_width(z, q, steps), 0.0, math.inf
    for bits in (16, 18, 20, 22):
        size = 1 << bits
        spacing = 2 * width / size
        lower, upper = (
            max(_epsilon(*composed(law(z, q, turned, spacing), steps, spacing, size), delta + slack) for turned in (False, True))
            for law, slack in ((lower_law, ROUNDING), (upper_law, -ROUNDING))
        )
        low, high = max(low, lower), min(high, upper)
        if high - low <= ENOUGH * low or high < SMALLEST:
            break
    return low, high


def gaussian_bracket(z: float, steps: int, delta: float) -> tuple[float, float]:
    """Bounds of the ε of `steps` Gaussian releases (Balle & Wang 2018, Theorem 8), by bisection."""
    slope, low, high = math.sqrt(steps) / z, 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        gain, loss = special.log_ndtr(slope / 2 - middle / slope), middle + special.log_ndtr(-slope / 2 - middle / slope)
        low, high = (middle, high) if math.exp(gain) * -math.expm1(min(loss - gain, 0.0)) > delta else (low, middle)
    return low * (1 - 1e-9), high * (1 + 1e-9)
