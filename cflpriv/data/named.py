"""The named data sets of images, read from a directory the user names.

A data set keeps its name only if it is that data set: files of another shape are refused, fewer images than the official number are
reported so in `notes`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ..errors import InputError
from ..plugins import Registry
from ..randomness import stream
from ..types import Array
from .datasets import Dataset, data_directory, dataset_of, find_file, load_npz
from .formats import read_cifar100_batch, read_cifar_batch, read_idx, read_own_npz, read_svhn, read_svmlight
from .real_clients import REAL_CLIENTS

__all__ = ["LOADERS", "load_dataset"]


def load_dataset(name: str, directory: str | Path | None = None) -> Dataset:
    """One of the data sets in `LOADERS`, from `directory` (see `data_directory`).

    Raises `InputError` for an unknown name, a missing file (with the directories searched) or a damaged one.
    """
    load = LOADERS.find(name)
    if load is None:
        raise InputError(f"data set {name!r}: unknown; known are {', '.join(LOADERS.names())}")
    return load(data_directory(directory))


def _official(name: str, dataset: Dataset, shape: tuple[int, int, int], counts: tuple[int, int], notes: tuple[str, ...] = ()) -> Dataset:
    """`dataset` under its own name: it must have the name's shape; fewer or more images than the official number become a note."""
    if dataset.shape != shape:
        raise InputError(f"{dataset.name}: samples have shape {dataset.shape}, but those of {name} have {shape}")
    here = len(dataset.y_train), len(dataset.y_test)
    if here != counts:
        notes = (*notes, f"{name}: {here[0]} training and {here[1]} test images; the official files have {counts[0]} and {counts[1]}")
    return replace(dataset, name=name, notes=notes)


def _digits(directory: Path) -> Dataset:
    """scikit-learn's bundled 8×8 digits (1 797 real images, grey levels 0..16). 20 % of each class are the test set."""
    package = find_spec("sklearn")  # its file is read without importing it, which takes far longer
    if package is None or package.origin is None:
        raise InputError("digits: scikit-learn is not installed, which has their file")
    rows = _digit_rows(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz")
    x, y = (rows[:, :-1].reshape(-1, 8, 8) / 16.0).astype(np.float32), rows[:, -1].astype(np.int64)
    is_test = np.zeros(len(y), dtype=bool)
    for label in range(10):
        members = np.flatnonzero(y == label)
        # Seed 0, whatever the experiment's seed: the split is part of the data set.
        is_test[stream(0, f"data.digits.split{label}").permutation(members)[: round(0.2 * len(members))]] = True
    notes = ("digits: scikit-learn's bundled 8×8 digits, split 80/20 within each class; they have no official split",)
    return dataset_of("digits", (x[~is_test], y[~is_test]), (x[is_test], y[is_test]), classes=10, notes=notes)


@cache
def _digit_rows(path: Path) -> Array:
    """Pixels and label (1797, 65) of the digits, read once: reading the text takes longer than a round."""
    return np.loadtxt(path, delimiter=",")


def _mnist_like(name: str, folders: tuple[str, ...]) -> Callable[[Path], Dataset]:
    def load(directory: Path) -> Dataset:
        stems = ("train-images", 3), ("train-labels", 1), ("t10k-images", 3), ("t10k-labels", 1)
        paths = [
            find_file(
                name,
                [directory / folder for folder in folders],
                [f"{stem}{dot}idx{axes}-ubyte{packed}" for packed in ("", ".gz") for dot in ("-", ".")],
            )
            for stem, axes in stems
        ]
        images_train, labels_train, images_test, labels_test = (read_idx(path, axes) for path, (_, axes) in zip(paths, stems, strict=True))
        # MNIST's constants for Fashion-MNIST too: PACFL's authors normalise both by them, and their figures are what we compare with.
        dataset = dataset_of(str(paths[0]), (images_train, labels_train), (images_test, labels_test), 10, ((0.1307,), (0.3081,)))
        return _official(name, dataset, (1, 28, 28), (60_000, 10_000))

    return load


def _usps(directory: Path) -> Dataset:
    """The npz form, or the libsvm files (grey levels -1..1, labels 1..10 for digits 0..9), brought to 0..1 with ink bright."""
    folders = [directory / "usps", directory / "USPS", directory]
    path = find_file("usps", folders, ("usps.npz", "usps.bz2"))
    if path.suffix == ".npz":
        dataset = load_npz(path)
    else:
        parts = []
        for file in (path, find_file("usps", [path.parent], ("usps.t.bz2",))):
            values, labels = read_svmlight(file, 256)
            if not (np.abs(values) <= 1).all():
                raise InputError(f"{file}: grey levels must lie in -1..1")
            parts.append(((values.reshape(-1, 1, 16, 16) + 1) / 2, labels - 1))
        dataset = dataset_of(str(path), parts[0], parts[1], classes=10)
    _needs_classes(dataset, 10)
    return _official("usps", dataset, (1, 16, 16), (7_291, 2_007))


def _cifar10(directory: Path) -> Dataset:
    """The official *binary* version if it is there, else the npz subset. The official Python version is pickled: it is not read."""
    folders = [directory / "cifar10" / "cifar-10-batches-bin", directory / "cifar-10-batches-bin"]
    complete = [folder for folder in folders if folder.is_dir()]
    if complete:
        names = [f"data_batch_{part}.bin" for part in range(1, 6)]
        batches = [read_cifar_batch(find_file("cifar10", complete[:1], (name,))) for name in names]
        train = np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches])
        test = read_cifar_batch(find_file("cifar10", complete[:1], ("test_batch.bin",)))
        dataset = dataset_of(str(complete[0]), train, test, classes=10)
        return _official("cifar10", dataset, (3, 32, 32), (50_000, 10_000))
    try:
        path = find_file("cifar10", [directory / "cifar10", directory], ("cifar10_subset.npz",))
    except InputError as error:
        pickled = [f for f in (directory / "cifar10" / "cifar-10-batches-py", directory / "cifar-10-batches-py") if f.is_dir()]
        why = f"; {pickled[0]} is pickled and is not read: unpack the binary version beside it" if pickled else ""
        raise InputError(f"{error}; or the official binary batches in {folders[0]} or {folders[1]}{why}") from None
    dataset = load_npz(path)
    _needs_classes(dataset, 10)
    notes = (f"cifar10: read from {path.name}, not from the official batches; pixels may differ slightly (JPEG)",)
    return _official("cifar10", dataset, (3, 32, 32), (50_000, 10_000), notes)


def _needs_classes(dataset: Dataset, classes: int) -> None:
    if dataset.classes != classes:
        raise InputError(f"{dataset.name}: has {dataset.classes} classes, expected {classes}")


def _svhn(directory: Path) -> Dataset:
    """The cropped digits, two MATLAB files. The 531 131 extra training images are not used, as in PACFL."""
    folders = [directory / "svhn", directory / "SVHN", directory]
    paths = [find_file("svhn", folders, (f"{part}_32x32.mat",)) for part in ("train", "test")]
    dataset = dataset_of(str(paths[0]), read_svhn(paths[0]), read_svhn(paths[1]), classes=10)
    return _official("svhn", dataset, (3, 32, 32), (73_257, 26_032))


def _cifar100(directory: Path) -> Dataset:
    """The official *binary* version, or cifar100.npz (`coarse_train` optional). Kinds: the 20 superclasses. Nothing pickled is read."""
    folders = [directory / "cifar100" / "cifar-100-binary", directory / "cifar-100-binary", directory / "cifar100", directory]
    try:
        path = find_file("cifar100", folders, ("train.bin", "cifar100.npz"))
    except InputError as error:
        pickled = [f for f in (directory / "cifar100" / "cifar-100-python", directory / "cifar-100-python") if f.is_dir()]
        why = f"; {pickled[0]} is pickled and is not read: unpack the binary version beside it" if pickled else ""
        raise InputError(f"{error}{why}") from None
    if path.suffix == ".npz":
        dataset = load_npz(path)
        _needs_classes(dataset, 100)
        coarse = read_own_npz(path, (), ("coarse_train",)).get("coarse_train")
        fine = dataset.y_train
    else:
        x, fine, coarse = read_cifar100_batch(path)
        x_test, fine_test, _ = read_cifar100_batch(find_file("cifar100", [path.parent], ("test.bin",)))
        dataset = dataset_of(str(path), (x, fine), (x_test, fine_test), classes=100)
    if coarse is not None:
        dataset = replace(dataset, label_kinds=_kinds(str(path), "coarse", fine, coarse, 100))
    return _official("cifar100", dataset, (3, 32, 32), (50_000, 10_000))


def _kinds(name: str, key: str, labels: Array, kinds: Array, classes: int) -> tuple[int, ...]:
    """The kind of each label, which must be the same for all its samples; -1 for labels without samples."""
    if kinds.dtype.kind not in "iu" or kinds.shape != labels.shape:
        raise InputError(f"{name}: {key} has dtype {kinds.dtype} and shape {kinds.shape}; expected integers of shape {labels.shape}")
    kind_of_label = []
    for label in range(classes):
        values = np.unique(kinds[labels == label])
        if len(values) > 1:
            raise InputError(f"{name}: label {label} has the {key} values {values.tolist()}; each label belongs to one")
        kind_of_label.append(int(values[0]) if len(values) else -1)
    return tuple(kind_of_label)


def _emnist_letters(directory: Path) -> Dataset:
    """26 letters, upper and lower case merged: the official idx files (labels from 1, images transposed), or the npz subset (upright)."""
    folders = [directory / folder for folder in ("emnist_letters", "emnist", "EMNIST/raw")]
    stems = [f"emnist-letters-{part}-{kind}-ubyte" for part in ("train", "test") for kind in ("images-idx3", "labels-idx1")]
    path = find_file("emnist_letters", folders, (stems[0], f"{stems[0]}.gz", "emnist_letters_subset.npz"))
    if path.suffix == ".npz":
        dataset = load_npz(path)
        _needs_classes(dataset, 26)
    else:
        files = [find_file("emnist_letters", [path.parent], (stem, f"{stem}.gz")) for stem in stems]
        x_train, y_train, x_test, y_test = (read_idx(file, axes) for file, axes in zip(files, (3, 1, 3, 1), strict=True))
        for file, y in ((files[1], y_train), (files[3], y_test)):
            if len(y) and not 1 <= y.min() <= y.max() <= 26:
                raise InputError(f"{file}: holds label {y.max() if y.max() > 26 else y.min()}, not in 1..26")
        parts = [(x.transpose(0, 2, 1), y.astype(np.int64) - 1) for x, y in ((x_train, y_train), (x_test, y_test))]
        dataset = dataset_of(str(path), parts[0], parts[1], classes=26)
    return _official("emnist_letters", dataset, (1, 28, 28), (124_800, 20_800), ("emnist_letters: the writers are unknown",))


def _omniglot(directory: Path) -> Dataset:
    """Characters of eight alphabets at 28×28. Each (alphabet, drawer) is a client of its own; kinds: the alphabets.

    A drawer drew each character of its alphabet once. A quarter of each drawer's characters are its test set, so a drawer is tested on
    characters that it has not drawn for training, but others of its alphabet have. It is not FEMNIST and must not be reported as such.
    """
    path = find_file("omniglot", [directory / "omniglot", directory], ("omniglot_small.npz",))
    arrays = read_own_npz(path, ("x28", "label", "alphabet", "writer", "class_names"))
    x, label, writer, classes = arrays["x28"], arrays["label"], arrays["writer"], arrays["class_names"].size
    for key in ("label", "alphabet", "writer"):
        if arrays[key].dtype.kind not in "iu" or arrays[key].shape != x.shape[:1]:
            raise InputError(f"{path}: {key} has dtype {arrays[key].dtype} and shape {arrays[key].shape}; expected {len(x)} integers")
    is_test = np.zeros(len(label), dtype=bool)
    for alphabet_writer in np.unique(writer):
        own = np.flatnonzero(writer == alphabet_writer)
        # Seed 0, whatever the experiment's seed: the split is part of the data set.
        is_test[stream(0, "data.omniglot.split", client=int(alphabet_writer)).permutation(own)[: len(own) // 4]] = True
    dataset = dataset_of(
        str(path), (x[~is_test], label[~is_test]), (x[is_test], label[is_test]), classes,
        owners=(writer[~is_test], writer[is_test]), label_kinds=_kinds(str(path), "alphabet", label, arrays["alphabet"], classes),
    )  # fmt: skip
    notes = (
        "omniglot: the small background sets, 28×28; each (alphabet, drawer) counts as a person, and a quarter of a drawer's characters "
        "are held out as its test set; this is not FEMNIST",
    )
    return _official("omniglot", dataset, (1, 28, 28), (len(dataset.y_train), len(dataset.y_test)), notes)


LOADERS: Registry[Callable[[Path], Dataset]] = Registry("data set")
"""Each takes the data directory."""

LOADERS |= {
    "digits": _digits,
    "mnist": _mnist_like("mnist", ("mnist", "MNIST/raw")),
    "fashion_mnist": _mnist_like("fashion_mnist", ("fashion_mnist", "FashionMNIST/raw")),
    "usps": _usps,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "svhn": _svhn,
    "emnist_letters": _emnist_letters,
    "omniglot": _omniglot,
    **REAL_CLIENTS,
}
