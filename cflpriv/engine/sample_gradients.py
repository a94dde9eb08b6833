"""The gradients of a client's single samples, a few at a time, and weighted sums of their directions."""

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from ..errors import InputError
from ..types import Array, ClientData, Loss
from .device import placed, tensor
from .losses import loss_of
from .models import Model
from .operations import unchanged
from .own_modules import flat, slopes

__all__ = ["gradients_by_sample", "sample_gradients", "summed_directions"]

NUMBERS_AT_ONCE = 1 << 24
SAMPLES_AT_ONCE = 256
FEW = 2
_MAPPED: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether `torch.func` maps over a module's samples with the gradients of the plain loop, by a trial of `FEW` samples."""
SMALLEST = 1e-30
"""Below this a gradient is zero: its inverse norm is no float32."""


def gradients_by_sample(
    module: nn.Module, x: torch.Tensor, y: torch.Tensor, kind: Loss = "cross_entropy", *, alone: bool = False
) -> dict[str, torch.Tensor]:
    """By parameter, the gradients (n, ...) of the loss `kind` of each of the samples `x` (n, ...), `y` (n,).

    One after the other for modules that `torch.func` cannot map over, such as recurrent ones, or maps over with other gradients; and with
    `alone`, so that a gradient depends on no other sample, to the last bit (`clipped_sums`). Else products of two vectors a layer for
    modules of linear layers alone, from one pass.
    """
    if alone:
        return _looped(module, x, y, kind)
    if _dense(module):
        layers = _factors(module, x, y, kind)
        made = [part for inputs, delta, biased in layers for part in (delta[:, :, None] * inputs[:, None], *[delta] * biased)]
        return dict(zip(dict(module.named_parameters()), made, strict=True))
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], sample: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return loss_of(kind, functional_call(module, weights, (sample.unsqueeze(0),)), label.unsqueeze(0))

    def mapped(samples: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, samples, labels)
        return made

    if module not in _MAPPED:
        try:
            pairs = zip(mapped(x[:FEW], y[:FEW]).values(), _looped(module, x[:FEW], y[:FEW], kind).values(), strict=True)
            _MAPPED[module] = all(torch.allclose(a, b, rtol=1e-3, atol=1e-4 * _largest(b), equal_nan=True) for a, b in pairs)
        except InputError:
            raise
        except Exception:  # the loop shows what is wrong, if anything is
            _MAPPED[module] = False
    return mapped(x, y) if _MAPPED[module] else _looped(module, x, y, kind)


def _looped(module: nn.Module, x: torch.Tensor, y: torch.Tensor, kind: Loss) -> dict[str, torch.Tensor]:
    """The gradients of one sample after the other."""
    named = dict(module.named_parameters())
    rows = [slopes(loss_of(kind, module(x[at : at + 1].clone()), y[at : at + 1]), list(named.values())) for at in range(len(y))]
    return {name: torch.stack([row[place] for row in rows]) for place, name in enumerate(named)}


def _largest(tensor: torch.Tensor) -> float:
    return float(torch.nan_to_num(tensor).abs().max()) if tensor.numel() else 0.0


def sample_gradients(model: Model, vector: Array, data: ClientData, *, alone: bool = False) -> Iterator[torch.Tensor]:
    """The loss gradients at the model `vector` (d,) of the training samples in order, in blocks (samples, d) on the device in use.

    `alone`: as `gradients_by_sample`.
    """
    module = model.lent(vector)
    x, y = model.inputs(data.x_train), tensor(data.y_train)
    size = max(1, min(SAMPLES_AT_ONCE, NUMBERS_AT_ONCE // model.dimension))
    for at in range(0, len(y), size):
        made = gradients_by_sample(module, x[at : at + size], y[at : at + size], model.loss, alone=alone)
        yield torch.cat([flat(gradient) for gradient in made.values()], dim=1)


def summed_directions(model: Model, vector: Array, data: ClientData, weights: Array) -> Array:
    """Weighted sums (rows, d) float64 of the samples' loss gradients at the model `vector` (d,), each scaled to norm 1.

    `weights` (rows, n) are those of the training samples in order. A gradient that is zero, or not finite, counts as zero. A sample's
    gradient in a layer Wx + b is the product of the loss's gradient at the layer's output and of its input (x, 1), so for models of such
    layers alone neither norms nor sums need the single gradients (Goodfellow 2015, "Efficient per-example gradient computations").
    """
    module = model.lent(vector)
    if not _dense(module):
        return _summed_blocks(model, vector, data, weights)
    x, y = model.inputs(data.x_train), tensor(data.y_train)
    total = placed(torch.zeros((len(weights), model.dimension), dtype=torch.float64))
    for at in range(0, len(y), SAMPLES_AT_ONCE):
        layers = _factors(module, x[at : at + SAMPLES_AT_ONCE], y[at : at + SAMPLES_AT_ONCE], model.loss)
        squares = sum(
            delta.double().square().sum(1) * (layer_inputs.double().square().sum(1) + biased) for layer_inputs, delta, biased in layers
        )
        assert isinstance(squares, torch.Tensor)
        factors = weights[:, at : at + len(squares)] * _inverse(squares.sqrt())
        made: list[torch.Tensor] = []
        for layer_inputs, delta, biased in layers:
            layer_inputs, delta = (torch.nan_to_num(array, 0.0, 0.0, 0.0) for array in (layer_inputs, delta))
            scaled = [tensor(row).to(delta.dtype)[:, None] * delta for row in factors]
            made.append(torch.stack([(scale.T @ layer_inputs).flatten() for scale in scaled]))
            if biased:
                made.append(torch.stack([scale.sum(0) for scale in scaled]))
        total += torch.cat(made, dim=1)
    return np.asarray(total.cpu().numpy())


def _summed_blocks(model: Model, vector: Array, data: ClientData, weights: Array) -> Array:
    """`summed_directions` of any model."""
    total = placed(torch.zeros((len(weights), model.dimension), dtype=torch.float64))
    at = 0
    for block in sample_gradients(model, vector, data):
        factors = weights[:, at : at + len(block)] * _inverse(torch.linalg.vector_norm(block.double(), dim=1))
        total += (tensor(factors).to(block.dtype) @ torch.nan_to_num(block, 0.0, 0.0, 0.0)).double()
        at += len(block)
    return np.asarray(total.cpu().numpy())


def _dense(module: nn.Module) -> bool:
    """Whether a module applies linear layers to whole samples, one after the other, each with parameters of its own."""
    if (
        type(module) is not nn.Sequential
        or not len(module)
        or type(module[0]) is not nn.Flatten
        or not all(map(unchanged, module.modules()))
    ):
        return False
    own = sum(1 + (layer.bias is not None) for layer in module if isinstance(layer, nn.Linear))  # frozen ones are no parameters
    return all(type(layer) in (nn.Flatten, nn.Linear, nn.ReLU) for layer in module) and own == len(list(module.parameters()))


def _factors(module: nn.Module, x: torch.Tensor, y: torch.Tensor, kind: Loss) -> Sequence[tuple[torch.Tensor, torch.Tensor, bool]]:
    """Of each linear layer the inputs (n, in), the gradients of the samples' losses at its outputs (n, out), and whether it has a bias."""
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    biased: list[bool] = []
    for layer in module.children():
        made = layer(x)
        if isinstance(layer, nn.Linear):
            inputs.append(x.detach())
            outputs.append(made)
            biased.append(layer.bias is not None)
        x = made
    deltas = torch.autograd.grad(loss_of(kind, x, y, "sum"), outputs)
    return list(zip(inputs, deltas, biased, strict=True))


def _inverse(norms: torch.Tensor) -> Array:
    """1 / norm; 0 for next to no norm, or one that is not finite."""
    known = norms.cpu().numpy()
    usable = np.isfinite(known) & (known > SMALLEST)
    return np.where(usable, 1.0 / np.where(usable, known, 1.0), 0.0)
