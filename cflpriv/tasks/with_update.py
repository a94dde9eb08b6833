"""One contribution of bounded length for two purposes: what finds clusters, and an update of local training beside it.

The squared length is divided between the two, so a sum of such contributions with Gaussian noise is one Gaussian mechanism of the price
that it has without the update.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import ClassVar

import numpy as np

from ..engine import Device, Result, TaskInput
from ..protocols.mechanisms import clip
from ..types import Array, Parts
from .cluster_shares import CellShare, CentreShare, MomentShare
from .training import Train

__all__ = ["WithUpdate", "update_in"]


@dataclass(frozen=True)
class WithUpdate:
    """A contribution to a sum that finds clusters, and beside it an update of local training: one vector of norm at most `share.norm`.

    The update is clipped to that norm. It has the part `part` of the squared length, the contribution the rest. It stands in the block of
    the model that the client chose among `k`, with zeros in all others. Part: "contribution": that of `share`, then k · d numbers.
    """

    share: CentreShare | MomentShare | CellShare
    train: Train
    k: int
    part: float

    parts: ClassVar[Parts] = {"contribution": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()

    @property
    def spread(self) -> float:
        """Of the weights inside the blocks: a client may be alone in its block."""
        return inf if self.k > 1 else 1.0

    def cost(self, task_input: TaskInput) -> int:
        return self.share.cost(task_input) + self.train.cost(task_input)

    def chunk_size(self, task_input: TaskInput, device: Device) -> int:
        return self.train.chunk_size(task_input, device)

    def run(self, task_input: TaskInput) -> Result:
        return self._joined(task_input, self.train.run(task_input))

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        results, path = self.train.run_many(inputs, device)
        return [self._joined(task_input, result) for task_input, result in zip(inputs, results, strict=True)], path

    def _joined(self, task_input: TaskInput, result: Result) -> Result:
        if not result:  # its training diverged: it takes no part
            return {}
        update = np.asarray(result["update"], dtype=np.float64)
        blocks = np.zeros((self.k, len(update)))
        blocks[task_input.choice if isinstance(task_input.choice, int) else 0] = clip(update, self.share.norm)
        contribution = self.share.run(task_input)["contribution"]
        return {"contribution": np.concatenate([sqrt(1 - self.part) * contribution, sqrt(self.part) * blocks.ravel()])}


def update_in(mean: Array, k: int, dimension: int, part: float) -> tuple[Array, Array]:
    """Of a mean of `WithUpdate`s: that of the contributions to what finds clusters, and of updates by block (k, dimension).

    Without a `part` there are no updates: k rows of none.
    """
    if not part:
        return mean, np.zeros((k, 0))
    length = len(mean) - k * dimension
    return mean[:length] / sqrt(1 - part), mean[length:].reshape(k, dimension) / sqrt(part)
