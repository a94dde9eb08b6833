"""Random networks of the operations that the compiled kernel knows: graphs with branches, sums and values that several layers take."""

from copy import deepcopy
from functools import partial

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from cflpriv.engine.models import Model

__all__ = ["Graph", "graphs"]


class Graph(nn.Module):
    """Layers, each with the numbers of the values that it takes: 0 is the input, k the result of step k − 1. Two are added first."""

    def __init__(self, given: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.taken: list[tuple[int, ...]] = []
        self.shapes = [given]

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer, (first, *others) in zip(self.layers, self.taken, strict=True):
            value = values[first]
            for other in others:
                value = value + values[other]
            values.append(layer(value))
        return values[-1]

    def add(self, layer: nn.Module, *taken: int) -> int:
        """Append a step; the number of its value. Raises `RuntimeError` where nothing is left of an image."""
        with torch.no_grad():
            made = layer(torch.zeros(1, *self.shapes[taken[0]]))
        self.layers.append(layer)
        self.taken.append(taken)
        self.shapes.append(tuple(made.shape[1:]))
        return len(self.layers)


def _activation(draw: st.DrawFn) -> nn.Module:
    kinds: list[type[nn.Module]] = [nn.ReLU, nn.Tanh, nn.Sigmoid]
    return draw(st.sampled_from(kinds))()


def _image_layer(draw: st.DrawFn, channels: int) -> nn.Module:
    kind = draw(st.sampled_from(["convolution", "convolution", "group_norm", "max_pool", "average_pool", "activation"]))
    if kind == "convolution":
        size, stride = draw(st.tuples(st.integers(1, 4), st.integers(1, 3))), draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
        padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
        return nn.Conv2d(channels, draw(st.integers(1, 18)), size, stride, padding, bias=draw(st.booleans()))
    if kind == "group_norm":
        divisors = [count for count in range(1, channels + 1) if channels % count == 0]
        return nn.GroupNorm(draw(st.sampled_from(divisors)), channels, eps=draw(st.sampled_from([1e-5, 0.1])))
    if kind == "activation":
        return _activation(draw)
    side, step = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    pool = nn.MaxPool2d if kind == "max_pool" else nn.AvgPool2d
    return pool(side, step, draw(st.integers(0, side // 2)))


@st.composite
def graphs(draw: st.DrawFn) -> Model:
    """Up to five steps on images, with branches and sums, then up to three on features; float64."""
    given = (draw(st.integers(1, 9)), draw(st.integers(3, 9)), draw(st.integers(3, 9)))
    graph = Graph(given)
    now = 0
    for _ in range(draw(st.integers(0, 5))):
        channels = graph.shapes[now][0]
        way = draw(st.sampled_from(["layer", "layer", "residual", "branches"]))
        try:
            if way == "layer":
                now = graph.add(_image_layer(draw, channels), now)
            elif way == "residual":  # x + body(x)
                first = graph.add(nn.Conv2d(channels, channels, 3, padding=1, bias=draw(st.booleans())), now)
                now = graph.add(_activation(draw), now, graph.add(_activation(draw), first))
            else:  # two paths of the same value, one of which may have no parameters
                sides = draw(st.integers(1, 2))
                one = graph.add(nn.Conv2d(channels, channels, 3, sides, 1), now)
                other = graph.add(nn.AvgPool2d(3, sides, 1) if draw(st.booleans()) else nn.MaxPool2d(3, sides, 1), now)
                norm = nn.GroupNorm(1, channels) if torch.Size(graph.shapes[one]).numel() > 1 else _activation(draw)
                now = graph.add(norm, one, other)
        except RuntimeError:
            break
    if draw(st.booleans()) and now:
        now = graph.add(nn.AdaptiveAvgPool2d(1), now)
    now = graph.add(nn.Flatten(), now)
    for _ in range(draw(st.integers(0, 2))):
        width, units = graph.shapes[now][0], draw(st.integers(1, 30))
        now = graph.add(nn.Linear(width, units, bias=draw(st.booleans())), now)
        made = graph.add(_activation(draw), now)
        now = graph.add(nn.Identity(), now, made) if draw(st.booleans()) else made
    classes = draw(st.integers(2, 11))
    if draw(st.booleans()):  # scores of the input itself beside the others
        beside = graph.add(nn.Linear(torch.zeros(given).numel(), graph.shapes[now][0]), graph.add(nn.Flatten(), 0))
        now = graph.add(nn.Tanh(), now, beside)
    graph.add(nn.Linear(graph.shapes[now][0], classes, bias=draw(st.booleans())), now)
    return Model("drawn", given, classes, dtype="float64", factory=partial(deepcopy, graph))
