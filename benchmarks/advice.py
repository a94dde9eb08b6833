"""What the advice is worth: its accuracy on test data beside the best option in hindsight, and what its intervals hold.

    python -m benchmarks advice [--out FILE.csv] [--data-dir DIR] [--scenes "usps permutations;omniglot"] [--seeds 2]

A scene is one federation; each scene and seed is one line of a CSV file, written when it is done. What is there is not run again. Every run
finds its groups with `crossfit` and the defaults. `best`: the highest mean test accuracy of all options and of all models that clients keep
(fine-tuned ones too), chosen on test data. `loss`: best minus the advice, in points. `control`: for an advice of clusters the mean test
difference to random clusters and its 95 per cent t-interval over clients. `held`: how many of the held-out intervals of differences between
options hold the mean difference on test data, of how many.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from threadpoolctl import threadpool_limits

from cflpriv.advice.procedure import Advised
from cflpriv.advice.verdict import CLUSTERS, CLUSTERS_MIXTURE, ONE_MIXTURE, RANDOM, RANDOM_MIXTURE
from cflpriv.algorithms.interface import Served
from cflpriv.errors import InputError
from cflpriv.experiments import advance, parse_config, start
from cflpriv.experiments.run.advising import advised, test_accuracies
from cflpriv.experiments.run.loop import Experiment
from cflpriv.experiments.run.measure import served_accuracy
from cflpriv.tasks.evaluation import EvaluateOwn
from cflpriv.types import Array

from .clustering import CLASSES, KINDS, add, read

__all__ = ["SCENES", "main"]

FIELDS = (
    "scene", "seed", "clusters", "advice", "decided", "clear", "accuracy", "best", "best_option", "loss", "mixture", "single",
    "one_model", "cluster_models", "control", "control_low", "control_high", "held", "pairs", "client_epochs", "numbers", "seconds",
)  # fmt: skip
REAL = ("wisdm", "beijing48", "sentiment")
"""Real clients by whom the constants of the advice were chosen."""
SHIFTED = {
    f"{data} {kind}": {
        "source": data, "clients": 40, "samples_per_client": samples, "test_samples_per_client": 40, **KINDS[kind](CLASSES.get(data, 10)),
    }
    for data, kind, samples in (
        ("usps", "permutations", 100), ("usps", "rotations", 100), ("usps", "swaps", 100), ("usps", "one group", 100),
        ("emnist_letters", "permutations", 150), ("emnist_letters", "label sets", 150), ("fashion_mnist", "rotations", 40),
        ("fashion_mnist", "swaps", 100),
    )
}  # fmt: skip
SCENES: Mapping[str, Mapping[str, Any]] = {
    **{name: {"source": "npz", "paths": [f"real_clients/{name}.npz"], "partition": "given"} for name in REAL},
    **SHIFTED,
    "omniglot drawers": {"source": "omniglot", "partition": "given"},
    "fashion_mnist dirichlet": {
        "source": "fashion_mnist", "partition": "dirichlet", "clients": 40, "samples_per_client": 100, "test_samples_per_client": 40,
    },
}  # fmt: skip


def line(scene: str, seed: int, directory: str | None) -> dict[str, Any]:
    """One line of the table."""
    began = time.process_time()
    tree = {
        "data": {**SCENES[scene], "seed": seed}, "model": {"name": "mlp"}, "algorithm": {"name": "crossfit"},
        "training": {"rounds": 20, "epochs": 2, "batch_size": 25, "lr": 0.1}, "run": {"seed": seed, "advise": True},
    }  # fmt: skip
    with threadpool_limits(1):
        run = start(parse_config(tree), directory)
        for _ in range(run.config.training.rounds):
            advance(run)
        outcome = advised(run)
        accuracies = {name: 100 * values for name, values in test_accuracies(run, outcome).items()}
        kept = {name: 100 * values for name, values in _kept(run, outcome).items()}
    verdict, held_out = outcome.verdict, sum(len(client.held_out[1]) for client in run.population.clients if client.held_out is not None)
    trained = sum(client.samples for client in run.population.clients)
    epochs = outcome.passes * trained / (trained + held_out)
    options = {**kept, **{name: values for name, values in accuracies.items() if not name.startswith("random")}}
    means = {name: float(np.nanmean(values)) for name, values in options.items()}
    best = max(means, key=lambda name: means[name])
    mixtures = (ONE_MIXTURE, CLUSTERS_MIXTURE)
    advice = means[verdict.advice]
    low_mean_high = _control(verdict.advice, accuracies)
    later_differences = [_later(pair.better, pair.other, accuracies) for pair in verdict.differences]
    return {
        "scene": scene, "seed": seed, "clusters": len(set(run.algorithm.describe(run.state)["clustering"].labels)),
        "advice": verdict.advice, "decided": verdict.decided, "clear": verdict.clear, "accuracy": round(advice, 2),
        "best": round(means[best], 2), "best_option": best, "loss": round(means[best] - advice, 2),
        "mixture": round(means[CLUSTERS_MIXTURE if CLUSTERS_MIXTURE in verdict.allowed else ONE_MIXTURE], 2),
        "single": round(max(mean for name, mean in means.items() if name not in mixtures), 2),
        "one_model": round(means["one model"], 2), "cluster_models": round(means[CLUSTERS], 2) if CLUSTERS in means else "",
        **dict(zip(("control", "control_low", "control_high"), low_mean_high, strict=True)),
        "held": sum(100 * pair.low <= gain <= 100 * pair.high for pair, gain in zip(verdict.differences, later_differences, strict=True)),
        "pairs": len(later_differences), "client_epochs": round(epochs, 2), "numbers": outcome.numbers,
        "seconds": round(time.process_time() - began, 1),
    }  # fmt: skip


def _kept(run: Experiment, outcome: Advised) -> dict[str, Array]:
    """Test accuracies (clients,) of all models that clients keep for a mixture, fine-tuned ones too."""
    model = run.config.model_for(run.population)
    names = {name for served in outcome.served.values() for name in getattr(served.task, "names", ()) if "random" not in name}
    first = {"model": model.init(0)}
    clients = run.federation.clients
    return {name: served_accuracy(run.simulated, Served(EvaluateOwn(model, name), first), clients) for name in sorted(names)}


def _later(better: str, other: str, accuracies: Mapping[str, Array]) -> float:
    """The mean difference on test data; deals of random clusters count together."""
    means = []
    for option in (better, other):
        deals = [
            values for name, values in accuracies.items() if name == option or (option == RANDOM and name[len(RANDOM) + 1 :].isdigit())
        ]
        means.append(np.nanmean(deals))
    return float(means[0] - means[1])


def _control(advice: str, accuracies: Mapping[str, Array]) -> tuple[float | str, ...]:
    """The mean, low and high of clusters minus random clusters on test data, where clusters are advised."""
    if advice not in (CLUSTERS, CLUSTERS_MIXTURE):
        return "", "", ""
    deals = [values for name, values in accuracies.items() if name.startswith(RANDOM) and name != RANDOM_MIXTURE]
    gains = accuracies[CLUSTERS] - np.mean(deals, axis=0)
    gains = gains[np.isfinite(gains)]
    half = float(stats.t.ppf(0.975, len(gains) - 1) * gains.std(ddof=1) / np.sqrt(len(gains)))
    mean = float(gains.mean())
    return round(mean, 2), round(mean - half, 2), round(mean + half, 2)


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table, and the counts by which the advice is judged."""
    lines = ["| scene | seed | clusters | one model | cluster models | mixture | advice | accuracy | best | loss |", "|" + "---|" * 10]
    lines += [
        f"| {row['scene']} | {row['seed']} | {row['clusters']} | {row['one_model']} | {row['cluster_models'] or '–'} | {row['mixture']} | "
        f"{row['advice']} | {row['accuracy']} | {row['best']} ({row['best_option']}) | {row['loss']} |"
        for row in rows
    ]
    losses = np.array([float(row["loss"]) for row in rows])
    clusters = [row for row in rows if row["control"] != ""]
    inside = sum(float(row["control_low"]) <= 0 for row in clusters)
    held, pairs = (sum(int(row[key]) for row in rows) for key in ("held", "pairs"))
    lines += [
        "",
        f"{int((losses <= 1).sum())} of {len(rows)} within a point of the best; mean loss {losses.mean():.2f}, largest {losses.max():.2f}",
        f"clusters advised in {len(clusters)}; random clusters within the test interval in {inside} of these",
        f"{held} of {pairs} intervals hold the difference on test data",
        f"client epochs at most {max(float(row['client_epochs']) for row in rows):.2f} times those of a run without advice",
    ]
    return "\n".join(lines)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks advice", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/advice.csv"))
    parser.add_argument("--data-dir")
    parser.add_argument("--scenes", default=";".join(name for name in SCENES if name not in REAL), help="names with ; between them")
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args(list(words))
    scenes = options.scenes.split(";")
    if unknown := [scene for scene in scenes if scene not in SCENES]:
        parser.error(f"--scenes: {unknown[0]!r} is not known; known are {', '.join(SCENES)}")
    try:
        rows = read(options.out, FIELDS)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        done = {(str(row["scene"]), str(row["seed"])) for row in rows}
        for scene in scenes:
            for seed in range(options.seeds):
                if (scene, str(seed)) not in done:
                    rows.append(line(scene, seed, options.data_dir))
                    add(options.out, FIELDS, rows[-1])
                    print(f"{scene}, seed {seed}: {rows[-1]['advice']}, loss {rows[-1]['loss']}", flush=True)
    except InputError as error:
        parser.error(str(error))
    print(summary(rows))
    return 0
