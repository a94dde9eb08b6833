"""What the two halves of a protection are given, and what they must be. `contract.protection.PROTECTIONS` has those that are registered."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..contract.calls import Recorder, SumCall
from ..contract.handles import Blind, GroupMean, Held, Released
from ..contract.operations import Then
from ..contract.protection import Protection
from ..privacy.client_level import ClippedMean, LocalGram
from ..protocols.entropy import Entropy
from ..protocols.errors import RemoteError
from ..protocols.keys import Roster
from ..protocols.orthonormal import Transform
from . import messages as m
from .client_ledger import ClientLedger
from .epochs import Epochs
from .handler import Apply
from .registry import ClientRegistry
from .release_policy import Operation
from .settings import Settings
from .store import Store
from .transforms import ClusteringName, Transforms
from .values import Values

__all__ = [
    "Allowed", "Asked", "ClientParts", "ComparisonServer", "Layout", "ServerParts", "SumServer", "joined", "no_stage", "size_of",
    "zeros_of",
]  # fmt: skip

Layout = tuple[m.Described, ...]
"""The names, dtypes and shapes of parts, in order."""
Allowed = Callable[[Operation, int, tuple[str, ...]], dict[str, Any]]
"""Parts of a held value, if the client's release policy lets an operation release them; raises `RemoteError` "forbidden"."""


@dataclass(frozen=True)
class ClientParts:
    """What a client half works with. `transforms` gives those of sums that clients share, `compared` that of a clustering epoch, once this
    client has erased those that are over; `samples` is the client's number of samples."""

    settings: Settings
    store: Store
    values: Values
    ledger: ClientLedger
    entropy: Entropy
    transforms: Callable[[], Transforms]
    compared: Callable[[ClusteringName, int, str], Transform]
    allowed: Allowed
    samples: Callable[[], int]

    @property
    def client(self) -> int:
        return self.settings.identity.client


class ClientHalf(Protocol):
    """A client half answers the requests that it has a method for; all others are refused with "forbidden".

    `give(ask, values)` releases the values of a `Give`, `step(ask)` takes a step of a secure sum, `deal(ask)` one of a dealing,
    `fold(ask, exchange)` folds a sum.
    """

    def give(self, ask: m.Give, values: Mapping[str, Any]) -> Generator[Apply, Any, m.Given]: ...


def no_stage(*given: Any) -> Any:
    """Stands for a method that a client half does not have."""
    raise RemoteError("forbidden")


@dataclass(frozen=True)
class Asked:
    """What is to be averaged: parts of the values held as `number`, their layout, each client's public weight (0: its sample count)."""

    number: int
    parts: tuple[str, ...]
    layout: Layout
    weight: Mapping[int, float]


@dataclass(frozen=True)
class ServerParts:
    """What a server half works with. `named` gives a transform's purpose its name under the group's secret that is in force."""

    registry: ClientRegistry
    session: bytes
    protection: Protection
    roster: Roster | None
    entropy: Entropy
    named: Callable[[str], str]
    clipped: ClippedMean | None = None
    local: LocalGram | None = None


class SumServer(Protocol):
    """The server half of a protection of sums. `choice`: the groups, where clients keep them to themselves."""

    def means(self, call: SumCall, asked: Asked, choice: m.Mine | m.Picks | None, record: Recorder) -> tuple[GroupMean | None, ...]:
        """The mean of each group; None for one below the minimum cohort size. Raises `TooFewClients` if no group is left."""
        ...

    def folded(
        self, clients: Sequence[int], blind: Sequence[Blind], times: Sequence[Blind], on: int | None, place: str, operation: str,
        record: Recorder,
    ) -> Blind:  # fmt: skip
        """Transformed parts made one by a client. Protections that give none of these have no such method."""
        ...


class ComparisonServer(Protocol):
    """The server half of a protection of comparisons, with its open clustering epochs."""

    @property
    def epochs(self) -> Epochs[Any]: ...

    def gram(
        self, held: Held, number: int, clients: list[int], then: Then, against: Held | None, record: Recorder, shape: tuple[int, ...]
    ) -> Released:  # fmt: skip
        """Ask `clients` for their vectors of `held`, which they know by `number` and that most have in this `shape`, and run `then`."""
        ...

    def close(self, held: Held) -> None: ...

    def end(self) -> None: ...

    def listen(self, say: Callable[[str], None], tick: Callable[[int, int], None]) -> None: ...


def size_of(layout: Layout) -> int:
    """How many numbers parts have in all."""
    return sum(int(np.prod(part.shape, dtype=int)) for part in layout)


def zeros_of(part: m.Described) -> Any:
    """An array of a part's dtype and shape that takes no memory."""
    return np.broadcast_to(np.zeros((), part.dtype), part.shape)


def joined(values: Mapping[str, Any]) -> Any:
    """All parts as one vector, in order."""
    return np.concatenate([np.ravel(np.asarray(value)) for value in values.values()])
