"""The bound of the canary audit against brute force, its power, and sequences of alarms."""

import math
from dataclasses import replace

import numpy as np
import pytest
from dp_games import ALLOWED, DELTA, FALSE, MISSED, TOO_MANY, alarms_are_too_many
from scipy import stats

from cflpriv.attacks.dp.dp_audit import (
    ENOUGH,
    AuditResult,
    Power,
    audit_claim,
    audit_guesses,
    audit_power,
    ceiling,
    epsilon_lower_bound,
    guess,
    numbers_of_guesses,
    p_value,
    verdict,
)
from cflpriv.attacks.dp.dp_claims import NoiseClaim
from cflpriv.protocols.events import ChoiceEvent
from cflpriv.types import Array


def test_a_pure_bound_is_that_of_independent_coins() -> None:
    # δ = 0: the p value is the binomial tail; here by simulation of randomised responses
    rng = np.random.default_rng(0)
    for epsilon in (0.5, 2.0):
        right = rng.binomial(50, 1 / (1 + math.exp(-epsilon)), size=200_000)
        for correct in (30, 40, 46):
            assert p_value(correct, 50, 100, epsilon, 0.0) == pytest.approx(float((right >= correct).mean()), abs=4e-3)


def test_delta_adds_what_the_theorem_says() -> None:
    law = stats.binom(20, 1 / (1 + math.exp(-1.0)))
    slow = max((law.sf(18 - i - 1) - law.sf(18 - 1)) / i for i in range(1, 19))
    assert p_value(18, 20, 40, 1.0, 1e-3) == pytest.approx(float(law.sf(17) + 2 * 40 * 1e-3 * slow))


def test_a_bound_is_just_refuted_and_never_above_its_ceiling() -> None:
    bound = epsilon_lower_bound(90, 100, 300, DELTA, 0.95)
    assert p_value(90, 100, 300, bound, DELTA) <= 0.05 < p_value(90, 100, 300, bound + 2e-3, DELTA)
    assert bound < epsilon_lower_bound(95, 100, 300, DELTA, 0.95) < ceiling(100, 300, DELTA, 0.95)
    assert epsilon_lower_bound(50, 100, 300, DELTA, 0.95) == 0.0
    with pytest.raises(ValueError, match="audit"):
        epsilon_lower_bound(5, 4, 10, DELTA)


def test_the_surest_are_guessed_by_their_sign() -> None:
    scores, coins = np.array([0.1, 5.0, -3.0, 2.0, 0.0]), np.array([True, True, False, False, True])
    assert guess(scores, coins, 2) == 2
    assert guess(scores, coins, 4) == 3
    with pytest.raises(ValueError, match="coins"):
        audit_guesses(scores, coins[:4], DELTA)


def test_so_many_guesses_that_a_bound_can_exceed_the_claim() -> None:
    for claim in (0.5, 2.0, 4.0):
        assert ceiling(max(numbers_of_guesses(10_000, claim, DELTA)), 10_000, DELTA, 0.975) > claim
    assert numbers_of_guesses(20, 8.0, DELTA) == (20,)


def test_a_randomised_response_at_its_epsilon_raises_no_more_alarms_than_stated() -> None:
    # the worst mechanism that ε allows, so alarms come close to the share: each coin is told right with e^ε/(1+e^ε)
    rng = np.random.default_rng(1)
    epsilon, repeats = 1.0, 2000
    right = rng.binomial(200, 1 / (1 + math.exp(-epsilon)), size=repeats)
    counts, times = np.unique(right, return_counts=True)
    alarms = sum(int(often) for count, often in zip(counts, times, strict=True) if epsilon_lower_bound(int(count), 200, 200, 0.0) > epsilon)
    assert alarms / repeats > 0.02, "the test has power"
    assert stats.binomtest(alarms, repeats, 0.05, alternative="greater").pvalue > 1e-6


# --- power ----------------------------------------------------------------------------------------------------------------------------


def test_the_verdict_takes_bound_claim_and_the_conservative_power() -> None:
    result = AuditResult(1000, 100, 90, 1.5, 4.0)
    assert verdict(result, 1.0) == "leaks"
    assert verdict(result, 2.0) == "inconclusive", "no power is known"
    for alarms, status in ((100, "at_baseline"), (96, "at_baseline"), (95, "inconclusive"), (0, "inconclusive")):
        found = Power(alarms, 100)
        assert (found.low >= ENOUGH) == (status == "at_baseline")
        assert verdict(replace(result, power=found), 2.0) == status
        assert verdict(replace(result, power=found), 1.0) == "leaks"
    assert verdict(replace(result, power=Power(0, 0, "unknown where clients train with Adam")), 2.0) == "inconclusive"


def test_the_power_is_at_most_in_one_of_twenty_below_its_conservative_figure() -> None:
    rng = np.random.default_rng(0)
    alarms = rng.binomial(100, ENOUGH, size=2000)
    assert np.mean([Power(int(one), 100).low > ENOUGH for one in alarms]) <= 0.05
    assert Power(7, 10).share == 0.7


@pytest.mark.parametrize("epsilon", [0.3, 0.8, 1.2])
def test_power_counts_the_audits_that_exceed_the_claim(epsilon: float) -> None:
    # randomised responses of ε = 1.5 against claims about it: the same number of alarms as audits made one by one
    claim = NoiseClaim((ChoiceEvent(epsilon, "add_remove", "sample"),), DELTA)

    def draw(rng: np.random.Generator) -> tuple[Array, Array]:
        coins = rng.random(300) < 0.5
        right = rng.random(300) < 1 / (1 + math.exp(-1.5))
        return np.where(right == coins, 1.0, -1.0) * (1 + rng.random(300)), coins

    rngs = [np.random.default_rng(0) for _ in range(2)]
    found = audit_power(lambda: draw(rngs[0]), claim, repetitions=40)
    alarms = sum(audit_claim(*draw(rngs[1]), claim).epsilon > claim.epsilon for _ in range(40))
    assert (found.alarms, found.repetitions) == (alarms, 40)


@pytest.mark.parametrize(("chance", "low", "high"), [(ALLOWED, 0.0, FALSE), (TOO_MANY, 1 - MISSED, 1.0)])
def test_a_sequence_of_alarms_is_judged_at_the_rates_stated(chance: float, low: float, high: float) -> None:
    # exact: the chance of every count of alarms so far, as long as neither bound is reached; what is left after 2,000 audits is < 1e-9
    going, rejected = {0: 1.0}, 0.0
    for audits in range(1, 2000):
        came = dict[int, float]()
        for count, share in going.items():
            for more, part in ((0, 1 - chance), (1, chance)):
                came[count + more] = came.get(count + more, 0.0) + share * part
        ratios = {
            count: count * math.log(TOO_MANY / ALLOWED) + (audits - count) * math.log((1 - TOO_MANY) / (1 - ALLOWED)) for count in came
        }
        rejected += sum(share for count, share in came.items() if ratios[count] >= -math.log(FALSE))
        going = {count: share for count, share in came.items() if math.log(MISSED) < ratios[count] < -math.log(FALSE)}
    assert sum(going.values()) < 1e-9
    assert low <= rejected <= high
    assert alarms_are_too_many([True] * 6)
    assert not alarms_are_too_many([False] * 33)
    with pytest.raises(ValueError, match="ended"):
        alarms_are_too_many([False] * 32)
