"""What a client keeps between two messages, as named bytes.

Every message may find a new process, so all of a client's state goes through a store: held values, memory, protocol machines, mask keys.
It is as secret as the client's data.
"""

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from hashlib import sha256
from pathlib import Path
from threading import RLock
from typing import Protocol

from filelock import FileLock

__all__ = ["DiskStore", "MemoryStore", "Store"]


class Store(Protocol):
    """Named bytes. `put` and `drop` are durable when they return.

    Inside `alone()` nobody else works on the same bytes: what is read, changed and written back (such as what was spent) is not lost when
    two runs, or two processes started by mistake with one client's settings, ask at once. Whoever comes second waits.
    """

    def get(self, name: str) -> bytes | None: ...

    def put(self, name: str, value: bytes) -> None: ...

    def drop(self, name: str) -> None: ...

    def names(self) -> Iterable[str]: ...

    def alone(self) -> AbstractContextManager[object]: ...


class MemoryStore(dict[str, bytes]):
    """A store in this process, for tests and for transports that keep clients alive."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = RLock()

    def alone(self) -> AbstractContextManager[object]:
        return self._lock

    def put(self, name: str, value: bytes) -> None:
        self[name] = value

    def drop(self, name: str) -> None:
        self.pop(name, None)

    def names(self) -> Iterable[str]:
        return tuple(self)


class DiskStore:
    """One file a name in a folder that only its owner can read; each file is the old one or the new one, never half of it."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def alone(self) -> AbstractContextManager[object]:
        return FileLock(self._folder / "alone.lock", mode=0o600)

    def _path(self, name: str) -> Path:
        return self._folder / sha256(name.encode()).hexdigest()[:40]

    def get(self, name: str) -> bytes | None:
        try:
            data = self._path(name).read_bytes()
        except FileNotFoundError:
            return None
        head, _, value = data.partition(b"\n")
        return value if head in (_line(name), name.encode()) else None  # the second as earlier versions wrote it

    def put(self, name: str, value: bytes) -> None:
        path = self._path(name)
        part = path.with_suffix(".part")
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(_line(name) + b"\n" + value)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        if os.name == "posix":  # the rename itself must not be lost either
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def drop(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def names(self) -> Iterable[str]:
        found = []
        for path in self._folder.iterdir():
            if path.suffix not in (".part", ".lock"):
                with path.open("rb") as file:
                    line = file.readline().rstrip(b"\n")
                names = (line.decode(how, errors="replace") for how in ("unicode_escape", "utf-8"))
                found += [name for name in dict.fromkeys(names) if self._path(name) == path]
        return tuple(found)


def _line(name: str) -> bytes:
    """A name as one line. Servers choose some, and one that ends in the middle would be taken for another: a mark that is never found."""
    return name.encode("unicode_escape")
