"""Digests of a run folder: one of every file that a report, an audit, `--resume` or `cflpriv export` reads, in `digests.json`.

Digests show accidents, mixed-up folders and edits. Whoever edits a file can compute the digests afresh, so a run prints the digest of
`digests.json` at its end: a copy of that digest kept in another place detects such an edit as well.
"""

import json
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from functools import partial
from hashlib import blake2b, file_digest
from pathlib import Path

from ..errors import InputError
from ..files import write_atomically
from ..protocols.bounded_files import open_regular, read_bytes, read_json

__all__ = [
    "FILE", "OF_AUDITS", "OF_CHECKPOINTS", "OF_RUN", "change_of", "changed_files", "digest_of", "found_digests", "record_digests", "sealed",
]  # fmt: skip

FILE = "digests.json"
OF_RUN = (
    "config.toml", "environment.json", "rounds.jsonl", "summary.json", "measured.json", "evidence.npz", "ledger.json", "resumes.jsonl",
    "stages.jsonl", "transcript/messages.jsonl", "secrets/*.json",
)  # fmt: skip
"""What a run leaves that reports and audits read. The transcript's headers hold the digests of all payloads."""
OF_AUDITS = ("audit.json", "audit/*", "active_audit.json", "active_audit.txt")
"""What audits add to it."""
OF_CHECKPOINTS = ("checkpoints/[!.]*",)
"""What `--resume` and `cflpriv export` read; hidden files are a desktop's or a file system's.

A folder may be handed on without it, because it holds what clients keep to themselves.
"""


def record_digests(folder: Path, patterns: Sequence[str] = (*OF_RUN, *OF_CHECKPOINTS, *OF_AUDITS)) -> str:
    """Record the digests of the files that match `patterns`; other files keep their recorded digests. The digest of the folder."""
    known = {name: digest for name, digest in _known(folder).items() if not any(fnmatch(name, pattern) for pattern in patterns)}
    write_atomically(folder / FILE, json.dumps(dict(sorted((known | dict(found_digests(folder, patterns))).items())), indent=1) + "\n")
    return digest_of(folder)


def digest_of(folder: Path) -> str:
    """The digest of a run folder, as 32 hexadecimal digits; empty for one that is not complete."""
    path = folder / FILE
    return blake2b(read_bytes(path), digest_size=16).hexdigest() if path.is_file() else ""


def changed_files(folder: Path, patterns: Sequence[str] = (*OF_RUN, *OF_AUDITS)) -> list[str]:
    """Each file matching `patterns` that is missing, changed, or was not there when the run or its audit ended, for people."""
    if not (folder / FILE).is_file():
        return [f"{folder / FILE}: is missing; the run is not complete, or an earlier version made it"]
    try:
        known = sealed(folder, patterns)
    except InputError as error:
        return [str(error)]
    computed = dict(found_digests(folder, patterns))
    words = []
    for name in sorted(known | computed):
        if name not in computed:
            words.append(f"{folder / name}: is missing; the run wrote it")
        elif computed[name] != known.get(name):
            words.append(change_of(folder / name))
    return words


def change_of(path: Path) -> str:
    return (
        f"{path}: is not as the run left it; it was changed, is of another run, or a resumed run ended before its last round "
        "(then finish it with --resume)"
    )


def sealed(folder: Path, patterns: Sequence[str] = (*OF_RUN, *OF_AUDITS)) -> dict[str, str]:
    """The digests that were written down of the files that match `patterns`. Raises `InputError` for a table that is damaged."""
    return {name: digest for name, digest in _known(folder).items() if any(fnmatch(name, pattern) for pattern in patterns)}


def _known(folder: Path) -> dict[str, str]:
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        known = read_json(path)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is damaged ({error})") from None
    if not isinstance(known, dict) or not all(isinstance(digest, str) for digest in known.values()):
        raise InputError(f"{path}: is no table of digests")
    return known


def found_digests(folder: Path, patterns: Sequence[str]) -> Iterator[tuple[str, str]]:
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            if path.is_file() and path.suffix != ".part":
                with open_regular(path) as data:
                    yield path.relative_to(folder).as_posix(), file_digest(data, partial(blake2b, digest_size=16)).hexdigest()
