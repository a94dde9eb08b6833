"""Linear evidence: what known sums over known clients say of single clients.

A sum is a row of coefficients over unknown terms. A term is one client's update in one round, or a value of a client that does not change
between rounds, such as its label histogram. What a coalition knows is subtracted. Two questions are answered:

which terms follow      `solved` (least squares): a term is determined if its unit vector lies in the row space of the coefficients.
                        `partial_sums_of` also takes sums that contain each other off each other.
what shares are likely  `shares_of_terms`: terms that are shares (q ≥ 0, Σ q = 1), by non-negative least squares over all sums at once.

Labels meet only in the sums Σ q = 1. So many shares are found by an interior point whose equations fall apart by label (`shares_by_label`),
or, where readings mix labels, by accelerated projected steps (`shares_by_steps`).

Source: Pasquini et al. 2022 and So et al. 2023 for sums over rounds as linear equations; Lam et al. 2021 ("Gradient disaggregation") for
constrained least squares over the participation matrix; textbook least squares (Gauss–Markov) for variance factors; Mehrotra 1992 for the
interior point; Beck & Teboulle 2009 with the restarts of O'Donoghue & Candès 2015 for projected steps; Duchi et al. 2008 for projections.
The ridge towards known shares, its strength by maximum marginal likelihood (empirical Bayes), is ours: without it the solution for terms
that the sums do not separate would be arbitrary.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from scipy.optimize import nnls

from ...errors import InputError
from ...types import Array

__all__ = [
    "Equations", "PartialSum", "Solution", "equations", "likeliest_penalty", "partial_sums_of", "projected", "shares_by_label",
    "shares_by_steps", "shares_of_terms", "solved",
]  # fmt: skip

T = TypeVar("T", bound=Hashable)
SAME = 1e-8
"""Up to this a coefficient, or the distance of a unit vector to the row space, is zero."""
PENALTIES = np.logspace(-6, 4, 41)
"""Penalties that are compared, in units of the largest eigenvalue of the normal equations. The first is next to none."""
HEAVY = 1e3
"""Weight of Σ q = 1 against the largest other equation."""
MOST_ACTIVE = 400
"""Shares that an active set finds as fast as other methods; its time grows with the cube of their number."""
STEPS, CLOSE, LEAST = 80, 1e-9, 1e-15
"""Most steps of the interior point. For each term, half the cost is then within CLOSE · penalty of the least, or LEAST of the largest
curvature."""
STEADY = 1e-7
"""The least penalty of the interior point: from 1e-9 of the largest curvature down, rounding left gaps of 1e-6 to 1e-2."""
BACK = 0.99
"""What part of the way to the nearest bound a step of the interior point goes."""
MOST_STEPS, CHECKED, NEAR = 4000, 50, 1e-6
"""Most projected steps, how often the gap of half the cost is looked at, and what of the penalty it is at the end, for each term; of NEAR
of the largest curvature, where the penalty is above that."""


@dataclass(frozen=True, eq=False)
class Equations(Generic[T]):
    """Sums over `terms`: row t is Σ_i coefficients[t, i] · term_i, with `coefficients` (m, n).

    `deviations` (m,) are the standard deviations of the rows' noise, in any one unit.
    """

    terms: tuple[T, ...]
    coefficients: Array
    deviations: Array

    @property
    def rank(self) -> int:
        return int(np.linalg.matrix_rank(self.coefficients)) if self.coefficients.size else 0

    @property
    def whitened(self) -> Array:
        """The coefficients (m, n) in units of each row's noise."""
        return np.asarray(self.coefficients / self.deviations[:, None])

    def less(self, known: Mapping[T, Array], values: Array) -> tuple["Equations[T]", Array]:
        """The equations without the `known` terms (each (d,)), and the `values` (m, d) of the sums less these."""
        here = [i for i, term in enumerate(self.terms) if term in known]
        if not here:
            return self, values
        left = [i for i, term in enumerate(self.terms) if term not in known]
        rest = values - self.coefficients[:, here] @ np.stack([np.asarray(known[self.terms[i]], np.float64) for i in here])
        return Equations(tuple(self.terms[i] for i in left), self.coefficients[:, left], self.deviations), np.asarray(rest)


@dataclass(frozen=True, eq=False)
class Solution:
    """`values` (n, d) of least norm among those of least squares. `determined` (n,) says whose value is the same in every solution.

    `variances` (n,) are those of determined values, if a row's noise has the variance deviation²; infinite for the others. `rank` is that
    of the coefficients.
    """

    values: Array
    determined: Array
    variances: Array
    rank: int


@dataclass(frozen=True, eq=False)
class PartialSum(Generic[T]):
    """A sum that follows from others: its `terms`, their weighted mean `value` (d,), and the standard `deviation` of a coordinate of it.

    The noise of the sums is independent.
    """

    terms: tuple[T, ...]
    value: Array
    deviation: float


def equations(rows: Sequence[Mapping[T, float]], deviations: Sequence[float] | Array | None = None) -> Equations[T]:
    """Sums with these coefficients by term; terms are in the order of their first occurrence.

    `deviations` (m,) are those of the rows' noise, 1 if none are given. Raises `InputError` for deviations that do not fit or are not
    above 0.
    """
    terms = tuple(dict.fromkeys(term for row in rows for term in row))
    place = {term: i for i, term in enumerate(terms)}
    coefficients = np.zeros((len(rows), len(terms)))
    for t, row in enumerate(rows):
        for term, coefficient in row.items():
            coefficients[t, place[term]] = coefficient
    noise = np.ones(len(rows)) if deviations is None else np.asarray(deviations, np.float64)
    if noise.shape != (len(rows),) or not (np.isfinite(noise) & (noise > 0)).all():
        raise InputError(f"deviations: {len(rows)} finite numbers above 0 are needed, not {noise.tolist()}")
    return Equations(terms, coefficients, noise)


def solved(system: Equations[T], values: Array) -> Solution:
    """The least-squares solution of the sums `values` (m, d)."""
    rows = system.whitened
    inverse = np.linalg.pinv(rows)
    determined = np.abs(np.einsum("it,ti->i", inverse, rows) - 1.0) < SAME
    variances = np.where(determined, (inverse**2).sum(axis=1), np.inf)
    estimates = inverse @ (np.asarray(values, np.float64) / system.deviations[:, None])
    return Solution(np.asarray(estimates), determined, np.asarray(variances), system.rank)


def partial_sums_of(system: Equations[T], values: Array) -> list[PartialSum[T]]:
    """The smallest sums that follow from sums `values` (m, d) of the same terms.

    Determined terms come first, by themselves. From the other sums these are taken off, and so is every sum that another one contains.
    """
    sums, length = np.asarray(values, np.float64), np.shape(values)[1]
    followed = np.hstack([sums, np.eye(len(sums))])  # beside each value, what it was made of
    solution = solved(system, followed)
    known = {term: solution.values[i] for i, term in enumerate(system.terms) if solution.determined[i]}
    rest, totals = system.less(known, followed)
    rows, left = rest.coefficients.copy(), np.array(totals, np.float64)
    changed = True
    while changed:
        changed = False
        for i, small in enumerate(rows):
            inside = np.abs(small) > SAME
            if not inside.any():
                continue
            for j, large in enumerate(rows):
                if i != j and np.abs(large[inside] - small[inside]).max() <= SAME:
                    rows[j] = np.where(inside, 0.0, large)
                    left[j] = left[j] - left[i]
                    changed = True
    partial_sums: list[tuple[tuple[T, ...], Array]] = [((term,), value) for term, value in known.items()]
    for row, total in zip(rows, left, strict=True):
        inside = np.flatnonzero(np.abs(row) > SAME)
        if len(inside):
            partial_sums.append((tuple(rest.terms[i] for i in inside), total / float(row[inside].sum())))
    return [PartialSum(terms, row[:length], float(np.linalg.norm(row[length:] * system.deviations))) for terms, row in partial_sums]


# --- terms that are shares ----------------------------------------------------------------------------------------------------------


def shares_of_terms(
    system: Equations[T], readings: Array, centre: Array, penalty: float | None = None, response: Array | None = None
) -> Array:
    """Shares (n, c) of all terms from `readings` (m, k) of the sums: q ≥ 0, Σ q = 1, of least

        Σ_t |R Σ_i coefficients[t, i] q_i − readings_t|² / deviation_t² + penalty · Σ_i |q_i − centre|².

    R is `response` (k, c), how a reading depends on shares; the identity if none is given. `centre` (c,) are the shares that a term has as
    far as nothing is known of it; `penalty` is the likeliest if none is given. Raises `InputError` for readings that are not finite.
    """
    n, classes = len(system.terms), len(centre)
    if not n:
        return np.zeros((0, classes))
    if not np.isfinite(readings).all():
        raise InputError("readings: not all are finite numbers, so no shares follow")
    penalty = likeliest_penalty(system, readings, centre) if penalty is None else penalty
    left, scale, right = np.linalg.svd(system.whitened, full_matrices=False)  # as few rows as the rank say the same
    kept = scale > SAME * max(float(scale[0]), 1e-300)
    few = scale[kept, None] * right[kept]
    aims = left[:, kept].T @ (np.asarray(readings, np.float64) / system.deviations[:, None])
    if n * classes > MOST_ACTIVE:
        return shares_by_label(few, aims, centre, penalty) if response is None else shares_by_steps(few, aims, response, centre, penalty)
    response = np.eye(classes) if response is None else response
    root = float(np.sqrt(penalty))
    heavy = HEAVY * max(root, float(scale[0]) * float(np.linalg.norm(response, 2)))
    rows = np.vstack([np.kron(few, response), root * np.eye(n * classes), heavy * np.kron(np.eye(n), np.ones((1, classes)))])
    wanted = np.concatenate([aims.ravel(), root * np.tile(centre, n), np.full(n, heavy)])
    shares = nnls(rows, wanted, maxiter=30 * rows.shape[1])[0].reshape(n, classes)
    return np.asarray(shares / np.maximum(shares.sum(axis=1, keepdims=True), 1e-12))


def likeliest_penalty(system: Equations[T], readings: Array, centre: Array) -> float:
    """The ratio of the noise's variance to that of the terms around `centre` (c,) under which `readings` (m, c) are likeliest.

    Noise and terms are taken for normal and independent, and the scale of both is profiled out. Where readings say nothing about the ratio,
    it is next to none.
    """
    rows = system.whitened
    apart = (readings - np.outer(system.coefficients.sum(axis=1), centre)) / system.deviations[:, None]
    values, vectors = np.linalg.eigh(rows @ rows.T)
    largest, power = max(float(values[-1]), 1e-300), ((vectors.T @ apart) ** 2).mean(axis=1)
    spread = np.maximum(values, 0.0)[:, None] + PENALTIES * largest
    scale = np.maximum((power[:, None] / spread).mean(axis=0), 1e-300)
    likelihood = -len(values) * np.log(scale) - np.log(spread).sum(axis=0)
    best = float(likelihood.max())
    first = int(np.flatnonzero(likelihood >= best - 1e-9 * max(1.0, abs(best)))[0])
    return float(PENALTIES[first] * largest)


# --- shares that are too many for an active set ------------------------------------------------------------------------------------


def shares_by_label(rows: Array, readings: Array, centre: Array, penalty: float) -> Array:
    """Shares (n, classes) of least |rows Q − readings|² + penalty · |Q − centre|², `rows` (m, n), `readings` (m, classes).

    A penalty below `STEADY` of the largest curvature counts as that, since rounding would decide. The equations of a step are m of each
    label (Woodbury) and n for all: m is best no larger than the rank.
    """
    n, classes = rows.shape[1], len(centre)
    penalty = max(penalty, STEADY * max(float(np.linalg.norm(rows, 2)) ** 2, 1e-300))
    most = float(np.linalg.norm(rows, 2)) ** 2 + penalty  # curvatures and costs are in units of the largest curvature
    few, ridge = rows / np.sqrt(most), penalty / most
    aim = (rows.T @ readings + penalty * centre) / most
    shares = np.full((n, classes), 1 / classes)
    slope = few.T @ (few @ shares) + ridge * shares - aim
    level = slope.min(axis=1) - 1 / classes
    slack = slope - level[:, None]
    for _ in range(STEPS):
        missed = few.T @ (few @ shares) + ridge * shares - aim - level[:, None] - slack
        beyond = shares.sum(axis=1) - 1
        gap = float((shares * slack).sum())
        if gap <= n * max(CLOSE * ridge, LEAST):
            break
        newton = _Newton(few, ridge + slack / shares)
        moved = newton.step(-missed - slack, beyond)
        slid = -slack - slack / shares * moved[0]
        reach = min(_reach(shares, moved[0]), _reach(slack, slid))
        after = float(((shares + reach * moved[0]) * (slack + reach * slid)).sum())
        goal = (after / gap) ** 3 * gap / shares.size - moved[0] * slid
        moved = newton.step(-missed - slack + goal / shares, beyond)
        slid = goal / shares - slack - slack / shares * moved[0]
        reach = min(1.0, BACK * min(_reach(shares, moved[0]), _reach(slack, slid)))
        shares, level, slack = shares + reach * moved[0], level + reach * moved[1], slack + reach * slid
    return np.asarray(shares / shares.sum(axis=1, keepdims=True))


class _Newton:
    """A step of the interior point, for one curvature FᵀF + diag(`own`[:, j]) of each label j, `own` (n, classes) above 0."""

    def __init__(self, few: Array, own: Array) -> None:
        self.few, self.loose = few, 1 / own
        inner = np.einsum("rn,nc,sn->crs", few, self.loose, few, optimize=True) + np.eye(len(few))
        self.inverse = np.linalg.inv(inner)
        self.spread = np.einsum("nc,rn->crn", self.loose, few)
        taken = np.matmul(self.inverse, self.spread)
        self.whole = np.diag(self.loose.sum(axis=1)) - np.tensordot(self.spread, taken, axes=([0, 1], [0, 1]))

    def step(self, pull: Array, beyond: Array) -> tuple[Array, Array]:
        """How the shares (n, classes) and the multipliers (n,) of their sums move under a `pull`, sums being `beyond` 1 by so much."""
        alone = self._eased(pull)
        level = np.linalg.solve(self.whole, -beyond - alone.sum(axis=1))
        return alone + self._eased(np.broadcast_to(level[:, None], pull.shape)), level

    def _eased(self, pull: Array) -> Array:
        within = np.einsum("crs,sc->rc", self.inverse, self.few @ (self.loose * pull))
        return np.asarray(self.loose * (pull - self.few.T @ within))


def _reach(values: Array, steps: Array) -> float:
    """How much of `steps` leaves all `values` at 0 at least; at most 1."""
    falling = steps < 0
    return min(1.0, float((values[falling] / -steps[falling]).min(initial=1.0)))


def shares_by_steps(rows: Array, readings: Array, response: Array, centre: Array, penalty: float) -> Array:
    """Shares (n, classes) of least |rows Q responseᵀ − readings|² + penalty · |Q − centre|², `readings` (m, k), `response` (k, classes).

    The steps end by `NEAR`, or after `MOST_STEPS`: with a penalty far below the curvatures nothing says how near to the least.
    """
    n, classes = rows.shape[1], len(centre)
    curve, inner = rows.T @ rows, response.T @ response
    most = float(np.linalg.norm(curve, 2)) * float(np.linalg.norm(inner, 2)) + penalty
    aim = rows.T @ readings @ response + penalty * centre
    shares = moved = projected(np.tile(centre, (n, 1)), np.full(n, classes))
    momentum = 1.0
    for number in range(MOST_STEPS):
        if number % CHECKED == 0:
            slope = curve @ shares @ inner + penalty * shares - aim
            if float((shares * slope).sum() - slope.min(axis=1).sum()) <= n * NEAR * min(penalty, NEAR * most):
                break
        slope = curve @ moved @ inner + penalty * moved - aim
        before, shares = shares, projected(moved - slope / most, np.full(n, classes))
        if float(((moved - shares) * (shares - before)).sum()) > 0:
            momentum = 1.0
        faster = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        moved, momentum = shares + (momentum - 1) / faster * (shares - before), faster
    return shares


def projected(values: Array, allowed: Array) -> Array:
    """The nearest shares (…, n, classes) to `values` of which row i has at most allowed[i] above zero, and values equal to the least of
    these."""
    most = min(int(np.max(allowed, initial=1)), values.shape[-1])  # no others can be above zero
    order = np.sort(np.partition(values, -most, axis=-1)[..., -most:], axis=-1)[..., ::-1]
    ranks = np.arange(1, most + 1)
    inside = ranks <= np.asarray(allowed)[:, None]
    excess = (np.cumsum(order, axis=-1) - 1) / ranks
    count = np.maximum(1, ((order > excess) & inside).sum(axis=-1, keepdims=True))
    bound = np.take_along_axis(excess, count - 1, axis=-1)
    least = np.take_along_axis(order, count - 1, axis=-1)
    kept = np.where(values >= least, np.maximum(values - bound, 0.0), 0.0)
    return np.asarray(kept / np.maximum(kept.sum(axis=-1, keepdims=True), 1e-300))
