"""Verify a run folder: whether its files are unchanged, and whether its figures follow from its rows.

Unchanged is what `digests` says. Figures of the summary that follow from the rounds, the transcript or the clustering are computed again.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np

from ...clustering.scores import ari
from ...contract.transcript import Message, read_transcript, what_was_kept
from ...errors import InputError
from ...protocols.bounded_files import LARGEST_TABLE_BYTES, parse_json, read_json, read_text
from ..digests import FILE, OF_CHECKPOINTS, change_of, changed_files, digest_of, found_digests, sealed
from .number_scores import NUMBERS, is_evaluated
from .summary_figures import LAST, MEASURED

__all__ = ["Verified", "verify"]


@dataclass(frozen=True)
class Verified:
    """What `verify` found: the digest of the run folder, each problem, for people, and what could not be checked."""

    digest: str
    problems: tuple[str, ...]
    unchecked: str = ""


def _checkpoints(folder: Path) -> tuple[list[str], list[str]]:
    """Each checkpoint file that was changed, and those that cannot be checked: for people."""
    try:
        known = sealed(folder, OF_CHECKPOINTS)
    except InputError:
        return [], []  # `changed_files` says so
    present = [path.relative_to(folder).as_posix() for path in folder.glob(*OF_CHECKPOINTS)]
    if not known:
        return [], ["checkpoints/ has no digests; an earlier version made the run, or it is not complete"] if present else []
    computed = dict(found_digests(folder, [escape(name) for name in present if os.access(folder / name, os.R_OK)]))
    absent = [f"{name} is missing or cannot be read" for name in sorted(known) if name not in computed]
    return [change_of(folder / name) for name, digest in sorted(computed.items()) if known.get(name) != digest], absent


def verify(folder: Path) -> Verified:
    """Check a run folder, with the payloads of its transcript and its checkpoints. Raises `InputError` for a folder that is none."""
    if not (folder / "config.toml").is_file():
        raise InputError(f"{folder}: is not a run folder (no config.toml)")
    messages, damage = list[Message](), list[str]()
    if (folder / "transcript").is_dir():
        try:
            messages = read_transcript(folder / "transcript")
        except InputError as error:
            damage.append(str(error))
    counted = None if damage else len(messages)
    changed, unchecked = _checkpoints(folder)
    problems = (*changed_files(folder), *changed, *damage, *_contradictions(folder, counted))
    return Verified(digest_of(folder), problems, "; ".join([*filter(None, [what_was_kept(messages)]), *unchecked]))


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
    measured = [row for row in rows if is_evaluated(row)]
    if measured:
        expected |= {name: measured[-1].get(name) for name in MEASURED}
        expected |= {name: measured[-1][name] for name in NUMBERS if name in measured[-1]}
        last = [row for row in measured if row["round"] > measured[-1]["round"] - LAST]
        kind = "error_mean" if measured[-1].get("accuracy_mean") is None else "accuracy_mean"
        expected |= {"last_rounds": len(last), f"{kind}_last_rounds": float(np.mean([row[kind] for row in last]))}
    return expected


def _from_clustering(folder: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    path = folder / "measured.json"
    if not path.is_file() or summary["newcomers"] is not None:
        return {}
    measured = read_json(path)
    labels, truth = measured["labels"] or {}, measured["truth"]
    known = [client for client in labels if client in truth]
    return {"ari": ari([truth[client] for client in known], [labels[client] for client in known])} if known else {}
