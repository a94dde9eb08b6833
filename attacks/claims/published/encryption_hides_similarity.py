"""Encrypted comparison: what is left visible when only the result of clustering is released."""

from collections.abc import Sequence
from pathlib import Path

from ..claim import Arm, Claim, Row
from ..scenes import attacked, configured, row_of

__all__ = ["CLAIM"]


def measure(seed: int, data_dir: str | Path | None) -> Sequence[Row]:
    """The rows of one seed."""
    rows = []
    for release in ("labels", "distances"):
        config = configured(seed, {"name": "pacfl", "k": 5}, {"gram": ["ckks"], "ckks_release": release, "sum": "secagg", "min_cohort": 2})
        rows.append(row_of(f"{release} released", seed, attacked(config, "cluster_identity", data_dir).get("group_accuracy")))
    return rows


CLAIM = Claim(
    16, "encrypting what is compared hides from the server which clients are alike",
    source="in our words, after FedCAPrivacy, arXiv 2503.23292, whose abstract hides it by an oblivious shuffle; here CKKS, no shuffle",
    baseline="the same groups dealt at random, or everybody in the largest if that is more",
    assumed=(
        "20 clients of the digits in five groups of two labels, an MLP of 32 units; CKKS, and no shuffle, so the verdict is "
        "of encryption alone and of what it leaves: the clusters that the server has to train; the server does not collude with "
        "the key holder"
    ),
    arms={
        "labels released": Arm("clients whose group is known, share", 0.1, "below"),
        "distances released": Arm("clients whose group is known, share", 0.1, "below"),
    },
    measure=measure,
    seeds=3,
)  # fmt: skip
