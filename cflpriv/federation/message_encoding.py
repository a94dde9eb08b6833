"""What messages carry: arrays, tasks, sums and parameters, and how a codec writes these as bytes.

Parties in one process hand arrays and tasks over without encoding them. As bytes, an array is (dtype, shape, bytes), a task the names and
fields of frozen dataclasses from a fixed list.
"""

from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import Annotated, Any

import msgspec
import numpy as np

from ..contract.handles import Shared
from ..contract.transformed_parts import Count, Name, Transformed, Value
from ..errors import InputError
from ..protocols.codec import Codec
from ..protocols.errors import MalformedMessage
from ..types import Array
from .task_encoding import task_from_bytes, task_to_bytes

__all__ = [
    "Addends", "Bytes16", "Bytes32", "Bytes64", "Carried", "Count", "DTYPES", "FederationMessage", "HeldValue", "MOST_AXES", "Many", "Name",
    "NamedArray",
    "OwnPart", "Picks", "SentParameters", "Transformed", "Value", "check_transformed", "codec", "to_addends",
]  # fmt: skip

DTYPES = ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
MOST_AXES = 8

Bytes16 = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Bytes64 = Annotated[bytes, msgspec.Meta(max_length=64)]


class Carried:
    """A task in a message. It is encoded only when its bytes are needed."""

    def __init__(self, task: Any) -> None:
        self.task = task

    @cached_property
    def data(self) -> bytes:
        """The task as bytes. Raises `InputError` for one that cannot be encoded."""
        return task_to_bytes(self.task)


class FederationMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base class of all messages. Compare messages that hold arrays by their bytes, not by `==`."""


class NamedArray(FederationMessage, frozen=True):
    """An array and its name."""

    name: Name
    value: Value


class OwnPart(FederationMessage, frozen=True):
    """`factor` times the client's own value."""

    held: Count
    part: Name
    factor: float


class Addends(FederationMessage, frozen=True, tag="sum"):
    """A `Shared`: its clear part, its transformed parts, the client's own parts."""

    clear: Value | None
    transformed: tuple[Transformed, ...]
    own: tuple[OwnPart, ...]


class Many(FederationMessage, frozen=True, tag="many"):
    """A list: the client picks from it, or takes all of it."""

    values: tuple[Addends, ...]


class HeldValue(FederationMessage, frozen=True, tag="held"):
    """A value that the client itself holds."""

    held: Count
    part: Name


SentParameters = tuple[tuple[Name, Addends | Many | HeldValue], ...]
"""The parameters of a task: their names and values."""


class Picks(FederationMessage, frozen=True, tag="picks"):
    """The positions that a client's labels select. `several`: the task gets a list, even of one value."""

    labels: tuple[Count, ...]
    several: bool


# --- encoding


def _encoded(value: Any) -> Any:
    """An array as [dtype, shape, bytes], a task as its bytes. Raises `InputError` for what cannot be encoded."""
    if isinstance(value, Carried):
        return value.data
    array = np.ascontiguousarray(value)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    if array.dtype.str not in DTYPES or array.ndim > MOST_AXES:
        raise InputError(f"an array of dtype {array.dtype} with {array.ndim} axes cannot be encoded")
    return [array.dtype.str, np.shape(value), array.data if array.size else b""]


def _decoded(kind: Any, encoded: Any) -> Any:
    """The inverse of `_encoded`; arrays are read-only. Raises `MalformedMessage` if dtype, shape and bytes do not match."""
    if kind is Carried:
        return Carried(task_from_bytes(encoded))
    match encoded:
        case [str(name), [*shape], bytes(data)] if name in DTYPES and len(shape) <= MOST_AXES:
            dtype = np.dtype(name)
            if all(type(size) is int and 0 <= size <= 1 << 53 for size in shape) and prod(shape) * dtype.itemsize == len(data):
                return _shaped(np.frombuffer(data, dtype), tuple(shape))
    raise MalformedMessage


codec = Codec(_encoded, _decoded)


def to_addends(value: Array | Shared, numbers: Mapping[Any, int]) -> Addends:
    """A value or sum as a message. `numbers`: the number of each held value, by key."""
    if not isinstance(value, Shared):
        return Addends(np.asarray(value), (), ())
    own = tuple(OwnPart(numbers[addend.held.key], addend.held.part, addend.factor) for addend in value.own)
    return Addends(value.clear, value.transformed, own)


def check_transformed(term: Transformed) -> None:
    """Raises `MalformedMessage` for a transformed part of inconsistent sizes."""
    value = term.value
    if value.ndim != 1 or not term.start <= term.stop <= term.dimension <= len(value) or len(term.shape) > MOST_AXES:
        raise MalformedMessage
    _shaped(value[term.start : term.stop], term.shape)


def _shaped(value: Array, shape: tuple[int, ...]) -> Array:
    """`value` reshaped. Raises `MalformedMessage` for a shape of another size, or one that no array has, such as (2⁵³, 2⁵³, 0)."""
    if prod(shape) != value.size:  # numpy's own product may overflow
        raise MalformedMessage
    try:
        return value.reshape(shape)
    except ValueError:
        raise MalformedMessage from None
