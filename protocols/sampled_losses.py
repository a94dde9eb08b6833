"""One Gaussian step on a Poisson batch: δ at many ε, and Rényi divergences at many orders, each computed as one array.

With the record a step's output x has the law (1 − q) N(0, z²) + q N(1, z²), without it N(0, z²).
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["sampled_deltas", "sampled_pld", "sampled_renyi"]

Floats = NDArray[np.float64]
SIGMAS = 9.7
"""Losses further out than this many standard deviations of the noise, 2e-22 of their mass, count as infinite."""


def sampled_deltas(z: float, q: float, epsilons: Floats, turned: bool) -> Floats:
    """The δ (n,) of one step at each of `epsilons` (n,), with the record against without it; `turned`: without against with it.

    With s = log(1 + (e^ε − 1)/q) it is q times the δ at s of the step that is not sampled.
    """
    from scipy.special import log_ndtr, ndtr

    towards = -epsilons if turned else epsilons
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(towards < 500, np.log1p(np.expm1(np.minimum(towards, 500)) / q), towards - math.log(q))
        x = z * z * ratio + 0.5
        if turned:
            scale = epsilons + math.log(q)
            deltas, beyond = np.exp(scale + ratio + log_ndtr(x / z)) - np.exp(scale + log_ndtr((x - 1) / z)), np.zeros(len(x))
        else:
            deltas, beyond = q * (ndtr((1 - x) / z) - np.exp(ratio + log_ndtr(-x / z))), -np.expm1(epsilons)
    deltas = np.clip(np.where(towards > math.log1p(-q), deltas, beyond), 0.0, 1.0)
    return np.asarray(np.maximum.accumulate(deltas[::-1])[::-1], np.float64)


def sampled_pld(z: float, q: float, interval: float) -> Any:
    """The privacy-loss distributions of one step at rate q < 1 under "add_remove", on multiples of `interval`, rounded upwards.

    By Algorithm 1 of Doroshenko et al. 2022, as dp-accounting's, which computes one δ after the other.
    """
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld import privacy_loss_distribution as pld

    low, high = (float(np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z * z))) for x in (-SIGMAS * z, 1 + SIGMAS * z))
    made = []
    for turned, (least, most) in ((False, (low, high)), (True, (-high, -low))):
        first, last = math.floor(least / interval), math.ceil(most / interval)
        deltas = sampled_deltas(z, q, np.arange(first, last + 1, dtype=np.float64) * interval, turned)
        made.append(pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, first, last, deltas))
    return pld.PrivacyLossDistribution(*made)


@lru_cache(maxsize=256)
def sampled_renyi(z: float, q: float, orders: tuple[int, ...]) -> Floats:
    """Upper bounds (n,) of one step's Rényi divergences at whole `orders` (Mironov, Talwar & Zhang 2019, section 3.3).

    Binomial probabilities add up to 1, so of each moment the 1 is taken off term by term, and small divergences keep their digits.
    """
    order, hits, chosen, firsts = _moment_terms(orders)
    with np.errstate(over="ignore", invalid="ignore"):  # of noise so small that it underflows
        exponent = np.maximum(hits * (hits - 1) * (np.float64(z) ** -2 / 2), 1e-300)
    terms = chosen + hits * math.log(q) + (order - hits) * math.log1p(-q) + exponent + np.log(-np.expm1(-exponent))
    peaks = np.maximum.reduceat(terms, firsts)
    counts = np.diff(firsts, append=len(terms))
    with np.errstate(invalid="ignore"):  # infinity less itself: whoever asks takes NaN as infinite
        moments = np.logaddexp(0.0, peaks + np.log(np.add.reduceat(np.exp(terms - np.repeat(peaks, counts)), firsts)))
    return np.asarray(moments * (1 + 1e-9) / (order[firsts] - 1), np.float64)


@lru_cache(maxsize=4)
def _moment_terms(orders: tuple[int, ...]) -> tuple[Floats, Floats, Floats, NDArray[np.int64]]:
    """For each order α of `orders` and k = 2 … α: α, k and the logarithm of their binomial coefficient (n,); where each order begins."""
    from scipy.special import gammaln

    order = np.concatenate([np.full(order - 1, float(order)) for order in orders])
    hits = np.concatenate([np.arange(2.0, order + 1) for order in orders])
    chosen = gammaln(order + 1) - gammaln(hits + 1) - gammaln(order - hits + 1)
    return order, hits, chosen, np.cumsum([0, *(order - 1 for order in orders[:-1])])
