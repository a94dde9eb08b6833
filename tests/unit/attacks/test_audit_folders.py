"""Audits of run folders as people have them: killed and taken up, recorded in part, mixed up, damaged; Ctrl-C; how long it takes."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attack_scenes import config
from typer.testing import CliRunner

from cflpriv.attacks import ATTACKS, BUDGETS, Attack, Cell
from cflpriv.attacks import audit as audit_module
from cflpriv.attacks.audit import audit_run
from cflpriv.attacks.evidence import fresh_runs
from cflpriv.attacks.evidence.fresh_runs import fresh_scene
from cflpriv.attacks.figures.leakage import nothing
from cflpriv.attacks.figures.plan import AuditPlan, Clock, plan_of, spoken
from cflpriv.cli import app, main
from cflpriv.data import build_population
from cflpriv.errors import InputError, TrainingDiverged
from cflpriv.experiments import run_experiment
from cflpriv.experiments.digests import record_digests
from cflpriv.experiments.run.resume import locked

FEW = ("signature_inversion", "label_inference", "cluster_identity")
PROTECTED = {"gram": ["haar"], "sum": "secagg"}
CERTAIN = {"insecure_test_entropy": True}
"""The same secrets in every run, so that runs can be compared."""


class Killed(BaseException):
    """Ends a run where nothing catches it."""


def run_in_two(made: Any, folder: Path) -> None:
    """A run that is killed after its first round and taken up again."""

    def kill(row: Any) -> None:
        raise Killed

    with pytest.raises(Killed):
        run_experiment(made, folder, tick=kill)
    assert not (folder / "summary.json").exists()
    run_experiment(made, folder, resume=True)
    in_summary(seconds=1.0)(folder)
    assert (folder / "resumes.jsonl").is_file()


def quick(folder: Path, attacks: Any = FEW) -> list[Cell]:
    return audit_run(folder, attacks=attacks, budget="quick")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    run_experiment(config(protection=PROTECTED, run=CERTAIN), folder)
    in_summary(seconds=1.0)(folder)  # a slow run would have fewer seeds
    return folder


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "run"))


# --- an unprotected twin that diverges


@pytest.mark.slow
def test_without_a_twin_the_audit_names_it_and_goes_on(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin neither clips nor adds noise, so that it may diverge where its run does not; here it has too large a learning rate."""
    opened, said = fresh_runs._opened, list[str]()
    monkeypatch.setattr(fresh_runs, "_opened", lambda made: opened(made).with_("training", lr=1e19))
    monkeypatch.setitem(ATTACKS, "rerun", Attack("reruns", lambda case: ([nothing(case, "rerun", "figure", "made")], None), reruns=True))
    with pytest.raises(TrainingDiverged, match="the unprotected twin of the run with seed 0 diverged: client"):
        fresh_scene(config(protection=PROTECTED, run=CERTAIN), build_population(config().data), 1)
    cells = audit_run(run, adversary="server", attacks=[*FEW, "rerun"], budget="quick", report=said.append)
    assert {cell.attack: cell.status for cell in cells} == {**dict.fromkeys(FEW, "not_attempted"), "rerun": "not_applicable"}
    assert all("the unprotected twin of the run with seed 0 diverged: client" in cell.line() for cell in cells if cell.attack in FEW)
    assert any("twin of the run with seed 0 diverged" in line and "only attacks that need no twin go on" in line for line in said)


@pytest.mark.slow
def test_a_fresh_run_that_diverges_is_named_beside_the_seeds_that_do_not(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, fast = fresh_runs.reseeded, {"lr": 1e19}
    monkeypatch.setitem(BUDGETS, "standard", replace(BUDGETS["standard"], seeds=4))
    monkeypatch.setattr(audit_module, "reseeded", lambda given, seed: made(given, seed).with_("training", **fast if seed == 1000 else {}))
    cells = audit_run(run, adversary="server", attacks=FEW[-1:])
    assert {cell.status for cell in cells if cell.metric == "attempted"} == {"not_attempted"}
    assert any("with seed 1000 diverged: client" in cell.note for cell in cells)
    assert {cell.seeds for cell in cells if cell.value is not None} == {(0, 2000, 3000)}


# --- taken up, recorded in part


@pytest.mark.slow
def test_a_resumed_run_is_audited_like_an_uninterrupted_one(recorded: Path, tmp_path: Path) -> None:
    """Secure sums are rounded at random, anew after a resumption: by 2e-9 here, which a search for label shares turns into .003."""
    run_in_two(config(protection=PROTECTED, run=CERTAIN), tmp_path / "two")
    cells = quick(tmp_path / "two")
    assert {cell.adversary for cell in cells} == {"server", "server+1", "client", "released"}
    whole = quick(Path(shutil.copytree(recorded, tmp_path / "whole")))
    rest, others = ([replace(cell, value=None, low=None, high=None, gain_high=None) for cell in made] for made in (cells, whole))
    assert rest == others
    for cell, other in zip(cells, whole, strict=True):
        near = 0.01 if cell.metric == "histogram_l1" else 1e-6
        assert cell.value == (None if other.value is None else pytest.approx(other.value, abs=near)), cell.line()


@pytest.mark.slow
def test_a_resumed_run_recorded_in_part_is_audited_like_an_uninterrupted_one(tmp_path: Path) -> None:
    made = config(run={"record": "attackable", "record_rounds": [1], "record_clients": list(range(12)), **CERTAIN})
    run_in_two(made, tmp_path / "two")
    run_experiment(made, tmp_path / "whole")
    in_summary(seconds=1.0)(tmp_path / "whole")
    cells = quick(tmp_path / "two")
    assert cells == quick(tmp_path / "whole")
    assert {cell.adversary: cell.status for cell in cells if cell.metric == "histogram_l1"} == {
        "server": "leaks", "server+1": "leaks", "client": "not_attempted", "released": "not_attempted",
    }  # fmt: skip


@pytest.mark.slow
def test_two_audits_of_one_folder_do_not_run_at_once(run: Path) -> None:
    with locked(run), pytest.raises(InputError, match="another process"):
        quick(run, ("cluster_identity",))
    assert not (run / "audit.json").exists()
    assert quick(run, ("cluster_identity",))


@pytest.mark.slow
def test_everything_attackable_is_as_good_as_a_full_record(recorded: Path, tmp_path: Path) -> None:
    run_experiment(config(protection=PROTECTED, run={"record": "attackable", **CERTAIN}), tmp_path / "part")
    in_summary(seconds=1.0)(tmp_path / "part")
    assert quick(tmp_path / "part") == quick(Path(shutil.copytree(recorded, tmp_path / "whole")))


# --- stopped with Ctrl-C


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT arrives as KeyboardInterrupt, also where tests run in the background of a shell that ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_keeps_what_is_finished_and_the_same_command_goes_on(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUDGETS, "standard", replace(BUDGETS["standard"], seeds=2))
    whole = audit_run(Path(shutil.copytree(run, tmp_path / "whole")), adversary="server", attacks=FEW)
    attack = ATTACKS["label_inference"]
    calls: list[int] = []

    def pressed(case: Any) -> Any:
        calls.append(case.seed)
        if len(calls) == 2:  # that of the fresh seed
            os.kill(os.getpid(), signal.SIGINT)
        return attack.cells(case)

    monkeypatch.setitem(ATTACKS, "label_inference", replace(attack, cells=pressed))
    command = ["audit", str(run), "--adversary", "server", "--attacks", ",".join(FEW), "--workers", "1"]
    stopped = CliRunner().invoke(app, command)
    assert stopped.exit_code == 1
    assert "standard audit, about" in stopped.output.splitlines()[0]
    assert "2 seeds" in stopped.output.splitlines()[0]
    assert stopped.stderr.count("\n") == 1
    assert f"finished results are in {run / 'audit.json'}; the same command resumes" in stopped.stderr
    units = json.loads((run / "audit" / "units.json").read_text(encoding="utf-8"))["units"]
    assert list(units) == [*(f"server|{name}|0" for name in FEW), f"server|{FEW[0]}|1000"]
    assert {cell["attack"] for cell in json.loads((run / "audit.json").read_text(encoding="utf-8"))["cells"]} == set(FEW)
    calls.clear()
    going_on = CliRunner().invoke(app, command)
    assert going_on.exit_code == 0
    assert "1 seed of 2 left" in going_on.output.splitlines()[0]
    assert calls == [1000]  # nothing is done twice
    kept = json.loads((run / "audit.json").read_text(encoding="utf-8"))["cells"]
    names = [field.name for field in fields(Cell)]
    assert [Cell(**{name: cell[name] for name in names} | {"seeds": tuple(cell["seeds"])}) for cell in kept] == whole


@pytest.mark.slow
def test_ctrl_c_before_anything_is_finished_says_so(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(case: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setitem(ATTACKS, FEW[0], replace(ATTACKS[FEW[0]], cells=pressed))
    stopped = CliRunner().invoke(app, ["audit", str(run), "--attacks", FEW[0], "--budget", "quick"])
    assert stopped.exit_code == 1
    assert "nothing was finished" in stopped.stderr
    assert not (run / "audit.json").exists()


# --- how long it takes


def plan(seconds: float, budget: str = "standard", *, rounds: int = 10, size: int = 1, protected: bool = True) -> AuditPlan:
    summary = {"rounds": rounds, "seconds": seconds}
    return plan_of(summary, 7, size=size, is_open=not protected, is_whole=not protected, budget=BUDGETS[budget])


@pytest.mark.parametrize(("protected", "runs"), [(True, 9), (False, 4)])
def test_the_plan_counts_the_runs_it_makes(protected: bool, runs: int) -> None:
    made = plan(8.0, protected=protected)
    assert made.seeds == (7, 1007, 2007, 3007, 4007)
    assert made.runs(made.seeds) == runs  # twin of the recorded one, then two a seed; in the open one a seed
    assert made.runs(made.seeds[3:]) == 2 * made.each
    assert made.estimate(made.seeds, 4) == pytest.approx(8 * runs + made.estimate(made.seeds, 4) - made.estimate(made.seeds, 0))
    words = made.line("standard", made.seeds, 11, ["server"])
    assert f"5 seeds, {runs} runs of 8.0 s, 11 attacks on each (server)" in words
    assert words.startswith(f"standard audit, about {spoken(made.estimate(made.seeds, 11))}: ")


@pytest.mark.parametrize(("seconds", "seeds"), [(1, 5), (11, 5), (15, 4), (40, 2), (46, 1), (80, 1)])
def test_fresh_runs_stay_within_the_budget(seconds: float, seeds: int) -> None:
    made = plan(seconds)
    assert len(made.seeds) == seeds
    assert (made.runs(made.seeds) - made.here) * seconds <= BUDGETS["standard"].seconds
    assert not made.cut


def test_a_long_or_large_run_is_cut() -> None:
    made = plan(900.0)
    assert (made.rounds, made.cut, made.seeds) == (1, True, (7,))
    assert made.seconds == pytest.approx(90.0)
    assert "the first 1 round(s) only" in made.line("standard", made.seeds, 1, ["server"])
    assert plan(1.0, size=4 << 30).rounds == 2  # a quarter of the payloads are a GiB
    assert plan(1.0, rounds=0).runs((7,)) == 1


def test_what_is_left_follows_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("cflpriv.attacks.figures.plan.time.perf_counter", lambda: now[0])
    made = AuditPlan((7, 8, 9), rounds=1, cut=False, here=0, each=2, seconds=10.0)
    clock = Clock(made, made.seeds, attacks=0, began=100.0)
    clock.plan = replace(made, here=2)  # every seed is as long as any other
    assert clock.line(7) == "seed 7, 1 of 3"
    now[0] += 30
    assert clock.line(8) == "seed 8, 2 of 3; about 60 s left"
    now[0] += 50
    assert clock.line(9) == "seed 9, 3 of 3; about 40 s left"
    assert [spoken(seconds) for seconds in (0.01, 2.25, 41.2, 200, 9000)] == ["0.1 s", "2.2 s", "41 s", "3 minutes", "2.5 hours"]


# --- mixed up and damaged


def swapped(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / name).read_text(encoding="utf-8")
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1), encoding="utf-8")

    return change


def in_summary(**values: Any) -> Callable[[Path], None]:
    """A summary that is another from the start, digests and all."""

    def change(folder: Path) -> None:
        path = folder / "summary.json"
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8")
        record_digests(folder)

    return change


def from_another_run(name: str) -> Callable[[Path], None]:
    """A folder of a run that differs in nothing but its secrets (and its digests)."""

    def change(folder: Path) -> None:
        made = config(protection=PROTECTED)
        run_experiment(made, folder.parent / "other")
        shutil.rmtree(folder / name)
        shutil.copytree(folder.parent / "other" / name, folder / name)

    return change


def bit_flipped(folder: Path) -> None:
    path = sorted((folder / "transcript").glob("payloads_*"))[-1]
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)


def cut_short(folder: Path) -> None:
    (folder / "summary.json").write_text((folder / "summary.json").read_text(encoding="utf-8")[:-40], encoding="utf-8")


def added_secret(folder: Path) -> None:
    secret = json.loads((folder / "secrets" / "client_0.json").read_text(encoding="utf-8")) | {"party": "client:3"}
    (folder / "secrets" / "client_3.json").write_text(json.dumps(secret), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "file", "words"),
    [
        (lambda folder: shutil.rmtree(folder), "run", "is not a run folder"),
        (lambda folder: (folder / "config.toml").write_bytes(b"\xff\xfe\x00"), "config.toml", ""),
        (swapped("config.toml", "lr = 0.1", "lr = 0.2"), "config.toml", "is not as the run left it"),
        (swapped("config.toml", "seed = 0", "seed = 1"), "", "was"),
        (lambda folder: (folder / "summary.json").unlink(), "summary.json", "not complete"),
        (cut_short, "summary.json", "is not a run's summary"),
        (in_summary(rounds="two"), "summary.json", "rounds = 'two' is of a wrong type"),
        (in_summary(rounds=10**9), "summary.json", "one of them was changed"),
        (in_summary(seconds=float("nan")), "summary.json", "seconds = nan is no duration"),
        (swapped("summary.json", '"accuracy_mean"', '"accuracy_mode"'), "summary.json", "is not as the run left it"),
        (lambda folder: (folder / "digests.json").unlink(), "digests.json", "is missing"),
        (lambda folder: (folder / "digests.json").write_text("[]", encoding="utf-8"), "digests.json", "is no table of digests"),
        (in_summary(data_digest="0" * 32), "summary.json", "made with other data"),
        (bit_flipped, "messages.jsonl", "does not match its digest"),
        (lambda folder: sorted((folder / "transcript").glob("payloads_*"))[0].write_bytes(b"short"), "payloads_", "safetensors"),
        (from_another_run("transcript"), "messages.jsonl", "is not as the run left it"),
        (from_another_run("secrets"), "client_0.json", "is not as the run left it"),
        (added_secret, "client_3.json", "is not as the run left it"),
        (lambda folder: (folder / "secrets" / "client_0.json").unlink(), "client_0.json", "is missing"),
        (
            lambda folder: (folder / "secrets" / "client_0.json").write_text("[]", encoding="utf-8"),
            "client_0.json", "is not a party's secrets",
        ),
        (lambda folder: (folder / "audit").write_text("", encoding="utf-8"), "audit", "cannot be written"),
    ],
)  # fmt: skip
def test_a_bad_folder_is_one_clear_line_and_exit_code_2(
    change: Callable[[Path], None], file: str, words: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change(run)
    monkeypatch.setattr("sys.argv", ["cflpriv", "audit", str(run), "--attacks", "cluster_identity", "--budget", "quick"])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err
    assert end.value.code == 2, said
    assert said.startswith("cflpriv: ")
    assert said.count("\n") == 1
    assert file in said
    assert words in said


@pytest.mark.slow
def test_an_audit_of_a_run_that_was_stopped_by_ctrl_c_is_of_its_rounds(tmp_path: Path) -> None:
    made = config(training={"rounds": 3}, run=CERTAIN)

    def press(row: dict[str, Any]) -> None:
        if row["round"] == 0:
            os.kill(os.getpid(), signal.SIGINT)

    run_experiment(made, tmp_path / "run", tick=press)
    cells = quick(tmp_path / "run", ["label_inference"])
    assert {cell.adversary: cell.status for cell in cells if cell.metric == "histogram_l1"} == {
        "server": "leaks", "server+1": "leaks", "client": "not_applicable", "released": "not_applicable",
    }  # fmt: skip
    assert np.load(tmp_path / "run" / "audit" / "label_inference_server.npz")["label_guess"].shape == (20, 10)
    run_experiment(made, tmp_path / "run", resume=True)
    assert json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))["rounds"] == 3
    assert quick(tmp_path / "run", ["label_inference"])


# --- several processes


@pytest.mark.slow
def test_two_processes_give_the_figures_of_one(run: Path, tmp_path: Path) -> None:
    """Seeds and attacks are divided; every figure, its interval and its p are the same."""
    other = Path(shutil.copytree(run, tmp_path / "other"))
    lines: list[str] = []
    alone = audit_run(run, adversary="server", attacks=FEW, budget="quick")
    divided = audit_run(other, adversary="server", attacks=FEW, budget="quick", workers=2, report=lines.append)
    assert [cell.as_json() for cell in divided] == [cell.as_json() for cell in alone]
    assert any("2 parts in 2 processes" in line for line in lines)


@pytest.mark.slow
def test_ctrl_c_in_several_processes_keeps_what_is_done(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process is stopped after its second unit; the next audit begins with its third."""
    attacked, units = audit_module._attacked_units, list[str]()

    def stopped(*given: Any) -> Iterator[Any]:
        for place, (unit, cells) in enumerate(attacked(*given)):
            if place == 2:
                raise KeyboardInterrupt
            units.append(unit)
            yield unit, cells

    def at_once(jobs: Sequence[audit_module.AuditJob], work: Callable[[Any], str], workers: int) -> Iterator[tuple[str, str]]:
        for job in jobs:
            with suppress(KeyboardInterrupt):
                yield job.name, work(job)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(audit_module, "_attacked_units", stopped)
        patched.setattr(audit_module, "ended", at_once)
        with pytest.raises(KeyboardInterrupt):
            audit_run(run, budget="quick", workers=2)
    assert len(units) == 4
    kept = json.loads((run / "audit" / "units.json").read_text(encoding="utf-8"))
    assert set(kept["units"]) == set(units)
    lines: list[str] = []
    audit_run(run, budget="quick", report=lines.append)
    again = [line for line in lines for unit in units if line.endswith(f": {unit.split('|')[1]}, adversary {unit.split('|')[0]}")]
    assert not again
