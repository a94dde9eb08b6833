"""StoCFL, where the Gram may be seen: merging clusters by cosine, placing newcomers, the authors' merging of those present.

Source: Zeng et al. 2023, Algorithm 1, lines 8-13, and Section 4.4; deviations are listed in `stocfl`. Public code on inner products alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...clustering.similarity import ZERO_BELOW, drowned, least_norm, without_noise
from ...contract.operations import GramView, Results
from ...errors import InputError
from ...types import Array

__all__ = ["Enter", "MergeClusters", "MergePresent", "PlaceInClusters", "merge_by_cosine"]

BINS = np.linspace(-1.0, 1.0, 21)
"""Edges of the similarity histogram: cosines in steps of 0.1."""
HEATMAP_CLIENTS = 500
"""The matrix of all cosines is part of the evidence up to this many clients."""


def merge_by_cosine(sums: Array, tau: float, at_least: int = 1, sizes: Sequence[int] = (), error: float = 0.0) -> tuple[Array, list[float]]:
    """Merge the best pair while its cosine is at least τ (never at τ = 1); each cluster's new label, and the cosines of the merges.

    `sums[a, b]` = Σ_{i∈a, j∈b} Ψ_i·Ψ_j: of sums or means of members the cosine is the same. Among equals the pair of lowest numbers goes
    first. Clusters of fewer than `at_least` clients (by `sizes`) then join the most similar, smallest first. A sum that cannot be
    distinguished from zero, with an `error` of that standard deviation in each inner product, has cosine 0.
    """
    sums = _symmetric(np.asarray(sums, dtype=np.float64))
    groups = [[i] for i in range(len(sums))]
    counts = list(sizes) if sizes else [1] * len(sums)
    merged: list[float] = []
    cosine = _cosines(sums, error, counts)
    np.fill_diagonal(cosine, -np.inf)

    def join(a: int, b: int) -> None:
        nonlocal sums, cosine
        sums[a] += sums[b]
        sums[:, a] += sums[:, b]
        groups[a] += groups.pop(b)
        counts[a] += counts.pop(b)
        sums, cosine = (np.delete(np.delete(matrix, b, 0), b, 1) for matrix in (sums, cosine))
        squares = _squares(sums, error, counts)
        row = _cosine(sums[a], squares[a], squares)
        row[a] = -np.inf
        cosine[a] = cosine[:, a] = row

    while len(groups) > 1 and tau < 1:
        a, b = sorted(divmod(int(cosine.argmax()), len(groups)))  # the first of equals
        if cosine[a, b] < tau:
            break
        merged.append(float(cosine[a, b]))
        join(a, b)
    while len(groups) > 1 and min(counts) < at_least:
        small = counts.index(min(counts))
        nearest = int(cosine[small].argmax())
        join(*sorted((small, nearest)))
    labels = np.empty(sum(len(group) for group in groups), dtype=np.int64)
    for label, group in enumerate(groups):
        labels[group] = label
    return labels, merged


def _cosine(products: Array, square: float, squares: Array) -> Array:
    scale = np.sqrt(np.maximum(square * squares, 0.0))
    return np.clip(np.divide(products, scale, out=np.zeros_like(products), where=scale > 0), -1.0, 1.0)


def _cosines(sums: Array, error: float, sizes: Sequence[int] | Array) -> Array:
    squares = _squares(sums, error, sizes)
    return np.stack([_cosine(row, float(squares[i]), squares) for i, row in enumerate(sums)])


def _squares(sums: Array, error: float, sizes: Sequence[int] | Array) -> Array:
    """Squared norms of sums of `sizes` vectors, zero where errors alone could make them: of m² products those of pairs count twice."""
    if not error:
        return np.diag(sums)
    m = np.asarray(sizes, dtype=np.float64)
    return np.where(np.diag(sums) < ZERO_BELOW * error * np.sqrt(2 * m**2 - m), 0.0, np.diag(sums))


def _cluster_sums(products: Array, labels: Array, k: int | None = None) -> Array:
    """Σ over members: (n, n) products of clients to (k, k) of clusters."""
    member = np.zeros((int(labels.max()) + 1 if k is None else k, len(labels)))
    member[labels, np.arange(len(labels))] = 1.0
    return _symmetric(member @ products @ member.T)


def _symmetric(matrix: Array) -> Array:
    """Without what rounding made unequal."""
    return np.asarray((matrix + matrix.T) / 2)


def _by_first_client(labels: Array, clients: Sequence[int]) -> Array:
    """The same partition with clusters numbered by their lowest client, so that the order in which clients were met does not show."""
    lowest: dict[int, int] = {}
    for label, client in zip(labels.tolist(), clients, strict=True):
        lowest[label] = min(client, lowest.get(label, client))
    rank = {label: number for number, label in enumerate(sorted(lowest, key=lowest.__getitem__))}
    return np.array([rank[label] for label in labels.tolist()], dtype=np.int64)


def _products(view: GramView) -> Array:
    """All inner products so far; only the rows of new clients are asked for. What cannot be distinguished from zero is zero.

    Raises `InputError` where the protection's errors are larger than the typical vector: clusters would be made of noise.
    """
    old: Array = view.memory.get("products", np.zeros((0, 0)))
    before, total = len(old), view.gram.n
    if view.gram.p != 1:
        raise InputError(f"stocfl: clients hold {view.gram.p} representations each, expected 1")
    products = np.zeros((total, total))
    products[:before, :before] = old
    rows = np.asarray(view.gram.block(slice(before, total), slice(0, total)), dtype=np.float64).reshape(total - before, total)
    products[before:] = rows
    products[:, before:] = rows.T
    view.memory["products"] = products
    error = view.gram.error
    if drowned(np.diag(products), error):
        raise InputError(
            f"stocfl: half of the clients or more have vectors of norms below {least_norm(error):.2g}, where the protection's error of "
            f"{error:.2g} an inner product makes clusters of noise; give a smaller protection.ckks_bound, or ckks_release = 'labels' in a "
            "larger ckks_ring"
        )
    return without_noise(products, error)


def _evidence(products: Array, labels: Array, clients: Sequence[int], merged: Sequence[float], error: float) -> dict[str, Any]:
    """The histogram of all clients' cosines, those of the merges made, and the best that was not."""
    cosine = _cosines(products, error, np.ones(len(products)))
    pairs = cosine[np.triu_indices(len(cosine), 1)]
    between = _cosines(_cluster_sums(products, labels), error, np.bincount(labels))
    apart = between[np.triu_indices(len(between), 1)]
    evidence = {
        "similarity_histogram": np.histogram(pairs, BINS)[0].tolist(), "merge_cosines": [float(value) for value in merged],
        "largest_cosine_left": float(apart.max()) if len(apart) else None, "clients": tuple(clients),
    }  # fmt: skip
    return evidence | ({"distance": 1.0 - cosine} if len(clients) <= HEATMAP_CLIENTS else {})


def _nearest_old(cosine: Array, old: Sequence[bool]) -> Array:
    """For each cluster the most similar other one among the `old`, −1 if there is none."""
    np.fill_diagonal(cosine, -np.inf)
    cosine[:, ~np.asarray(old, dtype=bool)] = -np.inf
    return np.where(np.isfinite(cosine.max(axis=1)), cosine.argmax(axis=1), -1)


@dataclass(frozen=True)
class MergeClusters:
    """Algorithm 1, lines 9-13: public code run where the Gram may be seen; each newly met client enters as a cluster of its own.

    Result: "labels" of all clients met, in the order of the Gram; "nearest" (k,), for each cluster the most similar other one that has
    clients met before (−1: none).
    """

    results: ClassVar[Results] = {"labels": "all", "nearest": "some"}

    tau: float
    at_least: int = 1

    def __call__(self, view: GramView) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        products, clients, error = _products(view), view.gram.clients, view.gram.error
        known: Array = view.memory.get("labels", np.zeros(0, dtype=np.int64))
        first = int(known.max()) + 1 if len(known) else 0
        alone = np.concatenate([known, first + np.arange(len(clients) - len(known))])  # each new client is a cluster
        alone = _by_first_client(alone, clients)
        sums, sizes = _cluster_sums(products, alone), np.bincount(alone).tolist()
        into, merged = merge_by_cosine(sums, self.tau, self.at_least, sizes, error)
        labels = _by_first_client(into[alone], clients)
        view.memory["labels"] = labels
        old = [bool((labels[: len(known)] == label).any()) for label in range(int(labels.max()) + 1)]
        between = _cosines(_cluster_sums(products, labels), error, np.bincount(labels))
        return {"labels": labels, "nearest": _nearest_old(between, old)}, _evidence(products, labels, clients, merged, error)


@dataclass(frozen=True)
class PlaceInClusters:
    """Section 4.4: each newcomer in turn joins the nearest cluster if its cosine is ≥ τ, else opens one; the old `k` stay as they are.

    Opened clusters of fewer than `at_least` clients then join the most similar, smallest first.

    Result: "labels" of the newcomers; "nearest", for each opened cluster the one whose model it starts from (−1: none).
    """

    results: ClassVar[Results] = {"labels": "new", "nearest": "some"}

    tau: float
    k: int
    at_least: int = 1

    def __call__(self, view: GramView) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        products, clients, error = _products(view), view.gram.clients, view.gram.error
        labels: Array = view.memory.get("labels", np.zeros(0, dtype=np.int64))
        first = len(labels)
        nearest: list[int] = []
        for place in range(len(labels), len(clients)):  # newcomers come last in the Gram, in ascending order
            met = np.arange(len(labels))
            sums = _cluster_sums(products[np.ix_(met, met)], labels, self.k + len(nearest))
            towards = np.bincount(labels, weights=products[place, met], minlength=len(sums))
            towards = towards.astype(np.float64)  # they are integers while there are no labels
            squares = _squares(sums, error, np.bincount(labels, minlength=len(sums)))
            cosine = _cosine(towards, float(products[place, place]), squares)
            best = int(cosine.argmax()) if len(met) else -1
            if best >= 0 and cosine[best] >= self.tau and self.tau < 1:
                labels = np.append(labels, best)
            else:
                labels = np.append(labels, self.k + len(nearest))
                nearest.append(best)
        labels, nearest = self._joined(products, labels, nearest, error)
        view.memory["labels"] = labels
        return {"labels": labels[first:], "nearest": np.array(nearest, dtype=np.int64)}, _evidence(products, labels, clients, [], error)

    def _joined(self, products: Array, labels: Array, nearest: list[int], error: float) -> tuple[Array, list[int]]:
        while True:
            counts = np.bincount(labels, minlength=self.k + len(nearest))
            small = [label for label in range(self.k, len(counts)) if counts[label] < self.at_least]
            if not small or len(counts) < 2:
                return labels, nearest
            label = min(small, key=lambda cluster: (counts[cluster], cluster))
            cosine = _cosines(_cluster_sums(products, labels, len(counts)), error, counts)[label]
            cosine[label] = -np.inf
            labels = np.where(labels == label, int(cosine.argmax()), labels)
            labels = labels - (labels > label)
            source = nearest.pop(label - self.k)
            nearest = [source if cluster == label else cluster - (cluster > label) for cluster in nearest]


@dataclass(frozen=True)
class MergePresent:
    """The authors' merging: only this round's clients count; one pass over the initial matrix. Result: "into", for each present cluster
    (ascending labels) the position of the cluster that now contains it: the lowest position among merged clusters.

    `known` are the labels that this round's clients have already, each newly met client with one of its own.
    """

    results: ClassVar[Results] = {"into": "some"}

    tau: float
    known: tuple[int, ...]

    def __call__(self, view: GramView) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        products, error = _products(view), view.gram.error
        present, place = np.unique(self.known, return_inverse=True)
        means = _cluster_sums(products, place)
        cosine = _cosines(means, error, np.bincount(place))
        parent = np.arange(len(present))
        rows, cols = np.triu_indices(len(present), 1)
        merged = []
        for pair in np.argsort(-cosine[rows, cols], kind="stable"):
            a, b, value = int(parent[rows[pair]]), int(parent[cols[pair]]), float(cosine[rows[pair], cols[pair]])
            if value < self.tau or self.tau >= 1:
                break
            if a != b:
                parent[parent == max(a, b)] = min(a, b)
                merged.append(value)
        labels = np.unique(parent[place], return_inverse=True)[1]
        return {"into": parent}, _evidence(products, labels, view.gram.clients, merged, error)


@dataclass(frozen=True)
class Enter:
    """Enters clients of known labels into an epoch."""

    results: ClassVar[Results] = {}

    labels: tuple[int, ...]

    def __call__(self, view: GramView) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        _products(view)
        view.memory["labels"] = np.array(self.labels, dtype=np.int64)
        return {}, {}
