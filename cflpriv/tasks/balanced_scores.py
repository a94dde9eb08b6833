"""Balanced accuracy as a mean over clients, so that secure sums give it: how much each held-out sample counts.

The balanced accuracy of the report is the mean over classes of the share of all clients' samples that is right. A client alone has too few
samples of rare classes for one. So a sample weighs the inverse of how many samples of its class all clients have together, which one secure
sum tells beforehand. A client's score of an option is the weight of its samples that are right, and the sum of these scores, divided by
the sum of the clients' weights, is the balanced accuracy.

Three bounds, fixed before any judged run: a class counts in full from `FULL_CLASS` samples on, and rarer ones in proportion, since a class
of two samples would decide by luck. No client counts for more than `MOST_SAMPLES` samples, nor for more than `HEAVIEST` times what the mean
client would without this bound. With as many samples of each class at each client, all weights are equal.
"""

import numpy as np

from ..types import Array

__all__ = ["FULL_CLASS", "HEAVIEST", "MOST_SAMPLES", "class_masses", "class_weights", "contribution", "sample_weights"]

FULL_CLASS, MOST_SAMPLES, HEAVIEST = 10, 1000, 8


def class_masses(labels: Array, classes: int) -> Array:
    """A client's samples of each class (classes,), in units of `MOST_SAMPLES`, so within 0 to 1."""
    return np.bincount(labels, minlength=classes) / max(len(labels), MOST_SAMPLES)


def class_weights(masses: Array, clients: int) -> Array:
    """The weight of a sample by its class (classes,), from the mean of `masses` (classes,) over so many clients.

    All clients' samples together weigh as much as there are clients.
    """
    counts = np.maximum(masses, 0) * (clients * MOST_SAMPLES)
    weights = 1 / np.maximum(counts, FULL_CLASS)
    return np.asarray(weights * clients / max(float(counts @ weights), np.finfo(np.float64).tiny))


def sample_weights(labels: Array, weights: Array) -> Array:
    """How much each of a client's held-out samples counts (samples,). Without class weights (0,) they share a weight of 1."""
    if not len(weights):
        return np.full(len(labels), 1 / len(labels))
    own = weights[labels] * min(1.0, MOST_SAMPLES / len(labels))
    return np.asarray(own * min(1.0, HEAVIEST / max(float(own.sum()), np.finfo(np.float64).tiny)))


def contribution(right: Array, weights: Array) -> Array:
    """What a client adds to the sum, from which of its samples (options, samples) are right, and their weights (samples,).

    Its weight and its scores (1 + options,), in units of `HEAVIEST`, and the products of these, each pair once.
    """
    values = np.append(weights.sum(), right @ weights) / HEAVIEST
    rows, columns = np.triu_indices(len(values))
    return np.concatenate([values, values[rows] * values[columns]])
