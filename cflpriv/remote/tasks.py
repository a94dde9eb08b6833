"""Tasks as bytes and back: the names and fields of frozen dataclasses from a fixed list."""

import dataclasses
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from ..errors import InputError
from ..protocols.errors import MalformedMessage
from .foreign import Foreign

__all__ = ["task_from_bytes", "task_to_bytes"]

TASKS_IN = ("training", "signatures", "models", "algorithms")
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
    """A task as JSON of names and fields. Raises `InputError` for a field that does not travel, e.g. a function."""
    return json.dumps(_plain(task, type(task).__name__), allow_nan=True, separators=(",", ":")).encode()


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Sequence):
        return [_plain(one, f"{where}[{i}]") for i, one in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = type(value).__name__
        if not isinstance(value, Foreign) and _known().get(name) is not type(value):
            raise InputError(f"{where}: {name} is not a task that clients elsewhere know")
        names = [one.name for one in dataclasses.fields(value) if one.init]
        return {"": name, **{one: _plain(getattr(value, one), f"{where}.{one}") for one in names}}
    raise InputError(f"{where}: a {type(value).__name__} does not travel to clients elsewhere")


def task_from_bytes(data: bytes) -> Any:
    """The task that `task_to_bytes` wrote. Raises `MalformedMessage`."""
    if len(data) > LARGEST_TASK_BYTES:
        raise MalformedMessage
    try:
        plain = json.loads(data)
        known = {"Foreign": Foreign} if isinstance(plain, dict) and plain.get("") == "Foreign" else _known()  # that one loads no torch
        task = _made(plain, known)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise MalformedMessage from None
    if not hasattr(task, "run") or not hasattr(task, "parts"):
        raise MalformedMessage
    return task


def _made(plain: Any, known: Mapping[str, type]) -> Any:
    if isinstance(plain, list):
        return tuple(_made(one, known) for one in plain)
    if not isinstance(plain, dict):
        return plain
    kind = known[plain.pop("")]
    return kind(**{name: _made(value, known) for name, value in plain.items()})
