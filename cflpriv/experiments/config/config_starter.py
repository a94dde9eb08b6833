"""A commented configuration to start from, and a JSON schema by which editors complete and check one."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter

from ...algorithms import ALGORITHMS
from ...errors import InputError, near
from ...keys import Interval
from .config_reference import Entry, entries, keys_of, toml_value, type_text

__all__ = ["begin_file", "schema", "starter", "write_new"]

_SET: Mapping[str, Any] = {
    "data.source": "digits", "data.clients": 20, "data.rotations": (0, 90), "model.name": "mlp", "model.hidden": 32, "training.rounds": 20,
    "training.epochs": 2, "training.lr": 0.1, "run.seed": 0,
}  # fmt: skip
"""What a new configuration sets: two groups of clients, whose images are upright or rotated. Nothing has to be downloaded."""


def starter(algorithm: str = "pacfl") -> str:
    """A configuration of an algorithm that runs as it is. All other keys are there with their defaults, commented out.

    Raises `InputError` for an algorithm that is not known.
    """
    if ALGORITHMS.find(algorithm) is None:
        raise InputError(f"--algorithm {algorithm}: is not known{near(algorithm, ALGORITHMS.names())}")
    wanted = [entry for entry in entries() if not entry.algorithms]
    place = next(i for i, entry in enumerate(wanted) if entry.path == "algorithm.name")
    wanted[place + 1 : place + 1] = keys_of("algorithm", ALGORITHMS[algorithm].make)
    values = {**_SET, **ALGORITHMS[algorithm].begins, "algorithm.name": algorithm}
    lines = [
        "# An experiment: `cflpriv run` runs it, `cflpriv explain KEY` says more of a key.",
        "# A line that begins with # and a key shows a default; remove the # to change it.",
    ]
    section = ""
    for entry in wanted:
        if entry.section != section:
            section = entry.section
            lines += ["", f"[{section}]"]
        default = f"; default: {entry.default_text}" if entry.path in values or entry.key.default else ""
        span = f", {entry.key.range_text}" if entry.key.range_text else ""
        unit = f" {entry.key.unit}" if entry.key.unit else ""
        lines.append(f"# {entry.key.meaning or 'not described'} ({type_text(entry.hint)}{span}{unit}{default})")
        value = values.get(entry.path, entry.default)
        shown = toml_value(_example(entry) if value is None else value)
        lines.append(f"{entry.name} = {shown}" if entry.path in values else f"#{entry.name} = {shown}")
    return "\n".join(lines) + "\n"


def begin_file(file: Path | None, algorithm: str | None) -> str:
    """Write the `starter` of an algorithm, or without one the schema, into a new file, or nowhere; its text.

    Raises `InputError` for a file that exists or cannot be written.
    """
    text = json.dumps(schema(), indent=1, ensure_ascii=False) + "\n" if algorithm is None else starter(algorithm)
    write_new(file, text)
    return text


def write_new(file: Path | None, text: str) -> None:
    """Write a text into a new file, or nowhere. Raises `InputError` for a file that exists or cannot be written."""
    if file is None:
        return
    try:
        out = file.open("x", encoding="utf-8")
    except FileExistsError:
        raise InputError(f"{file}: exists; choose another name, or remove it") from None
    except OSError as error:
        raise InputError(f"{file}: cannot be written ({error.strerror})") from None
    try:
        with out:
            out.write(text)
    except OSError as error:
        file.unlink(missing_ok=True)
        raise InputError(f"{file}: cannot be written ({error.strerror})") from None


def _example(entry: Entry) -> Any:
    """A value of a key that has none by default: the first that it may have."""
    hint = entry.hint
    if get_origin(hint) in (Union, UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Literal:
        return get_args(hint)[0]
    low, closed, _, _ = entry.key.bounds
    start = 0 if not math.isfinite(low) else low if closed else low + 1
    return hint(start)


def schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a configuration, for editors. Registered plugins are in it; names of others are allowed."""
    every = entries()
    sections = {
        name: _object([entry for entry in every if entry.section == name]) for name in dict.fromkeys(entry.section for entry in every)
    }
    name = next(entry for entry in every if entry.path == "algorithm.name")
    sections["algorithm"] = {
        "type": "object",
        "properties": {"name": _value(name)},
        "allOf": [
            {
                "if": {"properties": {"name": {"const": algorithm}}, **({} if algorithm == name.default else {"required": ["name"]})},
                "then": _object([name, *keys_of("algorithm", spec.make)]),
            }
            for algorithm, spec in ALGORITHMS.items()
        ],
    }
    sections["sweep"] = {"type": "object", "description": "A grid of experiments, for `cflpriv sweep`."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "cflpriv experiment",
        "type": "object",
        "properties": sections,
        "additionalProperties": False,
    }


def _object(rows: list[Entry]) -> dict[str, Any]:
    return {"type": "object", "properties": {row.name: _value(row) for row in rows}, "additionalProperties": False}


def _value(entry: Entry) -> dict[str, Any]:
    hint = entry.hint
    if get_origin(hint) in (Union, UnionType):
        hint = Union[tuple(part for part in get_args(hint) if part is not type(None))]  # noqa: UP007 - made at run time
    value: dict[str, Any] = TypeAdapter(hint).json_schema()
    for table in value.pop("$defs", {}).values():  # of one kind at most, whose keys stand here
        value["items"] = {**table, "additionalProperties": False}
    parts = [_limits(interval) for interval in entry.key.intervals]
    _limit(value, parts[0] if len(parts) == 1 else {"anyOf": parts})
    if entry.key.known is not None:  # suggestions: plugins add names that an editor cannot know
        value.get("items", value)["examples"] = list(entry.key.known())
    if entry.default is not None:
        value["default"] = entry.default
    return {"description": entry.key.meaning, **value}


def _limits(interval: Interval) -> dict[str, float]:
    """An interval in the words of a schema."""
    low, low_in, high, high_in = interval
    limits = {"minimum" if low_in else "exclusiveMinimum": low, "maximum" if high_in else "exclusiveMaximum": high}
    return {word: end for word, end in limits.items() if math.isfinite(end)}


def _limit(value: dict[str, Any], limits: Mapping[str, Any]) -> None:
    """Add limits to a number, or to the numbers of a list."""
    if value.get("type") in ("integer", "number"):
        value.update(limits)
    for inner in (value.get("items"), *value.get("prefixItems", ())):
        if isinstance(inner, dict):
            _limit(inner, limits)
