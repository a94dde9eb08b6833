"""Verbs for what may come to nothing: nobody's training ends well, no group reaches the floor, a client's choice does not come.

The round goes on without it.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from ..contract.handles import GroupMean, Held, Labels
from ..contract.operations import Federation, Parameter
from ..engine import Task
from ..errors import TooFewClients, TrainingDiverged

__all__ = ["choices", "try_compute", "try_mean"]


def try_compute(
    federation: Federation,
    on_divergence: str,
    task: Task,
    params: Mapping[str, Parameter] | None = None,
    which: Labels | Held | None = None,
    on: Sequence[int] | None = None,
) -> Held | None:
    """`compute`, or None where `on_divergence` is "skip" and the training of all clients diverged (or there are none)."""
    if on is not None and not len(on):
        return None
    try:
        return federation.compute(task, params, which=which, on=on)
    except TrainingDiverged:
        if on_divergence != "skip":
            raise
        return None


def try_mean(
    federation: Federation,
    held: Held,
    weights: Literal["equal", "examples"],
    groups: Labels | Held | None = None,
    k: int = 1,
    models: int = 1,
) -> tuple[GroupMean | None, ...]:
    """`mean`, with None for all groups where none reaches the floor."""
    try:
        return federation.mean(held, weights=weights, groups=groups, k=None if groups is None else k, models=models)
    except TooFewClients:
        return (None,) * k


def choices(federation: Federation, held: Held, k: int) -> dict[int, int] | None:
    """What the server learns of each client's choice among `k`, or None where an oblivious sum keeps all of them private.

    A client whose choice did not come, or cannot be, is left out: go on with `held.of` those who are in.
    """
    told = federation.labels(held)
    return None if told is None else {client: label for client, label in told.items() if 0 <= label < k}
