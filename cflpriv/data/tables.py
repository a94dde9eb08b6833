"""The user's own tables, CSV, Parquet or Hugging Face: named columns, split as the configuration says."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np

from ..console import counted
from ..errors import InputError
from ..randomness import stream
from ..types import Array
from .class_names import accidental_pairs, ascii_if_alike, missing_word, one_letter_apart, unified
from .columns import Column, encoded, feature_names
from .datasets import Dataset, dataset_of
from .doubtful_columns import column_remarks
from .doubtful_rows import check_rows, total_row, total_rows
from .periods import last_rows, periods_of, times
from .plausible import row_numbers, warnings_of_rows
from .raw_tables import RawTable, read_table
from .repeats import repeats_of
from .scaling import Scaling
from .table_labels import classes_of, doubtful_classes, label_numbers, sorted_names

__all__ = ["Columns", "features_of", "load_table", "table_dataset"]

MANY, MANY_COLUMNS, MANY_ROWS = 20, 3, 1000
"""A column of more different values than `MANY` in `MANY_ROWS` rows has many; so many columns of many values tell rows apart."""
MISSPELT, LONG, MOST_ALIKE = 4, 5, 20
"""A misspelt client has so many times fewer rows, and so many letters; of so many names with one number all pairs are compared."""
SHOWN_NAMES = 20
"""Classes, clients and groups whose names a note lists."""


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
        check_rows(table.columns, table.parsed, table.place)
    x, features, clipped = _features(tables, columns, scaling)
    y, classes, unsure = (
        (label_numbers(tables, columns.label), (), ()) if columns.numbers else classes_of(tables, columns.label, columns.classes)
    )  # fmt: skip
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
    doubts, odd = _doubtful_columns(tables, columns, features, y, owners, client_names, scaling)
    early = _early(tables, strata if periods is None else strata * columns.periods + periods, when, is_test)
    order = np.arange(len(y)) if when is None else np.argsort(when, kind="stable")
    train, test = order[~is_test[order]], order[is_test[order]]

    def where(part: str, index: int) -> str:
        row = int((train if part == "train" else test)[index])
        table = tables[0] if row < tables[0].rows else tables[1]
        place = table.row(row if table is tables[0] else row - tables[0].rows)
        return place if len(tables) == 1 or part == "train" else f"{place} of {table.path}"

    doubtful = (*unsure, *odd, *_nearly_equal(x[train], x[test], features))
    dataset = dataset_of(
        str(tables[0].path), (x[train], y[train]), (x[test], y[test]), len(classes),
        notes=(*_notes(features, classes, client_names, group_names), *clipped, *doubtful),
        owners=(None, None) if owners is None else (owners[train], owners[test]), scaling=scaling, class_names=classes,
        kinds=(None, None) if groups is None else (groups[train], groups[test]), label_range=columns.numbers,
        warnings=(
            *doubts, *merged_clients, *merged_groups,
            *(
                () if columns.numbers
                else doubtful_classes(tables, columns.label, bool(columns.classes), y, classes, (y[train], y[test]))
            ),
            *early,
            *warnings_of_rows(str(tables[-1].path), x[train], x[test], None if owners is None else owners[train], where),
        ),
    )  # fmt: skip
    if periods is not None:
        dataset = replace(dataset, periods_train=periods[train], periods_test=periods[test])
    return replace(dataset, feature_columns=() if columns.typed else features, client_names=client_names, doubts=doubtful)


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


def _features(tables: Sequence[RawTable], columns: Columns, scaling: Scaling) -> tuple[Array, tuple[str, ...], tuple[str, ...]]:
    """Features (rows, d), their names, and notes."""
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
        return x, names, notes
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
    return x, features, ()


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


def _doubtful_columns(
    tables: Sequence[RawTable], columns: Columns, features: Sequence[str], y: Array, owners: Array | None, names: Sequence[str],
    scaling: Scaling,
) -> tuple[tuple[str, ...], tuple[str, ...]]:  # fmt: skip
    """Warnings and notes of the columns of features, of the label if it is a number, and of rows."""
    used = [column.name for column in columns.typed if column.type != "ignore"] if columns.typed else list(features)
    plain = [column.name for column in columns.typed if column.type == "number"] if columns.typed else list(features)
    parts = {name: [table.parsed(name) for table in tables] for name in plain}
    place, remarks = tables[0].path, list[str]()
    for name in plain:
        if how := row_numbers(name, parts[name]):
            advice = "leave it out (data.feature_columns, or type 'ignore' in data.columns), since a model can only memorise it"
            remarks.append(f"{place}: column {name!r} {how}; {advice}")
    whole = len(tables) == 1
    cells = {name: tables[0].columns[name] if whole else [cell for table in tables for cell in table.columns[name]] for name in used}
    numbers = {name: values[0] if whole else np.concatenate(values) for name, values in parts.items()}
    own = {column.name for column in columns.typed if column.own} if columns.typed else set(features) if scaling.per_client else set()
    label, client = (columns.label, y, bool(columns.numbers)), (columns.client, owners, names)
    odd = column_remarks(cells, numbers, label, client, own)
    remarks += [f"{place}: {remark}" for remark in odd.warnings]
    remarks += [named for table in tables if (named := total_row(table.columns, f"{table.path}: {table.row(table.rows - 1)}"))]
    totals, kind = total_rows(numbers, owners)
    if totals:
        first, table = (totals[0], tables[0]) if totals[0] < tables[0].rows else (totals[0] - tables[0].rows, tables[1])
        others = f", and {len(totals) - 1} rows more," if len(totals) > 1 else ""
        remarks.append(f"{table.place(first)}{others} has the {kind} of other rows in all columns of numbers; remove it")
    known = {name for table in tables[:1] for name in table.columns}
    more = [name for table in tables[1:] for name in table.columns if name not in known]
    notes = [f"{tables[-1].path}: column {name!r} is in this file alone, so it is not used" for name in more]
    return tuple(remarks), (*odd.notes, *notes)


def _nearly_equal(x_train: Array, x_test: Array, features: Sequence[str]) -> tuple[str, ...]:
    """A note of test rows that equal a training row in all columns of many values, as a join makes them, and not in others."""
    many = [i for i in range(len(features)) if len(np.unique(x_train[:MANY_ROWS, ..., i])) > MANY]
    if not MANY_COLUMNS <= len(many) < len(features):
        return ()
    whole, part = repeats_of(x_train, x_test), repeats_of(x_train[..., many], x_test[..., many])
    if whole.tested or not part.tested:
        return ()
    others = [name for i, name in enumerate(features) if i not in many]
    some = ", ".join(map(repr, others[:3])) + (", …" if len(others) > 3 else "")
    return (f"{part.tested} of {len(x_test)} test rows equal a training row but for {some}; did a join repeat rows?",)


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


def _coded(tables: Sequence[RawTable], key: str, name: str) -> tuple[Array | None, tuple[str, ...], tuple[str, ...]]:
    """A number for each row by its cell, 0 for the first name, the names, and warnings; nothing without such a column."""
    if not name:
        return None, (), ()
    cells = [cell for table in tables for cell in table.names(key, name)]
    name_of, _ = unified(cells)
    names = sorted_names(set(name_of.values()))
    number = {label: i for i, label in enumerate(names)}
    doubts = [
        f"{tables[0].path}: column {name!r} (data.{key}): {word!r} is a word for a missing value, and counts as a name; remove its rows if "
        "nobody is called so"
        for word in names
        if missing_word(word, [other for other in names if other != word])
    ]
    if key == "client_column" and len(names) > max(1, len(cells) // 2):
        doubts.append(f"{tables[0].path}: column {name!r} (data.{key}) has {len(names)} names in {len(cells)} rows; is it another column?")
    for first, second in accidental_pairs(names):
        if all(
            part.islower() or part.isupper() or part.istitle() or part.upper() == part.lower() for part in (first, second)
        ):  # no random codes
            shown = ascii_if_alike((first, second))
            doubts.append(
                f"{tables[0].path}: column {name!r} (data.{key}): {shown(first)} and {shown(second)} count as two, and differ as by "
                "accident; write them in one way if they are one"
            )
    codes = np.array([number[name_of[cell]] for cell in cells], np.int64)
    if key == "client_column":
        column = f"{tables[0].path}: column {name!r} (data.{key})"
        again = _slips(names, np.bincount(codes))
        doubts += [f"{column}: {one!r} and {other!r} count as two; is one a slip?" for one, other in again]
    return codes, tuple(names), tuple(doubts[:4])


def _slips(names: Sequence[str], counts: Array) -> list[tuple[str, str]]:
    """Pairs of numbered names that differ in zeros before the number, or where one is rare and a letter apart from the other."""
    kinds: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        kinds.setdefault(re.sub(r"\D|(?<!\d)0+(?=\d)", "", name), []).append(place)
    pairs = []
    for number, places in kinds.items():
        for first, second in combinations(places[:MOST_ALIKE] if number else [], 2):
            words = [re.sub(r"\d", "", names[place]) for place in (first, second)]
            rare = MISSPELT * min(counts[first], counts[second]) <= max(counts[first], counts[second])
            if words[0] and (words[0] == words[1] or (rare and min(map(len, words)) >= LONG and one_letter_apart(*words))):
                pairs.append((names[first], names[second]))
    return pairs


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
        count = len(np.unique(strata))
        raise InputError(
            f"data.test_share = {share:g}: leaves no test row of {len(strata)}, which are divided into {count} clients or classes; is "
            "data.client_column or data.label_column another column?"
        )
    return is_test


def _notes(features: Sequence[str], classes: Sequence[str], clients: Sequence[str], groups: Sequence[str]) -> tuple[str, ...]:
    """How the numbers of classes, clients and groups are named."""
    parts = [counted(len(features), "feature")]
    for singular, plural, names in (("class", "classes", classes), ("client", "clients", clients), ("group", "groups", groups)):
        if names:
            some = ", ".join(f"{i} = {name}" for i, name in enumerate(names[:SHOWN_NAMES]))
            named = f" ({some}{', …' if len(names) > SHOWN_NAMES else ''})"
            own = all(name == str(i) for i, name in enumerate(names))  # then a number is its own name
            parts.append(f"{len(names)} {singular if len(names) == 1 else plural}{'' if own else named}")
    return (f"own table: {'; '.join(parts)}",)
