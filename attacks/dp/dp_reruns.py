"""Reruns of a private run with canaries: how they begin and end, and what is left of them.

`dp_samples` puts canaries among clients' samples, `dp_clients` in the place of clients; `dp_run` audits what came out.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

from ...experiments.config.config import Config
from ...experiments.run.run import Experiment, advance, begin, prepare
from ...privacy.client_level import LOCAL
from ...privacy.settings import Privacy
from ...protocols.events import ChoiceEvent, GaussianEvent
from ...protocols.ledger import Ledger, PrivacyBudget
from ...types import Population
from .dp_claims import NoiseClaim
from .dp_mechanisms import CanaryGame, Unpriced
from .dp_references import GameTrials

__all__ = ["WholeRunGame", "recorded_config", "run_rounds", "started", "unscored"]


@dataclass(frozen=True, eq=False)
class WholeRunGame:
    """A whole run's game, what its ledger claims, in how many rounds, and the figures of what was paid for and is not in the game.

    `apart` is the same game scored by what a client's updates have that others' of the round have not, where there are others. `trials` are
    repetitions of the game on its reference; None where training is not linear in its noise (Adam), so that none is known.
    """

    game: CanaryGame
    claim: NoiseClaim
    rounds: int
    unscored: tuple[str, ...] = ()
    apart: CanaryGame | None = None
    trials: GameTrials | None = None


def unscored(ledger: Ledger) -> tuple[str, ...]:
    """The figures of releases that were charged and that games of whole runs do not score."""
    figures = set()
    for charge in ledger.charges:
        for event in charge.events:
            if isinstance(event, ChoiceEvent):
                figures.add("choice_epsilon")
            elif isinstance(event, GaussianEvent) and (event.unit == "sample" or charge.purpose == LOCAL):
                figures.add("signature_epsilon")
    return tuple(sorted(figures))


def recorded_config(config: Config) -> Config:
    """The configuration of a rerun that is looked at from the server's side."""
    # newcomers would need data of their own; nobody looks at accuracies here
    config = config.recording_all(audit_parties=("server",))
    return config.with_("data", newcomers=0)


def started(config: Config, population: Population, noise: float = 1.0) -> Experiment:
    """A rerun that has begun; `noise` multiplies that of every release of samples, which then costs nothing."""
    # clients that know of the guarantee would refuse less noise, and a contract that promises it would be a wrong one
    demands: dict[str, Any] = {} if noise == 1.0 else {"privacy": Privacy(), "contract": None}
    simulation = prepare(recorded_config(config), population=population, **demands)
    accounts = simulation.federation.privacy_ledger
    if noise != 1.0 and accounts is not None:
        calm = accounts.noise
        accounts.noise = replace(calm, training=calm.training * noise, signature=calm.signature * noise, choice=calm.choice / noise)
        accounts.ledger = Unpriced(PrivacyBudget(1.0, config.privacy.delta, config.privacy.relation, "sample"))
    begin(simulation)
    return simulation


def run_rounds(simulation: Experiment, rounds: int, seconds: float) -> None:
    """At most so many rounds of a rerun, in about so many seconds; one at least."""
    began = time.perf_counter()
    for _ in range(rounds):
        if simulation.stopped or (simulation.rows and time.perf_counter() - began > seconds):
            break
        advance(simulation, scored=False)
    simulation.simulated.engine.close()
