"""Opacus' GDP accountant beside an accountant of privacy loss distributions."""

from collections.abc import Sequence
from math import nan
from pathlib import Path

from ..claim import Arm, Claim, Row

__all__ = ["CLAIM"]

DELTA = 1e-5
SETTINGS = ((1.0, 0.01, 1000), (0.8, 0.05, 300), (1.5, 0.01, 5000), (2.0, 0.2, 100))
"""Noise multiplier, sampling rate, steps."""
GRIDS = (1e-4, 1e-5)
"""Of privacy losses. On the first the bounds are .25 apart after 5,000 steps. The finer one is taken where they decide nothing."""


def measure(seed: int, data_dir: str | Path | None) -> Sequence[Row]:
    """The rows of one seed."""
    from opacus.accountants import GaussianAccountant

    rows = []
    for noise, rate, steps in SETTINGS:
        accountant = GaussianAccountant()
        for _ in range(steps):
            accountant.step(noise_multiplier=noise, sample_rate=rate)
        rows.append(beside(f"noise {noise}, rate {rate}, {steps} steps", seed, float(accountant.get_epsilon(DELTA)), noise, rate, steps))
    return rows


def beside(arm: str, seed: int, claimed: float, noise: float, rate: float, steps: int) -> Row:
    """A claimed epsilon beside the bound of the true one that it is beyond. Between the bounds it is beside none and decides nothing."""
    lower = upper = nan
    for grid in GRIDS:
        lower, upper = bounds(noise, rate, steps, grid)
        if not lower < claimed < upper:
            break
    baseline = lower if claimed <= lower else upper if claimed >= upper else nan
    return Row(arm, seed, claimed, baseline, f"the true epsilon is in [{lower:.4f}, {upper:.4f}]")


def bounds(noise: float, rate: float, steps: int, grid: float) -> tuple[float, float]:
    """Epsilon at `DELTA` of Poisson-sampled Gaussian noise, from below and from above, by privacy losses that are rounded to a `grid`."""
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    lower, upper = (
        from_gaussian_mechanism(
            noise, sampling_prob=rate, pessimistic_estimate=above, use_connect_dots=above, value_discretization_interval=grid
        )
        .self_compose(steps)
        .get_epsilon_for_delta(DELTA)
        for above in (False, True)
    )
    return float(lower), float(upper)


CLAIM = Claim(
    19, "the epsilon of Opacus' GDP accountant is an upper bound",
    source="in our words, of Opacus' `GaussianAccountant` (Dong et al. 2019), which itself warns that it can underestimate",
    baseline="epsilon of the privacy loss distribution, dp-accounting, rounded down where Opacus' is below that and up where it is above",
    assumed=(
        "Poisson-sampled Gaussian noise, δ = 1e-5; privacy losses are rounded to a grid of 1e-4, or of 1e-5 where that decides "
        "nothing, up to the tail mass that this leaves out; nothing is random"
    ),
    arms={
        "noise 1.0, rate 0.01, 1000 steps": Arm("epsilon", 0.0, "above"),
        "noise 0.8, rate 0.05, 300 steps": Arm("epsilon", 0.0, "above"),
        "noise 1.5, rate 0.01, 5000 steps": Arm("epsilon", 0.0, "above"),
        "noise 2.0, rate 0.2, 100 steps": Arm("epsilon", 0.0, "above"),
    },
    measure=measure,
    seeds=1,
)  # fmt: skip
