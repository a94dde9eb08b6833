"""Resume an interrupted run from its last checkpoint; rows written after that are moved aside.

A round that was cut short is done again. What it had already written (rows, messages) is moved to `interrupted/N/` in the run folder, N
being the number of the interruption: those messages did leave their senders, so they stay on record, but they are not part of the run's
transcript, and no attack reads them. An audit of the earlier state moves there, too: it does not describe the resumed run. A charge to a
privacy ledger is never taken back. `resumes.jsonl` has one line for each time a run was taken up.

Under cryptographic randomness a resumed run uses no transform and no mask key a second time: its turns start in a range of their own.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ...contract.transcript import cut_transcript
from ...data.datasets import DIRECTORY_VARIABLE
from ...errors import InputError
from ...files import append, write_atomically
from ...protocols.bounded_files import LARGEST_TABLE_BYTES, in_place, parse_json, read_bytes, read_json, read_text
from ...protocols.entropy import Entropy
from ..config.config import Config, load_config, read_tree
from ..config.private_training import DerivedFloat
from ..trust import idle_code
from .checkpoint import Checkpoint, latest, load_checkpoint

__all__ = [
    "LOCK", "Counted", "check_same_config", "data_directory_of", "held", "holds_nothing", "kept_rows", "last_checkpoint", "locked",
    "note_resume", "put_aside", "put_audit_aside",
]  # fmt: skip


class Counted:
    """A source of randomness that counts the bytes it gave, so that a resumed run under test entropy can go on after them."""

    def __init__(self, source: Entropy) -> None:
        self._source, self.drawn = source, 0

    def __call__(self, count: int) -> bytes:
        self.drawn += count
        return self._source(count)

    def skip(self, drawn: int) -> None:
        """Give nothing of what the run drew before: `drawn` bytes, or as many more than have been given by now."""
        self(max(0, drawn - self.drawn))


def check_same_config(config: Config, folder: Path) -> None:
    """Refuse another configuration, but for device and callbacks. Raises `InputError` naming the first key that differs.

    The code of `config` ran already. Code that only the folder names does not run; it is an error.
    """
    path = folder / "config.toml"
    if idle := idle_code(path, read_tree(path)):
        raise InputError(idle)
    old, new = (_flat(asdict(settings)) for settings in (load_config(path, trust=False), config))
    by_rule = {key for key, value in new.items() if isinstance(value, DerivedFloat)}  # the folder has what the rule gave
    for key in sorted({*old, *new} - by_rule):
        if old.get(key) != new.get(key) and key not in ("run.device", "run.callbacks"):
            was, now = (repr(settings[key]) if settings.get(key) is not None else "not set" for settings in (old, new))
            raise InputError(f"{key} is {now}, but {folder / 'config.toml'} has {was}; a resumed run keeps its configuration")


def data_directory_of(folder: Path) -> Path | None:
    """Where the run in a folder found its data sets, for who names no other place (--data-dir, CFLPRIV_DATA); None if that is gone."""
    if os.environ.get(DIRECTORY_VARIABLE):
        return None
    with suppress(OSError, ValueError, AttributeError):
        place = read_json(folder / "environment.json").get("data_directory")
        return Path(place) if isinstance(place, str) and Path(place).is_dir() else None
    return None


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def last_checkpoint(folder: Path) -> Checkpoint | None:
    """The last complete checkpoint of a run folder, verified; None where the run ended before its first."""
    name = latest(folder / "checkpoints")
    return None if name is None else load_checkpoint(folder / "checkpoints", name)


def note_resume(folder: Path, checkpoint: Checkpoint | None) -> int:
    """Write down, before anything else happens, that the run is taken up again; how many times that has been, this one included."""
    path = folder / "resumes.jsonl"
    number = 1 + (read_bytes(path, LARGEST_TABLE_BYTES).count(b"\n") if path.is_file() else 0)
    append(path, json.dumps({"number": number, "from": None if checkpoint is None else checkpoint.path.stem}) + "\n")
    return number


def put_aside(folder: Path, number: int, rows: int, messages: int) -> dict[str, int]:
    """Cut rounds and transcript back to `rows` and `messages`; what came later is moved to `interrupted/NUMBER/`. How many lines moved."""
    aside = folder / "interrupted" / str(number)
    path = folder / "rounds.jsonl"
    lines = read_bytes(path, LARGEST_TABLE_BYTES).splitlines(keepends=True) if path.is_file() else []
    if lines[rows:]:
        aside.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(aside / "rounds.jsonl", b"".join(lines[rows:]).decode("utf-8", errors="replace"))
        with open(path, "r+b", opener=in_place) as out:
            out.truncate(sum(map(len, lines[:rows])))
    moved = cut_transcript(folder / "transcript", messages, aside) if (folder / "transcript").is_dir() else 0
    return {"rounds": len(lines[rows:]), "messages": moved}


def put_audit_aside(folder: Path, number: int) -> None:
    """Move what an audit left to `interrupted/NUMBER/`."""
    aside = folder / "interrupted" / str(number)
    for name in ("audit.json", "audit"):
        if (folder / name).exists():
            aside.mkdir(parents=True, exist_ok=True, mode=0o700)
            (folder / name).rename(aside / name)


def kept_rows(folder: Path, count: int) -> list[dict[str, Any]]:
    """The first `count` rows of rounds.jsonl. Raises `InputError` naming the line that is missing or damaged."""
    path = folder / "rounds.jsonl"
    lines = read_text(path, LARGEST_TABLE_BYTES, "replace").splitlines() if path.is_file() else []
    rows = []
    for number in range(count):
        try:
            rows.append(parse_json(lines[number]))
        except (IndexError, ValueError):
            raise InputError(f"{path}: line {number + 1} of the {count} before the checkpoint is missing or damaged") from None
    return rows


LOCK = ".lock"


@contextmanager
def held(lock: Path, seconds: float = 0.0, waiting: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Hold an empty file for this process alone, after waiting up to `seconds`; whether no other process has it.

    `waiting` is called before a wait. In a folder that cannot be written nothing is locked: no process can change it.
    """
    file, ours = FileLock(lock), True
    try:
        try:
            file.acquire(timeout=0.0)
        except Timeout:
            if seconds > 0:
                waiting()
            file.acquire(timeout=seconds)
    except Timeout:
        ours = False
    except OSError:
        if os.access(lock.parent, os.W_OK):
            raise
    try:
        yield ours
    finally:
        file.release()


@contextmanager
def locked(folder: Path, seconds: float = 0.0, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a run folder for this process alone, by the file `LOCK` in it, as `held`. Raises `InputError` if another process has it."""
    with held(folder / LOCK, seconds, waiting) as ours:
        if not ours:
            raise InputError(f"{folder}: another process is running this experiment, or auditing it")
        yield


def holds_nothing(folder: Path) -> bool:
    """Whether a folder is empty but for what a run leaves that was killed at once: unfinished files and the lock."""
    return folder.is_dir() and all(path.name == LOCK or path.name.endswith(".part") for path in folder.iterdir())
