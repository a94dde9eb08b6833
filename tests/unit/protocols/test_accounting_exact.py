"""Prices of sampled steps over the whole range, between bounds of the test's own: within 1 %, and never below."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import rdp_privacy_accountant as rdp
from exact_epsilon import ENOUGH, SMALLEST, bracket, gaussian_bracket

from cflpriv.protocols.accounting import epsilon_of
from cflpriv.protocols.events import SampledGaussianEvent

SEED, CASES, EVERYBODY = 56, 40, 8
"""Every eighth case has everybody in every step."""
MOST = 100.0


def noise_of(q: float, steps: int, delta: float, epsilon: float) -> float:
    """The noise multiplier that costs about this ε, by dp-accounting's Rényi divergences."""
    low, high = math.log(0.05), math.log(1e5)
    for _ in range(30):
        middle = (low + high) / 2
        accountant = rdp.RdpAccountant()
        accountant.compose(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(math.exp(middle))), steps)
        low, high = (middle, high) if accountant.get_epsilon(delta) > epsilon else (low, middle)
    return math.exp(high)


def drawn_case(number: int) -> tuple[float, float, int, float, float, float]:
    """(z, q, steps, δ, bounds of ε): q from 1e-6 to 1, 1 to 10⁶ steps, δ from 1e-8 to 1e-4, ε from .01 to 100, all by their logarithms.

    Drawn again where no noise costs that ε.
    """
    rng = np.random.default_rng([SEED, number])
    while True:
        q, steps, delta = 10 ** rng.uniform(-6, 0), int(10 ** rng.uniform(0, 6)), 10 ** rng.uniform(-8, -4)
        q = 1.0 if number % EVERYBODY == 0 else q
        z = noise_of(q, steps, delta, math.exp(rng.uniform(math.log(SMALLEST), math.log(MOST))))
        low, high = gaussian_bracket(z, steps, delta) if q == 1 else bracket(z, q, steps, delta)
        if low >= SMALLEST and high <= MOST:
            return z, q, steps, delta, low, high


@pytest.mark.slow
@pytest.mark.parametrize("number", range(CASES))
def test_prices_are_within_a_percent_of_exact_ones(number: int) -> None:
    z, q, steps, delta, low, high = drawn_case(number)
    assert high - low <= ENOUGH * low
    ours = epsilon_of([SampledGaussianEvent(z, q, steps, 1.0, "add_remove")], delta)
    assert low <= ours <= 1.01 * low


@pytest.mark.parametrize(("z", "q", "steps"), [(2.0, 1 - 1e-12, 30), (1.0, 1 - 1e-12, 1)])
def test_bounds_hold_what_is_known_in_closed_form(z: float, q: float, steps: int) -> None:
    """Nearly everybody in every step: a plain Gaussian, but for 1e-10 of δ."""
    low, high = bracket(z, q, steps, 1e-5)
    assert low * (1 - 1e-6) <= gaussian_bracket(z, steps, 1e-5)[0]
    assert gaussian_bracket(z, steps, 1e-5)[1] <= high * (1 + 1e-6)
    assert high - low <= ENOUGH * low
