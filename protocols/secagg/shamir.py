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
_SLOT_BITS = 512


def split(secret: bytes, threshold: int, keepers: Sequence[int], entropy: Entropy) -> list[bytes]:
    """One 33-byte share of the 32-byte `secret` for each keeper (distinct numbers from 1 up); any `threshold` of them suffice."""
    random = entropy(64 * (threshold - 1))
    coefficients = [int.from_bytes(random[i : i + 64], "big") % PRIME for i in range(0, len(random), 64)]
    return [y.to_bytes(SHARE_BYTES, "big") for y in _values([*coefficients, int.from_bytes(secret, "big")], keepers)]


def _values(coefficients: Sequence[int], points: Sequence[int]) -> list[int]:
    """The polynomial with these coefficients, the highest first, at points from 1 up, modulo p.

    f(X) = Σ_k X^(s k) g_k(X) with parts g_k of s coefficients. All parts are evaluated by one Horner scheme over one integer, in slots of
    512 bits, where s is so small that no slot overflows before it is reduced: half the time of a reduction a step (300 keepers).
    """
    terms = (_SLOT_BITS - 258) // max(points).bit_length()
    ascending = coefficients[::-1]
    width = _SLOT_BITS // 8
    rows = [ascending[i::terms] for i in range(min(terms, len(ascending)))]  # row i: the coefficient of X^i of every part
    packed = [int.from_bytes(b"".join(a.to_bytes(width, "little") for a in row), "little") for row in reversed(rows)]
    values = []
    for x in points:
        y = 0
        for row in packed:
            y = y * x + row
        parts = y.to_bytes(width * len(rows[0]), "little")
        step, value = pow(x, terms, PRIME), 0
        for start in range(len(parts) - width, -1, -width):
            value = (value * step + int.from_bytes(parts[start : start + width], "little")) % PRIME
        values.append(value)
    return values


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
