"""What finding groups costs the server: processor time and peak memory by the number of clients.

    python -m benchmarks scale [1000 10000]            # all clients are compared with each other
    python -m benchmarks scale landmarks [10000 100000]  # some are, and all others join the nearest group
    python -m benchmarks scale [landmarks] 10000 noise=2  # clients so noisy that no rule places all of them

Made-up folds: four groups, or none; vectors of 1,024 numbers, a noise of 0.2 beside differences of 0.35. Each size runs in
a process of its own, so that the peak is its own. The functions are those that a federation runs where the Gram may be seen.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from cflpriv.aggregation.vector_epochs import Vectors
from cflpriv.algorithms.shared.grouping import LANDMARKS, FindGroups, find_groups
from cflpriv.clustering.scores import ari
from cflpriv.clustering.similarity import Gram
from cflpriv.contract.handles import Released
from cflpriv.contract.operations import GramView, Then
from cflpriv.randomness import stream

NUMBERS, GROUPS = 1024, 4
APART, NOISE = 0.35, 0.2


def folds(clients: int, groups: int, noisy: float, seed: int = 0) -> np.ndarray:
    """Fold means (clients, 2, NUMBERS) float32 of clients in groups, client i in group i % groups; `noisy` is a client's noise."""
    rng = np.random.default_rng(seed)
    centres = APART * rng.standard_normal((groups, NUMBERS)) / np.sqrt(2 * NUMBERS)
    noise = noisy * np.sqrt(2 / NUMBERS)  # of a fold, so that a client's mean of two errs by `noisy`
    drawn = rng.standard_normal((clients, 2, NUMBERS), np.float32) * np.float32(noise)
    return drawn + centres[np.arange(clients) % groups].astype(np.float32)[:, None]


def compared(clients: int, groups: int, noisy: float) -> str:
    """A line of the table: all clients compared with each other."""
    vectors = folds(clients, groups, noisy)
    view = SimpleNamespace(gram=Gram.of_vectors(range(clients), vectors), memory={})
    began = time.process_time()
    groups_found, evidence = FindGroups()(view)  # type: ignore[arg-type]
    return line(clients, groups, groups_found["k"], groups_found["labels"], len(evidence["tests"]), time.process_time() - began)


def by_landmarks(clients: int, groups: int, noisy: float) -> str:
    """A line of the table: `LANDMARKS` of the clients compared with each other."""
    vectors, kept, memory = folds(clients, groups, noisy), Vectors(), {}  # type: ignore[var-annotated]

    def gram(held: Any, then: Then, against: Any = None, on: Sequence[int] = ()) -> Released:
        whole = kept.extend(on, [vectors[client] for client in on])
        return Released(*then(GramView(whole, tuple(on), memory)))

    server: Any = SimpleNamespace(gram=gram, merge_below=1, stream=lambda purpose: stream(0, purpose))
    held: Any = SimpleNamespace(clients=tuple(range(clients)))
    began = time.process_time()
    groups_found = find_groups(server, held, FindGroups(), LANDMARKS)
    seconds, tests = time.process_time() - began, groups_found.evidence["tests"] if groups_found.evidence else ()
    return line(clients, groups, groups_found.clustering.k, groups_found.clustering.labels, len(tests), seconds)


def line(clients: int, groups: int, k: int, labels: Sequence[int], tests: int, seconds: float) -> str:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    index = 1.0 if k == groups == 1 else ari((np.arange(clients) % groups).tolist(), [int(label) for label in labels])
    return f"{clients:>8} {groups:>7} {k:>6} {index:>6.3f} {tests:>6} {seconds:>10.1f} {1e3 * seconds / clients:>12.2f} {peak:>9.2f}"


def main(words: Sequence[str]) -> int:
    if words and words[0] == "--one":
        print((by_landmarks if words[1] == "landmarks" else compared)(int(words[2]), int(words[3]), float(words[4])))
        return 0
    way, sizes = ("landmarks", (10_000, 100_000)) if words and words[0] == "landmarks" else ("all", (1_000, 10_000))
    noise = next((word.removeprefix("noise=") for word in words if word.startswith("noise=")), str(NOISE))
    print(f"{'clients':>8} {'groups':>7} {'found':>6} {'ARI':>6} {'tests':>6} {'seconds':>10} {'ms a client':>12} {'GiB':>9}", flush=True)
    for clients in [int(word) for word in words if word.isdigit()] or sizes:
        for groups in (GROUPS, 1):
            subprocess.run([sys.executable, "-m", "benchmarks", "scale", "--one", way, str(clients), str(groups), noise], check=True)
    return 0
