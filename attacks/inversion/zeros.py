"""Exact zeros of sums: which words, or inputs of a first layer, no member of a cohort has, and whose the others are.

The gradient of an embedding is zero in the row of each word that no sample has. The gradient of a first linear layer is zero in the column
of each input that is zero in every sample. A sum over a cohort keeps these zeros, whatever the number of samples, batches and steps, and a
secure sum keeps them too: it encodes zero as zero. So each sum is the answer to a pooled test of its members, one test for each feature:

excluded    a client in a sum without the feature does not have it.
certain     where a sum has the feature, and all of its members but one are excluded, the remaining member has it.
likely      a feature that exactly the sums with one client have is that client's, unless clients who were only in such sums have it
            together. Its probability is that of clients that have the feature independently, all at one rate, of which every value is as
            probable beforehand. The most probable ones are taken, as long as at most `MOST_FALSE` of all attributed features are expected
            to be false.

Source: rows of an embedding as the words of a batch, Melis, Song, De Cristofaro & Shmatikov 2019; the two rules are the noiseless decoding
of pooled tests ("combinatorial orthogonal matching pursuit" and "definite defectives", Aldridge, Johnson & Scarlett 2019). Using the
cohorts of secure sums as pools is ours.

Where inputs are standardised, and under weight decay, zeros follow from combinations of parameters (`features_of`, `present_in`) and are
those of rounded numbers. Adam divides each gradient by its size, so that no combination is zero. But parameters that have the same
gradients move alike: so do all inputs of a channel that are zero in every sample (`present_by_adam`). A row that weight decay alone moves
is trained again without samples (`decayed`). A single step of Adam shows signs alone, and is not read.

Controls (SCAFFOLD) and pulls to an anchor (StoCFL) move what any samples have moved before. So there a zero still excludes, but a movement
proves a feature only before any model that clients were sent has moved by it (`Pool.doubtful`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import nn

from ...algorithms.fednova import TrainNormalised
from ...engine.models import Model, build_module
from ...tasks.training import Train
from ...types import Array
from ..adversary import AdversaryView
from ..evidence.coalition import cohorts_of, deviating, weights_of
from ..evidence.local_training import LocalTraining, trainings_in
from ..evidence.sums import models_sent, sums_in
from ..evidence.trained_by import trained_by
from ..evidence.updates import ADDED, mean_updates, single_steps, step_of, steps_in
from ..figures.leakage import Case
from .closed_form import first_linear, gradients_of

__all__ = [
    "WEIGHTS_ALONE", "Feature", "Owners", "Pool", "decayed", "embedding_of", "features_of", "owners_of", "pools_in", "present_by_adam",
    "present_in",
]  # fmt: skip

WEIGHTS_ALONE = (TrainNormalised.beyond,)
"""What is between training and means and only weighs updates: what nobody's samples move stays so."""
ROUNDINGS, DEVIATIONS = 2.0, 6.0
"""Where zeros are not exact, a movement up to so many roundings and so many deviations of the sum counts as zero.

Rounding errors of several steps add up: a row's number of roundings is this one times 1 + √steps, half of what is allowed. After 1 to 25
steps absent inputs of MNIST and Fashion-MNIST were at .2 to 3.8 roundings, present ones at 170 or more.
"""
ADAM_ROUNDING = 1e-5
"""The same in units of Adam's rate. Rows that nobody's samples move were at 1e-7 to 4e-6 after 2 to 50 steps; of rows that somebody's
samples move 19 in 20 were at 1e-3 or more, on Fashion-MNIST and in random texts."""
ALIKE = 3
"""So many inputs have to move alike before the others of their channel are read by it."""
MOST_FALSE = 0.005
"""The expected share of false ones among the features that are attributed. Features of like clients depend, so it may be twice as large."""
MOST_OTHERS = 14
"""A feature is not called a client's where so many others were only in sums with the client: all their sets would have to be tried."""


@dataclass(frozen=True, eq=False)
class Feature:
    """What a sample may have: `count` words or inputs (`name`), whose movements are the rows (count, size) that `rows` cuts out of (d,).

    `sizes` gives the magnitudes (count, size) that are rounded in them. `is_exact`: rows of absent features are zero, else zero up to
    rounding. `of` says of samples (n, *shape) which features any of them has, (count,) bool. `like` gives about what Adam moves the
    parameters (count, size) of absent features by, `columns` what they moved by, and `channels` (count,) which of them move alike; None
    where rows of absent features are zero anyway.
    """

    name: str
    count: int
    rows: Callable[[Array], Array]
    sizes: Callable[[Array], Array]
    is_exact: bool
    of: Callable[[Array], Array]
    like: Callable[[Array], Array] | None = None
    columns: Callable[[Array], Array] | None = None
    channels: Array | None = None


@dataclass(frozen=True, eq=False)
class Pool:
    """One sum: its `members`, and the features that it has, (count,) bool.

    `doubtful` (count,) are present ones that something else than members' samples may have moved; None where there are none.
    """

    members: tuple[int, ...]
    present: Array
    doubtful: Array | None = None


@dataclass(frozen=True, eq=False)
class Owners:
    """By client and feature, (n, count) bool: to whom a feature is `attributed`, certain and likely, and who certainly does not have it."""

    clients: tuple[int, ...]
    attributed: Array
    excluded: Array

    def attributed_to(self, client: int) -> Array:
        """The features (count,) bool that are attributed to a client."""
        return np.asarray(self.attributed[self.clients.index(client)])

    def excluded_of(self, client: int) -> Array:
        """The features (count,) bool that a client certainly does not have."""
        return np.asarray(self.excluded[self.clients.index(client)])


# --- the mathematics, for sums from anywhere ----------------------------------------------------------------------------------------


def present_in(rows: Array, start: Array | None = None, tolerance: Array | float = 0.0) -> Array:
    """Which rows (count, size) of a movement somebody's samples moved, (count,) bool: all that are not zero up to the `tolerance`.

    With weight decay `start` (count, size) are the parameters before the movement: a movement along the row itself counts as zero.
    """
    ratio = 0.0 if start is None else (rows * start).sum(axis=1, keepdims=True) / np.maximum((start**2).sum(axis=1, keepdims=True), 1e-300)
    left = rows if start is None else rows - ratio * start
    return np.asarray((np.abs(left) > tolerance).any(axis=1))


def present_by_adam(moved: Array, like: Array, channels: Array, tolerance: Array) -> Array:
    """Which rows of `moved` (count, size) somebody's samples moved, (count,) bool, where all other rows of a channel moved alike.

    Of each of the `channels` (count,) the row nearest to `like` (count, size) is taken for one that nobody's samples moved, if `ALIKE` rows
    are the same as it up to the `tolerance` (count, size).
    """
    present = np.ones(len(moved), bool)
    for channel in np.unique(channels):
        rows = np.flatnonzero(channels == channel)
        nearest = rows[np.median(np.abs(moved[rows] - like[rows]), axis=1).argmin()]
        same = (np.abs(moved[rows] - moved[nearest]) <= tolerance[rows]).all(axis=1)
        if same.sum() >= ALIKE:
            present[rows[same]] = False
    return present


def decayed(start: Array, train: Train, steps: int) -> Array:
    """How far so many steps of Adam with weight decay, and the pull to the start, move parameters (d,) that no sample moves, (d,)."""
    return _decayed(start.tobytes(), start.dtype.str, train.lr, train.weight_decay, train.prox, steps)


@lru_cache(maxsize=64)
def _decayed(start: bytes, dtype: str, lr: float, decay: float, prox: float, steps: int) -> Array:
    first = torch.tensor(np.frombuffer(start, dtype))
    parameters = nn.Parameter(first.clone())
    adam = torch.optim.Adam([parameters], lr, weight_decay=decay)
    for _ in range(steps):
        parameters.grad = prox * (parameters.detach() - first)
        adam.step()
    return np.asarray((parameters.detach().double() - first.double()).numpy())


def owners_of(pools: Sequence[Pool], known: Mapping[int, Array]) -> Owners:
    """Who has which features, from sums (`Pool`), in one or several rounds. Contradictions leave a feature undecided.

    `known` are the features (count,) bool of colluding members: what a colluder has says nothing of the other members of its sums.
    """
    clients = tuple(sorted({client for pool in pools for client in pool.members}))
    count = len(pools[0].present) if pools else 0
    place = {client: i for i, client in enumerate(clients)}
    member = np.zeros((len(pools), len(clients)))
    own = np.zeros((len(clients), count))
    for t, pool in enumerate(pools):
        member[t, [place[client] for client in pool.members]] = 1.0
    for client in set(known) & set(clients):
        own[place[client]] = known[client]
    present = np.array([pool.present for pool in pools], dtype=bool).reshape(len(pools), count)
    excluded = member.T @ ~present > 0
    for client in set(known) & set(clients):
        excluded[place[client]] = ~np.asarray(known[client], dtype=bool)
    left, doubtful = ~excluded, np.zeros(present.shape, bool)
    for t, pool in enumerate(pools):
        doubtful[t] = False if pool.doubtful is None else pool.doubtful
    decides = present & ~doubtful & (member @ left == 1) & (member @ own == 0)
    certain = (member.T @ decides > 0) & left
    for client in set(known) & set(clients):
        certain[place[client]] = known[client]
    broken = (present & ~doubtful & (member @ left == 0)).any(axis=0)  # a movement that was rounded to zero elsewhere
    certain[:, broken], excluded[:, broken] = False, False
    certain_only = doubtful.any(axis=0)
    return Owners(clients, certain | _likely(member > 0, present & ~certain_only, certain, own), excluded)


def _likely(member: Array, present: Array, certain: Array, own: Array) -> Array:
    """The likely owners (n, count) bool of features without a certain one, from sums of `member`s (m, n) that are `present` (m, count).

    Features that a colluder has, by `own` (n, count), are left out.
    """
    if not certain.size:
        return certain
    undecided = present.any(axis=0) & ~certain.any(axis=0) & ~(own > 0).any(axis=0)
    chances = np.zeros(certain.shape)
    for client in range(member.shape[1]):
        same = undecided & (present == member[:, client, None]).all(axis=0)
        if same.any():
            chances[client, same] = _chance_of_sole_owner(member, client)
    order = np.argsort(-chances.max(axis=0, initial=0.0), kind="stable")
    best = chances.max(axis=0, initial=0.0)[order]
    errors = np.cumsum(1.0 - best[best > 0])
    number = int((errors <= MOST_FALSE * (certain.sum() + np.arange(1, len(errors) + 1))).sum())  # the share grows along this order
    likely = np.zeros(certain.shape, dtype=bool)
    taken = order[:number]
    likely[chances[:, taken].argmax(axis=0), taken] = True
    return likely


def _chance_of_sole_owner(member: Array, client: int) -> float:
    """How probable it is that a client has a feature, if exactly the sums (m, n) that it is in have it.

    Others may have it who were only in such sums. 0 where there are too many of these to try all.
    """
    positive = member[:, client]
    taking_part = member.any(axis=0)
    others = [other for other in np.flatnonzero(~member[~positive].any(axis=0) & taking_part) if other != client]
    if len(others) >= MOST_OTHERS:
        return 0.0
    rates = (np.arange(200) + 0.5) / 200
    without = (1 - rates) ** (int(taking_part.sum()) - 1 - len(others))
    sets = (np.arange(2 ** len(others))[:, None] >> np.arange(len(others))) & 1
    covers = (sets @ member[positive][:, others].T > 0).all(axis=1)
    size = np.bincount(sets[covers].sum(axis=1), minlength=len(others) + 1)  # how many sets of so many others explain all sums
    k = np.arange(len(others) + 1)
    explained = (rates[:, None] ** k * (1 - rates[:, None]) ** (len(others) - k)) @ size
    alone, together = float((rates * without).sum()), float(((1 - rates) * without * explained).sum())
    return alone / (alone + together)


# --- features of a model ------------------------------------------------------------------------------------------------------------


def embedding_of(model: Model) -> tuple[int, tuple[int, int]] | None:
    """Where the weights of a model's embedding begin in the parameter vector, and their shape (words, units).

    None if it has none, or a frozen one.
    """
    embedding = next(((name, module) for name, module in build_module(model).named_modules() if isinstance(module, nn.Embedding)), None)
    if embedding is None:
        return None
    name = f"{embedding[0]}.weight".lstrip(".")
    offset = next((offset for own, _, offset in model.layout if own == name), None)
    return None if offset is None else (offset, (embedding[1].num_embeddings, embedding[1].embedding_dim))


def features_of(model: Model) -> Feature | None:
    """The features whose absence a model's movement shows: words of an embedding, or inputs of a first linear layer; None without either.

    An input that is zero in every sample is the constant −mean / std after standardisation. The gradient of its column is then that
    constant times the gradient of the bias, so that a combination of both is zero.
    """
    embedding = embedding_of(model)
    if embedding is not None:
        offset, shape = embedding

        def words(x: Array) -> Array:
            return np.bincount(np.asarray(x, np.int64).ravel(), minlength=shape[0]) > 0

        def rows(vector: Array) -> Array:
            return vector[offset : offset + shape[0] * shape[1]].reshape(shape)

        return Feature("word", shape[0], rows, lambda vector: np.abs(rows(vector)), True, words)
    layer = first_linear(model)
    if layer is None or not layer.is_first:
        return None
    each = layer.inputs // len(model.mean) if layer.inputs % len(model.mean) == 0 else 0
    zero = np.repeat(np.asarray(model.mean, np.float64) / np.asarray(model.std, np.float64), each or layer.inputs)[: layer.inputs]

    def columns(vector: Array) -> Array:
        weight, bias = gradients_of(layer, vector)
        return weight.T + zero[:, None] * bias

    def magnitudes(vector: Array) -> Array:
        weight, bias = gradients_of(layer, vector)
        return np.abs(weight.T) + np.abs(zero[:, None] * bias)

    def like(vector: Array) -> Array:
        return np.asarray(-np.sign(zero)[:, None] * gradients_of(layer, vector)[1])

    exact, channels = not zero.any(), np.unique(zero, return_inverse=True)[1]
    return Feature(
        "input", layer.inputs, columns, magnitudes, exact, lambda x: np.asarray((x != 0).reshape(len(x), -1).any(axis=0)),
        *((None, None, None) if exact else (like, lambda vector: gradients_of(layer, vector)[0].T, channels)),
    )  # fmt: skip


def pools_in(case: Case, view: AdversaryView, model: Model, feature: Feature) -> list[Pool]:
    """All sums in a view over members that are known, and single updates where these can be read.

    A released model is one sum over all who trained it, in all rounds. Who they are is the scorer's knowledge, not the attacker's.
    Where clients are sent something that moves their updates beside samples, a feature is doubtful once any model has moved by it.
    """
    pools = _pools_in(case, view, model, feature)
    if all(training.beyond in ("", *WEIGHTS_ALONE) for training in trainings_in(case.reference).all):
        return [pool for _, pool in pools]
    moved = _moved_before(view, model, feature)
    everything = np.ones(feature.count, bool)
    return [replace(pool, doubtful=pool.present & moved.get(number, everything)) for number, pool in pools]


def _moved_before(view: AdversaryView, model: Model, feature: Feature) -> dict[int, Array]:
    """By round the features (count,) bool whose parameters differ from the first model's in anything that clients were sent up to it.

    Nothing for a released model: it comes after all rounds.
    """
    moved, by_round = np.zeros(feature.count, bool), dict[int, Array]()
    first: Array | None = None
    for message in view.select("compute", "parameters") if view.adversary != "released" else ():
        for kind in ("model", *ADDED):
            for vector in models_sent(view, message, kind).values():
                if vector.shape == (model.dimension,):
                    first = vector if first is None else first
                    left = vector if kind == "control" else vector - first
                    moved = moved | feature.rows(left).any(axis=1)
        by_round[message.round] = moved
    return by_round


def _pools_in(case: Case, view: AdversaryView, model: Model, feature: Feature) -> list[tuple[int, Pool]]:
    """The round and the pool of each."""
    if view.adversary == "released":
        means = mean_updates(view, model.dimension)
        people = [tuple(sorted(set(clients))) for clients in trained_by(case, view, means)]
        steps = [(replace(step_of(mean), members=members), mean.sums(view)) for mean, members in zip(means, people, strict=True) if members]
        return [
            (s.round, _pool(case, feature, model, s.members, s.start, s.update, s.local, s.deviation, rounds))
            for s, rounds in steps if not s.part
        ]  # fmt: skip
    single = [step for steps in single_steps(steps_in(view, model.dimension)).values() for step in steps]
    pools = [(s.round, _pool(case, feature, model, s.members, s.start, s.update, s.local, s.deviation)) for s in single]
    for sum_ in (deviating(sum_, view, case.prior) for sum_ in sums_in(view, cohorts_of(case, view))):
        if sum_.mean is not None and sum_.mean.shape == (model.dimension,) and sum_.mean.any():
            start = np.zeros(model.dimension) if sum_.start is None else sum_.start
            pool = _pool(case, feature, model, sum_.members, start, sum_.mean, sum_.local, sum_.deviation)
            pools.append((sum_.round, pool))
    return pools


def _pool(
    case: Case, feature: Feature, model: Model, members: tuple[int, ...], start: Array, update: Array, local: LocalTraining | None,
    deviation: float, rounds: int = 1,
) -> Pool:  # fmt: skip
    """The pool of a movement of a model (d,) by its members, in so many `rounds`."""
    update, start = np.asarray(update, np.float64), np.asarray(start, np.float64)
    decays = local is not None and local.train.weight_decay > 0
    if feature.is_exact and not decays:
        return Pool(members, present_in(feature.rows(update)))
    if local is not None and local.train.optimizer == "adam" and not local.gradient:
        return Pool(members, _present_after_adam(case, feature, model, members, start, update, local, deviation, rounds))
    steps = 1 if local is None else max(local.steps(case.prior.samples_per_client[client]) for client in members)
    precision = float(np.finfo(model.dtype).eps) * ROUNDINGS * (1 + np.sqrt(steps))
    tolerance = precision * (feature.sizes(start) + feature.sizes(update)) + DEVIATIONS * deviation
    return Pool(members, present_in(feature.rows(update), feature.rows(start) if decays else None, tolerance))


def _present_after_adam(
    case: Case, feature: Feature, model: Model, members: tuple[int, ...], start: Array, update: Array, local: LocalTraining,
    deviation: float, rounds: int,
) -> Array:  # fmt: skip
    """The features (count,) bool that somebody has, all where this is not known: also after several rounds of unequal clients."""
    steps = {client: local.steps(case.prior.samples_per_client[client]) for client in members}
    if min(steps.values()) < 2:  # the size of a gradient does not matter in the first step
        return np.ones(feature.count, bool)
    rounding = float(np.finfo(model.dtype).eps) * (feature.sizes(start) + feature.sizes(update))
    tolerance = rounding + ADAM_ROUNDING * local.train.lr * (1 + np.sqrt(rounds * max(steps.values()))) + DEVIATIONS * deviation
    if feature.is_exact:
        if rounds > 1 and len(set(steps.values())) > 1:  # who took part in which round is not known
            return np.ones(feature.count, bool)
        weights, still = weights_of(case.prior, members), np.zeros(model.dimension)
        for _ in range(rounds):
            alone = {count: decayed((start + still).astype(model.dtype), local.train, count) for count in set(steps.values())}
            still = still + sum(weights[client] * alone[steps[client]] for client in members) / sum(weights.values())
        return present_in(feature.rows(update - still), None, tolerance)
    if local.train.weight_decay or feature.like is None or feature.columns is None or feature.channels is None:
        return np.ones(feature.count, bool)
    return present_by_adam(feature.columns(update), feature.like(update), feature.channels, tolerance)
