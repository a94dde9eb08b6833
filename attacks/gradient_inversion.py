"""Gradient inversion: a client's training images from the update it sent.

Source: Zhu et al. 2019 (DLG: images whose gradient is the one seen, by L-BFGS), Zhao et al. 2020 (iDLG: the label first, from the bias
gradient), Geiping et al. 2020 (cosine distance and total variation; several local steps by unrolling them). Deviations: labels come from
the head's bias with auxiliary predictions, so that several images and steps are served too; all images, starts and clients are rows of one
batched L-BFGS in float64; the distance is taken relative to the length of the update.

What it proves: with a smooth network and few images and steps, an update in the clear is the images. What it does not: that networks with
ReLU and pooling, many images or many steps hide anything because this optimisation does not get there; their cells say `not_validated`.
Batches in an order that the attacker does not know (more samples than the batch size) are not attempted, nor are steps other than those of
plain SGD (`_refusal`): Adam, proximal terms, control variates, MAML, samples held back. Gradients that are sent as such (IFCA's option I)
are one step of rate 1, with their sign turned.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional

from ..engine.models import Model, build_module
from ..randomness import stream
from ..types import Array
from .adversary import AdversaryView
from .label_readings import bias_span, shares_of
from .lbfgs import minimise
from .leakage import Case, Cell, Prior, Truth, cell, nothing, psnr_db, ssim
from .local_training import LocalTraining, trainings_in
from .updates import Step, local_of, public_model, steps_in

__all__ = ["LocalSteps", "cells", "invert_updates", "labels_from_shares", "unroll"]

NAME = "gradient_inversion"
MARGIN = {"image_psnr_db": 3.0, "image_ssim": 0.1, "labels_exact": 0.1}
MOST_IMAGES, MOST_STEPS, CLIENTS_PER_DRAW = 4, 10, 4
ITERATIONS = 600
SMOOTH = 1e-4
"""Weight of the total variation where updates have noise."""
ROWS_AT_ONCE = 32
"""Rows of one tensor program; more need more memory than they save time."""


@dataclass(frozen=True)
class LocalSteps:
    """How a model became an update: `count` full-batch steps of SGD as in `training.Train` (1 step, rate 1: the negative gradient)."""

    count: int = 1
    lr: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0


# --- the mathematics, for updates from anywhere -------------------------------------------------------------------------------------


def invert_updates(
    model: Model, starts: Array, updates: Array, labels: Array, steps: LocalSteps, rng: np.random.Generator, *, restarts: int = 1,
    iterations: int = ITERATIONS, distance: Literal["squared", "cosine"] = "squared", total_variation: float = 0.0,
    beside: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], Array] | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Images (m, n, *shape) in [0, 1] whose `steps` on `starts` (m, d) give nearly `updates` (m, d), and the distances left (m,).

    `labels` (m, n) are those of the n images of each of m updates. Each of `restarts` begins at uniform noise; the one that ends nearest is
    returned. `beside` are further values of images, (θ (r, d), images (r, n, *shape)) -> (r, k), and what was seen of them (m, k), whose
    mean squared distance is added. Raises nothing: an update that no images make leaves a large distance.
    """
    m, n = labels.shape
    theta = torch.tensor(np.repeat(np.asarray(starts, np.float64), restarts, axis=0))
    target = torch.tensor(np.repeat(np.asarray(updates, np.float64), restarts, axis=0))
    y = torch.tensor(np.repeat(labels, restarts, axis=0))
    begin = torch.tensor(rng.random((m * restarts, n * int(np.prod(model.shape)))))
    made = unroll(model, steps)
    length = target.square().sum(1).clamp_min(1e-300)
    seen = None if beside is None else torch.tensor(np.repeat(np.asarray(beside[1], np.float64), restarts, axis=0))

    def objective(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, slopes = [], []
        for piece, which in zip(torch.split(x, ROWS_AT_ONCE), torch.split(rows, ROWS_AT_ONCE), strict=True):
            point = piece.detach().requires_grad_(True)
            images = point.view(len(point), n, *model.shape)
            mine, aim = made(theta[which], images, y[which]), target[which]
            if distance == "squared":
                apart = (mine - aim).square().sum(1) / length[which]
            else:
                apart = 1 - functional.cosine_similarity(mine, aim, dim=1)
            whole = apart + total_variation * _variation(images) if total_variation else apart
            if beside is not None and seen is not None:
                whole = whole + (beside[0](theta[which], images) - seen[which]).square().mean(1)
            values.append(whole.detach())
            slopes.append(torch.autograd.grad(whole.sum(), point)[0])
        return torch.cat(values), torch.cat(slopes)

    found, left = minimise(objective, begin, iterations, tolerance=1e-24 if distance == "squared" else 1e-14)
    distances = left.numpy().reshape(m, restarts)
    best = np.where(np.isnan(distances), np.inf, distances).argmin(axis=1)
    images = found.numpy().reshape(m, restarts, n, *model.shape)[np.arange(m), best]
    return np.clip(images, 0.0, 1.0), distances[np.arange(m), best]


def unroll(model: Model, steps: LocalSteps) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """(θ (r, d), images (r, n, *shape), labels (r, n)) -> updates (r, d), differentiable in the images."""
    exact = replace(model, dtype="float64")
    module = _as_products(deepcopy(build_module(exact)).train(False))
    mean, std = exact._statistic(exact.mean), exact._statistic(exact.std)

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional_call(module, parameters, ((x - mean) / std,)), y)

    losses = vmap(loss)  # gradients are taken outside: derivatives of derivatives are cheaper so than through two layers of transforms

    def update(theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        now = {name: theta[:, at : at + int(np.prod(shape))].reshape(-1, *shape).requires_grad_(True) for name, shape, at in exact.layout}
        velocity = dict.fromkeys(now, torch.zeros((), dtype=torch.float64))
        for _ in range(steps.count):
            slopes = torch.autograd.grad(losses(now, x, y).sum(), list(now.values()), create_graph=True)
            velocity = {
                name: steps.momentum * velocity[name] + slope + steps.weight_decay * now[name]
                for name, slope in zip(now, slopes, strict=True)
            }
            now = {name: now[name] - steps.lr * velocity[name] for name in now}
        return torch.cat([now[name].flatten(1) for name, _, _ in exact.layout], dim=1) - theta

    return update


class _Products(nn.Module):
    """A convolution as a matrix product with the patches of its input: as rows of a batch, and differentiated twice, the cheaper form."""

    def __init__(self, like: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias, self.like = like.weight, like.bias, (like.kernel_size, like.padding, like.stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, padding, stride = self.like
        patches = functional.unfold(x, size, padding=padding, stride=stride)  # type: ignore[arg-type]  # a pair each
        made = self.weight.flatten(1) @ patches
        made = made if self.bias is None else made + self.bias[:, None]
        rows = (x.shape[-2] + 2 * padding[0] - size[0]) // stride[0] + 1  # type: ignore[operator]
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


def labels_from_shares(shares: Array, count: int) -> Array:
    """`count` labels, increasing, in the shares (classes,) nearest to the given ones: largest remainders first."""
    exact = np.maximum(shares, 0.0) / max(float(np.maximum(shares, 0.0).sum()), 1e-12) * count
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(-(exact - counts), kind="stable")[: count - int(counts.sum())]] += 1
    return np.repeat(np.arange(len(shares)), counts)


# --- the attack ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Guess:
    """Images (n, *shape) and labels (n,) by client."""

    images: Mapping[int, Array] = field(default_factory=dict)
    labels: Mapping[int, Array] = field(default_factory=dict)


def guess(view: AdversaryView | None, prior: Prior, clients: Sequence[int], model: Model, restarts: int) -> Guess:
    """The images behind each client's first update. Without a view: the mean auxiliary image, and the commonest auxiliary label."""
    clipped = prior.config is not None and prior.config.privacy.unit != "none"
    return _guess(None if view is None else steps_in(view, model.dimension), prior, clients, model, restarts, clipped)


def _guess(
    steps: Mapping[int, Sequence[Step]] | None, prior: Prior, clients: Sequence[int], model: Model, restarts: int, clipped: bool = False
) -> Guess:
    """As `guess`. Of updates that were `clipped` (and noised) the length says little, so their direction is what images are to meet."""
    sizes = {client: prior.samples_per_client[client] for client in clients}
    if steps is None:
        mean, label = prior.x.mean(axis=0, dtype=np.float64), int(np.bincount(prior.y).argmax())
        return Guess({c: np.repeat(mean[None], n, axis=0) for c, n in sizes.items()}, {c: np.full(n, label) for c, n in sizes.items()})
    assert prior.config is not None  # checked by the caller
    images: dict[int, Array] = {}
    labels: dict[int, Array] = {}
    for size, number in sorted({(sizes[client], steps[client][0].round) for client in clients}):
        first = {client: steps[client][0] for client in clients if (sizes[client], steps[client][0].round) == (size, number)}
        group = list(first)
        train = local_of(first[group[0]], prior).train
        how = LocalSteps(train.epochs, train.lr, train.momentum, train.weight_decay)
        for client, step in first.items():
            labels[client] = labels_from_shares(shares_of(step, prior, model, prior.labels_per_client[client]), size)
        made, _ = invert_updates(
            model, np.stack([first[c].start for c in group]), np.stack([first[c].update for c in group]),
            np.stack([labels[c] for c in group]), how, stream(prior.seed, f"gradient inversion, {size} images", number), restarts=restarts,
            distance="cosine" if clipped else "squared", total_variation=SMOOTH if clipped else 0.0,
        )  # fmt: skip
        images |= dict(zip(group, made, strict=True))
    return Guess(images, labels)


def matched(truth: Array, images: Array) -> list[tuple[Array, Array]]:
    """Pairs of true and recovered images (n, *shape each), by the one-to-one matching of largest total PSNR."""
    table = np.array([[psnr_db(one, other) for other in images] for one in truth])
    rows, columns = linear_sum_assignment(-table)
    return [(truth[i], images[j]) for i, j in zip(rows, columns, strict=True)]


def score(guess: Guess, truth: Truth, clients: Sequence[int], metric: str) -> Array:
    """The mean over a client's images of PSNR or SSIM, or whether all its labels are right, by client."""
    if metric == "labels_exact":
        labels = {c: np.bincount(guess.labels[c], minlength=len(truth.label_counts[c])) for c in clients}
        return np.array([float(np.array_equal(labels[c], truth.label_counts[c])) for c in clients])
    compare = psnr_db if metric == "image_psnr_db" else ssim
    return np.array([np.mean([compare(*pair) for pair in matched(truth.data[c][0], guess.images[c])]) for c in clients])


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """Images of clients with few samples, from the first update of each that can be read."""
    prior, why = case.prior, _refusal(case)
    if why:
        return [nothing(case, NAME, "image_psnr_db", why)], None
    model = public_model(prior)
    mine, theirs = (_single(steps_in(view, model.dimension, case)) for view in (case.view, case.reference))
    apart = (set(mine) & set(theirs)) - set(case.view.coalition)
    if not apart:
        return [nothing(case, NAME, "image_psnr_db", "no single client's update can be read in this view")], None
    assert prior.config is not None  # as `_refusal` found
    most = min(MOST_IMAGES, *(local_of(mine[client][0], prior).train.batch_size or MOST_IMAGES for client in apart))
    few = sorted(client for client in apart if prior.samples_per_client[client] <= most)
    if not few:
        words = f"not attempted: no client has at most {most} samples in one batch; that proves nothing of others"
        return [nothing(case, NAME, "image_psnr_db", words)], None
    clients, restarts = few[: CLIENTS_PER_DRAW * case.budget.draws], case.budget.rounds
    private = prior.config.privacy.unit != "none"
    guesses = [_guess(steps, prior, clients, model, restarts, private) for steps in (mine, None)]
    same = not private and all(np.array_equal(mine[c][0].update, theirs[c][0].update) for c in clients)
    guesses.append(guesses[0] if same else _guess(theirs, prior.unprotected(), clients, model, restarts))
    count = sum(prior.samples_per_client[client] for client in clients)
    steps = {local_of(mine[client][0], prior).train.epochs for client in clients}
    note = (
        f"{count} image(s) of {len(clients)} client(s), {' or '.join(map(str, sorted(steps)))} local step(s), {restarts} start(s), "
        f"first update; {prior.description}; baseline: the mean auxiliary image"
    )
    metrics = ["image_psnr_db", "image_ssim", "labels_exact"]
    if np.isnan(ssim(case.truth.data[clients[0]][0][0], case.truth.data[clients[0]][0][0])):
        metrics.remove("image_ssim")
    figures = []
    for metric in metrics:
        scores = [score(one, case.truth, clients, metric) for one in guesses]
        figures.append(cell(case, NAME, metric, *scores, margin=MARGIN[metric], share=metric == "labels_exact", note=note))
    arrays = {
        "clients": np.array(clients),
        "truth": np.stack([case.truth.data[c][0][0] for c in clients]),
        "recovered": np.stack([_nearest(case.truth.data[c][0][0], guesses[0].images[c]) for c in clients]),
        "baseline": guesses[1].images[clients[0]][0],
    }
    return figures, arrays


def _single(steps: Mapping[int, Sequence[Step]]) -> dict[int, list[Step]]:
    """The steps that are one client's own, of clients that have any."""
    found = {client: [step for step in several if len(step.members) == 1] for client, several in steps.items()}
    return {client: several for client, several in found.items() if several}


def _nearest(truth: Array, images: Array) -> Array:
    return np.asarray(max(images, key=lambda image: psnr_db(truth, image)))


def _refusal(case: Case) -> str:
    """Why this run is not attempted; empty if it is."""
    if case.prior.config is None:
        return "not attempted: the training settings are not known"
    model, trainings = public_model(case.prior), trainings_in(case.reference)
    if bias_span(model) is None:
        return "not attempted: the model's head has no bias to read labels from"
    if any(isinstance(layer, nn.LSTM | nn.Embedding) for layer in build_module(model).modules()):
        return "not attempted: inputs are words, not numbers"
    if case.prior.config.training.optimizer == "adam" or any(one.train.optimizer == "adam" for one in trainings.all):
        return "not attempted: Adam's steps keep little more than a gradient's signs, too little for this attack; that proves nothing"
    if trainings.first is None:
        passed = any(message.operation == "relay" for message in case.reference.messages)
        return "not attempted: clients send models to each other, none to be averaged; that proves nothing of them" if passed else ""
    if not all(map(_is_plain, trainings.all)):
        return "not attempted: clients do not take plain steps on all of their samples; that proves nothing of them"
    epochs = trainings.first.train.epochs
    if epochs > MOST_STEPS:
        return f"not attempted: {epochs} local steps are more than {MOST_STEPS}; that proves nothing of them"
    return ""


def _is_plain(local: LocalTraining) -> bool:
    """Whether clients take plain steps of SGD on all of their samples, and updates hold nothing else."""
    drawn = local.train.prox and local.train.epochs > 1  # one step from the anchor has no proximal term yet
    return not (local.beyond or local.held_back or local.train.maml_lr or drawn)
