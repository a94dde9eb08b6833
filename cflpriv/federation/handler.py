"""Handlers of requests as generators: they yield work that can be done for many parties at once, and get its result."""

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import InputError, TrainingDiverged
from ..protocols.errors import LocalError, RemoteError, TooFewClients
from ..protocols.orthonormal import Transform
from ..types import Array
from . import messages as m

if TYPE_CHECKING:  # torch is loaded where something is computed
    from ..engine import TaskInput

__all__ = ["Apply", "Handler", "Run", "answered", "driven", "next_wish", "refusal"]

log = logging.getLogger("cflpriv.federation")


@dataclass(frozen=True, eq=False)
class Run:
    """Asks for the result of `task` on `given`, which may be computed together with that of other clients."""

    task: Any
    given: "TaskInput"


@dataclass(frozen=True, eq=False)
class Apply:
    """Asks for `rows` (k, d) under a transform, which may be applied to the rows of several clients at once."""

    transform: Transform
    rows: Array


Handler = Generator[Run | Apply, Any, m.Answer]
"""What a client does for a request: yields work for its driver, is sent the result, returns the answer."""


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


def answered(who: str, answer: Callable[[m.Ask], m.Answer], data: bytes) -> bytes:
    """The encoded answer to a request, whatever its bytes."""
    try:
        return m.encode(answer(m.decode_ask(data)))
    except Exception as error:
        return m.encode(refusal(who, error))


def driven(handler: Handler) -> m.Answer:
    """The answer of one client, whose work is done here."""
    wish = next_wish(handler, None)
    while not isinstance(wish, m.Message):
        try:
            if isinstance(wish, Run):
                from ..engine import Engine  # torch is loaded where something is computed

                done: Any = Engine().run(wish.task, [wish.given])[0]
            else:
                done = wish.transform.apply(wish.rows)
        except Exception as error:
            wish = next_wish(handler, error)
        else:
            wish = next_wish(handler, done)
    return wish


def next_wish(handler: Handler, done: Any) -> "Run | Apply | m.Answer":
    """Send a handler the result that it asked for, or throw its error. Returns the next piece of work, or the answer."""
    try:
        return handler.throw(done) if isinstance(done, Exception) else handler.send(done)
    except StopIteration as end:
        answer: m.Answer = end.value
        return answer
