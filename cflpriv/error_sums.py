"""Scores of a regression from sums over samples: R², errors, the baseline of a constant, and whether a model predicts anything at all.

Sums are an array "errors" (6,) over a client's test samples, of the label y and the prediction p: (y − p)², |y − p|, y, y², p and p². The
sums of several clients add up to those of all their samples. Numbers are the model's: the label's public range is −1 to 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from .types import Array

__all__ = ["LEARNED", "SUMS", "ErrorSums", "error_sums", "pooled_errors", "sums_these", "useless_numbers"]

SUMS = 6
LEARNED = 0.05
"""A model that explains less than this share of the variance is called hardly better than a constant."""
VARIES = 1e-4
"""A model whose predictions deviate by less than this share of the labels' deviation predicts a constant."""


@dataclass(frozen=True)
class ErrorSums:
    """The sums of `count` samples, see above."""

    count: float
    squared: float
    absolute: float
    labels: float
    labels_squared: float
    predictions: float
    predictions_squared: float

    @property
    def variation(self) -> float:
        """The sum of squared distances of the labels from their mean."""
        return max(0.0, self.labels_squared - self.labels**2 / self.count)

    @property
    def r2(self) -> float:
        """1 − Σ(y − p)² / Σ(y − ȳ)²; NaN where the labels do not vary."""
        return 1 - self.squared / self.variation if self._labels_vary else float("nan")

    @property
    def root_mean_square(self) -> float:
        return sqrt(self.squared / self.count)

    @property
    def mean_absolute(self) -> float:
        return self.absolute / self.count

    def constant_error(self, value: float) -> float:
        """The root mean square error of a prediction that is always `value`."""
        return sqrt(max(0.0, self.labels_squared - 2 * value * self.labels + self.count * value**2) / self.count)

    @property
    def constant(self) -> bool:
        """Whether all samples get one prediction, up to rounding, although their labels differ."""
        spread = max(0.0, self.predictions_squared - self.predictions**2 / self.count)
        return self._labels_vary and spread < VARIES**2 * self.variation

    @property
    def _labels_vary(self) -> bool:
        return self.variation > 1e-12 * max(self.labels_squared, 1e-300)


def error_sums(labels: Array, predictions: Array) -> Array:
    """The sums (6,) float64 of labels (n,) and predictions (n,)."""
    y, p = labels.astype(np.float64), predictions.astype(np.float64)
    error = y - p
    return np.array([np.square(error).sum(), np.abs(error).sum(), y.sum(), np.square(y).sum(), p.sum(), np.square(p).sum()])


def sums_these(errors: Array, count: float) -> bool:
    """Whether an array, which another party may have made, can be the sums of `count` labels within −1 and 1."""
    if errors.shape != (SUMS,) or not np.isfinite(errors).all():
        return False
    squared, absolute, labels, labels_squared, predictions, predictions_squared = map(float, errors)
    near = 1 + 1e-9
    pairs = ((absolute, squared), (labels, labels_squared), (predictions, predictions_squared))  # Cauchy-Schwarz
    return min(squared, absolute) >= 0 and labels_squared <= count * near and all(a * a <= count * b * near + 1e-300 for a, b in pairs)


def pooled_errors(results: Sequence[Mapping[str, Any]]) -> ErrorSums | None:
    """The sums over the clients of some results; None where a result has none, or nothing was tested."""
    rows = [(float(result["count"]), np.asarray(result["errors"])) for result in results if "errors" in result and "count" in result]
    count = sum(row for row, _ in rows)
    if len(rows) < len(results) or not count:
        return None
    return ErrorSums(count, *map(float, np.sum([errors for _, errors in rows], axis=0)))


def useless_numbers(sums: ErrorSums, who: str) -> str:
    """Why a model's errors mean nothing, as a sentence; "" for a model that learned something. `who`: whose model, as the subject."""
    total = int(sums.count)
    if sums.constant:
        return f"{who} predicts one number for all {total} test samples, whose labels differ; it learned nothing that tells samples apart"
    if sums.r2 < LEARNED:  # false for NaN
        explained = f"explains {sums.r2:.1%} of the variance" if sums.r2 > 0 else "explains none of the variance"
        return f"{who} {explained} of the labels of {total} test samples (R² {sums.r2:.3f}); predicting their mean is hardly worse"
    return ""
