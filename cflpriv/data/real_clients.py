"""Data sets whose clients are real: writers, accounts, people, stations. Nothing is downloaded.

The partition `given` takes these clients. Where the true groups are not known, scores against true groups mean nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from ..errors import InputError
from ..types import Array
from .datasets import HOW_TO_SET, Dataset, dataset_of, find_file
from .formats import (
    LARGEST_BYTES,
    LEAF_CHARACTERS,
    LeafRows,
    leaf_characters,
    leaf_tweets,
    read_leaf,
    read_lines,
    read_own_npz,
)
from .scaling import Scaling

__all__ = ["REAL_CLIENTS"]

TWEET_FEATURES, CHARACTERS_BEFORE = 1024, 80
HAR_FEATURES, HAR_CLASSES = 561, ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")
TEST_SHARE = 4
"""One of so many rows of a person is a test row."""


def _leaf(
    name: str, directory: Path, features: int, classes: int, rows: LeafRows | None = None, letters: str = ""
) -> tuple[Dataset, int]:  # fmt: skip
    """LEAF's json files: folders `train` and `test` as its scripts make them, split by sample. The data set and its number of users.

    `rows`, `letters`: as in `read_leaf`.
    """
    folders = [directory / name, directory / name / "data", directory / name.upper()]
    candidates = [folder for folder in folders if (folder / "train").is_dir() and (folder / "test").is_dir()]
    searched = " and ".join(map(str, folders))
    if not candidates:
        raise InputError(f"{name}: no folders train and test with LEAF's json files in {searched}; {HOW_TO_SET}")
    parts: dict[str, dict[str, tuple[Array, Array]]] = {"train": {}, "test": {}}
    for part, users in parts.items():
        paths = sorted((candidates[0] / part).glob("*.json"))
        if not paths:
            raise InputError(f"{name}: no *.json in {candidates[0] / part}; {HOW_TO_SET}")
        for path in paths:
            for user, samples in read_leaf(path, features, classes, rows, letters).items():
                if user in users:
                    raise InputError(f"{path}: user {user!r} is in an earlier file too")
                if part == "test" and user not in parts["train"]:
                    raise InputError(f"{path}: user {user!r} has no training samples; make the files with LEAF's option -t sample")
                users[user] = samples
    numbers = {user: number for number, user in enumerate(sorted(parts["train"]))}
    flat = []
    for users in parts.values():
        contributing = [user for user in sorted(users) if len(users[user][1])]
        if not contributing:
            raise InputError(f"{name}: {candidates[0]} holds no samples in one of train and test")
        x, y = (np.concatenate([users[user][i] for user in contributing]) for i in (0, 1))
        owners = np.repeat([numbers[user] for user in contributing], [len(users[user][1]) for user in contributing])
        flat.append((x.reshape(-1, 28, 28) if rows is None else x, y, owners))
    statistics = None if rows is None else ((0.0,), (1.0,))
    return dataset_of(name, flat[0][:2], flat[1][:2], classes, statistics, owners=(flat[0][2], flat[1][2])), len(numbers)


def _femnist(directory: Path) -> Dataset:
    """FEMNIST, 62 classes of 28×28. Paper is 1 and ink 0, as LEAF has it."""
    dataset, writers = _leaf("femnist", directory, 784, 62)
    return replace(dataset, notes=(f"femnist: {writers} writers as LEAF's files name them; a white page is 1, ink 0", *dataset.notes))


def _sent140(directory: Path) -> Dataset:
    """Sentiment of tweets by account. LEAF's models look words up in GloVe; here they are hashed, which needs no other file."""
    dataset, accounts = _leaf("sent140", directory, TWEET_FEATURES, 2, leaf_tweets)
    note = f"sent140: {accounts} accounts as LEAF's files name them; tweets are hashed counts of words, {TWEET_FEATURES} features"
    return replace(dataset, notes=(note, *dataset.notes), class_names=("negative", "positive"))


def _shakespeare(directory: Path) -> Dataset:
    """The next character of Shakespeare's plays by role, from the 80 characters before it."""
    dataset, roles = _leaf("shakespeare", directory, CHARACTERS_BEFORE, len(LEAF_CHARACTERS), leaf_characters, LEAF_CHARACTERS)
    return replace(dataset, notes=(f"shakespeare: {roles} roles as LEAF's files name them", *dataset.notes))


def _har(directory: Path) -> Dataset:
    """Human Activity Recognition (Anguita et al. 2013): 30 people with a phone, 561 features of windows of 2.56 s, six activities.

    The official split is by person, which leaves nine people without training data. Here the last quarter of each person's windows of an
    activity are its test windows. Windows overlap by half, so the one before them is left out.
    """
    folders = [directory / folder for folder in ("har", "UCI HAR Dataset", "har/UCI HAR Dataset")]
    columns: dict[str, list[Array]] = {"X": [], "y": [], "subject": []}
    for part in ("train", "test"):
        for name, values in columns.items():
            path = find_file("har", (folder / part for folder in folders), (f"{name}_{part}.txt", f"{name}_{part}.txt.gz"))
            values.append(_numbers(path, HAR_FEATURES if name == "X" else 1))
    x, y, people = (np.concatenate(columns[name]) for name in ("X", "y", "subject"))
    y, people = y[:, 0], people[:, 0]
    if not len(x) == len(y) == len(people):
        raise InputError(f"har: {len(x)} windows, {len(y)} labels and {len(people)} people; expected as many of each")
    if not (np.abs(x) <= 1).all() or not np.isin(y, range(1, 7)).all() or not np.isin(people, range(1, 31)).all():
        raise InputError("har: expected features in -1..1, labels in 1..6 and people in 1..30")
    train, test = _by_time([np.flatnonzero((people == person) & (y == label)) for person in range(1, 31) for label in range(1, 7)])
    samples, labels, owners = ((x + 1) / 2).astype(np.float32), y.astype(np.int64) - 1, people.astype(np.int64) - 1
    note = "har: the last quarter of each person's windows of an activity is held out; the window before it, which overlaps, is left out"
    return dataset_of(
        "har", (samples[train], labels[train]), (samples[test], labels[test]), 6, ((0.5,), (0.5,)), (note,), (owners[train], owners[test]),
        class_names=HAR_CLASSES,
    )  # fmt: skip


def _by_time(sequences: list[Array]) -> tuple[Array, Array]:
    """Training and test rows: the last quarter of each sequence, in time order, is for testing, the row before it for nothing."""
    train, test = [], []
    for rows in sequences:
        held_out = len(rows) // TEST_SHARE
        train.append(rows[: max(len(rows) - held_out - 1, 0)] if held_out else rows)
        test.append(rows[len(rows) - held_out :])
    return np.concatenate(train), np.concatenate(test)


def _numbers(path: Path, columns: int) -> Array:
    """A text file of rows of so many numbers with blanks between, float64 (rows, columns)."""
    lines = read_lines(path)
    if len(lines) * columns * 8 > LARGEST_BYTES:
        raise InputError(f"{path}: has {len(lines)} rows of {columns} numbers, more than {LARGEST_BYTES} bytes")
    values = np.empty((len(lines), columns))
    for row, line in enumerate(lines):
        cells = line.split()
        try:
            values[row] = np.array(cells, dtype=np.float64) if len(cells) == columns else np.nan
        except ValueError:
            values[row] = np.nan
        if not np.isfinite(values[row]).all():
            raise InputError(f"{path}: row {row + 1} is not {columns} finite numbers")
    return values


def _features(name: str, directory: Path) -> Dataset:
    """Features in 0..1 of real clients, in an npz of the form `datasets.NPZ_ARRAYS` (`client_train` and `client_test` are needed).

    `group` (clients,) is the true group of each client, where it is known. Values are taken as they are.
    """
    path = find_file(name, [directory / "real_clients", directory / name, directory], (f"{name}.npz",))
    arrays = read_own_npz(path, ("x_train", "y_train", "client_train", "x_test", "y_test", "client_test"), ("group",))
    owners, kinds, group = (arrays["client_train"], arrays["client_test"]), [], arrays.get("group")
    for part in () if group is None else owners:
        if group is None or group.dtype.kind not in "iu" or group.ndim != 1 or part.dtype.kind not in "iu" or not part.size:
            raise InputError(f"{path}: group and the clients must be integers")
        if part.min() < 0 or part.max() >= len(group):
            raise InputError(f"{path}: group has {len(group)} clients, the samples name client {part.max()}")
        kinds.append(group[part].astype(np.int64))
    train, test = kinds or (None, None)
    return dataset_of(
        name, (arrays["x_train"], arrays["y_train"]), (arrays["x_test"], arrays["y_test"]), owners=owners, kinds=(train, test),
        scaling=Scaling(0.0, 1.0),
    )  # fmt: skip


REAL_CLIENTS: Mapping[str, Callable[[Path], Dataset]] = {
    "femnist": _femnist,
    "sent140": _sent140,
    "shakespeare": _shakespeare,
    "har": _har,
    **{name: partial(_features, name) for name in ("wisdm", "sentiment", "beijing48")},
}
"""Name -> its loader, which takes the data directory."""
