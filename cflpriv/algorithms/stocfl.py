"""StoCFL: clusters merge as clients are met (`merging`), and every cluster model is drawn towards one global model.

Source: Zeng et al. 2023, Algorithm 1 (lines as numbered there), equations 2 and 3, Sections 3.1-3.3 and 4.4.

A client met for the first time sends Ψ, the normalised gradient of its loss at a public anchor model ψ (l. 5-6). A cluster's
representation is the mean of its members' Ψ (l. 8-9); the two most similar clusters merge while their cosine is at least τ (l. 11-13).
Sampled clients then take local steps with the global model ω and with their cluster's model θ, which λ draws towards ω (l. 20-22); ω is
averaged over all sampled clients (l. 17), each θ over its cluster's (l. 18-19).

Deviations, each for a reason:
- Merges need cosine ≥ τ (the paper: > τ), so that τ = −1 is total; at τ = 1 nothing merges, which the paper says. All clusters with a
  member met so far are compared (l. 9-13); the text of Sec. 3.2 compares those sampled in the round. After every merge the
  representation is recomputed and the best pair taken anew, so that the result does not depend on the order of clients.
- Merged models are averaged by the numbers of clients that have trained them (the paper: "merge"); two that nobody has trained stay as the
  first is. Clients not met yet use ω, where Algorithm 1 has a cluster of one, at θ⁰, for each.
- Clients that came after the start follow Sec. 4.4 also while training goes on: if nobody is like them, they open a cluster with the
  nearest cluster's model, not with θ⁰. Those that leave stay in their cluster and in its representation.
- Models of many parameters give sketches of Ψ: a public count sketch keeps cosines to about 1 / sqrt(sketch_dim).
- Updates travel, not models; averages may be by sample counts. A cluster below the minimum cohort size keeps its model. A client whose
  training diverges while Ψ is computed (and is skipped) is not met this time.
- One sum a client and round: each cluster's sum has both movements, and ω's mean (l. 17) is made of the clusters' means. Two sums, over all
  and over a cluster, would show by their difference the clients outside of it. Clients of clusters below the minimum cohort size are summed
  together for ω alone.
- A sampled client is sent ω twice in a round, as the model to train and (λ > 0) as what draws θ, and with the authors' variant ψ each time
  that it computes Ψ. It could do with one copy, or keep ψ: of the models counted down a third (authors: two fifths) are such copies.

`variant="authors"` follows the authors' code: Ψ is the movement of local training from ψ, not normalised; a cluster's representation is
the mean over this round's clients only, which send Ψ again whenever they are sampled; one pass over the pairs of the initial similarity
matrix, best first, merges whatever is ≥ τ; the larger cluster's model is kept; new clusters start from ω; ω is trained by one sampled
client after the other, and the mean of that chain is the next ω.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np

from ..contract.handles import GroupMean, Held, Own, Shared
from ..contract.operations import Federation, Then
from ..contract.transcript import RoundRecord
from ..engine import Device, Result, TaskInput
from ..errors import InputError
from ..privacy.private_signatures import NoisyGradient
from ..privacy.settings import Noise, Releases
from ..randomness import stream
from ..tasks.evaluation import Evaluate
from ..tasks.joining import Join
from ..tasks.training import Gradient, Train
from ..types import Array, Clustering, Parts
from .attempts import mean_with_overall, try_compute
from .fedavg import Weights
from .interface import Algorithm, AlgorithmSpec, Served
from .merging import Known, MergeClusters, MergePresent, PlaceNewcomers

__all__ = ["ChainLink", "OrElse", "Represent", "State", "count_sketch", "stocfl"]

SKETCH_ABOVE = 8192
"""Representations of larger models are sketched unless `sketch_dim` says otherwise."""
SKETCH_DIM = 4096


# --- what clients compute -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Represent:
    """Ψ(D), a client's representation at the given "model" ψ (Sec. 3.1). Part: "representation" (d,), or (sketch,) if above 0, float64.

    `task` is `Gradient`, for ∂ℓ(ψ; D)/∂ψ, or `Train`, for the movement ψ − ψ' of local training (authors). `normalise` to norm 1; a zero
    vector stays zero. The sketch's hashes come from the public `seed`. With `remember` the client keeps Ψ and computes it only once.

    Reveals: whoever sees Ψ sees a gradient of the client's data, from which labels, and for small data sets samples, can be computed.
    """

    task: Gradient | Train
    normalise: bool = True
    sketch: int = 0
    seed: int = 0
    remember: bool = False

    def private(self, noise: Noise) -> NoisyGradient:
        """This representation under sample-level differential privacy, in `noise.sketch_dim` dimensions."""
        if isinstance(self.task, Train):
            raise InputError("algorithm.variant: a representation by local training (authors) has no private form; use 'paper'")
        return NoisyGradient(
            self.task.model, "representation", self.normalise, noise.sketch_dim, noise.clip_norm, noise.signature, noise.relation,
            noise.seed,
        )  # fmt: skip

    parts: ClassVar[Parts] = {"representation": "compared"}

    @property
    def keeps(self) -> tuple[str, ...]:
        return ("representation",) if self.remember else ()

    @property
    def reads(self) -> tuple[str, ...]:
        return self.keeps

    def run(self, given: TaskInput) -> Result:
        if "representation" in given.memory:
            return {"representation": given.memory["representation"]}
        return self._result(self.task.run(given))

    def cost(self, given: TaskInput) -> int:
        return self.task.cost(given)

    def chunk_size(self, given: TaskInput, device: Device) -> int:
        return self.task.chunk_size(given, device)

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        fresh = [given for given in inputs if "representation" not in given.memory]
        results, path = self.task.run_many(fresh, device) if fresh else ([], "remembered")
        made = {given.data.id: self._result(result) for given, result in zip(fresh, results, strict=True)}
        return [made[given.data.id] if given.data.id in made else self.run(given) for given in inputs], path

    def _result(self, result: Result) -> Result:
        if not result:  # training diverged: the client sits this out
            return {}
        vector = -np.asarray(result["update"], np.float64) if isinstance(self.task, Train) else np.asarray(result["gradient"], np.float64)
        norm = float(np.linalg.norm(vector))
        if self.normalise and norm > 0:
            vector = vector / norm
        return {"representation": count_sketch(vector, self.sketch, self.seed) if self.sketch else vector}


def count_sketch(vector: Array, size: int, seed: int) -> Array:
    """A linear map (d,) -> (size,) that keeps inner products up to ‖x‖‖y‖ / sqrt(size): each coordinate goes to one bucket with a sign.

    Source: Charikar, Chen & Farach-Colton 2002.
    """
    buckets, signs = _hashes(len(vector), size, seed)
    return np.bincount(buckets, weights=signs * vector, minlength=size)


@lru_cache(maxsize=2)
def _hashes(dimension: int, size: int, seed: int) -> tuple[Array, Array]:
    draws = stream(seed, f"stocfl sketch {dimension} {size}")
    return draws.integers(size, size=dimension), draws.choice(np.array([-1.0, 1.0]), size=dimension)


@dataclass(frozen=True)
class ChainLink:
    """One link of the authors' chain: local training from the given "model" plus what the client "before" sent. Part: "movement" (d,)."""

    beyond: ClassVar[str] = "what the clients before it in the chain moved"

    train: Train

    parts: ClassVar[Parts] = {"movement": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, given: TaskInput) -> Result:
        start = given.array("model")
        sent = given.params.get("before")
        before = next(iter(sent.values())) if isinstance(sent, dict) else np.zeros_like(start)
        trained = self.train.run(replace(given, params={"model": start + before}))
        return {} if not trained else {"movement": np.asarray(trained["update"]) + before}


# --- the algorithm ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OrElse:
    """Labels of some clients, and `otherwise` for all others."""

    labels: Mapping[int, int]
    otherwise: int

    def __getitem__(self, client: int, /) -> int:
        return self.labels.get(client, self.otherwise)


@dataclass(frozen=True, eq=False)
class State:
    """Clusters of the clients met so far with their models, who has trained each, the global model, and who was there at the start.

    `representations` are what clients of the clustering epoch hold.
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


def stocfl(
    train: Train,
    *,
    tau: float = 0.5,
    lam: float = 0.05,
    variant: Literal["paper", "authors"] = "paper",
    representation: Literal["gradient", "movement"] | None = None,
    movement_epochs: int = 20,
    anchor_seed: int | None = None,
    sketch_dim: int | None = None,
    weights: Weights = "examples",
    seed: int = 0,
) -> Algorithm:
    """StoCFL. `tau` is the least cosine of clusters that merge, `lam` (λ of eq. 3) draws cluster models towards the global one.

    `representation` defaults to the anchor's gradient ("movement", of `movement_epochs` local epochs, for the authors' variant). The anchor
    ψ is the initial model, or that of `anchor_seed`. `sketch_dim`: 0 for none; by default 4096 for models above 8192 parameters.

    τ goes with the number of samples: with few, the cosines of like clients fall towards 0 (see `similarity_histogram` in the notes).
    Raises `InputError` for parameters that cannot be.
    """
    if not -1 <= tau <= 1:
        raise InputError(f"algorithm.tau: {tau} is outside [-1, 1], where cosines are")
    if not (lam >= 0 and np.isfinite(lam)):
        raise InputError(f"algorithm.lam: {lam} is not a finite number of 0 or more")
    if variant not in ("paper", "authors"):
        raise InputError(f"algorithm.variant: {variant!r} is not known; known are paper, authors")
    if representation not in (None, "gradient", "movement"):
        raise InputError(f"algorithm.representation: {representation!r} is not known; known are gradient, movement")
    if movement_epochs < 1:
        raise InputError(f"algorithm.movement_epochs: {movement_epochs} is below 1")
    if sketch_dim is not None and sketch_dim < 0:
        raise InputError(f"algorithm.sketch_dim: {sketch_dim} is negative")
    authors = variant == "authors"
    moving = representation == "movement" or (representation is None and authors)
    by = replace(train, epochs=movement_epochs, lr_decay=1.0) if moving else Gradient(train.model, train.on_divergence)
    sketch = sketch_dim if sketch_dim is not None else SKETCH_DIM if train.model.dimension > SKETCH_ABOVE else 0
    represent = Represent(by, not authors, sketch, seed, remember=authors)
    anchor = {"model": train.model.init(seed if anchor_seed is None else anchor_seed)}
    initial = Shared(train.model.init(seed))

    def init(federation: Federation) -> State:
        if authors and federation.merge_below > 1:
            raise InputError("protection.small_clusters: 'merge' goes with algorithm.variant = 'paper' of stocfl; use 'wait' or 'local'")
        return State(Clustering((), (), 0), (), (), initial, federation.clients)  # ω⁰ = θ⁰ for all

    def round(federation: Federation, state: State) -> tuple[State, RoundRecord]:
        cohort = federation.cohort(state.labels)
        state, notes = (merge_present if authors else merge_met)(federation, state, cohort)
        task = train.at(federation.round)
        placed = [client for client in cohort if client in state.labels.labels]  # all but those whose Ψ diverged
        waiting: list[int] = []

        # l. 22 and 17: ω^i ← ω − η ∇f_i(ω), averaged over all sampled. First, because a client remembers what it trained last.
        moved: Held | None
        mean: GroupMean | None
        means: tuple[GroupMean | None, ...]
        if authors:
            moved = _chain(federation, task, state.global_model, cohort)
        else:
            moved = federation.compute(task, {"model": state.global_model}, on=cohort)["update"]
        # l. 21: θ_k^i ← θ_k − η (∇f_i(θ_k) + λ (θ_k − ω)), towards the ω that was sent
        params: dict[str, Any] = {"model": list(state.models)} | ({"anchor": state.global_model} if lam else {})
        held = try_compute(federation, train.on_divergence, replace(task, prox=lam), params, which=state.clustering, on=placed)
        # l. 17-19: means over all sampled, and over the cluster's sampled
        joined = None
        if moved is not None and held is not None:
            both = [client for client in held.clients if client in moved.clients]
            joined = try_compute(
                federation, train.on_divergence, Join(("global", "update")), {"global": moved, "update": held["update"]}, on=both
            )
        mean, means = None, (None,) * state.clustering.k
        if moved is not None:
            means, mean = mean_with_overall(federation, joined, moved, weights, state.clustering, state.clustering.k, names=("global",))
        global_model = state.global_model
        if mean is not None:
            global_model = federation.fold(global_model + next(iter(mean.parts.values())), on=cohort[0])
        models, trained = list(state.models), list(state.trained)
        for label, of_cluster in enumerate(means):
            if of_cluster is None or joined is None:
                waiting.append(label)
                continue
            members = [client for client in joined.clients if state.clustering[client] == label]
            models[label] = federation.fold(models[label] + of_cluster.parts["update"], on=members[0])
            trained[label] = tuple(sorted({*trained[label], *members}))
        notes = notes | {
            "clusters": state.clustering.k, "clients_met": len(state.clustering.clients), "unchanged_clusters": waiting,
            "global_unchanged": mean is None, "clipped_clients": 0 if mean is None else mean.clipped,
        }  # fmt: skip
        labels = tuple(state.clustering[client] for client in placed)
        state = replace(state, models=tuple(models), trained=tuple(trained), global_model=global_model)
        return state, RoundRecord(federation.round, tuple(placed), labels, notes)

    def merge_met(federation: Federation, state: State, cohort: Sequence[int]) -> tuple[State, dict[str, Any]]:
        """Lines 5-13: the newly met send Ψ; clusters merge."""
        met = set(state.clustering.clients)
        fresh = tuple(client for client in cohort if client not in met)
        if not fresh:
            return state, {"newly_met": 0, "merges": 0} | _noted(state.evidence)
        state, fresh, result = extend(federation, state, fresh, MergeClusters(tau, federation.merge_below))
        if not fresh:
            return state, {"newly_met": 0, "merges": 0} | _noted(state.evidence)
        clients, labels = state.clustering.clients + fresh, tuple(int(label) for label in result["labels"])
        clustering = Clustering(clients, labels, max(labels) + 1)
        came = [client for client in fresh if client not in state.founders]
        merged = merge_models(federation, state, clustering, result["nearest"], came, cohort[0])
        merges = state.clustering.k + len(fresh) - clustering.k
        return merged, {"newly_met": len(fresh), "merges": merges} | _noted(state.evidence)

    def extend(federation: Federation, state: State, fresh: Sequence[int], then: Then) -> tuple[State, tuple[int, ...], Mapping[str, Any]]:
        """Ψ of newly met clients (of those that have one) into the clustering epoch, which opens with the first of them."""
        represented = try_compute(federation, train.on_divergence, represent, anchor, on=fresh)
        if represented is None:
            return state, (), {}
        held = represented["representation"]
        against = state.representations[0] if state.representations else None
        released = federation.gram(held, then=then, against=against)
        state = replace(state, representations=(*state.representations, held), evidence=released.evidence)
        return state, held.clients, released.result

    def merge_models(federation: Federation, state: State, clustering: Clustering, nearest: Array, came: Sequence[int], on: int) -> State:
        """Models of the new clusters from those of the old clusters they are made of, by the numbers of clients that trained them."""
        models: list[Shared] = []
        trained: list[tuple[int, ...]] = []
        old = dict(zip(state.clustering.clients, state.clustering.labels, strict=True))
        for label in range(clustering.k):
            members = clustering.members(label)
            parts = sorted({old[client] for client in members if client in old})
            counts = {part: len(state.trained[part]) for part in parts if state.trained[part]}
            trained.append(tuple(sorted(client for part in parts for client in state.trained[part])))
            if len(counts) > 1:
                addends = [state.models[part] * (count / sum(counts.values())) for part, count in counts.items()]
                total = addends[0]
                for addend in addends[1:]:
                    total = total + addend
                models.append(federation.fold(total, on=on))
            elif parts:
                models.append(state.models[next(iter(counts), parts[0])])
            else:
                models.append(initial)  # θ⁰
        for label in range(clustering.k):
            if nearest[label] >= 0 and set(clustering.members(label)) <= set(came):
                models[label] = models[int(nearest[label])]  # Sec. 4.4: a newcomer like nobody starts from the nearest
        return replace(state, clustering=clustering, models=tuple(models), trained=tuple(trained))

    def merge_present(federation: Federation, state: State, cohort: Sequence[int]) -> tuple[State, dict[str, Any]]:
        """The authors' clustering of a round: a Gram of the sampled clients alone."""
        represented = try_compute(federation, train.on_divergence, represent, anchor, on=cohort)
        if represented is None:
            return state, {"newly_met": 0, "merges": 0} | _noted(state.evidence)
        held, before = represented["representation"], state.clustering
        met = set(before.clients)
        fresh = [client for client in held.clients if client not in met]
        grown = before.extended(fresh, range(before.k, before.k + len(fresh))) if fresh else before
        sizes = np.bincount(grown.labels, minlength=grown.k)
        models = (*state.models, *(state.global_model,) * len(fresh))
        trained = (*state.trained, *((),) * len(fresh))
        released = federation.gram(held, then=MergePresent(tau, tuple(grown[client] for client in held.clients)))
        federation.close(held)
        present = sorted({grown[client] for client in held.clients})
        into = {label: label for label in range(grown.k)} | dict(
            zip(present, [present[int(place)] for place in released.result["into"]], strict=True)
        )
        kept = sorted(set(into.values()))
        keep: dict[int, int] = {}
        for label in kept:  # the larger cluster's model; the first of equals
            parts = [part for part, target in into.items() if target == label]
            keep[label] = max(parts, key=lambda part: (int(sizes[part]), -part))
        clustering = Clustering(grown.clients, tuple(kept.index(into[label]) for label in grown.labels), len(kept))
        state = replace(
            state, clustering=clustering, models=tuple(models[keep[label]] for label in kept),
            trained=tuple(trained[keep[label]] for label in kept), evidence=released.evidence,
        )  # fmt: skip
        return state, {"newly_met": len(fresh), "merges": grown.k - len(kept)} | _noted(released.evidence)

    def admit(federation: Federation, state: State, newcomers: Sequence[int]) -> tuple[State, Mapping[str, Any]]:
        met = set(state.clustering.clients)
        fresh = tuple(sorted(client for client in set(newcomers) if client not in met))
        if not fresh:
            return state, {"opened_clusters": 0}
        k = state.clustering.k
        present = list(range(k))  # the epoch's labels are places in this list: the authors' variant has one of those present only
        if authors:
            state, present = reopened(federation, state)
        state, fresh, result = extend(federation, state, fresh, PlaceNewcomers(tau, len(present), federation.merge_below))
        models = list(state.models)
        for source in result.get("nearest", ()):  # θ_new = θ of the nearest
            models.append(models[(present + list(range(k, len(models))))[int(source)]] if source >= 0 else initial)
        opened = len(models) - k
        labels = [(present + list(range(k, k + opened)))[int(label)] for label in result.get("labels", ())]
        clustering = replace(state.clustering.extended(fresh, labels), k=k + opened) if fresh else state.clustering
        if authors and state.representations:
            federation.close(state.representations[0])
            state = replace(state, representations=())
        trained = (*state.trained, *((),) * opened)
        return replace(state, clustering=clustering, models=tuple(models), trained=trained), {"opened_clusters": opened}

    def reopened(federation: Federation, state: State) -> tuple[State, list[int]]:
        """A clustering epoch of the clients met that are present, and their clusters, for the authors' variant, which keeps none."""
        here = set(federation.clients)
        old = [client for client in state.clustering.clients if client in here]
        if not old:
            return state, []
        held = federation.compute(represent, anchor, on=old)["representation"]
        present = sorted({state.clustering[client] for client in held.clients})
        federation.gram(held, then=Known(tuple(present.index(state.clustering[client]) for client in held.clients)))
        return replace(state, representations=(held,)), present

    def serve(state: State) -> Served:
        return Served(Evaluate(train.model), {"model": [*state.models, state.global_model]}, state.labels)

    def describe(state: State) -> Mapping[str, Any]:
        clustering = state.clustering if state.clustering.clients else None
        return {"clustering": clustering, "evidence": state.evidence, "rule": f"cosine ≥ {tau:g}"}

    return Algorithm(
        "stocfl", ("gram", "relay", "mean") if authors else ("gram", "mean"), init, round, serve, admit, describe, public_groups=True
    )


def _noted(evidence: Mapping[str, Any] | None) -> dict[str, Any]:
    """What of the evidence goes into the notes of a round."""
    names = ("similarity_histogram", "merge_cosines", "largest_cosine_left")
    return {} if evidence is None else {name: evidence[name] for name in names if name in evidence}


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


def _sample_releases(rounds: int, given: Mapping[str, Any]) -> Releases:
    """One representation, and each round a training for the global model and one for the cluster's."""
    for key, value in (("variant", "authors"), ("representation", "movement")):
        if given.get(key) == value:
            raise InputError(
                f"algorithm.{key} = {value!r} under privacy.unit = 'sample': a representation by local training has no private form"
            )
    return Releases(signatures=1, trainings=2 * rounds, mechanism="total")


STOCFL = AlgorithmSpec(
    "stocfl", stocfl, "clients met merge by the cosine of anchor gradients, bi-level training (Zeng et al. 2023)",
    states=(State,), tasks=(ChainLink, Represent), functions=(Known, MergeClusters, MergePresent, PlaceNewcomers),
    sample_releases=_sample_releases, renumbers=True,
)  # fmt: skip
