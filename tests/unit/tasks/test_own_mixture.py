"""A client's own mixture of models: expectation maximisation, its prior, and cross-fitting."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from cflpriv.tasks.own_mixture import STRENGTH, cross_fitted, floored, likelihoods, mixed, own_weights, responsibilities
from cflpriv.types import Array


def random_probabilities(seed: int, models: int = 3, samples: int = 30, classes: int = 4) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.ones(classes), (models, samples)), rng.integers(0, classes, samples)


@given(st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_a_step_of_the_shared_weights_never_lowers_the_likelihood(seed: int) -> None:
    """Of samples that count as they like, and clients alike."""
    clients = [likelihoods(*random_probabilities(seed + i)) for i in range(4)]
    counted = [np.random.default_rng(seed + i).random(30) for i in range(4)]
    weights = np.full(3, 1 / 3)
    before = -np.inf
    for _ in range(10):
        value = float(np.mean([np.average(np.log(weights @ client), weights=own) for client, own in zip(clients, counted, strict=True)]))
        assert value >= before - 1e-12
        steps = [responsibilities(client, weights, own) for client, own in zip(clients, counted, strict=True)]
        before, weights = value, np.mean(steps, axis=0)
        assert weights.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("counted", [np.ones(30), np.linspace(0.1, 4, 30)])
def test_own_weights_are_the_most_probable_under_the_prior(counted: Array) -> None:
    likelihood, shared = likelihoods(*random_probabilities(5)), np.array([0.5, 0.3, 0.2])

    def loss(logits: Array) -> float:
        weights = np.exp(logits) / np.exp(logits).sum()
        return -float(np.log(weights @ likelihood) @ counted / counted.mean() + STRENGTH * (shared * np.log(weights)).sum())

    best = minimize(loss, np.zeros(3)).x
    assert own_weights(likelihood, shared, counted) == pytest.approx(np.exp(best) / np.exp(best).sum(), abs=1e-3)


def test_small_clients_lean_on_the_shared_weights_and_large_ones_do_not() -> None:
    shared = np.array([0.5, 0.5])
    good = np.array([[0.9], [0.1]])
    few, many = (own_weights(np.tile(good, size), shared, np.ones(size)) for size in (2, 2000))
    assert few[0] < 0.7 < 0.97 < many[0]
    assert own_weights(np.zeros((2, 0)), shared, np.zeros(0)) == pytest.approx(shared)


def test_a_mixture_is_a_distribution_and_no_model_is_excluded() -> None:
    probabilities, _ = random_probabilities(1)
    weights = floored(np.array([1.0, 0.0, 0.0]))
    assert weights.min() > 0.01
    assert mixed(probabilities, weights).sum(1) == pytest.approx(np.ones(30))


def test_cross_fitting_finds_nothing_in_noise() -> None:
    """Models that know nothing of the labels: weights that were fitted to the scored samples would look better than chance."""
    right = []
    for seed in range(40):
        probabilities, labels = random_probabilities(seed, models=8, samples=25)
        right.append(cross_fitted(probabilities, labels, np.full(8, 1 / 8), np.ones(25), np.random.default_rng(seed)))
    assert np.mean(right) == pytest.approx(0.25, abs=0.045)  # three standard errors of 1,000 labels


def test_cross_fitting_finds_the_right_model() -> None:
    _, labels = random_probabilities(2, samples=60)
    perfect, none = np.eye(4)[labels], np.full((60, 4), 0.25)
    assert cross_fitted(np.stack([none, perfect]), labels, np.array([0.5, 0.5]), np.ones(60), np.random.default_rng(0)).all()
