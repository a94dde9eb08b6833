"""CFL: FedAvg until it stands still; where clients still pull apart there, their cluster is split.

Source: Sattler, Müller, Samek 2019, "Clustered Federated Learning: Model-Agnostic Distributed Multi-Task Optimization under Privacy
Constraints", Algorithms 1 to 5, equations 17, 25, 28, 32, 33, 39, 44 and 47. With `[protection] sum = "haar"`, `gram = ["haar"]`,
`transform = "fixed"` this is Algorithm 5: clients share an orthonormal transform, and the server averages and compares transformed updates.

The parameter tree (section V-C) has a node for every cluster there ever was. It is part of the state and of every checkpoint. Newcomers
walk down it (Alg. 4), and every client may be offered the models of its path (`offer`).

With `eps2` a cluster is split in two by the cosines of its members' updates, as the paper does. Without it a test on two random halves of
each member's data decides (`split_test`): no threshold on norms tells mixed clusters from pure ones on all data.

Deviations of the rule with `eps2`, each for a reason:
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

Deviations of the rule without `eps2`, besides those on partial participation, newcomers and small sides:
- A cluster that stands still may split into more than two at once, into the groups that the test found. Its children stand below it in the
  tree, and who walks down goes to the nearest by unbiased distances.
- ε₁ is in units of the largest mean update of the cluster itself. A cluster that does not come to stand still is tested after `patience`
  rounds all the same: the test holds at any model, and with a small learning rate no run of usual length stands still. After each test of
  a cluster without a split its ε₁ is halved and its patience doubled.

`variant="authors"` follows the authors' code where it differs: complete linkage on −α, no γ_max, ε₁ = 0.4 and ε₂ = 1.6 absolute, no split
before round 20 or of fewer than three clients, learning rate × 0.99 a round. It does not have that code's index bug (issue 2 of
felisat/clustered-federated-learning; also in PACFL's `main_cfl.py` and FL-bench's `cfl.py`): a split there returns positions inside the
cluster as client numbers, so from the second split on other clients move than were compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np

from ...contract.handles import GroupMean, Held, Shared
from ...contract.operations import Federation
from ...contract.schedule import EACH_ROUND, Schedule, request, scores
from ...contract.transcript import RoundRecord
from ...errors import InputError, TooFewClients
from ...keys import Key, ranged
from ...privacy.settings import Releases
from ...tasks.evaluation import Evaluate
from ...tasks.fold_gradients import FoldGradients
from ...tasks.halves import HALVES
from ...tasks.training import Train
from ..fedavg import Weights
from ..interface import Algorithm, AlgorithmSpec, BeforeRun, ComparedValue, Served
from ..shared.around import TrainApart
from ..shared.attempts import try_compute
from ..shared.grouping import ALPHA, FindGroups, JoinGroups, check_draws
from ..shared.steps import mean_notes
from .parameter_tree import CflState, SeenSimilarities, TreeCluster, TreeNode, offer, path
from .split_test import DRAWS, HasHalves, NeedsNoHalves, SplitTest
from .splitting import Bipartition, MoreSimilar, separation_gap
from .stationary import CflSettings, Same, cut_by_cosines, cut_by_test, still

__all__ = ["EPS1", "EPS2", "CflState", "Same", "SeenSimilarities", "TreeNode", "cfl", "gaps", "offer", "path"]

EPS1, EPS2 = 0.2, 0.75
"""Thresholds for a rule with ε₂, relative to the largest mean update of the run.

Chosen on label-swapped MNIST (LeNet-5, 20 clients, 200 samples each, lr 0.03, seeds 0 to 2), where clusters that had to split showed 0.78
to 0.95 and pure ones up to 0.72. On seeds 3 to 5 every split of a mixed cluster was right too, but one pure cluster reached 0.92 and split
(ARI 0.90), as one of two did at lr 0.1 (0.90, ARI 0.93): no threshold separates the two groups safely.
"""
EPS1_TESTED = 0.5
"""ε₁ where a test decides, in units of the cluster's largest mean update."""
EPS1_AUTHORS, EPS2_AUTHORS = 0.4, 1.6
FIRST_SPLIT_AUTHORS, SMALLEST_AUTHORS, DECAY_AUTHORS = 20, 3, 0.99


def gaps(state: CflState, groups: Mapping[int, int]) -> dict[int, float]:
    """The separation gap of each cluster whose similarities were seen this round, by leaf. `groups` is truth, which no server has."""
    return {leaf: separation_gap(seen.alpha, [groups[client] for client in seen.clients]) for leaf, seen in state.seen.items()}


def decided_by_norms(settings: Mapping[str, Any]) -> bool:
    """Whether these hyper-parameters mean the paper's test with ε₂, or that of the authors."""
    return settings.get("eps2") is not None or settings.get("variant") == "authors"


@ranged("algorithm")
def cfl(
    train: Train,
    *,
    eps1: Annotated[
        float | None,
        Key(
            "A cluster is stationary where the norm of its mean update is below this.",
            "(0, inf)",
            default=f"{EPS1}; {EPS1_TESTED} without `eps2`; {EPS1_AUTHORS} for the authors' variant",
        ),
    ] = None,
    eps2: Annotated[
        float | None,
        Key(
            "Split by cosines where the largest norm of an update is above this; above `eps1`.",
            "(0, inf)",
            default=f"a test finds the groups; {EPS2_AUTHORS} for the authors' variant",
        ),
    ] = None,
    relative: Annotated[
        bool | None,
        Key("Thresholds are in units of the largest norm of a mean update so far.", default="true; false for the authors' variant"),
    ] = None,
    gamma_max: Annotated[float, Key("Bound on the relative noise of updates (eq. 16) for a split; 0: every bipartition.", "[0, 1)")] = 0.0,
    alpha: Annotated[float, Key("Level of the test over the whole run.", "(0, 1)")] = ALPHA,
    draws: Annotated[int, Key("Simulations without groups, for the test; enough to show its level.", "[1, inf)", "simulations")] = DRAWS,
    patience: Annotated[int, Key("The test runs at the latest after so many rounds.", "[1, inf)", "rounds")] = 10,
    variant: Annotated[Literal["paper", "authors"], Key("As the paper states it, or as its authors' code does.")] = "paper",
    first_split: Annotated[
        int | None, Key("No split before this round.", "[0, inf)", "rounds", default=f"0; {FIRST_SPLIT_AUTHORS} for the authors' variant")
    ] = None,
    smallest: Annotated[int, Key("No split into a cluster of fewer clients.", "[1, inf)", "clients")] = 1,
    settle: Annotated[int, Key("No split within so many rounds of a newcomer's arrival.", "[0, inf)", "rounds")] = 5,
    watch: Annotated[bool, Key("Record the similarities of every round.")] = False,
    weights: Weights = "examples",
    seed: int = 0,
) -> Algorithm:
    """CFL. A cluster stands still where ‖mean Δθ‖ < `eps1`.

    With `eps2` it splits in two there if max_i ‖Δθ_i‖ > `eps2`, unless `gamma_max` forbids it: a bound on γ_i, the relative noise of
    clients' updates (eq. 16); 0 accepts every bipartition. Without `eps2` it splits into the groups that a test on halves of the members'
    data finds, if it finds some: at the level `alpha` over the whole run, with so many `draws` under the null hypothesis, at the latest
    after `patience` rounds.

    `relative` thresholds (the default, but for the authors' variant) are in units of the largest norm of a mean update so far: of the run
    with `eps2`, else of the cluster. No split happens before round `first_split`, within `settle` rounds of a newcomer's arrival, or into a
    cluster of fewer than `smallest` clients. `watch` looks at similarities in every round, for the record.

    Raises `InputError` for parameters that cannot be.
    """
    authors = variant == "authors"
    by_test = eps2 is None and not authors
    eps1 = (EPS1_AUTHORS if authors else EPS1_TESTED if by_test else EPS1) if eps1 is None else eps1
    eps2 = (EPS2_AUTHORS if authors else np.inf) if eps2 is None else eps2
    first_split = (FIRST_SPLIT_AUTHORS if authors else 0) if first_split is None else first_split
    _check_thresholds(eps1, eps2, gamma_max, by_test=by_test, authors=authors)
    check_draws(alpha, draws)
    if authors and train.lr_decay == 1.0:
        train = replace(train, lr_decay=DECAY_AUTHORS)
    find = FindGroups(alpha, draws, seed=seed, at_least=smallest, numbers=train.model.dimension)
    settings = CflSettings(
        train, eps1, Bipartition(True, eps2, gamma_max, "complete" if authors else "single", smallest),
        SplitTest(FoldGradients(train.model, seed=seed), find) if by_test else None,
        not authors if relative is None else relative, SMALLEST_AUTHORS if authors else 2, first_split, settle, patience, watch, weights,
        seed,
    )  # fmt: skip
    return Algorithm(
        "cfl", ("gram", "mean"),
        partial(_init, settings), partial(_round, settings), partial(_serve, settings), partial(_admit, settings),
        partial(_describe, settings), public_groups=True, schedule=_schedule(settings),
    )  # fmt: skip


def _schedule(settings: CflSettings) -> Schedule:
    """A training each round. Clusters are compared by copies of its updates, or by a training of all members; who joins is compared once
    for each split above its cluster. With a test: by halves, as often as a level can be shown.
    """
    start, rounds, joining = [], [request(settings.train, {"update": "sum"})], []
    compared = request(TrainApart(settings.train), {"update": "gram"}, times=EACH_ROUND)
    if settings.halves is None or settings.watch:
        rounds.append(request(Same(), {"update": "gram"}))
        joining.append(compared)
    if settings.halves is not None:
        start.append(request(HasHalves()))
        if most := settings.halves.most_tests:
            joining.append(request(settings.halves.folds, {"folds": "gram"}, times=most))
    return Schedule(tuple(start), tuple(rounds), tuple(joining), (scores(Evaluate(settings.train.model)),))


def _check_thresholds(eps1: float, eps2: float, gamma_max: float, *, by_test: bool, authors: bool) -> None:
    if eps1 >= eps2:
        raise InputError(f"algorithm.eps1: {eps1} is not below eps2 = {eps2}; a mean is never longer than the longest update")
    if gamma_max and (authors or by_test):
        other = "variant = 'authors'" if authors else "the rule without algorithm.eps2"
        raise InputError(f"algorithm.gamma_max: {gamma_max}: {other} has no such test")


def _init(settings: CflSettings, federation: Federation) -> CflState:
    """One cluster, at θ⁰ (Alg. 5, l. 3)."""
    if settings.halves is not None:
        federation.compute(HasHalves())  # nothing leaves; a client that has no halves fails here, not in some later round
    return CflState((TreeNode(Shared(settings.train.model.init(settings.seed))),), dict.fromkeys(federation.clients, 0))


def _round(settings: CflSettings, federation: Federation, state: CflState) -> tuple[CflState, RoundRecord]:
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
    state: CflState,
    label: int,
    leaf: int,
    mean: GroupMean,
    sampled: Held,
    notes: dict[str, Any],
) -> CflState:
    """Move a cluster's model, or split the cluster if it stands still and its clients do not (Alg. 5, l. 16-22). Adds to `notes`."""
    node, members, norm = state.tree[leaf], state.members(leaf), notes["mean_norms"][label]
    member = next(client for client in sampled.clients if client in members)
    moved = federation.fold(node.model + mean.parts["update"], on=member)  # θ ← θ + Δθ_c (Alg. 2, l. 8)
    kept = state.with_node(leaf, replace(node, model=moved, largest=max(node.largest, norm or 0.0)))
    here = [client for client in federation.clients if client in members]
    settled = all(federation.round >= state.arrived.get(client, -settings.settle) + settings.settle for client in here)
    if norm is None:
        return kept
    stationary = settled and federation.round >= settings.first_split and still(settings, kept, leaf, norm, federation.round)
    cluster, cut = TreeCluster(label, leaf, node, here, stationary), None
    if settings.halves is None or settings.watch:
        kept, cut = cut_by_cosines(settings, federation, kept, cluster, sampled, notes)
    if settings.halves is not None and stationary:
        kept, cut = cut_by_test(settings, settings.halves, federation, kept, cluster, notes)
    if cut is None:
        return kept
    facts = {"mean_norm": norm, **cut.facts}
    # θ*_v is where the clients were compared (eq. 47); its children go on from θ* + Δθ_c (Alg. 5, l. 7)
    inner = replace(kept.tree[leaf], model=node.model, updates=cut.given, split_round=federation.round, notes=facts)
    state = kept.split(leaf, inner, moved, cut.side)
    if cut.evidence is not None and not state.evidence:
        state = replace(state, evidence=cut.evidence)
    notes["splits"].append({"cluster": label, "sizes": [len(state.members(child)) for child in state.tree[leaf].children], **facts})
    return state


def _walk_down(settings: CflSettings, federation: Federation, state: CflState, clients: Sequence[int]) -> CflState:
    """Walk clients down the tree to a leaf, newcomers from the root (Alg. 4)."""
    at = {client: state.waiting.get(client, 0) for client in clients}
    while moving := sorted({node for node in at.values() if state.tree[node].children}):
        for place in moving:
            node = state.tree[place]
            assert node.updates is not None
            group = [client for client in at if at[client] == place]
            sizes = [len(state.members(child)) for child in node.children]
            side = dict.fromkeys(group, sizes.index(max(sizes)))
            if settings.halves is None:
                task = TrainApart(settings.train.at(node.split_round))  # Δθ_new at θ*_v (Alg. 4, l. 5)
                held = try_compute(federation, settings.train.on_divergence, task, {"model": node.model}, on=group)
                if held is not None:
                    released = federation.gram(held["update"], then=MoreSimilar(), against=node.updates)
                    side |= dict(zip(held.clients, (int(value) for value in released.result["side"]), strict=True))
            else:
                side |= settings.halves.joined(federation, settings.train.on_divergence, node, group)
            at |= {client: node.children[side[client]] for client in group}
    waiting = {client: node for client, node in state.waiting.items() if client not in at}
    arrived = {**state.arrived, **dict.fromkeys(at, federation.round)} if federation.round >= 0 else state.arrived
    return replace(state, leaf={**state.leaf, **at}, waiting=waiting, arrived=arrived)


def _serve(settings: CflSettings, state: CflState) -> Served:
    return Served(Evaluate(settings.train.model), {"model": state.models}, state.clustering)


def _admit(settings: CflSettings, federation: Federation, state: CflState, newcomers: Sequence[int]) -> tuple[CflState, Mapping[str, Any]]:
    waiting = [client for client in newcomers if client not in state.leaf or client in state.waiting]
    state = _walk_down(settings, federation, state, waiting)
    clustering = state.clustering
    return state, {"joined": [clustering[client] for client in newcomers], "levels": [len(path(state, client)) for client in newcomers]}


def _describe(settings: CflSettings, state: CflState) -> Mapping[str, Any]:
    tree = [
        {"parent": node.parent, "children": list(node.children), "clients": list(state.members(i)), "split_round": node.split_round}
        | dict(node.notes)
        for i, node in enumerate(state.tree)
    ]
    described = {"clustering": state.clustering, "evidence": state.evidence, "parameter_tree": tree}
    if settings.halves is None:
        return described
    rule = f"test at level {settings.halves.find.alpha:g} over the run"
    return {**described, "rule": rule, "clear": len(state.tree) > 1, "answer": "not tested", **state.answer}


def _defaults(settings: Mapping[str, Any], before: BeforeRun) -> Mapping[str, Any]:
    """Under sample-level privacy the paper's rule: how many tests there will be, and what they would cost, is not known before."""
    return {"eps2": EPS2} if before.unit == "sample" and not decided_by_norms(settings) else {}


def _sample_releases(rounds: int, settings: Mapping[str, Any]) -> Releases:
    """An update a round, which is compared with others, too."""
    return Releases(trainings=rounds, singly=True)


def _never_clusters(settings: Mapping[str, Any], before: BeforeRun) -> str:
    first = int(settings.get("first_split", FIRST_SPLIT_AUTHORS if settings.get("variant") == "authors" else 0))
    return f"algorithm.first_split = {first}, and the run has {before.rounds} rounds" if 0 < before.rounds <= first else ""


def _knowledge(settings: Mapping[str, Any]) -> str:
    if not decided_by_norms(settings):
        return f"none: a test at level {settings.get('alpha', ALPHA):g}"
    authors = settings.get("variant") == "authors"
    eps1, eps2 = settings.get("eps1", EPS1_AUTHORS if authors else EPS1), settings.get("eps2", EPS2_AUTHORS if authors else EPS2)
    return f"thresholds on norms of updates, eps1 = {eps1:g} and eps2 = {eps2:g}"


CFL = AlgorithmSpec(
    "cfl", cfl, "recursive bipartition by the cosines of updates where FedAvg stands still (Sattler et al. 2019)",
    states=(CflState, TreeNode, SeenSimilarities), tasks=(Same, HasHalves, NeedsNoHalves, TrainApart),
    functions=(Bipartition, MoreSimilar, FindGroups, JoinGroups),
    sample_releases=_sample_releases, cohorts="labelled", renumbers=True, serves_released=True,
    compared=lambda settings: ComparedValue() if decided_by_norms(settings) else ComparedValue(HALVES, halves=True),
    defaults=_defaults, never_clusters=_never_clusters, knowledge=_knowledge,
)  # fmt: skip
