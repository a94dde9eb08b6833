"""Linear algebra of a server's comparisons and of signatures, on a CUDA device in use. On the CPU callers take numpy and scipy."""

from collections.abc import Callable

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


def largest_eigenvectors(samples: Array, p: int) -> tuple[Array, Array]:
    """The p largest eigenvalues (p,), descending, of the smaller Gram matrix of `samples` (n, d), and its eigenvectors as columns."""
    x = placed(torch.from_numpy(samples))
    squares, vectors = torch.linalg.eigh(x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x)
    return np.asarray(squares[-p:].flip(0).cpu().numpy()), np.asarray(vectors[:, -p:].flip(1).cpu().numpy())
