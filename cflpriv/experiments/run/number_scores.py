"""Scores of a regression for a round's row, from what clients' evaluations gave: errors in the label's unit, R², and the baseline.

A client's error is the square root of its mean squared error, or with `model.error = "absolute"` its mean absolute error, so what its
training minimises. R² and the other figures are of the sums over all evaluated clients (`error_sums`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...clustering.scores import spread
from ...contract.handles import Labels, placed
from ...error_sums import ErrorSums, pooled_errors, useless_numbers
from ...types import Array, Loss, Population

__all__ = ["NUMBERS", "client_errors", "error_spread", "is_evaluated", "main_score", "mean_label", "number_scores", "number_warnings"]

NUMBERS = (
    *(f"{kind}_{statistic}" for kind in ("error", "local_error") for statistic in ("mean", "mean_interval", "std", "worst")),
    "r2", "local_r2", "root_mean_square_error", "mean_absolute_error", "constant_error", "numbers",
)  # fmt: skip
"""Keys of a regression's row."""
MOST_CLUSTERS = 50
"""Of more clusters, a row has no sums for each."""


def is_evaluated(row: Mapping[str, Any]) -> bool:
    """Whether a row has scores of the models that clients use."""
    return row.get("accuracy_mean") is not None or row.get("error_mean") is not None


def main_score(row: Mapping[str, Any]) -> tuple[str, float | None]:
    """The key of the score that comes first, and its value: R² (or the mean error, where it is not known) of numbers, else accuracy."""
    if row.get("error_mean") is None:
        return "accuracy_mean", row.get("accuracy_mean")
    return ("error_mean", row["error_mean"]) if row.get("r2") is None else ("r2", row["r2"])


def mean_label(population: Population, clients: Sequence[int]) -> float:
    """The mean training label, within −1 to 1, of `clients`."""
    chosen = set(clients)
    return float(np.mean(np.concatenate([client.y_train for client in population.clients if client.id in chosen])))


def half_width(label_range: Sequence[float]) -> float:
    """What an error of 1 stands for in the label's unit."""
    return (label_range[1] - label_range[0]) / 2


def client_errors(results: Sequence[Mapping[str, Array]], loss: Loss, label_range: Sequence[float]) -> Array:
    """Each client's error in the label's unit (clients,); NaN for a client without test data."""
    counts = np.array([float(result.get("count", 0.0)) for result in results])
    sums = np.array([float(result.get("loss", np.nan)) for result in results])
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return np.asarray((np.sqrt(means) if loss == "squared" else means) * half_width(label_range))


def error_spread(errors: Array, name: str) -> dict[str, float | None]:
    """Mean, deviation and worst of errors over clients, of which the worst is the largest."""
    kept = errors[np.isfinite(errors)]
    return {**spread(errors, name), f"{name}_worst": float(kept.max()) if len(kept) else None}


def number_scores(
    results: Sequence[Mapping[str, Array]], clients: Sequence[int], label_range: Sequence[float], which: Labels | None = None,
    training_mean: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """R², the errors of all test samples, and those of always predicting the mean training label; empty where clients gave no sums.

    `results[i]` is of `clients[i]`. training_mean: the mean training label, within −1 to 1; without it, that of the test samples.
    """
    whole = pooled_errors(results)
    if whole is None:
        return {}
    width = half_width(label_range)
    constant = whole.labels / whole.count if training_mean is None else training_mean
    clusters: dict[int, list[Mapping[str, Array]]] = {}
    labels = {} if which is None else {client: which[client] for client in placed(which, clients)}
    for client, result in zip(clients, results, strict=True):
        if isinstance(label := labels.get(client), int | np.integer):
            clusters.setdefault(int(label), []).append(result)
    numbers: dict[str, Any] = {"range": list(label_range), "count": whole.count, "sums": _listed(whole)}
    if 1 < len(clusters) <= MOST_CLUSTERS:
        sums = {str(label): pooled_errors(members) for label, members in sorted(clusters.items())}
        numbers["clusters"] = {
            label: {"r2": _finite(own.r2), "root_mean_square_error": own.root_mean_square * width, "count": own.count, "sums": _listed(own)}
            for label, own in sums.items()
            if own is not None
        }
    return {
        "r2": _finite(whole.r2),
        "root_mean_square_error": whole.root_mean_square * width,
        "mean_absolute_error": whole.mean_absolute * width,
        "constant_error": whole.constant_error(constant) * width,
        "numbers": numbers,
    }


def number_warnings(row: Mapping[str, Any]) -> list[str]:
    """What a reader of a row's errors should know: that the models of all clients, or of a cluster, predict nothing."""
    numbers = row.get("numbers") or {}
    if not numbers:
        return []
    clusters = numbers.get("clusters") or {}
    if problem := useless_numbers(_sums(numbers), "the set of the clusters' models" if clusters else "the model"):
        return [problem]
    return [
        problem
        for label, own in clusters.items()
        if _sums(own).constant and (problem := useless_numbers(_sums(own), f"the model of cluster {label}"))
    ]


def _listed(sums: ErrorSums) -> list[float]:
    return [sums.squared, sums.absolute, sums.labels, sums.labels_squared, sums.predictions, sums.predictions_squared]


def _sums(listed: Mapping[str, Any]) -> ErrorSums:
    return ErrorSums(float(listed["count"]), *map(float, listed["sums"]))


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
