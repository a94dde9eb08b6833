"""One chunk of clients, computed in this process."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from . import graphs, memory
from .device import CPU, Device, using
from .seam import Result, Task, TaskInput

__all__ = ["Kind", "compute"]

Kind = Literal["auto", "torch", "sequential"]


def compute(task: Task, inputs: Sequence[TaskInput], kind: Kind, device: Device, intra_op: int = 1) -> tuple[list[Result], str]:
    """One chunk, in this process. Of the kind "sequential" it is computed on the CPU. A device out of memory gets the chunk in halves."""
    if device.native != (kind == "auto"):
        device = replace(device, native=kind == "auto")
    threads = torch.get_num_threads()
    torch.set_num_threads(intra_op)
    try:
        run_many = getattr(task, "run_many", None)  # `isinstance` of a protocol takes as long as a small chunk's step
        if kind == "sequential" or run_many is None:
            with using(replace(CPU, native=False) if kind == "sequential" else device):
                return [task.run(task_input) for task_input in inputs], "sequential"
        try:
            with using(device):
                made: tuple[list[Result], str] = run_many(inputs, device)
                return made
        except torch.cuda.OutOfMemoryError:
            if len(inputs) == 1:
                raise
        # only now, since the error held on to all that the failed attempt had made
        graphs.release_graphs()
        memory.release_samples()
        torch.cuda.empty_cache()
        half = len(inputs) // 2
        first, path = compute(task, inputs[:half], kind, device, intra_op)
        second, _ = compute(task, inputs[half:], kind, device, intra_op)
        return first + second, path
    finally:
        torch.set_num_threads(threads)
