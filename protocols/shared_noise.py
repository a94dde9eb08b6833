"""Gaussian noise that clients share: each adds its share to its vector and rounds to integers, which a secure sum adds up.

Guarantee: whoever learns no more than the sum over at least `survivors` clients whose shares it does not know (and the shares of others)
learns nothing beyond a Gaussian mechanism: the sum of their vectors with noise of `deviation` on each coordinate, but for a total variation
of `aliasing(n)` a coordinate, below 1e-125 for a million clients. So the event is a `GaussianEvent` or `SampledGaussianEvent`, with its
exact price. Rounding costs nothing: a vector moves by its own sensitivity, not by that of its integers.

Why: let x_i be the vectors in integer steps, G_i ~ N(0, s²) their shares and ⌊·⌉ the nearest integer, n clients. The probability that
⌊x + G⌉ is k is the density at k of x + G + U, U uniform in (−½, ½). By Poisson's summation formula the Fourier series of such
probabilities is the sum over all shifts by 2π of the characteristic function f(t) of x + G + U; for a sum of independent ones it is the
product of these sums. The Gaussian mechanism's result Σ(x_i + G_i), to which U_1 … U_{n−1} are added and which is then rounded (all of it
post-processing), has the sum over all shifts of the product Π f_i. The two differ by products in which a factor is shifted and another is
not. Since |f_i(t)| ≤ exp(−s²t²/2), and a shifted t is at least π, each is at most ρ = exp(−s²π²/2), which is 1e-137 for s = 8. This is
the statement that a Gaussian of s steps is far above the smoothing parameter of the integers (Micciancio & Regev 2007).
Reveals: the sum up to the noise, and that integers are bounded by the room that is left for them. Assumes that clients are honest about
their shares: who knows c of n shares takes them off, and (n − c)/n of the variance is left.

Where helpers add the noise to the sum (`one_message.noise`), a client's own share only makes its rounding free, and is counted as one of
`helper_shares`: so fine are the steps that the helpers' noise alone has `deviation`.

Source: rounding as post-processing of Gaussian noise, Canonne, Kamath & Steinke 2020 (section 1.1, for one noise); distributed noise,
Kairouz, Liu & Steinke 2021. The sum of rounded shares as above takes the place of discrete Gaussian and Skellam shares, whose prices need
bounds on the rounded vectors and Rényi divergences.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .entropy import Entropy
from .mechanisms import gaussian_noise

__all__ = ["HELPER_STEPS", "SHARE_STEPS", "SharedNoise", "aliasing", "helper_shares"]

SHARE_STEPS = 8.0
"""Standard deviation of a client's share in integer steps. Rounding adds 1/12 to its 64 of variance: 0.07 % of the noise's deviation."""
HELPER_STEPS = {16: 128, 32: 1024}
"""Standard deviation of the helpers' noise for each set of them, in integer steps, by the bits of a sum. A sum of n clients has
64 n / (that² · sets) more variance by the clients' own shares: of 100 clients with four helpers and 32 bits, 0.15 % of it."""
REACH = 13
"""No share is longer than so many standard deviations: `entropy.normals` draws 12.5 at most."""


@dataclass(frozen=True)
class SharedNoise:
    """Noise of `deviation` on each coordinate of a sum, in the units of the vectors, made of the shares of at least `survivors` clients.

    Raises `ValueError` for a deviation that is not a finite number above 0, or survivors below 1.
    """

    deviation: float
    survivors: int

    def __post_init__(self) -> None:
        if self.survivors < 1:
            raise ValueError(f"survivors: {self.survivors} is below 1")
        if not (math.isfinite(self.deviation) and self.deviation > 0 and 0 < self.steps_per_unit < math.inf):
            raise ValueError(f"deviation: {self.deviation} is not a finite number above 0")

    @property
    def share(self) -> float:
        """The standard deviation of each client's share, in the units of the vectors."""
        return self.deviation / math.sqrt(self.survivors)

    @property
    def steps_per_unit(self) -> float:
        """How many integer steps make 1.0."""
        return SHARE_STEPS / self.share if self.share > 0 else math.inf

    def room(self, length: float) -> int:
        """The room, in integers on each side of zero, that a client's coordinates of at most `length` need with their noise."""
        return math.ceil(min(length * self.steps_per_unit, 2.0**62) + REACH * SHARE_STEPS) + 1

    def noisy(self, vector: NDArray[Any], room: int, entropy: Entropy) -> NDArray[np.int64]:
        """One client's integers (d,) for the secure sum, within `room` of zero, its share of the noise included.

        Coordinates that do not fit with their noise are cut off before the noise is added, which moves no two vectors further apart.
        Raises `ValueError` for values that are not finite, or a room that is too small for the noise alone.
        """
        values = np.asarray(vector, dtype=np.float64)
        if values.ndim != 1 or not np.isfinite(values).all():
            raise ValueError(f"vector: expected finite numbers in one row, got shape {values.shape}")
        most = room - REACH * SHARE_STEPS - 1
        if most <= 0:
            raise ValueError(f"room: {room} integers on each side of zero leave none beside {REACH} standard deviations of noise")
        with np.errstate(over="ignore"):
            steps = np.clip(values * self.steps_per_unit, -most, most)
        noise = gaussian_noise(SHARE_STEPS, values.size, entropy)
        return np.asarray(np.rint(steps + noise), dtype=np.int64)

    def opened(self, total: NDArray[Any]) -> NDArray[np.float64]:
        """The noisy sum of vectors (d,) that a sum of their integers (d,) stands for."""
        return np.asarray(np.asarray(total, dtype=np.float64) / self.steps_per_unit)


def helper_shares(bits: int) -> int:
    """How many clients' shares have the deviation of the helpers' noise for one set of them."""
    return round((HELPER_STEPS[bits] / SHARE_STEPS) ** 2)


def aliasing(clients: int, steps: float = SHARE_STEPS) -> float:
    """Bound on the total variation, a coordinate, between a sum of `clients` rounded shares and rounding of the Gaussian mechanism.

    Each of the probabilities within 40 standard deviations (what lies beyond has less than 1e-300) differs by less than
    ((1 + r)ⁿ − 1) + r, where r = 2ρ/(1 − ρ) bounds the sum of all shifted factors.
    """
    rho = math.exp(-((math.pi * steps) ** 2) / 2)
    r = 2 * rho / (1 - rho)
    each = math.expm1(clients * math.log1p(r)) + r
    return min(1.0, (80 * steps * math.sqrt(clients) + 1) * each / 2)
