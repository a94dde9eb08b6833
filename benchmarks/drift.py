"""Drift: whether clients that turn reach their group, whether an unseen group is recognised, and how often others are moved.

    python -m benchmarks drift [--out FILE.csv] [--data-dir DIR] [--data "fashion_mnist;usps"] [--seeds 3] [--quiet 100]

Three rotations, 30 clients of 50 samples. In the scene `moved` five clients of the first group turn to the second before round 6, with
fresh samples, and ten clients of a fourth rotation join. `oracle` is the same run with the five put into their group by hand. In
the scene `quiet` nobody turns: 35 clients of four rotations get fresh samples before each of four checks, and five join.

The rule, written before the first run: clients that turned are within two points of the oracle after three rounds; of the unseen group 95
per cent belong to no old cluster; at most alpha = 0.05 of the quiet runs move a client from one cluster to another.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from cflpriv.errors import InputError
from cflpriv.experiments import Config, advance, parse_config, start
from cflpriv.experiments.run.run import Experiment
from cflpriv.types import Clustering

from .clustering import add, read

__all__ = ["main", "summary"]

CLIENTS, TURNED, UNSEEN, AT, ROUNDS = 40, (0, 4, 8, 12, 16), tuple(range(3, 40, 4)), 6, 9
CHECKS, LATE = 4, tuple(range(35, 40))
FIELDS = ("scene", "data", "seed", "method", "placed", "recognised", "accuracy", "oracle", "named", "moved", "seconds")


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


def turned(data: str, seed: int, method: str, directory: str | None, *, by_hand: bool) -> tuple[Experiment, float]:
    """A run of the scene `moved`, and the accuracy in per cent, after three rounds, of the clients that turned."""
    drift = [{"round": AT, "clients": TURNED, "group": 1}, {"round": AT, "clients": UNSEEN, "joins": True}]
    run = start(configuration(data, seed, method, drift, ROUNDS, 0 if by_hand else 1), directory)
    for number in range(ROUNDS):
        if by_hand and number == AT:
            before, target = run.state.clustering, cluster_of(run, 1)
            labels = tuple(target if client in TURNED else before[client] for client in before.clients)
            groupings = replace(run.state.groupings, clustering=Clustering(before.clients, labels, before.k))
            run.state = replace(run.state, groupings=groupings)
        row = advance(run)
    accuracy = dict(zip(row["per_client"]["clients"], row["per_client"]["accuracy"], strict=True))
    return run, 100 * float(np.mean([accuracy[client] for client in TURNED]))


def moved(data: str, seed: int, method: str, directory: str | None) -> dict[str, Any]:
    """One line of the scene `moved`."""
    (run, accuracy), (_, oracle) = (turned(data, seed, method, directory, by_hand=by_hand) for by_hand in (False, True))
    state, old = run.state, {cluster_of(run, group) for group in range(3)}
    unplaced = set(state.groupings.unplaced)
    return {
        "placed": sum(state.clustering[client] == cluster_of(run, 1) and client not in unplaced for client in TURNED),
        "recognised": sum(client in unplaced or state.clustering[client] not in old for client in UNSEEN),
        "accuracy": round(accuracy, 2), "oracle": round(oracle, 2), **false_of(run, TURNED),
    }  # fmt: skip


def quiet(data: str, seed: int, method: str, directory: str | None) -> dict[str, Any]:
    """One line of the scene `quiet`."""
    stay = [client for client in range(CLIENTS) if client not in LATE]
    drift = [{"round": number, "clients": stay} for number in range(1, CHECKS + 1)] + [{"round": 2, "clients": LATE, "joins": True}]
    config = configuration(data, seed, method, drift, CHECKS + 1, 1)
    run = start(config.with_("training", participation=0.1).with_("run", evaluate_every=100, evaluate_clients=2), directory)
    for _ in range(CHECKS + 1):
        advance(run)
    return {**dict.fromkeys(("placed", "recognised", "accuracy", "oracle"), ""), **false_of(run, ())}


def false_of(run: Experiment, turned: Sequence[int]) -> dict[str, int]:
    """How many clients were named as changed, and moved from one cluster to another, although they did not turn."""
    named = {client for row in run.rows for client in row.get("changed", ()) if client not in turned}
    moves = {client for row in run.rows for client, was, _ in row.get("moved", ()) if client not in turned and was is not None}
    return {"named": len(named), "moved": len(moves)}


SCENES = {"moved": moved, "quiet": quiet}


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each scene, data set and method."""
    lines = []
    for scene, data, method in dict.fromkeys((row["scene"], row["data"], row["method"]) for row in rows):
        own = [row for row in rows if (row["scene"], row["data"], row["method"]) == (scene, data, method)]
        wrong = f"{sum(int(row['moved']) > 0 for row in own)} of {len(own)} runs move a client wrongly"
        if scene == "moved":
            gap = np.mean([float(row["accuracy"]) - float(row["oracle"]) for row in own])
            counts = [sum(int(row[name]) for row in own) for name in ("placed", "recognised")]
            wrong = (
                f"{counts[0]} of {len(TURNED) * len(own)} placed, {gap:+.1f} points to the oracle, "
                f"{counts[1]} of {len(UNSEEN) * len(own)} unseen recognised; {wrong}"
            )
        lines.append(f"{scene}, {data}, {method}: {wrong}")
    return "\n".join(lines)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks drift", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/drift.csv"))
    parser.add_argument("--data-dir")
    parser.add_argument("--data", default="fashion_mnist;usps", help="names of data sets with ; between them")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quiet", type=int, default=100, help="runs without drift, of the first data set")
    options = parser.parse_args(list(words))
    names = options.data.split(";")
    cells = [("moved", data, seed, method) for data in names for method in ("crossfit", "pacfl") for seed in range(options.seeds)]
    cells += [("quiet", names[0], seed, "crossfit") for seed in range(options.quiet)]
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
            rows.append({"scene": scene, "data": data, "seed": seed, "method": method, **values, "seconds": seconds})
            add(options.out, FIELDS, rows[-1])
            print(f"{scene}, {data}, seed {seed}, {method}: {values}", flush=True)
    except InputError as error:
        parser.error(str(error))
    print(summary(rows))
    return 0
