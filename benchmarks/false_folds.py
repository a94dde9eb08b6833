"""What clients that send false halves do to cross-fitted clustering: lie × number of liars, on development data.

    python -m benchmarks folds [mnist fashion_mnist ...] [--modes open screen careful] [--lies noisy ...] [--liars 0 1 2 4 8]
                               [--seeds 0 1 2] [--data-dir DIR] [--out FILE]

40 clients with 100 samples; liars are dealt at random, know everybody's folds and act together (`attacks.false_folds`). Reported of
the honest clients: the ARI of what was found with their true groups, the number of clusters they are in, the answer and p of the first
test. A screen sets clients aside before the test whose noise trace or length is implausible (`screened`); `careful` liars keep to its
limits. Finished rows are in the file of results, and a restarted run resumes from it.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cflpriv.attacks.false_folds import LIES, false_folds
from cflpriv.clustering.group_test import _centred, _edge, bounded, crowd_of_folds, distances_to_groups, groups_of
from cflpriv.clustering.scores import ari
from cflpriv.clustering.similarity import Gram
from cflpriv.data import DataSpec, build_population
from cflpriv.randomness import stream
from cflpriv.types import Array

from .clustering import folds_of

__all__ = ["KINDS", "main", "row", "screened"]

KINDS: Mapping[str, Mapping[str, Any]] = {
    "rotations": {"rotations": (0, 90, 180, 270)},
    "swaps": {"label_swaps": ((0, 1), (2, 3), (4, 5), (6, 7))},
    "one group": {},
}
CLIENTS, SAMPLES = 40, 100
ALPHA, DRAWS = 0.01, 499
MEDIAN_OF_CHI_SQUARE = 0.455
WITHIN = 8.0
"""Factor by which an honest client's noise trace and squared norms may differ from the median: eight times fewer or more samples."""


def screened(gram: Gram, within: float = WITHIN) -> Array:
    """Who is tested (n,) bool: the noise trace within this factor of the median, and the squared norm of no half above it times that."""
    blocks = [gram.block(slice(i, i + 1), slice(i, i + 1))[0, :, 0, :] for i in range(gram.n)]
    squares = np.array([np.diagonal(block) for block in blocks]).max(1)
    traces = np.array([block[0, 0] + block[1, 1] - 2 * block[0, 1] for block in blocks]) / 4
    trace, square = np.median(traces), np.median(squares)
    return np.asarray((traces <= within * trace) & (traces >= trace / within) & (squares <= within * square))


def found(sent: Array, seed: int, screen: bool) -> tuple[Array, str, float]:
    """Labels, the answer and the first test's p. With a `screen` clients set aside join the nearest group afterwards."""
    whole = bounded(Gram.of_vectors(range(len(sent)), sent))
    kept = screened(whole) if screen else np.ones(len(sent), bool)
    order = np.concatenate([np.flatnonzero(kept), np.flatnonzero(~kept)])
    tested = bounded(Gram.of_vectors(range(int(kept.sum())), sent[kept]))
    groups = groups_of(crowd_of_folds(tested), stream(seed, "crossfit"), alpha=ALPHA, draws=DRAWS)
    labels = np.empty(len(sent), np.int64)
    labels[kept] = groups.labels
    if not kept.all():
        gram = bounded(Gram.of_vectors(order.tolist(), sent[order]))
        squares = distances_to_groups(gram, range(len(groups.labels), len(sent)), groups.labels, groups.k)
        labels[~kept] = squares.argmin(1)
    return labels, groups.answer, groups.nodes[0].p if groups.nodes else 1.0


def row(folds: Array, groups: Sequence[int], lie: str, liars: int, seed: int, screen: bool, careful: bool) -> dict[str, Any]:
    """One measurement: what honest clients get. `careful` liars stay within the limits of the screen."""
    rng = stream(seed, f"false folds {lie} {liars}")
    chosen = rng.permutation(len(folds))[:liars]
    sent = false_folds(folds, groups, chosen, lie, rng, WITHIN if careful else 0.0)
    labels, answer, p = found(sent, seed, screen)
    honest = np.setdiff1d(np.arange(len(folds)), chosen)
    score = ari([groups[i] for i in honest], labels[honest].tolist())
    return {"ari": float(score), "clusters": len(np.unique(labels[honest])), "k": int(labels.max()) + 1, "answer": answer, "p": p}


def edges(folds: Array, groups: Sequence[int], lie: str, liars: int, seed: int) -> dict[str, float]:
    """The noise edge by its two rules as they are, and by robust ones, for careful liars; and the third eigenvalue of the products.

    "median": the simulated part from the median trace, and the spread from the median of Q_ij² / (t_i t_j) (of a χ² of one degree).
    "trimmed": the leading eigenvalue of the noise Gram off its diagonal, noise no longer than the median's, without the fifth of clients
    that weigh most in it, for all n.
    """
    rng = stream(seed, f"edges {lie} {liars}")
    sent = false_folds(folds, groups, rng.permutation(len(folds))[:liars], lie, rng, WITHIN)
    crowd = crowd_of_folds(bounded(Gram.of_vectors(range(len(sent)), sent)))
    assert crowd.noise is not None  # of folds
    noise, own, n = crowd.noise, np.diag(crowd.noise), len(sent)
    between, median = noise - np.diag(own), float(np.median(own))
    spread = float(np.median((between**2 / np.outer(own, own))[np.triu_indices(n, 1)])) / MEDIAN_OF_CHI_SQUARE * median**2
    plain = replace(crowd, noise=None)
    honest = replace(plain, traces=np.full(n, median), spread=spread)
    short = np.minimum(1.0, np.sqrt(median / own))
    capped = between * short[:, None] * short
    weight = np.abs(np.linalg.eigh(_centred(capped))[1][:, -1])
    kept = np.argsort(weight)[: n - n // 5]
    return {
        "third": float(np.linalg.eigvalsh(_centred(crowd.products))[-3]),
        "simulated": _edge(plain, stream(seed, "edge")), "median": _edge(honest, stream(seed, "edge")), "leading": _top(between),
        "trimmed": _top(capped[np.ix_(kept, kept)]) * (n - 1) / (len(kept) - 1),
    }  # fmt: skip


def _top(matrix: Array) -> float:
    return float(np.linalg.eigvalsh(_centred(matrix))[-1])


MODES: Mapping[str, tuple[bool, bool]] = {"open": (False, False), "screen": (True, False), "careful": (True, True), "edges": (False, True)}
"""Whether there is a screen, and whether liars reckon with it. "edges" reports noise edges (`edges`), not clusters."""


def main(words: Sequence[str]) -> int:
    """Measure all rows that are not in the file yet, and print them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks folds")
    parser.add_argument("data", nargs="*", default=["mnist", "fashion_mnist"], help="development data sets")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--lies", nargs="*", default=list(LIES), choices=list(LIES))
    parser.add_argument("--liars", nargs="*", type=int, default=[0, 1, 2, 4, 8])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--out", default="false_folds.jsonl")
    asked = parser.parse_args(words)
    path = Path(asked.out)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    done = {tuple(one["row"]) for one in lines}
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
                            screen, careful = MODES[mode]
                            given = (folds, people.groups, lie, liars, seed)
                            figures = edges(*given) if mode == "edges" else row(*given, screen, careful)
                            with path.open("a", encoding="utf-8") as file:
                                file.write(json.dumps({"row": name, **figures}) + "\n")
                            print(*name, *(f"{key}={value}" for key, value in figures.items()), flush=True)
    return 0
