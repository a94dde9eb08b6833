"""The clients of a session: identities and their proofs; places and pinned keys; which of them answer, refuse or drop out."""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from math import prod
from time import perf_counter
from typing import Literal, TypeVar

from ..contract.handles import PartLayout
from ..protocols.entropy import Entropy, system_entropy
from ..protocols.errors import MalformedMessage, ProtocolError, RemoteError
from ..protocols.keys import Identity, Roster, public_key, sign, verify, verify_key
from . import messages as m
from .client_contract import KEPT
from .client_ledger import SPENT
from .epochs import ENTERED
from .store import Store
from .transport import ExchangeStage, Transport

__all__ = [
    "KEY_HOLDER", "LABEL", "ClientRegistry", "ClientsLost", "EpochEnded", "KeyHolderLost", "check_peer", "check_session", "declared",
    "enrolled", "majority", "new_session",
]  # fmt: skip

Declared = TypeVar("Declared", bound=Hashable)

KEY_HOLDER = -2
"""Stands for the key holder among refusals; holder number i of several is KEY_HOLDER − i."""
MOST_CLIENTS = 1 << 32
"""Client numbers are below this: secure sums encode them in 4 bytes."""


NAMED = 10
"""So many clients are named in a message."""


# --- who a client or the key holder is

LABEL = "cflpriv remote v1 "
ENROL = LABEL + "enrol"
ENROL_HOLDER = LABEL + "enrol key holder"
PROOF = ", to the server now"
SUMMED = "summed"
"""The first part of the store's names for the records of sums, which outlive sessions: a server opens these at will."""
LEFT = "left"
"""The store's name for the sessions that this client has left, 16 bytes each."""


def check_session(store: Store, session: bytes) -> None:
    """Raises `RemoteError` "wrong-session" for a session that the client has left: it no longer knows which transforms it used there."""
    left = store.get(LEFT) or b""
    if session in (left[at : at + len(session)] for at in range(0, len(left), len(session))):
        raise RemoteError("wrong-session")


def new_session(store: Store, session: bytes) -> None:
    """Begin a session: drop everything of an earlier one, except the ledger, the count of epochs, contracts, and the records of sums.

    Raises `RemoteError` as `check_session` does.
    """
    current = store.get("session")
    if current == session:
        return
    check_session(store, session)
    if current is not None:
        store.put(LEFT, (store.get(LEFT) or b"") + current)
        store.drop("session")  # first, so that a client interrupted here has left the session, too
    for name in store.names():
        if name not in (SPENT, LEFT, ENTERED) and name.partition("/")[0] not in (KEPT, SUMMED):
            store.drop(name)
    store.put("session", session)


def enrolled(identity: Identity, ask: m.Enrol, role: Literal["client", "key-holder"], pinned: bool) -> m.Enrolled:
    """The answer of a client or the key holder to `Enrol`, with both signatures where these are asked for.

    Raises `RemoteError` "forbidden" if they are not, although a roster has the key (`pinned`).
    """
    number, label = (identity.client, ENROL) if role == "client" else (0, ENROL_HOLDER)
    key = public_key(identity.encryption_seed)
    if not ask.signed:
        if pinned:
            raise RemoteError("forbidden")
        return m.Enrolled(m.VERSION, number, bytes(32), key, bytes(64), bytes(64), role)
    signed = (ask.session, number.to_bytes(8, "big"), key)
    proof = sign(identity, label + PROOF, *signed, ask.challenge)
    return m.Enrolled(m.VERSION, number, identity.public(), key, sign(identity, label, *signed), proof, role)


def check_enrolled(answer: m.Enrolled, session: bytes, challenge: bytes) -> None:
    """Raises `RemoteError` unless both signatures are by the key that the answer names."""
    label, signed = ENROL if answer.role == "client" else ENROL_HOLDER, (session, answer.client.to_bytes(8, "big"), answer.encryption_key)
    verify_key(answer.signing_key, answer.client, answer.signature, label, *signed)
    verify_key(answer.signing_key, answer.client, answer.proof, label + PROOF, *signed, challenge)


def check_peer(roster: Roster | None, session: bytes, peer: m.Recipient) -> None:
    """Raises `RemoteError` unless a peer's encryption key is signed by the client of its number on the roster, where there is one."""
    if roster is not None:
        verify(roster, peer.client, peer.signature, ENROL, session, peer.client.to_bytes(8, "big"), peer.encryption_key)


# --- errors


class ClientsLost(ProtocolError):
    """Clients dropped out of a comparison. The step can be taken again without them."""

    code = "clients-lost"

    def __init__(self, clients: Iterable[int]) -> None:
        self.clients = tuple(clients)
        super().__init__(f"clients {list(self.clients)} did not answer, or not usably, while they were being compared")


class BudgetsSpent(ProtocolError):
    """All clients that were asked refuse, because their own privacy ledgers allow no more. A budget never refills, so the run ends."""

    code = "budget-exceeded"

    def __init__(self, what: str, clients: Iterable[int]) -> None:
        self.clients = tuple(sorted(clients))
        named = ", ".join(map(str, self.clients[:NAMED])) + (", …" if len(self.clients) > NAMED else "")
        super().__init__(
            f"{what}: all {len(self.clients)} clients that were asked refuse: their own privacy budgets allow no more (clients {named})"
        )


class KeyHolderLost(ProtocolError):
    """The key holder, or one too many of several holders, is absent or refused; `refusal` is its error code, if any.

    The step can be taken again. `who` replaces "the key holder" in the message.
    """

    code = "key-holder-lost"

    def __init__(self, stage: str, refusal: str = "", who: str = "the key holder") -> None:
        super().__init__(f"{who} {f'answered {refusal!r}' if refusal else 'did not answer'} ({stage})")
        self.refusal = refusal


class EpochEnded(ProtocolError):
    """A clustering epoch of encrypted vectors ended with the server's process, which had the ciphertexts. No client can be added."""

    code = "epoch-ended"

    def __init__(self, number: int) -> None:
        super().__init__(f"clustering epoch {number} of encrypted vectors ended when the server was restarted; compare everybody anew")


ANSWERS: Mapping[type, type] = {
    m.Compute: m.Computed, m.AddUp: m.Computed, m.SumStep: m.Stepped, m.Deal: m.Stepped, m.ComputeAndSum: m.ComputedAndSummed,
    m.Group: m.Stepped, m.Seal: m.SealedBoxes, m.Take: m.Acknowledged,
}  # fmt: skip
"""The answer that a client gives to a request, if it does not refuse it. Those to `Give` and `Fold` are on record before they are read."""
MOST_NUMBERS = 1 << 30
"""A declared part has no more numbers than this."""


def declared(answer: m.Answer, parts: Collection[str]) -> PartLayout | None:
    """The layout that a client declares of a task's `parts`, whatever it sent; None if it declares no result.

    Relayed values, which are by sender, are not declared. Raises `MalformedMessage` for a layout that no result of these parts has: other
    names, an unknown dtype, too many axes or numbers.
    """
    if not isinstance(answer, m.Computed) or not answer.result:
        return None
    names = [part.name for part in answer.parts]
    if names != [name for name in parts if name in names]:
        raise MalformedMessage
    for part in answer.parts:
        if part.dtype not in m.DTYPES or len(part.shape) > m.MOST_AXES or prod(max(1, size) for size in part.shape) > MOST_NUMBERS:
            raise MalformedMessage
    return answer.layout


def majority(declared: Sequence[Declared]) -> Declared | None:
    """What more than half of the clients declared, else None."""
    most, count = max(Counter(declared).items(), key=lambda item: item[1], default=(None, 0))
    return most if 2 * count > len(declared) else None


class ClientRegistry:
    """The clients of one session. `peers`: their encryption keys, for other clients. `removed`: clients that cannot enrol again.

    `refusals` are (client, stage, error code), with client −1 before it is known; `error_codes` explains the codes. `unopened`: the
    turns in which a secure sum failed, or a block stayed closed, after clients were asked for shares. These allow no sum over other clients
    at its models. `waiting`: computations that clients are asked for together with the first message of a sum; `computed`: their answers;
    `computing_seconds`: how long these took.
    """

    def __init__(
        self, transport: Transport, session: bytes, roster: Roster | None, expect: Iterable[int] | None, entropy: Entropy = system_entropy,
        contract: bytes = b"", signed: bool = True,
    ) -> None:  # fmt: skip
        self._contract, self._signed = contract, signed
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
        self._holders: dict[int, int] = {}
        self.peers: dict[int, m.Recipient] = {}
        self.refusals: list[tuple[int, str, str]] = []
        self.unopened: set[int] = set()
        self.waiting: dict[int, m.Compute] = {}
        self.computed: dict[int, m.Answer] = {}
        self.computing_seconds = 0.0
        self._answered: dict[int, int] = {}
        self.greeted: list[Callable[[Iterable[int]], None]] = []  # called with those who enrolled, as they may have lost their state

    @property
    def present(self) -> frozenset[int]:
        """The clients that answered last time."""
        if self._present is None:
            self._present = frozenset(self._places) - self._lost
        return self._present

    @property
    def holder(self) -> bool:
        """Whether the key holder, or the first of several holders, answered last time."""
        return 0 in self._holders

    @property
    def holders(self) -> tuple[int, ...]:
        """The holders that answered last time, by their number on the roster."""
        return tuple(sorted(self._holders))

    def knows(self, client: int) -> bool:
        """Whether a client of this number has ever enrolled, or is on the roster."""
        return client in self._signing or (self._roster is not None and 0 <= client < len(self._roster.keys))

    def lose(self, client: int) -> None:
        """Treat this client as absent until it enrols again."""
        self._lost.add(client)
        self._present = None

    def remove(self, clients: Iterable[int]) -> None:
        """Do not let these clients enrol again."""
        self.removed |= set(clients)
        self._lost |= self.removed
        self._present = None

    def _exchange(self, asks: Mapping[int, m.PartyRequest], stage: str) -> Mapping[int, m.Answer]:
        return self._transport.exchange(asks, ExchangeStage(stage, self.round, self.call)) if asks else {}

    def enrol(self) -> tuple[int, ...]:
        """Greet all places without a client that answers. Returns the clients that enrolled."""
        answering = {place for client, place in self._places.items() if client not in self._lost} | {*self._holders.values()}
        fresh = {place: self._entropy(16) for place in self._transport.places() if place not in answering}
        asks: dict[int, m.PartyRequest] = {
            place: m.Enrol(m.VERSION, self._session, challenge, self._contract, self._latest(place), self._signed)
            for place, challenge in fresh.items()
        }
        came = []
        for place, answer in sorted(self._exchange(asks, "enrol").items()):
            if isinstance(answer, m.Refused):
                self.refusals.append((-1, "enrol", answer.code))
                continue
            if not isinstance(answer, m.Enrolled):
                continue
            holder = answer.role == "key-holder"
            try:
                self._check(answer, fresh[place])
            except ProtocolError as error:
                self.refusals.append((KEY_HOLDER if holder else answer.client, "enrol", error.code))
                continue
            if holder and self._roster is not None:
                self._holders[self._roster.holders.index(answer.signing_key)] = place
            else:
                self._signing[answer.client] = answer.signing_key
                self.peers[answer.client] = m.Recipient(answer.client, answer.encryption_key, answer.signature)
                earlier = self._at.get(place)
                if earlier is not None and self._places.get(earlier) == place:  # it may be at another place by now
                    del self._places[earlier]
                if answer.client in came:
                    self.refusals.append((answer.client, "enrol", "two-places"))
                self._places[answer.client], self._at[place] = place, answer.client
                self._lost.discard(answer.client)
                came.append(answer.client)
        self._present = None
        for listen in self.greeted:
            listen(came)
        return tuple(sorted(set(came)))

    def _latest(self, place: int) -> tuple[tuple[int, int], ...]:
        """The client that was last at a place, and the latest round in which it computed, where a contract counts rounds."""
        client = self._at.get(place)
        return ((client, self._answered[client]),) if self._contract and client is not None and client in self._answered else ()

    def greet_lost(self) -> tuple[int, ...]:
        """Greet once the clients that gave no answer and were not greeted since. Returns those that enrolled."""
        listed = set(self._transport.places()) if self._ungreeted else set()
        waiting = {client for client in self._ungreeted & self._lost if self._places.get(client) in listed}
        self._ungreeted.clear()
        return self.enrol() if waiting else ()

    def _check(self, answer: m.Enrolled, challenge: bytes) -> None:
        """Raises `ProtocolError` for an identity that is not on the roster, or (without a roster) differs from an earlier one."""
        client, key, roster = answer.client, answer.signing_key, self._roster
        if answer.role == "key-holder":
            pinned = roster is not None and key in roster.holders
            refused = {"version": answer.version != m.VERSION, "not-on-roster": not pinned}
        else:
            pinned = roster is None or roster.keys[client : client + 1] == (key,)
            expected = client < MOST_CLIENTS and (self._expect is None or client in self._expect)
            refused = {
                "unknown-client": not expected, "removed": client in self.removed, "version": answer.version != m.VERSION,
                "not-on-roster": not pinned, "other-identity": self._signing.get(client, key) != key,
            }  # fmt: skip
        for code, holds in refused.items():
            if holds:
                raise RemoteError(code)
        if self._signed:
            check_enrolled(answer, self._session, challenge)

    def ask_holder(self, ask: m.ToHolder, stage: str) -> m.Answer:
        """The key holder's answer. Raises `KeyHolderLost` if it is absent, does not answer in time, or refuses."""
        answer = self.ask_holders({0: ask}, stage).get(0)
        if answer is None:
            raise KeyHolderLost(stage)
        if isinstance(answer, m.Refused):
            raise KeyHolderLost(stage, answer.code)
        return answer

    def ask_holders(self, asks: Mapping[int, m.ToHolder], stage: str) -> dict[int, m.Answer]:
        """The answers of holders, by number, that arrived in time. The others are absent until they enrol again. Refusals are recorded."""
        there = {number: self._holders[number] for number in asks if number in self._holders}
        arrived, answers = self._exchange({place: asks[number] for number, place in there.items()}, stage), dict[int, m.Answer]()
        for number, place in there.items():
            answer = arrived.get(place)
            if isinstance(answer, m.Refused):
                self.refusals.append((KEY_HOLDER - number, stage, answer.code))
            if answer is None or (isinstance(answer, m.Refused) and answer.code == "wrong-session"):
                del self._holders[number]
            if answer is not None:
                answers[number] = answer
        return answers

    def ask(self, asks: Mapping[int, m.PartyRequest], stage: str) -> dict[int, m.Answer]:
        """The answers that arrived in time. The other clients are absent until they enrol again. Refusals are recorded.

        A message of a sum takes the computation along that waits for it.
        """
        if self.waiting and (taken := self._computing(asks)):
            return self._asked_both(asks, taken, stage)
        arrived = self._exchange({self._places[client]: ask for client, ask in asks.items()}, stage)
        answers: dict[int, m.Answer] = {}
        lost = set()
        for client, ask in asks.items():
            answer = arrived.get(self._places[client])
            if answer is None:
                lost.add(client)
            elif not isinstance(answer, (m.Refused, ANSWERS.get(type(ask), m.FederationMessage))):
                self.refusals.append((client, stage, "malformed"))
            elif isinstance(answer, m.Refused):
                self.refusals.append((client, stage, answer.code))
                if answer.code in ("wrong-session", "no-secret"):  # it has lost its state
                    lost.add(client)
            else:
                answers[client] = answer
                if isinstance(ask, m.Compute | m.ComputeAndSum):
                    self._answered[client] = self.round
        if lost:
            self._lost |= lost
            self._ungreeted |= lost
            self._present = None
        return answers

    def _computing(self, asks: Mapping[int, m.PartyRequest]) -> list[int]:
        """The clients that are asked for a sum and are to compute first."""
        return [client for client, ask in asks.items() if client in self.waiting and isinstance(ask, m.SumStep)]

    def _asked_both(self, asks: Mapping[int, m.PartyRequest], taken: Collection[int], stage: str) -> dict[int, m.Answer]:
        """The answers to messages of sums; those of the clients that were `taken` compute first."""
        both: dict[tuple[int, int], m.ComputeAndSum] = {}  # equal requests are one object, which a transport encodes once
        joined, began = dict(asks), perf_counter()
        for client in taken:
            compute, step = self.waiting.pop(client), asks[client]
            assert isinstance(step, m.SumStep)
            joined[client] = both.setdefault((id(compute), id(step)), m.ComputeAndSum(compute, step))
        answers: dict[int, m.Answer] = {}
        for client, answer in self.ask(joined, "compute").items():
            if not isinstance(answer, m.ComputedAndSummed):
                answers[client] = answer
                continue
            self.computed[client] = answer.computed
            if isinstance(answer.stepped, m.Refused):
                self.refusals.append((client, stage, answer.stepped.code))
            else:
                answers[client] = answer.stepped
        self.computing_seconds += perf_counter() - began
        return answers
