"""Least squares over shares: rows q_i with q_i ≥ 0 and Σ q_i = 1, at sizes where an active set takes too long.

All functions minimise |A Q Rᵀ − B|² + penalty · |Q − 1 centreᵀ|² over shares Q (n, classes). Labels meet only in the sums Σ q_i = 1 where R
is the identity. There an interior point takes steps whose equations fall apart by label, so that the price grows with the number of labels
alone. Else accelerated projected steps are taken, each the price of two products of matrices.

Source: Mehrotra 1992 for the interior point; Beck & Teboulle 2009 with the restarts of O'Donoghue & Candès 2015 for projected steps; Duchi
et al. 2008 for the projection. `scipy.optimize.nnls` is the oracle of tests.
"""

import numpy as np

from ...types import Array

__all__ = ["projected", "shares_by_label", "shares_by_steps"]

STEPS, CLOSE, LEAST = 80, 1e-9, 1e-15
"""Most steps of the interior point; it ends where the cost is within CLOSE · penalty, or LEAST of the largest curvature, of the least."""
BACK = 0.99
"""What part of the way to the nearest bound a step of the interior point goes."""
MOST_STEPS, CHECKED, NEAR = 4000, 50, 1e-6
"""Most projected steps, how often the gap is looked at, and the gap that ends them in units of the largest curvature."""


def shares_by_label(rows: Array, readings: Array, centre: Array, penalty: float) -> Array:
    """Shares (n, classes) of least |rows Q − readings|² + penalty · |Q − centre|², `rows` (m, n), `readings` (m, classes).

    `penalty` is above 0. The equations of a step are m of each label (Woodbury) and n for all: m is best no larger than the rank.
    """
    n, classes = rows.shape[1], len(centre)
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

    What is least is reached to within `NEAR`, or after `MOST_STEPS` steps.
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
    """The nearest shares (…, n, classes) to `values` of which row i has at most allowed[i] above zero."""
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
