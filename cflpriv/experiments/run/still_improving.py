"""Whether a run ended while its score still rose, so that more rounds may serve clients better."""

from collections.abc import Mapping, Sequence
from typing import Any

from .number_scores import main_score

__all__ = ["still_improving"]

FEWEST_ROUNDS = 10
"""With fewer evaluated rounds there is no warning: two fifths of them are too few for a line."""
LEVEL = 0.01
"""The error rate of the warning, if scores fluctuate around a level independently of each other."""
LEAST_RISE = 0.02
"""Of the balanced accuracy, the accuracy or R²: a smaller rise is not worth a warning."""


def still_improving(rows: Sequence[Mapping[str, Any]], rounds: int) -> str:
    """A sentence if the score of the last evaluated rounds still rose, else "". `rounds` is their planned number.

    The rule: a line is fitted by least squares to the scores of the last two fifths of the evaluated rounds. Its slope is positive by a
    one-sided t test at `LEVEL`, and the line rises by `LEAST_RISE` or more. The score is the balanced accuracy of a round, or where there
    is none the accuracy or R². A run that has not done its `rounds` and a run of mean errors alone get no sentence.
    """
    points = [(row["round"], *_score(row)) for row in rows]
    known = [(number, value, name) for number, name, value in points if value is not None]
    if len(rows) < rounds or len(known) < FEWEST_ROUNDS or known[-1][2] == "error_mean" or known[0][2] != known[-1][2]:
        return ""
    from scipy.stats import linregress  # slow to import

    last = known[-(2 * len(known) // 5) :]
    line = linregress([number for number, _, _ in last], [value for _, value, _ in last], alternative="greater")
    first, end, name = last[0][0], last[-1][0], last[-1][2].removesuffix("_mean").replace("_", " ")
    rise = float(line.slope) * (end - first)
    if not (line.pvalue < LEVEL and rise >= LEAST_RISE):
        return ""
    words = f"{rise:.2f}" if name == "r2" else f"{100 * rise:.1f} points"
    return (
        f"the last rounds still improved: {'R²' if name == 'r2' else name} rose by {words} over rounds {first + 1} to {end + 1}; "
        f"more than training.rounds = {rounds} may serve clients better"
    )


def _score(row: Mapping[str, Any]) -> tuple[str, float | None]:
    balanced = row.get("balanced_accuracy")
    return main_score(row) if balanced is None else ("balanced_accuracy", balanced)
