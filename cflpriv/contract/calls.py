"""One call of `mean` as the server knows it: the clients, values and groups, and what each protection does with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from operator import mul
from typing import Any, Protocol

import numpy as np

from ..errors import InputError
from ..protocols.errors import TooFewClients
from ..types import Array
from .handles import GroupMean, Shared
from .transcript import Passed

__all__ = [
    "ClearMeans", "ClientContribution", "Recorder", "RunningMean", "SumCall", "TooUnequal", "clear_means", "large_enough",
    "weighted_mean",
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


BLOCK = 1 << 16
"""Numbers that are multiplied and added at a time, so that they stay in the cache and nothing as long as the vector is needed."""


class RunningMean:
    """Σ wᵢ xᵢ / Σ wᵢ of vectors that come some at a time, added up in float64 in the order of their coming.

    So it does not depend on how many come at a time. Vectors are made one at a time; those that are at another `host` are `added_up` there
    (see `transports.partial_sums`).
    """

    def __init__(self) -> None:
        self._total: Array | None = None
        self._weights: list[float] = []
        self._dtype: Any = None

    def add(self, vectors: Sequence[Any], weights: Sequence[float]) -> None:
        if self._total is None:
            self._total, self._dtype = np.zeros(vectors[0].shape, dtype=np.float64), vectors[0].dtype
        apart: dict[int, list[tuple[Any, float]]] = {}
        for vector, weight in zip(vectors, weights, strict=True):
            if hasattr(vector, "added_up"):
                apart.setdefault(vector.host, []).append((vector, weight))
            else:
                _add(self._total.reshape(-1), np.asarray(vector).reshape(-1), weight)
        for several in apart.values():
            self._total += several[0][0].added_up([vector for vector, _ in several], [weight for _, weight in several])
        self._weights += weights

    def value(self) -> Array:
        """The mean of what came, in the dtype of the first vector. Ends the sum."""
        total, self._total = self._total, None
        assert total is not None
        total /= sum(self._weights)
        return total.astype(self._dtype, copy=False)


def _add(total: Array, vector: Array, weight: float) -> None:
    """total += weight · vector, for vectors (d,)."""
    addend = np.empty(min(BLOCK, len(total)))
    for start in range(0, len(total), BLOCK):
        some = slice(start, start + BLOCK)
        product = addend[: len(total[some])]
        np.multiply(vector[some], weight, out=product)
        total[some] += product


def weighted_mean(vectors: Sequence[Any], weights: Sequence[float]) -> Array:
    """The `RunningMean` of vectors that are all there."""
    running = RunningMean()
    running.add(vectors, weights)
    return running.value()


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


class ClearMeans:
    """The means of contributions in the clear, of all clients of a `call` or of some at a time, in their order.

    Guarantee: none. Reveals: every update and weight, also of groups without a mean. With `let_go` the record has the sizes of updates, and
    not the updates.
    """

    def __init__(self, call: SumCall, let_go: bool = False) -> None:
        self._call, self._let_go = call, let_go
        self._sent: list[dict[str, Any]] = []
        self._arrived: list[ClientContribution] = []
        self._running: list[dict[str, RunningMean]] = [{} for _ in range(call.k)]

    def add(self, contributions: Sequence[ClientContribution]) -> None:
        """Add contributions that arrived."""
        call = replace(self._call, contributions=tuple(contributions))
        for label, running in enumerate(self._running):
            members = call.members(label)
            for name in members[0].parts if members else ():
                mean = running.setdefault(name, RunningMean())
                mean.add([member.parts[name] for member in members], [member.weight for member in members])
        for member in contributions:
            weight = {} if call.public_weights else {"weight": np.array(member.weight)}
            parts = {name: Passed(part.nbytes) for name, part in member.parts.items()} if self._let_go else member.parts
            self._sent.append({**parts, **weight})
            self._arrived.append(replace(member, parts={}))

    def means(self, record: Recorder) -> tuple[GroupMean | None, ...]:
        """Record what was sent, and give the mean of each group. Raises `TooFewClients` and `InputError` as `large_enough` does."""
        call = replace(self._call, contributions=tuple(self._arrived))
        clients = [member.client for member in self._arrived]
        if clients:
            labels = [list(member.labels) for member in self._arrived]
            record("update", "clients", "server", clients, self._sent, readers=("server",), context={"labels": labels})
        groups = large_enough(call)
        means: list[GroupMean | None] = [None] * call.k
        for label in groups:
            members = call.members(label)
            parts = {name: Shared(running.value()) for name, running in self._running[label].items()}
            weights, known = [member.weight for member in members], tuple(member.client for member in members)
            whole = float(sum(weights))
            means[label] = GroupMean(parts, whole, len(members), contributors=known, largest=float(max(weights)) / whole)
        return tuple(means)


def clear_means(call: SumCall, record: Recorder) -> tuple[GroupMean | None, ...]:
    """The `ClearMeans` of contributions that are all there."""
    means = ClearMeans(call)
    means.add(call.contributions)
    return means.means(record)
