"""Columns where one client, or a few, write something else than all others: another unit, other codes, two columns exchanged.

Clients differ, and that is what groups are found by. So a remark needs that all others agree, and that a slip explains the difference.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..types import Array
from .columns import cell_name
from .doubtful_runs import filled_in
from .doubtful_swaps import exchanged
from .doubtful_units import (
    FEWEST_CLIENTS,
    MINORITY,
    MOST_ODD,
    ClientValues,
    client_units,
    clients_apart,
    clients_differ,
    shown_step,
    values_of_clients,
)

__all__ = ["client_remarks"]

MOST_CODES, FEWEST_ROWS = 12, 20
"""A column with more different values has no codes; a client with fewer rows may lack a code by chance."""
ALIKE = 0.5
RARE = 0.05
"""A client may have one value only by chance if this share of all rows has it."""
FAR_FROM_0 = 5.0
RANGES = 0.5
"""Clients have ranges of their own if their means explain this share of the variance."""
FEWEST_OTHERS, FEWEST_LEVELS, DIFFERS, LITTLE = 2, 10, 3.0, 0.1
"""Other columns, of so many values, that do not tell clients apart: by so many standard errors, and so many deviations of their rows."""
MOST_NAMED = 3


def client_remarks(
    columns: Mapping[str, Sequence[Any]], numbers: Mapping[str, Array], clients: Array, names: Sequence[str], own: Collection[str],
    swapped: Sequence[tuple[tuple[str, str], int, int]] = (),
) -> tuple[list[str], list[str]]:  # fmt: skip
    """Warnings and notes of what a few clients write otherwise than all others.

    Args:
        columns: cells of columns. numbers: those of numbers (rows,), NaN for blanks. clients: each row's client (rows,).
        names: the clients' names, by number.
        own: columns that each client standardises by its own rows, where a unit makes no difference.
        swapped: pairs of columns, a client, and its rows where the two look exchanged.
    """
    warnings, notes = list[str](), list[str]()
    order = np.argsort(clients, kind="stable")
    begins = np.flatnonzero(np.diff(clients[order], prepend=-1))
    if len(begins) < FEWEST_CLIENTS:
        return warnings, notes

    def shown(few: Sequence[int]) -> str:
        some = ", ".join(repr(names[client]) for client in few[:MOST_NAMED]) + (", …" if len(few) > MOST_NAMED else "")
        return f"client{'s' if len(few) > 1 else ''} {some}"

    apart, in_units = dict[str, tuple[int, ...]](), set[str]()
    of_columns = {name: values_of_clients(values, clients) for name, values in numbers.items()}
    for name, values in of_columns.items():
        for mixed in (units := client_units(values)):
            words = f"the values of {shown(mixed.clients)} differ from those of all others by {shown_step(mixed.step)}"
            (notes if name in own else warnings).append(f"column {name!r}: {words}; are they in another unit?")
        if units:
            in_units.add(name)
            continue
        for half in client_units(values, MOST_ODD):
            if not _differ_elsewhere(half.clients, name, of_columns):
                words = f"the values of {shown(sorted(half.clients))} differ from those of the others by {shown_step(half.step)}"
                notes.append(f"column {name!r}: {words}, and no other column does; are they in another unit?")
                in_units.add(name)
        if name in in_units:
            continue
        if (scored := _standardised(values)) is not None:
            notes.append(f"column {name!r}: the values of {shown([scored])} are about a standard normal's, unlike those of all others")
        elif few := clients_apart(values):
            apart[name] = few
        if (filled := filled_in(values, numbers[name], clients)) is not None:
            often = f"{filled.value:g} fills {filled.rows} rows of {shown([filled.client])}"
            notes.append(f"column {name!r}: {often}, and no value is that frequent elsewhere; does it stand for missing values?")
    for name, few in apart.items():
        if not any(clients_differ(others) for other, others in of_columns.items() if other != name and other not in in_units):
            words = f"the values of {shown(few)} are far from those of all others, and those of no other column are"
            notes.append(f"column {name!r}: {words}; is it another unit, an offset, or a group of clients?")
    sizes = np.diff(np.append(begins, len(order)))
    for name, codes in numbers.items():
        by_client = codes[order]
        still = np.flatnonzero(np.minimum.reduceat(by_client, begins) == np.maximum.reduceat(by_client, begins))
        if 0 < len(still) <= MINORITY * len(begins) and sizes[still].min() >= FEWEST_ROWS and len(np.unique(codes)) > MOST_CODES:
            odd, value = clients[order][begins[still]].tolist(), float(by_client[begins[still[0]]])
            if (codes == value).sum() <= sizes[still].sum() + RARE * len(codes) and not _ordered_by(codes, clients, odd):
                notes.append(f"column {name!r}: all values of {shown(odd)} are {value:g}, and those of others differ")
    for name, cells in columns.items():
        if (odd := _other_codes(cells, numbers.get(name), clients)) is not None:
            client, its, usual = odd
            notes.append(f"column {name!r}: {shown([client])} has {its}, and all others have {usual}; are they codes of the same?")
    whole = exchanged(of_columns)
    notes += [f"columns {', '.join(map(repr, some))} of {shown([client])} look as if they were exchanged" for some, client in whole]
    notes += [
        f"columns {first!r}, {second!r} of {shown([client])} look as if they were exchanged in {count} rows"
        for (first, second), client, count in swapped
        if not any(client == other and {first, second} & set(some) for some, other in whole)
    ]
    return warnings, notes


def _ordered_by(values: Array, clients: Array, but: Sequence[int]) -> bool:
    """Whether the clients, `but` some, have ranges of a column (rows,) of their own, as where rows are dealt by the column."""
    others = np.isfinite(values) & ~np.isin(clients, but)
    own, owners = values[others], clients[others]
    counts = np.bincount(owners)
    means = np.bincount(owners, own) / np.maximum(1, counts)
    return bool(own.std() > 0 and (means[owners]).var() > RANGES * own.var())


def _differ_elsewhere(few: Sequence[int], name: str, of_columns: Mapping[str, ClientValues]) -> bool:
    """Whether another column, or none of `FEWEST_OTHERS`, tells about half of the clients from the others, as it would two groups."""
    compared = 0
    for other, own in of_columns.items():
        if other == name or own.levels < FEWEST_LEVELS:
            continue
        side = np.isin(own.clients, few)
        middles = own.quartiles[:, 1]
        if min(side.sum(), (~side).sum()) < 2:
            continue
        compared += 1
        parts = middles[side], middles[~side]
        spread = float(own.in_scale(logged=False)[1].mean())
        error = float(sum(part.var(ddof=1) / len(part) for part in parts)) ** 0.5
        if abs(parts[0].mean() - parts[1].mean()) > max(DIFFERS * error, LITTLE * spread):
            return True
    return compared < FEWEST_OTHERS


def _other_codes(cells: Sequence[Any], numbers: Array | None, clients: Array) -> tuple[int, str, str] | None:
    """A client with codes that nobody else has, or those of others moved by 1, where all others have the same; None if there is none."""
    if numbers is not None and (len(np.unique(numbers[:1000])) > MOST_CODES or not np.isfinite(numbers).all()):
        return None
    counts = np.bincount(clients)
    pairs = _text_codes(cells, clients) if numbers is None else _number_codes(numbers, clients)
    sets: dict[int, set[Any]] = {}
    for client, value in pairs:
        sets.setdefault(client, set()).add(value)
    if not sets:
        return None
    kinds = [frozenset(found) for found in sets.values()]
    usual = max(kinds, key=kinds.count)
    odd = [client for client, found in sets.items() if found != usual]
    if len(odd) != 1 or len(sets) <= FEWEST_CLIENTS or not 2 <= len(usual) <= MOST_CODES or counts[counts > 0].min() < FEWEST_ROWS:
        return None
    own = sets[odd[0]]
    moved = numbers is not None and any(own == {value + step for value in usual} for step in (1, -1))
    if len(own) != len(usual) or not (moved or own.isdisjoint(usual)):
        return None
    its, others = (", ".join(repr(cell_name(value)) for value in sorted(codes, key=str)) for codes in (own, usual))
    return odd[0], its, others


def _text_codes(cells: Sequence[Any], clients: Array) -> Collection[tuple[int, Any]]:
    """The pairs of client and cell that occur; none if there are more than twice `MOST_CODES` cells."""
    different, pairs = set[Any](), set[tuple[int, Any]]()
    for value, client in zip(cells, clients.tolist(), strict=True):
        if value not in different:
            different.add(value)
            if len(different) > 2 * MOST_CODES:
                return ()
        pairs.add((client, value))
    return pairs


def _number_codes(numbers: Array, clients: Array) -> Collection[tuple[int, Any]]:
    """The same for numbers."""
    levels, places = np.unique(numbers, return_inverse=True)
    if len(levels) > 2 * MOST_CODES:
        return ()
    both = np.unique(clients * len(levels) + places)
    return list(zip((both // len(levels)).tolist(), levels[both % len(levels)].tolist(), strict=True))


def _standardised(own: ClientValues) -> int | None:
    """The one client whose values have a median near 0 and a deviation near 1, far from those of all others; None if there is none."""
    if len(own.clients) <= FEWEST_CLIENTS:
        return None
    middles, spreads = own.in_scale(logged=False)
    scored = (np.abs(middles) < ALIKE) & (spreads > 0.6) & (spreads < 1.6)
    others = own.quartiles[~scored]
    return int(own.clients[scored][0]) if scored.sum() == 1 and (others[:, 0] > FAR_FROM_0).all() else None
