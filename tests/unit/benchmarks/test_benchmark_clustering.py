"""The table of methods that find groups: one line a cell, and what is there is not run again."""

import csv
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scenes import population

from benchmarks import clustering, helps


@pytest.mark.slow
def test_the_table_resumes_by_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = [clustering.Scene("digits", "rotations", 40, seed, clients=8) for seed in (0, 1)]
    monkeypatch.setattr(clustering, "scenes", lambda data: wanted)
    words = ["--out", str(tmp_path / "table.csv"), "--data", "digits", "--methods", "pacfl;crossfit"]
    assert clustering.main(words) == 0
    lines = (tmp_path / "table.csv").read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(lines) == 5
    (tmp_path / "table.csv").write_text("".join(lines[:3]) + lines[3][:20], encoding="utf-8")  # the last cell is missing, one is cut off
    capsys.readouterr()
    assert clustering.main(words) == 0
    printed = capsys.readouterr().out
    assert "40, 1, crossfit" in printed
    assert "40, 0" not in printed
    with (tmp_path / "table.csv").open(newline="", encoding="utf-8") as file:
        again = [[row[key] for key in clustering.FIELDS[:-1]] for row in csv.DictReader(file)]
    assert again == [line.strip().split(",")[:-1] for line in lines[1:]]


@pytest.mark.parametrize(("table", "other", "words"), [(helps, clustering, ["--seeds", "0"]), (clustering, helps, ["--tables"])])
def test_another_table_is_left_as_it_is(
    tmp_path: Path, table: ModuleType, other: ModuleType, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.csv"
    path.write_text("\n".join([",".join(other.FIELDS), ",".join("1" for _ in other.FIELDS), "cut o"]), encoding="utf-8")
    there = path.read_bytes()
    with pytest.raises(SystemExit):
        table.main(["--out", str(path), *words])
    assert path.read_bytes() == there
    assert "table.csv: is another table" in capsys.readouterr().err


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    path, rows = tmp_path / "table.csv", [{"name": "a", "seconds": "1.25"}, {"name": "b", "seconds": "12.5"}]
    path.touch()
    for row in rows:
        clustering.add(path, ("name", "seconds"), row)
    assert clustering.read(path, ("name", "seconds")) == rows
    path.write_bytes(path.read_bytes()[:-2])  # 12. is a number, too
    assert clustering.read(path, ("name", "seconds")) == rows[:1]
    clustering.add(path, ("name", "seconds"), rows[1])
    assert clustering.read(path, ("name", "seconds")) == rows


def test_the_folds_of_a_scene_are_made_once() -> None:
    people = population(groups=2, clients_per_group=3)
    made = clustering.folds_of(people, 0)
    assert clustering.folds_of(people, 0) is made
    assert not np.array_equal(clustering.folds_of(people, 1), made)


def test_the_tables_are_of_the_scenes_that_all_methods_ran_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def line(kind: str, method: str, found: int, ari: float, seed: int = 0) -> dict[str, str]:
        groups = 1 if kind in clustering.WITHOUT_GROUPS else 4
        row = {"data": "usps", "kind": kind, "clients": 40, "samples": 50, "seed": seed, "method": method, "groups": groups, "found": found}
        return {key: str(value) for key, value in {**dict.fromkeys(clustering.FIELDS, ""), **row, "ari": ari}.items()}

    rows = [
        line("rotations", "flexcfl", 2, 0.48), line("rotations", "crossfit", 4, 1.0), line("rotations", "crossfit", 4, 1.0, seed=1),
        line("one group", "flexcfl", 2, 0.0), line("one group", "crossfit", 1, 1.0),
    ]  # fmt: skip
    with (tmp_path / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, clustering.FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    assert clustering.main(["--tables", "--out", str(tmp_path / "rows.csv")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("2 scenes\n")  # the second seed of rotations was not run with every method
    assert "| crossfit | nothing | 1 of 1 | – | – | – | 1 of 1 | – | 0 of 1 |" in printed
    assert "| FlexCFL | a number of groups, k = 2 | 0 of 1 | – | – | – | 0 of 1 | – | 2 of 2 |" in printed
    assert "| crossfit | 1 of 1 | – | – |" in printed
    assert printed.index("| crossfit") < printed.index("| FlexCFL")


def test_the_rule_of_what_helps() -> None:
    up, down, mixed, small = np.array([3.0, 4, 5]), np.array([-3.0, -4, -5]), np.array([9.0, -2, 1]), np.array([0.5, 0.6, 0.7])
    assert helps.verdict(up, up) == "helps"
    assert helps.verdict(up, mixed) == "not shown", "random clusters do as well"
    assert helps.verdict(up, up[:2]) == "not shown", "in one seed nothing was clustered"
    assert helps.verdict(small, up) == "not shown", "below a point"
    assert helps.verdict(down, up) == "harms"
    assert helps.verdict(np.zeros(3), np.zeros(0)) == "one cluster"


def test_random_clusters_have_the_sizes_of_those_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helps, "ROUNDS", 1)
    people = population(groups=2, clients_per_group=4, shape=(1, 8, 8))
    monkeypatch.setattr(helps, "CLIENTS", len(people.clients))
    row = helps.cell("digits", "rotations", 0, "flexcfl", people)
    assert row["clusters"] == 2
    assert 0 <= float(row["shuffled"]) <= 100
    assert "| rotations | flexcfl |" in helps.summary([{**row, "method": "fedavg"}, row])
