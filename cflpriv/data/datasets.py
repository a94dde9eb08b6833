"""The common form of image data sets, and the user's own files. Nothing is downloaded and nothing is invented."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import InputError
from ..types import Array, check_array
from .formats import LARGEST_BYTES, read_idx, read_own_npz
from .number_labels import label_notes, number_doubts, to_unit
from .scaling import Scaling

__all__ = [
    "DIRECTORY_VARIABLE",
    "HOW_TO_SET",
    "NPZ_ARRAYS",
    "POOLED",
    "Dataset",
    "channel_statistics",
    "data_directory",
    "dataset_of",
    "find_file",
    "load_idx",
    "load_npz",
]

DIRECTORY_VARIABLE = "CFLPRIV_DATA"
HOW_TO_SET = f"set it with --data-dir or {DIRECTORY_VARIABLE}"


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images and labels. Shapes: x (n, C, H, W) float32 in [0, 1], y (n,) int64 in 0..classes-1; `mean`, `std` one value a channel.

    `mean` and `std` are for a model's input only; x itself is never normalised. `owners_train`, `owners_test` (n,) int64 name the real
    client of each sample where the file knows it, `kinds_train`, `kinds_test` (n,) int64 its group; `label_kinds` (classes,) the kind that
    each label belongs to (superclass, alphabet), -1 where unknown, if the data set has kinds. With `scaling`, x has any range,
    may be float64, and is scaled when it is divided among clients. `warnings` say what may be wrong with the data although they can be
    used; `doubts` are those of the notes that say it, too. `periods_train`, `periods_test` (n,) int64: the period of each sample, from 0,
    where time is divided. Treat the arrays as read-only.

    Raises `InputError` naming the first bad value.
    """

    name: str
    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    notes: tuple[str, ...] = ()
    owners_train: Array | None = None
    owners_test: Array | None = None
    label_kinds: tuple[int, ...] = ()
    kinds_train: Array | None = None
    kinds_test: Array | None = None
    class_names: tuple[str, ...] = ()
    scaling: Scaling | None = None
    warnings: tuple[str, ...] = ()
    feature_columns: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()
    label_range: tuple[float, ...] = ()
    periods_train: Array | None = None
    periods_test: Array | None = None
    doubts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for part, x, y, owners in (
            ("train", self.x_train, self.y_train, self.owners_train),
            ("test", self.x_test, self.y_test, self.owners_test),
        ):
            check_array(f"{self.name}: x_{part}", x, ndim=4, finite=False)
            check_array(f"{self.name}: y_{part}", y, ndim=1, kind="f" if self.label_range else "i")
            kind = np.float64 if self.label_range else np.int64
            if (x.dtype != np.float32 and (self.scaling is None or x.dtype != np.float64)) or y.dtype != kind:
                raise InputError(f"{self.name}: expected float32 samples and {np.dtype(kind)} labels, got {x.dtype} and {y.dtype}")
            if x.size == 0:
                raise InputError(f"{self.name}: x_{part} has shape {x.shape}; it must hold at least one sample")
            if len(x) != len(y):
                raise InputError(f"{self.name}: x_{part} has {len(x)} samples but y_{part} has {len(y)} labels")
            if self.scaling is None:
                _check_pixels(f"{self.name}: x_{part}", x)
            else:
                _check_features(f"{self.name}: x_{part}", x, self.scaling)
            if not self.label_range and (y.min() < 0 or y.max() >= self.classes):
                row = int(np.flatnonzero((y < 0) | (y >= self.classes))[0])
                raise InputError(f"{self.name}: y_{part} at index {row} is {y[row]}, not in 0..{self.classes - 1}")
            if owners is not None:
                check_array(f"{self.name}: client_{part}", owners, ndim=1, kind="i")
                if len(owners) != len(y) or owners.min() < 0:
                    raise InputError(f"{self.name}: client_{part} must name a client, from 0 up, for each of the {len(y)} samples")
        if self.label_kinds and len(self.label_kinds) != self.classes:
            raise InputError(f"{self.name}: label_kinds has {len(self.label_kinds)} entries for {self.classes} classes")
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            raise InputError(f"{self.name}: train samples have shape {self.x_train.shape[1:]}, test samples {self.x_test.shape[1:]}")
        if not len(self.mean) == len(self.std) == self.x_train.shape[1]:
            raise InputError(f"{self.name}: mean {self.mean} and std {self.std} need {self.x_train.shape[1]} values each")

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one sample."""
        _, channels, height, width = self.x_train.shape
        return int(channels), int(height), int(width)


def _check_pixels(name: str, x: Array) -> None:
    low, high = x.min(), x.max()
    if low >= 0 and high <= 1:  # false for NaN, which both carry through
        return
    where = tuple(int(i) for i in np.argwhere(~((x >= 0) & (x <= 1)))[0])
    raise InputError(f"{name}: pixel at index {where} is {x[where]}; expected values in 0..1 (or uint8 in 0..255)")


def _check_features(name: str, x: Array, scaling: Scaling) -> None:
    """Public constants must fit the features, and values that are taken as they are must lie in the public range."""
    for key, values in (("feature_mean", scaling.mean), ("feature_std", scaling.std)):
        if len(values) not in (1, x.shape[-1]):
            raise InputError(f"{name}: data.{key} has {len(values)} values for {x.shape[-1]} features; give one each, or one for all")
    if scaling.plain and not (x.min() >= scaling.low and x.max() <= scaling.high):
        row, _, _, column = (int(i) for i in np.argwhere((x < scaling.low) | (x > scaling.high))[0])
        raise InputError(
            f"{name}: feature {column} of sample {row} is {x[row, 0, 0, column]}, outside data.value_range = [{scaling.low:g}, "
            f"{scaling.high:g}]; widen it, or set data.standardise"
        )


def channel_statistics(parts: Iterable[Array]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of every channel over `parts`, arrays (n, C, H, W). A constant channel gets deviation 1."""
    count, total, squares = 0, np.zeros(()), np.zeros(())
    for x in parts:
        count += x.size // x.shape[1]
        total = total + x.sum(axis=(0, 2, 3), dtype=np.float64)
        squares = squares + np.array([np.square(x[:, c]).sum(dtype=np.float64) for c in range(x.shape[1])])
    mean = total / count
    deviation = np.sqrt(np.maximum(squares / count - mean**2, 0.0))
    # Single-precision squares leave about 1e-4 on a channel that does not vary; dividing by that would only magnify it.
    return tuple(map(float, mean)), tuple(float(s) if s > 1e-3 else 1.0 for s in deviation)


def _pieces(x: Array) -> Iterable[Array]:
    """`x` as a whole, or in pieces if it is too large for memory: statistics take as much memory as a piece."""
    rows = len(x) if x.nbytes <= LARGEST_BYTES else max(1, (LARGEST_BYTES >> 5) * len(x) // x.nbytes)
    return (x[at : at + rows] for at in range(0, len(x), rows))


def data_directory(directory: str | Path | None = None) -> Path:
    """Where data sets are looked for: `directory` (--data-dir), else the environment's CFLPRIV_DATA, else `data/`."""
    return Path(directory or os.environ.get(DIRECTORY_VARIABLE) or "data")


def find_file(name: str, folders: Iterable[Path], names: Iterable[str]) -> Path:
    """The first of the files `names` in the first of `folders` that has one."""
    folders, names = list(folders), list(names)
    for folder in folders:
        for file in names:
            if (folder / file).is_file():
                return folder / file
    searched = " and ".join(map(str, folders))
    raise InputError(f"{name}: no {' or '.join(names)} in {searched}; {HOW_TO_SET}")


def dataset_of(
    name: str,
    train: tuple[Array, Array],
    test: tuple[Array, Array],
    classes: int = 0,
    statistics: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
    notes: tuple[str, ...] = (),
    owners: tuple[Array | None, Array | None] = (None, None),
    label_kinds: tuple[int, ...] = (),
    kinds: tuple[Array | None, Array | None] = (None, None),
    class_names: tuple[str, ...] = (),
    scaling: Scaling | None = None,
    warnings: tuple[str, ...] = (),
    label_range: tuple[float, ...] = (),
) -> Dataset:
    """Convert a file's arrays to a `Dataset`; `classes` 0 means one more than the largest label.

    With a `label_range` labels are numbers.
    """
    if scaling is None:
        white, read_as = _white(name, train[0], test[0])
        x_train, x_test = _images(f"{name}: x_train", train[0], white), _images(f"{name}: x_test", test[0], white)
        notes = (*notes, *read_as, *_axes(name, train[0], x_train))
    else:
        x_train, x_test = (_features(f"{name}: x_{part}", x, scaling.blanks) for part, x in (("train", train[0]), ("test", test[0])))
    statistics = statistics if scaling is None else scaling.statistics
    if label_range:
        numbers = [_numbers(f"{name}: y_{part}", y) for part, y in (("train", train[1]), ("test", test[1]))]
        both = np.concatenate(numbers)
        warnings, notes = (*warnings, *number_doubts(name, both, label_range)), (*notes, *label_notes(both, label_range))
        y_train, y_test = (to_unit(y, label_range) for y in numbers)
        classes = 1
    else:
        y_train, y_test = _whole(f"{name}: y_train", train[1]), _whole(f"{name}: y_test", test[1])
    if not classes:
        classes = 1 + max((int(y.max()) for y in (y_train, y_test) if len(y)), default=0)
    if statistics is None and x_train.size:
        statistics = channel_statistics(_pieces(x_train))
    mean, std = statistics or ((0.0,), (1.0,))
    owners_train, owners_test = (None if o is None else _whole(f"{name}: client owners", o) for o in owners)
    return Dataset(
        name,
        x_train,
        y_train,
        x_test,
        y_test,
        classes,
        mean,
        std,
        notes,
        owners_train,
        owners_test,
        label_kinds,
        *kinds,
        class_names,
        scaling,
        warnings,
        label_range=label_range,
    )


def _features(name: str, x: Array, blanks: bool) -> Array:
    """Features (n, d) of any range as (n, 1, 1, d): float32 as it is, others float64, since they may lie close together far from zero."""
    if x.ndim != 2 or x.dtype.kind not in "fiu":
        raise InputError(f"{name}: has dtype {x.dtype} and shape {x.shape}; data.standardise takes numbers of shape (n, features)")
    with np.errstate(over="ignore"):
        values = (np.where(np.isnan(x), 0.0, x) if blanks else x).astype(np.float32)
    check_array(name, values)  # what is not finite in float32 is too large for the model
    return np.ascontiguousarray(x[:, None, None, :], dtype=x.dtype if x.dtype == np.float32 else np.float64)


FEWEST_GREYS = 64
"""If no pixel of any image is brighter, the images are not of 0..255: they hold truth values, or so many grey levels."""


PERCENT_AND_7_BITS = (100, 127, 128)


def _white(name: str, *parts: Array) -> tuple[int, tuple[str, ...]]:
    """The value of white in pixels of uint8, and a note if it is not 255."""
    largest = max((int(x.max()) for x in parts if x.dtype == np.uint8 and x.size), default=0)
    if not (0 < largest <= FEWEST_GREYS or largest in PERCENT_AND_7_BITS):
        return 255, ()
    return largest, (f"{name}: its pixels are uint8 in 0..{largest}, so they are divided by {largest} and not by 255",)


def _channels_last(shape: tuple[int, ...]) -> bool:
    """Whether four axes are (n, H, W, C): 1 or 3 channels; transparency or two channels of an image that is larger; several of a square."""
    _, first, second, last = shape
    if last in (1, 3):
        return first not in (1, 3)
    return (last in (2, 4) and min(first, second) > 4) or (first == second > last)


def _axes(name: str, x: Array, images: Array) -> tuple[str, ...]:
    """A note if channels were taken from the last axis and are neither 1 nor 3."""
    if x.ndim != 4 or not _channels_last(x.shape) or x.shape[-1] in (1, 3):
        return ()
    _, channels, height, width = images.shape
    clear = channels == 4 and images.size > 0 and bool((images[:, 3] == images.flat[3 * height * width]).all())
    constant = "; the last, transparency, is the same everywhere" if clear else ""
    return (f"{name}: x of shape {x.shape} is read as (n, H, W, C), images of {height}×{width} with {channels} channels{constant}",)


def _images(name: str, x: Array, white: int = 255) -> Array:
    """Pixels as (n, C, H, W) float32 in [0, 1].

    uint8 is divided by `white`, booleans become 0 and 1, floats stay. (n, H, W) gets one channel, (n, d) becomes (n, 1, 1, d). Four axes
    are channels first, unless `_channels_last`.
    """
    if x.ndim not in (2, 3, 4):
        raise InputError(f"{name}: expected (n, d), (n, H, W), (n, C, H, W) or (n, H, W, C), got shape {x.shape}")
    if x.ndim == 2:
        x = x[:, None, None, :]
    elif x.ndim == 3:
        x = x[:, None]
    elif _channels_last(x.shape):
        x = np.moveaxis(x, -1, 1)
    if x.dtype == np.uint8:
        return np.divide(x, np.float32(white), dtype=np.float32, order="C")
    if x.dtype.kind not in "fb":
        raise InputError(f"{name}: has dtype {x.dtype}; expected uint8 in 0..255 or floating in 0..1")
    if x.dtype.kind == "f" and x.size:
        _check_pixels(name, x)  # before the conversion, which would turn a huge double into infinity
    return np.ascontiguousarray(x, dtype=np.float32)


def _numbers(name: str, y: Array) -> Array:
    if y.dtype.kind not in "iuf" or y.ndim != 1:
        raise InputError(f"{name}: expected one axis of numbers, got {y.dtype} of shape {y.shape}")
    return y.astype(np.float64)


def _whole(name: str, y: Array) -> Array:
    if y.dtype.kind not in "iu" or y.ndim != 1:
        raise InputError(f"{name}: expected one axis of integers, got {y.dtype} of shape {y.shape}")
    if len(y) and int(y.max()) > np.iinfo(np.int32).max:
        raise InputError(f"{name}: holds {int(y.max())}, too large to be a class or a client")
    return y.astype(np.int64)


# The user's own files.

NPZ_ARRAYS = {
    "x_train": "training samples: uint8 in 0..255 (or 0..largest: up to 64, 100, 127 or 128) or floating in 0..1, of shape (n, d), "
    "(n, H, W), (n, C, H, W) or (n, H, W, C), where C is 1 to 4, or less than H = W",
    "y_train": "their labels (n,), integers from 0 without large gaps",
    "x_test": "test samples, of the same form",
    "y_test": "their labels",
    "client_train": 'optional: the client of each training sample (n,), integers from 0, for `partition = "given"`',
    "client_test": "optional: the client of each test sample; without it a client is tested on all samples with its labels",
    "class_names": "optional: the names of the classes; without it there are as many as the largest label + 1",
}
"""The arrays of an npz, by name."""
POOLED = "{}: a model's input is normalised by the mean and deviation of all clients' training samples, which count as public"
_NPZ_NEEDED = ("x_train", "y_train", "x_test", "y_test")


def load_npz(path: str | Path, scaling: Scaling | None = None, label_range: tuple[float, ...] = ()) -> Dataset:
    """The user's own samples: an npz with the arrays `NPZ_ARRAYS`, never unpickled, or a folder of these (`formats.read_own_npz`).

    Without `scaling`, values are pixels and `mean`, `std` are computed on x_train, over all clients, which a note says. With it, they are
    features (n, d) of any range. With a `label_range` labels are numbers of any dtype.

    Raises `InputError` naming file, array and value.
    """
    path = Path(path)
    arrays = read_own_npz(path, _NPZ_NEEDED, tuple(name for name in NPZ_ARRAYS if name not in _NPZ_NEEDED))
    names = arrays.get("class_names")
    if names is not None and label_range:
        raise InputError(f"{path}: has class_names, but the label is a number (data.label_type)")
    if "client_test" in arrays and "client_train" not in arrays:
        raise InputError(f"{path}: has client_test but no client_train")
    return dataset_of(
        str(path),
        (arrays["x_train"], arrays["y_train"]),
        (arrays["x_test"], arrays["y_test"]),
        classes=0 if names is None else names.size,
        notes=() if scaling is not None else (POOLED.format(path),),
        class_names=() if names is None else tuple(str(name) for name in names.ravel().tolist()),
        scaling=scaling,
        owners=(arrays.get("client_train"), arrays.get("client_test")),
        label_range=label_range,
    )


def load_idx(train_images: str | Path, train_labels: str | Path, test_images: str | Path, test_labels: str | Path) -> Dataset:
    """The user's own images in four idx files (raw or gzip): images (n, H, W) and labels (n,) of unsigned bytes."""
    return dataset_of(
        str(train_images), (read_idx(train_images, 3), read_idx(train_labels, 1)), (read_idx(test_images, 3), read_idx(test_labels, 1)),
        notes=(POOLED.format(train_images),),
    )  # fmt: skip
