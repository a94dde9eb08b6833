"""Data sets that are not here, in files the tests write in the true format; and those that are, with what their publishers say of them."""

import gzip
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io

from cflpriv.data import DataSpec, build_population, load_dataset
from cflpriv.data.formats import read_leaf, read_svhn
from cflpriv.errors import InputError
from cflpriv.types import Array

FOLDER = Path(os.environ.get("CFLPRIV_DATA") or "absent")
needs_files = pytest.mark.skipif(not FOLDER.is_dir(), reason="CFLPRIV_DATA names no folder of real data sets")

Tree = dict[str, Any]


def one_line(caught: pytest.ExceptionInfo[InputError], *words: str) -> None:
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


# --- SVHN


def write_svhn(folder: Path, part: str, count: int, compressed: bool = True, **changes: Any) -> tuple[Array, Array]:
    draws = np.random.default_rng(count)
    x, y = draws.integers(0, 256, (32, 32, 3, count), np.uint8), (np.arange(count, dtype=np.uint8) % 10 + 1)[:, None]
    folder.mkdir(exist_ok=True)
    arrays = {"X": x, "y": y, **changes}
    scipy.io.savemat(folder / f"{part}_32x32.mat", {k: v for k, v in arrays.items() if v is not None}, do_compression=compressed)
    return x, y[:, 0]


@pytest.mark.parametrize("compressed", [True, False])
def test_svhn(tmp_path: Path, compressed: bool) -> None:
    x, y = write_svhn(tmp_path / "svhn", "train", 23, compressed)
    write_svhn(tmp_path / "svhn", "test", 11, compressed)
    dataset = load_dataset("svhn", tmp_path)
    assert (dataset.shape, dataset.classes, len(dataset.y_test)) == ((3, 32, 32), 10, 11)
    assert dataset.y_train.tolist() == [0 if label == 10 else int(label) for label in y]
    for i, (row, column, channel) in ((0, (0, 31, 2)), (22, (17, 3, 1))):
        assert dataset.x_train[i, channel, row, column] == np.float32(x[row, column, channel, i]) / np.float32(255)
    assert "23 training and 11 test" in dataset.notes[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"X": None}, "has no array 'X'; it holds y"),
        ({"X": np.zeros((3, 32, 32, 5), np.uint8)}, "X is uint8 of shape (3, 32, 32, 5)"),
        ({"X": np.zeros((32, 32, 3, 5))}, "X is double"),
        ({"y": np.ones((4, 1), np.uint8)}, "y has shape (4, 1), expected (5, 1)"),
        ({"y": np.full((5, 1), 11, np.uint8)}, "y at index 0 is 11, not in 1..10"),
        ({"y": np.array([[1], [2], [0], [1], [1]], np.uint8)}, "y at index 2 is 0"),
        ({"y": np.full((5, 1), 1.5)}, "y at index 0 is 1.5"),
    ],
)
def test_bad_svhn(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    write_svhn(tmp_path / "svhn", "train", 5, **changes)
    with pytest.raises(InputError) as caught:
        read_svhn(tmp_path / "svhn" / "train_32x32.mat")
    one_line(caught, "train_32x32.mat", words)


def test_damaged_svhn_is_one_line_wherever_it_is_damaged(tmp_path: Path) -> None:
    write_svhn(tmp_path, "train", 3)
    path = tmp_path / "train_32x32.mat"
    whole = path.read_bytes()
    for end in range(0, len(whole), 97):
        path.write_bytes(whole[:end])
        with pytest.raises(InputError) as caught:
            read_svhn(path)
        one_line(caught, "train_32x32.mat")
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(600))  # what newer MATLAB writes
    with pytest.raises(InputError):
        read_svhn(path)
    with pytest.raises(InputError, match=r"absent\.mat: no such file"):
        read_svhn(tmp_path / "absent.mat")


# --- CIFAR-100


def write_cifar100(folder: Path, fine: Array, coarse: Array, part: str = "train") -> Array:
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(len(fine)).integers(0, 256, (len(fine), 3072), np.uint8)
    records = np.concatenate([coarse[:, None], fine[:, None], pixels], axis=1).astype(np.uint8)
    (folder / f"{part}.bin").write_bytes(records.tobytes())
    return pixels


@pytest.mark.slow
def test_cifar100_and_its_superclasses(tmp_path: Path) -> None:
    (tmp_path / "cifar-100-python").mkdir()
    with pytest.raises(InputError, match="pickled and is not read"):
        load_dataset("cifar100", tmp_path)
    fine = np.arange(1000) % 100  # ten of each, so that each of up to ten owners gets one
    pixels = write_cifar100(tmp_path / "cifar-100-binary", fine, fine % 20)
    write_cifar100(tmp_path / "cifar-100-binary", fine[:100], fine[:100] % 20, "test")
    dataset = load_dataset("cifar100", tmp_path)
    np.testing.assert_array_equal(dataset.x_train.reshape(1000, 3072), pixels / np.float32(255))
    assert dataset.y_train.tolist() == fine.tolist()
    assert dataset.label_kinds == tuple(label % 20 for label in range(100))
    # pFedLIA: four superclasses a group, five foreign labels with probability one half
    groups = tuple(tuple(range(4 * g, 4 * g + 4)) for g in range(5))
    spec = DataSpec("cifar100", partition="kinds", clients=10, groups=groups, noise=0.5, noise_labels=5)
    population = build_population(spec, tmp_path)
    foreign = []
    for client, group in zip(population.clients, population.groups, strict=True):
        held = {int(label) for label in client.y_train}
        foreign.append(len([label for label in held if label % 20 // 4 != group]))
        assert {label for label in range(100) if label % 20 // 4 == group and label in held}
    assert set(foreign) == {0, 5}
    one_each = build_population(DataSpec("cifar100", partition="kinds", clients=20), tmp_path)
    for client, group in zip(one_each.clients, one_each.groups, strict=True):
        assert set(client.y_train % 20) == {group}
    with pytest.raises(InputError, match=r"\[data\] groups = \[\[0, 20\]\]: 20 is not a kind of cifar100"):
        build_population(DataSpec("cifar100", partition="kinds", groups=((0, 20),)), tmp_path)


@pytest.mark.parametrize(
    ("fine", "coarse", "words"),
    [
        ([5, 100], [1, 1], "record 1 has fine label 100, not in 0..99"),
        ([5, 6], [1, 20], "record 1 has coarse label 20, not in 0..19"),
        ([5, 5], [1, 2], "label 5 has the coarse values [1, 2]"),
    ],
)
def test_bad_cifar100(tmp_path: Path, fine: list[int], coarse: list[int], words: str) -> None:
    for part in ("train", "test"):
        write_cifar100(tmp_path / "cifar100" / "cifar-100-binary", np.array(fine), np.array(coarse), part)
    with pytest.raises(InputError) as caught:
        load_dataset("cifar100", tmp_path)
    one_line(caught, "train.bin", words)
    (tmp_path / "cifar100" / "cifar-100-binary" / "train.bin").write_bytes(bytes(3073))  # a record of CIFAR-10
    with pytest.raises(InputError, match="3073 bytes are not a whole number of records of 3074"):
        load_dataset("cifar100", tmp_path)


def test_cifar100_from_npz(tmp_path: Path) -> None:
    (tmp_path / "cifar100").mkdir()
    x, y = np.zeros((200, 32, 32, 3), np.uint8), np.arange(200) % 100
    arrays = {"x_train": x, "y_train": y, "x_test": x[:100], "y_test": y[:100]}
    np.savez(tmp_path / "cifar100" / "cifar100.npz", **arrays)  # type: ignore[arg-type]
    assert load_dataset("cifar100", tmp_path).label_kinds == ()
    with pytest.raises(InputError, match="partition = 'kinds': cifar100 has no kinds"):
        build_population(DataSpec("cifar100", partition="kinds"), tmp_path)
    np.savez(tmp_path / "cifar100" / "cifar100.npz", **arrays, coarse_train=y // 5)  # type: ignore[arg-type]
    assert load_dataset("cifar100", tmp_path).label_kinds == tuple(label // 5 for label in range(100))
    np.savez(tmp_path / "cifar100" / "cifar100.npz", **arrays, coarse_train=y[:7])  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"coarse has dtype int64 and shape \(7,\)"):
        load_dataset("cifar100", tmp_path)


# --- EMNIST letters


def write_letters(folder: Path, labels: Array) -> Array:
    folder.mkdir(parents=True, exist_ok=True)
    x = np.random.default_rng(3).integers(0, 256, (len(labels), 28, 28), np.uint8)
    for part in ("train", "test"):
        for kind, values in (("images-idx3", x), ("labels-idx1", labels.astype(np.uint8))):
            body = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()
            (folder / f"emnist-letters-{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(body))
    return x


def test_official_emnist_letters_are_turned_upright(tmp_path: Path) -> None:
    x = write_letters(tmp_path / "EMNIST" / "raw", np.arange(26) + 1)
    dataset = load_dataset("emnist_letters", tmp_path)
    np.testing.assert_array_equal(dataset.x_train[:, 0], x.transpose(0, 2, 1) / np.float32(255))
    assert dataset.y_train.tolist() == list(range(26))
    for label in (0, 27):
        write_letters(tmp_path / "EMNIST" / "raw", np.array([3, label]))
        with pytest.raises(InputError, match=f"labels-idx1.*holds label {label}, not in 1..26"):
            load_dataset("emnist_letters", tmp_path)


@pytest.mark.slow
@needs_files
def test_real_emnist_letters() -> None:
    dataset = load_dataset("emnist_letters", FOLDER)
    assert (dataset.shape, dataset.classes) == ((1, 28, 28), 26)
    assert (np.bincount(dataset.y_train) == 1000).all()
    assert any("26000 training and 5200 test" in note for note in dataset.notes)
    # Upright: an I is tall, and a T has its bar on top, not at the left.
    mean = {letter: dataset.x_train[dataset.y_train == ord(letter) - ord("A"), 0].mean(axis=0) for letter in "T"}
    assert mean["T"][:10].sum() > mean["T"][-10:].sum()
    assert abs(mean["T"][:, :14].sum() / mean["T"].sum() - 0.5) < 0.1


# --- Omniglot


@needs_files
def test_real_omniglot() -> None:
    dataset = load_dataset("omniglot", FOLDER)
    assert (dataset.shape, dataset.classes, len(dataset.y_train) + len(dataset.y_test)) == ((1, 28, 28), 242, 4840)
    assert any("not FEMNIST" in note for note in dataset.notes)
    assert len(set(dataset.label_kinds)) == 8
    drawers = build_population(DataSpec("omniglot", partition="given", clients=0), FOLDER)
    assert len(drawers.clients) == 160
    assert sorted(drawers.groups) == sorted([*range(8)] * 20)
    for client, group in zip(drawers.clients, drawers.groups, strict=True):
        labels = [*client.y_train.tolist(), *client.y_test.tolist()]
        assert len(set(labels)) == len(labels)  # each character once
        assert {dataset.label_kinds[label] for label in labels} == {group}
        assert len(client.y_test) == len(labels) // 4
    alphabets = build_population(DataSpec("omniglot", partition="kinds", clients=16), FOLDER)
    for client, group in zip(alphabets.clients, alphabets.groups, strict=True):
        assert {dataset.label_kinds[label] for label in client.y_train} == {group}


def write_omniglot(folder: Path, **changes: Any) -> None:
    folder.mkdir()
    arrays = {
        "x28": np.zeros((8, 28, 28), np.uint8), "label": np.arange(8) % 4, "alphabet": np.arange(8) % 4 // 2,
        "writer": np.arange(8) // 4 + 2 * (np.arange(8) % 4 // 2), "class_names": np.array(list("abcd")), **changes,
    }  # fmt: skip
    np.savez(folder / "omniglot_small.npz", **arrays)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"writer": np.zeros(7, int)}, "writer has dtype int64 and shape (7,); expected 8 integers"),
        ({"alphabet": np.zeros(8)}, "alphabet has dtype float64"),
        ({"alphabet": np.arange(8) % 3}, "label 0 has the alphabet values [0, 1]"),
        ({"label": np.arange(8)}, "is 4, not in 0..3"),
    ],
)
def test_bad_omniglot(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    write_omniglot(tmp_path / "omniglot", **({"writer": np.repeat(0, 8)} | changes))
    with pytest.raises(InputError) as caught:
        load_dataset("omniglot", tmp_path)
    one_line(caught, "omniglot_small.npz", words)


# --- FEMNIST as LEAF writes it


def leaf(users: dict[str, int], seed: int = 0) -> Tree:
    """A file of LEAF's with `users` and the number of samples of each."""
    draws = np.random.default_rng(seed)
    data = {name: {"x": draws.random((n, 784)).round(4).tolist(), "y": draws.integers(0, 62, n).tolist()} for name, n in users.items()}
    return {"users": list(users), "num_samples": list(users.values()), "user_data": data}


def write_leaf(folder: Path, files: dict[str, Tree]) -> None:
    for name, tree in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(tree), encoding="utf-8")


def test_femnist_of_leaf_with_its_writers(tmp_path: Path) -> None:
    files = {
        "train/all_data_0_niid.json": leaf({"f0001_41": 4, "f0000_14": 6}),
        "train/all_data_1_niid.json": leaf({"f0002_00": 3}, 1),
        "test/all_data_0_niid.json": leaf({"f0000_14": 2, "f0002_00": 1}, 2),
    }
    write_leaf(tmp_path / "femnist", files)
    population = build_population(DataSpec("femnist", partition="given", clients=0), tmp_path)
    assert (population.shape, population.classes) == ((1, 28, 28), 62)
    assert [client.samples for client in population.clients] == [6, 4, 3]  # in the order of their names
    assert [len(client.y_test) for client in population.clients] == [2, 0, 1]
    own = files["train/all_data_0_niid.json"]["user_data"]["f0001_41"]
    np.testing.assert_array_equal(population.clients[1].x_train.reshape(4, 784), np.array(own["x"], np.float32))
    assert population.clients[1].y_train.tolist() == own["y"]
    assert any("3 writers" in note for note in population.notes)
    assert not population.groups_known


def test_femnist_folders_must_fit_together(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_dataset("femnist", tmp_path)
    one_line(caught, str(tmp_path / "femnist"), "train", "test", "json", "--data-dir")
    for part in ("train", "test"):
        (tmp_path / "femnist" / part).mkdir(parents=True)
    with pytest.raises(InputError, match=r"no \*\.json in .*train"):
        load_dataset("femnist", tmp_path)
    write_leaf(tmp_path / "femnist", {"train/a.json": leaf({"u": 2}), "test/a.json": leaf({"v": 2})})
    with pytest.raises(InputError, match=r"a\.json: user 'v' has no training samples; .* -t sample"):
        load_dataset("femnist", tmp_path)
    write_leaf(tmp_path / "femnist", {"train/b.json": leaf({"u": 2})})
    with pytest.raises(InputError, match=r"b\.json: user 'u' is in an earlier file too"):
        load_dataset("femnist", tmp_path)


def spoil(where: Callable[[Tree], Any], key: Any, value: Any) -> Callable[[Tree], None]:
    def change(tree: Tree) -> None:
        where(tree)[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (spoil(lambda t: t, "users", "u"), "expected an object with a list 'users'"),
        (spoil(lambda t: t, "user_data", []), "an object 'user_data'"),
        (spoil(lambda t: t, "num_samples", [2]), "num_samples has not one number for each of the 2 users"),
        (spoil(lambda t: t["num_samples"], 1, 9), "num_samples[1] = 9, but user 'w' has 3 samples"),
        (spoil(lambda t: t["users"], 1, "x"), "users[1] = 'x': expected a name, once, that user_data has"),
        (spoil(lambda t: t["users"], 1, "u"), "users[1] = 'u': expected a name, once"),
        (spoil(lambda t: t["users"], 1, {}), "users[1] = {}"),
        (spoil(lambda t: t["user_data"], "w", [1]), "user_data['w']: expected an object with lists 'x' and 'y'"),
        (spoil(lambda t: t["user_data"]["w"], "y", [1]), "user_data['w']: has 3 samples in x but 1 labels in y"),
        (spoil(lambda t: t["user_data"]["w"]["x"], 2, [0.5]), "user_data['w']: x[2] is not a list of 784 numbers"),
        (spoil(lambda t: t["user_data"]["w"]["x"][1], 7, 1.5), "user_data['w']: x[1][7] = 1.5: expected numbers in 0..1"),
        (spoil(lambda t: t["user_data"]["w"]["x"][1], 7, float("nan")), "user_data['w']: x[1][7] = nan"),
        (spoil(lambda t: t["user_data"]["w"]["x"][1], 7, "0.5"), "user_data['w']: x[1][7] = '0.5'"),
        (spoil(lambda t: t["user_data"]["w"]["y"], 0, 62), "user_data['w']: y[0] = 62, not in 0..61"),
        (spoil(lambda t: t["user_data"]["w"]["y"], 0, True), "user_data['w']: y[0] = True"),
        (spoil(lambda t: t["user_data"]["w"]["y"], 0, 1.0), "user_data['w']: y[0] = 1.0"),
    ],
)
def test_bad_leaf(tmp_path: Path, change: Callable[[Tree], None], words: str) -> None:
    tree = leaf({"u": 2, "w": 3})
    change(tree)
    write_leaf(tmp_path, {"a.json": tree})
    with pytest.raises(InputError) as caught:
        read_leaf(tmp_path / "a.json", 784, 62)
    one_line(caught, "a.json", words)


@pytest.mark.parametrize("body", [b"", b"[", b"[1]", b'{"users": []', b"\xff\xfe", b"[" * 100_000, b"1e999"])
def test_what_is_not_leaf_json(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "a.json").write_bytes(body)
    with pytest.raises(InputError) as caught:
        read_leaf(tmp_path / "a.json", 784, 62)
    one_line(caught, "a.json")
