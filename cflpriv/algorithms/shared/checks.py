"""What several algorithms declare or check of their hyper-parameters. The ranges of single values are in their `Key`s."""

from typing import Annotated

from ...errors import InputError
from ...keys import Key

__all__ = ["Contribution", "enough_clients"]

Contribution = Annotated[
    float,
    Key(
        "Length of a client's contribution; above `privacy.clip_norm` counts are wrong.",
        "(0, inf)",
        default="1; `privacy.clip_norm` under client-level privacy",
    ),
]
"""The type of the parameter `norm` of algorithms that sum clients' contributions."""


def enough_clients(k: int | None, present: int) -> None:
    """At least one client a cluster. Without any client left, which is no fault of `k`, who asks them next finds out."""
    if k is not None and 0 < present < k:
        raise InputError(f"algorithm.k: {k} clusters of {present} clients")
