"""The server's machine of a sum in one message.

The caller hands it what arrives and sends what it returns; no I/O, no clock. Uploads may come, and be delivered to helpers, in any number
of batches. `close` ends that; then each `advance` takes the helpers' answers and returns messages for them, until there are none. A helper
that does not answer is left out from then on, and others send what it would have sent; with fewer than a quorum there is no sum.

Guarantee: `result` is the exact integer sum, modulo 2^bits, of the vectors that the members masked, or there is none: the sum of each
seed's masks is taken from helpers that agree on it, t + 1 of them where so many know it, of which one is honest. Where they differ, each
seed is asked for by itself: a value that t + 1 helpers send is the right one, and those that sent another are named (`liars`). With fewer
helpers than 2t + 1 of which t lie together, a false sum is not noticed; single values stay hidden even so.
Reveals: see the package.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import combinations
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..copies import check_own
from ..errors import HelpersFailed, LocalError, MalformedMessage, RemoteError, SumFailed, TooFewClients
from ..keys import Roster, verify_key
from ..secagg.vectors import Sum, unwrap, vector_length
from ..uncopied import uncopied
from . import messages as m
from .blocks import counted_masks, counts_of, in_order, large, opened_places
from .terms import HelpedTerms, check_terms, context, held, quorum, seed_sets

__all__ = ["HelpedServer", "plan"]

Stage = Literal["collecting", "closing", "counting", "opening", "done"]
Group = tuple[int, ...]


def plan(terms: HelpedTerms, helpers: Sequence[int], seeds: Iterable[int]) -> list[tuple[Group, tuple[int, ...]]]:
    """Groups of these seeds, each with the helpers that know all of it: the first sends the summed mask, the others hash it.

    There are t + 1 helpers for a group, or as many as know its seeds. Few groups, even loads.

    Raises:
        HelpersFailed: "too-few-helpers" for a seed that none of the helpers knows.
    """
    knows = {helper: frozenset(held(terms, helper)) for helper in helpers}
    left, load, groups = set(seeds), dict.fromkeys(helpers, 0), list[tuple[Group, tuple[int, ...]]]()
    while left:
        copies = min(terms.colluding + 1, min(sum(seed in knows[helper] for helper in helpers) for seed in left))
        if copies < 1:
            raise HelpersFailed("too-few-helpers", tuple(helpers))
        choices = combinations(sorted(helpers), copies)
        covers = {some: left.intersection(*(knows[helper] for helper in some)) for some in choices}
        best = min(covers, key=lambda some: (-len(covers[some]), sum(load[helper] for helper in some), some))
        group = tuple(sorted(covers[best]))
        left -= set(group)
        groups.append((group, tuple(sorted(best, key=lambda helper: load[helper]))))
        for helper in best:
            load[helper] += len(group)
    return groups


@dataclass(frozen=True)
class _Arrived:
    """An upload until all helpers have seen it: the masked vector, the boxes, and what each helper gets besides its own box."""

    vector: bytes
    boxes: tuple[bytes, ...]
    shared: m.DeliveredItem

    @staticmethod
    def of(terms: HelpedTerms, upload: m.MaskedUpload) -> "_Arrived":
        boxes = tuple(box.box for box in upload.boxes)
        digests = b"".join(sha256(box).digest() for box in boxes)
        digest = m.vector_digest(terms, upload.vector)
        shared = m.DeliveredItem(upload.client, upload.names, digest, digests, upload.commitments, upload.signature, b"")
        return _Arrived(upload.vector, boxes, shared)

    def item(self, place: int) -> m.DeliveredItem:
        """What the helper at a place of the terms gets."""
        return msgspec.structs.replace(self.shared, box=self.boxes[place])

    def digest(self, agreed: bytes) -> bytes:
        """What the client signed."""
        item = self.shared
        return m.upload_digest(agreed, item.client, item.names, item.vector_digest, item.box_digests, item.commitments)


@uncopied("it collects one sum")
class HelpedServer:
    """The server's part in one sum.

    Args:
        terms: see `make_terms`.
        announcements: those that the terms name, by helper.
        roster: the pinned roster.

    Raises:
        LocalError: "bad-terms" or "no-roster".
    """

    def __init__(self, terms: HelpedTerms, announcements: Mapping[int, bytes], roster: Roster) -> None:
        check_own("terms", terms, HelpedTerms)
        check_own("roster", roster, Roster)
        try:
            check_terms(terms)
        except ValueError as error:
            raise LocalError("bad-terms", str(error)) from None
        if terms.roster != roster.digest or len(roster.holders) != terms.helpers:
            raise LocalError("no-roster", "the roster that the terms name is needed")
        self.terms, self._roster, self._agreed = terms, roster, context(terms)
        self.invite = m.encode(m.HelpedInvite(terms, tuple(announcements[helper] for helper in terms.present)))
        self.stage: Stage = "collecting"
        self.refused: dict[int, tuple[int, str]] = {}
        self.liars: set[int] = set()
        self.helpers = terms.present
        self._dtype = np.dtype("<u2" if terms.bits == 16 else "<u4")
        self._total: NDArray[Any] = np.zeros(vector_length(terms), self._dtype)
        self._waiting: dict[int, _Arrived] = {}
        self._sent: dict[int, _Arrived] = {}
        self._members: dict[int, bytes] = {}
        self._invited = frozenset(m.names(terms.cohort))
        self._name = b""
        self._places: NDArray[np.intp] | slice = slice(vector_length(terms))  # numbers of all places would take twice the sum's memory
        self._evidence: tuple[m.CountMasks, ...] = ()
        self.counts: tuple[int, ...] = ()
        self.open_clusters: tuple[int, ...] = ()
        self._signatures: dict[int, bytes] = {}
        self._asked: dict[int, tuple[tuple[Group, ...], tuple[Group, ...]]] = {}
        self._votes: dict[Group, dict[int, bytes]] = {}
        self._answered: set[int] = set()
        self._settled: dict[Group, bytes] = {}
        self._masks: dict[tuple[Group, bytes], NDArray[Any]] = {}
        self._left = set(range(len(seed_sets(terms.helpers, terms.colluding))))
        self._single: set[int] = set()
        self._result: Sum[HelpedTerms] | None = None

    def __repr__(self) -> str:
        return f"HelpedServer(slot={self.terms.slot}, stage={self.stage!r})"

    @property
    def members(self) -> tuple[int, ...]:
        """The clients whose uploads all helpers can use."""
        return tuple(sorted(self._members))

    @property
    def result(self) -> Sum[HelpedTerms]:
        """The sum. Raises `LocalError` "no-result" unless the machine is done."""
        if self._result is None:
            raise LocalError("no-result")
        return self._result

    # --- uploads

    def receive(self, client: int, data: bytes) -> None:
        """Takes the upload of a client that the caller knows to be its sender.

        Raises:
            RemoteError: "wrong-stage", "malformed", "not-invited", "second-message" or "too-many-clients". Nothing has changed.
        """
        if self.stage != "collecting":
            raise RemoteError("wrong-stage", client)
        message = m.decode_upload(data, self.terms)
        if message.client != client:
            raise MalformedMessage
        if self._invited and client not in self._invited:
            raise RemoteError("not-invited", client)
        # No client is in two of these.
        known: tuple[Mapping[int, object], ...] = (self._waiting, self._sent, self._members, self.refused)
        if any(client in some for some in known):
            raise RemoteError("second-message", client)
        if sum(map(len, known)) >= self.terms.maximum:
            raise RemoteError("too-many-clients", client)
        self._waiting[client] = _Arrived.of(self.terms, message)

    def deliver(self) -> dict[int, bytes]:
        """Messages for the helpers with the uploads that came since the last; none if there were none. `delivered` takes the answers."""
        if self.stage != "collecting" or self._sent:
            raise LocalError("wrong-stage")
        self._sent, self._waiting = self._waiting, {}
        if not self._sent:
            return {}
        places = {helper: place for place, helper in enumerate(self.terms.present)}
        arrived = [self._sent[client] for client in sorted(self._sent)]
        return {
            helper: m.encode(m.UploadDelivery(self.terms, tuple(upload.item(places[helper]) for upload in arrived)))
            for helper in self.helpers
        }

    def delivered(self, answers: Mapping[int, bytes]) -> dict[int, str]:
        """Takes the helpers' answers: uploads that one of them cannot use are left out. Returns helpers' answers that were refused, and
        why."""
        messages, wrong = self._read(answers, m.UploadsRead, self.helpers if self._sent else ())
        for helper, message in messages.items():
            for refusal in message.refused:
                if refusal.client in self._sent:
                    self.refused.setdefault(refusal.client, (helper, refusal.code))
        for client, upload in self._sent.items():
            if client not in self.refused:
                self._total += np.frombuffer(upload.vector, self._dtype)
                self._members[client] = upload.digest(self._agreed)
        self._sent = {}
        return wrong

    def close(self) -> dict[int, bytes]:
        """Ends the collection; messages for the helpers. Raises `TooFewClients`, or `HelpersFailed` "too-few-helpers"."""
        if self.stage != "collecting" or self._sent or self._waiting:
            raise LocalError("wrong-stage")
        if len(self._members) < self.terms.minimum:
            raise TooFewClients((len(self._members),), self.terms.minimum)
        self._enough(self.helpers)
        self.stage = "closing"
        self._name = m.set_name(self._agreed, [self._members[client] for client in self.members])
        return dict.fromkeys(self.helpers, m.encode(m.CloseSet(self.terms, m.ids(self._members))))

    # --- helpers

    def advance(self, answers: Mapping[int, bytes]) -> dict[int, bytes]:
        """Takes the helpers' answers to the last messages; the next messages, none once there is a result.

        Raises:
            HelpersFailed: "too-few-helpers" or "masks-differ". SumFailed: "out-of-range". TooFewClients: no block has enough.
        """
        if self.stage == "closing":
            messages, _ = self._read(answers, m.SignedSet, self.helpers)
            for helper, message in messages.items():
                if message.name == self._name and self._good(helper, message.signature, m.CLOSE, m.closing(helper, self._name)):
                    self._signatures[helper] = message.signature
            self._enough(tuple(self._signatures))
            self.helpers = tuple(sorted(self._signatures))
            self.stage = "counting" if self.terms.clusters else "opening"
            return self._count() if self.terms.clusters else self._open()
        if self.stage == "counting":
            self._counted(answers)
            self.stage = "opening"
            return self._open()
        if self.stage == "opening":
            self._opened(answers)
            if self._left:
                return self._open()
            self._finish()
            return {}
        raise LocalError("wrong-stage")

    def _enough(self, helpers: Sequence[int]) -> None:
        if len(helpers) < quorum(self.terms.helpers, self.terms.colluding):
            raise HelpersFailed("too-few-helpers", tuple(helpers))

    def _good(self, helper: int, signature: bytes, label: str, parts: tuple[bytes, ...]) -> bool:
        try:
            verify_key(self._roster.holders[helper], helper, signature, label, *parts)
        except RemoteError:
            return False
        return True

    def _read(self, answers: Mapping[int, bytes], kind: type[Any], asked: Sequence[int]) -> tuple[dict[int, Any], dict[int, str]]:
        """The usable answers of the helpers that were asked, and the codes of the others. Who gave none is asked no more."""
        messages, wrong = self._decoded(answers, kind, asked)
        self.helpers = tuple(helper for helper in self.helpers if helper in messages or helper not in asked)
        return messages, wrong

    def _decoded(self, answers: Mapping[int, bytes], kind: type[Any], asked: Sequence[int]) -> tuple[dict[int, Any], dict[int, str]]:
        """The usable answers of the helpers that were asked, and the codes of the others."""
        messages, wrong = dict[int, Any](), dict[int, str]()
        for helper, data in sorted(answers.items()):
            if helper not in asked:
                continue
            try:
                message = m.decode_from_helper(data, self.terms)
                if not isinstance(message, kind) or message.helper != helper:
                    raise MalformedMessage
                messages[helper] = message
            except RemoteError as error:
                wrong[helper] = error.code
        return messages, wrong

    def _open(self) -> dict[int, bytes]:
        """Messages that ask for the seeds that are left; seeds on which helpers differed go one by one, to all who know them."""
        shared = plan(self.terms, self.helpers, self._left - self._single)
        send: dict[int, list[Group]] = {helper: [] for helper in self.helpers}
        check: dict[int, list[Group]] = {helper: [] for helper in self.helpers}
        for group, (first, *others) in shared:
            send[first].append(group)
            for helper in others:
                check[helper].append(group)
        for seed in sorted(self._left & self._single):
            for helper in self.helpers:
                if seed in held(self.terms, helper):
                    send[helper].append((seed,))
        self._asked = {helper: (tuple(send[helper]), tuple(check[helper])) for helper in self.helpers if send[helper] or check[helper]}
        self._votes, self._masks, self._settled, self._answered = {}, {}, {}, set()
        return self._openings()

    def _openings(self) -> dict[int, bytes]:
        signatures = tuple(m.SetSignature(helper, signature) for helper, signature in sorted(self._signatures.items()))
        members = m.ids(self._members)
        return {
            helper: m.encode(m.OpenSet(self.terms, members, signatures, *asked, self._evidence)) for helper, asked in self._asked.items()
        }

    def _count(self) -> dict[int, bytes]:
        """Messages that ask each helper for its masks of the counts."""
        self._places = np.arange(self.terms.clusters)
        self._asked = {helper: (tuple((number,) for number in held(self.terms, helper)), ()) for helper in self.helpers}
        return self._openings()

    def _counted(self, answers: Mapping[int, bytes]) -> None:
        """Takes the masks of the counts. Which blocks are opened follows from them."""
        terms = self.terms
        messages, _ = self._read(answers, m.OpenedMasks, tuple(self._asked))
        counted = {
            helper: m.CountMasks(helper, tuple(map(bytes, message.masks)), message.signature)
            for helper, message in sorted(messages.items())
            if self._fits(helper, message, m.COUNT)
        }
        self.helpers = tuple(helper for helper in self.helpers if helper in counted)
        self._enough(self.helpers)
        self._evidence = tuple(counted.values())
        masks, liars = counted_masks(terms, self._roster, self._name, self._evidence)
        self.liars |= liars
        self._total[: terms.clusters] -= masks
        try:
            self.counts = counts_of(terms, self._total[: terms.clusters], len(self._members))
        except RemoteError as error:
            raise SumFailed(error.code, among=self.members) from None
        self.open_clusters = large(terms, self.counts)
        if not self.open_clusters:
            raise TooFewClients(self.counts, terms.minimum)
        self._places = opened_places(terms, self.open_clusters)

    def opened(self, answers: Mapping[int, bytes]) -> None:
        """Takes the answers of some helpers to the last messages, before `advance` takes those of the others, so that not all masks are in
        memory together: a mask that t + 1 helpers confirm is subtracted at once.

        Raises:
            LocalError: "wrong-stage".
        """
        if self.stage != "opening":
            raise LocalError("wrong-stage")
        messages, _ = self._decoded(answers, m.OpenedMasks, [helper for helper in self._asked if helper not in self._answered])
        for helper in list(messages):
            if self._voted(helper, messages.pop(helper)):
                self._answered.add(helper)
        for group, votes in self._votes.items():
            if group not in self._settled and max(map(list(votes.values()).count, votes.values())) > self.terms.colluding:
                self._settle(group, votes)

    def _opened(self, answers: Mapping[int, bytes]) -> None:
        self.opened(answers)
        self.helpers = tuple(helper for helper in self.helpers if helper in self._answered or helper not in self._asked)
        for group, votes in self._votes.items():
            if group in self._settled:
                self.liars |= {helper for helper, digest in votes.items() if digest != self._settled[group]}
            else:
                self._settle(group, votes)
        self._enough(self.helpers)

    def _fits(self, helper: int, message: m.OpenedMasks, label: str) -> bool:
        """Whether a helper's masks and hashes are signed and are those that it was asked for."""
        send, check = self._asked[helper]
        groups = (*send, *check)
        if len(message.masks) != len(send) or len(message.hashes) != len(groups):
            return False
        fits = all(
            len(mask) == len(self._total[self._places]) * self._dtype.itemsize and sha256(mask).digest() == digest
            for mask, digest in zip(message.masks, message.hashes, strict=False)
        )
        return fits and self._good(helper, message.signature, label, m.mask_parts(helper, self._name, groups, message.hashes))

    def _voted(self, helper: int, message: m.OpenedMasks) -> bool:
        """Counts a helper's masks and hashes, if they are what it was asked for."""
        if not self._fits(helper, message, m.OPEN):
            return False
        send, check = self._asked[helper]
        for group, digest in zip((*send, *check), message.hashes, strict=True):
            self._votes.setdefault(group, {})[helper] = digest
        for group, mask, digest in zip(send, message.masks, message.hashes, strict=False):
            self._masks[group, digest] = np.frombuffer(mask, self._dtype)
        return True

    def _settle(self, group: Group, votes: dict[int, bytes]) -> None:
        """Subtracts the masks of a group on which its helpers agree. Otherwise its seeds are asked for again."""
        digests = list(votes.values())
        top = max(sorted(set(digests)), key=digests.count)  # the same in every process
        asked = [helper for helper, (send, check) in self._asked.items() if group in (*send, *check)]
        certain = digests.count(top) > self.terms.colluding
        if len(set(digests)) > 1 and not certain:
            if set(group) <= self._single:
                raise HelpersFailed("masks-differ", tuple(sorted(votes)))
            self._single |= set(group)
            return
        if (certain or len(votes) == len(asked)) and (group, top) in self._masks:
            self._total[self._places] -= self._masks.pop((group, top))
            self._settled[group] = top
            self._left -= set(group)
            self.liars |= {helper for helper, digest in votes.items() if digest != top}

    def _finish(self) -> None:
        self.stage = "done"
        if self.terms.clusters:  # blocks that stay closed are zeros
            opened = np.zeros_like(self._total)
            for places in (slice(self.terms.clusters), self._places):
                opened[places] = self._total[places]
            self._total = opened
        try:
            self._result = Sum(self.terms, self.members, in_order(self.terms, unwrap(self._total, self.terms.bits)))
        except ValueError:
            raise SumFailed("out-of-range", among=self.members) from None
