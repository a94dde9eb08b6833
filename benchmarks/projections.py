"""How well projections of masked vectors bound a client's norm, and what the projections cost.

    python -m benchmarks projections    # which vectors pass, then the processor time of 100 clients' projections

The check: 128 public projections with coins −1, 0, 0, 1, drawn after the vectors are fixed. A client passes if each projection, modulo 2^32
and centred, is at most `bound()`·B. An honest vector has norm B at most. A spread vector's projections are normal with variance B²/2; it
fails with 1e-6 under the bound. Two equal values are computed exactly.
"""

import time
from collections.abc import Sequence
from math import comb, erfc, log2, sqrt

import numpy as np

__all__ = ["HONEST_FAILS", "PROJECTIONS", "bound", "equal_values_pass", "main", "spread_passes"]

PROJECTIONS = 128
HONEST_FAILS = 1e-6


def spread_passes(limit: float, norm: float, projections: int = PROJECTIONS) -> float:
    """The probability that a spread vector of this norm passes."""
    return float((1 - erfc(limit / norm)) ** projections)


def equal_values_pass(values: int, most: int, projections: int = PROJECTIONS) -> float:
    """The probability that `values` equal values pass, if the bound is `most` of these values.

    A sum of m coins is a binomial of 2m fair coins, less m.
    """
    passing = sum(comb(2 * values, values + place) for place in range(-min(values, most), min(values, most) + 1)) / 4**values
    return float(passing**projections)


def bound(projections: int = PROJECTIONS) -> float:
    """The least bound, in norms, under which an honest spread vector fails with `HONEST_FAILS` at most."""
    low, high = 1.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - spread_passes(middle, 1.0, projections) > HONEST_FAILS else (low, middle)
    return high


def main(words: Sequence[str]) -> int:
    """Print the table."""
    for projections in (PROJECTIONS, 208):
        limit = bound(projections)
        print(f"{projections} projections, bound {limit:.2f} B")
        print(f"  spread, 4.5 B      passes with 2^{log2(spread_passes(limit, 4.5, projections)):.1f}")
        for values in (1, 2, 3):
            passing = log2(equal_values_pass(values, 1, projections))
            print(
                f"  {values} equal values, {limit * sqrt(values):.2f} B  pass with 2^{passing:.1f}"
                if values > 1
                else f"  1 value, {limit:.2f} B      passes"
            )
    random = np.random.default_rng(0)
    for d in (10_000, 100_000):
        vectors = random.integers(0, 1 << 32, (100, d), np.uint32)
        begun = time.process_time()
        for start in range(0, d, 1000):
            coins = random.integers(0, 2, (2, 1000, PROJECTIONS), np.int8)
            halves = vectors[:, start : start + 1000]
            for part in (halves & 0xFFFF, halves >> 16):  # exact in float64
                part.astype(np.float64) @ (coins[0] - coins[1]).astype(np.float64)
        print(f"100 clients, {d} values: {time.process_time() - begun:.2f} s a party and seed set")
    return 0
