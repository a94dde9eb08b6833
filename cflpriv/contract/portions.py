"""How many clients' large values are in memory together: all of them where they fit, else those of a few clients after the other.

Both sides go by the same rule. A simulated host that would hold more than `largest_cohort()` bytes of results puts their computation off
until a sum asks for them, and a server then asks few clients at a time (`in_portions`), adds up, and lets go.
"""

import os
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TypeVar

__all__ = ["LARGEST_COHORT_BYTES", "PORTION_BYTES", "fits", "in_portions", "largest_cohort"]

LARGEST_COHORT_BYTES = 1 << 31
"""Values of all clients together that are held at once; on a machine with little memory, `MEMORY_SHARE` of it."""
PORTION_BYTES = 1 << 26
"""Values of one portion. One client's may be larger."""
MEMORY_SHARE = 1 / 8

T = TypeVar("T")


@cache
def _memory() -> int:
    """The bytes of this machine's memory; 0 where nothing tells, as on Windows."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0


def largest_cohort() -> int:
    """The bytes of all clients' values that are held at once."""
    return min(LARGEST_COHORT_BYTES, round(_memory() * MEMORY_SHARE) or LARGEST_COHORT_BYTES)


def fits(count: int, nbytes: int) -> bool:
    """Whether the values of `count` clients, of `nbytes` each, are held at once."""
    return count < 2 or count * nbytes <= largest_cohort()


def in_portions(clients: Sequence[T], nbytes: int, fewest: int = 1) -> Iterator[Sequence[T]]:
    """The clients in order, all at once where their values of `nbytes` each fit, else a few at a time; `fewest` can work in parallel."""
    size = len(clients) if fits(len(clients), nbytes) else max(1, fewest, PORTION_BYTES // nbytes)
    for start in range(0, len(clients), size or 1):
        yield clients[start : start + size]
