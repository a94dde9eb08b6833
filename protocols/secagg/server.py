"""How does the server add up what it cannot read?

A single-use machine: the caller hands it what arrives (`receive`), decides when a stage is over (`advance`:
whoever has not answered is a dropout) and sends what `advance` returns. No I/O, no clock. Masked vectors are
added up as they arrive and never kept.

Errors. `RemoteError` from `receive`: that message was refused and nothing has changed. `TooFewClients` and
`LocalError` from `advance`: the sum has failed, the machine is dead; what it has learnt shows no individual.

Guarantee: `result` is the exact integer sum of the levels of the survivors (U3), or there is none. Reveals:
see the package. Source: Bonawitz et al. 2017, figure 4 (all rounds); Bell et al. 2020, algorithm 2 (sparse
graph).
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from .. import codec, fixedpoint
from ..errors import LocalError, MalformedMessage, ProtocolError, RemoteError
from ..keys import Roster, check_public_key, private_key, public_key, verify
from . import messages
from .bindings import CONSISTENT, binding, check_advert, pair_key, self_key
from .graph import neighbours
from .masks import MapJobs, Mask, total_mask
from .messages import (
    Advert,
    Adverts,
    Consistent,
    Deliver,
    Invite,
    Masked,
    Reveal,
    Sealed,
    Shares,
    Signed,
    Survivors,
    Terms,
    Unmask,
)
from .policy import enough
from .result import Sum
from .shamir import combine
from .states import SERVER, ServerStage

__all__ = ["Server"]

_MASKS_PER_JOB = 256


class _State(codec.Redacted, msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Replaced piece by piece; each piece only after everything about a message has been checked."""

    _shown = ("stage",)

    stage: str
    terms: Terms
    adverts: dict[int, Advert] = {}
    boxes: dict[int, tuple[Sealed, ...]] = {}
    advertised: tuple[int, ...] = ()
    members: tuple[int, ...] = ()
    survivors: tuple[int, ...] = ()
    expected: tuple[int, ...] = ()
    answered: list[int] = []
    vector: bytes = b""
    signatures: dict[int, bytes] = {}
    reveals: dict[int, Reveal] = {}
    following: dict[int, Advert] = {}


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
        try:
            messages.check_terms(terms)
        except ValueError as error:
            raise LocalError("bad-terms", str(error)) from None
        if terms.mode == "active" and (roster is None or roster.digest != terms.roster):
            raise LocalError("no-roster", "active mode needs the pinned roster that the terms name")
        self._roster = roster
        self._state = _State(ServerStage.NEW, terms)
        self._agreed = messages.context(terms)
        self._sum: NDArray[Any] | None = None
        self._result: Sum | None = None
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
    def waiting(self) -> frozenset[int]:
        """The clients whose answer in this stage has not come."""
        return frozenset(self._state.expected) - frozenset(self._state.answered)

    @property
    def result(self) -> Sum:
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

    def receive(self, client: int, data: bytes) -> None:
        """Takes what the transport says came from `client`.

        Raises:
            RemoteError: it was refused (MalformedMessage is one); nothing has changed.
        """
        state, terms = self._state, self._state.terms
        if client not in terms.cohort:
            raise RemoteError("unknown-client")
        row = SERVER[terms.mode].get(self.stage)
        message = messages.decode_client(data, self._vector_bytes if self.stage is ServerStage.MASKING else 0)
        if row is None or row[0] != type(message).__name__:
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
                state.boxes[client] = message.boxes
            case Masked():
                self._add(client, message)
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
                state.reveals[client] = message
        state.answered.append(client)

    def advance(self, mapper: MapJobs = map) -> dict[int, bytes]:
        """Closes the stage: what to send to whom now ({} when the sum is done, or nobody had to be invited).

        Args:
            mapper: carries the expansion of masks in the last stage, e.g. the `map` of a process pool.

        Raises:
            TooFewClients: too few are left; the machine is dead.
            LocalError: "finished" or "dead"; "bad-shares" if what the clients revealed does not fit together.
        """
        row = SERVER[self._state.terms.mode].get(self.stage)
        if row is None:
            raise LocalError("dead" if self.stage is ServerStage.DEAD else "finished")
        try:
            sent = self._close(mapper)
        except ProtocolError:
            self._die()
            raise
        state = self._state
        assert all(type(message).__name__ == row[1] for message in sent.values()), "the step does not follow the table"
        state.stage, state.expected, state.answered = row[2], tuple(sorted(sent)), []
        return {client: messages.encode(message) for client, message in sent.items()}

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
        floor = messages.survivor_floor(terms)
        sent: dict[int, msgspec.Struct]
        match self.stage:
            case ServerStage.NEW:
                enough(len(terms.cohort), floor)
                return {client: Invite(terms) for client in terms.cohort if client not in state.adverts}
            case ServerStage.ADVERTISING:
                state.advertised = self._connected(tuple(sorted(state.adverts)))
                enough(len(state.advertised), floor)
                return {
                    client: Adverts(terms, tuple(state.adverts[v] for v in sorted(self._near(client, state.advertised))))
                    for client in state.advertised
                }
            case ServerStage.SHARING:
                # U2: who shared. All masks and shares are confined to it from here on.
                state.members = self._connected(tuple(sorted(state.answered)))
                enough(len(state.members), floor)
                packed = messages.ids(state.members)
                inbox: dict[int, list[Sealed]] = {client: [] for client in state.members}
                for source in state.members:
                    for sealed in state.boxes[source]:
                        if sealed.peer in inbox:
                            inbox[sealed.peer].append(Sealed(source, sealed.box))
                state.boxes = {}
                return {client: Deliver(self._agreed, packed, tuple(boxes)) for client, boxes in inbox.items()}
            case ServerStage.MASKING:
                state.survivors = tuple(sorted(state.answered))
                enough(len(state.survivors), floor)
                packed = messages.ids(state.survivors)
                sent = {
                    client: Survivors(self._agreed, packed) if terms.mode == "active" else Unmask(self._agreed, packed, ())
                    for client in state.survivors
                }
                return sent
            case ServerStage.CONSISTENCY:
                enough(len(state.signatures), terms.threshold)
                signed = tuple(Signed(client, signature) for client, signature in sorted(state.signatures.items()))
                unmask = Unmask(self._agreed, messages.ids(state.survivors), signed)
                return {signer.client: unmask for signer in signed}
            case _:
                self._result = self._unmask(mapper)
                return {}

    def _connected(self, clients: tuple[int, ...]) -> tuple[int, ...]:
        """Those of `clients` with at least t keepers (neighbours among them, and themselves): the others could not be unmasked."""
        while True:
            kept = tuple(c for c in clients if len(self._near(c, clients)) + 1 >= self._state.terms.threshold)
            if kept == clients:
                return kept
            clients = kept

    def _unmask(self, mapper: MapJobs) -> Sum:
        state, terms = self._state, self._state.terms
        place = {member: number for number, member in enumerate(terms.cohort, 1)}
        alive = frozenset(state.survivors)
        points: dict[int, list[tuple[int, bytes]]] = {client: [] for client in state.members}
        for keeper, reveal in sorted(state.reveals.items()):
            for share in (*reveal.self_shares, *reveal.key_shares):
                points[share.peer].append((place[keeper], share.share))

        # Σ_{u in U3} x_u = Σ_{u in U3} y_u − Σ_{u in U3} PRG(b_u) − Σ_{u in U3, v in U2∖U3, u~v} ±PRG(s_uv)   mod 2^b
        bound = binding(terms)
        masks: list[Mask] = []
        for client in state.members:
            near = self._near(client, state.survivors)
            if client not in alive and not near:
                continue
            enough(len(points[client]), terms.threshold)
            keepers, shares = zip(*points[client][: terms.threshold], strict=True)
            try:
                secret = combine(keepers, shares)
            except ValueError:
                raise LocalError("bad-shares", f"of client {client}") from None
            if client in alive:
                masks.append((self_key(secret, bound, client), -1))
                continue
            own = state.adverts[client].mask_key
            if public_key(secret) != own:
                raise LocalError("bad-shares", f"of client {client}")
            mask_secret = private_key(secret)
            for u in sorted(near):
                key = pair_key(mask_secret, own, state.adverts[u].mask_key, bound, client, u)
                masks.append((key, -1 if u < client else 1))
        assert self._sum is not None
        jobs = [(masks[start : start + _MASKS_PER_JOB], self._sum.size, self._dtype) for start in range(0, len(masks), _MASKS_PER_JOB)]
        # Into a copy: if the caller's mapper fails half-way, the stage can be closed again.
        total = self._sum.copy()
        for part in mapper(total_mask, jobs):
            total += part
        return Sum(terms, state.survivors, fixedpoint.unwrap(total, terms.bits))
