"""A run with drift: what happens to clients is in rows, summary, console and report, and a resumed run ends as an uninterrupted one."""

import json
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import pytest
from small_runs import configured

from cflpriv.algorithms.interface import ALGORITHMS, Algorithm
from cflpriv.console import row_text
from cflpriv.contract.operations import Federation
from cflpriv.contract.transcript import RoundRecord
from cflpriv.errors import InputError
from cflpriv.experiments import run_experiment
from cflpriv.experiments.report.report import write_report
from cflpriv.experiments.run.deployment import deploy, standing_in
from cflpriv.experiments.run.run import prepare
from cflpriv.placements import placement_text
from cflpriv.tasks.training import Train

BASE: dict[str, Any] = {
    "data": {
        "clients": 32, "samples_per_client": 20, "test_samples_per_client": 10, "rotations": [0, 90], "drift": [
            {"round": 2, "clients": [0, 2], "group": 1}, {"round": 1, "clients": [1, 5], "joins": True},
        ],
    },
    "model": {"name": "linear"},
    "training": {"rounds": 4, "lr": 0.1, "batch_size": 20, "weights": "equal"},
    "algorithm": {"name": "pacfl", "recheck_every": 2},
    "run": {"insecure_test_entropy": True},
}  # fmt: skip


class Stop(BaseException):
    """Ends a run where nothing catches it."""


def stop(row: dict[str, Any]) -> None:
    if row["round"] == 2:
        raise Stop


def results(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    every = [*rows, json.loads((folder / "summary.json").read_text(encoding="utf-8"))]
    *rows, summary = [{key: value for key, value in row.items() if "seconds" not in key} for row in every]
    return rows, summary


def test_what_happened_is_stated_everywhere_and_a_resumed_run_ends_alike(tmp_path: Path) -> None:
    config = configured(BASE)
    run_experiment(config, tmp_path / "whole")
    with pytest.raises(Stop):
        run_experiment(config, tmp_path / "resumed", tick=stop)
    run_experiment(config, tmp_path / "resumed", resume=True)
    rows, summary = results(tmp_path / "whole")
    assert results(tmp_path / "resumed") == (rows, summary)
    assert [row["admitted"] for row in rows] == [[], [1, 5], [], []]
    placements = rows[2]["placements"]
    assert (set(placements), placements["changed"]) == ({"changed", "moved"}, [0, 2])
    assert [client for client, _, _ in placements["moved"]] == [0, 2]
    assert [row["round"] for row in rows if "placements" in row or "admissions" in row] == [2]
    assert summary["placements"] == [{"round": 2, **placements}]
    assert (summary["unplaced"], summary["ari"], summary["clients"]) == ([], 1.0, 32)
    line = "the data of clients 0, 2 changed; clients 0, 2 moved from cluster 0 to cluster 1"
    assert row_text(rows[2]).endswith(f"; {line}")
    assert "cluster" not in row_text(rows[1])
    page = write_report(tmp_path / "whole").read_text(encoding="utf-8")
    assert f"Round 3: {line}." in page


@pytest.mark.parametrize("algorithm", ["pacfl", "crossfit"])
@pytest.mark.parametrize(
    "protection",
    [
        pytest.param({"gram": ["haar"]}, id="haar"),
        pytest.param({"gram": ["haar"], "sum": "one_message", "min_cohort": 3}, id="one_message"),
        pytest.param({"gram": ["ckks"], "sum": "secagg", "min_cohort": 3}, id="ckks", marks=pytest.mark.slow),
    ],
)
def test_runs_under_protections_move_the_same_clients(algorithm: str, protection: dict[str, Any], tmp_path: Path) -> None:
    """Clients with few samples, whose contract lays the answers to checks out by stand-ins for their data."""
    drift = [{"round": 2, "clients": [0, 2], "group": 1}]
    config = configured(BASE, data={"drift": drift}, algorithm={"name": algorithm}, protection=protection)
    (event,) = run_experiment(config, tmp_path / "run")["placements"]
    assert (event["round"], event["changed"], [client for client, _, _ in event["moved"]]) == (2, [0, 2], [0, 2])


@pytest.mark.slow
def test_a_run_in_which_nothing_happened_says_nothing(tmp_path: Path) -> None:
    config = configured(BASE, data={"drift": []})
    summary = run_experiment(config, tmp_path / "run")
    assert summary["placements"] == []
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "placed anew" not in page


@pytest.mark.parametrize("name", ["changed", "moved", "unplaced", "opened"])
def test_notes_of_an_algorithm_do_not_pass_for_placements(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`rr_cluster` notes a share as "moved", and the algorithms of users note what they like."""
    notes_of_each_round(monkeypatch, {name: 0.25})
    config = configured({**BASE, "algorithm": {"name": "fedavg"}}, data={"drift": []})
    run_experiment(config, tmp_path / "run")
    rows, summary = results(tmp_path / "run")
    assert [row[name] for row in rows] == [0.25] * 4
    assert summary["placements"] == []
    assert row_text(rows[1]).startswith("accuracy")
    assert "placed anew" not in write_report(tmp_path / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["round", "accuracy_mean", "epsilon", "admissions"])
def test_notes_under_names_of_the_run_are_refused(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    notes_of_each_round(monkeypatch, {name: 7})
    config = configured({**BASE, "algorithm": {"name": "fedavg"}}, data={"drift": []})
    with pytest.raises(InputError, match=rf"algorithm 'fedavg': its round notes \['{name}'\], names of the run; choose others"):
        run_experiment(config, tmp_path / "run")


def notes_of_each_round(monkeypatch: pytest.MonkeyPatch, notes: dict[str, Any]) -> None:
    """FedAvg with further notes on each round."""
    spec = ALGORITHMS["fedavg"]

    @wraps(spec.make)
    def noting(train: Train, **settings: Any) -> Algorithm:
        made = spec.make(train, **settings)

        def round(federation: Federation, state: Any) -> tuple[Any, RoundRecord]:
            state, record = made.round(federation, state)
            return state, replace(record, notes={**record.notes, **notes})

        return replace(made, round=round)

    monkeypatch.setitem(ALGORITHMS, "fedavg", replace(spec, make=noting))


@pytest.mark.slow
def test_a_cluster_that_its_clients_left_is_named_because_it_trains_no_more(tmp_path: Path) -> None:
    drift = [{"round": 2, "clients": list(range(3, 33, 2))[:15], "group": 0}]
    config = configured(
        BASE, data={"drift": drift}, training={"rounds": 8}, protection={"gram": ["haar"], "sum": "secagg", "min_cohort": 3}
    )
    summary = run_experiment(config, tmp_path / "run")
    (line,) = [line for line in summary["warnings"] if "no sum" in line]
    assert line.startswith("cluster 1 (1 client): no sum in the last 6 of 8 rounds, because fewer than 3 of its clients took part")
    assert line.endswith("its model is that of round 2")
    short = run_experiment(configured(BASE, data={"drift": []}), tmp_path / "short")
    assert not [line for line in short["warnings"] if "no sum" in line]


def test_lines_name_few_clients_and_count_many() -> None:
    assert placement_text({}) == ""
    notes = {"moved": [[4, None, 1]], "unplaced": list(range(11)), "opened": {"2": [7, 5, 6]}, "merged": {"0": 1}}
    assert (
        placement_text(notes) == "client 4 moved from no cluster to cluster 1; cluster 2 opened for clients 5, 6, 7; "
        "cluster 0 was too small and joined cluster 1; 11 clients in no cluster"
    )


def test_drift_is_refused_where_noise_is_calibrated_for_clients_that_are_there_from_the_start() -> None:
    with pytest.raises(InputError, match=r"data.drift under privacy.unit = 'sample'"):
        configured(BASE, algorithm={"recheck_every": 0}, privacy={"unit": "sample", "epsilon": 8.0, "delta": 1e-5, "samples": 20})


@pytest.mark.parametrize(
    ("section", "keys", "problem"),
    [
        ("training", {**BASE["training"], "rounds": 2}, "data.drift: round 2 of a run of 2 rounds"),
        ("algorithm", {"name": "oracle"}, "data.drift: client 1 joins, and algorithm 'oracle' takes no newcomers"),
        ("data", {**BASE["data"], "newcomers": 30}, r"data.drift: clients \[5\] join in a round, and data.newcomers = 30"),
    ],
)
def test_what_a_run_cannot_do_is_refused_before_it_starts(section: str, keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        prepare(configured({**BASE, section: keys}))


def test_a_deployment_takes_no_drift_from_its_configuration(tmp_path: Path) -> None:
    def unreached(journal: object) -> NoReturn:
        raise AssertionError

    with pytest.raises(InputError, match=r"data.drift: is for simulations"):
        deploy(unreached, configured(BASE), tmp_path / "run", standing_in((1, 8, 8), 10), system="none", clients=32)
