"""Encrypted inner products: clients encrypt, the server multiplies what it cannot read, a key holder decrypts (`key_holder`).

Guarantee: see `protocols.ckks`; keys are fresh for every clustering epoch. Under `ckks_release = "labels"` the server learns what `then`
returns, labels and small integers, and nothing of the similarities; under "distances" also the matrix of distances, from inner products
that were noised first; under "gram" the noised, rounded Gram matrix and nothing else. Clients check for themselves whose key they encrypt
under, and the key holder which terms it makes keys for.
Reveals: the exact Gram matrix to the key holder, everything to it and the server together; when each party answers. Labels come from exact
values: the noise that protects decryptions is for what is released as numbers, and clients that encrypt what they like buy bits with
theirs.
Active attacks (`attacks.active`): whose key: `swapped_holder`; what the key holder runs, and how often: `other_function`, `repeated_step`.
Source: `protocols.ckks`.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

import numpy as np

from ..clustering.similarity import Gram
from ..contract.calls import Recorder
from ..contract.handles import Held, Released
from ..contract.operations import GramView, Then
from ..errors import InputError
from ..federation import messages as m
from ..federation.epochs import Epoch, Epochs
from ..federation.function_encoding import fits, then_to_bytes
from ..federation.handler import Apply
from ..federation.payloads import check_small
from ..federation.protections import ClientParts, ServerParts
from ..federation.registry import KEY_HOLDER, ClientsLost, EpochEnded, KeyHolderLost
from ..federation.transforms import sketched
from ..protocols import ckks
from ..protocols.ckks import Identity, Setup
from ..protocols.errors import LocalError, MalformedMessage, RemoteError
from ..types import Array, check_array
from .ckks_settings import BATCH, DISTANCES, CkksSettings, workload
from .vectors import check_new

__all__ = ["ClientComparison", "ServerComparison"]


class ClientComparison:
    """A client's part: its vectors, under the key of the key holder that its own roster names and terms that it makes itself.

    Guarantee: that of `protocols.ckks`. The announced key must be signed by the key holder on this client's own roster, over terms that
    the client worked out itself: a server cannot slip in a key of its own, other parameters, or another release. Reveals: see there.
    """

    def __init__(self, parts: ClientParts) -> None:
        self._settings = parts.settings

    def give(self, ask: m.Give, values: Mapping[str, Any]) -> Generator[Apply, Any, m.Given]:
        """The client's upload.

        Raises `RemoteError` "forbidden" for other terms than its own, "bad-signature" and "malformed" for another's key; `LocalError`
        "out-of-range" for vectors that are longer than `ckks_bound`.
        """
        yield from ()
        roster, epoch = self._settings.roster, ask.epoch
        if epoch is None or roster is None or not roster.holder or len(values) != 1:
            raise RemoteError("forbidden")
        (rows,) = (np.atleast_2d(np.asarray(value)) for value in values.values())
        if rows.ndim != 2:
            raise RemoteError("bad-input")
        setup = CkksSettings.of(self._settings.protection).setup(ask.session, epoch.number, roster, *rows.shape)
        if setup.digest != epoch.setup:
            raise RemoteError("forbidden")
        reduced = np.atleast_2d(sketched(epoch.number, self._settings.protection.sketched)(rows))
        try:
            upload = ckks.encrypt(setup, epoch.announcement, roster.holder, self._settings.identity, reduced)
        except LocalError as error:
            longest = float(np.linalg.norm(reduced, axis=1).max(initial=0.0))
            if error.code == "out-of-range":
                error.add_note(
                    f"a vector of norm {longest:.3g} is above protection.ckks_bound = {setup.bound:g}, the public bound; raise it"
                )
            raise
        return m.Given((m.Named("bytes", np.frombuffer(upload, dtype=np.uint8)),), 0)


@dataclass(frozen=True)
class _Unheard:
    """A step that the key holder was asked to finish, without an answer so far: of which part, how, and from which uploads."""

    part: str
    ask: m.Finish
    uploads: Mapping[int, bytes]


class EncryptedEpoch:
    """What the server has of one clustering epoch: ciphertexts, who is in it in which order, and blocks if they are released."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.machine: ckks.Server | None = None
        self.announcement = b""
        self.order: list[int] = []
        self.steps = 0
        self.blocks: dict[tuple[int, int], Array] = {}
        self.unheard: _Unheard | None = None

    def saved(self) -> dict[str, Any]:
        """Nothing: an epoch ends with the server's process, which has the ciphertexts."""
        return {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """An epoch that nothing can be added to."""


class ServerComparison:
    """The server's part: clustering epochs of ciphertexts.

    Raises `InputError` for settings that do not fit each other, and without a key holder on the roster.
    """

    where: Literal["key-holder"] = "key-holder"
    evidence = False

    def __init__(self, parts: ServerParts) -> None:
        registry, session, protection, roster, entropy = parts.registry, parts.session, parts.protection, parts.roster, parts.entropy
        if roster is None or not roster.holder:
            raise InputError("protection.gram: 'ckks' needs the clients' pinned roster, with the key of the key holder on it")
        self._registry, self._session, self._protection, self._roster, self._entropy = registry, session, protection, roster, entropy
        self._settings = CkksSettings.of(protection)
        try:
            ckks.arithmetic(self._settings.parameters())
        except LocalError as error:
            raise InputError(f"protection.gram: 'ckks': {error}") from None
        self._identity = Identity.create(0, entropy)
        self._say: Callable[[str], None] = lambda line: None
        self._tick: Callable[[int, int], None] = lambda done, total: None
        self.epochs: Epochs[EncryptedEpoch] = Epochs(EncryptedEpoch)

    def listen(self, say: Callable[[str], None], tick: Callable[[int, int], None]) -> None:
        """`say` gets the estimate before products are computed, `tick` how many outputs of how many are done."""
        self._say, self._tick = say, tick

    def close(self, held: Held) -> None:
        """Close an epoch; the key holder is told to drop its keys, and drops them at the next epoch if it does not hear that."""
        self.epochs.close(held)
        if self._registry.holder:
            with suppress(KeyHolderLost):
                self._registry.ask_holder(m.Drop(self._session, self._live()), "ckks close")

    def end(self) -> None:
        """Close all epochs: the run is over, and the key holder keeps no key of it."""
        self.epochs.entered.clear()
        if self._registry.holder:
            with suppress(KeyHolderLost):
                self._registry.ask_holder(m.Drop(self._session, ()), "ckks close")

    def _live(self) -> tuple[int, ...]:
        """The epochs that something can be added to."""
        entered = [epoch for entries in self.epochs.entered.values() for _, epoch in entries]
        return tuple(sorted({epoch.number for epoch in entered if epoch.session.machine is not None}))

    def gram(
        self, held: Held, number: int, clients: Sequence[int], then: Then, against: Held | None, record: Recorder, shape: tuple[int, ...]
    ) -> Released:  # fmt: skip
        """Have `clients` encrypt their vectors of `held`, of public `shape`, and the key holder run `then`.

        Raises `ClientsLost` without all clients, `KeyHolderLost` without the key holder: the step can then be taken again. Where only the
        answer to its end was lost, that goes for the same step of the same clients, from the vectors that they sent then; others are
        refused (`replay`) once the holder has ended it. Raises `EpochEnded` for an epoch of an earlier process.
        """
        code = b"" if self._settings.release == "gram" else then_to_bytes(then)
        epoch = self._epoch(held, clients, against, shape)
        session = self._begun(epoch, record)
        if not self._registry.holder:
            raise KeyHolderLost("ckks decrypt" if clients else "ckks finish")
        ask = m.Finish(self._session, session.number, session.steps, tuple(clients), code)
        try:
            said = self._heard(held.part, ask, session, record)
            if said is None:
                uploads = self._uploads(held, number, clients, session, record)
                self._step(clients, uploads, session, record)
                if clients:
                    session.unheard = _Unheard(held.part, ask, uploads)
                said = self._ask(ask, "ckks finish", record)
            seen = self._seen(said, clients, then, epoch, record)
        except BaseException:  # whatever it was: these clients may come again
            self._machine(session).withdraw(clients)
            raise
        session.unheard = None
        session.order += clients
        session.steps += 1
        epoch.clients += clients
        if clients:
            self.epochs.enter(held, epoch)
        if isinstance(seen, Released):
            self._note(seen, epoch.number, record)
            return seen
        assert isinstance(said, m.Released)  # or it would not have been a Gram
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

    def _begun(self, epoch: Epoch[EncryptedEpoch], record: Recorder) -> EncryptedEpoch:
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
        answer = self._ask(ask, "ckks keys", record)
        try:
            if not isinstance(answer, m.Stepped):
                raise MalformedMessage
            session.machine = ckks.Server(
                setup, answer.said, self._roster.holder, self._roster, self._identity, landmarks=self._settings.landmarks,
                entropy=self._entropy,
            )  # fmt: skip
        except RemoteError as error:
            raise self._refused(answer, "ckks keys", error.code, epoch.number, record) from None
        session.announcement = answer.said
        return session

    def _ask(self, ask: m.Keys | m.Finish, stage: str, record: Recorder) -> m.Answer:
        """Ask the key holder, who reads all of what it is asked: on record before it can answer, or fail to."""
        if self._registry.holder:
            said = _payloads([m.encode(ask)])[0]
            record(stage, "server", "key-holder", (), said, readers=("server", "key-holder"), context={"epoch": ask.epoch})
        try:
            return self._registry.ask_holder(ask, stage)
        except KeyHolderLost as lost:
            if lost.word != "bad-input" or stage != "ckks finish":
                raise
            raise InputError(  # it would be the same again
                "gram: the key holder could not run the public function on these vectors; its log says why (where noise drowns them: a "
                "smaller protection.ckks_bound, or ckks_release = 'labels')"
            ) from None

    def _refused(self, answer: m.Answer, stage: str, word: str, epoch: int, record: Recorder) -> KeyHolderLost:
        """What to raise for an answer of the key holder's that does not fit. It came, so it is on record."""
        said, context = _payloads([m.encode(answer)])[0], {"epoch": epoch, "stage": stage}
        record("refused answer", "key-holder", "server", (), said, readers=("key-holder", "server"), context=context)
        self._registry.refusals.append((KEY_HOLDER, stage, word))
        return KeyHolderLost(stage, word)

    @staticmethod
    def _machine(session: EncryptedEpoch) -> ckks.Server:
        assert session.machine is not None
        return session.machine

    # --- one step

    def _heard(self, part: str, ask: m.Finish, session: EncryptedEpoch, record: Recorder) -> m.Answer | None:
        """The answer to a step that was ready before and whose end was not heard, asked for once more, from the uploads of that time.

        None if there is no such step, or the key holder no longer has it. Raises `KeyHolderLost` without the key holder.
        """
        before = session.unheard
        if before is None or (before.part, before.ask) != (part, ask):
            return None
        machine = self._machine(session)
        for upload in before.uploads.values():
            machine.receive(upload)
        try:
            return self._ask(ask, "ckks finish", record)
        except KeyHolderLost:
            if not self._registry.holder:
                raise
            machine.withdraw(before.uploads)
            return None

    def _uploads(
        self, held: Held, number: int, clients: Sequence[int], session: EncryptedEpoch, record: Recorder
    ) -> dict[int, bytes]:  # fmt: skip
        """The upload of each client. Raises `ClientsLost` without all; what came is on record also then, before it is judged."""
        if not clients:
            return {}
        machine = self._machine(session)
        epoch = m.Epoch(session.number, machine.setup.digest, session.announcement)
        give = m.Give(self._session, "gram", number, (held.part,), "", False, None, epoch)
        came: dict[int, bytes] = {}
        try:
            with machine.ahead(len(clients)):
                answers = self._registry.ask(dict.fromkeys(clients, give), "gram")
            came = {client: _bytes_of(answer) for client, answer in sorted(answers.items())}
        finally:
            context = {"epoch": session.number}
            if came:
                record(held.part, "clients", "server", list(came), _payloads(came.values()), readers=("server",), context=context)
            key = _payloads([session.announcement])[0]
            record("ckks key", "key-holder", "clients", clients, key, readers=("key-holder", "server", "clients"), context=context)
        uploads = {}
        for client, upload in came.items():
            try:
                machine.check(upload, client)
                uploads[client] = upload
            except RemoteError as error:
                self._registry.refusals.append((client, "gram", error.code))
        lost = sorted(set(clients) - set(uploads))
        for client in lost:  # also who refused: it would again
            self._registry.lose(client)
        if lost:
            raise ClientsLost(lost)
        return {client: uploads[client] for client in clients}

    def _step(self, clients: Sequence[int], uploads: Mapping[int, bytes], session: EncryptedEpoch, record: Recorder) -> None:
        """Enrol new clients at the key holder and have their products decrypted; what is asked of it is on record before it answers."""
        if not clients:
            return
        session.unheard = None  # from here on the holder has this step in place of that one
        machine = self._machine(session)
        context, readers = {"epoch": session.number}, ("server", "key-holder")
        enrolments = [machine.receive(upload) for upload in uploads.values()]
        record("ckks enrolment", "server", "key-holder", clients, _payloads(enrolments), readers=readers, context=context)
        first = True
        for batch in self._batches(machine, clients):
            parties = [clients[0]] * len(batch)  # which pair it is stands inside; the header need not repeat it
            record("ckks request", "server", "key-holder", parties, _payloads(batch), readers=readers, context=context)
            told = tuple(enrolments) if first else ()
            ask = m.Decrypt(self._session, session.number, session.steps, first, told, tuple(batch))
            answer = self._registry.ask_holder(ask, "ckks decrypt")
            if not isinstance(answer, m.Done):
                raise self._refused(answer, "ckks decrypt", "malformed", session.number, record)
            first = False

    def _batches(self, machine: ckks.Server, new: Sequence[int]) -> Iterator[list[bytes]]:
        """The requests for new clients, some at a time, computed on as many processes as pays."""
        jobs, setup = machine.jobs(new), machine.setup
        total = sum(len(job.lefts) for job in jobs)
        count, seconds = workload(machine.products, jobs, self._settings.workers)
        error = max(ckks.error_std(setup.parameters, setup.packing, setup.group), _std(setup))
        self._say(
            f"ckks: {len(new)} clients, {total} outputs of {setup.group} pair(s) at most, about {ceil(seconds)} s on {count} process(es), "
            f"{total * setup.parameters.ciphertext_bytes * 1.5 / 1e6:.0f} MB from the server to the key holder; std of an inner product's "
            f"error {error:.0e} at most"
        )
        workers = ckks.Workers(count) if count > 1 else None
        batch: list[bytes] = []
        try:
            for done, request in enumerate(machine.requests(jobs, workers), 1):
                batch.append(request)
                self._tick(done, total)
                if len(batch) == BATCH:
                    yield batch
                    batch = []
            if batch:
                yield batch
        finally:
            if workers is not None:
                workers.close()

    # --- what comes back

    def _seen(
        self, said: m.Answer, clients: Sequence[int], then: Then, epoch: Epoch[EncryptedEpoch], record: Recorder
    ) -> Gram | Released:  # fmt: skip
        """What the release allows of an answer. Raises `KeyHolderLost` for any that does not fit."""
        try:
            if not isinstance(said, m.Released):
                raise MalformedMessage
            return self._gram(said, clients, epoch) if self._settings.release == "gram" else self._released(said, clients, then, epoch)
        except (MalformedMessage, TypeError, InputError, LocalError):
            raise self._refused(said, "ckks finish", "malformed", epoch.number, record) from None

    def _released(self, said: m.Released, clients: Sequence[int], then: Then, epoch: Epoch[EncryptedEpoch]) -> Released:
        """Labels, and distances where these are released. Raises `MalformedMessage`, `TypeError`, `InputError` for anything else."""
        order = (*epoch.clients, *clients)
        result = {one.name: one.value for one in said.result}
        evidence = {one.name: one.value for one in said.evidence}
        check_small(result, len(order))
        if not fits(then, result, len(order), len(clients)):
            raise MalformedMessage
        if evidence:
            _check_evidence(evidence, order, self._settings.release)
        plain = {name: value if value.ndim else value.item() for name, value in result.items()}
        return Released(plain, {name: _plain(value) for name, value in evidence.items()} if evidence else None)

    @staticmethod
    def _note(seen: Released, number: int, record: Recorder) -> None:
        for kind, values in (("result", seen.result), ("evidence", seen.evidence)):
            if values is not None:
                payload = {name: np.asarray(value) for name, value in values.items()}
                record(kind, "key-holder", "server", (), payload, readers=("server", "key-holder"), context={"epoch": number})

    def _gram(self, said: m.Released, clients: Sequence[int], epoch: Epoch[EncryptedEpoch]) -> Gram:
        """Under release "gram": the Gram matrix with new, noised and rounded blocks.

        Raises `MalformedMessage`, `InputError`, `LocalError` if these do not make one.
        """
        session = epoch.session
        machine = self._machine(session)
        setup, order = machine.setup, [*session.order, *clients]
        error = max(ckks.error_std(setup.parameters, setup.packing, setup.group), _std(setup))
        fresh = {(left, right): check_array("block", value) for left, right, value in said.blocks}
        pairs = {frozenset(pair) for pair in fresh}
        fit = all(block.shape == (setup.p, setup.p) for block in fresh.values())
        if not fit or len(pairs) < len(said.blocks) or any(not pair <= set(order) or not pair & set(clients) for pair in pairs):
            raise MalformedMessage
        gram = Gram.of_matrix(order, ckks.gram_matrix(order, session.blocks | fresh, machine.landmarks, error), setup.p, error)
        session.blocks |= fresh
        return gram

    def _clustered(
        self, gram: Gram, said: m.Released, clients: Sequence[int], then: Then, epoch: Epoch[EncryptedEpoch], record: Recorder
    ) -> Released:  # fmt: skip
        """Under release "gram" the server runs `then` itself."""
        if said.blocks:
            payload = [{"pair": np.array((left, right)), "block": block} for left, right, block in said.blocks]
            context = {"epoch": epoch.number, "std": _std(self._machine(epoch.session).setup)}
            lefts = [left for left, _, _ in said.blocks]
            record("gram", "key-holder", "server", lefts, payload, readers=("key-holder", "server"), context=context)
        result, evidence = then(GramView(gram, tuple(clients), epoch.memory))
        check_small(result, gram.n)
        return Released(result, evidence)


def _std(setup: Setup) -> float:
    return ckks.release_std(setup.parameters, setup.packing, setup.group, setup.scalars)


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
    """An upload's bytes; of an answer that is none all of them, which are no upload either."""
    if isinstance(answer, m.Given) and [(one.name, one.value.dtype.str) for one in answer.values] == [("bytes", "|u1")]:
        with suppress(MalformedMessage):
            return answer.values[0].value.tobytes()
    return m.encode(answer)


def _payloads(said: Any) -> list[dict[str, Array]]:
    return [{"bytes": np.frombuffer(one, dtype=np.uint8)} for one in said]
