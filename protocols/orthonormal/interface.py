"""The interface of all transforms, and the inputs they refuse."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Rows", "Transform", "check_dimension", "check_rows"]

Rows = npt.NDArray[np.floating]


class Transform(Protocol):
    """An orthonormal map of vectors of length `dimension` to vectors of length `size` (at least as long: some kinds pad)."""

    @property
    def dimension(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """What it keeps in memory."""
        ...

    def apply(self, rows: Rows) -> Rows:
        """Rows (..., dimension) transformed, (..., size), in their dtype. `ValueError` for other shapes and for what are no floats."""
        ...

    def invert(self, rows: Rows) -> Rows:
        """What `apply` was given: (..., size) to (..., dimension). Linear, so the mean of transformed rows gives the mean of the rows."""
        ...


def check_dimension(kind: str, dimension: int, limit: int) -> None:
    """`ValueError` for a dimension outside 1..limit."""
    if not 1 <= dimension <= limit:
        raise ValueError(f"{kind}: dimension {dimension} is outside 1..{limit}")


def check_rows(kind: str, rows: Rows, length: int) -> None:
    """`ValueError` unless `rows` are floats of shape (..., length)."""
    if rows.ndim == 0 or rows.shape[-1] != length:
        raise ValueError(f"{kind}: rows have shape {rows.shape}, expected (..., {length})")
    if rows.dtype.kind != "f":
        raise ValueError(f"{kind}: rows are {rows.dtype}, expected floats")
