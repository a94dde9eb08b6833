"""What no local training gives: checks of a state that a client returned beside the state that it was sent, and of pairs of updates.

The Flower strategy and audits of other systems use them. Vectors (d,); accumulation in float64.
"""

import numpy as np

from .types import Array

__all__ = ["DEVIATIONS", "FEWEST_VALUES", "PROPORTIONAL", "UNRELATED", "factor_between", "kept_share", "rounding_of"]

UNRELATED = 0.3
"""A state after training keeps more of the state sent than this share."""
DEVIATIONS = 5.0
"""Coefficients are compared at so many deviations that they have for independent vectors (p < 1e-6 for noise of any size)."""
PROPORTIONAL = 1e-4
"""Largest distance of proportional updates, in lengths of the update."""
FEWEST_VALUES = 16
"""Vectors with fewer numbers are not compared: they agree by chance."""


def kept_share(after: Array, before: Array) -> tuple[float, float]:
    """The regression coefficient of the state `after` on the state `before`, and its deviation for independent vectors.

    The coefficient is near 1 after training. `before` is not zero.
    """
    a, b = (np.asarray(value, np.float64).reshape(-1) for value in (after, before))
    length = float(b @ b)
    kept = float(a @ b) / length
    return kept, float(np.linalg.norm(a - kept * b)) / float(np.sqrt(length * b.size))


def rounding_of(state: Array) -> float:
    """The length of what rounding may have added to an update that led to `state`, in the dtype of the state."""
    return float(np.sqrt(np.square(np.spacing(np.abs(np.asarray(state))), dtype=np.float64).sum()))


def factor_between(one: Array, other: Array, rounding_one: float, rounding_other: float) -> float | None:
    """The number c with one = c · other to within `PROPORTIONAL` and rounding, for updates that are not zero; None if there is none.

    Two trainings on different samples do not agree like this.
    """
    factor = float(one @ other) / float(other @ other)
    bound = PROPORTIONAL * float(np.linalg.norm(one)) + 2 * (rounding_one + abs(factor) * rounding_other)
    return factor if np.linalg.norm(one - factor * other) <= bound else None
