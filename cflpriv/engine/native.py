"""Local SGD by the compiled kernel `native.cpp`: one client at a time, layer by layer, for networks of layers that it knows.

The library is built with the package where there is a C++ compiler (`setup.py`); without it, or on a processor without AVX2, training
stays with torch. The kernel serves a model and its options if two steps of training agree with torch's (`_agrees`). All that it reads and
writes is checked here: shapes, types, contiguity, batches and labels.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..types import Array
from .compiled import KernelSettings, library
from .layers import flattened, stack_layers
from .losses import loss_of
from .models import Model, build_module, dtype_of
from .own_modules import slopes
from .sgd import Local, Options
from .step_noise import keys_of, normals

__all__ = ["Shape", "described", "gradients", "outputs", "serves", "train"]

KINDS: dict[type[nn.Module], int] = {
    nn.Linear: 0, nn.Conv2d: 1, nn.MaxPool2d: 2, nn.ReLU: 3, nn.Tanh: 4, nn.Sigmoid: 5, nn.Flatten: 6,
}  # fmt: skip
"""What `native.cpp` calls the layers."""
PASS = 32
"""Samples in one pass forward."""
TRIAL_RATE = 0.1
"""Of the trial's steps, whatever the rate of the training: the kernel takes the rate as a number."""


@dataclass(frozen=True)
class Shape:
    """A layer as `native.cpp` has it: sizes of its input and output, kernel, stride and padding by side."""

    kind: int
    channels: int
    height: int
    width: int
    out: int
    out_height: int = 1
    out_width: int = 1
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    bias: bool = False
    relu: bool = False

    def numbers(self) -> list[int]:
        return [number for part in astuple(self) for number in (part if isinstance(part, tuple) else (int(part),))]


def serves(model: Model, options: Options) -> bool:
    """Whether the kernel trains this model with these options."""
    if library() is None or options.optimizer != "sgd" or options.maml_lr or options.pull or options.augment:
        return False
    if model.loss != "cross_entropy" or (options.clip_norm and any(options.frozen)) or (options.grid and not options.clip_norm):
        return False
    if described(model) is None:
        return False
    return _agrees(model, replace(options, lr=TRIAL_RATE, grid=0.0, deviation=0.0, block=0))


@lru_cache(maxsize=32)
def described(model: Model) -> tuple[Shape, ...] | None:
    """The layers of a model; None if the kernel lacks one of them, or would be slower than torch.

    It is slower where a convolution's gradient is not mostly zero. So each convolution has a max-pool behind it, with at most a ReLU
    between the two. A ReLU before or behind a pool is part of the pool: the largest of what it leaves is what it leaves of the largest.
    """
    module = build_module(model)
    layers = [layer for layer in flattened(module) or () if type(layer) is not nn.Identity]
    if not layers or type(layers[-1]) is not nn.Linear or stack_layers(module) is None:
        return None
    images = len(model.shape) == 3 and type(layers[0]) is nn.Conv2d
    if not images and len(model.shape) > 1 and type(layers[0]) is not nn.Flatten:
        return None
    sides = model.shape if images else (math.prod(model.shape), 1, 1)
    shapes: list[Shape] = []
    for layer, before, after in zip(layers, [None, *layers], [*layers[1:], None], strict=False):
        if type(layer) is nn.ReLU and nn.MaxPool2d in (type(before), type(after)):
            continue
        if type(layer) is nn.Flatten and not images:
            continue  # rows already
        follows = bool(shapes) and shapes[-1].kind == KINDS[nn.Conv2d]
        if (
            type(layer) not in KINDS
            or follows != (type(layer) is nn.MaxPool2d)
            or (type(layer) in (nn.Linear, nn.Conv2d) and images != (type(layer) is nn.Conv2d))
        ):
            return None
        shape = _shape(KINDS[type(layer)], layer, *sides)
        if shape is None:
            return None
        if type(layer) is nn.MaxPool2d:
            shape = replace(shape, relu=nn.ReLU in (type(before), type(after)))
        images = images and type(layer) is not nn.Flatten
        sides = (shape.out, shape.out_height, shape.out_width)
        shapes.append(shape)
    return tuple(shapes) if _parameters(shapes) == [shape for _, shape, _ in model.layout] and _all_wide(shapes) else None


def _parameters(shapes: Sequence[Shape]) -> list[tuple[int, ...]]:
    """The parameters' shapes that the layers have by their settings. A weight may have been replaced by another."""
    made: list[tuple[int, ...]] = []
    for shape in shapes:
        if shape.kind in (KINDS[nn.Linear], KINDS[nn.Conv2d]):
            made.append((shape.out, shape.channels, *(shape.kernel if shape.kind == KINDS[nn.Conv2d] else ())))
            made += [(shape.out,)] if shape.bias else []
    return made


def _all_wide(shapes: Sequence[Shape]) -> bool:
    """Whether every layer has inputs and outputs."""
    return all(min(shape.channels, shape.height, shape.width, shape.out) > 0 for shape in shapes)


def _shape(kind: int, layer: nn.Module, channels: int, height: int, width: int) -> Shape | None:
    if isinstance(layer, nn.Linear):
        if layer.in_features != channels:
            return None
        return Shape(kind, channels, 1, 1, layer.out_features, bias=layer.bias is not None)
    if isinstance(layer, nn.Flatten):
        return Shape(kind, channels, height, width, channels * height * width)
    if not isinstance(layer, nn.Conv2d | nn.MaxPool2d):
        return Shape(kind, channels, height, width, channels, height, width)
    pairs = [pair for name in ("kernel_size", "stride", "padding", "dilation") if (pair := _pair(getattr(layer, name))) is not None]
    if len(pairs) < 4:
        return None
    size, stride, padding, dilation = pairs
    tall, wide = (
        (side + 2 * more - kernel) // step + 1 for side, more, kernel, step in zip((height, width), padding, size, stride, strict=True)
    )
    if dilation != (1, 1) or min(tall, wide) < 1:
        return None
    if isinstance(layer, nn.MaxPool2d):
        return Shape(kind, channels, height, width, channels, tall, wide, size, stride, padding)
    if layer.in_channels != channels:
        return None
    return Shape(kind, channels, height, width, layer.out_channels, tall, wide, size, stride, padding, layer.bias is not None)


def _pair(sides: Any) -> tuple[int, int] | None:
    """A setting of a layer for both sides; None for a form that torch reads in a way of its own."""
    each = tuple(int(side) for side in sides) if isinstance(sides, tuple | list) else (int(sides), int(sides))
    return (each[0], each[1]) if len(each) == 2 else None


def train(model: Model, clients: Sequence[Local], options: Options) -> list[Array]:
    """The movements of the clients' parameters (d,), in order.

    Raises `IndexError` for a batch with a number that no sample has, or a label that is no class, and `ValueError` for arrays of another
    shape or type than the model's.
    """
    corrected = any(client.correction is not None for client in clients)
    work = [_Arrays.of(model, client, options.prox != 0, corrected) for client in clients]
    frozen = np.array(options.frozen or [False] * len(model.layout), dtype=np.uint8)
    moved = []
    longest = max(1, *(arrays.longest for arrays in work))
    with _network(model, options, longest, options.prox != 0, corrected) as call:
        for client, arrays in zip(clients, work, strict=True):
            call("begin", arrays.start.ctypes.data, *arrays.vectors, frozen.ctypes.data)
            if options.deviation:
                keys = keys_of([client.noise_key])
                for at in range(len(client.batches)):
                    noise = normals(keys, torch.tensor([at]), model.dimension, options.deviation)[0].numpy()
                    call("steps", *arrays.samples, at, at + 1, client.expected, noise.ctypes.data)
            else:
                call("steps", *arrays.samples, 0, len(client.batches), client.expected, None)
            vector = np.empty_like(arrays.start)
            call("end", vector.ctypes.data)
            moved.append(vector - arrays.start)
    return moved


def gradients(model: Model, clients: Sequence[Local], options: Options) -> list[Array]:
    """The sum (d,) float64 of clipped gradients of each client's one batch, at its start, divided as in training.

    Raises as `train` does.
    """
    work = [_Arrays.of(model, client, False, False) for client in clients]
    frozen, made = np.zeros(len(model.layout), dtype=np.uint8), []
    longest = max(1, *(arrays.longest for arrays in work))
    with _network(model, options, longest, False, False) as call:
        for client, arrays in zip(clients, work, strict=True):
            total = np.empty(model.dimension)
            call("begin", arrays.start.ctypes.data, *arrays.vectors, frozen.ctypes.data)
            call("clipped_sum", *arrays.samples[:3], int(arrays.ends[0]), client.expected, total.ctypes.data)
            made.append(total)
    return made


def outputs(model: Model, vectors: Sequence[Array], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Each client's outputs (n, classes), of its parameters (d,) and normalised samples (n, *shape). Raises `ValueError` as `train`."""
    frozen = np.zeros(len(model.layout), dtype=np.uint8)
    made = []
    with _network(model, Options(0.0), PASS, False, False) as call:
        for vector, x in zip(vectors, inputs, strict=True):
            start, samples = _vector(model, "model", vector), _samples(model, x, len(x))
            scores = torch.empty(len(x), model.classes, dtype=samples.dtype)
            call("begin", start.ctypes.data, None, None, frozen.ctypes.data)
            call("outputs", samples.data_ptr(), len(samples), PASS, scores.data_ptr())
            made.append(scores)
    return made


def _samples(model: Model, x: Tensor, count: int) -> Tensor:
    dtype = dtype_of(model.dtype)
    if x.dtype != dtype or x.device.type != "cpu" or x.shape != (count, *model.shape):
        raise ValueError(f"samples of shape {tuple(x.shape)} and {x.dtype}, expected ({count}, *{model.shape}) and {dtype}")
    return x.contiguous()


@contextmanager
def _network(model: Model, options: Options, longest: int, anchored: bool, corrected: bool) -> Iterator[Callable[..., None]]:
    """While inside, a network for batches of up to `longest` samples in the library's memory. What is given calls a function by name."""
    kernel, shapes = library(), described(model)
    assert kernel is not None
    assert shapes is not None
    settings = KernelSettings(
        options.lr, options.momentum, options.weight_decay, options.prox, options.clip_norm, options.grid, anchored, corrected
    )  # fmt: skip
    numbers = np.array([shape.numbers() for shape in shapes], dtype=np.int64)
    network = getattr(kernel, f"create_{model.dtype}")(numbers.ctypes.data, len(shapes), longest, settings)
    if network is None:
        raise MemoryError(f"training on batches of {longest} samples")
    try:
        yield lambda name, *arguments: getattr(kernel, f"{name}_{model.dtype}")(network, *arguments)
    finally:
        getattr(kernel, f"destroy_{model.dtype}")(network)


@dataclass(frozen=True, eq=False)
class _Arrays:
    """What the kernel reads of a client, checked."""

    x: Tensor
    y: Tensor
    rows: Array
    ends: Array
    start: Array
    anchor: Array | None
    correction: Array | None
    longest: int

    @classmethod
    def of(cls, model: Model, client: Local, anchored: bool, corrected: bool) -> "_Arrays":
        y = client.y.contiguous()
        x = _samples(model, client.x, len(y))
        if y.dtype != torch.int64 or y.device.type != "cpu" or y.dim() != 1:
            raise ValueError(f"labels of shape {tuple(y.shape)} and {y.dtype}, expected one axis and torch.int64")
        lengths = [len(batch) for batch in client.batches]
        rows = np.ascontiguousarray(np.concatenate([*client.batches, np.zeros(0, np.int64)]), dtype=np.int64)
        if rows.size and not 0 <= rows.min() <= rows.max() < len(y):
            raise IndexError(f"a batch has sample {rows.min() if rows.min() < 0 else rows.max()} of {len(y)}")
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < model.classes:
            raise IndexError(f"labels from {int(y.min())} to {int(y.max())}, expected 0 to {model.classes - 1}")
        start = _vector(model, "start", client.start)
        anchor = _vector(model, "anchor", start if client.anchor is None else client.anchor) if anchored else None
        correction = None
        if corrected:
            if client.correction is None:
                raise ValueError("one client has a correction and another has none")
            correction = _vector(model, "correction", client.correction)
        return cls(x, y, rows, np.cumsum(lengths, dtype=np.int64), start, anchor, correction, max(lengths, default=0))

    @property
    def samples(self) -> tuple[int, int, int, int]:
        return self.x.data_ptr(), self.y.data_ptr(), self.rows.ctypes.data, self.ends.ctypes.data

    @property
    def vectors(self) -> tuple[int | None, int | None]:
        return tuple(None if vector is None else vector.ctypes.data for vector in (self.anchor, self.correction))  # type: ignore[return-value]


def _vector(model: Model, name: str, values: Array, dtype: str = "") -> Array:
    vector = np.ascontiguousarray(values, dtype=dtype or model.dtype)
    if vector.shape != (model.dimension,):
        raise ValueError(f"{name}: shape {vector.shape}, expected ({model.dimension},)")
    return vector


@lru_cache(maxsize=256)
def _agrees(model: Model, options: Options) -> bool:
    """Whether two steps of a made-up client, on batches of five and three samples, move parameters as torch does.

    Two steps, because what a step leaves in weights and velocities shows in the next one. The client has an anchor and a correction.
    Where a hidden unit or the largest value of a pool is within rounding of another branch, the two differ and neither is wrong, so
    three clients are tried and one has to agree.
    """
    return any(_tried(model, options, seed) for seed in range(3))


def _tried(model: Model, options: Options, seed: int) -> bool:
    generator = np.random.default_rng(seed)
    x = torch.from_numpy(generator.random((8, *model.shape))).to(dtype_of(model.dtype))
    y = torch.from_numpy(generator.integers(model.classes, size=8))
    widths = np.concatenate([np.full(math.prod(shape), max(1, math.prod(shape[1:]))) for _, shape, _ in model.layout])
    start, anchor, correction = (
        (generator.standard_normal(model.dimension) / np.sqrt(widths)).astype(model.dtype) * np.asarray(scale, model.dtype)
        for scale in (1.0, 1.0, 0.1)
    )
    client = Local(x, y, [np.array([6, 0, 3, 1, 7]), np.array([2, 5, 4])], start, anchor, correction)
    ours, theirs = train(model, [client], options)[0], _by_torch(model, client, options)
    most = (1e-4 if model.dtype == "float32" else 1e-11) * float(np.abs(theirs).max(initial=0.0))
    return bool(np.abs(ours - theirs).max(initial=0.0) <= most)


def _by_torch(model: Model, client: Local, options: Options) -> Array:
    """The movement (d,) of a client by torch, one step after the other."""
    module, kind = build_module(model), dtype_of(model.dtype)

    def pieces(vector: Array) -> list[Tensor]:
        whole = torch.tensor(vector, dtype=kind)
        return [whole[at : at + math.prod(shape)].view(shape) for _, shape, at in model.layout]

    assert client.anchor is not None
    assert client.correction is not None
    parameters, anchors, corrections = pieces(client.start), pieces(client.anchor), pieces(client.correction)
    velocities = [torch.zeros_like(parameter) for parameter in parameters]
    for batch in client.batches:
        leaves = [parameter.detach().requires_grad_() for parameter in parameters]
        named = {name: leaf for (name, _, _), leaf in zip(model.layout, leaves, strict=True)}

        def of(rows: Array, leaves: list[Tensor] = leaves, named: dict[str, Tensor] = named) -> list[Tensor]:
            with torch.enable_grad():
                return slopes(loss_of(model.loss, functional_call(module, named, (client.x[rows],)), client.y[rows]), leaves)

        if options.clip_norm:
            alone = [of(np.array([row])) for row in batch]
            norms = [torch.cat([gradient.reshape(-1) for gradient in own]).norm() for own in alone]
            factors = [options.clip_norm / norm.clamp_min(options.clip_norm) / len(batch) for norm in norms]
            made = [torch.stack([own[i] * factor for own, factor in zip(alone, factors, strict=True)]).sum(0) for i in range(len(leaves))]
        else:
            made = of(batch)
        for i, gradient in enumerate(made):
            if options.frozen and options.frozen[i]:
                continue
            pull = options.weight_decay * parameters[i] + options.prox * (parameters[i] - anchors[i]) + corrections[i]
            velocities[i].mul_(options.momentum).add_(gradient + pull)
            parameters[i].sub_(velocities[i], alpha=options.lr)
    return torch.cat([parameter.reshape(-1) for parameter in parameters]).numpy() - client.start
