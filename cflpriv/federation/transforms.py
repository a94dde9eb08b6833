"""Transforms that clients derive from their common secret, and the public sketch of compared vectors."""

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..errors import InputError
from ..protocols.errors import RemoteError
from ..protocols.orthonormal import Transform, transform
from ..protocols.sketch import public_seed, sketch
from ..types import Array

__all__ = [
    "ClusteringName", "TransformCache", "Transforms", "check_hidden", "check_secret", "clustering_name", "clustering_purpose",
    "group_epoch", "sketched",
]  # fmt: skip

HAAR_SMALLEST = 8


class TransformCache:
    """The latest transforms, by kind, secret, name and length, as many as fit into `keep_bytes`."""

    def __init__(self, keep_bytes: int = 1 << 29) -> None:
        self._keep_bytes = keep_bytes
        self._made: OrderedDict[tuple[str, bytes, str, int], Transform] = OrderedDict()
        self._shared: dict[tuple[Any, str], Transforms] = {}

    def transform(self, kind: str, secret: bytes, name: str, dimension: int) -> Transform:
        """The transform of a purpose under a secret."""
        key = (kind, secret, name, dimension)
        if key not in self._made:
            self._made[key] = transform(kind, secret, name, dimension)
            while len(self._made) > 2 and sum(made.nbytes for made in self._made.values()) > self._keep_bytes:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return self._made[key]

    def erase_compared(self, keys: Collection[bytes]) -> None:
        """Forget the transforms of clustering epochs, except those of these keys."""
        for key in [key for key in self._made if key[2].startswith("gram/") and key[1] not in keys]:
            del self._made[key]

    def shared(self, secrets: Mapping[int, bytes], kind: str) -> "Transforms":
        """The transforms of clients with exactly these secrets: one object for all of them."""
        return self._shared.setdefault((tuple(sorted(secrets.items())), kind), Transforms(dict(secrets), kind, self))


class Transforms:
    """The shared transforms of sums, of one `kind`, derived from the `secrets` of the clients by group epoch. The server has no secret.

    Secrets are kept, because means are opened long after they were formed: a stolen secret opens every sum of its group epoch. Removing
    clients begins a new group epoch; names of its transforms end in "@EPOCH".
    """

    def __init__(self, secrets: Mapping[int, bytes], kind: str, cache: TransformCache) -> None:
        self._secrets, self.kind, self._cache = secrets, kind, cache

    def __call__(self, name: str, dimension: int, kind: str | None = None) -> Transform:
        """Raises `InputError` for an earlier group epoch whose secret this client never gets.

        Raises `RemoteError` "no-secret" for a later epoch, "used-transform" for a second name of one transform.
        """
        epoch = group_epoch(name)
        check_secret(name, self._secrets)
        return self._cache.transform(kind or self.kind, self._secrets[epoch], name, dimension)


def check_secret(name: str, held: Collection[int]) -> None:
    """Check that the secret of a transform's group epoch is `held`. Raises as `Transforms` does."""
    epoch = group_epoch(name)
    if epoch not in held:
        if epoch > max(held):
            raise RemoteError("no-secret")
        raise InputError(
            f"a client that came after a removal lacks the secret of transform {name!r}: cluster anew, or have a member fold it"
        )


_CLUSTERING = re.compile(r"gram/(0|[1-9][0-9]{0,15})((?:[+](?:0|[1-9][0-9]{0,15}))*)((?:@[1-9][0-9]{0,8})?)", re.ASCII)
MOST_OPEN = 28
"""The most earlier clustering epochs that may stay open beside a new one, whose name lists them."""


@dataclass(frozen=True)
class ClusteringName:
    """The name of a clustering epoch's transform: the epoch's number, the earlier epochs that stay `open`, and the `purpose`.

    "gram/7+3+5@1" is the name for epoch 7 under the secret of group epoch 1; of the earlier epochs only 3 and 5 are open. The `purpose` is
    "gram/7@1": an epoch has one transform, whatever else is open.
    """

    number: int
    open: tuple[int, ...]
    purpose: str


def clustering_name(name: str) -> ClusteringName | None:
    """A parsed name of a clustering epoch's transform. None for any other name, also for a second spelling of one."""
    match = _CLUSTERING.fullmatch(name)
    if match is None:
        return None
    number, beside = int(match[1]), tuple(int(other) for other in match[2].split("+")[1:])
    if len(beside) > MOST_OPEN or any(before >= after for before, after in pairwise((*beside, number))):
        return None
    return ClusteringName(number, beside, f"gram/{number}{match[3]}")


def clustering_purpose(number: int, beside: Iterable[int]) -> str:
    """The name of a new clustering epoch's transform, if the epochs `beside` stay open. Raises `InputError` for too many of them."""
    numbers = sorted(beside)
    if len(numbers) > MOST_OPEN:
        raise InputError(f"gram: {len(numbers)} clustering epochs are open; under a shared transform there may be {MOST_OPEN}: close some")
    return "gram/" + "+".join(map(str, (number, *numbers)))


_EPOCH = re.compile(r"@([1-9][0-9]{0,8})\Z", re.ASCII)


def group_epoch(name: str) -> int:
    """The group epoch in a transform's name. Raises `RemoteError` "used-transform" for a second spelling of a name."""
    match = _EPOCH.search(name)
    if name.count("@") != (match is not None):
        raise RemoteError("used-transform")
    return 0 if match is None else int(match[1])


def sketched(epoch: int, sketch_dim: int | None) -> Callable[[Array], Array]:
    """The stage "sketch" of one clustering epoch: it maps rows (..., d) to (..., sketch_dim) if d is larger (None: never).

    The seed is public.
    """

    def reduce(rows: Array) -> Array:
        dimension = rows.shape[-1]
        if sketch_dim is None or dimension <= sketch_dim:
            return rows
        return sketch(public_seed("gram", epoch), dimension, sketch_dim).apply(rows)

    return reduce


def check_hidden(operation: str, dimension: int, kind: str = "haar") -> None:
    """Raises `InputError` for too few numbers: a rotation keeps the size of one number, and the norm of two."""
    if dimension < HAAR_SMALLEST:
        raise InputError(
            f"{operation}: a rotation of {dimension} number(s) hides little under sum = {kind!r}; it takes {HAAR_SMALLEST} or more at once"
        )
