"""The data of IFCA's synthetic linear regression (Ghosh et al. 2020, section 6.1)."""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from ..errors import InputError
from ..keys import Key, ranged
from ..randomness import stream
from ..types import Array

__all__ = ["Regression", "regression"]

Scale = Literal["norm", "multiply"]
Size = Annotated[int, Key("A size.", "[1, inf)")]
Separation = Annotated[float, Key("How far the parameters of two groups are apart.", "(0, inf)")]
Deviation = Annotated[float, Key("Standard deviation of the noise.", "[0, inf)")]


@dataclass(frozen=True, eq=False)
class Regression:
    """A trial: features `x` (m, n, d), responses `y` (m, n), true parameters `truth` (k, d), the machine's `groups` (m,)."""

    x: Array
    y: Array
    truth: Array
    groups: Array


@ranged("regression")
def regression(
    seed: int, *, d: Size, k: Size, m: Size, n: Size, separation: Separation, noise: Deviation, scale: Scale = "norm"
) -> Regression:
    """y = xᵀθ*_j + ε with x ~ N(0, I_d), ε ~ N(0, noise²), θ* Bernoulli(½) in each coordinate; machine i is in group i mod k.

    `scale="norm"`: θ* rescaled to norm `separation`, as in the paper; "multiply": multiplied by it, as the authors' code does.

    Raises `InputError` for m not a multiple of k.
    """
    if m % k:
        raise InputError(f"regression: m = {m} machines are not a multiple of k = {k} equal groups")
    draws = stream(seed, "data.regression")
    truth = draws.integers(2, size=(k, d)).astype(np.float64)
    truth *= separation / np.maximum(np.linalg.norm(truth, axis=1, keepdims=True), 1.0) if scale == "norm" else separation
    groups = np.arange(m) % k
    x = draws.standard_normal((m, n, d))
    y = np.einsum("mnd,md->mn", x, truth[groups]) + noise * draws.standard_normal((m, n))
    return Regression(x, y, truth, groups)
