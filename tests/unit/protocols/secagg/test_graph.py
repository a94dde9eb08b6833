"""The graph of masks: its shape, its thresholds, and that it holds together."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from scipy.stats import hypergeom

from cflpriv.protocols.secagg.graph import _cycle, complete_threshold, neighbours, sparse_parameters


def test_published_parameters() -> None:
    table = {20: (7, 5), 50: (16, 11), 100: (31, 21), 200: (49, 31), 500: (65, 40), 1000: (74, 45)}
    assert {n: sparse_parameters(n) for n in table} == table


@pytest.mark.parametrize("n", [33, 50, 77, 100, 200, 500, 1000])
def test_parameters_meet_the_two_bounds_and_no_smaller_threshold_does(n: int) -> None:
    """Against scipy's hypergeometric tails: at least t corrupt neighbours, more than k − t dropped ones, for any of n clients."""
    k, t = sparse_parameters(n)
    corrupt, dropped = hypergeom(n - 1, n // 5, k), hypergeom(n - 1, n // 10, k)
    assert n * corrupt.sf(t - 1) <= 2.0**-40
    assert n * corrupt.sf(t - 2) > 2.0**-40
    assert n * dropped.sf(k - t) <= 2.0**-30


@settings(max_examples=60, deadline=None)
@given(st.integers(33, 300), st.binary(min_size=16, max_size=16))
def test_graph_is_regular_and_symmetric(n: int, seed: bytes) -> None:
    cohort = tuple(range(5, 5 + 3 * n, 3))
    k, _ = sparse_parameters(n)
    around = {c: neighbours(seed, cohort, k, c) for c in cohort}
    assert all(len(near) == k and c not in near for c, near in around.items())
    assert all(c in around[other] for c, near in around.items() for other in near)


@pytest.mark.slow
@pytest.mark.parametrize("n", [40, 100, 300])
def test_honest_survivors_stay_connected(n: int) -> None:
    """Removing 30 % at random disconnects with probability at most 2^-40 (times 200 trials)."""
    k, _ = sparse_parameters(n)
    cohort = tuple(range(n))
    generator = np.random.default_rng(n)
    for trial in range(200):
        seed = trial.to_bytes(16, "big")
        kept = np.sort(generator.permutation(n)[: n - n // 5 - n // 10])
        matrix = np.zeros((n, n), bool)
        for c in cohort:
            matrix[c, list(neighbours(seed, cohort, k, c))] = True
        assert connected_components(csr_array(matrix[np.ix_(kept, kept)]), directed=False)[0] == 1


@pytest.mark.parametrize(("n", "k"), [(34, 8), (35, 10), (34, 9)])
def test_fewer_than_k_losses_never_disconnect_and_two_full_runs_do(n: int, k: int) -> None:
    """The worst losses for a circulant are two runs of consecutive ones; for odd k, the opposite neighbour still has to be lost."""
    seed, cohort = bytes(16), tuple(range(n))
    order, _ = _cycle(seed, cohort)
    matrix = np.zeros((n, n), bool)
    for c in cohort:
        matrix[c, list(neighbours(seed, cohort, k, c))] = True

    def parts(first: int, second: int, gap: int) -> int:
        lost = {*order[:first], *order[first + gap : first + gap + second]}
        kept = [c for c in cohort if c not in lost]
        return int(connected_components(csr_array(matrix[np.ix_(kept, kept)]), directed=False)[0])

    for first in range(k):
        for gap in range(1, n - k):
            assert parts(first, k - 1 - first, gap) == 1
    assert (parts(k // 2, k // 2, 1) > 1) == (k % 2 == 0)


@pytest.mark.parametrize("n", range(1, 101))
def test_complete_thresholds(n: int) -> None:
    passive, active = complete_threshold(n, "passive"), complete_threshold(n, "active")
    # Both kinds of share of one client would take 2t answers from n clients who each give one kind; liars give both.
    assert 2 * passive > n
    most_colluders = (n - 1) // 3
    assert 2 * active > n + most_colluders
    assert Fraction(active) > Fraction(2 * n, 3)
    assert active <= n
