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

A bound below the claim means little by itself. How much it means is the power: how often the same audit would have raised an alarm if
the noise had been `FACTOR` times too small. It is estimated on a reference (`dp_references`) that the auditor computes without the audited
code, so a bug in that code cannot make the power look larger. `verdict` is the only place where bound, claim and power become a status.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy import stats

from ...types import Array

__all__ = [
    "AuditResult", "Power", "audit_guesses", "ceiling", "epsilon_lower_bound", "guess", "numbers_of_guesses", "p_value",
    "audit_power", "verdict",
]  # fmt: skip

FACTOR = 3.0
"""Power is for noise whose standard deviation is so many times too small (of a choice: whose ε is so many times too large)."""
REPETITIONS = 100
"""Repetitions of an audit on its reference."""
ENOUGH = 0.9
"""The power that `at_baseline` requires, at least."""


@dataclass(frozen=True)
class Power:
    """How often an audit finds a fault of a stated size: `alarms` in so many `repetitions` on the reference.

    `note` says why nothing was repeated, where the repetitions are 0: the power is unknown then, and counts as none.
    """

    alarms: int
    repetitions: int
    note: str = ""

    @property
    def share(self) -> float:
        """The estimate."""
        return self.alarms / self.repetitions if self.repetitions else 0.0

    @property
    def low(self) -> float:
        """The lower end of the exact (Clopper–Pearson) one-sided 95 % interval: the conservative figure, which verdicts use."""
        return float(stats.beta.ppf(0.05, self.alarms, self.repetitions - self.alarms + 1)) if self.alarms else 0.0


@dataclass(frozen=True)
class AuditResult:
    """`correct` of `guesses` coins of `canaries` were right, and ε is at least `epsilon` at the confidence that was asked for.

    `ceiling`: the largest bound that an audit of this size can give. `p`: how probable so many right guesses are at most if the claim is
    true. `audit_power`: None where no reference of the release is known.
    """

    canaries: int
    guesses: int
    correct: int
    epsilon: float
    ceiling: float
    p: float = 1.0
    power: Power | None = None


def verdict(result: AuditResult, claim: float) -> Literal["leaks", "at_baseline", "inconclusive"]:
    """What an audit may say of a claim of ε.

    A bound above the claim `leaks`. Otherwise `at_baseline` if the power is `ENOUGH` by its conservative figure, else `inconclusive`.
    """
    if result.epsilon > claim:
        return "leaks"
    return "at_baseline" if result.power is not None and result.power.low >= ENOUGH else "inconclusive"


def p_value(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """How probable so many right guesses are at most, if the release is (ε, δ)-private.

    f(v) + 2 m δ max_i (f(v − i) − f(v)) / i, with f(v) = P[Binomial(guesses, e^ε/(1+e^ε)) ≥ v].
    """
    right, steps = 1 / (1 + math.exp(-epsilon)), np.arange(1, correct + 1)
    tail = float(stats.binom.sf(correct - 1, guesses, right))
    gained = np.cumsum(stats.binom.pmf(correct - steps, guesses, right)) / steps
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


@lru_cache(maxsize=1024)
def ceiling(guesses: int, canaries: int, delta: float, confidence: float = 0.95) -> float:
    """What an audit with this many guesses can show at most."""
    return epsilon_lower_bound(guesses, guesses, canaries, delta, confidence)


def guess(scores: Array, coins: Array, guesses: int) -> int:
    """How many guesses are right: those of the largest |score|, "in" where it is above 0 and "out" elsewhere."""
    surest = np.argsort(-np.abs(scores), kind="stable")[:guesses]
    return int(((scores > 0) == coins)[surest].sum())


@lru_cache(maxsize=1024)
def numbers_of_guesses(canaries: int, claim: float, delta: float, confidence: float = 0.95) -> tuple[int, ...]:
    """How many guesses are tried against a claim of ε: few, which see most where ε is small, and so many that a bound can exceed the claim.

    The second number is the least whose ceiling is a unit above `claim`, a tenth of the canaries at least, all of them where none will do.
    """
    many = min(canaries, max(100, canaries // 10))
    while many < canaries and ceiling(many, canaries, delta, (1 + confidence) / 2) < claim + 1:
        many = min(canaries, math.ceil(1.25 * many))
    return tuple(sorted({min(canaries, max(40, canaries // 40)), many}))


def audit_guesses(
    scores: Array, coins: Array, delta: float, *, claim: float = 2.0, guesses: Sequence[int] = (), confidence: float = 0.95
) -> AuditResult:
    """The best bound from scores (m,): above 0 where the auditor believes that the coin (m,) bool was "in", further off where it is surer.

    The numbers in `guesses` (default: `numbers_of_guesses` for the ε that is claimed) are all tried, so each at its share of
    1 − confidence. `scores` must come from what was released alone. Raises `ValueError` for scores and coins that do not match, or none.
    """
    m = len(coins)
    if not m or np.shape(scores) != np.shape(coins):
        raise ValueError(f"audit: {np.shape(scores)} scores for {np.shape(coins)} coins")
    tried, each = _tried(m, delta, claim, guesses, confidence)
    right = {count: guess(scores, coins, count) for count in tried}
    bounds = {count: epsilon_lower_bound(right[count], count, m, delta, each) for count in tried}
    best = max(tried, key=lambda count: bounds[count])
    p = min(1.0, len(tried) * min(p_value(right[count], count, m, claim, delta) for count in tried))
    return AuditResult(m, best, right[best], bounds[best], max(ceiling(count, m, delta, each) for count in tried), p)


def audit_power(
    draw: Callable[[], tuple[Array, Array]], canaries: int, delta: float, *, claim: float, guesses: Sequence[int] = (),
    confidence: float = 0.95, repetitions: int | None = None,
) -> Power:  # fmt: skip
    """The power of `audit_guesses` with the same arguments: how often its bound exceeds `claim` on scores and coins of `draw`.

    Each of the `repetitions` (default: `REPETITIONS`) repeats the game on the reference, by a call of `draw`.
    """
    tried, each = _tried(canaries, delta, claim, guesses, confidence)
    least = {count: _needed(count, canaries, delta, claim, each) for count in tried}
    wanted = repetitions or REPETITIONS
    return Power(sum(_is_alarm(*draw(), least) for _ in range(wanted)), wanted)


def _tried(canaries: int, delta: float, claim: float, guesses: Sequence[int], confidence: float) -> tuple[tuple[int, ...], float]:
    """The numbers of guesses, and the confidence of each."""
    tried = tuple(guesses) or numbers_of_guesses(canaries, claim, delta, confidence)
    return tried, 1 - (1 - confidence) / len(tried)


def _needed(guesses: int, canaries: int, delta: float, claim: float, confidence: float) -> int:
    """The least number of right guesses whose bound exceeds `claim`; one more than there are guesses where none does."""
    low, high = 0, guesses + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if epsilon_lower_bound(middle, guesses, canaries, delta, confidence) > claim else (middle, high)
    return high


def _is_alarm(scores: Array, coins: Array, least: Mapping[int, int]) -> bool:
    """Whether so many guesses are right, for any of the numbers of guesses."""
    surest = np.argsort(-np.abs(scores), kind="stable")[: max(least)]
    right = np.cumsum(((scores > 0) == coins)[surest])
    return any(right[count - 1] >= needed for count, needed in least.items())
