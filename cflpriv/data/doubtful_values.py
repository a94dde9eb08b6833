"""Numbers of a column that stand for something else: a missing value, a slip of the keyboard."""

import numpy as np

from ..types import Array

__all__ = ["FEW", "FEWEST_FILLED", "RARELY", "Numbers", "far_values", "filler", "inner_filler", "missing_code", "thousands", "zeros_apart"]

FEW = 10
FEWEST_FILLED = 3
"""A filler occurs at least this many times."""
RARELY = 0.2
"""Cells with a filler that is no number of nines are at most this share."""
FEWEST_OTHERS = 20
"""So many values tell what is usual in a column, for what a single value or a code may be."""
FAR_RANGES, FAR_RATIOS = 3.0, 2.0
"""A value is far if the gap before it is so many times the range of all others, and so many times their range in logarithms.

Of n values with a Pareto tail, whatever its power, the second happens with probability below n^-2; of a lognormal tail more rarely.
"""
ATOM, FEWEST_ATOM = 4, 8
"""A number of nines inside the others' range is a filler if it occurs so many times, and as often as `ATOM` times any other value."""
NEAR_MEDIAN = 0.25
"""A code is apart if the gap after it is this share of the others' median, and more than the next values of the same number take."""
MOST_CODES = 3
FEWEST_PARTS, FEWEST_WHOLE, LONG = 20, 0.02, 0.8
"""Of numbers with thousands as decimals: how many there are, the share of whole ones beside them, and of those with all three digits."""


class Numbers:
    """The finite numbers of a column: all sorted, `ordered` (n,), the different ones, `levels` (k,), and how often they occur, `counts`."""

    def __init__(self, values: Array) -> None:
        self.ordered = np.sort(values)
        first = np.concatenate([[True], self.ordered[1:] != self.ordered[:-1]])[: len(self.ordered)]
        begins = np.flatnonzero(first)
        self.levels = self.ordered[begins]
        self.counts = np.diff(np.append(begins, len(self.ordered)))

    def __len__(self) -> int:
        return len(self.ordered)


def filler(numbers: Numbers) -> tuple[float, int] | None:
    """A number that stands for a missing value, and how often it does; None if there is none.

    It is the least or the largest, occurs several times, and is farther from all other values than these are from each other. Numbers
    other than nines are rare (`RARELY`), and not 0, which counts and amounts have.
    """
    levels, counts, n = numbers.levels, numbers.counts, len(numbers)
    if n < FEW or len(levels) < 4:
        return None
    for place, inner in ((0, slice(1, None)), (-1, slice(None, -1))):
        end, count, others = float(levels[place]), int(counts[place]), levels[inner]
        if count < FEWEST_FILLED or n - count < FEW:
            continue
        if not _nines(end) and (end == 0 or count > RARELY * n):
            continue
        nearest = float(others[0] if place == 0 else others[-1])
        if abs(end - nearest) > others[-1] - others[0]:
            return end, count
    return None


def missing_code(numbers: Numbers) -> tuple[tuple[float, ...], int] | None:
    """Negative codes among numbers that are never negative otherwise, such as −1 for an age, and how many they are; None without.

    The codes are a few whole numbers, −1 to −9 or −99 and the like. The other values are apart from 0, or are no whole numbers, so that
    −1 is no step of a scale.
    """
    below = int(np.searchsorted(numbers.levels, 0.0))
    codes, others, count = numbers.levels[:below], numbers.levels[below:], int(numbers.counts[:below].sum())
    if not 0 < below <= MOST_CODES or count < FEWEST_FILLED or len(numbers) - count < FEWEST_OTHERS or len(others) < FEW:
        return None
    if not all(code == np.trunc(code) and (code >= -9 or len(set(f"{-code:.0f}")) == 1) for code in codes.tolist()):
        return None
    apart = _apart(numbers.ordered[count:], float(codes[-1]), count)
    often = count >= ATOM * below * int(numbers.counts[below:].max()) and (others != np.trunc(others)).mean() > 1 / 2
    return (tuple(codes.tolist()), count) if apart or often else None


def zeros_apart(numbers: Numbers) -> int:
    """How many of the numbers are 0, if few are, and all others are above 0 and apart from it; else 0."""
    count = int(numbers.counts[0]) if len(numbers) and numbers.levels[0] == 0 else 0
    if not FEWEST_FILLED <= count <= RARELY * len(numbers) or len(numbers.levels) < 1 + FEW:
        return 0
    return count if _apart(numbers.ordered[count:], 0.0, count) else 0


def _apart(others: Array, code: float, count: int) -> bool:
    """Whether a code is apart from the other values, sorted: by more than the next values of the same number take."""
    gap = float(others[0]) - code
    width = float(others[min(count, len(others) - 1)] - others[0])
    return gap > width and gap > max(2.0, NEAR_MEDIAN * float(np.median(others)))


def inner_filler(numbers: Numbers) -> tuple[float, int] | None:
    """A number of nines, 99 or longer, that occurs far more often than any other value of a column with many; None if there is none."""
    if len(numbers.levels) < FEWEST_OTHERS:
        return None
    place = int(np.argmax(numbers.counts))
    value, count = float(numbers.levels[place]), int(numbers.counts[place])
    others = np.delete(numbers.counts, place)
    above = numbers.counts[np.searchsorted(numbers.levels, (numbers.levels[len(others) // 2] + value) / 2) :]
    near = np.sort(above)[-2] if len(above) > 1 and value == numbers.levels[-1] else others.max()
    return (value, count) if _nines(value) and count >= max(FEWEST_ATOM, ATOM * int(near)) else None


def far_values(numbers: Numbers) -> tuple[float, ...]:
    """One or two values so far beyond all others that they are no measurements of the same kind, as a forgotten decimal point; or none."""
    ordered = numbers.ordered
    if len(numbers.levels) < FEWEST_OTHERS:
        return ()
    for few in (1, 2):
        for far, others in ((ordered[-few:], ordered[:-few]), (ordered[:few], ordered[few:])):
            gap = float(far[0] - others[-1] if far[0] > others[0] else others[0] - far[-1])
            if gap <= FAR_RANGES * (others[-1] - others[0]):
                continue
            sizes = np.abs(others)
            least, largest, middle = float(np.abs(far).min()), float(sizes.max()), float(np.median(sizes))
            if least > largest and middle > 0 and np.log(least / largest) > FAR_RATIOS * np.log(largest / middle):
                return tuple(far.tolist())
    return ()


def thousands(numbers: Numbers) -> int:
    """How many numbers have three decimals that may be thousands, such as 12.345 for 12345 among 945 or 23456; 0 if it is unlikely.

    Three decimals that are all thousands leave 1 in 10 of the numbers with a shorter form, numbers with two decimals most of them. And
    among measurements to three decimals 1 in 1000 is whole: `FEWEST_FILLED` whole ones or more, 2 % of all, occur with a probability below
    1e-6 from 100 rows on. What was whole must continue what the others are with their decimals as thousands, and would not fit otherwise.
    """
    values, counts = np.abs(numbers.levels), numbers.counts
    whole = values == np.trunc(values)
    parts = counts[~whole].sum()
    if parts < FEWEST_PARTS or counts[whole].sum() < max(FEWEST_FILLED, FEWEST_WHOLE * len(numbers)):
        return 0
    large, written = values[whole], values[~whole]
    in_thousands = np.round(written * 1000)
    if written.min() < 1 or written.max() >= 1000 or np.abs(in_thousands - 1000 * written).max() > 1e-6 * in_thousands.max():
        return 0
    if counts[~whole][in_thousands % 10 != 0].sum() < LONG * parts:
        return 0
    middle = _median(written, counts[~whole])
    above = large >= 1000
    if above.any():  # others write all digits
        rows = counts[whole][above]
        usual = np.log(large[above])
        centre, spread = _median(usual, rows), max(float(np.average(np.abs(usual - _median(usual, rows)), weights=rows)), 0.05)
        return int(parts) if rows.sum() >= FEWEST_OTHERS and abs(np.log(1000 * middle) - centre) < 3 * spread < np.log(1000) / 2 else 0
    low = float(np.quantile(np.repeat(large, counts[whole]), 0.25))
    return int(parts) if low > 3 * middle and in_thousands.min() < 3 * large.max() and large.max() > 100 else 0


def _median(values: Array, counts: Array) -> float:
    """The median of sorted values that occur several times."""
    return float(values[np.searchsorted(np.cumsum(counts), counts.sum() / 2)])


def _nines(value: float) -> bool:
    """Whether a number is written with nines alone, at least two."""
    digits = f"{abs(value):.12g}".replace(".", "")
    return len(digits) > 1 and set(digits) == {"9"}
