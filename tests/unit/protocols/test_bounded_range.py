"""Choices are priced by their bounded range: never below what enumerated compositions lose, nearly no more, about half of pure ε."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cflpriv.protocols.accounting import calibrate, delta_of, epsilon_of
from cflpriv.protocols.bounded_range import bounded_range_deltas, bounded_range_kinds
from cflpriv.protocols.events import ChoiceEvent, Event, GaussianEvent, Relation, SampledGaussianEvent
from cflpriv.protocols.mechanisms import argmin_probabilities, gaussian_epsilon

Floats = NDArray[np.float64]
Pair = tuple[Floats, Floats]
Value = Callable[[Floats], Floats]
RELATIONS: tuple[Relation, ...] = ("add_remove", "replace_one")


def neighbours(relation: Relation, epsilon: float, candidates: int, gaps: tuple[float, ...]) -> list[Pair]:
    """The laws of noisy argmin on scores of all `gaps`, and on those scores after the largest moves of their neighbours, both ways."""
    moves = (0.0, 1.0) if relation == "add_remove" else (-1.0, 1.0)
    pairs: dict[bytes, Pair] = {}
    for scores in itertools.product(gaps, repeat=candidates - 1):
        at = np.array([0.0, *scores])
        for move in itertools.product(moves, repeat=candidates):
            p, q = (argmin_probabilities(s, 1.0, epsilon, relation) for s in (at, at + np.array(move)))
            for pair in ((p, q), (q, p)):
                pairs[np.round(np.concatenate(pair), 12).tobytes()] = pair
    return list(pairs.values())


def chosen(pairs: list[Pair], after: Value) -> Value:
    """The adversary takes the pair of laws that is worst for the likelihood ratio u it has reached; `after` is the value from there on."""
    p, q = (np.array(laws) for laws in zip(*pairs, strict=True))
    return lambda u: (p * after(u[..., None, None] * (q / p))).sum(axis=-1).max(axis=-1)


def after_gaussian(z: float, after: Value) -> Value:
    """A Gaussian release: the expectation over its loss, N(1/2z², 1/z²)."""
    x = np.linspace(-9, 9, 601)
    weights = np.exp(-x * x / 2)
    factor = np.exp(-(0.5 / z**2 + x / z))
    return lambda u: after(u[..., None] * factor) @ (weights / weights.sum())


def excess(u: Floats) -> Floats:
    return np.maximum(0.0, 1.0 - u)


def repeated(pairs: list[Pair], rounds: int) -> Value:
    value: Value = excess
    for _ in range(rounds):
        value = chosen(pairs, value)
    return value


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(("candidates", "epsilon", "rounds"), [(2, 0.3, 3), (2, 1.5, 3), (3, 0.7, 2), (4, 1.0, 1)])
def test_no_enumerated_composition_loses_more(relation: Relation, candidates: int, epsilon: float, rounds: int) -> None:
    pairs = neighbours(relation, epsilon, candidates, (-3.0, -1.0, 0.0, 0.5, 2.0, 6.0) if candidates < 4 else (-1.0, 0.0, 2.0))
    value = repeated(pairs, rounds)
    for at in np.linspace(-0.5, 0.95, 9) * epsilon * rounds:
        assert value(np.array([math.exp(at)]))[0] <= bounded_range_deltas(((epsilon, rounds),), np.array([at]))[0] + 1e-14
    bound = delta_of([ChoiceEvent(epsilon, relation, "sample")] * rounds, 0.4 * epsilon * rounds)
    assert value(np.array([math.exp(0.4 * epsilon * rounds)]))[0] <= bound


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("epsilon", [0.2, 1.0, 4.0])
def test_the_price_is_reached_by_choices_between_two(relation: Relation, epsilon: float) -> None:
    """Scores apart by a well chosen gap are the worst case: no accountant of bounded range could charge less."""
    share = np.linspace(0.03, 0.97, 17)
    pairs = neighbours(relation, epsilon, 2, tuple(np.log(share / (1 - share)) / epsilon * (1 if relation == "add_remove" else 2)))
    value = repeated(pairs, 3)
    for at in np.array([0.0, 0.6, 1.5, 2.1]) * epsilon:
        exact = value(np.array([math.exp(at)]))[0]
        assert exact <= bounded_range_deltas(((epsilon, 3),), np.array([at]))[0] <= exact * 1.02 + 1e-12


def test_an_adversary_that_adapts_gains_and_is_covered() -> None:
    """With one gap for all rounds less is lost than with one that follows what was seen."""
    pairs = neighbours("add_remove", 1.0, 2, tuple(np.linspace(-3, 3, 13)))
    u = np.array([math.exp(1.0)])
    fixed = max(float(repeated([pair], 3)(u)[0]) for pair in pairs)
    adaptive = float(repeated(pairs, 3)(u)[0])
    assert fixed * 1.001 < adaptive <= delta_of([ChoiceEvent(1.0, "add_remove", "sample")] * 3, 1.0) < adaptive * 1.03


@pytest.mark.parametrize("z", [0.8, 3.0])
def test_a_gaussian_release_before_between_or_after_choices_is_covered(z: float) -> None:
    pairs = neighbours("add_remove", 0.8, 2, tuple(np.linspace(-3, 3, 9)))
    first, between, last = (
        after_gaussian(z, repeated(pairs, 2)),
        chosen(pairs, after_gaussian(z, chosen(pairs, excess))),
        repeated(pairs, 2),
    )
    after = chosen(pairs, chosen(pairs, after_gaussian(z, excess)))
    events: list[Event] = [GaussianEvent(z, 1.0, "add_remove", "sample"), *[ChoiceEvent(0.8, "add_remove", "sample")] * 2]
    for epsilon in (0.3, 1.0, 2.0):
        u = np.array([math.exp(epsilon)])
        found = [float(value(u)[0]) for value in (first, between, after, last)]
        assert found[0] >= found[1] - 1e-12, "choices last is the worst order"
        assert found[1] >= found[2] - 1e-12
        assert found[0] <= delta_of(events, epsilon) <= found[0] * 1.06


def test_choices_of_several_kinds_are_covered_in_every_order() -> None:
    kinds = {epsilon: neighbours("add_remove", epsilon, 2, tuple(np.linspace(-4, 4, 17))) for epsilon in (0.4, 1.0)}
    for epsilon in (0.0, 0.5, 1.2):
        u, worst = np.array([math.exp(epsilon)]), 0.0
        for order in set(itertools.permutations((0.4, 0.4, 1.0))):
            value: Value = excess
            for each in order:
                value = chosen(kinds[each], value)
            worst = max(worst, float(value(u)[0]))
        assert worst <= bounded_range_deltas(((0.4, 2), (1.0, 1)), np.array([epsilon]))[0] <= worst * 1.03


@settings(max_examples=10, deadline=None)
@given(
    st.floats(0.05, 2), st.lists(st.tuples(st.floats(1, 4), st.integers(1, 6)), min_size=1, max_size=2, unique_by=lambda one: one[0]),
    st.floats(-1, 2),
)  # fmt: skip
def test_the_curve_is_that_of_a_privacy_loss(scale: float, kinds: list[tuple[float, int]], at: float) -> None:
    """Falling and convex in e^ε, at least that of no release, 0 from the sum of all ε on, and no less than with a choice fewer."""
    choices = tuple((scale * times, count) for times, count in kinds)
    total = math.fsum(epsilon * count for epsilon, count in choices)
    grid = np.log(np.linspace(math.exp(at - 0.5), math.exp(at + 0.5), 41))
    deltas = bounded_range_deltas(choices, grid)
    assert (np.diff(deltas) <= 1e-12).all()
    assert (np.diff(deltas, 2) >= -1e-12).all()
    assert (deltas >= np.maximum(0, -np.expm1(grid)) - 1e-12).all()
    assert bounded_range_deltas(choices, np.array([total * 1.1 + 0.1]))[0] < 1e-12
    fewer = tuple((epsilon, count - 1) for epsilon, count in choices if count > 1)
    if len(fewer) == len(choices):
        assert (bounded_range_deltas(fewer, grid) <= deltas + 1e-12).all()


def test_kinds_that_would_take_long_are_priced_as_pure_ones_and_never_dropped() -> None:
    several = ((0.01, 30), (0.5, 20), (0.6, 20), (0.7, 20), (9.0, 1))
    together, apart = bounded_range_kinds(several)
    assert together == ((9.0, 1),)
    assert sorted(together + apart) == list(several)
    assert bounded_range_kinds(((0.5, 20), (0.6, 20), (0.7, 20)))[1] == ((0.5, 20),)
    events = [ChoiceEvent(epsilon, "add_remove", "sample") for epsilon, count in ((0.3, 20), (0.01, 5)) for _ in range(count)]
    alone = epsilon_of(events[:20], 1e-5)
    assert alone < epsilon_of(events, 1e-5) <= alone + 0.03


@pytest.mark.parametrize(("rounds", "gain"), [(10, 1.70), (20, 1.90), (50, 1.93)])
def test_choices_take_nearly_twice_the_epsilon_of_pure_ones(rounds: int, gain: float) -> None:
    from dp_accounting.pld.common import DifferentialPrivacyParameters
    from dp_accounting.pld.privacy_loss_distribution import from_privacy_parameters

    def pure(epsilon: float) -> float:
        one = from_privacy_parameters(DifferentialPrivacyParameters(epsilon, 0.0), value_discretization_interval=1e-4)
        return float(one.self_compose(rounds).get_epsilon_for_delta(1e-5))

    low, high = 0.0, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if pure(middle) <= 1.0 else (low, middle)
    choice = 1 / calibrate(lambda z: [ChoiceEvent(1 / z, "add_remove", "sample")] * rounds, 1.0, 1e-5)
    assert 0.99 * gain < choice / low < 1.03 * gain


@pytest.mark.parametrize("relation", RELATIONS)
def test_renyi_accounting_and_the_composition_agree_as_bounds(relation: Relation) -> None:
    events: list[Event] = [ChoiceEvent(0.1, relation, "sample")] * 30
    assert epsilon_of(events, 1e-5) < epsilon_of(events, 1e-5, "rdp") < 1.25 * epsilon_of(events, 1e-5)
    with_steps = [*events, GaussianEvent(2.0, 1.0, relation, "sample")]
    assert epsilon_of(with_steps, 1e-5) < epsilon_of(with_steps, 1e-5, "rdp")
    # ε²/8-concentrated is what a Gaussian release of noise 2/ε is, and bounded range does not exceed it by much
    assert epsilon_of(events, 1e-5) < gaussian_epsilon(2 / 0.1 / math.sqrt(30), 1e-5) * 1.01


def test_more_choices_cost_more_and_one_costs_its_epsilon_at_most() -> None:
    steps: list[Event] = [SampledGaussianEvent(1.0, 0.05, 40, 1.0, "add_remove")]
    for rest in ([], steps):
        prices = [epsilon_of([*rest, *[ChoiceEvent(0.2, "add_remove", "sample")] * count], 1e-5) for count in (1, 2, 5, 20, 60)]
        assert prices == sorted(prices)
    assert 0.19 < epsilon_of([ChoiceEvent(0.2, "add_remove", "sample")], 1e-5) <= 0.2
    assert epsilon_of([ChoiceEvent(0.2, "add_remove", "sample")] * 3, 1e-10) <= 0.2 + 0.2 + 0.2


@pytest.mark.parametrize("choices", [((0.0, 1),), ((math.inf, 1),), ((0.5, 0),)])
def test_impossible_choices_are_refused(choices: tuple[tuple[float, int], ...]) -> None:
    with pytest.raises(ValueError, match="choices: "):
        bounded_range_deltas(choices, np.zeros(1))
