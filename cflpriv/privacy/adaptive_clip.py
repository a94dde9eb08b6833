"""Adaptive clipping at the client level: the clip norm follows a quantile of the norms of clients' contributions.

With each contribution Δ goes one number, ½ if Δ is shorter than the clip norm C and −½ otherwise. The sum of these is a noisy count of the
clients below C, b̃ is their share, and the next clip norm is C · exp(−rate · (b̃ − quantile)).

The count is one more coordinate of the same sum, times `scale`, so that noise of one deviation on all coordinates is the two noises of the
paper: σ_b on the count and z_Δ · C on the contributions, with z_Δ = (z⁻² − (2σ_b)⁻²)^(−½). Contribution and count together are no longer
than √(C² + scale²/4), of which the noise is z times. So a sum costs what it costs with a fixed clip norm and the same z, inside a secure
sum too, and the next clip norm follows from what was released.

Source: Andrew, Thakkar, McMahan & Ramaswamy 2021, Algorithm 1. Deviations: σ_b is m/20, as theirs, and at least 2.5 z, so that a small
cohort adds 2.1 % of noise to its contributions at most and has a noisier count; under "replace_one" both sensitivities are doubled; b̃ is of
all groups of a sum together, so there is one clip norm.
"""

import math
from dataclasses import dataclass

import numpy as np

from ..protocols.events import Relation
from ..types import Array

__all__ = ["AdaptiveClip", "is_below", "with_count"]

COUNT_SHARE = 1 / 20
"""The deviation of a count's noise, as a share of the cohort (the paper's section 3.1)."""
LEAST_COUNT_NOISE = 2.5
"""The least deviation of a count's noise, in noise multipliers."""
BELOW = 1 - 1e-6
"""Contributions of up to this share of the clip norm count as below it: a clipped one in float32 is as long as it up to 1e-7 of it."""
RANGE = 1e9
"""The clip norm stays within this factor of the first."""


@dataclass(eq=False)
class AdaptiveClip:
    """The clip norm `norm` of the next sum, which follows the `quantile` at a `rate`. `cohort`: the expected number of clients of a sum."""

    quantile: float
    rate: float
    cohort: int
    first: float
    norm: float = 0.0

    def __post_init__(self) -> None:
        self.norm = self.norm or self.first

    def count_deviation(self, multiplier: float, relation: Relation) -> float:
        """The standard deviation σ_b of the noise of a count, in clients, where the whole sum has the noise `multiplier`."""
        return max(COUNT_SHARE * self.cohort, LEAST_COUNT_NOISE * multiplier * _factor(relation))

    def scale(self, multiplier: float, relation: Relation) -> float:
        """What a count is multiplied by in a sum: the deviation of the noise of contributions over σ_b."""
        deviation = self.count_deviation(multiplier, relation)
        own = 1 / math.sqrt(multiplier**-2 - (_factor(relation) / (2 * deviation)) ** 2)
        return own * _factor(relation) * self.norm / deviation

    def follow(self, below: float, clients: int) -> None:
        """Move the clip norm by the noisy number of the `clients` of a sum that were `below` it; without clients it stays."""
        if not clients:
            return
        moved = self.norm * math.exp(-self.rate * (below / clients - self.quantile))
        self.norm = min(max(moved, self.first / RANGE), self.first * RANGE)


def is_below(clipped: Array, norm: float) -> bool:
    """Whether a contribution that was clipped to `norm` was shorter before."""
    return bool(np.linalg.norm(clipped) <= BELOW * norm)


def with_count(clipped: Array, norm: float, scale: float) -> Array:
    """A contribution (d,) clipped to `norm`, and its count times `scale` as one more number; itself with a scale of 0."""
    if not scale:
        return clipped
    return np.append(clipped, scale / 2 if is_below(clipped, norm) else -scale / 2)


def _factor(relation: Relation) -> int:
    """How far one client moves a sum, in lengths of what it adds."""
    return 1 if relation == "add_remove" else 2
