"""Persistent worker processes over chunks of clients. A client's data is sent to a worker once and kept there.

The processes are this program's own children; what passes between them never comes from anyone else.
"""

import multiprocessing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from ..errors import InputError, WorkerLost
from ..plugins import loaded_plugins, run_plugins
from ..types import ClientData
from .seam import Result, Task, TaskInput
from .threads import one_core, one_thread

__all__ = ["UNGUARDED", "Workers"]

LOST = "a worker process ended by itself (killed, or out of memory?); fewer [run] workers take less"
UNGUARDED = (
    "worker processes could not start (their error is above): each imports the script, which has to keep what it runs under "
    '`if __name__ == "__main__":`'
)
BEGUN = "begun"
"""What a worker says first: that it could import the program's script."""


class Workers:
    """`count` processes with one intra-op thread each. Chunks go to whoever is free; the results come back in order."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._begun: set[Connection] = set()
        self._known: list[dict[int, ClientData]] = [{} for _ in range(count)]  # keeps the data alive, so that ids stay theirs
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, loaded_plugins()), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def map(self, task: Task, jobs: Sequence[Sequence[TaskInput]], kind: Any) -> list[tuple[list[Result], str]]:
        """Each job's results and path. An error in a worker is raised here, after the others have finished their chunk.

        Raises `WorkerLost` if one is no longer there, and `InputError` if it could not import the script that runs this.
        """
        done: list[tuple[list[Result], str] | None] = [None] * len(jobs)
        waiting = list(reversed(range(len(jobs))))
        busy: dict[Connection, int] = {}
        error: BaseException | None = None
        for worker in range(len(self._pipes)):
            if waiting:
                self._send(worker, task, jobs, waiting.pop(), kind, busy)
        while busy:
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                number = busy.pop(pipe)
                try:
                    answer = pipe.recv()
                except (EOFError, OSError):
                    raise self._lost(self._pipes.index(pipe)) from None
                if answer == BEGUN:
                    self._begun.add(pipe)
                    busy[pipe] = number
                    continue
                if isinstance(answer, BaseException):
                    error = error or answer
                else:
                    results, path = answer
                    done[number] = [_bound(result, task_input) for result, task_input in zip(results, jobs[number], strict=True)], path
                if waiting and error is None:
                    self._send(self._pipes.index(pipe), task, jobs, waiting.pop(), kind, busy)
        if error is not None:
            raise error
        return [result for result in done if result is not None]

    def _send(
        self, worker: int, task: Task, jobs: Sequence[Sequence[TaskInput]], number: int, kind: Any, busy: dict[Connection, int]
    ) -> None:
        known, fresh = self._known[worker], {}
        for task_input in jobs[number]:
            if id(task_input.data) not in known:
                known[id(task_input.data)] = fresh[id(task_input.data)] = task_input.data
        light = [
            (id(task_input.data), task_input.params, task_input.memory, task_input.streams, task_input.choice, task_input.secret)
            for task_input in jobs[number]
        ]
        try:
            self._pipes[worker].send((task, fresh, light, kind))
        except OSError:
            raise self._lost(worker) from None
        busy[self._pipes[worker]] = number

    def _lost(self, worker: int) -> Exception:
        process = self._processes[worker]
        process.join(timeout=5)
        return InputError(UNGUARDED) if self._pipes[worker] not in self._begun and process.exitcode == 1 else WorkerLost(LOST)

    def close(self) -> None:
        """End the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            with suppress(OSError):
                pipe.send(None)
            pipe.close()
            process.join(timeout=5)
            if process.is_alive():
                process.terminate()


def _bound(result: Result, task_input: TaskInput) -> Result:
    """Give values that are made on demand the client's data, which did not travel back."""
    return {name: value.bound(task_input.data) if hasattr(value, "bound") else value for name, value in result.items()}


def _serve(pipe: Connection, plugins: Mapping[str, bytes]) -> None:
    """A worker's life: chunks in, results out, until None or the parent's end."""
    import signal

    pipe.send(BEGUN)
    import torch

    from .allocator import keep_freed_memory
    from .compute import compute
    from .device import CPU

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it ends after the round
    torch.set_num_threads(1)
    one_core()
    keep_freed_memory()
    run_plugins(plugins)  # tasks are of classes, and models by names, that they define
    data: dict[int, ClientData] = {}
    with one_thread():
        while True:
            try:
                message = pipe.recv()
            except EOFError:
                return
            if message is None:
                return
            task, fresh, light, kind = message
            data |= fresh
            try:
                inputs = [TaskInput(data[key], *rest) for key, *rest in light]
                pipe.send(compute(task, inputs, kind, CPU))
            except Exception as error:
                pipe.send(error)
