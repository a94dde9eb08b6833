"""Local SGD by the compiled kernel `native.cpp`: one client at a time, layer by layer, for networks of layers that it knows.

The library is built with the package where there is a C++ compiler (`setup.py`); without it, or on a processor without AVX2, training
stays with torch. The kernel serves a model and its options if it is faster (`_is_faster`) and two steps of training agree with torch's
(`_agrees`). All that it reads and writes is checked here: shapes, types, contiguity, batches and labels.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from ..types import Array
from .compiled import KernelSettings, library
from .convolutions import Form
from .losses import loss_of
from .models import Model, build_module, dtype_of, operations_of
from .own_modules import slopes
from .sgd import Local, Options
from .step_noise import keys_of, normals
from .threads import together

__all__ = ["Shape", "described", "evaluates", "gradients", "outputs", "serves", "train"]

Made = TypeVar("Made")
KINDS = {
    "linear": 0, "convolution": 1, "max_pool": 2, "relu": 3, "tanh": 4, "sigmoid": 5, "flatten": 6, "group_norm": 7, "average_pool": 8,
    "add": 9, "pixels": 10,
}  # fmt: skip
"""What `native.cpp` calls the layers."""
RAW = ("convolution", "flatten")
"""What reads the network's input as the caller has it; other layers of images take a copy with padded pixels."""
NO_FORM = Form((1, 1), (1, 1), (0, 0), (1, 1))
PAIRS, CLIPPED_PAIRS = 1024, 8192
"""Up to so many pairs of channels (input times output) of a dense convolution the kernel trains faster than torch, without and with
clipping. Processor time of torch over that of the kernel, pairs of runs of 4 clients, batches of 10: networks of two or five such
convolutions with GroupNorm of 8 × 16 channels 4.2, 16 × 32 2.3, 32 × 32 1.3, 32 × 64 1.0 to 1.3, 64 × 128 1.0; clipped 2.8 and more.
Measured once afterwards: five other networks within the first bound 1.5 to 2.7 (batches of 32: 1.3 to 1.9), clipped 4.0 to 6.1; two wider
ones, within the second alone, clipped 3.2 and 3.3."""
PASS = 32
"""Samples in one pass forward."""
WIDE = 256
"""Units of a hidden layer, a multiple of the kernel's lanes and blocks."""
WORTH_A_THREAD = 1 << 22
"""Products of samples and parameters: a thread takes a tenth of a millisecond to start, and these products a few."""
TOGETHER = 1 << 23
"""Parameters of all networks that threads have at a time: a network holds its parameters some three times."""
TRIAL_RATE = 0.1
"""Of the trial's steps, whatever the rate of the training: the kernel takes the rate as a number."""


@dataclass(frozen=True)
class Shape:
    """A layer as `native.cpp` has it: sizes of its input and output, kernel, stride and padding by side, and what it takes.

    `inputs` are values: 0 is the network's input, k the output of layer k − 1, −1 none. `places` say where weight and bias begin in the
    vector, −1 for none. `learned` are their places among the parameters. `relu`: a max-pool with a ReLU behind it.
    """

    kind: int
    sides: tuple[int, int, int]
    out: tuple[int, int, int]
    form: Form
    inputs: tuple[int, int]
    places: tuple[int, int] = (-1, -1)
    learned: tuple[int, ...] = ()
    relu: bool = False
    groups: int = 0
    eps: float = 0.0

    def numbers(self) -> list[int]:
        form = (*self.form.size, *self.form.stride, *self.form.padding)
        shape = (self.kind, *self.sides, *self.out, *form, self.places[1] >= 0, self.relu, *self.inputs, *self.places, self.groups)
        return [*map(int, shape), int(np.float64(self.eps).view(np.int64))]


def serves(model: Model, options: Options) -> bool:
    """Whether the kernel trains this model with these options."""
    if library() is None or options.optimizer != "sgd" or options.maml_lr or options.pull or options.augment:
        return False
    if model.loss != "cross_entropy" or (options.clip_norm and any(options.frozen)) or (options.grid and not options.clip_norm):
        return False
    if not _is_faster(model, CLIPPED_PAIRS if options.clip_norm else PAIRS):
        return False
    return _agrees(_narrow(model), replace(options, lr=TRIAL_RATE, grid=0.0, deviation=0.0, block=0))


def _narrow(model: Model) -> Model:
    """The model for a trial, which takes some twenty times its memory: a wide hidden layer has fewer units, and as many in its last lanes
    and blocks."""
    if model.factory is not None or model.hidden < 2 * WIDE:
        return model
    narrow = replace(model, hidden=WIDE + model.hidden % WIDE)
    return narrow if narrow.dimension < model.dimension else model


def evaluates(model: Model) -> bool:
    """Whether the kernel computes outputs of this model, and no slower than torch: each convolution has its max-pool."""
    shapes = described(model) or ()
    return any(shape.kind == KINDS["convolution"] for shape in shapes) and _is_faster(model, 0) and serves(model, Options(0.0))


def _is_faster(model: Model, pairs: int) -> bool:
    """Whether the kernel knows a model, and its dense convolutions have at most so many pairs of channels.

    A convolution is dense if another layer than one max-pool takes its output: its gradient is then mostly not zero.
    """
    shapes = described(model)
    if shapes is None:
        return False
    takers = [[shape.kind for shape in shapes if value in shape.inputs] for value in range(len(shapes) + 1)]
    return all(
        shape.kind != KINDS["convolution"] or followers == [KINDS["max_pool"]] or shape.sides[0] * shape.out[0] <= pairs
        for shape, followers in zip(shapes, takers[1:], strict=True)
    )  # fmt: skip


@lru_cache(maxsize=32)
def described(model: Model) -> tuple[Shape, ...] | None:
    """The layers of a model in the kernel's order: those of images come first. None if the kernel lacks one of them."""
    operations = operations_of(model)
    if operations is None or operations[-1].kind != "linear":
        return None
    if any(operation.form is not None and operation.form.dilation != (1, 1) for operation in operations):
        return None
    images = any(operation.form is not None or operation.groups for operation in operations)
    shapes = [shape if images else (math.prod(shape),) for shape in (model.shape, *(operation.shape for operation in operations))]
    takers = [[operation for operation in operations if value in operation.inputs] for value in range(len(shapes))]
    values, made = {0: 0}, list[Shape]()
    if images and any(taker.kind not in RAW for taker in takers[0]):
        made.append(Shape(KINDS["pixels"], _sides(model.shape), _sides(model.shape), NO_FORM, (0, -1)))
        values[0] = 1
    for at in sorted(range(len(operations)), key=lambda at: images and len(shapes[operations[at].inputs[0]]) < 3):
        operation, given = operations[at], operations[at].inputs
        after_pool = operation.kind == "relu" and given[0] > 0 and operations[given[0] - 1].kind == "max_pool"
        if (after_pool and len(takers[given[0]]) == 1) or (operation.kind == "flatten" and len(shapes[given[0]]) < 3):
            values[at + 1] = values[given[0]]  # a part of the pool; rows already
            continue
        first, second = *(0 if operation.kind in RAW and value == 0 else values[value] for value in given), *[-1] * (2 - len(given))
        weight, bias = *(model.layout[place][2] for place in operation.parameters), *[-1] * (2 - len(operation.parameters))
        relu = operation.kind == "max_pool" and [taker.kind for taker in takers[at + 1]] == ["relu"]
        made.append(Shape(
            KINDS[operation.kind], _sides(shapes[given[0]]), _sides(shapes[at + 1]), operation.form or NO_FORM, (first, second),
            (weight, bias), operation.parameters, relu, operation.groups, operation.eps,
        ))  # fmt: skip
        values[at + 1] = len(made)
    return tuple(made)


def _sides(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """A sample's shape as channels, height and width; features are channels."""
    return (shape[0], shape[1], shape[2]) if len(shape) == 3 else (math.prod(shape), 1, 1)


def train(model: Model, clients: Sequence[Local], options: Options) -> list[Array]:
    """The movements of the clients' parameters (d,), in order.

    Raises `IndexError` for a batch with a number that no sample has, or a label that is no class, and `ValueError` for arrays of another
    shape or type than the model's.
    """
    corrected = any(client.correction is not None for client in clients)
    work = [_Arrays.of(model, client, options.prox != 0, corrected) for client in clients]
    frozen = _frozen(model, options)
    longest = max(1, *(arrays.longest for arrays in work))

    def moved(call: Callable[..., None], client: Local, arrays: "_Arrays") -> Array:
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
        return np.subtract(vector, arrays.start, out=vector)

    network = partial(_network, model, options, longest, options.prox != 0, corrected)
    return _each(network, moved, list(zip(clients, work, strict=True)), model, sum(arrays.rows.size for arrays in work))


def gradients(model: Model, clients: Sequence[Local], options: Options) -> list[Array]:
    """The sum (d,) float64 of clipped gradients of each client's one batch, at its start, divided as in training.

    Raises as `train` does.
    """
    work = [_Arrays.of(model, client, False, False) for client in clients]
    frozen, longest = _frozen(model, Options(0.0)), max(1, *(arrays.longest for arrays in work))

    def clipped_sum(call: Callable[..., None], client: Local, arrays: "_Arrays") -> Array:
        total = np.empty(model.dimension)
        call("begin", arrays.start.ctypes.data, *arrays.vectors, frozen.ctypes.data)
        call("clipped_sum", *arrays.samples[:3], int(arrays.ends[0]), client.expected, total.ctypes.data)
        return total

    network = partial(_network, model, options, longest, False, False)
    return _each(network, clipped_sum, list(zip(clients, work, strict=True)), model, sum(arrays.rows.size for arrays in work))


def outputs(model: Model, vectors: Sequence[Array], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Each client's outputs (n, classes), of its parameters (d,) and normalised samples (n, *shape). Raises `ValueError` as `train`."""
    frozen = _frozen(model, Options(0.0))

    def scores_of(call: Callable[..., None], start: Array, samples: Tensor) -> Tensor:
        scores = torch.empty(len(samples), model.classes, dtype=samples.dtype)
        call("begin", start.ctypes.data, None, None, frozen.ctypes.data)
        call("outputs", samples.data_ptr(), len(samples), PASS, scores.data_ptr())
        return scores

    work = [(_vector(model, "model", vector), _samples(model, x, len(x))) for vector, x in zip(vectors, inputs, strict=True)]
    network = partial(_network, model, Options(0.0), PASS, False, False)
    return _each(network, scores_of, work, model, sum(len(samples) for _, samples in work))


def _each(
    network: Callable[[], AbstractContextManager[Callable[..., None]]], work: Callable[..., Made], clients: Sequence[tuple[Any, Any]],
    model: Model, samples: int,
) -> list[Made]:  # fmt: skip
    """What `work` makes of a network and each client, in order. Where so many samples take long, threads share the clients.

    Each thread has a network of its own, so a large model has fewer threads.
    """
    made: list[Any] = [None] * len(clients)
    waiting = iter(range(len(clients)))  # each thread takes the next client

    def some() -> None:
        with network() as call:
            for place in waiting:
                made[place] = work(call, *clients[place])

    worth = samples * model.dimension >= WORTH_A_THREAD
    together(some, min(len(clients), max(1, TOGETHER // model.dimension)) if worth else 1)
    return made


def _frozen(model: Model, options: Options) -> Array:
    """Of each layer's weight and bias whether it stays as it is."""
    frozen = np.zeros((len(described(model) or ()), 2), dtype=np.uint8)
    for row, shape in zip(frozen, described(model) or (), strict=True):
        for at, place in enumerate(shape.learned):
            row[at] = bool(options.frozen) and options.frozen[place]
    return frozen


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
