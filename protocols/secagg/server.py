"""The server's machine of a secure sum.

A single-use machine: the caller hands it what arrives (`receive`), decides when a stage is over (`advance`:
whoever has not answered is a dropout) and sends what `advance` returns. No I/O, no clock. Masked vectors are
added up as they arrive and never kept.

Errors. `RemoteError` from `receive`: that message was refused and nothing has changed. `TooFewClients`,
`SumFailed` and `LocalError` from `advance`: the sum has failed, the machine is dead; what it has learnt shows no
individual.

Guarantee: `result` is the exact integer sum, modulo 2^bits, of the vectors that the survivors (U3) masked, or there
is none: every revealed share is held against its dealer's digest, every rebuilt secret against its commitment. It is
the sum of the survivors' levels if they kept to the terms. A survivor may put any vector in: what shows is a sum
outside the range that the terms allow, which is refused. A client that breaks the protocol in another way is refused
by name, or named by `SumFailed`; without proof, nobody is. At most one sum of given values fails through a client
that deals shares of another secret than it committed to; all else that one client does costs at most a new attempt,
as long as without it enough survivors (the threshold) are left. Reveals: see the package. Source: Bonawitz et al. 2017,
figure 4 (all rounds); Bell et al. 2020, algorithm 2 (sparse graph); `shares` for the complaints.
"""

from collections.abc import Mapping
from threading import RLock
from types import NoneType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from .. import codec
from ..copies import check_own
from ..errors import LocalError, MalformedMessage, ProtocolError, RemoteError, SumFailed
from ..keys import Roster, check_public_key, verify
from ..uncopied import uncopied
from . import messages
from .bindings import CONSISTENT, check_advert, share_digest
from .complaints import by_dealer, settled
from .graph import neighbours
from .messages import (
    Advert,
    Adverts,
    Challenge,
    Complaint,
    Consistent,
    Deliver,
    Invite,
    Masked,
    Opened,
    Opening,
    Reveal,
    Sealed,
    Settle,
    Shares,
    Signed,
    Survivors,
    Terms,
    Unmask,
)
from .policy import enough
from .states import SERVER, SERVER_COMPLAINTS, ServerStage, collected, sent
from .unmasking import masks_of
from .vectors import MapJobs, Sum, total_mask, unwrap

__all__ = ["Server"]

_MASKS_PER_JOB = 256


class _State(codec.Redacted, msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Replaced piece by piece; each piece only after everything about a message has been checked."""

    _shown = ("stage",)

    stage: str
    terms: Terms
    adverts: dict[int, Advert] = {}
    shares: dict[int, Shares] = {}
    commitments: dict[int, bytes] = {}
    digests: dict[int, dict[int, tuple[bytes, bytes]]] = {}
    complaints: dict[int, tuple[int, ...]] = {}
    openings: dict[int, tuple[Opened, ...]] = {}
    advertised: tuple[int, ...] = ()
    members: tuple[int, ...] = ()
    survivors: tuple[int, ...] = ()
    expected: tuple[int, ...] = ()
    answered: list[int] = []
    masked: list[int] = []
    vector: bytes = b""
    signatures: dict[int, bytes] = {}
    reveals: dict[int, Reveal] = {}
    following: dict[int, Advert] = {}


@uncopied("it collects one sum; see to_bytes")
class Server:
    """The server's part in one sum.

    Args:
        terms: see `make_terms`.
        roster: the pinned roster; required in active mode.
        adverts: those made for this slot with earlier uploads (`following` of that sum), by client; these clients are
            not invited again.

    Raises:
        LocalError: "no-roster", "bad-terms" or "bad-advert".
    """

    def __init__(self, terms: Terms, *, roster: Roster | None = None, adverts: Mapping[int, bytes] | None = None) -> None:
        check_own("terms", terms, messages.Terms)
        check_own("roster", roster, Roster, NoneType)
        try:
            messages.check_terms(terms)
        except ValueError as error:
            raise LocalError("bad-terms", str(error)) from None
        if terms.mode == "active" and (roster is None or roster.digest != terms.roster):
            raise LocalError("no-roster", "active mode needs the pinned roster that the terms name")
        self._roster, self._lock = roster, RLock()
        self._state = _State(ServerStage.NEW, terms)
        self._agreed = messages.context(terms)
        self._sum: NDArray[Any] | None = None
        self._result: Sum[Terms] | None = None
        for client, data in (adverts or {}).items():
            if client not in terms.cohort:
                continue
            try:
                advert = messages.decode_client(data)
                if not isinstance(advert, Advert) or advert.client != client:
                    raise MalformedMessage
                self._check_advert(advert)
            except RemoteError:
                raise LocalError("bad-advert", f"of client {client}") from None
            self._state.adverts[client] = advert

    def __repr__(self) -> str:
        return f"Server(slot={self._state.terms.slot}, stage={self.stage.value!r})"

    @property
    def stage(self) -> ServerStage:
        """Where the machine is."""
        return ServerStage(self._state.stage)

    @property
    def terms(self) -> Terms:
        """The terms of the sum."""
        return self._state.terms

    @property
    def sent(self) -> str:
        """The kind of the messages that `advance` gave last, "" if there were none."""
        return sent(self._state.terms.mode, self.stage)

    @property
    def collected(self) -> tuple[str, ...]:
        """The kinds of message that this stage collects."""
        return collected(self._state.terms.mode, self.stage)

    @property
    def waiting(self) -> frozenset[int]:
        """The clients whose answer in this stage has not come."""
        return frozenset(self._state.expected) - frozenset(self._state.answered)

    @property
    def result(self) -> Sum[Terms]:
        """The sum.

        Raises:
            LocalError: "no-result" unless the machine is done. (Asking too early harms nothing.)
        """
        if self._result is None:
            raise LocalError("no-result")
        return self._result

    @property
    def following(self) -> dict[int, bytes]:
        """The adverts for the following slot that came with the uploads, by client."""
        return {client: messages.encode(advert) for client, advert in self._state.following.items()}

    def receive(self, client: int, data: bytes) -> str:
        """Takes what the transport says came from `client`; the kind of message that it is. Of two answers of one client one is taken.

        Raises:
            RemoteError: it was refused (MalformedMessage is one); nothing has changed. The code "wrong-share" proves that
                the client revealed another share than it was dealt.
        """
        with self._lock:
            return self._receive(client, data)

    def _receive(self, client: int, data: bytes) -> str:
        state, terms = self._state, self._state.terms
        if client not in terms.cohort:
            raise RemoteError("unknown-client")
        message = messages.decode_client(data, self._vector_bytes if "Masked" in self.collected else 0)
        if type(message).__name__ not in self.collected:
            raise RemoteError("wrong-stage", client)
        if message.client != client:
            raise RemoteError("wrong-sender", client)
        if client in state.answered:
            raise RemoteError("replay", client)
        if client not in state.expected:
            raise RemoteError("unknown-client", client)
        if not isinstance(message, Advert) and message.context != self._agreed:
            raise RemoteError("wrong-context", client)
        match message:
            case Advert():
                self._check_advert(message)
                state.adverts[client] = message
            case Shares():
                if {sealed.peer for sealed in message.boxes} != self._near(client, state.advertised):
                    raise RemoteError("wrong-shares", client)
                state.shares[client] = message
            case Masked():
                self._add(client, message)
                state.masked.append(client)
            case Complaint():
                accused = messages.names(message.accused)
                if not accused or not set(accused) <= self._near(client, state.members):
                    raise RemoteError("wrong-complaint", client)
                state.complaints[client] = accused
            case Opening():
                state.openings[client] = message.shares
            case Consistent():
                assert self._roster is not None
                parts = (self._agreed, messages.ids(state.members), messages.ids(state.survivors))
                verify(self._roster, client, message.signature, CONSISTENT, *parts)
                state.signatures[client] = message.signature
            case Reveal():
                near = self._near(client, state.members) | {client}
                alive = near & frozenset(state.survivors)
                if {share.peer for share in message.self_shares} != alive or {share.peer for share in message.key_shares} != near - alive:
                    raise RemoteError("wrong-shares", client)
                self._check_revealed(client, message)
                state.reveals[client] = message
        state.answered.append(client)
        return type(message).__name__

    def advance(self, mapper: MapJobs = map) -> dict[int, bytes]:
        """Closes the stage: what to send to whom now ({} when the sum is done, or nobody had to be invited).

        Args:
            mapper: carries the expansion of masks in the last stage, e.g. the `map` of a process pool.

        Raises:
            TooFewClients: too few are left; the machine is dead.
            SumFailed: clients broke the protocol, or the result is none; the machine is dead. If `repeatable`, the sum
                may be taken again without those that it names, by new machines under a later slot.
            LocalError: "finished" or "dead".
        """
        with self._lock:
            return self._advance(mapper)

    def _advance(self, mapper: MapJobs) -> dict[int, bytes]:
        state = self._state
        disputed = self.stage is not ServerStage.MASKING or bool(state.complaints)
        row = (SERVER_COMPLAINTS if disputed else SERVER)[state.terms.mode].get(self.stage) or SERVER[state.terms.mode].get(self.stage)
        if row is None:
            raise LocalError("dead" if self.stage is ServerStage.DEAD else "finished")
        try:
            outbox = self._close(mapper)
        except ProtocolError:
            self._die()
            raise
        assert all(type(message).__name__ == row[1] for message in outbox.values()), "the step does not follow the table"
        state.stage, state.expected, state.answered = row[2], tuple(sorted(outbox)), []
        return {client: messages.encode(message) for client, message in outbox.items()}

    def to_bytes(self) -> bytes:
        """The whole state, for a later process. Call it between stages or within one; not after the end."""
        if self._result is not None:
            raise LocalError("finished")
        if self._sum is not None:
            self._state.vector = self._sum.tobytes()
        return codec.encode(self._state)

    @staticmethod
    def from_bytes(data: bytes, *, roster: Roster | None = None) -> "Server":
        """The machine that `to_bytes` stored.

        Raises:
            MalformedMessage: if `data` is none.
            LocalError: as for the constructor.
        """
        state = codec.decode(data, _State, 1 << 34)
        server = Server(state.terms, roster=roster)
        if state.stage not in {stage.value for stage in ServerStage} or len(state.vector) not in (0, server._vector_bytes):
            raise MalformedMessage
        server._state = state
        if state.vector:
            server._sum = np.frombuffer(bytearray(state.vector), server._dtype)
        return server

    def _die(self) -> None:
        self._state = _State(ServerStage.DEAD, self._state.terms)
        self._sum = None

    @property
    def _signed(self) -> Roster | None:
        """The roster where messages are signed, else None."""
        return self._roster if self._state.terms.mode == "active" else None

    @property
    def _dtype(self) -> str:
        return "<u2" if self._state.terms.bits == 16 else "<u4"

    @property
    def _vector_bytes(self) -> int:
        return messages.vector_length(self._state.terms) * self._state.terms.bits // 8

    def _near(self, client: int, among: tuple[int, ...]) -> frozenset[int]:
        terms = self._state.terms
        return neighbours(terms.graph_seed, terms.cohort, terms.degree, client) & frozenset(among)

    def _check_advert(self, advert: Advert) -> None:
        terms = self._state.terms
        check_advert(advert, terms.session, terms.slot, terms.mode, self._roster)
        self._check_keys(advert)
        used = {key for other in self._state.adverts.values() for key in (other.encryption_key, other.mask_key)}
        if {advert.encryption_key, advert.mask_key} & used:
            raise RemoteError("repeated-key", advert.client)

    @staticmethod
    def _check_keys(advert: Advert) -> None:
        if advert.encryption_key == advert.mask_key:
            raise RemoteError("repeated-key", advert.client)
        try:
            check_public_key(advert.encryption_key)
            check_public_key(advert.mask_key)
        except RemoteError:
            raise RemoteError("bad-key", advert.client) from None

    def _add(self, client: int, message: Masked) -> None:
        terms, advert = self._state.terms, message.following
        if len(message.vector) != self._vector_bytes:
            raise RemoteError("wrong-length", client)
        if (advert is None) != (terms.following is None):
            raise RemoteError("wrong-advert", client)
        if advert is not None and terms.following is not None:
            if advert.client != client:
                raise RemoteError("wrong-advert", client)
            check_advert(advert, terms.session, terms.following, terms.mode, self._roster)
            self._check_keys(advert)
            # against all keys of this slot and the next, its own among them: each serves one slot, and who copies a peer's is refused here
            known = [*self._state.adverts.values(), *self._state.following.values()]
            if {advert.encryption_key, advert.mask_key} & {key for one in known for key in (one.encryption_key, one.mask_key)}:
                raise RemoteError("repeated-key", client)
            self._state.following[client] = advert
        vector = np.frombuffer(message.vector, self._dtype)
        if self._sum is None:
            self._sum = vector.copy()
        else:
            self._sum += vector

    # Closing the stages. ---------------------------------------------------------------------------------------------------

    def _close(self, mapper: MapJobs) -> dict[int, msgspec.Struct]:
        state, terms = self._state, self._state.terms
        fewest = messages.fewest_survivors(terms)
        outbox: dict[int, msgspec.Struct]
        match self.stage:
            case ServerStage.NEW:
                enough(terms, len(terms.cohort), fewest)
                return {client: Invite(terms) for client in terms.cohort if client not in state.adverts}
            case ServerStage.ADVERTISING:
                state.advertised = self._connected(tuple(sorted(state.adverts)))
                enough(terms, len(state.advertised), fewest)
                return {
                    client: Adverts(terms, tuple(state.adverts[v] for v in sorted(self._near(client, state.advertised))))
                    for client in state.advertised
                }
            case ServerStage.SHARING:
                # U2: who shared. All masks and shares are confined to it from here on.
                state.members = self._connected(tuple(sorted(state.answered)))
                enough(terms, len(state.members), fewest)
                return self._deliver()
            case ServerStage.MASKING if state.complaints:
                enough(terms, len(state.answered), fewest)
                return {dealer: Challenge(self._agreed, messages.ids(accusers)) for dealer, accusers in by_dealer(state.complaints).items()}
            case ServerStage.OPENING:
                shares = settled(self._agreed, state.complaints, state.openings, state.adverts, state.digests, self._signed)
                return {client: Settle(self._agreed, opened) for client, opened in shares.items()}
            case ServerStage.MASKING | ServerStage.SETTLING:
                state.survivors = tuple(sorted(state.masked))
                enough(terms, len(state.survivors), fewest)
                packed = messages.ids(state.survivors)
                outbox = {
                    client: Survivors(self._agreed, packed) if terms.mode == "active" else Unmask(self._agreed, packed, ())
                    for client in state.survivors
                }
                return outbox
            case ServerStage.CONSISTENCY:
                enough(terms, len(state.signatures), terms.threshold)
                signed = tuple(Signed(client, signature) for client, signature in sorted(state.signatures.items()))
                unmask = Unmask(self._agreed, messages.ids(state.survivors), signed)
                return {signer.client: unmask for signer in signed}
            case _:
                self._result = self._unmask(mapper)
                return {}

    def _deliver(self) -> dict[int, msgspec.Struct]:
        """The boxes to everybody; of the messages that brought them, commitments and digests are kept."""
        state = self._state
        packed = messages.ids(state.members)
        inbox: dict[int, list[Sealed]] = {client: [] for client in state.members}
        for dealer in state.members:
            message = state.shares[dealer]
            state.commitments[dealer] = message.commitment
            state.digests[dealer] = {dealer: (message.self_digest, message.key_digest)}
            for sealed in message.boxes:
                if sealed.peer in inbox:
                    inbox[sealed.peer].append(msgspec.structs.replace(sealed, peer=dealer))
                    state.digests[dealer][sealed.peer] = (sealed.self_digest, sealed.key_digest)
        state.shares = {}
        return {client: Deliver(self._agreed, packed, tuple(boxes)) for client, boxes in inbox.items()}

    def _check_revealed(self, keeper: int, message: Reveal) -> None:
        digests = self._state.digests
        good = all(
            share_digest("self", self._agreed, share.peer, keeper, share.share) == digests[share.peer][keeper][0]
            for share in message.self_shares
        ) and all(
            share_digest("key", self._agreed, share.peer, keeper, share.share) == digests[share.peer][keeper][1]
            for share in message.key_shares
        )
        if not good:
            raise RemoteError("wrong-share", keeper)

    def _connected(self, clients: tuple[int, ...]) -> tuple[int, ...]:
        """Those of `clients` with at least t keepers (neighbours among them, and themselves): the others could not be unmasked."""
        while True:
            kept = tuple(c for c in clients if len(self._near(c, clients)) + 1 >= self._state.terms.threshold)
            if kept == clients:
                return kept
            clients = kept

    def _unmask(self, mapper: MapJobs) -> Sum[Terms]:
        state, terms = self._state, self._state.terms
        masks = masks_of(terms, self._agreed, state.adverts, state.commitments, state.members, state.survivors, state.reveals, self._near)
        assert self._sum is not None
        jobs = [(masks[start : start + _MASKS_PER_JOB], self._sum.size, self._dtype) for start in range(0, len(masks), _MASKS_PER_JOB)]
        # Into a copy: if the caller's mapper fails half-way, the stage can be closed again.
        total = self._sum.copy()
        for part in mapper(total_mask, jobs):
            total += part
        try:
            return Sum(terms, state.survivors, unwrap(total, terms.bits))
        except ValueError:
            raise SumFailed("out-of-range", among=state.survivors) from None
