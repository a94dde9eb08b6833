"""One call of `mean` as the server knows it: the clients, values and groups, and what each protection does with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from operator import mul
from typing import Any, Protocol

import numpy as np

from ..errors import InputError
from ..protocols.errors import TooFewClients
from ..types import Array
from .handles import GroupMean, Shared

__all__ = [
    "ClientContribution", "Recorder", "SumCall", "TooUnequal", "clear_means", "large_enough", "weighted_mean",
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


class TooUnequal(InputError):
    """Values weigh clients inside themselves by up to `spread` to 1, so that a sum over `clients` could be in effect over too few.

    `most`: the largest spread that would do.
    """

    def __init__(self, spread: float, clients: int, min_cohort: int, most: float) -> None:
        self.spread, self.most = spread, most
        remedy = (
            "with blocks of clients' own choice a client could be alone in one; use privacy.unit = 'client', whose noise inside the sum "
            "protects it, or protection.sum = 'none' where the server is trusted"
            if spread == float("inf")
            else f"at most {most:.4g} to 1 keeps it"
        )
        ratio = "without bound" if spread == float("inf") else f"by up to {spread:g} to 1"
        super().__init__(
            f"mean: values weigh clients inside themselves {ratio}, so the effective number of {clients} clients could "
            f"fall below min_cohort = {min_cohort}, which clients refuse; {remedy}"
        )


def large_enough(call: SumCall) -> list[int]:
    """The groups that may be summed; `TooFewClients` if there is none.

    `InputError` where public weights bring the effective number of clients (Σ w)² / Σ w² of a group below the minimum cohort size: a mean
    over many clients could be that of one.
    """
    for label in range(call.k) if call.min_cohort > 1 and call.public_weights else ():
        weights = [Fraction(member.weight) for member in call.members(label)]
        squares = sum(map(mul, weights, weights))
        if len(weights) >= call.min_cohort and sum(weights) ** 2 < call.min_cohort * squares:
            effective, share = float(sum(weights) ** 2 / squares), float(max(weights) / sum(weights))
            raise InputError(
                f"mean: one client has {share:.0%} of the weight of group {label}, so its {len(weights)} clients count as {effective:.2g}, "
                f"fewer than min_cohort = {call.min_cohort}; make weights more alike"
            )
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
        known, whole = tuple(member.client for member in members), float(sum(weights))
        means[label] = GroupMean(parts, whole, len(members), contributors=known, largest=float(max(weights)) / whole)
    return tuple(means)
