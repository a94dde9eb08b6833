"""FedProto: clients share the mean feature vector of each class, and nothing of their models.

Source: Tan et al. 2022 (AAAI), Algorithm 1, equations 3, 6 and 7. Client i sends C_i^j, the mean of f_i(x) over its samples of class j,
f_i being its network without the last layer; the server averages over the clients that own class j; local training adds λ ·
distance(f_i(x), C̄^y) to the loss, here ‖·‖²/e per sample as in the authors' code.

Deviations, each for a reason:
- The mean over the owners of a class is unweighted, as in the authors' code; eq. 6 weighs by class counts, which would have to be sent.
- A client predicts by its last layer. The paper also takes the nearest prototype.
- All clients have one architecture here and start from one initial model; a class without a mean in this round keeps its prototype.

What it reveals, by which operation: through `gather`, which classes each client owns (not at all where sums are oblivious: then a class is
a sum over those who choose it, and one owned by fewer than the minimum cohort size is dropped); through one `mean` per class, everybody's
prototypes of it, or their sum. A class's mean feature vector is its mean image seen through the network; with a linear model it *is* the
mean image. Features beyond `secagg_clip` are clipped (and reported).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch

from ..contract.handles import GroupMean, Held, Labels, Shared
from ..contract.operations import Federation
from ..contract.schedule import Leaving, Schedule, request, scores
from ..contract.transcript import RoundRecord
from ..engine import Result, TaskInput
from ..engine.models import Model
from ..errors import TooFewClients
from ..keys import Key, ranged
from ..tasks.evaluation import EvaluateOwn
from ..tasks.training import Train, listening
from ..types import Array, Parts
from .interface import Algorithm, AlgorithmSpec, Served, no_groups
from .shared.around import AroundTraining
from .shared.attempts import choices

__all__ = ["TrainToPrototypes", "class_means", "fedproto"]


@dataclass(frozen=True)
class TrainToPrototypes(AroundTraining):
    """Train the client's own model (at first the initial one of `seed`), features pulled to the given list "prototypes", one for each of
    `known` classes. Then, of the trained model, "prototype j" (e,) and "owns j" () 0 or 1 for every class j; zero for one it does not own.

    Kept: "trained" (d,), the own model.
    """

    beyond = ""

    seed: int
    known: tuple[int, ...]

    @property
    def parts(self) -> Parts:
        each: Parts = {"prototype": "summed", "owns": "choice"}
        return {f"{name} {j}": use for name, use in each.items() for j in range(self.train.model.classes)}

    @property
    def reads(self) -> tuple[str, ...]:
        return ("trained",)

    def before(self, task_input: TaskInput) -> TaskInput:
        model = self.train.model
        own = task_input.memory["trained"] if "trained" in task_input.memory else model.init(self.seed)
        if not self.train.pull:
            return replace(task_input, params={"model": own})
        sent = task_input.params["prototypes"]
        if not isinstance(sent, list):
            raise TypeError("parameter 'prototypes': expected a list")
        prototypes = np.full((model.classes, len(sent[0])), np.nan, dtype=own.dtype)
        prototypes[list(self.known)] = sent
        return replace(task_input, params={"model": own, "prototypes": prototypes})

    def after(self, task_input: TaskInput, inner: TaskInput, result: Result) -> Result:
        trained = inner.array("model") + np.asarray(result["update"])
        means, owned = class_means(self.train.model, trained, task_input.data.x_train, task_input.data.y_train)
        sent: Result = {"trained": trained}
        for j in range(self.train.model.classes):
            sent |= {f"prototype {j}": means[j].copy(), f"owns {j}": np.array(int(owned[j]))}
        return sent


def class_means(model: Model, vector: Array, x: Array, y: Array) -> tuple[Array, Array]:
    """The mean of what the model's last layer takes, over the samples of each class (classes, e), and which classes occur (classes,)."""
    seen: list[torch.Tensor] = []
    module = model.lent(vector)
    with torch.no_grad(), listening(module, seen):
        for at in range(0, len(y), 1024):
            module(model.inputs(x[at : at + 1024]))
    features = torch.cat(seen).cpu().numpy()
    counts = np.bincount(y, minlength=model.classes)
    sums = np.zeros((model.classes, features.shape[1]))
    np.add.at(sums, y, features)
    return (sums / np.maximum(counts, 1)[:, None]).astype(features.dtype), counts > 0


@dataclass(frozen=True, eq=False)
class FedProtoState:
    """The prototypes of the classes that have one."""

    prototypes: Mapping[int, Shared]


@ranged("algorithm")
def fedproto(
    train: Train,
    *,
    lam: Annotated[float, Key("λ, by which own models are drawn together by class prototypes (1 in the paper).", "[0, inf)")] = 1.0,
    seed: int = 0,
) -> Algorithm:
    """Own models, drawn together by class prototypes with strength `lam` (λ, 1 in the paper). Without it (0) it is local training.

    Raises `InputError` for a λ that is not a finite number of 0 or more.
    """
    initial = train.model.init(seed)

    def init(federation: Federation) -> FedProtoState:
        return FedProtoState({})

    def round(federation: Federation, state: FedProtoState) -> tuple[FedProtoState, RoundRecord]:
        cohort = federation.cohort(dict.fromkeys(federation.clients, 0))
        known = tuple(sorted(state.prototypes)) if lam else ()
        task = TrainToPrototypes(replace(train.at(federation.round), pull=lam if known else 0.0), seed, known)
        params = {"prototypes": [state.prototypes[j] for j in known]} if known else {}
        held = federation.compute(task, params, on=cohort)
        means = {j: _class_mean(federation, held, j) for j in range(train.model.classes)}
        prototypes = {j: mean.parts[f"prototype {j}"] for j, mean in means.items() if mean is not None}
        notes = {
            "owners": [0 if mean is None else mean.count for mean in means.values()],
            "clipped_clients": sum(mean.clipped for mean in means.values() if mean is not None),
        }
        return FedProtoState({**state.prototypes, **prototypes}), RoundRecord(federation.round, held.clients, None, notes)

    def serve(state: FedProtoState) -> Served:
        return Served(EvaluateOwn(train.model, "trained"), {"model": initial})

    def admit(federation: Federation, state: FedProtoState, newcomers: Sequence[int]) -> tuple[FedProtoState, Mapping[str, Any]]:
        """Newcomers start from the initial model; what they gain from the others comes with their first training."""
        return state, {}

    reason = "each class over those who own it; use 'secagg-oblivious', whose sums are over everyone"
    return Algorithm("fedproto", ("gather", "mean"), init, round, serve, admit, regroups=reason, schedule=_schedule(train, lam, seed))


def _schedule(train: Train, lam: float, seed: int) -> Schedule:
    """Training without prototypes until there are some, then towards those that are known."""
    leaves: dict[str, Leaving] = {}
    for j in range(train.model.classes):
        leaves |= {f"prototype {j}": "sum", f"owns {j}": "gather"}
    asked = [request(TrainToPrototypes(replace(train, pull=0.0), seed, ()), leaves)]
    if lam:
        asked.append(request(TrainToPrototypes(replace(train, pull=lam), seed, ()), leaves, varies=("known",)))
    return Schedule(round=tuple(asked), serving=(scores(EvaluateOwn(train.model, "trained")),))


def _class_mean(federation: Federation, held: Held, j: int) -> GroupMean | None:
    """The mean of the prototypes of class j over its owners; None where they are too few.

    Group 1 are the owners. Where the server learns who owns the class the others send nothing, nor do those whose choice did not
    come; else they send zeros to group 0.
    """
    owns = held[f"owns {j}"]
    released = choices(federation, owns, 2)
    groups: Labels | Held = owns if released is None else released
    owners = None if released is None else [client for client, owner in released.items() if owner]
    if owners == []:
        return None
    try:
        mean = federation.mean(held[f"prototype {j}"], groups=groups, k=2, on=owners)[1]
    except TooFewClients:
        return None
    # below the minimum cohort size with `small_clusters = "local"` everybody has its own back, which is no prototype for others
    return None if mean is not None and mean.parts[f"prototype {j}"].own else mean


FEDPROTO = AlgorithmSpec(
    "fedproto", fedproto, "own models, drawn together by the mean features of each class (Tan et al. 2022)",
    states=(FedProtoState,), tasks=(TrainToPrototypes,), sample_refused="class means reveal which labels a client has",
    knowledge=no_groups, needs_classes=lambda settings: "draws features to the mean of each class, and numbers have no classes",
)  # fmt: skip
