"""In-memory transport: requests are passed as objects or, with "bytes", through the encoding that a network would carry."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol

from ..errors import InputError
from ..federation import messages as m
from ..federation.cohort import draw_drop
from ..federation.error_codes import MEANINGS
from ..federation.host import refusal
from ..federation.transport import ExchangeStage
from ..keys import Key, check_ranges
from ..protocols.errors import ProtocolError

__all__ = ["BEFORE_UPLOAD", "STAGES", "BytesTransport", "Dropout", "Faults", "MemoryTransport"]

STAGES = ("Advert", "Shares", "Masked", "Consistent", "Reveal")
"""The messages of a client in a secure sum, by which dropouts are named."""
BEFORE_UPLOAD = STAGES[:3]
_REPLIES = {"Invite": "Advert", "Adverts": "Shares", "Deliver": "Masked", "Survivors": "Consistent", "Unmask": "Reveal"}


FATAL = ("forbidden", "bad-input", "bad-terms", "bad-settings", "out-of-range", "unknown-task", "unlisted-model")
"""Error codes that no retry and no other client changes, where all clients have the same settings."""
Dropout = Annotated[float, Key("Simulations: probability that a drawn client drops out of a round.", "[0, 1)")]


@dataclass(frozen=True)
class Faults:
    """Dropouts to inject: in each call of `mean` a client drops out with probability `dropout`, at a random stage of secure aggregation.

    `listed` holds (round, client) and the stage at which it drops out for certain. Under sums in one message, stages up to "Masked" mean
    that the update never arrives.
    """

    seed: int = 0
    dropout: Dropout = 0.0
    listed: Mapping[tuple[int, int], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_ranges(type(self), vars(self))
        for (number, client), stage in self.listed.items():
            if stage not in STAGES:
                raise InputError(f"training.dropouts: ({number}, {client}, {stage!r}) is not (round, client, one of {', '.join(STAGES)})")

    def silent(self, stage: ExchangeStage, client: int) -> bool:
        """Whether a client's answer at this stage never arrives."""
        if not (self.dropout or self.listed) or not (stage.name == "sum" or stage.name.startswith("secagg ")):
            return False
        drop = self.listed.get((stage.round, client)) or draw_drop(self.dropout, STAGES, self.seed, stage.round, stage.call, client)
        if drop is None:
            return False
        if stage.name == "sum":
            return drop in BEFORE_UPLOAD
        return STAGES.index(drop) <= STAGES.index(_REPLIES[stage.name.removeprefix("secagg ")])


class Answers(Protocol):
    """A `federation.host.ClientHost`, or several."""

    def answer(self, asks: Mapping[int, m.PartyRequest]) -> dict[int, m.Answer | Exception]: ...


@dataclass(eq=False)
class MemoryTransport:
    """Passes requests to the clients of a host, those of `online` only.

    `on_error`: what a client cannot or must not do ends the run with a full message ("raise", as experiments want it: clients have the same
    settings, so one would refuse after the other), or the client answers with an error code, as one that is deployed does ("refuse").
    """

    host: Answers
    faults: Faults = field(default_factory=Faults)
    on_error: Literal["raise", "refuse"] = "raise"
    online: set[int] = field(default_factory=set)

    def places(self) -> Sequence[int]:
        return sorted(self.online)

    def exchange(self, asks: Mapping[int, m.PartyRequest], stage: ExchangeStage) -> Mapping[int, m.Answer]:
        reached = {place: ask for place, ask in asks.items() if place in self.online and not self.faults.silent(stage, place)}
        answers: dict[int, m.Answer] = {}
        for place, answer in self.host.answer(reached).items():
            if not isinstance(answer, Exception):
                answers[place] = answer
            elif self.on_error == "raise" and not isinstance(answer, ProtocolError):
                raise answer
            elif self.on_error == "raise" and isinstance(answer, ProtocolError) and answer.code in FATAL:
                why = "; ".join([MEANINGS.get(answer.code, answer.code), *getattr(answer, "__notes__", ())])
                raise InputError(f"client {place} refuses ({stage.name}, {answer.code!r}): {why}") from answer
            else:
                answers[place] = refusal(f"client {place}", answer)
        return answers


class BytesTransport:
    """The same through the encoding: every request and every answer is encoded and decoded, as on a network."""

    def __init__(self, memory: MemoryTransport) -> None:
        self._memory = memory

    def places(self) -> Sequence[int]:
        return self._memory.places()

    def exchange(self, asks: Mapping[int, m.PartyRequest], stage: ExchangeStage) -> Mapping[int, m.Answer]:
        arrived = {id(ask): m.decode_ask(m.encode(ask)) for ask in {id(ask): ask for ask in asks.values()}.values()}
        answers = self._memory.exchange({place: arrived[id(ask)] for place, ask in asks.items()}, stage)
        return {place: m.decode_answer(m.encode(answer)) for place, answer in answers.items()}
