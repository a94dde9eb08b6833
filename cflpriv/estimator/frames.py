"""From what a user has in memory to the table that runs and predictions read: data frames (by narwhals), columns by name, or arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import narwhals as nw
import numpy as np

from ..data.columns import cell_name, not_nested
from ..data.huggingface import columns_of
from ..data.raw_tables import RawTable
from ..errors import InputError
from ..types import Array

__all__ = ["FrameRows", "as_columns", "cells_of", "numeric", "one_client", "rows_of"]

REPEATS, MOST_NAMED = 5, 5
PLACE = Path("frame")
"""What errors name in place of a file."""


@dataclass(frozen=True, eq=False)
class FrameRows:
    """A table with its columns of `features`, and the columns of `client` and `label` (empty: there is none).

    `owners` and `labels` (rows,) are the values of these two, as they were given; None if there are none.
    """

    table: RawTable
    features: tuple[str, ...]
    client: str = ""
    label: str = ""
    owners: Array | None = None
    labels: Array | None = None


def as_columns(X: Any) -> dict[str, list[Any]] | None:
    """The columns of a data frame, or of a mapping, by name; None for anything else, such as an array.

    Raises `InputError` for columns that are not named by texts, and for unequal lengths.
    """
    if isinstance(X, Mapping):
        columns = {name: list(cells) for name, cells in X.items()}
    elif type(X).__module__.partition(".")[0] == "datasets" and hasattr(X, "features") and hasattr(X, "to_dict"):
        columns = columns_of(X)
    else:
        frame = _frame(X)
        if frame is None:
            return None
        if wrong := [name for name in frame.columns if not isinstance(name, str)]:
            raise InputError(f"X: the column {wrong[0]!r} is not named by a text")
        columns = {}
        for name in frame.columns:
            blank = frame[name].is_null().to_list()
            columns[name] = [None if missing else cell for missing, cell in zip(blank, frame[name].to_list(), strict=True)]
    if wrong := [name for name in columns if not isinstance(name, str)]:
        raise InputError(f"X: the column {wrong[0]!r} is not named by a text")
    if len({len(cells) for cells in columns.values()}) > 1:
        raise InputError("X: its columns have different lengths")
    return columns


def _frame(X: Any) -> "nw.DataFrame[Any] | None":
    """A data frame of any package; None for anything else. Raises `InputError` for one without rows yet, and for equal names."""
    try:
        frame = nw.from_native(X, pass_through=True)
    except nw.exceptions.DuplicateError as error:
        raise InputError(f"X: {' '.join(str(error).split())}") from None
    if isinstance(frame, nw.LazyFrame):
        raise InputError(f"X: a {type(X).__name__} has no rows yet; collect() gives a data frame")
    return frame if isinstance(frame, nw.DataFrame) else None


def rows_of(columns: Mapping[str, Sequence[Any]], y: Any, client: Any, label: str | None, named: Mapping[str, str]) -> FrameRows:
    """The table of columns of features, with the columns of client and label in it.

    Args:
        y: labels (rows,), if no column is the `label`.
        client: a column's name, or clients (rows,).
        named: names of a fitted table's columns "client" and "label", which new rows take over.

    Raises `InputError` for a column that is not there, and for another number of labels or clients than rows.
    """
    columns = dict(columns)
    count = len(next(iter(columns.values()), ()))
    added: dict[str, tuple[str, Array]] = {}
    for what, name, values in (("client", client if isinstance(client, str) else None, client), ("label", label, y)):
        if isinstance(name, str):
            if name not in columns:
                raise InputError(f"{what}={name!r}: is no column; there are {', '.join(columns) or 'none'}")
            if what == "label" and y is not None:
                raise InputError(f"label={name!r}: y is given, too; give one of them")
            not_nested(columns[name], partial(_place, name))
            added[what] = (name, cells_of(columns[name]))
        elif values is not None:
            own = cells_of(values)
            if own.shape != (count,):
                raise InputError(f"{what}: has shape {own.shape}, expected one value for each of the {count} rows")
            added[what] = (named.get(what) or _free(what, columns), own)
    used = {name for name, _ in added.values()} | ({named["label"]} if "label" in named else set())
    features = tuple(name for name in columns if name not in used)
    texts = {name: [cell_name(cell) for cell in values.tolist()] for name, values in added.values()}
    table = RawTable(PLACE, {**{name: columns[name] for name in features}, **texts}, count, 1)
    (client_name, owners), (label_name, labels) = added.get("client", ("", None)), added.get("label", ("", None))
    return FrameRows(table, features, client_name, label_name, owners, labels)


def _place(name: str, row: int) -> str:
    return f"X: row {row + 1}, column {name!r}"


def _free(name: str, columns: Mapping[str, Any]) -> str:
    while name in columns:
        name = f"_{name}"
    return name


def cells_of(values: Any) -> Array:
    """One value a row, as an array: of numbers or truth values if all are such, else of objects."""
    if isinstance(values, list | tuple):
        kinds = {type(value) for value in values}
        array = np.asarray(values) if len(kinds) == 1 and kinds <= {int, float, bool, str} else np.array([*values, None], object)[:-1]
    else:
        array = np.asarray(values)
    return array.ravel() if array.ndim == 2 and array.shape[1] == 1 else array


def one_client(rows: FrameRows) -> str:
    """What to know of rows without clients, with the columns that could name them: of texts that each repeat `REPEATS` times on average."""
    words = "no client is given, so all rows are of one client and no groups can be found"
    columns = {name: rows.table.columns[name] for name in rows.features}
    texts = {name: set(cells) for name, cells in columns.items() if all(isinstance(cell, str) for cell in cells)}
    if named := [repr(name) for name, values in texts.items() if 1 < len(values) <= rows.table.rows / REPEATS]:
        now = "is a feature" if len(named) == 1 else "are features"
        return f"{words}; client= could be {' or '.join(named[:MOST_NAMED])}, which {now} now"
    return f"{words}; client= takes the name of a column, or a client for each row"


def numeric(table: RawTable, features: Sequence[str]) -> bool:
    """Whether all cells of the features are finite numbers, so that no schema is needed."""
    return all(np.isfinite(table.parsed(name)).all() for name in features)
