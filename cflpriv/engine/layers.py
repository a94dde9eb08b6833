"""Modules with a client axis: a Sequential of known layers becomes one function of stacked parameters.

Two layouts travel through the layers: images of all clients side by side as channels, (batch, clients × channels, height, width),
where a client's convolution is a group (`convolutions`); and flat features, (clients, batch, features), where a linear layer is a batched
matrix product.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .clipping import COLUMNS, ConvolutionRule, GroupNormRule, LinearRule, Rule
from .convolutions import Form, convolved
from .own_modules import EngineHook

__all__ = ["Residual", "Stacked", "Tap", "Taps", "copies_nothing", "flattened", "stack_layers"]


@dataclass(frozen=True, eq=False)
class Tap:
    """What a layer with parameters saw: its input, its output, and the rule that turns the output's gradient into per-sample gradients."""

    before: Tensor
    after: Tensor
    rule: "Rule"


Taps = list[Tap] | None
"""Where layers with parameters leave a `Tap`, in order; None where none is wanted."""
Step = Callable[[Tensor, Sequence[Tensor], int, Taps], Tensor]
"""(activations, this layer's stacked parameters, clients, taps) -> activations."""


class Residual(nn.Module):
    """x + body(x), for networks with skip connections."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Stacked:
    """The layers of a module. `images` is the layout that the input needs; `forward` takes parameters stacked over clients, (C, *shape).

    Where `transposed`, a parameter is stacked as (C, *reversed shape): the layout in which a linear layer multiplies its weight, so that
    neither weight nor gradient is copied.
    """

    steps: tuple[tuple[Step, int], ...]
    images: bool
    transposed: tuple[bool, ...]

    def forward(self, x: Tensor, parameters: Sequence[Tensor], clients: int, taps: Taps = None) -> Tensor:
        """Outputs (clients, batch, classes). `taps` collects what book-keeping needs of the layers."""
        at = 0
        for step, count in self.steps:
            x = step(x, parameters[at : at + count], clients, taps)
            at += count
        return x

    @property
    def ends_linear(self) -> bool:
        """Whether the last layer is linear, so that there are features (clients, batch, e) before it."""
        return self.steps[-1][0] is _linear

    def with_features(self, x: Tensor, parameters: Sequence[Tensor], clients: int) -> tuple[Tensor, Tensor]:
        """Outputs as `forward` gives them, and the features (clients, batch, e) that the last layer, a linear one, takes."""
        head, count = self.steps[-1]
        features = Stacked(self.steps[:-1], self.images, ()).forward(x, parameters[:-count], clients)
        return head(features, parameters[-count:], clients, None), features


def stack_layers(module: nn.Module) -> Stacked | None:
    """The stacked form of `module`, or None if it has a layer that is not known here.

    A layer is known by its exact class. A hook, a `forward` of its own, a frozen parameter, or a parameter of two layers makes it another.
    """
    layers = flattened(module)
    if layers is None or not all(_unchanged(layer) for layer in module.modules()):
        return None
    steps: list[tuple[Step, int]] = []
    i = 0
    while i < len(layers):
        layer, following = layers[i], layers[i + 1] if i + 1 < len(layers) else None
        if type(layer) is nn.ReLU and type(following) is nn.MaxPool2d:
            # the maximum of what ReLU leaves is what ReLU leaves of the maximum, gradients included, on a quarter of the values
            pool = _pool(following)
            if pool is None:
                return None
            steps += [(pool, 0), (_relu, 0)]
            i += 2
            continue
        step = _step(layer)
        if step is None:
            return None
        steps.append(step)
        i += 1
    if sum(count for _, count in steps) != sum(1 for _ in module.parameters()):
        return None
    first = next((layer for layer in layers if not isinstance(layer, nn.Identity)), None)
    transposed = tuple(isinstance(inner, nn.Linear) and p.dim() == 2 for inner in module.modules() for p in inner.parameters(recurse=False))
    return Stacked(tuple(steps), isinstance(first, nn.Conv2d), transposed)


def copies_nothing(module: nn.Module) -> bool:
    """Whether a module of known layers changes no input in place."""
    return stack_layers(module) is not None and not any(getattr(layer, "inplace", False) for layer in module.modules())


def _unchanged(layer: nn.Module) -> bool:
    """Whether a layer does what its class does."""
    hooks = (*layer._forward_pre_hooks.values(), *layer._forward_hooks.values())
    others = (layer._backward_hooks, layer._backward_pre_hooks)
    return "forward" not in vars(layer) and all(isinstance(hook, EngineHook) for hook in hooks) and not any(others)


def flattened(module: nn.Module) -> list[nn.Module] | None:
    """The layers in order, nested Sequentials opened."""
    if type(module) is not nn.Sequential:
        return [module] if type(module) is nn.Linear else None
    layers: list[nn.Module] = []
    for child in module:
        if type(child) is nn.Sequential:
            inner = flattened(child)
            if inner is None:
                return None
            layers += inner
        else:
            layers.append(child)
    return layers


def _step(layer: nn.Module) -> tuple[Step, int] | None:
    """A layer as a step, with its number of parameters."""
    if type(layer) is nn.Linear:
        return _linear, 1 + (layer.bias is not None)
    if type(layer) is nn.Conv2d:
        convolution = _convolution(layer)
        return None if convolution is None else (convolution, 1 + (layer.bias is not None))
    if type(layer) is nn.GroupNorm and layer.affine:
        return _group_norm(layer), 2
    if type(layer) is nn.MaxPool2d:
        pool = _pool(layer)
        return None if pool is None else (pool, 0)
    if type(layer) is nn.Flatten and layer.start_dim == 1 and layer.end_dim == -1:
        return _flatten, 0
    if type(layer) is Residual:
        return _residual(layer)
    simple: dict[type[nn.Module], Step] = {nn.ReLU: _relu, nn.Sigmoid: _sigmoid, nn.Tanh: _tanh, nn.Identity: _identity}
    return (simple[type(layer)], 0) if type(layer) in simple else None


def _linear(x: Tensor, parameters: Sequence[Tensor], clients: int, taps: Taps) -> Tensor:
    if taps is None:
        return torch.bmm(x, parameters[0]) if len(parameters) == 1 else torch.baddbmm(parameters[1].unsqueeze(1), x, parameters[0])
    out = _even(x, parameters)
    taps.append(Tap(x.detach(), out, LinearRule(len(parameters) > 1)))
    return out


def _even(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """The product with zeros up to a multiple of `COLUMNS` in width: kernels round what is left over differently by place.

    It is also two to three times as quick for few outputs.
    """
    (size, width), weight = parameters[0].shape[1:], parameters[0]
    more = -size % COLUMNS if x.requires_grad else 0  # the gradient of the input is as wide as the input
    fill = -width % COLUMNS
    if more or fill:
        x, weight = functional.pad(x, (0, more)), functional.pad(weight, (0, fill, 0, more))
    if len(parameters) == 1:
        return torch.bmm(x, weight)[..., :width]
    return torch.baddbmm(functional.pad(parameters[1], (0, fill)).unsqueeze(1), x, weight)[..., :width]


def _convolution(layer: nn.Conv2d) -> Step | None:
    if layer.groups != 1 or layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return None
    form = Form(*(_pair(setting) for setting in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)))

    def step(x: Tensor, parameters: Sequence[Tensor], clients: int, taps: Taps) -> Tensor:
        bias = parameters[1] if len(parameters) > 1 else None
        out = convolved(x, parameters[0], bias, form)
        if taps is not None:
            taps.append(Tap(x.detach(), out, ConvolutionRule(form, bias is not None)))
        return out

    return step


def _pair(sides: tuple[int, ...]) -> tuple[int, int]:
    height, width = sides
    return height, width


def _group_norm(layer: nn.GroupNorm) -> Step:
    groups, eps = layer.num_groups, layer.eps

    def step(x: Tensor, parameters: Sequence[Tensor], clients: int, taps: Taps) -> Tensor:
        out = functional.group_norm(x, clients * groups, parameters[0].flatten(), parameters[1].flatten(), eps)
        if taps is not None:
            taps.append(Tap(x.detach(), out, GroupNormRule(groups, eps)))
        return out

    return step


def _pool(layer: nn.MaxPool2d) -> Step | None:
    if layer.return_indices or layer.ceil_mode or layer.dilation not in (1, (1, 1)):
        return None
    size, stride, padding = layer.kernel_size, layer.stride, layer.padding
    return lambda x, parameters, clients, taps: functional.max_pool2d(x, size, stride, padding)


def _flatten(x: Tensor, parameters: Sequence[Tensor], clients: int, taps: Taps) -> Tensor:
    if x.dim() == 4:  # images side by side: back to one client after the other
        batch, _, height, width = x.shape
        return x.reshape(batch, clients, -1, height, width).transpose(0, 1).reshape(clients, batch, -1)
    return x.flatten(2)


def _residual(layer: Residual) -> tuple[Step, int] | None:
    inner = stack_layers(layer.body)
    if inner is None:
        return None
    count = sum(1 for _ in layer.parameters())
    return lambda x, parameters, clients, taps: x + inner.forward(x, parameters, clients, taps), count


def _relu(x: Tensor, parameters: Sequence[Tensor], clients: int, taps: Taps) -> Tensor:
    return functional.relu(x)


def _sigmoid(x: Tensor, parameters: Sequence[Tensor], clients: int, taps: Taps) -> Tensor:
    return torch.sigmoid(x)


def _tanh(x: Tensor, parameters: Sequence[Tensor], clients: int, taps: Taps) -> Tensor:
    return torch.tanh(x)


def _identity(x: Tensor, parameters: Sequence[Tensor], clients: int, taps: Taps) -> Tensor:
    return x
