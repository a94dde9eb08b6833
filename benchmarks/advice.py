"""What the advice is worth: its balanced accuracy on test data beside the best option in hindsight, and what its intervals hold.

    python -m benchmarks advice [--out FILE.csv] [--data-dir DIR] [--scenes "usps permutations;omniglot"] [--seeds 2] [--first 0]

A scene is one federation; each scene and seed is one line of a CSV file, written when it is done. What is there is not run again. Every run
finds its groups with `crossfit` and the defaults. Scores are balanced accuracies of all clients' test samples together. `best`: the highest
of all options and of all models that clients keep (fine-tuned ones too), chosen on test data. `loss`: best minus the advice, in points.
`control`: for an advice of clusters the test difference to random clusters and its 95 per cent interval over clients. `held`: how many of
the held-out intervals of differences between options hold the difference on test data, of how many.

The rule, frozen before the first judged run: in nine of ten runs the advice is within a point of the best, the mean loss is at most 0.3,
nine of ten intervals hold the test difference, and clusters are never advised where random clusters lie inside the interval.

In the scenes `rare yes` a fifth of the samples are of class 1, those of two labels of ten; with `concepts` each group says yes to labels of
its own. In the scenes `one large class` four fifths of the samples are of one class, and two classes have a tenth each.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from cflpriv.advice.procedure import Advised
from cflpriv.advice.verdict import CLUSTERS, CLUSTERS_MIXTURE, ONE_MIXTURE, RANDOM, differences, moments_of
from cflpriv.algorithms.interface import Served
from cflpriv.class_counts import as_counts
from cflpriv.data import build_population
from cflpriv.engine import Result
from cflpriv.errors import InputError
from cflpriv.experiments import advance, parse_config, start
from cflpriv.experiments.run.advising import advised, score_of, test_results
from cflpriv.experiments.run.loop import Experiment
from cflpriv.experiments.run.measure import served_results
from cflpriv.randomness import stream
from cflpriv.tasks.balanced_scores import class_masses, class_weights, contribution, sample_weights
from cflpriv.tasks.evaluation import EvaluateOwn
from cflpriv.types import Array, Population

from .clustering import CLASSES, KINDS, WITHOUT_GROUPS, add, read

__all__ = ["main"]

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


RARE_YES, LARGE_CLASS, CONCEPTS = "rare yes", "one large class", "concepts"
IMBALANCED: Mapping[str, tuple[str, str]] = {
    f"{data} {classes}, {kind}": (classes, kind)
    for data in ("mnist", "usps", "emnist_letters", "fashion_mnist")
    for classes, kind in (
        (RARE_YES, "rotations"), (RARE_YES, CONCEPTS), (RARE_YES, "one group"), (LARGE_CLASS, "rotations"), (LARGE_CLASS, "continuum"),
    )
}  # fmt: skip
"""Scene -> its classes and what groups differ in. Those of MNIST are for development."""
JUDGED = tuple(name for name in (*SCENES, *IMBALANCED) if name not in REAL and not name.startswith("mnist "))


def data_of(scene: str) -> Mapping[str, Any]:
    """The section [data] of a scene."""
    if scene not in IMBALANCED:
        return SCENES[scene]
    source, kind = scene.split(" ")[0], IMBALANCED[scene][1]
    keys = {} if kind == CONCEPTS else KINDS[kind](CLASSES.get(source, 10))
    if kind in WITHOUT_GROUPS and keys:
        keys["even_test"] = False  # a client's test samples are like its held-out ones
    return {"source": source, "clients": 40, "samples_per_client": 100, "test_samples_per_client": 40, **keys}


def people_of(scene: str, population: Population) -> Population:
    """The population with the classes of an imbalanced scene."""
    if scene not in IMBALANCED:
        return population
    classes, kind = IMBALANCED[scene]

    def named(labels: Array, group: int) -> Array:
        tenths = labels * 10 // population.classes
        if classes == LARGE_CLASS:
            return np.where(tenths == 8, 1, np.where(tenths == 9, 2, 0))
        first = 2 * group if kind == CONCEPTS else 0
        return np.isin(tenths, (first, first + 1)).astype(np.int64)

    clients, groups = [], population.groups
    if kind == CONCEPTS:
        groups = tuple(place % 4 for place in range(len(population.clients)))
    for client, group in zip(population.clients, groups, strict=True):
        held_out = None if client.held_out is None else (client.held_out[0], named(client.held_out[1], group))
        clients.append(replace(client, y_train=named(client.y_train, group), y_test=named(client.y_test, group), held_out=held_out))
    return replace(population, clients=tuple(clients), groups=groups, classes=3 if classes == LARGE_CLASS else 2, class_names=())


def line(scene: str, seed: int, directory: str | None) -> dict[str, Any]:
    """One line of the table."""
    began = time.process_time()
    tree = {
        "data": {**data_of(scene), "seed": seed}, "model": {"name": "mlp"}, "algorithm": {"name": "crossfit"},
        "training": {"rounds": 20, "epochs": 2, "batch_size": 25, "lr": 0.1}, "run": {"seed": seed, "advise": True},
    }  # fmt: skip
    with threadpool_limits(1):
        config = parse_config(tree)
        run = start(config, directory, people_of(scene, build_population(config.data, directory)))
        for _ in range(run.config.training.rounds):
            advance(run)
        outcome = advised(run)
        results = test_results(run, outcome)
        kept = _kept(run, outcome)
    verdict, held_out = outcome.verdict, sum(len(client.held_out[1]) for client in run.population.clients if client.held_out is not None)
    trained = sum(client.samples for client in run.population.clients)
    epochs = outcome.passes * trained / (trained + held_out)
    scores = {name: 100 * (score_of(values) or 0.0) for name, values in {**kept, **results}.items()}
    means = {name: score for name, score in scores.items() if not name.startswith(RANDOM)}
    best = max(means, key=lambda name: means[name])
    mixtures = (ONE_MIXTURE, CLUSTERS_MIXTURE)
    advice = means[verdict.advice]
    low_mean_high = _control(verdict.advice, results)
    later_differences = [_later(pair.better, scores) - _later(pair.other, scores) for pair in verdict.differences]
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


def _kept(run: Experiment, outcome: Advised) -> dict[str, list[Result]]:
    """Clients' evaluations of all models that they keep for a mixture, fine-tuned ones too."""
    model = run.config.model_for(run.population)
    names = {name for served in outcome.served.values() for name in getattr(served.task, "names", ()) if "random" not in name}
    first = {"model": model.init(0)}
    clients = run.federation.clients
    return {name: served_results(run.simulated, Served(EvaluateOwn(model, name), first), clients) for name in sorted(names)}


def _later(option: str, scores: Mapping[str, float]) -> float:
    """The score on test data; deals of random clusters count together."""
    return float(np.mean([score for name, score in scores.items() if name == option or (option == RANDOM and _is_deal(name))]))


def _is_deal(name: str) -> bool:
    return name.startswith(f"{RANDOM} ") and name[len(RANDOM) + 1 :].isdigit()


def _control(advice: str, results: Mapping[str, Sequence[Result]]) -> tuple[float | str, ...]:
    """The difference, low and high, in points, of clusters minus random clusters on test data, where clusters are advised."""
    if advice not in (CLUSTERS, CLUSTERS_MIXTURE):
        return "", "", ""
    own = [CLUSTERS, *filter(_is_deal, results)]
    clients = [each for each in zip(*(results[name] for name in own), strict=True) if float(each[0]["count"])]
    made = [_right_of(each) for each in clients]
    classes = max((int(labels.max()) for labels, _ in made), default=0) + 1
    weights = class_weights(np.mean([class_masses(labels, classes) for labels, _ in made], axis=0), len(made))
    weights = weights if as_counts(np.asarray(clients[0][0]["confusion"])) else np.zeros(0)
    mean = np.mean([contribution(right, sample_weights(labels, weights)) for labels, right in made], axis=0)
    names = [CLUSTERS, *[RANDOM] * (len(own) - 1)]
    (gain,) = differences(moments_of(names, mean, len(made)), [(CLUSTERS, RANDOM)], stream(0, "control on test data"))
    return round(100 * gain.mean, 2), round(100 * gain.low, 2), round(100 * gain.high, 2)


def _right_of(results: Sequence[Result]) -> tuple[Array, Array]:
    """A client's test labels (n,), and of each of its evaluations the shares of these that are right, by class (evaluations, n).

    Where no class is counted all samples have label 0.
    """
    of_all = [as_counts(np.asarray(result["confusion"])) for result in results]
    if of_all[0] is None:
        labels = np.zeros(int(results[0]["count"]), dtype=np.int64)
        return labels, np.array([np.full(len(labels), float(result["correct"]) / len(labels)) for result in results])
    labels = np.repeat(np.arange(len(of_all[0].samples)), of_all[0].samples.astype(np.int64))
    return labels, np.array([np.nan_to_num(counts.recalls)[labels] for counts in of_all if counts is not None])


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
    parser.add_argument("--scenes", default=";".join(JUDGED), help="names with ; between them")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args(list(words))
    scenes = options.scenes.split(";")
    if unknown := [scene for scene in scenes if scene not in (*SCENES, *IMBALANCED)]:
        parser.error(f"--scenes: {unknown[0]!r} is not known; known are {', '.join((*SCENES, *IMBALANCED))}")
    try:
        rows = read(options.out, FIELDS)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        done = {(str(row["scene"]), str(row["seed"])) for row in rows}
        for scene in scenes:
            for seed in range(options.first, options.first + options.seeds):
                if (scene, str(seed)) not in done:
                    rows.append(line(scene, seed, options.data_dir))
                    add(options.out, FIELDS, rows[-1])
                    print(f"{scene}, seed {seed}: {rows[-1]['advice']}, loss {rows[-1]['loss']}", flush=True)
    except InputError as error:
        parser.error(str(error))
    print(summary(rows))
    return 0
