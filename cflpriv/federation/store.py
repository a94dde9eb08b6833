"""What a client keeps between messages, by name.

A new process may handle the next message, so all of a client's state is in a store: held values, memory, protocol machines, mask keys. The
store is as secret as the client's data. `ObjectStore` keeps live objects for clients of this process, the others keep bytes.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from hashlib import sha256
from pathlib import Path
from threading import RLock
from typing import Any, Protocol, TypeVar

from filelock import FileLock

__all__ = ["ByteStore", "DiskStore", "MemoryStore", "ObjectStore", "Store"]

T = TypeVar("T")


class Store(Protocol):
    """Named bytes, and named values that are kept as bytes or as objects. `put`, `keep` and `drop` are durable when they return.

    `load` returns the kept object, or a new one that `read` makes of its bytes. A caller that changes it must keep it again.

    `alone()` locks the store, so that no concurrent request loses what is read, changed and written back, such as the ledger: not from a
    second run, nor from a second process started by mistake with one client's settings.
    """

    def get(self, name: str) -> bytes | None: ...

    def put(self, name: str, value: bytes) -> None: ...

    def load(self, name: str, read: Callable[[bytes], T]) -> T | None: ...

    def keep(self, name: str, value: T, write: Callable[[T], bytes]) -> None: ...

    def drop(self, name: str) -> None: ...

    def names(self) -> Iterable[str]: ...

    def alone(self) -> AbstractContextManager[object]: ...


class ObjectStore:
    """Live objects, for clients that stay in this process. `dumped` encodes one; `ObjectStore(bytes by name)` restores them."""

    def __init__(self, dumped: Mapping[str, bytes] | None = None) -> None:
        self._values: dict[str, Any] = dict(dumped or {})
        self._writers: dict[str, Callable[[Any], bytes]] = {}

    def alone(self) -> AbstractContextManager[object]:
        return _NOBODY

    def get(self, name: str) -> bytes | None:
        return self._values.get(name)

    def put(self, name: str, value: bytes) -> None:
        self._values[name] = value
        self._writers.pop(name, None)

    def load(self, name: str, read: Callable[[bytes], T]) -> T | None:
        value: Any = self._values.get(name)
        return value if value is None or name in self._writers else read(value)

    def keep(self, name: str, value: T, write: Callable[[T], bytes]) -> None:
        self._values[name], self._writers[name] = value, write

    def drop(self, name: str) -> None:
        self._values.pop(name, None)
        self._writers.pop(name, None)

    def names(self) -> Iterable[str]:
        return tuple(self._values)

    def dumped(self, name: str) -> bytes:
        """What is kept under a name, as bytes."""
        value = self._values[name]
        data: bytes = self._writers[name](value) if name in self._writers else value
        return data


_NOBODY = nullcontext()


class ByteStore:
    """`load` and `keep` over `get` and `put`."""

    def load(self: Any, name: str, read: Callable[[bytes], T]) -> T | None:
        data = self.get(name)
        return None if data is None else read(data)

    def keep(self: Any, name: str, value: T, write: Callable[[T], bytes]) -> None:
        self.put(name, write(value))


class MemoryStore(ByteStore, dict[str, bytes]):
    """Bytes in this process, for tests and for transports that keep clients alive."""

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


class DiskStore(ByteStore):
    """One file for each name, in a folder that only its owner can read. Files are replaced atomically."""

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
        return value if head in (_line(name), name.encode()) else None  # earlier versions wrote the second form

    def put(self, name: str, value: bytes) -> None:
        path = self._path(name)
        part = path.with_suffix(".part")
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(_line(name) + b"\n" + value)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        if os.name == "posix":  # makes the rename durable
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def drop(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def names(self) -> Iterable[str]:
        kept = []
        for path in self._folder.iterdir():
            if path.suffix not in (".part", ".lock"):
                with path.open("rb") as file:
                    line = file.readline().rstrip(b"\n")
                names = (line.decode(how, errors="replace") for how in ("unicode_escape", "utf-8"))
                kept += [name for name in dict.fromkeys(names) if self._path(name) == path]
        return tuple(kept)


def _line(name: str) -> bytes:
    """A name as one line. Servers choose some names, and a line break in one must not make it look like another."""
    return name.encode("unicode_escape")
