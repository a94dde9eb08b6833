"""One call of `make gpu`: starts the worker, keeps the limits of rows and the budget of the whole, and writes the report."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .report import Report, shown
from .rows import ROOT, Setting, key

__all__ = ["NoDevice", "Session"]

LOG, MOST_LOGGED = "gpu.log", 2**22
"""Where workers' messages go, and how many bytes of the last ones are kept."""

START = {"part": "worker", "name": "start"}
"""The row of a call whose worker never came as far as a row."""
LONGEST_END = 5.0
"""Seconds that are waited for the end of a worker."""


class NoDevice(Exception):
    """There is nothing to compute on."""


@dataclass(eq=False)
class Limit:
    """Until when (`time.monotonic`) the present row may take."""

    until: float


@dataclass(eq=False)
class Session:
    """What a call measures, until when (`time.monotonic`), and the environment of its workers."""

    setting: Setting
    report: Report
    deadline: float
    modules: Sequence[str]
    environment: Mapping[str, str]
    begun: float = field(default_factory=time.monotonic)

    def measure(self, parts: Sequence[str] = ()) -> None:
        """The rows that are missing; then, again, those that failed or were skipped in an earlier call. With `parts` all of these, anew.

        Raises `NoDevice`. A row that time did not suffice for is missing afterwards.
        """
        self.report.rows.pop(key(**START), None)
        earlier = self.report.with_status("failed", "skipped")
        if parts:
            again = {name for name in self.report.rows if name.partition(":")[0] in parts}
            self._pass(set(self.report.rows) - again, parts)
        elif self._pass(set(self.report.rows)) and earlier:
            self._pass(set(self.report.rows) - earlier)

    def _pass(self, left_out: set[str], parts: Sequence[str] = ()) -> bool:
        """Measure every row but those left out, whatever becomes of single ones; False when the time has ended."""
        modules, silent = [name for name in self.modules if not parts or name in parts], 0
        while True:
            with _worker(self.setting, modules, self.environment) as process:
                state, reached = self._listen(process, left_out)
            if state != "again":
                return state == "end"
            silent = 0 if reached else silent + 1
            if silent == 2:  # it did not come as far as a row, twice
                self._fail({"part": START["part"], "row": START["name"], "floor": None}, _last_line(self.setting.out / LOG))
                return True

    def _listen(self, process: "subprocess.Popen[str]", left_out: set[str]) -> tuple[str, bool]:
        """Take a worker's lines; "end", "time" or "again", and whether it came as far as a row."""
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(sorted(left_out)) + "\n")
            process.stdin.flush()
        begun: dict[str, Any] | None = None
        limit, reached = Limit(self.deadline), False
        for message in _messages(process, limit):
            match message:
                case {"none": why}:
                    raise NoDevice(why)
                case {"machine": machine}:
                    if not self.report.on(machine):
                        self._say("the rows in the folder are of another machine and were put aside")
                        left_out.clear()
                        return "again", True
                case {"rows": order}:
                    self.report.order = [*self.report.order, *(name for name in order if name not in self.report.order)]
                case {"begin": head, "limit": longest}:
                    begun, reached = head, True
                    left_out.add(key(head["part"], head["row"]))
                    limit.until = min(self.deadline, time.monotonic() + longest)
                case {"row": row}:
                    begun, limit.until = None, self.deadline
                    self._add(row)
                case {"end": True}:
                    return "end", True
        if time.monotonic() >= self.deadline:
            self._say("the budget is used up; the next call goes on" + (f" with {self.report.missing[0]!r}" if self.report.missing else ""))
            return "time", reached
        if begun is not None:
            ended = time.monotonic() >= limit.until
            why = (
                f"not done after {longest:g} s" if ended else f"its process ended ({_code(process)}): {_last_line(self.setting.out / LOG)}"
            )
            self._fail(begun, why)
        return "again", reached

    def _fail(self, head: dict[str, Any], why: str) -> None:
        self._add({**head, "status": "failed", "figures": {}, "note": why})

    def _add(self, row: dict[str, Any]) -> None:
        self.report.add(row)
        self._say(shown(row, self.report.decides))

    def _say(self, words: str) -> None:
        print(f"[{time.monotonic() - self.begun:4.0f} s] {words}", file=sys.stderr, flush=True)


@contextmanager
def _worker(setting: Setting, modules: Sequence[str], environment: Mapping[str, str]) -> Iterator["subprocess.Popen[str]"]:
    """A worker in a process group of its own, which is ended at the end."""
    words = [
        "--worker", "--out", str(setting.out), "--device", setting.device, "--modules", ",".join(modules),
        *(["--tiny"] if setting.tiny else []),
    ]  # fmt: skip
    log = setting.out / LOG
    with log.open("a", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks", "gpu", *words], cwd=ROOT, env={**environment, "PYTHONSAFEPATH": ""},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8", start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a driver may take its time, which is not in the budget
            process.wait(LONGEST_END)
        for pipe in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]
        if log.stat().st_size > MOST_LOGGED:
            log.write_bytes(log.read_bytes()[-MOST_LOGGED:])


def _messages(process: "subprocess.Popen[str]", limit: Limit) -> Iterator[dict[str, Any]]:
    """A worker's lines as they come, until it ends or the limit is reached."""
    assert process.stdout is not None
    handle, text = process.stdout.fileno(), b""
    with selectors.DefaultSelector() as selector:
        selector.register(handle, selectors.EVENT_READ)
        while (left := limit.until - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            if not (piece := os.read(handle, 2**16)):
                return
            text += piece
            *lines, text = text.split(b"\n")
            for line in lines:
                yield json.loads(line)


def _code(process: "subprocess.Popen[str]") -> str:
    """How a process ended whose output has: its exit code, or the signal."""
    with suppress(subprocess.TimeoutExpired):
        code = process.wait(LONGEST_END)
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return "without an exit code"


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.is_file() else []
    return lines[-1][:300] if lines else "no message"
