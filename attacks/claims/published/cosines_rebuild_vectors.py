"""Cosines that are released after encrypted comparison, and clients that collude."""

from collections.abc import Sequence
from pathlib import Path

from ..claim import Arm, Claim, Row
from ..scenes import attacked, configured, row_of

__all__ = ["CLAIM"]


def measure(seed: int, data_dir: str | Path | None) -> Sequence[Row]:
    """The rows of one seed."""
    rows = []
    for release in ("gram", "labels"):
        config = configured(seed, {"name": "pacfl", "k": 5}, {"gram": ["ckks"], "ckks_release": release})
        rows.append(row_of(f"{release} released", seed, attacked(config, "sybil_span", data_dir).get("relative_error")))
    config = configured(seed, {"name": "pacfl", "k": 5}, {"gram": ["haar"]})
    rows.append(row_of("cosines without encryption", seed, attacked(config, "sybil_span", data_dir).get("relative_error")))
    return rows


CLAIM = Claim(
    18, "cosines that are released after encrypted comparison rebuild the vectors",
    source="the cosine attack on FLICKER (arXiv 2410.21192), Parth 2025 (a short account)",
    baseline="the vectors of the pooled auxiliary data",
    assumed=(
        "20 clients of the digits in five groups of two labels, an MLP of 32 units, signatures of three vectors of 64 pixels; "
        "15 of the 20 clients collude with the server; an attack that has no products to read counts as a gain of 0; the claim "
        "is about releases, so under labels it asks for no gain"
    ),
    arms={
        "gram released": Arm("relative error of the vectors", 0.05, "above", lower_is_better=True),
        "labels released": Arm("relative error of the vectors", 0.05, "below", lower_is_better=True),
        "cosines without encryption": Arm("relative error of the vectors", 0.05, "above", lower_is_better=True),
    },
    measure=measure,
    seeds=3,
)  # fmt: skip
