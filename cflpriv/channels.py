"""What the protections share: the call of a mean, clustering epochs of vectors, and the transforms of clients."""

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from .errors import InputError
from .handles import GroupMean, Shared
from .protocols.errors import RemoteError, TooFewClients
from .protocols.orthonormal import Transform, transform
from .protocols.sketch import public_seed, sketch
from .similarity import Gram
from .types import Array

__all__ = [
    "MOST_WEIGHT", "Contribution", "Recorder", "SumCall", "TransformCache", "Transforms", "Vectors", "above_floor", "check_hidden",
    "clear_means", "group_epoch", "places", "sketched", "weighted_mean",
]  # fmt: skip

HAAR_SMALLEST = 8


class Recorder(Protocol):
    """How a channel tells the transcript what it sends."""

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


class TransformCache:
    """Transforms that were made, by kind, secret, name and length, as many as fit into `keep_bytes`. Who has a secret finds its own."""

    def __init__(self, keep_bytes: int = 1 << 29) -> None:
        self._keep_bytes = keep_bytes
        self._made: OrderedDict[tuple[str, bytes, str, int], Transform] = OrderedDict()
        self._shared: dict[tuple[Any, str], Transforms] = {}

    def transform(self, kind: str, secret: bytes, name: str, dimension: int) -> Transform:
        """The transform of a purpose under a secret."""
        key = (kind, secret, name, dimension)
        if key not in self._made:
            self._made[key] = transform(kind, secret, name, dimension)
            while len(self._made) > 2 and sum(one.nbytes for one in self._made.values()) > self._keep_bytes:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return self._made[key]

    def shared(self, secrets: Mapping[int, bytes], kind: str) -> "Transforms":
        """The transforms of those who have just these secrets: the same object for all of them."""
        return self._shared.setdefault((tuple(sorted(secrets.items())), kind), Transforms(dict(secrets), kind, self))


class Transforms:
    """The transforms that clients share, made from the `secrets` of their group by group epoch. The server never holds one of these.

    `kind` is that of updates. Where clients are removed from the group a new epoch starts: names of its transforms end in "@EPOCH".
    """

    def __init__(self, secrets: Mapping[int, bytes], kind: str, cache: TransformCache) -> None:
        self._secrets, self.kind, self._cache = secrets, kind, cache

    def __call__(self, name: str, dimension: int, kind: str | None = None) -> Transform:
        """Raises `InputError` for an epoch whose secret is not held and will not be.

        Raises `RemoteError` "no-secret" for a later one, "used-transform" for a second name of one transform.
        """
        epoch = group_epoch(name)
        if epoch not in self._secrets:
            if epoch > max(self._secrets):
                raise RemoteError("no-secret")
            raise InputError(
                f"a client that came after a removal lacks the secret of transform {name!r}: cluster anew, or have a member fold it"
            )
        return self._cache.transform(kind or self.kind, self._secrets[epoch], name, dimension)


_EPOCH = re.compile(r"@([1-9][0-9]{0,8})\Z", re.ASCII)


def group_epoch(name: str) -> int:
    """The group epoch that a transform's name speaks of. Raises `RemoteError` "used-transform" for a name that is no epoch's only one."""
    found = _EPOCH.search(name)
    if name.count("@") != (found is not None):
        raise RemoteError("used-transform")
    return 0 if found is None else int(found[1])


# --- gram ---------------------------------------------------------------------------------------------------------------------------


@dataclass
class Vectors:
    """One clustering epoch at the server: vectors, as clients hide them. What is added stays comparable until it closes.

    `transform` names what hides them: it stays that of the group epoch in which the clustering epoch was opened.
    """

    clients: list[int] = field(default_factory=list)
    rows: list[Array] = field(default_factory=list)
    transform: str = ""

    def extend(self, clients: Sequence[int], rows: Sequence[Array]) -> Gram:
        """The Gram so far, with the new rows (p, d) last."""
        self.clients += clients
        self.rows += [np.asarray(one, dtype=np.float64) for one in rows]
        return Gram.of_vectors(self.clients, np.stack(self.rows))

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps of the epoch; a session without this method is not resumed."""
        return {"clients": list(self.clients), "rows": list(self.rows), "transform": self.transform}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.clients, self.rows, self.transform = list(saved["clients"]), list(saved["rows"]), saved["transform"]


def sketched(epoch: int, sketch_dim: int | None) -> Callable[[Array], Array]:
    """The stage "sketch" of one clustering epoch: rows (..., d) become (..., sketch_dim) where d is larger, else they stay.

    Without `sketch_dim` all rows stay. The seed is public.
    """

    def reduce(rows: Array) -> Array:
        dimension = rows.shape[-1]
        if sketch_dim is None or dimension <= sketch_dim:
            return rows
        return sketch(public_seed("gram", epoch), dimension, sketch_dim).apply(rows)

    return reduce


# --- sum ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Contribution:
    """What one client brings to a mean: its `parts`, its `weight`, and the `labels` of the groups it counts towards."""

    client: int
    parts: Mapping[str, Array] = field(repr=False)
    weight: float = field(repr=False)
    labels: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SumCall:
    """One call of `mean`: who brings what. `round` and `number` name the call; `public_weights` says that the server knows the weights.

    `models` is the hash of what each client was sent to compute with, of which the members of a group should hold at most `models_at_most`
    different ones.
    """

    round: int
    number: int
    contributions: tuple[Contribution, ...]
    k: int
    floor: int
    public_weights: bool
    models: Mapping[int, bytes] = field(default_factory=dict)
    models_at_most: int = 1

    def members(self, label: int) -> list[Contribution]:
        return [one for one in self.contributions if label in one.labels]

    def counts(self) -> tuple[int, ...]:
        return tuple(len(self.members(label)) for label in range(self.k))


def check_hidden(verb: str, dimension: int, kind: str = "haar") -> None:
    """Refuse to hide a few numbers under a rotation: one number keeps its size, two their length."""
    if dimension < HAAR_SMALLEST:
        raise InputError(
            f"{verb}: a rotation of {dimension} number(s) hides little under sum = {kind!r}; it takes {HAAR_SMALLEST} or more at once"
        )


def weighted_mean(vectors: Sequence[Any], weights: Sequence[float]) -> Array:
    """Σ wᵢ xᵢ / Σ wᵢ, added up in float64 in the given order, in the dtype of the vectors, which are made one at a time."""
    total = np.zeros(vectors[0].shape, dtype=np.float64)
    addend = np.empty_like(total)
    for vector, weight in zip(vectors, weights, strict=True):
        np.multiply(np.asarray(vector), weight, out=addend)
        total += addend
    return np.asarray(total / sum(weights), dtype=vectors[0].dtype)


def places(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """Where each part lies, [start, stop), in the vector of all parts one after the other."""
    found, start = {}, 0
    for name, shape in shapes.items():
        found[name] = (start, start + int(np.prod(shape, dtype=int)))
        start = found[name][1]
    return found


MOST_WEIGHT = 0.9


def above_floor(call: SumCall) -> list[int]:
    """The groups that may be summed; `TooFewClients` if there is none.

    `InputError` where public weights make one client nearly all of a group: a floor is no protection then.
    """
    for label in range(call.k) if call.floor > 1 and call.public_weights else ():
        weights = [one.weight for one in call.members(label)]
        if len(weights) >= call.floor and max(weights) > MOST_WEIGHT * sum(weights):
            share = max(weights) / sum(weights)
            raise InputError(f"mean: one client has {share:.0%} of the weight of group {label}: the mean would be its value")
    counts = call.counts()
    groups = [label for label, count in enumerate(counts) if count >= max(1, call.floor)]
    if not groups:
        raise TooFewClients(tuple(count for count in counts if count), call.floor)
    return groups


def clear_means(call: SumCall, record: Recorder) -> tuple[GroupMean | None, ...]:
    """The means of contributions as they are. Guarantee: none. Reveals: every update and weight."""
    groups = above_floor(call)
    heard = [one for one in call.contributions if any(label in groups for label in one.labels)]
    sent = [dict(one.parts) if call.public_weights else {**one.parts, "weight": np.array(one.weight)} for one in heard]
    labels = [list(one.labels) for one in heard]
    record("update", "clients", "server", [one.client for one in heard], sent, readers=("server",), context={"labels": labels})
    means: list[GroupMean | None] = [None] * call.k
    for label in groups:
        members = call.members(label)
        weights = [one.weight for one in members]
        parts = {name: Shared(weighted_mean([one.parts[name] for one in members], weights)) for name in members[0].parts}
        means[label] = GroupMean(parts, float(sum(weights)), len(members), heard=tuple(one.client for one in members))
    return tuple(means)
