"""Where clients belong: unbiased distances, the level at which members are held back, and clients that are recognised together."""

from collections.abc import Sequence

import numpy as np
import pytest

from cflpriv.clustering.placement import UNPLACED, agreeing, distances, following, joint_test, membership, place
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
        p += list(membership(*products(stream(seed, "test"), groups), labels, K)[1])
    for alpha in (0.05, 0.2):
        assert np.mean(np.array(p) <= alpha) <= alpha + 3 * np.sqrt(alpha / len(p))


def test_a_joint_test_of_members_is_rejected_no_more_often_than_alpha() -> None:
    rejected, followed = list[bool](), list[bool]()
    for seed in range(200):
        groups, _ = scene([0, 0, 1, 1, 2])
        made, arrivals = products(stream(seed, "test"), groups)[0], np.arange(36, 41)
        rejected.append(joint_test(made, groups, arrivals, stream(seed, "draws"), 99) <= 0.1)
        followed += list(following(made, groups, arrivals, arrivals) <= 0.1)
    assert np.mean(rejected) <= 0.1 + 3 * np.sqrt(0.09 / 200)
    assert np.mean(followed) <= 0.1 + 3 * np.sqrt(0.09 / 1000)


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
        alone += list(found.p[:10] <= 0.05)
        together += list(~np.isin(found.labels[:10], range(K)))
        wrong += list(~np.isin(found.labels[10:], range(K)))
    assert np.mean(together) >= max(0.6, float(np.mean(alone)) + 0.2)
    assert np.mean(wrong) <= 0.2


def test_a_client_that_is_placed_alone_joins_the_cluster_that_its_group_opens() -> None:
    """Of an unseen group nine are recognised one by one, and one lies nearer to a known cluster, in which it would have been put alone."""
    groups, labels = scene([3] * 10)
    made, noise = products(stream(1, "test"), groups)
    noise = noise.copy()
    noise[-1] *= 100  # so that its distance is nothing, measured by its noise
    alone = place(
        np.delete(np.delete(made, range(36, 45), 0), range(36, 45), 1), np.delete(noise, range(36, 45)), labels[:37], K, stream(2, "t")
    )
    assert alone.labels[0] in range(K)
    assert place(made, noise, labels, K, stream(2, "t")).labels.tolist() == [3] * 10


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
