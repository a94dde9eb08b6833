"""A client host: the clients of one place. It computes equal tasks in one engine call, and applies equal transforms together."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from . import messages as m
from .handler import Apply, Handler, Run, next_wish
from .values import Exchange

if TYPE_CHECKING:  # torch is loaded where something is computed
    from ..engine import Engine

__all__ = ["ClientHost", "Party"]

_BATCH_BYTES = 1 << 26
"""The most that is transformed at a time."""


class Party(Protocol):
    """A client, or the key holder."""

    def handle(self, ask: m.Ask, exchange: Exchange) -> Handler: ...


class ClientHost:
    """Runs the parties of one place. Each has its own settings, store and ledger; `engine` computes for all."""

    def __init__(self, parties: Mapping[int, Party], engine: "Engine | None" = None) -> None:
        self.parties = parties
        self._engine = engine

    @property
    def engine(self) -> "Engine":
        if self._engine is None:
            from ..engine import Engine

            self._engine = Engine()
        return self._engine

    def answer(self, asks: Mapping[int, m.Ask]) -> dict[int, m.Answer | Exception]:
        """Each party's answer, or the error of its refusal."""
        with _uncollected():
            return self._answered(asks)

    def _answered(self, asks: Mapping[int, m.Ask]) -> dict[int, m.Answer | Exception]:
        exchange = Exchange()
        handlers = {place: self.parties[place].handle(ask, exchange) for place, ask in sorted(asks.items())}
        sent: dict[int, Any] = dict.fromkeys(handlers)
        answers: dict[int, m.Answer | Exception] = {}
        while sent:
            runs: dict[int, list[tuple[int, Run]]] = {}
            applied: dict[int, list[tuple[int, Apply]]] = {}
            for place, done in sent.items():
                try:
                    wish = next_wish(handlers[place], done)
                except Exception as error:
                    answers[place] = error
                    continue
                if isinstance(wish, Run):
                    runs.setdefault(id(wish.task), []).append((place, wish))
                elif isinstance(wish, Apply):
                    applied.setdefault(id(wish.transform), []).append((place, wish))
                else:
                    answers[place] = wish
            sent = {}
            for several in runs.values():
                sent |= self._run(several)
            for wishes in applied.values():
                sent |= _apply(wishes)
        return answers

    def _run(self, wishes: Sequence[tuple[int, Run]]) -> dict[int, Any]:
        """Run one task for all clients that ask for it. If it fails, run it client by client, so that each has its own result or error."""
        try:
            results = self.engine.run(wishes[0][1].task, [wish.given for _, wish in wishes])
        except Exception as error:
            if len(wishes) == 1:
                return {wishes[0][0]: error}
            return {place: done for one in wishes for place, done in self._run([one]).items()}
        return {place: result for (place, _), result in zip(wishes, results, strict=True)}


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


def _apply(wishes: Sequence[tuple[int, Apply]]) -> dict[int, Any]:
    """Transform the rows of several clients, in batches."""
    done: dict[int, Any] = {}
    transform, width = wishes[0][1].transform, wishes[0][1].rows.shape[1]
    few = max(1, _BATCH_BYTES // (8 * width * len(wishes[0][1].rows)))
    for start in range(0, len(wishes), few):
        some = wishes[start : start + few]
        try:
            hidden = transform.apply(np.concatenate([wish.rows for _, wish in some]))
        except Exception as error:
            done |= {place: error for place, _ in some}
            continue
        at = 0
        for place, wish in some:
            done[place] = hidden[at : at + len(wish.rows)]
            at += len(wish.rows)
    return done
