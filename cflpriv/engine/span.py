"""Full-batch gradient descent on a one-hidden-layer ReLU network in the span of its samples: exact, without forming the big matrix.

Let X̃ be the samples with a constant 1 appended, W̃ = (W₁ | b₁). With H = X̃ W̃ᵀ and δ = ∂L/∂H the gradient of W̃ is δᵀX̃, so W̃ stays of the
form  c·S + e·R + AᵀX̃  with the start S, the anchor R of a prox term, and A (n × h). Then

    H = c·(X̃ Sᵀ) + e·(X̃ Rᵀ) + (X̃ X̃ᵀ) A,

a step costs n·n·h instead of n·d·h, and momentum, weight decay and the prox term are linear in (A, c, e). X̃ X̃ᵀ is computed once a client,
X̃ Sᵀ in one product for all clients that start from the same model. Pays where n < d.
"""

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch
from torch import Tensor

from ..types import Array
from .sgd import Local, Options

__all__ = ["Movement", "span_chunk_size", "train_span"]

_KERNELS: WeakKeyDictionary[object, tuple[Hashable, Tensor, Callable[[], object]]] = WeakKeyDictionary()
_KERNEL_BYTES = 1 << 29
"""Kernels are kept with their client's data up to this much in all, each with how its model scales inputs and what lets its bytes go."""
_kept_bytes = 0


def span_chunk_size(samples: int, hidden: int) -> int:
    """Clients at once: a few megabytes of activations, so that the passes over them stay in the caches."""
    return max(1, (1 << 21) // (4 * samples * max(samples, hidden)))


def train_span(hidden: int, width: int, clients: Sequence[Local], steps: int, options: Options) -> list["Movement"]:
    """The movements of the clients, in order. Parameters lie as W₁ (h, d_in), b₁ (h), W₂ (k, h), b₂ (k); every batch is full."""
    dtype = clients[0].x.dtype
    count, longest = len(clients), max(len(client.y) for client in clients)
    inverse = torch.zeros(count, 1, longest, dtype=dtype)
    x, y = torch.zeros(count, longest, width, dtype=dtype), torch.zeros(count, 1, longest, dtype=torch.int64)
    kernel = torch.zeros(count, longest, longest, dtype=dtype)
    for i, client in enumerate(clients):
        n = len(client.y)
        x[i, :n], y[i, 0, :n], inverse[i, 0, :n] = client.x.flatten(1), client.y, 1.0 / n
        kernel[i, :n, :n] = _kernel(client)
    start = _projected(x, [client.start for client in clients], hidden, width)
    cut = hidden * width
    w2, b2 = _head([client.start for client in clients], cut + hidden, hidden, dtype)
    w2_start, b2_start = w2.clone(), b2.clone()
    anchored = options.prox != 0.0 and clients[0].anchor is not None
    anchor, w2_anchor, b2_anchor = None, w2_start, b2_start
    if anchored:
        anchors = [client.anchor for client in clients if client.anchor is not None]
        anchor = _projected(x, anchors, hidden, width)
        w2_anchor, b2_anchor = _head(anchors, cut + hidden, hidden, dtype)
    pull = options.weight_decay + options.prox
    towards_start, towards_anchor = (0.0, options.prox) if anchored else (options.prox, 0.0)
    a = torch.zeros(count, longest, hidden, dtype=dtype)
    a_velocity, w2_velocity, b2_velocity = torch.zeros_like(a), torch.zeros_like(w2), torch.zeros_like(b2)
    c, c_velocity, e, e_velocity = 1.0, 0.0, 0.0, 0.0
    for _ in range(steps):
        before = torch.baddbmm(start, kernel, a, beta=c)  # H
        if anchor is not None:
            before.add_(anchor, alpha=e)
        after = torch.relu(before)
        # classes before samples, (C, k, n): products with few columns take three to four times as long
        error = torch.softmax(torch.baddbmm(b2, w2, after.transpose(1, 2)), dim=1)
        error.scatter_add_(1, y, torch.full_like(inverse, -1.0)).mul_(inverse)  # ∂L/∂logits of the mean loss; padding has weight 0
        delta = torch.ops.aten.threshold_backward(torch.bmm(error.transpose(1, 2), w2), before, 0)  # ∂L/∂H
        w2_gradient, b2_gradient = torch.bmm(error, after), error.sum(2, keepdim=True)
        if pull:
            delta.add_(a, alpha=pull)
            w2_gradient += pull * w2 - options.prox * w2_anchor
            b2_gradient += pull * b2 - options.prox * b2_anchor
        c_velocity = options.momentum * c_velocity + pull * c - towards_start
        e_velocity = options.momentum * e_velocity + pull * e - towards_anchor
        c, e = c - options.lr * c_velocity, e - options.lr * e_velocity
        for value, velocity, gradient in ((a, a_velocity, delta), (w2, w2_velocity, w2_gradient), (b2, b2_velocity, b2_gradient)):
            value.sub_(velocity.mul_(options.momentum).add_(gradient) if options.momentum else gradient, alpha=options.lr)
    tails = torch.cat([a.sum(1), (w2 - w2_start).flatten(1), (b2 - b2_start).flatten(1)], dim=1).numpy()
    return [
        Movement(
            a[i, : len(client.y)].clone(), tails[i], width, c - 1.0, e, client.start, client.anchor if anchored else None,
            client.model, client.owner,
        )
        for i, client in enumerate(clients)
    ]  # fmt: skip


class Movement:
    """A client's update in span form; `numpy.asarray` makes the vector (d,) from it and the client's own samples.

    Keeping n·h numbers instead of d·h is what lets thousands of clients take part in memory. `tail` holds the movements of b₁, W₂, b₂;
    `model` (`engine.Model`) makes its inputs of the client's `data`. Not a dataclass: messages would have its fields, not the vector.
    """

    __slots__ = ("__weakref__", "a", "anchor", "data", "model", "more_anchor", "more_start", "start", "tail", "width")

    def __init__(
        self, a: Tensor, tail: Array, width: int, more_start: float, more_anchor: float, start: Array, anchor: Array | None, model: Any,
        data: Any,
    ) -> None:  # fmt: skip
        self.a, self.tail, self.width, self.more_start, self.more_anchor = a, tail, width, more_start, more_anchor
        self.start, self.anchor, self.model, self.data = start, anchor, model, data

    @property
    def shape(self) -> tuple[int, ...]:
        return self.start.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.start.dtype

    @property
    def nbytes(self) -> int:
        return int(self.start.nbytes)

    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.a).all()) and bool(np.isfinite(self.tail).all())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        vector = np.empty_like(self.start)
        hidden = self.a.shape[1]
        cut = hidden * self.width
        torch.mm(self.a.T, self.model.inputs(self.data.x_train).flatten(1), out=torch.from_numpy(vector[:cut]).view(hidden, self.width))
        vector[cut:] = self.tail
        bent = slice(0, cut + hidden)  # W₁ and b₁: weight decay and prox scale their start and pull them to the anchor
        if self.more_start:
            vector[bent] += self.more_start * self.start[bent]
        if self.more_anchor and self.anchor is not None:
            vector[bent] += self.more_anchor * self.anchor[bent]
        return vector if dtype is None else vector.astype(dtype, copy=False)

    def scaled(self, factor: float) -> "Movement":
        """The movement times a factor."""
        moved = self.more_start * factor, self.more_anchor * factor
        return Movement(self.a * factor, self.tail * factor, self.width, *moved, self.start, self.anchor, self.model, self.data)

    def __reduce__(self) -> tuple[Any, ...]:
        """Everything but the data, which whoever asked for the update has at hand."""
        parts = self.a, self.tail, self.width, self.more_start, self.more_anchor, self.start, self.anchor, self.model
        return Movement, (*parts, None)

    def bound(self, data: Any) -> "Movement":
        """The same, with the client's data."""
        other = copy(self)
        other.data = data
        return other


def _kernel(client: Local) -> Tensor:
    """X̃ X̃ᵀ, kept with the client's data while there is room."""
    if client.owner is None or client.model is None:
        return _made_kernel(client)
    scaling = client.model.mean, client.model.std, client.model.dtype
    known = _KERNELS.get(client.owner)
    if known is not None and known[0] == scaling:
        return known[1]
    kernel = _made_kernel(client)
    if (old := _KERNELS.pop(client.owner, None)) is not None:
        old[2]()
    if _kept_bytes + kernel.nbytes <= _KERNEL_BYTES:
        _keep_bytes(kernel.nbytes)
        letting_go = finalize(client.owner, _keep_bytes, -kernel.nbytes)
        letting_go.atexit = False
        _KERNELS[client.owner] = scaling, kernel, letting_go
    return kernel


def _keep_bytes(more: int) -> None:
    """Count bytes of kernels that are kept, or no longer."""
    global _kept_bytes
    _kept_bytes += more


def _made_kernel(client: Local) -> Tensor:
    x = client.x.flatten(1)
    return x @ x.T + 1.0


def _projected(x: Tensor, vectors: Sequence[Array], hidden: int, width: int) -> Tensor:
    """X̃ W̃ᵀ for each client's model, (C, n, h); one product where all have the same."""
    cut = hidden * width
    if all(vector is vectors[0] for vector in vectors):
        whole = torch.tensor(vectors[0][: cut + hidden], dtype=x.dtype)
        return torch.addmm(whole[cut:], x.flatten(0, 1), whole[:cut].view(hidden, width).T).view(len(x), -1, hidden)
    stack = torch.from_numpy(np.stack([vector[: cut + hidden] for vector in vectors])).to(x.dtype)
    return torch.baddbmm(stack[:, None, cut:], x, stack[:, :cut].reshape(-1, hidden, width).transpose(1, 2))


def _head(vectors: Sequence[Array], at: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """W₂ (C, k, h) and b₂ (C, k, 1)."""
    stack = torch.from_numpy(np.stack([vector[at:] for vector in vectors])).to(dtype)
    classes = stack.shape[1] // (hidden + 1)
    return stack[:, : hidden * classes].reshape(-1, classes, hidden).contiguous(), stack[:, hidden * classes :, None].clone()
