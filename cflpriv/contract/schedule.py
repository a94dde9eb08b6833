"""What an algorithm asks of one client: which tasks, how often, and which parts of their results leave, by which operation.

An algorithm declares its `Schedule` in its own file. The schedule becomes part of the session contract (`federation.contract_record`), and
each client refuses what is not in it. A test runs every algorithm and compares: each request of an honest run is declared, and each
declared count is reached.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from typing import Any, Literal, get_args

from ..errors import InputError

__all__ = [
    "EACH_ROUND",
    "CLASS_SCORES",
    "NUMBER_SCORES",
    "Leaving",
    "Phase",
    "Schedule",
    "TaskRequest",
    "at_round",
    "request",
    "same_task",
    "scores",
]

Phase = Literal["start", "round", "joining", "serving"]
"""When a client is asked: before the first round; in each round; when the client joins a run that goes on or is met, which is counted over
the whole run; when scores are gathered after a round."""
Leaving = Literal["gram", "gather", "sum", "relay"]
"""The operations by which a part leaves a client."""
CLASS_SCORES, NUMBER_SCORES = ("correct", "count", "confusion"), ("loss", "count", "errors")
"""Parts of an evaluation that leave a client where nothing hides values, of classes and of numbers. The first two are single numbers."""
EACH_ROUND = 0
"""`times` of a request that is made as often as the run has rounds."""


@dataclass(frozen=True)
class TaskRequest:
    """One task that a client is asked for, at most `times` in its phase with different parameters; `EACH_ROUND`: once for each round.

    task: the dataclass as it travels; where it, or a task inside it, has a method `at`, its form of each round (`at_round`) is meant. A
    client that joins may also be asked for its form of an earlier round. leaves: the operations by which a part of the result leaves; a
    part that is not named does not leave. varies: names of fields that the server chooses anew in each request, such as the list of present
    clients; "share.number" is a field of the task in `share`.
    """

    task: Any
    leaves: tuple[tuple[str, tuple[Leaving, ...]], ...] = ()
    times: int = 1
    varies: tuple[str, ...] = ()

    def operations(self, part: str) -> tuple[Leaving, ...]:
        """The operations by which a part leaves."""
        return dict(self.leaves).get(part, ())


@dataclass(frozen=True)
class Schedule:
    """All that an algorithm asks of a client. `models`: how many models the members of one sum may have been sent (`Federation.mean`)."""

    start: tuple[TaskRequest, ...] = ()
    round: tuple[TaskRequest, ...] = ()
    joining: tuple[TaskRequest, ...] = ()
    serving: tuple[TaskRequest, ...] = ()
    models: int = 1

    def requests(self) -> Iterator[tuple[Phase, TaskRequest]]:
        """All requests with their phases."""
        for phase in get_args(Phase):
            for asked in getattr(self, phase):
                yield phase, asked


def request(
    task: Any, leaves: Mapping[str, Leaving | tuple[Leaving, ...]] | None = None, *, times: int = 1, varies: tuple[str, ...] = ()
) -> TaskRequest:  # fmt: skip
    """A `TaskRequest`; `leaves` is a mapping of parts to one operation or several. Raises `InputError` for parts and fields that are not
    the task's."""
    if times < 0:
        raise InputError(f"schedule: {type(task).__name__} {times} times; expected 1 or more, or EACH_ROUND")
    listed = tuple((part, (by,) if isinstance(by, str) else tuple(by)) for part, by in (leaves or {}).items())
    for part, operations in listed:
        if part not in task.parts:
            raise InputError(f"schedule: {type(task).__name__} has no part {part!r}; there are {', '.join(task.parts)}")
        if unknown := set(operations) - set(get_args(Leaving)):
            raise InputError(f"schedule: {part!r} leaves by {', '.join(sorted(unknown))}; known are {', '.join(get_args(Leaving))}")
    for path in varies:
        inner = task
        for name in path.split("."):
            names = [attribute.name for attribute in fields(inner)] if is_dataclass(inner) else []
            if name not in names:
                raise InputError(f"schedule: {type(task).__name__} has no field {path!r}; there are {', '.join(names)}")
            inner = getattr(inner, name)
    return TaskRequest(task, listed, times, varies)


def scores(task: Any) -> TaskRequest:
    """The request for a client's scores after a round, where no protection keeps single clients' scores from the server."""
    parts = NUMBER_SCORES if "errors" in task.parts else CLASS_SCORES
    return request(task, {part: "gather" for part in parts if part in task.parts})


def at_round(task: Any, number: int) -> Any:
    """A task in its form of round `number`: where it, or a task inside it, has a method `at`, what that returns."""
    if not is_dataclass(task) or isinstance(task, type):
        return task
    at = getattr(task, "at", None)
    if at is not None:
        return at(number)
    changed = {}
    for attribute in fields(task):
        value = getattr(task, attribute.name)
        moved = at_round(value, number)
        if moved is not value:
            changed[attribute.name] = moved
    return replace(task, **changed) if changed else task


def same_task(asked: Any, declared: TaskRequest, rounds: Iterable[int]) -> bool:
    """Whether a task is the declared task, as it is or in its form of one of the `rounds`, but for the fields that vary."""
    if type(asked) is not type(declared.task):
        return False
    forms = chain((declared.task,), (at_round(declared.task, number) for number in rounds))
    return any(asked == (_with_fields(form, asked, declared.varies) if declared.varies else form) for form in forms)


def _with_fields(task: Any, source: Any, paths: Sequence[str]) -> Any:
    """A task with the fields of another task; unchanged where the other has a task of another class at the place."""
    for path in paths:
        name, _, rest = path.partition(".")
        value, other = getattr(task, name), getattr(source, name)
        if rest and type(value) is not type(other):
            continue
        task = replace(task, **{name: _with_fields(value, other, [rest]) if rest else other})
    return task
