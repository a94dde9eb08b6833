"""LG-FedAvg: every client keeps the first layers (its representation) to itself; only the last ones are averaged.

Source: Liang et al. 2020, "Think locally, act globally", Algorithm 1. PACFL's tables: LeNet-5 with 3 local and 2 global layers, no
FedAvg model to start from.

Deviations, each for a reason:
- Clients send updates of the global layers, not the layers: the same mean, and a transformed mean never contains a model.
- Own layers start from the initial model of the public seed, also those of clients not sampled yet and of newcomers.

With all layers global it is FedAvg.

What it reveals, by which operation: `mean` shows the updates of the global layers only; the server never sees a whole model of anyone.
Under a rotation it takes larger networks than FedAvg, because fewer numbers travel.
"""

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from ..contract.handles import Shared
from ..contract.operations import Federation
from ..contract.transcript import RoundRecord
from ..engine import Result, TaskInput
from ..engine.models import Model
from ..errors import InputError
from ..keys import Key, ranged
from ..tasks.evaluation import EvaluateUsed
from ..tasks.training import Train
from ..types import Array
from .fedavg import FedAvgState, Weights, average_all, fedavg, schedule_of_averaging
from .interface import Algorithm, AlgorithmSpec, Served, no_groups
from .shared.around import AroundTraining

__all__ = ["EvaluateParted", "TrainParted", "global_part", "lg_fedavg"]

MEMORY = "lg_fedavg own layers"
"""Under this name clients keep their own layers."""


def global_part(model: Model, global_layers: int) -> int:
    """Where in the parameter vector the last `global_layers` layers (that have parameters) begin. `InputError` for more than there are."""
    layers: dict[str, int] = {}
    for name, _, offset in model.layout:
        layers.setdefault(name.rpartition(".")[0], offset)
    if global_layers > len(layers):
        raise InputError(f"algorithm.global_layers: {global_layers} of a model with {len(layers)} layers")
    return list(layers.values())[len(layers) - global_layers]


def _whole(model: Model, cut: int, seed: int, task_input: TaskInput) -> Array:
    """A client's model: its own layers (at first those of the initial model) before the given "model", which is the global part."""
    own = task_input.memory[MEMORY] if MEMORY in task_input.memory else model.init(seed)[:cut]
    return np.concatenate([own, task_input.array("model")])


@dataclass(frozen=True)
class TrainParted(AroundTraining):
    """Train all layers; the given "model" (d − cut,) is the global part, what comes before `cut` is the client's own.

    Parts: "update" (d − cut,). Kept: "trained" (d,), and the own layers (cut,) under `MEMORY`.
    """

    remembers = (MEMORY,)
    beyond = ""

    cut: int
    seed: int

    def before(self, task_input: TaskInput) -> TaskInput:
        return replace(task_input, params={"model": _whole(self.train.model, self.cut, self.seed, task_input)})

    def after(self, task_input: TaskInput, inner: TaskInput, result: Result) -> Result:
        update = np.asarray(result["trained"].second)  # of all layers, as trained
        trained = inner.array("model") + update
        return {"update": self.train.sent(update[self.cut :].copy()), "trained": trained, MEMORY: trained[: self.cut].copy()}


@dataclass(frozen=True)
class EvaluateParted(EvaluateUsed):
    """`Evaluate` of the client's own layers with the given "model", the global part. Parts: those of `Evaluate`."""

    cut: int
    seed: int

    @property
    def reads(self) -> tuple[str, ...]:
        return (MEMORY,)

    def used(self, task_input: TaskInput) -> Array:
        return _whole(self.model, self.cut, self.seed, task_input)


@ranged("algorithm")
def lg_fedavg(
    train: Train,
    *,
    global_layers: Annotated[int, Key("The last so many layers are shared; 0: two, or one of fewer than three.", "[0, inf)", "layers")] = 0,
    weights: Weights = "examples",
    seed: int = 0,
) -> Algorithm:
    """The last `global_layers` layers are shared; 0 for two, as in PACFL's tables, or one where the model has fewer than three.

    Raises `InputError` for a number that cannot be.
    """
    layers = len({name.rpartition(".")[0] for name, _, _ in train.model.layout})
    cut = global_part(train.model, global_layers or min(2, max(1, layers - 1)))

    evaluate = EvaluateParted(train.model, cut, seed)

    def init(federation: Federation) -> FedAvgState:
        return FedAvgState(Shared(train.model.init(seed)[cut:].copy()))

    def round(federation: Federation, state: FedAvgState) -> tuple[FedAvgState, RoundRecord]:
        return average_all(federation, state, TrainParted(train.at(federation.round), cut, seed), weights)

    def serve(state: FedAvgState) -> Served:
        return Served(evaluate, {"model": state.model})

    schedule = schedule_of_averaging(TrainParted(train, cut, seed), evaluate)
    return replace(fedavg(train, weights=weights, seed=seed), name="lg_fedavg", init=init, round=round, serve=serve, schedule=schedule)


LG_FEDAVG = AlgorithmSpec(
    "lg_fedavg", lg_fedavg, "first layers stay with the client, the last are averaged (Liang et al. 2020)",
    states=(FedAvgState,), tasks=(TrainParted, EvaluateParted),
    cohorts="one", knowledge=no_groups,
)  # fmt: skip
