"""Callbacks are told of every round, also of resumed runs, and cannot change a run; one that fails ends it in one line, or is left out."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import in_process

import cflpriv
from cflpriv.contract.transcript import Message
from cflpriv.errors import CallbackFailed, InputError
from cflpriv.experiments import parse_config, parse_sweep, run_experiment
from cflpriv.experiments.config.config import Config

TREE: dict[str, Any] = {
    "data": {"source": "digits", "clients": 4, "rotations": [0, 90]},
    "model": {"hidden": 4},
    "training": {"rounds": 3, "lr": 0.1},
    "algorithm": {"name": "fedavg"},
}


class Notes(cflpriv.Callback):
    """Keeps all that it is told; raises in the round `bad`."""

    def __init__(self, bad: int | None = None, required: bool = True) -> None:
        self.bad, self.required = bad, required
        self.calls: list[str] = []
        self.rows: list[Any] = []
        self.lines: list[str] = []
        self.messages: list[Message] = []
        self.started: list[tuple[Path, int]] = []
        self.summary: Mapping[str, Any] = {}

    def on_start(self, folder: Path, config: Config, rounds: int) -> None:
        assert config.training.rounds == 3
        self.calls.append("start")
        self.started.append((folder, rounds))

    def on_round(self, row: Mapping[str, Any]) -> None:
        if row["round"] == self.bad:
            raise ZeroDivisionError("by\nzero")
        self.calls.append("round")
        self.rows.append(row)

    def on_messages(self, messages: Sequence[Message]) -> None:
        self.calls.append("messages")
        self.messages += messages

    def on_line(self, line: str) -> None:
        self.lines.append(line)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.calls.append("end")
        self.summary = summary

    def on_error(self, error: Exception) -> None:
        self.calls.append(type(error).__name__)


def rows_of(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]


def without_times(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if "seconds" not in name} for row in rows]


def test_a_callback_is_told_of_all_that_the_folder_has(tmp_path: Path) -> None:
    notes, shown = Notes(), list[str]()
    summary = run_experiment(parse_config(TREE), tmp_path / "run", callbacks=[notes], report=shown.append)
    assert notes.calls == ["start", *["messages", "round"] * 3, "end"]
    assert notes.started == [(tmp_path / "run", 0)]
    assert notes.rows == rows_of(tmp_path / "run")
    assert notes.summary == json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert notes.lines == shown
    assert "fedavg on digits" in shown[0]
    assert {message.round for message in notes.messages} == {0, 1, 2}
    assert all(message.payload is None for message in notes.messages), "values stay where they are"
    assert sum(message.total_bytes for message in notes.messages) == summary["upload_bytes"] + summary["download_bytes"]


def test_a_callback_changes_nothing(tmp_path: Path) -> None:
    class Vandal(cflpriv.Callback):
        def on_round(self, row: Mapping[str, Any]) -> None:
            assert isinstance(row, dict)
            row.clear()

        def on_end(self, summary: Mapping[str, Any]) -> None:
            assert isinstance(summary, dict)
            summary.clear()

    notes = Notes()
    run_experiment(parse_config(TREE), tmp_path / "quiet")
    run_experiment(parse_config(TREE), tmp_path / "run", callbacks=[Vandal(), notes])
    assert without_times(rows_of(tmp_path / "run")) == without_times(rows_of(tmp_path / "quiet"))
    assert without_times(notes.rows) == without_times(rows_of(tmp_path / "quiet"))


def test_one_that_fails_ends_the_run_which_goes_on_later(tmp_path: Path) -> None:
    config = parse_config(TREE)
    with pytest.raises(CallbackFailed, match=r"^callback 'Notes', on_round: ZeroDivisionError: by zero; everything completed is saved"):
        run_experiment(config, tmp_path / "run", callbacks=[Notes(bad=1)])
    assert len(rows_of(tmp_path / "run")) == 2
    again = Notes()
    run_experiment(config, tmp_path / "run", callbacks=[again], resume=True)
    assert again.started == [(tmp_path / "run", 2)]
    assert [row["round"] for row in again.rows] == [2]
    run_experiment(config, tmp_path / "whole")
    assert without_times(rows_of(tmp_path / "run")) == without_times(rows_of(tmp_path / "whole"))
    done = Notes()
    run_experiment(config, tmp_path / "run", callbacks=[done], resume=True)
    assert not done.calls, "a finished run is left alone"


def test_all_learn_that_a_run_ends_with_an_error(tmp_path: Path) -> None:
    class Worse(cflpriv.Callback):
        def on_error(self, error: Exception) -> None:
            raise KeyError("another")

    failing, other, shown = Notes(bad=0), Notes(), list[str]()
    with pytest.raises(CallbackFailed, match="by zero"):
        run_experiment(parse_config(TREE), tmp_path / "run", callbacks=[Worse(), failing, other], report=shown.append)
    assert failing.calls[-1] == other.calls[-1] == "CallbackFailed"
    assert shown[-1] == "callback 'Worse', on_error: KeyError: 'another'"
    assert "end" not in other.calls


def test_one_that_is_not_required_is_left_out(tmp_path: Path) -> None:
    shown: list[str] = []
    failing, other = Notes(bad=1, required=False), Notes()
    summary = run_experiment(parse_config(TREE), tmp_path / "run", callbacks=[failing, other], report=shown.append)
    assert summary["rounds"] == len(other.rows) == 3
    assert failing.calls == ["start", "messages", "round", "messages"]
    assert [line for line in shown if "callback" in line] == [
        "callback 'Notes', on_round: ZeroDivisionError: by zero; the run goes on without it"
    ]


PLUGIN = """
import json
import cflpriv

class Log(cflpriv.Callback):
    def on_start(self, folder, config, rounds):
        self.file = (folder / "log.jsonl").open("a")
    def on_round(self, row):
        self.file.write(json.dumps({"round": row["round"], "accuracy": row["accuracy_mean"]}) + "\\n")
        self.file.flush()
        if BAD and row["round"] == 1:
            raise OSError("the logger is gone")

cflpriv.register_callback("log_PLACE", Log)
"""


def written(tmp_path: Path, bad: bool = False) -> Path:
    """A configuration with a callback of a plugin."""
    name = f"log_{tmp_path.name}_{bad}"
    (tmp_path / f"{name}.py").write_text(PLUGIN.replace("log_PLACE", name).replace("BAD", str(bad)), encoding="utf-8")
    path = tmp_path / "my.toml"
    path.write_text(
        '[data]\nclients = 4\n[model]\nhidden = 4\n[training]\nrounds = 3\n[algorithm]\nname = "fedavg"\n'
        f'[run]\nplugins = ["{name}.py"]\ncallbacks = ["{name}"]\n',
        encoding="utf-8",
    )
    return path


def test_a_plugin_names_a_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_process(monkeypatch, "run", str(written(tmp_path)), "--out", str(tmp_path / "run")) == 0
    assert len((tmp_path / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()) == 3
    assert in_process(monkeypatch, "verify", str(tmp_path / "run")) == 0


def test_a_failing_one_is_one_line_on_the_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, bad=True)
    assert in_process(monkeypatch, "run", str(path), "--out", str(tmp_path / "run")) == 1
    line = capsys.readouterr().err
    assert line.startswith(f"cflpriv: callback 'log_{tmp_path.name}_True', on_round: OSError: the logger is gone; ")
    assert line.count("\n") == 1
    # without the callback the run goes on; the callbacks are the one thing of a configuration that may change
    assert in_process(monkeypatch, "run", str(path), "--set", "run.callbacks=[]", "--out", str(tmp_path / "run"), "--resume") == 0
    assert len(rows_of(tmp_path / "run")) == 3


@pytest.mark.slow
def test_each_run_of_a_sweep_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text(encoding="utf-8") + "[sweep]\nseeds = [0, 1]\naudit = false\n", encoding="utf-8")
    assert in_process(monkeypatch, "sweep", str(path), "--out", str(tmp_path / "sweep")) == 0
    logs = list((tmp_path / "sweep").glob("*/log.jsonl"))
    assert [len(log.read_text(encoding="utf-8").splitlines()) for log in logs] == [3, 3]


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"run\.callbacks = \['tensorbord'\]: 'tensorbord' is not known; did you mean 'tensorboard'\?"):
        parse_config({"run": {"callbacks": ["tensorbord"]}})


def test_a_private_choice_shows_no_run() -> None:
    tree = {
        **TREE,
        "run": {"callbacks": ["tensorboard"]},
        "privacy": {"unit": "sample", "epsilon": 3.0, "delta": 1e-4, "clip_norm": 1.0},
        "training": {**TREE["training"], "weights": "equal"},
        "sweep": {"keys": {"training.lr": [0.1, 0.2]}, "choose": {"by": "accuracy_mean", "runs": 5}},
    }
    with pytest.raises(InputError, match=r"run\.callbacks = \['tensorboard'\]: would show runs that a private choice keeps secret"):
        parse_sweep(tree)
