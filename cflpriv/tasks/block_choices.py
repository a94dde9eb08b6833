"""How a client comes to its block where it chooses by losses: the lowest loss with public random moves, or a public list of labels.

No choice leaves its client, see `cluster_shares.TrainInBlock`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..engine import Device, Result, TaskInput
from ..types import Parts, check_array
from .evaluation import Losses

__all__ = ["ChooseAndMove", "ChooseListed"]


@dataclass(frozen=True)
class ChooseAndMove:
    """The one of the list "model" (k models) with the lowest training loss, and the one that the client is moved to at random.

    Row j of the given "moves" (k, k) has the probabilities of a client that chose j. Parts: "choice" (), "moved" ().
    """

    losses: Losses

    parts: ClassVar[Parts] = {"choice": "choice", "moved": "choice"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def cost(self, task_input: TaskInput) -> int:
        return self.losses.cost(task_input)

    def chunk_size(self, task_input: TaskInput, device: Device) -> int:
        return self.losses.chunk_size(task_input, device)

    def run(self, task_input: TaskInput) -> Result:
        return self._moved(task_input, self.losses.run(task_input))

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        results, path = self.losses.run_many(inputs, device)
        return [self._moved(task_input, result) for task_input, result in zip(inputs, results, strict=True)], path

    def _moved(self, task_input: TaskInput, result: Result) -> Result:
        choice = int(result["choice"])
        steps = np.cumsum(task_input.array("moves")[choice])
        moved = int(np.searchsorted(steps, task_input.streams("block move").random() * steps[-1], side="right"))
        return {"choice": np.array(choice), "moved": np.array(min(moved, len(steps) - 1))}


@dataclass(frozen=True)
class ChooseListed:
    """The client's own label of the public list "labels" (m,) of the "clients" (m,), 0 for one that is not in it. Part: "choice" ().

    The whole list goes to all, so that all members of a secure sum were sent the same. Raises `InputError` for labels that are no whole
    numbers: a server that gave an update of the client's own for a list would read it, a number at a time.
    """

    parts: ClassVar[Parts] = {"choice": "choice"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, task_input: TaskInput) -> Result:
        labels = check_array("labels", np.asarray(task_input.array("labels")), ndim=1, kind="iu")
        positions = np.flatnonzero(task_input.array("clients") == task_input.streams.client)
        return {"choice": np.array(int(labels[positions[0]]) if len(positions) else 0)}
