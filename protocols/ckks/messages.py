"""Messages of client, server and key holder: typed, bounded, canonical, signed bytes.

Guarantee: a decoder returns a well-formed message or raises `MalformedMessage`. Everything carries the digest of the epoch's `Setup`, so a
message of another epoch, packing or roster does not fit; everything is signed by who says it, over what was announced of the epoch's public
key as well, so one made under another key has a bad signature, also where an epoch's number comes back. Reveals: who takes part; ciphertext
lengths, which say nothing of the content.
"""

from functools import lru_cache
from hashlib import sha256
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from .. import codec
from ..errors import MalformedMessage
from ..keys import frame
from .parameters import Packing, Parameters, plan
from .seal import largest_bytes

__all__ = [
    "LABEL", "Announcement", "Enrolment", "Request", "Setup", "Upload", "ciphertexts_digest", "decode", "encode", "signed_request",
    "signed_upload",
]  # fmt: skip

LABEL = "cflpriv ckks v2 "
"""Starts every signature of this protocol version."""

Id = Annotated[int, Meta(ge=0, lt=1 << 32)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]


class Setup(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything public about one clustering epoch; all who take part must see the same.

    `roster` is the digest of the clients' keys, `most_clients` how many may ever be enrolled, so that the noise of what is released can be
    fixed beforehand. `group` pairs at most share an output: whose client encrypts something else than its vectors can spoil the others.
    """

    session: Annotated[bytes, Meta(min_length=16, max_length=16)]
    epoch: Id
    roster: Digest
    most_clients: Id
    p: Id
    dimension: Id
    ring: Id
    bits: tuple[Annotated[int, Meta(ge=1, le=60)], ...]
    mode: Literal["public-key", "symmetric"]
    release: Literal["gram", "distances", "labels"]
    bound: float = 1.0
    group: Id = 1
    insecure: bool = False

    @property
    def parameters(self) -> Parameters:
        return Parameters(self.ring, self.bits, self.mode, self.insecure)

    @property
    def packing(self) -> Packing:
        return plan(self.parameters, self.p, self.dimension, self.bound, self.group)

    @property
    def digest(self) -> bytes:
        return sha256(codec.encode(self)).digest()

    @property
    def scalars(self) -> int:
        """How many inner products the key holder will ever decrypt for this epoch: the cap, and what release noise is made for."""
        return self.most_clients * (self.most_clients + 1) // 2 * self.p**2


class Announcement(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="announcement"):
    """Key holder to all: its half p₀ of the epoch's public key (`public_key`), signed by the pinned key holder."""

    setup: Digest
    public_key: bytes
    signature: Signature


class Upload(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="upload"):
    """Client to server: encryptions of A and B, one for each chunk, signed (`signed_upload`) against the roster."""

    setup: Digest
    client: Id
    left: tuple[bytes, ...]
    right: tuple[bytes, ...]
    signature: Signature

    @property
    def digest(self) -> bytes:
        return ciphertexts_digest(self.left, self.right)

    def enrolment(self) -> "Enrolment":
        return Enrolment(self.setup, self.client, self.digest, self.signature)


class Enrolment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="enrolment"):
    """Server to key holder: this client did send ciphertexts in this epoch, by its own signature."""

    setup: Digest
    client: Id
    ciphertexts: Digest
    signature: Signature


class Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="request"):
    """Server to key holder: one rerandomised output; slot s holds the block of (left, rights[s]), or nothing where that is None."""

    setup: Digest
    left: Id
    rights: tuple[Id | None, ...]
    ciphertext: bytes
    signature: Signature


def ciphertexts_digest(left: tuple[bytes, ...], right: tuple[bytes, ...]) -> bytes:
    return sha256(frame("ciphertexts", *left, *right)).digest()


def signed_upload(public_key: bytes, client: int, ciphertexts: bytes) -> bytes:
    """The statement that a client signs for an upload or enrolment: the digest of the ciphertexts and the public key."""
    return frame("upload", _named(public_key), client.to_bytes(8, "big"), ciphertexts)


def signed_request(public_key: bytes, left: int, rights: tuple[int | None, ...], ciphertext: bytes) -> bytes:
    """What the server signs of a request."""
    slots = b"".join((2**40 if right is None else right).to_bytes(8, "big") for right in rights)
    return frame("request", _named(public_key), left.to_bytes(8, "big"), slots, sha256(ciphertext).digest())


@lru_cache(maxsize=4)
def _named(public_key: bytes) -> bytes:
    """A public key's hash, remembered: every request of an epoch is signed over it."""
    return sha256(public_key).digest()


encode = codec.encode


Kind = TypeVar("Kind", Announcement, Upload, Enrolment, Request)


def decode(data: bytes, kind: type[Kind], setup: Setup) -> Kind:
    """A message of this epoch. Raises `MalformedMessage`."""
    parameters, packing = setup.parameters, setup.packing
    limits: dict[type, int] = {
        Announcement: len(parameters.bits) * parameters.ring * 8 + 4096,
        Upload: 2 * packing.chunks * largest_bytes(parameters, 2) + 4096,
        Enrolment: 1024,
        Request: largest_bytes(parameters, 3) + 16 * packing.group + 4096,
    }
    message = codec.decode(data, kind, limits[kind])
    if message.setup != setup.digest:
        raise MalformedMessage
    return message
