"""Functions that run where the Gram may be seen, as bytes and back: the names and fields of frozen dataclasses of the algorithms."""

import dataclasses
import importlib
import json
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from ..errors import InputError
from ..federation import Then
from ..protocols.errors import MalformedMessage
from ..types import Array
from .tasks import made, plain

__all__ = ["RESULTS", "fits", "then_from_bytes", "then_to_bytes"]

LARGEST_THEN_BYTES = 1 << 20
RESULTS: dict[str, dict[str, str]] = {
    "pacfl.ClusterByAngles": {"labels": "all", "k": "one", "clear": "one"},
    "pacfl.PlaceNewcomers": {"labels": "new", "k": "one", "recut_changes": "one"},
    "merging.MergeClusters": {"labels": "all", "nearest": "some"},
    "merging.PlaceNewcomers": {"labels": "new", "nearest": "some"},
    "merging.MergePresent": {"into": "some"},
    "merging.Known": {},
    "one_shot.ClusterByMeans": {"labels": "all"},
    "one_shot.PlaceByMeans": {"labels": "new"},
    "splitting.Bipartition": {"said": "one", "side": "all"},
    "splitting.MoreSimilar": {"side": "new"},
}
"""What each function's result holds: a number for every client, for every new one, for some of their clusters, or one number."""


@cache
def _known() -> dict[str, type]:
    """What may be run, and be part of it, by module and name, such as "pacfl.ClusterByAngles"."""
    package = __package__.rpartition(".")[0] + ".algorithms"
    importlib.import_module(package)
    known: dict[str, type] = {}
    for path, module in sorted(sys.modules.items()):
        if path.startswith(package + "."):
            for thing in vars(module).values():
                own = isinstance(thing, type) and dataclasses.is_dataclass(thing) and thing.__module__ == path
                if own and "__call__" in vars(thing):
                    known[f"{path.rpartition('.')[2]}.{thing.__name__}"] = thing
    return known


def fits(then: Then, result: Mapping[str, Array], total: int, new: int) -> bool:
    """Whether this could be the result of a function over `total` clients, of whom `new` are new: names, shapes, signs, labels below k."""
    known = next(name for name, kind in _known().items() if kind is type(then))
    wanted, shapes = RESULTS[known], {"all": (total,), "new": (new,), "one": ()}
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
    return json.dumps(plain(known, type(then).__name__, _known()), allow_nan=True, separators=(",", ":")).encode()


def then_from_bytes(data: bytes) -> Then:
    """The function that `then_to_bytes` wrote. Raises `MalformedMessage`."""
    if len(data) > LARGEST_THEN_BYTES:
        raise MalformedMessage
    try:
        then: Any = made(json.loads(data), _known())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise MalformedMessage from None
    if not callable(then):
        raise MalformedMessage
    made_of: Then = then
    return made_of
