"""The device on which chunks are computed, and its numerical precision."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

__all__ = ["CPU", "Device", "Precision", "arithmetic", "half"]

Precision = Literal["full", "tf32", "bf16"]


@dataclass(frozen=True)
class Device:
    """`kind` "cpu" or "cuda"; `precision` as in `arithmetic` and `half`."""

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
    places, name, rough, exact = _switches()
    before = [getattr(place, name) for place in places]
    try:
        for place in places:
            setattr(place, name, rough if device.precision == "tf32" else exact)
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            setattr(place, name, value)


def _switches() -> tuple[list[Any], str, Any, Any]:
    """Where torch keeps how float32 products are made, under which name, and the values for TF32 and for float32.

    Since 2.9 there is a newer name; where anybody has used it torch may refuse to read the older one.
    """
    matmul, cudnn = cast(Any, torch.backends.cuda.matmul), cast(Any, torch.backends.cudnn)
    if hasattr(matmul, "fp32_precision"):
        return [matmul, cudnn.conv, cudnn.rnn], "fp32_precision", "tf32", "ieee"
    return [matmul, cudnn], "allow_tf32", True, False


def half(device: Device) -> AbstractContextManager[object]:
    """Around a forward pass: with "bf16" its products are of bfloat16 (8 bits of mantissa), parameters and their update stay as they are.

    Casts are not remembered: the parameters change between one pass and the next, and a captured graph must make them anew.
    """
    if device.precision != "bf16":
        return nullcontext()
    return torch.autocast(device.kind, dtype=torch.bfloat16, cache_enabled=False)
