"""Quantisation: exact sums, unbiased rounding, and the overflow proof."""

import typing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cflpriv.protocols.entropy import public_entropy, system_entropy
from cflpriv.protocols.secagg.vectors import (
    Bits,
    FixedPoint,
    check_no_overflow,
    decode,
    encode,
    largest_levels,
    relative_error,
    unwrap,
    wrap,
)


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("clients", [1, 2, 3, 100, 1000])
def test_overflow_proof_is_tight(bits: Bits, clients: int) -> None:
    """The largest allowed sum survives the trip modulo 2^b; one level more is refused, and would indeed be read wrongly somewhere."""
    levels = largest_levels(clients, bits)
    check_no_overflow(clients, FixedPoint(bits, 1.0, levels))
    extremes = np.array([clients * levels, -clients * levels])
    assert unwrap(wrap(extremes, bits), bits).tolist() == extremes.tolist()
    if levels + 1 < 2 ** (bits - 1):
        with pytest.raises(ValueError, match="levels"):
            check_no_overflow(clients, FixedPoint(bits, 1.0, levels + 1))
    wrong = np.array([2 ** (bits - 1)])
    assert unwrap(wrap(wrong, bits), bits).tolist() != wrong.tolist()


def test_no_room_for_a_single_level() -> None:
    with pytest.raises(ValueError, match="bits"):
        largest_levels(2**15, 16)


@pytest.mark.slow
@given(st.sampled_from(typing.get_args(Bits)), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=30))
def test_wrapped_sums_equal_plain_sums_modulo_the_modulus(bits: Bits, numbers: list[int]) -> None:
    total = np.zeros(1, "<u2" if bits == 16 else "<u4")
    for number in numbers:
        total += wrap(np.array([number], np.int64), bits)
    assert int(unwrap(total, bits)[0]) == (sum(numbers) + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


@given(
    arrays(np.float64, st.integers(0, 40), elements=st.floats(-5, 5)),
    st.integers(1, 2**31 - 1),
    st.floats(0.001, 3),
    st.floats(0, 1),
)
def test_levels_are_within_one_step_and_never_beyond_the_largest(
    values: np.ndarray[tuple[int], np.dtype[np.float64]], most: int, clip: float, fraction: float
) -> None:
    fixed = FixedPoint(32, clip, most)
    levels, clipped = encode(values, fixed, system_entropy, fraction)
    assert levels.dtype == np.int32
    assert clipped == int((np.abs(values) > clip).sum())
    assert (np.abs(levels.astype(np.int64)) <= most).all()
    exact = np.clip(values, -clip, clip) * fraction
    assert (np.abs(decode(levels, fixed) - exact) <= clip / most * (1 + 1e-9) + 1e-12 * clip).all()


def test_the_ends_of_the_range_and_zero_are_exact() -> None:
    for clip in (0.1, 1.0, 3.7, 1e-30, 1e30):
        for most in (1, 7, 32767, 2**31 - 1):
            levels, _ = encode(np.array([clip, -clip, 0.0, -0.0]), FixedPoint(32, clip, most), system_entropy)
            assert levels.tolist() == [most, -most, 0, 0]


def test_rounding_is_unbiased() -> None:
    """The mean of m coins of probability q deviates by more than 6 sqrt(q(1−q)/m) with probability below 2e-9; 5 fractions, both signs."""
    m = 200_000
    for fraction in (0.001, 0.25, 0.5, 0.9, 0.999):
        for sign in (1, -1):
            levels, _ = encode(np.full(m, sign * (3 + fraction) / 10), FixedPoint(16, 1.0, 10), public_entropy(f"{fraction}{sign}"))
            assert set(levels.tolist()) == {sign * 3, sign * 4}
            error = abs(levels.mean() - sign * (3 + fraction))
            assert error < 6 * np.sqrt(fraction * (1 - fraction) / m)


def test_coins_depend_on_the_entropy_only() -> None:
    x, fixed = np.full(1000, 0.05), FixedPoint(32, 1.0, 10)
    first, again, other = (encode(x, fixed, public_entropy(label))[0] for label in ("a", "a", "b"))
    assert first.tolist() == again.tolist() != other.tolist()


def test_integers_are_levels_only_if_asked_for() -> None:
    fixed = FixedPoint(16, 1.0, 5)
    levels, clipped = encode(np.array([5, -5, 0], np.int64), fixed, system_entropy, is_levels=True)
    assert (levels.tolist(), clipped) == ([5, -5, 0], 0)
    assert encode(np.zeros(0, np.int8), fixed, system_entropy, is_levels=True)[0].shape == (0,)
    for values, is_levels in ((np.array([1]), False), (np.array([1], np.uint8), False), (np.array([1.0]), True)):
        with pytest.raises(ValueError, match=rf"values: got {values.dtype} with is_levels = {is_levels}; integers are levels"):
            encode(values, fixed, system_entropy, is_levels=is_levels)
    for bad, fraction in ((np.array([6]), 1.0), (np.array([-6]), 1.0), (np.array([1]), 0.5)):
        with pytest.raises(ValueError):
            encode(bad, fixed, system_entropy, fraction, is_levels=True)


@pytest.mark.parametrize(
    "values", [np.zeros((2, 2)), np.zeros(3, complex), np.array([np.nan]), np.array([1.0, np.inf]), np.array(["a"]), np.array([True])]
)
def test_what_is_no_finite_real_vector_is_refused(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    with pytest.raises(ValueError, match="values"):
        encode(values, FixedPoint(16, 1.0, 5), system_entropy)


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_fractions_outside_the_unit_interval(fraction: float) -> None:
    with pytest.raises(ValueError, match="fraction"):
        encode(np.zeros(1), FixedPoint(16, 1.0, 5), system_entropy, fraction)


@pytest.mark.parametrize(
    ("bits", "clip", "levels", "word"),
    [
        (8, 1.0, 1, "bits"),
        (16, 0.0, 1, "clip"),
        (16, -1.0, 1, "clip"),
        (16, float("nan"), 1, "clip"),
        (16, float("inf"), 1, "clip"),
        (16, 1.0, 0, "levels"),
        (16, 1.0, 2**15, "levels"),
        (32, 1.0, 2**31, "levels"),
    ],
)
def test_impossible_quantisers(bits: int, clip: float, levels: int, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        FixedPoint(bits, clip, levels)  # type: ignore[arg-type]


# --- what rounding does


@pytest.mark.parametrize(("clip", "size", "fraction"), [(1.0, 0.1, 1.0), (1.0, 0.001, 0.01), (1e3, 1e-6, 1.0), (5.0, 1e-3, 1e-4)])
def test_the_stated_error_is_that_of_rounding(clip: float, size: float, fraction: float) -> None:
    """Oracle: the errors of encodings, whose mean square over 20,000 coordinates is known to a few per cent."""
    fixed = FixedPoint(32, clip, largest_levels(5, 32))
    values = np.random.default_rng(0).normal(0, size, 20_000)
    levels, _ = encode(values, fixed, public_entropy("rounding"), fraction)
    measured = np.linalg.norm(decode(levels, fixed) - fraction * values) / np.linalg.norm(fraction * values)
    assert relative_error(values, fixed, fraction) == pytest.approx(measured, rel=0.05)


def test_zeros_and_whole_levels_are_not_rounded() -> None:
    fixed = FixedPoint(32, 1.0, 8)
    for values in (np.zeros(5), np.arange(-8, 9) / 8, np.zeros(0)):
        assert relative_error(values, fixed) == 0
    with pytest.raises(ValueError, match="finite"):
        relative_error(np.array([np.nan]), fixed)
