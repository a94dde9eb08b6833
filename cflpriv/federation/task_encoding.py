"""Tasks, and functions on a Gram matrix, as bytes and back: names and fields of declared frozen dataclasses; and functions' results.

Tasks and models are those that the package and registered algorithms declare; functions run where the Gram matrix may be seen.
"""

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..contract.operations import Results, Then
from ..errors import InputError
from ..plugins import ALGORITHMS, FUNCTIONS, TASKS, Registry
from ..protocols.errors import MalformedMessage
from ..types import Array
from .foreign import Foreign

__all__ = [
    "UnknownTask", "check_small", "fits", "known_functions", "known_tasks", "made", "plain", "task_from_bytes", "task_of", "task_to_bytes",
    "then_from_bytes", "then_to_bytes",
]  # fmt: skip

LARGEST_TASK_BYTES = 1 << 20
log = logging.getLogger("cflpriv.federation")


def known_tasks() -> Registry[type]:
    """The task classes that may be sent, and models, by name."""
    return TASKS.ready()  # torch is loaded for those, not for `Foreign`


def task_to_bytes(task: Any) -> bytes:
    """A task as JSON of names and fields. Raises `InputError` for a field that cannot be encoded, e.g. a function."""
    if isinstance(task, UnknownTask):
        return task.data
    known = {"Foreign": Foreign} if isinstance(task, Foreign) else known_tasks()
    return json.dumps(plain(task, type(task).__name__, known), allow_nan=True, separators=(",", ":")).encode()


def plain(value: Any, where: str, known: Mapping[str, type]) -> Any:
    """A dataclass that is `known` by a name, as JSON values. Raises `InputError` for anything else."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Sequence):
        return [plain(item, f"{where}[{i}]", known) for i, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = next((name for name, kind in known.items() if kind is type(value)), None)
        if name is None:
            raise InputError(f"{where}: {type(value).__name__} is not a task that remote clients know")
        names = [attribute.name for attribute in dataclasses.fields(value) if attribute.init]
        return {"": name, **{attribute: plain(getattr(value, attribute), f"{where}.{attribute}", known) for attribute in names}}
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
    if task is not None and (isinstance(task, Foreign) or known_tasks().get(type(task).__name__) is type(task)):
        return task
    try:
        value = json.loads(data)
        foreign = isinstance(value, dict) and value.get("") == "Foreign"
        task = made(value, {"Foreign": Foreign} if foreign else known_tasks())  # `Foreign` needs no torch
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
        task = made(json.loads(data), known_tasks())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return UnknownTask(data)
    return task if hasattr(task, "run") and hasattr(task, "parts") else UnknownTask(data)


def made(value: Any, known: Mapping[str, type]) -> Any:
    """The inverse of `plain`. Raises `TypeError` or `KeyError` for other values."""
    if isinstance(value, list):
        return tuple(made(item, known) for item in value)
    if not isinstance(value, dict):
        return value
    name = value.pop("")
    if name not in known and isinstance(known, Registry):  # an installed package may have it
        for problem in ALGORITHMS.load_all():
            log.warning("%s", problem)
    return known[name](**{name: made(item, known) for name, item in value.items()})


# --- functions on a Gram matrix

LARGEST_THEN_BYTES = 1 << 20
SMALL = 16
"""Released integers may exceed the number of clients by this much."""


def known_functions() -> Registry[type]:
    """The functions that may be run, and their parts, by module and name, such as "pacfl.ClusterByAngles"."""
    return FUNCTIONS.ready()


def fits(then: Then, result: Mapping[str, Array], total: int, new: int) -> bool:
    """Whether this can be the result of a function over `total` clients, `new` of them new: names, shapes, signs, labels below k."""
    wanted: Results = then.results  # type: ignore[attr-defined]  # a registered function declares them
    shapes = {"all": (total,), "new": (new,), "one": ()}
    if set(result) != set(wanted):
        return False
    for name, kind in wanted.items():
        value = result[name]
        if value.ndim != 1 if kind == "some" else value.shape != shapes[kind]:
            return False
        if value.size and int(value.min()) < (-1 if kind == "some" else 0):
            return False
    labels = result.get("labels")
    return labels is None or "k" not in result or not labels.size or int(labels.max()) < int(result["k"])


def check_small(result: Mapping[str, Any], n: int) -> None:
    """Raises `TypeError` for a result that is not labels or small integers, at most one for each of the Gram matrix's n clients.

    Real numbers, strings and large integers could carry more than the release allows.
    """
    for name, value in result.items():
        array = np.asarray(value)
        if array.dtype.kind not in "biu":
            raise TypeError(f"gram: result {name!r} must be labels or small integers, got {array.dtype}; put it into the evidence")
        if array.ndim > 1 or array.size > n or (array.size and max(int(array.max()), -int(array.min())) > n + SMALL):
            raise TypeError(f"gram: result {name!r} must be at most {n} integers up to {n + SMALL}; put it into the evidence")


def then_to_bytes(then: Then) -> bytes:
    """A function as JSON of names and fields. Raises `InputError` for one that cannot be encoded, e.g. a closure."""
    known: Any = then
    if not dataclasses.is_dataclass(known):
        raise InputError(f"gram: {then!r} does not travel to the key holder; only frozen dataclasses of algorithms do")
    return json.dumps(plain(known, type(then).__name__, known_functions()), allow_nan=True, separators=(",", ":")).encode()


def then_from_bytes(data: bytes) -> Then:
    """The inverse of `then_to_bytes`. Raises `MalformedMessage`."""
    if len(data) > LARGEST_THEN_BYTES:
        raise MalformedMessage
    try:
        then: Any = made(json.loads(data), known_functions())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise MalformedMessage from None
    if not callable(then):
        raise MalformedMessage
    made_of: Then = then
    return made_of
