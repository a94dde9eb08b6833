"""A module as a list of operations, found by `torch.fx`: what the stacked form (`layers`) and the compiled kernel (`native`) are made of.

A module whose forward pass has other operations than these, or depends on values, modes or draws, has no list and is computed by torch.
"""

import math
import operator
import random
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from .convolutions import Form
from .own_modules import EngineHook, in_mode, seeded

__all__ = ["Kind", "Operation", "copies_nothing", "traced", "unchanged"]

Kind = Literal["linear", "convolution", "group_norm", "max_pool", "average_pool", "relu", "tanh", "sigmoid", "flatten", "add"]


@dataclass(frozen=True)
class Operation:
    """An operation on samples. `inputs` are numbers of values: 0 is the module's input, k the result of operation k − 1.

    `shape` is a sample's result. `parameters` are places among the module's parameters: weight, then bias if there is one. `form` is that
    of convolutions and pools; `groups` and `eps` are GroupNorm's.
    """

    kind: Kind
    inputs: tuple[int, ...]
    shape: tuple[int, ...]
    parameters: tuple[int, ...] = ()
    form: Form | None = None
    groups: int = 0
    eps: float = 0.0


class _Refused(Exception):
    """The module has an operation that is not known here."""


LAYERS: dict[type[nn.Module], Kind | None] = {
    nn.Linear: "linear", nn.Conv2d: "convolution", nn.GroupNorm: "group_norm", nn.MaxPool2d: "max_pool", nn.AvgPool2d: "average_pool",
    nn.AdaptiveAvgPool2d: "average_pool", nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid", nn.Flatten: "flatten", nn.Identity: None,
}  # fmt: skip
"""Layers by their exact class."""
FUNCTIONS: dict[Any, Callable[..., nn.Module]] = {
    functional.max_pool2d: nn.MaxPool2d, functional.avg_pool2d: nn.AvgPool2d, functional.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    torch.flatten: lambda start_dim=0, end_dim=-1: nn.Flatten(start_dim, end_dim),
    functional.relu: nn.ReLU, torch.relu: nn.ReLU, functional.relu_: lambda: nn.ReLU(inplace=True),
    functional.tanh: nn.Tanh, torch.tanh: nn.Tanh, functional.sigmoid: nn.Sigmoid, torch.sigmoid: nn.Sigmoid,
}  # fmt: skip
"""Functions of one value, and the layer that each is with its further arguments."""
METHODS: dict[str, Any] = {
    "flatten": torch.flatten, "relu": torch.relu, "relu_": functional.relu_, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "add": torch.add,
    "view": torch.reshape, "reshape": torch.reshape, "mean": torch.mean,
}  # fmt: skip
"""Methods of a value that are functions of the value."""


def unchanged(layer: nn.Module) -> bool:
    """Whether a layer does what its class does."""
    hooks = (*layer._forward_pre_hooks.values(), *layer._forward_hooks.values())
    others = (layer._backward_hooks, layer._backward_pre_hooks)
    return "forward" not in vars(layer) and all(isinstance(hook, EngineHook) for hook in hooks) and not any(others)


def copies_nothing(module: nn.Module) -> bool:
    """Whether a module is made of known layers alone, one after the other, and changes no input in place."""
    layers = list(module.modules())
    return all(
        (type(layer) in LAYERS or type(layer) is nn.Sequential) and unchanged(layer) and not getattr(layer, "inplace", False)
        for layer in layers
    )  # fmt: skip


def traced(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Operation, ...] | None:
    """The operations of a module for samples of `shape`; the last one gives the scores. None if it has another one.

    Each parameter is used by one operation. A ReLU before a max-pool comes behind the pool: the largest of what it leaves is what it
    leaves of the largest. The forward pass runs on a copy, in training and in evaluation mode, and both have to give the same list.
    """
    if not all(unchanged(layer) for layer in module.modules()):
        return None
    lists = []
    for training in (True, False):
        try:
            with seeded(0), torch.set_grad_enabled(training):
                drawn = _generators()
                lists.append(_listed(in_mode(_copied(module), training), shape, dtype))
                if _generators() != drawn:
                    return None
        except Exception:  # a user's forward pass meets stand-ins for tensors, and may raise anything
            return None
    return lists[0] if lists[0] == lists[1] else None


def _generators() -> tuple[Any, ...]:
    """What changes when a forward pass draws."""
    numbers = np.random.get_state(legacy=False)  # noqa: NPY002  # users' modules draw from it
    return bytes(torch.get_rng_state().tolist()), random.getstate(), repr(numbers)


def _copied(module: nn.Module) -> nn.Module:
    """A copy with the same parameters: what a forward pass does to attributes and buffers, it does to the copy's."""
    return deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})


class _Tracer(fx.Tracer):
    """Stops at the layers of torch; any other module's forward pass is followed."""

    proxy_buffer_attributes = True


class _Shapes(fx.Interpreter):
    """Keeps the shape of each value of a graph, for two samples."""

    def run_node(self, node: fx.Node) -> Any:
        made = super().run_node(node)
        node.meta["shape"] = tuple(made.shape) if isinstance(made, Tensor) else None
        return made


def _listed(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Operation, ...]:
    whole = nn.Sequential(module)  # a layer by itself is then a layer, too
    graph = _Tracer().trace(whole)
    with torch.no_grad():
        _Shapes(fx.GraphModule(whole, graph)).run(torch.zeros((2, *shape), dtype=dtype))
    places = {f"0.{name}": place for place, (name, _) in enumerate(module.named_parameters())}
    made = _List(whole, places)
    for node in graph.nodes:
        made.add(node)
    return made.finished()


class _List:
    """The operations so far, of the nodes of a graph in order."""

    def __init__(self, whole: nn.Module, places: dict[str, int]) -> None:
        self.whole, self.places = whole, places
        self.operations: list[Operation] = []
        self.values: dict[fx.Node, int] = {}
        self.sizes: set[fx.Node] = set()
        self.samples: set[fx.Node] = set()  # the number of samples
        self.changed: list[int] = []  # values that are changed in place
        self.result: fx.Node | None = None

    def add(self, node: fx.Node) -> None:
        """Raises `_Refused` for an operation that is not known."""
        if node.op == "placeholder" and not self.values:
            self.values[node] = 0
        elif node.op == "output" and isinstance(node.args[0], fx.Node):
            self.result = node.args[0]
        elif node.op == "call_module":
            (value,) = node.args
            self._layer(node, value, self.whole.get_submodule(str(node.target)), f"{node.target}.")
        elif not self._size(node):
            self._function(node)

    def _size(self, node: fx.Node) -> bool:
        """Whether a node is a size of a value, or the number of samples."""
        if (node.op, node.target) == ("call_method", "size") or node.target is getattr:
            whole = node.args[1:] in ((), ("shape",)) and not node.kwargs
            (self.sizes if whole else self.samples).add(node)
            if not whole and node.args[1:] != (0,):
                raise _Refused
            return True
        if node.target is operator.getitem and node.args[0] in self.sizes and node.args[1] == 0:
            self.samples.add(node)
            return True
        return False

    def _function(self, node: fx.Node) -> None:
        target = METHODS.get(str(node.target)) if node.op == "call_method" else node.target
        value, *more = node.args
        if target in (operator.add, torch.add) and len(more) == 1 and not node.kwargs:
            self._append(node, "add", (value, more[0]))
        elif target is torch.reshape:
            sides = more[0] if len(more) == 1 and isinstance(more[0], tuple | list) else more
            if len(sides) != 2 or not (sides[0] == -1 or sides[0] in self.samples) or not isinstance(sides[1], int):
                raise _Refused
            self._append(node, "flatten", (value,))
        elif target is torch.mean:
            self._mean(node, value, more)
        elif target in FUNCTIONS:
            self._layer(node, value, FUNCTIONS[target](*more, **node.kwargs), "")
        else:
            raise _Refused

    def _mean(self, node: fx.Node, value: Any, more: Sequence[Any]) -> None:
        """Of both sides of images: an average pool, and what it leaves as features."""
        settings = dict(zip(("dim", "keepdim"), more, strict=False)) | node.kwargs
        height, width = self._shape(value)[1:]
        if sorted(side % 4 for side in settings.pop("dim")) != [2, 3]:
            raise _Refused
        keeps = settings.pop("keepdim", False)
        if settings:
            raise _Refused
        self._append(node, "average_pool", (value,), shape=(self._shape(value)[0], 1, 1), form=_window((height, width)))
        if not keeps:
            self._append(node, "flatten", (node,))

    def _layer(self, node: fx.Node, value: Any, layer: nn.Module, name: str) -> None:
        if type(layer) not in LAYERS:
            raise _Refused
        kind = LAYERS[type(layer)]
        if kind is None:
            self.values[node] = self.values[value]
            return
        if getattr(layer, "inplace", False):
            self.changed.append(self.values[value])
        settings = _settings(layer, self._shape(value))
        parameters = []
        for part, size in settings.pop("sizes", {}).items():
            place = self.places[f"{name}{part}"]
            if tuple(layer.get_parameter(part).shape) != size:
                raise _Refused
            parameters.append(place)
        self._append(node, kind, (value,), parameters=tuple(parameters), **settings)

    def _shape(self, value: Any) -> tuple[int, ...]:
        number = self.values[value]
        return self.operations[number - 1].shape if number else tuple(value.meta["shape"][1:])

    def _append(self, node: fx.Node, kind: Kind, values: Sequence[Any], shape: tuple[int, ...] | None = None, **settings: Any) -> None:
        shapes = [self._shape(value) for value in values]
        if shape is None:
            samples, *rest = node.meta["shape"]
            shape = tuple(rest)
            if samples != 2:
                raise _Refused
        expected = {"flatten": (math.prod(shapes[0]),), "add": shapes[-1]}.get(kind, shape)
        if shape != expected or (kind == "add" and shapes[0] != shapes[1]) or 0 in shape:
            raise _Refused
        self.operations.append(Operation(kind, tuple(self.values[value] for value in values), shape, **settings))
        self.values[node] = len(self.operations)

    def finished(self) -> tuple[Operation, ...]:
        used = Counter(place for operation in self.operations for place in operation.parameters)
        if self.result is None or self.values[self.result] != len(self.operations) or used != Counter(self.places.values()):
            raise _Refused
        consumed = Counter(number for operation in self.operations for number in operation.inputs)
        if not all(consumed[number] for number in range(len(self.operations))) or consumed[len(self.operations)]:
            raise _Refused
        views = {number for number, operation in enumerate(self.operations, 1) if operation.kind == "flatten"}
        if any(consumed[number] > 1 or number in views for number in self.changed):  # another operation would read the change
            raise _Refused
        for at, operation in enumerate(self.operations):
            before = operation.inputs[0] - 1
            if operation.kind == "max_pool" and before >= 0 and self.operations[before].kind == "relu" and consumed[before + 1] == 1:
                self.operations[before] = replace(operation, inputs=self.operations[before].inputs)
                self.operations[at] = Operation("relu", (before + 1,), operation.shape)
        return tuple(self.operations)


def _settings(layer: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
    """What an `Operation` needs of a layer, for inputs of `shape`, and the shapes of its parameters, `sizes`."""
    names = {name for name, _ in (*layer.named_parameters(), *layer.named_buffers())}
    if isinstance(layer, nn.Linear) and len(shape) == 1:
        return {"sizes": _sizes(layer.bias, (layer.out_features, layer.in_features))}
    if isinstance(layer, nn.Conv2d) and len(shape) == 3 and layer.groups == 1 and layer.padding_mode == "zeros":
        form = Form(*(_pair(setting) for setting in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)))
        return {"form": form, "sizes": _sizes(layer.bias, (layer.out_channels, layer.in_channels, *form.size))}
    if isinstance(layer, nn.GroupNorm) and len(shape) == 3 and layer.affine and layer.bias is not None:
        return {"groups": layer.num_groups, "eps": layer.eps, "sizes": _sizes(layer.bias, (layer.num_channels,))}
    if isinstance(layer, nn.MaxPool2d) and len(shape) == 3 and not layer.return_indices and not layer.ceil_mode:
        return {"form": Form(*(_pair(setting) for setting in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)))}
    if isinstance(layer, nn.AvgPool2d) and len(shape) == 3 and not layer.ceil_mode and layer.divisor_override is None:
        form = _window(_pair(layer.kernel_size), _pair(layer.stride), _pair(layer.padding))
        if layer.count_include_pad or form.padding == (0, 0):
            return {"form": form}
    if isinstance(layer, nn.AdaptiveAvgPool2d) and len(shape) == 3 and layer.output_size in (1, (1, 1)):
        return {"form": _window(_pair(shape[1:]))}
    if type(layer) is nn.Flatten and layer.start_dim == 1 and layer.end_dim in (-1, len(shape)):
        return {}
    if LAYERS[type(layer)] in ("relu", "tanh", "sigmoid") and not names:
        return {}
    raise _Refused


def _sizes(bias: Tensor | None, weight: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {"weight": weight} if bias is None else {"weight": weight, "bias": weight[:1]}


def _window(size: tuple[int, int], stride: tuple[int, int] | None = None, padding: tuple[int, int] = (0, 0)) -> Form:
    return Form(size, stride or size, padding, (1, 1))


def _pair(sides: Any) -> tuple[int, int]:
    """A setting for both sides."""
    each = tuple(int(side) for side in sides) if isinstance(sides, tuple | list) else (int(sides), int(sides))
    if len(each) != 2:  # torch reads it in a way of its own
        raise _Refused
    return each[0], each[1]
