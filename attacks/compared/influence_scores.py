"""Influence scores: the groups behind pFedLIA's N × N scores.

Source: Rokvic, Danassis & Faltings 2025, Sections III-D to III-F: client i's score of client j is how much j's update lowers i's validation
loss. Scores are high among clients with like data, which is their purpose; so whoever gathers them learns which clients are alike.

What it proves: the scores reveal the partition without models or data. What it does not: what a group is about.
"""

import numpy as np
from scipy.cluster import hierarchy
from scipy.spatial.distance import squareform

from ...contract.transcript import payload_rows
from ...types import Array
from ..adversary import AdversaryView
from ..figures.leakage import Case, Cell, group_cell, nothing, one_group

__all__ = ["cells", "groups_from_scores", "scores_in"]

NAME = "influence"
MARGIN = 0.1


def groups_from_scores(scores: Array, groups: int) -> Array:
    """Labels (n,) from scores (n, n), one row a scoring client: average linkage on ranks within rows, made symmetric.

    Ranks, because clients' losses differ in scale. A client's score of itself is ignored.
    """
    values = np.asarray(scores, dtype=np.float64).copy()
    n = len(values)
    np.fill_diagonal(values, np.nan)
    ranks = np.zeros((n, n))
    for i in range(n):
        others = np.arange(n) != i
        smaller = (values[i, others][:, None] > values[i, others][None]).sum(axis=1)
        equal = (values[i, others][:, None] == values[i, others][None]).sum(axis=1)
        ranks[i, others] = (smaller + (equal - 1) / 2) / max(1, n - 2)
    distance = 1.0 - (ranks + ranks.T) / 2
    np.fill_diagonal(distance, 0.0)
    tree = hierarchy.linkage(squareform(distance, checks=False), "average")
    return np.asarray(hierarchy.fcluster(tree, groups, "maxclust"))


def scores_in(view: AdversaryView) -> tuple[tuple[int, ...], Array] | None:
    """Clients, and the scores (n, n) that they gave each other, as gathered (or who took whom, where only that was gathered)."""
    for message in view.select("gather"):
        for name in ("scores", "neighbours"):
            if message.payload is not None and name in message.payload:
                rows, clients = np.asarray(message.payload[name], dtype=np.float64), payload_rows(message)
                if rows.shape == (len(clients), len(clients)):
                    return clients, rows
    return None


def guess(view: AdversaryView, groups: int) -> dict[int, int]:
    """A group for each client."""
    client_scores = scores_in(view)
    assert client_scores is not None  # checked by the caller
    clients, scores = client_scores
    return dict(zip(clients, groups_from_scores(scores, groups).tolist(), strict=True))


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """The share of clients whose group is known up to renaming."""
    metric = "group_accuracy"
    observed, reference = scores_in(case.view), scores_in(case.reference)
    if observed is None or reference is None or len(observed[0]) < 3:
        return [nothing(case, NAME, metric, "no scores of clients by clients are in this view")], None
    clients = sorted((set(observed[0]) & set(reference[0])) - set(case.view.coalition))
    if not case.truth.groups_known or len({case.truth.groups[client] for client in clients}) < 2:
        return [nothing(case, NAME, metric, f"{one_group(case)}: no identity to find")], None
    found = guess(case.view, case.prior.groups), guess(case.reference, case.prior.groups)
    note = "up to renaming, number of groups known; baseline: the same groups dealt at random, or everybody in the largest if that is more"
    return [group_cell(case, NAME, metric, found, clients, margin=MARGIN, note=note)], None
