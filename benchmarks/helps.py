"""When clustering helps: accuracy of clustered methods beside one shared model and beside random clusters of the same sizes.

    python -m benchmarks helps [--out FILE.csv] [--data-dir DIR] [--data usps] [--seeds 3] [--methods "crossfit;ocfl"]
    python -m benchmarks helps --data wisdm --methods all

A data set with real clients (`data.real_clients`) has the kind "real clients": its own clients and test rows. Seeds draw the training then,
not the data. `all`: every algorithm with its defaults; `oracle` where the true groups are known. The controls are `local` and the column
`shuffled`.

Every cell (kind of difference, seed, method) is one line of a CSV file, written when it is done. What is there is not run again.

The rule, written before the first run: a method **helps** on a kind of difference if the accuracy of the model that clients would use, on
their own test data and paired by seed, is by a point or more above FedAvg's with the 95 per cent t-interval over seeds above 0, and its
interval above random clusters of the same sizes is above 0, too. It **harms** if it is by a point or more below FedAvg with the interval
below 0. Else nothing was shown.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from threadpoolctl import threadpool_limits

from cflpriv import DataSpec, Train, build_population, simulate
from cflpriv.algorithms import ALGORITHMS
from cflpriv.algorithms.interface import Algorithm
from cflpriv.clustering.scores import ari
from cflpriv.contract.transcript import Transcript
from cflpriv.data.real_clients import REAL_CLIENTS
from cflpriv.errors import InputError
from cflpriv.experiments.run.measure import chosen, local_scores, served_accuracy, served_results
from cflpriv.types import Array, Population

from .clustering import CLASSES, KINDS, WITHOUT_GROUPS, add, after_rounds, mlp, read

__all__ = ["main", "verdict"]

CHOSEN, REAL = ("rotations", "label sets", "swaps", "one group"), "real clients"
CLIENTS, SAMPLES, TEST_SAMPLES, ROUNDS = 40, 100, 40, 15
FIELDS = ("data", "kind", "seed", "method", "clusters", "ari", "accuracy", "local", "shuffled", "answer", "seconds")
LEAST = 1.0
"""Points of accuracy."""


def people_of(data: str, kind: str, seed: int, directory: str | None) -> Population:
    if kind == REAL:
        return build_population(DataSpec(source=data, partition="given", clients=0, seed=seed), directory)
    keys = KINDS[kind](CLASSES.get(data, 10))
    spec = DataSpec(
        source=data, clients=CLIENTS, samples_per_client=SAMPLES, test_samples_per_client=TEST_SAMPLES, seed=seed, **keys
    )  # fmt: skip
    return build_population(spec, directory)


def trained(people: Population, algorithm: Algorithm, seed: int) -> tuple[float, float, list[int], str]:
    """Accuracy in per cent of the models in use and of the last local ones, clients' clusters, and what the method answers."""
    simulated = simulate(people.clients, seed=seed, transcript=Transcript("headers"))
    federation = simulated.federation
    state = after_rounds(federation, algorithm, ROUNDS)
    served, clients = algorithm.serve(state), federation.clients
    described = algorithm.describe(state)
    clustering = described.get("clustering")
    labels = list(clustering.labels) if clustering is not None else chosen(served_results(simulated, served, clients)) or [0] * len(clients)
    used, local = served_accuracy(simulated, served, clients), local_scores(simulated, mlp(people), clients)[0]
    return 100 * float(used.mean()), 100 * float(local.mean()), labels, str(described.get("answer", ""))


def cell(data: str, kind: str, seed: int, method: str, people: Population) -> dict[str, Any]:
    """One line of the table. `shuffled`: the accuracy with the method's clusters dealt to random clients, before the first round."""
    began = time.process_time()
    train = Train(mlp(people), epochs=2, batch_size=25, lr=0.1)
    known = {client.id: group for client, group in zip(people.clients, people.groups, strict=True)}
    keys = {"groups": known} if method == "oracle" else {}
    with threadpool_limits(1):
        accuracy, local, labels, answer = trained(people, ALGORITHMS[method].make(train, seed=seed, **keys), seed)
        shuffled: float | str = ""
        if len(set(labels)) > 1:
            dealt = np.random.default_rng(seed).permutation(labels)
            groups = dict(zip((client.id for client in people.clients), (int(label) for label in dealt), strict=True))
            shuffled = round(trained(people, ALGORITHMS["oracle"].make(train, groups=groups, seed=seed), seed)[0], 2)
    truth = [0] * CLIENTS if kind in WITHOUT_GROUPS else people.groups
    agreement = "" if kind == REAL and not people.groups_known else round(ari(truth, labels), 4)
    return {
        "data": data, "kind": kind, "seed": seed, "method": method, "clusters": len(set(labels)), "ari": agreement,
        "accuracy": round(accuracy, 2), "local": round(local, 2), "shuffled": shuffled, "answer": answer,
        "seconds": round(time.process_time() - began, 2),
    }  # fmt: skip


def methods_for(asked: str, people: Population) -> list[str]:
    """FedAvg and the methods asked for; "all" stands for every algorithm that the clients allow."""
    if asked != "all":
        return ["fedavg", *asked.split(";")]
    left_out = {"fedavg", "shuffled", *(() if people.groups_known else ("oracle",))}
    return ["fedavg", *(name for name in ALGORITHMS if name not in left_out)]


def interval(differences: Array) -> tuple[float, float, float]:
    """The mean of paired differences, and its 95 per cent t-interval."""
    mean = float(np.mean(differences))
    if len(differences) < 2:
        return mean, -np.inf, np.inf
    half = float(stats.t.ppf(0.975, len(differences) - 1) * np.std(differences, ddof=1) / np.sqrt(len(differences)))
    return mean, mean - half, mean + half


def verdict(over_shared: Array, over_shuffled: Array) -> str:
    """The rule of this file: "helps", "harms", "one cluster" where nothing was clustered in any seed, or "not shown"."""
    mean, low, high = interval(over_shared)
    if not len(over_shuffled):
        return "one cluster"
    if mean >= LEAST and low > 0 and len(over_shuffled) == len(over_shared) and interval(over_shuffled)[1] > 0:
        return "helps"
    return "harms" if mean <= -LEAST and high < 0 else "not shown"


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each data set, kind and method."""
    lines = [
        "| kind | method | clusters | in use | last local | over FedAvg (95 %) | over random clusters (95 %) | verdict |",
        "|" + "---|" * 8,
    ]
    shared = {(row["data"], row["kind"], str(row["seed"])): float(row["accuracy"]) for row in rows if row["method"] == "fedavg"}
    for data, kind, method in dict.fromkeys((row["data"], row["kind"], row["method"]) for row in rows):
        own = [row for row in rows if (row["data"], row["kind"], row["method"]) == (data, kind, method)]
        own = [row for row in own if (data, kind, str(row["seed"])) in shared]
        accuracies = np.array([float(row["accuracy"]) for row in own])
        clusters = ", ".join(str(row["clusters"]) for row in own)
        shown = f"| {kind} | {method} | {clusters} | {accuracies.mean():.1f} | {np.mean([float(row['local']) for row in own]):.1f} |"
        if method == "fedavg":
            lines.append(shown + " | | |")
            continue
        over = accuracies - np.array([shared[data, kind, str(row["seed"])] for row in own])
        apart = np.array([float(row["accuracy"]) - float(row["shuffled"]) for row in own if row["shuffled"] != ""])
        spans = ["{:+.1f} ({:+.1f} to {:+.1f})".format(*interval(gains)) if len(gains) > 1 else "–" for gains in (over, apart)]
        lines.append(f"{shown} {spans[0]} | {spans[1]} | {verdict(over, apart)} |")
    return "\n".join(lines)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks helps", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/helps.csv"))
    parser.add_argument("--data-dir")
    parser.add_argument("--data", default="usps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", default="crossfit;ocfl", help='names of algorithms with ; between them, or "all"; FedAvg always runs')
    options = parser.parse_args(list(words))
    asked = [] if options.methods == "all" else options.methods.split(";")
    if unknown := [method for method in asked if method not in ALGORITHMS]:
        parser.error(f"--methods: {unknown[0]!r} is not known; known are {', '.join(ALGORITHMS)}")
    try:
        rows = read(options.out, FIELDS)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        done = {tuple(str(row[key]) for key in FIELDS[:4]) for row in rows}
        for seed in range(options.seeds):
            for kind in (REAL,) if options.data in REAL_CLIENTS else CHOSEN:
                people = people_of(options.data, kind, seed, options.data_dir)
                for method in methods_for(options.methods, people):
                    if (options.data, kind, str(seed), method) in done:
                        continue
                    try:
                        rows.append(cell(options.data, kind, seed, method, people))
                    except InputError as error:
                        print(f"{kind}, seed {seed}, {method}: not run: {error}", flush=True)
                        continue
                    add(options.out, FIELDS, rows[-1])
                    print(f"{kind}, seed {seed}, {method}: {rows[-1]['accuracy']} per cent, {rows[-1]['clusters']} clusters", flush=True)
    except InputError as error:
        parser.error(str(error))
    print(summary(rows))
    return 0
