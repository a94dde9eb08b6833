"""Canary games against each noisy mechanism: one release each, with the parameters of the event that prices it.

A game tosses a coin for each canary, makes data of those that are in, has the *run's own code* release what it releases of such data, and
scores each canary from what came out. That code is the private form of the algorithm's task (`moment`, `whole_moment`, `total`, `mean`,
`scores`, `choice`, `training`), a client that gives rows with noise of its own (`noise_per_client`), or the mechanism (`shared_noise`).
Canaries are distinguished where the code leaves out its noise, or its bound on one record. `dp_audit.audit_guesses` computes a bound from
scores and coins, to be compared with the accountant's price of the event.

Canaries do not disturb each other, and are several times as long (or their losses as large) as the bound allows, so that a missing bound
shows. Under "add_remove" a coin puts a record in or leaves it out; under "replace_one" it chooses between two that are as far apart as they
can be. Records beside them, the same for both coins, give the scale of what is released without one (eigenvectors, vectors of norm 1).

What they prove: that *this* release with these canaries leaks more than claimed, if a bound exceeds the claim. What they do not: a bound
below the claim is no proof of privacy, and compositions are not audited here (`dp_run` reruns whole runs).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...algorithms.pfedlia.influence import Influence, split_validation
from ...algorithms.stocfl.stocfl import Represent
from ...engine import Engine, Streams, TaskInput
from ...engine.models import Model
from ...federation import messages as m
from ...federation.client import FederationClient
from ...federation.host import ClientHost
from ...federation.settings import Settings
from ...federation.store import ObjectStore
from ...federation.values import Origin
from ...privacy.private_signatures import sketch_directions
from ...privacy.settings import Noise
from ...protocols.entropy import Entropy
from ...protocols.events import AllocatedGaussianEvent, ChoiceEvent, Event, GaussianEvent, Relation, SampledGaussianEvent
from ...protocols.keys import Identity
from ...protocols.ledger import Ledger
from ...protocols.mechanisms import clip
from ...protocols.shared_noise import SharedNoise
from ...protocols.sketch import public_sketch
from ...tasks.evaluation import Losses
from ...tasks.fold_gradients import FoldGradients
from ...tasks.signatures import PrincipalHalves, PrincipalVectors
from ...tasks.training import Gradient, Train
from ...types import Array, ClientData

__all__ = ["GAMES", "CanaryGame", "Unpriced", "quiet"]

CLIENTS, EACH = 20, 500
"""Canaries: clients times records of each. Games whose releases hold fewer canaries use correspondingly more clients."""
LONG = 3.0
"""Canaries are so many times as long as the clip."""
LABELS, PIXEL = 2, 10.0
"""Of the canaries of a training: labels, and how long a canary's gradient is in clips. The part of it that the bias has tells nothing, .5 %
of the clip; of canaries of length `LONG` it would be 5 %."""
LEVELS, WIDE = 4, 7
"""Levels of the eigenvalues in a second moment, an even number, and axes in each, a prime number not below it."""
CLEAR = 20.0
"""How many times the noise a known part of a release is above it, so that the rest is read in its scale."""
SKETCHED = 64
"""Coordinates of a sketched gradient."""
SCORED = 50
"""Clients that are scored in a row of influences."""


@dataclass(frozen=True, eq=False)
class CanaryGame:
    """What the auditor has after the release: a score for each canary, 0 half-way between in and out, and the coins, both (m,)."""

    scores: Array
    coins: Array


def _tossed(rng: np.random.Generator, each: int | None = None) -> Array:
    """Coins (clients, each) of all canaries."""
    each = each or EACH
    return rng.random((max(1, CLIENTS * EACH // each), each)) < 0.5


def _noise(relation: Relation, **values: Any) -> Noise:
    """Noise of a run that has but one kind of release."""
    nothing: dict[str, Any] = {"training": 0.0, "signature": 0.0, "choice": 0.0, "clip_norm": 1.0, "loss_cap": 4.0, "sketch_dim": SKETCHED}
    return Noise(relation, sampling_rate=1.0, samples=1, seed=0, **(nothing | values))


def _given(number: int, x: Array, y: Array, params: Mapping[str, Any], entropy: Entropy) -> TaskInput:
    """What a federation gives the private task of client `number`."""
    return TaskInput(ClientData(number, x, y, x[:0], y[:0]), params, {}, Streams(0, 0, number), secret=entropy(32))


def moment(event: GaussianEvent, rng: np.random.Generator, entropy: Entropy) -> CanaryGame:
    """PACFL's private signature, all of its eigenvectors.

    The guarantee is that of the second moment below, so of however many are shown. Known records give axes eigenvalues on `LEVELS` levels;
    noise and canaries turn the eigenvectors of each level into those of others, by their entries there over the difference. A canary has
    an axis of each level, and no two canaries have two in common, so each has the entries between its axes to itself: 1 − 1/`LEVELS` of
    what one record may move. Under "replace_one" the other record has half of the signs changed; of that move nothing is lost.
    """
    size = LEVELS * WIDE
    task = PrincipalVectors(size).private(_noise(event.relation, signature=event.noise_multiplier, sketch_dim=size))
    lines, swaps = lines_of(event), event.relation == "replace_one"
    known = np.repeat(np.eye(size), lines.counts, axis=0)
    wide = sketch_directions(0, 2 * size, size).T  # from these coordinates to samples of twice as many, which the sketch takes back
    coins, scores = _tossed(rng, len(lines.record)), []
    for number, own in enumerate(coins):
        canaries = np.where(own[:, None], lines.record, lines.other) if swaps else lines.record[own]
        x = np.concatenate([known, LONG * canaries]) @ wide
        vectors = task.run(_given(number, x, np.zeros(len(x), np.int64), {}, entropy))["signature"]
        scores.append(lines.scores((vectors.T * lines.counts) @ vectors))
    return CanaryGame(np.concatenate(scores), coins.ravel())


def whole_moment(event: GaussianEvent, rng: np.random.Generator, entropy: Entropy) -> CanaryGame:
    """The noisy second moment itself, of PACFL's cut by test: a canary an axis, or under "replace_one" two, along one of which it is."""
    swaps, size = event.relation == "replace_one", SKETCHED
    task = PrincipalHalves(2).private(_noise(event.relation, signature=event.noise_multiplier, sketch_dim=size))
    wide = LONG * sketch_directions(0, 2 * size, size).T
    coins, scores = _tossed(rng, size // 2 if swaps else size), []
    for number, own in enumerate(coins):
        x = wide[2 * np.arange(size // 2) + ~own] if swaps else wide[own]
        upper = task.run(_given(number, x, np.zeros(len(x), np.int64), {}, entropy))["signature"]
        along = upper[np.equal(*np.triu_indices(size))]
        scores.append((along[::2] - along[1::2]) / 2 if swaps else along - 0.5)
    return CanaryGame(np.concatenate(scores), coins.ravel())


@dataclass(frozen=True, eq=False)
class Lines:
    """Canaries in a second moment: the `record` (m, d), of norm 1, and the `other` record (m, d), zero under "add_remove".

    `counts` (d,): how often each axis occurs beside them.
    """

    record: Array
    other: Array
    counts: Array

    def scores(self, moments: Array) -> Array:
        """A score (..., m) for each canary from second moments (..., d, d), of which what lies within a level is not read."""
        level = np.arange(len(self.counts)) // WIDE
        seen = moments * (level[:, None] != level)
        first, second = (((rows @ seen) * rows).sum(axis=-1) for rows in (self.record, self.other))
        return np.asarray(first - second - (0.0 if self.other.any() else (1 - 1 / LEVELS) / 2))


def lines_of(event: GaussianEvent) -> Lines:
    """The canaries of `moment`."""
    size = LEVELS * WIDE
    level = np.arange(size) // WIDE
    # lines of different slopes meet in one point at most, since WIDE is prime
    offset, slope = np.divmod(np.arange(WIDE * WIDE), WIDE)
    axes = np.arange(LEVELS) * WIDE + (offset[:, None] + slope[:, None] * np.arange(LEVELS)) % WIDE
    record = np.zeros((WIDE * WIDE, size))
    np.put_along_axis(record, axes, LEVELS**-0.5, axis=1)
    other = record * np.where(level % 2, -1.0, 1.0) * (event.relation == "replace_one")
    counts = int(np.ceil(CLEAR * (1 + event.noise_multiplier * event.sensitivity))) * (LEVELS - 1 - level)
    return Lines(record, other, counts)


def total(event: GaussianEvent, rng: np.random.Generator, entropy: Entropy) -> CanaryGame:
    """StoCFL's private representation, a sketched and clipped sum of gradients of norm 1: all but one coordinate have a canary each.

    Samples are so chosen that their sketched gradients lie along axes; the last axis has known samples, for the scale.
    """
    swaps = event.relation == "replace_one"
    norm, pixels = event.sensitivity / (2 if swaps else 1), 2 * SKETCHED
    model = Model("linear", (pixels,), 2, dtype="float64")
    noise = _noise(event.relation, signature=event.noise_multiplier, clip_norm=norm)
    task = Represent(Gradient(model)).private(noise)
    sketch = sketch_directions(noise.seed, model.dimension, SKETCHED) * np.sqrt(model.dimension / SKETCHED)
    count = int(np.ceil(CLEAR * (1 + event.noise_multiplier * event.sensitivity / norm)))
    wanted = np.eye(SKETCHED) * norm * np.append(np.full(SKETCHED - 1, LONG), 1.0)[:, None]
    x = _along_axes(sketch, wanted)
    start = {"model": np.zeros(model.dimension)}
    coins, scores = _tossed(rng, SKETCHED - 1), []
    for number, own in enumerate(coins):
        images = np.concatenate([x[:-1] if swaps else x[:-1][own], np.repeat(x[-1:], count, axis=0)])
        labels = np.ones(len(images), np.int64)
        labels[: len(images) - count] = own if swaps else 1
        seen = task.run(_given(number, images, labels, start, entropy))["representation"]
        scores.append(seen[:-1] / seen[-1] * count - (0.0 if swaps else 0.5))
    return CanaryGame(np.concatenate(scores), coins.ravel())


def mean(event: GaussianEvent, rng: np.random.Generator, entropy: Entropy) -> CanaryGame:
    """The one noisy vector of `crossfit` and of tests on gradients: a mean of gradients of norm 1, whose length is seen.

    Every coordinate of the sketch has a canary, a sample whose sketched gradient lies along it. There are so many pixels that each
    coordinate has some.
    """
    swaps = event.relation == "replace_one"
    model = Model("linear", (4 * SKETCHED,), 2, dtype="float64")
    task = FoldGradients(model).private(_noise(event.relation, signature=event.noise_multiplier))
    x = _along_axes(public_sketch("crossfit", task.seed, model.dimension, SKETCHED).apply(np.eye(model.dimension)), LONG * np.eye(SKETCHED))
    start = {"model": np.zeros(model.dimension)}
    coins, scores = _tossed(rng, SKETCHED), []
    for number, own in enumerate(coins):
        images = x if swaps else x[own]
        labels = own.astype(np.int64) if swaps else np.ones(len(images), np.int64)
        seen = task.run(_given(number, images, labels, start, entropy))["folds"]
        scores.append(seen / 2 if swaps else seen - 0.5)
    return CanaryGame(np.concatenate(scores), coins.ravel())


def _along_axes(sketch: Array, wanted: Array) -> Array:
    """Images (m, pixels) whose gradients at zero in `sketch` (2 · pixels + 2, d) are the rows `wanted` (m, d), under label 1.

    At zero the gradient of softmax regression for a sample with label 1 is (½, −½) ⊗ (x, 1), with label 0 its negative.

    Raises `ValueError` where no image has such a gradient: canaries would hide each other, and the audit would be weaker than it states.
    """
    weights, biases = sketch[:-2].reshape(2, -1, sketch.shape[1]), sketch[-2:]
    towards, rest = (weights[0] - weights[1]).T / 2, (wanted - (biases[0] - biases[1]) / 2).T
    images = np.linalg.lstsq(towards, rest, rcond=None)[0]
    if not np.allclose(towards @ images, rest, atol=1e-9):
        raise ValueError(f"sketch: {sketch.shape[0]} numbers do not reach each of its {sketch.shape[1]} coordinates")
    return np.asarray(images.T)


def scores(event: GaussianEvent, rng: np.random.Generator, entropy: Entropy) -> CanaryGame:
    """pFedLIA's private row of scores, under "replace_one": a held-back sample is good or bad for one other client, by its coin."""
    cap, share = event.sensitivity / 2, 0.5
    model = Model("linear", (SCORED,), 2, dtype="float64")
    clients = tuple(range(SCORED))
    noise = _noise(event.relation, signature=event.noise_multiplier, loss_cap=cap)
    task = Influence(model, share, clients).private(noise)
    # a pixel says label 0 by the margin A of the model, and label 1 by A once its client's update is added: losses change by A
    margin = LONG * cap
    start, updates = np.zeros(model.dimension), np.zeros((SCORED, model.dimension))
    start[SCORED : 2 * SCORED] = -margin
    updates[clients, SCORED + np.arange(SCORED)] = 2 * margin
    params = {"model": start, "updates": dict(zip(clients, updates, strict=True))}
    coins, scores = _tossed(rng, SCORED), []
    for number, own in enumerate(coins, start=SCORED):  # none of those that are scored
        x, y = np.zeros((2 * SCORED, SCORED)), np.zeros(2 * SCORED, np.int64)
        held = split_validation(ClientData(number, x, y, x[:0], y[:0]), share, 0)[1]
        x[held], y[held] = np.eye(SCORED), own
        scores.append(task.run(_given(number, x, y, params, entropy))["scores"])
    return CanaryGame(np.concatenate(scores), coins.ravel())


class Unpriced(Ledger):
    """Charges nothing: for references, whose noise is left out, and games of more clients than there is time to price one by one."""

    def charge(self, bills: Mapping[int, object], purpose: str, round: int | None = None) -> None:
        return


def _no_data() -> ClientData:
    raise NotImplementedError("nothing is computed in this game")


def noise_per_client(event: GaussianEvent, rng: np.random.Generator, entropy: Entropy) -> CanaryGame:
    """Rows that a client gives with noise of its own (`federation.client`), a client a canary."""
    low = 0.0 if event.relation == "add_remove" else -1.0
    along = np.full((2, 4), 8**-0.5)  # of norm 1 in all, as rows are once they are scaled
    coins = _tossed(rng).ravel()
    rows = [LONG * 2**0.5 * (1.0 if inside else low) * along for inside in coins]
    session, store, noise = bytes(16), ObjectStore(), m.Bounded(event.relation, 1.0, event.noise_multiplier)
    store.put("session", session)
    client, seen = FederationClient(Settings(Identity.create(0, entropy)), _no_data, store, entropy), []
    for number, brought in enumerate(rows):
        client.values.hold(number, {"rows": brought}, Origin())
        released = ClientHost({0: client}).answer({0: m.Give(session, "gram", number, ("rows",), "", False, noise)})[0]
        assert isinstance(released, m.Given)
        seen.append(released.values[0].value)
    return CanaryGame(np.tensordot(np.stack(seen), along, 2) - (1.0 + low) / 2, coins)


def training(
    event: SampledGaussianEvent | AllocatedGaussianEvent, rng: np.random.Generator, entropy: Entropy, colluding: int = 0
) -> CanaryGame:
    """One client's private training (`training.Train`), on softmax regression from zero: a canary is one long pixel with one label.

    Its gradient has that pixel's column of the weights to itself, and so a batch more of it is a step along its own direction. (Where
    several canaries with other labels shared a pixel, batches of the others scattered the scores: bounds were lower by up to .13 of the
    claim.) Where clients share the noise, a client with canaries is in a secure sum with as many as the price counts,
    which add their shares of it and nothing else; of these the auditor knows as many as collude (`others_of`). Raises `ValueError` for
    steps that make no whole number of epochs.
    """
    model, label, part = Model("linear", (EACH,), LABELS, dtype="float64"), np.arange(EACH) % LABELS, np.sqrt(1 - 1 / LABELS)
    norm = 1.0 if event.shares else event.norm_bound  # of a gradient; that of a shared step's event is of the update
    x = PIXEL * norm / part * np.eye(EACH)  # a gradient is `part` times as long as x, or a little more
    start = np.zeros(model.dimension)
    coins = _tossed(rng)
    inputs = []
    for number, own in enumerate(coins):
        images, labels = (x[own], label[own]) if event.relation == "add_remove" else (x * np.where(own, 1.0, -1.0)[:, None], label)
        inputs.append(_given(number, images, labels, {"model": start}, entropy))
    # rates so small that the model hardly moves: the gradients stay those at the start
    train = Train(
        model, max(1, round(event.steps * event.sampling_rate)), 0, 1e-6, clip_norm=norm, sampling_rate=event.sampling_rate,
        noise_multiplier=event.noise_multiplier, public_samples=EACH // 2, relation=event.relation, shares=event.shares,
        allocated=isinstance(event, AllocatedGaussianEvent),
    )  # fmt: skip
    if train.steps != event.steps:
        raise ValueError(f"event: {event.steps} steps at rate {event.sampling_rate} are no whole epochs, as trainings have")
    results = Engine().run(train, inputs)
    towards = (np.eye(LABELS) - 1 / LABELS) / part  # where one more sample of a label moves its pixel's column
    half = 0.5 * train.lr * event.steps * norm / train.public_samples if event.relation == "add_remove" else 0.0
    scores = []
    for result in results:
        update = np.asarray(result["update"])
        if event.shares:
            noise = SharedNoise(train.noise_multiplier * train.moves, train.shares)
            update = others_of([update], noise, float(np.abs(update).max()), entropy, colluding)
        columns = update[: EACH * LABELS].reshape(LABELS, EACH)
        scores.append((towards[label] * columns.T).sum(axis=1) - half)
    return CanaryGame(np.concatenate(scores), coins.ravel())


def others_of(vectors: Sequence[Array], noise: SharedNoise, length: float, entropy: Entropy, colluding: int = 0) -> Array:
    """What a secure sum of `vectors` (d,), no coordinate longer than `length`, shows to those who know the shares of some members.

    Members who bring nothing but a share of the noise make up the number of shares that the price counts. With `colluding` members the
    sum has one more: the price leaves out the share of one member.
    """
    members, nothing = noise.survivors + (colluding > 0), np.zeros_like(vectors[0])
    brought = [*vectors, *[nothing] * (members - len(vectors))]
    rows = [noise.noisy(vector, noise.room(length), entropy) for vector in brought]
    known = rows[members - colluding :]
    return noise.opened(np.sum(rows, axis=0) - sum(known))


def choice(event: ChoiceEvent, rng: np.random.Generator, entropy: Entropy) -> CanaryGame:
    """IFCA's private choice between two models, a client a canary, whose record has a loss far above the cap with one of them.

    The other samples make the two models as probable as each other, half-way between both coins. There errors of both kinds are as
    frequent as ε allows at least, and where a choice has no noise the canary decides.
    """
    noise, swaps = _noise(event.relation, choice=event.epsilon), event.relation == "replace_one"
    model = Model("linear", (2,), 2, dtype="float64")
    models = [np.zeros(model.dimension), np.zeros(model.dimension)]
    for number, vector in enumerate(models):
        vector[2 + number] = 1.0  # its margin for label 1 is one of the two pixels
    none, far = 1e-9, 5 * LONG
    record, other, known = (far, none), (none, far), (none, none if swaps else 0.5)  # a sample's two losses, in caps
    coins = _tossed(rng).ravel()
    inputs = []
    for number, inside in enumerate(coins):
        losses = [known, *([record] if inside else [other] if swaps else [])]
        x = -np.log(np.expm1(noise.loss_cap * np.array(losses)))  # the margins that have these losses
        inputs.append(_given(number, x, np.ones(len(x), np.int64), {"model": models}, entropy))
    chosen = np.array([int(result["choice"]) for result in Engine().run(Losses(model).private(noise), inputs)])
    return CanaryGame(2.0 * chosen - 1.0, coins)


def shared_noise(event: GaussianEvent, rng: np.random.Generator, entropy: Entropy, colluding: int = 0) -> CanaryGame:
    """Means over clients with noise that they share: a member of a group a canary, and only as many of them as the price counts on.

    Of `colluding` members, who are no canaries, the auditor knows the shares (`others_of`).
    """
    swaps = event.relation == "replace_one"
    norm = event.sensitivity / (2 if swaps else 1)
    members = event.shares or EACH
    noise = SharedNoise(event.noise_multiplier * event.sensitivity, members)
    each = members if not colluding else members + 1 - colluding
    coins = _tossed(rng, each)[: max(1, CLIENTS // 4 * EACH**2 // members**2)]  # a share of the noise for each member is dear
    scores = []
    for own in coins:
        vectors = LONG * norm * np.eye(each) * np.where(own, 1.0, -1.0 if swaps else 0.0)[:, None]
        summed = others_of([clip(vector, norm) for vector in vectors], noise, norm, entropy, colluding)
        scores.append(summed / norm - (0.0 if swaps else 0.5))
    return CanaryGame(np.concatenate(scores), coins.ravel())


GAMES: dict[str, Callable[..., CanaryGame]] = {
    "moment": moment, "whole_moment": whole_moment, "total": total, "mean": mean, "scores": scores, "local": noise_per_client,
    "training": training, "choice": choice, "shares": shared_noise,
}  # fmt: skip
"""Name -> (event, rng, entropy) -> game; where clients share the noise also of how many members collude."""


def quiet(event: Event) -> Event:
    """The same release with its noise left out, nearly: which an audit's reference uses."""
    if isinstance(event, GaussianEvent):
        return replace(event, noise_multiplier=1e-3)
    if isinstance(event, SampledGaussianEvent):
        return replace(event, noise_multiplier=1e-3, sampling_rate=1.0)
    if isinstance(event, AllocatedGaussianEvent):
        return replace(event, noise_multiplier=1e-3, batches=1)
    return replace(event, epsilon=50.0)
