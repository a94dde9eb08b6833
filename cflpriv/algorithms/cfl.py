"""CFL: FedAvg until it stands still; where clients still pull apart there, their cluster is split in two by the cosines of their updates.

Source: Sattler, Müller, Samek 2019, "Clustered Federated Learning: Model-Agnostic Distributed Multi-Task Optimization under Privacy
Constraints", Algorithms 1 to 5, equations 17, 25, 28, 32, 33, 39, 44 and 47. With `[protection] sum = "haar"`, `gram = ["haar"]`,
`transform = "fixed"` this is Algorithm 5: clients share an orthonormal transform, and the server averages and compares transformed updates.

The parameter tree (section V-C) has a node for every cluster there ever was. It is part of the state and of every checkpoint. Newcomers
walk down it (Alg. 4), and every client may be offered the models of its path (`offer`).

Deviations, each for a reason:
- The optimal bipartition is found by removing the weakest edge of the maximum spanning tree, O(m²); Algorithm 1 gives the same in O(m³).
- The max-norm test, the bipartition and the γ_max test need the Gram of a cluster's updates. It is asked for when the mean's norm is below
  ε₁ (with `watch` in every round). Updates are then uploaded once more, because a sum and a Gram are protected in different ways. So the
  members of a cluster that stands still upload twice as much in each round, and those not sampled train and upload as well.
- ε₁ and ε₂ may be relative: in units of the largest norm of a mean update that the run has measured so far, in any cluster.
- A cluster's stationary model θ* is the one its tested updates were computed at (eq. 47). Its children start from θ* plus their mean.
- With partial participation the test looks at the round's cohort, the split at all members present. Members absent from a split count to
  the larger side. When they come back, they walk down from the first split that they missed. Clients not seen before walk from the root.
  A client without an update, because its training diverged (and is skipped), goes to the larger side.
- A cluster that took in a newcomer is not split for `settle` rounds. The first update of a newcomer is long, and the printed test takes it
  for incongruent (on label-swapped digits it split off every newcomer at once).
- A cluster is not split if the errors of a protection are too large for its updates. The round's notes give the reason "error" (see
  docs/clustering.md).
- A client in a cluster of its own never splits. A side smaller than the minimum cohort size (`small_clusters = "merge"`) or `smallest`
  stops a split.
- Means are weighted by sample counts as in eq. 2 (Algorithm 5 prints equal weights: `weights="equal"`).

`variant="authors"` follows the authors' code where it differs: complete linkage on −α, no γ_max, ε₁ = 0.4 and ε₂ = 1.6 absolute, no split
before round 20 or of fewer than three clients, learning rate × 0.99 a round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np

from ..contract.handles import GroupMean, Held, Shared
from ..contract.operations import Federation
from ..contract.transcript import RoundRecord
from ..engine import Result, TaskInput
from ..engine.models import Model
from ..errors import InputError, TooFewClients
from ..privacy.settings import updates_only
from ..tasks.evaluation import Evaluate, Losses
from ..tasks.training import Train
from ..types import Array, Clustering, Parts
from .attempts import try_compute
from .checks import at_least, known
from .fedavg import Weights
from .interface import Algorithm, AlgorithmSpec, Served
from .splitting import REFUSED_BY, SPLIT, Bipartition, MoreSimilar, pictured, separation_gap
from .steps import clustering_of, mean_notes

__all__ = ["Node", "Same", "Seen", "State", "cfl", "gaps", "offer", "path"]

EPS1, EPS2 = 0.2, 0.75
"""Defaults, relative to the largest mean update of the run.

Chosen on label-swapped MNIST (LeNet-5, 20 clients, 200 samples each, lr 0.03, seeds 0 to 2), where clusters that had to split showed 0.78
to 0.95 and pure ones up to 0.72. On seeds 3 to 5 every split of a mixed cluster was right too, but one pure cluster reached 0.92 and split
(ARI 0.90), as one of two did at lr 0.1 (0.90, ARI 0.93): no threshold separates the two groups safely.
"""
EPS1_AUTHORS, EPS2_AUTHORS = 0.4, 1.6
FIRST_SPLIT_AUTHORS, SMALLEST_AUTHORS, DECAY_AUTHORS = 20, 3, 0.99


@dataclass(frozen=True)
class Same:
    """What a client holds, under a handle of its own, so that its clustering epoch is its own. Part: "update"."""

    uses_data: ClassVar[bool] = False

    parts: ClassVar[Parts] = {"update": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, given: TaskInput) -> Result:
        return {"update": given.array("update")}


@dataclass(frozen=True, eq=False)
class Node:
    """A node of the parameter tree: a cluster's model, stationary once it has `children`.

    `updates` are the pre-split updates of its clients (still with their owners; those of a child's clients are the edge to it), computed in
    round `split_round`. `notes` holds what the split was decided on, where the release allows it.
    """

    model: Shared
    parent: int = -1
    children: tuple[int, ...] = ()
    updates: Held | None = None
    split_round: int = -1
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Seen:
    """The similarities last seen in a cluster: `alpha` (m, m) of `clients` (m,)."""

    clients: tuple[int, ...]
    alpha: Array


@dataclass(frozen=True, eq=False)
class State:
    """The parameter tree (node 0 is the root), the leaf of every client seen, who is to walk down from where, in which round
    those who came later arrived, and the largest mean norm.

    `seen` are the similarities of this round by leaf, where they were asked for and the release allows; `evidence` is that of the first
    split.
    """

    tree: tuple[Node, ...]
    leaf: Mapping[int, int]
    waiting: Mapping[int, int] = field(default_factory=dict)
    arrived: Mapping[int, int] = field(default_factory=dict)
    unit: float = 0.0
    seen: Mapping[int, Seen] = field(default_factory=dict)
    evidence: Mapping[str, Any] | None = None

    @property
    def leaves(self) -> tuple[int, ...]:
        """The leaves of the tree, in the order of clusters."""
        return tuple(i for i, node in enumerate(self.tree) if not node.children)

    @property
    def clustering(self) -> Clustering:
        """The clusters: label j is leaf `leaves[j]`."""
        labels = {leaf: label for label, leaf in enumerate(self.leaves)}
        return clustering_of({client: labels[leaf] for client, leaf in self.leaf.items()}, len(labels))

    @property
    def models(self) -> list[Shared]:
        """The clusters' models, in the order of leaves."""
        return [self.tree[leaf].model for leaf in self.leaves]

    def members(self, node: int) -> tuple[int, ...]:
        """c_v: the clients of a node, those of all leaves below it."""
        return tuple(client for client in sorted(self.leaf) if node in _ancestors(self.tree, self.leaf[client]))

    def with_node(self, place: int, node: Node) -> "State":
        """The same with another node at one place of the tree."""
        return replace(self, tree=(*self.tree[:place], node, *self.tree[place + 1 :]))


def _ancestors(tree: Sequence[Node], node: int) -> tuple[int, ...]:
    """A node and all above it, up to the root."""
    found = [node]
    while tree[found[-1]].parent >= 0:
        found.append(tree[found[-1]].parent)
    return tuple(found)


def path(state: State, client: int) -> tuple[int, ...]:
    """The nodes from the root to a client's leaf: models from general to special."""
    return _ancestors(state.tree, state.leaf[client])[::-1]


def offer(federation: Federation, state: State, model: Model) -> Held:
    """Offer every client present the models of all levels on its path (section V-C); it keeps their training losses and its choice.

    Parts: "losses" (levels,) from the root to the leaf, "choice" () the level with the lowest.
    """
    clients = [client for client in federation.clients if client in state.leaf]
    which = {client: path(state, client) for client in clients}
    return federation.compute(Losses(model), {"model": [node.model for node in state.tree]}, which=which, on=clients)


def gaps(state: State, groups: Mapping[int, int]) -> dict[int, float]:
    """The separation gap of each cluster whose similarities were seen this round, by leaf. `groups` is truth, which no server has."""
    return {leaf: separation_gap(seen.alpha, [groups[client] for client in seen.clients]) for leaf, seen in state.seen.items()}


@dataclass(frozen=True)
class CflSettings:
    """What is fixed in a run. `test` is the test of a cluster that stands still, with ε₂ and the smallest side as they were given.

    Thresholds are `relative` to the largest norm of a mean update. A cluster of fewer than `fewest` clients is never tested.
    """

    train: Train
    eps1: float
    test: Bipartition
    relative: bool
    fewest: int
    first_split: int
    settle: int
    watch: bool
    weights: Weights
    seed: int


def cfl(
    train: Train,
    *,
    eps1: float | None = None,
    eps2: float | None = None,
    relative: bool | None = None,
    gamma_max: float = 0.0,
    variant: Literal["paper", "authors"] = "paper",
    first_split: int | None = None,
    smallest: int = 1,
    settle: int = 5,
    watch: bool = False,
    weights: Weights = "examples",
    seed: int = 0,
) -> Algorithm:
    """CFL. A cluster splits where ‖mean Δθ‖ < `eps1` and max_i ‖Δθ_i‖ > `eps2`, unless `gamma_max` forbids it.

    `relative` thresholds (the default, but for the authors' variant) are in units of the largest norm of a mean update so far.
    `gamma_max` bounds γ_i, the relative noise of clients' updates (eq. 16); 0 accepts every bipartition. No split happens before round
    `first_split`, within `settle` rounds of a newcomer's arrival, or into a cluster of fewer than `smallest` clients. `watch` looks at
    similarities in every round, for the record.

    Raises `InputError` for parameters that cannot be.
    """
    known("variant", variant, "paper", "authors")
    authors = variant == "authors"
    eps1 = (EPS1_AUTHORS if authors else EPS1) if eps1 is None else eps1
    eps2 = (EPS2_AUTHORS if authors else EPS2) if eps2 is None else eps2
    first_split = (FIRST_SPLIT_AUTHORS if authors else 0) if first_split is None else first_split
    for name, value in (("eps1", eps1), ("eps2", eps2)):
        if not (value > 0 and np.isfinite(value)):
            raise InputError(f"algorithm.{name}: {value} is not a finite number above 0")
    if eps1 >= eps2:
        raise InputError(f"algorithm.eps1: {eps1} is not below eps2 = {eps2}; a mean is never longer than the longest update")
    if not 0 <= gamma_max < 1:
        raise InputError(f"algorithm.gamma_max: {gamma_max} is outside [0, 1)")
    if authors and gamma_max:
        raise InputError(f"algorithm.gamma_max: {gamma_max}: variant = 'authors' has no such test")
    at_least(0, first_split=first_split, settle=settle)
    at_least(1, smallest=smallest)
    if authors and train.lr_decay == 1.0:
        train = replace(train, lr_decay=DECAY_AUTHORS)
    settings = CflSettings(
        train, eps1, Bipartition(True, eps2, gamma_max, "complete" if authors else "single", smallest),
        not authors if relative is None else relative, SMALLEST_AUTHORS if authors else 2, first_split, settle, watch, weights, seed,
    )  # fmt: skip
    return Algorithm(
        "cfl", ("gram", "mean"),
        partial(_init, settings), partial(_round, settings), partial(_serve, settings), partial(_admit, settings), _describe,
        public_groups=True,
    )  # fmt: skip


def _init(settings: CflSettings, federation: Federation) -> State:
    """One cluster, at θ⁰ (Alg. 5, l. 3)."""
    return State((Node(Shared(settings.train.model.init(settings.seed))),), dict.fromkeys(federation.clients, 0))


def _round(settings: CflSettings, federation: Federation, state: State) -> tuple[State, RoundRecord]:
    """Newcomers walk down the tree; then every cluster takes a step of FedAvg, and is tested where it stands still (Alg. 5)."""
    arrivals = [client for client in federation.clients if client not in state.leaf or client in state.waiting]
    state = _walk_down(settings, federation, state, arrivals)
    clustering, leaves = state.clustering, state.leaves
    cohort = federation.cohort(clustering)
    held = federation.compute(settings.train.at(federation.round), {"model": state.models}, which=clustering, on=cohort)
    try:
        means = federation.mean(held["update"], settings.weights, clustering, len(leaves))  # Δθ_c (Alg. 5, l. 15; eq. 2)
    except TooFewClients:
        if not arrivals:
            raise
        means = (None,) * len(leaves)  # the round is kept: who walked down has entered the epochs of the splits, which is done only once
    norms = [None if mean is None or mean.parts["update"].own else mean.parts["update"].norm() for mean in means]
    state = replace(state, unit=max([state.unit, *(norm for norm in norms if norm is not None)]), seen={})
    notes: dict[str, Any] = {"mean_norms": norms, "max_norms": [None] * len(leaves), "alpha_cross": [None] * len(leaves)}
    notes |= {"splits": [], "refused": []}
    for label, (leaf, mean) in enumerate(zip(leaves, means, strict=True)):
        if mean is not None:
            state = _step(settings, federation, state, label, leaf, mean, held["update"], notes)
    notes |= {"k": len(state.leaves), **mean_notes(means)}
    return state, RoundRecord(federation.round, held.clients, tuple(clustering[client] for client in held.clients), notes)


def _step(
    settings: CflSettings,
    federation: Federation,
    state: State,
    label: int,
    leaf: int,
    mean: GroupMean,
    sampled: Held,
    notes: dict[str, Any],
) -> State:
    """Move a cluster's model, or split the cluster if it stands still and its clients do not (Alg. 5, l. 16-22). Adds to `notes`."""
    node, members, norm = state.tree[leaf], state.members(leaf), notes["mean_norms"][label]
    member = next(client for client in sampled.clients if client in members)
    moved = federation.fold(node.model + mean.parts["update"], on=member)  # θ ← θ + Δθ_c (Alg. 2, l. 8)
    kept = state.with_node(leaf, replace(node, model=moved))
    here = [client for client in federation.clients if client in members]
    settled = all(federation.round >= state.arrived.get(client, -settings.settle) + settings.settle for client in here)
    scale = state.unit if settings.relative else 1.0
    stationary = norm is not None and norm < settings.eps1 * scale and settled and federation.round >= settings.first_split  # (eq. 32)
    if norm is None or not (stationary or settings.watch) or len(here) < settings.fewest:
        return kept
    updates = _updates(settings, federation, node, sampled, here)
    if updates is None:
        return kept
    smallest = max(settings.test.at_least, federation.merge_below)
    test = replace(settings.test, stationary=stationary, eps2=settings.test.eps2 * scale, at_least=smallest)
    released = federation.gram(updates, then=test)
    outcome, found = int(released.result["outcome"]), released.evidence
    facts: dict[str, Any] = {"mean_norm": norm}
    if found is not None:
        facts |= {"max_norm": found["largest_norm"], "alpha_cross": found["alpha_cross"]}
        notes["max_norms"][label], notes["alpha_cross"][label] = found["largest_norm"], found["alpha_cross"]
        kept = replace(kept, seen={**state.seen, leaf: Seen(tuple(found["clients"]), found["alpha"])})
    if outcome != SPLIT:
        federation.close(updates)
        if stationary:
            notes["refused"].append({"cluster": label, "because": REFUSED_BY[outcome]})
        return kept
    side = dict(zip(updates.clients, (int(one) for one in released.result["side"]), strict=True))
    # θ*_v is where the updates were computed (eq. 47)
    state = _split(kept, leaf, replace(node, updates=updates, split_round=federation.round, notes=facts), moved, side)
    if found is not None and not state.evidence:
        state = replace(state, evidence=pictured(found))
    notes["splits"].append({"cluster": label, "sizes": [len(state.members(child)) for child in state.tree[leaf].children], **facts})
    return state


def _updates(settings: CflSettings, federation: Federation, node: Node, sampled: Held, here: Sequence[int]) -> Held | None:
    """The updates of the members present, for a clustering epoch of their own; None where too few have one."""
    held: Held | None
    if set(here) <= set(sampled.clients):
        held = federation.compute(Same(), {"update": sampled}, on=here)
    else:
        task = settings.train.at(federation.round)
        held = try_compute(federation, task.on_divergence, task, {"model": node.model}, on=here)
    return None if held is None or len(held.clients) < settings.fewest else held["update"]


def _split(state: State, leaf: int, node: Node, moved: Shared, side: Mapping[int, int]) -> State:
    """The leaf becomes the inner `node`; its children go on from θ* + Δθ_c (Alg. 5, l. 7). Members without a side go to the larger."""
    members, children = state.members(leaf), (len(state.tree), len(state.tree) + 1)
    larger = 1 if 2 * sum(side.values()) > len(side) else 0
    away = {client: leaf for client in members if client not in side}
    split = state.with_node(leaf, replace(node, children=children))
    return replace(
        split,
        tree=(*split.tree, Node(moved, leaf), Node(moved, leaf)),
        leaf={**state.leaf, **{client: children[side.get(client, larger)] for client in members}},
        waiting={**away, **state.waiting},  # who missed an earlier split walks from there
    )


def _walk_down(settings: CflSettings, federation: Federation, state: State, clients: Sequence[int]) -> State:
    """Walk clients down the tree to a leaf, newcomers from the root (Alg. 4)."""
    at = {client: state.waiting.get(client, 0) for client in clients}
    while moving := sorted({node for node in at.values() if state.tree[node].children}):
        for place in moving:
            node = state.tree[place]
            assert node.updates is not None
            group = [client for client in at if at[client] == place]
            task = settings.train.at(node.split_round)  # Δθ_new at θ*_v (Alg. 4, l. 5)
            held = try_compute(federation, task.on_divergence, task, {"model": node.model}, on=group)
            larger = int(len(state.members(node.children[1])) > len(state.members(node.children[0])))
            side = dict.fromkeys(group, larger)
            if held is not None:
                released = federation.gram(held["update"], then=MoreSimilar(), against=node.updates)
                side |= dict(zip(held.clients, (int(one) for one in released.result["side"]), strict=True))
            at |= {client: node.children[side[client]] for client in group}
    waiting = {client: node for client, node in state.waiting.items() if client not in at}
    arrived = {**state.arrived, **dict.fromkeys(at, federation.round)} if federation.round >= 0 else state.arrived
    return replace(state, leaf={**state.leaf, **at}, waiting=waiting, arrived=arrived)


def _serve(settings: CflSettings, state: State) -> Served:
    return Served(Evaluate(settings.train.model), {"model": state.models}, state.clustering)


def _admit(settings: CflSettings, federation: Federation, state: State, newcomers: Sequence[int]) -> tuple[State, Mapping[str, Any]]:
    waiting = [client for client in newcomers if client not in state.leaf or client in state.waiting]
    state = _walk_down(settings, federation, state, waiting)
    clustering = state.clustering
    return state, {"joined": [clustering[client] for client in newcomers], "levels": [len(path(state, client)) for client in newcomers]}


def _describe(state: State) -> Mapping[str, Any]:
    tree = [
        {"parent": node.parent, "children": list(node.children), "clients": list(state.members(i)), "split_round": node.split_round}
        | dict(node.notes)
        for i, node in enumerate(state.tree)
    ]
    return {"clustering": state.clustering, "evidence": state.evidence, "parameter_tree": tree}


CFL = AlgorithmSpec(
    "cfl", cfl, "recursive bipartition by the cosines of updates where FedAvg stands still (Sattler et al. 2019)",
    states=(State, Node, Seen), tasks=(Same,), functions=(Bipartition, MoreSimilar), sample_releases=updates_only, renumbers=True,
)  # fmt: skip
