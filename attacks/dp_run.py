"""The DP audit of a run with `[privacy]`: canaries in each kind of release by itself, and in the whole run.

Source: Steinke, Nasr & Jagielski 2023 (`dp_audit`); canaries with directions of their own in the space of updates after Andrew et al. 2023
("One-shot empirical privacy estimation for federated learning"). A recorded run has no canaries in it, so the auditor reruns the same
configuration on the run's clients, as often (each time with fresh noise and coins) and as long as the budget allows.

unit = "sample": spikes (one long pixel, one label) are put among clients' samples, each by its own coin. A canary's score is how far the
    client's recorded updates go along the canary's own clipped gradient, less what the client's other samples, which the auditor knows,
    would have done without noise. Nothing stands between the server and the updates here: the guarantee is claimed under any protection.
    Scored a second time, against what the other clients' updates of the round have in common: noise that clients share would cancel there.
unit = "client": a client is a canary. What it brings to each mean is a long vector of its own, or, by its coin, zero (its negative under
    "replace_one"); its score is how far the released means go along that. Clipping, noise, secure sums and dropouts are the run's.

Of a whole run only the updates, or the released means, are scored, and held against all that it spent: its figure does not cover
signatures, choices and rows with local noise, and its note reports that. These are audited one by one, with the code that releases them
in runs (`dp_mechanisms`).

The figure is a lower bound on ε at one-sided 95 %, beside the ε in the ledger: *above it* the run is less private than it claims
(`leaks`). Below it the power decides (`dp_audit.verdict`): how often the same audit would have raised an alarm, had the noise been a third
of what the claim needs. The unprotected figure is the same game with the noise left out. What it proves: a bound above the claim is a bug.
What it does not: a bound below is no proof. Noise that is right in size but predictable (from a seed that the server knows, or the same in
each round) is not tested.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..algorithms.around import steps_of
from ..contract.handles import GroupMean
from ..contract.protection import Protection
from ..engine import Engine, Streams, TaskInput
from ..engine.models import Model
from ..experiments.config import Config
from ..experiments.run import Run, advance, begin, prepare
from ..federation.values import Values
from ..privacy.client_level import LOCAL, ClippedMean, LocalGram
from ..privacy.private_signatures import sum_event
from ..privacy.settings import Noise, Privacy
from ..protocols.accounting import epsilon_of
from ..protocols.banded import inverse_coefficients
from ..protocols.entropy import Entropy, system_entropy
from ..protocols.errors import ProtocolError
from ..protocols.events import ChoiceEvent, Event, GaussianEvent, SampledGaussianEvent
from ..protocols.ledger import Budget as LedgerBudget
from ..protocols.ledger import Ledger
from ..randomness import stream
from ..tasks.training import Train
from ..types import Array, ClientData, Population
from .adversary import view_of
from .dp_audit import ENOUGH, FACTOR, REPETITIONS, AuditResult, Power, audit, power, verdict
from .dp_mechanisms import GAMES, LONG, Game, Unpriced, quiet
from .dp_references import Spread, Trials, joined_trials, released, trials_of_means, trials_of_steps
from .leakage import Case, Cell, nothing
from .local_training import only
from .membership_gradients import sample_gradients
from .updates import Step, asked_in, steps_in

__all__ = ["WholeAudit", "audit_release", "audit_whole", "cells", "play", "play_clients", "play_samples", "releases"]

NAME = "dp_audit"
WHOLE = "run_epsilon"
MOST_CANARIES, MOST_EACH = 2560, 128
"""In a whole run: spikes in all, and in one client's data."""
NO_NOISE = 1e-3
"""The share of the noise that a reference keeps."""
LEFT = 0.05
"""The share of the noise that is expected to be left of noise that clients share, once the others' is taken off."""


@dataclass(frozen=True, eq=False)
class Played:
    """A whole run's game, what its ledger came to, in how many rounds, and the figures of what was paid for and is not in the game.

    `apart` is the same game scored by what a client's updates have that others' of the round have not, where there are others. `trials` are
    repetitions of the game on its reference; None where training is not linear in its noise (Adam), so that none is known.
    """

    game: Game
    epsilon: float
    rounds: int
    unscored: tuple[str, ...] = ()
    apart: Game | None = None
    trials: Trials | None = None


# --- samples --------------------------------------------------------------------------------------------------------------------------


def play_samples(
    config: Config, population: Population, rng: np.random.Generator, *, noise: float = 1.0, seconds: float = np.inf
) -> Played:
    """The run of `config` (unit "sample") with spikes in its clients' data; `noise` multiplies that of every release.

    `seconds` end it early, with what was spent until then. Raises `InputError` as the run does, `ValueError` if no update can be read.
    """
    model = config.model_for(population)
    spikes = {client.id: _spikes(client, model, config, len(population.clients), rng) for client in population.clients}
    coins = {client: rng.random(len(y)) < 0.5 for client, (_, y) in spikes.items()}
    swaps = config.privacy.relation == "replace_one"
    clients = []
    for client in population.clients:
        (x, y), inside = spikes[client.id], coins[client.id]
        extra = (_mirrored(x, model, inside), y) if swaps else (x[inside], y[inside])
        joined = np.concatenate([client.x_train, extra[0]]), np.concatenate([client.y_train, extra[1]])
        clients.append(ClientData(client.id, *joined, client.x_train[:1], client.y_train[:1]))
    if config.privacy.noise == "shared":
        raise ValueError("updates leave in sums only (privacy.noise = 'shared'), and this game reads single ones")
    # nothing between the server and the updates, and every round's payloads
    plain = replace(config, protection=Protection())
    simulation = _started(plain, replace(population, clients=tuple(clients)), noise)
    _rounds(simulation, config.training.rounds, seconds)
    sent = steps_in(view_of(simulation.federation.transcript.messages, "server", {}), model.dimension)
    sent = {client: steps for client, steps in sent.items() if len(steps[0].members) == 1}
    if not sent:
        raise ValueError("no single client's update is in the transcript")
    run_ledger = simulation.run_ledger
    assert run_ledger is not None
    drawn, known, planted = _noise(config, population), {one.id: one for one in population.clients}, {one.id: one for one in clients}
    samples, asked = {}, {}
    for owner in sent:
        # its own samples, then its spikes; some are held back under "replace_one" only, where all spikes are there
        kept, own = asked_in(sent[owner][0]).places(planted[owner]), len(known[owner].y_train)
        samples[owner] = only(known[owner], kept[kept < own])
        asked[owner] = kept[kept >= own] - own if swaps else np.arange(len(coins[owner]))
    scores, apart = ({owner: np.zeros(len(places)) for owner, places in asked.items()} for _ in range(2))
    several, draws = False, rng.spawn(1)[0]
    linear = noise == 1.0
    again = {owner: Trials.blank(len(places), REPETITIONS, draws) for owner, places in asked.items()}
    for number in sorted({step.round for steps in sent.values() for step in steps}):
        here = [(owner, step) for owner, steps in sent.items() for step in steps if step.round == number]

        def towards(owner: int, step: Step, train: Train) -> Array:
            x, y = (part[asked[owner]] for part in spikes[owner])
            return -sample_gradients(model, step.start, x, y, train.clip_norm)

        beyond = []
        for owner, step in here:
            train = asked_in(step).train.private(drawn)
            own_canaries, rest = towards(owner, step, train), step.update - _expected(train, samples[owner], step)
            beyond.append(rest / _amount(train) - (0.0 if swaps else 0.5) * own_canaries.sum(axis=0))
            scores[owner] += _estimate(train, own_canaries, beyond[-1])
            linear = linear and train.optimizer == "sgd"
            if linear:
                again[owner] = trials_of_steps(again[owner], own_canaries @ own_canaries.T, _spread(train), swaps, draws)
        if len({owner for owner, _ in here}) < 2:
            continue
        several, total = True, np.sum(beyond, axis=0)
        for (owner, step), mine in zip(here, beyond, strict=True):
            others = (total - mine) / (len(beyond) - 1)
            train = asked_in(step).train.private(drawn)
            apart[owner] += _estimate(train, towards(owner, step, train), mine - others, LEFT)
    spent = max(run_ledger.ledger.spent(client) for client in sent) if noise == 1.0 else 0.0
    tossed = np.concatenate([coins[owner][asked[owner]] for owner in sent])
    games = [Game(np.concatenate([found[owner] for owner in sent]), tossed) for found in (scores, apart)]
    trials = joined_trials([again[owner] for owner in sent]) if linear else None
    return Played(games[0], spent, len(simulation.rows), _unscored(run_ledger.ledger), games[1] if several else None, trials)


def _spikes(client: ClientData, model: Model, config: Config, clients: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Canaries x (m, *shape), y (m,): the mean image (0 as the model's input) with one value so far off that gradients exceed the clip."""
    size = int(np.prod(model.shape))
    count = min(MOST_EACH, max(1, MOST_CANARIES // clients), size * model.classes)
    places, labels = np.divmod(rng.choice(size * model.classes, size=count, replace=False), model.classes)
    mean = np.broadcast_to(np.reshape(model.mean, (-1, *([1] * (len(model.shape) - 1)))), model.shape)
    std = np.broadcast_to(np.reshape(model.std, (-1, *([1] * (len(model.shape) - 1)))), model.shape)
    x = np.repeat(mean.reshape(1, size), count, axis=0)
    x[np.arange(count), places] += LONG * config.privacy.clip_norm * std.reshape(size)[places]
    return x.reshape(count, *model.shape).astype(client.x_train.dtype), labels


def _mirrored(x: Array, model: Model, inside: Array) -> Array:
    """Spikes as they are where the coin is in, else mirrored at the mean image."""
    mean = np.reshape(model.mean, (-1, *([1] * (x.ndim - 2)))).astype(x.dtype)
    return np.asarray(np.where(inside.reshape(-1, *([1] * (x.ndim - 1))), x, 2 * mean - x), x.dtype)


def _noise(config: Config, population: Population) -> Noise:
    """The calibrated noise of a run whose unit is a sample."""
    noise = config.noise_of(population.group_of)
    assert noise is not None  # checked by the caller
    return noise


def _expected(train: Train, client: ClientData, step: Step) -> Array:
    """The update (d,) that a client's own samples would have made without noise, in full batches: clipped sums over the public number."""
    samples = len(client.y_train)
    calm = replace(
        train, noise_multiplier=0.0, sampling_rate=0.0, batch_size=0, epochs=train.steps, lr=train.lr * samples / train.public_samples,
    )  # fmt: skip
    given = {"model": step.start} | {name: vector for name, vector in step.beside.items() if name == "anchor"}
    (result,) = Engine().run(calm, [TaskInput(client, given, {}, Streams(0, 0, client.id))])
    return np.asarray(result["update"], np.float64)


def _carried(train: Train) -> Array:
    """How far a unit gradient of each step (steps,) has carried the parameters by the end, by rate, momentum and what pulls back."""
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


def _spread(train: Train, left: float = 1.0) -> Spread:
    """What an update scatters by, in units of `_amount`; `left` is the share of the noise that is expected in it."""
    carried = _carried(train)
    steps = float(carried.sum() ** 2 / np.square(carried).sum())  # as many as would scatter as much with equal weights
    noise = train.noise_multiplier * train.clip_norm / (train.sampling_rate * np.sqrt(steps))  # in each coordinate
    return Spread(noise, left * noise, train.sampling_rate, steps)


def _estimate(train: Train, towards: Array, rest: Array, left: float = 1.0) -> Array:
    """Linear least-squares estimates (m,) of b less its mean from `rest` (d,) = towardsᵀ b + noise, in units of `_amount`.

    `towards` (m, d) are the canaries' clipped gradients, which overlap. `left` is the share of the noise that is expected in `rest`.
    """
    ridge = _spread(train, left).ridge
    return np.asarray(np.linalg.solve(towards @ towards.T + ridge * np.eye(len(towards)), towards @ rest))


def _unscored(ledger: Ledger) -> tuple[str, ...]:
    """The figures of releases that were charged and that games of whole runs do not score."""
    found = set()
    for charge in ledger.charges:
        for event in charge.events:
            if isinstance(event, ChoiceEvent):
                found.add("choice_epsilon")
            elif isinstance(event, GaussianEvent) and (event.unit == "sample" or charge.purpose == LOCAL):
                found.add("signature_epsilon")
    return tuple(sorted(found))


# --- clients --------------------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Canaries:
    """Clients that bring canaries to sums instead of what they computed, and what comes out of the sums.

    `scores` collects what the means show of each client, `exact` the same of the sums without noise. Clients and server do not know.
    """

    coins: Mapping[int, bool]
    low: float
    norm: float
    seed: int
    scores: dict[int, float] = field(default_factory=dict)
    exact: dict[int, float] = field(default_factory=dict)
    cohorts: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """Of each mean how many numbers it has, and who is in it."""

    def axis(self, client: int, size: int) -> Array:
        """A client's own direction, the same in every mean of this size."""
        draws = stream(self.seed, f"canary {size}", client=client).normal(size=size)
        return np.asarray(draws / np.linalg.norm(draws))

    def brought(self, client: int, size: int) -> Array:
        return (1.0 if self.coins[client] else self.low) * self.axis(client, size)

    def score(self, means: Sequence[GroupMean | None]) -> None:
        for mean in means:
            if mean is None:
                continue
            total = np.concatenate([np.ravel(part.value()) for part in mean.parts.values()]) * mean.count
            calm = self.norm * np.sum([self.brought(client, len(total)) for client in mean.contributors], axis=0)
            half = self.norm * (1.0 + self.low) / 2
            self.cohorts.append((len(total), tuple(mean.contributors)))
            for client in mean.contributors:
                axis = self.axis(client, len(total))
                self.scores[client] = self.scores.get(client, 0.0) + float(axis @ total) - half
                self.exact[client] = self.exact.get(client, 0.0) + float(axis @ calm) - half


class _Planted(Values):
    """A client's values, of which others see canaries; what it computes with stays its own."""

    def __init__(self, values: Values, client: int, canaries: _Canaries) -> None:
        super().__init__(values.store)
        self._client, self._canaries = client, canaries

    def parts(self, number: int, parts: tuple[str, ...]) -> dict[str, Any]:
        found = super().parts(number, parts)
        size = sum(int(np.prod(np.shape(value), dtype=int)) for value in found.values())
        vector = LONG * self._canaries.norm * self._canaries.brought(self._client, size)
        planted, start = {}, 0
        for name, value in found.items():
            stop = start + int(np.prod(np.shape(value), dtype=int))
            planted[name] = vector[start:stop].reshape(np.shape(value)).astype(value.dtype)
            start = stop
        return planted


def play_clients(config: Config, population: Population, rng: np.random.Generator, *, seconds: float = np.inf) -> tuple[Played, Game]:
    """The run of `config` (unit "client") whose clients are canaries; and the game that the same sums without noise would be."""
    simulation = prepare(_recorded(config), population=population)
    coins = {client.id: bool(rng.random() < 0.5) for client in population.clients}
    low = 0.0 if config.privacy.relation == "add_remove" else -1.0
    canaries = _Canaries(coins, low, config.privacy.clip_norm, config.run.seed)
    for client in coins:
        party = simulation.simulated.client(client)
        party.values = _Planted(party.values, client, canaries)
    federation, mean = simulation.federation, simulation.federation.mean

    def scored(*given: Any, **more: Any) -> tuple[GroupMean | None, ...]:
        means = mean(*given, **more)
        canaries.score(means)
        return means

    federation.mean = scored  # type: ignore[method-assign]  # whoever looks at what the server got
    begin(simulation)
    _rounds(simulation, config.training.rounds, seconds)
    run_ledger, seen = simulation.run_ledger, sorted(canaries.scores)
    if not seen:
        raise ValueError("no mean was released")
    assert run_ledger is not None
    tossed = np.array([coins[client] for client in seen])
    games = [Game(np.array([found[client] for client in seen]), tossed) for found in (canaries.scores, canaries.exact)]
    spent = max(run_ledger.ledger.spent(client) for client in run_ledger.ledger.clients)
    clipped = run_ledger.options(config.protection)["clipped"]
    spreads = [_claimed_noise(clipped, len(cohort)) / config.privacy.clip_norm for _, cohort in canaries.cohorts]
    trials = trials_of_means(seen, canaries.cohorts, spreads, canaries.axis, low, REPETITIONS, rng.spawn(1)[0])
    return Played(games[0], spent, len(simulation.rows), _unscored(run_ledger.ledger), None, trials), games[1]


def _claimed_noise(clipped: ClippedMean, contributors: int) -> float:
    """The standard deviation that the noise of a sum over so many contributors should have."""
    deviation = clipped.event.noise_multiplier * clipped.event.sensitivity
    if clipped.correlated is not None:  # rows of C⁻¹ are longer than one
        coefficients = clipped.correlated.coefficients
        return deviation * math.hypot(*coefficients) * math.hypot(*inverse_coefficients(coefficients, clipped.trainings))
    return deviation * math.sqrt(contributors / clipped.others) if clipped.others else deviation


def play(
    config: Config, population: Population, rng: np.random.Generator, *, reruns: int = 1, seconds: float = np.inf
) -> tuple[Played, Game, int]:
    """The run of `config` with canaries of its unit, the same without noise, and the number of reruns: the canaries of all reruns together.

    Reruns share no noise, so each coin is as private as in one rerun, and more canaries show more. At most `reruns`, within `seconds`; the
    first always runs, with fewer rounds if necessary. Later ones that fail (too few clients for a sum) are left out. Raises as
    `play_samples`, and `ValueError` for less than one rerun.
    """
    if reruns < 1:
        raise ValueError(f"play: {reruns} reruns; expected at least 1")
    began, mine, calm = time.perf_counter(), list[Played](), list[Game]()
    for number in range(reruns):
        used = time.perf_counter() - began
        if mine and used * (1 + 1 / len(mine)) > seconds:
            break
        try:
            # another seed: were the noise drawn from it (insecure_test_entropy), it would still be another's
            played, without = _pair(config.with_("run", seed=config.run.seed + number), population, rng, seconds - used)
        except (ValueError, ArithmeticError, ProtocolError):
            if not mine:
                raise
            continue
        mine.append(played)
        calm.append(without)
    games, unscored = _joined([one.game for one in mine]), {name for one in mine for name in one.unscored}
    second = [one.apart for one in mine if one.apart is not None]
    apart = _joined(second) if second else None
    repeated = [one.trials for one in mine if one.trials is not None]
    trials = joined_trials(repeated) if len(repeated) == len(mine) else None
    together = Played(games, max(one.epsilon for one in mine), min(one.rounds for one in mine), tuple(sorted(unscored)), apart, trials)
    return together, _joined(calm), len(mine)


def _pair(config: Config, population: Population, rng: np.random.Generator, seconds: float) -> tuple[Played, Game]:
    """One rerun, and the same without noise, in about `seconds`."""
    if config.privacy.unit == "client":
        return play_clients(config, population, rng, seconds=seconds)
    played = play_samples(config, population, rng, seconds=seconds / 2)
    return played, play_samples(config, population, rng, noise=NO_NOISE, seconds=seconds / 2).game


def _joined(games: Sequence[Game]) -> Game:
    return Game(np.concatenate([game.scores for game in games]), np.concatenate([game.coins for game in games]))


# --- rerunning --------------------------------------------------------------------------------------------------------------------------


def _recorded(config: Config) -> Config:
    # newcomers would need data of their own; nobody looks at accuracies here
    config = config.with_("run", record="full", record_rounds=(), record_clients=(), evaluate_every=10**9, audit_parties=("server",))
    return config.with_("data", newcomers=0)


def _started(config: Config, population: Population, noise: float) -> Run:
    demands: dict[str, Any] = {} if noise == 1.0 else {"privacy": Privacy()}  # clients would refuse less noise than they were promised
    simulation = prepare(_recorded(config), population=population, **demands)
    accounts = simulation.federation.accounts
    if noise != 1.0 and accounts is not None:
        calm = accounts.noise
        accounts.noise = replace(calm, training=calm.training * noise, signature=calm.signature * noise, choice=calm.choice / noise)
        accounts.ledger = Unpriced(LedgerBudget(1.0, config.privacy.delta, config.privacy.relation, "sample"))
    begin(simulation)
    return simulation


def _rounds(simulation: Run, rounds: int, seconds: float) -> None:
    began = time.perf_counter()
    for _ in range(rounds):
        if simulation.stopped or (simulation.rows and time.perf_counter() - began > seconds):
            break
        advance(simulation)
    simulation.simulated.engine.close()


# --- the attack -----------------------------------------------------------------------------------------------------------------------


def releases(config: Config, population: Population) -> dict[str, tuple[str, Event]]:
    """What one client of the run releases: figure -> (name of the game, its event). Means over clients are audited in the whole run
    only."""
    found: dict[str, tuple[str, Event]] = {}
    if config.privacy.unit == "client":
        if "gram" not in config.privacy.local:
            return found
        run_ledger = prepare(_recorded(config), population=population).run_ledger
        gram = None if run_ledger is None else run_ledger.options(config.protection)["local"]
        return {"signature_epsilon": ("local", gram.event)} if isinstance(gram, LocalGram) else found
    noise, relation = _noise(config, population), config.privacy.relation
    if noise.signature:
        name = config.releases().mechanism
        bound = noise.loss_cap if name == "scores" else noise.clip_norm
        moment = GaussianEvent(noise.signature, 1.0 if relation == "add_remove" else 2**0.5, relation, "sample")
        found["signature_epsilon"] = (name, moment if name == "moment" else sum_event(noise.signature, bound, relation))
    if noise.choice:
        found["choice_epsilon"] = ("choice", ChoiceEvent(noise.choice, relation, "sample"))
    if noise.training:
        steps = 1 if noise.shares else max(1, round(config.training.epochs / noise.sampling_rate))
        event = SampledGaussianEvent(noise.training, noise.sampling_rate, steps, noise.clip_norm, relation, shares=noise.shares)
        found["training_epsilon"] = ("training", event)
    return found


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """A bound for every release by itself and for the whole run, each beside its claim."""
    config = case.prior.config
    why = ""
    if config is None or config.privacy.unit == "none":
        why = "no differential privacy is claimed in this run"
    elif case.view.adversary != "server":
        why = "not attempted: audited once, with the server's view, which has all releases (--adversary server)"
    elif not case.reference.messages:
        why = "nothing is released"
    if why:
        return [nothing(case, NAME, WHOLE, why)], None
    assert config is not None
    delta, rng, population = config.privacy.delta, stream(case.seed, "dp audit"), _population(case)
    figures = []
    for metric, (name, event) in releases(config, population).items():
        mine, calm = audit_release(name, event, delta, rng, system_entropy)
        figures.append(_figure(case, metric, mine, epsilon_of([event], delta), calm, name))
    return [*figures, _whole(case, config, population, rng)], None


def audit_release(name: str, event: Event, delta: float, rng: np.random.Generator, entropy: Entropy) -> tuple[AuditResult, AuditResult]:
    """The audit of one release of the game `name`, with its power, against the price of its event; and the same without noise."""
    claim, draws = epsilon_of([event], delta), rng.spawn(1)[0]
    mine, calm = (GAMES[name](one, rng, entropy) for one in (event, quiet(event)))
    results = [audit(game.scores, game.coins, delta, claim=claim) for game in (mine, calm)]
    count = len(mine.coins)
    found = power(lambda: released(name, event, count, draws, 1 / FACTOR), count, delta, claim=claim)
    return replace(results[0], power=found), results[1]


@dataclass(frozen=True, eq=False)
class WholeAudit:
    """The audit of a whole run: its `result`, with its power, against `claim`, the same without noise, and what was rerun how often."""

    result: AuditResult
    claim: float
    calm: AuditResult
    played: Played
    reruns: int


def audit_whole(
    config: Config, population: Population, rng: np.random.Generator, *, reruns: int = 1, seconds: float = np.inf
) -> WholeAudit:
    """The audit of the run of `config`, by `play`, which raises what it raises.

    Both looks share the 5 % that may go wrong. The power is that of the first look alone: with the second an audit has no less.
    """
    delta, draws = config.privacy.delta, rng.spawn(1)[0]
    played, calm, times = play(config, population, rng, reruns=reruns, seconds=seconds)
    claim, looks = played.epsilon, [game for game in (played.game, played.apart) if game is not None]
    confidence = 1 - 0.05 / len(looks)
    found = [audit(game.scores, game.coins, delta, claim=claim, confidence=confidence) for game in looks]
    unprotected = audit(calm.scores, calm.coins, delta, claim=claim, confidence=confidence)
    result = replace(max(found, key=lambda one: one.epsilon), power=_power_of(played, calm, delta, confidence, draws))
    return WholeAudit(result, claim, unprotected, played, times)


def _power_of(played: Played, calm: Game, delta: float, confidence: float, rng: np.random.Generator) -> Power:
    """The power of the first look at a whole run."""
    if played.trials is None:
        return Power(0, 0, "unknown where clients train with Adam")
    trials = played.trials.held_against(calm)
    numbers = iter(range(len(trials.coins)))
    return power(
        lambda: trials.scores(next(numbers), 1 / FACTOR, rng), len(calm.coins), delta, claim=played.epsilon, confidence=confidence,
        repetitions=len(trials.coins),
    )  # fmt: skip


def _whole(case: Case, config: Config, population: Population, rng: np.random.Generator) -> Cell:
    try:
        whole = audit_whole(config, population, rng, reruns=case.budget.seeds, seconds=case.budget.seconds)
    except (ValueError, ArithmeticError, ProtocolError) as error:
        return nothing(case, NAME, WHOLE, f"not attempted: {error}")
    played, times = whole.played, f", {whole.reruns} times" if whole.reruns > 1 else ""
    scored = "the means over clients" if config.privacy.unit == "client" else "clients' updates"
    unscored = f"; charged but not validated by it: what has {' and '.join(played.unscored)}" if played.unscored else ""
    what = f"{played.rounds} of {config.training.rounds} rounds, rerun with canaries{times}; scored are {scored}{unscored}"
    trusted = config.privacy.unit == "client" and config.protection.sum == "none"  # the server adds the noise
    made = _figure(case, WHOLE, whole.result, whole.claim, whole.calm, what)
    return replace(made, towards="who sees the means, not single updates (the server is trusted)" if trusted else "")


def _population(case: Case) -> Population:
    """The run's clients as far as they trained."""
    clients = tuple(ClientData(client, x, y, x[:1], y[:1]) for client, (x, y) in sorted(case.truth.data.items()))
    groups = tuple(case.truth.groups.get(client.id, 0) for client in clients)
    return Population("audited", clients, groups, case.prior.classes, case.prior.mean, case.prior.std)


def _figure(case: Case, metric: str, mine: AuditResult, claim: float, calm: AuditResult, what: str) -> Cell:
    note = (
        f"{what}: a lower bound on epsilon at 95 %, {mine.correct} of {mine.guesses} guesses right on {mine.canaries} canaries; ceiling "
        f"{mine.ceiling:.2f}; baseline: what the accountant claims at delta = {case.prior.config.privacy.delta:g}; "  # type: ignore[union-attr]
        f"unprotected: the same with the noise left out; {_of_power(mine.power)}"
    )
    return Cell(
        NAME, case.view.adversary, case.protection, metric, mine.epsilon, None, None, claim, calm.epsilon, verdict(mine, claim),
        seeds=(case.seed,), note=note, reference_baseline=claim, power=None if mine.power is None or mine.power.note else mine.power.share,
        power_low=None if mine.power is None or mine.power.note else mine.power.low,
    )  # fmt: skip


def _of_power(found: Power | None) -> str:
    """The end of a note: how much a bound below the claim means."""
    if found is None or found.note:
        return f"power {found.note if found else 'unknown'}, so that a bound below the claim is inconclusive"
    return (
        f"power {found.share:.2f}, at least {found.low:.2f} at 95 %: with noise {FACTOR:g} times too small {found.alarms} of "
        f"{found.repetitions} repetitions on a reference raised an alarm; at_baseline requires {ENOUGH:g} at least"
    )
