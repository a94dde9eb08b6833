"""RR-Cluster: IFCA whose small clusters receive clients of larger ones at random, so that noise in a cluster's mean stays bounded.

Source: Yang, Hu, Kim & Li 2025, "Differentially Private Federated Clustering with Random Rebalancing" (arXiv 2508.06183). Only its abstract
and introduction were at hand, so this is our reading of them. What these say: after each round's assignment clusters with fewer than B
clients receive clients taken at random from larger ones until each has B, so that noise in a cluster's mean is at most C·z/B; the price is
a bias by clients that train a model which is not theirs. The server is trusted there.

A round: every client takes the model of lowest training loss, as in IFCA, trains it, or with a public probability another, and puts the
update into a block of a vector with k blocks and a count (`tasks.cluster_shares.TrainInBlock`). Clients release one `mean` over all
clients, so a round is one Gaussian mechanism under client-level privacy.

Deviations and assumptions, each for a reason:
- The server does not learn who chose what, so that it need not be trusted. It knows noisy sizes from the counts, and moves clients by
  probabilities for which the expected size of each cluster is B at least, where the paper makes sizes exact.
- The sizes are those of the round before, because those of this round are not known when clients are moved. Nobody is moved in the first.
- The count is of the cluster chosen, before the move, so that the sizes of the next round follow from it.
- Sums are divided by the expected size after the moves, B at least, in place of the exact size, which costs nothing.
- A client's count takes a part of the length of its contribution (`BLOCK_COUNT`), which is noise that the paper does not have.
- B, of which we know no default, is half of an equal share of the round's clients. Initial models are random, as in IFCA.
- Clients are served the model of lowest training loss, without moves.

What it reveals, by which operation: `mean` shows the sums of each round, up to their noise; no operation shows a choice or a move. Without
noise a client alone in a block would show, so secure sums need client-level privacy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Annotated, Any

import numpy as np

from ..contract.handles import Shared
from ..contract.operations import Federation, Parameter
from ..contract.schedule import Schedule, request
from ..contract.transcript import RoundRecord
from ..keys import Key, ranged
from ..tasks.block_choices import ChooseAndMove
from ..tasks.cluster_shares import TrainInBlock
from ..tasks.evaluation import Losses
from ..tasks.training import Train
from ..types import Array
from .interface import Algorithm, AlgorithmSpec, Served
from .shared.checks import Contribution, enough_clients
from .shared.choosing import EvaluateLowest
from .shared.counted_sums import admit_by_choice, moved_by, norm_of_clip, scores_of_lowest, serve_lowest, smallest_of, sum_of_blocks

__all__ = ["rebalancing", "rr_cluster"]


@dataclass(frozen=True, eq=False)
class RrClusterState:
    """Models of the clusters, and the noisy shares (k,) of the clients that chose each in the last round; None before the first."""

    models: tuple[Shared, ...]
    shares: Array | None = None


@dataclass(frozen=True)
class RRClusterSettings:
    """What is fixed in a run."""

    train: Train
    k: int
    smallest: int | None
    norm: float
    seed: int


def rebalancing(sizes: Array, smallest: float) -> Array:
    """Probabilities (k, k) by which a client that chose cluster i trains the model of j, so that clusters have `smallest` clients at least.

    `sizes` (k,): numbers of clients that choose each, not negative. Every cluster above `smallest` gives clients in proportion to its
    excess; every cluster below `smallest` receives clients in proportion to its deficit. Expected sizes, sizes @ result, are `smallest` at
    least if there are k · smallest clients; with fewer all give what they have more. Nobody moves where no cluster is too small.
    """
    lacking, more = np.maximum(smallest - sizes, 0.0), np.maximum(sizes - smallest, 0.0)
    stay = np.eye(len(sizes))
    moving = min(float(lacking.sum()), float(more.sum()))
    if moving <= 0:
        return stay
    leaving = np.minimum(moving * more / more.sum() / np.maximum(sizes, np.finfo(float).tiny), 1.0)
    moves: Array = stay * (1 - leaving)[:, None] + leaving[:, None] * (lacking / lacking.sum())
    return moves


@ranged("algorithm")
def rr_cluster(
    train: Train,
    *,
    k: Annotated[int, Key("Number of models.", "[1, inf)", "models")] = 2,
    smallest: Annotated[
        int | None, Key("Clients of a round that a cluster has at least.", "[1, inf)", "clients", default="half of an equal share")
    ] = None,
    norm: Contribution = 1.0,
    seed: int = 0,
) -> Algorithm:
    """RR-Cluster with `k` models and clusters of `smallest` clients of a round at least (by default half of an equal share).

    `norm`: the length of a client's contribution, under client-level privacy that to which it is clipped.
    One above that makes counts wrong.

    Raises `InputError` for parameters that cannot be.
    """
    settings = RRClusterSettings(train, k, smallest, norm, seed)
    return Algorithm(
        "rr_cluster", ("mean",), partial(_init, settings), partial(_round, settings), partial(_serve, settings), admit_by_choice,
        partial(_describe, settings), reads_means=True, spread=inf if k > 1 else 1.0, schedule=_schedule(settings),
    )  # fmt: skip


def _schedule(settings: RRClusterSettings) -> Schedule:
    """Each round a choice, which stays with the client, and a training."""
    train = settings.train
    return Schedule(
        round=(
            request(ChooseAndMove(Losses(train.model))),
            request(TrainInBlock(train, settings.k, settings.norm), {"blocks": "sum"}),
        ),
        serving=(scores_of_lowest(train.model),),
    )  # fmt: skip


def _init(settings: RRClusterSettings, federation: Federation) -> RrClusterState:
    k = settings.k
    enough_clients(k, len(federation.clients))
    return RrClusterState(tuple(Shared(settings.train.model.init(settings.seed, j)) for j in range(k)))


def _round(settings: RRClusterSettings, federation: Federation, state: RrClusterState) -> tuple[RrClusterState, RoundRecord]:
    k, train = settings.k, settings.train.at(federation.round)
    cohort = federation.cohort(dict.fromkeys(federation.clients, 0))
    smallest, moves = smallest_of(settings.smallest, k, len(cohort)), np.eye(k)
    if state.shares is not None:
        moves = rebalancing(state.shares * len(cohort), smallest)
    models = list(state.models)
    chosen = federation.compute(ChooseAndMove(Losses(train.model)), {"model": models, "moves": moves}, on=cohort)
    params: dict[str, Parameter] = {"model": models, "counted": chosen["choice"]}
    held = federation.compute(TrainInBlock(train, k, settings.norm), params, which=chosen["moved"], on=cohort)
    total = sum_of_blocks(federation, held["blocks"], settings.norm)
    if total is None:
        return state, RoundRecord(federation.round, tuple(cohort), None, {"unchanged_clusters": list(range(k))})
    sizes = np.maximum(total.count * (total.shares @ moves), smallest)
    notes = {
        "sizes": [float(size) for size in sizes], "share_moved": float(1 - _staying(total.shares, moves)), "unchanged_clusters": [],
        "clipped_clients": total.clipped,
    }  # fmt: skip
    after = RrClusterState(moved_by(state.models, total.sums, sizes), total.shares)
    return after, RoundRecord(federation.round, tuple(cohort), None, notes)


def _staying(shares: Array, moves: Array) -> float:
    """The expected share of clients that train the model that they chose."""
    return float(shares @ np.diag(moves))


def _serve(settings: RRClusterSettings, state: RrClusterState) -> Served:
    return serve_lowest(settings.train.model, state.models)


def _describe(settings: RRClusterSettings, state: RrClusterState) -> Mapping[str, Any]:
    return {"k": settings.k, "rule": f"k = {settings.k}"}


RR_CLUSTER = AlgorithmSpec(
    "rr_cluster", rr_cluster,
    "IFCA by one noisy sum a round, with random moves into small clusters, for client-level privacy (our reading of Yang et al. 2025)",
    states=(RrClusterState,), tasks=(ChooseAndMove, EvaluateLowest, TrainInBlock),
    sample_refused="its sums have a private form for whole clients only (privacy.unit = 'client')",
    cohorts="one", defaults=norm_of_clip, knowledge=lambda settings: f"the number of groups, k = {settings.get('k', 2)}",
)  # fmt: skip
