"""Real deployments on the loopback: SuperLink, SuperNodes, a process for every message; nodes killed in every stage.

Minutes each, mostly Flower starting processes: one is in the default suite (marker `flower`), the others are `slow`.
"""

import importlib.util
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from safetensors.numpy import load_file

from cflpriv.data import build_population
from cflpriv.experiments import load_config
from cflpriv.local import LocalFederation
from cflpriv.record import read_transcript

APP = Path(__file__).parents[2] / "examples" / "flower_app"


def loopback() -> Any:
    """The example's own script, as a module."""
    spec = importlib.util.spec_from_file_location("loopback", APP / "loopback.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def local_run(changes: list[str]) -> tuple[Any, list[np.ndarray[Any, Any]]]:
    """Clusters and models of the same experiment in one process."""
    config = load_config(APP / "experiment.toml", changes)
    population = build_population(config.data)
    algorithm = config.algorithm_for(population)
    federation = LocalFederation(population.clients, seed=config.run.seed, sampling=config.sampling())
    state = algorithm.init(federation)
    for number in range(config.training.rounds):
        federation.begin_round(number)
        state, _ = algorithm.round(federation, state)
    models: Any = algorithm.serve(state).params["model"]
    return algorithm.describe(state)["clustering"], [model.value() for model in models]


@pytest.mark.flower
@pytest.mark.timeout(900)
def test_a_deployment_with_secure_sums_finds_the_clusters_and_models_of_a_local_run(tmp_path: Path) -> None:
    """`main` asserts Flower's own word, finished:completed. Sums are quantised: 2^-20 or so of the clip range a client."""
    summary = loopback().main(["--out", str(tmp_path / "d"), "--rounds", "1"])
    clustering, models = local_run(["training.rounds=1", "protection.sum=none", "protection.floor=0"])
    run = tmp_path / "d" / "run"
    assert summary["ari"] == 1.0
    assert json.loads((run / "measured.json").read_text())["labels"] == {str(c): clustering[c] for c in range(4)}
    found = load_file(run / "checkpoints" / "models.safetensors")
    for i, model in enumerate(models):
        np.testing.assert_allclose(found[f"model/{i}"], model, atol=1e-5)
    kinds = {one.kind for one in read_transcript(run / "transcript", summary["messages"])}
    assert "secagg Masked" in kinds
    assert "update" not in kinds
    assert not summary["refusals"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_without_secure_sums_the_parameters_are_those_of_a_local_run(tmp_path: Path) -> None:
    summary = loopback().main(
        ["--out", str(tmp_path / "d"), "--rounds", "2", "--set", "protection.sum=none", "--set", "protection.floor=1"]
    )
    _, models = local_run(["training.rounds=2", "protection.sum=none", "protection.floor=1"])
    found = load_file(tmp_path / "d" / "run" / "checkpoints" / "models.safetensors")
    for i, model in enumerate(models):
        np.testing.assert_allclose(found[f"model/{i}"], model, atol=1e-6)
    assert summary["accuracy_mean"] > 0.5


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_with_tls_and_authenticated_nodes(tmp_path: Path) -> None:
    summary = loopback().main(["--out", str(tmp_path / "d"), "--rounds", "1", "--tls"])
    assert summary["ari"] == 1.0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "stage", ["enrol", "compute", "gram", "secagg Invite", "secagg Adverts", "secagg Deliver", "secagg Survivors", "secagg Unmask"]
)
def test_a_node_killed_in_a_stage_costs_itself_at_most(tmp_path: Path, stage: str) -> None:
    """kill -9 of one of five SuperNodes while the stage waits for it: the run ends in time with right sums; restarted, it is known."""
    module = loopback()
    changes = ["data.clients=5", "protection.floor=2", "algorithm.k=1"]
    out = tmp_path / "d"
    out.mkdir()
    with module.deploy(out, APP / "experiment.toml", changes, 2, 45.0) as machines:
        run_id = module.submit(machines)
        until = time.monotonic() + 400
        killed = 0.0
        while time.monotonic() < until and not killed:
            journal = out / "run" / "stages.jsonl"
            entries = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
            if entries and entries[-1]["stage"] == stage and "answered" not in entries[-1]:
                os.killpg(machines.running["node4"].pid, signal.SIGKILL)
                machines.running["node4"].wait(10)
                killed = time.monotonic()
            time.sleep(0.05)
        assert killed, f"stage {stage!r} was never waited for"
        port, ports, tls = machines.ports
        module.start_node(machines, 4, port, ports[4], tls)
        word = module.wait(machines, run_id, 900)
        assert word == "finished:completed" or stage == "enrol", module.flwr(machines, "log", run_id, "loop", "--show")
    if word != "finished:completed":  # it was killed before it was known: the run says that too few came
        return
    rows = [json.loads(line) for line in (out / "run" / "rounds.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert not any(row["skipped"] for row in rows)
    entries = [json.loads(line) for line in (out / "run" / "stages.jsonl").read_text().splitlines()]
    assert all(entry["seconds"] < 45 + 15 for entry in entries if "seconds" in entry and entry["stage"] != "compute")
    labels = json.loads((out / "run" / "measured.json").read_text())["labels"]
    assert "4" in labels or stage in ("compute", "gram"), "it keeps its cluster"
