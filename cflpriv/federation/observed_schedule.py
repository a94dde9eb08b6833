"""The schedule of an algorithm, inferred from what an honest server asked clients in a run: for algorithms that declare none, and for
tests.

`Watched` is a transport that keeps what is asked of each client; `observed_schedule` makes the smallest schedule that has all of it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..contract.schedule import Leaving, Phase, Schedule, TaskRequest, same_task
from . import messages as m
from .transport import ExchangeStage, Transport
from .work import request_digest

__all__ = ["Observed", "Watched", "observed_requests", "observed_schedule"]


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


def observed_requests(observed: Sequence[Observed], declared: Schedule | None = None) -> dict[tuple[Phase, int], int]:
    """How often the requests of a `declared` schedule were asked, at most, in one phase of a client: by phase and place in its list.

    A request that is not declared counts under place −1.
    """
    times: dict[tuple[Phase, int, int, int], set[bytes]] = defaultdict(set)
    for value in observed:
        place = (
            -1
            if declared is None
            else next(
                (i for i, asked in enumerate(getattr(declared, value.phase)) if same_task(value.task, asked, range(-1, value.round + 1))),
                -1,
            )
        )
        times[value.phase, place, value.client, value.round].add(value.digest)
    most: dict[tuple[Phase, int], int] = {}
    for (phase, place, _, _), digests in times.items():
        most[phase, place] = max(most.get((phase, place), 0), len(digests))
    return most


def observed_schedule(observed: Sequence[Observed]) -> Schedule:
    """The smallest schedule with all that was asked. Fields in which tasks of one class differ vary."""
    phases: dict[Phase, list[TaskRequest]] = {"start": [], "round": [], "joining": []}
    kinds: dict[tuple[Phase, type], list[Observed]] = {}
    for value in observed:
        kinds.setdefault((value.phase, type(value.task)), []).append(value)
    for (phase, _), values in kinds.items():
        phases[phase].append(_request(values))
    most = max((value.models for value in observed), default=1)
    return Schedule(tuple(phases["start"]), tuple(phases["round"]), tuple(phases["joining"]), models=most)


def _request(values: Sequence[Observed]) -> TaskRequest:
    """The request of tasks of one class in one phase."""
    first = values[0].task
    varies = tuple(
        attribute.name
        for attribute in fields(first)
        if any(getattr(value.task, attribute.name) != getattr(first, attribute.name) for value in values)
    )
    leaves: dict[str, set[Leaving]] = {}
    for value in values:
        for part, operations in value.left.items():
            leaves.setdefault(part, set()).update(operations)
    listed = tuple((part, tuple(sorted(leaves[part]))) for part in first.parts if part in leaves)
    counts: dict[tuple[int, int], set[bytes]] = {}
    for value in values:
        counts.setdefault((value.client, value.round), set()).add(value.digest)
    return TaskRequest(first, listed, max(map(len, counts.values())), varies)
