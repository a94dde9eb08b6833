"""The device on which things are computed, its numerical precision, and what is computed there outside of chunks.

`using` says where what is inside of it computes: the tasks of a chunk, a server's comparisons, an attack. Functions of arrays ask `in_use`
and need no argument for it. Where nobody says, that is the CPU.
"""

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, cast

import torch

from ..types import Array

__all__ = [
    "CPU", "Device", "NoisePlace", "Precision", "arithmetic", "cpu_in_use", "fetched", "half", "in_use", "placed", "resolved", "sent",
    "tensor", "using",
]  # fmt: skip

PINNED_AT_ONCE = 1 << 28
"""Bytes of a piece of pinned memory at most: torch takes the next power of two."""
Precision = Literal["full", "tf32", "bf16"]
NoisePlace = Literal["auto", "host", "device"]


@dataclass(frozen=True)
class Device:
    """`kind` "cpu" or "cuda"; `precision` as in `arithmetic` and `half`; `noise`: where it is made (`step_noise.noise_place`).

    `native`: whether the compiled library may train (`engine.native`) and make normals (`step_noise`) on the CPU.
    """

    kind: str = "cpu"
    precision: Precision = "full"
    noise: NoisePlace = "auto"
    native: bool = True


CPU = Device()
_IN_USE: ContextVar[Device] = ContextVar("device", default=CPU)


def in_use() -> Device:
    """The device that the innermost `using` gives; the CPU outside of all."""
    return _IN_USE.get()


def cpu_in_use() -> Device:
    """The CPU, with the compiled library where `in_use` has it."""
    return replace(CPU, native=in_use().native)


@contextmanager
def using(device: Device) -> Iterator[None]:
    """While inside, in this thread, `in_use` is `device`, and float32 products are made as its precision says."""
    before = _IN_USE.set(device)
    try:
        with arithmetic(device):
            yield
    finally:
        _IN_USE.reset(before)


def resolved(kind: str) -> str:
    """ "cpu" or "cuda" for a `run.device`: "auto" takes a CUDA device where torch finds one."""
    return kind if kind != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def tensor(array: Array) -> torch.Tensor:
    """An array as a tensor on the device in use; on the CPU the two share their memory."""
    return placed(torch.from_numpy(array))


def placed(values: torch.Tensor) -> torch.Tensor:
    """A tensor on the device in use."""
    return values if in_use().kind == "cpu" else values.to(in_use().kind)


def sent(values: torch.Tensor, device: Device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor on a device, as `dtype`. The copy to a CUDA device is from pinned memory, and the host does not wait for it.

    It is queued on the current stream. torch keeps the pinned memory, which nobody else has, until the copy is done.
    """
    here = values if dtype is None else values.to(dtype)
    if device.kind != "cuda" or here.is_cuda:
        return here.to(device.kind)
    return here.pin_memory().to(device.kind, non_blocking=True)


def fetched(rows: torch.Tensor) -> Callable[[], list[Array]]:
    """Begin to bring rows (C, d) to the host; calling what is returned waits for them. Those of the CPU share its memory.

    From a CUDA device they come into pinned memory while there is room (`_Pinned`): new memory of the host takes ten to forty times as
    long. torch keeps pinned memory for later rows once nobody has these. The copies are queued on the current stream.
    """
    if not rows.is_cuda:
        return lambda: list(rows.numpy())
    pieces = [_pinned().copy(piece) for piece in torch.split(rows, max(1, PINNED_AT_ONCE // rows[0].nbytes))]
    there: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    there.record()

    def arrived() -> list[Array]:
        there.synchronize()
        return [row for piece in pieces for row in piece]

    return arrived


class _Pinned:
    """Pinned memory of values that somebody still has: at most `room` bytes more."""

    def __init__(self, room: int) -> None:
        self.room = room

    def copy(self, values: torch.Tensor) -> Array:
        """A copy of a device's tensor that will be there later; where there is no room, in other memory and at once."""
        size = 1 << (values.nbytes - 1).bit_length()  # what torch takes for it
        if size <= self.room:
            try:
                made = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            except RuntimeError:  # the system has no more to pin
                self.room = 0
            else:
                self.room -= size
                weakref.finalize(made.untyped_storage(), self._freed, size)  # when no array has its memory
                return made.copy_(values, non_blocking=True).numpy()
        return values.cpu().numpy()

    def _freed(self, size: int) -> None:
        self.room += size


@cache
def _pinned() -> _Pinned:
    """Up to a quarter of the machine's memory: what is pinned cannot be swapped. None where its size is not known, as on Windows."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return _Pinned(size // 4)


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
