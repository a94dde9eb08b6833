"""Who is there: places and the clients at them, their pinned keys, who answers and who refuses."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from ..protocols.entropy import Entropy, system_entropy
from ..protocols.errors import MalformedMessage, ProtocolError
from ..protocols.keys import Roster
from . import messages as m
from .client import check_enrolled

__all__ = ["KEY_HOLDER", "ClientsLost", "EpochEnded", "KeyHolderLost", "Roll", "Transport", "most_common"]

Said = TypeVar("Said", bound=Hashable)

KEY_HOLDER = -2
"""Stands for the key holder among refusals."""
MOST_CLIENTS = 1 << 32
"""Numbers of clients are below: sums say them in 4 bytes."""


class ClientsLost(ProtocolError):
    """Clients vanished while they were being compared; take the step again without them."""

    code = "clients-lost"

    def __init__(self, clients: Iterable[int]) -> None:
        self.clients = tuple(clients)
        super().__init__(f"clients {list(self.clients)} did not answer while they were being compared")


class KeyHolderLost(ProtocolError):
    """The key holder is not there, or did not do its part; `code` is the word that it answered, if any. The step can be taken again."""

    code = "key-holder-lost"

    def __init__(self, stage: str, word: str = "") -> None:
        super().__init__(f"the key holder {f'answered {word!r}' if word else 'did not answer'} ({stage})")
        self.word = word


class EpochEnded(ProtocolError):
    """A clustering epoch of encrypted vectors ended with the server's process, which had the ciphertexts: nothing can be added to it."""

    code = "epoch-ended"

    def __init__(self, number: int) -> None:
        super().__init__(f"clustering epoch {number} of encrypted vectors ended when the server was restarted; compare everybody anew")


def most_common(said: Sequence[Said]) -> Said | None:
    """What more than half of them said, None if they do not agree so far: then it is not a few that are wrong."""
    found, count = max(Counter(said).items(), key=lambda one: one[1], default=(None, 0))
    return found if 2 * count > len(said) else None


class Transport(Protocol):
    """Delivers bytes to places and brings back the answers that come in time. A place is an opaque number, e.g. of a node."""

    def places(self) -> Sequence[int]:
        """Where there may be clients now."""
        ...

    def exchange(self, requests: Mapping[int, bytes], stage: str) -> Mapping[int, bytes]:
        """Send each place its request; the answers, by place. It must return by the stage's deadline, with what there is."""
        ...


class Roll:
    """The clients of one session. `peers` has what others need to seal something for a client.

    `refusals` are (client, stage, word), −1 for a client not known yet; the words are explained in `messages.REFUSALS`.
    """

    def __init__(
        self, transport: Transport, session: bytes, roster: Roster | None, expect: Iterable[int] | None, entropy: Entropy = system_entropy
    ) -> None:  # fmt: skip
        self._transport, self._session, self._roster, self._entropy = transport, session, roster, entropy
        self._expect = None if expect is None else frozenset(expect)
        self._places: dict[int, int] = {}
        self._signing: dict[int, bytes] = {}
        self._lost: set[int] = set()
        self._holder: int | None = None
        self.peers: dict[int, m.Recipient] = {}
        self.refusals: list[tuple[int, str, str]] = []

    @property
    def present(self) -> frozenset[int]:
        """Those who answered last time."""
        return frozenset(self._places) - self._lost

    @property
    def holder(self) -> bool:
        """Whether the key holder answered last time."""
        return self._holder is not None

    def lose(self, client: int) -> None:
        """This client must enrol again."""
        self._lost.add(client)

    def enrol(self) -> tuple[int, ...]:
        """Say hello to all places without a client that answers; the clients that came or came back."""
        answering = {place for client, place in self._places.items() if client not in self._lost} | {self._holder}
        fresh = {place: self._entropy(16) for place in self._transport.places() if place not in answering}
        asks = {place: m.encode(m.Enrol(m.VERSION, self._session, challenge)) for place, challenge in fresh.items()}
        came = []
        for place, data in sorted(self._transport.exchange(asks, "enrol").items() if asks else ()):
            try:
                answer = m.decode_answer(data, 1 << 16)
            except MalformedMessage:
                self.refusals.append((-1, "enrol", "malformed"))
                continue
            if isinstance(answer, m.Refused):
                self.refusals.append((-1, "enrol", answer.code))
            elif isinstance(answer, m.Enrolled) and answer.role == "key-holder":
                if self._accepted_holder(answer, fresh[place]):
                    self._holder = place
            elif isinstance(answer, m.Enrolled) and self._accepted(answer, fresh[place]):
                self._places = {client: where for client, where in self._places.items() if where != place}
                self._places[answer.client] = place
                self._lost.discard(answer.client)
                came.append(answer.client)
        return tuple(sorted(came))

    def _accepted(self, answer: m.Enrolled, challenge: bytes) -> bool:
        """Whether an identity is one we know: on the roster, or (without one) the same as before."""
        client, code = answer.client, ""
        if client >= MOST_CLIENTS or (self._expect is not None and client not in self._expect):
            code = "unknown-client"
        elif answer.version != m.VERSION:
            code = "version"
        elif self._roster is not None and not (client < len(self._roster.keys) and self._roster.keys[client] == answer.signing_key):
            code = "not-on-roster"
        elif self._signing.get(client, answer.signing_key) != answer.signing_key:
            code = "other-identity"
        else:
            try:
                check_enrolled(answer, self._session, challenge)
            except ProtocolError as error:
                code = error.code
        if code:
            self.refusals.append((client, "enrol", code))
            return False
        self._signing[client] = answer.signing_key
        self.peers[client] = m.Recipient(client, answer.encryption_key, answer.signature)
        return True

    def _accepted_holder(self, answer: m.Enrolled, challenge: bytes) -> bool:
        """Whether it is the key holder that the roster names."""
        code = ""
        if answer.version != m.VERSION:
            code = "version"
        elif self._roster is None or answer.signing_key != self._roster.holder:
            code = "not-on-roster"
        else:
            try:
                check_enrolled(answer, self._session, challenge)
            except ProtocolError as error:
                code = error.code
        if code:
            self.refusals.append((KEY_HOLDER, "enrol", code))
        return not code

    def ask_holder(self, ask: m.ToHolder, stage: str) -> m.Answer:
        """The key holder's answer. Raises `KeyHolderLost` if it is not there, gives none in time, or refuses."""
        place = self._holder
        if place is None:
            raise KeyHolderLost(stage)
        data = self._transport.exchange({place: m.encode(ask)}, stage).get(place)
        if data is None:
            self._holder = None
            raise KeyHolderLost(stage)
        try:
            answer = m.decode_answer(data)
        except MalformedMessage:
            answer = m.Refused("malformed")
        if isinstance(answer, m.Refused):
            self.refusals.append((KEY_HOLDER, stage, answer.code))
            if answer.code == "wrong-session":
                self._holder = None
            raise KeyHolderLost(stage, answer.code)
        return answer

    def ask(self, asks: Mapping[int, m.Ask], stage: str) -> dict[int, m.Answer]:
        """The answers of clients that gave one in time; the others are lost until they enrol again. Refusals are noted."""
        places = {self._places[client]: client for client in asks}
        encoded: dict[int, bytes] = {id(ask): m.encode(ask) for ask in asks.values()}
        answers: dict[int, m.Answer] = {}
        arrived = self._transport.exchange({place: encoded[id(asks[client])] for place, client in places.items()}, stage)
        for place, data in arrived.items():
            client = places[place]
            try:
                answer = m.decode_answer(data)
            except MalformedMessage:
                self.refusals.append((client, stage, "malformed"))
                continue
            if isinstance(answer, m.Refused):
                self.refusals.append((client, stage, answer.code))
                if answer.code in ("wrong-session", "no-secret"):  # it has lost its state
                    self._lost.add(client)
                continue
            answers[client] = answer
        self._lost |= set(asks) - {places[place] for place in arrived}
        return answers
