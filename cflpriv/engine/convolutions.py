"""Convolutions of many clients at once, each with its own kernels: two ways, of which the CPU takes the first and a CUDA device the second.

"grouped": one convolution in which each client is a group. "unfolded": patches of the images, and one batched matrix product. Both give
the same up to rounding. On an H200 the second is 5 to 10 times as quick for layers of LeNet-5 (100 and 1000 clients, forward and backward)
and 1.4 to 5 times for those of ResNet-9 (100 clients); there a sample's result in groups also depended on the others of its batch, and
gradients of 100 groups differed by 6e-4 from those of all other ways. On the CPU the first is the quicker.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["WAYS", "Form", "convolved", "grouped", "only", "patches", "side_by_side", "unfolded", "windows"]

UNFOLDED_SHARE = 1 / 8
"""Of a CUDA device's memory, what the patches of one layer may take; where they take more, groups are the way."""

_ONLY: ContextVar[str] = ContextVar("only", default="")


@dataclass(frozen=True)
class Form:
    """A convolution without its parameters."""

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


def side_by_side(x: Tensor) -> Tensor:
    """Images (batch, clients, i, height, width) with the clients' channels side by side, (batch, clients · i, height, width).

    In the layout that is the quicker: channels last for the groups of the CPU, channels first for patches.
    """
    whole = x.flatten(1, 2)
    return whole.contiguous() if x.is_cuda else whole.contiguous(memory_format=torch.channels_last)


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

    torch's own `unfold` of images is launched once for each image on a CUDA device. On the CPU it takes longer than a copy of this, and its
    backward pass less long.
    """
    (down, right), (over, beside) = form.padding, form.dilation
    padded = functional.pad(x, (right, right, down, down)) if down or right else x
    reach = [dilation * (size - 1) + 1 for dilation, size in zip(form.dilation, form.size, strict=True)]
    return padded.unfold(2, reach[0], form.stride[0]).unfold(3, reach[1], form.stride[1])[..., ::over, ::beside]


def patches(x: Tensor, form: Form) -> Tensor:
    """A copy of `windows` as columns, (n, i · size², height' · width')."""
    seen = windows(x, form)
    return seen.permute(0, 1, 4, 5, 2, 3).reshape(len(x), -1, seen.shape[2] * seen.shape[3])


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor | None, Form], Tensor]] = {"grouped": grouped, "unfolded": unfolded}


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> Tensor:
    """As `grouped`, by the way of the device of x."""
    return WAYS[_ONLY.get() or ("unfolded" if x.is_cuda and _fits(x, weight, form) else "grouped")](x, weight, bias, form)


def _fits(x: Tensor, weight: Tensor, form: Form) -> bool:
    """Whether a device has room for patches: themselves, a copy of them and their gradient."""
    results = x[:, :1, :: form.stride[0], :: form.stride[1]].numel() * len(weight)
    needed = 3 * results * weight[0, 0].numel() * x.element_size()
    return needed <= torch.cuda.get_device_properties(x.device).total_memory * UNFOLDED_SHARE


@contextmanager
def only(way: str) -> Iterator[None]:
    """While inside, in this thread, convolutions take this way of `WAYS`, on every device: to compare the ways."""
    before = _ONLY.set(way)
    try:
        yield
    finally:
        _ONLY.reset(before)
