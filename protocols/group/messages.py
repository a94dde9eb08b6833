"""Messages of the group key agreement: the public terms of an epoch and ten messages, as typed, bounded, canonical bytes.

Guarantee: `decode_member` and `decode_server` return a well-formed message or raise `MalformedMessage`; lists of clients are strictly
increasing. `context(terms)` is a hash of everything public about the epoch; all keys, boxes and signatures are bound to it, so a message of
another session, epoch or list of members does not fit. Reveals: all fields except the boxes are readable by the server.
"""

from collections.abc import Iterable
from hashlib import sha256
from typing import Annotated

import msgspec
from msgspec import Meta

from .. import codec
from ..errors import MalformedMessage
from ..keys import SEAL_OVERHEAD_BYTES, Roster, frame

__all__ = [
    "LABEL",
    "Admit",
    "Advert",
    "Adverts",
    "Box",
    "Confirm",
    "Confirmed",
    "Deliver",
    "Grant",
    "GroupTerms",
    "Handover",
    "Header",
    "Invite",
    "Offer",
    "check_terms",
    "context",
    "decode_member",
    "decode_server",
    "digest",
    "encode",
    "ids",
    "make_terms",
    "names",
    "needed",
]

LABEL = "cflpriv group v2 "
"""Starts every key derivation, associated datum and signature of this protocol version."""

SECRET_BYTES = 32
SIGNATURE_BYTES = 64
_MOST_CLIENTS = 1 << 14
_LIMIT_BYTES = 1 << 22

Id = Annotated[int, Meta(ge=0, lt=1 << 32)]
Count = Annotated[int, Meta(ge=0, lt=1 << 48)]
Ids = Annotated[bytes, Meta(max_length=4 * _MOST_CLIENTS)]
Bytes16 = Annotated[bytes, Meta(min_length=16, max_length=16)]
Bytes32 = Annotated[bytes, Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
Signatures = Annotated[bytes, Meta(max_length=SIGNATURE_BYTES * _MOST_CLIENTS)]
_LARGEST_BOX_BYTES = 1 << 12
Sealed = Annotated[bytes, Meta(min_length=2 * SECRET_BYTES + SEAL_OVERHEAD_BYTES, max_length=_LARGEST_BOX_BYTES)]


class GroupTerms(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything public about one epoch.

    session: 16 bytes naming the training run; epoch: goes up.
    roster: digest of the pinned roster.
    members: who is invited, as `ids`. removed: who must not get this epoch's secret, as `ids`.
    smallest: the fewest members a group may have.
    """

    session: Bytes16
    epoch: Count
    roster: Bytes32
    members: Ids
    removed: Ids
    smallest: Count


class Invite(msgspec.Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """Server: the terms of the epoch, to its members and to newcomers."""

    terms: GroupTerms


class Advert(msgspec.Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """Client: a fresh X25519 key for this epoch, signed with the key on the roster."""

    client: Id
    context: Bytes32
    key: Bytes32
    signature: Signature


class Adverts(msgspec.Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """Server: everybody's adverts, to the one that leads."""

    context: Bytes32
    adverts: tuple[Advert, ...]


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The leader's signed statement on the epoch: who gets the secret, and a commitment to it."""

    context: Bytes32
    leader: Id
    key: Bytes32
    members: Ids
    commitment: Bytes32
    signature: Signature


class Box(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The secret, sealed for `client`."""

    client: Id
    box: Sealed


class Offer(msgspec.Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """Leader: the header, and a box for every other member."""

    header: Header
    boxes: tuple[Box, ...]


class Deliver(msgspec.Struct, frozen=True, array_like=True, tag=5, forbid_unknown_fields=True):
    """Server: the header and the recipient's box."""

    header: Header
    box: Sealed


class Confirm(msgspec.Struct, frozen=True, array_like=True, tag=6, forbid_unknown_fields=True):
    """Client: it has the secret of this header, signed."""

    client: Id
    context: Bytes32
    signature: Signature


class Confirmed(msgspec.Struct, frozen=True, array_like=True, tag=7, forbid_unknown_fields=True):
    """Server: who confirmed, and their signatures one after the other."""

    context: Bytes32
    clients: Ids
    signatures: Signatures


class Admit(msgspec.Struct, frozen=True, array_like=True, tag=8, forbid_unknown_fields=True):
    """Server, to a member: a newcomer's advert."""

    context: Bytes32
    advert: Advert


class Grant(msgspec.Struct, frozen=True, array_like=True, tag=9, forbid_unknown_fields=True):
    """Member: the secret sealed for the newcomer, under a fresh key of the sponsor."""

    client: Id
    context: Bytes32
    newcomer: Id
    key: Bytes32
    box: Sealed


class Handover(msgspec.Struct, frozen=True, array_like=True, tag=10, forbid_unknown_fields=True):
    """Server, to a newcomer: the epoch's header with its confirmations, and a member's grant."""

    header: Header
    confirmed: Confirmed
    grant: Grant


MemberMessage = Advert | Offer | Confirm | Grant
ServerMessage = Invite | Adverts | Deliver | Confirmed | Admit | Handover


def encode(message: msgspec.Struct) -> bytes:
    """The bytes of a message."""
    return codec.encode(message)


ids = codec.pack


def names(packed: bytes) -> tuple[int, ...]:
    """The clients that `ids` packed.

    Raises:
        MalformedMessage: unless they are strictly increasing, and no more than a session may have.
    """
    return codec.unpack(packed, _MOST_CLIENTS)


def _well_formed(header: Header | None, confirmed: Confirmed | None) -> None:
    if header is not None:
        names(header.members)
    if confirmed is not None and len(names(confirmed.clients)) * SIGNATURE_BYTES != len(confirmed.signatures):
        raise MalformedMessage


def decode_member(data: bytes) -> MemberMessage:
    """The client's message in `data`.

    Raises:
        MalformedMessage: for anything else.
    """
    message: MemberMessage = codec.decode(data, MemberMessage, _LIMIT_BYTES)  # type: ignore[arg-type]
    if isinstance(message, Offer):
        _well_formed(message.header, None)
        codec.increasing([box.client for box in message.boxes], _MOST_CLIENTS)
    return message


def decode_server(data: bytes) -> ServerMessage:
    """The server's message in `data`.

    Raises:
        MalformedMessage: for anything else.
    """
    message: ServerMessage = codec.decode(data, ServerMessage, _LIMIT_BYTES)  # type: ignore[arg-type]
    match message:
        case Invite():
            names(message.terms.members)
            names(message.terms.removed)
        case Adverts():
            codec.increasing([advert.client for advert in message.adverts], _MOST_CLIENTS)
        case Deliver():
            _well_formed(message.header, None)
        case Confirmed():
            _well_formed(None, message)
        case Handover():
            _well_formed(message.header, message.confirmed)
    return message


def context(terms: GroupTerms) -> bytes:
    """32 bytes that name these terms and no others."""
    return sha256(frame(LABEL + "context", codec.encode(terms))).digest()


def digest(header: Header) -> bytes:
    """32 bytes that name the header, its signature apart. This is what leader and members sign."""
    parts = header.context, header.leader.to_bytes(4, "little"), header.key, header.members, header.commitment
    return sha256(frame(LABEL + "header", *parts)).digest()


def needed(terms: GroupTerms) -> int:
    """How many members must have the secret for the group to stand: a majority of the invited, and at least `smallest`.

    Two groups of one epoch would share a member, who confirms only one.
    """
    invited = len(terms.members) // 4
    return max(terms.smallest, invited // 2 + 1)


def check_terms(terms: GroupTerms) -> None:
    """Checks what honest terms must satisfy.

    Raises:
        ValueError: naming the field.
    """
    members, removed = names(terms.members), names(terms.removed)
    if not members or set(members) & set(removed):
        raise ValueError("members: expected clients, none of them removed")
    if not 1 <= terms.smallest <= len(members):
        raise ValueError("smallest: expected 1 to the number of members")


def make_terms(
    *, session: bytes, epoch: int, roster: Roster, members: Iterable[int], removed: Iterable[int] = (), smallest: int = 1
) -> GroupTerms:
    """Valid terms.

    Raises:
        ValueError: naming the field that is wrong.
    """
    unchecked = GroupTerms(session, epoch, roster.digest, ids(members), ids(removed), smallest)
    try:
        terms = codec.decode(codec.encode(unchecked), GroupTerms, _LIMIT_BYTES)
    except MalformedMessage:
        raise ValueError("terms: a field has the wrong type, length or range") from None
    check_terms(terms)
    return terms
