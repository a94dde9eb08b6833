"""Identities, key agreement, authenticated encryption and signatures.

Long-term identities (Ed25519 to sign, X25519 to agree), a pinned roster of them, and three operations that
the protocols share: `agree` (X25519, then HKDF under a label of its own), `seal`/`unseal` (AES-256-GCM with a
fresh random nonce), and labelled signatures.

Guarantee: keys derived under different labels or contexts are independent; a sealed box opens only under the
same key and associated data; a signature under one label is invalid under another. An active server can
impersonate nobody on the roster. Reveals: public keys identify a client across rounds. A roster is only as
honest as whoever made it: it is what keeps sybils out. Source: RFC 7748 (X25519), RFC 8032 (Ed25519), RFC
5869 (HKDF), NIST SP 800-38D (GCM).
"""

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import sha256

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from .copies import check_own
from .entropy import Entropy, system_entropy
from .errors import RemoteError
from .uncopied import uncopied

__all__ = [
    "SEAL_OVERHEAD_BYTES",
    "Identity",
    "Roster",
    "agree",
    "check_public_key",
    "derive",
    "exchange",
    "frame",
    "private_key",
    "public_key",
    "seal",
    "sign",
    "unseal",
    "verify",
    "verify_key",
]

SEAL_OVERHEAD_BYTES = 12 + 16


def frame(label: str, *parts: bytes) -> bytes:
    """`label` and `parts`, each with its length in front: different lists never give the same bytes."""
    pieces: list[bytes] = []
    for part in (label.encode(), *parts):
        pieces += (len(part).to_bytes(4, "big"), part)
    return b"".join(pieces)


def derive(secret: bytes, label: str, *context: bytes) -> bytes:
    """A 32-byte key from `secret` by HKDF-SHA256 with info = frame(label, *context)."""
    return HKDF(hashes.SHA256(), 32, None, frame(label, *context)).derive(secret)


def public_key(seed: bytes) -> bytes:
    """The X25519 public key (32 bytes) of a 32-byte seed."""
    return X25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def private_key(seed: bytes) -> X25519PrivateKey:
    """The X25519 private key of a 32-byte seed, loaded once for many agreements."""
    return X25519PrivateKey.from_private_bytes(seed)


def agree(own: X25519PrivateKey | bytes, peer: bytes, label: str, *context: bytes) -> bytes:
    """The 32-byte key shared with the owner of the X25519 public key `peer`, for one label and context.

    `own` is this side's private key, or its seed.

    Raises:
        RemoteError: "bad-key", see `exchange`.
    """
    return derive(exchange(own, peer), label, *context)


def exchange(own: X25519PrivateKey | bytes, peer: bytes) -> bytes:
    """The X25519 secret shared with the owner of `peer`, from which `derive` makes keys; never a key itself.

    Raises:
        RemoteError: "bad-key" if `peer` is a point of small order (the shared secret would be the same for
        everybody).
    """
    try:
        loaded = private_key(own) if isinstance(own, bytes) else own
        return loaded.exchange(X25519PublicKey.from_public_bytes(peer))
    except ValueError:
        raise RemoteError("bad-key") from None


def check_public_key(key: bytes) -> None:
    """Refuses X25519 public keys of small order, for parties that only pass keys on.

    Raises:
        RemoteError: "bad-key".
    """
    if _of_small_order(key):
        raise RemoteError("bad-key")


@lru_cache(maxsize=1 << 14)
def _of_small_order(key: bytes) -> bool:
    """Whether no secret can be shared with the owner of a public key. A public fact, remembered as signatures are, see `_valid`."""
    try:
        exchange(b"\x01" * 32, key)
    except RemoteError:
        return True
    return False


def seal(key: bytes, plaintext: bytes, associated: bytes, entropy: Entropy) -> bytes:
    """nonce (12 bytes, drawn) | AES-256-GCM of `plaintext`, bound to `associated`."""
    nonce = entropy(12)
    return nonce + AESGCM(key).encrypt(nonce, plaintext, associated)


def unseal(key: bytes, box: bytes, associated: bytes) -> bytes:
    """What `seal` put into the box.

    Raises:
        RemoteError: "bad-box" if key, box or associated data are not those of the sealing.
    """
    try:
        return AESGCM(key).decrypt(box[:12], box[12:], associated)
    except (InvalidTag, ValueError):
        raise RemoteError("bad-box") from None


@uncopied("it has long-term secrets; give the same object to all who need it, and store the seeds as secretly as a private key")
@dataclass(frozen=True)
class Identity:
    """A client's long-term secrets: the seeds of its Ed25519 and X25519 keys. `client` is its number, i.e. its place on the roster."""

    client: int
    signing_seed: bytes = field(repr=False)
    encryption_seed: bytes = field(repr=False)

    @staticmethod
    def create(client: int, entropy: Entropy = system_entropy) -> "Identity":
        """A new identity for client number `client`."""
        return Identity(client, entropy(32), entropy(32))

    def public(self) -> bytes:
        """The Ed25519 public key (32 bytes) that belongs on the roster."""
        return self._public

    @cached_property
    def _signing(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.signing_seed)

    @cached_property
    def _public(self) -> bytes:
        return self._signing.public_key().public_bytes_raw()


@dataclass(frozen=True)
class Roster:
    """The pinned Ed25519 public keys of all clients that may ever take part; client i is `keys[i]`. Distributed out of band.

    `holder` is the key of a key holder apart from them (`ckks`), empty where there is none. `others` are the keys of further holders
    (`shared_gram`), of which `holder` is the first.
    """

    keys: tuple[bytes, ...]
    holder: bytes = b""
    others: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if len({*self.keys, *self.holders}) != len(self.keys) + len(self.holders):
            raise ValueError("roster: the same key appears twice")
        if any(len(key) != 32 for key in (*self.keys, *self.holders)):
            raise ValueError("roster: expected keys of 32 bytes")

    @property
    def holders(self) -> tuple[bytes, ...]:
        """The keys of all holders, in order."""
        return (self.holder, *self.others) if self.holder or self.others else ()

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that name this roster."""
        keys, holder, others = self.keys, self.holder, self.others
        if others:
            return sha256(frame("cflpriv roster v1 with holders", len(keys).to_bytes(8, "big"), *keys, holder, *others)).digest()
        if holder:
            return sha256(frame("cflpriv roster v1 with a key holder", holder, *keys)).digest()
        return sha256(frame("cflpriv roster v1", *keys)).digest()


def sign(identity: Identity, label: str, *parts: bytes) -> bytes:
    """An Ed25519 signature (64 bytes) over frame(label, *parts). Raises `TypeError` for an identity of another copy of this folder."""
    check_own("identity", identity, Identity)
    return identity._signing.sign(frame(label, *parts))


def verify(roster: Roster, client: int, signature: bytes, label: str, *parts: bytes) -> None:
    """Checks that `signature` is that of roster member `client` over frame(label, *parts).

    Raises:
        RemoteError: "bad-signature" if it is not, or if no such client is on the roster.
        TypeError: for a roster of another copy of this folder.
    """
    check_own("roster", roster, Roster)
    if not 0 <= client < len(roster.keys):
        raise RemoteError("bad-signature", client)
    verify_key(roster.keys[client], client, signature, label, *parts)


def verify_key(key: bytes, client: int, signature: bytes, label: str, *parts: bytes) -> None:
    """Checks that `signature` over frame(label, *parts) is by the Ed25519 public key `key`, claimed to be that of `client`.

    Raises:
        RemoteError: "bad-signature" if it is not.
    """
    if not _valid(key, signature, frame(label, *parts)):
        raise RemoteError("bad-signature", client)


@lru_cache(maxsize=1 << 14)
def _valid(key: bytes, signature: bytes, message: bytes) -> bool:
    """Whether a signature is good. Public facts, remembered: where all parties live in one process, each asks about the same ones."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
