"""Membership from the losses that clients report: each mean loss is a linear equation for who was trained on.

A client's mean loss under a model that others have, times its number of samples, is the sum of its samples' losses. The attacker knows all
of the client's data but who of each pair is the member, so each reported loss leaves one equation for as many coins as there are pairs.
Ridge regression on half of the difference within each pair solves all equations of a client together.

What it proves: losses that are reported in the open show members, whatever protects updates. What it does not: that an attacker who knows
less of a client's data gets as far.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ...engine.models import Model
from ...types import Array
from ..evidence.reported_losses import losses_of
from ..figures.leakage import Truth
from .member_scores import deal_in_pairs
from .membership_shadows import Pairs

__all__ = ["coins_of_losses", "scores_of_losses"]

RIDGE = 1e-6
"""Beside the mean square of differences: losses are rounded."""


def coins_of_losses(halves: Array, sums: Array) -> Array:
    """Estimates (..., p) of p coins ±1 from sums (..., k) = coins · `halves` (p, k)."""
    system = halves @ halves.T
    ridge = RIDGE * max(float(np.trace(system)) / len(system), 1e-300)
    return np.asarray(np.linalg.solve(system + ridge * np.eye(len(system)), (np.asarray(sums) @ halves.T).T).T)


def scores_of_losses(
    reported: Mapping[int, Sequence[tuple[Array, float]]], pairs: Pairs, truth: Truth, model: Model, shadows: int, rng: np.random.Generator
) -> tuple[Array, Array, Array]:
    """Scores (n,) of the samples of `pairs` whose owners reported losses, those of (`shadows`, n) with coins at random, and which they are.

    `reported` has by client the models (d,) and its mean losses under each.
    """
    half = len(pairs.y) // 2
    scores, blank = np.full(2 * half, np.nan), np.full((shadows, 2 * half), np.nan)
    for client in sorted(set(reported) & set(pairs.owners.tolist())):
        own = np.flatnonzero(pairs.owners[:half] == client)
        vectors = [vector for vector, _ in reported[client]]
        first, second = (_table(model, vectors, pairs.x[places], pairs.y[places]) for places in (own, half + own))
        known = _table(model, vectors, *pairs.rest[client]).sum(axis=0)
        whole = len(truth.data[client][1]) * np.array([loss for _, loss in reported[client]])
        halves = (first - second) / 2
        coins = coins_of_losses(halves, whole - known - (first + second).sum(axis=0) / 2)
        dealt = coins_of_losses(halves, (2.0 * deal_in_pairs(len(own), shadows // 2, rng) - 1) @ halves)
        for values, into in ((coins[None], scores[None]), (dealt, blank)):
            into[:, own], into[:, half + own] = values, -values
    asked = np.flatnonzero(np.isfinite(scores))
    return scores[asked], blank[:, asked], asked


def _table(model: Model, vectors: Sequence[Array], x: Array, y: Array) -> Array:
    """Losses (n, k) of samples by the models of these parameters."""
    if not len(y):
        return np.zeros((0, len(vectors)))
    return np.stack([losses_of(model, vector, x, y) for vector in vectors], axis=1)
