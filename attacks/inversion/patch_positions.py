"""The image of a single sample from a vision transformer's update, by the update of its position vectors.

A vision transformer cuts an image into n patches x_p, embeds each by one linear map, W x_p + b, and adds a learned vector for its
position. So the gradient by a position vector is the gradient δ_p by the embedded patch, whatever the layers behind are, and the gradient
of W is Σ_p δ_p x_pᵀ = Δᵀ X. With Δ (n, width) known from the position vectors, X (n, pixels of a patch) is the solution of a linear system,
exact if Δ has n independent rows.

Source: ours, after Lu et al. 2022 ("APRIL: Finding the Achilles' Heel on Privacy for Vision Transformers"), who read the image from the
first attention layer by the gradient of the position vectors. Here nothing is assumed of the attention, so that layer norms and residual
ways do no harm.

What it proves: with learned position vectors the update of one sample is the sample, for any number of SGD steps, since sums of gradients
keep the relation. What it does not: of several samples, whose Δ are added before they multiply the patches; the residual shows it. Nothing
about fixed position vectors.
"""

from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import nn

from ...engine.models import Model, build_module
from ...types import Array
from .closed_form import images_from_inputs

__all__ = ["PatchLayer", "image_from_positions", "images_by_positions", "patch_layer"]

POSITIONS = "position vectors"
MOST_RESIDUAL = 0.01
"""Above this relative residual an update is not that of one sample by plain steps."""

MOST_CONDITION = 1e6
"""Of Δ: above, float32 updates do not determine the patches."""
ALIKE = 1e-4
"""Relative distance up to which two gradients of the trial count as the same."""


@dataclass(frozen=True, eq=False)
class PatchLayer:
    """An embedding of patches: weights (width, pixels of a patch) from `weight` on in the parameter vector, n position vectors of `width`
    from `positions` on, and which value of a flat sample each pixel of each patch is, `places` (n, pixels of a patch)."""

    weight: int
    positions: int
    width: int
    places: Array


@lru_cache(maxsize=16)
def patch_layer(model: Model) -> PatchLayer | None:
    """The embedding of patches of a network with learned position vectors; None if a trial finds none.

    The trial passes one image through the network: the layer is a convolution or a linear map that reads every value of the image once,
    and the gradient by its output is the gradient by rows of one parameter.
    """
    if len(model.shape) != 3:
        return None
    module = deepcopy(build_module(model)).double().train(False)
    offsets = {name: offset for name, _, offset in model.layout}
    named = dict(module.named_parameters())
    size = int(np.prod(model.shape))
    numbered = torch.arange(size, dtype=torch.float64).view(1, *model.shape)
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Conv2d | nn.Linear) or f"{name}.weight" not in offsets:
            continue
        inputs, _, _ = _passed(module, layer, numbered)
        places = _places(layer, inputs, size)
        if places is None:
            continue
        image = torch.randn((1, *model.shape), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        _, by_output, by_name = _passed(module, layer, image)
        by_patch = by_output.flatten(2)[0].T if isinstance(layer, nn.Conv2d) else by_output.reshape(-1, by_output.shape[-1])
        count, width = by_patch.shape
        for other, gradient in by_name.items():
            rows = gradient.reshape(-1, gradient.shape[-1]) if gradient.dim() > 1 else gradient[None]
            if other not in offsets or other == f"{name}.weight" or rows.shape[1] != width or len(rows) < count:
                continue
            for start in sorted({0, len(rows) - count}):  # a vector for the class comes before or behind
                if float((rows[start : start + count] - by_patch).norm()) <= ALIKE * float(by_patch.norm()):
                    assert named[other].numel() == rows.numel()
                    return PatchLayer(offsets[f"{name}.weight"], offsets[other] + start * width, width, places)
    return None


def _passed(module: nn.Module, layer: nn.Module, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """A layer's input for an image, and the gradients of a loss by the layer's output and by parameters; empty where it is not used."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    handle = layer.register_forward_hook(lambda _, given, made: seen.append((given[0].detach(), made)))
    try:
        scores = module(image)
    finally:
        handle.remove()
    if len(seen) != 1 or not seen[0][1].requires_grad:
        return torch.empty(0), torch.empty(0), {}
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    loss = nn.functional.cross_entropy(scores, torch.zeros(1, dtype=torch.int64))
    made: list[torch.Tensor | None] = [*torch.autograd.grad(loss, [seen[0][1], *named.values()], allow_unused=True)]
    by_output, gradients = made[0], made[1:]
    if by_output is None:
        return torch.empty(0), torch.empty(0), {}
    kept = {name: gradient for name, gradient in zip(named, gradients, strict=True) if gradient is not None}
    return seen[0][0], by_output, kept


def _places(layer: nn.Conv2d | nn.Linear, inputs: torch.Tensor, size: int) -> Array | None:
    """Which value of the numbered image each input of each patch is (n, pixels); None if not every value is read once."""
    if isinstance(layer, nn.Conv2d):
        whole = layer.kernel_size == layer.stride and layer.groups == 1 and layer.padding in ((0, 0), "valid") and layer.dilation == (1, 1)
        if not whole or inputs.dim() != 4:
            return None
        rows = nn.functional.unfold(inputs, layer.kernel_size, stride=layer.stride)[0].T
    elif inputs.dim() == 3 and len(inputs) == 1:
        rows = inputs[0]
    else:
        return None
    places = rows.numpy()
    is_each_once = places.size == size and np.array_equal(np.sort(places, axis=None), np.arange(size))
    return places.astype(np.int64) if is_each_once else None


def images_by_positions(
    model: Model, starts: Array, updates: Array, *, steps: int = 1, lr: float = 1.0, weight_decay: float = 0.0
) -> list[tuple[Array, str] | None]:  # fmt: skip
    """For each of `updates` (m, d) of one sample, of models `starts` (m, d): the image (1, *shape) in [0, 1] and the method, or None.

    An update is that of `steps` steps of SGD.
    """
    layer = patch_layer(model)
    if layer is None or (weight_decay and steps > 1):
        return [None] * len(updates)
    solved = [image_from_positions(layer, row) for row in updates + lr * weight_decay * starts]
    return [(images_from_inputs(model, image[None]), POSITIONS) if left <= MOST_RESIDUAL else None for image, left in solved]


def image_from_positions(layer: PatchLayer, update: Array) -> tuple[Array, float]:
    """The standardised sample (n,) behind an update (d,), and the relative residual: 0 for a single sample, 1 where nothing follows."""
    count, pixels = layer.places.shape
    deltas = np.asarray(update[layer.positions : layer.positions + count * layer.width], np.float64).reshape(count, layer.width)
    weight = np.asarray(update[layer.weight : layer.weight + layer.width * pixels], np.float64).reshape(layer.width, pixels)
    none = np.zeros(layer.places.size)
    values = np.linalg.svd(deltas, compute_uv=False)
    if count > layer.width or not values[-1] * MOST_CONDITION > values[0]:
        return none, 1.0
    patches = np.linalg.lstsq(deltas.T, weight, rcond=None)[0]
    image = np.empty(layer.places.size)
    image[layer.places] = patches
    left = float(np.linalg.norm(weight - deltas.T @ patches))
    return image, left / max(float(np.linalg.norm(weight)), 1e-300)
