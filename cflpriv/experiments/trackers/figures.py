"""What trackers get of a run: numbers of a row, settings by key, and the number under which a tracker knows the run."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InputError
from ...files import write_atomically
from ...protocols.bounded_files import parse_json, read_bytes

if TYPE_CHECKING:
    from ..config.config import Config

__all__ = ["FILE", "keep_number", "known_number", "scalars", "settings"]

FILE = "trackers.json"
"""In the run folder: the number of the run by tracker."""
LARGEST, NUMBER = 4096, re.compile("[A-Za-z0-9_-]{1,64}")
"""Bytes of that file at most, and what a number is."""
LEFT_OUT = ("round",)


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of rounds.jsonl by name; lists of clients count, and what is unknown is left out."""
    values = {}
    for name, value in row.items():
        if isinstance(value, list) and name in ("cohort", "admitted", "lost"):
            values[name] = float(len(value))
        elif isinstance(value, int | float) and not isinstance(value, bool) and name not in LEFT_OUT:
            values[name] = float(value)
    return values


def settings(config: "Config") -> dict[str, Any]:
    """The values of a configuration by "section.key"."""
    return dict(_flat("", tomllib.loads(config.to_toml())))


def _flat(above: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(f"{above}{key}.", value)
        else:
            yield f"{above}{key}", value


def known_number(folder: Path, tracker: str, rounds: int) -> str:
    """The number of a run of which `rounds` are done; empty for one that begins anew, and where the tracker did not follow it.

    Raises `InputError` for a damaged file.
    """
    return _numbers(folder).get(tracker, "") if rounds else ""


def keep_number(folder: Path, tracker: str, number: str) -> None:
    """Keep the number of the run for a resumed one. Raises `InputError` for a damaged file."""
    write_atomically(folder / FILE, json.dumps({**_numbers(folder), tracker: number}, indent=1) + "\n")


def _numbers(folder: Path) -> dict[str, str]:
    path = folder / FILE
    if not path.exists() and not path.is_symlink():
        return {}
    try:
        numbers = None if path.is_symlink() else parse_json(read_bytes(path, LARGEST))
    except (OSError, ValueError):
        numbers = None
    if not isinstance(numbers, dict) or not all(isinstance(number, str) and NUMBER.fullmatch(number) for number in numbers.values()):
        raise InputError(f"{path}: is damaged; remove it, and trackers begin a new run")
    return numbers
