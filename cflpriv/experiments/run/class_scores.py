"""Scores by class of a round's row, from the counts that clients' evaluations gave, and the warnings that follow from them.

Everything is computed from the sum of the clients' counts (`class_counts`), of all evaluated clients and of each cluster.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...class_counts import ClassCounts, as_counts, pooled, useless
from ...contract.handles import Labels, placed
from ...types import Array, Population
from ..metrics import value_of

__all__ = ["BY_CLASS", "class_scores", "majority_label", "warnings_of"]

BY_CLASS = ("balanced_accuracy", "macro_f1", "majority_accuracy", "majority_balanced_accuracy", "by_class")
"""Keys of a row that has scores by class."""
MOST_CLUSTERS = 50
"""Of more clusters, a row has no counts for each."""


def majority_label(population: Population, clients: Sequence[int]) -> int:
    """The most frequent class among the training labels of `clients` (the lowest among equals)."""
    chosen = set(clients)
    counts = np.zeros(population.classes, dtype=np.int64)
    for client in population.clients:
        if client.id in chosen:
            counts += np.bincount(client.y_train, minlength=population.classes)
    return int(counts.argmax())


def class_scores(
    results: Sequence[Mapping[str, Array]], clients: Sequence[int], which: Labels | None = None, majority: int | None = None,
    metrics: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Keys of a row: `BY_CLASS`, and `metric_NAME` for each own metric. Empty where clients counted nothing.

    `results[i]` is of `clients[i]`, and has "confusion". which: the cluster of each client, where there are clusters. majority: the class
    whose constant prediction is the baseline; without it the class with most of the samples that were counted.
    """
    whole = pooled(results)
    counts = None if whole is None else as_counts(whole)
    if whole is None or counts is None:
        return {}
    baseline = int(counts.samples.argmax()) if majority is None else majority
    clusters: dict[int, list[Mapping[str, Array]]] = {}
    labels = {} if which is None else {client: which[client] for client in placed(which, clients)}
    for client, result in zip(clients, results, strict=True):
        if isinstance(label := labels.get(client), int | np.integer):
            clusters.setdefault(int(label), []).append(result)
    several = len(clusters) > 1 and len(clusters) <= MOST_CLUSTERS and counts.matrix is not None
    by_class: dict[str, Any] = {"majority": baseline, "counts": _listed(whole), "recall": _recalls(counts)}
    if several:
        sums = {label: pooled(members) for label, members in sorted(clusters.items())}
        by_class["clusters"] = {str(label): _cluster(array) for label, array in sums.items() if array is not None and array.sum()}
    return {
        "balanced_accuracy": counts.balanced_accuracy,
        "macro_f1": counts.macro_f1,
        "majority_accuracy": counts.constant_accuracy(baseline),
        "majority_balanced_accuracy": float(counts.occurring[baseline] / counts.occurring.sum()),
        **{f"metric_{name}": value_of(name, counts) for name in metrics},
        "by_class": by_class,
    }


def _cluster(array: Array) -> dict[str, Any]:
    counts = as_counts(array)
    assert counts is not None
    return {"balanced_accuracy": counts.balanced_accuracy, "recall": _recalls(counts), "counts": _listed(array)}


def _listed(array: Array) -> list[list[int]]:
    listed: list[list[int]] = array.astype(np.int64).tolist()
    return listed


def _recalls(counts: ClassCounts) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in counts.recalls]


def warnings_of(row: Mapping[str, Any], names: Sequence[str] = ()) -> list[str]:
    """What a reader of a row's accuracy should know: that the models of all clients, or of a cluster, predict nothing (`useless`).

    A cluster is named only where its own samples show it: a cluster may well have nearly one class alone.
    """
    by_class = row.get("by_class") or {}
    counts = as_counts(np.array(by_class["counts"])) if by_class else None
    if counts is None:
        return []
    clusters = by_class.get("clusters") or {}
    if problem := useless(counts, "the set of the clusters' models" if clusters else "the model", names, by_class["majority"]):
        return [problem]
    problems = []
    for label, cluster in clusters.items():
        own = as_counts(np.array(cluster["counts"]))
        if own is not None and own.shown_useless and (problem := useless(own, f"the model of cluster {label}", names)):
            problems.append(problem)
    return problems
