"""Who is there: places and the clients at them, their pinned keys, who answers and who refuses."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from ..protocols.entropy import Entropy, system_entropy
from ..protocols.errors import ProtocolError
from ..protocols.keys import Roster
from . import messages as m
from .enrolment import check_enrolled
from .transport import Stage, Transport

__all__ = [
    "KEY_HOLDER", "ClientsLost", "EpochEnded", "KeyHolderLost", "ClientRegistry", "most_common",
]  # fmt: skip

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


class ClientRegistry:
    """The clients of one session. `peers` has what others need to seal something for a client; who is `removed` is not taken back.

    `refusals` are (client, stage, word), −1 for a client not known yet; the words are explained in `messages.REFUSALS`.
    """

    def __init__(
        self, transport: Transport, session: bytes, roster: Roster | None, expect: Iterable[int] | None, entropy: Entropy = system_entropy
    ) -> None:  # fmt: skip
        self._transport, self._session, self._roster, self._entropy = transport, session, roster, entropy
        self._expect = None if expect is None else frozenset(expect)
        self._places: dict[int, int] = {}
        self._at: dict[int, int] = {}
        self._present: frozenset[int] | None = None
        self.round, self.call = -1, 0
        self._signing: dict[int, bytes] = {}
        self._lost: set[int] = set()
        self._ungreeted: set[int] = set()
        self.removed: set[int] = set()
        self._holder: int | None = None
        self.peers: dict[int, m.Recipient] = {}
        self.refusals: list[tuple[int, str, str]] = []
        self.greeted: list[Callable[[Iterable[int]], None]] = []  # are told who enrolled: they may have lost their state

    @property
    def present(self) -> frozenset[int]:
        """Those who answered last time."""
        if self._present is None:
            self._present = frozenset(self._places) - self._lost
        return self._present

    @property
    def holder(self) -> bool:
        """Whether the key holder answered last time."""
        return self._holder is not None

    def knows(self, client: int) -> bool:
        """Whether a client of this number was ever there, or is pinned."""
        return client in self._signing or (self._roster is not None and 0 <= client < len(self._roster.keys))

    def lose(self, client: int) -> None:
        """This client must enrol again."""
        self._lost.add(client)
        self._present = None

    def remove(self, clients: Iterable[int]) -> None:
        """These clients are not taken back."""
        self.removed |= set(clients)
        self._lost |= self.removed
        self._present = None

    def _exchange(self, asks: Mapping[int, m.Ask], stage: str) -> Mapping[int, m.Answer]:
        return self._transport.exchange(asks, Stage(stage, self.round, self.call)) if asks else {}

    def enrol(self) -> tuple[int, ...]:
        """Greet all places without a client that answers; the clients that came or came back."""
        answering = {place for client, place in self._places.items() if client not in self._lost} | {self._holder}
        fresh = {place: self._entropy(16) for place in self._transport.places() if place not in answering}
        asks: dict[int, m.Ask] = {place: m.Enrol(m.VERSION, self._session, challenge) for place, challenge in fresh.items()}
        came = []
        for place, answer in sorted(self._exchange(asks, "enrol").items()):
            if isinstance(answer, m.Refused):
                self.refusals.append((-1, "enrol", answer.code))
            elif isinstance(answer, m.Enrolled) and answer.role == "key-holder":
                if self._accepted_holder(answer, fresh[place]):
                    self._holder = place
            elif isinstance(answer, m.Enrolled) and self._accepted(answer, fresh[place]):
                if place in self._at:
                    self._places.pop(self._at[place], None)
                self._places[answer.client], self._at[place] = place, answer.client
                self._lost.discard(answer.client)
                came.append(answer.client)
        self._present = None
        for listen in self.greeted:
            listen(came)
        return tuple(sorted(came))

    def greet_lost(self) -> tuple[int, ...]:
        """Greet clients that gave no answer and were not greeted since, once; those that came back."""
        listed = set(self._transport.places()) if self._ungreeted else set()
        waiting = {client for client in self._ungreeted & self._lost if self._places.get(client) in listed}
        self._ungreeted.clear()
        return self.enrol() if waiting else ()

    def _accepted(self, answer: m.Enrolled, challenge: bytes) -> bool:
        """Whether an identity is one we know: on the roster, or (without one) the same as before."""
        client, code = answer.client, ""
        if client >= MOST_CLIENTS or (self._expect is not None and client not in self._expect):
            code = "unknown-client"
        elif client in self.removed:
            code = "removed"
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
        answer = self._exchange({place: ask}, stage).get(place)
        if answer is None:
            self._holder = None
            raise KeyHolderLost(stage)
        if isinstance(answer, m.Refused):
            self.refusals.append((KEY_HOLDER, stage, answer.code))
            if answer.code == "wrong-session":
                self._holder = None
            raise KeyHolderLost(stage, answer.code)
        return answer

    def ask(self, asks: Mapping[int, m.Ask], stage: str) -> dict[int, m.Answer]:
        """The answers of clients that gave one in time; the others are lost until they enrol again. Refusals are noted."""
        arrived = self._exchange({self._places[client]: ask for client, ask in asks.items()}, stage)
        answers: dict[int, m.Answer] = {}
        lost = set()
        for client in asks:
            answer = arrived.get(self._places[client])
            if answer is None:
                lost.add(client)
            elif isinstance(answer, m.Refused):
                self.refusals.append((client, stage, answer.code))
                if answer.code in ("wrong-session", "no-secret"):  # it has lost its state
                    lost.add(client)
            else:
                answers[client] = answer
        if lost:
            self._lost |= lost
            self._ungreeted |= lost
            self._present = None
        return answers
