"""From distances to clusters: agglomerative clustering, and the choice of a cut when none is given.

A tree is scipy's linkage matrix Z, rows (left, right, height, size), ready for `scipy.cluster.hierarchy.dendrogram`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..errors import InputError
from ..types import Array
from .similarity import SimilarityMatrix

__all__ = [
    "LINKAGES",
    "Cut",
    "Linkage",
    "cut_tree",
    "gap_ratios",
    "join_small",
    "linkage_distances",
    "linkage_tree",
    "merge_small",
    "ordered_labels",
    "silhouettes",
]

Linkage = Literal["average", "weighted", "complete", "single"]
Auto = Literal["silhouette", "gap"]

LINKAGES = ("average", "weighted", "complete", "single")
CLEAR_GAP = 2.0
"""Below this ratio of neighbouring merge heights the tree has no clear structure (real groups gave 2.5 to 6, label skew ≤ 1.8)."""
MOST_CLUSTERS = 20


@dataclass(frozen=True)
class Cut:
    """Where a tree was cut: `labels` (n,) in order of first client, `k` clusters, by which `rule`, at `height` (a distance).

    `gap_ratio` is the largest ratio of neighbouring merge heights, `clear` whether the structure is clear; `note` explains the decision.
    """

    labels: tuple[int, ...]
    k: int
    rule: str
    height: float
    gap_ratio: float
    clear: bool
    note: str


def linkage_tree(distance: SimilarityMatrix, linkage: Linkage = "average") -> Array:
    """The tree of agglomerative clustering. `weighted` is WPGMA, what the PACFL authors' code calls "average"."""
    if linkage not in LINKAGES:
        raise InputError(f"linkage: {linkage!r} is not known; known are {', '.join(LINKAGES)}")
    if distance.kind != "distance":
        raise InputError(f"linkage: needs a distance, got the similarity {distance.metric!r}")
    if len(distance.clients) < 2:
        return np.zeros((0, 4))
    from scipy.cluster import hierarchy  # slow to import
    from scipy.spatial.distance import squareform

    return np.asarray(hierarchy.linkage(squareform(distance.values, checks=False), method=linkage))


def cut_tree(
    tree: Array,
    distance: SimilarityMatrix,
    *,
    threshold: float | None = None,
    k: int | None = None,
    auto: Auto = "silhouette",
    at_least: int = 1,
) -> Cut:
    """Cut at a distance `threshold` (merge while the height is below it), into `k` clusters, or, with neither, automatically.

    Automatically: K is the number of clusters with the best mean silhouette (or the largest relative gap of merge heights), unless the
    largest gap ratio is below 2, when there is no clear structure and all clients form one cluster. Clusters smaller than `at_least` then
    join the nearest, by mean distance.
    """
    n = len(distance.clients)
    ratios = gap_ratios(tree, distance.noise)
    best_ratio = max(ratios.values(), default=1.0)
    clear, note = True, ""
    if threshold is not None and k is not None:
        raise InputError("clustering: give a threshold or a number of clusters, not both")
    if threshold is not None:
        rule = f"threshold {threshold:g}"
        k = 1 + int((tree[:, 2] >= threshold).sum())
    elif k is not None:
        rule = f"k = {k}"
        if not 1 <= k <= n:
            raise InputError(f"clustering: k = {k} clusters of {n} clients")
    else:
        rule = f"automatic ({auto})"
        clear = best_ratio >= CLEAR_GAP
        if not clear:
            k = 1
            note = f"no clear structure: the largest gap ratio is {best_ratio:.2f}, below {CLEAR_GAP:g}; one cluster is trained"
        elif auto == "gap":
            k = max(ratios, key=lambda size: (ratios[size], -size))
        else:
            scores = silhouettes(tree, distance)
            k = max(scores, key=lambda size: (scores[size], -size))
    labels = ordered_labels(_cut_into(tree, n, k))
    if at_least > 1:
        merged = merge_small(labels, distance.values, at_least)
        if merged.max() + 1 < labels.max() + 1:
            note = (note + "; " if note else "") + f"clusters below {at_least} clients joined the nearest"
        labels = merged
    height = _cut_height(tree, n, k)
    return Cut(tuple(int(label) for label in labels), int(labels.max()) + 1, rule, height, float(best_ratio), clear, note)


def gap_ratios(tree: Array, noise: float = 0.0) -> dict[int, float]:
    """For each number of clusters K ≥ 2: the height at which K merge into K − 1, over the height at which K were formed.

    K goes up to `MOST_CLUSTERS` and to half the number of clients: below that the tree only pairs near-equal clients. Heights below `noise`
    count as `noise`.
    """
    n = len(tree) + 1
    ratios = {}
    for k in range(2, min(MOST_CLUSTERS, n // 2) + 1):
        upper, lower = max(tree[n - k, 2], noise), max(tree[n - k - 1, 2], noise)
        ratios[k] = float(upper / lower) if lower > 0 else (np.inf if upper > 0 else 1.0)
    return ratios


def silhouettes(tree: Array, distance: SimilarityMatrix) -> dict[int, float]:
    """The mean silhouette of the cut into K clusters, for each K that `gap_ratios` looks at."""
    n = len(distance.clients)
    scores = {}
    for k in gap_ratios(tree):
        labels = ordered_labels(_cut_into(tree, n, k))
        if labels.max() + 1 == k:
            scores[k] = _silhouette(distance.values, labels)
    return scores


def _silhouette(distances: Array, labels: Array) -> float:
    """The mean silhouette (Rousseeuw 1987) of clusters 0 … k − 1, none empty: (b − a)/max(a, b), and 0 for a client that is alone.

    a is a client's mean distance (n, n) to the others of its cluster, b the smallest mean distance to another cluster.
    """
    members = np.eye(int(labels.max()) + 1)[labels]
    sizes, rows = members.sum(axis=0), np.arange(len(labels))
    sums = distances @ members
    own = sizes[labels]
    within = sums[rows, labels] / np.maximum(own - 1, 1)
    means = sums / sizes
    means[rows, labels] = np.inf
    nearest = means.min(axis=1)
    larger = np.maximum(within, nearest)
    values = np.divide(nearest - within, larger, out=np.zeros(len(labels)), where=larger > 0)
    return float(np.where(own > 1, values, 0.0).mean())


def linkage_distances(tree: Array, labels: Array, distances: Array, linkage: Linkage) -> Array:
    """The linkage distance of newcomers to clusters: `distances` (newcomers, n) to placed clients with `labels` (n,), gives (newcomers, k).

    Single, complete and average linkage are minimum, maximum and mean over the members. Weighted linkage is defined along the tree of the
    first clients: each merge averages its two halves, and so does each client that was placed since.
    """
    k = int(labels.max()) + 1
    if linkage != "weighted":
        blocks = [distances[:, labels == label] for label in range(k)]
        if linkage == "single":
            return np.stack([block.min(axis=1) for block in blocks], axis=1)
        if linkage == "complete":
            return np.stack([block.max(axis=1) for block in blocks], axis=1)
        return np.stack([block.mean(axis=1) for block in blocks], axis=1)
    leaves = len(tree) + 1
    names = [i if i < leaves else -1 - i for i in range(len(labels))]  # leaves of the tree, then clients placed since
    nodes: dict[int, Array] = {name: distances[:, i] for i, name in enumerate(names)}
    cluster: dict[int, int] = {name: int(labels[i]) for i, name in enumerate(names)}
    roots: dict[int, list[int]] = {label: [name for name in names if cluster[name] == label] for label in range(k)}
    for merge, (left, right, _, _) in enumerate(tree):
        a, b, node = int(left), int(right), leaves + merge
        if a in cluster and b in cluster and cluster[a] == cluster[b]:
            nodes[node], cluster[node] = (nodes[a] + nodes[b]) / 2, cluster[a]
            roots[cluster[a]] = [node] + [root for root in roots[cluster[a]] if root not in (a, b)]
    columns = []
    for label in range(k):
        column, *rest = (nodes[root] for root in roots[label])
        for other in rest:  # what joined later counts half, as a merge would
            column = (column + other) / 2
        columns.append(column)
    return np.stack(columns, axis=1)


def ordered_labels(labels: Array) -> Array:
    """The same partition with clusters numbered by their first member."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return np.asarray(rank[inverse.reshape(-1)])


def _cut_into(tree: Array, n: int, k: int) -> Array:
    """Labels after the first n − k merges: exactly k clusters, also among ties of height."""
    owner = np.arange(n + len(tree))
    for merge in range(n - k):
        left, right = int(tree[merge, 0]), int(tree[merge, 1])
        owner[left] = owner[right] = n + merge
    roots = np.empty(n, dtype=np.int64)
    for i in range(n):
        node = i
        while owner[node] != node:
            node = int(owner[node])
        roots[i] = node
    return roots


def _cut_height(tree: Array, n: int, k: int) -> float:
    """A height between the last merge that is made and the first that is not."""
    made = tree[n - k - 1, 2] if k < n else 0.0
    left = tree[n - k, 2] if k > 1 else (tree[-1, 2] * 1.05 if len(tree) else 0.0)
    return float((made + left) / 2)


def merge_small(labels: Array, values: Array, at_least: int) -> Array:
    """Join the smallest cluster below the minimum cohort size to the one nearest by mean distance, until none is left or only one
    remains.
    """
    return ordered_labels(join_small(labels, values, at_least))


def join_small(labels: Array, values: Array, at_least: int, others: Mapping[int, int] | None = None) -> Array:
    """As `merge_small`, but the labels keep their numbers. `others`: by label the number of further clients that are not in `labels`."""
    labels, further = labels.copy(), Counter(others)
    while True:
        sizes = {int(label): int((labels == label).sum()) + further[int(label)] for label in np.unique(labels)}
        small = [label for label, size in sizes.items() if size < at_least]
        if not small or len(sizes) == 1:
            return labels
        joining = min(small, key=lambda label: (sizes[label], label))
        nearest = min(
            (label for label in sizes if label != joining),
            key=lambda label: (float(values[np.ix_(labels == joining, labels == label)].mean()), label),
        )
        labels[labels == joining] = nearest
        further[nearest] += further.pop(joining, 0)
