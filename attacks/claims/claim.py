"""What a claim is: a published statement, the rows that its experiment measures, and a rule that turns rows into a verdict.

The rule of every claim is the same pure function, `decide`, of the claim's arms, which stand in the claim's own file with their figures and
margins. A row is one figure of one seed. Nothing here runs anything.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ..figures.significance import confidence_interval

__all__ = ["Arm", "Claim", "Finding", "Measurement", "Row", "ClaimVerdict", "decide", "findings_of"]

Word = Literal["upheld", "qualified", "refuted", "undecided"]


@dataclass(frozen=True)
class Row:
    """One figure of one seed in one arm, and what the same procedure gives without what the claim is about. NaN: could not be measured."""

    arm: str
    seed: int
    value: float
    baseline: float
    note: str = ""


Measurement = Callable[[int, str | Path | None], Sequence[Row]]
"""(seed, data directory) -> the rows of that seed, one for every arm."""


@dataclass(frozen=True)
class Arm:
    """One setting in which a statement is tried. It holds there if the gain, value less baseline averaged over seeds, is with its whole
    95 % interval at least `margin` (`holds = "above"`) or at most `margin` (`holds = "below"`); it fails if the whole interval is on the
    other side. With `lower_is_better` the figure is an error and the gain is baseline less value."""

    figure: str
    margin: float
    holds: Literal["above", "below"]
    lower_is_better: bool = False


@dataclass(frozen=True)
class Claim:
    """A published statement and the experiment that decides it.

    `seeds` are needed for any verdict but *undecided*; `assumed` is what the experiment takes for granted, the adversary's knowledge first;
    `number` is that of the list in the documentation; `needs` are data sets that have to be in the data directory.
    """

    number: int
    statement: str
    source: str
    baseline: str
    assumed: str
    arms: Mapping[str, Arm]
    measure: Measurement
    seeds: int = 5
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """An arm's outcome: means over seeds, the interval of the gain, and whether the statement holds there (None: open)."""

    arm: str
    value: float
    baseline: float
    gain: float
    low: float
    high: float
    seeds: int
    holds: bool | None


@dataclass(frozen=True)
class ClaimVerdict:
    """*upheld*: the statement holds in every arm. *refuted*: it fails in every arm. *qualified*: it holds in some and fails in others.
    *undecided*: otherwise, and with fewer seeds than the claim asks for."""

    word: Word
    findings: tuple[Finding, ...]


def findings_of(arms: Mapping[str, Arm], rows: Sequence[Row]) -> tuple[Finding, ...]:
    """The outcome of each arm that was measured. A point counts as its own interval where the gain does not vary over seeds."""
    findings = []
    for name, arm in arms.items():
        own = [row for row in rows if row.arm == name and np.isfinite(row.value - row.baseline)]
        if not own:
            continue
        gains = np.array([row.baseline - row.value if arm.lower_is_better else row.value - row.baseline for row in own])
        low, high = confidence_interval(gains)
        above, below = low >= arm.margin, high <= arm.margin
        holds = None if above == below else above == (arm.holds == "above")
        value, baseline = (float(np.mean([getattr(row, part) for row in own])) for part in ("value", "baseline"))
        findings.append(Finding(name, value, baseline, float(gains.mean()), low, high, len({row.seed for row in own}), holds))
    return tuple(findings)


def decide(arms: Mapping[str, Arm], rows: Sequence[Row], seeds: int) -> ClaimVerdict:
    """The verdict on a statement that was tried in `arms`, from its rows alone."""
    findings = findings_of(arms, rows)
    outcomes = {finding.holds for finding in findings}
    word: Word = "undecided"
    if len(findings) == len(arms) and all(finding.seeds >= seeds for finding in findings):
        if outcomes == {True}:
            word = "upheld"
        elif outcomes == {False}:
            word = "refuted"
        elif {True, False} <= outcomes:
            word = "qualified"
    return ClaimVerdict(word, findings)
