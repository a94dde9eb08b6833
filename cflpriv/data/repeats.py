"""Rows that occur more than once although they should not: test rows that were trained on, rows that several clients have.

Small integers, ratings and sparse counts repeat by nature, so a repetition alone shows nothing. Two kinds of evidence do:

- More test rows equal a training row than training rows equal another training row. Without a leak both are as likely, so the number is
  compared with a binomial distribution.
- Repetitions are impossible by chance. The columns with many values have so much entropy together that less than one pair of rows is
  expected to be equal; or every row of the file occurs a multiple of the same number of times.
"""

from dataclasses import dataclass

import numpy as np

from ..types import Array

__all__ = ["Repeats", "repeats_of"]

MOST_BYTES = 2**30
"""Larger data are not searched: they may be mapped, and are read when needed."""
MOST_ROWS = 20_000
MOST_COLUMNS = 64
"""What the entropy is estimated from."""
FEWEST = 3
"""Fewer repetitions are no evidence: they occur in good data."""
SHARE = 0.005
"""Of the rows: a smaller share of repetitions has no effect on a result."""
SURE = 1e-3
LEAST_LEVELS = 12
"""Columns whose values are as good as fewer levels count for nothing: ratings, categories, sparse counts."""
LEAST_COLUMNS = 3
POWER = 2.2
"""Entropy that is needed, in logarithms of the number of rows. Of 2 about half a pair of rows is expected to be equal by chance."""


@dataclass(frozen=True)
class Repeats:
    """Numbers of rows: `tested` test rows that equal a training row, `shared` training rows that another client has, too, and, if there are
    neither, `doubled` rows that occur earlier. Each is 0 without evidence that the repetition is no chance. The pairs are an example: a
    test row and the training row, two training rows, or two rows where test rows are counted after all training rows.
    """

    tested: int = 0
    test_pair: tuple[int, int] = (0, 0)
    shared: int = 0
    shared_pair: tuple[int, int] = (0, 0)
    doubled: int = 0
    doubled_pair: tuple[int, int] = (0, 0)


def repeats_of(x_train: Array, x_test: Array, owners: Array | None = None) -> Repeats:
    """Repeated rows of features or images x (n, …); `owners` (n,) names the client of each training row.

    Labels are not compared: a sample that was trained on under another label is no test either.
    """
    if x_train.nbytes + x_test.nbytes > MOST_BYTES:
        return Repeats()
    kind = np.result_type(x_train, x_test)
    keys = np.concatenate([_keys(x, kind) for x in (x_train, x_test)])
    _, group = np.unique(keys, return_inverse=True)
    from scipy.special import bdtrc  # loads a hundred modules

    n, t = len(x_train), len(x_test)
    train, test = group[:n], group[n:]
    counts = np.bincount(group, minlength=int(group.max()) + 1)
    if counts.max() == 1:
        return Repeats()
    inside = np.bincount(train, minlength=len(counts))
    leaked = np.flatnonzero(inside[test] > 0)
    twice = int((inside[train] > 1).sum())
    by_chance = bdtrc(len(leaked) - 1, t, (twice + 1) / (n + 2))  # so many of t, or more
    impossible = _impossible(x_train, x_test, counts)
    repeats: dict[str, int | tuple[int, int]] = {}
    if _matters(leaked, test, t) and (by_chance < SURE or impossible):
        row = int(leaked[0])
        repeats |= {"tested": len(leaked), "test_pair": (row, int(np.flatnonzero(train == test[row])[0]))}
    if impossible:
        repeats |= {} if owners is None else _shared(train, inside, owners)
    if impossible and not repeats:
        repeats |= _doubled(group)
    return Repeats(**repeats)  # type: ignore[arg-type]


def _matters(rows: Array, group: Array, of: int) -> bool:
    """Whether so many rows, in different groups of equal rows, are worth a word."""
    return len(rows) >= max(FEWEST, SHARE * of) and len(np.unique(group[rows])) >= FEWEST


def _first(group: Array, groups: int) -> Array:
    """For each row the first row of its group of equal rows."""
    first = np.empty(groups, np.int64)
    first[group[::-1]] = np.arange(len(group))[::-1]  # of equal places the last that is written stays
    return first[group]


def _doubled(group: Array) -> dict[str, int | tuple[int, int]]:
    """Rows that occur earlier, in training or test."""
    earlier = _first(group, int(group.max()) + 1)
    rows = np.flatnonzero(earlier < np.arange(len(group)))
    return {"doubled": len(rows), "doubled_pair": (int(earlier[rows[0]]), int(rows[0]))} if _matters(rows, group, len(group)) else {}


def _shared(train: Array, inside: Array, owners: Array) -> dict[str, int | tuple[int, int]]:
    """Training rows that other clients have, too."""
    earlier = _first(train, len(inside))
    elsewhere = np.flatnonzero(owners != owners[earlier])
    spread = np.zeros(len(inside), bool)
    spread[train[elsewhere]] = True
    rows = np.flatnonzero(spread[train])
    if not _matters(rows, train, len(train)):
        return {}
    row = int(elsewhere[0])
    return {"shared": len(rows), "shared_pair": (int(earlier[row]), row)}


def _keys(x: Array, kind: np.dtype[np.generic]) -> Array:
    """A number for each row, equal for equal rows; −0 is 0."""
    flat = x.reshape(len(x), -1)
    keys = np.empty(len(x), np.int64)
    for row, values in enumerate(flat):
        keys[row] = hash((values.astype(kind) + 0).tobytes())
    return keys


def _impossible(x_train: Array, x_test: Array, counts: Array) -> bool:
    """Whether rows cannot repeat by chance."""
    if len(counts) >= 10 and np.gcd.reduce(counts) > 1:
        return True
    x = np.concatenate([part[:: max(1, len(part) // MOST_ROWS)].reshape(-1, part[0].size) for part in (x_train, x_test)])
    columns = x[:, np.unique(np.linspace(0, x.shape[1] - 1, min(x.shape[1], MOST_COLUMNS)).astype(int))]
    columns = np.unique(columns, axis=0)
    entropies = [_levels(column) for column in columns.T]
    informative = [np.log(levels) for levels in entropies if levels >= LEAST_LEVELS]
    return len(informative) >= LEAST_COLUMNS and sum(informative) >= POWER * np.log(len(columns))


def _levels(values: Array) -> float:
    """How many equally frequent values would be equal as often as these."""
    shares = np.unique(values, return_counts=True)[1] / len(values)
    return float(1 / np.square(shares).sum())
