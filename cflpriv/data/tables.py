"""The user's own tables, CSV, Parquet or Hugging Face: named columns, split as the configuration says."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from ..array_files import reading
from ..errors import InputError
from ..protocols.bounded_files import open_regular
from ..randomness import stream
from ..types import Array
from .class_names import accidental_pairs, ascii_if_alike, missing_word, no_classes, number_of, same_name, strangers, unified, unsure_word
from .columns import Column, cell_name, cell_number, encoded, feature_names
from .datasets import Dataset, dataset_of
from .formats import check_cells, csv_row_numbers, read_csv
from .huggingface import read_saved
from .periods import last_rows, periods_of, times
from .plausible import row_numbers, untrained, warnings_of_rows
from .scaling import Scaling

__all__ = [
    "FRAME", "TABLES", "Columns", "RawTable", "features_of", "load_table", "names_of_classes", "read_parquet", "read_table",
    "table_dataset",
]  # fmt: skip


@dataclass(frozen=True)
class Columns:
    """Which columns of a table are what. Empty `features`: all others. Empty `classes`: those found, sorted. `typed`: the schema.

    With a public `numbers` [low, high] the label is a number. `time`: the column that orders the rows and divides them into `periods`.
    """

    label: str
    client: str = ""
    group: str = ""
    features: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    typed: tuple[Column, ...] = ()
    numbers: tuple[float, ...] = ()
    time: str = ""
    periods: int = 1


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
            only = next(iter(self.columns), "") if len(self.columns) == 1 else ""
            why = "; its columns are separated by something else than commas" if {";", "\t"} & set(only) else ""
            raise InputError(f"{self.path}: has no column {name!r} ({key}); its columns are {', '.join(self.columns)}{why}")
        return self.columns[name]

    def only(self, rows: Sequence[int]) -> "RawTable":
        """A table of some of its rows, which keep their numbers."""
        columns = {name: [cells[row] for row in rows] for name, cells in self.columns.items()}
        return replace(self, columns=columns, rows=len(rows), chosen=tuple(self.numbers_of_rows[row] for row in rows))

    def row(self, row: int) -> str:
        return f"row {self.numbers_of_rows[row]}"

    def at(self, row: int, column: str) -> str:
        """Where a cell is, for an error."""
        return f"{self.path}: {self.row(row)}, column {column!r}"

    def numbers(self, name: str) -> Array:
        """A column of features, float64 (rows,)."""
        numbers = np.array([cell_number(cell) for cell in self.columns[name]])
        if not np.isfinite(numbers).all():
            row = int(np.flatnonzero(~np.isfinite(numbers))[0])
            cell = self.columns[name][row]
            advice = "fill it, or leave out the row" if cell in ("", None) else "encode it, or name the features in data.feature_columns"
            raise InputError(
                f"{self.at(row, name)}: {cell!r} is not a finite number; {advice}, or let `cflpriv init --data` write a schema"
            )
        return numbers

    def names(self, key: str, name: str) -> list[str]:
        """A column of names, as text. Raises `InputError` for an empty cell."""
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


def _no_file(path: Path) -> dict[str, list[Any]]:
    raise InputError(f"{path}: a data frame that a program had in memory is in no file")


FRAME = "frame"
"""The source of a data frame in memory, which `ClusteredFL.fit` takes."""
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


def load_table(source: str, paths: Sequence[Path], columns: Columns, scaling: Scaling, test_share: float, seed: int) -> Dataset:
    """`table_dataset` of files."""
    return table_dataset([read_table(source, path) for path in paths], columns, scaling, test_share, seed)


def table_dataset(tables: Sequence[RawTable], columns: Columns, scaling: Scaling, test_share: float, seed: int) -> Dataset:
    """A table of training rows and one of test rows, or one that is split: `test_share` of each client's rows, or else of each class's.

    x has shape (n, 1, 1, features) and any range; `scaling` is applied per client later. Raises `InputError` naming file, column, row and
    value.
    """
    for table in tables:
        for key in ("label", "client", "group", "time"):
            if name := getattr(columns, key):
                table.column(f"data.{key}_column", name)
    x, features, doubts, notes = _features(tables, columns, scaling)
    y, classes, unsure = (_numbers(tables, columns.label), (), ()) if columns.numbers else _labels(tables, columns)
    owners, client_names, merged_clients = _coded(tables, "client_column", columns.client)
    groups, group_names, merged_groups = _coded(tables, "group_column", columns.group)
    if owners is not None and groups is not None:
        _one_group_each(tables[0].path, owners, groups, client_names, group_names)
    strata = owners if owners is not None else np.zeros(len(y), np.int64) if columns.numbers else y
    when = _times(tables, columns)
    periods = None if when is None or columns.periods == 1 else periods_of(when, columns.periods)
    if len(tables) > 1:
        is_test = np.arange(len(y)) >= tables[0].rows
    elif when is None:
        is_test = _split(strata, test_share, seed)
    else:
        is_test = last_rows(strata if periods is None else strata * columns.periods + periods, when, test_share)
    early = _early(tables, strata if periods is None else strata * columns.periods + periods, when, is_test)
    order = np.arange(len(y)) if when is None else np.argsort(when, kind="stable")
    train, test = order[~is_test[order]], order[is_test[order]]

    def where(part: str, index: int) -> str:
        row = int((train if part == "train" else test)[index])
        table = tables[0] if row < tables[0].rows else tables[1]
        place = table.row(row if table is tables[0] else row - tables[0].rows)
        return place if len(tables) == 1 or part == "train" else f"{place} of {table.path}"

    dataset = dataset_of(
        str(tables[0].path), (x[train], y[train]), (x[test], y[test]), len(classes),
        notes=(*_notes(features, classes, client_names, group_names), *unsure, *notes),
        owners=(None, None) if owners is None else (owners[train], owners[test]), scaling=scaling, class_names=classes,
        kinds=(None, None) if groups is None else (groups[train], groups[test]), label_range=columns.numbers,
        warnings=(
            *doubts, *merged_clients, *merged_groups,
            *_doubtful_classes(tables, columns, y, classes, (y[train], y[test])),
            *early,
            *warnings_of_rows(str(tables[-1].path), x[train], x[test], None if owners is None else owners[train], where),
        ),
    )  # fmt: skip
    if periods is not None:
        dataset = replace(dataset, periods_train=periods[train], periods_test=periods[test])
    return replace(dataset, feature_columns=() if columns.typed else features, client_names=client_names)


def _times(tables: Sequence[RawTable], columns: Columns) -> Array | None:
    """The time of each row, if a column has it. A column of the schema is read by its format."""
    if not columns.time:
        return None
    written = next((column.format for column in columns.typed if column.name == columns.time), "")
    cells = [cell for table in tables for cell in table.column("data.time_column", columns.time)]
    first = tables[0].rows

    def at(row: int) -> str:
        return tables[0].at(row, columns.time) if row < first else tables[1].at(row - first, columns.time)

    return times(cells, at, written)


def _early(tables: Sequence[RawTable], strata: Array, when: Array | None, is_test: Array) -> tuple[str, ...]:
    """A warning if rows of a table of test rows are not later than the training rows of their stratum."""
    if when is None or len(tables) == 1:
        return ()
    last = np.full(int(strata.max()) + 1, -np.inf)
    np.maximum.at(last, strata[~is_test], when[~is_test])
    early = int((when <= last[strata])[is_test].sum())
    problem = f"{early} of {int(is_test.sum())} test rows are not later than all training rows of their client"
    return (f"{tables[1].path}: {problem} (data.time_column)",) if early else ()


def _features(
    tables: Sequence[RawTable], columns: Columns, scaling: Scaling
) -> tuple[Array, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Features (rows, d), their names, warnings and notes."""
    used = {name for name in (columns.label, columns.client, columns.group, columns.time) if name}
    if columns.typed:
        used -= {columns.time} & {column.name for column in columns.typed}
        parts = [features_of(table, columns.typed, used) for table in tables]
        names = tuple(name for column in columns.typed for name in feature_names(column))
        clipped = sum(count for _, count in parts)
        notes = (f"{clipped} values beyond the ranges in data.columns were clipped to them",) if clipped else ()
        if not names:
            raise InputError(f"{tables[0].path}: data.columns makes no feature of any column")
        x = np.concatenate([values for values, _ in parts])
        return x, names, _index_columns(tables, [column.name for column in columns.typed if column.type == "number"]), notes
    features = columns.features or tuple(name for name in tables[0].columns if name not in used)
    if not features:
        raise InputError(f"{tables[0].path}: has no feature beside the columns {', '.join(sorted(used))}")
    for name in features:
        if name == "" or name.startswith("__index_level_"):
            place = f"{tables[0].path}: column {list(tables[0].columns).index(name) + 1} ({name!r})"
            raise InputError(f"{place} is an index, as pandas writes it; name the features in data.feature_columns")
    for name in used.intersection(features):
        raise InputError(f"data.feature_columns: {name!r} is also the column of label, client or group")
    for table in tables:
        for name in features:
            table.column("data.feature_columns", name)
    x = np.concatenate([np.stack([table.numbers(name) for name in features], axis=1) for table in tables])
    _check_range(x, tables, features, scaling)
    return x, features, _index_columns(tables, features), ()


def features_of(table: RawTable, schema: Sequence[Column], others: Collection[str] = ()) -> tuple[Array, int]:
    """Features (rows, d), float64, of a table by a schema, and how many values were clipped. `others` are columns with another purpose.

    Raises `InputError` for columns that only one of table and schema has, and for cells that do not fit.
    """
    names = {column.name for column in schema}
    for name in names.intersection(others):
        raise InputError(f"data.columns: {name!r} is also the column of label, client or group")
    for name in table.columns:
        if name not in names and name not in others:
            close = get_close_matches(name, names - set(table.columns), n=1, cutoff=0.5)
            hint = f" ({close[0]!r} is, and missing here)" if close else ""
            raise InputError(
                f"{table.path}: column {name!r} is not in data.columns{hint}; add it there (type = 'ignore' leaves it out), or remove it"
            )
    parts = [
        encoded(column, table.column("data.columns", column.name), partial(table.at, column=column.name))
        for column in schema
        if column.type != "ignore"
    ]
    width = [np.empty((table.rows, 0))]
    return np.concatenate([*width, *(values for values, _ in parts)], axis=1), sum(clipped for _, clipped in parts)


def _index_columns(tables: Sequence[RawTable], names: Sequence[str]) -> tuple[str, ...]:
    """Warnings of features that number the rows."""
    remarks = []
    for name in names:
        how = row_numbers(name, [np.array([cell_number(cell) for cell in table.columns[name]]) for table in tables])
        if how:
            advice = "leave it out (data.feature_columns, or type 'ignore' in data.columns), since a model can only memorise it"
            remarks.append(f"{tables[0].path}: column {name!r} {how}; {advice}")
    return tuple(remarks)


def _check_range(x: Array, tables: Sequence[RawTable], features: Sequence[str], scaling: Scaling) -> None:
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
    """Numbers by size, other names by the alphabet."""
    if all(number_of(name) is not None for name in names):
        return sorted(names, key=lambda name: (float(name), name))
    return sorted(names)


def names_of_classes(tables: Sequence[RawTable], label: str) -> tuple[dict[str, str], tuple[str, ...], tuple[str, ...]]:
    """The class of each cell of the label, the classes, sorted, and notes: forms that were merged, words that may mean a missing value.

    Raises `InputError`, which names the column and says what to do, for names that differ as by accident, words for a missing value, and
    labels that are a quantity or identifiers. Names that the user lists (data.class_names) are not judged.
    """
    cells = [table.names("label_column", label) for table in tables]
    class_of, merged = unified({cell for part in cells for cell in part})
    classes = tuple(_sorted(set(class_of.values())))
    counts = dict.fromkeys(classes, 0)
    for part in cells:
        for cell in part:
            counts[class_of[cell]] += 1

    def place(name: str) -> str:
        table, row = next(
            (table, row) for table, part in zip(tables, cells, strict=True) for row, cell in enumerate(part) if class_of[cell] == name
        )
        return table.at(row, label)

    listed = "list all classes in data.class_names"
    for first, second in accidental_pairs(classes):
        shown = ascii_if_alike((first, second))
        raise InputError(
            f"{place(second)}: the class {shown(second)} and the class {shown(first)} ({place(first)}) differ as by accident; write them "
            f"in one way, or {listed} if they are two"
        )
    for name in classes:
        if missing_word(name, [other for other in classes if other != name]):
            raise InputError(
                f"{place(name)}: {name!r} stands for a missing value, not for a class; remove the {counts[name]} rows with it, or {listed} "
                "if it is one"
            )
    numbers = [number_of(name) for name in classes]
    values = None if None in numbers else np.array(numbers, np.float64)
    reason, sure = no_classes(values, np.array([counts[name] for name in classes]))
    if sure:
        raise InputError(
            f"{tables[0].path}: column {label!r}: {len(classes):,} classes in {sum(counts.values()):,} rows: {reason}; for a "
            f"regression set data.label_type = 'number', or divide the quantity into a few classes, choose another data.label_column, or "
            f"{listed}"
        )
    unsure = tuple(
        f"column {label!r}: {name!r} is taken as the name of a class, not as a missing value" for name in classes if unsure_word(name)
    ) + tuple(
        f"column {label!r}: the class {name!r} ({counts[name]} rows) is unlike the others, which are numbers; is a value missing?"
        for name in strangers(classes)
    )
    return class_of, classes, (*(f"column {label!r}: {sentence}" for sentence in merged), *unsure)


def _labels(tables: Sequence[RawTable], columns: Columns) -> tuple[Array, tuple[str, ...], tuple[str, ...]]:
    """The number of each row's class, the classes, and notes."""
    if not columns.classes:
        class_of, classes, notes = names_of_classes(tables, columns.label)
        number = {name: i for i, name in enumerate(classes)}
        cells = [cell for table in tables for cell in table.names("label_column", columns.label)]
        return np.array([number[class_of[cell]] for cell in cells], np.int64), classes, notes
    number = {name: i for i, name in enumerate(columns.classes)}
    alike = {same_name(name): i for i, name in enumerate(columns.classes)}
    labels = []
    for table in tables:
        for row, cell in enumerate(table.names("label_column", columns.label)):
            place = number.get(cell, alike.get(same_name(cell)))
            if place is None:
                raise InputError(f"{table.at(row, columns.label)}: {cell!r} is not in data.class_names = {list(columns.classes)}")
            labels.append(place)
    return np.array(labels, np.int64), columns.classes, ()


def _doubtful_classes(
    tables: Sequence[RawTable], columns: Columns, y: Array, classes: Sequence[str], parts: tuple[Array, Array]
) -> tuple[str, ...]:
    """Warnings of labels that may be a quantity, and of classes that occur only in the test part. Listed classes are no quantity."""
    if columns.numbers:
        return ()
    numbers = [number_of(name) for name in classes]
    only_tested = untrained(f"{tables[-1].path}: column {columns.label!r}", *parts, dict(enumerate(classes)))
    if columns.classes:
        return only_tested
    reason, _ = no_classes(None if None in numbers else np.array(numbers, np.float64), np.bincount(y, minlength=len(classes)))
    quantity = f"{tables[0].path}: column {columns.label!r}: {len(classes):,} classes in {len(y):,} rows: {reason}"
    return (quantity, *only_tested) if reason else only_tested


def _numbers(tables: Sequence[RawTable], label: str) -> Array:
    """The labels (rows,) float64 of a regression. Raises `InputError` naming the cell that is no finite number."""
    labels = []
    for table in tables:
        for row, cell in enumerate(table.column("data.label_column", label)):
            number = cell_number(cell)
            if not np.isfinite(number):
                raise InputError(
                    f"{table.at(row, label)}: {cell!r} is not a finite number; data.label_type = 'number' needs one in each row"
                )
            labels.append(number)
    return np.array(labels, np.float64)


def _coded(tables: Sequence[RawTable], key: str, name: str) -> tuple[Array | None, tuple[str, ...], tuple[str, ...]]:
    """A number for each row by its cell, 0 for the first name, the names, and warnings; nothing without such a column."""
    if not name:
        return None, (), ()
    cells = [cell for table in tables for cell in table.names(key, name)]
    name_of, _ = unified(cells)
    names = _sorted(set(name_of.values()))
    number = {label: i for i, label in enumerate(names)}
    doubts = []
    for first, second in accidental_pairs(names):
        if all(
            part.islower() or part.isupper() or part.istitle() or part.upper() == part.lower() for part in (first, second)
        ):  # no random codes
            shown = ascii_if_alike((first, second))
            doubts.append(
                f"{tables[0].path}: column {name!r} (data.{key}): {shown(first)} and {shown(second)} count as two, and differ as by "
                "accident; write them in one way if they are one"
            )
    return np.array([number[name_of[cell]] for cell in cells], np.int64), tuple(names), tuple(doubts[:3])


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
