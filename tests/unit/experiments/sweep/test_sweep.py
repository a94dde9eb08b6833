"""Sweeps: the grid is what was asked for, results do not depend on who ran them, kills and failures cost only what was under way."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tomli_w
from checkout import ROOT
from command_line import in_process

import cflpriv
from cflpriv.cli.running import sweep
from cflpriv.errors import CflprivWarning, InputError, InputWarning
from cflpriv.experiments.report.front import read_results
from cflpriv.experiments.report.report import write_report
from cflpriv.experiments.report.tables import write_tables
from cflpriv.experiments.run import workers as pool
from cflpriv.experiments.run.resume import held
from cflpriv.experiments.run.workers import _Worker, ended
from cflpriv.experiments.sweep.sweep import Sweep, load_sweep, parse_sweep, sweep_of
from cflpriv.experiments.sweep.sweep_runs import _run_cell, kept_words, part_of, run_sweep, shown, standing

BASE: dict[str, Any] = {
    "data": {"clients": 6, "rotations": [0, 90], "test_samples_per_client": 20},
    "model": {"name": "mlp", "hidden": 4},
    "training": {"rounds": 2, "lr": 0.1, "weights": "equal", "batch_size": 60},
    "run": {"insecure_test_entropy": True, "record": "headers"},
}


def swept(**sweep: Any) -> Sweep:
    return parse_sweep({**BASE, "sweep": sweep}, "my.toml")


# --- the grid


def test_the_grid_is_the_product_with_the_same_seeds_everywhere() -> None:
    sweep = swept(
        algorithms=["fedavg", {"name": "ifca", "k": 2, "label": "two"}],
        protections=["none", "haar", {"sum": "secagg", "min_cohort": 4}],
        seeds=[3, 5],
        keys={"training.lr": [0.1, 0.2], "model.hidden": [4, 5]},
    )
    assert len(sweep.cells) == len({cell.name for cell in sweep.cells}) == 2 * 3 * 2 * 4
    seen = set()
    for cell in sweep.cells:
        config = cell.config
        assert config is not None
        assert config.run.seed == config.data.seed == cell.seed
        assert dict(cell.setting.keys) == {"training.lr": config.training.lr, "model.hidden": config.model.hidden}
        seen.add((config.algorithm["name"], config.protection.sum, config.protection.gram, config.protection.min_cohort))
    expected = [("none", (), 0), ("haar", ("haar",), 0), ("secagg", (), 4)]
    assert seen == {(name, *rest) for name in ("fedavg", "ifca") for rest in expected}
    for setting in sweep.settings:
        assert sorted(cell.seed for cell in sweep.cells if cell.setting == setting) == [3, 5]
    assert {cell.setting.algorithm for cell in sweep.cells} == {"fedavg", "two"}
    assert swept(seeds=[1]).cells[0].name == "pacfl-as_given-s1"


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ({"algoritms": ["pacfl"]}, r"\[sweep\] algoritms = .* did you mean 'algorithms'"),
        ({"seeds": []}, r"seeds = \[\]: is empty"),
        ({"seeds": ["a"]}, r"seeds: 'a' is not a whole number"),
        ({"workers": 0}, r"workers = 0: expected an integer in \[1, 512\]"),
        ({"workers": True}, r"workers = True: expected int"),
        ({"algorithms": ["pacf"]}, r"did you mean 'pacfl'"),
        ({"algorithms": [3]}, r"algorithms: 3: expected a name"),
        ({"algorithms": [{"name": "pacfl", "algorithm": {"p": 2}}]}, r"algorithms: algorithm = .*: write its keys beside the `name`"),
        ({"algorithms": [{"name": "pacfl", "protection": {"sum": "haar"}}]}, r"algorithms: protection = .* belongs to an entry of"),
        (
            {"algorithms": [{"name": "pacfl", "training": {"lr": 0.2}}], "protections": [{"label": "quick", "training": {"lr": 0.3}}]},
            r"algorithms: training\.lr: 'pacfl' and the protection 'quick' both give it",
        ),
        ({"protections": ["har"]}, r"protections: 'har': is not known; did you mean 'haar'"),
        ({"protections": [3]}, r"protections: 3"),
        ({"epsilon": ["x"]}, r"epsilon: 'x' is not a number"),
        ({"keys": {"lr": [1]}}, r"keys: 'lr'"),
        ({"keys": {"training.lr": 1}}, r"keys: 'training.lr' = 1"),
        ({"keys": {"training.lrr": [0.1]}}, r"lrr = 0.1: is not a key here"),
        ({"keys": {"data.seed": [1, 2]}}, r"keys: 'data.seed': has a place of its own; use `seeds`"),
        ({"keys": {"algorithm.name": ["ifca"]}}, r"keys: 'algorithm.name': has a place of its own; use `algorithms`"),
        ({"epsilon": [1.0], "protections": ["none", "haar"]}, r"epsilon = \[1\.0\]: no protection here has a privacy unit"),
        ({"keys": {"training.lr": [0.1, {"a": 1}]}}, r"keys: 'training.lr' = \[0\.1, {'a': 1}\]: expected"),
        ({"algorithms": ["pacfl", {"name": "pacfl", "p": 2}]}, r"two cells are called .*label"),
    ],
)
def test_mistakes_name_key_and_value(sweep: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        swept(**sweep)
    assert str(caught.value).startswith("my.toml: ")
    assert "\n" not in str(caught.value)


def test_the_files_own_sections_hold_for_every_cell_that_they_are_for() -> None:
    base = {**BASE, "algorithm": {"name": "ifca", "k": 4}, "protection": {"secagg_bits": 16, "min_cohort": 4, "gram": ["haar"]}}
    algorithms = ["ifca", {"name": "ifca", "k": 3, "label": "three"}, "pacfl"]
    protections = ["none", "secagg", "haar", {"sum": "secagg", "min_cohort": 5}, {"label": "given", "gram": []}, {"model": {"hidden": 5}}]
    cells = parse_sweep({**base, "sweep": {"algorithms": algorithms, "protections": protections}}).cells
    found = {}
    for cell in cells:
        assert cell.config is not None
        protection = cell.config.protection
        found[cell.setting.protection] = (protection.name, protection.min_cohort, protection.secagg_bits)
        expected = {"ifca": {"name": "ifca", "k": 4}, "three": {"name": "ifca", "k": 3}, "pacfl": {"name": "pacfl"}}
        assert cell.config.algorithm == expected[cell.setting.algorithm]
        assert cell.config.model.hidden == (5 if cell.setting.protection == "as given" else 4)
    assert found == {
        "none": ("none", 0, 32),  # nothing of [protection]
        "secagg": ("sum=secagg", 4, 16),  # a name says gram and sum
        "haar": ("haar", 4, 16),
        "sum=secagg, min_cohort=5": ("gram=haar, sum=secagg", 5, 16),  # a table says what it changes
        "given": ("none", 4, 16),
        "as given": ("gram=haar", 4, 16),
    }
    assert len(cells) == 3 * 6
    alone = parse_sweep({**base, "algorithm": {"k": 3}, "sweep": {"seeds": [0]}}).cells[0]  # without entries, all of both sections
    assert alone.config is not None
    assert (alone.name, alone.config.algorithm, alone.config.protection.min_cohort) == ("pacfl-as_given-s0", {"name": "pacfl", "k": 3}, 4)


def test_an_algorithm_brings_its_own_settings_of_other_sections() -> None:
    def found(**sweep: Any) -> dict[str, Any]:
        cells = parse_sweep({**BASE, "run": {}, "sweep": {**sweep, "epsilon": [1.0, 2.0]}}).cells
        configs = {cell.name: cell.config for cell in cells if cell.config is not None}
        return {name: (it.model.hidden, it.privacy.clip_norm, it.training.lr, it.privacy.epsilon) for name, it in configs.items()}

    given = {"name": "fedavg", "model": {"hidden": 5}, "privacy": {"clip_norm": 0.3}}
    private = {"label": "private", "privacy": {"unit": "client", "delta": 1e-3}, "training": {"lr": 0.2}}
    assert found(algorithms=[given, "ditto"], protections=["none", private]) == {
        "fedavg-none-s0": (5, 0.3, 0.1, 0.0), "fedavg-private-eps1-s0": (5, 0.3, 0.2, 1.0), "fedavg-private-eps2-s0": (5, 0.3, 0.2, 2.0),
        "ditto-none-s0": (4, 1.0, 0.1, 0.0), "ditto-private-eps1-s0": (4, 1.0, 0.2, 1.0), "ditto-private-eps2-s0": (4, 1.0, 0.2, 2.0),
    }  # fmt: skip
    alone = found(algorithms=[{**given, "privacy": {"unit": "client", "delta": 1e-3}}])
    assert [epsilon for *_, epsilon in alone.values()] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("base", "sweep", "words"),
    [
        ({"algorithm": {"name": "ifca", "k": 4}}, {"algorithms": ["fedavg", "pacfl"]}, r"algorithms: algorithm\.k = 4 reaches none"),
        ({"algorithm": {"name": "ifca", "k": 4}}, {"algorithms": [{"name": "ifca", "k": 2}]}, r"algorithms: algorithm\.k = 4 reaches none"),
        ({"protection": {"sum": "secagg"}}, {"protections": ["none", "haar"]}, r"protections: protection\.sum = 'secagg' reaches none"),
        ({"protection": {"min_cohort": 4}}, {"protections": ["none"]}, r"protections: protection\.min_cohort = 4 reaches none"),
    ],
)
def test_a_key_that_would_reach_no_cell_is_refused(base: dict[str, Any], sweep: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"^my\.toml: \[sweep\] {words}"):
        parse_sweep({**BASE, **base, "sweep": sweep}, "my.toml")
    (tmp_path / "my.toml").write_text(tomli_w.dumps({**BASE, "sweep": sweep}), encoding="utf-8")
    changes = [f"{section}.{key}={value!r}" for section, keys in base.items() for key, value in keys.items()]
    assert load_sweep(tmp_path / "my.toml", [change for change in changes if change.startswith("algorithm.name")]).cells
    with pytest.raises(InputError, match=rf"my\.toml with --set .*: \[sweep\] {words}"):
        load_sweep(tmp_path / "my.toml", changes)


def test_a_value_may_be_a_list() -> None:
    sweep = swept(algorithms=["fedavg"], keys={"data.rotations": [[0, 90], [0, 180]], "training.rounds": [1]}, seeds=[0, 1])
    assert [cell.config.data.rotations for cell in sweep.cells if cell.config] == [(0, 90), (0, 90), (0, 180), (0, 180)]
    assert len(sweep.settings) == 2
    assert sweep.cells[0].name == "fedavg-as_given-rotations=_0_90-rounds=1-s0"


def test_cells_of_long_values_have_names_that_file_systems_take() -> None:
    many, more = ([[number, client, "Masked"] for number in range(count)] for count, client in ((30, 0), (31, 0)))
    names = [cell.name for cell in swept(algorithms=["fedavg"], seeds=[0, 17], keys={"training.dropouts": [many, more, []]}).cells]
    assert len(set(names)) == 6
    assert max(map(len, names)) <= 200
    assert [name.rpartition("-")[2] for name in names] == ["s0", "s17"] * 3
    assert names[4] == "fedavg-as_given-dropouts=-s0", "short names stay as they are"


def test_a_file_without_a_sweep_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("[training]\nrounds = 3\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"x\.toml: has no section \[sweep\]"):
        load_sweep(tmp_path / "x.toml")
    with pytest.raises(InputError, match="no such file"):
        load_sweep(tmp_path / "y.toml")


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "sweeps").glob("*.toml")), ids=lambda path: path.stem)
def test_the_examples_load(path: Path) -> None:
    sweep = load_sweep(path)
    assert not [cell.problem for cell in sweep.cells if cell.problem]
    assert parse_sweep(tomllib.loads(sweep.text)).cells == sweep.cells


@pytest.mark.parametrize(("key", "value"), [("attacks", ["signature_inversion", "no such one"]), ("budget", "no such one")])
def test_unknown_attacks_are_named_before_anything_runs(key: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(tomli_w.dumps({**BASE, "sweep": {"algorithms": ["fedavg"], key: value}}), encoding="utf-8")
    with pytest.raises(InputError, match=rf"\[sweep\] {key}: 'no such one' is not known; known are "):
        sweep(path, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- running


def _hostile_audit(folder: Path, **options: Any) -> None:
    if "s1" in folder.name:
        os._exit(7)


def _failing_audit(folder: Path, **options: Any) -> None:
    raise RuntimeError(f"no attack today on {folder.name}, {sorted(options)}")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return [{key: value for key, value in row.items() if "seconds" not in key} for row in csv.DictReader(file)]


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_workers_and_failures_stay_alone(tmp_path: Path) -> None:
    sweep = swept(
        algorithms=["fedavg", "pacfl"],
        protections=["none", "haar", {"label": "odd", "sum": "secagg-oblivious"}, {"label": "floor", "sum": "secagg", "min_cohort": 7}],
        seeds=[0, 1],
    )
    tables = []
    for workers in (1, 2):
        lines: list[str] = []
        out = tmp_path / str(workers)
        failed = run_sweep(sweep, out, workers=workers, report=lines.append)
        assert set(failed) == {cell.name for cell in sweep.cells if "floor" in cell.name or "pacfl-odd" in cell.name}
        assert all("min_cohort = 7" in error or "private" in error or "oblivious" in error for error in failed.values())
        for name, error in failed.items():
            assert json.loads((out / "failed" / f"{name}.json").read_text(encoding="utf-8"))["error"] == error
        write_tables(out, sweep)
        tables.append([rows_of(out / name) for name in ("sweep.csv", "table.csv", "front.csv")])
        made = [cell for cell in sweep.cells if not cell.problem]
        assert len(lines) == 1 + 2 * len(made), "a line for each run as it begins, and one as it ends"
        assert lines[1].endswith(f"{made[0].name}: begun")
    lines = []
    run_sweep(sweep, tmp_path / "1", audit=_failing_audit, report=lines.append)
    assert lines[0].startswith("runs that record headers only are not audited")
    assert tables[0] == tables[1]
    ran = [row for row in tables[0][0] if not row["error"]]
    assert len(ran) == 2 * 2 * 2 + 2  # fedavg under "odd" runs too
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "1").rglob("summary.json")}
    run_sweep(sweep, tmp_path / "1")  # done runs are left alone, failed ones are tried again
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "1").rglob("summary.json")} == before
    page = write_report(tmp_path / "2").read_text(encoding="utf-8")
    assert "min_cohort = 7" in page
    assert "No run was attacked" in page
    assert sweep_of(tmp_path / "2") == Sweep(sweep.cells, sweep.text, sweep.workers)


def test_a_folder_of_an_earlier_version_is_read_though_its_attacks_were_never_used(tmp_path: Path) -> None:
    tree = {**BASE, "sweep": {"seeds": [0], "audit": False, "attacks": ["label_inference"]}}
    (tmp_path / "sweep.toml").write_text(tomli_w.dumps(tree), encoding="utf-8")
    assert sweep_of(tmp_path) == parse_sweep(tree)
    with pytest.raises(InputError, match=r"attacks = .*: is not used, because audit = false"):
        load_sweep(tmp_path / "sweep.toml")


@pytest.mark.slow
def test_a_dead_worker_and_a_failing_audit_are_recorded(tmp_path: Path) -> None:
    recorded = {**BASE, "run": {**BASE["run"], "record": "full"}}
    sweep = parse_sweep({**recorded, "sweep": {"algorithms": ["fedavg"], "seeds": [0, 1, 2], "attacks": ["x"], "budget": "quick"}})
    failed = run_sweep(sweep, tmp_path / "a", audit=_hostile_audit)
    assert list(failed) == ["fedavg-as_given-s1"]
    assert "died (exit code 7)" in failed["fedavg-as_given-s1"]
    failed = run_sweep(sweep, tmp_path / "a", audit=_failing_audit)
    assert "RuntimeError: no attack today on fedavg-as_given-s0, ['attacks', 'budget', 'data_dir']" in failed["fedavg-as_given-s0"]
    results, found = read_results(tmp_path / "a", sweep)
    assert len(results) == 3  # the runs themselves are there
    assert found == failed


def _dies_with_its_cell_unread(link: Connection, plugins: Mapping[str, bytes]) -> None:
    link.poll(60)
    os._exit(9)


def _dies_at_once(link: Connection, plugins: Mapping[str, bytes]) -> None:
    os._exit(9)


@pytest.mark.slow
@pytest.mark.parametrize("serve", [_dies_at_once, _dies_with_its_cell_unread])
def test_a_worker_that_dies_before_it_has_read_its_cell_fails_that_cell_only(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, start, started = swept(algorithms=["fedavg"], seeds=[0, 1]), _Worker.start, []

    def first_dies() -> _Worker:
        started.append(serve)
        if len(started) > 1:
            return start()
        with monkeypatch.context() as patch:
            patch.setattr(pool, "_serve", serve)
            worker = start()
        if serve is _dies_at_once:
            worker.process.join()
        return worker

    monkeypatch.setattr(_Worker, "start", first_dies)
    assert run_sweep(sweep, tmp_path / "a") == {sweep.cells[0].name: "its worker process died (exit code 9)"}
    assert [result.cell for result in read_results(tmp_path / "a", sweep)[0]] == [sweep.cells[1]]


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    sweep = swept(algorithms=["fedavg"])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(InputError, match="holds no sweep"):
        run_sweep(sweep, tmp_path / "other")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "sweep.toml").write_text(swept(algorithms=["pacfl"]).text, encoding="utf-8")
    with pytest.raises(InputError, match=r"another sweep \(sweep\.algorithms is \['fedavg'\] now, was \['pacfl'\]\)"):
        run_sweep(sweep, tmp_path / "old")
    more = swept(algorithms=["fedavg"], workers=3)
    assert more.text == sweep.text  # how many workers there are is no part of what a sweep is


@pytest.mark.slow
def test_a_killed_sweep_goes_on_and_leaves_no_workers_behind(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    grid = {**BASE, "training": {**BASE["training"], "rounds": 30}}
    path.write_text(tomli_w.dumps({**grid, "sweep": {"algorithms": ["fedavg"], "seeds": [0, 1, 2], "workers": 2}}), encoding="utf-8")
    arguments = [sys.executable, "-u", "-m", "cflpriv.cli", "sweep", str(path), "--out", str(tmp_path / "cut")]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, encoding="utf-8", cwd=ROOT)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "cut").glob("*/checkpoints/round_*.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    sweep = load_sweep(path)
    assert len(read_results(tmp_path / "cut", sweep)[0]) < 3
    time.sleep(0.5)  # workers see that their parent is gone, and let go of their folders
    done = subprocess.run(arguments, capture_output=True, encoding="utf-8", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    run_sweep(sweep, tmp_path / "whole", workers=1)
    write_tables(tmp_path / "whole", sweep)
    assert rows_of(tmp_path / "whole" / "sweep.csv") == rows_of(tmp_path / "cut" / "sweep.csv")
    assert (tmp_path / "cut" / "report.html").is_file()


@pytest.mark.slow
def test_a_stopped_sweep_says_what_it_keeps_and_leaves_no_failure(tmp_path: Path) -> None:
    path, out = tmp_path / "grid.toml", tmp_path / "out"
    recorded = {**BASE, "run": {**BASE["run"], "record": "full"}}
    grid = {"algorithms": ["fedavg"], "seeds": [0, 1, 2], "workers": 1, "attacks": ["label_inference"]}
    path.write_text(tomli_w.dumps({**recorded, "sweep": grid}), encoding="utf-8")
    arguments = [sys.executable, "-u", "-m", "cflpriv.cli", "sweep", str(path), "--out", str(out)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", cwd=ROOT)
    deadline = time.monotonic() + 120
    while not list(out.glob("locks/*.audit")) and time.monotonic() < deadline:  # in an audit
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert re.search(r"stopped: \d of 3 runs done and kept(, 1 begun run goes on where saved)?; to go on: cflpriv sweep ", errors)
    assert str(path) in errors
    assert not list(out.glob("failed/*"))
    done = subprocess.run([*arguments, "--resume"], capture_output=True, encoding="utf-8", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(standing(load_sweep(path), out).values()) == {"done"}
    assert "next: " in done.stdout
    assert (out / "fedavg-as_given-s2" / "audit.json").is_file()


@pytest.mark.slow
def test_an_audit_of_a_sweep_attacks_every_run_and_makes_the_report_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = parse_sweep({**BASE, "run": {**BASE["run"], "record": "full"}, "sweep": {"algorithms": ["fedavg"], "audit": False}})
    run_sweep(sweep, tmp_path / "out", workers=1)
    assert in_process(monkeypatch, "audit", str(tmp_path / "out"), "--attacks", "label_inference", "--budget", "quick") == 0
    printed = capsys.readouterr().out
    assert "[1/1] fedavg-as_given-s0: audited" in printed
    assert "label inference" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


# --- several processes over one folder


def test_shards_have_each_run_once_and_numbers_are_those_of_the_list(tmp_path: Path) -> None:
    sweep = swept(algorithms=["fedavg", "pacfl"], seeds=[0, 1, 2])
    for count in range(1, 9):
        parts = [cell for first in range(1, count + 1) for cell in part_of(sweep, shard=f"{first}/{count}")]
        assert sorted(parts, key=lambda cell: cell.name) == sorted(sweep.cells, key=lambda cell: cell.name)
        sizes = [len(part_of(sweep, shard=f"{first}/{count}")) for first in range(1, count + 1)]
        assert max(sizes) - min(sizes) <= 1
    lines = shown(sweep, tmp_path)
    for number, (cell, line) in enumerate(zip(sweep.cells, lines, strict=True), 1):
        assert part_of(sweep, [number]) == (cell,)
        assert line.split() == [str(number), cell.name, *cell.setting.name.split(), "·", "seed", str(cell.seed), "missing"]
    assert part_of(sweep, [2, 5, 2]) == (sweep.cells[1], sweep.cells[4])
    for only, shard, words in [
        ([7], "", "--only 7: the sweep has the runs 1 to 6"), ([0], "", "--only 0: "), ([1], "1/2", "give one of them"),
        *(([], wrong, f"--shard {wrong}: expected I/N") for wrong in ("0/2", "3/2", "2", "a/b", "1/2/3", "-1/2", "1/")),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=re.escape(words)):
            part_of(sweep, only, shard)


def test_a_run_that_another_process_makes_is_left_to_it(tmp_path: Path) -> None:
    sweep = swept(algorithms=["fedavg"], seeds=[0, 1])
    first, second = sweep.cells
    run_sweep(sweep, tmp_path, cells=[])
    lines: list[str] = []
    with held(tmp_path / "locks" / f"{first.name}.lock") as ours:
        assert ours
        assert run_sweep(sweep, tmp_path, workers=1, report=lines.append) == {}
    assert any(f"{first.name}: another process makes it" in line for line in lines)
    assert standing(sweep, tmp_path) == {first.name: "missing", second.name: "done"}


@pytest.mark.slow
def test_what_a_part_made_is_merged_and_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "grid.toml", tmp_path / "out"
    protections = ["none", {"label": "odd", "sum": "secagg", "min_cohort": 7}]
    path.write_text(
        tomli_w.dumps({**BASE, "sweep": {"algorithms": ["fedavg"], "protections": protections, "seeds": [0, 1]}}), encoding="utf-8"
    )
    words = ("sweep", str(path), "--out", str(out))
    assert in_process(monkeypatch, *words, "--merge") == 2
    assert "holds no sweep" in capsys.readouterr().err
    assert not out.exists()
    assert in_process(monkeypatch, *words, "--list") == 0
    assert capsys.readouterr().out.count(" missing\n") == 4
    assert not out.exists()
    assert in_process(monkeypatch, *words, "--only", "1", "--only", "3") == 0
    said = capsys.readouterr().out
    assert said.count("min_cohort = 7") == 2  # where it happened, and once at the end
    assert "failed: 1 of 2 runs" in said
    assert "--merge" in said
    assert not (out / "report.html").exists()
    assert in_process(monkeypatch, *words, "--merge") == 0
    said = capsys.readouterr().out
    assert "missing: 2 of 4 runs: 2 fedavg-none-s1, 4 fedavg-odd-s1" in said
    assert said.count("min_cohort = 7") == 1
    assert len(rows_of(out / "sweep.csv")) == 2
    assert (out / "report.html").is_file()
    assert in_process(monkeypatch, *words) == 0
    said = capsys.readouterr().out
    assert "missing" not in said
    assert re.search(r"2 of 4: .*min_cohort = 7.* \(fedavg-odd-s0, fedavg-odd-s1\)", said)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("summary.json")}
    assert in_process(monkeypatch, *words, "--merge") == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("summary.json")} == before
    for more in (["--list", "--merge"], ["--only", "1", "--merge"], ["--only", "9"], ["--shard", "1"]):
        assert in_process(monkeypatch, *words, *more) == 2


def test_an_audit_that_was_cut_short_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    """audit.json grows attack by attack, so that it is there is no sign that all are."""
    recorded = {**BASE, "run": {**BASE["run"], "record": "full"}}
    sweep = parse_sweep({**recorded, "sweep": {"algorithms": ["fedavg"]}})
    (cell,), calls = sweep.cells, []

    def audit(folder: Path, **options: Any) -> None:
        calls.append(folder)
        (folder / "audit.json").write_text('{"cells": []}', encoding="utf-8")
        if len(calls) == 1:
            raise SystemExit  # passes through what catches a run's errors, as a kill does

    run_sweep(sweep, tmp_path, cells=[])
    with pytest.raises(SystemExit):
        _run_cell(cell, sweep, tmp_path, None, audit)
    assert standing(sweep, tmp_path) == {cell.name: "begun"}
    assert not (tmp_path / "failed").exists(), "nothing failed"
    words = "stopped: 0 of 1 run done and kept, 1 begun run goes on where saved; to go on: cflpriv sweep a.toml"
    assert kept_words(sweep, tmp_path, "cflpriv sweep a.toml") == words
    for _ in range(2):  # the second finds everything done
        assert _run_cell(cell, sweep, tmp_path, None, audit) == ""
    assert len(calls) == 2
    assert standing(sweep, tmp_path) == {cell.name: "done"}


@pytest.mark.slow
def test_three_shards_of_which_one_is_killed_make_the_same_sweep_as_one_process(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    grid = {**BASE, "training": {**BASE["training"], "rounds": 8}}
    path.write_text(
        tomli_w.dumps({**grid, "sweep": {"algorithms": ["fedavg", "pacfl"], "protections": ["none", "haar"], "seeds": [0, 1, 2, 3]}}),
        encoding="utf-8",
    )
    words = [sys.executable, "-u", "-m", "cflpriv.cli", "sweep", str(path), "--out", str(tmp_path / "parts")]

    def shard(number: int) -> subprocess.Popen[str]:
        return subprocess.Popen([*words, "--shard", f"{number}/3"], stdout=subprocess.PIPE, encoding="utf-8", cwd=ROOT)

    processes = [shard(number) for number in (1, 2, 3)]
    assert processes[0].stdout is not None
    for line in processes[0].stdout:  # in the middle of a run, after one was made
        if line.startswith("[1/"):
            break
    processes[0].kill()
    processes[0].wait()
    for process in processes[1:]:
        assert process.wait(300) == 0
    sweep = load_sweep(path)
    assert "missing" in standing(sweep, tmp_path / "parts").values()
    time.sleep(0.5)  # its workers see that their parent is gone
    assert shard(1).wait(300) == 0
    assert set(standing(sweep, tmp_path / "parts").values()) == {"done"}
    assert subprocess.run([*words, "--merge"], cwd=ROOT, check=False).returncode == 0
    assert run_sweep(sweep, tmp_path / "whole", workers=1) == {}
    write_tables(tmp_path / "whole", sweep)
    for name in ("sweep.csv", "table.csv", "front.csv"):
        assert rows_of(tmp_path / "whole" / name) == rows_of(tmp_path / "parts" / name)
    assert len(rows_of(tmp_path / "parts" / "sweep.csv")) == 16


def test_tables_in_other_forms_hold_the_same(tmp_path: Path) -> None:
    """Parquet and DataFrame are optional: without their libraries there is CSV, and one clear error."""
    named: dict[str, Any] = {"algorithms": [{"name": "fedavg", "label": "plain"}], "protections": [{"label": "turned", "sum": "haar"}]}
    sweep = swept(**named, keys={"data.rotations": [[0, 90], [0, 180]]})
    run_sweep(sweep, tmp_path)
    written = write_tables(tmp_path, sweep)
    assert (tmp_path / "sweep.parquet" in written) == (util.find_spec("pyarrow") is not None)
    rows = rows_of(tmp_path / "sweep.csv")
    for table in (rows, rows_of(tmp_path / "table.csv")):  # by the labels, which keep settings apart
        assert [(row["algorithm"], row["protection"]) for row in table] == [("plain", "turned")] * 2
    if util.find_spec("pyarrow") is not None:
        packed = import_module("pyarrow.parquet").read_table(tmp_path / "sweep.parquet")
        assert [str(one) for one in packed["accuracy_mean"].to_pylist()] == [row["accuracy_mean"] for row in rows]
        assert packed["data.rotations"].to_pylist() == ["(0, 90)", "(0, 180)"]
    if util.find_spec("pandas") is None:
        with pytest.raises(InputError, match=r"^read_sweep: needs pandas"):
            cflpriv.read_sweep(tmp_path)
    else:
        frame = cflpriv.read_sweep(tmp_path)
        assert [str(one) for one in frame["accuracy_mean"]] == [row["accuracy_mean"] for row in rows]
    with pytest.raises(InputError, match="holds no sweep"):
        cflpriv.read_sweep(tmp_path / sweep.cells[0].name)


def test_a_run_whose_audit_failed_is_one_row_with_its_error(tmp_path: Path) -> None:
    """It was two, one without the error and one without all else: a mean over rows left nothing out, a count of runs was too high."""
    sweep = swept(algorithms=["fedavg"], seeds=[0, 1, 2])
    run_sweep(sweep, tmp_path, cells=part_of(sweep, [1]))
    (tmp_path / "failed").mkdir()
    for seed in (0, 1):
        (tmp_path / "failed" / f"fedavg-as_given-s{seed}.json").write_text('{"error": "no attack today"}', encoding="utf-8")
    write_tables(tmp_path, sweep)
    rows = rows_of(tmp_path / "sweep.csv")
    assert [(row["run"], row["algorithm"], row["seed"], row["error"]) for row in rows] == [
        (f"fedavg-as_given-s{seed}", "fedavg", str(seed), "no attack today") for seed in (0, 1)
    ]
    assert [bool(row["accuracy_mean"]) for row in rows] == [True, False]


def test_one_round_by_hand_runs(capsys: pytest.CaptureFixture[str]) -> None:
    spec = util.spec_from_file_location("one_round_by_hand", ROOT / "examples" / "one_round_by_hand.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    said = capsys.readouterr().out
    found, truth = (re.findall(rf"{words}: +({{.*}})", said)[0] for words in ("clusters found", "true groups"))
    assert found == truth  # clusters are numbered by first client, as the groups are here
    assert "secagg Masked" in said


def test_a_sweep_takes_one_process_a_core_where_nobody_says() -> None:
    with patch("cflpriv.experiments.run.workers.cores", lambda: 8):
        assert parse_sweep({**BASE, "sweep": {"seeds": [0]}}).workers == 8
        assert parse_sweep({**BASE, "sweep": {"seeds": [0], "workers": 3}}).workers == 3
        shared = {**BASE, "run": {**BASE.get("run", {}), "workers": 3}}
        assert parse_sweep({**shared, "sweep": {"seeds": [0]}}).workers == 2


@dataclass(frozen=True)
class _Job:
    name: str


def _warn(job: _Job) -> str:
    warnings.warn(f"{job.name} rows repeat", InputWarning, stacklevel=1)
    warnings.warn(f"slow path {job.name[-1]}", CflprivWarning, stacklevel=1)
    warnings.warn("overflow\nin a line", RuntimeWarning, stacklevel=1)
    return ""


def test_workers_warn_once_and_leave_what_summaries_say() -> None:
    with pytest.warns(CflprivWarning) as caught:
        assert dict(ended([_Job(f"job{number}") for number in range(3)], _warn, 2)) == {"job0": "", "job1": "", "job2": ""}
    words = sorted(str(one.message) for one in caught if isinstance(one.message, CflprivWarning))
    assert len(words) == 2
    assert words[0].startswith("overflow in a line (RuntimeWarning")
    assert words[1].startswith("slow path ")
