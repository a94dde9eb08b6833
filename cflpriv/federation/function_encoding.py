"""Functions that run where the Gram may be seen, as bytes and back: the names and fields of the dataclasses that algorithms declare."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from ..contract.operations import Results, Then
from ..errors import InputError
from ..plugins import FUNCTIONS, Registry
from ..protocols.errors import MalformedMessage
from ..types import Array
from .task_encoding import made, plain

__all__ = ["fits", "registered", "then_from_bytes", "then_to_bytes"]

LARGEST_THEN_BYTES = 1 << 20


def registered() -> Registry[type]:
    """What may be run, and be part of it, by module and name, such as "pacfl.ClusterByAngles"."""
    return FUNCTIONS.ready()


def fits(then: Then, result: Mapping[str, Array], total: int, new: int) -> bool:
    """Whether this could be the result of a function over `total` clients, of whom `new` are new: names, shapes, signs, labels below k."""
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


def then_to_bytes(then: Then) -> bytes:
    """A function as JSON of names and fields. Raises `InputError` for one that does not travel, e.g. a closure."""
    known: Any = then
    if not dataclasses.is_dataclass(known):
        raise InputError(f"gram: {then!r} does not travel to the key holder: only frozen dataclasses of the algorithms do")
    return json.dumps(plain(known, type(then).__name__, registered()), allow_nan=True, separators=(",", ":")).encode()


def then_from_bytes(data: bytes) -> Then:
    """The function that `then_to_bytes` wrote. Raises `MalformedMessage`."""
    if len(data) > LARGEST_THEN_BYTES:
        raise MalformedMessage
    try:
        then: Any = made(json.loads(data), registered())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise MalformedMessage from None
    if not callable(then):
        raise MalformedMessage
    made_of: Then = then
    return made_of
