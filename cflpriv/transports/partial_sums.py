"""Updates that stay at their host: where sums are in the clear, a host adds up those of its clients, and one vector travels for all.

What the server learns of an update in the clear is recorded without its digest where all together are large
(`contract.transcript.LARGEST_DIGESTED_BYTES`), so then nobody needs to read single ones. Where somebody does, they are fetched one by one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..contract.protection import Protection
from ..federation import messages as m
from ..types import Array

__all__ = ["Outline", "Remaining", "added", "may_stay", "outlined"]


@dataclass(frozen=True)
class Outline:
    """An answer whose values stay at the host: the name, shape and dtype of each, and the sample count."""

    parts: tuple[tuple[str, tuple[int, ...], str], ...]
    samples: int

    @property
    def nbytes(self) -> int:
        return sum(int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize for _, shape, dtype in self.parts)


def outlined(answer: m.Given) -> Outline:
    """The outline of an answer."""
    return Outline(tuple((array.name, tuple(array.value.shape), array.value.dtype.str) for array in answer.values), answer.samples)


def may_stay(ask: m.PartyRequest, protection: Protection) -> bool:
    """Whether what is asked is an update for a plain sum. Secure and transformed sums, robust rules and noise need each client's own."""
    clear = not (protection.sums.hides or protection.sums.transformed or protection.secure) and protection.robust == "none"
    return clear and isinstance(ask, m.Give) and ask.operation == "sum" and ask.noise is None


class Remaining:
    """A value at a host. `numpy.asarray` fetches it; `added_up` fetches the weighted sum of several at the same `host`, in float64.

    It lasts until the host is next asked something: as long as a mean is taken.
    """

    def __init__(self, host: int, at: tuple[int, str], outline: tuple[tuple[int, ...], str], fetch: Callable[..., Array]) -> None:
        self.host, self.at = host, at
        self.shape, self.dtype = outline[0], np.dtype(outline[1])
        self._fetch = fetch

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=int)) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self._fetch((self.at,), (1.0,)).astype(self.dtype if dtype is None else dtype)

    def added_up(self, several: Sequence["Remaining"], weights: Sequence[float]) -> Array:
        return self._fetch(tuple(remaining.at for remaining in several), tuple(weights))


def added(left: Mapping[int, m.Given], at: Sequence[tuple[int, str]], weights: Sequence[float]) -> Array:
    """At the host: the weighted sum of values by place and name, which are made one at a time."""
    total: Any = 0.0
    for (place, name), weight in zip(at, weights, strict=True):
        (value,) = (array.value for array in left[place].values if array.name == name)
        total = total + weight * np.asarray(value, dtype=np.float64)
    return np.asarray(total)
