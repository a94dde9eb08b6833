"""Clustering epochs: values added to one Gram matrix stay comparable until the epoch closes; and a client's own limit on them.

In each epoch of encrypted or shared vectors, those who choose what is compared with a client learn a little of its vectors, however the
epoch is protected, so a server that opens epochs at will would have them read whole ones. An honest run needs few: one for each time that
it compares clients anew.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Generic, Protocol, TypeVar

from ..contract.handles import Held, HeldKey
from ..errors import InputError
from ..protocols.errors import RemoteError
from .store import Store

__all__ = ["ENTERED", "Epoch", "EpochSession", "Epochs", "enter"]


class EpochSession(Protocol):
    """What a protection keeps of one epoch: `Vectors`, an `EncryptedEpoch` or a `SharesEpoch`."""

    @property
    def live(self) -> bool:
        """Whether this process has the epoch's values or keys."""
        ...


Session = TypeVar("Session", bound=EpochSession)


@dataclass
class Epoch(Generic[Session]):
    """A clustering epoch at the server. `shape` (p, d) is that of one client's rows."""

    number: int
    session: Session
    clients: list[int]
    shape: tuple[int, int]
    memory: dict[str, Any]

    @property
    def ended(self) -> bool:
        """Whether no client can be added: its values were in a process that ended."""
        return bool(self.clients) and not self.session.live


class Epochs(Generic[Session]):
    """The open epochs of a federation, by the handles whose values are in them. `count`: epochs opened so far."""

    def __init__(self, make: Callable[[int], Session]) -> None:
        self.count = 0
        self.entered: weakref.WeakKeyDictionary[HeldKey, list[tuple[str, Epoch[Session]]]] = weakref.WeakKeyDictionary()
        self.make = make

    def open(self, shape: tuple[int, int]) -> Epoch[Session]:
        epoch = Epoch(self.count, self.make(self.count), [], shape, {})
        self.count += 1
        return epoch

    def enter(self, held: Held, epoch: Epoch[Session]) -> None:
        """Note that the one part of `held` is in `epoch`."""
        self.entered.setdefault(held.key, []).append((held.part, epoch))

    def of(self, held: Held) -> Epoch[Session]:
        """The one open epoch that these values are in."""
        epochs = [epoch for part, epoch in self.entered.get(held.key, ()) if part == held.part]
        if not epochs:
            raise InputError(f"gram: the clustering epoch of {held.key.name} is closed or never was; compare within one epoch")
        if any(epoch is not epochs[0] for epoch in epochs):
            raise InputError(
                f"gram: {held.part} of {held.key.name} is in several clustering epochs; compare against a handle that is in one"
            )
        return epochs[0]

    def close(self, held: Held) -> None:
        """Drop the epochs of the parts of `held`, for all that are in them."""
        closed = [epoch for part, epoch in self.entered.get(held.key, ()) if part in held.parts]
        for key, entries in list(self.entered.items()):
            self.entered[key] = [(part, epoch) for part, epoch in entries if not any(epoch is ended for ended in closed)]


# --- the client's limit

ENTERED = "epochs"
"""The store's name for the epochs that the client's vectors are in, `_BYTES` each. It outlives sessions, which a server opens at will."""
_BYTES = 16


def enter(store: Store, session: bytes, number: int, most: int) -> None:
    """Note that the client's vectors enter an epoch; one that they are in already is not counted again.

    Raises `RemoteError` "too-many-epochs" where they are in `most` others, over all sessions.
    """
    name, entered = sha256(session + number.to_bytes(8, "big")).digest()[:_BYTES], store.get(ENTERED) or b""
    if name in (entered[at : at + _BYTES] for at in range(0, len(entered), _BYTES)):
        return
    if len(entered) >= most * _BYTES:
        error = RemoteError("too-many-epochs")
        error.add_note(f"its vectors are in {most} clustering epochs already, as many as its protection.most_epochs allows")
        raise error
    store.put(ENTERED, entered + name)
