"""Cluster identity: which group a client belongs to, from which model it is sent, whom it is summed with, or which one it asks for.

Source: the traffic of every clustered system names clusters (PACFL sends cluster models, CFL and StoCFL too; IFCA's clients name theirs).

What it proves: whoever sees this learns the partition of the clients, which is the data's where the clustering works. What it does not:
what a group is about; names of groups take other knowledge, so clusters count up to renaming.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.cluster import hierarchy
from scipy.spatial.distance import squareform

from ..record import payload_rows
from ..types import Array
from .adversary import AdversaryView
from .leakage import Case, Cell, Truth, cell, dealt_at_random, grouping_accuracy, nothing

__all__ = ["cells", "clusters_in", "linked_clusters"]

NAME = "cluster_identity"
MARGIN = 0.1
RENUMBERED = ("cfl", "stocfl")
"""Algorithms whose clusters get new numbers when they merge or split."""


def clusters_in(view: AdversaryView) -> dict[int, int]:
    """The cluster of each client where traffic last named one. What is sent to all alike names none.

    One numbering is taken throughout: which of several models a client was sent, else the group of its sum, else the choice it told,
    else the labels that a key holder worked out.
    """
    sent: dict[int, int] = {}
    summed: dict[int, int] = {}
    told: dict[int, int] = {}
    made: dict[int, int] = {}
    enrolled: dict[int, list[int]] = {}
    for message in view.messages:
        which = message.context.get("which")
        if message.verb == "compute" and which is not None and len(which) == 1:
            sent |= dict.fromkeys(message.clients, int(which[0]))
        if message.verb == "mean" and "group" in message.context:
            summed |= dict.fromkeys(message.clients, int(message.context["group"]))
        if message.verb == "mean" and "labels" in message.context and len(message.context["labels"]) == len(message.clients):
            labels = message.context["labels"]
            if len({tuple(one) for one in labels}) > 1:
                summed |= {client: int(one[0]) for client, one in zip(message.clients, labels, strict=True) if one}
        if message.verb == "gather" and message.payload is not None and "choice" in message.payload:
            told |= {client: int(one) for client, one in zip(payload_rows(message), message.payload["choice"], strict=True)}
        if message.verb == "gram" and message.kind == "ckks enrolment":
            enrolled.setdefault(int(message.context.get("epoch", 0)), []).extend(message.clients)
        if message.verb == "gram" and message.kind == "result" and message.payload is not None and "labels" in message.payload:
            labels, everyone = message.payload["labels"], enrolled.get(int(message.context.get("epoch", 0)), [])
            if np.ndim(labels) == 1 and len(labels) == len(everyone):
                made = dict(zip(everyone, np.asarray(labels).astype(int).tolist(), strict=True))
    sources = (sent, summed, told, made)
    return max(sources, key=lambda found: (len(set(found.values())) > 1, len(found)))


def linked_clusters(view: AdversaryView) -> dict[int, int]:
    """The same where numbers do not last: clients are alike if they were in one cluster when they were last both in the traffic.

    Average linkage over pairs; those never seen together are counted half alike.
    """
    rounds: dict[int, dict[int, int]] = {}
    for message in view.messages:
        which = message.context.get("which")
        if message.verb == "compute" and which is not None and len(which) == 1:
            rounds.setdefault(message.round, {}).update(dict.fromkeys(message.clients, int(which[0])))
    clients = sorted({client for labels in rounds.values() for client in labels})
    place = {client: i for i, client in enumerate(clients)}
    apart = np.full((len(clients), len(clients)), 0.5)
    for number in sorted(rounds):
        here = sorted(rounds[number])
        labels, rows = np.array([rounds[number][client] for client in here]), [place[client] for client in here]
        apart[np.ix_(rows, rows)] = labels[:, None] != labels[None]
    if len(clients) < 2:
        return dict.fromkeys(clients, 0)
    np.fill_diagonal(apart, 0.0)
    found = hierarchy.fcluster(hierarchy.linkage(squareform(apart), "average"), 0.499, "distance")
    return dict(zip(clients, found.tolist(), strict=True))


def guess(view: AdversaryView, clients: Sequence[int], algorithm: str = "") -> Mapping[int, int]:
    """A cluster for each client; one for all where nothing names any."""
    seen = linked_clusters(view) if algorithm in RENUMBERED else clusters_in(view)
    return {client: seen.get(client, -1) for client in clients}


def score(guessed: Mapping[int, int], truth: Truth, clients: Sequence[int]) -> Array:
    """1 where a client's cluster is its group, under the best naming."""
    return grouping_accuracy(np.array([guessed[c] for c in clients]), np.array([truth.groups[c] for c in clients]))


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """The share of clients whose group is known up to renaming."""
    metric, groups = "group_accuracy", case.truth.groups
    clients = sorted(set(groups) - set(case.view.coalition))
    algorithm = "" if case.prior.config is None else str(case.prior.config.algorithm["name"])
    mine, theirs = (guess(view, clients, algorithm) for view in (case.view, case.reference))
    if len({groups[c] for c in clients}) < 2:
        return [nothing(case, NAME, metric, "there is one true group: no identity to find")], None
    if len(set(theirs.values())) < 2 and len(set(mine.values())) < 2:
        return [nothing(case, NAME, metric, "no message of this view names a cluster, nor does one without protection")], None
    names = np.array([groups[c] for c in clients])
    largest = np.bincount(np.unique(names, return_inverse=True)[1]).max() / len(names)
    blank = [np.maximum(dealt_at_random(np.array(list(one.values())), names, case.seed), largest) for one in (mine, theirs)]
    note = "up to renaming; baseline: the same clusters dealt at random, or everybody in the largest group, whichever is more"
    scores = [score(one, case.truth, clients) for one in (mine, theirs)]
    made = cell(case, NAME, metric, scores[0], blank[0], scores[1], theirs_blank=blank[1], margin=MARGIN, note=note)
    return [made], None
