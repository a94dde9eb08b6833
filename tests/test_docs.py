"""The site is built without a warning and complete without a network; every page has one place in its navigation."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from xml.etree import ElementTree

import pytest
import words
from checkout import ROOT

from cflpriv.generated_pages import GENERATED

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
MOST_WORDS = 25_000
"""Words of README.md and docs/ that are written by hand. A page that becomes shorter lowers the bound; nothing raises it."""


def test_every_page_has_one_place_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"(\S+\.md)$", text[text.index("\nnav:") :], re.MULTILINE)
    assert sorted(named) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("*.md")], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


class Assets(HTMLParser):
    """What a browser fetches to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        place = given.get("href") if tag == "link" and given.get("rel") != "canonical" else given.get("src")
        self.found |= {place} if place else set()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="the extra [docs] is not installed")
def test_the_site_is_whole(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        capture_output=True, encoding="utf-8", check=False, cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) == len(PAGES) + 1  # and the page for what is not found
    for page in pages:
        reader = Assets()
        reader.feed(page.read_text(encoding="utf-8"))
        assert reader.found, page
        for asset in reader.found:
            assert not re.match(r"(https?:)?//", asset), f"{page}: fetches {asset}"
            assert asset.startswith("data:") or page.name == "404.html" or (page.parent / asset.partition("?")[0]).exists(), (
                f"{page}: {asset}"
            )
    text = (tmp_path / "configuration.html").read_text(encoding="utf-8")
    assert "skew_percent" in text
    assert "cflpriv.protocols.secagg.server.Server" in (tmp_path / "reference" / "protocols.html").read_text(encoding="utf-8")


def test_each_diagram_becomes_a_picture_with_all_of_its_words() -> None:
    spec = spec_from_file_location("diagrams", DOCS / "hooks" / "diagrams.py")
    assert spec is not None
    assert spec.loader is not None
    diagrams = module_from_spec(spec)
    spec.loader.exec_module(diagrams)
    count = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        drawn = diagrams.on_page_markdown(text)
        assert "```mermaid" not in drawn, page
        for source in re.findall(r"^```mermaid\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            count += 1
            shown = {one.text for one in ElementTree.fromstring(diagrams.picture(source.partition("\n")[2])).iter("text")}
            assert {line.partition(": ")[2] for line in source.splitlines() if ": " in line} <= shown
    assert count == len(re.findall(r"```mermaid", "".join(page.read_text(encoding="utf-8") for page in PAGES)))
    assert count
    with pytest.raises(ValueError, match=r"'par one' is not known"):
        diagrams.picture("participant A as a\npar one\n")


def test_the_design_page_names_what_there_is() -> None:
    """Every path with a folder exists, from the root or from `cflpriv/`, and the page stays short."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:\w+/)+\w+\.py)`", text))
    assert len(paths) > 40
    assert [path for path in sorted(paths) if not ((ROOT / path).exists() or (ROOT / "cflpriv" / path).exists())] == []
    folders = {path for path in re.findall(r"`((?:\w+/)+)`", text) if not (ROOT / path).is_dir() and not (ROOT / "cflpriv" / path).is_dir()}
    inner = {"config/", "run/", "sweep/", "report/", "reproductions/", "shared/", "figures/", "evidence/", "active/", "claims/", "secagg/"}
    assert folders - inner == set()
    assert len(re.findall(r"\S+", re.sub(r"[|`#*-]", " ", text))) <= 1200


def test_words_written_by_hand_become_no_more() -> None:
    counts = words.words()
    assert set(counts) == {page.relative_to(ROOT).as_posix() for page in [ROOT / "README.md", *PAGES]}
    assert sum(counts.values()) <= MOST_WORDS, "\n".join(words.lines(counts))


def test_a_generated_page_names_the_command_that_writes_it() -> None:
    """And a page without the mark counts with all of its words, so that only a generator can take words out of the count."""
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    marked = {page: text for page, text in texts.items() if words.generated(text)}
    assert len(marked) > 5
    for page, text in marked.items():
        (command,) = re.findall(rf"^{GENERATED}`([^`]+)`$", text, re.MULTILINE)
        *how, place = command.split()
        assert ROOT / place == page
        if how[:2] == ["python", "-m"]:
            module = how[2].removeprefix("cflpriv.").replace(".", "/")
            sources = [ROOT / f"{module}.py", ROOT / "cflpriv" / f"{module}.py"]
            assert any("generated_page(" in source.read_text(encoding="utf-8") for source in sources if source.is_file()), command
        else:
            assert how == ["cflpriv", "claims", "--page"]
    assert words.counted("## One *two*\n\n| three | `four` |\n|---|---|\n- five") == 5
    assert words.generated(f"# Title\n\n{GENERATED}`command`\n")
    assert not words.generated("This page is generated.")
