"""Every algorithm and every attack on a pretended device: no mixed tensors, no wait inside a captured step, the results of the CPU.

What a protection does to a value happens outside the engine; the slow test has each of them with several algorithms.
"""

import math
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pretended_device import Counts, pretended

from cflpriv.algorithms import ALGORITHMS
from cflpriv.attacks import ATTACKS, BUDGETS, Cell, fresh_runs
from cflpriv.attacks import audit as audits
from cflpriv.data import build_population
from cflpriv.errors import CflprivWarning
from cflpriv.experiments import Config, parse_config, run_experiment
from cflpriv.experiments.run import Run, advance, start
from cflpriv.types import Population

MORE: dict[str, dict[str, Any]] = {"pfedlia": {"warm_up": 1, "min_samples": 2}, "private_clusters": {"k": 1}}
BUDGET = replace(BUDGETS["quick"], auxiliary=100, draws=1, shadows=4)
SIGNATURES = {"name": "pacfl", "p": 1, "cut": "silhouette"}
SCENES: dict[str, dict[str, Any]] = {
    "anchor_counts": {"name": "stocfl"}, "gram_updates": {"name": "stocfl"}, "fold_release": {"name": "crossfit"},
    "influence": {"name": "pfedlia", **MORE["pfedlia"]},
}  # fmt: skip
"""The algorithm of the run that an attack is tried on, where it is not PACFL."""


def config(algorithm: dict[str, Any], samples: int = 24, **more: Any) -> Config:
    return parse_config({
        "data": {"clients": 6, "rotations": [0, 90], "samples_per_client": samples, "test_samples_per_client": 10},
        "model": {"name": "mlp", "hidden": 4, "dtype": "float64"},
        "training": {"rounds": 2, "epochs": 2, "batch_size": 5, "lr": 0.05, **more.pop("training", {})},
        "algorithm": algorithm, "run": {"record": "full", "insecure_test_entropy": True}, **more,
    })  # fmt: skip


@cache
def people(samples: int) -> Population:
    return build_population(config({"name": "fedavg"}, samples).data)


@contextmanager
def strictly_pretended() -> Iterator[Counts]:
    """A step that waits is no captured one; here it is an error."""
    with pretended() as counts, warnings.catch_warnings():
        warnings.filterwarnings("error", "a training step could not be captured", CflprivWarning)
        yield counts


def trained(made: Config) -> Run:
    run = start(made, population=people(made.data.samples_per_client or 0))
    for _ in range(made.training.rounds):
        advance(run)
    return run


def same_run(made: Config) -> Counts:
    """Assert that rounds, messages and what they hold are the same on the device."""
    here = trained(made)
    with strictly_pretended() as counts:
        there = trained(made.with_("run", device="cuda"))
    for one, other in zip(here.rows, there.rows, strict=True):
        assert (one["cohort"], one.get("labels"), one["accuracy_mean"]) == (other["cohort"], other.get("labels"), other["accuracy_mean"])
    for mine, theirs in zip(here.federation.transcript.messages, there.federation.transcript.messages, strict=True):
        assert (mine.operation, mine.kind, mine.clients) == (theirs.operation, theirs.kind, theirs.clients)
        for name, value in (mine.payload or {}).items():
            if np.issubdtype(np.asarray(value).dtype, np.floating):
                np.testing.assert_allclose(np.asarray((theirs.payload or {})[name]), np.asarray(value), rtol=1e-8, atol=1e-8, err_msg=name)
    return counts


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_gives_there_what_it_gives_on_the_cpu(name: str) -> None:
    counts = same_run(config({"name": name, **MORE.get(name, {})}))
    assert counts.waits["to device"] > 0, "nothing was computed there"


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedavg", "pacfl", "ifca", "crossfit"])
@pytest.mark.parametrize("gram", [["haar"], ["sketch", "haar"]], ids=str)
@pytest.mark.parametrize("sum", ["none", "haar", "secagg"])
def test_protections_give_there_what_they_give_on_the_cpu(algorithm: str, gram: list[str], sum: str) -> None:
    same_run(config({"name": algorithm}, protection={"gram": gram, "sum": sum}, training={"weights": "equal"}))


@cache
def scene(of: str) -> fresh_runs.Scene:
    """A run of two rounds with four samples a client, all in one batch, on the CPU."""
    made = config(SCENES.get(of, SIGNATURES), 4, training={"batch_size": 0})
    return fresh_runs.fresh_scene(made, people(4), 2, BUDGET)


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_finds_there_what_it_finds_on_the_cpu(name: str) -> None:
    made = scene(name if name in SCENES else "")
    here = audits._attacked(name, "server", made, BUDGET, None)
    with strictly_pretended():
        there = audits._attacked(name, "server", replace(made, config=made.config.with_("run", device="cuda")), BUDGET, None)
    assert len(here) == len(there)
    for one, other in zip(here, there, strict=True):
        assert (one.metric, one.status, one.note) == (other.metric, other.status, other.note)
        assert close(one, other), f"{one.line()} and {other.line()}"


def close(one: Cell, other: Cell) -> bool:
    if one.value is None or other.value is None:
        return one.value is other.value
    return math.isclose(one.value, other.value, rel_tol=1e-3, abs_tol=1e-3)  # an inversion takes hundreds of steps


@pytest.mark.slow
def test_a_run_recorded_there_is_audited_here_and_the_other_way_round(tmp_path: Path) -> None:
    """The attacks compute where the audit is told to, whatever the run's device and precision."""
    made, found = config(SIGNATURES), list[list[Cell]]()
    run_experiment(made, tmp_path / "here")
    with strictly_pretended():
        run_experiment(made.with_("run", device="cuda").with_("model", dtype="float32").with_("run", precision="tf32"), tmp_path / "there")
    few = ("signature_inversion", "label_inference")
    cells = audits.audit_run(tmp_path / "there", attacks=few, budget="quick", device="cpu")
    assert {one.attack for one in cells if one.value is not None} == set(few)
    found.append(audits.audit_run(tmp_path / "here", attacks=few, budget="quick"))
    shutil.rmtree(tmp_path / "here" / "audit")  # else its figures are kept
    with strictly_pretended() as counts:
        found.append(audits.audit_run(tmp_path / "here", attacks=few, budget="quick", device="cuda"))
    assert counts.waits["to device"] > 0
    assert len(found[0]) == len(found[1])
    assert all(close(one, other) for one, other in zip(*found, strict=True))
