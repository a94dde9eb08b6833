"""A federation over messages in one process: every message finds a new client, which has nothing but its store."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from cflpriv.aggregation.holder_party import party_for
from cflpriv.contract.protection import Protection
from cflpriv.contract.transcript import Transcript
from cflpriv.federation import messages as m
from cflpriv.federation.client import FederationClient
from cflpriv.federation.server import FederationServer
from cflpriv.federation.settings import Settings
from cflpriv.federation.store import MemoryStore, Store
from cflpriv.federation.transport import OverBytes
from cflpriv.privacy.settings import Privacy
from cflpriv.protocols.entropy import Entropy, public_entropy
from cflpriv.protocols.errors import ProtocolError
from cflpriv.protocols.keys import Identity, Roster
from cflpriv.protocols.secagg import messages as steps
from cflpriv.types import Population

ENTROPY = public_entropy("remote")
HOLDER = -2
"""The key holder, where there is one, among clients' numbers; holder i of several is HOLDER − i."""


class RawArray(m.FederationMessage, frozen=True):
    """An array as it is encoded: bytes of a dtype and shape that need not fit each other."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Loopback:
    """Clients in this process, each a new object for every message: what is not in its store is gone."""

    def __init__(self, scene: Population, protection: Protection, stores: Callable[[int], Store] | None = None) -> None:
        self.data = {client.id: client for client in scene.clients}
        self.identities = {client: Identity.create(client, ENTROPY) for client in self.data}
        self.holder = Identity.create(0, ENTROPY) if protection.holders else None
        self.others = {HOLDER - number: Identity.create(0, ENTROPY) for number in range(1, protection.holders)}
        keys = tuple(self.identities[client].public() for client in sorted(self.data))
        others = tuple(one.public() for one in self.others.values())
        self.roster = Roster(keys, b"" if self.holder is None else self.holder.public(), others)
        self.protection = protection
        self.privacy = Privacy()
        self.entropy: Callable[[int], Entropy] = lambda client: ENTROPY
        self.stores = {client: stores(client) if stores else MemoryStore() for client in self.data}
        self.stores |= {place: stores(place) if stores else MemoryStore() for place in (HOLDER, *self.others)}
        self.dead: set[int] = set()
        self.kill_at: dict[str, set[int]] = {}
        self.stages: list[str] = []
        self.tamper: Callable[[int, str, bytes], bytes] = lambda client, stage, data: data

    @property
    def holders(self) -> dict[int, Identity]:
        """The key holder, or all holders, by their numbers here."""
        return {} if self.holder is None else {HOLDER: self.holder, **self.others}

    def settings(self, client: int) -> Settings:
        return Settings(self.identities[client], self.protection, self.roster, self.privacy)

    def places(self) -> Sequence[int]:
        parties = [*self.data, *self.holders]
        return [1000 + party for party in parties if party not in self.dead]

    def exchange(self, requests: Mapping[int, bytes], stage: str) -> Mapping[int, bytes]:
        self.stages.append(stage)
        self.dead |= self.kill_at.pop(stage, set())
        answers = {}
        for place, data in requests.items():
            client = place - 1000
            if client in self.holders and client not in self.dead:
                settings = Settings(self.holders[client], self.protection, self.roster, role="key-holder")
                party = party_for(self.protection)(settings, self.stores[client], ENTROPY)
                answers[place] = self.tamper(client, stage, party.receive(data))
            elif client not in self.dead:
                mine = partial(self.data.__getitem__, client)
                remote = FederationClient(self.settings(client), mine, self.stores[client], self.entropy(client))
                answers[place] = self.tamper(client, stage, remote.receive(data))
        return answers


Spoil = Callable[[steps.Masked], steps.Masked]


def spoilt(answer: m.Answer, change: Spoil) -> m.Answer:
    """A client's answer, with the masked vector of a secure sum as `change` makes it; any other answer as it is."""
    if not isinstance(answer, m.Stepped):
        return answer
    try:
        step = steps.decode_client(answer.message, 1 << 20)
    except ProtocolError:
        return answer
    return m.Stepped(steps.encode(change(step))) if isinstance(step, steps.Masked) else answer


def remote(scene: Population, protection: Protection | None = None, **options: Any) -> tuple[Loopback, FederationServer]:
    transport = Loopback(scene, protection or Protection())
    pinned = transport.protection.secure or transport.protection.transformed or transport.holder is not None
    roster = transport.roster if pinned else None
    fed = FederationServer(
        OverBytes(transport),
        protection=transport.protection,
        roster=roster,
        entropy=ENTROPY,
        transcript=Transcript("full"),
        seed=1,
        **options,
    )
    fed.enrol()
    return transport, fed
