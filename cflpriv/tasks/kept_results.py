"""Results of evaluations that are asked for again: of the same models on the same data, such as IFCA's losses at the end of a round and at
the beginning of the next, or the scores of a cluster that was not trained meanwhile.

A model counts as the same while it is the same read-only memory, as sums are that clients open (`federation.values`). Worker processes
get copies, so they compute each time.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from ..engine import Result, TaskInput
from ..types import Array, ClientData, ReadOnlyMemory

__all__ = ["kept_or_made"]


@dataclass(frozen=True, eq=False)
class _Kept:
    """A result, the models that it is of, and the way taken."""

    models: tuple[ReadOnlyMemory, ...]
    result: Result
    path: str

    def is_of(self, models: tuple[ReadOnlyMemory, ...]) -> bool:
        return len(self.models) == len(models) and all(own.is_of(other) for own, other in zip(self.models, models, strict=True))


_KEPT: "WeakKeyDictionary[ClientData, dict[Hashable, _Kept]]" = WeakKeyDictionary()
"""By a client's data and the task: the last result."""


def kept_or_made(
    task: Hashable,
    inputs: Sequence[TaskInput],
    models: Sequence[Sequence[Array]],
    make: Callable[[Sequence[TaskInput]], tuple[list[Result], str]],
) -> tuple[list[Result], str]:
    """Each input's result of a `task` that depends on the client's data and its `models` alone, and the way taken; `make` computes those
    that are not kept."""
    memories = [_memories(own) for own in models]
    results: dict[int, Result] = {}
    path = ""
    for place, (task_input, memory) in enumerate(zip(inputs, memories, strict=True)):
        known = _KEPT.get(task_input.data, {}).get(task) if memory else None
        if known is not None and known.is_of(memory):
            results[place], path = dict(known.result), known.path
    missing = [place for place in range(len(inputs)) if place not in results]
    if missing:
        made, path = make([inputs[place] for place in missing])
        for place, result in zip(missing, made, strict=True):
            results[place] = result
            if memories[place]:
                _KEPT.setdefault(inputs[place].data, {})[task] = _Kept(memories[place], dict(result), path)
    return [results[place] for place in range(len(inputs))], path


def _memories(models: Sequence[Array]) -> tuple[ReadOnlyMemory, ...]:
    """What tells models again; () where one of them may change."""
    memories = [ReadOnlyMemory.of(model) for model in models]
    return tuple(memory for memory in memories if memory is not None) if None not in memories else ()
