"""Interfaces of the two halves of a protection, and what they are given. `contract.protection.PROTECTIONS` has the registered ones."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from ..contract.calls import Recorder, SumCall
from ..contract.handles import GroupMean, Held, PartLayout, Released
from ..contract.operations import Then
from ..contract.protection import Protection
from ..contract.transformed_parts import Transformed
from ..errors import InputError
from ..privacy.client_level import ClippedMean, LocalGram
from ..privacy.settings import SumNoise
from ..protocols.entropy import Entropy
from ..protocols.errors import RemoteError
from ..protocols.keys import Roster
from ..protocols.orthonormal import Transform
from ..types import Array, check_array
from . import messages as m
from .client_ledger import ClientLedger
from .epochs import Epochs
from .host import ApplyTransform
from .registry import ClientRegistry
from .release_policy import Operation
from .settings import Settings
from .store import Store
from .transforms import ClusteringName, Transforms
from .values import Values

__all__ = [
    "Allowed", "Asked", "ClientParts", "ComparisonServer", "Folding", "Portions", "ServerParts", "SumServer", "at_once", "no_stage",
]  # fmt: skip

SLIGHTLY = 1e-4
"""Rows beyond a bound by this share of it are unit vectors in float32; protocols take ten times as much."""
Allowed = Callable[[Operation, int, tuple[str, ...]], dict[str, Any]]
"""Parts of a held value that an operation releases. Raises `RemoteError` "forbidden" if the client's release policy keeps them."""


@dataclass(frozen=True)
class ClientParts:
    """What a client half works with.

    `transforms`: the shared transforms of sums. `compared`: that of a clustering epoch; it erases the keys of ended epochs first.
    `samples`: the client's number of samples. `sum_limits`: how many models the members of one secure sum may have been sent, and the
    least and the largest clip of one. `failed` logs that the client's data gave no usable value, and tells no server.
    `weighed(parts, by_samples)` raises `RemoteError` "not-agreed" if earlier sums of one of the parts weighed clients in the other way.
    """

    settings: Settings
    store: Store
    values: Values
    ledger: ClientLedger
    entropy: Entropy
    transforms: Callable[[], Transforms]
    compared: Callable[[ClusteringName, int, str], Transform]
    allowed: Allowed
    samples: Callable[[], int]
    sum_limits: Callable[[], tuple[int, tuple[float, float]]]
    weighed: Callable[[tuple[str, ...], bool], None]
    failed: Callable[[Exception], None]

    @cached_property
    def alike(self) -> bool:
        """Whether answers must be alike for all data: the client's protection hides values, or it demands privacy."""
        protection = self.settings.protection
        return protection.sums.hides or protection.comparison.hides or self.ledger.unit != "none"

    def finite(self, name: str, value: Any) -> Array:
        """A value that is about to leave; zeros in place of numbers that are not finite, or `InputError` where answers may differ."""
        array = np.asarray(value)
        try:
            return check_array(f"client {self.client}: {name}", array, kind="biuf")
        except InputError as error:
            if not self.alike:
                raise
            self.failed(error)
            return np.zeros(array.shape, array.dtype if array.dtype.kind in "biuf" else np.float64)

    def within(self, rows: Array, bound: float, key: str) -> Array:
        """Rows (p, d) no longer than a public `bound`, that of the `key`; longer ones are scaled down to it."""
        norms = np.linalg.norm(rows, axis=-1, keepdims=True)
        longest = float(norms.max(initial=0.0))
        if longest <= bound * (1 + SLIGHTLY):
            return rows
        why = f"a vector of norm {longest:.3g} is above protection.{key} = {bound:g}, the public bound; raise it"
        self.failed(InputError(f"client {self.client}: {why}"))
        return np.asarray(rows * (bound / np.maximum(norms, bound)))

    @property
    def client(self) -> int:
        return self.settings.identity.client


class ClientHalf(Protocol):
    """A client half answers the requests that it has a method for; the client refuses all others with "forbidden".

    `give(ask, values)` releases the values of a `Give`. Optional: `step(ask)` for secure sums, `deal(ask)` for dealings, and
    `fold(ask, exchange)` for transformed sums.
    """

    def give(self, ask: m.Give, values: Mapping[str, Any]) -> Generator[ApplyTransform, Any, m.Given]: ...


def no_stage(*request: Any) -> Any:
    """In place of a method that a client half lacks."""
    raise RemoteError("forbidden")


@dataclass(frozen=True)
class Asked:
    """What is averaged: parts of the values held as `number`, their layout, each client's public weight (0: its sample count).

    `noise`: what clients add to values that have no noise of their own. `spread`: of the weights inside the values.
    """

    number: int
    parts: tuple[str, ...]
    layout: PartLayout
    weight: Mapping[int, float]
    noise: SumNoise | None = None
    spread: float = 1.0


@dataclass(frozen=True)
class Folding:
    """Transformed parts that become one, times the number in `times` if there is any. `place` names the call."""

    operation: str
    transformed: Sequence[Transformed]
    times: Sequence[Transformed]
    place: str


Portions = Callable[[Sequence[int], int], Iterable[Sequence[int]]]


def at_once(clients: Sequence[int], nbytes: int) -> Iterable[Sequence[int]]:
    """All clients in one portion, whatever the size of their values."""
    return (clients,)


@dataclass(frozen=True)
class ServerParts:
    """What a server half works with. `named` gives the name of a purpose's transform under the current group secret.

    `portions`: how clients whose values have so many bytes each are asked for them, all at once or few after the other.
    """

    registry: ClientRegistry
    session: bytes
    protection: Protection
    roster: Roster | None
    entropy: Entropy
    named: Callable[[str], str]
    clipped: ClippedMean | None = None
    local: LocalGram | None = None
    portions: Portions = at_once


class SumServer(Protocol):
    """The server half of a protection of sums. `choice`: the groups that clients keep private."""

    def means(self, call: SumCall, asked: Asked, choice: m.HeldValue | m.Picks | None, record: Recorder) -> tuple[GroupMean | None, ...]:
        """The mean of each group; None for one below the minimum cohort size. Raises `TooFewClients` if no group is left."""
        ...

    def folded(self, folding: Folding, clients: Sequence[int], record: Recorder) -> Transformed | None:
        """Have the first client that can do so fold transformed parts; None if no client can. Other protections lack this method."""
        ...


class ComparisonServer(Protocol):
    """The server half of a protection of comparisons, with its open clustering epochs."""

    @property
    def epochs(self) -> Epochs[Any]: ...

    def gram(
        self, held: Held, number: int, clients: list[int], then: Then, against: Held | None, record: Recorder, shape: tuple[int, ...]
    ) -> Released:  # fmt: skip
        """Ask `clients` for their vectors of `held` (their `number`, usually of this `shape`), and run `then`."""
        ...

    def close(self, held: Held) -> None: ...

    def end(self) -> None: ...

    def listen(self, notify: Callable[[str], None], tick: Callable[[int, int], None]) -> None: ...
