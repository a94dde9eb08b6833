"""Figures that other projects' tests expect, and independent ones over the whole range: within 1 %, and never below."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import privacy_loss_mechanism
from dp_accounting.rdp import rdp_privacy_accountant

from cflpriv.protocols.accounting import calibrate, epsilon_of, renyi_of
from cflpriv.protocols.events import ChoiceEvent, GaussianEvent, Relation, SampledGaussianEvent
from cflpriv.protocols.mechanisms import gaussian_epsilon
from cflpriv.protocols.sampled_losses import sampled_deltas


def cost(z: float, q: float, steps: int, delta: float, relation: Relation = "add_remove") -> float:
    return epsilon_of([SampledGaussianEvent(z, q, steps, 1.0, relation)], delta)


MICROSOFT = {
    (0.8, 0.001, 100): 0.270403364, (1.5, 0.001, 100): 0.039369419, (2.0, 0.001, 100): 0.029104537, (3.0, 0.001, 100): 0.021520093,
    (0.8, 0.05, 100): 6.741051939, (1.5, 0.05, 100): 1.953853136, (2.0, 0.05, 100): 1.283637380, (3.0, 0.05, 100): 0.767933790,
    (0.8, 0.2, 100): 24.333664178, (1.5, 0.2, 100): 8.498977859, (2.0, 0.2, 100): 5.672055609, (3.0, 0.2, 100): 3.381220510,
    (0.8, 0.001, 1000): 0.477771266, (1.5, 0.001, 1000): 0.099820660, (2.0, 0.001, 1000): 0.071218783, (3.0, 0.001, 1000): 0.047615931,
    (0.8, 0.05, 1000): 19.525842805, (1.5, 0.05, 1000): 6.209969247, (2.0, 0.05, 1000): 4.172799867, (3.0, 0.05, 1000): 2.527574323,
    (0.8, 0.001, 20000): 1.296009257, (1.5, 0.001, 20000): 0.437005109, (2.0, 0.001, 20000): 0.305837940,
    (3.0, 0.001, 20000): 0.194031031, (0.8, 0.05, 20000): 140.655209760, (1.5, 0.05, 20000): 38.306617914,
    (2.0, 0.05, 20000): 24.421718570, (3.0, 0.05, 20000): 13.961114699, (0.8, 0.001, 50000): 2.034514808,
    (1.5, 0.001, 50000): 0.704218385, (2.0, 0.001, 50000): 0.491354910, (3.0, 0.001, 50000): 0.309694161,
    (0.8, 0.05, 50000): 291.384325452, (1.5, 0.05, 50000): 73.190176724, (2.0, 0.05, 50000): 45.236995830,
    (3.0, 0.05, 50000): 24.942005643, (0.8, 0.001, 100000): 2.924622119, (1.5, 0.001, 100000): 1.015288075,
    (2.0, 0.001, 100000): 0.706719901, (3.0, 0.001, 100000): 0.443671721,
}  # fmt: skip
"""By (noise multiplier, rate, steps) the ε at δ = 1e-6 of microsoft/prv_accountant, as Opacus' opacus/tests/prv_accountant.py lists it: an
upper end, `ABOVE` above the estimate, whose own grid is up to `GRID` off (a finer one brackets the second case by .01110 and .01120)."""
ABOVE, GRID = 0.01, 4e-4
QUICK = {(0.8, 0.001, 100), (3.0, 0.001, 100), (0.8, 0.2, 100), (3.0, 0.05, 1000), (2.0, 0.05, 20000), (0.8, 0.05, 50000)}


@pytest.mark.parametrize("case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in MICROSOFT], ids=str)
def test_the_cases_of_microsofts_accountant(case: tuple[float, float, int]) -> None:
    exact = MICROSOFT[case] - ABOVE
    ours = cost(*case, 1e-6)
    assert exact * (1 - 1e-4) - GRID <= ours <= exact * 1.01


@pytest.mark.parametrize(("z", "q", "steps"), [(0.67379294682, 0.01, 1), (3.20956502598 / 6, 0.001, 25)])
def test_the_noise_that_dp_accounting_finds_costs_what_was_asked(z: float, q: float, steps: int) -> None:
    """dp_accounting/pld/accountant_test.py, test_get_smallest_subsampled_gaussian_noise: ε = 1 at δ = 1e-5."""
    assert cost(z, q, steps, 1e-5) == pytest.approx(1.0, rel=0.01)


def test_opacus_renyi_case_is_an_upper_bound() -> None:
    """opacus/tests/accountants_test.py, test_rdp_accountant: 7.329 at δ = 1e-5."""
    assert 0.8 * 7.32911117143 < cost(1.5, 0.04, 2250, 1e-5) < 7.32911117143


@pytest.mark.parametrize(("z", "q"), [(1.0, 0.01), (0.3, 0.5), (0.1, 0.9), (5.0, 0.02), (0.8, 1e-4)])
def test_renyi_divergences_of_sampled_steps_are_those_of_dp_accounting(z: float, q: float) -> None:
    orders, ours = renyi_of([SampledGaussianEvent(z, q, 3, 1.0, "add_remove")])
    peer = rdp_privacy_accountant.RdpAccountant(orders.astype(int).tolist())
    peer.compose(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(z)), 3)
    assert ours == pytest.approx(np.asarray(peer.rdp), rel=1e-6)


@pytest.mark.parametrize(("z", "q"), [(1.0, 0.01), (0.53, 2.31e-5), (0.1, 0.3), (5.0, 0.5), (2.0, 1 - 1e-9)])
@pytest.mark.parametrize("turned", [False, True])
def test_deltas_of_one_step_are_those_of_dp_accounting(z: float, q: float, turned: bool) -> None:
    kind = privacy_loss_mechanism.AdjacencyType
    peer = privacy_loss_mechanism.GaussianPrivacyLoss(z, sampling_prob=q, adjacency_type=kind.ADD if turned else kind.REMOVE)
    epsilons = np.linspace(-3, 3, 41) * math.log1p(q * math.expm1(1 / z))
    assert sampled_deltas(z, q, epsilons, turned) == pytest.approx(peer.get_delta_for_epsilon(epsilons), rel=1e-10, abs=1e-15)


@pytest.mark.parametrize(("z", "q"), [(50.0, 1e-6), (1.0, 1e-9), (1e5, 0.5), (1e-3, 0.1)])
def test_the_second_renyi_divergence_is_that_of_its_closed_form(z: float, q: float) -> None:
    """log(1 + q² (exp(1/z²) − 1)), also where it is far below the rounding of 1."""
    exact = math.log1p(q * q * math.expm1(z**-2)) if z > 0.1 else z**-2 + 2 * math.log(q)
    assert renyi_of([SampledGaussianEvent(z, q, 1, 1.0, "add_remove")])[1][0] == pytest.approx(exact, rel=1e-8)


PEERS = {
    (3.0, 0.1, 512, 1e-6): (3.77, 0.005, "jax_privacy/accounting.py, the module's first example, to two digits"),
    (9.66, 0.1, 512, 1e-6): (1.0, 0.005, "jax_privacy/accounting.py, the module's second example: the noise to two digits"),
    (3.0, 0.1, 155, 1e-6): (2.0, 0.007, "jax_privacy/accounting.py, the module's third example: the last number of steps within 2"),
    (0.5, 0.2, 3, 0.15594): (1.0, 0.001, "dp_accounting/pld/pld_privacy_accountant_test.py, test_poisson_subsampled_gaussian"),
    (3**0.5, 1.0, 3, 0.126936): (1.0, 0.001, "dp_accounting/pld/pld_privacy_accountant_test.py, test_gaussian_basic"),
    (4.530877117, 1.0, 1, 1e-6): (0.9466, 0.054, "dp_accounting/rdp/rdp_privacy_accountant_test.py: Rényi, an upper end of 1"),
    (1.5, 0.04, 2250, 1e-5): (6.767, 0.0105, "opacus/tests/accountants_test.py, test_prv_accountant: an upper end, 6.777"),
}
"""By (noise multiplier, rate, steps, δ) what another project's test or documentation expects, and how exactly."""


@pytest.mark.parametrize("case", PEERS, ids=str)
def test_what_other_projects_expect(case: tuple[float, float, int, float]) -> None:
    expected, within, _ = PEERS[case]
    assert expected - within <= cost(*case) <= 1.01 * (expected + within)


def one_step(z: float, q: float, epsilon: float) -> float:
    """The δ of one sampled step with the record against without it, in closed form."""
    if epsilon <= math.log1p(-q):
        return -math.expm1(epsilon)
    cut = z**2 * math.log((math.exp(epsilon) - 1 + q) / q) + 0.5
    upper, blank = math.erfc((cut - 1) / (z * math.sqrt(2))) / 2, math.erfc(cut / (z * math.sqrt(2))) / 2
    return (1 - q) * blank + q * upper - math.exp(epsilon) * blank


@pytest.mark.parametrize(
    ("z", "q"), [pytest.param(0.6, 1e-4, marks=pytest.mark.slow), (0.5, 1e-3), (1.0, 0.01), (0.4, 0.5), (2.0, 0.9), (8.0, 0.3)]
)
@pytest.mark.parametrize("delta", [1e-5, 1e-8])
def test_one_step_is_priced_as_by_its_closed_form(z: float, q: float, delta: float) -> None:
    low, high = 0.0, 500.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if one_step(z, q, middle) > delta else (low, middle)
    assert high * (1 - 1e-6) <= cost(z, q, 1, delta) <= max(1.01 * high, high + 1e-4)


@pytest.mark.parametrize(
    ("case", "exact"),
    [
        pytest.param((10.0, 1e-3, 10**5, 1e-5), 0.0973, marks=pytest.mark.slow),
        pytest.param((1.0, 1e-5, 10**6, 1e-7), 0.0526, marks=pytest.mark.slow),
        ((100.0, 0.1, 10**4, 1e-5), 0.387),
    ],
)  # fmt: skip
def test_steps_that_cost_much_less_than_a_spacing_are_not_over_charged(case: tuple[float, float, int, float], exact: float) -> None:
    """Opacus' PRV less its error for the first two; a Gaussian of the same precision, q²·steps/z², for the third, in its central limit."""
    if case[1] == 0.1:
        exact = gaussian_epsilon(case[0] / (case[1] * math.sqrt(case[2])), case[3])
    assert 0.995 * exact <= cost(*case) <= 1.015 * exact


@pytest.mark.parametrize("delta", [1e-12, 1e-14, 1e-30])
def test_replaced_records_have_a_price_at_the_smallest_delta(delta: float) -> None:
    price = cost(1.0, 0.01, 100, delta, "replace_one")
    assert cost(1.0, 0.01, 100, 1e-10, "replace_one") < price < 2 * cost(1.0, 0.01, 100, delta / (1 + math.exp(price)))
    orders, renyi = renyi_of([SampledGaussianEvent(1.5, 1 - 1e-12, 1, 1.0, "replace_one")])
    assert renyi[:12] == pytest.approx(orders[:12] * (2 / 1.5) ** 2 / 2, rel=1e-6), "without sampling: Gaussians at distance 2"


@pytest.mark.parametrize("rate", [1e-320, 1e-300, 1e-16])
def test_a_rate_of_next_to_nothing_costs_next_to_nothing(rate: float) -> None:
    assert cost(1.0, rate, 10, 1e-9) == 0.0
    assert cost(1.0, rate, 10, 1e-5, "replace_one") == 0.0
    assert epsilon_of([SampledGaussianEvent(1.0, rate, 10, 1.0, "add_remove"), GaussianEvent(5.0, 1.0, "add_remove", "sample")], 1e-5) > 0


def test_truth_values_are_no_numbers() -> None:
    for made in (
        lambda: GaussianEvent(True, 1.0, "add_remove", "sample"),
        lambda: SampledGaussianEvent(1.0, True, 1, 1.0, "add_remove"),
        lambda: SampledGaussianEvent(1.0, 0.5, True, 1.0, "add_remove"),
        lambda: ChoiceEvent(True, "add_remove", "sample"),
    ):
        with pytest.raises(ValueError, match="True"):
            made()


def test_little_noise_is_calibrated_as_well() -> None:
    def events(z: float) -> list[SampledGaussianEvent]:
        return [SampledGaussianEvent(z, 0.1, 100, 1.0, "add_remove")]

    z = calibrate(events, 1e4, 1e-5)
    assert 0.99e4 <= epsilon_of(events(z), 1e-5) <= 1e4
