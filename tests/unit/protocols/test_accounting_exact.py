"""Prices of sampled steps over the whole range, against privacy-loss distributions of the test's own: within 1 %, and never below."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import fft

from cflpriv.protocols.accounting import epsilon_of
from cflpriv.protocols.events import SampledGaussianEvent

SIZE, POINTS = 1 << 20, 400_001
CASES = 24


def losses(z: float, q: float) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Log of the likelihood ratio (n,) of one step with the record over one without it, and the masses with and without it."""
    x, width = np.linspace(-14 * z - 1, 14 * z + 1, POINTS, retstep=True)
    shift = (2 * x - 1) / (2 * z * z)
    ratio = np.where(shift > 600, shift + math.log(q), np.log1p(q * np.expm1(np.minimum(shift, 600))))
    without = np.exp(-(x**2) / (2 * z * z)) * width / (z * math.sqrt(2 * math.pi))
    with_ = np.exp(-(x**2) / (2 * z * z) + ratio) * width / (z * math.sqrt(2 * math.pi))
    return ratio, with_ / with_.sum(), without / without.sum()


def exact_epsilon(z: float, q: float, steps: int, delta: float, spacing: float) -> float:
    """ε on a circle of `SIZE` losses: a step's losses are split between neighbours, their mean kept, and multiplied by a transform."""
    ratio, with_, without = losses(z, q)
    found = 0.0
    for loss, mass in ((ratio, with_), (-ratio, without)):
        low = np.floor(loss / spacing)
        share, place = loss / spacing - low, low.astype(np.int64)
        law = np.bincount(place % SIZE, mass * (1 - share), SIZE) + np.bincount((place + 1) % SIZE, mass * share, SIZE)
        total = np.maximum(fft.irfft(fft.rfft(law) ** steps, SIZE), 0.0)
        numbers = np.arange(SIZE)
        at = (numbers + SIZE * np.round((steps * float(mass @ loss) / spacing - numbers) / SIZE)) * spacing
        lowest, highest = 0.0, 1e3
        for _ in range(50):
            middle = (lowest + highest) / 2
            above = at > middle
            enough = float((total[above] * -np.expm1(middle - at[above])).sum()) > delta
            lowest, highest = (middle, highest) if enough else (lowest, middle)
        found = max(found, highest)
    return found


def drawn_cases() -> list[tuple[float, float, int, float, float]]:
    """(z, q, steps, δ, spacing): q from 1e-6 to 1, 1 to 10⁶ steps, where the central limit puts ε between about .01 and 100."""
    rng, cases = np.random.default_rng(2), list[tuple[float, float, int, float, float]]()
    while len(cases) < CASES:
        q, steps, z = 10 ** rng.uniform(-6, 0), int(10 ** rng.uniform(0, 6)), 10 ** rng.uniform(-0.5, 1.5)
        variance = q * q * math.expm1(min(1 / z**2, 20.0)) * steps
        if 1e-5 < variance < 300:
            reach = max((1 + 14 * z) / (2 * z * z) + math.log(q), 0.0) + 24 * math.sqrt(variance) + variance
            cases.append((z, q, steps, float(rng.choice([1e-5, 1e-7])), 2 * reach / SIZE))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("case", drawn_cases(), ids=lambda case: f"{case[0]:.2g}-{case[1]:.2g}-{case[2]}-{case[3]:g}")
def test_prices_are_within_a_percent_of_exact_ones(case: tuple[float, float, int, float, float]) -> None:
    z, q, steps, delta, spacing = case
    exact, rough = exact_epsilon(z, q, steps, delta, spacing), exact_epsilon(z, q, steps, delta, 2 * spacing)
    ours = epsilon_of([SampledGaussianEvent(z, q, steps, 1.0, "add_remove")], delta)
    error = abs(rough - exact)
    assert error <= 2e-3 * exact + 1e-5
    assert exact - error - 1e-5 <= ours <= 1.01 * max(exact + error, 0.01)
