"""Tables of the user's own as they are read: columns by name, one cell a row, from CSV, Parquet, Hugging Face or a frame in memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from ..array_files import reading
from ..errors import InputError
from ..protocols.bounded_files import open_regular
from ..types import Array
from .class_names import number_of
from .columns import cell_name, cell_numbers, not_nested, shown
from .formats import check_cells, csv_row_numbers, read_csv, separated_otherwise
from .huggingface import read_saved

__all__ = ["FRAME", "IN_PYTHON", "TABLES", "RawTable", "read_parquet", "read_table"]


@dataclass(frozen=True, eq=False)
class RawTable:
    """Columns by name, each with one cell a row. In a CSV the number of a row is that of its first line, in others it counts from 1.

    `chosen` are the numbers of the rows if these are some of a file's.
    """

    path: Path
    columns: Mapping[str, Sequence[Any]]
    rows: int
    first: int
    chosen: tuple[int, ...] | None = None

    @cached_property
    def numbers_of_rows(self) -> Sequence[int]:
        if self.chosen is not None:
            return self.chosen
        return csv_row_numbers(self.path)[1:] if self.first == 2 else range(self.first, self.first + self.rows)

    def column(self, key: str, name: str) -> Sequence[Any]:
        if name not in self.columns:
            raise InputError(f"{self.path}: has no column {name!r} ({key}); its columns are {', '.join(self.columns)}")
        return self.columns[name]

    def only(self, rows: Sequence[int]) -> "RawTable":
        """A table of some of its rows, which keep their numbers."""
        columns = {name: [cells[row] for row in rows] for name, cells in self.columns.items()}
        return replace(self, columns=columns, rows=len(rows), chosen=tuple(self.numbers_of_rows[row] for row in rows))

    def row(self, row: int) -> str:
        return f"row {self.numbers_of_rows[row]}"

    def place(self, row: int) -> str:
        """Where a row is, for an error."""
        return f"{self.path}: {self.row(row)}"

    def at(self, row: int, column: str) -> str:
        """Where a cell is, for an error."""
        return f"{self.place(row)}, column {column!r}"

    @cached_property
    def _parsed(self) -> dict[str, Array]:
        return {}

    def parsed(self, name: str) -> Array:
        """The numbers in a column, float64 (rows,), NaN where there is none. They are read once."""
        if name not in self._parsed:
            self._parsed[name] = cell_numbers(self.columns[name])
        return self._parsed[name]

    def numbers(self, name: str) -> Array:
        """A column of features, float64 (rows,)."""
        numbers = self.parsed(name)
        if not np.isfinite(numbers).all():
            row = int(np.flatnonzero(~np.isfinite(numbers))[0])
            cell = self.columns[name][row]
            not_nested([cell], lambda _: self.at(row, name))
            advice = "fill it, or leave out the row" if cell in ("", None) else "encode it, or name the features in data.feature_columns"
            raise InputError(
                f"{self.at(row, name)}: {shown(cell)} is not a finite number; {advice}, or let `cflpriv init --data` write a schema"
            )
        return numbers

    def names(self, key: str, name: str) -> list[str]:
        """A column of names, as text. Raises `InputError` for an empty cell, and for one with several values."""
        not_nested(self.column(f"data.{key}", name), partial(self.at, column=name))
        cells = [cell_name(cell) for cell in self.column(f"data.{key}", name)]
        if "" in cells:
            raise InputError(f"{self.at(cells.index(''), name)}: is empty; data.{key} needs a value in every row")
        return cells


def read_parquet(path: Path) -> dict[str, list[Any]]:
    """The columns of a Parquet file by name, with pyarrow. Raises `InputError` naming the file, or saying what to install."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"{path}: Parquet needs pyarrow; pip install 'cflpriv[parquet]', or give a CSV") from None
    with reading(path, "Parquet"):
        files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
        cells = size = 0
        names: list[str] = []
        for file in files:
            with open_regular(file) as handle:
                metadata = parquet.read_metadata(handle)
            if len(files) > 1:  # the reader takes the columns of the first file, and leaves out all others
                own = list(metadata.schema.to_arrow_schema().names)
                names = names or own
                if strange := sorted(set(own) ^ set(names)):
                    raise InputError(f"{file}: column {strange[0]!r} is in this file or in {files[0].name}, and not in both")
            cells, size = cells + metadata.num_rows * metadata.num_columns, size + file.stat().st_size
        check_cells(path, cells, size)
        return dict(parquet.read_table(path).to_pydict())


def _csv_columns(path: Path) -> dict[str, list[Any]]:
    header, *rows = read_csv(path) or ((),)
    names = [name.strip() for name in header]
    if why := separated_otherwise(header):
        raise InputError(f"{path}: has one column, {names[0]!r}{why}")
    twice = next((name for name in names if names.count(name) > 1), None)
    if not names or twice is not None:
        raise InputError(f"{path}: {'has no header' if twice is None else f'has two columns {twice!r}'}; the first row names the columns")
    columns = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    _check_header(path, columns)
    return columns


def _check_header(path: Path, columns: Mapping[str, Sequence[str]]) -> None:
    """Refuse a table without a header, whose first row is data, and one that has its header again among the rows."""
    numbered = [number for name in columns if (number := number_of(name)) is not None]
    counted = numbered == sorted(numbered)  # names as pandas gives them, wavelengths, years
    again = [name for name, cells in columns.items() if name and not (counted and number_of(name) is not None) and name in cells]
    if len(again) > 1 and len(again) == sum(map(bool, columns)):
        row = list(columns[again[0]]).index(again[0])
        raise InputError(f"{path}: row {csv_row_numbers(path)[1 + row]} is the header again; remove it")
    if len(again) > 1:
        some = ", ".join(map(repr, again[:3]))
        raise InputError(f"{path}: the first row has cells that occur in its columns again ({some}), so it is data; name the columns in it")


def _no_file(path: Path) -> dict[str, list[Any]]:
    raise InputError(f"{path}: a data frame that a program had in memory is in no file")


FRAME = "frame"
"""The source of a data frame in memory, which `ClusteredFL.fit` takes."""
IN_PYTHON = "in Python, ClusteredFL.fit takes them again, and ClusteredFL.load(FOLDER) predicts with what `save` wrote into FOLDER"
TABLES: dict[str, tuple[Callable[[Path], dict[str, list[Any]]], int]] = {
    "csv": (_csv_columns, 2), "parquet": (read_parquet, 1), "huggingface": (read_saved, 1),
    FRAME: (_no_file, 1),
}  # fmt: skip
"""Source -> its reader, and the number of the first row of data in such a file."""


def read_table(source: str, path: Path) -> RawTable:
    """The columns of a file. Raises `InputError` naming it, also if it has no rows."""
    read, first = TABLES[source]
    cells = read(path)
    rows = len(next(iter(cells.values()), ()))
    if rows == 0:
        raise InputError(f"{path}: has no rows")
    return RawTable(path, cells, rows, first)
