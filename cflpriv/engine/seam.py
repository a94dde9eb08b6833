"""The interface of a task: what a task is, and all that it may use on one client."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np

from ..randomness import Stream, stream
from ..types import Array, ClientData, Parts
from .device import Device

__all__ = ["Deferred", "Later", "LaterTask", "ManyTask", "Result", "RunNow", "Streams", "Task", "TaskInput", "Value", "is_many"]

Result = dict[str, Any]
"""The named results of a task on one client: arrays, or what `numpy.asarray` makes one of."""

Value = Array | list[Array] | dict[int, Array]
"""What a client is given under one name: an array, a list to choose from, or arrays keyed by the client that sent them."""


@dataclass(frozen=True)
class Streams:
    """A client's random streams in one round; call it with a purpose."""

    seed: int
    round: int
    client: int

    def __call__(self, purpose: str) -> Stream:
        return stream(self.seed, purpose, self.round, self.client)


@dataclass(frozen=True)
class TaskInput:
    """All that a task may use on one client: the client's data, the parameters sent to it, its memory, and its random streams.

    `choice` is the index (or indices) by which the given parameters were picked from lists, None where nothing was picked. `secret` are 32
    bytes of the client's cryptographic source, for a private task alone: its noise and batches come from these and not from `streams`.
    """

    data: ClientData
    params: Mapping[str, Value]
    memory: Mapping[str, Array]
    streams: Streams
    choice: int | tuple[int, ...] | None = None
    secret: bytes = field(default=b"", repr=False)

    def array(self, name: str) -> Array:
        """The parameter `name`, which must be a single array."""
        value = self.params[name]
        if isinstance(value, list | dict):
            raise TypeError(f"parameter {name!r}: expected one array, got {type(value).__name__} of {len(value)}")
        return value


class Deferred:
    """The sum of two arrays, added when `numpy.asarray` asks for it: a client's local model is kept as what it was given and its update.

    The second may itself be made on demand.
    """

    __slots__ = ("__weakref__", "first", "second")

    def __init__(self, first: Array, second: Any) -> None:
        self.first, self.second = first, second

    @property
    def shape(self) -> tuple[int, ...]:
        return self.first.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.first.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        total: Array = self.first + np.asarray(self.second)
        return total if dtype is None else total.astype(dtype, copy=False)

    def bound(self, data: ClientData) -> "Deferred":
        """The same, computed from `data` where it needs the client's samples (see `span.Movement`)."""
        return Deferred(self.first, self.second.bound(data)) if hasattr(self.second, "bound") else self


@dataclass(frozen=True)
class Later:
    """The shape and dtype of a large array of a result, before the result is computed."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=int)) * np.dtype(self.dtype).itemsize


class Task(Protocol):
    """Something clients compute. `parts` names the results that a `Held` will hold, each with its kind, on which it depends how it may
    leave the client; `keeps` names those that stay in the client's memory. A task whose values weigh clients inside themselves declares by
    how much as `spread` (`federation.values.spread_of`). A task whose large results can wait has `later`, see `LaterTask`."""

    @property
    def parts(self) -> Parts: ...

    @property
    def keeps(self) -> tuple[str, ...]: ...

    def run(self, task_input: TaskInput) -> Result:
        """Named results for one client: every name of `parts` and `keeps`. The reference for every faster way.

        An empty mapping: the client has no result this time and takes no further part in it.
        """
        ...


RunNow = Callable[[Task, Sequence[TaskInput]], list[Result]]
"""Computes a task for some clients."""


@runtime_checkable
class LaterTask(Task, Protocol):
    """A task whose large results can wait until somebody asks for them. `large_bytes`: theirs for one client; 0 where none can wait."""

    @property
    def large_bytes(self) -> int: ...

    def later(self, inputs: Sequence[TaskInput], run: RunNow) -> list[tuple[Result, TaskInput]] | None:
        """Each client's result with `Later` in place of large arrays, and an input for `run` that gives the same arrays.

        `run` computes what cannot wait. None where a result is not known before all of it is computed.
        """
        ...


@runtime_checkable
class ManyTask(Task, Protocol):
    """A task that also runs for many clients at once."""

    def cost(self, task_input: TaskInput) -> int:
        """The size of this client's work: clients of like size share a chunk, so that little is padded."""
        ...

    def chunk_size(self, task_input: TaskInput, device: Device) -> int:
        """How many clients like this one should be computed together."""
        ...

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        """The results of `run` for each input, in order, and the name of the way that was taken."""
        ...


def is_many(task: Task) -> TypeGuard[ManyTask]:
    """Whether a task is a `ManyTask`. This is asked for each client, where `isinstance` would take longer than what follows."""
    return _runs_many(type(task))


@cache
def _runs_many(kind: type) -> bool:
    return all(callable(getattr(kind, name, None)) for name in ("cost", "chunk_size", "run_many"))
