"""FedRC: a mixture of k models found by expectation-maximisation in which a model gains nothing by specialising in labels.

Source: Guo, Tang & Lin 2024 (ICML), "FedRC: Tackling Diverse Distribution Shifts Challenge in Federated Learning by Robust Clustering"
(arXiv 2301.12379), the updates of γ, ω, φ and C, as in the authors' code (`client.py`, `FedRC`, and `run_experiment.py`). With f the loss
and C_{y;k} the share of label y in cluster k,

- γ_ijk ∝ ω_ik exp(−f(x_ij, y_ij; φ_k)) / C_{y_ij;k}, summing to 1 over k for each sample j of client i;
- ω_ik = Σ_j γ_ijk / n_i;
- each client takes τ local steps on (1/n_i) Σ_j γ_ijk f(x_ij, y_ij; φ_k) for every k, and φ_k moves by the mean of the clients' movements;
- C_{y;k} = Σ_{i,j: y_ij = y} γ_ijk / Σ_{i,j} γ_ijk over all clients, at first uniform.

So clusters differ in what a label looks like or means, not in which labels there are: dividing by C_{y;k} takes that gain away.

All k models and the label sums are one vector, and a client's step is the new one minus the one it was sent. So a round is FedAvg of a
longer vector: one `mean` over the cohort, which transformed sums take as they are. γ and ω stay with their clients.

Deviations, each for a reason:
- A client uses the model of its largest ω_ik. The authors' code mixes the predictions of all models by ω.
- With partial participation C is that of the cohort. γ is computed once a round, before the local steps.
- Clusters are not removed or added, as in the paper's main experiments.
- Label shares below 1e-8 count as 1e-8, as in the authors' code.
- Local steps are SGD with momentum and weight decay; other settings of `[training]` are refused by name.
- k = 3 as in the authors' example.

What it reveals, by which operation: `mean` shows the movements of k models and the label shares of each cluster. In the clear it shows
each client's: its label histogram, and by the size of the movements its ω. Under secure sums there remain sums over the cohort, in which a
client alone in a cluster would show as that cluster's movement. So clients refuse them without client-level privacy, whose noise is inside
the sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch.nn import functional

from ..contract.handles import Shared
from ..contract.operations import Federation
from ..contract.transcript import RoundRecord
from ..engine import Result, TaskInput
from ..engine.device import cpu_in_use, using
from ..engine.models import Model
from ..engine.own_modules import slopes
from ..errors import InputError, TrainingDiverged
from ..keys import Key, ranged
from ..tasks.evaluation import EvaluateUsed
from ..tasks.training import Train
from ..types import Array, Parts
from .fedavg import FedAvgState, Weights, average_all, schedule_of_averaging
from .fedsoft import losses_of_models
from .interface import Algorithm, AlgorithmSpec, Served
from .shared.counted_sums import admit_by_choice

__all__ = ["EvaluateRobust", "RobustStep", "fedrc", "label_shares", "posteriors"]

MIXTURE = "fedrc mixture"
"""Under this name clients keep ω_i, shape (k,)."""
SMALLEST_SHARE = 1e-8


def posteriors(losses: Array, mixture: Array, shares: Array) -> Array:
    """γ (k, n) of losses (k, n) for a client's mixture ω (k,) and the shares C (k, n) of each sample's label in the clusters."""
    with np.errstate(divide="ignore"):
        logs = np.log(mixture)[:, None] - losses - np.log(shares)
    highest = logs.max(axis=0)
    weights = np.exp(logs - np.where(np.isfinite(highest), highest, 0.0))
    sums = weights.sum(axis=0)
    return np.asarray(np.where(sums > 0, weights / np.where(sums > 0, sums, 1.0), 1 / len(losses)))


def label_shares(sums: Array) -> Array:
    """C (k, classes) of sums (k, classes) of γ by label."""
    floored = np.maximum(np.asarray(sums, np.float64), SMALLEST_SHARE)
    return np.asarray(floored / floored.sum(axis=1, keepdims=True))


@dataclass(frozen=True)
class RobustStep:
    """One round of a client: γ, ω, and for each of the k models local steps on samples weighted by γ.

    Given: "model" (k (d + classes),), the models and the sums of γ by label over the number of samples. Part: "update", the new vector
    minus the given one. Kept: "trained" (d,), the local model of the largest ω, and ω under `MIXTURE`.
    """

    train: Train
    k: int

    beyond: ClassVar[str] = "training weighted by which model suits each sample"
    parts: ClassVar[Parts] = {"update": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ("trained", MIXTURE)

    @property
    def reads(self) -> tuple[str, ...]:
        return (MIXTURE,)

    @property
    def spread(self) -> float:
        """Of the weights inside the update: a model may suit the samples of one client alone, which then is all of its movement."""
        return inf if self.k > 1 else 1.0

    def run(self, task_input: TaskInput) -> Result:
        model, labels = self.train.model, task_input.data.y_train
        models, sums = _unpacked(task_input.array("model"), self.k, model)
        mixture = task_input.memory[MIXTURE] if MIXTURE in task_input.memory else np.full(self.k, 1 / self.k)
        gamma = posteriors(losses_of_models(model, list(models), task_input.data), mixture, label_shares(sums)[:, labels])
        mixture = gamma.mean(axis=1)
        with using(cpu_in_use()):  # as `Train.run`
            moved = np.stack([self._moved(task_input, vector, weights) for vector, weights in zip(models, gamma, strict=True)])
        seen = np.stack([np.bincount(labels, weights, minlength=model.classes) for weights in gamma]) / len(labels)
        update = np.concatenate([moved.ravel(), (seen - sums).astype(moved.dtype).ravel()])
        if not np.isfinite(update).all():
            if self.train.on_divergence == "skip":
                return {}
            raise TrainingDiverged(
                f"client {task_input.data.id}: training in round {task_input.streams.round} ended with parameters that are not finite; "
                f"lower training.lr (now {self.train.lr}), or set training.on_divergence = 'skip'"
            )
        own = int(mixture.argmax())
        return {"update": update, "trained": models[own] + moved[own], MIXTURE: mixture}

    def _moved(self, task_input: TaskInput, start: Array, weights: Array) -> Array:
        """By how much a model (d,) moves in local steps on losses weighted by `weights` (n,), over the size of the batch."""
        train, model = self.train, self.train.model
        module = model.lent(start, training=True)
        parameters = list(module.parameters())
        x, y = model.inputs(task_input.data.x_train), torch.from_numpy(task_input.data.y_train)
        factors = torch.from_numpy(weights).to(x.dtype)
        velocities = [torch.zeros_like(parameter) for parameter in parameters]
        with torch.random.fork_rng(devices=[]):  # for modules that draw
            torch.default_generator.manual_seed(int(task_input.streams("torch").integers(2**63)))
            for batch in train.batches(task_input):
                losses = functional.cross_entropy(module(x[batch]), y[batch], reduction="none")
                gradients = slopes((losses * factors[batch]).sum() / len(batch), parameters)
                with torch.no_grad():
                    for parameter, velocity, gradient in zip(parameters, velocities, gradients, strict=True):
                        velocity.mul_(train.momentum).add_(gradient).add_(parameter, alpha=train.weight_decay)
                        parameter.sub_(velocity, alpha=train.lr)
        return np.asarray(model.store(module) - start)


@dataclass(frozen=True)
class EvaluateRobust(EvaluateUsed):
    """`Evaluate` of the model with the client's largest ω. Parts: those of `Evaluate`, and "choice" (), the number of that model.

    A client that keeps no ω yet takes that of one step from equal parts.
    """

    k: int

    @property
    def parts(self) -> Parts:
        return {**super().parts, "choice": "choice"}

    @property
    def reads(self) -> tuple[str, ...]:
        return (MIXTURE,)

    def used(self, task_input: TaskInput) -> Array:
        return self.offered(task_input)[self._choice(task_input)]

    def offered(self, task_input: TaskInput) -> list[Array]:
        """The models (d,) that the client picks from."""
        return list(_unpacked(task_input.array("model"), self.k, self.model)[0])

    def run(self, task_input: TaskInput) -> Result:
        return {**super().run(task_input), "choice": np.array(self._choice(task_input))}

    def run_many(self, inputs: Sequence[TaskInput], device: Any) -> tuple[list[Result], str]:
        results, path = super().run_many(inputs, device)
        return [{**result, "choice": np.array(self._choice(task_input))} for task_input, result in zip(inputs, results, strict=True)], path

    def _choice(self, task_input: TaskInput) -> int:
        if MIXTURE in task_input.memory:
            return int(task_input.memory[MIXTURE].argmax())
        models, sums = _unpacked(task_input.array("model"), self.k, self.model)
        losses = losses_of_models(self.model, list(models), task_input.data)
        return int(posteriors(losses, np.full(self.k, 1 / self.k), label_shares(sums)[:, task_input.data.y_train]).mean(axis=1).argmax())


def _unpacked(vector: Array, k: int, model: Model) -> tuple[Array, Array]:
    """The models (k, d) and the label sums (k, classes) of one vector."""
    at = k * model.dimension
    return vector[:at].reshape(k, model.dimension), vector[at:].reshape(k, model.classes)


@dataclass(frozen=True)
class FedRcSettings:
    """What is fixed in a run."""

    train: Train
    k: int
    weights: Weights
    seed: int


@ranged("algorithm")
def fedrc(
    train: Train,
    *,
    k: Annotated[int, Key("Number of models.", "[1, inf)", "models")] = 3,
    weights: Weights = "examples",
    seed: int = 0,
) -> Algorithm:
    """FedRC with `k` models. Raises `InputError` for parameters that cannot be."""
    for name in ("prox", "maml_lr", "clip_norm", "sampling_rate", "frozen", "pull", "augment"):
        if getattr(train, name):
            raise InputError(f"training.{name}: {getattr(train, name)} has no effect with algorithm 'fedrc'; leave it out")
    if train.optimizer != "sgd":
        raise InputError(f"training.optimizer: {train.optimizer!r} has no effect with algorithm 'fedrc'; leave it out")
    settings = FedRcSettings(train, k, weights, seed)
    return Algorithm(
        "fedrc", ("mean",), partial(_init, settings), partial(_round, settings), partial(_serve, settings), admit_by_choice,
        partial(_describe, settings), spread=inf if k > 1 else 1.0,
        schedule=schedule_of_averaging(RobustStep(train, k), EvaluateRobust(train.model, k)),
    )  # fmt: skip


def _init(settings: FedRcSettings, federation: Federation) -> FedAvgState:
    """k models from different starts, and uniform label shares."""
    model, k = settings.train.model, settings.k
    starts = [model.init(settings.seed, j) for j in range(k)]
    return FedAvgState(Shared(np.concatenate([*starts, np.full(k * model.classes, 1 / (k * model.classes), starts[0].dtype)])))


def _round(settings: FedRcSettings, federation: Federation, state: FedAvgState) -> tuple[FedAvgState, RoundRecord]:
    return average_all(federation, state, RobustStep(settings.train.at(federation.round), settings.k), settings.weights)


def _serve(settings: FedRcSettings, state: FedAvgState) -> Served:
    return Served(EvaluateRobust(settings.train.model, settings.k), {"model": state.model})


def _describe(settings: FedRcSettings, state: FedAvgState) -> Mapping[str, Any]:
    return {"k": settings.k, "rule": f"k = {settings.k}"}


FEDRC = AlgorithmSpec(
    "fedrc", fedrc, "a mixture of k models that gain nothing by specialising in labels (Guo et al. 2024)",
    states=(FedAvgState,), tasks=(EvaluateRobust, RobustStep), sample_refused="no private form of its weighted steps is written",
    cohorts="one", knowledge=lambda settings: f"the number of groups, k = {settings.get('k', 3)}",
    needs_classes=lambda settings: "weighs losses by the shares of labels, and numbers have no shares",
)  # fmt: skip
