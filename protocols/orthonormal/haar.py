"""Haar rotations: dense, for vectors of up to some thousand numbers; the only transform proved to reveal only the Gram matrix."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..entropy import derive, gaussians
from .interface import Rows, check_rows

__all__ = ["HAAR_LIMIT", "Haar", "haar"]

HAAR_LIMIT = 8192
"""The largest dimension of a dense Haar transform: d² doubles are kept (0.5 GB here)."""


@dataclass(frozen=True, eq=False)
class Haar:
    """A Haar-distributed orthonormal d × d matrix Q, kept as Householder reflectors: ``Q = H_1 H_2 … H_{d-1} D``."""

    dimension: int
    _reflectors: npt.NDArray[np.float64] = field(repr=False)
    _tau: npt.NDArray[np.float64] = field(repr=False)
    _signs: npt.NDArray[np.float64] = field(repr=False)

    @property
    def size(self) -> int:
        return self.dimension

    @property
    def nbytes(self) -> int:
        return self._reflectors.nbytes + self._tau.nbytes + self._signs.nbytes

    def apply(self, rows: Rows) -> Rows:
        """``rows @ Q.T`` for rows of shape (..., d); the dtype is kept, the arithmetic is float64."""
        flat = self._columns(rows)
        return self._rows(self._reflect(flat * self._signs[:, None], "N"), rows)

    def invert(self, rows: Rows) -> Rows:
        """``rows @ Q``: what `apply` did is undone, to rounding."""
        flat = self._columns(rows)
        return self._rows(self._reflect(flat, "T") * self._signs[:, None], rows)

    def _columns(self, rows: Rows) -> npt.NDArray[np.float64]:
        check_rows("haar", rows, self.dimension)
        return np.asarray(rows.reshape(-1, self.dimension).T, dtype=np.float64, order="F")

    def _rows(self, columns: npt.NDArray[np.float64], like: Rows) -> Rows:
        return np.ascontiguousarray(columns.T).reshape(like.shape).astype(like.dtype, copy=False)

    def _reflect(self, columns: npt.NDArray[np.float64], trans: str) -> npt.NDArray[np.float64]:
        if columns.shape[1] == 0:
            return columns
        work = max(1, 64 * columns.shape[1] + 64 * 65)
        from scipy.linalg import lapack  # a slow import, which protocol stages that need no rotation go without

        product, _, info = lapack.dormqr("L", trans, self._reflectors, self._tau, np.asfortranarray(columns), work)
        if info != 0:
            raise RuntimeError(f"haar: LAPACK dormqr returned {info}")
        return np.asarray(product)


def haar(secret: bytes, purpose: str, dimension: int) -> Haar:
    """The Haar transform of (`secret`, `purpose`).

    Householder vectors of independent Gaussians of shrinking length, with the signs of R's diagonal, give exactly the matrix whose law is
    Haar measure (what QR of a Gaussian matrix gives too, without its d³ cost).

    Guarantee: used once, against a server that lacks the secret, the transformed rows carry their Gram matrix and nothing else: the law
    of ``X Q^T`` for Haar-distributed Q depends on X only through ``X X^T``. For a true random Q the guarantee is statistical; here Q comes
    from an AES-256-CTR stream and 52-bit numbers, so it holds for a server that cannot break AES, and up to rounding.
    Reveals: the Gram matrix of everything sent under one purpose (norms, angles, hence who resembles whom). One client that shares its
    secret, or colludes, reveals the transform and with it every row. Rows under the same purpose are linked by construction.
    Source: Stewart 1980 and Mezzadri 2007 for sampling Haar measure by Householder reflections.

    Raises:
        ValueError: for a dimension outside 1..`HAAR_LIMIT`.
    """
    if not 1 <= dimension <= HAAR_LIMIT:
        raise ValueError(
            f"haar: dimension {dimension} is outside 1..{HAAR_LIMIT}; a dense rotation keeps d² numbers: use a smaller model or signature"
        )
    draws = gaussians(derive(secret, "haar", purpose, dimension), dimension * (dimension + 1) // 2)
    reflectors = np.zeros((dimension, dimension), order="F")
    tau = np.zeros(dimension)
    signs = np.ones(dimension)
    start = 0
    for i in range(dimension):
        # x ~ N(0, I_{d-i});  H_i x = beta e_1  with  beta = -sign(x_1) |x|,  v = x - beta e_1 scaled to v_1 = 1
        x = draws[start : start + dimension - i]
        start += dimension - i
        if i == dimension - 1:
            signs[i] = np.sign(x[0])
            break
        beta = -np.copysign(np.linalg.norm(x), x[0])
        reflectors[i + 1 :, i] = x[1:] / (x[0] - beta)
        tau[i] = (beta - x[0]) / beta
        signs[i] = np.sign(beta)
    return Haar(dimension, reflectors, tau, signs)
