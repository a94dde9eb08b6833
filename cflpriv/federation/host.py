"""A client host: the parties of one place. It computes equal tasks in one engine call, and applies equal transforms together.

A party handles a request in a generator, which yields jobs that can be done for many parties at once, and gets their results.
"""

import gc
import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..contract.portions import fits
from ..errors import InputError, TrainingDiverged
from ..protocols.errors import LocalError, RemoteError, TooFewClients
from ..protocols.orthonormal import Transform
from ..types import Array
from . import messages as m
from .postponed import Postponed
from .values import SharedWork

if TYPE_CHECKING:  # torch is loaded where something is computed
    from ..engine import Engine, TaskInput

__all__ = ["ApplyTransform", "ClientHost", "Handler", "Party", "RunTask", "received", "refusal"]

log = logging.getLogger("cflpriv.federation")

_BATCH_BYTES = 1 << 26
"""The most that is transformed at a time."""


@dataclass(frozen=True, eq=False)
class RunTask:
    """Asks for the result of `task` on `given`, which may be computed together with that of other clients. `now`: it is not put off."""

    task: Any
    given: "TaskInput"
    now: bool = False


@dataclass(frozen=True, eq=False)
class ApplyTransform:
    """Asks for `rows` (k, d) under a transform, which may be applied to the rows of several clients at once."""

    transform: Transform
    rows: Array


Handler = Generator[RunTask | ApplyTransform, Any, m.Answer]
"""What a party does for a request: yields jobs for its host, is sent their results, returns the answer."""


class Party(Protocol):
    """A client, or the key holder."""

    def handle(self, ask: m.PartyRequest, exchange: SharedWork) -> Handler: ...


class ClientHost:
    """Runs the parties of one place. Each has its own settings, store and ledger; `engine` computes for all.

    With `postpones` large results that would not fit into memory together are computed when they are asked for. An error of a client's
    computation then comes as late.
    """

    postpones = False

    def __init__(self, parties: Mapping[int, Party], engine: "Engine | None" = None) -> None:
        self.parties = parties
        self._engine = engine
        self._trim: Callable[[], object] | None = None

    @property
    def engine(self) -> "Engine":
        if self._engine is None:
            from ..engine import Engine

            self._engine = Engine()
        return self._engine

    def answer(self, asks: Mapping[int, m.PartyRequest]) -> dict[int, m.Answer | Exception]:
        """Each party's answer, or the error of its refusal."""
        if self._trim is not None:
            self._trim()
        with _uncollected():
            return self._answered(asks)

    def _answered(self, asks: Mapping[int, m.PartyRequest]) -> dict[int, m.Answer | Exception]:
        exchange = SharedWork()
        handlers = {place: self.parties[place].handle(ask, exchange) for place, ask in sorted(asks.items())}
        results: dict[int, Any] = dict.fromkeys(handlers)
        answers: dict[int, m.Answer | Exception] = {}
        while results:
            tasks: dict[int, list[tuple[int, RunTask]]] = {}
            transforms: dict[int, list[tuple[int, ApplyTransform]]] = {}
            for place, result in results.items():
                handler = handlers[place]
                try:
                    job = handler.throw(result) if isinstance(result, Exception) else handler.send(result)
                except StopIteration as end:
                    answers[place] = end.value
                except Exception as error:
                    answers[place] = error
                else:
                    if isinstance(job, RunTask):
                        tasks.setdefault(id(job.task), []).append((place, job))
                    else:
                        transforms.setdefault(id(job.transform), []).append((place, job))
            results = {}
            for runs in tasks.values():
                results |= self._run(runs)
            for applied in transforms.values():
                results |= _apply(applied)
        return answers

    def _run(self, jobs: Sequence[tuple[int, RunTask]]) -> dict[int, Any]:
        """Run one task for all clients that ask for it. If it fails, run it client by client, so that each has its own result or error."""
        task, now = jobs[0][1].task, jobs[0][1].now
        large = self.postpones and not now and hasattr(task, "later") and not fits(len(jobs), task.large_bytes)
        if large and (postponed := self._postponed(jobs)) is not None:
            return postponed
        try:
            results = self.engine.run(jobs[0][1].task, [job.given for _, job in jobs])
        except Exception as error:
            if len(jobs) == 1:
                return {jobs[0][0]: error}
            return {place: result for job in jobs for place, result in self._run([job]).items()}
        if now and self._trim is not None:
            self._trim()
        return {place: result for (place, _), result in zip(jobs, results, strict=True)}

    def _postponed(self, jobs: Sequence[tuple[int, RunTask]]) -> dict[int, Any] | None:
        """The results of a task, whose large arrays are computed when they are asked for; None where all is computed now."""
        task, given = jobs[0][1].task, [job.given for _, job in jobs]
        try:
            declared = task.later(given, partial(self.engine.run, paths=Counter()))
        except Exception:  # then each client by itself shows what is wrong
            return None
        if declared is None:
            return None
        from ..engine.allocator import return_freed_memory

        self._trim = return_freed_memory
        self._trim()
        return {
            place: {
                name: part if isinstance(part, np.ndarray) else Postponed(task, reduced, name, part, self.engine)
                for name, part in result.items()
            }
            for (place, _), (result, reduced) in zip(jobs, declared, strict=True)
        }


def received(who: str, party: Party, data: bytes) -> bytes:
    """The encoded answer of a party that is alone, to a request, whatever its bytes."""
    try:
        answer = ClientHost({0: party}).answer({0: m.decode_ask(data)})[0]
        return m.encode(refusal(who, answer) if isinstance(answer, Exception) else answer)
    except Exception as error:
        return m.encode(refusal(who, error))


def refusal(who: str, error: Exception) -> m.Refused:
    """The refusal that answers a failure. The text of the error stays in the log."""
    if isinstance(error, RemoteError | TooFewClients):
        return m.Refused(error.code)
    if isinstance(error, LocalError):
        log.error("%s: protocol machine", who, exc_info=error)
        return m.Refused(error.code)
    if isinstance(error, InputError | TrainingDiverged):
        log.error("%s: bad input", who, exc_info=error)
        return m.Refused("bad-input")
    log.error("%s: failed", who, exc_info=error)
    return m.Refused("internal")


@contextmanager
def _uncollected() -> Iterator[None]:
    """While inside, Python's cycle collector rests: it would walk all clients' objects again and again, a quarter of a large round."""
    resting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if resting:
            gc.enable()


def _apply(jobs: Sequence[tuple[int, ApplyTransform]]) -> dict[int, Any]:
    """Transform the rows of several clients, in batches."""
    results: dict[int, Any] = {}
    transform, width = jobs[0][1].transform, jobs[0][1].rows.shape[1]
    few = max(1, _BATCH_BYTES // (8 * width * len(jobs[0][1].rows)))
    for start in range(0, len(jobs), few):
        batch = jobs[start : start + few]
        try:
            rows = transform.apply(np.concatenate([job.rows for _, job in batch]))
        except Exception as error:
            results |= {place: error for place, _ in batch}
            continue
        at = 0
        for place, job in batch:
            results[place] = rows[at : at + len(job.rows)]
            at += len(job.rows)
    return results
