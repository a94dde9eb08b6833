"""Verbs for what may come to nothing: nobody's training ends well, or no group reaches the floor. None then, and the round goes on."""

from collections.abc import Mapping, Sequence
from typing import Literal

from ..engine import Task
from ..errors import TooFewClients, TrainingDiverged
from ..federation import Federation, Parameter
from ..handles import GroupMean, Held, Labels

__all__ = ["try_compute", "try_mean"]


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
