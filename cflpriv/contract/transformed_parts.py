"""Transformed parts of sums, which messages carry as they are, and the types of their fields."""

from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from ..types import Array

__all__ = ["Count", "Name", "Transformed", "Value"]

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Name = Annotated[str, msgspec.Meta(max_length=200)]
if TYPE_CHECKING:
    Value = Array
else:
    Value = np.ndarray
"""An array. In one process also an object that `numpy.asarray` turns into one (`engine.Deferred`)."""


class Transformed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, eq=False):
    """A vector under a transform the server lacks; `value[start:stop]` of the opened vector is meant, in the given `shape`.

    `dimension` is the length of the vector before its transform padded it.
    """

    transform: Name
    value: Value
    start: Count
    stop: Count
    shape: tuple[Count, ...]
    dimension: Count

    def same_place(self, other: "Transformed") -> bool:
        """Whether both mean the same numbers under the same transform, so that their values can be added."""
        return (self.transform, self.start, self.stop, self.shape) == (other.transform, other.start, other.stop, other.shape)

    def plus(self, other: "Transformed") -> "Transformed":
        """The sum of two parts of the same place."""
        return msgspec.structs.replace(self, value=self.value + other.value)

    def times(self, factor: float) -> "Transformed":
        return msgspec.structs.replace(self, value=(self.value * factor).astype(self.value.dtype, copy=False))
