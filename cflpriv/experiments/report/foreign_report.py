"""The report on a folder of another system's updates that was audited: verdicts, figures, what was recovered, what was assumed."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...files import write_atomically
from ...protocols.bounded_files import read_text
from ...streams import readable
from .answer import Answer
from .audit_report import leakage
from .before import Step
from .leak_answers import audit_answer, leak_sentence
from .page import templates
from .recovered import histograms, recovered_images
from .run_files import Audited, about_audit, parsed, read_audit, require

__all__ = ["FOREIGN", "write_foreign_report"]

NO_GUARANTEE = Answer(
    "What is guaranteed?", "none", "No ε", "An audit shows what some attacks get. It proves no bound on what others would get.",
    "Unaudited research code.",
)  # fmt: skip
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
    name = readable(folder.resolve().name)
    audited = Audited(folder, "Another system", name, "another system", cells, verdicts, about=about_audit(path))
    doubts, answer = _texts(path, "evidence_doubtful"), audit_answer(audited)
    page = (
        templates()
        .get_template("foreign.html")
        .render(
            title=f"Audit of {name}",
            answers=[answer, _trusted(doubts), NO_GUARANTEE],
            in_short=f"{leak_sentence(answer, audited)} No guarantee.",
            steps=_steps(name, audited, doubts),
            verdicts=verdicts,
            leakage=leakage([audited]),
            recovered=recovered_images(audited),
            histograms=histograms(audited),
            doubts=doubts,
            assumed=_texts(path, "assumed"),
            settings=read_text(folder / FOREIGN, errors="replace"),
        )
    )
    try:
        write_atomically(folder / "report.html", page)
    except OSError as error:
        raise InputError(f"{folder}: the report cannot be written ({error.strerror})") from None
    return folder / "report.html"


def _trusted(doubts: Mapping[str, str]) -> Answer:
    question = "Can the evidence be trusted?"
    if doubts:
        return Answer(question, "bad", "No, checks failed", f"{', '.join(doubts)}: see section 2. Nothing is concluded.")
    small = "There is no unprotected run to compare with: an attack that failed might never have worked."
    return Answer(question, "good", "Checks passed", "The updates, samples and labels passed every check of the audit.", small)


def _steps(name: str, audited: Audited, doubts: Mapping[str, str]) -> list[Step]:
    """What to do before relying on the audit."""
    command = f"cflpriv audit --foreign {shlex.quote(name)}"
    steps = [Step("Correct what failed a check, and audit again", command)] if doubts else []
    remedies = dict.fromkeys(verdict["reduces"] for verdict in audited.verdicts if verdict["reduces"])
    steps += [Step(f"Reduce the leak: {words}", "") for words in list(remedies)[:1]]
    if not doubts:
        steps.append(Step("Compare the assumptions in section 3 with your system; where they differ, correct foreign.toml", command))
    return steps


def _texts(path: Path, name: str) -> Mapping[str, str]:
    """A table of texts of an audit, such as what it took for granted; empty for an audit that did not write it."""
    audit: Any = parsed(path)
    table = audit.get(name, {}) if isinstance(audit, dict) else {}
    texts = isinstance(table, dict) and all(isinstance(text, str) for text in table.values())
    require(texts, path, f"{name} is not a table of texts")
    return dict(table)
