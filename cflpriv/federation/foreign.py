"""A task whose work is done by somebody else's code on the client, so that an existing application can train by its own means."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..types import Parts

__all__ = ["Foreign"]


@dataclass(frozen=True)
class Foreign:
    """Run the client's own function `name`. It is given arrays by name and gives those that are `asked` for.

    `layout` says how a flat vector "model" is cut into named arrays: (name, shape, dtype); `config` are the application's own settings.
    Parts that are flat vectors are float32 or float64.
    """

    KINDS: ClassVar[Mapping[str, Parts]] = {"train": {"update": "summed"}, "signature": {"signature": "compared"}}
    """Function -> the kinds of its parts. Those of others are summed, the strictest, whatever a server calls them."""

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
