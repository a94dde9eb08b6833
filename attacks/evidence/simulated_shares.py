"""Simulated clients for label shares: the attacker trains clients of its own on auxiliary samples, as the public task asks.

Two uses. Where updates are not linear in gradients (Adam), or the last layer has no bias, a client's shares are learned from the updates of
simulated clients (`learned_shares`). In sums over unlike clients, each label moves the head by a response that simulated clients tell, and
generalised least squares read the shares of the sum (`linear_reading`).

A mean over several clients is read by a linear regression. What it proves and does not prove: as `label_inference`; of means by Adam the
reading holds nearly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls
from sklearn.covariance import ledoit_wolf_shrinkage

from ...engine import Engine, Streams, TaskInput
from ...engine.models import Model
from ...engine.threads import one_thread
from ...errors import InputError
from ...randomness import Stream
from ...tasks.training import Train
from ...types import Array, ClientData
from .learned_shares import Rows, learned_shares, ridge_shares, shares_of_bias

__all__ = [
    "Head", "LinearReading", "clients_by_simulation", "head_of", "linear_reading", "pretended_shares", "response_of",
    "shares_by_simulation", "simulated_samples",
]  # fmt: skip

PRETENDED, FEWEST_PRETENDED, MOST_NUMBERS = 256, 64, 1 << 26
"""So many clients the attacker trains from each model that was sent, fewer where their updates would be more numbers than this."""
SECONDS, PASSES, DOUBLES = 20.0, 1.0e5, 2.0e4
"""Fewer also where they would take longer; a second trains about so many samples, half as many with so many parameters."""
RESPONSE_RIDGE = 1e-3
LEAST_SHRUNK = 1e-6


def pretended_shares(classes: int, labels: int, rng: Stream, number: int = 0) -> Array:
    """Label shares (classes,) for the attacker's own client of this `number`: `labels` labels, equally and unequally in turn."""
    row = np.zeros(classes)
    row[rng.choice(classes, labels, replace=False)] = rng.dirichlet(np.full(labels, (0.3, 1.0, 100.0)[number % 3]))
    return row


def shares_by_simulation(
    train: Train, start: Array, x: Array, y: Array, people: Sequence[tuple[int, int]], rng: Stream, anchor: Array | None = None, *,
    is_mean: bool = False, directions: bool = False,
) -> Callable[[Array, int], Array]:  # fmt: skip
    """(update (d,), number of labels) -> label shares (classes,), of clients that `train` from `start`.

    `people` are the numbers of samples and of labels that clients have; simulated clients have these in turn. `x`, `y` are the attacker's
    labelled samples, which may lack labels. `anchor` (d,) is what the proximal term of `train` pulls to, if not the start.
    With `is_mean` updates are means over several clients, and are read by a linear regression on the last layer's bias, whose reading of a
    mean is the mean of readings; with `directions` not by their length, as it is not known what they were scaled by. Where no simulated
    client ends with finite parameters the answer is equal shares.
    """
    classes, head = train.model.classes, head_of(train.model, train.frozen)
    span = slice(0, train.model.dimension) if head is None else head.span
    passes = train.epochs * float(np.mean([samples for samples, _ in people])) * (1 + train.model.dimension / DOUBLES)
    count = min(PRETENDED, MOST_NUMBERS // (span.stop - span.start), int(SECONDS * PASSES / passes))
    seen, shares = _simulated(train, start, x, y, people, span, rng, max(FEWEST_PRETENDED, count), anchor)
    if not len(seen):
        return lambda update, labels: np.full(classes, 1 / classes)
    if head is None or is_mean:
        if head is not None and head.has_bias:
            span, seen = slice(span.stop - classes, span.stop), seen[:, -classes:]
        scale = float(np.linalg.norm(seen, axis=1).mean()) if is_mean and not directions else 0.0
        whole = (shares_of_bias if head is not None and head.has_bias else ridge_shares)(seen, shares, scale)
        return lambda update, labels: np.asarray(whole.read(np.asarray(update)[None, span], [labels])[0])
    learned = learned_shares(head.rows(seen), shares)
    return lambda update, labels: np.asarray(learned.read(head.rows(np.asarray(update)[None, span]), [labels])[0])


@dataclass(frozen=True)
class Head:
    """The last layer in a parameter vector, `span`: a weight of `shape` (classes, …), if it is in it, and then a bias, if it `has_bias`."""

    span: slice
    shape: tuple[int, ...]
    has_bias: bool

    def rows(self, parts: Array) -> Rows:
        """The labels' rows in the part (m, size) of updates."""
        parts = np.asarray(parts, np.float64)
        cut = parts.shape[1] - self.has_bias * self.shape[0]
        weights = parts[:, :cut].reshape(len(parts), self.shape[0], -1) if cut else None
        return Rows(weights, parts[:, cut:] if self.has_bias else None)


def head_of(model: Model, frozen: tuple[str, ...] = ()) -> Head | None:
    """The last layer of a model, its bias alone where the weight is too large or not before it; None where the last parameters have no row
    for each class, or have a name that begins with one of `frozen`."""
    name, shape, offset = model.layout[-1]
    if name.startswith(frozen or ("\0",)):
        return None
    has_bias = name.endswith("bias") and shape == (model.classes,)
    if not has_bias:
        return Head(slice(offset, model.dimension), shape, False) if len(shape) > 1 and shape[0] == model.classes else None
    if len(model.layout) > 1:
        _, of_weight, start = model.layout[-2]
        whole = len(of_weight) > 1 and of_weight[0] == model.classes and start + int(np.prod(of_weight)) == offset
        if whole and (model.dimension - start) * FEWEST_PRETENDED <= MOST_NUMBERS:
            return Head(slice(start, model.dimension), of_weight, True)
    return Head(slice(offset, model.dimension), shape, True)


def clients_by_simulation(
    train: Train, start: Array, x: Array, y: Array, samples: int, labels: int, span: slice, rng: Stream, count: int
) -> tuple[Array, Array]:  # fmt: skip
    """The part `span` of the updates (m, size) and the label shares (m, classes) of `count` clients that `train` from `start`.

    Each has so many `samples` and `labels`; those that end finite are kept. Raises `InputError` where none does.
    """
    seen, shares = _simulated(train, start, x, y, [(samples, labels)], span, rng, count, None)
    if not len(seen):
        raise InputError("clients_by_simulation: no simulated client ends with finite parameters")
    return seen, shares


def response_of(seen: Array, shares: Array) -> tuple[Array, Array]:
    """How parts of updates `seen` (m, size) depend on label `shares` (m, classes): (size, classes), and what that leaves of each (m, size).

    By ridge regression; what is a label's column in one client's update is so in a mean over many unlike clients, too.
    """
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
    train: Train, start: Array, x: Array, y: Array, people: Sequence[tuple[int, int]], span: slice, rng: Stream, count: int,
    anchor: Array | None,
) -> tuple[Array, Array]:  # fmt: skip
    """The part `span` of updates (k, size) and label shares (k, classes) of `count` simulated clients, those that end finite."""
    key, inputs = int(rng.integers(2**31)), []
    sent = {"model": start} | ({} if anchor is None else {"anchor": anchor})
    vectors = {name: vector.astype(train.model.init(0).dtype) for name, vector in sent.items()}
    places, shares = simulated_samples(y, train.model.classes, people, rng, count)
    for i, chosen in enumerate(places):
        inputs.append(TaskInput(ClientData(i, x[chosen], y[chosen], x[:1], y[:1]), vectors, {}, Streams(key, 0, i)))
    with one_thread():
        results = Engine().run(train, inputs)
    kept = [i for i, result in enumerate(results) if "update" in result]
    seen = np.array([np.asarray(results[i]["update"], np.float64)[span] for i in kept]).reshape(len(kept), -1)
    return seen, shares[kept]


def simulated_samples(
    y: Array, classes: int, people: Sequence[tuple[int, int]], rng: Stream, count: int
) -> tuple[list[Array], Array]:  # fmt: skip
    """Places of samples among the labels `y` for `count` simulated clients, and their label shares (count, classes).

    `people` are numbers of samples and labels, which simulated clients have in turn. Samples repeat.
    """
    present = np.unique(y)
    shares, places = np.zeros((count, classes)), []
    by_label, sizes = np.argsort(y, kind="stable"), np.bincount(y, minlength=classes)
    first = np.cumsum(sizes) - sizes
    for i, row in enumerate(shares):
        samples, labels = people[i % len(people)]
        row[present] = pretended_shares(len(present), min(labels, len(present)), rng, i)
        drawn = rng.choice(classes, samples, p=row)
        shares[i] = np.bincount(drawn, minlength=classes) / samples
        places.append(by_label[first[drawn] + rng.integers(0, sizes[drawn])])
    return places, shares
