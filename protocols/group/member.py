"""The client's machine of the group key agreement.

A machine: bytes in, bytes out. It does no I/O, has no clock and draws randomness only from the entropy it is given. Its steps are the rows
of `states.MEMBER`; a step is a function from the old frozen state and a checked message to the new state and the reply. One machine serves
all epochs of a session.

Errors. `RemoteError` and `TooFewClients`: the received bytes were refused, and the state is exactly as before. `LocalError`: the caller's
own mistake, or an entropy source that fails; the machine forgets its secrets and is dead.

Guarantee and Reveals: see the package. What leaves this machine reveals nothing about the group's secret to a server that lacks the secrets
of all members. A stored state is as secret as the identity.
"""

from collections.abc import Iterable
from functools import lru_cache
from threading import RLock
from typing import Annotated, Any

import msgspec

from .. import codec, keys
from ..copies import check_own
from ..entropy import Entropy, system_entropy
from ..errors import LocalError, RemoteError, TooFewClients, fatal
from ..keys import Identity, Roster, agree, check_public_key, public_key, seal, sign, unseal, verify
from ..uncopied import uncopied
from . import messages
from .messages import (
    LABEL,
    SECRET_BYTES,
    SIGNATURE_BYTES,
    Admit,
    Advert,
    Adverts,
    Box,
    Confirm,
    Confirmed,
    Deliver,
    Grant,
    GroupTerms,
    Handover,
    Header,
    Invite,
    Offer,
    context,
    digest,
    names,
    needed,
)
from .ratchet import Ratchet
from .states import MEMBER, MemberStage

__all__ = ["Member", "check_advert"]

_STATE_LIMIT_BYTES = 1 << 22
_Change = tuple[dict[str, Any], msgspec.Struct | None]


@uncopied("it is what members share")
class _Shared(codec.Redacted, msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What members share, as it is sealed for others: the lasting secret, and the ratchet as far as the sender went."""

    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    ratchet: Ratchet


@uncopied("it has a member's secrets")
class _State(codec.Redacted, msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`epoch`, `secret` and `ratchet`, with `group`, their context, are those in force; the rest is of the epoch that is being agreed."""

    _shown = ("stage", "client")

    stage: str
    client: int
    session: bytes
    smallest: int
    terms: GroupTerms | None = None
    seed: bytes = b""
    header: Header | None = None
    coming: _Shared | None = None
    epoch: int = -1
    group: bytes = b""
    removed: bytes = b""
    secret: bytes = b""
    ratchet: Ratchet | None = None


@uncopied("a copy would answer a second time; see to_bytes")
class Member:
    """One client's part in the group of a session.

    Args:
        identity: its long-term secrets.
        roster: the pinned roster.
        session: 16 bytes naming the training run.
        smallest: the fewest members of a group that this client takes part in. Above half of the roster, no server can keep two groups
            of one epoch apart, whatever lists it shows.
        entropy: source of all randomness.

    Raises:
        LocalError: "not-on-roster".
    """

    def __init__(self, identity: Identity, roster: Roster, session: bytes, *, smallest: int = 1, entropy: Entropy = system_entropy) -> None:
        check_own("identity", identity, Identity)
        check_own("roster", roster, Roster)
        _check_identity(identity, roster)
        self._identity, self._roster, self._entropy, self._lock = identity, roster, entropy, RLock()
        self._state = _State(MemberStage.OUTSIDE, identity.client, session, smallest)

    def __repr__(self) -> str:
        return f"Member(client={self._state.client}, stage={self.stage.value!r}, epoch={self.epoch})"

    @property
    def stage(self) -> MemberStage:
        """Where the machine is."""
        return MemberStage(self._state.stage)

    @property
    def epoch(self) -> int | None:
        """The epoch whose secret this client has, None without one. It stays in force until that of a later epoch is confirmed."""
        return self._state.epoch if self._state.secret else None

    def derive(self, *purpose: str | int) -> bytes:
        """The 32-byte key of the epoch in force for one purpose, the same at every member; keys for different purposes are independent.

        It lasts as long as the epoch: a stolen state opens everything that was under it. What need not last has a number, see `ratchet`.

        Raises:
            LocalError: "no-secret" before there is one (the machine lives on).
        """
        state = self._state
        if not state.secret:
            raise LocalError("no-secret", "the group has not agreed yet")
        return keys.derive(state.secret, LABEL + "purpose", state.group, *(str(part).encode() for part in purpose))

    @property
    def ratchet(self) -> Ratchet | None:
        """The numbered keys of the epoch in force, as far as this client went; None without an epoch."""
        return self._state.ratchet

    def advance(self, number: int, keep: Iterable[int] = ()) -> Ratchet:
        """Go on to `number` and erase the keys of earlier numbers but those in `keep`, see `Ratchet.moved`; the ratchet as it is then.

        Raises:
            LocalError: "no-secret" before there is one; RemoteError: as `Ratchet.moved`. Nothing has changed.
        """
        with self._lock:
            if self._state.ratchet is None:
                raise LocalError("no-secret", "the group has not agreed yet")
            moved = self._state.ratchet.moved(number, keep)
            self._state = msgspec.structs.replace(self._state, ratchet=moved)
            return moved

    def receive(self, data: bytes) -> bytes | None:
        """Takes the server's next message and gives the reply to send, None where there is none. Threads come one after the other.

        Raises:
            RemoteError: the message was refused (MalformedMessage is one); nothing has changed.
            TooFewClients: the group would be too small; nothing has changed.
            LocalError: see the module; the machine is dead.
        """
        with self._lock:
            if self.stage is MemberStage.DEAD:
                raise LocalError("dead", "an earlier local error stopped this machine")
            with fatal(self._die):
                state, reply = self._step(messages.decode_server(data))
            self._state = state
            return None if reply is None else messages.encode(reply)

    def to_bytes(self) -> bytes:
        """The whole state, secrets included (not the identity). Replace, never keep, older copies."""
        return codec.encode(self._state)

    @staticmethod
    def from_bytes(data: bytes, identity: Identity, roster: Roster, *, entropy: Entropy = system_entropy) -> "Member":
        """The machine that `to_bytes` stored.

        Raises:
            MalformedMessage: if `data` is none.
            LocalError: if identity or roster do not belong to it.
        """
        state = codec.decode(data, _State, _STATE_LIMIT_BYTES)
        if state.client != identity.client or state.stage not in set(MemberStage):
            raise LocalError("wrong-identity")
        _check_identity(identity, roster)
        member = object.__new__(Member)
        member._identity, member._roster, member._entropy, member._lock = identity, roster, entropy, RLock()
        member._state = state
        return member

    def _die(self) -> None:
        self._state = _State(MemberStage.DEAD, self._state.client, self._state.session, self._state.smallest)

    def _draw(self, count: int) -> bytes:
        drawn = self._entropy(count)
        if len(drawn) != count:
            raise LocalError("entropy")
        return drawn

    def _step(self, message: messages.ServerMessage) -> tuple[_State, msgspec.Struct | None]:
        rows = MEMBER[self.stage]
        if type(message).__name__ not in rows:
            raise RemoteError("wrong-stage")
        if isinstance(message, Invite) and self._state.seed and message.terms == self._state.terms:
            return self._state, self._advert(message.terms, self._state.seed)  # asked again: the same answer, and nothing changes
        changed: dict[str, Any]
        match message:
            case Invite():
                changed, reply = self._advertise(message.terms)
            case Adverts():
                changed, reply = self._lead(message)
            case Deliver():
                changed, reply = self._accept(message)
            case Confirmed():
                changed, reply = self._enter(message)
            case Admit():
                changed, reply = self._sponsor(message)
            case Handover():
                changed, reply = self._join(message)
        expected, after = rows[type(message).__name__]
        assert (None if reply is None else type(reply).__name__) == expected, "the step does not follow the table"
        return msgspec.structs.replace(self._state, stage=after, **changed), reply

    # Advertise. --------------------------------------------------------------------------------------------------------------------

    def _advertise(self, terms: GroupTerms) -> _Change:
        state = self._state
        if terms.session != state.session:
            raise RemoteError("wrong-context")
        if terms.epoch <= max(state.epoch, -1 if state.terms is None else state.terms.epoch):
            raise RemoteError("wrong-epoch")
        if terms.roster != self._roster.digest:
            raise RemoteError("wrong-roster")
        if terms.smallest < state.smallest:
            raise RemoteError("minimum-too-low")
        try:
            messages.check_terms(terms)
        except ValueError:
            raise RemoteError("bad-terms") from None
        if state.client in names(terms.removed):
            raise RemoteError("not-invited")
        seed = self._draw(32)
        return {"terms": terms, "seed": seed, "header": None, "coming": None}, self._advert(terms, seed)

    def _advert(self, terms: GroupTerms, seed: bytes) -> Advert:
        me, agreed, key = self._state.client, context(terms), public_key(seed)
        return Advert(me, agreed, key, sign(self._identity, LABEL + "advert", agreed, _name(me), key))

    # Lead: draw the secret and seal it for everybody. ---------------------------------------------------------------------------------

    def _lead(self, message: Adverts) -> _Change:
        terms, agreed = self._agreed(message.context)
        me, own = self._state.client, public_key(self._state.seed)
        members = [advert.client for advert in message.adverts]
        if me not in members or not set(members) <= set(names(terms.members)):
            raise RemoteError("bad-members")
        for advert in message.adverts:
            check_advert(advert, agreed, self._roster)
            if advert.client == me and advert.key != own:
                raise RemoteError("bad-members", me)
        if len({advert.key for advert in message.adverts}) != len(members):
            raise RemoteError("repeated-key")
        _enough(len(members), terms)
        shared = _Shared(self._draw(SECRET_BYTES), Ratchet(0, self._draw(SECRET_BYTES)))
        unsigned = Header(agreed, me, own, messages.ids(members), _commitment(shared, agreed), bytes(SIGNATURE_BYTES))
        signature = sign(self._identity, LABEL + "header", digest(unsigned))
        header = msgspec.structs.replace(unsigned, signature=signature)
        seed = keys.private_key(self._state.seed)
        boxes = []
        for advert in message.adverts:
            if advert.client != me:
                key = agree(seed, advert.key, LABEL + "box", agreed, own, advert.key)
                boxes.append(Box(advert.client, seal(key, codec.encode(shared), _associated(header, me, advert.client), self._draw)))
        return {"header": header, "coming": shared}, Offer(header, tuple(boxes))

    # Accept, confirm, enter. ----------------------------------------------------------------------------------------------------------

    def _accept(self, message: Deliver) -> _Change:
        header, me = message.header, self._state.client
        self._check_header(header)
        if me not in names(header.members):
            raise RemoteError("bad-members")
        shared = self._open(header, header.leader, header.key, message.box)
        signature = sign(self._identity, LABEL + "confirm", digest(header))
        return {"header": header, "coming": shared}, Confirm(me, header.context, signature)

    def _enter(self, message: Confirmed) -> _Change:
        header = self._state.header
        assert header is not None
        self._agreed(message.context)
        self._check_confirmed(header, message)
        assert self._state.coming is not None
        return self._in_force(header.context, self._state.coming), None

    # A newcomer: one member gives, the newcomer takes. --------------------------------------------------------------------------------

    def _sponsor(self, message: Admit) -> _Change:
        state, newcomer = self._state, message.advert
        if message.context != state.group:
            raise RemoteError("wrong-context")
        if newcomer.client == state.client or newcomer.client in names(state.removed):
            raise RemoteError("bad-members", newcomer.client)
        check_advert(newcomer, state.group, self._roster)
        header = state.header
        assert header is not None
        assert state.ratchet is not None
        seed = self._draw(32)
        own = public_key(seed)
        key = agree(seed, newcomer.key, LABEL + "box", state.group, own, newcomer.key)
        box = seal(key, codec.encode(_Shared(state.secret, state.ratchet)), _associated(header, state.client, newcomer.client), self._draw)
        return {}, Grant(state.client, state.group, newcomer.client, own, box)

    def _join(self, message: Handover) -> _Change:
        header, grant = message.header, message.grant
        self._check_header(header)
        self._check_confirmed(header, message.confirmed)
        if grant.context != header.context or grant.newcomer != self._state.client or grant.client == self._state.client:
            raise RemoteError("wrong-context")
        shared = self._open(header, grant.client, grant.key, grant.box)
        return {**self._in_force(header.context, shared), "header": header}, None

    # Inside. ----------------------------------------------------------------------------------------------------------------------

    def _agreed(self, claimed: bytes) -> tuple[GroupTerms, bytes]:
        """The terms that this client advertised for, if `claimed` is their context."""
        terms = self._state.terms
        assert terms is not None
        agreed = context(terms)
        if claimed != agreed:
            raise RemoteError("wrong-context")
        return terms, agreed

    def _check_header(self, header: Header) -> None:
        terms, _ = self._agreed(header.context)
        members = names(header.members)
        if header.leader not in members or not set(members) <= set(names(terms.members)):
            raise RemoteError("bad-members")
        _enough(len(members), terms)
        verify(self._roster, header.leader, header.signature, LABEL + "header", digest(header))

    def _check_confirmed(self, header: Header, message: Confirmed) -> None:
        """The leader and those who signed the header's digest are members, and enough."""
        terms, _ = self._agreed(message.context)
        clients, signed = names(message.clients), digest(header)
        if not set(clients) <= set(names(header.members)):
            raise RemoteError("bad-members")
        _enough(len({header.leader, *clients}), terms)
        _check_signatures(self._roster, clients, message.signatures, signed)

    def _open(self, header: Header, sender: int, key: bytes, box: bytes) -> _Shared:
        """What is in a box, if it is what the leader committed to: the secret, and any place on the chain."""
        own = public_key(self._state.seed)
        opening = agree(self._state.seed, key, LABEL + "box", header.context, key, own)
        try:
            shared = codec.decode(unseal(opening, box, _associated(header, sender, self._state.client)), _Shared, len(box))
        except RemoteError:
            raise RemoteError("bad-box", sender) from None
        if _commitment(shared, header.context) != header.commitment:
            raise RemoteError("bad-box", sender)
        return shared

    def _in_force(self, agreed: bytes, shared: _Shared) -> dict[str, Any]:
        """What changes when an epoch's secret comes into force: the old one and the keys it came by are forgotten."""
        terms = self._state.terms
        assert terms is not None
        entered = {"epoch": terms.epoch, "group": agreed, "removed": terms.removed, "secret": shared.secret, "ratchet": shared.ratchet}
        return {**entered, "seed": b"", "coming": None}


def check_advert(advert: Advert, agreed: bytes, roster: Roster) -> None:
    """Checks an advert against the context and the roster.

    Raises:
        RemoteError: "wrong-context", "bad-key" or "bad-signature".
    """
    if advert.context != agreed:
        raise RemoteError("wrong-context", advert.client)
    verify(roster, advert.client, advert.signature, LABEL + "advert", agreed, _name(advert.client), advert.key)
    try:
        check_public_key(advert.key)
    except RemoteError:
        raise RemoteError("bad-key", advert.client) from None


@lru_cache(maxsize=8)
def _check_signatures(roster: Roster, clients: tuple[int, ...], signatures: bytes, signed: bytes) -> None:
    """Everybody's confirmation. Public facts, remembered: where all members live in one process, each asks about the same ones."""
    for number, client in enumerate(clients):
        signature = signatures[number * SIGNATURE_BYTES : (number + 1) * SIGNATURE_BYTES]
        verify(roster, client, signature, LABEL + "confirm", signed)


def _check_identity(identity: Identity, roster: Roster) -> None:
    if not 0 <= identity.client < len(roster.keys) or roster.keys[identity.client] != identity.public():
        raise LocalError("not-on-roster")


def _name(client: int) -> bytes:
    return client.to_bytes(4, "little")


def _commitment(shared: _Shared, agreed: bytes) -> bytes:
    """32 bytes that only this secret and this chain give, from any place on it, and that reveal nothing of them.

    Keys kept of numbers that were passed are not covered: a newcomer cannot verify those.
    """
    return keys.derive(shared.secret, LABEL + "commitment", agreed, shared.ratchet.end())


def _associated(header: Header, sender: int, recipient: int) -> bytes:
    return keys.frame(LABEL + "box", digest(header), _name(sender), _name(recipient))


def _enough(have: int, terms: GroupTerms) -> None:
    if have < needed(terms):
        raise TooFewClients((have,), needed(terms))
