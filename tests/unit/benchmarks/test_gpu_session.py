"""Calls of `make gpu` with the listed packages alone: budget, limits of rows, what is missing, and going on after an interruption."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from listed_packages import only_listed, unlisted, without

from benchmarks.gpu.report import read
from benchmarks.gpu.rows import ROOT, Setting
from benchmarks.gpu.session import Session

ROWS = ("quick", "lacking", "too long", "ending", "raising", "slow", "last")


def command(out: Path, budget: float) -> list[str]:
    words = ["--device", "cpu", "--tiny", "--out", str(out), "--budget", str(budget), "--modules", "gpu_test_rows", "--kit", "none"]
    return [sys.executable, "-m", "benchmarks", "gpu", *words]


def called(out: Path, environment: Mapping[str, str], budget: float = 60) -> tuple["subprocess.CompletedProcess[str]", float]:
    begun = time.monotonic()
    done = subprocess.run(command(out, budget), cwd=ROOT, env=dict(environment), capture_output=True, text=True, encoding="utf-8")
    return done, time.monotonic() - begun


def rows_in(out: Path) -> dict[str, dict[str, Any]]:
    path = out / "gpu.json"
    return {row["row"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]} if path.is_file() else {}


def measured(out: Path) -> list[str]:
    path = out / "measured.txt"
    return [line.rpartition(" ")[0] for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(reached: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_training_and_attacks_on_arrays_import_listed_packages_alone_and_runs_no_writer_of_toml(tmp_path: Path) -> None:
    arrays = (
        "algorithms",
        "attacks.inversion.image_search",
        "attacks.membership.member_scores",
        "clustering.similarity",
        "tasks.evaluation",
        "tasks.training",
    )
    for names, modules in ((unlisted(), arrays), ({"tomli_w"}, ("experiments", "attacks.audit", "attacks.foreign.foreign_folder"))):
        code = "".join(f"import cflpriv.{module}\n" for module in modules)
        environment = without(names, tmp_path / modules[0])
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=dict(environment), capture_output=True, text=True, encoding="utf-8"
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_budget_is_kept_and_the_next_calls_go_on(tmp_path: Path) -> None:
    """A package that is missing is named. What takes too long, or ends its process, is one failed row. No row is measured twice."""
    environment, out = only_listed(tmp_path / "blocked"), tmp_path / "out"
    assert "msgspec" in unlisted()
    done, took = called(out, environment, budget=3.5)
    assert took < 3.5 + 10
    assert "the budget is used up; the next call goes on with 'gpu_test_rows: " in done.stderr
    assert set(rows_in(out)) < set(ROWS)
    assert "last" not in rows_in(out), "there was time for everything: the budget was never reached"
    done, _ = called(out, environment)
    assert done.returncode == 1, done.stderr
    rows = rows_in(out)
    assert tuple(rows) == ROWS
    assert [row["status"] for row in rows.values()] == ["done", "skipped", "failed", "failed", "failed", "done", "done"]
    assert rows["lacking"]["note"] == "No module named 'msgspec'"
    assert rows["too long"]["note"] == "not done after 0.5 s"
    assert rows["ending"]["note"].startswith("its process ended (exit code 3)")
    assert rows["raising"]["note"] == "ValueError: of two lines"
    assert rows["quick"]["figures"] == {"s": 0.0, "nothing": None}
    assert measured(out).count("quick") == 1
    assert "| quick | 0 | – | s ≥ 1 |" in done.stdout, "a rehearsal judges no floor"
    files = [path.name for path in out.iterdir()]
    assert len(files) <= 8
    assert all(name.isascii() and name.replace("_", "").replace(".", "").replace("-", "").isalnum() for name in files)


def test_a_worker_that_does_not_start_is_a_failed_row_until_one_does(tmp_path: Path) -> None:
    """Here its PYTHONPATH has a module of the name that each worker imports first."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "argparse.py").write_text("raise ImportError('broken')\n", encoding="utf-8")
    out, setting = tmp_path / "out", Setting("cpu", True, tmp_path / "out")
    out.mkdir()
    for folder, status in (("broken", "failed"), ("helpers", None)):
        report = read(out)
        environment = {**os.environ, "PYTHONPATH": str({"broken": tmp_path, "helpers": ROOT / "tests"}[folder] / folder)}
        Session(setting, report, time.monotonic() + 60, ["no_such_rows"], environment).measure()
        assert report.rows.get("worker: start", {}).get("status") == status
    assert list(report.rows) == ["no_such_rows: all rows"]


@pytest.mark.slow
def test_what_failed_or_was_skipped_is_measured_again_and_rows_of_another_machine_are_put_aside(tmp_path: Path) -> None:
    environment, out = only_listed(tmp_path / "blocked"), tmp_path / "out"
    assert called(out, environment)[0].returncode == 1
    first = Counter(measured(out))
    assert called(out, environment)[0].returncode == 1
    more = Counter(measured(out)) - first
    assert more == {"lacking": 1, "too long": 1, "ending": 1}
    report = json.loads((out / "gpu.json").read_text(encoding="utf-8"))
    (out / "gpu.json").write_text(json.dumps(report | {"machine": {"device": "Another card, 80 GB"}}), encoding="utf-8")
    done, _ = called(out, environment)
    assert "of another machine" in done.stderr
    assert json.loads((out / "gpu_Another_card_80_GB.json").read_text(encoding="utf-8"))["rows"] == report["rows"]
    assert tuple(rows_in(out)) == ROWS
    assert Counter(measured(out))["quick"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_an_interrupted_call_leaves_no_process_and_is_gone_on_with(tmp_path: Path, number: signal.Signals) -> None:
    environment, out = only_listed(tmp_path / "blocked"), tmp_path / "out"
    call = subprocess.Popen(
        command(out, 90), cwd=ROOT, env={**environment, "SLOW_SECONDS": "40"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells start what is in the background without it
        encoding="utf-8",
    )  # fmt: skip
    until(lambda: "slow" in measured(out) and "raising" in rows_in(out))
    worker = int((out / "measured.txt").read_text(encoding="utf-8").split()[-1])
    assert alive(worker)
    os.kill(call.pid, number)
    text, _ = call.communicate(timeout=20)
    assert "Traceback" not in text
    until(lambda: not alive(worker), 10)
    assert set(rows_in(out)) == set(ROWS) - {"slow", "last"}
    called(out, environment)
    assert tuple(rows_in(out)) == ROWS
    assert measured(out).count("quick") == 1
    assert measured(out).count("slow") == 2
