"""Clipped sums of per-sample gradients whose sensitivity holds at any parameters.

Clipping bounds what a sample adds. It does not bound how a sample changes what the others add. A kernel of matrix products may round a row
differently beside other rows, and at parameters that cancel (equal and large rows of classes, hidden units at the kink of a ReLU) such a
last digit is all of a gradient: one more sample then replaces the clipped gradients of all others. The compiled kernel (`native`) computes
one sample at a time. Here, by torch,

- samples are computed in blocks of one size (`Options.block`), which depends on public numbers alone; a short block is padded;
- `steady` tries whether a network's blocks give a sample the same bits at every place and beside any others; a network that fails is
  trained by the plain loop, one sample at a time;
- the sum is in float64, whose rounding is below 1e-10 of the clip norm for batches up to 10⁶ samples.

Then one sample more or less moves the sum by the clipped norm of that sample, up to rounding of that norm, which is taken in float64.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..types import Loss
from .clipping import LayerGradients
from .convolutions import side_by_side
from .device import Device, sent
from .losses import loss_of
from .models import Model, dtype_of
from .views import views_in, with_views

if TYPE_CHECKING:
    from .sgd import Batch, Forward, Options, Way

__all__ = ["LARGEST_BLOCK", "block_size", "chosen", "clipped_sums", "losses_in_blocks", "steady"]

ROWS = 16
"""Blocks are multiples of this many samples: kernels treat what is left over in other ways, which differ by place."""
LARGEST_BLOCK = 128
SCALES = (0.1, 1e3)
"""Of the parameters of a trial."""


def block_size(expected: float, rate: float = 1.0, views: int = 1) -> int:
    """The samples of a block for batches of `expected` samples, of all samples each with probability `rate`; public numbers.

    Samples with `views` take so many rows each.
    """
    usual = expected + 2 * math.sqrt(expected * (1 - rate))
    return min(max(ROWS, LARGEST_BLOCK // views // ROWS * ROWS), ROWS * max(1, math.ceil(usual / ROWS)))


def chosen(values: Tensor, rows: Tensor) -> Tensor:
    """`values[rows]`, which takes two to three times as long."""
    return values.index_select(0, rows.flatten()).view(*rows.shape, *values.shape[1:])


def clipped_sums(
    way: "Way", x: Tensor, y: Tensor, parameters: Sequence[Tensor], batch: "Batch", options: "Options", device: Device
) -> list[Tensor]:
    """Σ weight × clipped gradient over each client's batch, float64 (C, *shape), one a parameter.

    x (n, *shape) and y (n,) are the samples of all clients; `batch` has the rows of each.
    """
    rows = batch.rows.T if way.images else batch.rows  # (C, B)
    weights = batch.weights if isinstance(batch.weights, Tensor) else x.new_full(rows.shape, batch.weights)
    missing = -rows.shape[1] % options.block
    rows, weights = (torch.nn.functional.pad(part, (0, missing)) for part in (rows, weights))  # what pads is a sample of weight 0
    leaves = [parameter.detach().requires_grad_() for parameter in parameters]
    totals: list[Tensor] = []
    for at in range(0, rows.shape[1], options.block):
        some, their = rows[:, at : at + options.block], weights[:, at : at + options.block]
        _, layers = _layers(way.forward, way.images, x, y, leaves, some, options.loss, options.augment)
        norms = torch.stack([layer.squares() for layer in layers]).sum(0).sqrt()
        factors = options.clip_norm / norms.clamp_min(options.clip_norm) * their
        # a sample whose gradient no norm bounds contributes nothing, and does not affect the others
        infinite = ~torch.isfinite(norms)
        lost = infinite if device.kind != "cpu" or infinite.any() else None  # a device is not asked: the host would wait for it
        factors = factors if lost is None else factors.masked_fill(lost, 0.0)
        made = [total for layer in layers for total in layer.total(factors, lost)]
        totals = [total.add_(more) for total, more in zip(totals, made, strict=True)] if totals else made
    return totals


def losses_in_blocks(way: "Way", x: Tensor, y: Tensor, vector: Tensor, loss: Loss) -> Tensor:
    """The loss (n,) of each of the samples x (n, *shape), y (n,) at the parameters `vector` (d,), in blocks of `LARGEST_BLOCK`."""
    leaves, options = way.layout.split(vector.unsqueeze(0)), (way.forward, way.images)
    pieces = []
    for at in range(0, len(y), LARGEST_BLOCK):
        rows = torch.arange(at, at + LARGEST_BLOCK, device=y.device).clamp_(max=len(y) - 1).unsqueeze(0)
        with torch.no_grad():
            pieces.append(_losses(*options, x, y, leaves, rows, loss, []).flatten())
    return torch.cat(pieces)[: len(y)]


def _losses(
    forward: "Forward", images: bool, x: Tensor, y: Tensor, leaves: Sequence[Tensor], rows: Tensor, loss: Loss, taps: list[Any],
    augment: Sequence[str] = (),
) -> Tensor:  # fmt: skip
    """The losses (C, B) of one block, rows (C, B): of samples with views the means over these."""
    inputs, labels = with_views(chosen(x, rows.T if images else rows), chosen(y, rows), augment, images)
    if images:
        inputs = side_by_side(inputs)
    outputs = forward(inputs, leaves, len(rows), taps)  # type: ignore[call-arg]
    losses = loss_of(loss, outputs.flatten(0, 1), labels.flatten(), "none").view(labels.shape)
    return losses.view(*rows.shape, -1).mean(2) if augment else losses


def _layers(
    forward: "Forward", images: bool, x: Tensor, y: Tensor, leaves: Sequence[Tensor], rows: Tensor, loss: Loss, augment: Sequence[str]
) -> tuple[Tensor, list[LayerGradients]]:
    """The losses (C, B) of one block, rows (C, B), and the samples' gradients layer by layer."""
    taps: list[Any] = []
    with torch.enable_grad():
        losses = _losses(forward, images, x, y, leaves, rows, loss, taps, augment)
        deltas = torch.autograd.grad(losses.sum(), [tap.after for tap in taps])
        layers = [tap.rule.spread(tap.before, delta, len(rows)) for tap, delta in zip(taps, deltas, strict=True)]
        return losses, [layer.merged(views_in(augment)) for layer in layers] if augment else layers


@lru_cache(maxsize=256)
def steady(model: Model, way: "Way", clients: int, block: int, device: Device, augment: tuple[str, ...] = ()) -> bool:
    """Whether a block gives each sample the same bits at every place and beside any other samples, by a trial of two blocks.

    The trial has random samples and parameters, so it reads nothing of a client. Depends on its arguments and the machine alone.
    """
    generator, dtype = torch.Generator().manual_seed(0), dtype_of(model.dtype)
    order = torch.randperm(block, generator=generator)
    kept = torch.arange(block) % 2 == 0  # every other sample of the first block is in the second, at another place
    x = torch.randn((clients, block, *model.shape), generator=generator, dtype=dtype)
    y = torch.randint(model.classes, (clients, block), generator=generator)
    others = torch.randn(x.shape, generator=generator, dtype=dtype)
    shape = (1, block, *(1 for _ in model.shape))
    samples = torch.cat([x, torch.where(kept.view(shape), x, others)[:, order]], dim=1).flatten(0, 1)
    labels = torch.cat([y, y[:, order]], dim=1).flatten()
    rows = torch.arange(2 * clients * block).view(clients, 2 * block)
    whole = [torch.randn((clients, *size), generator=generator, dtype=dtype) for _, size, _ in model.layout]
    samples, labels, rows, order, both = (sent(part, device) for part in (samples, labels, rows, order, kept[order]))
    same: list[Tensor] = []
    for scale in SCALES:
        leaves = [sent(scale * part, device) for part in whole]
        turned = [
            (leaf.transpose(1, 2) if turn else leaf).contiguous().requires_grad_()
            for leaf, turn in zip(leaves, way.layout.transposed, strict=True)
        ]
        first, second = (
            _layers(way.forward, way.images, samples, labels, turned, some, model.loss, augment) for some in torch.chunk(rows, 2, 1)
        )  # fmt: skip
        pairs = [(first[0].detach(), second[0].detach())]
        pairs += [pair for a, b in zip(first[1], second[1], strict=True) for pair in zip(a.parts(), b.parts(), strict=True)]
        same += [(a.index_select(1, order) == b).flatten(1).view(clients, block, -1).all(2) | ~both for a, b in pairs]
    return bool(torch.stack(same).cpu().all())
