"""StoCFL: the normalised gradient at a public model, as a client's representation."""

from collections.abc import Sequence
from pathlib import Path

from ..claim import Arm, Claim, Row
from ..scenes import attacked, configured, row_of

__all__ = ["CLAIM"]


def measure(seed: int, data_dir: str | Path | None) -> Sequence[Row]:
    """The rows of one seed."""
    rows = []
    for n in (5, 20, 60):
        config = configured(seed, {"name": "stocfl", "tau": 0.5}, data={"samples_per_client": n})
        rows.append(row_of(f"n = {n}", seed, attacked(config, "anchor_counts", data_dir).get("label_counts_exact")))
    return rows


CLAIM = Claim(
    6, "anchor gradients tell distributions, not data",
    source="in our words, of StoCFL, Zeng et al. 2023, Sec. 3.1, where they represent the distribution of a client's data",
    baseline="the same attack without a view",
    assumed=(
        "20 clients of the digits in five groups of two labels, an MLP of 32 units; a client's numbers of samples of each label "
        "count as its data; representations are read by the server in the clear; the attacker knows model, training settings, "
        "numbers of samples and of labels a client, and 1,000 labelled samples of the same distribution"
    ),
    arms={
        "n = 5": Arm("clients whose label counts are all exact, share", 0.1, "below"),
        "n = 20": Arm("clients whose label counts are all exact, share", 0.1, "below"),
        "n = 60": Arm("clients whose label counts are all exact, share", 0.1, "below"),
    },
    measure=measure,
)  # fmt: skip
