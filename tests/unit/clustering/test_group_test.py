"""The test for groups: estimators against brute force, answers on made-up clients, and how often it finds groups where there are none.

Statistical tests state their error rate.
"""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import linkage
from scipy.stats import binom
from sklearn.metrics import adjusted_rand_score

from cflpriv.algorithms.shared.grouping import FindGroups, JoinGroups
from cflpriv.clustering import group_test
from cflpriv.clustering.group_test import groups_given, groups_of
from cflpriv.clustering.similarity import Gram
from cflpriv.clustering.unbiased_gram import bounded, distances_to_groups, unbiased_of_folds, unbiased_of_vectors
from cflpriv.contract.operations import GramView
from cflpriv.errors import InputError
from cflpriv.randomness import stream
from cflpriv.types import Array


def gram_of(folds: Array) -> Gram:
    return Gram.of_vectors(range(len(folds)), folds)


def folds_of(means: Array, rng: np.random.Generator, noise: float = 1.0, sizes: Array | None = None) -> Array:
    """Two folds of each client around its true mean (n, d): errors of variance 2 `noise`² a number, over its relative size."""
    scale = noise * np.sqrt(2 / (np.ones(len(means)) if sizes is None else sizes))
    return np.asarray(means[:, None] + rng.normal(size=(len(means), 2, means.shape[1])) * scale[:, None, None])


def grouped(n: int, k: int, apart: float, rng: np.random.Generator, d: int = 64) -> tuple[Array, Array]:
    labels = np.arange(n) % k
    return labels, rng.normal(size=(k, d))[labels] * apart


# --- estimators


@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 7), p=st.sampled_from([2, 4, 6]), d=st.integers(1, 9), seed=st.integers(0, 2**20))
def test_estimators_equal_brute_force(n: int, p: int, d: int, seed: int) -> None:
    folds = np.random.default_rng(seed).normal(size=(n, p, d))
    unbiased = unbiased_of_folds(gram_of(folds))
    mean = folds.mean(1)
    noise = (folds[:, : p // 2].mean(1) - folds[:, p // 2 :].mean(1)) / 2
    expected = mean @ mean.T
    for i in range(n):
        expected[i, i] = np.mean([folds[i, a] @ folds[i, b] for a in range(p) for b in range(p) if a != b])
    np.testing.assert_allclose(unbiased.products, expected, atol=1e-12)
    assert unbiased.noise is not None
    assert unbiased.cross is not None
    np.testing.assert_allclose(unbiased.noise, noise @ noise.T, atol=1e-12)
    np.testing.assert_allclose(unbiased.cross, mean @ noise.T, atol=1e-12)
    np.testing.assert_allclose(unbiased.traces, (noise**2).sum(1), atol=1e-12)
    pairs, traces = [(i, j) for i in range(n) for j in range(n) if i != j], (noise**2).sum(1)
    mean_product = np.mean([traces[i] * traces[j] for i, j in pairs])
    assert unbiased.spread == pytest.approx(np.mean([(noise[i] @ noise[j]) ** 2 for i, j in pairs]) * traces.mean() ** 2 / mean_product)


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    folds = np.random.default_rng(0).normal(size=(11, 2, 5))
    whole = unbiased_of_folds(gram_of(folds))
    monkeypatch.setattr("cflpriv.clustering.unbiased_gram.ROWS_AT_ONCE", 3)
    np.testing.assert_allclose(unbiased_of_folds(gram_of(folds)).products, whole.products, rtol=0, atol=1e-12)


def test_products_are_unbiased_for_clients_of_any_size() -> None:
    """Means over 4000 draws lie within five standard errors of the truth, each number: fails in one of 50,000 runs."""
    rng = np.random.default_rng(1)
    means, sizes = rng.normal(size=(3, 4)), np.array([1.0, 4.0, 0.2])
    drawn = np.array([unbiased_of_folds(gram_of(folds_of(means, rng, 1.5, sizes))).products for _ in range(4000)])
    error = drawn.std(0) / np.sqrt(len(drawn))
    assert np.all(np.abs(drawn.mean(0) - means @ means.T) < 5 * error)
    uncorrected = means @ means.T + np.diag(1.5**2 * 4 / sizes)
    assert np.all(np.abs(np.diag(drawn.mean(0) - uncorrected)) > 5 * np.diag(error)), "the sizes matter"


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**20), k=st.integers(1, 3))
def test_distances_to_groups_equal_brute_force(seed: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    folds = rng.normal(size=(9, 2, 4))
    labels = np.arange(6) % k
    found = distances_to_groups(gram_of(folds), range(3, 9), labels, k, np.zeros(9))
    for row, one in enumerate(range(3, 9)):
        for group in range(k):
            (a, b), (ca, cb) = folds[one], folds[:6][labels == group].mean(0)
            assert found[row, group] == pytest.approx((a - ca) @ (b - cb))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**20), k=st.integers(1, 3))
def test_distances_of_single_vectors_have_their_noise_taken_off(seed: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    vectors, traces = rng.normal(size=(9, 1, 4)), rng.random(9)
    labels = np.arange(6) % k
    found = distances_to_groups(gram_of(vectors), range(3, 9), labels, k, traces)
    for row, one in enumerate(range(3, 9)):
        for group in range(k):
            at = labels == group
            noise = traces[one] + traces[:6][at].sum() / at.sum() ** 2
            noise -= 2 * traces[one] / at.sum() if one < 6 and at[one] else 0.0
            assert found[row, group] == pytest.approx(((vectors[one, 0] - vectors[:6, 0][at].mean(0)) ** 2).sum() - noise)


def test_blocks_of_rows_change_no_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, labels = np.random.default_rng(0).normal(size=(11, 2, 5)), np.arange(7) % 3 - 1
    whole = distances_to_groups(gram_of(vectors), range(2, 11), labels, 2, np.zeros(11))
    monkeypatch.setattr("cflpriv.clustering.unbiased_gram.ROWS_AT_ONCE", 3)
    np.testing.assert_allclose(distances_to_groups(gram_of(vectors), range(2, 11), labels, 2, np.zeros(11)), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("single", [False, True])
def test_many_newcomers_make_the_means_sharper(single: bool) -> None:
    """Two groups of clients with much noise, of which 12 are labelled: means of 48 make fewer mistakes than means of 12."""
    rng, sigma = np.random.default_rng(0), 0.15
    truth = np.arange(400) % 2
    centres = np.zeros((2, 64))
    centres[:, :2] = np.eye(2) * 0.6
    folds = centres[truth][:, None] + sigma * rng.normal(size=(400, 1 if single else 2, 64)) * (1 if single else np.sqrt(2))
    by = FindGroups(sigma=sigma, dimensions=64, samples=10**9) if single else FindGroups()
    view = GramView(Gram.of_vectors(range(400), folds), tuple(range(12, 400)), {"labels": truth[:12]})
    traces = np.full(400, 64 * sigma**2) if single else np.zeros(400)
    once = distances_to_groups(Gram.of_vectors(range(400), folds), range(12, 400), truth[:12], 2, traces).argmin(1)
    labels = JoinGroups(by)(view)[0]["labels"]
    few, more = (np.mean(found != truth[12:]) for found in (labels, once))
    assert few < 0.7 * more
    same = GramView(view.gram, tuple(range(388, 400)), {"labels": truth[:388]})
    np.testing.assert_array_equal(
        JoinGroups(by)(same)[0]["labels"], distances_to_groups(view.gram, range(388, 400), truth[:388], 2, traces).argmin(1)
    )


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(InputError, match="3 folds each, expected an even number"):
        unbiased_of_folds(gram_of(np.zeros((4, 3, 2))))
    with pytest.raises(InputError, match="1 clients cannot be compared"):
        unbiased_of_folds(gram_of(np.zeros((1, 2, 2))))
    with pytest.raises(InputError, match="4 clients with 2 vectors each"):
        unbiased_of_vectors(gram_of(np.zeros((4, 2, 2))), np.ones(1), 2)


# --- answers


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("sizes", ["equal", "unequal"])
def test_clear_groups_are_found_and_counted(k: int, sizes: str) -> None:
    rng = np.random.default_rng(k)
    labels, means = grouped(32, k, 1.0, rng)
    found = groups_of(
        unbiased_of_folds(gram_of(folds_of(means, rng, 1.0, None if sizes == "equal" else rng.uniform(0.4, 3, 32)))), stream(0, "t")
    )
    assert found.answer == "groups"
    assert found.k == k
    assert adjusted_rand_score(labels, found.labels) == 1.0
    assert found.labels[0] == 0, "numbered by first member"
    first = found.nodes[0]
    assert (first.k, first.p) == (k, 1 / 500)
    assert first.directions == k - 1


def test_groups_within_groups_are_found() -> None:
    rng = np.random.default_rng(3)
    outer, inner = rng.normal(size=(2, 64)) * 3.0, rng.normal(size=(4, 64)) * 0.8
    labels = np.repeat(np.arange(4), 12)
    found = groups_of(unbiased_of_folds(gram_of(folds_of(outer[labels // 2] + inner[labels], rng))), stream(0, "t"))
    assert adjusted_rand_score(labels, found.labels) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("public_noise", [False, True])
def test_equal_clients_are_alike_and_a_continuum_has_no_groups(public_noise: bool) -> None:
    """The edge is a 95 % quantile: fewer than 14 of 20 draws of equal clients are below it in one of 10,000 runs."""
    rng = np.random.default_rng(4)

    def answer(means: Array) -> str:
        if public_noise:
            vectors = means + rng.normal(size=means.shape)
            return groups_of(
                unbiased_of_vectors(gram_of(vectors[:, None]), np.array(means.shape[1]), means.shape[1]), stream(0, "t")
            ).answer
        return groups_of(unbiased_of_folds(gram_of(folds_of(means, rng))), stream(0, "t")).answer

    assert sum(answer(np.zeros((40, 64))) == "alike" for _ in range(20)) >= binom.ppf(1e-4, 20, 0.95)
    assert answer(rng.normal(size=(40, 2)) @ rng.normal(size=(2, 64))) == "continuum"
    assert answer(grouped(40, 3, 1.5, rng)[1]) == "groups"


@pytest.mark.slow
def test_the_leading_eigenvalues_are_as_good_as_all(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    unbiased = unbiased_of_folds(gram_of(folds_of(grouped(90, 3, 0.6, rng)[1], rng)))
    whole = groups_of(unbiased, stream(0, "t"), draws=120)
    monkeypatch.setattr(group_test, "DENSE", 10)
    leading = groups_of(unbiased, stream(0, "t"), draws=120)
    np.testing.assert_array_equal(leading.labels, whole.labels)
    for one, other in zip(leading.nodes, whole.nodes, strict=True):
        assert (one.directions, one.k, one.exceeding, one.draws) == (other.directions, other.k, other.exceeding, other.draws)
        assert one.edge == pytest.approx(other.edge)


@pytest.mark.parametrize("n", [4, 5, 9, 24])
def test_simulations_computed_together_are_those_computed_one_by_one(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees too: those of several simulations are made without scipy."""
    rng = np.random.default_rng(n)
    for means in (np.zeros((n, 16)), rng.normal(size=(n, 16)), grouped(n, 2, 1.5, rng, 16)[1]):
        folds = unbiased_of_folds(gram_of(folds_of(means, rng)))
        vectors = unbiased_of_vectors(gram_of(means[:, None] + rng.normal(size=(n, 1, 16))), np.array(16.0), 16)
        for unbiased in (folds, vectors):
            with monkeypatch.context() as patch:
                together = groups_of(unbiased, stream(0, "t"), draws=199)
                patch.setattr(group_test, "TOGETHER", 0)
                alone = groups_of(unbiased, stream(0, "t"), draws=199)
            np.testing.assert_array_equal(together.labels, alone.labels)
            for one, other in zip(together.nodes, alone.nodes, strict=True):
                assert (one.directions, one.k, one.exceeding, one.draws) == (other.directions, other.k, other.exceeding, other.draws)
                assert one.edge == pytest.approx(other.edge)


def test_gains_of_many_trees_are_those_of_scipy() -> None:
    points = np.random.default_rng(0).normal(size=(50, 9, 3)) * [3.0, 1.0, 0.2]
    points[10:, :, 2] = 0.0
    trees = np.array([linkage(one, "ward")[:, 2] ** 2 / 2 for one in points])
    np.testing.assert_allclose(group_test._gains_of_many(points), trees, rtol=1e-10)


@pytest.mark.slow
def test_four_clients_with_a_draw_without_variation_are_not_cut_for_it() -> None:
    """A draw whose points are all equal counts as one that looks as grouped. Of 60 continua, α = 1 %: 5 cuts in one of 5000 runs."""
    rng, cut = np.random.default_rng(12), 0
    for run in range(60):
        folds = folds_of(rng.normal(size=(4, 1)) @ rng.normal(size=(1, 16)), rng)
        cut += groups_of(unbiased_of_folds(gram_of(folds)), stream(run, "t")).k > 1
    assert cut < 5


@pytest.mark.parametrize("folds", ["zero", "equal halves", "one noisy client"])
@pytest.mark.parametrize("n", [12, 401])
def test_clients_without_noise_or_difference_are_alike(folds: str, n: int) -> None:
    made = np.zeros((n, 2, 6)) if folds == "zero" else np.ones((n, 2, 6))
    if folds == "one noisy client":
        made[3, 0] += np.arange(6)
        made[3, 1] -= np.arange(6)
    assert groups_of(unbiased_of_folds(gram_of(made)), stream(0, "t"), draws=99).k == 1


def test_a_level_that_the_draws_can_just_show_is_tested() -> None:
    rng = np.random.default_rng(13)
    for n in (29, 30, 31):
        folds = folds_of(grouped(n, 2, 2.0, rng)[1], rng)
        assert groups_of(unbiased_of_folds(gram_of(folds)), stream(0, "t"), draws=99).k == 2


def test_one_client_of_long_vectors_hides_nothing() -> None:
    rng = np.random.default_rng(14)
    labels, means = grouped(32, 4, 0.05, rng)
    folds = folds_of(means, rng, 0.02)
    folds[5] = rng.normal(size=(2, 64)) * 1e6
    found = groups_of(unbiased_of_folds(bounded(gram_of(folds))), stream(0, "t"))
    honest = np.arange(32) != 5
    assert adjusted_rand_score(labels[honest], found.labels[honest]) == 1.0
    np.testing.assert_array_equal(bounded(gram_of(folds[honest])).matrix(), gram_of(folds[honest]).matrix())


@pytest.mark.parametrize("lie", ["opposite halves", "far apart"])
def test_one_client_of_much_noise_hides_nothing_and_joins_the_nearest(lie: str) -> None:
    rng = np.random.default_rng(15)
    labels, means = grouped(32, 4, 0.05, rng)
    folds = folds_of(means, rng, 0.02)
    away = rng.normal(size=64) / 8
    folds[5] = np.stack([away, -away]) if lie == "opposite halves" else means[5] + np.stack([away, -away])
    unbiased = unbiased_of_folds(bounded(gram_of(folds)))
    for found in (groups_of(unbiased, stream(0, "t")), groups_given(unbiased, 4, stream(0, "t"))):
        assert found.set_aside.tolist() == [5]
        honest = np.arange(32) != 5
        assert adjusted_rand_score(labels[honest], found.labels[honest]) == 1.0
        if lie == "far apart":
            assert adjusted_rand_score(labels, found.labels) == 1.0, "its mean is that of its group"


def test_clients_without_noise_in_a_group_of_their_own_are_tested_like_others() -> None:
    rng = np.random.default_rng(17)
    labels, means = grouped(30, 3, 1.0, rng)
    folds = folds_of(means, rng)
    folds[labels == 1] = means[labels == 1][:, None]
    assert adjusted_rand_score(labels, groups_of(unbiased_of_folds(gram_of(folds)), stream(0, "t")).labels) == 1.0


@pytest.mark.slow
def test_small_groups_within_groups_are_tested_again() -> None:
    """Twenty-four groups of six, in pairs: a pair's level is below what the draws of the first test can show."""
    rng = np.random.default_rng(16)
    outer, inner = rng.normal(size=(12, 64)) * 3.0, rng.normal(size=(24, 64)) * 0.8
    labels = np.repeat(np.arange(24), 6)
    found = groups_of(unbiased_of_folds(gram_of(folds_of(outer[labels // 2] + inner[labels], rng))), stream(0, "t"), draws=199)
    assert adjusted_rand_score(labels, found.labels) > adjusted_rand_score(labels, labels // 2)


def test_a_given_number_of_groups_is_cut_without_a_test() -> None:
    rng = np.random.default_rng(6)
    labels, means = grouped(30, 3, 0.8, rng)
    unbiased = unbiased_of_folds(gram_of(folds_of(means, rng)))
    assert adjusted_rand_score(labels, groups_given(unbiased, 3, stream(0, "t")).labels) == 1.0
    assert groups_given(unbiased, 5, stream(0, "t")).k == 5
    alike = unbiased_of_folds(gram_of(folds_of(np.zeros((12, 8)), rng)))
    assert groups_given(alike, 2, stream(0, "t")).k == 2
    with pytest.raises(InputError, match="13 groups of 12 clients"):
        groups_given(alike, 13, stream(0, "t"))


def test_few_clients_are_not_tested() -> None:
    rng = np.random.default_rng(7)
    found = groups_of(unbiased_of_folds(gram_of(folds_of(grouped(3, 3, 9.0, rng)[1], rng))), stream(0, "t"))
    assert (found.k, found.nodes, found.answer) == (1, (), "untested")


# --- false splits


def gaussian(rng: np.random.Generator) -> Array:
    """A continuum of one strong and one weak direction."""
    return folds_of(rng.normal(size=(24, 2)) * [1.5, 0.5] @ rng.normal(size=(2, 32)), rng)


def alike(rng: np.random.Generator) -> Array:
    return folds_of(np.zeros((24, 32)), rng)


def unequal(rng: np.random.Generator) -> Array:
    return folds_of(rng.normal(size=(24, 1)) @ rng.normal(size=(1, 32)), rng, 1.0, rng.uniform(0.2, 5.0, 24))


def heavy_tailed(rng: np.random.Generator) -> Array:
    means = rng.standard_t(5, size=(24, 1)) @ rng.normal(size=(1, 32))
    return np.asarray(means[:, None] + rng.standard_t(4, size=(24, 2, 32)))


def false_splits(drawn: Callable[[np.random.Generator], Array], runs: int, alpha: float) -> int:
    rng = np.random.default_rng(11)
    found = 0
    for run in range(runs):
        found += groups_of(unbiased_of_folds(gram_of(drawn(rng))), stream(run, "false split"), alpha=alpha, draws=99).k > 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [gaussian, alike, unequal, heavy_tailed])
def test_the_rate_of_false_splits_is_at_most_twice_the_level(drawn: Callable[[np.random.Generator], Array]) -> None:
    """Over 1000 populations the upper 95 % limit of the rate is at most 2 α, α = 5 %."""
    found = false_splits(drawn, 1000, 0.05)
    assert binom.cdf(found, 1000, 0.10) <= 0.05, f"{found} of 1000"


def with_errors(folds: Array, error: float, rng: np.random.Generator) -> Gram:
    """The Gram as a protection releases it that leaves an error in each product."""
    rows = folds.reshape(-1, folds.shape[2])
    errors = np.triu(rng.normal(size=(len(rows), len(rows))) * error)
    return Gram.of_matrix(range(len(folds)), rows @ rows.T + errors + np.triu(errors, 1).T, 2, error)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 10.0])
def test_errors_of_released_products_count_as_noise(factor: float) -> None:
    """In units of the products of noise. Chance to fail without a fault: below 0.1 %, by the binomial bound."""
    found, error = 0, factor * 64**0.5
    for run in range(20):
        rng = np.random.default_rng(run)
        gram = with_errors(folds_of(gaussian(rng).mean(1), rng), error, rng)
        found += groups_of(unbiased_of_folds(gram), stream(run, "errors"), alpha=0.05, draws=99).k > 1
    assert found <= binom.ppf(0.999, 20, 0.05)
    labels, means = grouped(24, 3, 2.0, np.random.default_rng(0))
    gram = with_errors(folds_of(means, np.random.default_rng(1)), error, np.random.default_rng(2))
    assert adjusted_rand_score(labels, groups_of(unbiased_of_folds(gram), stream(0, "errors")).labels) == 1.0
