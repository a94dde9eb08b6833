"""IFCA-MIR: membership inference on models of clusters and on one shared model."""

from collections.abc import Sequence
from pathlib import Path

from ..claim import Arm, Claim, Row
from ..scenes import membership_auc

__all__ = ["CLAIM"]


def measure(seed: int, data_dir: str | Path | None) -> Sequence[Row]:
    """The rows of one seed."""
    found = membership_auc(seed, (2, 8, 40), data_dir)
    return [
        Row("clusters of two", seed, found[2], found[40]),
        Row("clusters of eight, pure", seed, found[8], found[40]),
    ]


CLAIM = Claim(
    8, "clustering raises the risk of membership inference",
    source="IFCA-MIR, arXiv 2503.09414 (abstract)",
    baseline="the one model of all forty clients",
    assumed=(
        "40 clients of the digits in five groups of two labels, 16 samples each, an MLP of 32 units, 20 rounds of 2 epochs; "
        "LiRA with six federations as shadows, by an attacker that knows all but which of each pair of samples was trained "
        "on, and has the final model only; clusters are given and pure"
    ),
    arms={
        "clusters of two": Arm("AUC of LiRA", 0.02, "above"),
        "clusters of eight, pure": Arm("AUC of LiRA", 0.02, "above"),
    },
    measure=measure,
    seeds=4,
)  # fmt: skip
