"""Docs, messages and docstrings use the field's terms. The words on the left were ours once; those on the right are the standard ones."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from checkout import ROOT

INSTEAD = {
    r"verbs?": "operation",
    r"(?:its|the|a group's) floor of \d+|floor of (?:a|the) (?:group|cluster|sum)|minimum floor": "minimum cohort size",
    r"vanish(?:es|ed|ing)?": "drop out",
    r"c(?:ome|omes|ame|oming) to nothing": "fail",
    r"blind (?:means?|part of a (?:sum|mean))": "transformed",
    r"plays (?:of|the)": "repetitions",
    r"clients elsewhere": "remote clients",
    r"Books": "run ledger",
    r"wires?": "payload, encoding",
    r"said (?:of|to|in one line)": "reported",
    r"word of refusal": "error code",
    r"rolls?": "client registry",
    r"tapes?": "entropy replay",
    r"likeness(?:es)?": "cosine similarity",
    r"abreast": "in parallel",
    r"like nobody": "matches no cluster",
    r"crowds?": "clients, simulations without groups",
}
NOT_PROSE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def found_in(text: str) -> list[str]:
    """Each old word in a text, with the standard term. Code in backticks is no prose."""
    prose = NOT_PROSE.sub("", text)
    return [f"{match[0]!r}: write {term!r}" for old, term in INSTEAD.items() for match in re.finditer(rf"\b(?:{old})\b", prose)]


def texts() -> Iterator[tuple[str, str]]:
    """Where and what we wrote: pages, and strings of the code that hold more than one word (docstrings, messages)."""
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")):
        if page.name != "CHANGELOG.md":  # which tells what names were before
            yield page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8")
    for room in ("cflpriv", "protocols", "attacks", "examples"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                    yield f"{path.relative_to(ROOT).as_posix()}:{node.lineno}", node.value


@pytest.mark.slow
def test_old_words_are_replaced() -> None:
    assert not [f"{where}: {word}" for where, text in texts() for word in found_in(text)]


def test_each_old_word_would_be_found() -> None:
    old = (
        "five verbs", "the floor of 3", "it vanished", "sums that come to nothing", "the blind part of a sum", "two plays of a game",
        "clients elsewhere", "the Books", "over the wire", "it is said in one line", "a word of refusal", "the roll of clients", "a tape",
        "their likeness", "many groups abreast", "a newcomer like nobody", "one crowd",
    )  # fmt: skip
    assert len(old) == len(INSTEAD)
    for sentence, term in zip(old, INSTEAD.values(), strict=True):
        assert [word.partition(": write ")[2] for word in found_in(sentence)] == [repr(term)]
    assert not found_in("`wire` and\n```python\nroll = 1\n```\nstay")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("proselint") is None, reason="the extra [dev] is not installed")
def test_messages_and_docstrings_pass_the_prose_linter(tmp_path: Path) -> None:
    """`make lint` runs it over the pages."""
    by_file: dict[str, list[str]] = {}
    for where, text in texts():
        if not where.endswith(".md"):
            by_file.setdefault(where.partition(":")[0], []).append(NOT_PROSE.sub("", text))
    for name, several in by_file.items():
        (tmp_path / f"{name.replace('/', '-')}.txt").write_text("\n\n".join(several), encoding="utf-8")
    wrong = tmp_path / "wrong.md"
    wrong.write_text("It is very big.\n", encoding="utf-8")
    assert "weasel_words" in linted([wrong]).stdout
    done = linted(sorted(tmp_path.glob("*.txt")))
    assert done.returncode == 0, done.stdout + done.stderr


def linted(files: Sequence[Path]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "proselint", "--config", str(ROOT / ".proselintrc.json"), "-o", "compact", "check"]
    return subprocess.run([*command, *files], capture_output=True, encoding="utf-8", check=False)
