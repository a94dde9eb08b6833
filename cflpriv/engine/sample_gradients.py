"""The gradients of a client's single samples, a few at a time."""

from collections.abc import Iterator

import torch
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from ..types import Array, ClientData
from .models import Model

__all__ = ["sample_gradients"]

NUMBERS_AT_ONCE = 1 << 24
SAMPLES_AT_ONCE = 256


def sample_gradients(model: Model, vector: Array, data: ClientData) -> Iterator[torch.Tensor]:
    """The loss gradients at the model `vector` (d,) of the training samples in their order, in blocks (samples, d)."""
    module = model.load(vector)
    parameters = {name: one.detach() for name, one in module.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional_call(module, weights, (x.unsqueeze(0),)), y.unsqueeze(0))

    each = vmap(grad(loss), in_dims=(None, 0, 0))
    x, y = model.inputs(data.x_train), torch.from_numpy(data.y_train)
    size = max(1, min(SAMPLES_AT_ONCE, NUMBERS_AT_ONCE // model.dimension))
    for at in range(0, len(y), size):
        made = each(parameters, x[at : at + size], y[at : at + size])
        yield torch.cat([made[name].flatten(1) for name in parameters], dim=1)
