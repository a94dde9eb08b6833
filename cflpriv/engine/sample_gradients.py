"""The gradients of a client's single samples, a few at a time."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from ..types import Array, ClientData
from .device import tensor
from .models import Model

__all__ = ["gradients_by_sample", "sample_gradients"]

NUMBERS_AT_ONCE = 1 << 24
SAMPLES_AT_ONCE = 256


def gradients_by_sample(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """By parameter, the gradients (n, ...) of the cross-entropy of each of the samples `x` (n, ...), `y` (n,).

    One after the other for modules that `torch.func` cannot map over, such as recurrent ones.
    """
    parameters = {name: one.detach() for name, one in module.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], sample: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional_call(module, weights, (sample.unsqueeze(0),)), label.unsqueeze(0))

    try:
        made: dict[str, torch.Tensor] = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    except RuntimeError:
        weights = list(module.parameters())
        rows = [torch.autograd.grad(functional.cross_entropy(module(x[at : at + 1]), y[at : at + 1]), weights) for at in range(len(y))]
        made = {name: torch.stack([row[place] for row in rows]) for place, name in enumerate(parameters)}
    return made


def sample_gradients(model: Model, vector: Array, data: ClientData) -> Iterator[torch.Tensor]:
    """The loss gradients at the model `vector` (d,) of the training samples in order, in blocks (samples, d) on the device in use."""
    module = model.load(vector)
    x, y = model.inputs(data.x_train), tensor(data.y_train)
    size = max(1, min(SAMPLES_AT_ONCE, NUMBERS_AT_ONCE // model.dimension))
    for at in range(0, len(y), size):
        made = gradients_by_sample(module, x[at : at + size], y[at : at + size])
        yield torch.cat([one.flatten(1) for one in made.values()], dim=1)
