"""Strict readers of data-set files: idx, npz, libsvm, CIFAR's binary batches, SVHN's MATLAB files, LEAF's json, text.

Files are untrusted. Sizes are checked before memory is taken, nothing is unpickled, and whatever is wrong becomes an `InputError` of one
line that names the file.
"""

import bz2
import csv
import gzip
import io
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import numpy as np

from .. import array_files
from ..array_files import LEAST_OF_OWN_DATA, fill, map_npy, named, reading, unpacked_limit
from ..errors import InputError
from ..protocols.bounded_files import open_regular
from ..types import Array

__all__ = [
    "LARGEST_BYTES",
    "LEAF_CHARACTERS",
    "check_cells",
    "csv_row_numbers",
    "leaf_characters",
    "leaf_tweets",
    "read_cifar100_batch",
    "read_cifar_batch",
    "read_csv",
    "read_idx",
    "read_leaf",
    "read_lines",
    "read_own_npz",
    "read_svhn",
    "read_svmlight",
    "separated_otherwise",
]

# No valid idx, text or MATLAB file unpacks to more than this; a header that claims more is damaged or hostile.
LARGEST_BYTES = 2**31
CELL_BYTES = 32
"""What a number in a list takes."""
_CHUNK_BYTES = 2**20
_IDX_UINT8 = 0x08
_CIFAR_PIXELS = 3 * 32 * 32
LEAF_CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of LEAF's Shakespeare, in the order of its `ALL_LETTERS`: a character's number is its place."""
LEAF_TWEET = 4
"""Where a tweet's text is among the fields of LEAF's Sent140."""


def _read_at_most(handle: BufferedIOBase, limit_bytes: int) -> bytes:
    """Up to `limit_bytes` from `handle`, taking memory only for what is there (a header may promise gigabytes)."""
    chunks: list[bytes] = []
    left = limit_bytes
    while left > 0 and (chunk := handle.read(min(left, _CHUNK_BYTES))):
        chunks.append(chunk)
        left -= len(chunk)
    return b"".join(chunks)


def read_idx(path: str | Path, axes: int) -> Array:
    """An idx file of unsigned bytes (raw or gzip, detected by content) as a uint8 array with `axes` axes.

    Raises `InputError` for a missing file, a wrong magic number, element type or number of axes, sizes beyond `LARGEST_BYTES`, too few or
    too many bytes, or a damaged gzip stream.
    """
    path = Path(path)
    with reading(path, "idx"), open_regular(path) as raw:
        head = raw.read(2)
        raw.seek(0)
        with _unpacker(head, raw) as unpacked:
            return _parse_idx(path, unpacked, axes)


def _parse_idx(path: Path, handle: BufferedIOBase, axes: int) -> Array:
    magic = handle.read(4)
    expected = bytes([0, 0, _IDX_UINT8, axes])
    if magic != expected:
        raise InputError(f"{path}: magic number is 0x{magic.hex()}, expected 0x{expected.hex()} (idx, unsigned bytes, {axes} axes)")
    header = handle.read(4 * axes)
    if len(header) != 4 * axes:
        raise InputError(f"{path}: truncated in the header")
    shape = struct.unpack(f">{axes}I", header)
    size = math.prod(shape)
    if size > LARGEST_BYTES:
        raise InputError(f"{path}: header promises shape {shape}, more than {LARGEST_BYTES} bytes")
    array = np.empty(size, np.uint8)
    if (count := fill(handle, array)) < size:
        raise InputError(f"{path}: truncated, {count} of {size} bytes for shape {shape}")
    if handle.read(1):
        raise InputError(f"{path}: trailing bytes after the {size} of shape {shape}")
    return array.reshape(shape)


def read_own_npz(path: str | Path, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> Mapping[str, Array]:
    """The named arrays of an npz file, never unpickling. Other arrays in the file are not read.

    `path` may be a folder of the same arrays, each as NAME.npy: then they are memory-mapped (copy on write), whatever their size.

    Raises `InputError` for a missing file or array, an array that would need pickle, a damaged file, and compressed arrays that unpack to
    more than 8 GiB and 100 times the size of the file.
    """
    path = Path(path)
    if not path.is_dir():
        return array_files.read_npz(path, required, optional, LEAST_OF_OWN_DATA)
    there = {file.stem: file for file in path.glob("*.npy")}
    for name in required:
        if name not in there:
            raise InputError(f"{path}: has no array {name}.npy; it holds {named(there)}")
    return {name: map_npy(there[name]) for name in (*required, *optional) if name in there}


def read_svmlight(path: str | Path, features: int) -> tuple[Array, Array]:
    """A libsvm text file (`label index:value ...`, indices from 1; plain, gzip or bz2): values (n, features) float32 and labels (n,) int64.

    Absent indices are 0, as in the format's definition; every line is a sample. Raises `InputError`, also for a feature beyond `features`,
    a label that is no whole number, and more than `LARGEST_BYTES` of text or of values.
    """
    from sklearn.datasets import load_svmlight_file

    path = Path(path)
    with reading(path, "libsvm"):
        text = _unpacked(path)
    lines = _lines(text)
    if lines * features * np.dtype(np.float32).itemsize > LARGEST_BYTES:
        raise InputError(f"{path}: has {lines} lines of {features} values, more than {LARGEST_BYTES} bytes")
    handle = io.BytesIO(text)
    try:
        values, labels = load_svmlight_file(handle, dtype=np.float32, zero_based=False)
    except (ValueError, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: not a readable libsvm file (line {_lines(text[: handle.tell()])}: {reason})") from error
    if len(labels) != lines:
        raise InputError(f"{path}: {lines - len(labels)} of its {lines} lines have no sample")
    if values.shape[1] > features:
        raise InputError(f"{path}: has feature {values.shape[1]}, not in 1..{features}")
    whole = np.isfinite(labels) & (labels == np.trunc(labels)) & (np.abs(labels) < 2**53)
    if not whole.all():
        first = int(np.flatnonzero(~whole)[0])
        raise InputError(f"{path}: line {first + 1} has label {labels[first]}, expected a whole number")
    values.resize((lines, features))
    return values.toarray(), labels.astype(np.int64)


def _lines(text: bytes) -> int:
    return text.count(b"\n") + (text[-1:] not in (b"", b"\n"))


def read_cifar_batch(path: str | Path) -> tuple[Array, Array]:
    """One file of CIFAR-10's official binary version: images (n, 3, 32, 32) uint8 and labels (n,) uint8.

    A record is a label byte and three colour planes. The official Python version of the data set is pickled, so it is not read.
    """
    labels, images = _cifar_records(Path(path), "CIFAR-10", 1)
    return images, labels[:, 0]


def read_cifar100_batch(path: str | Path) -> tuple[Array, Array, Array]:
    """One file of CIFAR-100's official binary version: images (n, 3, 32, 32), fine and coarse labels (n,), all uint8.

    A record is a coarse label (superclass, 0..19), a fine label (0..99) and three colour planes. Raises `InputError` also for a label
    outside its range, naming the record.
    """
    path = Path(path)
    labels, images = _cifar_records(path, "CIFAR-100", 2)
    for column, key, classes in ((0, "coarse", 20), (1, "fine", 100)):
        wrong = np.flatnonzero(labels[:, column] >= classes)
        if len(wrong):
            raise InputError(f"{path}: record {wrong[0]} has {key} label {labels[wrong[0], column]}, not in 0..{classes - 1}")
    return images, labels[:, 1], labels[:, 0]


def _cifar_records(path: Path, name: str, label_bytes: int) -> tuple[Array, Array]:
    """Labels (n, label_bytes) and images (n, 3, 32, 32) of a file of records."""
    size = label_bytes + _CIFAR_PIXELS
    with reading(path, f"{name} binary"), open_regular(path) as handle:
        body = _read_at_most(handle, LARGEST_BYTES + 1)
    if len(body) == 0 or len(body) > LARGEST_BYTES or len(body) % size:
        raise InputError(f"{path}: {len(body)} bytes are not a whole number of records of {size} bytes")
    records = np.frombuffer(body, np.uint8).reshape(-1, size)
    return records[:, :label_bytes], records[:, label_bytes:].reshape(-1, 3, 32, 32)


def read_svhn(path: str | Path) -> tuple[Array, Array]:
    """One of SVHN's cropped-digit MATLAB files: images (n, 3, 32, 32) uint8, labels (n,) int64 in 0..9 (the file's 10 is digit 0).

    The file holds X, uint8 (32, 32, 3, n), and y, (n, 1) in 1..10; nothing else in it is read. Sizes are taken from the headers first.
    Raises `InputError` naming file and array.
    """
    import scipy.io  # slow to import

    path = Path(path)
    with reading(path, "MATLAB"):
        open_regular(path).close()  # scipy looks for other endings if there is no such file
        try:
            headers = {name: (shape, kind) for name, shape, kind in scipy.io.whosmat(path)}
        except Exception as error:  # damaged headers make scipy's parser fail in any way
            raise ValueError(str(error)) from error
        for name in ("X", "y"):
            if name not in headers:
                raise InputError(f"{path}: has no array {name!r}; it holds {named(headers)}")
        (x_shape, x_kind), (y_shape, _) = headers["X"], headers["y"]
        if len(x_shape) != 4 or x_shape[:3] != (32, 32, 3) or x_kind != "uint8":
            raise InputError(f"{path}: X is {x_kind} of shape {x_shape}, expected uint8 (32, 32, 3, n)")
        count = int(x_shape[3])
        if math.prod(map(int, x_shape)) > LARGEST_BYTES:
            raise InputError(f"{path}: X promises shape {x_shape}, more than {LARGEST_BYTES} bytes")
        if tuple(y_shape) not in ((count, 1), (1, count)):
            raise InputError(f"{path}: y has shape {y_shape}, expected ({count}, 1) for {count} images")
        try:
            arrays = scipy.io.loadmat(path, variable_names=("X", "y"))
        except Exception as error:
            raise ValueError(str(error)) from error
        x, y = np.asarray(arrays["X"]), np.asarray(arrays["y"]).ravel()
    wrong = np.flatnonzero(~np.isin(y, np.arange(1, 11)))
    if len(wrong):
        raise InputError(f"{path}: y at index {wrong[0]} is {y[wrong[0]]}, not in 1..10")
    return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y.astype(np.int64) % 10


LeafRows = Callable[[str, Sequence[Any], int], Array]
"""(name for errors, a user's entries, number of features) -> samples (n, features) float32 in 0..1. Raises `InputError` naming an entry."""


def read_leaf(
    path: str | Path, features: int, classes: int, rows: LeafRows | None = None, letters: str = ""
) -> Mapping[str, tuple[Array, Array]]:  # fmt: skip
    """One of LEAF's json files: per user the samples (n, features) float32 in 0..1 and labels (n,) int64 in 0..classes-1.

    The file is an object with "users", a list of names, "num_samples" (optional) and "user_data", name -> {"x": [...], "y": [...]}. An
    entry of x becomes a sample by `rows`; without it, it is a list of numbers in 0..1. An entry of y is a number, or with `letters` one of
    these, whose number is its place. Raises `InputError` naming file, key and value.
    """
    path = Path(path)
    with reading(path, "LEAF json"):
        tree = json.loads(_unpacked(path))
        if not isinstance(tree, dict) or not isinstance(tree.get("users"), list) or not isinstance(tree.get("user_data"), dict):
            raise InputError(f"{path}: expected an object with a list 'users' and an object 'user_data'")
        users, counts = tree["users"], tree.get("num_samples")
        if counts is not None and (not isinstance(counts, list) or len(counts) != len(users)):
            raise InputError(f"{path}: num_samples has not one number for each of the {len(users)} users")
        samples_of: dict[str, tuple[Array, Array]] = {}
        for i, user in enumerate(users):
            if not isinstance(user, str) or user in samples_of or user not in tree["user_data"]:
                raise InputError(f"{path}: users[{i}] = {user!r}: expected a name, once, that user_data has")
            name = f"{path}: user_data[{user!r}]"
            samples_of[user] = _leaf_user(name, tree["user_data"][user], features, classes, rows or _leaf_numbers, letters)
            if counts is not None and counts[i] != len(samples_of[user][1]):
                raise InputError(f"{path}: num_samples[{i}] = {counts[i]!r}, but user {user!r} has {len(samples_of[user][1])} samples")
        return samples_of


def _leaf_user(name: str, entry: Any, features: int, classes: int, rows: LeafRows, letters: str) -> tuple[Array, Array]:
    if not isinstance(entry, dict) or not isinstance(entry.get("x"), list) or not isinstance(entry.get("y"), list):
        raise InputError(f"{name}: expected an object with lists 'x' and 'y'")
    x, y = entry["x"], entry["y"]
    if len(x) != len(y):
        raise InputError(f"{name}: has {len(x)} samples in x but {len(y)} labels in y")
    samples = rows(name, x, features)
    if letters:
        return samples, _letter_numbers(f"{name}: y", "".join(_single(f"{name}: y[{i}]", label) for i, label in enumerate(y)), letters)
    for i, label in enumerate(y):
        if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < classes:
            raise InputError(f"{name}: y[{i}] = {label!r}, not in 0..{classes - 1}")
    return samples, np.array(y, dtype=np.int64)


def _leaf_numbers(name: str, x: Sequence[Any], features: int) -> Array:
    samples = np.zeros((len(x), features), np.float32)
    for i, row in enumerate(x):
        if not isinstance(row, list) or len(row) != features:
            raise InputError(f"{name}: x[{i}] is not a list of {features} numbers")
        values = np.asarray(row)
        if values.dtype.kind not in "iuf" or not ((values >= 0) & (values <= 1)).all():
            at = next((j for j, x in enumerate(row) if isinstance(x, bool) or not isinstance(x, int | float) or not 0 <= x <= 1), 0)
            raise InputError(f"{name}: x[{i}][{at}] = {row[at]!r}: expected numbers in 0..1")
        samples[i] = values
    return samples


def leaf_tweets(name: str, x: Sequence[Any], features: int) -> Array:
    """`LeafRows` of Sent140: hashed counts of a tweet's words, of length 1, so that no vocabulary is learned."""
    from sklearn.feature_extraction.text import HashingVectorizer

    for i, row in enumerate(x):
        if not isinstance(row, list) or len(row) <= LEAF_TWEET or not isinstance(row[LEAF_TWEET], str):
            raise InputError(f"{name}: x[{i}] is not a list with the tweet as its entry {LEAF_TWEET}")
    hashing = HashingVectorizer(n_features=features, alternate_sign=False, token_pattern=r"(?u)\b\w+\b")
    return np.asarray(hashing.transform([row[LEAF_TWEET] for row in x]).toarray(), dtype=np.float32).clip(0, 1)


def leaf_characters(name: str, x: Sequence[Any], features: int) -> Array:
    """`LeafRows` of Shakespeare: the numbers of the characters before the one to be predicted, as `engine.models.NextWord` takes them."""
    samples = np.zeros((len(x), features), np.float32)
    for i, row in enumerate(x):
        if not isinstance(row, str) or len(row) != features:
            raise InputError(f"{name}: x[{i}] is not a text of {features} characters")
        samples[i] = (_letter_numbers(f"{name}: x[{i}]", row, LEAF_CHARACTERS) + 0.5) / len(LEAF_CHARACTERS)
    return samples


def _single(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) != 1:
        raise InputError(f"{name} = {value!r}: expected one character")
    return value


def _letter_numbers(name: str, text: str, letters: str) -> Array:
    """The place of each character of `text` among `letters`, (characters,) int64."""
    places = np.array([letters.find(character) for character in text], dtype=np.int64)
    if (places < 0).any():
        at = int(places.argmin())
        raise InputError(f"{name}[{at}] = {text[at]!r}: not one of LEAF's {len(letters)} characters")
    return places


def read_lines(path: str | Path) -> tuple[str, ...]:
    """The lines of a UTF-8 text file (gzip or plain, detected by content) that are not blank."""
    path = Path(path)
    with reading(path, "UTF-8 text"):
        return tuple(line for line in _unpacked(path).decode("utf-8-sig").split("\n") if line.strip())


def read_csv(path: str | Path, columns: int = 0) -> tuple[tuple[str, ...], ...]:
    """The rows of a UTF-8 comma-separated file (gzip or plain), each of `columns` cells (0: as many as the first). Blank lines are none.

    A byte order mark is not part of the first cell. Raises `InputError` naming file and row.
    """
    rows, numbers = _csv_rows(Path(path))
    columns = columns or len(rows[0] if rows else ())
    for number, row in zip(numbers, rows, strict=True):
        if len(row) != columns:
            raise InputError(f"{path}: row {number} has {len(row)} cells, expected {columns}{separated_otherwise(rows[0])}")
    return rows


def separated_otherwise(header: Sequence[str]) -> str:
    """The end of an error for a file whose only column looks like several; "" for others."""
    several = len(header) == 1 and any(mark in header[0] for mark in ";\t|")
    return "; its columns are separated by something else than commas" if several else ""


def csv_row_numbers(path: str | Path) -> tuple[int, ...]:
    """The number of each row of `read_csv`: its first line in the file, from 1, where blank lines and line breaks in quotes count, too."""
    return _csv_rows(Path(path))[1]


def _csv_rows(path: Path) -> tuple[tuple[tuple[str, ...], ...], tuple[int, ...]]:
    rows, numbers, ended = [], [], 0
    with reading(path, "csv"):
        reader = csv.reader(io.StringIO(_unpacked(path).decode("utf-8-sig"), newline=""), strict=True)
        for row in reader:
            if row:
                rows.append(tuple(row))
                numbers.append(ended + 1)
            ended = reader.line_num
    return tuple(rows), tuple(numbers)


def check_cells(path: Path, cells: int, size: int) -> None:
    """Refuse a table of so many cells from files of `size` bytes; a repeated value takes few. Raises `InputError`."""
    if CELL_BYTES * cells > (limit := unpacked_limit(size, LEAST_OF_OWN_DATA)):
        raise InputError(f"{path}: its {cells} cells take {CELL_BYTES * cells} bytes, expected at most {limit} from {size} bytes")


def _unpacked(path: Path) -> bytes:
    """A whole file, unpacked if it is gzip or bz2 by content, of at most `LARGEST_BYTES`."""
    with open_regular(path) as raw:
        head = raw.read(3)
        raw.seek(0)
        with _unpacker(head, raw) as unpacked:
            body = _read_at_most(unpacked, LARGEST_BYTES + 1)
    if len(body) > LARGEST_BYTES:
        raise InputError(f"{path}: unpacks to more than {LARGEST_BYTES} bytes")
    return body


def _unpacker(head: bytes, raw: BufferedIOBase) -> BufferedIOBase:
    """What unpacks a file that begins with the bytes `head`: the file itself if it is not packed."""
    return gzip.GzipFile(fileobj=raw) if head[:2] == b"\x1f\x8b" else bz2.BZ2File(raw) if head == b"BZh" else raw
