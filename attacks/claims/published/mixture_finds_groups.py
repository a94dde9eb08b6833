"""R-DPCFL: clusters from a Gaussian mixture of noisy gradients, then from losses, under sample-level differential privacy."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ....data import build_population
from ....experiments import parse_config
from ....experiments.run.folder import run_experiment
from ....types import Population
from ..claim import Arm, Claim, Row

__all__ = ["CLAIM"]

DATA = {
    "source": "emnist_letters", "partition": "iid", "rotations": [0, 90, 180, 270], "clients": 20, "samples_per_client": 500,
    "test_samples_per_client": 1,
}  # fmt: skip
RATES = {8.0: 2.0, 2.0: 1.0, 0.5: 0.5}
"""ε -> the learning rate that was chosen for it on MNIST (`examples/r_dpcfl_fmnist.toml`)."""
BESIDE = "ε = 2, beside losses alone"


def measure(seed: int, data_dir: str | Path | None) -> Sequence[Row]:
    """The rows of one seed."""
    people = build_population(parse_config({"data": DATA | {"seed": seed}}, "claim").data, data_dir)
    found = {epsilon: _index("r_dpcfl", epsilon, seed, people) for epsilon in RATES}
    rows = [Row(f"ε = {epsilon:g}", seed, index, 0.0) for epsilon, index in found.items()]
    return [*rows, Row(BESIDE, seed, found[2.0], _index("ifca", 2.0, seed, people))]


def _index(algorithm: str, epsilon: float, seed: int, people: Population) -> float:
    """The adjusted Rand index of the clusters at the end."""
    tree: dict[str, Any] = {
        "data": DATA | {"seed": seed}, "model": {"name": "mlp", "hidden": 64},
        "training": {"rounds": 20, "epochs": 1, "batch_size": 500, "lr": RATES[epsilon], "weights": "equal"},
        "algorithm": {"name": algorithm, "k": 4}, "protection": {"min_cohort": 1},
        "privacy": {
            "unit": "sample", "relation": "add_remove", "epsilon": epsilon, "delta": 1e-5, "choice_share": 0.2, "clip_norm": 1.0,
            "samples": 500, "sketch_dim": 64, "signature_share": 0.6,
        },
        "run": {"seed": seed, "evaluate_every": 20, "checkpoint_every": 20},
    }  # fmt: skip
    with TemporaryDirectory() as folder:
        summary = run_experiment(parse_config(tree, "claim"), Path(folder) / "run", None, population=people)
    return float(summary["ari"])


CLAIM = Claim(
    14, "a Gaussian mixture of noisy updates, and losses, identify the clusters correctly under differential privacy",
    source="R-DPCFL, Malekmohammadi et al. 2025, TMLR (abstract)",
    baseline="clusters dealt at random, 0; in the last arm IFCA, by losses alone, with the same ε and share of it for choices",
    assumed=(
        "20 clients of EMNIST letters with 500 samples each in four rotations, an MLP of 64 units, 20 rounds of one step on all samples, "
        "δ = 1e-5 for single samples, noise of each client's own, four clusters given; 0.6 of ε for the first gradient, which is sketched "
        "to 64 numbers, and learning rates as chosen on MNIST; nothing was tried out on EMNIST before the run"
    ),
    arms={
        **{f"ε = {epsilon:g}": Arm("adjusted Rand index", 0.9, "above") for epsilon in RATES},
        BESIDE: Arm("adjusted Rand index", 0.05, "above"),
    },
    measure=measure,
    needs=("emnist_letters",),
)  # fmt: skip
