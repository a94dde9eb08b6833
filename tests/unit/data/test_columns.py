"""A typed schema: how cells become features, which of them depends on the client alone, and the first schema of a table."""

import csv
import math
import tomllib
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cflpriv.algorithms import ALGORITHMS
from cflpriv.data import DataSpec, build_population
from cflpriv.data.column_guesses import guessed, source_of
from cflpriv.data.columns import Column, encoded, feature_names, moment, scaling_of
from cflpriv.data.raw_tables import TABLES
from cflpriv.errors import InputError
from cflpriv.experiments import load_config, parse_config
from cflpriv.experiments.config.table_starter import table_starter
from cflpriv.experiments.run.run import check_run
from cflpriv.experiments.sweep.sweep import load_sweep

SCHEMA = (
    Column("age", "number", range=(0.0, 100.0), blank="middle"),
    Column("dose", "number", blank="own"),
    Column("ward", "category", categories=("A", "B", ""), other=True),
    Column("day", "date", range=("2024-01-01", "2025-01-01"), blank="middle"),
    Column("note", "text", features=8),
    Column("id", "ignore"),
)
HEADER = ("id", "site", "age", "dose", "ward", "day", "note", "outcome")


def place_of(row: int) -> str:
    return f"row {row}"


def encoded_values(column: Column, cells: Sequence[Any]) -> list[list[float]]:
    features, _ = encoded(column, cells, place_of)
    assert features.shape == (len(cells), len(feature_names(column)))
    return [[round(float(value), 6) for value in row] for row in features]


def test_numbers_lie_between_the_ends_of_their_range() -> None:
    column = Column("x", "number", range=(0.0, 10.0), blank="middle")
    assert encoded_values(column, ["0", 10, " 5 ", "7.5", "", None, float("nan"), "NA", "?"]) == [
        [v] for v in (-1, 1, 0, 0.5, 0, 0, 0, 0, 0)
    ]
    features, clipped = encoded(column, ["-3", "11", "4"], place_of)
    assert (features[:, 0].tolist(), clipped) == ([-1.0, 1.0, pytest.approx(-0.2)], 2)


def test_categories_are_public_and_others_are_refused_or_one_more() -> None:
    column = Column("x", "category", categories=("a", "b"))
    assert encoded_values(column, ["a", " b ", "a"]) == [[1, 0], [0, 1], [1, 0]]
    with pytest.raises(InputError, match=r"row 1: 'A' is not in its categories in data\.columns, .* did you mean 'a'\?"):
        encoded(column, ["a", "A"], place_of)
    with pytest.raises(InputError, match=r"row 0: '' is not in its categories .* add \"\" for a blank"):
        encoded(column, [None], place_of)
    assert encoded_values(Column("x", "category", categories=("a",), other=True), ["a", "b", ""]) == [[1, 0], [0, 1], [0, 1]]
    assert encoded_values(Column("x", "category", categories=("1", "2")), [1, 2.0, "1.0"]) == [[1, 0], [0, 1], [1, 0]]
    assert encoded_values(Column("x", "category", categories=("True", "False")), [True, False]) == [[1, 0], [0, 1]]


def test_dates_are_places_in_a_range_and_cycles() -> None:
    column = Column("x", "date", range=("2024-01-01", "2024-12-31"), parts=("time", "year", "week", "day"), blank="middle")
    assert feature_names(column) == ("x.time", "x.year.sin", "x.year.cos", "x.week.sin", "x.week.cos", "x.day.sin", "x.day.cos")
    (row, noon, none) = encoded_values(column, ["2024-01-01", datetime(2024, 7, 1, 12), ""])
    assert row == [-1, 0, 1, 0, 1, 0, 1], "the first of January 2024 is a Monday"
    assert noon[5:] == [0, -1]
    assert none == [0] * 7
    assert encoded_values(column, [date(2024, 12, 31)])[0][0] == 1
    assert encoded_values(Column("x", "date", range=("01.02.2024", "03.02.2024"), format="%d.%m.%Y", parts=("time",)), ["02.02.2024"]) == [
        [0]
    ]
    assert moment("2024-05-31T12:00:00+02:00") == datetime(2024, 5, 31, 10, tzinfo=UTC)
    with pytest.raises(InputError, match=r"row 0: '31\.05\.2024' is not a date; expected ISO 8601"):
        encoded(column, ["31.05.2024"], place_of)


def test_texts_are_hashed_without_a_vocabulary() -> None:
    column = Column("x", "text", features=16)
    one, other = (encoded(column, cells, place_of)[0] for cells in (["a b", "c", ""], ["c"]))
    assert np.array_equal(one[1], other[0]), "a row's features depend on the row alone"
    assert np.allclose(np.linalg.norm(one, axis=1), [1, 1, 0])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"type": "number", "range": (1.0,)}, r"range = \[1.0\]: expected \[low, high\]"),
        ({"type": "number", "range": (3.0, 2.0)}, "the lower before the higher"),
        ({"type": "number", "range": ("a", "b")}, "expected two numbers"),
        ({"type": "number", "blank": "middle"}, "blank = 'middle': needs a public range"),
        ({"type": "date"}, r"range = \[\]: expected \[low, high\]"),
        ({"type": "date", "range": ("a", "b")}, "expected two dates as text"),
        ({"type": "date", "range": ("2024-01-01", "2025-01-01"), "blank": "own"}, "is for numbers"),
        ({"type": "category"}, "expected all values of the category"),
        ({"type": "category", "categories": ("1", "1.0")}, "has '1' twice"),
        ({"type": "text", "categories": ("a",)}, "categories = .*is for type 'category', and this is 'text'"),
        ({"type": "text", "features": 0}, r"features = 0: expected an integer in \[1, 65536\]"),
    ],
)
def test_keys_of_a_column_that_do_not_fit_are_named(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=f"data.columns 'x'.*{words}"):
        Column("x", **keys)


def visits(sites: int = 4, each: int = 20) -> list[list[object]]:
    draws = np.random.default_rng(0)
    return [
        [
            1000 + 7 * i + site, f"s{site}", draws.integers(20, 80) if i % 5 else "",
            f"{draws.normal(site * 10, 2):.2f}" if i % 7 else "NA",
            "ABC"[i % 3], f"2024-0{1 + i % 9}-1{i % 10}", f"word{i % 4} and word{i % 3}", ("yes", "no")[i % 2],
        ]
        for site in range(sites)
        for i in range(each)
    ]  # fmt: skip


def csv_of(path: Path, table: Sequence[Sequence[object]], header: Sequence[str] = HEADER) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *table])
    return path


def schema_spec(path: Path, schema: tuple[Column, ...] = SCHEMA, **changes: Any) -> DataSpec:
    keys: dict[str, Any] = {"partition": "given", "label_column": "outcome", "client_column": "site", "columns": schema, **changes}
    return DataSpec(source="csv", paths=(str(path),), **keys)


def test_no_statistic_crosses_clients(tmp_path: Path) -> None:
    """Other rows of one client change nothing for another, also where blanks are filled and numbers standardised."""
    table = visits()
    changed = [row if row[1] != "s3" else [*row[:3], "1e6", *row[4:]] for row in table]
    ours, theirs = (build_population(schema_spec(csv_of(tmp_path / f"{name}.csv", t))) for name, t in (("a", table), ("b", changed)))
    for a, b in zip(ours.clients[:3], theirs.clients[:3], strict=True):
        assert np.array_equal(a.x_train, b.x_train)
        assert np.array_equal(a.x_test, b.x_test)
    assert (ours.mean, ours.std) == (theirs.mean, theirs.std)
    features = [name for column in SCHEMA for name in feature_names(column)]
    dose = features.index("dose")
    for client in ours.clients:
        z = (client.x_train[:, 0, 0, dose] - ours.mean[0]) / ours.std[0]
        assert abs(z.mean()) < 1e-5, "a blank is the mean of the client's own rows"
        every = np.concatenate([client.x_train, client.x_test])[:, 0, 0, dose]
        assert (np.abs((every - ours.mean[0]) / ours.std[0]) < 1e-6).sum() == 3
    assert scaling_of(SCHEMA).per_client
    assert not scaling_of([column for column in SCHEMA if column.name != "dose"]).per_client


def test_a_client_of_blanks_alone_has_zeros(tmp_path: Path) -> None:
    table = [row if row[1] != "s1" else [*row[:3], "", *row[4:]] for row in visits()]
    population = build_population(schema_spec(csv_of(tmp_path / "a.csv", table)))
    dose = [name for column in SCHEMA for name in feature_names(column)].index("dose")
    assert np.allclose((population.clients[1].x_train[:, 0, 0, dose] - population.mean[0]) / population.std[0], 0, atol=1e-6)


@pytest.mark.parametrize(
    ("schema", "header", "words"),
    [
        (SCHEMA[:-1], HEADER, r"column 'id' is not in data\.columns; add it there \(type = 'ignore' leaves it out\)"),
        ((*SCHEMA, Column("height", "number", range=(0.0, 1.0))), HEADER, r"has no column 'height' \(data\.columns\)"),
        (SCHEMA, ("id", "site", "Age", *HEADER[3:]), r"column 'Age' is not in data\.columns \('age' is, and missing here\)"),
        ((*SCHEMA, Column("outcome", "ignore")), HEADER, "'outcome' is also the column of label"),
        ((*SCHEMA, Column("age", "ignore")), HEADER, "columns = 'age': is there twice"),
    ],
)
def test_columns_of_table_and_schema_must_be_the_same(
    schema: tuple[Column, ...], header: Sequence[str], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words):
        build_population(schema_spec(csv_of(tmp_path / "a.csv", visits(), header), schema))


def test_other_keys_of_features_do_not_go_with_a_schema(tmp_path: Path) -> None:
    path = csv_of(tmp_path / "a.csv", visits())
    for changes in ({"feature_columns": ("age",)}, {"standardise": "none"}):
        with pytest.raises(InputError, match="already says of each column"):
            build_population(schema_spec(path, **changes))
    with pytest.raises(InputError, match="only tables have columns"):
        build_population(DataSpec(columns=SCHEMA))


def test_a_cell_that_does_not_fit_is_named(tmp_path: Path) -> None:
    table = visits()
    table[4][2] = "many"
    with pytest.raises(InputError, match=r"a\.csv: row 6, column 'age': 'many' is not a finite number; change it, or the column's type"):
        build_population(schema_spec(csv_of(tmp_path / "a.csv", table)))


def test_samples_are_private_with_public_ranges_only() -> None:
    column = {"name": "age", "type": "number", "range": [0, 100]}
    tree: dict[str, Any] = {
        "data": {"source": "csv", "paths": ["a.csv"], "label_column": "y", "columns": [column]},
        "privacy": {"unit": "sample", "epsilon": 1.0, "delta": 1e-5, "samples": 20},
        "training": {"weights": "equal"}, "algorithm": {"name": "fedavg"},
    }  # fmt: skip
    assert parse_config(tree).data.columns == (Column("age", "number", range=(0.0, 100.0)),)
    for changed in ({**column, "range": []}, {**column, "blank": "own"}):
        with pytest.raises(InputError, match=r"under privacy\.unit = 'sample'"):
            parse_config({**tree, "data": {**tree["data"], "columns": [changed]}})
    for wrong, words in (({"nam": "age"}, "did you mean 'name'"), ({"name": "a", "type": "numbr"}, "type = 'numbr'")):
        with pytest.raises(InputError, match=words):
            parse_config({**tree, "data": {**tree["data"], "columns": [wrong]}})
    with pytest.raises(InputError, match=r"\[\[data\.columns\]\]: expected a list of tables"):
        parse_config({**tree, "data": {**tree["data"], "columns": ["age"]}})


# --- the first schema of a table ----------------------------------------------------------------------------------------------------------


def guess_of(tmp_path: Path, name: str, cells: Sequence[object]) -> Column:
    table = [[cell, i / 7, ("a", "b")[i % 2], i % 3] for i, cell in enumerate(cells)]
    column, _ = guessed(csv_of(tmp_path / "a.csv", table, (name, "other", "label", "client"))).columns
    return column


@pytest.mark.parametrize(
    ("cells", "column"),
    [
        ([18, 44, 88, 61] * 10, Column("x", "number", range=(10.0, 90.0))),
        (["1.5", "", "NA", "2.5"] * 10, Column("x", "number", range=(1.5, 2.5), blank="middle")),
        ([7] * 40, Column("x", "number", range=(6.0, 8.0))),
        (["red", "blue", ""] * 20, Column("x", "category", categories=("", "blue", "red"))),
        (["True", "False"] * 20, Column("x", "category", categories=("False", "True"))),
        (["2024-01-05", "2024-03-31"] * 20, Column("x", "date", range=("2024-01-01", "2024-04-01"), parts=("time",))),
        (["31.12.2022", "05.01.2021", ""] * 20, Column("x", "date", range=("01.01.2021", "01.01.2023"), format="%d.%m.%Y", blank="middle")),
        ([f"a note of {i % 30} words" for i in range(60)], Column("x", "text")),
        ([f"p{i:04d}" for i in range(40)], Column("x", "ignore")),
        (list(range(40)), Column("x", "ignore")),
        ([""] * 40, Column("x", "ignore")),
        ([f"code{i % 70}" for i in range(200)], Column("x", "text")),
        ([f"{i},5" for i in range(60)], Column("x", "ignore")),
    ],
)
def test_a_column_is_guessed(cells: Sequence[object], column: Column, tmp_path: Path) -> None:
    assert guess_of(tmp_path, "x", cells) == column


def test_a_range_holds_its_values_unless_a_few_are_far_away(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    for scale in (1e-6, 1.0, 1e9):
        cells = (draws.normal(3, 1, 300) * scale).tolist()
        low, high = guess_of(tmp_path, "x", cells).ends
        assert low <= min(cells) < max(cells) <= high
        assert high - low < 2 * (max(cells) - min(cells))
    column = guess_of(tmp_path, "x", [*draws.normal(0, 1, 299).tolist(), 1e6])
    assert column.ends[1] < 10, "the outlier is clipped"


@pytest.mark.parametrize(
    ("name", "cells", "found"),
    [
        ("meter", [f"M{i % 24:02d}" for i in range(240)], True),
        ("Patient ID", [1000 + i % 12 for i in range(120)], True),
        ("userId", ["ann", "bob", "eve"] * 40, True),
        ("where", [f"ward {i % 9}" for i in range(90)], True),
        ("sensor", [f"{20 + i % 8}.5" for i in range(80)], False),  # readings
        ("station", [f"s{i}" for i in range(60)], False),  # a row each
        ("machine", [*["a", "b"] * 30, ""], False),  # a row of no machine
        ("grade", [f"grade {i % 5}" for i in range(100)], False),  # as few as categories
        ("tariff", ["flat", "night", "dynamic"] * 40, False),
        ("code", [f"{'AB'[i % 2]}{i % 9}" for i in range(180)], False),
    ],
)
def test_the_column_of_clients_is_found_by_its_name_and_values(name: str, cells: Sequence[object], found: bool, tmp_path: Path) -> None:
    table = [[cell, i / 7, ("a", "b")[i // 3 % 2]] for i, cell in enumerate(cells)]
    assert guessed(csv_of(tmp_path / "a.csv", table, (name, "other", "label"))).client == (name if found else "")


def test_label_and_client_are_found_by_name_or_asked_for(tmp_path: Path) -> None:
    path = csv_of(tmp_path / "a.csv", visits())
    guess = guessed(path)
    assert (guess.label, guess.client, guess.clients, guess.classes) == ("outcome", "site", 4, ("no", "yes"))
    assert [column.type for column in guess.columns] == ["ignore", "number", "number", "category", "date", "text"]
    assert guessed(path, "ward", "outcome").label == "ward"
    for options, words in (
        (("nothing",), r"has no column 'nothing' \(--label\)"),
        (("site", "site"), "both name 'site'"),
        (("age",), "age"),
    ):
        with pytest.raises(InputError, match=words):
            guessed(path, *options)
    with pytest.raises(InputError, match="is not a table that is known by its name"):
        source_of(tmp_path / "a.xlsx")
    assert math.isfinite(sum(guess.columns[1].ends))


def test_a_column_may_have_any_name(tmp_path: Path) -> None:
    names = ("", 'a "name"\nof two lines', "x.y, z", "País", "label")
    table = [[i, i / 7, i % 5, ("ES", "FR")[i % 2], ("a", "b")[i % 3 % 2]] for i in range(40)]
    starter = table_starter(csv_of(tmp_path / "a.csv", table, names), tmp_path / "a.toml", "crossfit")
    (tmp_path / "a.toml").write_text(starter.text, encoding="utf-8")
    config = load_config(tmp_path / "a.toml")
    assert tuple(column.name for column in config.data.columns) == names[:-1]
    assert len(build_population(config.data).clients) == 8
    with pytest.raises(InputError, match="no column beside 'label' is known to hold features"):
        guessed(csv_of(tmp_path / "b.csv", [[i, ("a", "b")[i % 2]] for i in range(40)], ("id", "label")))


def uncommented(text: str, section: str) -> str:
    """A configuration with one of its commented sections in use: its lines, up to an empty one, without their first "# "."""
    before, mark, after = text.partition(f"# [{section}]")
    own, gap, rest = f"{mark}{after}".partition("\n\n")
    lines = own.splitlines()
    assert mark
    assert all(line.startswith("# ") for line in lines)
    return before + "".join(f"{line[2:]}\n" for line in lines) + gap + rest


def test_the_sweep_of_a_first_configuration_runs_without_its_marks(tmp_path: Path) -> None:
    starter = table_starter(csv_of(tmp_path / "a.csv", visits()), tmp_path / "a.toml", "crossfit")
    (tmp_path / "a.toml").write_text(uncommented(starter.text, "sweep"), encoding="utf-8")
    sweep = load_sweep(tmp_path / "a.toml")
    assert [cell.problem for cell in sweep.cells] == [""] * 8
    assert [setting.name for setting in sweep.settings] == [
        f"{algorithm} · {protection}" for algorithm in ("crossfit", "fedavg") for protection in ("none", "protected")
    ]
    sums = {cell.setting.protection: cell.config.protection.sum for cell in sweep.cells if cell.config is not None}
    assert sums == {"none": "none", "protected": "secagg"}
    for cell in sweep.cells:
        assert cell.config is not None
        population = build_population(cell.config.data)
        check_run(cell.config, population, cell.config.algorithm_for(population), [client.id for client in population.clients])


def test_commented_sections_of_a_first_configuration_are_toml_without_their_marks(tmp_path: Path) -> None:
    few = csv_of(tmp_path / "few.csv", [[f"s{i % 2}", i % 7 * 1.5, ("a", "b")[i % 3 == 0]] for i in range(40)], ("client", "x", "label"))
    whole = csv_of(tmp_path / "a.csv", visits())
    for table, sections in ((whole, ("privacy", "sweep")), (few, ("protection", "run", "privacy"))):
        text = table_starter(table, tmp_path / "a.toml", "crossfit").text
        plain = tomllib.loads(text)
        for section in sections:
            assert section not in plain
            text = uncommented(text, section)
            assert tomllib.loads(text).keys() - plain.keys() == set(sections[: sections.index(section) + 1])


def test_small_clusters_are_merged_where_a_first_configuration_compares_clients(tmp_path: Path) -> None:
    table = csv_of(tmp_path / "a.csv", visits())
    for name, merges in (("crossfit", True), ("pacfl", True), ("fedavg", False), ("ifca", False)):
        keys = tomllib.loads(table_starter(table, tmp_path / "a.toml", name).text)["protection"]
        assert keys.get("small_clusters") == ("merge" if merges else None)


PROTECTIONS = {"fedproto": "secagg-oblivious", "private_clusters": "none", "rr_cluster": "none", "pina": "none", "fedrc": "none"}
"""Of algorithms that do not take the strongest protection of a first configuration."""


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS.names()) - {"oracle"}))
def test_a_first_configuration_has_a_protection_that_its_algorithm_takes(name: str, tmp_path: Path) -> None:
    table = csv_of(tmp_path / "a.csv", visits())
    starter = table_starter(table, tmp_path / "a.toml", name)
    (tmp_path / "a.toml").write_text(starter.text, encoding="utf-8")
    config = load_config(tmp_path / "a.toml")
    population = build_population(config.data)
    check_run(config, population, config.algorithm_for(population), [client.id for client in population.clients])
    assert config.protection.sum == PROTECTIONS.get(name, "secagg")
    assert config.protection.relay_updates == (name in ("pfedlia", "fedfomo"))
    reasons = [line for line in starter.lines if line.startswith("the server sees each update, for protection.sum = ")]
    assert len(reasons) == (config.protection.sum == "none")


def test_an_algorithm_that_takes_no_table_is_refused_before_its_file_is_written(tmp_path: Path) -> None:
    table = csv_of(tmp_path / "a.csv", visits())
    with pytest.raises(InputError, match="true groups of these clients are unknown"):
        table_starter(table, tmp_path / "a.toml", "oracle")


def test_other_sources_are_guessed_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {
        "age": [30.0, None, 45.0, 61.0] * 10, "day": [date(2024, 1, 5), date(2024, 3, 31)] * 20, "ok": [True, False] * 20,
        "label": ["a", "b"] * 20,
    }  # fmt: skip
    monkeypatch.setitem(TABLES, "parquet", (lambda path: columns, 1))
    (tmp_path / "a.parquet").touch()
    assert guessed(tmp_path / "a.parquet").columns == (
        Column("age", "number", range=(30.0, 70.0), blank="middle"),
        Column("day", "date", range=("2024-01-01", "2024-04-01"), parts=("time",)),
        Column("ok", "category", categories=("False", "True")),
    )


@pytest.mark.parametrize("name", ["normal", "uniform", "lognormal", "heavy", "two peaks"])
def test_the_middle_of_a_column_takes_half_of_its_range(tmp_path: Path, name: str) -> None:
    """Whatever the tails are: the middle 96 % are told apart. Ends are rounded outwards, by a fifth of the width at most."""
    draws = np.random.default_rng(7)
    values = {
        "normal": draws.normal(size=400), "uniform": draws.uniform(size=400), "lognormal": np.exp(2 * draws.normal(size=400)),
        "heavy": draws.standard_t(1, size=400), "two peaks": np.concatenate([draws.normal(0, 1, 200), draws.normal(30, 1, 200)]),
    }[name]  # fmt: skip
    rows = [[f"s{i % 4}", f"{value:.6g}", ("a", "b")[i % 3 == 0]] for i, value in enumerate(values)]
    (column,) = guessed(csv_of(tmp_path / "a.csv", rows, ("client", "x", "label"))).columns
    low, high = column.ends
    first, last = np.quantile(values, [0.02, 0.98])
    assert low <= first < last <= high
    assert high - low <= 1.5 * 2 * (last - first)
