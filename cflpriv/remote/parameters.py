"""What a server sends to compute with: parameters as messages, and what of them is recorded."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..federation import Parameter
from ..handles import Held, HeldKey, Shared
from ..types import Array
from . import messages as m

__all__ = ["clear_parts", "said_of"]


def said_of(
    params: Mapping[str, Parameter], lists: Mapping[str, list[Any]], chosen: tuple[int, ...] | None, several: bool,
    numbers: Mapping[HeldKey, int],
) -> tuple[m.Parameter, ...]:  # fmt: skip
    """Parameters for the clients that pick the positions `chosen` from `lists` (None: they get them whole, or pick themselves)."""
    sent = []
    for name, value in params.items():
        one: m.One | m.Many | m.Mine
        if isinstance(value, Held):
            one = m.Mine(numbers[value.key], value.part)
        elif name not in lists:
            one = m.One(m.to_one(value, numbers))  # type: ignore[arg-type]
        elif chosen is None:
            one = m.Many(tuple(m.to_one(item, numbers) for item in lists[name]))
        elif several:
            one = m.Many(tuple(m.to_one(lists[name][label], numbers) for label in chosen))
        else:
            one = m.One(m.to_one(lists[name][chosen[0]], numbers))
        sent.append(m.Parameter(name, one))
    return tuple(sent)


def clear_parts(params: Mapping[str, Parameter], lists: Mapping[str, list[Any]], chosen: tuple[int, ...]) -> dict[str, Array]:
    """For the record: the clear parts of what these clients are sent."""
    payload: dict[str, Array] = {}
    for name, value in params.items():
        if isinstance(value, Held):
            continue
        items = [(name, value)] if name not in lists else [(f"{name}/{i}", lists[name][i]) for i in chosen or range(len(lists[name]))]
        for path, one in items:
            shared = one if isinstance(one, Shared) else Shared(np.asarray(one))
            payload |= {} if shared.clear is None else {path: shared.clear}
    return payload
