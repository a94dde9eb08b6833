"""Local SGD for many clients at once: one forward, backward and update serves all clients of a chunk.

Clients may have different numbers of samples, batches and steps. They are sorted by steps; when some are done, the stack shrinks, at once
or (`hold`) when few are left. Within a step short batches are padded to the longest one with weight zero.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..types import Array, Loss
from .clipped_sums import ROWS, chosen, clipped_sums
from .convolutions import side_by_side
from .device import Device, fetched, half, sent
from .losses import loss_of
from .own_modules import flat
from .step_noise import keys_of, normals
from .views import views_in, with_views

__all__ = [
    "Batch", "Forward", "Layout", "Local", "Options", "Stack", "Steps", "Way", "gradients_stacked", "steps_by_batch", "take_step",
    "to_prototypes", "train_stacked",
]  # fmt: skip

ADAM_BETAS, ADAM_EPS = (0.9, 0.999), 1e-8
"""torch.optim.Adam's."""
Forward = Callable[[Tensor, Sequence[Tensor], int], Tensor]
"""(inputs, stacked parameters, clients) -> outputs (clients, batch, classes)."""


@dataclass(frozen=True)
class Options:
    """The update of one step: v ← momentum·v + g + weight_decay·θ + prox·(θ − anchor) + correction;  θ ← θ − lr·v.

    With `maml_lr` above 0, g is taken at θ − maml_lr·g′ where g′ is the gradient on the batch before (first-order MAML): batches are used
    in pairs. With `clip_norm` above 0, each sample's gradient (of all parameters together) is first scaled down to that
    norm. `frozen` holds, by parameter, whether it stays as it is. With `pull` above 0 each sample's loss has pull·‖f − C_y‖²/e more, f (e,)
    being the input of the last layer and C_y the client's given prototype of the sample's class (FedProto). With `optimizer` "adam" the
    step is Adam's on the same sum, in place of v. With `deviation` above 0 each batch's gradient gets normals of this standard deviation
    (`step_noise`, by `Local.noise_key`) and is rounded to multiples of `grid`. `loss`: of outputs and labels. `block`: samples that are
    computed together where gradients are clipped (`clipped_sums`). `augment`: a sample's loss is the mean over these `views`.
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    prox: float = 0.0
    maml_lr: float = 0.0
    clip_norm: float = 0.0
    frozen: tuple[bool, ...] = ()
    pull: float = 0.0
    optimizer: str = "sgd"
    deviation: float = 0.0
    grid: float = 0.0
    loss: Loss = "cross_entropy"
    block: int = ROWS
    augment: tuple[str, ...] = ()

    @property
    def stride(self) -> int:
        """How many batches a step takes."""
        return 2 if self.maml_lr else 1

    @property
    def moments(self) -> int:
        """How many tensors of the size of the parameters the optimiser keeps."""
        return 2 if self.optimizer == "adam" else int(self.momentum > 0)


@dataclass(frozen=True)
class Layout:
    """How a vector (d,) is cut into parameters: their shapes, and which are kept transposed."""

    shapes: tuple[tuple[int, ...], ...]
    transposed: tuple[bool, ...]

    def split(self, stack: Tensor) -> list[Tensor]:
        """(C, d) as one contiguous tensor a parameter, (C, *shape), the axes behind the client's swapped where transposed."""
        return [piece.clone(memory_format=torch.contiguous_format) for piece in self.views(stack)]

    def views(self, stack: Tensor) -> list[Tensor]:
        """What `split` copies."""
        pieces = torch.split(stack, [int(np.prod(shape)) for shape in self.shapes], dim=1)
        whole = [piece.view(len(stack), *shape) for piece, shape in zip(pieces, self.shapes, strict=True)]
        return [piece.transpose(1, 2) if turn else piece for piece, turn in zip(whole, self.transposed, strict=True)]

    def join(self, parameters: Sequence[Tensor]) -> Tensor:
        """What `split` cut, as rows (C, d)."""
        pieces = [p.transpose(1, 2) if turn else p for p, turn in zip(parameters, self.transposed, strict=True)]
        return torch.cat([flat(piece) for piece in pieces], dim=1)


@dataclass(frozen=True, eq=False)
class Local:
    """One client's side of it: normalised inputs x (n, *shape), labels y (n,), its batches as index arrays, and its vectors (d,).

    A batch's gradients are divided by its length, or by `expected` where that is above 0 (Poisson batches, which may be empty and hardly
    ever have more than `longest` samples; 0 where batches are of a fixed size).
    `owner` is the client's data, with which may be kept what depends on nothing else; `model` (`engine.Model`) makes x of it again.
    `prototypes` (classes, e) are what features are pulled to; rows of NaN pull nothing. `noise_key` (32 secret bytes) is what the noise of
    the batches' gradients is made of, in the layout of the vectors; of no other training.
    """

    x: Tensor
    y: Tensor
    batches: Sequence[Array]
    start: Array
    anchor: Array | None = None
    correction: Array | None = None
    expected: float = 0.0
    owner: Any = None
    model: Any = None
    prototypes: Array | None = None
    longest: int = 0
    noise_key: bytes = b""


@dataclass(frozen=True)
class Way:
    """A forward over stacked parameters, the layouts it wants, and its name."""

    forward: Forward
    images: bool
    layout: Layout
    name: str


@dataclass(eq=False)
class Stack:
    """Clients in training: their samples one after the other, beginning at `offsets`, and stacked tensors (C, *shape), one a parameter.

    `moments` are the optimiser's (velocity, or Adam's two) of the parameters numbered `moving`, `count` its steps so far, a scalar. Steps
    change parameters, moments and count in place.
    """

    x: Tensor
    y: Tensor
    offsets: Array
    parameters: list[Tensor]
    moving: list[int]
    moments: list[list[Tensor]]
    count: Tensor
    anchors: list[Tensor] | None = None
    correction: list[Tensor] | None = None
    prototypes: Tensor | None = None

    def shrink(self, clients: int) -> None:
        """Keep the first `clients` only, and their samples."""
        if clients < len(self.offsets):
            samples = int(self.offsets[clients])
            self.x, self.y, self.offsets = self.x[:samples], self.y[:samples], self.offsets[:clients]
        self.parameters = [p[:clients].clone() for p in self.parameters]
        self.moments = [[m[:clients].clone() for m in moment] for moment in self.moments]
        self.anchors = None if self.anchors is None else [a[:clients] for a in self.anchors]
        self.correction = None if self.correction is None else [c[:clients] for c in self.correction]
        self.prototypes = None if self.prototypes is None else self.prototypes[:clients]


Steps = Callable[[Way, Stack, Sequence[Local], range, Options, Device], None]
"""Train the clients of a stack on their batches numbered in the range. A client keeps its parameters after its last batch."""


def train_stacked(
    way: Way, clients: Sequence[Local], options: Options, device: Device, steps: Steps, hold: int = 1
) -> Callable[[], list[Array]]:  # fmt: skip
    """Begin to train; calling what is returned gives the movements of the clients' parameters (d,), in order.

    A CUDA device then still computes, and the host may go on with other work. Clients that are done leave the stack once only 1 / `hold`
    of it still trains; with `hold` = 1 at once.
    """
    order = sorted(range(len(clients)), key=lambda i: -len(clients[i].batches))
    ranked = [clients[i] for i in order]
    starts = _rows([client.start for client in ranked], ranked[0].x.dtype, device)
    stack = _stacked(way.layout, ranked, starts, options, device)
    finished: list[tuple[list[int], Callable[[], list[Array]]]] = []
    step, stride = 0, options.stride
    while ranked:
        alive = sum(len(client.batches) >= step + stride for client in ranked)
        if alive < len(ranked):  # the last ones are done
            rows = way.layout.join([p[alive:] for p in stack.parameters]).sub_(starts[alive : len(ranked)])
            finished.append((order[alive : len(ranked)], fetched(rows)))
            ranked = ranked[:alive]
            if ranked:
                stack.shrink(alive)
            continue
        until = len(ranked[(len(ranked) - 1) // hold].batches) // stride * stride
        steps(way, stack, ranked, range(step, until), options, device)
        step = until

    def movements() -> list[Array]:
        made = {position: vector for positions, rows in finished for position, vector in zip(positions, rows(), strict=True)}
        return [made[position] for position in range(len(clients))]

    return movements


def _stacked(layout: Layout, clients: Sequence[Local], starts: Tensor, options: Options, device: Device) -> Stack:
    """The clients at their start, the rows (C, d) of `starts`."""
    dtype = clients[0].x.dtype
    x, y, offsets = _together(clients, device)
    parameters = layout.split(starts)
    anchors = _anchors(clients, parameters, layout, dtype, device) if options.prox else None
    correction = None
    if any(client.correction is not None for client in clients):
        corrections = [client.correction for client in clients if client.correction is not None]
        if len(corrections) < len(clients):
            raise ValueError("one client has a correction and another has none")
        correction = layout.split(_rows(corrections, dtype, device))
    prototypes = None
    if options.pull:
        prototypes = sent(torch.from_numpy(np.stack([np.asarray(client.prototypes) for client in clients])), device, dtype)
    moving = [i for i in range(len(parameters)) if not (options.frozen and options.frozen[i])]
    moments = [[torch.zeros_like(parameters[i]) for i in moving] for _ in range(options.moments)]
    count = torch.zeros((), dtype=torch.float32, device=device.kind)
    return Stack(x, y, offsets, parameters, moving, moments, count, anchors, correction, prototypes)


def steps_by_batch(way: Way, stack: Stack, clients: Sequence[Local], span: range, options: Options, device: Device) -> None:
    """One batch (or, with MAML, pair of batches) after the other, each padded to its own longest."""
    expected = [client.expected for client in clients]
    plan = [_batch([client.batches[at] for client in clients], expected, stack.offsets, way.images, device) for at in span]
    keys = sent(keys_of([client.noise_key for client in clients]), device) if options.deviation else None
    stride, noise = options.stride, list[Tensor]()
    for at in range(0, len(plan), stride):
        if keys is not None:
            numbers = [sent(torch.tensor([number]), device) for number in span[at : at + stride]]
            noise = [normals(keys, number, len(clients[0].start), options.deviation) for number in numbers]
        take_step(way, stack, plan[at : at + stride], options, options.lr, device, noise)


def take_step(
    way: Way, stack: Stack, batches: Sequence["Batch"], options: Options, lr: float | Tensor, device: Device, noise: Sequence[Tensor] = ()
) -> None:
    """One step, in place, on one batch or a pair of them. `noise` has a tensor (C, d) a batch, or none; it is used up."""
    gradients = _gradients(way, stack, stack.parameters, batches[0], options, device)
    gradients = _noised(gradients, way.layout.views(noise[0]) if noise else None, options.grid, stack.x.dtype)
    if options.maml_lr:
        ahead = list(stack.parameters)
        for i, gradient in zip(stack.moving, gradients, strict=True):
            ahead[i] = stack.parameters[i] - options.maml_lr * gradient
        gradients = _gradients(way, stack, ahead, batches[1], options, device)
        gradients = _noised(gradients, way.layout.views(noise[1]) if noise else None, options.grid, stack.x.dtype)
    for place, i in enumerate(stack.moving):
        if stack.anchors is not None:
            gradients[place] = gradients[place] + options.prox * (stack.parameters[i] - stack.anchors[i])
        if stack.correction is not None:
            gradients[place] = gradients[place] + stack.correction[i]
    parameters, rate = [stack.parameters[i] for i in stack.moving], cast(Any, lr)
    if options.optimizer == "adam":
        stack.count += 1
        torch._fused_adam_(
            parameters, gradients, stack.moments[0], stack.moments[1], [], [stack.count] * len(parameters), lr=rate, beta1=ADAM_BETAS[0],
            beta2=ADAM_BETAS[1], weight_decay=options.weight_decay, eps=ADAM_EPS, amsgrad=False, maximize=False,
        )  # fmt: skip
        return
    torch._fused_sgd_(
        parameters, gradients, stack.moments[0] if stack.moments else [], weight_decay=options.weight_decay, momentum=options.momentum,
        lr=rate, dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
    )  # fmt: skip


def _noised(gradients: Sequence[Tensor], noise: Sequence[Tensor] | None, grid: float, dtype: torch.dtype) -> list[Tensor]:
    """Gradients in this dtype, with `noise` on the grid where there is any, as `protocols.mechanisms.snap` rounds.

    Sums and rounding are float64's, in the memory of the noise. All parameters move: others take the plain loop.
    """
    if noise is None:
        return [gradient.to(dtype) for gradient in gradients]
    made = [torch.empty_like(gradient, dtype=dtype) for gradient in gradients]  # not the memory of the noise, which is used again
    for out, gradient, drawn in zip(made, gradients, noise, strict=True):
        out.copy_(drawn.add_(gradient).mul_(1 / grid).round_().mul_(grid))  # the grid is a power of two, its inverse exact
    return made


def to_prototypes(features: Tensor, targets: Tensor) -> Tensor:
    """‖f − C‖²/e over the last axis; 0 where the target is NaN, which stands for none."""
    known = torch.isfinite(targets).all(dim=-1)
    return (features - torch.nan_to_num(targets)).square().mean(dim=-1) * known


def gradients_stacked(way: Way, clients: Sequence[Local], options: Options, device: Device) -> list[Array]:
    """The gradient (d,) of each client's loss over its only batch, at its start, for all parameters. Divided as in training."""
    stack = _stacked(way.layout, clients, _rows([client.start for client in clients], clients[0].x.dtype, device), options, device)
    batch = _batch([client.batches[0] for client in clients], [client.expected for client in clients], stack.offsets, way.images, device)
    gradients = _gradients(way, stack, stack.parameters, batch, options, device)
    return list(way.layout.join(gradients).cpu().numpy())


def _together(clients: Sequence[Local], device: Device) -> tuple[Tensor, Tensor, Array]:
    """All samples of a chunk in one tensor, and where each client's begin."""
    offsets = np.concatenate([[0], np.cumsum([len(client.y) for client in clients])[:-1]])
    return torch.cat([client.x for client in clients]).to(device.kind), torch.cat([client.y for client in clients]).to(device.kind), offsets


def _rows(vectors: Sequence[Array], dtype: torch.dtype, device: Device) -> Tensor:
    """The vectors as rows (C, d). One that several have is sent to a device once."""
    if device.kind == "cpu":
        return torch.from_numpy(np.stack(vectors)).to(dtype)
    distinct = list({id(vector): vector for vector in vectors}.values())
    rows = sent(torch.from_numpy(np.stack(distinct)), device, dtype)
    if len(distinct) in (1, len(vectors)):
        return rows.expand(len(vectors), -1)
    places = {id(vector): place for place, vector in enumerate(distinct)}
    return rows[sent(torch.tensor([places[id(vector)] for vector in vectors]), device)]


def _anchors(clients: Sequence[Local], parameters: list[Tensor], layout: Layout, dtype: torch.dtype, device: Device) -> list[Tensor]:
    """What the prox term pulls towards: the given anchors, or the start."""
    if clients[0].anchor is None:
        return [p.clone() for p in parameters]
    return layout.split(_rows([client.anchor for client in clients if client.anchor is not None], dtype, device))


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of the chunk's samples, (batch, clients) for images and (clients, batch) for features; weights 1/size, zero where padded."""

    rows: Tensor
    weights: Tensor | float


def _batch(batches: Sequence[Array], expected: Sequence[float], offsets: Array, images: bool, device: Device) -> Batch:
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
        weights = sent(torch.from_numpy(inside / divisors[:, None]), device)
    return Batch(sent(torch.from_numpy(rows.T.copy() if images else rows), device), weights)


def _gradients(way: Way, stack: Stack, parameters: Sequence[Tensor], batch: Batch, options: Options, device: Device) -> list[Tensor]:
    """The gradient of each client's weighted loss at `parameters`, by those that move; float64, of clipped samples, if they are clipped.

    With `pull`, forward gives features as well, which are pulled to the prototypes (clients, classes, e) of their samples' classes.
    """
    if options.clip_norm:
        totals = clipped_sums(way, stack.x, stack.y, parameters, batch, options, device)
        return [totals[i].contiguous() for i in stack.moving]
    leaves = [p.detach().requires_grad_(i in stack.moving) for i, p in enumerate(parameters)]
    clients = len(leaves[0])
    with torch.enable_grad():
        labels = chosen(stack.y, batch.rows.T if way.images else batch.rows)
        inputs, labels = with_views(chosen(stack.x, batch.rows), labels, options.augment, way.images)
        if way.images:
            inputs = side_by_side(inputs)
        with half(device):
            logits = way.forward(inputs, leaves, clients)
        pulled: Tensor | float = 0.0
        if stack.prototypes is not None:
            logits, features = logits
            places = torch.arange(clients, device=labels.device).unsqueeze(1)
            pulled = options.pull * to_prototypes(features.to(stack.x.dtype), stack.prototypes[places, labels])
        losses = loss_of(options.loss, logits.to(stack.x.dtype).flatten(0, 1), labels.flatten(), "none")
        losses = losses.view(clients, -1, views_in(options.augment)).mean(2) + pulled
        loss = (losses * batch.weights).sum() if isinstance(batch.weights, Tensor) else losses.sum() * batch.weights
        # the fused update walks parameter, gradient and velocity in one order, so all must be contiguous
        made = torch.autograd.grad(loss, [leaves[i] for i in stack.moving], allow_unused=True, materialize_grads=True)
        slopes = [slope.detach() for slope in made]  # zeros of earlier releases of torch require gradients
        return [gradient.contiguous() for gradient in slopes]
