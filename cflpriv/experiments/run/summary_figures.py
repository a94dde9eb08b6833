"""What of a run's rounds is in its summary."""

__all__ = ["LAST", "MEASURED"]

LAST = 10
"""Accuracies are also averaged over those of this many last rounds that were evaluated: one round moves by points."""
MEASURED = (
    *(f"{kind}_{statistic}" for kind in ("accuracy", "local_accuracy") for statistic in ("mean", "mean_interval", "std", "worst")),
    "evaluated_clients", "balanced_accuracy", "macro_f1", "majority_accuracy", "majority_balanced_accuracy", "local_balanced_accuracy",
    "by_class",
)  # fmt: skip
"""What of the last evaluated round is in the summary."""
