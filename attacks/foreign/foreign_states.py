"""States of other systems' models: checked arrays by name, a torch module as a `Model` of the suite, and the head's bias.

A state is what a client was sent or returned: a `state_dict`, a mapping of arrays, a list of arrays in the order of `state_dict()` (as
Flower's NumPyClient has them), or Flower `Parameters`. It has two parts here. Parameters are trained. Running statistics of normalisation
layers (batch normalisation) are averages over the client's batches; they are kept apart, since no gradient moved them, and are evidence of
their own. All other entries (`num_batches_tracked`, constant buffers) are ignored.

The suite's mathematics takes models whose parameters are one vector and whose buffers do not move. `ForeignModel` gives a module in such
forms: with batch statistics, as in training, and with statistics that are entries of the vector, as in evaluation.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _NormBase

from ...array_files import read_npy
from ...engine.models import Model, build_module
from ...errors import InputError
from ...types import Array, check_array

__all__ = [
    "ForeignModel",
    "ReadState",
    "ModelState",
    "batch_statistics",
    "flat",
    "head_bias",
    "named_arrays",
    "read_samples",
    "read_state",
    "statistics_of",
    "vector_of",
]

ModelState = Any
"""A `state_dict`, a mapping of name to array, a sequence of arrays, or an object with `tensors` (Flower `Parameters`)."""
STATISTICS = ("running_mean", "running_var")
COUNTER = "num_batches_tracked"
MOST_NAMED = 12
"""Layers that an error lists."""


@dataclass(frozen=True, eq=False)
class ReadState:
    """A checked state by name: parameters, in the memory that they came in, and running statistics, float64."""

    parameters: Mapping[str, Array]
    statistics: Mapping[str, Array]


# --- modules ------------------------------------------------------------------------------------------------------------------------


class _Normalised(nn.Module):
    """A normalisation layer with running statistics, in a form without a moving buffer.

    `entries`: the statistics are entries of the parameter vector. Else they are constants where `fixed` (mean, variance) is given, and
    those of the batch (of each sample, for instance normalisation) where it is not. `seen`, unless None, are then what running ones would
    get of the last batch: mean and unbiased variance, (channels,) each.
    """

    def __init__(self, like: _NormBase, entries: bool, fixed: tuple[Array, Array] | None = None) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = like.weight, like.bias, like.eps
        self.by_sample = isinstance(like, nn.modules.instancenorm._InstanceNorm)
        mean, variance = fixed or (np.zeros(like.num_features), np.ones(like.num_features))
        self.is_given = entries or fixed is not None
        self.seen: list[torch.Tensor] | None = None
        if entries:
            self.running_mean, self.running_var = (nn.Parameter(torch.tensor(x, dtype=torch.float32)) for x in (mean, variance))
        elif fixed is not None:
            self.register_buffer("running_mean", torch.tensor(mean))
            self.register_buffer("running_var", torch.tensor(variance))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = (1, -1, *([1] * (x.dim() - 2)))
        if self.is_given:
            mean, variance = self.running_mean.view(wide), self.running_var.view(wide)
        else:  # plain operations: differentiated twice, and batched, without a rule of their own
            axes = tuple(range(2, x.dim())) if self.by_sample else (0, *range(2, x.dim()))
            mean, variance = x.mean(axes, keepdim=True), x.var(axes, unbiased=False, keepdim=True)
            count = x.numel() // mean.numel()
            if self.seen is not None:
                self.seen = [mean.mean(0).flatten(), variance.mean(0).flatten() * (count / max(count - 1, 1))]
        made = (x - mean) * (variance + self.eps).rsqrt()
        return made if self.weight is None else made * self.weight.view(wide) + self.bias.view(wide)


@dataclass(frozen=True, eq=False)
class ForeignModel:
    """A user's module for samples of `shape` with `classes` outputs. It is a copy on the CPU, of which only constant buffers are used.

    The suite's samples u, mostly in [0, 1], are low + (high − low) u for the module; with `words` they are whole numbers, as they are.
    """

    module: nn.Module
    shape: tuple[int, ...]
    classes: int
    low: float = 0.0
    high: float = 1.0
    words: bool = False

    @cached_property
    def norms(self) -> dict[str, float | None]:
        """Layers with running statistics in the order of the module -> their momentum."""
        return {name: layer.momentum for name, layer in self.module.named_modules() if _is_tracking(layer)}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters' shapes by name, in the order of the state_dict."""
        return {name: tuple(parameter.shape) for name, parameter in self.module.named_parameters()}

    @cached_property
    def statistics(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the running statistics by name."""
        kept = dict(self.module.named_buffers())
        names = [f"{layer}.{end}".removeprefix(".") for layer in self.norms for end in STATISTICS]
        return {name: tuple(kept[name].shape) for name in names}

    @property
    def has_dropout(self) -> bool:
        """Whether local training draws random numbers that nobody else knows."""
        return any(isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0 for layer in self.module.modules())

    @cached_property
    def in_training(self) -> Model:
        """Normalisation by the statistics of the batch, as a module in training mode does it."""
        return self._form(lambda name, layer: _Normalised(layer, entries=False))

    @cached_property
    def evaluated(self) -> Model:
        """Normalisation by running statistics, which are entries of the parameter vector."""
        return self._form(lambda name, layer: _Normalised(layer, entries=True))

    def frozen(self, statistics: Mapping[str, Array]) -> Model:
        """Normalisation by constants, as in a module that trains in evaluation mode."""
        return self._form(
            lambda name, layer: _Normalised(layer, False, tuple(statistics[f"{name}.{end}"] for end in STATISTICS))  # type: ignore[arg-type]
        )

    def _form(self, replaced: Callable[[str, _NormBase], nn.Module]) -> Model:
        made = deepcopy(self.module)
        for name, layer in list(made.named_modules()):
            if _is_tracking(layer):
                parent, _, last = name.rpartition(".")
                setattr(made.get_submodule(parent), last, replaced(name, layer))
        if self.words:
            made.register_forward_pre_hook(_as_words)
        size = self.high - self.low
        return Model(
            "of another system", self.shape, self.classes, mean=(-self.low / size,), std=(1 / size,), factory=lambda: deepcopy(made)
        )


def _is_tracking(layer: nn.Module) -> bool:
    return isinstance(layer, _NormBase) and layer.running_mean is not None


def _as_words(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (args[0].long(),)


def vector_of(model: Model, state: ReadState, statistics: Mapping[str, Array] | None = None) -> Array:
    """The parameter vector (d,) of a state in the model's order, float64; `statistics` in place of the state's own."""
    values = {**state.statistics, **(statistics or {}), **state.parameters}
    return flat(values, [name for name, _, _ in model.layout])


def flat(parts: Mapping[str, Array], names: Iterable[str] | None = None) -> Array:
    """Arrays by name as one vector (d,) float64: those of `names` in this order, by default all in theirs."""
    return np.concatenate([np.asarray(parts[name], np.float64).reshape(-1) for name in (parts if names is None else names)])


def batch_statistics(model: ForeignModel, before: ReadState, after: ReadState, steps: int | None) -> dict[str, Array]:
    """The mean statistics of a client's batches by name: what its `steps` must have added to the running ones.

    Running statistics after k steps are (1 − m)^k times those before and the batches' for the rest, m the layer's momentum. Where k or m is
    not known, or a variance would come out negative, the layer's statistics are those after training. Empty where states have none.
    """
    statistics: dict[str, Array] = {}
    for layer, momentum in model.norms.items():
        names = [f"{layer}.{end}" for end in STATISTICS]
        if not all(name in state.statistics for name in names for state in (before, after)):
            return {}
        kept = 0.0 if momentum is None or steps is None else (1 - momentum) ** steps
        made = [(after.statistics[name] - kept * before.statistics[name]) / (1 - kept) for name in names]
        statistics |= dict(zip(names, made if made[1].min() > 0 else [after.statistics[name] for name in names], strict=True))
    return statistics


def statistics_of(model: ForeignModel) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(parameters (r, d), images (r, n, *shape)) -> the statistics (r, k) of these batches in all layers, differentiable in the images.

    In the order of `model.statistics`, float64.
    """
    form = replace(model.in_training, dtype="float64")
    module = deepcopy(build_module(form)).train(False)
    layers = [layer for layer in module.modules() if isinstance(layer, _Normalised)]
    for layer in layers:
        layer.seen = []

    def of_one(vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        parameters = {name: vector[at : at + int(np.prod(shape))].reshape(shape) for name, shape, at in form.layout}
        functional_call(module, parameters, (model.low + (model.high - model.low) * x,))
        return torch.cat([seen for layer in layers for seen in layer.seen or ()])

    return vmap(of_one)


# --- reading ------------------------------------------------------------------------------------------------------------------------


def read_state(state: ModelState, model: ForeignModel | None, where: str) -> ReadState:
    """A state's parameters and running statistics. `where` begins the message of an error: the client and whether before or after.

    Without a `model` only mappings are taken, and statistics are known by their names. Raises `InputError` naming the array that is
    missing, unknown, of a wrong shape or dtype, or not finite.
    """
    arrays = named_arrays(state, model, where)
    if model is None:
        kept = {name: array for name, array in arrays.items() if name.rpartition(".")[2] != COUNTER}
        shapes = {name: tuple(np.shape(array)) for name, array in kept.items()}
        statistics = {name: shape for name, shape in shapes.items() if name.rpartition(".")[2] in STATISTICS}
        parameters = {name: shape for name, shape in shapes.items() if name not in statistics}
    else:
        parameters, statistics = model.shapes, model.statistics
        known = {*parameters, *model.module.state_dict()}
        if unknown := [name for name in arrays if name not in known]:
            raise InputError(f"{where}: has {unknown[0]!r}, which the model's state_dict() has not")
        if missing := [name for name in parameters if name not in arrays]:
            raise InputError(f"{where}: has no {missing[0]!r}, which the model's state_dict() has")
    return ReadState(
        {name: _checked(arrays[name], shape, f"{where}: {name!r}") for name, shape in parameters.items()},
        {
            name: np.asarray(_checked(arrays[name], shape, f"{where}: {name!r}"), np.float64)
            for name, shape in statistics.items() if name in arrays
        },
    )  # fmt: skip


def named_arrays(state: ModelState, model: ForeignModel | None, where: str) -> dict[str, Array]:
    """A state's arrays by name, as they are. Raises `InputError` for what is no state, or a list that no model names."""
    if isinstance(state, Mapping):
        return {str(name): _as_array(value, f"{where}: {name!r}") for name, value in state.items()}
    if hasattr(state, "tensors"):  # Flower's Parameters: each array as numpy's own file format
        try:
            state = [read_npy(BytesIO(packed), len(packed)) for packed in state.tensors]
        except (ValueError, TypeError, MemoryError) as error:
            raise InputError(f"{where}: cannot be read as Flower Parameters of numpy arrays ({error})") from None
    if not isinstance(state, Sequence) or isinstance(state, str | bytes):
        raise InputError(f"{where}: expected a state_dict, a list of arrays or Flower Parameters, got {type(state).__name__}")
    if model is None:
        raise InputError(f"{where}: arrays have no names; give a mapping, or the model whose state_dict() names them")
    entries, parameters = list(model.module.state_dict()), list(model.shapes)
    names = next((names for names in (entries, parameters) if len(names) == len(state)), None)
    if names is None:
        raise InputError(
            f"{where}: has {len(state)} arrays, but the model's state_dict() has {len(entries)} ({len(parameters)} of them parameters)"
        )
    return {name: _as_array(value, f"{where}: {name!r}") for name, value in zip(names, state, strict=True)}


def _as_array(value: Any, where: str) -> Array:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return np.asarray((value.float() if value.dtype == torch.bfloat16 else value).numpy())
    try:
        array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    except ValueError as error:  # a list of rows of unequal lengths
        raise InputError(f"{where}: expected an array, got {type(value).__name__} ({error})") from None
    if array.dtype == object:
        raise InputError(f"{where}: expected an array, got {type(value).__name__}")
    return array


def _checked(value: Array, shape: tuple[int, ...], where: str) -> Array:
    if value.shape != shape:
        raise InputError(f"{where}: has shape {value.shape}, expected {shape}")
    return check_array(where, value)


def read_samples(pair: Any, where: str, shape: tuple[int, ...] | None = None, classes: int | None = None) -> tuple[Array, Array]:
    """Samples x (n, *shape) and labels y (n,), int64 below `classes`. Raises `InputError` naming what is wrong, after `where`."""
    try:
        x, y = pair
    except (TypeError, ValueError):
        raise InputError(f"{where}: expected a pair of samples and labels, got {type(pair).__name__}") from None
    x = check_array(f"{where}: x", _as_array(x, f"{where}: x"), kind="fiu")
    y = check_array(f"{where}: y", _as_array(y, f"{where}: y"), ndim=1, kind="iu").astype(np.int64)
    if x.ndim < 2 or not len(x) or len(x) != len(y):
        raise InputError(f"{where}: x has shape {x.shape} and y {y.shape}; expected (n, *shape) and (n,), n of at least 1")
    if shape is not None and x.shape[1:] != shape:
        raise InputError(f"{where}: x has samples of shape {x.shape[1:]}, expected {shape}")
    if int(y.min()) < 0 or (classes is not None and int(y.max()) >= classes):
        raise InputError(f"{where}: y has {int(y.min() if y.min() < 0 else y.max())}; labels are 0 to {(classes or 1 << 20) - 1}")
    return x, y


# --- the head -----------------------------------------------------------------------------------------------------------------------


def head_bias(shapes: Mapping[str, tuple[int, ...]], classes: int, head: str | None = None, ordered: bool = True) -> str:
    """The name of the head's bias among parameters: that of the last layer with a weight (classes, …) and a bias (classes,).

    `head` names the layer instead. Where names have no order (`ordered` is false), there may be one such layer only. Raises `InputError`
    listing the layers.
    """
    fits = [
        name for name, shape in shapes.items()
        if name.rpartition(".")[2] == "bias" and shape == (classes,)
        and len(weight := shapes.get(name.removesuffix("bias") + "weight", ())) >= 2 and weight[0] == classes
    ]  # fmt: skip
    words = f"a weight ({classes}, …) and a bias ({classes},); parameters end with "
    words += ", ".join([f"{name} {shape}" for name, shape in shapes.items()][-MOST_NAMED:])
    if head is not None:
        name = f"{head}.bias".removeprefix(".")
        if name not in fits:
            raise InputError(f"head {head!r}: is no layer with {words}")
        return name
    if not fits:
        raise InputError(f"no layer has {words}")
    if len(fits) > 1 and not ordered:
        layers = ", ".join(name.removesuffix(".bias") for name in fits)
        raise InputError(f"layers {layers} may each be the head; name one as head")
    return fits[-1]
