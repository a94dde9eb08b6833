"""Mechanisms: worst-case neighbours are searched for, clipping is checked in exact arithmetic, noise against its law.

Statistical tests reject at p < 1e-6 each, on fixed public entropy: they give one and the same answer every time, and a correct mechanism
would have failed one of them with probability below 1e-5 when they were written.
"""

import math
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from scipy import stats
from scipy.integrate import trapezoid

from cflpriv.protocols import mechanisms as m
from cflpriv.protocols.entropy import Entropy, public_entropy
from cflpriv.protocols.events import GaussianEvent, Relation
from cflpriv.protocols.shared_noise import SharedNoise

Array = NDArray[np.float64]
RELATIONS: tuple[Relation, ...] = ("add_remove", "replace_one")
ALPHA = 1e-6
TINY = 1e-9
"""A noise so small that, drawn alike for two data sets, it leaves the difference of the queries to be seen."""


# --- clipping -------------------------------------------------------------------------------------------------------------------------


@example(np.array([5.22443768e161]), 1.0000000000000001e-150)  # the quotient of the two is not a normal number
@settings(max_examples=200, deadline=None)
@given(
    hnp.arrays(np.float64, st.integers(1, 40), elements=st.floats(-1e300, 1e300, allow_subnormal=True)),
    st.floats(1e-150, 1e150),
)
def test_a_clipped_vector_keeps_the_bound_in_exact_arithmetic(vector: Array, norm: float) -> None:
    clipped = m.clip(vector, norm)
    square = sum((Fraction(float(x)) ** 2 for x in clipped), Fraction(0))
    limit = Fraction(norm) * (1 + Fraction(m.CLIP_SLACK))
    assert square <= limit * limit
    if sum((Fraction(float(x)) ** 2 for x in vector), Fraction(0)) <= (Fraction(norm) * (1 - Fraction(m.CLIP_SLACK))) ** 2:
        assert np.array_equal(clipped, vector)


def test_the_slack_holds_for_a_million_coordinates() -> None:
    rng = np.random.default_rng(0)
    for vector in (rng.normal(size=10**6), np.full(10**6, 0.1), 10.0 ** rng.uniform(-20, 5, 10**6)):
        clipped = m.clip(vector, 0.7)
        assert 0.7 * (1 - m.CLIP_SLACK) <= math.sqrt(math.fsum(clipped * clipped)) <= 0.7 * (1 + m.CLIP_SLACK)


@pytest.mark.parametrize("norm", [0.0, -1.0, math.inf, math.nan])
def test_a_norm_that_bounds_nothing_is_refused(norm: float) -> None:
    with pytest.raises(ValueError, match="clip_norm"):
        m.clip(np.ones(3), norm)


def test_values_that_no_norm_bounds_are_refused() -> None:
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="finite"):
            m.clip(np.array([1.0, bad]), 1.0)


# --- sensitivity: the worst neighbours there are ----------------------------------------------------------------------------------------


def neighbours(rng: np.random.Generator, relation: Relation, d: int, tries: int) -> Iterator[tuple[Array, Array]]:
    """Pairs of data sets: random ones, and those that a clipped sum or second moment feels most."""
    for i in range(tries):
        base = rng.normal(size=(int(rng.integers(0, 5)), d)) * 10.0 ** rng.uniform(-2, 2)
        one = rng.normal(size=d) * 10.0 ** rng.uniform(-2, 4)
        other = [-one, np.roll(one, 1), rng.normal(size=d), np.zeros(d), one * 1e3, -one * 1e-3][i % 6]
        if i % 4 == 3:  # orthogonal, which is the worst for second moments
            other = rng.normal(size=d) * 100
            other -= one * (other @ one) / (one @ one)
        if relation == "add_remove":
            yield base, np.vstack([base, one])
        else:
            yield np.vstack([base, one]), np.vstack([base, other])


Query = Callable[[Array, float, Relation], m.Noised[Array]]
QUERIES: dict[str, Query] = {
    "sum": lambda rows, z, relation: m.gaussian_sum(rows, 1.5, z, relation, "sample", public_entropy("same")),
    "second moment": lambda rows, z, relation: m.second_moment(rows, z, relation, "sample", public_entropy("same")),
}


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("name", QUERIES)
def test_no_neighbours_are_further_apart_than_the_event_says(name: str, relation: Relation) -> None:
    rng = np.random.default_rng(1)
    furthest, sensitivity = 0.0, 0.0
    for before, after in neighbours(rng, relation, 6, 600):
        one, other = (QUERIES[name](rows, TINY, relation) for rows in (before, after))
        assert isinstance(one.event, GaussianEvent)
        sensitivity = one.event.sensitivity
        furthest = max(furthest, float(np.linalg.norm(one.value - other.value)))
    assert furthest <= sensitivity * (1 + 1e-7)
    assert furthest >= sensitivity * 0.999, "the search finds the worst case, so a smaller claim would have been caught"


@pytest.mark.parametrize("relation", RELATIONS)
def test_no_neighbours_change_a_noisy_choice_by_more_than_its_epsilon(relation: Relation) -> None:
    rng = np.random.default_rng(2)
    epsilon, cap, worst = 0.8, 3.0, 0.0
    for i in range(4000):
        k = int(rng.integers(2, 6))
        scores = rng.uniform(0, 40, k) * 10.0 ** rng.uniform(-2, 1)
        terms = [rng.uniform(0, cap, k) if i % 2 else cap * rng.integers(0, 2, k) for _ in range(2)]
        after = scores + terms[0]
        before = scores if relation == "add_remove" else scores + terms[1]
        p, q = (m.argmin_probabilities(s, cap, epsilon, relation) for s in (before, after))
        worst = max(worst, float(np.abs(np.log(p) - np.log(q)).max()))
    assert 0.95 * epsilon < worst <= epsilon * (1 + 1e-9)


# --- the noise against its law ------------------------------------------------------------------------------------------------------


def chi_square(counts: Array, expected: Array) -> float:
    """The p value, with cells of expectation below 10 put together."""
    rare = expected < 10
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 10:
        counts[-2], expected[-2] = counts[-2] + counts[-1], expected[-2] + expected[-1]
        counts, expected = counts[:-1], expected[:-1]
    return float(stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue)


@pytest.mark.parametrize("value", [0.0, 0.123456, -51.7])
def test_gaussian_noise_has_its_law_on_its_grid(value: float) -> None:
    count, sigma = 200_000, 0.75
    noisy = m.gaussian(np.full(count, value), 0.5, 1.5, "add_remove", "sample", public_entropy("gaussian")).value
    step = 2.0 ** math.floor(math.log2(sigma / 8))
    assert sigma / 16 < step <= sigma / 8
    cells = noisy / step
    assert np.array_equal(cells, np.rint(cells)), "every value is on the public grid, whatever the secret one was"
    low, high = int(cells.min()), int(cells.max())
    edges = (np.arange(low, high + 2) - 0.5) * step
    expected = count * np.diff(stats.norm.cdf(edges, value, sigma))
    counts = np.bincount((cells - low).astype(int), minlength=high - low + 1).astype(float)
    assert chi_square(counts, expected) > ALPHA


def test_the_law_test_would_notice_a_slightly_smaller_noise() -> None:
    count, sigma = 200_000, 0.75
    noisy = m.gaussian(np.zeros(count), 0.5, 1.5 * 0.98, "add_remove", "sample", public_entropy("gaussian")).value
    assert stats.chi2(count).cdf(float(np.square(noisy / sigma).sum())) < ALPHA


def test_noise_of_a_second_moment_is_a_gaussian_orthogonal_ensemble() -> None:
    d, z, repeats = 12, 2.0, 2000
    sigma = z * math.sqrt(2)
    noise = np.stack(
        [m.second_moment(np.zeros((1, d)), z, "replace_one", "sample", public_entropy(f"goe {i}")).value for i in range(repeats)]
    )
    assert np.array_equal(noise, noise.transpose(0, 2, 1))
    upper = np.triu_indices(d, 1)
    for values, scale in ((noise[:, range(d), range(d)], sigma), (noise[:, upper[0], upper[1]], sigma / math.sqrt(2))):
        total = float(np.square(values / scale).sum())
        # the grid adds step²/12 ≤ σ²/768
        assert stats.chi2(values.size).sf(total / (1 + 1 / 768)) > ALPHA
        assert stats.chi2(values.size).cdf(total) > ALPHA
    correlations = np.atleast_2d(np.corrcoef(noise.reshape(repeats, -1)[:, np.ravel_multi_index(np.triu_indices(d), (d, d))].T))
    off = correlations[np.triu_indices(len(correlations), 1)]
    assert np.abs(off).max() < stats.norm.isf(ALPHA / 2 / len(off)) / math.sqrt(repeats)


@pytest.mark.slow
def test_choices_have_their_probabilities() -> None:
    entropy = public_entropy("choices")
    count = 20_000
    scores = np.array([3.0, 1.0, 2.0, 9.0])
    drawn = [m.noisy_argmin(scores, 2.0, 1.5, "add_remove", "sample", entropy).value for _ in range(count)]
    expected = count * m.argmin_probabilities(scores, 2.0, 1.5, "add_remove")
    assert chi_square(np.bincount(drawn, minlength=4).astype(float), expected) > ALPHA
    gumbel = (scores * 1.5 / 2.0)[:, None] - np.random.default_rng(5).gumbel(size=(4, count))
    assert chi_square(np.bincount(gumbel.argmin(axis=0), minlength=4).astype(float), expected) > ALPHA, "the law of a noisy argmin"


def test_noise_is_fresh_with_every_call_and_never_of_numpy() -> None:
    """All of it comes from the given source: the same source gives the same noise whatever numpy's state, and a source gives none twice."""
    draws: dict[str, Callable[[Entropy], Array]] = {
        "gaussian": lambda source: m.gaussian(np.zeros(20), 1.0, 1.0, "add_remove", "sample", source).value,
        "second moment": lambda source: m.second_moment(np.zeros((1, 6)), 1.0, "add_remove", "sample", source).value,
        "share": lambda source: SharedNoise(1.0, 2).noisy(np.ones(16), 1000, source).astype(float),
        "argmin": lambda source: np.array([m.noisy_argmin(np.zeros(9), 1.0, 0.1, "add_remove", "sample", source).value for _ in range(20)]),
    }
    for name, draw in draws.items():
        source = public_entropy("a")
        np.random.seed(0)  # noqa: NPY002
        one, next_ = draw(source), draw(source)
        np.random.seed(1)  # noqa: NPY002
        assert np.array_equal(draw(public_entropy("a")), one), f"{name}: noise that is not of its source"
        assert not np.array_equal(one, next_), f"{name}: noise twice"


# --- the exact Gaussian ----------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.floats(0.02, 20), st.floats(-12, -1))
def test_the_analytic_gaussian_is_the_least_noise(epsilon: float, exponent: float) -> None:
    delta = 10.0**exponent
    z = m.gaussian_multiplier(epsilon, delta)
    assert m.gaussian_delta(z, epsilon) <= delta
    assert m.gaussian_delta(z * (1 - 1e-9), epsilon) > delta * (1 - 1e-12)
    assert m.gaussian_epsilon(z, delta) == pytest.approx(epsilon, rel=1e-7)


@pytest.mark.parametrize(("z", "epsilon"), [(0.5, 3.0), (1.0, 0.0), (1.0, 1.0), (4.0, 0.3)])
def test_the_exact_delta_is_the_integral_it_stands_for(z: float, epsilon: float) -> None:
    # δ(ε) = ∫ max(0, p − e^ε q) over p = N(1, z²), q = N(0, z²)
    x = np.linspace(-12 * z, 12 * z + 1, 2_000_001)
    integrand = np.maximum(0.0, stats.norm.pdf(x, 1, z) - math.exp(epsilon) * stats.norm.pdf(x, 0, z))
    assert m.gaussian_delta(z, epsilon) == pytest.approx(float(trapezoid(integrand, x)), abs=1e-9)


def test_known_values() -> None:
    # σ for (1, 1e-5): 3.7304…, from the published code of the analytic Gaussian mechanism; the classical formula would take 4.84
    assert m.gaussian_multiplier(1.0, 1e-5) == pytest.approx(3.7305, abs=2e-4)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 1e-5), (-1.0, 1e-5), (math.nan, 1e-5), (1.0, 0.0), (1.0, 1.0)])
def test_impossible_budgets_are_refused(epsilon: float, delta: float) -> None:
    with pytest.raises(ValueError, match=r"epsilon|delta"):
        m.gaussian_multiplier(epsilon, delta)
