"""A short public view of a client's local training: its update of low rank, sketched. Source: see `algorithms.pina`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import ClassVar

import numpy as np

from ..engine import Device, Result, TaskInput
from ..protocols.sketch import public_sketch
from ..randomness import stream
from ..types import Array, Parts
from .training import Train

__all__ = ["LowRankSketch"]


@dataclass(frozen=True)
class LowRankSketch:
    """Local training from "model" (d,), seen in `rank` public directions of each weight matrix and sketched to `sketch` numbers.

    A weight of shape (o, …) counts as a matrix (o, i), its update ΔW as ΔW·Aᵀ (o, r), with A (r, i) a random matrix of orthonormal rows
    that everybody makes of `seed`, r = min(rank, i). After one step of full-batch training this is how far B moves from zero in W + B·A
    with A frozen. Parameters with fewer than two axes are left out. More than `sketch` numbers are sketched. Part: "signature" (≤ sketch,),
    of norm 1, or zeros where nothing moved.
    """

    train: Train
    rank: int = 4
    sketch: int = 32
    seed: int = 0

    parts: ClassVar[Parts] = {"signature": "compared"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def cost(self, task_input: TaskInput) -> int:
        return self.train.cost(task_input)

    def chunk_size(self, task_input: TaskInput, device: Device) -> int:
        return self.train.chunk_size(task_input, device)

    def run(self, task_input: TaskInput) -> Result:
        return self._seen(self.train.run(task_input))

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        results, path = self.train.run_many(inputs, device)
        return [self._seen(result) for result in results], path

    def _seen(self, result: Result) -> Result:
        if not result:  # its training diverged: it takes no part
            return {}
        vector = self.projected(np.asarray(result["update"], dtype=np.float64))
        if len(vector) > self.sketch:
            vector = np.asarray(public_sketch("low rank", self.seed, len(vector), self.sketch).apply(vector))
        length = float(np.linalg.norm(vector))
        return {"signature": vector / length if length > 0 else vector}

    def projected(self, update: Array) -> Array:
        """ΔW·Aᵀ of all matrices of an update (d,), one after the other."""
        pieces = []
        for name, shape, offset in self.train.model.layout:
            if len(shape) > 1:
                matrix = update[offset : offset + prod(shape)].reshape(shape[0], -1)
                pieces.append((matrix @ _rows(self.seed, name, min(self.rank, matrix.shape[1]), matrix.shape[1]).T).ravel())
        return np.concatenate(pieces) if pieces else np.zeros(1)


@lru_cache(maxsize=32)
def _rows(seed: int, name: str, r: int, length: int) -> Array:
    """The public matrix A (r, length) of a parameter, with orthonormal rows."""
    return np.asarray(np.linalg.qr(stream(seed, f"low rank {name}").standard_normal((length, r)))[0].T)
