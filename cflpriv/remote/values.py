"""What a client holds between two messages: values by number, memory by name, and what each was computed from."""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from ..channels import Transforms
from ..protocols import codec
from ..protocols.errors import RemoteError
from ..types import Array, PartKind
from . import messages as m
from .store import Store

__all__ = ["UNTRACED", "Origin", "Values", "from_bytes", "relayed", "to_bytes", "trace"]

OPENED = ("sum/", "apply/")
"""What the transforms are for whose values clients open for each other: sums. What is compared is opened by nobody."""


UNTRACED = sha256(b"cflpriv: what other clients made, or what a client has of its own").digest()
"""The name of what no one told a client alone, and of all that is computed from it."""


class _Values(m.Message, frozen=True):
    """A held value or memory, or what is relayed: arrays by name; those that were relayed by name and sender. `compared` says to whom it is
    relayed that it holds what clients compare."""

    arrays: tuple[m.Named, ...] = ()
    said: tuple[tuple[str, tuple[m.Said, ...]], ...] = ()
    compared: bool = False


class Origin(m.Message, frozen=True):
    """What a value was computed from: the name of all that the client was told, and how many numbers the smallest model has (0: none).

    `compared` says that something is in it that clients compare, such as a signature. `kinds` are those of its parts that are not summed,
    as the task declared them that was run here.
    """

    received: bytes = b""
    size: m.Count = 0
    compared: bool = False
    kinds: tuple[tuple[str, PartKind], ...] = ()

    def kind(self, part: str) -> PartKind:
        """What kind a part is; one that nothing declared is summed."""
        return dict(self.kinds).get(part, "summed")

    def is_compared(self, part: str) -> bool:
        """Whether a part is what clients compare, or was computed from such."""
        return self.compared or self.kind(part) == "compared"


def to_bytes(arrays: dict[str, Any], compared: bool = False) -> bytes:
    """Arrays by name, and relayed ones by name and sender, as bytes."""
    plain = tuple(m.Named(part, m.to_tensor(np.asarray(value))) for part, value in arrays.items() if not isinstance(value, dict))
    said = tuple(
        (part, tuple(m.Said(sender, m.to_tensor(np.asarray(one))) for sender, one in sorted(value.items())))
        for part, value in arrays.items()
        if isinstance(value, dict)
    )
    return m.encode(_Values(plain, said, compared))


def from_bytes(data: bytes) -> dict[str, Any]:
    """The arrays that `to_bytes` made bytes of. Raises `MalformedMessage`."""
    return relayed(data)[0]


def relayed(data: bytes) -> tuple[dict[str, Any], bool]:
    """What `to_bytes` made bytes of: the arrays, and whether they are what clients compare. Raises `MalformedMessage`."""
    values = codec.decode(data, _Values, m.LIMIT_BYTES)
    arrays: dict[str, Any] = {one.name: m.from_tensor(one.value) for one in values.arrays}
    arrays |= {part: {one.sender: m.from_tensor(one.value) for one in said} for part, said in values.said}
    return arrays, values.compared


def trace(told: Sequence[bytes]) -> bytes:
    """The name of what a value was computed from, from those of all that went into it."""
    return UNTRACED if UNTRACED in told else told[0] if len(told) == 1 else sha256(b"".join(told)).digest()


class Values:
    """Held values and memory, in a store. Raises `RemoteError` "not-held" for what is not there."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def hold(self, number: int, arrays: dict[str, Any], origin: Origin) -> None:
        """Keep values, and what they were computed from."""
        self._store.put(f"held/{number}", to_bytes(arrays))
        self._store.put(f"origin/{number}", m.encode(origin))

    def drop(self, number: int) -> None:
        """Forget what is held under a number, before its receipts are replaced: a value must never meet those of another."""
        self._store.drop(f"held/{number}")

    def holds(self, number: int) -> bool:
        return self._store.get(f"held/{number}") is not None

    def parts(self, number: int, parts: tuple[str, ...]) -> dict[str, Any]:
        kept = self._kept(f"held/{number}")
        if not parts or not set(parts) <= set(kept):
            raise RemoteError("not-held")
        return {part: kept[part] for part in parts}

    def mine(self, mine: m.Mine) -> Any:
        return self.parts(mine.held, (mine.part,))[mine.part]

    def origin(self, number: int) -> Origin:
        """What a held value was computed from."""
        return self._origin(f"origin/{number}")

    def forget(self, live: tuple[int, ...]) -> None:
        """Drop what is held under other numbers than these."""
        kept = {str(number) for number in live}
        for name in self._store.names():
            kind, _, number = name.partition("/")
            if kind in ("held", "origin") and number not in kept:
                self._store.drop(name)

    def remember(self, name: str, value: Any, origin: Origin) -> None:
        self._store.put(f"memory/{name}", to_bytes({name: value}))
        self._store.put(f"memory-origin/{name}", m.encode(origin))

    def remembered(self, name: str) -> tuple[Array, Origin] | None:
        """What tasks keep under a name, if anything, and what that was computed from."""
        if self._store.get(f"memory/{name}") is None:
            return None
        return np.asarray(self._kept(f"memory/{name}")[name]), self._origin(f"memory-origin/{name}")

    def open(self, addends: m.Addends, transforms: Callable[[], Transforms]) -> Array:
        """The value of a sum: its clear part, its blind parts opened, and this client's own. "forbidden" for blind parts of no sum."""
        total: Array | None = m.from_tensor(addends.clear[0]) if addends.clear else None
        for term in m.blind_terms(addends):
            if not term.transform.startswith(OPENED):  # or one client would open for the server what another hid
                raise RemoteError("forbidden")
            transform = transforms()(term.transform, term.dimension or len(term.value))
            vector = transform.invert(term.value)[term.start : term.stop].reshape(term.shape)
            total = vector if total is None else total + vector
        for own in addends.own:
            if not self.holds(own.held):
                continue  # this client has no part in it
            addend = np.asarray(self.mine(m.Mine(own.held, own.part)))
            addend = addend if own.factor == 1.0 else (addend * own.factor).astype(addend.dtype, copy=False)
            total = addend if total is None else total + addend
        if total is None:
            raise RemoteError("not-held")
        return total

    def _kept(self, name: str) -> dict[str, Any]:
        data = self._store.get(name)
        if data is None:
            raise RemoteError("not-held")
        return from_bytes(data)

    def _origin(self, name: str) -> Origin:
        data = self._store.get(name)
        if data is None:
            raise RemoteError("not-held")
        return codec.decode(data, Origin, m.LIMIT_BYTES)
