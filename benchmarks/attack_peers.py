"""Our attacks beside published ones, on the same models and updates.

    python -m benchmarks attack_peers [--trials 3] [--iterations 24000]

- Images: `attacks.inversion` beside `breaching` (Geiping et al., "Inverting Gradients") with its own settings, its full number of
  iterations and the true labels, on updates of LeNet-5 and of an MLP for MNIST, by PSNR after the one-to-one matching. `breaching` needs
  no more than its own folder on the path (`pip install --no-deps breaching`).
- Members: LiRA (Carlini et al. 2022, eq. 4, with a variance for each sample and with one for all) and RMIA as privacy-meter and LeakPro
  compute them from the same shadow models of MNIST: by AUC and TPR at 1 % FPR, means over all models as targets, standard errors beside.

Seconds are processor time of one thread. What is not installed is named.
"""

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from scipy import stats

from cflpriv.attacks.inversion.gradient_inversion import invert_updates
from cflpriv.attacks.inversion.image_search import LocalSteps
from cflpriv.attacks.inversion.inversion_ladder import fitting_layer, images_by_layer
from cflpriv.attacks.inversion.sum_batches import matched_psnr_db, psnr_table_db
from cflpriv.attacks.membership.member_scores import confidences, deal_in_pairs, lira, rmia, roc, shadow_models
from cflpriv.data import load_dataset
from cflpriv.engine.models import Model
from cflpriv.tasks.training import Train
from cflpriv.types import Array

__all__ = ["main"]

RATE = 0.1
"""The learning rate of the one step that an update is."""
AUXILIARY = 2000
PAIRS, SAMPLES, EPOCHS = 16, 400, 40
"""Pairs of models, samples of which each model has half, and passes over them."""
GAMMA = 2.0
"""RMIA's threshold in privacy-meter and LeakPro."""


class _Settings(SimpleNamespace):
    """Settings as the peer reads them: by attribute, and as a mapping."""

    def keys(self) -> Any:
        return vars(self).keys()

    def items(self) -> Any:
        return vars(self).items()

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]


def peers_attack() -> Any:
    """`breaching`'s attack by optimisation, without the packages that its data sets and language models need; None if not installed."""
    spec = find_spec("breaching")
    if spec is None or not spec.submodule_search_locations:
        return None
    for name, inside in (("breaching", ""), ("breaching.cases", "/cases"), ("breaching.cases.models", "/cases/models")):
        module = ModuleType(name)
        module.__path__ = [spec.submodule_search_locations[0] + inside]
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
    logging.getLogger("breaching").setLevel(logging.ERROR)
    from breaching.attacks.optimization_based_attack import OptimizationBasedAttacker

    return OptimizationBasedAttacker


def peers_settings(iterations: int) -> _Settings:
    """Those of the peer's `invertinggradients.yaml` over its defaults."""
    return _Settings(
        type="invertinggradients", attack_type="optimization", label_strategy="iDLG", text_strategy="run-embedding",
        token_recovery="from-labels", init="randn", normalize_gradients=False, augmentations=None, differentiable_augmentations=False,
        objective=_Settings(type="cosine-similarity", scale=1.0, task_regularization=0.0),
        restarts=_Settings(num_trials=1, scoring="cosine-similarity"),
        optim=_Settings(
            optimizer="adam", signed="hard", step_size=0.1, boxed=True, max_iterations=iterations, step_size_decay="step-lr",
            langevin_noise=0.0, warmup=0, grad_clip=None, callback=10**9,
        ),
        regularization=_Settings(total_variation=_Settings(scale=0.2, inner_exp=1, outer_exp=1)),
        impl=_Settings(dtype="float", mixed_precision=False, JIT=None),
    )  # fmt: skip


def images_of_peer(attack: Any, model: Model, start: Array, update: Array, y: Array, iterations: int) -> Array:
    """Images (n, *shape) in [0, 1] from one update (d,)."""
    module = model.load(start)
    gradients, at = [], 0
    for parameter in module.parameters():
        gradients.append(torch.tensor(-update[at : at + parameter.numel()] / RATE).float().reshape(parameter.shape))
        at += parameter.numel()
    about = _Settings(shape=model.shape, mean=model.mean, std=model.std, modality="vision", classes=model.classes)
    payload = [{"parameters": [parameter.detach() for parameter in module.parameters()], "buffers": None, "metadata": about}]
    metadata = {"num_data_points": len(y), "labels": torch.tensor(y), "local_hyperparams": None}
    shared = [{"gradients": gradients, "buffers": None, "metadata": metadata}]
    attacker = attack(module, torch.nn.CrossEntropyLoss(), peers_settings(iterations))
    for smooth in attacker.regularizers:  # total variation is written for three channels
        smooth.groups, smooth.weight = model.shape[0], smooth.weight[: 2 * model.shape[0]]
    found, _ = attacker.reconstruct(payload, shared, {}, dryrun=False)
    mean, std = (np.asarray(part, np.float64)[None, :, None, None] for part in (model.mean, model.std))
    return np.clip(np.asarray(found["data"].detach().numpy(), np.float64) * std + mean, 0.0, 1.0)


def images_of_ours(model: Model, start: Array, update: Array, y: Array, auxiliary: Array, seed: int) -> Array:
    """The same by the ladder, and where no rung fits by the optimisation."""
    layer, rng = fitting_layer(model), np.random.default_rng(seed)
    if layer is not None:
        (found,) = images_by_layer(model, layer, start[None], update[None], len(y), auxiliary, rng, lr=RATE)
        if found is not None:
            return found[0]
    made, _ = invert_updates(model, start[None], update[None], y[None], LocalSteps(1, RATE), rng, restarts=4)
    return made[0]


def inversions(trials: int, iterations: int) -> Iterator[str]:
    """The rows on images."""
    data = load_dataset("mnist")
    x, y = data.x_train.astype(np.float64), data.y_train
    attack = peers_attack()
    if attack is None:
        yield "breaching is not installed: its rows are left out"
    for name in ("lenet5", "mlp"):
        model = Model(name, x.shape[1:], 10, mean=(0.1307,), std=(0.3081,), **({"hidden": 100} if name == "mlp" else {}))
        for size in (1, 4):
            figures: dict[str, list[tuple[float, float]]] = {}
            for trial in range(trials):
                rng = np.random.default_rng([trial, size])
                rows = rng.permutation(len(x))[: AUXILIARY + size]
                true, labels, auxiliary = x[rows[:size]], y[rows[:size]], x[rows[size:]]
                start = model.init(trial)
                update = updates_of(model, start, true, labels)
                ways: dict[str, Callable[[], Array]] = {
                    "ours": partial(images_of_ours, model, start, update, labels, auxiliary, trial),
                    "mean image": partial(np.repeat, auxiliary.mean(axis=0)[None], size, axis=0),
                }
                if attack is not None:
                    ways["breaching"] = partial(images_of_peer, attack, model, start, update, labels, iterations)
                for way, made in ways.items():
                    began = time.process_time()
                    psnr = float(matched_psnr_db(psnr_table_db(true, made())).mean())
                    figures.setdefault(way, []).append((psnr, time.process_time() - began))
            for way, pairs in figures.items():
                each, seconds = np.array(pairs).T
                figure = f"PSNR {each.mean():6.1f} dB (worst {each.min():5.1f})"
                yield f"images {name:<7} batch {size}  {way:<12} {figure}  {seconds.mean():8.2f} s"


def updates_of(model: Model, start: Array, x: Array, y: Array) -> Array:
    """The update (d,) of one full-batch step of plain torch."""
    module = model.load(start)
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    loss = torch.nn.functional.cross_entropy(module(model.inputs(x)), torch.tensor(y))
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    return np.concatenate([-RATE * gradient.double().numpy().ravel() for gradient in gradients])


# --- members ------------------------------------------------------------------------------------------------------------------------


def lira_by_sample(target: Array, shadow: Array, inside: Array) -> Array:
    """LiRA with a variance of its own for each sample, as both peers compute it where there are enough shadows."""
    ratio = np.zeros(len(target))
    for sign, mask in ((1.0, inside), (-1.0, ~inside)):
        values = np.where(mask, shadow, np.nan)
        ratio += sign * stats.norm.logpdf(target, np.nanmean(values, axis=0), np.nanstd(values, axis=0) + 1e-30)
    return ratio


def rmia_of_meters(target: Array, shadow: Array, others: Array, shadow_others: Array) -> Array:
    """RMIA with ratios of probabilities and γ = 2, as both peers compute it online."""
    p, q, of_others, by_others = (1 / (1 + np.exp(-values)) for values in (target, shadow, others, shadow_others))
    ratio, beside = p / np.maximum(q.mean(axis=0), 1e-300), of_others / np.maximum(by_others.mean(axis=0), 1e-300)
    return np.asarray((ratio[:, None] / beside[None, :] > GAMMA).mean(axis=1))


def members() -> Iterator[str]:
    """The rows on members."""
    data = load_dataset("mnist")
    rows = np.random.default_rng(0).permutation(len(data.x_train))
    x, y = data.x_train[rows[:SAMPLES]], data.y_train[rows[:SAMPLES]]
    z, z_labels = data.x_train[rows[SAMPLES : SAMPLES + AUXILIARY]], data.y_train[rows[SAMPLES : SAMPLES + AUXILIARY]]
    model = Model("mlp", x.shape[1:], 10, hidden=64, mean=(0.1307,), std=(0.3081,))
    inside = deal_in_pairs(SAMPLES, PAIRS, np.random.default_rng(1))
    vectors = shadow_models(Train(model, epochs=EPOCHS, batch_size=20, lr=0.05), x, y, inside, model.init(0), 0)
    seen, beside = confidences(model, vectors, x, y), confidences(model, vectors, z, z_labels)
    pair = np.arange(2 * PAIRS) % PAIRS
    ways: dict[str, Callable[[Array, Array, Array, Array, Array], Array]] = {
        "ours: LiRA": lambda a, s, o, so, i: lira(a, s, i),
        "ours: RMIA": lambda a, s, o, so, i: rmia(a, s, o, so),
        "peers' formula: LiRA, a variance each": lambda a, s, o, so, i: lira_by_sample(a, s, i),
        "peers' formula: RMIA, online, γ = 2": lambda a, s, o, so, i: rmia_of_meters(a, s, o, so),
        "loss": lambda a, s, o, so, i: a,
    }
    for way, scores in ways.items():
        began = time.process_time()
        rocs = [roc(scores(seen[i], seen[pair != pair[i]], beside[i], beside[pair != pair[i]], inside[pair != pair[i]]), inside[i])
                for i in range(2 * PAIRS)]  # fmt: skip
        seconds = (time.process_time() - began) / len(rocs)
        aucs, found = (np.array([getattr(each, of) for each in rocs]) for of in ("auc", "tpr"))
        errors = [float(values.std() / np.sqrt(PAIRS)) for values in (aucs, found)]
        yield f"members {way:<38} AUC {aucs.mean():.3f} ± {errors[0]:.3f}  TPR at 1 % {found.mean():.3f} ± {errors[1]:.3f}  {seconds:.4f} s"


def main(words: list[str]) -> int:
    """Print all rows as they are measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks attack_peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=24_000, help="of breaching's search; its own number")
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    for rows in (members(), inversions(asked.trials, asked.iterations)):
        for line in rows:
            print(line, flush=True)
    return 0
