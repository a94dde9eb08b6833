"""The callback `tensorboard`: what a run measures, as scalars for TensorBoard. Needs the extra `[tensorboard]`."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from .callbacks import Callback

if TYPE_CHECKING:
    from .config import Config

__all__ = ["FOLDER", "TensorBoard", "scalars"]

FOLDER = "tensorboard"
"""Where the event files are, in the run folder."""
LEFT_OUT = ("round",)


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of rounds.jsonl by name; lists of clients count, and what is unknown is left out."""
    found = {}
    for name, value in row.items():
        if isinstance(value, list) and name in ("cohort", "admitted", "lost"):
            found[name] = float(len(value))
        elif isinstance(value, int | float) and not isinstance(value, bool) and name not in LEFT_OUT:
            found[name] = float(value)
    return found


class TensorBoard(Callback):
    """Writes each round's numbers under the step of its round, and lines for people as text of the run folder's log."""

    def __init__(self) -> None:
        self._writer: EventFileWriter | None = None

    def on_start(self, folder: Path, config: "Config", rounds: int) -> None:
        self._writer = EventFileWriter(str(folder / FOLDER))
        # a resumed run repeats rounds after its checkpoint: what was written of them before is dropped by the reader
        self._add(Event(step=rounds, session_log=SessionLog(status=SessionLog.START)))

    def on_round(self, row: Mapping[str, Any]) -> None:
        values = [Summary.Value(tag=f"round/{name}", simple_value=value) for name, value in scalars(row).items()]
        self._add(Event(step=row["round"], summary=Summary(value=values)))

    def on_end(self, summary: Mapping[str, Any]) -> None:
        values = [Summary.Value(tag=f"summary/{name}", simple_value=value) for name, value in scalars(summary).items()]
        self._add(Event(step=summary["rounds"], summary=Summary(value=values)))
        if self._writer is not None:
            self._writer.close()

    def _add(self, event: Event) -> None:
        if self._writer is not None:
            event.wall_time = time.time()
            self._writer.add_event(event)
            self._writer.flush()
