"""What an algorithm asks of one client: which tasks, how often, and which parts of their results leave, by which operation.

An algorithm declares its `Schedule` in its own file. The schedule becomes part of the session contract (`federation.contract_record`), and
each client refuses what is not in it. A test runs every algorithm and compares: each request of an honest run is declared, and each
declared count is reached.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, get_args

from ..errors import InputError

__all__ = ["Leaving", "Phase", "Schedule", "TaskRequest", "at_round", "request", "same_task", "scores"]

Phase = Literal["start", "round", "joining", "serving"]
"""When a client is asked: once before the first round; in each round; once when the client joins a run that goes on; when scores are
gathered after a round."""
Leaving = Literal["gram", "gather", "sum", "relay"]
"""The operations by which a part leaves a client."""


@dataclass(frozen=True)
class TaskRequest:
    """One task that a client is asked for, at most `times` in its phase with different parameters.

    task: the dataclass as it travels; where it, or a task inside it, has a method `at`, its form of each round (`at_round`) is meant.
    leaves: the operations by which a part of the result leaves; a part that is not named does not leave.
    varies: names of fields that the server chooses anew in each request, such as the list of present clients.
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
    if times < 1:
        raise InputError(f"schedule: {type(task).__name__} {times} times; expected 1 or more")
    listed = tuple((part, (by,) if isinstance(by, str) else tuple(by)) for part, by in (leaves or {}).items())
    for part, operations in listed:
        if part not in task.parts:
            raise InputError(f"schedule: {type(task).__name__} has no part {part!r}; there are {', '.join(task.parts)}")
        if unknown := set(operations) - set(get_args(Leaving)):
            raise InputError(f"schedule: {part!r} leaves by {', '.join(sorted(unknown))}; known are {', '.join(get_args(Leaving))}")
    names = [attribute.name for attribute in fields(task)]
    for name in varies:
        if name not in names:
            raise InputError(f"schedule: {type(task).__name__} has no field {name!r}; there are {', '.join(names)}")
    return TaskRequest(task, listed, times, varies)


def scores(task: Any) -> TaskRequest:
    """The request for a client's scores after a round, where no protection keeps single clients' scores from the server."""
    return request(task, {"correct": "gather", "count": "gather"})


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


def same_task(asked: Any, declared: TaskRequest, number: int) -> bool:
    """Whether a task is the declared one in round `number`, but for the fields that vary."""
    if type(asked) is not type(declared.task):
        return False
    chosen = {name: getattr(asked, name) for name in declared.varies}
    return any(asked == (replace(task, **chosen) if chosen else task) for task in (at_round(declared.task, number), declared.task))
