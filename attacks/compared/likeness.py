"""Which clients are alike, from any numbers that they send in rows: updates, compared vectors, prototypes, losses, control variates.

Rows of one part, a row a client, are averaged over the rounds in which they can be compared, and compared by the cosine of their
differences from the mean row. Orthonormal transforms keep cosines, so rows under one transform are compared with each other, and cosines
of several transforms are averaged. Average linkage gives as many groups as there are.

What it proves: the part tells groups of clients apart, whatever the task is about and whether or not any cluster is named. What it does
not: what a group is about, or that a part that tells no groups apart tells nothing.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.cluster import hierarchy
from scipy.spatial.distance import squareform

from ...contract.transcript import Message, payload_rows
from ...types import Array
from ..adversary import UPDATES, AdversaryView
from ..figures.leakage import Case, Cell, group_cell, nothing, one_group
from ..figures.payloads import data_parts, part_of, parts_in_rows

__all__ = ["alike", "cells", "rows_of_part"]

NAME = "likeness"
MARGIN = 0.1
FEWEST = 3
NAMED = ("relay", "fold", "product")
"""Operations in the name of a figure: what members relay, or folds, are protected in other ways than a part of the same name in a mean."""


@dataclass
class _Sum:
    """Rows of one client that can be compared with each other: their `total` (d,) by length d, and how many there are."""

    total: dict[int, Array] = field(default_factory=dict)
    count: Counter[int] = field(default_factory=Counter)

    def add(self, row: Array) -> None:
        self.total[len(row)] = self.total.get(len(row), 0.0) + row
        self.count[len(row)] += 1


def rows_of_part(view: AdversaryView, key: tuple[str, str, str]) -> list[dict[int, Array]]:
    """Clients' rows of a part, a mean row (d,) a client over the messages whose rows can be compared; a table for each such set.

    Rows of other names ("prototype 3"), or under other transforms, are in tables of their own. Of rows of several lengths the commonest
    are taken.
    """
    operation, kind, part = key
    sums: dict[tuple[str, str], dict[int, _Sum]] = {}
    for message in view.messages:
        if (message.operation, message.source) != (operation, "clients") or not message.kind.startswith(kind):
            continue
        clients = payload_rows(message)
        for name, array in (message.payload or {}).items():
            values = np.asarray(array)
            if name == "clients" or part_of(name) != part:
                continue
            if values.dtype.kind not in "fiub" or values.ndim < 1 or len(values) != len(clients):
                continue
            of_clients = sums.setdefault((name, _frame(message, name)), {})
            for client, row in zip(clients, values, strict=True):
                if np.isfinite(row).all():
                    of_clients.setdefault(client, _Sum()).add(np.ravel(row).astype(np.float64))
    return [_means(of_clients) for of_clients in sums.values()]


def _frame(message: Message, name: str) -> str:
    """The transform or epoch under which rows are: only rows of one are compared."""
    if message.operation == "gram":
        return str(message.context.get("epoch", ""))
    return str(message.context.get("transform", "")) if name == "blind" else ""


def _means(of_clients: Mapping[int, _Sum]) -> dict[int, Array]:
    lengths = Counter[int]()
    for own in of_clients.values():
        lengths.update(own.count)
    usual = max(lengths, key=lambda length: lengths[length], default=0)
    return {client: own.total[usual] / own.count[usual] for client, own in of_clients.items() if own.count[usual]}


def alike(tables: Sequence[Mapping[int, Array]], clients: Sequence[int], groups: int) -> dict[int, int]:
    """A group for each of `clients`, by average linkage on their mean cosine over tables of rows (d,), each about its mean.

    Clients that no table has together are counted as of cosine 0.
    """
    place = {client: i for i, client in enumerate(clients)}
    total, count = np.zeros((len(place), len(place))), np.zeros((len(place), len(place)))
    for rows in tables:
        here = [client for client in clients if client in rows]
        if len(here) < FEWEST:
            continue
        whole = np.stack([rows[client] for client in here])
        centred = whole - whole.mean(axis=0)
        norms = np.linalg.norm(centred, axis=1, keepdims=True)
        unit = centred / np.where(norms > 0, norms, 1.0)
        at = np.ix_([place[client] for client in here], [place[client] for client in here])
        total[at] += unit @ unit.T
        count[at] += 1
    apart = 1.0 - total / np.maximum(count, 1)
    np.fill_diagonal(apart, 0.0)
    tree = hierarchy.linkage(squareform(np.maximum(apart, 0.0), checks=False), "average")
    return dict(zip(clients, hierarchy.fcluster(tree, groups, "maxclust").tolist(), strict=True))


def _unhidden(case: Case, key: tuple[str, str, str]) -> list[dict[int, Array]]:
    """The tables of the unprotected run for a transformed part, which is there under the name of an update; none where it has none."""
    named = [other for other in parts_in_rows(case.reference, NAME) if other[0] == key[0] and other[2] in UPDATES]
    return rows_of_part(case.reference, named[0]) if named and key[2] == "blind" else []


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """For each part that clients send in rows the share of clients whose group is known up to renaming."""
    figures, metric = [], "group_accuracy"
    for key in parts_in_rows(case.view, NAME):
        tables = [rows_of_part(case.view, key)]
        tables.append(rows_of_part(case.reference, key) or _unhidden(case, key) or tables[0])
        known = [{client for table in of_view for client in table} for of_view in tables]
        clients = sorted((known[0] & known[1]) - set(case.view.coalition))
        if len(clients) < FEWEST:
            continue
        operation = f"{key[0]}_" if key[0] in NAMED else ""
        metric = f"{operation}{key[2].replace(' ', '_')}_group_accuracy"
        groups = Counter(case.truth.groups[client] for client in clients)
        in_one = not case.truth.groups_known or len(groups) < 2
        if in_one or len(groups) == len(clients):
            why = one_group(case) if in_one else "the clients looked for are each of a group of its own"
            figures.append(nothing(case, NAME, metric, f"{why}: no identity to find"))
            continue
        found = tuple(alike(of_view, clients, case.prior.groups) for of_view in tables)
        note = f"{key[0]} {key[1]}: groups up to renaming, their number known; baseline: the same groups dealt at random, or the largest"
        figures.append(group_cell(case, NAME, metric, (found[0], found[1]), clients, margin=MARGIN, note=note))
    why = "no rows of clients to compare are in this view" if data_parts(case.view) else "no number of clients' data is in this view"
    return figures or [nothing(case, NAME, metric, why)], None
