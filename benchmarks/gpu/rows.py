"""Rows of `make gpu`: what is measured, under which name, and the floor that the figure should reach."""

import math
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["PARTS", "ROOT", "Figures", "Floor", "Missing", "Row", "Setting", "key", "medians", "outcome", "rows_of", "seconds", "settle"]

ROOT = Path(__file__).parent.parent.parent
PARTS = ("agreement", "training", "ways", "private", "audit", "whole_run", "profile", "device_tests")
"""Modules of this package, the most telling first. Each has `rows(setting)`."""
LIMIT = 60.0
"""Seconds of a row; one that takes longer is ended, so that it costs the others no more."""
LONG = 5.0
"""Seconds of a turn that is not repeated: the noise of the clock is small beside them."""
UNCAPTURED, MOST_NOTED = "could not be captured", 500
"""Warnings with these words are in the note of their row, which has so many characters at most."""

Figures = dict[str, Any]
"""Name -> number, and "note" -> words."""


@dataclass(frozen=True)
class Setting:
    """Where rows compute, whether they take the smallest cases, to rehearse them, and the folder for further files."""

    device: str
    tiny: bool
    out: Path

    def size(self, whole: int, tiny: int) -> int:
        """A size of a case."""
        return tiny if self.tiny else whole


@dataclass(frozen=True)
class Floor:
    """What a figure should be: at least `bound`, or at most."""

    figure: str
    bound: float
    at_least: bool = True


@dataclass(frozen=True)
class Row:
    """One measurement. `measure` gives its figures; what raises `Missing` or `ModuleNotFoundError` is skipped, with that reason."""

    part: str
    name: str
    measure: Callable[[Setting], Figures]
    floor: Floor | None = None
    limit: float = LIMIT

    @property
    def head(self) -> dict[str, Any]:
        """What a report has of a row before it is measured."""
        return {"part": self.part, "row": self.name, "floor": None if self.floor is None else asdict(self.floor)}


class Missing(Exception):
    """A package, data or a device that a row needs."""


def key(part: str, name: str) -> str:
    """The identity of a row in a report."""
    return f"{part}: {name}"


def rows_of(setting: Setting, modules: Sequence[str] = PARTS) -> list[Row]:
    """All rows, in order. A part that cannot be imported is one row, which says why."""
    rows: list[Row] = []
    for name in modules:
        try:
            module = import_module(f"{__package__}.{name}" if name in PARTS else name)
            rows += module.rows(setting)
        except ModuleNotFoundError as error:
            rows.append(Row(name, "all rows", partial(_refuse, str(error))))
    return rows


def _refuse(why: str, setting: Setting) -> Figures:
    raise Missing(why)


def outcome(row: Row, setting: Setting) -> dict[str, Any]:
    """The row as it stands in a report, with status "done", "skipped" or "failed"."""
    begun = time.perf_counter()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            figures = row.measure(setting)
            note = figures.pop("note", "")
            numbers = {name: value if math.isfinite(value) else None for name, value in figures.items()}
            made = {"status": "done", "note": note, "figures": numbers}
        except (Missing, ModuleNotFoundError) as error:
            made = {"status": "skipped", "note": str(error), "figures": {}}
        except Exception as error:
            traceback.print_exc()
            made = {"status": "failed", "note": f"{type(error).__name__}: {error}", "figures": {}}
    messages = dict.fromkeys(str(warning.message) for warning in seen)
    for line in messages:
        print(f"{row.part}: {row.name}: {line}", file=sys.stderr, flush=True)  # the log
    made["note"] = " ".join("; ".join([*filter(None, [made["note"]]), *(line for line in messages if UNCAPTURED in line)]).split())[
        :MOST_NOTED
    ]
    return {**row.head, **made, "took": round(time.perf_counter() - begun, 1)}


# --- time -------------------------------------------------------------------------------------------------------------------------------


def settle(device: str) -> None:
    """Wait for all that is queued on the device."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def seconds(work: Callable[[], object], device: str) -> float:
    """Wall time of `work`, which has ended on the device."""
    settle(device)
    begun = time.perf_counter()
    work()
    settle(device)
    return time.perf_counter() - begun


def medians(works: Sequence[Callable[[], object]], device: str, repeats: int = 3, warm_ups: int = 2) -> list[float]:
    """The median seconds of each work, in turns (A B A B), after `warm_ups` of each. Works whose last warm-up took `LONG` have one turn."""
    long = False
    for _ in range(warm_ups):
        long = sum([seconds(work, device) for work in works]) > LONG
    times = [[seconds(work, device) for work in works] for _ in range(1 if long else repeats)]
    return [statistics.median(column) for column in zip(*times, strict=True)]
