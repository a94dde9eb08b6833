"""The process that measures rows one after the other and sends each to the session that started it, as lines of JSON on its output.

The first line of its input has the keys of the rows to leave out. Its input then stays open: when it ends, the session is gone, and this
process ends itself with all that it started.
"""

import json
import os
import platform
import signal
import sys
import threading
from collections.abc import Sequence
from importlib import metadata
from typing import Any, TextIO

from .rows import Setting, key, outcome, rows_of, settle

__all__ = ["work"]


def work(setting: Setting, modules: Sequence[str]) -> None:
    """Measure what is missing; "end" is the last line after the last row."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no line of the channel
    left_out = set(json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_session, daemon=True).start()
    if setting.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            send(channel, {"none": "torch finds no CUDA device here; `python -m benchmarks gpu --device cpu --tiny` rehearses without one"})
            return
    send(channel, {"machine": machine(setting)})
    rows = rows_of(setting, modules)
    send(channel, {"rows": [key(row.part, row.name) for row in rows]})
    for row in rows:
        name = key(row.part, row.name)
        if name not in left_out:
            send(channel, {"begin": row.head, "limit": row.limit})
            send(channel, {"row": outcome(row, setting)})
            if not usable(setting.device):
                return  # the session starts another process
    send(channel, {"end": True})


def send(channel: TextIO, message: dict[str, Any]) -> None:
    channel.write(json.dumps(message) + "\n")
    channel.flush()


def _end_with_session() -> None:
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def usable(device: str) -> bool:
    """Whether the device still computes: some errors leave the context of a process unusable."""
    try:
        settle(device)
    except RuntimeError:
        return False
    return True


def machine(setting: Setting) -> dict[str, Any]:
    """What the rows ran on. `rehearsal`: not on a CUDA device, or the smallest cases."""
    machine = {"device": "CPU", "rehearsal": True, "torch": metadata.version("torch"), "cuda": None, "python": platform.python_version()}
    if setting.device == "cpu":
        return machine
    import torch

    return machine | {"device": torch.cuda.get_device_name(), "rehearsal": setting.tiny, "cuda": torch.version.cuda}
