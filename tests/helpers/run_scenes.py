"""Small runs of every algorithm, on the CPU and on a device, and how far their results are apart."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, TypeVar

import numpy as np

from cflpriv.data import DataSpec, build_population
from cflpriv.experiments import Config, parse_config
from cflpriv.experiments.run.run import Experiment, advance, start
from cflpriv.types import Array, Population

MORE: dict[str, dict[str, Any]] = {"pfedlia": {"warm_up": 1, "min_samples": 2}, "private_clusters": {"k": 1}}
"""Parameters without which an algorithm does nothing in so small a run."""
SAMPLE = {"unit": "sample", "epsilon": 8.0, "delta": 1e-3, "samples": 24}
PRIVATE: dict[str, dict[str, Any]] = {
    "sample": {"privacy": SAMPLE},
    "sample, shared noise": {"privacy": SAMPLE | {"noise": "shared"}, "protection": {"sum": "secagg"}},
    "client": {"privacy": {"unit": "client", "epsilon": 8.0, "delta": 1e-3, "clip_norm": 0.5}},
}
"""The forms of private training."""
Context = TypeVar("Context")


def config(algorithm: dict[str, Any], samples: int = 24, **more: Any) -> Config:
    data = {"clients": 6, "rotations": [0, 90], "samples_per_client": samples, "test_samples_per_client": 10}
    return parse_config({
        "data": {**data, **more.pop("data", {})},
        "model": {"name": "mlp", "hidden": 4, "dtype": "float64"},
        "training": {"rounds": 2, "epochs": 2, "batch_size": 5, "lr": 0.05, **more.pop("training", {})},
        "algorithm": algorithm, "run": {"record": "full", "insecure_test_entropy": True}, **more,
    })  # fmt: skip


def of_algorithm(name: str, **training: Any) -> Config:
    """Three rounds of an algorithm."""
    return config({"name": name, **MORE.get(name, {})}, training={"rounds": 3, **training})


def of_form(form: str, **training: Any) -> Config:
    """Three rounds of FedAvg with a form of private training. Noise that clients share is for one plain step a round."""
    more = {"rounds": 3, "epochs": 1 if form == "sample, shared noise" else 2, "weights": "equal", **training}
    return config({"name": "fedavg"}, training=more, **PRIVATE[form])


@cache
def people(data: DataSpec) -> Population:
    return build_population(data)


def trained(made: Config) -> Experiment:
    run = start(made, population=people(made.data))
    for _ in range(made.training.rounds):
        advance(run)
    return run


def same_run(made: Config, device: str, around: Callable[[], AbstractContextManager[Context]], most: float) -> tuple[Context, float]:
    """Assert that rounds and messages on the device are those of the CPU, and numbers in messages no more than `most` apart.

    Returns what `around` gives, in which the run on the device is, and how far the numbers are apart (`difference`).
    """
    here = trained(made)
    with around() as context:
        there = trained(made.with_("run", device=device))
    for one, other in zip(here.rows, there.rows, strict=True):
        said, found = ([row.get(name) for name in ("cohort", "labels", "accuracy_mean")] for row in (one, other))
        assert said == found, f"cohort, clusters and accuracy {found}, on the CPU {said}"
    largest = 0.0
    for mine, theirs in zip(here.federation.transcript.messages, there.federation.transcript.messages, strict=True):
        heads = [(message.operation, message.kind, message.clients) for message in (mine, theirs)]
        assert heads[0] == heads[1], f"message {heads[1]}, on the CPU {heads[0]}"
        for name, value in (mine.payload or {}).items():
            if np.issubdtype(np.asarray(value).dtype, np.floating):
                apart = difference(np.asarray((theirs.payload or {})[name]), np.asarray(value))
                assert apart <= most, f"{mine.operation} {mine.kind} {name}: {apart:.3g} apart"
                largest = max(largest, apart)
    return context, largest


def difference(ours: Array, theirs: Array) -> float:
    """The largest |ours - theirs| / (1 + |theirs|); infinite for another shape, or where one of the two is no number."""
    if ours.shape != theirs.shape:
        return float("inf")
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(ours - theirs) / (1 + np.abs(theirs)))
    return float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0))
