"""Least squares over shares: against an active set, and by what holds of the least of a convex cost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from cflpriv.attacks.evidence.linear_evidence import equations, projected, shares_by_label, shares_by_steps, shares_of_terms
from cflpriv.errors import InputError
from cflpriv.types import Array

SEEDS = st.integers(0, 2**32 - 1)


def means(rng: np.random.Generator, sums: int, n: int) -> Array:
    rows = (rng.random((sums, n)) < 0.5).astype(float)
    rows[np.arange(sums), rng.integers(n, size=sums)] = 1
    return np.asarray(rows / rows.sum(axis=1, keepdims=True))


def active_set(rows: Array, readings: Array, response: Array, centre: Array, penalty: float) -> Array:
    """Oracle: one dense problem of non-negative least squares, the sums weighted heavily."""
    n, classes = rows.shape[1], len(centre)
    whole = np.vstack([np.kron(rows, response), np.sqrt(penalty) * np.eye(n * classes), 1e4 * np.kron(np.eye(n), np.ones((1, classes)))])
    wanted = np.concatenate([readings.ravel(), np.sqrt(penalty) * np.tile(centre, n), np.full(n, 1e4)])
    return np.asarray(nnls(whole, wanted, maxiter=1000 * n * classes)[0].reshape(n, classes))


def slope(rows: Array, readings: Array, response: Array, centre: Array, penalty: float, shares: Array) -> Array:
    return np.asarray(rows.T @ (rows @ shares @ response.T - readings) @ response + penalty * (shares - centre))


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 6), st.integers(1, 6), st.integers(2, 8), st.sampled_from([1e-5, 1e-2, 1.0, 1e3]), st.sampled_from([0.0, 0.1]))
def test_shares_are_those_of_an_active_set(seed: int, sums: int, n: int, classes: int, penalty: float, noise: float) -> None:
    rng = np.random.default_rng(seed)
    rows, centre, same = means(rng, sums, n), rng.dirichlet(np.ones(classes)), np.eye(classes)
    readings = rows @ rng.dirichlet(np.full(classes, 0.3), n) + noise * rng.normal(size=(sums, classes))
    expected = active_set(rows, readings, same, centre, penalty)
    solution = shares_by_label(rows, readings, centre, penalty)
    assert solution.min() >= 0
    assert solution.sum(axis=1) == pytest.approx(np.ones(n))
    assert solution == pytest.approx(expected, abs=2e-3)
    response = same + 0.3 * rng.normal(size=(classes, classes)) / classes
    seen = readings @ response.T
    if penalty >= 1e-2:  # steps take more of their number the smaller the penalty is
        expected = active_set(rows, seen, response, centre, penalty)
        assert shares_by_steps(rows, seen, response, centre, penalty) == pytest.approx(expected, abs=5e-3)


@pytest.mark.parametrize(("n", "sums", "noise", "penalty"), [(12, 8, 0.0, 1e-6), (12, 30, 0.003, 1e-6), (40, 14, 0.01, 1e-2)])
def test_of_a_large_vocabulary_no_other_shares_cost_less(n: int, sums: int, noise: float, penalty: float) -> None:
    """At the least cost, no share above zero has a larger slope than another one of its row: the Frank–Wolfe gap bounds the cost."""
    rng = np.random.default_rng(5)
    rows, centre = means(rng, sums, n), rng.dirichlet(np.ones(300))
    readings = rows @ rng.dirichlet(np.full(300, 0.05), n) + noise * rng.normal(size=(sums, 300))
    solution = shares_by_label(rows, readings, centre, penalty)
    slopes = slope(rows, readings, np.eye(300), centre, penalty, solution)
    assert (solution * slopes).sum(axis=1) - slopes.min(axis=1) == pytest.approx(np.zeros(n), abs=1e-8)


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(1, 6), st.integers(1, 6), st.sampled_from([1e-6, 1.0, 1e6]), st.sampled_from([0.0, 1e-14, 1e-9]))
def test_no_penalty_is_too_small_and_no_scale_too_large(seed: int, sums: int, n: int, scale: float, penalty: float) -> None:
    rng = np.random.default_rng(seed)
    rows, centre = scale * means(rng, sums, n), np.full(20, 0.05)
    readings = rows @ rng.dirichlet(np.full(20, 0.1), n)
    solution = shares_by_label(rows, readings, centre, penalty)
    slopes = slope(rows, readings, np.eye(20), centre, penalty, solution)
    most = np.linalg.norm(rows, 2) ** 2 + penalty
    assert solution.sum(axis=1) == pytest.approx(np.ones(n))
    assert ((solution * slopes).sum(axis=1) - slopes.min(axis=1)).max() <= 1e-6 * most


@pytest.mark.parametrize("classes", [3, 500])
@pytest.mark.parametrize("response", [False, True])
def test_readings_that_are_no_numbers_give_no_shares(classes: int, response: bool) -> None:
    readings = np.full((1, classes), np.nan)
    with pytest.raises(InputError, match="not all are finite"):
        shares_of_terms(equations([{0: 1.0}]), readings, np.full(classes, 1 / classes), None, np.eye(classes) if response else None)


def test_steps_close_the_gap_of_a_large_vocabulary() -> None:
    rng = np.random.default_rng(6)
    rows, centre, response = means(rng, 10, 12), rng.dirichlet(np.ones(200)), np.eye(200) + rng.normal(size=(200, 200)) / 60
    readings = rows @ rng.dirichlet(np.full(200, 0.05), 12) @ response.T + 0.01 * rng.normal(size=(10, 200))
    solution = shares_by_steps(rows, readings, response, centre, 1e-2)
    slopes = slope(rows, readings, response, centre, 1e-2, solution)
    assert (solution * slopes).sum(axis=1) - slopes.min(axis=1) == pytest.approx(np.zeros(12), abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 5), st.integers(1, 9))
def test_no_shares_are_nearer_than_the_projection(seed: int, n: int, classes: int) -> None:
    """The projection p of v has (v − p)·(s − p) ≤ 0 for all shares s; the corners suffice."""
    rng = np.random.default_rng(seed)
    values = 2 * rng.normal(size=(n, classes))
    solution = projected(values, np.full(n, classes))
    assert solution.sum(axis=1) == pytest.approx(np.ones(n))
    apart = values - solution
    assert (apart - (apart * solution).sum(axis=1, keepdims=True)).max() <= 1e-9
