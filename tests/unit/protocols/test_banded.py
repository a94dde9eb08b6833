"""Banded noise: its sensitivity bounds every pattern of participation, and prefixes gain by it."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from cflpriv.contract.operations import Sampling
from cflpriv.federation.cohort import schedule
from cflpriv.protocols import banded as b

KEY = bytes(range(32))


def patterns(rounds: int, most: int, apart: int) -> list[tuple[int, ...]]:
    """Every way to take part in up to `most` rounds that are at least `apart` from each other."""
    return [
        chosen for times in range(1, most + 1) for chosen in itertools.combinations(range(rounds), times)
        if all(later - earlier >= apart for earlier, later in itertools.pairwise(chosen))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rounds", "most", "apart", "bands"), [(9, 3, 3, 3), (9, 2, 4, 2), (10, 4, 2, 2), (7, 1, 1, 5), (8, 9, 3, 3), (6, 2, 5, 5)]
)
@pytest.mark.parametrize("make", [b.square_root_coefficients, lambda bands: (1.0, *(-0.7 + 0.5 * k for k in range(bands - 1)))])
def test_no_pattern_of_participation_moves_more_than_the_sensitivity(rounds: int, most: int, apart: int, bands: int, make: Any) -> None:
    coefficients = make(bands)
    matrix, rng, worst = b.strategy(coefficients, rounds), np.random.default_rng(0), 0.0
    for chosen in patterns(rounds, most, apart):
        columns = matrix[:, list(chosen)]
        for signs in itertools.product((-1.0, 1.0), repeat=len(chosen)):
            worst = max(worst, float(np.linalg.norm(columns @ np.array(signs))))
        vectors = rng.standard_normal((len(chosen), 3))
        worst = max(worst, float(np.linalg.norm(columns @ (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)))))
        exact = b.sensitivity_of(coefficients, rounds, [chosen])
        assert float(np.linalg.norm(columns)) == pytest.approx(exact)
    bound = b.separated_sensitivity(coefficients, rounds, most, apart)
    assert worst <= bound * (1 + 1e-12)
    assert worst == pytest.approx(b.sensitivity_of(coefficients, rounds, patterns(rounds, most, apart)))
    if (min(most, -(-rounds // apart)) - 1) * apart + bands <= rounds:
        assert worst == pytest.approx(bound), "attained where no column is cut off"


def test_more_bands_than_the_separation_would_move_more_and_are_refused() -> None:
    coefficients = b.square_root_coefficients(4)
    matrix = b.strategy(coefficients, 8)
    assert np.linalg.norm(matrix[:, [0, 2]].sum(axis=1)) > math.sqrt(2) * np.linalg.norm(matrix[:, 0]) * 1.05
    with pytest.raises(ValueError, match="columns overlap"):
        b.separated_sensitivity(coefficients, 8, 2, 2)
    with pytest.raises(ValueError, match="columns overlap"):
        b.sensitivity_of(coefficients, 8, [(0, 2)])
    with pytest.raises(ValueError, match="not within"):
        b.sensitivity_of(coefficients, 8, [(8,)])
    assert b.separated_sensitivity(coefficients, 8, 1, 2) == pytest.approx(np.linalg.norm(matrix[:, 0]))
    for values in ((0, 1, 1), (4, 0, 1), (4, 1, 0)):
        with pytest.raises(ValueError, match="is below 1"):
            b.separated_sensitivity((1.0,), *values)


@pytest.mark.parametrize("bands", [1, 2, 5, 12])
def test_inverse_columns_and_errors_are_those_of_the_matrix(bands: int) -> None:
    coefficients, rounds = b.optimised_coefficients(bands, 12), 12
    matrix = b.strategy(coefficients, rounds)
    inverse = np.linalg.inv(matrix)
    assert np.allclose(inverse[:, 0], b.inverse_coefficients(coefficients, rounds), atol=1e-12)
    assert np.allclose(np.linalg.norm(matrix, axis=0), b.column_norms(coefficients, rounds), atol=1e-12)
    prefix = np.tril(np.ones((rounds, rounds))) @ inverse
    assert np.allclose(np.square(prefix).sum(axis=1), b.prefix_variances(coefficients, rounds), atol=1e-10)
    assert b.prefix_error(coefficients, rounds, 2.0) == pytest.approx(2.0 * np.sqrt(np.square(prefix).sum() / rounds))


def test_as_many_bands_as_rounds_are_the_square_root_of_the_prefix_sum() -> None:
    matrix = b.strategy(b.square_root_coefficients(15), 15)
    assert np.allclose(matrix @ matrix, np.tril(np.ones((15, 15))), atol=1e-12)


@pytest.mark.parametrize(("bands", "rounds"), [(2, 50), (10, 50), (10, 200), (30, 30), (50, 20)])
def test_optimised_coefficients_are_a_minimum_and_no_worse_than_the_square_root(bands: int, rounds: int) -> None:
    def error(coefficients: tuple[float, ...]) -> float:
        return b.prefix_error(coefficients, rounds, math.hypot(*coefficients))

    best, root = b.optimised_coefficients(bands, rounds), b.square_root_coefficients(min(bands, rounds))
    assert len(best) == min(bands, rounds)
    assert error(best) <= error(root)
    rng = np.random.default_rng(0)
    for _ in range(20):
        step = rng.standard_normal(len(best) - 1) * 1e-2
        assert error(best) <= error((1.0, *(np.array(best[1:]) + step))) * (1 + 1e-6)


def test_prefixes_of_fixed_cohorts_have_less_than_six_tenths_of_the_error() -> None:
    """100 clients, a tenth of them a round, 50 rounds: at the same privacy against independent noise for the same participations."""
    asked = schedule(Sampling("fixed_cohorts", 0.1), range(100), 1, 0, 50)
    assert (asked.most, asked.separation) == (5, 10)
    independent = b.prefix_error((1.0,), 50, b.separated_sensitivity((1.0,), 50, asked.most, asked.separation))
    for coefficients, most in ((b.square_root_coefficients(10), 0.48), (b.optimised_coefficients(10, 50), 0.47)):
        sensitivity = b.separated_sensitivity(coefficients, 50, asked.most, asked.separation)
        assert b.sensitivity_of(coefficients, 50, asked.rounds_of.values()) <= sensitivity
        assert b.prefix_error(coefficients, 50, sensitivity) < most * independent


@pytest.mark.parametrize(("rounds", "bands", "most"), [(50, 10, 5), (23, 4, 3), (12, 6, 9)])
def test_jax_privacy_comes_to_the_same(rounds: int, bands: int, most: int) -> None:
    jax = pytest.importorskip("jax")
    theirs = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
    jax.config.update("jax_enable_x64", True)
    root = np.asarray(theirs.optimal_max_error_strategy_coefs(bands))
    assert np.allclose(root, b.square_root_coefficients(bands), atol=1e-12)
    assert np.allclose(theirs.per_query_error(strategy_coef=root, n=rounds), b.prefix_variances(tuple(root), rounds), rtol=1e-9)
    sensitivity = math.sqrt(float(theirs.minsep_sensitivity_squared(root, min_sep=bands, max_participations=most, n=rounds)))
    assert sensitivity <= b.separated_sensitivity(tuple(root), rounds, most, bands) * (1 + 1e-9)
    if rounds < 24:
        assert sensitivity == pytest.approx(b.sensitivity_of(tuple(root), rounds, patterns(rounds, most, bands)))

    def error(coefficients: Any) -> float:
        return b.prefix_error(tuple(map(float, coefficients)), rounds, float(np.linalg.norm(coefficients)))

    assert error(b.optimised_coefficients(bands, rounds)) <= error(theirs.optimize_banded_toeplitz(rounds, bands)) * (1 + 1e-6)


def test_impossible_matrices_are_refused() -> None:
    with pytest.raises(ValueError, match="bands: 0"):
        b.square_root_coefficients(0)
    with pytest.raises(ValueError, match="rounds: 0"):
        b.optimised_coefficients(2, 0)
    with pytest.raises(ValueError, match="the first of them not 0"):
        b.inverse_coefficients((0.0, 1.0), 3)
