"""The canary audit: its bound against brute force, no false alarms beyond the stated share, and a planted bug is caught."""

import math

import numpy as np
import pytest
from scipy import stats

from cflpriv.attacks.dp_audit import AuditResult, audit_second_moment, ceiling, epsilon_lower_bound, guess, p_value
from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.mechanisms import gaussian_multiplier, second_moment

DELTA = 1e-5


def audit(epsilon: float, factor: float, seed: int, dimension: int = 2000, guesses: tuple[int, ...] = (250, 600)) -> AuditResult:
    """One audit of a release that claims ε, with its noise multiplied by `factor`."""
    z = gaussian_multiplier(epsilon, DELTA) * factor
    rng = np.random.default_rng(seed)
    background = rng.normal(size=(20, dimension))
    background /= np.linalg.norm(background, axis=1, keepdims=True)
    source = public_entropy(f"audit {epsilon} {factor} {seed}")
    return audit_second_moment(
        lambda rows: second_moment(rows, z, "add_remove", "sample", source).value, rng, DELTA, dimension=dimension, guesses=guesses,
        background=background,
    )  # fmt: skip


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


def test_guesses_are_made_at_both_ends() -> None:
    scores, coins = np.array([0.1, 5.0, -3.0, 2.0, 0.0]), np.array([True, True, False, False, True])
    assert guess(scores, coins, 2) == 2
    assert guess(scores, coins, 4) == 2


def test_a_randomised_response_at_its_epsilon_raises_no_more_alarms_than_stated() -> None:
    # the worst mechanism that ε allows, so alarms come close to the share: each coin is told right with e^ε/(1+e^ε)
    rng = np.random.default_rng(1)
    epsilon, repeats = 1.0, 2000
    right = rng.binomial(200, 1 / (1 + math.exp(-epsilon)), size=repeats)
    counts, times = np.unique(right, return_counts=True)
    alarms = sum(int(often) for count, often in zip(counts, times, strict=True) if epsilon_lower_bound(int(count), 200, 200, 0.0) > epsilon)
    assert alarms / repeats > 0.02, "the test has power"
    assert stats.binomtest(alarms, repeats, 0.05, alternative="greater").pvalue > 1e-6


def test_sound_noise_raises_alarms_in_no_more_than_the_stated_share() -> None:
    repeats = 60
    bounds = [audit(epsilon, 1.0, seed, 200, (40, 80)).epsilon - epsilon for epsilon in (0.5, 2.0) for seed in range(repeats // 2)]
    alarms = sum(bound > 0 for bound in bounds)
    assert stats.binomtest(alarms, repeats, 0.05, alternative="greater").pvalue > 1e-6


@pytest.mark.parametrize("epsilon", [1.0, 2.0, 4.0])
def test_a_third_of_the_noise_is_caught(epsilon: float) -> None:
    result = audit(epsilon, 1 / 3, 0)
    assert epsilon < result.epsilon <= result.ceiling
    assert audit(epsilon, 1.0, 0).epsilon < epsilon


def test_above_the_ceiling_nothing_is_caught_and_the_ceiling_says_so() -> None:
    result = audit(8.0, 1 / 3, 0, 400, (100,))
    assert result.epsilon == pytest.approx(result.ceiling)
    assert result.ceiling < 8.0


@pytest.mark.slow
def test_shares_of_alarms_over_many_audits() -> None:
    print()
    for epsilon in (0.5, 1.0, 2.0, 4.0):
        sound = [audit(epsilon, 1.0, seed) for seed in range(40)]
        bug = [audit(epsilon, 1 / 3, seed) for seed in range(10)]
        alarms, caught = sum(one.epsilon > epsilon for one in sound), sum(one.epsilon > epsilon for one in bug)
        print(
            f"epsilon {epsilon:g}: alarms {alarms}/40 (allowed share 0.05), largest bound {max(one.epsilon for one in sound):.2f}; "
            f"sigma/3 caught {caught}/10, median bound {np.median([one.epsilon for one in bug]):.2f}, ceiling {bug[0].ceiling:.2f}"
        )
        assert stats.binomtest(alarms, 40, 0.05, alternative="greater").pvalue > 1e-3
        if epsilon >= 1:  # below, one run of this size has too few canaries to tell
            assert caught >= 8
