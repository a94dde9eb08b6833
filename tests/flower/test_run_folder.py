"""A run over Flower's messages leaves the folder of a run in one process, in the clear to the last digest."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from deployments import APP, DyingGrid, rows_of

from cflpriv.data import build_population
from cflpriv.experiments import load_config, run_experiment
from cflpriv.flower import serve
from cflpriv.record import read_transcript


def files_of(run: Path) -> set[str]:
    return {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and path.suffix != ".safetensors"}


def said(run: Path, summary: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What was said, but for clients' scores, which an experimenter reads off in one process."""
    messages = read_transcript(run / "transcript", summary["messages"])
    scored = [one.kind == "correct+count" or one.context.get("task") == "Evaluate" for one in messages]
    return [
        (one.round, one.verb, one.kind, one.source, one.target, one.clients, one.digest)
        for one, score in zip(messages, scored, strict=True)
        if not score
    ]


def test_the_run_folder_is_that_of_a_run_in_one_process(tmp_path: Path) -> None:
    config = load_config(APP / "experiment.toml", ["protection.sum=none", "protection.floor=1"])
    scene = build_population(config.data)
    truth = {client.id: group for client, group in zip(scene.clients, scene.groups, strict=True)}
    there, here = tmp_path / "flower", tmp_path / "local"
    serve(DyingGrid(tmp_path, scene, "", {}), config, there, scene, clients=4, truth=truth, say=str)  # type: ignore[arg-type]
    run_experiment(config, here)
    one, two = (json.loads((run / "summary.json").read_text(encoding="utf-8")) for run in (there, here))
    assert set(two) <= set(one)
    assert said(there, one) == said(here, two)
    assert files_of(here) - files_of(there) == {"checkpoints/final.json"}
    assert files_of(there) - files_of(here) == {"checkpoints/server.json", "stages.jsonl"}
    for key in ("algorithm", "dataset", "protection", "accuracy_mean", "accuracy_worst", "ari", "clusters", "rounds", "data_digest"):
        assert one[key] == pytest.approx(two[key]), key
    assert [row["cohort"] for row in rows_of(there)] == [row["cohort"] for row in rows_of(here)]
    measured = [json.loads((run / "measured.json").read_text(encoding="utf-8"))["labels"] for run in (there, here)]
    assert measured[0] == measured[1]
