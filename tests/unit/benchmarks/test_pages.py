"""The pages of measured figures follow from their tables, and the tables from the registry of reproductions."""

import re
import shlex
from collections import Counter

import pytest
from checkout import ROOT

from benchmarks import pages
from cflpriv.experiments.reproductions import REPRODUCTIONS

ENTRIES = pages.records("reproduction_entries.csv")
FIGURES = pages.records("reproductions.csv")


def of_kind(name: str, kind: str) -> list[str]:
    return [row["text"] for row in ENTRIES if (row["entry"], row["kind"]) == (name, kind)]


@pytest.mark.parametrize("name", pages.PAGES)
def test_the_page_is_up_to_date(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert page == pages.PAGES[name](), f"python -m benchmarks.pages {name} > docs/{name}.md"


def test_every_reproduction_has_a_verdict_and_a_reason() -> None:
    assert {row["entry"] for row in ENTRIES} == set(REPRODUCTIONS)
    assert {row["kind"] for row in ENTRIES} == {"verdict", "reason", "command", "note"}
    measured = {row["entry"] for row in FIGURES}
    for name in REPRODUCTIONS:
        (verdict,) = of_kind(name, "verdict")
        assert verdict in pages.VERDICTS, name
        assert len(of_kind(name, "reason")) == 1, name
        assert bool(of_kind(name, "command")) == (verdict != "not measured"), name
        assert name not in measured or verdict in ("yes", "in part", "no"), name


def test_every_command_of_a_reproduction_names_cells_that_exist() -> None:
    seen = 0
    for row in ENTRIES:
        if row["kind"] == "command":
            words = shlex.split(row["text"])
            assert words[:3] == ["cflpriv", "reproduce", row["entry"]]
            labels = [cell.label for cell in REPRODUCTIONS[row["entry"]].cells]
            for cells in [words[place + 1] for place, word in enumerate(words) if word == "--cells"]:
                for beginning in cells.split(";"):
                    assert any(label.lower().startswith(beginning.strip().lower()) for label in labels), (row["entry"], beginning)
                    seen += 1
    assert seen > 30


def test_every_figure_has_one_place_on_the_page() -> None:
    places = Counter((row["entry"], row["row"], row["column"]) for row in FIGURES)
    assert set(places.values()) == {1}
    page = pages.PAGES["reproductions"]()
    for name in {row["entry"] for row in FIGURES}:
        section = page.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
        cells = Counter(cell for line in section.splitlines() if line.startswith("|") for cell in line.strip("| ").split(" | "))
        assert not Counter(row["value"] for row in FIGURES if row["entry"] == name) - cells, name


@pytest.mark.parametrize("words", [pages._REPRODUCTIONS, pages._MEASUREMENTS + pages._DEVICE])
def test_words_written_by_hand_are_few(words: str) -> None:
    assert len(re.findall(r"\S+", words)) <= 400
