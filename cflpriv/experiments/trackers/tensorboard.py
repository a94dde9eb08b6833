"""The callback `tensorboard`: what a run measures, as scalars for TensorBoard. Needs the extra `[tensorboard]`."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.callbacks import Callback, register_callback
from .figures import scalars

if TYPE_CHECKING:
    from ..config.config import Config

__all__ = ["FOLDER", "TensorBoard"]

FOLDER = "tensorboard"
"""Where the event files are, in the run folder."""


class TensorBoard(Callback):
    """Writes each round's numbers under the step of its round, and those of the summary at the end."""

    def __init__(self) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2  # here, so that the name is known without the extra
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._open, self._events, self._summaries = EventFileWriter, event_pb2, summary_pb2
        self._writer: Any = None

    def on_start(self, folder: Path, config: "Config", rounds: int) -> None:
        self._writer = self._open(str(folder / FOLDER))
        # a resumed run repeats rounds after its checkpoint: what was written of them before is dropped by the reader
        self._add(step=rounds, session_log=self._events.SessionLog(status=self._events.SessionLog.START))

    def on_round(self, row: Mapping[str, Any]) -> None:
        self._numbers("round", row, row["round"])

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._numbers("summary", summary, summary["rounds"])
        self._writer.close()

    def on_error(self, error: Exception) -> None:
        if self._writer is not None:
            self._writer.close()

    def _numbers(self, group: str, row: Mapping[str, Any], step: int) -> None:
        values = [self._summaries.Summary.Value(tag=f"{group}/{name}", simple_value=value) for name, value in scalars(row).items()]
        self._add(step=step, summary=self._summaries.Summary(value=values))

    def _add(self, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), **content))
        self._writer.flush()


register_callback("tensorboard", TensorBoard)
