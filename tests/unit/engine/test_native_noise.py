"""The library's normals: their law to the last digits over the whole range, their coefficients, and what they read, write and wipe."""

import re
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtri

from cflpriv.engine import compiled, step_noise
from cflpriv.engine.step_noise import keys_of, tails
from cflpriv.types import Array

pytestmark = pytest.mark.skipif(compiled.library() is None, reason="the library is not built, or this processor has no AVX2")

HEADER = next(path for path in compiled.SOURCES if path.name == "native_noise.h").read_text(encoding="utf-8")
ROOT_OF_2_PI = mpmath.sqrt(2 * mpmath.pi)


def made(words: Array, more: Array, deviation: float = 1.0) -> Array:
    """The normals of one row of words."""
    out = torch.empty(1, words.size, dtype=torch.float64)
    step_noise._fill(out, torch.tensor(words)[None], torch.tensor(more)[None], deviation)
    return out[0].numpy()


def error(size: float, u: float) -> float:
    """The relative error of an absolute normal for the tail u, to first order."""
    with mpmath.workdps(40):
        x = mpmath.mpf(size)
        if u == 0.5:
            return float(x)
        density = mpmath.exp(-x * x / 2) / ROOT_OF_2_PI
        return float(abs(mpmath.erfc(x / mpmath.sqrt(2)) / 2 - mpmath.mpf(u)) / density / x)


def check(words: Array, more: Array) -> None:
    found, u = made(words, more), tails(torch.from_numpy(words), torch.from_numpy(more)).numpy()
    np.testing.assert_array_equal(np.signbit(found), words >= 0)
    assert max(error(abs(x), at) for x, at in zip(found.tolist(), u.tolist(), strict=True)) <= 1e-15


any_word = st.integers(-(2**63), 2**63 - 1)
short = st.builds(
    lambda word, shift, sign: (word >> shift) - sign * 2**63, st.integers(2**62, 2**63 - 1), st.integers(0, 63), st.booleans()
)


@given(st.lists(st.tuples(any_word | short, any_word), min_size=1, max_size=20))
@settings(max_examples=40, deadline=None)
def test_normals_have_the_tails_of_their_words(pairs: list[tuple[int, int]]) -> None:
    """Any words, and such with any number of leading zeros, which are far out."""
    check(*(np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True)))


def test_the_ends_and_what_is_near_a_bound() -> None:
    """The smallest tail, 2^-117, and the largest; a tail whose digits are few; both sides of where another quotient begins."""
    near = int(0.15 * 2**64)
    words = [0, 1, 2**52 - 1, 2**52, 2**63 - 1, near - 2**11, near, near + 2**11, 2**63 - 2**11]
    words += [bits - 2**63 for bits in words]
    for rest in (0, -1, 2**40):
        check(np.array(words, dtype=np.int64), np.full(len(words), rest, dtype=np.int64))
    assert made(np.zeros(1, np.int64), np.zeros(1, np.int64)) == pytest.approx([-12.462], abs=0.001)


def test_a_million_are_scipy_s() -> None:
    rng = np.random.default_rng(0)
    words = rng.integers(-(2**63), 2**63, 10**6)
    words[: 5 * 10**5] >>= rng.integers(0, 63, 5 * 10**5)  # of any size
    more = rng.integers(-(2**63), 2**63, words.size)
    expected = np.copysign(ndtri(tails(torch.from_numpy(words), torch.from_numpy(more)).numpy()), ~words)
    np.testing.assert_allclose(made(words, more, 3.0), 3.0 * expected, rtol=3e-15, atol=0)


def coefficients(name: str) -> list[float]:
    """The array of this name in the header, the lowest power first."""
    text = re.search(rf"{name}\[\] = \{{(?:\s*//.*)?([^}}]*)\}}", HEADER)
    assert text is not None
    return [float(number) for number in text[1].split(",")][::-1]


def chebyshev(low: mpmath.mpf, high: mpmath.mpf, count: int) -> list[mpmath.mpf]:
    return [(low + high) / 2 + (high - low) / 2 * mpmath.cos(mpmath.pi * (2 * i + 1) / (2 * count)) for i in range(count)]


def interpolated(f: Callable[[mpmath.mpf], mpmath.mpf], nodes: list[mpmath.mpf], above: int, below: int) -> list[mpmath.mpf]:
    """Coefficients of the quotient of polynomials of these degrees that is f in the nodes; that of x⁰ below is 1 and is left out."""
    rows = [[x**j for j in range(above + 1)] + [-f(x) * x**j for j in range(1, below + 1)] for x in nodes]
    return list(mpmath.lu_solve(mpmath.matrix(rows), mpmath.matrix([f(x) for x in nodes])))


def absolute_normal(u: mpmath.mpf) -> mpmath.mpf:
    """−Φ⁻¹(u), by Newton's steps for the logarithm of the tail."""
    x = mpmath.sqrt(-2 * mpmath.log(u)) if u < 0.05 else (mpmath.mpf(1) / 2 - u) * ROOT_OF_2_PI
    for _ in range(80):
        now = mpmath.erfc(x / mpmath.sqrt(2)) / 2
        step = mpmath.log(now / u) * now * ROOT_OF_2_PI * mpmath.exp(x * x / 2)
        x += step
        if abs(step) < mpmath.mpf(10) ** -62:
            break
    return x


def test_coefficients_are_those_of_their_nodes() -> None:
    """Chebyshev's nodes of each variable, of the tail's in the logarithm of √(−log u); the end is √(117 log 2)."""
    with mpmath.workdps(70):
        centre, first, half = mpmath.mpf("0.1225"), mpmath.mpf("1.375"), mpmath.mpf(1) / 2
        nodes = chebyshev(mpmath.mpf(0), centre, 13)
        central = interpolated(lambda c: absolute_normal(half - mpmath.sqrt(centre - c)) / mpmath.sqrt(centre - c), nodes, 6, 6)
        ends = [mpmath.log(root) for root in (mpmath.mpf("1.377"), mpmath.sqrt(117 * mpmath.log(2)))]
        nodes = [mpmath.exp(root) - first for root in chebyshev(ends[0], ends[1], 19)]
        tail = interpolated(lambda s: absolute_normal(mpmath.exp(-((s + first) ** 2))), nodes, 9, 9)
        nodes = chebyshev(mpmath.mpf(0), ((mpmath.sqrt(2) - 1) / (mpmath.sqrt(2) + 1)) ** 2, 7)
        logarithm = interpolated(lambda w: (2 * mpmath.atanh(mpmath.sqrt(w)) / mpmath.sqrt(w) - 2) / w, nodes, 6, 0)
    assert coefficients("LOGARITHM") == [float(x) for x in logarithm]
    assert coefficients("CENTRAL_ABOVE") + coefficients("CENTRAL_BELOW") == [float(x) for x in [*central[:7], 1, *central[7:]]]
    assert coefficients("TAIL_ABOVE") + coefficients("TAIL_BELOW") == [float(x) for x in [*tail[:10], 1, *tail[10:]]]


@given(st.integers(1, 40), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_a_normal_has_the_same_bits_beside_any_number_of_others(count: int, seed: int) -> None:
    words, more = np.random.default_rng(seed).integers(-(2**63), 2**63, (2, 40))
    np.testing.assert_array_equal(made(words[:count], more[:count]), made(words, more)[:count])


def test_rows_are_written_where_they_belong_and_words_are_wiped() -> None:
    words, more = torch.from_numpy(np.random.default_rng(0).integers(-(2**63), 2**63, (2, 3, 13)))
    expected = np.stack([made(words[row].numpy(), more[row].numpy(), 0.5) for row in range(3)])
    whole = torch.full((3, 20), 7.0, dtype=torch.float64)
    step_noise._fill(whole[:, 4:17], words, more, 0.5)
    np.testing.assert_array_equal(whole[:, 4:17].numpy(), expected)
    assert bool((whole[:, :4] == 7.0).all())
    assert bool((whole[:, 17:] == 7.0).all())
    assert not words.any()
    assert not more.any()


@pytest.mark.parametrize("count", [1, 100, 70_001])
def test_the_library_and_torch_make_the_same_normals(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, number = keys_of([bytes(range(32)), bytes(32)]), torch.tensor([7])
    ours = step_noise.normals(keys, number, count, 0.3)
    monkeypatch.setattr(step_noise, "library", lambda: None)
    np.testing.assert_allclose(ours.numpy(), step_noise.normals(keys, number, count, 0.3).numpy(), rtol=3e-15, atol=0)
