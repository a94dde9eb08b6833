"""The advice of whole runs: what is trained beside, what leaves clients, and what a summary, the console and a report have of it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import configured

from cflpriv.advice.procedure import further_rounds
from cflpriv.advice.verdict import CLUSTERS, CLUSTERS_MIXTURE, LOCAL, ONE_MIXTURE, RANDOM
from cflpriv.advice.words import advice_lines, mixture_line, without_advice
from cflpriv.algorithms import ALGORITHMS
from cflpriv.contract.transcript import read_transcript
from cflpriv.data import build_population
from cflpriv.engine import Device, Streams, TaskInput
from cflpriv.errors import InputError
from cflpriv.experiments import parse_config, run_experiment
from cflpriv.experiments.report.report import write_report
from cflpriv.experiments.run.advising import not_learned
from cflpriv.tasks.advice import KeepLocal, KeepTuned, kept_names
from cflpriv.tasks.evaluation import Evaluate
from cflpriv.transports.simulation import simulate

GROUPS: dict[str, Any] = {
    "data": {"clients": 16, "label_permutations": 2, "samples_per_client": 60, "test_samples_per_client": 40},
    "model": {"name": "mlp", "hidden": 30},
    "training": {"rounds": 6, "epochs": 2, "lr": 0.1, "weights": "equal"},
    "algorithm": {"name": "crossfit"},
    "run": {"advise": True},
}
config_of = partial(configured, GROUPS)


@pytest.fixture(scope="module")
def advised(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of two groups of permuted labels, and its summary."""
    folder = tmp_path_factory.mktemp("advised") / "run"
    return folder, run_experiment(config_of(), folder)


def test_clusters_are_advised_where_groups_permute_labels(advised: tuple[Path, dict[str, Any]]) -> None:
    advice = advised[1]["advice"]
    assert advice["decided"]
    assert advice["advice"] in (CLUSTERS, CLUSTERS_MIXTURE)
    control = next(pair for pair in advice["differences"] if (pair["better"], pair["other"]) == (CLUSTERS, RANDOM))
    assert control["low"] > 0
    assert advice["stability"] == 1.0
    # the models that are scored are those that are deployed
    assert advice["test_accuracy"][CLUSTERS] == pytest.approx(advised[1]["balanced_accuracy"])


def test_the_advice_stays_within_its_costs(advised: tuple[Path, dict[str, Any]]) -> None:
    advice = advised[1]["advice"]
    assert 1 < advice["client_epochs"] <= 3
    assert advice["numbers_in_sums"] <= 370
    rounds = {message.round for message in read_transcript(advised[0] / "transcript")}
    assert max(rounds) < 6 + further_rounds(6)


def test_console_and_report_state_the_advice(advised: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = advised
    lines = advice_lines(summary["advice"])
    assert lines[0].startswith("what to deploy: cluster models")
    assert without_advice(summary, "x.toml") == ""
    page = write_report(folder).read_text(encoding="utf-8")
    assert "What to deploy" in page
    assert all(line.replace("'", "&#39;") in page for line in lines)


def test_a_run_without_advice_names_the_command_and_holds_nothing_out(tmp_path: Path) -> None:
    config = config_of(run={"advise": False}, training={"rounds": 1})
    assert config.data.held_out == "none"
    summary = run_experiment(config, tmp_path / "run")
    assert summary["advice"] is None
    assert without_advice(summary, "cflpriv advise x.toml") == "nothing shows yet that clusters help these clients: cflpriv advise x.toml"
    assert max(message.round for message in read_transcript(tmp_path / "run" / "transcript")) == 0
    assert without_advice({**summary, "clusters": 1}, "x.toml") == ""


def test_one_model_is_not_trained_twice(tmp_path: Path) -> None:
    config = config_of(algorithm={"name": "fedavg"}, training={"rounds": 2})
    summary = run_experiment(config, tmp_path / "run")
    assert set(summary["advice"]["held_out_accuracy"]) == {LOCAL, "one model", ONE_MIXTURE}
    assert summary["advice"]["test_accuracy"]["one model"] == pytest.approx(summary["balanced_accuracy"])
    assert summary["advice"]["client_epochs"] <= 3


@pytest.mark.parametrize("unit", ["client", "sample"])
def test_under_privacy_nothing_is_scored(unit: str, tmp_path: Path) -> None:
    config = config_of(
        algorithm={"name": "fedavg"},
        training={"rounds": 1},
        privacy={"unit": unit, "epsilon": 50.0, "delta": 1e-3} | ({"samples": 60} if unit == "sample" else {}),
        model={"hidden": 5},
    )
    assert config.data.held_out == "none"
    advice = run_experiment(config, tmp_path / "run")["advice"]
    assert (advice["decided"], advice["advice"], advice["numbers_in_sums"]) == (False, LOCAL, 0)
    folder = tmp_path / "run"
    assert max(message.round for message in read_transcript(folder / "transcript")) == 0  # nothing leaves after the one round
    charged = json.loads((folder / "ledger.json").read_text(encoding="utf-8"))["charges"]
    assert unit == "sample" or len(charged) == 1  # the sum of the one round
    assert advice_lines(advice)[0].startswith(f"what to deploy: cannot tell (under privacy.unit = '{unit}'")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algorithm": {"name": "ditto"}, "training": {"rounds": 1}}, "clients of 'ditto' use models of their own"),
        ({"training": {"mixture": True}}, "run.advise = true with training.mixture = True: the advice has mixtures of its own"),
        ({"algorithm": {"name": "local"}}, "clients of 'local' use models of their own"),
        ({"protection": {"sum": "haar"}}, "run.advise = true with protection.sum = 'haar'"),
        ({"protection": {"robust": "trimmed_mean"}}, "run.advise = true with protection.robust = 'trimmed_mean'"),
        ({"protection": {"sum": "secagg", "secagg_bits": 16}}, "run.advise = true with protection.secagg_bits = 16"),
        ({"protection": {"sum": "one_message", "secagg_clip": 0.5}}, "run.advise = true with protection.secagg_clip = 0.5"),
    ],
)
def test_what_cannot_be_advised_on_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        run_experiment(config_of(**changes), tmp_path / "run")


@pytest.mark.parametrize("algorithm", ["crossfit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ifca", "one_shot"))])
def test_a_mixture_is_an_option_of_clustered_algorithms(algorithm: str, tmp_path: Path) -> None:
    config = config_of(run={"advise": False}, training={"mixture": True, "rounds": 3}, algorithm={"name": algorithm})
    summary = run_experiment(config, tmp_path / "run")
    mixture = summary["mixture"]
    assert summary["advice"] is None
    assert mixture["test_accuracy"]["models of the run"] == pytest.approx(summary["balanced_accuracy"])
    assert mixture["held_out_accuracy"].keys() == mixture["test_accuracy"].keys() == {"local models", "models of the run", "own mixture"}
    assert mixture["client_epochs"] <= 3
    assert mixture_line(mixture).startswith(
        "mixtures with each client's own model: balanced accuracy of each client's own model, trained alone "
    )


def test_the_weights_of_a_mixture_stay_with_the_client(tmp_path: Path) -> None:
    """In the rounds after training no part leaves a client but in sums."""
    config = config_of(run={"advise": False}, training={"mixture": True, "rounds": 1}, algorithm={"name": "fedavg"})
    run_experiment(config, tmp_path / "run")
    later = [message for message in read_transcript(tmp_path / "run" / "transcript") if message.round >= 1]
    assert {message.operation for message in later} == {"compute", "mean"}


@pytest.mark.slow
def test_under_secure_sums_the_server_gets_sums_alone(tmp_path: Path) -> None:
    config = config_of(protection={"gram": ["haar"], "sum": "secagg", "min_cohort": 3})
    summary = run_experiment(config, tmp_path / "run")
    assert summary["advice"]["advice"] in (CLUSTERS, CLUSTERS_MIXTURE)
    later = [message for message in read_transcript(tmp_path / "run" / "transcript") if message.round >= 6]
    assert {message.operation for message in later} <= {"compute", "mean", "gram", "group"}


@pytest.mark.slow
def test_a_finished_run_is_not_advised_again(advised: tuple[Path, dict[str, Any]]) -> None:
    again = run_experiment(config_of(), advised[0], resume=True)
    assert again["advice"] == json.loads((advised[0] / "summary.json").read_text(encoding="utf-8"))["advice"]


# --- the tasks


def test_local_training_is_that_of_the_algorithm_local() -> None:
    config = parse_config({**GROUPS, "data": {"clients": 3, "samples_per_client": 20}, "run": {}})
    people = build_population(config.data)
    train, simulated = config.train_for(people), simulate(people.clients)
    algorithm = ALGORITHMS["local"].make(train, seed=0)
    state = algorithm.init(simulated.federation)
    for number in range(3):
        simulated.federation.begin_round(number)
        state, _ = algorithm.round(simulated.federation, state)
    inputs = [TaskInput(own, {}, {}, Streams(0, 7, own.id)) for own in people.clients]
    kept, _ = KeepLocal(train, 0, 3 * train.epochs).run_many(inputs, Device("cpu"))
    for own, result in zip(people.clients, kept, strict=True):
        model = simulated.peek(own.id, algorithm.serve(state).params["model"])
        assert np.allclose(result[kept_names("local")[0]], model, atol=1e-5)


def test_tuning_goes_on_from_the_shorter_one() -> None:
    config = parse_config({**GROUPS, "data": {"clients": 1, "samples_per_client": 20}, "run": {}})
    (own,) = build_population(config.data).clients
    train = config.train_for(build_population(config.data))
    start = train.model.init(0)
    task_input = TaskInput(own, {"model": start}, {}, Streams(0, 2, own.id))
    short, both = (KeepTuned(train, Evaluate(train.model), "one", epochs).run(task_input) for epochs in ((2,), (2, 5)))
    received, after_two, after_five = (both[name] for name in kept_names("one", (2, 5)))
    assert np.array_equal(received, start)
    assert np.array_equal(after_two, short[kept_names("one", (2,))[1]])
    assert not np.array_equal(after_two, after_five)


def test_nothing_is_advised_where_nothing_was_learned() -> None:
    """A model that names rare classes, or an option whose balanced accuracy is above that of one answer, learned something."""
    constant = {"by_class": {"counts": [[80, 0], [20, 0]]}, "majority_accuracy": 0.8}
    some = {"by_class": {"counts": [[60, 20], [8, 12]]}, "majority_accuracy": 0.8}
    means = {"local models": 0.52, "one model": 0.5}
    assert "no model has learned" in not_learned(constant, means)
    assert not_learned(constant, means).endswith(", then advise again")
    assert not_learned(constant, {**means, "local models": 0.56}) == ""
    assert not_learned(some, means) == ""
    assert not_learned({}, means) == ""


def test_an_advice_that_cannot_tell_names_no_choice_of_its_own_scores() -> None:
    advice = {
        "decided": False,
        "reasons": ["no model has learned; train longer"],
        "held_out_accuracy": {"one model": 0.8},
        "advice": "one model",
    }
    assert advice_lines(advice) == ["what to deploy: cannot tell (no model has learned; train longer)"]
