"""The user's own tables, CSV, Parquet or Hugging Face: named columns, split as the configuration says."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..array_files import reading
from ..errors import InputError
from ..protocols.bounded_files import open_regular
from ..randomness import stream
from ..types import Array
from .datasets import Dataset, dataset_of
from .formats import check_cells, read_csv
from .huggingface import read_saved
from .scaling import Scaling

__all__ = ["TABLES", "Columns", "load_table", "read_parquet"]

LARGEST = 1e30
"""No measured feature is larger; its square would not fit into float32."""


@dataclass(frozen=True)
class Columns:
    """Which columns of a table are what. Empty `features`: all others. Empty `classes`: those found, sorted."""

    label: str
    client: str = ""
    group: str = ""
    features: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class _Table:
    """Columns by name, each with one cell a row; `first` is the number of the first row in the file."""

    path: Path
    columns: Mapping[str, Sequence[Any]]
    rows: int
    first: int

    def column(self, key: str, name: str) -> Sequence[Any]:
        if name not in self.columns:
            only = next(iter(self.columns), "") if len(self.columns) == 1 else ""
            why = "; its columns are separated by something else than commas" if {";", "\t"} & set(only) else ""
            raise InputError(f"{self.path}: has no column {name!r} (data.{key}); its columns are {', '.join(self.columns)}{why}")
        return self.columns[name]

    def at(self, row: int, column: str) -> str:
        """Where a cell is, for an error."""
        return f"{self.path}: row {row + self.first}, column {column!r}"

    def numbers(self, name: str) -> Array:
        """A column of features, float64 (rows,)."""
        numbers = np.empty(self.rows)
        for row, cell in enumerate(self.columns[name]):
            try:
                numbers[row] = math.nan if isinstance(cell, str) and "_" in cell else float(cell)  # Python reads 2020_01 as 202001
            except (TypeError, ValueError):
                numbers[row] = math.nan
            if not abs(numbers[row]) <= LARGEST:
                advice = (
                    "fill it, or leave out the row" if cell in ("", None) else "encode it, or name the features in data.feature_columns"
                )
                raise InputError(f"{self.at(row, name)}: {cell!r} is not a finite number; {advice}")
        return numbers

    def names(self, key: str, name: str) -> list[str]:
        """A column of names, as text. Raises `InputError` for an empty cell."""
        cells = [_name(cell) for cell in self.column(key, name)]
        if "" in cells:
            raise InputError(f"{self.at(cells.index(''), name)}: is empty; data.{key} needs a value in every row")
        return cells


def _name(cell: Any) -> str:
    """A cell as a name, empty for a missing one. 1.0 is 1: a column of whole numbers turns into floats where a cell is missing."""
    if isinstance(cell, float):
        return "" if math.isnan(cell) else str(int(cell)) if cell.is_integer() else str(cell)
    return "" if cell is None else str(cell).strip()


def read_parquet(path: Path) -> dict[str, list[Any]]:
    """The columns of a Parquet file by name, with pyarrow. Raises `InputError` naming the file, or saying what to install."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"{path}: Parquet needs pyarrow; pip install 'cflpriv[parquet]', or give a CSV") from None
    with reading(path, "Parquet"):
        files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
        cells = size = 0
        for file in files:
            with open_regular(file) as handle:
                metadata = parquet.read_metadata(handle)
            cells, size = cells + metadata.num_rows * metadata.num_columns, size + file.stat().st_size
        check_cells(path, cells, size)
        return dict(parquet.read_table(path).to_pydict())


def _csv_columns(path: Path) -> dict[str, list[Any]]:
    header, *rows = read_csv(path) or ((),)
    names = [name.strip() for name in header]
    twice = next((name for name in names if names.count(name) > 1), None)
    if not names or twice is not None:
        raise InputError(f"{path}: {'has no header' if twice is None else f'has two columns {twice!r}'}; the first row names the columns")
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


TABLES: dict[str, tuple[Callable[[Path], dict[str, list[Any]]], int]] = {
    "csv": (_csv_columns, 2), "parquet": (read_parquet, 1), "huggingface": (read_saved, 1),
}  # fmt: skip
"""Source -> its reader, and the number of the first row of data in such a file."""


def load_table(source: str, paths: Sequence[Path], columns: Columns, scaling: Scaling, test_share: float, seed: int) -> Dataset:
    """A table of training rows and one of test rows, or one that is split: `test_share` of each client's rows, or else of each class's.

    x has shape (n, 1, 1, features) and any range; `scaling` is applied per client later. Raises `InputError` naming file, column, row and
    value.
    """
    read, first = TABLES[source]
    tables = []
    for path in paths:
        cells = read(path)
        rows = len(next(iter(cells.values()), ()))
        if rows == 0:
            raise InputError(f"{path}: has no rows")
        tables.append(_Table(path, cells, rows, first))
    for table in tables:
        for key in ("label", "client", "group"):
            if name := getattr(columns, key):
                table.column(f"{key}_column", name)
    used = {name for name in (columns.label, columns.client, columns.group) if name}
    features = columns.features or tuple(name for name in tables[0].columns if name not in used)
    if not features:
        raise InputError(f"{paths[0]}: has no feature beside the columns {', '.join(sorted(used))}")
    for name in features:
        if name == "" or name.startswith("__index_level_"):
            place = f"{paths[0]}: column {list(tables[0].columns).index(name) + 1} ({name!r})"
            raise InputError(f"{place} is an index, as pandas writes it; name the features in data.feature_columns")
    for name in used.intersection(features):
        raise InputError(f"data.feature_columns: {name!r} is also the column of label, client or group")
    for table in tables:
        for name in features:
            table.column("feature_columns", name)
    x = np.concatenate([np.stack([table.numbers(name) for name in features], axis=1) for table in tables])
    _check_range(x, tables, features, scaling)
    y, classes = _labels(tables, columns)
    owners, client_names = _coded(tables, "client_column", columns.client)
    groups, group_names = _coded(tables, "group_column", columns.group)
    if owners is not None and groups is not None:
        _one_group_each(tables[0].path, owners, groups, client_names, group_names)
    is_test = np.arange(len(y)) >= tables[0].rows if len(tables) > 1 else _split(y if owners is None else owners, test_share, seed)
    train, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    return dataset_of(
        str(paths[0]), (x[train], y[train]), (x[test], y[test]), len(classes), notes=_notes(features, classes, client_names, group_names),
        owners=(None, None) if owners is None else (owners[train], owners[test]), scaling=scaling, class_names=classes,
        kinds=(None, None) if groups is None else (groups[train], groups[test]),
    )  # fmt: skip


def _check_range(x: Array, tables: Sequence[_Table], features: Sequence[str], scaling: Scaling) -> None:
    """Values that are taken as they are must lie in the public range."""
    if not scaling.plain:
        return
    wrong = np.argwhere((x < scaling.low) | (x > scaling.high))
    if len(wrong):
        row, column = map(int, wrong[0])
        table = tables[0] if row < tables[0].rows else tables[1]
        place = table.at(row - (0 if table is tables[0] else tables[0].rows), features[column])
        raise InputError(
            f"{place}: {x[row, column]:g} is outside data.value_range = [{scaling.low:g}, {scaling.high:g}]; widen it, or set "
            "data.standardise"
        )


def _sorted(names: set[str]) -> list[str]:
    """Whole numbers by size, other names by the alphabet."""
    return sorted(names, key=int) if all(name.isdecimal() and name.isascii() for name in names) else sorted(names)


def _labels(tables: Sequence[_Table], columns: Columns) -> tuple[Array, tuple[str, ...]]:
    cells = [table.names("label_column", columns.label) for table in tables]
    classes = columns.classes or tuple(_sorted({cell for part in cells for cell in part}))
    number = {name: i for i, name in enumerate(classes)}
    for table, part in zip(tables, cells, strict=True):
        for row, cell in enumerate(part):
            if cell not in number:
                raise InputError(f"{table.at(row, columns.label)}: {cell!r} is not in data.class_names = {list(classes)}")
    return np.array([number[cell] for part in cells for cell in part], np.int64), classes


def _coded(tables: Sequence[_Table], key: str, name: str) -> tuple[Array | None, tuple[str, ...]]:
    """A number for each row by its cell, 0 for the first name, and the names; None without such a column."""
    if not name:
        return None, ()
    cells = [cell for table in tables for cell in table.names(key, name)]
    names = _sorted(set(cells))
    number = {label: i for i, label in enumerate(names)}
    return np.array([number[cell] for cell in cells], np.int64), tuple(names)


def _one_group_each(path: Path, owners: Array, groups: Array, clients: Sequence[str], names: Sequence[str]) -> None:
    for owner, client in enumerate(clients):
        values = np.unique(groups[owners == owner])
        if len(values) > 1:
            raise InputError(
                f"{path}: client {client!r} has rows of the groups {names[values[0]]!r} and {names[values[1]]!r}; each has one group"
            )


def _split(strata: Array, share: float, seed: int) -> Array:
    """Which rows are test rows: a random share of each stratum, rounded, which leaves at least one training row."""
    is_test = np.zeros(len(strata), bool)
    for stratum in np.unique(strata):
        members = np.flatnonzero(strata == stratum)
        draws = stream(seed, "data.table.split", client=int(stratum))
        is_test[draws.permutation(members)[: min(round(share * len(members)), len(members) - 1)]] = True
    if not is_test.any():
        raise InputError(f"data.test_share = {share:g}: leaves no test row of {len(strata)}")
    return is_test


def _notes(features: Sequence[str], classes: Sequence[str], clients: Sequence[str], groups: Sequence[str]) -> tuple[str, ...]:
    """How the numbers of classes, clients and groups are named."""
    parts = [f"{len(features)} features"]
    for noun, names in (("classes", classes), ("clients", clients), ("groups", groups)):
        if names:
            some = ", ".join(f"{i} = {name}" for i, name in enumerate(names[:20]))
            parts.append(f"{len(names)} {noun} ({some}{', …' if len(names) > 20 else ''})")
    return (f"own table: {'; '.join(parts)}",)
