"""The parts of a reproduction: an entry is a published table or figure, a cell is one of its rows, a figure one number of a row."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .published import Number
from .trials import Trial

__all__ = ["METRICS", "Published", "Reproduction", "ReproductionCell", "RowFigure", "both", "run", "shape"]

METRICS: dict[str, str] = {
    "shared": "accuracy of the model a client would use (shared, cluster or personal), last evaluated rounds, %",
    "local": "accuracy of each client's last locally trained model, last evaluated rounds, %",
    "ari": "adjusted Rand index against the true groups",
    "clusters": "clusters found",
    "two_largest": "share of the clients that are in the two largest clusters",
    "choice_ari": "adjusted Rand index of the clients' choices against the true groups, last evaluation",
    "identified_from_round": "first evaluated round from which all choices stay right",
    "newcomer": "newcomers' accuracy with the model they are given, %",
    "newcomer_tuned": "newcomers' accuracy after fine-tuning, %",
    "rounds_shared": "rounds until the shared or cluster models reach the target",
    "rounds_local": "rounds until the local models reach the target",
    "megabits_shared": "megabits a client until the shared or cluster models reach the target",
    "megabits_local": "megabits a client until the local models reach the target",
    "before_split": "accuracy at the last evaluation before the first split, %",
    "perplexity": "perplexity at the end",
    "perplexity_before_split": "perplexity at the last evaluation before the first split",
    "max_norm": "largest client norm of the last round, as a share of its largest value in the run",
    "mean_norm": "norm of the mean update of the last round, as a share of its largest value in the run",
    "smallest_angle": "eq. 2, degrees",
    "corresponding_angles": "eq. 3, degrees",
    "angle_within": "eq. 2, mean over pairs of classes of one group, degrees",
    "angle_between": "eq. 2, mean over pairs of classes of two groups, degrees",
    "cosine": "mean cosine of two clients' representations",
    "bhattacharyya": "Bhattacharyya distance",
    "kl": "KL divergence",
    "mmd": "MMD",
    "success": "share of trials that recover the parameters",
    "separated": "share of trials whose bipartition is correct",
    "gap": "separation gap after the last round",
    "gap_from_round": "first round from which the gap stays positive",
    "frontier": "share of the clients on the right side of client 0's frontier",
    "score_same": "lowest score of a client of its own labels",
    "score_other": "highest score of another client",
    "speedup": "time of exact influence over lazy influence",
    "exact_seconds": "seconds, exact",
    "lazy_seconds": "seconds, lazy",
}


Published = tuple[Number, ...] | str | None
"""What was published: numbers (of `published.numbers`), words for a shape, or nothing."""


@dataclass(frozen=True)
class RowFigure:
    """One figure of a row, and all published numbers for comparison, each with its settings."""

    metric: str
    published: tuple[Number, ...] = ()


def shape(words: str) -> tuple[Number, ...]:
    """What a paper shows without a number, of an entry's own settings."""
    return (Number(words),)


@dataclass(frozen=True)
class ReproductionCell:
    """One row. `changes` are dotted keys; a `trial` is repeated `trials` times with `settings`; `thin` are keys (of the settings, for
    trials) that hold only where the cell is scaled down. `groups_of` names the cell whose found clusters stand for the true groups (for
    the control). `places` are its places in a picture over numbers: (what the axis is of, series, x).
    """

    label: str
    figures: tuple[RowFigure, ...]
    changes: Mapping[str, Any] = field(default_factory=dict)
    thin: Mapping[str, Any] = field(default_factory=dict)
    trial: Trial | None = None
    trials: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    groups_of: str = ""
    places: tuple[tuple[str, str, float], ...] = ()


@dataclass(frozen=True)
class Reproduction:
    """One table or figure. `shrinks` maps dotted keys that `--scale` multiplies to their lower bounds; `chosen` states where
    hyper-parameters come from; `with_data` maps a data set to the keys that the paper changes with it; `instead` maps a data set to what
    stands in where its files are absent; `over` is the axis of the picture: cells, numbers (the cells' `places`), or rounds (`along` is the
    plotted key of rounds.jsonl).
    """

    title: str
    source: str
    chosen: str
    cells: tuple[ReproductionCell, ...]
    base: Mapping[str, Any] = field(default_factory=dict)
    shrinks: Mapping[str, int] = field(default_factory=dict)
    with_data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)
    over: Literal["cells", "numbers", "rounds"] = "cells"
    along: str = ""

    def cell(self, label: str) -> ReproductionCell:
        """The cell of that label."""
        return next(cell for cell in self.cells if cell.label == label)


def run(label: str, algorithm: str, figures: Mapping[str, Published], **more: Any) -> ReproductionCell:
    """A cell that is a run of `algorithm`, with the hyper-parameters and other keys of `more["keys"]`."""
    keys = {(key if "." in key else f"algorithm.{key}"): value for key, value in more.pop("keys", {}).items()}
    named = tuple(
        RowFigure(metric, shape(published) if isinstance(published, str) else published or ()) for metric, published in figures.items()
    )
    return ReproductionCell(label, named, {"algorithm.name": algorithm, **keys}, **more)


def both(label: str, algorithm: str, published: Mapping[str, Published], **more: Any) -> ReproductionCell:
    """The same with both accuracies, whichever the paper printed."""
    return run(label, algorithm, {"shared": None, "local": None, **published}, **more)
