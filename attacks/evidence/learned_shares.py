"""Label shares learned from simulated clients: which labels an update is of, and how many of each, whatever the optimiser.

Source: shadow training, as in membership and property inference (Ateniese et al. 2015; Melis et al. 2019), on the observation behind iDLG
and LLG (Zhao et al. 2020; Wainakh et al. 2022): training on a label raises what the last layer gives for it. That holds for every optimiser
that follows gradients, also over many epochs, while formulas for shares hold for SGD alone.

The rows of the last layer are compared within one update, one row a label, so neither the length of an update nor a rate is needed. Two
models are fitted to the rows of simulated clients, with the same coefficients for every label: a logistic regression of whether the label
is present, and a conditional logit (McFadden 1974) of the shares of those that are. An update is read with a known number of labels: the
most probable ones share it. Where the last layer did not move, a ridge regression on the whole update takes the place of both.

What it proves: that an update shows labels although no formula reads it, also labels that no simulated client had, as of a vocabulary.
What it does not prove: anything about updates of other clients than the simulated ones are like. The ridge regression never names a label
that no simulated client had.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...types import Array

__all__ = [
    "BiasShares", "LearnedShares", "RidgeShares", "Rows", "eigen_of_centred", "learned_shares", "restricted", "ridge_shares",
    "row_direction", "row_features", "shares_of_bias",
]  # fmt: skip

PENALTY = 1e-2
STEPS, LONGEST_STEP = 40, 3.0
"""Newton steps, and how far one moves a coefficient at most."""
MOST_INPUTS = 2048
"""Of last layers with more inputs no direction is learned."""
RIDGES = 10.0 ** np.arange(-6, 4)
LEAST = 1e-12


@dataclass(frozen=True, eq=False)
class Rows:
    """The movements of a last layer in m updates, a row a label: its `weights` (m, classes, e) and `bias` (m, classes), or one of them."""

    weights: Array | None
    bias: Array | None

    def some(self, places: Array) -> "Rows":
        """Those of some updates."""
        return Rows(*(None if part is None else part[places] for part in (self.weights, self.bias)))


def row_features(rows: Rows, direction: Array | None = None) -> Array:
    """Features (m, classes, f) of each label's row, with a `direction` (e,) also what weights move along it.

    Each is centred and scaled over the labels of its update, and the ranks of the movements are added.
    """
    weights, bias = rows.weights, rows.bias
    measures = [] if bias is None else [bias]
    ranked = list(measures)
    if weights is not None:
        summed = weights.sum(axis=2)
        measures += [
            summed,
            np.abs(weights).sum(axis=2),
            np.linalg.norm(weights, axis=2),
            np.maximum(weights, 0).sum(axis=2),
            weights.max(axis=2),
        ]
        measures += [] if direction is None else [weights @ direction]
        ranked.append(summed)
    scaled = [_scaled(np.asarray(measure, np.float64)) for measure in measures]
    ranks = [measure.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable") / measure.shape[1] for measure in ranked]
    return np.stack([*scaled, *(measure * np.abs(measure) for measure in scaled), *ranks, np.ones_like(scaled[0])], axis=2)


def _scaled(measure: Array) -> Array:
    centred = measure - measure.mean(axis=1, keepdims=True)
    return np.asarray(centred / np.maximum(centred.std(axis=1, keepdims=True), LEAST))


@dataclass(frozen=True, eq=False)
class LearnedShares:
    """Coefficients (f,) of whether a label is present, and of its share, for labels that no simulated client had, too.

    `direction` (e,): along which weights move towards a label that is present.
    """

    presence: Array
    share: Array
    direction: Array | None = None

    def read(self, rows: Rows, labels: Sequence[int]) -> Array:
        """Shares (m, classes) from the rows of updates of clients with so many `labels`."""
        features = row_features(rows, self.direction)
        return _softmax(features @ self.share, _largest(features @ self.presence, labels))


@dataclass(frozen=True, eq=False)
class RidgeShares:
    """A ridge regression of shares on updates: coefficients (f, classes) around a `centre` (f,) and a `middle` (classes,).

    Updates are divided by `scale`, or by their own lengths where `scale` is 0. By a `scale` the reading of a mean of updates is the
    mean of their readings. `error` is the sum of squares that it leaves of clients left out.
    """

    centre: Array
    weights: Array
    middle: Array
    scale: float = 0.0
    error: float = 0.0

    def read(self, updates: Array, labels: Sequence[int]) -> Array:
        """Shares (m, classes) from updates (m, f) of clients with so many `labels`."""
        return restricted((_scaled_by(updates, self.scale) - self.centre) @ self.weights + self.middle, labels)


@dataclass(frozen=True)
class BiasShares:
    """A line, the same for all labels, of a label's share on the movement of its bias; `scale` as in `RidgeShares`."""

    slope: float
    middle: float
    scale: float = 0.0

    def read(self, bias: Array, labels: Sequence[int]) -> Array:
        """Shares (m, classes) from movements (m, classes) by clients with so many `labels`."""
        return restricted(self.slope * _scaled_by(bias, self.scale) + self.middle, labels)


def learned_shares(rows: Rows, shares: Array) -> LearnedShares:
    """The two models from the rows of simulated clients and their label `shares` (n, classes).

    The direction that gives a client's feature is of the clients that it is not among: of every second one.
    """
    seen, direction = np.asarray(shares.any(axis=0)), None
    features = row_features(rows)
    if rows.weights is not None and rows.weights.shape[2] <= MOST_INPUTS:
        sides = [np.arange(len(shares)) % 2 == side for side in (0, 1)]
        of_sides = [row_direction(rows.some(side), shares[side]) for side in sides]
        features = np.zeros((*shares.shape, features.shape[2] + 2))
        for side, of_others in zip(sides, reversed(of_sides), strict=True):
            features[side] = row_features(rows.some(side), of_others)
        direction = row_direction(rows, shares)
    return LearnedShares(_logistic(features[:, seen], shares[:, seen] > 0), _conditional(features, shares), direction)


def row_direction(rows: Rows, shares: Array) -> Array:
    """The direction (e,) along which weights move with shares (n, classes), by ridge regression: nearly the mean input of the layer."""
    assert rows.weights is not None  # checked by the caller
    moved = rows.weights / np.maximum(np.linalg.norm(rows.weights, axis=(1, 2), keepdims=True), LEAST)
    centred = (moved - moved.mean(axis=1, keepdims=True)).reshape(-1, moved.shape[2])
    products = centred.T @ centred
    ridge = max(float(np.trace(products)) / len(products), LEAST)
    found = np.linalg.solve(products + ridge * np.eye(len(products)), centred.T @ (shares - shares.mean(axis=1, keepdims=True)).ravel())
    return np.asarray(found)


def ridge_shares(updates: Array, shares: Array, scale: float = 0.0) -> RidgeShares:
    """Ridge regression of shares (n, classes) on updates (n, f) over `scale`, or on their directions; penalty by exact leave-one-out."""
    made = _scaled_by(updates, scale)
    centre, middle = made.mean(axis=0), shares.mean(axis=0)
    known = made - centre
    values, vectors = eigen_of_centred(known)
    turned = vectors.T @ (shares - middle)
    best, dual = np.inf, np.zeros(shares.shape)
    for penalty in RIDGES * max(float(values.sum()) / len(made), LEAST):
        shrunk = 1.0 / (values + penalty)
        solution = vectors @ (shrunk[:, None] * turned)
        left = solution / ((vectors**2) @ shrunk)[:, None]
        if (error := float((left**2).sum())) < best:
            best, dual = error, solution
    return RidgeShares(centre, known.T @ dual, middle, scale, best)


def shares_of_bias(bias: Array, shares: Array, scale: float = 0.0) -> RidgeShares | BiasShares:
    """How to read shares (n, classes) from movements (n, classes) of a bias, and from their means: by all, or each label by its own alone.

    The second has two coefficients for all labels, so that a few clients teach them of a vocabulary. What leaves less of clients left out
    is taken.
    """
    ridge, made = ridge_shares(bias, shares, scale), _scaled_by(bias, scale)
    apart = made - made.mean()
    slope = float((apart * shares).sum()) / max(float((apart**2).sum()), LEAST)
    line = BiasShares(slope, float(shares.mean()) - slope * float(made.mean()), scale)
    return line if float(((slope * made + line.middle - shares) ** 2).sum()) < ridge.error else ridge


def eigen_of_centred(rows: Array) -> tuple[Array, Array]:
    """Eigenvalues (n − 1,) and vectors (n, n − 1) of the products of centred rows (n, f), without the constant, which has none.

    With the constant among them a small penalty would make it the most important, and every leave-one-out error nearly zero.
    """
    products = rows @ rows.T
    above = 1.0 + 2.0 * float(np.trace(products))
    values, vectors = np.linalg.eigh(products + above / len(products))
    return np.maximum(values[:-1], 0.0), np.asarray(vectors[:, :-1])


def restricted(shares: Array, labels: Sequence[int]) -> Array:
    """Shares (m, classes) of the so many largest `labels` of each row alone, none negative, adding up to 1."""
    kept = np.where(_largest(shares, labels), np.maximum(shares, LEAST), 0.0)
    return np.asarray(kept / kept.sum(axis=1, keepdims=True))


def _largest(values: Array, labels: Sequence[int]) -> Array:
    """Where the so many largest values of each row (m, classes) are, bool."""
    ranks = (-values).argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    return np.asarray(ranks < np.maximum(1, np.asarray(labels))[:, None])


def _scaled_by(updates: Array, scale: float) -> Array:
    """Updates (m, f) over `scale`, over their own lengths where it is 0."""
    updates = np.asarray(updates, np.float64)
    return np.asarray(updates / (scale or np.maximum(np.linalg.norm(updates, axis=1, keepdims=True), LEAST)))


def _logistic(features: Array, present: Array) -> Array:
    """Coefficients (f,) of a logistic regression, by Newton's method."""
    rows, truth = features.reshape(-1, features.shape[2]), present.ravel().astype(np.float64)
    found = np.zeros(rows.shape[1])
    for _ in range(STEPS):
        chance = 1 / (1 + np.exp(-np.clip(rows @ found, -30, 30)))
        slope = rows.T @ (truth - chance) - PENALTY * found
        curve = (rows * (chance * (1 - chance))[:, None]).T @ rows + PENALTY * np.eye(len(found))
        found = found + _step(curve, slope)
    return found


def _conditional(features: Array, shares: Array) -> Array:
    """Coefficients (f,) of a conditional logit of shares among the labels that are present, by Newton's method."""
    present = shares > 0
    found = np.zeros(features.shape[2])
    for _ in range(STEPS):
        guessed = _softmax(features @ found, present)
        means = np.einsum("nc,ncf->nf", guessed, features)
        slope = np.einsum("nc,ncf->f", shares - guessed, features) - PENALTY * found
        weighted = (features * guessed[:, :, None]).reshape(-1, features.shape[2])
        curve = weighted.T @ features.reshape(-1, features.shape[2]) - means.T @ means + PENALTY * np.eye(len(found))
        found = found + _step(curve, slope)
    return found


def _step(curve: Array, slope: Array) -> Array:
    step = np.linalg.solve(curve, slope)
    return np.asarray(step * min(1.0, LONGEST_STEP / max(float(np.abs(step).max()), LEAST)))


def _softmax(scores: Array, present: Array) -> Array:
    """Shares (m, classes) of those `present`, in proportion to the exponentials of their scores."""
    scores = np.where(present, scores, -np.inf)
    made = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(made / made.sum(axis=1, keepdims=True))
