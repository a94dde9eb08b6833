"""Operations that may fail: all training diverges, no group reaches the minimum cohort size, or a client's choice does not come.

The round goes on without them.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Literal

from ...contract.handles import GroupMean, Held, Labels
from ...contract.operations import Federation, Parameter
from ...engine import Task
from ...errors import BudgetExceeded, TooFewClients, TrainingDiverged

__all__ = ["choices", "mean_with_overall", "try_compute", "try_mean"]


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
    """`mean`, with None for all groups where none reaches the minimum cohort size."""
    try:
        return federation.mean(held, weights=weights, groups=groups, k=None if groups is None else k, models=models)
    except TooFewClients:
        return (None,) * k


def mean_with_overall(
    federation: Federation,
    held: Held | None,
    everyone: Held,
    weights: Literal["equal", "examples"],
    groups: Labels | Held,
    k: int,
    models: int = 1,
    names: Sequence[str] = (),
    together: bool = True,
) -> tuple[tuple[GroupMean | None, ...], GroupMean | None]:
    """The means of each group, and the mean over all groups of the parts of `everyone`, which `held` has too (under `names`), by one sum a
    client.

    A mean over everyone is not a second sum over the same clients: their difference would show who is in the one alone. It is made of the
    groups' means. Clients outside these groups (the group is too small, or the client does not hold `held`) form another sum, of
    `everyone`, whose members used at most `models` different models. If they are too few, or a budget does not suffice, or not `together`,
    they are left out.
    """
    means = (None,) * k if held is None else try_mean(federation, held, weights, groups, k)
    summed = [mean for mean in means if mean is not None and not any(part.own for part in mean.parts.values())]
    parts = [{name: mean.parts[called] for name, called in zip(everyone.parts, names or everyone.parts, strict=True)} for mean in summed]
    if not isinstance(groups, Held):
        grouped = () if held is None else held.clients
        rest = [client for client in everyone.clients if client not in grouped or means[groups[client]] not in summed]
        try:
            alone = try_mean(federation, everyone.of(rest), weights, models=models)[0] if rest and together else None
        except BudgetExceeded:  # members of a sum that failed have paid, and pay more for a second one with shared noise (`Receipt`)
            alone = None
        if alone is not None and not any(part.own for part in alone.parts.values()):
            summed, parts = [*summed, alone], [*parts, dict(alone.parts)]
    if not summed:
        return means, None
    shares = [float(mean.count if mean.weight is None else mean.weight) for mean in summed]
    whole = sum(shares)
    total = {
        name: reduce(add, (part[name] * (share / whole) for part, share in zip(parts, shares, strict=True))) for name in everyone.parts
    }
    contributors = tuple(sorted({client for mean in summed for client in mean.contributors}))
    return means, GroupMean(total, whole, sum(mean.count for mean in summed), sum(mean.clipped for mean in summed), contributors)


def choices(federation: Federation, held: Held, k: int) -> dict[int, int] | None:
    """What the server learns of each client's choice among `k`, or None where an oblivious sum keeps all of them private.

    A client whose choice did not come, or cannot be, is left out: go on with `held.of` those who are in.
    """
    labels = federation.labels(held)
    return None if labels is None else {client: label for client, label in labels.items() if 0 <= label < k}
