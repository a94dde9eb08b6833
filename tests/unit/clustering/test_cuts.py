"""Trees and cuts: against scipy and brute force; ties, minimum cohort sizes, newcomers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster import hierarchy
from sklearn.metrics import adjusted_rand_score

from cflpriv.clustering.cuts import (
    LINKAGES,
    Linkage,
    cut_tree,
    gap_ratios,
    join_small,
    linkage_distances,
    linkage_tree,
    ordered_labels,
    silhouettes,
)
from cflpriv.clustering.similarity import SimilarityMatrix
from cflpriv.errors import InputError
from cflpriv.types import Array


def distance(values: Array) -> SimilarityMatrix:
    return SimilarityMatrix(values, tuple(range(len(values))), "test", "distance")


def points(rng: np.random.Generator, n: int) -> SimilarityMatrix:
    x = rng.normal(size=(n, 3))
    return distance(np.linalg.norm(x[:, None] - x[None], axis=2))


def blobs(rng: np.random.Generator, sizes: list[int], spread: float = 0.1) -> tuple[SimilarityMatrix, Array]:
    truth = np.repeat(np.arange(len(sizes)), sizes)
    x = 5.0 * np.eye(len(sizes), 4)[truth] + spread * rng.normal(size=(len(truth), 4))
    return distance(np.linalg.norm(x[:, None] - x[None], axis=2)), truth


@given(st.integers(0, 2**32), st.integers(2, 25), st.sampled_from(LINKAGES), st.floats(0, 4))
@settings(max_examples=100, deadline=None)
def test_threshold_cuts_as_scipy(seed: int, n: int, linkage: Linkage, beta: float) -> None:
    d = points(np.random.default_rng(seed), n)
    tree = linkage_tree(d, linkage)
    cut = cut_tree(tree, d, threshold=beta)
    assert adjusted_rand_score(cut.labels, hierarchy.fcluster(tree, beta, criterion="distance")) == 1.0
    assert cut.k == len(set(cut.labels))


@given(st.integers(0, 2**32), st.integers(2, 25), st.sampled_from(LINKAGES), st.data())
@settings(max_examples=100, deadline=None)
def test_exactly_k_clusters_also_among_ties(seed: int, n: int, linkage: Linkage, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    d = distance(np.ones((n, n)) - np.eye(n)) if seed % 2 else points(rng, n)
    k = data.draw(st.integers(1, n))
    cut = cut_tree(linkage_tree(d, linkage), d, k=k)
    assert cut.k == k == len(set(cut.labels))


def test_beta_zero_leaves_all_alone_and_infinity_joins_all() -> None:
    d = distance(np.zeros((4, 4)))
    tree = linkage_tree(d)
    assert cut_tree(tree, d, threshold=0.0).k == 4
    assert cut_tree(tree, d, threshold=np.inf).k == 1


def test_one_client() -> None:
    d = distance(np.zeros((1, 1)))
    assert cut_tree(linkage_tree(d), d).labels == (0,)


@pytest.mark.parametrize("auto", ["silhouette", "gap"])
def test_automatic_cut_finds_clear_groups(auto: str) -> None:
    d, truth = blobs(np.random.default_rng(1), [5, 8, 6])
    cut = cut_tree(linkage_tree(d), d, auto=auto)  # type: ignore[arg-type]
    assert cut.clear
    assert cut.k == 3
    assert adjusted_rand_score(cut.labels, truth) == 1.0
    tree = linkage_tree(d)
    assert tree[-3, 2] < cut.height < tree[-2, 2]


def test_no_clear_structure_trains_one_cluster_and_says_so() -> None:
    d = points(np.random.default_rng(2), 40)
    cut = cut_tree(linkage_tree(d), d)
    assert not cut.clear
    assert cut.k == 1
    assert "no clear structure" in cut.note
    assert cut.gap_ratio < 2


def test_gap_ratios_by_hand() -> None:
    # four clients: pairs at 1, pairs of pairs at 6
    values = np.array([[0, 1, 6, 6], [1, 0, 6, 6], [6, 6, 0, 2], [6, 6, 2, 0]], dtype=float)
    d = distance(values)
    assert gap_ratios(linkage_tree(d)) == {2: 3.0}
    assert set(silhouettes(linkage_tree(d), d)) == {2}


def test_clients_that_are_not_compared_count_in_the_size_of_a_cluster() -> None:
    labels, values = np.array([0, 0, 1, 2, 2, 2]), np.abs(np.subtract.outer(np.arange(6.0), np.arange(6.0)))
    assert join_small(labels, values, 3).tolist() == [0, 0, 0, 2, 2, 2]
    assert join_small(labels, values, 3, {0: 1, 1: 2}).tolist() == labels.tolist()
    others = {0: 1, 1: 1, 2: 2}
    assert join_small(labels, values, 5, others).tolist() == [0, 0, 0, 2, 2, 2], "those of a joined cluster count in the other"
    assert join_small(labels, values, 6, others).tolist() == [2] * 6


@given(st.integers(0, 2**32), st.integers(4, 30), st.integers(2, 5))
@settings(max_examples=60, deadline=None)
def test_small_clusters_join_until_none_is_left(seed: int, n: int, floor: int) -> None:
    d = points(np.random.default_rng(seed), n)
    cut = cut_tree(linkage_tree(d), d, threshold=1.0, at_least=floor)
    sizes = np.bincount(cut.labels)
    assert (sizes >= floor).all() or len(sizes) == 1
    assert cut.k == len(sizes)


@given(st.integers(0, 2**32), st.integers(3, 20), st.sampled_from(LINKAGES))
@settings(max_examples=100, deadline=None)
def test_newcomer_distance_is_the_height_at_which_it_would_merge(seed: int, n: int, linkage: Linkage) -> None:
    """A newcomer far from everyone merges last, with the whole tree: at exactly its linkage distance to the one cluster of all."""
    rng = np.random.default_rng(seed)
    d = points(rng, n)
    far = 100.0 + rng.random(n)
    values = np.zeros((n + 1, n + 1))
    values[:n, :n] = d.values
    values[n, :n] = values[:n, n] = far
    reach = linkage_distances(linkage_tree(d, linkage), np.zeros(n, dtype=int), far[None], linkage)
    assert reach.shape == (1, 1)
    assert reach[0, 0] == pytest.approx(linkage_tree(distance(values), linkage)[-1, 2])


def test_newcomers_count_in_the_cluster_they_joined() -> None:
    d, truth = blobs(np.random.default_rng(3), [3, 3])
    tree = linkage_tree(d, "weighted")
    to_placed = np.array([[1.0, 1.0, 1.0, 9.0, 9.0, 9.0, 3.0]])
    reach = linkage_distances(tree, np.append(ordered_labels(truth), 0), to_placed, "weighted")
    np.testing.assert_allclose(reach, [[2.0, 9.0]])  # (1 + 3) / 2
    mean = linkage_distances(tree, np.append(ordered_labels(truth), 0), to_placed, "average")
    np.testing.assert_allclose(mean, [[1.5, 9.0]])


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30))
def test_labels_are_ordered_by_first_member(raw: list[int]) -> None:
    labels = ordered_labels(np.array(raw))
    assert adjusted_rand_score(raw, labels) == 1.0
    firsts = [list(labels).index(label) for label in range(labels.max() + 1)]
    assert firsts == sorted(firsts)


def test_bad_input_is_named() -> None:
    d = points(np.random.default_rng(0), 4)
    tree = linkage_tree(d)
    with pytest.raises(InputError, match="k = 5"):
        cut_tree(tree, d, k=5)
    with pytest.raises(InputError, match="not both"):
        cut_tree(tree, d, k=2, threshold=1.0)
    with pytest.raises(InputError, match="'ward'"):
        linkage_tree(d, "ward")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="similarity"):
        linkage_tree(SimilarityMatrix(np.eye(2), (0, 1), "cosine", "similarity"))


def test_rounding_noise_is_no_structure() -> None:
    """Clients with the same data in another order differ by rounding only: one cluster, whatever ratios rounding has."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        noise = np.abs(rng.normal(size=(10, 10))) * 1e-6
        values = np.triu(noise, 1) + np.triu(noise, 1).T
        d = SimilarityMatrix(values, tuple(range(10)), "test", "distance", noise=1e-5)
        cut = cut_tree(linkage_tree(d), d)
        assert (cut.k, cut.clear, cut.gap_ratio) == (1, False, 1.0)
    two = np.full((10, 10), 30.0)
    two[:5, :5] = two[5:, 5:] = values[:5, :5]
    np.fill_diagonal(two, 0.0)
    d = SimilarityMatrix(two, tuple(range(10)), "test", "distance", noise=1e-5)
    assert cut_tree(linkage_tree(d), d).k == 2
