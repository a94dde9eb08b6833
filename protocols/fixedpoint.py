"""Fixed-point quantisation: real vectors added in modular arithmetic without overflow.

x ∈ [−clip, clip] becomes an integer level in {−L, …, L}: x·L/clip, rounded up with the probability of its
fractional part and down otherwise (stochastic rounding, unbiased). Sums of at most n levels lie in [−nL, nL];
they are read back from arithmetic modulo 2^b without ambiguity exactly when nL ≤ 2^(b−1) − 1. That is the
whole overflow proof; `check_no_overflow` checks it for public numbers only, so it can be (and is) checked
before any input is touched.

Guarantee: decoding the modular sum of at most n encodings gives the exact integer sum of the levels; each
level is within one of x·L/clip and right on average (up to 2^-32); rounding coins come from the given entropy
through AES-256-CTR, so nobody else can predict them. Reveals: nothing by itself; the sum reveals the sum.
Rounding with unpredictable coins is *not* differential privacy. Source: Bonawitz et al. 2017, section 1 (sums
in Z_R); stochastic rounding as in Alistarh et al. 2017 (QSGD), section 3.1.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from .entropy import Entropy

__all__ = ["Bits", "FixedPoint", "check_no_overflow", "decode", "encode", "largest_levels", "unwrap", "wrap"]

Bits = Literal[16, 32]
"""Width of the modulus."""

_CHUNK = 1 << 16


@dataclass(frozen=True)
class FixedPoint:
    """A public quantiser: values in [−clip, clip] become levels in {−levels, …, levels}, summed modulo 2^bits.

    Raises:
        ValueError: for a modulus other than 2^16 and 2^32, a clip that is not a positive finite number, or
        levels outside
            1 … 2^(bits−1) − 1.
    """

    bits: Bits
    clip: float
    levels: int

    def __post_init__(self) -> None:
        if self.bits not in (16, 32):
            raise ValueError(f"bits: expected 16 or 32, got {self.bits}")
        if not (math.isfinite(self.clip) and self.clip > 0):
            raise ValueError(f"clip: expected a positive finite number, got {self.clip}")
        if not 1 <= self.levels < 1 << (self.bits - 1):
            raise ValueError(f"levels: expected 1 to {(1 << (self.bits - 1)) - 1} for {self.bits} bits, got {self.levels}")


def largest_levels(clients: int, bits: Bits) -> int:
    """The finest quantiser whose sum over `clients` cannot overflow `bits` bits.

    Raises:
        ValueError: if even one level a client could overflow.
    """
    levels = ((1 << (bits - 1)) - 1) // clients
    if levels < 1:
        raise ValueError(f"bits: {clients} clients do not fit into {bits} bits")
    return levels


def check_no_overflow(clients: int, fixed: FixedPoint) -> None:
    """Proves that no sum of `clients` encodings can overflow.

    Raises:
        ValueError: if clients · levels > 2^(bits−1) − 1.
    """
    limit = (1 << (fixed.bits - 1)) - 1
    if clients * fixed.levels > limit:
        raise ValueError(f"levels: {clients} clients x {fixed.levels} levels may exceed {limit}, the largest {fixed.bits}-bit sum")


def encode(values: NDArray[Any], fixed: FixedPoint, entropy: Entropy, fraction: float = 1.0) -> tuple[NDArray[np.int32], int]:
    """Levels of `fraction`·`values`, and how many of the values lay outside [−clip, clip] and were clipped to it.

    Args:
        values: shape (d,), real numbers. An integer array is taken as levels already (for counts, or integer noise
            added before).
        fixed: the quantiser.
        entropy: source of the rounding coins (32 bytes are drawn).
        fraction: weight in [0, 1], applied after clipping.

    Returns:
        int32 levels of shape (d,), and the number of clipped values.

    Raises:
        ValueError: if values are not a finite real vector, integers lie outside the levels (or come with a
        fraction other than 1), or
            fraction is outside [0, 1].
    """
    if values.ndim != 1 or values.dtype.kind not in "fiu":
        raise ValueError(f"values: expected a real vector, got {values.ndim} axes of {values.dtype}")
    if not 0.0 <= fraction <= 1.0:
        raise ValueError("fraction: expected a number from 0 to 1")
    if values.dtype.kind in "iu":
        if fraction != 1.0:
            raise ValueError("fraction: integer levels cannot be weighted")
        if values.size and (int(values.max()) > fixed.levels or int(values.min()) < -fixed.levels):
            raise ValueError(f"values: integer levels must lie within {fixed.levels} of zero")
        return values.astype(np.int32), 0
    levels = np.empty(values.size, np.int32)
    clipped = 0
    coins = Cipher(algorithms.AES(entropy(32)), modes.CTR(bytes(16))).encryptor()
    for start in range(0, values.size, _CHUNK):
        x = values[start : start + _CHUNK].astype(np.float64)
        if not np.isfinite(x).all():
            raise ValueError("values: not all numbers are finite")
        clipped += int(np.count_nonzero(np.abs(x) > fixed.clip))
        # |x| / clip <= 1 and fraction <= 1 hold in floating point too, so |scaled| <= levels exactly.
        scaled = np.clip(x, -fixed.clip, fixed.clip) / fixed.clip * fraction * fixed.levels
        low = np.floor(scaled)
        coin = np.frombuffer(coins.update(bytes(4 * x.size)), "<u4")
        levels[start : start + _CHUNK] = low + (coin < (scaled - low) * 2.0**32)
    return levels, clipped


def decode(total: NDArray[np.int32], fixed: FixedPoint) -> NDArray[np.float64]:
    """The sum of values, shape (d,), that a sum of levels stands for."""
    return np.multiply(total, fixed.clip / fixed.levels, dtype=np.float64)


def wrap(levels: NDArray[Any], bits: Bits) -> NDArray[Any]:
    """Integers modulo 2^bits, as little-endian unsigned numbers of that width."""
    return levels.astype("<u2" if bits == 16 else "<u4")


def unwrap(residues: NDArray[Any], bits: Bits) -> NDArray[np.int32]:
    """The integers in [−2^(bits−1), 2^(bits−1)) with these residues."""
    return residues.astype("<u2").view("<i2").astype(np.int32) if bits == 16 else residues.astype("<u4").view("<i4")
