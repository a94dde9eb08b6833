"""Label shares from many noisy readings of each client: one system of equations for all rounds, solved once.

Source: ours, of textbook parts: ridge regression as the mode of a Gaussian posterior, the prior's width by maximum marginal likelihood. A
reading is what `label_inference` makes of an update, u = M q + noise with q the client's label shares. Estimates that are made to be shares
(q ≥ 0, Σ q = 1) round by round and then averaged keep each round's noise as a bias; the mean of the readings has less with every round. How
much noise there is the readings show themselves: successive ones of a client differ by it alone, as far as M changes slowly.

What it proves: noise that hides labels in single updates may not hide them in all of a run's. What it does not: readings that are biased
alike in all rounds (M from poor auxiliary data) stay biased.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from scipy.optimize import nnls

from ..types import Array

__all__ = ["Readings", "shares_under_noise"]

WIDTHS = (0.003, 0.01, 0.02, 0.04, 0.06, 0.08, 0.11, 0.15, 0.2, 0.3)
"""Standard deviations that clients' shares may have around the prior ones; the first is next to none."""
SURE = 2.0
"""By how much the logarithm of the likelihood must grow before clients are taken to differ at all: 1 in 20 of alike ones is."""

K = TypeVar("K")


@dataclass(frozen=True, eq=False)
class Readings:
    """One client's readings: `rows` (t, classes), a round each, means of `members` (t,) clients; `system` (classes, classes), mean M.

    `silent` (t, k) are coordinates with the same noise and nothing else.
    """

    rows: Array
    members: Array
    system: Array
    silent: Array

    @property
    def mean(self) -> Array:
        return np.asarray(np.average(self.rows, axis=0, weights=self.members))

    def deviation(self, level: float) -> float:
        """The standard deviation of a coordinate of `mean`, if that of a single client's reading is `level`."""
        return level / float(np.sqrt(self.members.sum()))


def shares_under_noise(readings: Mapping[K, Readings], prior: Array) -> dict[K, Array]:
    """Label shares (classes,) by client, around the `prior` ones (classes,) that are the best guess without a view."""
    distinct = list({id(one): one for one in readings.values()}.values())  # members of a cluster have the same ones
    level = noise_level(distinct)
    width = width_of(distinct, prior, level)
    return {client: mode(one, prior, one.deviation(level), width) for client, one in readings.items()}


def noise_level(readings: list[Readings]) -> float:
    """The standard deviation of a coordinate of a single client's reading, by differences of successive ones.

    These have the noise of drawn batches, too. Where no client has two readings, by what is silent.
    """
    squares, count = 0.0, 0
    for one in readings:
        factor = one.members[1:] * one.members[:-1] / (one.members[1:] + one.members[:-1])
        squares += float((np.diff(one.rows, axis=0) ** 2 * factor[:, None]).sum())
        count += one.rows[1:].size
    if not count:
        squares = sum(float((one.silent**2 * one.members[:, None]).sum()) for one in readings)
        count = sum(one.silent.size for one in readings)
    return max(float(np.sqrt(squares / count)), 1e-6)


def width_of(readings: list[Readings], prior: Array, level: float) -> float:
    """How far clients' shares lie from the prior ones: the likeliest of `WIDTHS`, the first unless another is clearly likelier."""
    likely = [sum(_log_likelihood(one, prior, one.deviation(level), width) for one in readings) for width in WIDTHS]
    best = int(np.argmax(likely))
    return WIDTHS[best] if likely[best] - likely[0] > SURE else WIDTHS[0]


def _log_likelihood(one: Readings, prior: Array, deviation: float, width: float) -> float:
    classes = len(prior)
    spread = one.system @ (np.eye(classes) - 1 / classes) @ one.system.T  # shares add up to 1, so what they differ by adds up to 0
    covariance, left = width**2 * spread + deviation**2 * np.eye(classes), one.mean - one.system @ prior
    return float(-np.linalg.slogdet(covariance)[1] - left @ np.linalg.solve(covariance, left)) / 2


def mode(one: Readings, prior: Array, deviation: float, width: float) -> Array:
    """The likeliest shares: those q ≥ 0, Σ q = 1 of least |mean − M q|² / deviation² + |q − prior|² / width²."""
    classes = len(prior)
    rows = np.vstack([one.system / deviation, np.eye(classes) / width])
    wanted = np.concatenate([one.mean / deviation, prior / width])
    heavy = 10.0 * float(np.linalg.norm(rows, 2))
    shares, _ = nnls(np.vstack([rows, np.full((1, classes), heavy)]), np.append(wanted, heavy))
    return np.asarray(shares / max(float(shares.sum()), 1e-12))
