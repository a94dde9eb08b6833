"""The test of the claimed mechanism: exact trade-off functions, exact tails, tight bounds, and no more false alarms than stated."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from dp_games import DELTA
from scipy import stats

from benchmarks.dp_audits import claimed, false_or_found, ratios
from cflpriv.attacks.dp.dp_audit import CONFIDENCE, FAULT, audit_claim, audit_p_value, is_refuted
from cflpriv.attacks.dp.dp_claims import (
    STEPS,
    AreaCounts,
    NoiseClaim,
    ThresholdCounts,
    claim_of_clients,
    claim_p_value,
    counts_of,
    epsilon_refuted,
    scaled,
)
from cflpriv.protocols.accounting import epsilon_of
from cflpriv.protocols.events import ChoiceEvent, GaussianEvent, Relation, SampledGaussianEvent
from cflpriv.types import Array

RATES = np.array([1e-4, 0.01, 0.1, 0.3, 0.5, 0.9])


def gaussian(multiplier: float) -> GaussianEvent:
    return GaussianEvent(multiplier, 1.0, "add_remove", "sample")


def told_apart(claim: NoiseClaim, canaries: int, seed: int, share: float = 1.0) -> tuple[Array, Array]:
    """Scores and coins of a Gaussian release with this share of the noise."""
    rng = np.random.default_rng(seed)
    coins = rng.random(canaries) < 0.5
    (event,) = claim.events
    assert isinstance(event, GaussianEvent)
    return coins - 0.5 + share * event.noise_multiplier * rng.normal(size=canaries), coins


@pytest.mark.parametrize("multiplier", [0.3, 1.0, 4.0, 30.0])
def test_the_trade_off_of_gaussian_releases_is_that_of_two_normal_laws(multiplier: float) -> None:
    exact = stats.norm.cdf(stats.norm.ppf(RATES) + 2 / multiplier)
    for events in ((gaussian(multiplier / 2),), (gaussian(multiplier),) * 4):
        ours = NoiseClaim(events, DELTA).power_at(RATES)
        assert (ours >= exact - 1e-9).all(), "never below: the test would err"
        assert ours == pytest.approx(exact, abs=2e-3)
    assert NoiseClaim((gaussian(multiplier),), DELTA).power_at(RATES, 0.5) == pytest.approx(exact, abs=2e-3)


def test_the_trade_off_of_a_choice_covers_randomised_response_and_no_more_at_its_corner() -> None:
    # two options with odds e^(ε/2) each way: the corner is where errors of both kinds are as frequent
    claim = NoiseClaim((ChoiceEvent(3.0, "add_remove", "sample"),), DELTA)
    wrong = 1 / (1 + math.exp(1.5))
    assert claim.power_at(np.array([wrong]))[0] == pytest.approx(1 - wrong, abs=2e-3)
    assert claim.equal_error == pytest.approx(wrong, abs=2e-3)


def test_sampled_steps_are_bounded_by_what_all_their_batches_would_show() -> None:
    event = SampledGaussianEvent(2.0, 0.2, 10, 1.0, "add_remove")
    ours = NoiseClaim((event,), DELTA).power_at(RATES)
    times, steps = np.arange(11), stats.binom(10, 0.2)
    of_sum = [float(steps.pmf(times) @ stats.norm.sf(stats.norm.isf(rate) - times / (2.0 * math.sqrt(10)))) for rate in RATES]
    everybody = stats.norm.cdf(stats.norm.ppf(RATES) + math.sqrt(10) / 2)
    assert (ours >= np.array(of_sum)).all()
    assert (ours <= everybody).all()
    summed = NoiseClaim((event,), DELTA, summed=True).power_at(RATES)
    assert (summed >= np.array(of_sum)).all(), "never below: the test would err"
    assert summed == pytest.approx(np.array(of_sum), abs=1e-3)


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_sums_over_steps_show_as_much_as_their_laws(relation: Relation) -> None:
    # by simulation, for thresholds that either class sets
    event, rng = SampledGaussianEvent(1.0, 0.3, 5, 1.0, relation), np.random.default_rng(0)
    claim = NoiseClaim((event,), DELTA, summed=True)
    times, noise = rng.binomial(5, 0.3, size=(2, 200_000)), math.sqrt(5) * rng.normal(size=(2, 200_000))
    inside, out = times[0] + noise[0], noise[1] - (times[1] if relation == "replace_one" else 0)
    for rate in (0.05, 0.3):
        shares = [(inside > np.quantile(out, 1 - rate)).mean(), (out < np.quantile(inside, rate)).mean()]
        ours = [claim.power_at(np.array([rate]), out=which)[0] for which in (True, False)]
        assert ours == pytest.approx(shares, abs=8e-3)
        assert (NoiseClaim((event,), DELTA).power_at(np.array([rate]))[0] > np.array(ours) - 1e-3).all(), "steps one by one show no less"


def test_the_tail_is_that_of_ranks_under_the_law_that_reveals_most() -> None:
    # by simulation: how often so many of 40 are above the third of 30, at the trade-off function itself
    claim, rng = NoiseClaim((gaussian(0.8),), DELTA), np.random.default_rng(0)
    out, inside = rng.normal(size=(100_000, 30)), rng.normal(size=(100_000, 40)) + 1 / 0.8
    beyond = (inside > np.sort(out, axis=1)[:, -3:-2]).sum(axis=1)
    for count in (20, 28, 34):
        p = ThresholdCounts(3, 30, 40, count, True, 1.0).p_value(claim, 1.0)
        assert p == pytest.approx(float((beyond >= count).mean()), abs=6e-3)


def test_the_area_is_that_of_ranks_under_the_law_that_reveals_most() -> None:
    # by simulation: how often 40 scores have so large a sum of counts beyond the 5th, 15th and 25th of 30, at the trade-off function itself
    claim, rng = NoiseClaim((gaussian(0.8),), DELTA), np.random.default_rng(0)
    out, inside = np.sort(rng.normal(size=(50_000, 30)), axis=1), rng.normal(size=(50_000, 40)) + 1 / 0.8
    summed = sum((inside > out[:, [-rank]]).sum(axis=1) for rank in (5, 15, 25))
    for count in np.quantile(summed, [0.5, 0.8, 0.95]):
        p = AreaCounts((5, 15, 25), 30, 40, int(count), 1.0).p_value(claim, 1.0)
        assert p == pytest.approx(float((summed >= int(count)).mean()), abs=0.06)  # 999 draws: four deviations


def test_the_area_is_asked_of_scores_of_many_values_alone() -> None:
    rng = np.random.default_rng(0)
    coins = rng.random(400) < 0.5
    choice = NoiseClaim((ChoiceEvent(3.0, "add_remove", "sample"),), DELTA)
    for claim, tests in ((choice, 3), (NoiseClaim((gaussian(1.0),), DELTA), 4)):
        counts = counts_of(rng.normal(size=400), coins, claim)
        assert len(counts) == tests
        assert sum(count.error for count in counts) == pytest.approx(1.0)


@pytest.mark.parametrize("inside", [1, 5, 6, 17, 40])
@pytest.mark.parametrize("out", [1, 6, 30])
def test_few_canaries_are_counted_too(out: int, inside: int) -> None:
    """Also where there are fewer scores than thresholds; scores that tell all canaries apart are beyond each of them."""
    counts = counts_of(np.arange(float(out + inside)), np.arange(out + inside) >= out, NoiseClaim((gaussian(1.0),), DELTA))
    area = counts[-1]
    assert isinstance(area, AreaCounts)
    assert list(area.ranks) == sorted(set(area.ranks))
    assert 1 <= area.ranks[0] <= area.ranks[-1] <= out
    assert area == area.best
    assert 0 < area.p_value(NoiseClaim((gaussian(1.0),), DELTA), 1.0) <= 1


def test_equal_scores_show_nothing_and_coins_alone_neither() -> None:
    claim = NoiseClaim((gaussian(1.0),), DELTA)
    coins = np.random.default_rng(0).random(4000) < 0.5
    assert audit_claim(np.zeros(4000), coins, claim).epsilon == 0.0
    assert counts_of(np.zeros(5), np.ones(5, bool), claim) == ()
    assert audit_claim(np.arange(5.0), np.ones(5, bool), claim).epsilon == 0.0
    assert claim_p_value((), claim) == 1.0


def test_a_bound_is_the_price_of_the_least_noise_that_is_refuted() -> None:
    claim = claimed("mean", 4.0)
    scores, coins = told_apart(claim, 4000, 0)
    counts = counts_of(scores, coins, claim)
    bound = epsilon_refuted(counts, claim, 0.05)
    steps = np.arange(-STEPS // 4, STEPS // 2)
    least = next(step for step in steps if claim.epsilon_at(2 ** ((step + 0.5) / STEPS)) <= bound * (1 + 1e-9))
    assert bound == pytest.approx(claim.epsilon_at(2 ** ((least + 0.5) / STEPS)))
    around = [least - 40, least - 10, least - 1, least, least + 1, least + 10, least + 40]
    refuted = [claim_p_value(counts, claim, 2 ** ((step + 0.5) / STEPS)) <= 0.05 for step in around]
    assert refuted == [False] * 3 + [True] * 4, "more noise would show less"
    assert claim.epsilon_at(0.5) == epsilon_of(scaled(claim.events, 0.5), DELTA)


@pytest.mark.parametrize("share", [1.0, FAULT, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.9, 0.8))])
def test_a_bound_is_above_the_claim_exactly_where_p_is_small(share: float) -> None:
    claim = claimed("mean", 2.0)
    for seed in range(4):
        scores, coins = told_apart(claim, 2000, seed, share)
        result = audit_claim(scores, coins, claim)
        assert (result.epsilon > claim.epsilon) == (result.p <= 1 - CONFIDENCE)
        assert result.p == audit_p_value(scores, coins, claim)
        assert is_refuted(scores, coins, claim) == (result.p <= 1 - CONFIDENCE)
        assert result.of_claim is not None
        assert result.epsilon == max(result.of_claim, result.of_guesses) <= result.ceiling


@pytest.mark.parametrize(
    ("epsilon", "least"), [*(pytest.param(*case, marks=pytest.mark.slow) for case in [(1.0, 0.6), (2.0, 0.8), (4.0, 0.85)]), (8.0, 0.9)]
)
def test_bounds_of_sound_noise_come_near_their_claims(epsilon: float, least: float) -> None:
    # error rate: means of ten bounds, which scatter by at most .08 each, lie .05 to .2 above; these draws are fixed
    both, guessed = ratios("mean", epsilon, 10, 0)
    assert np.mean(both) >= least
    assert np.mean(guessed) < 0.6, "what the test of any mechanism shows"


@pytest.mark.parametrize("epsilon", [4.0, 8.0])
def test_noise_of_seven_tenths_is_found_with_a_quarter_of_the_canaries(epsilon: float) -> None:
    # error rate: of 200 audits 200 found it, so at least 98.5 % do; these draws are fixed
    assert false_or_found("mean", epsilon, FAULT, 40, 1) >= 36


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mean", "training", "choice"])
def test_sound_noise_is_above_its_claim_as_seldom_as_stated(name: str) -> None:
    # error rate: 40 alarms of 1,000 at a rate of .025 come once in 300; these draws are fixed
    alarms = sum(false_or_found(name, epsilon, 1.0, 250, 2) for epsilon in (1.0, 2.0, 4.0, 8.0))
    assert alarms < 40


@pytest.mark.parametrize(
    "spoiled", [lambda x, rng: np.where(rng.random(len(x)) < 0.05, 10 * np.sign(x), x), lambda x, rng: x * np.exp(rng.normal(size=len(x)))]
)
def test_scores_of_any_shape_are_judged_alike(spoiled: Callable[[Array, np.random.Generator], Array]) -> None:
    # error rate: 9 alarms of 100 at .025 come once in 1,000; these draws are fixed. Whatever is done to scores afterwards shows no more
    claim, alarms = claimed("mean", 2.0), 0
    for seed in range(100):
        scores, coins = told_apart(claim, 1000, seed)
        noise = np.random.default_rng(1000 + seed)
        alarms += audit_p_value(spoiled(scores, noise), coins, claim) <= 1 - CONFIDENCE
    assert alarms < 9


def test_clients_that_were_charged_differently_are_covered_by_all_largest_counts() -> None:
    first, second = gaussian(4.0), gaussian(6.0)
    claim = claim_of_clients([(first, first), (first, second), (first,)], DELTA)
    assert claim.events == (first, first)
    assert sorted(claim.covering, key=lambda event: event.noise_multiplier) == [first, first, second]  # type: ignore[union-attr]
    assert claim_of_clients([(first, second), (second, first), (first,)], DELTA).covering == ()
    assert (claim.power_at(RATES) >= NoiseClaim((first, second), DELTA).power_at(RATES) - 1e-9).all()
    assert claim_of_clients([], DELTA).epsilon == 0.0
