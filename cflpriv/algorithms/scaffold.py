"""SCAFFOLD: control variates that take each client's own pull out of its local steps.

Source: Karimireddy et al. 2020 (ICML), Algorithm 1 with option II. Server: model θ and control c; client i keeps c_i. Local step y ← y
− η (g_i(y) − c_i + c); then c_i⁺ = c_i − c + (θ − y)/(K η). The server averages y − θ and c_i⁺ − c_i over the sampled and moves θ by
the first, c by |S|/N of the second.

Deviations, each for a reason:
- With momentum, K is the weight of the steps ‖a‖₁ (see `weight_of_steps`): a movement is −η ‖a‖₁ times a mean gradient, so only then is
  c_i⁺ a mean of gradients. With K as printed and momentum 0.9 the controls grow tenfold and training diverges.
- Weight decay would enter the controls as part of the gradient; it does here as well, on both sides.
- Weights are equal as in the paper; "examples" weighs updates and controls alike. Then the share of c that a sum moves is that of its
  weight, where what all clients weigh together is N times the mean weight of the first sum: a number that changed with each cohort would
  bias c for good. N counts who is there or was summed; when it grows, c shrinks to the mean over all, newcomers' zeros among them. Who
  leaves for good leaves its last c_i in c.
- **c is at any time the mean of the c_i that clients go on from**, or every later round would descend on g minus the difference: so a
  change of c_i counts once it is in c. Each client keeps c_i and the new one that waits; with the next parameters the server
  sends the round in which each of the cohort was last summed, and the client takes over the waiting one if that is the round it is from. A
  client that drops out, or does not contribute for another reason, goes on from the c_i before.
- The change travels times η ‖a‖₁ of the fewest steps that a client can take: then no number of it is larger than that of the update, but
  for what c (a mean gradient) adds, and a secure sum that holds the one holds the other. In a round where a secure sum clipped anybody's
  values (it counts such clients) controls stay as they are, on both sides. A clip to a norm for client-level privacy, which is not
  reported, and noise would stay in c for good: refused by name (`cflpriv.privacy`). The rounding of a secure sum does stay in c: nearly
  none with `secagg_bits = 32`, more with 16.

What it reveals, by which operation: `mean` carries two vectors a client, the update and the change of its control, which is (up to a known
vector) the mean of its gradients along the way: the update again, so in the clear little that is new. Sums of both are two equations
where clients take different numbers of steps: two numbers give the sum of each group, so a client with a number of its own is in no sum
(`attacks.evidence.control_sums`). With `batch_size = 0` all take as many. Twice the bytes both ways.
`compute` sends the cohort's clients the round in which each of them was last in a sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import numpy as np

from ..contract.handles import Shared
from ..contract.operations import Federation
from ..contract.schedule import Schedule, request, scores
from ..contract.transcript import RoundRecord
from ..engine import Result, TaskInput
from ..keys import Key, ranged
from ..tasks.evaluation import Evaluate
from ..tasks.training import Train
from ..types import Array, Parts
from .fedavg import Weights
from .interface import Algorithm, AlgorithmSpec, Served, no_groups
from .shared.around import AroundTraining, needs_sgd, steps_of, weight_of_steps
from .shared.steps import mean_notes

__all__ = ["TrainControlled", "scaffold"]

MEMORY = "scaffold control"
"""Under this name clients keep c_i."""
WAITING = "scaffold control waiting"
"""And under this c_i⁺, which takes the place of c_i once its change is in c."""
ROUND = "scaffold round"
"""And under this the round that c_i⁺ is from."""


@dataclass(frozen=True)
class TrainControlled(AroundTraining):
    """Train from "model" with the correction c − c_i, c the given "control". Parts: "update" (d,); "control" (d,), c_i⁺ − c_i times `unit`.

    The given "summed" (m, 2) holds clients and the round of each whose change was the last to be in c, −1 before the first. Kept: "trained"
    (d,); c_i (d,) under `MEMORY`, zero at first; c_i⁺ (d,) under `WAITING`; the round () under `ROUND`.
    """

    gives: ClassVar[Parts] = {"update": "summed", "control": "summed"}
    remembers = (MEMORY, WAITING, ROUND)
    beyond = "the corrections c - c_i"

    @property
    def unit(self) -> float:
        """η ‖a‖₁ of a client with a single sample: no movement is of fewer steps. It is the same for all, or changes would not add up."""
        return weight_of_steps(steps_of(self.train, 1), self.train.momentum) * self.train.lr

    def before(self, task_input: TaskInput) -> TaskInput:
        control, own = task_input.array("control"), _own(task_input)
        return replace(task_input, params={"model": task_input.array("model"), "correction": control if own is None else control - own})

    def after(self, task_input: TaskInput, inner: TaskInput, result: Result) -> Result:
        update = np.asarray(result["update"])
        weight = weight_of_steps(steps_of(self.train, len(task_input.data.y_train)), self.train.momentum)
        # c_i⁺ − c_i = −c + (θ − y)/(K η)  (Alg. 1, l. 12, option II)
        change = (-task_input.array("control") - update / (weight * self.train.lr)).astype(update.dtype, copy=False)
        own = _own(task_input)
        kept = {MEMORY: np.zeros_like(update) if own is None else own, WAITING: change if own is None else own + change}
        sent = (change * self.unit).astype(update.dtype, copy=False)
        return {"update": update, "control": sent, "trained": result["trained"], **kept, ROUND: np.array(task_input.streams.round)}


def _own(task_input: TaskInput) -> Array | None:
    """c_i: the one that waits, if the server has it in c, else the one before. None before the first."""
    summed = task_input.array("summed")  # rows (client, round)
    taken = ROUND in task_input.memory and bool((summed == (task_input.data.id, int(task_input.memory[ROUND]))).all(1).any())
    return task_input.memory.get(WAITING if taken else MEMORY)


@dataclass(frozen=True, eq=False)
class ScaffoldState:
    """The model θ and the control c; the round of each client's last change in c; of how many clients c is the mean; what each weighs."""

    model: Shared
    control: Shared
    summed: Mapping[int, int] = field(default_factory=dict)
    counted: int = 0
    each: float = 0.0


@ranged("algorithm")
def scaffold(
    train: Train,
    *,
    global_lr: Annotated[float, Key("Global learning rate η_g (1 in the paper's experiments).", "(0, inf)")] = 1.0,
    weights: Weights = "equal",
    seed: int = 0,
) -> Algorithm:
    """One shared model with control variates. `global_lr` is η_g (1 in the paper's experiments).

    Raises `InputError` for a rate that is not a finite number above 0, and for another optimiser than SGD: no movement but SGD's gives
    the mean gradient that a control is made of.
    """
    needs_sgd(train, "scaffold")

    def init(federation: Federation) -> ScaffoldState:
        start = train.model.init(seed)
        return ScaffoldState(Shared(start), Shared(np.zeros_like(start)))

    def round(federation: Federation, state: ScaffoldState) -> tuple[ScaffoldState, RoundRecord]:
        cohort = federation.cohort(dict.fromkeys(federation.clients, 0))
        counted = len({*federation.clients, *state.summed})
        if state.counted != counted:
            grown = state.control if not state.counted else state.control * (state.counted / counted)
            state = replace(state, control=grown, counted=counted)
        task = TrainControlled(train.at(federation.round))
        summed = np.array([(client, state.summed.get(client, -1)) for client in cohort])
        held = federation.compute(task, {"model": state.model, "control": state.control, "summed": summed}, on=cohort)
        (mean,) = federation.mean(held, weights=weights)
        moved = False
        if mean is not None:
            update, change = mean.parts["update"], mean.parts["control"]
            # θ ← θ + η_g mean(y − θ),  c ← c + |S|/N mean(c_i⁺ − c_i)  (Alg. 1, l. 16-17)
            model = state.model + (update if global_lr == 1.0 else update * global_lr)
            state = replace(state, model=federation.fold(model, on=held.clients[0]))
            # a cohort below the minimum cohort size that trains alone (`small_clusters = "local"`), and so has no weight, moves its own
            # models only
            if mean.weight is not None and not mean.clipped:
                moved = True
                each = state.each or mean.weight / mean.count
                control = state.control + change * (mean.weight / (each * counted) / task.unit)
                last = {**state.summed, **dict.fromkeys(mean.contributors, federation.round)}
                state = replace(state, control=federation.fold(control, on=held.clients[0]), summed=last, each=each)
        return state, RoundRecord(federation.round, cohort, None, {**mean_notes((mean,)), "control_moved": moved})

    def serve(state: ScaffoldState) -> Served:
        return Served(Evaluate(train.model), {"model": state.model})

    def admit(federation: Federation, state: ScaffoldState, newcomers: Sequence[int]) -> tuple[ScaffoldState, Mapping[str, object]]:
        return state, {}

    asked = request(TrainControlled(train), {"update": "sum", "control": "sum"})
    schedule = Schedule(round=(asked,), serving=(scores(Evaluate(train.model)),))
    return Algorithm("scaffold", ("mean",), init, round, serve, admit, schedule=schedule)


SCAFFOLD = AlgorithmSpec(
    "scaffold", scaffold, "FedAvg with control variates against client drift (Karimireddy et al. 2020)",
    states=(ScaffoldState,), tasks=(TrainControlled,), sample_refused="its control variates are made of un-noised gradients",
    client_refused="what is clipped off a client's control, and the noise, would stay in the common control for good",
    knowledge=no_groups,
)  # fmt: skip
