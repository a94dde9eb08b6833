"""FedFomo: clients fetch a few others' models each round and take from each as much as it helps on data they hold back.

Source: Zhang et al. 2021 (ICLR), equations 3 and 4 and section 3.2. With θ_i its own model and L_i its loss on held-back data, client i
weighs model n by w_n = (L_i(θ_i) − L_i(θ_n)) / ‖θ_n − θ_i‖, drops the negative ones, lets the rest sum to one, and moves to θ_i + Σ w_n
(θ_n − θ_i). It asks for the models with the largest affinity P_n ← P_n + w_n; with probability ε a place goes to a random one instead.

Deviations, each for a reason:
- Models travel from client to client, encrypted through the server (`relay`); in the paper the server hands them out and sees them all.
- A round is combining, then training; the first round only trains. Candidates are all present clients that have trained before.
- ε starts at 0.3 and falls by 0.05 a round; M = 5 models; a fifth of the data held back. These are the figures commonly given for the
  paper.
- A client that no model helps keeps its own. Test data are not used.

What it reveals, by which operation: `relay` shows the server who asks for whom in every round, hence who is like whom, and no model; it
shows every client whole models of single others, which no sum hides. So sums have nothing to protect here, and nothing else protects
the models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
import torch

from ..contract.handles import Held, OwnAddend, Shared
from ..contract.operations import Federation, Parameter
from ..contract.schedule import Schedule, TaskRequest, request, scores
from ..contract.transcript import RoundRecord
from ..engine import Result, TaskInput
from ..engine.device import tensor
from ..engine.losses import loss_of
from ..engine.models import Model
from ..keys import Key, ranged
from ..tasks.evaluation import Evaluate
from ..tasks.training import Start, Train
from ..types import Array, Parts
from .interface import Algorithm, AlgorithmSpec, Served, no_groups
from .pfedlia.influence import HasValidation, OnPart, split_validation

__all__ = ["Ask", "Combine", "fedfomo", "first_order_weights"]

MEMORY = "fedfomo affinity"
"""Under this name clients keep P_i, as (client ids, affinities), shape (2, n)."""


@dataclass(frozen=True)
class Ask:
    """Whom of `candidates` a client asks: by affinity, or each at random with probability `epsilon`, which falls by `epsilon_decay` once a
    round. Part: "wanted" (up to `m`,) int64."""

    candidates: tuple[int, ...]
    m: int
    epsilon: float
    epsilon_decay: float = 0.0

    parts: ClassVar[Parts] = {"wanted": "request"}
    keeps: ClassVar[tuple[str, ...]] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        return (MEMORY,)

    def at(self, round: int) -> "Ask":
        """This task with the probability of `round`."""
        return replace(self, epsilon=max(0.0, self.epsilon - self.epsilon_decay * max(0, round)), epsilon_decay=0.0)

    def run(self, task_input: TaskInput) -> Result:
        others = [client for client in self.candidates if client != task_input.data.id]
        draws = task_input.streams("fedfomo asks")
        shuffled = [others[i] for i in draws.permutation(len(others))]
        affinity = _affinity(task_input)
        best = sorted(shuffled, key=lambda client: -affinity.get(client, 0.0))  # stable: equals in random order
        wanted: list[int] = []
        for explore in draws.random(min(self.m, len(others))) < self.epsilon:
            wanted.append(next(client for client in (shuffled if explore else best) if client not in wanted))
        return {"wanted": np.array(sorted(wanted), dtype=np.int64)}


@dataclass(frozen=True)
class Combine:
    """Equations 3 and 4 on the data that the client holds back, by the public `seed`; of a client that is `joining`, or in a round.

    Given: "model" (d,), its own; "others", models by sender.
    Part: "movement" (d,), new minus own. Kept: the affinities under `MEMORY`.
    """

    model: Model
    validation: float
    seed: int = 0
    joining: bool = False

    parts: ClassVar[Parts] = {"movement": "summed"}
    keeps: ClassVar[tuple[str, ...]] = (MEMORY,)

    @property
    def reads(self) -> tuple[str, ...]:
        return (MEMORY,)

    def run(self, task_input: TaskInput) -> Result:
        own, others = task_input.array("model"), task_input.params["others"]
        if not isinstance(others, dict):
            raise TypeError("parameter 'others': Combine takes models by sender")
        senders = sorted(others)
        kept = split_validation(task_input.data, self.validation, self.seed)[1]
        x, y = self.model.inputs(task_input.data.x_train[kept]), tensor(task_input.data.y_train[kept])
        movements = [np.asarray(others[sender]) - own for sender in senders]
        losses = np.array([self._loss(np.asarray(others[sender]), x, y) for sender in senders])
        raw, weights = first_order_weights(self._loss(own, x, y), losses, [float(np.linalg.norm(vector)) for vector in movements])
        moved = np.zeros(own.shape)
        for weight, movement in zip(weights, movements, strict=True):
            moved += weight * movement
        affinity = _affinity(task_input)
        for sender, weight in zip(senders, raw, strict=True):
            affinity[sender] = affinity.get(sender, 0.0) + float(weight)
        known = sorted(affinity)
        return {"movement": moved.astype(own.dtype), MEMORY: np.array([known, [affinity[client] for client in known]], dtype=np.float64)}

    def _loss(self, vector: Array, x: torch.Tensor, y: torch.Tensor) -> float:
        module = self.model.lent(vector)
        with torch.no_grad():
            return float(loss_of(self.model.loss, module(x), y).double())


def first_order_weights(own: float, losses: Array, distances: Sequence[float]) -> tuple[Array, Array]:
    """(w_n, their positive parts scaled to sum 1 or all 0) from the client's own loss, models' losses and their distances from its own.

    A model at distance 0 has weight 0; so has one whose loss is not finite, and every one if the own loss is not.
    """
    gaps = np.asarray(distances, dtype=np.float64)
    gain = np.zeros_like(gaps)
    known = np.isfinite(losses) & np.isfinite(own)
    gain[known] = own - np.asarray(losses, dtype=np.float64)[known]
    raw = np.divide(gain, gaps, out=np.zeros_like(gaps), where=gaps > 0)
    positive = np.maximum(raw, 0.0)
    return raw, positive / positive.sum() if positive.sum() > 0 else positive


def _affinity(task_input: TaskInput) -> dict[int, float]:
    if MEMORY not in task_input.memory:
        return {}
    clients, values = task_input.memory[MEMORY]
    return {int(client): float(value) for client, value in zip(clients, values, strict=True)}


@dataclass(frozen=True, eq=False)
class FedFomoState:
    """Everybody's own model, which the server cannot open, and who has trained so far."""

    model: Shared
    trained: tuple[int, ...] = ()


@ranged("algorithm")
def fedfomo(
    train: Train,
    *,
    models: Annotated[int, Key("Models of others that a client asks for in a round.", "[1, inf)", "models")] = 5,
    epsilon: Annotated[float, Key("Probability that a client asks for a random model instead of the best.", "[0, 1]")] = 0.3,
    epsilon_decay: Annotated[float, Key("How much that falls in each round.", "[0, 1]")] = 0.05,
    validation: Annotated[float, Key("Share of a client's training data that is held back for weights.", "(0, 1)")] = 0.2,
    seed: int = 0,
) -> Algorithm:
    """Every client its own model, mixed from `models` others a round. `validation` is the share of the training data held back.

    Raises `InputError` for parameters that cannot be.
    """
    start = Start(train.model, seed)
    train_part = OnPart(train, validation, seed=seed)
    ask, combine = Ask((), models, epsilon, epsilon_decay), Combine(train.model, validation, seed)
    first_ask, first_combine = Ask((), models, 1.0), replace(combine, joining=True)

    def init(federation: Federation) -> FedFomoState:
        federation.compute(HasValidation(validation))  # nothing leaves; a client that cannot hold data back fails here
        return FedFomoState(Shared(own=(OwnAddend(federation.compute(start)["model"]),)))

    def round(federation: Federation, state: FedFomoState) -> tuple[FedFomoState, RoundRecord]:
        cohort = federation.cohort(dict.fromkeys(federation.clients, 0))
        state, asked = combined(federation, state, cohort, ask.at(federation.round), combine)
        held = federation.compute(train_part.at(federation.round), {"model": state.model}, on=cohort)
        model = federation.fold(state.model + Shared(own=(OwnAddend(held["update"]),)))
        trained = tuple(sorted({*state.trained, *held.clients}))
        return FedFomoState(model, trained), RoundRecord(federation.round, cohort, None, {"relayed_models": asked})

    def combined(
        federation: Federation, state: FedFomoState, clients: Sequence[int], ask: Ask, combine: Combine
    ) -> tuple[FedFomoState, int]:
        """Clients ask for models, get them, and combine; the new state and how many models travelled at most."""
        here = set(federation.clients)
        candidates = tuple(client for client in state.trained if client in here)
        askers = [client for client in clients if any(other != client for other in candidates)]
        if not askers:
            return state, 0
        wanted = federation.compute(replace(ask, candidates=candidates), on=askers)["wanted"]
        received = federation.relay(_held(state.model), to=wanted)
        params: dict[str, Parameter] = {"model": state.model, "others": received}
        mixed = federation.compute(combine, params, on=received.of(askers).clients)
        model = federation.fold(state.model + Shared(own=(OwnAddend(mixed["movement"]),)))
        return replace(state, model=model), models * len(askers)

    def serve(state: FedFomoState) -> Served:
        return Served(Evaluate(train.model), {"model": state.model})

    def admit(federation: Federation, state: FedFomoState, newcomers: Sequence[int]) -> tuple[FedFomoState, Mapping[str, object]]:
        """Newcomers start from the initial model and combine random members' models once."""
        federation.compute(HasValidation(validation), on=newcomers)
        fresh = federation.compute(start, on=newcomers)
        state = replace(state, model=federation.fold(state.model + Shared(own=(OwnAddend(fresh["model"]),))))
        state, asked = combined(federation, state, sorted(newcomers), first_ask, first_combine)
        return state, {"relayed_models": asked}

    begun = (request(HasValidation(validation)), request(start, {"model": "relay"}))
    schedule = Schedule(
        begun, (*_mixing(ask, combine), request(train_part, {"update": "relay"})), (*begun, *_mixing(first_ask, first_combine)),
        (scores(Evaluate(train.model)),),
    )  # fmt: skip
    return Algorithm("fedfomo", ("relay",), init, round, serve, admit, schedule=schedule)


def _mixing(ask: Ask, combine: Combine) -> tuple[TaskRequest, TaskRequest]:
    return request(ask, {"wanted": "gather"}, varies=("candidates",)), request(combine, {"movement": "relay"})


def _held(model: Shared) -> Held:
    """The handle of everybody's own model."""
    (own,) = model.own
    return own.held


FEDFOMO = AlgorithmSpec(
    "fedfomo", fedfomo, "own models, mixed from those of a few others that help (Zhang et al. 2021)",
    states=(FedFomoState,), tasks=(Ask, Combine, HasValidation, OnPart),
    sample_refused="clients send whole models to each other and choose by un-noised losses",
    knowledge=no_groups,
)  # fmt: skip
