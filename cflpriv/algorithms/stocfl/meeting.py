"""How StoCFL's clusters form as clients are met: by the test, by τ, or as the authors' code does; and what becomes of their models.

Source: Zeng et al. 2023, Algorithm 1, lines 5 to 13; deviations are listed in `stocfl`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from ...contract.handles import Held, Shared
from ...contract.operations import Federation, Then
from ...tasks.training import Train
from ...types import Array, Clustering
from ..fedavg import Weights
from ..shared.attempts import try_compute
from ..shared.grouping import FindGroups, JoinGroups, landmarks_of, notes_of
from ..shared.steps import OrElse
from .merging import Enter, MergeClusters, MergePresent
from .representing import Represent

__all__ = [
    "StocflSettings",
    "StocflState",
    "extend",
    "groups_of_met",
    "join_nearest",
    "merge_met",
    "merge_present",
    "regrouped",
    "reopened",
    "test_all_met",
]


@dataclass(frozen=True, eq=False)
class StocflState:
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
    """What is fixed in a run: training, τ, λ, the variant, Ψ and the model at which Ψ is computed (`anchor`, ψ), θ⁰ (`initial`), and the
    test (`find`). A test replaces τ.
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


def merge_met(
    settings: StocflSettings, federation: Federation, state: StocflState, cohort: Sequence[int]
) -> tuple[StocflState, dict[str, Any]]:
    """Lines 5-13: the newly met send Ψ; clusters merge."""
    met = state.labels.labels
    fresh = tuple(client for client in cohort if client not in met)
    if fresh:
        state, fresh, result = extend(settings, federation, state, fresh, MergeClusters(settings.tau, federation.merge_below))
    if not fresh:
        return state, _merge_notes(0, 0, state.evidence)
    labels = tuple(int(label) for label in result["labels"])
    clustering = Clustering(state.clustering.clients + fresh, labels, max(labels) + 1)
    came = {client for client in fresh if client not in state.founders}
    merged = _merge_models(settings, federation, state, clustering, result["nearest"], came, cohort[0])
    return merged, _merge_notes(len(fresh), state.clustering.k + len(fresh) - clustering.k, state.evidence)


def test_all_met(
    settings: StocflSettings, federation: Federation, state: StocflState, cohort: Sequence[int]
) -> tuple[StocflState, dict[str, Any]]:
    """The newly met send Ψ of two halves; all clients met are tested for groups."""
    met = state.labels.labels
    fresh = tuple(client for client in cohort if client not in met)
    if fresh:
        state, fresh = groups_of_met(settings, federation, state, fresh, cohort[0])
    reported = ("answer", "directions", "p", "p_at_least")
    return state, {"newly_met": len(fresh)} | {name: state.notes[name] for name in reported if name in state.notes}


def groups_of_met(
    settings: StocflSettings, federation: Federation, state: StocflState, fresh: Sequence[int], on: int
) -> tuple[StocflState, tuple[int, ...]]:
    """The clusters that the test finds of all met, with models of the old ones; and who of `fresh` was met.

    Of many clients only some are tested: once so many were met, the others join the nearest cluster.
    """
    assert settings.find is not None
    compared = landmarks_of(federation, fresh, compared=len(state.clustering.clients))
    others = tuple(sorted(set(fresh).difference(compared)))
    met: tuple[int, ...] = ()
    if compared:
        find = replace(settings.find, at_least=federation.merge_below)
        state, met, result = extend(settings, federation, state, compared, find)
        if met:
            clients, labels = state.clustering.clients + met, tuple(int(label) for label in result["labels"])
            notes = notes_of(find, result, len(clients))
            state = regrouped(federation, replace(state, notes=notes), Clustering(clients, labels, int(result["k"])), on)
    if others and state.representations:
        state, came = join_nearest(settings, federation, state, others)
        met += came
    return state, met


def join_nearest(
    settings: StocflSettings, federation: Federation, state: StocflState, fresh: Sequence[int]
) -> tuple[StocflState, tuple[int, ...]]:
    """Clients join the nearest cluster that the test found; and who of `fresh` was met."""
    assert settings.find is not None
    state, met, result = extend(settings, federation, state, fresh, JoinGroups(settings.find))
    if met:
        state = replace(state, clustering=state.clustering.extended(met, [int(label) for label in result["labels"]]))
    return state, met


def regrouped(federation: Federation, state: StocflState, clustering: Clustering, on: int) -> StocflState:
    """The models of clusters whose members may come from any of the old ones, by how many of these have trained each old model."""
    models: list[Shared] = []
    trained: list[tuple[int, ...]] = []
    old, trainers = state.labels.labels, {client for ids in state.trained for client in ids}
    for label in range(clustering.k):
        members = clustering.members(label)
        counts = {part: len(own) for part, ids in enumerate(state.trained) if (own := set(ids).intersection(members))}
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


def extend(
    settings: StocflSettings, federation: Federation, state: StocflState, fresh: Sequence[int], then: Then
) -> tuple[StocflState, tuple[int, ...], Mapping[str, Any]]:
    """Enter Ψ of newly met clients that hold a Ψ into the clustering epoch. The first entry opens the epoch."""
    represented = try_compute(federation, settings.train.on_divergence, settings.represent, {"model": settings.anchor}, on=fresh)
    if represented is None:
        return state, (), {}
    held = represented["representation"]
    against = state.representations[0] if state.representations else None
    released = federation.gram(held, then=then, against=against)
    state = replace(state, representations=(*state.representations, held), evidence=released.evidence)
    return state, held.clients, released.result


def _merge_models(
    settings: StocflSettings, federation: Federation, state: StocflState, clustering: Clustering, nearest: Array, came: set[int], on: int
) -> StocflState:
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


def merge_present(
    settings: StocflSettings, federation: Federation, state: StocflState, cohort: Sequence[int]
) -> tuple[StocflState, dict[str, Any]]:
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


def reopened(settings: StocflSettings, federation: Federation, state: StocflState) -> tuple[StocflState, list[int]]:
    """A clustering epoch of the clients met that are present, and their clusters, for the authors' variant, which keeps none."""
    here = set(federation.clients)
    old = [client for client in state.clustering.clients if client in here]
    if not old:
        return state, []
    held = federation.compute(settings.represent, {"model": settings.anchor}, on=old)["representation"]
    present = sorted({state.clustering[client] for client in held.clients})
    federation.gram(held, then=Enter(tuple(present.index(state.clustering[client]) for client in held.clients)))
    return replace(state, representations=(held,)), present
