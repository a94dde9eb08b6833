"""What a client holds between two messages: values by number, memory by name, and what each was computed from."""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from ..protection import Transforms
from ..protocols import codec
from ..protocols.errors import RemoteError
from ..types import Array
from . import messages as m
from .store import Store

__all__ = ["Values", "from_bytes", "to_bytes", "trace"]


class _Values(m.Message, frozen=True):
    """A held value or memory: arrays by name; relayed ones by name and sender."""

    arrays: tuple[m.Named, ...] = ()
    said: tuple[tuple[str, tuple[m.Said, ...]], ...] = ()


def to_bytes(arrays: dict[str, Any]) -> bytes:
    """Arrays by name, and relayed ones by name and sender, as bytes."""
    plain = tuple(m.Named(part, m.to_tensor(np.asarray(value))) for part, value in arrays.items() if not isinstance(value, dict))
    said = tuple(
        (part, tuple(m.Said(sender, m.to_tensor(np.asarray(one))) for sender, one in sorted(value.items())))
        for part, value in arrays.items()
        if isinstance(value, dict)
    )
    return m.encode(_Values(plain, said))


def from_bytes(data: bytes) -> dict[str, Any]:
    """What `to_bytes` made bytes of. Raises `MalformedMessage`."""
    values = codec.decode(data, _Values, m.LIMIT_BYTES)
    arrays: dict[str, Any] = {one.name: m.from_tensor(one.value) for one in values.arrays}
    return arrays | {part: {one.sender: m.from_tensor(one.value) for one in said} for part, said in values.said}


def trace(models: Sequence[bytes]) -> bytes:
    """The name of what a value was computed from, from those of all that it was computed from (empty: nothing that was sent)."""
    parts = [model for model in models if model]
    return b"" if not parts else parts[0] if len(parts) == 1 else sha256(b"".join(parts)).digest()


class Values:
    """Held values and memory, in a store. Raises `RemoteError` "not-held" for what is not there."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def hold(self, number: int, arrays: dict[str, Any], received: bytes, size: int) -> None:
        """Keep values, what they were computed from, and the size of the smallest model they were computed at (0: of none)."""
        self._store.put(f"held/{number}", to_bytes(arrays))
        self._store.put(f"model/{number}", received.ljust(32, b"\0")[:32] + size.to_bytes(8, "big") + bytes([bool(received)]))

    def holds(self, number: int) -> bool:
        return self._store.get(f"held/{number}") is not None

    def parts(self, number: int, parts: tuple[str, ...]) -> dict[str, Any]:
        kept = self._kept(f"held/{number}")
        if not parts or not set(parts) <= set(kept):
            raise RemoteError("not-held")
        return {part: kept[part] for part in parts}

    def mine(self, mine: m.Mine) -> Any:
        return self.parts(mine.held, (mine.part,))[mine.part]

    def model(self, number: int) -> tuple[bytes, int]:
        """What a held value was computed from (empty: nothing that was sent), and how many numbers that model has."""
        data = self._store.get(f"model/{number}")
        if data is None:
            raise RemoteError("not-held")
        return data[:32] if data[40] else b"", int.from_bytes(data[32:40], "big")

    def forget(self, live: tuple[int, ...]) -> None:
        """Drop what is held under other numbers than these."""
        kept = {str(number) for number in live}
        for name in self._store.names():
            kind, _, number = name.partition("/")
            if kind in ("held", "model") and number not in kept:
                self._store.drop(name)

    def remember(self, name: str, value: Any) -> None:
        self._store.put(f"memory/{name}", to_bytes({name: value}))

    def remembered(self, name: str) -> Array | None:
        """What tasks keep under a name, if anything."""
        return None if self._store.get(f"memory/{name}") is None else np.asarray(self._kept(f"memory/{name}")[name])

    def open(self, addends: m.Addends, transforms: Callable[[], Transforms]) -> Array:
        """The value of a sum: its clear part, its blind parts opened, and this client's own."""
        total: Array | None = m.from_tensor(addends.clear[0]) if addends.clear else None
        for term in m.blind_terms(addends):
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
