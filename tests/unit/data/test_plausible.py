"""Plausible but wrong tables and arrays are refused or named, and good ones of the same kinds pass in silence."""

import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import datasets

from cflpriv.data import DataSpec, build_population
from cflpriv.data.class_names import accidental_pairs, missing_word, no_classes, same_name, unified
from cflpriv.data.plausible import row_numbers
from cflpriv.data.repeats import repeats_of
from cflpriv.errors import CflprivWarning, InputError
from cflpriv.experiments import parse_config
from cflpriv.experiments.run.folder import run_experiment
from cflpriv.types import Array, Population

Rows = Sequence[Sequence[object]]
HEADER = ("a", "b", "c", "label", "client")


def draws() -> np.random.Generator:
    return np.random.default_rng(0)


def rowed(labels: Sequence[object], columns: Array | None = None, clients: int = 4) -> list[list[object]]:
    """A row for each label: features, the label, a client."""
    x = draws().normal(size=(len(labels), 3)).round(4) if columns is None else columns
    return [[*x[row].tolist(), label, row * clients // len(labels)] for row, label in enumerate(labels)]


def csv_of(path: Path, rows: Rows, header: Sequence[str] = HEADER) -> str:
    path.write_text("\n".join(",".join(map(str, row)) for row in (header, *rows)) + "\n", encoding="utf-8")
    return str(path)


def built(tmp_path: Path, train: Rows, test: Rows = (), header: Sequence[str] = HEADER, **keys: Any) -> Population:
    paths = [csv_of(tmp_path / "train.csv", train, header)] + ([csv_of(tmp_path / "test.csv", test, header)] if test else [])
    spec = {"partition": "given", "client_column": "client", **keys}
    return build_population(DataSpec(source="csv", paths=tuple(paths), label_column="label", **spec))


HALF = ["0", "1"] * 24
BAD_LABELS: dict[str, tuple[Sequence[object], str]] = {
    "each value once": (draws().normal(size=48).round(5).tolist(), "48 classes in 48 rows: numbers with fractions"),
    "one decimal": (draws().normal(size=200).round(1).tolist(), "numbers with fractions, a quantity"),
    "quarters of thousands": ((draws().integers(0, 120, 900) / 4).tolist(), "numbers with fractions, a quantity"),
    "prices": (draws().integers(1000, 90_000, 200).tolist(), "a quantity or an identifier"),
    "ages": (draws().integers(18, 90, 60).tolist(), "a quantity or an identifier"),
    "names": ([f"patient {i}" for i in range(48)], "48 classes in 48 rows: identifiers"),
    "capitals": ([*["Yes", "No"] * 20, *["yes", "no"] * 4], "'no' and the class 'No' .* differ as by accident"),
    "all capitals": ([*["low", "high"] * 20, "HIGH"], "'high' and the class 'HIGH'"),
    "separators": ([*["no risk", "risk"] * 20, "no_risk", "no-risk"], "'no-risk' and the class 'no risk'"),
    "a point at the end": ([*["over", "under"] * 20, *["over.", "under."] * 4], "'over.' and the class 'over'"),
    "a blank before a number": (["type 1", "type 2"] * 20 + ["type1"], "'type1' and the class 'type 1'"),
    "a word of a database": (["a", "b", r"\N"] * 16, "stands for a missing value"),
    "a letter for a word": (["male", "female"] * 20 + ["M", "F"], "'F' and the class 'female'"),
    "an escaped character": (["a&b", "c"] * 20 + ["a&amp;b"], "'a&b' and the class 'a&amp;b'"),
    "a code with a zero": (["1", "2"] * 20 + ["01", "02"], "'1' and the class '01'"),
    "halves": (["0.5", "1.5"] * 20 + ["0.50"], "'0.50' and the class '0.5'"),
    "a Cyrillic letter": (["cat", "dog"] * 20 + ["сat"], r"'\\u0441at' and the class 'cat'"),
    "wide letters": (["cat", "dog"] * 20 + ["ｃat"], r"'\\uff43at' and the class 'cat'"),
    "two kinds of truth": (["yes", "no"] * 20 + ["true", "false"], "'yes' and the class 'true'"),
    "truth and numbers": (["0", "1"] * 20 + ["False", "True"], "'True' and the class '1'"),
    "nan": (["0", "nan"] * 24, "row 3, column 'label': 'nan' stands for a missing value.* remove the 24 rows"),
    "NaN": (["a", "b", "NaN"] * 16, "'NaN' stands for a missing value"),
    "NA": (["M", "F", "NA"] * 16, "'NA' stands for a missing value"),
    "a cell of a spreadsheet": (["a", "b", "#N/A"] * 16, "'#N/A' stands for a missing value"),
    "null": (["a", "b", "NULL"] * 16, "'NULL' stands for a missing value"),
    "a question mark": (["a", "b", "?"] * 16, r"'\?' stands for a missing value"),
    "None beside numbers": (["0", "1", "None"] * 16, "'None' stands for a missing value"),
    "a dash": (["a", "b", "-"] * 16, "'-' stands for a missing value"),
}


@pytest.mark.parametrize("kind", BAD_LABELS)
def test_labels_that_are_no_classes_are_refused(kind: str, tmp_path: Path) -> None:
    labels, words = BAD_LABELS[kind]
    with pytest.raises(InputError, match=words) as caught:
        built(tmp_path, rowed(labels))
    assert "\n" not in str(caught.value)
    assert "column 'label'" in str(caught.value)
    assert str(tmp_path / "train.csv") in str(caught.value)


@pytest.mark.parametrize("kind", BAD_LABELS)
def test_who_lists_the_classes_is_believed(kind: str, tmp_path: Path) -> None:
    labels, _ = BAD_LABELS[kind]
    names = tuple(sorted({str(label) for label in labels}))
    assert built(tmp_path, rowed(labels), class_names=names).class_names == names


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["0", "1"] * 20 + ["0.0", "1.00", "+1", "-0", "1e0"], ("0", "1")),
        (["no risk", "risk"] * 20 + ["no\u00a0risk", " risk ", "no  risk", "\ufeffrisk", "ri\u200bsk"], ("no risk", "risk")),
        (["café", "bar"] * 20 + ["cafe\u0301"], ("bar", "café")),
        (["0.0", "1.0"] * 20, ("0.0", "1.0")),
        (["10", "9", "8.5"] * 16, ("8.5", "9", "10")),
    ],
)
def test_forms_of_one_name_are_one_class(labels: Sequence[str], classes: tuple[str, ...], tmp_path: Path) -> None:
    population = built(tmp_path, rowed(labels))
    assert population.class_names == classes
    assert population.warnings == ()
    assert any("are one name" in note for note in population.notes) == (len(set(labels)) > len(classes))


@pytest.mark.parametrize(("labels", "name"), [([0, 1] * 20 + ["unknown"], "unknown"), ([0, 1, 2] * 20 + [-999], "-999")])
def test_a_class_that_is_unlike_the_others_is_noted(labels: Sequence[object], name: str, tmp_path: Path) -> None:
    notes = built(tmp_path, rowed(labels)).notes
    assert any(f"the class {name!r} (1 rows) is unlike the others, which are numbers" in note for note in notes)


def test_a_client_or_a_group_that_is_written_in_two_ways_is_one_or_named(tmp_path: Path) -> None:
    rows = rowed(HALF)
    changed = [[*row[:-1], f"{row[-1]}.0" if number % 2 else row[-1]] for number, row in enumerate(rows)]
    assert len(built(tmp_path, changed).clients) == 4
    changed = [[*row[:-1], ("site", "Site")[number % 2] if row[-1] == 3 else row[-1]] for number, row in enumerate(rows)]
    (doubt,) = built(tmp_path, changed).warnings
    assert "column 'client' (data.client_column): 'Site' and 'site' count as two" in doubt
    codes = [[*row[:-1], ("aB3x", "ab3X")[number % 2] if row[-1] == 3 else row[-1]] for number, row in enumerate(rows)]
    assert built(tmp_path, codes).warnings == (), "random codes of letters differ in capitals alone"


# --- named, but not refused ---------------------------------------------------------------------------------------------------------------


def numbered(rows: Rows, start: int = 0) -> list[list[object]]:
    return [[start + number, *row[1:]] for number, row in enumerate(rows)]


NAMED: dict[str, tuple[Rows, Rows, Sequence[str], str]] = {
    "an index of pandas": (numbered(rowed(HALF)), (), ("Unnamed: 0", *HEADER[1:]), "column 'Unnamed: 0' numbers the rows"),
    "an index from 1": (numbered(rowed(HALF), 1), (), ("nr", *HEADER[1:]), "column 'nr' numbers the rows"),
    "an index under any name": (numbered(rowed(HALF)), (), HEADER, "column 'a' numbers the rows"),
    "an index of shuffled rows": (
        [[n, *row[1:]] for n, row in zip(draws().permutation(90)[:48].tolist(), rowed(HALF), strict=True)], (), ("row_id", *HEADER[1:]),
        "column 'row_id' is an index: whole numbers, each once",
    ),
    "test rows from training": (
        rowed(HALF), rowed(HALF), HEADER, "48 of 48 test rows equal a training row .*row 2 of .*test.csv equals row 2"
    ),
    "some test rows from training": (
        rowed(HALF), [*rowed(HALF)[:6], *rowed(HALF, draws().normal(9, 1, (48, 3)))[:40]], HEADER,
        "6 of 46 test rows equal a training row"
    ),
    "a file twice": (rowed(HALF) + rowed(HALF), (), HEADER, "test rows equal a training row"),
    "a few rows twice": (
        [*rowed(HALF), *([*row[:-1], 3] for row in rowed(HALF)[-6:])], (), HEADER,
        "6 of 54 rows occur earlier, too|3 of 10 test rows equal a training row",
    ),
    "an index of each client": (
        [[i % 12, *row[1:]] for i, row in enumerate(rowed(HALF))], (), ("id", *HEADER[1:]), "whole numbers that count up"
    ),
    "identifiers": (
        [[7001 + 13 * (i * 29 % 48), *row[1:]] for i, row in enumerate(rowed(HALF))], (), ("patientId", *HEADER[1:]),
        "column 'patientId' is an index: whole numbers, each once",
    ),
    "an index in another order": (
        [[n, *row[1:]] for n, row in zip(draws().permutation(48).tolist(), rowed(HALF), strict=True)], (), HEADER,
        "column 'a' numbers the rows: each of 0 to 47 once",
    ),
    "an index down": ([[47 - i, *row[1:]] for i, row in enumerate(rowed(HALF))], (), HEADER, "numbers the rows"),
    "rows of another client": (
        [*rowed(HALF)[:12], *([*row[:-1], 1] for row in rowed(HALF)[:12]), *rowed(HALF)[24:]],
        rowed(HALF, draws().normal(9, 1, (48, 3))), HEADER, "24 of 48 training rows are at several clients .*row 14 equals row 2",
    ),
    "a class of test rows": (
        rowed(HALF), rowed([*HALF[:20], "2", "2"], draws().normal(9, 1, (22, 3))), HEADER,
        r"a class occurs only in the test part.*'2' \(2 test rows\)"
    ),
    "many rare numbers": (
        rowed(draws().integers(18, 90, 400).tolist()), (), HEADER, r"classes in 400 rows: few rows each, and not numbered"
    ),
    "names that occur once": (
        rowed([*[f"n{i}" for i in range(30)], *["x"] * 40]), (), HEADER, "column 'label': 31 classes in 70 rows: most of them occur once"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", NAMED)
def test_doubtful_tables_are_named(kind: str, tmp_path: Path) -> None:
    train, test, header, words = NAMED[kind]
    found = built(tmp_path, train, test, header).warnings
    assert any(re.search(words, doubt) for doubt in found), found
    assert all("\n" not in doubt and str(tmp_path) in doubt for doubt in found)


def test_rows_without_clients_that_repeat_are_named(tmp_path: Path) -> None:
    rows = [*rowed(HALF), *rowed(HALF)[:12]]
    found = built(tmp_path, rows, rowed(HALF, draws().normal(9, 1, (48, 3))), partition="iid", client_column="", clients=3).warnings
    assert any("12 of 108 rows occur earlier, too (row 50 equals row 2)" in doubt for doubt in found)


def test_warnings_reach_summary_and_console(tmp_path: Path) -> None:
    paths = [csv_of(tmp_path / f"{part}.csv", rowed(HALF)) for part in ("train", "test")]
    config = parse_config(
        {
            "data": {"source": "csv", "paths": paths, "partition": "given", "client_column": "client", "label_column": "label"},
            "training": {"rounds": 1}, "model": {"name": "linear"}, "algorithm": {"name": "fedavg"},
        }
    )  # fmt: skip
    with pytest.warns(CflprivWarning, match="48 of 48 test rows equal a training row"):
        summary = run_experiment(config, tmp_path / "run")
    assert any("48 of 48 test rows equal a training row" in doubt for doubt in summary["warnings"])


def test_more_samples_than_clients_have_are_named_with_the_steps(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "data": {"clients": 6}, "model": {"name": "linear"}, "algorithm": {"name": "fedavg"},
        "training": {"rounds": 0, "batch_size": 10, "lr": 0.1, "weights": "equal"},
        "privacy": {"unit": "sample", "epsilon": 8.0, "delta": 1e-7, "samples": 10**6},
    }  # fmt: skip
    words = r"privacy.samples = 1,000,000: the largest client has 240 training samples, so each client takes 100,000 steps a round"
    with pytest.warns(CflprivWarning, match=words):
        summary = run_experiment(parse_config(tree), tmp_path / "run")
    assert any("100,000 steps" in doubt for doubt in summary["warnings"])
    tree["privacy"]["samples"] = 400
    with warnings.catch_warnings():
        warnings.simplefilter("error", CflprivWarning)
        run_experiment(parse_config(tree), tmp_path / "rounded")


# --- good data pass in silence ------------------------------------------------------------------------------------------------------------

SPECIES = ["setosa", "versicolor", "virginica"] * 20
GOOD_LABELS: dict[str, Sequence[object]] = {
    "truth": ["True", "False"] * 24, "yes and no": ["yes", "no"] * 24, "Y and N": ["Y", "N"] * 24, "numbers": [0, 1, 2] * 20,
    "signs": ["+", "-"] * 24, "minus one": [-1, 1] * 24, "from 1": [1, 2, 3, 4, 5] * 10, "stars": [i / 2 for i in range(2, 11)] * 12,
    "grades": ["A", "A-", "B+", "B", "B-", "C+", "C"] * 10, "species": SPECIES, "severity": ["None", "Mild", "Severe"] * 20,
    "regions": ["EU", "NA", "APAC", "LATAM"] * 12, "letters": [chr(c) for c in (*range(65, 91), *range(97, 123))] * 6,
    "blood": ["A", "B", "AB", "0"] * 12, "codes": ["C10", "C11", "C1"] * 20, "versions": ["1.0", "1.1", "2.0"] * 20,
    "years": [2019, 2020, 2021, 2022] * 12, "clothes": [f"c{i}" for i in range(62)] * 4, "hundred classes": list(range(100)) * 5,
    "unknown": ["cat", "dog", "unknown"] * 20, "a rare class": [*["a", "b"] * 30, *["c"] * 4], "languages": ["nb", "nn", "no", "sv"] * 15,
    "ten percent": [*[0] * 90, *[1] * 10], "names with points": ["st. john", "st. paul"] * 24, "accents": ["cafe", "café"] * 24,
    "C and C++": ["C", "C++", "C#"] * 20,
    "ranges": ["1-2", "12", "1 2"] * 20, "ids of few persons": [1042, 1101, 1230, 1555] * 15, "Nan": ["Nancy", "Nano"] * 24,
}  # fmt: skip


@pytest.mark.parametrize("kind", GOOD_LABELS)
def test_good_labels_pass(kind: str, tmp_path: Path) -> None:
    labels = GOOD_LABELS[kind]
    population = built(
        tmp_path, rowed(sorted(labels, key=lambda label: draws().random()), clients=3), partition="iid", client_column="", clients=3
    )
    assert population.warnings == ()
    assert population.classes == len({str(label) for label in labels})


def bunch(name: str) -> Array:
    return np.asarray(getattr(datasets, f"load_{name}")().data)


def one_hot(n: int, *sizes: int) -> Array:
    return np.concatenate([np.eye(size)[draws().integers(0, size, n)] for size in sizes], axis=1)


def celsius() -> Array:
    c = draws().normal(20, 5, 600).round(1)
    return np.stack([c, c * 1.8 + 32], axis=1)


def standardised(x: Array) -> Array:
    return np.asarray((x - x.mean(0)) / x.std(0))


GOOD_FEATURES: dict[str, Callable[[], Array]] = {
    "iris": lambda: bunch("iris"), "wine": lambda: bunch("wine"), "breast cancer": lambda: bunch("breast_cancer"),
    "digits": lambda: bunch("digits"), "ratings": lambda: draws().integers(1, 6, (500, 10)),
    "ratings that are all alike": lambda: np.concatenate(
        [draws().integers(1, 6, (300, 6)), np.repeat(draws().integers(1, 6, (60, 1)), 6, 1)]
    ),
    "ratings of 0 to 10": lambda: np.concatenate([draws().integers(0, 11, (300, 6)), np.repeat(draws().integers(0, 11, (60, 1)), 6, 1)]),
    "one-hot": lambda: one_hot(600, 12), "one-hot, standardised": lambda: standardised(one_hot(600, 5, 5, 5, 5)),
    "sparse counts": lambda: draws().poisson(0.03, (600, 50)), "small integers": lambda: draws().integers(0, 4, (300, 3)),
    "one rounded number": lambda: draws().normal(size=(600, 1)).round(2),
    "two rounded numbers": lambda: draws().normal(size=(600, 2)).round(1),
    "nearly empty images": lambda: (draws().random((500, 64)) < 0.02) * 1.0, "a number in two units": celsius,
    "a row of defaults": lambda: np.concatenate([draws().normal(size=(300, 5)), np.zeros((60, 5))]),
    "truth values": lambda: draws().integers(0, 2, (200, 4)), "a constant": lambda: np.c_[np.ones(200), draws().normal(size=200)],
    "years": lambda: np.c_[np.arange(1980, 2025), draws().normal(size=45)],
    "hours": lambda: np.c_[np.tile(np.arange(24), 10), draws().normal(size=240)], "ages": lambda: draws().integers(18, 90, (400, 1)),
    "ten rows": lambda: draws().normal(size=(20, 3)),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", GOOD_FEATURES)
def test_good_features_pass(kind: str, seed: int, tmp_path: Path) -> None:
    x = GOOD_FEATURES[kind]()
    if kind not in ("hours", "years"):
        x = x[np.random.default_rng(seed).permutation(len(x))]
    header = [f"x{i}" for i in range(x.shape[1])]
    rows = [[*row, (0, 1)[i % 2], i % 4] for i, row in enumerate(x.tolist())]
    assert built(tmp_path, rows, (), [*header, "label", "client"], seed=seed).warnings == ()
    assert built(tmp_path, rows[5:], rows[:5], [*header, "label", "client"]).warnings == (), "few test rows"


# --- arrays -------------------------------------------------------------------------------------------------------------------------------


def arrays(tmp_path: Path, x: Array, y: Array, share: float = 0.25, **more: Any) -> Population:
    cut = int(share * len(x))
    keys = {key: more.pop(key) for key in ("standardise",) if key in more}
    np.savez(tmp_path / "a.npz", x_train=x[cut:], y_train=y[cut:], x_test=x[:cut], y_test=y[:cut], **more)
    return build_population(DataSpec(source="npz", paths=(str(tmp_path / "a.npz"),), clients=2, **keys))


LABELS = np.arange(80) % 4


def grey(low: int, high: int, shape: tuple[int, ...] = (80, 8, 8)) -> Array:
    return draws().integers(low, high, shape).astype(np.uint8)


@pytest.mark.parametrize("largest", [1, 16, 63, 100])
def test_images_of_few_grey_levels_are_scaled_by_them(largest: int, tmp_path: Path) -> None:
    x = grey(0, largest + 1)
    population = arrays(tmp_path, x, LABELS)
    levels = arrays(tmp_path, x == 1, LABELS) if largest == 1 else arrays(tmp_path, (x / largest).astype(np.float32), LABELS)
    assert all(np.allclose(a.x_train, b.x_train) for a, b in zip(population.clients, levels.clients, strict=True)), (
        "as truth values or floats"
    )
    assert any(f"uint8 in 0..{largest}, so they are divided by {largest}" in note for note in population.notes)
    assert population.warnings == ()


def test_images_of_255_levels_are_divided_by_255(tmp_path: Path) -> None:
    x = grey(0, 256)
    population = arrays(tmp_path, x, LABELS)
    assert max(float(client.x_train.max()) for client in population.clients) == pytest.approx(x[20:].max() / 255)
    assert not any("divided by" in note for note in population.notes)


@pytest.mark.parametrize(
    ("shape", "read"),
    [
        ((80, 8, 8, 4), (4, 8, 8)), ((80, 28, 20, 4), (4, 28, 20)), ((80, 12, 12, 5), (5, 12, 12)), ((80, 8, 8, 2), (2, 8, 8)),
        ((80, 4, 8, 8), (4, 8, 8)), ((80, 16, 4, 4), (16, 4, 4)), ((80, 3, 8, 8), (3, 8, 8)), ((80, 8, 8, 3), (3, 8, 8)),
        ((80, 8, 8, 8), (8, 8, 8)),
    ],
)  # fmt: skip
def test_channels_are_found(shape: tuple[int, ...], read: tuple[int, ...], tmp_path: Path) -> None:
    population = arrays(tmp_path, grey(0, 256, shape), LABELS)
    assert population.shape == read
    noted = any(f"is read as (n, H, W, C), images of {read[1]}×{read[2]} with {read[0]} channels" in note for note in population.notes)
    assert noted == (shape[-1] == read[0] and read[0] not in (1, 3) and shape[1] != read[0])


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (grey(0, 256), LABELS + 10**6, "4 of 1,000,004 classes occur"),
        (grey(0, 256), LABELS * 80, "4 of 241 classes occur"),
        (grey(0, 256), draws().integers(0, 400, 80), "a quantity or an identifier"),
        (grey(0, 256), np.arange(80), "80 classes in 80 samples"),
    ],
)
def test_labels_of_arrays_that_are_no_classes_are_refused(x: Array, y: Array, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words) as caught:
        arrays(tmp_path, x, y)
    assert "y_train" in str(caught.value)
    names = np.array([f"class {i}" for i in range(int(y.max()) + 1)])
    if len(names) < 1000:
        assert arrays(tmp_path, x, y, class_names=names).classes == len(names)


DIM = (grey(0, 256) / 255**2).astype(np.float32)


@pytest.mark.parametrize(
    ("x", "y", "more", "words"),
    [
        (grey(0, 256), LABELS + 1, {}, r"4 of 5 classes occur \(1, 2, 3, 4\)"),
        (DIM, LABELS, {}, "were the pixels divided by 255 twice"),
        (np.concatenate([DIM[:20], (grey(0, 256)[20:] / 255).astype(np.float32)]), LABELS, {}, "bring both to one scale"),
        (grey(0, 256), LABELS, {"class_names": np.array(["cat", "Cat", "dog", "cow"])}, "'Cat' and 'cat' differ as by accident"),
        (grey(0, 256), LABELS, {"class_names": np.array(["cat", "nan", "dog", "cow"])}, "'nan' is a word for a missing value"),
        (grey(0, 256), LABELS, {"class_names": np.array(["cat", "cat", "dog", "cow"])}, "class_names has 'cat' twice"),
        (np.concatenate([grey(0, 256)[:20], grey(0, 256)[:60]]), LABELS, {}, "20 of 20 test rows equal a"),
        (np.concatenate([grey(0, 256)] * 2), np.concatenate([LABELS] * 2), {}, r"rows occur earlier, too|test rows equal a training row"),
        (
            np.concatenate([grey(0, 256)[:20], grey(0, 256)[20:50], grey(0, 256)[20:50]]), LABELS, {"client_train": np.repeat([0, 1], 30)},
            "60 of 60 training rows are at several clients",
        ),
        (np.c_[np.arange(80.0), draws().normal(size=(80, 2))], LABELS, {"standardise": "per_client"}, "feature 0 numbers the rows"),
        (grey(0, 256), np.where(np.arange(80) < 3, 3, np.arange(80) % 3), {}, r"a class occurs only in the test part.*'3' \(3 test rows\)"),
    ],
)  # fmt: skip
def test_doubtful_arrays_are_named(x: Array, y: Array, more: dict[str, Any], words: str, tmp_path: Path) -> None:
    keys = dict(more)
    if "feature" in words:
        x = x[np.r_[60:80, 0:60]]
    found = arrays(tmp_path, x, y, **keys).warnings
    assert any(re.search(words, doubt) for doubt in found), found


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (grey(0, 256), LABELS), (grey(0, 2), LABELS), (grey(0, 2).astype(bool), LABELS), (grey(0, 256).astype(np.float32) / 255, LABELS),
        (grey(0, 256, (80, 8, 8, 3)), LABELS), (grey(0, 256, (80, 3, 8, 8)), LABELS), (grey(0, 256, (80, 64)), LABELS),
        (grey(0, 80), LABELS), (np.where(draws().random((80, 8, 8)) < 0.01, 255, 0).astype(np.uint8), LABELS),
        (grey(0, 256, (400, 8, 8)), np.arange(400) % 100), (np.zeros((80, 8, 8), np.uint8), LABELS), (grey(0, 256), np.arange(80) % 26),
        (datasets.load_digits().images.astype(np.uint8), datasets.load_digits().target),
    ],
)  # fmt: skip
def test_good_arrays_pass(x: Array, y: Array, tmp_path: Path) -> None:
    assert arrays(tmp_path, x, y).warnings == ()
    few = arrays(tmp_path, x, y, share=2 / len(x)).warnings
    assert few == (), "two test samples"


# --- the parts ----------------------------------------------------------------------------------------------------------------------------


def test_names() -> None:
    assert [same_name(cell) for cell in ("1", "1.", "+1.00", "1e0", "-0.0", "01", "1.5", "1,0", "-2.0")] == ["1"] * 4 + [
        "0",
        "01",
        "1.5",
        "1,0",
        "-2",
    ]
    assert unified(["a", "b"]) == ({"a": "a", "b": "b"}, ())
    assert unified(["1.0"])[0] == {"1.0": "1.0"}, "a name that is written in one way stays"
    assert accidental_pairs(["ab", "AB", "c"]) == (("AB", "ab"),)
    assert accidental_pairs([*"abcde", *"ABCDE"]) == (), "letters to be recognised"
    assert accidental_pairs(["m", "M", "f", "F"]) == (("F", "f"), ("M", "m"))
    assert accidental_pairs(["t", "y", "f", "n"]) == ()
    assert missing_word("NA", ["M", "F"])
    assert not missing_word("NA", ["EU", "AS"])
    assert missing_word("NA", ["YES", "NO"])
    assert not missing_word("-", ["+"])


def test_quantities() -> None:
    assert no_classes(np.arange(10) / 2, np.full(10, 3)) == ("", False), "half stars"
    assert no_classes(np.arange(1000.0), np.full(1000, 20)) == ("", False)
    assert no_classes(None, np.full(40, 1))[1]
    assert no_classes(None, np.array([1, 2, 3])) == ("", False), "a few rows"


def test_an_index_column() -> None:
    assert row_numbers("age", [np.arange(48.0)])
    assert not row_numbers("age", [np.arange(5.0)]), "five rows are too few to tell"
    assert row_numbers("age", [np.arange(48.0)[::-1]])
    assert not row_numbers("age", [np.arange(48.0) * 2])
    assert not row_numbers("year", [np.arange(1980.0, 2020.0)])
    assert not row_numbers("humid", [draws().permutation(90)[:48].astype(float)])
    assert row_numbers("patient_id", [draws().permutation(90)[:48].astype(float)])
    assert row_numbers("Unnamed: 0", [np.arange(48.0)[::-1]])
    assert not row_numbers("id", [np.arange(48.0) / 3])


def test_rows_of_zeros_of_either_sign_are_equal() -> None:
    x = draws().normal(size=(40, 3))
    x[:, 0] = 0.0
    assert repeats_of(x, -x * [1, -1, -1]).tested == 40
