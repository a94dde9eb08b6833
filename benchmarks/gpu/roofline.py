"""The least time that a piece of work can take on a device: its bytes over the bandwidth, or its operations over the rate of products.

Both ceilings are measured on the device: a large copy, counting bytes read and bytes written, and large matrix products.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial

import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from cflpriv.engine.device import Device, Precision, arithmetic
from cflpriv.engine.models import Model, build_module, dtype_of
from cflpriv.tasks.training import Train

from .rows import Figures, Setting, medians

__all__ = ["Work", "ceilings", "floor_of", "floor_row", "round_of"]


@dataclass(frozen=True)
class Work:
    """Bytes that have to move through the device's memory, and floating-point operations."""

    bytes: float
    operations: float

    def times(self, factor: float) -> "Work":
        return Work(self.bytes * factor, self.operations * factor)


@cache
def ceilings(setting: Setting) -> Mapping[str, float]:
    """ "bandwidth" in bytes a second, and operations a second by precision."""
    device, ceilings = setting.device, {}
    source = torch.rand(setting.size(2**28, 2**18), device=device)
    target = torch.empty_like(source)
    ceilings["bandwidth"] = 2 * source.nbytes / medians([partial(target.copy_, source)], device, 5)[0]
    del source, target
    side = setting.size(8192, 128)
    precisions: tuple[Precision, ...] = ("full", "tf32", "bf16")
    for precision in precisions if device == "cuda" else precisions[:1]:
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        a, b = (torch.rand(side, side, device=device).to(dtype) for _ in range(2))  # on zeros the rate would be higher
        with arithmetic(Device(device, precision)):
            ceilings[precision] = 2 * side**3 / medians([partial(torch.mm, a, b)], device, 5)[0]
    return ceilings


def floor_of(work: Work, setting: Setting, precision: Precision = "full") -> float:
    """Seconds, at least."""
    most = ceilings(setting)
    return max(work.bytes / most["bandwidth"], work.operations / most[precision])


def round_of(task: Train, clients: int, samples: int) -> Work:
    """Local training of `clients` with so many samples each."""
    batch = task.batch_size or samples
    steps = task.steps if task.sampling_rate else task.epochs * -(-samples // batch)
    return _step(task.model, batch, task._options.moments).times(steps * clients)


@lru_cache
def _step(model: Model, batch: int, moments: int) -> Work:
    """One client's step. Operations are those of forward and backward. Bytes are the samples, read once, and the parameters and the
    optimiser's moments, read and written once: activations and gradients could stay in caches."""
    module, dtype = build_module(model), dtype_of(model.dtype)
    x, y = torch.rand((batch, *model.shape), dtype=dtype), torch.zeros(batch, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        loss = functional.cross_entropy(module(x), y)
        torch.autograd.grad(loss, list(module.parameters()))
    size = x.element_size()
    return Work(2 * size * model.dimension * (1 + moments) + x.nbytes + y.nbytes, counter.get_total_flops())


def floor_row(took: float, work: Work, setting: Setting, precision: Precision = "full") -> Figures:
    """Milliseconds, the ratio to the floor, and what the floor is made of."""
    return {
        "ms": 1000 * took, "x roofline": took / floor_of(work, setting, precision), "GB": work.bytes / 1e9,
        "GFLOP": work.operations / 1e9,
    }  # fmt: skip
