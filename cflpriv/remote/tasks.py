"""Tasks as bytes and back: the names and fields of frozen dataclasses from a fixed list."""

import dataclasses
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from ..errors import InputError
from ..protocols.errors import MalformedMessage
from .foreign import Foreign

__all__ = ["UnknownTask", "made", "plain", "task_from_bytes", "task_to_bytes"]

TASKS_IN = ("training", "evaluation", "signatures", "models", "algorithms")
"""Where the dataclasses live that may travel as tasks and parts of tasks."""
LARGEST_TASK_BYTES = 1 << 20


@cache
def _known() -> dict[str, type]:
    """The tasks of these modules, and models, by name."""
    package = __package__.rpartition(".")[0]
    known: dict[str, type] = {}
    modules = [importlib.import_module(f"{package}.{name}") for name in TASKS_IN]
    modules += [module for name, module in sorted(sys.modules.items()) if name.startswith(f"{package}.algorithms.")]
    for module in modules:
        for thing in vars(module).values():
            own = isinstance(thing, type) and dataclasses.is_dataclass(thing) and thing.__module__ == module.__name__
            if (
                own
                and ((hasattr(thing, "run") and hasattr(thing, "parts")) or thing.__name__ == "Model")
                and known.setdefault(thing.__name__, thing) is not thing
            ):
                raise TypeError(f"two dataclasses are called {thing.__name__}: {known[thing.__name__].__module__}, {module.__name__}")
    return known


def task_to_bytes(task: Any) -> bytes:
    """A task as JSON of names and fields. Raises `InputError` for a field that cannot be encoded, e.g. a function."""
    if isinstance(task, UnknownTask):
        return task.data
    known = {"Foreign": Foreign} if isinstance(task, Foreign) else _known()
    return json.dumps(plain(task, type(task).__name__, known), allow_nan=True, separators=(",", ":")).encode()


def plain(value: Any, where: str, known: Mapping[str, type]) -> Any:
    """What JSON takes of a dataclass that is `known` by a name. Raises `InputError` for anything else."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Sequence):
        return [plain(one, f"{where}[{i}]", known) for i, one in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = next((name for name, kind in known.items() if kind is type(value)), None)
        if name is None:
            raise InputError(f"{where}: {type(value).__name__} is not a task that clients elsewhere know")
        names = [one.name for one in dataclasses.fields(value) if one.init]
        return {"": name, **{one: plain(getattr(value, one), f"{where}.{one}", known) for one in names}}
    raise InputError(f"{where}: a {type(value).__name__} cannot be encoded")


@dataclasses.dataclass(frozen=True)
class UnknownTask:
    """Bytes that are no task that is known here."""

    data: bytes
    parts: tuple[str, ...] = ()

    def run(self, given: Any) -> Any:
        raise TypeError("this task is not known here")


@lru_cache(maxsize=64)
def task_from_bytes(data: bytes) -> Any:
    """The task that `task_to_bytes` wrote, or an `UnknownTask`."""
    if not isinstance(data, bytes) or len(data) > LARGEST_TASK_BYTES:
        raise MalformedMessage
    try:
        said = json.loads(data)
        known = {"Foreign": Foreign} if isinstance(said, dict) and said.get("") == "Foreign" else _known()  # that one loads no torch
        task = made(said, known)
        if hasattr(task, "run") and hasattr(task, "parts") and task_to_bytes(task) == data:
            return task
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    return UnknownTask(data)


def made(said: Any, known: Mapping[str, type]) -> Any:
    """What `plain` took apart. Raises `TypeError` or `KeyError` for what it did not."""
    if isinstance(said, list):
        return tuple(made(one, known) for one in said)
    if not isinstance(said, dict):
        return said
    kind = known[said.pop("")]
    return kind(**{name: made(value, known) for name, value in said.items()})
