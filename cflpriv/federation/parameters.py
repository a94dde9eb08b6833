"""What a server sends to compute with: parameters as messages."""

from collections.abc import Mapping
from typing import Any

from ..contract.handles import Held, HeldKey
from ..contract.operations import Parameter
from . import messages as m

__all__ = ["said_of"]


def said_of(
    params: Mapping[str, Parameter], lists: Mapping[str, list[Any]], chosen: tuple[int, ...] | None, several: bool,
    numbers: Mapping[HeldKey, int], sums: dict[int, m.Addends],
) -> tuple[m.Parameter, ...]:  # fmt: skip
    """Parameters for the clients that pick the positions `chosen` from `lists` (None: they get them whole, or pick themselves).

    `sums` keeps what was made of each value, so that the same value is the same object in all messages.
    """

    def one(value: Any) -> m.Addends:
        if id(value) not in sums:
            sums[id(value)] = m.to_one(value, numbers)
        return sums[id(value)]

    sent = []
    for name, value in params.items():
        of: m.One | m.Many | m.Mine
        if isinstance(value, Held):
            of = m.Mine(numbers[value.key], value.part)
        elif name not in lists:
            of = m.One(one(value))
        elif chosen is None:
            of = m.Many(tuple(one(item) for item in lists[name]))
        elif several:
            of = m.Many(tuple(one(lists[name][label]) for label in chosen))
        else:
            of = m.One(one(lists[name][chosen[0]]))
        sent.append(m.Parameter(name, of))
    return tuple(sent)
