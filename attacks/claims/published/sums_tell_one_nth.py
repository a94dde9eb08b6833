"""Elkordy et al.: what a sum tells of one member, over the number of members."""

from collections.abc import Sequence
from pathlib import Path

from ..claim import Arm, Claim, Row
from ..scenes import membership_auc

__all__ = ["CLAIM"]


def measure(seed: int, data_dir: str | Path | None) -> Sequence[Row]:
    """The rows of one seed."""
    found = membership_auc(seed, (2, 8, 40), data_dir)

    def told(size: int) -> float:
        return (2 * found[size] - 1) ** 2

    return [
        Row("from two to eight members", seed, told(8), told(2) / 4),
        Row("from eight to forty members", seed, told(40), told(8) / 5),
    ]


CLAIM = Claim(
    11, "what a secure sum tells of one member falls as 1/n",
    source="Elkordy et al. 2022",
    baseline="the same of the smaller cohort times the ratio of the sizes",
    assumed=(
        "40 clients of the digits in five groups of two labels, 16 samples each, an MLP of 32 units, 20 rounds of 2 epochs; "
        "LiRA with six federations as shadows, by an attacker that knows all but which of each pair of samples was trained "
        "on, and has the final model only; the paper bounds mutual information; here the squared advantage (2 AUC − 1)², which "
        "information bounds from above up to a constant, stands for it, so a verdict is of this proxy; from eight to forty the "
        "cohort becomes mixed as well"
    ),
    arms={
        "from two to eight members": Arm("squared advantage of LiRA", 0.005, "below"),
        "from eight to forty members": Arm("squared advantage of LiRA", 0.005, "below"),
    },
    measure=measure,
    seeds=4,
)  # fmt: skip
