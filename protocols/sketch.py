"""A public random sketch: short vectors in place of long ones, with inner products preserved on average.

Every client uses the same sketch, made from a public seed, so sketches can be compared, added and averaged in place of the vectors. It is a
step before a protection (a Haar rotation, encryption), for vectors too long for it; it protects nothing by itself.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from .entropy import derive, keystream

__all__ = ["Sketch", "public_seed", "public_sketch", "sketch"]

_CHUNK = 1 << 20


def public_seed(*label: str | int) -> bytes:
    """A 32-byte seed that everybody can compute, one for each label (such as a clustering epoch)."""
    return derive(sha256(b"cflpriv sketch, public\x00").digest(), "sketch seed", *label)


@dataclass(frozen=True, eq=False)
class Sketch:
    """``(S x)_b = Σ_{i: h(i) = b} s_i x_i`` for buckets h and signs s, independent and uniform."""

    dimension: int
    size: int
    _buckets: npt.NDArray[np.int32] = field(repr=False)
    _signs: npt.NDArray[np.int8] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """What it keeps in memory: five bytes a coordinate."""
        return self._buckets.nbytes + self._signs.nbytes

    def apply(self, rows: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
        """Rows (..., dimension) to (..., size), in their dtype; summed in float64.

        Raises:
            ValueError: for other shapes, and for what are no floats.
        """
        if rows.ndim == 0 or rows.shape[-1] != self.dimension or rows.dtype.kind != "f":
            raise ValueError(f"sketch: rows are {rows.dtype} of shape {rows.shape}, expected floats of shape (..., {self.dimension})")
        short = np.zeros((*rows.shape[:-1], self.size), dtype=rows.dtype)
        for row, out in zip(rows.reshape(-1, self.dimension), short.reshape(-1, self.size), strict=True):
            total = np.zeros(self.size)
            for start in range(0, self.dimension, _CHUNK):
                part = slice(start, start + _CHUNK)
                total += np.bincount(self._buckets[part], weights=row[part] * self._signs[part], minlength=self.size)
            out[:] = total
        return short

    def transposed(self, rows: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
        """Rows (..., size) to (..., dimension) by the transposed map, ⟨Sx, y⟩ = ⟨x, Sᵀy⟩, in their dtype.

        Raises:
            ValueError: for other shapes, and for what are no floats.
        """
        if rows.ndim == 0 or rows.shape[-1] != self.size or rows.dtype.kind != "f":
            raise ValueError(f"sketch: rows are {rows.dtype} of shape {rows.shape}, expected floats of shape (..., {self.size})")
        return np.asarray(rows[..., self._buckets] * self._signs)


def sketch(seed: bytes, dimension: int, size: int) -> Sketch:
    """The count sketch of a seed (32 bytes, public or not), from vectors of length `dimension` to vectors of length `size`.

    Guarantee: linear. For every pair x, y the inner product ⟨Sx, Sy⟩ is unbiased over the seeds with variance
    (‖x‖²‖y‖² + ⟨x,y⟩² − 2 Σ xᵢ²yᵢ²) / size, so its standard deviation is at most √(2/size) ‖x‖‖y‖, and about ‖x‖‖y‖/√size where the two are
    far from parallel. Vectors must not depend on the seed. Five bytes a coordinate in memory.
    Reveals: with a public seed, `size` linear equations of the vector; where it has few non-zero values, those values.
    Source: Charikar, Chen & Farach-Colton 2002 (the sketch); Weinberger et al. 2009, lemma 2 (the variance).

    Raises:
        ValueError: for sizes below 1 or above 2^31 − 1.
    """
    for name, value in (("dimension", dimension), ("size", size)):
        if not 1 <= value < 1 << 31:
            raise ValueError(f"sketch: {name} {value} is outside 1..2^31 − 1")
    # Of each 64-bit word the lowest bit is the sign and the rest, modulo `size`, the bucket (off uniform by less than size / 2^63).
    buckets = np.empty(dimension, dtype=np.int32)
    signs = np.empty(dimension, dtype=np.int8)
    for number, start in enumerate(range(0, dimension, _CHUNK)):
        stop = min(start + _CHUNK, dimension)
        words = np.frombuffer(keystream(derive(seed, "count sketch", size, number), 8 * (stop - start)), dtype="<u8")
        buckets[start:stop] = (words >> np.uint64(1)) % np.uint64(size)
        signs[start:stop] = 1 - 2 * (words & np.uint64(1)).astype(np.int8)
    return Sketch(dimension, size, buckets, signs)


@lru_cache(maxsize=2)
def public_sketch(purpose: str, seed: int, dimension: int, size: int) -> Sketch:
    """The sketch for a purpose that everybody makes of a public number; the last two are kept."""
    return sketch(public_seed(purpose, seed), dimension, size)
