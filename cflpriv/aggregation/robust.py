"""Robust rules that combine the means of several buckets: pure functions of a matrix with one bucket in each row.

The rules tolerate fewer than half of the buckets being bad, the trimmed mean as many as it leaves out at one end. One bad client makes its
bucket bad.
Sources: Karimireddy et al. 2022 (ICLR; bucketing), Yin et al. 2018 (trimmed mean), Pillutla et al. 2022 (geometric median by smoothed
Weiszfeld steps), Karimireddy et al. 2021 (centred clipping).
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..contract.handles import GroupMean, PartLayout, Shared, join
from ..types import Array

__all__ = ["RULES", "centred_clipping", "combined", "geometric_median", "trimmed_mean"]

TRIMMED = 1 / 3
"""The share of buckets that the trimmed mean leaves out at each end of a coordinate, rounded up, and always less than half."""
STEPS = 100
SMOOTHING = 1e-6
CLIPPING_STEPS = 5


def trimmed_mean(points: Array) -> Array:
    """The mean (d,) of `points` (b, d), coordinate by coordinate, without the largest and the smallest (Yin et al. 2018, Definition 2).

    At each end ⌈b/3⌉ are left out, but one or two always stay: up to eight buckets it is the median.
    """
    count = len(points)
    cut = min(int(np.ceil(TRIMMED * count)), (count - 1) // 2)
    return np.asarray(np.sort(points, axis=0)[cut : count - cut].mean(axis=0))


def geometric_median(points: Array) -> Array:
    """The point (d,) with the smallest sum of distances to `points` (b, d).

    Smoothed Weiszfeld steps (Pillutla et al. 2022, Algorithm 2), from the mean, until a step is below 1e-9 of the spread; the smoothing is
    1e-6 of the median distance from the coordinate-wise median.
    """
    spread = float(np.median(np.linalg.norm(points - np.median(points, axis=0), axis=1)))
    if not spread:  # more than half are one point, which no others can outweigh
        return np.asarray(np.median(points, axis=0))
    centre = points.mean(axis=0)
    for _ in range(STEPS):
        weights = 1 / np.maximum(np.linalg.norm(points - centre, axis=1), SMOOTHING * spread)
        following = weights @ points / weights.sum()
        moved = float(np.linalg.norm(following - centre))
        centre = following
        if moved <= 1e-9 * spread:
            break
    return np.asarray(centre)


def centred_clipping(points: Array) -> Array:
    """The centre (d,) after five steps v ← v + mean of clip(x − v, τ) over `points` (b, d) (Karimireddy et al. 2021, equation 9).

    The paper leaves the start and τ open: here the start is the coordinate-wise median and τ, in every step, the median distance from v.
    """
    centre = np.median(points, axis=0)
    for _ in range(CLIPPING_STEPS):
        away = points - centre
        distances = np.linalg.norm(away, axis=1)
        radius = float(np.median(distances))
        longer = np.maximum(distances, radius)
        scale = np.divide(radius, longer, out=np.ones_like(longer), where=longer > 0)
        centre = centre + (scale[:, None] * away).mean(axis=0)
    return np.asarray(centre)


RULES: Mapping[str, Callable[[Array], Array]] = {
    "trimmed_mean": trimmed_mean, "geometric_median": geometric_median, "centred_clipping": centred_clipping,
}  # fmt: skip


def combined(rule: str, means: Sequence[GroupMean]) -> GroupMean:
    """The mean of a group from the means of its buckets. The rule gets all parts as one vector, in float64.

    Buckets count equally, though their sizes may differ by one.
    """
    values = [{name: mean.parts[name].value() for name in means[0].parts} for mean in means]
    vector = RULES[rule](np.stack([join(parts, np.float64) for parts in values]))
    parts = {name: Shared(part) for name, part in PartLayout.of(values[0]).split(vector).items()}
    weight = sum(mean.weight or 0.0 for mean in means)
    contributors = tuple(sorted(client for mean in means for client in mean.contributors))
    rounding = max(mean.rounding for mean in means)
    return GroupMean(parts, weight, sum(mean.count for mean in means), sum(mean.clipped for mean in means), contributors, rounding)
