"""What an algorithm is: a few functions over a federation's verbs, state in and state out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .engine import Task
from .federation import Federation, Parameter
from .handles import Held, Labels
from .record import RoundRecord

__all__ = ["Algorithm", "Served"]


@dataclass(frozen=True, eq=False)
class Served:
    """The model each client would use: `task` on `params`, picked by `which`, as `compute` takes them."""

    task: Task
    params: Mapping[str, Parameter]
    which: Labels | Held | None = None


@dataclass(frozen=True)
class Algorithm:
    """Server code that never holds client data. `verbs` lists the releasing verbs it uses, hence what can protect it.

    init(federation) -> state; round(federation, state) -> (state, record); serve(state) -> what clients would use;
    admit(federation, state, newcomers) -> (state, notes), where newcomers can be taken. `describe(state)` gives what a report may show:
    "clustering" and, where the release allows it, "evidence". `public_groups` says that it averages over groups that the server knows,
    which an oblivious sum refuses.
    """

    name: str
    verbs: tuple[str, ...]
    init: Callable[[Federation], Any]
    round: Callable[[Federation, Any], tuple[Any, RoundRecord]]
    serve: Callable[[Any], Served]
    admit: Callable[[Federation, Any, Sequence[int]], tuple[Any, Mapping[str, Any]]] | None = None
    describe: Callable[[Any], Mapping[str, Any]] = lambda state: {}
    public_groups: bool = False
