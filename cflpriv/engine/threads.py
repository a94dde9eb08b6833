"""Single-threaded linear algebra: processes compute in parallel, and sums are added in the same order everywhere."""

import os
import sys
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what only computes for a device does without
    from threadpoolctl import ThreadpoolController

__all__ = ["cores", "one_thread"]


def one_thread() -> AbstractContextManager[object]:
    """Inside, the thread pools of the libraries that are loaded by now have one thread each."""
    limit: AbstractContextManager[object] = _pools(len(sys.modules)).limit(limits=1)
    return limit


def cores() -> int:
    """How many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


@lru_cache(maxsize=1)
def _pools(imported: int) -> "ThreadpoolController":
    """The pools there are. The search takes 10 ms or more, so it is repeated only after further imports."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
