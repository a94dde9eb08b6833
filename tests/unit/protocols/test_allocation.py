"""Prices of random allocation: against exact integrals, another project's bounds, draws with a stated error rate, and Poisson batches."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import fft, stats

from cflpriv.protocols.accounting import calibrate, covers, delta_of, deltas_of, epsilon_of, renyi_of
from cflpriv.protocols.allocation import Ratio, allocated_ratio
from cflpriv.protocols.events import (
    AllocatedGaussianEvent,
    Event,
    GaussianEvent,
    SampledGaussianEvent,
    event_from,
    event_to,
    training_event,
    unsampled,
)  # fmt: skip


def allocated(z: float, batches: int, passes: int = 1) -> AllocatedGaussianEvent:
    return AllocatedGaussianEvent(z, batches, passes, 1.0)


def two_batches(z: float, epsilon: float) -> tuple[float, float]:
    """δ of one pass over two batches, with the sample against without it and the other way round: an integral over the first result.

    Given the first ratio r, the second is log-normal, and E (b − c)₊ and E (c − b)₊ have closed forms (those of options).
    """
    s = 1 / z
    x, width = np.linspace(-14, 14 + s, 200_001, retstep=True)
    first, weight = np.exp(s * x - s**2 / 2), stats.norm.pdf(x) * width

    def excess(cut: NDArray[np.float64]) -> NDArray[np.float64]:
        with np.errstate(divide="ignore", invalid="ignore"):
            place = np.log(np.maximum(cut, 1e-300)) / s
        call = stats.norm.sf(place - s / 2) - cut * stats.norm.sf(place + s / 2)
        return np.where(cut > 0, call, 1 - cut)

    cut = 2 * math.exp(epsilon) - first
    turned = 2 * math.exp(-epsilon) - first
    return float(weight @ excess(cut)) / 2, float(weight @ (excess(turned) - (1 - turned))) / 2 * math.exp(epsilon)


@pytest.mark.parametrize("z", [0.4, 0.8, 1.5, 5.0])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_one_pass_over_two_batches_costs_its_integral_and_no_less(z: float, share: float) -> None:
    epsilon = share * epsilon_of([allocated(z, 2)], 1e-6)
    exact = max(two_batches(z, epsilon))
    bound = delta_of([allocated(z, 2)], epsilon)
    assert exact * (1 - 1e-6) <= bound
    assert epsilon_of([allocated(z, 2)], exact) <= 1.01 * epsilon


FELDMAN_SHENFELD = {(1.0, 4, 1, 1e-5): (3.029647270081272, 3.0344271739117783)}
"""By (noise multiplier, batches, passes, δ) the lower and upper ends that `gaussian_allocation_epsilon_range` of PLD_accounting 0.4.0 gives
with num_selected = 1 and epsilon_accuracy = .005."""


@pytest.mark.parametrize("case", FELDMAN_SHENFELD)
def test_prices_are_between_the_ends_of_the_authors_package(case: tuple[float, int, int, float]) -> None:
    low, high = FELDMAN_SHENFELD[case]
    assert low <= epsilon_of([allocated(*case[:3])], case[3]) <= 1.003 * high


def test_the_loss_is_that_of_jax_privacy() -> None:
    """jax_privacy tests/experimental/monte_carlo/sample_generation_test.py, test_compute_privacy_loss_balls_in_bins, first case.

    Two batches, z = 1, results 1, 0, 1, 0. Their sample keeps its batch for two passes: one pass with both results added, and squared
    length 2.
    """
    sums = np.array([2.0, 0.0])
    assert math.log(np.mean(np.exp(sums - 2 / 2))) == pytest.approx(0.4337808304830272, abs=1e-9)


def losses(z: float, batches: int, passes: int, draws: int, inside: bool, rng: np.random.Generator) -> NDArray[np.float64]:
    """Losses (draws,) of whole trainings with the sample against without it, or the other way round."""
    total = np.zeros(draws)
    for _ in range(passes):
        x = z * rng.normal(size=(draws, batches))
        if inside:
            x[np.arange(draws), rng.integers(batches, size=draws)] += 1
        total += np.log(np.mean(np.exp(x / z**2 - 1 / (2 * z**2)), axis=1))
    return total if inside else -total


@pytest.mark.parametrize(("z", "batches", "passes"), [(0.5, 3, 1), (0.9, 10, 2), (1.5, 7, 5), (2.0, 100, 3)])
def test_no_price_is_below_draws_and_none_is_far_above(z: float, batches: int, passes: int) -> None:
    """Fails by chance in less than one of 10⁵ runs: bounds are 5 standard errors away, the seed is fixed."""
    rng = np.random.default_rng(1)
    both = [losses(z, batches, passes, 60_000, inside, rng) for inside in (True, False)]

    def drawn(epsilon: float, errors: float) -> float:
        """The larger δ of both directions, so many standard errors above."""
        excesses = [np.maximum(0.0, -np.expm1(epsilon - loss)) for loss in both]
        return max(float(excess.mean() + errors * excess.std() / math.sqrt(len(excess))) for excess in excesses)

    for delta in (0.2, 0.02):
        epsilon = epsilon_of([allocated(z, batches, passes)], delta)
        assert drawn(epsilon, -5) <= delta
        assert epsilon == 0 or drawn(0.985 * epsilon - 0.002, 5) >= delta, "within 1.5 %"


def fine_law(z: float, batches: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """R (n,) of one pass and its masses under Q, by a Fourier transform on an even grid of R: no part of the product."""
    s, size = 1 / z, 1 << 21
    step = (math.exp(s * s / 2 + 7.5 * s) + 3 * batches) / size
    edges = (np.arange(size) + 0.5) * step
    mass = np.diff(stats.norm.cdf(np.log(edges) / s + s / 2), prepend=0.0)
    whole = fft.irfft(fft.rfft(mass, 2 * size) ** batches, 2 * size)
    return np.arange(2 * size) * step / batches, np.maximum(whole, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("z", "batches"), [(1.0, 4), (1.2, 10), (2.0, 30), (1.0, 100)])
def test_prices_are_within_a_percent_of_a_transform(z: float, batches: int) -> None:
    ratio, mass = fine_law(z, batches)
    assert mass @ ratio == pytest.approx(1.0, rel=1e-3)
    for delta in (1e-3, 1e-5):
        low, high = 0.0, 20.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if mass @ np.maximum(0.0, ratio - math.exp(middle)) > delta else (low, middle)
        assert 0.998 * high <= epsilon_of([allocated(z, batches)], delta) <= 1.01 * high


@settings(max_examples=40, deadline=None)
@given(st.floats(0.2, 6.0), st.integers(2, 40), st.sampled_from([0.5, 0.1, 0.02]))
def test_ratios_have_mass_one_and_mean_one(z: float, batches: int, spacing: float) -> None:
    ratio = allocated_ratio(z, batches, spacing)
    assert (ratio.masses >= 0).all()
    assert ratio.zero >= 0
    assert ratio.masses.sum() + ratio.zero == pytest.approx(1.0, abs=1e-13)
    mean = float(ratio.masses @ np.exp(ratio.losses))
    assert 1 - 1e-10 <= mean <= 1 + 1e-12


@settings(max_examples=15, deadline=None)
@given(st.floats(0.4, 4.0), st.integers(2, 12))
def test_a_coarser_grid_never_costs_less(z: float, batches: int) -> None:
    def excess(ratio: Ratio, cuts: Any) -> NDArray[np.float64]:
        return np.asarray(np.maximum(0.0, np.exp(ratio.losses)[:, None] - cuts).T @ ratio.masses)

    cuts = np.exp(np.linspace(-2, 6, 40))
    fine, coarse = excess(allocated_ratio(z, batches, 2**-6), cuts), excess(allocated_ratio(z, batches, 2**-2), cuts)
    assert (fine <= coarse * (1 + 1e-9) + 1e-13).all()


@pytest.mark.parametrize(("z", "batches", "passes"), [(0.5, 4, 1), (1.0, 10, 3), (3.0, 20, 20)])
def test_renyi_bounds_lie_above_the_distribution(z: float, batches: int, passes: int) -> None:
    events = [allocated(z, batches, passes)]
    assert epsilon_of(events, 1e-6) <= epsilon_of(events, 1e-6, "rdp")
    assert epsilon_of(events, 1e-6) <= epsilon_of([GaussianEvent(z, 1.0, "add_remove", "sample")] * passes, 1e-6) * (1 + 1e-3)
    orders, renyi = renyi_of(events)
    assert (renyi <= orders * passes / (2 * z**2) * (1 + 1e-6)).all()
    assert epsilon_of(events, 1e-14) >= epsilon_of(events, 1e-10)


LESS = {(1.0, 4, 1): 0.83, (3.0, 4, 1): 0.83, (8.0, 4, 1): 0.77, (1.0, 10, 1): 0.855, (3.0, 10, 1): 0.88, (8.0, 10, 1): 0.80}
"""Noise over that of Poisson batches, at most, by (ε, batches, passes) at δ = 1e-5. With more passes the gain is smaller."""


@pytest.mark.parametrize("case", LESS)
def test_one_pass_needs_less_noise_than_poisson_batches(case: tuple[float, int, int]) -> None:
    epsilon, batches, passes = case

    def noise(allocated: bool) -> float:
        return calibrate(lambda z: [training_event(z, 1 / batches, batches * passes, 1.0, "add_remove", 0, allocated)], epsilon, 1e-5)

    assert noise(True) <= LESS[case] * noise(False)


def test_passes_compose_with_all_other_events() -> None:
    rest: list[Event] = [GaussianEvent(3.0, 1.0, "add_remove", "sample"), SampledGaussianEvent(1.5, 0.1, 20, 1.0, "add_remove")]
    whole = epsilon_of([*rest, allocated(1.0, 5, 2)], 1e-5)
    assert max(epsilon_of(rest, 1e-5), epsilon_of([allocated(1.0, 5, 2)], 1e-5)) < whole
    assert whole < epsilon_of(rest, 5e-6) + epsilon_of([allocated(1.0, 5, 2)], 5e-6)
    assert epsilon_of([allocated(1.0, 5)] * 2, 1e-5) == epsilon_of([allocated(1.0, 5, 2)], 1e-5)
    assert covers([allocated(1.0, 5, 2)], [allocated(1.0, 5)])
    assert not covers([allocated(1.0, 5, 2)], [allocated(1.0, 4)])
    assert (np.diff(deltas_of([allocated(1.0, 5, 2)], np.linspace(0, 3, 10))) <= 0).all()


def test_known_batches_cost_a_gaussian_a_pass() -> None:
    assert epsilon_of([unsampled(allocated(1.5, 8, 3))], 1e-5) == epsilon_of([GaussianEvent(1.5, 1.0, "add_remove", "sample")] * 3, 1e-5)


def test_what_has_no_price_is_refused() -> None:
    assert event_from(event_to(allocated(1.0, 5))) == allocated(1.0, 5)
    with pytest.raises(ValueError, match="no known price"):
        AllocatedGaussianEvent(1.0, 5, 1, 1.0, "replace_one")
    with pytest.raises(ValueError, match="must be secret"):
        AllocatedGaussianEvent(1.0, 5, 1, 1.0, unit="client")
    for changes in ({"batches": 0}, {"passes": True}, {"noise_multiplier": 0.0}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            event_from(event_to(allocated(1.0, 5)) | changes)
    with pytest.raises(ValueError, match="Poisson batches or not, only"):
        epsilon_of([allocated(1.0, 5)], 1e-5, "prv")
