"""A value that one client repeats: in a run of its rows, as a sensor that stopped does, or in any rows, where blanks were filled.

A run is compared with the column's own: how often its value is followed by the same, and the next longest run. By a geometric law of the
lengths of runs a column has such a run with a probability below `BY_CHANCE`; longer tails must also pass `LONGER`. A filled value is
compared with the most frequent values of all other clients, by a binomial bound.
"""

from dataclasses import dataclass

import numpy as np

from ..types import Array
from .doubtful_units import FEWEST_CLIENTS, ClientValues

__all__ = ["Repeated", "filled_in", "repeated_in_a_run"]

FEWEST_RUN, FEWEST_LEVELS, FEWEST_UNLIKE = 10, 5, 10
"""Rows of a run, values of the column, and rows of the client with other values: with fewer the client is unlike others as a whole."""
BY_CHANCE = 1e-6
LONGER = 2.5
"""Of exponential lengths of m runs, the longest is so many times the next with a probability of about m^-1.5."""
MOST_RUNS = 3
"""So many sensors may have stopped."""
IN_ORDER = 0.98
"""A column with so many steps in one direction is sorted, and values that occur often stand together."""
APART = 0.25
"""A 0 is so many medians of the other values below the least of them."""
FEWEST_FILLED, MANY_LEVELS, ATOM, MOST_ELSEWHERE = 10, 20, 3, 0.2
"""A filled value: so many rows, in a column of so many values, so many times the share of any value elsewhere, with a share below the last
one."""


@dataclass(frozen=True)
class Repeated:
    """A value, how many rows of a client have it, and the client: its place among all for runs, else its number."""

    value: float
    rows: int
    client: int


def repeated_in_a_run(values: Array, begins: Array) -> list[Repeated]:
    """Values that fill a long run of rows of a client of a column (rows,), sorted by clients, which begin at `begins`; not all its rows."""
    n = len(values)
    last = np.append(values[1:] != values[:-1], True)
    last[begins[1:] - 1] = True
    ends = np.flatnonzero(last)
    lengths = np.diff(ends, prepend=-1)
    if lengths.max(initial=0) < FEWEST_RUN or len(lengths) < 2:
        return []
    some = np.argpartition(-lengths, min(MOST_RUNS, len(lengths) - 1))[: MOST_RUNS + 1]
    order = some[np.argsort(-lengths[some], kind="stable")]
    sizes = np.diff(np.append(begins, n))
    steps = np.diff(values)
    steps = steps[steps != 0]
    if len(steps) >= FEWEST_LEVELS and max((steps > 0).mean(), (steps < 0).mean()) > IN_ORDER:
        return []
    for few in range(1, min(MOST_RUNS, len(lengths) - 1) + 1):
        runs, longest = order[:few], max(2, int(lengths[order[few]]) if few < len(order) else 1)
        if lengths[runs].min() < max(FEWEST_RUN, LONGER * longest):
            continue
        repeated = []
        others = n - int(lengths[runs].sum())
        for run in runs.tolist():
            value, length = float(values[ends[run]]), int(lengths[run])
            here = values[ends] == value
            own = int(lengths[here].sum()) - int(lengths[runs][values[ends[runs]] == value].sum())
            runs_of_it = int(here.sum()) - int((values[ends[runs]] == value).sum())
            usual = max((others - (len(lengths) - few) + 1) / (others + 2), (own - runs_of_it + 1) / (own + 2) if own > FEWEST_RUN else 0.0)
            client = int(np.searchsorted(begins, ends[run], side="right")) - 1
            unlike = sizes[client] - int(lengths[here & (np.searchsorted(begins, ends, side="right") - 1 == client)].sum())
            if unlike >= FEWEST_UNLIKE and np.log(n) + (length - 1) * np.log(min(usual, 1 - 1e-9)) < np.log(BY_CHANCE):
                repeated.append(Repeated(value, length, client))
        if len(repeated) == few and len(np.unique(values)) >= FEWEST_LEVELS:
            return repeated
    return []


def filled_in(own: ClientValues, values: Array, clients: Array) -> Repeated | None:
    """A value that fills many rows of one client, in any order, in a column (rows,) where no client has any value that often.

    A sensor's range may end at the least or largest value, and counts begin at 0. So of these only a 0 is named which no other client has,
    and which is apart from all other values.
    """
    if len(own.clients) < FEWEST_CLIENTS or own.levels < MANY_LEVELS:
        return None
    shares = own.often / own.sizes
    odd = int(np.argmax(shares))
    share, elsewhere = float(shares[odd]), float(np.delete((own.often + 1) / (own.sizes + 2), odd).max())
    count, rows = int(own.often[odd]), int(own.sizes[odd])
    if count < FEWEST_FILLED or share < ATOM * elsewhere or elsewhere > MOST_ELSEWHERE or count == rows:
        return None
    bound = share * np.log(share / elsewhere) + (1 - share) * np.log((1 - share) / (1 - elsewhere))
    if own.usual[odd] in own.ends and not (own.usual[odd] == 0 == own.ends[0] and _zero_apart(values, int(own.clients[odd]), clients)):
        return None
    sure = np.log(len(shares) * rows) - rows * bound < np.log(BY_CHANCE)
    return Repeated(float(own.usual[odd]), count, int(own.clients[odd])) if sure else None


def _zero_apart(values: Array, client: int, clients: Array) -> bool:
    """Whether only one client has zeros, and all other values are above, by a good part of their median and by more than a step."""
    others = values[np.isfinite(values) & (values != 0)]
    least, whole = float(others.min()), bool((others == np.trunc(others)).all())
    return bool((clients[values == 0] == client).all()) and least > max(APART * float(np.median(others)), 2.0 if whole else 0.0)
