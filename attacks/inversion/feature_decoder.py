"""Feature decoder: images from the features that a network's first linear layer takes.

Source: exact features by the closed form (Geiping et al. 2020, Prop. 3.1) or SPEAR (Dimitrov et al. 2024), from the gradient of that layer;
images by ridge regression on auxiliary images at the public parameters, with the penalty by generalised cross-validation (Golub, Heath &
Wahba 1979). Then the images are refined: the features of an image are a public function of it, so the most probable image with nearly
these features is sought, under a normal distribution of images with the auxiliary mean and covariance, and pixels in [0, 1], by L-BFGS.
Inverting features with a prior is Mahendran & Vedaldi 2015; the prior here is fitted, not total variation.

What it proves: convolutions, ReLU and pooling before a linear layer do not hide single images, where the optimisation on gradients
recovers nothing (`gradient_inversion`). What it does not: images come out the worse, the less the auxiliary data are like them. Features
are exact for one step; over several they are a weighted mean over steps, in which the layers before move.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from ...engine.device import placed, tensor
from ...engine.models import Model
from ...errors import InputError
from ...types import Array
from .closed_form import LinearLayer, layers_of
from .lbfgs import minimise

__all__ = ["Decoder", "decode_linearly", "decode_features", "features_of", "fit_decoder", "normal_images"]

PENALTIES = np.logspace(-8, 2, 41)
"""Ridge penalties tried, as multiples of the mean squared singular value of the features."""
WEIGHT = 300.0
"""Weight of the features' relative squared error beside the prior's squared deviations, which are about one a dimension."""
BOX = 30.0
"""Weight of pixels outside [0, 1], squared."""
RIDGE_OF_PRIOR = 1e-4
"""Variance that every direction of pixel space has at least."""
MOST_PIXELS = 1024
"""Images with more pixels are sought among combinations of so many auxiliary images."""
ITERATIONS = 60
AT_ONCE = 256


@dataclass(frozen=True, eq=False)
class Decoder:
    """Images ≈ `image` (p,) + (features − `feature` (f,)) @ `matrix` (f, p)."""

    feature: Array
    image: Array
    matrix: Array


# --- the mathematics, for features from anywhere ------------------------------------------------------------------------------------


def fit_decoder(features: Array, images: Array) -> Decoder:
    """Ridge regression from features (k, f) to images (k, p). Raises `InputError` for fewer than three pairs or unequal numbers."""
    x, y = np.asarray(features, np.float64), np.asarray(images, np.float64).reshape(len(images), -1)
    if len(x) != len(y) or len(x) < 3:
        raise InputError(f"features: {len(x)} rows for {len(y)} images; expected as many of both, 3 at least")
    feature, image = x.mean(axis=0), y.mean(axis=0)
    x, y = x - feature, y - image
    # singular values s and directions V of x, by the smaller of its two Gram matrices
    squares, directions = np.linalg.eigh(x.T @ x if x.shape[1] <= len(x) else x @ x.T)
    kept = squares > 1e-10 * max(float(squares.max(initial=0.0)), 1e-300)
    squares, directions = squares[kept], directions[:, kept]
    if x.shape[1] > len(x):
        directions = x.T @ directions / np.sqrt(squares)
    along = directions.T @ (x.T @ y)
    power, rest = np.square(along).sum(axis=1) / squares, float(np.square(y).sum())
    scale = float(squares.mean()) if len(squares) else 1.0

    def error(penalty: float) -> float:
        share = squares / (squares + penalty * scale)
        freedom = len(x) - 1 - float(share.sum())  # one is the mean's
        return (rest - float(((2 - share) * share) @ power)) / freedom**2 if freedom > 1 else np.inf

    penalty = min(PENALTIES, key=error) * scale
    return Decoder(feature, image, (directions / (squares + penalty)) @ along)


def decode_linearly(decoder: Decoder, features: Array) -> Array:
    """Images (n, p), not clipped, from features (n, f)."""
    return np.asarray(decoder.image + (features - decoder.feature) @ decoder.matrix)


def features_of(model: Model, vector: Array, layer: LinearLayer, x: Array) -> Array:
    """The input (k, f) of the first linear layer for samples (k, *shape), float64."""
    before = _before(model, vector, layer)
    with torch.no_grad():
        return np.concatenate([before(tensor(part)).cpu().numpy() for part in np.split(_double(x), range(AT_ONCE, len(x), AT_ONCE))])


def decode_features(model: Model, vector: Array, layer: LinearLayer, features: Array, x: Array, *, iterations: int = ITERATIONS) -> Array:
    """Images (n, *shape) in [0, 1] with nearly the `features` (n, f) at the parameters `vector` (d,), by auxiliary samples `x` (k, *shape).

    `iterations` of the refinement, 0 for the regression alone.
    """
    known = features_of(model, vector, layer, x)
    first = decode_linearly(fit_decoder(known, x), features)
    if iterations:
        first = _refined(_before(model, vector, layer), known.var(axis=0), features, _double(x), first, iterations)
    return np.asarray(np.clip(first, 0.0, 1.0).reshape(len(features), *model.shape))


def _refined(before: nn.Module, spread: Array, features: Array, x: Array, first: Array, iterations: int) -> Array:
    """The most probable images (n, p) with nearly these features, sought from `first` (n, p) on."""
    mean, directions, deviations = normal_images(x.reshape(len(x), -1))
    root, middle, aim = (tensor(values) for values in (directions * deviations, mean, features))
    begin = tensor((first - mean) @ (directions / deviations))  # image = mean + root z, z standard normal
    weight = WEIGHT * len(mean) / max(float(spread.sum()), 1e-300)

    def objective(z: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        point = z.detach().requires_grad_(True)
        pixels = middle + point @ root.T
        apart = (before(pixels.view(-1, *x.shape[1:])) - aim[rows]).square().sum(1)
        outside = (pixels - pixels.clamp(0.0, 1.0)).square().sum(1)
        whole = weight * apart + point.square().sum(1) + BOX * outside
        return whole.detach(), torch.autograd.grad(whole.sum(), point)[0]

    points, _ = minimise(objective, begin, iterations)
    return np.asarray(mean + (points @ root.T).cpu().numpy())


def normal_images(flat: Array) -> tuple[Array, Array, Array]:
    """The normal distribution of images (k, p): mean (p,), principal directions (p, q) and deviations (q,) along them."""
    if flat.shape[1] > MOST_PIXELS:  # as many directions as there are images, of which a part is enough
        flat = flat[:MOST_PIXELS]
        mean = flat.mean(axis=0)
        _, values, rows = np.linalg.svd(flat - mean, full_matrices=False)
        return mean, rows.T, np.sqrt(values**2 / len(flat) + RIDGE_OF_PRIOR)
    values, directions = np.linalg.eigh(np.cov(flat.T, bias=True))
    return flat.mean(axis=0), directions, np.sqrt(np.maximum(values, 0.0) + RIDGE_OF_PRIOR)


def _before(model: Model, vector: Array, layer: LinearLayer) -> nn.Module:
    """What the network does before its first linear layer, in float64, from samples that are not standardised."""
    exact = replace(model, dtype="float64")
    whole = exact.lent(vector.astype(np.float64))
    mean, std = placed(exact._statistic(exact.mean)), placed(exact._statistic(exact.std))
    inner = nn.Sequential(*layers_of(exact, whole)[: layer.place])
    return _Standardised(inner, mean, std)


class _Standardised(nn.Module):
    """Layers behind the standardisation of their input."""

    def __init__(self, inner: nn.Module, mean: torch.Tensor, std: torch.Tensor) -> None:
        super().__init__()
        self.inner, self.mean, self.std = inner, mean, std

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner((x - self.mean) / self.std)  # type: ignore[no-any-return]


def _double(x: Array) -> Array:
    return np.ascontiguousarray(x, np.float64)
