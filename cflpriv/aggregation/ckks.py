"""Encrypted inner products: clients encrypt, the server multiplies ciphertexts, a key holder decrypts (`key_holder`).

Guarantee: see `protocols.ckks`; keys are fresh for every clustering epoch. Under `ckks_release = "labels"` the server learns what `then`
returns, labels and small integers, and nothing else of the similarities; under "distances" also the matrix of distances, from noisy inner
products; under "gram" the noisy, rounded Gram matrix and nothing else. Clients check whose key they encrypt under; the key holder checks
which terms it makes keys for.
Reveals: the exact Gram matrix to the key holder, everything to the key holder and the server together; when each party answers. Labels come
from exact values, because noise protects only what is released as numbers; clients that choose their vectors freely can learn bits from
their labels.
Active attacks (`attacks.active`): whose key: `swapped_holder`; what the key holder runs, and how often: `other_function`, `repeated_step`.
Source: `protocols.ckks`.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from math import ceil
from typing import Any, Literal

import numpy as np

from ..contract.calls import Recorder
from ..contract.handles import Held, Released
from ..contract.operations import Then
from ..errors import InputError
from ..federation import messages as m
from ..federation.epochs import Epoch, Epochs, enter
from ..federation.host import ApplyTransform
from ..federation.protections import ClientParts, ServerParts
from ..federation.registry import KEY_HOLDER, ClientsLost, EpochEnded, KeyHolderLost
from ..federation.task_encoding import then_to_bytes
from ..federation.transforms import sketched
from ..protocols import ckks
from ..protocols.ckks import Identity
from ..protocols.errors import LocalError, MalformedMessage, RemoteError
from .ckks_settings import BATCH, CkksSettings, workload
from .encrypted_epochs import EncryptedEpoch, EncryptedStep, Unanswered, concluded, epoch_for, payloads, released, upload_of

__all__ = ["CkksClientComparison", "CkksServerComparison"]


class CkksClientComparison:
    """A client's part: it encrypts its vectors.

    Guarantee: that of `protocols.ckks`. The key holder on the client's own roster must have signed the announced key, over terms that the
    client computed itself: a server cannot pass a key of its own, other parameters, or another release. Its vectors are in `most_epochs`
    epochs at most, over all sessions. Reveals: see there.
    """

    def __init__(self, parts: ClientParts) -> None:
        self._settings, self._store, self._within = parts.settings, parts.store, parts.within

    def give(self, ask: m.Give, values: Mapping[str, Any]) -> Generator[ApplyTransform, Any, m.Given]:
        """The client's upload.

        Raises `RemoteError` "forbidden" for other terms than its own, "bad-signature" and "malformed" for another key,
        "too-many-epochs" for one more epoch than its settings allow. Vectors longer than `ckks_bound` are scaled down to it.
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
        reduced = self._within(reduced, setup.bound, "ckks_bound")
        upload = ckks.encrypt(setup, epoch.announcement, roster.holder, self._settings.identity, reduced)
        enter(self._store, ask.session, epoch.number, self._settings.protection.most_epochs)
        return m.Given((m.NamedArray("bytes", np.frombuffer(upload, dtype=np.uint8)),), 0)


class CkksServerComparison:
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
        self._notify: Callable[[str], None] = lambda line: None
        self._tick: Callable[[int, int], None] = lambda done, total: None
        self.epochs: Epochs[EncryptedEpoch] = Epochs(lambda number: EncryptedEpoch())

    def listen(self, notify: Callable[[str], None], tick: Callable[[int, int], None]) -> None:
        """`notify` gets an estimate before products are computed; `tick` gets (outputs done, total)."""
        self._notify, self._tick = notify, tick

    def close(self, held: Held) -> None:
        """Close an epoch. The key holder drops its keys now, or at the next epoch if this request is lost."""
        self.epochs.close(held)
        if self._registry.holder:
            with suppress(KeyHolderLost):
                self._registry.ask_holder(m.Drop(self._session, self._live()), "ckks close")

    def end(self) -> None:
        """End the run: close all epochs, and have the key holder drop all keys."""
        self.epochs.entered.clear()
        if self._registry.holder:
            with suppress(KeyHolderLost):
                self._registry.ask_holder(m.Drop(self._session, ()), "ckks close")

    def _live(self) -> tuple[int, ...]:
        """The epochs to which clients can be added."""
        entered = [epoch for entries in self.epochs.entered.values() for _, epoch in entries]
        return tuple(sorted({epoch.number for epoch in entered if epoch.session.live}))

    def gram(
        self, held: Held, number: int, clients: Sequence[int], then: Then, against: Held | None, record: Recorder, shape: tuple[int, ...]
    ) -> Released:  # fmt: skip
        """Have `clients` encrypt their vectors of `held`, of public `shape`, and the key holder run `then`.

        Raises `ClientsLost` if a client does not answer, `KeyHolderLost` if the key holder does not; the step can then be taken again. If
        only the answer to its end was lost, the same step of the same clients uses the vectors of the first time; the key holder refuses
        any other step (`replay`) once it has ended this one. Raises `EpochEnded` for an epoch of an earlier process.
        """
        code = b"" if self._settings.release == "gram" else then_to_bytes(then)
        epoch = epoch_for(self.epochs, held, clients, against, shape)
        session = self._begun(epoch, record)
        if not self._registry.holder:
            raise KeyHolderLost("ckks decrypt" if clients else "ckks finish")
        step = EncryptedStep(held, number, clients, then, epoch, record)
        ask = m.Finish(self._session, epoch.number, session.steps, tuple(clients), code)
        try:
            answer = self._finished_before(step, ask)
            if answer is None:
                uploads = self._uploads(step)
                self._add(step, uploads)
                if clients:
                    session.unanswered = Unanswered(held.part, ask, uploads)
                answer = self._ask(ask, "ckks finish", record)
            try:
                seen = released(step, answer, self._settings.release)
            except (MalformedMessage, TypeError, InputError, LocalError):
                raise self._refused(answer, "ckks finish", "malformed", epoch.number, record) from None
        except BaseException:  # after any failure these clients may be added again
            session.machine.withdraw(clients)
            raise
        session.unanswered = None
        session.steps += 1
        epoch.clients += clients
        if clients:
            self.epochs.enter(held, epoch)
        return concluded(step, seen, answer)

    # --- epochs

    def _begun(self, epoch: Epoch[EncryptedEpoch], record: Recorder) -> EncryptedEpoch:
        """The epoch's session; a new epoch gets keys and a machine first."""
        session = epoch.session
        if session.live:
            return session
        if epoch.ended:
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
            session.server = ckks.CkksServer(
                setup, answer.message, self._roster.holder, self._roster, self._identity, landmarks=self._settings.landmarks,
                entropy=self._entropy,
            )  # fmt: skip
        except RemoteError as error:
            raise self._refused(answer, "ckks keys", error.code, epoch.number, record) from None
        session.announcement = answer.message
        return session

    def _ask(self, ask: m.Keys | m.Finish, stage: str, record: Recorder) -> m.Answer:
        """Ask the key holder. The request is on record before it can answer, or fail to."""
        if self._registry.holder:
            payload = payloads([m.encode(ask)])[0]
            record(stage, "server", "key-holder", (), payload, readers=("server", "key-holder"), context={"epoch": ask.epoch})
        try:
            return self._registry.ask_holder(ask, stage)
        except KeyHolderLost as lost:
            if lost.refusal != "bad-input" or stage != "ckks finish":
                raise
            raise InputError(  # a new attempt would fail in the same way
                "gram: the key holder could not run the public function on these vectors; its log says why (where noise drowns them: a "
                "smaller protection.ckks_bound, or ckks_release = 'labels')"
            ) from None

    def _refused(self, answer: m.Answer, stage: str, code: str, epoch: int, record: Recorder) -> KeyHolderLost:
        """The error for an answer of the key holder that does not fit. The answer is on record."""
        payload, context = payloads([m.encode(answer)])[0], {"epoch": epoch, "stage": stage}
        record("refused answer", "key-holder", "server", (), payload, readers=("key-holder", "server"), context=context)
        self._registry.refusals.append((KEY_HOLDER, stage, code))
        return KeyHolderLost(stage, code)

    # --- one step

    def _finished_before(self, step: EncryptedStep, ask: m.Finish) -> m.Answer | None:
        """The answer to an earlier attempt at this step, which was lost, asked for again from the uploads of that attempt.

        None without such an attempt, or if the key holder no longer has it. Raises `KeyHolderLost` without the key holder.
        """
        session = step.epoch.session
        before, machine = session.unanswered, session.machine
        if before is None or (before.part, before.ask) != (step.held.part, ask):
            return None
        for upload in before.uploads.values():
            machine.receive(upload)
        try:
            return self._ask(ask, "ckks finish", step.record)
        except KeyHolderLost:
            if not self._registry.holder:
                raise
            machine.withdraw(before.uploads)
            return None

    def _uploads(self, step: EncryptedStep) -> dict[int, bytes]:
        """The upload of each client, on record before it is checked. Raises `ClientsLost` unless all clients sent one."""
        clients, epoch, record = step.clients, step.epoch, step.record
        if not clients:
            return {}
        session, machine = epoch.session, epoch.session.machine
        key = m.EpochKey(epoch.number, machine.setup.digest, session.announcement)
        give = m.Give(self._session, "gram", step.number, (step.held.part,), "", False, None, key)
        came: dict[int, bytes] = {}
        try:
            with machine.ahead(len(clients)):
                answers = self._registry.ask(dict.fromkeys(clients, give), "gram")
            came = {client: upload_of(answer) for client, answer in sorted(answers.items())}
        finally:
            context = {"epoch": epoch.number}
            if came:
                record(step.held.part, "clients", "server", list(came), payloads(came.values()), readers=("server",), context=context)
            payload = payloads([session.announcement])[0]
            record("ckks key", "key-holder", "clients", clients, payload, readers=("key-holder", "server", "clients"), context=context)
        uploads = {}
        for client, upload in came.items():
            try:
                machine.check(upload, client)
                uploads[client] = upload
            except RemoteError as error:
                self._registry.refusals.append((client, "gram", error.code))
        lost = sorted(set(clients) - set(uploads))
        for client in lost:  # a client that refused would refuse again
            self._registry.lose(client)
        if lost:
            raise ClientsLost(lost)
        return {client: uploads[client] for client in clients}

    def _add(self, step: EncryptedStep, uploads: Mapping[int, bytes]) -> None:
        """Enrol new clients at the key holder and have their products decrypted. Requests are on record before they are answered."""
        clients, session, number, record = step.clients, step.epoch.session, step.epoch.number, step.record
        if not clients:
            return
        session.unanswered = None  # the key holder replaces that step by this one
        machine = session.machine
        context, readers = {"epoch": number}, ("server", "key-holder")
        enrolments = tuple(machine.receive(upload) for upload in uploads.values())
        record("ckks enrolment", "server", "key-holder", clients, payloads(enrolments), readers=readers, context=context)
        for index, batch in enumerate(self._batches(session, clients)):
            parties = [clients[0]] * len(batch)  # the requests themselves name their pairs
            record("ckks request", "server", "key-holder", parties, payloads(batch), readers=readers, context=context)
            ask = m.Decrypt(self._session, number, session.steps, index == 0, enrolments if index == 0 else (), tuple(batch))
            answer = self._registry.ask_holder(ask, "ckks decrypt")
            if not isinstance(answer, m.Acknowledged):
                raise self._refused(answer, "ckks decrypt", "malformed", number, record)

    def _batches(self, session: EncryptedEpoch, new: Sequence[int]) -> Iterator[list[bytes]]:
        """The requests for new clients in batches, computed on as many processes as pays."""
        machine = session.machine
        jobs, setup = machine.jobs(new), machine.setup
        total = sum(len(job.lefts) for job in jobs)
        count, seconds = workload(machine.products, jobs, self._settings.workers)
        self._notify(
            f"ckks: {len(new)} clients, {total} outputs of {setup.group} pair(s) at most, about {ceil(seconds)} s on {count} process(es), "
            f"{total * setup.parameters.ciphertext_bytes * 1.5 / 1e6:.0f} MB from the server to the key holder; std of an inner product's "
            f"error {session.error:.0e} at most"
        )
        workers = ckks.CkksWorkers(count) if count > 1 else None
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
