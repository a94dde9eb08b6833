"""pFedLIA, where the data are: training on a part, scoring others' models on what was held back; and clustering of scores.

Source: Rokvic, Danassis & Faltings 2025, Sections III-B to III-F, equation 1; deviations are listed in `pfedlia`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from ...engine import Device, Result, TaskInput
from ...engine.device import in_use, tensor
from ...engine.models import Model
from ...errors import InputError
from ...privacy.private_signatures import noisy_sum, sum_event
from ...privacy.settings import Noise
from ...randomness import stream
from ...tasks.evaluation import sample_losses
from ...types import Array, ClientData, Parts
from ..shared.around import AroundTraining

__all__ = [
    "HasValidation",
    "Influence",
    "Neighbours",
    "OnPart",
    "Scores",
    "better_group",
    "cluster_scores",
    "helps_most",
    "score_notes",
    "scored",
    "split_validation",
    "stable_scores",
]

Scores = Literal["value", "sign"]


# --- what clients compute -----------------------------------------------------------------------------------------------------------


def split_validation(data: ClientData, share: float, seed: int) -> tuple[Array, Array]:
    """A client's training samples as (training, validation) indices, the same in every round. `InputError` if either would be empty."""
    count = len(data.y_train)
    held_back = round(share * count) or 1
    if count - held_back < 1:
        raise InputError(
            f"client {data.id}: of {count} training sample(s) none can be held back, and validation data are needed (algorithm.validation)"
        )
    order = stream(seed, "pfedlia validation", client=data.id).permutation(count)
    return np.sort(order[held_back:]), np.sort(order[:held_back])


@dataclass(frozen=True)
class OnPart(AroundTraining):
    """`train` on the training part of a client's data, or on the first `samples` of it (0: all). `validation` is the share held back, which
    the public `seed` chooses.

    Parts: "update" (d,), local minus given; "movement" (d,), local minus the given "origin" (else the given model). Kept, with `remember`:
    "trained" (d,).
    """

    gives: ClassVar[Parts] = {"update": "summed", "movement": "summed"}
    beyond = ""

    validation: float
    samples: int = 0
    remember: bool = True
    seed: int = 0

    @property
    def keeps(self) -> tuple[str, ...]:
        return ("trained",) if self.remember else ()

    def private(self, noise: Noise) -> "OnPart":
        """The same with private training. Which samples are held back follows from their number, public under "replace_one" only."""
        if noise.relation != "replace_one":
            raise InputError("algorithm 'pfedlia' under privacy.unit = 'sample': needs privacy.relation = 'replace_one'")
        return replace(self, train=self.train.private(noise))

    @property
    def events(self) -> dict[str, Any]:
        return self.train.events

    @property
    def covers(self) -> dict[str, tuple[str, ...]]:
        steps = self.train.covers
        return dict.fromkeys((*self.parts, *self.keeps), steps["update"]) if steps else {}

    def at(self, round: int) -> "OnPart":
        """This task with the learning rate of `round`."""
        return replace(self, train=self.train.at(round))

    def before(self, task_input: TaskInput) -> TaskInput:
        data = task_input.data
        kept = split_validation(data, self.validation, self.seed)[0]
        kept = kept[: self.samples] if self.samples else kept
        return replace(task_input, data=ClientData(data.id, data.x_train[kept], data.y_train[kept], data.x_test[:0], data.y_test[:0]))

    def after(self, task_input: TaskInput, inner: TaskInput, result: Result) -> Result:
        start = task_input.array("model")
        update = np.asarray(result["update"])  # made at once: what is made on demand would be made from all of the client's data
        origin = task_input.array("origin") if "origin" in task_input.params else start
        return {"update": update, "movement": (start - origin) + update, "trained": start + update}


@dataclass(frozen=True)
class Influence:
    """Eq. 1: what a client's validation loss, summed over samples, loses when it uses the models of others. Part: "scores" (n,) float64.

    Score j is Σ_z L(z, before_j) − L(z, after_j). Lazy: before is the given "model" θ₀, after is θ₀ plus client j's update, from the given
    "updates" by sender, and the given "own" for the client's own. Exact: "model" is θ*, and the given list "without" has θ*_{−j}; then
    before is θ*_{−j} and after θ*. `clients` are those scored, ascending; `validation` and `seed` are those of the split. Losses are
    computed in the model's dtype, sums in float64. All scores are finite; a client on whose data "model" has no finite loss scores
    everybody 0.
    """

    model: Model
    validation: float
    clients: tuple[int, ...]
    noise_multiplier: float = 0.0
    cap: float = 0.0
    seed: int = 0

    def private(self, noise: Noise) -> "Influence":
        """Scores under sample-level differential privacy: each validation sample's row of differences, computed without the others, is
        clipped to `cap`, then noise.

        Guarantee: that of one `GaussianEvent`, sensitivity 2·cap, under "replace_one". Under "add_remove" there is none: one sample more or
        less moves the split of all others.
        """
        if noise.relation != "replace_one":
            raise InputError("algorithm 'pfedlia' under privacy.unit = 'sample': needs privacy.relation = 'replace_one'")
        return replace(self, noise_multiplier=noise.signature, cap=noise.loss_cap)

    @property
    def events(self) -> dict[str, Any]:
        return {"scores": sum_event(self.noise_multiplier, self.cap, "replace_one")} if self.noise_multiplier else {}

    @property
    def covers(self) -> dict[str, tuple[str, ...]]:
        return {"scores": ("scores",)} if self.noise_multiplier else {}

    parts: ClassVar[Parts] = {"scores": "score"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, task_input: TaskInput) -> Result:
        return self.run_many([task_input], in_use())[0][0]

    def cost(self, task_input: TaskInput) -> int:
        return len(task_input.data.y_train)

    def chunk_size(self, task_input: TaskInput, device: Device) -> int:
        return max(1, 65536 // len(task_input.data.y_train))

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        """Each model is loaded once for all clients of the chunk that were given the same."""
        if self.noise_multiplier:
            return [{"scores": self._noisy(task_input)} for task_input in inputs], "sequential"
        data = [self._validation(task_input) for task_input in inputs]
        base = self._losses(inputs[0].array("model"), data)
        if any(task_input.array("model") is not inputs[0].array("model") for task_input in inputs):
            base = np.concatenate(
                [self._losses(task_input.array("model"), [data_set]) for task_input, data_set in zip(inputs, data, strict=True)]
            )
        scores = np.empty((len(inputs), len(self.clients)))
        for place, client in enumerate(self.clients):
            groups: dict[int, tuple[Array, bool, list[int]]] = {}
            for i, task_input in enumerate(inputs):
                vector, whole = self._other(task_input, place, client)
                groups.setdefault(id(vector), (vector, whole, []))[2].append(i)
            for vector, whole, members in groups.values():
                start = inputs[members[0]].array("model")
                losses = self._losses(vector if whole else start + vector, [data[i] for i in members])
                scores[members, place] = (losses - base[members]) * (1 if whole else -1)
        return [{"scores": _finite(row, float(loss))} for row, loss in zip(scores, base, strict=True)], "shared"

    def _noisy(self, task_input: TaskInput) -> Array:
        """One client's scores with noise."""
        x, y = self._validation(task_input)
        start = task_input.array("model")
        others = [self._other(task_input, place, client) for place, client in enumerate(self.clients)]
        base, *after = self._alone([start, *(vector if whole else start + vector for vector, whole in others)], x, y)
        signs = np.array([1.0 if whole else -1.0 for _, whole in others])
        rows = (np.reshape(after, (len(others), len(y))) - base).T * signs
        rows = np.nan_to_num(rows, nan=0.0, posinf=self.cap, neginf=-self.cap)
        return noisy_sum(rows, self.cap, self.noise_multiplier, "replace_one", task_input, "scores")

    def _alone(self, vectors: Sequence[Array], x: torch.Tensor, y: torch.Tensor) -> Array:
        """Each sample's loss under each model, (n, samples) float64; no sample has a part in another's."""
        losses = torch.cat([sample_losses(self.model, np.asarray(vector), x, y, alone=True) for vector in vectors])
        return np.asarray(losses.double().cpu().numpy().reshape(len(vectors), -1))

    def _other(self, task_input: TaskInput, place: int, client: int) -> tuple[Array, bool]:
        """What client `client` brings: a whole model θ*_{−j} (True), or an update of the given model; not a number where none came."""
        if "without" in task_input.params:
            return np.asarray(task_input.params["without"][place]), True
        if client == task_input.data.id:
            return task_input.array("own"), False
        updates = task_input.params["updates"]
        return updates[client] if client in updates else np.full_like(task_input.array("model"), np.nan), False

    def _validation(self, task_input: TaskInput) -> tuple[torch.Tensor, torch.Tensor]:
        kept = split_validation(task_input.data, self.validation, self.seed)[1]
        return self.model.inputs(task_input.data.x_train[kept]), tensor(task_input.data.y_train[kept])

    def _losses(self, vector: Array, data: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Array:
        """Each client's validation loss, summed."""
        each = sample_losses(self.model, vector, torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))
        return np.array([float(part.double().sum()) for part in torch.split(each.cpu(), [len(y) for _, y in data])])


def _finite(row: Array, base: float) -> Array:
    """Where a model has no finite loss, the worst score of the row, or that of twice the loss `base`, if that is lower."""
    known = np.isfinite(row)
    return np.where(known, row, min([-abs(base), *row[known]])) if np.isfinite(base) else np.zeros_like(row)


@dataclass(frozen=True)
class Neighbours:
    """Sec. III-F, peer to peer: a client divides its row of "scores" in two. Part: "neighbours" (n,) int64, 1 for those it takes."""

    clients: tuple[int, ...]
    scores: Scores

    uses_data: ClassVar[bool] = False

    parts: ClassVar[Parts] = {"neighbours": "choice"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, task_input: TaskInput) -> Result:
        row = task_input.array("scores")
        others = np.array([client != task_input.data.id for client in self.clients])
        chosen = np.ones(len(row), dtype=np.int64)  # itself included
        chosen[others] = better_group(scored(row[others], self.scores))
        return {"neighbours": chosen}


@dataclass(frozen=True)
class HasValidation:
    """Refuses clients whose data cannot be split, which is a question of their number. Part: "ready" ()."""

    validation: float

    uses_number_only: ClassVar[bool] = True

    parts: ClassVar[Parts] = {"ready": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, task_input: TaskInput) -> Result:
        split_validation(task_input.data, self.validation, 0)
        return {"ready": np.array(1.0)}


# --- clustering scores --------------------------------------------------------------------------------------------------------------


def scored(values: Array, scores: Scores) -> Array:
    return np.sign(values) if scores == "sign" else values


def better_group(row: Array) -> Array:
    """Which of the values (n,) belong to the better of two groups, by exact 2-means: the cut of the sorted values of least squared error.

    Equal values stay together. Without two different values all are in the better group if they are not negative, else none is.
    """
    row = np.asarray(row, dtype=np.float64)
    values = np.unique(row)
    if len(values) < 2:
        return row >= 0
    best, threshold = np.inf, values[1]
    for value in values[1:]:
        low, high = row[row < value], row[row >= value]
        error = float(((low - low.mean()) ** 2).sum() + ((high - high.mean()) ** 2).sum())
        if error < best:
            best, threshold = error, value
    return np.asarray(row >= threshold)


def helps_most(row: Array, labels: Array, groups: Sequence[int]) -> int:
    """The one of `groups` (of `labels` (n,)) that a row of scores (n,) is best for on average; −1 where none is above 0."""
    means = [float(row[labels == group].mean()) if (labels == group).any() else -np.inf for group in groups]
    return int(groups[int(np.argmax(means))]) if max(means, default=0.0) > 0 else -1


def cluster_scores(matrix: Array, min_samples: int, scores: Scores = "value") -> tuple[Array, Array]:
    """OPTICS on the rows of the N × N scores, then its noise points placed by score. Labels (n,) by first client, and which were noise.

    A noise point joins the cluster that it scores best on average, if above 0, else stands alone. Placing looks at OPTICS' clusters only.
    """
    from sklearn.cluster import OPTICS  # slow to import

    rows = scored(np.asarray(matrix, dtype=np.float64), scores)
    with np.errstate(divide="ignore", invalid="ignore"):  # equal rows have reachability 0, which OPTICS divides by
        assigned = np.asarray(OPTICS(min_samples=min_samples).fit(rows).labels_)
    noise = assigned < 0
    labels = assigned.copy()
    clusters = [label for label in np.unique(assigned) if label >= 0]
    for i in np.flatnonzero(noise):
        best = helps_most(matrix[i], assigned, clusters)
        labels[i] = best if best >= 0 else labels.max() + 1 + len(matrix)
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse], noise


MOST_TRIED = 26


def stable_scores(matrix: Array, scores: Scores = "value") -> tuple[Array, Array]:
    """`cluster_scores` with the first `min_samples` whose clustering is that of the value before, too.

    Tried are the values from 2 to half of the clients, and not above `MOST_TRIED`. A value below the right ones cuts groups at random,
    differently each time; one above the size of a group joins it to another. If no two agree it is a tenth of the clients.
    """
    n, before = len(matrix), np.zeros(0)
    for least in range(2, min(n // 2, MOST_TRIED) + 1):
        labels, noise = cluster_scores(matrix, least, scores)
        if np.array_equal(labels, before):
            return labels, noise
        before = labels
    return cluster_scores(matrix, max(2, n // 10), scores)


def score_notes(matrix: Array | None) -> dict[str, Any]:
    """What the gathered scores look like."""
    if matrix is None:
        return {}
    others = matrix[~np.eye(len(matrix), dtype=bool)]
    quantiles = np.quantile(others, (0, 0.25, 0.5, 0.75, 1))
    return {"scores_above_zero": float((others > 0).mean()), "score_quantiles": [float(q) for q in quantiles]}
