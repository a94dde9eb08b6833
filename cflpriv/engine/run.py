"""The engine: cuts clients into chunks and computes each, in this process or in worker processes."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch

from ..errors import InputError
from ..keys import Key, check_ranges
from .allocator import keep_freed_memory
from .compute import Kind, compute
from .device import CPU, Device, NoisePlace, Precision, in_use, resolved
from .seam import ManyTask, Result, Task, TaskInput
from .workers import Workers

__all__ = ["Engine", "Processes", "chunks"]

FEWEST_TO_HALVE = 8
MOST_PER_CORE = 16
"""Worker processes started at most: each takes 100 MB and more before it has any data, so some hundreds end a machine's memory."""

Processes = Annotated[int, Key("Processes that compute clients. With one, the compiled library takes all cores.", "[1, 512]", "processes")]
"""A larger number is a mistake that would take all memory."""


@dataclass
class Engine:
    """How tasks are computed. `kind` "sequential" is the plain reference; "auto" takes the fastest way that equals it, "torch" the
    fastest without the compiled library.

    `workers` processes share the chunks. 1: this process alone. There the compiled library trains clients of a chunk on all cores, or
    on as many as `OMP_NUM_THREADS` says, and torch takes `threads` intra-op threads, by default one, because they collapse when another
    process holds a core and change the last digits. `device` is "cpu", "cuda", "auto", or "" for the one
    in use. `precision` other than "full" is for stacked training on a CUDA device: "tf32" for the products of float32, "bf16" for those of
    the forward pass (see `device`). `noise`: where private training makes its noise (`step_noise.noise_place`). `paths` counts the
    clients that each task computed by each way, for the record.
    """

    kind: Kind = "auto"
    workers: Processes = 1
    device: str = ""
    threads: Annotated[int, Key("Threads of an operation.", "[1, inf)", "threads")] = 1
    precision: Precision = "full"
    noise: NoisePlace = "auto"
    paths: Counter[tuple[str, str]] = field(default_factory=Counter)
    _pool: Workers | None = None

    def __post_init__(self) -> None:
        check_ranges(type(self), vars(self))
        self.device = self.device or in_use().kind
        if self.device not in ("auto", "cpu", "cuda"):
            raise InputError(f"run.device = {self.device!r}: known are 'auto', 'cpu' and 'cuda'")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise InputError("run.device = 'cuda': torch finds no CUDA device here; use 'auto' or 'cpu'")
        self.device = resolved(self.device)
        if self.device == "cuda" and self.workers > 1:
            raise InputError(f"run.workers = {self.workers}: with device 'cuda' one process serves the device; use workers = 1")
        if self.precision != "full" and (self.device == "cpu" or self.kind == "sequential"):
            where = "on the CPU" if self.device == "cpu" else "with run.engine = 'sequential'"
            raise InputError(f"run.precision = {self.precision!r}: {where} there is 'full' only; the others are for a CUDA device")

    def run(self, task: Task, inputs: Sequence[TaskInput], paths: Counter[tuple[str, str]] | None = None) -> list[Result]:
        """The results of `task` for each input, in order. `paths` counts the ways taken, by default the engine's own."""
        paths = self.paths if paths is None else paths
        keep_freed_memory()
        device = Device(self.device, self.precision, self.noise, self.kind == "auto")
        jobs = chunks(task, inputs, self.kind, device, self.workers)
        if self.workers > 1 and len(inputs) > 1:
            if self._pool is None:
                self._pool = Workers(min(self.workers, MOST_PER_CORE * (os.cpu_count() or 1)))
            done = self._pool.map(task, [[inputs[i] for i in job] for job in jobs], self.kind)
        else:
            done = [compute(task, [inputs[i] for i in job], self.kind, device, self.threads) for job in jobs]
        results: list[Result] = [{}] * len(inputs)
        for job, (computed, path) in zip(jobs, done, strict=True):
            paths[type(task).__name__, path] += len(job)
            for i, result in zip(job, computed, strict=True):
                results[i] = result
        return results

    def close(self) -> None:
        """End the worker processes, if any."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def chunks(task: Task, inputs: Sequence[TaskInput], kind: Kind = "auto", device: Device = CPU, processes: int = 1) -> list[list[int]]:
    """Positions of the inputs by chunk: clients of like cost together, costliest first.

    Depends on the task, inputs and device alone, but where no result has other bits in another chunk: there one process has no reason to
    cut the last chunk in halves, which the threads of the kernel then share.
    """
    if kind == "sequential" or not isinstance(task, ManyTask):
        return [[i] for i in range(len(inputs))]
    order = sorted(range(len(inputs)), key=lambda i: (-task.cost(inputs[i]), inputs[i].data.id))
    pieces: list[list[int]] = []
    while order:
        size = max(1, task.chunk_size(inputs[order[0]], device))
        # the last ones in halves: two processes finish together, and one loses little
        if device.kind == "cpu" and FEWEST_TO_HALVE <= len(order) <= 2 * size and (processes > 1 or not _stand_alone(task, inputs, device)):
            size = min(size, (len(order) + 1) // 2)
        pieces.append(order[:size])
        order = order[size:]
    return pieces


def _stand_alone(task: ManyTask, inputs: Sequence[TaskInput], device: Device) -> bool:
    """Whether each client's results have the same bits in any chunk."""
    alone = getattr(task, "stands_alone", None)
    return alone is not None and all(alone(task_input, device) for task_input in inputs)
