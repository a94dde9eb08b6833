"""Label shares from updates of a non-linear optimiser (Adam): the attacker trains simulated clients and compares.

Source: ours; shadow training as in membership inference, regression instead of a classifier. Adam divides each coordinate's step by that
coordinate's own size, so that no rate × steps turns a head's bias into label shares. But the settings are public. The attacker makes
clients of auxiliary samples, with label shares of its choice, and trains them by `training.Train` from the model that was sent. A linear
ridge regression of their shares on their bias updates then reads a victim's shares.

What it proves and does not prove: as `label_inference`. A mean over several clients is read like one client's update with the mean shares.
For Adam this holds only nearly; after aggregation of many different clients the figure means little.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls
from sklearn.covariance import ledoit_wolf_shrinkage

from ...engine import Engine, Streams, TaskInput
from ...engine.threads import one_thread
from ...errors import InputError
from ...randomness import Stream
from ...tasks.training import Train
from ...types import Array, ClientData

__all__ = ["LinearReading", "linear_reading", "pretended_shares", "response_by_simulation", "shares_by_simulation"]

PRETENDED = 256
"""So many clients the attacker trains from each model that was sent."""
RIDGE, RESPONSE_RIDGE = 1e-2, 1e-3
LEAST_SHRUNK = 1e-6


def pretended_shares(classes: int, labels: int, rng: Stream, count: int = PRETENDED) -> Array:
    """Label shares (count, classes) for the attacker's own clients: `labels` labels each, equally and unequally in turn."""
    made = np.zeros((count, classes))
    for i, row in enumerate(made):
        chosen = rng.choice(classes, labels, replace=False)
        row[chosen] = rng.dirichlet(np.full(labels, (0.3, 1.0, 100.0)[i % 3]))
    return made


def shares_by_simulation(
    train: Train, start: Array, x: Array, y: Array, samples: int, labels: int, span: slice, rng: Stream, directions: bool = False,
    anchor: Array | None = None,
) -> Callable[[Array], Array]:  # fmt: skip
    """(bias update (classes,)) -> label shares (classes,), for clients of `samples` samples and `labels` labels that `train` from `start`.

    `x`, `y` are the attacker's labelled samples; a label that it lacks is never found. `span` is where the head's bias lies in a model.
    `anchor` (d,) is what the proximal term of `train` pulls to, if not the start. With `directions` an update's length is not looked at,
    since it is not known what it was scaled by. Where none of the attacker's own
    clients ends with finite parameters the answer is equal shares.
    """
    seen, shares = _simulated(train, start, x, y, samples, labels, span, rng, PRETENDED, anchor)
    if not len(seen):
        return lambda bias: np.full(len(bias), 1 / len(bias))
    scale = 0.0 if directions else max(float(np.linalg.norm(seen, axis=1).mean()), 1e-300)
    features = _features(seen, scale)
    square = features.T @ features
    weights = np.linalg.solve(square + RIDGE * np.trace(square) / len(square) * np.eye(len(square)), features.T @ shares)

    def read(bias: Array) -> Array:
        guess = np.maximum(_features(np.asarray(bias, np.float64)[None], scale)[0] @ weights, 0.0)
        return np.asarray(guess / max(float(guess.sum()), 1e-12))

    return read


def response_by_simulation(
    train: Train, start: Array, x: Array, y: Array, samples: int, labels: int, span: slice, rng: Stream, count: int
) -> tuple[Array, Array]:
    """How the part `span` of an update depends on label shares, (size, classes), and what that leaves of each client's, (m, size).

    By ridge regression over `count` clients of `samples` samples and `labels` labels that `train` from `start`; what is a label's column in
    one client's update is so in a mean over many unlike clients, too. Raises `InputError` where no client ends with finite parameters.
    """
    seen, shares = _simulated(train, start, x, y, samples, labels, span, rng, count, None)
    if not len(seen):
        raise InputError("response_by_simulation: no simulated client ends with finite parameters")
    square = shares.T @ shares
    weights = np.linalg.solve(square + RESPONSE_RIDGE * np.trace(square) / len(square) * np.eye(len(square)), shares.T @ seen)
    return np.asarray(weights.T), np.asarray(seen - shares @ weights)


@dataclass(frozen=True, eq=False)
class LinearReading:
    """Label shares q from a part of an update u by generalised least squares: |root q − towards u|² is least for q ≥ 0, Σ q = 1.

    `root` (classes, classes), `towards` (classes, size). `deviation` is how far the noise of one client's update moves a share, root mean
    square.
    """

    root: Array
    towards: Array
    deviation: float

    def shares(self, seen: Array) -> Array:
        """Label shares (classes,) from the part (size,) of an update."""
        heavy = 10.0 * max(float(np.abs(self.root).max()), 1e-300)
        system = np.vstack([self.root, np.full((1, len(self.root)), heavy)])
        weights, _ = nnls(system, np.append(self.towards @ np.asarray(seen, np.float64), heavy))
        return np.asarray(weights / max(float(weights.sum()), 1e-12))


def linear_reading(response: Array, residuals: Array) -> LinearReading:
    """How to read shares from updates R q + noise, R the `response` (size, classes), the noise as in `residuals` (m, size).

    The noise's covariance is that of the residuals, shrunk towards a multiple of the identity as Ledoit & Wolf 2004 do.
    """
    rows = residuals - residuals.mean(axis=0)
    count, size = rows.shape
    spread = max(float((rows**2).sum()) / (count * size), 1e-300)
    shrunk = min(max(float(ledoit_wolf_shrinkage(rows, assume_centered=True)), LEAST_SHRUNK), 1.0)
    ridge, kept = shrunk * spread, (1 - shrunk) / count
    small = np.eye(count) * ridge + kept * (rows @ rows.T)  # Woodbury: there are fewer clients than parameters
    weighted = (response - kept * rows.T @ np.linalg.solve(small, rows @ response)) / ridge
    information = response.T @ weighted
    information += LEAST_SHRUNK * float(np.trace(information)) / len(information) * np.eye(len(information))
    lower = np.linalg.cholesky(information)
    deviation = float(np.sqrt(np.trace(np.linalg.inv(information)) / len(information)))
    return LinearReading(np.asarray(lower.T), np.asarray(np.linalg.solve(lower, weighted.T)), deviation)


def _simulated(
    train: Train, start: Array, x: Array, y: Array, samples: int, labels: int, span: slice, rng: Stream, count: int, anchor: Array | None
) -> tuple[Array, Array]:
    """Bias updates (k, classes) and label shares (k, classes) of `count` clients of the attacker's own, those that end finite."""
    present = np.unique(y)
    shares = np.zeros((count, train.model.classes))
    shares[:, present] = pretended_shares(len(present), min(labels, len(present)), rng, count)
    by_label, sizes = np.argsort(y, kind="stable"), np.bincount(y, minlength=train.model.classes)
    first = np.cumsum(sizes) - sizes
    key, inputs = int(rng.integers(2**31)), []
    sent = {"model": start} | ({} if anchor is None else {"anchor": anchor})
    vectors = {name: vector.astype(train.model.init(0).dtype) for name, vector in sent.items()}
    for i, row in enumerate(shares):
        labels_drawn = rng.choice(len(row), samples, p=row)
        shares[i] = np.bincount(labels_drawn, minlength=len(row)) / samples
        places = by_label[first[labels_drawn] + rng.integers(0, sizes[labels_drawn])]
        data = ClientData(i, x[places], y[places], x[:1], y[:1])
        inputs.append(TaskInput(data, vectors, {}, Streams(key, 0, i)))
    with one_thread():
        results = Engine().run(train, inputs)
    kept = [i for i, result in enumerate(results) if "update" in result]
    seen = np.array([np.asarray(results[i]["update"], np.float64)[span] for i in kept]).reshape(len(kept), -1)
    return seen, shares[kept]


def _features(rows: Array, scale: float) -> Array:
    """1 and the coordinates of rows over `scale` (0: over their own lengths): (n, C) -> (n, 1 + C)."""
    return np.hstack([np.ones((len(rows), 1)), rows / (scale or np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300))])
