"""Features of any range, standardised and mapped to [0, 1].

All samples of this package lie in [0, 1]: attacks and signatures rely on it. A feature is standardised first, z = (x − mean) / deviation,
and then mapped from a public range, u = (z − low) / (high − low). A model's own normalisation undoes the second step, so it is given z.

Which mean and deviation is a question of trust, so the configuration answers it: public constants, or each client's own over its training
samples, which nobody else sees. No statistic is ever taken over the samples of several clients.
"""

from dataclasses import dataclass

import numpy as np

from ..types import Array

__all__ = ["Scaling", "scaled"]


@dataclass(frozen=True)
class Scaling:
    """How features (n, 1, 1, d) are brought to [0, 1]. `mean` and `std` are public constants, one for all features or one each.

    With `per_client` each client's own take their place, for the features that `own` marks (empty: all). With `blanks` a value may be NaN:
    it is the mean of the client's own training samples. Values beyond `low` and `high` are clipped.
    """

    low: float
    high: float
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    per_client: bool = False
    own: tuple[bool, ...] = ()
    blanks: bool = False

    @property
    def plain(self) -> bool:
        """Whether values are taken as they are, so that none may lie outside the range."""
        return not self.per_client and self.mean == (0.0,) and self.std == (1.0,)

    @property
    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The mean and deviation by which a model's normalisation gives the standardised values back."""
        width = self.high - self.low
        return (-self.low / width,), (1 / width,)

    def standardised(self, x: Array, own: Array) -> Array:
        """z of features x (n, 1, 1, d), float64, for the client whose training samples are `own`. A constant feature has deviation 1."""
        if not self.per_client:
            return np.asarray((x - np.array(self.mean)) / np.array(self.std))
        return self.by_moments(x, *self.moments(own))

    def by_moments(self, x: Array, mean: Array, std: Array) -> Array:
        """The same by a client's mean and deviation, as `moments` gives them."""
        shift, scale = (np.where(self.own, mean, 0.0), np.where(self.own, std, 1.0)) if self.own else (mean, std)
        return np.asarray(((np.where(np.isnan(x), mean, x) if self.blanks else x) - shift) / scale)

    def moments(self, own: Array) -> tuple[Array, Array]:
        """Mean and deviation (1, 1, d) of a client's training samples; the deviation is 1 where they do not vary. Blanks do not count."""
        if self.blanks and np.isnan(own).any():
            there = ~np.isnan(own)
            count = np.maximum(there.sum(0), 1)
            mean = np.where(there, own, 0.0).sum(0, dtype=np.float64) / count
            std = np.sqrt(np.square(np.where(there, own - mean, 0.0)).sum(0, dtype=np.float64) / count)
        else:
            mean, std = own.mean(0, dtype=np.float64), own.std(0, dtype=np.float64)
        return mean, np.where(std > 1e-9 * np.maximum(1.0, np.abs(mean)), std, 1.0)


def scaled(scaling: Scaling, train: Array, test: Array) -> tuple[Array, Array, int]:
    """A client's training and test samples, float32 in [0, 1], and how many of their values were clipped."""
    parts = [scaling.standardised(x, train) for x in (train, test)]
    clipped = sum(int(((z < scaling.low) | (z > scaling.high)).sum()) for z in parts)
    x_train, x_test = ((np.clip(z, scaling.low, scaling.high) - scaling.low) / (scaling.high - scaling.low) for z in parts)
    return x_train.astype(np.float32), x_test.astype(np.float32), clipped
