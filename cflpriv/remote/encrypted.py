"""The server's side of `gram` under `ckks`: it relays, multiplies what it cannot read, and asks the key holder, who is a party apart."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np

from ..channels import Recorder
from ..encrypted import BATCH, DISTANCES, Settings, workload
from ..epochs import Epoch, Epochs
from ..errors import InputError
from ..federation import GramView, Then
from ..handles import Held, Released
from ..protection import Protection
from ..protocols import ckks
from ..protocols.ckks import Identity, Setup
from ..protocols.entropy import Entropy
from ..protocols.errors import LocalError, MalformedMessage, ProtocolError, RemoteError
from ..protocols.keys import Roster
from ..similarity import Gram
from ..types import Array, check_array
from ..wire import check_small
from . import messages as m
from .encrypting import sketch_dim
from .gram import check_new
from .roll import KEY_HOLDER, ClientsLost, EpochEnded, KeyHolderLost, Roll
from .thens import fits, then_to_bytes

__all__ = ["EncryptedGrams"]


class EncryptedEpoch:
    """What the server has of one clustering epoch: ciphertexts, who is in it in which order, and blocks if they are released."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.machine: ckks.Server | None = None
        self.announcement = b""
        self.order: list[int] = []
        self.steps = 0
        self.blocks: dict[tuple[int, int], Array] = {}

    def saved(self) -> dict[str, Any]:
        """Nothing: an epoch ends with the server's process, which has the ciphertexts."""
        return {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """An epoch that nothing can be added to."""


class EncryptedGrams:
    """Clustering epochs over messages under `ckks`.

    Guarantee: the server sees ciphertexts and what the release says; see `protocols.ckks`. Clients check for themselves whose key they
    encrypt under, and the key holder which terms it makes keys for. Reveals: the same as in one process; also when each party answers.

    Raises `InputError` for settings that do not fit each other, without a key holder on the roster, and for `ckks_mode = "symmetric"`, in
    which every client would be given the key that opens all, through the server, for labels that the public key gives as well.
    """

    where: Literal["key-holder"] = "key-holder"
    evidence = False

    def __init__(self, roll: Roll, session: bytes, protection: Protection, roster: Roster | None, entropy: Entropy) -> None:
        if roster is None or not roster.holder:
            raise InputError("protection.gram: 'ckks' needs the clients' pinned roster, with the key of the key holder on it")
        if protection.ckks_mode == "symmetric":
            raise InputError(
                "protection.ckks_mode: 'symmetric' gives every client the key to all vectors and is not carried to clients elsewhere; use "
                "'public-key'"
            )
        self._roll, self._session, self._protection, self._roster, self._entropy = roll, session, protection, roster, entropy
        self._settings = Settings.of(protection, sketch_dim(protection))
        try:
            ckks.arithmetic(self._settings.parameters())
        except LocalError as error:
            raise InputError(f"protection.gram: 'ckks': {error}") from None
        self._identity = Identity.create(0, entropy)
        self.epochs = Epochs(self)

    def open(self, epoch: int) -> EncryptedEpoch:
        return EncryptedEpoch(epoch)

    def close(self, held: Held) -> None:
        """Close an epoch; the key holder is told to drop its keys, and drops them at the next epoch if it does not hear that."""
        self.epochs.close(held)
        if self._roll.holder:
            with suppress(KeyHolderLost):
                self._roll.ask_holder(m.Drop(self._session, self._live()), "ckks close")

    def end(self) -> None:
        """Close all epochs: the run is over, and the key holder keeps no key of it."""
        self.epochs.entered.clear()
        if self._roll.holder:
            with suppress(KeyHolderLost):
                self._roll.ask_holder(m.Drop(self._session, ()), "ckks close")

    def _live(self) -> tuple[int, ...]:
        """The epochs that something can be added to."""
        entered = [epoch for entries in self.epochs.entered.values() for _, epoch in entries]
        return tuple(sorted({epoch.number for epoch in entered if epoch.session.machine is not None}))

    def gram(
        self, held: Held, number: int, clients: Sequence[int], then: Then, against: Held | None, record: Recorder, shape: tuple[int, ...]
    ) -> Released:  # fmt: skip
        """Have `clients` encrypt their vectors of `held`, of public `shape`, and the key holder run `then`.

        Raises `ClientsLost` without all clients, `KeyHolderLost` without the key holder: the step can then be taken again; `EpochEnded` for
        an epoch of an earlier process.
        """
        code = b"" if self._settings.release == "gram" else then_to_bytes(then)
        epoch = self._epoch(held, clients, against, shape)
        session = self._begun(epoch)
        uploads = self._uploads(held, number, clients, session, record)
        try:
            said = self._step(clients, uploads, session, code, record)
            seen = self._gram(said, clients, epoch) if self._settings.release == "gram" else self._released(said, clients, then, epoch)
        except ProtocolError:
            self._machine(session).withdraw(clients)
            raise
        session.order += clients
        session.steps += 1
        epoch.clients += clients
        if clients:
            self.epochs.enter(held, epoch)
        if isinstance(seen, Released):
            self._note(seen, epoch.number, record)
            return seen
        return self._clustered(seen, said, clients, then, epoch, record)

    # --- epochs

    def _epoch(self, held: Held, clients: Sequence[int], against: Held | None, shape: tuple[int, ...]) -> Epoch[EncryptedEpoch]:
        """The epoch to extend, or a new one: a step that is taken again from the start uses up another number, and other keys."""
        epoch = None if against is None else self.epochs.of(against)
        check_new(clients, epoch)
        if clients and len(shape) not in (1, 2):
            raise InputError(f"gram: {held.part} has shape {shape or 'that differs from client to client'}; pad to one public shape")
        rows = (1, *shape)[-2:]
        if epoch is None:
            return self.epochs.open((rows[0], rows[1]))
        if clients and rows != epoch.shape:
            raise InputError(f"gram: {held.part} has different shapes {sorted({rows, epoch.shape})}; pad to one public shape")
        return epoch

    def _begun(self, epoch: Epoch[EncryptedEpoch]) -> EncryptedEpoch:
        """The epoch's keys and the server's machine, made when it is new."""
        session = epoch.session
        if session.machine is not None:
            return session
        if epoch.clients:
            raise EpochEnded(epoch.number)
        p, dimension = epoch.shape
        try:
            setup = self._settings.setup(self._session, epoch.number, self._roster, p, dimension)
        except LocalError as error:
            remedy = '; use gram = ["sketch", "ckks"]' if error.code == "too-long" else ""
            raise InputError(f"protection.gram: 'ckks' with {p} vectors of {dimension} numbers a client: {error}{remedy}") from None
        ask = m.Keys(self._session, epoch.number, p, dimension, setup.digest, self._identity.public(), self._live())
        answer = self._roll.ask_holder(ask, "ckks keys")
        try:
            if not isinstance(answer, m.Stepped):
                raise MalformedMessage
            session.machine = ckks.Server(
                setup, answer.said, self._roster.holder, self._roster, self._identity, landmarks=self._settings.landmarks,
                entropy=self._entropy,
            )  # fmt: skip
        except RemoteError as error:
            raise self._refused("ckks keys", error.code) from None
        session.announcement = answer.said
        return session

    def _refused(self, stage: str, word: str) -> KeyHolderLost:
        self._roll.refusals.append((KEY_HOLDER, stage, word))
        return KeyHolderLost(stage, word)

    @staticmethod
    def _machine(session: EncryptedEpoch) -> ckks.Server:
        assert session.machine is not None
        return session.machine

    # --- one step

    def _uploads(
        self, held: Held, number: int, clients: Sequence[int], session: EncryptedEpoch, record: Recorder
    ) -> dict[int, bytes]:  # fmt: skip
        """The upload of each client. Raises `ClientsLost` without all; what came is on record also then."""
        if not clients:
            return {}
        machine = self._machine(session)
        epoch = m.Epoch(session.number, machine.setup.digest, session.announcement)
        give = m.Give(self._session, "gram", number, (held.part,), "", False, None, epoch)
        uploads: dict[int, bytes] = {}
        for client, answer in sorted(self._roll.ask(dict.fromkeys(clients, give), "gram").items()):
            try:
                uploads[client] = _bytes_of(answer)
                machine.check(uploads[client], client)
            except RemoteError as error:
                uploads.pop(client, None)
                self._roll.refusals.append((client, "gram", error.code))
        if uploads:
            context, came = {"epoch": session.number}, [client for client in clients if client in uploads]
            sent = _payloads(uploads[client] for client in came)
            record(held.part, "clients", "server", came, sent, readers=("server",), context=context)
            key = _payloads([session.announcement])[0]
            record("ckks key", "key-holder", "clients", came, key, readers=("key-holder", "server", "clients"), context=context)
        lost = sorted(set(clients) - set(uploads))
        for client in lost:  # also who refused: it would again
            self._roll.lose(client)
        if lost:
            raise ClientsLost(lost)
        return {client: uploads[client] for client in clients}

    def _step(
        self, clients: Sequence[int], uploads: Mapping[int, bytes], session: EncryptedEpoch, code: bytes, record: Recorder
    ) -> m.Released:  # fmt: skip
        machine = self._machine(session)
        context = {"epoch": session.number}
        enrolments = [machine.receive(upload) for upload in uploads.values()]
        if clients:
            record(
                "ckks enrolment", "server", "key-holder", clients, _payloads(enrolments), readers=("server", "key-holder"), context=context
            )
            place, first = session.steps, True
            for batch in self._batches(machine, clients):
                told = tuple(enrolments) if first else ()
                ask = m.Decrypt(self._session, session.number, place, first, told, tuple(batch))
                if not isinstance(self._roll.ask_holder(ask, "ckks decrypt"), m.Done):
                    raise self._refused("ckks decrypt", "malformed")
                first = False
                parties = [clients[0]] * len(batch)  # which pair it is stands inside; the header need not repeat it
                record("ckks request", "server", "key-holder", parties, _payloads(batch), readers=("server", "key-holder"), context=context)
        finish = m.Finish(self._session, session.number, session.steps, tuple(clients), code)
        answer = self._roll.ask_holder(finish, "ckks finish")
        if not isinstance(answer, m.Released):
            raise self._refused("ckks finish", "malformed")
        return answer

    def _batches(self, machine: ckks.Server, new: Sequence[int]) -> Iterator[list[bytes]]:
        """The requests for new clients, some at a time, computed on as many processes as pays."""
        jobs = machine.jobs(new)
        count, _ = workload(machine.setup, machine.public_key, jobs, self._settings.workers)
        workers = ckks.Workers(count) if count > 1 else None
        batch: list[bytes] = []
        try:
            for request in machine.requests(jobs, workers):
                batch.append(request)
                if len(batch) == BATCH:
                    yield batch
                    batch = []
            if batch:
                yield batch
        finally:
            if workers is not None:
                workers.close()

    # --- what comes back

    def _released(self, said: m.Released, clients: Sequence[int], then: Then, epoch: Epoch[EncryptedEpoch]) -> Released:
        """Labels, and distances where these are released. Raises `KeyHolderLost` for anything else."""
        order = (*epoch.clients, *clients)
        try:
            result = {one.name: m.from_tensor(one.value) for one in said.result}
            evidence = {one.name: m.from_tensor(one.value) for one in said.evidence}
            check_small(result, len(order))
            if not fits(then, result, len(order), len(clients)):
                raise MalformedMessage
            if evidence:
                _check_evidence(evidence, order, self._settings.release)
        except (MalformedMessage, TypeError, InputError):
            raise self._refused("ckks finish", "malformed") from None
        plain = {name: value if value.ndim else value.item() for name, value in result.items()}
        return Released(plain, {name: _plain(value) for name, value in evidence.items()} if evidence else None)

    @staticmethod
    def _note(seen: Released, number: int, record: Recorder) -> None:
        for kind, values in (("result", seen.result), ("evidence", seen.evidence)):
            if values is not None:
                payload = {name: np.asarray(value) for name, value in values.items()}
                record(kind, "key-holder", "server", (), payload, readers=("server", "key-holder"), context={"epoch": number})

    def _gram(self, said: m.Released, clients: Sequence[int], epoch: Epoch[EncryptedEpoch]) -> Gram:
        """Under release "gram": the Gram matrix with new, noised and rounded blocks. Raises `KeyHolderLost` if these do not make one."""
        session = epoch.session
        machine = self._machine(session)
        setup, order = machine.setup, [*session.order, *clients]
        error = max(ckks.error_std(setup.parameters, setup.packing), _std(setup))
        try:
            fresh = {(left, right): check_array("block", m.from_tensor(value)) for left, right, value in said.blocks}
            pairs = {frozenset(pair) for pair in fresh}
            fit = all(block.shape == (setup.p, setup.p) for block in fresh.values())
            if not fit or len(pairs) < len(said.blocks) or any(not pair <= set(order) or not pair & set(clients) for pair in pairs):
                raise MalformedMessage
            matrix = ckks.gram_matrix(order, session.blocks | fresh, machine.landmarks, error)
            session.blocks |= fresh
            return Gram.of_matrix(order, matrix, setup.p, error)
        except (MalformedMessage, InputError, LocalError):
            raise self._refused("ckks finish", "malformed") from None

    def _clustered(
        self, gram: Gram, said: m.Released, clients: Sequence[int], then: Then, epoch: Epoch[EncryptedEpoch], record: Recorder
    ) -> Released:  # fmt: skip
        """Under release "gram" the server runs `then` itself."""
        if said.blocks:
            payload = [{"pair": np.array((left, right)), "block": m.from_tensor(block)} for left, right, block in said.blocks]
            context = {"epoch": epoch.number, "std": _std(self._machine(epoch.session).setup)}
            lefts = [left for left, _, _ in said.blocks]
            record("gram", "key-holder", "server", lefts, payload, readers=("key-holder", "server"), context=context)
        result, evidence = then(GramView(gram, tuple(clients), epoch.memory))
        check_small(result, gram.n)
        return Released(result, evidence)


def _std(setup: Setup) -> float:
    return ckks.release_std(setup.parameters, setup.packing, setup.scalars)


def _check_evidence(evidence: Mapping[str, Array], order: Sequence[int], release: str) -> None:
    """Whether these are distances of these clients. Raises `MalformedMessage`, `InputError`."""
    if release != "distances" or set(evidence) != set(DISTANCES):
        raise MalformedMessage
    distance = check_array("distance", evidence["distance"])
    if distance.shape != (len(order), len(order)) or evidence["clients"].tolist() != list(order):
        raise MalformedMessage


def _plain(value: Array) -> Any:
    """Clients are a tuple, a matrix is an array."""
    return tuple(value.tolist()) if value.ndim == 1 else value


def _bytes_of(answer: m.Answer) -> bytes:
    """An upload's bytes. Raises `MalformedMessage`."""
    if not isinstance(answer, m.Given) or [one.name for one in answer.values] != ["bytes"] or answer.values[0].value.dtype != "|u1":
        raise MalformedMessage
    return m.from_tensor(answer.values[0].value).tobytes()


def _payloads(said: Any) -> list[dict[str, Array]]:
    return [{"bytes": np.frombuffer(one, dtype=np.uint8)} for one in said]
