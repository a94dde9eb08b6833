"""The key holder of encrypted comparisons, a separate party (`holder_party`).

A step of an epoch is one `gram` of the federation. Enrolments and requests arrive in batches and are kept beside the epoch until `Finish`
adds them to it and releases the result, once. The same `Finish` again, after its answer was lost, gets the same answer. An interrupted step
starts anew; nothing of it was released.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from ..clustering.similarity import Gram
from ..federation import messages as m
from ..protocols import ckks, codec
from ..protocols.ckks import KeyHolder
from ..protocols.errors import RemoteError
from .ckks_settings import DISTANCES, CkksSettings
from .holder_party import HolderParty, HolderStep, named, replayed, then_of

__all__ = ["KeyHolderParty"]


class _Stored(m.FederationMessage, frozen=True):
    """An epoch: the shape of clients' rows, the server's public key, the machine, the steps, the last `Finish` and its answer."""

    p: int
    dimension: int
    server: bytes
    machine: bytes = b""
    steps: tuple[HolderStep, ...] = ()
    asked: bytes = b""
    answer: bytes = b""


@dataclass(frozen=True, eq=False)
class _Epoch:
    """An epoch between messages: `stored`, but with a live machine, which is changed in forks only."""

    stored: _Stored
    machine: KeyHolder

    def to_bytes(self) -> bytes:
        return m.encode(structs.replace(self.stored, machine=self.machine.to_bytes()))


class KeyHolderParty(HolderParty):
    """Makes an epoch's keys, decrypts inner products, runs functions of a fixed list on them, and releases what its own settings allow.

    Guarantee: that of `protocols.ckks.KeyHolder`. This party's own protection decides what is released, in which ring and with which noise.
    An epoch answers only the server's key that opened it, each step once, at most as many steps as the roster has clients, and ends if a
    step's function fails. Reveals: each step's labels. A server that lies about its products, or asks for another function than the
    algorithm's (such as a threshold of its choice), gets the labels of that: CKKS is for servers that follow the protocol.
    Active attacks (`attacks.active`): each step once: `repeated_step`; a threshold of the server's choice: `other_function`.
    """

    def secrets(self) -> dict[str, str]:
        """The secret keys of open epochs as hexadecimal digits. For audits of simulated runs."""
        session, keys = self._store.get("session") or b"", {}
        for name in self._store.names():
            kind, _, epoch = name.partition("/")
            if kind == "epoch":
                keys[f"ckks_secret_key_{epoch}"] = self._kept(name, session, int(epoch)).machine.secret_key().hex()
        return keys

    def _of_epoch(self, ask: m.PartyRequest) -> m.Answer:
        match ask:
            case m.Keys():
                return self._keys(ask)
            case m.Decrypt():
                return self._decrypt(ask)
            case m.Finish():
                return self._finish(ask)
            case _:  # it has no data
                raise RemoteError("forbidden")

    # --- epochs

    def _keys(self, ask: m.Keys) -> m.Stepped:
        if not self._settings.protection.encrypted or self._settings.protection.comparison.shared:
            raise RemoteError("forbidden")
        self._drop(ask.live)
        if self._store.get(f"epoch/{ask.epoch}") is not None:
            raise RemoteError("replay")
        setup = self._setup(ask.session, ask.epoch, ask.p, ask.dimension)
        if setup.digest != ask.setup:
            raise RemoteError("forbidden")
        machine = KeyHolder(setup, self._settings.identity, ask.server, self._roster(), entropy=self._entropy)
        self._store.keep(f"epoch/{ask.epoch}", _Epoch(_Stored(ask.p, ask.dimension, ask.server), machine), _Epoch.to_bytes)
        return m.Stepped(machine.announcement)

    def _setup(self, session: bytes, epoch: int, p: int, dimension: int) -> ckks.Setup:
        return CkksSettings.of(self._settings.protection).setup(session, epoch, self._roster(), p, dimension)

    def _kept(self, name: str, session: bytes, epoch: int) -> _Epoch:
        def read(data: bytes) -> _Epoch:
            stored = codec.decode(data, _Stored, m.LIMIT_BYTES)
            setup = self._setup(session, epoch, stored.p, stored.dimension)
            machine = KeyHolder.from_bytes(
                stored.machine, setup, self._settings.identity, stored.server, self._roster(), entropy=self._entropy
            )  # fmt: skip
            return _Epoch(stored, machine)

        kept = self._store.load(name, read)
        if kept is None:
            raise RemoteError("not-held")
        return kept

    # --- steps

    def _decrypt(self, ask: m.Decrypt) -> m.Acknowledged:
        kept = self._kept(f"epoch/{ask.epoch}" if ask.first else f"pending/{ask.epoch}", ask.session, ask.epoch)
        if ask.step != len(kept.stored.steps):
            raise RemoteError("replay")
        machine = kept.machine.fork()
        for enrolment in ask.enrolments:
            machine.enrol(enrolment)
        for request in ask.requests:
            machine.answer(request)
        stored = structs.replace(kept.stored, asked=b"", answer=b"")
        self._store.keep(f"pending/{ask.epoch}", _Epoch(stored, machine), _Epoch.to_bytes)
        return m.Acknowledged()

    def _finish(self, ask: m.Finish) -> m.Answer:
        asked, before = m.encode(ask), self._kept(f"epoch/{ask.epoch}", ask.session, ask.epoch)
        if before.stored.asked == asked:
            return m.decode_answer(before.stored.answer)
        fresh_step = bool(ask.clients) and ask.step == len(before.stored.steps)
        kept = self._kept(f"pending/{ask.epoch}", ask.session, ask.epoch) if fresh_step else before
        machine, earlier_steps = kept.machine, kept.stored.steps
        if ask.step != len(earlier_steps):
            raise RemoteError("replay")
        earlier = {client for step in earlier_steps for client in step.clients}
        fresh = set(ask.clients)
        if len(fresh) != len(ask.clients) or fresh & earlier or fresh | earlier != machine.enrolled or not machine.enrolled:
            raise RemoteError("not-enrolled")
        if len(earlier_steps) >= machine.setup.most_clients:
            raise RemoteError("over-cap")
        if machine.setup.release != "gram":
            then_of(ask.then)
        steps = (*earlier_steps, HolderStep(ask.clients, ask.then))
        try:
            released = self._released(machine, steps)
        except Exception:  # the failure reveals something of the Gram matrix, so it ends the epoch
            self._drop_epochs(lambda epoch: epoch == str(ask.epoch))
            raise
        stored = structs.replace(kept.stored, steps=steps, asked=asked, answer=m.encode(released))
        self._store.keep(f"epoch/{ask.epoch}", _Epoch(stored, machine), _Epoch.to_bytes)
        self._store.drop(f"pending/{ask.epoch}")
        return released

    def _released(self, machine: KeyHolder, steps: Sequence[HolderStep]) -> m.HolderRelease:
        if machine.setup.release == "gram":
            fresh = set(steps[-1].clients)
            shown = [(pair, block) for pair, block in machine.blocks.items() if fresh & set(pair)]
            return m.HolderRelease((), (), tuple((left, right, block) for (left, right), block in shown))
        result, evidence = self._replayed(machine, steps)
        if machine.setup.release == "labels" or not all(name in evidence for name in DISTANCES):
            return m.HolderRelease(named(result), (), ())
        return m.HolderRelease(named(result), named({name: evidence[name] for name in DISTANCES}), ())

    def _replayed(self, machine: KeyHolder, steps: Sequence[HolderStep]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The last step's result and evidence."""
        setup, most = machine.setup, self._settings.protection.landmarks
        landmarks = ckks.landmarks_of(setup, steps[0].clients, most) if most else ()
        error = max(ckks.error_std(setup.parameters, setup.packing, setup.group), machine.std)

        def gram_of(order: list[int]) -> Gram:
            matrix = ckks.gram_matrix(order, machine.blocks, landmarks, error)
            return Gram.of_matrix(order, matrix, setup.p, ckks.gram_error(setup, matrix, machine.std))

        return replayed(steps, gram_of)
