"""Groups found without their number under per-sample privacy: in how many seeds of ten are they exactly right?

    python examples/groups_under_noise.py [--seeds 10] [--epsilons 8 4 2 1] [--data-dir DIR]

Two methods, each from one noisy vector a client with all of ε spent on it: PACFL's cut by test (the second moment of its samples) and
crossfit (its mean gradient). Three populations: five groups of two labels of Fashion-MNIST (100 clients × 500 samples), digits turned by 0
and 90 degrees (20 clients), and one group of Fashion-MNIST, which should be left whole (40 clients × 500).
"""

import argparse
from typing import Any

from cflpriv.clustering.scores import ari
from cflpriv.experiments import parse_config, start
from cflpriv.streams import printable_streams

PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
SCENES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "five groups of Fashion-MNIST": (
        {"source": "fashion_mnist", "partition": "pathological", "groups": PAIRS, "clients": 100, "samples_per_client": 500},
        {"name": "mlp", "hidden": 32}, 500,
    ),
    "digits, two rotations": ({"source": "digits", "rotations": [0, 90], "clients": 20, "samples_per_client": 70}, {"name": "linear"}, 70),
    "one group of Fashion-MNIST": (
        {"source": "fashion_mnist", "clients": 40, "samples_per_client": 500}, {"name": "mlp", "hidden": 32}, 500,
    ),
}  # fmt: skip


def right(scene: str, method: str, epsilon: float, seed: int, data_dir: str | None) -> bool:
    """Whether the groups of one release, and nothing else, were found."""
    data, model, samples = SCENES[scene]
    config = parse_config(
        {
            "data": {**data, "test_samples_per_client": 5, "seed": seed}, "model": model,
            "training": {"rounds": 0, "weights": "equal", "batch_size": 10}, "algorithm": {"name": method}, "run": {"seed": seed},
            "privacy": {"unit": "sample", "epsilon": epsilon, "delta": 1e-5, "samples": samples},
        }
    )  # fmt: skip
    simulation = start(config, data_dir)
    clustering = simulation.algorithm.describe(simulation.state)["clustering"]
    truth = [simulation.population.groups[client] for client in clustering.clients]
    return clustering.k == len(set(truth)) and ari(truth, clustering.labels) == 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[8.0, 4.0, 2.0, 1.0])
    parser.add_argument("--data-dir")
    options = parser.parse_args()
    print(
        f"exactly right of {options.seeds} seeds at ε =".ljust(44) + "".join(f"{epsilon:>6g}" for epsilon in options.epsilons), flush=True
    )
    for scene in SCENES:
        for method in ("pacfl", "crossfit"):
            print(f"{scene}, {method}".ljust(44), end="", flush=True)
            for epsilon in options.epsilons:
                seen = sum(right(scene, method, epsilon, seed, options.data_dir) for seed in range(options.seeds))
                print(f"{seen:>6}", end="", flush=True)
            print(flush=True)


if __name__ == "__main__":
    printable_streams()
    main()
