"""StoCFL: clusters merge as clients are met (`merging`), and every cluster model is drawn towards one global model.

Source: Zeng et al. 2023, Algorithm 1 (lines as numbered there), equations 2 and 3, Sections 3.1-3.3 and 4.4.

A client met for the first time sends Ψ, the normalised gradient of its loss at a public anchor model ψ (l. 5-6). A cluster's
representation is the mean of its members' Ψ (l. 8-9); the two most similar clusters merge while their cosine is at least τ (l. 11-13).
Sampled clients then take local steps with the global model ω and with their cluster's model θ, which λ draws towards ω (l. 20-22); ω is
averaged over all sampled clients (l. 17), each θ over its cluster's (l. 18-19).

Deviations, each for a reason:
- Without `tau` a test finds the clusters (`grouping`), so that no threshold depends on the number of samples. A client sends Ψ of each of
  two random halves of its data, both by one factor, so that their mean has norm 1: products of different halves are unbiased, so squared
  distances are 2 − 2 cos without the part of noise. In each round that meets new clients all met so far are tested. The level (0.01) is
  that of each test, not of all rounds together. Few clients show little: below four there is no test, and until one rejects all
  are one cluster, as in FedAvg; λ draws its model to ω all the same.
- By the test clusters may come apart as well as merge. A new cluster's model is the mean of the old ones by how many of its own members
  have trained each; if none has, that of most of its members; a cluster of clients met just now starts from ω, which they have used so
  far. Newcomers after the start join the nearest cluster and open none. Under sample-level privacy the test takes one noisy mean of
  gradients of norm 1 a client, which is not normalised: the law of its noise has to stay public.
- Merges need cosine ≥ τ (the paper: > τ), so that τ = −1 merges all; at τ = 1 nothing merges, as in the paper. All clusters with a member
  met so far are compared (l. 9-13); the text of Sec. 3.2 compares those sampled in the round. After every merge the representation is
  recomputed and the best pair taken anew, so that the result does not depend on the order of clients.
- Merged models are averaged by the numbers of clients that have trained them (the paper: "merge"). If no client has trained them, the first
  one is kept. Clients not met yet use ω, where Algorithm 1 has a cluster of one, at θ⁰, for each.
- Clients that came after the start follow Sec. 4.4 also while training goes on: if they match no cluster, they open one with the nearest
  cluster's model, not with θ⁰. Clients that leave stay in their cluster and in its representation.
- Models of many parameters give sketches of Ψ: a public count sketch keeps cosines to about 1 / sqrt(sketch_dim).
- Updates travel, not models; averages may be by sample counts. A cluster below the minimum cohort size keeps its model. A client whose
  training diverges while Ψ is computed (and is skipped) is not met this time.
- One sum a client and round: each cluster's sum has both movements, and ω's mean (l. 17) is made of the clusters' means. The difference of
  two sums, over all and over a cluster, would reveal the clients outside of it. Clients of clusters below the minimum cohort size are
  summed together for ω alone.
- A sampled client is sent ω twice in a round, as the model to train and (λ > 0) as what draws θ. In the authors' variant it is sent ψ each
  time that it computes Ψ. Of the models counted down a third (authors: two fifths) are such copies.

`variant="authors"` follows the authors' code. Ψ is the movement of local training from ψ, not normalised. A cluster's representation is
the mean over this round's clients only, which send Ψ again whenever they are sampled. One pass over the pairs of the initial similarity
matrix, best first, merges whatever is ≥ τ. The larger cluster's model is kept. New clusters start from ω. ω is trained by one sampled
client after the other, and the mean of that chain is the next ω.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from ...contract.handles import GroupMean, Held, OwnAddend, Shared
from ...contract.operations import Federation
from ...contract.schedule import Schedule, request, scores
from ...contract.transcript import RoundRecord
from ...errors import InputError
from ...keys import Key, ranged
from ...privacy.settings import Releases
from ...tasks.evaluation import Evaluate
from ...tasks.halves import HALVES
from ...tasks.joining import Join
from ...tasks.training import Gradient, Train
from ...types import Clustering
from ..fedavg import Weights
from ..interface import Algorithm, AlgorithmSpec, ComparedValue, Served
from ..shared.attempts import mean_with_overall, try_compute
from ..shared.grouping import ALPHA, FindGroups, JoinGroups
from ..shared.steps import moved
from .meeting import StocflSettings, StocflState, extend, groups_of_met, join_nearest, merge_met, merge_present, reopened, test_all_met
from .merging import Enter, MergeClusters, MergePresent, PlaceInClusters
from .representing import ChainLink, Represent, count_sketch

__all__ = ["ChainLink", "Represent", "StocflState", "count_sketch", "stocfl"]

SKETCH_ABOVE = 8192
"""Representations of larger models are sketched unless `sketch_dim` is given."""
SKETCH_DIM = 4096
TAU = 0.5
"""τ of the paper's experiments, and of the authors' variant unless given."""
LONGEST_HALF = 4.0
"""The squared norm of half of a representation is below this: halves that are noise alone have 2, where their mean has 1."""
Rule = Literal["test", "tau"]


@ranged("algorithm")
def stocfl(
    train: Train,
    *,
    tau: Annotated[float | None, Key("Least cosine of two clusters that merge.", "[-1, 1]", default='none; 0.5 for `cut = "tau"`')] = None,
    cut: Annotated[
        Rule | None, Key("Merge by a test, or by the threshold `tau`.", default="`test`; `tau` with `tau` or for the authors' variant")
    ] = None,
    lam: Annotated[float, Key("λ of eq. 3, which draws cluster models towards the global one.", "[0, inf)")] = 0.05,
    variant: Annotated[Literal["paper", "authors"], Key("As the paper states it, or as its authors' code does.")] = "paper",
    representation: Annotated[
        Literal["gradient", "movement"] | None,
        Key(
            "What clients are compared by: the anchor's gradient, or the movement of a local training.",
            default="`gradient`; `movement` for the authors' variant",
        ),
    ] = None,
    movement_epochs: Annotated[int, Key("Epochs of that local training.", "[1, inf)", "epochs")] = 20,
    anchor_seed: Annotated[int | None, Key("Seed of the anchor model.", default="the anchor is the initial model")] = None,
    sketch_dim: Annotated[
        int | None,
        Key(
            "Length to which representations are sketched; 0: not.",
            "[0, inf)",
            "numbers",
            default="4096 for models above 8192 parameters, else 0",
        ),
    ] = None,
    weights: Weights = "examples",
    seed: int = 0,
) -> Algorithm:
    """StoCFL. `tau` is the least cosine of clusters that merge, `lam` (λ of eq. 3) draws cluster models towards the global one.

    `cut`: without `tau` it is "test", of the authors' variant "tau", where τ is 0.5 unless given.

    `representation` defaults to the anchor's gradient ("movement", of `movement_epochs` local epochs, for the authors' variant). The anchor
    ψ is the initial model, or that of `anchor_seed`. `sketch_dim`: 0 for none; by default 4096 for models above 8192 parameters.

    τ goes with the number of samples: with few, the cosines of like clients fall towards 0 (see `similarity_histogram` in the notes).
    Raises `InputError` for parameters that cannot be.
    """
    authors = variant == "authors"
    if cut == "test" and tau is not None:
        raise InputError(f"algorithm.cut: 'test' has no threshold, but algorithm.tau = {tau:g} is given")
    if cut == "test" and authors:
        raise InputError("algorithm.cut: 'test' goes with variant = 'paper': the authors' code compares those of a round alone")
    tested = _rule(tau, cut, authors) == "test"
    moving = representation == "movement" or (representation is None and authors)
    by = replace(train, epochs=movement_epochs, lr_decay=1.0) if moving else Gradient(train.model, train.on_divergence)
    sketch = sketch_dim if sketch_dim is not None else SKETCH_DIM if train.model.dimension > SKETCH_ABOVE else 0
    represent = Represent(by, not authors, sketch, seed, remember=authors, halves=tested)
    find = FindGroups(seed=seed, numbers=train.model.dimension, longest=LONGEST_HALF) if tested else None
    anchor = train.model.init(seed if anchor_seed is None else anchor_seed)
    initial = Shared(train.model.init(seed))
    settings = StocflSettings(train, TAU if tau is None else tau, lam, authors, represent, anchor, initial, weights, find)
    return Algorithm(
        "stocfl", ("gram", "relay", "mean") if authors else ("gram", "mean"),
        partial(_init, settings), partial(_round, settings), partial(_serve, settings), partial(_admit, settings),
        partial(_describe, settings), public_groups=True, schedule=_schedule(settings),
    )  # fmt: skip


def _schedule(settings: StocflSettings) -> Schedule:
    """Ψ of a client once, when it is met (the authors' variant compares those of a round); each round both trainings."""
    train, represented = settings.train, request(settings.represent, {"representation": "gram"})
    rounds = [represented] if settings.authors else []
    bent = replace(train, prox=settings.lam)
    if settings.authors:
        rounds += [request(ChainLink(train), {"movement": ("relay", "sum")}), request(bent)]
    elif bent == train:
        rounds.append(request(train, {"update": "sum"}, times=2))
    else:
        rounds += [request(train, {"update": "sum"}), request(bent)]
    rounds.append(request(Join(("global", "update")), {"global": "sum", "update": "sum"}))
    joining = () if settings.authors else (represented,)
    return Schedule(round=tuple(rounds), joining=joining, serving=(scores(Evaluate(train.model)),))


def _rule(tau: float | None, cut: Rule | None, authors: bool) -> Rule:
    """How clusters are found."""
    return cut or ("tau" if authors or tau is not None else "test")


def _init(settings: StocflSettings, federation: Federation) -> StocflState:
    if settings.authors and federation.merge_below > 1:
        raise InputError("protection.small_clusters: 'merge' goes with algorithm.variant = 'paper' of stocfl; use 'wait' or 'local'")
    return StocflState(Clustering((), (), 0), (), (), settings.initial, federation.clients)  # ω⁰ = θ⁰ for all


def _round(settings: StocflSettings, federation: Federation, state: StocflState) -> tuple[StocflState, RoundRecord]:
    """Algorithm 1: clusters merge, then the sampled clients train both models, which are averaged."""
    cohort = federation.cohort(state.labels)
    cluster = test_all_met if settings.find is not None else merge_present if settings.authors else merge_met
    state, notes = cluster(settings, federation, state, cohort)
    clustering, met = state.clustering, state.labels.labels
    placed = [client for client in cohort if client in met]  # all but those whose Ψ diverged
    to_global, both = _local_steps(settings, federation, state, cohort, placed)
    mean: GroupMean | None = None
    means: tuple[GroupMean | None, ...] = (None,) * clustering.k
    if to_global is not None:  # l. 17-19: means over all sampled, and over the cluster's sampled
        means, mean = mean_with_overall(federation, both, to_global, settings.weights, clustering, clustering.k, names=("global",))
    global_model = state.global_model
    if mean is not None:
        global_model = federation.fold(global_model + next(iter(mean.parts.values())), on=cohort[0])
    contributors = () if both is None else both.clients
    models = moved(federation, state.models, means, "update", clustering, contributors)
    trained = tuple(
        old if part_mean is None else tuple(sorted({*old, *(client for client in contributors if clustering[client] == label)}))
        for label, (old, part_mean) in enumerate(zip(state.trained, means, strict=True))
    )
    notes |= {
        "clusters": clustering.k, "clients_met": len(clustering.clients),
        "unchanged_clusters": [label for label, part_mean in enumerate(means) if part_mean is None],
        "global_unchanged": mean is None, "clipped_clients": 0 if mean is None else mean.clipped,
    }  # fmt: skip
    labels = tuple(clustering[client] for client in placed)
    state = replace(state, models=models, trained=trained, global_model=global_model)
    return state, RoundRecord(federation.round, tuple(placed), labels, notes)


def _local_steps(
    settings: StocflSettings, federation: Federation, state: StocflState, cohort: Sequence[int], placed: Sequence[int]
) -> tuple[Held | None, Held | None]:
    """What the cohort moved from ω, and both movements ("global", "update") of those who also trained θ; None where no client did."""
    task = settings.train.at(federation.round)
    # l. 22: ω^i ← ω − η ∇f_i(ω). First, because a client remembers what it trained last
    to_global: Held | None
    if settings.authors:
        to_global = _chain(federation, task, state.global_model, cohort)
    else:
        to_global = federation.compute(task, {"model": state.global_model}, on=cohort)["update"]
    # l. 21: θ_k^i ← θ_k − η (∇f_i(θ_k) + λ (θ_k − ω)), towards the ω that was sent
    params: dict[str, Any] = {"model": list(state.models)} | ({"anchor": state.global_model} if settings.lam else {})
    held = try_compute(federation, task.on_divergence, replace(task, prox=settings.lam), params, which=state.clustering, on=placed)
    if to_global is None or held is None:
        return to_global, None
    both = [client for client in held.clients if client in to_global.clients]
    parts = {"global": to_global, "update": held["update"]}
    return to_global, try_compute(federation, task.on_divergence, Join(("global", "update")), parts, on=both)


def _chain(federation: Federation, task: Train, global_model: Shared, cohort: Sequence[int]) -> Held | None:
    """The authors' global step: each sampled client goes on from the last one's model. What each has moved from ω, still with them.

    A client whose training diverges (and is skipped) is passed over.
    """
    links: list[Held] = []
    for client in cohort:
        params: dict[str, Any] = {"model": global_model}
        if links:
            params["before"] = federation.relay(links[-1], to={client: links[-1].clients})
        link = try_compute(federation, task.on_divergence, ChainLink(task), params, on=[client])
        if link is not None:
            links.append(link["movement"])
    if not links:
        return None
    return federation.fold(Shared(own=tuple(OwnAddend(link) for link in links))).own[0].held


def _serve(settings: StocflSettings, state: StocflState) -> Served:
    return Served(Evaluate(settings.train.model), {"model": [*state.models, state.global_model]}, state.labels)


def _admit(
    settings: StocflSettings, federation: Federation, state: StocflState, newcomers: Sequence[int]
) -> tuple[StocflState, Mapping[str, Any]]:
    """Section 4.4: newcomers join the nearest cluster, or open one with its model."""
    fresh: tuple[int, ...] = tuple(sorted(set(newcomers).difference(state.clustering.clients)))
    if not fresh:
        return state, {"opened_clusters": 0}
    if settings.find is not None:
        return _joined(settings, federation, state, fresh)
    k = state.clustering.k
    present = list(range(k))  # the epoch's labels are places in this list: the authors' variant has one of those present only
    if settings.authors:
        state, present = reopened(settings, federation, state)
    placing = PlaceInClusters(settings.tau, len(present), federation.merge_below)
    state, fresh, result = extend(settings, federation, state, fresh, placing)
    opened = len(result.get("nearest", ()))
    places = [*present, *range(k, k + opened)]
    models = list(state.models)
    for source in result.get("nearest", ()):  # θ_new = θ of the nearest
        models.append(models[places[int(source)]] if source >= 0 else settings.initial)
    labels = [places[int(label)] for label in result.get("labels", ())]
    clustering = replace(state.clustering.extended(fresh, labels), k=k + opened) if fresh else state.clustering
    if settings.authors and state.representations:
        federation.close(state.representations[0])
        state = replace(state, representations=())
    trained = (*state.trained, *((),) * opened)
    return replace(state, clustering=clustering, models=tuple(models), trained=trained), {"opened_clusters": opened}


def _joined(
    settings: StocflSettings, federation: Federation, state: StocflState, fresh: tuple[int, ...]
) -> tuple[StocflState, Mapping[str, Any]]:
    """Newcomers join the nearest cluster; where nobody was met before, those that the test finds."""
    assert settings.find is not None
    before = state.clustering.k
    if not state.representations:
        state, _ = groups_of_met(settings, federation, state, fresh, fresh[0])
    else:
        state, _ = join_nearest(settings, federation, state, fresh)
    return state, {"opened_clusters": state.clustering.k - before}


def _describe(settings: StocflSettings, state: StocflState) -> Mapping[str, Any]:
    clustering = state.clustering if state.clustering.clients else None
    if settings.find is not None:
        return {"clustering": clustering, "evidence": state.evidence, "rule": f"test at level {settings.find.alpha:g}", **state.notes}
    return {"clustering": clustering, "evidence": state.evidence, "rule": f"cosine ≥ {settings.tau:g}"}


def _sample_releases(rounds: int, settings: Mapping[str, Any]) -> Releases:
    """One representation, and each round a training for the global model and one for the cluster's."""
    for key, value in (("variant", "authors"), ("representation", "movement")):
        if settings.get(key) == value:
            raise InputError(
                f"algorithm.{key} = {value!r} under privacy.unit = 'sample': a representation by local training has no private form"
            )
    return Releases(signatures=1, trainings=2 * rounds, mechanism="mean" if _compared(settings).halves else "total")


def _compared(settings: Mapping[str, Any]) -> ComparedValue:
    tested = _rule(settings.get("tau"), settings.get("cut"), settings.get("variant") == "authors") == "test"
    return ComparedValue(HALVES, halves=True) if tested else ComparedValue()


def _knowledge(settings: Mapping[str, Any]) -> str:
    tau, cut, authors = settings.get("tau"), settings.get("cut"), settings.get("variant") == "authors"
    if _rule(tau, cut, authors) == "test":
        return f"none: a test at level {ALPHA:g}"
    return f"a threshold, tau = {TAU if tau is None else tau:g}"


STOCFL = AlgorithmSpec(
    "stocfl", stocfl, "clients met merge by the cosine of anchor gradients, bi-level training (Zeng et al. 2023)",
    states=(StocflState,), tasks=(ChainLink, Represent),
    functions=(Enter, MergeClusters, MergePresent, PlaceInClusters, FindGroups, JoinGroups),
    sample_releases=_sample_releases, cohorts="labelled", compared=_compared, renumbers=True, knowledge=_knowledge,
    serves_released=True,
)  # fmt: skip
