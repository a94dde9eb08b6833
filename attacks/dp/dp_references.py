"""References of DP audits: the scores of each game as a sound mechanism gives them, or one with a stated share of its noise.

The power of an audit is estimated on them (`dp_audit.audit_power`), and must not depend on the audited code: noise a third as large there
would be a ninth in a rerun with a third of it, and the power would be overstated. So nothing here runs a mechanism, a task or a client.
Coins, batches and noise are drawn with NumPy from the audit's generator, clipped contributions follow from the canaries, and the rest is
the auditor's own arithmetic. `share` is the share of the noise that is left: 1 is what the event prices. Scores are those of the game of
the same name in `dp_mechanisms`, up to a common positive factor, which no guess depends on.

`GameTrials` has the scores of whole runs under a linear model of what the auditor reads: canaries by their coins and batches, noise by its
size. The model leaves out gradients that change during local steps, and the batches of other samples. They are taken from the rerun
without noise, and only where they lower the power (`held_against`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...protocols.events import AllocatedGaussianEvent, ChoiceEvent, Event, GaussianEvent, SampledGaussianEvent
from ...types import Array
from . import dp_mechanisms as games

__all__ = ["REFERENCES", "GameTrials", "Readout", "UpdateScatter", "joined_trials", "released_scores", "trials_of_means", "trials_of_steps"]

# --- one release ----------------------------------------------------------------------------------------------------------------------


def _coins(rng: np.random.Generator, canaries: int, each: int) -> Array:
    """Coins (clients, each)."""
    return rng.random((canaries // each, each)) < 0.5


def _apart(event: GaussianEvent, canaries: int, rng: np.random.Generator, share: float) -> games.CanaryGame:
    """Two values a sensitivity apart, with the event's noise: sums that are seen as they are, rows with local noise, shares, influences.

    The rounding of shares is left out: it is 0.07 % of the noise.
    """
    coins = rng.random(canaries) < 0.5
    return games.CanaryGame(coins - 0.5 + share * event.noise_multiplier * rng.normal(size=canaries), coins)


def _moment(event: GaussianEvent, canaries: int, rng: np.random.Generator, share: float) -> games.CanaryGame:
    """A second moment with symmetric noise, isotropic in the Frobenius norm, as its eigenvectors show it to the first order of the noise.

    The next order is small because known records hold the levels apart (`CLEAR`): at the full noise scores scatter as those of the game.
    """
    lines = games.lines_of(event)
    coins, size = _coins(rng, canaries, len(lines.record)), len(lines.counts)
    noise = rng.normal(size=(len(coins), size, size)) * (share * event.noise_multiplier * event.sensitivity / 2)
    brought = np.where(coins[:, :, None], lines.record, lines.other)  # `other` is zero under "add_remove"
    moments = brought.transpose(0, 2, 1) @ brought + noise + noise.transpose(0, 2, 1)  # σ/√2 off the diagonal; that is not read
    return games.CanaryGame(lines.scores(moments).ravel(), coins.ravel())


def _total(event: GaussianEvent, canaries: int, rng: np.random.Generator, share: float) -> games.CanaryGame:
    """A noisy sum, of which one coordinate is known and gives the scale."""
    swaps = event.relation == "replace_one"
    coins = _coins(rng, canaries, games.SKETCHED - 1)
    spread = event.noise_multiplier * (2.0 if swaps else 1.0)  # in norms
    count = int(np.ceil(games.CLEAR * (1 + spread)))
    own = np.where(coins, 1.0, -1.0 if swaps else 0.0) + share * spread * rng.normal(size=coins.shape)
    scale = count + share * spread * rng.normal(size=(len(coins), 1))
    return games.CanaryGame((own / scale * count - (0.0 if swaps else 0.5)).ravel(), coins.ravel())


def _training(
    event: SampledGaussianEvent | AllocatedGaussianEvent, canaries: int, rng: np.random.Generator, share: float
) -> games.CanaryGame:
    """All steps of private training at parameters that hardly move: batches drawn, clipped, summed, with noise in each step."""
    swaps = event.relation == "replace_one"
    coins = _coins(rng, canaries, games.EACH)
    if isinstance(event, AllocatedGaussianEvent):  # once in each pass
        drawn = np.full(coins.shape, event.passes)
    else:
        drawn = rng.binomial(event.steps, event.sampling_rate, size=coins.shape)
    times = drawn * np.where(coins, 1.0, -1.0 if swaps else 0.0)
    norm = 1.0 if event.shares else event.norm_bound  # of a gradient
    length = games.PIXEL * norm / np.sqrt(1 - 1 / games.LABELS)  # of a canary; its gradient is clipped together with that of the bias
    noise = np.sqrt(event.steps) * share * event.noise_multiplier * rng.normal(size=coins.shape)
    along = times * (length / np.hypot(length, 1.0)) + noise
    half = 0.0 if swaps else 0.5 * event.steps * event.sampling_rate
    return games.CanaryGame((along - half).ravel(), coins.ravel())


def _choice(event: ChoiceEvent, canaries: int, rng: np.random.Generator, share: float) -> games.CanaryGame:
    """Choices by the law of the exponential mechanism, whose ε is `1 / share` of the event's, from the same sums of losses."""
    coins = rng.random(canaries) < 0.5
    # half a cap each way, or with the record exchanged a whole one at half the rate
    chosen = rng.random(canaries) < 1 / (1 + np.exp(np.clip(np.where(coins, -0.5, 0.5) * event.epsilon / share, -700, 700)))
    return games.CanaryGame(2.0 * chosen - 1.0, coins)


REFERENCES: dict[str, Callable[..., games.CanaryGame]] = {
    "moment": _moment, "whole_moment": _apart, "total": _total, "mean": _apart, "scores": _apart, "local": _apart, "training": _training,
    "choice": _choice, "shares": _apart,
}  # fmt: skip
"""Name of a game -> (event, canaries, rng, share of the noise) -> its reference."""


def released_scores(name: str, event: Event, canaries: int, rng: np.random.Generator, share: float) -> tuple[Array, Array]:
    """Scores and coins (canaries,) of one release on its reference."""
    game = REFERENCES[name](event, canaries, rng, share)
    return game.scores, game.coins


# --- whole runs -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GameTrials:
    """Repetitions of a whole run's game on its reference, (r, m) each: `coins`, the `signal` of canaries in their scores, the full `noise`.

    `beyond` (m,) is the standard deviation of what the model leaves out.
    """

    coins: Array
    signal: Array
    noise: Array
    beyond: Array

    @classmethod
    def blank(cls, canaries: int, repetitions: int, rng: np.random.Generator) -> "GameTrials":
        """Coins, and nothing released yet."""
        signal, noise = np.zeros((2, repetitions, canaries))
        return cls(rng.random(signal.shape) < 0.5, signal, noise, np.zeros(canaries))

    def at(self, places: Array) -> "GameTrials":
        """The coins of canaries at these places (n,), of which nothing is released yet."""
        coins = self.coins[:, places]
        return GameTrials(coins, np.zeros(coins.shape), np.zeros(coins.shape), np.zeros(len(places)))

    def add(self, readout: "Readout") -> None:
        """Add what a readout estimates in its trials."""
        assert readout.trials is not None  # it has repetitions
        self.signal[:, readout.places] += readout.estimates(readout.trials.signal)
        self.noise[:, readout.places] += readout.estimates(readout.trials.noise)

    def scores(self, number: int, share: float, rng: np.random.Generator) -> tuple[Array, Array]:
        """Scores and coins (m,) of one repetition with this share of the noise."""
        rest = self.beyond * rng.normal(size=len(self.beyond))
        return self.signal[number] + share * self.noise[number] + rest, self.coins[number]

    def held_against(self, calm: games.CanaryGame) -> "GameTrials":
        """The same, made no clearer than the rerun without noise: scores are moved no further by coins, and scatter as much at least.

        Whatever is wrong with the code that was rerun can lower the power in this way, and not raise it.
        """
        ours, theirs = _clearness(self.signal, self.coins), _clearness(calm.scores, calm.coins)
        less = min(1.0, max(0.0, theirs[0]) / max(ours[0], 1e-300))
        more = max(0.0, theirs[1] - less**2 * ours[1]) ** 0.5
        return replace(self, signal=less * self.signal, beyond=np.hypot(self.beyond, more))


def _clearness(scores: Array, coins: Array) -> tuple[float, float]:
    """How far scores lie on the side of their coins, and the variance about it."""
    signs = np.where(coins, 1.0, -1.0)
    moved = float((signs * scores).mean())
    return moved, float(np.square(scores - moved * signs).mean())


def joined_trials(trials: Sequence[GameTrials]) -> GameTrials:
    """The canaries of several reruns together."""
    names = ("coins", "signal", "noise", "beyond")
    return GameTrials(*(np.concatenate([getattr(trial, name) for trial in trials], axis=-1) for name in names))


@dataclass(frozen=True)
class UpdateScatter:
    """How a client's update scatters, in units of what one sample moves it by.

    `noise`: the standard deviation of the noise in each coordinate, as claimed; `expected`: of that part of it which a score is made for.
    Batches hold a sample with probability `rate`, in `steps` steps of equal weight, or as many as scatter as much.
    """

    noise: float
    expected: float
    rate: float
    steps: float

    def ridge(self, updates: int) -> float:
        """What least squares over so many updates adds to the diagonal: the variance of noise over that of a canary.

        That of a canary is 1/4 of its coin plus that of batches.
        """
        return self.expected**2 / (0.25 + (1 - self.rate) / (self.rate * self.steps * updates)) + 1e-9


@dataclass(eq=False)
class Readout:
    """Linear least squares over all updates of the same clients, whose canaries (m,) overlap.

    `gram` (m, m): inner products of clipped gradients, `seen` (m,): of the updates with them, both summed over `updates` updates. One
    system for all tells canaries from each other better than one for each update, whose noise would outweigh them.
    """

    places: Array
    spread: UpdateScatter
    gram: Array
    seen: Array
    updates: int = 0
    trials: GameTrials | None = None

    @classmethod
    def blank(cls, places: Array, spread: UpdateScatter, trials: GameTrials | None = None) -> "Readout":
        """No update yet of canaries at these places (m,); `trials` have the coins of their repetitions."""
        return cls(places, spread, np.zeros((len(places), len(places))), np.zeros(len(places)), 0, trials)

    def add(self, towards: Array, rest: Array) -> None:
        """One more update `rest` (d,) = towardsᵀ (b less its mean) + noise, with the clipped gradients `towards` (m, d)."""
        self.gram += towards @ towards.T
        self.seen += towards @ rest
        self.updates += 1

    def estimates(self, seen: Array) -> Array:
        """Estimates (..., m) of b less its mean from sums (..., m) such as `seen`."""
        system = self.gram + self.spread.ridge(self.updates) * np.eye(len(self.gram))
        return np.asarray(np.linalg.solve(system, np.atleast_2d(seen).T).T.reshape(np.shape(seen)))


def trials_of_steps(trials: GameTrials, gram: Array, spread: UpdateScatter, swaps: bool, rng: np.random.Generator) -> GameTrials:
    """The same with one more update of a client, whose canaries' clipped gradients have the inner products `gram` (m, m).

    Each canary that is in goes through batches of its own; noise is Gaussian. Signal and noise are those of `Readout.seen`.
    """
    values, vectors = np.linalg.eigh(gram)
    steps = max(1, round(spread.steps))
    drawn = rng.binomial(steps, spread.rate, size=trials.coins.shape) / (steps * spread.rate)
    brought = drawn * np.where(trials.coins, 1.0, -1.0) if swaps else drawn * trials.coins - 0.5
    noise = rng.normal(size=brought.shape) * (spread.noise * np.sqrt(np.clip(values, 0.0, None)))
    return replace(trials, signal=trials.signal + brought @ gram, noise=trials.noise + noise @ vectors.T)


def trials_of_means(
    clients: Sequence[int], cohorts: Sequence[tuple[int, tuple[int, ...]]], spreads: Sequence[float], axis: Callable[[int, int], Array],
    low: float, repetitions: int, rng: np.random.Generator,
) -> GameTrials:  # fmt: skip
    """Trials of runs whose canaries are clients: in units of the clip, each brings its axis, or `low` times that, to every mean.

    `cohorts` has the size of each mean and who is in it, `spreads` the standard deviation that the noise of its sum should have.
    """
    trials, places = GameTrials.blank(len(clients), repetitions, rng), {client: place for place, client in enumerate(clients)}
    signal, noise, grams = trials.signal.copy(), trials.noise.copy(), dict[int, Array]()
    for (size, cohort), spread in zip(cohorts, spreads, strict=True):
        if size not in grams:
            axes = np.stack([axis(client, size) for client in clients])
            grams[size] = axes @ axes.T
        columns = [places[client] for client in cohort]
        brought = np.where(trials.coins[:, columns], 1.0, low)
        signal[:, columns] += brought @ grams[size][np.ix_(columns, columns)] - (1.0 + low) / 2
        noise[:, columns] += spread * rng.normal(size=brought.shape)
    return replace(trials, signal=signal, noise=noise)
