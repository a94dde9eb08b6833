"""The table of docs/clustering.md, cell by cell: which algorithm finds which kind of difference?

    python examples/which_finds_what.py --data-dir DIR

Every cell (setting, algorithm, seed) is one JSON file in `--out`, written when it is done; what is there is not run again, so an
interrupted table goes on where it stopped. Only the clustering is run, no longer training. The number of clusters is given to IFCA alone,
which cannot do without. MNIST, Fashion-MNIST, USPS and CIFAR-10 are read from `--data-dir` (or CFLPRIV_DATA, or data/).
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from cflpriv import DataSpec, Model, Train, build_population, simulate
from cflpriv.algorithms import cfl, ifca, pacfl, pfedlia, stocfl
from cflpriv.algorithms.interface import Algorithm
from cflpriv.clustering.scores import ari
from cflpriv.contract.operations import Sampling
from cflpriv.contract.transcript import Transcript
from cflpriv.types import Population

# Each takes the number of clients and gives the keys of a DataSpec.
SETTINGS: dict[str, Callable[[int], dict[str, Any]]] = {
    "rotated": lambda n: {"source": "mnist", "clients": n, "rotations": (0, 90, 180, 270)},
    "label-swapped": lambda n: {"source": "mnist", "clients": n, "label_swaps": ((0, 1), (2, 3), (4, 5), (6, 7))},
    "label-shifted": lambda n: {"source": "mnist", "clients": n, "label_shifts": (0, 3, 6, 9)},
    "pathological": lambda n: {
        "source": "mnist", "clients": n, "partition": "pathological", "groups": ((0, 1, 2), (3, 4), (5, 6), (7, 8, 9)),
    },
    "hybrid": lambda n: {
        "source": "mixture", "clients": 0, "sources": (("mnist", n // 2), ("fashion_mnist", n // 2)), "shared_labels": True,
    },
    "mixed": lambda n: {
        "source": "mixture", "clients": 0, "sources": tuple((name, n // 4) for name in ("cifar10", "mnist", "fashion_mnist", "usps")),
    },
}  # fmt: skip

# An algorithm with the model it is tried with, its share of clients a round, and its rounds.
Trial = tuple[Algorithm, float, int]


def mlp(scene: Population, hidden: int) -> Model:
    return Model("mlp", scene.shape, scene.classes, hidden, scene.mean, scene.std)


def try_pacfl(scene: Population, seed: int) -> Trial:
    """Equation 2, p = 3, average linkage, the cut automatic."""
    return pacfl(Train(mlp(scene, 8)), p=3, cut="silhouette", seed=seed), 1.0, 0


def try_ifca(scene: Population, seed: int) -> Trial:
    """Ten full-batch steps of 0.1 a round, as in the paper; five starts for six rounds, then the best alone. K is given."""
    train = Train(mlp(scene, 200), epochs=10, batch_size=0, lr=0.1)
    return ifca(train, k=len(set(scene.groups)), restarts=5, decide_after=6, seed=seed), 1.0, 15


def try_cfl(scene: Population, seed: int) -> Trial:
    """LeNet-5, three local epochs, the paper's rule with thresholds relative to measured norms."""
    model = Model("lenet5", scene.shape, scene.classes, mean=scene.mean, std=scene.std)
    return cfl(Train(model, epochs=3, batch_size=10, lr=0.03), eps2=0.75, seed=seed), 1.0, 40


def try_stocfl(scene: Population, seed: int) -> Trial:
    """The gradient at the anchor, τ = 0.5, a tenth of the clients in each of 60 rounds."""
    return stocfl(Train(mlp(scene, 200), epochs=1, batch_size=0, lr=0.1), tau=0.5, seed=seed), 0.1, 60


def try_pfedlia(scene: Population, seed: int) -> Trial:
    """Twenty rounds of warm-up with a tenth of the clients, lazy influence of ten local epochs, OPTICS with a tenth as min_samples."""
    least = max(2, len(scene.clients) // 10)
    return pfedlia(Train(mlp(scene, 64), epochs=1, batch_size=10, lr=0.01), warm_up=20, min_samples=least, seed=seed), 0.1, 21


ALGORITHMS: dict[str, Callable[[Population, int], Trial]] = {
    "pacfl": try_pacfl, "ifca": try_ifca, "stocfl": try_stocfl, "pfedlia": try_pfedlia, "cfl": try_cfl,
}  # fmt: skip


def cell(scene: Population, algorithm: str, seed: int) -> dict[str, Any]:
    """Cluster `scene`: the ARI over the clients placed, the clusters found, the notes."""
    began = time.perf_counter()
    tried, share, rounds = ALGORITHMS[algorithm](scene, seed)
    simulated = simulate(scene.clients, sampling=Sampling("global", share), seed=seed, transcript=Transcript("headers"))
    federation = simulated.federation
    with threadpool_limits(1):
        state = tried.init(federation)
        for number in range(rounds):
            federation.begin_round(number)
            state, _ = tried.round(federation, state)
            federation.transcript.messages.clear()
    described = tried.describe(state)
    clustering = described["clustering"]
    truth = {client.id: group for client, group in zip(scene.clients, scene.groups, strict=True)}
    return {
        "ari": ari([truth[client] for client in clustering.clients], clustering.labels),
        "clusters": len(set(clustering.labels)),
        "groups": len(set(scene.groups)),
        "placed": len(clustering.clients),
        "clients": len(scene.clients),
        "samples": sorted({client.samples for client in scene.clients}),
        "clear": described.get("clear"),
        "splits": splits(described.get("parameter_tree", ()), truth),
        "seconds": round(time.perf_counter() - began, 1),
    }


def splits(tree: Sequence[Mapping[str, Any]], truth: Mapping[int, int]) -> dict[str, int] | None:
    """CFL's splits: of clusters of several groups, how many kept every group whole; and those of clusters of one group."""
    if not tree:
        return None
    groups = [{truth[client] for client in node["clients"]} for node in tree]
    counts = {"right": 0, "wrong": 0, "pure": 0}
    for node, own in zip(tree, groups, strict=True):
        if node["children"]:
            left, right = (groups[child] for child in node["children"])
            counts["pure" if len(own) == 1 else "wrong" if left & right else "right"] += 1
    return counts


def row(setting: str, results: Mapping[tuple[str, str, int], Mapping[str, Any]], algorithms: Sequence[str], seeds: Sequence[int]) -> str:
    """A line of the table: per algorithm the ARI of each seed and, where it is not the truth, the clusters found."""
    shown = []
    for algorithm in algorithms:
        cells = [results[setting, algorithm, seed] for seed in seeds if (setting, algorithm, seed) in results]
        if not cells:
            shown.append("")
            continue
        if all(one["clear"] is False for one in cells):
            shown.append("no clear structure")
            continue
        scores = [one["ari"] for one in cells]
        found = sorted({one["clusters"] for one in cells})
        low, high = f"{min(scores):.2f}", f"{max(scores):.2f}"
        text = low if low == high else f"{low} – {high}"
        wrong = "" if found == [cells[0]["groups"]] else f" (K {found[0]}{f' – {found[-1]}' if len(found) > 1 else ''})"
        shown.append(text + wrong + ("" if len(cells) == len(seeds) else f" ({len(cells)} of {len(seeds)} seeds)"))
    return f"| {setting} | " + " | ".join(shown) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir")
    parser.add_argument("--out", type=Path, default=Path("runs/which_finds_what"))
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--table-only", action="store_true")
    chosen = parser.parse_args()
    settings, algorithms, seeds = chosen.settings.split(","), chosen.algorithms.split(","), range(chosen.seeds)
    chosen.out.mkdir(parents=True, exist_ok=True)
    results = {}
    for algorithm in algorithms:
        for setting in settings:
            for seed in seeds:
                path = chosen.out / f"{setting}_{algorithm}_{chosen.clients}x{chosen.samples}_{seed}.json"
                if not path.exists():
                    if chosen.table_only:
                        continue
                    keys = SETTINGS[setting](chosen.clients)
                    spec = DataSpec(**keys, samples_per_client=chosen.samples, test_samples_per_client=1, seed=seed)
                    result = cell(build_population(spec, chosen.data_dir), algorithm, seed)
                    path.with_suffix(".part").write_text(json.dumps(result) + "\n", encoding="utf-8")
                    os.replace(path.with_suffix(".part"), path)
                    print(f"{setting}, {algorithm}, seed {seed}: {result}", flush=True)
                results[setting, algorithm, seed] = json.loads(path.read_text(encoding="utf-8"))
    print(f"\n| {chosen.clients} clients × {chosen.samples} | " + " | ".join(algorithms) + " |\n|" + "---|" * (len(algorithms) + 1))
    for setting in settings:
        print(row(setting, results, algorithms, seeds))


if __name__ == "__main__":
    main()
