"""All that a durable coordinator decides and keeps, over a log. No I/O but the log, no clock.

Each method enters what it decides into the log, and the caller commits the log before it lets anything that follows from that leave:
answers to clients, messages to helpers, results. A new process over the same folder goes on where the last one was, at any point.

    session, roster, round       what sums belong to; the roster that is current; the round, with the roster that it began with
    largest                      the most bytes of an upload to any sum so far
    wish/KEY                     the request to join or to renew a key, by the key of the invitation or the old key: one each
    invited/KEY                  the digest of the request that an invitation was used for
    slot/ROUND.SUM/open          an attempt at a sum, and slot/ROUND.SUM/NUMBER its events
    slot/ROUND.SUM/done          how it ended; takes the place of its events, and goes after `kept_rounds` later rounds

Guarantee: an upload that was accepted is in the log. The same request gets the same answer, except while it is to come again. A slot has
one attempt, and one set of clients. An attempt whose set helpers may have signed is followed by attempts over the same clients only, under
the same quantiser. Reveals: as `one_message.HelpedServer`. Source: ours.
"""

import json
import logging
from collections import Counter
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Literal

import msgspec

from .. import codec
from ..errors import LocalError, RemoteError
from ..one_message import make_terms
from ..one_message import messages as m
from ..secagg.terms import Count, Slot
from ..uncopied import uncopied
from . import messages as c
from .attempts import (
    STORED_BYTES,
    AttemptEnded,
    AttemptEvent,
    AttemptOpened,
    DeliveryBegun,
    HelpersAnswered,
    SumAttempt,
    SumPlan,
    UploadEntered,
    UploadsClosed,
    decode_event,
)
from .log import FolderLog
from .rosters import JoinRequest, RenewRequest, RosterVersion, check_request, read_roster_version, taken

__all__ = ["CoordinatorLimits", "SumRounds"]

logger = logging.getLogger("cflpriv.coordinator")


class CoordinatorLimits(msgspec.Struct, frozen=True):
    """What a coordinator takes on.

    waiting: uploads that helpers have not seen yet; more have to come again. requests: that are being handled at a time.
    retry_seconds: until clients ask again. kept_rounds: for so many rounds results are kept, and requests are still answered.

    Raises `ValueError` naming the field that is wrong.
    """

    waiting: int = 256
    requests: int = 512
    retry_seconds: float = 1.0
    kept_rounds: int = 8

    def __post_init__(self) -> None:
        for name in ("waiting", "requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 at least")
        if not 0 <= self.retry_seconds <= c.MOST_SECONDS:
            raise ValueError(f"retry_seconds: expected 0 to {c.MOST_SECONDS:g}")
        if self.kept_rounds < 0:
            raise ValueError("kept_rounds: expected 0 at least")


class _Round(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    number: Count
    roster: bytes


@uncopied("it is all that one folder has; open the folder again")
class SumRounds:
    """The coordinator's state.

    Args:
        log: of its own.
        session: 16 bytes naming the training run.
        authority, federation: the public key of who signs rosters, and the name of the federation.

    Raises:
        LocalError: "other-session" for a folder of another session.
    """

    def __init__(
        self, log: FolderLog, session: bytes, authority: bytes, *, colluding: int = 1, limits: CoordinatorLimits | None = None,
        federation: str = "",
    ) -> None:  # fmt: skip
        self.log, self.session, self._authority, self._federation = log, session, authority, federation
        self._colluding, self.limits = colluding, limits or CoordinatorLimits()
        self._given_up: set[tuple[int, int]] = set()
        if log.get("session", session) != session:
            raise LocalError("other-session", f"{log.path}: is of another session")
        if "session" not in log:
            log["session"] = session
        self.counts: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()
        self.attempts: dict[Slot, SumAttempt] = {}
        self.ended: dict[Slot, AttemptEnded] = {}
        stored = log.get("round")
        self._round = None if stored is None else codec.decode(stored, _Round, STORED_BYTES)
        self._restore()

    def __repr__(self) -> str:
        return f"SumRounds({len(self.attempts)} sums under way, {len(self.ended)} ended)"

    def _restore(self) -> None:
        for name in sorted(name for name in self.log if name.startswith("slot/")):
            _, place, what = name.split("/")
            number, _, of_round = place.partition(".")
            slot = int(number), int(of_round)
            data = self.log[name]
            if what == "done":
                self.ended[slot] = codec.decode(data, AttemptEnded, STORED_BYTES)
            elif what == "open":
                continue
            else:
                attempt = self.attempts.get(slot) or self._opened(slot)
                attempt.apply(decode_event(data))
        for name in [name for name in self.log if name.endswith("/open")]:
            number, _, of_round = name.split("/")[1].partition(".")
            self._opened((int(number), int(of_round)))
        for slot, attempt in self.attempts.items():
            self._report("attempt restored", slot, events=attempt.events, uploads=len(attempt.digests))

    def _opened(self, slot: Slot) -> SumAttempt:
        if slot not in self.attempts:
            self.attempts[slot] = SumAttempt(codec.decode(self.log[f"slot/{_name(slot)}/open"], AttemptOpened, STORED_BYTES))
        return self.attempts[slot]

    # --- rosters and rounds

    @property
    def number(self) -> int:
        """The current round; −1 before the first."""
        return -1 if self._round is None else self._round.number

    @property
    def roster(self) -> RosterVersion | None:
        """The roster of the current round, or the first one before that."""
        data = self._roster_data()
        return read_roster_version(data, self._authority, self._federation) if data else None

    def _roster_data(self) -> bytes:
        return self._round.roster if self._round is not None else self.log.get("roster", b"")

    def publish(self, roster: bytes) -> None:
        """Take a version of the roster, for rounds that begin from now on. Raises `RemoteError` as `rosters.taken`."""
        new = taken(self.log.get("roster", b""), roster, self._authority, self._federation)
        keys = read_roster_version(new, self._authority, self._federation)
        done = [name for name, wish in self.wishes().items() if _key(wish) in (*keys.keys, *keys.holders)]
        self.log.add({"roster": new, **dict.fromkeys(f"wish/{name.hex()}" for name in done)})
        self._report("roster", version=keys.version)

    def wishes(self) -> dict[bytes, JoinRequest | RenewRequest]:
        """Requests to join and to renew keys that no roster has granted yet, for the authority to decide (`rosters.applied`), by the key of
        the invitation or the old key."""
        names = [name for name in self.log if name.startswith("wish/")]
        return {bytes.fromhex(name[5:]): _wish(self.log[name]) for name in sorted(names)}

    def decline(self, request: JoinRequest | RenewRequest) -> None:
        """Drop a request that the authority does not grant. Its old key may ask again; its invitation may not."""
        name = f"wish/{_place(request).hex()}"
        if name in self.log:
            self.log.add({name: None})

    def begin(self, number: int) -> bytes:
        """Begin a round, or go on with it: the roster of all its sums.

        Raises:
            LocalError: "no-roster" before the first `publish`; "old-round"; "round-not-ended" while sums of an earlier one are under way.
        """
        if number < self.number:
            raise LocalError("old-round", f"round {self.number} has begun")
        if number > self.number:
            if self.attempts:
                raise LocalError("round-not-ended")
            roster = self.log.get("roster")
            if roster is None:
                raise LocalError("no-roster")
            self._round = _Round(number, roster)
            old = [slot for slot in self.ended if slot[0] < number - self.limits.kept_rounds]
            for slot in old:
                del self.ended[slot]
            gone = dict.fromkeys(f"slot/{_name(slot)}/done" for slot in old)
            self.log.add({"round": codec.encode(self._round), **gone})
            self._report("round", number=number)
        assert self._round is not None
        return self._round.roster

    # --- attempts

    def find(self, number: int, label: int, attempts: int) -> Slot | AttemptEnded | None:
        """The attempt at a group's sum that is under way; or how the sum ended; None if there is (another) one to make."""
        for slot, attempt in self.attempts.items():
            if (slot[0], attempt.opened.label) == (number, label):
                return slot
        before = self._before(number, label)
        finished = next((done for done in before if not done.code), None)
        return finished or (before[-1] if len(before) >= attempts else None)

    def _before(self, number: int, label: int) -> list[AttemptEnded]:
        return sorted((done for slot, done in self.ended.items() if (slot[0], done.label) == (number, label)), key=lambda d: d.attempt)

    def open(self, number: int, label: int, plan: SumPlan, announced: Mapping[int, bytes], closes: float) -> Slot:
        """Open an attempt at a group's sum in the next slot of the current round. `announced`: the helpers' announcements.

        Raises what `one_message.make_terms` raises.
        """
        roster = self.roster
        assert roster is not None
        before = self._before(number, label)
        first = before[0] if before else None
        signed = next((done for done in before if done.closed), None)  # later attempts that ended earlier change nothing about this set
        cohort = tuple(sorted(plan.cohort if signed is None else signed.members))
        equal = 1.0 if plan.clusters else 0.0  # weights are counts then
        terms = make_terms(
            session=self.session, slot=(number, self._next(number)), roster=roster.roster, colluding=self._colluding, announced=announced,
            clients=len(cohort), models=plan.models, dimension=plan.dimension, clip=plan.clip, bits=plan.bits,
            levels=None if first is None else first.terms.levels, weight_limit=equal or plan.weight_limit,
            least_weight=(equal or None) if first is None else first.terms.least_weight,
            spread=plan.spread, min_cohort=plan.min_cohort if signed is None else len(cohort),
            effective=plan.min_cohort, cohort_change=plan.cohort_change, clusters=plan.clusters, noise=plan.noise,
            cohort=cohort if plan.listed else (),
        )  # fmt: skip
        self._given_up.discard((number, label))
        opened = AttemptOpened(label, len(before), terms, tuple(sorted(announced.items())), roster, cohort, closes)
        self.attempts[terms.slot] = SumAttempt(opened)
        largest = max(self.largest_upload, m.upload_limit(terms))
        self.log.add({f"slot/{_name(terms.slot)}/open": codec.encode(opened), "largest": largest.to_bytes(8, "big")})
        self._report("attempt", terms.slot, label=label, attempt=len(before), invited=len(cohort), helpers=list(terms.present))
        return terms.slot

    def _next(self, number: int) -> int:
        return max((slot[1] + 1 for slot in (*self.attempts, *self.ended) if slot[0] == number), default=0)

    def step(self, slot: Slot, now: float) -> dict[int, bytes]:
        """Messages for helpers, whose answers `answered` takes; none while an attempt waits for uploads, or once it has ended."""
        attempt = self.attempts.get(slot)
        if attempt is None:
            return {}
        if not attempt.outbox and not attempt.closing:
            if attempt.delivering:  # no helper is left
                self._enter(slot, attempt, HelpersAnswered(()))
            elif attempt.waiting:
                self._enter(slot, attempt, DeliveryBegun())
            elif attempt.full or now >= attempt.opened.closes:
                self._enter(slot, attempt, UploadsClosed())
        return attempt.outbox

    def answered(self, slot: Slot, answers: Mapping[int, bytes]) -> None:
        """Take the answers of helpers. Those that gave none, or an unusable one, are left out of this attempt from now on."""
        attempt = self.attempts[slot]
        asked = set(attempt.outbox)
        self._enter(slot, attempt, HelpersAnswered(tuple(sorted((helper, data) for helper, data in answers.items() if helper in asked))))
        for helper in sorted(asked - set(attempt.helpers)):
            self.count("helpers_left_out_total", helper=str(helper))
            self._report("helper left out", slot, helper=helper)

    def _enter(self, slot: Slot, attempt: SumAttempt, event: AttemptEvent) -> None:
        """Apply an event and write it down, or, if it is the last, how the attempt ended."""
        name = f"slot/{_name(slot)}/{attempt.events:010d}"
        refused = set(attempt.refused)
        attempt.apply(event)
        for client in sorted(set(attempt.refused) - refused):
            helper, code = attempt.refused[client]
            self.count("uploads_left_out_total", code=code)
            self._report("upload left out", slot, client=client, helper=helper, code=code)
        if attempt.done is None:
            self.log.add({name: codec.encode(event)})
            return
        del self.attempts[slot]
        self.ended[slot] = attempt.done
        gone = [f"slot/{_name(slot)}/{number:010d}" for number in range(attempt.events - 1)]
        self.log.add({**dict.fromkeys((f"slot/{_name(slot)}/open", *gone)), f"slot/{_name(slot)}/done": codec.encode(attempt.done)})
        self.count("sums_total", code=attempt.done.code or "ok")
        for helper in attempt.liars:
            self.count("false_masks_total", helper=str(helper))
        self._report("ended", slot, code=attempt.done.code or "ok", members=len(attempt.done.members), liars=sorted(attempt.liars))

    # --- clients

    @property
    def largest_upload(self) -> int:
        """The most bytes of an upload to any sum so far: late ones get an answer, too."""
        return int.from_bytes(self.log.get("largest", b""), "big")

    def receive(self, data: bytes, now: float) -> bytes:
        """The answer to a request of a client, whatever its bytes. Commit the log before the answer leaves."""
        kind = "other"
        try:
            message = c.decode_to_coordinator(data, self.largest_upload)
            kind = type(message).__name__
            answer = self._answer(message, now)
        except RemoteError as error:
            answer = c.RequestRefused(error.code)
        code = answer.code if isinstance(answer, c.RequestRefused | c.ComeAgain) else "ok"
        self.count("requests_total", kind=kind, code=code)
        return c.encode(answer)

    def busy(self) -> bytes:
        """The answer to a request that is not handled, because too many are."""
        self.count("requests_total", kind="other", code="busy")
        return c.encode(self._wait("busy"))

    def _wait(self, code: Literal["busy", "idle", "ended"], version: int | None = None) -> c.ComeAgain:
        roster = self.roster
        newer = roster is not None and version is not None and roster.version > version
        return c.ComeAgain(code, float(self.limits.retry_seconds), self._roster_data() if newer else b"")

    def _answer(self, message: c.ToCoordinator, now: float) -> c.FromCoordinator:
        match message:
            case c.WorkPoll():
                return self._poll(message, now)
            case c.SendUpload():
                return self._upload(message, now)
            case JoinRequest() | RenewRequest():
                return self._wish(message)

    def _poll(self, message: c.WorkPoll, now: float) -> c.FromCoordinator:
        for slot, attempt in sorted(self.attempts.items()):
            opened = attempt.opened
            fresh = message.after is None or slot > message.after
            if not fresh or now >= opened.closes or attempt.closing or message.client not in opened.cohort:
                continue
            if message.client not in attempt.digests and message.version <= opened.roster.version:
                newer = message.version < opened.roster.version
                return c.SumInvited(attempt.invite, float(min(opened.closes - now, c.MOST_SECONDS)), self._roster_data() if newer else b"")
        return self._wait("idle" if self._may_follow(message) else "ended", message.version)

    def _may_follow(self, message: c.WorkPoll) -> bool:
        """Whether the sum of a client's last slot is under way, or another attempt at it may be made."""
        if message.after is None or message.after in self.attempts:
            return True
        done = self.ended.get(message.after)
        over = message.after[0] < self.number if done is None else not done.code or (done.terms.round, done.label) in self._given_up
        return not over and message.after[0] >= self.number

    def give_up(self, number: int, label: int) -> None:
        """No more attempts are made at a group's sum of a round, unless `open` makes one all the same."""
        self._given_up.add((number, label))

    def _upload(self, message: c.SendUpload, now: float) -> c.FromCoordinator:
        slot = message.round, message.sum
        attempt, done = self.attempts.get(slot), self.ended.get(slot)
        if attempt is None and done is None:
            raise RemoteError("old-slot" if slot < (self.number, self._next(self.number)) else "wrong-slot")
        terms = attempt.opened.terms if attempt is not None else done.terms if done is not None else None
        assert terms is not None
        upload = m.decode_upload(message.upload, terms)
        digest = m.signed_digest(terms, upload)
        digests = attempt.digests if attempt is not None else dict(done.digests) if done is not None else {}
        before = digests.get(upload.client)
        if before is not None:
            if before != digest:
                raise RemoteError("second-message", upload.client)
            return c.UploadAccepted(*slot, digest)
        if attempt is None or attempt.closing or now >= attempt.opened.closes:
            raise RemoteError("too-late", upload.client)
        attempt.check(upload)
        if attempt.waiting >= self.limits.waiting:
            return self._wait("busy")
        self._enter(slot, attempt, UploadEntered(upload.client, message.upload))
        self._report("upload", slot, client=upload.client, bytes=len(message.upload), level=logging.DEBUG)
        return c.UploadAccepted(*slot, digest)

    def _wish(self, message: JoinRequest | RenewRequest) -> c.FromCoordinator:
        check_request(message, self._authority, self._federation)
        data = codec.encode(message)
        digest = sha256(data).digest()
        place = _place(message).hex()
        if isinstance(message, JoinRequest):
            used = self.log.get(f"invited/{place}")
            if used not in (None, digest):
                raise RemoteError("invitation-used")
            if used is not None:
                return c.WishNoted(digest)
            changes = {f"invited/{place}": digest}
        else:
            roster, before = self._latest(), self.log.get(f"wish/{place}")
            if before == data or message.new in roster:
                return c.WishNoted(digest)
            if message.old not in roster:
                raise RemoteError("not-on-roster")
            if before is not None:
                raise RemoteError("request-waits")
            changes = {}
        self.log.add({**changes, f"wish/{place}": data})
        self._report("wish", kind=type(message).__name__, digest=digest.hex())
        return c.WishNoted(digest)

    def _latest(self) -> tuple[bytes, ...]:
        """The keys on the latest roster."""
        data = self.log.get("roster")
        if data is None:
            return ()
        roster = read_roster_version(data, self._authority, self._federation)
        return (*roster.keys, *roster.holders)

    # --- what operators see

    def count(self, name: str, amount: int = 1, **labels: str) -> None:
        """Add to a counter."""
        self.counts[name, tuple(sorted(labels.items()))] += amount

    def _report(self, event: str, slot: Slot | None = None, level: int = logging.INFO, **fields: Any) -> None:
        """A line of the log: an event and its fields, as JSON in the text and as `event` and `fields` of the record."""
        if slot is not None:
            fields = {"round": slot[0], "sum": slot[1], **fields}
        if logger.isEnabledFor(level):
            logger.log(level, "%s %s", event, json.dumps(fields), extra={"event": event, "fields": fields})


def _name(slot: Slot) -> str:
    """A slot in a name; names are in the order of slots."""
    return f"{slot[0]:015d}.{slot[1]:015d}"


def _place(wish: JoinRequest | RenewRequest) -> bytes:
    return wish.invited if isinstance(wish, JoinRequest) else wish.old


def _key(wish: JoinRequest | RenewRequest) -> bytes:
    return wish.key if isinstance(wish, JoinRequest) else wish.new


def _wish(data: bytes) -> JoinRequest | RenewRequest:
    wish: JoinRequest | RenewRequest = codec.decode(data, JoinRequest | RenewRequest, 1 << 12)  # type: ignore[arg-type]
    return wish
