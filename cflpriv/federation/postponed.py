"""Results of a task that a simulated host computes when somebody asks for them, because those of all clients would not fit into memory.

A task with such results declares them beforehand (`engine.Later`). The client keeps what it was given and computes the same numbers each
time: batches and noise follow from the seeds in its input.
"""

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from ..types import Array

if TYPE_CHECKING:  # torch is loaded where something is computed
    from ..engine import Engine, Later, TaskInput

__all__ = ["Postponed", "together"]


class Postponed:
    """One part of the result of `task` on `given`; `numpy.asarray` computes the part. Where `now` is set, it takes `now`, once.

    Not a dataclass: messages would have its fields, not the array.
    """

    __slots__ = ("__weakref__", "dtype", "engine", "given", "now", "part", "shape", "task")

    def __init__(self, task: Any, given: "TaskInput", part: str, form: "Later", engine: "Engine") -> None:
        self.task, self.given, self.part, self.engine = task, given, part, engine
        self.shape, self.dtype = form.shape, np.dtype(form.dtype)
        self.now: Any = None

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=int)) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        waiting, self.now = self.now, None
        array = np.asarray(together([self])[0] if waiting is None else waiting)
        return array if dtype is None else array.astype(dtype, copy=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """The array itself: where another process needs the part, the part is computed first."""
        return np.array, (np.asarray(self),)


def together(values: list[Any]) -> list[Any]:
    """The values, with the postponed ones among them computed: those of one task and engine in one call, which no record counts."""
    made, calls = list(values), dict[tuple[int, int], list[int]]()
    for place, value in enumerate(values):
        if isinstance(value, Postponed):
            calls.setdefault((id(value.task), id(value.engine)), []).append(place)
    for places in calls.values():
        first = values[places[0]]
        results = first.engine.run(first.task, [values[place].given for place in places], Counter())
        for place, result in zip(places, results, strict=True):
            made[place] = result[values[place].part]
    return made
