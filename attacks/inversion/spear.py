"""SPEAR: the single inputs of a linear layer with ReLU behind it, from the gradient of a whole batch.

Source: Dimitrov, Baader, Müller & Vechev 2024 ("SPEAR: Exact Gradient Inversion of Batches in Federated Learning"). With inputs X (b, n)
and D (m, b) the gradients by the layer's outputs, the weight gradient is D X, of rank b, and the bias gradient D 1. A singular value
decomposition gives factors L (m, b) and R (b, n + 1) of both side by side, and D = L Q, (X, 1) = Q⁻¹ R for one b × b matrix Q. ReLU makes D
sparse. So Q's columns are the directions q for which many entries of L q are zero. Three searches take turns:

- Draws: b − 1 rows of L. Where all of them are zero in a column of D, their kernel is that column of Q. The number of draws grows as 2^b.
- Descents: local minima of Σ |L q| on the sphere. Their cost grows as a power of b (SPEAR++; sparse dictionaries: Sun, Qu & Wright 2017).
- Descents without known columns: only the rows in which these are zero, so that samples of the same label are not confused.

Columns are chosen greedily by their zeros. The choice is checked against the public weights: D is zero where W x + b ≤ 0, and only there.
Deviations: the bias gradient is a column of the factorised matrix, so that scales follow from (X, 1); half of the draws are made near
candidates; before descents rows have length 1 and no direction is preferred (Tyler 1987); columns are computed again from all their zeros;
the threshold of a zero follows the noise that the singular values beyond b show.

What it proves: of a network that begins with a linear layer and ReLU, an update in the clear is the images of a batch of up to
`MOST_SAMPLES`, exactly, and the check says when. What it does not: nothing about layers without
ReLU, or about batches larger than the search can pay for. With several full-batch steps the factorisation still holds, since X is the same;
D is then a sum over steps, which is zero for units that stay off, and the check is approximate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import InputError
from ...types import Array, check_array

__all__ = ["CONSISTENT", "MOST_SAMPLES", "Disaggregated", "inputs_of_batch"]

MOST_SAMPLES, MOST_DRAWN = 20, 8
"""The largest batch; batches up to so many samples are also sought by draws of rows."""
UNITS_PER_SAMPLE = 12
"""Units that the layer needs for each sample of a larger batch: with fewer, descents end at directions that are no columns."""
CONSISTENT = 0.9
"""The share of units that must agree with the ReLU for an input to count as recovered; a search stops at once only where all agree.

A mixture of two samples mostly agrees in 0.6 to 0.85 of the units. After several steps an exact input may miss units that were on between.
"""
LAST_LOOK = 8
"""Searches after which the work stops if every input counts as recovered."""
MOST_SEARCHES, DRAWS_AT_ONCE, STARTS = 24, 4096, 256
"""Searches in all; draws of one; descents of one."""
DESCENT, SMOOTHING, WHITENINGS = 0.7, 1e-10, 10
"""Factor from 1 on by which the smoothing of |·| falls with each step of a descent, the least smoothing, and rounds of whitening."""
MOST_LEFT_OUT = 3
"""Known columns that one descent leaves out, at most."""
KEPT = 32
"""Candidate columns that are kept at each stage of the choice, the ones with most zeros."""
SWAPS = 24
"""Candidates tried in the place of a column that fails the check, after each set of draws."""
SHARPEST, COARSEST = 1e-9, 0.02
"""The least and the largest threshold for a zero of a unit vector L q: below is float64, above is noise that hides the zeros."""
MOST_CONDITION = 1e10
SKETCH = 128
"""Layers with more units and inputs than this are factorised through so many random projections, many more than the rank."""


@dataclass(frozen=True, eq=False)
class Disaggregated:
    """Inputs (b, n) in any order; for each, the share in [0, 1] of units whose gradient is zero where the ReLU is off, and only there (b,).

    `refusal` says why there are none, (0, n) and (0,); it is empty if there are.
    """

    inputs: Array
    agreement: Array
    refusal: str = ""

    @property
    def consistency(self) -> float:
        """The least agreement of an input; 0 if there are none."""
        return float(self.agreement.min(initial=1.0)) if len(self.agreement) else 0.0

    @property
    def is_recovered(self) -> bool:
        """Whether every input passes the check."""
        return self.consistency >= CONSISTENT


@dataclass(frozen=True, eq=False)
class _Factors:
    """L (m, b) orthonormal and R (b, n + 1); `live` are the units with any gradient, `threshold` what counts as zero."""

    left: Array
    right: Array
    live: Array
    threshold: float


def inputs_of_batch(
    weight_gradient: Array, bias_gradient: Array, models: Sequence[tuple[Array, Array]], count: int, rng: np.random.Generator, *,
    searches: int = MOST_SEARCHES,
) -> Disaggregated:  # fmt: skip
    """The `count` inputs behind the gradients (m, n), (m,) of a linear layer.

    `models` are the layer's parameters, weights (m, n) and biases (m,), where gradients were taken. For a gradient or one step: one pair.
    For several steps: the first and the last known pair; then only units that are on in both, or off in both, are checked. Any multiple of
    the gradients serves, such as an update. `searches` bounds the work. Refuses (`refusal`) if the gradient's rank is below `count`, if
    noise hides the zeros, or if too few columns are met. Raises `InputError` for other shapes, values that are not finite, and a
    `count` that is not in 1..`MOST_SAMPLES`.
    """
    gradient = np.column_stack([
        check_array("weight_gradient", np.asarray(weight_gradient, np.float64), ndim=2),
        check_array("bias_gradient", np.asarray(bias_gradient, np.float64), ndim=1),
    ])  # fmt: skip
    held = np.stack([np.column_stack([np.asarray(weight, np.float64), np.asarray(bias, np.float64)]) for weight, bias in models])
    if held.shape[1:] != gradient.shape:
        raise InputError(f"models: the layer has parameters {held.shape[1:]}, with its bias, and gradients {gradient.shape}")
    if not 1 <= count <= MOST_SAMPLES:
        raise InputError(f"count = {count}: expected 1 to {MOST_SAMPLES} samples")
    none = np.zeros((0, gradient.shape[1] - 1))
    factors, why = _factorised(gradient, count, rng)
    if factors is None:
        return Disaggregated(none, np.zeros(0), why)
    best = Disaggregated(none, np.zeros(0), f"{searches} searches found fewer than {count} columns")
    pool = np.zeros((0, count))
    chosen: list[int] = []
    for number in range(searches):
        pool, chosen = _chosen(factors, np.vstack([pool, _candidates(factors, pool, chosen, number, rng)]))
        if len(chosen) == count:
            swapped = _swapped(factors, pool, chosen, held)
            best = swapped if swapped.agreement.sum() > best.agreement.sum() else best
        if best.consistency >= (1.0 if number < LAST_LOOK else CONSISTENT):
            break
    return best


def _candidates(factors: _Factors, pool: Array, chosen: Sequence[int], number: int, rng: np.random.Generator) -> Array:
    """Directions (k, b) of the search `number`: by draws, by descents, or by descents that leave out some of the `chosen` of the pool."""
    count = factors.left.shape[1]
    if count == 1:
        return np.ones((1, 1))
    if number % 3 == 0 and count <= MOST_DRAWN:
        return _kernels(_rows_near(factors, pool, rng) if number % 2 and len(pool) else _rows_drawn(factors, rng))
    if number % 3 == 1 or not chosen:
        return _descended(factors.left[factors.live], factors.threshold, rng)
    return _descended_without(factors, pool[list(chosen)], rng)


def _descended(rows: Array, threshold: float, rng: np.random.Generator) -> Array:
    """Directions q (k, b) of unit length in which Σ |rows q|, with `rows` (m, b) made alike, is at a local minimum: few if rows are few.

    Iteratively reweighted least squares with Σ q² held by the step before, from random directions on.
    """
    count = rows.shape[1]
    if len(rows) <= count or count < 2:
        return np.zeros((0, count))
    white = np.eye(count)
    for _ in range(WHITENINGS):
        alike = rows @ white
        alike = alike / np.maximum(np.linalg.norm(alike, axis=1, keepdims=True), 1e-300)
        second = alike.T @ alike
        if not np.linalg.cond(second) < MOST_CONDITION:
            return np.zeros((0, count))
        white = white @ np.linalg.cholesky(np.linalg.inv(second))
        white = white / np.linalg.norm(white)
    alike = rows @ white
    alike = alike / np.maximum(np.linalg.norm(alike, axis=1, keepdims=True), 1e-300)
    products = (alike[:, :, None] * alike[:, None, :]).reshape(len(alike), -1)
    points = rng.standard_normal((STARTS, count))
    smoothing, least = 1.0, max(SMOOTHING, 0.1 * threshold)
    while smoothing > least:
        points = points / np.linalg.norm(points, axis=1, keepdims=True)
        weights = 1 / np.hypot(points @ alike.T, smoothing / np.sqrt(count))
        weights /= weights.max(axis=1, keepdims=True)
        curved = (weights @ products).reshape(-1, count, count) + 1e-14 * np.eye(count)
        points = np.linalg.solve(curved, points[:, :, None])[:, :, 0]
        smoothing *= DESCENT
    found = points @ white.T
    return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True))


def _descended_without(factors: _Factors, known: Array, rng: np.random.Generator) -> Array:
    """Directions (k, b) that were met without some of the `known` columns (c, b), which are sought in what is left of L.

    In the rows in which known columns are zero the other columns are those of a smaller problem. Samples of one label have nearly the
    same direction, so that their difference has many entries near zero and attracts descents; without one of them the other is met. A
    direction is then known up to multiples of those left out, which are the ones that give it most zeros.
    """
    number = int(rng.integers(1, min(MOST_LEFT_OUT, len(known), factors.left.shape[1] - 2) + 1)) if factors.left.shape[1] > 2 else 0
    if not number:
        return np.zeros((0, factors.left.shape[1]))
    out = known[rng.permutation(len(known))[:number]]
    left = factors.left[factors.live]
    off = np.abs(left @ out.T) <= factors.threshold
    zero = off.all(axis=1)
    basis = np.linalg.qr(out.T, mode="complete")[0][:, number:]  # of directions that are orthogonal to those left out
    points = _descended(left[zero] @ basis, factors.threshold, rng) @ basis.T
    if not len(points):
        return np.zeros((0, factors.left.shape[1]))
    zeros = np.abs(points @ left[zero].T) <= 10 * factors.threshold
    _, first = np.unique(np.packbits(zeros, axis=1), axis=0, return_index=True)
    most = first[np.argsort(-zeros[first].sum(axis=1), kind="stable")][:KEPT]
    lifted = []
    for point in points[most]:
        for i, other in enumerate(out):
            alone = left[np.delete(off, i, axis=1).all(axis=1)]  # no other one of those left out
            point -= _multiple(alone @ point, alone @ other, factors.threshold) * other
        lifted.append(point / np.linalg.norm(point))
    return np.stack(lifted)


def _factorised(gradient: Array, count: int, rng: np.random.Generator) -> tuple[_Factors | None, str]:
    """The factors of a gradient (m, n + 1) of rank `count`, or why there are none."""
    if count > min(gradient.shape):
        return None, f"the layer has too few units or inputs for {count} samples"
    seen = gradient if min(gradient.shape) <= SKETCH else gradient @ rng.standard_normal((gradient.shape[1], SKETCH))
    left, values, _ = np.linalg.svd(seen, full_matrices=False)
    noise = values[count] if count < len(values) else 0.0
    if not values[count - 1] > 1e-12 * max(values[0], 1e-300):
        return None, f"the gradient's rank is below {count}"
    # an error of size σ in the gradient turns the last direction kept by σ / σ_b
    threshold = max(SHARPEST, 4.0 * float(noise / values[count - 1]))
    if threshold > COARSEST:
        return None, f"the gradient is not one of {count} samples, or its noise hides the zeros"
    # any basis serves; a random one has no vanishing coordinate
    left = left[:, :count] @ np.linalg.qr(rng.standard_normal((count, count)))[0]
    live = np.linalg.norm(left, axis=1) > threshold
    return _Factors(left, left.T @ gradient, live, threshold), ""


def _rows_drawn(factors: _Factors, rng: np.random.Generator) -> Array:
    """So many times b − 1 rows of L, drawn without replacement: (k, b − 1, b)."""
    rows, count = factors.left[factors.live], factors.left.shape[1]
    if len(rows) < count:
        return np.zeros((0, count - 1, count))
    return np.asarray(rows[np.argsort(rng.random((DRAWS_AT_ONCE, len(rows))), axis=1)[:, : count - 1]])


def _rows_near(factors: _Factors, pool: Array, rng: np.random.Generator) -> Array:
    """The same, most of each from the zeros of a candidate.

    Where a candidate combines s columns of Q, its zeros are those that the columns share. So s − 1 rows beside them suffice to find one of
    the columns, which b − 1 rows drawn at random rarely do if it has few zeros.
    """
    rows, count = factors.left[factors.live], factors.left.shape[1]
    zeros = (np.abs(pool @ rows.T) <= factors.threshold)[rng.integers(len(pool), size=DRAWS_AT_ONCE)]
    order = rng.random(zeros.shape)
    inside, outside = (np.argsort(order + ~mask, axis=1)[:, : count - 1] for mask in (zeros, ~zeros))
    others = rng.integers(1, count, size=(DRAWS_AT_ONCE, 1))
    return np.asarray(rows[np.where(np.arange(count - 1) < others, outside, inside)])


def _kernels(rows: Array) -> Array:
    """The unit directions (k, b) that are zero on each of k sets of b − 1 rows."""
    if rows.shape[1] == 0:
        return np.ones((1, 1))
    try:
        solved = np.linalg.solve(rows[:, :, :-1], -rows[:, :, -1:])[:, :, 0]
        kernels = np.column_stack([solved, np.ones(len(rows))])
    except np.linalg.LinAlgError:  # rows that are exact multiples of each other have no kernel of one dimension
        kernels = np.linalg.svd(rows)[2][:, -1]
    with np.errstate(over="ignore", invalid="ignore"):  # rows that are nearly multiples: no zeros, so dropped
        return np.asarray(kernels / np.linalg.norm(kernels, axis=1, keepdims=True))


def _chosen(factors: _Factors, candidates: Array) -> tuple[Array, list[int]]:
    """The candidates worth keeping, and which of them to take: greedily by zeros, each independent of those before.

    A combination of columns has the zeros that they share, and may have more than another column has. It depends on columns that have still
    more zeros and are taken before. So of the candidates that are independent of those taken the best are kept at every stage.
    """
    zeros = np.abs(candidates @ factors.left[factors.live].T) <= factors.threshold
    number, count = zeros.sum(axis=1), factors.left.shape[1]
    some = np.argsort(-number, kind="stable")
    some = some[number[some] >= min(count, zeros.shape[1])]  # b - 1 zeros are in every one
    _, first = np.unique(np.packbits(zeros[some], axis=1), axis=0, return_index=True)  # true columns are found again and again
    rest = sorted_ = candidates[some[np.sort(first)]] if count > 1 else candidates[:1]
    taken: list[int] = []
    kept = np.zeros(len(rest), dtype=bool)
    for _ in range(count):
        free = np.flatnonzero(np.linalg.norm(rest, axis=1) > max(1e-6, 10 * factors.threshold))
        if not len(free):
            break
        kept[free[:KEPT]] = True
        taken.append(int(free[0]))
        along = rest[free[0]] / np.linalg.norm(rest[free[0]])
        rest = rest - np.outer(rest @ along, along)
    places = np.cumsum(kept) - 1
    return sorted_[kept], [int(places[place]) for place in taken]


def _swapped(factors: _Factors, pool: Array, chosen: list[int], held: Array) -> Disaggregated:
    """The inputs of the chosen columns, after exchanging columns that fail the check for candidates with which more passes, and freeing
    those that still fail of the others."""
    best = _inputs(factors, pool[chosen], held)
    for other in [i for i in range(len(pool)) if i not in chosen][:SWAPS]:
        if best.refusal or best.consistency == 1.0:
            break
        tried = [*chosen]
        tried[int(best.agreement.argmin())] = other
        trial = _inputs(factors, pool[tried], held)
        if trial.agreement.sum() > best.agreement.sum():
            best, chosen = trial, tried
    if best.refusal or best.consistency == 1.0:
        return best
    freed = _inputs(factors, _freed(factors, pool[chosen], np.flatnonzero(best.agreement < 1.0)), held)
    return freed if freed.agreement.sum() > best.agreement.sum() else best


def _freed(factors: _Factors, columns: Array, failing: Array) -> Array:
    """Columns (b, b) of Q, one a row, where from each of the `failing` ones such multiples of others are taken as leave it more zeros.

    Where samples are alike, a column is often found with a multiple of another in it: it has the zeros that the two share.
    """
    freed = np.stack([_sharpened(factors, q) for q in columns])
    left = factors.left[factors.live]
    for i in failing:
        gains = True
        while gains:
            gains = False
            for j in range(len(freed)):
                own, other = left @ freed[i], left @ freed[j]
                tried = freed[i] - _multiple(own, other, factors.threshold) * freed[j]
                length = float(np.linalg.norm(tried))
                if j == i or not length > 10 * factors.threshold:
                    continue
                better = _sharpened(factors, tried / length)
                if (np.abs(left @ better) <= factors.threshold).sum() > (np.abs(own) <= factors.threshold).sum():
                    freed[i], gains = better, True
    return freed


def _multiple(own: Array, other: Array, threshold: float) -> float:
    """The c for which most entries of `own` − c `other` are zero up to the threshold: where most intervals around own / other meet."""
    some = np.abs(other) > threshold
    if not some.any():
        return 0.0
    middle, reach = own[some] / other[some], threshold / np.abs(other[some])
    ends = np.concatenate([middle - reach, middle + reach])
    order = np.argsort(ends, kind="stable")
    most = int(np.cumsum(np.repeat([1, -1], len(middle))[order]).argmax())
    return float((ends[order[most]] + ends[order[most + 1]]) / 2)


def _inputs(factors: _Factors, columns: Array, held: Array) -> Disaggregated:
    """The inputs of columns (b, b) of Q, one a row, and how they agree with the ReLU under the parameters `held` (k, m, n + 1)."""
    exact = np.stack([_sharpened(factors, q) for q in columns])
    none = Disaggregated(np.zeros((0, factors.right.shape[1] - 1)), np.zeros(0), "columns that depend on each other")
    if np.linalg.cond(exact) > MOST_CONDITION:
        return none
    extended = np.linalg.solve(exact.T, factors.right)
    scale = extended[:, -1:]
    if not np.all(np.abs(scale) > np.abs(extended).max(axis=1, keepdims=True) / MOST_CONDITION):
        return none
    inputs = extended / scale  # the last column is 1
    on = held @ inputs.T > 0
    settled = (on == on[:1]).all(axis=0)  # of several steps: units that stay as they are
    right = settled & ((np.abs(factors.left @ exact.T) > factors.threshold) == on[0])
    return Disaggregated(inputs[:, :-1], right.sum(axis=0) / np.maximum(settled.sum(axis=0), 1))


def _sharpened(factors: _Factors, q: Array) -> Array:
    """The direction that is nearest to zero on all of q's zeros, instead of on the b − 1 rows that were drawn."""
    zeros = factors.live & (np.abs(factors.left @ q) <= factors.threshold)
    return q if zeros.sum() < len(q) else np.asarray(np.linalg.svd(factors.left[zeros], full_matrices=False)[2][-1])
