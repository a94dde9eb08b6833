"""Oblivious sums: the server learns every cluster's sum, but not who is in which cluster.

Two secure sums in a row over the same people. First the *counts*: each client adds the 0/1 vector of the
clusters it belongs to, and the server sees how many belong to each. Then the *blocks*: one sum with a block
of coordinates for every cluster at or above the minimum cohort size; a client fills the blocks of its clusters and leaves
zeros elsewhere; under the masks all look alike. It costs k times the bytes.

The minimum cohort size must hold for those who are left at the end. Nobody can see in which cluster a dropout was, so the
worst is assumed: the second sum is unmasked only if even with all its dropouts in the smallest open block
`min_cohort` contributors remain (`messages.fewest_survivors`, which every client computes for itself). `spare` keeps
room for that many dropouts.

Guarantee: the server learns the counts, the sum of every open block, and of the others nothing; memberships
stay hidden as the inputs do. Reveals: the counts, those below the minimum cohort size too. The counts that the second sum's
minimum cohort size rests on are not verified by clients: an *active* server can overstate them and so open a block of one.
Members rightly hold different models here, so the terms list k of them, and a server that plants a private
model among the k is not stopped; prefer one common model. Source: the masked one-hot sum is ours; the sums
are those of the package.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..entropy import Entropy, system_entropy
from ..errors import SumFailed, TooFewClients
from ..keys import Identity, Roster
from .messages import Slot, Terms, make_terms
from .simulation import Outcome, simulate
from .vectors import Bits, Contribution, Sum

__all__ = ["ObliviousOutcome", "block_terms", "count_terms", "counts_of", "membership", "open_blocks", "simulate_oblivious"]


def count_terms(
    *,
    session: bytes,
    slot: Slot,
    cohort: Sequence[int],
    models: Sequence[bytes],
    clusters: int,
    min_cohort: int = 3,
    roster: Roster | None = None,
    following: Slot | None = None,
    entropy: Entropy = system_entropy,
) -> Terms:
    """The terms of the counts: a 16-bit sum of 0/1 vectors of shape (clusters,)."""
    return make_terms(
        session=session,
        slot=slot,
        cohort=cohort,
        models=models,
        dimension=clusters,
        clip=1.0,
        bits=16,
        levels=1,
        min_cohort=min_cohort,
        roster=roster,
        following=following,
        entropy=entropy,
    )


def membership(clusters: int, labels: Sequence[int]) -> Contribution:
    """A client's input to the counts: 1 for each cluster in `labels`."""
    vector = np.zeros(clusters, np.int32)
    vector[list(labels)] = 1
    return Contribution(vector, is_levels=True)


def counts_of(result: Sum[Terms]) -> tuple[int, ...]:
    """Members of each cluster among the survivors of the counts.

    Raises:
        SumFailed: "out-of-range" for a count below zero or above the number of survivors.
    """
    counts = tuple(int(count) for count in result.block())
    if any(not 0 <= count <= len(result.survivors) for count in counts):
        raise SumFailed("out-of-range")
    return counts


def open_blocks(counts: Sequence[int], min_cohort: int, spare: int = 0) -> tuple[tuple[int, int], ...]:
    """(cluster, count) of the clusters whose sum may be computed although `spare` clients drop out on the way.

    Raises:
        TooFewClients: if there is none.
    """
    blocks = tuple((cluster, count) for cluster, count in enumerate(counts) if count >= min_cohort + spare)
    if not blocks:
        raise TooFewClients(tuple(counts), min_cohort + spare)
    return blocks


def block_terms(
    counted: Sum[Terms],
    *,
    slot: Slot,
    models: Sequence[bytes],
    dimension: int,
    clip: float,
    bits: Bits = 32,
    weight_limit: float = 1.0,
    least_weight: float | None = 1.0,
    spread: float = 1.0,
    spare: int = 0,
    roster: Roster | None = None,
    following: Slot | None = None,
    entropy: Entropy = system_entropy,
) -> Terms:
    """The terms of the blocks, for those who were counted.

    Such a sum always has weights (least_weight = weight_limit makes them equal): the number who are left in each
    block is part of what is masked. With `least_weight` None it is chosen as in `make_terms`, where the clients that
    certainly contribute to the smallest open block decide: weights differ little.

    Raises:
        TooFewClients: if no cluster reaches minimum cohort size + spare.
    """
    first = counted.terms
    return make_terms(
        session=first.session,
        slot=slot,
        cohort=counted.survivors,
        models=models,
        dimension=dimension,
        clip=clip,
        bits=bits,
        weight_limit=weight_limit,
        least_weight=least_weight,
        spread=spread,
        min_cohort=first.min_cohort,
        roster=roster,
        blocks=open_blocks(counts_of(counted), first.min_cohort, spare),
        following=following,
        entropy=entropy,
    )


@dataclass(frozen=True)
class ObliviousOutcome:
    """counts: members per cluster. means: (mean, weight) per open cluster. first, second: the two sums."""

    counts: tuple[int, ...]
    means: Mapping[int, tuple[NDArray[np.float64], float]] = field(repr=False)
    first: Outcome
    second: Outcome


def simulate_oblivious(
    terms: Terms,
    identities: Mapping[int, Identity],
    clusters_of: Callable[[int], Sequence[int]],
    values: Callable[[int], Sequence[Contribution]],
    *,
    slot: Slot,
    dimension: int,
    clip: float,
    spare: int = 0,
    roster: Roster | None = None,
    drops: tuple[Mapping[int, str], Mapping[int, str]] = ({}, {}),
    bits: Bits = 32,
    weight_limit: float = 1.0,
    least_weight: float | None = 1.0,
    **options: Any,
) -> ObliviousOutcome:
    """Both sums in one process.

    Args:
        terms: of the counts (`count_terms`); with `following = slot` the second sum needs no invitation.
        identities: as for `simulate`.
        clusters_of: the clusters a client belongs to; known to it alone.
        values: its contributions, each naming its cluster.
        slot: of the second sum. dimension, clip, bits, weight_limit, least_weight, spare: see `block_terms`.
        drops: of the first and of the second sum, as for `simulate`.
        options: further options of `simulate` (record, entropy, mapper).

    Raises:
        TooFewClients: in either sum, or if no cluster is large enough.
    """
    clusters = terms.dimension
    first = simulate(terms, identities, lambda c: membership(clusters, clusters_of(c)), roster=roster, drops=drops[0], **options)
    second_terms = block_terms(
        first.sum,
        slot=slot,
        models=terms.models,
        dimension=dimension,
        clip=clip,
        bits=bits,
        weight_limit=weight_limit,
        least_weight=least_weight,
        spare=spare,
        roster=roster,
    )
    ready = terms.following == slot
    second = simulate(
        second_terms,
        identities,
        values,
        roster=roster,
        drops=drops[1],
        mask_keys=first.mask_keys if ready else None,
        adverts=first.adverts if ready else None,
        **options,
    )
    means = {
        cluster: (second.sum.mean(cluster), second.sum.weight(cluster))
        for cluster, _ in second_terms.blocks
        if second.sum.weight(cluster) > 0
    }
    return ObliviousOutcome(counts_of(first.sum), means, first, second)
