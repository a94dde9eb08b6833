"""Sums over blocks that clients choose: the server and the helpers learn how many chose each block, and open the large ones only.

A vector has a block for each cluster. A client fills those of its own choice and leaves zeros elsewhere; under the masks all look alike.
All weigh equally, so the sum of the weights of a block is its count. The masked vector has the counts first: helpers get them, under the
client's signature, and once the set is closed they open their masks. By these each helper counts for itself, and sends of the other masks
only what covers blocks of at least `minimum` clients.

Guarantee: a server that lies and t helpers get no block opened that fewer than `minimum` members say they fill: a mask of counts is
believed where t + 1 helpers sent it, one of them honest. Who fills which block stays hidden as values do. Reveals: the counts, also of
blocks that stay closed. A client can overstate a count. Source: ours.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from ..errors import HelpersFailed, RemoteError
from ..keys import Roster, verify_key
from ..secagg.vectors import unwrap, vector_length
from . import messages as m
from .terms import HelpedTerms, held, seed_sets

__all__ = ["counted_masks", "counts_first", "counts_of", "in_order", "large", "opened_places"]


@lru_cache(maxsize=4)
def _order(clusters: int, length: int) -> NDArray[np.intp]:
    """Which coordinate stands at each place of a masked vector: the weight of each block first."""
    width = (length - 1) // clusters
    weights = np.arange(clusters) * width + width - 1
    return np.concatenate([weights, np.setdiff1d(np.arange(length), weights)])


def counts_first(terms: HelpedTerms, vector: NDArray[np.int32]) -> NDArray[np.int32]:
    """A client's vector in the order of a masked one."""
    return vector[_order(terms.clusters, vector_length(terms))] if terms.clusters else vector


def in_order(terms: HelpedTerms, vector: NDArray[np.int32]) -> NDArray[np.int32]:
    """The inverse of `counts_first`."""
    if not terms.clusters:
        return vector
    whole = np.empty_like(vector)
    whole[_order(terms.clusters, vector_length(terms))] = vector
    return whole


def opened_places(terms: HelpedTerms, clusters: Sequence[int]) -> NDArray[np.intp]:
    """The places of these blocks in a masked vector, without their counts, and of the number of clients that clipped."""
    blocks = [np.arange(terms.dimension) + terms.clusters + cluster * terms.dimension for cluster in clusters]
    return np.concatenate([*blocks, [vector_length(terms) - 1]])


def counts_of(terms: HelpedTerms, residues: NDArray[np.uint], members: int) -> tuple[int, ...]:
    """How many members fill each block, by the sum of their counts without masks. Raises `RemoteError` "out-of-range"."""
    weights = unwrap(residues, terms.bits)
    if int(weights.min()) < 0 or int(weights.max()) > members * terms.levels:
        raise RemoteError("out-of-range")
    return tuple(int(weight) // terms.levels for weight in weights)


def large(terms: HelpedTerms, counts: Sequence[int]) -> tuple[int, ...]:
    """The blocks that are opened."""
    return tuple(cluster for cluster, count in enumerate(counts) if count >= terms.minimum)


def counted_masks(
    terms: HelpedTerms, roster: Roster, name: bytes, counted: Sequence[m.CountMasks]
) -> tuple[NDArray[np.uint], set[int]]:  # fmt: skip
    """The sum of the masks of the counts, and the helpers that sent others.

    Raises:
        RemoteError: "bad-signature". HelpersFailed: "masks-differ" or "too-few-helpers" for a seed whose mask fewer than t + 1 helpers
        sent.
    """
    votes: dict[int, dict[bytes, set[int]]] = {number: {} for number in range(len(seed_sets(terms.helpers, terms.colluding)))}
    for message in counted:
        numbers = held(terms, message.helper)
        groups, hashes = [(number,) for number in numbers], [sha256(mask).digest() for mask in message.masks]
        parts = m.mask_parts(message.helper, name, groups, hashes)
        verify_key(roster.holders[message.helper], message.helper, message.signature, m.COUNT, *parts)
        for number, mask in zip(numbers, message.masks, strict=True):
            votes[number].setdefault(mask, set()).add(message.helper)
    total = np.zeros(terms.clusters, "<u2" if terms.bits == 16 else "<u4")
    liars: set[int] = set()
    for several in votes.values():
        total += _believed(terms, several, total.dtype, liars)
    return total, liars


def _believed(terms: HelpedTerms, several: Mapping[bytes, set[int]], dtype: np.dtype, liars: set[int]) -> NDArray[np.uint]:
    """The mask that t + 1 helpers sent. At most t lie, so there is one."""
    for mask, helpers in several.items():
        if len(helpers) > terms.colluding:
            liars |= set[int]().union(*several.values()) - helpers
            return np.frombuffer(mask, dtype)
    raise HelpersFailed("masks-differ" if len(several) > 1 else "too-few-helpers", tuple(sorted(set[int]().union(*several.values()))))
