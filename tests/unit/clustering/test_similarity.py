"""Angles against scipy, from the Gram and from the vectors; what depends on the span depends on nothing else."""

import subprocess
import sys
from typing import get_args

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import orthonormal_rows

from cflpriv.clustering.similarity import Gram, Measure, angle_rows, angles, cosines, drowned, least_norm, moments, principal_angles
from cflpriv.errors import InputError
from cflpriv.types import Array

SPAN_MEASURES: tuple[Measure, ...] = ("smallest_angle", "sum_of_angles", "chordal")


def pair_at(angles_radians: list[float], d: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Two subspaces of R^d with the given principal angles, in random bases."""
    p = len(angles_radians)
    q = np.linalg.qr(rng.normal(size=(d, d)))[0]
    u = q[:, :p].T
    v = (q[:, :p] * np.cos(angles_radians) + q[:, p : 2 * p] * np.sin(angles_radians)).T
    turn = [np.linalg.qr(rng.normal(size=(p, p)))[0] for _ in range(2)]
    return turn[0] @ u, turn[1] @ v


@pytest.mark.slow
@given(st.integers(0, 2**32), st.integers(1, 4), st.floats(-3.0, 0.19))
@settings(max_examples=150, deadline=None)
def test_from_the_gram_within_1e_9_degrees_above_1e_3_radians(seed: int, p: int, exponent: float) -> None:
    rng = np.random.default_rng(seed)
    wanted = sorted(float(10**exponent + (np.pi / 2 - 10**exponent) * x) for x in [0.0, *rng.random(p - 1)])
    u, v = pair_at(wanted, 30, rng)
    gram = Gram.of_vectors((0, 1), np.stack([u, v]))
    expected = np.degrees(np.sort(scipy.linalg.subspace_angles(u.T, v.T)))
    assert angles(gram, "smallest_angle").values[0, 1] == pytest.approx(expected[0], abs=1e-9)
    assert angles(gram, "sum_of_angles").values[0, 1] == pytest.approx(expected.sum(), abs=1e-9 * p)


@given(st.integers(0, 2**32), st.floats(-6.0, -3.0))
@settings(max_examples=100, deadline=None)
def test_from_the_gram_within_1e_6_degrees_down_to_1e_6_radians(seed: int, exponent: float) -> None:
    rng = np.random.default_rng(seed)
    u, v = pair_at([10**exponent, 0.5, 1.0], 20, rng)
    gram = Gram.of_vectors((0, 1), np.stack([u, v]))
    assert angles(gram).values[0, 1] == pytest.approx(np.degrees(10**exponent), abs=1e-6)


@given(st.integers(0, 2**32), st.integers(1, 4), st.sampled_from([0.0, 1e-12, 1e-8, 1e-4, 0.3, 0.785, 1.0, np.pi / 2]))
@settings(max_examples=150, deadline=None)
def test_on_clear_vectors_within_1e_9_degrees_everywhere(seed: int, p: int, smallest: float) -> None:
    rng = np.random.default_rng(seed)
    wanted = sorted([smallest, *(rng.random(p - 1) * np.pi / 2)])
    u, v = pair_at(wanted, 20, rng)
    np.testing.assert_allclose(principal_angles(u, v), np.degrees(wanted), rtol=0, atol=1e-9)


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4), st.booleans())
@settings(max_examples=150, deadline=None)
def test_on_clear_vectors_as_scipy(seed: int, p: int, q: int, near: bool) -> None:
    """Where all angles lie on one side of 45°: with both kinds, scipy's sine branch is applied to the wrong ones (see the test below)."""
    rng = np.random.default_rng(seed)
    low, high = (0.0, 0.7) if near else (0.9, np.pi / 2)
    u, v = pair_at([low + (high - low) * x for x in rng.random(max(p, q))], 20, rng)
    u, v = u[:p], v[:q]
    expected = np.degrees(np.sort(scipy.linalg.subspace_angles(u.T, v.T)))
    if (expected < 44).all() or (expected > 46).all():
        np.testing.assert_allclose(principal_angles(u, v), expected, rtol=0, atol=1e-9)
    else:  # rows left out: mixed angles, large enough for the cosine form to do
        np.testing.assert_allclose(principal_angles(u, v)[expected > 1], expected[expected > 1], rtol=0, atol=1e-9)


def test_mixed_angles_are_right_where_scipy_is_not() -> None:
    u, v = pair_at([1e-8, 0.95], 20, np.random.default_rng(0))
    np.testing.assert_allclose(principal_angles(u, v), np.degrees([1e-8, 0.95]), rtol=1e-6, atol=1e-12)


@given(st.integers(0, 2**32), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_span_measures_ignore_signs_and_bases(seed: int, p: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = orthonormal_rows(rng, 5, p, 12)
    turned = np.stack([np.linalg.qr(rng.normal(size=(p, p)))[0] @ rows for rows in vectors])
    for measure in SPAN_MEASURES:
        before = angles(Gram.of_vectors(range(5), vectors), measure).values
        after = angles(Gram.of_vectors(range(5), turned), measure).values
        np.testing.assert_allclose(after, before, atol=1e-6)


@given(st.integers(0, 2**32), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_corresponding_angles_ignore_signs_but_the_authors_do_not(seed: int, p: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = orthonormal_rows(rng, 4, p, 12)
    flipped = vectors * rng.choice([-1.0, 1.0], size=(4, p, 1))
    gram, other = Gram.of_vectors(range(4), vectors), Gram.of_vectors(range(4), flipped)
    np.testing.assert_allclose(angles(gram, "corresponding_angles").values, angles(other, "corresponding_angles").values, atol=1e-9)
    direct = np.degrees(np.arccos(np.abs(np.clip(np.einsum("ipd,jpd->ijp", vectors, vectors), -1, 1)))).sum(axis=2)
    np.testing.assert_allclose(angles(gram, "corresponding_angles").values + np.diag(np.diag(direct)), direct, atol=1e-5)


def test_the_authors_metric_gives_90_degrees_for_a_negated_subspace() -> None:
    """Why the paper's reading is the default: the same span with negated vectors scores 90° in the authors' code; its true angle is 0°."""
    u = np.eye(3)[:2]
    gram = Gram.of_vectors((0, 1), np.stack([u, -u]))
    assert angles(gram, "smallest_angle", authors=True).values[0, 1] == pytest.approx(90.0)
    assert angles(gram, "smallest_angle").values[0, 1] == pytest.approx(0.0)


@pytest.mark.parametrize("measure", get_args(Measure))
@pytest.mark.parametrize("authors", [False, True])
def test_blocks_agree_with_the_whole(measure: Measure, authors: bool) -> None:
    if authors and measure not in ("smallest_angle", "corresponding_angles"):
        with pytest.raises(InputError, match="authors"):
            angle_rows(Gram.of_vectors((0,), np.eye(3)[None]), slice(0, 1), slice(0, 1), measure, authors=True)
        return
    vectors = orthonormal_rows(np.random.default_rng(3), 17, 3, 20)
    gram = Gram.of_vectors(range(17), vectors)
    whole = angles(gram, measure, authors=authors).values
    np.testing.assert_allclose(angles(gram, measure, authors=authors, rows_at_once=4).values, whole, rtol=0, atol=1e-9)
    np.testing.assert_allclose(angle_rows(gram, slice(15, 17), slice(0, 15), measure, authors=authors), whole[15:, :15], atol=1e-9)
    stored = Gram.of_matrix(range(17), gram.matrix(), 3)
    np.testing.assert_allclose(angles(stored, measure, authors=authors).values, whole, atol=1e-9)


def test_cosines() -> None:
    vectors = np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0], [0.0, 0.0], [-1.0, 0.0]])
    values = cosines(Gram.of_vectors(range(5), vectors[:, None, :])).values
    np.testing.assert_allclose(values[0], [1, 0, np.sqrt(0.5), 0, -1], atol=1e-12)
    assert values[3, 3] == 1.0
    with pytest.raises(InputError, match="p = 2"):
        cosines(Gram.of_vectors((0,), np.eye(2)[None]))


@given(st.integers(0, 2**32), st.integers(1, 8), st.sampled_from([0.0, 1e-300, 1e-12]))
@settings(max_examples=60, deadline=None)
def test_without_errors_cosines_are_bit_for_bit_products_over_norms(seed: int, n: int, error: float) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(n, 5)) * rng.uniform(0.1, 10, size=(n, 1))
    if not error:
        vectors[rng.integers(n)] = 0
    products = vectors @ vectors.T
    norms = np.sqrt(np.diag(products))
    scale = np.where(norms > 0, norms, np.inf)
    expected = np.clip(products / scale[:, None] / scale[None, :], -1.0, 1.0)
    np.fill_diagonal(expected, 1.0)
    found = cosines(Gram.of_matrix(range(n), products, error=error))
    np.testing.assert_array_equal(found.values, expected)
    assert (found.noise == 0) == (error == 0)


@pytest.mark.parametrize("own", [1.0, 0.1, 0.0])
def test_a_zero_vector_has_cosine_0_with_everyone_whatever_the_errors(own: float) -> None:
    """Noise errs alike everywhere; computing errors of a zero vector with itself may be smaller (`own`) than those with others."""
    rng = np.random.default_rng(0)
    for error in (1e-9, 1e-6, 1e-3):
        for _ in range(100):
            vectors = rng.normal(size=(6, 20))
            vectors[4:] = 0
            errors = np.triu(rng.normal(scale=error, size=(6, 6)))
            errors[4:, 4:] *= own
            matrix = vectors @ vectors.T + errors + np.triu(errors, 1).T
            values = cosines(Gram.of_matrix(range(6), matrix, error=error)).values
            # a zero vector is longer than four std in one of 30,000 cases: among these 600 with probability 0.02; the seed is fixed
            np.testing.assert_array_equal(values[4:], np.eye(6)[4:])
            np.testing.assert_array_equal(values[:, 4:], np.eye(6)[:, 4:])
            np.testing.assert_allclose(values[:4, :4], cosines(Gram.of_vectors(range(4), vectors[:4, None])).values, atol=10 * error)


def test_noise_is_what_errors_of_the_gram_make_of_orthogonal_vectors() -> None:
    rng = np.random.default_rng(1)
    for squares in ([1.0, 1.0], [4.0, 0.01]):
        for error in (1e-9, 1e-5, 1e-4):
            for _ in range(100):
                errors = np.triu(rng.normal(scale=error, size=(2, 2)))
                found = cosines(Gram.of_matrix((0, 1), np.diag(squares) + errors + np.triu(errors, 1).T, error=error))
                assert abs(found.values[0, 1]) <= 1.1 * found.noise  # as in the test of angles, but for an error in the norm itself
            assert found.noise == pytest.approx(4 * error / min(squares), rel=0.2)
    zeros = cosines(Gram.of_matrix((0, 1), np.full((2, 2), 1e-3), error=1e-3))
    assert zeros.values.tolist() == [[1, 0], [0, 1]]
    assert zeros.noise == 0


def test_vectors_are_drowned_where_half_of_them_are_shorter_than_the_least_norm() -> None:
    least = least_norm(1e-4)
    assert least == pytest.approx(0.04)
    assert drowned(np.array([1.0, 1.0, 0.9 * least, 0.0]) ** 2, 1e-4) is True
    assert drowned(np.array([1.0, 1.0, 1.0, 0.9 * least, 0.0]) ** 2, 1e-4) is False
    assert drowned(np.array([1.0, 0.9 * least, 0.0]) ** 2, 1e-4) is True
    assert drowned(np.zeros(3), 0.0) is False


def test_bad_input_is_named() -> None:
    with pytest.raises(InputError, match="index"):
        principal_angles(np.array([[np.nan, 1.0]]), np.eye(2))
    with pytest.raises(InputError, match="dimension 3"):
        principal_angles(np.eye(3), np.eye(2))
    with pytest.raises(InputError, match="'cosine'"):
        angles(Gram.of_vectors((0,), np.eye(2)[None]), "cosine")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"\(3, 3\)"):
        Gram.of_matrix((0, 1), np.eye(3))


@pytest.mark.parametrize("measure", get_args(Measure))
@pytest.mark.parametrize("p", [1, 3])
def test_noise_is_what_errors_of_the_gram_make_of_equal_vectors(measure: Measure, p: int) -> None:
    rng = np.random.default_rng(0)
    rows = np.linalg.qr(rng.normal(size=(20, p)))[0].T
    for error in (1e-9, 1e-6, 1e-4):
        largest = 0.0
        for _ in range(100):
            errors = np.triu(rng.normal(scale=error, size=(2 * p, 2 * p)))
            matrix = np.tile(rows @ rows.T, (2, 2)) + errors + np.triu(errors, 1).T
            found = angles(Gram.of_matrix((0, 1), matrix, p, error), measure)
            largest = max(largest, found.values[0, 1])
        # four std of p² errors: at p = 1 exceeded by 1 of 30 000, so by one of these 300 with probability 0.01; the seed is fixed
        assert largest <= found.noise
        assert found.noise < 1e3 * np.sqrt(error)  # and it says something
    exact = angles(Gram.of_matrix((0, 1), np.eye(2 * p), p), measure)
    assert exact.noise <= 1e-5 * p


@pytest.mark.slow
def test_ten_thousand_clients_fit_into_four_gibibytes() -> None:
    """Measured in a process of its own, which prints its peak memory."""
    code = (
        "import resource, numpy as np; from cflpriv.clustering.similarity import Gram, angles;"
        "v = np.linalg.qr(np.random.default_rng(0).normal(size=(10_000, 784, 3)))[0].transpose(0, 2, 1).copy();"
        "s = angles(Gram.of_vectors(range(10_000), v)).values;"
        "assert (s == s.T).all() and not s.diagonal().any();"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert float(done.stdout) < 4.0


@pytest.mark.parametrize("short", range(9))
def test_half_of_the_vectors_or_more_are_drowned_or_not(short: int) -> None:
    squares = np.array([0.0] * short + [1.0] * (8 - short))
    assert drowned(squares, 1e-3) == (2 * short >= 8)
    assert not drowned(squares, 0.0)


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_moments_are_those_of_outer_products(seed: int, p: int, folds: int) -> None:
    """⟨Σ v vᵀ, Σ w wᵀ⟩ from the products of vectors; turning the vectors of a moment within their span changes nothing."""
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(5, folds * p, 6))
    parts = vectors.reshape(5, folds, p, 6)
    made = (parts.transpose(0, 1, 3, 2) @ parts).reshape(5 * folds, -1)
    gram = moments(Gram.of_vectors(range(5), vectors), p)
    np.testing.assert_allclose(gram.matrix(), made @ made.T, rtol=1e-10, atol=1e-12)
    turn = np.linalg.qr(rng.normal(size=(p, p)))[0]
    turned = moments(Gram.of_vectors(range(5), (turn @ parts).reshape(vectors.shape)), p)
    np.testing.assert_allclose(turned.matrix(), gram.matrix(), rtol=1e-9, atol=1e-12)
    with pytest.raises(InputError, match="make no moments of"):
        moments(Gram.of_vectors(range(5), vectors), folds * p + 1)
