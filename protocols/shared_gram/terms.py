"""The public terms of one clustering epoch over shares, and its messages: typed, bounded, canonical, signed bytes.

Guarantee: a decoder returns a well-formed message or raises `MalformedMessage`. Every message carries the digest of the epoch's
`GramTerms` and is signed by its author. Clients' uploads and holders' contributions are signed over the keys of the epoch as well.
Reveals: who takes part; lengths.
"""

from hashlib import sha256
from math import floor, log2, sqrt
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from .. import codec
from ..errors import LocalError, MalformedMessage, RemoteError
from ..keys import SEAL_OVERHEAD_BYTES, Identity, Roster, check_public_key, frame, sign, verify, verify_key

__all__ = [
    "LABEL", "LEAD", "MOST_HOLDERS", "Announced", "Delivery", "Deposit", "GramContribution", "GramTerms", "HolderKey", "announcement",
    "check_deposit", "checked_keys", "decode", "deliveries", "encode", "gathered", "signed_deposit",
]  # fmt: skip

LABEL = "cflpriv shared gram v1 "
"""Starts every signature and every key of this protocol version."""
LEAD = 0
"""The number of the holder that opens the Gram matrix."""
MOST_HOLDERS = 16
_CAPACITY_BITS = 59
"""|⟨x, y⟩| Δ² stays below 2^59, a factor of two within ±P/2."""

Id = Annotated[int, Meta(ge=0, lt=1 << 32)]
Bytes32 = Annotated[bytes, Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]


class GramTerms(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything public about one clustering epoch; all who take part must see the same.

    `holders` parties have a share of each vector; any `colluding` of them learn nothing. `roster`: the digest of all keys, `most_clients`
    how many may ever deposit vectors, `p` rows of `dimension` numbers each, of norm up to `bound`.

    Raises:
        LocalError: "bad-terms" unless 1 ≤ `colluding` and 2 `colluding` + 1 ≤ `holders` ≤ 16; "out-of-range" for other sizes.
    """

    session: Annotated[bytes, Meta(min_length=16, max_length=16)]
    epoch: Id
    roster: Bytes32
    most_clients: Id
    holders: Id
    colluding: Id
    p: Id
    dimension: Id
    bound: float = 1.0

    def __post_init__(self) -> None:
        if self.colluding < 1 or not 2 * self.colluding + 1 <= self.holders <= MOST_HOLDERS:
            raise LocalError("bad-terms", f"{self.holders} holders of which {self.colluding} collude: an honest majority is needed")
        if min(self.p, self.dimension) < 1 or not 2.0**-20 <= self.bound <= 2.0**21:
            raise LocalError("out-of-range", f"p = {self.p}, dimension = {self.dimension}, bound = {self.bound}")

    @property
    def digest(self) -> bytes:
        return sha256(codec.encode(self)).digest()

    @property
    def contributors(self) -> int:
        """How many holders open a Gram matrix together, the lead among them: 2t + 1, for products have degree 2t."""
        return 2 * self.colluding + 1

    @property
    def scale(self) -> float:
        """Δ, a power of two: vectors are rounded to multiples of 1 / Δ."""
        return 2.0 ** floor((_CAPACITY_BITS - 2 * log2(self.bound)) / 2)

    @property
    def largest(self) -> float:
        """The largest |inner product| of vectors within the bound, in units of 1 / Δ²; rounding may lengthen a vector by √d / 2."""
        return (self.bound * self.scale * (1 + 2e-3) + sqrt(self.dimension)) ** 2

    def error(self, longest: float) -> float:
        """The standard deviation of the error of an inner product of vectors of norm `longest`: rounding is all there is."""
        step = 1 / self.scale / sqrt(12)
        return sqrt(2 * (longest * step) ** 2 + self.dimension * step**4)


class HolderKey(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="holder-key"):
    """A holder's fresh X25519 key for one epoch, signed by the holder of this number on the roster."""

    terms: Bytes32
    holder: Id
    key: Bytes32
    signature: Signature


class Announced(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="announced"):
    """The keys of all holders of an epoch, ascending by number."""

    terms: Bytes32
    keys: tuple[HolderKey, ...]


class Deposit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="deposit"):
    """Client to server: a sealed share for each holder of `Announced`, in its order, signed over all of them."""

    terms: Bytes32
    client: Id
    ephemeral: Bytes32
    boxes: tuple[bytes, ...]
    signature: Signature


class Delivery(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="delivery"):
    """Server to one holder: its box of a deposit, and the hashes of all boxes, which the client's signature covers."""

    terms: Bytes32
    client: Id
    ephemeral: Bytes32
    digests: tuple[Bytes32, ...]
    box: bytes
    signature: Signature


class GramContribution(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="contribution"):
    """A holder to the lead: its masked products, uint64 little-endian, for a statement that all contributors share."""

    terms: Bytes32
    holder: Id
    statement: Bytes32
    values: bytes
    signature: Signature


encode = codec.encode
Kind = TypeVar("Kind", HolderKey, Announced, Deposit, Delivery, GramContribution)


def decode(data: bytes, kind: type[Kind], terms: GramTerms) -> Kind:
    """A message of this epoch. Raises `MalformedMessage`."""
    box = 8 * terms.p * terms.dimension + SEAL_OVERHEAD_BYTES
    limits: dict[type, int] = {
        HolderKey: 1024,
        Announced: 512 + 256 * terms.holders,
        Deposit: 1024 + (box + 16) * terms.holders,
        Delivery: 1024 + box + 64 * terms.holders,
        GramContribution: 1024 + 8 * (terms.most_clients * terms.p) ** 2,
    }
    message = codec.decode(data, kind, limits[kind])
    if message.terms != terms.digest:
        raise MalformedMessage
    return message


# --- keys


def announcement(terms: GramTerms, number: int, identity: Identity, key: bytes) -> bytes:
    """The announcement of a holder's key for an epoch."""
    digest = terms.digest
    return encode(HolderKey(digest, number, key, sign(identity, LABEL + "key", digest, _number(number), key)))


def gathered(terms: GramTerms, announcements: tuple[bytes, ...], roster: Roster) -> bytes:
    """The keys of the holders that announced one, as `checked_keys` takes them. Raises `RemoteError` as that does."""
    keys = sorted((decode(announcement_, HolderKey, terms) for announcement_ in announcements), key=lambda key: key.holder)
    data = encode(Announced(terms.digest, tuple(keys)))
    checked_keys(data, terms, roster)
    return data


def checked_keys(data: bytes, terms: GramTerms, roster: Roster) -> dict[int, bytes]:
    """The X25519 keys of an epoch's holders, by number, ascending.

    Raises:
        RemoteError: "malformed", "bad-signature" for a key that is not that holder's, "bad-key", "too-few-holders" without the lead or for
            fewer holders than open a matrix.
    """
    message = decode(data, Announced, terms)
    numbers = [key.holder for key in message.keys]
    if numbers != sorted(set(numbers)) or any(number >= len(roster.holders) for number in numbers) or len(roster.holders) != terms.holders:
        raise MalformedMessage
    for key in message.keys:
        if key.terms != message.terms:
            raise MalformedMessage
        statement = (message.terms, _number(key.holder), key.key)
        verify_key(roster.holders[key.holder], key.holder, key.signature, LABEL + "key", *statement)
        check_public_key(key.key)
    if LEAD not in numbers or len(numbers) < terms.contributors:
        raise RemoteError("too-few-holders")
    if len({key.key for key in message.keys}) < len(numbers):
        raise RemoteError("bad-key")
    return {key.holder: key.key for key in message.keys}


# --- deposits


def signed_deposit(keys: bytes, client: int, ephemeral: bytes, digests: tuple[bytes, ...]) -> bytes:
    """What a client signs: the hashes of its boxes and the keys that they are for."""
    return frame("deposit", sha256(keys).digest(), _number(client), ephemeral, *digests)


def deliveries(data: bytes, terms: GramTerms, keys: bytes, roster: Roster) -> tuple[int, tuple[bytes, ...]]:
    """The client of a deposit, and what each holder gets of it, in the order of the keys.

    Raises:
        RemoteError: "malformed", "bad-signature".
    """
    message = decode(data, Deposit, terms)
    if len(message.boxes) != len(decode(keys, Announced, terms).keys):
        raise MalformedMessage
    digests = tuple(sha256(box).digest() for box in message.boxes)
    check_deposit(terms, keys, roster, message.client, message.ephemeral, digests, message.signature)
    return message.client, tuple(
        encode(Delivery(message.terms, message.client, message.ephemeral, digests, box, message.signature)) for box in message.boxes
    )


def check_deposit(
    terms: GramTerms, keys: bytes, roster: Roster, client: int, ephemeral: bytes, digests: tuple[bytes, ...], signature: bytes
) -> None:  # fmt: skip
    """Raises `RemoteError` "bad-signature" unless a deposit is that of this client of the roster."""
    verify(roster, client, signature, LABEL + "deposit", terms.digest, signed_deposit(keys, client, ephemeral, digests))


def _number(value: int) -> bytes:
    return value.to_bytes(8, "big")
