"""Where clients belong: unbiased distances, the level at which members are held back, and clients that are recognised together."""

from collections.abc import Sequence

import numpy as np
import pytest

from cflpriv.clustering.placement import UNPLACED, agreeing, distances, joint_test, membership, place, residuals_along
from cflpriv.clustering.similarity import Gram
from cflpriv.clustering.unbiased_gram import unbiased_of_folds
from cflpriv.randomness import Stream, stream
from cflpriv.types import Array

DIMENSION, K = 30, 3


def products(rng: Stream, groups: Array, *, apart: float = 1.0, noise: float = 0.15) -> tuple[Array, Array]:
    """Unbiased products of clients that gave two halves each; the means of groups are `apart` times unit vectors."""
    means = apart * np.eye(DIMENSION)[np.asarray(groups)]
    halves = means[:, None] + noise * rng.standard_normal((len(groups), 2, DIMENSION))
    made = unbiased_of_folds(Gram.of_vectors(tuple(range(len(groups))), halves))
    return made.products, made.traces


def scene(newcomers: Sequence[int], members: int = 12) -> tuple[Array, Array]:
    """The groups and labels of members of three groups, and of newcomers of the given groups, not placed."""
    groups = np.array([*np.repeat(np.arange(K), members), *newcomers])
    labels = np.where(np.arange(len(groups)) < K * members, groups, UNPLACED)
    return groups, labels


def test_distances_are_those_to_the_means_of_the_others() -> None:
    rng = stream(0, "test")
    points = rng.standard_normal((12, 5))
    labels = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, UNPLACED, UNPLACED, 0])
    found = distances(points @ points.T, labels, 4)
    for client in range(12):
        for label in range(3):
            others = [other for other in range(12) if labels[other] == label and other != client]
            assert found[client, label] == pytest.approx(((points[client] - points[others].mean(0)) ** 2).sum())
    assert np.isinf(found[:, 3]).all()


def test_distances_are_unbiased() -> None:
    """Also to clusters of few clients: the mean over many draws is the distance of the true means."""
    groups = np.array([0, 0, 0, 1, 1, 2])
    labels = np.array([0, 0, 0, 1, 1, UNPLACED])
    found = np.mean([distances(products(stream(seed, "test"), groups, noise=0.5)[0], labels, 2) for seed in range(600)], axis=0)
    np.testing.assert_allclose(found, [[0, 2], [0, 2], [0, 2], [2, 0], [2, 0], [2, 2]], atol=0.25)


def test_members_are_held_back_no_more_often_than_alpha() -> None:
    """The p-value of a newcomer of a known group: at most 1/(1 + 36) above alpha, and three standard errors."""
    p: list[float] = []
    for seed in range(200):
        groups, labels = scene([0, 1, 2])
        p += list(membership(*products(stream(seed, "test"), groups), labels, K, np.flatnonzero(labels == UNPLACED))[1])
    for alpha in (0.05, 0.2):
        assert np.mean(np.array(p) <= alpha) <= alpha + 3 * np.sqrt(alpha / len(p))


def test_a_joint_test_of_members_is_rejected_no_more_often_than_alpha() -> None:
    rejected = []
    for seed in range(200):
        groups, _ = scene([0, 0, 1, 1, 2])
        made, arrivals = products(stream(seed, "test"), groups)[0], np.arange(36, 41)
        rejected.append(joint_test(made, groups, arrivals, stream(seed, "draws"), 99) <= 0.1)
    assert np.mean(rejected) <= 0.1 + 3 * np.sqrt(0.09 / 200)


def test_residuals_are_those_of_points_without_the_client_itself() -> None:
    """Members, leading arrivals, other arrivals; a cluster of one member leaves its member no residual."""
    rng = stream(0, "test")
    points, noise = rng.standard_normal((13, 5)), rng.random(13) + 0.5
    labels = np.array([0, 0, 0, 1, 1, 2, 0, 1, 1, UNPLACED, 0, 2, 2])
    arrivals, leading = np.array([6, 7, 8, 11, 12]), np.array([6, 7, 11])
    found = residuals_along(points @ points.T, noise, labels, arrivals, leading)
    members = np.setdiff1d(np.flatnonzero(labels != UNPLACED), arrivals)
    for client in range(13):
        kept = members[members != client]
        means = {label: points[kept[labels[kept] == label]].mean(0) for label in set(labels[kept].tolist())}
        if labels[client] not in means:
            assert np.isnan(found[client])
            continue
        own = points[client] - means[labels[client]]
        along = np.mean([points[lead] - means[labels[lead]] for lead in leading if lead != client], axis=0) if 2 in means else None
        spread = noise[client] + noise[kept[labels[kept] == labels[client]]].sum() / (labels[kept] == labels[client]).sum() ** 2
        if along is not None:
            assert found[client] == pytest.approx(own @ along / np.sqrt(spread))


def test_newcomers_join_their_groups_and_an_unseen_group_opens_a_cluster() -> None:
    groups, labels = scene([0, 2, 3, 3, 3, 3, 1, 4])
    found = place(*products(stream(1, "test"), groups), labels, K, stream(2, "test"), alpha=0.05)
    assert found.labels.tolist() == [0, 2, 3, 3, 3, 3, 1, UNPLACED]
    assert found.nearest[[0, 1, 6]].tolist() == [0, 2, 1]


def test_weak_differences_are_recognised_together_only() -> None:
    """Ten clients of an unseen group: alone few are recognised, together most are, and members that come with them mostly are not."""
    alone, together, wrong = list[bool](), list[bool](), list[bool]()
    for seed in range(20):
        groups, labels = scene([3] * 10 + [0, 1, 2])
        made = products(stream(seed, "test"), groups, apart=0.5, noise=0.2)
        found = place(*made, labels, K, stream(seed, "draws"), alpha=0.05)
        alone += list(membership(*made, labels, K, np.arange(36, 46))[1] <= 0.05)
        together += list(~np.isin(found.labels[:10], range(K)))
        wrong += list(~np.isin(found.labels[10:], range(K)))
    assert np.mean(together) >= max(0.6, float(np.mean(alone)) + 0.2)
    assert np.mean(wrong) <= 0.2


def test_members_that_come_with_an_unseen_group_are_held_back_no_more_often_than_alpha() -> None:
    """Strong and weak differences: 480 known clients each, of 24 members a p-value is at least 1/25; and three standard errors."""
    for apart, noise in ((0.5, 0.2), (1.0, 0.15)):
        wrong = list[bool]()
        for seed in range(80):
            groups, labels = scene([3] * 10 + [0, 0, 1, 1, 2, 2], members=8)
            made = products(stream(seed, "test"), groups, apart=apart, noise=noise)
            wrong += list(~np.isin(place(*made, labels, K, stream(seed, "draws"), alpha=0.05).labels[10:], range(K)))
        assert np.mean(wrong) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 480)


def test_a_client_that_is_placed_alone_joins_the_cluster_that_its_group_opens() -> None:
    """Of an unseen group nine are recognised one by one. One has few samples: alone a known cluster has it more often than not."""
    groups, labels = scene([3] * 10)
    noise, kept = np.where(np.arange(46) == 45, 0.6, 0.15), np.r_[0:36, 45]
    alone, together = list[int](), list[int]()
    for seed in range(20):
        halves = np.eye(DIMENSION)[groups][:, None] + noise[:, None, None] * stream(seed, "test").standard_normal((46, 2, DIMENSION))
        made = unbiased_of_folds(Gram.of_vectors(tuple(range(46)), halves))
        alone += place(made.products[np.ix_(kept, kept)], made.traces[kept], labels[:37], K, stream(seed, "t")).labels.tolist()
        found = place(made.products, made.traces, labels, K, stream(seed, "t")).labels
        assert set(found[:9]) == {3}
        together.append(int(found[9]))
    recognised = 1 - np.mean(np.isin(alone, range(K)))
    assert recognised < 0.5
    assert np.mean(np.array(together) == 3) >= recognised + 0.3


def test_a_further_unseen_client_is_recognised_beside_a_group() -> None:
    groups, labels = scene([3] * 10 + [4])
    found = place(*products(stream(1, "test"), groups), labels, K, stream(2, "test"))
    assert found.labels.tolist() == [3] * 10 + [UNPLACED]


def test_a_member_whose_change_was_not_named_hides_no_unseen_group() -> None:
    """A member of a known cluster has the data of the unseen group, so that its distance is as large as that of the arrivals."""
    groups, labels = scene([3] * 10 + [0, 1, 2])
    groups[:2] = 3
    found = place(*products(stream(1, "test"), groups), labels, K, stream(2, "test"))
    assert found.labels.tolist() == [3] * 10 + [0, 1, 2]


def test_two_clients_open_no_cluster_and_two_unseen_groups_open_two() -> None:
    groups, labels = scene([3, 3])
    made = products(stream(3, "test"), groups)
    assert place(*made, labels, K, stream(4, "test")).labels.tolist() == [UNPLACED] * 2
    groups, labels = scene([3, 3, 3, 4, 4, 4, 4])
    made = products(stream(3, "test"), groups)
    opened = agreeing(*made, labels, np.flatnonzero(labels == UNPLACED))
    assert sorted(map(list, opened)) == [[36, 37, 38], [39, 40, 41, 42]]


def test_an_order_of_clients_changes_nothing() -> None:
    groups, labels = scene([0, 3, 3, 3, 1])
    made, noise = products(stream(5, "test"), groups)
    order = np.concatenate([stream(6, "test").permutation(36), np.arange(36, 41)])
    first = place(made, noise, labels, K, stream(7, "test"))
    again = place(made[np.ix_(order, order)], noise[order], labels[order], K, stream(7, "test"))
    np.testing.assert_array_equal(first.labels, again.labels)
    np.testing.assert_allclose(first.p, again.p)
