"""Read files of arrays that another person may have written: npz, npy and safetensors.

What a header declares is compared with the bytes that are there before memory is taken for it. Arrays are of numbers, truth values or text:
nothing is unpickled. What an array of an npz may unpack to is limited, see `unpacked_limit`. Whatever is wrong with a file becomes an
`InputError` of one line that names the file and the array.
"""

import csv
import io
import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from .errors import InputError
from .protocols.bounded_files import UnusableFile, open_regular, parse_json

__all__ = [
    "LEAST_OF_OWN_DATA", "fill", "map_npy", "named", "read_npy", "read_npz", "read_safetensors", "read_safetensors_texts", "reading",
    "unpacked_limit",
]  # fmt: skip

LEAST_UNPACKED_BYTES = 2**26
LEAST_OF_OWN_DATA = 2**33
"""What a small file of the user's own samples may unpack to."""
LARGEST_RATIO = 100
LARGEST_DIRECTORY_BYTES = 2**20
"""The directory at the end of an archive, which is read as a whole. Its entries take at least 46 bytes."""
LARGEST_HEADER_BYTES = 10_000
LARGEST_NAME = 255
LARGEST_EMPTY = 2**20
"""An array without numbers may have no longer axes than this, together."""
LARGEST_TEXTS_BYTES = 100_000_000
"""What the library takes as a header of a safetensors file."""
MOST_AXES = 64
KINDS = "biufcSU"
"""The kinds of types, as numpy calls them, that arrays may have."""
_CHUNK_BYTES = 2**20
_LOCAL_HEADER_BYTES = 30


def unpacked_limit(packed: int, least: int = LEAST_UNPACKED_BYTES) -> int:
    """How many bytes the compressed arrays of a file of `packed` bytes may unpack to, together: `least`, or 100 times the file's size.

    Deflate reaches 1032. Arrays that are not compressed lie in the file byte for byte and have no limit.
    """
    return max(least, LARGEST_RATIO * packed)


@contextmanager
def reading(path: Path, file_format: str, part: str = "") -> Iterator[None]:
    """Turn every error of reading a damaged file, or a part of a file, into one `InputError`."""
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except UnusableFile as error:
        raise InputError(str(error)) from None
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        SyntaxError,
        MemoryError,
        csv.Error,
        OverflowError,
        RuntimeError,  # of zipfile; NotImplementedError and RecursionError are of this kind, too
        struct.error,
        tokenize.TokenError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path}: not a readable {file_format} file ({part}{reason})") from error


def fill(stream: BufferedIOBase, array: NDArray[Any]) -> int:
    """Read into a flat array; the number of bytes that were there. Memory is taken for these only: fresh pages of `np.empty` take none."""
    memory = array.view(np.uint8).data
    size = 0
    while size < len(memory) and (count := stream.readinto(memory[size : size + _CHUNK_BYTES])):
        size += count
    return size


# --- npy ----------------------------------------------------------------------------------------------------------------------------------


def _declared(stream: BufferedIOBase, size: int) -> tuple[tuple[int, ...], bool, np.dtype[np.generic], int]:
    """The shape, whether in Fortran's order, the type and the header's size of an npy file of `size` bytes.

    Raises `ValueError` for a header that is damaged, and for one that does not declare the bytes that are there.
    """
    start = stream.read(8)
    if len(start) < 8 or start[:6] != npy.MAGIC_PREFIX:
        raise ValueError("does not begin as an npy file")
    if (version := (start[6], start[7])) not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"is of npy version {version[0]}.{version[1]}")
    width = 2 if version == (1, 0) else 4
    length = int.from_bytes(stream.read(width), "little")
    if length > LARGEST_HEADER_BYTES:
        raise ValueError(f"its header declares {length} bytes of itself, more than {LARGEST_HEADER_BYTES}")
    text = stream.read(length)
    # versions differ in the width of the length and in the encoding of names of fields, which no array here has
    try:
        shape, fortran_order, dtype = npy.read_array_header_2_0(io.BytesIO(len(text).to_bytes(4, "little") + text))
    except Exception:  # it is an expression of Python, which can be damaged in any way
        raise ValueError("its header is damaged") from None
    if len(shape) > MOST_AXES or not all(type(axis) is int and 0 <= axis < 2**63 for axis in shape):
        raise ValueError("its header declares a shape that is none")
    if dtype.kind not in KINDS or not dtype.itemsize:
        raise ValueError(f"its header declares the type {dtype.kind!r}; arrays of numbers, truth values or text are read")
    if math.prod(max(1, axis) for axis in shape) > LARGEST_EMPTY and 0 in shape:
        raise ValueError(f"its header declares the shape {shape}: no numbers, along axes of which a mean or a sum would take all memory")
    declared, present = math.prod(shape) * dtype.itemsize, size - len(start) - width - length
    if declared != present:
        raise ValueError(f"its header declares {dtype.str} of shape {shape}, which is {declared} bytes, but {present} bytes are there")
    return shape, fortran_order, dtype, size - present


def read_npy(stream: BufferedIOBase, size: int) -> NDArray[Any]:
    """The array of an npy file of `size` bytes. Raises `ValueError`, also for an array of another kind than `KINDS`."""
    shape, fortran_order, dtype, _ = _declared(stream, size)
    array = np.empty(math.prod(shape), dtype)
    if (count := fill(stream, array)) != array.nbytes:
        raise ValueError(f"is cut: {count} of {array.nbytes} bytes are there")
    if stream.read(1):  # at its end an archive compares the checksum
        raise ValueError(f"has more than the {array.nbytes} bytes that its header declares")
    return array.reshape(shape[::-1]).T if fortran_order else array.reshape(shape)


def map_npy(path: Path) -> NDArray[Any]:
    """The array of an npy file, memory-mapped (copy on write), whatever its size. Raises `InputError`."""
    with reading(path, "npy"), open_regular(path) as file:
        shape, fortran_order, dtype, offset = _declared(file, os.fstat(file.fileno()).st_size)
        if 0 in shape:
            return np.empty(shape, dtype)
        return np.memmap(file, dtype, "c", offset, shape, "F" if fortran_order else "C")


# --- npz ----------------------------------------------------------------------------------------------------------------------------------


class _Archive(io.BufferedReader):
    """The file of an archive. zipfile reads the directory at once, whatever size it declares, and all else in small parts."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:  # zipfile reads so the end of the file
            size = LARGEST_DIRECTORY_BYTES
        if size > LARGEST_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"its directory has {size} bytes, expected at most {LARGEST_DIRECTORY_BYTES}")
        return super().read(size)


def read_npz(
    path: Path, required: Sequence[str] = (), optional: Sequence[str] | None = None, least: int = LEAST_UNPACKED_BYTES
) -> dict[str, NDArray[Any]]:
    """The arrays of an npz file by name: `required`, and of `optional` those that are there, by default all. Others are not read.

    Together the compressed ones may unpack to `unpacked_limit` of the file's size and `least`. Raises `InputError`.
    """
    arrays: dict[str, NDArray[Any]] = {}
    with reading(path, "npz"), _Archive(open_regular(path).detach()) as file, zipfile.ZipFile(file) as archive:
        size = os.fstat(file.fileno()).st_size
        members = _members(archive, size)
        for name in required:
            if name not in members:
                raise InputError(f"{path}: has no array {name!r}; it holds {named(members)}")
        limit, unpacked = unpacked_limit(size, least), 0
        for name in (*required, *(members if optional is None else optional)):
            if name in members and name not in arrays:
                with reading(path, "npz", f"array {name!r}: "):
                    unpacked += _checked(members[name])
                    if unpacked > limit:
                        raise ValueError(
                            f"with it the compressed arrays unpack to {unpacked} bytes, expected at most {limit} from a file of {size} "
                            "bytes; save the arrays without compression: numpy.savez"
                        )
                    with archive.open(members[name]) as stream:
                        arrays[name] = read_npy(cast(BufferedIOBase, stream), members[name].file_size)
    return arrays


def _checked(member: zipfile.ZipInfo) -> int:
    """How many bytes a compressed member unpacks to, 0 for one that is not compressed. Raises `ValueError` for one that cannot be read."""
    if member.flag_bits & 1:
        raise ValueError("is encrypted")
    if member.compress_type == zipfile.ZIP_DEFLATED:
        return member.file_size
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"is compressed by method {member.compress_type}; expected deflate, or none")
    if member.file_size != member.compress_size:
        raise ValueError(f"declares {member.file_size} bytes, but {member.compress_size} bytes are there")
    return 0


def named(names: Iterable[str]) -> str:
    """Names in a file, in one line, with control characters escaped."""
    return ", ".join(name if name.isprintable() else repr(name) for name in sorted(names)) or "nothing"


def _members(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    """The members of an npz of `size` bytes that are arrays, by the arrays' names. Raises `ValueError` unless each has its own bytes."""
    members: dict[str, zipfile.ZipInfo] = {}
    end = 0
    for member in sorted(archive.infolist(), key=lambda member: member.header_offset):
        name = member.filename
        if not 0 < len(name) <= LARGEST_NAME:
            raise ValueError(f"a member's name has {len(name)} characters, expected 1 to {LARGEST_NAME}")
        if member.header_offset < end:
            raise ValueError(f"the member {name!r} lies over another")
        end = member.header_offset + _LOCAL_HEADER_BYTES + member.compress_size
        if name.endswith(".npy") and members.setdefault(name.removesuffix(".npy"), member) is not member:
            raise ValueError(f"two members are called {name!r}")
    if end > size:
        raise ValueError("its members are longer than the file")
    return members


# --- safetensors --------------------------------------------------------------------------------------------------------------------------


def read_safetensors_texts(path: Path) -> dict[str, str]:
    """The texts in the header of a safetensors file, by name. Raises `InputError`; `read_safetensors` checks the rest of the file."""
    with reading(path, "safetensors"), open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > LARGEST_TEXTS_BYTES:
            raise ValueError(f"its header declares {length} bytes, expected at most {LARGEST_TEXTS_BYTES}")
        header = parse_json(file.read(length))
        texts = header.get("__metadata__", {}) if isinstance(header, dict) else None
        if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
            raise ValueError("its header holds no texts")
        return texts


def read_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a safetensors file by name. Raises `InputError`.

    The library compares shapes, offsets and the file's size with each other and limits the header to 100 MB, before it takes memory.
    """
    from safetensors.numpy import load_file

    with reading(path, "safetensors"):
        open_regular(path).close()  # the library would wait for a pipe
        try:
            return dict(load_file(path))
        except Exception as error:  # its own class, and those of types that numpy does not have
            raise ValueError(str(error)) from error
