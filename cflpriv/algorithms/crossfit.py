"""Cross-fitted clustering: one round finds the groups, their number and whether there are any; then FedAvg inside each.

Before the first round every client gives the mean gradients of two random halves of its data at the initial model, each sample's scaled to
norm 1 (`tasks.fold_gradients`). Their Gram matrix is enough for a test (`clustering.group_test`) that answers one of three things: all
clients are alike, they differ without clear groups, or there are k groups. In the first two cases one model is trained. There is no
threshold but `alpha`, the chance of finding groups where there are none.

`variant = "balanced"` counts every label of a client alike, so that groups show that differ in what a label looks like, or means, or in
which labels there are. "plain" counts every sample alike: take it where the groups differ in label frequencies alone.

Source: this project; the parts that are known are named in `clustering.group_test`. Training is PACFL's (Vahidian et al. 2023, Alg. 1).

What it reveals, by which operation: `gram`, once, the halves, or under a protection their products; the labels, whether the first test
found groups (as two counts of simulated draws and a number of directions); then what FedAvg's `mean` shows inside groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from ..contract.handles import Held, Shared
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
from .shared.grouping import ALPHA, DRAWS, FindGroups, JoinGroups, Landmarks, check_draws, find_groups

__all__ = ["crossfit"]


@dataclass(frozen=True, eq=False)
class CrossfitState:
    """Group models, who is in which, and the folds, still with their owners."""

    models: tuple[Shared, ...]
    clustering: Clustering
    folds: Held
    notes: Mapping[str, Any]
    evidence: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class CrossfitSettings:
    """What is fixed in a run."""

    train: Train
    folds: FoldGradients
    find: FindGroups
    weights: Weights
    seed: int
    landmarks: int | None = None


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
    settings = CrossfitSettings(train, folds, FindGroups(alpha, draws, k, seed, numbers=train.model.dimension), weights, seed, landmarks)
    return Algorithm(
        "crossfit", ("gram", "mean"),
        partial(_init, settings), partial(_round, settings), partial(_serve, settings), partial(_admit, settings), _describe,
        public_groups=k != 1,
        schedule=schedule_of_averaging(
            train, Evaluate(train.model), start=[request(folds, {"folds": "gram"})], joining=[request(folds, {"folds": "gram"})]
        ),
    )  # fmt: skip


def _init(settings: CrossfitSettings, federation: Federation) -> CrossfitState:
    find = settings.find
    if find.k is not None and 0 < len(federation.clients) < find.k:
        raise InputError(f"algorithm.k: {find.k} groups of {len(federation.clients)} clients")
    initial = Shared(settings.train.model.init(settings.seed))
    held = federation.compute(settings.folds, {"model": initial})["folds"]
    grouping = find_groups(federation, held, find, settings.landmarks)
    return CrossfitState((initial,) * grouping.clustering.k, grouping.clustering, held, grouping.notes, grouping.evidence)


def _round(settings: CrossfitSettings, federation: Federation, state: CrossfitState) -> tuple[CrossfitState, RoundRecord]:
    models, record = average_within(federation, state.models, state.clustering, settings.train, settings.weights)
    return replace(state, models=models), record


def _serve(settings: CrossfitSettings, state: CrossfitState) -> Served:
    return Served(Evaluate(settings.train.model), {"model": list(state.models)}, state.clustering)


def _admit(
    settings: CrossfitSettings, federation: Federation, state: CrossfitState, newcomers: Sequence[int]
) -> tuple[CrossfitState, Mapping[str, Any]]:
    """A newcomer's folds are those at the initial model, as everybody's were."""
    initial = Shared(settings.train.model.init(settings.seed))
    held = federation.compute(settings.folds, {"model": initial}, on=newcomers)["folds"]
    released = federation.gram(held, then=JoinGroups(settings.find), against=state.folds)
    labels = [int(label) for label in released.result["labels"]]
    return replace(state, clustering=state.clustering.extended(held.clients, labels)), {"joined": labels}


def _describe(state: CrossfitState) -> Mapping[str, Any]:
    return {"clustering": state.clustering, "evidence": state.evidence, **state.notes}


def _sample_releases(rounds: int, settings: Mapping[str, Any]) -> Releases:
    """One noisy mean gradient, and a training in each round."""
    if settings.get("variant") == "balanced":
        raise InputError("algorithm.variant = 'balanced' under privacy.unit = 'sample': has no private form; use 'plain'")
    return Releases(signatures=1, trainings=rounds, mechanism="mean")


def _knowledge(settings: Mapping[str, Any]) -> str:
    k = settings.get("k")
    return f"none: a test at level {settings.get('alpha', ALPHA):g}" if k is None else f"the number of groups, k = {k}"


CROSSFIT = AlgorithmSpec(
    "crossfit", crossfit, "one-shot clustering by a test on cross-fitted gradients, which finds the number of groups; then FedAvg in each",
    states=(CrossfitState,), tasks=(FoldGradients,), functions=(FindGroups, JoinGroups),
    sample_releases=_sample_releases, cohorts="labelled",
    compared=lambda settings: ComparedValue(HALVES, halves=True), knowledge=_knowledge,
    serves_released=True,
)  # fmt: skip
