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
from typing import Any, ClassVar, Literal

import numpy as np

from ..clustering.cuts import merge_small
from ..clustering.group_test import LEAST_TESTED, LOOK, Crowd, Groups, bounded, crowd_of_folds, distances_to_groups, groups_given, groups_of
from ..contract.handles import Held, Shared
from ..contract.operations import Federation, GramView, Results
from ..contract.transcript import RoundRecord
from ..errors import InputError
from ..randomness import stream
from ..tasks.evaluation import Evaluate
from ..tasks.fold_gradients import FoldGradients
from ..tasks.training import Train
from ..types import Array, Clustering
from .checks import at_least, known
from .fedavg import Weights, average_within
from .interface import Algorithm, AlgorithmSpec, Compared, Served

__all__ = ["FindGroups", "JoinGroups", "crossfit"]


@dataclass(frozen=True)
class FindGroups:
    """Public code run where the Gram may be seen: the test of all clients, and of each group found.

    Result: labels and k; the number of groups `found` before small ones were merged; of the first test how far it went (`stage`: 0 not
    tested, 1 no direction of difference, 2 ended at a first look, 3 all draws), the number of `directions`, and how many crowds without
    groups looked as grouped (`exceeding`, at most the number of clients: only small numbers are released). Evidence: distances, the first
    test's spectrum, edge and tree, and every test.
    """

    results: ClassVar[Results] = {"labels": "all", "k": "one", "directions": "one", "exceeding": "one", "stage": "one", "found": "one"}

    alpha: float
    draws: int
    k: int | None
    seed: int
    at_least: int = 1

    def __call__(self, view: GramView) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        crowd, rng = crowd_of_folds(bounded(view.gram)), stream(self.seed, "crossfit")
        groups = groups_of(crowd, rng, alpha=self.alpha, draws=self.draws) if self.k is None else groups_given(crowd, self.k, rng)
        squares = _squared_distances(crowd)
        labels = merge_small(groups.labels, squares, self.at_least)
        view.memory["labels"] = labels
        result = {"labels": labels, "k": int(labels.max()) + 1, "found": groups.k, "stage": 0, "directions": 0, "exceeding": 0}
        for first in groups.nodes[:1]:
            stage = 1 if not first.directions else 2 if first.draws < self.draws else 3
            result |= {"stage": stage, "directions": first.directions, "exceeding": min(first.exceeding, view.gram.n)}
        return result, _evidence(view.gram.clients, squares, groups)


def _squared_distances(crowd: Crowd) -> Array:
    """The unbiased squared distances (n, n) of the clients' true means; values below 0 are right."""
    own = np.diag(crowd.products)
    squares = -2 * crowd.products
    squares += own[:, None]
    squares += own[None, :]
    np.fill_diagonal(squares, 0.0)
    return np.asarray(squares)


def _evidence(clients: tuple[int, ...], squares: Array, groups: Groups) -> dict[str, Any]:
    evidence: dict[str, Any] = {"clients": clients, "distance": np.sqrt(np.maximum(squares, 0.0))}
    tests = [
        {"clients": [clients[at] for at in node.members], "directions": node.directions, "k": node.k, "p": node.p, "level": node.level}
        for node in groups.nodes
    ]
    if groups.nodes:
        first = groups.nodes[0]
        evidence |= {"spectrum": first.spectrum, "edge": first.edge} | ({} if first.tree is None else {"tree": first.tree})
    return evidence | {"tests": tests}


@dataclass(frozen=True)
class JoinGroups:
    """Each newcomer joins the group whose mean is nearest to it, by unbiased distances. Result: the newcomers' labels."""

    results: ClassVar[Results] = {"labels": "new"}

    def __call__(self, view: GramView) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        labels: Array = view.memory["labels"]
        fresh = range(view.gram.n - len(view.new), view.gram.n)
        squares = distances_to_groups(bounded(view.gram), fresh, labels, int(labels.max()) + 1)
        return {"labels": squares.argmin(1)}, {"squared_distance": squares}


@dataclass(frozen=True, eq=False)
class State:
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


def crossfit(
    train: Train,
    *,
    variant: Literal["balanced", "plain"] = "balanced",
    alpha: float = 0.01,
    draws: int = 499,
    k: int | None = None,
    sketch: int = 1024,
    weights: Weights = "examples",
    seed: int = 0,
) -> Algorithm:
    """Cross-fitted clustering. With `k` the number of groups is given and nothing is tested.

    `draws`: so many crowds without groups are simulated for a test. `sketch`: the length of a sketched gradient.

    Raises `InputError` for parameters that cannot be.
    """
    known("variant", variant, "balanced", "plain")
    at_least(1, k=k, sketch=sketch)
    if not 0 < alpha < 1:
        raise InputError(f"algorithm.alpha: {alpha} is outside (0, 1)")
    least = int(np.ceil(1 / alpha - 1e-9)) - 1
    if draws < max(1, least):
        raise InputError(f"algorithm.draws: {draws} draws cannot show a level of {alpha:g}; take at least {max(1, least)}")
    folds = FoldGradients(train.model, variant == "balanced", sketch, seed)
    settings = CrossfitSettings(train, folds, FindGroups(alpha, draws, k, seed), weights, seed)
    return Algorithm(
        "crossfit", ("gram", "mean"),
        partial(_init, settings), partial(_round, settings), partial(_serve, settings), partial(_admit, settings), _describe,
        public_groups=k != 1,
    )  # fmt: skip


def _init(settings: CrossfitSettings, federation: Federation) -> State:
    find = settings.find
    if find.k is not None and 0 < len(federation.clients) < find.k:
        raise InputError(f"algorithm.k: {find.k} groups of {len(federation.clients)} clients")
    initial = Shared(settings.train.model.init(settings.seed))
    held = federation.compute(settings.folds, {"model": initial})["folds"]
    released = federation.gram(held, then=replace(find, at_least=federation.merge_below))
    found = released.result
    clustering = Clustering(held.clients, tuple(int(label) for label in found["labels"]), int(found["k"]))
    return State((initial,) * clustering.k, clustering, held, _notes(find, found, len(held.clients)), released.evidence)


def _notes(find: FindGroups, found: Mapping[str, Any], clients: int) -> dict[str, Any]:
    """What a run says of how its groups were found. A count at its cap gives a p-value from below."""
    if find.k is not None:
        return {"rule": f"k = {find.k}", "clear": True}
    stage, directions, exceeding = (int(found[name]) for name in ("stage", "directions", "exceeding"))
    several = "groups" if int(found["found"]) > 1 else "no clear groups"
    answer = (f"not tested: fewer than {LEAST_TESTED} clients", "all alike", several, several)[stage]
    notes: dict[str, Any] = {"rule": f"test at level {find.alpha:g}", "clear": answer == "groups", "answer": answer}
    if stage < 2:
        return notes
    p = (1 + exceeding) / (1 + (min(LOOK, find.draws) if stage == 2 else find.draws))
    return notes | {"directions": directions, "p" if exceeding < clients else "p_at_least": p}


def _round(settings: CrossfitSettings, federation: Federation, state: State) -> tuple[State, RoundRecord]:
    models, record = average_within(federation, state.models, state.clustering, settings.train, settings.weights)
    return replace(state, models=models), record


def _serve(settings: CrossfitSettings, state: State) -> Served:
    return Served(Evaluate(settings.train.model), {"model": list(state.models)}, state.clustering)


def _admit(settings: CrossfitSettings, federation: Federation, state: State, newcomers: Sequence[int]) -> tuple[State, Mapping[str, Any]]:
    """A newcomer's folds are those at the initial model, as everybody's were."""
    initial = Shared(settings.train.model.init(settings.seed))
    held = federation.compute(settings.folds, {"model": initial}, on=newcomers)["folds"]
    released = federation.gram(held, then=JoinGroups(), against=state.folds)
    labels = [int(label) for label in released.result["labels"]]
    return replace(state, clustering=state.clustering.extended(held.clients, labels)), {"joined": labels}


def _describe(state: State) -> Mapping[str, Any]:
    return {"clustering": state.clustering, "evidence": state.evidence, **state.notes}


CROSSFIT = AlgorithmSpec(
    "crossfit", crossfit, "one-shot clustering by a test on cross-fitted gradients, which finds the number of groups; then FedAvg in each",
    states=(State,), tasks=(FoldGradients,), functions=(FindGroups, JoinGroups), compared=lambda given: Compared(2),
)  # fmt: skip
