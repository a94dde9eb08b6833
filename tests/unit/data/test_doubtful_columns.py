"""Tables that can be read and are hardly what was meant are named; their good siblings pass in silence."""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cflpriv.data import DataSpec, build_population
from cflpriv.data.class_names import accidental_pairs, combined, misspelt, strangers
from cflpriv.data.column_guesses import guessed
from cflpriv.data.columns import Column, encoded, nested, shown
from cflpriv.data.doubtful_units import mixed_units
from cflpriv.data.doubtful_values import Numbers, far_values, filler, inner_filler, missing_code, zeros_apart
from cflpriv.data.huggingface import _decoded
from cflpriv.data.raw_tables import TABLES
from cflpriv.errors import InputError

ROWS = 120
Cells = dict[str, list[Any]]


def cells(**more: Sequence[Any]) -> Cells:
    """A good table of four clients, two classes and two features, with columns that are added or replaced."""
    draws = np.random.default_rng(0)
    labels = draws.integers(0, 2, ROWS)
    return {
        "client": [f"s{i % 4}" for i in range(ROWS)], "age": [f"{x:.2f}" for x in draws.normal(50, 9, ROWS)],
        "dose": [f"{x:.3f}" for x in draws.normal(0, 2, ROWS) + labels], "label": ["no" if x else "yes" for x in labels],
        **{name: list(column) for name, column in more.items()},
    }  # fmt: skip


def saved_table(
    path: Path, table: Mapping[str, Sequence[Any]], before: str = "", after: str = "", mark: str = ",", header: bool = True
) -> Path:
    rows = [mark.join(map(str, row)) for row in zip(*table.values(), strict=True)]
    path.write_text("\n".join([*([mark.join(table)] if header else []), *rows]) + "\n" + after, encoding="utf-8")
    return path


def remarks(paths: Sequence[Path], **keys: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The warnings and the notes of a table."""
    spec = {"partition": "given", "client_column": "client", "label_column": "label", **keys}
    population = build_population(DataSpec(**{"source": "csv", "paths": tuple(map(str, paths)), **spec}))
    return population.warnings, population.notes


def every(step: int, cell: str, name: str) -> Cells:
    """The good table with another cell in each `step`-th row of a column."""
    table = cells()
    return table | {name: [cell if i % step == 0 else kept for i, kept in enumerate(table[name])]}


def test_a_good_table_passes(tmp_path: Path) -> None:
    assert remarks([saved_table(tmp_path / "a.csv", cells())])[0] == ()


# --- warnings and notes -----------------------------------------------------------------------------------------------------------------

GOOD = cells()
WARNED: dict[str, tuple[Cells, str]] = {
    "a filler": (every(9, "-999", "age"), r"column 'age': -999 occurs 14 times, far from all other values"),
    "a filler of a sensor": (every(9, "99.9", "dose"), r"column 'dose': 99\.9 occurs 14 times"),
    "a value of a broken sensor": (every(9, "-127", "dose"), r"column 'dose': -127 occurs 14 times"),
    "a full register": (every(9, "65535", "age"), r"column 'age': 65535 occurs 14 times"),
    "the label": (cells(code=[{"no": "0", "yes": "1"}[label] for label in GOOD["label"]]), "column 'code' says the label 'label'"),
    "one class": (cells(label=["yes"] * ROWS), "all 96 training rows have the class 'yes', so there is nothing to learn"),
    "a missing client": (every(7, "NA", "client"), "'NA' is a word for a missing value, and counts as a name"),
    "another unit": (
        cells(height=[(1.5 if i % 10 == 0 else 150) * (1 + i % 13 / 40) for i in range(ROWS)]),
        "12 values differ .* by about 100 times",
    ),
    "whole numbers beyond 2^53": (cells(big=[2**60 + i * 17 % 101 for i in range(ROWS)]), "column 'big': 101 different numbers are 1 in"),
}
NOTED: dict[str, tuple[Cells, str]] = {
    "a constant": (cells(unit=["1"] * ROWS), "column 'unit' has one value only, '1'"),
    "a column twice": (cells(years=GOOD["age"]), "columns 'age' and 'years' are equal"),
    "names by accident": (cells(AGE=GOOD["dose"][::-1]), "columns 'AGE' and 'age' have names that differ as by accident"),
    "misspelt once": (cells(label=["malignent" if i == 7 else ("malignant", "benign")[i % 2] for i in range(ROWS)]), "is it misspelt"),
    "a word for missing": (every(9, "not recorded", "label"), "'not recorded' is taken as the name of a class"),
    "nines among numbers": (cells(label=[99 if i % 11 == 0 else i % 3 for i in range(ROWS)]), "the class '99' .* is unlike the others"),
    "-1 beside numbers": (cells(label=[-1 if i % 11 == 0 else i % 3 for i in range(ROWS)]), "the class '-1' .* is unlike the others"),
    "-9 beside numbers": (cells(label=[-9 if i % 11 == 0 else 1 + i % 4 for i in range(ROWS)]), "the class '-9' .* is unlike the others"),
    "a word of a survey": (every(9, "Prefer not to say", "label"), "'Prefer not to say' is taken as the name of a class"),
    "a cell that was cut": (cells(label=["ye" if i == 7 else ("yes", "no")[i % 2] for i in range(ROWS)]), "'ye'"),
    "zeros apart": (cells(pressure=[0 if i % 15 == 0 else 90 + i % 40 for i in range(ROWS)]), "column 'pressure': 0 occurs 8 times"),
    "rows of a client": (cells(visit=[1 + i // 4 for i in range(ROWS)]), "column 'visit' counts the rows of each client"),
    "thresholds": (
        cells(score=[i / 1000 + (label == "no") for i, label in enumerate(GOOD["label"])]), "column 'score' decides the label 'label' alone"
    ),
    "lists of labels": (
        cells(label=[";".join(sorted({"abcd"[i % 4], "abcd"[i * 7 % 3]})) for i in range(ROWS)]), "several labels in one cell"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WARNED)
def test_what_spoils_a_result_is_a_warning(kind: str, tmp_path: Path) -> None:
    table, words = WARNED[kind]
    path = saved_table(tmp_path / "a.csv", table)
    (found,) = remarks([path])[0]
    assert found.startswith(str(path))
    assert re.search(words, found), found


@pytest.mark.parametrize("kind", NOTED)
def test_what_is_odd_is_a_note(kind: str, tmp_path: Path) -> None:
    table, words = NOTED[kind]
    warnings, notes = remarks([saved_table(tmp_path / "a.csv", table)])
    assert not warnings
    assert any(re.search(words, note) for note in notes), notes


def test_a_text_column_that_names_the_client_is_a_warning(tmp_path: Path) -> None:
    schema = (Column("age"), Column("dose"), Column("clinic", "category", categories=("A", "B", "C", "D")))
    for step, count in ((4, 1), (3, 0)):
        table = cells(clinic=["ABCD"[i % step] for i in range(ROWS)])
        assert len(remarks([saved_table(tmp_path / f"{step}.csv", table)], columns=schema)[0]) == count


def test_a_total_and_columns_of_one_file_are_named(tmp_path: Path) -> None:
    path = saved_table(tmp_path / "a.csv", cells(), after="Total,6000.0,30.0,no\n")
    assert any("row 122: 'Total' in column 'client' occurs in the last row alone" in doubt for doubt in remarks([path])[0])
    more = {name: column[:40] for name, column in cells(extra=range(ROWS)).items()} | {"age": [f"{i / 7:.3f}" for i in range(40)]}
    notes = remarks([saved_table(tmp_path / "b.csv", cells()), saved_table(tmp_path / "c.csv", more)])[1]
    assert any("c.csv: column 'extra' is in this file alone, so it is not used" in note for note in notes)


def test_test_rows_of_one_class_are_named(tmp_path: Path) -> None:
    test = {name: column[:40] for name, column in cells(label=["no"] * ROWS).items()} | {"age": [f"{i / 7:.3f}" for i in range(40)]}
    warnings, _ = remarks([saved_table(tmp_path / "a.csv", cells()), saved_table(tmp_path / "b.csv", test)])
    assert any("all 40 test rows have the class 'no', so their accuracy tells nothing of the other 1" in doubt for doubt in warnings)


def test_a_column_of_clients_with_a_row_each_is_named(tmp_path: Path) -> None:
    path = saved_table(tmp_path / "a.csv", cells(client=[f"c{i % 5 if i < 60 else i}" for i in range(ROWS)]))
    assert any("column 'client' (data.client_column) has 65 names in 120 rows; is it another column?" in d for d in remarks([path])[0]), (
        remarks([path])
    )
    path = saved_table(tmp_path / "b.csv", cells(client=[f"c{i}" for i in range(ROWS)]))
    with pytest.raises(
        InputError, match=r"leaves no test row of 120, which are divided into 120 clients or classes; is data\.client_column"
    ):
        remarks([path])


# --- the form of the file -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_other_separators_are_named_everywhere(mark: str, tmp_path: Path) -> None:
    path = saved_table(tmp_path / "a.csv", cells(), mark=mark)
    for read in (lambda: remarks([path]), lambda: guessed(path)):
        with pytest.raises(InputError, match=r"has one column, 'client.*separated by something else than commas"):
            read()


def test_a_header_that_is_data_or_comes_again_is_refused(tmp_path: Path) -> None:
    table = cells()
    path = saved_table(tmp_path / "a.csv", table, after=f"{','.join(table)}\n")
    with pytest.raises(InputError, match=r"a\.csv: row 122 is the header again; remove it"):
        remarks([path])
    with pytest.raises(InputError, match=r"b\.csv: the first row has cells that occur in its columns again \('s0', .*so it is data"):
        remarks([saved_table(tmp_path / "b.csv", table, header=False)])


def test_names_that_are_numbers_in_order_are_a_header(tmp_path: Path) -> None:
    """As pandas names columns, and as spectra have them."""
    draws = np.random.default_rng(1).integers(0, 16, (ROWS, 20))
    assert remarks([saved_table(tmp_path / "a.csv", cells(**{str(i): draws[:, i].tolist() for i in range(20)}))])[0] == ()


# --- cells of other types -----------------------------------------------------------------------------------------------------------------

NESTED: dict[str, Any] = {
    "a list": [1.0, 2.0], "a structure": {"a": 1}, "bytes": b"\x00\xff", "an array": np.zeros(2), "a picture": {"bytes": b"PNG" * 99},
    "a duration": timedelta(seconds=5), "a time of day": time(12, 30), "a complex number": 1j,
}  # fmt: skip


@pytest.mark.parametrize("column", ["x", "label", "client"])
@pytest.mark.parametrize("kind", NESTED)
def test_a_cell_of_several_values_is_refused(kind: str, column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = cells(x=[1.5] * ROWS) | {column: [NESTED[kind]] * ROWS}
    monkeypatch.setitem(TABLES, "parquet", (lambda path: table, 1))
    (tmp_path / "a.parquet").touch()
    with pytest.raises(
        InputError,
        match=rf"a\.parquet: row 1, column '{column}': .* is (a |bytes).*, expected",
    ) as caught:
        remarks([tmp_path / "a.parquet"], source="parquet")
    assert len(str(caught.value)) < 400
    if column == "x":
        (guess,) = [guess for guess in guessed(tmp_path / "a.parquet").columns if guess.name == "x"]
        assert guess.type == "ignore"


@pytest.mark.parametrize(
    "cell", [1, 1.5, "a", None, True, Decimal("1.5"), date(2024, 1, 1), datetime(2024, 1, 1), np.float32(1), np.int64(1)]
)
def test_plain_cells_are_not_nested(cell: object) -> None:
    assert not nested(cell)


def test_a_category_and_a_text_take_no_list() -> None:
    for column in (Column("x", "category", categories=("[1]",)), Column("x", "text")):
        with pytest.raises(InputError, match=r"here: \[1\] is a list"):
            encoded(column, [[1]], lambda row: "here")
    assert len(shown("x" * 1000)) < 70


def test_names_of_a_class_label_take_the_place_of_its_numbers() -> None:
    feature = SimpleNamespace(names=["healthy", "ill"])
    assert _decoded([0, 1, -1, None], feature) == ["healthy", "ill", None, None]
    assert _decoded([0, 1], SimpleNamespace(dtype="int64")) == [0, 1]


def test_files_of_a_folder_with_other_columns_are_named(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(cells()), tmp_path / "1.parquet")
    parquet.write_table(pyarrow.table(cells(extra=range(ROWS))), tmp_path / "2.parquet")
    with pytest.raises(InputError, match=r"2\.parquet: column 'extra' is in this file or in 1\.parquet, and not in both"):
        remarks([tmp_path], source="parquet")


def test_categories_of_a_saved_dataset_are_its_names(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: the extra `huggingface` brings it")
    table = cells(age=range(ROWS), dose=[i / 7 for i in range(ROWS)], label=[i % 2 for i in range(ROWS)])
    saved = datasets.Dataset.from_dict(table).cast_column("label", datasets.ClassLabel(names=["healthy", "ill"]))
    saved.save_to_disk(str(tmp_path / "a"))
    assert guessed(tmp_path / "a").classes == ("healthy", "ill")


# --- guesses ------------------------------------------------------------------------------------------------------------------------------

GUESSED: dict[str, tuple[Callable[[int], str], str, str]] = {
    "units": (lambda i: f"{i / 7:.2f} kg", "ignore", "numbers with units or marks, such as '.* kg'"),
    "a currency": (lambda i: f"${i / 7:.2f}", "ignore", "numbers with units or marks"),
    "words among numbers": (lambda i: "unknown" if i % 9 == 0 else f"{i / 7:.2f}", "ignore", "106 of 120 cells are numbers, others"),
    "infinity": (lambda i: "inf" if i == 9 else f"{i / 7:.2f}", "ignore", "such as 'inf'"),
    "codes": (lambda i: f"{i * 37 % 90:05d}", "text", "90 different values"),
    "few codes": (lambda i: f"0{i % 5}", "category", ""),
    "numbers": (lambda i: f"{i / 7:.2f}", "number", ""),
    "ranges": (lambda i: f"{i % 5 * 10}-{i % 5 * 10 + 9}", "category", ""),
    "no date": (lambda i: "1900-01-01" if i % 9 == 0 else f"2024-{1 + i % 12:02d}-01", "date", "14 cells are 1900-01-01, which"),
    "never": (lambda i: "9999-12-31" if i % 9 == 0 else f"2024-{1 + i % 12:02d}-01", "date", "14 cells are 9999-12-31"),
    "the last days": (lambda i: f"9999-12-{1 + i % 30:02d}", "date", ""),
    "large numbers": (lambda i: str(2**64 - 1 - 7 * i), "number", ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", GUESSED)
def test_a_guess_is_right_or_says_why_not(kind: str, tmp_path: Path) -> None:
    cell, kept, words = GUESSED[kind]
    guess = guessed(saved_table(tmp_path / "a.csv", cells(x=[cell(i) for i in np.random.default_rng(0).permutation(ROWS).tolist()])))
    (column,) = [column for column in guess.columns if column.name == "x"]
    assert column.type == kept
    assert re.search(words, guess.remarks.get("x", "")), guess.remarks


# --- evidence -----------------------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-1000, 1000), min_size=12, max_size=60), st.integers(3, 8))
def test_a_filler_is_far_from_all_other_values(values: list[int], times: int) -> None:
    numbers = np.array([*values, *[99999] * times], float)
    assert filler(Numbers(numbers)) == ((99999.0, times) if len(set(values)) > 2 else None)
    found = filler(Numbers(np.array(values, float)))
    assert found is None or (found[0] != 0 and found[1] >= 3)


def test_nines_that_are_values_are_no_filler() -> None:
    percent = np.repeat(np.arange(0.0, 100.0), 3)
    for values in (percent, np.r_[percent, [999.0] * 2], np.r_[np.zeros(20), [99.0] * 5], np.full(20, 99.0)):
        assert filler(Numbers(values)) is None


def test_zeros_and_two_groups_of_values_pass() -> None:
    draws = np.random.default_rng(0)
    slow = np.where(draws.random(300) < 0.1, draws.normal(2000, 200, 300), draws.normal(120, 15, 300))
    for values in (draws.poisson(5, 300), np.where(draws.random(300) < 0.7, 0, draws.gamma(1, 5, 300)), slow, draws.lognormal(2, 2, 300)):
        numbers = Numbers(values)
        assert (filler(numbers), missing_code(numbers), inner_filler(numbers)) == (None, None, None)
        assert not zeros_apart(numbers)
        assert far_values(numbers) == ()
        assert not any(mixed.sure for mixed in mixed_units({"x": values}, np.arange(len(values)) % 2, None).values())


def test_names_of_classes() -> None:
    assert accidental_pairs(["gr\u00c3\u00b6\u00c3\u0178er", "gr\u00f6\u00dfer"])
    assert accidental_pairs(["K\u00f6ln", "Z\u00fcrich", "\u0141\u00f3d\u017a"]) == ()
    assert strangers(["-8", "1", "2", "3"]) == ("-8",)
    assert misspelt({"yes": 60, "no": 60, "n": 1}) == () == misspelt({"A": 1, "AB": 60}), "two letters may be cut anywhere"
    assert accidental_pairs(["1152921504606846976", "1152921504606846977"]) == ()
    assert accidental_pairs(["1.50", "1.5"]) == (("1.5", "1.50"),)
    assert misspelt({"malignent": 1, "malignant": 40, "benign": 40}) == (("malignent", "malignant"),)
    assert misspelt({"begnin": 1, "begnni": 1, "benign": 40}) == (), "two letters"
    assert misspelt({"benign": 30, "benigns": 40}) == (), "both are common"
    assert misspelt({"cat": 1, "car": 40}) == (), "short names differ by a letter"
    assert strangers(["-1", "0", "1"]) == strangers(["-1", "1"]) == strangers(["-2", "-1", "0", "1", "2"]) == ()
    assert strangers(["90", "95", "99"]) == ()
    assert combined(["EU/East", "EU/West", "US/East", "US/West"]) == ()
