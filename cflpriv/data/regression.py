"""The data of IFCA's synthetic linear regression (Ghosh et al. 2020, section 6.1)."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..errors import InputError
from ..randomness import stream
from ..types import Array

__all__ = ["Regression", "regression"]

Scale = Literal["norm", "multiply"]


@dataclass(frozen=True, eq=False)
class Regression:
    """A trial: features `x` (m, n, d), responses `y` (m, n), true parameters `truth` (k, d), the machine's `groups` (m,)."""

    x: Array
    y: Array
    truth: Array
    groups: Array


def regression(seed: int, *, d: int, k: int, m: int, n: int, separation: float, noise: float, scale: Scale = "norm") -> Regression:
    """y = xᵀθ*_j + ε with x ~ N(0, I_d), ε ~ N(0, noise²), θ* Bernoulli(½) in each coordinate; machine i is in group i mod k.

    `scale="norm"`: θ* rescaled to norm `separation`, as in the paper; "multiply": multiplied by it, as the authors' code does.

    Raises `InputError` for sizes below 1, m not a multiple of k, a separation not above 0 or a negative noise.
    """
    for name, size in (("d", d), ("k", k), ("m", m), ("n", n)):
        if size < 1:
            raise InputError(f"regression: {name} = {size} is below 1")
    if m % k:
        raise InputError(f"regression: m = {m} machines are not a multiple of k = {k} equal groups")
    if not (separation > 0 and noise >= 0):
        raise InputError(f"regression: separation = {separation}, noise = {noise}: expected above 0 and not negative")
    if scale not in ("norm", "multiply"):
        raise InputError(f"regression: scale = {scale!r} is not known; known are norm, multiply")
    draws = stream(seed, "data.regression")
    truth = draws.integers(2, size=(k, d)).astype(np.float64)
    truth *= separation / np.maximum(np.linalg.norm(truth, axis=1, keepdims=True), 1.0) if scale == "norm" else separation
    groups = np.arange(m) % k
    x = draws.standard_normal((m, n, d))
    y = np.einsum("mnd,md->mn", x, truth[groups]) + noise * draws.standard_normal((m, n))
    return Regression(x, y, truth, groups)
