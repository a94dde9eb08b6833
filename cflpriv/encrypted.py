"""`[protection] gram = ["ckks"]`: inner products of encrypted vectors, through the real protocol, over real bytes.

One clustering epoch has its own keys, its server's machine with everybody's ciphertexts, and its key holder's machine with the blocks it
has decrypted; all go when the epoch closes. What they say to each other goes to the transcript as it is.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from time import perf_counter
from typing import Literal
from weakref import WeakValueDictionary

import numpy as np

from .channels import GramSession, Recorder, sketched
from .errors import InputError
from .protection import Protection
from .protocols import ckks
from .protocols.ckks import Identity, KeyHolder, LocalError, Packing, Parameters, Roster, Server, Setup, Workers
from .protocols.ckks.products import Job, compute
from .protocols.entropy import Entropy
from .similarity import Gram
from .types import Array

__all__ = ["BATCH", "DISTANCES", "EncryptedGram", "EncryptedSession", "Settings", "workload"]

BATCH = 64
"""Requests that go to the key holder together."""
_WORTH_PROCESSES_SECONDS = 5.0
DISTANCES = ("distance", "clients")
_LARGE_RING = 8192


@dataclass(frozen=True)
class Settings:
    """The `ckks_*` keys of `[protection]`, and what else bears on them.

    `ring` 0 stands for the smallest that serves the release, `group` 0 for as many pairs an output as fit: at least 4 in rings of 8192,
    unless vectors are too long for it.
    """

    release: Literal["gram", "distances", "labels"]
    mode: Literal["public-key", "symmetric"]
    ring: int
    bound: float
    landmarks: int
    group: int
    workers: int
    sketch_dim: int | None = None

    @classmethod
    def of(cls, protection: Protection, sketch_dim: int | None) -> "Settings":
        return cls(
            protection.ckks_release, protection.ckks_mode, protection.ckks_ring, protection.ckks_bound, protection.landmarks,
            protection.ckks_group, protection.ckks_workers, sketch_dim,
        )  # fmt: skip

    def parameters(self) -> Parameters:
        """The ring. Raises `InputError` for one that does not exist or is too small for the release."""
        known = ckks.PARAMETERS if self.mode == "public-key" else ckks.SYMMETRIC_PARAMETERS
        ring = self.ring or (4096 if self.release == "labels" else 8192)
        if ring not in known:
            raise InputError(f"protection.ckks_ring: {ring} is not known in mode {self.mode!r}; known are {', '.join(map(str, known))}")
        parameters = known[ring]
        if parameters.primes < 2 and self.release != "labels":
            raise InputError(
                f"protection.ckks_release: {self.release!r} with ckks_ring = {ring}, whose one prime leaves no room for the noise that "
                "released decryptions need; use ckks_ring = 8192, or 'labels'"
            )
        return parameters

    def packing(self, p: int, dimension: int) -> Packing:
        """How clients' rows (p, dimension), sketched if they are long, are packed. Raises `LocalError` "too-long"."""
        parameters, bound = self.parameters(), self.bound
        if self.sketch_dim is not None and dimension > self.sketch_dim:
            dimension = self.sketch_dim
            bound *= sqrt(1 + 8 * sqrt(2 / dimension))  # a sketch may be longer than its vector: eight std of its squared norm
        together = self.group or (4 if parameters.ring >= _LARGE_RING else 1)
        try:
            return ckks.plan(parameters, p, dimension, bound, together)
        except LocalError:
            return ckks.plan(parameters, p, dimension, bound, self.group or 1)

    def setup(self, session: bytes, epoch: int, roster: Roster, p: int, dimension: int) -> Setup:
        """The public terms of an epoch over clients' rows (p, dimension), which every party makes for itself.

        Raises `InputError` for settings that do not fit each other, `LocalError` "too-long".
        """
        parameters, packing = self.parameters(), self.packing(p, dimension)
        return Setup(
            session, epoch, roster.digest, len(roster.keys), p, packing.dimension, parameters.ring, parameters.bits, parameters.mode,
            self.release, packing.bound, self.group or packing.group,
        )  # fmt: skip


def workload(setup: Setup, public_key: bytes, jobs: Sequence[Job], most: int) -> tuple[int, float]:
    """On how many processes some jobs are worth doing, at most `most` (0: one a core), and seconds that all outputs take there, roughly."""
    began = perf_counter()
    first, total = jobs[0], sum(len(job.lefts) for job in jobs)
    compute(setup, public_key, Job(first.lefts[:1], first.rights, first.wanted[:1]))
    seconds = total * (perf_counter() - began)  # one output with all its loading: an upper estimate
    count = 1 if seconds < _WORTH_PROCESSES_SECONDS else most or min(8, os.cpu_count() or 1)
    return count, seconds / count


@dataclass(eq=False)
class EncryptedGram:
    """Clients encrypt, the server multiplies, a key holder decrypts; the server learns what `ckks_release` says.

    Guarantee: see `protocols.ckks`; keys are fresh for every clustering epoch. Under "labels" the server learns what `then` returns, labels
    and small integers, and nothing of the similarities; under "distances" also the matrix of distances, from inner products that were
    noised first; under "gram" the noised, rounded Gram matrix and nothing else.
    Reveals: the exact Gram matrix to the key holder, everything to it and the server together. Labels come from exact values: the noise
    that protects decryptions is for what is released as numbers, and clients that encrypt what they like buy bits with theirs. In mode
    "symmetric" one colluding client gives the server everything.
    Source: `protocols.ckks`.
    """

    clients: tuple[int, ...]
    settings: Settings
    entropy: Entropy
    say: Callable[[str], None] = lambda line: None
    tick: Callable[[int, int], None] = lambda done, total: None
    holders: WeakValueDictionary[int, KeyHolder] = field(default_factory=WeakValueDictionary, repr=False)

    def __post_init__(self) -> None:
        self.parameters = self.settings.parameters()
        try:
            ckks.arithmetic(self.parameters)
        except LocalError as error:
            raise InputError(f"protection.gram: 'ckks': {error}") from None
        self.numbers = {client: number for number, client in enumerate(sorted(self.clients))}
        self.identities = {number: Identity.create(number, self.entropy) for number in self.numbers.values()}
        self.roster = Roster(tuple(identity.public() for identity in self.identities.values()))
        self.server, self.holder = Identity.create(0, self.entropy), Identity.create(0, self.entropy)
        self.session = self.entropy(16)

    @property
    def receiver(self) -> str:
        """Who gets the uploads."""
        return "server"

    @property
    def where(self) -> Literal["server", "key-holder"]:
        return "server" if self.settings.release == "gram" else "key-holder"

    @property
    def evidence(self) -> bool | tuple[str, ...]:
        return DISTANCES if self.settings.release == "distances" else self.settings.release == "gram"

    def open(self, epoch: int) -> GramSession:
        return EncryptedSession(self, epoch)

    def listen(self, say: Callable[[str], None], tick: Callable[[int, int], None]) -> None:
        """`say` gets the estimate before an expensive step starts, `tick` how many outputs of how many are done."""
        self.say, self.tick = say, tick

    def secrets(self) -> dict[str, str]:
        """The key holder's secret keys of open epochs, as hexadecimal digits. For audits of simulated runs."""
        return {f"ckks_secret_key_{epoch}": holder.secret_key().hex() for epoch, holder in sorted(self.holders.items())}


class EncryptedSession:
    """One clustering epoch. Ciphertexts stay at the server until it closes, so newcomers cost their own rows only."""

    def __init__(self, channel: EncryptedGram, epoch: int) -> None:
        self._channel = channel
        self._epoch = epoch
        self._reduce = sketched(epoch, channel.settings.sketch_dim)
        self._setup: Setup | None = None
        self._order: list[int] = []

    def upload(self, client: int, rows: Array) -> Mapping[str, Array]:
        channel = self._channel
        setup = self._begun(*np.atleast_2d(rows).shape)
        rows = np.atleast_2d(self._reduce(rows))
        longest = float(np.linalg.norm(rows, axis=1).max())
        if longest > setup.bound * (1 + 1e-3):
            raise InputError(
                f"gram: client {client} has a vector of norm {longest:.3g}, above protection.ckks_bound = {setup.bound:g}, the public "
                "bound that encrypted numbers must fit; raise it"
            )
        identity = channel.identities[channel.numbers[client]]
        data = ckks.encrypt(setup, self._holder.announcement, channel.holder.public(), identity, rows, self._shared_key)
        return {"bytes": np.frombuffer(data, dtype=np.uint8)}

    def _begun(self, p: int, dimension: int) -> Setup:
        """The epoch's public terms and machines, made when the first vectors (p, dimension) show their shape."""
        if self._setup is not None:
            return self._setup
        channel, settings, parameters = self._channel, self._channel.settings, self._channel.parameters
        try:
            setup = settings.setup(channel.session, self._epoch, channel.roster, p, dimension)
            holder = KeyHolder(setup, channel.holder, channel.server.public(), channel.roster, entropy=channel.entropy)
        except LocalError as error:
            lower = "lower protection.ckks_group, or " if settings.group > 1 else ""
            remedy = f'; {lower}use gram = ["sketch", "ckks"]' if error.code == "too-long" else ""
            raise InputError(f"protection.gram: 'ckks' with {p} vectors of {dimension} numbers a client: {error}{remedy}") from None
        self._error = ckks.error_std(parameters, setup.packing, setup.group)
        self._holder = channel.holders[self._epoch] = holder
        self._shared_key = holder.secret_key() if parameters.mode == "symmetric" else None
        self._server = Server(
            setup, holder.announcement, channel.holder.public(), channel.roster, channel.server, landmarks=settings.landmarks,
            entropy=channel.entropy,
        )  # fmt: skip
        self._setup = setup
        return setup

    def extend(self, clients: Sequence[int], uploads: Sequence[Mapping[str, Array]], p: int, record: Recorder) -> Gram:
        if clients:
            self._enrol(clients, uploads, record)
            pairs = self._answered([self._channel.numbers[client] for client in clients], clients, record)
            self._order += clients
            if self._channel.settings.release == "gram":
                self._show(pairs, record)
        numbers = [self._channel.numbers[client] for client in self._order]
        error = max(self._error, self._holder.std)
        assert self._setup is not None
        matrix = ckks.gram_matrix(numbers, self._holder.blocks, self._server.landmarks, error)
        error = ckks.gram_error(self._setup, matrix, self._holder.std)
        return Gram.of_matrix(self._order, matrix, p, error)

    def _enrol(self, clients: Sequence[int], uploads: Sequence[Mapping[str, Array]], record: Recorder) -> None:
        context = {"epoch": self._epoch}
        key = {"bytes": np.frombuffer(self._holder.announcement, dtype=np.uint8)}
        record("ckks key", "key-holder", "clients", clients, key, readers=("key-holder", "server", "clients"), context=context)
        if self._shared_key is not None:  # the server passes on what it cannot read
            secret = {"bytes": np.frombuffer(self._shared_key, dtype=np.uint8)}
            record("ckks secret key", "key-holder", "clients", clients, secret, readers=("key-holder", "clients"), context=context)
        enrolments = [self._server.receive(upload["bytes"].tobytes()) for upload in uploads]
        for enrolment in enrolments:
            self._holder.enrol(enrolment)
        said = [{"bytes": np.frombuffer(enrolment, dtype=np.uint8)} for enrolment in enrolments]
        record("ckks enrolment", "server", "key-holder", clients, said, readers=("server", "key-holder"), context=context)

    def _answered(self, new: list[int], clients: Sequence[int], record: Recorder) -> list[tuple[int, int]]:
        """Compute, ask and decrypt, a batch at a time; the pairs that were added, by number on the roster."""
        jobs = self._server.jobs(new)
        total = sum(len(job.lefts) for job in jobs)
        workers = self._workers(jobs, total, len(clients))
        pairs: list[tuple[int, int]] = []
        batch: list[bytes] = []
        try:
            for done, request in enumerate(self._server.requests(jobs, workers), 1):
                pairs += self._holder.answer(request)
                batch.append(request)
                if len(batch) == BATCH or done == total:
                    said = [{"bytes": np.frombuffer(one, dtype=np.uint8)} for one in batch]
                    parties = [clients[0]] * len(batch)  # which pair it is stands inside; the header need not repeat it
                    context = {"epoch": self._epoch}
                    record("ckks request", "server", "key-holder", parties, said, readers=("server", "key-holder"), context=context)
                    batch = []
                self._channel.tick(done, total)
        finally:
            if workers is not None:
                workers.close()
        return pairs

    def _workers(self, jobs: Sequence[Job], total: int, new: int) -> Workers | None:
        """Say what it will cost, and start processes where that pays."""
        assert self._setup is not None
        count, seconds = workload(self._setup, self._server.public_key, jobs, self._channel.settings.workers)
        request_mb = self._setup.parameters.ciphertext_bytes * 1.5 / 1e6
        self._channel.say(
            f"ckks: {new} clients, {total} outputs of {self._setup.group} pair(s) at most, about {ceil(seconds)} s on "
            f"{count} process(es), {total * request_mb:.0f} MB from the server to the key holder; std of an inner product's error "
            f"{max(self._error, self._holder.std):.0e} at most"
        )
        return Workers(count) if count > 1 else None

    def _show(self, pairs: Sequence[tuple[int, int]], record: Recorder) -> None:
        """Under release "gram": the noised, rounded blocks, to the server."""
        ids = sorted(self._channel.clients)
        said = [{"pair": np.array([ids[left], ids[right]]), "block": self._holder.blocks[left, right]} for left, right in pairs]
        context = {"epoch": self._epoch, "std": self._holder.std}
        record("gram", "key-holder", "server", [ids[left] for left, _ in pairs], said, readers=("key-holder", "server"), context=context)
