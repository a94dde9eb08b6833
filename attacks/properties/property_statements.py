"""Properties of clients' data: public statements about single samples, and which clients have them.

A client has a property if more of its samples do than of the population at large:

bold          strokes are thick: ink over outline
wide          the image is wider than tall, as digits that were turned by 90° are
slanted       to the right: ink's covariance of column and row, a trait of a hand
value_0       the first value is large (rows of a table)
label_0       the label is the first one
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from ...types import Array
from ..figures.leakage import Prior, Truth, is_image

__all__ = ["FEWEST", "PROPERTIES", "Statement", "shares_held", "statements", "who_has"]

FEWEST = 3
VARIES = 0.01
"""How improbable the spread of clients' shares must be for random draws from one pool, for the property to vary at all."""


def _thickness(x: Array, y: Array) -> Array:
    planes = x.mean(axis=1, dtype=np.float64)
    outline = np.abs(np.diff(planes, axis=1)).sum((1, 2)) + np.abs(np.diff(planes, axis=2)).sum((1, 2))
    return np.asarray(planes.sum((1, 2)) / np.maximum(outline, 1e-9))


def _moments(x: Array) -> tuple[Array, Array, Array]:
    """The ink's variance over rows, over columns, and their covariance, by image."""
    planes = np.maximum(x.mean(axis=1, dtype=np.float64), 0.0)
    total = np.maximum(planes.sum((1, 2)), 1e-9)
    rows, columns = np.arange(planes.shape[1], dtype=np.float64), np.arange(planes.shape[2], dtype=np.float64)
    down, across = planes.sum(2) / total[:, None], planes.sum(1) / total[:, None]
    r, c = down @ rows, across @ columns
    return down @ rows**2 - r**2, across @ columns**2 - c**2, np.einsum("nij,i,j->n", planes, rows, columns) / total - r * c


def _width(x: Array, y: Array) -> Array:
    down, across, _ = _moments(x)
    return across - down


def _slant(x: Array, y: Array) -> Array:
    return -_moments(x)[2]


def _first_value(x: Array, y: Array) -> Array:
    return np.asarray(x.reshape(len(x), -1)[:, 0], np.float64)


def _first_label(x: Array, y: Array) -> Array:
    return np.asarray(y == 0, np.float64)


PROPERTIES: dict[str, tuple[Callable[[Array, Array], Array], float | None]] = {
    "bold": (_thickness, None), "wide": (_width, 0.0), "slanted": (_slant, None), "value_0": (_first_value, None),
    "label_0": (_first_label, 0.5),
}  # fmt: skip
"""Name -> a measure (n,) of samples (n, *shape) with labels (n,), and the bar that those with the property exceed; None: the median of
auxiliary samples."""


@dataclass(frozen=True, eq=False)
class Statement:
    """A property as the attacker states it: a sample has it above `bar`, a client if more than `share` of its samples do."""

    name: str
    bar: float
    share: float

    def holds(self, x: Array, y: Array) -> Array:
        """Which samples have it, (n,) bool."""
        return np.asarray(PROPERTIES[self.name][0](x, y) > self.bar)


def statements(prior: Prior) -> list[Statement]:
    """What can be asked about samples of this shape, from auxiliary data alone."""
    stated = []
    is_table = len(prior.shape) == 3 and prior.shape[1] == 1  # one row of values
    for name, (measure, bar) in PROPERTIES.items():
        if name != "label_0" and not (is_table if name == "value_0" else is_image(prior.shape)):
            continue
        values = measure(prior.x, prior.y)
        bar = float(np.median(values)) if bar is None else bar
        share = float((values > bar).mean())
        if 0.02 < share < 0.98:
            stated.append(Statement(name, bar, share))
    return stated


def who_has(statement: Statement, truth: Truth) -> dict[int, bool] | None:
    """The truth by client; None where it does not vary: shares that random draws from one pool would have (χ² test), or too few."""
    held = {client: statement.holds(x, y) for client, (x, y) in truth.data.items()}
    has = {client: bool(shares.mean() > statement.share) for client, shares in held.items()}
    if not FEWEST <= sum(has.values()) <= len(has) - FEWEST:
        return None
    pooled = float(np.concatenate(list(held.values())).mean())
    excess = sum(len(shares) * (float(shares.mean()) - pooled) ** 2 for shares in held.values()) / (pooled * (1 - pooled))
    return has if stats.chi2.sf(excess, len(held) - 1) < VARIES else None


def shares_held(statement: Statement, truth: Truth) -> dict[int, float]:
    """The share of a client's samples that have the property, by client."""
    return {client: float(statement.holds(x, y).mean()) for client, (x, y) in truth.data.items()}
