"""Verify a run folder: whether its files are unchanged, and whether its figures follow from its rows.

`digests.json` holds a digest of every file that a report, an audit, `--resume` or `cflpriv export` reads. It shows accidents, mixed-up
folders and edits. Whoever edits a file can compute the digests afresh, so a run prints the digest of `digests.json` at its end: a copy of
it kept in another place detects that as well.

Figures of the summary that follow from the rounds, the transcript or the clustering are computed again.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from glob import escape
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

import numpy as np

from ..clustering.scores import ari
from ..contract.transcript import Message, read_transcript, what_was_kept
from ..errors import InputError
from ..files import write_atomically
from ..protocols.bounded_files import LARGEST_TABLE_BYTES, open_regular, parse_json, read_bytes, read_json, read_text
from .loop import LAST, MEASURED

__all__ = ["OF_AUDITS", "OF_CHECKPOINTS", "OF_RUN", "Verified", "changed_files", "digest_of", "seal", "sealed", "verify"]

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


@dataclass(frozen=True)
class Verified:
    """What `verify` found: the digest of the run folder, each problem, for people, and what could not be checked."""

    digest: str
    problems: tuple[str, ...]
    unchecked: str = ""


def seal(folder: Path, what: Sequence[str] = (*OF_RUN, *OF_CHECKPOINTS, *OF_AUDITS)) -> str:
    """Write down what the files are now that match `what`, others as they were written down; the digest of the folder."""
    known = {name: digest for name, digest in _known(folder).items() if not any(fnmatch(name, pattern) for pattern in what)}
    write_atomically(folder / FILE, json.dumps(dict(sorted((known | dict(_found(folder, what))).items())), indent=1) + "\n")
    return digest_of(folder)


def digest_of(folder: Path) -> str:
    """The digest of a run folder, as 32 hexadecimal digits; empty for one that is not complete."""
    path = folder / FILE
    return blake2b(read_bytes(path), digest_size=16).hexdigest() if path.is_file() else ""


def changed_files(folder: Path, what: Sequence[str] = (*OF_RUN, *OF_AUDITS)) -> list[str]:
    """Each file among `what` that is missing, changed, or was not there when the run or its audit ended, for people."""
    if not (folder / FILE).is_file():
        return [f"{folder / FILE}: is missing; the run is not complete, or an earlier version made it"]
    try:
        known = sealed(folder, what)
    except InputError as error:
        return [str(error)]
    found = dict(_found(folder, what))
    words = []
    for name in sorted(known | found):
        if name not in found:
            words.append(f"{folder / name}: is missing; the run wrote it")
        elif found[name] != known.get(name):
            words.append(_changed(folder / name))
    return words


def _changed(path: Path) -> str:
    return (
        f"{path}: is not as the run left it; it was changed, is of another run, or a resumed run ended before its last round "
        "(then finish it with --resume)"
    )


def _checkpoints(folder: Path) -> tuple[list[str], list[str]]:
    """Each checkpoint file that was changed, and those that cannot be checked: for people."""
    try:
        known = sealed(folder, OF_CHECKPOINTS)
    except InputError:
        return [], []  # `changed_files` says so
    present = [path.relative_to(folder).as_posix() for path in folder.glob(*OF_CHECKPOINTS)]
    if not known:
        return [], ["checkpoints/ has no digests; an earlier version made the run, or it is not complete"] if present else []
    found = dict(_found(folder, [escape(name) for name in present if os.access(folder / name, os.R_OK)]))
    absent = [f"{name} is missing or cannot be read" for name in sorted(known) if name not in found]
    return [_changed(folder / name) for name, digest in sorted(found.items()) if known.get(name) != digest], absent


def verify(folder: Path, *, payloads: bool = True) -> Verified:
    """Check a run folder, with `payloads` also those of the transcript, and the checkpoints. `InputError` for a folder that is none."""
    if not (folder / "config.toml").is_file():
        raise InputError(f"{folder}: is not a run folder (no config.toml)")
    messages, damage = list[Message](), list[str]()
    if payloads and (folder / "transcript").is_dir():
        try:
            messages = read_transcript(folder / "transcript")
        except InputError as error:
            damage.append(str(error))
    counted = len(messages) if payloads and not damage else None
    changed, unchecked = _checkpoints(folder) if payloads else ([], [])
    problems = (*changed_files(folder), *changed, *damage, *_contradictions(folder, counted))
    return Verified(digest_of(folder), problems, "; ".join([*filter(None, [what_was_kept(messages)]), *unchecked]))


def sealed(folder: Path, what: Sequence[str] = (*OF_RUN, *OF_AUDITS)) -> dict[str, str]:
    """The digests that were written down of the files that match `what`. Raises `InputError` for a table that is damaged."""
    return {name: digest for name, digest in _known(folder).items() if any(fnmatch(name, pattern) for pattern in what)}


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


def _found(folder: Path, what: Sequence[str]) -> Iterator[tuple[str, str]]:
    for pattern in what:
        for path in sorted(folder.glob(pattern)):
            if path.is_file() and path.suffix != ".part":
                with open_regular(path) as data:
                    yield path.relative_to(folder).as_posix(), file_digest(data, partial(blake2b, digest_size=16)).hexdigest()


def _contradictions(folder: Path, messages: int | None) -> Iterator[str]:
    """Figures of the summary that do not follow from what the run wrote beside it, a transcript of so many `messages` (None: unknown)."""
    path = folder / "summary.json"
    if not path.exists() and not (folder / "rounds.jsonl").exists() and (folder / FILE).is_file():
        return  # of an active audit alone
    try:
        summary = read_json(path)
        if not isinstance(summary, dict):
            raise ValueError("the summary is not an object")
        rows = [parse_json(line) for line in read_text(folder / "rounds.jsonl", LARGEST_TABLE_BYTES).splitlines()]
        expected = _from_rows(rows) | _from_clustering(folder, summary)
        if messages is not None:
            expected["messages"] = messages
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        yield f"{path}: cannot be compared with the run's rounds ({type(error).__name__}: {error})"
        return
    for name, value in expected.items():
        if summary.get(name) != value:
            yield f"{path}: {name} = {summary.get(name)!r}, where the run's files give {value!r}"


def _from_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    expected: dict[str, Any] = {"rounds": len(rows), "rounds_skipped": sum(row["skipped"] is not None for row in rows)}
    expected["clipped_client_rounds"] = sum(row.get("clipped_clients", 0) for row in rows)
    expected["group_rounds_without_sum"] = sum(len(row.get("unchanged_clusters", ())) for row in rows)
    measured = [row for row in rows if row.get("accuracy_mean") is not None]
    if measured:
        expected |= {name: measured[-1].get(name) for name in MEASURED}
        last = [row["accuracy_mean"] for row in measured if row["round"] > measured[-1]["round"] - LAST]
        expected |= {"last_rounds": len(last), "accuracy_mean_last_rounds": float(np.mean(last))}
    return expected


def _from_clustering(folder: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    path = folder / "measured.json"
    if not path.is_file() or summary["newcomers"] is not None:
        return {}
    measured = read_json(path)
    labels, truth = measured["labels"] or {}, measured["truth"]
    known = [client for client in labels if client in truth]
    return {"ari": ari([truth[client] for client in known], [labels[client] for client in known])} if known else {}
