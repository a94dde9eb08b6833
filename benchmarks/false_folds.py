"""What clients that send false halves do to cross-fitted clustering: lie × number of liars, on development data.

    python -m benchmarks folds [mnist fashion_mnist ...] [--modes open careful] [--lies noisy ...] [--liars 0 1 2 4 8]
                               [--seeds 0 1 2] [--data-dir DIR] [--out FILE]

40 clients with 100 samples; liars are dealt at random, know everybody's folds and act together (`attacks.false_folds`). Reported of
the honest clients: the ARI of what was found with their true groups, the number of clusters they are in, the answer and p of the first
test. The method tests no client of `NOISIER` times the median noise and bounds lengths; `careful` liars keep to both. Finished rows are in
the file of results, and a restarted run resumes from it.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cflpriv.attacks.compared.false_folds import LIES, false_folds
from cflpriv.clustering.group_test import groups_of
from cflpriv.clustering.scores import ari
from cflpriv.clustering.similarity import Gram
from cflpriv.clustering.unbiased_gram import NOISIER, bounded, unbiased_of_folds
from cflpriv.data import DataSpec, build_population
from cflpriv.randomness import stream
from cflpriv.types import Array

from .clustering import folds_of

__all__ = ["KINDS", "main", "row"]

KINDS: Mapping[str, Mapping[str, Any]] = {
    "rotations": {"rotations": (0, 90, 180, 270)},
    "swaps": {"label_swaps": ((0, 1), (2, 3), (4, 5), (6, 7))},
    "one group": {},
}
CLIENTS, SAMPLES = 40, 100
ALPHA, DRAWS = 0.01, 499


def found(sent: Array, seed: int) -> tuple[Array, str, float]:
    """Labels, the answer and the first test's p."""
    groups = groups_of(
        unbiased_of_folds(bounded(Gram.of_vectors(range(len(sent)), sent))), stream(seed, "crossfit"), alpha=ALPHA, draws=DRAWS
    )
    return groups.labels, groups.answer, groups.nodes[0].p if groups.nodes else 1.0


def row(folds: Array, groups: Sequence[int], lie: str, liars: int, seed: int, careful: bool) -> dict[str, Any]:
    """One measurement: what honest clients get. `careful` liars stay within the limits of noise and length."""
    rng = stream(seed, f"false folds {lie} {liars}")
    chosen = rng.permutation(len(folds))[:liars]
    sent = false_folds(folds, groups, chosen, lie, rng, NOISIER if careful else 0.0)
    labels, answer, p = found(sent, seed)
    honest = np.setdiff1d(np.arange(len(folds)), chosen)
    score = ari([groups[i] for i in honest], labels[honest].tolist())
    return {"ari": float(score), "clusters": len(np.unique(labels[honest])), "k": int(labels.max()) + 1, "answer": answer, "p": p}


MODES = ("open", "careful")
"""Whether liars reckon with the limits."""


def main(words: Sequence[str]) -> int:
    """Measure all rows that are not in the file yet, and print them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks folds")
    parser.add_argument("data", nargs="*", default=["mnist", "fashion_mnist"], help="development data sets")
    parser.add_argument("--modes", nargs="*", default=MODES, choices=MODES)
    parser.add_argument("--lies", nargs="*", default=list(LIES), choices=list(LIES))
    parser.add_argument("--liars", nargs="*", type=int, default=[0, 1, 2, 4, 8])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--out", default="false_folds.jsonl")
    asked = parser.parse_args(words)
    path = Path(asked.out)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    done = {tuple(line["row"]) for line in lines}
    for seed in asked.seeds:
        for source in asked.data:
            for kind, keys in KINDS.items():
                spec = DataSpec(source=source, clients=CLIENTS, samples_per_client=SAMPLES, test_samples_per_client=50, seed=seed, **keys)
                people = build_population(spec, asked.data_dir)
                folds = folds_of(people, seed)
                for mode in asked.modes:
                    for liars in asked.liars:
                        for lie in asked.lies if liars else ["silent"]:
                            name = (source, kind, seed, mode, lie, liars)
                            if name in done:
                                continue
                            figures = row(folds, people.groups, lie, liars, seed, mode == "careful")
                            with path.open("a", encoding="utf-8") as file:
                                file.write(json.dumps({"row": name, **figures}) + "\n")
                            print(*name, *(f"{key}={value}" for key, value in figures.items()), flush=True)
    return 0
