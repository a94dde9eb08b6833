"""Sentences in documentation, docstrings and messages: words and constructions that plain standard English does without."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from cflpriv.generated_pages import GENERATED

ROOT = Path(__file__).parent.parent
CODE = ("cflpriv", "attacks", "protocols", "benchmarks")
SHORTEST = 25
"""Characters of a text that has a sentence; shorter ones are names."""
REFUSED = {
    "abreast": r"\babreast\b",
    "come to nothing": r"\bc[oa]mes? to nothing\b",
    "next to nothing": r"\bnext to nothing\b",
    "heard, said": r"\b(heard|said)\b",
    "told, where nobody speaks": r"\b(is|are|was|were|not|been) told\b(?! apart)",
    "puppets": r"\bpuppets?\b",
    "on the wire": r"\bon the wire\b",
    "vanish": r"\bvanish",
    "like nobody": r"\blike nobody\b",
    "so often": r"\bso often\b",
    "the latter, the former": r"\bthe (latter|former)\b",
    "where …, where": r"\bwhere\b[^.;:|]{0,80}, where\b",
}
WHICH = r"\b(of|in|by|for|with|from|to|under|at|on|behind|beside|after|before) (which|whom|whose)\b"
MOST_WHICH = 466
"""Clauses with "of which" and the like in all: this number becomes no larger."""


def texts() -> Iterator[tuple[str, str]]:
    """Where (path and line) and text of every page that is written by hand, and of every longer string of the code."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        if not any(line.startswith(GENERATED) for line in text.splitlines()):
            yield page.relative_to(ROOT).as_posix(), text
    for path in sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > SHORTEST and " " in node.value:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


@cache
def lines() -> tuple[tuple[str, str], ...]:
    """The texts, read once, each as one line."""
    return tuple((place, " ".join(text.split())) for place, text in texts())


def found(pattern: str) -> list[str]:
    """Where a pattern is, with its words."""
    return [
        f"{place}: …{text[max(0, at.start() - 30) : at.end() + 30]}…" for place, text in lines() for at in re.finditer(pattern, text, re.I)
    ]


def test_no_text_has_a_refused_construction() -> None:
    assert [f"{name}: {line}" for name, pattern in REFUSED.items() for line in found(pattern)] == []


def test_clauses_with_which_become_no_more() -> None:
    assert len(found(WHICH)) <= MOST_WHICH


def test_the_patterns_find_what_they_refuse() -> None:
    examples = (
        "many groups abreast", "verbs for what may come to nothing", "of next to nothing", "what was said", "it is told this", "a puppet",
        "bytes on the wire", "clients that vanish", "a newcomer like nobody", "so often tried", "in units of the latter",
        "where it has others, where this one was absent",
    )  # fmt: skip
    for example, (name, pattern) in zip(examples, REFUSED.items(), strict=True):
        assert re.search(pattern, example, re.I), name
        assert not re.search(pattern, "options that cannot be told apart; a clause where nothing is wrong", re.I), name
