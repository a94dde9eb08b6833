"""The public terms of one sum, and what honest terms must satisfy.

Guarantee: `check_terms` refuses terms under which the sum of honest inputs could overflow, a cohort or a graph without the thresholds that
the protocol needs, and a minimum cohort size of one. `make_terms` chooses the least weight for which the effective number of clients of
every sum reaches the minimum cohort size (`effective`); clients check it by their own (`policy`). `context(terms)` is a hash of everything
that was agreed in public; keys, boxes, digests and signatures are bound to it. Reveals: terms are public. Source: ours.
"""

import math
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import pairwise
from types import NoneType
from typing import Annotated, Literal, get_type_hints

import msgspec
from msgspec import Meta

from .. import codec
from ..copies import check_own
from ..entropy import Entropy, system_entropy
from ..errors import MalformedMessage, TooFewClients
from ..keys import Roster, frame
from .effective import FEWEST_LEVELS, smallest_least_weight
from .graph import COMPLETE_UP_TO, complete_threshold, sparse_parameters
from .vectors import Bits, FixedPoint, InputTerms, check_no_overflow, largest_levels, vector_length

__all__ = [
    "LABEL", "MOST_CLIENTS", "SMALL_LIMIT_BYTES", "Bytes16", "Bytes32", "Count", "Id", "Mode", "Slot", "Terms", "check_inputs",
    "check_terms", "context", "fewest_contributors", "fewest_survivors", "lifted", "make_terms", "model_list", "retaken", "vector_length",
    "weight_error",
]  # fmt: skip

LABEL = "cflpriv secagg v3 "
"""Starts every key derivation, associated datum and signature of this protocol version."""

Id = Annotated[int, Meta(ge=0, lt=1 << 32)]
Count = Annotated[int, Meta(ge=0, lt=1 << 48)]
Bytes16 = Annotated[bytes, Meta(min_length=16, max_length=16)]
Bytes32 = Annotated[bytes, Meta(min_length=32, max_length=32)]
Mode = Literal["active", "passive"]
Slot = tuple[Count, Count]
"""(round, sum): a client takes part in at most one sum per slot, and slots only go up."""


MOST_CLIENTS = 1 << 14
SMALL_LIMIT_BYTES = 1 << 25
"""Of a message without a masked vector."""
_TINY = 2.0**-40
"""Of the limit, before the least weight is known."""
MOST_WEIGHT_ERROR = 1 / FEWEST_LEVELS * (1 + 1e-9)
"""The largest `weight_error` of sums whose weights differ."""


class Terms(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything public about one sum. All who take part must see exactly the same terms, or nothing unmasks.

    session: 16 bytes naming the training run; round, sum: the slot.
    mode: what the server may do: "passive" (it follows the protocol) or "active" (it may lie).
    cohort: the invited clients, increasing.
    degree, threshold: (k, t) of the graph; graph_seed: 16 bytes for the sparse one, else empty.
    min_cohort: the fewest survivors whose sum may be seen.
    models: SHA-256 of every model that members may hold, increasing.
    roster: digest of the pinned roster (active mode), else empty.
    bits, clip, levels: the quantiser.
    dimension: values per block.
    weight_limit: public maximum of a weight, 0 for unweighted sums.
    least_weight: public minimum: a smaller weight counts as this one; 0 for unweighted sums, `weight_limit` for equal weights.
    blocks: for an oblivious sum, (cluster, contributors counted) of every open block; else empty.
    following: the next slot, for which mask keys are advertised with the upload; None if there is none.
    """

    session: Bytes16
    round: Count
    sum: Count
    mode: Mode
    cohort: tuple[Id, ...]
    degree: Count
    threshold: Count
    graph_seed: Annotated[bytes, Meta(max_length=16)]
    min_cohort: Count
    models: tuple[Bytes32, ...]
    roster: Annotated[bytes, Meta(max_length=32)]
    bits: Literal[16, 32]
    clip: float
    levels: Count
    dimension: Annotated[int, Meta(ge=1, le=1 << 30)]
    weight_limit: float
    least_weight: float
    blocks: tuple[tuple[Id, Count], ...]
    following: Slot | None

    @property
    def slot(self) -> Slot:
        """(round, sum)."""
        return self.round, self.sum

    @property
    def fixed(self) -> FixedPoint:
        """The quantiser."""
        return FixedPoint(self.bits, self.clip, self.levels)

    @property
    def beyond(self) -> int:
        """0: noise is in the clients' levels."""
        return 0


def fewest_survivors(terms: Terms) -> int:
    """The fewest survivors that may be unmasked.

    In an oblivious sum every dropout might have belonged to the smallest open block, so as many must survive
    as leave `min_cohort` contributors there. Of a sum whose weights differ, more than half of the cohort must survive: their
    number decides how much the weights may differ.
    """
    n = len(terms.cohort)
    spare = min((count - terms.min_cohort for _, count in terms.blocks), default=n)
    threshold = terms.threshold if terms.degree == n - 1 else 0
    return max(terms.min_cohort, threshold, n - spare, n // 2 + 1 if terms.least_weight < terms.weight_limit else 0)


def fewest_contributors(terms: Terms) -> int:
    """The fewest clients that contribute to a sum that may be unmasked; in an oblivious sum, to its smallest open block."""
    lost = len(terms.cohort) - fewest_survivors(terms)
    return min((count for _, count in terms.blocks), default=len(terms.cohort)) - lost


def weight_error(terms: InputTerms) -> float:
    """The most that rounding changes the value of a client that counts least, in shares of the clip: one step of the quantiser.

    The step of a client whose weight is a share f of the limit is 1 / f times that of a client with the limit.
    """
    least = terms.least_weight / terms.weight_limit if terms.weight_limit else 1.0
    return 1 / (least * terms.levels)


def context(terms: Terms) -> bytes:
    """32 bytes that name these terms and no others."""
    return sha256(frame(LABEL + "context", codec.encode(terms))).digest()


def model_list(terms: Terms) -> bytes:
    """The hash of the list of all model hashes that belong to this sum."""
    return sha256(frame(LABEL + "models", *terms.models)).digest()


def check_terms(terms: Terms) -> None:
    """Checks everything that honest terms must satisfy, including the overflow proof.

    Raises:
        ValueError: naming the field.
    """
    n = len(terms.cohort)
    if n < 1 or any(a >= b for a, b in pairwise(terms.cohort)) or n > MOST_CLIENTS:
        raise ValueError("cohort: expected distinct clients in increasing order")
    if terms.min_cohort < 2:
        raise ValueError("min_cohort: a sum over one client is that client's input; expected at least 2")
    complete = terms.degree == n - 1 and terms.threshold == complete_threshold(n, terms.mode)
    if complete and terms.graph_seed:
        raise ValueError("graph_seed: the complete graph has none")
    if not complete:
        if terms.mode == "active":
            raise ValueError("degree: against an active server only the complete graph, with t = 2n//3 + 1, will do")
        if n <= COMPLETE_UP_TO or (terms.degree, terms.threshold) != sparse_parameters(n):
            raise ValueError("degree: expected the complete graph, or the sparse one for more than 32 clients, with its threshold")
        if len(terms.graph_seed) != 16:
            raise ValueError("graph_seed: expected 16 bytes")
    if len(terms.roster) != (32 if terms.mode == "active" else 0):
        raise ValueError("roster: expected its digest in active mode, and nothing in passive mode")
    if not terms.models or any(a >= b for a, b in pairwise(terms.models)):
        raise ValueError("models: expected distinct hashes in increasing order")
    check_inputs(terms, n)
    if any(a >= b for (a, _), (b, _) in pairwise(terms.blocks)):
        raise ValueError("blocks: expected distinct clusters in increasing order")
    if any(not terms.min_cohort <= count <= n for _, count in terms.blocks):
        raise ValueError("blocks: every open block needs at least `min_cohort` contributors of the cohort")
    if terms.following is not None and terms.following <= terms.slot:
        raise ValueError("following: the next slot must come after this one")


def check_inputs(terms: InputTerms, clients: int) -> None:
    """Checks the weights and the length of a vector, and that no sum over `clients` can overflow.

    Raises:
        ValueError: naming the field.
    """
    check_no_overflow(clients, terms.fixed)
    if not math.isfinite(terms.weight_limit) or math.copysign(1.0, terms.weight_limit) < 0:
        raise ValueError("weight_limit: expected a finite number, 0 for unweighted sums")
    if not 0 <= terms.least_weight <= terms.weight_limit or (terms.least_weight > 0) != (terms.weight_limit > 0):
        raise ValueError("least_weight: expected a number above 0 and no larger than `weight_limit`, 0 for unweighted sums")
    if math.copysign(1.0, terms.least_weight) < 0:
        raise ValueError("least_weight: expected 0 for unweighted sums")
    if terms.least_weight < terms.weight_limit and weight_error(terms) > MOST_WEIGHT_ERROR:
        needed = terms.weight_limit / (MOST_WEIGHT_ERROR * terms.levels)
        raise ValueError(
            f"least_weight: rounding may change the value of a client that weighs {terms.least_weight:g} by {weight_error(terms):.2g} of "
            f"the clip under weight_limit = {terms.weight_limit:g}, more than {MOST_WEIGHT_ERROR:.2g}; use a smaller weight_limit, or a "
            f"least_weight of {needed:.3g}"
        )
    if vector_length(terms) > 1 << 30:
        raise ValueError("dimension: too large")


def make_terms(
    *,
    session: bytes,
    slot: Slot,
    cohort: Iterable[int],
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
    roster: Roster | None = None,
    sparse: bool | None = None,
    blocks: Sequence[tuple[int, int]] = (),
    following: Slot | None = None,
    entropy: Entropy = system_entropy,
) -> Terms:
    """Valid terms, with everything that follows from the rest filled in.

    Args:
        roster: given, the mode is "active"; without one it is "passive".
        sparse: the k-regular graph; by default where the mode allows it and the cohort has more than 32 clients.
        levels: by default the finest quantiser that cannot overflow.
        least_weight: by default the smallest one for which every sum has the effective number of clients, and a weight
            `FEWEST_LEVELS` levels. A client with fewer samples counts as this weight, which draws the weighted mean towards the
            unweighted one. With no more clients than needed all weigh equally.
        effective: the smallest effective number of clients of a sum; `min_cohort` by default.
        spread: largest ratio of the weights that values have inside themselves (`Policy.spread`).
        entropy: draws the seed of the sparse graph.
        The others as in `Terms`.

    Raises:
        ValueError: naming the field that is wrong; "levels" where the sum could overflow.
        TooFewClients: the cohort has fewer clients than `min_cohort`.
    """
    check_own("roster", roster, Roster, NoneType)
    members = tuple(sorted(cohort))
    n = len(members)
    mode: Mode = "passive" if roster is None else "active"
    if sparse is None:
        sparse = mode == "passive" and n > COMPLETE_UP_TO
    degree, threshold = sparse_parameters(n) if sparse else (n - 1, complete_threshold(n, mode))
    terms = Terms(
        session=session,
        round=slot[0],
        sum=slot[1],
        mode=mode,
        cohort=members,
        degree=degree,
        threshold=threshold,
        graph_seed=entropy(16) if degree < n - 1 else b"",
        min_cohort=min_cohort,
        models=tuple(sorted(set(models))),
        roster=b"" if roster is None else roster.digest,
        bits=bits,
        clip=float(clip),
        levels=largest_levels(max(n, 1), bits) if levels is None else levels,
        dimension=dimension,
        weight_limit=float(weight_limit),
        least_weight=float(weight_limit if least_weight is None else least_weight),
        blocks=tuple(sorted(blocks)),
        following=following,
    )
    check_terms(terms)
    if n < min_cohort:
        raise TooFewClients((n,), min_cohort)
    if least_weight is None:
        lowest = msgspec.structs.replace(terms, least_weight=float(weight_limit) * _TINY)
        terms = lifted(lowest, min_cohort if effective is None else effective, spread)
    try:
        return codec.decode(codec.encode(terms), Terms, SMALL_LIMIT_BYTES)
    except MalformedMessage:
        for name, kind in get_type_hints(Terms, include_extras=True).items():
            try:
                msgspec.convert(getattr(terms, name), kind)
            except msgspec.ValidationError as error:
                raise ValueError(f"{name}: {error}") from None
        raise ValueError("terms: a field has the wrong type, length or range") from None


def lifted(terms: Terms, effective: int, spread: float = 1.0) -> Terms:
    """The terms with a least weight for which the effective number of clients of every sum is `effective` at least.

    Equal weights stay equal, and a larger least weight stays.

    Args:
        spread: largest ratio of the weights that values have inside themselves.

    Raises:
        ValueError: naming the spread, if equal weights do not do, either.
    """
    limit = terms.weight_limit
    if terms.least_weight == limit and spread == 1:
        return terms
    fewest = fewest_contributors(terms)
    if terms.least_weight == limit:
        smallest_least_weight(fewest, effective, 1.0, spread)
        return terms
    least = max(smallest_least_weight(fewest, effective, limit, spread), limit * min(1.0, FEWEST_LEVELS / terms.levels))
    return msgspec.structs.replace(terms, least_weight=max(terms.least_weight, least))


def retaken(
    terms: Terms, without: Iterable[int], entropy: Entropy = system_entropy, effective: int | None = None, spread: float = 1.0
) -> Terms:
    """The terms under which a sum is taken again `without` some of its cohort, in the next slot; `SumFailed` says when it may be.

    The quantiser stays, and the least weight unless fewer clients need a larger one. In a sum with blocks nobody knows where those that go
    belong, so they are taken off the count of every block.

    Args:
        entropy: draws the seed of the sparse graph.
        effective, spread: as in `make_terms`.

    Raises:
        TooFewClients: fewer than `min_cohort` are left, or no block keeps that many.
    """
    gone = set(without)
    cohort = tuple(client for client in terms.cohort if client not in gone)
    n, lost = len(cohort), len(terms.cohort) - len(cohort)
    blocks = tuple((cluster, count - lost) for cluster, count in terms.blocks if count - lost >= terms.min_cohort)
    if n < terms.min_cohort or bool(terms.blocks) != bool(blocks):
        raise TooFewClients((n,), terms.min_cohort)
    sparse = terms.degree < len(terms.cohort) - 1 and n > COMPLETE_UP_TO
    degree, threshold = sparse_parameters(n) if sparse else (n - 1, complete_threshold(n, terms.mode))
    changed = msgspec.structs.replace(
        terms, sum=terms.sum + 1, cohort=cohort, degree=degree, threshold=threshold, blocks=blocks,
        graph_seed=entropy(16) if degree < n - 1 else b"",
    )  # fmt: skip
    check_terms(changed)
    try:
        return lifted(changed, terms.min_cohort if effective is None else effective, spread)
    except ValueError:  # the clients that are left are too few for what their values weigh inside themselves
        raise TooFewClients((n,), terms.min_cohort) from None
