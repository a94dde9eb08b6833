"""A strategy's scores by class beside scikit-learn's, and how much noise there is beside updates."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from sklearn.metrics import balanced_accuracy_score, confusion_matrix, f1_score, recall_score

from cflpriv.errors import InputError
from cflpriv.flower.scores import clipped_share, noise_over_run, noise_to_signal, useless_models, with_class_scores


@pytest.mark.parametrize("k", [2, 3, 7])
def test_scores_are_those_of_scikit_learn(k: int) -> None:
    draws = np.random.default_rng(k)
    truth = draws.choice(k, 500, p=draws.dirichlet([1.0] * k))
    found = np.where(draws.random(500) < 0.6, truth, draws.integers(0, k, 500))
    counts = confusion_matrix(truth, found, labels=range(k)).ravel().tolist()
    scores = with_class_scores({"confusion": counts, "recall": "its own"})
    assert scores["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(truth, found))
    assert scores["macro_f1"] == pytest.approx(f1_score(truth, found, average="macro"))
    assert scores["majority_accuracy"] == pytest.approx(np.bincount(truth).max() / 500)
    assert scores["recall"] == "its own"
    assert with_class_scores({"confusion": counts})["recall"] == pytest.approx(recall_score(truth, found, average=None).tolist())
    assert with_class_scores({"accuracy": 0.5}) == {"accuracy": 0.5}


@pytest.mark.parametrize("listed", [[1, 2, 3], [1], [0, 0, 0, 0], [1, -1, 2, 3], [1, 2, 3, float("nan")]])
def test_what_is_no_confusion_is_refused(listed: list[float]) -> None:
    with pytest.raises(InputError, match=r"evaluate_fn: 'confusion' has \d numbers"):
        with_class_scores({"confusion": listed})


def test_models_that_learned_nothing_are_named() -> None:
    assert not useless_models([{"confusion": [80, 5, 6, 70]}, None, {"accuracy": 0.1}])
    (words,) = useless_models([{"confusion": [80, 5, 6, 70]}, {"confusion": [0, 90, 0, 160]}])
    assert words.startswith("the model of cluster 1 predicts class 1 for all 250 test samples")


def test_noise_beside_an_update_is_what_trials_have() -> None:
    """The loss of a client falls by u·m to first order, and noise n changes it by u·n: its deviation beside m·m, within 6 errors."""
    draws = np.random.default_rng(0)
    update, own = draws.normal(size=300), draws.normal(size=300)
    own *= 2.0 / np.linalg.norm(own)
    changed = (0.7 * draws.normal(size=(20_000, 300))) @ own
    ratio = noise_to_signal(update, 0.7, 2.0)
    assert abs(changed.std() / float(update @ update) / ratio - 1) < 6 / np.sqrt(2 * 20_000)


def test_noise_over_a_run() -> None:
    assert noise_over_run([]) == (None, "")
    ratio, words = noise_over_run([4.0] * 16)
    assert ratio == pytest.approx(1.0)
    assert not words
    assert noise_over_run([16.0] * 4)[1].startswith("noise swamps the signal: over the run the noise changed the loss of a client 8 times")


def test_the_share_of_clipped_updates() -> None:
    assert clipped_share([], 1.0) is None
    assert clipped_share([0.5, 1.0, 1.0 - 1e-6, 0.9], 1.0) == 0.5
