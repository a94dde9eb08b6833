"""Per-FedAvg: one model from which a single gradient step on a client's own data leads to a good one (first-order MAML).

Source: Fallah et al. 2020 (NeurIPS), Algorithm 1 with the first-order approximation: local step θ ← θ − β ∇f_i(θ − α ∇f_i(θ; D); D′),
batches D and D′ in turn; the server averages. A client uses θ − α ∇f_i(θ).

Deviations, each for a reason:
- The personal step at the end takes the gradient of all training samples, so that it needs no draw.
- With α = 0 there is no inner step and no batch for it: it is FedAvg with rate β, bit for bit.
- Pairs run on across epochs; a batch left over at the end is not used. A client with a single batch is refused: it would never train.
- PACFL's tables use α = 0.01 (the default here) and β = 0.001.

What it reveals, by which operation: `mean` shows what FedAvg's does; the step at the end stays with the client.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np

from ..engine import Device, Result, TaskInput
from ..engine.device import in_use
from ..errors import InputError
from ..keys import Key, ranged
from ..privacy.settings import updates_only
from ..tasks.evaluation import Evaluate, EvaluateUsed
from ..tasks.training import Gradient, Train
from ..types import Array
from .fedavg import FedAvgState, Weights, fedavg, schedule_of_averaging
from .interface import Algorithm, AlgorithmSpec, Served, no_groups

__all__ = ["EvaluateAdapted", "per_fedavg"]


@dataclass(frozen=True)
class EvaluateAdapted(EvaluateUsed):
    """`Evaluate` after one gradient step of rate `alpha` on the client's training data. Parts: those of `Evaluate`.

    Where the gradient is not finite, the run ends (`TrainingDiverged`), or with `on_divergence = "skip"` the step is left out.
    """

    alpha: float
    on_divergence: Literal["stop", "skip"] = "stop"

    def used(self, task_input: TaskInput) -> Array:
        return self._used([task_input], in_use())[0]

    def run(self, task_input: TaskInput) -> Result:
        return self.run_many([task_input], in_use())[0][0]

    def cost(self, task_input: TaskInput) -> int:
        return len(task_input.data.y_train)

    def chunk_size(self, task_input: TaskInput, device: Device) -> int:
        return Gradient(self.model).chunk_size(task_input, device)

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        used = self._used(inputs, device)
        return Evaluate(self.model).run_many([replace(entry, params={"model": v}) for entry, v in zip(inputs, used, strict=True)], device)

    def _used(self, inputs: Sequence[TaskInput], device: Device) -> list[Array]:
        models = [task_input.array("model") for task_input in inputs]
        if not self.alpha:
            return models
        gradients, _ = Gradient(self.model, self.on_divergence).run_many(inputs, device)
        return [
            (model - self.alpha * np.asarray(result["gradient"])).astype(model.dtype, copy=False) if result else model
            for model, result in zip(models, gradients, strict=True)
        ]


@ranged("algorithm")
def per_fedavg(
    train: Train,
    *,
    alpha: Annotated[float, Key("Inner learning rate α.", "[0, inf)")] = 0.01,
    beta: Annotated[float, Key("Outer learning rate β; 0: `training.lr`.", "[0, inf)")] = 0.0,
    weights: Weights = "examples",
    seed: int = 0,
) -> Algorithm:
    """First-order Per-FedAvg: inner rate `alpha` (α), outer rate `beta` (β; 0 for the rate of `train`).

    Raises `InputError` for rates that are not finite numbers of 0 or more, or batches too few to go in pairs.
    """
    if alpha and train.batch_size == 0 and train.epochs < 2:
        raise InputError("training.epochs: 1 full batch makes no pair for algorithm.alpha; 2 epochs at least, or smaller batches")
    inner = replace(train, maml_lr=alpha, lr=beta or train.lr)
    evaluate = EvaluateAdapted(train.model, alpha, train.on_divergence)

    def serve(state: FedAvgState) -> Served:
        return Served(evaluate, {"model": state.model})

    schedule = schedule_of_averaging(inner, evaluate)
    return replace(fedavg(inner, weights=weights, seed=seed), name="per_fedavg", serve=serve, schedule=schedule)


PER_FEDAVG = AlgorithmSpec(
    "per_fedavg", per_fedavg, "one model made to be a good start for a step on one's own data, first-order MAML (Fallah et al. 2020)",
    states=(FedAvgState,), tasks=(EvaluateAdapted,), sample_releases=updates_only,
    cohorts="one", knowledge=no_groups,
)  # fmt: skip
