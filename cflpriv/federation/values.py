"""What a client holds between two messages: values by number, memory by name, and what each was computed from."""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, TypeVar

import numpy as np

from ..protocols.errors import RemoteError
from ..types import Array, PartKind
from . import messages as m
from .store import ObjectStore, Store
from .transforms import Transforms

__all__ = ["UNTRACED", "Exchange", "Origin", "Values", "from_bytes", "keep_values", "kept_values", "rounds_of", "to_bytes", "trace"]

T = TypeVar("T")

OPENED = ("sum/", "apply/")
"""What the transforms are for whose values clients open for each other: sums. What is compared is opened by nobody."""


UNTRACED = sha256(b"cflpriv: what other clients made, or what a client has of its own").digest()
"""The name of what no one told a client alone, and of all that is computed from it."""


MOST_ROUNDS = 1024
FORGOTTEN = (-(1 << 62) - 1,)
"""The rounds of a value that more than `MOST_ROUNDS` went into: older than all that a client remembers to have summed."""


class Origin(m.Message, frozen=True):
    """What a value was computed from: the name of all that the client was told, and how many numbers the smallest model has (0: none).

    `compared` says that something is in it that clients compare, such as a signature. `kinds` are those of its parts that are not summed,
    as the task declared them that was run here. `rounds` are those in which it, and anything held that went into it, were
    computed; none for what other clients made.
    """

    received: bytes = b""
    size: m.Count = 0
    compared: bool = False
    kinds: tuple[tuple[str, PartKind], ...] = ()
    rounds: tuple[int, ...] = ()

    def kind(self, part: str) -> PartKind:
        """What kind a part is; one that nothing declared is summed."""
        return dict(self.kinds).get(part, "summed")

    def is_compared(self, part: str) -> bool:
        """Whether a part is what clients compare, or was computed from such."""
        return self.compared or self.kind(part) == "compared"


class Relayed(m.Message, frozen=True):
    """A value that another client relayed."""

    sender: m.Count
    value: m.Value


class Kept(m.Message, frozen=True):
    """Values that were computed together, and their origin: arrays by name; relayed ones by name and sender."""

    arrays: tuple[m.Named, ...]
    relayed: tuple[tuple[str, tuple[Relayed, ...]], ...]
    origin: Origin


Arrays = dict[str, Any]


def to_bytes(arrays: Arrays, origin: Origin = Origin()) -> bytes:  # noqa: B008
    """Arrays by name, and relayed ones by name and sender, as bytes."""
    plain = tuple(m.Named(part, value) for part, value in arrays.items() if not isinstance(value, dict))
    relayed = tuple(
        (part, tuple(Relayed(sender, one) for sender, one in sorted(value.items())))
        for part, value in arrays.items()
        if isinstance(value, dict)
    )
    return m.encode(Kept(plain, relayed, origin))


def from_bytes(data: bytes) -> tuple[Arrays, Origin]:
    """What `to_bytes` made bytes of. Raises `MalformedMessage`."""
    kept = m.codec.decode(data, Kept, m.LIMIT_BYTES)
    arrays: Arrays = {one.name: one.value for one in kept.arrays}
    return arrays | {part: {one.sender: one.value for one in several} for part, several in kept.relayed}, kept.origin


def trace(told: Sequence[bytes]) -> bytes:
    """The name of what a value was computed from, from those of all that went into it."""
    return UNTRACED if UNTRACED in told else told[0] if len(told) == 1 else sha256(b"".join(told)).digest()


def rounds_of(*several: Sequence[int]) -> tuple[int, ...]:
    """The rounds of a value that was computed in, or from what is of, all of these."""
    rounds = tuple(sorted({round for one in several for round in one}))
    return rounds if len(rounds) <= MOST_ROUNDS else FORGOTTEN


class Exchange:
    """What clients that are asked the same work out once, while one exchange lasts. Nothing in it is one client's own."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Any] = {}
        self._alive: list[Any] = []

    def once(self, make: Callable[[], T], *of: Any) -> T:
        """What `make` gives for these objects, made for the first client that asks."""
        key = tuple(map(id, of))
        if key not in self._known:
            self._known[key] = make()
            self._alive.append((of, make))  # or their identities could be another's
        found: T = self._known[key]
        return found


class Values:
    """Held values and memory, in a store. Raises `RemoteError` "not-held" for what is not there."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def hold(self, number: int, arrays: Arrays, origin: Origin) -> None:
        """Keep values, and what they were computed from."""
        self.store.keep(f"held/{number}", (arrays, origin), _written)

    def drop(self, number: int) -> None:
        """Forget what is held under a number, before its receipts are replaced: a value must never meet those of another."""
        self.store.drop(f"held/{number}")

    def holds(self, number: int) -> bool:
        return self.store.load(f"held/{number}", from_bytes) is not None

    def parts(self, number: int, parts: tuple[str, ...]) -> Arrays:
        kept, _ = self._kept(f"held/{number}")
        try:
            if parts:
                return {part: kept[part] for part in parts}
        except KeyError:
            pass
        raise RemoteError("not-held")

    def mine(self, mine: m.Mine) -> Any:
        return self.parts(mine.held, (mine.part,))[mine.part]

    def origin(self, number: int) -> Origin:
        """What a held value was computed from."""
        return self._kept(f"held/{number}")[1]

    def forget(self, live: tuple[int, ...]) -> None:
        """Drop what is held under other numbers than these."""
        for name in self.store.names():
            kind, _, number = name.partition("/")
            if kind == "held" and int(number) not in live:
                self.store.drop(name)

    def remember(self, name: str, value: Any, origin: Origin) -> None:
        self.store.keep(f"memory/{name}", ({name: value}, origin), _written)

    def remembered(self, name: str) -> tuple[Array, Origin] | None:
        """What tasks keep under a name, if anything, and what that was computed from."""
        kept = self.store.load(f"memory/{name}", from_bytes)
        return None if kept is None else (np.asarray(kept[0][name]), kept[1])

    def open(self, addends: m.Addends, transforms: Callable[[], Transforms], exchange: Exchange) -> Array:
        """The value of a sum: its clear part, its blind parts opened, and this client's own. "forbidden" for blind parts of no sum."""
        known = transforms() if addends.blind else None
        total = exchange.once(lambda: _opened(addends, known), addends, known)
        for own in addends.own:
            if not self.holds(own.held):
                continue  # this client has no part in it
            addend = np.asarray(self.mine(m.Mine(own.held, own.part)))
            addend = addend if own.factor == 1.0 else (addend * own.factor).astype(addend.dtype, copy=False)
            total = addend if total is None else total + addend
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
    """What a store holds, for a checkpoint: values by name with the bytes of their origin, and all else as bytes by name."""
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
    """Put values back into a store. Raises `MalformedMessage` for an origin that is none."""
    store.keep(name, (arrays, m.codec.decode(origin, Origin, 1 << 10)), _written)


def _opened(addends: m.Addends, transforms: Transforms | None) -> Array | None:
    """What all clients that share the transforms see of a sum, read-only since they share it."""
    total: Array | None = addends.clear[0] if addends.clear else None
    for term in m.blind_terms(addends):
        assert transforms is not None
        if not term.transform.startswith(OPENED):  # or one client would open for the server what another hid
            raise RemoteError("forbidden")
        transform = transforms(term.transform, term.dimension or len(term.value))
        vector = transform.invert(term.value)[term.start : term.stop].reshape(term.shape)
        total = vector if total is None else total + vector
    if total is None:
        return None
    shared = total.view()
    shared.flags.writeable = False
    return shared
