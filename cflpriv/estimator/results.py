"""Results that a notebook shows: a report, and what an audit found."""

import html
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..protocols.bounded_files import LARGEST_TABLE_BYTES, read_json, read_text

__all__ = ["AuditFindings", "ReportPage"]

FRAME_HEIGHT = 720
"""Of a page in a notebook, in pixels."""


@dataclass(frozen=True)
class ReportPage:
    """A self-contained page of HTML at `path`. A notebook shows it in a frame of its own, so that its styles stay inside."""

    path: Path

    def _repr_html_(self) -> str:
        page = html.escape(read_text(self.path, LARGEST_TABLE_BYTES, errors="replace"), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: {FRAME_HEIGHT}px; border: 0" sandbox></iframe>'

    def __repr__(self) -> str:
        return f"ReportPage({str(self.path)!r})"


@dataclass(frozen=True, eq=False)
class AuditFindings:
    """What an audit found: `cells`, one a figure, in the `folder` that was audited. Iterating gives the cells."""

    cells: tuple[Any, ...]
    folder: Path

    def __iter__(self) -> Iterator[Any]:
        return iter(self.cells)

    def __len__(self) -> int:
        return len(self.cells)

    @property
    def verdicts(self) -> tuple[str, ...]:
        """A sentence for each adversary: what it learns."""
        return tuple(f"{entry['adversary']}: {entry['sentence']}" for entry in read_json(self.folder / "audit.json")["verdicts"])

    @property
    def table(self) -> dict[str, list[Any]]:
        """The figures as columns by name, as `pandas.DataFrame` and `polars.DataFrame` take them."""
        rows = [cell.as_json() for cell in self.cells]
        return {name: [row[name] for row in rows] for name in ("adversary", "attack", "metric", "value", "baseline", "status", "note")}

    def report(self) -> ReportPage:
        """The report of the folder, with these findings. Raises `InputError` for a folder that is damaged."""
        from ..experiments.report.report import write_report

        return ReportPage(write_report(self.folder))

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    def __repr__(self) -> str:
        return "\n".join([*self.verdicts, *(cell.line() for cell in self.cells)])
