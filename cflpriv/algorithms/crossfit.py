"""Cross-fitted clustering: one round finds the groups, their number and whether there are any; then FedAvg inside each.

Before the first round every client gives the mean gradients of two random halves of its data at the initial model, each sample's scaled to
norm 1 (`tasks.fold_gradients`). Their Gram matrix is enough for a test (`clustering.group_test`) that answers one of three things: all
clients are alike, they differ without clear groups, or there are k groups. In the first two cases one model is trained. There is no
threshold but `alpha`, the chance of finding groups where there are none.

`variant = "balanced"` counts every label of a client alike, so that groups show that differ in what a label looks like, or means, or in
which labels there are. "plain" counts every sample alike: take it where the groups differ in label frequencies alone.

Source: this project; the parts that are known are named in `clustering.group_test`. Training is PACFL's (Vahidian et al. 2023, Alg. 1).

With `recheck_every` clients whose data changed are placed again, and newcomers may belong to no cluster or open one (`shared.rechecks`).

What it reveals, by which operation: `gram`, at the start and after changes, the halves, or under a protection their products; the labels,
whether the first test found groups (as two counts of simulated draws and a number of directions); then what FedAvg's `mean` shows inside
groups; with `recheck_every` by `gather` whose data changed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from ..contract.handles import Shared
from ..contract.operations import Federation
from ..contract.schedule import request
from ..contract.transcript import RoundRecord
from ..errors import InputError
from ..keys import Key, ranged
from ..privacy.settings import Releases
from ..tasks.evaluation import Evaluate
from ..tasks.fold_gradients import FoldGradients
from ..tasks.halves import HALVES
from ..tasks.training import Train
from ..types import Clustering
from .fedavg import Weights, average_within, schedule_of_averaging
from .interface import Algorithm, AlgorithmSpec, ComparedValue, Served
from .shared.grouping import ALPHA, DRAWS, FindGroups, JoinGroups, Landmarks, PlaceClients, check_draws, find_groups
from .shared.rechecks import (
    PLACE_ALPHA,
    RECHECK_TASKS,
    Groupings,
    PlaceAlpha,
    RecheckEvery,
    Rechecks,
    newcomers_placed,
    rechecked,
    refuse_private,
    watched,
)  # fmt: skip

__all__ = ["crossfit"]


@dataclass(frozen=True, eq=False)
class CrossfitState:
    """Group models and who is in which, and how they came about."""

    groupings: Groupings
    notes: Mapping[str, Any]
    evidence: Mapping[str, Any] | None = None

    @property
    def models(self) -> tuple[Shared, ...]:
        return self.groupings.models

    @property
    def clustering(self) -> Clustering:
        return self.groupings.clustering


@dataclass(frozen=True)
class CrossfitSettings:
    """What is fixed in a run: training, and (`rechecks`) the folds and how groups are found and clients placed."""

    train: Train
    weights: Weights
    seed: int
    rechecks: Rechecks


@ranged("algorithm")
def crossfit(
    train: Train,
    *,
    variant: Annotated[
        Literal["balanced", "plain"] | None,
        Key("Balanced halves, or plain ones.", default="`balanced`; `plain` under sample-level privacy"),
    ] = None,
    alpha: Annotated[float, Key("Level of the test that finds the number of groups.", "(0, 1)")] = ALPHA,
    draws: Annotated[int, Key("Simulations without groups, for the test; enough to show its level.", "[1, inf)", "simulations")] = DRAWS,
    k: Annotated[int | None, Key("Number of groups; nothing is tested then.", "[1, inf)", "groups", default="found by a test")] = None,
    sketch: Annotated[int, Key("Length of a sketched gradient.", "[1, inf)", "numbers")] = 1024,
    landmarks: Landmarks = None,
    recheck_every: RecheckEvery = 0,
    recheck_alpha: PlaceAlpha = PLACE_ALPHA,
    weights: Weights = "examples",
    seed: int = 0,
) -> Algorithm:
    """Cross-fitted clustering. `variant` is "balanced", or under sample-level privacy "plain".

    With `k` the number of groups is given and nothing is tested.

    `draws`: so many simulations under the null hypothesis are made for a test. `sketch`: the length of a sketched gradient.

    Raises `InputError` for parameters that cannot be.
    """
    check_draws(alpha, draws)
    folds = FoldGradients(train.model, variant != "plain", sketch, seed)
    find = FindGroups(alpha, draws, k, seed, numbers=train.model.dimension)
    rechecks = Rechecks(recheck_every, recheck_alpha, folds, "folds", find, True, landmarks)
    settings = CrossfitSettings(train, weights, seed, rechecks)
    kept, checked = rechecks.requests()
    compared = request(folds, {"folds": "gram"})
    return Algorithm(
        "crossfit", ("gram", "mean", *(("gather",) if recheck_every else ())),
        partial(_init, settings), partial(_round, settings), partial(_serve, settings), partial(_admit, settings), _describe,
        public_groups=k != 1 or recheck_every > 0,
        schedule=schedule_of_averaging(
            train, Evaluate(train.model), start=[compared, *kept], again=checked, joining=[compared, *kept]
        ),
    )  # fmt: skip


def _init(settings: CrossfitSettings, federation: Federation) -> CrossfitState:
    rechecks, find = settings.rechecks, settings.rechecks.find
    if find.k is not None and 0 < len(federation.clients) < find.k:
        raise InputError(f"algorithm.k: {find.k} groups of {len(federation.clients)} clients")
    initial = _initial(settings)
    held = federation.compute(rechecks.task, {"model": initial})[rechecks.part]
    watched(federation, rechecks)
    grouping = find_groups(federation, held, find, rechecks.landmarks)
    groupings = Groupings((initial,) * grouping.clustering.k, grouping.clustering, held)
    return CrossfitState(groupings, grouping.notes, grouping.evidence)


def _initial(settings: CrossfitSettings) -> Shared:
    """The initial model, at which all folds are computed."""
    return Shared(settings.train.model.init(settings.seed))


def _round(settings: CrossfitSettings, federation: Federation, state: CrossfitState) -> tuple[CrossfitState, RoundRecord]:
    groupings, notes = rechecked(federation, settings.rechecks, state.groupings, _initial(settings))
    models, record = average_within(federation, groupings.models, groupings.training, settings.train, settings.weights)
    return replace(state, groupings=replace(groupings, models=models)), replace(record, notes={**record.notes, **notes})


def _serve(settings: CrossfitSettings, state: CrossfitState) -> Served:
    return Served(Evaluate(settings.train.model), {"model": list(state.groupings.models)}, state.groupings.clustering)


def _admit(
    settings: CrossfitSettings, federation: Federation, state: CrossfitState, newcomers: Sequence[int]
) -> tuple[CrossfitState, Mapping[str, Any]]:
    """A newcomer's folds are those at the initial model, as everybody's were."""
    groupings, notes = newcomers_placed(federation, settings.rechecks, state.groupings, _initial(settings), newcomers)
    return replace(state, groupings=groupings), {"joined": [groupings.clustering[client] for client in newcomers], **notes}


def _describe(state: CrossfitState) -> Mapping[str, Any]:
    return {
        "clustering": state.groupings.clustering, "unplaced": state.groupings.unplaced, "evidence": state.evidence, **state.notes,
    }  # fmt: skip


def _sample_releases(rounds: int, settings: Mapping[str, Any]) -> Releases:
    """One noisy mean gradient, and a training in each round."""
    refuse_private(settings)
    if settings.get("variant") == "balanced":
        raise InputError("algorithm.variant = 'balanced' under privacy.unit = 'sample': has no private form; use 'plain'")
    return Releases(signatures=1, trainings=rounds, mechanism="mean")


def _knowledge(settings: Mapping[str, Any]) -> str:
    k = settings.get("k")
    return f"none: a test at level {settings.get('alpha', ALPHA):g}" if k is None else f"the number of groups, k = {k}"


CROSSFIT = AlgorithmSpec(
    "crossfit", crossfit, "one-shot clustering by a test on cross-fitted gradients, which finds the number of groups; then FedAvg in each",
    states=(CrossfitState, Groupings), tasks=(FoldGradients, *RECHECK_TASKS), functions=(FindGroups, JoinGroups, PlaceClients),
    sample_releases=_sample_releases, cohorts="labelled",
    compared=lambda settings: ComparedValue(HALVES, halves=True), knowledge=_knowledge,
    serves_released=True,
)  # fmt: skip
