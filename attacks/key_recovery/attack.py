"""The whole key-recovery attack: structure, class names, histograms, coordinates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...randomness import Stream
from ...types import Array
from .naming import (
    Knowledge,
    Naming,
    Response,
    head_blocks,
    leading_block,
    name_columns,
    own_proportions,
    place_block,
    regress,
    respond,
    simulate_updates,
    unnamed_shares,
)
from .structure import Structure, find_structure, rough_proportions

__all__ = ["ABSTAIN_BELOW", "Recovery", "match_coordinates", "recover_in_clear", "recover_labels"]

ABSTAIN_BELOW = 0.05
"""The attacker names no labels with less confidence than this."""
OWN_CLIENTS = 300


@dataclass(frozen=True, eq=False)
class Recovery:
    """The attacker's guesses about n clients: `structure` up to renaming, and, unless it `abstains`, label `histograms` (n, C) by name.

    `confidence` is its own. `response` predicts a first update from a histogram; `place` says which block of the head was found.
    """

    structure: Structure
    naming: Naming | None
    histograms: Array | None
    confidence: float
    response: Response | None = None
    place: int | None = None

    @property
    def abstains(self) -> bool:
        return self.histograms is None or self.confidence < ABSTAIN_BELOW

    def label_sets(self, sizes: Sequence[int]) -> list[frozenset[int]]:
        """The `sizes[i]` labels that client i has most of; empty sets where the attacker abstains."""
        if self.histograms is None or self.abstains:
            return [frozenset()] * len(sizes)
        return [frozenset(np.argsort(-row, kind="stable")[:size].tolist()) for row, size in zip(self.histograms, sizes, strict=True)]


def recover_labels(
    rounds: Sequence[Array], known: Knowledge, rng: Stream, *, own_clients: int = OWN_CLIENTS, restarts: int = 32, signed: bool = False
) -> Recovery:
    """Label histograms of clients from updates under a shared secret permutation of coordinates, without the key.

    `rounds` are arrays (n_t, d) of updates, one a round and group, all under one transform. The first array is of the round that started
    from `known.theta0`; its clients are attacked. With `signed`, the transform may change signs even if no block shows a change of sign.
    """
    structure = find_structure(rounds, known.classes, known.labels_per_client)
    if structure.by == "nothing":
        return Recovery(structure, None, None, 0.0)
    signed = signed or structure.signed
    first = np.asarray(rounds[0], dtype=np.float64)
    own = own_proportions(structure.proportions, own_clients, rng, known.labels_per_client)
    updates = simulate_updates(known, own, rng)
    response, blocks = respond(own, updates), head_blocks(known)
    if not known.labels_per_client:
        structure = replace(structure, proportions=unnamed_shares(structure.traces, updates[:, leading_block(blocks, known, updates)], own))
    naming = name_columns(structure.proportions, first, response, rng, restarts=restarts, signed=signed)
    named = structure.proportions[:, naming.order]
    place = None
    if structure.by == "zero sums":
        place = place_block(structure.traces[:, naming.order], response.predict(named), blocks)
    if known.labels_per_client or place is None:  # shares of a client's labels are taken as equal; those from clusters stay as rough
        return Recovery(structure, naming, named, naming.confidence, response, place)
    # with better proportions the clouds agree better: name the columns again
    features = updates[:, blocks[place]]
    unnamed = regress(features, own, structure.traces[:, naming.order])[:, np.argsort(naming.order)]
    naming = name_columns(unnamed, first, response, rng, restarts=restarts, signed=signed)
    histograms = regress(features, own, structure.traces[:, naming.order])
    return Recovery(structure, naming, histograms, naming.confidence, response, place)


def recover_in_clear(first: Array, known: Knowledge, rng: Stream, own_clients: int = OWN_CLIENTS) -> Recovery:
    """The same from first updates (n, d) whose coordinates are in their places: what the transform should have prevented."""
    blocks = head_blocks(known)
    block = leading_block(blocks, known, first)
    traces = np.asarray(first[:, block], dtype=np.float64)
    proportions = rough_proportions(traces, known.labels_per_client)
    own = own_proportions(proportions, own_clients, rng, known.labels_per_client)
    updates = simulate_updates(known, own, rng)
    histograms = proportions if known.labels_per_client else regress(updates[:, block], own, traces)
    structure = Structure(traces, histograms, "zero sums")
    return Recovery(structure, None, histograms, 1.0, respond(own, updates), 0)


def match_coordinates(first: Array, predicted: Array, moving: int = 1000, signed: bool = False) -> dict[int, int]:
    """Which seen coordinate of `first` (n, d) is which coordinate of the `predicted` updates (n, d): pairs nearest to each other among
    the `moving` largest of both."""
    seen = np.argsort(-np.einsum("nd,nd->d", first, first))[:moving]
    own = np.argsort(-np.einsum("nd,nd->d", predicted, predicted))[:moving]
    a, b = first[:, seen].T, predicted[:, own].T
    products = a @ b.T
    squared = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None, :] - 2.0 * (np.abs(products) if signed else products)
    there, back = squared.argmin(axis=1), squared.argmin(axis=0)
    return {int(seen[i]): int(own[there[i]]) for i in range(len(seen)) if back[there[i]] == i}
