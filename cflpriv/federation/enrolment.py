"""Who a client or the key holder is: identities, their proofs, and the sessions that a store knows."""

from typing import Literal

from ..protocols.errors import RemoteError
from ..protocols.keys import Identity, Roster, public_key, sign, verify, verify_key
from . import messages as m
from .client_ledger import SPENT
from .epoch_limit import ENTERED
from .store import Store

__all__ = ["LABEL", "check_enrolled", "check_peer", "enrolled", "new_session"]

LABEL = "cflpriv remote v1 "
ENROL = LABEL + "enrol"
ENROL_HOLDER = LABEL + "enrol key holder"
PROOF = ", to the server now"
LEFT = "left"
"""The store's name for the sessions that this client has left, 16 bytes each."""


def new_session(store: Store, session: bytes) -> None:
    """Begin a session: drop everything of an earlier one, except the ledger and the count of epochs.

    Raises `RemoteError` "wrong-session" for a session that the client has left, because it no longer knows which transforms it used there.
    """
    current, left = store.get("session"), store.get(LEFT) or b""
    if current == session:
        return
    if session in (left[at : at + len(session)] for at in range(0, len(left), len(session))):
        raise RemoteError("wrong-session")
    if current is not None:
        store.put(LEFT, left + current)
        store.drop("session")  # first, so that a client interrupted here has left the session, too
    for name in store.names():
        if name not in (SPENT, LEFT, ENTERED):
            store.drop(name)
    store.put("session", session)


def enrolled(identity: Identity, ask: m.Enrol, role: Literal["client", "key-holder"]) -> m.Enrolled:
    """The answer of a client or the key holder to `Enrol`, with both signatures."""
    number, label = (identity.client, ENROL) if role == "client" else (0, ENROL_HOLDER)
    key = public_key(identity.encryption_seed)
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
