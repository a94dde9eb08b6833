"""How many threads compute: linear algebra has one, so that sums are added in the same order everywhere; clients share all cores.

Clients are divided among worker processes, or among threads of the compiled kernel, which runs outside of Python's lock.
"""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import copy_context
from functools import cache, lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what only computes for a device does without
    from threadpoolctl import ThreadpoolController

__all__ = ["cores", "one_core", "one_thread", "together"]

_SHARED: list[bool] = []


def one_thread() -> AbstractContextManager[object]:
    """Inside, the thread pools of the libraries that are loaded by now have one thread each."""
    limit: AbstractContextManager[object] = _pools(len(sys.modules)).limit(limits=1)
    return limit


def cores() -> int:
    """How many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def one_core() -> None:
    """From now on this process computes on one core, because other processes beside it compute other parts of the same work."""
    _SHARED.append(True)


def together(some: Callable[[], None], parts: int) -> None:
    """Call `some` in this thread, and at the same time in as many others as there are free cores, at most in `parts` in all.

    There is one thread a core, or as many as `OMP_NUM_THREADS` says. An error of one is raised here, after all have ended.
    """
    count = 1 if _SHARED else min(parts, _allowed() or cores(), cores())
    if count <= 1:
        some()
        return
    with ThreadPoolExecutor(count - 1) as pool:
        others = [pool.submit(copy_context().run, some) for _ in range(count - 1)]
        some()
    for other in others:
        other.result()


@cache
def _allowed() -> int:
    """`OMP_NUM_THREADS` of the environment; 0 for none."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(given) if given.isdecimal() else 0


@lru_cache(maxsize=1)
def _pools(imported: int) -> "ThreadpoolController":
    """The pools there are. The search takes 10 ms or more, so it is repeated only after further imports."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
