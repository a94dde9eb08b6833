"""Weights of held-out samples: sums over clients give the balanced accuracy of all samples together."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score

from cflpriv.advice.verdict import Moments, moments_of
from cflpriv.tasks.balanced_scores import (
    FULL_CLASS,
    HEAVIEST,
    MOST_SAMPLES,
    class_masses,
    class_weights,
    contribution,
    sample_weights,
)
from cflpriv.types import Array


def pooled(labels: list[Array], predictions: list[Array], classes: int) -> Moments:
    """The moments of clients' scores (one option), by way of the two sums that leave them."""
    weights = class_weights(np.mean([class_masses(own, classes) for own in labels], axis=0), len(labels))
    sums = [contribution((found == own)[None], sample_weights(own, weights)) for own, found in zip(labels, predictions, strict=True)]
    return moments_of(("one",), np.mean(sums, axis=0), len(labels))


@given(st.integers(2, 6), st.integers(2, 12), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_the_score_is_the_balanced_accuracy_of_all_samples(classes: int, clients: int, seed: int) -> None:
    """Clients of unequal size, some without a sample of some class; as scikit-learn has it. No class is rare, no client is heavy."""
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.ones(classes))
    labels = [rng.choice(classes, size=rng.integers(5, 60), p=shares) for _ in range(clients)]
    labels[0] = np.append(labels[0], np.repeat(np.arange(classes), FULL_CLASS))
    counts = np.bincount(np.concatenate(labels), minlength=classes)
    assume(max(float(np.bincount(own, minlength=classes) @ (clients / classes / counts)) for own in labels) < HEAVIEST)
    predictions = [np.where(rng.random(len(own)) < 0.6, own, rng.integers(0, classes, len(own))) for own in labels]
    moments = pooled(labels, predictions, classes)
    assert moments.means[0] == pytest.approx(balanced_accuracy_score(np.concatenate(labels), np.concatenate(predictions)))


@given(st.lists(st.integers(0, 10**5), min_size=2, max_size=8), st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_all_samples_weigh_as_much_as_there_are_clients(counts: list[int], clients: int) -> None:
    assume(sum(counts) > 0)
    weights = class_weights(np.array(counts) / (clients * MOST_SAMPLES), clients)
    assert float(np.array(counts) @ weights) == pytest.approx(clients)
    assert (weights >= 0).all()


def test_a_constant_answer_scores_one_over_the_number_of_classes() -> None:
    """82 of 100 samples are of one class: plain accuracy would be .82."""
    labels = [np.repeat([0, 1, 2], [82, 10, 8]) for _ in range(10)]
    assert pooled(labels, [np.zeros_like(own) for own in labels], 3).means[0] == pytest.approx(1 / 3)


def test_one_sample_of_a_class_does_not_decide() -> None:
    """One of 401 samples is of another class; it counts as a tenth of a class, not as half of the score."""
    labels = [np.zeros(100, dtype=int) for _ in range(4)]
    labels[0] = np.append(labels[0], 1)
    score = pooled(labels, [np.zeros_like(own) for own in labels], 2).means[0]
    assert score == pytest.approx(1 / (1 + 1 / FULL_CLASS))


def test_no_client_counts_for_more_than_the_bounds() -> None:
    """A client of a hundred times as many samples, and one that alone has a class."""
    large = np.zeros(100 * MOST_SAMPLES, dtype=int)
    assert class_masses(large, 2).tolist() == [1.0, 0.0]
    assert sample_weights(large, np.array([0.001, 0.0])).sum() == pytest.approx(1.0)
    assert sample_weights(np.ones(50, dtype=int), np.array([0.1, 5.0])).sum() == pytest.approx(HEAVIEST)
    sent = contribution(np.ones((4, 50)), sample_weights(np.ones(50, dtype=int), np.array([0.1, 5.0])))
    assert (sent >= 0).all()
    assert (sent <= 1 + 1e-12).all()


def test_without_classes_clients_weigh_equally() -> None:
    assert sample_weights(np.array([3, 3, 7]), np.zeros(0)).tolist() == pytest.approx([1 / 3] * 3)
