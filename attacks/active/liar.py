"""A transport that deviates from the protocol: it changes requests, keeps answers, and runs accomplices itself.

It wraps any transport, so the server on top of it may be an honest one: `say` changes what each client receives.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...federation import messages as m
from ...federation.transport import ExchangeStage, Transport

__all__ = ["Hear", "Liar", "Exchange", "Puppet", "Refusal", "Say", "honest_answer", "honest_ask"]

Say = Callable[[int, m.PartyRequest, str], m.PartyRequest]
"""The request that a client (by number) receives at a stage, given the server's."""
Hear = Callable[[int, m.PartyRequest, m.Answer, str], m.Answer]
"""The answer that the server receives at a stage, given the request and the client's answer."""


class Puppet(Protocol):
    """A client that the server runs itself: bytes in, bytes out."""

    def receive(self, data: bytes) -> bytes: ...


@dataclass(frozen=True)
class Refusal:
    """An honest client's refusal: who, at which stage, and the error code."""

    client: int
    stage: str
    code: str


@dataclass(frozen=True, eq=False)
class Exchange:
    """One request and its answer, as the client received and sent them."""

    client: int
    stage: str
    ask: m.PartyRequest
    answer: m.Answer


def honest_ask(client: int, ask: m.PartyRequest, stage: str) -> m.PartyRequest:
    """The request, unchanged."""
    return ask


def honest_answer(client: int, ask: m.PartyRequest, answer: m.Answer, stage: str) -> m.Answer:
    """The answer, unchanged."""
    return answer


class Liar:
    """A transport that changes requests by `say` and answers by `hear`.

    `puppets` answer in place of the clients and holders of their numbers, who only enrol. `holders`: their keys on the
    roster. `refused` are the refusals of all other clients,
    `exchanges` all requests and answers in order.
    """

    def __init__(self, transport: Transport, puppets: Mapping[int, Puppet], holders: Sequence[bytes] = ()) -> None:
        self._transport, self.puppets, self._holders = transport, dict(puppets), list(holders)
        self.say: Say = honest_ask
        self.hear: Hear = honest_answer
        self.refused: list[Refusal] = []
        self.exchanges: list[Exchange] = []
        self._client_at: dict[int, int] = {}

    def places(self) -> Sequence[int]:
        return self._transport.places()

    def exchange(self, asks: Mapping[int, m.PartyRequest], stage: ExchangeStage) -> Mapping[int, m.Answer]:
        sent = {place: self._changed(place, ask, stage.name) for place, ask in asks.items()}
        answers = self._exchanged(sent, stage)
        return {
            place: answer if place not in self._client_at else self.hear(self._client_at[place], sent[place], answer, stage.name)
            for place, answer in answers.items()
        }  # fmt: skip

    def ask(self, asks: Mapping[int, m.PartyRequest], stage: str) -> dict[int, m.Answer]:
        """Send these requests to clients (by number), unchanged; their answers."""
        place_of = {client: place for place, client in self._client_at.items()}
        answers = self._exchanged({place_of[client]: ask for client, ask in asks.items()}, ExchangeStage(stage))
        return {self._client_at[place]: answer for place, answer in answers.items()}

    def enrolled(self, client: int) -> m.Enrolled:
        """A client's last answer to an enrolment."""
        for one in reversed(self.exchanges):
            if one.client == client and isinstance(one.answer, m.Enrolled):
                return one.answer
        raise KeyError(client)

    def _changed(self, place: int, ask: m.PartyRequest, stage: str) -> m.PartyRequest:
        return self.say(self._client_at[place], ask, stage) if place in self._client_at and not isinstance(ask, m.Enrol) else ask

    def _exchanged(self, sent: Mapping[int, m.PartyRequest], stage: ExchangeStage) -> dict[int, m.Answer]:
        remote = {place: ask for place, ask in sent.items() if isinstance(ask, m.Enrol) or not self._is_puppet(place)}
        answers = dict(self._transport.exchange(remote, stage)) if remote else {}
        for place, answer in answers.items():
            if isinstance(answer, m.Enrolled):
                self._client_at[place] = self._holder_number(answer.signing_key) if answer.role == "key-holder" else answer.client
        for place, ask in sent.items():
            if self._is_puppet(place):
                answers[place] = m.decode_answer(self.puppets[self._client_at[place]].receive(m.encode(ask)))
        for place, answer in sorted(answers.items()):
            client = self._client_at.get(place, -1)
            self.exchanges.append(Exchange(client, stage.name, sent[place], answer))
            if isinstance(answer, m.Refused) and client not in self.puppets:
                self.refused.append(Refusal(client, stage.name, answer.code))
        return answers

    def _holder_number(self, key: bytes) -> int:
        return HOLDER - (self._holders.index(key) if key in self._holders else 0)

    def _is_puppet(self, place: int) -> bool:
        return self._client_at.get(place) in self.puppets


HOLDER = -2
"""The key holder's number, which no client has; holder i of several has HOLDER − i."""
