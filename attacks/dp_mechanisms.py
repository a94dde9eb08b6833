"""Canary games against every mechanism that releases something: one release each, with the parameters of the event that prices it.

A game tosses a coin for each canary, plays the *library's own* mechanism on the records that are in, and scores each canary from what came
out. `dp_audit.audit` makes a bound of scores and coins, to be held against what the accountant says of the event.

Canaries have an axis each, of their own client, and are three times as long as the clip allows, so that a missing clip shows. Under
"add_remove" a coin puts a record in or leaves it out; under "replace_one" it chooses between two that are as far apart as they can be.

What they prove: that *this* release with these canaries leaks more than claimed, if a bound exceeds the claim. What they do not: a bound
below the claim is no proof of privacy, and a composition is not tried here (`dp_run` plays whole runs).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..engine import Engine, Streams, TaskInput
from ..models import Model
from ..protocols.entropy import Entropy
from ..protocols.events import ChoiceEvent, Event, GaussianEvent, RandomizedResponseEvent, SampledGaussianEvent, SkellamEvent
from ..protocols.mechanisms import (
    SkellamPlan,
    gaussian,
    gaussian_sum,
    noisy_argmin,
    randomized_response,
    second_moment,
    skellam_open,
    skellam_share,
)
from ..training import Train
from ..types import Array, ClientData

__all__ = ["GAMES", "Game", "quiet"]

CLIENTS, EACH = 20, 500
"""Canaries: so many clients with a release each, and so many records (or, in sums over clients, members)."""
LONG = 3.0
"""Canaries are so many times as long as the clip."""
LABELS = 10
RARE = 0.05
"""How probable the option that a choice's canary moves is without it: rare, because there its probability changes by e^ε."""


@dataclass(frozen=True, eq=False)
class Game:
    """What the auditor has after the release: a score for each canary, 0 half-way between in and out, and the coins, both (m,)."""

    scores: Array
    coins: Array


def _tossed(rng: np.random.Generator, clients: int) -> Array:
    return rng.random((clients, EACH)) < 0.5


def _records(coins: Array, relation: str) -> Array:
    """One client's records (n, m) from its coins (m,): axis i, if canary i is in; under "replace_one" its negative if it is not."""
    rows = LONG * np.eye(len(coins))
    return rows[coins] if relation == "add_remove" else rows * np.where(coins, 1.0, -1.0)[:, None]


def moment(event: GaussianEvent, rng: np.random.Generator, entropy: Entropy) -> Game:
    """The noisy second moment behind PACFL's private signature. Under "replace_one" two axes a canary: xxᵀ and (−x)(−x)ᵀ are one."""
    coins, scores = _tossed(rng, CLIENTS), []
    for own in coins:
        if event.relation == "add_remove":
            rows = _records(own, event.relation)
        else:
            rows = LONG * np.eye(2 * EACH)[np.arange(EACH) + np.where(own, 0, EACH)]
        seen = np.diag(second_moment(rows, event.noise_multiplier, event.relation, event.unit, entropy).value)
        scores.append(seen - 0.5 if event.relation == "add_remove" else seen[:EACH] - seen[EACH:])
    return Game(np.concatenate(scores), coins.ravel())


def total(event: GaussianEvent, rng: np.random.Generator, entropy: Entropy) -> Game:
    """A sum of clipped rows with Gaussian noise: StoCFL's representation, pFedLIA's scores, the sum over clients at a trusted server."""
    norm = event.sensitivity / (1 if event.relation == "add_remove" else 2)
    coins = _tossed(rng, CLIENTS)
    scores = [
        gaussian_sum(norm * _records(own, event.relation), norm, event.noise_multiplier, event.relation, event.unit, entropy).value
        for own in coins
    ]
    return Game(np.concatenate(scores) - (norm / 2 if event.relation == "add_remove" else 0.0), coins.ravel())


def local(event: GaussianEvent, rng: np.random.Generator, entropy: Entropy) -> Game:
    """Every client's own row with noise of its own (signatures by local noise): as many releases as canaries, of one coordinate each."""
    coins = _tossed(rng, CLIENTS).ravel()
    low = 0.0 if event.relation == "add_remove" else -1.0
    rows = event.sensitivity / (1.0 - low) * np.where(coins, 1.0, low)
    scores = gaussian(rows, event.sensitivity, event.noise_multiplier, event.relation, event.unit, entropy).value
    return Game(scores - rows.max() * (1.0 + low) / 2, coins)


def training(event: SampledGaussianEvent, rng: np.random.Generator, entropy: Entropy) -> Game:
    """One client's private training (`training.Train`), on softmax regression from zero: a canary is one long pixel with one label.

    Its gradient has that pixel's column of the weights to itself, up to the other labels there, and so a batch more of it is a step
    along its own direction. Raises `ValueError` for steps that make no whole number of epochs.
    """
    pixels = EACH // LABELS
    model = Model("linear", (pixels,), LABELS, dtype="float64")
    spike, label = np.repeat(np.arange(pixels), LABELS), np.tile(np.arange(LABELS), pixels)
    x = LONG * event.norm_bound / np.sqrt(0.9) * np.eye(pixels)[spike]  # a gradient is √.9 times as long as x, or a little more
    start = np.zeros(model.dimension)
    coins = _tossed(rng, CLIENTS)
    inputs = []
    for number, own in enumerate(coins):
        images, labels = (x[own], label[own]) if event.relation == "add_remove" else (x * np.where(own, 1.0, -1.0)[:, None], label)
        data = ClientData(number, images, labels, x[:0], label[:0])
        inputs.append(TaskInput(data, {"model": start}, {}, Streams(0, 0, number), secret=entropy(32)))
    # rates so small that the model hardly moves: the gradients stay those at the start
    train = Train(
        model, max(1, round(event.steps * event.sampling_rate)), 0, 1e-6, clip_norm=event.norm_bound, sampling_rate=event.sampling_rate,
        noise_multiplier=event.noise_multiplier, public_samples=EACH // 2, relation=event.relation,
    )  # fmt: skip
    if train.steps != event.steps:
        raise ValueError(f"event: {event.steps} steps at rate {event.sampling_rate} are no whole epochs, as trainings have")
    results = Engine().run(train, inputs)
    towards = (np.eye(LABELS) - 1 / LABELS) / np.sqrt(1 - 1 / LABELS)  # where one more sample of a label moves its pixel's column
    half = 0.5 * train.lr * event.steps * event.norm_bound / train.public_samples if event.relation == "add_remove" else 0.0
    scores = []
    for result in results:
        columns = np.asarray(result["update"])[: pixels * LABELS].reshape(LABELS, pixels)
        scores.append((towards[label] * columns[:, spike].T).sum(axis=1) - half)
    return Game(np.concatenate(scores), coins.ravel())


def choice(event: ChoiceEvent, rng: np.random.Generator, entropy: Entropy) -> Game:
    """IFCA's noisy choice, a client a canary: one of two models is rarely chosen, and the canary changes how rarely by nearly e^ε.

    For half of the clients the record speaks for the rare model, for the others against it.
    """
    coins = _tossed(rng, CLIENTS).ravel()
    rate = event.epsilon if event.relation == "add_remove" else event.epsilon / 2
    apart = np.log((1 - RARE) / RARE) / rate  # of the two sums of losses, so that the second model is chosen with probability RARE
    scores = np.empty(len(coins))
    for i, inside in enumerate(coins):
        speaks_for = i % 2 == 0
        for_it, against = np.array([1.0, 0.0]), np.array([0.0, 1.0])
        record = for_it if speaks_for else against
        other = np.zeros(2) if event.relation == "add_remove" else (against if speaks_for else for_it)
        sums = np.array([0.0, apart]) + (record if inside else other)
        chosen = noisy_argmin(sums, 1.0, event.epsilon, event.relation, event.unit, entropy).value
        scores[i] = (1.0 if speaks_for else -1.0) * chosen
    return Game(scores, coins)


def response(event: RandomizedResponseEvent, rng: np.random.Generator, entropy: Entropy) -> Game:
    """Randomised responses, a client a canary: its coin says which of two values is the true one."""
    coins = _tossed(rng, CLIENTS).ravel()
    said = [randomized_response(int(inside), event.choices, event.epsilon, event.relation, event.unit, entropy).value for inside in coins]
    return Game(np.array([{0: -1.0, 1: 1.0}.get(value, 0.0) for value in said]), coins)


def shares(event: SkellamEvent, rng: np.random.Generator, entropy: Entropy, *, levels: float = 1000.0) -> Game:
    """Means over clients by Skellam shares: a member of a group a canary, and only as many of them as the price counts on.

    The plan is one whose bounds after rounding are the event's, up to a common factor of them and the noise; so an event's price is kept.
    """
    dimension = 1 << (EACH - 1).bit_length()
    times = 1 if event.relation == "add_remove" else 2
    beta = float(np.exp(-0.5))
    plan = SkellamPlan(1.0, levels, dimension, beta, 1.0, EACH, event.relation)
    spread = event.variance**0.5 / (event.l2 / times)  # in bounds
    plan = replace(plan, local_variance=(spread * plan.norms[0]) ** 2 / EACH)
    coins = _tossed(rng, max(1, CLIENTS // 4))  # a share of the noise for each member is dear
    signs = np.where(rng.random(dimension) < 0.5, 1.0, -1.0)
    scores = []
    for own in coins:
        vectors = LONG * np.eye(EACH) * np.where(own, 1.0, 0.0 if times == 1 else -1.0)[:, None]
        summed = np.sum([skellam_share(vector, plan, signs, entropy) for vector in vectors], axis=0)
        scores.append(skellam_open(summed, plan, signs, EACH) - (0.5 if times == 1 else 0.0))
    return Game(np.concatenate(scores), coins.ravel())


GAMES: dict[str, Callable[..., Game]] = {
    "moment": moment, "total": total, "local": local, "training": training, "choice": choice, "response": response, "shares": shares,
}  # fmt: skip
"""Name -> (event, rng, entropy) -> game."""


def quiet(event: Event) -> Event:
    """The same release with its noise left out, nearly: what an audit's reference is played with."""
    if isinstance(event, GaussianEvent):
        return replace(event, noise_multiplier=1e-3)
    if isinstance(event, SampledGaussianEvent):
        return replace(event, noise_multiplier=1e-3, sampling_rate=1.0)
    if isinstance(event, SkellamEvent):
        return replace(event, variance=(1e-3 * event.l2) ** 2)
    return replace(event, epsilon=50.0)
