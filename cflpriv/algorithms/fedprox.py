"""FedProx: FedAvg whose clients are held back to the model they received.

Source: Li et al. 2020 (MLSys), Algorithm 2: client k (inexactly) minimises h_k(θ; θ_t) = F_k(θ) + (μ/2) ‖θ − θ_t‖².

Deviations, each for a reason:
- The local problem is solved by a fixed number of SGD epochs, as in everything it is compared with, not to a given inexactness γ.
- Clients are sampled uniformly and weighted in the mean (FedAvg's scheme); the paper samples by weight and averages evenly.

μ = 0 is FedAvg, bit for bit. What it reveals, by which operation: what FedAvg does, through `mean`. μ is public and nothing else is sent.
"""

from dataclasses import replace
from typing import Annotated

from ..keys import Key, ranged
from ..privacy.settings import updates_only
from ..tasks.training import Train
from .fedavg import FedAvgState, Weights, fedavg
from .interface import Algorithm, AlgorithmSpec, no_groups

__all__ = ["fedprox"]


@ranged("algorithm")
def fedprox(
    train: Train,
    *,
    mu: Annotated[float, Key("Strength of the proximal term (the paper tries 0.001 to 1).", "[0, inf)")] = 0.01,
    weights: Weights = "examples",
    seed: int = 0,
) -> Algorithm:
    """One shared model, local training with the proximal term `mu` (the paper tries 0.001 to 1, PACFL's tables 0.001 and 0.01).

    Raises `InputError` for a μ that is not a finite number of 0 or more.
    """
    return replace(fedavg(replace(train, prox=mu), weights=weights, seed=seed), name="fedprox")


FEDPROX = AlgorithmSpec(
    "fedprox", fedprox, "FedAvg with local training held back to the received model (Li et al. 2020)",
    states=(FedAvgState,), sample_releases=updates_only,
    cohorts="one", serves_released=True, knowledge=no_groups,
)  # fmt: skip
