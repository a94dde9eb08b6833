"""One attempt at a sum: the server's machine of `one_message`, rebuilt from what it was fed.

The machine has no clock and no randomness, so the same events in the same order give the same messages and the same result. Events are
durable before anything that follows from them leaves.

Guarantee: that of `one_message.HelpedServer`. Reveals: as the machine. Source: ours.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from .. import codec
from ..errors import HelpersFailed, ProtocolError, RemoteError, SumFailed, TooFewClients
from ..keys import verify
from ..one_message import HelpedServer, HelpedTerms, Sum
from ..one_message import messages as m
from ..one_message.terms import HelperNumber
from ..secagg.terms import Bytes32, Count, Id
from ..secagg.vectors import Bits
from ..uncopied import uncopied
from .rosters import RosterVersion

__all__ = [
    "SumAttempt",
    "UploadsClosed",
    "HelpersAnswered",
    "DeliveryBegun",
    "AttemptEnded",
    "AttemptEvent",
    "AttemptOpened",
    "SumPlan",
    "UploadEntered",
    "decode_event",
]

STORED_BYTES = 1 << 40
Answers = tuple[tuple[HelperNumber, bytes], ...]


@dataclass(frozen=True)
class SumPlan:
    """What a sum is over: the clients that are invited, and the fields of `one_message.make_terms`.

    clusters: the blocks that clients choose from, which all weigh equally; a block of fewer than `min_cohort` clients is zeros.
    noise: of helpers, see `one_message.HelpedTerms`. Clients insist on it by `Policy.noise`, and put a normal of
        `shared_noise.SHARE_STEPS` on their levels (`one_message.noise`).
    listed: helpers take no other clients in than the invited ones.
    """

    cohort: tuple[int, ...]
    models: tuple[bytes, ...]
    dimension: int
    clip: float
    bits: Bits = 32
    weight_limit: float = 0.0
    spread: float = 1.0
    min_cohort: int = 3
    cohort_change: int = 0
    clusters: int = 0
    noise: int = 0
    listed: bool = False


class AttemptOpened(msgspec.Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """An attempt began. `label`: of the group; `closes`: when uploads are taken no more, in seconds of the caller's clock."""

    label: Count
    attempt: Count
    terms: HelpedTerms
    announcements: Answers
    roster: RosterVersion
    cohort: tuple[Id, ...]
    closes: float


class UploadEntered(msgspec.Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """A client's upload was accepted."""

    client: Id
    upload: bytes


class DeliveryBegun(msgspec.Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """The uploads that wait go to the helpers."""


class HelpersAnswered(msgspec.Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """The helpers answered the last messages."""

    answers: Answers


class UploadsClosed(msgspec.Struct, frozen=True, array_like=True, tag=5, forbid_unknown_fields=True):
    """No more uploads are taken."""


AttemptEvent = UploadEntered | DeliveryBegun | HelpersAnswered | UploadsClosed


class AttemptEnded(msgspec.Struct, frozen=True, array_like=True, tag=6, forbid_unknown_fields=True):
    """An attempt ended, with a sum or with a code. `closed`: helpers may have signed its set, so its values go into no other set.

    `members`: the clients of the set. `parties`: that an error names. `digests`: of the uploads that were accepted.
    """

    label: Count
    attempt: Count
    terms: HelpedTerms
    code: Annotated[str, Meta(max_length=64)]
    closed: bool
    members: tuple[Id, ...]
    parties: tuple[Id, ...]
    levels: bytes
    digests: tuple[tuple[Id, Bytes32], ...]

    def result(self) -> Sum[HelpedTerms]:
        """The sum. Raises what the attempt ended with: `TooFewClients`, `HelpersFailed`, `SumFailed`."""
        if not self.code:
            return Sum(self.terms, self.members, np.frombuffer(self.levels, "<i4").astype(np.int32))
        if self.code == TooFewClients.code:
            raise TooFewClients((len(self.members),), self.terms.minimum)
        if self.code == "out-of-range":
            raise SumFailed(self.code, among=self.members)
        raise HelpersFailed(self.code, self.parties)


def decode_event(data: bytes) -> AttemptEvent:
    """An event that was stored. Raises `MalformedMessage`."""
    event: AttemptEvent = codec.decode(data, AttemptEvent, STORED_BYTES)  # type: ignore[arg-type]
    return event


@uncopied("it follows one sequence of events; build another from the log")
class SumAttempt:
    """An attempt, as far as its events go.

    outbox: messages for helpers that still wait for answers. waiting: how many uploads are to be delivered.
    """

    def __init__(self, opened: AttemptOpened) -> None:
        self.opened = opened
        self._roster = opened.roster.roster
        self._server = HelpedServer(opened.terms, dict(opened.announcements), self._roster)
        self.invite = self._server.invite
        self.digests: dict[int, bytes] = {}
        self.outbox: dict[int, bytes] = {}
        self.waiting, self.events = 0, 0
        self.closing, self.delivering = False, False
        self.done: AttemptEnded | None = None

    def __repr__(self) -> str:
        return f"SumAttempt(slot={self.opened.terms.slot}, {len(self.digests)} uploads)"

    @property
    def full(self) -> bool:
        """Whether all invited clients uploaded."""
        return len(self.digests) == len(self.opened.cohort)

    @property
    def helpers(self) -> tuple[int, ...]:
        """The helpers that have answered so far."""
        return self._server.helpers

    @property
    def refused(self) -> dict[int, tuple[int, str]]:
        """Clients whose uploads a helper cannot use: the helper, and why."""
        return self._server.refused

    @property
    def liars(self) -> set[int]:
        """Helpers that sent false masks."""
        return self._server.liars

    def check(self, message: m.MaskedUpload) -> None:
        """Raises `RemoteError` "not-invited" or "bad-signature"."""
        if message.client not in self.opened.cohort:
            raise RemoteError("not-invited", message.client)
        verify(self._roster, message.client, message.signature, m.UPLOAD, m.signed_digest(self.opened.terms, message))

    def apply(self, event: AttemptEvent) -> None:
        """Take the next event. Raises `RemoteError` for an upload that is refused; nothing has changed then."""
        match event:
            case UploadEntered():
                digest = m.signed_digest(self.opened.terms, m.decode_upload(event.upload, self.opened.terms))
                self._server.receive(event.client, event.upload)
                self.digests[event.client] = digest
                self.waiting += 1
            case DeliveryBegun():
                self.waiting, self.delivering = 0, True
                self.outbox = self._server.deliver()
            case HelpersAnswered() if self.delivering:
                self.outbox, self.delivering = {}, False
                self._server.delivered(dict(event.answers))
            case UploadsClosed():
                self.closing = True
                self._advance(self._server.close)
            case HelpersAnswered():
                self._advance(lambda: self._server.advance(dict(event.answers)))
        self.events += 1

    def _advance(self, step: Callable[[], dict[int, bytes]]) -> None:
        """The next messages; the end if there are none."""
        try:
            self.outbox = step()
        except (TooFewClients, SumFailed, HelpersFailed) as error:
            self._end(error)
        else:
            if not self.outbox:
                self._end(None)

    def _end(self, error: ProtocolError | None) -> None:
        opened, asked = self.opened, bool(self.outbox)
        self.outbox = {}
        levels = b"" if error is not None else self._server.result.levels.astype("<i4").tobytes()
        parties = error.helpers if isinstance(error, HelpersFailed) else ()
        self.done = AttemptEnded(
            opened.label, opened.attempt, opened.terms, "" if error is None else error.code, asked or error is None, self._server.members,
            parties, levels, tuple(sorted(self.digests.items())),
        )  # fmt: skip
