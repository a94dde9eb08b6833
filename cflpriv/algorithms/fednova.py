"""FedNova: normalised averaging, so that clients that take more local steps do not pull the model towards their own optimum.

Source: Wang et al. 2020 (NeurIPS), equations 7 to 9 and section 4. A client's movement is −η Σ_t a_t g_t; it sends d_i = Δ_i / ‖a_i‖₁
and the server moves by τ_eff Σ p_i d_i with τ_eff = Σ p_i ‖a_i‖₁.

Deviations, each for a reason:
- τ_eff uses ‖a_i‖₁ also with momentum (as in the authors' code without a proximal term), so that equal numbers of steps are FedAvg
  exactly.
- ‖a_i‖₁ travels with the direction as a fraction of `STEPS_UNIT`, so that a secure sum that clips at 1 holds it.
- Where the mean is transformed, one client multiplies direction and τ_eff (`product`) and sends the result back under a fresh transform.

What it reveals, by which operation: `mean` shows what FedAvg's does, and how many steps each client took. That number reveals its number
of samples up to a batch, even with equal weights. Under a secure sum only the mean number of steps shows. So it does under a transform:
the lengths of the mean (direction and steps) and of the product, which transforms keep, are two equations for it.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ..contract.operations import Federation
from ..contract.schedule import Schedule, request, scores
from ..contract.transcript import RoundRecord
from ..engine import Result, TaskInput
from ..tasks.evaluation import Evaluate
from ..tasks.training import Train
from ..types import Parts
from .fedavg import FedAvgState, Weights, fedavg
from .interface import Algorithm, AlgorithmSpec, no_groups
from .shared.around import AroundTraining, needs_sgd, steps_of, weight_of_steps
from .shared.steps import mean_notes

__all__ = ["TrainNormalised", "fednova"]

STEPS_UNIT = 4096.0
"""Numbers of steps are sent in units of this; more than so many would be clipped by a secure sum (and reported)."""


@dataclass(frozen=True)
class TrainNormalised(AroundTraining):
    """Parts: "direction" (d,), the update divided by ‖a‖₁; "steps" (), ‖a‖₁ in units of `STEPS_UNIT`. Kept: "trained" (d,)."""

    gives: ClassVar[Parts] = {"direction": "summed", "steps": "summed"}
    beyond = "weights by numbers of steps"

    def after(self, task_input: TaskInput, inner: TaskInput, result: Result) -> Result:
        weight = weight_of_steps(steps_of(self.train, len(task_input.data.y_train)), self.train.momentum)
        update = np.asarray(result["update"])
        direction = (update / weight).astype(update.dtype, copy=False)
        # both in the model's precision: under a transform they travel as one vector, and the mean direction is opened in its
        return {"direction": direction, "steps": np.array(weight / STEPS_UNIT, dtype=update.dtype), "trained": result["trained"]}


def fednova(train: Train, *, weights: Weights = "examples", seed: int = 0) -> Algorithm:
    """One shared model, moved by the normalised mean. It has no hyper-parameter of its own. Raises `InputError` for another optimiser
    than SGD, for which there is no ‖a‖₁."""
    needs_sgd(train, "fednova")

    def round(federation: Federation, state: FedAvgState) -> tuple[FedAvgState, RoundRecord]:
        cohort = federation.cohort(dict.fromkeys(federation.clients, 0))
        held = federation.compute(TrainNormalised(train.at(federation.round)), {"model": state.model}, on=cohort)
        (mean,) = federation.mean(held, weights=weights)
        model = state.model
        if mean is not None and not mean.parts["steps"].own:  # a cohort below the minimum cohort size, which would train alone, waits
            moved = federation.product(mean.parts["direction"], mean.parts["steps"] * STEPS_UNIT, on=held.clients[0])
            model = federation.fold(model + moved, on=held.clients[0])  # x + τ_eff Σ p_i d_i
        return FedAvgState(model), RoundRecord(federation.round, cohort, None, mean_notes((mean,)))

    asked = request(TrainNormalised(train), {"direction": "sum", "steps": "sum"})
    schedule = Schedule(round=(asked,), serving=(scores(Evaluate(train.model)),))
    return replace(fedavg(train, weights=weights, seed=seed), name="fednova", round=round, schedule=schedule)


FEDNOVA = AlgorithmSpec(
    "fednova", fednova, "FedAvg of updates normalised by their numbers of steps (Wang et al. 2020)",
    states=(FedAvgState,), tasks=(TrainNormalised,), sample_refused="its normalisation counts steps, which reveal the number of samples",
    client_refused="its mean number of steps is summed in units of 4096 with the update and gets the same noise, which would exceed it",
    knowledge=no_groups,
)  # fmt: skip
