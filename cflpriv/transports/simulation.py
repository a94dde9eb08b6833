"""A simulated federation: the server, its clients at one host or several, and the experimenter's access, which is outside the protocol."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

import numpy as np
from msgspec import structs

from ..contract.handles import Held, Labels, Shared
from ..contract.operations import Parameter, Sampling
from ..contract.portions import in_portions
from ..contract.protection import Protection
from ..contract.transcript import Transcript
from ..engine import Engine, Result, Task, TaskInput
from ..errors import InputError
from ..federation import messages as m
from ..federation.client import FederationClient
from ..federation.contract_record import Contract
from ..federation.protections import Portions, at_once
from ..federation.server import FederationServer
from ..federation.store import ObjectStore
from ..federation.transport import Transport
from ..federation.values import SharedWork
from ..keys import ranged
from ..privacy.client_level import ClippedMean, LocalGram
from ..privacy.receipts import PrivacyLedger
from ..privacy.settings import Privacy
from ..protocols.entropy import Entropy, system_entropy
from ..protocols.errors import RemoteError
from ..protocols.keys import Identity, Roster
from ..types import Array, ClientData
from .hosts import HOLDER, Found, Host, LocalHost, Look, Members, party_name
from .memory import BytesTransport, Faults, MemoryTransport

__all__ = ["HOLDER", "Hosted", "ReleasePolicy", "Simulated", "resolved", "simulate"]

ReleasePolicy = Literal["strict", "off"]
Hosted = Callable[[Members, Callable[[str], Entropy]], Host]
"""Makes the host of these members; the second argument gives fresh sources of entropy by name (see `hosts.SplitHosts`)."""


@dataclass(eq=False)
class Simulated:
    """A `federation` over the clients of a `host`. Everything else here exists in simulations only and is not recorded.

    `data` is that of all clients.
    """

    federation: FederationServer
    transport: MemoryTransport
    host: Host
    data: Mapping[int, ClientData]
    identities: Mapping[int, Identity] = field(repr=False)

    @property
    def online(self) -> set[int]:
        """The clients that are there, without those that were removed."""
        return (self.transport.online & set(self.data)) - self.federation.removed

    @property
    def engine(self) -> Engine:
        return self.host.engine

    @property
    def stores(self) -> Mapping[int, ObjectStore]:
        """What every party keeps, by place."""
        return self.host.stores()

    def each(self, clients: Sequence[int], look: Look[Found], *arguments: Any) -> list[Found]:
        """What `look` finds at these clients, in their order."""
        return self.host.each(clients, look, *arguments)

    def close(self) -> None:
        """End the processes that compute, if any."""
        self.host.close()

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

    def change(self, data: Sequence[ClientData]) -> None:
        """Clients have other data from now on. `InputError` for unknown ones."""
        if unknown := sorted({own.id for own in data} - set(self.data)):
            raise InputError(f"change: clients {unknown} are not known")
        changed = {own.id: own for own in data}
        self.data = {**self.data, **changed}
        self.host.change(changed)

    def peek(self, client: int, value: Parameter) -> Array:
        """The value of a sum or of a held value as one client sees it."""
        sought: m.HeldValue | m.Addends
        if isinstance(value, Held):
            if client not in value.clients:
                raise InputError(f"client {client} does not hold {value.key.name}")
            sought = m.HeldValue(self.federation.numbers()[value.key], value.part)
        else:
            sought = m.to_addends(cast("Array | Shared", value), self.federation.numbers())
        (opened,) = self.each([client], _opened, sought)
        return opened

    def recall(self, client: int, name: str) -> Array | None:
        """What a client's tasks keep under a name, if anything."""
        (opened,) = self.each([client], _recalled, name)
        return opened

    def resolve(
        self, task: Task, params: Mapping[str, Parameter], which: Labels | Held | None, clients: Sequence[int]
    ) -> list[TaskInput]:  # fmt: skip
        """What clients would be given by `compute`, without computing or recording anything."""
        return self.each(clients, resolved, self.federation.asks(task, params, which, clients))

    def measure(self, task: Task, params: Mapping[str, Parameter], which: Labels | Held | None, clients: Sequence[int]) -> list[Result]:
        """What clients would compute, at their hosts. Empty for a client that lost what it held with its host."""
        return self.each(clients, _measured, self.federation.asks(task, params, which, clients))

    def secrets(self, party: str) -> dict[str, str]:
        """The secrets of a party, for auditing: "server" has none, "client:ID" those that it derived from the group's, by group epoch."""
        if party == "server":
            return {}
        if party == "key-holder" and HOLDER in self.identities:
            if self.federation.protection.sums.helped:
                raise InputError("run.audit_parties: 'key-holder' under sum = 'one_message': helpers have keys of single rounds only")
            if self.federation.protection.comparison.shared:
                raise InputError(
                    "run.audit_parties: 'key-holder' under gram = ['shares']: no holder has a key to write; "
                    "`cflpriv audit --active` attacks as holders and coalitions of them"
                )
            return self.each([HOLDER], _secrets)[0]
        name, _, number = party.partition(":")
        if name == "client" and number.isdigit() and int(number) in self.data:
            return self.each([int(number)], _secrets)[0]
        raise InputError(f"run.audit_parties: {party!r} is not a party here; use 'server' or 'client:ID' with ID of a client")

    def drawn(self) -> dict[str, int]:
        """How many bytes each party drew from its source of entropy, by its name. The sources must count them."""
        places = sorted(self.identities)
        return dict(zip(map(party_name, places), self.each(places, _drawn), strict=True))

    def skip(self, drawn: Mapping[str, int]) -> None:
        """Let the parties draw nothing of what they drew before: the inverse of `drawn`, for a run that is resumed."""
        self.each([place for place in sorted(self.identities) if party_name(place) in drawn], _skip, drawn)

    def client(self, client: int) -> FederationClient:
        """One of the clients, where they are in this process. Raises `InputError`."""
        if not isinstance(self.host, LocalHost):
            raise InputError(f"client {client} is not in this process")
        return self.host.client(client)


def _portions(host: Host, engine: Engine) -> Portions:
    """Portions that let all processes work."""
    return partial(in_portions, fewest=max(engine.workers, host.count))


# --- at the hosts


def _opened(host: LocalHost, clients: Sequence[int], value: m.HeldValue | m.Addends) -> list[Array]:
    parties = [host.client(client) for client in clients]
    return [party.values.value(value) if isinstance(value, m.HeldValue) else party.opened(value, SharedWork()) for party in parties]


def _recalled(host: LocalHost, clients: Sequence[int], name: str) -> list[Array | None]:
    kept = [host.client(client).values.remembered(name) for client in clients]
    return [None if memory is None else memory[0] for memory in kept]


def resolved(host: LocalHost, clients: Sequence[int], asks: Mapping[int, m.Compute]) -> list[TaskInput]:
    """What clients would be given for these requests."""
    exchange = SharedWork()
    return [host.client(client).given(asks[client], exchange) for client in clients]


def _measured(host: LocalHost, clients: Sequence[int], asks: Mapping[int, m.Compute]) -> list[Result]:
    exchange, inputs = SharedWork(), dict[int, TaskInput]()
    if not clients:
        return []
    for client in clients:
        try:
            inputs[client] = host.client(client).given(asks[client], exchange)
        except RemoteError as error:
            if error.code not in ("not-held", "no-secret"):
                raise
    task = asks[clients[0]].task.task
    results = dict(zip(inputs, host.engine.run(task, list(inputs.values())), strict=True))
    return [results.get(client, {}) for client in clients]


def _secrets(host: LocalHost, places: Sequence[int]) -> list[dict[str, str]]:
    return [host.parties[place].secrets() for place in places]  # type: ignore[attr-defined]


def _drawn(host: LocalHost, places: Sequence[int]) -> list[int]:
    return [host.members.entropy[place].drawn for place in places]  # type: ignore[attr-defined]


def _skip(host: LocalHost, places: Sequence[int], drawn: Mapping[str, int]) -> list[None]:
    return [host.members.entropy[place].skip(drawn[party_name(place)]) for place in places]  # type: ignore[attr-defined]


def _sent(host: Host, client: int, number: int, parts: tuple[str, ...]) -> Mapping[str, Array]:
    """What a client put into sealed boxes."""
    return host.each([client], _parts, number, parts)[0]


def _parts(host: LocalHost, clients: Sequence[int], number: int, parts: tuple[str, ...]) -> list[dict[str, Array]]:
    held = [host.client(client).values.parts(number, parts) for client in clients]
    return [{part: np.asarray(value) for part, value in values.items()} for values in held]


@ranged()
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
    privacy_ledger: PrivacyLedger | None = None,
    clipped: ClippedMean | None = None,
    local: LocalGram | None = None,
    transport: Literal["memory", "bytes"] = "memory",
    on_error: Literal["raise", "refuse"] = "raise",
    release_policy: ReleasePolicy = "strict",
    identities: Mapping[int, Identity] | None = None,
    session: bytes | None = None,
    stores: Callable[[Mapping[int, ClientData]], Mapping[int, ObjectStore]] | None = None,
    hosted: Hosted | None = None,
    contract: Contract | None = None,
    watch: Callable[[Transport], Transport] = lambda transport: transport,
) -> Simulated:
    """A federation whose clients, known by their ids, are in this process, or at the host that `hosted` makes of them.

    `present` clients are there from the start (default: all); others may `join`. `entropy` gives each party ("server", "client 3",
    "key-holder") its own source of secrets; tests may pass a public one. `privacy` is what clients demand; `privacy_ledger`, `clipped` and
    `local` are the server's side of it. With `release_policy = "off"` clients release what a deployed client would refuse to. `identities`,
    `session` and `stores`, a function of the clients' data, are those of a run that is resumed, whose clients enrol after the server is
    restored. `contract`: what the server may ask of clients; without a contract they compute
    whatever task they are asked for. `watch` wraps the transport as the server sees it.

    Raises `InputError` for ids that repeat, and for those that are not 0, 1, 2, … where clients' keys are pinned on a roster.
    """
    protection = protection or Protection()
    data = {client.id: client for client in sorted(clients, key=lambda client: client.id)}
    if len(data) != len(clients):
        raise InputError("federation: client ids repeat")
    there = set(data if present is None else present)
    if not there or not there <= set(data):
        raise InputError(f"federation: present clients {sorted(there)} must be some of {sorted(data)}")
    for _, client in () if faults is None else faults.listed:
        if client not in data:
            raise InputError(f"training.dropouts: there is no client {client}")
    encrypted, holders = protection.encrypted, [HOLDER - number for number in range(protection.holders)]
    sources = {place: entropy(party_name(place)) for place in (*data, *(holders or [HOLDER]))}
    if identities is None:
        identities = {place: Identity.create(max(place, 0), sources[place]) for place in (*data, *holders)}
    roster = None
    if protection.secure or protection.transformed or encrypted:
        if list(data) != list(range(len(data))):
            raise InputError(f"federation: client ids are places on the roster, 0 to {len(data) - 1}; got {sorted(data)}")
        first, *others = [identities[place].public() for place in holders] or [b""]
        roster = Roster(tuple(identities[client].public() for client in data), first, tuple(others))
    there |= set(holders)
    strict = release_policy == "strict"
    kept = {place: ObjectStore() for place in identities} if stores is None else stores(data)
    members = Members(
        identities, data, kept, sources, protection, roster, privacy or Privacy(), strict, engine or Engine(), on_error == "raise"
    )
    host: Host = LocalHost(members) if hosted is None else hosted(members, entropy)
    memory = MemoryTransport(host, faults or Faults(), on_error, there)
    federation = FederationServer(
        watch(memory if transport == "memory" else BytesTransport(memory)), protection=protection, sampling=sampling, seed=seed,
        roster=roster, transcript=transcript, entropy=entropy("server"), session=session, expect=data, privacy_ledger=privacy_ledger,
        clipped=clipped, local=local, strict=strict, witness=partial(_sent, host),
        contract=None if contract is None else structs.replace(contract, roster=b"" if roster is None else roster.digest),
        portions=_portions(host, members.engine) if (transcript or Transcript()).level == "headers" and transport == "memory" else at_once,
        signed=False,  # without a roster: these clients are where the experimenter put them
        together=False,  # nobody waits for messages here, and dropouts are injected by stage
    )  # fmt: skip
    if stores is None:
        federation.enrol()
    return Simulated(federation, memory, host, data, identities)
