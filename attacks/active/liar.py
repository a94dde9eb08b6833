"""A transport that deviates from the protocol: it changes requests, keeps answers, and runs accomplices itself.

It wraps any transport, so the server on top may be honest: `send` changes what each client receives, `receive` what the server receives.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...federation import messages as m
from ...federation.transport import ExchangeStage, Transport
from ...protocols.one_message.messages import refused_uploads

__all__ = ["ChangeAnswer", "Liar", "RecordedExchange", "ControlledParty", "Refusal", "ChangeRequest", "honest_answer", "honest_ask"]

ChangeRequest = Callable[[int, m.PartyRequest, str], m.PartyRequest]
"""The request that a client (by number) receives at a stage, given the server's."""
ChangeAnswer = Callable[[int, m.PartyRequest, m.Answer, str], m.Answer]
"""The answer that the server receives at a stage, given the request and the client's answer."""


class ControlledParty(Protocol):
    """A client that the server runs itself: bytes in, bytes out."""

    def receive(self, data: bytes) -> bytes: ...


@dataclass(frozen=True)
class Refusal:
    """An honest client's refusal: who, at which stage, and the error code."""

    client: int
    stage: str
    code: str


@dataclass(frozen=True, eq=False)
class RecordedExchange:
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


def _codes(answer: m.Answer) -> list[str]:
    """The error codes in an answer: of a refusal, and of what a helper refuses of each sum and of each upload."""
    if isinstance(answer, m.Refused):
        return [answer.code]
    several = answer.answers if isinstance(answer, m.Helped) else ()
    codes = [one.code for one in several if isinstance(one, m.Refused)]
    return codes + [refused.code for one in several if isinstance(one, m.Stepped) for refused in refused_uploads(one.message)]


class Liar:
    """A transport that changes requests by `send` and answers by `receive`.

    `controlled` parties answer in place of the clients and holders with their numbers, which only enrol. `holders`: the keys of the holders
    on the roster. `refused` are the refusals of all other clients, `exchanges` all requests and answers in order.
    """

    def __init__(self, transport: Transport, controlled: Mapping[int, ControlledParty], holders: Sequence[bytes] = ()) -> None:
        self._transport, self.controlled, self._holders = transport, dict(controlled), list(holders)
        self.send: ChangeRequest = honest_ask
        self.receive: ChangeAnswer = honest_answer
        self.refused: list[Refusal] = []
        self.exchanges: list[RecordedExchange] = []
        self._client_at: dict[int, int] = {}

    def places(self) -> Sequence[int]:
        return self._transport.places()

    def exchange(self, asks: Mapping[int, m.PartyRequest], stage: ExchangeStage) -> Mapping[int, m.Answer]:
        sent = {place: self._changed(place, ask, stage.name) for place, ask in asks.items()}
        answers = self._exchanged(sent, stage)
        return {
            place: answer if place not in self._client_at else self.receive(self._client_at[place], sent[place], answer, stage.name)
            for place, answer in answers.items()
        }  # fmt: skip

    def ask(self, asks: Mapping[int, m.PartyRequest], stage: str) -> dict[int, m.Answer]:
        """Send these requests to clients (by number), unchanged; their answers."""
        place_of = {client: place for place, client in self._client_at.items()}
        answers = self._exchanged({place_of[client]: ask for client, ask in asks.items()}, ExchangeStage(stage))
        return {self._client_at[place]: answer for place, answer in answers.items()}

    def enrolled(self, client: int) -> m.Enrolled:
        """A client's last answer to an enrolment."""
        for exchange in reversed(self.exchanges):
            if exchange.client == client and isinstance(exchange.answer, m.Enrolled):
                return exchange.answer
        raise KeyError(client)

    def _changed(self, place: int, ask: m.PartyRequest, stage: str) -> m.PartyRequest:
        return self.send(self._client_at[place], ask, stage) if place in self._client_at and not isinstance(ask, m.Enrol) else ask

    def _exchanged(self, sent: Mapping[int, m.PartyRequest], stage: ExchangeStage) -> dict[int, m.Answer]:
        remote = {place: ask for place, ask in sent.items() if isinstance(ask, m.Enrol) or not self._is_controlled(place)}
        answers = dict(self._transport.exchange(remote, stage)) if remote else {}
        for place, answer in answers.items():
            if isinstance(answer, m.Enrolled):
                self._client_at[place] = self._holder_number(answer.signing_key) if answer.role == "key-holder" else answer.client
        for place, ask in sent.items():
            if self._is_controlled(place):
                answers[place] = m.decode_answer(self.controlled[self._client_at[place]].receive(m.encode(ask)))
        for place, answer in sorted(answers.items()):
            client = self._client_at.get(place, -1)
            self.exchanges.append(RecordedExchange(client, stage.name, sent[place], answer))
            if client not in self.controlled:
                self.refused += [Refusal(client, stage.name, code) for code in _codes(answer)]
        return answers

    def _holder_number(self, key: bytes) -> int:
        return HOLDER - (self._holders.index(key) if key in self._holders else 0)

    def _is_controlled(self, place: int) -> bool:
        return self._client_at.get(place) in self.controlled


HOLDER = -2
"""The key holder's number, which no client has; holder i of several has HOLDER − i."""
