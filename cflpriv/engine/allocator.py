"""Training frees and asks for the same large buffers thousands of times; glibc hands them back to the system each time, at the price of
page faults (a fifth of a step). This makes it keep them, unless memory is what a run is short of."""

import ctypes
import sys
from functools import cache

__all__ = ["keep_freed_memory", "return_freed_memory"]

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h


@cache
def keep_freed_memory() -> bool:
    """Let the C library keep freed buffers up to 1 GiB for reuse; once a process. False where the C library is not glibc."""
    return _set(mmap_threshold=1 << 30, trim_threshold=1 << 30, top_pad=1 << 26)


def return_freed_memory() -> bool:
    """Hand back what is kept of freed buffers, and from now on those of 256 KiB and more when they are freed. False if not glibc.

    Kept buffers of several sizes do not fit each other's places, so that three times as many are held as are in use.
    """
    if not _hand_back():
        return False
    ctypes.CDLL(None).malloc_trim(0)
    return True


@cache
def _hand_back() -> bool:
    keep_freed_memory()  # which would undo it
    return _set(mmap_threshold=1 << 18, trim_threshold=1 << 22, top_pad=1 << 20)


def _set(mmap_threshold: int, trim_threshold: int, top_pad: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, mmap_threshold) and mallopt(_TRIM_THRESHOLD, trim_threshold) and mallopt(_TOP_PAD, top_pad))
