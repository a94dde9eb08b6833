"""The public sketch: linear, the same everywhere, unbiased, and as exact as it says."""

import json
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from checkout import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cflpriv.protocols.sketch import public_seed, sketch

VECTORS = json.loads((ROOT / "tests" / "vectors" / "orthonormal.json").read_text(encoding="utf-8"))["sketch"]
SEED = bytes(32)


def test_vectors() -> None:
    for case in VECTORS:
        one = sketch(bytes.fromhex(case["seed"]), case["dimension"], case["size"])
        made: dict[str, npt.NDArray[np.integer]] = {"buckets": one._buckets, "signs": one._signs}
        assert {name: sha256(part.astype("<i4").tobytes()).hexdigest() for name, part in made.items()} == case["sha256"]
        short = one.apply(np.arange(1.0, case["dimension"] + 1))
        np.testing.assert_allclose(short[: len(case["first"])], case["first"], rtol=1e-9)
    assert public_seed("gram", 0).hex() == VECTORS[0]["seed"] != public_seed("gram", 1).hex()


@given(st.integers(1, 200), st.integers(1, 40), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_it_is_the_linear_map_it_says(d: int, size: int, seed: int) -> None:
    one = sketch(seed.to_bytes(32, "big"), d, size)
    matrix = one.apply(np.eye(d)).T  # (size, d)
    assert (np.count_nonzero(matrix, axis=0) == 1).all()
    np.testing.assert_array_equal(one.transposed(np.eye(size)), matrix)
    with pytest.raises(ValueError, match="expected floats"):
        one.transposed(np.zeros(size + 1))
    assert set(np.unique(matrix)) <= {-1.0, 0.0, 1.0}
    rows = np.random.default_rng(seed).normal(size=(2, 3, d))
    np.testing.assert_allclose(one.apply(rows), rows @ matrix.T, atol=1e-12)


@pytest.mark.parametrize("kind", ["normal", "peaked", "parallel"])
def test_inner_products_are_unbiased_with_the_stated_variance(kind: str) -> None:
    """2000 seeds: the mean within 4 standard errors, the variance within 12 % (each fails by chance below 1e-4; seeds are fixed)."""
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(2, 300))
    if kind == "peaked":
        x, y = x**5, y**5
    if kind == "parallel":
        y = x + 0.1 * y
    size, exact = 32, float(x @ y)
    products = []
    for number in range(2000):
        u, v = sketch(public_seed("test", number), 300, size).apply(np.stack([x, y]))
        products.append(u @ v)
    stated = float((x @ x) * (y @ y) + exact**2 - 2 * (x**2 * y**2).sum()) / size
    error = np.array(products) - exact
    assert abs(error.mean()) < 4 * np.sqrt(stated / 2000)
    assert abs(error.var() / stated - 1) < (0.12 if kind != "peaked" else 0.5)
    assert stated <= 2 / size * float((x @ x) * (y @ y))


def test_four_thousand_numbers_keep_cosines_of_long_vectors() -> None:
    """At size 4096 the standard deviation of a cosine is at most √(2/4096) = 0.022: 5 of them for 15 pairs."""
    rng = np.random.default_rng(6)
    rows: npt.NDArray[np.float32] = rng.normal(size=(6, 200_000)).astype(np.float32)
    rows[1] += rows[0]
    rows[2] += 3 * rows[0]
    short = sketch(SEED, 200_000, 4096).apply(rows).astype(np.float64)
    exact = rows.astype(np.float64)
    norms = np.linalg.norm(exact, axis=1)
    assert (np.abs(short @ short.T - exact @ exact.T) / np.outer(norms, norms)).max() < 5 * np.sqrt(2 / 4096)


def test_buckets_and_signs_are_uniform() -> None:
    """χ² at 1e-4 over 37 buckets, binomial at 1e-4 for the signs, over three chunks of the stream."""
    one = sketch(SEED, 3_000_000, 37)
    assert stats.chisquare(np.bincount(one._buckets, minlength=37)).pvalue > 1e-4
    assert stats.binomtest(int((one._signs > 0).sum()), 3_000_000).pvalue > 1e-4


def test_dtype_and_refusals() -> None:
    one = sketch(SEED, 10, 4)
    assert one.apply(np.zeros((2, 10), dtype=np.float32)).dtype == np.float32
    assert one.nbytes == 50
    wrong: list[npt.NDArray[Any]] = [np.zeros((2, 9)), np.zeros(10, dtype=np.int64), np.array(1.0)]
    for rows in wrong:
        with pytest.raises(ValueError, match="expected floats of shape"):
            one.apply(rows)
    for dimension, size in ((0, 4), (4, 0), (1 << 31, 4)):
        with pytest.raises(ValueError, match=r"outside 1\.\."):
            sketch(SEED, dimension, size)
