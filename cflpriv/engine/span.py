"""Full-batch gradient descent on a one-hidden-layer ReLU network in the span of its samples: exact, without forming the big matrix.

Let X̃ be the samples with a constant 1 appended, W̃ = (W₁ | b₁). With H = X̃ W̃ᵀ and δ = ∂L/∂H the gradient of W̃ is δᵀX̃, so W̃ stays of the
form  c·S + e·R + AᵀX̃  with the start S, the anchor R of a prox term, and A (n × h). Then

    H = c·(X̃ Sᵀ) + e·(X̃ Rᵀ) + (X̃ X̃ᵀ) A,

a step costs n·n·h instead of n·d·h, and momentum, weight decay and the prox term are linear in (A, c, e). X̃ X̃ᵀ is computed once a client.
Pays where n < d. A client that has chosen its start by the losses of several models has X̃ Sᵀ already (`losses`); its local model's outputs
on test data follow from A in the same way (`moved_outputs`).

Products of many samples (`LARGE`) are those of one client at a time, whose numbers stay in the caches.
"""

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch
from torch import Tensor

from ..types import Array, ReadOnlyMemory
from .losses import loss_of
from .seam import Deferred
from .sgd import Local, Options

__all__ = ["Movement", "in_span", "is_large", "losses", "moved_outputs", "span_chunk_size", "train_span"]

_KERNELS: WeakKeyDictionary[object, dict[str, tuple[Hashable, Tensor, Callable[[], object]]]] = WeakKeyDictionary()
_KERNEL_BYTES = 1 << 29
"""Kernels are kept with their client's data up to this much in all, each with how its model scales inputs and what lets its bytes go: of
the training samples ("train"), and of test samples with them ("test")."""
_kept_bytes = 0
_PRODUCTS: WeakKeyDictionary[object, tuple[Hashable, ReadOnlyMemory, Tensor]] = WeakKeyDictionary()
"""By a client's data the products X̃ Sᵀ (n, h) with the model of lowest loss, until it trains. They are kept beside a kernel that is at
least as large."""


LARGE = 3_000_000
"""Multiplications in the products of a client's samples with a first layer, from where on the losses and scores of one client after the
other take less time than those of a chunk: measured with images of 28 · 28 and 8 · 8."""


def is_large(model: Any, data: Any) -> bool:
    """Whether a client with these data is worth a pass of its own."""
    hidden, width = model.layout[0][1]
    return bool(len(data.y_train) * hidden * width >= LARGE)


def span_chunk_size(samples: int, hidden: int) -> int:
    """Clients at once: a few megabytes of activations, so that the passes over them stay in the caches."""
    return max(1, (1 << 21) // (4 * samples * max(samples, hidden)))


def train_span(model: Any, clients: Sequence[Local], steps: int, options: Options) -> list["Movement"]:
    """The movements of the clients, in order. Parameters of `model` (`engine.Model`) lie as W₁ (h, d_in), b₁ (h), W₂ (k, h), b₂ (k); every
    batch is full.
    """
    dtype = clients[0].x.dtype
    count, longest = len(clients), max(len(client.y) for client in clients)
    inverse, y = torch.zeros(count, 1, longest, dtype=dtype), torch.zeros(count, 1, longest, dtype=torch.int64)
    kernel = torch.zeros(count, longest, longest, dtype=dtype)
    for i, client in enumerate(clients):
        n = len(client.y)
        y[i, 0, :n], inverse[i, 0, :n], kernel[i, :n, :n] = client.y, 1.0 / n, _kernel(client)
    layers, starts = _Layers(model, dtype), [client.start for client in clients]
    start = _projected(clients, starts, layers, longest)
    w2_start, b2_start = layers.heads(starts)
    w2, b2 = w2_start.clone(), b2_start.clone()
    anchored = options.prox != 0.0 and clients[0].anchor is not None
    anchor, w2_anchor, b2_anchor = None, w2_start, b2_start
    if anchored:
        anchors = [client.anchor for client in clients if client.anchor is not None]
        anchor = _projected(clients, anchors, layers, longest)
        w2_anchor, b2_anchor = layers.heads(anchors)
    pull = options.weight_decay + options.prox
    towards_start, towards_anchor = (0.0, options.prox) if anchored else (options.prox, 0.0)
    a = torch.zeros(count, longest, layers.hidden, dtype=dtype)
    a_velocity, w2_velocity, b2_velocity = torch.zeros_like(a), torch.zeros_like(w2), torch.zeros_like(b2)
    c, c_velocity, e, e_velocity = 1.0, 0.0, 0.0, 0.0
    for step in range(steps):
        after = torch.baddbmm(start, kernel, a, beta=c) if step else start.clone()  # H; A = 0 and e = 0 at first
        if step and anchor is not None:
            after.add_(anchor, alpha=e)
        after.relu_()
        # classes before samples, (C, k, n): products with few columns take three to four times as long
        error = torch.softmax(torch.baddbmm(b2, w2, after.transpose(1, 2)), dim=1)
        error.scatter_add_(1, y, torch.full_like(inverse, -1.0)).mul_(inverse)  # ∂L/∂logits of the mean loss; padding has weight 0
        delta = torch.bmm(error.transpose(1, 2), w2)
        torch.ops.aten.threshold_backward.grad_input(delta, after, 0, grad_input=delta)  # ∂L/∂H
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
            a[i, : len(client.y)].clone(), tails[i], layers.width, c - 1.0, e, client.start, client.anchor if anchored else None,
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


def losses(
    model: Any, models: Sequence[Sequence[Array]], samples: Sequence[tuple[Tensor, Tensor]], owners: Sequence[Any]
) -> list[list[Array]]:
    """The losses (n,) float64 of each client's `samples` x (n, *shape), y (n,) under each of its models (d,), in their order.

    `model` (`engine.Model`) makes x of the clients' data, its `owners`. The products with the model of lowest mean loss are kept for
    training from it.
    """
    made, layers = list[list[Array]](), _Layers(model, samples[0][0].dtype)
    for own, (x, y), owner in zip(models, samples, owners, strict=True):
        flat = x.flatten(1)
        before = [layers.product(flat, vector) for vector in own]
        w2, b2 = layers.heads(own)
        # classes before samples, as in `train_span`
        scores = torch.baddbmm(b2, w2, torch.stack(before).relu_().transpose(1, 2))
        each = loss_of("cross_entropy", scores, y.expand(len(own), -1), "none").double().numpy()
        means = each.mean(axis=1)
        lowest = int(np.where(np.isnan(means), np.inf, means).argmin())
        _keep_product(owner, _scaling(model), own[lowest], before[lowest])
        made.append(list(each))
    return made


def _keep_product(owner: Any, scaling: Hashable, vector: Array, product: Tensor) -> None:
    """Keep the products of a client's samples with a model for the training that begins there, in place of those with another."""
    _PRODUCTS.pop(owner, None)
    kept, memory = _KERNELS.get(owner, {}).get("train"), ReadOnlyMemory.of(vector)
    if kept is not None and memory is not None and product.nbytes <= kept[1].nbytes:
        _PRODUCTS[owner] = scaling, memory, product


def in_span(vector: Any, data: Any, model: Any) -> bool:
    """Whether a local model of `model` is a start and a `Movement` made of these data, in a form that a checkpoint has as well, and it is
    dear to form.
    """
    moved = vector.second if isinstance(vector, Deferred) else None
    if not isinstance(moved, Movement) or moved.data is not data or model.factory is not None or not is_large(model, data):
        return False
    return moved.model is model or bool(moved.model == model)


def moved_outputs(vectors: Sequence[Deferred], inputs: Sequence[Tensor], split: str) -> list[Tensor]:
    """The outputs (n, classes) of each local model, `in_span`, on inputs (n, *shape): all of its client's `split` samples.

    (X W̃ᵀ) from the start's, the anchor's and A's part, so that the model itself is never formed.
    """
    made = list[Tensor]()
    layers = _Layers(vectors[0].second.model, inputs[0].dtype) if vectors else None
    for vector, x in zip(vectors, inputs, strict=True):
        moved: Movement = vector.second
        assert layers is not None
        flat, start = x.flatten(1), layers.product(x.flatten(1), moved.start)
        after = torch.addmm(start, _test_kernel(moved, flat, split), moved.a, beta=1.0 + moved.more_start)
        if moved.more_anchor and moved.anchor is not None:
            after.add_(layers.product(flat, moved.anchor), alpha=moved.more_anchor)
        w2, b2 = layers.head(moved.start)
        tail = torch.from_numpy(moved.tail)[layers.hidden :]
        w2, b2 = w2 + tail[: w2.numel()].view_as(w2), b2 + tail[w2.numel() :, None]
        made.append(torch.addmm(b2, w2, after.relu_().T).T)
    return made


class _Layers:
    """The layers of networks of the form of `model` as tensors: each vector's once, which the caller keeps meanwhile."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.hidden, self.width = model.layout[0][1]
        self.dtype = dtype
        self._whole: dict[int, Tensor] = {}
        self._heads: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def product(self, x: Tensor, vector: Array) -> Tensor:
        """X̃ W̃ᵀ (n, h) of one client's samples (n, d)."""
        whole, cut = self._of(vector), self.hidden * self.width
        return torch.addmm(whole[cut : cut + self.hidden], x, whole[:cut].view(self.hidden, self.width).T)

    def products(self, x: Tensor, vectors: Sequence[Array]) -> Tensor:
        """The same of all clients, (C, n, h) of x (C, n, d); one product where they have the same vector."""
        if all(vector is vectors[0] for vector in vectors):
            return self.product(x.flatten(0, 1), vectors[0]).view(len(x), -1, self.hidden)
        stack, cut = torch.stack([self._of(vector) for vector in vectors]), self.hidden * self.width
        return torch.baddbmm(stack[:, None, cut : cut + self.hidden], x, stack[:, :cut].view(-1, self.hidden, self.width).transpose(1, 2))

    def head(self, vector: Array) -> tuple[Tensor, Tensor]:
        """W₂ (k, h) and b₂ (k, 1)."""
        rest = self._of(vector)[self.hidden * (self.width + 1) :]
        classes = len(rest) // (self.hidden + 1)
        return rest[: self.hidden * classes].view(classes, self.hidden), rest[self.hidden * classes :, None]

    def heads(self, vectors: Sequence[Array]) -> tuple[Tensor, Tensor]:
        """W₂ (C, k, h) and b₂ (C, k, 1) of several vectors."""
        key = tuple(map(id, vectors))
        if key not in self._heads:
            w2, b2 = zip(*map(self.head, vectors), strict=True)
            self._heads[key] = torch.stack(w2), torch.stack(b2)
        return self._heads[key]

    def _of(self, vector: Array) -> Tensor:
        if id(vector) not in self._whole:
            self._whole[id(vector)] = torch.tensor(vector, dtype=self.dtype)  # a copy, so that every product has the same alignment
        return self._whole[id(vector)]


def _kernel(client: Local) -> Tensor:
    """X̃ X̃ᵀ, kept with the client's data while there is room."""
    x = client.x.flatten(1)
    if client.owner is None or client.model is None:
        return _made_kernel(x, x)
    return _kept_kernel(client.owner, "train", client.model, lambda: _made_kernel(x, x))


def _test_kernel(moved: Movement, x: Tensor, split: str) -> Tensor:
    """X̃ X̃ₜᵀ of inputs (n, d) and the training samples, kept likewise."""
    make = lambda: _made_kernel(x, moved.model.inputs(moved.data.x_train).flatten(1))  # noqa: E731
    return _kept_kernel(moved.data, split, moved.model, make)


def _kept_kernel(owner: Any, split: str, model: Any, make: Callable[[], Tensor]) -> Tensor:
    scaling = _scaling(model)
    kept = _KERNELS.get(owner, {})
    known = kept.get(split)
    if known is not None and known[0] == scaling:
        return known[1]
    kernel = make()
    if (old := kept.pop(split, None)) is not None:
        old[2]()
    if _kept_bytes + kernel.nbytes <= _KERNEL_BYTES:
        _keep_bytes(kernel.nbytes)
        letting_go = finalize(owner, _keep_bytes, -kernel.nbytes)
        letting_go.atexit = False
        _KERNELS.setdefault(owner, {})[split] = scaling, kernel, letting_go
    return kernel


def _scaling(model: Any) -> Hashable:
    """How a model scales its inputs."""
    return model.mean, model.std, model.dtype


def _keep_bytes(more: int) -> None:
    """Count bytes of kernels that are kept, or no longer."""
    global _kept_bytes
    _kept_bytes += more


def _made_kernel(x: Tensor, other: Tensor) -> Tensor:
    return x @ other.T + 1.0


def _projected(clients: Sequence[Local], vectors: Sequence[Array], layers: _Layers, longest: int) -> Tensor:
    """X̃ W̃ᵀ for each client's model, (C, n, h), of no meaning after its samples."""
    if longest * layers.hidden * layers.width < LARGE:
        x = torch.zeros(len(clients), longest, layers.width, dtype=layers.dtype)
        for own, client in zip(x, clients, strict=True):
            own[: len(client.y)] = client.x.flatten(1)
        return layers.products(x, vectors)
    made = torch.zeros(len(clients), longest, layers.hidden, dtype=layers.dtype)
    for i, (client, vector) in enumerate(zip(clients, vectors, strict=True)):
        kept = _kept_product(client, vector)
        made[i, : len(client.y)] = layers.product(client.x.flatten(1), vector) if kept is None else kept
    return made


def _kept_product(client: Local, vector: Array) -> Tensor | None:
    """The products of the client's samples with this model, if they are kept. They are let go."""
    if client.owner is None or client.model is None:
        return None
    kept, memory = _PRODUCTS.pop(client.owner, None), ReadOnlyMemory.of(vector)
    if kept is None or memory is None:
        return None
    return kept[2] if kept[0] == _scaling(client.model) and kept[1].is_of(memory) else None
