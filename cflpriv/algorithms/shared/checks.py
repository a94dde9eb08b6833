"""What several algorithms declare or check of their hyper-parameters. The ranges of single values are in their `Key`s."""

from collections.abc import Mapping
from typing import Annotated, Any

from ...errors import InputError
from ...keys import Key
from ..interface import BeforeRun

__all__ = ["Contribution", "RunLength", "enough_clients", "length_of_run"]

Contribution = Annotated[
    float,
    Key(
        "Length of a client's contribution; above `privacy.clip_norm` counts are wrong.",
        "(0, inf)",
        default="1; `privacy.clip_norm` under client-level privacy",
    ),
]
"""The type of the parameter `norm` of algorithms that sum clients' contributions."""

RunLength = Annotated[int, Key("Length of the run, by which its stages are divided.", "[0, inf)", "rounds", default="`training.rounds`")]
"""The type of the parameter `rounds` of algorithms whose stages depend on the length of the run."""


def length_of_run(settings: Mapping[str, Any], before: BeforeRun) -> dict[str, Any]:
    """`rounds` of such an algorithm. Raises `InputError` where the configuration has another length than the run."""
    if settings.get("rounds", before.rounds) != before.rounds:
        raise InputError(f"algorithm.rounds: {settings['rounds']}, but training.rounds = {before.rounds}; leave it out")
    return {"rounds": before.rounds}


def enough_clients(k: int | None, present: int) -> None:
    """At least one client a cluster. Without any client left, which is no fault of `k`, who asks them next finds out."""
    if k is not None and 0 < present < k:
        raise InputError(f"algorithm.k: {k} clusters of {present} clients")
