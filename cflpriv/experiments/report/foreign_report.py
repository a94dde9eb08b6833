"""The report on a folder of another system's updates that was audited: verdicts, figures, what was recovered, what was assumed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...files import write_atomically
from ...protocols.bounded_files import read_text
from ...streams import readable
from .audit_report import leakage
from .page import templates
from .recovered import histograms, recovered_images
from .run_files import Audited, parsed, read_audit, require

__all__ = ["FOREIGN", "write_foreign_report"]

FOREIGN = "foreign.toml"
"""The file that says that a folder holds another system's updates."""


def write_foreign_report(folder: Path) -> Path:
    """Write report.html into a folder of updates; its path.

    Raises `InputError` naming the file, for a folder that was not audited and for a file that is damaged.
    """
    path = folder / "audit.json"
    cells, verdicts = read_audit(path)
    if cells is None:
        raise InputError(f"{path}: is missing; cflpriv audit --foreign {folder} writes it")
    audited = Audited(folder, "Another system", readable(folder.resolve().name), "another system", cells, verdicts)
    page = (
        templates()
        .get_template("foreign.html")
        .render(
            title=readable(folder.resolve().name),
            verdicts=verdicts,
            leakage=leakage([audited]),
            recovered=recovered_images(audited),
            histograms=histograms(audited),
            doubts=_texts(path, "evidence_doubtful"),
            assumed=_texts(path, "assumed"),
            settings=read_text(folder / FOREIGN, errors="replace"),
        )
    )
    try:
        write_atomically(folder / "report.html", page)
    except OSError as error:
        raise InputError(f"{folder}: the report cannot be written ({error.strerror})") from None
    return folder / "report.html"


def _texts(path: Path, name: str) -> Mapping[str, str]:
    """A table of texts of an audit, such as what it took for granted; empty for an audit that did not write it."""
    audit: Any = parsed(path)
    table = audit.get(name, {}) if isinstance(audit, dict) else {}
    texts = isinstance(table, dict) and all(isinstance(text, str) for text in table.values())
    require(texts, path, f"{name} is not a table of texts")
    return dict(table)
