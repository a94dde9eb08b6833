"""Whole runs with samples as canaries (unit = "sample"): spikes (one long pixel, one label) among clients' samples, each by its own coin.

A canary's score is how far the recorded updates go along the canary's own clipped gradient, less what the other samples, which the auditor
knows, would have done without noise. Where clients add noise of their own the auditor reads every client's update, with nothing between
the server and the updates: the guarantee is claimed under any protection. They are scored a second time, against what the other clients'
updates of the round have in common: noise that clients share by mistake would cancel there. With `[privacy] noise = "shared"` the updates
leave in the run's secure sums only, and the auditor reads the sums.

Source: Andrew et al. 2023 ("One-shot empirical privacy estimation for federated learning") for canaries with directions of their own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...algorithms.shared.around import steps_of
from ...contract.protection import Protection
from ...engine import Engine, Streams, TaskInput
from ...engine.models import Model
from ...experiments.config.config import Config
from ...privacy.settings import Noise
from ...tasks.training import Train
from ...types import Array, ClientData, Population
from ..adversary import view_of
from ..evidence.local_training import with_samples
from ..evidence.updates import ClientStep, asked_in, steps_in
from ..membership.membership_gradients import clipped_gradients
from .dp_audit import REPETITIONS
from .dp_claims import claim_of_clients
from .dp_mechanisms import LONG, CanaryGame
from .dp_references import GameTrials, Readout, UpdateScatter, trials_of_steps
from .dp_reruns import WholeRunGame, run_rounds, started, unscored

__all__ = ["noise_of_run", "rerun_samples"]

MOST_CANARIES, MOST_EACH = 2560, 128
"""Spikes in all, and in one client's data."""
LEFT = 0.05
"""The share of the noise that is expected to be left of noise that clients share, once the others' is taken off."""


@dataclass(frozen=True, eq=False)
class Planted:
    """A client's canaries x (m, *shape), y (m,), their coins (m,), its own samples, and where its canaries lie among those of all."""

    x: Array
    y: Array
    coins: Array
    samples: ClientData
    places: Array


def rerun_samples(
    config: Config, population: Population, rng: np.random.Generator, *, noise: float = 1.0, seconds: float = np.inf
) -> WholeRunGame:
    """The run of `config` (unit "sample") with spikes in its clients' data; `noise` multiplies that of every release.

    `seconds` end it early, with what was spent until then. Raises `InputError` as the run does, `ValueError` if no update can be read.
    """
    model, swaps, shared = config.model_for(population), config.privacy.relation == "replace_one", config.privacy.noise == "shared"
    spikes = _spikes(population, model, config, rng)
    coins = {client: rng.random(len(y)) < 0.5 for client, (_, y) in spikes.items()}
    clients = []
    for client in population.clients:
        (x, y), inside = spikes[client.id], coins[client.id]
        extra = (_mirrored(x, model, inside), y) if swaps else (x[inside], y[inside])
        joined = np.concatenate([client.x_train, extra[0]]), np.concatenate([client.y_train, extra[1]])
        clients.append(ClientData(client.id, *joined, client.x_train[:1], client.y_train[:1]))
    seen = config if shared else replace(config, protection=Protection())
    simulation = started(seen, replace(population, clients=tuple(clients)), noise)
    run_rounds(simulation, config.training.rounds, seconds)
    sent = steps_in(view_of(simulation.federation.transcript.messages, "server", {}), model.dimension)
    sums = _sums(sent, alone=not shared)
    if not sums:
        missing = "sum of updates" if shared else "single client's update"
        raise ValueError(f"no {missing} is in the transcript")
    run_ledger = simulation.run_ledger
    assert run_ledger is not None
    drawn, members = noise_of_run(config, population), sorted({owner for step in sums for owner in step.members})
    planted = _asked(sent, members, population, clients, spikes, coins)
    tossed = np.concatenate([planted[owner].coins for owner in members])
    alone, apart = dict[tuple[int, ...], Readout](), dict[tuple[int, ...], Readout]()
    draws, linear = rng.spawn(1)[0], noise == 1.0
    again = GameTrials.blank(len(tossed), REPETITIONS, draws)
    for number in sorted({step.round for step in sums}):
        here, beyond = [step for step in sums if step.round == number], []
        for step in here:
            train, canaries = asked_in(step).train.private(drawn), [planted[owner] for owner in step.members]
            places, towards = np.concatenate([canary.places for canary in canaries]), _towards(model, step, canaries, train)
            rest = step.update * len(canaries) - np.sum([_expected(train, canary.samples, step) for canary in canaries], axis=0)
            beyond.append(rest / _amount(train) - (0.0 if swaps else 0.5) * towards.sum(axis=0))
            spread = _spread(train, len(canaries))
            linear = linear and train.optimizer == "sgd"
            if step.members not in alone:
                alone[step.members] = Readout.blank(places, spread, again.at(places))
            read = alone[step.members]
            read.add(towards, beyond[-1])
            if linear and read.trials is not None:
                read.trials = trials_of_steps(read.trials, towards @ towards.T, spread, swaps, draws)
        if shared or len({step.members for step in here}) < 2:
            continue
        total = np.sum(beyond, axis=0)
        for step, own in zip(here, beyond, strict=True):
            train, canaries = asked_in(step).train.private(drawn), [planted[owner] for owner in step.members]
            if step.members not in apart:
                apart[step.members] = Readout.blank(canaries[0].places, _spread(train, 1, LEFT))
            apart[step.members].add(_towards(model, step, canaries, train), own - (total - own) / (len(beyond) - 1))
    claim = claim_of_clients([run_ledger.ledger.events(client) for client in members], config.privacy.delta)
    second = CanaryGame(_scored(apart.values(), len(tossed)), tossed) if apart else None
    first = CanaryGame(_scored(alone.values(), len(tossed)), tossed)
    for read in alone.values() if linear else ():
        again.add(read)
    return WholeRunGame(first, claim, len(simulation.rows), unscored(run_ledger.ledger), second, again if linear else None)


def _scored(readouts: Iterable[Readout], canaries: int) -> Array:
    """The scores (m,) of all canaries: what readouts of their clients estimate, added where sums of several clients have them."""
    scores = np.zeros(canaries)
    for read in readouts:
        scores[read.places] += read.estimates(read.seen)
    return scores


def _sums(sent: Mapping[int, Sequence[ClientStep]], *, alone: bool) -> list[ClientStep]:
    """The updates that were seen, each once: of single clients, or means of several."""
    steps: dict[tuple[int, ...], ClientStep] = {}
    for owner in sorted(sent):
        for place, step in enumerate(sent[owner]):
            if (len(step.members) == 1) == alone:
                steps.setdefault((step.round, *step.members, *([place] if alone else [])), step)
    return list(steps.values())


def _asked(
    sent: Mapping[int, Sequence[ClientStep]], members: Sequence[int], population: Population, clients: Sequence[ClientData],
    spikes: Mapping[int, tuple[Array, Array]], coins: Mapping[int, Array],
) -> dict[int, Planted]:  # fmt: skip
    """The canaries and samples that each client was asked to train on: some hold samples back, under "replace_one" only, where all canaries
    are there."""
    known, joined = {client.id: client for client in population.clients}, {client.id: client for client in clients}
    asked, start = dict[int, Planted](), 0
    for owner in members:
        own, (x, y) = len(known[owner].y_train), spikes[owner]
        kept = asked_in(sent[owner][0]).places(joined[owner])
        swapped = len(joined[owner].y_train) == own + len(y)
        chosen = kept[kept >= own] - own if swapped else np.arange(len(y))
        places = np.arange(start, start + len(chosen))
        asked[owner] = Planted(x[chosen], y[chosen], coins[owner][chosen], with_samples(known[owner], kept[kept < own]), places)
        start += len(chosen)
    return asked


def _spikes(population: Population, model: Model, config: Config, rng: np.random.Generator) -> dict[int, tuple[Array, Array]]:
    """Canaries x (m, *shape), y (m,) by client: the mean image (0 as the model's input) with one value so far off that gradients exceed
    the clip. In sums no two clients have the same."""
    size, clients = int(np.prod(model.shape)), len(population.clients)
    kinds, count = size * model.classes, min(MOST_EACH, max(1, MOST_CANARIES // clients))
    mean = np.broadcast_to(np.reshape(model.mean, (-1, *([1] * (len(model.shape) - 1)))), model.shape)
    std = np.broadcast_to(np.reshape(model.std, (-1, *([1] * (len(model.shape) - 1)))), model.shape)
    dealt = rng.permutation(kinds) if config.privacy.noise == "shared" else None
    count = min(count, kinds if dealt is None else max(1, kinds // clients))
    spikes = {}
    for number, client in enumerate(population.clients):
        own = rng.choice(kinds, size=count, replace=False) if dealt is None else dealt[number * count : (number + 1) * count]
        places, labels = np.divmod(own, model.classes)
        x = np.repeat(mean.reshape(1, size), len(own), axis=0)
        x[np.arange(len(own)), places] += LONG * config.privacy.clip_norm * std.reshape(size)[places]
        spikes[client.id] = x.reshape(len(own), *model.shape).astype(client.x_train.dtype), labels
    return spikes


def _mirrored(x: Array, model: Model, inside: Array) -> Array:
    """Spikes as they are where the coin is in, else mirrored at the mean image."""
    mean = np.reshape(model.mean, (-1, *([1] * (x.ndim - 2)))).astype(x.dtype)
    return np.asarray(np.where(inside.reshape(-1, *([1] * (x.ndim - 1))), x, 2 * mean - x), x.dtype)


def noise_of_run(config: Config, population: Population) -> Noise:
    """The calibrated noise of a run whose unit is a sample."""
    noise = config.noise_of(population.group_of)
    assert noise is not None  # checked by the caller
    return noise


def _towards(model: Model, step: ClientStep, members: Sequence[Planted], train: Train) -> Array:
    """How the canaries (m, d) of a sum's members move its model: minus their clipped gradients."""
    x, y = (np.concatenate([getattr(canary, name) for canary in members]) for name in ("x", "y"))
    return -clipped_gradients(model, step.start, x, y, train.clip_norm)


def _expected(train: Train, client: ClientData, step: ClientStep) -> Array:
    """The update (d,) that a client's own samples would have made without noise, in full batches: clipped sums over the public number."""
    samples = len(client.y_train)
    calm = replace(
        train, noise_multiplier=0.0, sampling_rate=0.0, shares=0, allocated=False, batch_size=0, epochs=train.steps,
        lr=train.lr * samples / train.public_samples,
    )  # fmt: skip
    vectors = {"model": step.start} | {name: vector for name, vector in step.beside.items() if name == "anchor"}
    (result,) = Engine().run(calm, [TaskInput(client, vectors, {}, Streams(0, 0, client.id))])
    return np.asarray(result["update"], np.float64)


def _carried(train: Train) -> Array:
    """How far a unit gradient of each step (steps,) has carried the parameters by the end, by rate, momentum and what pulls back."""
    if train.shares:
        return np.array([train.lr])
    moved, velocity, path = 0.0, 1.0, []
    pull = train.prox + train.weight_decay
    for _ in range(steps_of(train, train.public_samples)):
        if train.optimizer != "sgd":
            path.append(train.lr)
            continue
        moved += train.lr * velocity
        path.append(moved)
        velocity = train.momentum * velocity - pull * moved
    return np.array(path[::-1])


def _amount(train: Train) -> float:
    """How far one sample's clipped gradient moves an update, in all its steps."""
    return float(_carried(train).sum()) / train.public_samples


def _spread(train: Train, members: int, left: float = 1.0) -> UpdateScatter:
    """What a sum of so many updates scatters by, in units of `_amount`; `left` is the share of the noise that is expected in it."""
    carried = _carried(train)
    steps = float(carried.sum() ** 2 / np.square(carried).sum())  # as many as would scatter as much with equal weights
    noise = train.noise_multiplier * train.clip_norm / (train.sampling_rate * np.sqrt(steps))  # in each coordinate
    if train.shares:
        noise *= np.sqrt(members / train.shares)
    rate = 1.0 if train.allocated else train.sampling_rate  # allocated: each sample is in as many batches
    return UpdateScatter(noise, left * noise, rate, steps)
