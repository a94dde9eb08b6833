"""Files in folders that another person may have made. Reading: regular files only, and no more bytes than a stated limit.

A pipe is not waited for, a device is not read, and a file that is too large is refused by its size, before it is read. Writing
(`in_place`): through no link, which could lead to any file of the user.
"""

import errno
import io
import json
import os
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = [
    "LARGEST_DOCUMENT_BYTES", "LARGEST_TABLE_BYTES", "UnusableFile", "in_place", "open_regular", "parse_json", "read_bytes", "read_json",
    "read_text", "read_toml",
]  # fmt: skip

LARGEST_DOCUMENT_BYTES = 2**28
"""The largest file of JSON or TOML, which is parsed as a whole. Parsed JSON takes up to about 25 times the memory of its text."""
LARGEST_TABLE_BYTES = 2**31
"""The largest file of lines, such as a transcript's headers."""


class UnusableFile(OSError):
    """A path that leads to no regular file, or to one that is too large. The message is one line that names the path."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def open_regular(path: str | Path) -> io.BufferedReader:
    """Open a regular file, or a link to one, for reading. Raises OSError: `UnusableFile` for a pipe, a socket or a device."""
    file: io.BufferedReader = io.BufferedReader(io.FileIO(path, opener=_without_waiting))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise UnusableFile(errno.EINVAL, "is a pipe or a device, not a file", str(path))
    return file


def _without_waiting(path: str, flags: int) -> int:
    """Open a path. Without O_NONBLOCK, which Windows does not have, a pipe is waited for until another process writes into it."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def in_place(path: str, flags: int, mode: int = 0o666) -> int:
    """An `opener` of files to be written. Raises OSError: `UnusableFile` for a link. Windows knows neither flag."""
    try:
        return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0), mode)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UnusableFile(errno.ELOOP, "is a link, and nothing is written through one", str(path)) from None


def read_bytes(path: str | Path, limit: int = LARGEST_DOCUMENT_BYTES) -> bytes:
    """A whole file of at most `limit` bytes. Raises OSError: `UnusableFile` for a larger one and for what is no regular file."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise UnusableFile(errno.EFBIG, f"has {size} bytes, expected at most {limit}", str(path))
        return file.read(size)


def read_text(path: str | Path, limit: int = LARGEST_DOCUMENT_BYTES, errors: str = "strict") -> str:
    """A UTF-8 file of at most `limit` bytes, each end of line as a line feed, without a byte-order mark.

    Raises OSError as `read_bytes`, and `UnicodeDecodeError`.
    """
    return read_bytes(path, limit).decode("utf-8-sig", errors).replace("\r\n", "\n").replace("\r", "\n")


def parse_json(text: str | bytes) -> Any:
    """What a text in JSON holds. Raises `ValueError` for what is no JSON or is nested too deeply."""
    return _parsed(json.loads, text)


def read_json(path: str | Path) -> Any:
    """What a JSON file holds. Raises OSError as `read_bytes`, and `ValueError` as `parse_json`."""
    return parse_json(read_text(path))


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises OSError as `read_bytes`, and `ValueError` for what is no TOML or is nested too deeply."""
    tree: dict[str, Any] = _parsed(tomllib.loads, read_text(path))
    return tree


def _parsed(parse: Callable[[Any], Any], text: str | bytes) -> Any:
    try:
        return parse(text)
    except RecursionError as error:
        raise ValueError(str(error)) from None
