"""IFCA's synthetic linear regression (Ghosh et al. 2020, section 6.1): the data, and what clients compute on them.

Client data hold labels that are classes, so the real-valued response travels as the last column of x, and y is zero.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ..engine import Result, TaskInput
from ..errors import InputError
from ..randomness import stream
from ..types import Array, ClientData, Parts

__all__ = ["Regression", "RegressionGradient", "RegressionLosses", "RegressionLoss", "regression", "regression_clients"]

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

    `scale="norm"`: θ* rescaled to norm `separation`, as the paper says; "multiply": multiplied by it, as the authors' code does.

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


def regression_clients(trial: Regression) -> tuple[ClientData, ...]:
    """The machines as clients: the response is the last column of x. They have no test data."""
    m, n, d = trial.x.shape
    packed = np.concatenate([trial.x, trial.y[..., None]], axis=2)
    none = np.zeros(0, dtype=np.int64)
    return tuple(ClientData(i, packed[i], np.zeros(n, dtype=np.int64), np.zeros((0, d + 1)), none) for i in range(m))


def _residual(given: TaskInput, parameters: Array, split: str = "train") -> tuple[Array, Array]:
    data = given.data.x_train if split == "train" else given.data.x_test
    return data[:, :-1], data[:, -1] - data[:, :-1] @ parameters


@dataclass(frozen=True)
class RegressionLosses:
    """The mean squared error of each of the list "model". Parts: "losses" (k,), "choice" () of the lowest."""

    parts: ClassVar[Parts] = {"losses": "summed", "choice": "choice"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, given: TaskInput) -> Result:
        losses = np.array([np.mean(_residual(given, np.asarray(model))[1] ** 2) for model in given.params["model"]])
        return {"losses": losses, "choice": np.array(int(losses.argmin()))}


@dataclass(frozen=True)
class RegressionGradient:
    """The gradient of the mean squared error at "model". Parts: "gradient" (d,)."""

    parts: ClassVar[Parts] = {"gradient": "summed"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, given: TaskInput) -> Result:
        x, residual = _residual(given, given.array("model"))
        return {"gradient": -2.0 / len(x) * x.T @ residual}


@dataclass(frozen=True)
class RegressionLoss:
    """The squared error of "model" summed over the samples of `split`. Parts: "loss" (), "count" ()."""

    split: str = "test"
    parts: ClassVar[Parts] = {"loss": "measure", "count": "measure"}
    keeps: ClassVar[tuple[str, ...]] = ()

    def run(self, given: TaskInput) -> Result:
        _, residual = _residual(given, given.array("model"), self.split)
        return {"loss": np.array(float(np.sum(residual**2))), "count": np.array(float(len(residual)))}
