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

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import add
from typing import Annotated, Any, Literal, get_args

import numpy as np

from ..contract.handles import GroupMean, Held, Own, Shared
from ..contract.operations import Federation, Then
from ..contract.transcript import RoundRecord
from ..errors import InputError
from ..keys import Key
from ..privacy.settings import Releases
from ..tasks.evaluation import Evaluate
from ..tasks.halves import HALVES
from ..tasks.joining import Join
from ..tasks.training import Gradient, Train
from ..types import Array, Clustering
from .attempts import mean_with_overall, try_compute
from .checks import at_least, finite, known
from .fedavg import Weights
from .grouping import ALPHA, FindGroups, JoinGroups, landmarks_of, notes_of
from .interface import Algorithm, AlgorithmSpec, Compared, Served
from .merging import Known, MergeClusters, MergePresent, PlaceNewcomers
from .representing import ChainLink, Represent, count_sketch
from .steps import OrElse, moved

__all__ = ["ChainLink", "Represent", "State", "count_sketch", "stocfl"]

SKETCH_ABOVE = 8192
"""Representations of larger models are sketched unless `sketch_dim` is given."""
SKETCH_DIM = 4096
TAU = 0.5
"""τ of the paper's experiments, and of the authors' variant unless given."""
LONGEST_HALF = 4.0
"""The squared norm of half of a representation is below this: halves that are noise alone have 2, where their mean has 1."""
Rule = Literal["test", "tau"]


@dataclass(frozen=True, eq=False)
class State:
    """Clusters of the clients met so far with their models, who has trained each, the global model, and who was there at the start.

    `representations` are what clients of the clustering epoch hold, `notes` the note on the last test.
    """

    clustering: Clustering
    models: tuple[Shared, ...]
    trained: tuple[tuple[int, ...], ...]
    global_model: Shared
    founders: tuple[int, ...]
    representations: tuple[Held, ...] = ()
    evidence: Mapping[str, Any] | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> OrElse:
        """The cluster of every client; those not met yet have label k, which stands for the global model."""
        return OrElse(dict(zip(self.clustering.clients, self.clustering.labels, strict=True)), self.clustering.k)


@dataclass(frozen=True)
class StocflSettings:
    """What is fixed in a run: training, τ, λ, the variant, Ψ and where it is computed (`anchor`, ψ), θ⁰ (`initial`), and the test (`find`),
    which takes the place of τ where it is given.
    """

    train: Train
    tau: float
    lam: float
    authors: bool
    represent: Represent
    anchor: Array
    initial: Shared
    weights: Weights
    find: FindGroups | None = None


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
    if tau is not None and not -1 <= tau <= 1:
        raise InputError(f"algorithm.tau: {tau} is outside [-1, 1], where cosines are")
    finite(lam=lam)
    known("variant", variant, "paper", "authors")
    if cut is not None:
        known("cut", cut, *get_args(Rule))
    if representation is not None:
        known("representation", representation, "gradient", "movement")
    at_least(1, movement_epochs=movement_epochs)
    at_least(0, sketch_dim=sketch_dim)
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
        partial(_describe, settings), public_groups=True,
    )  # fmt: skip


def _rule(tau: float | None, cut: Rule | None, authors: bool) -> Rule:
    """How clusters are found."""
    return cut or ("tau" if authors or tau is not None else "test")


def _init(settings: StocflSettings, federation: Federation) -> State:
    if settings.authors and federation.merge_below > 1:
        raise InputError("protection.small_clusters: 'merge' goes with algorithm.variant = 'paper' of stocfl; use 'wait' or 'local'")
    return State(Clustering((), (), 0), (), (), settings.initial, federation.clients)  # ω⁰ = θ⁰ for all


def _round(settings: StocflSettings, federation: Federation, state: State) -> tuple[State, RoundRecord]:
    """Algorithm 1: clusters merge, then the sampled clients train both models, which are averaged."""
    cohort = federation.cohort(state.labels)
    cluster = _test_met if settings.find is not None else _merge_present if settings.authors else _merge_met
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
        old if one is None else tuple(sorted({*old, *(client for client in contributors if clustering[client] == label)}))
        for label, (old, one) in enumerate(zip(state.trained, means, strict=True))
    )
    notes |= {
        "clusters": clustering.k, "clients_met": len(clustering.clients),
        "unchanged_clusters": [label for label, one in enumerate(means) if one is None],
        "global_unchanged": mean is None, "clipped_clients": 0 if mean is None else mean.clipped,
    }  # fmt: skip
    labels = tuple(clustering[client] for client in placed)
    state = replace(state, models=models, trained=trained, global_model=global_model)
    return state, RoundRecord(federation.round, tuple(placed), labels, notes)


def _local_steps(
    settings: StocflSettings, federation: Federation, state: State, cohort: Sequence[int], placed: Sequence[int]
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
    return federation.fold(Shared(own=tuple(Own(link) for link in links))).own[0].held


def _merge_met(settings: StocflSettings, federation: Federation, state: State, cohort: Sequence[int]) -> tuple[State, dict[str, Any]]:
    """Lines 5-13: the newly met send Ψ; clusters merge."""
    met = state.labels.labels
    fresh = tuple(client for client in cohort if client not in met)
    if fresh:
        state, fresh, result = _extend(settings, federation, state, fresh, MergeClusters(settings.tau, federation.merge_below))
    if not fresh:
        return state, _merge_notes(0, 0, state.evidence)
    labels = tuple(int(label) for label in result["labels"])
    clustering = Clustering(state.clustering.clients + fresh, labels, max(labels) + 1)
    came = {client for client in fresh if client not in state.founders}
    merged = _merge_models(settings, federation, state, clustering, result["nearest"], came, cohort[0])
    return merged, _merge_notes(len(fresh), state.clustering.k + len(fresh) - clustering.k, state.evidence)


def _test_met(settings: StocflSettings, federation: Federation, state: State, cohort: Sequence[int]) -> tuple[State, dict[str, Any]]:
    """The newly met send Ψ of two halves; all clients met are tested for groups."""
    met = state.labels.labels
    fresh = tuple(client for client in cohort if client not in met)
    if fresh:
        state, fresh = _found(settings, federation, state, fresh, cohort[0])
    reported = ("answer", "directions", "p", "p_at_least")
    return state, {"newly_met": len(fresh)} | {name: state.notes[name] for name in reported if name in state.notes}


def _found(settings: StocflSettings, federation: Federation, state: State, fresh: Sequence[int], on: int) -> tuple[State, tuple[int, ...]]:
    """The clusters that the test finds of all met, with models of the old ones; and who of `fresh` was met.

    Of many clients only some are tested: once so many were met, the others join the nearest cluster.
    """
    assert settings.find is not None
    compared = landmarks_of(federation, fresh, compared=len(state.clustering.clients))
    others = tuple(sorted(set(fresh).difference(compared)))
    met: tuple[int, ...] = ()
    if compared:
        find = replace(settings.find, at_least=federation.merge_below)
        state, met, result = _extend(settings, federation, state, compared, find)
        if met:
            clients, labels = state.clustering.clients + met, tuple(int(label) for label in result["labels"])
            notes = notes_of(find, result, len(clients))
            state = _regrouped(federation, replace(state, notes=notes), Clustering(clients, labels, int(result["k"])), on)
    if others and state.representations:
        state, came = _near(settings, federation, state, others)
        met += came
    return state, met


def _near(settings: StocflSettings, federation: Federation, state: State, fresh: Sequence[int]) -> tuple[State, tuple[int, ...]]:
    """Clients join the nearest cluster that the test found; and who of `fresh` was met."""
    assert settings.find is not None
    state, met, result = _extend(settings, federation, state, fresh, JoinGroups(settings.find))
    if met:
        state = replace(state, clustering=state.clustering.extended(met, [int(label) for label in result["labels"]]))
    return state, met


def _regrouped(federation: Federation, state: State, clustering: Clustering, on: int) -> State:
    """The models of clusters whose members may come from any of the old ones, by how many of these have trained each old model."""
    models: list[Shared] = []
    trained: list[tuple[int, ...]] = []
    old, trainers = state.labels.labels, {client for who in state.trained for client in who}
    for label in range(clustering.k):
        members = clustering.members(label)
        counts = {part: len(own) for part, who in enumerate(state.trained) if (own := set(who).intersection(members))}
        came_from = Counter(old[client] for client in members if client in old)
        trained.append(tuple(sorted(client for client in members if client in trainers)))
        if len(counts) > 1:
            total = reduce(add, (state.models[part] * (count / sum(counts.values())) for part, count in counts.items()))
            models.append(federation.fold(total, on=on))
        elif counts:
            models.append(state.models[next(iter(counts))])
        elif came_from:
            models.append(state.models[came_from.most_common(1)[0][0]])
        else:
            models.append(state.global_model)
    return replace(state, clustering=clustering, models=tuple(models), trained=tuple(trained))


def _extend(
    settings: StocflSettings, federation: Federation, state: State, fresh: Sequence[int], then: Then
) -> tuple[State, tuple[int, ...], Mapping[str, Any]]:
    """Ψ of newly met clients (of those that have one) into the clustering epoch, which opens with the first of them."""
    represented = try_compute(federation, settings.train.on_divergence, settings.represent, {"model": settings.anchor}, on=fresh)
    if represented is None:
        return state, (), {}
    held = represented["representation"]
    against = state.representations[0] if state.representations else None
    released = federation.gram(held, then=then, against=against)
    state = replace(state, representations=(*state.representations, held), evidence=released.evidence)
    return state, held.clients, released.result


def _merge_models(
    settings: StocflSettings, federation: Federation, state: State, clustering: Clustering, nearest: Array, came: set[int], on: int
) -> State:
    """Models of the new clusters from those of the old clusters they are made of, by the numbers of clients that trained them."""
    models: list[Shared] = []
    trained: list[tuple[int, ...]] = []
    old = state.labels.labels
    for label in range(clustering.k):
        parts = sorted({old[client] for client in clustering.members(label) if client in old})
        counts = {part: len(state.trained[part]) for part in parts if state.trained[part]}
        trained.append(tuple(sorted(client for part in parts for client in state.trained[part])))
        if len(counts) > 1:
            total = reduce(add, (state.models[part] * (count / sum(counts.values())) for part, count in counts.items()))
            models.append(federation.fold(total, on=on))
        elif parts:
            models.append(state.models[next(iter(counts), parts[0])])
        else:
            models.append(settings.initial)  # θ⁰
    for label in range(clustering.k):
        if nearest[label] >= 0 and came.issuperset(clustering.members(label)):
            models[label] = models[int(nearest[label])]  # Sec. 4.4: newcomers that match no cluster start from the nearest
    return replace(state, clustering=clustering, models=tuple(models), trained=tuple(trained))


def _merge_present(settings: StocflSettings, federation: Federation, state: State, cohort: Sequence[int]) -> tuple[State, dict[str, Any]]:
    """The authors' clustering of a round: a Gram of the sampled clients alone."""
    represented = try_compute(federation, settings.train.on_divergence, settings.represent, {"model": settings.anchor}, on=cohort)
    if represented is None:
        return state, _merge_notes(0, 0, state.evidence)
    held, before, met = represented["representation"], state.clustering, state.labels.labels
    fresh = [client for client in held.clients if client not in met]
    grown = before.extended(fresh, range(before.k, before.k + len(fresh))) if fresh else before
    sizes = np.bincount(grown.labels, minlength=grown.k)
    models = (*state.models, *(state.global_model,) * len(fresh))
    trained = (*state.trained, *((),) * len(fresh))
    released = federation.gram(held, then=MergePresent(settings.tau, tuple(grown[client] for client in held.clients)))
    federation.close(held)
    present = sorted({grown[client] for client in held.clients})
    into = {label: label for label in range(grown.k)}
    into |= dict(zip(present, [present[int(place)] for place in released.result["into"]], strict=True))
    kept = sorted(set(into.values()))
    keep: dict[int, int] = {}
    for label in kept:  # the larger cluster's model; the first of equals
        keep[label] = max((part for part, target in into.items() if target == label), key=lambda part: (int(sizes[part]), -part))
    clustering = Clustering(grown.clients, tuple(kept.index(into[label]) for label in grown.labels), len(kept))
    state = replace(
        state, clustering=clustering, models=tuple(models[keep[label]] for label in kept),
        trained=tuple(trained[keep[label]] for label in kept), evidence=released.evidence,
    )  # fmt: skip
    return state, _merge_notes(len(fresh), grown.k - len(kept), released.evidence)


def _merge_notes(met: int, merges: int, evidence: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a round's notes have of its clustering."""
    names = ("similarity_histogram", "merge_cosines", "largest_cosine_left")
    return {"newly_met": met, "merges": merges} | {name: evidence[name] for name in names if evidence is not None and name in evidence}


def _serve(settings: StocflSettings, state: State) -> Served:
    return Served(Evaluate(settings.train.model), {"model": [*state.models, state.global_model]}, state.labels)


def _admit(settings: StocflSettings, federation: Federation, state: State, newcomers: Sequence[int]) -> tuple[State, Mapping[str, Any]]:
    """Section 4.4: newcomers join the nearest cluster, or open one with its model."""
    fresh: tuple[int, ...] = tuple(sorted(set(newcomers).difference(state.clustering.clients)))
    if not fresh:
        return state, {"opened_clusters": 0}
    if settings.find is not None:
        return _joined(settings, federation, state, fresh)
    k = state.clustering.k
    present = list(range(k))  # the epoch's labels are places in this list: the authors' variant has one of those present only
    if settings.authors:
        state, present = _reopened(settings, federation, state)
    placing = PlaceNewcomers(settings.tau, len(present), federation.merge_below)
    state, fresh, result = _extend(settings, federation, state, fresh, placing)
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


def _joined(settings: StocflSettings, federation: Federation, state: State, fresh: tuple[int, ...]) -> tuple[State, Mapping[str, Any]]:
    """Newcomers join the nearest cluster; where nobody was met before, those that the test finds."""
    assert settings.find is not None
    before = state.clustering.k
    if not state.representations:
        state, _ = _found(settings, federation, state, fresh, fresh[0])
    else:
        state, _ = _near(settings, federation, state, fresh)
    return state, {"opened_clusters": state.clustering.k - before}


def _reopened(settings: StocflSettings, federation: Federation, state: State) -> tuple[State, list[int]]:
    """A clustering epoch of the clients met that are present, and their clusters, for the authors' variant, which keeps none."""
    here = set(federation.clients)
    old = [client for client in state.clustering.clients if client in here]
    if not old:
        return state, []
    held = federation.compute(settings.represent, {"model": settings.anchor}, on=old)["representation"]
    present = sorted({state.clustering[client] for client in held.clients})
    federation.gram(held, then=Known(tuple(present.index(state.clustering[client]) for client in held.clients)))
    return replace(state, representations=(held,)), present


def _describe(settings: StocflSettings, state: State) -> Mapping[str, Any]:
    clustering = state.clustering if state.clustering.clients else None
    if settings.find is not None:
        return {"clustering": clustering, "evidence": state.evidence, "rule": f"test at level {settings.find.alpha:g}", **state.notes}
    return {"clustering": clustering, "evidence": state.evidence, "rule": f"cosine ≥ {settings.tau:g}"}


def _sample_releases(rounds: int, given: Mapping[str, Any]) -> Releases:
    """One representation, and each round a training for the global model and one for the cluster's."""
    for key, value in (("variant", "authors"), ("representation", "movement")):
        if given.get(key) == value:
            raise InputError(
                f"algorithm.{key} = {value!r} under privacy.unit = 'sample': a representation by local training has no private form"
            )
    return Releases(signatures=1, trainings=2 * rounds, mechanism="mean" if _compared(given).halves else "total")


def _compared(given: Mapping[str, Any]) -> Compared:
    tested = _rule(given.get("tau"), given.get("cut"), given.get("variant") == "authors") == "test"
    return Compared(HALVES, halves=True) if tested else Compared()


def _knowledge(given: Mapping[str, Any]) -> str:
    tau, cut, authors = given.get("tau"), given.get("cut"), given.get("variant") == "authors"
    if _rule(tau, cut, authors) == "test":
        return f"none: a test at level {ALPHA:g}"
    return f"a threshold, tau = {TAU if tau is None else tau:g}"


STOCFL = AlgorithmSpec(
    "stocfl", stocfl, "clients met merge by the cosine of anchor gradients, bi-level training (Zeng et al. 2023)",
    states=(State,), tasks=(ChainLink, Represent), functions=(Known, MergeClusters, MergePresent, PlaceNewcomers, FindGroups, JoinGroups),
    sample_releases=_sample_releases, cohorts="labelled", compared=_compared, renumbers=True, knowledge=_knowledge,
    serves_released=True,
)  # fmt: skip
