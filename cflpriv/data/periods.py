"""Rows in the order of time (`[data] time_column`): test rows that come after training rows, and clients whose data change by periods."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError
from ..randomness import stream
from ..types import Array
from .columns import as_written, cell_number, moment
from .partition import Partition, at_most

if TYPE_CHECKING:
    from .spec import DataSpec

__all__ = ["Later", "check_periods", "in_periods", "last_rows", "periods_of", "times"]

Later = tuple[tuple[int, int, Array, Array], ...]
"""What clients get after the first of their periods: period, client, training rows, test rows; in the order of the periods."""


def check_periods(spec: "DataSpec") -> None:
    """Raises `InputError` for keys of periods that do not go together, or not with the other keys."""

    def refused(problem: str) -> InputError:
        return InputError(f"[data] periods = {list(spec.periods)}: {problem}")

    if not spec.periods:
        return
    if list(spec.periods) != sorted(set(spec.periods)):
        raise refused("expected ascending rounds")
    if not spec.time_column:
        raise refused("needs a time_column, which orders the rows")
    if spec.partition != "given":
        raise refused(f"needs partition = 'given' with a client_column; this is {spec.partition!r}")
    if spec.held_out != "none":
        raise refused(f"goes with held_out = 'none', and this is {spec.held_out!r}")
    if spec.scaling is not None and spec.scaling.per_client:
        raise refused(
            "clients standardise by their own rows, which change; use standardise = 'constants' or 'none', or a schema in data.columns "
            "without blank = 'own'",
        )


def times(cells: Sequence[Any], at: Callable[[int], str], written: str = "") -> Array:
    """A column of times, float64 (rows,): numbers, or dates as seconds since 1970 by the format `written`, else by ISO 8601.

    Raises `InputError` for the first cell that is neither, for a column with both, and for one with a time zone in some dates only.
    """
    numbers = np.array([np.nan if written else cell_number(cell) for cell in cells])
    dates = [None if np.isfinite(number) else moment(cell, written) for number, cell in zip(numbers, cells, strict=True)]
    strange = next((row for row, date in enumerate(dates) if date is None and not np.isfinite(numbers[row])), None)
    if strange is not None:
        known = f"a date as {written!r}" if written else "a number or a date by ISO 8601, such as 2024-05-31"
        raise InputError(f"{at(strange)}: {cells[strange]!r} is not {known} (data.time_column)")
    if 0 < sum(date is None for date in dates) < len(dates):
        odd = next(row for row, date in enumerate(dates) if (date is None) != (dates[0] is None))
        raise InputError(f"{at(odd)}: {cells[odd]!r} beside {cells[0]!r}: numbers and dates in one column (data.time_column)")
    zoned = [at_ is not None and at_.tzinfo is not None for at_ in (as_written(cell, written) for cell in cells)]
    if 0 < sum(zoned) < len(zoned) and dates[0] is not None:
        odd = zoned.index(not zoned[0])
        problem = "dates with and without a time zone in one column (data.time_column)"
        raise InputError(f"{at(odd)}: {cells[odd]!r} beside {cells[0]!r}: {problem}")
    return np.array([number if date is None else date.timestamp() for number, date in zip(numbers, dates, strict=True)])


def last_rows(strata: Array, when: Array, share: float) -> Array:
    """Which rows are test rows: of each stratum the last by time, about a `share`. Rows of one time are all training or all test rows.

    A stratum of a single time has no test row, because none of its rows comes after another.
    """
    is_test = np.zeros(len(strata), bool)
    for stratum in np.unique(strata):
        members = np.flatnonzero(strata == stratum)
        moments = np.unique(when[members])
        if len(moments) > 1:
            rows_from = np.array([(when[members] >= moment_).sum() for moment_ in moments[1:]])
            nearest = int(np.abs(rows_from - share * len(members)).argmin())
            is_test[members] = when[members] >= moments[1 + nearest]
    if not is_test.any():
        raise InputError(f"data.test_share = {share:g}: leaves no test row of {len(strata)}: every client's rows have one time")
    return is_test


def periods_of(when: Array, periods: int) -> Array:
    """The period (rows,) of each row, from 0: as nearly equally many rows as rows of one time in one period allow.

    Raises `InputError` where a period would have none.
    """
    edges = np.sort(when)[[len(when) * number // periods for number in range(1, periods)]]
    period = np.searchsorted(edges, when, side="right")
    if len(empty := np.setdiff1d(np.arange(periods), period)):
        raise InputError(f"data.periods: period {int(empty[0]) + 1} of {periods} has no rows, because too many have one time; use fewer")
    return period


def in_periods(
    partition: Partition, train: Array, test: Array, caps: tuple[int, int], seed: int
) -> tuple[Partition, dict[int, int], Later]:  # fmt: skip
    """The partition with each client's rows in its first period; that period, by client; and what it gets in later ones.

    train, test: the period of each training and test row. A client without a training row in a period keeps what it had. caps: at
    most so many rows of a client in a period, training and test; 0: all.
    """
    first: list[tuple[Array, Array]] = []
    began: dict[int, int] = {}
    later: list[tuple[int, int, Array, Array]] = []
    for client, own, scored in zip(partition.ids, partition.train, partition.test, strict=True):
        for period in np.unique(train[own]).tolist():
            parts = ((own[train[own] == period], "train"), (scored[test[scored] == period], "test"))
            rows, tested = (
                at_most(part, cap, stream(seed, f"data.periods.{name}.{period}", client=client))
                for (part, name), cap in zip(parts, caps, strict=True)
            )
            if client not in began:
                began[client] = period
                first.append((rows, tested))
            else:
                later.append((period, client, rows, tested))
    made = Partition(
        partition.ids, tuple(rows for rows, _ in first), tuple(rows for _, rows in first), partition.groups, partition.notes,
        partition.groups_known,
    )  # fmt: skip
    return made, began, tuple(sorted(later, key=lambda entry: entry[:2]))
