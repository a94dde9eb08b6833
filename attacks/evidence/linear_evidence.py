"""Linear evidence: what known sums over known clients say of single clients.

A sum is a row of coefficients over unknown terms. A term is one client's update in one round, or a value of a client that does not change
between rounds, such as its label histogram. What a coalition knows is subtracted. Two questions are answered:

which terms follow      `solved` (least squares): a term is determined if its unit vector lies in the row space of the coefficients.
                        `partial_sums_of` also takes sums that contain each other off each other.
what shares are likely  `shares_of_terms`: terms that are shares (q ≥ 0, Σ q = 1), by non-negative least squares over all sums at once.

Source: Pasquini et al. 2022 and So et al. 2023 for sums over rounds as linear equations; Lam et al. 2021 ("Gradient disaggregation") for
constrained least squares over the participation matrix; textbook least squares (Gauss–Markov) for variance factors. The ridge towards known
shares, its strength by maximum marginal likelihood (empirical Bayes), is ours: without it the solution for terms that the sums do not
separate would be arbitrary.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from scipy.optimize import nnls

from ...errors import InputError
from ...types import Array
from .simplex import shares_by_label, shares_by_steps

__all__ = ["Equations", "PartialSum", "Solution", "equations", "likeliest_penalty", "partial_sums_of", "shares_of_terms", "solved"]

T = TypeVar("T", bound=Hashable)
SAME = 1e-8
"""Up to this a coefficient, or the distance of a unit vector to the row space, is zero."""
PENALTIES = np.logspace(-6, 4, 41)
"""Penalties that are compared, in units of the largest eigenvalue of the normal equations. The first is next to none."""
HEAVY = 1e3
"""Weight of Σ q = 1 against the largest other equation."""
MOST_ACTIVE = 400
"""Shares that an active set finds as fast as other methods; its time grows with the cube of their number."""


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
    far as nothing is known of it; `penalty` is the likeliest if none is given.
    """
    n, classes = len(system.terms), len(centre)
    if not n:
        return np.zeros((0, classes))
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
