"""The user's own tables: columns by name, standardisation that crosses no trust boundary, a split by the configuration, exact errors."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cflpriv.data import DataSpec, build_population
from cflpriv.data.raw_tables import TABLES
from cflpriv.data.scaling import Scaling, scaled
from cflpriv.errors import InputError
from cflpriv.experiments.config.config import parse_config

HEADER = ("site", "region", "age", "dose", "outcome")


def written(path: Path, rows: Sequence[Sequence[object]], header: Sequence[str] = HEADER) -> Path:
    path.write_text("\n".join(",".join(map(str, row)) for row in (header, *rows)) + "\n", encoding="utf-8")
    return path


def people(sites: int = 4, each: int = 10) -> list[tuple[object, ...]]:
    draws = np.random.default_rng(0)
    return [
        (f"s{site}", "north" if site % 2 else "south", f"{draws.normal(50, 9):.3f}", f"{draws.normal(0, 2):.3f}", ("yes", "no")[i % 2])
        for site in range(sites)
        for i in range(each)
    ]


def spec(path: Path, **changes: Any) -> DataSpec:
    given: dict[str, Any] = {
        "source": "csv", "paths": (str(path),), "partition": "given", "label_column": "outcome", "client_column": "site",
        "group_column": "region",
    }  # fmt: skip
    return DataSpec(**{**given, **changes})


def test_a_table_gives_its_clients_groups_classes_and_split(tmp_path: Path) -> None:
    rows = people()
    population = build_population(spec(written(tmp_path / "a.csv", rows), test_share=0.3))
    assert [client.id for client in population.clients] == [0, 1, 2, 3]
    assert population.groups == (1, 0, 1, 0), "north is 0 and south 1, by the alphabet"
    assert population.class_names == ("no", "yes")
    assert population.shape == (1, 1, 2), "features are those columns that are nothing else"
    for site, client in enumerate(population.clients):
        assert (len(client.y_train), len(client.y_test)) == (7, 3), "of each client's rows a share is held out"
        labels = sorted([*client.y_train.tolist(), *client.y_test.tolist()])
        assert labels == sorted(int(row[4] == "yes") for row in rows if row[0] == f"s{site}")
    other = build_population(spec(tmp_path / "a.csv", test_share=0.3, seed=1))
    assert any(not np.array_equal(a.x_train, b.x_train) for a, b in zip(population.clients, other.clients, strict=True))


def model_input(population: Any, x: Any) -> Any:
    """What the model is given of samples."""
    return (x[:, 0, 0].astype(np.float64) - population.mean[0]) / population.std[0]


def test_a_client_is_standardised_by_its_own_training_rows_alone(tmp_path: Path) -> None:
    rows = people()
    population = build_population(spec(written(tmp_path / "a.csv", rows)))
    for client in population.clients:
        z = model_input(population, client.x_train)
        assert np.allclose(z.mean(0), 0, atol=1e-5)
        assert np.allclose(z.std(0), 1, atol=1e-5)
    moved = [row if row[0] != "s3" else (*row[:2], str(float(str(row[2])) * 7 + 4), *row[3:]) for row in rows]
    again = build_population(spec(written(tmp_path / "b.csv", moved)))
    for before, after in zip(population.clients[:3], again.clients[:3], strict=True):
        assert np.array_equal(before.x_train, after.x_train), "what one client has tells nothing to another"
        assert np.array_equal(before.x_test, after.x_test)
    assert (population.mean, population.std) == (again.mean, again.std), "what the server knows of the input is public"


def test_constants_are_public_and_recover_the_values(tmp_path: Path) -> None:
    rows = people()
    constants = {"standardise": "constants", "feature_mean": (50.0, 0.0), "feature_std": (9.0, 2.0)}
    population = build_population(spec(written(tmp_path / "a.csv", rows), **constants))
    for site, client in enumerate(population.clients):
        found = model_input(population, np.concatenate([client.x_train, client.x_test])) * (9.0, 2.0) + (50.0, 0.0)
        true = np.array([[float(str(row[2])), float(str(row[3]))] for row in rows if row[0] == f"s{site}"])
        assert np.allclose(np.sort(found, axis=0), np.sort(true, axis=0), atol=1e-4)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=20), st.floats(-50, 50), st.floats(0.01, 50), st.floats(0.1, 20))
def test_scaled_values_lie_in_the_unit_interval_and_only_those_beyond_are_changed(
    values: list[float], mean: float, std: float, width: float
) -> None:
    x = np.array(values, np.float32)[:, None, None, None]
    scaling = Scaling(-width, width, (mean,), (std,))
    train, test, clipped = scaled(scaling, x, x)
    z = (x.astype(np.float64) - mean) / std
    beyond = np.abs(z) > width
    assert clipped == 2 * beyond.sum()
    assert train.min() >= 0
    assert train.max() <= 1
    (low,), (deviation,) = scaling.statistics
    back = (train.astype(np.float64) - low) / deviation
    assert np.allclose(back[~beyond], z[~beyond], atol=1e-5 * width)
    assert np.array_equal(train, test)


def test_clipped_values_are_counted_in_a_note(tmp_path: Path) -> None:
    rows = people()
    rows[5] = (*rows[5][:2], 1e6, *rows[5][3:])
    constants = {"standardise": "constants", "feature_mean": (50.0, 0.0), "feature_std": (9.0, 2.0)}
    population = build_population(spec(written(tmp_path / "a.csv", rows), **constants))
    assert any("1 standardised values beyond [-5, 5]" in note for note in population.notes)


def test_groups_without_clients_are_divided_among_as_many_as_asked(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", people())
    population = build_population(spec(path, partition="kinds", client_column="", clients=4, feature_columns=("age", "dose")))
    assert population.groups == (0, 1, 0, 1)
    assert sum(client.samples for client in population.clients) == 32


def test_test_rows_of_their_own_file_and_classes_by_the_configuration(tmp_path: Path) -> None:
    train, test = written(tmp_path / "a.csv", people()), written(tmp_path / "b.csv", people(each=3))
    population = build_population(spec(train, paths=(str(train), str(test)), class_names=("yes", "no", "unknown")))
    assert (population.classes, population.class_names) == (3, ("yes", "no", "unknown"))
    assert [(len(one.y_train), len(one.y_test)) for one in population.clients] == [(10, 3)] * 4


@pytest.mark.parametrize(
    ("row", "cell", "value", "changes", "words"),
    [
        (4, 2, "many", {}, r"a\.csv: row 6, column 'age': 'many' is not a finite number"),
        (4, 2, "nan", {}, r"row 6, column 'age': 'nan'"),
        (4, 2, "2020_01", {}, r"row 6, column 'age': '2020_01' is not a finite number"),
        (4, 2, "", {}, r"row 6, column 'age': ''"),
        (0, 0, "", {}, r"row 2, column 'site': is empty; data\.client_column"),
        (2, 4, "", {}, r"row 4, column 'outcome': is empty; data\.label_column"),
        (7, 1, "west", {}, r"client 's0' has rows of the groups 'south' and 'west'"),
        (3, 4, "maybe", {"class_names": ("no", "yes")}, r"row 5, column 'outcome': 'maybe' is not in data\.class_names"),
        (9, 3, "41", {"standardise": "none", "value_range": (-40.0, 90.0)}, ""),
        (9, 3, "91", {"standardise": "none", "value_range": (-40.0, 90.0)}, r"row 11, column 'dose': 91 is outside data\.value_range"),
    ],
)
def test_a_wrong_cell_is_named(tmp_path: Path, row: int, cell: int, value: str, changes: dict[str, Any], words: str) -> None:
    rows = [list(one) for one in people()]
    rows[row][cell] = value
    path = written(tmp_path / "a.csv", rows)
    if not words:
        build_population(spec(path, **changes))
        return
    with pytest.raises(InputError, match=words) as caught:
        build_population(spec(path, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"label_column": "result"}, r"has no column 'result' \(data\.label_column\); its columns are site, region, age, dose, outcome"),
        ({"feature_columns": ("age", "height")}, r"no column 'height' \(data\.feature_columns\)"),
        ({"feature_columns": ("age", "site")}, r"feature_columns: 'site' is also"),
        ({"label_column": ""}, "label_column = '': source = 'csv' needs"),
        ({"client_column": ""}, "client_column = '': partition = 'given' needs"),
        ({"standardise": "constants"}, r"feature_mean = \(\): standardise = 'constants' needs it"),
        ({"feature_mean": (1.0,)}, r"feature_mean = \(1\.0,\): goes with standardise = 'constants'"),
        ({"standardise": "constants", "feature_mean": (1.0,) * 3, "feature_std": (1.0,)}, "feature_mean has 3 values for 2 features"),
        ({"standardise": "constants", "feature_mean": (1.0,), "feature_std": (0.0,)}, r"feature_std = .*> 0"),
        ({"value_range": (2.0, 1.0)}, "value_range"),
        ({"class_names": ("a", "a")}, "names a class twice"),
        ({"paths": ("a.csv", "b.csv"), "test_share": 0.3}, r"test_share = 0\.3: the second of data\.paths holds the test rows"),
        ({"minimum": 3}, "minimum = 3: only partition = 'dirichlet'"),
        ({"noise_labels": 3}, "noise_labels = 3: only partition = 'pathological' or 'kinds'"),
        ({"source": "npz", "partition": "iid"}, "only tables have columns"),
        ({"source": "digits", "paths": (), "standardise": "none", "partition": "iid"}, "label_column|standardise"),
    ],
)
def test_keys_that_do_not_fit_are_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        build_population(spec(written(tmp_path / "a.csv", people()), **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        (["a,outcome,site", "", "", "1,x,s", "2,y,s", "", "b,x,s"], 7),
        (['"a\nof two lines",outcome,site', "1,x,s", "2,y,s", "b,x,s"], 5),
        (["a,outcome,site", '1,"x\n",s', "2,y,s", "b,x,s"], 5),
        (["a,outcome,site\r", "\r", "1,x,s\r", "2,y,s\r", "b,x,s\r"], 5),
    ],
)
def test_the_number_of_a_row_is_its_line_in_the_file(lines: list[str], number: int, tmp_path: Path) -> None:
    """Blank lines count, and line breaks in quotes."""
    (tmp_path / "a.csv").write_bytes("\n".join(lines).encode())
    with pytest.raises(InputError, match=rf"a\.csv: row {number}, column 'a.*': 'b' is not a finite number"):
        build_population(spec(tmp_path / "a.csv", group_column=""))
    lines[-1] = "1,2"
    (tmp_path / "a.csv").write_bytes("\n".join(lines).encode())
    with pytest.raises(InputError, match=rf"a\.csv: row {number} has 2 cells, expected 3"):
        build_population(spec(tmp_path / "a.csv", group_column=""))


def test_a_header_is_needed_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="two columns 'age'"):
        build_population(spec(written(tmp_path / "a.csv", [], ("site", "age", "age"))))
    (tmp_path / "b.csv").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="has no header"):
        build_population(spec(tmp_path / "b.csv"))
    with pytest.raises(InputError, match="has no rows"):
        build_population(spec(written(tmp_path / "c.csv", [])))


@pytest.mark.parametrize("name", ["", "__index_level_0__"])
def test_an_index_that_pandas_wrote_is_no_feature(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "a.csv", [(i, *row) for i, row in enumerate(people())], (name, *HEADER))
    with pytest.raises(InputError, match=rf"a\.csv: column 1 \('{name}'\) is an index, .* data\.feature_columns"):
        build_population(spec(path))
    assert build_population(spec(path, feature_columns=("age", "dose"))).shape == (1, 1, 2)


def test_values_close_together_and_far_from_zero_keep_their_differences(tmp_path: Path) -> None:
    """Such as seconds since 1970: of float32 the next one is 128 s away."""
    near = [(*row[:2], i % 10, *row[3:]) for i, row in enumerate(people())]
    far = [(*row[:2], 1_700_000_000 + i % 10, *row[3:]) for i, row in enumerate(near)]
    ours, theirs = (build_population(spec(written(tmp_path / f"{name}.csv", rows))) for name, rows in (("far", far), ("near", near)))
    for a, b in zip(ours.clients, theirs.clients, strict=True):
        assert np.allclose(a.x_train, b.x_train, atol=1e-6)


def test_an_npz_of_features_may_have_any_range(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    x, y = draws.normal(300, 40, (40, 3)), np.arange(40) % 2
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:10], y_test=y[:10], class_names=np.array(["cat", "dog"]))
    given = DataSpec(source="npz", paths=(str(tmp_path / "a.npz"),), clients=2)
    with pytest.raises(InputError, match=r"expected values in 0\.\.1"):
        build_population(given)
    with pytest.raises(InputError, match=r"feature \d of sample \d+ is .* outside data\.value_range = \[0, 1\]"):
        build_population(DataSpec(**{**vars(given), "standardise": "none"}))
    population = build_population(DataSpec(**{**vars(given), "standardise": "per_client"}))
    assert population.class_names == ("cat", "dog")
    for client in population.clients:
        assert np.allclose(model_input(population, client.x_train).mean(0), 0, atol=1e-5)


def test_own_statistics_are_refused_under_sample_level_privacy() -> None:
    data = {"source": "csv", "paths": ["a.csv"], "label_column": "y"}
    privacy = {"unit": "sample", "epsilon": 1.0, "delta": 1e-5, "samples": 20}
    tree: dict[str, Any] = {"data": data, "privacy": privacy, "training": {"weights": "equal"}, "algorithm": {"name": "fedavg"}}
    with pytest.raises(InputError, match=r"data\.standardise = 'auto' under privacy\.unit = 'sample'"):
        parse_config(tree)
    parse_config({**tree, "data": {**data, "standardise": "constants", "feature_mean": [0.0], "feature_std": [1.0]}})


# --- Parquet ------------------------------------------------------------------------------------------------------------------------


def columns_of(rows: Sequence[Sequence[object]]) -> dict[str, list[object]]:
    """Typed columns, as a Parquet file has them."""
    typed = [(site, region, float(str(age)), float(str(dose)), outcome) for site, region, age, dose, outcome in rows]
    return {name: [row[i] for row in typed] for i, name in enumerate(HEADER)}


def test_parquet_is_read_as_csv_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pyarrow, or where it is not installed with a stand-in for its reader."""
    path, rows = tmp_path / "a.parquet", people()
    try:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table(columns_of(rows)), path)
    except ImportError:
        path.write_bytes(b"PAR1")
        fake: Any = ModuleType("pyarrow")
        fake.parquet = ModuleType("pyarrow.parquet")
        fake.parquet.read_table = lambda where: type("Table", (), {"to_pydict": lambda self: columns_of(rows)})()
        fake.parquet.read_metadata = lambda where: SimpleNamespace(num_rows=len(rows), num_columns=len(columns_of(rows)))
        monkeypatch.setitem(sys.modules, "pyarrow", fake)
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", fake.parquet)
    ours, theirs = build_population(spec(path, source="parquet")), build_population(spec(written(tmp_path / "a.csv", rows)))
    assert (ours.groups, ours.class_names) == (theirs.groups, theirs.class_names)
    for a, b in zip(ours.clients, theirs.clients, strict=True):
        assert np.array_equal(a.x_train, b.x_train)
        assert np.array_equal(a.y_test, b.y_test)


def test_missing_names_are_named_and_whole_numbers_are_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of whole numbers is one of floats where a cell is missing, in one of two files, say."""
    train = columns_of(people()) | {"outcome": [i % 2 for i in range(40)]}
    test: dict[str, list[Any]] = train | {"outcome": [float(i % 2) for i in range(40)]}
    files = {"train": train, "test": test}
    monkeypatch.setitem(TABLES, "parquet", (lambda path: files[path.name], 1))
    for name in files:
        (tmp_path / name).touch()
    both = spec(tmp_path, source="parquet", paths=(str(tmp_path / "train"), str(tmp_path / "test")))
    assert build_population(both).class_names == ("0", "1")
    test["outcome"][3] = float("nan")
    with pytest.raises(InputError, match=r"test: row 4, column 'outcome': is empty; data\.label_column needs a value"):
        build_population(both)


def test_without_pyarrow_parquet_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"a\.parquet: Parquet needs pyarrow; pip install 'cflpriv\[parquet\]'"):
        build_population(spec(tmp_path / "a.parquet", source="parquet"))


def test_a_saved_hugging_face_dataset_is_read_as_csv_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With datasets, or where it is not installed with a stand-in for its reader."""
    path, rows = tmp_path / "saved", people()
    try:
        from datasets import Dataset

        Dataset.from_dict(columns_of(rows)).save_to_disk(str(path))
    except ImportError:
        path.mkdir()
        fake: Any = ModuleType("datasets")
        fake.Dataset = type(
            "Dataset",
            (),
            {
                "to_dict": lambda self: columns_of(rows),
                "num_rows": len(rows) - 1,
                "num_columns": len(rows[0]),
                "features": dict.fromkeys(HEADER),
            },
        )
        fake.load_from_disk = lambda where: fake.Dataset() if where == str(path) else {"train": fake.Dataset()}
        monkeypatch.setitem(sys.modules, "datasets", fake)
        (tmp_path / "both").mkdir()
        with pytest.raises(InputError, match=r"both: holds the splits train; name the folder of one"):
            build_population(spec(tmp_path / "both", source="huggingface"))
    ours, theirs = build_population(spec(path, source="huggingface")), build_population(spec(written(tmp_path / "a.csv", rows)))
    assert (ours.groups, ours.class_names) == (theirs.groups, theirs.class_names)
    for a, b in zip(ours.clients, theirs.clients, strict=True):
        assert np.array_equal(a.x_train, b.x_train)
        assert np.array_equal(a.y_test, b.y_test)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"saved: needs datasets; pip install 'cflpriv\[huggingface\]'"):
        build_population(spec(path, source="huggingface"))


@pytest.mark.parametrize(("named", "words"), [("site", "1 client (0 = s0)"), ("number", "1 client;")])
def test_the_note_counts_one_in_the_singular_and_names_no_number_by_itself(named: str, words: str, tmp_path: Path) -> None:
    rows = [(*row, 0) for row in people(1, 20)]
    path = written(tmp_path / "a.csv", rows, (*HEADER, "number"))
    (note,) = [
        note
        for note in build_population(spec(path, client_column=named, feature_columns=("age", "dose")), None).notes
        if note.startswith("own table")
    ]
    assert words in note
    assert "1 group (0 = south)" in note
