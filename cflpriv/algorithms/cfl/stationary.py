"""CFL: whether a cluster stands still, and what becomes of one that does: the paper's test by cosines and norms, or that by halves.

Source: Sattler, Müller, Samek 2019, Algorithm 5, lines 16 to 22, equations 32 and 33; deviations are listed in `cfl`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ...contract.handles import Held
from ...contract.operations import Federation
from ...engine import Result, TaskInput
from ...tasks.training import Train
from ...types import Parts
from ..fedavg import Weights
from ..shared.around import TrainApart
from ..shared.attempts import try_compute
from .parameter_tree import CflState, ClusterSplit, SeenSimilarities, TreeCluster, TreeNode
from .split_test import SplitTest
from .splitting import REFUSED_BY, SPLIT, Bipartition, pictured

__all__ = ["CflSettings", "Same", "cut_by_cosines", "cut_by_test", "still"]


@dataclass(frozen=True)
class Same:
    """A copy of what a client holds under a new handle, which gets a clustering epoch of its own. Part: "update"."""

    uses_data: ClassVar[bool] = False

    parts: ClassVar[Parts] = {"update": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, task_input: TaskInput) -> Result:
        return {"update": task_input.array("update")}


@dataclass(frozen=True)
class CflSettings:
    """What is fixed in a run. `test` is the paper's test of a cluster that stands still, with ε₂ and the smallest side as they were given;
    `halves`, if there is one, takes its place.

    Thresholds are `relative` to the largest norm of a mean update. A cluster of fewer than `fewest` clients is never tested.
    """

    train: Train
    eps1: float
    test: Bipartition
    halves: SplitTest | None
    relative: bool
    fewest: int
    first_split: int
    settle: int
    patience: int
    watch: bool
    weights: Weights
    seed: int


def still(settings: CflSettings, state: CflState, leaf: int, norm: float, round: int) -> bool:
    """Whether a cluster with a mean update of this norm stands still (eq. 32), or has waited long enough for a test."""
    if settings.halves is None:
        return norm < settings.eps1 * (state.unit if settings.relative else 1.0)
    node = state.tree[leaf]
    times = 2.0 ** (node.tests - node.since)
    return (
        norm < settings.eps1 * (node.largest if settings.relative else 1.0) / times or round - node.from_round >= settings.patience * times
    )


def cut_by_cosines(
    settings: CflSettings, federation: Federation, state: CflState, cluster: TreeCluster, sampled: Held, notes: dict[str, Any]
) -> tuple[CflState, ClusterSplit | None]:
    """The paper's test of a cluster that stands still (Alg. 5, l. 16 to 22), with `watch` a look at any. Adds to `notes`."""
    label, leaf, scale = cluster.label, cluster.leaf, state.unit if settings.relative else 1.0
    if not (cluster.stationary or settings.watch) or len(cluster.here) < settings.fewest:
        return state, None
    updates = _updates(settings, federation, cluster.node, sampled, cluster.here)
    if updates is None:
        return state, None
    decides, smallest = cluster.stationary and settings.halves is None, max(settings.test.at_least, federation.merge_below)
    test = replace(settings.test, stationary=decides, eps2=settings.test.eps2 * scale, at_least=smallest)
    released = federation.gram(updates, then=test)
    outcome, evidence = int(released.result["outcome"]), released.evidence
    facts: dict[str, Any] = {}
    if evidence is not None:
        facts = {"max_norm": evidence["largest_norm"], "alpha_cross": evidence["alpha_cross"]}
        notes["max_norms"][label], notes["alpha_cross"][label] = evidence["largest_norm"], evidence["alpha_cross"]
        state = replace(state, seen={**state.seen, leaf: SeenSimilarities(tuple(evidence["clients"]), evidence["alpha"])})
    if outcome == SPLIT:
        side = dict(zip(updates.clients, (int(value) for value in released.result["side"]), strict=True))
        return state, ClusterSplit(side, updates, facts, None if evidence is None else pictured(evidence))
    federation.close(updates)
    if decides:
        notes["refused"].append({"cluster": label, "because": REFUSED_BY[outcome]})
    return state, None


def cut_by_test(
    settings: CflSettings, halves: SplitTest, federation: Federation, state: CflState, cluster: TreeCluster, notes: dict[str, Any]
) -> tuple[CflState, ClusterSplit | None]:
    """The test of a cluster that stands still by halves of its members' data. Adds to `notes`."""
    node = state.tree[cluster.leaf]
    level = halves.level(node, len(cluster.here), len(state.leaf))
    tested = halves.of(federation, settings.train.on_divergence, cluster.node.model, cluster.here, level) if level else None
    if tested is None:
        return state, None
    state = state.with_node(cluster.leaf, replace(node, tests=node.tests + 1, from_round=federation.round))
    if cluster.leaf == 0:
        state = replace(state, answer=tested.facts)
    if tested.found.clustering.k > 1:
        return state, ClusterSplit(tested.side, tested.folds, tested.facts, tested.found.evidence)
    federation.close(tested.folds)
    because = "smallest" if tested.found.notes["clear"] else "test"
    notes["refused"].append({"cluster": cluster.label, "because": because, **tested.facts})
    return state, None


def _updates(settings: CflSettings, federation: Federation, node: TreeNode, sampled: Held, here: Sequence[int]) -> Held | None:
    """The updates of the members present, for a clustering epoch of their own; None where too few have one."""
    held: Held | None
    if set(here) <= set(sampled.clients):
        held = federation.compute(Same(), {"update": sampled}, on=here)
    else:
        task = TrainApart(settings.train.at(federation.round))
        held = try_compute(federation, settings.train.on_divergence, task, {"model": node.model}, on=here)
    return None if held is None or len(held.clients) < settings.fewest else held["update"]
