"""SCAFFOLD: control variates that take each client's own pull out of its local steps.

Source: Karimireddy et al. 2020 (ICML), Algorithm 1 with option II. Server: model θ and control c; client i keeps c_i. Local step y ← y
− η (g_i(y) − c_i + c); then c_i⁺ = c_i − c + (θ − y)/(K η). The server averages y − θ and c_i⁺ − c_i over the sampled and moves θ by
the first, c by |S|/N of the second.

Deviations, each for a reason:
- With momentum, K is the weight of the steps ‖a‖₁ (see `weight_of_steps`): a movement is −η ‖a‖₁ times a mean gradient, so only then is
  c_i⁺ a mean of gradients. With K as printed and momentum 0.9 the controls grow tenfold and training diverges.
- Weight decay would enter the controls as part of the gradient; it does here as well, on both sides.
- Weights are equal as in the paper; "examples" weighs updates and controls alike.
- A client that drops out after training has moved its c_i, and c does not hear of it.

What it reveals, by which verb: `mean` carries two vectors a client, the update and the change of its control, which is (up to a known
vector) the mean of its gradients along the way: the update again, so in the clear little that is new. Twice the bytes both ways.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..algorithm import Algorithm, Served
from ..engine import Result, TaskInput
from ..errors import InputError
from ..evaluation import Evaluate
from ..federation import Federation
from ..handles import Shared
from ..record import RoundRecord
from ..training import Train
from .around import AroundTraining, needs_sgd, steps_of, weight_of_steps
from .fedavg import Weights

__all__ = ["TrainControlled", "scaffold"]

MEMORY = "scaffold control"
"""Under this name clients keep c_i."""


@dataclass(frozen=True)
class TrainControlled(AroundTraining):
    """Train from "model" with the correction c − c_i, c the given "control". Parts: "update" (d,); "control" (d,), c_i⁺ − c_i.

    Kept: "trained" (d,), and c_i⁺ (d,) under `MEMORY`, zero before the first time.
    """

    gives = ("update", "control")
    remembers = (MEMORY,)

    def before(self, given: TaskInput) -> TaskInput:
        control = given.array("control")
        correction = control - given.memory[MEMORY] if MEMORY in given.memory else control
        return replace(given, params={"model": given.array("model"), "correction": correction})

    def after(self, given: TaskInput, inner: TaskInput, result: Result) -> Result:
        update = np.asarray(result["update"])
        weight = weight_of_steps(steps_of(self.train, len(given.data.y_train)), self.train.momentum)
        # c_i⁺ − c_i = −c + (θ − y)/(K η)  (Alg. 1, l. 12, option II)
        change = (-given.array("control") - update / (weight * self.train.lr)).astype(update.dtype, copy=False)
        kept = given.memory[MEMORY] + change if MEMORY in given.memory else change
        return {"update": update, "control": change, "trained": result["trained"], MEMORY: kept}


@dataclass(frozen=True, eq=False)
class State:
    """The model θ and the control c."""

    model: Shared
    control: Shared


def scaffold(train: Train, *, global_lr: float = 1.0, weights: Weights = "equal", seed: int = 0) -> Algorithm:
    """One shared model with control variates. `global_lr` is η_g (1 in the paper's experiments).

    Raises `InputError` for a rate that is not a finite number above 0, and for another optimiser than SGD: no movement but SGD's tells
    the mean gradient that a control is made of.
    """
    needs_sgd(train, "scaffold")
    if not (global_lr > 0 and np.isfinite(global_lr)):
        raise InputError(f"algorithm.global_lr: {global_lr} is not a finite number above 0")

    def init(federation: Federation) -> State:
        start = train.model.init(seed)
        return State(Shared(start), Shared(np.zeros_like(start)))

    def round(federation: Federation, state: State) -> tuple[State, RoundRecord]:
        cohort = federation.cohort(dict.fromkeys(federation.clients, 0))
        params = {"model": state.model, "control": state.control}
        held = federation.compute(TrainControlled(train.at(federation.round)), params, on=cohort)
        (mean,) = federation.mean(held, weights=weights)
        if mean is not None:
            update, change = mean.parts["update"], mean.parts["control"]
            # θ ← θ + η_g mean(y − θ),  c ← c + |S|/N mean(c_i⁺ − c_i)  (Alg. 1, l. 16-17)
            model = state.model + (update if global_lr == 1.0 else update * global_lr)
            # a cohort below the floor that trains alone (`small_clusters = "local"`) moves its own models, not the common c
            control = state.control if change.own else state.control + change * (mean.count / len(federation.clients))
            state = State(federation.fold(model, on=held.clients[0]), federation.fold(control, on=held.clients[0]))
        notes = {"unchanged_clusters": [0] if mean is None else [], "clipped_clients": 0 if mean is None else mean.clipped}
        return state, RoundRecord(federation.round, cohort, None, notes)

    def serve(state: State) -> Served:
        return Served(Evaluate(train.model), {"model": state.model})

    def admit(federation: Federation, state: State, newcomers: Sequence[int]) -> tuple[State, Mapping[str, object]]:
        return state, {}

    return Algorithm("scaffold", ("mean",), init, round, serve, admit)
