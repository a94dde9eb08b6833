"""What a server sends to compute with: parameters as messages."""

from collections.abc import Mapping
from typing import Any

from ..federation import Parameter
from ..handles import Held, HeldKey
from . import messages as m

__all__ = ["said_of"]


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
