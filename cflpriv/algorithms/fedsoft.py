"""FedSoft: every client's data are a mixture of k distributions; it trains one model of its own, drawn to k shared centres by its shares.

Source: Ruan & Joe-Wong 2022 (AAAI), "FedSoft: Soft Clustered Federated Learning with Proximal Local Updating" (arXiv 2112.06053),
Algorithm 1, and the authors' code (`clients.py`, `servers.py`). Every τ rounds client i estimates its importance weights
u_is = max(n_is / n_i, σ), n_is being the number of its samples on which centre c_s has the lowest loss. In every round it trains its own
model w_i on f_i(w_i) + (λ/2) Σ_s u_is ‖w_i − c_s‖². The server sets c_s to Σ_i v_is w_i with v_is = u_is n_i / Σ_j u_js n_j.

The proximal terms are one: with c̄ = Σ_s u_is c_s / Σ_s u_is their gradient is that of (λ/2) Σ_s u_is ‖w_i − c̄‖².

A client sends one vector with a block a centre, u_is (w_i − c_s) and u_is. So one `mean` over the cohort is all that leaves it, and the new
centre is c_s plus the quotient of two sums.

Deviations, each for a reason:
- Centres are weighted means over the cohort, as in the authors' code without selection. Algorithm 1 draws K clients a centre with
  probabilities v_is and averages evenly, which is the same in expectation. It would show the server who draws to which centre.
- λ Σ_s u_is is taken as λ. The sum exceeds 1 by σ for each centre that no sample prefers.
- Clients use SGD as `[training]` sets it. A client trains from its own model, at first the initial one, as in the authors' code.
- A client that has not trained yet uses the centre of lowest training loss.
- With partial participation, a client estimates its importance weights in the first round of each span of τ rounds in which it trains. In
  the paper all do in the span's first round.
- λ = 0.1, σ = 1e-4 (the authors' code for MNIST) and τ = 2. k = 2 as in the paper's experiments.

Under secure sums a client with all of its samples in one centre would show as that centre if it were alone there. So σ has to be so large
that the effective number of clients of every centre reaches the minimum cohort size (`protocols.secagg.effective`), whatever the importance
weights are: 0.1 to 0.3 for a few clients, less for many. An error names the least σ for the cohort of a round. A larger σ draws the centres
together.

What it reveals, by which operation: `mean` shows sums over the cohort, of which the blocks tell how many samples prefer which centre in
all. No operation shows whose these are. In the clear it shows the blocks of each client, hence its shares and its own model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Annotated, Any, ClassVar

import numpy as np
import torch

from ..contract.calls import TooUnequal
from ..contract.handles import Shared
from ..contract.operations import Federation
from ..contract.schedule import Schedule, request, scores
from ..contract.transcript import RoundRecord
from ..engine import Result, TaskInput
from ..engine.device import tensor
from ..engine.models import Model
from ..errors import InputError
from ..keys import Key, ranged
from ..tasks.evaluation import EvaluateUsed, sample_losses
from ..tasks.training import Train
from ..types import Array, ClientData, Parts
from .fedavg import Weights
from .fesem import centres_of
from .interface import Algorithm, AlgorithmSpec, Served
from .shared.around import AroundTraining
from .shared.attempts import try_mean
from .shared.checks import enough_clients
from .shared.counted_sums import admit_by_choice, moved_by
from .shared.steps import mean_notes

__all__ = ["EvaluateSoft", "SoftStep", "fedsoft", "importance", "losses_of_models"]

OWN, SHARES, SPAN = "fedsoft model", "fedsoft shares", "fedsoft span"
"""Under these names clients keep w_i, their importance weights, and the span of rounds that these are of."""


def losses_of_models(model: Model, models: Sequence[Array], data: ClientData) -> Array:
    """The loss (k, n) float64 of each training sample under each of k models; infinite where it is no number."""
    x, y = model.inputs(data.x_train), tensor(data.y_train)
    rows = torch.stack([sample_losses(model, np.asarray(vector), x, y) for vector in models]).double().cpu().numpy()
    return np.asarray(np.nan_to_num(rows, nan=np.inf, posinf=np.inf))


def importance(losses: Array, smoother: float) -> Array:
    """u (k,) of losses (k, n): the share of samples on which each centre is best (the first of equals), `smoother` at least."""
    counts = np.bincount(losses.argmin(axis=0), minlength=len(losses))
    return np.asarray(np.maximum(counts / losses.shape[1], smoother))


@dataclass(frozen=True)
class SoftStep(AroundTraining):
    """Train w_i towards the centres of the given list "model" by the client's shares.

    They are estimated first where the last estimate is not of this `span` of τ rounds. `train` has λ as its `prox`. Part: "blocks"
    (k, d + 1), u_s (w_i − c_s) and u_s. Kept: "trained" (d,), w_i under `OWN`, u under `SHARES`, `span` under `SPAN`.
    """

    gives: ClassVar[Parts] = {"blocks": "summed"}
    remembers = (OWN, SHARES, SPAN)
    beyond = "how the client's own model differs from the centres before it trains"

    smoother: float
    span: int
    seed: int

    @property
    def spread(self) -> float:
        """Of the weights inside the blocks: importance weights lie between σ and 1."""
        return 1 / self.smoother

    def before(self, task_input: TaskInput) -> TaskInput:
        model, centres = self.train.model, centres_of(task_input)
        known = SPAN in task_input.memory and int(task_input.memory[SPAN]) == self.span
        shares = task_input.memory[SHARES] if known else importance(losses_of_models(model, centres, task_input.data), self.smoother)
        own = task_input.memory[OWN] if OWN in task_input.memory else model.init(self.seed)
        target = sum(share * centre for share, centre in zip(shares / shares.sum(), centres, strict=True))
        return replace(task_input, params={"model": own, "anchor": np.asarray(target, own.dtype), "shares": shares})

    def after(self, task_input: TaskInput, inner: TaskInput, result: Result) -> Result:
        shares, trained = inner.array("shares"), inner.array("model") + np.asarray(result["update"])
        rows = [np.append(share * (trained - centre), share) for share, centre in zip(shares, centres_of(task_input), strict=True)]
        return {
            "blocks": np.stack(rows).astype(trained.dtype),
            "trained": result["trained"],
            OWN: trained,
            SHARES: shares,
            SPAN: np.array(self.span),
        }


@dataclass(frozen=True)
class EvaluateSoft(EvaluateUsed):
    """`Evaluate` of the client's own model, or of the centre with the lowest loss in the given list "model" while it has none.

    Parts: those of `Evaluate`, and "choice" (), the centre that most of its samples prefer.
    """

    @property
    def parts(self) -> Parts:
        return {**super().parts, "choice": "choice"}

    @property
    def reads(self) -> tuple[str, ...]:
        return (OWN, SHARES)

    def used(self, task_input: TaskInput) -> Array:
        return task_input.memory[OWN] if OWN in task_input.memory else centres_of(task_input)[self._lowest(task_input)]

    def run(self, task_input: TaskInput) -> Result:
        return {**super().run(task_input), "choice": self._choice(task_input)}

    def run_many(self, inputs: Sequence[TaskInput], device: Any) -> tuple[list[Result], str]:
        results, path = super().run_many(inputs, device)
        return [{**result, "choice": self._choice(task_input)} for task_input, result in zip(inputs, results, strict=True)], path

    def _choice(self, task_input: TaskInput) -> Array:
        return np.array(int(task_input.memory[SHARES].argmax()) if SHARES in task_input.memory else self._lowest(task_input))

    def _lowest(self, task_input: TaskInput) -> int:
        return int(losses_of_models(self.model, centres_of(task_input), task_input.data).mean(axis=1).argmin())


@dataclass(frozen=True, eq=False)
class FedSoftState:
    """The centres."""

    models: tuple[Shared, ...]


@dataclass(frozen=True)
class FedSoftSettings:
    """What is fixed in a run; `train` has λ as its `prox`."""

    train: Train
    k: int
    smoother: float
    interval: int
    weights: Weights
    seed: int


@ranged("algorithm")
def fedsoft(
    train: Train,
    *,
    k: Annotated[int, Key("Number of centres.", "[1, inf)", "clusters")] = 2,
    lam: Annotated[float, Key("λ, which draws a client's model to the centres.", "[0, inf)")] = 0.1,
    smoother: Annotated[float, Key("σ, the importance weight of a centre that no sample of a client prefers.", "(0, 1]")] = 1e-4,
    interval: Annotated[int, Key("τ: clients estimate their importance weights every so many rounds.", "[1, inf)", "rounds")] = 2,
    weights: Weights = "examples",
    seed: int = 0,
) -> Algorithm:
    """FedSoft with `k` centres. Raises `InputError` for parameters that cannot be."""
    settings = FedSoftSettings(replace(train, prox=lam), k, smoother, interval, weights, seed)
    return Algorithm(
        "fedsoft", ("mean",), partial(_init, settings), partial(_round, settings), partial(_serve, settings), admit_by_choice,
        partial(_describe, settings), reads_means=True, schedule=_schedule(settings),
    )  # fmt: skip


def _schedule(settings: FedSoftSettings) -> Schedule:
    """One step a round, of the span that the round is in."""
    step = SoftStep(settings.train, settings.smoother, 0, settings.seed)
    return Schedule(
        round=(request(step, {"blocks": "sum"}, varies=("span",)),), serving=(scores(EvaluateSoft(settings.train.model)),)
    )  # fmt: skip


def _init(settings: FedSoftSettings, federation: Federation) -> FedSoftState:
    enough_clients(settings.k, len(federation.clients))
    return FedSoftState(tuple(Shared(settings.train.model.init(settings.seed, j)) for j in range(settings.k)))


def _round(settings: FedSoftSettings, federation: Federation, state: FedSoftState) -> tuple[FedSoftState, RoundRecord]:
    cohort = federation.cohort(dict.fromkeys(federation.clients, 0))
    span = federation.round // settings.interval
    task = SoftStep(settings.train.at(federation.round), settings.smoother, span, settings.seed)
    held = federation.compute(task, {"model": list(state.models)}, on=cohort)
    try:
        means = try_mean(federation, held["blocks"], settings.weights)
    except TooUnequal as error:
        least = ceil(1e4 / error.most) / 1e4
        raise InputError(
            f"algorithm.smoother = {settings.smoother:g}: a client that is alone in a centre could be nearly all of it; at least {least:g} "
            f"keeps the effective number of clients at min_cohort ({error})"
        ) from None
    (mean,) = means
    notes = mean_notes(means)
    if mean is None:
        return state, RoundRecord(federation.round, held.clients, None, {**notes, "unchanged_clusters": list(range(settings.k))})
    blocks = mean.parts["blocks"].value()
    shares = np.maximum(blocks[:, -1].astype(np.float64), settings.smoother)  # no less but by the rounding of a secure sum
    models = moved_by(state.models, blocks[:, :-1], shares)
    return FedSoftState(models), RoundRecord(federation.round, held.clients, None, {**notes, "shares": [float(share) for share in shares]})


def _serve(settings: FedSoftSettings, state: FedSoftState) -> Served:
    return Served(EvaluateSoft(settings.train.model), {"model": list(state.models)})


def _describe(settings: FedSoftSettings, state: FedSoftState) -> Mapping[str, Any]:
    return {"k": settings.k, "rule": f"k = {settings.k}"}


FEDSOFT = AlgorithmSpec(
    "fedsoft", fedsoft, "own models drawn to k shared centres by each client's mixture (Ruan & Joe-Wong 2022)",
    states=(FedSoftState,), tasks=(EvaluateSoft, SoftStep), sample_refused="its own models keep training without noise",
    client_refused="a centre is the quotient of two sums, and noise in a small divisor drowns it",
    cohorts="one", knowledge=lambda settings: f"the number of groups, k = {settings.get('k', 2)}",
)  # fmt: skip
