"""What a key of a configuration means. It stands beside the key's type where the key is declared.

    lr: Annotated[float, Key("Learning rate of a local step.", "(0, inf)")] = 0.01

A field of a section and a keyword parameter of an algorithm are declared alike. `experiments.config_reference` makes the reference page,
the editor schema and `cflpriv explain` from these.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["Key"]

_INTERVAL = re.compile(r"([\[(])\s*([^,\s]+)\s*,\s*([^,\s]+)\s*([\])])")


@dataclass(frozen=True)
class Key:
    """The `meaning` of a key, in one or two sentences; the `range` of its numbers as an interval such as "[0, 1)"; their `unit`.

    `default` replaces the printed default where that depends on other keys. `known` lists the names that a key takes. Raises
    `ValueError` for a range that is no interval.
    """

    meaning: str
    range: str = ""
    unit: str = ""
    default: str = ""
    known: Callable[[], Iterable[str]] | None = None

    def __post_init__(self) -> None:
        if self.range and not _INTERVAL.fullmatch(self.range):
            raise ValueError(f"range {self.range!r}: expected an interval such as '[0, 1)'")

    @property
    def bounds(self) -> tuple[float, bool, float, bool]:
        """The low end, whether it belongs to the range, the high end, whether it does. Without a range: (-inf, False, inf, False)."""
        found = _INTERVAL.fullmatch(self.range)
        if found is None:
            return -math.inf, False, math.inf, False
        return _number(found[2]), found[1] == "[", _number(found[3]), found[4] == "]"

    @property
    def range_text(self) -> str:
        """The range as the reference prints it: "≥ 1", "> 0" or an interval; empty where there is none."""
        low, low_in, high, _ = self.bounds
        if not self.range or math.isfinite(high):
            return self.range
        return f"{'≥' if low_in else '>'} {low:g}"


def _number(text: str) -> float:
    base, _, power = text.partition("^")
    return math.pow(float(base), float(power or 1))
