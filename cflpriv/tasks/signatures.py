"""Signature tasks: what clients compute of their data so that they can be compared.

A signature is an array (p, d) with orthonormal rows (the papers write d × p), zero rows where it is padded to a public width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ..engine import Device, Result, TaskInput
from ..engine.device import in_use
from ..errors import InputError
from ..types import Array, Parts
from .halves import HALVES, two_halves

if TYPE_CHECKING:
    from ..privacy.private_signatures import NoisyMoment, NoisyPrincipalVectors
    from ..privacy.settings import Noise

__all__ = ["PrincipalHalves", "PrincipalVectors", "principal_vectors"]


def principal_vectors(samples: Array, p: int, *, name: str = "samples") -> Array:
    """The p leading left singular vectors of the matrix whose columns are the samples (PACFL, Sec. 3), as rows: shape (p, d).

    `samples` has shape (n, d), one flattened sample a row, as they are: not centred, not normalised. The vectors come from the smaller of
    the two Gram matrices, which squares the spectrum: for singular values below about 1e-6 of the largest a vector is good to hundredths of
    a degree only, and below 1e-8 its direction is rounding and counts as rank missing. Pixels are far from that. Singular vectors have no
    sign; here each sums to a value ≥ 0, so that a client always sends the same ones.

    Raises `InputError` if p exceeds the rank.
    """
    x = np.asarray(samples, dtype=np.float64)
    squares, vectors = _largest(x, p) if p <= min(x.shape) else (np.zeros(0), np.zeros((0, 0)))
    return _signature(x, p, squares, vectors, name)


def _signature(x: Array, p: int, squares: Array, vectors: Array, name: str) -> Array:
    """The rows of `principal_vectors`, from the largest eigenvalues of the smaller Gram matrix of x (n, d) and its eigenvectors."""
    n, d = x.shape
    size = min(n, d)
    # eigenvalues are squared singular values, known to about size·eps of the largest
    if p > size or squares[-1] <= size * np.finfo(np.float64).eps * max(squares[0], 0.0) or squares[0] <= 0:
        rank = int(np.linalg.matrix_rank(x, tol=1e-7 * float(np.linalg.norm(x, 2))))  # `rtol` needs numpy 2
        raise InputError(
            f"{name}: a signature of p = {p} vectors was asked for (algorithm.p), but the data matrix has numerical rank {rank}"
        )
    rows = vectors.T if n > d else (vectors.T @ x) / np.sqrt(squares)[:, None]
    basis = _orthonormal(rows)  # restores what rounding took from orthogonality
    basis[basis.sum(axis=1) < 0] *= -1
    return basis


def _largest(x: Array, p: int) -> tuple[Array, Array]:
    """The p largest eigenvalues of the smaller Gram matrix of samples (n, d), descending, and its eigenvectors as columns."""
    if in_use().kind != "cpu":
        from ..engine.algebra import largest_eigenvectors  # loads torch

        return largest_eigenvectors([x], p)[0]
    from scipy.linalg import LinAlgError, lapack  # slow to import; LAPACK itself, since `eigh` takes a fifth longer for few samples

    size = min(x.shape)
    work, integers = _work(size)
    gram = x @ x.T if len(x) == size else x.T @ x
    squares, vectors, _, _, info = lapack.dsyevr(gram, range="I", il=size - p + 1, iu=size, lwork=work, liwork=integers, overwrite_a=True)
    if info:
        raise LinAlgError(f"dsyevr: the eigenvectors of a Gram matrix did not converge ({info})")
    return squares[p - 1 :: -1], vectors[:, ::-1]


@lru_cache(maxsize=256)
def _work(size: int) -> tuple[int, int]:
    """The best sizes of the two workspaces of LAPACK's `dsyevr` for a matrix of this size."""
    from scipy.linalg import lapack

    work, integers, _ = lapack.dsyevr_lwork(size)
    return int(work), int(integers)


def _orthonormal(rows: Array) -> Array:
    """Rows (p, d) made orthonormal in their order, in the directions that they have."""
    from scipy.linalg import lapack

    factors, scales, _, _ = lapack.dgeqrf(rows.T)
    signs = np.sign(np.diagonal(factors))
    basis, _, _ = lapack.dorgqr(factors, scales)
    return np.ascontiguousarray((basis * signs).T)


@dataclass(frozen=True)
class PrincipalVectors:
    """A client's `p` leading principal vectors, or with `per_label` those of each of its labels, stacked (the PACFL authors' code).

    Parts: "signature" (width, d) float64. `width` is public and the same for all: p, or with `per_label` p × `labels_at_most`; rows beyond
    the client's own are zero. A label with fewer than p samples gives as many vectors as its rank allows (authors).

    Reveals: whoever sees the signature sees the span of the data's main directions: the first vector is close to the mean image. With
    `per_label` the number of non-zero rows, which the diagonal of a Gram matrix still shows, reveals how many labels a client has.
    """

    p: int = 3
    per_label: bool = False
    labels_at_most: int = 1

    parts: ClassVar[Parts] = {"signature": "compared"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def private(self, noise: "Noise") -> "NoisyPrincipalVectors":
        """This signature under sample-level differential privacy; `InputError` per label, whose width would reveal labels."""
        from ..privacy.private_signatures import NoisyPrincipalVectors

        if self.per_label:
            raise InputError("algorithm.per_label: a signature per label has no private form: which labels there are would show; use false")
        return NoisyPrincipalVectors(self.p, noise.sketch_dim, noise.signature, noise.relation, noise.seed)

    @property
    def width(self) -> int:
        """The public number of rows."""
        return self.p * self.labels_at_most if self.per_label else self.p

    def cost(self, task_input: TaskInput) -> int:
        return len(task_input.data.x_train)

    def chunk_size(self, task_input: TaskInput, device: Device) -> int:
        """One client on the CPU; on a device as many as there is memory for, in float64 and with their products."""
        if device.kind == "cpu":
            return 1
        from ..engine.memory import chunk_budget  # loads torch

        n, d = len(task_input.data.x_train), int(np.prod(task_input.data.x_train.shape[1:]))
        return max(1, chunk_budget() // (8 * (n * d + 4 * min(n, d) ** 2)))

    def run_many(self, inputs: Sequence[TaskInput], device: Device) -> tuple[list[Result], str]:
        """`run` for each. On a device the eigenvectors of clients with equally many samples are computed together, after one copy."""
        if device.kind == "cpu" or self.per_label or len(inputs) == 1:
            return [self.run(task_input) for task_input in inputs], "sequential"
        from ..engine.algebra import largest_eigenvectors

        flat = [np.asarray(task_input.data.x_train, np.float64).reshape(len(task_input.data.x_train), -1) for task_input in inputs]
        signatures = [
            _signature(x, self.p, squares, vectors, f"client {task_input.data.id}")
            for task_input, x, (squares, vectors) in zip(inputs, flat, largest_eigenvectors(flat, self.p), strict=True)
        ]
        return [{"signature": signature} for signature in signatures], "stacked"

    def run(self, task_input: TaskInput) -> dict[str, Array]:
        name = f"client {task_input.data.id}"
        x = task_input.data.x_train.reshape(len(task_input.data.x_train), -1)
        if not self.per_label:
            return {"signature": principal_vectors(x, self.p, name=name)}
        labels = np.unique(task_input.data.y_train)
        if len(labels) > self.labels_at_most:
            raise InputError(f"{name}: has {len(labels)} labels, but algorithm.labels_at_most is {self.labels_at_most}")
        signature = np.zeros((self.width, x.shape[1]))
        row = 0
        for label in labels:
            block = x[task_input.data.y_train == label]
            vectors = principal_vectors(block, min(self.p, _rank(block)), name=f"{name}, label {label}")
            signature[row : row + len(vectors)] = vectors
            row += len(vectors)
        return {"signature": signature}


@dataclass(frozen=True)
class PrincipalHalves:
    """The `p` leading principal vectors of each of two random halves of a client's data, one half after the other.

    Part: "signature" (2p, d) float64. A half's vectors v are as long as their singular values, by one factor, so that Σ v vᵀ has norm 1.
    The halves differ by noise alone, so that a test can tell noise from differences of clients. Raises `InputError` where a half has fewer
    than p samples, or a lower rank.

    Reveals: what `PrincipalVectors` does, twice, and the ratios of the p singular values. The mean of the first vectors of both halves is
    closer to the mean image than either.
    """

    p: int = 3

    parts: ClassVar[Parts] = {"signature": "compared"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def private(self, noise: "Noise") -> "NoisyMoment":
        """One noisy second moment in place of two halves, under sample-level differential privacy: the law of its noise is public."""
        from ..privacy.private_signatures import NoisyMoment

        return NoisyMoment(noise.sketch_dim, noise.signature, noise.relation, noise.samples, noise.seed)

    @property
    def width(self) -> int:
        """The public number of rows."""
        return HALVES * self.p

    def run(self, task_input: TaskInput) -> dict[str, Array]:
        name = f"client {task_input.data.id}"
        x = task_input.data.x_train.reshape(len(task_input.data.x_train), -1)
        try:
            halves = two_halves(len(x), task_input.streams("folds"))
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        halves_of = f"of {len(x)} samples (cut = 'test' takes a signature of each half)"
        rows = []
        for half in halves:
            basis = principal_vectors(x[half], self.p, name=f"{name}: a half {halves_of}")
            squares = ((basis @ np.asarray(x[half], np.float64).T) ** 2).sum(axis=1)  # of the singular values
            rows.append(basis * np.sqrt(squares / np.linalg.norm(squares))[:, None])
        return {"signature": np.concatenate(rows)}


def _rank(block: Array) -> int:
    """The rank of a block, counted no further than its smaller side."""
    return int(np.linalg.matrix_rank(np.asarray(block, dtype=np.float64)))
