"""Own metrics: functions of predictions and labels, which a plugin registers and `[run] metrics` names.

A metric is computed wherever accuracy by class is: on the test samples of all evaluated clients together, with the model that each client
uses. Nothing more crosses a trust boundary for it: predictions and labels are made from the counts of samples by class.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ..class_counts import FULL, ClassCounts
from ..errors import InputError, near
from ..plugins import METRICS
from ..types import Array

__all__ = ["Metric", "check_metrics", "register_metric", "value_of"]

Metric = Callable[[Array, Array], float]
"""metric(predictions (n,), labels (n,)) -> a number; both int64 class numbers, in no order that means anything."""


def register_metric(name: str, metric: Metric) -> None:
    """Add a metric under the name that `[run] metrics` has; results have it as `metric_NAME`.

    `metric(predictions, labels)` takes two arrays (n,) of class numbers and returns one number. The order of the samples means nothing.
    Raises `InputError` if the name is that of another metric, or is no name of letters, digits and underscores.
    """
    if not name.isidentifier():
        raise InputError(f"metric {name!r}: expected a name of letters, digits and underscores")
    METRICS.add(name, metric)


def check_metrics(names: Sequence[str], classes: int | None = None) -> None:
    """Raises `InputError` naming a metric of `[run] metrics` that is not known, or data of too many classes."""
    for name in names:
        if METRICS.find(name) is None:
            raise InputError(f"run.metrics = {list(names)}: {name!r} is not known{near(name, METRICS.names())}")
    if names and classes is not None and classes > FULL:
        raise InputError(f"run.metrics = {list(names)}: the data have {classes} classes; own metrics are computed for up to {FULL}")


def value_of(name: str, counts: ClassCounts) -> float | None:
    """A metric of counted samples; None for a number that is not finite. Raises `InputError` naming a metric that fails."""
    pairs, metric = counts.pairs(), METRICS.find(name)
    if pairs is None or metric is None:
        return None
    try:
        value = float(metric(*pairs))
    except Exception as error:
        raise InputError(f"metric {name!r}: {type(error).__name__}: {error}") from None
    return value if np.isfinite(value) else None
