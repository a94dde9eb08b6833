"""Clustering under client-level differential privacy: clusters from noisy sums over all clients, and choices that stay with the clients.

No client is compared with another, and no client's label reaches the server. Every round is one mean over all clients, to which each
contributes one vector of bounded length (`tasks.cluster_shares`), so with `[privacy] unit = "client"` each round is one Gaussian mechanism,
under a trusted server or inside a secure sum. The first rounds find the clusters, one sum each:

1. the centre of the clients' vectors, which are sketched mean gradients at the initial model, of length 1;
2. `moments` sums of cross-fitted second moments of what differs from the centre. Eigenvalues above the edge of the noise give the
   directions in which clients differ. If there are none, all are alike, and training begins with one model;
3. `cell_steps` sums of counts and residuals by cells: each client takes the nearest of public random points in these directions. Ward's
   tree of the cells gives the clusters and their number, tested against simulated clients without groups (`clustering.noisy_sums`). If
   the test finds none, training begins with one model;
4. `centre_steps` sums of counts and whole vectors by cluster, each client choosing its own, which make the centres sharper than the
   directions alone.

Each of these sums carries an update beside it (`train_early`): of one model for all, and in step 4 of each cluster's. Both are parts of one
contribution of the same total length, divided by `UPDATE_PART`. So a round costs the same ε as without updates. What finds clusters has 1 /
√(1 − part) times the noise for that, and clusters begin with a model that is trained already.

In all later rounds clients train the model of their cluster and put the update into its block of a vector with k blocks, so one sum holds
the sum of every cluster. That takes k times the upload. Sums of blocks are divided by the noisy sizes of step 4. Clients use the mean of
their cluster's last two models: a clipped step overshoots along a steep direction and comes back in the next round.

Initial models need not differ between clusters, so a linear model may begin at zero (`model.init_scale`): sums with noise do not wash the
random numbers out with which it begins otherwise.

The server measures the noise in numbers to which no client adds anything, so the algorithm does not need to know what protects its sums.
Without noise it works as well, but not under secure sums: a client alone in a cell or a block would show.

Source: this project. Related: private k-means by noisy sums (Blum et al. 2005), FedDP-KMeans (2025, with data of the server). Cross-fitting
is that of `crossfit`. Assumptions: sums get independent Gaussian noise of one size; all clients, or a random part of them, are there in
each of the first rounds.

What it reveals, by which operation: `mean` shows the sums of each round, up to their noise; no operation shows a choice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Annotated, Any, Literal

import numpy as np

from ..clustering.noisy_sums import Alike, directions_of, first_cells, moved_cells, partition_of
from ..contract.handles import Shared
from ..contract.operations import Federation, Parameter
from ..contract.schedule import Schedule, TaskRequest, request, scores
from ..contract.transcript import RoundRecord
from ..keys import Key, ranged
from ..tasks.cluster_shares import (
    CELL_COUNT,
    CELL_RESIDUAL,
    CLUSTER_VECTOR,
    LENGTH_PART,
    CellShare,
    CentreShare,
    ChooseCluster,
    ClientVectors,
    ClusterShare,
    EvaluateChosen,
    MomentShare,
    TrainInBlock,
    cells_of,
    clusters_of,
    moment_of,
    noise_in,
)
from ..tasks.evaluation import Evaluate
from ..tasks.training import Train
from ..tasks.with_update import WithUpdate, update_in
from ..types import Array
from .interface import Algorithm, AlgorithmSpec, BeforeRun, Served
from .shared.checks import Contribution
from .shared.counted_sums import admit_by_choice, moved_by, norm_of_clip
from .shared.grouping import check_draws

__all__ = ["private_clusters"]

ALPHA = 0.05
DRAWS = 99
MOMENTS, CELL_STEPS, CENTRE_STEPS = 6, 2, 3
LEAST = {"moments": MOMENTS, "cell_steps": CELL_STEPS, "centre_steps": CENTRE_STEPS}
ENOUGH_ROUNDS = 22
"""With privacy and more rounds than these the sums that find clusters are more by the same factor: each has so much more noise."""
UPDATE_PART = {"centre": 0.2, "moments": 0.2, "cells": 0.2, "centres": 0.5}
"""The part of a contribution's squared length that is an update, by what the sum finds. Chosen on MNIST."""
SMALLEST_SIZE = 0.02
"""A cluster counts as having at least this share of the clients where its sum is divided by its noisy size."""
Stage = Literal["centre", "moments", "cells", "centres", "train"]


@dataclass(frozen=True, eq=False)
class PrivateClustersState:
    """Models of the clusters, those `before` the last round of training (k or none), and what sums have shown so far, all public.

    `stage` is what the next sum is for, `done` the number of sums of that stage taken, `total` their sum. `noise` is the sum of squares
    of the noise seen, and the number of values. `seen` is the number of contributions that the sums of the last stage had on average.
    Centres of whole and short vectors; length, the mean one of products of halves. Of step 3: basis (r, s), variances (s,) of clients'
    means along it, spread and cells (m, s), spreads (s,) of the clients themselves. Of step 4: rows and offsets (k,) by which clients
    choose, and sizes (k,), the share of clients in each cluster.
    """

    models: tuple[Shared, ...]
    before: tuple[Shared, ...] = ()
    stage: Stage = "centre"
    done: int = 0
    total: Array | None = None
    noise: tuple[float, int] = (0.0, 0)
    seen: float = 0.0
    centre: Array | None = None
    short_centre: Array | None = None
    length: float = 1.0
    basis: Array | None = None
    variances: Array | None = None
    spreads: Array | None = None
    spread: float = 0.0
    cells: Array | None = None
    rows: Array | None = None
    offsets: Array | None = None
    sizes: Array | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise of a sum of whole contributions of length 1, as measured so far."""
        return float(np.sqrt(self.noise[0] / max(1, self.noise[1])))


@dataclass(frozen=True)
class PrivateClustersSettings:
    """What is fixed in a run."""

    train: Train
    vectors: ClientVectors
    sums: Mapping[str, int]
    update_part: Mapping[str, float]
    k: int | None
    alpha: float
    draws: int
    seed: int

    def deviation(self, state: PrivateClustersState) -> float:
        """The deviation of the noise in a sum of the state's stage, in lengths of what finds clusters in a contribution."""
        return state.deviation / float(np.sqrt(1 - self.update_part[state.stage]))

    def task(self, kind: type[ClientVectors], **more: int) -> Any:
        """A task on the clients' vectors."""
        v = self.vectors
        return kind(v.model, v.sketch, v.directions, v.norm, v.seed, **more)


@ranged("algorithm")
def private_clusters(
    train: Train,
    *,
    k: Annotated[
        int | None,
        Key(
            "Number of clusters; nothing is tested then (1: no round is spent on clusters).",
            "[1, inf)",
            "clusters",
            default="found by a test",
        ),
    ] = None,
    moments: Annotated[int, Key("Rounds that sum second moments.", "[1, inf)", "rounds")] = MOMENTS,
    cell_steps: Annotated[int, Key("Rounds that divide clients into cells.", "[1, inf)", "rounds")] = CELL_STEPS,
    centre_steps: Annotated[int, Key("Rounds that make the centres sharper.", "[1, inf)", "rounds")] = CENTRE_STEPS,
    train_early: Annotated[bool, Key("Train in the rounds that find clusters, too.", default="true under client-level privacy")] = False,
    alpha: Annotated[float, Key("Level of the test that finds the number of clusters.", "(0, 1)")] = ALPHA,
    draws: Annotated[int, Key("Simulations without groups, for the test; enough to show its level.", "[1, inf)", "simulations")] = DRAWS,
    sketch: Annotated[int, Key("Length of a sketched gradient.", "[1, inf)", "numbers")] = 256,
    directions: Annotated[int, Key("Dimensions in which second moments are taken.", "[1, inf)", "dimensions")] = 24,
    norm: Contribution = 1.0,
    seed: int = 0,
) -> Algorithm:
    """Clusters from sums over all clients, found in the first 1 + `moments` + `cell_steps` + `centre_steps` rounds; then FedAvg in each.

    With `k` the number of clusters is given and nothing is tested (1: no round is spent on them); else a test at level `alpha` finds it,
    with so many `draws` of simulated clients without groups. `train_early`: those rounds train, too, by updates clipped to `norm`.
    `sketch`: the length of a sketched gradient; `directions`: second moments are taken in so many dimensions. `norm`: the length of a
    client's contribution, under client-level privacy that to which it is clipped.

    Raises `InputError` for parameters that cannot be.
    """
    check_draws(alpha, draws)
    sums = {"centre": 1, "moments": moments, "cells": cell_steps, "centres": centre_steps}
    vectors = ClientVectors(train.model, sketch, directions, norm, seed)
    update_part = UPDATE_PART if train_early else dict.fromkeys(UPDATE_PART, 0.0)
    settings = PrivateClustersSettings(train, vectors, sums, update_part, k, alpha, draws, seed)
    return Algorithm(
        "private_clusters", ("mean",), partial(_init, settings), partial(_round, settings), partial(_serve, settings),
        admit_by_choice, _describe, reads_means=k != 1, spread=1.0 if k == 1 else inf, schedule=_schedule(settings),
    )  # fmt: skip


def _schedule(settings: PrivateClustersSettings) -> Schedule:
    """One contribution a round, for the centre, moments, cells or clusters, and then a training; choices stay with the clients.

    Where the number of clusters is found, it is at most one more than the number of directions.
    """
    train, k = settings.train, settings.k
    alone, evaluate = request(train, {"update": "sum"}), scores(Evaluate(train.model))
    if k == 1:
        return Schedule(round=(alone,), serving=(evaluate,))
    many, found = k or settings.vectors.moment_size + 1, () if k else ("k",)
    numbered = ("number",) if settings.sums["moments"] > 1 else ()
    shares: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
        ("centre", settings.task(CentreShare), ()), ("moments", settings.task(MomentShare), numbered),
        ("cells", settings.task(CellShare), ()), ("centres", settings.task(ClusterShare, k=many), found),
    )  # fmt: skip
    rounds: list[TaskRequest] = []
    for stage, share, varies in shares:
        if part := settings.update_part[stage]:
            blocks, more = (many, found) if stage == "centres" else (1, ())
            share, varies = WithUpdate(share, train, blocks, part), (*(f"share.{name}" for name in varies), *more)
        rounds.append(request(share, {"contribution": "sum"}, varies=varies))
    choose = settings.task(ChooseCluster)
    rounds += [request(replace(choose, by_short=True)), request(choose)]
    rounds.append(request(TrainInBlock(train, many), {"blocks": "sum"}, varies=found))
    serving = (evaluate, scores(EvaluateChosen(choose)))
    return Schedule(round=tuple(rounds) if k else (*rounds, alone), serving=serving)


def _init(settings: PrivateClustersSettings, federation: Federation) -> PrivateClustersState:
    state = PrivateClustersState((Shared(settings.train.model.init(settings.seed)),))
    return _alike(state, {"rule": "k = 1", "clear": True}) if settings.k == 1 else state


def _round(
    settings: PrivateClustersSettings, federation: Federation, state: PrivateClustersState
) -> tuple[PrivateClustersState, RoundRecord]:
    cohort = federation.cohort(dict.fromkeys(federation.clients, 0))
    step = _trained if state.stage == "train" else _found
    return step(settings, federation, state, cohort)


# --- finding the clusters: one sum a round


def _found(
    settings: PrivateClustersSettings, federation: Federation, state: PrivateClustersState, cohort: Sequence[int]
) -> tuple[PrivateClustersState, RoundRecord]:
    """One sum, and what follows from it."""
    stage, k, model = state.stage, len(state.models), settings.train.model
    start = {"start": Shared(model.init(settings.seed))}
    task, params = _share(settings, state)
    choice = None
    if stage == "centres":
        choose = settings.task(ChooseCluster, by_short=state.done == 0)
        choice = federation.compute(choose, {**start, **_choosing(state)}, on=cohort)["choice"]
        params = {**params, "choice": choice}
    if part := settings.update_part[stage]:
        task = WithUpdate(task, settings.train.at(federation.round), k, part)
        params = {**params, "model": state.models[0] if choice is None else list(state.models)}
    held = federation.compute(task, {**start, **params}, which=choice if part else None, on=cohort)
    (mean,) = federation.mean(held["contribution"], weights="equal")
    if mean is None:
        return state, RoundRecord(federation.round, tuple(cohort), None, {"finding": stage, "unchanged_clusters": [0]})
    vector_sum, updates = update_in(mean.parts["contribution"].value(), k, model.dimension, part)
    sum_ = vector_sum * (mean.count / settings.vectors.norm)
    squares, count = noise_in(sum_ * np.sqrt(1 - part))
    total = sum_ if state.total is None or stage == "cells" else state.total + sum_
    noise = (state.noise[0] + squares, state.noise[1] + count)
    seen = (state.seen * state.done + mean.count) / (state.done + 1)
    state = replace(state, total=total, noise=noise, seen=seen, done=state.done + 1)
    after = {"centre": _centred, "moments": _directed, "cells": _partitioned, "centres": _sharpened}[stage]
    updates = updates.astype(model.dtype)
    if part and choice is None:  # before the clusters that may be found now begin with this model
        state = replace(state, models=moved_by(state.models, updates, np.ones(1)))
    state = after(settings, federation, state)
    if part and choice is not None:
        state = replace(state, models=moved_by(state.models, updates, _there(state.sizes)))
    notes = {"finding": stage, "clipped_clients": mean.clipped, "clusters": len(state.models)}
    return state, RoundRecord(federation.round, tuple(cohort), None, notes)


def _share(settings: PrivateClustersSettings, state: PrivateClustersState) -> tuple[Any, Mapping[str, Parameter]]:
    """What clients contribute next, and what they are sent for it."""
    if state.stage == "centre":
        return settings.task(CentreShare), {}
    around = {"short_centre": _there(state.short_centre)}
    if state.stage == "moments":
        return settings.task(MomentShare, number=state.done), around
    if state.stage == "cells":
        where = {"basis": _there(state.basis), "cells": _there(state.cells), "radius": np.array(state.spread)}
        return settings.task(CellShare), {**around, **where}
    return settings.task(ClusterShare, k=len(state.models)), {"centre": _there(state.centre), "radius": np.array(_radius(state))}


def _choosing(state: PrivateClustersState) -> dict[str, Parameter]:
    """What clients choose their cluster by: rows of short vectors before the first sum of clusters, then of whole ones."""
    short = state.stage == "centres" and state.done == 0
    centre = state.short_centre if short else state.centre
    return {"centre": _there(centre), "rows": _there(state.rows), "offsets": _there(state.offsets)}


def _radius(state: PrivateClustersState) -> float:
    """What a whole vector is from its centre, about: a product of two halves is √½ of the product of their lengths, and they are longer."""
    return min(1.0, float(np.sqrt(np.sqrt(2) * state.length)))


def _there(array: Array | None) -> Array:
    """An array that an earlier stage has made."""
    assert array is not None
    return array


def _centred(settings: PrivateClustersSettings, federation: Federation, state: PrivateClustersState) -> PrivateClustersState:
    size, r = settings.vectors.size, settings.vectors.moment_size
    both = _there(state.total) / state.seen / np.sqrt(0.5)
    return replace(state, stage="moments", done=0, total=None, centre=both[:size], short_centre=both[size : size + r])


def _directed(settings: PrivateClustersSettings, federation: Federation, state: PrivateClustersState) -> PrivateClustersState:
    """After the last sum of moments: directions in which clients differ, and cells to choose from."""
    if state.done < settings.sums["moments"]:
        return state
    r = settings.vectors.moment_size
    products, lengths = moment_of(_there(state.total), r)
    contributions = state.done * state.seen
    length = max(lengths / contributions, 1e-12)
    deviation = settings.deviation(state)
    noise = deviation * np.sqrt(state.done) / contributions / np.sqrt(1 - LENGTH_PART**2) * length
    offset = r * (deviation / state.seen) ** 2 / 0.5
    directions = directions_of(products / contributions * length, noise, offset, 0 if settings.k is None else settings.k - 1)
    s = len(directions.variances)
    notes = {"directions": s} | ({"rule": f"k = {settings.k}"} if settings.k is not None else {"rule": f"test at level {settings.alpha:g}"})
    if s == 0:
        return _alike(state, {**notes, "clear": False, "answer": "all alike"})
    return replace(
        state, stage="cells", done=0, total=None, basis=directions.basis, variances=directions.variances, spreads=np.zeros(s),
        length=length, spread=float(np.sqrt(directions.variances.sum())),
        cells=first_cells(directions.variances, federation.stream("cells")), notes=notes,
    )  # fmt: skip


def _partitioned(settings: PrivateClustersSettings, federation: Federation, state: PrivateClustersState) -> PrivateClustersState:
    """After each sum of cells: the cells moved; after the last, the clusters."""
    before, variances, deviation = _there(state.cells), _there(state.variances), settings.deviation(state)
    counts, residuals, squares = cells_of(_there(state.total), *before.shape)
    cells = moved_cells(before, counts, residuals, state.spread, deviation / CELL_COUNT)
    spreads = _there(state.spreads) + squares * state.spread**2
    if state.done < settings.sums["cells"]:
        return replace(state, cells=cells, spreads=spreads)
    clients = np.maximum(spreads / (state.done * state.seen), variances)  # their means, and their sampling noise
    alike = Alike(round(state.seen), clients, state.spread, state.done, deviation / CELL_COUNT, deviation / CELL_RESIDUAL)
    starts = partial(first_cells, variances)
    rng = federation.stream("crowds")  # the name seeds the stream: another one would change the results of recorded runs
    partition = partition_of(cells, counts, alike, starts, settings.alpha, settings.draws, rng, settings.k)
    notes = {**state.notes, "clear": partition.p is None or partition.k > 1}
    if partition.p is not None:
        notes |= {"p": float(partition.p), "answer": "groups" if partition.k > 1 else "no clear groups"}
    if partition.k == 1:
        return _alike(state, notes)
    rows = partition.centres @ _there(state.basis).T
    return replace(
        state, stage="centres", done=0, total=None, cells=None, basis=None, variances=None, spreads=None, rows=rows,
        offsets=np.square(partition.centres).sum(1) / 2, models=state.models * partition.k, notes=notes,
    )  # fmt: skip


def _sharpened(settings: PrivateClustersSettings, federation: Federation, state: PrivateClustersState) -> PrivateClustersState:
    """After each sum of clusters: their centres from all such sums, and scores without what noise adds to the centres' lengths."""
    counts, sums = clusters_of(_there(state.total), len(state.models))
    counts = np.maximum(counts, SMALLEST_SIZE * state.done * state.seen)
    rows = sums / counts[:, None] * _radius(state)
    variances = state.done * (settings.deviation(state) * _radius(state) / CLUSTER_VECTOR / counts) ** 2
    offsets = (np.square(rows).sum(1) - settings.vectors.size * variances) / 2
    state = replace(state, rows=rows, offsets=offsets, sizes=counts / counts.sum())
    return replace(state, stage="train", done=0, total=None) if state.done == settings.sums["centres"] else state


def _alike(state: PrivateClustersState, notes: Mapping[str, Any]) -> PrivateClustersState:
    """One model for all from now on."""
    return replace(state, stage="train", done=0, total=None, cells=None, basis=None, variances=None, models=state.models[:1], notes=notes)


# --- training


def _trained(
    settings: PrivateClustersSettings, federation: Federation, state: PrivateClustersState, cohort: Sequence[int]
) -> tuple[PrivateClustersState, RoundRecord]:
    """One round of FedAvg in all clusters, by one sum of blocks."""
    k, train = len(state.models), settings.train.at(federation.round)
    if k == 1:
        held = federation.compute(train, {"model": state.models[0]}, on=cohort)
        (mean,) = federation.mean(held["update"], weights="equal")
    else:
        start = Shared(settings.train.model.init(settings.seed))
        chosen = federation.compute(settings.task(ChooseCluster), {"start": start, **_choosing(state)}, on=cohort)["choice"]
        held = federation.compute(TrainInBlock(train, k), {"model": list(state.models)}, which=chosen, on=cohort)
        (mean,) = federation.mean(held["blocks"], weights="equal")
    notes = {"finding": None, "unchanged_clusters": [0] if mean is None else [], "clipped_clients": 0 if mean is None else mean.clipped}
    record = RoundRecord(federation.round, tuple(cohort), None, {**notes, "clusters": k})
    if mean is None:
        return state, record
    if k == 1:
        models: tuple[Shared, ...] = (federation.fold(state.models[0] + mean.parts["update"], on=held.clients[0]),)
    else:
        models = moved_by(state.models, mean.parts["blocks"].value(), _there(state.sizes))
    return replace(state, models=models, before=state.models), record


def _serve(settings: PrivateClustersSettings, state: PrivateClustersState) -> Served:
    models = [(old + new) * 0.5 for old, new in zip(state.before, state.models, strict=True)] if state.before else list(state.models)
    if len(models) == 1 or state.sizes is None:
        return Served(Evaluate(settings.train.model), {"model": models[0]})
    start = Shared(settings.train.model.init(settings.seed))
    return Served(EvaluateChosen(settings.task(ChooseCluster)), {"model": models, "start": start, **_choosing(state)})


def _describe(state: PrivateClustersState) -> Mapping[str, Any]:
    return {"k": len(state.models), **state.notes}


def _defaults(given: Mapping[str, Any], before: BeforeRun) -> Mapping[str, Any]:
    if before.unit != "client":
        return norm_of_clip(given, before)
    counts = {name: round(least * max(1.0, before.rounds / ENOUGH_ROUNDS)) for name, least in LEAST.items()}
    return norm_of_clip(given, before) | counts | {"train_early": True}


def _never_clusters(given: Mapping[str, Any], before: BeforeRun) -> str:
    needed = 1 + sum(int(given.get(name, least)) for name, least in LEAST.items())
    if given.get("k") == 1 or before.rounds > needed:
        return ""
    return f"it finds them in its first {needed} rounds and trains in later ones; training.rounds = {before.rounds} leaves none"


def _knowledge(given: Mapping[str, Any]) -> str:
    k = given.get("k")
    return f"none: a test at level {given.get('alpha', ALPHA):g}" if k is None else f"the number of clusters, k = {k}"


PRIVATE_CLUSTERS = AlgorithmSpec(
    "private_clusters", private_clusters,
    "clusters from noisy sums over all clients and choices that stay with them, for client-level privacy; then FedAvg in each",
    states=(PrivateClustersState,),
    tasks=(CellShare, CentreShare, ChooseCluster, ClusterShare, EvaluateChosen, MomentShare, TrainInBlock, WithUpdate),
    sample_refused="its sums have a private form for whole clients only (privacy.unit = 'client')",
    defaults=_defaults, never_clusters=_never_clusters, knowledge=_knowledge,
)  # fmt: skip
