"""The plan of an audit and an estimate of its duration, printed before it starts and corrected as it runs."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...protocols.bounded_files import LARGEST_TABLE_BYTES, parse_json, read_text
from .leakage import Budget

__all__ = ["Clock", "AuditPlan", "plan_of", "spoken", "unscored_seconds"]

MOST_BYTES = 1 << 30
"""Payloads of a run that is made again for the audit; beyond this it has fewer rounds."""
SEED_STEP = 1000
ATTACK_SECONDS = 0.5
"""Estimated seconds of an attack on one run, from audits of small runs; `Clock` replaces it by measurements."""


@dataclass(frozen=True)
class AuditPlan:
    """The `seeds` that are attacked, that of the recorded run first, each for so many `rounds` (`cut`: fewer than were recorded).

    For the recorded run `here` runs are made (0 or 1: its unprotected twin), for each fresh seed `each` (itself, and its twin if it is
    protected); one takes about `seconds`. Attacks that rerun the configuration themselves, once, take about `rerun_seconds`.
    """

    seeds: tuple[int, ...]
    rounds: int
    cut: bool
    here: int
    each: int
    seconds: float
    rerun_seconds: float = 0.0

    def runs(self, todo: Sequence[int]) -> int:
        """How many runs the seeds `todo` need."""
        return sum(self.here if seed == self.seeds[0] else self.each for seed in todo)

    def estimate(self, todo: Sequence[int], attacks: int) -> float:
        """Seconds, for the seeds `todo` and so many attacks on each."""
        rerun_seconds = self.rerun_seconds if self.seeds[0] in todo else 0.0
        return self.runs(todo) * self.seconds + attacks * len(todo) * ATTACK_SECONDS + rerun_seconds

    def line(self, budget: str, todo: Sequence[int], attacks: int, adversaries: Sequence[str]) -> str:
        """One line for people."""
        if not todo:
            return f"{budget} audit: all of it was done before"
        runs = self.runs(todo)
        made = f"{runs} run{'s' if runs > 1 else ''} of {spoken(self.seconds)}" if runs else "no run to make"
        seeds = f"{len(todo)} seed{'s' if len(todo) > 1 else ''}" + ("" if len(todo) == len(self.seeds) else f" of {len(self.seeds)} left")
        some = f"{attacks} attack{'s' if attacks > 1 else ''} on each ({', '.join(adversaries)})"
        short = f"; the first {self.rounds} round(s) only, as the run is long" if self.cut else ""
        return f"{budget} audit, about {spoken(self.estimate(todo, attacks))}: {seeds}, {made}, {some}{short}"


def plan_of(summary: Mapping[str, Any], seed: int, *, size: int, is_open: bool, is_whole: bool, budget: Budget) -> AuditPlan:
    """The plan for a run with this `summary`, whose payloads take about `size` bytes.

    `is_open`: nothing protects it; `is_whole`: so that, all payloads being recorded, it is its own unprotected twin.
    """
    rounds, seconds = int(summary["rounds"]), max(float(summary["seconds"]), 1e-3)
    each = 1 if is_open else 2
    kept = max(1, min(rounds, int(rounds * budget.seconds / seconds), rounds * MOST_BYTES // max(size, 1))) if rounds else 0
    fresh = 0 if kept < rounds else min(budget.seeds - 1, int(budget.seconds / (seconds * each)))
    seeds = tuple(seed + SEED_STEP * number for number in range(1 + fresh))
    return AuditPlan(seeds, kept, kept < rounds, 0 if is_whole else 1, each, seconds * kept / max(rounds, 1))


def unscored_seconds(folder: Path, summary: Mapping[str, Any]) -> float:
    """What a recorded run with this `summary` took without its evaluations, which runs that an audit makes again leave out.

    Evaluations count as training where the rows of the run are not there, or do not say what evaluations took.
    """
    try:
        rows = [parse_json(line) for line in read_text(folder / "rounds.jsonl", LARGEST_TABLE_BYTES).splitlines()]
        spent = sum(float(row.get("scoring_seconds", 0.0)) for row in rows)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        spent = 0.0
    return max(float(summary["seconds"]) - max(spent, 0.0), 0.0)


@dataclass(eq=False)
class Clock:
    """How long is left, by what the seeds that this call has finished took beside what was expected of them."""

    plan: AuditPlan
    todo: Sequence[int]
    attacks: int
    began: float = field(default_factory=time.perf_counter)

    def line(self, seed: int) -> str:
        """When the work on `seed` starts: which one it is and what is left; before one is finished only what was expected is known."""
        number = self.todo.index(seed)
        where = f"seed {seed}, {number + 1} of {len(self.todo)}"
        if not number:
            return where
        rate = (time.perf_counter() - self.began) / self.plan.estimate(self.todo[:number], self.attacks)
        return f"{where}; about {spoken(rate * self.plan.estimate(self.todo[number:], self.attacks))} left"


def spoken(seconds: float) -> str:
    """A duration for people."""
    if seconds < 100:
        return f"{max(seconds, 0.1):.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 100 * 60 else f"{seconds / 3600:.1f} hours"
