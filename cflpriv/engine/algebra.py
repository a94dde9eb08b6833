"""Linear algebra of a server's comparisons and of signatures, on a CUDA device in use. On the CPU callers take numpy and scipy."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..types import Array
from .device import placed, tensor

__all__ = ["largest_eigenvectors", "largest_singular_values", "products"]


def products(rows: Array) -> Callable[[slice, slice], Array]:
    """The inner products (a, b) of some of the `rows` (n, d) with others. They are sent to the device once."""
    there = tensor(np.ascontiguousarray(rows))
    return lambda some, others: np.asarray((there[some] @ there[others].T).cpu().numpy())


def largest_singular_values(matrices: Array) -> Array:
    """Of each of the square `matrices` (..., p, p) in float64, from the largest eigenvalue of MᵀM."""
    there = tensor(np.ascontiguousarray(matrices))
    squares = torch.linalg.eigvalsh(there.mT @ there)[..., -1]
    return np.asarray(squares.clamp_min(0.0).sqrt().cpu().numpy())


def largest_eigenvectors(samples: Sequence[Array], p: int) -> list[tuple[Array, Array]]:
    """For each of `samples` (n, d) of one d the largest eigenvalues of its smaller Gram matrix, descending, and eigenvectors as columns.

    There are p of them, or as many as the matrix has. Those of one n are sent, computed and fetched together.
    """
    leading: dict[int, tuple[Array, Array]] = {}
    for n in dict.fromkeys(len(sample) for sample in samples):
        members = [i for i, sample in enumerate(samples) if len(sample) == n]
        x = placed(torch.from_numpy(np.stack([samples[i] for i in members])))
        squares, vectors = torch.linalg.eigh(x @ x.mT if x.shape[1] <= x.shape[2] else x.mT @ x)
        count = min(p, squares.shape[1])
        whole = torch.cat([squares[:, None, -count:], vectors[:, :, -count:]], dim=1).flip(2).cpu().numpy()
        leading |= {i: (pair[0], pair[1:]) for i, pair in zip(members, whole, strict=True)}
    return [leading[i] for i in range(len(samples))]
