"""What takes the time of a round: torch's profile of plain and private training, in OUT/profile.txt."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from cflpriv.engine import Engine
from cflpriv.tasks.training import Train

from .busy import profiled
from .private import PRIVATE, SAMPLES
from .rows import Figures, Row, Setting, medians
from .training import CASES, Case, clients_of, fresh

__all__ = ["rows"]

PAGE = "profile.txt"


def of_a_round(setting: Setting, case: Case, name: str, count: int, options: Mapping[str, Any]) -> Figures:
    """The operations, and functions of Python, of a round that take the longest."""
    with fresh(setting.device):
        inputs = clients_of(case, setting, count, SAMPLES if options else min(case.samples, 100))
        engine = Engine("torch", device=setting.device)
        work = partial(engine.run, Train(case.model, **(options or {"momentum": 0.5})), inputs)
        (took,) = medians([work], setting.device, repeats=1)
        operations = profiled(work, setting.device, setting.out / PAGE, f"{case.name}, {len(inputs)} clients, {name}")
    return {"ms": 1000 * took, "operations ms": 1000 * operations, "note": f"the longest of them: {PAGE}"}


def rows(setting: Setting) -> list[Row]:
    """Plain and private training."""
    lenet, resnet = CASES[0], CASES[3]
    scenes: tuple[tuple[Case, str, int, Mapping[str, Any]], ...] = (
        (lenet, "plain", 1000, {}), (lenet, "private", 1000, PRIVATE), (resnet, "plain", 100, {}),
    )  # fmt: skip
    return [
        Row("profile", f"{case.name}, {count} clients, {name}", partial(of_a_round, case=case, name=name, count=count, options=options))
        for case, name, count, options in scenes
    ]
