"""Choose the fastest method for a model and a chunk of clients, from measurements."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.func import functional_call

from ..errors import InputError
from ..types import Array
from . import native
from .clipped_sums import LARGEST_BLOCK, losses_in_blocks, steady
from .convolutions import side_by_side
from .device import Device, sent
from .graphs import HOLD, steps_by_plan
from .layers import Stacked
from .memory import chunk_budget, client_bytes
from .models import Model, build_module, dtype_of, findings_of, operations_of
from .own_modules import in_mode
from .sgd import Forward, Layout, Local, Options, Way, gradients_stacked, steps_by_batch, train_stacked
from .span import Movement, span_chunk_size, train_span

__all__ = ["chunk_size", "gradients", "in_turns", "is_network", "losses_apart", "may_span", "stacked_form", "train"]

# vmap computes some operations one client after the other, such as those of an LSTM; the scores and gradients are the same
warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented the batching rule")

T = TypeVar("T")
FEWEST_FOR_VMAP = 4
"""Below this many clients torch's vmap is slower than the loop."""
STACKED_PARAMETERS = 700_000
"""A chunk has about this many parameters in all: more, and a step is spent waiting for memory."""
FEWEST_STACKED = 2
MOST_STACKED = 64
"""A chunk has at most so many clients: of tiny networks more gain little (2410 parameters: 16, 64 and 256 take 1.45, 1 and 0.91)."""
MOST_STACKED_IMAGES = 16
"""The same of convolutional networks. Beyond it they gain nothing, and take twice the memory (1138 parameters, images of 3 · 64 · 64)."""
LARGEST_IMAGE_NETWORK = 2_000_000
"""Beyond this many parameters a convolutional network's loop is as quick by itself (FEMNIST CNN, ResNet-9)."""
LARGEST_ON_CUDA = 1024
"""Clients of a chunk on a CUDA device, where there is memory for them. Chunks of up to 1000 were measured."""
MOST_IN_TURN = 256
"""Clients of a chunk that a CUDA device trains at once. While it does, the host makes the batches of the next ones and takes the results of
the last. A client of LeNet-5 takes the device as long among 100 as among 1000."""


def chunk_size(model: Model, batch: int, samples: int, options: Options, device: Device) -> int:
    """How many clients to stack: enough to share the overhead of a step, few enough that a chunk's tensors stay in the caches.

    On a CUDA device, as many as there is memory for. A `batch` of 0 is the whole of the samples, at once and once (a gradient).
    """
    plain = replace(options, lr=0.0, pull=0.0)  # neither takes memory, and one estimate serves all rates
    if device.kind == "cuda" and (way := _way(model, FEWEST_FOR_VMAP, plain, device)) is not None:
        needed = client_bytes(way, model.shape, dtype_of(model.dtype), plain, batch or samples, samples)
        return max(1, min(LARGEST_ON_CUDA, chunk_budget() // needed))
    if batch >= samples and is_network(model):
        return span_chunk_size(samples, model.layout[0][1][0])
    if model.dimension >= STACKED_PARAMETERS // FEWEST_STACKED:  # whatever the model is, and a trial would take 20 times its memory
        return FEWEST_STACKED
    stacked = stacked_form(model)
    most = MOST_STACKED_IMAGES if stacked is not None and stacked.images else MOST_STACKED
    return max(FEWEST_STACKED, min(most, STACKED_PARAMETERS // model.dimension))


def stands_alone(model: Model, batch: int, samples: int, options: Options, device: Device) -> bool:
    """Whether a client's update has the same bits beside any other clients: the kernel trains them one by one."""
    return device.kind == "cpu" and device.native and 0 < batch < samples and native.serves(model, options)


def in_turns(clients: Sequence[T], device: Device) -> Iterator[Sequence[T]]:
    """A chunk's clients as they are trained one lot after the other: all at once on the CPU."""
    lots = -(-len(clients) // MOST_IN_TURN) if device.kind == "cuda" else 1
    size = -(-len(clients) // max(1, lots)) or 1
    return (clients[at : at + size] for at in range(0, len(clients), size))


def train(
    model: Model, clients: Sequence[Local], options: Options, epochs: int, device: Device
) -> tuple[Callable[[], Sequence[Array | Movement]] | None, str]:
    """Begin to train. What gives the clients' movements (d,) when it is called, and the way taken; None where the plain loop is the way.

    Raises `InputError` for a precision that the training cannot have.
    """
    _check_precision(model, options, device)
    if device.kind == "cpu" and _spans(model, clients, options):
        spans = train_span(model, clients, epochs, options)
        return lambda: spans, "span"
    if device.kind == "cpu" and device.native and native.serves(model, options):
        moved = native.train(model, clients, options)
        return lambda: moved, "native"
    way = _way(model, len(clients), options, device)
    if way is None:
        return None, "sequential"
    if device.kind == "cpu":
        return train_stacked(way, clients, options, device, steps_by_batch), way.name
    return train_stacked(way, clients, options, device, steps_by_plan, HOLD), way.name


def gradients(model: Model, clients: Sequence[Local], options: Options, device: Device) -> tuple[list[Array] | None, str]:
    """Each client's gradient of its one batch, clipped as `options` say, and the way taken; None where the plain loop is the way.

    Raises `InputError` for a precision where clipping would not hold.
    """
    if options.clip_norm:
        _check_precision(model, options, device)
        if device.kind == "cpu" and device.native and native.serves(model, options):
            return native.gradients(model, clients, options), "native"
    way = _way(model, len(clients), options, device)
    if way is None:
        return None, "sequential"
    return gradients_stacked(way, clients, options, device), way.name


def losses_apart(model: Model, vector: Array, x: Tensor, y: Tensor, device: Device) -> Tensor | None:
    """The loss (n,) of each of the samples x, y on the device, with the same bits beside any others; None where the loop is the way."""
    way = _way(model, 1, Options(0.0, clip_norm=1.0, loss=model.loss, block=LARGEST_BLOCK), device)
    if way is None:
        return None
    return losses_in_blocks(way, x, y, sent(torch.tensor(vector, dtype=x.dtype), device), model.loss)


def _check_precision(model: Model, options: Options, device: Device) -> None:
    if device.precision != "full" and (options.clip_norm or model.dtype == "float64"):
        why = f"training.clip_norm = {options.clip_norm}, which would not hold" if options.clip_norm else "model.dtype = 'float64'"
        raise InputError(f"run.precision = {device.precision!r} with {why}; use 'full'")


def _spans(model: Model, clients: Sequence[Local], options: Options) -> bool:
    """Whether the span form is exact and cheaper: one hidden layer, full batches, fewer samples than inputs."""
    width = math.prod(model.shape)
    # Poisson batches, even if full by chance, are of another number and divided by another size
    full = all(
        client.correction is None and not client.expected and len(client.y) < width and all(len(b) == len(client.y) for b in client.batches)
        for client in clients
    )  # fmt: skip
    return full and _spannable(model, options)


def may_span(model: Model, samples: int, batch: int, options: Options) -> bool:
    """Whether a client of so many samples may be trained in their span, without its update ever being formed."""
    return (batch or samples) >= samples and samples < math.prod(model.shape) and _spannable(model, options)


def _spannable(model: Model, options: Options) -> bool:
    plain = options.optimizer == "sgd" and not (options.maml_lr or options.clip_norm or options.pull or options.augment)
    return plain and not any(options.frozen) and is_network(model)


def is_network(model: Model) -> bool:
    """Whether the module is Linear, ReLU, Linear with biases on all features, and learns classes."""
    if model.loss != "cross_entropy" or stacked_form(model) is None:
        return False
    layers = [operation for operation in operations_of(model) or () if operation.kind != "flatten"]
    in_order = [place for layer in layers for place in layer.parameters] == [0, 1, 2, 3]
    return [layer.kind for layer in layers] == ["linear", "relu", "linear"] and in_order


def _way(model: Model, clients: int, options: Options, device: Device) -> Way | None:
    """How to train some clients at once; None where the plain loop is the way."""
    way = _forward(model, clients, device, alone=options.clip_norm > 0)
    if way is None or (options.clip_norm and (way.name != "stacked" or any(options.frozen))):
        return None
    if options.clip_norm and not steady(model, way, clients, options.block, device, options.augment):
        return None
    if options.pull:
        stacked = stacked_form(model)
        if stacked is None or not stacked.ends_linear:
            return None
        features: Any = stacked.with_features
        return replace(way, forward=features)
    return way


def _forward(model: Model, clients: int, device: Device, alone: bool = False) -> Way | None:
    """How to compute forward for some clients at once; `alone`: it pays for one client, too."""
    if clients < 2 and device.kind == "cpu" and not alone:
        return None
    shapes = tuple(shape for _, shape, _ in model.layout)
    stacked = stacked_form(model)
    if stacked is not None:
        if stacked.images and device.kind == "cpu" and not alone and model.dimension > LARGEST_IMAGE_NETWORK:
            return None
        return Way(stacked.forward, stacked.images, Layout(shapes, stacked.transposed), "stacked")
    if clients >= FEWEST_FOR_VMAP and (mapped := _vmapped(model)) is not None:
        return Way(mapped, False, Layout(shapes, (False,) * len(shapes)), "vmap")
    return None


@lru_cache(maxsize=32)
def stacked_form(model: Model) -> Stacked | None:
    """The stacked form, if it agrees with the module on a trial: two clients with random parameters and inputs."""
    operations = operations_of(model)
    if operations is None:
        return None
    stacked, x = Stacked(operations), _samples(model)
    inputs = side_by_side(x.transpose(0, 1)) if stacked.images else x

    def forward(parameters: Sequence[Tensor]) -> Tensor:
        turned = [p.transpose(1, 2) if turn else p for p, turn in zip(parameters, stacked.transposed, strict=True)]
        return stacked.forward(inputs, turned, 2)

    return stacked if _agrees(model, x, forward) else None


@lru_cache(maxsize=32)
def _vmapped(model: Model) -> Forward | None:
    """The module under vmap, if torch can, it agrees on the trial, and no sample's output depends on the others of its batch."""
    module = in_mode(build_module(model), True)  # so that what draws at random fails the trial
    names = [name for name, _, _ in model.layout]

    @cache
    def buffers(kind: str) -> dict[str, Tensor]:  # sent once: a captured step takes nothing from the host
        return {name: sent(buffer, Device(kind)) for name, buffer in module.named_buffers()}

    def one(parameters: Sequence[Tensor], x: Tensor) -> Any:
        return functional_call(module, buffers(x.device.type) | dict(zip(names, parameters, strict=True)), (x,))

    def forward(x: Tensor, parameters: Sequence[Tensor], clients: int) -> Tensor:
        in_mode(module, True)
        return torch.vmap(one)(list(parameters), x)  # type: ignore[no-any-return]

    x = _samples(model)
    if findings_of(model).mixes or not _agrees(model, x, lambda parameters: forward(x, parameters, 2)):
        return None
    with torch.no_grad():  # where samples mix (BatchNorm), what pads a shorter batch would have a part in it
        parameters = _parameters(model)
        whole, fewer = forward(x, parameters, 2), forward(x[:, :2], parameters, 2)
    return forward if torch.allclose(whole[:, :2], fewer, rtol=1e-4, atol=1e-5) else None


def _parameters(model: Model) -> list[Tensor]:
    """Random parameters of two clients."""
    generator, dtype = torch.Generator().manual_seed(0), dtype_of(model.dtype)
    return [0.1 * torch.randn((2, *shape), generator=generator, dtype=dtype) for _, shape, _ in model.layout]


def _samples(model: Model) -> Tensor:
    """Three random samples of each of two clients."""
    return torch.rand((2, 3, *model.shape), generator=torch.Generator().manual_seed(1), dtype=dtype_of(model.dtype))


def _agrees(model: Model, x: Tensor, computed: Callable[[Sequence[Tensor]], Tensor]) -> bool:
    """Whether `computed` of two clients' parameters has the scores, and gradients, of the module itself."""
    module, parameters = build_module(model), [parameter.requires_grad_() for parameter in _parameters(model)]
    names = [name for name, _, _ in model.layout]
    try:
        with torch.enable_grad():
            ours = computed(parameters)
            theirs = torch.stack([
                functional_call(module, {name: p[i] for name, p in zip(names, parameters, strict=True)}, (x[i],)) for i in range(2)
            ])  # fmt: skip
            if ours.shape != theirs.shape:
                return False
            weights = torch.rand(ours.shape, generator=torch.Generator().manual_seed(2), dtype=ours.dtype)
            slopes = [
                torch.autograd.grad((scores * weights).sum(), parameters, allow_unused=True, materialize_grads=True)
                for scores in (ours, theirs)
            ]
    except Exception:  # the plain loop shows what is wrong, if anything is
        return False
    pairs = [(ours.detach(), theirs.detach()), *zip(*slopes, strict=True)]
    return all(bool(torch.allclose(a, b, rtol=1e-4, atol=1e-5 * max(1.0, float(b.abs().max())) if b.numel() else 0.0)) for a, b in pairs)
