"""Secret permutations, with or without secret signs: cheap, exact, and the weakest of the transforms."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from ..entropy import Entropy, derive
from .interface import Rows, check_dimension, check_rows

__all__ = ["LONGEST", "Permutation", "key_stream", "permutation", "random_order", "random_signs", "signed_permutation"]

LONGEST = 1 << 28
"""The longest vectors taken: places are kept in 32 bits, and a draw of 8 bytes a place must fit in memory."""

Order = npt.NDArray[np.int32]
Signs = npt.NDArray[np.int8]


def key_stream(key: bytes) -> Entropy:
    """The AES-256-CTR keystream of `key`, piece by piece."""
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return lambda count: encryptor.update(bytes(count))


def random_order(draw: Callable[[int], bytes], count: int) -> Order:
    """A uniformly random order of 0..count−1: the places of `count` 64-bit numbers, sorted.

    Where two numbers are equal all are drawn again, so every order is exactly as likely as every other, and the result depends on the
    stream only, not on how a library sorts.
    """
    while True:
        numbers = np.frombuffer(draw(8 * count), dtype="<u8")
        order = np.argsort(numbers)
        ranked = numbers[order]
        if not (ranked[1:] == ranked[:-1]).any():
            return order.astype(np.int32)


def random_signs(draw: Callable[[int], bytes], count: int) -> Signs:
    """`count` independent signs, a bit of the stream each (lowest bit of a byte first; 1 is minus)."""
    bits = np.unpackbits(np.frombuffer(draw(-(-count // 8)), dtype=np.uint8), count=count, bitorder="little")
    return np.asarray(1 - 2 * bits.view(np.int8), dtype=np.int8)


@dataclass(frozen=True, eq=False)
class Permutation:
    """``y_i = s_i x_{π(i)}``, with s = 1 where there are no signs."""

    dimension: int
    _order: Order = field(repr=False)
    _signs: Signs | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        return self.dimension

    @property
    def nbytes(self) -> int:
        return self._order.nbytes + (0 if self._signs is None else self._signs.nbytes)

    def apply(self, rows: Rows) -> Rows:
        """The rows (..., d) reordered; exact."""
        check_rows("permutation", rows, self.dimension)
        moved: Rows = np.take(rows, self._order, axis=-1)
        if self._signs is not None:
            np.multiply(moved, self._signs, out=moved)
        return moved

    def invert(self, rows: Rows) -> Rows:
        """What `apply` was given, exactly."""
        check_rows("permutation", rows, self.dimension)
        back: Rows = np.empty_like(rows)
        back[..., self._order] = rows if self._signs is None else np.multiply(rows, self._signs, dtype=rows.dtype)
        return back


def permutation(secret: bytes, purpose: str, dimension: int) -> Permutation:
    """The secret order of coordinates of (`secret`, `purpose`).

    Guarantee: the order is uniform to whoever lacks the secret: which value stood where is hidden as far as the values themselves do not
    reveal it. Inner products are kept exactly, up to the order of summation; the inverse is exact.
    Reveals: every value, the joint values of all rows sent under one purpose, coordinate by coordinate, and so their Gram matrix. Values of
    vectors with known structure reveal their places: **a curious server without the secret reads the labels of clients' data off permuted
    network updates** (the head's gradients add up to zero over the classes), under a fresh permutation per round too. One known pair
    (x, Px) gives the permutation away; so does one client that colludes.
    Source: Sattler et al. 2019 (CFL), Sec. 5 and Algorithm 5, who permute coordinates with a seed shared by the clients.

    Raises:
        ValueError: for a dimension outside 1..2^28.
    """
    check_dimension("permutation", dimension, LONGEST)
    return Permutation(dimension, random_order(key_stream(derive(secret, "permutation", purpose, dimension)), dimension))


def signed_permutation(secret: bytes, purpose: str, dimension: int) -> Permutation:
    """The secret order of coordinates, and secret signs, of (`secret`, `purpose`).

    Guarantee: as `permutation`; the sign of a single value is hidden as well.
    Reveals: the size of every value, the products of rows' values in each coordinate, and so the Gram matrix. The attack on permuted
    updates works against this one too.
    Source: as `permutation`.

    Raises:
        ValueError: for a dimension outside 1..2^28.
    """
    check_dimension("signed_permutation", dimension, LONGEST)
    draw = key_stream(derive(secret, "signed_permutation", purpose, dimension))
    order = random_order(draw, dimension)
    return Permutation(dimension, order, random_signs(draw, dimension))
