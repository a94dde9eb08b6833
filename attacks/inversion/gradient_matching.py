"""Gradient matching from decoded images: images nearer to the whole update of one step than the feature decoder's.

The decoder uses the gradient of the first linear layer alone. The layers before it have gradients, too. From the decoded images on, Adam
lowers the L1 distance of the whole gradient, relative to its length, with the auxiliary normal distribution of images as a weak prior. The
labels follow from the layer's exact inputs: the gradient by the layer's outputs has the direction of one label only (`labels_of_inputs`).

Source: Geiping et al. 2020 for matching by signed or adaptive steps with a prior; the L1 distance as in TAG (Deng et al. 2021). The start
and the labels are ours. Constants were chosen on EMNIST letters, LeNet-5.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ...engine.device import tensor
from ...engine.models import Model
from ...types import Array
from .closed_form import LinearLayer, gradients_of, layers_of
from .feature_decoder import normal_images
from .image_search import LocalSteps, unroll

__all__ = ["labels_of_inputs", "matched_images"]

ITERATIONS, RATE, PRIOR = 100, 0.05, 5e-5
AT_ONCE = 16
"""Updates in one tensor program."""


def labels_of_inputs(model: Model, vector: Array, layer: LinearLayer, gradient: Array, inputs: Array) -> Array:
    """The labels (k,) of the inputs (k, n) of a layer, from the `gradient` (d,) at the model (d,) of any positive multiple of their loss.

    D (m, k) with weight gradient D X is the gradient by the layer's outputs. A column has the direction of the label's.
    """
    weight, bias = gradients_of(layer, gradient)
    seen = np.column_stack([weight, bias]) @ np.linalg.pinv(np.column_stack([inputs, np.ones(len(inputs))]))
    held, offset = gradients_of(layer, vector)
    exact = replace(model, dtype="float64")  # a module is shared by all who load a model of its description
    rest = nn.Sequential(*layers_of(exact, exact.lent(vector.astype(np.float64)))[layer.place + 1 :])
    out = tensor(inputs @ held.T + offset).requires_grad_(True)
    scores = rest(out)
    agreement = []
    for label in range(model.classes):
        loss = functional.cross_entropy(scores, torch.full((len(inputs),), label, device=scores.device), reduction="sum")
        (slopes,) = torch.autograd.grad(loss, out, retain_graph=True)
        agreement.append(functional.cosine_similarity(slopes, tensor(seen.T), dim=1).cpu().numpy())
    return np.asarray(np.argmax(agreement, axis=0))


def matched_images(
    model: Model, starts: Array, updates: Array, labels: Sequence[Array], images: Sequence[Array], lr: float, x: Array
) -> list[Array]:  # fmt: skip
    """Images (n, *shape) in [0, 1] for each of m `updates` (m, d) of models `starts` (m, d), made from `images` by one step of rate `lr`.

    `labels` (n,) and `images` (n, *shape) of each update, of as many samples in all; `x` (k, *shape) are auxiliary images. Where nothing
    nearer is met the images stay.
    """
    mean, directions, deviations = normal_images(np.asarray(x, np.float64).reshape(len(x), -1))
    middle, whiten = _single(mean), _single(directions / deviations)
    made, results = unroll(model, LocalSteps(1, lr), "float32"), []  # the images stay far from what rounding would hide
    for first in range(0, len(updates), AT_ONCE):
        part = slice(first, first + AT_ONCE)
        theta, aim, y = _single(starts[part]), _single(updates[part]), tensor(np.stack(list(labels[part])))
        begin = _single(np.stack(list(images[part])))
        shape, point = begin.shape, begin.flatten(2).clone().requires_grad_(True)
        nearest, least = point.detach().clone(), torch.full((len(theta),), torch.inf, device=theta.device)
        length = aim.abs().sum(1).clamp_min(1e-300)
        optimiser = torch.optim.Adam([point], lr=RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, ITERATIONS)
        for _ in range(ITERATIONS):
            apart = (made(theta, point.view(shape), y) - aim).abs().sum(1) / length
            whole = apart + PRIOR * ((point - middle) @ whiten).square().sum(2).mean(1)
            with torch.no_grad():
                nearer = whole < least
                nearest[nearer], least = point.detach()[nearer], torch.minimum(least, whole)
            (point.grad,) = torch.autograd.grad(whole.sum(), point)
            optimiser.step()
            schedule.step()
            with torch.no_grad():
                point.clamp_(0.0, 1.0)
        results += list(nearest.view(shape).double().cpu().numpy())
    return results


def _single(values: Array) -> torch.Tensor:
    return tensor(np.ascontiguousarray(values, np.float32))
