"""The shared transforms: orthonormal, invertible, the same for all who share the secret, and distributed as they say."""

import json
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from hashlib import sha256
from itertools import permutations
from time import perf_counter

import numpy as np
import numpy.typing as npt
import pytest
from checkout import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.linalg import hadamard as hadamard_matrix

from cflpriv.protocols import entropy as entropy_module
from cflpriv.protocols.entropy import derive, gaussians, keystream, public_entropy, system_entropy, uniforms
from cflpriv.protocols.orthonormal import HAAR_LIMIT, TRANSFORMS, Hadamard, Permutation, haar, hadamard, signed_permutation, transform
from cflpriv.protocols.orthonormal.hadamard import walsh_hadamard
from cflpriv.protocols.orthonormal.permutation import LONGEST, key_stream, random_order, random_signs

VECTORS = json.loads((ROOT / "tests" / "vectors" / "orthonormal.json").read_text(encoding="utf-8"))
FAST = [kind for kind in TRANSFORMS if kind != "haar"]
SECRET = bytes(range(32))


# --- every kind


@pytest.mark.parametrize("kind", TRANSFORMS)
@given(d=st.integers(1, 60), n=st.integers(0, 5), seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_orthonormal_and_invertible(kind: str, d: int, n: int, seed: int) -> None:
    one = transform(kind, SECRET, f"test {seed}", d)
    rows = np.random.default_rng(seed).normal(size=(n, d))
    sent = one.apply(rows)
    assert sent.shape == (n, one.size)
    assert one.size == d if kind != "hadamard" else d <= one.size < 2 * d
    np.testing.assert_allclose(sent @ sent.T, rows @ rows.T, atol=1e-10)
    back = one.invert(sent)
    np.testing.assert_allclose(back, rows, atol=1e-10)
    if "permutation" in kind:
        np.testing.assert_array_equal(back, rows)  # exactly
    np.testing.assert_allclose(one.invert(sent.mean(axis=0)) if n else 0.0, rows.mean(axis=0) if n else 0.0, atol=1e-10)


@pytest.mark.parametrize("kind", TRANSFORMS)
@pytest.mark.parametrize("d", [1, 2, 3, 64, 300, 784])
def test_the_matrix_is_orthonormal(kind: str, d: int) -> None:
    q = transform(kind, SECRET, "matrix", d).apply(np.eye(d))
    assert np.abs(q @ q.T - np.eye(d)).max() < 1e-10


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_shape_and_dtype_are_kept_and_the_rows_untouched(kind: str) -> None:
    one = transform(kind, SECRET, "shape", 8)
    for dtype in (np.float32, np.float64):
        rows: npt.NDArray[np.floating] = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(dtype)
        before = rows.copy()
        sent = one.apply(rows)
        assert sent.dtype == dtype
        assert one.invert(sent).dtype == dtype
        np.testing.assert_allclose(sent[1, 2], one.apply(rows[1, 2]), rtol=1e-5)
        np.testing.assert_array_equal(rows, before)


@pytest.mark.parametrize(("kind", "d"), [("haar", 784), *((kind, 10**6) for kind in FAST)])
def test_float32_keeps_inner_products_to_1e_6_of_the_norms(kind: str, d: int) -> None:
    rng = np.random.default_rng(1)
    rows: npt.NDArray[np.float32] = rng.normal(size=(4, d)).astype(np.float32)
    rows[1] = rows[0] + 0.1 * rows[1]  # far from orthogonal, too
    rows[2, d // 100 :] = 0.0  # few large values
    sent = transform(kind, SECRET, "float32", d).apply(rows).astype(np.float64)
    exact = rows.astype(np.float64)
    norms = np.linalg.norm(exact, axis=1)
    assert (np.abs(sent @ sent.T - exact @ exact.T) / np.outer(norms, norms)).max() < 1e-6


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_purpose_secret_and_dimension_all_matter(kind: str) -> None:
    x = np.arange(1.0, 41.0)
    one = transform(kind, SECRET, "a", 40).apply(x)
    np.testing.assert_array_equal(one, transform(kind, SECRET, "a", 40).apply(x))
    assert not np.allclose(one, transform(kind, SECRET, "b", 40).apply(x))
    assert not np.allclose(one, transform(kind, bytes(32), "a", 40).apply(x))


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_impossible_dimensions_are_refused(kind: str) -> None:
    for d in (0, -1, HAAR_LIMIT + 1 if kind == "haar" else LONGEST + 1):
        with pytest.raises(ValueError, match=f"{kind}: dimension {d}"):
            transform(kind, SECRET, "too large", d)


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_wrong_rows_are_refused(kind: str) -> None:
    one = transform(kind, SECRET, "rows", 5)
    for act, length in ((one.apply, 5), (one.invert, one.size)):
        with pytest.raises(ValueError, match=r"\(2, 4\)"):
            act(np.zeros((2, 4)))
        with pytest.raises(ValueError, match="floats"):
            act(np.zeros(length, dtype=np.int64))
        with pytest.raises(ValueError, match=r"\(\)"):
            act(np.array(1.0))


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'rot13' is not known; known are permutation, "):
        transform("rot13", SECRET, "x", 5)


# --- the same everywhere


def described(kind: str, secret: bytes, purpose: str, d: int) -> dict[str, str]:
    """The integers that make a transform, as digests: what must agree bit for bit."""
    one = transform(kind, secret, purpose, d)
    parts: dict[str, npt.NDArray[np.integer] | None] = {}
    if isinstance(one, Permutation):
        parts = {"order": one._order, "signs": one._signs}
    elif isinstance(one, Hadamard):
        parts = {"before": one._before, "order": one._order, "after": one._after}
    return {name: sha256(part.astype("<i4").tobytes()).hexdigest() for name, part in parts.items() if part is not None}


@pytest.mark.parametrize("kind", FAST)
def test_permutations_and_signs_are_those_of_the_vectors_bit_for_bit(kind: str) -> None:
    for case in VECTORS[kind]:
        secret = bytes.fromhex(case["secret"])
        assert described(kind, secret, case["purpose"], case["dimension"]) == case["sha256"]
        one = transform(kind, secret, case["purpose"], case["dimension"])
        sent = one.apply(np.arange(1.0, case["dimension"] + 1))
        np.testing.assert_allclose(sent[: len(case["first"])], case["first"], rtol=0, atol=1e-9)


def test_haar_matrices_are_those_of_the_vectors() -> None:
    for case in VECTORS["haar"]:
        q = haar(bytes.fromhex(case["secret"]), case["purpose"], case["dimension"]).apply(np.eye(case["dimension"])).T
        np.testing.assert_allclose(q[: len(case["rows"])], case["rows"], rtol=0, atol=1e-9)


def test_another_process_derives_the_same() -> None:
    code = (
        "import json, numpy as np; from cflpriv.protocols.orthonormal import TRANSFORMS, transform;"
        "print(json.dumps({k: transform(k, bytes(range(32)), 'vector', 40).apply(np.eye(40)).tolist() for k in TRANSFORMS}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    theirs = json.loads(out.stdout)
    for kind in TRANSFORMS:
        mine = transform(kind, SECRET, "vector", 40).apply(np.eye(40))
        if kind == "haar":
            np.testing.assert_allclose(theirs[kind], mine, atol=1e-9)
        else:
            np.testing.assert_array_equal(theirs[kind], mine)


# --- permutations


def test_every_order_is_as_likely_as_every_other() -> None:
    """χ² over the 24 orders of 4 places and over the places of one of 50, p > 1e-4 each; keys are fixed, so the outcome is too."""
    draw = key_stream(derive(SECRET, "uniform orders"))
    counts = Counter(tuple(int(place) for place in random_order(draw, 4)) for _ in range(4800))
    assert stats.chisquare([counts[order] for order in permutations(range(4))]).pvalue > 1e-4
    places = Counter(int(np.flatnonzero(random_order(draw, 50) == 7)[0]) for _ in range(5000))
    assert stats.chisquare([places[place] for place in range(50)]).pvalue > 1e-4


def test_equal_draws_are_drawn_again() -> None:
    words = [np.array(numbers, dtype="<u8").tobytes() for numbers in ([3, 1, 3], [5, 5, 5], [2**64 - 1, 0, 2**63])]
    pieces = iter(words)
    assert random_order(lambda count: next(pieces), 3).tolist() == [1, 2, 0]
    assert next(pieces, None) is None


def test_signs_are_fair_and_independent_of_the_order() -> None:
    """Binomial tests at 1e-4 for the signs, for neighbours, and for signs of even and odd places."""
    one = signed_permutation(SECRET, "signs", 20_000)
    signs = one.apply(np.ones(20_000))
    assert set(np.unique(signs)) == {-1.0, 1.0}
    order = np.abs(one.apply(np.arange(1.0, 20_001.0)))
    for plus in (signs > 0, signs[1:] * signs[:-1] > 0, signs[order % 2 == 0] > 0):
        assert stats.binomtest(int(plus.sum()), len(plus)).pvalue > 1e-4
    assert random_signs(lambda count: b"\x05\x01", 10).tolist() == [-1, 1, -1, 1, 1, 1, 1, 1, -1, 1]


# --- Hadamard


@pytest.mark.parametrize("size", [1, 2, 4, 8, 64, 128, 1024])
def test_the_fast_transform_is_the_matrix(size: int) -> None:
    x = np.random.default_rng(size).normal(size=size)
    mixed = x.copy()
    walsh_hadamard(mixed)
    np.testing.assert_allclose(mixed, hadamard_matrix(size) @ x, atol=1e-10)
    with pytest.raises(ValueError, match="power of two"):
        walsh_hadamard(np.zeros(3 * size))


def test_signs_come_before_the_mixing_and_a_permutation_and_signs_after_it() -> None:
    """Written out as matrices: y = S' P H S x / √m, x padded with zeros."""
    one = hadamard(SECRET, "order", 6)
    x = np.random.default_rng(6).normal(size=6)
    padded = np.concatenate([x, np.zeros(2)])
    mixed = hadamard_matrix(8) @ (one._before * padded) / np.sqrt(8)
    np.testing.assert_allclose(one.apply(x), one._after * mixed[one._order], atol=1e-12)
    single = one.apply(np.eye(6))
    np.testing.assert_allclose(np.abs(single), 1 / np.sqrt(8))  # what its docstring says of vectors with one value


def test_dimensions_that_pad_alike_share_a_hadamard_transform() -> None:
    x = np.random.default_rng(2).normal(size=100)
    whole = np.concatenate([x, np.zeros(28)])
    np.testing.assert_allclose(hadamard(SECRET, "pad", 100).apply(x), hadamard(SECRET, "pad", 128).apply(whole), atol=1e-12)


def test_mixed_values_of_a_peaked_vector_look_normal() -> None:
    """One value among 4096 small ones no longer stands out after Hadamard; Kolmogorov-Smirnov at 1e-4 for exponential input, fixed key."""
    x = np.random.default_rng(3).exponential(size=4096)
    sent = hadamard(SECRET, "peaks", 4096).apply(x / np.linalg.norm(x)) * np.sqrt(4096)
    assert stats.kstest(sent, stats.norm().cdf).pvalue > 1e-4
    assert stats.kstest(signed_permutation(SECRET, "peaks", 4096).apply(x), stats.norm(0, np.sqrt(2)).cdf).pvalue < 1e-4


@pytest.mark.slow
def test_ten_million_coordinates_take_seconds() -> None:
    """Generous bounds for a busy machine; what it takes is printed (`-s`)."""
    d = 10**7
    rows: npt.NDArray[np.float32] = np.random.default_rng(0).normal(size=(1, d)).astype(np.float32)
    for kind in FAST:
        began = perf_counter()
        one = transform(kind, SECRET, "long", d)
        made = perf_counter()
        sent = one.apply(rows)
        applied = perf_counter()
        back = one.invert(sent)
        inverted = perf_counter()
        print(f"{kind}: d = 1e7, made {made - began:.2f} s, applied {applied - made:.2f} s, inverted {inverted - applied:.2f} s")
        assert inverted - began < 60
        np.testing.assert_allclose(back, rows, atol=1e-5)
        ratio = float(np.linalg.norm(sent.astype(np.float64)) / np.linalg.norm(rows.astype(np.float64)))
        assert abs(ratio - 1) < 1e-6


# --- Haar


def test_vector() -> None:
    """A fixed vector, so that another implementation can check itself."""
    q = haar(SECRET, "vector", 3).apply(np.eye(3))
    expected = np.array(VECTOR)
    np.testing.assert_allclose(q, expected, atol=1e-9)


VECTOR = [
    [0.109261532010, 0.570131974058, -0.814255150293],
    [-0.273945870653, 0.804707558919, 0.526687198032],
    [0.955518486255, 0.165515185934, 0.244108880728],
]


def test_haar_distribution() -> None:
    """Moments and marginals of Haar measure on O(3); 5 tests at 1e-4 each, keys are fixed so the outcome is too."""
    draws = np.stack([haar(SECRET, f"draw {i}", 3).apply(np.eye(3)) for i in range(3000)])
    determinants = np.linalg.det(draws)
    assert stats.binomtest(int((determinants > 0).sum()), len(draws)).pvalue > 1e-4
    traces = np.trace(draws, axis1=1, axis2=2)
    # E tr = 0, E tr^2 = 1, E tr^4 = 3 on O(n) for n >= 2 (Diaconis & Mallows)
    for values, mean in ((traces, 0.0), (traces**2, 1.0), (traces**4, 3.0)):
        assert stats.ttest_1samp(values, mean).pvalue > 1e-4
    # a coordinate of a uniform point on the sphere in R^3 is uniform on [-1, 1]
    assert stats.kstest(draws[:, 1, 2], stats.uniform(-1, 2).cdf).pvalue > 1e-4


def test_entropy() -> None:
    assert system_entropy(32) != system_entropy(32)
    assert public_entropy("a")(16) == public_entropy("a")(16) != public_entropy("b")(16)
    source = public_entropy("a")
    assert source(16) != source(16)
    with pytest.raises(ValueError, match="32 bytes"):
        keystream(b"short", 4)
    assert derive(SECRET, "a", "bc") != derive(SECRET, "ab", "c")
    values = uniforms(SECRET, 10000)
    assert values.min() > 0
    assert values.max() < 1
    assert stats.kstest(values, stats.uniform().cdf).pvalue > 1e-4


def test_no_word_of_a_keystream_gives_a_uniform_outside_the_open_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ones would be rounded to 1 with 53 bits, and the Gaussian of it would be infinite."""
    words = b"".join(word.to_bytes(8, "little") for word in (0, 2**63 - 1, 2**63, 2**64 - 1))
    monkeypatch.setattr(entropy_module, "keystream", lambda key, count: words)
    values = uniforms(SECRET, 4)
    assert [Fraction(float(value)) for value in values] == [Fraction(2 * k + 1, 2**53) for k in (0, 2**51 - 1, 2**51, 2**52 - 1)]
    assert np.isfinite(gaussians(SECRET, 4)).all()
