"""Nodes killed while they work. What comes of it is the plain sum of the survivors, or a word, in time.

On the loopback it is `kill -9` of a whole SuperNode at the very message named, by its own last words (`deployments.DYING`): minutes each,
marked `slow`. Answers that are lost on the way are in tests/cflpriv/test_remote_dropouts.py.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from deployments import APP, DyingGrid, deaths_of, local_models, quick_loopback, rows_of, run_with_deaths, stages_of, survivors_of
from safetensors.numpy import load_file

from cflpriv.data import build_population
from cflpriv.experiments import load_config
from cflpriv.flower import serve

EVERYBODY = range(4)


def check_models(run: Path, changes: list[str], atol: float) -> Any:
    """The models are those of the plain sums of each round's survivors. The clustering of the same experiment in one process."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    clustering, models = local_models(changes, survivors_of(run, summary["messages"]))
    found = load_file(run / "checkpoints" / "models.safetensors")
    assert len(found) == len(models)
    for i, model in enumerate(models):
        np.testing.assert_allclose(found[f"model/{i}"], model, atol=atol)
    return clustering


# --- in this process -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "cohorts"),
    [
        pytest.param({("enrol", 1): [0, 2], ("enrol", 2): [2]}, [4, 4, 4], id="greeting, twice"),
        pytest.param({("compute", 1): [3], ("compute", 2): [3]}, [3, 4, 4], id="signature, and again while it is admitted"),
        pytest.param({("gram", 1): [3], ("gram", 2): [3]}, [4, 4, 4], id="gram, twice, and each time it is greeted again"),
        pytest.param(
            {("gram", 1): [3], ("enrol", 2): [3], ("gram", 3): [3], ("enrol", 4): [3]},
            [3, 4, 4],
            id="gram and the greeting after it, and again while it is admitted",
        ),
        pytest.param({("compute", 2): [3]}, [4, 4, 4], id="training"),
        pytest.param({("compute", 2): EVERYBODY}, [0, 4, 4], id="training, all of them"),
        pytest.param({("sum", 1): [1]}, [4, 4, 4], id="sum"),
        pytest.param({("sum", 1): EVERYBODY}, [0, 4, 4], id="sum, all of them"),
        pytest.param({("compute", 3): [1]}, [4, 4, 4], id="evaluation"),
        pytest.param({("compute", 3): EVERYBODY, ("gather", 1): EVERYBODY}, [4, 4, 4], id="evaluation, all of them"),
        pytest.param({("gather", 1): EVERYBODY, ("enrol", 2): [0, 2]}, [4, 2, 4], id="gather and greeting"),
    ],
)
def test_a_run_in_the_clear_goes_on(tmp_path: Path, plan: Any, cohorts: list[int]) -> None:
    changes = ["training.rounds=3", "training.batch_size=60", "protection.sum=none", "protection.min_cohort=1"]
    config = load_config(APP / "experiment.toml", changes)
    scene = build_population(config.data)
    grid = DyingGrid(tmp_path, scene, "", plan)
    out = tmp_path / "run"
    serve(grid, config, out, scene, clients=4, deadline_seconds=0.02, compute_seconds=0.02, hello_seconds=0.02, say=str)  # type: ignore[arg-type]
    assert not grid.plan, "what was to be killed was killed"
    rows = rows_of(out)
    assert [len(row["cohort"]) for row in rows] == cohorts
    assert rows[-1]["per_client"]["clients"] == list(EVERYBODY)
    clustering = check_models(out, changes, 1e-6)
    labels = json.loads((out / "measured.json").read_text(encoding="utf-8"))["labels"]
    assert labels == {str(client): clustering[client] for client in EVERYBODY}, "who comes back keeps its cluster, or gets it now"


# --- on the loopback -------------------------------------------------------------------------------------------------------------------

DEADLINE = 240.0
SLACK = 20.0


def deployed(tmp_path: Path, changes: list[str], rounds: int, plan: list[list[Any]], forget: tuple[int, ...] = ()) -> Path:
    """The run folder of a deployment whose SuperNodes died as planned and were started again."""
    module, out = quick_loopback(tmp_path), tmp_path / "d"
    out.mkdir()
    with module.deploy(out, APP / "experiment.toml", changes, rounds, DEADLINE) as machines:
        word = run_with_deaths(module, machines, out, plan, 3000, forget)
    assert word == "finished:completed"
    assert [death[:3] for death in deaths_of(out)] == plan, "each died where it should"
    run = out / "run"
    assert len(rows_of(run)) == rounds
    late = [entry for entry in stages_of(run) if entry["stage"] not in ("compute", "enrol") and entry["seconds"] > DEADLINE + SLACK]
    assert not late, "no stage waits beyond its deadline"
    return run


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_node_killed_at_each_message_of_a_secure_run_costs_at_most_itself(tmp_path: Path) -> None:
    """Client 4 keeps its state in files, client 3 loses it with its SuperNode."""
    plan: list[list[Any]] = [
        [4, "PrincipalVectors", "before"], [4, "gram", "before"], [4, "Train", "before"], [4, "Invite", "after"], [4, "Adverts", "after"],
        [4, "Deliver", "after"], [4, "Survivors", "before"], [4, "Unmask", "before"], [3, "Train", "after"],
    ]  # fmt: skip
    changes = ["data.clients=5", "protection.min_cohort=2", "algorithm.k=1"]
    run = deployed(tmp_path, changes, 10, plan, forget=(3,))
    rows = rows_of(run)
    assert not any(row["skipped"] for row in rows)
    assert rows[-1]["cohort"] == [0, 1, 2, 3, 4], "all are back"
    check_models(run, [*changes, "training.rounds=10"], 1e-4)
    assert json.loads((run / "measured.json").read_text(encoding="utf-8"))["labels"] == {str(client): 0 for client in range(5)}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_node_killed_in_a_run_in_the_clear_keeps_its_cluster(tmp_path: Path) -> None:
    plan: list[list[Any]] = [[2, "sum", "before"], [2, "Enrol", "after"], [2, "Evaluate", "before"], [2, "gather", "before"]]
    changes = ["data.clients=3", "protection.sum=none", "protection.min_cohort=1"]
    run = deployed(tmp_path, changes, 5, plan)
    clustering = check_models(run, [*changes, "training.rounds=5"], 1e-6)
    assert json.loads((run / "measured.json").read_text(encoding="utf-8"))["labels"] == {str(c): clustering[c] for c in range(3)}
    assert not any(row["admitted"] for row in rows_of(run)), "it is known by its identity and not clustered again"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_restarted_superlink_goes_on_from_the_last_round(tmp_path: Path) -> None:
    """SuperLink and SuperNodes are all killed in the second round; the run submitted again is the one that was never cut."""
    module, out, changes = quick_loopback(tmp_path), tmp_path / "d", ["data.clients=3", "algorithm.k=1"]
    out.mkdir()
    with module.deploy(out, APP / "experiment.toml", changes, 2, DEADLINE) as machines:
        module.submit(machines)
        journal = out / "run" / "stages.jsonl"
        until = time.monotonic() + 1200
        while time.monotonic() < until:
            entries = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()] if journal.exists() else []
            done = (out / "run" / "rounds.jsonl").read_text(encoding="utf-8").count("\n") if (out / "run" / "rounds.jsonl").exists() else 0
            if done == 1 and entries[-1]["stage"] == "secagg Deliver" and "answered" not in entries[-1]:
                break
            time.sleep(0.05)
        else:
            raise AssertionError("the second round was never reached")
        commands = {name: process.args for name, process in machines.running.items()}
        for process in machines.running.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        time.sleep(5)  # what the SuperLink had started sees that it is gone
        for name, command in commands.items():
            machines.start(name, *command)
            if name == "superlink":
                module.health(machines.ports[0], 120, None)
        assert module.wait(machines, module.submit(machines), 1200) == "finished:completed"
    run = out / "run"
    assert len(rows_of(run)) == 2
    stages = [entry["stage"] for entry in map(json.loads, journal.read_text(encoding="utf-8").splitlines()) if "answered" not in entry]
    assert stages.count("secagg Deliver") == 3, "the one that was cut, and one for each round"
    cut = stages.index("secagg Deliver", stages.index("secagg Deliver") + 1)
    assert stages[cut + 1] == "enrol", "everybody is greeted again"
    check_models(run, [*changes, "training.rounds=2"], 1e-4)
