"""A client's record of its sums: one sum for each value.

The difference of two sums over clients that differ by one is that client's value. Two sums over the same clients reveal single values as
well, if one client has another weight in the second, or (coordinate by coordinate) if values are clipped elsewhere. So after a client has
revealed its shares for a value, it reveals shares for another sum of that value only if everything that decides the sum is the same: the
survivors, its own weight, the limit and the least weight, the quantiser, the kind of sum (unweighted, weighted or with blocks), and the
form in which the value was contributed.

A value goes by *names*: of all that it was computed from, as the client knows it, such as the rounds or the digests of models. Values that
share a name are treated as the same value: of one round and model they are nearly equal, whatever a server calls them.

Guarantee: of all values that share a name only sums with the same survivors and settings are opened. One record serves all machines of a
client; `Client` checks and writes it, and cannot be made without one. With `cohort_change` the survivors of two successive sums are the
same, or those who left and those who came are so many each.
Reveals: nothing; the record stays with the client. What it does not prevent: sums of values without a common name (of successive rounds,
whose models are nearly equal). Which clusters are open in a sum with blocks is not compared: who is in which is the clients' own choice.
`cohort_change` compares with the client's last sum only, not with all sums before.
Source: ours.
"""

from collections.abc import Sequence
from hashlib import sha256
from threading import Lock

import msgspec

from .. import codec
from ..errors import RemoteError
from ..keys import frame
from ..uncopied import uncopied
from .messages import ids
from .terms import LABEL, Bytes32, Id, Terms
from .vectors import InputTerms

__all__ = ["MOST_DIGESTS", "MOST_NUMBERS", "Name", "SumRecord", "Value"]

Name = int | bytes
"""What a value goes by: the number of a round, or a digest of up to 64 bytes."""
MOST_NUMBERS = 4096
"""So many numbers are remembered. The client contributes no value of a smaller number."""
MOST_DIGESTS = 1 << 16
"""So many names are remembered, and no digest is forgotten: a record with more is full: its client contributes no value of a new one."""
LIMIT_BYTES = 1 << 25


class Value(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What goes into a sum: its names, the form in which it is contributed, and how many clients may leave or come (`Policy`)."""

    names: tuple[Name, ...]
    form: bytes = b""
    cohort_change: int = 0


class _Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A sum: digests of its public settings and of its survivors, and the weights of the client's own contributions."""

    settings: Bytes32
    survivors: Bytes32
    weights: tuple[float, ...]


class _Kept(codec.Redacted, msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The sums by name, the survivors of the latest, and the oldest number that is remembered."""

    numbers: tuple[tuple[int, _Entry], ...] = ()
    digests: tuple[tuple[bytes, _Entry], ...] = ()
    survivors: tuple[Id, ...] = ()
    oldest: int = -(1 << 62)


@uncopied("two copies would each allow a sum; see to_bytes")
class SumRecord:
    """The sums of one client, over all its machines. Store `to_bytes` before a reply of a machine is sent."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._entries: dict[Name, _Entry] = {}
        self._survivors: tuple[int, ...] = ()
        self._oldest = _Kept().oldest

    def __repr__(self) -> str:
        return f"SumRecord({len(self._entries)} names)"

    def to_bytes(self) -> bytes:
        """The record as bytes, for a later process."""
        numbers: list[tuple[int, _Entry]] = []
        digests: list[tuple[bytes, _Entry]] = []
        for name, entry in self._entries.items():
            if isinstance(name, int):
                numbers.append((name, entry))
            else:
                digests.append((name, entry))
        return codec.encode(_Kept(tuple(numbers), tuple(digests), self._survivors, self._oldest))

    @staticmethod
    def from_bytes(data: bytes) -> "SumRecord":
        """The record that `to_bytes` stored.

        Raises:
            MalformedMessage: if `data` is none.
        """
        kept = codec.decode(data, _Kept, LIMIT_BYTES)
        record = SumRecord()
        record._entries = {**dict(kept.numbers), **dict(kept.digests)}
        record._survivors, record._oldest = kept.survivors, kept.oldest
        return record

    def renewed(self) -> "SumRecord":
        """The record for a new session, which counts its rounds anew: with all digests, without numbers."""
        record = SumRecord()
        with self._lock:
            record._entries = {name: entry for name, entry in self._entries.items() if isinstance(name, bytes)}
        return record

    def check_proposed(self, value: Value, terms: Terms) -> None:
        """Raises `RemoteError` "second-sum" for terms of a value that went into another sum.

        Of earlier sums only digests are known, so the survivors of the latest one decide about a cohort.
        """
        with self._lock:
            latest = _digest(self._survivors)
            for entry in self._entries_of(value, terms):
                if entry.survivors == latest and not set(self._survivors) <= set(terms.cohort):
                    raise RemoteError("second-sum")

    def check_survivors(self, value: Value, terms: Terms, survivors: Sequence[int], weights: Sequence[float]) -> None:
        """Raises `RemoteError` "second-sum" for a value that went into a sum over other survivors or with another weight, and
        "cohort-change" if fewer than `Value.cohort_change` clients left or came since the last sum, but not none."""
        with self._lock:
            self._check(value, terms, survivors, weights)

    def enter(self, value: Value, terms: InputTerms, survivors: Sequence[int], weights: Sequence[float]) -> None:
        """The same check, and the sum is written down: before the client reveals its shares."""
        with self._lock:
            entry = self._check(value, terms, survivors, weights)
            self._entries |= dict.fromkeys(value.names, entry)
            self._survivors = tuple(survivors)
            if len(self._entries) > MOST_NUMBERS:
                numbers = sorted(name for name in self._entries if isinstance(name, int))
                for number in numbers[: max(0, len(numbers) - MOST_NUMBERS)]:
                    del self._entries[number]
                    self._oldest = number + 1

    def _check(self, value: Value, terms: InputTerms, survivors: Sequence[int], weights: Sequence[float]) -> _Entry:
        this = _Entry(_settings(terms, value.form), _digest(survivors), tuple(sorted(set(weights))))
        for entry in self._entries_of(value, terms):
            if entry != this:
                raise RemoteError("second-sum")
        before, now = set(self._survivors), set(survivors)
        for changed in (before - now, now - before) if before else ():
            if 0 < len(changed) < value.cohort_change:
                raise RemoteError("cohort-change")
        return this

    def _entries_of(self, value: Value, terms: InputTerms) -> list[_Entry]:
        """The sums that values of these names went into, all with these settings; "second-sum" for others, and for forgotten names."""
        settings, entries, more = _settings(terms, value.form), list[_Entry](), 0
        for name in value.names:
            entry = self._entries.get(name)
            if entry is not None:
                entries.append(entry)
            more += entry is None and isinstance(name, bytes)
            if (entry is not None and entry.settings != settings) or (isinstance(name, int) and name < self._oldest):
                raise RemoteError("second-sum")
        if more and len(self._entries) + more > MOST_DIGESTS:
            raise RemoteError("second-sum")
        return entries


def _settings(terms: InputTerms, form: bytes) -> bytes:
    """The digest of everything public that decides what a sum shows, besides its survivors."""
    public: tuple[object, ...] = (terms.bits, terms.clip, terms.levels, terms.weight_limit, terms.least_weight, bool(terms.blocks))
    if terms.beyond:
        public = (*public, terms.beyond)
    return sha256(frame(LABEL + "settings of a sum", repr(public).encode(), form)).digest()


def _digest(survivors: Sequence[int]) -> bytes:
    return sha256(frame(LABEL + "survivors", ids(survivors))).digest()
