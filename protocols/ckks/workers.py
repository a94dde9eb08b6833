"""Worker processes for the server's products: SEAL holds Python's lock while it computes. They speak MessagePack over pipes, no pickle."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import IO

import msgspec

from ..errors import LocalError
from .messages import Setup
from .products import Job, Output, Products

__all__ = ["CkksWorkers", "serve"]

_AHEAD = 2


class _Task(msgspec.Struct, frozen=True, array_like=True):
    setup: Setup
    holder: bytes
    public_key: bytes
    job: Job


_outputs = msgspec.msgpack.Decoder(list[Output])
_task = msgspec.msgpack.Decoder(_Task)


class CkksWorkers:
    """`count` processes of this program. Results come in the order of the jobs, whoever did them; masks are every process's own."""

    def __init__(self, count: int) -> None:
        # -P: nothing is imported from the working directory, which may be anybody's folder
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) for _ in range(max(1, count))
        ]
        self._free: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for process in self._processes:
            self._free.put(process)
        self._threads = ThreadPoolExecutor(len(self._processes))

    def map(self, setup: Setup, holder: bytes, public_key: bytes, jobs: Sequence[Job]) -> Iterator[list[Output]]:
        """Each job's outputs. Raises `LocalError` "worker-ended" if a process ends."""
        at_once = _AHEAD * len(self._processes)
        waiting = [self._threads.submit(self._run, setup, holder, public_key, job) for job in jobs[:at_once]]
        for number in range(len(jobs)):
            outputs = waiting.pop(0).result()
            if number + at_once < len(jobs):
                waiting.append(self._threads.submit(self._run, setup, holder, public_key, jobs[number + at_once]))
            yield outputs

    def _run(self, setup: Setup, holder: bytes, public_key: bytes, job: Job) -> list[Output]:
        process = self._free.get()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            _write(process.stdin, msgspec.msgpack.encode(_Task(setup, holder, public_key, job)))
            answer = _read(process.stdout)
        except OSError:
            answer = None
        finally:
            self._free.put(process)
        if answer is None:
            raise LocalError("worker-ended", "out of memory?")
        return _outputs.decode(answer)

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def serve() -> None:
    """A worker's life: tasks in, outputs out, until its standard input ends."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing a library prints may come between the frames
    of: tuple[bytes, bytes, bytes] | None = None
    while (data := _read(sys.stdin.buffer)) is not None:
        task = _task.decode(data)
        epoch = (task.setup.digest, task.holder, task.public_key)
        if epoch != of:
            of, products = epoch, Products(task.setup, task.holder, task.public_key)
        _write(out, msgspec.msgpack.encode(products.compute(task.job)))


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(8, "big") + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes | None:
    size = pipe.read(8)
    if len(size) < 8:
        return None
    data = pipe.read(int.from_bytes(size, "big"))
    return data if len(data) == int.from_bytes(size, "big") else None
