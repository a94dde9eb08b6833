"""A report as a browser reads it, for tests: its words, tables and pictures; and edits of a run folder's files."""

import base64
import json
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from cflpriv.experiments.report.report import write_report

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """What a browser would load, show and nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.images: list[dict[str, str | None]] = []
        self.links: list[str] = []
        self.headings: list[str] = []
        self.classes: Counter[str] = Counter()
        self.tables: list[list[list[str]]] = []
        self.words = ""
        self.unfolded = ""
        self._open: list[str] = []
        self._folds: list[bool] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags[tag] += 1
        self.classes.update((given.get("class") or "").split())
        self.links += [str(value) for key, value in attrs if key in ("href", "src", "srcset", "action", "data")]
        if tag == "details":
            self._folds.append("open" not in given)
        if tag == "img":
            self.images.append(given)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "details":
            self._folds.pop()

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        self.words += " " + " ".join(data.split())
        if not any(self._folds[: len(self._folds) - ("summary" in self._open)]):  # the title of a fold is read, too
            self.unfolded += " " + " ".join(data.split())
        if "h2" in self._open:
            self.headings.append(data)
        if {"td", "th"} & set(self._open) and "caption" not in self._open:
            self.tables[-1][-1][-1] += f" {data.strip()}"

    def tables_with(self, *heads: str) -> list[list[list[str]]]:
        """The tables whose first columns have these heads."""
        return [table for table in self.tables if [cell.strip() for cell in table[0][: len(heads)]] == list(heads)]


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def pictures_of(page: Page) -> list[str]:
    return [base64.b64decode(str(image["src"]).partition(",")[2]).decode() for image in page.images]


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8")
