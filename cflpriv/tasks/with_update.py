"""One contribution of bounded length for two purposes: what finds clusters, and an update of local training beside it.

The squared length is divided between the two, so a sum of such contributions with Gaussian noise is one Gaussian mechanism of the price
that it has without the update.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
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

    The update is clipped to that norm. It has the part `part` of the squared length, the contribution the rest. Part: "contribution": that
    of `share`, then d numbers.
    """

    share: CentreShare | MomentShare | CellShare
    train: Train
    part: float

    parts: ClassVar[Parts] = {"contribution": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()

    @property
    def spread(self) -> float:
        """That of `share`."""
        return float(getattr(self.share, "spread", 1.0))

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
        update = clip(np.asarray(result["update"], dtype=np.float64), self.share.norm)
        contribution = self.share.run(task_input)["contribution"]
        return {"contribution": np.concatenate([sqrt(1 - self.part) * contribution, sqrt(self.part) * update])}


def update_in(mean: Array, dimension: int, part: float) -> tuple[Array, Array]:
    """Of a mean of `WithUpdate`s: that of the contributions to what finds clusters, and of updates (dimension,); without a `part` none."""
    if not part:
        return mean, np.zeros(0)
    return mean[:-dimension] / sqrt(1 - part), mean[-dimension:] / sqrt(part)
