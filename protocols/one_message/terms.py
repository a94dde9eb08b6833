"""The public terms of a sum in one message, and what honest terms must satisfy.

Guarantee: `check_terms` refuses terms under which a sum of honest inputs could overflow, a minimum of one client, and too few helpers for
the quorum rule: q = (h + t) // 2 + 1 signatures of h helpers, of which t may work with the server. Two sets with q signatures each
would have h + t + 1 signers at least, counted twice, so more than t common ones, of which one is honest. `context(terms)` is a hash of
everything that was agreed in public; keys, boxes, seeds and signatures are bound to it. Reveals: terms are public. Source: ours.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import sha256
from itertools import combinations, pairwise
from math import comb
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .. import codec
from ..errors import MalformedMessage, TooFewClients
from ..keys import Roster, frame
from ..secagg.effective import FEWEST_LEVELS, smallest_least_weight
from ..secagg.messages import ids, names
from ..secagg.terms import MOST_CLIENTS, SMALL_LIMIT_BYTES, Bytes16, Bytes32, Count, Slot, check_inputs
from ..secagg.vectors import Bits, FixedPoint, largest_levels
from .noise import REACH

__all__ = [
    "LABEL", "MOST_CLUSTERS", "MOST_HELPERS", "MOST_SETS", "HelperNumber", "HelpedTerms", "check_terms", "context", "held", "make_terms",
    "most_failing", "quorum", "seed_sets",
]  # fmt: skip

LABEL = "cflpriv one-message v1 "
"""Starts every hash, signature and associated datum of this protocol version."""
MOST_HELPERS = 16
MOST_SETS = 256
"""So many seeds a client deals at most."""
MOST_CLUSTERS = 1 << 12
HelperNumber = Annotated[int, Meta(ge=0, lt=MOST_HELPERS)]
_TINY = 2.0**-40


class HelpedTerms(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything public about one sum.

    session: 16 bytes naming the training run; round, sum: the slot. A helper's key serves one round.
    helpers, colluding: h and t.
    keys: (helper, digest of its announcement) of the helpers that take part, increasing.
    minimum, maximum: the fewest and the most clients of the sum.
    cohort_change: of two successive sums of a client so many clients leave, and so many come, or none; 0 for any number.
    models: SHA-256 of every model that members may hold, increasing.
    roster: digest of the pinned roster, which names clients and helpers.
    bits, clip, levels, dimension, weight_limit, least_weight: as in `secagg.Terms`.
    cohort: the clients that may be members, packed; empty: all on the roster.
    clusters: how many blocks a vector has, which clients fill by a choice of their own (`blocks`); 0: it is one value.
    noise: the standard deviation, in levels, of the noise that helpers add for each seed; 0: none.
    """

    session: Bytes16
    round: Count
    sum: Count
    helpers: Annotated[int, Meta(ge=2, le=MOST_HELPERS)]
    colluding: Annotated[int, Meta(ge=1, lt=MOST_HELPERS)]
    keys: tuple[tuple[HelperNumber, Bytes32], ...]
    minimum: Count
    maximum: Count
    cohort_change: Count
    models: tuple[Bytes32, ...]
    roster: Bytes32
    bits: Literal[16, 32]
    clip: float
    levels: Count
    dimension: Annotated[int, Meta(ge=1, le=1 << 30)]
    weight_limit: float
    least_weight: float
    cohort: bytes
    clusters: Annotated[int, Meta(ge=0, le=MOST_CLUSTERS)]
    noise: Count

    @property
    def slot(self) -> Slot:
        """(round, sum)."""
        return self.round, self.sum

    @property
    def fixed(self) -> FixedPoint:
        """The quantiser."""
        return FixedPoint(self.bits, self.clip, self.levels)

    @property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """All blocks by their cluster. No client knows how many fill one."""
        return tuple((cluster, 0) for cluster in range(self.clusters))

    @property
    def beyond(self) -> int:
        """So far helpers' noise takes a sum out of the range of the members' levels at most."""
        return comb(self.helpers, self.colluding) * REACH * self.noise

    @property
    def present(self) -> tuple[int, ...]:
        """The helpers that take part."""
        return tuple(helper for helper, _ in self.keys)


def quorum(helpers: int, colluding: int) -> int:
    """How many helpers must sign one set of clients before any of them opens it."""
    return (helpers + colluding) // 2 + 1


def most_failing(helpers: int, colluding: int) -> int:
    """How many helpers may fail without a loss of the sum."""
    return helpers - quorum(helpers, colluding)


@lru_cache(maxsize=16)
def seed_sets(helpers: int, colluding: int) -> tuple[tuple[int, ...], ...]:
    """The sets of `colluding` helpers, in order. There is one seed for each, which its members do not get."""
    return tuple(combinations(range(helpers), colluding))


def held(terms: HelpedTerms, helper: int) -> tuple[int, ...]:
    """The numbers of the seeds that a helper gets: of the sets without it."""
    return _held(terms.helpers, terms.colluding, helper)


@lru_cache(maxsize=64)
def _held(helpers: int, colluding: int, helper: int) -> tuple[int, ...]:
    return tuple(number for number, members in enumerate(seed_sets(helpers, colluding)) if helper not in members)


def context(terms: HelpedTerms) -> bytes:
    """32 bytes that name these terms and no others."""
    return sha256(frame(LABEL + "context", codec.encode(terms))).digest()


def check_terms(terms: HelpedTerms) -> None:
    """Checks everything that honest terms must satisfy, including the overflow proof.

    Raises:
        ValueError: naming the field.
    """
    if not 2 <= terms.minimum <= terms.maximum <= MOST_CLIENTS:
        raise ValueError(f"minimum: expected 2 at least, and no more than maximum, which is at most {MOST_CLIENTS}")
    if not terms.colluding < terms.helpers or comb(terms.helpers, terms.colluding) > MOST_SETS:
        raise ValueError(f"colluding: expected fewer than helpers, and at most {MOST_SETS} sets of so many helpers")
    present = terms.present
    if any(a >= b for a, b in pairwise(present)) or any(helper >= terms.helpers for helper in present):
        raise ValueError("keys: expected distinct helpers in increasing order")
    if len(present) < quorum(terms.helpers, terms.colluding):
        raise ValueError(f"keys: expected those of {quorum(terms.helpers, terms.colluding)} helpers at least")
    if not terms.models or any(a >= b for a, b in pairwise(terms.models)):
        raise ValueError("models: expected distinct hashes in increasing order")
    if terms.cohort and len(_cohort(terms)) != terms.maximum:
        raise ValueError("cohort: expected as many clients as maximum")
    if terms.clusters and not (terms.least_weight == terms.weight_limit > 0):
        raise ValueError("weight_limit: expected equal weights above 0 where clients choose their blocks: they are the counts")
    if terms.clusters and terms.helpers - terms.colluding <= terms.colluding:
        raise ValueError("helpers: expected more than twice as many as may collude, who agree on the counts of blocks")
    if terms.noise and (terms.weight_limit or terms.clusters):
        raise ValueError("noise: expected an unweighted sum of one block")
    check_inputs(terms, terms.maximum)
    if terms.maximum * terms.levels + terms.beyond >= 1 << (terms.bits - 1):
        raise ValueError("levels: the helpers' noise leaves no room for them")


def _cohort(terms: HelpedTerms) -> tuple[int, ...]:
    try:
        return names(terms.cohort)
    except MalformedMessage:
        raise ValueError("cohort: expected distinct clients in increasing order") from None


def make_terms(
    *,
    session: bytes,
    slot: Slot,
    roster: Roster,
    colluding: int,
    announced: Mapping[int, bytes],
    clients: int,
    models: Iterable[bytes],
    dimension: int,
    clip: float,
    bits: Bits = 32,
    levels: int | None = None,
    weight_limit: float = 0.0,
    least_weight: float | None = None,
    spread: float = 1.0,
    min_cohort: int = 3,
    effective: int | None = None,
    cohort_change: int = 0,
    cohort: Iterable[int] = (),
    clusters: int = 0,
    noise: int = 0,
) -> HelpedTerms:
    """Valid terms, with everything that follows from the rest filled in.

    Where weights differ, or weigh inside values (`spread`), more than half of `clients` must take part: their number decides how much
    the weights may differ.

    Args:
        roster: names the helpers as its holders.
        announced: the announcements of helpers (`Helper.announcement`), by number.
        clients: the most clients of the sum.
        levels, least_weight, spread, effective: as in `secagg.make_terms`.
        cohort, clusters, noise: as in `HelpedTerms`.

    Raises:
        ValueError: naming the field that is wrong; "levels" where the sum could overflow.
        TooFewClients: there are fewer clients than `min_cohort`.
    """
    if clients < min_cohort:
        raise TooFewClients((clients,), min_cohort)
    needed = min_cohort if effective is None else effective
    most_differ = weight_limit and clients > min_cohort and least_weight != weight_limit
    minimum = max(min_cohort, clients // 2 + 1) if most_differ or spread > 1 else min_cohort
    if levels is None:
        beyond = comb(len(roster.holders), colluding) * REACH * noise
        levels = ((1 << (bits - 1)) - 1 - beyond) // clients if noise else largest_levels(clients, bits)
    fixed = FixedPoint(bits, float(clip), levels)
    if least_weight is None:
        least_weight = 0.0
        if weight_limit:
            smallest = smallest_least_weight(minimum, needed, float(weight_limit), spread)
            least_weight = max(smallest, weight_limit * min(1.0, FEWEST_LEVELS / fixed.levels), weight_limit * _TINY)
    if least_weight == weight_limit:
        smallest_least_weight(minimum, needed, 1.0, spread)
    terms = HelpedTerms(
        session=session, round=slot[0], sum=slot[1], helpers=len(roster.holders), colluding=colluding,
        keys=tuple((helper, sha256(data).digest()) for helper, data in sorted(announced.items())), minimum=minimum, maximum=clients,
        cohort_change=cohort_change, models=tuple(sorted(set(models))), roster=roster.digest, bits=bits, clip=fixed.clip,
        levels=fixed.levels, dimension=dimension, weight_limit=float(weight_limit), least_weight=float(least_weight),
        cohort=ids(cohort), clusters=clusters, noise=noise,
    )  # fmt: skip
    check_terms(terms)
    try:
        return codec.decode(codec.encode(terms), HelpedTerms, SMALL_LIMIT_BYTES)
    except MalformedMessage:
        raise ValueError("terms: a field has the wrong type, length or range") from None
