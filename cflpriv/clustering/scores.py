"""Scores: how well clients are served, and how well clusters match the true groups."""

from collections.abc import Mapping, Sequence

import numpy as np

from ..types import Array

__all__ = ["ari", "perplexity", "spread"]

MOST_NATS = 100.0
"""Mean losses count as at most this many nats a sample: above it a loss shows only that the model diverged."""


def ari(truth: Sequence[int], labels: Sequence[int]) -> float:
    """The adjusted Rand index of a clustering: 1 for the true groups, about 0 for random ones."""
    from sklearn.metrics import adjusted_rand_score  # slow to import

    return float(adjusted_rand_score(list(truth), list(labels)))


def perplexity(loss: Array, accuracy: Array) -> Array:
    """exp(loss) of the clients' mean losses, each (clients,), and NaN for those without an `accuracy`, which have no test data.

    A loss that is above `MOST_NATS`, or not finite, counts as `MOST_NATS` (e¹⁰⁰, 2.7e43): so a client whose model diverged is not left out
    of a mean, and the mean and its deviation are finite, so that JSON can hold them.
    """
    return np.where(np.isnan(accuracy), np.nan, np.exp(np.clip(np.nan_to_num(loss, nan=np.inf), None, MOST_NATS)))


def spread(values: Array, name: str) -> Mapping[str, float | None]:
    """`name_mean`, `name_std` and `name_worst` over clients, NaN left out; None where nothing is left."""
    kept = values[np.isfinite(values)]
    if len(kept) == 0:
        return {f"{name}_mean": None, f"{name}_std": None, f"{name}_worst": None}
    return {f"{name}_mean": float(kept.mean()), f"{name}_std": float(kept.std()), f"{name}_worst": float(kept.min())}
