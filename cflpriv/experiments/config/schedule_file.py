"""The schedule of an algorithm as a JSON file, for an own algorithm that declares none: read, written, and checked as it is read.

    {"algorithm": "partly", "models": 1, "start": [], "joining": [], "serving": [], "round": [
        {"task": {"": "TrainPartly", "share": 0.5, "train": {"": "Train", ...}}, "leaves": {"part": ["sum"]}, "times": 1, "varies": []}]}

A task has the name of its class under "" and its fields. `times` is a number, or "each round".
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from ...contract.schedule import EACH_ROUND, Phase, Schedule, TaskRequest, request
from ...errors import InputError
from ...federation.task_encoding import UnknownTask, task_from_bytes, task_to_bytes
from ...files import write_atomically
from ...protocols.bounded_files import parse_json, read_text

__all__ = ["read_schedule", "schedule_from_json", "schedule_to_json", "write_schedule"]

LARGEST_SCHEDULE_BYTES = 1 << 22
OFTEN = "each round"


def schedule_to_json(schedule: Schedule, algorithm: str) -> str:
    """The schedule of the algorithm of this name, indented. Raises `InputError` for a task that cannot be encoded."""
    phases = {phase: [_plain(asked) for asked in getattr(schedule, phase)] for phase in get_args(Phase)}
    return json.dumps({"algorithm": algorithm, "models": schedule.models, **phases}, indent=2) + "\n"


def schedule_from_json(tree: Any, algorithm: str) -> Schedule:
    """The inverse of `schedule_to_json`, of parsed JSON. Raises `InputError` naming what is wrong, also for another algorithm."""
    phases = get_args(Phase)
    _check_keys(tree, ("algorithm", "models", *phases), "the schedule")
    if tree["algorithm"] != algorithm:
        raise InputError(f"is of algorithm {tree['algorithm']!r}, not of {algorithm!r}")
    models = tree["models"]
    if not isinstance(models, int) or isinstance(models, bool) or models < 1:
        raise InputError(f"models = {models!r}: expected a number of 1 or more")
    for phase in phases:
        if not isinstance(tree[phase], list):
            raise InputError(f"{phase}: expected a list")
    made = {phase: tuple(_request(entry, f"{phase}[{i}]") for i, entry in enumerate(tree[phase])) for phase in phases}
    return Schedule(**made, models=models)


def write_schedule(path: str | Path, schedule: Schedule, algorithm: str) -> None:
    """Write the file. Raises `InputError` for a path that cannot be written."""
    text = schedule_to_json(schedule, algorithm)
    try:
        write_atomically(Path(path), text)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error})") from None


def read_schedule(path: str | Path, algorithm: str) -> Schedule:
    """The file that `[run] schedule` names. Raises `InputError` naming the key and the file."""
    try:
        return schedule_from_json(parse_json(read_text(path, LARGEST_SCHEDULE_BYTES)), algorithm)
    except (OSError, ValueError) as error:
        raise InputError(f"run.schedule: {path}: {error}") from None


def _plain(asked: TaskRequest) -> dict[str, Any]:
    return {
        "task": json.loads(task_to_bytes(asked.task)),
        "leaves": {part: list(operations) for part, operations in asked.leaves},
        "times": OFTEN if asked.times == EACH_ROUND else asked.times,
        "varies": list(asked.varies),
    }


def _request(entry: Any, where: str) -> TaskRequest:
    _check_keys(entry, ("task", "leaves", "times", "varies"), where)
    task = task_from_bytes(json.dumps(entry["task"], separators=(",", ":")).encode())
    if isinstance(task, UnknownTask):
        raise InputError(f"{where}.task: is no task that is known here, or has other fields; [run] plugins names the files with own tasks")
    leaves, times, varies = entry["leaves"], entry["times"], entry["varies"]
    if not isinstance(leaves, Mapping) or not all(_names(operations) for operations in leaves.values()):
        raise InputError(f"{where}.leaves: expected a list of operations for each part")
    if times != OFTEN and (not isinstance(times, int) or isinstance(times, bool) or times < 1):
        raise InputError(f"{where}.times = {times!r}: expected a number of 1 or more, or {OFTEN!r}")
    if not _names(varies):
        raise InputError(f"{where}.varies: expected a list of fields")
    ways: dict[str, Any] = {part: tuple(operations) for part, operations in leaves.items()}
    try:
        return request(task, ways, times=EACH_ROUND if times == OFTEN else times, varies=tuple(varies))
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _check_keys(value: Any, keys: tuple[str, ...], where: str) -> None:
    if not isinstance(value, Mapping) or set(value) != set(keys):
        raise InputError(f"{where}: expected the keys {', '.join(keys)}")
