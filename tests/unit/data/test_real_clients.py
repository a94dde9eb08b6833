"""Data sets of real clients, in files that the tests write in the publishers' formats."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cflpriv.data import DataSpec, build_population, load_dataset
from cflpriv.data.formats import LEAF_CHARACTERS
from cflpriv.errors import InputError
from cflpriv.experiments import parse_config, run_experiment

FOLDER = Path(os.environ.get("CFLPRIV_DATA") or "absent")


def write_tweets(folder: Path, users: dict[str, list[Any]], part: str = "train") -> None:
    (folder / "sent140" / part).mkdir(parents=True, exist_ok=True)
    data = {user: {"x": [["1", "Mon", "NO_QUERY", user, text] for text in texts], "y": [1] * len(texts)} for user, texts in users.items()}
    (folder / "sent140" / part / "all.json").write_text(json.dumps({"users": list(users), "user_data": data}), encoding="utf-8")


def test_accounts_are_clients_and_tweets_are_counts_of_words(tmp_path: Path) -> None:
    write_tweets(tmp_path, {"ann": ["good good day", "a day"], "bob": ["day good good"]})
    write_tweets(tmp_path, {"ann": ["good"]}, "test")
    population = build_population(DataSpec(source="sent140", partition="given"), tmp_path)
    ann, bob = population.clients
    assert (len(ann.x_train), len(bob.x_train), len(ann.x_test), len(bob.x_test)) == (2, 1, 1, 0)
    assert (population.shape, population.class_names) == ((1, 1, 1024), ("negative", "positive"))
    np.testing.assert_array_equal(ann.x_train[0], bob.x_train[0])  # the order of words does not count
    np.testing.assert_allclose(np.linalg.norm(ann.x_train.reshape(2, -1), axis=1), 1, rtol=1e-6)
    assert np.sort(ann.x_train[0].ravel())[-2:].tolist() == pytest.approx([1 / 5**0.5, 2 / 5**0.5])
    write_tweets(tmp_path, {"ann": ["good"], "bob": [7]})
    with pytest.raises(InputError, match=r"user_data\['bob'\]: x\[0\] is not a list with the tweet as its entry 4"):
        load_dataset("sent140", tmp_path)


def write_roles(folder: Path, roles: dict[str, tuple[list[Any], list[Any]]], part: str = "train") -> None:
    """LEAF's Shakespeare: of each role 80 characters, and the one after them."""
    (folder / "shakespeare" / part).mkdir(parents=True, exist_ok=True)
    tree = {"users": list(roles), "user_data": {role: {"x": x, "y": y} for role, (x, y) in roles.items()}}
    (folder / "shakespeare" / part / "all.json").write_text(json.dumps(tree), encoding="utf-8")


def test_roles_are_clients_and_characters_are_numbers(tmp_path: Path) -> None:
    lines = ["To be, or not to be: that is the question".ljust(80), LEAF_CHARACTERS]
    write_roles(tmp_path, {"HAMLET": (lines, ["!", "\n"]), "YORICK": ([" " * 80], ["}"])})
    write_roles(tmp_path, {"HAMLET": (lines[:1], [" "])}, "test")
    population = build_population(DataSpec(source="shakespeare", partition="given"), tmp_path)
    hamlet, yorick = population.clients
    assert (population.shape, population.classes, population.groups_known) == ((1, 1, 80), 80, False)
    numbers = (hamlet.x_train.reshape(2, 80) * 80).astype(int)
    assert ["".join(LEAF_CHARACTERS[number] for number in row) for row in numbers] == lines
    assert (numbers[1] == np.arange(80)).all()
    assert (hamlet.y_train.tolist(), yorick.y_train.tolist(), hamlet.y_test.tolist()) == ([2, 0], [79], [1])
    assert any("2 roles" in note for note in population.notes)


def test_a_next_character_model_trains_on_roles(tmp_path: Path) -> None:
    """Every line is the alphabet from another letter on, so the next character is known."""
    letters = LEAF_CHARACTERS[53:79]
    own = [((letters[at:] + letters * 4)[:80], letters[(at + 80) % 26]) for at in range(26)]
    roles = {f"ROLE {number}": ([x for x, _ in own], [y for _, y in own]) for number in range(4)}
    for part in ("train", "test"):
        write_roles(tmp_path, roles, part)
    tree = {
        "data": {"source": "shakespeare", "partition": "given", "clients": 0}, "model": {"name": "lstm", "hidden": 32},
        "training": {"rounds": 12, "epochs": 5, "lr": 2.0, "batch_size": 26}, "algorithm": {"name": "fedavg"},
    }  # fmt: skip
    summary = run_experiment(parse_config(tree), tmp_path / "run", data_dir=tmp_path)
    assert summary["accuracy_mean"] > 0.5  # by chance 1 of 26


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        ("short", "a", r"x\[0\] is not a text of 80 characters"),
        (["a"] * 80, "a", r"x\[0\] is not a text of 80 characters"),
        ("é" * 80, "a", r"x\[0\]\[0\] = 'é': not one of LEAF's 80 characters"),
        ("a" * 80, "é", r"y\[0\] = 'é': not one of LEAF's 80 characters"),
        ("a" * 80, "ab", r"y\[0\] = 'ab': expected one character"),
        ("a" * 80, 3, r"y\[0\] = 3: expected one character"),
    ],
)
def test_bad_roles(x: Any, y: Any, words: str, tmp_path: Path) -> None:
    write_roles(tmp_path, {"HAMLET": ([x], [y])})
    write_roles(tmp_path, {"HAMLET": (["a" * 80], ["a"])}, "test")
    with pytest.raises(InputError, match=r"all\.json: user_data\['HAMLET'\]: " + words):
        load_dataset("shakespeare", tmp_path)


def write_har(folder: Path, **changes: Any) -> None:
    """20 windows of each activity by two people, in time order; a window has its number in its features."""
    for part, person in (("train", 3), ("test", 7)):
        (folder / "har" / part).mkdir(parents=True, exist_ok=True)
        y = np.repeat(np.arange(1, 7), 20)
        arrays = {"X": np.tile((np.arange(120) / 120)[:, None], (1, 561)), "y": y, "subject": np.full(120, person)} | changes
        for name, values in arrays.items():
            np.savetxt(folder / "har" / part / f"{name}_{part}.txt", values, fmt="%.7e" if name == "X" else "%d")


def test_windows_that_overlap_are_not_on_both_sides(tmp_path: Path) -> None:
    write_har(tmp_path)
    population = build_population(DataSpec(source="har", partition="given"), tmp_path)
    assert [client.id for client in population.clients] == [2, 6]
    for client in population.clients:
        number = [np.rint((2 * x.ravel()[::561] - 1) * 120).astype(int) for x in (client.x_train, client.x_test)]
        assert (len(number[0]), len(number[1])) == (6 * 14, 6 * 5)
        assert min(abs(a - b) for a in number[0] for b in number[1] if a // 20 == b // 20) == 2
        np.testing.assert_array_equal(number[0] // 20, client.y_train)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"y": np.full(120, 7)}, "labels in 1..6"), ({"subject": np.zeros(120)}, "people in 1..30"), ({"y": np.ones(3)}, "6 labels"),
        ({"X": np.ones((120, 3))}, "row 1 is not 561 finite numbers"), ({"X": np.full((120, 561), 2.0)}, "features in -1..1"),
        ({"X": np.full((120, 561), np.nan)}, "row 1 is not 561"),
    ],
)  # fmt: skip
def test_damaged_activities_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    write_har(tmp_path, **changes)
    with pytest.raises(InputError, match=words) as caught:
        load_dataset("har", tmp_path)
    assert "\n" not in str(caught.value)


def write_features(folder: Path, **changes: Any) -> None:
    draws = np.random.default_rng(0)
    arrays: dict[str, Any] = {"client_train": np.repeat([0, 1, 2], 4), "client_test": np.repeat([0, 1, 2], 2), "group": np.array([1, 0, 1])}
    arrays |= {"x_train": draws.random((12, 5), np.float32), "y_train": np.arange(12) % 3}
    arrays |= {"x_test": draws.random((6, 5), np.float32), "y_test": np.arange(6) % 3, **changes}
    (folder / "real_clients").mkdir(exist_ok=True)
    np.savez(folder / "real_clients" / "wisdm.npz", **{name: values for name, values in arrays.items() if values is not None})


def test_features_are_taken_as_they_are_with_clients_and_groups(tmp_path: Path) -> None:
    write_features(tmp_path)
    population = build_population(DataSpec(source="wisdm", partition="given"), tmp_path)
    assert (population.groups, population.shape) == ((1, 0, 1), (1, 1, 5))
    assert (population.mean, population.std) == ((0.0,), (1.0,))  # no statistic over clients
    np.testing.assert_array_equal(population.clients[1].x_train.reshape(4, 5), np.random.default_rng(0).random((12, 5), np.float32)[4:8])
    for changes, words in (
        ({"group": np.array([1, 0])}, "group has 2 clients, the samples name client 2"), ({"client_test": None}, "client_test"),
        ({"group": np.array([0.5, 1, 2])}, "must be integers"), ({"x_test": np.full((6, 5), 2.0, np.float32)}, "outside"),
    ):  # fmt: skip
        write_features(tmp_path, **changes)
        with pytest.raises(InputError, match=words):
            load_dataset("wisdm", tmp_path)


@pytest.mark.skipif(not (FOLDER / "real_clients").is_dir(), reason="CFLPRIV_DATA has no folder real_clients")
@pytest.mark.parametrize(("name", "clients", "classes", "groups"), [("wisdm", 36, 6, 1), ("sentiment", 32, 2, 4), ("beijing48", 48, 4, 4)])
def test_the_files_are_what_their_makers_say(name: str, clients: int, classes: int, groups: int) -> None:
    population = build_population(DataSpec(source=name, partition="given"), FOLDER)
    assert (len(population.clients), population.classes, len(set(population.groups))) == (clients, classes, groups)
