"""The templates of reports: *.html of this folder, with the filters that they use."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING

from ...console import counted
from .answer import headed
from .audit_words import MEANINGS, SIGNS, STATUS, metric_words
from .pictures import is_wide
from .run_names import adversary_words

if TYPE_CHECKING:
    import jinja2
    import markupsafe

__all__ = ["numbering", "templates"]


def templates() -> "jinja2.Environment":
    """The environment of all pages: values are escaped, and a name that is missing is an error."""
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, bytecode_cache=_compiled(),
    )  # fmt: skip
    made.filters["percent"] = lambda value: "–" if value is None else f"{100 * value:.1f}"
    made.filters |= {"counted": counted, "figure": _figure, "metric": metric_words, "megabytes": lambda size: f"{size / 1e6:.2f}"}
    made.filters |= {"wide": is_wide, "headed": headed, "spaced": _spaced}
    made.filters |= {"adversary": adversary_words, "adversaries": _adversaries, "kilobytes": lambda size: f"{size / 1e3:,.0f} kB"}
    made.globals |= {"status": STATUS, "signs": SIGNS, "meanings": MEANINGS, "numbered": numbering()}
    return made


@cache
def _compiled() -> "jinja2.BytecodeCache":
    """Templates as they were compiled for the first page of this process."""
    import jinja2

    class Compiled(jinja2.BytecodeCache):
        def __init__(self) -> None:
            self.kept: dict[str, tuple[str, CodeType | None]] = {}

        def load_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
            checksum, code = self.kept.get(bucket.key, ("", None))
            if checksum == bucket.checksum:
                bucket.code = code

        def dump_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
            self.kept[bucket.key] = bucket.checksum, bucket.code

    return Compiled()


def _spaced(command: str) -> "markupsafe.Markup":
    """The words of a command, each a whole that breaks only where it is wider than the page: no `--out` in two lines."""
    from markupsafe import Markup

    return Markup(" ").join(Markup("<span>{}</span>").format(word) for word in command.split(" "))


def _adversaries(names: str) -> str:
    return ", ".join(adversary_words(name) for name in names.split(", "))


def numbering() -> Callable[[int], str]:
    """Numbers of the figures of a page, in the order of asking: 1a, 1b, … in section 1, and so on."""
    last: Counter[int] = Counter()

    def number(section: int) -> str:
        last[section] += 1
        letters, rest = "", last[section]
        while rest:
            rest, letter = divmod(rest - 1, 26)
            letters = chr(ord("a") + letter) + letters
        return f"{section}{letters}"

    return number


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
