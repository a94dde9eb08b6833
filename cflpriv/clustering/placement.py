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

combined score: where a batch is rejected, or some clients open a cluster, a client's score is its residual along the mean residual of these
clients, without the client itself, and a quarter of its distance. Both are in units of their spread among the members. Its conformal
p-value takes the place of membership. So each client is held back by one test at level alpha, alone or together with others. The batch
decides which test it is, so the level of a single client in a mixed batch is measured (`benchmarks.drift`), not proved.

outliers: a member whose data changed without being named would hide all arrivals, since no p-value could fall below its own. So members
farther from their cluster than `FAR` are not compared with. Of 1,600 clients of true groups none was (`FAR` = 6; largest: 5.8).

agreement: unplaced clients are as near to each other as members of one cluster are.

Sources: conformal p-values: Vovk, Gammerman & Shafer 2005; products of halves: Walther et al. 2016.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..randomness import Stream
from ..types import Array

__all__ = ["LEAST", "UNPLACED", "Placement", "agreeing", "distances", "joint_test", "membership", "place", "residuals_along"]

UNPLACED = -1
"""The label of a client that belongs to no cluster."""
LEAST = 3
"""So many unplaced clients that agree open a cluster."""
DRAWS = 999
OF_DISTANCE = 0.25
"""The weight of the distance beside the residual in the combined score: clients of a further unseen group, which do not follow, lie far."""
FAR = 6.0
"""So many robust standard deviations above the median score no member of its true cluster lies."""
NEAR = 0.95
"""Two clients agree if they are no farther apart than this share of the pairs inside clusters."""
NORMAL = 1.4826
"""The standard deviation of a normal law by its median absolute deviation."""
TINY = 1e-300


@dataclass(frozen=True, eq=False)
class Placement:
    """Of each client that was to be placed, in order: its `label` (`UNPLACED` for none; labels from k on are of opened clusters), the label
    of the `nearest` known cluster, and the p-value `p` of the test that placed it. `joint_p`: that of the joint test, 1 if there was none.
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


def membership(products: Array, noise: Array, labels: Array, k: int, arrivals: Array) -> tuple[Array, Array]:
    """Of each arrival (position, unplaced) the label of the nearest cluster, and the conformal p-value of membership there."""
    nearest = distances(products, labels, k)[arrivals].argmin(1)
    own = _own_scores(products, noise, labels, k)
    return nearest, _conformal(own, arrivals, _calibrating(own, labels))


def _own_scores(products: Array, noise: Array, labels: Array, k: int) -> Array:
    """The score (n,) of each client in its own cluster, of unplaced ones in the nearest; inf in a cluster without another."""
    own = np.where(labels == UNPLACED, distances(products, labels, k).argmin(1), labels)
    return np.asarray(scores(products, noise, labels, k)[np.arange(len(own)), own])


def _without_outliers(products: Array, noise: Array, labels: Array, k: int) -> Array:
    """The labels, where members that lie far from their clusters have none."""
    own = _own_scores(products, noise, labels, k)
    members = _calibrating(own, labels)
    kept = labels.copy()
    if len(members):
        kept[members[_standardised(own[members]) > FAR]] = UNPLACED
    return kept


def _calibrating(own: Array, labels: Array) -> Array:
    """The placed clients (positions) that have a score."""
    return np.flatnonzero((labels != UNPLACED) & np.isfinite(own))


def _conformal(values: Array, arrivals: Array, members: Array) -> Array:
    """Of each arrival the share of members, and of itself, whose value is at least the arrival's."""
    ordered = np.sort(values[members])
    at_least = len(ordered) - np.searchsorted(ordered, values[arrivals], side="left")
    return np.asarray((1 + at_least) / (1 + len(ordered)))


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


def _contrast(labels: Array, arrived: Array) -> Array:
    """Weights (n,) of the sum of the arrivals' residuals: each arrival less the mean of its cluster's members."""
    weights = arrived.astype(np.float64)
    for label in np.unique(labels[arrived]):
        members = (labels == label) & ~arrived
        weights[members] = -float((arrived & (labels == label)).sum()) / max(1, int(members.sum()))
    return weights


def residuals_along(products: Array, noise: Array, labels: Array, arrivals: Array, leading: Array) -> Array:
    """Of each client (n,) the product of its residual with the mean residual of the leading clients, in units of the residual's noise.

    A client's residual is what it differs by from the mean of the members of its cluster. Both residuals are without the client itself;
    nan where nothing is left. labels, arrivals: as `joint_test`. leading: positions, some of the arrivals.
    """
    is_arrival, leads = np.isin(np.arange(len(labels)), arrivals), np.isin(np.arange(len(labels)), leading)
    has = labels != UNPLACED
    of_cluster = (labels[None, :] == np.arange(labels.max() + 1)[:, None]) & ~is_arrival  # (k, n)
    count, led = of_cluster.sum(1), np.array([(leads & (labels == label)).sum() for label in range(len(of_cluster))])
    means = of_cluster / np.maximum(count, 1)[:, None]
    weights = (leads - led @ means) / max(1, int(leads.sum()))
    towards, within, along = means @ products, np.einsum("kn,kn->k", means @ products, means), products @ weights
    own, at = np.where(has, labels, 0), np.arange(len(labels))
    squares = np.diag(products) - 2 * towards[own, at] + within[own]  # of residuals from the mean with the client
    product = along - (means @ along)[own]
    others = np.maximum(count[own] - 1, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        as_member = (1 + 1 / others) * (product + led[own] / max(1, int(leads.sum())) * squares / others)
        as_lead = (leads.sum() * product - squares) / (leads.sum() - 1)
    made = np.where(leads, as_lead, np.where(is_arrival, product, as_member))
    of_means = (of_cluster @ noise)[own]
    spread = np.where(is_arrival, of_means / np.maximum(count[own], 1) ** 2, (of_means - noise) / others**2)
    left = np.where(is_arrival, count[own] > 0, count[own] > 1) & has & (~leads | (leads.sum() > 1))
    return np.where(left, made / np.sqrt(np.maximum(noise + spread, TINY)), np.nan)


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

    Each is held back by one test at level alpha: alone, or together where some open a cluster or the joint test rejects the others. Clients
    that are held back open clusters where they agree, and join the clusters that they follow.

    products, labels: as `distances`. noise: (n,), E|error|² of each client's mean.
    """
    unplaced = np.flatnonzero(labels == UNPLACED)
    labels = _without_outliers(products, noise, labels, k)
    nearest, p = membership(products, noise, labels, k, unplaced)
    known = labels.copy()
    known[unplaced] = nearest
    far, near = unplaced[p <= alpha], unplaced[p > alpha]
    leading, joint_p = agreeing(products, noise, labels, far, least), 1.0
    if not leading and len(near) >= least:
        joint_p = joint_test(products, np.where(np.isin(np.arange(len(labels)), far), UNPLACED, known), near, rng)
        leading = [unplaced] if joint_p <= alpha else []
    if leading:
        own = _own_scores(products, noise, labels, k)
        p = _combined_p(own, [residuals_along(products, noise, known, unplaced, group) for group in leading], unplaced, labels)
    held_back = unplaced[p <= alpha]
    opened = agreeing(products, noise, labels, held_back, least)
    made = np.where(p > alpha, nearest, UNPLACED)
    members = np.flatnonzero(labels != UNPLACED)
    follow = [_conformal_along(residuals_along(products, noise, known, unplaced, group), held_back, members) for group in opened]
    for number, group in enumerate(opened):
        joins = held_back[(follow[number] <= alpha) & (np.min(follow, axis=0) == follow[number])]
        made[np.isin(unplaced, np.union1d(group, np.setdiff1d(joins, np.concatenate(opened))))] = k + number
    return Placement(made, nearest, p, joint_p)


def _combined_p(own: Array, along: Sequence[Array], arrivals: Array, labels: Array) -> Array:
    """Of each arrival the conformal p-value of the combined score: the farthest residual, and a part of its own score."""
    members = _calibrating(own + np.sum(along, axis=0), labels)
    p = np.empty(len(arrivals))
    for place_, arrival in enumerate(arrivals):
        pool = np.append(members, arrival)
        far = np.max([_standardised(values[pool]) for values in along], axis=0) + OF_DISTANCE * _standardised(own[pool])
        p[place_] = (far >= far[-1]).mean()
    return p


def _conformal_along(along: Array, arrivals: Array, members: Array) -> Array:
    """As `_conformal`, of clients that have a residual; 1 for arrivals that have none."""
    p = _conformal(along, arrivals, members[np.isfinite(along[members])])
    return np.where(np.isfinite(along[arrivals]), p, 1.0)


def _standardised(values: Array) -> Array:
    """Values less their median, in robust standard deviations: `NORMAL` median absolute deviations; 0 for nan."""
    apart = np.nan_to_num(values - np.nanmedian(values), posinf=np.inf)
    return np.asarray(apart / max(NORMAL * float(np.median(abs(apart))), TINY))
