"""What messages carry: arrays, tasks, sums and parameters, and how a codec writes these as bytes.

Parties in one process hand arrays and tasks over without encoding them. As bytes, an array is (dtype, shape, bytes), a task the names and
fields of frozen dataclasses from a fixed list.
"""

from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from ..contract.handles import Blind, Shared
from ..errors import InputError
from ..protocols.codec import Codec
from ..protocols.errors import MalformedMessage
from ..types import Array
from .task_encoding import task_from_bytes, task_to_bytes

__all__ = [
    "Addends", "BlindPart", "Bytes16", "Bytes32", "Bytes64", "Carried", "Count", "Many", "Message", "Mine", "Name", "Named", "One",
    "OwnPart", "Parameter", "Picks", "Value", "blind_terms", "codec", "to_one",
]  # fmt: skip

DTYPES = ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
MOST_AXES = 8

Bytes16 = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Bytes64 = Annotated[bytes, msgspec.Meta(max_length=64)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Name = Annotated[str, msgspec.Meta(max_length=200)]


if TYPE_CHECKING:
    Value = Array
else:
    Value = np.ndarray
"""An array. In one process also an object that `numpy.asarray` turns into one (`engine.Deferred`)."""


class Carried:
    """A task in a message. It is encoded only when its bytes are needed."""

    def __init__(self, task: Any) -> None:
        self.task = task

    @cached_property
    def data(self) -> bytes:
        """The task as bytes. Raises `InputError` for one that cannot be encoded."""
        return task_to_bytes(self.task)


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base class of all messages. Compare messages that hold arrays by their bytes, not by `==`."""


class Named(Message, frozen=True):
    """An array and its name."""

    name: Name
    value: Value


class BlindPart(Message, frozen=True):
    """`contract.handles.Blind`: a transformed part of a sum."""

    transform: Name
    value: Value
    start: Count
    stop: Count
    shape: tuple[Count, ...]
    dimension: Count


class OwnPart(Message, frozen=True):
    """`factor` times the client's own value."""

    held: Count
    part: Name
    factor: float


class Addends(Message, frozen=True):
    """A `Shared`: its clear part (none or one), its transformed parts, its own parts."""

    clear: tuple[Value, ...]
    blind: tuple[BlindPart, ...]
    own: tuple[OwnPart, ...]


class One(Message, frozen=True, tag="one"):
    """One value for the client."""

    value: Addends


class Many(Message, frozen=True, tag="many"):
    """A list: the client picks from it, or takes all of it."""

    values: tuple[Addends, ...]


class Mine(Message, frozen=True, tag="mine"):
    """A value that the client itself holds."""

    held: Count
    part: Name


class Parameter(Message, frozen=True):
    name: Name
    value: One | Many | Mine


class Picks(Message, frozen=True, tag="picks"):
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


def to_one(value: Array | Shared, numbers: Mapping[Any, int]) -> Addends:
    """A value or sum as a message. `numbers`: the number of each held value, by key."""
    if not isinstance(value, Shared):
        return Addends((np.asarray(value),), (), ())
    return Addends(
        () if value.clear is None else (value.clear,),
        tuple(
            BlindPart(term.transform, term.value, term.start, term.stop, term.shape, term.dimension or len(term.value))
            for term in value.blind
        ),
        tuple(OwnPart(numbers[term.held.key], term.held.part, term.factor) for term in value.own),
    )


def blind_terms(addends: Addends) -> tuple[Blind, ...]:
    """The transformed parts of a sum. Raises `MalformedMessage` for inconsistent sizes."""
    terms = []
    for part in addends.blind:
        value = part.value
        if value.ndim != 1 or not part.start <= part.stop <= part.dimension <= len(value) or len(part.shape) > MOST_AXES:
            raise MalformedMessage
        _shaped(value[part.start : part.stop], part.shape)
        terms.append(Blind(part.transform, value, part.start, part.stop, part.shape, part.dimension))
    return tuple(terms)


def _shaped(value: Array, shape: tuple[int, ...]) -> Array:
    """`value` reshaped. Raises `MalformedMessage` for a shape of another size, or one that no array has, such as (2⁵³, 2⁵³, 0)."""
    if prod(shape) != value.size:  # numpy's own product may overflow
        raise MalformedMessage
    try:
        return value.reshape(shape)
    except ValueError:
        raise MalformedMessage from None
