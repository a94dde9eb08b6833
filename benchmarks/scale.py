"""What the test for groups costs the server: processor time and peak memory by the number of clients.

    python -m benchmarks scale [1000 10000]

Made-up folds: four groups, or one crowd without any; vectors of 1,024 numbers, a noise of 0.2 beside differences of 0.35. Each size runs in
a process of its own, so that the peak is its own. The function is the one that a federation runs where the Gram may be seen.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from cflpriv.algorithms.grouping import FindGroups
from cflpriv.clustering.similarity import Gram

NUMBERS, GROUPS = 1024, 4
APART, NOISE = 0.35, 0.2


def folds(clients: int, groups: int, seed: int = 0) -> np.ndarray:
    """Fold means (clients, 2, NUMBERS) float32 of clients in groups, client i in group i % groups."""
    rng = np.random.default_rng(seed)
    centres = APART * rng.standard_normal((groups, NUMBERS)) / np.sqrt(2 * NUMBERS)
    noise = NOISE * np.sqrt(2 / NUMBERS)  # of a fold, so that a client's mean of two errs by NOISE
    drawn = rng.standard_normal((clients, 2, NUMBERS), np.float32) * np.float32(noise)
    return drawn + centres[np.arange(clients) % groups].astype(np.float32)[:, None]


def one(clients: int, groups: int) -> str:
    """A line of the table."""
    vectors = folds(clients, groups)
    view = SimpleNamespace(gram=Gram.of_vectors(range(clients), vectors), memory={})
    began = time.process_time()
    found, evidence = FindGroups()(view)  # type: ignore[arg-type]
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    right = all(len(set(found["labels"][group::groups].tolist())) == 1 for group in range(groups)) and found["k"] == groups
    return f"{clients:>8} {groups:>7} {found['k']:>6} {right!s:>6} {len(evidence['tests']):>6} {seconds:>10.1f} {peak:>9.2f}"


def main(words: Sequence[str]) -> int:
    if words and words[0] == "--one":
        print(one(int(words[1]), int(words[2])))
        return 0
    print(f"{'clients':>8} {'groups':>7} {'found':>6} {'right':>6} {'tests':>6} {'seconds':>10} {'peak GiB':>9}", flush=True)
    for clients in [int(word) for word in words] or [1000, 10000]:
        for groups in (GROUPS, 1):
            subprocess.run([sys.executable, "-m", "benchmarks", "scale", "--one", str(clients), str(groups)], check=True)
    return 0
