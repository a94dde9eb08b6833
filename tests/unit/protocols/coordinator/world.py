"""A federation of a coordinator, helpers and clients in folders, whose processes are killed at any point.

`World.play` runs rounds under a seed and raises AssertionError for a wrong sum, two sets for a slot, an answer that was not kept, or a
value in sums over two sets. On the simulated disk a killed process leaves a part of its last write, or garbage, until it is flushed.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import pytest

from cflpriv.protocols.coordinator import CoordinatorLimits, DurableClient, DurableHelper, SumPlan, sign_roster
from cflpriv.protocols.coordinator import log as log_module
from cflpriv.protocols.coordinator import messages as c
from cflpriv.protocols.coordinator.attempts import AttemptEnded
from cflpriv.protocols.coordinator.client import UploadTask
from cflpriv.protocols.coordinator.rounds import SumRounds
from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.errors import RemoteError, SumFailed
from cflpriv.protocols.keys import Identity, Roster
from cflpriv.protocols.one_message import Contribution, HelperPolicy, Policy, Sum
from cflpriv.protocols.one_message import messages as m

__all__ = ["DIMENSION", "MODEL", "SESSION", "Disk", "Killed", "World", "levels"]

SESSION = bytes(range(16))
MODEL = bytes(32)
DIMENSION = 3
Party = Literal["coordinator", "client", "helper"]
_ENTROPY = public_entropy("coordinator world")
IDENTITIES = tuple(Identity.create(client, _ENTROPY) for client in range(6))
HOLDERS = tuple(Identity.create(0, _ENTROPY) for _ in range(4))
AUTHORITY, COORDINATOR = Identity.create(0, _ENTROPY), Identity.create(0, _ENTROPY)
ROSTER = Roster(tuple(one.public() for one in IDENTITIES), HOLDERS[0].public(), tuple(one.public() for one in HOLDERS[1:]))


def levels(client: int, number: int) -> Any:
    """A client's input of a round, as levels of the quantiser."""
    return np.arange(DIMENSION, dtype=np.int64) * (client + 1) - 5 * client + 100 * number


class Killed(BaseException):
    """A process ended."""


class Disk:
    """Writes that end in the middle. `points` counts where processes ended, by (party, point)."""

    def __init__(self, random: Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random, self.rate, self.party = random, 0.0, ""
        self.points: Counter[tuple[str, str]] = Counter()
        self._flushed: dict[int, int] = {}
        for name in ("_write", "_flush", "_replace"):
            monkeypatch.setattr(log_module, name, getattr(self, name))

    def _dies(self, point: str) -> bool:
        dies = self.random.random() < self.rate
        self.points[self.party, point] += dies
        return dies

    def _write(self, file: int, data: bytes) -> None:
        if self._dies("before a write"):
            raise Killed
        if self._dies("in a write"):
            some = self.random.randrange(len(data) + 1)
            torn = data[:some]
            if self.random.random() < 0.3:  # a later page reached the disk, an earlier one did not
                torn = bytes(some) + data[some:]
            elif self.random.random() < 0.3:
                torn += self.random.randbytes(self.random.randrange(64))
            os.write(file, torn)
            raise Killed
        os.write(file, data)
        if self._dies("before a flush"):
            raise Killed

    def lose(self, path: Path) -> None:
        """The power goes off: what was not flushed may be lost."""
        if path.exists():
            kept, size = self._flushed.get(path.stat().st_ino, 0), path.stat().st_size
            if size > kept and self.random.random() < 0.7:
                os.truncate(path, self.random.randrange(kept, size + 1))

    def _flush(self, file: int) -> None:
        self._flushed[os.fstat(file).st_ino] = os.fstat(file).st_size
        if self._dies("after a flush"):
            raise Killed

    def _replace(self, part: Path, path: Path) -> None:
        if self._dies("before a rename"):
            raise Killed
        os.replace(part, path)
        if self._dies("after a rename"):
            raise Killed


class World:
    """`clients` clients and four helpers. A party that was killed is started again from its folder."""

    def __init__(self, folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch, clients: int = 4, slack: int | None = None) -> None:
        self.folder, self.random, self.clients = folder, Random(seed), clients
        self.disk = Disk(self.random, monkeypatch)
        if slack is not None:
            monkeypatch.setattr(log_module, "_SLACK_BYTES", slack)
        self.signed = sign_roster(AUTHORITY, 1, ROSTER)
        self.now, self.number, self.lost = 0.0, 0, 0.0
        self.kills: Counter[str] = Counter()
        self.attempts = 1
        self.parties: dict[tuple[Party, int], Any] = {}
        self.results: dict[int, Sum[Any]] = {}
        self.accepted: dict[tuple[int, int, int], bytes] = {}
        self.left: dict[tuple[int, int, int], bytes] = {}
        self.sets: dict[tuple[tuple[int, int], int], set[bytes]] = defaultdict(set)
        self.sent: list[bytes] = []
        self.answers: dict[bytes, bytes] = {}

    # --- processes

    def _start(self, party: Party, number: int) -> Any:
        place = self.folder / f"{party}{number}"
        if party == "helper":
            policy = HelperPolicy(SESSION)
            return DurableHelper(place, HOLDERS[number], AUTHORITY.public(), COORDINATOR.public(), policy)
        if party == "client":
            return DurableClient(place, IDENTITIES[number], AUTHORITY.public(), SESSION)
        log = log_module.FolderLog(place)
        try:
            rounds = SumRounds(log, SESSION, AUTHORITY.public(), limits=CoordinatorLimits(waiting=3, retry_seconds=0.0))
            rounds.publish(self.signed)
            log.commit()
        except Killed:
            log.close()
            raise
        return rounds

    def run(self, party: Party, number: int, act: Callable[[Any], Any]) -> Any:
        """Let a party's process do something; None if it is killed."""
        self.disk.party = party
        try:
            if (party, number) not in self.parties:
                self.parties[party, number] = self._start(party, number)
            elif self.random.random() < self.disk.rate / 4:
                self.disk.points[party, "between messages"] += 1
                raise Killed
            return act(self.parties[party, number])
        except Killed:
            self.kill(party, number)
            return None

    def kill(self, party: Party, number: int) -> None:
        """End a process. What it had not written is lost."""
        self.kills[party] += 1
        process = self.parties.pop((party, number), None)
        if process is not None:
            (process.log if party == "coordinator" else process._log).close()
        self.disk.lose(self.folder / f"{party}{number}" / "log")

    def close(self) -> None:
        for party, number in list(self.parties):
            self.kill(party, number)

    # --- messages

    def request(self, data: bytes) -> bytes | None:
        """The coordinator's answer to a client; the same for the same request, unless it says wait."""

        def act(rounds: SumRounds) -> bytes:
            answer = rounds.receive(data, self.now)
            rounds.log.commit()
            return answer

        answer: bytes | None = self.run("coordinator", 0, act)
        message = None if answer is None else c.decode_from_coordinator(answer)
        if isinstance(message, c.UploadAccepted):
            upload = c.decode_to_coordinator(data, 1 << 20)
            assert isinstance(upload, c.SendUpload)
            client = m.decode_upload(upload.upload, self._terms(message.round, message.sum)).client
            place = message.round, message.sum, client
            assert self.accepted.setdefault(place, message.digest) == message.digest, "two uploads of one client in a slot"
            before = self.answers.setdefault(sha256(data).digest(), answer or b"")
            assert before == answer, "two answers to one request"
        return answer

    def _terms(self, number: int, of_round: int) -> Any:
        rounds = self.parties["coordinator", 0]
        slot = number, of_round
        return rounds.attempts[slot].opened.terms if slot in rounds.attempts else rounds.ended[slot].terms

    def client(self, number: int) -> None:
        """A client sends its request, now and then an old one first, and takes the answer."""
        data: bytes | None = self.run("client", number, lambda client: client.request())
        if data is None:
            return
        sent = c.decode_to_coordinator(data, 1 << 20)
        if isinstance(sent, c.SendUpload):
            digest = sha256(sent.upload).digest()
            assert self.left.setdefault((sent.round, sent.sum, number), digest) == digest, "two uploads for a slot left a client"
            self.sent.append(data)
        if self.sent and self.random.random() < 0.2:
            self.request(self.random.choice(self.sent))  # a repeated or late message
        answer = self.request(data)
        if answer is None or self.random.random() < self.lost:
            return

        def act(client: DurableClient) -> None:
            try:
                task = client.answered(answer)
                if isinstance(task, UploadTask):
                    policy = Policy(SESSION, "active", MODEL, names=(task.slot[0],))
                    client.enter(task, policy, Contribution(levels(number, task.slot[0]), is_levels=True))
            except RemoteError as error:
                assert error.code == "second-sum", error.code  # noqa: PT017

        self.run("client", number, act)

    def _helper(self, number: int, data: bytes) -> bytes | None:
        """A helper's answer as it arrives, if it does."""
        answer: bytes | None = self.run("helper", number, lambda helper: helper.receive(data))
        if answer is None:
            return None
        message = c.decode_helper_answer(answer, 1 << 24)
        ask = c.decode_ask(data, COORDINATOR.public())
        if not message.code and ask.message:
            asked = m.decode_to_helper(ask.message)
            signed = m.decode_from_helper(message.message, asked.terms)
            if isinstance(signed, m.SignedSet):
                names = self.sets[asked.terms.slot, number]
                names.add(signed.name)
                assert len(names) == 1, "a helper signed two sets of a slot"
        if self.random.random() < self.lost:
            return None
        return b"" if message.code else message.message

    def ask(self, outbox: dict[int, bytes], roster: bytes, tries: int = 50) -> dict[int, bytes]:
        """The helpers' answers; each is asked until it answers, in the end without further kills."""
        answers = {}
        for number, message in outbox.items():
            data = c.ask_helper(COORDINATOR, number, self.number, message, roster)
            answer, tried, before = None, 0, (self.disk.rate, self.lost)
            while answer is None:
                if tried == tries:
                    self.disk.rate = self.lost = 0.0
                answer, tried = self._helper(number, data), tried + 1
            self.disk.rate, self.lost = before
            if answer:
                answers[number] = answer
        return answers

    # --- rounds

    def coordinator(self, cohort: tuple[int, ...], seconds: float, helpers: Callable[[], list[int]]) -> AttemptEnded | str | None:
        """One step of the coordinator; how the round's sum ended."""

        def begin(rounds: SumRounds) -> Any:
            found = rounds.find(self.number, 0, self.attempts)
            roster = rounds.begin(self.number)
            rounds.log.commit()
            return found, roster

        begun = self.run("coordinator", 0, begin)
        if begun is None or isinstance(begun[0], AttemptEnded):
            return None if begun is None else begun[0]
        found, roster = begun
        if found is None:
            announced = self.ask(dict.fromkeys(helpers(), b""), roster)
            if len(announced) < 3:
                return "too-few-helpers"
            plan = SumPlan(cohort, (MODEL,), DIMENSION, 1.0)

            def start(rounds: SumRounds) -> None:
                rounds.open(self.number, 0, plan, announced, self.now + seconds)
                rounds.log.commit()

            self.run("coordinator", 0, start)
            return None

        def step(rounds: SumRounds) -> Any:
            outbox = rounds.step(found, self.now)
            rounds.log.commit()
            return outbox

        outbox = self.run("coordinator", 0, step)
        if not outbox:
            return None
        there = helpers()
        answers = self.ask({number: data for number, data in outbox.items() if number in there}, roster)

        def answered(rounds: SumRounds) -> None:
            if found in rounds.attempts and set(rounds.attempts[found].outbox) == set(outbox):
                rounds.answered(found, answers)
                rounds.log.commit()

        self.run("coordinator", 0, answered)
        return None

    def check(self, done: AttemptEnded) -> None:
        """How a round ended: the same whenever it is asked, exact, with all uploads that were accepted."""
        terms = done.terms
        digests = dict(done.digests)
        for (number, of_round, client), digest in self.accepted.items():
            if (number, of_round) == terms.slot:
                assert digests.get(client) == digest, "an accepted upload was lost"
        if done.code:
            return
        try:
            result = done.result()
        except SumFailed as error:
            raise AssertionError("not exact") from error
        before = self.results.setdefault(self.number, result)
        assert before.survivors == result.survivors, "two sets of a round"
        assert (before.levels == result.levels).all(), "two results of a round"
        assert len(result.survivors) >= terms.minimum
        assert set(result.survivors) == set(digests), "an accepted upload was left out"
        assert (result.block() == sum(levels(client, self.number) for client in result.survivors)).all(), "wrong sum"

    def play(self, rate: float, rounds: int = 1, absent: int = 0, failing: int = 0, steps: int = 4000) -> list[str]:
        """SumRounds with kills at this rate, without some clients, and with helpers that stop; the codes that they ended with."""
        codes = []
        for number in range(rounds):
            self.number = number
            self.disk.rate = self.lost = rate
            seconds = 50.0 if absent else 1e9
            cohort = tuple(range(self.clients))
            there = self.random.sample(cohort, self.clients - absent)
            stopped = set(self.random.sample(range(4), failing))
            stops = self.random.randrange(8)
            for step in range(steps):
                self.now += 1.0 if absent else 0.0
                if step > steps // 2:
                    self.disk.rate = self.lost = 0.0  # whatever happened, the sum is finished now
                for client in self.random.sample(there, self.random.randrange(len(there) + 1)):
                    self.client(client)
                alive = [number for number in range(4) if number not in stopped or step < stops]
                done = self.coordinator(cohort, seconds, partial(list, alive))
                if isinstance(done, AttemptEnded):
                    self.check(done)
                if done is not None and self.random.random() < 0.5:
                    break
            else:
                raise AssertionError("the round did not end")
            codes.append(done if isinstance(done, str) else done.code)
        return codes
