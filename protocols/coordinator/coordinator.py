"""A coordinator that survives restarts, for an engineer's own server: `SumRounds` on an asyncio loop.

`receive` takes the bytes of a client's request and gives those of the answer; `ask` is the caller's way to a helper. An answer leaves
after the log is on the disk; requests that arrive together share one write. More requests than `CoordinatorLimits` allows have to come
again.

Guarantee: a result of `sum`, once returned, is returned again after any restart, for `CoordinatorLimits.kept_rounds` rounds. A helper that
does not answer is asked again until `patience` is over, so that it may restart, too. Reveals: as `SumRounds`; logs and counters have
numbers of rounds, clients and helpers, sizes and codes, no values. Source: ours.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from ..copies import check_own
from ..errors import HelpersFailed, RemoteError
from ..keys import Identity, Roster
from ..one_message import HelpedTerms, Sum, quorum
from ..one_message import messages as m
from ..one_message.terms import MOST_SETS
from ..secagg.terms import SMALL_LIMIT_BYTES, Slot
from ..secagg.vectors import vector_length
from ..uncopied import uncopied
from . import messages as c
from .attempts import AttemptEnded, SumPlan
from .log import FolderLog
from .rosters import JoinRequest, RenewRequest
from .rounds import CoordinatorLimits, SumRounds

__all__ = ["Coordinator"]

Ask = Callable[[int, bytes], Awaitable[bytes]]
_PAUSE = 0.05
_LONGEST_PAUSE = 2.0


@uncopied("one process serves one folder")
class Coordinator:
    """The coordinator of a federation, over a folder of its own.

    Args:
        folder: its state; as secret as masked uploads are.
        identity: signs its questions to helpers, who know its public key.
        authority, federation: the public key of who signs rosters, and the name of the federation, if it has several.
        session: 16 bytes naming the training run.
        ask: sends bytes to a helper (by its number on the roster) and returns the bytes of the answer. `OSError` and `TimeoutError` mean
            that there is none now. A cancelled call must end.
        colluding: how many helpers may work with the server.
        roster: a first version of the roster, or a later one; `publish` takes others.
        clock: seconds; deadlines outlive the process, so not a monotonic clock.

    Raises:
        DamagedLog, OSError: as `FolderLog`. LocalError: "other-session". RemoteError: as `publish`.
    """

    def __init__(
        self, folder: str | Path, identity: Identity, authority: bytes, session: bytes, ask: Ask, *, colluding: int = 1,
        roster: bytes = b"", limits: CoordinatorLimits | None = None, clock: Callable[[], float] = time.time, federation: str = "",
    ) -> None:  # fmt: skip
        check_own("identity", identity, Identity)
        self._identity, self._ask, self._clock, self._colluding = identity, ask, clock, colluding
        self._log = FolderLog(folder)
        try:
            self.rounds = SumRounds(self._log, session, authority, colluding=colluding, limits=limits, federation=federation)
            if roster:
                self.publish(roster)
        except BaseException:
            self._log.close()
            raise
        self._committing = asyncio.Lock()
        self._opening = asyncio.Lock()
        self._driving: dict[Slot, asyncio.Task[None]] = {}
        self._arrived: dict[Slot, asyncio.Event] = {}
        self._inside = 0
        self.commit_seconds = 0.0

    def __repr__(self) -> str:
        return f"Coordinator({self._log.path.parent!s}, round {self.rounds.number})"

    async def close(self) -> None:
        """Stop. A coordinator of the same folder goes on."""
        for task in self._driving.values():
            task.cancel()
        await asyncio.gather(*self._driving.values(), return_exceptions=True)
        self._log.close()

    async def __aenter__(self) -> "Coordinator":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # --- clients

    @property
    def largest_request(self) -> int:
        """The most bytes of a request now; a transport need not read more."""
        return self.rounds.largest_upload + c.ENVELOPE_BYTES

    async def receive(self, data: bytes) -> bytes:
        """The answer to a client's request, whatever its bytes. Raises `OSError` if the state cannot be written."""
        if self._inside >= self.rounds.limits.requests:
            return self.rounds.busy()
        self._inside += 1
        try:
            answer = self.rounds.receive(data, self._clock())
            await self._commit()
        finally:  # a request whose sender went away is entered all the same
            self._inside -= 1
            for arrived in self._arrived.values():
                arrived.set()
        return answer

    # --- rosters

    @property
    def round(self) -> int:
        """The current round, where a new process goes on; −1 before the first."""
        return self.rounds.number

    def publish(self, roster: bytes) -> None:
        """Take a version of the roster (`rosters.sign_roster`), for rounds that begin from now on.

        Raises:
            RemoteError: "old-roster", "bad-signature", "malformed". OSError.
        """
        self.rounds.publish(roster)
        self._log.commit()

    @property
    def wishes(self) -> list[JoinRequest | RenewRequest]:
        """Requests to join and to renew keys, for the authority."""
        return list(self.rounds.wishes().values())

    def decline(self, request: JoinRequest | RenewRequest) -> None:
        """Drop a request of `wishes` that the authority does not grant. Raises `OSError`."""
        self.rounds.decline(request)
        self._log.commit()

    # --- sums

    async def sum(
        self, number: int, plan: SumPlan, *, label: int = 0, seconds: float = 60.0, patience: float = 60.0, attempts: int = 1
    ) -> Sum[HelpedTerms]:
        """The sum of a group in a round. Called again, also after a restart, it goes on with the same sum, or returns it again.

        Args:
            number: of the round; rounds do not go back. Sums of one round may be taken at the same time.
            plan: what the sum is over. An attempt that has begun keeps the plan that it began with.
            label: of the group.
            seconds: for so long after an attempt began uploads are taken; less if all clients uploaded.
            patience: for so long helpers are asked at each stage.
            attempts: that are made, each in a slot of its own, if too few clients or helpers took part. Once helpers may have signed a
                set of clients, later attempts are over that set.

        Raises:
            TooFewClients, HelpersFailed, SumFailed: how the last attempt ended. LocalError: as `SumRounds.begin`. ValueError: a plan that
            has no terms. OSError: the state cannot be written.
        """
        while True:
            async with self._opening:
                outcome = self.rounds.find(number, label, attempts)
                if outcome is None:
                    outcome = await self._open(number, label, plan, seconds, patience)
            if isinstance(outcome, AttemptEnded):
                await self._commit()
                if outcome.code:
                    self.rounds.give_up(number, label)
                return outcome.result()
            await asyncio.shield(self._driver(outcome, patience))

    async def _open(self, number: int, label: int, plan: SumPlan, seconds: float, patience: float) -> Slot:
        roster = self.rounds.begin(number)
        await self._commit()
        version = self.rounds.roster
        assert version is not None
        helpers = dict.fromkeys(range(len(version.holders)), b"")
        answers = await self._ask_all(number, helpers, roster, 1 << 12, patience)
        announced = {helper: data for helper, data in answers.items() if self._announced(version.roster, helper, number, data)}
        if len(announced) < quorum(len(version.holders), self._colluding):
            raise HelpersFailed("too-few-helpers", tuple(announced))
        slot = self.rounds.open(number, label, plan, announced, self._clock() + seconds)
        await self._commit()
        return slot

    def _announced(self, roster: Roster, helper: int, number: int, data: bytes) -> bool:
        try:
            message = m.announcement_of(roster, data)
        except RemoteError:
            return False
        return (message.helper, message.session, message.round) == (helper, self.rounds.session, number)

    def _driver(self, slot: Slot, patience: float) -> asyncio.Task[None]:
        task = self._driving.get(slot)
        if task is None:
            task = self._driving[slot] = asyncio.create_task(self._drive(slot, patience))
            task.add_done_callback(lambda _: self._driving.pop(slot, None))
        return task

    async def _drive(self, slot: Slot, patience: float) -> None:
        """Take an attempt to its end."""
        attempt = self.rounds.attempts[slot]
        terms = attempt.opened.terms
        roster = self.rounds.begin(slot[0])
        largest = SMALL_LIMIT_BYTES + MOST_SETS * vector_length(terms) * terms.bits // 8
        arrived = self._arrived[slot] = asyncio.Event()
        try:
            while slot in self.rounds.attempts:
                arrived.clear()
                outbox = self.rounds.step(slot, self._clock())
                await self._commit()
                if outbox:
                    self.rounds.answered(slot, await self._ask_all(slot[0], outbox, roster, largest, patience))
                    await self._commit()
                elif slot in self.rounds.attempts:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(max(attempt.opened.closes - self._clock(), 0.0) + _PAUSE):
                            await arrived.wait()
        finally:
            del self._arrived[slot]

    async def _ask_all(
        self, number: int, outbox: Mapping[int, bytes], roster: bytes, largest: int, patience: float
    ) -> dict[int, bytes]:  # fmt: skip
        """The answers of the helpers that answer in time."""
        answers: dict[int, bytes] = {}

        async def asked(helper: int, message: bytes) -> None:
            answer = await self._ask_one(helper, c.ask_helper(self._identity, helper, number, message, roster), largest)
            if answer is not None:
                answers[helper] = answer

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await asyncio.gather(*(asked(helper, message) for helper, message in outbox.items()))
        return answers

    async def _ask_one(self, helper: int, data: bytes, largest: int) -> bytes | None:
        """A helper's answer; None if it refuses. It is asked again as long as there is none."""
        pause = _PAUSE
        while True:
            try:
                answer = c.decode_helper_answer(await self._ask(helper, data), largest)
            except (OSError, TimeoutError, RemoteError) as error:
                self.rounds.count("helper_requests_total", helper=str(helper), code=getattr(error, "code", "no-answer"))
            else:
                self.rounds.count("helper_requests_total", helper=str(helper), code=answer.code or "ok")
                return None if answer.code else answer.message
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _commit(self) -> None:
        """All that was added to the log so far is on the disk. Those who wait at the same time share a write."""
        added = self._log.added
        if self._log.committed >= added:
            return
        async with self._committing:
            if self._log.committed < added:
                start = time.perf_counter()
                await asyncio.to_thread(self._log.commit)
                self.commit_seconds += time.perf_counter() - start
