"""Ditto: every client trains the shared model as in FedAvg, and also a personal model that is drawn towards the shared one.

Source: Li et al. 2021 (ICML), Algorithm 1: a sampled client k takes a local step for w, then its own v_k ← v_k − η (∇F_k(v_k) + λ (v_k
− w)), w being the shared model it received.

Deviations, each for a reason:
- A client that has no personal model yet (never sampled, or a newcomer) uses the shared one.
- Both trainings of a round draw the same batches.

λ = 0 is local training on the personal models. The "last locally trained model" of a client is that of its step for w, as in FedAvg.

What it reveals, by which operation: `mean` shows what FedAvg's does; the personal model never leaves its client, and no operation
uses it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np

from ..contract.operations import Federation
from ..contract.schedule import at_round
from ..contract.transcript import RoundRecord
from ..engine import Device, Result, TaskInput
from ..keys import Key, ranged
from ..tasks.evaluation import EvaluateOwn
from ..tasks.training import Train
from ..types import Parts
from .fedavg import FedAvgState, Weights, average_all, fedavg, schedule_of_averaging
from .interface import Algorithm, AlgorithmSpec, Served, no_groups

__all__ = ["TrainBoth", "ditto"]

MEMORY = "ditto personal"
"""Under this name clients keep v_k."""


@dataclass(frozen=True)
class TrainBoth:
    """Train the given "model" w by `shared`; train v_k (at first the initial model of `seed`) towards w by `personal`, whose prox is λ.

    Parts: "update" (d,), that of w. Kept: "trained" (d,), w after its training, and v_k (d,) under `MEMORY`. A client of whose two
    trainings one diverged (and is skipped) has no result.
    """

    shared: Train
    personal: Train
    seed: int

    parts: ClassVar[Parts] = {"update": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ("trained", MEMORY)

    @property
    def reads(self) -> tuple[str, ...]:
        return (MEMORY,)

    def run(self, task_input: TaskInput) -> Result:
        own = self._own(task_input)
        return self._together(self.shared.run(task_input), self.personal.run(own), own)

    def cost(self, task_input: TaskInput) -> int:
        return self.shared.cost(task_input) + self.personal.cost(task_input)

    def chunk_size(self, task_input: TaskInput, device: Device) -> int:
        return self.shared.chunk_size(task_input, device)

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        own = [self._own(task_input) for task_input in inputs]
        shared, path = self.shared.run_many(inputs, device)
        personal, _ = self.personal.run_many(own, device)
        return [self._together(*three) for three in zip(shared, personal, own, strict=True)], path

    def _own(self, task_input: TaskInput) -> TaskInput:
        own = task_input.memory[MEMORY] if MEMORY in task_input.memory else self.personal.model.init(self.seed)
        return replace(task_input, params={"model": own, "anchor": task_input.array("model")})

    def _together(self, shared: Result, personal: Result, own: TaskInput) -> Result:
        if not shared or not personal:
            return {}
        return {"update": shared["update"], "trained": shared["trained"], MEMORY: np.asarray(personal["trained"])}


@ranged("algorithm")
def ditto(
    train: Train,
    *,
    lam: Annotated[float, Key("λ, which draws personal models to the shared one.", "[0, inf)")] = 0.1,
    personal_epochs: Annotated[
        int, Key("Epochs of a personal model's training in a round; 0: as many as the shared model's.", "[0, inf)", "epochs")
    ] = 0,
    weights: Weights = "examples",
    seed: int = 0,
) -> Algorithm:
    """A shared model, and personal ones drawn to it by `lam` (λ), trained for `personal_epochs` a round (0: as many as the shared one).

    Raises `InputError` for parameters that cannot be.
    """

    both = TrainBoth(train, replace(train, prox=lam, epochs=personal_epochs or train.epochs), seed)
    evaluate = EvaluateOwn(train.model, MEMORY)

    def round(federation: Federation, state: FedAvgState) -> tuple[FedAvgState, RoundRecord]:
        return average_all(federation, state, at_round(both, federation.round), weights)

    def serve(state: FedAvgState) -> Served:
        return Served(evaluate, {"model": state.model})

    schedule = schedule_of_averaging(both, evaluate)
    return replace(fedavg(train, weights=weights, seed=seed), name="ditto", round=round, serve=serve, schedule=schedule)


DITTO = AlgorithmSpec(
    "ditto", ditto, "FedAvg, and personal models drawn towards the shared one (Li et al. 2021)",
    states=(FedAvgState,), tasks=(TrainBoth,),
    sample_refused="its personal models keep training without noise, in addition to the shared one",
    cohorts="one", knowledge=no_groups,
)  # fmt: skip
