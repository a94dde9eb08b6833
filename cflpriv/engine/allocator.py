"""Training frees and asks for the same large buffers thousands of times; glibc hands them back to the system each time, at the price of
page faults (a fifth of a step). This makes it keep them."""

import ctypes
import sys
from functools import cache

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h


@cache
def keep_freed_memory() -> bool:
    """Let the C library keep freed buffers up to 1 GiB for reuse; once a process. False where the C library is not glibc."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 1 << 30) and mallopt(_TRIM_THRESHOLD, 1 << 30) and mallopt(_TOP_PAD, 1 << 26))
