"""What crossfit's released counts reveal to an adversary that knows the folds of all clients but one.

    python examples/what_a_test_tells.py [--repeats 60]

12 clients of the digits with 20 samples. Only one client's random halves are unknown, and which of two data sets it has. The release
(labels, stage, directions, exceeding) is drawn for both; an adversary that saw half of the draws guesses on the others. Printed: right
less wrong guesses of the first data set (0: the counts reveal nothing, 1: everything).
"""

import argparse
from collections import Counter
from typing import Any

import numpy as np

from cflpriv import Model
from cflpriv.attacks.compared.fold_release import sample_vectors
from cflpriv.clustering.group_test import groups_of
from cflpriv.clustering.similarity import Gram
from cflpriv.clustering.unbiased_gram import bounded, unbiased_of_folds
from cflpriv.data import DataSpec, build_population
from cflpriv.randomness import stream
from cflpriv.streams import printable_streams
from cflpriv.tasks.fold_gradients import FoldGradients, fold_weights
from cflpriv.types import Array

SCENES: dict[str, dict[str, Any]] = {
    "one group": {}, "two labels swapped": {"label_swaps": ((0, 1), (2, 3))}, "rotations": {"rotations": (0, 90)},
}  # fmt: skip
DRAWS, ALPHA = 99, 0.05


def released(folds: Array) -> tuple[Any, ...]:
    """What the public function gives: labels, stage, directions, exceeding."""
    n = len(folds)
    groups = groups_of(unbiased_of_folds(bounded(Gram.of_vectors(range(n), folds))), stream(0, "crossfit"), alpha=ALPHA, draws=DRAWS)
    first = groups.nodes[0]
    stage = 1 if not first.directions else 2 if first.draws < DRAWS else 3
    return tuple(groups.labels.tolist()), stage, first.directions, min(first.exceeding, n)


def advantage(draws: list[Any], other: list[Any]) -> float:
    """Right less wrong guesses on the second halves, by counts of the first halves."""
    half = len(draws) // 2
    own, theirs = Counter(draws[:half]), Counter(other[:half])
    right, wrong = (sum(own[value] >= theirs[value] for value in values[half:]) for values in (draws, other))
    return (right - wrong) / (len(draws) - half)


def main() -> None:
    """Print the advantage for three scenes and two pairs of data sets."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=60)
    repeats = parser.parse_args().repeats
    for name, keys in SCENES.items():
        people = build_population(DataSpec(clients=12, samples_per_client=20, seed=1, **keys))
        model = Model("mlp", people.shape, people.classes, 16, people.mean, people.std)
        task, anchor, rng = FoldGradients(model), model.init(0), np.random.default_rng(0)
        data = [(sample_vectors(task, anchor, client.x_train, client.y_train), client.y_train) for client in people.clients]
        known = np.stack([fold_weights(y, True, rng) @ vectors for vectors, y in data])

        def drawn(vectors: Array, y: Array, known: Array = known, rng: np.random.Generator = rng) -> list[Any]:
            return [released(np.concatenate([(fold_weights(y, True, rng) @ vectors)[None], known[1:]])) for _ in range(repeats)]

        replaced = (np.concatenate([data[2][0][:1], data[0][0][1:]]), np.concatenate([data[2][1][:1], data[0][1][1:]]))
        first = drawn(*data[0])
        near, far = (advantage(first, drawn(*data_set)) for data_set in (replaced, data[1]))
        print(f"{name}: one sample replaced {near:.2f}, the data of client 1 {far:.2f}", flush=True)


if __name__ == "__main__":
    printable_streams()
    main()
