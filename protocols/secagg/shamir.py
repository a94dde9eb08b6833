"""Shamir's secret sharing: any t shares give the secret, fewer reveal nothing.

f(X) = secret + a_1 X + … + a_{t−1} X^{t−1} over the field of p = 2^256 + 297 elements; keeper x holds f(x);
any t points give f(0) back.

Guarantee: t shares give the secret, t − 1 shares say nothing at all about it (information-theoretically, up
to the 2^-255 bias of reducing 64 random bytes modulo p). Reveals: shares are not authenticated: a wrong one
gives a wrong secret. The callers check what they can (a public key that must match). Source: Shamir 1979.
"""

from collections.abc import Sequence
from functools import lru_cache

from ..entropy import Entropy

__all__ = ["PRIME", "SHARE_BYTES", "combine", "split"]

PRIME = 2**256 + 297
SHARE_BYTES = 33


def split(secret: bytes, threshold: int, keepers: Sequence[int], entropy: Entropy) -> list[bytes]:
    """One 33-byte share of the 32-byte `secret` for each keeper (distinct numbers from 1 up); any `threshold` of them suffice."""
    random = entropy(64 * (threshold - 1))
    coefficients = [int.from_bytes(random[i : i + 64], "big") % PRIME for i in range(0, len(random), 64)]
    constant = int.from_bytes(secret, "big")
    shares = []
    for x in keepers:
        y = 0
        for a in coefficients:
            y = (y + a) * x % PRIME
        shares.append(((y + constant) % PRIME).to_bytes(SHARE_BYTES, "big"))
    return shares


def combine(keepers: Sequence[int], shares: Sequence[bytes]) -> bytes:
    """The 32-byte secret behind exactly `threshold` shares (wrong or too few shares give a wrong secret).

    Raises:
        ValueError: if the result is no 32-byte number, or keepers repeat.
    """
    points = zip(_at_zero(tuple(keepers)), shares, strict=True)
    secret = sum(weight * int.from_bytes(share, "big") for weight, share in points) % PRIME
    if secret >> 256:
        raise ValueError("shares: they do not belong together")
    return secret.to_bytes(32, "big")


@lru_cache(maxsize=64)
def _at_zero(keepers: tuple[int, ...]) -> tuple[int, ...]:
    """The Lagrange weights λ_i = Π_{j≠i} x_j / (x_j − x_i), with which f(0) = Σ λ_i f(x_i)."""
    if len(set(keepers)) != len(keepers):
        raise ValueError("keepers: repeated")
    weights = []
    for x in keepers:
        top = bottom = 1
        for other in keepers:
            if other != x:
                top = top * other % PRIME
                bottom = bottom * (other - x) % PRIME
        weights.append(top * pow(bottom, -1, PRIME) % PRIME)
    return tuple(weights)
