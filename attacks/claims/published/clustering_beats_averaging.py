"""PACFL, Table 1: clustering against averaging where each client has a fifth of the labels."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ....data import build_population
from ....experiments import Config, parse_config
from ....experiments.run.folder import run_experiment
from ....types import Population
from ..claim import Arm, Claim, Row

__all__ = ["CLAIM"]


def measure(seed: int, data_dir: str | Path | None) -> Sequence[Row]:
    """The rows of one seed."""
    clustered, labels = _run({"name": "pacfl", "k": 2, "p": 3}, seed, data_dir)
    averaged, _ = _run({"name": "fedavg"}, seed, data_dir)
    control, _ = _run({"name": "shuffled"}, seed, data_dir, labels)
    used, local = "accuracy_mean_last_rounds", "local_accuracy_mean_last_rounds"
    return [
        Row("as published: PACFL's local models against FedAvg's shared model", seed, clustered[local], averaged[used]),
        Row("scored alike: cluster models against the shared model", seed, clustered[used], averaged[used]),
        Row("scored alike: local models against local models", seed, clustered[local], averaged[local]),
        Row("cluster models against random groups of the same sizes", seed, clustered[used], control[used]),
    ]


def _run(
    algorithm: dict[str, Any], seed: int, data_dir: str | Path | None, groups: dict[str, int] | None = None
) -> tuple[dict[str, Any], dict[str, int]]:
    """The summary of a run and the clusters it found; `groups` replace the true ones, for the control."""
    config: Config = parse_config({
        "data": {"partition": "label_skew", "skew_percent": 20.0, "clients": 20, "seed": seed}, "model": {"hidden": 32},
        "training": {
            "rounds": 40, "participation": 0.2, "epochs": 10, "batch_size": 10, "lr": 0.01, "momentum": 0.5, "weights": "examples"
        },
        "algorithm": algorithm, "run": {"seed": seed, "evaluate_every": 5, "checkpoint_every": 40},
    }, "claim")  # fmt: skip
    people: Population = build_population(config.data, data_dir)
    if groups is not None:
        people = replace(people, groups=tuple(groups[str(client.id)] for client in people.clients))
    with TemporaryDirectory() as folder:
        summary = run_experiment(config, Path(folder) / "run", data_dir, population=people)
        labels = json.loads((Path(folder) / "run" / "measured.json").read_text(encoding="utf-8"))["labels"]
    return summary, labels


CLAIM = Claim(
    3, "under label skew clustering beats averaging by 20 points",
    source="PACFL, Vahidian et al. 2023, Table 1",
    baseline="FedAvg; in the last arm FedAvg in random groups of the sizes that PACFL found",
    assumed=(
        "20 clients of the digits, each with 20 % of the labels, an MLP of 32 units, 40 rounds with a fifth of the clients, 10 "
        "epochs, batch 10, rate 0.01, momentum 0.5, PACFL given two clusters and p = 3 as in the paper; mean of the last ten "
        "rounds; the margin is half of what is published; a local model is the last that a client trained"
    ),
    arms={
        "as published: PACFL's local models against FedAvg's shared model": Arm("accuracy", 0.1, "above"),
        "scored alike: cluster models against the shared model": Arm("accuracy", 0.1, "above"),
        "scored alike: local models against local models": Arm("accuracy", 0.1, "above"),
        "cluster models against random groups of the same sizes": Arm("accuracy", 0.1, "above"),
    },
    measure=measure,
)  # fmt: skip
