"""What a client holds between messages: values by number, memory by name, and what each was computed from."""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from hashlib import sha256
from math import inf, isnan, prod
from typing import Any, TypeVar

import numpy as np

from ..contract.schedule import Leaving
from ..protocols.errors import MalformedMessage, RemoteError
from ..types import Array, PartKind
from . import messages as m
from .postponed import Postponed
from .store import ObjectStore, Store
from .transforms import Transforms

__all__ = [
    "UNTRACED", "Leaves", "Origin", "SharedWork", "ValueForm", "Values", "form_of", "from_bytes", "keep_values", "kept_values", "rounds_of",
    "spread_of", "to_bytes", "trace",
]  # fmt: skip

T = TypeVar("T")

OPENED = ("sum/", "apply/")
"""Purposes of the transforms that clients open: sums. No client opens compared values."""


UNTRACED = sha256(b"cflpriv: what other clients made, or what a client has of its own").digest()
"""The name of values that the server did not send, and of all that is computed from them."""


LARGEST_ORIGIN_BYTES = 1 << 20
MOST_ROUNDS = 1024
FORGOTTEN = (-(1 << 62) - 1,)
"""The rounds of a value from more than `MOST_ROUNDS` rounds: older than all that a client remembers to have summed."""


class Leaves(m.FederationMessage, frozen=True):
    """The operations by which parts of a value leave by the session contract, and the name of its request in what the client counts."""

    parts: tuple[tuple[str, tuple[Leaving, ...]], ...]
    request: bytes = b""

    def by(self, part: str) -> tuple[Leaving, ...]:
        """The operations by which a part leaves."""
        return dict(self.parts).get(part, ())


class Origin(m.FederationMessage, frozen=True):
    """What a value was computed from. `received`: the name of what the server sent. `size`: of the smallest model (0: none).

    `compared`: it depends on values that clients compare, such as signatures. `kinds`: of its parts that are not summed, as the installed
    task declares them. `rounds`: in which it, and the held values that went into it, were computed; none for values of other clients.
    `spread`: the largest ratio of the weights that it has inside itself (`spread_of`). `failed`: there was no result on the client's data,
    or a held value that went into it was of this kind; it counts with weight zero.

    `models`: digests of all parameters that a task was computed at, of several to choose from only those that were chosen. `alternatives`:
    between so many the client chose. `request`: the digest of the requests that it answers, whatever their numbers. `leaves`: how
    its parts leave, None without a session contract.
    """

    received: bytes = b""
    size: m.Count = 0
    compared: bool = False
    kinds: tuple[tuple[str, PartKind], ...] = ()
    rounds: tuple[int, ...] = ()
    spread: float = 1.0
    failed: bool = False
    request: bytes = b""
    models: tuple[bytes, ...] = ()
    alternatives: m.Count = 1
    leaves: Leaves | None = None

    def kind(self, part: str) -> PartKind:
        """The kind of a part; "summed" if none is declared."""
        return dict(self.kinds).get(part, "summed")

    def is_compared(self, part: str) -> bool:
        """Whether clients compare a part, or it was computed from such a part."""
        return self.compared or self.kind(part) == "compared"


class _EarlierOrigin(m.FederationMessage, frozen=True):
    """`Origin` as checkpoints of format 4 and before have it."""

    received: bytes
    size: m.Count
    compared: bool
    kinds: tuple[tuple[str, PartKind], ...]
    rounds: tuple[int, ...]


class Relayed(m.FederationMessage, frozen=True):
    """A value that another client relayed."""

    sender: m.Count
    value: m.Value


class Kept(m.FederationMessage, frozen=True):
    """Values that were computed together, and their origin: arrays by name; relayed ones by name and sender."""

    arrays: tuple[m.NamedArray, ...]
    relayed: tuple[tuple[str, tuple[Relayed, ...]], ...]
    origin: Origin


Arrays = dict[str, Any]
ValueForm = tuple[int, str]
"""How many numbers a value has, and the kind of their dtype."""


def form_of(value: Any) -> ValueForm:
    """The form of a held value. Relayed values, which are by sender, are one object."""
    return (1, "O") if isinstance(value, dict) else (prod(value.shape), np.dtype(value.dtype).kind)


def to_bytes(arrays: Arrays, origin: Origin = Origin()) -> bytes:  # noqa: B008
    """Arrays by name, and relayed ones by name and sender, as bytes."""
    plain = tuple(m.NamedArray(part, value) for part, value in arrays.items() if not isinstance(value, dict))
    relayed = tuple(
        (part, tuple(Relayed(sender, array) for sender, array in sorted(value.items())))
        for part, value in arrays.items()
        if isinstance(value, dict)
    )
    return m.encode(Kept(plain, relayed, origin))


def from_bytes(data: bytes) -> tuple[Arrays, Origin]:
    """The inverse of `to_bytes`. Raises `MalformedMessage`."""
    kept = m.codec.decode(data, Kept, m.LIMIT_BYTES)
    arrays: Arrays = {array.name: array.value for array in kept.arrays}
    return arrays | {part: {items.sender: items.value for items in several} for part, several in kept.relayed}, kept.origin


def trace(names: Sequence[bytes]) -> bytes:
    """The name of what a value was computed from, from the `names` of all that went into it."""
    return UNTRACED if UNTRACED in names else names[0] if len(names) == 1 else sha256(b"".join(names)).digest()


def rounds_of(*several: Sequence[int]) -> tuple[int, ...]:
    """The union of several lists of rounds, for a value that was computed from all of them."""
    rounds = tuple(sorted({round for items in several for round in items}))
    return rounds if len(rounds) <= MOST_ROUNDS else FORGOTTEN


def spread_of(task: Any) -> float:
    """The largest ratio of the weights that two clients have in one coordinate of what a task computes, by its `spread`; 1 without one.

    1 where each client's update counts fully, 1/σ where it is multiplied by a number from σ to 1, infinite where all but one client may
    have zeros, such as blocks of clients' own choice. That of a task inside it counts, too.
    """
    spread = float(getattr(task, "spread", 1.0))
    largest = inf if isnan(spread) else max(1.0, spread)
    for attribute in fields(task):
        inner = getattr(task, attribute.name)
        if is_dataclass(inner) and not isinstance(inner, type):
            largest = max(largest, spread_of(inner))
    return largest


class SharedWork:
    """Shares work among clients with the same request, during one exchange. It holds nothing private to one client."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Any] = {}
        self._alive: list[Any] = []

    def once(self, make: Callable[[], T], *of: Any) -> T:
        """The result of `make` for these objects, computed for the first client only."""
        key = tuple(map(id, of))
        if key not in self._known:
            self._known[key] = make()
            self._alive.append((of, make))  # so that their ids stay theirs
        result: T = self._known[key]
        return result


class Values:
    """Held values and memory, in a store. Raises `RemoteError` "not-held" for missing values."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def hold(self, number: int, arrays: Arrays, origin: Origin) -> None:
        """Hold values with their origin."""
        self.store.keep(f"held/{number}", (arrays, origin), _written)

    def drop(self, number: int) -> None:
        """Drop the values under a number, before its receipts are replaced: they are never valid for another value."""
        self.store.drop(f"held/{number}")

    def holds(self, number: int) -> bool:
        return self.store.load(f"held/{number}", from_bytes) is not None

    def postponed(self, number: int, parts: tuple[str, ...]) -> list[Postponed]:
        """The parts of a held value that are still to be computed."""
        kept = self.store.load(f"held/{number}", from_bytes)
        return [] if kept is None else [value for part, value in kept[0].items() if part in parts and isinstance(value, Postponed)]

    def parts(self, number: int, parts: tuple[str, ...]) -> Arrays:
        kept, _ = self._kept(f"held/{number}")
        try:
            if parts:
                return {part: kept[part] for part in parts}
        except KeyError:
            pass
        raise RemoteError("not-held")

    def value(self, held: m.HeldValue) -> Any:
        return self.parts(held.held, (held.part,))[held.part]

    def origin(self, number: int) -> Origin:
        """The origin of a held value."""
        return self._kept(f"held/{number}")[1]

    def forget(self, live: tuple[int, ...]) -> None:
        """Drop the values of all other numbers."""
        for name in self.store.names():
            kind, _, number = name.partition("/")
            if kind == "held" and int(number) not in live:
                self.store.drop(name)

    def remember(self, name: str, value: Any, origin: Origin) -> None:
        self.store.keep(f"memory/{name}", ({name: value}, origin), _written)

    def remembered(self, name: str) -> tuple[Array, Origin] | None:
        """What tasks keep under a name, with its origin; None if nothing."""
        kept = self.kept(name)
        return None if kept is None else (np.asarray(kept[0]), kept[1])

    def kept(self, name: str) -> tuple[Any, Origin] | None:
        """The same, but the value as it is kept, which may be computed on demand."""
        kept = self.store.load(f"memory/{name}", from_bytes)
        return None if kept is None else (kept[0][name], kept[1])

    def open(self, addends: m.Addends, transforms: Callable[[], Transforms], exchange: SharedWork) -> Array:
        """The value of a sum, with its transformed parts opened. Raises "forbidden" for transformed parts that are not of sums."""
        known = transforms() if addends.transformed else None
        total = exchange.once(lambda: _opened(addends, known), addends, known)
        for own in addends.own:
            if not self.holds(own.held):
                continue  # this client has no such part
            addend = np.asarray(self.value(m.HeldValue(own.held, own.part)))
            addend = addend if own.factor == 1.0 else (addend * own.factor).astype(addend.dtype, copy=False)
            total = addend if total is None else _plus(total, addend)
        if total is None:
            raise RemoteError("not-held")
        return total

    def _kept(self, name: str) -> tuple[Arrays, Origin]:
        kept = self.store.load(name, from_bytes)
        if kept is None:
            raise RemoteError("not-held")
        return kept


def _written(kept: tuple[Arrays, Origin]) -> bytes:
    return to_bytes(*kept)


VALUES = ("held/", "memory/")


def kept_values(store: ObjectStore) -> tuple[list[tuple[str, Arrays, bytes]], dict[str, bytes]]:
    """The content of a store, for a checkpoint: values by name with their encoded origin, and the rest as bytes by name."""
    values, rest = [], {}
    for name in store.names():
        if name.startswith(VALUES):
            kept = store.load(name, from_bytes)
            assert kept is not None
            values.append((name, kept[0], m.encode(kept[1])))
        else:
            rest[name] = store.dumped(name)
    return values, rest


def keep_values(store: ObjectStore, name: str, arrays: Arrays, origin: bytes) -> None:
    """Put values back into a store. Raises `MalformedMessage` for an invalid origin."""
    try:
        made = m.codec.decode(origin, Origin, LARGEST_ORIGIN_BYTES)
    except MalformedMessage:
        earlier = m.codec.decode(origin, _EarlierOrigin, LARGEST_ORIGIN_BYTES)
        made = Origin(earlier.received, earlier.size, earlier.compared, earlier.kinds, earlier.rounds)
    store.keep(name, (arrays, made), _written)


def _plus(total: Array, addend: Array) -> Array:
    """The sum of two arrays of one shape. Raises "bad-input" for others, whose sum could be larger than both."""
    if total.shape != addend.shape:
        raise RemoteError("bad-input")
    return np.asarray(total + addend)


def _opened(addends: m.Addends, transforms: Transforms | None) -> Array | None:
    """The part of a sum that is the same for all clients with these transforms. Read-only, because they share it."""
    total: Array | None = addends.clear
    for term in addends.transformed:
        assert transforms is not None
        m.check_transformed(term)
        if not term.transform.startswith(OPENED):  # else a client could open for the server what another one transformed
            raise RemoteError("forbidden")
        transform = transforms(term.transform, term.dimension)
        vector = transform.invert(term.value)[term.start : term.stop].reshape(term.shape)
        total = vector if total is None else _plus(total, vector)
    if total is None:
        return None
    shared = total.view()
    shared.flags.writeable = False
    return shared
