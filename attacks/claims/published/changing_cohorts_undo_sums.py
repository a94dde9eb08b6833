"""Lam et al.: sums over cohorts that change are a system of equations."""

from collections.abc import Sequence
from pathlib import Path

from ..claim import Arm, Claim, Row
from ..scenes import attacked, configured, row_of

__all__ = ["CLAIM"]


def measure(seed: int, data_dir: str | Path | None) -> Sequence[Row]:
    """The rows of one seed."""
    rows = []
    for arm, sampling, share in (("cohorts drawn anew", "global", 0.5), ("fixed cohorts", "fixed_cohorts", 0.46)):
        config = configured(
            seed, {"name": "fedavg"}, {"sum": "secagg", "min_cohort": 3}, data={"clients": 15}, model={"hidden": 8},
            training={"rounds": 25, "participation": share, "sampling": sampling},
        )  # fmt: skip
        rows.append(row_of(arm, seed, attacked(config, "label_inference", data_dir).get("label_set_accuracy")))
    return rows


CLAIM = Claim(
    12, "cohorts that change over rounds undo a secure sum, fixed cohorts do not",
    source="Lam et al. 2021 (abstract)",
    baseline="the same attack without a view",
    assumed=(
        "15 clients of the digits in five groups of two labels, an MLP of 8 units, 25 rounds of secure sums of at least three "
        "clients, half of them a round; who is in a sum is known; what is undone is the secrecy of label sets; the attacker "
        "knows model, training settings, numbers of samples and of labels a client, and 1,000 labelled samples of the same "
        "distribution"
    ),
    arms={
        "cohorts drawn anew": Arm("label sets read right, share of clients", 0.1, "above"),
        "fixed cohorts": Arm("label sets read right, share of clients", 0.1, "below"),
    },
    measure=measure,
)  # fmt: skip
