"""Where chunks are computed, and how exactly."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["CPU", "Device", "Precision", "arithmetic", "half"]

Precision = Literal["full", "tf32", "bf16"]


@dataclass(frozen=True)
class Device:
    """`kind` "cpu" or "cuda"; `precision` as `arithmetic` and `half` say."""

    kind: str = "cpu"
    precision: Precision = "full"


CPU = Device()


@contextmanager
def arithmetic(device: Device) -> Iterator[None]:
    """While inside, float32 products on a CUDA device are of float32 ("full" and "bf16"; torch's own default for convolutions is not), or
    of factors rounded to ten bits of mantissa with sums in float32 ("tf32"). A CPU has one way."""
    if device.kind == "cpu":
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = device.precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def half(device: Device) -> AbstractContextManager[object]:
    """Around a forward pass: with "bf16" its products are of bfloat16 (8 bits of mantissa), parameters and their update stay as they are.

    Casts are not remembered: the parameters change between one pass and the next, and a captured graph must make them anew.
    """
    if device.precision != "bf16":
        return nullcontext()
    return torch.autocast(device.kind, dtype=torch.bfloat16, cache_enabled=False)
