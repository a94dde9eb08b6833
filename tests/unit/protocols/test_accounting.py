"""Accountants: two libraries agree, the exact cases are exact, joint is never worse than adding, what is not covered is refused."""

import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import trapezoid

from cflpriv.protocols.accounting import _gaussian_pld, _sampled_pld, calibrate, delta_of, epsilon_of
from cflpriv.protocols.events import (
    AllocatedGaussianEvent,
    ChoiceEvent,
    Event,
    GaussianEvent,
    Relation,
    SampledGaussianEvent,
    event_from,
    event_to,
    known_shares,
)
from cflpriv.protocols.mechanisms import gaussian_delta, gaussian_epsilon


def plain(z: float, relation: Relation = "add_remove") -> GaussianEvent:
    return GaussianEvent(z, 1.0, relation, "sample")


def sampled(z: float, q: float, steps: int, relation: Relation = "add_remove") -> SampledGaussianEvent:
    return SampledGaussianEvent(z, q, steps, 1.0, relation)


SEVERAL: tuple[list[Event], ...] = (
    [sampled(1.0, 0.01, 500)],
    [sampled(0.8, 0.02, 100)],
    [sampled(2.0, 0.1, 300)],
    [sampled(1.5, 0.05, 200), sampled(0.9, 0.01, 50)],
    [sampled(1.2, 0.02, 1000), sampled(3.0, 0.2, 10), plain(5.0)],
)
GRID: list[tuple[float, list[Event]]] = [
    (delta, [*([plain(z)] if z else []), *several])
    for delta, z in ((1e-5, 0.0), (1e-7, 2.0), (1e-5, 8.0), (1e-7, 0.0), (1e-5, 2.0), (1e-7, 8.0))
    for several in SEVERAL
]


@pytest.mark.parametrize("place", [*range(15), *(pytest.param(place, marks=pytest.mark.slow) for place in range(15, len(GRID)))])
def test_pld_and_prv_agree(place: int) -> None:
    delta, events = GRID[place]
    pld, prv, rdp = (epsilon_of(events, delta, name) for name in ("pld", "prv", "rdp"))
    assert abs(pld - prv) < 0.02
    assert rdp > pld - 1e-3, "Rényi accounting is an upper bound"


@pytest.mark.parametrize(("zs", "delta"), [((1.0,), 1e-5), ((3.0, 4.0), 1e-6), ((2.0, 2.0, 2.0, 9.0), 1e-5), ((40.0,) * 100, 1e-7)])
def test_gaussians_alone_cost_exactly_what_one_of_their_joint_precision_costs(zs: tuple[float, ...], delta: float) -> None:
    joint = 1 / math.sqrt(sum(z**-2 for z in zs))
    exact = epsilon_of([plain(z) for z in zs], delta)
    assert gaussian_delta(joint, exact) == pytest.approx(delta, rel=1e-6)
    # and the numerical composition of dp-accounting comes to the same
    pieces = [_gaussian_pld(z, 5e-4) for z in zs]
    total = pieces[0]
    for piece in pieces[1:]:
        total = total.compose(piece)
    assert total.get_epsilon_for_delta(delta) == pytest.approx(exact, abs=2e-3)


def test_opacus_gdp_is_refused_by_name_and_for_a_reason() -> None:
    with pytest.raises(ValueError, match="GaussianAccountant"):
        epsilon_of([plain(1.0)], 1e-5, "gdp")  # type: ignore[arg-type]
    from opacus.accountants import GaussianAccountant

    with pytest.warns(UserWarning, match="underestimate"):
        theirs = GaussianAccountant()
    theirs.history = [(3.0, 1.0, 1), (4.0, 1.0, 1)]
    exact = epsilon_of([plain(3.0), plain(4.0)], 1e-5)
    assert theirs.get_epsilon(1e-5) < exact - 0.2, "it forgets the first of two releases"


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    st.floats(0.8, 12), st.floats(0.7, 4), st.sampled_from([0.01, 0.05, 0.2]), st.integers(1, 300), st.floats(0.05, 0.95),
)  # fmt: skip
def test_a_joint_composition_is_never_worse_than_adding(z: float, zt: float, q: float, steps: int, share: float) -> None:
    signature, training = [plain(z)], [sampled(zt, q, steps)]
    delta = 1e-5
    added = epsilon_of(signature, share * delta) + epsilon_of(training, (1 - share) * delta)
    assert epsilon_of([*signature, *training], delta) <= added + 2e-3


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [plain(3.0), plain(7.0), sampled(2.0, 0.1, 5), sampled(2.0, 1.0, 2), AllocatedGaussianEvent(4.0, 4, 1, 1.0, "add_remove")]
        ),
        max_size=30,
    )
)
def test_counted_events_cost_what_the_listed_ones_cost(listed: list[Event]) -> None:
    assert epsilon_of(Counter(listed), 1e-5) == pytest.approx(epsilon_of(listed, 1e-5), rel=1e-12)
    assert epsilon_of(iter(listed), 1e-5) == epsilon_of(listed, 1e-5)


def test_a_signature_and_training_together_save_a_fifth() -> None:
    signature, training = [plain(4.0)], [sampled(1.0, 0.01, 1000)]
    added = epsilon_of(signature, 5e-6) + epsilon_of(training, 5e-6)
    assert 0.15 < 1 - epsilon_of([*signature, *training], 1e-5) / added < 0.4


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_sampling_everyone_is_no_sampling(relation: Relation) -> None:
    # σ of the bound; replacing moves a clipped sum by twice that bound
    times = 1 if relation == "add_remove" else 2
    exact = gaussian_epsilon(3.0 / times / 2, 1e-5)
    assert epsilon_of([sampled(3.0, 1.0, 4, relation)], 1e-5) == pytest.approx(exact, rel=1e-9)
    assert epsilon_of([sampled(3.0, 1.0, 1, relation), sampled(3.0, 1.0, 3, relation)], 1e-5) == pytest.approx(exact, rel=1e-9)
    # and dp-accounting, told of a rate of 1 and of the relation, comes to the same
    assert _sampled_pld(3.0, 1.0, 4, relation, 5e-4).get_epsilon_for_delta(1e-5) == pytest.approx(exact, abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [6, 7, 8, 12])
def test_losses_whose_exponentials_leave_the_floating_point_numbers(steps: int) -> None:
    # ε from 629 to 1180; where e^-ε is subnormal, about 709 to 745, dp-accounting's formula gives infinity
    z = 0.0778
    exact = gaussian_epsilon(z / math.sqrt(steps), 1e-5)
    nearly_all = epsilon_of([sampled(z, 1 - 1e-9, steps)], 1e-5)
    assert exact <= nearly_all + 1e-3
    assert nearly_all == pytest.approx(exact, abs=0.2)
    assert epsilon_of([sampled(z, 0.5, steps)], 1e-5) < exact
    assert epsilon_of([sampled(z, 0.5, steps)], 1e-5, "rdp") > epsilon_of([sampled(z, 0.5, steps)], 1e-5)


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_sampled_privacy_loss_against_an_integral(relation: Relation) -> None:
    z, q, epsilon = 1.3, 0.1, 0.5
    x = np.linspace(-30, 30, 3_000_001)
    at = {shift: np.exp(-((x - shift) ** 2) / (2 * z * z)) / (z * math.sqrt(2 * math.pi)) for shift in (-1.0, 0.0, 1.0)}
    with_, other = (1 - q) * at[0.0] + q * at[1.0], at[0.0] if relation == "add_remove" else (1 - q) * at[0.0] + q * at[-1.0]
    exact = max(float(trapezoid(np.maximum(0, one - math.exp(epsilon) * two), x)) for one, two in ((with_, other), (other, with_)))
    assert delta_of([sampled(z, q, 1, relation)], epsilon) == pytest.approx(exact, rel=1e-2)
    assert delta_of([sampled(z, q, 1, relation)], epsilon) >= exact * (1 - 1e-6)


def test_choices_cost_their_epsilon_at_most_and_compose_below_their_sum() -> None:
    event = ChoiceEvent(0.7, "replace_one", "sample")
    assert epsilon_of([event], 1e-9) == pytest.approx(0.7, abs=2e-3)
    assert epsilon_of([event] * 40, 1e-5) < 40 * 0.7 * 0.5
    # one choice: the largest p (1 − e^(ε' − t)) over the losses t that bounded range allows, p = (e^ε − e^t) / (e^ε − 1)
    epsilon, other = 1.5, 0.9
    t = np.linspace(other, epsilon, 10_001)
    exact = float(np.max((math.exp(epsilon) - np.exp(t)) / math.expm1(epsilon) * -np.expm1(other - t)))
    assert delta_of([ChoiceEvent(epsilon, "replace_one", "sample")], other) == pytest.approx(exact, rel=5e-3)
    assert delta_of([ChoiceEvent(epsilon, "replace_one", "sample")], other) >= exact


@pytest.mark.parametrize("delta", [1e-10, 3e-12, 1.1e-12])
def test_a_tiny_delta_is_not_flattered_by_rounding(delta: float) -> None:
    """Nearly everybody sampled is nearly a plain Gaussian, whose price is known to the last digit."""
    for steps, z in ((1000, 50.0), (10_000, 100 / 3)):
        assert epsilon_of([sampled(z, 1 - 1e-12, steps, "replace_one")], delta) >= gaussian_epsilon(z / 2 / steps**0.5, delta)
        assert epsilon_of([sampled(z, 1 - 1e-12, steps)], delta) >= gaussian_epsilon(z / steps**0.5, delta)
    assert delta_of([sampled(50.0, 0.5, 10)], 40.0) >= 1e-12


@pytest.mark.slow
def test_a_delta_that_is_all_rounding_is_priced_by_formulas() -> None:
    """Higher than at a larger δ, and no more than what adds up by hand."""
    pure: list[Event] = [ChoiceEvent(1.0, "add_remove", "sample"), ChoiceEvent(0.5, "add_remove", "sample")]
    assert epsilon_of(pure, 1e-12) == 1.5
    assert delta_of(pure, 1.5) == 0.0
    assert epsilon_of([*pure, plain(5.0)], 1e-13) == pytest.approx(1.5 + gaussian_epsilon(5.0, 1e-13))
    steps = [sampled(2.0, 0.01, 1000)]
    assert epsilon_of(steps, 1e-9) < epsilon_of(steps, 1e-12) == epsilon_of(steps, 1e-12, "rdp") < 2.0
    replaced = [sampled(2.0, 0.01, 1000, "replace_one")]
    assert epsilon_of(steps, 1e-12) < epsilon_of(replaced, 1e-12) == epsilon_of(replaced, 1e-12, "rdp") < 2 * epsilon_of(steps, 1e-13)
    assert epsilon_of(replaced, 1e-9) < epsilon_of(replaced, 1e-12)
    z = calibrate(lambda z: [sampled(z, 0.01, 1000)], 1.0, 1e-12)
    assert 0.99 < epsilon_of([sampled(z, 0.01, 1000)], 1e-12) <= 1.0


def test_noise_that_underflows_is_not_free() -> None:
    tiny: tuple[Event, ...] = (
        sampled(1e-160, 0.5, 10), sampled(1e-150, 0.5, 10), plain(1e-200),
    )  # fmt: skip
    for event in tiny:
        assert epsilon_of([event], 1e-5) > 1e100
        assert epsilon_of([event], 1e-5, "rdp") > 1e100


def test_what_is_not_known_is_refused() -> None:
    @dataclass(frozen=True)
    class Wish:
        relation: Relation = "add_remove"
        unit: str = "sample"

    with pytest.raises(TypeError, match=r"privacy event: expected GaussianEvent or .*, got Wish"):
        epsilon_of([Wish()], 1e-5)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="Wish"):
        event_to(Wish())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'Wish' is not a known privacy event"):
        event_from({"event": "Wish"})
    with pytest.raises(ValueError, match="'magic' is not known"):
        epsilon_of([plain(1.0)], 1e-5, "magic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="do not compose"):
        epsilon_of([plain(1.0), plain(1.0, "replace_one")], 1e-5)
    with pytest.raises(ValueError, match="covers Gaussian noise, sampled by Poisson batches or not, only"):
        epsilon_of([ChoiceEvent(1.0, "add_remove", "sample")], 1e-5, "prv")
    with pytest.raises(ValueError, match="'add_remove' only"):
        epsilon_of([sampled(1.0, 0.1, 1, "replace_one")], 1e-5, "prv")
    with pytest.raises(ValueError, match="amplifies nothing"):
        SampledGaussianEvent(1.0, 0.1, 1, 1.0, "add_remove", "client")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"sampling_rate": 0.0}, "sampling_rate"),
        ({"sampling_rate": 1.5}, "sampling_rate"),
        ({"steps": 0}, "steps"),
        ({"norm_bound": -1.0}, "norm_bound"),
        ({"relation": "swap"}, "relation"),
        ({"unit": "household"}, "unit"),
        ({"shares": -1}, "shares"),
        ({"shares": 1.5}, "shares"),
    ],
)
def test_impossible_events_cannot_be_made(changes: dict[str, object], key: str) -> None:
    good = event_to(sampled(1.0, 0.1, 5))
    with pytest.raises(ValueError, match=key):
        event_from({**good, **changes})


def test_events_survive_json() -> None:
    events: list[Event] = [
        plain(1.5), sampled(1.0, 0.1, 5), replace(plain(1.5), shares=9), replace(sampled(1.0, 0.1, 5), shares=4),
        ChoiceEvent(0.5, "add_remove", "sample"),
    ]  # fmt: skip
    for event in events:
        assert event_from(event_to(event)) == event
    with pytest.raises(ValueError, match="fields"):
        event_from({**event_to(plain(1.0)), "more": 1})
    assert "shares" not in event_to(plain(1.0)), "ledgers of before have no such field"
    with pytest.raises(ValueError, match=r"'SkellamEvent' is of version 0\.1"):
        event_from({"event": "SkellamEvent", "variance": 9.0, "l2": 1.0, "l1": 1.0, "relation": "add_remove", "unit": "client"})


@pytest.mark.parametrize("event", [plain(1.5), sampled(1.5, 0.1, 5)])
def test_who_knows_shares_takes_them_off(event: GaussianEvent | SampledGaussianEvent) -> None:
    shared = replace(event, shares=4)
    assert epsilon_of([shared], 1e-5) == epsilon_of([event], 1e-5)
    assert known_shares(event, 3) == event
    assert known_shares(shared, 0) == shared
    assert known_shares(shared, 4) is None
    left = known_shares(shared, 3)
    assert left == replace(shared, noise_multiplier=0.75, shares=1)


@pytest.mark.slow
def test_calibration_refuses_what_no_noise_reaches() -> None:
    with pytest.raises(ValueError, match="cannot be kept"):
        calibrate(lambda z: [ChoiceEvent(3.0, "add_remove", "sample"), sampled(z, 0.1, 1)], 1.0, 1e-5)
    with pytest.raises(ValueError, match="epsilon"):
        calibrate(lambda z: [plain(z)], 0.0, 1e-5)


@pytest.mark.slow
def test_tiny_noise_is_priced_and_not_out_of_memory() -> None:
    assert epsilon_of([plain(0.05), sampled(0.1, 0.1, 3)], 1e-5) > 100


def test_pure_releases_beyond_any_use_are_added_up() -> None:
    rest: list[Event] = [plain(1.0), sampled(1.0, 0.1, 10)]
    alone = epsilon_of(rest, 1e-5)
    choices: list[Event] = [ChoiceEvent(800.0, "add_remove", "sample"), ChoiceEvent(1e4, "add_remove", "sample")]
    assert epsilon_of(choices, 1e-5) == 10800.0
    assert epsilon_of([*rest, *choices], 1e-5) == pytest.approx(10800.0 + alone)
    assert delta_of([*rest, *choices], 10800.0 + alone) == pytest.approx(1e-5, rel=1e-6)
    assert delta_of(choices, 10799.0) == 1.0
    # where both ways can be taken they agree: all but e^-300 of what a choice loses is its ε
    below, above = (epsilon_of([plain(1.0), ChoiceEvent(each, "add_remove", "sample")], 1e-5) - each for each in (299.0, 301.0))
    assert below == pytest.approx(above, abs=0.05)


@pytest.mark.slow
def test_a_delta_below_what_distributions_hold_is_priced_otherwise_and_not_divided_by() -> None:
    z = calibrate(lambda z: [sampled(z, 0.5, 10)], 2.0, 1e-16)
    assert 1.99 < epsilon_of([sampled(z, 0.5, 10)], 1e-16) <= 2.0
    assert delta_of([sampled(z, 0.5, 10)], 2.0) < 2e-12
    more = calibrate(lambda z: [sampled(z, 0.5, 10, "replace_one")], 2.0, 1e-16)
    assert more > z
    assert 1.99 < epsilon_of([sampled(more, 0.5, 10, "replace_one")], 1e-16) <= 2.0
