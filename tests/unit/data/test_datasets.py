"""Data sets: the real files hold what their publishers say, and what is not a data set is refused by name."""

import bz2
import gzip
import hashlib
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from cflpriv.data import Dataset, channel_statistics, data_directory, load_dataset, load_idx, load_npz
from cflpriv.data.named import LOADERS
from cflpriv.errors import InputError
from cflpriv.types import Array

FOLDER = Path(os.environ.get("CFLPRIV_DATA") or "absent")
needs_files = pytest.mark.skipif(not FOLDER.is_dir(), reason="CFLPRIV_DATA names no folder of real data sets")

MNIST_TRAIN = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
USPS_TRAIN = [1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644]
USPS_TEST = [359, 264, 198, 166, 200, 160, 170, 147, 166, 177]


def counts(y: Array) -> list[int]:
    return [int(n) for n in np.bincount(y, minlength=10)]


def write_idx(path: Path, values: Array) -> Path:
    body = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(body) if path.suffix == ".gz" else body)
    return path


def write_npz(path: Path, **changes: object) -> Path:
    draws = np.random.default_rng(1)
    values: dict[str, object] = {
        "x_train": draws.integers(0, 256, (6, 4, 4), np.uint8),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": draws.integers(0, 256, (3, 4, 4), np.uint8),
        "y_test": np.array([0, 1, 2]),
        **changes,
    }
    np.savez(path, allow_pickle=True, **{key: np.asarray(value) for key, value in values.items() if value is not None})
    return path


def test_digits() -> None:
    dataset = load_dataset("digits")
    again = load_dataset("digits")
    np.testing.assert_array_equal(dataset.x_train, again.x_train)
    assert dataset.shape == (1, 8, 8)
    assert len(dataset.y_train) + len(dataset.y_test) == 1797
    every, test = np.array(counts(dataset.y_train)) + counts(dataset.y_test), np.array(counts(dataset.y_test))
    assert (np.abs(test - 0.2 * every) <= 0.5).all()
    # Values are exact sixteenths; the split is of samples, so train and test together are the bundled set.
    from sklearn.datasets import load_digits

    bundled = load_digits()
    images = np.concatenate([dataset.x_train, dataset.x_test])[:, 0] * 16
    labels = np.concatenate([dataset.y_train, dataset.y_test])
    assert sorted(zip(map(bytes, images.astype(np.uint8)), labels, strict=True)) == sorted(
        zip(map(bytes, bundled.images.astype(np.uint8)), bundled.target, strict=True)
    )


@pytest.mark.slow
@needs_files
@pytest.mark.parametrize(
    ("name", "folder", "md5", "train", "test"),
    [
        ("mnist", "mnist", "6bbc9ace898e44ae57da46a324031adb", MNIST_TRAIN, MNIST_TEST),
        ("fashion_mnist", "fashion_mnist", "f4a8712d7a061bf5bd6d2ca38dc4d50a", [6000] * 10, [1000] * 10),
    ],
)
def test_real_idx(name: str, folder: str, md5: str, train: list[int], test: list[int]) -> None:
    dataset = load_dataset(name, FOLDER)
    assert (counts(dataset.y_train), counts(dataset.y_test), dataset.notes) == (train, test, ())
    assert dataset.shape == (1, 28, 28)
    # The published MD5 is of the idx file; header and pixels rebuilt from what we loaded must give it, so no pixel differs.
    pixels = np.rint(dataset.x_train * 255).astype(np.uint8)
    body = bytes([0, 0, 8, 3]) + struct.pack(">3I", 60_000, 28, 28) + pixels.tobytes()
    assert hashlib.md5(body).hexdigest() == md5
    np.testing.assert_array_equal(dataset.x_train, pixels / np.float32(255))
    assert (dataset.mean, dataset.std) == ((0.1307,), (0.3081,))
    if name == "mnist":
        (mean,), (std,) = channel_statistics([dataset.x_train])
        assert (round(mean, 4), round(std, 4)) == (0.1307, 0.3081)


@needs_files
def test_real_usps() -> None:
    dataset = load_dataset("usps", FOLDER)
    assert (counts(dataset.y_train), counts(dataset.y_test), dataset.notes) == (USPS_TRAIN, USPS_TEST, ())
    assert dataset.shape == (1, 16, 16)
    assert dataset.mean[0] == pytest.approx(float(dataset.x_train.astype(np.float64).mean()))
    assert dataset.std[0] == pytest.approx(float(dataset.x_train.astype(np.float64).std()))


@pytest.mark.slow
@needs_files
def test_real_cifar10_subset_says_that_it_is_one() -> None:
    dataset = load_dataset("cifar10", FOLDER)
    assert dataset.shape == (3, 32, 32)
    assert (counts(dataset.y_train), counts(dataset.y_test)) == ([2000] * 10, [500] * 10)
    assert any("20000 training and 5000 test" in note for note in dataset.notes)
    with np.load(FOLDER / "cifar10" / "cifar10_subset.npz") as file:
        np.testing.assert_array_equal(dataset.x_test[:50], np.moveaxis(file["x_test"][:50], -1, 1) / np.float32(255))


@pytest.mark.parametrize("name", [name for name in LOADERS if name != "digits"])
def test_missing_files_say_where_was_searched_and_how_to_set_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_dataset(name, tmp_path)
    for words in (name, str(tmp_path), "--data-dir", "CFLPRIV_DATA"):
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_data_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CFLPRIV_DATA", "from/environment")
    assert data_directory("given") == Path("given")
    assert data_directory() == Path("from/environment")
    monkeypatch.delenv("CFLPRIV_DATA")
    assert data_directory() == Path("data")


def test_unknown_name() -> None:
    with pytest.raises(InputError, match="'imagenet'"):
        load_dataset("imagenet")


@pytest.mark.parametrize(("folder", "end"), [("mnist", "-ubyte.gz"), ("MNIST/raw", "-ubyte"), ("mnist", "dotted")])
def test_mnist_layouts(tmp_path: Path, folder: str, end: str) -> None:
    draws = np.random.default_rng(2)
    for part, count in (("train", 12), ("t10k", 5)):
        for kind, values in (
            ("images", draws.integers(0, 256, (count, 28, 28), np.uint8)),
            ("labels", draws.integers(0, 10, count, np.uint8)),
        ):
            name = f"{part}-{kind}.idx{values.ndim}-ubyte" if end == "dotted" else f"{part}-{kind}-idx{values.ndim}{end}"
            write_idx(tmp_path / folder / name, values)
    dataset = load_dataset("mnist", tmp_path)
    assert len(dataset.y_train) == 12
    assert "12 training and 5 test" in dataset.notes[0]


def test_mnist_of_another_shape_or_label_is_not_mnist(tmp_path: Path) -> None:
    for part in ("train", "t10k"):
        write_idx(tmp_path / "mnist" / f"{part}-images-idx3-ubyte", np.zeros((2, 8, 8), np.uint8))
        write_idx(tmp_path / "mnist" / f"{part}-labels-idx1-ubyte", np.zeros(2, np.uint8))
    with pytest.raises(InputError, match=r"\(1, 8, 8\)"):
        load_dataset("mnist", tmp_path)
    write_idx(tmp_path / "mnist" / "train-labels-idx1-ubyte", np.array([3, 10], np.uint8))
    with pytest.raises(InputError, match=r"index 1 is 10, not in 0\.\.9"):
        load_dataset("mnist", tmp_path)


def test_usps_libsvm(tmp_path: Path) -> None:
    draws = np.random.default_rng(3)
    stored = {}
    for name, count in (("usps.bz2", 11), ("usps.t.bz2", 4)):
        grey, digit = np.round(draws.uniform(-1, 1, (count, 256)), 3), np.arange(count) % 10
        stored[name] = grey, digit
        rows = [f"{d + 1} " + " ".join(f"{i + 1}:{v}" for i, v in enumerate(row)) for d, row in zip(digit, grey, strict=True)]
        (tmp_path / name).write_bytes(bz2.compress("\n".join(rows).encode()))
    dataset = load_dataset("usps", tmp_path)
    grey, digit = stored["usps.t.bz2"]
    np.testing.assert_array_equal(dataset.y_test, digit)
    np.testing.assert_allclose(dataset.x_test.reshape(4, 256), (grey + 1) / 2, atol=1e-6)
    assert "11 training and 4 test" in dataset.notes[0]
    (tmp_path / "usps.t.bz2").write_bytes(bz2.compress(b"1 1:1.5\n"))
    with pytest.raises(InputError, match=r"usps\.t\.bz2.*-1\.\.1"):
        load_dataset("usps", tmp_path)
    (tmp_path / "usps.t.bz2").unlink()
    with pytest.raises(InputError, match=r"no usps\.t\.bz2"):
        load_dataset("usps", tmp_path)


def test_cifar10_binary_batches_win_and_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(InputError, match="pickled and is not read"):
        load_dataset("cifar10", tmp_path)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    draws = np.random.default_rng(4)
    records = {}
    for name in (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch"):
        records[name] = draws.integers(0, 256, (2, 3073), np.uint8)
        records[name][:, 0] %= 10
        (folder / f"{name}.bin").write_bytes(records[name].tobytes())
    dataset = load_dataset("cifar10", tmp_path)
    np.testing.assert_array_equal(dataset.y_train[4:6], records["data_batch_3"][:, 0])
    np.testing.assert_array_equal(dataset.x_test.reshape(2, 3072), records["test_batch"][:, 1:] / np.float32(255))
    (folder / "data_batch_4.bin").unlink()
    with pytest.raises(InputError, match=r"no data_batch_4\.bin"):
        load_dataset("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((6, 5), (1, 1, 5)), ((6, 4, 5), (1, 4, 5)), ((6, 3, 4, 5), (3, 4, 5)), ((6, 4, 5, 3), (3, 4, 5)), ((6, 3, 4, 3), (3, 4, 3))],
)
def test_npz_forms(tmp_path: Path, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    x = np.random.default_rng(5).integers(0, 256, shape, np.uint8)
    for values, scale in ((x, 255), ((x / 256).astype(np.float64), 1), (x > 100, 1)):
        dataset = load_npz(write_npz(tmp_path / "a.npz", x_train=values, x_test=values[:3]))
        assert dataset.shape == expected
        assert dataset.x_train.dtype == np.float32
        assert dataset.classes == 3
        channels_first = np.moveaxis(values, -1, 1) if shape == (6, 4, 5, 3) else values
        np.testing.assert_allclose(dataset.x_train.ravel(), channels_first.ravel() / scale, rtol=1e-6)


def test_npz_owners_and_class_names(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", client_train=[5, 5, 2, 2, 9, 9], client_test=[2, 2, 5], class_names=["a", "b", "c", "d"])
    dataset = load_npz(path)
    assert dataset.classes == 4
    assert dataset.owners_train is not None
    assert dataset.owners_test is not None
    assert dataset.owners_train.tolist() == [5, 5, 2, 2, 9, 9]
    assert dataset.owners_test.tolist() == [2, 2, 5]


SQUARES = np.zeros((6, 4, 4), np.float32)
WITH_NAN = SQUARES.copy()
WITH_NAN[2, 1, 3] = np.nan
HUGE = np.where(np.arange(96).reshape(6, 4, 4) == 17, 1e300, 0.5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x_train": WITH_NAN}, "x_train: pixel at index (2, 0, 1, 3) is nan"),
        ({"x_train": HUGE}, "x_train: pixel at index (1, 0, 0, 1) is 1e+300"),
        ({"x_test": SQUARES[:3] - 0.5}, "x_test: pixel at index (0, 0, 0, 0) is -0.5"),
        ({"x_train": SQUARES.astype(np.int64)}, "dtype int64"),
        ({"x_train": SQUARES[:5]}, "5 samples but y_train has 6"),
        ({"x_train": SQUARES[:0], "y_train": np.zeros(0, int)}, "at least one sample"),
        ({"x_test": SQUARES[:0], "y_test": np.zeros(0, int)}, "at least one sample"),
        ({"x_test": SQUARES[:3, :3]}, "test samples (1, 3, 4)"),
        ({"x_train": np.zeros(6)}, "got shape (6,)"),
        ({"y_train": np.zeros(6)}, "expected one axis of integers"),
        ({"y_train": np.zeros((6, 1), int)}, "expected one axis of integers"),
        ({"y_train": [0, 1, -1, 0, 0, 0]}, "index 2 is -1"),
        ({"y_train": np.array([0, 1, 2**63, 0, 0, 0], np.uint64)}, "too large"),
        ({"y_test": None}, "no array 'y_test'"),
        ({"class_names": ["a", "b"]}, "index 2 is 2, not in 0..1"),
        ({"client_train": [0, 0, 1]}, "client_train"),
        ({"client_train": [0, 0, 1, 1, -1, 0]}, "client_train"),
        ({"client_train": [0, 0, 1, 1, 1, 0], "client_test": [0.5, 0.5, 0.5]}, "integers"),
        ({"client_test": [0, 0, 1]}, "client_test but no client_train"),
        ({"x_train": np.array([{}] * 6, dtype=object)}, "'x_train'"),
        ({"x_train": np.array(["a"] * 6)[:, None]}, "dtype <U1"),
    ],
)
def test_bad_npz(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    path = write_npz(tmp_path / "a.npz", **changes)
    with pytest.raises(InputError) as caught:
        load_npz(path)
    assert words in str(caught.value)
    assert "a.npz" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_own_idx_files(tmp_path: Path) -> None:
    draws = np.random.default_rng(6)
    x, y = draws.integers(0, 256, (9, 5, 7), np.uint8), np.arange(9, dtype=np.uint8) % 4
    paths = [write_idx(tmp_path / name, values) for name, values in (("a.gz", x), ("b", y), ("c", x[:4]), ("d.gz", y[:4]))]
    dataset = load_idx(*paths)
    assert (dataset.shape, dataset.classes) == ((1, 5, 7), 4)
    np.testing.assert_array_equal(dataset.x_train[:, 0], x / np.float32(255))
    with pytest.raises(InputError, match="9 samples but y_train has 4"):
        load_idx(paths[0], paths[3], paths[2], paths[3])
    with pytest.raises(InputError, match="magic"):
        load_idx(paths[1], paths[0], paths[2], paths[3])


def test_channel_statistics_against_numpy() -> None:
    x = np.random.default_rng(7).random((50, 3, 4, 5)).astype(np.float32)
    x[:, 1] = 0.7
    mean, std = channel_statistics([x[:20], x[20:]])
    np.testing.assert_allclose(mean, x.astype(np.float64).mean(axis=(0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose([std[0], std[2]], x.astype(np.float64).std(axis=(0, 2, 3))[[0, 2]], rtol=1e-5)
    assert std[1] == 1.0


def test_dataset_refuses_what_is_not_normalisable() -> None:
    x, y = np.zeros((2, 3, 4, 4), np.float32), np.zeros(2, np.int64)
    with pytest.raises(InputError, match="need 3 values"):
        Dataset("mine", x, y, x, y, 1, (0.0,), (1.0,))
    with pytest.raises(InputError, match="float64"):
        Dataset("mine", x.astype(np.float64), y, x, y, 1, (0.0,) * 3, (1.0,) * 3)
