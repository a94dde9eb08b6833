"""Check the samples of an audit of another system: scales, duplicates, and whether auxiliary labels belong to their samples.

What correct input would need to fail, with its probability:

- scale: more than `BEYOND` of a set's values outside the range of the set that it is compared with, widened by `SLACK`, in all clients or
  in data with hard bounds (pixels); or more than `FAR` of them beyond a whole further width. Values of one distribution are outside the
  range of n ≥ 64 others with probability 2 / (n + 1) each.
- duplicates: at least two equal rows, and more than `SHARED` of a set, where rows of one set do not repeat by themselves; between two
  clients `HALF` of a set; within a set of `FEWEST_TWICE` all rows (of a bootstrap sample all rows repeat with p < 1e-3).
- labels: nearest neighbours among clients' samples predict the clients' own labels, but those of auxiliary samples less than half as well
  (`DEVIATIONS` standard errors), and no better than after a permutation of their labels (p > `CHANCE`).
"""

from collections import Counter

import numpy as np

from ...types import Array
from .foreign_system import System

__all__ = ["mislabelled", "misplaced", "repeated_samples"]

FEWEST_VALUES = 64
SLACK, BEYOND, FAR = 0.05, 0.2, 0.03
NARROW = 1 / 20
"""A set is too narrow if the middle 98 % of its values span less than this share of those of the other set."""
BOUNDED = 0.01
"""Data are bounded if more than this share of values, and five at least, is at an end of the range exactly."""
SHARED, WITHIN, HALF = 0.05, 0.02, 0.5
FEWEST_ROWS, FEWEST_TWICE = 4, 10
GRID = 1e-6
"""Rows are equal if they are equal after rounding to this, on the scale on which auxiliary samples are."""
MOST_NEIGHBOURS = 2000
FEWEST_QUERIES = 20
DEVIATIONS, CHANCE, FEWEST_KNOWN = 4.0, 1e-3, 0.1
PERMUTATIONS = 1999

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
    natural = max((_repeats(rows) for rows in (auxiliary, *outside.values())), default=0.0)
    for client, rows in outside.items():  # as they are: such sets are equal in data that repeat, too
        if len(rows) >= FEWEST_ROWS and rows == members.get(client):
            return f"client {client}: outside is the same as x; give samples that nobody trained on"
    if natural > WITHIN:  # rows repeat by themselves
        return ""
    trained = {row for rows in members.values() for row in rows}
    for client, rows in outside.items():
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


# --- labels -------------------------------------------------------------------------------------------------------------------------


def mislabelled(system: System) -> str:
    """Auxiliary labels that have nothing to do with their samples, although labels of clients have."""
    truth, prior = system.case.truth, system.case.prior
    if not truth.data or not len(prior.y) or (system.model is not None and system.model.words):
        return ""
    rng = np.random.default_rng(system.case.seed)
    x, y = (np.concatenate([pair[i] for pair in truth.data.values()]) for i in (0, 1))
    kept = rng.permutation(len(y))[:MOST_NEIGHBOURS]
    x, y = x[kept].reshape(len(kept), -1).astype(np.float64), y[kept]
    asked = np.flatnonzero(np.isin(prior.y, np.unique(y)))[:MOST_NEIGHBOURS]
    if min(len(asked), len(y)) < FEWEST_QUERIES or len(np.unique(y)) < 2:
        return ""
    queries, labels = prior.x[asked].reshape(len(asked), -1).astype(np.float64), prior.y[asked]
    distance = _distances(x, x)
    distance[distance <= GRID] = np.inf  # itself, and duplicates
    own, guessed = y[distance.argmin(axis=1)], y[_distances(queries, x).argmin(axis=1)]
    of_clients, of_auxiliary = _agreement(own, y), _agreement(guessed, labels)
    chances = [float(np.mean(guessed == rng.permutation(labels))) for _ in range(PERMUTATIONS)]
    is_chance = (1 + sum(chance >= np.mean(guessed == labels) for chance in chances)) / (1 + PERMUTATIONS) > CHANCE
    excess = of_clients[0] / 2 - of_auxiliary[0]
    error = float(np.hypot(of_clients[1] / 2, of_auxiliary[1]))
    if of_clients[0] > FEWEST_KNOWN and is_chance and excess > DEVIATIONS * error:
        return (
            f"auxiliary: labels y do not belong to samples x: the nearest sample of clients has the same label as often as after shuffling "
            f"({np.mean(guessed == labels):.0%}), where clients' samples agree in {np.mean(own == y):.0%}; give x and y in one order"
        )
    return ""


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
