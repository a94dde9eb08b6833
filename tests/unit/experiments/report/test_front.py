"""The figures of a sweep: means, intervals and paired differences against scipy, the front against its definition."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from cflpriv.errors import InputError
from cflpriv.experiments.report import pictures
from cflpriv.experiments.report.front import (
    Result,
    front_rows,
    mean_of,
    on_front,
    paired,
    read_results,
    table_rows,
    unmarked,
)
from cflpriv.experiments.report.front_pictures import epsilon_picture
from cflpriv.experiments.report.report import write_report
from cflpriv.experiments.report.tables import write_tables
from cflpriv.experiments.sweep.sweep import Sweep, parse_sweep

numbers = st.floats(-100, 100, allow_nan=False)

SWEEP = parse_sweep(
    {
        "training": {"weights": "equal"},
        "run": {"record": "full"},
        "sweep": {"algorithms": ["pacfl", "fedavg"], "protections": ["none", "haar", "secagg"], "seeds": [0, 1, 2]},
    }
)
LEAK = {"none": 0.9, "haar": 0.2, "secagg": 0.5}
LOSS = {"none": 0.0, "haar": 0.03, "secagg": 0.01}


def summary(cell: Any) -> dict[str, Any]:
    served = 0.8 + 0.01 * cell.seed - LOSS[cell.setting.protection] + 0.05 * (cell.setting.algorithm == "pacfl")
    return {
        "algorithm": cell.setting.algorithm, "protection": cell.setting.protection, "dataset": "made up", "clients": 4, "true_groups": 2,
        "clusters": 2, "ari": None if cell.setting.algorithm == "fedavg" else 1.0, "rounds": 2, "rounds_planned": 2, "rounds_skipped": 0,
        "upload_bytes": 1000, "download_bytes": 2000, "seconds": 1.5, "accuracy_mean": served, "accuracy_std": 0.1, "accuracy_worst": 0.5,
        "local_accuracy_mean": 0.7, "local_accuracy_std": 0.1, "epsilon": 4.0 if cell.setting.protection == "secagg" else None,
        "delta": 1e-5 if cell.setting.protection == "secagg" else None, "notes": [],
    }  # fmt: skip


def leak(cell: Any, **more: Any) -> dict[str, Any]:
    value = LEAK[cell.setting.protection] + 0.01 * cell.seed
    common = {"adversary": "server", "protection": cell.setting.protection, "low": None, "high": None, "baseline": 0.1, "reference": 0.9}
    return {"attack": "inversion", "metric": "cosine", "value": value, "status": "leaks", "k_known": 0, "seeds": [0], **common, **more}


def results(sweep: Sweep = SWEEP) -> list[Result]:
    return [Result(cell, summary(cell), [leak(cell), leak(cell, metric="error", lower_is_better=True)]) for cell in sweep.cells]


@pytest.fixture
def sweep_folder(tmp_path: Path) -> Path:
    """A sweep's folder with made-up runs."""
    (tmp_path / "sweep.toml").write_text(SWEEP.text, encoding="utf-8")
    (tmp_path / "failed").mkdir()
    for result in results():
        assert result.cell.config is not None
        run = tmp_path / result.cell.name
        run.mkdir()
        (run / "config.toml").write_text(result.cell.config.to_toml(), encoding="utf-8")
        (run / "environment.json").write_text("{}", encoding="utf-8")
        (run / "rounds.jsonl").write_text("", encoding="utf-8")
        (run / "summary.json").write_text(json.dumps(result.summary), encoding="utf-8")
        (run / "audit.json").write_text(json.dumps(result.audit), encoding="utf-8")
    return tmp_path


@given(st.lists(numbers, min_size=2, max_size=8))
def test_means_and_intervals_are_scipys(values: list[float]) -> None:
    mean = mean_of(values)
    assert mean is not None
    assert mean.mean == pytest.approx(np.mean(values))
    assert mean.std == pytest.approx(np.std(values, ddof=1))
    if np.ptp(values) > 1e-6:
        interval = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
        assert [mean.low, mean.high] == pytest.approx([interval.low, interval.high])
    assert mean_of([*values, None]) == mean


def test_one_seed_has_no_interval_and_none_has_no_mean() -> None:
    one = mean_of([3.0, None])
    assert one is not None
    assert (one.mean, one.std, one.low, one.seeds) == (3.0, None, None, 1)
    assert mean_of([None]) is None


@given(st.dictionaries(st.integers(0, 9), numbers, min_size=2), numbers, st.integers(0, 2**32))
def test_paired_differences_take_out_what_seeds_share(seeds: dict[int, float], shift: float, draw: int) -> None:
    noise = np.random.default_rng(draw).normal(size=10) * 1e-9
    mine = {seed: value + shift + noise[seed] for seed, value in seeds.items()}
    difference = paired(mine, {**seeds, 77: 3.0, 78: None})
    assert difference is not None
    assert difference.mean == pytest.approx(shift, abs=1e-6)
    assert difference.seeds == len(seeds)
    assert difference.std == pytest.approx(0.0, abs=1e-6)  # however far the seeds are apart


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_the_front_is_what_nobody_dominates(points: list[tuple[int, int]]) -> None:
    found = on_front([float(x) for x, _ in points], [float(y) for _, y in points])
    for (x, y), front in zip(points, found, strict=True):
        dominated = any(a <= x and b >= y and (a, b) != (x, y) for a, b in points)
        assert front is not dominated
    assert any(found)


def test_the_table_compares_with_the_first_protection_of_the_same_algorithm() -> None:
    rows = {(row["algorithm"], row["protection"]): row for row in table_rows(results(), SWEEP)}
    assert len(rows) == 6
    for (_, protection), row in rows.items():
        assert row["seeds"] == 3
        assert row["accuracy_mean_std"] == pytest.approx(0.01)
        if protection == "none":
            assert row["accuracy_mean_difference"] is None
        else:
            assert row["accuracy_mean_difference"] == pytest.approx(-LOSS[protection])
            assert row["accuracy_mean_difference_low"] == pytest.approx(-LOSS[protection])  # the seeds' common part is gone
    assert rows["fedavg", "none"]["ari"] is None


DP = {"privacy": {"unit": "client", "delta": 1e-5, "clip_norm": 1.0}}


@pytest.mark.parametrize(
    ("protections", "expected"),
    [
        (["none", {"label": "DP", **DP}], {("DP", 0.02): 0.02, ("DP", 8.0): 8.0}),  # the first has one setting: all are beside it
        ([{"label": "DP", **DP}, {"label": "more", **DP}, "none"], {("more", 0.02): 1.0, ("more", 8.0): 1.0}),  # "none" is beside neither ε
    ],
)
def test_differences_are_taken_at_the_same_epsilon(protections: list[Any], expected: dict[tuple[str, float], float]) -> None:
    base = {"training": {"weights": "equal"}, "data": {"source": "digits", "clients": 12}}
    grid = {"algorithms": ["fedavg"], "epsilon": [0.02, 8.0], "protections": protections, "seeds": [0, 1]}
    sweep = parse_sweep({**base, "sweep": grid})
    found = []
    for cell in sweep.cells:
        value = (cell.setting.epsilon or 0.0) + (cell.setting.protection == "more") + 0.1 * cell.seed
        found.append(Result(cell, {"accuracy_mean": value, "epsilon": cell.setting.epsilon}))
    rows = table_rows(found, sweep)
    differences = {(row["protection"], row["privacy.epsilon"]): row["accuracy_mean_difference"] for row in rows}
    assert {key: value for key, value in differences.items() if value is not None} == pytest.approx(expected)
    partly = [one for one in found if (one.cell.setting.protection, one.cell.setting.epsilon) != ("DP", 0.02)]  # say it failed
    for row in table_rows(partly, sweep):
        assert row["accuracy_mean_difference"] is None or row["privacy.epsilon"] == 8.0


def test_the_picture_over_epsilon_has_a_line_for_each_value_of_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = {"algorithms": ["fedavg"], "epsilon": [0.02, 8.0, 300.0], "protections": ["none", {"label": "DP", **DP}]}
    keys = {"training.lr": [0.1, 0.01], "model.hidden": [4, 5]}
    sweep = parse_sweep({"training": {"weights": "equal"}, "data": {"clients": 12}, "sweep": {**grid, "keys": keys}})
    spent = {None: None, 0.02: 0.0199, 8.0: 7.99, 300.0: 300.2}
    found = [Result(cell, {"accuracy_mean": 0.5, "epsilon": spent[cell.setting.epsilon]}) for cell in sweep.cells]
    figures: list[Any] = []
    monkeypatch.setattr(pictures, "uri", figures.append)
    epsilon_picture(found)
    axes = figures[0].axes[0]
    drawn, names = axes.get_legend_handles_labels()
    keys_of = [f"training.lr={lr} · model.hidden={hidden}" for lr in (0.1, 0.01) for hidden in (4, 5)]
    lines, dashed = (
        {name: line for line, name in zip(drawn, names, strict=True) if name.startswith(f"fedavg · {kind}")} for kind in ("DP", "none")
    )
    assert list(lines) == [f"fedavg · DP · {one}" for one in keys_of]
    assert list(dashed) == [f"fedavg · none · {one}" for one in keys_of]
    assert all(line.lines[0].get_xdata().tolist() == [0.0199, 7.99, 300.2] for line in lines.values())
    same = zip(lines.values(), dashed.values(), strict=True)  # with and without noise in one colour
    assert all(line.lines[0].get_color() == plain.get_color() and plain.get_linestyle() == "--" for line, plain in same)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0.02", "8", "300"]


def test_the_front_names_the_settings_that_no_other_beats() -> None:
    rows = [row for row in front_rows(results()) if row["utility"] == "accuracy_mean"]
    front = {(row["metric"], row["algorithm"], row["protection"]) for row in rows if row["on_front"]}
    # pacfl serves better everywhere; less leakage costs accuracy, so all of pacfl's settings are on the front of "cosine"
    assert {one for one in front if one[0] == "cosine"} == {("cosine", "pacfl", name) for name in LEAK}
    # where a larger figure is an error of the attacker, "none" has the largest error here and the best accuracy
    assert {one for one in front if one[0] == "error"} == {("error", "pacfl", "none")}
    assert all(row["guess_with_no_view"] == pytest.approx(0.1) for row in rows)
    assert {row["epsilon"] for row in rows} == {None, 4.0}
    assert not [row for row in front_rows(results()) if row["utility"] == "ari" and row["algorithm"] == "fedavg"]


def doubted(status: str, seeds: tuple[int, ...], protection: str = "haar", **more: Any) -> list[Result]:
    """The sweep's runs of FedAvg, one figure each; some runs of one protection with another status."""
    found = []
    for cell in SWEEP.cells:
        if cell.setting.algorithm == "fedavg":
            changed = {"status": status, **more} if cell.setting.protection == protection and cell.seed in seeds else {}
            found.append(Result(cell, summary(cell), [leak(cell, **changed)]))
    return found


def rings(found: list[Result]) -> dict[str, tuple[bool, bool]]:
    """By protection, for the first utility: validated, on the front."""
    rows = [row for row in front_rows(found) if row.get("utility") == "accuracy_mean"]
    return {row["protection"]: (row["validated"], row["on_front"]) for row in rows}


@pytest.mark.parametrize("seeds", [(0, 1, 2), (1,)])
def test_what_is_not_validated_is_on_no_front_and_pushes_nobody_off_it(seeds: tuple[int, ...]) -> None:
    assert rings(doubted("leaks", ())) == {"none": (True, True), "haar": (True, True), "secagg": (True, True)}
    best = doubted("not_validated", seeds, value=0.0)  # of all the least, at an accuracy above
    best = [
        replace(one, summary={**one.summary, "accuracy_mean": 0.99} if one.cell.setting.protection == "haar" else one.summary)
        for one in best
    ]
    assert rings(best) == {"none": (True, True), "haar": (False, False), "secagg": (True, True)}


@pytest.mark.slow
@pytest.mark.parametrize(("status", "words"), [("nothing_to_see", "nothing to see"), ("not_attempted", "not attempted")])
def test_settings_without_a_mark_are_named_with_the_reason(sweep_folder: Path, status: str, words: str) -> None:
    found = doubted(status, (0, 1, 2), "secagg", value=None, baseline=None, reference=None, metric="other")
    (key, setting, why) = unmarked(found)[0]
    assert (key[:3], setting.protection, why) == (("inversion", "cosine", "server"), "secagg", words)
    (row,) = [row for row in front_rows(found) if row["protection"] == "secagg"]
    assert (row["metric"], row["no_leakage"], row["on_front"], row["seeds_with_leakage"]) == ("cosine", words, False, 0)
    for one in found:
        (sweep_folder / one.cell.name / "audit.json").write_text(json.dumps(one.audit), encoding="utf-8")
    page = write_report(sweep_folder).read_text(encoding="utf-8")
    assert f"<b>fedavg · secagg</b>, {words}: inversion (cosine; server)" in page
    assert "<b>fedavg · none</b>, no such figure: inversion (error; server)" in page
    bare = [replace(one, audit=[]) if one.cell.setting.protection == "haar" else one for one in found]
    assert {(setting.protection, why) for _, setting, why in unmarked(bare)} == {("secagg", words), ("haar", "not run")}


def test_a_setting_with_a_figure_in_some_seeds_says_in_how_many() -> None:
    found = doubted("nothing_to_see", (1,), "secagg", value=None, baseline=None)
    assert unmarked(found) == []
    counts = {row["protection"]: row["seeds_with_leakage"] for row in front_rows(found)}
    assert counts == {"none": 3, "haar": 3, "secagg": 2}


def test_the_files_hold_every_run_and_setting(sweep_folder: Path) -> None:
    (sweep_folder / "failed" / "pacfl-haar-s1.json").write_text('{"cell": "pacfl-haar-s1", "error": "=HYPERLINK()"}', encoding="utf-8")
    (sweep_folder / "pacfl-haar-s1" / "summary.json").unlink()
    write_tables(sweep_folder, SWEEP)
    sizes = {}
    for name in ("sweep.csv", "table.csv", "front.csv"):
        with (sweep_folder / name).open(encoding="utf-8", newline="") as file:
            sizes[name] = len(list(csv.DictReader(file)))
    assert sizes == {"sweep.csv": 18, "table.csv": 6, "front.csv": 2 * (6 + 6 + 3)}
    found, failed = read_results(sweep_folder, SWEEP)
    assert len(found) == 17
    assert list(failed) == ["pacfl-haar-s1"]


@pytest.mark.slow
def test_the_report_shows_the_sweep_and_says_what_would_make_it_wrong(sweep_folder: Path) -> None:
    (sweep_folder / "failed" / "pacfl-haar-s1.json").write_text('{"cell": "pacfl-haar-s1", "error": "<b>broke</b>"}', encoding="utf-8")
    page = write_report(sweep_folder).read_text(encoding="utf-8")
    for words in ("Left and up is better", "What would make it wrong", "Megabytes and seconds", "&lt;b&gt;broke"):
        assert words in page
    assert "Utility against ε" not in page, "there is one ε only, which the table has"
    assert "<b>broke" not in page
    assert "http:" not in page.replace("http://www.w3.org", "")
    assert write_report(sweep_folder).read_text(encoding="utf-8") == page
    first = [cell.name for cell in SWEEP.cells if cell.seed == 0]
    assert all(name in page for name in first)  # below the sweep's own tables: the runs of the first seed
    unverified = re.compile(r'<p class="warn">Not verified: .*?</p>', re.DOTALL)  # made-up runs, whose figures follow from no rounds
    whole, *each = unverified.findall(page)
    assert all(f"({cell.name})" in whole for cell in SWEEP.cells if cell.seed)
    assert len(each) == len(SWEEP.cells), "also of other seeds, which are in the sweep's tables"
    assert f"({SWEEP.cells[1].name})" not in unverified.sub("", page)


def test_a_damaged_summary_is_named(sweep_folder: Path) -> None:
    (sweep_folder / SWEEP.cells[0].name / "audit.json").write_text("[", encoding="utf-8")
    with pytest.raises(InputError, match=r"audit\.json: is damaged"):
        write_tables(sweep_folder, SWEEP)


def test_a_run_that_stopped_early_is_in_no_mean(sweep_folder: Path) -> None:
    path = sweep_folder / SWEEP.cells[0].name / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "rounds": 1}), encoding="utf-8")
    assert SWEEP.cells[0].name not in {one.cell.name for one in read_results(sweep_folder, SWEEP)[0]}
    assert replace(SWEEP, workers=3).settings == SWEEP.settings
