"""The report of `make gpu`: rewritten whole after each row, shown as a table, and kept for the documentation."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cflpriv.files import write_atomically

from .rows import ROOT, key

__all__ = ["Report", "read", "shown", "table", "write"]

NAME = "gpu.json"


@dataclass(eq=False)
class Report:
    """What was measured on one machine: rows by key, in the order of the suite."""

    folder: Path
    machine: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    order: Sequence[str] = ()

    def on(self, machine: dict[str, Any]) -> bool:
        """Go on upon a machine. Rows of another machine are put aside, in a file of its name; False if there were some."""
        before, self.machine = self.machine, machine
        if not self.rows or before == machine:
            return True
        aside = self.folder / f"gpu_{re.sub('[^A-Za-z0-9]+', '_', str(before.get('device')))}.json"
        (self.folder / NAME).replace(aside)
        self.rows = {}
        return False

    def add(self, row: dict[str, Any]) -> None:
        """Put a row in and rewrite the file."""
        self.rows[key(row["part"], row["row"])] = row
        places = {name: place for place, name in enumerate(self.order)}
        ordered = sorted(self.rows, key=lambda name: places.get(name, len(places)))
        self.rows = {name: self.rows[name] for name in ordered}
        whole = {"machine": self.machine, "rows": list(self.rows.values())}
        write_atomically(self.folder / NAME, json.dumps(whole, indent=1) + "\n")

    @property
    def decides(self) -> bool:
        """Whether floors can be judged: not in a rehearsal."""
        return not self.machine.get("rehearsal", True)

    @property
    def missing(self) -> list[str]:
        """The keys of rows that were not measured."""
        return [name for name in self.order if name not in self.rows]

    def with_status(self, *status: str) -> set[str]:
        """The keys of rows of a status."""
        return {name for name, row in self.rows.items() if row["status"] in status}


def read(folder: Path) -> Report:
    """The report in a folder, or an empty one. Raises `ValueError` for a file that is none."""
    path = folder / NAME
    if not path.is_file():
        return Report(folder)
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        return Report(folder, report["machine"], {key(row["part"], row["row"]): row for row in report["rows"]})
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: is no report of `make gpu`; remove it, or name another folder") from None


def number(value: Any) -> str:
    return "–" if value is None or value != value else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def judged(row: Mapping[str, Any], decides: bool) -> str:
    """The floor of a row, and whether its figure holds it where that `decides`; empty for a row without one."""
    floor = row["floor"]
    if floor is None:
        return ""
    value, bound = row["figures"].get(floor["figure"]), floor["bound"]
    holds = value is not None and (value >= bound if floor["at_least"] else value <= bound)
    verdict = "" if value is None or not decides else ": holds" if holds else ": FAILS"
    return f"{floor['figure']} {'≥' if floor['at_least'] else '≤'} {bound:g}{verdict}"


def words(row: Mapping[str, Any]) -> str:
    return ": ".join(word for word in ("" if row["status"] == "done" else row["status"], row["note"]) if word)


def shown(row: Mapping[str, Any], decides: bool) -> str:
    """A row in one line."""
    figures = ", ".join(f"{name} {number(value)}" for name, value in row["figures"].items())
    return " | ".join(word for word in (f"{row['part']}: {row['row']}", figures, judged(row, decides), words(row)) if word)


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    on = report["machine"]
    if on["rehearsal"]:
        yield f"A rehearsal on {on['device']}, torch {on['torch']}: it measures no GPU."
    else:
        yield f"Measured on {on['device']}, torch {on['torch']} (`make gpu`). A roofline is bytes over bandwidth or operations over rate."
    part = ""
    for row in report["rows"]:
        if row["part"] != part:
            part = row["part"]
            names = list(dict.fromkeys(name for row in report["rows"] if row["part"] == part for name in row["figures"]))
            yield ""
            yield f"| {' | '.join([part, *names, 'floor', 'note'])} |"
            yield f"|{'---|' * (len(names) + 3)}"
        figures = [number(row["figures"].get(name)) for name in names]
        yield f"| {' | '.join([row['row'], *figures, judged(row, not on['rehearsal']), words(row)])} |"


def table(report: Mapping[str, Any]) -> str:
    """The report as Markdown: a table for each part, with the floors beside the figures."""
    return "\n".join(_lines(report))


def write(path: Path, docs: Path = ROOT / "docs") -> str:
    """Keep a report beside the page that shows it; a line that says so. Raises `ValueError` for a rehearsal, or without a report."""
    if not path.is_file():
        raise ValueError(f"{path}: is missing; `make gpu` writes it")
    if path.name != NAME:
        raise ValueError(f"{path}: is not called {NAME}")
    report = read(path.parent)
    if report.machine["rehearsal"]:
        raise ValueError(f"{path}: is a rehearsal, which measures no GPU; nothing is written")
    write_atomically(docs / NAME, path.read_text(encoding="utf-8"))
    page = "python -m benchmarks.pages measurements > docs/measurements.md"
    return f"{docs / NAME}: has {len(report.rows)} rows of {path}; `{page}` puts them on the page"
