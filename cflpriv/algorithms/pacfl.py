"""PACFL: one-shot clustering by principal angles between clients' data subspaces, then FedAvg inside each cluster.

Source: Vahidian et al. 2023 (AAAI), Algorithms 1 and 2, equations 2 and 3.

Before the first round every client sends the p leading left singular vectors of its data matrix (Alg. 1, l. 8); the server computes the
proximity matrix (l. 10), cuts an agglomerative clustering at β (l. 11) and starts all cluster models from one θ⁰ (l. 12). Newcomers extend
the proximity matrix by their own rows (Alg. 2).

Deviations, each for a reason:
- All clients present send their signatures before round 0, not only the first sampled ones: the clustering is one-shot.
- Besides β, a number of clusters, or neither: then a test finds the groups (`grouping`), or with `cut` "silhouette" or "gap" the tree is
  cut automatically. Without clear structure one cluster is trained, and the result reports it.
- For the test every client sends the p vectors of each of two random halves of its data, each as long as its singular value up to a factor
  for all. So they make the second moment of the data as far as p vectors tell it, and these moments are compared (`moments`), not angles:
  spans of vectors of norm 1 jump where the third and fourth change places, which is noise that looks like groups. How far the halves of
  one client are apart is the noise. Newcomers join the nearest group, or belong to none, or open one together; with `recheck_every`
  clients whose data changed are placed again in the same way (`shared.rechecks`): each tells by one bit whether they did.
- Equation 3 takes |u·v|: singular vectors have no sign. Clusters merge while their distance is below β, so β = 0 leaves all alone.
- A newcomer joins the cluster of smallest linkage distance if that is below β (or the height of the automatic cut), else opens one with
  θ⁰; old clients stay, and what a full re-cut would change is reported. With k given, or without clear structure, it joins the nearest.

Under sample-level privacy the test takes one noisy second moment of each client, of which the law of the noise is public; the other cuts
take its principal vectors.

`variant="authors"` follows the authors' code where it differs: eq. 2 as the smallest arccos over pairs of vectors, eq. 3 with signs, one
decomposition per label, and WPGMA linkage. It has no test, nor have signatures per label: their cut is "silhouette".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from ..clustering.cuts import Cut, Linkage, cut_tree, gap_ratios, linkage_distances, linkage_tree, silhouettes
from ..clustering.similarity import Measure, SimilarityMatrix, angle_rows, angles
from ..contract.handles import OwnAddend, Shared
from ..contract.operations import Federation, GramView, Results
from ..contract.schedule import Schedule, at_round, request
from ..contract.transcript import RoundRecord
from ..errors import InputError
from ..keys import Key, ranged
from ..privacy.settings import Releases
from ..tasks.evaluation import Evaluate
from ..tasks.halves import HALVES
from ..tasks.signatures import PrincipalHalves, PrincipalVectors
from ..tasks.training import Train
from ..types import Array, Clustering
from .fedavg import Weights, average_within, schedule_of_averaging
from .interface import Algorithm, AlgorithmSpec, ComparedValue, Served
from .shared.around import TrainApart
from .shared.grouping import ALPHA, FindGroups, JoinGroups, Landmarks, PlaceClients, find_groups
from .shared.rechecks import (
    PLACE_ALPHA,
    RECHECK_TASKS,
    Groupings,
    PlaceAlpha,
    RecheckEvery,
    Rechecks,
    newcomers_placed,
    rechecked,
    refuse_private,
    watched,
)  # fmt: skip

__all__ = ["ClusterByAngles", "PlaceNewcomers", "pacfl"]

Rule = Literal["test", "silhouette", "gap"]


@dataclass(frozen=True)
class ClusterByAngles:
    """Public code run where the Gram may be seen: angles, tree, cut. Result: labels, k, clear; evidence: all the rest."""

    results: ClassVar[Results] = {"labels": "all", "k": "one", "clear": "one"}

    measure: Measure = "smallest_angle"
    authors: bool = False
    linkage: Linkage = "average"
    beta: float | None = None
    k: int | None = None
    auto: Literal["silhouette", "gap"] = "silhouette"
    at_least: int = 1

    def __call__(self, view: GramView) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        distance = angles(view.gram, self.measure, authors=self.authors)
        tree = linkage_tree(distance, self.linkage)
        cut = self.cut(tree, distance)
        view.memory.update(distance=distance, tree=tree, cut=cut, labels=np.array(cut.labels))
        result = {"labels": np.array(cut.labels), "k": cut.k, "clear": cut.clear}
        evidence = {
            "distance": distance.values, "tree": tree, "height": cut.height, "gap_ratio": cut.gap_ratio, "note": cut.note,
            "gap_ratios": gap_ratios(tree, distance.noise), "silhouettes": silhouettes(tree, distance), "clients": distance.clients,
        }  # fmt: skip
        return result, evidence

    def cut(self, tree: Array, distance: SimilarityMatrix) -> Cut:
        return cut_tree(tree, distance, threshold=self.beta, k=self.k, auto=self.auto, at_least=self.at_least)


@dataclass(frozen=True)
class PlaceNewcomers:
    """Algorithm 2: new rows of the proximity matrix only, then each newcomer in turn joins or opens a cluster.

    Result: the newcomers' "labels", and "recut_changes", the number of old clients that a full re-cut would have put with others.
    """

    results: ClassVar[Results] = {"labels": "new", "k": "one", "recut_changes": "one"}

    by: ClusterByAngles

    def __call__(self, view: GramView) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        old: SimilarityMatrix = view.memory["distance"]
        tree, cut, labels = view.memory["tree"], view.memory["cut"], view.memory["labels"]
        before, total = len(old.clients), view.gram.n
        rows = angle_rows(view.gram, slice(before, total), slice(0, total), self.by.measure, authors=self.by.authors)
        values = np.zeros((total, total))
        values[:before, :before] = old.values
        values[before:] = rows
        values[:before, before:] = rows[:, :before].T
        fresh = np.triu(values[before:, before:], 1)
        values[before:, before:] = fresh + fresh.T
        limit = self._limit(cut)
        for newcomer in range(before, total):
            reach = linkage_distances(tree, labels, values[newcomer : newcomer + 1, :newcomer], self.by.linkage)[0]
            nearest = int(reach.argmin())
            labels = np.append(labels, nearest if reach[nearest] < limit else labels.max() + 1)
        distance = SimilarityMatrix(values, view.gram.clients, old.metric, "distance", old.noise)
        full_tree = linkage_tree(distance, self.by.linkage)
        recut = self.by.cut(full_tree, distance)
        changed = _changed(labels[:before], np.array(recut.labels)[:before])
        view.memory.update(distance=distance, labels=labels)
        result = {"labels": labels[before:], "k": int(labels.max()) + 1, "recut_changes": changed}
        return result, {"distance": values, "tree": full_tree, "height": recut.height, "clients": distance.clients, "recut": recut.labels}

    def _limit(self, cut: Cut) -> float:
        if self.by.beta is not None:
            return self.by.beta
        return cut.height if self.by.k is None and cut.clear else np.inf


def _changed(kept: Array, recut: Array) -> int:
    """How many clients a re-cut would put with a different set of old clients than they are with now."""
    together, afresh = kept[:, None] == kept[None, :], recut[:, None] == recut[None, :]
    return int((together != afresh).any(axis=1).sum())


@dataclass(frozen=True, eq=False)
class PacflState:
    """Cluster models and who is in which, with the signatures (still with their owners); newcomers' fine-tuned addends."""

    groupings: Groupings
    initial: Shared
    notes: Mapping[str, Any]
    evidence: Mapping[str, Any] | None = None
    tuned: tuple[OwnAddend, ...] = ()

    @property
    def models(self) -> tuple[Shared, ...]:
        return self.groupings.models

    @property
    def clustering(self) -> Clustering:
        return self.groupings.clustering


@dataclass(frozen=True)
class PacflSettings:
    """What is fixed in a run: local training, the signature, and how clusters are found (`by`): halves by the test."""

    train: Train
    signature: PrincipalVectors | PrincipalHalves
    by: ClusterByAngles | FindGroups
    fine_tune_epochs: int
    weights: Weights
    seed: int
    rechecks: Rechecks | None = None


@ranged("algorithm")
def pacfl(
    train: Train,
    *,
    p: Annotated[int, Key("Principal vectors of a client's signature.", "[1, inf)", "vectors")] = 3,
    measure: Annotated[
        Measure, Key("Distance of two signatures from their principal angles; of the tree, which the test does not have.")
    ] = "smallest_angle",
    variant: Annotated[Literal["paper", "authors"], Key("As the paper states it, or as its authors' code does.")] = "paper",
    linkage: Annotated[Linkage | None, Key("Linkage of the tree.", default="`average`; `weighted` for the authors' variant")] = None,
    beta: Annotated[
        float | None,
        Key(
            "Cut the tree at this distance of angles; inf: one cluster.",
            "[0, inf]",
            "degrees",
            default="the number of clusters is found by `cut`",
        ),
    ] = None,
    k: Annotated[int | None, Key("Number of clusters, if it is given.", "[1, inf)", "clusters", default="found by `cut`")] = None,
    cut: Annotated[
        Rule | None,
        Key(
            "How the number of clusters is found: by a test on halves of the clients' data, by the silhouette or by the largest gap.",
            default="`test`, without `beta` and `k`",
        ),
    ] = None,
    per_label: Annotated[
        bool | None, Key("One signature for each label of a client instead of one for all.", default="false; true for the authors' variant")
    ] = None,
    labels_at_most: Annotated[
        int | None, Key("Public width of a per-label signature.", "[1, inf)", "labels", default="the number of classes")
    ] = None,
    fine_tune_epochs: Annotated[int, Key("Newcomers fine-tune their cluster's model for so many epochs.", "[0, inf)", "epochs")] = 0,
    landmarks: Landmarks = None,
    recheck_every: RecheckEvery = 0,
    recheck_alpha: PlaceAlpha = PLACE_ALPHA,
    weights: Weights = "examples",
    seed: int = 0,
) -> Algorithm:
    """PACFL. With neither `beta` (degrees) nor `k` the number of clusters is found by `cut`: "test" by default.

    `measure` and `linkage` are of the tree, which the test does not have. `linkage` defaults to "average" ("weighted" for the authors'
    variant), `per_label` to the variant's, `labels_at_most` (the public width of a per-label signature, in labels) to the number of
    classes. Newcomers fine-tune their cluster's model for `fine_tune_epochs`.

    Raises `InputError` for parameters that cannot be.
    """
    if beta is not None and k is not None:
        raise InputError(f"algorithm.beta and algorithm.k: both are given ({beta:g} and {k}); give one, or neither to have k found")
    if cut is not None and (beta is not None or k is not None):
        raise InputError(f"algorithm.cut: {cut!r} finds the number of clusters, but algorithm.{'k' if beta is None else 'beta'} is given")
    authors = variant == "authors"
    if authors and measure not in ("smallest_angle", "corresponding_angles"):
        raise InputError(f"algorithm.measure: {measure!r} has no authors' variant")
    by_label = authors if per_label is None else per_label
    if by_label and measure != "smallest_angle":
        raise InputError(f"algorithm.measure: {measure!r} would count the padding of per-label signatures; these take 'smallest_angle'")
    rule = _rule(beta, k, cut, authors or by_label)
    signature: PrincipalVectors | PrincipalHalves
    by: ClusterByAngles | FindGroups
    if rule != "test" and landmarks is not None:
        raise InputError(f"algorithm.landmarks: {landmarks} landmarks go with cut = 'test'; other cuts compare all clients")
    if rule != "test" and recheck_every:
        raise InputError(f"algorithm.recheck_every: {recheck_every} goes with cut = 'test'; other cuts have no halves to place clients by")
    rechecks = None
    if rule == "test":
        _check_test(authors, by_label, measure, linkage)
        signature, by = PrincipalHalves(p), FindGroups(seed=seed, subspaces=p, numbers=math.prod(train.model.shape))
        rechecks = Rechecks(recheck_every, recheck_alpha, signature, "signature", by, False, landmarks)
    else:
        signature = PrincipalVectors(p, by_label, train.model.classes if labels_at_most is None else labels_at_most)
        by = ClusterByAngles(measure, authors, linkage or ("weighted" if authors else "average"), beta, k, rule)
    settings = PacflSettings(train, signature, by, fine_tune_epochs, weights, seed, rechecks)
    return Algorithm(
        "pacfl", ("gram", "mean", *(("gather",) if recheck_every else ())),
        partial(_init, settings), partial(_round, settings), partial(_serve, settings), partial(_admit, settings), _describe,
        public_groups=k != 1 and (beta is None or bool(np.isfinite(beta))), schedule=_schedule(settings),
    )  # fmt: skip


def _schedule(settings: PacflSettings) -> Schedule:
    """A signature once, then a training each round; who joins may train once more, for itself."""
    compared = request(settings.signature, {"signature": "gram"})
    tuned = [request(_tuning(settings))] if settings.fine_tune_epochs else []
    kept, checked = ([], []) if settings.rechecks is None else settings.rechecks.requests()
    served = Evaluate(settings.train.model)
    return schedule_of_averaging(settings.train, served, start=[compared, *kept], again=checked, joining=[compared, *kept, *tuned])


def _tuning(settings: PacflSettings) -> TrainApart:
    return TrainApart(replace(settings.train, epochs=settings.fine_tune_epochs, update_norm=0.0))


def _rule(beta: float | None, k: int | None, cut: Rule | None, untested: bool) -> Rule:
    """How the number of clusters is found; where it is given, any rule but the test. `untested`: there is no test for these signatures."""
    if cut is not None:
        return cut
    return "silhouette" if untested or beta is not None or k is not None else "test"


def _check_test(authors: bool, per_label: bool, measure: Measure, linkage: Linkage | None) -> None:
    """Raises `InputError` for what does not go with the test."""
    why = ""
    if authors:
        why = "goes with variant = 'paper': the authors' code has signatures per label"
    elif per_label:
        why = "goes with per_label = false: halves of a client's data need not have the same labels"
    elif linkage is not None or measure != "smallest_angle":
        named = f"linkage = {linkage!r}" if linkage is not None else f"measure = {measure!r}"
        why = f"has no tree of angles, so {named} goes with another cut"
    if why:
        raise InputError(f"algorithm.cut: 'test' {why}; 'silhouette', 'gap', beta or k cut the tree of angles")


def _init(settings: PacflSettings, federation: Federation) -> PacflState:
    """Algorithm 1, lines 7-12: signatures, clusters, and one θ⁰ for all."""
    held = federation.compute(settings.signature)["signature"]
    initial = Shared(settings.train.model.init(settings.seed))
    by = settings.by
    if isinstance(by, FindGroups):
        assert settings.rechecks is not None
        watched(federation, settings.rechecks)
        grouping = find_groups(federation, held, by, settings.rechecks.landmarks)
        groupings = Groupings((initial,) * grouping.clustering.k, grouping.clustering, held)
        return PacflState(groupings, initial, grouping.notes, grouping.evidence)
    released = federation.gram(held, then=replace(by, at_least=federation.merge_below))
    clustering = Clustering(held.clients, tuple(int(label) for label in released.result["labels"]), int(released.result["k"]))
    rule = f"threshold {by.beta:g}" if by.beta is not None else f"k = {by.k}" if by.k is not None else f"automatic ({by.auto})"
    notes = {"rule": rule, "clear": bool(released.result["clear"])}
    return PacflState(Groupings((initial,) * clustering.k, clustering, held), initial, notes, released.evidence)


def _round(settings: PacflSettings, federation: Federation, state: PacflState) -> tuple[PacflState, RoundRecord]:
    groupings, notes = state.groupings, dict[str, Any]()
    if settings.rechecks is not None:
        groupings, notes = rechecked(federation, settings.rechecks, groupings, state.initial)
    models, record = average_within(federation, groupings.models, groupings.training, settings.train, settings.weights)
    return replace(state, groupings=replace(groupings, models=models), tuned=()), replace(record, notes={**record.notes, **notes})


def _serve(settings: PacflSettings, state: PacflState) -> Served:
    models = [model + Shared(own=state.tuned) for model in state.groupings.models]
    return Served(Evaluate(settings.train.model), {"model": models}, state.groupings.clustering)


def _admit(
    settings: PacflSettings, federation: Federation, state: PacflState, newcomers: Sequence[int]
) -> tuple[PacflState, Mapping[str, Any]]:
    """Algorithm 2: newcomers extend the proximity matrix, take their cluster's model, and fine-tune it."""
    before = state.groupings
    if settings.rechecks is not None:
        groupings, notes = newcomers_placed(federation, settings.rechecks, before, state.initial, newcomers)
    else:
        groupings, notes = _by_angles(settings, federation, state, newcomers)
    tuned: tuple[OwnAddend, ...] = ()
    if settings.fine_tune_epochs:
        task = at_round(_tuning(settings), federation.round)
        trained = federation.compute(task, {"model": list(groupings.models)}, which=groupings.clustering, on=newcomers)
        tuned = (OwnAddend(trained["update"]),)
    notes = {"opened_clusters": groupings.clustering.k - before.clustering.k, **notes}
    return replace(state, groupings=groupings, tuned=tuned), notes


def _by_angles(
    settings: PacflSettings, federation: Federation, state: PacflState, newcomers: Sequence[int]
) -> tuple[Groupings, dict[str, Any]]:
    """Newcomers by rows of the proximity matrix: each joins the nearest cluster below the cut, or opens one from θ⁰."""
    assert isinstance(settings.by, ClusterByAngles)
    before = state.groupings
    held = federation.compute(settings.signature, on=newcomers)["signature"]
    placing = PlaceNewcomers(replace(settings.by, at_least=federation.merge_below))
    result = federation.gram(held, then=placing, against=before.held).result
    clustering = before.clustering.extended(held.clients, [int(label) for label in result["labels"]])
    models = before.models + (state.initial,) * (clustering.k - len(before.models))
    return replace(before, models=models, clustering=clustering), {"recut_changes": int(result["recut_changes"])}


def _describe(state: PacflState) -> Mapping[str, Any]:
    return {
        "clustering": state.groupings.clustering, "unplaced": state.groupings.unplaced, "evidence": state.evidence, **state.notes,
    }  # fmt: skip


def _sample_releases(rounds: int, settings: Mapping[str, Any]) -> Releases:
    compared = _compared(settings)
    refuse_private(settings)
    if compared.per_label:
        raise InputError(
            "algorithm.per_label under privacy.unit = 'sample': a signature per label would show which labels there are; set it to false"
        )
    return Releases(signatures=1, trainings=rounds, mechanism="whole_moment" if compared.halves else "moment")


def _compared(settings: Mapping[str, Any]) -> ComparedValue:
    authors, per_label, p = settings.get("variant") == "authors", settings.get("per_label"), int(settings.get("p", 3))
    by_label = authors if per_label is None else bool(per_label)
    if _rule(settings.get("beta"), settings.get("k"), settings.get("cut"), authors or by_label) == "test":
        return ComparedValue(HALVES * p, True, halves=True)
    return ComparedValue(p, True, by_label)


def _knowledge(settings: Mapping[str, Any]) -> str:
    if settings.get("k") is not None:
        return f"the number of groups, k = {settings['k']}"
    if settings.get("beta") is not None:
        return f"a threshold, beta = {settings['beta']:g} degrees"
    authors, per_label = settings.get("variant") == "authors", settings.get("per_label")
    cut = _rule(None, None, settings.get("cut"), authors if per_label is None else bool(per_label))
    return f"none: a test at level {ALPHA:g}" if cut == "test" else f"none: a cut by the {cut} of the tree"


PACFL = AlgorithmSpec(
    "pacfl", pacfl, "one-shot clustering by principal angles, then FedAvg in each cluster (Vahidian et al. 2023)",
    states=(PacflState, Groupings, Cut), tasks=(TrainApart, *RECHECK_TASKS),
    functions=(ClusterByAngles, PlaceNewcomers, FindGroups, JoinGroups, PlaceClients),
    sample_releases=_sample_releases, cohorts="labelled", compared=_compared, knowledge=_knowledge, serves_released=True,
    needs_classes=lambda settings: "has a signature for each label (algorithm.per_label)" if _compared(settings).per_label else "",
)  # fmt: skip
