"""Private choice: prices are never below what enumerated choices lose, numbers of runs have their law, what has no price is refused."""

import math
from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from scipy.integrate import trapezoid

from cflpriv.protocols.accounting import covers, delta_of, epsilon_of, epsilon_of_renyi, renyi_of
from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.events import ChoiceEvent, Event, GaussianEvent, Relation, SampledGaussianEvent
from cflpriv.protocols.private_choice import (
    NegativeBinomial,
    Poisson,
    Runs,
    draw_index,
    draw_runs,
    epsilon_by_profile,
    epsilon_of_choice,
    most_runs,
    renyi_of_best,
    runs_of,
)

Floats = NDArray[np.float64]
LAWS: tuple[Runs, ...] = (
    NegativeBinomial(1.0, 0.1), NegativeBinomial(0.0, 0.05), NegativeBinomial(-0.5, 0.3), NegativeBinomial(2.5, 0.6), Poisson(4.0),
    Poisson(0.3),
)  # fmt: skip


def plain(z: float, relation: Relation = "add_remove") -> GaussianEvent:
    return GaussianEvent(z, 1.0, relation, "sample")


def masses(runs: Runs, size: int = 4000) -> Floats:
    """P(K = k) for k = 0 … size."""
    found = np.zeros(size + 1)
    for k, p in islice(runs.probabilities(), size):
        found[k] = p
    return found


# --- the number of runs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", LAWS, ids=str)
def test_probabilities_and_mean_are_those_of_the_law(runs: Runs) -> None:
    p = masses(runs)
    k = np.arange(len(p))
    if isinstance(runs, Poisson):
        expected = stats.poisson.pmf(k, runs.mean)
    elif runs.eta == 0:
        expected = stats.logser.pmf(k, 1 - runs.gamma)
    elif runs.eta > 0:
        expected = stats.nbinom.pmf(k, runs.eta, runs.gamma) / (1 - runs.gamma**runs.eta)
        expected[0] = 0.0
    else:
        expected = p
    np.testing.assert_allclose(p, expected, rtol=1e-9, atol=1e-300)
    assert p.sum() == pytest.approx(1.0, abs=1e-12)
    assert (k * p).sum() == pytest.approx(runs.mean, rel=1e-9)
    if isinstance(runs, NegativeBinomial) and runs.eta == 1:
        np.testing.assert_allclose(p[1:], stats.geom.pmf(k[1:], runs.gamma), rtol=1e-9)
    s = 0.37  # the derivative of the generating function, of which the bounds are made
    derivative = float((k[1:] * p[1:] * (1 - s) ** (k[1:] - 1.0)).sum())
    closed = (
        runs.mean * math.exp(-runs.mean * s)
        if isinstance(runs, Poisson)
        else runs.mean * (runs.gamma / (runs.gamma + (1 - runs.gamma) * s)) ** (1 + runs.eta)
    )
    assert derivative == pytest.approx(closed, rel=1e-9)
    assert p[: most_runs(runs) + 1].sum() >= 0.99 > p[: most_runs(runs)].sum()


@given(st.sampled_from(["geometric", "logarithmic", "poisson"]), st.floats(1.001, 400))
def test_a_law_is_named_and_has_the_mean_that_was_asked_for(name: str, mean: float) -> None:
    assert runs_of(name, mean).mean == pytest.approx(mean, rel=1e-6)  # type: ignore[arg-type]


def test_impossible_laws_are_refused() -> None:
    laws: list[tuple[str, Callable[[], Runs]]] = [
        ("eta: -1", lambda: NegativeBinomial(-1.0, 0.5)), ("gamma: 1", lambda: NegativeBinomial(1.0, 1.0)),
        ("mean: 0", lambda: Poisson(0.0)), ("mean: 501", lambda: Poisson(501.0)), ("mean: 1", lambda: runs_of("geometric", 1.0)),
        ("mean: nan", lambda: runs_of("logarithmic", math.nan)), ("'binomial' is not known", lambda: runs_of("binomial", 3.0)),  # type: ignore[arg-type]
    ]  # fmt: skip
    for words, make in laws:
        with pytest.raises(ValueError, match=words):
            make()


@pytest.mark.parametrize("runs", LAWS, ids=str)
def test_what_is_drawn_has_the_law(runs: Runs) -> None:
    """Chi-square; each would fail for 1 of 10,000 labels of the fixed stream, were it not fixed."""
    entropy, count = public_entropy(f"numbers of runs {runs}"), 4000
    drawn = np.array([draw_runs(runs, entropy) for _ in range(count)])
    p = masses(runs) * count
    cut = int(np.flatnonzero(p[::-1].cumsum()[::-1] >= 10)[-1])  # all above goes into one cell
    low = int(np.flatnonzero(p > 0)[0])
    seen = np.array([*(np.sum(drawn == k) for k in range(low, cut)), np.sum(drawn >= cut)])
    assert seen.sum() == count
    assert stats.chisquare(seen, np.array([*p[low:cut], p[cut:].sum()]) * count / p.sum()).pvalue > 1e-4


def test_indices_are_uniform_and_settings_of_no_grid_are_refused() -> None:
    entropy = public_entropy("settings")
    seen = np.bincount([draw_index(7, entropy) for _ in range(3500)], minlength=7)
    assert stats.chisquare(seen).pvalue > 1e-4
    words = iter([b"\xff" * 8, b"\x05" + bytes(7)])  # the first is beyond the last whole multiple of 7
    assert draw_index(7, lambda count: next(words)) == 5
    with pytest.raises(ValueError, match="size: 0"):
        draw_index(0, entropy)


# --- against enumeration --------------------------------------------------------------------------------------------------------------


def best(runs: Runs, law: Floats, most: int = 1500) -> Floats:
    """The law of the best of K outcomes (the last is the best); where K may be 0, "nothing" comes first."""
    p = masses(runs, most)
    below = np.concatenate([[0.0], np.cumsum(law)])
    k = np.arange(1, len(p))
    powers = (p[1:, None] * below[None, :] ** k[:, None]).sum(axis=0)
    found = np.diff(powers)
    return np.concatenate([[p[0]], found]) if p[0] else found


def renyi(p: Floats, q: Floats, order: float) -> float:
    return float(np.log(np.sum(p**order * q ** (1 - order))) / (order - 1))


def excess(p: Floats, q: Floats, epsilon: float) -> float:
    return float(np.maximum(0.0, p - math.exp(epsilon) * q).sum())


ORDERS = np.array([1.5, 2.0, 3.0, 6.0, 20.0])
laws = st.sampled_from([one for one in LAWS if most_runs(one, 0.999) < 200])
outcomes = st.integers(2, 5).flatmap(
    lambda size: st.tuples(*(st.lists(st.floats(0.01, 1.0), min_size=size, max_size=size) for _ in range(2)))
)


def pair(given: tuple[list[float], list[float]]) -> tuple[Floats, Floats]:
    first, second = (np.array(one) / np.sum(one) for one in given)
    return first, second


@settings(max_examples=150, deadline=None)
@given(laws, outcomes)
def test_renyi_divergences_of_the_best_are_never_above_the_bound(runs: Runs, weights: tuple[list[float], list[float]]) -> None:
    p, q = pair(weights)
    once = np.array([max(renyi(p, q, order), renyi(q, p, order)) for order in ORDERS])
    bound = renyi_of_best(runs, ORDERS, once, lambda epsilon: max(excess(p, q, epsilon), excess(q, p, epsilon)))
    a, b = best(runs, p), best(runs, q)
    for order, most in zip(ORDERS, bound, strict=True):
        assert max(renyi(a, b, order), renyi(b, a, order)) <= most + 1e-9


def exact_epsilon(p: Floats, q: Floats, delta: float) -> float:
    """The least ε at δ, under both orders of the neighbours."""
    low, high = 0.0, 1 + max(np.max(np.abs(np.log(p / q))), 0.0)
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if max(excess(p, q, middle), excess(q, p, middle)) > delta else (low, middle)
    return float(high)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(laws, outcomes, st.floats(1e-6, 0.3))
def test_delta_of_the_best_is_never_above_the_bound(runs: Runs, weights: tuple[list[float], list[float]], delta: float) -> None:
    p, q = pair(weights)
    if isinstance(runs, Poisson):
        return
    epsilon = epsilon_by_profile(runs, delta, lambda delta: exact_epsilon(p, q, delta))
    a, b = best(runs, p), best(runs, q)
    assert max(excess(a, b, epsilon), excess(b, a, epsilon)) <= delta * (1 + 1e-9) + 1e-12


def test_three_times_the_epsilon_of_a_run_is_reached() -> None:
    """An outcome e^ε times as likely as under the neighbour, for which better ones are e^ε times less likely: a choice loses nearly 3 ε."""
    epsilon, top, rare = 0.5, 0.2, 1e-3
    raised = math.exp(epsilon)
    p, q = np.array([0.0, rare * raised, top]), np.array([0.0, rare, top * raised])
    p[0], q[0] = 1 - p.sum(), 1 - q.sum()
    a, b = best(NegativeBinomial(1.0, 0.005), p, 6000), best(NegativeBinomial(1.0, 0.005), q, 6000)
    assert 2.9 * epsilon < math.log(a[1] / b[1]) < 3 * epsilon


def test_what_goes_wrong_rarely_goes_wrong_more_often_in_a_choice() -> None:
    """An outcome that only one neighbour has, the best of all: its probability is multiplied by nearly the number of runs."""
    rare, runs = 1e-3, NegativeBinomial(1.0, 0.1)
    p, q = np.array([1 - rare, rare]), np.array([1 - 1e-9, 1e-9])
    assert exact_epsilon(p, q, 2 * rare) == pytest.approx(0.0, abs=1e-6)
    epsilon = epsilon_by_profile(runs, 2 * rare, lambda delta: exact_epsilon(p, q, delta))
    a, b = best(runs, p), best(runs, q)
    assert excess(a, b, 1.0) > 9 * rare
    assert excess(a, b, epsilon) <= 2 * rare


@pytest.mark.parametrize(("eta", "times"), [(0.0, 2.0), (1.0, 3.0), (-0.5, 1.5)])
def test_pure_runs_cost_what_the_papers_say(eta: float, times: float) -> None:
    """(2 + η) ε: Papernot & Steinke 2022; 3 ε for a geometric number: Liu & Talwar 2019."""
    epsilon, runs = 0.3, NegativeBinomial(eta, 1e-9)
    assert epsilon_by_profile(runs, 1e-5, lambda delta: epsilon) == pytest.approx(times * epsilon, rel=1e-6)
    orders = np.array([1e4, 1e6, 1e9])
    assert renyi_of_best(runs, orders, np.full(3, epsilon), lambda e: 0.0)[-1] == pytest.approx(times * epsilon, rel=1e-4)


@pytest.mark.parametrize("runs", [runs_of("geometric", 10.0), runs_of("logarithmic", 10.0), runs_of("poisson", 10.0)], ids=str)
@pytest.mark.parametrize("z", [1.0, 4.0])
def test_the_largest_of_gaussian_releases_is_as_private_as_the_price_says(runs: Runs, z: float) -> None:
    """The score is the release itself; its δ by an integral."""
    delta, x = 1e-5, np.linspace(-12 * z, 12 * z + 1, 400_001)
    epsilon = epsilon_of_choice([[plain(z)]], delta, runs)

    def density(shift: float) -> Floats:
        s = stats.norm.sf(x, shift, z)
        rise = (
            runs.mean * np.exp(-runs.mean * s)
            if isinstance(runs, Poisson)
            else runs.mean * (runs.gamma / (runs.gamma + (1 - runs.gamma) * s)) ** (1 + runs.eta)
        )
        return np.asarray(stats.norm.pdf(x, shift, z) * rise)

    one, other = density(0.0), density(1.0)
    assert trapezoid(one, x) == pytest.approx(1.0 - (math.exp(-runs.mean) if isinstance(runs, Poisson) else 0.0), abs=1e-6)
    for p, q in ((one, other), (other, one)):
        assert trapezoid(np.maximum(0.0, p - math.exp(epsilon) * q), x) <= delta
    alone = epsilon_of([plain(z)], delta)
    assert alone < epsilon < 4 * alone
    assert epsilon < epsilon_of([plain(z)] * most_runs(runs), delta), "less than all runs together"


# --- the price ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_price_is_that_of_the_dearest_candidate_at_each_order() -> None:
    runs = runs_of("geometric", 5.0)
    cheap, dear = [plain(4.0)], [plain(2.0)]
    assert epsilon_of_choice([cheap, dear], 1e-5, runs) == epsilon_of_choice([dear, cheap, dear], 1e-5, runs)
    assert epsilon_of_choice([cheap, dear], 1e-5, runs) == pytest.approx(epsilon_of_choice([dear], 1e-5, runs))
    mixed: list[list[Event]] = [[plain(2.0)], [SampledGaussianEvent(0.9, 0.05, 60, 1.0, "add_remove")]]
    assert epsilon_of_choice(mixed, 1e-5, runs) >= max(epsilon_of_choice([one], 1e-5, runs) for one in mixed)
    assert epsilon_of_choice([[], []], 1e-5, runs) == 0.0
    more = [epsilon_of_choice([dear], 1e-5, runs_of("geometric", mean)) for mean in (1.5, 3.0, 10.0, 50.0)]
    assert more == sorted(more)
    assert more[0] > epsilon_of(dear, 1e-5)


@pytest.mark.slow
def test_sampled_steps_under_replacement_have_a_price_for_every_number_of_runs() -> None:
    steps = [SampledGaussianEvent(1.5, 0.1, 20, 1.0, "replace_one")]
    alone, exchanged = epsilon_of(steps, 1e-5), epsilon_of_renyi(*renyi_of(steps), 1e-5)
    assert alone <= exchanged < 1.5 * alone
    for name in ("geometric", "poisson"):
        assert alone < epsilon_of_choice([steps], 1e-5, runs_of(name, 5.0)) < 3.5 * alone


def test_choices_within_a_run_are_priced_too() -> None:
    events: list[Event] = [plain(3.0), *[ChoiceEvent(0.1, "add_remove", "sample")] * 10]
    for name in ("geometric", "poisson"):
        assert epsilon_of(events, 1e-5) < epsilon_of_choice([events], 1e-5, runs_of(name, 4.0)) < 4 * epsilon_of(events, 1e-5)


def test_candidates_without_a_common_price_are_refused() -> None:
    runs = runs_of("geometric", 5.0)
    with pytest.raises(ValueError, match="none to choose among"):
        epsilon_of_choice([], 1e-5, runs)
    with pytest.raises(ValueError, match=r"different \(relation, unit\)"):
        epsilon_of_choice([[plain(1.0)], [plain(1.0, "replace_one")]], 1e-5, runs)
    with pytest.raises(ValueError, match="delta"):
        epsilon_of_choice([[plain(1.0)]], 0.0, runs)


def test_what_was_planned_covers_its_parts_and_nothing_else() -> None:
    steps = SampledGaussianEvent(1.0, 0.1, 5, 1.0, "add_remove")
    choice = ChoiceEvent(0.5, "add_remove", "sample")
    plan: list[Event] = [plain(2.0), plain(2.0), steps, steps, choice]
    parts: list[list[Event]] = [
        [], [plain(2.0)], [steps], [choice, steps, plain(2.0)], plan, [plain(math.sqrt(2.0))], [plain(50.0)] * 3,
    ]  # fmt: skip
    for part in parts:
        assert covers(plan, part)
        assert delta_of(part, 1.0) <= delta_of(plan, 1.0)
    more: list[list[Event]] = [
        [plain(2.0)] * 3, [plain(1.4)], [steps] * 3, [choice] * 2, [ChoiceEvent(0.4, "add_remove", "sample")],
        [SampledGaussianEvent(1.0, 0.2, 1, 1.0, "add_remove")], [plain(9.0, "replace_one")],
    ]  # fmt: skip
    assert not any(covers(plan, one) for one in more)
    assert covers([], [])
    assert not covers([], [plain(9.0)])
