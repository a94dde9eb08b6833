"""Ngo et al.: membership from what secure sums show, by the number of clients in a sum."""

from collections.abc import Sequence
from pathlib import Path

from ..claim import Arm, Claim, Row
from ..scenes import membership_auc

__all__ = ["CLAIM"]


def measure(seed: int, data_dir: str | Path | None) -> Sequence[Row]:
    """The rows of one seed."""
    found = membership_auc(seed, (2, 8, 40), data_dir)
    return [Row(f"sums of {size}", seed, found[size], 0.5) for size in (2, 8, 40)]


CLAIM = Claim(
    10, "secure aggregation alone does not stop membership inference",
    source="Ngo et al., arXiv 2403.17775",
    baseline="a coin, 0.5",
    assumed=(
        "40 clients of the digits in five groups of two labels, 16 samples each, an MLP of 32 units, 20 rounds of 2 epochs; "
        "LiRA with six federations as shadows, by an attacker that knows all but which of each pair of samples was trained "
        "on, and has the final model only; the server has the sums of a fixed cohort, which are its models; cohorts of two and "
        "eight are of one group"
    ),
    arms={
        "sums of 2": Arm("AUC of LiRA", 0.02, "above"),
        "sums of 8": Arm("AUC of LiRA", 0.02, "above"),
        "sums of 40": Arm("AUC of LiRA", 0.02, "above"),
    },
    measure=measure,
    seeds=4,
)  # fmt: skip
