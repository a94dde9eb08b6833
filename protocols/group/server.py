"""The server's machine of the group key agreement. It carries messages, chooses the leader, and admits newcomers.

A machine for one epoch: bytes in, bytes out, steps as in `states.SERVER`. The server checks messages, so that one client with a bad message
does not stop the others. The members do not rely on these checks.

Errors. `RemoteError`: a client's message was refused; nothing has changed. `TooFewClients`: the stage cannot be closed with so few.
`LocalError`: the caller's own mistake; the machine lives on, it has no secrets.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from .. import codec
from ..copies import check_own
from ..errors import LocalError, RemoteError, TooFewClients
from ..keys import Roster, verify
from . import messages
from .member import check_advert
from .messages import (
    LABEL,
    Admit,
    Advert,
    Adverts,
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
from .states import SERVER, GroupServerStage

__all__ = ["GroupServer"]

_STATE_LIMIT_BYTES = 1 << 26


class _State(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    stage: str
    terms: GroupTerms
    adverts: tuple[Advert, ...] = ()
    asked: tuple[int, ...] = ()
    offer: Offer | None = None
    confirms: tuple[Confirm, ...] = ()
    confirmed: Confirmed | None = None
    newcomers: tuple[tuple[int, int], ...] = ()
    """(newcomer, sponsor) of the hand-overs under way."""
    arrivals: tuple[Advert, ...] = ()


class GroupServer:
    """The server's part in one epoch.

    Raises:
        ValueError: for terms of another roster, or terms that name clients outside the roster.
    """

    def __init__(self, terms: GroupTerms, roster: Roster) -> None:
        check_own("terms", terms, GroupTerms)
        check_own("roster", roster, Roster)
        messages.check_terms(terms)
        if terms.roster != roster.digest or names(terms.members)[-1] >= len(roster.keys):
            raise ValueError("terms: not those of this roster")
        self._roster = roster
        self._state = _State(GroupServerStage.NEW, terms)
        self._context = context(terms)

    def __repr__(self) -> str:
        return f"GroupServer(epoch={self._state.terms.epoch}, stage={self.stage.value!r})"

    @property
    def stage(self) -> GroupServerStage:
        """Where the machine is."""
        return GroupServerStage(self._state.stage)

    @property
    def terms(self) -> GroupTerms:
        """The terms of the epoch."""
        return self._state.terms

    @property
    def header(self) -> Header | None:
        """The leader's header, once there is one."""
        return None if self._state.offer is None else self._state.offer.header

    def advance(self) -> Mapping[int, bytes]:
        """Close the stage and give what to send, by client. Who has not answered has dropped out (and may be admitted later).

        Raises:
            TooFewClients: too few answered, or nobody is left to lead.
            LocalError: "wrong-stage" once the epoch runs.
        """
        state = self._state
        if self.stage not in SERVER:
            raise LocalError("wrong-stage", "the epoch runs; newcomers are admitted one by one")
        after = SERVER[self.stage][2]
        changed: dict[str, Any] = {}
        match self.stage:
            case GroupServerStage.NEW:
                data = messages.encode(Invite(state.terms))
                outbox = dict.fromkeys(names(state.terms.members), data)
            case GroupServerStage.ADVERTISING:
                self._enough(len(state.adverts))
                outbox, changed = self._ask()
            case GroupServerStage.OFFERING if state.offer is None:
                after = GroupServerStage.OFFERING
                outbox, changed = self._ask()
            case GroupServerStage.OFFERING:
                assert state.offer is not None
                header = state.offer.header
                outbox = {box.client: messages.encode(Deliver(header, box.box)) for box in state.offer.boxes}
            case _:
                outbox, changed = self._confirmed()
        self._state = msgspec.structs.replace(state, stage=after, **changed)
        return outbox

    def receive(self, client: int, data: bytes) -> Mapping[int, bytes]:
        """Takes a client's message. Gives what to send on at once: nothing before the epoch runs, then the next step of a hand-over.

        Raises:
            RemoteError: the message was refused; nothing has changed.
        """
        message = messages.decode_member(data)
        state = self._state
        match message, self.stage:
            case Advert(), GroupServerStage.ADVERTISING if client in names(state.terms.members):
                self._own(client, message.client, message.context)
                check_advert(message, self._context, self._roster)
                adverts = _added(state.adverts, message)
                self._state = msgspec.structs.replace(state, adverts=adverts)
            case Offer(), GroupServerStage.OFFERING if state.offer is None and client == state.asked[-1]:
                self._own(client, message.header.leader, message.header.context)
                self._check_offer(message)
                self._state = msgspec.structs.replace(state, offer=message)
            case Confirm(), GroupServerStage.CONFIRMING if state.offer is not None and client in names(state.offer.header.members):
                self._own(client, message.client, message.context)
                verify(self._roster, client, message.signature, LABEL + "confirm", digest(state.offer.header))
                self._state = msgspec.structs.replace(state, confirms=_added(state.confirms, message))
            case Advert(), GroupServerStage.RUNNING if client in dict(state.newcomers):
                self._own(client, message.client, message.context)
                check_advert(message, self._context, self._roster)
                self._state = msgspec.structs.replace(state, arrivals=_added(state.arrivals, message))
                return {dict(state.newcomers)[client]: messages.encode(Admit(self._context, message))}
            case Grant(), GroupServerStage.RUNNING if (message.newcomer, client) in state.newcomers:
                self._own(client, message.client, message.context)
                assert state.offer is not None
                assert state.confirmed is not None
                waiting = tuple(pair for pair in state.newcomers if pair[0] != message.newcomer)
                arrivals = tuple(advert for advert in state.arrivals if advert.client != message.newcomer)
                self._state = msgspec.structs.replace(state, newcomers=waiting, arrivals=arrivals)
                return {message.newcomer: messages.encode(Handover(state.offer.header, state.confirmed, message))}
            case _:
                raise RemoteError("wrong-stage", client)
        return {}

    def admit(self, newcomer: int, sponsor: int) -> Mapping[int, bytes]:
        """Let a client into the running epoch, who gets the secret from the member `sponsor`. Again with another one if that is silent.

        Raises:
            LocalError: "wrong-stage" before the epoch runs; "bad-members" for a newcomer that is removed or not on the roster, or a
                newcomer that is its own sponsor.
        """
        state = self._state
        if self.stage is not GroupServerStage.RUNNING:
            raise LocalError("wrong-stage", "no epoch runs yet")
        if newcomer in names(state.terms.removed) or not 0 <= newcomer < len(self._roster.keys) or newcomer == sponsor:
            raise LocalError("bad-members", f"client {newcomer} cannot be let in")
        others = tuple(pair for pair in state.newcomers if pair[0] != newcomer)
        self._state = msgspec.structs.replace(state, newcomers=(*others, (newcomer, sponsor)))
        for advert in state.arrivals:
            if advert.client == newcomer:
                return {sponsor: messages.encode(Admit(self._context, advert))}
        return {newcomer: messages.encode(Invite(state.terms))}

    def to_bytes(self) -> bytes:
        """The whole state; it holds no secret."""
        return codec.encode(self._state)

    @staticmethod
    def from_bytes(data: bytes, roster: Roster) -> "GroupServer":
        """The machine that `to_bytes` stored.

        Raises:
            MalformedMessage: if `data` is none.
            ValueError: if the roster does not belong to it.
        """
        state = codec.decode(data, _State, _STATE_LIMIT_BYTES)
        server = GroupServer(state.terms, roster)
        server._state = state
        return server

    def _own(self, client: int, claimed: int, claimed_context: bytes) -> None:
        if client != claimed:
            raise RemoteError("wrong-client", client)
        if claimed_context != self._context:
            raise RemoteError("wrong-context", client)

    def _enough(self, count: int) -> None:
        if count < needed(self._state.terms):
            raise TooFewClients((count,), needed(self._state.terms))

    def _ask(self) -> tuple[dict[int, bytes], dict[str, Any]]:
        """Ask the first client that has not been asked yet to lead."""
        state = self._state
        left = [advert.client for advert in state.adverts if advert.client not in state.asked]
        if not left:
            raise TooFewClients((0,), 1)
        return {left[0]: messages.encode(Adverts(self._context, state.adverts))}, {"asked": (*state.asked, left[0])}

    def _check_offer(self, offer: Offer) -> None:
        header = offer.header
        members = {advert.client for advert in self._state.adverts}
        if set(names(header.members)) != members or {box.client for box in offer.boxes} != members - {header.leader}:
            raise RemoteError("bad-members", header.leader)
        verify(self._roster, header.leader, header.signature, LABEL + "header", digest(header))

    def _confirmed(self) -> tuple[dict[int, bytes], dict[str, Any]]:
        state, header = self._state, self.header
        assert header is not None
        signers = [confirm.client for confirm in state.confirms]
        self._enough(len({header.leader, *signers}))
        confirmed = Confirmed(self._context, messages.ids(signers), b"".join(confirm.signature for confirm in state.confirms))
        data = messages.encode(confirmed)
        inside = {header.leader, *signers}
        late = tuple(advert for advert in state.adverts if advert.client not in inside)
        changed = {"confirmed": confirmed, "adverts": (), "confirms": (), "arrivals": late}
        return dict.fromkeys(sorted(inside), data), changed


def _added(kept: tuple[Any, ...], message: Any) -> tuple[Any, ...]:
    """Messages in the order of their clients, one of each.

    Raises:
        RemoteError: "repeated" for a second one.
    """
    if any(earlier.client == message.client for earlier in kept):
        raise RemoteError("repeated", message.client)
    return tuple(sorted((*kept, message), key=lambda entry: entry.client))
