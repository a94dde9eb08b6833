"""Scores by class from counts of samples: balanced accuracy, macro F1, recalls, baselines, and whether a model predicts anything at all.

Counts are an array "confusion". With up to `FULL` classes it is (k, k): row i, column j has the samples of class i that were taken for
class j. With up to `MARGINS` classes it is (3, k): samples of each class, predictions of each class, right predictions of each class. With
more classes nothing is counted. The sum of the counts of several clients is the count of all their samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log, sqrt
from typing import Any

import numpy as np

from .types import Array

__all__ = [
    "ERROR_RATE", "FULL", "LEARNED", "LEARN_MORE", "MARGINS", "ClassCounts", "as_counts", "counts_shape", "counts_these", "pooled",
    "useless",
]  # fmt: skip

FULL, MARGINS = 100, 1000
LEARN_MORE = "raise training.rounds or training.lr, narrow the ranges of columns, or train clusters where clients contradict each other"
"""What may help a model that learned nothing."""
LEARNED, ERROR_RATE = 0.1, 0.01
"""A model is called hardly better than the majority class if its balanced accuracy gained less than the share `LEARNED` of the possible.
At a model that gained so much or more, the warning comes with a probability of at most `ERROR_RATE`, over independent test samples."""


@dataclass(frozen=True, eq=False)
class ClassCounts:
    """Samples, predictions and right predictions by class, each (k,); `matrix` (k, k) where the counts have one."""

    samples: Array
    predictions: Array
    right: Array
    matrix: Array | None

    @property
    def occurring(self) -> Array:
        """Which classes have samples (k,) bool: the others have no recall."""
        return np.asarray(self.samples > 0)

    @property
    def recalls(self) -> Array:
        """The share of each class's samples that is right (k,); NaN for a class without samples."""
        return np.where(self.occurring, self.right / np.maximum(self.samples, 1), np.nan)

    @property
    def balanced_accuracy(self) -> float:
        """The mean recall over classes that have samples. A constant prediction gets one over their number."""
        return float(np.nanmean(self.recalls))

    @property
    def macro_f1(self) -> float:
        """The mean of 2·right / (samples + predictions) over classes that have samples or predictions, as scikit-learn's `f1_score`."""
        whole = self.samples + self.predictions
        return float(np.mean((2 * self.right[whole > 0]) / whole[whole > 0]))

    @property
    def constant(self) -> int | None:
        """The class that all samples are taken for, where samples of another class are among them; else None."""
        taken = np.flatnonzero(self.predictions)
        return int(taken[0]) if len(taken) == 1 and self.samples.sum() > self.samples[taken[0]] else None

    def constant_accuracy(self, label: int) -> float:
        """The accuracy of a prediction that is always `label`."""
        return float(self.samples[label] / self.samples.sum())

    @property
    def upper(self) -> float:
        """An upper bound of the balanced accuracy on further samples: too low with a probability of at most `ERROR_RATE`.

        The lower of two bounds, each at half the rate: that of Hoeffding (1963, theorem 2) for the weighted mean of all samples, and the
        mean of exact bounds of the recalls (Clopper and Pearson, 1934), which is tight where recalls are near 0 or 1.
        """
        from scipy.special import betaincinv  # takes long to load, and only models that learned little need it

        samples, right = self.samples[self.occurring], self.right[self.occurring]
        k = len(samples)
        hoeffding = self.balanced_accuracy + sqrt(log(2 / ERROR_RATE) / 2 * float(np.sum(1 / samples))) / k
        exact = np.where(right < samples, betaincinv(right + 1, np.maximum(samples - right, 1), 1 - ERROR_RATE / (2 * k)), 1.0)
        return float(min(hoeffding, exact.mean()))

    @property
    def shown_useless(self) -> bool:
        """Whether the samples show that no more than the share `LEARNED` of the possible balanced accuracy was gained."""
        k = int(self.occurring.sum())
        least = 1 / max(k, 1) + LEARNED * (1 - 1 / max(k, 1))
        return k > 1 and self.balanced_accuracy < least and self.upper < least

    def pairs(self) -> tuple[Array, Array] | None:
        """The predicted class and the label of each sample, each (n,) int64, in no order that means anything; None without a matrix."""
        if self.matrix is None:
            return None
        each = self.matrix.astype(np.int64).ravel()
        place = np.repeat(np.arange(len(each)), each)
        return place % len(self.samples), place // len(self.samples)


def as_counts(confusion: Array) -> ClassCounts | None:
    """Counts as described above; None where nothing was counted."""
    counts = np.asarray(confusion, dtype=np.float64)
    if counts.ndim != 2 or not counts.sum():
        return None
    if counts.shape[0] == counts.shape[1] and counts.shape[1] <= FULL:
        return ClassCounts(counts.sum(1), counts.sum(0), np.diag(counts).copy(), counts)
    return ClassCounts(counts[0], counts[1], counts[2], None)


def counts_shape(classes: int) -> tuple[int, int]:
    """The shape of the counts of so many classes."""
    return (classes, classes) if classes <= FULL else (3, classes) if classes <= MARGINS else (0, 0)


def counts_these(confusion: Array, correct: float, count: float, classes: int) -> bool:
    """Whether an array, which another party may have made, counts `count` samples, `correct` of them right."""
    if confusion.shape != counts_shape(classes) or not np.isfinite(confusion).all():
        return False
    if (confusion < 0).any() or (confusion != np.floor(confusion)).any():
        return False
    counts = as_counts(confusion)
    if counts is None:
        return count == 0
    sums = [counts.samples.sum(), counts.predictions.sum()]
    return bool(sums == [count, count] and counts.right.sum() == correct and (counts.right <= counts.samples).all())


def pooled(results: Sequence[Mapping[str, Any]]) -> Array | None:
    """The sum of the counts of several clients' results; None where a result has none."""
    counts = [np.asarray(result["confusion"]) for result in results if "confusion" in result]
    if not counts or len(counts) < len(results) or len({array.shape for array in counts}) > 1:
        return None
    return np.asarray(np.sum(counts, axis=0))


def useless(counts: ClassCounts, who: str, names: Sequence[str] = (), majority: int | None = None) -> str:
    """Why a model's accuracy means nothing, as a sentence; "" for a model that learned something, or for too few samples to tell.

    Either all samples are taken for one class while others occur, which is a fact, or the balanced accuracy is hardly better than that of
    the majority class: `upper` is below what a model that gained `LEARNED` of the possible would have. `who`: whose model, as the subject.
    """
    total, k = int(counts.samples.sum()), int(counts.occurring.sum())
    if k < 2:
        return ""

    def named(label: int) -> str:
        return repr(names[label]) if label < len(names) else str(label)

    label = counts.constant
    if label is not None:
        return (
            f"{who} predicts class {named(label)} for all {total} test samples, and {total - int(counts.samples[label])} are of "
            f"other classes: accuracy {counts.constant_accuracy(label):.1%} is the share of that class, and balanced accuracy {1 / k:.1%} "
            f"that of any constant prediction, so it learned nothing that tells classes apart; {LEARN_MORE}"
        )
    if counts.shown_useless:
        accuracy = float(counts.right.sum()) / total
        beside = "" if majority is None else f", whose accuracy is {counts.constant_accuracy(majority):.1%}"
        return (
            f"{who} is hardly better than always predicting the majority class{beside}: accuracy {accuracy:.1%}, balanced accuracy "
            f"{counts.balanced_accuracy:.1%} where a constant prediction has {1 / k:.1%} (error rate of this warning {ERROR_RATE:.0%}); "
            f"{LEARN_MORE}"
        )
    return ""
