"""Hosts at several seats in this process. All that passes between them and the server is pickled, as between processes."""

import os
import pickle
from collections.abc import Sequence
from typing import Any

from cflpriv.protocols.errors import TooFewClients
from cflpriv.transports.hosts import HostLost, LocalHost, Seat


class FakeCarrier:
    """`count` seats. One in `dead` answers nothing more until it is restarted; `restarts` lists those that were.

    `received` counts the bytes of replies.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._seats = [Seat({}) for _ in range(count)]
        self.dead: set[int] = set()
        self.restarts: list[int] = []
        self.received = 0

    def send(self, number: int, operation: str, *given: Any) -> Any:
        sent = pickle.dumps(given)
        if number in self.dead:
            return HostLost("killed by the test")
        try:
            done = getattr(self._seats[number], operation)(*pickle.loads(sent))
        except Exception as error:
            return error
        reply = pickle.dumps(done)
        self.received += len(reply)
        return reply

    def reply(self, pending: Any) -> Any:
        if isinstance(pending, Exception):
            raise pending
        return pickle.loads(pending)

    def restart(self, number: int) -> None:
        self.restarts.append(number)
        self.dead.discard(number)
        self._seats[number] = Seat({})

    def kill(self, number: int) -> None:
        self.dead.add(number)


# What a test looks at where the clients are; other processes import it from here.


def process_id(host: LocalHost, places: Sequence[int]) -> list[int]:
    return [os.getpid()] * len(places)


def draws(host: LocalHost, places: Sequence[int]) -> list[bytes]:
    return [host.members.entropy[place](16) for place in places]


def broken(host: LocalHost, places: Sequence[int]) -> list[None]:
    raise TooFewClients((2,), 3)
