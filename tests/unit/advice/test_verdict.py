"""The rule of the advice: moments, simultaneous intervals, and what is advised."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cflpriv.advice.verdict import (
    CLUSTERS,
    CLUSTERS_MIXTURE,
    FEWEST_CLIENTS,
    LOCAL,
    ONE,
    ONE_MIXTURE,
    OPTIONS,
    RANDOM,
    RANDOM_MIXTURE,
    TOLERANCE,
    Moments,
    differences,
    moments_of,
    verdict_of,
    would_use_clusters,
)
from cflpriv.randomness import stream
from cflpriv.tasks.balanced_scores import contribution
from cflpriv.types import Array

DRAWS = stream(0, "test intervals")
NAMES = (LOCAL, ONE, ONE_MIXTURE, CLUSTERS, CLUSTERS_MIXTURE, RANDOM, RANDOM, RANDOM_MIXTURE)


def sums_of(names: tuple[str, ...], accuracies: Array, weights: Array | None = None) -> Moments:
    """The moments of clients' accuracies (clients, options), from the sum that leaves them; without `weights` clients weigh equally."""
    weights = np.ones(len(accuracies)) if weights is None else weights
    sums = [contribution(row[:, None], np.array([weight])) for row, weight in zip(accuracies, weights, strict=True)]
    return moments_of(names, np.mean(sums, axis=0), len(accuracies))


def scores(means: dict[str, float], clients: int = 40, spread: float = 0.02, seed: int = 0) -> Moments:
    """Moments of clients whose accuracies scatter around the means, those of random clusters around one mean in both deals."""
    names = tuple(name for name in NAMES if name in means)
    rng = np.random.default_rng(seed)
    common = 0.1 * rng.standard_normal((clients, 1))  # clients differ more than options do
    return sums_of(names, np.array([means[name] for name in names]) + common + spread * rng.standard_normal((clients, len(names))))


@given(st.integers(2, 30), st.integers(1, 8), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_sums_give_the_means_and_the_covariance_of_the_clients(clients: int, options: int, seed: int) -> None:
    accuracies = np.random.default_rng(seed).random((clients, options))
    moments = sums_of(tuple(map(str, range(options))), accuracies)
    assert np.allclose(moments.means, accuracies.mean(0))
    assert np.allclose(moments.covariance, np.cov(accuracies.T).reshape(options, options))
    assert moments.effective == pytest.approx(clients)
    assert len(contribution(accuracies[0][:, None], np.ones(1))) == (options + 1) + (options + 1) * (options + 2) // 2


@given(st.integers(2, 30), st.integers(1, 5), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_scores_of_clients_of_unequal_weight_are_ratios_of_sums(clients: int, options: int, seed: int) -> None:
    """And their errors those of a ratio: a client's scores less what its weight has at the mean, by the mean weight."""
    rng = np.random.default_rng(seed)
    accuracies, weights = rng.random((clients, options)), rng.uniform(0.1, 4, clients)
    moments = sums_of(tuple(map(str, range(options))), accuracies, weights)
    means = np.average(accuracies, axis=0, weights=weights)
    beyond = weights[:, None] * (accuracies - means) / weights.mean()
    assert np.allclose(moments.means, means)
    assert np.allclose(moments.covariance, beyond.T @ beyond / (clients - 1))
    assert moments.effective == pytest.approx(weights.sum() ** 2 / (weights**2).sum())


def test_an_interval_of_one_pair_is_the_paired_t_interval() -> None:
    accuracies = np.random.default_rng(1).random((25, 2))
    (interval,) = differences(sums_of((LOCAL, ONE), accuracies), [(ONE, LOCAL)], stream(0, "one pair"))
    gains = accuracies[:, 1] - accuracies[:, 0]
    half = 2.0639 * gains.std(ddof=1) / 5  # t with 24 degrees of freedom at 97.5 %
    assert interval.mean == pytest.approx(gains.mean())
    assert interval.high - interval.mean == pytest.approx(half, rel=0.03)


@pytest.mark.slow
def test_all_intervals_together_miss_in_at_most_about_five_of_a_hundred_populations() -> None:
    """No option is better than another in truth, and clients differ: so often some interval is off 0."""
    names, misses = OPTIONS, 0
    pairs = [(b, a) for i, a in enumerate(names) for b in names[i + 1 :]]
    for trial in range(200):
        rng = np.random.default_rng(trial)
        accuracies = 0.7 + 0.1 * rng.standard_normal((20, 1)) + 0.05 * rng.standard_normal((20, len(names)))
        misses += any(interval.clear for interval in differences(sums_of(names, accuracies), pairs, stream(trial, "intervals")))
    assert misses <= 20  # 5 % of 200 are 10; 20 or fewer come with a probability above .998


def test_clusters_are_advised_where_they_are_best_and_random_clusters_are_not() -> None:
    means = {LOCAL: 0.5, ONE: 0.4, ONE_MIXTURE: 0.6, CLUSTERS: 0.8, CLUSTERS_MIXTURE: 0.8, RANDOM: 0.4, RANDOM_MIXTURE: 0.6}
    verdict = verdict_of(scores(means), 1.0, DRAWS)
    assert (verdict.advice, verdict.clear, verdict.reasons) == (CLUSTERS, True, ())
    assert verdict.close == (CLUSTERS_MIXTURE,)


@pytest.mark.parametrize(
    ("change", "stability", "words"),
    [
        ({RANDOM: 0.8}, 1.0, "random clusters of the same sizes may do as well"),
        ({CLUSTERS: 0.63, CLUSTERS_MIXTURE: 0.63, RANDOM: 0.62}, 0.3, "not stable"),
        ({RANDOM: None, RANDOM_MIXTURE: None}, 1.0, "not compared with random clusters"),
    ],
)
def test_clusters_are_not_advised_without_the_control(change: dict[str, float | None], stability: float, words: str) -> None:
    means = {LOCAL: 0.5, ONE: 0.4, ONE_MIXTURE: 0.6, CLUSTERS: 0.8, CLUSTERS_MIXTURE: 0.8, RANDOM: 0.4, RANDOM_MIXTURE: 0.6}
    verdict = verdict_of(scores({name: value for name, value in {**means, **change}.items() if value is not None}), stability, DRAWS)
    assert verdict.advice == ONE_MIXTURE
    assert words in verdict.reasons[0]
    assert not {CLUSTERS, CLUSTERS_MIXTURE} & set(verdict.allowed)


@pytest.mark.parametrize(("stability", "allowed"), [(1.0, True), (None, True), (0.3, False)])
def test_clusters_that_no_other_search_finds_must_help_by_more(stability: float | None, allowed: bool) -> None:
    """By a point, with an interval from less than a point up; by forty points, they are allowed in any case."""
    little = {LOCAL: 0.5, ONE: 0.4, CLUSTERS: 0.63, RANDOM: 0.62}
    assert (CLUSTERS in verdict_of(scores(little), stability, DRAWS).allowed) == allowed
    assert verdict_of(scores({**little, RANDOM: 0.2}), stability, DRAWS).advice == CLUSTERS


def test_the_mixture_with_clusters_has_a_control_of_its_own() -> None:
    means = {LOCAL: 0.5, ONE: 0.4, ONE_MIXTURE: 0.6, CLUSTERS: 0.7, CLUSTERS_MIXTURE: 0.8, RANDOM: 0.4, RANDOM_MIXTURE: 0.85}
    verdict = verdict_of(scores(means), None, DRAWS)
    assert verdict.advice == CLUSTERS
    assert CLUSTERS_MIXTURE not in verdict.allowed


@given(st.lists(st.floats(0.2, 0.9), min_size=3, max_size=3), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_the_advice_is_the_simplest_within_the_tolerance(values: list[float], seed: int) -> None:
    moments = scores(dict(zip(OPTIONS[:3], values, strict=True)), seed=seed)
    verdict = verdict_of(moments, None, stream(seed, "draws"))
    means = dict(zip(moments.names, moments.means, strict=True))
    best, place = max(moments.means), OPTIONS.index(verdict.advice)
    assert best - means[verdict.advice] <= TOLERANCE
    assert all(best - means[simpler] > TOLERANCE for simpler in OPTIONS[:place])


def test_too_few_clients_tell_nothing() -> None:
    verdict = verdict_of(scores({LOCAL: 0.1, ONE: 0.9}, clients=FEWEST_CLIENTS - 1), None, DRAWS)
    assert (verdict.decided, verdict.advice) == (False, LOCAL)


def test_the_control_is_asked_for_only_where_clusters_would_be_advised() -> None:
    assert would_use_clusters(scores({LOCAL: 0.5, ONE: 0.5, ONE_MIXTURE: 0.5, CLUSTERS: 0.8, CLUSTERS_MIXTURE: 0.8}))
    assert not would_use_clusters(scores({LOCAL: 0.8, ONE: 0.5, ONE_MIXTURE: 0.8, CLUSTERS: 0.8, CLUSTERS_MIXTURE: 0.8}, spread=0.001))


def test_the_spread_between_deals_widens_the_interval_of_the_control() -> None:
    names = (CLUSTERS, RANDOM, RANDOM)
    rng = np.random.default_rng(3)
    base = 0.7 + 0.1 * rng.standard_normal((40, 1)) + 0.02 * rng.standard_normal((40, 3))
    widths = []
    for apart in (0.0, 0.1):
        (interval,) = differences(sums_of(names, base + np.array([0.1, -apart, apart])), [(CLUSTERS, RANDOM)], stream(0, "deals"))
        widths.append(interval.high - interval.low)
    assert widths[1] > 3 * widths[0]
