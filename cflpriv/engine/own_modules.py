"""A user's module as the engine trains it: what is trained is what has `requires_grad`, and nothing outlasts a pass.

Frozen parameters become buffers of the same names. So `parameters()` are the trained ones in every way of computing, and the frozen ones
are constants that each party makes for itself: they are never part of a vector, and never travel. Hooks give the module a copy of its
input, take the scores out of what a `transformers` classifier returns, and undo what a pass leaves in attributes.
"""

import copy
import math
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..errors import InputError

__all__ = [
    "CONTAINERS", "CopiedInput", "EngineHook", "Restored", "Scores", "constants_digest", "flat", "hooked", "in_mode", "keep_nothing",
    "own_attributes", "prepared", "seeded", "slopes", "trained_shapes", "unfit",
]  # fmt: skip

INTERNAL = frozenset(vars(nn.Module()))
"""Attributes of every module; all others are the user's."""
CONTAINERS = (list, dict, set, deque)


class EngineHook:
    """A hook that the engine adds to a module. It changes no score, so a module with it alone is still made of known layers."""


@dataclass
class CopiedInput(EngineHook):
    """Before a pass: the module gets a copy of its input, so that changes in place do not reach a client's samples.

    `argument` is the keyword by which a `transformers` model takes its input. Word numbers become integers, and those that are `pad` are
    masked (the first word of a text never is). `refusal` is the error for a batch of one sample, if the module takes none.
    """

    argument: str = ""
    pad: int | None = None
    refusal: str = ""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if len(args) != 1 or not isinstance(args[0], Tensor):
            return args, kwargs
        if self.refusal and len(args[0]) == 1:
            raise InputError(self.refusal)
        x = args[0].clone()
        if not self.argument:
            return (x,), kwargs
        if self.argument == "input_ids":
            x = x.long()
            if self.pad is not None:
                first = torch.arange(x.shape[-1], device=x.device) == 0
                kwargs = {"attention_mask": (x.ne(self.pad) | first).long(), **kwargs}
        return (), {self.argument: x, **kwargs}


@dataclass(frozen=True)
class Scores(EngineHook):
    """After a pass: the `logits` of what a `transformers` model returns, and scores in the dtype of the model."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Mapping) and isinstance(output.get("logits"), Tensor):
            output = output["logits"]
        if isinstance(output, Tensor) and output.is_floating_point() and output.dtype != self.dtype:
            return output.to(self.dtype)
        return output


@dataclass
class Restored(EngineHook):
    """Around a pass: attributes are afterwards what they were before, so that nothing of a batch stays in the module.

    `before` is called before the pass and the object itself after it.
    """

    kept: list[tuple[nn.Module, dict[str, Any]]] = field(default_factory=list)

    def before(self, module: nn.Module, args: Any) -> None:
        """Keep the attributes of all layers."""
        self.kept = [(layer, {name: _shallow(value) for name, value in own_attributes(layer).items()}) for layer in module.modules()]

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        for layer, attributes in self.kept:
            for name in own_attributes(layer).keys() - attributes.keys():
                del vars(layer)[name]
            vars(layer).update(attributes)
        self.kept = []


def hooked(module: nn.Module, dtype: torch.dtype) -> CopiedInput:
    """Add the hooks that every user's module needs; the one before a pass.

    A module with a `main_input_name` is a `transformers` model, or wraps one. Raises `InputError` (without the model's name) for a module
    that takes no hooks.
    """
    argument = getattr(module, "main_input_name", "")
    settings: Any = getattr(module, "config", None)
    if isinstance(argument, str) and argument and hasattr(settings, "use_cache"):
        settings.use_cache = False
    copied = CopiedInput(argument if isinstance(argument, str) else "", getattr(settings, "pad_token_id", None))
    try:
        module.register_forward_pre_hook(copied, with_kwargs=True, prepend=True)
        module.register_forward_hook(Scores(dtype))
    except RuntimeError as error:
        raise InputError(f"takes no hooks ({error}); give the module from which it was made") from None
    return copied


def keep_nothing(module: nn.Module) -> None:
    """Undo after each pass what the pass does to attributes."""
    restored = Restored()
    module.register_forward_pre_hook(_Before(restored), prepend=True)
    module.register_forward_hook(restored, always_call=True)


@dataclass(frozen=True)
class _Before(EngineHook):
    restored: Restored

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.restored.before(module, args)


def own_attributes(layer: nn.Module) -> dict[str, Any]:
    """The attributes of a layer that are neither parameters, buffers and layers nor torch's own."""
    return {name: value for name, value in vars(layer).items() if name not in INTERNAL}


def _shallow(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, CONTAINERS) else value


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """While inside, torch, numpy and `random` draw by `key`; their generators are afterwards what they were before."""
    numbers, numpy_numbers = random.getstate(), np.random.get_state()  # noqa: NPY002  # users' modules draw from these
    try:
        random.seed(key)
        np.random.seed(key % 2**32)  # noqa: NPY002
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key)
            yield
    finally:
        random.setstate(numbers)
        np.random.set_state(numpy_numbers)  # noqa: NPY002


def flat(tensor: Tensor) -> Tensor:
    """A tensor (n, *shape) as rows (n, d), also where the shape is () or has no numbers."""
    return tensor.reshape(len(tensor), math.prod(tensor.shape[1:]))


def slopes(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of a loss by parameters; zeros for a parameter that has no influence on it."""
    made = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return [gradient.detach() for gradient in made]  # zeros of earlier releases of torch require gradients


def trained_shapes(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of each parameter that is trained, in the module's order."""
    return [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters() if parameter.requires_grad]


def unfit(module: object) -> str | None:
    """Why a module's parameters cannot be trained and averaged as one vector, if they cannot."""
    if not isinstance(module, nn.Module):
        return f"its factory gives a {type(module).__name__}, not an nn.Module"
    parameters = dict(module.named_parameters())
    if not parameters:
        return "has no parameters"
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.UninitializedParameter):
            return f"parameter {name!r} has no size before a first pass; use layers that know their sizes"
        if parameter.is_complex():
            return (
                f"parameter {name!r} is complex; keep its real and imaginary parts as parameters, and use torch.complex in the forward pass"
            )
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"parameter {name!r} has a hook on its gradient, which not every way of computing runs; put what it does into the loss"
    if not any(parameter.requires_grad for parameter in parameters.values()):
        return f"all parameters are frozen, such as {next(iter(parameters))!r}; at least one must have requires_grad"
    layers: dict[nn.Module, str] = {}
    for name, layer in module.named_modules(remove_duplicate=False):  # torch.func leaves such a layer changed
        if layer in layers and any(parameter.requires_grad for parameter in layer.parameters()):
            return f"layers {layers[layer]!r} and {name!r} are one; give it one name, and call it twice"
        layers.setdefault(layer, name)
        if layer._backward_hooks or layer._backward_pre_hooks:
            return f"layer {name or type(layer).__name__!r} has a backward hook, which not every way of computing runs; remove it"
    return None


def prepared(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module with buffers in place of frozen parameters, floating-point numbers in `dtype`, on the CPU, in contiguous memory.

    Complex buffers keep their imaginary parts. Raises `InputError` (without the model's name) for parameters that share memory or have
    none.
    """
    for layer in module.modules():
        for name, parameter in list(layer._parameters.items()):
            if parameter is not None and not parameter.requires_grad:
                del layer._parameters[name]
                layer.register_buffer(name, parameter.detach())
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise InputError(
                f"{name!r} has no memory (device 'meta'); its factory must make every tensor anew, and keep none between calls"
            )
    complex_dtype = torch.complex128 if dtype == torch.float64 else torch.complex64

    def cast(tensor: Tensor) -> Tensor:
        kind = dtype if tensor.is_floating_point() else complex_dtype if tensor.is_complex() else tensor.dtype
        return tensor.to("cpu", kind)

    module._apply(cast)  # type: ignore[no-untyped-call]
    for parameter in module.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    spans = sorted((parameter.data_ptr(), parameter.nbytes, name) for name, parameter in module.named_parameters() if parameter.numel())
    for (begin, size, name), (following, _, other) in pairwise(spans):
        if following < begin + size:
            raise InputError(f"parameters {name!r} and {other!r} share memory; use one parameter under both names, or a copy")
    return module


def in_mode(module: nn.Module, training: bool) -> nn.Module:
    """The module itself in torch's training or evaluation mode.

    A normalising layer whose weights are frozen stays in evaluation mode: its running statistics are as frozen as its weights. A
    recurrent layer without dropout is always in training mode, since cuDNN gives gradients in no other.
    """
    module.train(training)
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase) and not layer.dropout:
            layer.train()
    if training:
        for layer in module.modules():
            if isinstance(layer, _NormBase) and layer.affine and layer.running_mean is not None and layer._parameters.get("weight") is None:
                layer.eval()
    return module


def constants_digest(module: nn.Module) -> str:
    """A digest of all buffers, which frozen parameters are among: 32 hexadecimal digits, or "" for a module without any."""
    entries = sorted(module.named_buffers(), key=lambda entry: entry[0])
    if not entries:
        return ""
    digest = blake2b(digest_size=16)
    for name, buffer in entries:
        array = buffer.detach().cpu().contiguous()
        digest.update(f"{name} {array.dtype} {tuple(array.shape)} ".encode())
        digest.update(array.reshape(-1).view(torch.uint8).numpy().tobytes() if array.numel() else b"")
    return digest.hexdigest()
