"""Which clients are alike, from any numbers that they send: what reads a payload that no other attack reads.

Rows of one part, a row a client, are averaged over rounds and compared by their cosine; average linkage gives as many groups as there are.
Ledgers of scores, losses, control variates and requests differ in form, but clients of one group differ less in them than others do.

What it proves: the part tells groups of clients apart. What it does not: what a group is about, or that a part that tells no groups apart
tells nothing.
"""

from collections.abc import Mapping

import numpy as np
from scipy.cluster import hierarchy

from ...contract.transcript import payload_rows
from ...types import Array
from ..adversary import AdversaryView
from ..figures.leakage import Case, Cell, group_cell, nothing
from ..figures.payloads import data_parts, parts_of, unread_keys

__all__ = ["alike", "cells", "rows_of_part"]

NAME = "likeness"
MARGIN = 0.1
FEWEST = 3


def rows_of_part(view: AdversaryView, key: tuple[str, str, str]) -> dict[int, Array]:
    """Each client's rows of a part, one mean vector (d,) a client over all messages with rows of the commonest length."""
    operation, kind, part = key
    rows: dict[int, list[Array]] = {}
    for message in view.messages:
        if (message.operation, message.source) != (operation, "clients") or not message.kind.startswith(kind):
            continue
        if part not in parts_of(message):
            continue
        clients = payload_rows(message)
        for name, array in (message.payload or {}).items():
            values = np.asarray(array, dtype=np.float64) if np.asarray(array).dtype.kind in "fiub" else None
            if name != "clients" and values is not None and values.ndim >= 1 and len(values) == len(clients):
                for client, row in zip(clients, values, strict=True):
                    if np.isfinite(row).all():
                        rows.setdefault(client, []).append(np.ravel(row))
    lengths = [len(row) for own in rows.values() for row in own]
    usual = max(set(lengths), key=lengths.count) if lengths else 0
    return {client: np.mean(fitting, axis=0) for client, own in rows.items() if (fitting := [row for row in own if len(row) == usual])}


def alike(rows: Mapping[int, Array], groups: int) -> dict[int, int]:
    """A group for each client, by average linkage on the cosine distances of the rows about their mean."""
    clients, whole = list(rows), np.stack(list(rows.values()))
    centred = whole - whole.mean(axis=0)
    norms = np.linalg.norm(centred, axis=1, keepdims=True)
    unit = centred / np.where(norms > 0, norms, 1.0)
    tree = hierarchy.linkage(unit, "average", metric="euclidean")
    return dict(zip(clients, hierarchy.fcluster(tree, groups, "maxclust").tolist(), strict=True))


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """For each part that no other attack reads the share of clients whose group is known up to renaming."""
    figures, metric = [], "group_accuracy"
    for key in unread_keys(case.view, but=NAME):
        observed, reference = (rows_of_part(view, key) for view in (case.view, case.reference))
        clients = sorted((set(observed) & set(reference)) - set(case.view.coalition))
        if len(clients) < FEWEST:
            continue
        metric = f"{key[2].replace(' ', '_')}_group_accuracy"
        if len({case.truth.groups[client] for client in clients}) < 2:
            figures.append(nothing(case, NAME, metric, "the clients looked for are of one true group: no identity to find"))
            continue
        observed_groups, reference_groups = (
            alike({client: rows[client] for client in clients}, case.prior.groups) for rows in (observed, reference)
        )
        note = f"{key[0]} {key[1]}: groups up to renaming, their number known; baseline: the same groups dealt at random, or the largest"
        figures.append(group_cell(case, NAME, metric, (observed_groups, reference_groups), clients, margin=MARGIN, note=note))
    why = "every part of clients' data has an attack of its own" if data_parts(case.view) else "no number of clients' data is in this view"
    return figures or [nothing(case, NAME, metric, why)], None
