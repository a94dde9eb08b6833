"""A client's policy: what it requires before it takes part, and the lifetime of a mask key.

Guarantee: a client accepts only terms of its own session, mode, roster and later slots, that invite it, list its model among as many models
as it expects, keep at least its minimum cohort size, keep the effective number of clients of every sum at that size, too, whatever the
weights are (`effective`), quantise as it allows, are no larger than it allows, and satisfy everything that honest terms satisfy (the
overflow proof among it). A mask key, and the key of the boxes beside it, serve one slot, once.
"""

import math
from threading import Lock
from typing import get_args

import msgspec

from .. import codec
from ..errors import LocalError, RemoteError, TooFewClients
from ..keys import Identity, Roster
from ..uncopied import uncopied
from . import messages
from .effective import reaches
from .summed import Name, Value
from .terms import Bytes32, Mode, Slot, Terms, fewest_contributors

__all__ = ["MaskKey", "Policy", "check_proposal", "check_roster", "enough"]

MOST_NAME_BYTES = 64


class Policy(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What this client insists on, whatever the server proposes.

    session: 16 bytes.
    mode: what the server may do.
    model: SHA-256 of the model this client received; it must be listed.
    models: how many models may be listed (1 for a per-cluster sum).
    min_cohort: the fewest survivors, and the smallest effective number of clients of a sum.
    after: the last slot this client took part in; later ones only.
    dimension: values per block, None for any.
    clip: the smallest and the largest clip: values are cut off at a smaller one, and lost in rounding under a larger one.
    levels: the fewest levels of the quantiser (1 for counts).
    clients: the largest cohort, which is as many key agreements.
    length: the longest masked vector, in coordinates.
    max_weight: the limit of weights that differ; with 0 all weigh equally. No server chooses a weight.
    spread: largest ratio of the weights that the value has inside itself: 1 if there are none, infinite if a part of it may be
        zero for all clients but one (a block of the client's own choice).
    names: what the value goes by in the client's record of sums (`summed`); by default the model.
    form: what decides besides the terms how the value is contributed, such as a clip norm; compared by the record.
    most_error: the most that rounding may add to the client's values, as a share of their length; infinite where an answer must not depend
        on the values. Levels are not rounded.
    cohort_change: of two successive sums so many clients leave, and so many come, or none; 0 for any number.
    noise: the least noise of helpers, in levels; only sums in one message have any.

    Raises:
        ValueError: naming the field that no terms can meet.
    """

    session: bytes
    mode: Mode
    model: bytes
    models: int = 1
    min_cohort: int = 3
    after: Slot | None = None
    dimension: int | None = None
    clip: tuple[float, float] = (1e-6, 1e6)
    levels: int = 16
    clients: int = 1 << 12
    length: int = 1 << 28
    max_weight: float = 0.0
    spread: float = 1.0
    names: tuple[Name, ...] = ()
    form: bytes = b""
    cohort_change: int = 0
    most_error: float = 0.1
    noise: int = 0

    def __post_init__(self) -> None:
        for name, value, size in (("session", self.session, 16), ("model", self.model, 32)):
            if not isinstance(value, bytes) or len(value) != size:
                got = f"{len(value)} bytes" if isinstance(value, bytes) else f"a {type(value).__name__}"
                raise ValueError(f"{name}: expected {size} bytes, got {got}")
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode: {self.mode!r} is not known; known are {', '.join(get_args(Mode))}")
        for name, least in (("models", 1), ("min_cohort", 1), ("dimension", 1), ("levels", 1), ("clients", 1), ("length", 1)):
            number = getattr(self, name)
            if number is not None and number < least:
                raise ValueError(f"{name}: {number} is below {least}")
        if not 0 < self.clip[0] <= self.clip[1]:
            raise ValueError(f"clip: expected two numbers above 0, the smaller one first, got {self.clip}")
        if not 0 <= self.max_weight < math.inf:
            raise ValueError(f"max_weight: expected a finite number, 0 for equal weights, got {self.max_weight}")
        if not self.most_error > 0:
            raise ValueError(f"most_error: expected a number above 0, got {self.most_error}")
        if not self.spread >= 1:
            raise ValueError(f"spread: {self.spread} is below 1")
        for value_name in self.names:
            if isinstance(value_name, bytes) and not 0 < len(value_name) <= MOST_NAME_BYTES:
                raise ValueError(f"names: expected numbers, or digests of 1 to {MOST_NAME_BYTES} bytes, got {len(value_name)} bytes")

    @property
    def value(self) -> Value:
        """What the record of sums knows of the value."""
        return Value(self.names or (self.model,), self.form, self.cohort_change)


@uncopied("it may be used once; see to_bytes")
class MaskKey:
    """The secret keys advertised with an earlier upload for one slot, as seeds: of the masks, and of the boxes of shares.

    They can be taken once: by a `Client`, or by `to_bytes`.
    """

    __slots__ = ("_lock", "_seeds", "slot")

    def __init__(self, mask_seed: bytes, box_seed: bytes, slot: Slot) -> None:
        self._lock = Lock()
        self._seeds: tuple[bytes, bytes] | None = (mask_seed, box_seed)
        self.slot = slot

    def __repr__(self) -> str:
        return f"MaskKey(slot={self.slot}{', used' if self._seeds is None else ''})"

    def take(self) -> tuple[bytes, bytes]:
        """(mask seed, box seed), once.

        Raises:
            LocalError: "mask-key-used" the second time: a key used for two sums gives, with one dropout, an
            earlier input away.
        """
        with self._lock:
            seeds, self._seeds = self._seeds, None
        if seeds is None:
            raise LocalError("mask-key-used", "a second sum under it, with one dropout, would unmask an earlier input")
        return seeds

    def to_bytes(self) -> bytes:
        """The key as bytes, for a later process; this object can then no longer be used. Keep the bytes secret and use them once."""
        return codec.encode(_StoredKey(self.slot, *self.take()))

    @staticmethod
    def from_bytes(data: bytes) -> "MaskKey":
        """The key that `to_bytes` stored.

        Raises:
            MalformedMessage: if `data` is none.
        """
        stored = codec.decode(data, _StoredKey, 1 << 10)
        return MaskKey(stored.mask_seed, stored.box_seed, stored.slot)


class _StoredKey(codec.Redacted, msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    slot: Slot
    mask_seed: Bytes32
    box_seed: Bytes32


def check_proposal(terms: Terms, policy: Policy, client: int, slot: Slot | None, roster: Roster | None) -> None:
    """Checks proposed terms against the policy of `client`; `slot` is that of its prepared mask key, None without one.

    Raises:
        RemoteError: "wrong-context", "wrong-slot", "not-invited", "unlisted-model", "wrong-roster",
        "minimum-too-low", "too-unequal" or "bad-terms". TooFewClients: the cohort is smaller than `min_cohort`.
    """
    if terms.session != policy.session or terms.mode != policy.mode:
        raise RemoteError("wrong-context")
    if (policy.after is not None and terms.slot <= policy.after) or (slot is not None and terms.slot != slot):
        # A slot that has passed, or one for which the prepared mask key was not made.
        raise RemoteError("wrong-slot")
    if client not in terms.cohort:
        raise RemoteError("not-invited")
    if policy.model not in terms.models or len(terms.models) != policy.models:
        raise RemoteError("unlisted-model")
    if roster is not None and policy.mode == "active" and terms.roster != roster.digest:
        raise RemoteError("wrong-roster")
    if terms.min_cohort < policy.min_cohort:
        raise RemoteError("minimum-too-low")
    if policy.dimension is not None and terms.dimension != policy.dimension:
        raise RemoteError("bad-terms")
    if not policy.clip[0] <= terms.clip <= policy.clip[1] or terms.levels < policy.levels:
        raise RemoteError("bad-terms")
    if len(terms.cohort) > policy.clients or messages.vector_length(terms) > policy.length:
        raise RemoteError("bad-terms")
    equal = terms.least_weight == terms.weight_limit
    if not equal and terms.weight_limit != policy.max_weight:
        raise RemoteError("bad-terms")
    try:
        messages.check_terms(terms)
    except ValueError:
        raise RemoteError("bad-terms") from None
    if not equal or policy.spread > 1:
        limit, least = (1.0, 1.0) if equal else (terms.weight_limit, terms.least_weight)
        if not reaches(fewest_contributors(terms), policy.min_cohort, limit, least, policy.spread):
            raise RemoteError("too-unequal")
    enough(terms, len(terms.cohort), messages.fewest_survivors(terms))


def check_roster(identity: Identity, policy: Policy, roster: Roster | None) -> None:
    """In active mode a client needs the roster, and must be on it.

    Raises:
        LocalError: "no-roster" or "not-on-roster".
    """
    if policy.mode == "active":
        if roster is None:
            raise LocalError("no-roster", "active mode needs the pinned roster")
        if not 0 <= identity.client < len(roster.keys) or roster.keys[identity.client] != identity.public():
            raise LocalError("not-on-roster")


def enough(terms: Terms, have: int, need: int) -> None:
    """Raises TooFewClients if fewer than `need` are there."""
    if have < need:
        raise TooFewClients((have,), need, threshold=need == terms.threshold > terms.min_cohort)
