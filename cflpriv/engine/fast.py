"""Which way is fastest for a model and a chunk of clients, decided from measurements."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..models import Model, build_module, dtype_of
from ..types import Array
from .layers import Stacked, stack_layers
from .sgd import Forward, Layout, Local, Options, gradients_stacked, train_stacked
from .span import Movement, span_chunk_size, train_span

__all__ = ["chunk_size", "gradients", "train"]

FEWEST_FOR_VMAP = 4
"""Below this many clients torch's vmap is slower than the loop."""
STACKED_PARAMETERS = 700_000
"""A chunk has about this many parameters in all: more, and a step is spent waiting for memory."""
LARGEST_IMAGE_NETWORK = 2_000_000
"""Beyond this many parameters a convolutional network's loop is as quick by itself (FEMNIST CNN, ResNet-9)."""


def chunk_size(model: Model, batch: int, samples: int) -> int:
    """How many clients to stack: enough to share the overhead of a step, few enough that a chunk's tensors stay in the caches."""
    if _network(model) is not None and batch >= samples:
        return span_chunk_size(samples, model.hidden)
    return max(2, min(16, STACKED_PARAMETERS // model.dimension))


def train(
    model: Model, clients: Sequence[Local], options: Options, epochs: int, device: str
) -> tuple[Sequence[Array | Movement] | None, str]:
    """The clients' movements (d,) and the way taken; None where the plain loop is the way."""
    if device == "cpu" and _spans(model, clients, options):
        hidden, width = model.layout[0][1]
        return train_span(hidden, width, clients, epochs, options), "span"
    way = _forward(model, len(clients), device, alone=options.clip_norm > 0)
    if way is None or (options.clip_norm and (way.name != "stacked" or any(options.frozen))):
        return None, "sequential"
    if options.pull:
        stacked = _stacked(model)
        if stacked is None or not stacked.ends_linear:
            return None, "sequential"
        features: Any = stacked.with_features
        return train_stacked(features, way.images, way.layout, clients, options, device), "stacked"
    return train_stacked(way.forward, way.images, way.layout, clients, options, device), way.name


def gradients(model: Model, clients: Sequence[Local], device: str) -> tuple[list[Array] | None, str]:
    """Each client's full-batch gradient and the way taken; None where the plain loop is the way."""
    way = _forward(model, len(clients), device)
    if way is None:
        return None, "sequential"
    return gradients_stacked(way.forward, way.images, way.layout, clients, device), way.name


def _spans(model: Model, clients: Sequence[Local], options: Options) -> bool:
    """Whether the span form is exact and cheaper: one hidden layer, full batches, fewer samples than inputs."""
    if options.maml_lr or options.clip_norm or options.pull or any(options.frozen) or _network(model) is None:
        return False
    width = int(torch.tensor(model.shape).prod())
    return all(one.correction is None and len(one.y) < width and all(len(b) == len(one.y) for b in one.batches) for one in clients)


def _network(model: Model) -> nn.Sequential | None:
    """The module, if it is Flatten, Linear, ReLU, Linear with biases."""
    module = build_module(model)
    if not isinstance(module, nn.Sequential) or [type(layer) for layer in module] != [nn.Flatten, nn.Linear, nn.ReLU, nn.Linear]:
        return None
    return module if all(layer.bias is not None for layer in (module[1], module[3])) else None


@dataclass(frozen=True, eq=False)
class _Way:
    """A forward over stacked parameters, the layouts it wants, and its name."""

    forward: Forward
    images: bool
    layout: Layout
    name: str


def _forward(model: Model, clients: int, device: str, alone: bool = False) -> _Way | None:
    """How to compute forward for some clients at once; `alone` says that it pays for one client, too."""
    if clients < 2 and device == "cpu" and not alone:
        return None
    shapes = tuple(shape for _, shape, _ in model.layout)
    stacked = _stacked(model)
    if stacked is not None:
        if stacked.images and device == "cpu" and not alone and model.dimension > LARGEST_IMAGE_NETWORK:
            return None
        return _Way(stacked.forward, stacked.images, Layout(shapes, stacked.transposed), "stacked")
    if clients >= FEWEST_FOR_VMAP and (mapped := _vmapped(model)) is not None:
        return _Way(mapped, False, Layout(shapes, (False,) * len(shapes)), "vmap")
    return None


@lru_cache(maxsize=32)
def _stacked(model: Model) -> Stacked | None:
    """The stacked form, if it agrees with the module on a trial: two clients with random parameters and inputs, in float64."""
    module = build_module(model)
    stacked = stack_layers(module)
    if stacked is None:
        return None
    parameters, x = _trial(model)
    inputs = x.transpose(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last) if stacked.images else x
    turned = [p.transpose(1, 2) if turn else p for p, turn in zip(parameters, stacked.transposed, strict=True)]
    return stacked if _agrees(model, parameters, x, lambda: stacked.forward(inputs, turned, 2)) else None


@lru_cache(maxsize=32)
def _vmapped(model: Model) -> Forward | None:
    """The module under vmap, if torch can and it agrees on the trial."""
    module = build_module(model).train()  # so that what draws at random fails the trial
    names = [name for name, _, _ in model.layout]

    def one(parameters: Sequence[Tensor], x: Tensor) -> Any:
        return functional_call(module, dict(zip(names, parameters, strict=True)), (x,))

    def forward(x: Tensor, parameters: Sequence[Tensor], clients: int) -> Tensor:
        module.train()
        return torch.vmap(one)(list(parameters), x)  # type: ignore[no-any-return]

    parameters, x = _trial(model)
    return forward if _agrees(model, parameters, x, lambda: forward(x, parameters, 2)) else None


def _trial(model: Model) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtype = dtype_of(model.dtype)
    parameters = [0.1 * torch.randn((2, *shape), generator=generator, dtype=dtype) for _, shape, _ in model.layout]
    return parameters, torch.rand((2, 3, *model.shape), generator=generator, dtype=dtype)


def _agrees(model: Model, parameters: Sequence[Tensor], x: Tensor, computed: Any) -> bool:
    module = build_module(model)
    names = [name for name, _, _ in model.layout]
    try:
        ours = computed()
        with torch.no_grad():
            theirs = torch.stack([
                functional_call(module, {name: p[i] for name, p in zip(names, parameters, strict=True)}, (x[i],)) for i in range(2)
            ])  # fmt: skip
    except (RuntimeError, ValueError, IndexError, NotImplementedError):
        return False
    return ours.shape == theirs.shape and bool(torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5))
