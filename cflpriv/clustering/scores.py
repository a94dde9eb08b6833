"""Scores: how well clients are served, and how well clusters match the true groups."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from ..types import Array

__all__ = ["ari", "mean_interval", "perplexity", "spread"]

MOST_NATS = 100.0
"""Mean losses count as at most this many nats a sample: above it a loss shows only that the model diverged."""


def ari(truth: Sequence[int], labels: Sequence[int]) -> float:
    """The adjusted Rand index of a clustering: 1 for the true groups, about 0 for random ones.

    Counts of pairs are exact integers, as in scikit-learn, whose import takes longer than a short run.
    """
    n = len(truth)
    both = sum(count * count for count in Counter(zip(truth, labels, strict=True)).values())
    true, assigned = (sum(count * count for count in Counter(labelling).values()) for labelling in (truth, labels))
    together, only_true, only_found = both - n, true - both, assigned - both  # ordered pairs: alike in both partitions, in one of them
    apart = n * n - both - only_true - only_found
    if only_true == only_found == 0:
        return 1.0
    expected = (together + only_true) * (only_true + apart) + (together + only_found) * (only_found + apart)
    return 2.0 * (together * apart - only_true * only_found) / expected


def perplexity(loss: Array, accuracy: Array) -> Array:
    """exp(loss) of the clients' mean losses, each (clients,), and NaN for those without an `accuracy`, which have no test data.

    A loss that is above `MOST_NATS`, or not finite, counts as `MOST_NATS` (e¹⁰⁰, 2.7e43): so a client whose model diverged is not left out
    of a mean, and the mean and its deviation are finite, so that JSON can hold them.
    """
    return np.where(np.isnan(accuracy), np.nan, np.exp(np.clip(np.nan_to_num(loss, nan=np.inf), None, MOST_NATS)))


def mean_interval(values: Sequence[float], count: int, largest: float = 1.0) -> tuple[float, float] | None:
    """A 95 % interval for the mean of `count` numbers in [0, `largest`] from a simple random sample of them; None for fewer than two.

    Student's t with the correction for a finite population: x̄ ± t·s·√((1 − n/N)/n) (Cochran, Sampling Techniques, 1977, eq. 2.22).
    """
    n = len(values)
    if n < 2:
        return None
    from scipy.special import stdtrit  # takes long to load, and only a sample of clients needs it

    reach = float(stdtrit(n - 1, 0.975)) * float(np.std(values, ddof=1)) * np.sqrt(max(0.0, 1 - n / count) / n)
    mean = float(np.mean(values))
    return float(max(0.0, mean - reach)), float(min(largest, mean + reach))


def spread(values: Array, name: str) -> Mapping[str, float | None]:
    """`name_mean`, `name_std` and `name_worst` over clients, NaN left out; None where nothing is left."""
    kept = values[np.isfinite(values)]
    if len(kept) == 0:
        return {f"{name}_mean": None, f"{name}_std": None, f"{name}_worst": None}
    return {f"{name}_mean": float(kept.mean()), f"{name}_std": float(kept.std()), f"{name}_worst": float(kept.min())}
