"""The demo's report: the answers of its first screen, in few words, in tables that fit."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from checkout import ROOT
from report_pages import Page, page_of

MOST_WORDS, MOST_COLUMNS, MOST_COMMANDS = 700, 6, 3


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = demo
    spec.loader.exec_module(demo)
    folder = Path(tmp_path_factory.mktemp("demo"))
    demo.compared(folder)
    return page_of(folder)


@pytest.mark.slow
def test_the_first_screen_answers_the_four_questions(page: Page) -> None:
    for words in (
        "Handwritten digits, 20 clients", "Train these clients in two clusters.", "The protection fails once a client helps the server",
        "✓ Yes, by clusters", "✓ Two, clearly", "▲ Leaks to the server + 1 client", "– No ε",
        "10 clients upright and 10 clients turned by 90°. All 20 are placed as they truly are.",
    ):  # fmt: skip
        assert words in page.unfolded
    assert not re.search(r"\bsafe\b", page.unfolded)


@pytest.mark.slow
def test_the_page_is_short_and_its_tables_fit(page: Page) -> None:
    words = [word for word in page.unfolded.split() if re.search(r"\w", word)]
    assert len(words) <= MOST_WORDS
    assert all(len(row) <= MOST_COLUMNS for table in page.tables for row in table)
    before = page.unfolded.partition("Before you rely on this")[2].partition("1 · Are clients served better?")[0]
    assert 1 <= before.count("cflpriv ") <= MOST_COMMANDS
    numbers = re.findall(r"Figure (\d[a-z]+)\.", page.words)
    assert len(numbers) == len(set(numbers)) == len(page.images)
