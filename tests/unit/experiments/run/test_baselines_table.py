"""What a comparison rests on: no algorithm sees test data, newcomers are scored alike, communication is counted as the papers do."""

import json
import math
import os
import sys
from dataclasses import replace
from functools import partial
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from checkout import ROOT
from often import cases
from scenes import PROTECTIONS, eye, federation, mlp_training
from small_runs import after_rounds, digits, make_algorithm, true_groups

from cflpriv.algorithms import ALGORITHMS, pacfl
from cflpriv.contract.protection import Protection
from cflpriv.contract.transcript import Message, Transcript
from cflpriv.engine.models import Model
from cflpriv.experiments import parse_config, run_experiment, start
from cflpriv.experiments.newcomers import fine_tuned_results
from cflpriv.experiments.run.communication import client_bytes, megabits, to_target
from cflpriv.experiments.run.measure import scores_of
from cflpriv.experiments.run.run import admit, advance, finish
from cflpriv.federation.values import to_bytes

REAL = pytest.mark.skipif("CFLPRIV_DATA" not in os.environ, reason="needs Fashion-MNIST in CFLPRIV_DATA")


small_digits = partial(digits, samples_per_client=40)
train_on = partial(mlp_training, momentum=0.5)


# --- nobody trains or selects on test data


@pytest.mark.parametrize("name", cases(ALGORITHMS))
def test_test_data_have_no_influence_on_training_or_selection(name: str) -> None:
    """A marker in everybody's test data, as loud as can be, changes no message, no record and no model that is used."""
    scene = small_digits(8)
    marked = replace(
        scene,
        clients=tuple(
            replace(
                client, x_test=np.full_like(client.x_test, 1e3 * (1 + client.id)), y_test=(client.y_test + 1 + client.id) % scene.classes
            )
            for client in scene.clients
        ),
    )
    seen = []
    for population in (scene, marked):
        fed = federation(population.clients, transcript=Transcript("full"), seed=4, present=range(7))
        algorithm = make_algorithm(name, train_on(population), groups=true_groups(population), warm_up=1)
        state, records = algorithm.init(fed), list[Any]()
        for number in range(3):
            fed.begin_round(number)
            state, record = algorithm.round(fed, state)
            records.append(record)
        if algorithm.admit is not None:
            eye(fed).join([7])
            state, notes = algorithm.admit(fed, state, [7])
            records.append(notes)
        what = algorithm.serve(state)
        given = eye(fed).resolve(what.task, what.params, what.which, fed.clients)
        clean = [
            replace(one, data=replace(one.data, x_test=c.x_test, y_test=c.y_test)) for one, c in zip(given, scene.clients, strict=False)
        ]
        losses = [float(result["loss"]) for result in eye(fed).engine.run(what.task, clean)]
        seen.append(
            ([message.digest for message in fed.transcript.messages], repr(records), losses, algorithm.describe(state).get("clustering"))
        )
    assert seen[0] == seen[1]


def test_the_marker_is_loud_enough() -> None:
    """Where something does listen to test data (IFCA's authors' variant, in its inference), the same marker is heard."""
    scene = small_digits(6, samples_per_client=60)
    swapped = replace(
        scene,
        clients=tuple(
            replace(c, x_test=scene.clients[(i + 1) % 6].x_test, y_test=scene.clients[(i + 1) % 6].y_test)
            for i, c in enumerate(scene.clients)
        ),
    )
    used = []
    for population in (scene, swapped):
        fed = federation(population.clients)
        algorithm = make_algorithm("ifca", train_on(population, batch_size=0, epochs=5, lr=0.3), k=2, variant="authors")
        state = after_rounds(algorithm, fed, 12)
        what = algorithm.serve(state)
        used.append([what.task.used(one) for one in eye(fed).resolve(what.task, what.params, what.which, fed.clients)])  # type: ignore[attr-defined]
    assert not np.array_equal(used[0], used[1])


# --- newcomers, as they are and fine-tuned


@pytest.mark.filterwarnings("ignore:algorithm 'fedgwc' will form no clusters")
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ("oracle", "shuffled")])
def test_every_algorithm_takes_newcomers_and_scores_them_twice(name: str) -> None:
    more = {"pfedlia": {"warm_up": 1, "min_samples": 2}, "private_clusters": {"k": 1}}.get(name, {})
    config = parse_config({
        "data": {"clients": 8, "rotations": [0, 90], "samples_per_client": 60, "test_samples_per_client": 30, "newcomers": 2},
        "model": {"name": "mlp", "hidden": 16},
        "training": {"rounds": 2, "lr": 0.1},
        "algorithm": {"name": name, **more},
    })  # fmt: skip
    simulation = start(config)
    for _ in range(2):
        advance(simulation)
    before = [message.index for message in simulation.federation.transcript.messages]
    admit(simulation)
    admitted = finish(simulation)["newcomers"]
    assert admitted["clients"] == [6, 7]
    for key in ("newcomer_accuracy_mean", "newcomer_tuned_accuracy_mean", "newcomer_tuned_accuracy_worst"):
        assert 0 <= admitted[key] <= 1
    assert admitted["newcomer_tuned_accuracy_mean"] > 0.3  # 60 samples, five epochs: far above a tenth
    assert len(before) <= len(simulation.federation.transcript.messages)


def test_fine_tuning_starts_from_what_the_client_would_use_and_sends_nothing() -> None:
    scene = small_digits(6)
    fed = federation(scene.clients)
    train = train_on(scene, dtype="float64")
    algorithm = make_algorithm("ifca", train, k=2)
    state = after_rounds(algorithm, fed, 2)
    count = len(fed.transcript.messages)
    tuned = scores_of(fine_tuned_results(eye(fed), algorithm.serve(state), replace(train, epochs=3), fed.clients))[0]
    assert len(fed.transcript.messages) == count
    models = [eye(fed).peek(0, model) for model in state.restarts[0].models]
    labels = {
        c: int(eye(fed).peek(c, fed.compute(algorithm.serve(state).task, algorithm.serve(state).params)["choice"])) for c in fed.clients
    }
    for i, client in enumerate(fed.clients):
        held = fed.compute(replace(train, epochs=3), {"model": models[labels[client]]}, on=[client])
        data = eye(fed).data[client]
        module = train.model.load(models[labels[client]] + eye(fed).peek(client, held["update"]))
        right = (module(train.model.inputs(data.x_test)).argmax(1).numpy() == data.y_test).mean()
        assert tuned[i] == pytest.approx(right)


# --- communication


def test_resnet9_is_the_papers_megabits_a_transfer() -> None:
    """PACFL, supplement: a transfer of ResNet-9 takes up 211.88 Mb: 6 621 540 parameters of 32 bits, 100 classes, cut to two digits."""
    dimension = Model("resnet9", (3, 32, 32), 100).dimension
    assert dimension == 6_621_540
    assert math.floor(megabits(dimension) * 100) / 100 == 211.88


def seal_bytes(message: Message) -> int:
    """What sealing adds to one copy of a relayed value: how it is encoded, a nonce (12) and a tag (16)."""
    assert message.payload is not None
    value = {name: rows[0] for name, rows in message.payload.items()}
    return len(to_bytes(value)) + 12 + 16 - sum(int(one.nbytes) for one in value.values())


@pytest.mark.parametrize("name", cases(ALGORITHMS))
def test_without_protection_nothing_is_overhead_but_the_seals_of_a_relay(name: str) -> None:
    scene = small_digits(8)
    fed = federation(scene.clients)
    after_rounds(make_algorithm(name, train_on(scene), groups=true_groups(scene), warm_up=1), fed, 3)
    relays = [message for message in fed.transcript.messages if message.operation == "relay" and message.target == "clients"]
    relayed = sum(message.copies * seal_bytes(message) for message in relays)
    assert (relayed > 0) == (name in ("pfedlia", "fedfomo"))
    assert fed.transcript.upload_bytes - fed.transcript.unprotected.upload_bytes == relayed
    assert fed.transcript.download_bytes - fed.transcript.unprotected.download_bytes == relayed


@pytest.mark.parametrize("kind", ["haar", "secagg", "secagg-oblivious"])
def test_what_a_protection_adds_is_apart(kind: str) -> None:
    """The bare figures are those of the run without protection; what comes on top is the protection's."""
    scene = small_digits(6)
    name = "ifca" if kind == "secagg-oblivious" else "oracle"
    figures = []
    for protection in (
        Protection(min_cohort=2),
        Protection(gram=PROTECTIONS["haar"].gram if kind == "haar" else (), sum=kind, min_cohort=2),
    ):
        fed = federation(scene.clients, protection=protection)
        after_rounds(
            make_algorithm(name, train_on(scene), groups=true_groups(scene), weights="equal", **({"k": 2} if name == "ifca" else {})),
            fed,
            2,
        )
        figures.append((fed.transcript.unprotected, fed.transcript))
    (plain, _), (bare, transcript) = figures
    identities = 6 * 2 if kind == "secagg-oblivious" else 0  # in the clear the choices are gathered
    assert bare.upload_numbers == plain.upload_numbers - identities
    assert bare.download_numbers == plain.download_numbers
    assert transcript.upload_bytes > bare.upload_bytes > 0
    assert transcript.download_bytes > bare.download_bytes > 0


def test_what_arrives_counts_and_what_does_not_does_not() -> None:
    scene = small_digits(6)
    fed = federation(scene.clients, dropouts=[(0, 2, "Masked")])
    after_rounds(make_algorithm("fedavg", train_on(scene)), fed, 1)
    dimension = train_on(scene).model.dimension
    assert fed.transcript.unprotected.upload_numbers == 5 * (dimension + 1)  # and a sample count each
    assert fed.transcript.unprotected.download_numbers == 6 * dimension
    assert fed.transcript.upload_bytes == fed.transcript.unprotected.upload_bytes


def test_ifca_counts_k_downloads_and_pacfl_its_signatures() -> None:
    scene = small_digits(8)
    train = train_on(scene)
    dimension = train.model.dimension
    fed = federation(scene.clients)
    after_rounds(make_algorithm("ifca", train, k=3, weights="equal"), fed, 2)
    assert fed.transcript.unprotected.download_numbers == 2 * 8 * 3 * dimension
    assert fed.transcript.unprotected.upload_numbers == 2 * 8 * (dimension + 1)  # and the choice
    one = federation(scene.clients)
    algorithm = pacfl(train, p=3, k=2, weights="equal")
    algorithm.init(one)
    assert (one.transcript.unprotected.upload_numbers, one.transcript.unprotected.download_numbers) == (8 * 3 * 64, 0)
    after_rounds(algorithm, one, 2)
    assert one.transcript.unprotected.upload_numbers == 2 * 8 * 3 * 64 + 2 * 8 * dimension  # two beginnings, two rounds


def test_bytes_by_client_add_up_and_a_relay_counts_for_both() -> None:
    scene = small_digits(6)
    fed = federation(scene.clients)
    after_rounds(make_algorithm("fedfomo", train_on(scene), models=2), fed, 3)
    sent, received = client_bytes(fed.transcript.messages)
    assert sum(sent.values()) == pytest.approx(fed.transcript.upload_bytes)
    assert sum(received.values()) == pytest.approx(fed.transcript.download_bytes)
    assert set(received) == set(fed.clients)
    seal = {seal_bytes(message) for message in fed.transcript.messages if message.operation == "relay" and message.target == "clients"}
    each = 4 * train_on(scene).model.dimension + seal.pop()
    assert not seal
    assert all(value == 2 * 2 * each for value in received.values())  # two models in each of two rounds


def test_rounds_and_megabits_to_a_target() -> None:
    rows: list[dict[str, Any]] = [
        {"round": 0, "accuracy_mean": 0.2, "upload_numbers": 10, "download_numbers": 30},
        {"round": 1, "accuracy_mean": None, "upload_numbers": 20, "download_numbers": 60},
        {"round": 2, "accuracy_mean": 0.8, "upload_numbers": 30_000_000, "download_numbers": 90_000_000},
        {"round": 3, "accuracy_mean": 0.9, "upload_numbers": 40_000_000, "download_numbers": 99_000_000},
    ]
    assert to_target(rows, 0.7) == (3, 120 * 32)
    assert to_target(rows, 0.95) is None
    assert to_target(rows, 0.5, "local_accuracy_mean") is None


@pytest.mark.parametrize("name", ["scaffold", "fedfomo", "fedproto", "fesem", "one_shot", "pacfl"])
def test_a_run_folder_has_the_counts_and_a_resumed_run_has_the_same(name: str, tmp_path: Path) -> None:
    config = parse_config({
        "data": {"clients": 6, "rotations": [0, 90], "samples_per_client": 40, "test_samples_per_client": 20},
        "model": {"name": "mlp", "hidden": 8},
        "training": {"rounds": 3, "lr": 0.1},
        "algorithm": {"name": name},
        "run": {"insecure_test_entropy": True, "target_accuracy": 0.05},
    })  # fmt: skip
    whole = run_experiment(config, tmp_path / "whole")
    rows = [json.loads(line) for line in (tmp_path / "whole" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    keys = (
        "protection_upload_bytes",
        "protection_download_bytes",
        "setup_bytes",
        "megabits",
        "rounds_to_target",
        "local_megabits_to_target",
    )
    assert all(key in whole for key in keys)
    assert whole["megabits"] == megabits(rows[-1]["upload_numbers"] + rows[-1]["download_numbers"])
    assert whole["setup_bytes"] == (0 if name not in ("one_shot", "pacfl") else rows[0]["upload_bytes"] - _round_up(rows))
    assert whole["rounds_to_target"] == 1

    class Stopped(Exception):
        pass

    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 1:
            raise Stopped

    with pytest.raises(Stopped):
        run_experiment(config, tmp_path / "cut", tick=stop)
    resumed = run_experiment(config, tmp_path / "cut", resume=True)
    same = {key: value for key, value in whole.items() if key not in ("seconds", "engine_paths")}
    assert {key: resumed[key] for key in same} == same


def _round_up(rows: list[dict[str, Any]]) -> int:
    """What the first round alone moved, up and (for one_shot, whose beginning also sends θ⁰) down."""
    up = rows[1]["upload_bytes"] - rows[0]["upload_bytes"]
    before_down = rows[0]["download_bytes"] - (rows[1]["download_bytes"] - rows[0]["download_bytes"])
    return int(up - before_down)


# --- the table


def table() -> ModuleType:
    spec = util.spec_from_file_location("label_skew_table", ROOT / "examples" / "label_skew_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_has_every_algorithm_and_its_configs_are_sound() -> None:
    script = table()
    assert {*script.ROWS, "hypcluster", "oracle", "shuffled"} == set(ALGORITHMS)
    base = script.load_config(ROOT / "examples" / "label_skew_all_fmnist.toml")
    for name in script.ROWS:
        config = script.config_for(name, base, paper=True)
        assert config.algorithm["name"] == name
        assert (config.data.clients, config.training.rounds, config.training.epochs) == (100, 200, 10)


@pytest.mark.slow
@REAL
def test_the_whole_table_runs_from_one_config(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On the real images, as small as it goes: every row has both accuracies."""
    script = table()
    base = script.load_config(ROOT / "examples" / "label_skew_all_fmnist.toml")
    base = base.with_("data", clients=10, samples_per_client=20, test_samples_per_client=10).with_("training", rounds=2, epochs=1)
    monkeypatch.setattr(script, "load_config", lambda path: base)
    monkeypatch.setitem(script.HYPER, "pfedlia", {"warm_up": 0})
    monkeypatch.setitem(script.HYPER, "private_clusters", {"k": 1})
    monkeypatch.setitem(script.HYPER, "one_shot", {"k": 2, "local_epochs": 1})
    monkeypatch.setattr(sys, "argv", ["label_skew_table.py", "--data-dir", os.environ["CFLPRIV_DATA"]])
    script.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == script.ROWS
    for line in lines[1:]:
        shared, _, local, _ = line.split()[1:5]
        assert 0 <= float(shared) <= 100
        assert 0 <= float(local) <= 100


@REAL
@pytest.mark.slow
def test_scaffold_beats_fedavg_under_client_drift_on_fashion_mnist() -> None:
    """20 % label skew, a linear model, 20 full-batch steps a round, everybody takes part: mean over clients of the served model."""
    accuracy = {}
    for name in ("scaffold", "fedavg"):
        config = parse_config({
            "data": {
                "source": "fashion_mnist", "partition": "label_skew", "skew_percent": 20, "clients": 10, "samples_per_client": 100,
                "test_samples_per_client": 100,
            },
            "model": {"name": "linear"},
            "training": {"rounds": 40, "epochs": 20, "batch_size": 0, "lr": 0.05, "weights": "equal"},
            "algorithm": {"name": name},
            "run": {"evaluate_every": 40},
        })  # fmt: skip
        simulation = start(config, os.environ["CFLPRIV_DATA"])
        for _ in range(40):
            advance(simulation)
        accuracy[name] = finish(simulation)["accuracy_mean_last_rounds"]
    assert accuracy["scaffold"] > accuracy["fedavg"]
