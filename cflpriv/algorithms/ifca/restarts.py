"""The state of IFCA: random restarts that run in parallel, each with its models and its clients' cluster estimates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...contract.handles import Held, Shared
from ...engine import Task
from ...errors import TooFewClients, TrainingDiverged
from ...types import Array
from ..shared.choosing import Layout

__all__ = ["IfcaState", "Problem", "Restart", "RestartRound"]


@dataclass(frozen=True)
class Problem:
    """What IFCA alternates on: `start(attempt)` gives initial parameters, `losses` a client's losses and choice.

    `local(round)` is the local work, whose part `part` is averaged and added `rate(round)` times.
    """

    layout: Layout
    start: Callable[[int], Array]
    losses: Task
    evaluate: Task
    local: Callable[[int], Task]
    part: str
    rate: Callable[[int], float]
    on_divergence: Literal["stop", "skip"] = "stop"


@dataclass(frozen=True, eq=False)
class Restart:
    """One random start: cluster models (without shared coordinates), the shared ones, each client's last estimate.

    `first` are the estimates of clients that were not met yet, where groups were found beforehand.
    `stable` counts how many times in a row a client was met again with the estimate unchanged, for the communication saver only.
    """

    models: tuple[Shared, ...]
    joint: Shared | None
    labels: Mapping[int, int]
    first: Mapping[int, int] = field(default_factory=dict)
    stable: Mapping[int, int] = field(default_factory=dict)
    saving: bool = False
    loss: float = float("inf")

    @property
    def params(self) -> dict[str, Any]:
        """What clients are sent: all k models, and one copy of what is shared (section 4.3)."""
        models = {"model": list(self.models)}
        return models if self.joint is None else {**models, "shared": self.joint}

    def one_each(self, cohort: Sequence[int]) -> bool:
        """Whether each client of a cohort is sent the model of its estimate only: by the saver (section 4.3), or for its first estimate.

        Clients without an estimate are sent all models beforehand: the members of one sum were then sent one model.
        """
        return self.saving or not self.first.keys().isdisjoint(cohort)


@dataclass(frozen=True, eq=False)
class IfcaState:
    """All restarts, and which of them is best so far. `hidden` are the clients' choices where the server does not learn them. `notes` and
    `evidence` are those of the test, where there was one.
    """

    restarts: tuple[Restart, ...]
    best: int = 0
    rounds: int = 0
    hidden: Held | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    evidence: Mapping[str, Any] | None = None


@dataclass(frozen=True, eq=False)
class RestartRound:
    """What one round did to one restart, with whom; `failed` is the error for which it did nothing."""

    restart: Restart
    contributors: tuple[int, ...]
    hidden: Held | None
    notes: Mapping[str, Any]
    failed: TooFewClients | TrainingDiverged | None = None
