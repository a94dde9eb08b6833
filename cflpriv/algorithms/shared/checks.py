"""Checks of hyper-parameters. Each raises `InputError` with the key and the value."""

from typing import Annotated

import numpy as np

from ...errors import InputError
from ...keys import Key

__all__ = ["Contribution", "at_least", "contribution", "enough_clients", "finite", "known"]

Contribution = Annotated[
    float,
    Key(
        "Length of a client's contribution; above `privacy.clip_norm` counts are wrong.",
        "(0, inf)",
        default="1; `privacy.clip_norm` under client-level privacy",
    ),
]
"""The type of the parameter `norm` of algorithms that sum clients' contributions (`contribution` checks it)."""


def at_least(smallest: int, /, **values: int | None) -> None:
    """Numbers of `smallest` or more; None stands for a default."""
    for name, value in values.items():
        if value is not None and value < smallest:
            raise InputError(f"algorithm.{name}: {value} is below {smallest}")


def finite(**values: float) -> None:
    """Finite numbers of 0 or more."""
    for name, value in values.items():
        if not (value >= 0 and np.isfinite(value)):
            raise InputError(f"algorithm.{name}: {value} is not a finite number of 0 or more")


def contribution(norm: float) -> None:
    """The length of a client's contribution to a sum: a finite number above 0."""
    finite(norm=norm)
    if norm == 0:
        raise InputError("algorithm.norm: 0 leaves no room for an update")


def enough_clients(k: int | None, present: int) -> None:
    """At least one client a cluster. Without any client left, which is no fault of `k`, who asks them next finds out."""
    if k is not None and 0 < present < k:
        raise InputError(f"algorithm.k: {k} clusters of {present} clients")


def known(name: str, value: str, *choices: str) -> None:
    """One of the `choices`."""
    if value not in choices:
        raise InputError(f"algorithm.{name}: {value!r} is not known; known are {', '.join(choices)}")
