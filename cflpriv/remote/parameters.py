"""What a server sends to compute with: parameters as messages, and what of them is recorded."""

from collections.abc import Mapping
from typing import Any

from ..federation import Parameter
from ..handles import Held, HeldKey
from ..types import Array
from ..wire import blind_places, wire
from . import messages as m

__all__ = ["recorded", "said_of"]


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


def recorded(
    params: Mapping[str, Parameter], lists: Mapping[str, list[Any]], chosen: tuple[int, ...]
) -> tuple[dict[str, Array], dict[str, tuple[int, int, int]]]:  # fmt: skip
    """For the record: what these clients are sent, in the clear and blind, and where each blind part lies (`blind_places`)."""
    payload: dict[str, Array] = {}
    blind: dict[str, tuple[int, int, int]] = {}
    for name, value in params.items():
        if isinstance(value, Held):
            continue
        items = [(name, value)] if name not in lists else [(f"{name}/{i}", lists[name][i]) for i in chosen or range(len(lists[name]))]
        for path, one in items:
            payload |= wire(path, one)  # type: ignore[arg-type]
            blind |= blind_places(path, one)  # type: ignore[arg-type]
    return payload, blind
