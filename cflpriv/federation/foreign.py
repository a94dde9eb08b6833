"""A task that runs the client application's own function, so that an existing application can train with its own code."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..types import Parts

__all__ = ["ROUND", "Foreign"]

ROUND = "round"
"""The name under which a function gets the number of the round, from 0."""


@dataclass(frozen=True)
class Foreign:
    """Run the client's own function `name`. It gets arrays by name, and the round, and returns those that are `asked` for.

    `layout` (name, shape, dtype) splits a flat vector "model" into named arrays; `config` has the application's own settings. Parts that
    are flat vectors are float32 or float64.
    """

    KINDS: ClassVar[Mapping[str, Parts]] = {"train": {"update": "summed", "loss": "measure"}, "signature": {"signature": "compared"}}
    """Function -> the kinds of its parts. Parts of other functions are "summed", the strictest kind."""

    name: str
    asked: tuple[str, ...]
    layout: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    config: tuple[tuple[str, bool | int | float | str], ...] = ()

    @property
    def parts(self) -> Parts:
        known = self.KINDS.get(self.name, {})
        return {part: known.get(part, "summed") for part in self.asked}

    @property
    def keeps(self) -> tuple[str, ...]:
        return ()

    def run(self, given: Any) -> dict[str, Any]:
        raise TypeError(f"task {self.name!r} is done by the client's own application, which is not here")
