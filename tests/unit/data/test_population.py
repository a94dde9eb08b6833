"""From a specification to a population: the right clients, groups and pixels, the same every time, and one clear line for every mistake."""

import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cflpriv.data import DATASETS, PARTITIONS, Dataset, DataSpec, build_population, conform, label_permutations, load_dataset
from cflpriv.data.named import LOADERS
from cflpriv.data.partition import iid
from cflpriv.data.raw_tables import TABLES
from cflpriv.data.text import TEXTS
from cflpriv.errors import InputError
from cflpriv.types import Array, Population

FOLDER = Path(os.environ.get("CFLPRIV_DATA") or "absent")
needs_files = pytest.mark.skipif(not FOLDER.is_dir(), reason="CFLPRIV_DATA names no folder of real data sets")


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset("digits")


def fingerprint(population: Population) -> tuple[object, ...]:
    arrays = [(c.id, *(a.tobytes() for a in (c.x_train, c.y_train, c.x_test, c.y_test))) for c in population.clients]
    return (population.name, population.groups, population.notes, *arrays)


def rows(x: Array) -> list[bytes]:
    return [row.tobytes() for row in x]


SPECS = {
    "iid": DataSpec(),
    "capped": DataSpec(samples_per_client=30, test_samples_per_client=20),
    "label_skew": DataSpec(partition="label_skew"),
    "dirichlet": DataSpec(partition="dirichlet"),
    "pathological": DataSpec(partition="pathological"),
    "rotated": DataSpec(rotations=(0, 90, 180, 270), test_samples_per_client=50),
    "shifted": DataSpec(label_shifts=(0, 3, 6, 9), test_samples_per_client=50),
    "swapped": DataSpec(label_swaps=((0, 0), (0, 1), (2, 3))),
    "permuted": DataSpec(label_permutations=4, test_samples_per_client=50),
    "noisy": DataSpec(partition="pathological", noise=0.5),
    "repeated": DataSpec(rotations=(0, 180), repeat_per_group=True),
    "rotated and pathological": DataSpec(partition="pathological", rotations=(0, 180)),
}


@pytest.mark.parametrize("name", SPECS)
def test_same_seed_same_population(name: str) -> None:
    spec = SPECS[name]
    first = fingerprint(build_population(spec))
    build_population(SPECS["shifted"])  # a different order of calls has no influence
    assert first == fingerprint(build_population(spec))
    assert first != fingerprint(build_population(replace(spec, seed=1)))


@pytest.mark.parametrize("name", SPECS)
def test_samples_are_real_and_owned_once(name: str, digits: Dataset) -> None:
    """Undoing each client's shift gives back samples of the data set, disjoint between clients (within a group where they repeat)."""
    spec, population = SPECS[name], build_population(SPECS[name])
    shifts = max(len(spec.rotations), len(spec.label_shifts), len(spec.label_swaps), spec.label_permutations, 1)
    permutations = label_permutations(0, spec.label_permutations, 10)
    known = {row: index for index, row in enumerate(rows(digits.x_train))}
    assert len(known) > 1430  # a handful of the bundled digits may repeat
    owned: list[list[int]] = []
    for client, group in zip(population.clients, population.groups, strict=True):
        kind = group % shifts
        turned = np.rot90(client.x_train, -(spec.rotations[kind] // 90) if spec.rotations else 0, axes=(2, 3))
        indices = [known[row] for row in rows(np.ascontiguousarray(turned))]
        labels = digits.y_train[indices]
        if spec.label_shifts:
            labels = (labels + spec.label_shifts[kind]) % 10
        if permutations:
            labels = np.array(permutations[kind])[labels]
        if spec.label_swaps:
            a, b = spec.label_swaps[kind]
            labels = np.array([{a: b, b: a}.get(int(label), int(label)) for label in labels])
        np.testing.assert_array_equal(client.y_train, labels)
        owned.append(indices)
    decks = shifts if spec.repeat_per_group else 1
    for deck in range(decks):
        together = [index for indices in owned[deck::decks] for index in indices]
        assert len(set(together)) == len(together)
    expected = {"capped": 30 * 20, "repeated": 2 * 1438}.get(name, None if name == "label_skew" else 1438)
    assert expected in (None, sum(map(len, owned)))


def test_groups_of_shifts() -> None:
    assert build_population(SPECS["iid"]).groups == (0,) * 20
    assert build_population(SPECS["rotated"]).groups == (0, 1, 2, 3) * 5
    # Two groups of labels, each in two rotations: all four combinations, whatever divides what.
    four = build_population(DataSpec(partition="pathological", clients=8, groups=((0, 1), (2, 3)), rotations=(0, 180)))
    assert sorted(four.groups) == [0, 0, 1, 1, 2, 2, 3, 3]
    population = build_population(SPECS["rotated and pathological"])
    assert sorted(population.groups) == sorted([*range(10)] * 2)
    for client, group in zip(population.clients, population.groups, strict=True):
        assert set(client.y_train) == {group // 2 * 2, group // 2 * 2 + 1}  # default groups: consecutive pairs


def test_test_sets_get_the_same_shift(digits: Dataset) -> None:
    rotated = build_population(DataSpec(clients=4, rotations=(0, 270)))
    np.testing.assert_array_equal(rotated.clients[1].x_test, np.rot90(digits.x_test, 3, axes=(2, 3)))
    shifted = build_population(DataSpec(clients=4, label_shifts=(0, 4)))
    np.testing.assert_array_equal(shifted.clients[3].y_test, (digits.y_test + 4) % 10)


def test_equal_test_sets_are_one_array() -> None:
    clients = build_population(DataSpec(rotations=(0, 90))).clients
    assert clients[0].x_test is clients[2].x_test
    assert clients[0].x_test is not clients[1].x_test


def test_given_from_npz(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    path = tmp_path / "mine.npz"
    owners = np.array([7, 7, 3, 3, 3, 11])
    x = draws.integers(0, 256, (6, 5, 4), np.uint8)
    np.savez(path, x_train=x, y_train=owners % 3, x_test=x[:3], y_test=owners[:3] % 3, client_train=owners, client_test=owners[:3])
    population = build_population(DataSpec(source="npz", paths=(str(path),), partition="given", clients=0))
    assert [client.id for client in population.clients] == [3, 7, 11]
    assert [client.samples for client in population.clients] == [3, 2, 1]
    assert [len(client.y_test) for client in population.clients] == [1, 2, 0]
    assert not population.groups_known
    # A relative path is looked for where the command runs, then in the data directory.
    again = build_population(DataSpec(source="npz", paths=("mine.npz",), partition="given", clients=0), tmp_path)
    assert population.groups == again.groups
    with pytest.raises(InputError, match=r"mine\.npz.*data directory"):
        build_population(DataSpec(source="npz", paths=("mine.npz",), partition="given", clients=0), tmp_path / "elsewhere")
    with pytest.raises(InputError, match="clients = 20: the file has 3"):
        build_population(DataSpec(source="npz", paths=(str(path),), partition="given", clients=20))
    everyone = build_population(DataSpec(source="npz", paths=(str(path),), partition="given"))
    assert [client.id for client in everyone.clients] == [3, 7, 11], "without a number of clients all take part"
    with pytest.raises(InputError, match="90 would change the shape"):
        build_population(DataSpec(source="npz", paths=(str(path),), clients=2, rotations=(0, 90)))
    np.savez(path, x_train=x, y_train=owners % 3, x_test=x[:3], y_test=owners[:3] % 3)
    with pytest.raises(InputError, match="has no array client_train"):
        build_population(DataSpec(source="npz", paths=(str(path),), partition="given", clients=0))


def write_usps(folder: Path) -> Array:
    """A stand-in in USPS's form (its own note says that it is not the official number of images)."""
    x = np.random.default_rng(1).integers(0, 256, (40, 16, 16), np.uint8)
    folder.mkdir()
    np.savez(folder / "usps.npz", x_train=x, y_train=np.arange(40) % 10, x_test=x[:20], y_test=np.arange(20) % 10)
    return x


def test_mixture_is_padded_exactly(tmp_path: Path, digits: Dataset) -> None:
    usps = write_usps(tmp_path / "usps")
    spec = DataSpec(source="mixture", clients=0, sources=(("digits", 3), ("usps", 2)), samples_per_client=25)
    population = build_population(spec, tmp_path)
    assert (population.shape, population.classes, population.groups) == ((1, 16, 16), 20, (0, 0, 0, 1, 1))
    assert [client.id for client in population.clients] == [0, 1, 2, 3, 4]
    assert [client.samples for client in population.clients] == [25, 25, 25, 20, 20]
    assert any("usps has too few images for 2 clients of 25: each gets 20" in note for note in population.notes)
    padded = {row: int(label) for row, label in zip(rows(conform(digits.x_train, (1, 16, 16))), digits.y_train, strict=True)}
    for client in population.clients[:3]:
        assert [padded[row] for row in rows(client.x_train)] == client.y_train.tolist()
        assert not client.x_train[:, :, [0, 1, 2, 3, 12, 13, 14, 15]].any()
        assert client.y_test.max() < 10
    plain = {row: index % 10 + 10 for index, row in enumerate(rows((usps / np.float32(255))[:, None]))}
    for client in population.clients[3:]:
        assert [plain[row] for row in rows(client.x_train)] == client.y_train.tolist()
        assert client.y_test.min() >= 10
    pooled = np.concatenate([client.x_train for client in population.clients]).astype(np.float64)
    np.testing.assert_allclose((population.mean[0], population.std[0]), (pooled.mean(), pooled.std()), rtol=1e-5)


def test_a_hybrid_shares_its_labels(tmp_path: Path) -> None:
    """StoCFL's hybrid: the pixels of PACFL's mixture, the labels of each data set as they are."""
    write_usps(tmp_path / "usps")
    spec = DataSpec(source="mixture", clients=0, sources=(("digits", 3), ("usps", 2)), samples_per_client=15)
    apart, hybrid = (build_population(replace(spec, shared_labels=shared), tmp_path) for shared in (False, True))
    assert (apart.classes, hybrid.classes) == (20, 10)
    assert hybrid.groups == apart.groups
    for one, other in zip(apart.clients, hybrid.clients, strict=True):
        np.testing.assert_array_equal(one.x_train, other.x_train)
        np.testing.assert_array_equal(one.y_train % 10, other.y_train)
        np.testing.assert_array_equal(one.y_test % 10, other.y_test)


MIX = DataSpec(source="mixture", clients=0, sources=(("digits", 2),))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (DataSpec(source="mnits"), "[data] source = 'mnits': unknown; did you mean 'mnist'?"),
        (DataSpec(source="qqq"), "[data] source = 'qqq': unknown; known are digits"),
        (DataSpec(partition="dirichelt"), "[data] partition = 'dirichelt': unknown; did you mean 'dirichlet'?"),
        (DataSpec(clients=0), "[data] clients = 0: expected an integer ≥ 1"),
        (DataSpec(samples_per_client=100), "[data] clients = 20, samples_per_client = 100: 20 clients need 2000"),
        (DataSpec(clients=2000), "[data] clients = 2000: there are only 1438"),
        (DataSpec(partition="dirichlet", minimum=100), "[data] minimum = 100"),
        (DataSpec(alpha=0.3), "[data] alpha = 0.3: only partition = 'dirichlet' has it, and this one is 'iid'"),
        (DataSpec(partition="dirichlet", skew_percent=30), "[data] skew_percent = 30: only partition = 'label_skew'"),
        (DataSpec(partition="pathological", clients=7), "[data] clients = 7: not a multiple of the 5 groups"),
        (DataSpec(partition="pathological", groups=((0, 12),)), "[data] groups[0] = [0, 12]: no training sample has label 12"),
        (DataSpec(partition="pathological", clients=15, rotations=(0, 90)), "[data] clients = 15: not a multiple of the 10 groups"),
        (DataSpec(groups=((0, 1),)), "[data] groups = ((0, 1),): only partition = 'pathological'"),
        (DataSpec(paths=("a",)), "[data] paths = ('a',): source = 'digits' takes 0"),
        (DataSpec(source="idx", paths=("a", "b")), "[data] paths = ('a', 'b'): source = 'idx' takes 4"),
        (DataSpec(source="npz", paths=("absent.npz",)), "[data] paths = 'absent.npz': no such file"),
        (DataSpec(partition="given"), "[data] partition = 'given': digits does not name its clients"),
        (DataSpec(rotations=(0, 45)), "[data] rotations = (0, 45): 45 is not a multiple of 90"),
        (DataSpec(rotations=(0, 360)), "[data] rotations = (0, 360): two groups would be the same"),
        (DataSpec(label_shifts=(3, 13)), "[data] label_shifts = (3, 13): two groups would be the same"),
        (DataSpec(label_swaps=((1, 2), (2, 1))), "[data] label_swaps = ((1, 2), (2, 1)): two groups would be the same"),
        (DataSpec(label_swaps=((1, 1), (2, 2))), "two groups would be the same"),
        (DataSpec(label_swaps=((1, 10),)), "[data] label_swaps = ((1, 10),): (1, 10) is not in 0..9"),
        (DataSpec(rotations=(0, 90), label_shifts=(0, 1)), "[data] label_shifts = (0, 1): cannot be combined with rotations"),
        (
            DataSpec(partition="dirichlet", rotations=(0, 90)),
            "[data] rotations = (0, 90): needs partition 'iid', 'pathological' or 'kinds'",
        ),
        (DataSpec(clients=3, rotations=(0, 90, 180, 270)), "[data] clients = 3: fewer than the 4 groups"),
        (DataSpec(label_permutations=4, label_shifts=(0, 1)), "[data] label_permutations = 4: cannot be combined with label_shifts"),
        (DataSpec(label_permutations=30), "[data] clients = 20: fewer than the 30 groups"),
        (DataSpec(noise=0.5), "[data] noise = 0.5: only partition = 'pathological' or 'kinds'"),
        (DataSpec(partition="kinds"), "[data] partition = 'kinds': digits has no kinds"),
        (DataSpec(shared_labels=True), "[data] shared_labels = True: only source = 'mixture'"),
        (DataSpec(languages=("da",)), "[data] languages = ('da',): only source = 'nordic_wiki'"),
        (DataSpec(repeat_per_group=True), "[data] repeat_per_group = True"),
        (DataSpec(sources=(("digits", 2),)), "[data] sources = (('digits', 2),): only source = 'mixture'"),
        (replace(MIX, sources=()), "[data] sources = (): a mixture needs"),
        (replace(MIX, sources=(("digist", 2),)), "[data] sources = 'digist': unknown; did you mean 'digits'?"),
        (replace(MIX, sources=(("digits", 1), ("digits", 1))), "names a data set twice"),
        (replace(MIX, clients=5), "[data] clients = 5: the sources have 2 clients together"),
        (replace(MIX, partition="dirichlet"), "[data] partition = 'dirichlet': a mixture is iid"),
        (replace(MIX, sources=(("digits", 5000),)), "[data] sources: digits: clients = 5000"),
        (replace(MIX, rotations=(0, 90)), "[data] rotations = (0, 90)"),
    ],
)
def test_mistakes(spec: DataSpec, words: str) -> None:
    with pytest.raises(InputError) as caught:
        build_population(spec)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"clients": -3}, "data.clients = -3: expected an integer ≥ 0"),
        ({"clients": True}, "data.clients = True: expected an integer ≥ 0"),
        ({"seed": 1.5}, "data.seed = 1.5: expected an integer"),
        ({"samples_per_client": 2.0}, "data.samples_per_client = 2.0: expected an integer ≥ 0"),
        ({"partition": "label_skew", "skew_percent": 0}, "data.skew_percent = 0: expected a number in (0, 100]"),
        ({"partition": "dirichlet", "alpha": -1}, "data.alpha = -1: expected a number in [1e-6, 1e6]"),
        ({"partition": "label_skew", "alpha": math.nan}, "data.alpha = nan: expected a number in [1e-6, 1e6]"),
        ({"label_permutations": -1}, "data.label_permutations = -1: expected an integer ≥ 0"),
        ({"partition": "pathological", "noise": 2.0}, "data.noise = 2.0: expected a number in [0, 1]"),
        ({"source": "mixture", "sources": (("digits", 0),)}, "data.sources = [['digits', 0]]: expected integers ≥ 1"),
    ],
)
def test_values_out_of_range(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as caught:
        DataSpec(**changes)
    assert str(caught.value) == line


def test_the_lists_for_the_command_line_are_what_is_accepted() -> None:
    assert set(DATASETS) == {*LOADERS, *TEXTS, *TABLES, "npz", "torchvision", "idx", "mixture"}
    assert set(PARTITIONS) == {"iid", "label_skew", "dirichlet", "pathological", "kinds", "given"}
    assert all("\n" not in line for line in (*DATASETS.values(), *PARTITIONS.values()))


@pytest.mark.slow
@needs_files
def test_a_hundred_clients_of_mnist_are_quick_after_loading() -> None:
    started = time.process_time()
    dataset = load_dataset("mnist", FOLDER)
    loading = time.process_time() - started
    started = time.process_time()
    population = build_population(DataSpec(source="mnist", clients=100, samples_per_client=500, rotations=(0, 90, 180, 270)), FOLDER)
    assert time.process_time() - started < 3 + 2 * loading  # building reads the files again
    assert {client.samples for client in population.clients} == {500}
    part = iid(dataset.y_train, dataset.y_test, 100, 0, 500)
    for client in (0, 1, 2, 3, 98):
        turned = np.rot90(dataset.x_train[part.train[client]], client % 4, axes=(2, 3))
        np.testing.assert_array_equal(population.clients[client].x_train, turned)


@needs_files
@pytest.mark.slow
def test_mix_4_with_mnist_in_place_of_svhn() -> None:
    sources = (("cifar10", 31), ("mnist", 25), ("fashion_mnist", 27), ("usps", 14))
    spec = DataSpec(source="mixture", clients=97, samples_per_client=500, test_samples_per_client=50, sources=sources)
    population = build_population(spec, FOLDER)
    assert (population.shape, population.classes, len(population.clients)) == ((3, 32, 32), 40, 97)
    assert {client.samples for client in population.clients} == {500}
    assert any("SVHN" in note for note in population.notes)
    for client, group in zip(population.clients, population.groups, strict=True):
        assert set(client.y_train // 10) == {group}
        if group:
            np.testing.assert_array_equal(client.x_train[:, 0], client.x_train[:, 2])


def _root(array: np.ndarray[Any, Any]) -> Any:
    while array.base is not None and isinstance(array.base, np.ndarray):
        array = array.base
    return array


def test_a_folder_of_arrays_is_read_when_needed(tmp_path: Path) -> None:
    """It gives what an npz gives; clients whose rows follow each other have views of the mapped file, others have copies."""
    draws = np.random.default_rng(0)
    owners = np.repeat([3, 7, 11, 2], [5, 4, 6, 3])
    x = draws.random((18, 5, 4), np.float32)
    arrays: dict[str, Any] = {
        "x_train": x,
        "y_train": owners % 3,
        "x_test": x[::-1].copy(),
        "y_test": owners[::-1] % 3,
        "client_train": owners,
    }
    np.savez(tmp_path / "mine.npz", **arrays, client_test=owners[::-1])
    (tmp_path / "mine").mkdir()
    for name, array in (arrays | {"client_test": owners[::-1]}).items():
        np.save(tmp_path / "mine" / f"{name}.npy", array)
    specs = [DataSpec(source="npz", paths=(str(tmp_path / name),), partition="given", clients=0) for name in ("mine.npz", "mine")]
    whole, mapped = (build_population(spec) for spec in specs)
    assert (whole.mean, whole.std, whole.groups) == (mapped.mean, mapped.std, mapped.groups)
    for one, other in zip(whole.clients, mapped.clients, strict=True):
        for part in ("x_train", "y_train", "x_test", "y_test"):
            np.testing.assert_array_equal(getattr(one, part), getattr(other, part))
        assert isinstance(_root(other.x_train), np.memmap)
        assert isinstance(_root(other.x_test), np.memmap)
    before = (tmp_path / "mine" / "x_train.npy").read_bytes()
    mapped.clients[0].x_train[:] = 0.5  # a copy on write
    assert (tmp_path / "mine" / "x_train.npy").read_bytes() == before
    dealt = build_population(DataSpec(source="npz", paths=(str(tmp_path / "mine"),), clients=3))
    assert not any(isinstance(_root(client.x_train), np.memmap) for client in dealt.clients)
    (tmp_path / "mine" / "y_test.npy").unlink()
    with pytest.raises(InputError, match=r"mine: has no array y_test\.npy; it holds client_test"):
        build_population(specs[1])


@pytest.mark.parametrize("damage", ["cut", "objects", "text"])
def test_a_damaged_array_in_a_folder_is_named(damage: str, tmp_path: Path) -> None:
    for name in ("x_train", "x_test"):
        np.save(tmp_path / f"{name}.npy", np.zeros((6, 2, 2), np.float32))
        np.save(tmp_path / f"{name.replace('x', 'y')}.npy", np.zeros(6, np.int64))
    path = tmp_path / "x_train.npy"
    if damage == "objects":
        np.save(path, np.array([{}] * 6))
    else:
        path.write_bytes(path.read_bytes()[:-8] if damage == "cut" else b"text")
    with pytest.raises(InputError, match=r"x_train\.npy: not a readable npy file"):
        build_population(DataSpec(source="npz", paths=(str(tmp_path),), clients=2))
