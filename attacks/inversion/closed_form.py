"""Closed form: the input of a linear layer with bias, from the gradient of one sample.

Source: Phong, Aono, Hayashi, Wang & Moriai 2018 (Sec. 3); Geiping et al. 2020, Prop. 3.1. Unit u of a layer z = W x + b has the weight
gradient (∂L/∂z_u) x and the bias gradient ∂L/∂z_u, so the first over the second is x. Units are weighted by their bias gradient (least
squares).

What it proves: of a network that begins with a linear layer, the update of a single sample is the sample. That holds for several local
steps, with momentum as well: the sample is the same in each, so that sums of its gradients keep the ratio. Weight decay adds a term that is
known for one step only. Of a later linear layer the closed form gives the features of the sample (`feature_decoder`). What it does not: of
several samples the ratio is a weighted mean of their inputs, which the residual shows.
"""

from dataclasses import dataclass

import numpy as np
from torch import nn

from ...engine.models import Model, build_module
from ...errors import InputError
from ...types import Array, check_array

__all__ = ["LinearLayer", "first_linear", "gradients_of", "images_from_inputs", "input_from_gradients", "layers_of"]


@dataclass(frozen=True)
class LinearLayer:
    """The first linear layer of a network: `outputs` × `inputs` weights from `weight` on in the parameter vector, biases from `bias` on.

    `place` is its index among the network's layers. `is_first`: it takes the standardised sample itself, else features of it.
    `is_rectified`: a ReLU follows it.
    """

    weight: int
    bias: int
    outputs: int
    inputs: int
    place: int
    is_first: bool
    is_rectified: bool


# --- the mathematics, for updates from anywhere -------------------------------------------------------------------------------------


def input_from_gradients(weight_gradient: Array, bias_gradient: Array) -> tuple[Array, float]:
    """The input (n,) behind the gradients (m, n), (m,) of a linear layer, and the relative residual, 0 for a single sample.

    Any multiple of the gradients serves, such as an update. The residual is of weight_gradient = bias_gradient ⊗ input, in the Frobenius
    norm. Raises `InputError` for other shapes, values that are not finite and a bias gradient of zeros.
    """
    weight = check_array("weight_gradient", np.asarray(weight_gradient, np.float64), ndim=2)
    bias = check_array("bias_gradient", np.asarray(bias_gradient, np.float64), ndim=1)
    if len(weight) != len(bias):
        raise InputError(f"bias_gradient: has {len(bias)} values for {len(weight)} rows of weight_gradient")
    largest = float(np.abs(bias).max(initial=0.0))
    if largest == 0.0:
        raise InputError("bias_gradient: is zero in all units, so that the gradients hold no input")
    share = bias / largest  # squares of tiny gradients would underflow
    image = share @ weight / float(share @ share) / largest
    left = float(np.linalg.norm(weight - np.outer(bias, image)))
    return image, left / max(float(np.linalg.norm(weight)), 1e-300)


def first_linear(model: Model, part: int = 0) -> LinearLayer | None:
    """The first linear layer of a model that is a sequence of layers; None if there is no such layer, or it has no bias.

    `part`: the first one of those whose parameters are at this place of the parameter vector or after it.

    A linear layer inside a block (such as a residual one) is not looked for.
    """
    layers = layers_of(model)
    names = {id(parameter): name for name, parameter in build_module(model).named_parameters()}
    offsets = {name: offset for name, _, offset in model.layout}
    linear = ((i, layer) for i, layer in enumerate(layers) if isinstance(layer, nn.Linear))
    place = next((i for i, layer in linear if offsets.get(names[id(layer.weight)], -1) >= part), None)
    if place is None:
        return None
    layer = layers[place]
    assert isinstance(layer, nn.Linear)  # as found
    if len(list(layer.parameters())) < 2:  # no bias
        return None
    before = all(isinstance(layer, nn.Flatten | nn.Identity) for layer in layers[:place])
    return LinearLayer(
        offsets[names[id(layer.weight)]], offsets[names[id(layer.bias)]], layer.out_features, layer.in_features, place, before,
        place + 1 < len(layers) and isinstance(layers[place + 1], nn.ReLU),
    )  # fmt: skip


def layers_of(model: Model, module: nn.Module | None = None) -> list[nn.Module]:
    """The layers of a model, or of its `module` elsewhere, in order, nested sequences opened; the module alone if it is no sequence."""

    def opened(module: nn.Module) -> list[nn.Module]:
        return [inner for child in module for inner in opened(child)] if type(module) is nn.Sequential else [module]

    return opened(module or build_module(model))


def gradients_of(layer: LinearLayer, vector: Array) -> tuple[Array, Array]:
    """What a vector (d,) of parameters, gradients or an update holds of a layer: weights (m, n) and biases (m,), float64."""
    weight = vector[layer.weight : layer.weight + layer.outputs * layer.inputs].reshape(layer.outputs, layer.inputs)
    return weight.astype(np.float64), vector[layer.bias : layer.bias + layer.outputs].astype(np.float64)


def images_from_inputs(model: Model, inputs: Array) -> Array:
    """Samples (k, *shape) in [0, 1] from the standardised inputs (k, n) of a model."""
    channel = (-1, *([1] * (len(model.shape) - 1)))
    mean, std = (np.asarray(statistic).reshape(channel if len(statistic) > 1 else ()) for statistic in (model.mean, model.std))
    return np.asarray(np.clip(inputs.reshape(len(inputs), *model.shape) * std + mean, 0.0, 1.0))
