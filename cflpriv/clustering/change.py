"""Have a client's data changed? An exact test of one client's samples before and after, with a level for the whole run.

Why not by comparison with other clients: of n exchangeable clients one always lies farthest out, and each is that client with
probability 1/n. So a rule by ranks among clients that ever names a changed client also names one in more than alpha of the runs without
drift; and e-values by such ranks cannot be multiplied over rounds, since a client that lies far out stays there. A client's own samples
have neither limit.

Theorem. Let a client's samples, with their labels, be exchangeable before and after (no drift: for example all drawn independently from
one law), however they depend on samples of other clients. Then `change_p_value` is at most u with probability at most u, for each u. So if
check t = 1, 2, … of n_t clients is made at `level_of_check(alpha, n_t, t)`, the probability that any client whose data did not change is
ever named is at most alpha: over all clients and checks of a run, for any dependence between them.

Proof. Both p-values are those of permutation tests by Monte Carlo: of all samples, and of the samples of each label, whose labels stay.
Their minimum is doubled. Samples that are in both sets count in neither. The chance of any false answer is at most the sum of the levels,
alpha Σ 1 / (t (t + 1)) = alpha.

Source: permutation tests by Monte Carlo that end early: Besag & Clifford 1991.
"""

import math

import numpy as np

from ..randomness import Stream
from ..types import Array

__all__ = ["Samples", "change_p_value", "level_of_check"]

Samples = tuple[Array, Array]
"""The rows (n, d) and the labels (n,) of samples: whole numbers for classes, or numbers."""
ENOUGH = 20
"""So many draws that are as far apart as the data end the test: p is then far above any level."""
FIRST, AT_ONCE = 99, 2000
MOST_DRAWS = 1_000_000


def level_of_check(alpha: float, clients: int, number: int) -> float:
    """The level of each of `clients` in check `number` = 1, 2, …; over all checks of a run the levels add up to at most alpha."""
    return alpha / (max(1, clients) * number * (number + 1))


def change_p_value(before: Samples, after: Samples, level: float, rng: Stream) -> float:
    """The p-value of the hypothesis that samples before and after are exchangeable.

    Two statistics: the distance of the mean rows, and the distances of the mean rows of each label (of numbers: of rows times labels).
    Samples that occur in both, to the last bit, count in neither, so data that stayed, or only grew, are not compared with themselves.
    Draws are enough to show `level` (at most a million), or until the answer is clear.
    """
    (rows, labels), (later, new_labels) = _without_common(before, after)
    first = np.arange(len(rows) + len(later)) < len(rows)
    if first.all() or not first.any():
        return 1.0
    rows, labels = np.concatenate([rows, later]).astype(np.float64), np.concatenate([labels, new_labels])
    one = np.zeros(len(rows), dtype=np.int64)
    if labels.dtype.kind == "f":
        scaled = (labels - labels.mean()) / max(float(labels.std()), 1e-12)
        tests = (rows, one), (np.concatenate([rows - rows.mean(0), np.ones((len(rows), 1))], axis=1) * scaled[:, None], one)
    else:
        tests = (rows, one), (rows, labels)
    return min(1.0, 2 * min(_permutation_p(own, strata, first, level / 2, rng) for own, strata in tests))


def _permutation_p(rows: Array, strata: Array, first: Array, level: float, rng: Stream) -> float:
    """The p-value of the distances of mean rows, summed over strata, where `first` marks the samples before: permuted inside strata."""
    parts: list[tuple[Array, int, Array, float]] = []
    for stratum in np.unique(strata):
        at = np.flatnonzero(strata == stratum)
        n, m = int(first[at].sum()), int((~first[at]).sum())
        if n and m:  # a sum over the first n determines the other, as all rows of a stratum add up to 0
            parts.append((rows[at] - rows[at].mean(0), n, first[at], (n + m) / (n * m)))
    if not parts:
        return 1.0
    observed = sum(weight * float(((own[marked]).sum(0) ** 2).sum()) for own, _, marked, weight in parts)
    draws = min(MOST_DRAWS, math.ceil(2 / level))
    exceeding = done = 0
    while done < draws:
        count = min(AT_ONCE if done else FIRST, draws - done)
        drawn = np.zeros(count)
        for own, n, _, weight in parts:
            chosen = np.zeros((count, len(own)))
            np.put_along_axis(chosen, rng.random(chosen.shape).argpartition(n - 1, axis=1)[:, :n], 1.0, axis=1)
            drawn += weight * ((chosen @ own) ** 2).sum(1)
        far = drawn >= observed * (1 - 1e-9)
        if exceeding + int(far.sum()) >= ENOUGH:
            return ENOUGH / (done + int(np.flatnonzero(far)[ENOUGH - exceeding - 1]) + 1)
        exceeding, done = exceeding + int(far.sum()), done + count
    return (1 + exceeding) / (1 + done)


def _without_common(before: Samples, after: Samples) -> tuple[Samples, Samples]:
    """The samples of each that are not samples of the other."""
    keys = [[(row.tobytes(), label.tobytes()) for row, label in zip(*samples, strict=True)] for samples in (before, after)]
    common = set(keys[0]) & set(keys[1])
    kept = [np.array([key not in common for key in own], dtype=bool) for own in keys]
    return (before[0][kept[0]], before[1][kept[0]]), (after[0][kept[1]], after[1][kept[1]])
