"""Messages of a secure sum: the public terms and the fourteen messages, as typed, bounded, canonical bytes.

Guarantee: `decode_client` and `decode_server` return a well-formed message or raise `MalformedMessage`; lists
of clients are strictly increasing, so nobody is named twice. `context(terms)` is a hash of everything that
was agreed in public; every later message carries it and every key, box and signature is bound to it, so a
message of another session, round, sum, cohort or model list does not fit. Reveals: all fields except the
boxes and the masked vector are readable by the server; the transport hides them from outsiders.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from .. import codec
from ..keys import SEAL_OVERHEAD_BYTES
from .shamir import SHARE_BYTES
from .terms import (
    LABEL,
    MOST_CLIENTS,
    SMALL_LIMIT_BYTES,
    Bytes16,
    Bytes32,
    Id,
    Slot,
    Terms,
    check_terms,
    context,
    fewest_survivors,
    make_terms,
    model_list,
    vector_length,
)

__all__ = [
    "LABEL",
    "Advert",
    "Adverts",
    "Challenge",
    "Complaint",
    "Consistent",
    "Deliver",
    "Invite",
    "Masked",
    "Opened",
    "Opening",
    "Reveal",
    "Sealed",
    "Settle",
    "Share",
    "Shares",
    "Signed",
    "Slot",
    "Survivors",
    "Terms",
    "Unmask",
    "check_terms",
    "context",
    "decode_client",
    "decode_server",
    "encode",
    "ids",
    "make_terms",
    "model_list",
    "names",
    "fewest_survivors",
    "vector_length",
]

Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
ShareBytes = Annotated[bytes, Meta(min_length=SHARE_BYTES, max_length=SHARE_BYTES)]
_BOX = 2 * SHARE_BYTES + SEAL_OVERHEAD_BYTES
Box = Annotated[bytes, Meta(min_length=_BOX, max_length=_BOX)]


class Invite(msgspec.Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """Server: who is invited to which sum."""

    terms: Terms


class Advert(msgspec.Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """Client: its two X25519 keys for one slot, signed in active mode (else the signature is empty)."""

    client: Id
    session: Bytes16
    slot: Slot
    encryption_key: Bytes32
    mask_key: Bytes32
    signature: Annotated[bytes, Meta(max_length=64)]


class Adverts(msgspec.Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """Server: the terms (again, for those invited by an earlier upload) and the adverts of the recipient's neighbours."""

    terms: Terms
    adverts: tuple[Advert, ...]


class Sealed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A box to (in Shares) or from (in Deliver) `peer`, and the digests of the two shares in it (`bindings.share_digest`)."""

    peer: Id
    box: Box
    self_digest: Bytes32
    key_digest: Bytes32


class Shares(msgspec.Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """Client: one box per neighbour; the commitment to its self-mask seed; the digests of the shares that it keeps itself."""

    client: Id
    context: Bytes32
    commitment: Bytes32
    self_digest: Bytes32
    key_digest: Bytes32
    boxes: tuple[Sealed, ...]


class Deliver(msgspec.Struct, frozen=True, array_like=True, tag=5, forbid_unknown_fields=True):
    """Server: U2, those who shared, and the boxes they made for the recipient."""

    context: Bytes32
    members: bytes
    boxes: tuple[Sealed, ...]


class Masked(msgspec.Struct, frozen=True, array_like=True, tag=6, forbid_unknown_fields=True):
    """Client: the masked vector (little-endian residues) and, where the terms name a following slot, the advert for it."""

    client: Id
    context: Bytes32
    vector: bytes
    following: Advert | None


class Complaint(msgspec.Struct, frozen=True, array_like=True, tag=11, forbid_unknown_fields=True):
    """Client: in place of Masked, whose boxes hold no shares that fit their digests."""

    client: Id
    context: Bytes32
    accused: bytes


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag=12, forbid_unknown_fields=True):
    """Server: who complained about the recipient."""

    context: Bytes32
    accusers: bytes


class Opened(codec.Redacted, msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The two shares dealt to (in Opening) or by (in Settle) `peer`; in active mode with the dealer's signature (else empty)."""

    _shown = ("peer",)

    peer: Id
    self_share: ShareBytes
    key_share: ShareBytes
    signature: Annotated[bytes, Meta(max_length=64)]


class Opening(msgspec.Struct, frozen=True, array_like=True, tag=13, forbid_unknown_fields=True):
    """Client: the shares that it dealt to those who complained, in the open."""

    client: Id
    context: Bytes32
    shares: tuple[Opened, ...]


class Settle(msgspec.Struct, frozen=True, array_like=True, tag=14, forbid_unknown_fields=True):
    """Server: the shares that the recipient complained about, as their dealers opened them."""

    context: Bytes32
    shares: tuple[Opened, ...]


class Survivors(msgspec.Struct, frozen=True, array_like=True, tag=7, forbid_unknown_fields=True):
    """Server: U3, those whose masked vectors arrived."""

    context: Bytes32
    survivors: bytes


class Consistent(msgspec.Struct, frozen=True, array_like=True, tag=8, forbid_unknown_fields=True):
    """Client: its signature over (context, U2, U3)."""

    client: Id
    context: Bytes32
    signature: Signature


class Signed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Somebody's signature, passed on."""

    client: Id
    signature: Signature


class Unmask(msgspec.Struct, frozen=True, array_like=True, tag=9, forbid_unknown_fields=True):
    """Server: U3 and the signatures of at least t of them (none in passive mode)."""

    context: Bytes32
    survivors: bytes
    signatures: tuple[Signed, ...]


class Share(codec.Redacted, msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A share of one of `peer`'s two secrets."""

    _shown = ("peer",)

    peer: Id
    share: ShareBytes


class Reveal(msgspec.Struct, frozen=True, array_like=True, tag=10, forbid_unknown_fields=True):
    """Client: self-mask shares of survivors, mask-key shares of those lost between U2 and U3."""

    client: Id
    context: Bytes32
    self_shares: tuple[Share, ...]
    key_shares: tuple[Share, ...]


ClientMessage = Advert | Shares | Masked | Complaint | Opening | Consistent | Reveal
ServerMessage = Invite | Adverts | Deliver | Challenge | Settle | Survivors | Unmask


def encode(message: msgspec.Struct) -> bytes:
    """The bytes of a message."""
    return codec.encode(message)


ids = codec.pack


def names(packed: bytes) -> tuple[int, ...]:
    """The clients that `ids` packed.

    Raises:
        MalformedMessage: unless they are strictly increasing, and no more than a session may have.
    """
    return codec.unpack(packed, MOST_CLIENTS)


def decode_client(data: bytes, vector_bytes: int = 0) -> ClientMessage:
    """The client's message in `data`, whose masked vector may have `vector_bytes` bytes.

    Raises:
        MalformedMessage: for anything else.
    """
    message: ClientMessage = codec.decode(data, ClientMessage, SMALL_LIMIT_BYTES + vector_bytes)  # type: ignore[arg-type]
    match message:
        case Shares():
            codec.increasing([sealed.peer for sealed in message.boxes], MOST_CLIENTS)
        case Complaint():
            names(message.accused)
        case Opening():
            codec.increasing([opened.peer for opened in message.shares], MOST_CLIENTS)
        case Reveal():
            codec.increasing([share.peer for share in message.self_shares], MOST_CLIENTS)
            codec.increasing([share.peer for share in message.key_shares], MOST_CLIENTS)
    return message


def decode_server(data: bytes) -> ServerMessage:
    """The server's message in `data`.

    Raises:
        MalformedMessage: for anything else.
    """
    message: ServerMessage = codec.decode(data, ServerMessage, SMALL_LIMIT_BYTES)  # type: ignore[arg-type]
    match message:
        case Adverts():
            codec.increasing([advert.client for advert in message.adverts], MOST_CLIENTS)
        case Deliver():
            names(message.members)
            codec.increasing([sealed.peer for sealed in message.boxes], MOST_CLIENTS)
        case Challenge():
            names(message.accusers)
        case Settle():
            codec.increasing([opened.peer for opened in message.shares], MOST_CLIENTS)
        case Survivors():
            names(message.survivors)
        case Unmask():
            names(message.survivors)
            codec.increasing([signed.client for signed in message.signatures], MOST_CLIENTS)
    return message
