"""Rows of a table that are no samples: the header again, units or a note among numbers, totals and means of the other rows, and
rows of one client that come again at another."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InputError
from ..types import Array
from .columns import cell_name, is_blank

__all__ = ["check_rows", "copied_rows", "total_row", "total_rows"]

MOSTLY = 0.9
"""A column is one of numbers if this share of its cells are, blanks apart."""
FEW = 10
FEW_ROWS = 0.02
"""Rows of texts are at most this share, or one."""
TOTALS = frozenset(("total", "totals", "grand total", "subtotal", "sum", "sums", "average", "mean", "overall", "all"))
EXACT, NEARLY = 1e-6, 0.012
"""A total equals the sum of other rows to within this share; a mean, which is often rounded, to so many deviations."""
FEWEST_COLUMNS = 4
"""A row that is a mean in fewer columns is so by chance."""
FEWEST_COPIED, FEWEST_DIFFERENT, COPIED, ELSEWHERE = 20, 10, 0.8, 0.3
"""Rows of a client that another client has, too: how many, different ones, their share, and the largest share of any other two."""
MOST_CLIENTS, MOST_OWNERS = 1000, 8
"""Clients that are compared. Rows that more of them have are usual."""
FEWEST_CLIENTS = 4
MANY, SOME = 20, 1000
"""Columns with more different values than `MANY`, in `SOME` rows, are looked at."""


def check_rows(columns: Mapping[str, Sequence[Any]], parsed: Callable[[str], Array], at: Callable[[int], str]) -> None:
    """Refuse rows that have texts in all columns of numbers: a header that comes again, a row of units, a note.

    Args:
        parsed: the numbers (rows,) of a column, NaN for other cells. at: the place of a row, for the error.

    Raises `InputError` naming the first such row.
    """
    texts: Counter[int] = Counter()
    of_numbers = 0
    for name, cells in columns.items():
        others = np.flatnonzero(~np.isfinite(parsed(name)))
        words = [row for row in others.tolist() if isinstance(cells[row], str) and not is_blank(cells[row])]
        if len(cells) - len(others) >= MOSTLY * (len(cells) - len(others) + len(words)) and len(cells) - len(others) >= FEW:
            of_numbers += 1
            texts.update(words)
    count = len(next(iter(columns.values()), ()))
    headed = [row for row in sorted(texts) if _is_header(columns, row)]
    if headed:
        more = f" ({len(headed)} such rows)" if len(headed) > 1 else ""
        raise InputError(f"{at(headed[0])} is the header again{more}; remove it")
    whole = [row for row, found in texts.items() if found == of_numbers]
    if of_numbers > 1 and whole and len(whole) <= max(1, FEW_ROWS * count):
        row = min(whole)
        some = ", ".join(repr(cells[row]) for cells in columns.values() if isinstance(cells[row], str) and cells[row].strip())
        raise InputError(f"{at(row)} has texts in all columns of numbers ({some[:80]}): a row of units, or a note? Remove it")


def _is_header(columns: Mapping[str, Sequence[Any]], row: int) -> bool:
    """Whether all cells of a row that are not blank, and two at least, are the names of their columns."""
    filled = [(name, cell_name(cells[row])) for name, cells in columns.items() if not is_blank(cells[row])]
    return len(filled) > 1 and all(cell.casefold() == name.strip().casefold() for name, cell in filled)


def total_row(columns: Mapping[str, Sequence[Any]], place: str) -> str:
    """A warning if the last row of a table, which is at `place`, is a total of the others by its name; "" if it is not."""
    for name, cells in columns.items():
        if len(cells) < FEW or not isinstance(cells[-1], str):
            continue
        if cells[-1].strip(" :.").casefold() in TOTALS and cells.count(cells[-1]) == 1:
            return f"{place}: {cells[-1]!r} in column {name!r} occurs in the last row alone; remove the row if it is a total of the others"
    return ""


def total_rows(numbers: Mapping[str, Array], clients: Array | None) -> tuple[list[int], str]:
    """Rows whose numbers are the sums, or means, of all other rows, or of those of their client, and which of the two they are.

    In all columns of many values: two for sums, `FEWEST_COLUMNS` for means.
    """
    there = [values for values in numbers.values() if np.isfinite(values).all() and len(np.unique(values[:SOME])) > MANY]
    if len(there) < 2 or len(there[0]) < FEW:
        return [], ""
    count = len(there[0])
    for owners in (np.zeros(count, np.int64), clients):
        if owners is None:
            continue
        rows = np.bincount(owners)[owners]
        total, mean = rows >= FEW, rows >= FEW if len(there) >= FEWEST_COLUMNS else np.zeros(count, bool)
        for values in there:
            if not (total.any() or mean.any()):
                break
            others = np.bincount(owners, values)[owners] - values
            total &= np.abs(values - others) <= EXACT * np.abs(others)
            mean &= np.abs(values - others / np.maximum(1, rows - 1)) <= NEARLY * values.std()
        for found, what in ((total, "sums"), (mean, "means")):
            if found.any() and found.sum() <= len(np.unique(owners)):
                return np.flatnonzero(found).tolist(), what
    return [], ""


def copied_rows(numbers: Mapping[str, Array], labels: Array, clients: Array, names: Sequence[str]) -> str:
    """A note of a client whose rows come again at another, where no other two clients have much in common; "" without.

    Whole rows of numbers and label are compared. Columns of few values repeat at any two clients, and say nothing.

    Args:
        numbers: columns (rows,), NaN for blanks. labels: (rows,). clients: each row's client (rows,). names: the clients' names.
    """
    owned, owners = np.unique(clients, return_inverse=True)
    if not numbers or not FEWEST_CLIENTS <= len(owned) <= MOST_CLIENTS:
        return ""
    table = np.column_stack([np.nan_to_num(column, nan=np.inf) for column in (*numbers.values(), labels.astype(np.float64))])
    kinds = np.unique(table, axis=0, return_inverse=True)[1].reshape(-1)
    both, counts = np.unique(kinds * len(owned) + owners, return_counts=True)  # a row's kind and client, once
    kind, client = both // len(owned), both % len(owned)
    begins = np.flatnonzero(np.diff(kind, prepend=-1))
    several = np.flatnonzero(np.diff(np.append(begins, len(kind))) > 1)
    common, different = (np.zeros((len(owned), len(owned)), np.int64) for _ in range(2))
    ends = np.append(begins, len(kind))
    for i, j in zip(begins[several].tolist(), ends[several + 1].tolist(), strict=True):
        if j - i <= MOST_OWNERS:
            here = np.ix_(client[i:j], client[i:j])
            common[here] += np.minimum(counts[i:j, None], counts[i:j])
            different[here] += 1
    np.fill_diagonal(common, 0)
    shares = common / np.bincount(owners, minlength=len(owned))[:, None]
    one, other = map(int, np.unravel_index(np.argmax(shares), shares.shape))
    rows, share = int(common[one, other]), float(shares[one, other])
    shares[one, other] = shares[other, one] = 0.0
    if rows < FEWEST_COPIED or share < COPIED or shares.max() > ELSEWHERE or different[one, other] < FEWEST_DIFFERENT:
        return ""
    return f"{rows} rows of client {names[owned[one]]!r} are at client {names[owned[other]]!r}, too, {share:.0%} of its rows; is it a copy?"
