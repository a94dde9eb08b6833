"""Sealed boxes to a public key that a quantum computer does not open: HPKE in base mode with ML-KEM-768 and X25519.

Guarantee: `unseal` gives the plaintext of a `seal` to this key under this `info`, or raises. Who recorded a box cannot open it later unless
both ML-KEM-768 and X25519 are broken, or the key was not erased. The sender is not authenticated: what must hold of it is signed.
Reveals: the length of the plaintext. Sealing draws from the operating system's entropy, in tests as well.
Source: RFC 9180 (HPKE: HKDF-SHA256, AES-256-GCM); FIPS 203 (ML-KEM); draft-ietf-hpke-pq (the hybrid), as `cryptography` has them.
"""

from functools import lru_cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from .errors import RemoteError

__all__ = ["KEY_BYTES", "OVERHEAD_BYTES", "SEED_BYTES", "SecretKey", "public_key", "seal", "secret_key", "unseal"]

_KEM_SEED, _KEM_KEY, _CURVE = 64, 1184, 32
SEED_BYTES = _KEM_SEED + _CURVE
"""Of a secret key: the seed of ML-KEM, then that of X25519."""
KEY_BYTES = _KEM_KEY + _CURVE
"""Of a public key: ML-KEM's, then X25519's."""
OVERHEAD_BYTES = 1088 + _CURVE + 16
"""So much longer than its plaintext is a box: both encapsulations, then AES-GCM's tag."""
SecretKey = hpke.MLKEM768X25519PrivateKey
_SUITE = hpke.Suite(hpke.KEM.MLKEM768_X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)


def public_key(seed: bytes) -> bytes:
    """The public key (1,216 bytes) of a seed of 96 bytes."""
    kem, curve = _halves(seed)
    return kem.public_key().public_bytes_raw() + curve.public_key().public_bytes_raw()


def secret_key(seed: bytes) -> SecretKey:
    """The secret key of a seed, loaded once for many boxes."""
    return SecretKey(*_halves(seed))


def seal(public: bytes, plaintext: bytes, info: bytes) -> bytes:
    """A box for the owner of `public`, bound to `info`.

    Raises:
        RemoteError: "bad-key" if `public` is no key, or its X25519 half is of small order.
    """
    try:
        return _SUITE.encrypt(plaintext, _loaded(public), info)
    except ValueError:
        raise RemoteError("bad-key") from None


def unseal(secret: SecretKey, box: bytes, info: bytes) -> bytes:
    """What `seal` put into the box.

    Raises:
        RemoteError: "bad-box" if key, box or `info` are not those of the sealing.
    """
    try:
        return _SUITE.decrypt(box, secret, info)
    except (InvalidTag, ValueError):
        raise RemoteError("bad-box") from None


def _halves(seed: bytes) -> tuple[MLKEM768PrivateKey, X25519PrivateKey]:
    return MLKEM768PrivateKey.from_seed_bytes(seed[:_KEM_SEED]), X25519PrivateKey.from_private_bytes(seed[_KEM_SEED:])


@lru_cache(maxsize=1 << 5)
def _loaded(public: bytes) -> hpke.MLKEM768X25519PublicKey:
    """A public key; many boxes go to one."""
    kem, curve = MLKEM768PublicKey.from_public_bytes(public[:_KEM_KEY]), X25519PublicKey.from_public_bytes(public[_KEM_KEY:])
    return hpke.MLKEM768X25519PublicKey(kem, curve)
