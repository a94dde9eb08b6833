"""Tasks as bytes and back: names and fields of the frozen dataclasses that the package and registered algorithms declare."""

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError
from ..plugins import ALGORITHMS, TASKS, Registry
from ..protocols.errors import MalformedMessage
from .foreign import Foreign

__all__ = ["UnknownTask", "made", "plain", "task_from_bytes", "task_of", "task_to_bytes"]

LARGEST_TASK_BYTES = 1 << 20
log = logging.getLogger("cflpriv.federation")


def registered() -> Registry[type]:
    """The task classes that may be sent, and models, by name."""
    return TASKS.ready()  # torch is loaded for those, not for `Foreign`


def task_to_bytes(task: Any) -> bytes:
    """A task as JSON of names and fields. Raises `InputError` for a field that cannot be encoded, e.g. a function."""
    if isinstance(task, UnknownTask):
        return task.data
    known = {"Foreign": Foreign} if isinstance(task, Foreign) else registered()
    return json.dumps(plain(task, type(task).__name__, known), allow_nan=True, separators=(",", ":")).encode()


def plain(value: Any, where: str, known: Mapping[str, type]) -> Any:
    """A dataclass that is `known` by a name, as JSON values. Raises `InputError` for anything else."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Sequence):
        return [plain(one, f"{where}[{i}]", known) for i, one in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = next((name for name, kind in known.items() if kind is type(value)), None)
        if name is None:
            raise InputError(f"{where}: {type(value).__name__} is not a task that remote clients know")
        names = [one.name for one in dataclasses.fields(value) if one.init]
        return {"": name, **{one: plain(getattr(value, one), f"{where}.{one}", known) for one in names}}
    raise InputError(f"{where}: a {type(value).__name__} cannot be encoded")


@dataclasses.dataclass(frozen=True)
class UnknownTask:
    """The bytes of a task that is not known here."""

    data: bytes
    parts: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()

    def run(self, given: Any) -> Any:
        raise TypeError("this task is not known here")


KEPT = 64
_decoded: dict[bytes, Any] = {}
"""Tasks by their bytes: clients that are sent the same bytes get the same object, so they can be computed together."""


def task_from_bytes(data: bytes) -> Any:
    """The inverse of `task_to_bytes`; an `UnknownTask` for other bytes."""
    if not isinstance(data, bytes) or len(data) > LARGEST_TASK_BYTES:
        raise MalformedMessage
    task = _decoded.get(data)
    if task is not None and (isinstance(task, Foreign) or registered().get(type(task).__name__) is type(task)):
        return task
    try:
        value = json.loads(data)
        foreign = isinstance(value, dict) and value.get("") == "Foreign"
        task = made(value, {"Foreign": Foreign} if foreign else registered())  # `Foreign` needs no torch
        if hasattr(task, "run") and hasattr(task, "parts") and task_to_bytes(task) == data:
            if len(_decoded) == KEPT:
                _decoded.clear()
            _decoded[data] = task
            return task
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    return UnknownTask(data)


def task_of(settings: Any) -> Any:
    """The task of `contract.transcript.settings_of`, or an `UnknownTask`: the same fields as its bytes, in any order."""
    data = json.dumps(settings).encode()
    try:
        task = made(json.loads(data), registered())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return UnknownTask(data)
    return task if hasattr(task, "run") and hasattr(task, "parts") else UnknownTask(data)


def made(value: Any, known: Mapping[str, type]) -> Any:
    """The inverse of `plain`. Raises `TypeError` or `KeyError` for other values."""
    if isinstance(value, list):
        return tuple(made(one, known) for one in value)
    if not isinstance(value, dict):
        return value
    name = value.pop("")
    if name not in known and isinstance(known, Registry):  # an installed package may have it
        for problem in ALGORITHMS.load_all():
            log.warning("%s", problem)
    return known[name](**{name: made(one, known) for name, one in value.items()})
