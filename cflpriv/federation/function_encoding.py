"""Functions that run where the Gram matrix may be seen: as bytes (names and fields of declared dataclasses), and their results."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..contract.operations import Results, Then
from ..errors import InputError
from ..plugins import FUNCTIONS, Registry
from ..protocols.errors import MalformedMessage
from ..types import Array
from .task_encoding import made, plain

__all__ = ["check_small", "fits", "registered", "then_from_bytes", "then_to_bytes"]

LARGEST_THEN_BYTES = 1 << 20
SMALL = 16
"""Released integers may exceed the number of clients by this much."""


def registered() -> Registry[type]:
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
    return json.dumps(plain(known, type(then).__name__, registered()), allow_nan=True, separators=(",", ":")).encode()


def then_from_bytes(data: bytes) -> Then:
    """The inverse of `then_to_bytes`. Raises `MalformedMessage`."""
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
