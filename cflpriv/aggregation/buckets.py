"""Means of random buckets, combined by a robust rule: each group is dealt into buckets, and each bucket gets a mean of its own.

Guarantee: that of the protection of sums, for each bucket: under secure aggregation the server learns sums over at least the minimum cohort
size. Clients refuse a sum whose cohort is not within their bucket of this round's dealing (`protocols.dealing`). A group that is too small
for three buckets gets no sum. Reveals: the mean of each bucket, not only that of the group; who is in which bucket.
Active attacks (`attacks.active`): the bucket of a sum: `outside_bucket`; the dealing: `short_list`, `late_nonces`.
Source: Karimireddy et al. 2022 (bucketing); Velicheti et al. 2021 (robust rules over secure sums of random groups).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np

from ..contract.calls import Recorder, SumCall, large_enough
from ..contract.handles import GroupMean
from ..errors import InputError
from ..federation import messages as m
from ..federation.protections import Asked, ClientParts, ServerParts, SumServer
from ..protocols import dealing
from ..protocols.errors import MalformedMessage, RemoteError, TooFewClients
from ..types import Array
from .robust import combined

__all__ = ["Dealings", "InBuckets"]

ATTEMPTS = 3
"""The most attempts of a dealing. Each leaves out the clients that did not open their nonce."""
Buckets = tuple[tuple[int, ...], ...]


# --- the client half


class Dealt(m.FederationMessage, frozen=True):
    """What a client keeps of its last dealing: its nonce, the digest of the list for which it opened the nonce, its bucket."""

    slot: tuple[m.Count, m.Count, m.Count]
    nonce: m.Bytes32
    digest: bytes = b""
    bucket: tuple[m.Count, ...] = ()


class Dealings:
    """A client's part in dealings: it commits to a nonce, opens it for one list, and keeps its bucket."""

    def __init__(self, parts: ClientParts) -> None:
        self._parts, self._protection = parts, parts.settings.protection

    def deal(self, ask: m.Deal) -> m.Stepped:
        """One message of a dealing. Raises `RemoteError` "forbidden", "old-slot", "wrong-stage" or "bad-dealing"."""
        if self._protection.robust == "none":
            raise RemoteError("forbidden")
        last = self._parts.store.load("dealing", _dealt)
        if not ask.listed:
            return self._commit(ask, last)
        if last is None or last.slot != ask.slot:
            raise RemoteError("wrong-stage")
        return self._keep(ask, last) if ask.nonces else self._open(ask, last)

    def check(self, slot: tuple[int, int], cohort: Iterable[int]) -> None:
        """Raises `RemoteError` "wrong-bucket" for a cohort that is not within the client's bucket of that round.

        The cohort may be smaller, down to the minimum cohort size: in a new attempt without a client, or in a sum of a second value.
        """
        if self._protection.robust == "none":
            return
        last = self._parts.store.load("dealing", _dealt)
        if last is None or last.slot[0] != slot[0] or not set(last.bucket).issuperset(cohort):
            raise RemoteError("wrong-bucket")

    def _commit(self, ask: m.Deal, last: Dealt | None) -> m.Stepped:
        if last is not None and ask.slot <= last.slot:
            raise RemoteError("old-slot")
        nonce = self._parts.entropy(dealing.NONCE_BYTES)
        self._put(Dealt(ask.slot, nonce))
        return m.Stepped(dealing.commitment(ask.session, ask.slot, self._parts.client, nonce))

    def _open(self, ask: m.Deal, last: Dealt) -> m.Stepped:
        """The client's nonce, for the first list only: with a second one the server could choose the outcome."""
        listed = {entry.client: entry.commitment for entry in ask.listed}
        own = dealing.commitment(ask.session, ask.slot, self._parts.client, last.nonce)
        if last.digest or len(listed) < max(len(ask.listed), self._protection.smallest_group) or listed.get(self._parts.client) != own:
            raise RemoteError("bad-dealing")
        self._put(last, digest=_digest(ask))
        return m.Stepped(last.nonce)

    def _keep(self, ask: m.Deal, last: Dealt) -> m.Stepped:
        if last.digest != _digest(ask) or len(ask.nonces) != len(ask.listed):
            raise RemoteError("bad-dealing")
        listed = {entry.client: entry.commitment for entry in ask.listed}
        opened = {entry.client: nonce for entry, nonce in zip(ask.listed, ask.nonces, strict=True)}
        dealing.check_opened(ask.session, ask.slot, listed, opened)
        count = dealing.buckets_of(len(listed), self._protection.smallest_sum, self._protection.buckets)
        dealt = dealing.deal_buckets(dealing.seed_of(ask.session, ask.slot, opened), listed, count)
        bucket = next(bucket for bucket in dealt if self._parts.client in bucket)
        self._put(last, bucket=bucket)
        return m.Stepped(b"")

    def _put(self, last: Dealt, **changes: Any) -> None:
        self._parts.store.put("dealing", m.encode(msgspec.structs.replace(last, **changes)))


def _dealt(data: bytes) -> Dealt:
    return m.codec.decode(data, Dealt, 1 << 20)


def _digest(ask: m.Deal) -> bytes:
    """The digest of a list."""
    return sha256(m.encode(m.Deal(ask.session, ask.slot, ask.listed, ()))).digest()


# --- the server half


class InBuckets:
    """The server half of sums, over buckets of each group. Without secure sums, where the server sees all values, the dealing is public.

    A group is dealt once in a round, so sums of several values over the same clients are over the same buckets.
    """

    def __init__(self, sums: SumServer, parts: ServerParts) -> None:
        self._sums, self._parts, self._protection = sums, parts, parts.protection
        self._round, self._known = -1, list[Buckets]()

    def means(self, call: SumCall, asked: Asked, choice: m.HeldValue | m.Picks | None, record: Recorder) -> tuple[GroupMean | None, ...]:
        """One robust mean for each group; None for a group with fewer than three buckets, or without a sum of any bucket."""
        if not call.public_weights or len({member.weight for member in call.contributions}) > 1:
            raise InputError(
                f"mean: weights that differ under protection.robust = {self._protection.robust!r}: clients report their own weights, and "
                "one with a large weight would own its bucket; use 'equal'"
            )
        lists = {label: [member.client for member in call.members(label)] for label in large_enough(call)}
        dealt = self._dealt(call, lists, record)
        if not dealt:
            raise TooFewClients(tuple(map(len, lists.values())), call.min_cohort)
        owners = [label for label, buckets in dealt.items() for _ in buckets]
        places: dict[int, list[int]] = {}
        for place, bucket in enumerate(bucket for buckets in dealt.values() for bucket in buckets):
            for client in bucket:
                places.setdefault(client, []).append(place)
        members = [replace(member, labels=tuple(places[member.client])) for member in call.contributions if member.client in places]
        over = replace(call, contributions=tuple(members), k=len(owners), min_cohort=self._protection.smallest_sum)
        means = self._sums.means(over, asked, choice, _by_group(record, owners))
        result: list[GroupMean | None] = [None] * call.k
        for label in dealt:
            of_label = {place: mean for place, mean in enumerate(means) if owners[place] == label and mean is not None}
            for place, mean in of_label.items():
                context = {"group": label, "bucket": place}
                values = {name: part.value() for name, part in mean.parts.items()}
                record("bucket mean", "server", "server", mean.contributors, values, readers=("server",), context=context)
            if of_label:
                result[label] = combined(self._protection.robust, list(of_label.values()))
        return tuple(result)

    def _dealt(self, call: SumCall, lists: Mapping[int, Sequence[int]], record: Recorder) -> dict[int, Buckets]:
        """The buckets of each group: those of an earlier dealing in this round, else new ones."""
        if call.round != self._round:
            self._round, self._known = call.round, []
        dealt: dict[int, Buckets] = {}
        for label, clients in lists.items():
            for buckets in self._known:
                if set(clients) <= {client for bucket in buckets for client in bucket}:
                    dealt[label] = tuple(tuple(client for client in bucket if client in clients) for bucket in buckets)
        fresh = {label: clients for label, clients in lists.items() if label not in dealt}
        made = self._secretly(call, fresh, record) if self._protection.secure else self._openly(call, fresh)
        self._known += made.values()
        return dealt | made

    def _count(self, size: int) -> int:
        return dealing.buckets_of(size, self._protection.smallest_sum, self._protection.buckets)

    def _openly(self, call: SumCall, lists: Mapping[int, Sequence[int]]) -> dict[int, Buckets]:
        """A public dealing of each group."""
        seeds = {label: sha256(f"cflpriv public dealing {call.round} {call.number} {label}".encode()).digest() for label in lists}
        return {label: dealing.deal_buckets(seeds[label], clients, self._count(len(clients))) for label, clients in lists.items()}

    def _secretly(self, call: SumCall, lists: Mapping[int, Sequence[int]], record: Recorder) -> dict[int, Buckets]:
        """A dealing of each group by the nonces of its clients. Repeated without clients that do not open theirs, if enough are left."""
        dealt: dict[int, Buckets] = {}
        left = dict(lists)
        for attempt in range(ATTEMPTS):
            slot = (call.round + 1, call.number, attempt)
            everyone = dict.fromkeys((client for clients in left.values() for client in clients), m.Deal(self._parts.session, slot, (), ()))
            committed = self._replies(everyone, "deal commit", left, record)
            asks: dict[int, m.Deal] = {}
            for clients in left.values():
                listed = tuple(m.Committed(client, committed[client]) for client in sorted(clients) if client in committed)
                if len(listed) >= call.min_cohort:
                    asks |= dict.fromkeys((entry.client for entry in listed), m.Deal(self._parts.session, slot, listed, ()))
            opened = self._replies(asks, "deal open", left, record)
            again: dict[int, list[int]] = {}
            last: dict[int, m.Deal] = {}
            for label, clients in left.items():
                members = [client for client in clients if client in asks]
                if not members:
                    continue
                ask, nonces = asks[members[0]], {client: opened[client] for client in members if client in opened}
                if not self._opened(ask, nonces):
                    again[label] = list(nonces)
                    continue
                last |= dict.fromkeys(members, m.Deal(ask.session, slot, ask.listed, tuple(nonces[entry.client] for entry in ask.listed)))
                dealt[label] = dealing.deal_buckets(dealing.seed_of(ask.session, slot, nonces), members, self._count(len(members)))
            self._replies(last, "deal", left, record)
            left = {label: clients for label, clients in again.items() if len(clients) >= call.min_cohort}
            if not left:
                break
        return dealt

    def _opened(self, ask: m.Deal, nonces: dict[int, bytes]) -> bool:
        """Whether all clients on the list opened their commitments. Drops false nonces from `nonces` and records their clients."""
        listed = {entry.client: entry.commitment for entry in ask.listed}
        for client in list(nonces):
            try:
                dealing.check_opened(ask.session, ask.slot, {client: listed[client]}, {client: nonces[client]})
            except RemoteError as error:
                self._parts.registry.refusals.append((client, "deal open", error.code))
                del nonces[client]
        return len(nonces) == len(listed)

    def _replies(self, asks: Mapping[int, m.Deal], stage: str, lists: Mapping[int, Sequence[int]], record: Recorder) -> dict[int, bytes]:
        """The clients' answers at a stage of the dealing, on the transcript."""
        here = self._parts.registry.present
        present: dict[int, m.PartyRequest] = {client: ask for client, ask in asks.items() if client in here}
        answers = self._parts.registry.ask(present, stage) if present else {}
        replies: dict[int, bytes] = {}
        for client, answer in sorted(answers.items()):
            if isinstance(answer, m.Stepped) and len(answer.message) == (0 if stage == "deal" else dealing.NONCE_BYTES):
                replies[client] = answer.message
            else:
                self._parts.registry.refusals.append((client, stage, MalformedMessage().code))
        for label, clients in lists.items():
            sent, contributors = [client for client in clients if client in present], [client for client in clients if client in replies]
            if sent:
                ask = asks[sent[0]]
                down = {"listed": _rows([entry.commitment for entry in ask.listed]), "nonces": _rows(ask.nonces)}
                context = {"group": label, "slot": list(ask.slot)}
                record(stage, "server", "clients", sent, down, readers=("server", "clients"), context=context)
            if contributors and stage != "deal":
                up = [{"bytes": _rows([replies[client]])[0]} for client in contributors]
                record(stage, "clients", "server", contributors, up, readers=("server", "clients"), context={"group": label})
        return replies


def _rows(several: Sequence[bytes]) -> Array:
    """Commitments or nonces as an array, one a row."""
    return np.frombuffer(b"".join(several), dtype=np.uint8).reshape(len(several), dealing.NONCE_BYTES)


def _by_group(record: Recorder, owners: Sequence[int]) -> Recorder:
    """A recorder that replaces the places of buckets by their groups, and adds the buckets."""

    def noted(*message: Any, context: Mapping[str, Any] | None = None, **more: Any) -> None:
        named = dict(context or {})
        if "group" in named:
            named |= {"group": owners[named["group"]], "bucket": named["group"]}
        if "labels" in named:
            named |= {"labels": [[owners[place] for place in several] for several in named["labels"]], "buckets": named["labels"]}
        record(*message, context=named, **more)

    return noted
