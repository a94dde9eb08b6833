"""Runs that are killed, starved of disk or tampered with: what was complete is there, and a resumed run ends as an uninterrupted one."""

import errno
import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import in_process
from small_runs import configured

from cflpriv.algorithms import ALGORITHMS
from cflpriv.contract.transcript import read_transcript
from cflpriv.data import build_population
from cflpriv.errors import InputError
from cflpriv.experiments import Config, advance, finish, parse_config, run_experiment, start
from cflpriv.experiments.report.report import write_report
from cflpriv.experiments.run.checkpoint import _RENAMED, TYPES, _type_of, latest, load_checkpoint, restore, save_checkpoint, tree_digest
from cflpriv.experiments.run.resume import LOCK, Counted, last_checkpoint, locked
from cflpriv.experiments.run.run import admit, prepare
from cflpriv.experiments.run.verify import verify
from cflpriv.federation import server_state
from cflpriv.federation.server import FederationServer
from cflpriv.federation.server_state import SKIPPED, SKIPPED_EPOCHS
from cflpriv.files import append, write_arrays, write_atomically
from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.group import NUMBERS

SMALL: dict[str, Any] = {
    "data": {"clients": 8, "rotations": [0, 90], "test_samples_per_client": 20, "newcomers": 1},
    "model": {"name": "mlp", "hidden": 4},
    "training": {"rounds": 8, "lr": 0.1, "weights": "equal", "participation": 0.8, "batch_size": 60},
    "algorithm": {"name": "pacfl"},
    "run": {"insecure_test_entropy": True, "record": "full"},
}
small_config = partial(configured, SMALL)
PROTECTIONS: dict[str, dict[str, Any]] = {"none": {}, "haar": {"gram": ["haar"], "sum": "haar"}, "secagg": {"sum": "secagg"}}
SCENE = build_population(parse_config(SMALL).data)


def run_or_resume(config: Config, out: Path, **options: Any) -> dict[str, Any]:
    return run_experiment(config, out, population=SCENE, resume=True, **options)


def final(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "checkpoints").iterdir())}


def timeless(folder: Path) -> tuple[Any, Any]:
    """Rows and summary without what the clock says."""

    def without(row: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in row.items() if "seconds" not in key}

    rows = [without(json.loads(line)) for line in (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    return rows, without(json.loads((folder / "summary.json").read_text(encoding="utf-8")))


class Stop(BaseException):
    """Ends a run where nothing catches it: what a kill leaves behind, without a process."""


def stopping(after: int) -> Any:
    def tick(row: dict[str, Any]) -> None:
        if row["round"] + 1 == after:
            raise Stop

    return tick


def interrupted(config: Config, out: Path, after: int) -> None:
    with pytest.raises(Stop):
        run_or_resume(config, out, tick=stopping(after))


# --- ending early, going on


def test_the_summary_of_an_interruption_is_not_taken_for_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C wrote a summary; the resumed run is killed between its final checkpoint and its own summary."""
    config = small_config(algorithm={"name": "fedavg"}, training={"rounds": 3})

    def ctrl_c(row: dict[str, Any]) -> None:
        if row["round"] == 0:
            os.kill(os.getpid(), signal.SIGINT)

    assert run_or_resume(config, tmp_path / "run", tick=ctrl_c)["rounds"] == 1

    def killed(*anything: Any) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr("cflpriv.experiments.run.folder._measured", killed)
        with pytest.raises(Stop):
            run_or_resume(config, tmp_path / "run")
    assert latest(tmp_path / "run" / "checkpoints") == "final"
    assert run_or_resume(config, tmp_path / "run")["rounds"] == 3
    run_or_resume(config, tmp_path / "whole")
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")


def test_a_handler_of_ctrl_c_that_a_system_has_installed_stays(tmp_path: Path) -> None:
    """Flower ends its server's app by SIGINT when the SuperLink is gone: a run that waited for its round would hold the folder for ever."""
    config = small_config(algorithm={"name": "fedavg"}, training={"rounds": 3})

    def ended(number: int, frame: Any) -> None:
        raise Stop

    before = signal.signal(signal.SIGINT, ended)
    try:
        with pytest.raises(Stop):
            run_or_resume(config, tmp_path / "run", tick=lambda row: signal.raise_signal(signal.SIGINT) if row["round"] == 1 else None)
        assert signal.getsignal(signal.SIGINT) is ended
    finally:
        signal.signal(signal.SIGINT, before)
    assert run_or_resume(config, tmp_path / "run")["rounds"] == 3
    run_or_resume(config, tmp_path / "whole")
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")


@pytest.mark.parametrize("protection", ["none", pytest.param("haar", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "algorithm",
    [
        "pacfl",
        "cfl",
        pytest.param("cfl, test", marks=pytest.mark.slow),
        "ifca",
        "stocfl",
        "pfedlia",
        "r_dpcfl",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("ifca, test", "flexcfl", "ocfl", "fedrc", "fedgwc")),
        "fedavg",
        "local",
    ],
)
def test_a_resumed_run_ends_as_an_uninterrupted_one(algorithm: str, protection: str, tmp_path: Path) -> None:
    options: dict[str, dict[str, Any]] = {
        "pfedlia": {"warm_up": 2}, "stocfl": {"tau": 0.3}, "cfl": {"eps2": 0.75}, "cfl, test": {"patience": 1}, "ifca": {"k": 2},
    }  # fmt: skip
    more = options.get(algorithm, {})
    algorithm = algorithm.partition(", ")[0]
    data = {"newcomers": 0 if algorithm == "local" else 1}
    config = small_config(algorithm={"name": algorithm, **more}, protection=PROTECTIONS[protection], training={"rounds": 5}, data=data)
    run_or_resume(config, tmp_path / "whole")
    for after in (1, 3):
        interrupted(config, tmp_path / str(after), after)
        run_or_resume(config, tmp_path / str(after))
        assert final(tmp_path / str(after)) == final(tmp_path / "whole")
        assert timeless(tmp_path / str(after)) == timeless(tmp_path / "whole")
        if algorithm != "local":  # which sends nothing
            whole, resumed = (read_transcript(tmp_path / name / "transcript") for name in ("whole", str(after)))
            assert [message.digest for message in whole] == [message.digest for message in resumed]


def test_a_resumed_saver_goes_on_counting(tmp_path: Path) -> None:
    config = small_config(algorithm={"name": "ifca", "k": 2, "stable_rounds": 2}, training={"rounds": 10, "lr": 0.001})
    run_or_resume(config, tmp_path / "whole")
    saving = [row["sent_one_model"] for row in timeless(tmp_path / "whole")[0]]
    assert True in saving[4:], "its counts are of several rounds"
    interrupted(config, tmp_path / "cut", saving.index(True) - 1)
    run_or_resume(config, tmp_path / "cut")
    assert timeless(tmp_path / "cut") == timeless(tmp_path / "whole")


@pytest.mark.slow
def test_a_run_resumes_between_the_sums_that_find_clusters(tmp_path: Path) -> None:
    few = {"k": 2, "moments": 2, "cell_steps": 2}
    config = small_config(algorithm={"name": "private_clusters", **few}, training={"rounds": 8})
    run_or_resume(config, tmp_path / "whole")
    for after in (1, 2, 3, 5, 6):
        interrupted(config, tmp_path / str(after), after)
        run_or_resume(config, tmp_path / str(after))
        assert final(tmp_path / str(after)) == final(tmp_path / "whole")
        assert timeless(tmp_path / str(after)) == timeless(tmp_path / "whole")


def test_an_audit_of_the_part_that_was_there_is_put_aside(tmp_path: Path) -> None:
    """Else a report would show it as one of the whole run."""
    out = tmp_path / "run"
    config = small_config(algorithm={"name": "fedavg"}, training={"rounds": 3})
    interrupted(config, out, 1)
    write_atomically(out / "audit.json", "[]")
    (out / "audit").mkdir()
    write_atomically(out / "audit" / "units.json", "{}")
    assert run_or_resume(config, out)["rounds"] == 3
    assert not (out / "audit.json").exists()
    assert not (out / "audit").exists()
    assert (out / "interrupted" / "1" / "audit.json").read_text(encoding="utf-8") == "[]"
    assert (out / "interrupted" / "1" / "audit" / "units.json").read_text(encoding="utf-8") == "{}"
    write_atomically(out / "audit.json", "[]")
    for summary in ((out / "summary.json").read_text(encoding="utf-8"), "damaged"):
        write_atomically(out / "summary.json", summary)
        assert run_or_resume(config, out)["rounds"] == 3
        assert (out / "audit.json").exists(), "no round was added"


def test_a_folder_from_before_a_key_was_there_goes_on(tmp_path: Path) -> None:
    config = small_config(algorithm={"name": "fedavg"}, training={"rounds": 3})
    interrupted(config, tmp_path / "run", 1)
    path = tmp_path / "run" / "config.toml"
    without = path.read_text(encoding="utf-8").replace("normalise = true\n", "")
    assert without != path.read_text(encoding="utf-8")
    path.write_text(without, encoding="utf-8")
    assert run_or_resume(config, tmp_path / "run")["rounds"] == 3
    with pytest.raises(InputError, match=r"model\.normalise is False, but .* has True"):
        run_or_resume(config.with_("model", normalise=False), tmp_path / "run")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithms_state_can_be_saved_and_read(name: str, tmp_path: Path) -> None:
    """A kind of state that nobody added to `TYPES` fails here, not after an hour of somebody's run."""
    more: dict[str, Any] = {"pfedlia": {"warm_up": 1}, "private_clusters": {"k": 1}}.get(name, {})
    config = small_config(algorithm={"name": name, **more}, training={"rounds": 2}, data={"newcomers": 0})
    simulation = start(config, population=SCENE)
    advance(simulation)
    save_checkpoint(tmp_path, "x", simulation.state, simulation.federation, {}, simulation.simulated)
    later = prepare(config, population=SCENE, **load_checkpoint(tmp_path, "x").parties())
    later.state = restore(load_checkpoint(tmp_path, "x"), later.federation)
    save_checkpoint(tmp_path, "y", later.state, later.federation, {}, later.simulated)
    for side in ("safetensors", "clients.safetensors"):
        assert (tmp_path / f"x.{side}").read_bytes() == (tmp_path / f"y.{side}").read_bytes()
    assert load_checkpoint(tmp_path, "x").tree["state"] == load_checkpoint(tmp_path, "y").tree["state"]


def test_under_secure_sums_a_resumed_run_completes_and_never_takes_a_slot_twice(tmp_path: Path) -> None:
    config = small_config(
        protection=PROTECTIONS["secagg"], run={"insecure_test_entropy": False, "checkpoint_every": 2}, training={"rounds": 5}
    )
    interrupted(config, tmp_path / "run", 3)
    interrupted(config, tmp_path / "run", 4)
    summary = run_or_resume(config, tmp_path / "run")
    assert summary["rounds"] == 5
    aside = [
        json.loads(line) for line in (tmp_path / "run" / "interrupted" / "1" / "messages.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    slots = [json.loads(line["header"])["context"]["slot"] for line in aside if "secagg" in json.loads(line["header"])["kind"]]
    kept = [message.context["slot"] for message in read_transcript(tmp_path / "run" / "transcript") if "secagg" in message.kind]
    assert slots
    assert not {tuple(slot) for slot in slots} & {tuple(slot) for slot in kept}


def test_each_interruption_has_turns_and_epochs_of_its_own_and_many_fit_into_a_session() -> None:
    def server() -> FederationServer:
        return prepare(small_config(), population=SCENE, session=bytes(16)).federation

    def resumed(saved: dict[str, Any], number: int | None) -> FederationServer:
        fed = server()
        fed.restore(saved, number)
        return fed

    first = server().saved()
    twice = [resumed(first, number) for number in (1, 2)]  # the second time before a checkpoint
    assert len({fed.turn for fed in twice}) == len({fed.epochs.count for fed in twice}) == 2
    saved = twice[1].saved()
    for number in range(3, 40):
        fed = resumed(saved, number)
        assert fed.turn == saved["turn"] + SKIPPED, "one interruption since that checkpoint"
        saved = fed.saved()
    assert resumed(saved, None).turn == saved["turn"] + SKIPPED
    assert resumed(saved, 0).saved() == saved
    assert saved["epochs"] < NUMBERS


def test_a_checkpoint_is_due_before_a_resumed_run_could_repeat_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_state, "SKIPPED", 6)
    config = small_config(run={"checkpoint_every": 1000}, training={"rounds": 7})
    interrupted(config, tmp_path / "run", 5)
    found = last_checkpoint(tmp_path / "run")
    assert found is not None
    assert found.progress["rounds"] == 3
    fed = prepare(small_config(), population=SCENE).federation
    due = [fed.checkpoint_due]
    fed.epochs.count += SKIPPED_EPOCHS // 2
    due.append(fed.checkpoint_due)
    fed.saved()
    assert [*due, fed.checkpoint_due] == [False, True, False]


CHARGED: dict[str, dict[str, Any]] = {
    "sample": {"unit": "sample", "epsilon": 30.0, "delta": 1e-4, "samples": 60},
    "client": {"unit": "client", "epsilon": 200.0, "delta": 1e-2},
    "signatures too": {"unit": "client", "epsilon": 200.0, "delta": 1e-2, "local": ["gram"]},
}


@pytest.mark.filterwarnings("ignore:run.insecure_test_entropy")
@pytest.mark.parametrize("name", CHARGED)
def test_charges_are_neither_lost_nor_taken_back(name: str, tmp_path: Path) -> None:
    algorithm = "pacfl" if name != "client" else "fedavg"
    config = small_config(privacy=CHARGED[name], training={"rounds": 4}, algorithm={"name": algorithm}, run={"checkpoint_every": 2})
    whole = run_or_resume(config, tmp_path / "whole")
    assert whole["rounds"] == 4
    interrupted(config, tmp_path / "cut", 3)  # round 2 was charged and will be run again
    before = json.loads((tmp_path / "cut" / "ledger.json").read_text(encoding="utf-8"))["charges"]
    cut = run_or_resume(config, tmp_path / "cut")
    after = json.loads((tmp_path / "cut" / "ledger.json").read_text(encoding="utf-8"))["charges"]
    assert after[: len(before)] == before
    struck = max(charge["round"] for charge in before)
    again = [charge for charge in after[len(before) :] if charge["round"] == struck]
    assert again  # new noise, a new charge
    # what was charged for the round that was cut short is missing at the end: the run stops when the budget is spent, and says so
    assert (cut["rounds"] == 4 and cut["stopped"] is None) or "refused by the privacy ledger" in cut["stopped"]
    assert cut["epsilon"] <= CHARGED[name]["epsilon"] * (1 + 1e-9)
    assert run_or_resume(config, tmp_path / "cut") == cut  # and it stays stopped


@pytest.mark.filterwarnings("ignore:run.insecure_test_entropy")
def test_a_run_does_not_go_on_without_its_charges(tmp_path: Path) -> None:
    """From nothing, or from an older copy, it would spend the budget a second time."""
    config = small_config(privacy=CHARGED["client"], training={"rounds": 4}, algorithm={"name": "fedavg"})
    out, old = tmp_path / "run", []

    def tick(row: dict[str, Any]) -> None:
        old.append((out / "ledger.json").read_bytes())
        if row["round"] == 2:
            raise Stop

    with pytest.raises(Stop):
        run_or_resume(config, out, tick=tick)
    rows = (out / "rounds.jsonl").read_bytes()
    (out / "ledger.json").unlink()
    with pytest.raises(InputError, match=r"ledger\.json: is not there, where the checkpoint knows of 3 at least"):
        run_or_resume(config, out)
    (out / "ledger.json").write_bytes(old[0])
    with pytest.raises(InputError, match=r"ledger\.json: has 1 charge\(s\), where the checkpoint knows of 3 at least"):
        run_or_resume(config, out)
    assert (out / "rounds.jsonl").read_bytes() == rows, "and nothing was put aside"
    (out / "ledger.json").write_bytes(old[2])
    assert run_or_resume(config, out)["rounds"] == 4


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A checkpoint's JSON file with something changed, and a digest that fits."""
    tree = json.loads(path.read_text(encoding="utf-8"))
    change(tree)
    write_atomically(path, json.dumps(tree | {"digest": tree_digest(tree)}))


def test_a_run_goes_on_with_its_newcomers_or_not_at_all(tmp_path: Path) -> None:
    """Else who trained would be scored as new, and others would never come."""
    config = small_config(data={"newcomers": 3}, training={"rounds": 4}, algorithm={"name": "fedavg"})
    interrupted(config, tmp_path / "run", 2)
    (path,) = (tmp_path / "run" / "checkpoints").glob("round_*.json")
    held_back = json.loads(path.read_text(encoding="utf-8"))["progress"]["newcomers"]
    assert len(held_back) == 3
    rewritten(path, lambda tree: tree["progress"].update(newcomers=[0, *held_back[1:]]))
    with pytest.raises(InputError, match=r"holds other clients back .* data\.newcomers = 3"):
        run_or_resume(config, tmp_path / "run")
    rewritten(path, lambda tree: tree["progress"].update(newcomers=held_back))
    assert run_or_resume(config, tmp_path / "run")["newcomers"]["clients"] == held_back


def test_a_checkpoint_with_the_names_of_an_earlier_version_is_resumed(tmp_path: Path) -> None:
    """Format 3 named `Transformed` "contract.handles.Blind", and that field of a `Shared` "blind"."""
    config, out = small_config(algorithm={"name": "fedavg"}, training={"rounds": 2}, protection={"sum": "hadamard"}), tmp_path / "run"
    whole = run_or_resume(config, tmp_path / "whole")
    interrupted(config, out, 1)
    (path,) = (out / "checkpoints").glob("round_*.json")

    def older(tree: dict[str, Any]) -> None:
        state = (
            json.dumps(tree["state"])
            .replace('"transformed_parts.Transformed"', '"contract.handles.Blind"')
            .replace('"transformed":', '"blind":')
        )
        assert '"contract.handles.Blind"' in state
        assert '"blind":' in state
        tree.update(format=3, state=json.loads(state))

    rewritten(path, older)
    assert run_or_resume(config, out)["accuracy_mean"] == pytest.approx(whole["accuracy_mean"], abs=1e-6)


@pytest.mark.parametrize("name", ["round", "server"])
def test_a_checkpoint_of_an_earlier_version_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    """Both kinds: of runs in one process, and (server.json) of deployments."""
    config, out = small_config(algorithm={"name": "fedavg"}, training={"rounds": 3}), tmp_path / "run"
    interrupted(config, out, 1)
    (path,) = (out / "checkpoints").glob("round_*.json")
    rewritten(path, lambda tree: tree.update(format=1))
    if name == "server":
        path = path.rename(path.with_name("server.json"))
    before = {file: file.read_bytes() for file in sorted(out.rglob("*")) if file.is_file()}
    with pytest.raises(InputError, match=r"\.json: is of format 1, .* resumes formats 2 to 4 only") as caught:
        run_or_resume(config, out)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert {file: file.read_bytes() for file in sorted(out.rglob("*")) if file.is_file()} == before


@pytest.mark.slow
def test_a_resumed_run_does_not_add_to_an_epoch_of_encrypted_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server's ciphertexts are kept nowhere. Rounds go on, and whoever must be compared with the others ends the run in one line."""
    config = small_config(protection={"gram": ["ckks"]}, training={"rounds": 3})
    interrupted(config, tmp_path / "run", 1)
    with pytest.raises(
        InputError, match=r"run: clustering epoch 0 of encrypted vectors ended .* cannot be resumed; start a new one"
    ) as caught:
        run_or_resume(config, tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert len((tmp_path / "run" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()) == 3
    (tmp_path / "ckks.toml").write_text(config.to_toml(), encoding="utf-8")
    arguments = ["run", str(tmp_path / "ckks.toml"), "--out", str(tmp_path / "run"), "--resume"]
    assert in_process(monkeypatch, *arguments) == 2
    assert "ckks.toml: " in (said := capsys.readouterr().err)
    assert "start a new one" in said
    assert said.count("\n") == 1
    nobody_new = small_config(protection={"gram": ["ckks"]}, training={"rounds": 3}, data={"newcomers": 0})
    interrupted(nobody_new, tmp_path / "none", 1)
    assert run_or_resume(nobody_new, tmp_path / "none")["rounds"] == 3


@pytest.mark.slow
def test_what_an_interrupted_round_sent_stays_on_record(tmp_path: Path) -> None:
    config = small_config(run={"checkpoint_every": 3})
    interrupted(config, tmp_path / "run", 5)
    before = read_transcript(tmp_path / "run" / "transcript")
    run_or_resume(config, tmp_path / "run")
    aside = tmp_path / "run" / "interrupted" / "1"
    lines = [json.loads(json.loads(line)["header"]) for line in (aside / "messages.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {line["round"] for line in lines} == {3, 4}
    assert [line["digest"] for line in lines] == [message.digest for message in before if message.round >= 3]
    assert [json.loads(line)["round"] for line in (aside / "rounds.jsonl").read_text(encoding="utf-8").splitlines()] == [3, 4]
    assert list(aside.glob("payloads_*.safetensors"))
    assert len((tmp_path / "run" / "resumes.jsonl").read_text(encoding="utf-8").splitlines()) == 1
    whole = run_experiment(config, tmp_path / "whole", population=SCENE)
    assert len(read_transcript(tmp_path / "run" / "transcript", whole["messages"])) == whole["messages"]


def test_a_run_that_is_done_is_left_alone_and_old_checkpoints_go(tmp_path: Path) -> None:
    config = small_config(training={"rounds": 3})
    first = run_or_resume(config, tmp_path / "run")

    def times() -> dict[Path, int]:  # filelock before 4.2.11 sets the time of the empty file that it locks
        return {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "run").rglob("*")) if path.name != LOCK}

    before = times()
    assert run_or_resume(config, tmp_path / "run") == first
    assert times() == before
    assert sorted(final(tmp_path / "run")) == ["final.clients.safetensors", "final.json", "final.safetensors"]
    assert (tmp_path / "run" / "checkpoints" / "final.clients.safetensors").stat().st_mode & 0o077 == 0
    interrupted(config, tmp_path / "cut", 2)
    assert {path.name.split(".")[0] for path in (tmp_path / "cut" / "checkpoints").iterdir()} == {"round_0000002"} or (
        {path.name.split(".")[0] for path in (tmp_path / "cut" / "checkpoints").iterdir()} == {"round_0000001"}
    )


@pytest.mark.parametrize(
    ("section", "changes", "words"),
    [
        ("training", {"lr": 0.2}, r"training\.lr is 0\.2, but .*config\.toml has 0\.1"),
        ("training", {"rounds": 20}, r"training\.rounds is 20"),
        ("protection", {"sum": "secagg"}, r"protection\.sum is 'secagg', but .* has 'none'"),
        ("algorithm", {"p": 2}, r"algorithm\.p is 2, but .* has not set"),
        ("run", {"seed": 1}, r"run\.seed is 1"),
    ],
)
def test_another_configuration_is_refused_by_name(section: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    interrupted(small_config(), tmp_path / "run", 2)
    with pytest.raises(InputError, match=words):
        run_or_resume(small_config(**{section: changes}), tmp_path / "run")


def test_other_data_are_refused(tmp_path: Path) -> None:
    interrupted(small_config(), tmp_path / "run", 2)
    other = replace(SCENE, clients=(replace(SCENE.clients[0], x_train=SCENE.clients[0].x_train * 0.5), *SCENE.clients[1:]))
    with pytest.raises(InputError, match="other data"):
        run_experiment(small_config(), tmp_path / "run", population=other, resume=True)


@pytest.mark.parametrize("file", ["json", "safetensors", "clients.safetensors"])
@pytest.mark.parametrize("how", ["cut", "flipped", "gone"])
def test_a_damaged_checkpoint_is_refused_in_one_line(file: str, how: str, tmp_path: Path) -> None:
    interrupted(small_config(), tmp_path / "run", 3)
    name = latest(tmp_path / "run" / "checkpoints")
    path = tmp_path / "run" / "checkpoints" / f"{name}.{file}"
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
        if file == "json":
            assert latest(path.parent) is None  # no checkpoint is there without its JSON file: the run starts again
            return
    else:
        path.write_bytes(data[: len(data) // 2] if how == "cut" else data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
    with pytest.raises(InputError, match=f"{name}.{file}") as caught:
        run_or_resume(small_config(), tmp_path / "run")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "null", "[3]", '{"party": "cl'])
def test_damaged_secrets_are_named(text: str, tmp_path: Path) -> None:
    config = small_config(algorithm={"name": "fedavg"}, training={"rounds": 2}, run={"audit_parties": ["client:1"]})
    interrupted(config, tmp_path / "run", 1)
    path = tmp_path / "run" / "secrets" / "client_1.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"client_1\.json: is damaged .*; remove it and --resume"):
        run_or_resume(config, tmp_path / "run")
    path.unlink()
    assert run_or_resume(config, tmp_path / "run")["rounds"] == 2


def test_a_checkpoint_makes_no_type_that_is_not_listed(tmp_path: Path) -> None:
    simulation = start(small_config(), population=SCENE)
    save_checkpoint(tmp_path, "x", simulation.state, simulation.federation, {}, simulation.simulated)
    checkpoint = load_checkpoint(tmp_path, "x")
    tree = json.loads(json.dumps(checkpoint.tree).replace("pacfl.PacflState", "os.system"))
    with pytest.raises(InputError, match=r"'os\.system' is not a kind of state"):
        restore(replace(checkpoint, tree=tree), prepare(small_config(), population=SCENE).federation)
    broken = {**checkpoint.tree, "held": {"keys": {}, "epochs": []}}
    with pytest.raises(InputError, match="does not fit together"):
        restore(replace(checkpoint, tree=broken), prepare(small_config(), population=SCENE).federation)
    with pytest.raises(TypeError, match=r"TYPES|may not hold"):
        save_checkpoint(tmp_path, "y", Config(), simulation.federation)
    assert all(name.count(".") >= 1 for name in TYPES)


def test_a_transcript_that_was_changed_is_not_gone_on_from(tmp_path: Path) -> None:
    interrupted(small_config(), tmp_path / "run", 3)
    path = tmp_path / "run" / "transcript" / "messages.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:-3]), encoding="utf-8")
    with pytest.raises(InputError, match=r"messages\.jsonl"):
        run_or_resume(small_config(), tmp_path / "run")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    interrupted(small_config(), tmp_path / "run", 2)
    with locked(tmp_path / "run"), pytest.raises(InputError, match="another process"):
        run_or_resume(small_config(), tmp_path / "run")


def test_a_run_that_another_process_made_meanwhile_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both found no run; the other one ended while this one still read its data."""
    config = small_config(algorithm={"name": "fedavg"}, training={"rounds": 1})

    def late(*given: Any, **more: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr("cflpriv.experiments.run.folder.prepare", prepare)
            run_or_resume(config, tmp_path / "run")
        return prepare(*given, **more)

    monkeypatch.setattr("cflpriv.experiments.run.folder.prepare", late)
    with pytest.raises(InputError, match="another process made this run meanwhile; the same command goes on with it"):
        run_or_resume(config, tmp_path / "run")
    assert not verify(tmp_path / "run").problems


@pytest.mark.slow
def test_the_experiments_functions_continue_after_a_restore(tmp_path: Path) -> None:
    whole, other = (start(small_config(), population=SCENE) for _ in range(2))
    for _ in range(3):
        advance(whole)
        advance(other)
    save_checkpoint(tmp_path, "x", other.state, other.federation, {}, other.simulated)
    checkpoint = load_checkpoint(tmp_path, "x")
    later = prepare(small_config(), population=SCENE, **checkpoint.parties())
    later.state, later.rows = restore(checkpoint, later.federation), list(other.rows)
    for simulation in (whole, later):
        advance(simulation)
        admit(simulation)
    for a, b in zip(whole.state.models, later.state.models, strict=True):
        np.testing.assert_array_equal(a.value(), b.value())
    assert finish(whole)["accuracy_mean"] == finish(later)["accuracy_mean"]


def test_a_resumed_source_goes_on_after_what_was_given_before() -> None:
    """Test entropy: secrets are those of a run that was never interrupted, also where building anew drew some of them again."""
    whole = Counted(public_entropy("counted"))
    early, late = whole(53), whole(9)
    assert whole.drawn == 62
    for drawn_anew in (0, 32):
        again = Counted(public_entropy("counted"))
        assert again(drawn_anew) == early[:drawn_anew]
        again.skip(53)
        assert again(9) == late
        assert again.drawn == 62
    ahead = Counted(public_entropy("counted"))
    ahead(60)
    ahead.skip(53)  # more was drawn by now: nothing is given a second time
    assert ahead(2) == late[7:]


# --- kills


def _child(config: Config, out: Path) -> None:
    run_or_resume(config, out)


def kills(config: Config, folder: Path, count: int, seed: int) -> list[Path]:
    """`count` runs, each killed at a moment drawn uniformly over the time that a whole run takes, then run to the end."""
    fork = multiprocessing.get_context("fork")
    began = time.perf_counter()
    whole = fork.Process(target=_child, args=(config, folder / "whole"))
    whole.start()
    whole.join()
    assert whole.exitcode == 0
    seconds = time.perf_counter() - began
    moments, ended = random.Random(seed), []
    for number in range(count):
        out = folder / str(number)
        child = fork.Process(target=_child, args=(config, out))
        child.start()
        child.join(moments.uniform(0, seconds))
        if child.pid is not None and child.exitcode is None:
            os.kill(child.pid, signal.SIGKILL)
        child.join()
        run_or_resume(config, out)
        ended.append(out)
    return ended


@pytest.mark.slow
def test_five_kills_at_random_moments(tmp_path: Path) -> None:
    for out in kills(small_config(), tmp_path, 5, seed=os.getpid()):
        assert final(out) == final(tmp_path / "whole")
        assert timeless(out) == timeless(tmp_path / "whole")


@pytest.mark.slow
def test_fifty_kills_at_random_moments(tmp_path: Path) -> None:
    struck = 0
    for out in kills(small_config(training={"rounds": 20}), tmp_path, 50, seed=os.getpid()):
        assert final(out) == final(tmp_path / "whole")
        assert timeless(out) == timeless(tmp_path / "whole")
        struck += (out / "resumes.jsonl").exists()
    assert struck >= 10  # most runs were struck after they had written something


@pytest.mark.slow
def test_fifty_kills_under_secure_aggregation(tmp_path: Path) -> None:
    config = small_config(protection=PROTECTIONS["secagg"], run={"insecure_test_entropy": False})
    for out in kills(config, tmp_path, 50, seed=os.getpid()):
        assert timeless(out)[1]["rounds"] == 8
        messages = read_transcript(out / "transcript", timeless(out)[1]["messages"])
        assert {message.round for message in messages} >= set(range(8))


# --- the disk


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """No file may grow beyond `limit` bytes: what a full disk does to a writer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.slow
def test_a_full_disk_loses_nothing_that_was_complete(tmp_path: Path) -> None:
    config = small_config()
    run_or_resume(config, tmp_path / "whole")
    sizes = sorted({path.stat().st_size for path in (tmp_path / "whole").rglob("*") if path.is_file()})
    for number, limit in enumerate((1, sizes[len(sizes) // 3] - 1, sizes[-2] // 2, sizes[-1] // 2, sizes[-1] - 1)):
        out = tmp_path / str(number)
        with small_files(limit), pytest.raises(OSError, match="continue with --resume"):
            run_or_resume(config, out)
        if (out / "rounds.jsonl").exists():
            lines = (out / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
            assert [json.loads(line)["round"] for line in lines] == list(range(len(lines)))  # whole lines only
            read_transcript(out / "transcript")
        run_or_resume(config, out)
        assert final(out) == final(tmp_path / "whole")


@pytest.mark.slow
def test_a_full_file_system_loses_nothing(tmp_path: Path) -> None:
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(mount)], capture_output=True)
    if made.returncode:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        config = small_config(training={"rounds": 40})
        with pytest.raises(OSError, match="No space left"):
            run_or_resume(config, mount / "run")
        rows = (mount / "run" / "rounds.jsonl").read_bytes().splitlines()
        assert [json.loads(row)["round"] for row in rows] == list(range(len(rows)))
        subprocess.run(["mount", "-o", "remount,size=30m", str(mount)], check=True)
        run_or_resume(config, mount / "run")
        run_or_resume(config, tmp_path / "whole")
        assert final(mount / "run") == final(tmp_path / "whole")
    finally:
        subprocess.run(["umount", str(mount)], check=False)


@pytest.mark.parametrize("what", ["a full disk", "a refusal"])
def test_a_run_that_cannot_begin_removes_what_it_made_and_nothing_else(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may be given that holds unfinished files alone; they need not be a run's."""
    out = tmp_path / "out"
    (out / "mail.part").mkdir(parents=True)
    (out / "mail.part" / "letter").write_text("theirs", encoding="utf-8")
    (out / "film.part").write_text("theirs", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))

    def refuse(run: Any) -> None:
        raise InputError("no")

    if what == "a refusal":
        monkeypatch.setattr("cflpriv.experiments.run.folder.begin", refuse)
    with small_files(1) if what == "a full disk" else nullcontext(), pytest.raises((OSError, InputError)):
        run_or_resume(small_config(), out)
    assert sorted(tmp_path.rglob("*")) == before
    with small_files(1) if what == "a full disk" else nullcontext(), pytest.raises((OSError, InputError)):
        run_or_resume(small_config(), tmp_path / "deep" / "new")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_disk_that_fails_in_a_later_round_has_nothing_removed(tmp_path: Path) -> None:
    def lose(row: dict[str, Any]) -> None:
        (tmp_path / "run" / "config.toml").unlink()
        raise OSError(errno.EIO, "Input/output error", "rounds.jsonl")

    with pytest.raises(OSError, match="Input/output error"):
        run_or_resume(small_config(), tmp_path / "run", tick=lose)
    assert (tmp_path / "run" / "rounds.jsonl").is_file()


def test_files_are_whole_or_old(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_atomically(path, "old")
    arrays = {"a": np.arange(1000.0), "b": np.zeros((0, 3), dtype=np.float32), "c": np.array(True)}
    digest, size = write_arrays(tmp_path / "a.safetensors", arrays)
    append(tmp_path / "log", "one\n")
    with small_files(100):
        for write in (lambda: write_atomically(path, "new" * 100), lambda: write_arrays(tmp_path / "a.safetensors", arrays)):
            with pytest.raises(OSError, match=r"x\.json|a\.safetensors"):
                write()
        with pytest.raises(OSError, match="log"):
            append(tmp_path / "log", "two\n" * 100)
    assert path.read_text(encoding="utf-8") == "old"
    assert (tmp_path / "log").read_text(encoding="utf-8") == "one\n"
    assert (tmp_path / "a.safetensors").stat().st_size == size
    assert not list(tmp_path.glob("*.part"))
    from safetensors.numpy import load_file

    read = load_file(tmp_path / "a.safetensors")
    assert {name: (array.dtype, array.shape) for name, array in read.items()} == {name: (a.dtype, a.shape) for name, a in arrays.items()}
    np.testing.assert_array_equal(read["a"], arrays["a"])
    assert write_arrays(tmp_path / "b.safetensors", arrays)[0] == digest


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="cannot be made"):
        run_experiment(small_config(), tmp_path / "file" / "run", population=SCENE)


# --- Ctrl-C and the command line


@pytest.mark.slow
def test_ctrl_c_then_resume_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(small_config(training={"rounds": 60}).to_toml(), encoding="utf-8")
    arguments = [sys.executable, "-u", "-m", "cflpriv.cli", "run", str(path), "--out", str(tmp_path / "run"), "--resume"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, encoding="utf-8")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("round 3/"):
            process.send_signal(signal.SIGINT)
            break
    rest = process.stdout.read()
    assert process.wait(timeout=60) == 0
    assert "continue with --resume" in rest
    write_report(tmp_path / "run")  # a run that ended early can be looked at
    refused = subprocess.run([*arguments, "--set", "training.lr=0.3"], capture_output=True, encoding="utf-8")
    assert refused.returncode == 2
    assert "training.lr" in refused.stderr
    done = subprocess.run(arguments, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert "resumed after round" in done.stdout
    run_or_resume(small_config(training={"rounds": 60}), tmp_path / "whole")
    assert final(tmp_path / "run") == final(tmp_path / "whole")


# --- local models in span form


SPAN: dict[str, Any] = {"batch_size": 0, "epochs": 2, "rounds": 3, "weight_decay": 0.01}
FEW = build_population(parse_config({"data": SMALL["data"] | {"samples_per_client": 20}}).data)


@pytest.mark.parametrize("name", ["fedavg", "ifca", "fedprox"])
@pytest.mark.parametrize("transport", ["memory", "bytes"])
def test_local_models_are_saved_in_span_form(name: str, transport: str, tmp_path: Path) -> None:
    """The checkpoint has n × h numbers a client, and the models that are read from it are the same bit for bit."""
    config = small_config(algorithm={"name": name}, training=SPAN, data={"newcomers": 0}, model={"hidden": 8}, run={"transport": transport})
    simulation = start(config, population=FEW)
    advance(simulation)
    assert any(path == "span" for _, path in simulation.simulated.engine.paths)
    save_checkpoint(tmp_path, "x", simulation.state, simulation.federation, {}, simulation.simulated)
    checkpoint = load_checkpoint(tmp_path, "x")
    later = prepare(config, population=FEW, **checkpoint.parties())
    trained = [client for client in simulation.simulated.data if simulation.simulated.recall(client, "trained") is not None]
    assert trained
    for client in trained:
        np.testing.assert_array_equal(simulation.simulated.recall(client, "trained"), later.simulated.recall(client, "trained"))
    whole = [path for path, array in checkpoint.others.items() if array.shape == (config.model_for(FEW).dimension,)]
    assert len(whole) <= 4 < len(trained)  # what clients started from, which they share


def test_what_other_data_made_is_saved_in_full(tmp_path: Path) -> None:
    """A model that was trained on a part of a client's data cannot be made again from all of them."""
    config = small_config(algorithm={"name": "fedavg"}, training=SPAN, data={"newcomers": 0})
    simulation = start(config, population=FEW)
    advance(simulation)
    (client, *_) = simulation.federation.clients
    party = simulation.simulated.client(client)
    kept, origin = party.values.kept("trained")  # type: ignore[misc]
    own = simulation.simulated.data[client]
    party.values.remember("trained", kept.bound(replace(own, x_train=own.x_train[::-1].copy())), origin)
    save_checkpoint(tmp_path, "x", simulation.state, simulation.federation, {}, simulation.simulated)
    later = prepare(config, population=FEW, **load_checkpoint(tmp_path, "x").parties())
    np.testing.assert_array_equal(simulation.simulated.recall(client, "trained"), later.simulated.recall(client, "trained"))


def test_a_run_in_span_form_ends_in_the_same_bytes_when_it_is_resumed(tmp_path: Path) -> None:
    config = small_config(algorithm={"name": "ifca"}, training=SPAN)
    run_experiment(config, tmp_path / "whole", population=FEW)
    with pytest.raises(Stop):
        run_experiment(config, tmp_path / "run", population=FEW, tick=stopping(1))
    run_experiment(config, tmp_path / "run", population=FEW, resume=True)
    assert final(tmp_path / "run") == final(tmp_path / "whole")
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")


def test_a_checkpoint_of_the_format_before_is_resumed(tmp_path: Path) -> None:
    """Format 2 had every value as an array of its own."""
    config = small_config(algorithm={"name": "fedavg"}, training={"rounds": 3})
    run_or_resume(config, tmp_path / "whole")
    interrupted(config, tmp_path / "run", 2)
    folder = tmp_path / "run" / "checkpoints"
    name = latest(folder) or ""
    checkpoint = load_checkpoint(folder, name)
    tree, others = json.loads(json.dumps(checkpoint.tree)), dict(checkpoint.others)
    for place, store in tree["parties"]["stores"].items():
        for value in store["values"]:
            for part, node in value[1]["mapping"]:
                if "sum" in node:
                    path = f"parties/{place}/{value[0]}/{part}"
                    first, second = (others[one["array"]] for one in node.pop("sum"))
                    others[path] = first + second
                    node["array"] = path
    digest, _ = write_arrays(folder / f"{name}.clients.safetensors", others)
    tree |= {"format": 2, "files": tree["files"] | {f"{name}.clients.safetensors": digest}}
    (folder / f"{name}.json").write_text(json.dumps(tree | {"digest": tree_digest(tree)}), encoding="utf-8")
    run_or_resume(config, tmp_path / "run")
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")


def test_names_of_states_in_earlier_versions_are_read(tmp_path: Path) -> None:
    assert all(_type_of(earlier) is _type_of(f"algorithms.{earlier}") is TYPES[name] for earlier, name in _RENAMED.items())
    simulation = start(small_config(algorithm={"name": "cfl"}), population=SCENE)
    save_checkpoint(tmp_path, "x", simulation.state, simulation.federation, {}, simulation.simulated)
    checkpoint = load_checkpoint(tmp_path, "x")
    text = json.dumps(checkpoint.tree)
    for name in ("CflState", "TreeNode"):
        assert f'"parameter_tree.{name}"' in text
        text = text.replace(f"parameter_tree.{name}", f"parameter_tree.{name.removeprefix('Cfl').removeprefix('Tree')}")
    federation = prepare(small_config(algorithm={"name": "cfl"}), population=SCENE).federation
    restored = restore(replace(checkpoint, tree=json.loads(text)), federation)
    assert type(restored) is type(simulation.state)
    assert [type(node) for node in restored.tree] == [type(node) for node in simulation.state.tree]
