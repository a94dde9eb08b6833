"""Figure 3 of IFCA: how often gradient averaging recovers the parameters of mixed linear regressions, from random starts.

`trial` is the arithmetic of the algorithm for all starts and step sizes of a trial at once, as one stack of matrices, because the figure
takes some 10⁷ rounds; a test holds it against the algorithm itself over a federation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...data.regression import Regression, Scale, regression
from ...randomness import stream
from ...types import Array

__all__ = ["STEPS", "RegressionPoint", "distance", "random_start", "succeeds", "success_rate", "trial"]

STEPS = {2: (0.01, 0.1, 1.0), 4: (0.5, 1.0, 2.0)}
"""The paper's step sizes by the number of clusters."""


def random_start(seed: int, attempt: int, d: int) -> Array:
    """θ⁰ of one cluster, shape (d,): i.i.d. Bernoulli(½)."""
    return stream(seed, f"regression start {attempt}").integers(2, size=d).astype(np.float64)


def distance(estimates: Array, truth: Array) -> float:
    """(1/k) Σ_j ‖θ_j − θ*_π(j)‖ for the best matching π: which cluster is called which is arbitrary. Infinite where it diverged."""
    if not np.isfinite(estimates).all():
        return float("inf")
    costs = np.linalg.norm(estimates[:, None, :] - truth[None, :, :], axis=2)
    from scipy.optimize import linear_sum_assignment  # slow to import

    return float(costs[linear_sum_assignment(costs)].mean())


def trial(
    data: Regression, starts: Array, steps: Sequence[float], rounds: int = 300, *, device: str = "cpu", dtype: torch.dtype = torch.float64
) -> Array:
    """Gradient averaging (Alg. 2, option I, all clients in every round) from each start with each step size.

    `starts` (b, k, d); gives parameters (b, steps, k, d).
    """
    m, n, d = data.x.shape
    b, k, _ = starts.shape
    x = torch.as_tensor(data.x, dtype=dtype, device=device).reshape(m * n, d)
    y = torch.as_tensor(data.y, dtype=dtype, device=device).reshape(m, n, 1, 1)
    theta = torch.as_tensor(np.repeat(starts[:, None], len(steps), axis=1), dtype=dtype, device=device).reshape(b * len(steps), k, d)
    rate = torch.as_tensor(np.tile(steps, b), dtype=dtype, device=device)[:, None, None]
    for _ in range(rounds):
        residual = y - (x @ theta.reshape(-1, d).T).reshape(m, n, -1, k)
        choice = residual.square().mean(dim=1).nan_to_num(torch.inf, torch.inf).argmin(dim=-1)  # (m, b·steps)
        chosen = torch.nn.functional.one_hot(choice, k).to(dtype)[:, None]
        # θ_j ← θ_j − (γ/m) Σ_{i: ĵ_i = j} ∇F_i(θ_j),  ∇F_i = −(2/n) Xᵀ(y − Xθ)
        total = (x.T @ (residual * chosen).reshape(m * n, -1)).T.reshape(-1, k, d)
        theta = theta + rate * (2.0 / (n * m)) * total
    return theta.reshape(b, len(steps), k, d).cpu().numpy()


@dataclass(frozen=True)
class RegressionPoint:
    """One point of the figure. The paper's: d = 1000, 300 rounds, 10 starts, 40 trials."""

    k: int
    m: int
    n: int
    separation: float
    noise: float
    d: int = 1000
    rounds: int = 300
    starts: int = 10
    trials: int = 40
    scale: Scale = "norm"


def success_rate(point: RegressionPoint, seed: int = 0, *, device: str = "cpu", dtype: torch.dtype = torch.float64) -> float:
    """The share of trials in which some start with some step size comes within 0.6 max(σ, 10⁻³) of the truth."""
    seeds = [int(stream(seed, "regression trial", number).integers(2**62)) for number in range(point.trials)]
    return sum(succeeds(point, own, device, dtype) for own in seeds) / point.trials


def succeeds(point: RegressionPoint, seed: int, device: str = "cpu", dtype: torch.dtype = torch.float64) -> bool:
    """One trial. The step sizes are tried in turn, the middle size first, until a trial succeeds."""
    k, d = point.k, point.d
    data = regression(seed, d=d, k=k, m=point.m, n=point.n, separation=point.separation, noise=point.noise, scale=point.scale)
    starts = np.stack([[random_start(seed, b * k + j, d) for j in range(k)] for b in range(point.starts)])
    low, middle, high = STEPS.get(k, STEPS[2])
    for step in (middle, high, low):
        estimates = trial(data, starts, (step,), point.rounds, device=device, dtype=dtype)[:, 0]
        if min(distance(estimate, data.truth) for estimate in estimates) <= 0.6 * max(point.noise, 1e-3):
            return True
    return False
