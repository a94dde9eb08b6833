"""Named bytes in one append-only file, for parties that must outlive their processes.

    folder/log     a header with a checksum, then frames; a frame holds all changes that became durable together
    folder/lock    held by the one process that uses the folder

A frame is marker (16 random bytes of this file) | number (8) | length (8) | 8 bytes of SHA-256 of these | changes | 16 bytes of SHA-256 of
all that precedes in the frame. A change is kind (1) | length of the name (2) | length of the value (8) | name | value; integers are
big-endian. Frames are numbered from 0. The marker is secret, so that no value that a stranger sent looks like a frame.

Guarantee: after `commit` returns, its changes survive the end of the process and a loss of power; changes of one `add` are there together
or not at all. An incomplete last frame was never answered for: it is dropped. A damaged frame before a whole one is refused by name
(`DamagedLog`). Damage to the last frame alone looks like an incomplete write. After a failed write the log neither takes nor
gives values, because they may not be on the disk.
Reveals: the folder is as secret as what is kept in it. Source: ours; write-ahead logs after Gray and Reuter 1992, chapter 9.
"""

import contextlib
import io
import logging
import os
from collections.abc import Iterator, Mapping, MutableMapping
from hashlib import sha256
from pathlib import Path
from threading import Lock

from ..bounded_files import in_place, open_regular
from ..uncopied import uncopied

__all__ = ["DamagedLog", "FolderLog"]

_HEADER = b"CFLPLOG\x01"
_MARKER, _CHECK, _DIGEST = 16, 8, 16
_HEAD = _MARKER + 8 + 8 + _CHECK
_START = len(_HEADER) + _MARKER + _CHECK
_FRAME_BYTES = 1 << 26
"""A frame takes changes up to this size, and one `add` at least."""
_SLACK_BYTES = 1 << 24
"""The file is written anew when it has this much, and as much as is still needed, of changes that later ones replaced."""
_SEARCH_BYTES = 1 << 20

logger = logging.getLogger(__name__)


class DamagedLog(ValueError):
    """A log with a damaged frame before a whole one, or a file that is no log. The message is one line that names the file."""


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _flush(file: int) -> None:
    os.fsync(file)


def _replace(part: Path, path: Path) -> None:
    os.replace(part, path)


def _flush_folder(folder: Path) -> None:
    if os.name == "posix":  # makes a new name durable
        file = os.open(folder, os.O_RDONLY)
        try:
            _flush(file)
        finally:
            os.close(file)


def _headed(marker: bytes) -> bytes:
    """The first bytes of a file."""
    return _HEADER + marker + sha256(_HEADER + marker).digest()[:_CHECK]


def _frame(marker: bytes, number: int, body: bytes) -> bytes:
    head = marker + number.to_bytes(8, "big") + len(body).to_bytes(8, "big")
    frame = head + sha256(head).digest()[:_CHECK] + body
    return frame + sha256(frame).digest()[:_DIGEST]


def _packed(changes: Mapping[str, bytes | None]) -> tuple[bytes, list[tuple[str, int, int]]]:
    """Changes as bytes, and of each its name, where its value starts, and its length; length −1 for a name that is dropped."""
    pieces: list[bytes] = []
    places: list[tuple[str, int, int]] = []
    at = 0
    for name, value in changes.items():
        known = name.encode()
        length = 0 if value is None else len(value)
        pieces += (bytes([value is not None]), len(known).to_bytes(2, "big"), length.to_bytes(8, "big"), known, value or b"")
        at += 11 + len(known)
        places.append((name, at, length if value is not None else -1))
        at += length
    return b"".join(pieces), places


def _unpacked(body: bytes) -> list[tuple[str, int, int]]:
    """The places of changes in a whole frame's body."""
    places: list[tuple[str, int, int]] = []
    at = 0
    while at < len(body):
        known, length = int.from_bytes(body[at + 1 : at + 3], "big"), int.from_bytes(body[at + 3 : at + 11], "big")
        start = at + 11 + known
        places.append((body[at + 11 : start].decode(), start, length if body[at] else -1))
        at = start + length
    return places


@uncopied("two copies would each write to the file; open the folder again")
class FolderLog(MutableMapping[str, bytes]):
    """Values by name, in a folder. Setting or deleting an item is durable when it returns; `add` and `commit` do so for many changes.

    Raises:
        DamagedLog: see above. OSError: another process uses the folder, or it cannot be read or written.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = self._folder / "log"
        self._index: dict[str, tuple[int, int]] = {}
        self._added: list[dict[str, bytes | None]] = []
        self._fresh: dict[str, bytes | None] = {}
        self._mutex, self._writer = Lock(), Lock()
        self._failed, self._marker = False, b""
        self._live, self._used, self._number, self._end = 0, 0, 0, 0
        self.added, self.committed, self.frames = 0, 0, 0
        self._lock = _alone(self._folder / "lock")
        self._file = -1
        try:
            (self._folder / "log.part").unlink(missing_ok=True)
            if not self.path.exists():
                self._rewrite()
            else:
                self._file = in_place(str(self.path), os.O_RDWR)
                self._read()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"FolderLog({str(self.path)!r})"

    def close(self) -> None:
        """Let go of the folder. What was added and not committed is lost."""
        with self._writer, self._mutex:  # not while another thread writes
            self._failed = True
            for file in (self._file, self._lock):
                if file >= 0:
                    with contextlib.suppress(OSError):
                        os.close(file)
            self._file = self._lock = -1

    def _check(self) -> None:
        """Raises `OSError` after a failed write: values that were added are perhaps not on the disk, so nothing may follow from them."""
        if self._failed:
            raise OSError(f"{self.path}: is closed, or a write failed; start again")

    # --- values

    def add(self, changes: Mapping[str, bytes | None]) -> None:
        """Changes that become durable together, at the next `commit`; None drops a name. They are read back from now on."""
        with self._mutex:
            self._check()
            self._added.append(dict(changes))
            self._fresh |= changes
            self.added += 1

    def commit(self) -> None:
        """Make all that was added durable. Raises `OSError`, then and ever after, if that fails."""
        with self._writer:
            with self._mutex:
                self._check()
                added, self._added, upto = self._added, [], self.added
            try:
                self._store(added)
            except BaseException:
                self._failed = True
                raise
            self.committed = upto

    def _store(self, added: list[dict[str, bytes | None]]) -> None:
        while added:
            batch: dict[str, bytes | None] = {}
            size = 0
            while added and size < _FRAME_BYTES:
                changes = added.pop(0)
                batch |= changes
                size += sum(len(value or b"") for value in changes.values())
            self._append(batch)
        if self._used - self._live > self._live + _SLACK_BYTES:
            self._rewrite()

    def __getitem__(self, name: str) -> bytes:
        with self._mutex:
            self._check()
            if name in self._fresh:
                value = self._fresh[name]
                if value is None:
                    raise KeyError(name)
                return value
            start, length = self._index[name]
            data = os.pread(self._file, length, start)
        if len(data) != length:
            raise OSError(f"{self.path}: became shorter")
        return data

    def __setitem__(self, name: str, value: bytes) -> None:
        self.add({name: value})
        self.commit()

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        self.add({name: None})
        self.commit()

    def __contains__(self, name: object) -> bool:
        with self._mutex:
            self._check()
            return self._fresh[name] is not None if name in self._fresh else name in self._index

    def __iter__(self) -> Iterator[str]:
        with self._mutex:
            self._check()
            names = [name for name in self._index if name not in self._fresh]
            names += [name for name, value in self._fresh.items() if value is not None]
        return iter(names)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    # --- the file

    def _append(self, changes: Mapping[str, bytes | None]) -> None:
        body, places = _packed(changes)
        start = self._end + _HEAD
        frame = _frame(self._marker, self._number, body)
        _write(self._file, frame)
        _flush(self._file)
        with self._mutex:
            self._enter(places, start, len(frame))
            for name, value in changes.items():
                if name in self._fresh and self._fresh[name] is value:
                    del self._fresh[name]
        self.frames += 1

    def _enter(self, places: list[tuple[str, int, int]], start: int, size: int) -> None:
        """Note a whole frame. `start`: of its body."""
        for name, at, length in places:
            _, before = self._index.pop(name, (0, 0))
            self._live -= before
            if length >= 0:
                self._index[name] = start + at, length
                self._live += length
        self._used += size
        self._end += size
        self._number += 1

    def _rewrite(self) -> None:
        """Write a new file with what is still needed, complete before it takes the place of the old one."""
        part = self._folder / "log.part"
        marker = os.urandom(_MARKER)
        file = in_place(str(part), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _write(file, _headed(marker))
            index: dict[str, tuple[int, int]] = {}
            end, number, live = _START, 0, 0
            for name, (start, length) in self._index.items():
                body, [(_, at, _)] = _packed({name: os.pread(self._file, length, start)})
                frame = _frame(marker, number, body)
                _write(file, frame)
                index[name] = end + _HEAD + at, length
                end, number, live = end + len(frame), number + 1, live + length
            _flush(file)
            _replace(part, self.path)
            _flush_folder(self._folder)
        except BaseException:
            os.close(file)
            raise
        with self._mutex:
            old, self._file, self._marker = self._file, file, marker
            self._index, self._live, self._used, self._number, self._end = index, live, live, number, end
        if old >= 0:
            os.close(old)

    def _read(self) -> None:
        """Find all values, and drop an incomplete last frame."""
        with open_regular(self.path) as file:
            head = file.read(_START)
            self._marker = head[len(_HEADER) : _START - _CHECK]
            if head != _headed(self._marker):
                raise DamagedLog(f"{self.path}: is no log, or its first bytes are damaged; restore the folder")
            size = os.fstat(file.fileno()).st_size
            self._end = _START
            while (length := self._length(head := file.read(_HEAD), size)) is not None:
                body, digest = file.read(length), file.read(_DIGEST)
                if sha256(head + body).digest()[:_DIGEST] != digest:
                    break
                self._enter(_unpacked(body), self._end + _HEAD, _HEAD + length + _DIGEST)
            if self._end < size:
                file.seek(self._end + 1)
                if self._later(file):
                    raise DamagedLog(
                        f"{self.path}: record {self._number} at byte {self._end} is damaged, and a later one is whole; restore the folder"
                    )
                logger.warning("%s: dropped an incomplete last record of %d bytes", self.path, size - self._end)
        os.ftruncate(self._file, self._end)
        os.lseek(self._file, self._end, os.SEEK_SET)
        _flush(self._file)

    def _length(self, head: bytes, size: int) -> int | None:
        """The length of the next frame's changes, by its first bytes; None if they are damaged or the frame is longer than the file."""
        if not self._is_head(head) or int.from_bytes(head[_MARKER : _MARKER + 8], "big") != self._number:
            return None
        length = int.from_bytes(head[_MARKER + 8 : _MARKER + 16], "big")
        return length if self._end + _HEAD + length + _DIGEST <= size else None

    def _is_head(self, head: bytes) -> bool:
        known = head[: _HEAD - _CHECK]
        return len(head) == _HEAD and head.startswith(self._marker) and sha256(known).digest()[:_CHECK] == head[_HEAD - _CHECK :]

    def _later(self, file: io.BufferedReader) -> bool:
        """Whether another frame begins in the rest of the file."""
        rest = b""
        while more := file.read(_SEARCH_BYTES):
            rest += more
            at = -1
            while (at := rest.find(self._marker, at + 1)) >= 0:
                if self._is_head(rest[at : at + _HEAD]):
                    return True
            rest = rest[-_HEAD:]
        return False


def _alone(path: Path) -> int:
    """A file that one process holds. Raises `OSError` if another does."""
    file = in_place(str(path), os.O_RDWR | os.O_CREAT, 0o600)
    if os.name == "posix":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise OSError(f"{path.parent}: another process uses this folder") from None
    return file
