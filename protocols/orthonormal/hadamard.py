"""The fast transform: secret signs, Walsh-Hadamard mixing, then a secret permutation and signs again."""

from dataclasses import dataclass, field

import numpy as np

from ..entropy import derive
from .interface import Rows, check_dimension, check_rows
from .permutation import LONGEST, Order, Signs, key_stream, random_order, random_signs

__all__ = ["Hadamard", "hadamard", "walsh_hadamard"]

_STRIP = 64


@dataclass(frozen=True, eq=False)
class Hadamard:
    """``y = S' P H S x / √m``: x padded with zeros to a power of two m, S and S' secret signs, H Walsh-Hadamard, P a secret order."""

    dimension: int
    _before: Signs = field(repr=False)
    _order: Order = field(repr=False)
    _after: Signs = field(repr=False)

    @property
    def size(self) -> int:
        """m, the power of two that is sent."""
        return len(self._order)

    @property
    def nbytes(self) -> int:
        return self._before.nbytes + self._order.nbytes + self._after.nbytes

    def apply(self, rows: Rows) -> Rows:
        """Rows (..., d) to (..., m), in their dtype and arithmetic, one row at a time."""
        check_rows("hadamard", rows, self.dimension)
        sent: Rows = np.empty((*rows.shape[:-1], self.size), dtype=rows.dtype)
        mixed: Rows = np.empty(self.size, dtype=rows.dtype)
        for row, out in zip(rows.reshape(-1, self.dimension), sent.reshape(-1, self.size), strict=True):
            mixed[self.dimension :] = 0.0
            np.multiply(row, self._before[: self.dimension], out=mixed[: self.dimension])
            mixed *= self.size**-0.5
            walsh_hadamard(mixed)
            np.take(mixed, self._order, out=out, mode="clip")
            np.multiply(out, self._after, out=out)
        return sent

    def invert(self, rows: Rows) -> Rows:
        """Rows (..., m) to (..., d): what `apply` did is undone, to rounding."""
        check_rows("hadamard", rows, self.size)
        back: Rows = np.empty((*rows.shape[:-1], self.dimension), dtype=rows.dtype)
        mixed: Rows = np.empty(self.size, dtype=rows.dtype)
        for row, out in zip(rows.reshape(-1, self.size), back.reshape(-1, self.dimension), strict=True):
            mixed[self._order] = np.multiply(row, self._after, dtype=rows.dtype)
            mixed *= self.size**-0.5
            walsh_hadamard(mixed)
            np.multiply(mixed[: self.dimension], self._before[: self.dimension], out=out)
        return back


def walsh_hadamard(values: Rows) -> None:
    """``H values`` in place, for a contiguous vector whose length is a power of two; H_1 = (1), H_2m = [[H_m, H_m], [H_m, −H_m]].

    The vector is a grid, and H the product of one Walsh-Hadamard matrix along each side; strips of the grid stay in the cache. Only sums
    and differences, in a fixed order: the result is the same to the last bit everywhere.

    Raises:
        ValueError: for another length.
    """
    length = len(values)
    if length & (length - 1) or length == 0:
        raise ValueError(f"walsh_hadamard: length {length} is no power of two")
    high = 1 << ((length.bit_length() - 1) // 2)
    grid = values.reshape(high, length // high)
    for start in range(0, grid.shape[1], _STRIP):
        columns = np.ascontiguousarray(grid[:, start : start + _STRIP])
        _butterflies(columns)
        grid[:, start : start + _STRIP] = columns
    for start in range(0, high, _STRIP):
        columns = np.ascontiguousarray(grid[start : start + _STRIP].T)
        _butterflies(columns)
        grid[start : start + _STRIP] = columns.T


def _butterflies(block: Rows) -> None:
    """Walsh-Hadamard along the first axis of a contiguous (length, width) block, in place."""
    length, width = block.shape
    half = 1
    while half < length:
        pairs = block.reshape(length // (2 * half), 2, half, width)
        difference = pairs[:, 0] - pairs[:, 1]
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] = difference
        half *= 2


def hadamard(secret: bytes, purpose: str, dimension: int) -> Hadamard:
    """The Hadamard transform of (`secret`, `purpose`), the same for all dimensions that pad to one power of two.

    **The order matters**: signs, then mixing, then the secret permutation and signs. Signs before a public Hadamard alone are undone with
    it, and every magnitude shows; a secret permutation or signs *after* the mixing gave the known attack on permuted updates nothing.

    Guarantee: inner products are kept, to rounding (about 2e-7 of the norms in float32). Heuristically the rows of one purpose reveal
    little beyond their Gram matrix to a server that lacks the secret: after the first signs, every mixed value is a sum over all
    coordinates. No theorem says so. Reveals: the Gram matrix, and what the multiset of mixed values reveals: its law is not exactly that of
    a Haar rotation, least of all for vectors of few non-zero values (a single one shows as values of one size). One client that colludes
    reveals the transform. Source: Ailon & Chazelle 2006 and Tropp 2011 for signs and Hadamard as a mixing map; the secret permutation and
    signs after it are ours.

    Raises:
        ValueError: for a dimension outside 1..2^28.
    """
    check_dimension("hadamard", dimension, LONGEST)
    size = 1 << (dimension - 1).bit_length()
    draw = key_stream(derive(secret, "hadamard", purpose, size))
    before = random_signs(draw, size)
    order = random_order(draw, size)
    return Hadamard(dimension, before, order, random_signs(draw, size))
