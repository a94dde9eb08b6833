"""`benchmarks/federation.py`: its scenarios are experiments that run, and its table tells a kept limit from a missed one."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from checkout import ROOT

from cflpriv.experiments import load_config, parse_config

SPEC = importlib.util.spec_from_file_location("benchmark_federation", ROOT / "benchmarks" / "federation.py")
assert SPEC is not None
assert SPEC.loader is not None
federation = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = federation  # where its dataclass looks
SPEC.loader.exec_module(federation)

ONE = {"seconds": 1.0, "setup": 0.5, "before": 300.0, "peak": 400.0}


@pytest.mark.parametrize("name", federation.SCENARIOS)
def test_every_scenario_is_an_experiment_of_its_size(name: str) -> None:
    scenario = federation.SCENARIOS[name]
    if scenario.part == "run":
        load_config(ROOT / "examples" / scenario.example, scenario.changes)
        assert scenario.limit == 1.1
    else:
        config = parse_config(scenario.tree())
        assert f"{config.data.clients} clients" in name
        clients = federation.population(12, scenario.side)
        assert config.model_for(clients).dimension == (1210 if scenario.side == 8 else 159_010)


@pytest.mark.parametrize("name", ["no protection, 100 clients", "haar gram, PACFL begins, 100 clients", "bytes transport, 100 clients"])
def test_a_scenario_is_measured(name: str) -> None:
    figures = federation.measured(replace(federation.SCENARIOS[name], clients=12, times=2))
    assert set(figures) == set(ONE)
    assert figures["seconds"] > 0
    assert figures["peak"] >= figures["before"] > 0


@pytest.mark.parametrize(
    ("seconds", "peak", "holds"),
    [(1.0, 400.0, True), (1.3, 400.0, True), (1.31, 400.0, False), (1.0, 439.0, True), (1.0, 441.0, False)],
)
def test_limits_are_held_against_the_median(seconds: float, peak: float, holds: bool) -> None:
    pair = (ONE, {**ONE, "seconds": seconds, "peak": peak})
    made = federation.row("no protection, 100 clients", [pair, pair, (ONE, {**ONE, "seconds": 9.0, "peak": 900.0})])
    assert (made["ratio"], made["low"], made["high"]) == (seconds, seconds, 9.0)
    assert made["holds"] is holds
    assert federation.exit_code([made, {"holds": None, "note": "skipped"}]) == (0 if holds else 1)


def test_memory_of_big_models_is_what_they_add() -> None:
    made = federation.row("big model, 100 clients", [(ONE, {**ONE, "peak": 411.0})])
    assert made["memory"] == pytest.approx(1.11)
    assert not made["holds"]


def test_what_failed_misses_and_what_is_absent_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CFLPRIV_DATA", str(tmp_path))
    skipped = federation._compared("run pacfl_fmnist, 10 rounds", tmp_path, 1)
    assert "fashion_mnist is not in CFLPRIV_DATA" in skipped["note"]
    failed = federation._compared("no protection, 100 clients", tmp_path, 1)  # no tree there
    assert failed["note"].startswith("failed: old: ")
    assert (federation.exit_code([skipped]), federation.exit_code([failed])) == (0, 1)


def test_words_and_quick_choose_scenarios() -> None:
    assert federation.chosen(["CKKS", "pacfl_digits"], quick=False) == [
        "CKKS, PACFL begins, 20 clients", "CKKS, PACFL begins, 100 clients", "run pacfl_digits", "run pacfl_digits, secagg and haar gram",
    ]  # fmt: skip
    assert not any("1000 clients" in name or "fmnist" in name for name in federation.chosen([], quick=True))
    assert federation.chosen(["nothing of this name"], quick=False) == []
