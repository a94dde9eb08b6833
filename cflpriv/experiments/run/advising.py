"""The end of a run: the advice (`[run] advise`) and own mixtures (`[training] mixture`), with scores on test data, which only the
experimenter sees."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from ...advice.procedure import Advised, advise, own_mixture
from ...advice.verdict import LOCAL, ONE, ONE_MIXTURE, Advice, cannot_tell
from ...class_counts import LEARN_MORE, LEARNED, MARGINS, as_counts, pooled
from ...engine import Result
from ...engine.device import using
from ...engine.threads import one_thread
from ...federation.registry import ClientsLost
from ...protocols.errors import TooFewClients
from ..config.config import Config
from .loop import Experiment, device_of
from .measure import scores_of, served_results

__all__ = ["advised", "conclude", "not_learned", "score_of", "test_results"]

ACCURACY, BALANCED = "accuracy", "balanced accuracy"
"""What the advice goes by: balanced accuracy, as the report, and the mean accuracy of clients where there are too many classes for it."""


def conclude(run: Experiment) -> None:
    """After the last round: the advice of a run that asks for it, and clients' own mixtures, where they are not there yet."""
    if run.stopped is not None:
        return
    if run.config.run.advise and run.advice is None:
        run.advice = _record(run, advised(run))
    if run.config.training.mixture and run.mixture is None:
        run.mixture = _mixture(run)


def advised(run: Experiment) -> Advised:
    """Train and score what could be deployed, after the last round of a simulation. Under `[privacy]` nothing is: it cannot tell."""
    if not run.config.scores_held_out:
        return Advised(cannot_tell(_under_privacy(run.config)))
    plan = run.config.plan_for(run.population, run.algorithm)
    with one_thread(), using(device_of(run.config)):
        try:
            outcome = advise(run.federation, run.algorithm, run.state, plan, _rounds_after(run), run.report)
        except ClientsLost as error:
            return Advised(cannot_tell(f"clients dropped out of a comparison ({error})"))
    last: Mapping[str, Any] = next((row for row in reversed(run.rows) if row.get("by_class")), {})
    doubt = not_learned(last, outcome.verdict.means or {})
    return replace(outcome, verdict=replace(outcome.verdict, decided=False, clear=False, reasons=(doubt,))) if doubt else outcome


def not_learned(row: Mapping[str, Any], held_out: Mapping[str, float]) -> str:
    """Why the options of an advice, with these balanced accuracies on held-out samples, tell nothing; "" where something was learned.

    Nothing was learned where neither the run's models, by the round's `row`, nor any option gained the share `LEARNED` of the possible
    balanced accuracy.
    """
    counts = as_counts(np.array(row["by_class"]["counts"])) if row.get("by_class") else None
    if counts is None or not held_out:
        return ""
    k = int(counts.occurring.sum())
    best = max(counts.balanced_accuracy, *held_out.values())
    if k < 2 or best >= 1 / k + LEARNED * (1 - 1 / k):
        return ""
    return (
        f"no model has learned: the best balanced accuracy of all options is {best:.1%}, and a constant answer has {1 / k:.1%}; "
        f"{LEARN_MORE}, then advise again"
    )


def _rounds_after(run: Experiment) -> Callable[[], None]:
    """Begins the next of the rounds that the session contract has after those of training."""
    numbers = iter(range(run.config.training.rounds, run.config.rounds_with_scores))

    def begin() -> None:
        run.federation.begin_round(next(numbers))

    return begin


def _mixture(run: Experiment) -> Mapping[str, Any]:
    """What summary.json has of clients' own mixtures."""
    plan = run.config.plan_for(run.population, run.algorithm)
    with one_thread(), using(device_of(run.config)):
        try:
            outcome = own_mixture(run.federation, run.algorithm, run.state, plan, _rounds_after(run))
        except TooFewClients as error:
            return {"reason": f"a sum over all clients failed ({error})", "held_out_accuracy": {}, "test_accuracy": {}, "differences": []}
    names = {LOCAL: LOCAL, ONE: "models of the run", ONE_MIXTURE: "own mixture"}
    verdict = outcome.verdict
    return {
        "reason": "; ".join(verdict.reasons),
        "held_out_accuracy": {names[option]: mean for option, mean in (verdict.means or {}).items()},
        "differences": [
            asdict(replace(pair, better=names[pair.better], other=names[pair.other])) for pair in verdict.differences
        ],
        "score": _score_name(run),
        "test_accuracy": {names[option]: score_of(results) for option, results in test_results(run, outcome).items()},
        "client_epochs": outcome.passes * _trained_share(run), "numbers_in_sums": outcome.numbers,
    }  # fmt: skip


def _under_privacy(config: Config) -> str:
    return (
        f"under privacy.unit = {config.privacy.unit!r} no scores of held-out samples are released, because the budget pays for none; "
        "nothing was trained beside the run's models"
    )


def test_results(run: Experiment, outcome: Advised) -> dict[str, list[Result]]:
    """What each trained client's evaluation gives on its own test data, by option. Outside the protocol."""
    clients = tuple(client for client in run.federation.clients if client not in run.newcomers)
    return {option: served_results(run.simulated, served, clients) for option, served in outcome.served.items()}


def score_of(results: Sequence[Result]) -> float | None:
    """The balanced accuracy of all clients' samples together, or clients' mean accuracy where no class is counted; None without any."""
    array = pooled(results)
    counts = None if array is None else as_counts(array)
    if counts is not None:
        return counts.balanced_accuracy
    accuracies = scores_of(results)[0]
    return float(np.nanmean(accuracies)) if np.isfinite(accuracies).any() else None


def _score_name(run: Experiment) -> str:
    return BALANCED if run.population.classes <= MARGINS else ACCURACY


def _record(run: Experiment, outcome: Advised) -> Mapping[str, Any]:
    """What summary.json has of the advice. Test accuracies are the experimenter's."""
    verdict: Advice = outcome.verdict
    return {
        "advice": verdict.advice, "decided": verdict.decided, "clear": verdict.clear, "cannot_be_told_apart": list(verdict.close),
        "held_out_accuracy": dict(verdict.means or {}), "differences": [asdict(difference) for difference in verdict.differences],
        "allowed": list(verdict.allowed), "reasons": list(verdict.reasons), "stability": outcome.stability, "clients": verdict.clients,
        "passes": outcome.passes, "client_epochs": outcome.passes * _trained_share(run), "numbers_in_sums": outcome.numbers,
        "score": _score_name(run),
        "test_accuracy": {option: score_of(results) for option, results in test_results(run, outcome).items()},
    }  # fmt: skip


def _trained_share(run: Experiment) -> float:
    """The share of clients' training samples that is not held out."""
    trained = sum(client.samples for client in run.population.clients)
    held_out = sum(0 if client.held_out is None else len(client.held_out[1]) for client in run.population.clients)
    return trained / (trained + held_out)
