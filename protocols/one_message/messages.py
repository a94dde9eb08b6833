"""Messages of a sum in one message, as typed, bounded, canonical bytes.

    helper → server → clients    KeyAnnouncement  a helper's key of one round, signed
    server → client              HelpedInvite     terms and announcements
    client → server              MaskedUpload     the masked vector, a box for each helper, a hash of each seed, a signature
    server → helper              UploadDelivery   all that a helper needs of some uploads
    helper → server              UploadsRead      which of them it cannot use
    server → helper              CloseSet         the set of clients
    helper → server              SignedSet        its signature of this set
    server → helper              OpenSet          signatures of a quorum, and which masks to send or to hash
    helper → server              OpenedMasks      the masks and the hashes, signed

Where clients choose their blocks, `OpenSet` comes twice: for the counts of blocks, then, with the helpers' masks of these (`CountMasks`),
for the blocks that are large enough.

Guarantee: each decoder returns a well-formed message or raises `MalformedMessage`, and reads no more than a stated number of bytes. Lists
of clients and helpers are strictly increasing. Every message after the terms carries their `context`; boxes, seeds and signatures
are bound to it and to their sender, under labels of their own. Reveals: the server reads all fields, except what is in boxes and masked.
"""

from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise
from math import comb
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from .. import codec, hpke
from ..errors import MalformedMessage
from ..keys import Roster, frame, verify_key
from ..secagg.messages import ids, names
from ..secagg.terms import MOST_CLIENTS, SMALL_LIMIT_BYTES, Bytes16, Bytes32, Count, Id
from ..secagg.vectors import vector_length
from .terms import LABEL, MOST_CLUSTERS, MOST_SETS, HelpedTerms, HelperNumber, context, held

__all__ = [
    "CLOSE", "COUNT", "KEY", "MOST_NAMES", "OPEN", "UPLOAD", "CloseSet", "CountMasks", "DeliveredItem", "HelpedInvite",
    "KeyAnnouncement", "MaskedUpload", "OpenSet", "OpenedMasks", "RefusedUpload", "SeedBox", "SetSignature", "SignedSet",
    "UploadDelivery", "UploadsRead",
    "announcement_of", "box_bytes", "box_info", "closing", "commitment", "context", "decode_announcement", "decode_from_helper",
    "decode_invite", "decode_to_helper", "decode_upload", "digest_of", "encode", "ids", "key_parts", "mask_key", "mask_parts", "names",
    "noise_key", "set_name", "signed_digest", "split_digests", "upload_digest", "upload_limit",
    "vector_digest",
]  # fmt: skip

MOST_NAMES = 1 << 10
"""What a client's value goes by has so many names at most."""
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
Group = tuple[Annotated[int, Meta(ge=0, lt=MOST_SETS)], ...]
Message = TypeVar("Message")
KEY, UPLOAD, CLOSE, COUNT, OPEN = (LABEL + name for name in ("key", "upload", "close", "count", "open"))


class KeyAnnouncement(msgspec.Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """Helper: its key of one round, under the signature of its identity on the roster."""

    helper: HelperNumber
    session: Bytes16
    round: Count
    key: Annotated[bytes, Meta(min_length=hpke.KEY_BYTES, max_length=hpke.KEY_BYTES)]
    signature: Signature


class HelpedInvite(msgspec.Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """Server: the terms, and the encoded announcements that they name."""

    terms: HelpedTerms
    announcements: tuple[bytes, ...]


class SeedBox(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The seeds of one helper, sealed."""

    helper: HelperNumber
    box: bytes


class MaskedUpload(msgspec.Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """Client: its one message. `names`: digests of what its value goes by, 32 bytes each, increasing. `vector`: the masked residues."""

    client: Id
    context: Bytes32
    names: Annotated[bytes, Meta(max_length=32 * MOST_NAMES)]
    vector: bytes
    boxes: tuple[SeedBox, ...]
    commitments: Annotated[bytes, Meta(max_length=32 * MOST_SETS)]
    signature: Signature


class DeliveredItem(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a helper gets of an upload: all that is signed, as digests where it is long, and its own box. `vector_digest`: see there."""

    client: Id
    names: Annotated[bytes, Meta(max_length=32 * MOST_NAMES)]
    vector_digest: Annotated[bytes, Meta(min_length=32, max_length=32 + 4 * MOST_CLUSTERS)]
    box_digests: Annotated[bytes, Meta(max_length=32 * 16)]
    commitments: Annotated[bytes, Meta(max_length=32 * MOST_SETS)]
    signature: Signature
    box: bytes


class UploadDelivery(msgspec.Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """Server: the terms again, and some uploads. Any number of these may come before `CloseSet`."""

    terms: HelpedTerms
    items: tuple[DeliveredItem, ...]


class RefusedUpload(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A client whose upload a helper cannot use, and why."""

    client: Id
    code: Annotated[str, Meta(max_length=32)]


class UploadsRead(msgspec.Struct, frozen=True, array_like=True, tag=5, forbid_unknown_fields=True):
    """Helper: the uploads of the last delivery that it cannot use."""

    helper: HelperNumber
    context: Bytes32
    refused: tuple[RefusedUpload, ...]


class CloseSet(msgspec.Struct, frozen=True, array_like=True, tag=6, forbid_unknown_fields=True):
    """Server: the set of clients."""

    terms: HelpedTerms
    members: bytes


class SignedSet(msgspec.Struct, frozen=True, array_like=True, tag=7, forbid_unknown_fields=True):
    """Helper: its signature of the set, which goes by its name (`set_name`)."""

    helper: HelperNumber
    context: Bytes32
    name: Bytes32
    signature: Signature


class SetSignature(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A helper's signature, passed on."""

    helper: HelperNumber
    signature: Signature


class CountMasks(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Of a helper's `OpenedMasks` of counts, passed on: the mask of each seed that it knows, in order, and its signature."""

    helper: HelperNumber
    masks: tuple[Annotated[bytes, Meta(max_length=4 * MOST_CLUSTERS)], ...]
    signature: Signature


class OpenSet(msgspec.Struct, frozen=True, array_like=True, tag=8, forbid_unknown_fields=True):
    """Server: signatures of a quorum, and groups of seeds: of each in `send` the helper sends the summed mask, of each in `check` its
    hash. `counted`: the helpers' masks of the counts, which decide the blocks to be opened."""

    terms: HelpedTerms
    members: bytes
    signatures: tuple[SetSignature, ...]
    send: tuple[Group, ...]
    check: tuple[Group, ...]
    counted: tuple[CountMasks, ...] = ()


class OpenedMasks(msgspec.Struct, frozen=True, array_like=True, tag=9, forbid_unknown_fields=True):
    """Helper: the masks, the hashes (of `send`, then of `check`), and its signature over set, groups and hashes."""

    helper: HelperNumber
    context: Bytes32
    masks: tuple[memoryview, ...]  # of the message that they came in
    hashes: tuple[Bytes32, ...]
    signature: Signature


ToHelper = UploadDelivery | CloseSet | OpenSet
FromHelper = UploadsRead | SignedSet | OpenedMasks


def encode(message: msgspec.Struct) -> bytes:
    """The bytes of a message."""
    return codec.encode(message)


def _increasing(numbers: Sequence[int] | Sequence[bytes], most: int = MOST_CLIENTS) -> None:
    if any(a >= b for a, b in pairwise(numbers)) or len(numbers) > most:  # type: ignore[operator]
        raise MalformedMessage


def split_digests(packed: bytes) -> tuple[bytes, ...]:
    """Digests of 32 bytes each. Raises `MalformedMessage` for other lengths."""
    if len(packed) % 32:
        raise MalformedMessage
    return tuple(packed[at : at + 32] for at in range(0, len(packed), 32))


def decode_announcement(data: bytes) -> KeyAnnouncement:
    """An announcement. Raises `MalformedMessage`."""
    return codec.decode(data, KeyAnnouncement, 1 << 12)


def decode_invite(data: bytes) -> HelpedInvite:
    """An invitation. Raises `MalformedMessage`."""
    return codec.decode(data, HelpedInvite, SMALL_LIMIT_BYTES)


def upload_limit(terms: HelpedTerms) -> int:
    """The most bytes of an upload."""
    return (1 << 18) + vector_length(terms) * terms.bits // 8


def box_bytes(terms: HelpedTerms, helper: int) -> int:
    """The length of a helper's box."""
    return 32 * len(held(terms, helper)) + hpke.OVERHEAD_BYTES


def decode_upload(data: bytes, terms: HelpedTerms) -> MaskedUpload:
    """An upload under these terms, with all lengths checked. Raises `MalformedMessage`."""
    message = codec.decode(data, MaskedUpload, upload_limit(terms))
    if message.context != context(terms) or len(message.vector) != vector_length(terms) * terms.bits // 8:
        raise MalformedMessage
    lengths = tuple((box.helper, len(box.box)) for box in message.boxes)
    if lengths != tuple((helper, box_bytes(terms, helper)) for helper in terms.present):
        raise MalformedMessage
    _check_names_and_seeds(message.names, message.commitments, terms)
    return message


def _check_names_and_seeds(packed: bytes, commitments: bytes, terms: HelpedTerms) -> None:
    _increasing(split_digests(packed), MOST_NAMES)
    if not packed or len(split_digests(commitments)) != comb(terms.helpers, terms.colluding):
        raise MalformedMessage


def decode_to_helper(data: bytes, terms: HelpedTerms | None = None) -> ToHelper:
    """A message to a helper. Raises `MalformedMessage`."""
    message: ToHelper = codec.decode(data, ToHelper, 4 * SMALL_LIMIT_BYTES)  # type: ignore[arg-type]
    match message:
        case UploadDelivery():
            _increasing([item.client for item in message.items])
            for item in message.items:
                _check_names_and_seeds(item.names, item.commitments, message.terms)
                if len(item.box_digests) != 32 * len(message.terms.keys):
                    raise MalformedMessage
                if len(item.vector_digest) != 32 + count_bytes(message.terms):
                    raise MalformedMessage
        case CloseSet():
            names(message.members)
        case OpenSet():
            names(message.members)
            _increasing([signed.helper for signed in message.signatures])
            numbers = [number for group in (*message.send, *message.check) for number in group]
            if len(set(numbers)) != len(numbers) or not all((*message.send, *message.check)):
                raise MalformedMessage
            _increasing([counted.helper for counted in message.counted])
            for counted in message.counted:
                if counted.helper >= message.terms.helpers or len(counted.masks) != len(held(message.terms, counted.helper)):
                    raise MalformedMessage
                if any(len(mask) != count_bytes(message.terms) for mask in counted.masks):
                    raise MalformedMessage
    return message


def decode_from_helper(data: bytes, terms: HelpedTerms) -> FromHelper:
    """A helper's message. Raises `MalformedMessage`."""
    limit = SMALL_LIMIT_BYTES + MOST_SETS * vector_length(terms) * terms.bits // 8
    message: FromHelper = codec.decode(data, FromHelper, limit)  # type: ignore[arg-type]
    if message.context != context(terms):
        raise MalformedMessage
    if isinstance(message, UploadsRead):
        _increasing([refusal.client for refusal in message.refused])
    return message


def refused_uploads(data: bytes) -> tuple[RefusedUpload, ...]:
    """The uploads that a helper cannot use, by its answer under whatever terms; none where the bytes are another message."""
    try:
        return codec.decode(data, UploadsRead, SMALL_LIMIT_BYTES).refused
    except MalformedMessage:
        return ()


# --- what signatures, boxes, seeds and sets are bound to


def _number(value: int) -> bytes:
    return value.to_bytes(8, "big")


def key_parts(roster: Roster, message: KeyAnnouncement) -> tuple[bytes, ...]:
    """What a helper signs of its key."""
    return roster.digest, message.session, _number(message.round), _number(message.helper), message.key


def announcement_of(roster: Roster, data: bytes) -> KeyAnnouncement:
    """An announcement whose signature is that of the helper of its number on the roster.

    Raises:
        RemoteError: "malformed" or "bad-signature".
    """
    message = decode_announcement(data)
    if message.helper >= len(roster.holders):
        raise MalformedMessage
    verify_key(roster.holders[message.helper], message.helper, message.signature, KEY, *key_parts(roster, message))
    return message


def box_info(agreed: bytes, client: int, helper: int) -> bytes:
    """What a box is bound to."""
    return frame(LABEL + "box", agreed, _number(client), _number(helper))


def commitment(agreed: bytes, client: int, number: int, seed: bytes) -> bytes:
    """The hash of a seed."""
    return sha256(frame(LABEL + "seed", agreed, _number(client), _number(number), seed)).digest()


def mask_key(agreed: bytes, client: int, number: int, seed: bytes) -> bytes:
    """The AES-256 key of a seed's mask."""
    return sha256(frame(LABEL + "mask", agreed, _number(client), _number(number), seed)).digest()


def noise_key(name: bytes, number: int, seeds: Sequence[bytes]) -> bytes:
    """The key of the noise of a seed's set of helpers, by the name of a set of clients and these clients' seeds."""
    return sha256(frame(LABEL + "noise", name, _number(number), *seeds)).digest()


def upload_digest(agreed: bytes, client: int, named: bytes, vector_digest: bytes, box_digests: bytes, commitments: bytes) -> bytes:
    """What a client signs: everything in its upload."""
    return sha256(frame(LABEL + "upload", agreed, _number(client), named, vector_digest, box_digests, commitments)).digest()


def count_bytes(terms: HelpedTerms) -> int:
    """The length of the counts, which a vector of several blocks begins with."""
    return terms.clusters * terms.bits // 8


def vector_digest(terms: HelpedTerms, vector: bytes) -> bytes:
    """SHA-256 of a masked vector; of several blocks the masked counts, then SHA-256 of the rest."""
    counts = count_bytes(terms)
    return bytes(vector[:counts]) + sha256(vector[counts:]).digest()


def signed_digest(terms: HelpedTerms, message: MaskedUpload) -> bytes:
    """The `upload_digest` of an upload."""
    boxes = b"".join(digest_of(box.box) for box in message.boxes)
    digest = vector_digest(terms, message.vector)
    return upload_digest(message.context, message.client, message.names, digest, boxes, message.commitments)


def digest_of(data: bytes) -> bytes:
    """SHA-256 of a vector, a mask, or a box."""
    return sha256(data).digest()


def set_name(agreed: bytes, digests: Sequence[bytes]) -> bytes:
    """32 bytes that name the terms, the clients of a set, and their very uploads (`upload_digest`, in the order of the clients)."""
    return sha256(frame(LABEL + "set", agreed, *digests)).digest()


def closing(helper: int, name: bytes) -> tuple[bytes, ...]:
    """What a helper signs of a set."""
    return _number(helper), name


def mask_parts(helper: int, name: bytes, groups: Sequence[Sequence[int]], hashes: Sequence[bytes]) -> tuple[bytes, ...]:
    """What a helper signs of masks."""
    return _number(helper), name, *(bytes(group) + digest for group, digest in zip(groups, hashes, strict=True))
