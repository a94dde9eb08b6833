"""PINA: clusters from noisy sketches of low-rank updates at first, by losses later; steps weighted by how normal their numbers look.

Source: Xu, Mehmood, van Dalen, Saravanan & Ozay 2026 (ICASSP), "Differentially Private Clustered Federated Learning with
Privacy-Preserving Initialization and Normality-Driven Aggregation" (arXiv 2604.20596). Only its abstract and a short account by others were
at hand, so this is our reading of them. What these say: first each client fine-tunes a low-rank adapter and shares a compressed sketch of
it under a clipping threshold of its own, and the server makes the clusters' centroids of the sketches; then clients' updates are clipped
to a fixed norm and summed securely with Gaussian noise, and a cluster's update is weighted by its Shapiro-Wilk statistic, zero where the
test of normality fails. The server is not trusted, and whole clients are protected.

Before the first round every client computes `tasks.low_rank.LowRankSketch` at the initial model, and `gram` runs k-means on them: under
client-level privacy that takes `privacy.local = ["gram"]`, each client's own noise, which costs `privacy.signature_share` of ε alone. Then
every round is one `mean` over all clients of a vector with k blocks and counts, as in `rr_cluster`, so one Gaussian mechanism.

Deviations and assumptions, each for a reason:
- A low-rank update is that of whole training, projected to the adapter's public directions: the adapter's own for one full step from the
  initial model, and about so for several.
- It is sketched by a public count sketch and always of norm 1, which uses the whole of its clipping threshold.
- Sketches are clustered by k-means, of which the server keeps labels only: `gram` releases no centroids. All models start alike.
- In the first training round a client's cluster is its label; in later ones that of lowest training loss, as in IFCA. Neither account says
  how clients are assigned later. All models start alike, so losses could not tell them apart in the first.
- A cluster's sum is divided by its noisy count, `smallest` at least (by default half of an equal share of the round's clients).
- The statistic W is that of the sum of a cluster's block, on at most `COORDINATES` public random coordinates. `normality = "weight"`
  multiplies the step by W, "drop" also leaves it out where p < `alpha`, "off" does neither. Sums that are mostly noise are the most normal,
  and one with much signal is not normal, so by default nothing is left out, other than in these accounts.
- Clients are served the model of lowest training loss.

What it reveals, by which operation: once the Gram matrix of all sketches through `gram`, up to the clients' own noise; to everybody the
list of first labels; then the sums of each round through `mean`, up to their noise. No operation shows a later choice. Without noise a
client alone in a block would show, so secure sums need client-level privacy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Annotated, Any, Literal

import numpy as np

from ..contract.handles import Held, Shared
from ..contract.operations import Federation
from ..contract.schedule import Schedule, request
from ..contract.transcript import RoundRecord
from ..keys import Key, ranged
from ..randomness import Stream
from ..tasks.block_choices import ChooseListed
from ..tasks.cluster_shares import TrainInBlock
from ..tasks.evaluation import Losses
from ..tasks.low_rank import LowRankSketch
from ..tasks.training import Train
from ..types import Array, Clustering
from .interface import Algorithm, AlgorithmSpec, Served
from .one_shot import STARTS, ClusterByMeans
from .shared.checks import Contribution, enough_clients
from .shared.choosing import EvaluateLowest
from .shared.counted_sums import admit_by_choice, moved_by, norm_of_clip, scores_of_lowest, serve_lowest, smallest_of, sum_of_blocks

__all__ = ["normality_weight", "pina"]

COORDINATES = 5000
"""The Shapiro-Wilk test is of so many numbers at most, beyond which its p-value is not accurate."""
Normality = Literal["weight", "drop", "off"]


@dataclass(frozen=True, eq=False)
class PinaState:
    """Models of the clusters, the first clustering, and whether a round has been trained by it."""

    models: tuple[Shared, ...]
    clustering: Clustering
    begun: bool = False


@dataclass(frozen=True)
class PinaSettings:
    """What is fixed in a run."""

    train: Train
    signature: LowRankSketch
    k: int
    smallest: int | None
    normality: Normality
    alpha: float
    norm: float
    seed: int


@ranged("algorithm")
def pina(
    train: Train,
    *,
    k: Annotated[int, Key("Number of models.", "[1, inf)", "models")] = 2,
    rank: Annotated[int, Key("Public directions that are seen of each weight matrix.", "[1, inf)", "directions")] = 4,
    sketch: Annotated[int, Key("Length of the sketch of these in all.", "[1, inf)", "numbers")] = 32,
    smallest: Annotated[
        int | None, Key("A cluster's sum is divided by so many clients at least.", "[1, inf)", "clients", default="half of an equal share")
    ] = None,
    normality: Annotated[Normality, Key("Weight a cluster's sum by a test of normality, drop it if it fails, or do not test.")] = "weight",
    alpha: Annotated[float, Key("Level of the test of normality.", "(0, 1)")] = 0.05,
    norm: Contribution = 1.0,
    seed: int = 0,
) -> Algorithm:
    """PINA with `k` models. Of each weight matrix `rank` public directions are seen, sketched to `sketch` numbers in all.

    A cluster's sum is divided by `smallest` clients at least, and weighted by `normality` at level `alpha`. `norm`: the length of a
    client's contribution to a sum. Under client-level privacy: the clip norm; a larger `norm` makes counts wrong.

    Raises `InputError` for parameters that cannot be.
    """
    signature = LowRankSketch(train.at(0), rank, sketch, seed)
    settings = PinaSettings(train, signature, k, smallest, normality, alpha, norm, seed)
    return Algorithm(
        "pina", ("gram", "mean"), partial(_init, settings), partial(_round, settings), partial(_serve, settings), admit_by_choice,
        _describe, reads_means=True, spread=inf if k > 1 else 1.0, schedule=_schedule(settings),
    )  # fmt: skip


def _schedule(settings: PinaSettings) -> Schedule:
    """A sketch once; each round a choice, first from the list of labels and then by losses, which stays with the client, and a training."""
    train = settings.train
    return Schedule(
        (request(settings.signature, {"signature": "gram"}),),
        (
            request(ChooseListed()), request(Losses(train.model)),
            request(TrainInBlock(train, settings.k, settings.norm), {"blocks": "sum"}),
        ),
        serving=(scores_of_lowest(train.model),),
    )  # fmt: skip


def normality_weight(block: Array, rule: Normality, alpha: float, draws: Stream) -> tuple[float, float]:
    """The Shapiro-Wilk statistic of the numbers of a block (d,), and what its step is multiplied by under the rule.

    Numbers that are all the same, or fewer than three, have statistic 1.
    """
    from scipy.stats import shapiro  # slow to import

    sample = block if len(block) <= COORDINATES else block[draws.choice(len(block), COORDINATES, replace=False)]
    if len(sample) < 3 or float(np.ptp(sample)) == 0:
        return 1.0, 1.0
    test = shapiro(sample.astype(np.float64) / float(np.abs(sample).max()))
    statistic, p = float(test.statistic), float(test.pvalue)
    if rule == "off":
        return statistic, 1.0
    return statistic, 0.0 if rule == "drop" and p < alpha else statistic


# --- the first stage: clusters from sketches


def _init(settings: PinaSettings, federation: Federation) -> PinaState:
    k = settings.k
    enough_clients(k, len(federation.clients))
    start = Shared(settings.train.model.init(settings.seed))
    held = federation.compute(settings.signature, {"model": start})["signature"]
    released = federation.gram(held, then=ClusterByMeans(min(k, len(held.clients)), STARTS, settings.seed))
    federation.close(held)
    return PinaState((start,) * k, Clustering(held.clients, tuple(int(label) for label in released.result["labels"]), k))


# --- training


def _round(settings: PinaSettings, federation: Federation, state: PinaState) -> tuple[PinaState, RoundRecord]:
    k, train = settings.k, settings.train.at(federation.round)
    cohort = federation.cohort(dict.fromkeys(federation.clients, 0))
    models = list(state.models)
    if state.begun:
        chosen = federation.compute(Losses(train.model), {"model": models}, on=cohort)["choice"]
    else:
        chosen = _first(federation, state.clustering, cohort)
    held = federation.compute(TrainInBlock(train, k, settings.norm), {"model": models}, which=chosen, on=cohort)
    total = sum_of_blocks(federation, held["blocks"], settings.norm)
    if total is None:
        return state, RoundRecord(federation.round, tuple(cohort), None, {"unchanged_clusters": list(range(k))})
    sizes = np.maximum(total.count * total.shares, smallest_of(settings.smallest, k, len(cohort)))
    draws = federation.stream("normality")
    tests = [normality_weight(block, settings.normality, settings.alpha, draws) for block in total.sums]
    weights = np.array([weight for _, weight in tests])
    notes = {
        "sizes": [float(size) for size in sizes], "normality": [statistic for statistic, _ in tests],
        "unchanged_clusters": [j for j in range(k) if weights[j] == 0], "clipped_clients": total.clipped,
    }  # fmt: skip
    moved = moved_by(state.models, total.sums * weights[:, None].astype(total.sums.dtype), sizes)
    return PinaState(moved, state.clustering, begun=True), RoundRecord(federation.round, tuple(cohort), None, notes)


def _first(federation: Federation, clustering: Clustering, cohort: Sequence[int]) -> Held:
    """The labels of the first stage, as the clients' own choices."""
    listed = {"clients": np.array(clustering.clients), "labels": np.array(clustering.labels)}
    return federation.compute(ChooseListed(), listed, on=cohort)["choice"]


def _serve(settings: PinaSettings, state: PinaState) -> Served:
    return serve_lowest(settings.train.model, state.models)


def _describe(state: PinaState) -> Mapping[str, Any]:
    """The clustering is that of the first stage. Later choices are not known to the server."""
    return {"clustering": state.clustering, "rule": f"k = {state.clustering.k}"}


PINA = AlgorithmSpec(
    "pina", pina,
    "first clusters from noisy sketches, then IFCA by one noisy sum a round, for client-level privacy (our reading of Xu et al. 2026)",
    states=(PinaState,), tasks=(ChooseListed, EvaluateLowest, LowRankSketch, TrainInBlock), functions=(ClusterByMeans,),
    sample_refused="its sums have a private form for whole clients only (privacy.unit = 'client')",
    cohorts="one", defaults=norm_of_clip, knowledge=lambda settings: f"the number of groups, k = {settings.get('k', 2)}",
)  # fmt: skip
