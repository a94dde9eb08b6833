"""What a client adds to the sums from which a server finds clusters: contributions of bounded length, and the choice of a cluster.

Every contribution is one vector of Euclidean norm at most `norm`, computed at public values of earlier sums, so a sum of them with Gaussian
noise is one Gaussian mechanism. Its last `BLANK` numbers are zero for every client: what a sum holds there is noise and nothing else, and
tells the server how large the noise is, whatever protection added it. `noise_in`, `moment_of`, `cells_of` and `counted_blocks` read a sum
that the server received.

Guarantee, of every contribution: whatever the client's data and the server's values are, its norm is at most `norm`, so one client more or
less (whose neighbour's contribution is zero) moves a sum by no more. A value that is not finite has no norm; it counts as a contribution of
zeros where clients are asked to bound it. Reveals: nothing but the sum, up to its noise.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
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
from .fold_gradients import fold_weights
from .halves import HALVES
from .training import Train

__all__ = [
    "BLANK", "BLOCK_COUNT", "CellShare", "CentreShare", "ChooseCluster", "MomentShare", "TrainInBlock", "cells_of", "counted_blocks",
    "moment_of", "noise_in",
]  # fmt: skip

BLANK = 256
"""So many numbers of each contribution are zero: the noise in a sum of them is known to about 4 per cent, of seven sums to 2."""
LENGTH_PART = 0.3
"""The part of the length of a contribution to a moment that tells how long the client's product was."""
SPLITS = 32
"""How often random halves are dealt. Their products are averaged before they are scaled: less of the length is then sampling noise."""
LONGEST = 3.0
"""A product of halves is counted as no longer than this (that of two unit vectors at an angle is shorter than 1)."""
CELL_COUNT, CELL_RESIDUAL, CELL_SQUARES = sqrt(0.4), sqrt(0.4), sqrt(0.2)
"""How the length of a contribution to cells is divided: the count, the residual, and the squares of its coordinates."""
LARGEST_SQUARE = 4.0
"""Squares of coordinates are sent in units of this times the squared radius."""
BLOCK_COUNT = 0.25
"""The part of the length of a contribution of counted blocks that is the count: the update keeps √(15/16) of the length."""
MOST_REMEMBERED = 4096
"""A process remembers the vectors of the last so many clients, 5 kB each."""
_REMEMBERED: dict[tuple[Hashable, ...], "ShortVectors"] = {}
ROUNDING = 1e-6
"""Counted blocks are shorter by this share than they may be, so that rounding in float32 does not make them longer."""


@dataclass(frozen=True, eq=False)
class ShortVectors:
    """A client's vector (r,) of norm 1, or 0 without a gradient; and of random halves, over the length of that of all samples, their mean
    (r,) and the mean (r, r) of the symmetric products of two."""

    vector: Array
    half: Array
    product: Array


@dataclass(frozen=True)
class ClientVectors:
    """What the tasks below have in common: a client's short vector, a public projection of its mean gradient at the model "start".

    Each sample's gradient has norm 1, and every label that the client has counts alike. The mean is sketched to `sketch` numbers (not at
    all where the model has no more), projected to `directions` dimensions, and divided by its own length. `norm`: the length of a
    contribution at most. `seed`: of the public sketch, projection and halves.
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
        """The length of a sketched gradient."""
        return min(self.sketch, self.model.dimension)

    @property
    def moment_size(self) -> int:
        """The number of dimensions of a short vector, r."""
        return min(self.directions, self.size)

    def vectors(self, task_input: TaskInput) -> ShortVectors:
        """The client's vectors. They are the same in every round, and asked for in each, so a process remembers them."""
        x, y, start = (
            np.ascontiguousarray(array) for array in (task_input.data.x_train, task_input.data.y_train, task_input.array("start"))
        )
        digest = blake2b(x.tobytes() + y.tobytes() + start.tobytes(), digest_size=16).digest()
        settings = self.model, self.sketch, self.directions, self.seed
        key = (*settings, x.shape, str(x.dtype), str(y.dtype), str(start.dtype), digest)
        vectors = _REMEMBERED.get(key)
        if vectors is None:
            vectors = _REMEMBERED[key] = self._computed(task_input)
            while len(_REMEMBERED) > MOST_REMEMBERED:
                _REMEMBERED.pop(next(iter(_REMEMBERED)), None)
        return vectors

    def _computed(self, task_input: TaskInput) -> ShortVectors:
        labels, r = task_input.data.y_train, self.moment_size
        deals = stream(self.seed, "private clusters halves")  # of any data the same, so nothing has to be kept to compute them again
        halves = [fold_weights(labels, True, deals) for _ in range(SPLITS if len(labels) >= HALVES else 0)]
        rows = summed_directions(self.model, task_input.array("start"), task_input.data, np.concatenate([_whole_weights(labels), *halves]))
        if self.model.dimension > self.sketch:
            rows = np.asarray(public_sketch("private clusters", self.seed, self.model.dimension, self.sketch).apply(rows))
        rows = rows @ _projection(self.seed, self.size, r)
        length = float(np.linalg.norm(rows[0]))
        rows = rows / length if length > 0 else np.zeros_like(rows)
        pairs = rows[1:].reshape(-1, HALVES, r)
        if not len(pairs):
            return ShortVectors(rows[0], np.zeros(r), np.zeros((r, r)))
        product = pairs[:, 0].T @ pairs[:, 1] / len(pairs)
        return ShortVectors(rows[0], pairs.mean((0, 1)), (product + product.T) / 2)

    def _contribution(self, *numbers: Array) -> Result:
        """One vector of norm at most `norm`, and the blanks."""
        vector = np.concatenate([*(np.ravel(part) for part in numbers), np.zeros(BLANK)])
        return {"contribution": _within(vector) * self.norm}


@dataclass(frozen=True)
class CentreShare(ClientVectors):
    """The client's short vector. Part: "contribution" (moment_size + BLANK,)."""

    def run(self, task_input: TaskInput) -> Result:
        return self._contribution(self.vectors(task_input).vector)


@dataclass(frozen=True)
class MomentShare(ClientVectors):
    """The symmetric product of two halves' short vectors minus the public "centre", the mean of `SPLITS` splits, scaled to one length.

    Errors of different halves are independent, so the mean over clients has no part of a client's sampling noise. Part: "contribution"
    (r (r + 1) / 2 + 1 + BLANK,), with r = moment_size: the upper triangle (off the diagonal times √2), and the product's length before. A
    client with fewer than two samples contributes zeros.
    """

    def run(self, task_input: TaskInput) -> Result:
        rows, columns, scale = _triangle(self.moment_size)
        if len(task_input.data.y_train) < HALVES:
            return self._contribution(np.zeros(len(rows) + 1))
        own, centre = self.vectors(task_input), task_input.array("centre")
        around = own.product - np.outer(own.half, centre) - np.outer(centre, own.half) + np.outer(centre, centre)
        product = around[rows, columns] * scale
        length = float(np.linalg.norm(product))
        unit = product / length if length > 0 else product
        return self._contribution(unit * sqrt(1 - LENGTH_PART**2), np.array([LENGTH_PART * min(1.0, length / LONGEST)]))


@dataclass(frozen=True)
class CellShare(ClientVectors):
    """A count and a residual in the block of the nearest of the public "cells" (m, s).

    They are points among the coordinates of short vectors minus "centre" along the "basis" (moment_size, s). A residual longer than √s is
    clipped: the basis is scaled so that clients' means have variance 1 in each direction. With them goes the square of each coordinate.
    Part: "contribution" (m · (1 + s) + s + BLANK,).
    """

    spread: ClassVar[float] = inf  # a client may be alone in its cell

    def run(self, task_input: TaskInput) -> Result:
        cells = task_input.array("cells")
        nearby = cells / sqrt(cells.shape[1])
        place = (self.vectors(task_input).vector - task_input.array("centre")) @ task_input.array("basis") / sqrt(cells.shape[1])
        nearest = int(np.square(nearby - place).sum(1).argmin())
        blocks = np.zeros((len(cells), 1 + cells.shape[1]))
        blocks[nearest] = CELL_COUNT, *(CELL_RESIDUAL * _within(place - nearby[nearest]))
        return self._contribution(blocks, CELL_SQUARES * _within(np.square(place) / LARGEST_SQUARE))


@dataclass(frozen=True)
class ChooseCluster(ClientVectors):
    """The cluster of a client's short vector v: the largest of "rows" (k, r) · (v − "centre") − "offsets" (k,). Part: "choice" ()."""

    parts: ClassVar[Parts] = {"choice": "choice"}

    def run(self, task_input: TaskInput) -> Result:
        place = self.vectors(task_input).vector - task_input.array("centre")
        return {"choice": np.array(int((task_input.array("rows") @ place - task_input.array("offsets")).argmax()))}


@dataclass(frozen=True)
class TrainInBlock:
    """Local training from the model of the client's choice; its update stands in the block of that choice, with zeros in all others.

    Part: "blocks" (k, d + 1). Kept by the client: "trained" (d,). So one sum over all clients holds the sum of each cluster, and nobody but
    the client knows its cluster. A client sends k times as many numbers as the model has.

    The last number of one block is `BLOCK_COUNT` · `norm`, that of the given "counted" (), or else of the choice. The update is clipped to
    the rest of `norm`, so counts are exact where contributions are clipped to `norm` as a whole.
    """

    train: Train
    k: int
    norm: float

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
        blocks = np.zeros((self.k, len(update) + 1), dtype=update.dtype)
        room = self.norm * sqrt(1 - BLOCK_COUNT**2) * (1 - ROUNDING)
        blocks[int(task_input.array("counted")) if "counted" in task_input.params else task_input.choice, -1] = self.norm * BLOCK_COUNT
        blocks[task_input.choice, :-1] = update * (room / max(room, float(np.linalg.norm(update.astype(np.float64)))))
        return {"blocks": blocks, "trained": result["trained"]}


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
    """Of a sum of `CellShare`s (norm 1) in s dimensions: counts (m,), sums of residuals (m, s) over √s, and of squares (s,) over s."""
    blocks = total[: m * (1 + s)].reshape(m, 1 + s)
    squares = total[m * (1 + s) : m * (1 + s) + s] * (LARGEST_SQUARE / CELL_SQUARES)
    return blocks[:, 0] / CELL_COUNT, blocks[:, 1:] / CELL_RESIDUAL, squares


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


def _within(vector: Array) -> Array:
    """The vector, scaled down to norm 1 if it is longer."""
    return np.asarray(vector / max(1.0, float(np.linalg.norm(vector))))


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
