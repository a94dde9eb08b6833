"""Columns of a table that can be read, and yet are hardly what was meant: a number that stands for a missing value, the label once more.

Each check needs evidence that good tables have by no chance. Warnings are of what spoils a result, notes of what is only odd.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ..types import Array
from .class_names import accidental_pairs, same_name
from .columns import cell_name, nested, shown

__all__ = ["Remarks", "column_remarks", "filler", "is_filler_date", "total_row"]

FEW = 10
MOST_PARTNERS = 50
"""A column with more values is not compared with classes or clients."""
FEWEST_FILLED = 3
"""A filler occurs at least this many times."""
RARELY = 0.2
"""Cells with a filler that is no number of nines, or with another unit, are at most this share."""
ALIKE = 0.15
"""Units differ by a power of ten to within this share."""
EXACT = 2.0**53
"""Larger whole numbers are not all numbers of double precision."""
SAME = 1e-9
"""A column is the label in another unit if their correlation is nearer to 1 than this."""
FILLER_DATES = frozenset(
    ((1, 1, 1), (1753, 1, 1), (1899, 12, 30), (1899, 12, 31), (1900, 1, 1), (1970, 1, 1), (2099, 12, 31), (9999, 12, 31))
)
"""Year, month and day that programs write where a date is missing."""
TOTALS = frozenset(("total", "totals", "grand total", "subtotal", "sum", "sums", "average", "mean", "overall", "all"))


@dataclass(frozen=True)
class Remarks:
    """What is doubtful about columns, and what is only odd."""

    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def filler(values: Array) -> tuple[float, int] | None:
    """A number that stands for a missing value among numbers (n,), and how often it does; None if there is none.

    It is the least or the largest, occurs several times, and is farther from all other values than these are from each other. Numbers
    other than nines are rare (`RARELY`), and not 0, which counts and amounts have.
    """
    if len(values) < FEW:
        return None
    for end in (float(values.min()), float(values.max())):
        nines = f"{abs(end):.12g}".replace(".", "")
        others = values[values != end]
        count = len(values) - len(others)
        if count < FEWEST_FILLED or len(others) < FEW or len(np.unique(others)) < 3:
            continue
        if (len(nines) < 2 or set(nines) != {"9"}) and (end == 0 or count > RARELY * len(values)):
            continue
        nearest = float(others.min() if end < others.min() else others.max())
        if abs(end - nearest) > others.max() - others.min():
            return end, count
    return None


def other_unit(values: Array) -> tuple[float, int] | None:
    """The power of ten between some of the numbers (n,) and the others, as in another unit, and how many these are; None if none differ.

    The few are apart from the others by more than the others' range.
    """
    ordered = np.sort(values)
    if len(ordered) < FEW or ordered[0] <= 0:
        return None
    place = int(np.argmax(np.diff(np.log(ordered)))) + 1
    low, high = ordered[:place], ordered[place:]
    few, many = (low, high) if len(low) < len(high) else (high, low)
    if not FEWEST_FILLED <= len(few) <= RARELY * len(values) or len(np.unique(few)) < 2:
        return None
    ratio = float(np.median(high) / np.median(low))
    power = 10.0 ** round(np.log10(ratio))
    apart = min(float(high[0] / low[-1]), ratio) > float(many[-1] / many[0]) * float(few[-1] / few[0])
    return (power, len(few)) if power >= 10 and abs(ratio / power - 1) < ALIKE and apart else None


def _zeros_apart(values: Array) -> int:
    """How many of these numbers (n,) are 0, if few are, and all others are above 0 by more than half of their range; else 0."""
    others = values[values != 0]
    count = len(values) - len(others)
    if not FEWEST_FILLED <= count <= RARELY * len(values) or len(np.unique(others)) < FEW or others.min() < 0:
        return 0
    return count if others.min() > (others.max() - others.min()) / 2 else 0


def is_filler_date(year: int, month: int, day: int) -> bool:
    """Whether programs write this date where one is missing."""
    return (year, month, day) in FILLER_DATES


def column_remarks(
    columns: Mapping[str, Sequence[Any]], numbers: Mapping[str, Array], label: tuple[str, Array, bool], client: tuple[str, Array | None]
) -> Remarks:  # fmt: skip
    """Remarks on the columns of features of a table.

    Args:
        columns: the cells of each column, all parts of the table together.
        numbers: the values (rows,) of columns of numbers, NaN for blanks.
        label: its column's name, its classes or numbers (rows,), and whether it is a number.
        client: its column's name, and the number of each row's client (rows,); None without clients.
    """
    warnings, notes = list[str](), list[str]()
    numbered = {**numbers, label[0]: label[1]} if label[2] else numbers
    for name, values in numbered.items():
        if (found := filler(values[np.isfinite(values)])) is not None:
            warnings.append(
                f"column {name!r}: {found[0]:g} occurs {found[1]} times, far from all other values; if it stands for a missing value, "
                "make these cells blank"
            )
        elif zeros := _zeros_apart(values[np.isfinite(values)]):
            notes.append(
                f"column {name!r}: 0 occurs {zeros} times, apart from all other values; if it stands for a missing value, make it blank"
            )
        elif (unit := other_unit(values[np.isfinite(values)])) is not None:
            notes.append(f"column {name!r}: {unit[1]} values differ from all others by about {unit[0]:g} times; are they in another unit?")
    for name, cells in columns.items():
        if len(cells) < FEW or nested(cells[0]):
            continue
        if all(cell == cells[0] for cell in cells):
            notes.append(f"column {name!r} has one value only, {shown(cells[0])}, so it tells nothing")
            continue
        own = numbers.get(name)
        if own is not None and np.nanmax(np.abs(own), initial=0.0) > EXACT and len({*cells}) > len(np.unique(own)):
            warnings.append(
                f"column {name!r}: {len({*cells})} different numbers are {len(np.unique(own))} in double precision, since they are "
                "larger than 2^53; subtract a public number from all"
            )
        if _is_label(cells, own, *label[1:]):
            warnings.append(
                f"column {name!r} says the label {label[0]!r}: each of its values goes with one label; leave it out if it is made from "
                "the label, or known only after it"
            )
        elif own is not None and not label[2] and _decides(own, label[1]):
            notes.append(f"column {name!r} decides the label {label[0]!r} alone, by thresholds; leave it out if it is known only after it")
        if own is not None and client[1] is not None and _counts_rows(own, client[1]):
            notes.append(f"column {name!r} counts the rows of each client; leave it out if it is an index")
        if name not in numbers and client[1] is not None and _partners(cells, client[1]):
            warnings.append(
                f"column {name!r} names the client: each of its values is at one client; leave it out, or models learn who somebody is"
            )
    notes += [f"columns {first!r} and {second!r} are equal" for first, second in _equal(columns)]
    notes += [f"columns {first!r} and {second!r} have names that differ as by accident" for first, second in accidental_pairs(columns)]
    return Remarks(tuple(warnings), tuple(notes))


def _is_label(cells: Sequence[Any], values: Array | None, labels: Array, is_number: bool) -> bool:
    if not is_number:
        return _partners(cells, labels)
    if values is None or not np.isfinite(values).all() or values.std() == 0 or labels.std() == 0:
        return False
    return bool(abs(np.corrcoef(values, labels)[0, 1]) > 1 - SAME)


def _partners(cells: Sequence[Any], codes: Array) -> bool:
    """Whether each of several values of a column goes with one code, and each code with one value, in at least two rows."""
    code_of, value_of, seen = dict[Hashable, int](), dict[int, Hashable](), dict[int, int]()
    for cell, code in zip(cells, codes.tolist(), strict=True):
        value = same_name(cell) if isinstance(cell, str) else cell_name(cell)
        if code_of.setdefault(value, code) != code or value_of.setdefault(code, value) != value or len(code_of) > MOST_PARTNERS:
            return False
        seen[code] = seen.get(code, 0) + 1
    return len(code_of) > 1 and min(seen.values()) > 1


def _decides(values: Array, labels: Array) -> bool:
    """Whether each label has a range of values of its own, with `FEW` rows at least."""
    if len(np.unique(values)) <= MOST_PARTNERS or not np.isfinite(values).all() or min(np.unique(labels, return_counts=True)[1]) < FEW:
        return False
    ends = sorted((float(values[labels == label].min()), float(values[labels == label].max())) for label in np.unique(labels))
    return len(ends) > 1 and all(first[1] < second[0] for first, second in pairwise(ends))


def _counts_rows(values: Array, clients: Array) -> bool:
    """Whether each client's values, of `FEW` rows at least, are 0, 1, 2, … or 1, 2, 3, …"""
    if not np.isfinite(values).all():
        return False
    for client in np.unique(clients):
        own = np.sort(values[clients == client])
        if len(own) < FEW or own[0] not in (0, 1) or not np.array_equal(own, own[0] + np.arange(len(own))):
            return False
    return len(np.unique(clients)) > 1


def _equal(columns: Mapping[str, Sequence[Any]]) -> list[tuple[str, str]]:
    """Pairs of columns with the same cells, which are not all one value."""
    pairs, first = list[tuple[str, str]](), dict[str, str]()
    for name, cells in columns.items():
        begin = repr(cells[:FEW])
        other = first.setdefault(begin, name)
        if other != name and len(cells) >= FEW and cells == columns[other] and any(cell != cells[0] for cell in cells):
            pairs.append((other, name))
    return pairs


def total_row(columns: Mapping[str, Sequence[Any]], place: str) -> str:
    """A warning if the last row of a table, which is at `place`, is a total of the others; "" if it is not."""
    for name, cells in columns.items():
        if len(cells) < FEW or not isinstance(cells[-1], str):
            continue
        if cells[-1].strip(" :.").casefold() in TOTALS and cells.count(cells[-1]) == 1:
            return f"{place}: {cells[-1]!r} in column {name!r} occurs in the last row alone; remove the row if it is a total of the others"
    return ""
