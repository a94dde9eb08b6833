"""Whether a client's data changed since it was placed in its cluster: an exact test at the client, which sends one bit."""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar

import numpy as np

from ..clustering.change import Samples, change_p_value
from ..engine import Result, TaskInput
from ..protocols.sketch import public_sketch
from ..types import Array, ClientData, Parts

__all__ = ["ChangeOfData", "ComparedAgain", "KeepSamples"]

PLACED, CHECKED = "samples when placed", "samples when checked"
MOST, SKETCH = 256, 128
"""So many samples are kept, and so many numbers of each."""


@dataclass(frozen=True)
class KeepSamples:
    """Keep short forms of at most `MOST` samples, those that the client is placed by. Part: "kept" ()."""

    seed: int = 0

    parts: ClassVar[Parts] = {"kept": "measure"}
    keeps: ClassVar[tuple[str, ...]] = (PLACED,)

    def run(self, task_input: TaskInput) -> Result:
        return {"kept": np.array(1.0), PLACED: _short(task_input.data, self.seed, task_input.streams.round)}

    def cost(self, task_input: TaskInput) -> int:
        return len(task_input.data.y_train)


@dataclass(frozen=True)
class ComparedAgain:
    """Another `task`, for a comparison after a change. Clients count it apart from the same task at their start or when they join."""

    task: Any

    @property
    def parts(self) -> Parts:
        parts: Parts = self.task.parts
        return parts

    @property
    def keeps(self) -> tuple[str, ...]:
        return tuple(self.task.keeps)

    def run(self, task_input: TaskInput) -> Result:
        result: Result = self.task.run(task_input)
        return result

    def cost(self, task_input: TaskInput) -> int:
        cost: int = self.task.cost(task_input)
        return cost


@dataclass(frozen=True)
class ChangeOfData:
    """Test, at `level`, whether the samples that the client has now and those of its placement in round "placed" are exchangeable.

    Part: "changed" (), 1 or 0. Kept: short forms of at most `MOST` samples of the placement (as `KeepSamples`), and of the last check. A
    client that the server did not place again after a change names it again.

    Guarantee: that of `clustering.change`, over all clients and checks of a run.
    Reveals: one bit of each client in each check: whether its data changed, at the level that the server names.
    """

    level: float = 0.0
    seed: int = 0

    parts: ClassVar[Parts] = {"changed": "choice"}
    keeps: ClassVar[tuple[str, ...]] = (PLACED, CHECKED)
    reads: ClassVar[tuple[str, ...]] = (PLACED, CHECKED)

    def run(self, task_input: TaskInput) -> Result:
        now = _short(task_input.data, self.seed, task_input.streams.round)
        before, checked = (task_input.memory.get(name) for name in (PLACED, CHECKED))
        if checked is not None and checked[0, 0] == float(task_input.array("placed")):
            before = checked
        numbers = task_input.data.y_train.dtype.kind == "f"
        changed = False
        if before is not None and before.shape == now.shape and self.level > 0:
            p = change_p_value(_samples(before, numbers), _samples(now, numbers), self.level, task_input.streams("change"))
            changed = p <= self.level
        return {"changed": np.array(int(changed)), PLACED: now if before is None else before, CHECKED: now}

    def cost(self, task_input: TaskInput) -> int:
        return len(task_input.data.y_train)


def _short(data: ClientData, seed: int, round: int) -> Array:
    """Short forms of samples (1 + MOST, 1 + numbers) float32: the round and the count, then of each sample its label and its sketch.

    Of more samples those of the smallest digests are taken, so that samples that stay are taken again.
    """
    x = data.x_train.reshape(len(data.y_train), -1)
    taken = np.arange(len(x))
    if len(x) > MOST:
        digests = [blake2b(np.ascontiguousarray(row).tobytes(), digest_size=8).digest() for row in x]
        taken = np.array(sorted(range(len(x)), key=digests.__getitem__)[:MOST])
    rows = _features(x[taken], seed)
    made = np.zeros((1 + MOST, 1 + rows.shape[1]), dtype=np.float32)
    made[0, 0] = round
    made[0, 1] = len(taken)
    made[1 : 1 + len(taken), 0] = data.y_train[taken]
    made[1 : 1 + len(taken), 1:] = rows
    return made


def _features(x: Array, seed: int) -> Array:
    """Sketches (n, min(features, SKETCH)) float32 of samples; of windows of words, sketches of their counts."""
    if x.dtype.kind == "i":  # numbers of words
        counts = np.zeros((len(x), SKETCH), dtype=np.float32)
        np.add.at(counts, (np.arange(len(x))[:, None], x * 2654435761 % SKETCH), 1.0)
        return counts
    values = x.astype(np.float32) / (255 if x.dtype.kind == "u" else 1)
    width = values.shape[1]
    return np.asarray(values if width <= SKETCH else public_sketch("change", seed, width, SKETCH).apply(values))


def _samples(short: Array, numbers: bool) -> Samples:
    rows = short[1 : 1 + int(short[0, 1])]
    return rows[:, 1:], rows[:, 0] if numbers else rows[:, 0].astype(np.int64)
