"""Labels that are numbers: brought from their public range to −1 to 1, and what is doubtful about them."""

from collections.abc import Sequence

import numpy as np

from ..errors import InputError
from ..types import Array

__all__ = ["from_unit", "label_notes", "number_doubts", "to_unit"]


def to_unit(labels: Array, label_range: Sequence[float]) -> Array:
    """Labels (n,) as float64 in −1 to 1, which stand for the ends of the public `label_range`; others are clipped to it."""
    low, high = label_range
    return np.asarray(np.clip((labels.astype(np.float64) - low) / (high - low) * 2 - 1, -1.0, 1.0))


def from_unit(values: Array, label_range: Sequence[float]) -> Array:
    """What numbers stand for in the label's unit: the reverse of `to_unit`, also beyond −1 and 1."""
    low, high = label_range
    return np.asarray(low + (values + 1) / 2 * (high - low))


def label_notes(labels: Array, label_range: Sequence[float]) -> tuple[str, ...]:
    """A note of the range of labels (n,)."""
    low, high = label_range
    return (f"the label is a number from {low:g} to {high:g}, of which -1 to 1 of the model stand; there are {labels.size} of them",)


def number_doubts(name: str, labels: Array, label_range: Sequence[float]) -> tuple[str, ...]:
    """Warnings of labels (n,) that are clipped, that use little of their range, or that look like two classes.

    Raises `InputError` naming `name` for labels that are not finite or are all the same.
    """
    low, high = label_range
    if not np.isfinite(labels).all():
        row = int(np.flatnonzero(~np.isfinite(labels))[0])
        raise InputError(f"{name}: the label at index {row} is {labels[row]}; every label must be a finite number")
    values = np.unique(labels)
    if len(values) == 1:
        raise InputError(f"{name}: all {len(labels)} labels are {values[0]:g}, so there is nothing to learn")
    doubts = []
    beyond = int(((labels < low) | (labels > high)).sum())
    if beyond:
        doubts.append(
            f"{name}: {beyond} of {len(labels)} labels are outside data.label_range = [{low:g}, {high:g}] and were clipped to it; their "
            f"smallest is {values[0]:g}, their largest {values[-1]:g}"
        )
    bulk = float(np.quantile(labels, 0.99) - np.quantile(labels, 0.01))
    if bulk < (high - low) / 100:
        doubts.append(
            f"{name}: 98 % of the labels use {bulk / (high - low):.2g} of data.label_range = [{low:g}, {high:g}]; a narrower range makes "
            "errors of the model larger beside noise and learning rate"
        )
    if len(values) == 2:
        doubts.append(
            f"{name}: the label has two values alone, {values[0]:g} and {values[1]:g}; label_type = 'class' makes classes of them"
        )
    return tuple(doubts)
