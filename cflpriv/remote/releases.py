"""What may leave a client: the one rule by which its own protection, and nobody else's word, decides that.

What is compared (signatures, representations) and what is summed (updates, models, prototypes) is hidden by `gram` and by `sum`. What is
hidden leaves by the verb that hides it, and by no other:

    part of a value                     | what is compared is hidden    | what is summed is hidden
    ------------------------------------|-------------------------------|-------------------------------------------------------------
    signature, representation, and all  | `gram` only                   | in the clear if it was computed at no model, else not at all
    that was computed from one          |                               |
    choice, owns j, neighbours, wanted  | not by `gram`                 | `gather`, whole numbers *; if oblivious, `wanted` only
    scores                              | not by `gram`                 | `gather` *
    correct, loss, count                | not by `gram`                 | `gather`, single numbers; under secure sums not at all
    all else: updates, models, …        | as `sum` says; by `gram`      | `sum`, `relay`, and `gram` where that hides what is compared

* if they are fewer than the smallest model has that they were computed at.

What is kept is kept by the part's name and by what it was computed from, not by what a server calls it or copies it to. **What is not
kept**: a choice, a score or a loss is a number about the data at models that the server names, and many of them tell much; against a
server that asks for many there is `[privacy]` only. That a task has a result, and of which shape, is told as well.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal

import numpy as np

from ..protection import Protection
from ..protocols.errors import RemoteError
from ..protocols.orthonormal import TRANSFORMS
from .values import Origin

__all__ = ["CHOSEN", "COMPARED", "MEASURED", "SCORED", "SUMMED", "Verb", "check", "compares", "hides_compared", "is_compared", "may_leave"]

Verb = Literal["gram", "gather", "sum", "relay"]

COMPARED = frozenset({"signature", "representation"})
CHOSEN = frozenset({"choice", "owns", "neighbours", "wanted"})
SCORED = frozenset({"scores"})
MEASURED = frozenset({"correct", "loss", "count"})
SUMMED = frozenset(
    {"update", "model", "step", "shared", "movement", "gradient", "direction", "steps", "control", "prototype", "losses", "nothing",
     "ready", "own"}
)  # fmt: skip
"""First words of part names. A part that is in none of these is kept as those that are summed."""


def _kind(part: str) -> str:
    return part.partition(" ")[0]


def is_compared(part: str, origin: Origin) -> bool:
    """Whether a part is what clients compare, or was computed from such."""
    return origin.compared or _kind(part) in COMPARED


def compares(task: Any) -> bool:
    """Whether a task, or one inside it, makes something that clients compare; what the outer one calls it is its own affair."""
    inner = [getattr(task, one.name) for one in fields(task)]
    made = any(_kind(part) in COMPARED for part in getattr(task, "parts", ()))
    return made or any(compares(one) for one in inner if is_dataclass(one) and not isinstance(one, type))


def hides_compared(protection: Protection) -> bool:
    """Whether what is compared leaves under a transform or encrypted. A sketch hides nothing."""
    return any(stage in ("ckks", *TRANSFORMS) for stage in protection.gram)


def may_leave(protection: Protection, verb: Verb, part: str, value: Any, origin: Origin) -> bool:
    """Whether a part of a held value may leave by a verb: as it is, or for `gram` and `sum` as this protection changes it."""
    kind, compared, hidden = _kind(part), is_compared(part, origin), hides_compared(protection)
    if compared and hidden:
        return verb == "gram"
    if verb in ("sum", "relay"):
        return True
    if verb == "gram" and hidden:
        return kind not in CHOSEN | SCORED | MEASURED
    if protection.sum == "none" and protection.floor <= 1:
        return True
    if compared:
        return not origin.size
    array = np.asarray(value)
    if verb == "gram":
        return False
    if kind in CHOSEN | SCORED and 0 < origin.size <= array.size:
        return False
    if kind in CHOSEN:
        return array.dtype.kind in "biu" and (protection.sum != "secagg-oblivious" or kind == "wanted")
    if kind in SCORED:
        return origin.size > 0
    return kind in MEASURED and array.size == 1 and not protection.secure


def check(protection: Protection, verb: Verb, values: Mapping[str, Any], origin: Origin) -> None:
    """Raises `RemoteError` "forbidden" unless all of these parts may leave by this verb."""
    for part, value in values.items():
        if not may_leave(protection, verb, part, value, origin):
            error = RemoteError("forbidden")
            error.add_note(f"its release policy keeps {part!r} from {verb!r} under protection {protection.name}")
            raise error
