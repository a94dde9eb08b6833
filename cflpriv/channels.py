"""What stands between clients and the server: one channel per verb that releases something.

`channels` builds what a `Protection` asks for. Each channel has a client side (what leaves) and a server side (what is made of it), so
that the algorithms above and the protections below meet in three small interfaces only.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from .errors import InputError
from .handles import GroupMean, Shared
from .protection import Protection
from .protocols.entropy import Entropy
from .protocols.errors import RemoteError, TooFewClients
from .protocols.orthonormal import TRANSFORMS, Transform, transform
from .protocols.sketch import public_seed, sketch
from .similarity import Gram
from .types import Array

__all__ = [
    "STAGES", "Channels", "Contribution", "GatherChannel", "GramChannel", "GramSession", "Recorder", "SumCall", "SumChannel", "TransformCache",
    "Transforms",    "Vectors", "above_floor", "channels", "check_hidden", "group_epoch", "places", "sketched", "weighted_mean",
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
    """Transforms that were made, by kind, secret, name and length, as many as fit into `keep_bytes`. Only who has a secret finds its own."""

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
        """Raises `RemoteError` "no-secret" for an epoch whose secret is not held, "used-transform" for a second name of one transform."""
        epoch = group_epoch(name)
        if epoch not in self._secrets:
            raise RemoteError("no-secret")
        return self._cache.transform(kind or self.kind, self._secrets[epoch], name, dimension)


_EPOCH = re.compile(r"@([1-9][0-9]{0,8})\Z", re.ASCII)


def group_epoch(name: str) -> int:
    """The group epoch that a transform's name speaks of. Raises `RemoteError` "used-transform" for a name that is no epoch's only one."""
    found = _EPOCH.search(name)
    if name.count("@") != (found is not None):
        raise RemoteError("used-transform")
    return 0 if found is None else int(found[1])


# --- gram ---------------------------------------------------------------------------------------------------------------------------


class GramSession(Protocol):
    """One clustering epoch: what is added stays comparable until it closes."""

    def upload(self, client: int, rows: Array) -> Mapping[str, Array]:
        """Client side: what leaves the client for its `rows` (p, d)."""
        ...

    def extend(self, clients: Sequence[int], uploads: Sequence[Mapping[str, Array]], p: int, record: Recorder) -> Gram:
        """Where the Gram may be seen: the Gram so far, with the new rows last. `record` takes what server and key holder say meanwhile."""
        ...


class GramChannel(Protocol):
    """`where` the Gram may be seen, and whether `evidence` drawn from it (or which of it, by name) may come back to the server."""

    @property
    def where(self) -> Literal["server", "key-holder"]: ...

    @property
    def evidence(self) -> bool | tuple[str, ...]: ...

    def open(self, epoch: int) -> GramSession: ...


@dataclass
class Vectors:
    """Vectors, perhaps changed by `protect`, which knows whose they are, collected at the server."""

    protect: Callable[[int, Array], Array]
    clients: list[int] = field(default_factory=list)
    rows: list[Array] = field(default_factory=list)

    def upload(self, client: int, rows: Array) -> Mapping[str, Array]:
        return {"rows": self.protect(client, rows)}

    def extend(self, clients: Sequence[int], uploads: Sequence[Mapping[str, Array]], p: int, record: Recorder) -> Gram:
        self.clients += clients
        self.rows += [np.asarray(upload["rows"], dtype=np.float64) for upload in uploads]
        return Gram.of_vectors(self.clients, np.stack(self.rows))

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps of the epoch; a session without this method is not resumed."""
        return {"clients": list(self.clients), "rows": list(self.rows)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.clients, self.rows = list(saved["clients"]), list(saved["rows"])


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


@dataclass(frozen=True)
class ClearGram:
    """Guarantee: none. Reveals: every signature, or its public sketch. Source: PACFL, Algorithm 1."""

    sketch_dim: int | None = None
    where: Literal["server", "key-holder"] = "server"
    evidence: bool = True

    def open(self, epoch: int) -> GramSession:
        reduce = sketched(epoch, self.sketch_dim)
        return Vectors(lambda client, rows: reduce(rows))


# --- sum ----------------------------------------------------------------------------------------------------------------------------


STAGES = ("Advert", "Shares", "Masked", "Consistent", "Reveal")
"""The messages of a client in a secure sum, by which dropouts are named."""
BEFORE_UPLOAD = STAGES[:3]


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
    different ones; `drops` is the stage of secure aggregation at which a client vanishes.
    """

    round: int
    number: int
    contributions: tuple[Contribution, ...]
    k: int
    floor: int
    public_weights: bool
    models: Mapping[int, bytes] = field(default_factory=dict)
    models_at_most: int = 1
    drops: Mapping[int, str] = field(default_factory=dict)

    def members(self, label: int) -> list[Contribution]:
        return [one for one in self.contributions if label in one.labels]

    def counts(self) -> tuple[int, ...]:
        return tuple(len(self.members(label)) for label in range(self.k))

    def arriving(self) -> "SumCall":
        """The call without the clients that vanish before their update is sent, for sums in a single message."""
        return replace(self, contributions=tuple(one for one in self.contributions if self.drops.get(one.client) not in BEFORE_UPLOAD))


class SumChannel(Protocol):
    """`private_weights`: weights may be a client's secret. `oblivious`: labels may be. `overlapping`: groups may share members."""

    @property
    def name(self) -> str: ...

    @property
    def private_weights(self) -> bool: ...

    @property
    def oblivious(self) -> bool: ...

    @property
    def overlapping(self) -> bool: ...

    @property
    def binds_models(self) -> bool: ...

    def means(self, call: SumCall, record: Recorder) -> tuple[GroupMean | None, ...]:
        """The mean of each group; None for a group below the floor. Raises `TooFewClients` if no group is left."""
        ...


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


@dataclass(frozen=True)
class ClearSum:
    """Guarantee: none. Reveals: every update and weight."""

    name: str = "none"
    private_weights: bool = True
    oblivious: bool = False
    overlapping: bool = True
    binds_models: bool = False

    def means(self, call: SumCall, record: Recorder) -> tuple[GroupMean | None, ...]:
        call = call.arriving()
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


# --- gather -------------------------------------------------------------------------------------------------------------------------


class GatherChannel(Protocol):
    @property
    def name(self) -> str: ...

    def release(self, client: int, values: Mapping[str, Array]) -> Mapping[str, Array]:
        """Client side: what leaves the client for its `values`."""
        ...


@dataclass(frozen=True)
class ClearGather:
    """Guarantee: none. Reveals: every value."""

    name: str = "none"

    def release(self, client: int, values: Mapping[str, Array]) -> Mapping[str, Array]:
        return values


@dataclass(frozen=True)
class Channels:
    """The three places where protection meets the algorithm."""

    gram: GramChannel
    sum: SumChannel
    gather: GatherChannel


def channels(protection: Protection, transforms: Transforms, clients: tuple[int, ...], entropy: Entropy) -> Channels:
    """What does what `protection` asks for. `transforms` and what `entropy` feeds belong to the `clients`."""
    from .rotations import BlindSum, RotatedGram

    sketch_dim = protection.sketch_dim if "sketch" in protection.gram else None
    kind = next((stage for stage in protection.gram if stage in TRANSFORMS), None)
    gram: GramChannel = ClearGram(sketch_dim) if kind is None else RotatedGram(transforms, kind, sketch_dim)
    if "ckks" in protection.gram:
        from .encrypted import EncryptedGram, Settings  # the protocol is loaded where it is used

        gram = EncryptedGram(clients, Settings.of(protection, sketch_dim), entropy)
    total: SumChannel = ClearSum()
    if protection.sum in TRANSFORMS:
        total = BlindSum(transforms, protection.sum, fixed=protection.transform == "fixed")
    elif protection.secure:
        from .secure_sum import ObliviousSecaggSum, Parties, SecaggSum  # the protocol is loaded where it is used

        parties = Parties.of(clients, protection.secure_sum, protection.smallest_sum, entropy)
        total = SecaggSum(parties) if protection.sum == "secagg" else ObliviousSecaggSum(parties)
    return Channels(gram, total, ClearGather())
