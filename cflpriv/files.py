"""Atomic and append-only files: what is written survives a kill, a full disk and a power cut."""

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .errors import InputError
from .protocols.bounded_files import in_place
from .streams import encode_readably

__all__ = ["PRIVATE", "append", "copy_examples", "sync_folder", "toml_text", "write_arrays", "write_atomically", "write_packed"]

PRIVATE, READABLE = 0o600, 0o644
"""Who may read a file: its owner alone, where it has secrets, updates, or what was made of them; or everybody on the machine. A folder of
private files is made with the mode 0o700."""

# the names of the safetensors format
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def write_atomically(path: Path, content: str | bytes, mode: int = READABLE) -> None:
    """Write a file atomically: a reader sees the old or the new content, never a part. Raises OSError."""
    data = encode_readably(content) if isinstance(content, str) else content
    _replace(path, lambda out: out.write(data), mode)


def toml_text(tree: Mapping[str, Any]) -> str:
    """Nested mappings as TOML, which is UTF-8. Raises `InputError` naming a key whose value is not: the path of a file named in Latin-1."""
    import tomli_w

    for name, value in _strings(tree):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise InputError(f"{name} = {value!r}: is not UTF-8, as a configuration is; rename the file or its folder") from None
    return tomli_w.dumps(tree)


def _strings(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """All strings of nested mappings and lists, each with the names of the keys that lead to it."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item, name)


def write_packed(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays, by name, as a private npz file, whole or not at all. Raises OSError."""
    packed = BytesIO()
    np.savez(packed, allow_pickle=False, **arrays)
    write_atomically(path, packed.getvalue(), PRIVATE)


def write_arrays(path: Path, arrays: Mapping[str, Any], mode: int = PRIVATE) -> tuple[str, int]:
    """Write arrays, by name, as safetensors, whole or not at all; the file's BLAKE2b digest and its size in bytes.

    Values made on demand are made one at a time, so memory never holds two of them. Raises OSError.
    """
    digest, size = blake2b(digest_size=16), 0

    def write(out: BinaryIO) -> None:
        nonlocal size

        def put(data: Any) -> None:
            nonlocal size
            digest.update(data)
            size += out.write(data)

        header: dict[str, Any] = {}
        start = 0
        for name in sorted(arrays):
            value = arrays[name] if hasattr(arrays[name], "dtype") else np.asarray(arrays[name])
            stop = start + int(np.prod(value.shape, dtype=int)) * value.dtype.itemsize
            header[name] = {"dtype": _DTYPES[value.dtype.name], "shape": list(value.shape), "data_offsets": [start, stop]}
            start = stop
        words = json.dumps(header, separators=(",", ":")).encode()
        words += b" " * (-len(words) % 8)
        put(len(words).to_bytes(8, "little"))
        put(words)
        for name in sorted(arrays):
            put(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)

    _replace(path, write, mode)
    return digest.hexdigest(), size


def _replace(path: Path, write: Any, mode: int) -> None:
    part = path.with_name(path.name + ".part")
    try:
        with os.fdopen(in_place(str(part), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as out:
            write(out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None
    sync_folder(path.parent)


def append(path: Path, text: str, mode: int = READABLE) -> None:
    """Add to a file, or make one with this mode, and see it onto the disk. If writing fails, the file is truncated to its earlier size and
    OSError is raised."""
    data = encode_readably(text)
    try:
        with open(path, "ab", buffering=0, opener=lambda name, flags: in_place(name, flags, mode)) as out:
            status = os.fstat(out.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "is a pipe or a device, not a file", str(path))
            try:
                while data:
                    data = data[out.write(data) :]
                os.fsync(out.fileno())
            except OSError:
                with suppress(OSError):
                    out.truncate(status.st_size)
                raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def sync_folder(folder: Path) -> None:
    """See a folder's entries onto the disk, where the system can."""
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def copy_examples(folder: Path) -> int:
    """Write the examples that come with the package into a new folder; how many files. Raises OSError, `FileExistsError` too.

    Where not all can be written, the folder is removed.
    """
    here = Path(__file__).parent
    source = here / "examples" if (here / "examples").is_dir() else here.parent / "examples"  # in a checkout they lie beside the package
    files = [path.relative_to(source) for path in sorted(source.rglob("*")) if path.is_file()]
    files = [path for path in files if "__pycache__" not in path.parts and path.name != "own.csv"]
    folder.mkdir(parents=True)
    try:
        for path in files:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / path, folder / path)  # those of an installation may be read-only
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return len(files)
