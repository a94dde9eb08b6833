"""The schedule of an algorithm, inferred from what an honest server asked clients in a run: for algorithms that declare none, and for
tests.

`Watched` is a transport that keeps what is asked of each client; `observed_schedule` makes the smallest schedule that has all of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from ..contract.schedule import Leaving, Phase, Schedule, TaskRequest, at_round
from . import messages as m
from .transport import ExchangeStage, Transport
from .work import request_digest

__all__ = ["Observed", "Watched", "observed_schedule"]

FEW = 4
"""So many tasks of one class are requests of their own."""


@dataclass
class Observed:
    """A value that a client was asked to compute: the task, its round and phase, the digest of the request, how its parts left."""

    client: int
    task: Any
    round: int
    phase: Phase
    digest: bytes
    left: dict[str, set[Leaving]] = field(default_factory=dict)
    models: int = 1


class Watched:
    """A `transport` that keeps what is asked. Clients in `newcomers` join a run that goes on."""

    def __init__(self, transport: Transport, newcomers: Iterable[int] = ()) -> None:
        self._transport, self._newcomers = transport, frozenset(newcomers)
        self.observed: list[Observed] = []
        self._held: dict[tuple[int, int], list[tuple[Observed, str]]] = {}

    def places(self) -> Sequence[int]:
        return self._transport.places()

    def exchange(self, asks: Mapping[int, m.PartyRequest], stage: ExchangeStage) -> Mapping[int, m.Answer]:
        for place, ask in asks.items():
            self._note(place, ask)
        return self._transport.exchange(asks, stage)

    def _note(self, client: int, ask: m.PartyRequest) -> None:
        match ask:
            case m.ComputeAndSum():
                self._note(client, ask.compute)
                self._note(client, ask.step)
            case m.Compute():
                phase: Phase = "joining" if client in self._newcomers else "start" if ask.round < 0 else "round"
                value = Observed(client, ask.task.task, ask.round, phase, request_digest(ask))
                self.observed.append(value)
                self._held[client, ask.held] = [(value, "")]
            case m.AddUp():
                self._held[client, ask.held] = [
                    (value, part or own.part) for own in ask.addends for value, part in self._held.get((client, own.held), ())
                ]
            case m.Give():
                self._leave(client, ask.held, ask.parts, ask.operation)
            case m.Seal():
                self._leave(client, ask.held, ask.parts, "relay")
            case m.SumStep():
                for value in self._leave(client, ask.held, ask.parts, "sum"):
                    value.models = max(value.models, ask.models if ask.kind == "sum" else 1)
                if isinstance(ask.groups, m.HeldValue):
                    self._leave(client, ask.groups.held, (ask.groups.part,), "gather")
            case _:
                pass

    def _leave(self, client: int, held: int, parts: Sequence[str], operation: Leaving) -> list[Observed]:
        left = []
        for value, known in self._held.get((client, held), ()):
            for part in parts:
                value.left.setdefault(known or part, set()).add(operation)
            left.append(value)
        return left


def observed_schedule(observed: Sequence[Observed], train: Any = None) -> Schedule:
    """The smallest schedule with all that was asked. `train`: the training as the run begins, by which a learning rate that falls is known.

    Of the tasks of one class, fields with lists (as of the clients that are present) vary where they differ. Tasks that differ in another
    way are requests of their own if there are at most `FEW`, else these fields vary.
    """
    phases: dict[Phase, list[TaskRequest]] = {"start": [], "round": [], "joining": []}
    kinds: dict[tuple[Phase, type], list[Observed]] = {}
    for value in observed:
        kinds.setdefault((value.phase, type(value.task)), []).append(replace(value, task=_begun(value.task, value.round, train)))
    for (phase, _), values in kinds.items():
        phases[phase] += _requests(values)
    most = max((value.models for value in observed), default=1)
    return Schedule(tuple(phases["start"]), tuple(phases["round"]), tuple(phases["joining"]), models=most)


def _begun(task: Any, number: int, train: Any) -> Any:
    """A task of round `number` with the learning rate that the run begins with, where it has that of its round."""
    if not is_dataclass(task) or isinstance(task, type):
        return task
    if type(task) is type(train):
        before: Any = replace(task, **{name: getattr(train, name) for name in ("lr", "lr_decay")})
        return before if at_round(before, number) == task else task
    inner = {attribute.name: (getattr(task, attribute.name)) for attribute in fields(task) if attribute.init}
    begun = {name: _begun(value, number, train) for name, value in inner.items()}
    return replace(task, **begun) if begun != inner else task


def _requests(values: Sequence[Observed]) -> list[TaskRequest]:
    """The requests of tasks of one class in one phase."""
    alike: list[list[Observed]] = []
    for value in values:
        same = next((group for group in alike if _but_lists(group[0].task, value.task)), None)
        if same is None:
            alike.append([value])
        else:
            same.append(value)
    return [_request(group) for group in (alike if len(alike) <= FEW else [list(values)])]


def _but_lists(first: Any, second: Any) -> bool:
    """Whether two tasks differ in fields with lists alone."""
    return all(isinstance(_at(first, path), tuple) for path in _differing(first, second))


def _differing(first: Any, second: Any) -> list[str]:
    """The fields in which two tasks of one class differ, those of tasks inside with a dot."""
    paths = []
    for attribute in fields(first):
        one, other = getattr(first, attribute.name), getattr(second, attribute.name)
        if one == other:
            continue
        inner = is_dataclass(one) and type(one) is type(other)
        paths += [f"{attribute.name}.{path}" for path in _differing(one, other)] if inner else [attribute.name]
    return paths


def _at(task: Any, path: str) -> Any:
    for name in path.split("."):
        task = getattr(task, name)
    return task


def _request(values: Sequence[Observed]) -> TaskRequest:
    """One request of tasks of one class in one phase."""
    first = values[0].task
    varies = tuple(dict.fromkeys(path for value in values for path in _differing(first, value.task)))
    leaves: dict[str, set[Leaving]] = {}
    for value in values:
        for part, operations in value.left.items():
            leaves.setdefault(part, set()).update(operations)
    listed = tuple((part, tuple(sorted(leaves[part]))) for part in first.parts if part in leaves)
    counts: dict[tuple[int, int], set[bytes]] = {}
    for value in values:
        counts.setdefault((value.client, value.round), set()).add(value.digest)
    return TaskRequest(first, listed, max(map(len, counts.values())), varies)
