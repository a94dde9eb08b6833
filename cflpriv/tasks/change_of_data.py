"""Whether a client's data changed since it was placed in its cluster: an exact test at the client, which sends one bit."""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar

import numpy as np

from ..clustering.change import Samples, change_p_value
from ..engine import Result, TaskInput
from ..protocols.sketch import public_sketch
from ..types import Array, ClientData, Parts

__all__ = ["MOST", "ChangeOfData", "ComparedAgain", "KeepSamples"]

PLACED, CHECKED = "samples when placed", "samples when checked"
MOST, SKETCH = 256, 128
"""So many distinct samples are kept, and so many numbers of each."""


@dataclass(frozen=True)
class KeepSamples:
    """Keep short forms of at most `MOST` distinct samples, those that the client is placed by. Part: "kept" ()."""

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

    Part: "changed" (), 1 or 0. Kept: short forms of at most `MOST` distinct samples of the placement (as `KeepSamples`), and of the last
    check. A client that the server did not place again after a change names it again.

    Guarantee: that of `clustering.change`, with its assumption, over all clients and checks of a run.
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
            cut_off = min(float(before[0, 2]), float(now[0, 2]))  # more samples are cut off lower
            then, today = (_samples(short, cut_off, numbers) for short in (before, now))
            p = change_p_value(then, today, self.level, task_input.streams("change"))
            changed = p <= self.level
        return {"changed": np.array(int(changed)), PLACED: now if before is None else before, CHECKED: now}

    def cost(self, task_input: TaskInput) -> int:
        return len(task_input.data.y_train)


def _short(data: ClientData, seed: int, round: int) -> Array:
    """Short forms of samples (1 + MOST, 3 + numbers) float32: the round, the count and the cut-off; then of each distinct sample its label,
    its digest in [0, 1), its number of copies and its sketch.

    Kept are the distinct samples whose digests are below the cut-off: the least digest that more than `MOST` do not exceed, or 1. So
    samples that stay are kept again, and all copies of a sample together. The 24 bits of a digest are exact in float32.
    """
    x = data.x_train.reshape(len(data.y_train), -1).astype(np.float32) + 0.0  # no −0.0
    labels = data.y_train.astype(np.float32)
    copies: dict[bytes, list[int]] = {}
    for number, (row, label) in enumerate(zip(x, labels, strict=True)):
        copies.setdefault(row.tobytes() + label.tobytes(), []).append(number)
    digests = np.array([int.from_bytes(blake2b(sample, digest_size=3).digest(), "little") / 2**24 for sample in copies])
    cut_off = float(np.sort(digests)[MOST]) if len(digests) > MOST else 1.0
    kept = digests < cut_off
    taken = np.array([numbers[0] for numbers in copies.values()])[kept]
    rows = _features(x[taken], seed)
    made = np.zeros((1 + MOST, 3 + rows.shape[1]), dtype=np.float32)
    made[0, :3] = round, len(taken), cut_off
    made[1 : 1 + len(taken), 0] = labels[taken]
    made[1 : 1 + len(taken), 1] = digests[kept]
    made[1 : 1 + len(taken), 2] = np.array([len(numbers) for numbers in copies.values()])[kept]
    made[1 : 1 + len(taken), 3:] = rows
    return made


def _features(x: Array, seed: int) -> Array:
    """Sketches (n, min(features, SKETCH)) of samples float32. Numbers of words are taken as sizes, like all features: of a text a change of
    the mean numbers of words is seen, in all windows or before each next word."""
    width = x.shape[1]
    return np.asarray(x if width <= SKETCH else public_sketch("change", seed, width, SKETCH).apply(x))


def _samples(short: Array, cut_off: float, numbers: bool) -> Samples:
    """The samples of short forms whose digests are below the cut-off, with their copies."""
    rows = short[1 : 1 + int(short[0, 1])]
    rows = rows[rows[:, 1] < cut_off]
    rows = np.repeat(rows, rows[:, 2].astype(np.int64), axis=0)
    return rows[:, 3:], rows[:, 0] if numbers else rows[:, 0].astype(np.int64)
