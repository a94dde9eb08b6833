"""Every algorithm, every form of private training and every attack on a pretended device: no mixed tensors, no wait inside a captured
step, the results of the CPU.

What a protection does to a value happens outside the engine; the slow tests have each of them with several algorithms.
"""

import math
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import run_scenes
from often import cases
from pretended_device import Counts, pretended
from run_scenes import MORE, PRIVATE, config, of_algorithm, of_form, people, trained

from cflpriv.algorithms import ALGORITHMS
from cflpriv.attacks import ATTACKS, BUDGETS, Cell
from cflpriv.attacks import audit as audits
from cflpriv.attacks.evidence import fresh_runs
from cflpriv.errors import CflprivWarning, InputError
from cflpriv.experiments import Config, run_experiment
from cflpriv.protocols.entropy import public_entropy

BUDGET = replace(BUDGETS["quick"], auxiliary=100, draws=1, shadows=4)
SIGNATURES = {"name": "pacfl", "p": 1, "cut": "silhouette"}
TWO_LABELS = {"partition": "pathological", "groups": [[0, 1], [2, 3]], "rotations": [], "samples_per_client": 20}
ALL_LABELS = TWO_LABELS | {"groups": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], "clients": 10}
UNEQUAL = {"partition": "dirichlet", "alpha": 0.5, "rotations": [], "samples_per_client": 0, "clients": 40}
EQUAL = {"weights": "equal"}
SCENES: dict[str, dict[str, Any]] = {
    "anchor_counts": {"algorithm": {"name": "stocfl"}},
    "likeness": {"algorithm": {"name": "scaffold"}},
    "prototype_inversion": {"algorithm": {"name": "fedproto"}},
    "source_inference": {"algorithm": {"name": "fedavg"}, "data": {"samples_per_client": 20, "test_samples_per_client": 60}},
    "influence": {"algorithm": {"name": "pfedlia", **MORE["pfedlia"]}},
    "disaggregation": {"algorithm": {"name": "fedavg"}, "training": {"participation": 0.2}},
    "dp_audit": {
        "algorithm": {"name": "fedavg"}, "training": {"batch_size": 4, "weights": "equal"},
        "privacy": {"unit": "sample", "epsilon": 8.0, "delta": 1e-5, "samples": 20}, "data": {"samples_per_client": 20},
    },
    "fold_release": {"algorithm": {"name": "crossfit"}, "data": UNEQUAL},
    "gram_updates": {"algorithm": {"name": "fedavg"}, "protection": {"sum": "haar"}, "data": TWO_LABELS, "training": EQUAL},
    "key_recovery": {"algorithm": {"name": "fedavg"}, "protection": {"sum": "permutation"}, "data": ALL_LABELS, "training": EQUAL},
    "model_inconsistency": {"algorithm": {"name": "fedavg"}, "protection": {"sum": "secagg"}, "training": EQUAL},
    "membership": {"data": {"samples_per_client": 20, "test_samples_per_client": 60}},
    "reported_scores": {"algorithm": {"name": "fedgwc"}, "data": UNEQUAL, "training": {"participation": 0.5}},
    "sybil_span": {"protection": {"gram": ["haar"]}, "data": {"clients": 16}},
    "update_norms": {"algorithm": {"name": "fedavg"}, "data": UNEQUAL | {"clients": 12}},
}  # fmt: skip
"""What differs from the run of PACFL, for attacks that find nothing in it."""
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "momentum": {"momentum": 0.5}, "weight decay": {"weight_decay": 0.01}, "full batches": {"batch_size": 0},
    "adam": {"optimizer": "adam", "lr": 1e-3},
}  # fmt: skip
"""The optimiser's options of `[training]`, but for `lr_decay`: in float64 a captured step has its rate."""
WITHOUT_FIGURES = ("coverage",)
"""Attacks that compute nothing."""
ACTIVE = ("imprint", "model_inconsistency")
"""Attacks of a server that lies."""
LONG = ("dp_audit", "gradient_inversion", "gram_geometry", "gram_updates", "key_recovery", "signature_inversion", "update_norms")
"""Attacks that take more than a second."""


@contextmanager
def strictly_pretended() -> Iterator[Counts]:
    """A step that waits is no captured one; here it is an error."""
    with pretended() as counts, warnings.catch_warnings():
        warnings.filterwarnings("error", "a training step could not be captured", CflprivWarning)
        yield counts


def same_run(made: Config) -> Counts:
    """Assert that rounds, messages and what they hold are the same on the device."""
    return run_scenes.same_run(made, "cuda", strictly_pretended, 1e-8)[0]


@pytest.mark.filterwarnings("ignore:algorithm 'fedgwc' will form no clusters")
@pytest.mark.parametrize("name", cases(ALGORITHMS))
def test_every_algorithm_gives_there_what_it_gives_on_the_cpu(name: str) -> None:
    counts = same_run(of_algorithm(name))
    assert counts.queued > 0, "nothing was computed there"
    assert counts.replayed >= counts.captured > 0 or name == "fedrc", "FedRC's weighted steps are a plain loop of their own"


@pytest.mark.filterwarnings("ignore:run.insecure_test_entropy")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("form", PRIVATE)
def test_private_training_gives_there_what_it_gives_on_the_cpu(form: str, options: str) -> None:
    """Noise that clients share is for one plain step a round: a gradient, which is no phase of steps and never captured."""
    shared = form == "sample, shared noise"
    if shared and options == "adam":
        pytest.skip("refused: one plain step")
    counts = same_run(of_form(form, **OPTIONS[options]))
    assert (counts.captured, counts.replayed > 0) == ((0, False) if shared else (1, True))
    assert counts.waits["_local_scalar_dense"] == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:run.insecure_test_entropy", "ignore:algorithm 'fedgwc' will form no clusters")
@pytest.mark.parametrize("form", PRIVATE)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains_privately_there_as_on_the_cpu(name: str, form: str) -> None:
    """Where the form is not refused by name."""
    training = {"epochs": 1 if form == "sample, shared noise" else 2, "weights": "equal"}
    try:
        made = config({"name": name, **MORE.get(name, {})}, training=training, **PRIVATE[form])
        trained(made)
    except InputError as error:
        pytest.skip(str(error))
    same_run(made)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedavg", "pacfl", "ifca", "crossfit"])
@pytest.mark.parametrize("gram", [["haar"], ["sketch", "haar"]], ids=str)
@pytest.mark.parametrize("sum", ["none", "haar", "secagg"])
def test_protections_give_there_what_they_give_on_the_cpu(algorithm: str, gram: list[str], sum: str) -> None:
    same_run(config({"name": algorithm}, protection={"gram": gram, "sum": sum}, training={"weights": "equal"}))


@cache
def scene_of_run(of: str) -> fresh_runs.AuditedRun:
    """A run of two rounds with four samples a client, all in one batch, on the CPU."""
    more = {"algorithm": SIGNATURES, **SCENES.get(of, {})}
    made = config(samples=4, **{**more, "training": {"batch_size": 0, **more.get("training", {})}})
    return fresh_runs.fresh_scene(made, people(made.data), 2, BUDGET)


@pytest.mark.filterwarnings("ignore:run.insecure_test_entropy")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in ATTACKS if name not in WITHOUT_FIGURES]
)
def test_every_attack_finds_there_what_it_finds_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same bytes from the system's source, which privacy noise comes from."""
    made = scene_of_run(name if name in SCENES else "")
    adversary = "active-server" if name in ACTIVE else "server"
    monkeypatch.setattr(os, "urandom", public_entropy("noise"))
    here = audits._attacked(name, adversary, made, BUDGET, None)
    monkeypatch.setattr(os, "urandom", public_entropy("noise"))
    assert any(one.value is not None for one in here), [one.note for one in here]
    with strictly_pretended():
        there = audits._attacked(name, adversary, replace(made, config=made.config.with_("run", device="cuda")), BUDGET, None)
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
