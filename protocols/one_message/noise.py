"""Integer noise that helpers draw from the members' seeds: each helper that knows a seed draws the same.

The distribution is the discrete Gaussian, cut at `REACH` standard deviations. Its distribution function is a table of 128-bit integers,
made and read with integers only, so that no two machines differ.

Guarantee: for who does not know one member's seed of a set of helpers, that set's noise is the discrete Gaussian of `deviation`, up to
1e-33 a coordinate. A member rounds its vector with a normal of `shared_noise.SHARE_STEPS` on it, so by the argument of `shared_noise`
(a discrete Gaussian has the same Fourier series, the shifted sum of normals' characteristic functions) the sum is a Gaussian mechanism's,
whose deviation is `deviation` at least: rounding is free, as there. The noise of other sets, and other members' normals, are slack.
Reveals: nothing. A second draw from the same seeds and set is the same noise.
Source: ours; inversion of a tabulated distribution function (Peikert 2010, section 4.1).
"""

from bisect import bisect_right
from functools import lru_cache
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from ..entropy import keystream

__all__ = ["REACH", "discrete_gaussian"]

REACH = 13
"""No draw is further from 0, in standard deviations: what is cut off has 1e-38."""
_PRECISION = 320
_DRAWN = 128


@lru_cache(maxsize=4)
def _table(deviation: int) -> tuple[tuple[int, ...], NDArray[np.uint64]]:
    """For each integer from −REACH·deviation on the probability (times 2^128) of those up to it, whole, and its first 64 bits."""
    one, most = 1 << _PRECISION, REACH * deviation
    term, step, n = one, one, 1
    while term := -term // (2 * deviation * deviation * n):  # step: exp(−1 / (2 deviation²))
        step, n = step + term, n + 1
    ratio, twice, weight = step, (step * step) >> _PRECISION, one
    weights = [weight]
    for _ in range(most):
        weight = (weight * ratio) >> _PRECISION
        ratio = (ratio * twice) >> _PRECISION
        weights.append(weight)
    both = [*reversed(weights[1:]), *weights]
    total, below, bounds = sum(both), 0, list[int]()
    for weight in both[:-1]:
        below += weight
        bounds.append((below << _DRAWN) // total)
    return tuple(bounds), np.array([bound >> 64 for bound in bounds], np.uint64)


def discrete_gaussian(key: bytes, count: int, deviation: int) -> NDArray[np.int64]:
    """`count` draws (count,) from the 32-byte `key`, which serves nothing else."""
    bounds, heads = _table(deviation)
    words = np.frombuffer(keystream(key, 8 * count), "<u8")
    places = np.searchsorted(heads, words, side="right")
    for at in np.flatnonzero(places != np.searchsorted(heads, words, side="left")):  # the first 64 bits do not decide
        tail = int.from_bytes(sha256(key + int(at).to_bytes(8, "big")).digest()[:8], "big")
        places[at] = bisect_right(bounds, (int(words[at]) << 64) | tail)
    return np.asarray(places, np.int64) - REACH * deviation
