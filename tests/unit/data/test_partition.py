"""Partitions: disjoint, complete, even, reproducible, independent of what was called before; and what cannot be done is refused."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given as holds_for
from hypothesis import settings
from hypothesis import strategies as st

from cflpriv.data import Partition, dirichlet, given, iid, label_skew, pathological
from cflpriv.data.partition import consecutive_pairs, owned
from cflpriv.errors import InputError
from cflpriv.types import Array

QUICK = settings(deadline=None, max_examples=60)
SEEDS = st.integers(0, 2**32)


def labels_with(counts: list[int], seed: int) -> Array:
    """Labels with the given class counts, in random order."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))


LABELS = st.builds(labels_with, st.lists(st.integers(12, 40), min_size=2, max_size=6), SEEDS)
TEST_LABELS = labels_with([15] * 6, 99)


def check_disjoint(partition: Partition, samples: int) -> Array:
    """Train indices are sorted, valid and owned once; returns the used ones."""
    for own in (*partition.train, *partition.test):
        assert own.dtype == np.int64
        assert (np.diff(own) > 0).all()
    used = np.concatenate(partition.train)
    assert len(np.unique(used)) == len(used)
    assert used.min() >= 0
    assert used.max() < samples
    assert len(partition.ids) == len(partition.train) == len(partition.test) == len(partition.groups)
    return used


def same(a: Partition, b: Partition) -> bool:
    arrays = zip((*a.train, *a.test), (*b.train, *b.test), strict=True)
    return (a.ids, a.groups, a.notes) == (b.ids, b.groups, b.notes) and all(np.array_equal(x, y) for x, y in arrays)


@QUICK
@holds_for(y=LABELS, clients=st.integers(1, 12), seed=SEEDS)
def test_iid_is_complete_and_even(y: Array, clients: int, seed: int) -> None:
    partition = iid(y, TEST_LABELS, clients, seed)
    assert len(check_disjoint(partition, len(y))) == len(y)
    sizes = [len(own) for own in partition.train]
    assert max(sizes) - min(sizes) <= 1
    assert all(np.array_equal(test, np.arange(len(TEST_LABELS))) for test in partition.test)
    capped = iid(y, TEST_LABELS, clients, seed, samples_per_client=2, test_samples_per_client=5)
    assert len(check_disjoint(capped, len(y))) == 2 * clients
    assert {len(test) for test in capped.test} == {5}


@QUICK
@holds_for(y=LABELS, clients=st.integers(1, 12), decks=st.integers(1, 4), seed=SEEDS)
def test_each_deck_of_iid_is_the_whole_set(y: Array, clients: int, decks: int, seed: int) -> None:
    decks = min(decks, clients)
    partition = iid(y, TEST_LABELS, clients, seed, decks=decks)
    for deck in range(decks):
        used = np.concatenate(partition.train[deck::decks])
        np.testing.assert_array_equal(np.sort(used), np.arange(len(y)))


@QUICK
@holds_for(y=LABELS, clients=st.integers(1, 12), percent=st.floats(1, 100), cap=st.integers(0, 9), seed=SEEDS)
def test_label_skew(y: Array, clients: int, percent: float, cap: int, seed: int) -> None:
    partition = label_skew(y, TEST_LABELS, clients, seed, percent)
    used = check_disjoint(partition, len(y))
    classes = len(np.unique(y))
    owned = [set(np.unique(y[own]).tolist()) for own in partition.train]
    # With at least as many samples in a class as clients, nobody who owns it goes without.
    assert {len(its) for its in owned} == {max(1, round(percent / 100 * classes))}
    for label in range(classes):
        shares = [int((y[own] == label).sum()) for own, its in zip(partition.train, owned, strict=True) if label in its]
        if shares:
            assert max(shares) - min(shares) <= 1
            assert sum(shares) == (y == label).sum()
    unowned = sorted(set(range(classes)) - set.union(*owned))
    np.testing.assert_array_equal(np.sort(used), np.flatnonzero(~np.isin(y, unowned)))
    assert [str(unowned) in note for note in partition.notes] == ([True] if unowned else [])
    for i, its in enumerate(owned):
        np.testing.assert_array_equal(partition.test[i], np.flatnonzero(np.isin(TEST_LABELS, list(its))))
        for j in range(i):
            assert (partition.groups[i] == partition.groups[j]) == (its == owned[j])
    capped = label_skew(y, TEST_LABELS, clients, seed, percent, samples_per_client=cap)
    for whole, part in zip(partition.train, capped.train, strict=True):
        assert set(part) <= set(whole)
        assert len(part) == (min(cap, len(whole)) if cap else len(whole))


@QUICK
@holds_for(
    y=LABELS,
    clients=st.integers(1, 8),
    alpha=st.sampled_from([1e-6, 1e-3, 0.1, 1.0, 1e6]),
    minimum=st.integers(1, 3),
    wanted=st.integers(0, 20),
    seed=SEEDS,
)
def test_dirichlet(y: Array, clients: int, alpha: float, minimum: int, wanted: int, seed: int) -> None:
    partition = dirichlet(y, TEST_LABELS, clients, seed, alpha, minimum, test_samples_per_client=wanted)
    assert len(check_disjoint(partition, len(y))) == len(y)
    assert min(len(own) for own in partition.train) >= minimum
    assert partition.groups == tuple(range(clients))
    for own, test in zip(partition.train, partition.test, strict=True):
        drawn, have = np.bincount(TEST_LABELS[test], minlength=6), np.bincount(y[own], minlength=6)
        size = len(test)
        # The stated size: what was asked for, or the mean class size, or the largest the pool of 15 a class allows.
        fits = min(15 * len(own) // int(count) for count in have if count)
        assert size == min(wanted or 15, fits)
        # Largest remainder: every class gets its exact quota rounded down or up, and nobody rounded down had a larger remainder.
        quotas = [Fraction(size * int(count), len(own)) for count in have]
        up = [int(n) - int(quota) for n, quota in zip(drawn, quotas, strict=True)]
        assert set(up) <= {0, 1}
        rests = [quota - int(quota) for quota in quotas]
        assert max((r for r, u in zip(rests, up, strict=True) if not u), default=0) <= min(
            (r for r, u in zip(rests, up, strict=True) if u), default=1
        )


@QUICK
@holds_for(y=LABELS, clients=st.integers(1, 8), alpha=st.sampled_from([1e-3, 0.1, 1e6]), wanted=st.integers(0, 20), seed=SEEDS)
def test_dirichlet_with_an_even_test_scores_all_labels_of_a_client_alike(
    y: Array, clients: int, alpha: float, wanted: int, seed: int
) -> None:
    usual, even = (dirichlet(y, TEST_LABELS, clients, seed, alpha, test_samples_per_client=wanted, even_test=one) for one in (False, True))
    for own, same, test in zip(usual.train, even.train, even.test, strict=True):
        np.testing.assert_array_equal(own, same)  # how clients are scored changes nothing of what they train on
        everything = np.flatnonzero(np.isin(TEST_LABELS, y[own]))
        assert set(test) <= set(everything)
        assert len(test) == min(wanted or len(everything), len(everything))


@pytest.mark.parametrize("seed", range(5))
def test_dirichlet_minimum_at_small_alpha_and_full_size(seed: int) -> None:
    y = labels_with([6000] * 10, seed)
    partition = dirichlet(y, labels_with([1000] * 10, 1), 100, seed, alpha=1e-3, minimum=10)
    assert len(check_disjoint(partition, len(y))) == len(y)
    sizes = sorted(len(own) for own in partition.train)
    # Each class goes almost whole to one client or two; most clients have nothing but the minimum.
    assert sizes[0] == 10
    assert sizes[60] == 10
    assert sizes[-1] > 3000


def test_dirichlet_proportions_follow_the_distribution() -> None:
    """Shares of one class are Dirichlet(alpha): the second moment of a share is (alpha + 1) / (n (n alpha + 1)).

    With 20 clients and alpha = 0.5 a class's mean square share has expectation 0.00682 and, over 200 classes, a standard error below
    1.5e-4 (found by simulation); the bound of 5 standard errors fails once in over 10^6 correct programs.
    """
    clients, alpha, classes = 20, 0.5, 200
    y = np.repeat(np.arange(classes), 500)
    partition = dirichlet(y, np.arange(classes), clients, 3, alpha)
    shares = np.stack([np.bincount(y[own], minlength=classes) / 500 for own in partition.train])
    assert abs((shares**2).mean() - (alpha + 1) / (clients * (clients * alpha + 1))) < 5 * 1.5e-4


@QUICK
@holds_for(y=LABELS, per_group=st.integers(1, 4), seed=SEEDS, data=st.data())
def test_pathological(y: Array, per_group: int, seed: int, data: st.DataObject) -> None:
    classes = len(np.unique(y))
    some = st.lists(st.integers(0, classes - 1), min_size=1, unique=True).map(lambda labels: tuple(sorted(labels)))
    groups = data.draw(st.lists(some, min_size=1, max_size=3, unique=True))
    clients = per_group * len(groups)
    partition = pathological(y, TEST_LABELS, clients, seed, groups)
    used = check_disjoint(partition, len(y))
    covered = sorted(set().union(*groups))
    np.testing.assert_array_equal(np.sort(used), np.flatnonzero(np.isin(y, covered)))
    for own, test, group in zip(partition.train, partition.test, partition.groups, strict=True):
        assert set(y[own]) == set(groups[group])
        np.testing.assert_array_equal(test, np.flatnonzero(np.isin(TEST_LABELS, groups[group])))
    assert [partition.groups.count(g) for g in range(len(groups))] == [per_group] * len(groups)
    for label in covered:  # even also where groups overlap
        shares = [int((y[own] == label).sum()) for own, g in zip(partition.train, partition.groups, strict=True) if label in groups[g]]
        assert max(shares) - min(shares) <= 1
    exact = min(len(own) for own in partition.train)
    assert {len(own) for own in pathological(y, TEST_LABELS, clients, seed, groups, exact).train} == {exact}
    with pytest.raises(InputError, match="samples_per_client"):
        pathological(y, TEST_LABELS, clients, seed, groups, exact + 1)


@QUICK
@holds_for(classes=st.integers(1, 30))
def test_consecutive_pairs_cover_all_labels_in_order(classes: int) -> None:
    groups = consecutive_pairs(classes)
    assert [label for group in groups for label in group] == list(range(classes))
    assert all(len(group) == 2 for group in groups[:-1])
    assert len(groups[-1]) in ((1,) if classes == 1 else (2, 3))


@QUICK
@holds_for(owners=st.lists(st.integers(0, 6), min_size=1, max_size=40), seed=SEEDS, data=st.data())
def test_given(owners: list[int], seed: int, data: st.DataObject) -> None:
    y, who = np.arange(len(owners)) % 3, np.array(owners)
    ids = sorted(set(owners))
    test_who = np.array(data.draw(st.lists(st.sampled_from(ids), min_size=5, max_size=5)))
    partition = given(y, np.arange(5) % 3, who, test_who, 0, seed)
    assert partition.ids == tuple(ids)
    for owner, own, test in zip(ids, partition.train, partition.test, strict=True):
        np.testing.assert_array_equal(own, np.flatnonzero(who == owner))
        np.testing.assert_array_equal(test, np.flatnonzero(test_who == owner))
    without = len(set(ids) - set(test_who.tolist()))
    assert any(f"{without} of" in note for note in partition.notes) == (without > 0)
    first = given(y, np.arange(5) % 3, who, None, 1, seed, samples_per_client=2)
    assert first.ids == (ids[0],)
    assert len(first.train[0]) == min(2, owners.count(ids[0]))
    np.testing.assert_array_equal(first.test[0], np.flatnonzero(np.isin(np.arange(5) % 3, y[who == ids[0]])))


def _call(function: Callable[..., Partition], seed: int) -> Partition:
    y, y_test, who = labels_with([50] * 5, 0), labels_with([10] * 5, 1), np.arange(250) % 10
    more = {iid: (), label_skew: (40,), dirichlet: (0.5, 5), pathological: ([(0, 1), (2, 3, 4)],)}
    if function is given:
        return given(y, y_test, who, None, 10, seed, 20, 7)
    return function(y, y_test, 10, seed, *more[function], samples_per_client=20, test_samples_per_client=7)


@pytest.mark.parametrize("function", [iid, label_skew, dirichlet, pathological, given])
def test_the_seed_decides_and_nothing_else(function: Callable[..., Partition]) -> None:
    first = _call(function, 1)
    np.random.default_rng().random(17)
    np.random.seed(5)  # noqa: NPY002  the global generator must have no influence
    for other in (given, pathological, dirichlet, label_skew, iid):
        _call(other, 2)
    assert same(first, _call(function, 1))
    assert not same(first, _call(function, 2))


def test_clients_draw_independently() -> None:
    """No two clients copy each other's draws; by chance that happens less than once in 10^12 (subsets of 25 of 50 or more)."""
    y, y_test = labels_with([100] * 10, 0), labels_with([20] * 10, 1)
    tests = iid(y, y_test, 10, 0, test_samples_per_client=25).test
    assert len({test.tobytes() for test in tests}) == 10
    # 252 sets of five labels: ten clients have one and the same with probability 252^-9.
    assert len(set(label_skew(y, y_test, 10, 0, 50).groups)) > 1
    whole, capped = (pathological(y, y_test, 10, 0, [range(10)], cap, 25) for cap in (0, 50))
    assert {len(own) for own in whole.train} == {100}
    places = [np.searchsorted(own, kept).tobytes() for own, kept in zip(whole.train, capped.train, strict=True)]
    assert len(set(places)) == 10
    assert len({test.tobytes() for test in capped.test}) == 10


Y, Y_TEST = labels_with([10] * 4, 0), labels_with([5] * 4, 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: iid(Y, Y_TEST, 0, 0), "clients = 0"),
        (lambda: iid(Y, Y_TEST, 41, 0), "clients = 41"),
        (lambda: iid(Y, Y_TEST, 5, 0, 9), "need 45 training samples, there are 40"),
        (lambda: iid(Y, Y_TEST, 5, 0, -1), "samples_per_client = -1"),
        (lambda: iid(Y, Y_TEST, 5, 0, 0, -2), "test_samples_per_client = -2"),
        (lambda: iid(Y, Y_TEST, 5, 0, decks=6), "decks = 6"),
        (lambda: iid(Y.astype(float), Y_TEST, 5, 0), "y_train"),
        (lambda: label_skew(Y, Y_TEST, 5, 0, 0), "percent = 0: expected a number in (0, 100]"),
        (lambda: label_skew(Y, Y_TEST, 5, 0, 101), "percent = 101: expected a number in (0, 100]"),
        (lambda: label_skew(Y, Y_TEST, 5, 0, float("nan")), "percent = nan: expected a number in (0, 100]"),
        (lambda: label_skew(np.array([0, 1, 2, 3] + [0] * 30), Y_TEST, 30, 0, 25), "would get none"),
        (lambda: label_skew(Y, np.array([0]), 10, 0, 25), "no test sample"),
        (lambda: dirichlet(Y, Y_TEST, 5, 0, 0), "alpha = 0"),
        (lambda: dirichlet(Y, Y_TEST, 5, 0, float("inf")), "alpha = inf"),
        (lambda: dirichlet(Y, Y_TEST, 5, 0, float("nan")), "alpha = nan"),
        (lambda: dirichlet(Y, Y_TEST, 5, 0, 1.0, 0), "minimum = 0"),
        (lambda: dirichlet(Y, Y_TEST, 5, 0, 1.0, 9), "5 clients need 45"),
        (lambda: dirichlet(Y, Y_TEST, 5, 0, 1.0, 5, 4), "samples_per_client = 4"),
        (lambda: dirichlet(Y, np.array([7]), 5, 0, 1.0), "no test sample"),
        (lambda: pathological(Y, Y_TEST, 4, 0, []), "0 groups"),
        (lambda: pathological(Y, Y_TEST, 4, 0, [(0, 1), ()]), "groups[1] = []"),
        (lambda: pathological(Y, Y_TEST, 4, 0, [(0, 4)]), "groups[0] = [0, 4]: no training sample has label 4"),
        (lambda: pathological(Y, Y_TEST, 4, 0, [(0, 0)]), "groups[0] = [0, 0]"),
        (lambda: pathological(Y, Y_TEST, 4, 0, [(0, 1), (1, 0)]), "groups[1] = [0, 1]"),
        (lambda: pathological(Y, Y_TEST, 5, 0, [(0, 1), (2, 3)]), "clients = 5"),
        (lambda: pathological(Y, Y_TEST, 24, 0, [(0,), (1, 2, 3)]), "would get none"),
        (lambda: given(Y, Y_TEST, Y, None, 5, 0), "clients = 5: the file has 4"),
        (lambda: given(Y, Y_TEST, Y, np.array([0, 9]), 0, 0), "client 9"),
    ],
)
def test_refused(call: Callable[[], Partition], words: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@QUICK
@holds_for(
    y=st.builds(labels_with, st.lists(st.integers(20, 40), min_size=6, max_size=6), SEEDS),
    noise=st.sampled_from([0.0, 0.5, 1.0]),
    seed=SEEDS,
)
def test_noisy_pathological(y: Array, noise: float, seed: int) -> None:
    """A client holds its group's labels, and with noise exactly `noise_labels` others; everything else stays as it was."""
    groups = ((0, 1), (2,), (3, 4))
    partition = pathological(y, TEST_LABELS, 9, seed, groups, noise=noise, noise_labels=2)
    check_disjoint(partition, len(y))
    assert partition.groups == (0, 1, 2) * 3
    held = [set(np.unique(y[own]).tolist()) for own in partition.train]
    foreign = [its - set(groups[group]) for its, group in zip(held, partition.groups, strict=True)]
    assert all(set(groups[group]) <= its for its, group in zip(held, partition.groups, strict=True))
    assert {len(its) for its in foreign} <= ({0} if noise == 0 else {2} if noise == 1 else {0, 2})
    for i, its in enumerate(held):
        np.testing.assert_array_equal(partition.test[i], np.flatnonzero(np.isin(TEST_LABELS, list(its))))
    for label in range(6):
        shares = [int((y[own] == label).sum()) for own, its in zip(partition.train, held, strict=True) if label in its]
        if shares:
            assert max(shares) - min(shares) <= 1
            assert sum(shares) == (y == label).sum()
    noisy = sum(map(bool, foreign))
    assert [f"{noisy} of 9 clients" in note for note in partition.notes if "outside" in note] == ([True] if noise else [])


def test_half_of_the_clients_are_noisy_with_probability_one_half() -> None:
    y = labels_with([400] * 6, 0)
    partition = pathological(y, TEST_LABELS, 300, 3, ((0, 1), (2, 3), (4, 5)), noise=0.5)
    foreign = [set(np.unique(y[own]).tolist()) - {2 * g, 2 * g + 1} for own, g in zip(partition.train, partition.groups, strict=True)]
    # Binomial(300, 1/2): outside 105..195 with probability below 2e-7.
    assert 105 <= sum(map(bool, foreign)) <= 195
    assert set().union(*foreign) == set(range(6))
    # the draws do not depend on what else is asked for
    capped = pathological(y, TEST_LABELS, 300, 3, ((0, 1), (2, 3), (4, 5)), 5, noise=0.5)
    assert all(set(part) <= set(whole) for part, whole in zip(capped.train, partition.train, strict=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"noise": 1.1}, "noise = 1.1: expected a number in [0, 1]"),
        ({"noise": float("nan")}, "noise = nan"),
        ({"noise": 0.5, "noise_labels": 0}, "noise_labels = 0: expected an integer ≥ 1"),
        ({"noise": 1.0, "noise_labels": 5}, "noise_labels = 5: outside the group [0, 1] there are 4 labels"),
    ],
)
def test_bad_noise(changes: dict[str, float], words: str) -> None:
    with pytest.raises(InputError) as caught:
        pathological(labels_with([20] * 6, 0), TEST_LABELS, 6, 0, ((0, 1), (2, 3), (4, 5)), **changes)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_owners_of_one_kind_are_groups() -> None:
    y = np.array([0, 1, 0, 2, 3, 2])
    owners, kinds = np.array([4, 4, 9, 9, 7, 7]), np.array([0, 0, 0, 0, 1, 1])
    known = given(y, y, owners, owners, 0, 0, kinds=kinds)
    assert (known.ids, known.groups, known.notes) == ((4, 7, 9), (0, 1, 0), ())
    kinds[2] = 1  # client 9 has two kinds now
    unknown = given(y, y, owners, owners, 0, 0, kinds=kinds)
    assert unknown.groups == (0, 0, 0)
    assert not unknown.groups_known


@QUICK
@holds_for(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(0, 5))
def test_each_owner_has_its_samples_in_their_order(owners: list[int], first: int) -> None:
    array, ids = np.array(owners), list(range(first, 12))
    for own, owner in zip(owned(array, ids), ids, strict=True):
        np.testing.assert_array_equal(own, np.flatnonzero(array == owner))
