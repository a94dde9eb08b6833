"""Drift: whether clients that turn reach their group, whether an unseen group is recognised, and how often others are moved.

    python -m benchmarks drift [--out FILE.csv] [--data-dir DIR] [--data "mnist;fashion_mnist;usps"] [--seeds 3] [--quiet 100] [--weak 20]

Three rotations, 30 clients of 50 samples. In the scene `moved` five clients of the first group turn to the second before round 6, with
fresh samples, and ten clients of a fourth rotation join. In the scene `turned` these ten are there from the start with data of the known
rotations, and turn before round 6, as methods need it that take no newcomers. `oracle` is the same run with the five put into their group
by hand. In the scene `quiet` nobody turns: 35 clients of four rotations get fresh samples before each of four checks, and five join. In the
scene `weak` groups exchange two labels. 16 clients are placed at once among 24 members of three groups: ten of an unseen group, six others.

The rule, written before the first run: clients that turned are within two points of the oracle after three rounds; of the unseen group 95
per cent belong to no old cluster; at most alpha = 0.05 of the quiet runs move a client from one cluster to another. Of weak differences
half are recognised, and at most 5 per cent of the clients of known groups belong to no cluster. The share of these clients is judged over
at least 200 runs of a data set, by the mean over runs and its one-sided 95 per cent bound: clients of one run share a batch. Twenty runs
tell 5 per cent from 2 to 12 per cent no better than by chance (7 of 120: exact interval 2.4 to 11.6).
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from cflpriv.algorithms.shared.grouping import FindGroups, PlaceClients
from cflpriv.algorithms.shared.rechecks import PLACE_ALPHA
from cflpriv.clustering.placement import UNPLACED
from cflpriv.contract.handles import Shared
from cflpriv.data import build_population, rotate
from cflpriv.errors import InputError
from cflpriv.experiments import Config, advance, parse_config, start
from cflpriv.experiments.run.run import Experiment, prepare
from cflpriv.placements import placements_of
from cflpriv.tasks.fold_gradients import FoldGradients
from cflpriv.types import Clustering, DataChange, Population

from .clustering import add, read

__all__ = ["main", "summary"]

CLIENTS, TURNED, UNSEEN, AT, ROUNDS = 40, (0, 4, 8, 12, 16), tuple(range(3, 40, 4)), 6, 9
CHECKS, LATE = 4, tuple(range(35, 40))
SAMPLES = {"emnist_letters": 200, "cifar10": 100}
"""Samples of a client in the scene `weak`: a swap of two of 26 labels changes few of them. Of other data sets a client has `FEW`."""
FEW, SWAPS, COME = 20, [[0, 1], [2, 3], [4, 5], [6, 7]], 2
FIELDS = ("scene", "data", "seed", "method", "placed", "recognised", "held_back", "accuracy", "oracle", "named", "moved", "seconds")


def configuration(data: str, seed: int, method: str, drift: Sequence[Mapping[str, Any]], rounds: int, recheck_every: int) -> Config:
    return parse_config(
        {
            "data": {
                "source": data, "clients": CLIENTS, "samples_per_client": 50, "test_samples_per_client": 40, "seed": seed,
                "rotations": [0, 90, 180, 270], "drift": list(drift),
            },
            "model": {"name": "mlp", "hidden": 100},
            "training": {"rounds": rounds, "epochs": 2, "lr": 0.05, "weights": "equal"},
            "algorithm": {"name": method, "recheck_every": recheck_every},
            "run": {"seed": seed},
        }
    )  # fmt: skip


def cluster_of(run: Experiment, group: int) -> int:
    """The cluster with the most clients of a group that stay in it."""
    clustering = run.state.clustering
    own = [clustering[client] for client in clustering.clients if client % 4 == group and client not in TURNED]
    return int(np.bincount(own).argmax())


def with_turning(population: Population) -> Population:
    """The population of the scene `turned`: the unseen clients have their images in the known rotations until they turn."""
    changes, clients = list(population.changes), list(population.clients)
    for at, own in enumerate(clients):
        if own.id in UNSEEN:
            first = rotate(own.x_train, own.id // 4 % 3 - 3)
            changes.append(DataChange(AT, own.id, 3, own))
            clients[at] = replace(own, x_train=first)
    return replace(population, clients=tuple(clients), changes=tuple(changes))


def scene_of(data: str, seed: int, method: str, directory: str | None, scene: str, *, recheck: bool) -> tuple[Config, Population]:
    """The configuration and the clients of the scene `moved` or `turned`."""
    drift: list[dict[str, Any]] = [{"round": AT, "clients": TURNED, "group": 1}]
    if scene == "moved":
        drift.append({"round": AT, "clients": UNSEEN, "joins": True})
    config = configuration(data, seed, method, drift, ROUNDS, int(recheck))
    population = build_population(config.data, directory)
    return config, population if scene == "moved" else with_turning(population)


def after_turning(data: str, seed: int, method: str, directory: str | None, scene: str, *, by_hand: bool) -> tuple[Experiment, float]:
    """A run of the scene `moved` or `turned`, and the accuracy in per cent, after three rounds, of the clients that turned."""
    config, population = scene_of(data, seed, method, directory, scene, recheck=not by_hand)
    run = start(config, directory, population)
    for number in range(ROUNDS):
        if by_hand and number == AT:
            before, target = run.state.clustering, cluster_of(run, 1)
            labels = tuple(target if client in TURNED else before[client] for client in before.clients)
            groupings = replace(run.state.groupings, clustering=Clustering(before.clients, labels, before.k))
            run.state = replace(run.state, groupings=groupings)
        row = advance(run)
    accuracy = dict(zip(row["per_client"]["clients"], row["per_client"]["accuracy"], strict=True))
    return run, 100 * float(np.mean([accuracy[client] for client in TURNED]))


def moved(data: str, seed: int, method: str, directory: str | None, scene: str = "moved") -> dict[str, Any]:
    """One line of the scene `moved`, or of the scene `turned`."""
    began = time.process_time()
    run, accuracy = after_turning(data, seed, method, directory, scene, by_hand=False)
    seconds = time.process_time() - began
    _, oracle = after_turning(data, seed, method, directory, scene, by_hand=True)
    state, old = run.state, {cluster_of(run, group) for group in range(3)}
    unplaced = set(state.groupings.unplaced)
    return {
        "placed": sum(state.clustering[client] == cluster_of(run, 1) and client not in unplaced for client in TURNED),
        "recognised": sum(client in unplaced or state.clustering[client] not in old for client in UNSEEN),
        "accuracy": round(accuracy, 2), "oracle": round(oracle, 2), **false_of(run, (*TURNED, *UNSEEN)), "seconds": round(seconds, 2),
    }  # fmt: skip


def quiet(data: str, seed: int, method: str, directory: str | None) -> dict[str, Any]:
    """One line of the scene `quiet`."""
    stay = [client for client in range(CLIENTS) if client not in LATE]
    drift = [{"round": number, "clients": stay} for number in range(1, CHECKS + 1)] + [{"round": 2, "clients": LATE, "joins": True}]
    config = configuration(data, seed, method, drift, CHECKS + 1, 1)
    run = start(config.with_("training", participation=0.1).with_("run", evaluate_every=100, evaluate_clients=2), directory)
    for _ in range(CHECKS + 1):
        advance(run)
    return false_of(run, ())


def false_of(run: Experiment, turned: Sequence[int]) -> dict[str, int]:
    """How many clients were named as changed, and moved from one cluster to another, although they did not turn."""
    events = placements_of(run.rows)
    named = {client for event in events for client in event.get("changed", ()) if client not in turned}
    moves = {client for event in events for client, was, _ in event.get("moved", ()) if client not in turned and was is not None}
    return {"named": len(named), "moved": len(moves)}


def weak(data: str, seed: int, method: str, directory: str | None) -> dict[str, Any]:
    """One line of the scene `weak`: the comparison alone, among the true groups, without training."""
    of_data = {"source": data, "clients": CLIENTS, "samples_per_client": SAMPLES.get(data, FEW), "seed": seed, "label_swaps": SWAPS}
    config = parse_config(
        {
            "data": of_data, "model": {"name": "mlp", "hidden": 100}, "training": {"weights": "equal"}, "algorithm": {"name": method},
            "run": {"seed": seed},
        }
    )  # fmt: skip
    run = prepare(config, directory)
    model, find = config.model_for(run.population), FindGroups(seed=seed)
    known = {group: [client for client in run.federation.clients if run.truth[client] == group] for group in range(4)}
    come = {*known[3], *(client for group in range(3) for client in known[group][:COME])}
    labels = tuple(UNPLACED if client in come else run.truth[client] for client in run.federation.clients)
    held = run.federation.compute(FoldGradients(model, seed=seed), {"model": Shared(model.init(seed))})["folds"]
    found = run.federation.gram(held, then=PlaceClients(find, 3, PLACE_ALPHA, labels=labels)).result
    old = {client: bool(there) and label < 3 for client, there, label in zip(held.clients, found["placed"], found["labels"], strict=True)}
    return {
        "recognised": sum(not old[client] for client in known[3]),
        "held_back": sum(not old[client] for client in come.difference(known[3])),
    }  # fmt: skip


SCENES: Mapping[str, Callable[..., dict[str, Any]]] = {
    "moved": moved,
    "turned": partial(moved, scene="turned"),
    "quiet": quiet,
    "weak": weak,
}


def total(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    """The sum of a column."""
    return sum(int(row[name]) for row in rows)


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each scene, data set and method."""
    lines = []
    for scene, data, method in dict.fromkeys((row["scene"], row["data"], row["method"]) for row in rows):
        own = [row for row in rows if (row["scene"], row["data"], row["method"]) == (scene, data, method)]
        unseen = f"{total(own, 'recognised')} of {len(UNSEEN) * len(own)} unseen recognised" if own[0]["recognised"] != "" else ""
        if scene == "weak":
            words = [unseen, f"{total(own, 'held_back')} of {3 * COME * len(own)} others in no cluster"]
        else:
            words = [f"{sum(int(row['moved']) > 0 for row in own)} of {len(own)} runs move a client wrongly"]
        if scene in ("moved", "turned"):
            gap = np.mean([float(row["accuracy"]) - float(row["oracle"]) for row in own])
            words = [f"{total(own, 'placed')} of {len(TURNED) * len(own)} placed, {gap:+.1f} points to the oracle", unseen, *words]
        lines.append(f"{scene}, {data}, {method}: {'; '.join(words)}")
    return "\n".join(lines)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks drift", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/drift.csv"))
    parser.add_argument("--data-dir")
    parser.add_argument("--data", default="mnist;fashion_mnist;usps", help="names of data sets with ; between them")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--quiet", type=int, default=100, help="runs without drift, of the first data set")
    parser.add_argument("--weak", type=int, default=20, help="runs with weak differences, of each data set")
    options = parser.parse_args(list(words))
    names, first = options.data.split(";"), options.first
    seeds = range(first, first + options.seeds)
    cells = [("moved", data, seed, method) for data in names for method in ("crossfit", "pacfl") for seed in seeds]
    cells += [("turned", data, seed, "crossfit") for data in names for seed in seeds]
    cells += [("weak", data, seed, "crossfit") for data in names for seed in range(first, first + options.weak)]
    cells += [("quiet", names[0], seed, "crossfit") for seed in range(first, first + options.quiet)]
    try:
        rows = read(options.out, FIELDS)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        done = {tuple(str(row[key]) for key in FIELDS[:4]) for row in rows}
        for scene, data, seed, method in cells:
            if (scene, data, str(seed), method) in done:
                continue
            began = time.process_time()
            with threadpool_limits(1):
                values = SCENES[scene](data, seed, method, options.data_dir)
            seconds = round(time.process_time() - began, 2)
            line = {"scene": scene, "data": data, "seed": seed, "method": method, "seconds": seconds, **values}
            rows.append({field: line.get(field, "") for field in FIELDS})
            add(options.out, FIELDS, rows[-1])
            print(f"{scene}, {data}, seed {seed}, {method}: {values}", flush=True)
    except InputError as error:
        parser.error(str(error))
    print(summary(rows))
    return 0
