"""What parameters look like on their way: what travels of a value, its hash, and what each client is given to choose from."""

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from ..contract.handles import Held, Labels, Shared, label_sets
from ..errors import InputError
from ..types import Array

if TYPE_CHECKING:  # torch is loaded where something is computed
    from ..contract.operations import Parameter

__all__ = ["SMALL", "check_small", "choices", "closed", "hash_payload", "made", "owned", "recorded", "wire"]

SMALL = 16
"""Integers that `gram` releases may exceed the number of clients by this much."""


def wire(name: str, value: Array | Shared) -> dict[str, Array]:
    """What travels of a parameter: a clear part as it is, blind parts as the server has them, own parts not at all."""
    if not isinstance(value, Shared):
        return {name: np.asarray(value)}
    sent = {} if value.clear is None else {name: value.clear}
    return sent | {f"{name}/{term.transform}": term.value for term in value.blind}


def blind_places(name: str, value: Array | Shared) -> dict[str, tuple[int, int, int]]:
    """Where in its opened vector each blind part lies, by the name it travels under: [start, stop, dimension of the vector]."""
    blind = value.blind if isinstance(value, Shared) else ()
    return {f"{name}/{one.transform}": (one.start, one.stop, one.dimension or len(one.value)) for one in blind}


def recorded(
    params: "Mapping[str, Parameter]", lists: Mapping[str, list[Any]], chosen: tuple[int, ...]
) -> tuple[dict[str, Array], dict[str, tuple[int, int, int]]]:  # fmt: skip
    """For the record: what these clients are sent, in the clear and blind, and where each blind part lies (`blind_places`)."""
    payload: dict[str, Array] = {}
    blind: dict[str, tuple[int, int, int]] = {}
    for name, value in params.items():
        if isinstance(value, Held):
            continue
        items = [(name, value)] if name not in lists else [(f"{name}/{i}", lists[name][i]) for i in chosen or range(len(lists[name]))]
        for path, one in items:
            payload |= wire(path, one)  # type: ignore[arg-type]
            blind |= blind_places(path, one)  # type: ignore[arg-type]
    return payload, blind


def hash_payload(payload: Mapping[str, Array]) -> bytes:
    """The SHA-256 of what a client was sent to compute with."""
    digest = sha256()
    for name in sorted(payload):
        array = np.ascontiguousarray(payload[name])
        digest.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
        digest.update(array.data)
    return digest.digest()


def choices(
    params: "Mapping[str, Parameter]", which: Labels | Held | None, clients: Sequence[int], value: Callable[[Held, int], Any]
) -> tuple[dict[str, list[Any]], dict[int, tuple[int, ...]], bool]:
    """The lists among the parameters, each client's picks from them, and whether any may have several."""
    lists = {name: list(one) for name, one in params.items() if isinstance(one, list | tuple)}
    sizes = {len(one) for one in lists.values()}
    if which is None:
        return lists, {}, False
    if len(sizes) != 1:
        raise InputError(f"compute: `which` needs lists of one length to pick from, got lengths {sorted(sizes)}")
    labels: Labels = {client: value(which, client) for client in clients} if isinstance(which, Held) else which
    return lists, *label_sets(labels, clients, sizes.pop(), "compute: which")


def made(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Values that are made on demand, made."""
    return {name: value if isinstance(value, dict) else np.asarray(value) for name, value in parts.items()}


def owned(value: Any) -> Any:
    """A result that no later change of a parameter reaches."""
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return array if array.flags.owndata and array.flags.writeable else array.copy()
    return value


def closed(value: Array) -> Array:
    """The same array, not to be written into: clients share it."""
    view = value.view()
    view.flags.writeable = False
    return view


def check_small(result: Mapping[str, Any], n: int) -> None:
    """Labels and small integers may come back from where the Gram is seen, at most one for each of its n clients.

    Real numbers, words and large integers would carry evidence past the release.
    """
    for name, value in result.items():
        array = np.asarray(value)
        if array.dtype.kind not in "biu":
            raise TypeError(f"gram: result {name!r} must be labels or small integers, got {array.dtype}; put it into the evidence")
        if array.ndim > 1 or array.size > n or (array.size and max(int(array.max()), -int(array.min())) > n + SMALL):
            raise TypeError(f"gram: result {name!r} must be at most {n} integers up to {n + SMALL}; put it into the evidence")
