"""Scores by class: they are scikit-learn's, and a warning comes for a model that learned nothing, not for another."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, f1_score, recall_score

from cflpriv.class_counts import ERROR_RATE, FULL, LEARNED, MARGINS, ClassCounts, as_counts, counts_shape, counts_these, pooled, useless
from cflpriv.types import Array


def counted(matrix: Array) -> ClassCounts:
    counts = as_counts(matrix)
    assert counts is not None
    return counts


@given(arrays(np.int64, st.integers(1, 6).map(lambda k: (k, k)), elements=st.integers(0, 9)).filter(lambda made: made.sum() > 0))
def test_scores_are_those_of_scikit_learn(matrix: Array) -> None:
    counts = counted(matrix)
    pairs = counts.pairs()
    assert pairs is not None
    predictions, labels = pairs
    assert len(labels) == matrix.sum()
    np.testing.assert_array_equal(confusion_matrix(labels, predictions, labels=range(len(matrix))), matrix)
    occurring = np.unique(labels)
    recalls = recall_score(labels, predictions, average=None, labels=occurring, zero_division=0.0)
    np.testing.assert_allclose(counts.recalls[occurring], recalls)
    assert counts.balanced_accuracy == pytest.approx(np.mean(recalls))
    if len(occurring) > 1 and set(predictions) <= set(occurring):
        assert counts.balanced_accuracy == pytest.approx(balanced_accuracy_score(labels, predictions))
    assert counts.macro_f1 == pytest.approx(f1_score(labels, predictions, average="macro"))


@given(arrays(np.int64, (4, 4), elements=st.integers(0, 9)).filter(lambda made: made.sum() > 0))
def test_three_rows_have_the_same_scores_as_the_matrix(matrix: Array) -> None:
    wide = np.zeros((3, FULL + 1))
    wide[:, :4] = matrix.sum(1), matrix.sum(0), np.diag(matrix)
    whole, rows = counted(matrix), counted(wide)
    assert rows.balanced_accuracy == pytest.approx(whole.balanced_accuracy)
    assert rows.macro_f1 == pytest.approx(whole.macro_f1)
    assert (rows.constant, rows.shown_useless) == (whole.constant, whole.shown_useless)
    assert rows.pairs() is None


def test_counts_of_several_clients_add_up_and_none_are_made_up() -> None:
    one, two = np.eye(2), np.array([[0.0, 3.0], [1.0, 0.0]])
    np.testing.assert_array_equal(pooled([{"confusion": one}, {"confusion": two}]), one + two)
    assert pooled([]) is None
    assert pooled([{"confusion": one}, {"count": np.array(1.0)}]) is None
    assert as_counts(np.zeros((2, 2))) is None
    assert [counts_shape(k) for k in (1, FULL, FULL + 1, MARGINS, MARGINS + 1)] == [
        (1, 1),
        (FULL, FULL),
        (3, FULL + 1),
        (3, MARGINS),
        (0, 0),
    ]


def test_what_another_party_calls_counts_must_agree_with_its_other_numbers() -> None:
    honest = np.array([[5.0, 1.0], [2.0, 4.0]])
    assert counts_these(honest, 9.0, 12.0, 2)
    assert counts_these(np.zeros((2, 2)), 0.0, 0.0, 2)
    for wrong in (honest[:1], honest[None], honest - 3, honest + 0.5, honest * np.nan, honest * 2, honest[:, ::-1], np.zeros((2, 2))):
        assert not counts_these(wrong, 9.0, 12.0, 2)
    assert not counts_these(np.zeros((3, 2)), 0.0, 0.0, 2)
    wide = np.zeros((3, FULL + 1))
    wide[:, 0], wide[2, 1] = (5, 5, 4), 1
    assert not counts_these(wide, 5.0, 5.0, FULL + 1), "right predictions of a class without samples"


def test_a_constant_prediction_is_named_with_its_class_and_figures() -> None:
    counts = counted(np.array([[820.0, 0.0], [180.0, 0.0]]))
    line = useless(counts, "the model", ("normal", "fall"), 0)
    assert "predicts class 'normal' for all 1000 test samples, and 180 are of other classes" in line
    assert "accuracy 82.0%" in line
    assert "balanced accuracy 50.0%" in line
    assert useless(counted(np.array([[820.0, 0.0], [0.0, 0.0]])), "the model") == "", "one class occurs, and its prediction is right"


def of_recalls(recalls: Array, samples: Array, rng: np.random.Generator) -> ClassCounts:
    """Counts of a model of two classes that is right with these probabilities."""
    right = rng.binomial(samples, recalls)
    return counted(np.array([[right[0], samples[0] - right[0]], [samples[1] - right[1], right[1]]], dtype=np.float64))


@pytest.mark.parametrize("samples", [(20, 5), *(pytest.param(many, marks=pytest.mark.slow) for many in ((200, 40), (4000, 900)))])
@pytest.mark.parametrize("recalls", [(0.5, 0.6), (0.97, 0.13), (0.999, 0.101), (0.6, 0.5)])
def test_the_warning_keeps_its_error_rate_at_models_that_learned_just_enough(
    samples: tuple[int, int], recalls: tuple[float, float]
) -> None:
    assert np.mean(recalls) >= 0.5 + LEARNED / 2
    rng = np.random.default_rng(0)
    warned = [of_recalls(np.array(recalls), np.array(samples), rng).shown_useless for _ in range(4000)]
    assert np.mean(warned) <= ERROR_RATE


def test_models_that_guess_are_flagged_where_there_are_samples_enough_and_good_ones_never() -> None:
    rng = np.random.default_rng(1)
    samples = np.array([4100, 900])
    for recalls in ((0.82, 0.18), (0.99, 0.01), (0.5, 0.5), (0.3, 0.68)):
        lines = [useless(of_recalls(np.array(recalls), samples, rng), "the model", (), 0) for _ in range(100)]
        assert np.mean(["is hardly better than" in line for line in lines]) > 0.9, recalls
    for recalls in ((0.95, 0.4), (0.6, 0.6), (0.999, 0.2)):
        assert not any(useless(of_recalls(np.array(recalls), samples, rng), "the model", (), 0) for _ in range(100))
