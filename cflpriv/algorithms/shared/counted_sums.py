"""The server's step of clustered training whose clients put updates into counted blocks: one sum a round, divided by noisy sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ...contract.handles import Held, Shared
from ...contract.operations import Federation
from ...contract.schedule import TaskRequest, scores
from ...engine.models import Model
from ...tasks.cluster_shares import counted_blocks
from ...tasks.evaluation import Evaluate, Losses
from ...types import Array
from ..interface import BeforeRun, Served
from .choosing import EvaluateLowest

__all__ = ["BlockSum", "admit_by_choice", "moved_by", "norm_of_clip", "scores_of_lowest", "serve_lowest", "smallest_of", "sum_of_blocks"]

State = TypeVar("State")


@dataclass(frozen=True, eq=False)
class BlockSum:
    """A sum of counted blocks over `count` clients: shares (k,) of the clients counted in each block, sums (k, d) of updates."""

    shares: Array
    sums: Array
    count: int
    clipped: int


def sum_of_blocks(federation: Federation, held: Held, norm: float) -> BlockSum | None:
    """The sum over all clients, or None where too few contributed. Noisy counts below 0 are 0; all at 0: equal shares."""
    (mean,) = federation.mean(held, weights="equal")
    if mean is None:
        return None
    counts, sums = counted_blocks(mean.parts[held.part].value() * mean.count, norm)
    counts = np.maximum(counts, 0.0)
    shares = counts / counts.sum() if counts.sum() > 0 else np.full(len(counts), 1 / len(counts))
    return BlockSum(shares, sums, mean.count, mean.clipped)


def smallest_of(least: float | None, k: int, clients: int) -> float:
    """The smallest size of a cluster that sums are divided by: half of an equal share if none is given, no more than an equal share."""
    share = clients / k
    return share / 2 if least is None else min(float(least), share)


def moved_by(models: Sequence[Shared], sums: Array, sizes: Array) -> tuple[Shared, ...]:
    """Each model plus the sum (d,) of its block over its size."""
    return tuple(model + Shared((sum_ / size).astype(sums.dtype)) for model, sum_, size in zip(models, sums, sizes, strict=True))


def serve_lowest(model: Model, models: Sequence[Shared]) -> Served:
    """Each client uses the one of the `models` that has the lowest loss on its training data."""
    return Served(_lowest(model), {"model": list(models)})


def scores_of_lowest(model: Model) -> TaskRequest:
    """The request for scores of `serve_lowest`."""
    return scores(_lowest(model))


def _lowest(model: Model) -> EvaluateLowest:
    return EvaluateLowest(Losses(model), Evaluate(model))


def admit_by_choice(federation: Federation, state: State, newcomers: Sequence[int]) -> tuple[State, Mapping[str, Any]]:
    """Newcomers choose their cluster by themselves as everybody does."""
    return state, {}


def norm_of_clip(settings: Mapping[str, Any], before: BeforeRun) -> dict[str, Any]:
    """By default a contribution is as long as clients clip it to."""
    return {"norm": before.clip_norm}
