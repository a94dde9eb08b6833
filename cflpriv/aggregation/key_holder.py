"""The key holder of encrypted similarity, a party apart: bytes in, bytes out, no data, state in a store of its own.

A step of an epoch is one `gram` of the federation: enrolments and requests come in batches and are kept beside the epoch as it was before;
`Finish` makes them part of it and releases, once; asked for again in the same bytes, as where the answer was lost, it gets the same answer
and nothing more. A step that is broken off is started anew, and nothing of it was released.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..clustering.similarity import Gram
from ..contract.operations import GramView, Then
from ..federation import messages as m
from ..federation.enrolment import enrolled, new_session
from ..federation.function_encoding import then_from_bytes
from ..federation.handler import Handler, answered, driven
from ..federation.payloads import check_small
from ..federation.settings import Settings
from ..federation.store import Store
from ..federation.values import Exchange
from ..protocols import ckks, codec
from ..protocols.ckks import KeyHolder
from ..protocols.entropy import Entropy, system_entropy
from ..protocols.errors import MalformedMessage, RemoteError
from ..protocols.keys import Roster
from .ckks_settings import DISTANCES, CkksSettings

__all__ = ["KeyHolderParty"]


class _Step(m.Message, frozen=True):
    """What one step added: its new clients in order, and what was run (empty under release "gram")."""

    clients: tuple[int, ...]
    then: bytes


class _Stored(m.Message, frozen=True):
    """An `_Epoch` as bytes."""

    p: int
    dimension: int
    server: bytes
    machine: bytes
    steps: tuple[_Step, ...]
    asked: bytes
    said: bytes


@dataclass(frozen=True, eq=False)
class _Epoch:
    """An epoch between two messages: the shape of clients' rows, who may ask, the machine, the steps so far, how the last one was asked
    for (`Finish`) and what was said to that. The machine is changed in forks only."""

    p: int
    dimension: int
    server: bytes
    machine: KeyHolder
    steps: tuple[_Step, ...] = ()
    asked: bytes = b""
    said: bytes = b""

    def to_bytes(self) -> bytes:
        return m.encode(_Stored(self.p, self.dimension, self.server, self.machine.to_bytes(), self.steps, self.asked, self.said))


class KeyHolderParty:
    """Makes an epoch's keys, decrypts inner products, runs public code of a fixed list on them, and says what its own settings release.

    Guarantee: that of `protocols.ckks.KeyHolder`. What is released, in which ring and how noised, is what this party's own protection says,
    not the server; an epoch answers the server's key that opened it, at most as many steps as the roster has clients, each once, and ends
    if a step's function fails. Reveals: each step's labels. A server that lies about what it multiplied, or asks for other functions than
    the algorithm's (a threshold of its choice, say), gets labels of that: CKKS is for servers that follow the protocol.
    Active attacks (`attacks.active`): each step once: `repeated_step`; a threshold of the server's choice: `other_function`.
    """

    def __init__(self, settings: Settings, store: Store, entropy: Entropy = system_entropy) -> None:
        self._settings, self._store, self._entropy = settings, store, entropy

    def receive(self, data: bytes) -> bytes:
        """The answer to a request; any bytes are answered. One request at a time works on a store."""
        return answered("key holder", lambda ask: driven(self.handle(ask, Exchange())), data)

    def handle(self, ask: m.Ask, exchange: Exchange) -> Handler:
        """What the key holder does for a request. Raises what it refuses by."""
        with self._store.alone():
            yield from ()  # it asks nobody for anything
            return self._answer(ask)

    def secrets(self) -> dict[str, str]:
        """The secret keys of open epochs as hexadecimal digits. For audits of simulated runs."""
        session, found = self._store.get("session") or b"", {}
        for name in self._store.names():
            kind, _, epoch = name.partition("/")
            if kind == "epoch":
                found[f"ckks_secret_key_{epoch}"] = self._kept(name, session, int(epoch)).machine.secret_key().hex()
        return found

    def _answer(self, ask: m.Ask) -> m.Answer:
        if isinstance(ask, m.Enrol):
            return self._enrol(ask)
        if self._store.get("session") != ask.session:
            raise RemoteError("wrong-session")
        match ask:
            case m.Keys():
                return self._keys(ask)
            case m.Decrypt():
                return self._decrypt(ask)
            case m.Finish():
                return self._finish(ask)
            case m.Drop():
                return self._drop(ask.live)
            case _:  # it has no data
                raise RemoteError("forbidden")

    def _roster(self) -> Roster:
        roster = self._settings.roster
        if roster is None or roster.holder != self._settings.identity.public():
            raise RemoteError("not-on-roster")
        return roster

    def _enrol(self, ask: m.Enrol) -> m.Enrolled:
        if ask.version != m.VERSION:
            raise RemoteError("version")
        self._roster()
        new_session(self._store, ask.session)
        return enrolled(self._settings.identity, ask, "key-holder")

    # --- epochs

    def _keys(self, ask: m.Keys) -> m.Stepped:
        if not self._settings.protection.encrypted:
            raise RemoteError("forbidden")
        self._drop(ask.live)
        if self._store.get(f"epoch/{ask.epoch}") is not None:
            raise RemoteError("replay")
        setup = self._setup(ask.session, ask.epoch, ask.p, ask.dimension)
        if setup.digest != ask.setup:
            raise RemoteError("forbidden")
        machine = KeyHolder(setup, self._settings.identity, ask.server, self._roster(), entropy=self._entropy)
        self._store.keep(f"epoch/{ask.epoch}", _Epoch(ask.p, ask.dimension, ask.server, machine), _Epoch.to_bytes)
        return m.Stepped(machine.announcement)

    def _drop(self, live: Sequence[int]) -> m.Done:
        kept = {str(epoch) for epoch in live}
        self._drop_epochs(lambda epoch: epoch not in kept)
        return m.Done()

    def _drop_epochs(self, gone: Callable[[str], bool]) -> None:
        for name in self._store.names():
            kind, _, epoch = name.partition("/")
            if kind in ("epoch", "pending") and gone(epoch):
                self._store.drop(name)

    def _setup(self, session: bytes, epoch: int, p: int, dimension: int) -> ckks.Setup:
        return CkksSettings.of(self._settings.protection).setup(session, epoch, self._roster(), p, dimension)

    def _kept(self, name: str, session: bytes, epoch: int) -> _Epoch:
        def read(data: bytes) -> _Epoch:
            one = codec.decode(data, _Stored, m.LIMIT_BYTES)
            setup = self._setup(session, epoch, one.p, one.dimension)
            machine = KeyHolder.from_bytes(
                one.machine, setup, self._settings.identity, one.server, self._roster(), entropy=self._entropy
            )  # fmt: skip
            return _Epoch(one.p, one.dimension, one.server, machine, one.steps, one.asked, one.said)

        kept = self._store.load(name, read)
        if kept is None:
            raise RemoteError("not-held")
        return kept

    # --- steps

    def _decrypt(self, ask: m.Decrypt) -> m.Done:
        kept = self._kept(f"epoch/{ask.epoch}" if ask.first else f"pending/{ask.epoch}", ask.session, ask.epoch)
        if ask.step != len(kept.steps):
            raise RemoteError("replay")
        machine = kept.machine.fork()
        for enrolment in ask.enrolments:
            machine.enrol(enrolment)
        for request in ask.requests:
            machine.answer(request)
        self._store.keep(f"pending/{ask.epoch}", replace(kept, machine=machine, asked=b"", said=b""), _Epoch.to_bytes)
        return m.Done()

    def _finish(self, ask: m.Finish) -> m.Answer:
        asked, before = m.encode(ask), self._kept(f"epoch/{ask.epoch}", ask.session, ask.epoch)
        if before.asked == asked:
            return m.decode_answer(before.said)
        fresh_step = bool(ask.clients) and ask.step == len(before.steps)
        kept = self._kept(f"pending/{ask.epoch}", ask.session, ask.epoch) if fresh_step else before
        if ask.step != len(kept.steps):
            raise RemoteError("replay")
        machine = kept.machine
        earlier = {client for step in kept.steps for client in step.clients}
        fresh = set(ask.clients)
        if len(fresh) != len(ask.clients) or fresh & earlier or fresh | earlier != machine.enrolled or not machine.enrolled:
            raise RemoteError("not-enrolled")
        if len(kept.steps) >= machine.setup.most_clients:
            raise RemoteError("over-cap")
        if machine.setup.release != "gram":
            _then(ask.then)
        steps = (*kept.steps, _Step(ask.clients, ask.then))
        try:
            released = self._released(machine, steps)
        except Exception:  # that it failed tells of the Gram, and is told: once an epoch
            self._drop_epochs(lambda epoch: epoch == str(ask.epoch))
            raise
        self._store.keep(f"epoch/{ask.epoch}", replace(kept, steps=steps, asked=asked, said=m.encode(released)), _Epoch.to_bytes)
        self._store.drop(f"pending/{ask.epoch}")
        return released

    def _released(self, machine: KeyHolder, steps: Sequence[_Step]) -> m.Released:
        if machine.setup.release == "gram":
            fresh = set(steps[-1].clients)
            shown = [(pair, block) for pair, block in machine.blocks.items() if fresh & set(pair)]
            return m.Released((), (), tuple((left, right, block) for (left, right), block in shown))
        result, evidence = self._replayed(machine, steps)
        if machine.setup.release == "labels" or not all(name in evidence for name in DISTANCES):
            return m.Released(_named(result), (), ())
        return m.Released(_named(result), _named({name: evidence[name] for name in DISTANCES}), ())

    def _replayed(self, machine: KeyHolder, steps: Sequence[_Step]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The last step's result and evidence. What functions keep for each other comes of running them all again: they are pure."""
        setup, most = machine.setup, self._settings.protection.landmarks
        landmarks = ckks.landmarks_of(setup, steps[0].clients, most) if most else ()
        error = max(ckks.error_std(setup.parameters, setup.packing, setup.group), machine.std)
        order: list[int] = []
        memory: dict[str, Any] = {}
        result: Mapping[str, Any] = {}
        evidence: Mapping[str, Any] = {}
        for step in steps:
            order += step.clients
            matrix = ckks.gram_matrix(order, machine.blocks, landmarks, error)
            gram = Gram.of_matrix(order, matrix, setup.p, ckks.gram_error(setup, matrix, machine.std))
            result, evidence = _then(step.then)(GramView(gram, step.clients, memory))
        try:
            check_small(result, len(order))
        except TypeError:
            raise RemoteError("forbidden") from None
        return result, evidence


def _then(data: bytes) -> Then:
    try:
        return then_from_bytes(data)
    except MalformedMessage:
        raise RemoteError("unknown-task") from None


def _named(values: Mapping[str, Any]) -> tuple[m.Named, ...]:
    return tuple(m.Named(name, np.asarray(value)) for name, value in values.items())
