"""Similarity measures, each a function of the blocks of a Gram matrix, which all protections can provide.

Angles are in degrees throughout, as in PACFL.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..engine.device import in_use
from ..errors import InputError
from ..types import Array, check_array

__all__ = [
    "MEASURES", "ZERO_BELOW", "Gram", "Measure", "SimilarityMatrix", "angle_rows", "angles", "cosines", "drowned", "least_norm", "moments",
    "principal_angles", "without_noise",
]  # fmt: skip

Measure = Literal["smallest_angle", "corresponding_angles", "sum_of_angles", "chordal"]

MEASURES: dict[str, str] = {
    "smallest_angle": "the smallest principal angle (PACFL eq. 2)",
    "corresponding_angles": "the sum of the angles between corresponding vectors (PACFL eq. 3); not a function of the spans alone",
    "sum_of_angles": "the sum of all principal angles",
    "chordal": "the chordal distance sqrt(p − ‖UᵀV‖²), no angle at all",
}
NOISE_DEGREES, NOISE_CHORDAL = 1e-5, 1e-6
"""Near zero, distances from a Gram matrix in float64 are rounding: 1 − cos is known to a few 1e-16."""
ZERO_BELOW = 4.0
"""A squared norm below so many errors cannot be distinguished from zero: one of 30,000 zero vectors comes out longer."""
DROWNED_BELOW = 16.0
"""Between vectors of fewer errors squared a cosine errs by more than 1/16: by 0.25 in one of 16,000 pairs, the width of a choice of τ."""


@dataclass(frozen=True, eq=False)
class SimilarityMatrix:
    """`values[i, j]` compares clients[i] and clients[j]. `kind`: "distance" (0 for equal clients) or "similarity" (large for equal
    clients).

    Values below `noise` cannot be distinguished from zero.
    """

    values: Array
    clients: tuple[int, ...]
    metric: str
    kind: Literal["distance", "similarity"]
    noise: float = 0.0

    def __post_init__(self) -> None:
        check_array("similarity values", self.values, ndim=2)
        if self.values.shape != (len(self.clients), len(self.clients)):
            raise InputError(f"similarity values: shape {self.values.shape} for {len(self.clients)} clients")


@dataclass(frozen=True, eq=False)
class Gram:
    """The inner products of n clients' p vectors each, by blocks: `block(rows, cols)` has shape (rows, p, cols, p).

    Blocks are made when asked for, so that large n needs little memory. `error` is the standard deviation of what a protection added to
    each inner product (where that differs, of the most); float64's rounding is not counted.
    """

    clients: tuple[int, ...]
    p: int
    block: Callable[[slice, slice], Array]
    error: float = 0.0

    @property
    def n(self) -> int:
        return len(self.clients)

    @classmethod
    def of_vectors(cls, clients: Sequence[int], vectors: Array) -> "Gram":
        """The Gram of `vectors`, shape (n, p, d), whose products are made on the device in use."""
        check_array("vectors", vectors, ndim=3)
        n, p, d = vectors.shape
        if n != len(clients):
            raise InputError(f"vectors: {n} clients' vectors for {len(clients)} clients")

        multiplied = _products(vectors.reshape(n * p, d))

        def block(rows: slice, cols: slice) -> Array:
            product = multiplied(_spread(rows, n, p), _spread(cols, n, p))
            return product.reshape(product.shape[0] // p, p, product.shape[1] // p, p)

        return cls(tuple(clients), p, block)

    @classmethod
    def of_matrix(cls, clients: Sequence[int], matrix: Array, p: int = 1, error: float = 0.0) -> "Gram":
        """The Gram already at hand, shape (n·p, n·p)."""
        check_array("Gram matrix", matrix, ndim=2)
        n = len(clients)
        if matrix.shape != (n * p, n * p):
            raise InputError(f"Gram matrix: shape {matrix.shape}, expected {(n * p, n * p)}")
        blocks = matrix.reshape(n, p, n, p)
        return cls(tuple(clients), p, lambda rows, cols: blocks[rows, :, cols, :], error)

    def matrix(self) -> Array:
        """The whole (n·p, n·p) matrix."""
        everything = slice(0, self.n)
        return self.block(everything, everything).reshape(self.n * self.p, self.n * self.p)


def _products(rows: Array) -> Callable[[slice, slice], Array]:
    """The inner products of some of the `rows` (n, d) with others, made on the device in use."""
    if in_use().kind == "cpu":
        return lambda some, others: np.asarray(rows[some] @ rows[others].T)
    from ..engine.algebra import products  # loads torch

    return products(rows)


def _spread(clients: slice, n: int, p: int) -> slice:
    """The rows of a slice of n clients that have p each."""
    start, stop, _ = clients.indices(n)
    return slice(start * p, stop * p)


def angles(gram: Gram, measure: Measure = "smallest_angle", *, authors: bool = False, rows_at_once: int = 64) -> SimilarityMatrix:
    """All pairs' distance by `measure`, from the Gram alone. Angles in degrees, symmetric, zero diagonal.

    With `authors`, eq. 2 is the smallest arccos over all pairs of columns and eq. 3 keeps the sign, as in the PACFL authors' code; both
    then depend on the arbitrary signs of singular vectors.

    Near 0 the cosine carries half the digits: from a Gram in float64 the angle is good to about 1e-16 / angle (radians). `noise` is the
    distance that `gram.error` alone can give two equal vectors.
    """
    values = np.empty((gram.n, gram.n))
    for start in range(0, gram.n, rows_at_once):
        stop = min(start + rows_at_once, gram.n)
        rows = angle_rows(gram, slice(start, stop), slice(start, gram.n), measure, authors=authors)
        corner = np.triu(rows[:, : stop - start], 1)
        rows[:, : stop - start] = corner + corner.T  # symmetric to the last bit, and zero with itself
        values[start:stop, start:] = rows
        values[start:, start:stop] = rows.T
    metric = f"{measure} (authors)" if authors else measure
    return SimilarityMatrix(values, gram.clients, metric, "distance", _noise(gram, measure))


def angle_rows(gram: Gram, rows: slice, cols: slice, measure: Measure, *, authors: bool = False) -> Array:
    """The distances of some clients to others, shape (rows, cols)."""
    if measure not in MEASURES:
        raise InputError(f"measure: {measure!r} is not known; known are {', '.join(MEASURES)}")
    if authors and measure not in ("smallest_angle", "corresponding_angles"):
        raise InputError(f"measure: {measure!r} has no authors' variant; only smallest_angle and corresponding_angles have")
    product = np.ascontiguousarray(gram.block(rows, cols).transpose(0, 2, 1, 3), dtype=np.float64)  # (rows, cols, p, p)
    if authors and measure == "smallest_angle":
        return np.asarray(_degrees(product.max(axis=(2, 3))))
    if measure == "smallest_angle":
        return np.asarray(_degrees(_largest_singular_value(product)))
    if measure == "corresponding_angles":
        diagonal = np.diagonal(product, axis1=2, axis2=3)
        return np.asarray(_degrees(diagonal if authors else np.abs(diagonal)).sum(axis=2))
    if measure == "sum_of_angles":
        return np.asarray(_degrees(np.linalg.svd(product, compute_uv=False)).sum(axis=2))
    return np.asarray(np.sqrt(np.maximum(gram.p - (product**2).sum(axis=(2, 3)), 0.0)))


def _noise(gram: Gram, measure: str) -> float:
    """The distance that errors alone can give equal vectors. A p × p block of them has spectral norm about 2 √p error; this takes twice as
    much."""
    cosine = 4 * np.sqrt(gram.p) * gram.error
    if measure == "chordal":  # p − ‖G‖² errs by 2 ⟨G, E⟩, of std 2 √p error where G is orthogonal
        return max(NOISE_CHORDAL, float(np.sqrt(2 * cosine)))
    angle = max(NOISE_DEGREES, float(np.degrees(np.sqrt(2 * cosine))))
    return angle if measure == "smallest_angle" else gram.p * angle


def _largest_singular_value(product: Array) -> Array:
    """The largest singular value of each p × p matrix in (..., p, p), from the largest eigenvalue of MᵀM.

    Squaring costs the small singular values their digits, but not the largest, which is known to a few ulps either way.
    """
    if product.shape[-1] == 1:
        return np.abs(product[..., 0, 0])
    if in_use().kind != "cpu":
        from ..engine.algebra import largest_singular_values  # loads torch

        return largest_singular_values(product)
    squares = np.linalg.eigvalsh(np.swapaxes(product, -1, -2) @ product)[..., -1]
    return np.asarray(np.sqrt(np.maximum(squares, 0.0)))


def _degrees(cosine: Array) -> Array:
    return np.asarray(np.degrees(np.arccos(np.clip(cosine, -1.0, 1.0))))


def cosines(gram: Gram) -> SimilarityMatrix:
    """The cosine similarity of one vector per client (p = 1); a zero vector has cosine 0 with everyone.

    So has one that `gram.error` does not let tell from zero. `noise` is the cosine that errors alone make of orthogonal vectors as short as
    the shortest other one.

    Raises `InputError` for p ≠ 1.
    """
    if gram.p != 1:
        raise InputError(f"cosines: clients hold p = {gram.p} vectors each, expected 1")
    matrix = without_noise(np.asarray(gram.matrix(), dtype=np.float64), gram.error)
    norms = np.sqrt(np.maximum(np.diag(matrix), 0.0))
    scale = np.where(norms > 0, norms, np.inf)
    values = np.clip(matrix / scale[:, None] / scale[None, :], -1.0, 1.0)
    np.fill_diagonal(values, 1.0)
    positive = norms[norms > 0]
    noise = ZERO_BELOW * gram.error / float(positive.min()) ** 2 if len(positive) else 0.0
    return SimilarityMatrix(values, gram.clients, "cosine", "similarity", noise)


def without_noise(products: Array, error: float) -> Array:
    """Inner products (n, n) of vectors, each with an error of standard deviation `error`: values that cannot be distinguished from zero are
    zero.

    A zero vector's products with others may err by more than its own norm comes out as, and would make any cosine.
    """
    zero = np.diag(products) < ZERO_BELOW * error
    return np.where(zero[:, None] | zero[None, :], 0.0, products) if error else products


def drowned(squares: Array, error: float) -> bool:
    """Whether at least half of these squared norms are so small beside `error` that the vectors' cosines are mostly noise."""
    return error > 0 and float(np.mean(squares < DROWNED_BELOW * error)) >= 0.5


def least_norm(error: float) -> float:
    """The norm below which `drowned` counts a vector."""
    return float(np.sqrt(DROWNED_BELOW * error))


def moments(gram: Gram, p: int) -> Gram:
    """The Gram of second moments: of each client's vectors every p make one, M = Σ v vᵀ, and ⟨M, N⟩ is the sum of the squared products.

    Principal vectors that are as long as their singular values make the second moment of the data as far as p vectors tell it. Its noise is
    small: where two singular values are close, their vectors turn from sample to sample, but what both add to M does not. Of vectors of
    norm 1 M is the projection onto their span, which jumps where vectors p and p + 1 change places.

    Raises `InputError` for a number of vectors that p does not divide.
    """
    if p < 1 or gram.p % p:
        raise InputError(f"moments: clients gave {gram.p} vectors each, which make no moments of {p}")
    folds = gram.p // p

    def block(rows: slice, cols: slice) -> Array:
        whole = np.asarray(gram.block(rows, cols), np.float64)
        parts = whole.reshape(len(whole), folds, p, whole.shape[2], folds, p)
        return np.asarray((parts**2).sum(axis=(2, 5)))

    return Gram(gram.clients, folds, block, 2 * gram.error)


def principal_angles(u: Array, v: Array) -> Array:
    """The principal angles between the row spans of u (p, d) and v (q, d), in degrees, ascending, min(p, q) of them.

    Rows are orthonormalised first. Angles below 45° come from sines, the others from cosines, so all are accurate
    (Knyazev & Argentati 2002). Needs the vectors in the clear.
    """
    u = np.linalg.qr(np.asarray(check_array("u", u, ndim=2), dtype=np.float64).T)[0]
    v = np.linalg.qr(np.asarray(check_array("v", v, ndim=2), dtype=np.float64).T)[0]
    if u.shape[0] != v.shape[0]:
        raise InputError(f"principal_angles: u has dimension {u.shape[0]}, v has {v.shape[0]}")
    if u.shape[1] < v.shape[1]:
        u, v = v, u
    product = u.T @ v
    cosine = np.clip(np.linalg.svd(product, compute_uv=False), 0.0, 1.0)  # descending: angles ascending
    sine = np.clip(np.linalg.svd(v - u @ product, compute_uv=False)[::-1], 0.0, 1.0)  # ascending: angles ascending
    return np.asarray(np.degrees(np.where(cosine**2 > 0.5, np.arcsin(sine), np.arccos(cosine))))
