"""Progress of a run: a bar of rounds, and one of each long step inside a round, on a terminal or in a notebook."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .console import row_text

__all__ = ["RunProgress", "run_progress"]


@dataclass(frozen=True)
class RunProgress:
    """For `run_experiment`: `tick` takes the row of a round, `step` the activity, done and total. `line` prints above the bars."""

    tick: Callable[[dict[str, Any]], None]
    step: Callable[[str, int, int], None]
    line: Callable[[str], None]


@contextmanager
def run_progress(rounds: int, console: Console, *, shown: bool = True) -> Iterator[RunProgress]:
    """Bars for a run of so many rounds, while the block runs; none where the console is neither a terminal nor a notebook."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[result]}"),
    )  # fmt: skip
    drawn = shown and (console.is_terminal or console.is_jupyter)
    with Progress(*columns, console=console, disable=not drawn) as progress:
        bar = progress.add_task("rounds", total=rounds, result="")
        steps: dict[str, Any] = {}

        def tick(row: dict[str, Any]) -> None:
            progress.update(bar, completed=row["round"] + 1, result=row_text(row))

        def step(activity: str, done: int, total: int) -> None:
            if activity not in steps:
                steps[activity] = progress.add_task(activity, total=total, result="")
            progress.update(steps[activity], completed=done, total=total, visible=done < total)

        yield RunProgress(tick, step, lambda line: progress.console.print(line, markup=False))
