"""Gradient inversion: a client's training images, or words, from the update it sent.

Images are sought by a ladder of methods, the strongest that fits (`inversion_ladder`): closed form, SPEAR and a feature decoder read the
update of the first linear layer. The optimisation in this file is the last of them. Words are read from the rows of an embedding
(`token_recovery`).

Source of the optimisation: Zhu et al. 2019 (DLG: images whose gradient is the one seen, by L-BFGS), Zhao et al. 2020 (iDLG: the label
first, from the bias gradient), Geiping et al. 2020 (cosine distance and total variation; several local steps by unrolling them).
Deviations: labels come from the head's bias with auxiliary predictions, so that several images and steps are served too; all images,
starts and clients are rows of one batched L-BFGS in float64; the distance is taken relative to the length of the update.

What it proves: with a smooth network and few images and steps, an update in the clear is the images. What it does not: that many images or
many steps hide anything because no method here gets there; where the unprotected reference fails, cells say `not_validated`.
Batches in an order that the attacker does not know (more samples than the batch size) are not attempted, nor are steps other than those of
plain SGD (`_refusal`): Adam, proximal terms, control variates, MAML, samples held back. Gradients that are sent as such (IFCA's option I)
are one step of rate 1, with their sign turned.
"""

from collections import Counter
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

from ..engine.device import in_use, placed, tensor
from ..engine.models import Model, module_there
from ..randomness import stream
from ..types import Array
from .adversary import AdversaryView
from .inversion_ladder import fitting_layer, images_by_layer, most_samples
from .label_readings import bias_span, shares_of
from .lbfgs import minimise
from .leakage import Case, Cell, Prior, Truth, cell, nothing, psnr_db, ssim
from .local_training import LocalTraining, trainings_in
from .token_recovery import embedding_of, token_cells
from .updates import Step, blind, local_of, public_model, single_steps, steps_in, unread

__all__ = ["LocalSteps", "cells", "invert_updates", "labels_from_shares", "methods_of", "unroll"]

NAME = "gradient_inversion"
MARGIN = {"image_psnr_db": 3.0, "image_ssim": 0.1, "labels_exact": 0.1}
MOST_IMAGES, MOST_STEPS, CLIENTS_PER_DRAW = 4, 10, 4
"""The optimisation is tried on so many images of a client; SPEAR on up to eight."""
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
    mean squared distance is added. It is computed on the device in use.
    Raises nothing: an update that no images make leaves a large distance.
    """
    m, n = labels.shape
    theta = tensor(np.repeat(np.asarray(starts, np.float64), restarts, axis=0))
    target = tensor(np.repeat(np.asarray(updates, np.float64), restarts, axis=0))
    y = tensor(np.repeat(labels, restarts, axis=0))
    begin = tensor(rng.random((m * restarts, n * int(np.prod(model.shape)))))
    made = unroll(model, steps)
    length = target.square().sum(1).clamp_min(1e-300)
    seen = None if beside is None else tensor(np.repeat(np.asarray(beside[1], np.float64), restarts, axis=0))

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
    distances = left.cpu().numpy().reshape(m, restarts)
    best = np.where(np.isnan(distances), np.inf, distances).argmin(axis=1)
    images = found.cpu().numpy().reshape(m, restarts, n, *model.shape)[np.arange(m), best]
    return np.clip(images, 0.0, 1.0), distances[np.arange(m), best]


def unroll(model: Model, steps: LocalSteps) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """(θ (r, d), images (r, n, *shape), labels (r, n)) -> updates (r, d), differentiable in the images."""
    exact = replace(model, dtype="float64")
    module = _as_products(deepcopy(module_there(exact, in_use().kind)).train(False))
    mean, std = placed(exact._statistic(exact.mean)), placed(exact._statistic(exact.std))

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional_call(module, parameters, ((x - mean) / std,)), y)

    losses = vmap(loss)  # gradients are taken outside: derivatives of derivatives are cheaper so than through two layers of transforms

    def update(theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        now = {name: theta[:, at : at + int(np.prod(shape))].reshape(-1, *shape).requires_grad_(True) for name, shape, at in exact.layout}
        velocity = dict.fromkeys(now, theta.new_zeros(()))
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
    """Images (n, *shape), labels (n,), and by which method images were found, by client."""

    images: Mapping[int, Array] = field(default_factory=dict)
    labels: Mapping[int, Array] = field(default_factory=dict)
    methods: Mapping[int, str] = field(default_factory=dict)


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
    methods: dict[int, str] = {}
    for size, number in sorted({(sizes[client], steps[client][0].round) for client in clients}):
        first = {client: steps[client][0] for client in clients if (sizes[client], steps[client][0].round) == (size, number)}
        for client, step in first.items():
            labels[client] = labels_from_shares(shares_of(step, prior, model, prior.labels_per_client[client]), size)
        found = {} if clipped else _by_layer(first, prior, model, size)
        left = {client: step for client, step in first.items() if client not in found}
        if size > MOST_IMAGES:  # too many for the optimisation, which ends below the mean image
            found |= dict.fromkeys(left, (np.repeat(prior.x.mean(axis=0, dtype=np.float64)[None], size, axis=0), "mean image"))
        elif left:
            found |= _by_optimisation(left, labels, prior, model, restarts, clipped)
        for client, (made, method) in found.items():
            images[client], methods[client] = made, method
    return Guess(images, labels, methods)


def _plan(first: Mapping[int, Step], prior: Prior) -> tuple[LocalSteps, int]:
    """How clients asked in the same round trained, and the number of that round."""
    step = next(iter(first.values()))
    train = local_of(step, prior).train
    return LocalSteps(train.epochs, train.lr, train.momentum, train.weight_decay), step.round


def _by_layer(first: Mapping[int, Step], prior: Prior, model: Model, size: int) -> dict[int, tuple[Array, str]]:
    """Images (size, *shape) and the method, of those clients on whom a rung above the optimisation succeeds."""
    layer, (how, number) = fitting_layer(model), _plan(first, prior)
    if layer is None:
        return {}
    starts, updates = (np.stack([getattr(step, part) for step in first.values()]) for part in ("start", "update"))
    rng = stream(prior.seed, f"inversion ladder, {size} images", number)
    found = images_by_layer(model, layer, starts, updates, size, prior.x, rng, steps=how.count, lr=how.lr, weight_decay=how.weight_decay)
    return {client: one for client, one in zip(first, found, strict=True) if one is not None}


def _by_optimisation(
    first: Mapping[int, Step], labels: Mapping[int, Array], prior: Prior, model: Model, restarts: int, clipped: bool
) -> dict[int, tuple[Array, str]]:
    """The same by the last rung, for all clients."""
    (how, number), size = _plan(first, prior), len(labels[next(iter(first))])
    made, _ = invert_updates(
        model, np.stack([step.start for step in first.values()]), np.stack([step.update for step in first.values()]),
        np.stack([labels[client] for client in first]), how, stream(prior.seed, f"gradient inversion, {size} images", number),
        restarts=restarts, distance="cosine" if clipped else "squared", total_variation=SMOOTH if clipped else 0.0,
    )  # fmt: skip
    return {client: (one, f"optimisation of {restarts} start(s)") for client, one in zip(first, made, strict=True)}


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
    if case.prior.config is not None and embedding_of(public_model(case.prior)) is not None:
        return token_cells(case, NAME), None
    prior, why = case.prior, _refusal(case) or blind(case.view)
    if why:
        return [nothing(case, NAME, "image_psnr_db", why)], None
    model = public_model(prior)
    mine, theirs = (single_steps(steps_in(view, model.dimension, case)) for view in (case.view, case.reference))
    apart = (set(mine) & set(theirs)) - set(case.view.coalition)
    if not apart:
        why = unread(case.view, model.dimension) or "no single client's update can be read in this view"
        return [nothing(case, NAME, "image_psnr_db", why)], None
    assert prior.config is not None  # as `_refusal` found
    private = prior.config.privacy.unit != "none"
    most = MOST_IMAGES if private else max(MOST_IMAGES, most_samples(fitting_layer(model)))
    most = min(most, *(local_of(mine[client][0], prior).train.batch_size or most for client in apart))
    few = sorted(client for client in apart if prior.samples_per_client[client] <= most)
    if not few:
        words = f"not attempted: no client has at most {most} samples in one batch; that proves nothing of others"
        return [nothing(case, NAME, "image_psnr_db", words)], None
    clients, restarts = few[: CLIENTS_PER_DRAW * case.budget.draws], case.budget.rounds
    guesses = [_guess(steps, prior, clients, model, restarts, private) for steps in (mine, None)]
    same = not private and all(np.array_equal(mine[c][0].update, theirs[c][0].update) for c in clients)
    guesses.append(guesses[0] if same else _guess(theirs, prior.unprotected(), clients, model, restarts))
    count = sum(prior.samples_per_client[client] for client in clients)
    steps = {local_of(mine[client][0], prior).train.epochs for client in clients}
    note = (
        f"{count} image(s) of {len(clients)} client(s), {' or '.join(map(str, sorted(steps)))} local step(s), "
        f"by {methods_of(guesses[0])}, first update; {prior.description}; baseline: the mean auxiliary image"
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


def methods_of(guess: Guess) -> str:
    """By which methods images were found, in words; with the number of clients where there are several."""
    counts = Counter(guess.methods.values())
    return " and ".join(name + (f" ({count} clients)" if len(counts) > 1 else "") for name, count in counts.most_common())


def _nearest(truth: Array, images: Array) -> Array:
    return np.asarray(max(images, key=lambda image: psnr_db(truth, image)))


def _refusal(case: Case) -> str:
    """Why this run is not attempted; empty if it is."""
    if case.prior.config is None:
        return "not attempted: the training settings are not known"
    model, trainings = public_model(case.prior), trainings_in(case.reference)
    if bias_span(model) is None:
        return "not attempted: the model's head has no bias to read labels from"
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
