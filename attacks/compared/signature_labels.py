"""Mean images of signatures with hidden coordinates: from inner products to label sets, from label sets to auxiliary images.

Source: an orthonormal transform keeps all inner products, and `gram_geometry` reads label sets off inner products with no known client. The
guess of a client's mean image is the mean auxiliary image of its labels. `gram_geometry` scores label sets; this module scores images.

What it proves: also under a shared rotation, a server with auxiliary data has pictures of clients' average data. What it does not prove:
anything that a client's labels do not determine. Clients with all labels have no label set to find, so their images are not attempted. All
labels are named at once, so a wrong naming makes the images of all clients wrong together. Signatures of two halves carry singular values;
the attack names their labels in most runs. It named the labels of orthonormal rows (PACFL with `cut = "silhouette"`) in none of five runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...randomness import Stream, stream
from ...types import Array
from ..figures.leakage import DEALS, Case, Cell, Prior, cell, cosine, psnr_db, ssim
from ..figures.significance import chance, chance_of_matching, power
from .gram_geometry import ComparedProducts, guess

__all__ = ["COMPARISONS", "IMAGE_MARGIN", "cells_of_labels", "images_of_label_sets"]

COMPARISONS: Mapping[str, Callable[[Array, Array], float]] = {
    "mean_image_cosine": cosine, "mean_image_psnr_db": psnr_db, "mean_image_ssim": ssim,
}  # fmt: skip
IMAGE_MARGIN = {"mean_image_cosine": 0.01, "mean_image_psnr_db": 1.0, "mean_image_ssim": 0.02}


def images_of_label_sets(x: Array, y: Array, label_sets: Sequence[frozenset[int]]) -> Array:
    """The mean image (n, *shape) of the samples of each of n label sets, from samples (m, *shape) with labels (m,); zero without any."""
    labels = sorted(set().union(*label_sets))
    sums = np.stack([x[y == label].sum(axis=0, dtype=np.float64) for label in labels])
    counts = np.array([(y == label).sum() for label in labels], np.float64)
    members = np.array([[float(label in label_set) for label in labels] for label_set in label_sets])
    held = np.maximum(members @ counts, 1.0)
    return np.asarray((members @ sums.reshape(len(labels), -1)) / held[:, None]).reshape(len(members), *x.shape[1:])


def chance_of_renamed(label_sets: Sequence[frozenset[int]], images: Array, prior: Prior, rng: Stream) -> float:
    """How probable it is that `found` under a random renaming of labels gives images as near to `images` (n, *shape), by their mean cosine.

    Labels are named all at once, so one lucky name makes many clients right together.
    """
    labels = np.unique(prior.y)
    sums = np.stack([prior.x[prior.y == label].sum(axis=0, dtype=np.float64).ravel() for label in labels])
    members = np.array([[float(label in label_set) for label in labels] for label_set in label_sets])
    truth = images.reshape(len(images), -1) / np.linalg.norm(images.reshape(len(images), -1), axis=1, keepdims=True)

    def nearness(renamed: Array) -> float:
        made = renamed @ sums
        return float(((made * truth).sum(axis=1) / np.linalg.norm(made, axis=1)).sum())

    reached = nearness(members) - 1e-9
    return (1 + sum(nearness(members[:, rng.permutation(len(labels))]) >= reached for _ in range(DEALS))) / (1 + DEALS)


def cells_of_labels(
    case: Case, name: str, seen: ComparedProducts, in_the_clear: Mapping[int, Array]
) -> tuple[list[Cell], dict[str, Array]]:
    """Figures of mean images by way of label sets, and the arrays for a report.

    The reference is the same attack on the inner products of clear signatures. Whether a gain is chance is asked three times, and the
    largest p counts: by client, of label sets renamed at random, and of the same images dealt to the clients at random. `in_the_clear`
    are clients' images as their clear signatures show them, for the note.
    """
    prior, judged = case.prior, seen.judged
    truth = np.stack([case.truth.mean_images[client] for client in judged])
    blank = np.broadcast_to(prior.x.mean(axis=0, dtype=np.float64), truth.shape)
    made, renamed = [], []
    for products, templates in ((seen.observed, seen.templates), (seen.reference, seen.plain)):
        guessed = guess(products, prior, {}, templates, case.seed).label_sets
        sets = [guessed[client] for client in judged]
        made.append(images_of_label_sets(prior.x, prior.y, sets))
        renamed.append(chance_of_renamed(sets, truth, prior, stream(case.seed, "labels of images renamed")))
    clear = np.stack([in_the_clear[client] for client in judged])
    source = "label sets from inner products, with no known client, then the mean auxiliary image of these labels"
    figures = []
    for metric, compare in COMPARISONS.items():
        scored, direct = _scores(compare, truth, [made[0], blank, made[1]]), _scores(compare, truth, [clear])
        if np.isnan(scored).any():
            continue  # not images, or too small
        margin = IMAGE_MARGIN[metric]
        chances = [
            max(p, chance(own, scored[1], margin), _chance_of_deals(compare, truth, images, stream(case.seed, "images dealt again")))
            for p, own, images in zip(renamed, (scored[0], scored[2]), made, strict=True)
        ]
        note = f"{source}; signatures in the clear give {direct.mean():.3f}; {prior.description}; baseline: the mean auxiliary image"
        figure = cell(case, name, metric, *scored, margin=margin, note=note, chances=(chances[0], chances[1]))
        figures.append(replace(figure, power=power(scored[0], scored[1], scored[2], scored[1], margin)))
    return figures, {"clients": np.array(judged), "truth": truth, "recovered": made[0], "baseline": blank[0]}


def _scores(compare: Callable[[Array, Array], float], truth: Array, guesses: Sequence[Array]) -> Array:
    """By guess and client, (g, n)."""
    return np.array([[compare(real, own) for real, own in zip(truth, images, strict=True)] for images in guesses])


def _chance_of_deals(compare: Callable[[Array, Array], float], truth: Array, images: Array, rng: Stream) -> float:
    """How probable it is that the same images dealt to the clients at random are as near."""
    return chance_of_matching(-np.array([[compare(real, own) for real in truth] for own in images]), rng)
