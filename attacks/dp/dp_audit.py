"""Privacy auditing with canaries: a lower bound on ε from many canaries in one run.

Each of m canaries (records that nobody else resembles) is put in or left out by its own coin, and gets a score from what is released.
Canaries may be spread over several clients: their samples are disjoint, so the whole is as private towards each coin as one client's
release is. Two tests of the claim share the error (`GUESSED`); the bound is the larger of theirs.

- *Of the claimed mechanism* (`dp_claims`): whether canaries are distinguished better than the trade-off function of the ledger's events
  allows. It is nearly tight, and assumes that scores are independent given the coins.
- *Of any mechanism* (`audit_guesses`): the auditor guesses the coins of those it is surest of. If the release is (ε, δ)-private, hardly
  more guesses can be right than with a coin of probability e^ε/(1 + e^ε) each. It assumes nothing else, and it is all that there is where a
  claim is an ε without a mechanism.

A bound is a statement at a confidence: the true ε is at or above it in a share of `confidence` of all audits. So an audit of a *sound*
mechanism exceeds the accountant's ε in at most 1 − confidence of repetitions. And a bound has a ceiling: what it would be if all canaries
had been distinguished.

Source: Steinke, Nasr & Jagielski 2023 ("Privacy auditing with one (1) training run"), Algorithm 1 and Theorem 5.2, for guesses. Deviation:
two numbers of guesses are tried, which share the error evenly. The games are in `dp_mechanisms` (one release) and `dp_run` (whole runs).

A bound below the claim means little by itself. How much it means is the power: how often the same audit would have raised an alarm if
the noise had been `FAULT` times the claimed one. It is estimated on a reference (`dp_references`) that the auditor computes without the
audited code, so a bug in that code cannot make the power look larger. `verdict` is the only place where bound, claim and power become a
status.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Literal

import numpy as np
from scipy import stats

from ...types import Array
from .dp_claims import NoiseClaim, claim_p_value, counts_of, epsilon_refuted

__all__ = [
    "CONFIDENCE", "AuditResult", "Power", "audit_claim", "audit_guesses", "audit_p_value", "audit_power", "ceiling", "epsilon_lower_bound",
    "guess", "is_refuted", "numbers_of_guesses", "p_value", "verdict",
]  # fmt: skip

CONFIDENCE = 0.975
"""Of the bounds of an audit. So of 200 audits of sound runs more than 5 % are above their claim in one of a hundred studies at most."""
GUESSED = 0.1
"""The share of the error that the test of any mechanism has, where a mechanism is claimed."""
FAULT = 0.7
"""Power is for noise whose standard deviation is this share of the claimed one (of a choice: whose ε is the claimed one over this)."""
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

    `ceiling`: the largest bound that an audit of this size can give. `p`: how probable such scores are at most if the claim is true.
    `of_guesses` and `of_claim`: the bounds of the two tests, of which `epsilon` is the larger; `of_claim` is None where no mechanism was
    claimed. `power`: None where no reference of the release is known.
    """

    canaries: int
    guesses: int
    correct: int
    epsilon: float
    ceiling: float
    p: float = 1.0
    power: Power | None = None
    of_guesses: float = 0.0
    of_claim: float | None = None


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
    """The best bound of guesses from scores (m,): above 0 where the auditor believes that the coin (m,) bool was "in", further off where it
    is surer.

    The numbers in `guesses` (default: `numbers_of_guesses` for the ε that is claimed) are all tried, so each at its share of
    1 − confidence. `scores` must come from what was released alone. Raises `ValueError` for scores and coins that do not match, or none.
    """
    m = _checked(scores, coins)
    tried = tuple(guesses) or numbers_of_guesses(m, claim, delta, confidence)
    each = 1 - (1 - confidence) / len(tried)
    right = {count: guess(scores, coins, count) for count in tried}
    bounds = {count: epsilon_lower_bound(right[count], count, m, delta, each) for count in tried}
    best = max(tried, key=lambda count: bounds[count])
    highest = max(ceiling(count, m, delta, each) for count in tried)
    p = _p_of_guesses(right, m, claim, delta)
    return AuditResult(m, best, right[best], bounds[best], highest, p, of_guesses=bounds[best])


def audit_claim(scores: Array, coins: Array, claim: NoiseClaim, *, confidence: float = CONFIDENCE) -> AuditResult:
    """The best bound of both tests from scores (m,) and coins (m,) bool, as in `audit_guesses`, where a mechanism is claimed.

    Raises as `audit_guesses`.
    """
    error = 1 - confidence
    guessed = audit_guesses(scores, coins, claim.delta, claim=claim.epsilon, confidence=1 - GUESSED * error)
    counts, limit = counts_of(scores, coins, claim), (1 - GUESSED) * error
    bound, highest = (epsilon_refuted(seen, claim, limit) for seen in (counts, [count.best for count in counts]))
    p = min(1.0, guessed.p / GUESSED, claim_p_value(counts, claim) / (1 - GUESSED))
    return replace(guessed, epsilon=max(guessed.epsilon, bound), ceiling=max(guessed.ceiling, highest), p=p, of_claim=bound)


def audit_p_value(scores: Array, coins: Array, claim: NoiseClaim, confidence: float = CONFIDENCE) -> float:
    """The `p` of `audit_claim` with the same arguments; at most 1 − confidence where its bound is above the claim."""
    m, delta = _checked(scores, coins), claim.delta
    tried = numbers_of_guesses(m, claim.epsilon, delta, 1 - GUESSED * (1 - confidence))
    guessed = _p_of_guesses({count: guess(scores, coins, count) for count in tried}, m, claim.epsilon, delta)
    return min(1.0, guessed / GUESSED, claim_p_value(counts_of(scores, coins, claim), claim) / (1 - GUESSED))


def is_refuted(scores: Array, coins: Array, claim: NoiseClaim, confidence: float = CONFIDENCE) -> bool:
    """Whether `audit_p_value` of the same arguments is at most 1 − confidence. Tests that take long come last, if at all."""
    m, error = _checked(scores, coins), 1 - confidence
    tried = numbers_of_guesses(m, claim.epsilon, claim.delta, 1 - GUESSED * error)
    right = {count: guess(scores, coins, count) for count in tried}
    tests = chain([_p_of_guesses(right, m, claim.epsilon, claim.delta) / GUESSED], (
        claim_p_value([count], claim) / (1 - GUESSED) for count in counts_of(scores, coins, claim)
    ))  # fmt: skip
    return any(p <= error for p in tests)


def audit_power(
    draw: Callable[[], tuple[Array, Array]], claim: NoiseClaim, *, confidence: float = CONFIDENCE, repetitions: int | None = None
) -> Power:  # fmt: skip
    """The power of `audit_claim` with the same arguments: how often it refutes the claim on scores and coins of `draw`.

    Each of the `repetitions` (default: `REPETITIONS`) repeats the game on the reference, by a call of `draw`.
    """
    wanted = repetitions or REPETITIONS
    return Power(sum(is_refuted(*draw(), claim, confidence) for _ in range(wanted)), wanted)


def _checked(scores: Array, coins: Array) -> int:
    """How many canaries there are. Raises `ValueError` for none, or scores of others."""
    if not len(coins) or np.shape(scores) != np.shape(coins):
        raise ValueError(f"audit: {np.shape(scores)} scores for {np.shape(coins)} coins")
    return len(coins)


def _p_of_guesses(right: Mapping[int, int], canaries: int, claim: float, delta: float) -> float:
    """How probable so many right guesses are at most, for all numbers of guesses together, if ε is as claimed."""
    return min(1.0, len(right) * min(p_value(correct, count, canaries, claim, delta) for count, correct in right.items()))
