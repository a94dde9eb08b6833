"""Whole runs with clients as canaries (unit = "client"): each brings its own long vector to every mean, or zero, by its coin.

A canary's score is the component of the released means along its vector. Clipping, noise, secure sums and dropouts are the run's. Source:
Andrew et al. 2023 ("One-shot empirical privacy estimation for federated learning").
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...contract.handles import GroupMean
from ...experiments.config.config import Config
from ...experiments.run.run import begin, prepare
from ...federation.values import Values
from ...privacy.client_level import ClippedMean
from ...protocols.banded import inverse_coefficients
from ...randomness import stream
from ...types import Array, Population
from .dp_audit import REPETITIONS
from .dp_claims import claim_of_clients
from .dp_mechanisms import LONG, CanaryGame
from .dp_references import trials_of_means
from .dp_reruns import WholeRunGame, recorded_config, run_rounds, unscored

__all__ = ["rerun_clients"]


@dataclass(eq=False)
class _Canaries:
    """Clients that bring canaries to sums instead of what they computed, and what comes out of the sums.

    `scores` collects what the means show of each client, `exact` the same of the sums without noise, in units of the clip norm. Clients and
    server do not know.
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
            total = np.concatenate([np.ravel(part.value()) for part in mean.parts.values()]) * (mean.count / self.norm)
            calm = np.sum([self.brought(client, len(total)) for client in mean.contributors], axis=0)
            half = (1.0 + self.low) / 2
            self.cohorts.append((len(total), tuple(mean.contributors)))
            for client in mean.contributors:
                axis = self.axis(client, len(total))
                self.scores[client] = self.scores.get(client, 0.0) + float(axis @ total) - half
                self.exact[client] = self.exact.get(client, 0.0) + float(axis @ calm) - half


def _plant(values: Values, client: int, canaries: _Canaries) -> None:
    """Let a client's values show canaries where parts leave it; what it computes with stays its own.

    The values stay the same object, which several parts of a client hold.
    """
    own = values.parts

    def shown(number: int, parts: tuple[str, ...]) -> dict[str, Any]:
        arrays = own(number, parts)
        size = sum(int(np.prod(np.shape(array), dtype=int)) for array in arrays.values())
        vector = LONG * canaries.norm * canaries.brought(client, size)
        planted, start = {}, 0
        for name, array in arrays.items():
            stop = start + int(np.prod(np.shape(array), dtype=int))
            planted[name] = vector[start:stop].reshape(np.shape(array)).astype(array.dtype)
            start = stop
        return planted

    values.parts = shown  # type: ignore[method-assign]
    values.value = lambda held: own(held.held, (held.part,))[held.part]  # type: ignore[method-assign]


def rerun_clients(
    config: Config, population: Population, rng: np.random.Generator, *, seconds: float = np.inf
) -> tuple[WholeRunGame, CanaryGame]:
    """The run of `config` (unit "client") whose clients are canaries; and the game that the same sums without noise would be."""
    simulation = prepare(recorded_config(config), population=population)
    coins = {client.id: bool(rng.random() < 0.5) for client in population.clients}
    low = 0.0 if config.privacy.relation == "add_remove" else -1.0
    canaries = _Canaries(coins, low, config.privacy.clip_norm, config.run.seed)
    for client in coins:
        _plant(simulation.simulated.client(client).values, client, canaries)
    federation, mean = simulation.federation, simulation.federation.mean

    def scored(*args: Any, **more: Any) -> tuple[GroupMean | None, ...]:
        means = mean(*args, **more)
        canaries.score(means)
        return means

    federation.mean = scored  # type: ignore[method-assign]  # whoever looks at what the server got
    begin(simulation)
    run_rounds(simulation, config.training.rounds, seconds)
    run_ledger, seen = simulation.run_ledger, sorted(canaries.scores)
    if not seen:
        raise ValueError("no mean was released")
    assert run_ledger is not None
    tossed = np.array([coins[client] for client in seen])
    games = [CanaryGame(np.array([scores[client] for client in seen]), tossed) for scores in (canaries.scores, canaries.exact)]
    claim = claim_of_clients([run_ledger.ledger.events(client) for client in run_ledger.ledger.clients], config.privacy.delta)
    clipped = run_ledger.options(config.protection)["clipped"]
    spreads = [_claimed_noise(clipped, len(cohort)) / config.privacy.clip_norm for _, cohort in canaries.cohorts]
    trials = trials_of_means(seen, canaries.cohorts, spreads, canaries.axis, low, REPETITIONS, rng.spawn(1)[0])
    return WholeRunGame(games[0], claim, len(simulation.rows), unscored(run_ledger.ledger), None, trials), games[1]


def _claimed_noise(clipped: ClippedMean, contributors: int) -> float:
    """The standard deviation that the noise of a sum over so many contributors should have."""
    deviation = clipped.event.noise_multiplier * clipped.event.sensitivity
    if clipped.correlated is not None:  # rows of C⁻¹ are longer than one
        coefficients = clipped.correlated.coefficients
        return deviation * math.hypot(*coefficients) * math.hypot(*inverse_coefficients(coefficients, clipped.trainings))
    return deviation * math.sqrt(contributors / clipped.others) if clipped.others else deviation
