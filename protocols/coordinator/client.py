"""A client of a durable coordinator: requests and answers as bytes, over a log of its own.

    client.request()            the next request, also after a restart
    client.answered(answer)     what follows: a `UploadTask`, seconds to wait, or an upload that was accepted or refused
    client.enter(task, ...)     the upload of a task; it is stored before `request` gives it out

`take_part` does this over a transport.

Guarantee: that of `one_message`'s client. The record of sums, the slot and the upload are stored together before the upload leaves, and the
same bytes are sent until there is an answer: a restarted client neither uploads twice to a slot nor enters a value into sums of another
kind. Rosters as `rosters.taken` says. Reveals: its uploads, and who it is to who sees its requests. Source: ours.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from .. import codec
from ..copies import check_own
from ..entropy import Entropy, system_entropy
from ..errors import MalformedMessage, RemoteError
from ..keys import Identity
from ..one_message import AcceptedInvite, accept, upload
from ..one_message import messages as m
from ..secagg.policy import Policy
from ..secagg.summed import SumRecord
from ..secagg.terms import Count, Slot
from ..secagg.vectors import Contribution
from ..uncopied import uncopied
from . import messages as c
from .attempts import STORED_BYTES
from .log import FolderLog
from .rosters import read_roster_version, taken
from .sessions import entered

__all__ = ["DurableClient", "UploadSettled", "UploadTask", "take_part"]

_PAUSE = 0.05
_LONGEST_PAUSE = 5.0
_MOST_DOUBLINGS = 4


@dataclass(frozen=True)
class UploadTask:
    """The coordinator asks for an upload to the sum of a slot; what it sent is not checked yet. Uploads are taken for `seconds`."""

    slot: Slot
    invite: bytes
    seconds: float


@dataclass(frozen=True)
class UploadSettled:
    """The upload to a slot was accepted, or refused with a code."""

    slot: Slot
    code: str


class _Last(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The last slot, and its upload until there is an answer."""

    round: Count
    sum: Count
    upload: bytes


@uncopied("two copies would each upload; open the folder again")
class DurableClient:
    """A client.

    Args:
        folder: its state, secret.
        identity: its keys; the signing key is on rosters at its number.
        authority, federation: the public key of who signs rosters, and the name of the federation, if it has several.
        session: 16 bytes naming the training run. In a new one slots begin anew, and names of values that are digests are remembered.
        colluding: how many helpers may work with the server.

    Raises:
        DamagedLog, OSError: as `FolderLog`. LocalError: "old-session" for one that another has followed.
    """

    def __init__(
        self,
        folder: str | Path,
        identity: Identity,
        authority: bytes,
        session: bytes,
        *,
        colluding: int = 1,
        entropy: Entropy = system_entropy,
        federation: str = "",
    ) -> None:
        check_own("identity", identity, Identity)
        self._identity, self._authority, self._colluding, self._entropy = identity, authority, colluding, entropy
        self._federation, self._ended = federation, False
        self._log = FolderLog(folder)
        try:
            stored = self._log.get("record")
            renewed = None if stored is None else SumRecord.from_bytes(stored).renewed().to_bytes()
            entered(self._log, session, {"last": None, "record": renewed})
        except BaseException:
            self._log.close()
            raise

    def __repr__(self) -> str:
        return f"DurableClient({self._identity.client}, {self._log.path.parent!s})"

    def close(self) -> None:
        """Let go of the folder."""
        self._log.close()

    def _last(self) -> _Last | None:
        data = self._log.get("last")
        return None if data is None else codec.decode(data, _Last, STORED_BYTES)

    @property
    def last_slot(self) -> Slot | None:
        """The slot of the last upload."""
        last = self._last()
        return None if last is None else (last.round, last.sum)

    @property
    def ended(self) -> bool:
        """Whether the coordinator answered last that the sum of the last slot has ended, and is not taken again."""
        return self._ended

    def request(self) -> bytes:
        """The upload that has no answer yet, or a question for work."""
        last = self._last()
        if last is not None and last.upload:
            return c.encode(c.SendUpload(last.round, last.sum, last.upload))
        roster = self._log.get("roster")
        version = 0 if roster is None else read_roster_version(roster, self._authority, self._federation).version
        return c.encode(c.WorkPoll(self._identity.client, self.last_slot, version))

    def answered(self, data: bytes) -> UploadTask | UploadSettled | float:
        """Take the answer to `request`. Returns what to do: a task, a number of seconds to wait, or what became of an upload.

        Raises:
            RemoteError: "malformed"; "old-roster" or "bad-signature" for a roster. Nothing has changed.
        """
        message, last = c.decode_from_coordinator(data), self._last()
        self._ended = isinstance(message, c.ComeAgain) and message.code == "ended"
        sending = last is not None and bool(last.upload)
        match message:
            case c.ComeAgain():
                self._take(message.roster)
                return message.seconds
            case c.SumInvited() if not sending:
                terms = m.decode_invite(message.invite).terms
                self._take(message.roster)
                return UploadTask(terms.slot, message.invite, message.seconds)
            case c.UploadAccepted() if last is not None and sending and (message.round, message.sum) == (last.round, last.sum):
                return self._settled(last, "")
            case c.RequestRefused() if last is not None and sending:
                return self._settled(last, message.code)
            case c.RequestRefused():
                raise RemoteError(message.code)
            case _:
                raise MalformedMessage

    def _settled(self, last: _Last, code: str) -> UploadSettled:
        self._log["last"] = codec.encode(_Last(last.round, last.sum, b""))
        return UploadSettled((last.round, last.sum), code)

    def _take(self, roster: bytes) -> None:
        own = self._log.get("roster", b"")
        if roster and taken(own, roster, self._authority, self._federation) != own:
            self._log["roster"] = roster

    def accepted(self, task: UploadTask, policy: Policy) -> AcceptedInvite:
        """The terms of a task, checked by a policy. Its `after` is replaced by the last slot.

        Raises:
            RemoteError: as `one_message.accept`; "wrong-roster" where there is none yet.
        """
        roster = self._log.get("roster")
        if roster is None:
            raise RemoteError("wrong-roster")
        known = read_roster_version(roster, self._authority, self._federation).roster
        own = msgspec.structs.replace(policy, after=self.last_slot)
        return accept(task.invite, self._identity, own, self._colluding, known)

    def enter(self, task: UploadTask, policy: Policy, contribution: Contribution | Sequence[Contribution]) -> None:
        """Answer a task: store its upload, which `request` gives out from now on. `contribution`: as for `one_message.upload`.

        Raises:
            RemoteError: as `accepted` and `one_message.upload`. LocalError: as `one_message.upload`. OSError: it cannot be stored.
        """
        accepted = self.accepted(task, policy)
        stored = self._log.get("record")
        record = SumRecord() if stored is None else SumRecord.from_bytes(stored)
        data, _ = upload(accepted, self._identity, policy, record, contribution, self._entropy)
        self._log.add({"record": record.to_bytes(), "last": codec.encode(_Last(*accepted.terms.slot, data))})
        self._log.commit()

    def skip(self, task: UploadTask) -> None:
        """Take no part in the sum of a task."""
        if self.last_slot is None or task.slot > self.last_slot:
            self._log["last"] = codec.encode(_Last(*task.slot, b""))


async def take_part(
    client: DurableClient,
    exchange: Callable[[bytes], Awaitable[bytes]],
    work: Callable[[Slot], Awaitable[tuple[Policy, Contribution | Sequence[Contribution]] | None]],
    *,
    through: int | None = None,
    patience: float = 60.0,
) -> None:
    """Take part in sums until that of round `through` has ended, with all its attempts; for ever without it.

    Args:
        exchange: sends a request to the coordinator and returns the bytes of its answer. `OSError` and `TimeoutError` mean that there is
            none; the request is sent again.
        patience: for so long a coordinator that does not answer is asked how the sum of round `through` ended.
        work: the policy and the contribution for a slot; None to take no part in it. In each slot of a round the same value.

    Raises:
        RemoteError, LocalError: a task that the policy refuses, or a contribution that does not fit; the client stops, because the
        coordinator does not do as agreed, and an answer that is none. OSError: the state cannot be written.
    """
    pause, waited, latest = _PAUSE, 0, time.monotonic()
    while not _through(client, through) or _waits(client) or not client.ended:
        request = client.request()
        try:
            data = await exchange(request)
        except (OSError, TimeoutError):
            if _through(client, through) and not _waits(client) and time.monotonic() - latest > patience:
                return
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, _LONGEST_PAUSE)
            continue
        pause, latest = _PAUSE, time.monotonic()
        answer = client.answered(data)
        waited = waited + 1 if isinstance(answer, float) and (_waits(client) or _through(client, through)) else 0
        if isinstance(answer, float) and not (client.ended and _through(client, through)):
            await asyncio.sleep(answer * 2 ** min(max(waited - 1, 0), _MOST_DOUBLINGS) * random.uniform(0.5, 1.5))
        elif isinstance(answer, UploadTask):
            done = await work(answer.slot)
            if done is None:
                client.skip(answer)
            else:
                await asyncio.to_thread(client.enter, answer, *done)


def _through(client: DurableClient, number: int | None) -> bool:
    """Whether the last upload was to this round, or to a later one."""
    return number is not None and client.last_slot is not None and client.last_slot[0] >= number


def _waits(client: DurableClient) -> bool:
    """Whether an upload has no answer yet."""
    last = client._last()
    return last is not None and bool(last.upload)
