"""PACFL, Table 5: principal angles between samples of two Gaussians."""

from collections.abc import Sequence
from pathlib import Path

from ....experiments.reproductions.trials import gaussians
from ..claim import Arm, Claim, Row

__all__ = ["CLAIM"]


def measure(seed: int, data_dir: str | Path | None) -> Sequence[Row]:
    """The rows of one seed."""

    def angle(mean: float, spread: float) -> float:
        found = gaussians(seed, data_dir, {"mean": mean, "spread": spread})["smallest_angle"]
        assert found is not None
        return found

    return [
        Row("mean three times as long, not twice", seed, angle(3.0, 1.0), angle(2.0, 1.0)),
        Row("covariance five times as large, not twice", seed, angle(1.0, 5.0), angle(1.0, 2.0)),
    ]


CLAIM = Claim(
    4, "angles between the subspaces of two distributions grow with the distance of the distributions",
    source="PACFL, Vahidian et al. 2023, Table 5",
    baseline="the angle at the smaller distance, same draws",
    assumed=(
        "100 points each of N(μ, Σ) and of the other Gaussian in 20 dimensions, p = 3, eq. 2; Σ = I and μᵀΣ⁻¹μ = 19.3, which "
        "the published Bhattacharyya distances imply; the paper prints neither, and another Σ may behave otherwise"
    ),
    arms={
        "mean three times as long, not twice": Arm("smallest angle, degrees", 0.0, "above"),
        "covariance five times as large, not twice": Arm("smallest angle, degrees", 0.0, "above"),
    },
    measure=measure,
    seeds=40,
)  # fmt: skip
