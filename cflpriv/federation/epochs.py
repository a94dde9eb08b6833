"""Clustering epochs: values added to one Gram matrix stay comparable until the epoch closes."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..contract.handles import Held, HeldKey
from ..errors import InputError

__all__ = ["Epoch", "Epochs"]

Session = TypeVar("Session")
"""What a protection keeps of one epoch: `Vectors`, or an `EncryptedEpoch`."""


@dataclass
class Epoch(Generic[Session]):
    """A clustering epoch at the server. `shape` (p, d) is that of one client's rows."""

    number: int
    session: Session
    clients: list[int]
    shape: tuple[int, int]
    memory: dict[str, Any]


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
        found = [epoch for part, epoch in self.entered.get(held.key, ()) if part == held.part]
        if not found:
            raise InputError(f"gram: the clustering epoch of {held.key.name} is closed or never was; compare within one epoch")
        if any(epoch is not found[0] for epoch in found):
            raise InputError(
                f"gram: {held.part} of {held.key.name} is in several clustering epochs; compare against a handle that is in one"
            )
        return found[0]

    def close(self, held: Held) -> None:
        """Drop the epochs of the parts of `held`, for all that are in them."""
        closed = [epoch for part, epoch in self.entered.get(held.key, ()) if part in held.parts]
        for key, entries in list(self.entered.items()):
            self.entered[key] = [(part, epoch) for part, epoch in entries if not any(epoch is one for one in closed)]
