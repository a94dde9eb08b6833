"""Clustering under client-level differential privacy: clusters from noisy sums over all clients, and choices that stay with the clients.

No client is compared with another, and no client's label reaches the server. Every round is one mean over all clients of
vectors of bounded length (`tasks.cluster_shares`), so with `[privacy] unit = "client"` each round is one Gaussian mechanism,
under a trusted server or inside a secure sum. The first rounds find the clusters, one sum each:

1. the centre of the clients' short vectors, which are projected mean gradients at the initial model, of length 1;
2. `moments` sums of cross-fitted second moments of what differs from the centre, each client's averaged over `SPLITS` random halves of its
   samples. Eigenvalues above the edge of the noise give the directions in which clients differ. If there are none, all are alike, and
   training goes on with one model;
3. `cell_steps` sums of counts and residuals by cells: each client takes the nearest of public random points in these directions, in which
   clients' means are scaled to vary alike. Ward's tree of the cells gives the clusters and their number, tested against simulated clients
   without groups (`clustering.noisy_sums`). If the test finds none, training goes on with one model.

Each of these sums carries an update of one model beside it (`train_early`). Both are parts of one contribution of the same total length,
divided by `UPDATE_PART`. So a round costs the same ε as without updates. What finds clusters has 1 / √(1 − part) times the noise for that,
and clusters begin with a model that is trained already. Such an update has 1 / √part times the noise, so the model moves `EARLY_STEP` times
as far.

In all later rounds clients train the model of their cluster, and put the update and a count into its block of a vector with k blocks
(`tasks.cluster_shares.TrainInBlock`), so one sum holds the sum of every cluster. That takes k times the upload. In the first such round all
models are the same, and a client chooses by its short vector; later it takes the model of lowest training loss, as in IFCA. Sums of blocks
are divided by the noisy sizes, smoothed over rounds. Clients use the mean of their cluster's last two models, that of lowest training loss:
a step of fixed length overshoots and comes back in the next round.

Initial models need not differ between clusters, so a linear model may begin at zero (`model.init_scale`): sums with noise do not wash out
the random numbers that other starts have.

The server measures the noise in numbers that no client adds to, so the algorithm does not need to know what protects its sums.
Without noise it works as well, but not under secure sums: a client alone in a cell or a block would show.

Source: this project. Related: private k-means by noisy sums (Blum et al. 2005), FedDP-KMeans (2025, with data of the server). Cross-fitting
is that of `crossfit`. Assumptions: sums get independent Gaussian noise of one size; all clients, or a random part of them, are there in
each of the first rounds.

Guarantee: under client-level privacy that of one Gaussian release a round. In each round a client adds one vector of norm at most `norm`,
which depends on its data and on values of earlier rounds alone; directions, their scales, cells and clusters are computed from sums that
carry their noise. What it reveals, by which operation: `mean` shows the sums of each round, up to their noise; no operation shows a choice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Annotated, Any, Literal

import numpy as np

from ..clustering.noisy_sums import Alike, directions_of, first_cells, moved_cells, partition_of, whitened
from ..contract.handles import Shared
from ..contract.operations import Federation, Parameter
from ..contract.schedule import Schedule, TaskRequest, request, scores
from ..contract.transcript import RoundRecord
from ..keys import Key, ranged
from ..tasks.cluster_shares import (
    CELL_COUNT,
    CELL_RESIDUAL,
    LENGTH_PART,
    CellShare,
    CentreShare,
    ChooseCluster,
    ClientVectors,
    MomentShare,
    TrainInBlock,
    cells_of,
    moment_of,
    noise_in,
)  # fmt: skip
from ..tasks.evaluation import Evaluate, Losses
from ..tasks.training import Train
from ..tasks.with_update import WithUpdate, update_in
from ..types import Array
from .interface import Algorithm, AlgorithmSpec, BeforeRun, Served
from .shared.checks import Contribution
from .shared.choosing import EvaluateLowest
from .shared.counted_sums import admit_by_choice, moved_by, norm_of_clip, scores_of_lowest, serve_lowest, smallest_of, sum_of_blocks
from .shared.grouping import check_draws

__all__ = ["private_clusters"]

ALPHA = 0.05
DRAWS = 99
MOMENTS, CELL_STEPS = 4, 2
LEAST = {"moments": MOMENTS, "cell_steps": CELL_STEPS}
ENOUGH_ROUNDS = 22
"""With privacy and more rounds than these the sums that find clusters are more by the same factor: each has so much more noise."""
UPDATE_PART = 0.2
"""The part of a contribution's squared length that is an update beside what finds clusters. Chosen on MNIST."""
EARLY_STEP = 0.5
"""How far such an update moves the model, of its own length. Chosen on MNIST."""
KEPT = 0.5
"""The weight of earlier shares of the clusters in those that sums are divided by."""
Stage = Literal["centre", "moments", "cells", "train"]


@dataclass(frozen=True, eq=False)
class PrivateClustersState:
    """Models of the clusters, those `before` the last round of training (k or none), and what sums have shown so far, all public.

    `stage` is what the next sum is for, `done` the number of sums of that stage taken, `total` their sum. `noise` is the sum of squares
    of the noise seen, and the number of values. `seen` is the number of contributions that the sums of the last stage had on average.
    The `centre` of short vectors. Of step 3: basis (r, s), variances (s,) of clients' means along it (1, or less in a weak direction),
    cells (m, s), and spreads (s,), sums of squares of the clients themselves. Of training: rows and offsets (k,) for clients' choices in
    its first round, and shares (k,) of the clients in each cluster, None before that round.
    """

    models: tuple[Shared, ...]
    before: tuple[Shared, ...] = ()
    stage: Stage = "centre"
    done: int = 0
    total: Array | None = None
    noise: tuple[float, int] = (0.0, 0)
    seen: float = 0.0
    centre: Array | None = None
    basis: Array | None = None
    variances: Array | None = None
    cells: Array | None = None
    spreads: Array | None = None
    rows: Array | None = None
    offsets: Array | None = None
    shares: Array | None = None
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
    update_part: float
    k: int | None
    alpha: float
    draws: int
    seed: int

    def deviation(self, state: PrivateClustersState) -> float:
        """The deviation of the noise in a sum, in lengths of what finds clusters in a contribution."""
        return state.deviation / float(np.sqrt(1 - self.update_part))

    def task(self, kind: type[ClientVectors]) -> Any:
        """A task on the clients' vectors."""
        v = self.vectors
        return kind(v.model, v.sketch, v.directions, v.norm, v.seed)


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
    train_early: Annotated[bool, Key("Train in the rounds that find clusters, too.", default="true under client-level privacy")] = False,
    alpha: Annotated[float, Key("Level of the test that finds the number of clusters.", "(0, 1)")] = ALPHA,
    draws: Annotated[int, Key("Simulations without groups, for the test; enough to show its level.", "[1, inf)", "simulations")] = DRAWS,
    sketch: Annotated[int, Key("Length of a sketched gradient.", "[1, inf)", "numbers")] = 256,
    directions: Annotated[int, Key("Dimensions in which second moments are taken.", "[1, inf)", "dimensions")] = 24,
    norm: Contribution = 1.0,
    seed: int = 0,
) -> Algorithm:
    """Clusters from sums over all clients, found in the first 1 + `moments` + `cell_steps` rounds; then FedAvg in each.

    With `k` the number of clusters is given and nothing is tested (1: no round is spent on them); else a test at level `alpha` finds it,
    with so many `draws` of simulated clients without groups. `train_early`: those rounds train, too, by updates clipped to `norm`.
    `sketch`: the length of a sketched gradient; `directions`: second moments are taken in so many dimensions. `norm`: the length of a
    client's contribution, under client-level privacy that to which it is clipped.

    Raises `InputError` for parameters that cannot be.
    """
    check_draws(alpha, draws)
    sums = {"centre": 1, "moments": moments, "cells": cell_steps}
    vectors = ClientVectors(train.model, sketch, directions, norm, seed)
    settings = PrivateClustersSettings(train, vectors, sums, UPDATE_PART if train_early else 0.0, k, alpha, draws, seed)
    return Algorithm(
        "private_clusters", ("mean",), partial(_init, settings), partial(_round, settings), partial(_serve, settings),
        admit_by_choice, _describe, reads_means=k != 1, spread=1.0 if k == 1 else inf, schedule=_schedule(settings),
    )  # fmt: skip


def _schedule(settings: PrivateClustersSettings) -> Schedule:
    """One contribution a round, for the centre, moments or cells, and then a choice, which stays with the client, and a training.

    Where the number of clusters is found, it is at most one more than the number of directions.
    """
    train, k, part = settings.train, settings.k, settings.update_part
    alone, evaluate = request(train, {"update": "sum"}), scores(Evaluate(train.model))
    if k == 1:
        return Schedule(round=(alone,), serving=(evaluate,))
    many, found = k or settings.vectors.moment_size + 1, () if k else ("k",)
    shares = [settings.task(kind) for kind in (CentreShare, MomentShare, CellShare)]
    rounds: list[TaskRequest] = [
        request(WithUpdate(share, train, part) if part else share, {"contribution": "sum"}) for share in shares
    ]  # fmt: skip
    rounds += [request(settings.task(ChooseCluster)), request(Losses(train.model))]
    rounds.append(request(TrainInBlock(train, many, settings.vectors.norm), {"blocks": "sum"}, varies=found))
    return Schedule(round=tuple(rounds) if k else (*rounds, alone), serving=(evaluate, scores_of_lowest(train.model)))


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
    stage, model, part = state.stage, settings.train.model, settings.update_part
    task, params = _share(settings, state)
    given: dict[str, Parameter] = {"start": Shared(model.init(settings.seed)), **params}
    if part:
        task, given = WithUpdate(task, settings.train.at(federation.round), part), {**given, "model": state.models[0]}
    held = federation.compute(task, given, on=cohort)
    (mean,) = federation.mean(held["contribution"], weights="equal")
    if mean is None:
        return state, RoundRecord(federation.round, tuple(cohort), None, {"finding": stage, "unchanged_clusters": [0]})
    vector_sum, update = update_in(mean.parts["contribution"].value(), model.dimension, part)
    sum_ = vector_sum * (mean.count / settings.vectors.norm)
    squares, count = noise_in(sum_ * np.sqrt(1 - part))
    total = sum_ if state.total is None or stage == "cells" else state.total + sum_
    noise = (state.noise[0] + squares, state.noise[1] + count)
    seen = (state.seen * state.done + mean.count) / (state.done + 1)
    state = replace(state, total=total, noise=noise, seen=seen, done=state.done + 1)
    if part:  # before the clusters that may be found now begin with this model
        state = replace(state, models=moved_by(state.models, update[None].astype(model.dtype), np.ones(1) / EARLY_STEP))
    after = {"centre": _centred, "moments": _directed, "cells": _partitioned}[stage]
    state = after(settings, federation, state)
    notes = {"finding": stage, "clipped_clients": mean.clipped, "clusters": len(state.models)}
    return state, RoundRecord(federation.round, tuple(cohort), None, notes)


def _share(settings: PrivateClustersSettings, state: PrivateClustersState) -> tuple[Any, Mapping[str, Parameter]]:
    """What clients contribute next, and what they are sent for it."""
    if state.stage == "centre":
        return settings.task(CentreShare), {}
    around = {"centre": _there(state.centre)}
    if state.stage == "moments":
        return settings.task(MomentShare), around
    return settings.task(CellShare), {**around, "basis": _there(state.basis), "cells": _there(state.cells)}


def _there(array: Array | None) -> Array:
    """An array that an earlier stage has made."""
    assert array is not None
    return array


def _centred(settings: PrivateClustersSettings, federation: Federation, state: PrivateClustersState) -> PrivateClustersState:
    centre = _there(state.total)[: settings.vectors.moment_size] / state.seen
    return replace(state, stage="moments", done=0, total=None, centre=centre)


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
    offset = r * (deviation / state.seen) ** 2
    moment = products / contributions * length
    directions = whitened(directions_of(moment, noise, offset, 0 if settings.k is None else settings.k - 1))
    s = len(directions.variances)
    notes = {"directions": s} | ({"rule": f"k = {settings.k}"} if settings.k is not None else {"rule": f"test at level {settings.alpha:g}"})
    if s == 0:
        return _alike(state, {**notes, "clear": False, "answer": "all alike"})
    return replace(
        state, stage="cells", done=0, total=None, basis=directions.basis, variances=directions.variances,
        spreads=np.zeros(s), cells=first_cells(s, federation.stream("cells")), notes=notes,
    )  # fmt: skip


def _partitioned(settings: PrivateClustersSettings, federation: Federation, state: PrivateClustersState) -> PrivateClustersState:
    """After each sum of cells: the cells moved; after the last, the clusters."""
    before, deviation = _there(state.cells), settings.deviation(state)
    counts, residuals, squares = cells_of(_there(state.total), *before.shape)
    cells = moved_cells(before, counts, residuals, deviation / CELL_COUNT)
    spreads = _there(state.spreads) + squares * before.shape[1]
    if state.done < settings.sums["cells"]:
        return replace(state, cells=cells, spreads=spreads)
    clients = np.maximum(spreads / (state.done * state.seen), _there(state.variances))  # their means, and their sampling noise
    alike = Alike(round(state.seen), clients, state.done, deviation / CELL_COUNT, deviation / CELL_RESIDUAL)
    rng = federation.stream("crowds")  # the name seeds the stream: another one would change the results of recorded runs
    partition = partition_of(cells, counts, alike, settings.alpha, settings.draws, rng, settings.k)
    notes = {**state.notes, "clear": partition.p is None or partition.k > 1}
    if partition.p is not None:
        notes |= {"p": float(partition.p), "answer": "groups" if partition.k > 1 else "no clear groups"}
    if partition.k == 1:
        return _alike(state, notes)
    return replace(
        state, stage="train", done=0, total=None, cells=None, basis=None, variances=None, spreads=None, notes=notes,
        models=state.models * partition.k, rows=partition.centres @ _there(state.basis).T, offsets=np.square(partition.centres).sum(1) / 2,
    )  # fmt: skip


def _alike(state: PrivateClustersState, notes: Mapping[str, Any]) -> PrivateClustersState:
    """One model for all from now on."""
    return replace(
        state, stage="train", done=0, total=None, cells=None, basis=None, variances=None, spreads=None, models=state.models[:1], notes=notes
    )


# --- training


def _trained(
    settings: PrivateClustersSettings, federation: Federation, state: PrivateClustersState, cohort: Sequence[int]
) -> tuple[PrivateClustersState, RoundRecord]:
    """One round of FedAvg in all clusters, by one sum of blocks."""
    k, train = len(state.models), settings.train.at(federation.round)
    if k > 1:
        return _trained_in_blocks(settings, federation, state, cohort)
    held = federation.compute(train, {"model": state.models[0]}, on=cohort)
    (mean,) = federation.mean(held["update"], weights="equal")
    if mean is None:
        return state, _record(federation, cohort, k, None)
    models = (federation.fold(state.models[0] + mean.parts["update"], on=held.clients[0]),)
    return replace(state, models=models, before=state.models), _record(federation, cohort, k, mean.clipped)


def _trained_in_blocks(
    settings: PrivateClustersSettings, federation: Federation, state: PrivateClustersState, cohort: Sequence[int]
) -> tuple[PrivateClustersState, RoundRecord]:
    k, train, norm = len(state.models), settings.train.at(federation.round), settings.vectors.norm
    models: dict[str, Parameter] = {"model": list(state.models)}
    if state.shares is None:  # all models are the same
        start = Shared(train.model.init(settings.seed))
        choosing: dict[str, Parameter] = {
            "start": start,
            "centre": _there(state.centre),
            "rows": _there(state.rows),
            "offsets": _there(state.offsets),
        }
        chosen = federation.compute(settings.task(ChooseCluster), choosing, on=cohort)["choice"]
    else:
        chosen = federation.compute(Losses(train.model), models, on=cohort)["choice"]
    held = federation.compute(TrainInBlock(train, k, norm), models, which=chosen, on=cohort)
    total = sum_of_blocks(federation, held["blocks"], norm)
    if total is None:
        return state, _record(federation, cohort, k, None)
    shares = total.shares if state.shares is None else KEPT * state.shares + (1 - KEPT) * total.shares
    sizes = np.maximum(total.count * shares, smallest_of(None, k, total.count))
    moved = moved_by(state.models, total.sums, sizes)
    return replace(state, models=moved, before=state.models, shares=shares), _record(federation, cohort, k, total.clipped)


def _record(federation: Federation, cohort: Sequence[int], k: int, clipped: int | None) -> RoundRecord:
    """Of a round of training; `clipped` clients is None where too few contributed."""
    notes = {"unchanged_clusters": list(range(k)) if clipped is None else [], "clipped_clients": clipped or 0}
    return RoundRecord(federation.round, tuple(cohort), None, {"finding": None, **notes, "clusters": k})


def _serve(settings: PrivateClustersSettings, state: PrivateClustersState) -> Served:
    models = [(old + new) * 0.5 for old, new in zip(state.before, state.models, strict=True)] if state.before else list(state.models)
    if len(models) == 1:
        return Served(Evaluate(settings.train.model), {"model": models[0]})
    return serve_lowest(settings.train.model, models)


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
    tasks=(CellShare, CentreShare, ChooseCluster, EvaluateLowest, MomentShare, TrainInBlock, WithUpdate),
    sample_refused="its sums have a private form for whole clients only (privacy.unit = 'client')",
    defaults=_defaults, never_clusters=_never_clusters, knowledge=_knowledge,
)  # fmt: skip
