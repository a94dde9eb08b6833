"""One call of `mean` as the server knows it: the clients, values and groups, and what each protection does with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..errors import InputError
from ..protocols.errors import TooFewClients
from ..types import Array
from .handles import GroupMean, Shared

__all__ = [
    "MOST_WEIGHT", "ClientContribution", "Recorder", "SumCall", "large_enough", "clear_means", "weighted_mean",
]  # fmt: skip


class Recorder(Protocol):
    """How a protection reports to the transcript what it sends."""

    def __call__(
        self,
        kind: str,
        source: str,
        target: str,
        clients: Sequence[int],
        payload: Mapping[str, Array] | Sequence[Mapping[str, Array]],
        *,
        readers: Sequence[str],
        context: Mapping[str, Any] | None = None,
    ) -> None: ...


# --- sum ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ClientContribution:
    """One client's contribution to a mean: its `parts`, its `weight`, and the `labels` of the groups it counts towards."""

    client: int
    parts: Mapping[str, Array] = field(repr=False)
    weight: float = field(repr=False)
    labels: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SumCall:
    """One call of `mean`: which clients contribute which values. `round` and `number` name the call; `public_weights`: the server knows the
    weights.

    `models` are the hashes of what each client may have been sent and have chosen to compute with. The members of a group should hold at
    most `models_at_most` different ones.
    """

    round: int
    number: int
    contributions: tuple[ClientContribution, ...]
    k: int
    min_cohort: int
    public_weights: bool
    models: Mapping[int, tuple[bytes, ...]] = field(default_factory=dict)
    models_at_most: int = 1

    def members(self, label: int) -> list[ClientContribution]:
        return [member for member in self.contributions if label in member.labels]

    def counts(self) -> tuple[int, ...]:
        return tuple(len(self.members(label)) for label in range(self.k))


def weighted_mean(vectors: Sequence[Any], weights: Sequence[float]) -> Array:
    """Σ wᵢ xᵢ / Σ wᵢ, added up in float64 in the given order, in the dtype of the vectors, which are made one at a time.

    Vectors that are at another `host` are `added_up` there (see `transports.partial_sums`).
    """
    total = np.zeros(vectors[0].shape, dtype=np.float64)
    addend = np.empty_like(total)
    apart: dict[int, list[tuple[Any, float]]] = {}
    for vector, weight in zip(vectors, weights, strict=True):
        if hasattr(vector, "added_up"):
            apart.setdefault(vector.host, []).append((vector, weight))
            continue
        np.multiply(np.asarray(vector), weight, out=addend)
        total += addend
    for several in apart.values():
        total += several[0][0].added_up([vector for vector, _ in several], [weight for _, weight in several])
    return np.asarray(total / sum(weights), dtype=vectors[0].dtype)


MOST_WEIGHT = 0.9


def large_enough(call: SumCall) -> list[int]:
    """The groups that may be summed; `TooFewClients` if there is none.

    `InputError` where public weights make one client nearly all of a group: a minimum cohort size does not protect then.
    """
    for label in range(call.k) if call.min_cohort > 1 and call.public_weights else ():
        weights = [member.weight for member in call.members(label)]
        if len(weights) >= call.min_cohort and max(weights) > MOST_WEIGHT * sum(weights):
            share = max(weights) / sum(weights)
            raise InputError(f"mean: one client has {share:.0%} of the weight of group {label}: the mean would be its value")
    counts = call.counts()
    groups = [label for label, count in enumerate(counts) if count >= max(1, call.min_cohort)]
    if not groups:
        raise TooFewClients(tuple(count for count in counts if count), call.min_cohort)
    return groups


def clear_means(call: SumCall, record: Recorder) -> tuple[GroupMean | None, ...]:
    """The means of contributions in the clear. Guarantee: none. Reveals: every update and weight, also of groups without a mean."""
    contributors = call.contributions
    sent = [dict(member.parts) if call.public_weights else {**member.parts, "weight": np.array(member.weight)} for member in contributors]
    labels = [list(member.labels) for member in contributors]
    if contributors:
        record(
            "update", "clients", "server", [member.client for member in contributors], sent, readers=("server",), context={"labels": labels}
        )
    groups = large_enough(call)
    means: list[GroupMean | None] = [None] * call.k
    for label in groups:
        members = call.members(label)
        weights = [member.weight for member in members]
        parts = {name: Shared(weighted_mean([member.parts[name] for member in members], weights)) for name in members[0].parts}
        means[label] = GroupMean(parts, float(sum(weights)), len(members), contributors=tuple(member.client for member in members))
    return tuple(means)
