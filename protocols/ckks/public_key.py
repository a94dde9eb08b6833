"""An epoch's public key (p₀, a): a is a hash of the epoch's public terms, p₀ = −(a s + e) is what the key holder announces.

a is expanded from the digest of the setup (session, epoch, parameters, roster, …) and the key holder's signing key by SHAKE-256, prime by
prime, with rejection: uniform, and in the transformed (NTT) domain, where uniform is uniform too. Each client makes a for itself.

Guarantee: nobody chooses a: not the key holder, not the server. So no key has a trapdoor or a degenerate form in its second half, such as
(0, P), which leaves messages unencrypted in one part of every ciphertext and nothing in the other; and a key of one session, epoch or set
of parameters is none of another. Of p₀ clients check its length, that residues are below their primes, and that none is zero, which would
leave a message's value at that root unencrypted (an honest p₀ has a zero with probability below 2⁻³⁸, and is then drawn again).
**That p₀ hides s remains trusted: the key holder made its key honestly.** A key holder that does not can choose p₀ so that anybody reads
what is encrypted: p₀ = −(a s + e) for an s that everybody knows, 0 or 1 say, or a short p₀. It may as well publish its secret key: it is
trusted with decryption in any case. What a from a hash and the key holder's signature over p₀ exclude is that the *server* alone, or
clients, come by a key that they can read under.
Reveals: nothing. Sharing a between two keys of the same terms (a key holder that lost its state) is safe: s and e are fresh.

Source: Alkim, Ducas, Pöppelmann & Schwabe 2016 (NewHope), section 3 (a from a seed, in the NTT domain); here the seed is public
terms. FIPS 202 (SHAKE-256).
"""

from functools import lru_cache
from hashlib import shake_256
from typing import Any

import numpy as np

from ..errors import MalformedMessage
from ..keys import frame
from .messages import LABEL, Setup
from .seal import Arithmetic, Residues, arithmetic

__all__ = ["announced_bytes", "announced_key", "fresh_key", "shared_half"]


@lru_cache(maxsize=4)
def shared_half(setup: Setup, holder: bytes) -> Residues:
    """a for an epoch and the Ed25519 public key of its key holder: (key primes, N) uint64, transformed, read-only."""
    ring = arithmetic(setup.parameters)
    n = setup.ring
    residues = np.empty((len(ring.key_moduli), n), dtype=np.uint64)
    for row, q in zip(residues, ring.key_moduli, strict=True):
        stream = shake_256(frame(LABEL + "shared half", setup.digest, holder, q.to_bytes(8, "big")))
        mask, words = np.uint64((1 << q.bit_length()) - 1), n
        kept = row[:0]
        while len(kept) < n:  # a longer output starts with the shorter one; at least every second word is kept
            words *= 2
            drawn = np.frombuffer(stream.digest(8 * words), dtype="<u8") & mask
            kept = drawn[drawn < q]
        row[:] = kept[:n]
    residues.flags.writeable = False
    return residues


def fresh_key(setup: Setup, holder: bytes) -> tuple[Any, bytes]:
    """A fresh secret key (a SEAL object) and p₀ as it is announced.

    SEAL draws s and e: e = −(p₀' + a' s) is that of a public key (p₀', a') of its own, and p₀ = −(a s + e), value by value.
    """
    ring = arithmetic(setup.parameters)
    moduli = np.array(ring.key_moduli, dtype=object)[:, None]
    shared = shared_half(setup, holder).astype(object)
    while True:
        generator = ring.seal.KeyGenerator(ring.context)
        made = ring.seal.PublicKey()
        generator.create_public_key(made)
        secret = generator.secret_key()
        first, second = ring.values(made.data()).reshape(2, *shared.shape).astype(object)
        s = ring.values(secret.data()).reshape(shared.shape).astype(object)
        error = -(first + second * s)
        announced = (-(shared * s + error) % moduli).astype(np.uint64)
        if announced.all():
            return secret, _packed(ring, announced)


def announced_key(setup: Setup, holder: bytes, announced: bytes) -> Any:
    """The public key (a SEAL object) of an announced p₀, which is untrusted.

    Raises:
        MalformedMessage: for other lengths, residues that are not below their prime, and zeros among them.
    """
    ring = arithmetic(setup.parameters)
    if len(announced) != announced_bytes(setup):
        raise MalformedMessage
    rows, at = [], 0
    for q in ring.key_moduli:
        width = _width(q)
        digits = np.frombuffer(announced, dtype=np.uint8, count=setup.ring * width, offset=at).reshape(setup.ring, width)
        words = np.zeros((setup.ring, 8), dtype=np.uint8)
        words[:, :width] = digits
        row = words.view("<u8")[:, 0]
        if (row >= q).any() or not row.all():
            raise MalformedMessage
        rows.append(row)
        at += setup.ring * width
    return ring.key_literal(np.stack([np.stack(rows).astype(np.uint64), shared_half(setup, holder)]))


def announced_bytes(setup: Setup) -> int:
    """How long an announced p₀ is: each residue takes the whole bytes that its prime needs."""
    return setup.ring * sum(_width(q) for q in arithmetic(setup.parameters).key_moduli)


def _width(q: int) -> int:
    return (q.bit_length() + 7) // 8


def _packed(ring: Arithmetic, residues: Residues) -> bytes:
    rows = zip(residues, ring.key_moduli, strict=True)
    return b"".join(row.astype("<u8").view(np.uint8).reshape(-1, 8)[:, : _width(q)].tobytes() for row, q in rows)
