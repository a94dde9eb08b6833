"""The file that `[run] schedule` names: written, read, and refused in one line that names the key and the file."""

import json
from pathlib import Path
from typing import Any

import pytest
from scenes import population, training

from cflpriv.algorithms import ALGORITHMS
from cflpriv.contract.schedule import EACH_ROUND, Schedule, request
from cflpriv.errors import InputError
from cflpriv.experiments import load_config, parse_config
from cflpriv.experiments.config.schedule_file import read_schedule, schedule_from_json, schedule_to_json, write_schedule
from cflpriv.experiments.run.inferred_schedule import inferred_schedule
from cflpriv.tasks.training import Train

SCENE = population(clients_per_group=2)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS.ready() if name not in ("oracle", "shuffled")])
def test_the_schedule_of_every_algorithm_can_be_written_and_read(name: str, tmp_path: Path) -> None:
    schedule = ALGORITHMS[name].make(training(SCENE)).schedule
    assert schedule is not None
    path = tmp_path / "schedule.json"
    write_schedule(path, schedule, name)
    assert read_schedule(path, name) == schedule
    assert schedule_to_json(read_schedule(path, name), name) == path.read_text(encoding="utf-8"), "one schedule, one text"


def test_a_count_by_rounds_is_written_in_words() -> None:
    train = training(SCENE)
    schedule = Schedule(
        joining=(request(train, {"update": ("gram", "sum")}, times=EACH_ROUND, varies=("model.hidden", "epochs")),), models=2
    )
    text = schedule_to_json(schedule, "own")
    assert json.loads(text)["joining"][0]["times"] == "each round"
    assert schedule_from_json(json.loads(text), "own") == schedule


def tree_with(**changes: Any) -> dict[str, Any]:
    """The tree of a schedule with some keys of its one request changed; None leaves a key out."""
    tree: dict[str, Any] = json.loads(schedule_to_json(Schedule(round=(request(training(SCENE), {"update": "sum"}),)), "own"))
    entry = {**tree["round"][0], **changes}
    return {**tree, "round": [{key: value for key, value in entry.items() if value is not None}]}


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ([], "the schedule: expected the keys algorithm, models, start, round, joining, serving"),
        ({**tree_with(), "more": 1}, "the schedule: expected the keys"),
        ({**tree_with(), "algorithm": "other"}, "is of algorithm 'other', not of 'own'"),
        ({**tree_with(), "models": 0}, "models = 0: expected a number of 1 or more"),
        ({**tree_with(), "start": {}}, "start: expected a list"),
        (tree_with(times=None), r"round\[0\]: expected the keys task, leaves, times, varies"),
        (tree_with(task={"": "Unknown"}), r"round\[0\].task: is no task that is known here"),
        (tree_with(task=3), r"round\[0\].task: is no task that is known here"),
        (tree_with(times=0), r"round\[0\].times = 0: expected a number of 1 or more, or 'each round'"),
        (tree_with(times=True), r"round\[0\].times = True: expected a number"),
        (tree_with(leaves=["update"]), r"round\[0\].leaves: expected a list of operations for each part"),
        (tree_with(leaves={"update": "sum"}), r"round\[0\].leaves: expected a list of operations for each part"),
        (tree_with(leaves={"updates": ["sum"]}), r"round\[0\]: schedule: Train has no part 'updates'"),
        (tree_with(leaves={"update": ["mean"]}), r"round\[0\]: schedule: 'update' leaves by mean; known are"),
        (tree_with(varies=["rate"]), r"round\[0\]: schedule: Train has no field 'rate'"),
        (tree_with(varies=["model.rate"]), r"round\[0\]: schedule: Train has no field 'model.rate'"),
        (tree_with(varies="lr"), r"round\[0\].varies: expected a list of fields"),
    ],
    ids=str,
)
def test_a_file_that_is_wrong_is_refused(tree: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    path.write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(InputError, match=rf"^run\.schedule: {path}: {words}") as error:
        read_schedule(path, "own")
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_or_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"run\.schedule: .*missing\.json"):
        read_schedule(tmp_path / "missing.json", "own")
    (tmp_path / "text.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match=r"run\.schedule: .*text\.json: "):
        read_schedule(tmp_path / "text.json", "own")
    with pytest.raises(InputError, match="cannot be written"):
        write_schedule(tmp_path / "no folder" / "schedule.json", Schedule(), "own")


def test_a_path_is_relative_to_the_configuration_file(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[run]\nschedule = "own.json"\n[algorithm]\nname = "fedavg"\n', encoding="utf-8")
    assert load_config(tmp_path / "config.toml").run.schedule == str(tmp_path / "own.json")


def test_an_algorithm_that_declares_its_schedule_takes_no_other() -> None:
    config = parse_config({"algorithm": {"name": "fedavg"}, "run": {"schedule": "own.json"}})
    with pytest.raises(InputError, match=r"run\.schedule = 'own\.json': algorithm 'fedavg' declares its own schedule; leave it out"):
        config.algorithm_for(SCENE)
    with pytest.raises(InputError, match="algorithm 'fedavg': declares its schedule; there is nothing to infer"):
        inferred_schedule(config, population=SCENE)


def test_a_request_names_parts_and_fields_of_its_task() -> None:
    train: Train = training(SCENE)
    with pytest.raises(InputError, match="Train -1 times; expected 1 or more, or EACH_ROUND"):
        request(train, times=-1)
