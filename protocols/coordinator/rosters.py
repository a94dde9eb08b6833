"""Rosters with versions: who may take part, signed by an authority, and how parties join and renew their keys.

The authority is a signing key of whoever decides who takes part; it signs each version, offline if it likes, and all parties know its
public key. The coordinator hands versions on and cannot make one.

Guarantee: a party takes a version only with the authority's signature, and none that is older than its own, nor another of the same number.
A request to join proves that the sender has the secret of its key; a request to renew a key is signed with the old and the new one. A
client keeps its number for good, so that records of earlier sums stay about the same client.
Reveals: public keys, and the names that parties give themselves. Source: ours.
"""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Annotated

import msgspec
from msgspec import Meta

from .. import codec
from ..copies import check_own
from ..errors import RemoteError
from ..keys import Identity, Roster, frame, sign, verify_key
from ..secagg.terms import Bytes32, Count

__all__ = [
    "JoinRequest",
    "RenewRequest",
    "RosterVersion",
    "applied",
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


class JoinRequest(msgspec.Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """A new client: a name for people, its public key, and a signature with this key."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    key: Bytes32
    signature: Signature


class RenewRequest(msgspec.Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """A party on the roster: its old and its new key, and signatures with both."""

    old: Bytes32
    new: Bytes32
    by_old: Signature
    by_new: Signature


def sign_roster(authority: Identity, version: int, roster: Roster) -> bytes:
    """A version of the roster, as bytes."""
    check_own("roster", roster, Roster)
    signature = sign(authority, LABEL + "version", version.to_bytes(8, "big"), roster.digest)
    return codec.encode(RosterVersion(version, roster.keys, roster.holders, signature))


def read_roster_version(data: bytes, authority: bytes) -> RosterVersion:
    """A version that has the signature of the authority with this public key.

    Raises:
        RemoteError: "malformed" or "bad-signature".
    """
    message = codec.decode(data, RosterVersion, LIMIT_BYTES)
    try:
        roster = message.roster
    except ValueError:
        raise RemoteError("malformed") from None
    verify_key(authority, 0, message.signature, LABEL + "version", message.version.to_bytes(8, "big"), roster.digest)
    return message


def taken(own: bytes, offered: bytes, authority: bytes) -> bytes:
    """The version that a party goes on with: the offered one if it is later than its `own` (empty: none yet).

    Raises:
        RemoteError: "old-roster" for an earlier one or another one of the same number; "malformed", "bad-signature".
    """
    if offered == own:
        return own
    new = read_roster_version(offered, authority)
    if own and new.version <= read_roster_version(own, authority).version:
        raise RemoteError("old-roster")
    return offered


def join(identity: Identity, name: str) -> JoinRequest:
    """A request to join."""
    return JoinRequest(name, identity.public(), sign(identity, LABEL + "join", name.encode(), identity.public()))


def renew(old: Identity, new: Identity) -> RenewRequest:
    """A request to put a party's new key in the place of its old one."""
    parts = old.public(), new.public()
    return RenewRequest(*parts, sign(old, LABEL + "renew", *parts), sign(new, LABEL + "renew", *parts))


def check_request(request: JoinRequest | RenewRequest) -> None:
    """Raises `RemoteError` "bad-signature" for a request that is not by the owners of its keys."""
    match request:
        case JoinRequest():
            verify_key(request.key, 0, request.signature, LABEL + "join", request.name.encode(), request.key)
        case RenewRequest():
            verify_key(request.old, 0, request.by_old, LABEL + "renew", request.old, request.new)
            verify_key(request.new, 0, request.by_new, LABEL + "renew", request.old, request.new)


def applied(roster: Roster, requests: Iterable[JoinRequest | RenewRequest]) -> Roster:
    """The roster after these requests, which the authority has approved. New clients get the next numbers.

    Raises:
        RemoteError: "bad-signature". ValueError: an old key that is not there, or a new one that is.
    """
    check_own("roster", roster, Roster)
    keys, holders = list(roster.keys), list(roster.holders)
    for request in requests:
        check_request(request)
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
