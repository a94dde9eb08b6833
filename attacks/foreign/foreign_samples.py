"""Check the samples of an audit of another system: scales, duplicates, and whether auxiliary labels belong to their samples.

What correct input would need to fail, with its probability:

- scale: more than `BEYOND` of a set's values outside the range of the set that it is compared with, widened by `SLACK`, in all clients or
  in data with hard bounds (pixels); or more than `FAR` of them beyond a whole further width. Values of one distribution are outside the
  range of n ≥ 64 others with probability 2 / (n + 1) each.
- duplicates: at least two equal rows, and more than `SHARED` of a set, where rows of one set do not repeat by themselves; between two
  clients `HALF` of a set; within a set of `FEWEST_TWICE` all rows (of a bootstrap sample all rows repeat with p < 1e-3).
- repeated: more than half of the samples outside repeat others, where auxiliary samples do not;
- near members: more than `SHARED` of a set are nearer to a member than `NEAR` of the median distance of two neighbours in the auxiliary
  samples, where at most `WITHIN` are as near to each other;
- apart: of members, and of samples outside, in labels that both have, more than `RECOGNISED` are nearest to their own set, and as many as
  at `APART_DEVIATIONS` deviations of random sets, so that the sets are told apart without the model;
- labels: nearest neighbours among clients' samples predict the clients' own labels, but those of auxiliary samples less than half as well
  (`DEVIATIONS` standard errors), and no better than after a permutation of their labels (p > `CHANCE`); or `FEWEST_NAMED` samples of one
  label have neighbours of one other in more than `KNOWN`, where clients' samples of both have neighbours of their own; or
  `FEWEST_AUXILIARY` auxiliary samples have less than half of the clients' labels.
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np
from scipy import stats

from ...types import Array
from .foreign_system import System

__all__ = ["apart_samples", "mislabelled", "misplaced", "nearly_members", "repeated_samples", "unlabelled"]

FEWEST_VALUES = 64
SLACK, BEYOND, FAR = 0.05, 0.2, 0.03
NARROW = 1 / 20
"""A set is too narrow if the middle 98 % of its values span less than this share of those of the other set."""
BOUNDED = 0.01
"""Data are bounded if more than this share of values, and five at least, is at an end of the range exactly."""
SHARED, WITHIN, HALF = 0.05, 0.02, 0.5
NEAR = 0.05
RECOGNISED, APART_DEVIATIONS, SPREAD_CHANCE = 0.8, 6.0, 1e-6
FEWEST_ROWS, FEWEST_TWICE = 4, 10
GRID = 1e-6
"""Rows are equal if they are equal after rounding to this, on the scale on which auxiliary samples are."""
MOST_NEIGHBOURS = 2000
FEWEST_QUERIES = 20
DEVIATIONS, CHANCE, FEWEST_KNOWN = 4.0, 1e-3, 0.1
PERMUTATIONS = 1999
FEWEST_NAMED, KNOWN, STRANGE = 8, 0.7, 0.1
FEWEST_AUXILIARY = 50

Samples = tuple[Array, Array]


# --- scale --------------------------------------------------------------------------------------------------------------------------


def _outside(values: Array, reference: Array) -> tuple[float, float]:
    """The shares of values outside the range of the reference, and beyond it by a whole width."""
    low, high = float(reference.min()), float(reference.max())
    width = high - low
    if width <= 0 or min(values.size, reference.size) < FEWEST_VALUES:
        return 0.0, 0.0
    edge = SLACK * width
    return float(np.mean((values < low - edge) | (values > high + edge))), float(np.mean((values < low - width) | (values > high + width)))


def _width(values: Array) -> float:
    low, high = np.quantile(values, [0.01, 0.99])
    return float(high - low)


def _is_bounded(values: Array) -> bool:
    at_ends = int(np.count_nonzero((values == values.min()) | (values == values.max())))
    return at_ends >= max(5, BOUNDED * values.size)


def _range(values: Array) -> str:
    return f"{float(values.min()):.3g} to {float(values.max()):.3g}"


def misplaced(system: System) -> str:
    """Samples of clients, non-members and auxiliary samples that are on different scales."""
    prior, truth = system.case.prior, system.case.truth
    if system.model is not None and system.model.words:
        return ""
    if len(prior.y):
        held = set(prior.y.tolist())
        clients = {client: x[np.isin(y, list(held))] for client, (x, y) in truth.data.items()}
        if reason := _misplaced({f"client {c}": x for c, x in clients.items() if len(x)}, prior.x, "the auxiliary samples"):
            return reason
        nobody = {f"client {c}, outside": x[np.isin(y, list(held))] for c, (x, y) in truth.outside.items()}
        if reason := _misplaced({name: x for name, x in nobody.items() if len(x)}, prior.x, "the auxiliary samples"):
            return reason
        if clients:
            pooled, known = np.concatenate([x.reshape(-1) for x, _ in truth.data.values()]), {*_labels(system)}
            if reason := _misplaced({"auxiliary": prior.x[np.isin(prior.y, list(known))]}, pooled, "the clients' samples"):
                return reason
    for client, (x, y) in truth.outside.items():
        if client in truth.data:
            own, labels = truth.data[client]
            alike = {f"client {client}, outside": x[np.isin(y, np.unique(labels))]}
            if len(alike[f"client {client}, outside"]) and (reason := _misplaced(alike, own, "the client's own samples")):
                return reason
    return ""


def _misplaced(sets: dict[str, Array], reference: Array, name: str) -> str:
    """Why sets of samples are not on the scale of the reference, which has this name; "" if they are."""
    if not sets or reference.size < FEWEST_VALUES:
        return ""
    shares = {where: _outside(values, reference) for where, values in sets.items() if values.size}
    everywhere, bounded = all(beyond > BEYOND for beyond, _ in shares.values()), _is_bounded(reference)
    usual = _width(reference)
    for where, (beyond, far) in shares.items():
        narrow = sets[where].size >= FEWEST_VALUES and usual > 0 and 0 < _width(sets[where]) < NARROW * usual
        if (beyond > BEYOND and (everywhere or bounded)) or far > FAR or narrow:
            return (
                f"{where}: x has values of {_range(sets[where])}, where {name} have {_range(reference)} (on the scale on which auxiliary "
                "samples are 0 to 1, if they are beyond): give all samples as the model takes them, in one scale"
            )
    return ""


def _labels(system: System) -> set[int]:
    return {int(label) for _, y in system.case.truth.data.values() for label in np.unique(y)}


# --- duplicates ---------------------------------------------------------------------------------------------------------------------


def _rows(x: Array) -> list[bytes]:
    flat = np.asarray(x, np.float64).reshape(len(x), -1)
    return [row.tobytes() for row in np.rint(flat / GRID)]


def _repeats(rows: list[bytes]) -> float:
    """The share of rows that repeat another of the set."""
    return 1 - len(set(rows)) / max(len(rows), 1)


def repeated_samples(system: System) -> str:
    """Rows that are members and non-members at once, auxiliary samples that clients trained on, and data of one client given to another."""
    truth, prior = system.case.truth, system.case.prior
    members = {client: _rows(x) for client, (x, _) in truth.data.items()}
    auxiliary = _rows(prior.x) if len(prior.y) else []
    outside = {client: _rows(x) for client, (x, _) in truth.outside.items()}
    sets = (auxiliary,) if len(auxiliary) >= FEWEST_QUERIES else (auxiliary, *outside.values())
    natural = max((_repeats(rows) for rows in sets), default=0.0)
    for client, rows in outside.items():  # as they are: such sets are equal in data that repeat, too
        if len(rows) >= FEWEST_ROWS and rows == members.get(client):
            return f"client {client}: outside is the same as x; give samples that nobody trained on"
    if natural > WITHIN:  # rows repeat by themselves
        return ""
    trained = {row for rows in members.values() for row in rows}
    for client, rows in outside.items():
        if len(rows) >= FEWEST_ROWS and _repeats(rows) > HALF:
            return f"client {client}: {len(rows) - len(set(rows))} of the {len(rows)} samples outside repeat others; give each sample once"
        if (reason := _shared(rows, trained)) is not None:
            return f"client {client}: {reason} of outside are among the clients' samples x; give samples that nobody trained on"
    if (reason := _shared(auxiliary, trained)) is not None:
        return f"auxiliary: {reason} are among the clients' samples x; give samples that no client trained on"
    for client, rows in members.items():
        if len(rows) >= FEWEST_TWICE and min(Counter(rows).values()) > 1:
            return f"client {client}: {len(rows) - len(set(rows))} of the {len(rows)} samples x repeat others; give each sample once"
    names = list(members)
    for place, one in enumerate(names):
        for other in names[place + 1 :]:
            fewer = min(len(members[one]), len(members[other]))
            both = len(set(members[one]) & set(members[other]))
            if fewer >= FEWEST_ROWS and both >= HALF * fewer:
                return f"clients {one} and {other}: {both} of their samples x are the same; give each client its own samples"
    return ""


def _shared(rows: list[bytes], trained: set[bytes]) -> str | None:
    count = sum(row in trained for row in rows)
    return f"{count} of the {len(rows)} samples" if count >= 2 and count >= SHARED * len(rows) else None


# --- distances ----------------------------------------------------------------------------------------------------------------------


def _pooled(pairs: Mapping[int, Samples]) -> Samples:
    """The samples (n, d) and labels (n,) of several clients, some of them where there are many."""
    x = np.concatenate([np.asarray(x, np.float64).reshape(len(x), -1) for x, _ in pairs.values()])
    y = np.concatenate([y for _, y in pairs.values()])
    kept = np.random.default_rng(0).permutation(len(y))[:MOST_NEIGHBOURS]
    return x[kept], y[kept]


def nearly_members(system: System) -> str:
    """Non-members and auxiliary samples that are members after a rounding or with a little noise."""
    truth, prior = system.case.truth, system.case.prior
    if not truth.data or len(prior.y) < FEWEST_QUERIES or (system.model is not None and system.model.words):
        return ""
    known = np.asarray(prior.x[:MOST_NEIGHBOURS], np.float64).reshape(len(prior.y[:MOST_NEIGHBOURS]), -1)
    within = _distances(known, known)
    np.fill_diagonal(within, np.inf)
    usual = np.sqrt(within.min(axis=1))
    near = NEAR * float(np.median(usual))
    if near <= 0 or np.mean(usual < near) > WITHIN:
        return ""
    members, _ = _pooled(truth.data)
    sets = {"auxiliary": known}
    if truth.outside:
        sets["outside"] = _pooled(truth.outside)[0]
    for name, rows in sets.items():
        count = int((np.sqrt(_distances(rows, members).min(axis=1)) < near).sum())
        if count >= 2 and count >= SHARED * len(rows):
            return f"{name}: {count} of {len(rows)} samples are nearly the same as a client's; give samples that no client trained on"
    return ""


def apart_samples(system: System) -> str:
    """Samples outside that differ from members by themselves, so that anybody sees members without the model."""
    truth = system.case.truth
    both = {client: truth.outside[client] for client in truth.outside if client in truth.data}
    if not both or (system.model is not None and system.model.words):
        return ""
    (x, y), (other, labels) = _pooled({client: truth.data[client] for client in both}), _pooled(both)
    if _spreads_apart((x, y), (other, labels)):
        return (
            "outside: samples of the same labels are as far from their mean as members are with p < 1e-6 only, so that members are known "
            "without the model; give samples of the clients' distribution, in the same form"
        )
    x, other = x[np.isin(y, labels)], other[np.isin(labels, y)]
    if min(len(x), len(other)) < FEWEST_QUERIES:
        return ""
    rows, of_outside = np.concatenate([x, other]), np.arange(len(x) + len(other)) >= len(x)
    distance = _distances(rows, rows)
    distance += 1e-9 * np.random.default_rng(0).random(distance.shape) * float(np.median(distance))  # equal distances in any order
    np.fill_diagonal(distance, np.inf)
    agrees = of_outside[distance.argmin(axis=1)] == of_outside
    for own in (of_outside, ~of_outside):
        chance = (own.sum() - 1) / (len(rows) - 1)
        deviation = np.sqrt(chance * (1 - chance) / own.sum())
        if agrees[own].mean() < max(RECOGNISED, chance + APART_DEVIATIONS * deviation):
            return ""
    return (
        f"outside: samples differ from members by themselves: of {agrees.mean():.0%} the nearest other sample is of their own set, so that "
        "members are known without the model; give samples of the clients' distribution, in the same form"
    )


def _spreads_apart(one: Samples, other: Samples) -> bool:
    """Whether two sets differ in their samples' distances from the mean of their label, by a Kolmogorov-Smirnov test."""
    found: list[tuple[Array, Array]] = []
    for label in np.unique(one[1]):
        a, b = one[0][one[1] == label], other[0][other[1] == label]
        if min(len(a), len(b)) < FEWEST_ROWS:
            continue
        rows = np.concatenate([a, b])
        far = np.linalg.norm(rows - rows.mean(axis=0), axis=1)
        far = (far - far.mean()) / max(float(far.std()), 1e-12)
        found.append((far[: len(a)], far[len(a) :]))
    if not found:
        return False
    first, second = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return float(stats.ks_2samp(first, second, method="asymp").pvalue) < SPREAD_CHANCE


# --- labels -------------------------------------------------------------------------------------------------------------------------


def mislabelled(system: System) -> str:
    """Auxiliary labels, or labels of samples outside, that have nothing to do with their samples, although labels of clients have."""
    truth, prior = system.case.truth, system.case.prior
    if not truth.data or (system.model is not None and system.model.words):
        return ""
    clients = _pooled(truth.data)
    sets = {"auxiliary": (prior.x, prior.y)} | ({"outside": _pooled(truth.outside)} if truth.outside else {})
    return next((reason for name, pair in sets.items() if (reason := _mislabelled(name, pair, clients, system.case.seed))), "")


def _mislabelled(name: str, pair: Samples, clients: Samples, seed: int) -> str:
    (x, y), rng = clients, np.random.default_rng(seed)
    asked = np.flatnonzero(np.isin(pair[1], np.unique(y)))[:MOST_NEIGHBOURS]
    if min(len(asked), len(y)) < FEWEST_QUERIES or len(np.unique(y)) < 2:
        return ""
    queries, labels = pair[0][asked].reshape(len(asked), -1).astype(np.float64), pair[1][asked]
    distance = _distances(x, x)
    distance[distance <= GRID] = np.inf  # itself, and duplicates
    own, guessed = y[distance.argmin(axis=1)], y[_distances(queries, x).argmin(axis=1)]
    of_clients, of_set = _agreement(own, y), _agreement(guessed, labels)
    for label in np.unique(labels).tolist():
        other = Counter(guessed[labels == label].tolist()).most_common(1)[0][0]
        mine, same = int((labels == label).sum()), float(np.mean(guessed[labels == label] == label))
        known = min(float(np.mean(own[y == a] == a)) for a in (label, other))
        if mine >= FEWEST_NAMED and known > KNOWN and same < STRANGE and np.mean(guessed[labels == label] == other) > KNOWN:
            return f"{name}: samples with label {label} are like clients' samples with label {other}; number labels alike in all sets"
    chances = [float(np.mean(guessed == rng.permutation(labels))) for _ in range(PERMUTATIONS)]
    is_chance = (1 + sum(chance >= np.mean(guessed == labels) for chance in chances)) / (1 + PERMUTATIONS) > CHANCE
    excess = of_clients[0] / 2 - of_set[0]
    error = float(np.hypot(of_clients[1] / 2, of_set[1]))
    if of_clients[0] > FEWEST_KNOWN and is_chance and excess > DEVIATIONS * error:
        return (
            f"{name}: labels y do not belong to samples x: the nearest sample of clients has the same label as often as after shuffling "
            f"({np.mean(guessed == labels):.0%}), where clients' samples agree in {np.mean(own == y):.0%}; give x and y in one order"
        )
    return ""


def unlabelled(system: System) -> str:
    """Auxiliary samples that lack most of the labels that clients have, about which attacks on labels say nothing."""
    held, known = _labels(system), set(system.case.prior.y.tolist())
    lacking = sorted(held - known)
    if len(system.case.prior.y) < FEWEST_AUXILIARY or 2 * len(lacking) <= len(held):
        return ""
    return (
        f"auxiliary: no sample has the labels {', '.join(map(str, lacking[:8]))}, which clients have; give auxiliary samples of the "
        "clients' distribution, with labels numbered alike"
    )


def _distances(x: Array, to: Array) -> Array:
    squares = np.square(x).sum(1)[:, None] + np.square(to).sum(1)[None] - 2 * x @ to.T
    return np.asarray(np.maximum(squares, 0.0))


def _agreement(guessed: Array, labels: Array) -> tuple[float, float]:
    """How far guesses agree with labels beyond chance (1: always, 0: as by chance), and the standard error of this."""
    names = np.unique(np.concatenate([guessed, labels]))
    chance = float(sum(np.mean(guessed == name) * np.mean(labels == name) for name in names))
    share = float(np.mean(guessed == labels))
    room = max(1 - chance, 1e-9)
    smoothed = (share * len(labels) + 1) / (len(labels) + 2)
    return (share - chance) / room, float(np.sqrt(smoothed * (1 - smoothed) / len(labels))) / room
