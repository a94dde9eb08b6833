"""The operations with which server code computes on clients' data without holding them. Algorithms use these only.

`federation.server` has the one implementation. Nothing that clients own is reachable through it: what an operation gives back is a handle
(`Held`), a sum (`Shared`), or what the protection in force releases. Every message between parties goes to the transcript.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from ..keys import Key, check_ranges
from ..randomness import Stream
from ..types import Array
from .handles import GroupMean, Held, Labels, Released, Shared

if TYPE_CHECKING:  # parties that only speak a protocol load neither torch nor scipy
    from ..clustering.similarity import Gram
    from ..engine import Task

__all__ = ["Federation", "GramView", "Parameter", "Participation", "Results", "Sampling", "SamplingMode", "Then"]

Parameter = Array | Shared | Held | Sequence[Array] | Sequence[Shared]
"""A parameter of `compute`: one for all, a list to choose from, or each client's own."""

SamplingMode = Annotated[
    Literal["global", "per_cluster", "fixed_cohorts"],
    Key(
        "How a round's clients are drawn: from all (`global`), from each cluster (`per_cluster`), or fixed disjoint sets in turn "
        "(`fixed_cohorts`)."
    ),
]
Participation = Annotated[float, Key("Share of the clients that a round draws.", "(0, 1]")]


@dataclass(frozen=True)
class Sampling:
    """How a round's clients are chosen: a share `participation` of all ("global", the papers') or of each cluster ("per_cluster").

    "fixed_cohorts" deals each cluster into cohorts of about that share once and takes one after the other, against differencing of sums.
    """

    mode: SamplingMode = "global"
    participation: Participation = 1.0

    def __post_init__(self) -> None:
        check_ranges(type(self), vars(self))


@dataclass(frozen=True, eq=False)
class GramView:
    """The input of `then`: the whole `gram` so far, its `new` clients (they come last), and `memory` until the epoch closes."""

    gram: "Gram"
    new: tuple[int, ...]
    memory: dict[str, Any]


Then = Callable[[GramView], tuple[Mapping[str, Any], Mapping[str, Any]]]
"""A public function, run by the party that may see the Gram: (result, evidence). The result is labels and small integers only.

One that is to travel to a key holder is a frozen dataclass that declares its `results`.
"""

Results = Mapping[str, Literal["all", "new", "some", "one"]]
"""What a function's result holds under each name: a number for every client, for every new one, for some of their clusters, or one."""


class Federation(Protocol):
    """The operations. `on` is a subset of clients (default: all present, or all that hold the value).

    Weights under a transformed mean or a private unit are "equal" or public, under secure sums "equal" or, with `max_weight`, "examples".
    Labels are any mapping by client, or `Held`.
    """

    @property
    def clients(self) -> tuple[int, ...]:
        """The clients present, ascending."""
        ...

    @property
    def round(self) -> int:
        """The number of the current round, −1 before the first."""
        ...

    @property
    def merge_below(self) -> int:
        """Clusters smaller than this should join their nearest while clustering (1: none)."""
        ...

    def stream(self, purpose: str, client: int = -1) -> Stream:
        """The server's public randomness for a purpose in this round."""
        ...

    def cohort(self, labels: Labels | Held | None = None) -> tuple[int, ...]:
        """Sample this round's clients. `per_cluster` sampling needs `labels` that the server has."""
        ...

    def compute(
        self,
        task: "Task",
        params: Mapping[str, Parameter] | None = None,
        which: Labels | Held | None = None,
        on: Sequence[int] | None = None,
    ) -> Held:
        """Clients run `task`. No value leaves them.

        `which` picks from every list of `params`: a label (or several) per client, or a `Held` of choices, which only the client knows:
        then the whole list is sent. Without `which` a client gets whole lists. `InputError` for a client without a
        label: name in `on` those that are placed.
        """
        ...

    def gram(self, held: Held, then: Then, against: Held | None = None, on: Sequence[int] | None = None) -> Released:
        """Add what `held` holds, (p, d) or (d,) a client, to the Gram of a new epoch, or of the epoch of `against`, and run `then` on it.

        The owners of `against` need not be online. With `on=()` nothing is added and `then` runs again on what is there.
        """
        ...

    def extendable(self, held: Held) -> bool:
        """Whether clients can still be added to the clustering epoch of `held`: not to one of encrypted vectors after a restart."""
        ...

    def close(self, held: Held) -> None:
        """Close the clustering epoch of `held`: its Gram, memory and keys are dropped."""
        ...

    def mean(
        self,
        held: Held,
        weights: Literal["equal", "examples"] | Mapping[int, float] = "equal",
        groups: Labels | Held | None = None,
        k: int | None = None,
        on: Sequence[int] | None = None,
        models: int = 1,
    ) -> tuple[GroupMean | None, ...]:
        """The mean of each part over each of `k` groups (without `groups`: one group of all). A group below the minimum cohort size gives
        None.

        `Held` groups are private choices: an oblivious sum keeps them with the client, otherwise they are gathered and recorded.
        Members of a group were sent the same values to compute with, or, where the algorithm declares it, at most `models` different
        ones: secure sums bind to that list, and a server that hands someone a private model gets none.
        Raises `TooFewClients` if no group reaches the minimum cohort size, before anything is sent.
        """
        ...

    def relay(self, held: Held, to: Mapping[int, Sequence[int]] | Held | None = None) -> Held:
        """Send values from client to client, encrypted through the server. `to[recipient]` lists the senders it wants (None: everyone).

        Gives a `Held` of the recipients; each part maps senders to values.
        """
        ...

    def gather(self, held: Held, on: Sequence[int] | None = None) -> Mapping[int, Mapping[str, Array]]:
        """Individual values, one per client: the operation that leaks most. Clients without a value, or with one of another shape than
        most, are left out."""
        ...

    def labels(self, held: Held) -> Mapping[int, int] | None:
        """The labels that clients chose, as `gather` returns them, or None where an oblivious sum keeps them private.

        Clients without a label, or with one that is no whole number of 0 or more, are left out.
        """
        ...

    def product(self, shared: Shared, number: Shared, on: int | None = None) -> Shared:
        """A sum times a number () that is a sum itself, where both may be seen: at the server if both are clear, else at client `on`.

        The client (default: the first) sends its result back under a fresh transform. Raises `InputError` where clients have own parts
        of either, or where a clear sum is to be multiplied by a number that is hidden.
        """
        ...

    def fold(self, shared: Shared, on: int | None = None) -> Shared:
        """The same sum with its transformed parts combined, under a fresh transform, at one client; the clear part stays apart,
        untransformed."""
        ...
