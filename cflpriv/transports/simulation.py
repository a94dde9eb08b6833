"""A federation in one process: the server, its clients at one host, and the experimenter's access, which is outside the protocol."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from weakref import ReferenceType

import numpy as np

from ..aggregation.key_holder import KeyHolderParty
from ..contract.handles import Held, Labels
from ..contract.operations import Parameter, Sampling
from ..contract.protection import Protection
from ..contract.transcript import Transcript
from ..engine import Engine, Result, Task, TaskInput
from ..errors import InputError
from ..federation import messages as m
from ..federation.client import FederationClient
from ..federation.host import ClientHost, Party
from ..federation.parameters import parameter_messages as said_of
from ..federation.server import FederationServer
from ..federation.settings import Settings
from ..federation.store import ObjectStore
from ..federation.transforms import TransformCache
from ..federation.values import Exchange
from ..privacy.client_level import ClippedMean, LocalGram
from ..privacy.receipts import PrivacyLedger
from ..privacy.settings import Privacy
from ..protocols.entropy import Entropy, system_entropy
from ..protocols.keys import Identity, Roster
from ..types import Array, ClientData
from .memory import BytesTransport, Faults, MemoryTransport

__all__ = ["HOLDER", "Evaluated", "ReleasePolicy", "Simulated", "simulate"]

HOLDER = -2
"""The place of the key holder, where there is one."""
ReleasePolicy = Literal["strict", "off"]


@dataclass(frozen=True, eq=False)
class Evaluated:
    """What a task gave for a client's model, which is kept by a weak reference."""

    task: Task
    vector: "ReferenceType[Any]"
    result: Result

    def is_of(self, task: Task, vector: Any) -> bool:
        """Whether it is the result of this task for this very object."""
        return self.task == task and self.vector() is vector


@dataclass(eq=False)
class Simulated:
    """A `federation` over clients of this process. Everything else here exists in simulations only and is not recorded.

    `data` is that of all clients, `stores` is what they keep. `evaluated` has the last scores of each client's local model, so that one
    that did not change is not evaluated again.
    """

    federation: FederationServer
    transport: MemoryTransport
    data: Mapping[int, ClientData]
    stores: Mapping[int, ObjectStore]
    identities: Mapping[int, Identity] = field(repr=False)
    evaluated: dict[int, Evaluated] = field(default_factory=dict, repr=False)

    @property
    def online(self) -> set[int]:
        """The clients that are there, without those that were removed."""
        return (self.transport.online & set(self.data)) - self.federation.removed

    @property
    def engine(self) -> Engine:
        return self.transport.host.engine

    def join(self, clients: Sequence[int]) -> None:
        """Clients come online and enrol. `InputError` for unknown ones, and for those that were removed."""
        unknown = sorted(set(clients) - set(self.data))
        if unknown:
            raise InputError(f"join: there is no data for clients {unknown}")
        removed = sorted(self.federation.removed.intersection(clients))
        if removed:
            raise InputError(f"join: clients {removed} were removed for good")
        self.transport.online |= set(clients)
        self.federation.enrol()

    def leave(self, clients: Sequence[int]) -> None:
        """Clients go offline. They keep what they hold and may come back."""
        unknown = sorted(set(clients) - set(self.data))
        if unknown:
            raise InputError(f"leave: clients {unknown} are not known")
        if not self.online - set(clients):
            raise InputError("leave: no client would be left")
        self.transport.online -= set(clients)
        self.federation.lose(clients)

    def peek(self, client: int, value: Parameter) -> Array:
        """The value of a sum or of a held value as one client sees it."""
        party = self.client(client)
        if isinstance(value, Held):
            if client not in value.clients:
                raise InputError(f"client {client} does not hold {value.key.name}")
            return party.values.mine(m.Mine(self.federation.numbers()[value.key], value.part))  # type: ignore[no-any-return]
        (one,) = said_of({"value": value}, {}, None, False, self.federation.numbers(), {})
        assert isinstance(one.value, m.One)
        return party.opened(one.value.value, Exchange())

    def recall(self, client: int, name: str) -> Array | None:
        """What a client's tasks keep under a name, if anything."""
        found = self.kept(client, name)
        return None if found is None else np.asarray(found)

    def kept(self, client: int, name: str) -> Any:
        """The same as it is kept: one object until it changes, whose vector may be computed on demand."""
        found = self.client(client).values.kept(name)
        return None if found is None else found[0]

    def resolve(
        self, task: Task, params: Mapping[str, Parameter], which: Labels | Held | None, clients: Sequence[int]
    ) -> list[TaskInput]:  # fmt: skip
        """What clients would be given by `compute`, without computing or recording anything."""
        exchange = Exchange()
        asks = self.federation.asks(task, params, which, clients)
        return [self.client(client).given(asks[client], exchange) for client in clients]

    def secrets(self, party: str) -> dict[str, str]:
        """The secrets of a party, for auditing: "server" has none, "client:ID" those that it derived from the group's, by group epoch."""
        if party == "server":
            return {}
        if party == "key-holder" and HOLDER in self.transport.host.parties:
            return self.transport.host.parties[HOLDER].secrets()  # type: ignore[attr-defined, no-any-return]
        name, _, number = party.partition(":")
        if name == "client" and number.isdigit() and int(number) in self.data:
            return self.client(int(number)).secrets()
        raise InputError(f"run.audit_parties: {party!r} is not a party here; use 'server' or 'client:ID' with ID of a client")

    def client(self, client: int) -> FederationClient:
        """One of the clients."""
        party = self.transport.host.parties.get(client)
        if not isinstance(party, FederationClient):
            raise InputError(f"client {client} is not one of this federation")
        return party


def simulate(
    clients: Sequence[ClientData],
    *,
    protection: Protection | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
    transcript: Transcript | None = None,
    present: Sequence[int] | None = None,
    entropy: Callable[[str], Entropy] = lambda party: system_entropy,
    faults: Faults | None = None,
    engine: Engine | None = None,
    privacy: Privacy | None = None,
    accounts: PrivacyLedger | None = None,
    clipped: ClippedMean | None = None,
    local: LocalGram | None = None,
    transport: Literal["memory", "bytes"] = "memory",
    on_error: Literal["raise", "refuse"] = "raise",
    release_policy: ReleasePolicy = "strict",
    identities: Mapping[int, Identity] | None = None,
    session: bytes | None = None,
    stores: Mapping[int, ObjectStore] | None = None,
) -> Simulated:
    """A federation whose clients, known by their ids, are in this process.

    `present` clients are there from the start (default: all); others may `join`. `entropy` gives each party ("server", "client 3",
    "key-holder") its own source of secrets; tests may pass a public one. `privacy` is what clients demand; `accounts`, `clipped`, `local`
    are the server's side of it. With `release_policy = "off"` clients release what a deployed client would refuse to. `identities`,
    `session` and `stores` are those of a run that is resumed, whose clients enrol after the server is restored.

    Raises `InputError` for ids that repeat, and for those that are not 0, 1, 2, … where clients' keys are pinned on a roster.
    """
    protection = protection or Protection()
    data = {one.id: one for one in sorted(clients, key=lambda one: one.id)}
    if len(data) != len(clients):
        raise InputError("federation: client ids repeat")
    there = set(data if present is None else present)
    if not there or not there <= set(data):
        raise InputError(f"federation: present clients {sorted(there)} must be some of {sorted(data)}")
    for _, client in () if faults is None else faults.listed:
        if client not in data:
            raise InputError(f"training.dropouts: there is no client {client}")
    sources = {client: entropy(f"client {client}") for client in data} | {HOLDER: entropy("key-holder")}
    encrypted = protection.encrypted
    if identities is None:
        identities = {place: Identity.create(max(place, 0), sources[place]) for place in (*data, *([HOLDER] if encrypted else []))}
    roster = None
    if protection.secure or protection.transformed or encrypted:
        if list(data) != list(range(len(data))):
            raise InputError(f"federation: client ids are places on the roster, 0 to {len(data) - 1}; got {sorted(data)}")
        roster = Roster(tuple(identities[client].public() for client in data), identities[HOLDER].public() if encrypted else b"")
    kept = stores or {place: ObjectStore() for place in identities}
    cache = TransformCache()
    parties: dict[int, Party] = {}
    for client, one in data.items():
        settings = Settings(identities[client], protection, roster, privacy or Privacy(), models=MOST_MODELS)
        parties[client] = FederationClient(
            settings, partial(_same, one), kept[client], sources[client], cache=cache, strict=release_policy == "strict"
        )
    if encrypted:
        settings = Settings(identities[HOLDER], protection, roster, role="key-holder")
        parties[HOLDER] = KeyHolderParty(settings, kept[HOLDER], sources[HOLDER])
        there.add(HOLDER)
    memory = MemoryTransport(ClientHost(parties, engine), faults or Faults(), on_error, there)
    federation = FederationServer(
        memory if transport == "memory" else BytesTransport(memory), protection=protection, sampling=sampling, seed=seed, roster=roster,
        transcript=transcript, entropy=entropy("server"), session=session, expect=data, accounts=accounts, clipped=clipped, local=local,
        strict=release_policy == "strict", witness=partial(_sent, parties),
    )  # fmt: skip
    if stores is None:
        federation.enrol()
    return Simulated(federation, memory, data, kept, identities)


MOST_MODELS = 1 << 20
"""Simulated clients take part in secure sums over as many models as the algorithm declares."""


def _sent(parties: Mapping[int, Party], client: int, number: int, parts: tuple[str, ...]) -> Mapping[str, Array]:
    """What a client put into sealed boxes."""
    party = parties[client]
    assert isinstance(party, FederationClient)
    return {part: np.asarray(value) for part, value in party.values.parts(number, parts).items()}


def _same(one: ClientData) -> ClientData:
    return one
