"""The advice at the end of a run (`[run] advise`): its rounds, and what only the experimenter sees of it, accuracies on test data."""

from collections.abc import Mapping
from dataclasses import asdict
from itertools import count
from typing import Any

import numpy as np

from ...advice.procedure import Advised, advise
from ...advice.verdict import Advice, cannot_tell
from ...engine.device import using
from ...engine.threads import one_thread
from ...errors import InputError
from ...federation.registry import ClientsLost
from ...types import Array
from ..config.config import Config
from .loop import Experiment, device_of
from .measure import served_accuracy

__all__ = ["advised", "conclude", "test_accuracies"]


def conclude(run: Experiment) -> None:
    """Take the advice after the last round of a run that asks for it, if it has none yet."""
    if run.config.run.advise and run.advice is None and run.stopped is None:
        run.advice = _record(run, advised(run))


def advised(run: Experiment) -> Advised:
    """Train and score what could be deployed, after the last round of a simulation. Under `[privacy]` nothing is: it cannot tell."""
    if not run.config.advises:
        return Advised(cannot_tell(_under_privacy(run.config)))
    numbers = count(run.config.training.rounds)

    def begin() -> None:
        number = next(numbers)
        if number >= run.config.rounds_with_advice:
            raise InputError(f"run.advise: round {number} is beyond the {run.config.rounds_with_advice} of the session contract")
        run.federation.begin_round(number)

    plan = run.config.plan_for(run.population, run.algorithm)
    with one_thread(), using(device_of(run.config)):
        try:
            return advise(run.federation, run.algorithm, run.state, plan, begin, run.report)
        except ClientsLost as error:
            return Advised(cannot_tell(f"clients dropped out of a comparison ({error})"))


def _under_privacy(config: Config) -> str:
    return (
        f"under privacy.unit = {config.privacy.unit!r} no scores of held-out samples are released, because the budget pays for none; "
        "nothing was trained beside the run's models"
    )


def test_accuracies(run: Experiment, outcome: Advised) -> dict[str, Array]:
    """Each trained client's accuracy (clients,) on its own test data, by option. Outside the protocol."""
    clients = tuple(client for client in run.federation.clients if client not in run.newcomers)
    return {option: served_accuracy(run.simulated, served, clients) for option, served in outcome.served.items()}


def _record(run: Experiment, outcome: Advised) -> Mapping[str, Any]:
    """What summary.json has of the advice. Test accuracies are the experimenter's."""
    verdict: Advice = outcome.verdict
    return {
        "advice": verdict.advice, "decided": verdict.decided, "clear": verdict.clear, "cannot_be_told_apart": list(verdict.close),
        "held_out_accuracy": dict(verdict.means or {}), "differences": [asdict(difference) for difference in verdict.differences],
        "allowed": list(verdict.allowed), "reasons": list(verdict.reasons), "stability": outcome.stability, "clients": verdict.clients,
        "passes": outcome.passes, "client_epochs": outcome.passes * _trained_share(run), "numbers_in_sums": outcome.numbers,
        "test_accuracy": {option: _mean(values) for option, values in test_accuracies(run, outcome).items()},
    }  # fmt: skip


def _trained_share(run: Experiment) -> float:
    """The share of clients' training samples that is not held out."""
    trained = sum(client.samples for client in run.population.clients)
    held_out = sum(0 if client.held_out is None else len(client.held_out[1]) for client in run.population.clients)
    return trained / (trained + held_out)


def _mean(values: Any) -> float | None:
    return float(np.nanmean(values)) if np.isfinite(values).any() else None
