"""Means of updates that no local training gives: clients that return updates, gradients or weighted arrays in place of the model."""

import numpy as np

from ..types import Array

__all__ = ["doubt_of"]

FEWEST_NUMBERS = 64
UNRELATED, SCALED = 0.3, 2.0
"""A model after training keeps more of the model sent than the first, and is no multiple of it beyond the second."""
DEVIATIONS = 5.0


def doubt_of(model: Array, update: Array) -> str:
    """Why the mean `update` (d,) cannot come from training that began at `model` (d,), as a sentence; "" if it can.

    The regression coefficient of the new model on the old one is near 1 after training. It is compared at `DEVIATIONS` deviations that it
    has for independent vectors.
    """
    old, length = model.astype(np.float64), float(np.linalg.norm(model))
    if len(old) < FEWEST_NUMBERS or length == 0:
        return ""
    new = old + update
    kept = float(old @ new) / length**2
    deviation = float(np.linalg.norm(new - kept * old)) / (length * np.sqrt(len(old)))
    if DEVIATIONS * deviation < UNRELATED and kept < UNRELATED:
        return (
            "what clients returned has nothing in common with the model that they were sent, or is its opposite; do they return updates or "
            "gradients in place of the trained arrays, or train a model of their own?"
        )
    if kept - DEVIATIONS * deviation > SCALED:
        return f"what clients returned is {kept:.3g} times the model that they were sent; do they multiply arrays by a number of examples?"
    return ""
