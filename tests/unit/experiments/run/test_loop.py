"""What a row and a summary count: of which clients a mean is, which rounds are the last, which clusters are there, what a client pays."""

import json
import re
import warnings
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import population
from small_runs import configured

from cflpriv.algorithms import ALGORITHMS
from cflpriv.clustering.scores import mean_interval, perplexity, spread
from cflpriv.console import summary_text
from cflpriv.contract.transcript import payload_rows, read_transcript
from cflpriv.data import build_population
from cflpriv.engine import Streams, TaskInput
from cflpriv.errors import CflprivWarning, InputError
from cflpriv.experiments import advance, finish, parse_config, run_experiment, start
from cflpriv.experiments.newcomers import held_back
from cflpriv.experiments.report.report import write_report
from cflpriv.experiments.run.run import admit
from cflpriv.experiments.run.verify import verify
from cflpriv.tasks.evaluation import Evaluate
from cflpriv.types import Clustering, Population

SMALL: dict[str, Any] = {
    "data": {"clients": 10, "rotations": [0, 90], "samples_per_client": 30, "test_samples_per_client": 20},
    "model": {"name": "mlp", "hidden": 8},
    "training": {"rounds": 50, "lr": 0.1, "weights": "equal"},
    "algorithm": {"name": "fedavg"},
}
small_config = partial(configured, SMALL)
SCENE = build_population(parse_config(SMALL).data)


# --- what a run was told of the groups, and whether it can find them


@pytest.mark.parametrize(
    ("algorithm", "knowledge"),
    [
        ({"name": "fedavg"}, "none: no groups are formed"), ({"name": "local"}, "none: no groups are formed"),
        ({"name": "oracle"}, "the true groups"), ({"name": "shuffled"}, "the sizes of the true groups, where they are known"),
        ({"name": "ifca", "k": 4}, "the number of groups, k = 4"), ({"name": "ifca"}, "none: a test at level 0.01"),
        ({"name": "crossfit", "alpha": 0.05}, "none: a test at level 0.05"), ({"name": "crossfit", "k": 3}, "the number of groups, k = 3"),
        ({"name": "pacfl", "beta": 10.0}, "a threshold, beta = 10 degrees"), ({"name": "pacfl", "k": 4}, "the number of groups, k = 4"),
        ({"name": "stocfl", "tau": 0.4}, "a threshold, tau = 0.4"), ({"name": "fesem"}, "the number of groups, k = 2"),
        ({"name": "cfl"}, "none: a test at level 0.01"),
        ({"name": "cfl", "eps2": 0.75}, "thresholds on norms of updates, eps1 = 0.2 and eps2 = 0.75"),
        ({"name": "cfl", "variant": "authors"}, "thresholds on norms of updates, eps1 = 0.4 and eps2 = 1.6"),
        ({"name": "pfedlia"}, "none: the clustering of scores that two min_samples agree on"),
        ({"name": "pfedlia", "min_samples": 5}, "a density, min_samples = 5"),
        ({"name": "pfedlia", "mode": "peer"}, "none: 2-means of each client's scores"),
    ],
)  # fmt: skip
def test_the_knowledge_that_a_run_used_is_one_line(algorithm: dict[str, Any], knowledge: str) -> None:
    assert small_config(algorithm=algorithm).knowledge == knowledge


def test_every_registered_algorithm_declares_it_and_a_summary_has_it() -> None:
    for name in ALGORITHMS.ready():
        assert small_config(algorithm={"name": name}).knowledge != "not declared", name
    summary = finish(start(small_config(training={"rounds": 1}), population=SCENE))
    assert (summary["knowledge"], summary["warnings"]) == ("none: no groups are formed", [])


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"name": "pfedlia", "warm_up": 20}, r"'pfedlia' will form no clusters: algorithm\.warm_up = 20, and the run has 20 rounds"),
        ({"name": "cfl", "first_split": 20}, r"'cfl' will form no clusters: algorithm\.first_split = 20, and the run has 20 rounds"),
        ({"name": "cfl", "variant": "authors"}, r"'cfl' will form no clusters: algorithm\.first_split = 20, and the run has 20 rounds"),
    ],
)
def test_a_run_that_can_form_no_clusters_says_so_before_it_starts(algorithm: dict[str, Any], words: str) -> None:
    config = small_config(algorithm=algorithm, training={"rounds": 20})
    with pytest.warns(CflprivWarning, match=words):
        run = start(config, population=SCENE)
    assert re.search(words, finish(run)["warnings"][0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start(config.with_("training", rounds=21), population=SCENE)


# --- local accuracy


@pytest.mark.parametrize("name", ["pacfl", "fedavg", "lg_fedavg", "per_fedavg", "fedproto", "ditto", "ifca", "local"])
def test_the_local_mean_is_over_all_clients_and_who_has_not_trained_has_the_initial_model(name: str) -> None:
    config = small_config(algorithm={"name": name}, training={"participation": 0.3}, run={"seed": 3})
    simulation = start(config, population=SCENE)
    federation, model = simulation.federation, config.model_for(SCENE)

    def initially(client: int) -> float:
        one = TaskInput(simulation.simulated.data[client], {"model": model.init(3)}, {}, Streams(3, 0, client))
        told = Evaluate(model).run(one)
        return float(told["correct"]) / float(told["count"])

    row = advance(simulation)
    local = dict(zip(row["per_client"]["clients"], row["per_client"]["local_accuracy"], strict=True))
    idle = [client for client in federation.clients if client not in row["cohort"]]
    assert len(idle) == 7
    assert [local[client] for client in idle] == [initially(client) for client in idle]
    assert row["local_accuracy_mean"] == pytest.approx(np.mean(list(local.values())))
    assert len(local) == 10


def test_clients_without_a_local_model_have_no_local_accuracy() -> None:
    simulation = start(small_config(algorithm={"name": "ifca", "averaging": "gradient"}), population=SCENE)
    assert advance(simulation)["local_accuracy_mean"] is None


# --- the last rounds, the target, the traffic


def test_the_last_rounds_are_rounds_not_evaluations() -> None:
    simulation = start(small_config(run={"evaluate_every": 12}), population=SCENE)
    rows = [advance(simulation) for _ in range(13)]
    summary = finish(simulation)
    assert [row["round"] for row in rows if row.get("accuracy_mean") is not None] == [0, 12]
    assert summary["last_rounds"] == 1
    assert summary["accuracy_mean_last_rounds"] == rows[12]["accuracy_mean"]


@pytest.mark.parametrize("target", [75, 1.01, -0.1, float("nan")])
def test_a_target_that_is_no_share_is_refused(target: float) -> None:
    with pytest.raises(InputError, match=rf"run\.target_accuracy = {target}"):
        small_config(run={"target_accuracy": float(target)})


def test_a_client_pays_its_share_of_the_transfers_as_in_the_papers_table() -> None:
    """PACFL's Table 8: participation × rounds × transfers a round × the size of a model."""
    config = small_config(training={"participation": 0.25}, data={"newcomers": 2}, run={"target_accuracy": 1e-9})
    simulation = start(config, population=SCENE)
    for _ in range(3):
        advance(simulation)
    summary = finish(simulation)
    transfer = summary["parameters"] * 32 / 1e6
    assert summary["megabits_a_client"] == pytest.approx(0.25 * 3 * 2 * transfer)
    assert summary["megabits"] == pytest.approx(8 * summary["megabits_a_client"])
    for prefix in ("", "local_"):
        assert summary[f"{prefix}rounds_to_target"] == 1
        assert summary[f"{prefix}megabits_a_client_to_target"] == pytest.approx(0.25 * 2 * transfer)


# --- clusters and newcomers


@pytest.mark.parametrize("name", ["ifca", "fesem"])
def test_models_that_nobody_chose_are_no_clusters(name: str) -> None:
    simulation = start(small_config(algorithm={"name": name, "k": 9}, training={"participation": 0.5}), population=SCENE)
    last: dict[int, int] = {}
    for row in (advance(simulation) for _ in range(3)):
        last |= dict(zip(row["cohort"], row["labels"], strict=True))
    assert len(set(last.values())) < 9
    assert finish(simulation)["clusters"] == len(set(last.values()))


@given(st.lists(st.integers(0, 4), min_size=2, max_size=30), st.data())
def test_newcomers_come_from_all_groups_in_proportion(groups: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(groups) - 1))
    scene = population(1, len(groups), samples=2)
    scene = replace(scene, groups=tuple(groups))
    late = held_back(scene.group_of, count)
    assert len(late) == len(set(late)) == count
    sizes, taken = Counter(groups), Counter(groups[client] for client in late)
    for group, size in sizes.items():
        assert abs(taken[group] - count * size / len(groups)) < 1
        members = [client for client, its in enumerate(groups) if its == group]
        assert [client for client in members if client in late] == members[size - taken[group] :]


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 11))
def test_where_clients_are_dealt_to_groups_newcomers_are_the_last(clients: int, groups: int, count: int) -> None:
    scene = replace(population(1, clients, samples=2), groups=tuple(i % groups for i in range(clients)))
    count = min(count, clients - 1)
    assert held_back(scene.group_of, count) == tuple(range(clients - count, clients)) or clients % groups


def sorted_by_group() -> Population:
    """The same clients under ids that are sorted by true group, as those of mixtures are."""
    order = np.argsort(SCENE.groups, kind="stable")
    clients = tuple(replace(SCENE.clients[i], id=place) for place, i in enumerate(order))
    return replace(SCENE, clients=clients, groups=tuple(SCENE.groups[i] for i in order))


def test_no_group_is_met_for_the_first_time_after_training_and_newcomers_count_in_no_other_score() -> None:
    scene = sorted_by_group()
    simulation = start(small_config(algorithm={"name": "pacfl", "k": 2}, data={"newcomers": 4}), population=scene)
    assert simulation.newcomers == (3, 4, 8, 9)
    nothing_trained = finish(simulation)
    admit(simulation)
    names = ("accuracy_mean", "accuracy_worst", "ari", "clusters")
    assert [finish(simulation)[name] for name in names] == [nothing_trained[name] for name in names]
    found = simulation.algorithm.describe(simulation.state)["clustering"]
    apart = tuple(2 if client in simulation.newcomers else found[client] for client in found.clients)
    simulation.algorithm = replace(simulation.algorithm, describe=lambda state: {"clustering": Clustering(found.clients, apart, 3)})
    assert [finish(simulation)[name] for name in names] == [nothing_trained[name] for name in names]


# --- perplexity


@pytest.mark.parametrize("wild", [101.0, 800.0, np.inf, np.nan])
def test_a_client_whose_model_diverged_is_not_left_out_of_the_perplexity(wild: float) -> None:
    values = perplexity(np.array([3.0, 3.0, wild, np.nan]), np.array([0.1, 0.1, 0.0, np.nan]))
    assert np.isnan(values[3]), "it has no test data"
    scores = spread(values, "perplexity")
    assert scores["perplexity_mean"] == pytest.approx(np.exp(100.0) / 3)
    json.dumps({**scores, "worst": float(np.nanmax(values))}, allow_nan=False)
    np.testing.assert_allclose(perplexity(np.array([0.0, 5.0]), np.zeros(2)), [1.0, np.exp(5.0)])


# --- a sample of the clients is evaluated


def test_the_interval_covers_the_mean_over_all_clients() -> None:
    """95 % of 2,000 samples: with a miss probability of .05 the share lies in .05 ± .016 with probability .999."""
    rng = np.random.default_rng(0)
    accuracies = rng.beta(8, 2, 200)
    missed = 0
    for _ in range(2000):
        drawn = rng.choice(accuracies, 60, replace=False)
        low, high = mean_interval(drawn.tolist(), len(accuracies)) or (0.0, 0.0)
        missed += not low <= accuracies.mean() <= high
    assert abs(missed / 2000 - 0.05) < 0.016


@pytest.mark.parametrize(("values", "count", "expected"), [([0.5], 9, None), ([], 9, None), ([0.2, 0.4], 2, (0.3, 0.3))])
def test_an_interval_needs_two_clients_and_is_a_point_for_all(values: list[float], count: int, expected: Any) -> None:
    assert mean_interval(values, count) == (None if expected is None else pytest.approx(expected))


def test_a_sample_of_the_clients_is_evaluated(tmp_path: Path) -> None:
    """Each round a new one, the same for every run of the seed; its scores are those that all clients' evaluation gives these clients."""
    sections: dict[str, Any] = {
        "data": {"clients": 8, "test_samples_per_client": 20}, "model": {"hidden": 4}, "algorithm": {"name": "fedavg"},
        "training": {"rounds": 3, "lr": 0.1},
    }  # fmt: skip
    whole = run_experiment(parse_config(sections), tmp_path / "whole")
    summary = run_experiment(parse_config(sections | {"run": {"evaluate_clients": 3}}), tmp_path / "some")
    rows, all_rows = (
        [json.loads(line) for line in (tmp_path / name / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("some", "whole")
    )
    for row, all_of in zip(rows, all_rows, strict=True):
        every = dict(zip(all_of["per_client"]["clients"], all_of["per_client"]["accuracy"], strict=True))
        seen = row["per_client"]
        assert seen["accuracy"] == pytest.approx([every[client] for client in seen["clients"]], abs=1e-12)
        assert row["evaluated_clients"] == len(set(seen["clients"])) == 3
        low, high = row["accuracy_mean_interval"]
        assert low < row["accuracy_mean"] < high
    assert len({tuple(row["per_client"]["clients"]) for row in rows}) > 1
    assert (whole["evaluated_clients"], whole["accuracy_mean_interval"]) == (None, None)
    assert summary["evaluated_clients"] == 3
    assert not verify(tmp_path / "some").problems
    assert "drawn at random) (worst of these " in summary_text(summary)
    assert "drawn at random" not in summary_text(whole)
    assert "(worst client " in summary_text(whole)
    assert "of the 3 drawn" in write_report(tmp_path / "some").read_text(encoding="utf-8")
    assert "of the 3 drawn" not in write_report(tmp_path / "whole").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("run", "why"),
    [
        ({"evaluate_clients": 1}, "run.evaluate_clients = 1: expected an integer, 0 or ≥ 2"),
        ({"evaluate_clients": -2}, "run.evaluate_clients = -2: expected an integer, 0 or ≥ 2"),
        ({"record_sample": 3}, "run.record_sample = 3 with run.record = 'headers'"),
        ({"record_sample": 3, "record": "attackable", "record_clients": [1]}, r"with run.record_clients = \[1\]"),
        (
            {"record": "full", "record_clients": [1]},
            r"run.record_clients = \[1\] with run.record = 'full': use it with record = 'attackable'",
        ),
        ({"record_rounds": [1]}, r"run.record_rounds = \[1\] with run.record = 'headers': use it with record = 'attackable'"),
    ],
)
def test_samples_that_make_no_sense_are_refused(run: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        parse_config({"run": run})


def test_payloads_of_a_sample_are_kept_and_verify_says_so(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "data": {"clients": 8, "test_samples_per_client": 20}, "model": {"hidden": 4}, "algorithm": {"name": "fedavg"},
        "training": {"rounds": 2, "lr": 0.1}, "run": {"record": "attackable", "record_sample": 3},
    }  # fmt: skip
    run_experiment(parse_config(sections), tmp_path / "run")
    messages = read_transcript(tmp_path / "run" / "transcript")
    updates = [message for message in messages if message.kind == "update"]
    assert updates
    assert len({payload_rows(message) for message in updates}) == 1
    assert all(len(payload_rows(message)) == 3 and len(message.clients) == 8 for message in updates)
    assert all(message.digest for message in messages)
    found = verify(tmp_path / "run")
    assert not found.problems
    assert "some clients only" in found.unchecked
    sections["run"] = {"record": "full"}
    run_experiment(parse_config(sections), tmp_path / "full")
    assert not verify(tmp_path / "full").unchecked
    other = read_transcript(tmp_path / "full" / "transcript")
    assert [message.digest for message in messages] == [message.digest for message in other]
