"""TensorBoard, MLflow and Weights & Biases show each round of a run, also of one that was interrupted."""

import json
import struct
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import cflpriv
from cflpriv.errors import CallbackFailed, InputError
from cflpriv.experiments import parse_config, run_experiment
from cflpriv.experiments.trackers.figures import FILE, keep_number, known_number, scalars, settings
from cflpriv.plugins import CALLBACKS

TREE: dict[str, Any] = {
    "data": {"source": "digits", "clients": 4, "rotations": [0, 90]},
    "model": {"hidden": 4},
    "training": {"rounds": 3, "lr": 0.1},
    "algorithm": {"name": "fedavg"},
}
TRACKERS = ("tensorboard", "mlflow", "wandb")
BLOCK = 32768


class Stops(cflpriv.Callback):
    """Ends a run in its second round."""

    def on_round(self, row: Mapping[str, Any]) -> None:
        if row["round"] == 1:
            raise ZeroDivisionError


def interrupted(folder: Path, tracker: str) -> list[dict[str, Any]]:
    """Run an experiment that is interrupted and goes on; its rows."""
    config = parse_config({**TREE, "run": {"callbacks": [tracker]}})
    with pytest.raises(CallbackFailed):
        run_experiment(config, folder, callbacks=[Stops()])
    run_experiment(config, folder, resume=True)
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]


def installed(tracker: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(tracker) is None, reason=f"the extra [{tracker}] is not installed")


def test_trackers_get_numbers_and_settings() -> None:
    row = {"round": 2, "accuracy_mean": 0.5, "cohort": [1, 4], "found": True, "unknown": None, "of_clients": [0.1], "name": "x"}
    assert scalars(row) == {"accuracy_mean": 0.5, "cohort": 2.0}
    assert settings(parse_config(TREE))["training.lr"] == 0.1
    assert settings(parse_config(TREE))["data.rotations"] == [0, 90]


def test_the_number_of_a_run_is_that_of_a_resumed_run_alone(tmp_path: Path) -> None:
    keep_number(tmp_path, "mlflow", "17")
    keep_number(tmp_path, "wandb", "x")
    assert known_number(tmp_path, "mlflow", 2) == "17"
    assert known_number(tmp_path, "wandb", 1) == "x"
    assert not known_number(tmp_path, "mlflow", 0), "a run that begins anew in the folder of another"
    assert not known_number(tmp_path / "other", "mlflow", 2)
    for text in ('{"mlflow": 3}', "[]", "{", '{"mlflow": "../../x"}', " " * 5000):
        (tmp_path / FILE).write_text(text, encoding="utf-8")
        for act in (lambda: known_number(tmp_path, "mlflow", 2), lambda: keep_number(tmp_path, "mlflow", "18")):
            with pytest.raises(InputError, match=f"{FILE}: is damaged; remove it"):
                act()
    (tmp_path / FILE).unlink()
    (tmp_path / "elsewhere.json").write_text('{"mlflow": "17"}', encoding="utf-8")
    (tmp_path / FILE).symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(InputError, match="is damaged"):
        known_number(tmp_path, "mlflow", 2)


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_tracker_names_its_extra(tracker: str, tmp_path: Path) -> None:
    assert tracker in CALLBACKS.names()
    if find_spec(tracker) is None:
        with pytest.raises(InputError, match=rf"{tracker!r} needs {tracker}, .* pip install 'cflpriv\[{tracker}\]'"):
            run_experiment(parse_config({**TREE, "run": {"callbacks": [tracker]}}), tmp_path / "run")
        assert not (tmp_path / "run").exists()


@installed("tensorboard")
def test_tensorboard_reads_each_round_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = interrupted(tmp_path / "run", "tensorboard")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    accuracy = events.Scalars("round/accuracy_mean")
    assert [(one.step, pytest.approx(one.value)) for one in accuracy] == [(row["round"], row["accuracy_mean"]) for row in rows]
    assert events.Scalars("round/cohort")[0].value == 4.0
    assert "round/round" not in events.Tags()["scalars"]
    assert [one.step for one in events.Scalars("summary/accuracy_mean")] == [3]


@installed("mlflow")
def test_mlflow_has_one_run_with_each_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    rows = interrupted(tmp_path / "run", "mlflow")
    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("cflpriv").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["training.lr"] == "0.1"
    shown = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "round/accuracy_mean")}
    assert shown == {row["round"]: pytest.approx(row["accuracy_mean"]) for row in rows}
    assert run.data.metrics["summary/rounds"] == 3.0
    run_experiment(parse_config({**TREE, "run": {"callbacks": ["mlflow"]}}), tmp_path / "other")
    assert len(client.search_runs([run.info.experiment_id])) == 2


def records(file: Path) -> Iterator[Any]:
    """What a run of Weights & Biases wrote offline: a header of 7 bytes, then a log of LevelDB's form."""
    from wandb.proto import wandb_internal_pb2

    data, at, text = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK  # what pads a block
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)  # after a checksum; whole, first, middle or last part
        text += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(text)
            yield record
            text = b""


@installed("wandb")
def test_wandb_follows_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    rows = interrupted(tmp_path / "run", "wandb")
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*-{known_number(tmp_path / 'run', 'wandb', 1)}/*.wandb"))
    assert files, "under one number, before the interruption and after it"
    shown: dict[int, float] = {}
    for file in files:
        for record in records(file):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if "round/accuracy_mean" in items:
                shown[items["round"]] = items["round/accuracy_mean"]
    assert shown == {row["round"]: pytest.approx(row["accuracy_mean"]) for row in rows}
