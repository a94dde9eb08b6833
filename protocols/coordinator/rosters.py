"""Rosters with versions: who may take part, signed by an authority, and how parties join and renew their keys.

The authority is a signing key of whoever decides who takes part; it signs each version, offline if it likes, and all parties know its
public key. The coordinator hands versions on and cannot make one.

Guarantee: a party takes a version only with the authority's signature for its own federation, and none that is older than its own, nor
another of the same number. An authority with several federations gives each a name, which all parties know; rosters, invitations and
requests of one are none of another. A request to join needs an invitation of the authority, a secret that serves one request: who hands
the request on cannot put another key into it, and strangers take no place. A request to renew a key is signed with the old and the new one.
A client keeps its number for good, so that records of earlier sums stay about the same client.
Reveals: public keys, and the names that the authority gives clients. Source: ours.
"""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Annotated

import msgspec
from msgspec import Meta

from .. import codec
from ..copies import check_own
from ..entropy import Entropy, system_entropy
from ..errors import RemoteError
from ..keys import Identity, Roster, frame, sign, verify_key
from ..secagg.terms import Bytes32, Count

__all__ = [
    "JoinRequest",
    "RenewRequest",
    "RosterVersion",
    "applied",
    "invite",
    "join",
    "read_roster_version",
    "removed",
    "renew",
    "sign_roster",
    "taken",
]

LABEL = "cflpriv roster v1 "
LIMIT_BYTES = 1 << 22
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]


class RosterVersion(msgspec.Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """Authority: the keys of clients and holders, and the number of this version; later ones are larger."""

    version: Count
    keys: tuple[Bytes32, ...]
    holders: tuple[Bytes32, ...]
    signature: Signature

    @property
    def roster(self) -> Roster:
        """As other parts of this package take it. Raises `ValueError` if a key appears twice."""
        first, *others = self.holders or (b"",)
        return Roster(self.keys, first, tuple(others))


class _Invitation(codec.Redacted, msgspec.Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """Authority, to a new client in secret: its name for people, the seed of a key that signs one request, the authority's signature."""

    _shown = ("name",)

    name: Name
    federation: str
    seed: Bytes32
    signature: Signature


class JoinRequest(msgspec.Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """A new client: its name and its public key, with a signature by this key; the public key of its invitation, with a signature by this
    key, and with the authority's."""

    name: Name
    key: Bytes32
    invited: Bytes32
    by_key: Signature
    by_invited: Signature
    by_authority: Signature


class RenewRequest(msgspec.Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """A party on the roster: its old and its new key, and signatures with both."""

    old: Bytes32
    new: Bytes32
    by_old: Signature
    by_new: Signature


def sign_roster(authority: Identity, version: int, roster: Roster, federation: str = "") -> bytes:
    """A version of the roster of a federation, as bytes."""
    check_own("roster", roster, Roster)
    signature = sign(authority, LABEL + "version", federation.encode(), version.to_bytes(8, "big"), roster.digest)
    return codec.encode(RosterVersion(version, roster.keys, roster.holders, signature))


def read_roster_version(data: bytes, authority: bytes, federation: str = "") -> RosterVersion:
    """A version that has the signature of the authority with this public key, for this federation.

    Raises:
        RemoteError: "malformed" or "bad-signature".
    """
    message = codec.decode(data, RosterVersion, LIMIT_BYTES)
    try:
        roster = message.roster
    except ValueError:
        raise RemoteError("malformed") from None
    verify_key(authority, 0, message.signature, LABEL + "version", federation.encode(), message.version.to_bytes(8, "big"), roster.digest)
    return message


def taken(own: bytes, offered: bytes, authority: bytes, federation: str = "") -> bytes:
    """The version that a party goes on with: the offered one if it is later than its `own` (empty: none yet).

    Raises:
        RemoteError: "old-roster" for an earlier one or another one of the same number; "malformed", "bad-signature".
    """
    if offered == own:
        return own
    new = read_roster_version(offered, authority, federation)
    if own and new.version <= read_roster_version(own, authority, federation).version:
        raise RemoteError("old-roster")
    return offered


def invite(authority: Identity, name: str, entropy: Entropy = system_entropy, federation: str = "") -> bytes:
    """An invitation for one new client, as bytes, to be given to this client in secret. Raises `ValueError` for a name that is too long."""
    if not 1 <= len(name) <= 64:
        raise ValueError("name: expected 1 to 64 characters")
    seed = entropy(32)
    parts = federation.encode(), name.encode(), _invited(seed).public()
    return codec.encode(_Invitation(name, federation, seed, sign(authority, LABEL + "invitation", *parts)))


def _invited(seed: bytes) -> Identity:
    return Identity(0, seed, seed)  # it signs only


def join(identity: Identity, invitation: bytes) -> JoinRequest:
    """A request to join. Raises `RemoteError` "malformed" for bytes that are no invitation."""
    invited = codec.decode(invitation, _Invitation, 1 << 10)
    key = _invited(invited.seed)
    parts = invited.federation.encode(), invited.name.encode(), identity.public(), key.public()
    by_key, by_invited = sign(identity, LABEL + "join", *parts), sign(key, LABEL + "join", *parts)
    return JoinRequest(invited.name, identity.public(), key.public(), by_key, by_invited, invited.signature)


def renew(old: Identity, new: Identity, federation: str = "") -> RenewRequest:
    """A request to put a party's new key in the place of its old one."""
    keys = old.public(), new.public()
    parts = federation.encode(), *keys
    return RenewRequest(*keys, sign(old, LABEL + "renew", *parts), sign(new, LABEL + "renew", *parts))


def check_request(request: JoinRequest | RenewRequest, authority: bytes, federation: str = "") -> None:
    """Raises `RemoteError` "bad-signature" for a request that is not by the owners of its keys, or without an invitation, or for another
    federation."""
    of = federation.encode()
    match request:
        case JoinRequest():
            parts = of, request.name.encode(), request.key, request.invited
            verify_key(request.key, 0, request.by_key, LABEL + "join", *parts)
            verify_key(request.invited, 0, request.by_invited, LABEL + "join", *parts)
            verify_key(authority, 0, request.by_authority, LABEL + "invitation", of, request.name.encode(), request.invited)
        case RenewRequest():
            verify_key(request.old, 0, request.by_old, LABEL + "renew", of, request.old, request.new)
            verify_key(request.new, 0, request.by_new, LABEL + "renew", of, request.old, request.new)


def applied(roster: Roster, requests: Iterable[JoinRequest | RenewRequest], authority: bytes, federation: str = "") -> Roster:
    """The roster after these requests, which the authority (by its public key) has approved. New clients get the next numbers.

    Raises:
        RemoteError: "bad-signature". ValueError: an old key that is not there, or a new one that is.
    """
    check_own("roster", roster, Roster)
    keys, holders = list(roster.keys), list(roster.holders)
    for request in requests:
        check_request(request, authority, federation)
        new = request.key if isinstance(request, JoinRequest) else request.new
        if new in (*keys, *holders):
            raise ValueError("roster: the new key is on it already")
        if isinstance(request, JoinRequest):
            keys.append(new)
        elif request.old in keys:
            keys[keys.index(request.old)] = new
        elif request.old in holders:
            holders[holders.index(request.old)] = new
        else:
            raise ValueError("roster: the old key is not on it")
    return _roster(keys, holders)


def removed(roster: Roster, client: int) -> Roster:
    """The roster with a client's key replaced by bytes that nobody has a secret for. Other clients keep their numbers."""
    check_own("roster", roster, Roster)
    keys = list(roster.keys)
    keys[client] = sha256(frame(LABEL + "removed", keys[client])).digest()
    return _roster(keys, roster.holders)


def _roster(keys: Sequence[bytes], holders: Sequence[bytes]) -> Roster:
    first, *others = holders or (b"",)
    return Roster(tuple(keys), first, tuple(others))
