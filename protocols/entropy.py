"""Entropy for secrets and privacy noise: the operating system's cryptographic source or, in tests only, a keyed stream.

Guarantee: `system_entropy` is `os.urandom`. `public_entropy` is a deterministic AES-256-CTR stream under a public key; it exists so that
two test runs can be compared byte for byte. Nothing in the library chooses it by default.
"""

import os
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Entropy", "derive", "gaussians", "keystream", "normals", "public_entropy", "signed_tails", "system_entropy", "uniforms"]

Entropy = Callable[[int], bytes]
"""A source of secret randomness: asked for n bytes, gives n bytes."""
SIGN = np.uint64(2**63)
"""The sign of a float64, as a bit."""


def system_entropy(count: int) -> bytes:
    """`count` bytes from the operating system's cryptographic source."""
    return os.urandom(count)


def keystream(key: bytes, count: int) -> bytes:
    """`count` bytes of AES-256-CTR keystream under the 32-byte `key` (counter from zero: use a key once)."""
    if len(key) != 32:
        raise ValueError(f"keystream key: expected 32 bytes, got {len(key)}")
    return bytes(_aes(key).update(bytes(count)))


def _aes(key: bytes) -> Any:
    """AES-CTR under `key`, counter from zero."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes  # training without noise does without

    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()


def public_entropy(label: str) -> Entropy:
    """A deterministic source for tests, keyed by a public label. Never use it for anything that must stay secret."""
    return _PublicStream(label)


class _PublicStream:
    """A source that keeps its position when it is sent to another process."""

    def __init__(self, label: str, drawn: int = 0) -> None:
        key = sha256(b"cflpriv test entropy, not secret\x00" + label.encode()).digest()
        self._encryptor = _aes(key)
        self._label, self._drawn = label, 0
        self(drawn)

    def __call__(self, count: int) -> bytes:
        self._drawn += count
        return bytes(self._encryptor.update(bytes(count)))

    def __reduce__(self) -> tuple[type["_PublicStream"], tuple[str, int]]:
        return _PublicStream, (self._label, self._drawn)


def derive(secret: bytes, *label: str | int) -> bytes:
    """A 32-byte key for one purpose, HKDF-SHA256 of `secret` with the parts of `label` as unambiguous info.

    Different labels give keys that are independent to anyone who lacks the secret.
    """
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    info = b"".join(len(part).to_bytes(4, "big") + part for part in (str(part).encode() for part in label))
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=b"cflpriv/derive/1\x00" + info).derive(secret)


def uniforms(key: bytes, count: int) -> npt.NDArray[np.float64]:
    """`count` uniforms strictly inside (0, 1), 52 bits each, from the AES-256-CTR keystream of `key`: (k + 1/2) / 2^52.

    With 52 bits every one of them is a float64; with 53 half of them would be rounded, the last to 1.
    """
    return _inside(np.frombuffer(keystream(key, 8 * count), dtype="<u8"))


def _inside(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """The first 52 bits k of each word as (k + 1/2) / 2^52."""
    return np.asarray(((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52)


def gaussians(key: bytes, count: int) -> npt.NDArray[np.float64]:
    """`count` standard normals from the keystream of `key`, by the inverse distribution function of 52-bit uniforms.

    For secret transforms, whose published vectors fix them. For privacy noise see `normals`.
    """
    from scipy.special import ndtri  # a slow import, which protocol stages that need no Gaussian go without

    return np.asarray(ndtri(uniforms(key, count)), dtype=np.float64)


def normals(key: bytes, count: int) -> npt.NDArray[np.float64]:
    """`count` standard normals from the keystream of `key`, by the inverse distribution function, up to 12.4 on either side.

    They are Φ⁻¹ of `signed_tails`, with the sign of these. With the error of `ndtri` each interval of width w gets its probability up to a
    factor of e^±(2e-15 (1 + x²)/w), x its distance from zero.

    For privacy noise, where the noisy value is then rounded to a public grid (`mechanisms.snap`, `shared_noise`), because which doubles can
    occur is visible in the low bits.
    """
    from scipy.special import ndtri  # a slow import, which protocol stages that need no Gaussian go without

    u = signed_tails(key, count)
    bits = u.view(np.uint64)
    signs = bits & SIGN
    bits ^= signs
    ndtri(u, out=u)  # in place, here and below: new memory costs as much as the arithmetic
    bits ^= signs
    return u


def signed_tails(key: bytes, count: int) -> npt.NDArray[np.float64]:
    """`count` probabilities of a tail u in (0, 1/2] from the keystream of `key`, each with a random sign: what `normals` are made of.

    One bit is the sign and 63 are u; where these leave fewer than 52 digits of u (one draw in 2,048), 52 more follow. So u has a relative
    error of 2^-52 down to 2^-117. The normal is Φ⁻¹(u) ≤ 0 where the sign is plus, and −Φ⁻¹(u) where it is minus.
    """
    stream = _aes(key)
    words = np.frombuffer(stream.update(bytes(8 * count)), dtype="<u8")
    tails = words & ~SIGN
    u = tails.astype(np.float64) + 0.5
    few = np.flatnonzero(tails < np.uint64(2**52))
    if few.size:
        more = np.frombuffer(stream.update(bytes(8 * few.size)), dtype="<u8")
        u[few] = tails[few].astype(np.float64) + _inside(more)
    u *= 2.0**-64
    u.view(np.uint64)[...] ^= words & SIGN
    return u
