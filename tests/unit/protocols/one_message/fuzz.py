"""Random runs of a sum in one message: dropouts, bad bytes, restarts, helpers that stop or lie, repeated messages, a server that asks for
more.

`play` raises AssertionError if a run gives a wrong sum, or if a quorum of helpers signed two sets of one slot.
"""

import contextlib
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from cflpriv.protocols.errors import HelpersFailed, RemoteError, TooFewClients
from cflpriv.protocols.one_message import HelpedServer, Helper, most_failing, quorum
from cflpriv.protocols.one_message import messages as m

from .scene import Scene, levels, wrong

__all__ = ["SCHEMES", "play", "spoil"]

SCHEMES = ((2, 1), (3, 1), (4, 1), (4, 1), (5, 1), (5, 2))


def spoil(data: bytes, random: Random) -> bytes:
    """Other bytes: some changed, cut off, or added."""
    how = random.randrange(4)
    if how == 0:
        return data[: random.randrange(len(data))]
    if how == 1:
        return data + random.randbytes(random.randrange(1, 9))
    if how == 2:
        return random.randbytes(random.randrange(64))
    changed = bytearray(data)
    for _ in range(random.randrange(1, 4)):
        changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(changed) if changed != data else data + b"\0"


def _changed(data: bytes, server: HelpedServer, random: Random) -> bytes:
    """A well-formed upload with other contents."""
    message = m.decode_upload(data, server.terms)
    which = random.choice(("vector", "commitments", "signature", "boxes", "names"))
    value: Any = getattr(message, which)
    if which == "boxes":
        first = value[0]
        new: Any = (msgspec.structs.replace(first, box=spoil_one(first.box, random)), *value[1:])
    else:
        new = spoil_one(value, random)
    return m.encode(msgspec.structs.replace(message, **{which: new}))


def spoil_one(data: bytes, random: Random) -> bytes:
    changed = bytearray(data)
    changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(changed)


class Killed(Exception):
    """A helper's process ended."""


class Mortal(dict[str, bytes]):
    """A helper's store; its process may be killed just before something is stored, or just after."""

    def __init__(self, happens: Callable[[], bool]) -> None:
        super().__init__()
        self._happens = happens

    def __setitem__(self, name: str, value: bytes) -> None:
        if self._happens():
            raise Killed
        super().__setitem__(name, value)
        if self._happens():
            raise Killed


def play(seed: int) -> str:
    """One run; how it ended: "sum", or the code of the error."""
    random = Random(seed)
    helpers, colluding = random.choice(SCHEMES)
    scene = Scene(4, helpers, colluding)
    rate = random.choice((0.0, 0.02, 0.1, 0.3))

    def happens() -> bool:
        return random.random() < rate

    scene.stores = {number: Mortal(happens) for number in range(helpers)}
    there: dict[int, Helper] = scene.all()
    stopped: set[int] = set()
    # Lies are noticed where t + 1 helpers know each seed, however many stop: here with as many as may fail.
    lies = {0} if helpers - most_failing(helpers, colluding) >= 2 * colluding + 1 and random.random() < 0.2 else set()
    signed: dict[bytes, set[int]] = {}

    def receive(number: int, data: bytes) -> bytes | None:
        """A helper's answer as it arrives, if it does."""
        if number in stopped or (happens() and len(stopped) < helpers and random.random() < 0.5):
            stopped.add(number)
            return None
        if happens():
            there[number] = scene.helper(number)  # a restart
        arrived = spoil(data, random) if happens() else data
        try:
            answer = wrong(there[number], scene.holders[number], arrived) if number in lies else there[number].receive(arrived)
            if happens():  # the answer is lost, the helper restarts and is asked again
                there[number] = scene.helper(number)
                answer = there[number].receive(arrived) if number not in lies else answer
        except RemoteError:
            return None
        except Killed:
            there[number] = scene.helper(number)
            return None
        message = m.decode_from_helper(answer, server.terms)
        if isinstance(message, m.SignedSet):
            signed.setdefault(message.name, set()).add(number)
        return spoil(answer, random) if happens() else answer

    def ask(messages: dict[int, bytes]) -> dict[int, bytes]:
        answers = {number: receive(number, data) for number, data in messages.items()}
        return {number: answer for number, answer in answers.items() if answer is not None}

    announced = {number: key for number in there if (key := _key(scene, there, number)) is not None}
    try:
        terms = scene.terms(announced, bits=random.choice((16, 32)))
    except ValueError:
        return "too-few-helpers"
    server = scene.server(terms, announced)
    try:
        for client in random.sample(range(4), 4):
            if happens():
                continue
            data = scene.upload(client, server)
            for arrived in [data, *([data] if happens() else ())]:
                _received(
                    server, client, spoil(arrived, random) if happens() else _changed(arrived, server, random) if happens() else arrived
                )
            if happens():
                server.delivered(ask(server.deliver()))
        server.delivered(ask(server.deliver()))
        messages = server.close()
        while messages:
            messages = server.advance(ask(messages))
        ended = "sum"
    except (TooFewClients, HelpersFailed) as error:
        ended = error.code
    _ask_for_more(scene, server, there, signed, random)
    if ended == "sum":
        expected = sum(levels(client, 4) for client in server.members)
        assert (server.result.block() == expected).all(), "wrong sum"
        assert len(server.members) >= terms.minimum
    return ended


def _key(scene: Scene, there: dict[int, Helper], number: int) -> bytes | None:
    """A helper's key, asked for again if its process ended; None if it ends again."""
    for _ in range(2):
        try:
            return there[number].announcement(1)
        except Killed:
            there[number] = scene.helper(number)
    return None


def _received(server: HelpedServer, client: int, data: bytes) -> None:
    with contextlib.suppress(RemoteError):
        server.receive(client, data)


def _ask_for_more(scene: Scene, server: HelpedServer, there: dict[int, Helper], signed: dict[bytes, set[int]], random: Random) -> None:
    """A lying server asks all helpers for signatures of other sets in the slot; t of them sign whatever they are asked."""
    sets = [random.sample(range(4), random.choice((3, 4))) for _ in range(2)]
    for members in sets:
        for number, helper in there.items():
            try:
                answer = m.decode_from_helper(helper.receive(m.encode(m.CloseSet(server.terms, m.ids(members)))), server.terms)
            except (RemoteError, Killed):
                continue
            assert isinstance(answer, m.SignedSet)
            signed.setdefault(answer.name, set()).add(number)
    colluding = set(random.sample(range(scene.helpers), scene.colluding))
    complete = [name for name, who in signed.items() if len(who | colluding) >= quorum(scene.helpers, scene.colluding)]
    assert len(complete) <= 1, "two sets with a quorum"
