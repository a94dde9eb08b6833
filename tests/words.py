"""How many words of README.md and docs/ are written by hand, page by page: `make words`.

A generated page has a line that begins with `cflpriv.generated_pages.GENERATED`; it counts as none. Notebooks are not counted.
"""

import re
from pathlib import Path

from cflpriv.generated_pages import GENERATED

ROOT = Path(__file__).parent.parent


def generated(text: str) -> bool:
    """Whether a page has the line that every generator writes."""
    return any(line.startswith(GENERATED) for line in text.splitlines())


def counted(text: str) -> int:
    """The words of a page in Markdown, without what draws tables, lists and headings."""
    return len(re.findall(r"\S+", re.sub(r"[|`#*-]", " ", text)))


def words() -> dict[str, int]:
    """Page, relative to the checkout -> its words that are written by hand."""
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    texts = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in pages}
    return {name: 0 if generated(text) else counted(text) for name, text in texts.items()}


def lines(counts: dict[str, int]) -> list[str]:
    """A line a page, the longest first, and the total."""
    rows = sorted(counts.items(), key=lambda item: -item[1])
    return [f"{count:7}  {name}{'' if count else '  (generated)'}" for name, count in rows] + [f"{sum(counts.values()):7}  in all"]


if __name__ == "__main__":
    print("\n".join(lines(words())))
