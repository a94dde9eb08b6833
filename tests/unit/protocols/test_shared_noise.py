"""Noise that clients share: the law of sums of rounded shares against the Gaussian mechanism, by exact probabilities."""

import math
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.integrate import trapezoid

from cflpriv.protocols import entropy, shared_noise
from cflpriv.protocols.entropy import normals, public_entropy
from cflpriv.protocols.mechanisms import gaussian_delta
from cflpriv.protocols.shared_noise import REACH, SHARE_STEPS, SharedNoise, aliasing

Array = Any
ALPHA = 1e-6
"""Error rate of each statistical statement here; the draws are fixed."""


def rounded(x: float, steps: float, reach: int) -> Array:
    """P(⌊x + N(0, steps²)⌉ = k) for k in −reach … reach."""
    k = np.arange(-reach, reach + 1)
    upper, lower = (k + 0.5 - x) / steps, (k - 0.5 - x) / steps
    return np.where(k > x, stats.norm.sf(lower) - stats.norm.sf(upper), stats.norm.cdf(upper) - stats.norm.cdf(lower))


def law_of_sum(points: list[float], steps: float, reach: int) -> Array:
    """The probabilities of the sum of rounded shares, by convolution, for −n·reach … n·reach."""
    law = np.ones(1)
    for x in points:
        law = np.convolve(law, rounded(x, steps, reach))
    return law


def law_of_mechanism(points: list[float], steps: float, reach: int) -> Array:
    """The same of ⌊Σx + N(0, n steps²) + n − 1 uniforms⌉: the density of n uniforms and the noise, from its characteristic function."""
    n = len(points)
    k = np.arange(-n * reach, n * reach + 1)
    t = np.linspace(-1, 1, 40_001) * min(40 / (steps * math.sqrt(n)), 400.0)
    transform = np.exp(-n * (steps * t) ** 2 / 2) * np.sinc(t / (2 * np.pi)) ** n
    return np.array([trapezoid(np.cos(t * (one - sum(points))) * transform, t) / (2 * np.pi) for one in k])


@pytest.mark.parametrize("steps", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("points", [[0.3, -0.21], [0.5, 0.5, 0.11], [0.0, 0.9, -2.3, 0.44]])
def test_a_sum_of_rounded_shares_is_a_rounding_of_the_gaussian_mechanism(points: list[float], steps: float) -> None:
    reach = math.ceil(10 * steps) + 6
    apart = np.abs(law_of_sum(points, steps, reach) - law_of_mechanism(points, steps, reach)).sum() / 2
    assert apart <= aliasing(len(points), steps) + 1e-10  # the second law is a numerical integral
    if steps == 0.5:
        assert apart > 1e-5, "where there is less noise than a step the two laws differ, so the comparison can fail"


def test_what_is_used_is_no_matter_of_chance() -> None:
    assert aliasing(10_000) < 1e-125
    assert aliasing(2, 0.3) == 1.0, "with next to no noise nothing is claimed"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-30, 30), min_size=1, max_size=4), st.floats(0.01, 60), st.floats(-2, 2), st.integers(0, 3),
)  # fmt: skip
def test_no_neighbours_are_told_apart_better_than_by_the_gaussian_mechanism(
    points: list[float], moved: float, logarithm: float, known: int
) -> None:
    """δ(ε) of the integers themselves, by exact probabilities: never above that of the noise that the unknown shares make."""
    epsilon = 10.0**logarithm
    reach = math.ceil(12 * SHARE_STEPS + 100)
    first, second = law_of_sum(points, SHARE_STEPS, reach), law_of_sum([points[0] + moved, *points[1:]], SHARE_STEPS, reach)
    for one, other in ((first, second), (second, first)):
        delta = np.maximum(0.0, one - math.exp(min(epsilon, 700.0)) * other).sum()
        assert delta <= gaussian_delta(SHARE_STEPS * math.sqrt(len(points)) / moved, epsilon) + 1e-12


def test_the_bound_is_tight() -> None:
    # for a sum of three shares and a move of one deviation: rounding takes less than a thousandth off δ
    first, second = (law_of_sum([x, 0.0, 0.0], SHARE_STEPS, 300) for x in (0.0, SHARE_STEPS * math.sqrt(3)))
    delta = np.maximum(0.0, first - math.e * second).sum()
    assert 0.997 * gaussian_delta(1.0, 1.0) < delta <= gaussian_delta(1.0, 1.0)


def test_sums_have_the_noise_of_all_shares_and_no_bias() -> None:
    rng = np.random.default_rng(3)
    noise, n, size = SharedNoise(0.7, 5), 7, 400
    vectors = rng.normal(size=(n, size))
    errors = []
    for i in range(20):
        sent = [noise.noisy(vector, 10_000, public_entropy(f"{i} {c}")) for c, vector in enumerate(vectors)]
        errors.append(noise.opened(np.sum(sent, axis=0)) - vectors.sum(axis=0))
    error = np.concatenate(errors)
    deviation = noise.share * math.sqrt(n * (1 + 1 / (12 * SHARE_STEPS**2)))
    assert noise.share * math.sqrt(noise.survivors) == pytest.approx(noise.deviation)
    assert stats.kstest(error / deviation, "norm").pvalue > ALPHA
    total = float(np.square(error / deviation).sum())
    assert ALPHA < stats.chi2(error.size).sf(total) < 1 - ALPHA
    assert stats.chi2(error.size).sf(total / 0.9**2) < ALPHA, "a tenth less noise would be noticed"


THREE = st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3)


@settings(max_examples=100, deadline=None)
@given(THREE, THREE, st.integers(106, 5000))
def test_what_does_not_fit_is_cut_before_the_noise_and_moves_no_vectors_apart(x: list[float], y: list[float], room: int) -> None:
    noise = SharedNoise(SHARE_STEPS, 1)  # one step is 1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_noise, "gaussian_noise", lambda scale, count, entropy: np.zeros(count))
        first, second = (noise.noisy(np.array(one), room, public_entropy("")) for one in (x, y))
    assert max(abs(first).max(), abs(second).max()) <= room - REACH * SHARE_STEPS
    assert np.linalg.norm(first - second) <= np.linalg.norm(np.subtract(x, y)) + math.sqrt(3)


def test_shares_stay_within_the_room_that_they_ask_for() -> None:
    noise = SharedNoise(2.0, 3)
    room = noise.room(0.5)
    sent = noise.noisy(np.full(100_000, 0.5), room, public_entropy("room"))
    assert abs(sent).max() <= room
    assert noise.opened(sent).mean() == pytest.approx(0.5, abs=6 * noise.share / math.sqrt(100_000)), "none of it was cut off"


@pytest.mark.parametrize("deviation", [0.0, -1.0, math.nan, math.inf, 1e-320])
def test_noise_that_is_none_is_refused(deviation: float) -> None:
    with pytest.raises(ValueError, match="deviation"):
        SharedNoise(deviation, 3)


def test_impossible_shares_are_refused() -> None:
    with pytest.raises(ValueError, match="survivors: 0"):
        SharedNoise(1.0, 0)
    noise = SharedNoise(1.0, 2)
    with pytest.raises(ValueError, match="room: 100 integers"):
        noise.noisy(np.zeros(3), 100, public_entropy(""))
    for vector in (np.array([1.0, math.nan]), np.array([math.inf]), np.zeros((2, 2))):
        with pytest.raises(ValueError, match="vector: expected finite numbers in one row"):
            noise.noisy(vector, 1000, public_entropy(""))


# --- the tails of the samples -----------------------------------------------------------------------------------------------------------


def test_normals_have_their_law_far_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chance of a tail beyond each sample is the one that its bits say, down to 2^-117 and to 1e-13 of it."""
    rng = np.random.default_rng(0)
    bits = np.concatenate([rng.integers(2**62, 2**63, 200) >> shift for shift in range(0, 63, 3)] + [np.zeros(3, np.int64)])
    words = (bits.astype(np.uint64) | (rng.integers(0, 2, bits.size).astype(np.uint64) << np.uint64(63))).astype("<u8")
    few = bits < 2**52
    more = rng.integers(0, 2**64, int(few.sum()), dtype=np.uint64)
    drawn = BytesIO(words.tobytes() + more.astype("<u8").tobytes())
    monkeypatch.setattr(entropy, "_aes", lambda key: SimpleNamespace(update=lambda zeros: drawn.read(len(zeros))))
    found = normals(bytes(32), words.size)
    assert drawn.read() == b""
    tails = (bits.astype(np.float64) + 0.5) * 2.0**-64
    tails[few] = (bits[few] + ((more >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52) * 2.0**-64
    upper = words >> np.uint64(63) == 1
    assert np.all(np.where(upper, found, -found) >= 0)
    assert np.allclose(stats.norm.sf(np.abs(found)), tails, rtol=1e-13, atol=0)
    assert np.abs(found).max() < 12.5


def test_the_longest_normal_is_within_the_reach_of_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entropy, "_aes", lambda key: SimpleNamespace(update=lambda zeros: zeros))
    assert np.abs(normals(bytes(32), 4)).max() == pytest.approx(12.4, abs=0.1)
