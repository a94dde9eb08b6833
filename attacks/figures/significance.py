"""Significance of scores: intervals of means and shares, one-sided tests of a gain over a baseline, paired by client, and their power."""

from collections.abc import Callable
from itertools import permutations
from typing import Literal

import numpy as np
from scipy import stats

from ...types import Array

__all__ = [
    "ENOUGH", "LEAST_SHOWN", "CellStatus", "chance", "chance_of_count", "chance_of_draws", "chance_of_matching", "chance_of_orders",
    "chance_of_reading", "chance_of_renaming", "confidence_interval", "interval", "is_count", "judge", "orders", "p_words", "power",
    "proportion_interval", "t_chance", "t_power", "vary",
]  # fmt: skip

FEWEST_SCORES = 3
MATCHED, MATCHINGS = 6, 1999
READINGS, MOST_PERMUTED = 9999, 5e7
"""Permutations of label shares, fewer where they would have more numbers than this."""
ENOUGH_DRAWS = 20
PAIRS_AT_ONCE = 1_000_000
RATE = 0.025
"""How often a figure without a leak may be called one, from one run or from several together."""
ENOUGH = 0.9
"""The power that `at_baseline` requires, at least."""
ROUNDED = 1e-9
"""Values that differ by less, as a share of the largest, are equal but for rounding."""
FEWEST_COUNTS = 6
"""Fewer scores of 0 and 1 that all succeed where the baseline fails are as probable by chance as `RATE` allows: 2⁻⁵ is .031."""
LEAST_SHOWN = 1e-4
"""No figure has a smaller p: no test here holds so exactly in the tails, whatever its formula gives."""
SHARES = ("_accuracy", "_exact", "_auc", "_tpr")
RANGES = {
    **dict.fromkeys((*SHARES, "_share", "_precision", "words_in_place"), (0.0, 1.0)),
    "images_recovered_gradient": (0.0, 1.0), "images_recovered_update": (0.0, 1.0), "_l1": (0.0, 2.0),
    "_error": (0.0, float("inf")), "_epsilon": (0.0, float("inf")), "_cosine": (-1.0, 1.0), "_ssim": (-1.0, 1.0),
    "_psnr_db": (-float("inf"), 100.0),
}  # fmt: skip
"""How a metric's name ends -> what its values can be."""
CellStatus = Literal[
    "leaks", "evidence_doubtful", "inconclusive", "not_validated", "not_attempted", "at_baseline", "not_applicable", "nothing_to_see"
]  # fmt: skip


def vary(values: Array) -> bool:
    """Whether values differ by more than rounding. Equal ones have a deviation of some 1e-17, which makes any mean look certain."""
    return len(values) > 1 and float(np.ptp(values)) > ROUNDED * float(np.abs(values).max())


def confidence_interval(values: Array) -> tuple[float, float]:
    """A 95 % t-interval for the mean of independent values; a point where they do not vary."""
    if not vary(values):
        return float(np.mean(values)), float(np.mean(values))
    half = float(stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))
    return float(np.mean(values)) - half, float(np.mean(values)) + half


def proportion_interval(values: Array) -> tuple[float, float]:
    """The exact (Clopper–Pearson) 95 % interval of a share, from scores of 0 and 1."""
    interval = stats.binomtest(int(values.sum()), len(values)).proportion_ci(0.95, method="exact")
    return float(interval.low), float(interval.high)


def p_words(p: float) -> str:
    """A p for people: "p = 0.012", or "p < 0.0001"."""
    return f"p < {LEAST_SHOWN:.4f}" if p < LEAST_SHOWN else f"p = {p:.2g}"


def is_count(values: Array) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


def interval(metric: str, values: Array, counted: int) -> tuple[float | None, float | None]:
    """The 95 % interval of a mean: exact for counts, else by t and within what the metric can be; none where values do not vary."""
    if counted:
        return proportion_interval(values)
    if not vary(values):
        return None, None
    least, most = next((limits for end, limits in RANGES.items() if metric.endswith(end)), (-float("inf"), float("inf")))
    low, high = confidence_interval(values)
    return max(low, least), min(high, most)


def t_chance(gain: Array, margin: float) -> float:
    """The one-sided p-value of a t-test that the mean of independent values is above `margin`.

    Where they do not vary, a normal law says nothing: 3⁻ⁿ for n values above the margin. No law that is symmetric about the margin and has
    one mode there gives n equal values above it more often: at most a third of it lies on one value, as much on its mirror image and on the
    margin.
    """
    above = float(np.mean(gain)) - margin
    if not vary(gain):
        return 3.0 ** -len(gain) if above > ROUNDED * max(abs(margin), float(np.abs(gain).max())) else 1.0
    return float(stats.t.sf(above * np.sqrt(len(gain)) / np.std(gain, ddof=1), len(gain) - 1))


def chance(score: Array, beside: Array, margin: float) -> float:
    """How probable such a gain over `beside` is, one-sided, scores paired by client, where it is no more than `margin`.

    Scores of 0 and 1 by an exact sign test; 1 if their mean gain is within the margin, and for fewer than 3 scores.
    """
    gain = score - beside
    if len(gain) < FEWEST_SCORES:
        return 1.0
    if not (is_count(score) and is_count(beside)):
        return t_chance(gain, margin)
    wins, losses = int((gain > 0).sum()), int((gain < 0).sum())
    if wins + losses == 0 or not gain.mean() > margin:
        return 1.0
    return float(stats.binomtest(wins, wins + losses, alternative="greater").pvalue)


def chance_of_count(right: Array, beside: Array, margin: float) -> float:
    """How probable so many `right` guesses (n,) of 0 and 1 are, if their mean probability is that of the guesses `beside` plus the margin.

    A binomial tail: independent guesses with unequal probabilities of this mean reach the number less often (Hoeffding 1956). The guesses
    `beside` must not depend on the view. Where all guesses are right, a sign test has far less power: it asks for differing guesses alone.
    1 for fewer than 3 guesses.
    """
    if len(right) < FEWEST_SCORES or not float(right.mean() - beside.mean()) > margin:
        return 1.0
    return float(stats.binom.sf(float(right.sum()) - 1, len(right), min(1.0, float(beside.mean()) + margin)))


def t_power(mean: float, spread: float, n: int, margin: float, rate: float) -> float:
    """How often a t-test at `rate` of `n` normal values with this mean and standard deviation shows that their mean is above `margin`."""
    if n < 2 or mean <= margin:
        return 0.0
    if spread <= ROUNDED * abs(mean):
        return 1.0
    return float(stats.nct.sf(stats.t.isf(rate, n - 1), n - 1, (mean - margin) * np.sqrt(n) / spread))


def power(score: Array, beside: Array, reference: Array, reference_beside: Array, margin: float) -> float:
    """How often the test of `chance` shows a planted leak at `RATE`: a toss decides for each client whether it is read as in the reference.

    So the leak is half as large as that of the unprotected run. Exact for scores of 0 and 1, else by a normal distribution.
    """
    n, both = len(score), (score - beside, reference - reference_beside)
    if n < FEWEST_SCORES or not len(reference):
        return 0.0
    if not (is_count(score) and is_count(beside)):
        means = [float(scores.mean()) for scores in both]
        spread = np.sqrt(np.mean([scores.var() for scores in both]) + (means[0] - means[1]) ** 2 / 4)
        return t_power(float(np.mean(means)), float(spread), n, margin, RATE)
    won, lost = (float(np.mean([(sign * scores > 0).mean() for scores in both])) for sign in (1, -1))
    if won == 0.0:
        return 0.0
    differing = np.arange(1, n + 1)  # clients that only one of view and baseline has right
    enough = np.maximum(stats.binom.isf(RATE, differing, 0.5) + 1, np.floor((differing + margin * n) / 2) + 1)
    return float(stats.binom.pmf(differing, n, min(1.0, won + lost)) @ stats.binom.sf(enough - 1, differing, won / (won + lost)))


def chance_of_matching(errors: Array, rng: np.random.Generator) -> float:
    """How probable it is that guesses dealt to the truths at random err as little, from the `errors` (k, k) of guess i for truth j.

    Clusters have few ways to be matched, so one lucky matching makes all of them right at once. All matchings of up to six are tried.
    """
    k, own = len(errors), float(np.trace(errors))
    deals = (
        np.array(list(permutations(range(k))), np.int64) if k <= MATCHED else rng.permuted(np.tile(np.arange(k), (MATCHINGS, 1)), axis=1)
    )
    reached = int((errors[np.arange(k), deals].sum(axis=1) <= own + 1e-9).sum())
    return reached / len(deals) if k <= MATCHED else (1 + reached) / (1 + MATCHINGS)


def chance_of_renaming(guessed: Array, true: Array, centre: Array, rng: np.random.Generator) -> float:
    """How probable it is that label shares `guessed` (n, c) are as near to the true ones, in L1, if all labels are renamed at random.

    For clients whose labels are named together, or read off the same sums: one lucky name makes many of them right, so that they are not
    n independent scores. What is renamed are differences from the `centre` (c,), the best guess without a view: of shares that are those
    nothing is left to luck.
    """
    errors = np.zeros((len(centre), len(centre)))  # of each label under each name
    for shares, real in zip(guessed - centre, true - centre, strict=True):
        errors += np.abs(shares[:, None] - real[None, :])
    return chance_of_matching(errors, rng)


def chance_of_reading(guessed: Array, true: Array, centre: Array, groups: Array, rng: np.random.Generator) -> float:
    """How probable it is that label shares `guessed` (n, c), each read by itself, are as near to the true ones, in L1, if nothing leaks.

    Clients of a group have much the same labels, so what makes one right by luck makes all of them right: n clients are not n independent
    scores. Without a leak a guess has to do with nothing but the group, at most. So all labels are renamed at random, for all clients
    alike, around the `centre` (c,), and at once true shares are dealt again to the clients of their group, of `groups` (n,).
    """
    off, real, size = guessed - centre, true - centre, max(1, guessed.size)
    own, reached, left = float(np.abs(off - real).sum()) + 1e-9, 0, int(np.clip(MOST_PERMUTED / size, MATCHINGS, READINGS))
    times = left
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    while left:
        count = min(left, max(1, PAIRS_AT_ONCE // size))
        names = rng.permuted(np.tile(np.arange(len(centre)), (count, 1)), axis=1)
        dealt = np.tile(np.arange(len(groups)), (count, 1))
        for of_group in members:
            dealt[:, of_group] = rng.permuted(dealt[:, of_group], axis=1)
        reached += int((np.abs(off - real[dealt[:, :, None], names[:, None, :]]).sum(axis=(1, 2)) <= own).sum())
        left -= count
    return (1 + reached) / (1 + times)


def chance_of_draws(reached: float, draw: Callable[[], float], times: int = MATCHINGS) -> float:
    """How probable a figure of at least `reached` is if what is scored has nothing to do with the truth, from figures for drawn truths.

    At most so many `times` a truth is drawn, and no more often than it takes until `ENOUGH_DRAWS` reach as much (Besag & Clifford 1991).
    """
    again = 0
    for drawn in range(1, times + 1):
        again += bool(draw() >= reached - 1e-9)
        if again == ENOUGH_DRAWS:
            return again / drawn
    return (1 + again) / (1 + times)


def orders(guessed: Array, true: Array) -> Array:
    """For each client the share of those with another number that it is on the right side of, (n,); ties count half."""
    right = np.sign(guessed[:, None] - guessed[None]) * np.sign(true[:, None] - true[None])
    other = true[:, None] != true[None]
    return np.asarray(((right + 1) / 2 * other).sum(1) / np.maximum(other.sum(1), 1))


def chance_of_orders(guessed: Array, true: Array, rng: np.random.Generator) -> float:
    """How probable it is that the same guesses dealt to the clients at random have the mean of `orders` that these have, or more.

    Each client is in the pairs of all others, so n clients are not n independent scores, and no test over clients tells.
    """
    n, other = len(true), true[:, None] != true[None]
    weights = np.sign(true[:, None] - true[None]) / np.maximum(other.sum(1, keepdims=True), 1)

    def above(dealt: Array) -> Array:
        return np.asarray(np.einsum("tij,ij->t", np.sign(dealt[:, :, None] - dealt[:, None, :]), weights))

    own, reached, left = float(above(guessed[None])[0]) - 1e-9, 0, MATCHINGS
    while left:
        size = min(left, max(1, PAIRS_AT_ONCE // n**2))
        reached += int((above(rng.permuted(np.tile(guessed, (size, 1)), axis=1)) >= own).sum())
        left -= size
    return (1 + reached) / (1 + MATCHINGS)


def judge(values: Array, baseline: Array, reference: Array, reference_baseline: Array, margin: float) -> CellStatus:
    """The status of scores paired by client, at least 3 of them: a leak beats the baseline by more than `margin`.

    By a t-test of the difference, one-sided at `RATE`; scores of 0 and 1 by their mean difference and an exact sign test.
    """
    if len(values) < FEWEST_SCORES or not chance(reference, reference_baseline, margin) < RATE:  # too few prove nothing either way
        return "not_validated"
    return "leaks" if chance(values, baseline, margin) < RATE else "at_baseline"
