"""Label shares from many noisy readings of each client: one system of equations for all rounds, solved once.

Source: ours, of textbook parts: ridge regression as the mode of a Gaussian posterior, the prior's width by maximum marginal likelihood. A
reading is what `label_inference` makes of an update, u = M q + noise with q the client's label shares. Estimates that are made to be shares
(q ≥ 0, Σ q = 1) round by round and then averaged keep each round's noise as a bias; the mean of the readings has less with every round. How
much noise there is the readings show themselves: successive ones of a client differ by it alone, as far as M changes slowly.

What it proves: noise that hides labels in single updates may not hide them in all of a run's. What it does not: readings that are biased
alike in all rounds (M from poor auxiliary data) stay biased. Sums over cohorts that change are one system for all clients
(`shares_of_members`), with the solver of `linear_evidence`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ...types import Array
from .linear_evidence import Equations, equations, shares_of_terms

__all__ = ["Readings", "shares_of_members", "shares_under_noise"]

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
    distinct = list({id(reading): reading for reading in readings.values()}.values())  # members of a cluster have the same ones
    level = noise_level(distinct)
    width = width_of(distinct, prior, level)
    return {client: mode(reading, prior, reading.deviation(level), width) for client, reading in readings.items()}


def noise_level(readings: list[Readings]) -> float:
    """The standard deviation of a coordinate of a single client's reading, by differences of successive ones.

    These have the noise of drawn batches, too. Where no client has two readings, by what is silent.
    """
    squares, count = 0.0, 0
    for reading in readings:
        factor = reading.members[1:] * reading.members[:-1] / (reading.members[1:] + reading.members[:-1])
        squares += float((np.diff(reading.rows, axis=0) ** 2 * factor[:, None]).sum())
        count += reading.rows[1:].size
    if not count:
        squares = sum(float((reading.silent**2 * reading.members[:, None]).sum()) for reading in readings)
        count = sum(reading.silent.size for reading in readings)
    return max(float(np.sqrt(squares / count)), 1e-6)


def width_of(readings: list[Readings], prior: Array, level: float) -> float:
    """How far clients' shares lie from the prior ones: the likeliest of `WIDTHS`, the first unless another is clearly likelier."""
    likely = [sum(_log_likelihood(reading, prior, reading.deviation(level), width) for reading in readings) for width in WIDTHS]
    best = int(np.argmax(likely))
    return WIDTHS[best] if likely[best] - likely[0] > SURE else WIDTHS[0]


def _log_likelihood(reading: Readings, prior: Array, deviation: float, width: float) -> float:
    classes = len(prior)
    spread = reading.system @ (np.eye(classes) - 1 / classes) @ reading.system.T  # shares add up to 1, so what they differ by adds up to 0
    covariance, left = width**2 * spread + deviation**2 * np.eye(classes), reading.mean - reading.system @ prior
    return float(-np.linalg.slogdet(covariance)[1] - left @ np.linalg.solve(covariance, left)) / 2


def mode(reading: Readings, prior: Array, deviation: float, width: float) -> Array:
    """The likeliest shares: those q ≥ 0, Σ q = 1 of least |mean − M q|² / deviation² + |q − prior|² / width²."""
    return np.asarray(shares_of_terms(equations([{0: 1.0}]), reading.mean[None], prior, (deviation / width) ** 2, reading.system)[0])


# --- sums over changing cohorts -----------------------------------------------------------------------------------------------------


def shares_of_members(system: Equations[int], readings: Readings, prior: Array) -> Array:
    """Label shares (n, classes) of the clients in sums, around the `prior` ones, from noisy readings of the sums.

    The deviations of `system` are those of a sum's noise in units of one client's. What is silent shows the noise's level, and clients'
    width is the likeliest of `WIDTHS` as in `width_of`, over all sums at once.
    """
    level = max(float(np.sqrt(np.mean((readings.silent / system.deviations[:, None]) ** 2))), 1e-6)
    apart = (readings.rows - np.outer(system.coefficients.sum(axis=1), readings.system @ prior)) / system.deviations[:, None]
    classes, rows = len(prior), system.whitened
    sums, left = np.linalg.eigh(rows @ rows.T)
    values, right = np.linalg.eigh(readings.system @ (np.eye(classes) - 1 / classes) @ readings.system.T)
    squares, product = (left.T @ apart @ right) ** 2, np.maximum(np.outer(sums, values), 0.0)
    spreads = [width**2 * product + level**2 for width in WIDTHS]
    likely = [-float((np.log(spread) + squares / spread).sum()) / 2 for spread in spreads]
    best = int(np.argmax(likely))
    width = WIDTHS[best] if likely[best] - likely[0] > SURE else WIDTHS[0]
    return shares_of_terms(system, readings.rows, prior, (level / width) ** 2, readings.system)
