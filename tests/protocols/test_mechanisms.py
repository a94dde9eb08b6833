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
from scipy import special, stats

from cflpriv.protocols import mechanisms as m
from cflpriv.protocols.accounting import skellam_rdp
from cflpriv.protocols.entropy import Entropy, public_entropy
from cflpriv.protocols.events import GaussianEvent, Relation

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


@pytest.mark.parametrize("relation", RELATIONS)
def test_integers_for_a_secure_sum_stay_within_the_norms_of_their_event(relation: Relation) -> None:
    rng = np.random.default_rng(3)
    plan = m.skellam_plan(0.5, TINY, 64, 200.0, 3, relation)
    signs = rng.choice([-1.0, 1.0], 64)
    event = plan.event
    times = 1 if relation == "add_remove" else 2
    l2 = l1 = 0.0
    for i in range(300):
        vector = rng.normal(size=50) * 10.0 ** rng.uniform(-3, 3) if i % 3 else np.eye(50)[i % 50] * 9
        share = m.skellam_share(vector, plan, signs, public_entropy(f"share {i}")).astype(float)
        l2, l1 = max(l2, float(np.linalg.norm(share))), max(l1, float(np.abs(share).sum()))
    assert times * l2 <= event.l2 * (1 + 1e-12)
    assert times * l1 <= event.l1 * (1 + 1e-12)
    assert times * l2 > 0.95 * event.l2


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


@pytest.mark.parametrize("variance", [0.05, 1.0, 37.5, 4e4, 3e7, 2.0**30, m.MOST_VARIANCE])
def test_skellam_noise_has_its_law(variance: float) -> None:
    count = 100_000
    noise = m.skellam_noise(variance, count, public_entropy(f"skellam {variance}"))
    reach = math.ceil(7 * math.sqrt(variance)) + 5
    width = max(1, math.ceil(math.sqrt(variance) / 6))
    edges = np.arange(-reach, reach + width, width)
    law = stats.skellam(variance / 2, variance / 2)
    # the law's own distribution function is used where it is sound; beyond, the normal law is within 1e-5 of it
    cdf = law.cdf(edges) if variance < 1e5 else stats.norm.cdf((edges + 0.5) / math.sqrt(variance))
    counts = np.histogram(noise, bins=edges + 0.5)[0].astype(float)
    assert counts.sum() >= count - 2
    assert chi_square(counts, count * np.diff(cdf)) > ALPHA


@pytest.mark.parametrize("variance", [0.3, 20.0, 900.0])
def test_skellam_probabilities_match_a_convolution_of_poissons(variance: float) -> None:
    reach = math.ceil(12 * math.sqrt(variance)) + 40
    k = np.arange(0, 2 * reach + 200)
    poisson = stats.poisson(variance / 2).pmf(k)
    pmf = np.convolve(poisson, poisson[::-1])[len(k) - 1 - reach : len(k) + reach]
    ours = special.ive(np.abs(np.arange(-reach, reach + 1)), variance)
    assert np.abs(ours - pmf).max() < 1e-12
    assert ours.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("variance", [0.3, 900.0, m.LARGE_VARIANCE, 2.0**30 - 1, 2.0**30, m.MOST_VARIANCE])
def test_the_table_of_skellam_noise_inverts_its_characteristic_function(variance: float) -> None:
    """exp(v (cos t − 1)), summed over a grid, on which no number that has a probability meets another."""
    grid = 2 ** math.ceil(math.log2(64 * math.sqrt(variance) + 256))
    t = 2 * math.pi * np.arange(-(grid // 2), grid // 2) / grid
    t = t[np.abs(t) * math.sqrt(variance) < 12]
    k = np.unique(np.linspace(0, 8 * math.sqrt(variance) + 20, 200).astype(np.int64))
    law = (np.exp(-2 * variance * np.square(np.sin(t / 2))) * np.cos(np.outer(k, t))).sum(axis=1) / grid
    edges = m._skellam_edges(variance)
    ours = np.diff(edges)[len(edges) // 2 - 1 + k]
    # a difference of two entries near 1 keeps 2^-53 of them
    assert np.abs(ours - law).max() < 1e-11 * law[0] + 2**-52
    assert edges[-1] == pytest.approx(1, abs=1e-12)


def test_a_table_that_does_not_end_at_one_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "_skellam_law", lambda number, variance: np.full(len(number), np.nan))
    with pytest.raises(ValueError, match="nothing is drawn"):
        m.skellam_noise(123.456, 3, public_entropy("no law"))


def test_shares_add_up_to_the_sum_and_the_noise_of_the_survivors() -> None:
    rng = np.random.default_rng(4)
    n, size, survivors = 7, 30, 5
    plan = m.skellam_plan(1.0, 0.8, 32, 500.0, survivors, "add_remove")
    signs = rng.choice([-1.0, 1.0], 32)
    vectors = [m.clip(rng.normal(size=size), 1.0) for _ in range(n)]
    errors = []
    for i in range(300):
        shares = [m.skellam_share(vector, plan, signs, public_entropy(f"{i} {c}")) for c, vector in enumerate(vectors)]
        errors.append(m.skellam_open(np.sum(shares, axis=0), plan, signs, size) - np.sum(vectors, axis=0))
    error = np.stack(errors)
    # n shares of the noise, and rounding (variance up to 1/4 an integer and client)
    low = n * plan.local_variance / plan.levels_per_unit**2
    high = n * (plan.local_variance + 0.25) / plan.levels_per_unit**2
    total = float(np.square(error).sum())
    assert stats.chi2(error.size).cdf(total / low) > ALPHA
    assert stats.chi2(error.size).sf(total / high) > ALPHA
    assert abs(error.mean()) < stats.norm.isf(ALPHA / 2) * math.sqrt(high / error.size)
    assert plan.event.variance == pytest.approx(survivors * plan.local_variance)
    assert plan.event.variance == pytest.approx((0.8 * plan.event.l2) ** 2)


def test_choices_have_their_probabilities() -> None:
    entropy = public_entropy("choices")
    count = 20_000
    scores = np.array([3.0, 1.0, 2.0, 9.0])
    drawn = [m.noisy_argmin(scores, 2.0, 1.5, "add_remove", "sample", entropy).value for _ in range(count)]
    expected = count * m.argmin_probabilities(scores, 2.0, 1.5, "add_remove")
    assert chi_square(np.bincount(drawn, minlength=4).astype(float), expected) > ALPHA
    gumbel = (scores * 1.5 / 2.0)[:, None] - np.random.default_rng(5).gumbel(size=(4, count))
    assert chi_square(np.bincount(gumbel.argmin(axis=0), minlength=4).astype(float), expected) > ALPHA, "the law of a noisy argmin"


PLAN = m.skellam_plan(1.0, 1.0, 16, 9.5, 2, "add_remove")


def test_noise_is_fresh_with_every_call_and_never_of_numpy() -> None:
    """All of it comes from the given source: the same source gives the same noise whatever numpy's state, and a source gives none twice."""
    draws: dict[str, Callable[[Entropy], Array]] = {
        "gaussian": lambda source: m.gaussian(np.zeros(20), 1.0, 1.0, "add_remove", "sample", source).value,
        "second moment": lambda source: m.second_moment(np.zeros((1, 6)), 1.0, "add_remove", "sample", source).value,
        "skellam": lambda source: m.skellam_noise(50.0, 20, source).astype(float),
        "share": lambda source: m.skellam_share(np.ones(16), PLAN, np.ones(16), source).astype(float),
        "argmin": lambda source: np.array([m.noisy_argmin(np.zeros(9), 1.0, 0.1, "add_remove", "sample", source).value for _ in range(20)]),
    }
    for name, draw in draws.items():
        source = public_entropy("a")
        np.random.seed(0)  # noqa: NPY002
        one, next_ = draw(source), draw(source)
        np.random.seed(1)  # noqa: NPY002
        assert np.array_equal(draw(public_entropy("a")), one), f"{name}: noise that is not of its source"
        assert not np.array_equal(one, next_), f"{name}: noise twice"


# --- Skellam: the divergence bound against the divergence itself -------------------------------------------------------------------------


def skellam_divergence(order: int, variance: float, shifts: tuple[int, ...]) -> float:
    """Rényi divergence of Skellam noise moved by `shifts` from Skellam noise at rest, from the probabilities; coordinates add up."""
    reach = math.ceil((12 + order) * math.sqrt(variance)) + 60 + 4 * order
    k = np.arange(-reach, reach + 1)
    law = special.ive(np.abs(k), variance)
    total = 0.0
    for shift in shifts:
        both = (law > 1e-300) & (np.roll(law, shift) > 1e-300) & (np.abs(k) < reach - 5)
        total += float(special.logsumexp(order * np.log(np.roll(law, shift)[both]) + (1 - order) * np.log(law[both]))) / (order - 1)
    return total


@pytest.mark.parametrize("order", [2, 3, 8, 32])
@pytest.mark.parametrize("variance", [4.0, 50.0, 2000.0])
@pytest.mark.parametrize("shifts", [(1,), (3,), (1, 1, 1), (2, 0, -1)])
def test_the_skellam_bound_is_above_the_divergence(order: int, variance: float, shifts: tuple[int, ...]) -> None:
    exact = skellam_divergence(order, variance, shifts)
    bound = skellam_rdp(order, variance, math.sqrt(sum(s * s for s in shifts)), sum(map(abs, shifts)))
    assert exact <= bound * (1 + 1e-9)
    if order <= 8 and variance >= 50:
        assert bound < 1.1 * exact, "and not far above where there is noise to speak of"


def test_the_divergence_would_notice_a_variance_taken_for_twice_itself() -> None:
    # as where a Poisson rate of half the variance is mistaken for the variance
    assert skellam_divergence(4, 50.0, (3,)) > 1.5 * skellam_rdp(4, 100.0, 3.0, 3.0)


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
    assert m.gaussian_delta(z, epsilon) == pytest.approx(float(np.trapezoid(integrand, x)), abs=1e-9)


def test_known_values() -> None:
    # σ for (1, 1e-5): 3.7304…, from the published code of the analytic Gaussian mechanism; the classical formula would take 4.84
    assert m.gaussian_multiplier(1.0, 1e-5) == pytest.approx(3.7305, abs=2e-4)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 1e-5), (-1.0, 1e-5), (math.nan, 1e-5), (1.0, 0.0), (1.0, 1.0)])
def test_impossible_budgets_are_refused(epsilon: float, delta: float) -> None:
    with pytest.raises(ValueError, match=r"epsilon|delta"):
        m.gaussian_multiplier(epsilon, delta)


def test_what_is_longer_than_a_share_may_be_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # were the clip broken, no rounding would be short enough: an error, neither a release nor an endless search
    monkeypatch.setattr(m, "clip", lambda vector, norm: np.asarray(vector, np.float64))
    with pytest.raises(ValueError, match="it is not clipped to"):
        m.skellam_share(100 * np.ones(16), PLAN, np.ones(16), public_entropy("long"))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="not all values are finite"):
        m.skellam_share(np.full(16, np.nan), PLAN, np.ones(16), public_entropy("nan"))
