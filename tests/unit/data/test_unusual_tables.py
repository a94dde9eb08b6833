"""Slips of a few clients or rows are named; tables that are unusual, and right, pass without a warning.

No warning is allowed for a correct table: each of 2 draws of 57 kinds passes. At a rate of false warnings of 3 % a table one of them would
show with a probability above 0.96.
"""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cflpriv.data import DataSpec, build_population
from cflpriv.data.columns import cell_number, cell_numbers
from cflpriv.data.doubtful_columns import column_remarks
from cflpriv.data.doubtful_units import mixed_units
from cflpriv.errors import InputError
from cflpriv.types import Array

CLIENTS, ROWS = 6, 60
N = CLIENTS * ROWS
CLIENT = np.repeat(np.arange(CLIENTS), ROWS)
ROW = np.arange(N) % ROWS
Table = dict[str, Sequence[Any]]
Draws = np.random.Generator


def patients(seed: int, **more: Any) -> Table:
    """Patients of six clinics, with columns that are added or replaced."""
    draws = np.random.default_rng(seed)
    z = draws.normal(size=(N, 4))
    columns: dict[str, Any] = {
        "client": [f"clinic{client}" for client in CLIENT], "age": np.clip(48 + 14 * z[:, 0], 18, 95).round(0),
        "weight": np.clip(76 + 13 * z[:, 1], 42, 140).round(1), "glucose": np.exp(np.log(105) + 0.22 * z[:, 2]).round(0),
        "temperature": (36.9 + 0.5 * z[:, 3]).round(1),
        "label": np.where(z[:, :3].sum(1) + 0.3 * draws.normal(size=N) > 0, "ill", "well"), **more,
    }  # fmt: skip
    return {name: list(column.tolist() if isinstance(column, np.ndarray) else column) for name, column in columns.items()}


PLAIN = patients(0)


def named_in(path: Path, columns: Mapping[str, Sequence[Any]], **keys: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The warnings and notes of a table."""
    rows = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    path.write_text("\n".join([",".join(columns), *rows]) + "\n", encoding="utf-8")
    spec = {"partition": "given", "client_column": "client", "label_column": "label", **keys}
    population = build_population(DataSpec(**{"source": "csv", "paths": (str(path),), **spec}))
    return population.warnings, population.notes


def relabelled(where: Array, labels: Callable[[Sequence[str]], Sequence[str]]) -> Table:
    """The good table with other labels in some rows."""
    columns = PLAIN
    own = np.array(columns["label"])
    own[where] = labels(own[where].tolist())
    return columns | {"label": own.tolist()}


def in_any_order(labels: Sequence[str]) -> Sequence[str]:
    return [labels[place] for place in np.random.default_rng(0).permutation(len(labels))]


def edited(name: str, where: Array, change: Callable[[Array], Array | float]) -> Table:
    """The good table with other values of a column in some rows."""
    columns = PLAIN
    values = np.array(columns[name])
    values[where] = change(values[where])
    return columns | {name: values.round(4).tolist()}


def reordered(*names: str) -> Table:
    """The good table with the columns of a client in another order."""
    columns = {name: np.array(column, object) for name, column in PLAIN.items()}
    own = {name: columns[name][CLIENT == 2] for name in names}
    for name, other in zip(names, (*names[1:], names[0]), strict=True):
        columns[name][CLIENT == 2] = own[other]
    return {name: column.tolist() for name, column in columns.items()}


SOME = np.random.default_rng(1).permutation(N)[:20]
HALF = ROW < 30
FIRST = (CLIENT == 1) & HALF
AS_TEXTS = np.random.default_rng(3).integers(0, 2, N)

WARNED: dict[str, tuple[Table, str]] = {
    "°F in a run of rows": (edited("temperature", FIRST, lambda x: x * 1.8 + 32), "column 'temperature': 30 values differ .* Fahrenheit"),
    "°F in any rows": (edited("temperature", SOME, lambda x: x * 1.8 + 32), "column 'temperature': 20 values .* Fahrenheit"),
    "grams": (edited("weight", FIRST, lambda x: x * 1000), "column 'weight': 30 values differ from the others by about 1000 times"),
    "percent and fractions": (edited("glucose", HALF, lambda x: x / 100), "column 'glucose': 180 values .* about 100 times"),
    "-1 for an age": (edited("age", SOME, lambda x: -1), "column 'age': -1 occurs 20 times, and no other value is negative"),
    "two codes": (
        edited("weight", SOME, lambda x: np.arange(len(x)) % 2 - 9), r"column 'weight': -9 or -8 occurs 20 times, and no other value"
    ),
    "a slip": (edited("weight", SOME[:1], lambda x: x * 100), r"column 'weight': \d+ is far beyond all other values"),
    "a total": ({name: [*column, "clinic5" if name == "client" else "well" if name == "label" else round(sum(column), 4)]
                 for name, column in PLAIN.items()}, r"row 362 has the sums of other rows"),
    "a mean": ({name: [*column, "clinic5" if name == "client" else "well" if name == "label" else round(float(np.mean(column)), 2)]
                for name, column in PLAIN.items()}, r"row 362 has the means of other rows"),
    "a client with a zero": (
        PLAIN | {"client": [f"clinic{'0' if c == 3 and row % 3 == 0 else ''}{c}" for c, row in zip(CLIENT, ROW, strict=True)]},
        "'clinic03' and 'clinic3' count as two"
    ),
    "a misspelt client": (
        PLAIN | {"client": [f"clini{'' if c == 3 and row % 9 == 0 else 'c'}{c}" for c, row in zip(CLIENT, ROW, strict=True)]},
        "'clini3' and 'clinic3' count as two; is one a slip"
    ),
}  # fmt: skip
NOTED: dict[str, tuple[Table, str]] = {
    "a client's mmol/l": (edited("glucose", CLIENT == 2, lambda x: x / 18.016), "'glucose': the values of client 'clinic2' .* 18.016"),
    "two clients' pounds": (
        edited("weight", (CLIENT == 2) | (CLIENT == 5), lambda x: x * 2.2046), "'weight': the values of clients .*clinic5.* 2.2046 times"
    ),
    "a client's °F": (edited("temperature", CLIENT == 1, lambda x: x * 1.8 + 32), "the values of client 'clinic1' .* Fahrenheit"),
    "a client's kelvins": (edited("temperature", CLIENT == 1, lambda x: x + 273.15), "the values of client 'clinic1' .* kelvins"),
    "a client's sign": (edited("weight", CLIENT == 1, lambda x: -x), "the values of client 'clinic1' .* the sign"),
    "a client's standardised values": (
        edited("weight", CLIENT == 4, lambda x: (x - x.mean()) / x.std()), "'weight': the values of client 'clinic4' are about a standard"
    ),
    "mmol/l in a run of rows": (edited("glucose", FIRST, lambda x: x / 18.016), "'glucose': 30 values differ .* 18.016 times"),
    "pounds in a run of rows": (edited("weight", FIRST, lambda x: x * 2.2046), "'weight': 30 values differ .* 2.2046 times"),
    "0 for an age": (edited("age", SOME, lambda x: 0), "column 'age': 0 occurs 20 times, apart"),
    "99 for an age": (edited("age", SOME, lambda x: 99), "column 'age': 99 occurs 20 times, far more often"),
    "a client of one value": (edited("weight", CLIENT == 2, lambda x: 76), "'weight': all values of client 'clinic2' are 76"),
    "a sensor that stopped": (
        edited("weight", (CLIENT == 2) & (ROW >= 20), lambda x: x[0]), r"'weight': \d+ rows one after another of client 'clinic2' have"
    ),
    "a client's labels in another order": (relabelled(CLIENT == 2, in_any_order), "labels of client 'clinic2' do not follow the columns"),
    "a client's labels exchanged": (
        relabelled(CLIENT == 2, lambda own: ["ill" if x == "well" else "well" for x in own]), "labels of client 'clinic2' do not follow"
    ),
    "labels of other rows": (relabelled(CLIENT >= 0, lambda own: [*own[1:], own[0]]), "no column of numbers, nor a weighted sum of them"),
    "exchanged columns": (reordered("age", "glucose"), "columns 'age', 'glucose' of client 'clinic2' look as if they were exchanged"),
    "moved columns": (reordered("age", "weight", "glucose"), "columns 'age', 'weight', 'glucose' of client 'clinic2' look"),
    "other codes": (patients(0, sex=AS_TEXTS + (CLIENT == 2)), "column 'sex': client 'clinic2' has '1', '2', and all others have '0', '1'"),
    "a column in two units": (
        PLAIN | {"pounds": [round(2.2046 * x, 1) for x in PLAIN["weight"]]}, "columns 'weight' and 'pounds' say the same in two units"
    ),
    "the label, nearly": (
        PLAIN | {"code": [int((x == "ill") ^ (i % 99 == 5)) for i, x in enumerate(PLAIN["label"])]},
        r"'code' says the label .* 98\.89 %"
    ),
    "values of the label": (
        PLAIN | {"ward": [i % 3 + 3 * (x == "ill") for i, x in enumerate(PLAIN["label"])]}, "'ward' says the label 'label' in 100 %"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WARNED)
def test_a_slip_that_spoils_a_column_is_a_warning(kind: str, tmp_path: Path) -> None:
    columns, words = WARNED[kind]
    warnings, _ = named_in(tmp_path / "a.csv", columns)
    assert any(re.search(words, warning) and str(tmp_path) in warning for warning in warnings), warnings


@pytest.mark.parametrize("kind", NOTED)
def test_what_may_be_a_slip_is_a_note(kind: str, tmp_path: Path) -> None:
    columns, words = NOTED[kind]
    warnings, notes = named_in(tmp_path / "a.csv", columns)
    assert not warnings
    assert any(re.search(words, note) for note in notes), notes


def test_another_unit_of_a_client_spoils_a_column_of_a_public_scale(tmp_path: Path) -> None:
    columns, words = NOTED["a client's mmol/l"]
    scale = {"standardise": "constants", "feature_mean": (0.0,), "feature_std": (100.0,)}
    assert any(re.search(words, warning) for warning in named_in(tmp_path / "a.csv", columns, **scale)[0])


@pytest.mark.parametrize("place", [0, 100, N])
def test_a_header_or_units_among_the_rows_are_refused(place: int, tmp_path: Path) -> None:
    for row, words in (
        ({name: name.upper() for name in PLAIN}, "is the header again; remove it"),
        (dict.fromkeys(PLAIN, "") | {"client": "clinic0", "label": "ill", "age": "years", "weight": "kg", "glucose": "mg/dl",
                                        "temperature": "C"}, "has texts in all columns of numbers .*'years'"),
    ):  # fmt: skip
        columns = {name: [*column[:place], row[name], *column[place:]] for name, column in PLAIN.items()}
        with pytest.raises(InputError, match=rf"a\.csv: row {place + 2} {words}"):
            named_in(tmp_path / "a.csv", columns)


def test_rows_that_a_join_repeated_are_noted(tmp_path: Path) -> None:
    one = patients(0, doctor=[1] * N)
    columns = {name: [*column, *column] for name, column in one.items()} | {"doctor": [1] * N + [2] * N}
    assert any("test rows equal a training row but for 'doctor'" in note for note in named_in(tmp_path / "a.csv", columns)[1])


# --- right, though unusual ----------------------------------------------------------------------------------------------------------------


def per_client(*values: float) -> Array:
    return np.array(values)[CLIENT]


def two_kinds(draws: Draws) -> dict[str, Array]:
    kind = draws.random(N) < 0.3
    return {"kind": kind.astype(int), "amplitude": np.where(kind, draws.normal(30, 2, N), draws.normal(4, 0.3, N)).round(2)}


def walk(draws: Draws) -> Array:
    return 100 + np.cumsum(draws.normal(0, 1, N))


def reversed_at_a_client(draws: Draws) -> dict[str, Array]:
    """A column of 0 and 1 that has another sign at one client, as a group of its own may have."""
    x = np.array(PLAIN["glucose"]) + draws.normal(0, 12, N) > 105
    return {"x": np.where(CLIENT == 2, ~x, x).astype(int)}


def by_label(draws: Draws) -> dict[str, Array]:
    """Two columns that have exchanged levels at half of the rows, as two activities do."""
    active = draws.random(N) < 0.5
    first, second = draws.normal(20, 2, N), draws.normal(35, 2, N)
    return {"x": np.where(active, first, second).round(2), "y": np.where(active, second, first).round(2)}


def steps(draws: Draws) -> Array:
    """A set value that stays for some rows."""
    return np.repeat(draws.choice([18, 19, 20, 20.5, 21, 22], N), draws.geometric(0.12, N))[:N]


UNUSUAL: dict[str, Callable[[Draws], dict[str, Array]]] = {
    "a height of each client": lambda d: {"x": per_client(12, 40, 790, 5, 33, 61)},
    "a client on a mountain": lambda d: {"x": (per_client(1013, 1010, 845, 1015, 1012, 1011) + d.normal(0, 6, N)).round(1)},
    "incomes": lambda d: {"x": np.exp(d.normal(10, 1, N)).round(0)},
    "shops of all sizes": lambda d: {"x": np.exp(d.normal(0, 1.5, CLIENTS)[CLIENT] + d.normal(5, 0.4, N)).round(2)},
    "two kinds of clients": lambda d: {"x": np.where(CLIENT < 3, d.normal(20, 2, N), d.normal(70, 6, N)).round(1)},
    "an odd client": lambda d: {"x": np.where(CLIENT == 4, d.normal(61, 6, N), d.normal(20, 2, N)).round(1)},
    "rain": lambda d: {"x": np.where(d.random(N) < 0.7, 0, np.exp(d.normal(1, 1, N))).round(1)},
    "counts with zeros": lambda d: {"x": d.poisson(2.2, N)},
    "claims": lambda d: {"x": np.where(d.random(N) < 0.9, 0, d.integers(500, 9000, N))},
    "two kinds of samples": two_kinds,
    "waiting for eruptions": lambda d: {"x": np.where(d.random(N) < 0.35, d.normal(2, 0.27, N), d.normal(4.3, 0.42, N)).round(2)},
    "a season": lambda d: {"x": (10 + 12 * np.sin(ROW / ROWS * 6.28) + d.normal(0, 2, N)).round(1)},
    "a meter that counts": lambda d: {"x": np.cumsum(d.exponential(3, N)).round(1)},
    "prices from day to day": lambda d: {"x": walk(d).round(2)},
    "rates that stay a while": lambda d: {"x": np.repeat(np.exp(d.normal(1, 0.6, 12)), 30).round(2)},
    "wealth": lambda d: {"x": (d.pareto(1.2, N) * 1000).round(0)},
    "a Cauchy distribution": lambda d: {"x": d.standard_cauchy(N).round(3)},
    "returns": lambda d: {"x": d.standard_t(3, N).round(4)},
    "degrees in winter": lambda d: {"x": d.normal(1.5, 3, N).round(0)},
    "worse, same, better": lambda d: {"x": d.integers(-1, 2, N)},
    "a scale from -1": lambda d: {"x": d.integers(-1, 4, N)},
    "a balance below 0": lambda d: {"x": np.where(d.random(N) < 0.02, -d.integers(1, 9, N), d.integers(5, 900, N))},
    "percentiles": lambda d: {"x": np.clip(d.normal(70, 25, N), 1, 99).round(0)},
    "saturations": lambda d: {"x": np.clip(d.normal(97, 1.6, N), 85, 99).round(0)},
    "scores up to 100": lambda d: {"x": np.clip(d.normal(85, 15, N), 0, 100).round(0)},
    "prices": lambda d: {"x": d.choice([4.99, 9.99, 14.99, 24.5, 49.99, 99, 129, 199, 299, 499, 899, 999, 1299], N)},
    "a client with a gain": lambda d: {"x": (d.normal(size=N) * per_client(1, 1.2, 0.8, 3.5, 0.9, 1)).round(3)},
    "axes of phones": lambda d: {name: (d.normal(0, 1, N) + 9.81 * (i == CLIENT % 3)).round(3) for i, name in enumerate("xyz")},
    "years": lambda d: {"x": d.integers(1998, 2024, N)},
    "hours": lambda d: {"x": np.arange(N) % 24},
    "places": lambda d: {"x": (per_client(52, 48, 51, 53, 50, 49) + d.normal(0, 0.05, N)).round(4)},
    "a clinic for children": lambda d: {"age": np.where(CLIENT == 2, d.integers(0, 17, N), d.integers(18, 90, N))},
    "speeds of machines": lambda d: {"x": d.choice([600, 1200, 1800, 3000], N) + d.normal(0, 5, N).round(0)},
    "a speed of each client": lambda d: {"x": per_client(1500, 1500, 1500, 3000, 1500, 750) + d.normal(0, 8, N).round(0)},
    "larger from a day on": lambda d: {"x": np.where(HALF, d.normal(200, 12, N), d.normal(970, 40, N)).round(1)},
    "before and after": lambda d: {"x": np.where(ROW % 2, d.normal(150, 12, N), d.normal(128, 10, N)).round(0)},
    "a client that gives one dose": lambda d: {"x": np.where(CLIENT == 1, 50, d.normal(50, 9, N).round(0))},
    "frequencies": lambda d: {"x": np.exp(d.uniform(0, 9, N)).round(2)},
    "few in hospital for long": lambda d: {"x": np.where(d.random(N) < 0.1, d.integers(300, 900, N), d.integers(0, 30, N))},
    "acidity": lambda d: {"x": d.normal(7.4, 0.05, N).round(2)},
    "0 and 1 with another sign at a client": reversed_at_a_client,
    "a client of smokers": lambda d: {"x": (d.random(N) < per_client(0.2, 0.25, 0.85, 0.2, 0.15, 0.3)).astype(int)},
    "dry weeks": lambda d: {"x": np.where(np.repeat(d.random(N // 12) < 0.8, 12), 0, np.exp(d.normal(1, 1, N))).round(1)},
    "machines off at night": lambda d: {"x": np.where(ROW % 24 < 9, 0, d.normal(40, 6, N)).round(1)},
    "values that are set": lambda d: {"x": steps(d)},
    "three decimals over decades": lambda d: {"x": np.exp(d.normal(1.5, 1.5, N)).round(3)},
    "eighths of an inch": lambda d: {"x": d.integers(8, 800, N) / 8},
    "numbers of people": lambda d: {"x": np.exp(d.normal(8, 2.5, N)).round(0)},
    "finer scales at a client": lambda d: {"x": np.where(CLIENT == 3, d.normal(75, 12, N).round(3), d.normal(75, 12, N).round(0))},
    "a square of another column": lambda d: {"x": np.array(PLAIN["age"]) ** 2},
    "a logarithm of another column": lambda d: {"x": np.log(PLAIN["glucose"]).round(4)},
    "clients of several sizes": lambda d: {"x": (per_client(1, 3.7, 14, 0.4, 6.1, 2.2) * np.exp(d.normal(3, 0.3, N))).round(2)},
    "a third of the clients inland": lambda d: {"x": (per_client(1, 1, 1, 1, 0, 0) * 9 + d.normal(14, 1.5, N)).round(1)},
    "levels that two kinds exchange": by_label,
    "mostly full": lambda d: {"x": np.where(d.random(N) < 0.6, 100, d.uniform(20, 100, N)).round(1)},
    "usual doses": lambda d: {"x": np.where(d.random(N) < per_client(0.2, 0.2, 0.6, 0.3, 0.2, 0.4), 500, d.normal(480, 90, N).round(0))},
    "pressures, high and low": lambda d: {"high": d.normal(128, 17, N).round(0), "low": d.normal(82, 11, N).round(0)},
}  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", UNUSUAL)
def test_an_unusual_table_passes(kind: str, seed: int, tmp_path: Path) -> None:
    assert named_in(tmp_path / "a.csv", patients(seed, **UNUSUAL[kind](np.random.default_rng(1000 + seed))))[0] == ()


@pytest.mark.parametrize("by", ["age", "label", "glucose"])
def test_a_sorted_table_passes(by: str, tmp_path: Path) -> None:
    columns = PLAIN
    order = sorted(range(N), key=lambda row: columns[by][row])
    assert named_in(tmp_path / "a.csv", {name: [column[row] for row in order] for name, column in columns.items()})[0] == ()


def test_two_kinds_of_samples_are_no_units() -> None:
    """Sides that another column or the label tells apart are two kinds, whatever their ratio is."""
    draws = np.random.default_rng(0)
    kind = draws.random(N) < 0.4
    columns = {"x": np.where(kind, 100.0, 1.0) * draws.normal(5, 0.3, N)}
    assert mixed_units(columns, draws.integers(0, 2, N), CLIENT)["x"].sure
    assert mixed_units(columns, kind.astype(int), CLIENT) == {}
    assert mixed_units({**columns, "y": draws.normal(kind, 1.0)}, draws.integers(0, 2, N), CLIENT) == {}


@pytest.mark.parametrize(
    "cells", [["1", " 2.5", "1_0", "x", "", "1e40"], [1, 2.5, True, 10**400], [None, 1.5], ["1", "-3e2"], [float("inf"), 2.0], []]
)
def test_cells_are_read_together_as_one_by_one(cells: list[Any]) -> None:
    assert np.array_equal(cell_numbers(cells), np.array([cell_number(cell) for cell in cells], float), equal_nan=True)


def notes_of(columns: Mapping[str, Array], labels: Array, clients: Array) -> tuple[str, ...]:
    """The warnings and notes of columns of numbers, where numpy may give no warning."""
    cells = {name: column.tolist() for name, column in columns.items()}
    names = [f"c{client}" for client in range(int(clients.max()) + 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = column_remarks(cells, columns, ("label", labels, False), ("client", clients, names))
    return (*found.warnings, *found.notes)


@pytest.mark.parametrize("power", [-320, -300, -200, -40, 18, 25])
def test_numbers_near_the_ends_of_their_range_pass(power: int) -> None:
    draws = np.random.default_rng(0)
    x = draws.normal(size=(N, 3))
    some = {"x": x[:, 0], "large": x[:, 1] * 10.0**power, "positive": np.abs(x[:, 2]) * 10.0**power}
    assert notes_of(some, (x[:, 0] + draws.normal(size=N) > 0).astype(int), CLIENT) == ()


def test_columns_whose_values_return_are_not_the_same() -> None:
    """A sample at equal distances would see a part of the values only: no two, or those where both columns agree."""
    clients, place = np.repeat(np.arange(6), 10_000), np.arange(60_000) % 60
    draws = np.random.default_rng(0)
    some = {"minute": place * 1.0, "other": (7 * place) % 60 * 1.0, "half": place + 3.0 * (place % 10 > 0), "x": draws.normal(size=60_000)}
    assert notes_of(some, (some["x"] + draws.normal(size=60_000) > 0).astype(int), clients) == ()


@pytest.mark.parametrize("value", [0.1, 1 / 3])
@pytest.mark.parametrize("client", range(3))
def test_a_constant_column_of_a_client_is_not_of_other_rows(value: float, client: int) -> None:
    """The mean of equal numbers may be another number, so what is left of them is not 0."""
    draws = np.random.default_rng(client)
    x = draws.normal(size=(N, 2))
    column = np.where(client == CLIENT, value, x[:, 0] + draws.normal(size=N))
    found = notes_of({"x": x[:, 0], "y": x[:, 1], "z": column}, (x.sum(1) > 0).astype(int), CLIENT)
    assert [note for note in found if "all values of" not in note] == []


def test_a_client_with_one_row_of_a_label_is_not_said_to_have_other_labels() -> None:
    """One row follows other columns by chance alone."""
    for seed in range(10):
        draws = np.random.default_rng(seed)
        x = draws.normal(size=(N, 2))
        labels = (x[:, 0] + 0.5 * draws.normal(size=N) > 0).astype(int)
        labels[CLIENT == 2] = 0
        labels[2 * ROWS + seed] = 1
        assert notes_of({"x": x[:, 0], "y": x[:, 1]}, labels, CLIENT) == ()


def test_a_client_with_higher_counts_has_no_exchanged_rows() -> None:
    """Where another column is broad, many of its values are usual ones of the counts: so are the client's other rows not."""
    for seed in range(10):
        draws = np.random.default_rng(seed)
        clients = np.repeat(np.arange(8), 200)
        counts = draws.poisson(np.array([9.0, 4, 3, 3, 2.5, 2, 2, 2])[clients]).astype(float)
        some = {"visits": counts, "items": draws.negative_binomial(1, 0.1, 1600).astype(float)}
        labels = (counts + draws.normal(0, 2, 1600) > 3).astype(int)
        assert not [note for note in notes_of(some, labels, clients) if "exchanged" in note]


def test_a_client_that_has_hardly_another_value_has_no_sensor_that_stopped() -> None:
    for seed in range(10):
        draws = np.random.default_rng(seed)
        column = np.where(draws.random(N) < 0.3, 0.0, draws.integers(1, 16, N))
        column[CLIENT == 3] = 0
        column[3 * ROWS + 20] = 5
        assert not [
            note for note in notes_of({"x": column, "y": draws.normal(size=N)}, draws.integers(0, 2, N), CLIENT) if "sensor" in note
        ]
