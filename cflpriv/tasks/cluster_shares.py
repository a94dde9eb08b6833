"""What a client adds to the sums from which a server finds clusters: contributions of bounded length, and the choice of a cluster.

Every contribution is one vector of Euclidean norm at most `norm`, computed at public values of earlier sums, so a sum of them with Gaussian
noise is one Gaussian mechanism. Its last `BLANK` numbers are zero for every client: what a sum holds there is noise and nothing else, and
tells the server how large the noise is, whatever protection added it. `noise_in`, `moment_of`, `cells_of`,
`clusters_of` and `counted_blocks` read a sum that the server received.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from math import inf, sqrt
from typing import ClassVar

import numpy as np

from ..engine import Device, Result, TaskInput
from ..engine.models import Model
from ..engine.sample_gradients import summed_directions
from ..protocols.sketch import public_sketch
from ..randomness import stream
from ..types import Array, Parts
from .evaluation import EvaluateUsed
from .fold_gradients import fold_weights
from .halves import HALVES
from .training import Train

__all__ = [
    "BLANK", "BLOCK_COUNT", "CellShare", "CentreShare", "ChooseCluster", "ClusterShare", "EvaluateChosen", "MomentShare", "TrainInBlock",
    "cells_of", "clusters_of", "counted_blocks", "moment_of", "noise_in",
]  # fmt: skip

BLANK = 256
"""So many numbers of each contribution are zero: the noise in a sum of them is known to about 4 per cent, of twelve sums to 1."""
LENGTH_PART = 0.3
"""The part of the length of a contribution to a moment that tells how long the client's product was."""
LONGEST = 3.0
"""A product of halves is counted as no longer than this (that of two unit vectors at an angle is shorter than 1)."""
CELL_COUNT, CELL_RESIDUAL, CELL_SQUARES = sqrt(0.4), sqrt(0.4), sqrt(0.2)
"""How the length of a contribution to cells is divided: the count, the residual, and the squares of its coordinates."""
CLUSTER_COUNT, CLUSTER_VECTOR = 0.5, sqrt(0.75)
"""The same of a contribution to clusters: the count, and the vector."""
LARGEST_SQUARE = 4.0
"""Squares of coordinates are sent in units of this times the squared radius."""
BLOCK_COUNT = 0.25
"""The part of the length of a contribution of counted blocks that is the count: the update keeps √(15/16) of the length."""
MOST_REMEMBERED = 4096
"""A process remembers the means of the last so many clients, 2 kB each."""
_REMEMBERED: dict[tuple[Hashable, ...], Array] = {}
ROUNDING = 1e-6
"""Counted blocks are shorter by this share than they may be, so that rounding in float32 does not make them longer."""


@dataclass(frozen=True)
class ClientVectors:
    """What the tasks below have in common: a client's public sketch of its mean gradient at the model "start".

    Each sample's gradient has norm 1, and every label that the client has counts alike. The mean is sketched to `sketch` numbers (not at
    all where the model has no more), and divided by its own length: the "whole" vector. The "short" vector, for second moments and cells,
    is projected to `directions` dimensions before the division. `norm`: the length of a contribution at most. `seed`: of the public sketch
    and projection.
    """

    model: Model
    sketch: int = 256
    directions: int = 24
    norm: float = 1.0
    seed: int = 0

    parts: ClassVar[Parts] = {"contribution": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def cost(self, task_input: TaskInput) -> int:
        return len(task_input.data.y_train)

    @property
    def size(self) -> int:
        """The length of a client's vector."""
        return min(self.sketch, self.model.dimension)

    @property
    def moment_size(self) -> int:
        """The number of dimensions of a second moment."""
        return min(self.directions, self.size)

    def whole(self, task_input: TaskInput) -> Array:
        """The client's vector (size,), of norm 1, or 0 where it has no gradient."""
        vector: Array = _over_first(self._mean(task_input))[0]
        return vector

    def short(self, task_input: TaskInput) -> Array:
        """The client's short vector (moment_size,), of norm 1, or 0 where it has no gradient."""
        vector: Array = _over_first(self._mean(task_input) @ self._projection())[0]
        return vector

    def halves(self, task_input: TaskInput, number: int) -> Array:
        """The short vectors (2, moment_size) of two random halves, over the length of that of all. `InputError` for one sample."""
        labels = task_input.data.y_train
        weights = np.concatenate([_whole_weights(labels), fold_weights(labels, True, task_input.streams(f"halves {number}"))])
        return _over_first(self._means(task_input, weights) @ self._projection())[1:]

    def _mean(self, task_input: TaskInput) -> Array:
        """The mean (1, size) over all samples. It is the same in every round, and asked for in each, so a process remembers it."""
        x, y, start = (
            np.ascontiguousarray(array) for array in (task_input.data.x_train, task_input.data.y_train, task_input.array("start"))
        )
        digest = blake2b(x.tobytes() + y.tobytes() + start.tobytes(), digest_size=16).digest()
        key = (self.model, self.sketch, self.seed, x.shape, str(x.dtype), str(y.dtype), str(start.dtype), digest)
        means = _REMEMBERED.get(key)
        if means is None:
            means = _REMEMBERED[key] = self._means(task_input, _whole_weights(task_input.data.y_train))
            while len(_REMEMBERED) > MOST_REMEMBERED:
                _REMEMBERED.pop(next(iter(_REMEMBERED)), None)
        return means

    def _means(self, task_input: TaskInput, weights: Array) -> Array:
        """Weighted means (rows, size) of the sketched gradients."""
        rows = summed_directions(self.model, task_input.array("start"), task_input.data, weights)
        if self.model.dimension > self.sketch:
            rows = np.asarray(public_sketch("private clusters", self.seed, self.model.dimension, self.sketch).apply(rows))
        return rows

    def _projection(self) -> Array:
        """The public projection (size, moment_size), with orthonormal columns."""
        return _projection(self.seed, self.size, self.moment_size)

    def _contribution(self, *numbers: Array) -> Result:
        """One vector of norm at most `norm`, and the blanks."""
        vector = np.concatenate([*(np.ravel(part) for part in numbers), np.zeros(BLANK)])
        return {"contribution": vector * (self.norm / max(1.0, float(np.linalg.norm(vector))))}


@dataclass(frozen=True)
class CentreShare(ClientVectors):
    """The client's whole and short vectors, each times √½. Part: "contribution" (size + moment_size + BLANK,)."""

    def run(self, task_input: TaskInput) -> Result:
        return self._contribution(self.whole(task_input) * sqrt(0.5), self.short(task_input) * sqrt(0.5))


@dataclass(frozen=True)
class MomentShare(ClientVectors):
    """The symmetric product of the two halves' short vectors minus the public "short_centre", scaled to one length for all.

    Errors of different halves are independent, so the mean over clients has no part of a client's sampling noise. Part: "contribution"
    (r (r + 1) / 2 + 1 + BLANK,), with r = moment_size: the upper triangle (off the diagonal times √2), and the product's length before. A
    client with fewer than two samples contributes zeros.
    """

    number: int = 0

    def run(self, task_input: TaskInput) -> Result:
        rows, columns, scale = _triangle(self.moment_size)
        if len(task_input.data.y_train) < HALVES:
            return self._contribution(np.zeros(len(rows) + 1))
        a, b = self.halves(task_input, self.number) - task_input.array("short_centre")
        product = (a[rows] * b[columns] + a[columns] * b[rows]) / 2 * scale
        length = float(np.linalg.norm(product))
        unit = product / length if length > 0 else product
        return self._contribution(unit * sqrt(1 - LENGTH_PART**2), np.array([LENGTH_PART * min(1.0, length / LONGEST)]))


@dataclass(frozen=True)
class CellShare(ClientVectors):
    """A count and a residual in the block of the nearest of the public "cells" (m, s).

    They are points among the coordinates of short vectors minus "short_centre" along the "basis" (moment_size, s). A residual longer than
    "radius" () is clipped. With them goes the square of each coordinate. Part: "contribution" (m · (1 + s) + s + BLANK,).
    """

    spread: ClassVar[float] = inf  # a client may be alone in its cell

    def run(self, task_input: TaskInput) -> Result:
        cells, radius = task_input.array("cells"), float(task_input.array("radius"))
        place = (self.short(task_input) - task_input.array("short_centre")) @ task_input.array("basis")
        nearest = int(np.square(cells - place).sum(1).argmin())
        residual = (place - cells[nearest]) / radius
        residual /= max(1.0, float(np.linalg.norm(residual)))
        blocks = np.zeros((len(cells), 1 + cells.shape[1]))
        blocks[nearest] = CELL_COUNT, *(CELL_RESIDUAL * residual)
        squares = np.square(place / radius) / LARGEST_SQUARE
        squares /= max(1.0, float(np.linalg.norm(squares)))
        return self._contribution(blocks, CELL_SQUARES * squares)


@dataclass(frozen=True)
class ChooseCluster(ClientVectors):
    """The cluster of a client's vector v: the largest of "rows" (k, size) · (v − "centre") − "offsets" (k,). Part: "choice" ().

    v is the whole vector, or with `by_short` the short one.
    """

    by_short: bool = False

    parts: ClassVar[Parts] = {"choice": "choice"}

    def choice(self, task_input: TaskInput) -> int:
        """The number of the cluster."""
        vector = self.short(task_input) if self.by_short else self.whole(task_input)
        return int((task_input.array("rows") @ (vector - task_input.array("centre")) - task_input.array("offsets")).argmax())

    def run(self, task_input: TaskInput) -> Result:
        return {"choice": np.array(self.choice(task_input))}


@dataclass(frozen=True)
class ClusterShare(ClientVectors):
    """A count and the whole vector minus "centre" (size,) in the block of the client's own "choice" () among `k` clusters.

    The difference is divided by "radius" () and clipped to norm 1. Part: "contribution" (k · (1 + size) + BLANK,).
    """

    k: int = 1

    @property
    def spread(self) -> float:
        """Of the weights inside a contribution: a client may be alone in its block."""
        return inf if self.k > 1 else 1.0

    def run(self, task_input: TaskInput) -> Result:
        vector = (self.whole(task_input) - task_input.array("centre")) / float(task_input.array("radius"))
        vector /= max(1.0, float(np.linalg.norm(vector)))
        blocks = np.zeros((self.k, 1 + self.size))
        blocks[int(task_input.array("choice"))] = CLUSTER_COUNT, *(CLUSTER_VECTOR * vector)
        return self._contribution(blocks)


@dataclass(frozen=True)
class TrainInBlock:
    """Local training from the model of the client's choice; its update stands in the block of that choice, with zeros in all others.

    Part: "blocks" (k, d). Kept by the client: "trained" (d,). So one sum over all clients holds the sum of each cluster, and nobody but the
    client knows its cluster. A client sends k times as many numbers as the model has.

    With `norm` above 0 the blocks are counted, (k, d + 1): the last number of one block is `BLOCK_COUNT` · norm, that of the given
    "counted" (), or else of the choice. The update is clipped to the rest of `norm`, so counts are exact where contributions are clipped to
    `norm` as a whole.
    """

    train: Train
    k: int
    norm: float = 0.0

    parts: ClassVar[Parts] = {"blocks": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ("trained",)

    @property
    def spread(self) -> float:
        """Of the weights inside the blocks: a client may be alone in its block."""
        return inf if self.k > 1 else 1.0

    def cost(self, task_input: TaskInput) -> int:
        return self.train.cost(task_input)

    def chunk_size(self, task_input: TaskInput, device: Device) -> int:
        return self.train.chunk_size(task_input, device)

    def run(self, task_input: TaskInput) -> Result:
        return self._placed(task_input, self.train.run(task_input))

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        results, path = self.train.run_many(inputs, device)
        return [self._placed(task_input, result) for task_input, result in zip(inputs, results, strict=True)], path

    def _placed(self, task_input: TaskInput, result: Result) -> Result:
        if not result:  # its training diverged: it takes no part
            return {}
        update = np.asarray(result["update"])
        if not isinstance(task_input.choice, int):
            raise TypeError("TrainInBlock: expected one choice of a list of models")
        blocks = np.zeros((self.k, len(update) + (self.norm > 0)), dtype=update.dtype)
        if self.norm > 0:
            room = self.norm * sqrt(1 - BLOCK_COUNT**2) * (1 - ROUNDING)
            update = update * (room / max(room, float(np.linalg.norm(update.astype(np.float64)))))
            blocks[int(task_input.array("counted")) if "counted" in task_input.params else task_input.choice, -1] = self.norm * BLOCK_COUNT
        blocks[task_input.choice, : len(update)] = update
        return {"blocks": blocks, "trained": result["trained"]}


@dataclass(frozen=True)
class EvaluateChosen:
    """Evaluate the one of the list "model" that belongs to the client's cluster, see `ChooseCluster`.

    Parts: those of `Evaluate`, and "choice" ().
    """

    choose: ChooseCluster

    keeps: ClassVar[tuple[str, ...]] = ()

    @property
    def parts(self) -> Parts:
        return {**EvaluateUsed(self.choose.model).parts, "choice": "choice"}

    def used(self, task_input: TaskInput) -> Array:
        """The model (d,) that the client uses."""
        return self._models(task_input)[self.choose.choice(task_input)]

    def run(self, task_input: TaskInput) -> Result:
        chosen = self.choose.choice(task_input)
        model = self._models(task_input)[chosen]
        result = EvaluateUsed(self.choose.model).run(_with_model(task_input, model))
        return {**result, "choice": np.array(chosen)}

    def _models(self, task_input: TaskInput) -> list[Array]:
        models = task_input.params["model"]
        if not isinstance(models, list):
            raise TypeError("parameter 'model': EvaluateChosen takes a list of models")
        return models


# --- what the server reads of a sum


def noise_in(total: Array) -> tuple[float, int]:
    """The sum of squares of the noise in the blanks of a sum of contributions, and their number."""
    return float(np.square(total[-BLANK:]).sum()), BLANK


def moment_of(total: Array, r: int) -> tuple[Array, float]:
    """Of sums of `MomentShare`s (norm 1): the sum (r, r) of the products of length 1, and that of the products' lengths."""
    rows, columns, scale = _triangle(r)
    matrix = np.zeros((r, r))
    matrix[rows, columns] = matrix[columns, rows] = total[: len(rows)] / scale / sqrt(1 - LENGTH_PART**2)
    return matrix, float(total[len(rows)]) * LONGEST / LENGTH_PART


def cells_of(total: Array, m: int, s: int) -> tuple[Array, Array, Array]:
    """Of a sum of `CellShare`s (norm 1) in s dimensions: counts (m,), sums of residuals (m, s) and of squares (s,), all over the radius."""
    blocks = total[: m * (1 + s)].reshape(m, 1 + s)
    squares = total[m * (1 + s) : m * (1 + s) + s] * (LARGEST_SQUARE / CELL_SQUARES)
    return blocks[:, 0] / CELL_COUNT, blocks[:, 1:] / CELL_RESIDUAL, squares


def clusters_of(total: Array, k: int) -> tuple[Array, Array]:
    """Of a sum of `ClusterShare`s (norm 1): the counts (k,), and the sums (k, size) of vectors over the radius."""
    blocks = total[:-BLANK].reshape(k, -1)
    return blocks[:, 0] / CLUSTER_COUNT, blocks[:, 1:] / CLUSTER_VECTOR


def counted_blocks(total: Array, norm: float) -> tuple[Array, Array]:
    """Of a sum (k, d + 1) of counted blocks of `TrainInBlock`: the counts (k,), and the sums (k, d) of updates."""
    return total[:, -1].astype(np.float64) / (norm * BLOCK_COUNT), total[:, :-1]


def _whole_weights(labels: Array) -> Array:
    """The weight (1, n) of each sample in the mean of all: labels count alike, and the samples of a label."""
    rarity = np.ones(len(labels))
    if labels.ndim == 1:
        _, place, sizes = np.unique(labels, return_inverse=True, return_counts=True)
        rarity = 1 / sizes[place]
    weights: Array = (rarity / rarity.sum())[None]
    return weights


def _over_first(rows: Array) -> Array:
    """Rows over the length of the first; zeros where that is 0."""
    length = float(np.linalg.norm(rows[0]))
    return np.asarray(rows / length) if length > 0 else np.zeros_like(rows)


def _with_model(task_input: TaskInput, model: Array) -> TaskInput:
    return replace(task_input, params={"model": model})


@lru_cache(maxsize=8)
def _triangle(r: int) -> tuple[Array, Array, Array]:
    """Rows and columns of the upper triangle, and what makes the length of its numbers that of the matrix."""
    rows, columns = np.triu_indices(r)
    return rows, columns, np.where(rows == columns, 1.0, sqrt(2.0))


@lru_cache(maxsize=4)
def _projection(seed: int, size: int, r: int) -> Array:
    if r == size:
        return np.eye(size)
    return np.linalg.qr(stream(seed, "private clusters projection").standard_normal((size, r)))[0]
