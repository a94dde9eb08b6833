"""Which cluster a client belongs to, or that it belongs to none, from unbiased products of clients' true means (`unbiased_gram`).

distances: a client's squared distance to the mean of a cluster without the client itself: unbiased, and negative values are
right. Divided by the noise that the client's halves show, it is a score that clients of few and of many samples share.

membership: the share of placed clients whose score in their own cluster is at least the client's score in the nearest (conformal p-value).
Assumption: the scores of the client in its true cluster and of all placed clients in theirs are exchangeable. Then a client of a known
cluster is held back with probability at most alpha, and p is at least 1 / (1 + placed clients). Exact for one cluster whose clients are
exchangeable; for several, as far as the scores of the clusters follow the same law. Since p is no smaller, with fewer than 1/alpha − 1
placed clients (19 at alpha = 0.05) nobody is held back.

joint test: clients that differ too little to be recognised one by one. The mean of their residuals, each against its nearest cluster, is
compared with that of the same number of members of the same clusters, drawn anew. Assumption: inside each cluster, the arrivals and the
members are exchangeable. Then a batch of arrivals that all belong to their clusters is rejected with probability at most alpha.

following: where a batch is rejected, an arrival is recognised by its residual along the mean of the others' residuals, at level alpha
against the members'; where clients opened a cluster one by one, the others join it by their residuals along the mean of its clients.

In all a client of a known cluster is held back, or joins an opened cluster, with probability at most 2 alpha: alpha by itself, and alpha
together with others.

agreement: unplaced clients are as near to each other as members of one cluster are.

Sources: conformal p-values: Vovk, Gammerman & Shafer 2005; products of halves: Walther et al. 2016.
"""

from dataclasses import dataclass

import numpy as np

from ..randomness import Stream
from ..types import Array

__all__ = ["LEAST", "UNPLACED", "Placement", "agreeing", "distances", "following", "joint_test", "membership", "place"]

UNPLACED = -1
"""The label of a client that belongs to no cluster."""
LEAST = 3
"""So many unplaced clients that agree open a cluster."""
DRAWS = 999
MOST_MEMBERS = 500
"""Clients are compared with so many members of known clusters at most, where each comparison takes the products of all."""
NEAR = 0.95
"""Two clients agree if they are no farther apart than this share of the pairs inside clusters."""
TINY = 1e-300


@dataclass(frozen=True, eq=False)
class Placement:
    """Of each client that was to be placed, in order: its `label` (`UNPLACED` for none; labels from k on are of opened clusters), the label
    of the `nearest` known cluster, and the p-value `p` of membership there. `joint_p`: that of the joint test, 1 where there was none.
    """

    labels: Array
    nearest: Array
    p: Array
    joint_p: float


def distances(products: Array, labels: Array, k: int) -> Array:
    """Squared distances (n, k) of clients to the means of clusters, each without the client itself; inf to a cluster without another.

    products: (n, n), unbiased for the inner products of the clients' true means, also on the diagonal. labels: (n,), `UNPLACED` for none.
    """
    member = (labels[None, :] == np.arange(k)[:, None]).astype(np.float64)  # (k, n)
    own, towards = np.diag(products)[:, None], products @ member.T
    within = np.einsum("kj,kj->k", member @ products, member)[None, :]
    inside, count = member.T, member.sum(1)[None, :]
    others = count - inside
    towards, within = towards - inside * own, within - inside * (2 * towards - own)
    with np.errstate(divide="ignore", invalid="ignore"):
        squares = own - 2 * towards / others + within / others**2
    return np.where(others > 0, squares, np.inf)


def scores(products: Array, noise: Array, labels: Array, k: int) -> Array:
    """The distances (n, k), each in units of its noise: of the client, and of the mean of the cluster without the client."""
    member = (labels[None, :] == np.arange(k)[:, None]).astype(np.float64)
    others = member.sum(1)[None, :] - member.T
    of_mean = ((member @ noise)[None, :] - member.T * noise[:, None]) / np.maximum(others, 1) ** 2
    return np.asarray(distances(products, labels, k) / np.maximum(noise[:, None] + of_mean, TINY))


def membership(products: Array, noise: Array, labels: Array, k: int) -> tuple[Array, Array]:
    """Of each unplaced client, in order: the label of the nearest cluster, and the conformal p-value of membership there."""
    unplaced = np.flatnonzero(labels == UNPLACED)
    placed = np.flatnonzero(labels != UNPLACED)
    of_all = scores(products, noise, labels, k)
    own = of_all[placed, labels[placed]]
    own = own[np.isfinite(own)]
    nearest = distances(products, labels, k)[unplaced].argmin(1)
    reached = of_all[unplaced, nearest]
    p = (1 + (own[None, :] >= reached[:, None]).sum(1)) / (1 + len(own))
    return nearest, p


def joint_test(products: Array, labels: Array, arrivals: Array, rng: Stream, draws: int = DRAWS) -> float:
    """The p-value of the hypothesis that arrivals, each with the label of its nearest cluster, are together as its members are.

    labels: (n,), of members and arrivals; other clients are `UNPLACED`. arrivals: positions.
    """
    arrived = np.isin(np.arange(len(labels)), arrivals)
    weights = _contrast(labels, arrived)
    observed = float(weights @ products @ weights)
    groups = [np.flatnonzero(labels == label) for label in np.unique(labels[arrivals])]
    drawn = np.empty((draws, len(labels)))
    for draw in range(draws):
        permuted = weights.copy()
        for group in groups:
            permuted[group] = weights[rng.permutation(group)]
        drawn[draw] = permuted
    null = np.einsum("dn,dn->d", drawn @ products, drawn)
    return (1 + int((null >= observed).sum())) / (1 + draws)


def following(products: Array, labels: Array, arrivals: Array, leading: Array) -> Array:
    """How far arrivals (positions) follow the `leading` ones: of each the conformal p-value of its residual along their mean residual.

    A client's residual is what it differs by from the mean of the members of its cluster. labels: as `joint_test`, also of leading ones.
    """
    leads = np.isin(np.arange(len(labels)), leading)
    members = np.flatnonzero((labels != UNPLACED) & ~leads & ~np.isin(np.arange(len(labels)), arrivals))
    is_member = np.isin(np.arange(len(labels)), members)
    members = members[:: -(-len(members) // MOST_MEMBERS) or 1]
    of_members = np.array([_along_others(products, labels, leads, is_member, int(client)) for client in members])
    of_arrivals = np.array([_along_others(products, labels, leads, is_member, int(client)) for client in arrivals])
    return np.asarray((1 + (of_members[None, :] >= of_arrivals[:, None]).sum(1)) / (1 + len(members)))


def _contrast(labels: Array, arrived: Array) -> Array:
    """Weights (n,) of the sum of the arrivals' residuals: each arrival less the mean of its cluster's members."""
    weights = arrived.astype(np.float64)
    for label in np.unique(labels[arrived]):
        members = (labels == label) & ~arrived
        weights[members] = -float((arrived & (labels == label)).sum()) / max(1, int(members.sum()))
    return weights


def _along_others(products: Array, labels: Array, leads: Array, is_member: Array, client: int) -> float:
    """The product of a client's residual with the mean residual of the leading clients, both otherwise without the client."""
    there = np.arange(len(labels)) != client
    leading, members = leads & there, is_member & there
    along = _contrast(np.where(leading | members, labels, UNPLACED), leading) / max(1, int(leading.sum()))
    own_cluster = members & (labels == labels[client])
    own = -own_cluster.astype(np.float64) / max(1, int(own_cluster.sum()))
    own[client] = 1.0
    return float(own @ products @ along)


def agreeing(products: Array, noise: Array, labels: Array, unplaced: Array, least: int = LEAST) -> list[Array]:
    """Sets of at least `least` unplaced clients (positions) that agree: each is near one of them, the one with the most near to it.

    Near: no farther, in units of the noise of both, than `NEAR` of the pairs inside clusters.
    """
    own = np.diag(products)
    apart = (own[:, None] + own[None, :] - 2 * products) / np.maximum(noise[:, None] + noise[None, :], TINY)
    same = (labels[:, None] == labels[None, :]) & (labels[:, None] != UNPLACED) & np.tri(len(labels), k=-1, dtype=bool)
    if not same.any():
        return []
    limit, left, opened = float(np.quantile(apart[same], NEAR)), unplaced, []
    while len(left) >= least:
        near = apart[np.ix_(left, left)] <= limit
        np.fill_diagonal(near, True)
        agree = near[near.sum(1).argmax()]
        if agree.sum() < least:
            break
        opened.append(left[agree])
        left = left[~agree]
    return opened


def place(
    products: Array, noise: Array, labels: Array, k: int, rng: Stream, *, alpha: float = 0.05, least: int = LEAST
) -> Placement:  # fmt: skip
    """Place the clients with the label `UNPLACED` in one of k clusters, in none, or in clusters that they open together.

    Clients that no cluster would have, one by one, open clusters where they agree; of the others those join that follow them. Where no
    cluster was opened, the others are tested together.

    products, labels: as `distances`. noise: (n,), E|error|² of each client's mean.
    """
    unplaced = np.flatnonzero(labels == UNPLACED)
    nearest, p = membership(products, noise, labels, k)
    made = np.where(p > alpha, nearest, UNPLACED)
    opened = agreeing(products, noise, labels, unplaced[made == UNPLACED], least)
    others, joint_p = np.flatnonzero(made != UNPLACED), 1.0
    known = labels.copy()
    known[unplaced] = made
    if opened and len(others):
        followed = np.empty((len(opened), len(others)))
        for number, group in enumerate(opened):
            at = np.isin(unplaced, group)
            with_group = known.copy()
            with_group[unplaced[at]] = nearest[at]
            followed[number] = len(opened) * following(products, with_group, unplaced[others], group)
        for place_, number in enumerate(followed.argmin(0)):
            if followed[number, place_] <= alpha:
                opened[number] = np.append(opened[number], unplaced[others[place_]])
    elif len(others) >= least:
        joint_p = joint_test(products, known, unplaced[others], rng)
        if joint_p <= alpha:
            made[others[following(products, known, unplaced[others], unplaced[others]) <= alpha]] = UNPLACED
            opened = agreeing(products, noise, labels, unplaced[made == UNPLACED], least)
    for number, group in enumerate(opened):
        made[np.isin(unplaced, group)] = k + number
    return Placement(made, nearest, p, joint_p)
