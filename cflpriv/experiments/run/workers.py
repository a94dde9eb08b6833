"""Worker processes for the runs of a sweep: each makes one run after the other, and ends with its parent."""

import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_all_start_methods, get_context, parent_process
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import Any, Protocol, TypeVar

from ...engine.device import resolved
from ...engine.threads import cores, one_core
from ...engine.workers import BEGUN, UNGUARDED
from ...errors import CflprivWarning, InputError, InputWarning, warning_words
from ...plugins import loaded_plugins, run_plugins

__all__ = ["ended", "processes_for"]


class NamedJob(Protocol):
    """What a worker is sent."""

    @property
    def name(self) -> str: ...


One = TypeVar("One", bound=NamedJob)


def processes_for(devices: Iterable[str], each: int = 1) -> int:
    """The processes that share runs on these devices by default: one a core, fewer if a run has `each` processes itself; on a GPU one."""
    return 1 if any(resolved(device) == "cuda" for device in devices) else max(1, cores() // each)


def ended(
    todo: Sequence[One], work: Callable[[One], str], workers: int, began: Callable[[str], None] = lambda name: None
) -> Iterator[tuple[str, str]]:
    """(name, error or nothing) of each job as it ends. Another process calls `work` with the job. `began` gets each name at its start.

    Warnings of workers are given here, once where they differ by numbers alone. What the summary of a run says (`InputWarning`) is
    left to those who read it. A worker that dies fails its run only; another takes its place. `InputError` if it could not import the
    script that runs this.
    """
    waiting = list(reversed(todo))
    busy: dict[Connection, tuple[_Worker, str]] = {}
    idle: list[_Worker] = []
    begun: set[Connection] = set()
    warned: set[str] = set()
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                idle = [other for other in idle if other.process.is_alive()]
                worker = idle.pop() if idle else _Worker.start()
                job = waiting.pop()
                with suppress(OSError):  # it has ended already; receiving reports that
                    worker.link.send((work, job))
                busy[worker.link] = (worker, job.name)
                began(job.name)
            for link in [link for link in wait(list(busy)) if isinstance(link, Connection)]:
                worker, name = busy.pop(link)
                try:
                    message = worker.link.recv()
                except (EOFError, OSError):  # the latter where it died without reading its run
                    worker.process.join()
                    if worker.process.exitcode == 1 and link not in begun:
                        raise InputError(UNGUARDED) from None
                    yield name, f"its worker process died (exit code {worker.process.exitcode})"
                    continue
                if message == BEGUN:
                    begun.add(link)
                    busy[link] = (worker, name)
                elif isinstance(message, _Warned):
                    busy[link] = (worker, name)
                    if (kind := re.sub(r"[0-9]+", "#", message.words)) not in warned:
                        warned.add(kind)
                        warnings.warn(message.words, CflprivWarning, stacklevel=2)
                else:
                    yield name, message
                    idle.append(worker)
    finally:
        for worker in [*idle, *(worker for worker, _ in busy.values())]:
            worker.link.close()  # an idle worker ends by itself
        for worker, _ in busy.values():
            worker.process.join(timeout=STOPPING_SECONDS)
            worker.process.kill()


STOPPING_SECONDS = 5.0
"""After Ctrl-C a worker has this long to finish its round; whatever it does, its run can be resumed."""


@dataclass(frozen=True)
class _Warned:
    """What a worker sends of a warning."""

    words: str


@dataclass(frozen=True)
class _Worker:
    """A process that runs the jobs sent to it, one after the other."""

    process: Any
    link: Connection = field(repr=False)

    @classmethod
    def start(cls) -> "_Worker":
        context: Any = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
        if context.get_start_method() == "forkserver":
            context.set_forkserver_preload(["cflpriv.experiments.run.folder"])  # torch is loaded once, not by every worker
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, loaded_plugins()), daemon=False)
        process.start()
        theirs.close()
        return cls(process, ours)


def _serve(link: Connection, plugins: Mapping[str, bytes]) -> None:
    """A worker's life, with the `plugins` that its parent ran, not what their files have become since."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # between rounds; a run has its own way to stop
    Thread(target=_end_with_parent, daemon=True).start()
    one_core()
    _warn_over(link)
    with suppress(EOFError, OSError):
        link.send(BEGUN)
        while True:
            work, job = link.recv()
            try:
                run_plugins(plugins)
            except InputError as error:
                link.send(str(error))
            else:
                link.send(work(job))


def _warn_over(link: Connection) -> None:
    """Send what this process warns of to its parent."""

    def send(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: str | None = None
    ) -> None:
        with suppress(EOFError, OSError):
            link.send(_Warned(warning_words(message, category, filename, lineno)))

    warnings.simplefilter("ignore", InputWarning)
    warnings.showwarning = send


def _end_with_parent() -> None:
    """A sweep that was killed leaves no workers behind, which would hold their run folders."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
