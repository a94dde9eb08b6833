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
from ..config.config import Config
from .loop import Experiment, device_of
from .measure import served_accuracy

__all__ = ["conclude"]


def conclude(run: Experiment) -> None:
    """Take the advice after the last round of a run that asks for it, if it has none yet."""
    if not run.config.run.advise or run.advice is not None or run.stopped is not None:
        return
    if not run.config.advises:
        run.advice = _record(run, Advised(cannot_tell(_under_privacy(run.config)), passes=1.0))
        return
    numbers = count(run.config.training.rounds)

    def begin() -> None:
        number = next(numbers)
        if number >= run.config.rounds_with_advice:
            raise InputError(f"run.advise: round {number} is beyond the {run.config.rounds_with_advice} of the session contract")
        run.federation.begin_round(number)

    plan = run.config.plan_for(run.population, run.algorithm)
    with one_thread(), using(device_of(run.config)):
        try:
            advised = advise(run.federation, run.algorithm, run.state, plan, begin, run.report)
        except ClientsLost as error:
            advised = Advised(cannot_tell(f"clients dropped out of a comparison ({error})"))
        run.advice = _record(run, advised)


def _under_privacy(config: Config) -> str:
    return (
        f"under privacy.unit = {config.privacy.unit!r} no scores of held-out samples are released, because the budget pays for none; "
        "nothing was trained beside the run's models"
    )


def _record(run: Experiment, advised: Advised) -> Mapping[str, Any]:
    """What summary.json has of the advice. Test accuracies are the experimenter's."""
    verdict: Advice = advised.verdict
    clients = tuple(client for client in run.federation.clients if client not in run.newcomers)
    return {
        "advice": verdict.advice, "decided": verdict.decided, "clear": verdict.clear, "cannot_be_told_apart": list(verdict.close),
        "held_out_accuracy": dict(verdict.means or {}), "differences": [asdict(difference) for difference in verdict.differences],
        "allowed": list(verdict.allowed), "reasons": list(verdict.reasons), "stability": advised.stability, "clients": verdict.clients,
        "passes": advised.passes, "client_epochs": advised.passes * _trained_share(run), "numbers_in_sums": advised.numbers,
        "test_accuracy": {option: _mean(served_accuracy(run.simulated, served, clients)) for option, served in advised.served.items()},
    }  # fmt: skip


def _trained_share(run: Experiment) -> float:
    """The share of clients' training samples that is not held out."""
    trained = sum(client.samples for client in run.population.clients)
    held_out = sum(0 if client.held_out is None else len(client.held_out[1]) for client in run.population.clients)
    return trained / (trained + held_out)


def _mean(values: Any) -> float | None:
    return float(np.nanmean(values)) if np.isfinite(values).any() else None
