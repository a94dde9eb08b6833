"""Clients whose updates stand beside the others' as no correct client's do, judged over the first rounds, in which all have much to learn.

Each rule was fixed before the run that judged it, on other draws: 73 kinds of correct applications (one class a client, opposed shares of
classes, few samples, pairs with the same classes, a trained start, momentum, augmentation, …), twice each. No rule here named any.

Not seen: labels that are shifted or shuffled, numbers of examples that are wrong and possible, an answer mixed with an older one. Groups of
clients, and clients that differ, look the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ..types import Array
from .doubtful_updates import Layout, cut_parts, named

__all__ = ["Peers", "usable_losses"]

FEWEST_CLIENTS, MOST_CLIENTS = 5, 64
"""Rounds of so many clients of one model are compared."""
FIRST_ROUNDS, FIRST_OPPOSED = 3, 4
"""A client is judged by so many of its rounds, the first."""
OPPOSED, AGREED = -0.2, 0.2
"""Cosines with the mean of the others, beside its largest part: of a client that is opposed, and the median of all others."""
MOST_NUMBERS, STEPS = 1 << 22, 12
"""Of arrays that are compared in this way, and steps of a power iteration."""
TWINS, OTHER_PAIRS = 0.9, 0.8
"""Cosines of two updates, less the mean of all others: at least of two clients with the same data, and at most of any other pair."""
GAP = 20.0
"""Between two groups of clients, in lengths of updates, and in lengths for each example."""
ROUNDS_UP, WORSE = 5, 1.05
"""Training goes the wrong way if the loss is above that of the first round in all of so many, by this factor in their mean,"""
LONGER = 3
"""and the mean update became longer in each of so many rounds."""


@dataclass
class Peers:
    """What was seen of the clients of one model in their first rounds, and of the losses that they state."""

    opposed: dict[int, list[bool]] = field(default_factory=dict)
    pairs: list[tuple[tuple[int, ...], Array]] = field(default_factory=list)
    sides: list[tuple[frozenset[int], frozenset[int]]] = field(default_factory=list)
    losses: list[tuple[dict[int, float], float]] = field(default_factory=list)

    def doubts(self, updates: Mapping[int, Array], counts: Mapping[int, float], layout: Layout) -> list[str]:
        """Add a round: `updates` (d,) by client, all from one model, and numbers of examples, if they are known. What is odd so far."""
        moving = {client: update.astype(np.float64) for client, update in updates.items() if update.any()}
        if not FEWEST_CLIENTS <= len(moving) <= MOST_CLIENTS:
            return []
        return [*self._opposed(moving, layout), *filter(None, [self._twins(moving, counts), self._rates(moving, counts)])]

    def loss_doubt(self, losses: Mapping[int, float], length: float) -> str:
        """Add a round's training `losses` by client, and the `length` of the mean update. A sentence if training goes the wrong way.

        Losses of all rounds are compared over the clients that stated one in each.
        """
        rows = self.losses = [*self.losses[:1], *self.losses[1:][-ROUNDS_UP + 1 :], (dict(losses), length)]
        common = set.intersection(*(set(row) for row, _ in rows))
        if len(rows) <= ROUNDS_UP or not common:
            return ""
        means = [float(np.mean([row[client] for client in common])) for row, _ in rows]
        lengths = [length for _, length in rows[-LONGER - 1 :]]
        grows = all(longer > shorter > 0 for shorter, longer in pairwise(lengths))
        later = float(np.mean(means[1:]))
        if not (grows and 0 < means[0] < min(means[1:]) and later > WORSE * means[0]):
            return ""
        return (
            f"the training loss rose from {means[0]:.3g} to {later:.3g} on average, and updates grow: training goes the wrong way; do "
            "clients return the update with its sign turned, or is the learning rate too large?"
        )

    def _opposed(self, updates: Mapping[int, Array], layout: Layout) -> list[str]:
        """Clients whose updates point against those of the others, which agree.

        The largest part of each array's mean is left out: shares of classes make it, and clients with opposed shares differ in it alone.
        """
        young = [client for client in updates if len(self.opposed.get(client, ())) < FIRST_OPPOSED]
        total = np.sum(list(updates.values()), axis=0)
        cosines = {client: _inner_cosine(u, (total - u) / (len(updates) - 1), layout) for client, u in updates.items() if young}
        doubts = []
        for client in young:
            others = [value for other, value in cosines.items() if other != client]
            rounds = self.opposed.setdefault(client, [])
            rounds.append(cosines[client] < OPPOSED and float(np.median(others)) > AGREED)
            if len(rounds) == FIRST_OPPOSED and all(rounds):
                doubts.append(f"client {client}: its updates point against those of all others, which agree; is their sign turned?")
        return doubts

    def _twins(self, updates: Mapping[int, Array], counts: Mapping[int, float]) -> str:
        """A sentence on two clients with one number of examples, which no other has, and with nearer updates than any other two."""
        clients = tuple(updates)
        if len(self.pairs) >= FIRST_ROUNDS or any(known != clients for known, _ in self.pairs):
            return ""
        self.pairs.append((clients, _pair_cosines(np.stack(list(updates.values())))))
        if len(self.pairs) < FIRST_ROUNDS:
            return ""
        nearness = np.median([cosines for _, cosines in self.pairs], axis=0)
        upper = np.triu_indices(len(clients), 1)
        order = np.argsort(nearness[upper])
        one, other = (clients[places[order[-1]]] for places in upper)
        if nearness[upper][order[-1]] < TWINS or nearness[upper][order[-2]] > OTHER_PAIRS:
            return ""
        if counts.get(one) is None or [client for client in clients if counts.get(client) == counts[one]] != [one, other]:
            return ""
        words = "their updates are nearer than those of any others, and num-examples is the same; have they one data set?"
        return f"{named([one, other])}: {words}"

    def _rates(self, updates: Mapping[int, Array], counts: Mapping[int, float]) -> str:
        """A sentence on two groups of clients with updates of quite different lengths, also for each example."""
        if len(self.sides) >= FIRST_ROUNDS or not all(counts.get(client, 0) > 0 for client in updates):
            return ""
        lengths = {client: float(np.linalg.norm(update)) for client, update in updates.items()}
        sides = [_sides(lengths), _sides({client: length / counts[client] for client, length in lengths.items()})]
        if sides[0] is None or sides[0] != sides[1] or any(known != sides[0] for known in self.sides):
            self.sides = [(frozenset(), frozenset())] * FIRST_ROUNDS
            return ""
        self.sides.append(sides[0])
        if len(self.sides) < FIRST_ROUNDS:
            return ""
        short, long = (sorted(side) for side in sides[0])
        times = np.median([lengths[client] for client in long]) / np.median([lengths[client] for client in short])
        return f"{named(short)}: their updates are {times:.3g} times shorter than those of {named(long)}; have all the same learning rate?"


def _sides(lengths: Mapping[int, float]) -> tuple[frozenset[int], frozenset[int]] | None:
    """The clients below and above the widest gap, if it is `GAP` times wide and two clients or more are on each side."""
    order = sorted(lengths, key=lengths.__getitem__)
    gaps = [lengths[later] / lengths[earlier] for earlier, later in pairwise(order)]
    place = int(np.argmax(gaps)) + 1
    return (frozenset(order[:place]), frozenset(order[place:])) if gaps[place - 1] > GAP and 1 < place < len(order) - 1 else None


def _pair_cosines(updates: Array) -> Array:
    """The cosine (n, n) of each two of n updates (n, d), each less the mean of all others but the two."""
    n, gram = len(updates), updates @ updates.T
    rows, total = gram.sum(1), float(gram.sum())
    cosines = np.eye(n)
    for i in range(n):
        for j in range(i):
            # inner products of each of the two with the sum of the others, and of this sum with itself
            of_i, of_j = rows[i] - gram[i, i] - gram[i, j], rows[j] - gram[j, j] - gram[i, j]
            rest = total - 2 * (rows[i] + rows[j]) + gram[i, i] + gram[j, j] + 2 * gram[i, j]
            m = n - 2
            inner = gram[i, j] - (of_i + of_j) / m + rest / m**2
            a, b = gram[i, i] - 2 * of_i / m + rest / m**2, gram[j, j] - 2 * of_j / m + rest / m**2
            cosines[i, j] = cosines[j, i] = inner / max(float(np.sqrt(max(a, 0.0) * max(b, 0.0))), 1e-300)
    return cosines


def _inner_cosine(update: Array, others: Array, layout: Layout) -> float:
    """The cosine of `update` (d,) with the mean `others` (d,) over their matrices, less the largest singular part of each of the mean's.

    0 where no array has three rows and columns.
    """
    inner = own = mean = 0.0
    left = MOST_NUMBERS
    ours, theirs = cut_parts(update, layout), cut_parts(others, layout)
    for name, part in theirs.items():
        if part.ndim < 2 or min(len(part), part[0].size) < 3 or part.size > left:
            continue
        left -= part.size
        matrix, moved = part.reshape(len(part), -1), ours[name].reshape(len(part), -1)
        rows, columns = _largest_pair(matrix)
        matrix, moved = (_without(some, rows, columns) for some in (matrix, moved))
        inner, own, mean = inner + float((matrix * moved).sum()), own + float((moved**2).sum()), mean + float((matrix**2).sum())
    return inner / (own * mean) ** 0.5 if own > 0 and mean > 0 else 0.0


def _largest_pair(matrix: Array) -> tuple[Array, Array]:
    """Nearly the first left and right singular vectors of a matrix, by power iteration from its longest row."""
    columns = matrix[int(np.argmax((matrix**2).sum(1)))]
    rows = np.zeros(len(matrix))
    for _ in range(STEPS):
        rows = matrix @ columns
        rows = rows / max(float(np.linalg.norm(rows)), 1e-300)
        columns = rows @ matrix
        columns = columns / max(float(np.linalg.norm(columns)), 1e-300)
    return rows, columns


def _without(matrix: Array, rows: Array, columns: Array) -> Array:
    """A matrix less its parts along one left and one right unit vector."""
    rest = matrix - np.outer(rows, rows @ matrix)
    return np.asarray(rest - np.outer(rest @ columns, columns))


def usable_losses(parts: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """The losses of clients that stated one: of pairs (1 or 0, loss)."""
    return {client: float(pair[1]) for client, pair in parts.items() if pair[0] == 1}
