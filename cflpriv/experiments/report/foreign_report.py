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
from .run_files import AboutAudit, Audited, parsed, read_audit, require

__all__ = ["FOREIGN", "PYTHON", "write_foreign_report"]

NO_GUARANTEE = Answer(
    "What is guaranteed?", "none", "No ε", "An audit shows what some attacks get. It proves no bound on what others would get.",
    "Unaudited research code.",
)  # fmt: skip
FOREIGN = "foreign.toml"
"""The file that says that a folder holds another system's updates."""
PYTHON = "python"
"""What audit.json says of the source of updates that were given in Python: there is no folder that a reader could correct."""


def write_foreign_report(folder: Path) -> Path:
    """Write report.html into a folder of updates; its path.

    Raises `InputError` naming the file, for a folder that was not audited and for a file that is damaged.
    """
    path = folder / "audit.json"
    cells, verdicts = read_audit(path)
    if cells is None:
        raise InputError(f"{path}: is missing; cflpriv audit --foreign {folder} writes it")
    name = readable(folder.resolve().name)
    audited = Audited(folder, "Another system", name, "another system", cells, verdicts, about=_about(path))
    doubts, answer, in_python = _texts(path, "evidence_doubtful"), audit_answer(audited), _audit(path).get("source") == PYTHON
    page = (
        templates()
        .get_template("foreign.html")
        .render(
            title=f"Audit of {name}",
            answers=[answer, _trusted(doubts), NO_GUARANTEE],
            in_short=f"{leak_sentence(answer, audited)} No guarantee.",
            steps=_steps(name, audited, doubts, in_python),
            in_python=in_python,
            not_run=[attack.replace("_", " ") for attack in audited.about.attacks_left or ()],
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


def _steps(name: str, audited: Audited, doubts: Mapping[str, str], in_python: bool) -> list[Step]:
    """What to do before relying on the audit. Updates that were given in Python have no folder, and no command."""
    command = "" if in_python else f"cflpriv audit --foreign {shlex.quote(name)}"
    corrected = "the arguments of audit_updates" if in_python else "foreign.toml"
    steps = [Step("Correct what failed a check, and audit again", command)] if doubts else []
    remedies = dict.fromkeys(verdict["reduces"] for verdict in audited.verdicts if verdict["reduces"])
    steps += [Step(f"Reduce the leak: {words}", "") for words in list(remedies)[:1]]
    if not doubts:
        steps.append(Step(f"Compare the assumptions in section 3 with your system; where they differ, correct {corrected}", command))
    return steps


def _audit(path: Path) -> Mapping[str, Any]:
    audit: Any = parsed(path)
    return audit if isinstance(audit, dict) else {}


def _about(path: Path) -> AboutAudit:
    """Which attacks an audit ran, and which it left out; it does not say so if an earlier version made it."""
    attacks = _audit(path).get("attacks")
    if attacks is None:
        return AboutAudit()
    lists = [attacks.get(key) for key in ("run", "not_run")] if isinstance(attacks, dict) else []
    texts = len(lists) == 2 and all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists)
    require(texts, path, "attacks is not a table of lists of names (run, not_run)")
    run, left = lists
    return AboutAudit((), tuple(run or ()), tuple(left or ()))


def _texts(path: Path, name: str) -> Mapping[str, str]:
    """A table of texts of an audit, such as what it took for granted; empty for an audit that did not write it."""
    table = _audit(path).get(name, {})
    texts = isinstance(table, dict) and all(isinstance(text, str) for text in table.values())
    require(texts, path, f"{name} is not a table of texts")
    return dict(table)
