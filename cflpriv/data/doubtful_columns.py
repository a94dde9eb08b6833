"""Columns of a table that can be read, and yet are hardly what was meant: a number that stands for a missing value, the label once more.

Each check needs evidence that good tables have by no chance. Warnings are of what spoils a result, notes of what is only odd.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ..types import Array
from .class_names import accidental_pairs, same_name
from .columns import cell_name, nested, shown
from .doubtful_clients import client_remarks
from .doubtful_relations import relation_notes
from .doubtful_rows import copied_rows
from .doubtful_runs import repeated_in_a_run
from .doubtful_swaps import exchanged_rows
from .doubtful_units import SMALLEST, examined_rows, mixed_units, shown_step
from .doubtful_values import FEW, Numbers, far_values, filler, inner_filler, missing_code, thousands, zeros_apart

__all__ = ["Remarks", "column_remarks", "is_filler_date"]

MOST_PARTNERS = 50
"""A column with more values is not compared with classes or clients."""
MOST_WRONG = 0.05
"""Of the rows of the rarest class: a column that says so few labels wrongly nearly is the label."""
STEPS = 0.8
"""So many neighbours are equal in a column of steps."""
SAMPLE = 1000
"""Rows of a longer table that are looked at first."""
EXACT = 2.0**53
"""Larger whole numbers are not all numbers of double precision."""
MOST_COMPARED, ROUNDED = 200, 1e-5
"""Of so many columns pairs are compared; two are one but for rounding if their correlation is nearer to 1 than this."""
SAME = 1e-9
"""A column is the label in another unit if their correlation is nearer to 1 than this."""
MOST_NAMED = 3
FILLER_DATES = frozenset(
    ((1, 1, 1), (1753, 1, 1), (1899, 12, 30), (1899, 12, 31), (1900, 1, 1), (1970, 1, 1), (2099, 12, 31), (9999, 12, 31))
)
"""Year, month and day that programs write where a date is missing."""


@dataclass(frozen=True)
class Remarks:
    """What is doubtful about columns, and what is only odd."""

    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def is_filler_date(year: int, month: int, day: int) -> bool:
    """Whether programs write this date where one is missing."""
    return (year, month, day) in FILLER_DATES


def column_remarks(
    columns: Mapping[str, Sequence[Any]], numbers: Mapping[str, Array], label: tuple[str, Array, bool],
    client: tuple[str, Array | None, Sequence[str]], own: Collection[str] = (),
) -> Remarks:  # fmt: skip
    """Remarks on the columns of features of a table.

    Args:
        columns: the cells of each column, all parts of the table together.
        numbers: the values (rows,) of columns of numbers, NaN for blanks.
        label: its column's name, its classes or numbers (rows,), and whether it is a number.
        client: its column's name, the number of each row's client (rows,), None without clients, and the clients' names.
        own: columns that each client standardises by its own rows.
    """
    warnings, notes = _remarks_of_numbers({**numbers, label[0]: label[1]} if label[2] else numbers, client)
    swapped = [] if client[1] is None else exchanged_rows(numbers, label[1], client[1])
    explained = {name for pair, _, _ in swapped for name in pair}
    for name, found in mixed_units(numbers, label[1], client[1]).items():
        words = f"column {name!r}: {found.count} values differ from the others by {shown_step(found.step)}"
        if name in explained:
            continue
        if found.sure:
            warnings.append(f"{words}, and nothing else does; bring all to one unit")
        else:
            notes.append(f"{words}; are they in another unit?")
    if client[1] is not None:
        warned, noted = client_remarks(columns, numbers, client[1], client[2], own, swapped)
        warnings += warned
        notes += noted
        notes += filter(None, [copied_rows(numbers, label[1], client[1], client[2])])
    notes += relation_notes(numbers, label[1], client[1], client[2])
    still = [name for name, cells in columns.items() if len(cells) >= FEW and not nested(cells[0]) and all(c == cells[0] for c in cells)]
    if still:
        notes.append(_one_value(still, columns))
    for name, cells in columns.items():
        if name in still:
            continue
        warned, noted = _remarks_of_cells(name, cells, numbers.get(name), label, client[1])
        warnings += warned
        notes += noted
    notes += [f"columns {first!r} and {second!r} say the same in two units" for first, second in _proportional(numbers)]
    notes += [f"columns {first!r} and {second!r} are equal" for first, second in _equal(columns)]
    notes += [f"columns {first!r} and {second!r} have names that differ as by accident" for first, second in accidental_pairs(columns)]
    return Remarks(tuple(warnings), tuple(notes))


def _remarks_of_numbers(numbers: Mapping[str, Array], client: tuple[str, Array | None, Sequence[str]]) -> tuple[list[str], list[str]]:
    """Warnings and notes of the values of each column of numbers, by themselves and in the order of each client's rows."""
    warnings, notes = list[str](), list[str]()
    rows = len(next(iter(numbers.values()), ()))
    owners = np.zeros(rows, np.int64) if client[1] is None else client[1]
    by_client = np.argsort(owners, kind="stable")
    begins = np.flatnonzero(np.diff(owners[by_client], prepend=-1))

    def shown_client(place: int) -> str:
        return "" if client[1] is None else f" of client {client[2][owners[by_client[begins[place]]]]!r}"

    for name, column in numbers.items():
        there = np.isfinite(column)
        finite = Numbers(column[there])
        warned, noted = _value_remarks(finite)
        if warned and _of_places(column, finite, client[1]):
            continue
        if not warned and there.all():
            noted += [
                f"{run.rows} rows one after another{shown_client(run.client)} have {run.value:g}; did a sensor, or a copy, stop?"
                for run in repeated_in_a_run(column[by_client], begins)
            ]
        warnings += [f"column {name!r}: {remark}" for remark in warned]
        notes += [f"column {name!r}: {remark}" for remark in noted]
    return warnings, notes


def _remarks_of_cells(
    name: str, cells: Sequence[Any], values: Array | None, label: tuple[str, Array, bool], clients: Array | None
) -> tuple[list[str], list[str]]:
    """Warnings and notes of the cells of a column beside the label and the client; `values` (rows,) if they are numbers."""
    if len(cells) < FEW or nested(cells[0]):
        return [], []
    warnings, notes = list[str](), list[str]()
    if values is not None and np.nanmax(np.abs(values), initial=0.0) > EXACT and len({*cells}) > len(np.unique(values)):
        warnings.append(
            f"column {name!r}: {len({*cells})} different numbers are {len(np.unique(values))} in double precision, since they are "
            "larger than 2^53; subtract a public number from all"
        )
    if _is_label(cells, values, *label[1:]):
        warnings.append(
            f"column {name!r} says the label {label[0]!r}: each of its values goes with one label; leave it out if it is made from "
            "the label, or known only after it"
        )
    elif not label[2] and (share := _agreement(cells, label[1])):
        notes.append(
            f"column {name!r} says the label {label[0]!r} in {100 * share:.4g} % of the rows; leave it out if it is known only after it"
        )
    elif values is not None and not label[2] and _decides(values, label[1]):
        notes.append(f"column {name!r} decides the label {label[0]!r} alone, by thresholds; leave it out if it is known only after it")
    if values is not None and clients is not None and _counts_rows(values, clients):
        notes.append(f"column {name!r} counts the rows of each client; leave it out if it is an index")
    if values is None and clients is not None and _partners(cells, clients):
        warnings.append(
            f"column {name!r} names the client: each of its values is at one client; leave it out, or models learn who somebody is"
        )
    return warnings, notes


def _one_value(still: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> str:
    """A note of the columns with one value each, in one line: images have many."""
    if len(still) == 1:
        return f"column {still[0]!r} has one value only, {shown(columns[still[0]][0])}, so it tells nothing"
    some = ", ".join(map(repr, still[:MOST_NAMED])) + (", …" if len(still) > MOST_NAMED else "")
    return f"{len(still)} columns ({some}) have one value each, so they tell nothing"


def _of_places(values: Array, numbers: Numbers, clients: Array | None) -> bool:
    """Whether the least, or the largest, value belongs to places in the table rather than to missing values.

    It fills all rows of clients, as a height above the sea does, and no row of others; or it is one step of a column of steps.
    """
    for end in (numbers.levels[0], numbers.levels[-1]):
        here = values == end
        still = values[1:] == values[:-1]
        if still[~here[1:]].mean() > STEPS and np.diff(np.flatnonzero(here)).max(initial=1) == 1:
            return True
        if clients is not None:
            inside = np.bincount(clients[here], minlength=int(clients.max()) + 1)
            rows = np.bincount(clients, minlength=len(inside))
            if (inside >= FEW).any() and ((inside == 0) | (inside == rows)).all():
                return True
    return False


def _value_remarks(numbers: Numbers) -> tuple[list[str], list[str]]:
    """Warnings and notes of the numbers of a column."""
    blank = "if it stands for a missing value, make these cells blank"
    if (found := filler(numbers)) is not None:
        return [f"{found[0]:g} occurs {found[1]} times, far from all other values; {blank}"], []
    if (coded := missing_code(numbers)) is not None:
        codes = " or ".join(f"{code:g}" for code in coded[0])
        return [f"{codes} occurs {coded[1]} times, and no other value is negative; {blank}"], []
    if dotted := thousands(numbers):
        some = next(value for value in numbers.levels.tolist() if value != np.trunc(value))
        return [
            f"{dotted} values have three decimals that continue the whole ones as thousands; is {some:g} meant as {1000 * some:.0f}?"
        ], []
    if far := far_values(numbers):
        some = " and ".join(f"{value:g}" for value in sorted(set(far)))
        return [f"{some} is far beyond all other values, which then differ little; is it a slip, or another unit?"], []
    if zeros := zeros_apart(numbers):
        return [], [f"0 occurs {zeros} times, apart from all other values; {blank}"]
    if (often := inner_filler(numbers)) is not None:
        return [], [f"{often[0]:g} occurs {often[1]} times, far more often than any other value; {blank}"]
    return [], []


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


def _agreement(cells: Sequence[Any], labels: Array) -> float:
    """The share of rows whose label is the usual one of their value, if a column of few values says nearly all labels; else 0."""
    if len(cells) > 2 * SAMPLE and not _agreement(cells[:: len(cells) // SAMPLE], labels[:: len(cells) // SAMPLE]):
        return 0.0
    counts: dict[Hashable, dict[int, int]] = {}
    for cell, code in zip(cells, labels.tolist(), strict=True):
        of_value = counts.setdefault(cell, {})
        of_value[code] = of_value.get(code, 0) + 1
        if len(counts) > MOST_PARTNERS:
            return 0.0
    usual = np.unique([max(of_value, key=of_value.__getitem__) for of_value in counts.values()])
    wrong = len(cells) - sum(max(of_value.values()) for of_value in counts.values())
    rarest = np.unique(labels, return_counts=True)[1].min()
    complete = len(usual) == len(np.unique(labels)) > 1 and FEW * len(counts) <= len(cells) and rarest >= FEW
    return 1 - wrong / len(cells) if complete and wrong <= MOST_WRONG * rarest else 0.0


def _decides(values: Array, labels: Array) -> bool:
    """Whether each label has a range of values of its own, with `FEW` rows at least."""
    if len(values) > 2 * SAMPLE and not _decides(values[:: len(values) // SAMPLE], labels[:: len(values) // SAMPLE]):
        return False
    if len(np.unique(values)) <= MOST_PARTNERS or not np.isfinite(values).all() or min(np.unique(labels, return_counts=True)[1]) < FEW:
        return False
    ends = sorted((float(values[labels == label].min()), float(values[labels == label].max())) for label in np.unique(labels))
    return len(ends) > 1 and all(first[1] < second[0] for first, second in pairwise(ends))


def _counts_rows(values: Array, clients: Array) -> bool:
    """Whether each client's values, of `FEW` rows at least, are 0, 1, 2, … or 1, 2, 3, …"""
    if values.min() not in (0, 1) or not np.array_equal(values, np.trunc(values)):  # neither holds of NaN
        return False
    order = np.lexsort((values, clients))
    begins = np.flatnonzero(np.diff(clients[order], prepend=-1))
    sizes, firsts = np.diff(np.append(begins, len(order))), values[order][begins]
    counted = np.arange(len(order)) - np.repeat(begins - firsts, sizes)
    return len(begins) > 1 and sizes.min() >= FEW and bool((firsts <= 1).all()) and np.array_equal(values[order], counted)


def _proportional(numbers: Mapping[str, Array]) -> list[tuple[str, str]]:
    """Pairs of columns of numbers, not equal, where one is the other times a number plus a number, but for rounding."""
    names = [name for name, values in numbers.items() if np.isfinite(values).all() and len(np.unique(values[:SAMPLE])) > MOST_PARTNERS]
    if not 1 < len(names) <= MOST_COMPARED:
        return []
    rows = examined_rows(len(numbers[names[0]]), 2 * SAMPLE)
    some = np.stack([numbers[name][rows] for name in names])
    wide = some.std(1) > SMALLEST
    names, some = [name for name, is_wide in zip(names, wide.tolist(), strict=True) if is_wide], some[wide]
    if len(names) < 2:
        return []
    related = np.abs(np.corrcoef(some)) > 1 - ROUNDED
    pairs = [(names[i], names[j]) for i, j in zip(*np.nonzero(np.triu(related, 1)), strict=True)]
    return [(first, second) for first, second in pairs if not np.array_equal(numbers[first], numbers[second])]


def _equal(columns: Mapping[str, Sequence[Any]]) -> list[tuple[str, str]]:
    """Pairs of columns with the same cells, which are not all one value."""
    pairs, first = list[tuple[str, str]](), dict[str, str]()
    for name, cells in columns.items():
        begin = repr(cells[:FEW])
        other = first.setdefault(begin, name)
        if other != name and len(cells) >= FEW and cells == columns[other] and any(cell != cells[0] for cell in cells):
            pairs.append((other, name))
    return pairs
