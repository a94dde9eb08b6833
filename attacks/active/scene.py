"""The setting of an active attack: freshly started clients, the deviating server, and the ground truth that only the scorer sees."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
from msgspec import structs

from ...aggregation.holder_party import party_for
from ...contract.handles import GroupMean, Held
from ...contract.protection import Protection
from ...engine import Engine, Streams, Task, TaskInput
from ...errors import InputError
from ...experiments.config.config import Config
from ...experiments.run.agreed import contract_for, noise_over
from ...federation.client import FederationClient
from ...federation.contract_record import Contract
from ...federation.host import ClientHost, Party
from ...federation.server import FederationServer
from ...federation.settings import Limits, Settings
from ...federation.store import MemoryStore, ObjectStore
from ...federation.transport import Transport
from ...privacy.client_level import client_noise
from ...privacy.receipts import PrivacyLedger
from ...privacy.settings import Releases
from ...protocols.entropy import system_entropy
from ...protocols.errors import ProtocolError
from ...protocols.keys import Identity, Roster
from ...protocols.ledger import Ledger
from ...tasks.halves import HALVES
from ...tasks.signatures import PrincipalVectors
from ...tasks.training import Train
from ...transports.memory import BytesTransport, MemoryTransport
from ...types import Array, ClientData, Population
from .dealt_by_hand import Dealing
from .liar import Liar

__all__ = ["WHOLE", "Clients", "AttackRun", "Scene", "Summed", "VictimValue", "in_memory", "scene_of"]

COHORT = 8
"""So many clients are started, or two more than a sum needs: attacks on more of them show the same."""
HOLDER_PLACE = -2
DEALINGS = 40
"""How often a dealing is made again."""
BOUNDLESS = 1e9
"""The ε in the ledger of a server that ignores budgets."""
WHOLE: dict[str, Any] = {"epochs": 1, "batch_size": 0, "momentum": 0.0}
"""What makes a training one step over all of a client's data: the same whatever the round."""
VictimValue = Literal["update", "whole_batch_update", "signature"]
"""What may be read of a client: its update from the honest model in round 0, the same of one step over all data, its signature."""


@dataclass(frozen=True, eq=False)
class Clients:
    """Clients that were just started, or that joined a new session: the transport that reaches them, and their pinned roster.

    `identities` are of the clients that may become accomplices: the server has their secrets. `holders`: identities of key holders, by
    number.
    """

    transport: Transport
    roster: Roster
    identities: Mapping[int, Identity]
    holders: Mapping[int, Identity] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Scene:
    """What is audited: a configuration, fresh clients of it for each attack (`start`), and their data, for the scorer and accomplices.

    Client i of the `population` has the id i. With `contracted`, as every client of a deployment, clients are under the session contract
    of the configuration, where its algorithm declares a schedule. Without it each rule below the contract is on its own.
    """

    config: Config
    population: Population
    start: Callable[[], Clients]
    contracted: bool = True

    def contract(self, name: str) -> Contract | None:
        """The session contract of a run of this name."""
        if not self.contracted:
            return None
        config = self.config.with_("run", name=name)
        return contract_for(config, config.algorithm_for(self.population), noise_over(config, list(self.clients)))

    @cached_property
    def train(self) -> Train:
        """The local training of the configuration's first round."""
        return self.config.train_for(self.population).at(0)

    @cached_property
    def model(self) -> Array:
        """The model (d,) that all clients of an honest run begin from."""
        return self.train.model.init(self.config.run.seed)

    @cached_property
    def signature(self) -> PrincipalVectors:
        """What clients have compared: as many principal vectors as the algorithm's signatures have (of one half), where it has such."""
        compared = self.config.compared
        rows = compared.rows // HALVES if compared.halves else compared.rows
        return PrincipalVectors(rows if compared.of_samples and not compared.per_label else 1)

    @cached_property
    def _truths(self) -> dict[tuple[VictimValue, int], Array]:
        return {}

    def truth(self, value: VictimValue, client: int) -> Array:
        """A client's value (d,) or (p·d,), without noise. For the scorer alone."""
        if (value, client) not in self._truths:
            task: Task = self.signature if value == "signature" else self.train if value == "update" else replace(self.train, **WHOLE)
            part = "signature" if value == "signature" else "update"
            task_input = TaskInput(self.data(client), {"model": self.model}, {}, Streams(self.config.run.seed, 0, client))
            self._truths[value, client] = np.ravel(np.asarray(Engine().run(task, [task_input])[0][part], np.float64))
        return self._truths[value, client]

    def data(self, client: int) -> ClientData:
        """The data of a client."""
        return self.population.clients[client]

    @property
    def clients(self) -> range:
        return range(len(self.population.clients))


def scene_of(config: Config, population: Population, contracted: bool = True) -> Scene:
    """A few clients of a population in this process, started anew for each attack, as a deployed client would be."""
    protection = config.protection
    dealt = protection.smallest_group + protection.smallest_sum - 1  # as few buckets as there may be, as large as they get
    most = max(COHORT, protection.smallest_sum + 2) if protection.robust == "none" else dealt
    chosen = sorted(population.clients, key=lambda client: client.id)[:most]
    people = replace(
        population, clients=tuple(replace(client, id=number) for number, client in enumerate(chosen)), groups=(0,) * len(chosen)
    )  # fmt: skip
    return Scene(config, people, lambda: in_memory(config, people), contracted)


def in_memory(config: Config, population: Population) -> Clients:
    """Clients in this process with new identities and stores, system entropy, the strict release policy, and the settings of `config`."""
    protection, clients, limits = config.protection, population.clients, Limits(rounds=max(1, config.training.rounds))
    identities = {client.id: Identity.create(client.id) for client in clients}
    holders = {number: Identity.create(0) for number in range(protection.holders)}
    first, *others = [holder.public() for holder in holders.values()] or [b""]
    roster = Roster(tuple(identities[client.id].public() for client in clients), first, tuple(others))
    parties: dict[int, Party] = {
        client.id: FederationClient(
            Settings(identities[client.id], protection, roster, config.privacy, limits=limits, allow_scores=True),
            _same(client),
            ObjectStore(),
        )
        for client in clients
    }  # fmt: skip
    for number, holder in holders.items():
        settings = Settings(holder, protection, roster, role="key-holder")
        parties[HOLDER_PLACE - number] = party_for(protection)(settings, ObjectStore())
    memory = MemoryTransport(ClientHost(parties), on_error="refuse", online=set(parties))
    return Clients(memory if config.run.transport == "memory" else BytesTransport(memory), roster, identities, holders)


def _same(data: ClientData) -> Callable[[], ClientData]:
    return lambda: data


@dataclass(frozen=True)
class _Claimed(Roster):
    """A roster that goes by the digest of another: for a server and the clients it controls, which nobody can keep from using it."""

    claimed: bytes = b""

    @property
    def digest(self) -> bytes:
        return self.claimed


@dataclass(frozen=True, eq=False)
class Summed:
    """The result of a secure sum: the total (d,), and the clients in it."""

    total: Array
    survivors: tuple[int, ...]


class AttackRun:
    """One attack's server and its fresh clients.

    `victim` is an honest client. `accomplices` are the clients that the server runs: fewer than a third of all clients if sums are
    protected against an active server, else fewer than the threshold. With `sybils`, all clients but the victim are inventions of the
    server, with keys that are on no roster. `protection` is the server's, whatever the clients' own settings are. `fed` is an honest server
    over a `liar`.

    `clients` are all clients, accomplices included. If clients deal their sums into buckets, `clients` are the victim's bucket. Then `fed`
    asks for plain sums, so that each attack is aimed at the sum of this bucket.
    """

    def __init__(self, scene: Scene, protection: Protection, *, accomplices: bool = True, sybils: bool = False) -> None:
        self.scene, self.victim = scene, 0
        needed = scene.config.protection.smallest_group
        if scene.config.protection.secure and len(scene.clients) <= needed:
            raise InputError(
                f"active audit: there are {len(scene.clients)} clients, and a sum needs {needed}; sums that differ by one client need one "
                "more"
            )
        dealt = protection.secure and protection.robust != "none"
        protection = replace(protection, robust="none")  # clients' own settings say otherwise
        met = scene.start()
        everyone, clients = list(scene.clients), len(scene.clients)
        lying = scene.config.protection.secagg_mode == "active"
        few = [*everyone[clients - ((clients - 1) // 3 if lying else clients // 2) :]] if accomplices else []
        roster: Any = met.roster
        identities = {client: met.identities[client] for client in few if client in met.identities}
        people = {client: scene.data(client) for client in identities}
        if sybils:
            identities = {client: Identity.create(client) for client in everyone if client != self.victim}
            people = {client: _made_up(scene.data(self.victim), client) for client in identities}
            keys = tuple(identities[client].public() if client in identities else met.roster.keys[client] for client in everyone)
            roster = _Claimed(keys, met.roster.holder, met.roster.others, met.roster.digest)
        self.stores = {client: MemoryStore() for client in identities}
        controlled = {
            client: FederationClient(
                Settings(identity, protection, roster, scene.config.privacy), _same(people[client]), self.stores[client], strict=False
            )
            for client, identity in identities.items()
        }
        self.identities, self.controlled, self.roster = identities, controlled, met.roster
        self.holders = met.holders
        self.liar = Liar(met.transport, controlled, met.roster.holders)
        self.ledger: Ledger | None = None
        pinned = protection.secure or protection.transformed or protection.encrypted
        self._server = partial(
            FederationServer, self.liar, protection=protection, seed=scene.config.run.seed, roster=roster if pinned else None, strict=False,
            contract=self._contract(pinned), **self._private(protection),
        )  # fmt: skip
        self.another_session()
        self.dealings = 0
        self.clients = self._dealt() if dealt else self.fed.clients
        self.accomplices = tuple(client for client in identities if client in self.clients)

    def another_session(self) -> None:
        """An honest server begins a session of its own, under the same contract."""
        self.fed = self._server()
        self.fed.enrol()
        self.fed.begin_round(0)

    def _contract(self, pinned: bool) -> Contract | None:
        """The contract of this run, whose name is that of no other."""
        made = self.scene.contract(f"attack {system_entropy(8).hex()}")
        return None if made is None else structs.replace(made, roster=self.roster.digest if pinned else b"")

    def _private(self, protection: Protection) -> dict[str, Any]:
        """What the server does about `[privacy]`, with a ledger of its own that allows anything."""
        config, privacy = self.scene.config, self.scene.config.privacy
        if privacy.unit == "none":
            return {}
        self.ledger = Ledger(replace(privacy.budget, epsilon=BOUNDLESS))
        noise = config.noise()
        if noise is not None:
            return {"privacy_ledger": PrivacyLedger(noise, self.ledger)}
        releases = Releases(trainings=max(1, config.training.rounds))
        clipped, local = client_noise(privacy, releases, protection, self.ledger, system_entropy)
        return {"clipped": clipped, "local": local}

    def _dealt(self) -> tuple[int, ...]:
        """The victim's bucket, of a dealing that was stopped and made again until it has one accomplice and is more than the minimum."""
        bucket: tuple[int, ...] = ()
        while self.dealings < DEALINGS:
            dealing = Dealing(self, self.fed.clients, self.dealings)
            dealing.commit()
            dealing.open()
            self.dealings += 1
            bucket = dealing.bucket(self.victim)
            wanted = len(set(self.identities) & set(bucket)) == min(1, len(self.identities))
            if (wanted and len(bucket) > self.scene.config.protection.smallest_sum) or self.dealings == DEALINGS:
                dealing.keep()
                break
        return bucket

    @property
    def turn(self) -> int:
        """The number by which slots of the round that is on begin."""
        return self.fed.turn + 1

    @property
    def others(self) -> tuple[int, ...]:
        """All clients but the victim."""
        return tuple(client for client in self.clients if client != self.victim)

    @property
    def honest(self) -> tuple[int, ...]:
        """The clients that follow the protocol."""
        return tuple(client for client in self.clients if client not in self.identities)

    def compute(self, on: Sequence[int] | None = None, **changes: Any) -> Held:
        """Have clients train from the honest model; with `changes` another training. The handle of "update"."""
        return self.fed.compute(replace(self.scene.train, **changes), {"model": self.scene.model}, on=on)["update"]

    def number(self, held: Held) -> int:
        """The number that clients know a value by."""
        return int(self.fed.known(held.key)["number"])

    def sum(self, held: Held, on: Collection[int], **options: Any) -> Summed | None:
        """The sum of what some clients hold, None where there is none because clients refused or were too few."""
        before = len(self.liar.refused)
        try:
            (mean,) = self.fed.mean(held, on=sorted(on), **options)
        except ProtocolError:
            return None
        except InputError:
            if len(self.liar.refused) == before:
                raise
            return None
        return None if mean is None else self._summed(mean)

    def _summed(self, mean: GroupMean) -> Summed:
        (value,) = mean.parts.values()
        count = mean.count if mean.weight is None else len(mean.contributors)
        return Summed(np.ravel(np.asarray(value.value(), np.float64)) * count, mean.contributors)

    def known(self, client: int, held: Held) -> Array:
        """What an accomplice holds."""
        return np.ravel(np.asarray(self.controlled[client].values.parts(self.number(held), held.parts)[held.part], np.float64))

    def without_known(self, summed: Summed | None, held: Held) -> Array | None:
        """The mean over the honest clients in a sum that has the victim in it, accomplices' own values taken off."""
        if summed is None or self.victim not in summed.survivors:
            return None
        honest = [client for client in summed.survivors if client not in self.identities]
        theirs = [self.known(client, held) for client in summed.survivors if client in self.identities]
        return np.asarray((summed.total - np.sum([np.zeros_like(summed.total), *theirs], axis=0)) / len(honest))


def _made_up(like: ClientData, client: int) -> ClientData:
    """Data of a client that does not exist: as many samples as `like` has, of noise."""
    rng = np.random.default_rng(client)
    x = rng.normal(size=like.x_train.shape).astype(like.x_train.dtype)
    y = np.zeros_like(like.y_train)
    return ClientData(client, x, y, x[:0], y[:0])
