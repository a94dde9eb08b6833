"""Which algorithms the default suite takes where a test has a case for each: those of the five papers, and one of each kind besides."""

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["cases"]

OFTEN = (
    "pacfl",
    "ifca",
    "stocfl",
    "cfl",
    "pfedlia",
    "crossfit",
    "fedavg",
    "scaffold",
    "lg_fedavg",
    "private_clusters",
    "fedfomo",
    "fedproto",
)


def cases(names: Iterable[str]) -> list[Any]:
    """A parameter for each algorithm; the others are slow."""
    return [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in names]
