"""The row of a comparison: ratios of interleaved pairs."""

import statistics
from collections.abc import Sequence
from typing import Any

__all__ = ["pairs"]


def pairs(ours: Sequence[float], theirs: Sequence[float], floor: float, stretch: float, against: str, note: str) -> dict[str, Any]:
    """Median and extremes of theirs over ours."""
    ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    return {
        "ratio": statistics.median(ratios), "low": ratios[0], "high": ratios[-1], "floor": floor, "stretch": stretch, "against": against,
        "note": note,
    }  # fmt: skip
