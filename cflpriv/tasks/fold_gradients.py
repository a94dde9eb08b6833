"""The signature of cross-fitted clustering: a client's mean gradient, over each of two random halves of its data."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ..engine import TaskInput
from ..engine.models import Model
from ..engine.sample_gradients import summed_directions
from ..errors import InputError
from ..protocols.sketch import public_sketch
from ..randomness import Stream
from ..types import Array, Parts
from .halves import HALVES, two_halves

if TYPE_CHECKING:
    from ..privacy.private_signatures import NoisyMeanGradient
    from ..privacy.settings import Noise

__all__ = ["FoldGradients", "fold_weights"]


def fold_weights(labels: Array, balanced: bool, rng: Stream) -> Array:
    """The weight (2, n) of each sample in the mean of each fold: rows add up to 1, and a sample is in one fold, a random half each.

    Plain, and where labels are numbers: all samples of a fold count alike. Balanced: all labels that a fold has, and the samples of a
    label. Halves are not dealt by label: which labels a fold lacks by chance is noise, and must differ between the folds as it differs
    between clients.

    Raises `InputError` for fewer than two samples.
    """
    n = len(labels)
    weights = np.zeros((HALVES, n))
    for fold, members in enumerate(two_halves(n, rng)):
        rarity = np.ones(len(members))
        if balanced and labels.ndim == 1 and labels.dtype.kind != "f":
            _, place, sizes = np.unique(labels[members], return_inverse=True, return_counts=True)
            rarity = 1 / sizes[place]
        weights[fold, members] = rarity / rarity.sum()
    return weights


@dataclass(frozen=True)
class FoldGradients:
    """The means of a client's gradients at the given "model" over two random halves of its data, each sample's scaled to norm 1.

    Part: "folds" (2, sketch) float64, or (2, d) where the model is no larger than the sketch, which is made from the public `seed`. Norm 1
    bounds what a sample adds, makes losses of different size comparable, and keeps the mean linear, so that products of different folds
    stay unbiased. `balanced`: every label that a client has counts alike, see `fold_weights`.

    Reveals: whoever sees the folds sees two mean gradients of the client's data, and by plain folds the shares of its labels; their
    products tell how long these are and, by the difference of the two, about how many samples the client has.
    """

    model: Model
    balanced: bool = True
    sketch: int = 1024
    seed: int = 0

    parts: ClassVar[Parts] = {"folds": "compared"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def private(self, noise: "Noise") -> "NoisyMeanGradient":
        """One noisy vector in place of two folds, under sample-level differential privacy.

        All samples count alike in it: labels counted alike would have four times the noise.
        """
        from ..privacy.private_signatures import NoisyMeanGradient

        return NoisyMeanGradient(self.model, noise.sketch_dim, noise.signature, noise.relation, noise.samples, self.seed)

    def run(self, task_input: TaskInput) -> dict[str, Array]:
        data = task_input.data
        try:
            weights = fold_weights(data.y_train, self.balanced, task_input.streams("folds"))
        except InputError as error:
            raise InputError(f"client {data.id}: {error}") from None
        folds = summed_directions(self.model, task_input.array("model"), data, weights)
        dimension = self.model.dimension
        if dimension <= self.sketch:
            return {"folds": folds}
        return {"folds": np.asarray(public_sketch("crossfit", self.seed, dimension, self.sketch).apply(folds))}

    def cost(self, task_input: TaskInput) -> int:
        return len(task_input.data.y_train)
