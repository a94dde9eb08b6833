"""The result of a sum: the exact integer sum of the survivors' levels, and how to read it.

Guarantee: a sum lies within the range of its terms and survivors. Reveals: see the package. Within that range a client can put in any
vector; nothing here bounds a single one.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .. import fixedpoint
from .messages import Terms

__all__ = ["Sum"]


@dataclass(frozen=True)
class Sum:
    """What the server ends up with.

    terms: of the sum.
    survivors: the clients in it (U3).
    levels: the exact integer sum, int32, shape (vector_length(terms),).

    Raises:
        ValueError: for a sum that no vectors within the terms have: a value outside ± survivors · levels, a weight or the
        number of clients that clipped outside their range.
    """

    terms: Terms
    survivors: tuple[int, ...]
    levels: NDArray[np.int32] = field(repr=False)

    def __post_init__(self) -> None:
        most = len(self.survivors) * self.terms.levels
        weights = [self.levels[self._start(cluster) + self.terms.dimension] for cluster in self._clusters if self.terms.weight_limit]
        if not 0 <= self.levels[-1] <= len(self.survivors):
            raise ValueError("sum: more clients clipped than took part, or fewer than none")
        if any(not 0 <= weight <= most for weight in weights):
            raise ValueError("sum: weights outside their range")
        if int(self.levels.min()) < -most or int(self.levels.max()) > most:
            raise ValueError("sum: values outside their range")

    @property
    def _clusters(self) -> list[int | None]:
        return [named for named, _ in self.terms.blocks] or [None]

    @property
    def clipped_clients(self) -> int:
        """How many survivors had at least one value clipped."""
        return int(self.levels[-1])

    def block(self, cluster: int | None = None) -> NDArray[np.int32]:
        """The summed levels of one block, shape (dimension,); of the only one by default."""
        start = self._start(cluster)
        return self.levels[start : start + self.terms.dimension]

    def total(self, cluster: int | None = None) -> NDArray[np.float64]:
        """Σ (weight / weight_limit) · values over the survivors of one block, shape (dimension,); Σ values in an unweighted sum."""
        return fixedpoint.decode(self.block(cluster), self.terms.fixed)

    def weight(self, cluster: int | None = None) -> float:
        """Σ weight of one block (quantised like the values); the number of survivors in an unweighted sum."""
        if not self.terms.weight_limit:
            return float(len(self.survivors))
        level = int(self.levels[self._start(cluster) + self.terms.dimension])
        return level / self.terms.levels * self.terms.weight_limit

    def mean(self, cluster: int | None = None) -> NDArray[np.float64]:
        """The weighted mean of one block, shape (dimension,).

        Raises:
            ValueError: if all weights are zero.
        """
        weight = self.weight(cluster)
        if weight <= 0:
            raise ValueError("mean: the weights of this block sum to zero")
        return self.total(cluster) * ((self.terms.weight_limit or 1.0) / weight)

    def _start(self, cluster: int | None) -> int:
        if cluster not in self._clusters:
            raise ValueError(f"cluster: {cluster} is not one of the blocks of this sum")
        return self._clusters.index(cluster) * (self.terms.dimension + (self.terms.weight_limit > 0))
