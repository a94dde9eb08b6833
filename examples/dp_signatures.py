"""PACFL's signatures at several ε, with and without the sketch, over several seeds: how much privacy does clustering withstand?

    python examples/dp_signatures.py [--seeds 10] [--epsilons 1 0.5] [--sketches 32 0] [--data-dir DIR]

Prints, for each setting, the median and the worst adjusted Rand index of three cuts: at the true number of clusters; automatic, which takes
one cluster where it sees no clear structure; and at the number with the best silhouette, clear or not. The signatures are those of
`examples/pacfl_dp_fmnist.toml`, with all of ε spent on them.
"""

import argparse
from pathlib import Path

import numpy as np

from cflpriv.clustering.cuts import cut_tree
from cflpriv.clustering.scores import ari
from cflpriv.clustering.similarity import SimilarityMatrix
from cflpriv.experiments import load_config, start
from cflpriv.streams import printable_streams

CONFIG = Path(__file__).with_name("pacfl_dp_fmnist.toml")


def quality(seed: int, epsilon: float, sketch: int, data_dir: str | None) -> tuple[float, float, float]:
    """ARI with K given, of the automatic cut, and at the best silhouette, of one release."""
    config = load_config(CONFIG, ["training.rounds=0", f"data.seed={seed}", f"run.seed={seed}", f"privacy.epsilon={epsilon}"])
    simulation = start(config.with_("privacy", sketch_dim=sketch), data_dir)
    described = simulation.algorithm.describe(simulation.state)
    truth = [simulation.population.groups[client] for client in described["clustering"].clients]
    evidence = described["evidence"]
    distance = SimilarityMatrix(evidence["distance"], described["clustering"].clients, "smallest_angle", "distance")
    automatic = cut_tree(evidence["tree"], distance)
    values = evidence["silhouettes"]
    silhouette = cut_tree(evidence["tree"], distance, k=max(values, key=values.__getitem__))
    return ari(truth, described["clustering"].labels), ari(truth, automatic.labels), ari(truth, silhouette.labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 0.5])
    parser.add_argument("--sketches", type=int, nargs="+", default=[32, 0])
    parser.add_argument("--data-dir")
    options = parser.parse_args()
    print("sketch  epsilon  ARI, K given: median  worst   automatic: median  worst   best silhouette: median  worst")
    for sketch in options.sketches:
        for epsilon in options.epsilons:
            scores = np.array([quality(seed, epsilon, sketch, options.data_dir) for seed in range(options.seeds)])
            given_k, automatic, silhouette = zip(np.median(scores, axis=0), scores.min(axis=0), strict=True)
            name = str(sketch) if sketch else "none"
            words = f"{given_k[0]:20.3f}  {given_k[1]:5.3f}  {automatic[0]:18.3f}  {automatic[1]:5.3f}"
            print(f"{name:>6}  {epsilon:7g}  {words}  {silhouette[0]:24.3f}  {silhouette[1]:5.3f}", flush=True)


if __name__ == "__main__":
    printable_streams()
    main()
