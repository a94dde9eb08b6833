"""Local SGD for many clients at once: one forward, backward and update serves all clients of a chunk.

Clients may have different numbers of samples, batches and steps. They are sorted by steps; when some are done, the stack shrinks. Within a
step short batches are padded to the longest one with weight zero.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..types import Array

__all__ = ["Forward", "Layout", "Local", "Options", "gradients_stacked", "to_prototypes", "train_stacked"]

Forward = Callable[[Tensor, Sequence[Tensor], int], Tensor]
"""(inputs, stacked parameters, clients) -> outputs (clients, batch, classes)."""


@dataclass(frozen=True)
class Options:
    """The update of one step: v ← momentum·v + g + weight_decay·θ + prox·(θ − anchor) + correction;  θ ← θ − lr·v.

    With `maml_lr` above 0, g is taken at θ − maml_lr·g′ where g′ is the gradient on the batch before (first-order MAML): batches are used
    in pairs. With `clip_norm` above 0, each sample's gradient (of all parameters together) is first scaled down to that
    norm. `frozen` holds, by parameter, whether it stays as it is. With `pull` above 0 each sample's loss has pull·‖f − C_y‖²/e more, f (e,)
    being the input of the last layer and C_y the client's given prototype of the sample's class (FedProto).
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    prox: float = 0.0
    maml_lr: float = 0.0
    clip_norm: float = 0.0
    frozen: tuple[bool, ...] = ()
    pull: float = 0.0


@dataclass(frozen=True)
class Layout:
    """How a vector (d,) is cut into parameters: their shapes, and which are kept transposed."""

    shapes: tuple[tuple[int, ...], ...]
    transposed: tuple[bool, ...]

    def split(self, stack: Tensor) -> list[Tensor]:
        """(C, d) as one contiguous tensor a parameter, (C, *shape), the axes behind the client's swapped where transposed."""
        pieces = torch.split(stack, [int(np.prod(shape)) for shape in self.shapes], dim=1)
        whole = [piece.reshape(len(stack), *shape) for piece, shape in zip(pieces, self.shapes, strict=True)]
        turned = [piece.transpose(1, 2) if turn else piece for piece, turn in zip(whole, self.transposed, strict=True)]
        return [piece.clone(memory_format=torch.contiguous_format) for piece in turned]

    def join(self, parameters: Sequence[Tensor]) -> Array:
        """What `split` cut, as rows (C, d)."""
        pieces = [p.transpose(1, 2) if turn else p for p, turn in zip(parameters, self.transposed, strict=True)]
        return torch.cat([piece.flatten(1) for piece in pieces], dim=1).cpu().numpy()


@dataclass(frozen=True, eq=False)
class Local:
    """One client's side of it: normalised inputs x (n, *shape), labels y (n,), its batches as index arrays, and its vectors (d,).

    A batch's gradients are divided by its length, or by `expected` where that is above 0 (Poisson batches, which may be empty).
    `owner` is the client's data, with which may be kept what depends on nothing else; `samples(owner)` gives x again. `prototypes`
    (classes, e) are what features are pulled to; rows of NaN pull nothing. `noised(at, gradient)` is the private form of the gradient (d,)
    of batch number `at`, in the layout of the vectors.
    """

    x: Tensor
    y: Tensor
    batches: Sequence[Array]
    start: Array
    anchor: Array | None = None
    correction: Array | None = None
    expected: float = 0.0
    owner: Any = None
    samples: Callable[[Any], Tensor] = Tensor.detach
    prototypes: Array | None = None
    noised: Callable[[int, Array], Array] | None = None


def train_stacked(forward: Forward, images: bool, layout: Layout, clients: Sequence[Local], options: Options, device: str) -> list[Array]:
    """The movements of the clients' parameters (d,), in order."""
    order = sorted(range(len(clients)), key=lambda i: -len(clients[i].batches))
    ranked = [clients[i] for i in order]
    dtype = ranked[0].x.dtype
    x, y, offsets = _together(ranked, device)
    parameters = layout.split(_stack([one.start for one in ranked], dtype, device))
    anchors = _anchors(ranked, parameters, layout, dtype, device) if options.prox else None
    correction = None
    if ranked[0].correction is not None:
        correction = layout.split(_stack([one.correction for one in ranked if one.correction is not None], dtype, device))
    prototypes = None
    if options.pull:
        prototypes = torch.stack([torch.as_tensor(one.prototypes, dtype=dtype, device=device) for one in ranked])
    moving = [i for i in range(len(parameters)) if not (options.frozen and options.frozen[i])]
    velocities = [torch.zeros_like(parameters[i]) for i in moving] if options.momentum else []
    finished: list[Array | None] = [None] * len(clients)
    step, stride = 0, 2 if options.maml_lr else 1
    while ranked:
        alive = sum(len(one.batches) >= step + stride for one in ranked)
        if alive < len(ranked):  # the last ones are done
            rows = layout.join([p[alive:] for p in parameters])
            for position in range(alive, len(ranked)):
                finished[order[position]] = rows[position - alive] - ranked[position].start
            ranked = ranked[:alive]
            parameters, velocities = [p[:alive].clone() for p in parameters], [v[:alive].clone() for v in velocities]
            anchors = None if anchors is None else [a[:alive] for a in anchors]
            correction = None if correction is None else [c[:alive] for c in correction]
            prototypes = None if prototypes is None else prototypes[:alive]
            continue
        until = min(len(one.batches) for one in ranked) // stride * stride
        expected = [one.expected for one in ranked]
        plan = [_batch([one.batches[at] for one in ranked], expected, offsets, images, device) for at in range(step, until)]
        for at in range(0, len(plan), stride):
            pulled = (options.pull, prototypes)
            gradients = _gradients(forward, images, x, y, parameters, moving, plan[at], options.clip_norm, *pulled)
            gradients = _noised(ranked, step + at, layout, gradients, dtype, device)
            if options.maml_lr:
                ahead = list(parameters)
                for i, gradient in zip(moving, gradients, strict=True):
                    ahead[i] = parameters[i] - options.maml_lr * gradient
                gradients = _gradients(forward, images, x, y, ahead, moving, plan[at + 1], options.clip_norm, *pulled)
                gradients = _noised(ranked, step + at + 1, layout, gradients, dtype, device)
            for place, i in enumerate(moving):
                if anchors is not None:
                    gradients[place] = gradients[place] + options.prox * (parameters[i] - anchors[i])
                if correction is not None:
                    gradients[place] = gradients[place] + correction[i]
            torch._fused_sgd_(
                [parameters[i] for i in moving], gradients, velocities, weight_decay=options.weight_decay, momentum=options.momentum,
                lr=options.lr, dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
            )  # fmt: skip
        step = until
    return [vector for vector in finished if vector is not None]


def _noised(clients: Sequence[Local], at: int, layout: Layout, gradients: list[Tensor], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Each client's gradient with its noise, where there is any. All parameters move: others take the plain loop."""
    if clients[0].noised is None:
        return gradients
    rows = layout.join(gradients)
    noisy = [one.noised(at, row) for one, row in zip(clients, rows, strict=True) if one.noised is not None]
    return layout.split(_stack(noisy, dtype, device))


def to_prototypes(features: Tensor, targets: Tensor) -> Tensor:
    """‖f − C‖²/e over the last axis; 0 where the target is NaN, which stands for none."""
    known = torch.isfinite(targets).all(dim=-1)
    return (features - torch.nan_to_num(targets)).square().mean(dim=-1) * known


def gradients_stacked(forward: Forward, images: bool, layout: Layout, clients: Sequence[Local], device: str) -> list[Array]:
    """The gradient (d,) of each client's mean loss over its one batch, at its start."""
    x, y, offsets = _together(clients, device)
    parameters = layout.split(_stack([one.start for one in clients], clients[0].x.dtype, device))
    plan = _batch([one.batches[0] for one in clients], [0.0] * len(clients), offsets, images, device)
    gradients = _gradients(forward, images, x, y, parameters, list(range(len(parameters))), plan)
    return [row.copy() for row in layout.join(gradients)]


def _together(clients: Sequence[Local], device: str) -> tuple[Tensor, Tensor, Array]:
    """All samples of a chunk in one tensor, and where each client's begin."""
    offsets = np.concatenate([[0], np.cumsum([len(one.y) for one in clients])[:-1]])
    return torch.cat([one.x for one in clients]).to(device), torch.cat([one.y for one in clients]).to(device), offsets


def _stack(vectors: Sequence[Array], dtype: torch.dtype, device: str) -> Tensor:
    return torch.from_numpy(np.stack(vectors)).to(device, dtype)


def _anchors(clients: Sequence[Local], parameters: list[Tensor], layout: Layout, dtype: torch.dtype, device: str) -> list[Tensor]:
    """What the prox term pulls towards: the given anchors, or the start."""
    if clients[0].anchor is None:
        return [p.clone() for p in parameters]
    return layout.split(_stack([one.anchor for one in clients if one.anchor is not None], dtype, device))


@dataclass(frozen=True, eq=False)
class _Batch:
    """Rows of the chunk's samples, (batch, clients) for images and (clients, batch) for features; weights 1/size, zero where padded."""

    rows: Tensor
    weights: Tensor | float


def _batch(batches: Sequence[Array], expected: Sequence[float], offsets: Array, images: bool, device: str) -> _Batch:
    sizes = [len(batch) for batch in batches]
    longest = max(1, *sizes)
    rows = np.zeros((len(batches), longest), dtype=np.int64)  # padded with the client's first sample
    for i, batch in enumerate(batches):
        rows[i, : sizes[i]] = batch
        rows[i] += offsets[i]
    weights: Tensor | float = 1.0 / longest
    if min(sizes) < longest or any(expected):
        inside = np.arange(longest)[None, :] < np.array(sizes)[:, None]
        divisors = np.array([want or max(1, size) for want, size in zip(expected, sizes, strict=True)])
        weights = torch.from_numpy(inside / divisors[:, None]).to(device)
    return _Batch(torch.from_numpy(rows.T.copy() if images else rows).to(device), weights)


def _gradients(
    forward: Forward, images: bool, x: Tensor, y: Tensor, parameters: Sequence[Tensor], moving: Sequence[int], batch: _Batch,
    clip_norm: float = 0.0, pull: float = 0.0, prototypes: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """The gradient of each client's weighted loss with respect to its moving parameters, of clipped samples if `clip_norm` is above 0.

    With `prototypes` (clients, classes, e), forward gives features as well, which are pulled to those of their samples' classes.
    """
    leaves = [p.detach().requires_grad_(i in moving) for i, p in enumerate(parameters)]
    clients = len(leaves[0])
    with torch.enable_grad():
        inputs = x[batch.rows]
        labels = y[batch.rows.T if images else batch.rows]
        if images:  # (batch, clients, channels, height, width): the clients' channels side by side
            inputs = inputs.flatten(1, 2).contiguous(memory_format=torch.channels_last)
        taps: list[Any] = []
        logits = forward(inputs, leaves, clients, taps) if clip_norm else forward(inputs, leaves, clients)  # type: ignore[call-arg]
        pulled: Tensor | float = 0.0
        if prototypes is not None:
            logits, features = logits
            pulled = pull * to_prototypes(features, prototypes[torch.arange(clients, device=labels.device).unsqueeze(1), labels])
        losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(clients, -1) + pulled
        if clip_norm:
            deltas = torch.autograd.grad(losses.sum(), [tap.after for tap in taps])
            spreads = [tap.rule.spread(tap.before, delta, clients) for tap, delta in zip(taps, deltas, strict=True)]
            norms = torch.stack([spread.squares() for spread in spreads]).sum(0).sqrt()
            factors = (clip_norm / norms.clamp_min(clip_norm)) * batch.weights
            lost = ~torch.isfinite(norms)
            if lost.any():  # a sample whose gradient no norm bounds contributes nothing, and spoils nobody else's
                kept = partial(_without, lost=lost)
                spreads = [tap.rule.spread(kept(tap.before), kept(delta), clients) for tap, delta in zip(taps, deltas, strict=True)]
                factors = torch.where(lost, 0.0, factors)
            totals = [gradient for spread in spreads for gradient in spread.total(factors.to(norms.dtype))]
            return [totals[i].contiguous() for i in moving]
        loss = (losses * batch.weights).sum() if isinstance(batch.weights, Tensor) else losses.sum() * batch.weights
        # the fused update walks parameter, gradient and velocity in one order, so all must be contiguous
        return [gradient.contiguous() for gradient in torch.autograd.grad(loss, [leaves[i] for i in moving])]


def _without(values: Tensor, lost: Tensor) -> Tensor:
    """A layer's input or its gradient, (clients, batch, features) or (batch, clients · channels, height, width), 0 for `lost` samples.

    `lost` is (clients, batch). A weight of 0 would not do: products of finite numbers overflow too, and 0 · ∞ is no number.
    """
    if values.ndim == 3:
        return values.masked_fill(lost.unsqueeze(2), 0.0)
    return values.masked_fill(lost.T.repeat_interleave(values.shape[1] // len(lost), dim=1)[:, :, None, None], 0.0)
