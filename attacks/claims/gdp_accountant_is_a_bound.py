"""Opacus' GDP accountant beside an accountant of privacy loss distributions."""

from collections.abc import Sequence
from pathlib import Path

from .claim import Arm, Claim, Row

__all__ = ["CLAIM"]

DELTA = 1e-5
SETTINGS = ((1.0, 0.01, 1000), (0.8, 0.05, 300), (1.5, 0.01, 5000), (2.0, 0.2, 100))
"""Noise multiplier, sampling rate, steps."""


def measure(seed: int, data_dir: str | Path | None) -> Sequence[Row]:
    """The rows of one seed."""
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
    from opacus.accountants import GaussianAccountant

    rows = []
    for noise, rate, steps in SETTINGS:
        accountant = GaussianAccountant()
        for _ in range(steps):
            accountant.step(noise_multiplier=noise, sample_rate=rate)
        single = from_gaussian_mechanism(noise, sampling_prob=rate, pessimistic_estimate=False, use_connect_dots=False)
        optimistic = single.self_compose(steps).get_epsilon_for_delta(DELTA)
        rows.append(Row(f"noise {noise}, rate {rate}, {steps} steps", seed, float(accountant.get_epsilon(DELTA)), float(optimistic)))
    return rows


CLAIM = Claim(
    19, "the epsilon of Opacus' GDP accountant is an upper bound",
    source="in our words, of Opacus' `GaussianAccountant` (Dong et al. 2019), which itself warns that it can underestimate",
    baseline="epsilon of the privacy loss distribution, dp-accounting, rounded down",
    assumed=(
        "Poisson-sampled Gaussian noise, δ = 1e-5; the baseline is an optimistic discretisation, hence below the true epsilon "
        "up to the tail mass that it leaves out; nothing is random"
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
