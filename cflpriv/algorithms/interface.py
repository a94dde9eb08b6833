"""What an algorithm is: a few functions over a federation's operations, with explicit state; and what its own file declares of it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .. import plugins
from ..contract.handles import Held, Labels
from ..contract.operations import Federation, Parameter
from ..contract.schedule import Leaving, Schedule
from ..contract.transcript import RoundRecord
from ..engine import Task
from ..engine.models import Model
from ..errors import InputError
from ..plugins import FUNCTIONS, TASKS, Registry
from ..privacy.settings import Releases
from ..tasks.advice import HeldOutClasses, HeldOutScores, KeepLocal, KeepProbabilities, KeepTuned, Responsibilities
from ..tasks.evaluation import Evaluate, EvaluateOwn, EvaluateUsed, Losses
from ..tasks.joining import Join
from ..tasks.signatures import PrincipalHalves, PrincipalVectors
from ..tasks.training import Gradient, Start, Train

__all__ = [
    "ALGORITHMS", "FUNCTIONS", "STATES", "TASKS", "Algorithm", "AlgorithmSpec", "BeforeRun", "ComparedValue", "Served", "function_name",
    "no_groups", "register_algorithm", "state_name",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Served:
    """The model each client would use: `task` on `params`, picked by `which`, as `compute` takes them."""

    task: Task
    params: Mapping[str, Parameter]
    which: Labels | Held | None = None


OPERATIONS: Mapping[str, Leaving] = {"gram": "gram", "gather": "gather", "mean": "sum", "relay": "relay"}
"""How the part of a client leaves by each releasing operation."""


@dataclass(frozen=True)
class Algorithm:
    """Server code that never holds client data. `operations` lists the releasing operations it uses, hence what can protect it.

    init(federation) -> state; round(federation, state) -> (state, record); serve(state) -> what clients would use;
    admit(federation, state, newcomers) -> (state, notes), where newcomers can be taken. `describe(state)` gives what a report may show:
    "clustering" and, where the release allows it, "evidence". `public_groups`: it averages over groups that the server knows,
    which an oblivious sum refuses. `reads_means`: it computes with the numbers of a mean, which a transformed sum keeps from the server.
    `regroups`: why it averages over different groups of the same clients in one round, if it does:
    the difference of two such sums shows individuals, so secure sums over groups that the server knows refuse it. `spread`: the largest
    ratio of the weights that its summed values have inside themselves, infinite for blocks of clients' own choice: secure sums refuse
    these without noise for whole clients. Its tasks declare their own (`federation.values.spread_of`), which clients read. `schedule`: all
    that it asks of a client, which becomes part of the session contract; None: not declared, so clients of deployments refuse it.

    Raises `InputError` for a schedule by which a part leaves by another operation than these.
    """

    name: str
    operations: tuple[str, ...]
    init: Callable[[Federation], Any]
    round: Callable[[Federation, Any], tuple[Any, RoundRecord]]
    serve: Callable[[Any], Served]
    admit: Callable[[Federation, Any, Sequence[int]], tuple[Any, Mapping[str, Any]]] | None = None
    describe: Callable[[Any], Mapping[str, Any]] = lambda state: {}
    public_groups: bool = False
    regroups: str = ""
    reads_means: bool = False
    spread: float = 1.0
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        used = {OPERATIONS[name] for name in self.operations if name in OPERATIONS}
        for phase, asked in () if self.schedule is None else self.schedule.requests():
            for part, operations in asked.leaves:
                wanted = "relay" in used and asked.task.parts[part] == "request"  # whom a client asks, which the server reads
                if phase != "serving" and not used | ({"gather"} if wanted else set()) >= set(operations):
                    raise InputError(
                        f"algorithm {self.name!r}: its schedule has {part!r} of {type(asked.task).__name__} leave by "
                        f"{', '.join(operations)}, and its operations are {', '.join(self.operations) or 'none'}"
                    )


@dataclass(frozen=True)
class ComparedValue:
    """What one client's compared value is: `rows` vectors, with `per_label` so many for each of its labels.

    A vector has as many numbers as a sample and is computed at no model with `of_samples`; else it has as many as the model that it is
    computed at.

    `halves`: the rows are those of two random halves of a client's data, for a test. Under sample-level privacy one noisy vector takes
    their place: of samples their second moment (`NoisyMoment`).
    """

    rows: int = 1
    of_samples: bool = False
    per_label: bool = False
    halves: bool = False


@dataclass(frozen=True)
class BeforeRun:
    """What is known of a run before it starts, besides the algorithm's own keys: its rounds, the unit of privacy, and why clients would
    refuse to be compared, or the server would not learn their groups (empty if there is no such reason). `clip_norm`: the length to which
    a client's contribution to a mean is clipped under client-level privacy, else 1. `participation`: the share of clients that a round
    draws.
    """

    rounds: int
    unit: str = "none"
    no_gram: str = ""
    no_groups: str = ""
    clip_norm: float = 1.0
    participation: float = 1.0


@dataclass(frozen=True)
class AlgorithmSpec:
    """All that the rest of the package knows of an algorithm. Hyper-parameters reach its functions as the keys of `[algorithm]` given.

    make: `make(train, **hyper-parameters)` gives the `Algorithm`. summary: one line for `cflpriv list`.
    states: the dataclasses that its state is made of, which a checkpoint may hold. tasks: the task classes that its clients compute,
    besides the package's own. functions: the dataclasses that it passes to `gram`. Tasks travel to clients, functions to a key holder.

    sample_releases(rounds, given): what a client releases of its samples under `privacy.unit = "sample"`; None: nothing is private, for the
    reason `sample_refused`. replace_only: clients split their samples by number, which only the relation "replace_one" makes public.
    client_refused: why it does not run under `privacy.unit = "client"`, although it releases means alone.

    cohorts: which clients train in a round. "one": clients that `Federation.cohort` draws from all clients as one group. "labelled":
    clients drawn by groups. "": not declared; noise is calibrated for clients that train in every round.

    serves_released: the models that clients use, and which client uses which, follow from what was released: a score of them on test data
    tells no more of training data than the releases do. Not so where clients train a personal model or choose a model in private.

    compared(given): what `gram` compares. renumbers: clusters get new numbers when they merge or split.

    defaults(given, before): values for keys that were not given, where these follow from the run. All other functions of `given` are
    called with these in it. never_clusters(given, before): why a run with these settings forms no clusters, where nobody can want that;
    empty if it may. begins: by path what a new configuration of it sets, where it would form none by default. knowledge(given): what
    about the groups is given to the run, or by what they are found. needs_classes(given): why it takes no labels that are numbers; empty
    if it does.
    """

    name: str
    make: Callable[..., Algorithm]
    summary: str
    states: tuple[type, ...] = ()
    tasks: tuple[type, ...] = ()
    functions: tuple[type, ...] = ()
    sample_releases: Callable[[int, Mapping[str, Any]], Releases] | None = None
    sample_refused: str = "no private form of its steps is written"
    replace_only: bool = False
    client_refused: str = ""
    cohorts: Literal["", "one", "labelled"] = ""
    serves_released: bool = False
    compared: Callable[[Mapping[str, Any]], ComparedValue] = lambda settings: ComparedValue()
    renumbers: bool = False
    defaults: Callable[[Mapping[str, Any], BeforeRun], Mapping[str, Any]] = lambda settings, before: {}
    never_clusters: Callable[[Mapping[str, Any], BeforeRun], str] = lambda settings, before: ""
    begins: Mapping[str, Any] = field(default_factory=dict)
    knowledge: Callable[[Mapping[str, Any]], str] = lambda settings: "not declared"
    needs_classes: Callable[[Mapping[str, Any]], str] = lambda settings: ""


def no_groups(settings: Mapping[str, Any]) -> str:
    """The `AlgorithmSpec.knowledge` of an algorithm that forms no groups of clients."""
    return "none: no groups are formed"


ALGORITHMS: Registry[AlgorithmSpec] = plugins.ALGORITHMS
"""Name in a config -> what is declared of the algorithm."""
STATES: Registry[type] = Registry("state")
"""`state_name` -> what a checkpoint may hold of an algorithm's state."""


def function_name(kind: type) -> str:
    """The name by which a function travels, such as "pacfl.ClusterByAngles"."""
    return f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"


def state_name(kind: type) -> str:
    """The name of a dataclass in a checkpoint, such as "pacfl.PacflState": of its file, wherever the file stands."""
    return f"{kind.__module__.rpartition('.')[2]}.{kind.__qualname__}"


def register_algorithm(spec: AlgorithmSpec) -> None:
    """Make an algorithm known by its name, and what it declares.

    Raises `InputError` naming both where a name is that of another thing already, and for a declaration that does not hold.
    """
    for kind in (*spec.states, *spec.tasks, *spec.functions):
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            raise InputError(f"algorithm {spec.name!r}: {kind!r} is declared as a state, task or function and is no dataclass")
    for kind, needs in (
        *((task, ("run", "parts", "keeps")) for task in spec.tasks),
        *((function, ("results",)) for function in spec.functions),
    ):
        for attribute in needs:
            if not hasattr(kind, attribute):
                raise InputError(f"algorithm {spec.name!r}: {kind.__name__} declares no `{attribute}`")
    entries: list[tuple[Registry[Any], str, Any]] = [(ALGORITHMS, spec.name, spec)]
    entries += [(TASKS, kind.__name__, kind) for kind in spec.tasks]
    entries += [(FUNCTIONS, function_name(kind), kind) for kind in spec.functions]
    entries += [(STATES, state_name(kind), kind) for kind in spec.states]
    for registry, name, thing in entries:
        registry.check(name, thing)
    for registry, name, thing in entries:
        registry.add(name, thing)


def _accept(name: str, spec: Any) -> None:
    if not isinstance(spec, AlgorithmSpec) or spec.name != name:
        raise InputError(f"expected the AlgorithmSpec of {name!r}, got {getattr(spec, 'name', spec)!r}")
    register_algorithm(spec)


ALGORITHMS.accept = _accept

for _kind in (
    Model, Train, Gradient, Start, Evaluate, EvaluateOwn, EvaluateUsed, Join, Losses, PrincipalHalves, PrincipalVectors,
    KeepLocal, KeepTuned, KeepProbabilities, Responsibilities, HeldOutClasses, HeldOutScores,
):  # fmt: skip
    TASKS.add(_kind.__name__, _kind)
