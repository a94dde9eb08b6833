"""A transport that deviates from the protocol: it changes requests, keeps answers, and runs accomplices itself.

It is a transport over any transport, so the server on top of it may be an honest one: each client is then told what a lie makes of what
the server said.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...federation import messages as m
from ...federation.transport import Stage, Transport

__all__ = ["Hear", "Liar", "Puppet", "Refusal", "Said", "Say", "honest_answer", "honest_ask"]

Say = Callable[[int, m.Ask, str], m.Ask]
"""What a client (by number) is told at a stage, in place of what the server would tell it."""
Hear = Callable[[int, m.Ask, m.Answer, str], m.Answer]
"""What the server takes for a client's answer to a request at a stage, in place of what it said."""


class Puppet(Protocol):
    """A client whose side the server plays itself: bytes in, bytes out."""

    def receive(self, data: bytes) -> bytes: ...


@dataclass(frozen=True)
class Refusal:
    """An honest client's refusal: who, at which stage, and the error code."""

    client: int
    stage: str
    code: str


@dataclass(frozen=True, eq=False)
class Said:
    """One request and its answer, as the client saw and gave them."""

    client: int
    stage: str
    ask: m.Ask
    answer: m.Answer


def honest_ask(client: int, ask: m.Ask, stage: str) -> m.Ask:
    """No lie."""
    return ask


def honest_answer(client: int, ask: m.Ask, answer: m.Answer, stage: str) -> m.Answer:
    """The answer as it came."""
    return answer


class Liar:
    """A transport that tells each client what `say` makes of a request, and the server what `hear` makes of its answer.

    `puppets` are asked in place of the clients of their numbers, who are only greeted. `refused` are the refusals of all others, `said` is
    everything that was asked and answered, in order.
    """

    def __init__(self, transport: Transport, puppets: Mapping[int, Puppet]) -> None:
        self._transport, self.puppets = transport, dict(puppets)
        self.say: Say = honest_ask
        self.hear: Hear = honest_answer
        self.refused: list[Refusal] = []
        self.said: list[Said] = []
        self._client_at: dict[int, int] = {}

    def places(self) -> Sequence[int]:
        return self._transport.places()

    def exchange(self, asks: Mapping[int, m.Ask], stage: Stage) -> Mapping[int, m.Answer]:
        told = {place: self._said(place, ask, stage.name) for place, ask in asks.items()}
        answers = self._exchanged(told, stage)
        return {
            place: answer if place not in self._client_at else self.hear(self._client_at[place], told[place], answer, stage.name)
            for place, answer in answers.items()
        }  # fmt: skip

    def ask(self, asks: Mapping[int, m.Ask], stage: str) -> dict[int, m.Answer]:
        """Ask clients (by number) just this; their answers."""
        place_of = {client: place for place, client in self._client_at.items()}
        answers = self._exchanged({place_of[client]: ask for client, ask in asks.items()}, Stage(stage))
        return {self._client_at[place]: answer for place, answer in answers.items()}

    def enrolled(self, client: int) -> m.Enrolled:
        """What a client said when it was greeted last."""
        for one in reversed(self.said):
            if one.client == client and isinstance(one.answer, m.Enrolled):
                return one.answer
        raise KeyError(client)

    def _said(self, place: int, ask: m.Ask, stage: str) -> m.Ask:
        return self.say(self._client_at[place], ask, stage) if place in self._client_at and not isinstance(ask, m.Enrol) else ask

    def _exchanged(self, told: Mapping[int, m.Ask], stage: Stage) -> dict[int, m.Answer]:
        elsewhere = {place: ask for place, ask in told.items() if isinstance(ask, m.Enrol) or not self._is_puppet(place)}
        answers = dict(self._transport.exchange(elsewhere, stage)) if elsewhere else {}
        for place, answer in answers.items():
            if isinstance(answer, m.Enrolled):
                self._client_at[place] = HOLDER if answer.role == "key-holder" else answer.client
        for place, ask in told.items():
            if self._is_puppet(place):
                answers[place] = m.decode_answer(self.puppets[self._client_at[place]].receive(m.encode(ask)))
        for place, answer in sorted(answers.items()):
            client = self._client_at.get(place, -1)
            self.said.append(Said(client, stage.name, told[place], answer))
            if isinstance(answer, m.Refused) and client not in self.puppets:
                self.refused.append(Refusal(client, stage.name, answer.code))
        return answers

    def _is_puppet(self, place: int) -> bool:
        return self._client_at.get(place) in self.puppets


HOLDER = -2
"""The key holder among clients' numbers."""
