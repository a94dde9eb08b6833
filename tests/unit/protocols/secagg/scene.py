"""A small cast for the secure-aggregation tests: identities, terms, machines, and a loop that lets every message be looked at."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Any

import numpy as np

from cflpriv.protocols.codec import CHECKSUM_BYTES
from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.keys import Identity, Roster
from cflpriv.protocols.secagg import STAGES, Client, ClientStage, Contribution, Policy, Server, ServerStage, SumRecord, Terms, make_terms
from cflpriv.protocols.secagg import messages as m

SESSION = b"session-of-tests"
MODEL = sha256(b"the model").digest()


@lru_cache(maxsize=1)
def identities() -> tuple[Identity, ...]:
    """Two hundred clients, made once."""
    entropy = public_entropy("identities")
    return tuple(Identity.create(client, entropy) for client in range(200))


@lru_cache(maxsize=1)
def roster() -> Roster:
    """Their roster."""
    return Roster(tuple(identity.public() for identity in identities()))


def terms(n: int, mode: str, **changes: Any) -> Terms:
    """Terms for clients 0 … n−1: ten values, slot (5, 0), minimum cohort size 2 unless changed."""
    given: dict[str, Any] = {
        "session": SESSION,
        "slot": (5, 0),
        "cohort": range(n),
        "models": [MODEL],
        "dimension": 10,
        "clip": 1.0,
        "min_cohort": 2,
        "roster": roster() if mode == "active" else None,
        "entropy": public_entropy("graph"),
    }
    return make_terms(**{**given, **changes})


def policy(agreed: Terms, **changes: Any) -> Policy:
    """What a client that is content with `agreed` insists on."""
    given: dict[str, Any] = {
        "session": agreed.session,
        "mode": agreed.mode,
        "model": agreed.models[0],
        "models": len(agreed.models),
        "min_cohort": agreed.min_cohort,
        "dimension": agreed.dimension,
        "clip": (agreed.clip, agreed.clip),
        "levels": agreed.levels,
        "max_weight": agreed.weight_limit,
    }
    return Policy(**{**given, **changes})


def client(agreed: Terms, number: int, label: str = "", **changes: Any) -> Client:
    """Client `number` with reproducible entropy."""
    return Client(
        identities()[number],
        policy(agreed, **changes),
        roster=roster() if agreed.mode == "active" else None,
        entropy=public_entropy(f"client {number} {label}"),
        record=SumRecord(),
    )


def levels(number: int, dimension: int, most: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The integer input of a client: extreme values among them."""
    generator = np.random.default_rng(number)
    vector = generator.integers(-most, most, dimension, endpoint=True).astype(np.int32)
    vector[: min(3, dimension)] = [most, -most, 0][: min(3, dimension)]
    return vector


def resealed(data: bytes) -> bytes:
    """`data` with its checksum made right again: what somebody who means it would send."""
    return data[:-CHECKSUM_BYTES] + sha256(data[:-CHECKSUM_BYTES]).digest()[:CHECKSUM_BYTES]


def complaint(machine: Client, data: bytes) -> tuple[int, ...]:
    """Whom the client names when it is sent `data`, instead of a masked vector."""
    terms_ = machine.terms
    assert terms_ is not None
    message = m.decode_client(machine.receive(data, Contribution(np.zeros(terms_.dimension))), 1 << 24)
    assert isinstance(message, m.Complaint), type(message).__name__
    assert machine.stage is ClientStage.COMPLAINED
    return m.names(message.accused)


@dataclass
class Play:
    """One run, stage by stage. `down` and `up` keep the messages by (kind, client)."""

    agreed: Terms
    clients: dict[int, Client]
    server: Server
    values: Callable[[int], Sequence[Contribution]]
    down: dict[tuple[str, int], bytes] = field(default_factory=dict)
    up: dict[tuple[str, int], bytes] = field(default_factory=dict)

    @staticmethod
    def of(agreed: Terms, label: str = "") -> "Play":
        """A run about to begin."""
        return Play(
            agreed,
            {number: client(agreed, number, label) for number in agreed.cohort},
            Server(agreed, roster=roster() if agreed.mode == "active" else None),
            lambda number: [Contribution(levels(number, agreed.dimension, agreed.levels), is_levels=True)],
        )

    def until(self, kind: str, drops: Mapping[int, str] | None = None) -> dict[int, bytes]:
        """Runs up to the point where the server has made its messages of this kind, and returns them undelivered."""
        while True:
            outbox = self.open()
            if self.server.stage is ServerStage.DONE:
                raise AssertionError(f"no message {kind}")
            if self.server.sent == kind:
                return outbox
            self.close(outbox, drops or {})

    def open(self) -> dict[int, bytes]:
        """Closes the server's stage and keeps what it sends."""
        outbox = self.server.advance()
        self.down |= {(self.server.sent, number): data for number, data in outbox.items()}
        return outbox

    def close(self, outbox: Mapping[int, bytes], drops: Mapping[int, str]) -> None:
        """Delivers, and takes the answers of those who are still there."""
        expected = self.server.collected[0]
        for number, data in outbox.items():
            if number in drops and expected in STAGES and STAGES.index(drops[number]) <= STAGES.index(expected):
                continue
            machine = self.clients[number]
            reply = machine.receive(data, *(self.values(number) if machine.wants_values else ()))
            self.up[type(m.decode_client(reply, 1 << 24)).__name__, number] = reply
            self.server.receive(number, reply)

    def finish(self, drops: Mapping[int, str] | None = None) -> None:
        """Runs to the end."""
        while True:
            outbox = self.open()
            if self.server.stage is ServerStage.DONE:
                break
            self.close(outbox, drops or {})
