"""Convolutions of many clients at once, each with its own kernels: two ways, and the choice between them on a CUDA device.

"grouped": one convolution in which each client is a group. "unfolded": patches of the images, and one batched matrix product. The CPU takes
the first, as measured on LeNet-5 and ResNet-9. A CUDA device may lack good kernels for hundreds of groups of one to six channels. So there
the two are timed, forward and backward, when shapes are met for the first time, and the process keeps the quicker. Both give the same up to
rounding. No device has run this yet.
"""

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["MARGIN", "WAYS", "Form", "convolved", "forget", "grouped", "measured", "only", "unfolded", "windows"]

MARGIN = 1.15
"""The second way must be so many times as quick as the first: noise of the clock should not choose."""
REPEATS = 3
"""Timed passes of each way, after one that is not timed."""
UNFOLDED_SHARE = 1 / 8
"""Of the device's free memory, what the patches may take."""

_CHOSEN: dict[Hashable, str] = {}
_ONLY: ContextVar[str] = ContextVar("only", default="")


@dataclass(frozen=True)
class Form:
    """A convolution without its parameters."""

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


def grouped(x: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> Tensor:
    """x (batch, clients · i, height, width), weight (clients, o, i, *size), bias (clients, o): (batch, clients · o, height', width')."""
    flat = None if bias is None else bias.flatten()
    return functional.conv2d(x, weight.flatten(0, 1), flat, form.stride, form.padding, form.dilation, groups=len(weight))


def unfolded(x: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> Tensor:
    """As `grouped`. The patches take i · size² numbers for each pixel of the result."""
    (clients, out), batch = weight.shape[:2], len(x)
    seen = windows(x, form)
    height, width = seen.shape[2:4]
    columns = seen.view(batch, clients, -1, *seen.shape[2:]).permute(1, 2, 5, 6, 0, 3, 4).reshape(clients, -1, batch * height * width)
    made = torch.bmm(weight.flatten(2), columns) if bias is None else torch.baddbmm(bias.unsqueeze(2), weight.flatten(2), columns)
    return made.view(clients, out, batch, height, width).permute(2, 0, 1, 3, 4).reshape(batch, clients * out, height, width)


def windows(x: Tensor, form: Form) -> Tensor:
    """What a convolution reads of x (n, i, height, width) for each of its results: (n, i, height', width', *size), without a copy.

    torch's own `unfold` of images is launched once for each image on a CUDA device; on the CPU it takes longer than a copy of this.
    """
    (down, right), (over, beside) = form.padding, form.dilation
    padded = functional.pad(x, (right, right, down, down)) if down or right else x
    reach = [dilation * (size - 1) + 1 for dilation, size in zip(form.dilation, form.size, strict=True)]
    return padded.unfold(2, reach[0], form.stride[0]).unfold(3, reach[1], form.stride[1])[..., ::over, ::beside]


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor | None, Form], Tensor]] = {"grouped": grouped, "unfolded": unfolded}


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> Tensor:
    """As `grouped`, by the way that is the quicker on the device of x."""
    if only_way := _ONLY.get():
        return WAYS[only_way](x, weight, bias, form)
    if not x.is_cuda:
        return grouped(x, weight, bias, form)
    batch = len(x).bit_length()  # batches of nearly one size are alike
    key = (batch, tuple(x.shape[2:]), tuple(weight.shape), form, x.dtype, torch.is_autocast_enabled("cuda"), x.device.index)
    if key not in _CHOSEN:
        if torch.cuda.is_current_stream_capturing():  # a capture holds no measurement; warm-up steps come before
            return grouped(x, weight, bias, form)
        _CHOSEN[key] = measured(x, weight, bias, form)
    return WAYS[_CHOSEN[key]](x, weight, bias, form)


def measured(x: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> str:
    """The name of the quicker way for these shapes, on the device of x; "grouped" where there is no room for patches."""
    pixels = x[:, :1, :: form.stride[0], :: form.stride[1]].numel() * len(weight)
    needed = pixels * weight[0, 0].numel() * x.element_size() * 3  # patches, columns, and a gradient
    if needed > torch.cuda.mem_get_info()[0] * UNFOLDED_SHARE:
        return "grouped"
    seconds = {name: _seconds(way, x, weight, bias, form) for name, way in WAYS.items()}
    return "unfolded" if seconds["unfolded"] * MARGIN < seconds["grouped"] else "grouped"


def _seconds(way: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> float:
    """The shortest of some passes forward and backward."""
    operands = [tensor.detach().requires_grad_() for tensor in (x, weight, bias) if tensor is not None]
    taken = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.enable_grad():
            made = way(operands[0], operands[1], operands[2] if bias is not None else None, form)
            torch.autograd.grad(made.sum(), operands)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


@contextmanager
def only(way: str) -> Iterator[None]:
    """While inside, in this thread, convolutions take this way of `WAYS`, on every device: to compare the ways."""
    before = _ONLY.set(way)
    try:
        yield
    finally:
        _ONLY.reset(before)


def forget() -> None:
    """Measure again."""
    _CHOSEN.clear()
