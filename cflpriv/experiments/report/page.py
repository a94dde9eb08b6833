"""The templates of reports: *.html of this folder, with the filters that they use."""

from pathlib import Path
from typing import TYPE_CHECKING

from .audit_words import STATUS, metric_words

if TYPE_CHECKING:
    import jinja2

__all__ = ["templates"]


def templates() -> "jinja2.Environment":
    """The environment of all pages: values are escaped, and a name that is missing is an error."""
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    made.filters["percent"] = lambda value: "–" if value is None else f"{100 * value:.1f}"
    made.filters |= {"figure": _figure, "metric": metric_words, "megabytes": lambda size: f"{size / 1e6:.2f}"}
    made.globals["status"] = STATUS
    return made


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
