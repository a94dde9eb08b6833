"""Is a noisy release as private as its accountant says? Many canaries in one run, guessed afterwards: a lower bound on ε.

Each of m canaries (records that nobody else resembles) is put in or left out by its own coin. After a single release the auditor guesses
the coins of those it is surest of, and abstains on the rest. If the release is (ε, δ)-private, hardly more guesses can be right than with a
coin of probability e^ε/(1 + e^ε) each; more right guesses than that refute the claim.

A bound is a statement at a confidence: the true ε is at or above it in a share of `confidence` of all audits. So an audit of a *sound*
mechanism exceeds the accountant's ε in at most 1 − confidence of repetitions. And a bound has a ceiling: with r guesses, all of them right,
it says no more than `ceiling(r, ...)`; of a claim above that an audit can refute nothing.

Source: Steinke, Nasr & Jagielski 2023 ("Privacy auditing with one (1) training run"), Algorithm 1 and Theorem 5.2.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from ..types import Array

__all__ = ["AuditResult", "audit_second_moment", "ceiling", "epsilon_lower_bound", "guess", "p_value"]

Release = Callable[[Array], Array]
"""Rows (n, d) -> noisy second moment (d, d)."""


@dataclass(frozen=True)
class AuditResult:
    """`correct` of `guesses` coins of `canaries` were right, and ε is at least `epsilon` at the confidence that was asked for.

    `ceiling`: no audit of this size says more.
    """

    canaries: int
    guesses: int
    correct: int
    epsilon: float
    ceiling: float


def p_value(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """How probable so many right guesses are at most, if the release is (ε, δ)-private.

    f(v) + 2 m δ max_i (f(v − i) − f(v)) / i, with f(v) = P[Binomial(guesses, e^ε/(1+e^ε)) ≥ v].
    """
    law = stats.binom(guesses, 1 / (1 + math.exp(-epsilon)))
    tail = float(law.sf(correct - 1))
    steps = np.arange(1, correct + 1)
    gained = np.cumsum(law.pmf(correct - steps)) / steps
    return min(1.0, tail + 2 * canaries * delta * float(gained.max(initial=0.0)))


def epsilon_lower_bound(correct: int, guesses: int, canaries: int, delta: float, confidence: float = 0.95) -> float:
    """The largest ε that so many right guesses refute; 0 if they refute none. Raises `ValueError` for counts that cannot be."""
    if not 0 <= correct <= guesses <= canaries or not 0 < confidence < 1:
        raise ValueError(f"audit: {correct} correct of {guesses} guesses on {canaries} canaries at confidence {confidence}")
    limit = 1 - confidence
    if correct == 0 or p_value(correct, guesses, canaries, 0.0, delta) > limit:
        return 0.0
    low, high = 0.0, 1.0
    while p_value(correct, guesses, canaries, high, delta) <= limit:
        low, high = high, 2 * high
        if high > 100:
            return low
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(correct, guesses, canaries, middle, delta) <= limit else (low, middle)
    return low


def ceiling(guesses: int, canaries: int, delta: float, confidence: float = 0.95) -> float:
    """What an audit with this many guesses can show at most."""
    return epsilon_lower_bound(guesses, guesses, canaries, delta, confidence)


def guess(scores: Array, coins: Array, guesses: int) -> int:
    """How many guesses are right: "in" for the largest half of them, "out" for the smallest, none for those between."""
    order = np.argsort(scores)
    half = guesses // 2
    return int((~coins[order[:half]]).sum() + coins[order[len(order) - (guesses - half) :]].sum())


def audit_second_moment(
    release: Release, rng: np.random.Generator, delta: float, *, dimension: int = 2000, guesses: Sequence[int] = (250, 600),
    confidence: float = 0.95, background: Array | None = None,
) -> AuditResult:  # fmt: skip
    """Audit a noisy second-moment release of rows with norm at most 1, under adding and removing records.

    The canaries are the `dimension` axes, so each has a coordinate of the release of its own, M_ii, to which no other canary adds; the
    `background` (n, dimension) is known to the auditor, as the guarantee allows, and subtracted. Few guesses see most where ε is small,
    many where it is large: all numbers in `guesses` are tried, which share 1 − confidence evenly; the best bound counts.
    """
    coins = rng.random(dimension) < 0.5
    known = np.zeros((0, dimension)) if background is None else background
    noisy = release(np.vstack([known, np.eye(dimension)[coins]]))
    scores = np.diag(noisy) - np.square(known).sum(axis=0)
    each = 1 - (1 - confidence) / len(guesses)
    right = {count: guess(scores, coins, count) for count in guesses}
    bounds = {count: epsilon_lower_bound(right[count], count, dimension, delta, each) for count in guesses}
    best = max(guesses, key=lambda count: bounds[count])
    top = max(ceiling(count, dimension, delta, each) for count in guesses)
    return AuditResult(dimension, best, right[best], bounds[best], top)
