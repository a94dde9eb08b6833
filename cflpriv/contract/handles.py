"""Opaque handles to values that the server must not see, sums of which it knows only a part, and the layout of values in one vector.

An algorithm passes these between the operations of a federation. They carry no client value that the protection in force hides.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..errors import InputError, TooFewClients
from ..types import Array

if TYPE_CHECKING:  # algorithms load no msgspec
    from .transformed_parts import Transformed

__all__ = [
    "GroupMean", "Held", "HeldKey", "Labels", "OwnAddend", "PartLayout", "Released", "Shared", "at_server", "join", "label_sets", "placed",
    "times",
]  # fmt: skip


class Labels(Protocol):
    """Labels by client: `labels[client]` is a label, or several. A dict, an array over ids and a `Clustering` all serve."""

    def __getitem__(self, client: int, /) -> Any: ...


class HeldKey:
    """The identity of values that clients hold. When the last handle is deleted, the clients drop the values.

    `awaited` asks clients for values that nobody was asked for yet, None where nothing waits; `absent`: who was asked, and has none.
    """

    __slots__ = ("__weakref__", "absent", "awaited", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.absent: frozenset[int] = frozenset()
        self.awaited: Callable[[], object] | None = None

    def __repr__(self) -> str:
        return f"HeldKey({self.name})"


@dataclass(frozen=True, eq=False)
class Held:
    """Values that stay with `clients`, by part name. `held["update"]` or `held["update", "count"]` is the same with fewer parts.

    `asked`: the clients that are asked for these values.
    """

    key: HeldKey
    asked: tuple[int, ...]
    parts: tuple[str, ...]

    @property
    def clients(self) -> tuple[int, ...]:
        """The clients that hold the values. They are asked now, if nobody was yet."""
        if self.key.awaited is not None:
            self.key.awaited()
        absent = self.key.absent
        return tuple(client for client in self.asked if client not in absent) if absent else self.asked

    def __getitem__(self, parts: str | tuple[str, ...]) -> "Held":
        wanted = (parts,) if isinstance(parts, str) else parts
        for part in wanted:
            if part not in self.parts:
                raise KeyError(f"held {self.key.name}: no part {part!r}; there are {', '.join(self.parts)}")
        return replace(self, parts=wanted)

    def of(self, clients: Collection[int]) -> "Held":
        """The same values of those `clients` that hold them, e.g. of those that answered. Raises `TooFewClients` where no client is
        left."""
        left = tuple(client for client in self.asked if client in clients and client not in self.key.absent)
        if not left:
            raise TooFewClients((), 1)
        return replace(self, asked=left)

    @property
    def part(self) -> str:
        """The name of the only part."""
        if len(self.parts) != 1:
            raise ValueError(f"held {self.key.name}: has parts {', '.join(self.parts)}; choose one")
        return self.parts[0]


@dataclass(frozen=True, eq=False)
class OwnAddend:
    """A client's own addend: `factor` times its value of the one part of `held`; zero for clients without one."""

    held: Held
    factor: float = 1.0


@dataclass(frozen=True, eq=False)
class Shared:
    """A sum of a clear part, transformed parts (one per transform) and clients' own parts. Servers add and scale it; clients open it.

    Where `own` is not empty, the sum differs between clients.
    """

    clear: Array | None = None
    transformed: tuple["Transformed", ...] = ()
    own: tuple[OwnAddend, ...] = ()

    def __add__(self, other: "Shared") -> "Shared":
        clear = self.clear if other.clear is None else other.clear if self.clear is None else self.clear + other.clear
        terms = list(self.transformed)
        for addend in other.transformed:
            place = next((i for i, term in enumerate(terms) if term.same_place(addend)), None)
            if place is None:
                terms.append(addend)
            else:
                terms[place] = terms[place].plus(addend)
        return Shared(clear, tuple(terms), self.own + other.own)

    def __mul__(self, factor: float) -> "Shared":
        return Shared(
            None if self.clear is None else (self.clear * factor).astype(self.clear.dtype, copy=False),
            tuple(term.times(factor) for term in self.transformed),
            tuple(replace(term, factor=term.factor * factor) for term in self.own),
        )

    __rmul__ = __mul__

    def __sub__(self, other: "Shared") -> "Shared":
        return self + other * -1.0

    @property
    def is_clear(self) -> bool:
        """Whether the server sees all of it."""
        return not self.transformed and not self.own

    def value(self) -> Array:
        """The value, if the server sees all of it; `InputError` otherwise."""
        if not self.is_clear or self.clear is None:
            raise InputError("a protected sum has no value at the server; hand it to clients")
        return self.clear

    def norm(self) -> float:
        """The Euclidean norm of a sum with a single part, which orthonormal transforms keep; `InputError` for others."""
        if self.clear is not None and self.is_clear:
            return float(np.linalg.norm(self.clear))
        if self.clear is None and not self.own and len(self.transformed) == 1:
            term = self.transformed[0]
            if term.start == 0 and term.stop == term.dimension:
                return float(np.linalg.norm(term.value))
        raise InputError("norm: the server knows it only for a sum with a single whole part")


@dataclass(frozen=True, eq=False)
class GroupMean:
    """The mean over one group: `parts` by name, the sum of `weight`s (None where it is not released), the `count` of clients.

    `clipped` is the number of clients whose values went beyond the range of a secure sum and were clipped. `contributors` are
    the clients whose values are in the sum, as far as the server knows: those of all groups where an oblivious sum hides memberships.
    `rounding` is the most that the quantiser of a secure sum is expected to have added, as a share of the mean's length.
    `largest` is the share of the weight that one client has, 0 where the server does not know it.
    """

    parts: Mapping[str, Shared]
    weight: float | None
    count: int
    clipped: int = 0
    contributors: tuple[int, ...] = ()
    rounding: float = 0.0
    largest: float = 0.0


@dataclass(frozen=True, eq=False)
class Released:
    """The result of `gram`: `result` (labels and small integers), and `evidence` where the release allows it, else None."""

    result: Mapping[str, Any]
    evidence: Mapping[str, Any] | None


# --- values as one vector


@dataclass(frozen=True)
class PartLayout:
    """The `parts` (name, dtype, shape) of values, in the order in which they lie in one vector."""

    parts: tuple[tuple[str, str, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "PartLayout":
        """The layout of arrays by name."""
        return cls(tuple((name, value.dtype.str, tuple(np.shape(value))) for name, value in values.items()))

    def some(self, names: tuple[str, ...]) -> "PartLayout":
        """The layout of the parts of these names, in their order."""
        return PartLayout(tuple(part for name in names for part in self.parts if part[0] == name))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a part; () if there is none of this name."""
        return next((shape for known, _, shape in self.parts if known == name), ())

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """Where each part lies, [start, stop), in the vector of all parts."""
        places, start = {}, 0
        for name, _, shape in self.parts:
            places[name] = (start, start + prod(shape))
            start = places[name][1]
        return places

    @property
    def size(self) -> int:
        """The numbers of all parts."""
        return sum(prod(shape) for _, _, shape in self.parts)

    @property
    def nbytes(self) -> int:
        """The bytes of all parts."""
        return sum(prod(shape) * np.dtype(dtype).itemsize for _, dtype, shape in self.parts)

    def split(self, vector: Array) -> dict[str, Array]:
        """The parts of a vector, each in its shape and dtype. Numbers beyond the last part are left out."""
        parts, start = {}, 0
        for name, dtype, shape in self.parts:
            stop = start + prod(shape)
            parts[name] = vector[start:stop].reshape(shape).astype(dtype)
            start = stop
        return parts


def join(values: Mapping[str, Any], dtype: Any = None) -> Array:
    """All parts as one vector, in their order; in the dtype that holds them all, or in `dtype`."""
    return np.concatenate([np.ravel(np.asarray(value)) for value in values.values()], dtype=dtype, casting="unsafe")


# --- products and labels


def at_server(shared: Shared, number: Shared) -> bool:
    """Whether a server can multiply a sum by a number itself. `InputError` for what `product` does not take."""
    if shared.own or number.own:
        raise InputError("product: a sum with clients' own parts has no single value")
    if number.is_clear:
        if number.value().size != 1:
            raise InputError(f"product: expected a single number, got shape {number.value().shape}")
        return True
    if shared.clear is not None or number.clear is not None:
        raise InputError("product: of sums that the server sees part of, and part not")
    if any(term.stop - term.start != 1 for term in number.transformed):
        raise InputError(f"product: expected a single number, got shape {number.transformed[0].shape}")
    return False


def times(value: Array, number: Array) -> Array:
    """A value times one number, in the value's dtype. `InputError` for more than one."""
    if number.size != 1:
        raise InputError(f"product: expected a single number, got shape {number.shape}")
    return np.asarray(value * number.item()).astype(value.dtype, copy=False)


def placed(labels: Labels, clients: Sequence[int]) -> list[int]:
    """The clients that have a label."""
    labelled = []
    for client in clients:
        with suppress(KeyError, IndexError):
            labels[client]
            labelled.append(client)
    return labelled


def label_sets(labels: Labels, clients: Sequence[int], k: int | None, name: str) -> tuple[dict[int, tuple[int, ...]], bool]:
    """Each client's labels as a tuple, and whether any client may have several. `InputError` for a missing or impossible label."""
    sets: dict[int, tuple[int, ...]] = {}
    several = False
    for client in clients:
        try:
            value = labels[client]
        except (KeyError, IndexError):
            raise InputError(f"{name}: no label for client {client}") from None
        if type(value) is not int and isinstance(value, tuple | list | np.ndarray) and np.ndim(value) == 1:
            several = True
            sets[client] = tuple(_label(label, client, name) for label in value)
        else:
            sets[client] = (_label(value, client, name),)
        for label in sets[client]:
            if label < 0 or (k is not None and label >= k):
                raise InputError(f"{name}: client {client} has label {label}, expected 0..{'' if k is None else k - 1}")
    return sets, several


def _label(value: Any, client: int, name: str) -> int:
    if type(value) is int:  # nearly always, and of many clients in every round
        return value
    if np.ndim(value) or np.asarray(value).dtype.kind not in "iu":
        raise InputError(f"{name}: client {client} has label {value!r}, expected a whole number")
    return int(value)
