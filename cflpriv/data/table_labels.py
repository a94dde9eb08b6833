"""The column of the label: which classes its cells name, or which numbers, and what is doubtful about them."""

from collections.abc import Sequence

import numpy as np

from ..errors import InputError
from ..types import Array
from .class_names import (
    accidental_pairs,
    ascii_if_alike,
    combined,
    missing_word,
    misspelt,
    no_classes,
    number_of,
    same_name,
    strangers,
    unified,
    unsure_word,
)  # fmt: skip
from .columns import cell_number, shown
from .plausible import untrained
from .raw_tables import RawTable

__all__ = ["classes_of", "doubtful_classes", "label_numbers", "names_of_classes", "sorted_names"]


def sorted_names(names: set[str]) -> list[str]:
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
    classes = tuple(sorted_names(set(class_of.values())))
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
        printed = ascii_if_alike((first, second))
        raise InputError(
            f"{place(second)}: the class {printed(second)} and the class {printed(first)} ({place(first)}) differ as by accident; write "
            f"them in one way, or {listed} if they are two"
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
    doubts = [f"{name!r} is taken as the name of a class, not as a missing value" for name in classes if unsure_word(name)]
    doubts += [
        f"the class {name!r} ({counts[name]} rows) is unlike the others, which are numbers; is a value missing?"
        for name in strangers(classes)
    ]
    doubts += [
        f"the class {rare!r} ({counts[rare]} rows) differs by a letter from {often!r} ({counts[often]} rows); is it misspelt?"
        for rare, often in misspelt(counts)
    ]
    if several := combined(classes):
        doubts.append(f"{len(several)} classes are several labels in one cell, as {several[0]!r}; each combination is a class of its own")
    return class_of, classes, tuple(f"column {label!r}: {sentence}" for sentence in (*merged, *doubts))


def classes_of(tables: Sequence[RawTable], label: str, listed: Sequence[str]) -> tuple[Array, tuple[str, ...], tuple[str, ...]]:
    """The number of each row's class, the classes, and notes."""
    if not listed:
        class_of, classes, notes = names_of_classes(tables, label)
        number = {name: i for i, name in enumerate(classes)}
        cells = [cell for table in tables for cell in table.names("label_column", label)]
        return np.array([number[class_of[cell]] for cell in cells], np.int64), classes, notes
    number = {name: i for i, name in enumerate(listed)}
    alike = {same_name(name): i for i, name in enumerate(listed)}
    labels = []
    for table in tables:
        for row, cell in enumerate(table.names("label_column", label)):
            place = number.get(cell, alike.get(same_name(cell)))
            if place is None:
                raise InputError(f"{table.at(row, label)}: {cell!r} is not in data.class_names = {list(listed)}")
            labels.append(place)
    return np.array(labels, np.int64), tuple(listed), ()


def doubtful_classes(
    tables: Sequence[RawTable], label: str, listed: bool, y: Array, classes: Sequence[str], parts: tuple[Array, Array]
) -> tuple[str, ...]:
    """Warnings of labels that may be a quantity, and of classes that only one part has. Listed classes are no quantity."""
    numbers = [number_of(name) for name in classes]
    of_parts = untrained(f"{tables[-1].path}: column {label!r}", *parts, dict(enumerate(classes)))
    if listed:
        return of_parts
    reason, _ = no_classes(None if None in numbers else np.array(numbers, np.float64), np.bincount(y, minlength=len(classes)))
    quantity = f"{tables[0].path}: column {label!r}: {len(classes):,} classes in {len(y):,} rows: {reason}"
    return (quantity, *of_parts) if reason else of_parts


def label_numbers(tables: Sequence[RawTable], label: str) -> Array:
    """The labels (rows,) float64 of a regression. Raises `InputError` naming the cell that is no finite number."""
    labels = []
    for table in tables:
        for row, cell in enumerate(table.column("data.label_column", label)):
            number = cell_number(cell)
            if not np.isfinite(number):
                raise InputError(
                    f"{table.at(row, label)}: {shown(cell)} is not a finite number; data.label_type = 'number' needs one in each row"
                )
            labels.append(number)
    return np.array(labels, np.float64)
