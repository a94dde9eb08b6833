"""Cluster identity: a client's group, from the model it is sent, the clients it is summed with, or the model it asks for.

Source: the traffic of every clustered system names clusters (PACFL, CFL and StoCFL send cluster models; IFCA's clients name their choice).
Oblivious sums name no cluster, but the server learns the size of each group in a round's cohort. If clients stay in their groups, the sizes
are linear equations in the clients' groups, with a row for each round's cohort: differencing, of sizes in place of values.

What it proves: a party that sees this traffic learns the partition of the clients, which is the data's if the clustering works. What it
does not prove: what a group is about. Clusters count up to renaming, since names of groups take other knowledge. The attack on sizes
assumes that no client changes its group; a better attack would allow for changes.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.cluster import hierarchy
from scipy.spatial.distance import squareform

from ...contract.transcript import payload_rows
from ...randomness import stream
from ...types import Array
from ..adversary import AdversaryView
from ..evidence.sums import oblivious_sizes
from ..evidence.updates import of_several, public_model
from ..figures.leakage import Case, Cell, group_cell, nothing, one_group

__all__ = ["cells", "clusters_from_sizes", "clusters_in", "linked_clusters"]

NAME = "cluster_identity"
MARGIN = 0.1
UNNAMED = -1


def clusters_in(view: AdversaryView) -> dict[int, int]:
    """The cluster of each client where traffic last named one. What is sent to all alike names none.

    One numbering is taken throughout: which of several models a client was sent, else the group of its sum, else the choice it reported,
    else the labels that a key holder computed.
    """
    sent: dict[int, int] = {}
    summed: dict[int, int] = {}
    reported: dict[int, int] = {}
    made: dict[int, int] = {}
    enrolled: dict[int, list[int]] = {}
    for message in view.messages:
        which = message.context.get("which")
        if message.operation == "compute" and which is not None and len(which) == 1:
            sent |= dict.fromkeys(message.clients, int(which[0]))
        if message.operation == "mean" and "group" in message.context:
            summed |= dict.fromkeys(message.clients, int(message.context["group"]))
        if message.operation == "mean" and "labels" in message.context and len(message.context["labels"]) == len(message.clients):
            labels = message.context["labels"]
            if len({tuple(picks) for picks in labels}) > 1:
                summed |= {client: int(picks[0]) for client, picks in zip(message.clients, labels, strict=True) if picks}
        if message.operation == "gather" and message.payload is not None and "choice" in message.payload:
            reported |= {client: int(choice) for client, choice in zip(payload_rows(message), message.payload["choice"], strict=True)}
        if message.operation == "gram" and message.kind == "ckks enrolment":
            enrolled.setdefault(int(message.context.get("epoch", 0)), []).extend(message.clients)
        if message.operation == "gram" and message.kind == "result" and message.payload is not None and "labels" in message.payload:
            labels, everyone = message.payload["labels"], enrolled.get(int(message.context.get("epoch", 0)), [])
            if np.ndim(labels) == 1 and len(labels) == len(everyone):
                made = dict(zip(everyone, np.asarray(labels).astype(int).tolist(), strict=True))
    sources = (sent, summed, reported, made)
    return max(sources, key=lambda clusters: (len(set(clusters.values())) > 1, len(clusters)))


def linked_clusters(view: AdversaryView) -> dict[int, int]:
    """The same where numbers do not last: clients are alike if they were in one cluster when they were last both in the traffic.

    Average linkage over pairs; those never seen together are counted half alike.
    """
    rounds: dict[int, dict[int, int]] = {}
    for message in view.messages:
        which = message.context.get("which")
        if message.operation == "compute" and which is not None and len(which) == 1:
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
    assigned = hierarchy.fcluster(hierarchy.linkage(squareform(apart), "average"), 0.499, "distance")
    return dict(zip(clients, assigned.tolist(), strict=True))


def clusters_from_sizes(cohorts: Array, sizes: Array, seed: int = 0, starts: int = 20) -> Array:
    """The groups (n,) of clients with fixed groups, from the group `sizes` (m, k) in each of m cohorts (NaN: not known).

    `cohorts` (m, n) is 1 where a client took part. Least squares over assignments, by coordinate descent from random starts.
    """
    member, known = np.asarray(cohorts, np.float64), np.isfinite(sizes)
    target, (n, k) = np.where(known, sizes, 0.0), (member.shape[1], sizes.shape[1])
    rng = stream(seed, "groups from sizes")
    best, lowest = np.zeros(n, dtype=np.int64), np.inf
    for start in range(1 + starts):
        chosen = np.asarray(rng.integers(k, size=n) if start else _by_least_squares(member, target, known))
        left: Array = target - member @ np.eye(k)[chosen]  # what is not explained yet
        for _ in range(100):
            before = chosen.copy()
            for i in rng.permutation(n):
                left[:, chosen[i]] += member[:, i]
                chosen[i] = (member[:, i] @ (known * (1.0 - 2.0 * left))).argmin()
                left[:, chosen[i]] -= member[:, i]
            if np.array_equal(before, chosen):
                break
        cost = float((left[known] ** 2).sum())
        if cost < lowest:
            best, lowest = chosen, cost
        if lowest == 0.0:
            break
    return best


def _by_least_squares(member: Array, target: Array, known: Array) -> Array:
    """The group of largest weight (n,), where weights solve the equations of each group alone; one that is never known has the rest."""
    weights = np.full((member.shape[1], target.shape[1]), np.nan)
    for group, rows in enumerate(known.T):
        if rows.any():
            weights[:, group] = np.linalg.lstsq(member[rows], target[rows, group], rcond=None)[0]
    rest = 1.0 - np.nansum(weights, axis=1, keepdims=True)
    return np.asarray(np.where(np.isnan(weights), rest, weights).argmax(axis=1))


def clusters_by_sizes(view: AdversaryView, seed: int) -> dict[int, int]:
    """The cluster of each client that took part in an oblivious sum, from the sizes of groups; nothing of a view without such sums."""
    seen = oblivious_sizes(view)
    clients = sorted({client for report in seen for client in report.cohort})
    labels = sorted({label for report in seen for label in report.counts})
    if len(labels) < 2:
        return {}
    cohorts = np.array([[client in report.cohort for client in clients] for report in seen], dtype=np.float64)
    sizes = np.array([[report.counts.get(label, 0 if report.whole else np.nan) for label in labels] for report in seen])
    return dict(zip(clients, clusters_from_sizes(cohorts, sizes, seed).tolist(), strict=True))


def guess(view: AdversaryView, clients: Sequence[int], renumbered: bool = False, seed: int = 0) -> Mapping[int, int]:
    """A cluster for each client; one for all where nothing names any. `renumbered`: clusters get new numbers when they merge or split."""
    seen = linked_clusters(view) if renumbered else clusters_in(view)
    seen = seen or clusters_by_sizes(view, seed)
    return {client: seen.get(client, UNNAMED) for client in clients}


def were_compared(view: AdversaryView) -> bool:
    """Whether clients were compared, or chose, so that a single cluster is a finding and not the only possibility."""
    return any(
        message.operation == "gram" or (message.operation == "gather" and "choice" in (message.payload or {})) for message in view.messages
    )


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """The share of clients whose group is known up to renaming."""
    metric, groups = "group_accuracy", case.truth.groups
    clients = sorted(set(groups) - set(case.view.coalition))
    renumbered = case.prior.config is not None and case.prior.config.spec.renumbers
    observed, reference = (guess(view, clients, renumbered, case.seed) for view in (case.view, case.reference))
    if not case.truth.groups_known or len({groups[c] for c in clients}) < 2:
        return [nothing(case, NAME, metric, f"{one_group(case)}: no identity to find")], None
    named = len(set(observed.values())) > 1
    if not named and case.prior.config is not None and of_several(case.view, public_model(case.prior).dimension):
        words = "not attempted: no message names a cluster, but what each client sends for every cluster's model tells how it is mixed"
        return [nothing(case, NAME, metric, words)], None
    if set(observed.values()) == {UNNAMED}:
        return [nothing(case, NAME, metric, "no message of this view names a client's cluster")], None
    if not named and not (were_compared(case.view) or were_compared(case.reference)):
        return [nothing(case, NAME, metric, "all clients are sent the same model and summed together: no cluster is named")], None
    note = "up to renaming; baseline: the same clusters dealt at random, or everybody in the largest group, whichever is more"
    if rounds := len(oblivious_sizes(case.view)):
        note = f"no message names a cluster; inferred from the sizes of the groups in the cohorts of {rounds} round(s); {note}"
    return [group_cell(case, NAME, metric, (observed, reference), clients, margin=MARGIN, note=note)], None
