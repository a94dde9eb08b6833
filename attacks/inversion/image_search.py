"""Images (or any samples) whose local training gives an update: the optimisation of gradient inversion, as functions of arrays.

Source: Zhu et al. 2019 (DLG), Geiping et al. 2020; `gradient_inversion` has the attack on recorded runs and what it proves.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional

from ...engine.convolutions import Form, patches
from ...engine.device import in_use, placed, tensor
from ...engine.graphs import FEWEST_STEPS, Replayed
from ...engine.models import Model, module_there
from ...engine.own_modules import flat
from ...types import Array
from .lbfgs import minimise

__all__ = ["LocalSteps", "invert_updates", "unroll"]

ITERATIONS = 600
ROWS_AT_ONCE, ROWS_THERE = 32, 256
"""Rows of one tensor program on the CPU, where more need more memory than they save time; and on a CUDA device. On an H200, before programs
were captured, 256 inversions of one 28×28 image at once gave 217 images/s, 64 gave 79, 8 gave 13."""


@dataclass(frozen=True)
class LocalSteps:
    """How a model became an update: `count` full-batch steps of SGD as in `training.Train` (1 step, rate 1: the negative gradient)."""

    count: int = 1
    lr: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0


def invert_updates(
    model: Model, starts: Array, updates: Array, labels: Array, steps: LocalSteps, rng: np.random.Generator, *, restarts: int = 1,
    iterations: int = ITERATIONS, distance: Literal["squared", "cosine"] = "squared", total_variation: float = 0.0,
    beside: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], Array] | None = None, begin: Array | None = None, part: int = 0,
) -> tuple[Array, Array]:  # fmt: skip
    """Images (m, n, *shape) in [0, 1] whose `steps` on `starts` (m, d) give nearly `updates` (m, d), and the distances left (m,).

    `labels` (m, n) are the labels of the n images of each of m updates. The search begins at the images `begin` (m, n, *shape), or each of
    the `restarts` at uniform noise; the nearest result is returned. `beside` is a function of images, (θ (r, d), images (r, n, *shape)) ->
    (r, k), and its observed values (m, k); their mean squared distance is added to the objective. Of updates only the parameters from place
    `part` on are compared. The search runs on the device in use.
    Raises nothing: an update that no images make leaves a large distance.
    """
    m, n = labels.shape
    theta = tensor(np.repeat(np.asarray(starts, np.float64), restarts, axis=0))
    target = tensor(np.repeat(np.asarray(updates, np.float64), restarts, axis=0))
    y = tensor(np.repeat(labels, restarts, axis=0))
    size = n * int(np.prod(model.shape))
    first = (
        rng.random((m * restarts, size)) if begin is None else np.repeat(np.asarray(begin, np.float64).reshape(m, size), restarts, axis=0)
    )
    made = unroll(model, steps)
    target = target[:, part:]
    length = target.square().sum(1).clamp_min(1e-300)
    seen = None if beside is None else tensor(np.repeat(np.asarray(beside[1], np.float64), restarts, axis=0))

    def evaluate(point: torch.Tensor, which: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        point = point.detach().requires_grad_(True)
        images = point.view(len(point), n, *model.shape)
        update, aim = made(theta[which], images, y[which])[:, part:], target[which]
        if distance == "squared":
            apart = (update - aim).square().sum(1) / length[which]
        else:
            apart = 1 - functional.cosine_similarity(update, aim, dim=1)
        whole = apart + total_variation * _variation(images) if total_variation else apart
        if beside is not None and seen is not None:
            whole = whole + (beside[0](theta[which], images) - seen[which]).square().mean(1)
        return whole.detach(), torch.autograd.grad(whole.sum(), point)[0]

    there = in_use().kind == "cuda"
    at_once = ROWS_THERE if there else ROWS_AT_ONCE
    evaluated = Replayed(evaluate, "the objective of an inversion") if there and iterations >= FEWEST_STEPS else evaluate

    def objective(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = [evaluated(*block) for block in zip(torch.split(x, at_once), torch.split(rows, at_once), strict=True)]
        return torch.cat([values for values, _ in blocks]), torch.cat([slopes for _, slopes in blocks])

    points, left = minimise(objective, tensor(first.astype(np.float64)), iterations, tolerance=1e-24 if distance == "squared" else 1e-14)
    distances = left.cpu().numpy().reshape(m, restarts)
    best = np.where(np.isnan(distances), np.inf, distances).argmin(axis=1)
    images = points.cpu().numpy().reshape(m, restarts, n, *model.shape)[np.arange(m), best]
    return np.clip(images, 0.0, 1.0), distances[np.arange(m), best]


def unroll(
    model: Model, steps: LocalSteps, dtype: Literal["float32", "float64"] = "float64"
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:  # fmt: skip
    """(θ (r, d), images (r, n, *shape), labels (r, n)), all in `dtype`, -> updates (r, d), differentiable in the images."""
    exact = replace(model, dtype=dtype)
    module = _as_products(deepcopy(module_there(exact, in_use().kind)).train(False))
    mean, std = placed(exact._statistic(exact.mean)), placed(exact._statistic(exact.std))

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional_call(module, parameters, ((x - mean) / std,)), y)

    losses = vmap(loss)  # gradients are taken outside: derivatives of derivatives are cheaper so than through two layers of transforms

    def update(theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        now = {name: theta[:, at : at + int(np.prod(shape))].reshape(-1, *shape).requires_grad_(True) for name, shape, at in exact.layout}
        velocity = dict.fromkeys(now, theta.new_zeros(()))
        for _ in range(steps.count):
            slopes = torch.autograd.grad(
                losses(now, x, y).sum(), list(now.values()), create_graph=True, allow_unused=True, materialize_grads=True
            )
            velocity = {
                name: steps.momentum * velocity[name] + slope + steps.weight_decay * now[name]
                for name, slope in zip(now, slopes, strict=True)
            }
            now = {name: now[name] - steps.lr * velocity[name] for name in now}
        return torch.cat([flat(now[name]) for name, _, _ in exact.layout], dim=1) - theta

    return update


class _Products(nn.Module):
    """A convolution as a matrix product with the patches of its input: as rows of a batch, and differentiated twice, the cheaper form."""

    def __init__(self, like: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = like.weight, like.bias
        self.form = Form(like.kernel_size, like.stride, like.padding, (1, 1))  # type: ignore[arg-type]  # a pair each

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        form = self.form
        # a device launches `unfold` once for each image; with copied patches inversions on the CPU take 1.1 times as long (8 and 64 images)
        columns = patches(x, form) if x.is_cuda else functional.unfold(x, form.size, padding=form.padding, stride=form.stride)
        made = self.weight.flatten(1) @ columns
        made = made if self.bias is None else made + self.bias[:, None]
        rows = (x.shape[-2] + 2 * form.padding[0] - form.size[0]) // form.stride[0] + 1
        return made.reshape(*made.shape[:2], rows, -1)


def _as_products(module: nn.Module) -> nn.Module:
    """The module with its plain convolutions in this form; parameters keep their names."""
    for name, child in module.named_children():
        if isinstance(child, nn.Conv2d):
            plain = child.groups == 1 and child.dilation == (1, 1) and child.padding_mode == "zeros" and not isinstance(child.padding, str)
            if plain:
                setattr(module, name, _Products(child))
        else:
            _as_products(child)
    return module


def _variation(images: torch.Tensor) -> torch.Tensor:
    """Mean absolute difference of neighbouring pixels, smoothed at 0, by row: (r, n, C, H, W) -> (r,)."""
    across, down = images.diff(dim=-1), images.diff(dim=-2)
    return (across.square() + 1e-8).sqrt().flatten(1).mean(1) + (down.square() + 1e-8).sqrt().flatten(1).mean(1)
