"""Signatures that tell nothing of data: all the same, or as far apart as random rows are."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from ..types import Array

__all__ = ["signature_doubt"]

SAME_ANGLE = 0.1
"""Degrees. Signatures that are nearer than this are the same."""
FEWEST_CLIENTS, DRAWS = 4, 1000
BEYOND = 3.0
"""The mean squared cosine of all pairs is that of random rows to within so many of its deviations (99.7 % of random signatures),"""
NEARER = 6.0
"""and no pair is nearer than random rows by so many of their deviations."""
TELLING = 0.7
"""Rows of few numbers are near each other by chance: where random rows may have such a squared cosine, they look like others."""


def signature_doubt(evidence: Mapping[str, Any] | None, clusters: int, shape: tuple[int, int] | None) -> str:
    """A sentence if clusters of these signatures mean nothing; empty if they may, or if distances are not seen.

    Args:
        evidence: with "distance" (n, n), smallest principal angles in degrees.
        shape: (rows, numbers of a sample) of a signature; None where it is not seen.

    Of runs with random signatures 99.7 % are named. A run whose clients are related is not named: one pair of clients that is
    nearer than random rows are is enough.
    """
    distance = None if evidence is None else evidence.get("distance")
    if clusters < 2 or distance is None:
        return ""
    if float(np.max(distance)) <= SAME_ANGLE:
        return "all clients' signatures are the same, so their clusters mean nothing; is the signature made of each client's own data?"
    n = len(distance)
    if n < FEWEST_CLIENTS or shape is None:
        return ""
    cosines = np.cos(np.radians(np.asarray(distance)[np.triu_indices(n, 1)])) ** 2
    random = _random_cosines(*shape)
    middle, spread = float(random.mean()), float(random.std())
    deviation = spread * (1 / len(cosines) + 1 / DRAWS) ** 0.5  # pairs of random rows are independent two by two
    far = float(cosines.max()) < middle + NEARER * spread
    if not far or middle + NEARER * spread > TELLING or abs(float(cosines.mean()) - middle) > BEYOND * deviation:
        return ""
    return (
        "all clients' signatures are as far apart as random rows are, so their clusters mean nothing; is the signature made of each "
        "client's data, always in the same way?"
    )


@lru_cache(8)
def _random_cosines(p: int, d: int) -> Array:
    """Squared cosines (DRAWS,) of the smallest principal angle between p random rows and p fixed rows, of d numbers.

    By symmetry the fixed rows may be the first axes.
    """
    draws, cosines = np.random.default_rng([p, d]), np.empty(DRAWS)
    for number in range(DRAWS):
        rows = draws.normal(size=(d, p))
        cosines[number] = np.linalg.eigvals(np.linalg.solve(rows.T @ rows, rows[:p].T @ rows[:p])).real.max()
    return cosines
