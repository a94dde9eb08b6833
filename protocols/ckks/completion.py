"""From blocks to a Gram matrix, with all blocks or only those of landmark clients."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ..errors import LocalError
from .messages import Setup
from .parameters import error_std

__all__ = ["gram_error", "gram_matrix"]

Matrix = npt.NDArray[np.float64]


def gram_matrix(
    clients: Sequence[int], blocks: Mapping[tuple[int, int], Matrix], landmarks: Sequence[int] = (), error: float = 0.0
) -> Matrix:
    """The (n p, n p) Gram matrix of `clients` from their blocks, `blocks[left, right]` or its transpose.

    With `landmarks`, missing blocks come from Nyström's completion K ≈ C W⁺ Cᵀ, where C holds the blocks with landmarks and W those among
    them: each client is compared by its projection onto the span of the landmarks' vectors. Exact for vectors inside that span; otherwise
    inner products lack what lies outside it, so angles come out as those of the projections (the diagonal is completed too, which keeps
    the matrix positive and cosines within ±1). Eigenvalues of W below 10 `error` √(m p) are noise and are left out.
    Source: Williams & Seeger 2001.

    Raises:
        LocalError: "missing-block".
    """
    if not blocks:
        raise LocalError("missing-block", "no pair was answered")
    place = {client: number for number, client in enumerate(clients)}
    p = len(next(iter(blocks.values())))
    columns = list(landmarks) or list(clients)
    tall = np.full((len(clients), p, len(columns), p), np.nan)
    column = {client: number for number, client in enumerate(columns)}
    for (left, right), block in blocks.items():
        if left in place and right in column:
            tall[place[left], :, column[right], :] = block
        if right in place and left in column:
            tall[place[right], :, column[left], :] = block.T
    products = tall.reshape(len(clients) * p, len(columns) * p)
    if np.isnan(products).any():
        raise LocalError("missing-block", "not all pairs were answered")
    if not landmarks:
        return products
    rows = np.concatenate([np.arange(place[client] * p, (place[client] + 1) * p) for client in columns])
    corner = products[rows]
    values, vectors = np.linalg.eigh((corner + corner.T) / 2)
    keep = values > max(10 * error * np.sqrt(len(rows)), 1e-9 * max(values[-1], 0.0))
    half = products @ (vectors[:, keep] / np.sqrt(values[keep]))
    return np.asarray(half @ half.T)


def gram_error(setup: Setup, matrix: Matrix, noise: float) -> float:
    """The std of the error of these inner products: of the `noise` that was added, or of computing, which goes with the longest vector.

    With landmarks the longest is that of the landmarks, whose own products are exact, and of the others' projections on them.
    """
    most = error_std(setup.parameters, setup.packing, setup.group)
    longest = np.sqrt(max(float(matrix.diagonal().max()), 0.0) + 4 * max(most, noise))  # its norm is known up to errors only
    return max(error_std(setup.parameters, setup.packing, setup.group, float(longest)), noise)
