"""IFCA: what the server learns beside each client's choice of a model."""

from collections.abc import Sequence
from pathlib import Path

from ..claim import Arm, Claim, Row
from ..scenes import attacked, configured, row_of

__all__ = ["CLAIM"]


def measure(seed: int, data_dir: str | Path | None) -> Sequence[Row]:
    """The rows of one seed."""
    algorithm = {"name": "ifca", "k": 5, "averaging": "model"}
    rows = []
    for arm, protection in (("updates in the clear", {}), ("secure sums of at least three", {"sum": "secagg", "min_cohort": 3})):
        config = configured(seed, algorithm, protection, training={"rounds": 10})
        found = attacked(config, "label_inference", data_dir)
        rows.append(row_of(f"labels, {arm}", seed, found.get("label_set_accuracy")))
        found = attacked(config, "cluster_identity", data_dir)
        rows.append(row_of(f"groups, {arm}", seed, found.get("group_accuracy")))
    return rows


CLAIM = Claim(
    5, "the server learns of a client no more than the identity of its cluster",
    source="IFCA, Ghosh et al. 2020, as summarised in our list",
    baseline="the same attack without a view",
    assumed=(
        "20 clients of the digits in five groups of two labels, an MLP of 32 units, five models, ten rounds, everybody takes "
        "part; the attacker knows model, training settings, numbers of samples and of labels a client, and 1,000 labelled "
        "samples of the same distribution; the claim asks that identities are revealed (above) and labels are not (below)"
    ),
    arms={
        "labels, updates in the clear": Arm("label sets read right, share of clients", 0.1, "below"),
        "labels, secure sums of at least three": Arm("label sets read right, share of clients", 0.1, "below"),
        "groups, updates in the clear": Arm("clients whose group is known, share", 0.1, "above"),
        "groups, secure sums of at least three": Arm("clients whose group is known, share", 0.1, "above"),
    },
    measure=measure,
)  # fmt: skip
