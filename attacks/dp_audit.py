"""Privacy auditing with canaries: a lower bound on ε from many canaries in one run, guessed afterwards.

Each of m canaries (records that nobody else resembles) is put in or left out by its own coin. After a single release the auditor guesses
the coins of those it is surest of, and abstains on the rest. If the release is (ε, δ)-private, hardly more guesses can be right than with a
coin of probability e^ε/(1 + e^ε) each; more right guesses than that refute the claim. Canaries may be spread over several clients: their
samples are disjoint, so the whole is as private towards each coin as one client's release is.

A bound is a statement at a confidence: the true ε is at or above it in a share of `confidence` of all audits. So an audit of a *sound*
mechanism exceeds the accountant's ε in at most 1 − confidence of repetitions. And a bound has a ceiling: with r guesses, all of them right,
it cannot exceed `ceiling(r, ...)`, so an audit cannot refute a claim above that.

Source: Steinke, Nasr & Jagielski 2023 ("Privacy auditing with one (1) training run"), Algorithm 1 and Theorem 5.2. Deviation: two numbers
of guesses are tried, which share 1 − confidence evenly. The games that are guessed at are in `dp_mechanisms` (one release) and `dp_run`
(whole runs).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from ..types import Array

__all__ = ["AuditResult", "audit", "ceiling", "epsilon_lower_bound", "guess", "numbers_of_guesses", "p_value"]


@dataclass(frozen=True)
class AuditResult:
    """`correct` of `guesses` coins of `canaries` were right, and ε is at least `epsilon` at the confidence that was asked for.

    `ceiling`: the largest bound that an audit of this size can give.
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
    """How many guesses are right: those of the largest |score|, "in" where it is above 0 and "out" elsewhere."""
    surest = np.argsort(-np.abs(scores), kind="stable")[:guesses]
    return int(((scores > 0) == coins)[surest].sum())


def numbers_of_guesses(canaries: int, claim: float, delta: float, confidence: float = 0.95) -> tuple[int, ...]:
    """How many guesses are tried against a claim of ε: few, which see most where ε is small, and so many that a bound can exceed the claim.

    The second number is the least whose ceiling is a unit above `claim`, a tenth of the canaries at least, all of them where none will do.
    """
    many = min(canaries, max(100, canaries // 10))
    while many < canaries and ceiling(many, canaries, delta, (1 + confidence) / 2) < claim + 1:
        many = min(canaries, math.ceil(1.25 * many))
    return tuple(sorted({min(canaries, max(40, canaries // 40)), many}))


def audit(
    scores: Array, coins: Array, delta: float, *, claim: float = 2.0, guesses: Sequence[int] = (), confidence: float = 0.95
) -> AuditResult:
    """The best bound from scores (m,): above 0 where the auditor believes that the coin (m,) bool was "in", further off where it is surer.

    The numbers in `guesses` (default: `numbers_of_guesses` for the ε that is claimed) are all tried, so each at its share of
    1 − confidence. `scores` must come from what was released alone. Raises `ValueError` for scores and coins that do not match, or none.
    """
    m = len(coins)
    if not m or np.shape(scores) != np.shape(coins):
        raise ValueError(f"audit: {np.shape(scores)} scores for {np.shape(coins)} coins")
    tried = tuple(guesses) or numbers_of_guesses(m, claim, delta, confidence)
    each = 1 - (1 - confidence) / len(tried)
    right = {count: guess(scores, coins, count) for count in tried}
    bounds = {count: epsilon_lower_bound(right[count], count, m, delta, each) for count in tried}
    best = max(tried, key=lambda count: bounds[count])
    return AuditResult(m, best, right[best], bounds[best], max(ceiling(count, m, delta, each) for count in tried))
