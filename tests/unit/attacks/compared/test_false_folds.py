"""Clients that send false halves: what lies are, and that one noisy liar hides no groups."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.false_folds import found
from cflpriv.attacks.compared.false_folds import LIES, ROOM, false_folds
from cflpriv.clustering.scores import ari
from cflpriv.clustering.similarity import Gram
from cflpriv.clustering.unbiased_gram import NOISIER, bounded, unbiased_of_folds
from cflpriv.types import Array

GROUPS = [i % 3 for i in range(18)]


def folds_of_clients(seed: int = 0) -> Array:
    """Three groups far apart, as short beside the bound as balanced folds of real data are: noise traces about .01."""
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(3, 50))
    means *= 0.15 / np.linalg.norm(means, axis=1, keepdims=True)
    return np.asarray(means[GROUPS][:, None] + rng.normal(size=(18, 2, 50)) * np.sqrt(2 * 0.008 / 50))


@settings(max_examples=30, deadline=None)
@given(lie=st.sampled_from(sorted(LIES)), liars=st.integers(0, 5), seed=st.integers(0, 99), within=st.sampled_from([0.0, NOISIER]))
def test_honest_folds_are_left_alone_and_lies_keep_to_limits(lie: str, liars: int, seed: int, within: float) -> None:
    folds, rng = folds_of_clients(seed), np.random.default_rng(seed)
    chosen = rng.permutation(len(folds))[:liars]
    sent = false_folds(folds, GROUPS, chosen, lie, rng, within)
    honest = np.setdiff1d(np.arange(len(folds)), chosen)
    np.testing.assert_array_equal(sent[honest], folds[honest])
    assert sent.shape == folds.shape
    if within:
        gram = Gram.of_vectors(range(len(sent)), sent)
        assert bounded(gram) is gram, "nothing is scaled"
        assert not np.isin(unbiased_of_folds(gram).usable()[2], chosen).any(), "no liar is set aside"
    elif lie != "long":
        assert ((sent[chosen] ** 2).sum(2) < ROOM + 1e-6).all()


@pytest.mark.parametrize("lie", ["noisy", "noisy together", "antipodal"])
def test_one_noisy_liar_hides_no_groups(lie: str) -> None:
    """Three groups of six that the test finds without liars."""
    folds, rng = folds_of_clients(), np.random.default_rng(0)
    honest = np.arange(1, 18)
    truth = [GROUPS[i] for i in honest]
    assert ari(GROUPS, found(folds, 0)[0].tolist()) == 1.0
    sent = false_folds(folds, GROUPS, [0], lie, rng)
    assert ari(truth, found(sent, 0)[0][honest].tolist()) == 1.0


def test_clients_with_four_times_more_or_fewer_samples_are_tested() -> None:
    """Traces go with 1/n; among few samples they vary, here by 20 %."""
    rng, sizes = np.random.default_rng(0), np.array([100] * 10 + [25, 400])
    folds = rng.normal(size=(12, 2, 50)) * np.sqrt(2 * 0.8 / (50 * sizes))[:, None, None]
    assert len(unbiased_of_folds(Gram.of_vectors(range(12), folds)).usable()[2]) == 0
