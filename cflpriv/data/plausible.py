"""Data that can be used, and yet are hardly what was meant: checks that all sources of the user's own data share.

A check needs evidence: what it names is wrong in nearly every file that has it. Good data must pass in silence, so rare kinds of good data
count for more than one more kind of mistake.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..errors import InputError
from ..types import Array
from .class_names import accidental_pairs, missing_word, no_classes
from .datasets import Dataset
from .repeats import repeats_of

__all__ = ["Where", "plausible", "row_numbers", "untrained", "warnings_of_rows"]

Where = Callable[[str, int], str]
"""The place of a sample of a part, "train" or "test", by its index in the part."""

SPARSE = 10
"""Labels with so many times more classes than occur are identifiers."""
INDEX_WORDS = frozenset(("index", "idx", "id", "ids", "row", "rowid", "rownum", "rownumber", "rowindex", "nr", "uid", "guid", "key"))
"""Words in the names of columns that number rows or name what they are about."""
YEARS = 1500, 2200
"""Numbers in a row from this interval may be years."""
SCALES = 20
"""If the largest values of training and test samples differ by this factor, the two are not on one scale."""
FEW = 10
COUNTING = 0.8
"""Of the rows of an index that begins anew: so many are one more than the row before."""


def plausible(dataset: Dataset) -> Dataset:
    """The data set of arrays or image folders with its warnings. Raises `InputError` for labels that are no classes."""
    name = dataset.name
    if not dataset.label_range:
        _check_labels(dataset)

    def where(part: str, index: int) -> str:
        return f"sample {index} of {'training' if part == 'train' else 'test'}"

    scales = () if dataset.scaling is not None else _scales(name, dataset.x_train, dataset.x_test)
    columns = () if dataset.scaling is None else _numbering(name, dataset.x_train[:, 0, 0], dataset.x_test[:, 0, 0])
    labels = dict(enumerate(dataset.class_names))
    return replace(
        dataset,
        warnings=(
            *dataset.warnings,
            *(() if dataset.label_range else _doubtful_names(dataset)),
            *(() if dataset.label_range else untrained(name, dataset.y_train, dataset.y_test, labels)),
            *scales,
            *columns,
            *warnings_of_rows(name, dataset.x_train, dataset.x_test, dataset.owners_train, where),
        ),
    )


def _check_labels(dataset: Dataset) -> None:
    """Refuse identifiers and quantities as labels. Labels whose names the file lists are what it says."""
    if dataset.class_names:
        return
    present, counts = np.unique(np.concatenate([dataset.y_train, dataset.y_test]), return_counts=True)
    classes, occurring = dataset.classes, len(present)
    if classes > SPARSE * occurring and classes > 2 * SPARSE:
        some = ", ".join(map(str, present[:4].tolist()))
        raise InputError(
            f"{dataset.name}: y_train, y_test: {occurring:,} of {classes:,} classes occur ({some}{', …' if occurring > 4 else ''}); number "
            f"the classes from 0 without gaps, or name all {classes:,} in the array class_names"
        )
    reason, sure = no_classes(present.astype(np.float64), counts)
    if reason and sure:
        raise InputError(
            f"{dataset.name}: y_train, y_test: {occurring:,} classes in {counts.sum():,} samples: {reason}; for a regression set "
            "data.label_type = 'number'; or divide the quantity into a few classes, or name the classes in the array class_names"
        )


def _doubtful_names(dataset: Dataset) -> tuple[str, ...]:
    """What is doubtful about the names of classes, or about their numbers."""
    names, doubts = dataset.class_names, []
    if names:
        twice = sorted({name for name in names if names.count(name) > 1})
        doubts += [f"{dataset.name}: class_names has {name!r} twice; two outputs of the model mean the same" for name in twice[:1]]
        doubts += [
            f"{dataset.name}: the classes {first!r} and {second!r} differ as by accident; if they are one, give them one name"
            for first, second in accidental_pairs(set(names))[:3]
        ]
        doubts += [
            f"{dataset.name}: the class {name!r} is a word for a missing value; leave its samples out if it stands for one"
            for name in names
            if missing_word(name, [other for other in names if other != name])
        ]
        return tuple(doubts)
    present, counts = np.unique(np.concatenate([dataset.y_train, dataset.y_test]), return_counts=True)
    if 2 * len(present) < dataset.classes or present[0] == 1:
        some = ", ".join(map(str, present[:6].tolist())) + (", …" if len(present) > 6 else "")
        doubts.append(
            f"{dataset.name}: y_train, y_test: {len(present)} of {dataset.classes} classes occur ({some}); "
            "number the classes from 0 without gaps, or name them all in the array class_names"
        )
    reason, _ = no_classes(present.astype(np.float64), counts)
    if reason:
        doubts.append(f"{dataset.name}: y_train, y_test: {len(present):,} classes in {counts.sum():,} samples: {reason}")
    return tuple(doubts)


def untrained(name: str, y_train: Array, y_test: Array, names: Mapping[int, str]) -> tuple[str, ...]:
    """A warning for classes that occur only in the test part, where `names` gives the name of a class, and for parts with one class."""

    def shown(label: int) -> str:
        return repr(names.get(label, str(label)))

    doubts = []
    trained = np.unique(y_train)
    tested, counts = np.unique(y_test, return_counts=True)
    only = [(int(label), int(count)) for label, count in zip(tested, counts, strict=True) if label not in trained]
    if only:
        some = ", ".join(f"{shown(label)} ({count} test rows)" for label, count in only[:5])
        noun = "a class occurs" if len(only) == 1 else f"{len(only)} classes occur"
        doubts.append(f"{name}: {noun} only in the test part, so no model can learn it: {some}{', …' if len(only) > 5 else ''}")
    if len(trained) == 1:
        doubts.append(f"{name}: all {len(y_train)} training rows have the class {shown(int(trained[0]))}, so there is nothing to learn")
    elif len(tested) == 1 and len(y_test) >= FEW:
        doubts.append(
            f"{name}: all {len(y_test)} test rows have the class {shown(int(tested[0]))}, so their accuracy tells nothing of the other "
            f"{len(trained) - 1}"
        )
    return tuple(doubts)


def warnings_of_rows(name: str, x_train: Array, x_test: Array, owners: Array | None, where: Where) -> tuple[str, ...]:
    """Warnings of test rows that are training rows, and of training rows that repeat."""
    repeats = repeats_of(x_train, x_test, owners)
    remarks = []
    if repeats.tested:
        test, train = repeats.test_pair
        remarks.append(
            f"{name}: {repeats.tested} of {len(x_test)} test rows equal a training row ({where('test', test)} equals "
            f"{where('train', train)}), so scores are too high; remove them from one of the parts"
        )
    if repeats.shared:
        first, second = repeats.shared_pair
        remarks.append(
            f"{name}: {repeats.shared} of {len(x_train)} training rows are at several clients ({where('train', second)} equals "
            f"{where('train', first)}); a row that two clients have is not protected as the data of one, and groups look alike"
        )
    if repeats.doubled:
        first, second = repeats.doubled_pair

        def at(row: int) -> str:
            return where("train", row) if row < len(x_train) else where("test", row - len(x_train))

        remarks.append(
            f"{name}: {repeats.doubled} of {len(x_train) + len(x_test)} rows occur earlier, too ({at(second)} equals {at(first)}), and may "
            "be divided among clients, or among training and test; remove the repetitions"
        )
    return tuple(remarks)


def row_numbers(column: str, values: Sequence[Array]) -> str:
    """How a column of features numbers the rows of the parts of a table, as the end of a sentence; "" if it does not.

    Evidence is that it counts the rows of a part in their order, or an index's name with whole numbers that are all different or that
    count up, from client to client anew.
    """
    for part in values:
        if len(part) >= 3 * FEW and part.min() in (0, 1) and np.array_equal(np.sort(part), np.arange(len(part)) + part.min()):
            return f"numbers the rows: each of {part.min():g} to {part.max():g} once"
        steps = np.diff(part)
        if len(part) < FEW or not (np.abs(steps) == 1).all() or len(np.unique(steps)) > 1:
            continue
        first = min(part[0], part[-1])
        if first in (0, 1) or (len(part) >= 3 * FEW and first == np.trunc(first) and not YEARS[0] <= first <= YEARS[1]):
            return f"numbers the rows ({part[0]:g}, {part[1]:g}, {part[2]:g}, …)"
    words = [word.casefold() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^\W\d_]+", column)]
    unnamed = words[:1] == ["unnamed"] and len(words) > 1
    if unnamed or INDEX_WORDS.intersection(words):
        for part in values:
            if len(part) >= FEW and np.array_equal(part, np.trunc(part)):
                if len(np.unique(part)) == len(part):
                    return "is an index: whole numbers, each once"
                if (np.diff(part) == 1).mean() > COUNTING:
                    return "is an index: whole numbers that count up"
        if unnamed and all(np.array_equal(part, np.trunc(part)) for part in values):
            return "is an index without a name, as pandas writes it"
    return ""


def _numbering(name: str, x_train: Array, x_test: Array) -> tuple[str, ...]:
    """Warnings of features of arrays that number the samples."""
    remarks = []
    for column in range(x_train.shape[1]):
        if how := row_numbers("", [x_train[:, column], x_test[:, column]]):
            remarks.append(f"{name}: feature {column} {how}; leave it out, since a model can only memorise it")
    return tuple(remarks)


def _scales(name: str, x_train: Array, x_test: Array) -> tuple[str, ...]:
    """Warnings of pixels that were divided twice, in one part or in both."""
    train, test = float(x_train.max()), float(x_test.max())
    if 0 < max(train, test) <= 1.5 / 255:
        return (f"{name}: the largest pixel is {max(train, test):.2g}, expected about 1; were the pixels divided by 255 twice?",)
    if min(len(x_train), len(x_test)) >= FEW and min(train, test) * SCALES < max(train, test) and min(train, test) > 0:
        return (f"{name}: the largest pixel is {train:.2g} in x_train and {test:.2g} in x_test; bring both to one scale",)
    return ()
