"""Transports carry requests and answers between the server and the clients: the interface, and its form over bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..protocols.errors import MalformedMessage
from . import messages as m

__all__ = ["ByteTransport", "OverBytes", "ExchangeStage", "Transport"]


@dataclass(frozen=True)
class ExchangeStage:
    """One exchange with many parties: its name, and its round and call. Injected faults are keyed by it."""

    name: str
    round: int = -1
    call: int = 0


class Transport(Protocol):
    """Delivers requests to places, and returns the answers that arrive in time. A place is an opaque number, e.g. of a node."""

    def places(self) -> Sequence[int]:
        """The places that may have clients now."""
        ...

    def exchange(self, asks: Mapping[int, m.PartyRequest], stage: ExchangeStage) -> Mapping[int, m.Answer]:
        """Send each place its request. Returns the answers by place; `Refused("malformed")` for bytes that are no answer.

        Must return by the stage's deadline, with the answers that arrived.
        """
        ...


class ByteTransport(Protocol):
    """A transport of bytes, such as a network."""

    def places(self) -> Sequence[int]: ...

    def exchange(self, requests: Mapping[int, bytes], stage: str) -> Mapping[int, bytes]: ...


class OverBytes:
    """A transport over one that carries bytes. It encodes requests and decodes answers."""

    def __init__(self, carrier: ByteTransport) -> None:
        self._carrier = carrier

    def places(self) -> Sequence[int]:
        return self._carrier.places()

    def exchange(self, asks: Mapping[int, m.PartyRequest], stage: ExchangeStage) -> Mapping[int, m.Answer]:
        encoded = {id(ask): m.encode(ask) for ask in {id(ask): ask for ask in asks.values()}.values()}
        limit = ENROLLED_BYTES if stage.name == "enrol" else m.LIMIT_BYTES
        arrived = self._carrier.exchange({place: encoded[id(ask)] for place, ask in asks.items()}, stage.name)
        return {place: _decoded(data, limit) for place, data in arrived.items()}


ENROLLED_BYTES = 1 << 16


def _decoded(data: bytes, limit: int) -> m.Answer:
    try:
        return m.decode_answer(data, limit)
    except MalformedMessage:
        return m.Refused("malformed")
