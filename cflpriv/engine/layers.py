"""Modules with a client axis: the operations of a module become one function of stacked parameters.

Two layouts travel through the operations: images of all clients side by side as channels, (batch, clients × channels, height, width),
where a client's convolution is a group (`convolutions`); and flat features, (clients, batch, features), where a linear layer is a batched
matrix product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from .clipping import COLUMNS, ConvolutionRule, GroupNormRule, LinearRule, Rule
from .convolutions import convolved
from .operations import Operation

__all__ = ["Stacked", "Tap", "Taps"]

FEWEST_IN_GROUP = 16
"""GroupNorm with fewer channels in a group, a vector's floats, gets images with their channels first: with channels last, torch 2.13's
backward pass on the CPU ended in a segmentation fault (two channels in a group)."""
SPATIAL = ("convolution", "group_norm", "max_pool", "average_pool")


@dataclass(frozen=True, eq=False)
class Tap:
    """What a layer with parameters saw: its input, its output, and the rule that turns the output's gradient into per-sample gradients."""

    before: Tensor
    after: Tensor
    rule: "Rule"


Taps = list[Tap] | None
"""Where layers with parameters leave a `Tap`, in the order of their parameters; None where none is wanted."""


@dataclass(frozen=True, eq=False)
class Stacked:
    """The operations of a module. `forward` takes parameters stacked over clients, (C, *shape).

    Where `transposed`, a parameter is stacked as (C, *reversed shape): the layout in which a linear layer multiplies its weight, so that
    neither weight nor gradient is copied.
    """

    operations: tuple[Operation, ...]

    @cached_property
    def images(self) -> bool:
        """Whether the input is images side by side."""
        return any(operation.kind in SPATIAL for operation in self.operations)

    @cached_property
    def transposed(self) -> tuple[bool, ...]:
        """By parameter, whether it is a linear layer's weight."""
        weights = {operation.parameters[0] for operation in self.operations if operation.kind == "linear"}
        return tuple(place in weights for place in range(sum(len(operation.parameters) for operation in self.operations)))

    @property
    def ends_linear(self) -> bool:
        """Whether the last layer is linear, so that there are features (clients, batch, e) before it."""
        return self.operations[-1].kind == "linear"

    @cached_property
    def _last_uses(self) -> tuple[tuple[int, ...], ...]:
        """By operation, the values that no later one takes."""
        last = {number: at for at, operation in enumerate(self.operations) for number in operation.inputs}
        return tuple(
            tuple(number for number in set(operation.inputs) if last[number] == at) for at, operation in enumerate(self.operations)
        )

    def forward(self, x: Tensor, parameters: Sequence[Tensor], clients: int, taps: Taps = None) -> Tensor:
        """Outputs (clients, batch, classes). `taps` collects what book-keeping needs of the layers."""
        return self.with_features(x, parameters, clients, taps)[0]

    def with_features(self, x: Tensor, parameters: Sequence[Tensor], clients: int, taps: Taps = None) -> tuple[Tensor, Tensor]:
        """Outputs as `forward` gives them, and what the last layer takes; the features (clients, batch, e) of one that is linear."""
        values, found = {0: x}, dict[int, Tap]()
        features = x
        for at, operation in enumerate(self.operations):
            features = values[operation.inputs[0]]
            own = [parameters[place] for place in operation.parameters]
            values[at + 1] = self._made(operation, [values[number] for number in operation.inputs], own, clients, taps is not None)
            if taps is not None and own:
                found[operation.parameters[0]] = Tap(features.detach(), values[at + 1], _rule(operation))
            for number in self._last_uses[at]:
                del values[number]
        if taps is not None:
            taps += [found[place] for place in sorted(found)]
        return values[len(self.operations)], features

    def _made(self, operation: Operation, inputs: Sequence[Tensor], parameters: Sequence[Tensor], clients: int, even: bool) -> Tensor:
        x, form = inputs[0], operation.form
        match operation.kind:
            case "linear":
                return _even(x, parameters) if even else _linear(x, parameters)
            case "add":
                return x + inputs[1]
            case "relu":
                return functional.relu(x)
            case "tanh":
                return torch.tanh(x)
            case "sigmoid":
                return torch.sigmoid(x)
            case "group_norm":
                scale, shift = (parameter.flatten() for parameter in parameters)
                if x.shape[1] < FEWEST_IN_GROUP * clients * operation.groups:
                    x = x.contiguous()
                return functional.group_norm(x, clients * operation.groups, scale, shift, operation.eps)
            case "flatten":
                if not self.images:
                    return x.flatten(2)
                batch, _, height, width = x.shape  # images side by side: back to one client after the other
                return x.reshape(batch, clients, -1, height, width).transpose(0, 1).reshape(clients, batch, -1)
        assert form is not None
        if operation.kind == "convolution":
            return convolved(x, parameters[0], parameters[1] if len(parameters) > 1 else None, form)
        if operation.kind == "max_pool":
            return functional.max_pool2d(x, form.size, form.stride, form.padding, form.dilation)
        return functional.avg_pool2d(x, form.size, form.stride, form.padding)


def _rule(operation: Operation) -> Rule:
    """How an operation with parameters makes per-sample gradients."""
    bias = len(operation.parameters) > 1
    if operation.kind == "linear":
        return LinearRule(bias)
    if operation.form is not None:
        return ConvolutionRule(operation.form, bias)
    return GroupNormRule(operation.groups, operation.eps)


def _linear(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    return torch.bmm(x, parameters[0]) if len(parameters) == 1 else torch.baddbmm(parameters[1].unsqueeze(1), x, parameters[0])


def _even(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """The product with zeros up to a multiple of `COLUMNS` in width: kernels round what is left over differently by place.

    It is also two to three times as quick for few outputs.
    """
    (size, width), weight = parameters[0].shape[1:], parameters[0]
    more = -size % COLUMNS if x.requires_grad else 0  # the gradient of the input is as wide as the input
    fill = -width % COLUMNS
    if more or fill:
        x, weight = functional.pad(x, (0, more)), functional.pad(weight, (0, fill, 0, more))
    padded = [weight, *(functional.pad(bias, (0, fill)) for bias in parameters[1:])]
    return _linear(x, padded)[..., :width]
