"""A client's input to a sum: its values, its weight and a clipping flag, as one vector of integer levels.

    block 0: dimension values, weight | block 1: … | 1 if anything was clipped, else 0

There is one block, or in an oblivious sum one for each open cluster; the weight is there in weighted sums
only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import fixedpoint
from ..entropy import Entropy
from ..errors import LocalError
from . import messages
from .messages import Terms

__all__ = ["Contribution", "encode_inputs"]


@dataclass(frozen=True)
class Contribution:
    """What a client adds to one block of the sum.

    values: (d,) real numbers, or integers that are levels already (counts, or values with integer noise).
    weight: in [0, weight_limit], ignored in unweighted sums.
    cluster: the block, in sums that have blocks; a contribution to a block that is not open adds nothing.
    """

    values: NDArray[Any] = field(repr=False)
    weight: float = field(default=1.0, repr=False)
    cluster: int | None = field(default=None, repr=False)


def encode_inputs(contributions: Sequence[Contribution], terms: Terms, entropy: Entropy) -> tuple[NDArray[np.int32], int]:
    """The levels of a client's whole vector, shape (vector_length(terms),), and the number of its values that were clipped.

    Raises:
        LocalError: "bad-values" if the contributions do not fit the terms.
    """
    clusters: list[int | None] = [cluster for cluster, _ in terms.blocks] or [None]
    named = [contribution.cluster for contribution in contributions]
    if len(set(named)) != len(named) or (not terms.blocks and named != [None]) or (terms.blocks and None in named):
        raise LocalError("bad-values", "expected one contribution, or in a sum with blocks one for each of distinct clusters")
    width = terms.dimension + (terms.weight_limit > 0)
    x = np.zeros(messages.vector_length(terms), np.int32)
    clipped = 0
    for contribution in contributions:
        if contribution.values.shape != (terms.dimension,):
            raise LocalError("bad-values", f"expected {terms.dimension} values")
        if contribution.cluster not in clusters:
            continue
        fraction = contribution.weight / terms.weight_limit if terms.weight_limit else 1.0
        start = clusters.index(contribution.cluster) * width
        try:
            levels, beyond = fixedpoint.encode(contribution.values, terms.fixed, entropy, fraction)
            x[start : start + terms.dimension] = levels
            if terms.weight_limit:
                share = np.array([fraction * terms.clip])
                x[start + terms.dimension] = fixedpoint.encode(share, terms.fixed, entropy)[0][0]
        except ValueError as error:
            # These messages name sizes and types, never values.
            raise LocalError("bad-values", str(error)) from None
        clipped += beyond
    x[-1] = clipped > 0
    return x, clipped
