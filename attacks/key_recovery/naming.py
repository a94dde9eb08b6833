"""Name the recovered columns: match the point cloud of the victims' coordinates to that of the attacker's own clients.

The attacker knows the initial model and the training settings and owns labelled samples of the kind. It trains clients of its own, with
the recovered proportions under random namings, fits how a first update depends on proportions, and predicts the victims' updates under
any naming. A prediction is a cloud of d points, one a coordinate, in as many dimensions as the proportions have; so is what was seen, its
points in an order that only the key determines. Under the right naming the clouds coincide, whatever the order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np
from scipy.spatial.distance import cdist

from ...engine import Engine, Streams, TaskInput
from ...engine.threads import one_thread
from ...errors import InputError
from ...randomness import Stream
from ...tasks.training import Train
from ...types import Array, ClientData

__all__ = [
    "Knowledge", "Naming", "Response", "head_blocks", "leading_block", "name_columns", "own_proportions", "place_block", "regress",
    "respond", "simulate_updates", "unnamed_shares",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Knowledge:
    """What the attacker knows beforehand: the training task, the initial model (d,), its own samples, and how many a client trains on.

    `labels_per_client` is the number of labels a client has, where that is public (None: not known).
    """

    train: Train
    theta0: Array
    x: Array
    y: Array
    samples: int
    labels_per_client: int | None = None

    @property
    def classes(self) -> int:
        return self.train.model.classes

    def __post_init__(self) -> None:
        if self.theta0.shape != (self.train.model.dimension,):
            raise InputError(f"theta0: has shape {self.theta0.shape}, the model has {self.train.model.dimension} parameters")
        if self.samples < 1:
            raise InputError(f"samples: {self.samples} is below 1")


def simulate_updates(known: Knowledge, proportions: Array, rng: Stream, *, repeated: bool = False) -> Array:
    """First updates (m, d) of the attacker's own clients with the given label proportions (m, C).

    A client's samples differ as far as there are enough, unless they are drawn with repetition (`repeated`). Raises `InputError` where the
    auxiliary data have no sample of a label that some client needs.
    """
    pools = [np.flatnonzero(known.y == label) for label in range(known.classes)]
    if any(len(pool) == 0 and bool((proportions[:, label] > 0).any()) for label, pool in enumerate(pools)):
        raise InputError(f"auxiliary data: has samples of {len(np.unique(known.y))} of {known.classes} labels")
    key = int(rng.integers(2**31))
    inputs = []
    for i, share in enumerate(proportions):
        counts = rounded(share, known.samples)
        chosen = np.concatenate(
            [rng.choice(pool, n, replace=repeated or n > len(pool)) for pool, n in zip(pools, counts, strict=True) if n]
        )
        data = ClientData(i, known.x[chosen], known.y[chosen], known.x[:1], known.y[:1])
        inputs.append(TaskInput(data, {"model": known.theta0}, {}, Streams(key, 0, i)))
    with one_thread():
        results = Engine().run(known.train, inputs)
    return np.stack([np.asarray(result["update"], dtype=np.float64) for result in results])


def rounded(share: Array, total: int) -> Array:
    """Whole numbers (C,) in the proportions `share` that add up to `total`: largest remainders."""
    exact = np.maximum(share, 0.0) / np.maximum(share, 0.0).sum() * total
    counts = np.floor(exact).astype(int)
    for label in np.argsort(counts - exact, kind="stable")[: total - counts.sum()]:
        counts[label] += 1
    return np.asarray(counts)


@dataclass(frozen=True, eq=False)
class Response:
    """How a first update depends on the label proportions h: Σ_c h_c B_c + Σ_{c<c'} h_c h_c' B_cc', coefficients (C(C+1)/2, d)."""

    coefficients: Array

    def predict(self, proportions: Array) -> Array:
        """Updates (m, d) of clients with `proportions` (m, C)."""
        return np.asarray(_terms(proportions) @ self.coefficients)

    def at(self, coordinates: Array) -> "Response":
        return Response(self.coefficients[:, coordinates])


def respond(proportions: Array, updates: Array, ridge: float = 1e-3) -> Response:
    """The response that fits simulated clients' `updates` (m, d) best, by ridge regression."""
    terms = _terms(proportions)
    square = terms.T @ terms
    weight = ridge * np.trace(square) / len(square)
    return Response(np.linalg.solve(square + weight * np.eye(len(square)), terms.T @ updates))


def _terms(h: Array) -> Array:
    first, second = np.triu_indices(h.shape[1], 1)
    return np.hstack([h, h[:, first] * h[:, second]])


@dataclass(frozen=True, eq=False)
class Naming:
    """Column `order[c]` of the structure is label c. `cloud_distance` of the clouds, and the attacker's `confidence` in [0, 1].

    The confidence is the gap between the distance found and the lowest distance of a naming with another answer, in units of that distance.
    """

    order: Array
    distance: float
    confidence: float


def cloud(rows: Array, points: int) -> Array:
    """The `points` coordinates of rows (r, d) with the largest norms, as points (points, r)."""
    norms = np.einsum("rd,rd->d", rows, rows)
    top = np.argpartition(-norms, min(points, len(norms)) - 1)[:points]
    return np.ascontiguousarray(rows[:, top].T)


def cloud_distance(a: Array, b: Array, signed: bool = False) -> float:
    """How far clouds (m, r) and (k, r) lie apart: the mean distance to the nearest point of the other, in units of a's mean norm.

    `signed`: a point counts like its negative.
    """
    na, nb = np.einsum("ij,ij->i", a, a), np.einsum("ij,ij->i", b, b)
    products = a @ b.T
    squared = na[:, None] + nb[None, :] - 2.0 * (np.abs(products) if signed else products)
    nearest = np.sqrt(np.maximum(squared.min(axis=1), 0.0)).mean() + np.sqrt(np.maximum(squared.min(axis=0), 0.0)).mean()
    return float(nearest / 2 / np.sqrt(na.mean()))


def own_proportions(proportions: Array, own_clients: int, rng: Stream, labels_per_client: int | None) -> Array:
    """What the attacker's own clients train on, (m, C): the recovered proportions, each under a naming of its own, and varied.

    Where the number of labels is known, every set of so many labels in turn instead: a set that no own client had cannot be recognised.
    """
    classes = proportions.shape[1]
    if labels_per_client and comb(classes, labels_per_client) <= own_clients:
        sets = list(combinations(range(classes), labels_per_client))
        own = np.zeros((own_clients, classes))
        for i, row in enumerate(own):
            row[list(sets[i % len(sets)])] = 1.0
    else:
        own = np.stack([proportions[i % len(proportions)][rng.permutation(classes)] for i in range(own_clients)])
    own = own * rng.gamma(20.0, size=own.shape) if labels_per_client else 0.9 * own + 0.1 * rng.dirichlet([0.5] * classes, own_clients)
    return np.asarray(own / own.sum(axis=1, keepdims=True))


POINTS = 300
"""Coordinates in a cloud, the largest ones."""


def name_columns(proportions: Array, first: Array, response: Response, rng: Stream, *, restarts: int = 32, signed: bool = False) -> Naming:
    """The naming under which the `response` to `proportions` (n, C), up to renaming, and `first` (n, d) agree best as clouds.

    Descent over exchanges of two names from random namings, until the best optimum was met three times or `restarts` were made.
    """
    classes = proportions.shape[1]
    # clients alike say the same thing: a few directions of the proportions hold all of it, with less noise
    left, scale, _ = np.linalg.svd(proportions, full_matrices=False)
    weights = left[:, scale > 0.15 * scale[0]].T
    norms = np.einsum("id,id->d", response.coefficients[:classes], response.coefficients[:classes])
    rough = response.coefficients[:, np.argsort(-norms)[: 10 * POINTS]]
    seen = cloud(weights @ first, POINTS)
    tried: dict[tuple[int, ...], float] = {}

    def apart(order: Array) -> float:
        key = tuple(order.tolist())
        if key not in tried:
            tried[key] = cloud_distance(seen, cloud((weights @ _terms(proportions[:, order])) @ rough, POINTS), signed)
        return tried[key]

    def other_answer(a: Array, b: Array) -> bool:
        return bool(np.abs(proportions[:, a] - proportions[:, b]).sum(axis=1).mean() > 0.1)

    optima: list[Array] = []
    for _ in range(restarts):
        optima.append(_descend(rng.permutation(classes), apart))
        winner = min(optima, key=apart)
        if len(optima) >= 8 and sum(not other_answer(winner, optimum) for optimum in optima) >= 3:
            break
    best = apart(winner)
    rivals = [apart(optimum) for optimum in optima if other_answer(winner, optimum)]
    runner_up = min(rivals or [value for key, value in tried.items() if other_answer(winner, np.array(key))], default=best)
    return Naming(winner, best, max(0.0, 1.0 - best / runner_up))


def _descend(order: Array, value: Callable[[Array], float]) -> Array:
    """The local optimum of `value` under exchanges of two entries."""
    moved = True
    while moved:
        moved = False
        for a in range(len(order)):
            for b in range(a + 1, len(order)):
                other = order.copy()
                other[[a, b]] = other[[b, a]]
                if value(other) < value(order):
                    order, moved = other, True
    return order


def head_blocks(known: Knowledge) -> Array:
    """The coordinates (1 + width, C) whose updates add up to zero: the biases of the last layer, then the weights out of each unit.

    Without biases the first row is missing. Raises `InputError` for a model whose last layer is not linear with `classes` outputs.
    """
    layout, classes = known.train.model.layout, known.classes
    biased = len(layout[-1][1]) == 1
    _, shape, offset = layout[-2] if biased else layout[-1]
    if len(shape) != 2 or shape[0] != classes:
        raise InputError(f"model {known.train.model.name!r}: its last layer has weights of shape {shape}, expected ({classes}, width)")
    units = offset + np.arange(shape[1])[:, None] + shape[1] * np.arange(classes)[None, :]
    return np.vstack([layout[-1][2] + np.arange(classes)[None, :], units]) if biased else units


def leading_block(blocks: Array, known: Knowledge, updates: Array) -> Array:
    """The block (C,) that stands for all: the biases, or where there are none the weights out of the unit that moves most."""
    if len(known.train.model.layout[-1][1]) == 1:
        return np.asarray(blocks[0])
    return np.asarray(blocks[np.square(updates[:, blocks]).sum(axis=(0, 2)).argmax()])


def place_block(traces: Array, predicted: Array, blocks: Array) -> int:
    """Which of `blocks` (b, C) has traces (n, C): the one whose `predicted` updates (n, d) come closest."""
    errors = np.square(predicted[:, blocks] - traces[:, None, :]).sum(axis=(0, 2))
    return int(errors.argmin())


def unnamed_shares(traces: Array, own_traces: Array, own: Array) -> Array:
    """Label proportions (n, C) from `traces` (n, C) whose columns have no names, by what simulated clients' (m, C) say of `own` (m, C).

    One regression serves all columns: a polynomial in a column's trace and in the largest and the mean size of the client's traces, each
    in units of the mean size over all clients.
    """

    def terms(z: Array) -> Array:
        z = z / np.sqrt((z**2).mean())
        largest, size = np.broadcast_arrays(z.max(axis=1, keepdims=True), np.sqrt((z**2).mean(axis=1, keepdims=True)))
        base = [np.ravel(values * np.ones_like(z)) for values in (z, largest, size)]
        powers = [(i, j, k) for i in range(4) for j in range(4) for k in range(4) if i + j + k <= 3]
        return np.stack([base[0] ** i * base[1] ** j * base[2] ** k for i, j, k in powers], axis=1)

    x = terms(own_traces)
    weights = np.linalg.solve(x.T @ x + 1e-3 * len(x) * np.eye(x.shape[1]), x.T @ own.ravel())
    return on_simplex((terms(traces) @ weights).reshape(traces.shape))


def regress(features: Array, proportions: Array, seen: Array, width: float = 5.0, ridge: float = 1e-2) -> Array:
    """Label proportions (n, C) of clients with features `seen` (n, f), by Gaussian-kernel ridge regression on simulated clients.

    `features` (m, f) and `proportions` (m, C) are theirs; the `width` of the kernel is in units of the features' standard deviation.
    """
    scale = float(features.std()) * width
    mean = proportions.mean(axis=0)

    def kernel(a: Array, b: Array) -> Array:
        return np.asarray(np.exp(-0.5 * cdist(a / scale, b / scale, "sqeuclidean")))

    weights = np.linalg.solve(kernel(features, features) + ridge * np.eye(len(features)), proportions - mean)
    return on_simplex(mean + kernel(seen, features) @ weights)


def on_simplex(rows: Array) -> Array:
    """The nearest point of the probability simplex to each row (Held, Wolfe & Crowder 1974)."""
    falling = -np.sort(-rows, axis=1)
    excess = (np.cumsum(falling, axis=1) - 1.0) / np.arange(1, rows.shape[1] + 1)
    last = (falling > excess).sum(axis=1) - 1
    return np.asarray(np.maximum(rows - excess[np.arange(len(rows)), last][:, None], 0.0))
