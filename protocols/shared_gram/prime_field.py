"""Exact arithmetic modulo the prime P = 2^61 − 1 on arrays of uint64.

Products of matrices go through float64 in limbs of 21 bits: sums of 2048 products of limbs stay below 2^53, so nothing is rounded.

Guarantee: every result is exact, and `uniform` is uniform on 0 … P − 1 (AES-256-CTR under the key, redrawn as a whole where a word is P).
Reveals: running times depend on shapes only, except where `uniform` draws again, which happens once in 2^61 words.
Source: Knuth, The Art of Computer Programming 2, section 4.3.2 (arithmetic modulo 2^e − 1); the limbs are ours.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..entropy import derive, keystream

__all__ = ["PRIME", "at_zero", "matrix_product", "minus", "of_integers", "plus", "signed", "times", "uniform"]

PRIME = (1 << 61) - 1
_P, _BITS = np.uint64(PRIME), 61
_LIMB, _LIMBS, _TOGETHER = 21, 3, 1 << 11
_ROWS = 512
_HALF = np.uint64(31)
_LOW = np.uint64((1 << 31) - 1)

Elements = npt.NDArray[np.uint64]


def _reduced(x: Elements) -> Elements:
    """Modulo P, for any uint64."""
    x = (x & _P) + (x >> np.uint64(_BITS))
    return np.where(x >= _P, x - _P, x)


def plus(a: Elements, b: Elements) -> Elements:
    """a + b."""
    return _reduced(a + b)


def minus(a: Elements, b: Elements) -> Elements:
    """a − b."""
    return _reduced(a + (_P - b))


def times(a: Elements, b: Elements | int) -> Elements:
    """a · b, value by value."""
    b = np.asarray(b, dtype=np.uint64)
    a1, a0, b1, b0 = a >> _HALF, a & _LOW, b >> _HALF, b & _LOW
    middle = a1 * b0 + a0 * b1  # below 2^62; 2^61 is 1
    low = (middle & np.uint64((1 << 30) - 1)) << _HALF
    return _reduced(np.uint64(2) * (a1 * b1) + (middle >> np.uint64(30)) + low + a0 * b0)


def matrix_product(left: Elements, right: Elements) -> Elements:
    """left · rightᵀ, of shapes (n, d) and (m, d): (n, m)."""
    product = np.zeros((len(left), len(right)), dtype=np.uint64)
    for first in range(0, left.shape[1], _TOGETHER):
        ours, theirs = left[:, first : first + _TOGETHER], _limbs(right[:, first : first + _TOGETHER])
        for row in range(0, len(left), _ROWS):
            some = _limbs(ours[row : row + _ROWS])
            for shift in range(2 * _LIMBS - 1):
                pairs = [(i, shift - i) for i in range(_LIMBS) if 0 <= shift - i < _LIMBS]
                total = sum((some[i] @ theirs[j].T).astype(np.uint64) for i, j in pairs)
                part = product[row : row + _ROWS]
                part[:] = plus(part, _rotated(_reduced(np.asarray(total, dtype=np.uint64)), shift * _LIMB % _BITS))
    return product


def _limbs(x: Elements) -> list[npt.NDArray[np.float64]]:
    mask = np.uint64((1 << _LIMB) - 1)
    return [((x >> np.uint64(_LIMB * place)) & mask).astype(np.float64) for place in range(_LIMBS)]


def _rotated(x: Elements, by: int) -> Elements:
    """x · 2^by: multiplication by two turns the bits round."""
    return (x << np.uint64(by)) & _P | x >> np.uint64(_BITS - by)


def uniform(key: bytes, shape: tuple[int, ...]) -> Elements:
    """Uniform elements of the keystream of a 32-byte key. A key serves once."""
    while True:
        words = np.frombuffer(keystream(key, 8 * int(np.prod(shape, dtype=int))), dtype="<u8") >> np.uint64(3)
        if (words < _P).all():
            return words.astype(np.uint64).reshape(shape)
        key = derive(key, "again")


def of_integers(values: npt.NDArray[np.int64]) -> Elements:
    """Integers in −P/2 … P/2 as elements."""
    values = np.asarray(values, dtype=np.int64)
    return np.where(values < 0, values + np.int64(PRIME), values).astype(np.uint64)


def signed(x: Elements) -> npt.NDArray[np.int64]:
    """The integers in −P/2 … P/2 that elements stand for."""
    whole = x.astype(np.int64)
    return np.where(x > _P >> np.uint64(1), whole - np.int64(PRIME), whole)


def at_zero(points: Sequence[int]) -> list[int]:
    """Lagrange's weights: Σ w_i f(points[i]) = f(0) for every polynomial f of degree below their number."""
    weights = []
    for point in points:
        above, below = 1, 1
        for other in points:
            if other != point:
                above, below = above * other % PRIME, below * (other - point) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return weights
