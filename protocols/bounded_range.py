"""The price of choices by the exponential mechanism, which are bounded in range.

**Bounded range.** A mechanism is ε-bounded-range if, for neighbours D and D′, the loss log P(y)/P′(y) of all its outcomes y lies in one
interval [t − ε, t]. The interval contains 0, so 0 ≤ t ≤ ε, and t may be any of these: it depends on D and D′. So ε-bounded-range implies
pure ε (losses in [−ε, ε]) and is about half of what pure ε allows. `mechanisms.noisy_argmin` is ε-bounded-range under both relations: the
loss of an outcome j is a common constant plus rate · (s′_j − s_j), where s and s′ are the scores of D and D′.

- "add_remove": rate ε / sensitivity, and all scores move the same way, by 0 to `sensitivity`: an interval of length ε.
- "replace_one": rate ε / (2 sensitivity), and each score moves by −`sensitivity` to `sensitivity`: an interval of length ε, too.

**Adaptive composition.** With each choice an adversary may choose the data, and so t, by what it has seen so far. Let u be the likelihood
ratio (P′ over P) of what was seen, and V(u) the largest δ at ε₀ that the remaining releases can lead to. Without any V(u) =
max(0, 1 − e^ε₀ u). A choice before them multiplies u by a factor of mean 1 (under P) in [e^−t, e^(ε−t)]. V is convex, so among all such
factors the worst takes the two ends only, and

    (B_ε V)(u) = max over 0 ≤ t ≤ ε of  p V(u e^−t) + (1 − p) V(u e^(ε−t)),   p = (e^ε − e^t) / (e^ε − 1),

which is convex and falling in u again. Repeating it gives the δ of the worst adaptive composition, exactly. Where the ε differ, the order
is the adversary's, and the maximum over all orders is taken.

**With other releases.** A Gaussian release replaces V(u) by (G V)(u) = E V(u M), where M is the likelihood ratio of its dominating pair,
the same whatever was seen. A maximum over t of expectations is at most the expectation of the maximum, so B G V ≤ G B V: the worst order
has all other releases first and the choices last. So the curve δ(ε₀) = V(1) of the choices alone, taken as that of one privacy-loss
distribution, composes with those of all other releases to an upper bound for every order, adaptive or not.

**Numbers.** V is kept as a function that is linear in u between points of an even grid of losses −log u. That is an upper bound of a
convex function and convex itself. Between two grid points of t the maximum is found in closed form (`_step`). Beyond the grid the curve
is continued by lines that are upper bounds, too. What is left is rounding, about 1e-16 a step.

Sources: Durfee & Rogers 2019 (definition); Dong, Durfee & Rogers 2020, "Optimal differential privacy composition for exponential
mechanisms" (the worst case of one mechanism, and that adaptive composition loses more than a single t); Cesar & Rogers 2021
(ε²/8-concentrated, used under Rényi accounting). The recursion follows from the steps above; tests compare it with enumerated compositions.
"""

import itertools
import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["Choices", "bounded_range_deltas", "bounded_range_kinds", "bounded_range_reach"]

Floats = NDArray[np.float64]
Choices = tuple[tuple[float, int], ...]
"""Choices of a bill: (ε of one choice, how many of them), each ε once."""

PARTS = 24
"""Grid points in the range of the smallest kind of choice: ε is too high by some 0.1 %."""
MOST_RATIO = 8
"""Of the largest ε of one choice to the smallest, for those that share a grid."""
MOST_STATES = 1024
"""Different numbers of remaining choices of several kinds, at most."""
TAIL = 36.0
"""The grid ends where a probability is below e^-TAIL."""


def bounded_range_kinds(choices: Choices) -> tuple[Choices, Choices]:
    """The choices that are composed here, and the few that are better taken as pure ones.

    A computation for several kinds goes through all numbers of remaining choices; kinds that weigh little (by count · ε²) and would make it
    long, or that would need a much finer grid, are left out. A pure choice has a dominating pair whatever was seen, as a Gaussian release.
    """
    kept: list[tuple[float, int]] = []
    for epsilon, count in sorted(choices, key=lambda choice: -choice[1] * choice[0] ** 2):
        kinds = [*kept, (epsilon, count)]
        sizes = [each for each, _ in kinds]
        if len(kept) == 0 or (math.prod(n + 1 for _, n in kinds) <= MOST_STATES and max(sizes) <= MOST_RATIO * min(sizes)):
            kept = kinds
    return tuple(sorted(kept)), tuple(sorted(set(choices) - set(kept)))


def bounded_range_reach(choices: Choices) -> float:
    """The largest loss that `choices` have but for a probability of e^-`TAIL`: their sum, or less where they are many."""
    concentrated = math.fsum(count * epsilon**2 / 8 for epsilon, count in choices)
    return min(math.fsum(count * epsilon for epsilon, count in choices), concentrated + math.sqrt(4 * concentrated * TAIL))


def bounded_range_deltas(choices: Choices, epsilons: Floats) -> Floats:
    """δ (n,) at each of `epsilons` (n,), negative ones too, of the worst adaptive composition of bounded-range choices; an upper bound.

    Takes long for kinds that `bounded_range_kinds` would leave out. Raises `ValueError` for an ε that is not a finite number above 0 or a
    count below 1.
    """
    for epsilon, count in choices:
        if not (math.isfinite(epsilon) and epsilon > 0 and count >= 1):
            raise ValueError(f"choices: {count} of epsilon {epsilon}: expected a finite epsilon above 0 and a count of 1 or more")
    spacing, sizes = _gridded(tuple(sorted(epsilon for epsilon, _ in choices)))
    values = _worst(spacing, sizes, tuple(count for _, count in sorted(choices)))
    return _between(values, -np.asarray(epsilons, dtype=np.float64) / spacing, spacing)


@lru_cache(maxsize=256)
def _gridded(kinds: tuple[float, ...]) -> tuple[float, tuple[int, ...]]:
    """The grid's spacing, and the range of each kind in grid points, rounded up, which only costs more."""

    def sizes(parts: int) -> tuple[int, ...]:
        return tuple(math.ceil(epsilon * parts / kinds[0] * (1 - 1e-12)) for epsilon in kinds)

    def lost(parts: int) -> float:
        return max(size * kinds[0] / (parts * epsilon) for size, epsilon in zip(sizes(parts), kinds, strict=True))

    parts = min(range(PARTS, 2 * PARTS), key=lambda parts: (round(lost(parts), 9), parts))
    return kinds[0] / parts * (1 + 2e-12), sizes(parts)  # a range must not be too short by rounding either


def _worst(spacing: float, sizes: tuple[int, ...], counts: tuple[int, ...]) -> Floats:
    """V at log(1/u) = −J … J grid points, for so many choices of each kind."""
    for state in itertools.product(*(range(count + 1) for count in counts)):
        values = _state(spacing, sizes, state)  # in an order in which all states with one choice less came before
    return values


@lru_cache(maxsize=2 * MOST_STATES)
def _state(spacing: float, sizes: tuple[int, ...], counts: tuple[int, ...]) -> Floats:
    kinds = tuple((size * spacing, count) for size, count in zip(sizes, counts, strict=True) if count)
    reach = math.ceil(bounded_range_reach(kinds) / spacing * (1 - 1e-12)) + 1
    if not kinds:
        return np.maximum(0.0, -np.expm1(-spacing * np.arange(-reach, reach + 1.0)))
    before = [(size, (*counts[:i], counts[i] - 1, *counts[i + 1 :])) for i, size in enumerate(sizes) if counts[i]]
    values = np.max([_step(_state(spacing, sizes, fewer), size, reach, spacing) for size, fewer in before], axis=0)
    values.setflags(write=False)
    return np.asarray(values)


def _extended(values: Floats, reach: int, spacing: float) -> Floats:
    """V at −reach … reach, from fewer or more points: left of them at most constant, right of them below the line to V(0) = 1."""
    half = len(values) // 2
    if reach <= half:
        return values[half - reach : half + reach + 1]
    right = 1.0 - (1.0 - values[-1]) * np.exp(-spacing * np.arange(1, reach - half + 1))
    return np.concatenate([np.full(reach - half, values[0]), values, right])


def _between(values: Floats, places: Floats, spacing: float) -> Floats:
    """V at any `places`, in grid points: linear in u between them, continued as in `_extended`."""
    half = len(values) // 2
    inside = np.clip(places, -half, half)
    low = np.minimum(np.floor(inside).astype(np.int64), half - 1)
    share = np.expm1(-spacing * (inside - low)) / np.expm1(-spacing)  # of the way in u to the next point
    interpolated = (1 - share) * values[low + half] + share * values[low + half + 1]
    beyond = 1.0 - (1.0 - values[-1]) * np.exp(-spacing * np.maximum(0.0, places - half))
    return np.asarray(np.where(places > half, beyond, interpolated))


def _step(values: Floats, size: int, reach: int, spacing: float) -> Floats:
    """B V at −reach … reach, for a choice whose range is `size` grid points.

    With a = e^−t between two grid points both V(u a) = α + β a and V(u a e^ε) = γ + κ a are lines, and what B maximises, times e^ε − 1, is
    a constant + (e^ε β − κ) a − (α − γ) / a. As V is convex and falling, α ≥ γ and κ ≥ e^ε β: it is concave in a, and largest at
    a² = (α − γ) / (κ − e^ε β), or at the nearer end.
    """
    wide = _extended(values, reach + size, spacing)
    count, whole = 2 * reach + 1, size * spacing
    best = wide[size : size + count].copy()  # t = 0
    factor, scale = math.exp(-spacing), -math.expm1(-whole)  # scale: (e^ε − 1) / e^ε
    for part in range(size):
        top, width = math.exp(-spacing * part), math.exp(-spacing * part) * -math.expm1(-spacing)
        above, above_next = wide[size + part : size + part + count], wide[size + part + 1 : size + part + 1 + count]
        below, below_next = wide[part : part + count], wide[part + 1 : part + 1 + count]
        rise, fall = (above_next - above) / width, (below_next - below) / width  # −β, −κ
        numerator = (above + rise * top) - (below + fall * top)
        denominator = rise * math.exp(whole) - fall if whole < 600 else np.full(count, math.inf)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            a = np.sqrt(np.maximum(numerator, 0.0) / denominator)
        a = np.clip(np.nan_to_num(a, nan=top), top * factor, top)
        share = (top - a) / width
        p = np.clip((1.0 - np.exp(-whole) / a) / scale, 0.0, 1.0)
        first, second = (1 - share) * above + share * above_next, (1 - share) * below + share * below_next
        np.maximum(best, p * first + (1 - p) * second, out=best)
        end = (1.0 - math.exp(-whole) / (top * factor)) / scale  # the grid point itself, whatever rounding did to a
        np.maximum(best, end * above_next + (1 - end) * below_next, out=best)
    return np.minimum(best, 1.0)
