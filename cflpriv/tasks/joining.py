"""Join several values of a client, so that one sum takes them all."""

from dataclasses import dataclass
from typing import ClassVar

from ..engine import Result, TaskInput
from ..types import Parts

__all__ = ["Join"]


@dataclass(frozen=True)
class Join:
    """The given values under the same names, as the parts of one held value. Parts: `names`, each of the shape given.

    It `keeps_noise`: a sum's noise on a joined value is as much on each of its parts.
    """

    names: tuple[str, ...]

    uses_data: ClassVar[bool] = False
    keeps_noise: ClassVar[bool] = True
    keeps: ClassVar[tuple[str, ...]] = ()

    @property
    def parts(self) -> Parts:
        return dict.fromkeys(self.names, "summed")

    def run(self, task_input: TaskInput) -> Result:
        return {name: task_input.array(name) for name in self.names}
