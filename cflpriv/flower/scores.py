"""What a run on the command line reports, and a strategy can: scores by class, baselines, and how much noise there is beside updates."""

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

import numpy as np

from ..class_counts import FULL, as_counts, useless
from ..errors import InputError
from ..privacy.settings import noise_of_rounds

__all__ = ["CONFUSION", "clipped_share", "noise_over_run", "noise_to_signal", "useless_models", "with_class_scores"]

CONFUSION = "confusion"
"""The metric of `evaluate_fn` with the counts of k classes: k² numbers, row by row, of samples of class i that were taken for class j."""
SWAMPED = 2.0
"""Above this ratio over a run, noise swamps the signal, as on the command line."""
MOST_SHORTER = 1e-4
"""An update is clipped if it is no shorter than the bound but for rounding."""


def with_class_scores(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of `evaluate_fn`, with balanced accuracy, macro F1, recalls and the majority baseline where they have "confusion".

    Names that the metrics have stay. Raises `InputError` for counts that are none.
    """
    if CONFUSION not in metrics:
        return dict(metrics)
    listed = np.asarray(metrics[CONFUSION], np.float64).reshape(-1)
    k = isqrt(len(listed))
    if k * k != len(listed) or not 1 < k <= FULL or not np.isfinite(listed).all() or (listed < 0).any() or not listed.any():
        raise InputError(
            f"evaluate_fn: 'confusion' has {len(listed)} numbers; expected k · k counts for k classes, at most {FULL}, row by row"
        )
    counts = as_counts(listed.reshape(k, k))
    assert counts is not None
    majority = int(counts.samples.argmax())
    scores = {
        "balanced_accuracy": counts.balanced_accuracy, "macro_f1": counts.macro_f1,
        "recall": [None if np.isnan(value) else float(value) for value in counts.recalls],
        "majority_accuracy": counts.constant_accuracy(majority), "majority_balanced_accuracy": 1 / int(counts.occurring.sum()),
    }  # fmt: skip
    return {**scores, **metrics}


def useless_models(metrics: Sequence[Mapping[str, Any] | None]) -> list[str]:
    """Why the model of a cluster means nothing, as sentences, from the "confusion" of its metrics in the last round."""
    sentences = []
    for label, own in enumerate(metrics):
        listed = [] if own is None else own.get(CONFUSION, [])
        counts = as_counts(np.reshape(np.asarray(listed, np.float64), (isqrt(len(listed)), -1))) if listed else None
        if counts is not None and (words := useless(counts, f"the model of cluster {label}" if len(metrics) > 1 else "the model")):
            sentences.append(words)
    return sentences


def noise_to_signal(update: np.ndarray[Any, Any], deviation: float, clip_norm: float) -> float:
    """How much noise of this `deviation` on a mean `update` (d,) changes the loss of a client, over how much the update lowers it.

    To first order, for a client whose own update has the length `clip_norm`. The number of parameters does not enter: noise in directions
    that change no loss does no harm.
    """
    return deviation * clip_norm / max(float(np.sum(update.astype(np.float64) ** 2)), 1e-300)


def noise_over_run(ratios: Sequence[float]) -> tuple[float | None, str]:
    """The ratio of all rounds together, and a warning if noise swamps the signal."""
    if not ratios:
        return None, ""
    ratio = noise_of_rounds(ratios, len(ratios))
    if ratio <= SWAMPED:
        return ratio, ""
    return ratio, (
        f"noise swamps the signal: over the run the noise changed the loss of a client {ratio:.3g} times as much as updates can have "
        "lowered it; more clients, or a smaller noise_multiplier, lessen it"
    )


def clipped_share(lengths: Sequence[float], clip_norm: float) -> float | None:
    """The share of updates of these lengths that were scaled down to `clip_norm`; None where no update is seen."""
    return float(np.mean(np.asarray(lengths) >= clip_norm * (1 - MOST_SHORTER))) if len(lengths) else None
