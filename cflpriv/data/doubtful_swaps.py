"""Columns of a client that were exchanged: in all of its rows, or two columns in a part of them.

Of two columns in a part of the rows: each row is compared by how likely its two values are in this order and in the other. Clients may have
such rows by chance. So a client whose other rows are as usual is named if it has more of them than its binomial share, taken as the largest
of all other clients; all pairs of columns and clients together, by a chance below `FALSE_ALARM`. Exchanged axes of a sensor are the same as
a turned sensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..types import Array
from .doubtful_units import FEWEST_CLIENTS, NORMAL_QUARTILES, SMALLEST, ClientValues, examined_rows, label_columns, related

__all__ = ["exchanged", "exchanged_rows"]

FAR, AGREED, ALIKE = 2.0, 1.0, 0.5
"""In deviations: exchanged columns are so far from those of others, others agree to so much, and exchanged back they are so near."""
FALSE_ALARM = 1e-3
FEWEST_ROWS, SHARE = 5, 0.05
"""Rows that look exchanged, at least, and their least share of a client's rows."""
LIKELIER, NEAR, OFF = 2.0, 3.0, 1.5
"""A row looks exchanged if its logarithm of the likelihood is larger by so much in the other order; then both values are within so many
deviations of what is usual, and are so many away now."""
WIDER, RATIO, LIKE = 3.5, 10.0, 1.4
"""The exchanged values spread at most so many times more, or less, than usual. Their median is within `LIKE` deviations, as far as two
values are apart that are as frequent; or it was `RATIO` times as far off before."""
MOST_COLUMNS = 100


def exchanged(of_columns: Mapping[str, ClientValues]) -> list[tuple[tuple[str, ...], int]]:
    """Columns and a client whose values of each are like those that others have of another of them, and unlike those of the same."""
    far: dict[int, list[_FarColumn]] = {}
    for name, own in of_columns.items():
        if len(own.clients) <= FEWEST_CLIENTS:
            continue
        middles, spreads = own.in_scale(logged=False)
        usual, spread = float(np.median(middles)), float(np.median(spreads))
        apart = np.abs(middles - usual) / spread if spread > 0 else np.zeros(len(middles))
        odd = int(np.argmax(apart))
        if apart[odd] > FAR and np.delete(apart, odd).max() < AGREED:
            column = _FarColumn(name, float(middles[odd]), float(spreads[odd]), float(np.median(np.delete(middles, odd))), spread)
            far.setdefault(int(own.clients[odd]), []).append(column)
    exchanges = []
    for client, columns in far.items():
        like = [[place for place, other in enumerate(columns) if other is not column and column.is_like(other)] for column in columns]
        if len(columns) > 1 and all(like) and len({place for places in like for place in places}) == len(columns):
            exchanges.append((tuple(column.name for column in columns), client))
    return exchanges


@dataclass(frozen=True)
class _FarColumn:
    """The median and deviation of one client's values of a column, and those usual at others."""

    name: str
    middle: float
    spread: float
    usual: float
    usual_spread: float

    def is_like(self, other: "_FarColumn") -> bool:
        """Whether the client's values of this column are as others' values of another column."""
        near = abs(self.middle - other.usual) < ALIKE * other.usual_spread
        return near and other.usual_spread / 2 < self.spread < 2 * other.usual_spread


def exchanged_rows(numbers: Mapping[str, Array], labels: Array, clients: Array) -> list[tuple[tuple[str, str], int, int]]:
    """Two columns, a client, and how many of its rows look as if the two were exchanged in them. No column is in two such pairs.

    Args:
        numbers: columns of numbers (rows,), NaN for blanks. labels: classes by number, or numbers (rows,). clients: each row's client.
    """
    rows = examined_rows(len(labels))
    rows = rows[np.argsort(clients[rows], kind="stable")]
    owners = clients[rows]
    begins = np.flatnonzero(np.diff(owners, prepend=-1))
    bounds = np.append(begins, len(owners))
    sizes = np.diff(bounds)
    usual = {name: column for name, values in numbers.items() if (column := _usual(values[rows], begins)) is not None}
    if len(begins) <= FEWEST_CLIENTS or not 1 < len(usual) <= MOST_COLUMNS:
        return []
    names, kinds = list(usual), label_columns(labels[rows])
    chance = np.log(FALSE_ALARM / (len(names) * (len(names) - 1) / 2 * len(begins)))
    pairs = []
    for place, first in enumerate(names):
        a = usual[first]
        for second in names[place + 1 :]:
            b = usual[second]
            if abs(a.middle - b.middle) < min(a.spread, b.spread):
                continue
            here = _alike(a, b)
            counts = np.add.reduceat(here, begins)
            odd = _more_than_others(counts, sizes, chance)
            if odd is None:
                continue
            side = here.astype(bool) & (owners == owners[begins[odd]])
            rest = (owners == owners[begins[odd]]) & ~side
            if not (_as_usual(a.values[side], a, b) and _as_usual(b.values[side], b, a)):
                continue
            if rest.sum() >= FEWEST_ROWS and not (a.has(rest) and b.has(rest)):
                continue
            others = [column.values for name, column in usual.items() if name not in (first, second)]
            if not any(related(side, np.ones(len(rows), bool), column, bounds) for column in (*kinds, *others)):
                pairs.append(((first, second), int(owners[begins[odd]]), int(counts[odd])))
    return [pair for pair in pairs if not any(pair is not other and set(pair[0]) & set(other[0]) for other in pairs)]


@dataclass(frozen=True)
class _Usual:
    """A column's values (rows,), of few clients at most unlike others, and their usual median and deviation."""

    values: Array
    middle: float
    spread: float

    def has(self, rows: Array) -> bool:
        """Whether the median of some rows is a usual one."""
        return bool(abs(float(np.median(self.values[rows])) - self.middle) < AGREED * self.spread)


def _usual(values: Array, begins: Array) -> _Usual | None:
    """What is usual at most clients; None for columns of few values or with blanks."""
    if not np.isfinite(values).all() or len(np.unique(values[:1000])) <= 10:
        return None
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return _Usual(values, middle, (high - low) / NORMAL_QUARTILES) if high - low > SMALLEST else None


def _alike(a: _Usual, b: _Usual) -> Array:
    """1 for each row whose two values look exchanged, else 0."""
    own_a, own_b = (a.values - a.middle) / a.spread, (b.values - b.middle) / b.spread
    as_b, as_a = (a.values - b.middle) / b.spread, (b.values - a.middle) / a.spread
    likelier = own_a**2 + own_b**2 - as_a**2 - as_b**2 > 2 * LIKELIER
    off = np.maximum(np.abs(own_a), np.abs(own_b))
    near = np.maximum(np.abs(as_a), np.abs(as_b)) < np.maximum(NEAR, off / RATIO)
    near &= off > OFF
    return (likelier & near).astype(np.int64)


def _as_usual(values: Array, own: _Usual, other: _Usual) -> bool:
    """Whether values are like the usual ones of another column, in place and in spread."""
    low, middle, high = np.quantile((values - other.middle) / other.spread, (0.25, 0.5, 0.75)).tolist()
    before = abs(float(np.median(values)) - own.middle) / own.spread
    return bool(abs(middle) < max(LIKE, before / RATIO) and 1 / WIDER < (high - low) / NORMAL_QUARTILES < WIDER)


def _more_than_others(counts: Array, sizes: Array, chance: float) -> int | None:
    """The one client with more such rows than the largest share at the others explains by chance, a logarithm; None if there is none."""
    odd = int(np.argmax(counts / sizes))
    share, own = float(np.delete((counts + 1) / (sizes + 2), odd).max()), float(counts[odd] / sizes[odd])
    if counts[odd] < FEWEST_ROWS or own < max(SHARE, 2 * share):
        return None
    bound = own * np.log(own / share) + (1 - own) * np.log(max(1 - own, 1e-300) / (1 - share))
    return odd if -sizes[odd] * bound < chance else None
