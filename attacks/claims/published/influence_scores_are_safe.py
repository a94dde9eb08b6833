"""pFedLIA: the scores that clients give each other."""

from collections.abc import Sequence
from pathlib import Path

from ..claim import Arm, Claim, Row
from ..scenes import attacked, configured, row_of

__all__ = ["CLAIM"]


def measure(seed: int, data_dir: str | Path | None) -> Sequence[Row]:
    """The rows of one seed."""
    config = configured(
        seed, {"name": "pfedlia", "warm_up": 3, "local_epochs": 5, "min_samples": 3}, training={"rounds": 5}
    )  # fmt: skip
    return [row_of("central clustering", seed, attacked(config, "influence", data_dir).get("group_accuracy"))]


CLAIM = Claim(
    7, "influence scores are safe to share with the server",
    source="in our words, of pFedLIA, Rokvic et al. 2025, Sec. III, which only says that no data are shared",
    baseline="the same groups dealt at random, or everybody in the largest if that is more",
    assumed=(
        "20 clients of the digits in five groups of two labels, an MLP of 32 units, three rounds of warm-up, five local epochs; "
        "the server knows the number of groups and no client; safe means that scores do not tell who is alike, although that is "
        "what they are for"
    ),
    arms={
        "central clustering": Arm("clients whose group is known, share", 0.1, "below"),
    },
    measure=measure,
)  # fmt: skip
