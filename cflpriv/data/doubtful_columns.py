"""Columns of a table that can be read, and yet are hardly what was meant: a number that stands for a missing value, the label once more.

Each check needs evidence that good tables have by no chance. Warnings are of what spoils a result, notes of what is only odd.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
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
    """A number of nines that stands for a missing value among numbers (n,), and how often it does; None if there is none.

    It is the least or the largest, and farther from all other values than these are from each other.
    """
    if len(values) < FEW:
        return None
    for end in (float(values.min()), float(values.max())):
        digits = f"{abs(end):.12g}".replace(".", "")
        if len(digits) < 2 or set(digits) != {"9"}:
            continue
        others = values[values != end]
        count = len(values) - len(others)
        if count < FEWEST_FILLED or len(others) < FEW or len(np.unique(others)) < 3:
            continue
        nearest = float(others.min() if end < others.min() else others.max())
        if abs(end - nearest) > others.max() - others.min():
            return end, count
    return None


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
