"""Label shares of clients that have few labels, from sums: with a known number of labels a few sums determine many shares.

Source: sparse recovery by iterative hard thresholding (Blumensath & Davies 2009) with projections onto the simplex (Duchi et al. 2008), the
number of labels that a client may have falling step by step to its own. Deviations: several starts, of which the mean is taken. Where the
sums determine the shares all starts end alike; elsewhere their mean is undecided, as it should be. Half of the searches are held to the
first shares by the penalty of these, as the readings of sums have errors.
"""

from collections.abc import Sequence

import numpy as np

from ...randomness import Stream
from ...types import Array
from ..evidence.linear_evidence import projected

__all__ = ["least_labels", "sparse_shares"]

STARTS, LEVELS, STEPS = 12, 6, 40
"""Starts, how often the number of labels is lowered, and steps of gradient descent in between."""
HALF = 0.5


def sparse_shares(rows: Array, readings: Array, labels: Sequence[int], start: Array, penalty: float, rng: Stream) -> Array:
    """Shares (n, classes) of clients with so many `labels` (n,), which make `rows` (m, n) · shares near the `readings` (m, classes).

    Searches begin at `start` (n, classes) and at random shares; every second one has `penalty` · |shares − start|² in what is least.
    """
    n, classes = start.shape
    counts = np.clip(np.asarray(labels), 1, classes)
    shares = np.stack([start, start, *rng.dirichlet(np.ones(classes), (STARTS - 2, n))])
    held = penalty * (np.arange(STARTS) % 2)[:, None, None]
    step = 1 / max(float(np.linalg.norm(rows, 2)) ** 2 + penalty, 1e-300)
    for level in range(LEVELS + 1):
        allowed = np.ceil(classes * (counts / classes) ** (level / LEVELS)).astype(int)
        moved, momentum = shares, 1.0
        for _ in range(STEPS):  # Nesterov's steps
            slope = rows.T @ (rows @ moved - readings) + held * (moved - start)
            before, shares = shares, projected(moved - step * slope, allowed)
            faster = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
            moved, momentum = shares + (momentum - 1) / faster * (shares - before), faster
    return np.asarray(shares.mean(axis=0))


def least_labels(shares: Array, labels: int) -> Array:
    """Shares (classes,) of the so many largest `labels` alone, where these hold at least half; else the shares as they are.

    Where shares are undecided, naming the largest would only add errors.
    """
    largest = np.argsort(-shares, kind="stable")[:labels]
    held = float(shares[largest].sum())
    if labels >= len(shares) or held < HALF:
        return np.asarray(shares)
    kept = np.zeros_like(shares)
    kept[largest] = shares[largest] / held
    return kept
