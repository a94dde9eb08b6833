"""Parties that stay: a holder or helper in a process of its own, which listens at an address, instead of one that starts for each message.

A connection carries one request and its answer, each after its length in eight bytes, big-endian. What identifies a party, and what it
refuses, are its messages: whoever reaches the address can ask what a server that lies could ask. Traffic is not encrypted here: masks
without clients' uploads show nothing, but give the address to the server alone, or use a tunnel.
"""

import logging
import socket
import socketserver
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import BoundedSemaphore

from ..errors import InputError
from . import messages as m
from .stages import StagedTransport

__all__ = ["Listener", "WithResidents", "ask_resident", "read_address"]

log = logging.getLogger("cflpriv.federation")

FIRST_PLACE = 1 << 72
"""Places of residents are numbers from here on, beyond those of other transports."""
CONNECTIONS = 8
IDLE_SECONDS = 60.0
_LENGTH = 8
_SOON = 1e-3
_CHUNK_BYTES = 1 << 20


def read_address(text: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT". Raises `InputError`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InputError(f"{text!r}: is not an address; give HOST:PORT, such as 127.0.0.1:9200")
    return host.strip("[]"), int(port)


def ask_resident(address: tuple[str, int], data: bytes, seconds: float) -> bytes | None:
    """A resident's answer; None if it does not answer within `seconds`."""
    until = time.monotonic() + seconds
    try:
        with socket.create_connection(address, timeout=max(seconds, _SOON)) as connection:
            connection.sendall(len(data).to_bytes(_LENGTH, "big") + data)
            return _received(connection, until)
    except OSError:
        return None


def _received(connection: socket.socket, until: float) -> bytes | None:
    """What comes after its length; None if it ends early, or is longer than a message may be. Raises `OSError` at the deadline."""
    head = _exactly(connection, _LENGTH, until)
    length = int.from_bytes(head, "big")
    if len(head) < _LENGTH or length > m.LIMIT_BYTES:
        return None
    data = _exactly(connection, length, until)
    return bytes(data) if len(data) == length else None


def _exactly(connection: socket.socket, length: int, until: float) -> bytearray:
    """So many bytes, or those that came before the end. Whoever sends few at a time does not get more time."""
    data = bytearray()
    while len(data) < length:
        connection.settimeout(max(until - time.monotonic(), _SOON))
        part = connection.recv(min(_CHUNK_BYTES, length - len(data)))
        if not part:
            break
        data += part
    return data


class _Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        listener = self.server
        assert isinstance(listener, Listener)
        self.request.settimeout(IDLE_SECONDS)
        if not listener.free.acquire(timeout=IDLE_SECONDS):
            return
        try:
            data = _received(self.request, time.monotonic() + IDLE_SECONDS)
            if data is not None:
                answer = listener.answer(data)
                self.request.sendall(len(answer).to_bytes(_LENGTH, "big") + answer)
        except OSError:
            log.info("a connection ended early")
        finally:
            listener.free.release()


class Listener(socketserver.ThreadingTCPServer):
    """Listens at an address and answers each request by `answer`, which refuses what it does not understand. Port 0 takes a free one.

    `serve_forever()` runs it, `shutdown()` ends it. At most `CONNECTIONS` requests are read at a time.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: tuple[str, int], answer: Callable[[bytes], bytes]) -> None:
        self.answer, self.free = answer, BoundedSemaphore(CONNECTIONS)
        super().__init__(address, _Connection)


class WithResidents(StagedTransport):
    """A transport beside residents at addresses "HOST:PORT"; deadlines, hints and the record of stages are those of the transport.

    Raises `InputError` for what is no address.
    """

    def __init__(self, transport: StagedTransport, addresses: Sequence[str]) -> None:
        super().__init__()
        vars(self).update(vars(transport))
        self.settings_hint, self.absent_hint = transport.settings_hint, transport.absent_hint
        self._transport = transport
        self._residents = {FIRST_PLACE + number: read_address(address) for number, address in enumerate(addresses)}

    def places(self) -> Sequence[int]:
        return [*self._transport.places(), *self._residents]

    def carry(self, requests: Mapping[int, bytes], stage: str, seconds: float) -> Mapping[int, bytes]:
        others = {place: data for place, data in requests.items() if place not in self._residents}
        with ThreadPoolExecutor(max(1, len(self._residents))) as pool:
            asked = {
                place: pool.submit(ask_resident, self._residents[place], data, seconds)
                for place, data in requests.items()
                if place in self._residents
            }
            answers = dict(self._transport.carry(others, stage, seconds)) if others else {}
            return answers | {place: answer for place, future in asked.items() if (answer := future.result()) is not None}
