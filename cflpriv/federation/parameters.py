"""What a server sends with a task: its parameters as messages, the requests for it, and the record of both."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import msgspec
import numpy as np

from ..contract.handles import Held, HeldKey, Labels, Shared, label_sets
from ..contract.operations import Parameter
from ..errors import InputError
from ..types import Array
from . import messages as m

__all__ = ["TaskParameters", "parameter_messages", "renamed"]


@dataclass(frozen=True, eq=False)
class TaskParameters:
    """The parameters of a task by name, and `which`: each client's picks from those that are lists."""

    values: Mapping[str, Parameter]
    which: Labels | Held | None = None

    @cached_property
    def lists(self) -> dict[str, list[Any]]:
        """The parameters that are lists."""
        return {name: list(value) for name, value in self.values.items() if isinstance(value, list | tuple)}

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Of each parameter that the server can read, or of the first of a list, name and shape."""
        shapes = []
        for name, value in self.values.items():
            first: Any = next(iter(self.lists.get(name, [value])), None)
            array = first.clear if isinstance(first, Shared) else first
            shapes += [(name, array.shape)] if isinstance(array, np.ndarray) else []
        return tuple(shapes)

    @property
    def held(self) -> list[Held]:
        """Values that clients hold themselves, in the order in which clients find them."""
        return [value for value in (self.which, *self.values.values()) if isinstance(value, Held)]

    @property
    def own(self) -> list[Held]:
        """Values that the clients' own parts of sums refer to."""
        items = [item for value in self.values.values() for item in (value if isinstance(value, list | tuple) else [value])]
        return [addend.held for item in items if isinstance(item, Shared) for addend in item.own]

    def requests(
        self, like: m.Compute, clients: Sequence[int], numbers: Mapping[HeldKey, int]
    ) -> list[tuple[tuple[int, ...], list[int], m.Compute]]:
        """The requests to `clients`, which are `like` this one: the picked labels, the clients that get the same request, and the request.

        Raises `InputError` for lists that `which` cannot pick from.
        """
        sizes = {len(choices) for choices in self.lists.values()}
        if self.which is not None and len(sizes) != 1:
            raise InputError(f"compute: `which` needs lists of one length to pick from, got lengths {sorted(sizes)}")
        labels: dict[int, tuple[int, ...]] = {}
        several = False
        if self.which is not None and not isinstance(self.which, Held):
            labels, several = label_sets(self.which, clients, sizes.pop(), "compute: which")
        alike: dict[tuple[int, ...], list[int]] = {}
        for client in clients:
            alike.setdefault(labels.get(client, ()), []).append(client)
        sums: dict[int, m.Addends] = {}
        requests = []
        for chosen, members in sorted(alike.items()):
            sent = parameter_messages(self.values, self.lists, chosen if labels else None, several, numbers, sums)
            picks: m.Picks | m.HeldValue | None = m.Picks(chosen, several) if labels else None
            if isinstance(self.which, Held):
                picks = m.HeldValue(numbers[self.which.key], self.which.part)
            requests.append((chosen, members, msgspec.structs.replace(like, params=sent, which=picks)))
        return requests

    def sent(self, chosen: Sequence[int]) -> Iterator[tuple[str, Any]]:
        """The values that are sent to clients that picked `chosen` (empty: whole lists), with their names."""
        for name, value in self.values.items():
            if name in self.lists:
                yield from ((f"{name}/{i}", self.lists[name][i]) for i in chosen or range(len(self.lists[name])))
            elif not isinstance(value, Held):
                yield name, value

    def unprotected(self, chosen: Sequence[int]) -> tuple[int, int]:
        """The numbers and bytes that these clients would be sent without a protection: nothing of a sum that has only their own parts."""
        numbers = size = 0
        for _, value in self.sent(chosen):
            array = np.asarray(value) if not isinstance(value, Shared) else value.clear
            if array is not None:
                numbers, size = numbers + array.size, size + array.nbytes
            elif value.transformed:
                first = value.transformed[0]
                numbers, size = numbers + prod(first.shape), size + prod(first.shape) * first.value.itemsize
        return numbers, size

    def recorded(self, chosen: Sequence[int]) -> tuple[dict[str, Array], dict[str, tuple[int, int, int]]]:
        """For the transcript: what these clients are sent, and of each transformed part [start, stop, dimension] in its opened vector."""
        payload: dict[str, Array] = {}
        places: dict[str, tuple[int, int, int]] = {}
        for name, value in self.sent(chosen):
            if not isinstance(value, Shared):
                payload[name] = np.asarray(value)
                continue
            if value.clear is not None:
                payload[name] = value.clear
            for term in value.transformed:
                payload[f"{name}/{term.transform}"] = term.value
                places[f"{name}/{term.transform}"] = (term.start, term.stop, term.dimension)
        return payload, places


def renamed(params: Mapping[str, Parameter], times: int) -> Mapping[str, Parameter]:
    """Parameters that clients know by another name: in each array of floats the largest number is `times` units in the last place smaller.

    A sum at a model that failed after clients revealed their shares is repeated over other clients, who cannot see that it failed: they
    never allow a second sum of one name over others (`protocols.secagg.summed`). The server learned nothing from the sum that failed.
    """
    known: dict[int, Any] = {}

    def one(value: Any) -> Any:
        if id(value) not in known:
            known[id(value)] = _smaller(value, times)
        return known[id(value)]

    return {
        name: value if isinstance(value, Held) else [one(item) for item in value] if isinstance(value, list | tuple) else one(value)
        for name, value in params.items()
    }


def _smaller(value: Any, times: int) -> Any:
    if isinstance(value, Shared):
        return value if value.clear is None else replace(value, clear=_smaller(value.clear, times))
    array = np.array(value)
    if array.dtype.kind != "f" or array.size < 2:  # a setting of a task, not a model
        return value
    place = np.unravel_index(np.argmax(np.abs(array)), array.shape)
    towards = array.dtype.type(-np.inf if array[place] > 0 else np.inf)  # past zero, so that each number of times has its own name
    for _ in range(times):
        array[place] = np.nextafter(array[place], towards)
    return array


def parameter_messages(
    params: Mapping[str, Parameter], lists: Mapping[str, list[Any]], chosen: tuple[int, ...] | None, several: bool,
    numbers: Mapping[HeldKey, int], sums: dict[int, m.Addends],
) -> m.SentParameters:  # fmt: skip
    """Parameters for clients that pick the positions `chosen` from `lists` (None: they get whole lists, or pick themselves).

    `sums` keeps the message of each value, so that the same value is the same object in all requests.
    """

    def addends(value: Any) -> m.Addends:
        if id(value) not in sums:
            sums[id(value)] = m.to_addends(value, numbers)
        return sums[id(value)]

    def message(name: str, value: Parameter) -> m.Addends | m.Many | m.HeldValue:
        if isinstance(value, Held):
            return m.HeldValue(numbers[value.key], value.part)
        if name not in lists:
            return addends(value)
        if chosen is not None and not several:
            return addends(lists[name][chosen[0]])
        return m.Many(tuple(addends(lists[name][label]) for label in (range(len(lists[name])) if chosen is None else chosen)))

    return tuple((name, message(name, value)) for name, value in params.items())
