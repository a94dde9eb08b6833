"""Results that a notebook shows: a report, and what an audit found."""

import html
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...files import write_atomically
from ...protocols.bounded_files import LARGEST_TABLE_BYTES, read_bytes, read_json, read_text

__all__ = ["AuditFindings", "ReportPage", "temporary_folder"]

FRAME_HEIGHT = 720
"""Of a page in a notebook, in pixels."""
COLUMNS = ("adversary", "attack", "metric", "value", "baseline", "status", "note")


@cache
def _temporary() -> "TemporaryDirectory[str]":
    return TemporaryDirectory(prefix="cflpriv-")


def temporary_folder() -> Path:
    """A folder of this process, which is removed when the process ends."""
    return Path(_temporary().name)


@dataclass(frozen=True)
class ReportPage:
    """A self-contained page of HTML at `path`. A notebook shows it in a frame of its own, so that its styles stay inside."""

    path: Path

    def copied(self, path: str | Path | None) -> "ReportPage":
        """This page, or a copy at `path`. Raises OSError."""
        if path is None:
            return self
        write_atomically(Path(path), read_bytes(self.path, LARGEST_TABLE_BYTES))
        return ReportPage(Path(path))

    def _repr_html_(self) -> str:
        page = html.escape(read_text(self.path, LARGEST_TABLE_BYTES, errors="replace"), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: {FRAME_HEIGHT}px; border: 0" sandbox></iframe>'


class AuditFindings(list[Any]):
    """The figures of an audit (`attacks.Cell`), with its verdicts and its report.

    `folder` gives the folder with audit.json, which is asked for where it is needed.
    """

    def __init__(self, cells: Iterable[Any], folder: Callable[[], Path]) -> None:
        super().__init__(cells)
        self._folder = folder

    @property
    def verdicts(self) -> tuple[str, ...]:
        """A sentence for each adversary: what it learns."""
        return tuple(f"{entry['adversary']}: {entry['sentence']}" for entry in read_json(self._folder() / "audit.json")["verdicts"])

    @property
    def table(self) -> dict[str, list[Any]]:
        """The figures as columns by name, as `pandas.DataFrame` and `polars.DataFrame` take them."""
        rows = [cell.as_json() for cell in self]
        return {name: [row[name] for row in rows] for name in COLUMNS}

    def report(self, path: str | Path | None = None) -> ReportPage:
        """The report of what was audited, with these figures, as one page; a copy at `path`, if it is given.

        Raises `InputError` for a folder that is damaged, and OSError.
        """
        from .report import write_report  # not before: pictures are slow to import

        return ReportPage(write_report(self._folder())).copied(path)

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    def __repr__(self) -> str:
        return "\n".join([*self.verdicts, *(cell.line() for cell in self)])
