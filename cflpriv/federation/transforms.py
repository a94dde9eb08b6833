"""Transforms that clients share, made from a secret that the server lacks; and the public sketch of what is compared."""

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
    """Transforms that were made, by kind, secret, name and length, as many as fit into `keep_bytes`. Whoever has a secret finds its own."""

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

    def erase_compared(self, keys: Collection[bytes]) -> None:
        """Forget the transforms of clustering epochs but those made of these keys."""
        for key in [key for key in self._made if key[2].startswith("gram/") and key[1] not in keys]:
            del self._made[key]

    def shared(self, secrets: Mapping[int, bytes], kind: str) -> "Transforms":
        """The transforms of those who have just these secrets: the same object for all of them."""
        return self._shared.setdefault((tuple(sorted(secrets.items())), kind), Transforms(dict(secrets), kind, self))


class Transforms:
    """The transforms of sums that clients share, made from the `secrets` of their group by group epoch. The server holds none of these.

    These last: what is under them (means) is opened long after, so a stolen one opens every sum of its group epoch.

    `kind` is that of updates. Where clients are removed from the group a new epoch starts: names of its transforms end in "@EPOCH".
    """

    def __init__(self, secrets: Mapping[int, bytes], kind: str, cache: TransformCache) -> None:
        self._secrets, self.kind, self._cache = secrets, kind, cache

    def __call__(self, name: str, dimension: int, kind: str | None = None) -> Transform:
        """Raises `InputError` for an epoch whose secret is not held and will not be.

        Raises `RemoteError` "no-secret" for a later one, "used-transform" for a second name of one transform.
        """
        epoch = group_epoch(name)
        check_secret(name, self._secrets)
        return self._cache.transform(kind or self.kind, self._secrets[epoch], name, dimension)


def check_secret(name: str, held: Collection[int]) -> None:
    """Whether the secret of the group epoch that a transform's name speaks of is `held`. Raises as `Transforms` does."""
    epoch = group_epoch(name)
    if epoch not in held:
        if epoch > max(held):
            raise RemoteError("no-secret")
        raise InputError(
            f"a client that came after a removal lacks the secret of transform {name!r}: cluster anew, or have a member fold it"
        )


_CLUSTERING = re.compile(r"gram/(0|[1-9][0-9]{0,15})((?:[+](?:0|[1-9][0-9]{0,15}))*)((?:@[1-9][0-9]{0,8})?)", re.ASCII)
MOST_OPEN = 28
"""Earlier clustering epochs that may stay open beside a new one: their numbers are in its name."""


@dataclass(frozen=True)
class ClusteringName:
    """What a transform's name for a clustering epoch says: its number, the earlier ones that stay `open`, and what the transform is of.

    "gram/7+3+5@1" is that of epoch 7 under the secret of group epoch 1, and says that all earlier epochs but 3 and 5 are over. `purpose`
    is "gram/7@1": an epoch has one transform, whatever is open beside it.
    """

    number: int
    open: tuple[int, ...]
    purpose: str


def clustering_name(name: str) -> ClusteringName | None:
    """What a transform's name for a clustering epoch says, None for any other name, such as one that says it in another way."""
    found = _CLUSTERING.fullmatch(name)
    if found is None:
        return None
    number, beside = int(found[1]), tuple(int(one) for one in found[2].split("+")[1:])
    if len(beside) > MOST_OPEN or any(one >= after for one, after in pairwise((*beside, number))):
        return None
    return ClusteringName(number, beside, f"gram/{number}{found[3]}")


def clustering_purpose(number: int, beside: Iterable[int]) -> str:
    """The name of a new clustering epoch's transform, where the epochs `beside` stay open. Raises `InputError` for too many of these."""
    numbers = sorted(beside)
    if len(numbers) > MOST_OPEN:
        raise InputError(f"gram: {len(numbers)} clustering epochs are open; under a shared transform there may be {MOST_OPEN}: close some")
    return "gram/" + "+".join(map(str, (number, *numbers)))


_EPOCH = re.compile(r"@([1-9][0-9]{0,8})\Z", re.ASCII)


def group_epoch(name: str) -> int:
    """The group epoch that a transform's name speaks of. Raises `RemoteError` "used-transform" for a name that is no epoch's only one."""
    found = _EPOCH.search(name)
    if name.count("@") != (found is not None):
        raise RemoteError("used-transform")
    return 0 if found is None else int(found[1])


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


def check_hidden(operation: str, dimension: int, kind: str = "haar") -> None:
    """Refuse to hide a few numbers under a rotation: one number keeps its size, two their length."""
    if dimension < HAAR_SMALLEST:
        raise InputError(
            f"{operation}: a rotation of {dimension} number(s) hides little under sum = {kind!r}; it takes {HAAR_SMALLEST} or more at once"
        )
