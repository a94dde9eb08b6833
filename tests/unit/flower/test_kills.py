"""Nodes killed while they work. What comes of it is the plain sum of the survivors, or a word, in time.

On the loopback it is `kill -9` of a whole SuperNode at the very message named, by its own last words (`deployments.DYING`): minutes each,
marked `slow`. Answers that are lost on the way are in tests/unit/federation/test_remote_dropouts.py.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from deployments import APP, DyingGrid, check_models, deaths_of, quick_loopback, rows_of, run_with_deaths, stages_of

from cflpriv.data import build_population
from cflpriv.errors import InputError
from cflpriv.experiments import load_config
from cflpriv.flower import read_roster, serve

EVERYBODY = range(4)


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
    serve(grid, config, out, scene, clients=4, deadline_seconds=0.02, compute_seconds=0.02, hello_seconds=0.02, report=str)  # type: ignore[arg-type]
    assert not grid.plan, "what was to be killed was killed"
    rows = rows_of(out)
    assert [len(row["cohort"]) for row in rows] == cohorts
    assert rows[-1]["per_client"]["clients"] == list(EVERYBODY)
    clustering = check_models(out, changes, 1e-6)
    labels = json.loads((out / "measured.json").read_text(encoding="utf-8"))["labels"]
    assert labels == {str(client): clustering[client] for client in EVERYBODY}, "who comes back keeps its cluster, or gets it now"


LEAD, OTHER = 4, 5


@pytest.mark.parametrize(
    ("stage", "holder"),
    [
        ("enrol", LEAD), ("shares keys", LEAD), ("shares deposits", LEAD), ("shares open", LEAD), ("enrol", OTHER), ("shares keys", OTHER),
        ("shares deposits", OTHER), ("shares contributions", OTHER),
    ],
)  # fmt: skip
def test_a_holder_of_shares_that_is_killed_is_waited_for(tmp_path: Path, stage: str, holder: int) -> None:
    """All three holders are needed. The comparison is taken again when the killed one is back, and the run is the one without a kill."""
    changes = ['protection.gram=["shares"]', "protection.sum=none", "protection.min_cohort=1", "training.rounds=1"]
    config = load_config(APP / "experiment.toml", changes)
    scene = build_population(config.data)
    grid = DyingGrid(tmp_path, scene, 'gram = ["shares"]', {(stage, 1): [holder]}, holders=3)
    roster, out = read_roster(tmp_path / "keys" / "roster.txt"), tmp_path / "run"
    lines: list[str] = []
    seconds: dict[str, Any] = {"deadline_seconds": 0.02, "compute_seconds": 0.02, "hello_seconds": 0.02}
    serve(grid, config, out, scene, clients=4, roster=roster, report=lines.append, **seconds)  # type: ignore[arg-type]
    assert not grid.plan
    assert not any(row["skipped"] for row in rows_of(out))
    clustering = check_models(out, changes, 1e-6)
    labels = json.loads((out / "measured.json").read_text(encoding="utf-8"))["labels"]
    assert labels == {str(client): clustering[client] for client in EVERYBODY}
    waited = [line for line in lines if line.startswith("the beginning is taken again")]
    assert len(waited) == (stage != "enrol")
    assert all("3 are needed with the first among them" in line or "the first holder of shares" in line for line in waited)


class DeafGrid(DyingGrid):
    """The answers of the second "shares open" are lost."""

    def push_messages(self, messages: Any) -> list[str]:
        messages = list(messages)
        pushed = super().push_messages(messages)
        if messages[0].metadata.group_id == "shares open" and self.seen["shares open"] == 2:
            for identity in pushed:
                del self.answers[identity]
        return pushed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid_type", "plan", "admitted"),
    [
        pytest.param(DyingGrid, {("compute", 1): [3], ("shares open", 2): [LEAD]}, [[], [3], []], id="the first holder is killed"),
        pytest.param(DyingGrid, {("compute", 1): [3], ("shares deposits", 2): [OTHER]}, [[], [3], []], id="another holder is killed"),
        pytest.param(DeafGrid, {("compute", 1): [2, 3], ("enrol", 2): [3]}, [[], [2, 3], []], id="its answer is lost, and another comes"),
    ],
)
def test_a_newcomer_that_a_lost_holder_kept_out_is_admitted_when_it_is_back(
    tmp_path: Path, grid_type: type[DyingGrid], plan: Any, admitted: list[list[int]]
) -> None:
    config = load_config(APP / "experiment.toml", [
        'protection.gram=["shares"]', "protection.sum=none", "protection.min_cohort=1", "training.rounds=3", "training.epochs=1",
    ])  # fmt: skip
    scene = build_population(config.data)
    grid = grid_type(tmp_path, scene, 'gram = ["shares"]', plan, holders=3)
    roster, out = read_roster(tmp_path / "keys" / "roster.txt"), tmp_path / "run"
    seconds: dict[str, Any] = {"deadline_seconds": 0.02, "compute_seconds": 0.02, "hello_seconds": 0.02}
    serve(grid, config, out, scene, clients=4, roster=roster, report=str, **seconds)  # type: ignore[arg-type]
    assert not grid.plan
    assert [row["admitted"] for row in rows_of(out)] == admitted


@pytest.mark.parametrize("back", [True, False])
def test_a_beginning_that_nobody_takes_part_in_is_taken_again_or_ends_with_one_line(tmp_path: Path, back: bool) -> None:
    changes = ["training.rounds=1", "training.batch_size=60", "protection.sum=none", "protection.min_cohort=1"]
    config = load_config(APP / "experiment.toml", changes)
    scene = build_population(config.data)
    grid = DyingGrid(tmp_path, scene, "", {("compute", 1): EVERYBODY})
    if not back:
        grid.get_node_ids = lambda: [node for node in grid.apps if node not in grid.dead]  # type: ignore[method-assign]
    lines: list[str] = []
    seconds = {"deadline_seconds": 0.02, "compute_seconds": 0.02, "hello_seconds": 0.02, "wait_seconds": 0.1}

    def served() -> None:
        serve(grid, config, tmp_path / "run", scene, clients=4, report=lines.append, **seconds)  # type: ignore[arg-type]

    if back:
        served()
        check_models(tmp_path / "run", changes, 1e-6)
    else:
        with pytest.raises(InputError) as ended:
            served()
        line = "0 of 4 clients answered within 0.1 s; refusals: none; the SuperLink knows no SuperNode"
        assert str(ended.value).startswith(line)
        assert "\n" not in str(ended.value)
        assert not (tmp_path / "run").exists()
    assert sum(line.startswith("the beginning is taken again when those who are missing are back") for line in lines) == 1


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
    """Client 3 keeps its state in files, client 2 loses it with its SuperNode. Without one of four the others meet the threshold."""
    plan: list[list[Any]] = [
        [3, "Group", "before"], [3, "PrincipalVectors", "before"], [3, "gram", "before"], [3, "Train", "before"], [3, "Invite", "after"],
        [3, "Adverts", "after"], [3, "Deliver", "after"], [3, "Survivors", "before"], [3, "Unmask", "before"], [2, "Train", "after"],
    ]  # fmt: skip
    changes = ["protection.min_cohort=2", "algorithm.k=1", 'protection.gram=["haar"]']
    run = deployed(tmp_path, changes, 12, plan, forget=(2,))
    rows = rows_of(run)
    assert not any(row["skipped"] for row in rows)
    assert rows[-1]["cohort"] == [0, 1, 2, 3], "all are back"
    check_models(run, [*changes, "training.rounds=12"], 1e-4)
    assert json.loads((run / "measured.json").read_text(encoding="utf-8"))["labels"] == {str(client): 0 for client in range(4)}


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
