"""A helper of sums in one message: it knows most seeds of every client, and unmasks one set of clients a slot.

All that it keeps is in a store, so that a new process over the same store goes on where the last one ended, at any point. Before a
signature of a set leaves, the set is in the record: by slot, and by the names of the members' values. The store also has the key of the
current round: a helper that lost its store opens no box of that round, and one that was set back to an older copy counts as one of the
colluding.

    key                      the current round, the seed of its key, and its announcement
    uploads/CONTEXT/i        seeds of the uploads of one delivery, erased with the key
    closed/ROUND.SUM         the set that was signed in a slot
    summed/NAME              the sets that values of a name went into; outlives sessions
    latest                   each client's last set, where the clients of successive sums are compared

Guarantee: with at most `colluding` of the helpers against the rules, the server, those helpers and any clients learn of the honest clients'
values the sum over one set for each slot, of `minimum` clients at least, and of values that share a name sums over one set only. A helper
checks the terms by its own settings. Reveals: who is summed with whom, to helpers; they learn no values.
Source: ours; replicated secret sharing of masks after Cramer, Damgård and Ishai 2005, the quorum of Malkhi and Reiter 1998.
"""

from collections.abc import Iterable, MutableMapping, Sequence
from hashlib import sha256

import msgspec
import numpy as np
from numpy.typing import NDArray

from .. import codec, hpke
from ..copies import check_own
from ..entropy import Entropy, system_entropy
from ..errors import HelpersFailed, LocalError, RemoteError
from ..keys import Identity, Roster, frame, sign, verify, verify_key
from ..secagg.terms import Bytes16, Bytes32, Count, Id
from ..secagg.vectors import add_masks, vector_length
from ..uncopied import uncopied
from . import messages as m
from .blocks import counted_masks, counts_of, large, opened_places
from .noise import discrete_gaussian
from .terms import LABEL, HelpedTerms, check_terms, context, held, quorum

__all__ = ["Helper", "HelperPolicy"]

MOST_SETS_A_NAME = 1 << 12
"""Of one name a helper signs so many sets at most."""
STORED_BYTES = 1 << 28


class HelperPolicy(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a helper insists on, whatever the server proposes.

    session: 16 bytes. colluding: how many helpers may work with the server. min_cohort: the fewest clients of a set. cohort_change: the
    least `Terms.cohort_change`. clients, length: the largest set, and the longest vector in coordinates.
    """

    session: bytes
    colluding: int = 1
    min_cohort: int = 3
    cohort_change: int = 0
    clients: int = 1 << 14
    length: int = 1 << 28


class _Key(codec.Redacted, msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    _shown = ("round",)

    round: Count
    seed: bytes
    announcement: bytes


class _Kept(codec.Redacted, msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Of a usable upload: its digest, the names of its value, the helper's seeds in order, the masked counts of blocks."""

    _shown = ("client",)

    client: Id
    digest: Bytes32
    names: bytes
    seeds: bytes
    counts: bytes = b""


class _Batch(codec.Redacted, msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    kept: tuple[_Kept, ...]


class _Signed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    session: Bytes16
    name: Bytes32


class _Set(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A set that was signed: its digest, and its members that one entry is about."""

    digest: Bytes32
    members: bytes


class _Sets(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    sets: tuple[_Set, ...]


class _Latest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Sets, and the clients whose last set each is."""

    sets: tuple[tuple[bytes, bytes], ...]


@uncopied("two copies would each sign a set; a new one over the same store goes on")
class Helper:
    """One helper.

    Args:
        identity: its long-term keys; the signing key is on the roster, among the holders, whose order numbers the helpers.
        roster: the pinned keys of clients and helpers.
        policy: what it insists on.
        store: what it keeps, by name. Setting an item must be durable when it returns.
        entropy: draws its keys.

    Raises:
        LocalError: "not-on-roster".
    """

    def __init__(
        self, identity: Identity, roster: Roster, policy: HelperPolicy, store: MutableMapping[str, bytes], entropy: Entropy = system_entropy
    ) -> None:
        check_own("identity", identity, Identity)
        check_own("roster", roster, Roster)
        check_own("policy", policy, HelperPolicy)
        if identity.public() not in roster.holders:
            raise LocalError("not-on-roster")
        self.number = roster.holders.index(identity.public())
        self._identity, self._roster, self._policy, self._store, self._entropy = identity, roster, policy, store, entropy
        self._batches: dict[str, tuple[bytes, _Batch]] = {}  # what the store has, decoded once; erased with it

    def __repr__(self) -> str:
        return f"Helper({self.number})"

    def announcement(self, number: int) -> bytes:
        """The announcement of the key of a round. Keys and seeds of earlier rounds are erased.

        Raises:
            RemoteError: "old-slot" for a round before the current one.
        """
        data = self._store.get("key")
        kept = None if data is None else codec.decode(data, _Key, 1 << 12)
        if kept is not None and number < kept.round:
            raise RemoteError("old-slot")
        if kept is not None and number == kept.round:
            return kept.announcement
        seed = self._entropy(hpke.SEED_BYTES)
        message = m.KeyAnnouncement(self.number, self._policy.session, number, hpke.public_key(seed), bytes(64))
        signed = msgspec.structs.replace(message, signature=sign(self._identity, m.KEY, *m.key_parts(self._roster, message)))
        fresh = _Key(number, seed, m.encode(signed))
        for name in [name for name in self._store if name.startswith("uploads/")]:
            del self._store[name]  # first: who is killed here erases the rest when asked again
        self._batches.clear()
        self._store["key"] = codec.encode(fresh)
        return fresh.announcement

    @property
    def round_seed(self) -> bytes:
        """The seed of the current round's key, a secret of this helper. Raises `RemoteError` "wrong-round" where there is none yet."""
        data = self._store.get("key")
        if data is None:
            raise RemoteError("wrong-round")
        return codec.decode(data, _Key, 1 << 12).seed

    def receive(self, data: bytes) -> bytes:
        """The answer to a message of the server.

        Raises:
            RemoteError: "malformed", "wrong-context", "bad-terms", "minimum-too-low", "wrong-round", "not-delivered", "too-few-clients",
            "second-set", "second-sum", "cohort-change", "too-few-signatures", "bad-signature", "not-held", "masks-differ",
            "out-of-range". Nothing has changed.
        """
        message = m.decode_to_helper(data)
        self._check(message.terms)
        match message:
            case m.UploadDelivery():
                return m.encode(self._deliver(message))
            case m.CloseSet():
                return m.encode(self._close(message.terms, m.names(message.members)))
            case m.OpenSet():
                return codec.encode_made(lambda: self._open(message))

    def _key(self, number: int) -> _Key:
        """The key of a round. Raises `RemoteError` "wrong-round" unless that is the current one."""
        data = self._store.get("key")
        kept = None if data is None else codec.decode(data, _Key, 1 << 12)
        if kept is None or kept.round != number:
            raise RemoteError("wrong-round")
        return kept

    def _check(self, terms: HelpedTerms) -> None:
        """Checks terms by the helper's own settings."""
        policy = self._policy
        if terms.session != policy.session or terms.roster != self._roster.digest:
            raise RemoteError("wrong-context")
        if (terms.helpers, terms.colluding) != (len(self._roster.holders), policy.colluding):
            raise RemoteError("bad-terms")
        if terms.minimum < policy.min_cohort:
            raise RemoteError("minimum-too-low")
        if terms.cohort_change < policy.cohort_change:
            raise RemoteError("cohort-change")
        if terms.maximum > policy.clients or vector_length(terms) > policy.length:
            raise RemoteError("bad-terms")
        try:
            check_terms(terms)
        except ValueError:
            raise RemoteError("bad-terms") from None
        if dict(terms.keys).get(self.number) != sha256(self._key(terms.round).announcement).digest():
            raise RemoteError("wrong-round")

    # --- uploads

    def _uploads(self, agreed: bytes) -> tuple[dict[int, _Kept], str]:
        """What is kept of uploads under these terms, and the name of the next batch."""
        kept, count = dict[int, _Kept](), 0
        while (data := self._store.get(name := f"uploads/{agreed.hex()}/{count}")) is not None:
            known = self._batches.get(name)
            if known is None or known[0] != data:
                known = self._batches[name] = data, codec.decode(data, _Batch, STORED_BYTES)
            kept |= {upload.client: upload for upload in known[1].kept}
            count += 1
        return kept, name

    def _deliver(self, message: m.UploadDelivery) -> m.UploadsRead:
        terms, agreed = message.terms, context(message.terms)
        before, name = self._uploads(agreed)
        secret = hpke.secret_key(self._key(terms.round).seed)
        refused: list[m.RefusedUpload] = []
        fresh: list[_Kept] = []
        invited = frozenset(m.names(terms.cohort))
        for item in message.items:
            try:
                if invited and item.client not in invited:
                    raise RemoteError("not-invited", item.client)
                kept = self._usable(terms, agreed, item, before.get(item.client), secret)
            except RemoteError as error:
                refused.append(m.RefusedUpload(item.client, error.code))
            else:
                fresh += [] if item.client in before else [kept]
        if len(before) + len(fresh) > terms.maximum:
            raise RemoteError("too-many-clients")
        if fresh:
            self._store[name] = codec.encode(_Batch(tuple(fresh)))
        return m.UploadsRead(self.number, agreed, tuple(refused))

    def _usable(self, terms: HelpedTerms, agreed: bytes, item: m.DeliveredItem, before: _Kept | None, secret: hpke.SecretKey) -> _Kept:
        """What is kept of an upload. Raises `RemoteError` "second-message", "bad-signature", "bad-box" or "other-seed"."""
        digest = m.upload_digest(agreed, item.client, item.names, item.vector_digest, item.box_digests, item.commitments)
        if before is not None:
            if before.digest != digest:
                raise RemoteError("second-message", item.client)
            return before
        verify(self._roster, item.client, item.signature, m.UPLOAD, digest)
        boxes = m.split_digests(item.box_digests)
        if sha256(item.box).digest() != boxes[terms.present.index(self.number)] or len(item.box) != m.box_bytes(terms, self.number):
            raise RemoteError("bad-box", item.client)
        seeds = hpke.unseal(secret, item.box, m.box_info(agreed, item.client, self.number))
        commitments = m.split_digests(item.commitments)
        for place, number in enumerate(held(terms, self.number)):
            if m.commitment(agreed, item.client, number, seeds[32 * place : 32 * place + 32]) != commitments[number]:
                raise RemoteError("other-seed", item.client)
        return _Kept(item.client, digest, item.names, seeds, item.vector_digest[:-32])

    # --- sets

    def _set(self, terms: HelpedTerms, members: Sequence[int]) -> tuple[bytes, list[_Kept]]:
        """The name of a set, and what is kept of its members' uploads. Raises `RemoteError` "not-delivered"."""
        agreed = context(terms)
        uploads, _ = self._uploads(agreed)
        missing = next((client for client in members if client not in uploads), None)
        if missing is not None:
            raise RemoteError("not-delivered", missing)
        kept = [uploads[client] for client in members]
        return m.set_name(agreed, [one.digest for one in kept]), kept

    def _signed(self, terms: HelpedTerms) -> bytes | None:
        """The name of the set that was signed in this slot."""
        data = self._store.get(_slot(terms))
        return None if data is None else codec.decode(data, _Signed, 1 << 10).name

    def _close(self, terms: HelpedTerms, members: Sequence[int]) -> m.SignedSet:
        if not terms.minimum <= len(members) <= terms.maximum:
            raise RemoteError("too-few-clients")
        name, kept = self._set(terms, members)
        before = self._signed(terms)
        if before not in (None, name):
            raise RemoteError("second-set")
        if before is None:
            digest = sha256(frame(LABEL + "members", m.ids(members))).digest()
            summed = self._summed(kept, digest)
            latest = self._compared(terms, members)
            record = {entry: codec.encode(sets) for entry, sets in summed.items()}
            if latest is not None:
                record["latest"] = codec.encode(latest)
            record[_slot(terms)] = codec.encode(_Signed(terms.session, name))  # last: what is written before only refuses more
            self._store.update(record)
        return m.SignedSet(self.number, context(terms), name, sign(self._identity, m.CLOSE, *m.closing(self.number, name)))

    def _summed(self, kept: Iterable[_Kept], digest: bytes) -> dict[str, _Sets]:
        """The entries of the record with this set, by the names of its members' values. Raises `RemoteError` "second-sum"."""
        by_name: dict[bytes, list[int]] = {}
        for one in kept:
            for name in m.split_digests(one.names):
                by_name.setdefault(name, []).append(one.client)
        entries: dict[str, _Sets] = {}
        for name, clients in by_name.items():
            data = self._store.get(f"summed/{name.hex()}")
            sets = () if data is None else codec.decode(data, _Sets, STORED_BYTES).sets
            if any(other.digest != digest and not set(clients).isdisjoint(m.names(other.members)) for other in sets):
                raise RemoteError("second-sum")
            if len(sets) >= MOST_SETS_A_NAME:
                raise RemoteError("second-sum")
            this = _Set(digest, m.ids(clients))
            entries[f"summed/{name.hex()}"] = _Sets(sets if this in sets else (*sets, this))
        return entries

    def _compared(self, terms: HelpedTerms, members: Sequence[int]) -> _Latest | None:
        """Each client's last set, with this one. Raises `RemoteError` "cohort-change" if too few clients left or came, but not none."""
        if not terms.cohort_change:
            return None
        data, now = self._store.get("latest"), set(members)
        kept: list[tuple[bytes, bytes]] = []
        for packed, of in () if data is None else codec.decode(data, _Latest, STORED_BYTES).sets:
            clients, before = set(m.names(of)), set(m.names(packed))
            changes = len(before - now), len(now - before)
            if clients & now and any(0 < change < terms.cohort_change for change in changes):
                raise RemoteError("cohort-change")
            if clients - now:
                kept.append((packed, m.ids(clients - now)))
        return _Latest((*kept, (m.ids(members), m.ids(members))))

    # --- masks

    def _open(self, message: m.OpenSet) -> m.OpenedMasks:
        terms, members = message.terms, m.names(message.members)
        name, kept = self._set(terms, members)
        if self._signed(terms) != name:
            raise RemoteError("second-set")
        for signed in message.signatures:
            if signed.helper >= terms.helpers:
                raise RemoteError("bad-signature")
            key = self._roster.holders[signed.helper]
            verify_key(key, signed.helper, signed.signature, m.CLOSE, *m.closing(signed.helper, name))
        if len(message.signatures) < quorum(terms.helpers, terms.colluding):
            raise RemoteError("too-few-signatures")
        own, groups = held(terms, self.number), (*message.send, *message.check)
        if any(number not in own for group in groups for number in group):
            raise RemoteError("not-held")
        label, places = m.OPEN, None
        if terms.clusters and not message.counted:
            if groups != tuple((number,) for number in own):
                raise RemoteError("not-held")
            label, places = m.COUNT, np.arange(terms.clusters)
        elif terms.clusters:
            places = self._large(terms, name, kept, message.counted)
        masks, hashes = list[memoryview](), list[bytes]()
        for place, group in enumerate(groups):
            mask = self._summed_masks(terms, name, kept, group, places)
            hashes.append(sha256(mask).digest())
            masks += [mask] if place < len(message.send) else []
        signature = sign(self._identity, label, *m.mask_parts(self.number, name, groups, tuple(hashes)))
        return m.OpenedMasks(self.number, context(terms), tuple(masks), tuple(hashes), signature)

    def _large(
        self, terms: HelpedTerms, name: bytes, kept: Sequence[_Kept], counted: Sequence[m.CountMasks]
    ) -> NDArray[np.intp]:  # fmt: skip
        """The places of the blocks that enough members fill. Raises `RemoteError` "masks-differ", "out-of-range" or "too-few-clients"."""
        try:
            masks, _ = counted_masks(terms, self._roster, name, counted)
        except HelpersFailed as error:
            raise RemoteError(error.code) from None
        total = np.sum([np.frombuffer(one.counts, masks.dtype) for one in kept], axis=0, dtype=masks.dtype) - masks
        clusters = large(terms, counts_of(terms, total, len(kept)))
        if not clusters:
            raise RemoteError("too-few-clients")
        return opened_places(terms, clusters)

    def _summed_masks(
        self, terms: HelpedTerms, name: bytes, kept: Sequence[_Kept], group: Sequence[int], places: NDArray[np.intp] | None
    ) -> memoryview:
        """The sum of the masks of a group of seeds over the members of a set, less the noise, as bytes; at these places only."""
        agreed, dtype = context(terms), "<u2" if terms.bits == 16 else "<u4"
        total = np.zeros(vector_length(terms) if places is None else int(places.max()) + 1, dtype)
        at = {number: 32 * place for place, number in enumerate(held(terms, self.number))}
        seeds = {number: [one.seeds[at[number] : at[number] + 32] for one in kept] for number in group}
        add_masks(
            total,
            ((m.mask_key(agreed, one.client, number, seed), 1) for number in group for one, seed in zip(kept, seeds[number], strict=True)),
        )
        for number in group if terms.noise else ():
            noise = discrete_gaussian(m.noise_key(name, number, seeds[number]), terms.dimension, terms.noise)
            total[: terms.dimension] -= noise.astype(dtype)
        return (total if places is None else total[places]).view(np.uint8).data  # hashed and encoded without a copy


def _slot(terms: HelpedTerms) -> str:
    return f"closed/{terms.round}.{terms.sum}"
