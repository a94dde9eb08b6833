"""A client's own mixture of models: weights by expectation maximisation on held-out samples, drawn to weights that all clients share.

The likelihood of a sample is Σ_k w_k p_k(y | x). The shared weights maximise the mean log likelihood over clients, each counted once: a
step is the mean over clients of `responsibilities`, one secure sum of K numbers. A client's own weights start there, and the shared
weights count as much as `STRENGTH` samples (a Dirichlet prior), so small clients stay near to them.
"""

import numpy as np

from ..randomness import Stream
from ..types import Array

__all__ = [
    "SHARED_STEPS", "STRENGTH", "cross_fitted", "floored", "likelihoods", "mixed", "own_weights", "responsibilities",
]  # fmt: skip

STRENGTH = 10.0
"""The shared weights count as so many samples of a client."""
SHARED_STEPS, OWN_STEPS = 16, 40
UNIFORM = 0.05
"""The part of the shared weights that is the same for all models: no model is excluded at a client by what is good for the others."""
LEAST = 1e-4
"""A model's probability of a label counts as at least this, so a single sample excludes no model."""
FOLDS = 5


def likelihoods(probabilities: Array, labels: Array) -> Array:
    """The probability of each sample's label by each model, (models, samples), of probabilities (models, samples, classes)."""
    return np.asarray(np.maximum(probabilities[:, np.arange(len(labels)), labels], LEAST))


def responsibilities(likelihood: Array, weights: Array, counted: Array) -> Array:
    """The mean over samples (models,) of each model's share of a sample's likelihood (models, samples) under `weights` (models,).

    counted: how much each sample counts (samples,).
    """
    shares = weights[:, None] * likelihood
    return np.asarray((shares / shares.sum(0)) @ counted / max(float(counted.sum()), np.finfo(np.float64).tiny))


def floored(weights: Array) -> Array:
    """Shared weights (models,) with the part `UNIFORM` divided evenly."""
    return (1 - UNIFORM) * weights + UNIFORM / len(weights)


def own_weights(likelihood: Array, shared: Array, counted: Array) -> Array:
    """A client's weights (models,): the maximum a posteriori from its likelihoods (models, samples) and the `shared` weights (models,).

    counted: as in `responsibilities`; together the samples count as many as they are.
    """
    weights, samples = shared, likelihood.shape[1]
    for _ in range(OWN_STEPS if samples else 0):
        weights = (samples * responsibilities(likelihood, weights, counted) + STRENGTH * shared) / (samples + STRENGTH)
    return weights


def mixed(probabilities: Array, weights: Array) -> Array:
    """The mixture's probabilities (samples, classes) of the models' (models, samples, classes)."""
    return np.asarray(np.einsum("k,knc->nc", weights, probabilities))


def cross_fitted(probabilities: Array, labels: Array, shared: Array, counted: Array, draws: Stream) -> Array:
    """Which held-out samples (samples,) a client's mixture predicts right; the weights for each fifth are from the other samples.

    counted: as in `responsibilities`.
    """
    likelihood, parts = likelihoods(probabilities, labels), draws.permutation(len(labels)) % FOLDS
    right = np.zeros(len(labels), dtype=bool)
    for part in np.unique(parts):
        inside, rest = np.flatnonzero(parts == part), np.flatnonzero(parts != part)
        weights = own_weights(likelihood[:, rest], shared, counted[rest])
        right[inside] = mixed(probabilities[:, inside], weights).argmax(1) == labels[inside]
    return right
