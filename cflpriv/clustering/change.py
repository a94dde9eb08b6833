"""Have a client's data changed? An exact test of one client's samples before and after, with a level for the whole run.

Why not by comparison with other clients: of n exchangeable clients one always lies farthest out, and each is that client with
probability 1/n. So a rule by ranks among clients that ever names a changed client also names one in more than alpha of the runs without
drift; and e-values by such ranks cannot be multiplied over rounds, since a client that lies far out stays there. A client's own samples
have neither limit.

Assumption (no drift). Of a pool of samples with their labels some are in both sets (kept), some only before, some only after, and which
are which does not depend on them: every division of the pool into parts of these sizes is equally likely. It holds for samples drawn
independently from any one law, continuous or discrete, where those that leave are chosen without regard to their values. It does not hold
for samples that depend on each other (windows of one text, frames of one film, samples of one session) where whole texts, films or
sessions come and go: such clients are named far more often than the level.

Theorem. Then `change_p_value` is at most u with probability at most u, for each u, however samples of other clients depend on these. So if
check t = 1, 2, … of n_t clients is made at `level_of_check(alpha, n_t, t)`, the probability that any client whose data did not change is
ever named is at most alpha: over all clients and checks of a run, for any dependence between them.

Proof. A distinct row (with its label) that occurs e times in the pool is kept k, only before b and only after a times; given the pool, the
probability of such a division is proportional to Π e! / (k! b! a!). This does not change if b and a are exchanged at each of two rows of
equal |b − a| whose signs of b − a differ, and the three sizes stay as well. So given, of each row, k and the pair {b, a} without its order,
the signs can be exchanged between the two rows of such a pair; and if each row that gained copies is paired at random with a row that lost
as many, all 2^pairs orders inside the pairs are equally likely. Of k, b and a only k + b and k + a are seen, which suffices: b − a is their
difference. Rows that occur as often after as before, as kept samples of a continuous law do, count in nothing.
The p-values are those of the squared length T of V = Σ ± w over pairs, with w = |b − a| times the difference of the two rows: by draws of
signs (Monte Carlo); or, for levels too small for draws, P(T ≥ t) ≤ min over λ of exp(−λ t / 2) det(1 − λ W)^(−1/2) with W = Σ w wᵀ, since
E exp(λ |V|² / 2) = E exp(√λ ⟨g, V⟩) ≤ E exp(λ gᵀWg / 2) for a standard Gaussian g. Which of them is used depends on the level alone. Two
statistics are compared, so the smaller p-value is doubled. The chance of any false answer is at most the sum of the levels,
alpha Σ 1 / (t (t + 1)) = alpha. ∎

Rows are also paired only with rows that are, like them, in one set or in both. This keeps, for each part of the rows (such as those of
small digests), how many distinct rows of it each set has; so samples may be limited to the part in which both sets have at most so many.

Reach: p-values are at least about 2^(1 − pairs), and below 2e-6 at least √pairs exp(−(pairs − 1) / 2): see `checks_within_reach`. Not
found: samples that were added where none left, since all signs are equal then; and hardly any change where rows have few distinct values,
or where one set is much larger, since it has as many pairs at most as the smaller set has samples.

Source: Monte Carlo tests that end early: Besag & Clifford 1991; the bound: Hsu, Kakade & Zhang 2012; the pairs of rows: this project.
"""

import math

import numpy as np

from ..randomness import Stream
from ..types import Array

__all__ = ["Samples", "change_p_value", "checks_within_reach", "level_of_check"]

Samples = tuple[Array, Array]
"""The rows (n, d) and the labels (n,) of samples: whole numbers for classes, or numbers."""
ENOUGH = 20
"""So many draws that are as far apart as the data end the test: p is then far above any level."""
FIRST, AT_ONCE = 99, 2000
MOST_DRAWS = 1_000_000
LEAST_DRAWN = 2 / MOST_DRAWS
"""The least level of one statistic that is shown by draws; below it the bound is taken."""
TILTS = 1 - np.geomspace(1, 1e-4, 200)
"""The values of λ times the largest eigenvalue of W that are tried."""


def level_of_check(alpha: float, clients: int, number: int) -> float:
    """The level of each of `clients` in check `number` = 1, 2, …; over all checks of a run the levels add up to at most alpha."""
    return alpha / (max(1, clients) * number * (number + 1))


def checks_within_reach(alpha: float, clients: int, samples: int) -> int:
    """In so many checks a client whose `samples` samples were all replaced can be named, at best; in later checks none can.

    Samples count as at most those that are compared. A rough limit: samples that are hardly apart need a larger level.
    """
    least = math.exp(_log_bound(float(samples**2), np.array([float(samples)]))) if samples else 1.0
    if least >= LEAST_DRAWN:
        least = max(LEAST_DRAWN, 2.0 ** (1 - samples))
    ratio = alpha / (max(1, clients) * 2 * max(least, 1e-290))
    return int((math.sqrt(1 + 4 * ratio) - 1) / 2)


def change_p_value(before: Samples, after: Samples, level: float, rng: Stream) -> float:
    """The p-value of the hypothesis that samples before and after are exchangeable, but for those that were kept.

    Two statistics: the distance of the mean rows, and the distances of the mean rows of each label (of numbers: of rows times labels). A
    row that occurs in both, to the last bit and with its label, counts by the difference of its numbers. Draws are enough to show `level`,
    or until the answer is clear.
    """
    rows, labels, net, both = _net_counts(before, after)
    if not (net > 0).any() or not (net < 0).any():
        return 1.0
    all_alike = np.zeros(len(rows), dtype=np.int64)
    if labels.dtype.kind == "f":
        scaled = (labels - labels.mean()) / max(float(labels.std()), 1e-12)
        moments = np.concatenate([rows - rows.mean(0), np.ones((len(rows), 1))], axis=1) * scaled[:, None]
        tests = (rows, all_alike), (moments, all_alike)
    else:
        tests = (rows, all_alike), (rows, labels)
    return min(1.0, 2 * min(_sign_p(_pair_differences(own, groups, net, both, rng), level / 2, rng) for own, groups in tests))


def _net_counts(before: Samples, after: Samples) -> tuple[Array, Array, Array, Array]:
    """The distinct samples whose numbers differ: rows float64, labels, number before less number after, and whether both have any."""
    rows, labels = np.concatenate([before[0], after[0]]), np.concatenate([before[1], after[1]])
    first: dict[tuple[bytes, bytes], int] = {}
    at = np.array(
        [first.setdefault((row.tobytes(), label.tobytes()), number) for number, (row, label) in enumerate(zip(rows, labels, strict=True))],
        dtype=np.int64,
    )
    numbers = np.bincount(at[: len(before[0])], minlength=len(rows)), np.bincount(at[len(before[0]) :], minlength=len(rows))
    net = numbers[0] - numbers[1]
    unequal = np.flatnonzero(net)
    return rows[unequal].astype(np.float64), labels[unequal], net[unequal], (np.minimum(*numbers) > 0)[unequal]


def _pair_differences(rows: Array, groups: Array, net: Array, both: Array, rng: Stream) -> list[Array]:
    """Of each group (pairs, d) float64: differences of rows paired at random, one that lost and one that gained as many copies.

    They are weighed by the copies, and each group by the square root of the sum of their squares, so that groups count alike.
    """
    weighed = []
    for group in np.unique(groups):
        parts, square = [], 0.0
        for copies, shared in sorted(set(zip(abs(net[groups == group]).tolist(), both[groups == group].tolist(), strict=True))):
            here = (groups == group) & (both == shared)
            lost, gained = (rng.permutation(np.flatnonzero(here & (net == sign * copies))) for sign in (1, -1))
            pairs = min(len(lost), len(gained))
            parts.append(copies * (rows[lost[:pairs]] - rows[gained[:pairs]]))
            square += pairs * copies**2
        if square:
            weighed.append(np.concatenate(parts) / math.sqrt(square))
    return weighed


def _sign_p(groups: list[Array], level: float, rng: Stream) -> float:
    """The p-value of Σ over groups of |Σ w|² among all signs of all differences w."""
    if not groups:
        return 1.0
    observed = sum(float((own.sum(0) ** 2).sum()) for own in groups)
    if level < LEAST_DRAWN:
        squares = np.concatenate([np.linalg.svd(own, compute_uv=False) ** 2 for own in groups])
        return math.exp(_log_bound(observed, squares)) if squares.max() > 0 else 1.0
    draws = math.ceil(2 / level)
    exceeding = done = 0
    while done < draws:
        count = min(AT_ONCE if done else FIRST, draws - done)
        drawn = np.zeros(count)
        for own in groups:
            signs = rng.integers(2, size=(count, len(own)), dtype=np.int8) * 2.0 - 1
            drawn += ((signs @ own) ** 2).sum(1)
        far = drawn >= observed * (1 - 1e-9)
        if exceeding + int(far.sum()) >= ENOUGH:
            return ENOUGH / (done + int(np.flatnonzero(far)[ENOUGH - exceeding - 1]) + 1)
        exceeding, done = exceeding + int(far.sum()), done + count
    return (1 + exceeding) / (1 + done)


def _log_bound(observed: float, squares: Array) -> float:
    """The logarithm of the bound on P(T ≥ observed) by the eigenvalues `squares` (n,) of W. It falls as `observed` grows."""
    shares = squares / squares.max()
    return float(min(-TILTS * (observed / squares.max()) / 2 - np.log1p(-TILTS[:, None] * shares).sum(1) / 2))
