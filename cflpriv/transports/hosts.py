"""Client hosts of a simulation: all parties in this process, or fixed shares of them in several processes.

The experimenter looks at clients where they are: `each` runs a function at their hosts and brings back its results, which are small. It is
outside the protocol.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from traceback import format_exception
from typing import Any, Protocol, TypeVar
from weakref import ReferenceType

import numpy as np

from ..aggregation.holder_party import party_for
from ..contract.protection import Protection
from ..contract.transcript import LARGEST_DIGESTED_BYTES
from ..engine import Engine, Result, Task
from ..engine.threads import one_thread
from ..errors import InputError, TrainingDiverged, WorkerLost
from ..federation import messages as m
from ..federation.client import FederationClient
from ..federation.host import ClientHost, Party
from ..federation.registry import ClientsLost
from ..federation.settings import Limits, Settings
from ..federation.store import ObjectStore
from ..federation.transforms import TransformCache
from ..plugins import run_plugins
from ..privacy.settings import Privacy
from ..protocols.entropy import Entropy
from ..protocols.errors import ProtocolError
from ..protocols.keys import Identity, Roster
from ..types import Array, ClientData
from .partial_sums import Outline, Remaining, added, may_stay, outlined

__all__ = ["HOLDER", "Carrier", "Evaluated", "Host", "HostLost", "LocalHost", "Look", "Members", "Seat", "SplitHosts", "party_name"]

HOLDER = -2
"""The place of the key holder, where there is one; holder i of several is at HOLDER − i. That of a client is its id."""
MOST_MODELS, MOST_ROUNDS = 1 << 20, 1 << 40
LIMITS = Limits(rounds=MOST_ROUNDS)  # one object for all, so that a request is checked once for all (`SharedWork`)
"""Simulated clients take part in secure sums over as many models as the algorithm declares, and in runs of any length."""
MOST_DEATHS = 3
"""A host that ends this often without an answer in between ends the run."""

Seeds = tuple[int, bytes, bytes]
"""The number and the two seeds of an `Identity`."""
Found = TypeVar("Found")
Look = Callable[..., list[Found]]
"""What the experimenter does at a host: a function of the host, some of its places, and further arguments; one result for each place."""


def party_name(place: int) -> str:
    """The name of a party, by which its entropy is keyed."""
    if place > HOLDER:
        return f"client {place}"
    return "key-holder" if place == HOLDER else f"key-holder {HOLDER - place}"


@dataclass(frozen=True, eq=False)
class Members:
    """All that makes the parties of a host, by place; the rest is the same for all of them. As secret as clients' data.

    `tells`: the experimenter gets the error where a client's data give no value, which no server does.
    """

    identities: Mapping[int, Identity] = field(repr=False)
    data: Mapping[int, ClientData] = field(repr=False)
    stores: Mapping[int, ObjectStore] = field(repr=False)
    entropy: Mapping[int, Entropy] = field(repr=False)
    protection: Protection
    roster: Roster | None
    privacy: Privacy
    strict: bool
    engine: Engine
    tells: bool = True

    def settings(self, place: int) -> Settings:
        """Those of a client, or of a key holder."""
        if place <= HOLDER:
            return Settings(self.identities[place], self.protection, self.roster, role="key-holder")
        return Settings(
            self.identities[place],
            self.protection,
            self.roster,
            self.privacy,
            models=MOST_MODELS,
            limits=LIMITS,
            allow_scores=True,
        )

    def of(self, places: Collection[int]) -> "Members":
        """The same for some places."""
        return replace(
            self,
            identities={place: self.identities[place] for place in places},
            data={place: self.data[place] for place in places if place > HOLDER},
            stores={place: self.stores[place] for place in places},
            entropy={place: self.entropy[place] for place in places},
        )

    def packed(self) -> tuple["Members", dict[int, Seeds], dict[int, dict[str, bytes]]]:
        """The same for another process. Identities and protocol machines refuse to be copied, so they go apart: as seeds, and as bytes."""
        seeds = {place: (identity.client, identity.signing_seed, identity.encryption_seed) for place, identity in self.identities.items()}
        engine = replace(self.engine, paths=Counter(), _pool=None)
        return (
            replace(self, identities={}, stores={}, engine=engine),
            seeds,
            {place: _dumped(store) for place, store in self.stores.items()},
        )


class Host(Protocol):
    """The clients of a simulation, wherever they are. `engine.paths` counts what was computed, everywhere. `count`: of places."""

    @property
    def count(self) -> int: ...

    @property
    def engine(self) -> Engine: ...

    def answer(self, asks: Mapping[int, m.PartyRequest]) -> dict[int, m.Answer | Exception]:
        """Each party's answer, or the error of its refusal; nothing from parties that dropped out."""
        ...

    def each(self, places: Sequence[int], look: Look[Found], *arguments: Any) -> list[Found]:
        """What `look` finds at these places, in their order."""
        ...

    def change(self, data: Mapping[int, ClientData]) -> None:
        """Clients have these data from now on, also where their host begins again."""
        ...

    def stores(self) -> Mapping[int, ObjectStore]:
        """What every party keeps, by place."""
        ...

    def close(self) -> None:
        """End the processes, if any."""
        ...


@dataclass(frozen=True, eq=False)
class Evaluated:
    """What a task gave for a client's model, which is kept by a weak reference."""

    task: Task
    vector: "ReferenceType[Any]"
    result: Result

    def is_of(self, task: Task, vector: Any) -> bool:
        """Whether it is the result of this task for this same object."""
        return self.task == task and self.vector() is vector


class LocalHost(ClientHost):
    """All `members` in this process. `evaluated` has the last scores of each client's local model, so that one that did not change is not
    evaluated again.
    """

    def __init__(self, members: Members) -> None:
        cache = TransformCache()
        parties: dict[int, Party] = {}
        current = dict(members.data)
        for place in members.identities:
            settings, store, entropy = members.settings(place), members.stores[place], members.entropy[place]
            if place <= HOLDER:
                parties[place] = party_for(settings.protection)(settings, store, entropy)
            else:
                data = partial(current.__getitem__, place)
                parties[place] = FederationClient(settings, data, store, entropy, cache=cache, strict=members.strict)
        super().__init__(parties, members.engine)
        self.count = 1
        self.postpones = members.tells  # else a client whose training fails would drop out one message later
        self.members, self._current = members, current
        self.evaluated: dict[int, Evaluated] = {}

    def change(self, data: Mapping[int, ClientData]) -> None:
        self._current.update(data)
        for place in data:
            self.evaluated.pop(place, None)

    def answer(self, asks: Mapping[int, m.PartyRequest]) -> dict[int, m.Answer | Exception]:
        answers = super().answer(asks)
        for place in answers if self.members.tells else ():
            if failures := getattr(self.parties[place], "failures", ()):
                answers[place] = failures[0]
        return answers

    def client(self, place: int) -> FederationClient:
        """One of the clients. Raises `InputError` for another place."""
        party = self.parties.get(place)
        if not isinstance(party, FederationClient):
            raise InputError(f"client {place} is not one of this federation")
        return party

    def each(self, places: Sequence[int], look: Look[Found], *arguments: Any) -> list[Found]:
        return look(self, places, *arguments)

    def stores(self) -> Mapping[int, ObjectStore]:
        return self.members.stores

    def close(self) -> None:
        self.engine.close()


# --- several hosts


class HostLost(Exception):
    """The process of a host has ended, or cannot be reached. What its clients did since their stores were last read is lost."""


class Carrier(Protocol):
    """Processes with a `Seat` each, numbered from 0. What passes between them never comes from anyone else."""

    count: int

    def send(self, number: int, operation: str, *arguments: Any) -> Any:
        """Have a seat carry out an operation after the earlier ones; the pending reply."""
        ...

    def reply(self, pending: Any) -> Any:
        """A reply, when it is there. Raises the seat's own error, or `HostLost`."""
        ...

    def restart(self, number: int) -> None:
        """Put a new, empty seat in the place of one that was lost."""
        ...


class Seat:
    """A host in a process of its own, which a carrier drives: messages as bytes in, bytes out."""

    def __init__(self, plugins: Mapping[str, bytes]) -> None:
        run_plugins(plugins)  # tasks are of classes, and models by names, that they define; the file may be another on this machine

    def begin(self, members: Members, seeds: Mapping[int, Seeds], kept: Mapping[int, Mapping[str, bytes]]) -> None:
        """Make the parties of what `Members.packed` gave, in place of earlier ones."""
        identities = {place: Identity(*seed) for place, seed in seeds.items()}
        stores = {place: ObjectStore(store) for place, store in kept.items()}
        self._protection, self._left = members.protection, dict[int, m.Given]()
        self._host = LocalHost(replace(members, identities=identities, stores=stores, data=_writable(members.data)))

    def answer(
        self, asks: Mapping[int, bytes], of: Mapping[int, int], stay_bytes: int
    ) -> tuple[dict[int, bytes | Outline | Exception], Counter[tuple[str, str]]]:
        """The answer of each place to the request that `of` names, and the paths taken; requests that are equal arrive once.

        Updates for a plain sum stay here if they are more than `stay_bytes` together.
        """
        arrived = {key: m.decode_ask(data) for key, data in asks.items()}
        answers: dict[int, bytes | Outline | Exception] = {}
        with one_thread():
            made = self._host.answer({place: arrived[key] for place, key in of.items()})
            large = {
                place: given
                for place, given in made.items()
                if isinstance(given, m.Given) and may_stay(arrived[of[place]], self._protection)
            }
            outlines = {place: outlined(given) for place, given in large.items()}
            self._left = large if sum(outline.nbytes for outline in outlines.values()) > stay_bytes else {}
            for place, answer in made.items():
                try:
                    sent = _sendable(answer) if isinstance(answer, Exception) else m.encode(answer) if place not in self._left else None
                    answers[place] = outlines[place] if sent is None else sent
                except InputError as error:
                    answers[place] = error
        return answers, self._paths()

    def added(self, at: Sequence[tuple[int, str]], weights: Sequence[float]) -> Array:
        """The weighted sum of values that stayed here after the last request, by place and name, in float64."""
        with one_thread():
            return added(self._left, at, weights)

    def each(self, places: Sequence[int], look: Look[Any], arguments: Sequence[Any]) -> tuple[list[Any], Counter[tuple[str, str]]]:
        """What the experimenter finds at these places, and the paths taken."""
        with one_thread():
            return look(self._host, places, *arguments), self._paths()

    def _paths(self) -> Counter[tuple[str, str]]:
        paths, self._host.engine.paths = self._host.engine.paths, Counter()
        return paths


def _writable(data: Mapping[int, ClientData]) -> dict[int, ClientData]:
    """The same data in arrays of this process: those that arrive may be read-only views of shared memory."""
    copies: dict[int, Any] = {}

    def copied(array: Any) -> Any:
        if id(array) not in copies:  # clients may share test data
            copies[id(array)] = np.array(array)
        return copies[id(array)]

    def whole(client: ClientData) -> ClientData:
        held_out = None if client.held_out is None else (copied(client.held_out[0]), copied(client.held_out[1]))
        x_train, y_train, x_test, y_test = map(copied, (client.x_train, client.y_train, client.x_test, client.y_test))
        return ClientData(client.id, x_train, y_train, x_test, y_test, held_out)

    return {client: whole(own) for client, own in data.items()}


def _sendable(error: Exception) -> Exception:
    """An error that another process can read. One that is none of ours becomes text, with its traceback as a note."""
    if isinstance(error, ProtocolError | InputError | TrainingDiverged | WorkerLost):
        return error.with_traceback(None)
    as_text = RuntimeError(f"{type(error).__name__}: {error}")
    as_text.add_note("".join(format_exception(error)))
    return as_text


class SplitHosts:
    """Fixed shares of the clients at the seats of a carrier: place i of all, in order, is at seat i modulo their number.

    The clients of a host that ends drop out of the exchange. A new host takes its place, whose clients have what the stores held when
    `stores` was last called; without such a call they have lost their state. They enrol anew when clients are next greeted. `fresh` gives
    a new source of entropy by its name, so that a party which begins again repeats nothing. `notify` gets a line for each host that ends.

    Raises `InputError` where the engine is to use a CUDA device, and `WorkerLost` if one host ends `MOST_DEATHS` times without an answer.
    """

    def __init__(
        self, members: Members, fresh: Callable[[str], Entropy], carrier: Carrier, notify: Callable[[str], None] = lambda line: None
    ) -> None:
        if members.engine.device != "cpu":
            raise InputError(f"run.device = {members.engine.device!r}: several hosts compute on CPUs; use 'cpu', or one host")
        self.engine = members.engine
        self._members, self._fresh, self._carrier, self._notify = members, fresh, carrier, notify
        places = sorted(members.identities)
        self.count = carrier.count
        self._shares = [share for number in range(carrier.count) if (share := places[number :: carrier.count])]
        self._at = {place: number for number, share in enumerate(self._shares) for place in share}
        self._deaths = [0] * len(self._shares)
        self._restarts = 0
        self._alive({number: self._begin(number, members) for number in range(len(self._shares))})

    def answer(self, asks: Mapping[int, m.PartyRequest]) -> dict[int, m.Answer | Exception]:
        encoded = {id(ask): m.encode(ask) for ask in {id(ask): ask for ask in asks.values()}.values()}
        pending, stay_bytes = {}, LARGEST_DIGESTED_BYTES // len(self._shares)
        for number, share in self._split(asks):
            of = {place: id(asks[place]) for place in share}
            pending[number] = self._carrier.send(number, "answer", {key: encoded[key] for key in set(of.values())}, of, stay_bytes)
        arrived: dict[int, m.Answer | Exception] = {}
        for number, (answers, paths) in self._alive(pending).items():
            self.engine.paths.update(paths)
            arrived |= {place: self._arrived(number, place, answer) for place, answer in answers.items()}
        return arrived

    def each(self, places: Sequence[int], look: Look[Found], *arguments: Any) -> list[Found]:
        """Asks the hosts that ended meanwhile again, after their restart."""
        arrived: dict[int, Found] = {}
        while missing := [place for place in places if place not in arrived]:
            shares = dict(self._split(missing))
            pending = {number: self._carrier.send(number, "each", share, look, arguments) for number, share in shares.items()}
            for number, (results, paths) in self._alive(pending).items():
                self.engine.paths.update(paths)
                arrived |= zip(shares[number], results, strict=True)
        return [arrived[place] for place in places]

    def change(self, data: Mapping[int, ClientData]) -> None:
        self._members = replace(self._members, data={**self._members.data, **data})
        for place, own in data.items():  # each at its own host, which gets no other client's data
            self.each([place], _change, own)

    def stores(self) -> Mapping[int, ObjectStore]:
        """Read from the hosts, encoded. From here a host that ends later begins again."""
        places = list(self._at)
        kept = self.each(places, _kept)
        self._members = replace(self._members, stores={place: ObjectStore(store) for place, store in zip(places, kept, strict=True)})
        return self._members.stores

    def close(self) -> None:
        """Nothing: who made the carrier ends it."""

    def _arrived(self, number: int, place: int, answer: bytes | Outline | Exception) -> m.Answer | Exception:
        if isinstance(answer, Outline):
            fetch = partial(self._added, number)
            left = (m.NamedArray(name, Remaining(number, (place, name), outline, fetch)) for name, *outline in answer.parts)  # type: ignore[arg-type]
            return m.Given(tuple(left), answer.samples)
        return answer if isinstance(answer, Exception) else m.decode_answer(answer)

    def _added(self, number: int, at: Sequence[tuple[int, str]], weights: Sequence[float]) -> Array:
        """A sum of updates that are at a host. Raises `ClientsLost` if it has ended meanwhile: the step is taken again without them."""
        arrived = self._alive({number: self._carrier.send(number, "added", at, weights)})
        if number not in arrived:
            raise ClientsLost([place for place, _ in at])
        total: Array = arrived[number]
        return total

    def _split(self, places: Collection[int]) -> Iterator[tuple[int, list[int]]]:
        """The hosts of these places, each with its part of them."""
        for number, share in enumerate(self._shares):
            if some := [place for place in share if place in places]:
                yield number, some

    def _begin(self, number: int, members: Members) -> Any:
        return self._carrier.send(number, "begin", *members.of(self._shares[number]).packed())

    def _alive(self, pending: Mapping[int, Any]) -> dict[int, Any]:
        """The replies of the hosts that are alive; the others are restarted."""
        replies = {}
        for number, reply in pending.items():
            try:
                replies[number] = self._carrier.reply(reply)
            except HostLost as error:
                self._restart(number, str(error))
            else:
                self._deaths[number] = 0
        return replies

    def _restart(self, number: int, why: str) -> None:
        self._deaths[number] += 1
        self._restarts += 1
        if self._deaths[number] >= MOST_DEATHS:
            raise WorkerLost(f"host {number} ended {MOST_DEATHS} times in a row: {why}")
        share = self._shares[number]
        self._notify(f"host {number} ended ({why}): its {len(share)} parties drop out, and begin again from what was last saved of them")
        self._carrier.restart(number)
        entropy = {place: self._fresh(f"{party_name(place)}, restart {self._restarts}") for place in share}
        self._begin(number, replace(self._members, entropy={**self._members.entropy, **entropy}))


def _change(host: LocalHost, places: Sequence[int], data: ClientData) -> list[None]:
    host.change(dict.fromkeys(places, data))
    return [None] * len(places)


def _kept(host: LocalHost, places: Sequence[int]) -> list[dict[str, bytes]]:
    return [_dumped(host.members.stores[place]) for place in places]


def _dumped(store: ObjectStore) -> dict[str, bytes]:
    return {name: store.dumped(name) for name in store.names()}
