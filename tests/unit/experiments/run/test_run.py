"""Configs, runs and the command line, as a user meets them: results, reproducibility, and one clear line for every mistake."""

import json
import os
import pickle
import signal
import subprocess
import sys
import tomllib
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkout import ROOT
from command_line import forked, in_process
from safetensors.numpy import load_file
from scenes import population
from small_runs import configured

from cflpriv.algorithms import ALGORITHMS
from cflpriv.attacks.evidence.updates import public_model
from cflpriv.attacks.figures.leakage import prior_of
from cflpriv.cli import main
from cflpriv.contract.handles import Held
from cflpriv.data import build_population
from cflpriv.engine import Streams, TaskInput
from cflpriv.errors import InputError
from cflpriv.experiments import Config, Experiment, load_config, parse_config, run_experiment, start
from cflpriv.experiments.run.run import admit, advance, begin, estimate_record_bytes, finish
from cflpriv.tasks.training import Gradient

EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))

SMALL: dict[str, Any] = {
    "data": {"clients": 8, "rotations": [0, 90], "test_samples_per_client": 30},
    "model": {"name": "mlp", "hidden": 8},
    "training": {"rounds": 2, "lr": 0.1, "weights": "equal", "participation": 0.5, "batch_size": 60},
    "algorithm": {"name": "pacfl"},
    "run": {"insecure_test_entropy": True, "record": "full"},
}
small_config = partial(configured, SMALL)


HAAR = {"gram": ["haar"], "sum": "haar"}


def command(*arguments: str, cwd: Path = ROOT, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "cflpriv.cli", *arguments], capture_output=True, text=True, cwd=cwd, **options)


# --- configs


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_load_and_survive_a_round_trip(path: Path) -> None:
    config = load_config(path)
    assert parse_config(tomllib.loads(config.to_toml())) == config


def test_the_defaults_survive_a_round_trip() -> None:
    assert parse_config(tomllib.loads(Config().to_toml())) == Config()
    odd = parse_config({"algorithm": {"beta": float("inf")}, "data": {"partition": "pathological", "groups": [[0, 1], [2]]}})
    assert parse_config(tomllib.loads(odd.to_toml())) == odd


@pytest.mark.parametrize(("name", "own"), [("ifca", "equal"), ("fesem", "equal"), ("scaffold", "equal"), ("fedavg", "examples")])
def test_weights_that_are_not_given_are_the_algorithms_own(name: str, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what the algorithm is made with, in what every reader of the key sees, and in what is refused under protections."""
    seen: dict[str, Any] = {}
    make = ALGORITHMS[name].make

    @wraps(make)
    def spy(train: Any, **options: Any) -> Any:
        seen.update(options)
        return make(train, **options)

    monkeypatch.setitem(ALGORITHMS, name, replace(ALGORITHMS[name], make=spy))
    scene = population()
    for given, expected in (({}, own), ({"weights": "own"}, own), ({"weights": "examples"}, "examples"), ({"weights": "equal"}, "equal")):
        config = parse_config({"data": {"clients": 8}, "algorithm": {"name": name}, "training": given})
        assert config.training.weights == expected
        assert tomllib.loads(config.to_toml())["training"]["weights"] == expected
        assert parse_config(tomllib.loads(config.to_toml())) == config
        config.algorithm_for(scene)
        assert seen["weights"] == expected
    hidden: dict[str, Any] = {"algorithm": {"name": name}, "protection": {"sum": "secagg"}}
    if own == "equal":
        assert parse_config(hidden).training.weights == "equal"
    else:
        with pytest.raises(InputError, match=r"training\.weights = 'examples'.*set it to 'equal'"):
            parse_config(hidden)
    with pytest.raises(InputError, match=r"training\.weights = 'examples'.*set it to 'equal'"):
        parse_config({**hidden, "training": {"weights": "examples"}})


def test_weights_follow_the_algorithm_where_they_are_its_own_and_stay_where_they_are_given() -> None:
    for given, expected in (({}, "equal"), ({"weights": "own"}, "equal"), ({"weights": "examples"}, "examples")):
        config = parse_config({"data": {"clients": 8}, "algorithm": {"name": "fedavg"}, "training": given})
        assert config.training.weights == "examples"
        config = config.with_("training", rounds=3).with_("data", clients=9)
        for other in (config.with_("algorithm", name="ifca", k=2), replace(config, algorithm={"name": "ifca", "k": 2})):
            assert other.training.weights == expected
            assert tomllib.loads(other.to_toml())["training"]["weights"] == expected
            assert pickle.loads(pickle.dumps(other)).with_("algorithm", name="fedavg").training.weights == "examples"
        assert config.with_("training", weights="examples").with_("algorithm", name="ifca").training.weights == "examples"
        assert config.with_("algorithm", name="ifca").with_("training", weights="own").training.weights == "equal"


def test_a_configuration_of_ifcas_gradient_averaging_is_line_13_whatever_clients_have() -> None:
    """Alg. 2, l. 13 for one cluster: θ − (γ / |S_t|) Σ g_i, though one of four clients has eight times the samples."""
    config = parse_config({
        "data": {"clients": 4, "rotations": [0], "samples_per_client": 40}, "model": {"name": "linear", "dtype": "float64"},
        "training": {"rounds": 1, "batch_size": 0, "lr": 0.1}, "algorithm": {"name": "ifca", "k": 1, "averaging": "gradient"},
    })  # fmt: skip
    scene = build_population(config.data)
    kept = zip(scene.clients, (40, 5, 5, 5), strict=True)
    scene = replace(scene, clients=tuple(replace(one, x_train=one.x_train[:n], y_train=one.y_train[:n]) for one, n in kept))
    simulation = start(config, population=scene)
    before = simulation.simulated.peek(0, simulation.state.restarts[0].models[0])
    advance(simulation)
    task = Gradient(config.model_for(scene))
    given = [TaskInput(one, {"model": before}, {}, Streams(0, 0, one.id)) for one in scene.clients]
    expected = before - 0.1 * np.mean([np.asarray(task.run(one)["gradient"]) for one in given], axis=0)
    np.testing.assert_allclose(simulation.simulated.peek(0, simulation.state.restarts[0].models[0]), expected, rtol=0, atol=1e-12)


def test_set_changes_keys(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("[training]\nrounds = 3\n", encoding="utf-8")
    config = load_config(path, ["training.rounds=5", "algorithm.name=fedavg", 'protection.gram=["haar"]', "algorithm.name = local"])
    assert config.training.rounds == 5
    assert config.algorithm["name"] == "local"
    assert config.protection.gram == ("haar",)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"datas": {}}, r"\[datas\] is not a section; did you mean 'data'"),
        ({"data": 3}, r"data = 3: write it as a section"),
        ({"data": {"clint": 3}}, r"\[data\] clint = 3: .* did you mean 'clients'"),
        ({"data": {"clients": "ten"}}, r"\[data\] clients = 'ten'"),
        ({"data": {"clients": 2.5}}, r"\[data\] clients = 2.5"),
        ({"data": {"clients": True}}, r"\[data\] clients = True"),
        ({"training": {"rounds": -1}}, r"training\.rounds = -1"),
        ({"training": {"participation": 0}}, r"participation"),
        ({"training": {"sampling": "some"}}, r"'some'"),
        ({"training": {"weights": "none"}}, r"training\.weights = 'none'"),
        ({"algorithm": {"name": "pacf"}}, r"'pacf': .* did you mean 'pacfl'"),
        ({"protection": {"gather": "none"}}, r"\[protection\] gather = 'none': was removed: values that are gathered are released as they"),
        ({"algorithm": {"name": "fednova", "p": 3}}, r"\[algorithm\] p = 3: is not a key here; there are none"),
        ({"algorithm": {"name": ["pacfl"]}}, r"name = \['pacfl'\]"),
        ({"protection": {"gram": "haar"}}, r"gram = 'haar': expected a list, in brackets"),
        ({"algorithm": {"p": "three"}}, r"\[algorithm\] p = 'three'"),
        ({"algorithm": {"measure": "euclid"}}, r"\[algorithm\] measure = 'euclid'"),
        ({"protection": {"sum": "hadamard"}}, r"'hadamard'"),
        ({"protection": {"small_clusters": "drop"}}, r"small_clusters = 'drop'"),
        ({"protection": {"sum": "haar"}}, r"training\.weights = 'examples'"),
        ({"run": {"record": "all"}}, r"\[run\] record = 'all'"),
        ({"model": {"hidden": 0}}, r"model\.hidden = 0"),
        ({"model": {"init_scale": -1.0}}, r"model\.init_scale = -1\.0: expected a finite number ≥ 0"),
        ({"model": {"init_scale": float("nan")}}, r"model\.init_scale = nan"),
        ({"model": {"init_scale": 0.0}}, r"model\.init_scale = 0 with model\.name = 'mlp'"),
    ],
)
def test_mistakes_name_file_key_and_value(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        parse_config(tree, "my.toml")
    assert str(caught.value).startswith("my.toml: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"algorithm": {"p": 0}}, "algorithm.p"),
        ({"algorithm": {"k": 9}}, "k = 9"),
        ({"algorithm": {"p": 60}}, "client 0: .* p = 60"),
        ({"training": {"lr": -1.0}}, "training.lr"),
        ({"model": {"name": "lenet5"}}, "lenet5"),
        ({"model": {"name": "resnet"}}, "resnet"),
        ({"data": {"newcomers": 8}}, "newcomers = 8"),
        ({"data": {"newcomers": 9}}, "newcomers = 9: leaves no client"),
        ({"data": {"newcomers": 15}}, "newcomers = 15: leaves no client"),
        ({"data": {"source": "mnist"}}, "mnist"),
        ({"run": {"audit_parties": ["client:70"]}}, "client:70"),
        ({"algorithm": {"name": "ifca", "k": 2}, "protection": {"small_clusters": "merge"}}, "merge"),
        ({"algorithm": {"name": "oracle"}, "data": {"newcomers": 1}}, "newcomers = 1"),
        ({"training": {"lr": float("inf")}}, "training.lr"),
        ({"training": {"weight_decay": float("nan")}}, "weight_decay"),
        ({"protection": {"sum": "haar"}, "model": {"hidden": 500}}, "up to 8192 parameters"),
        ({"protection": {"min_cohort": 9}}, "min_cohort = 9: there are only 8"),
        ({"run": {"record": "attackable", "record_rounds": [77]}}, "77 is not one of them"),
        ({"run": {"record": "attackable", "record_clients": [8]}}, "8 is not one of them"),
        ({"algorithm": {"labels_at_most": 0}}, "labels_at_most"),
        ({"algorithm": {"variant": "authors", "measure": "corresponding_angles"}}, "padding of per-label"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(sections: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        run_experiment(small_config(**sections), tmp_path / "run", data_dir=tmp_path / "nothing here")
    assert list(tmp_path.iterdir()) == []


# --- runs


@pytest.mark.slow
@pytest.mark.parametrize("protection", [{}, HAAR], ids=["none", "haar"])
def test_the_same_config_and_seed_give_the_same_files(protection: dict[str, Any], tmp_path: Path) -> None:
    scene = build_population(small_config().data)
    summaries, checkpoints = [], []
    for number, clients in enumerate((scene.clients, scene.clients[::-1])):
        groups = scene.groups if number == 0 else scene.groups[::-1]
        run_experiment(
            small_config(protection=protection), tmp_path / str(number), population=replace(scene, clients=clients, groups=groups)
        )
        summary = json.loads((tmp_path / str(number) / "summary.json").read_text(encoding="utf-8"))
        del summary["seconds"]
        summaries.append(summary)
        checkpoints.append([(path.name, path.read_bytes()) for path in sorted((tmp_path / str(number) / "checkpoints").iterdir())])
    assert summaries[0] == summaries[1]
    assert checkpoints[0] == checkpoints[1]


@pytest.mark.slow
def test_runs_with_and_without_protection_draw_the_same() -> None:
    pairs = []
    for protection in ({}, HAAR):
        simulation = start(small_config(protection=protection, model={"dtype": "float64"}))
        rows = [advance(simulation) for _ in range(2)]
        pairs.append(([row["cohort"] for row in rows], rows[-1]["accuracy_mean"]))
    assert pairs[0][0] == pairs[1][0]
    assert pairs[0][1] == pairs[1][1]


@pytest.mark.parametrize(
    ("algorithm", "protection", "words"),
    [
        (
            "fedavg",
            {"min_cohort": 3},
            r"client \d refuses \(sum, 'forbidden'\): .* min_cohort = 3 keeps updates from leaving in the clear: use",
        ),
        ("stocfl", {"sum": "secagg"}, r"gram = \[\]: what 'stocfl' compares would be seen in the clear, .* refuse under protection\.sum"),
    ],
)
def test_what_deployed_clients_refuse_is_refused_in_one_line_unless_the_policy_is_off(
    algorithm: str, protection: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = small_config(algorithm={"name": algorithm}, protection=protection)
    with pytest.raises(InputError, match=words) as caught:
        run_experiment(config, tmp_path / "strict")
    assert "\n" not in str(caught.value)
    lines: dict[str, list[str]] = {"off": [], "strict": []}
    summary = run_experiment(config.with_("run", release_policy="off"), tmp_path / "off", report=lines["off"].append)
    assert (summary["release_policy"], summary["rounds_skipped"]) == ("off", 0)
    assert 'release_policy = "off"' in (tmp_path / "off" / "config.toml").read_text(encoding="utf-8")
    assert [line for line in lines["off"] if "release_policy" in line] == [
        "note: run.release_policy = 'off': clients release what deployed clients may refuse"
    ]
    open_ = run_experiment(small_config(algorithm={"name": "fedavg"}), tmp_path / "open", report=lines["strict"].append)
    assert open_["release_policy"] == "strict"
    assert not any("release_policy" in line for line in lines["strict"])


@pytest.mark.parametrize(
    ("key", "words"),
    [("floor = 3", "is called min_cohort now"), ('gather = "none"', "was removed"), ('ckks_mode = "public-key"', "was removed")],
)
def test_a_run_folder_of_another_version_is_refused_in_a_line_that_names_it(key: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"[protection]\n{key}\n", encoding="utf-8")
    with pytest.raises(InputError, match=rf"{words}[^;]*$"):
        load_config(path)
    (tmp_path / "environment.json").write_text('{"cflpriv": "0.0.9"}', encoding="utf-8")
    with pytest.raises(InputError, match=rf"{words}.*; {tmp_path} is a run of cflpriv 0\.0\.9, this is \d") as caught:
        load_config(path)
    assert "\n" not in str(caught.value)
    for damaged in ("", "[]", "{}", "not JSON"):
        (tmp_path / "environment.json").write_text(damaged, encoding="utf-8")
        with pytest.raises(InputError, match=rf"{words}[^;]*$"):
            load_config(path)


@pytest.mark.slow
def test_cryptographic_secrets_differ_between_runs() -> None:
    secure = {"insecure_test_entropy": False}
    secrets = [start(small_config(run=secure, protection=HAAR)).simulated.secrets("client:0")["group_secret"] for _ in range(2)]
    assert secrets[0] != secrets[1]
    fixed = [start(small_config(protection=HAAR)).simulated.secrets("client:0")["group_secret"] for _ in range(2)]
    assert fixed[0] == fixed[1]


def test_the_run_folder_holds_what_is_promised(tmp_path: Path) -> None:
    lines: list[str] = []
    config = small_config(protection=HAAR, run={"audit_parties": ["server", "client:1"]}, data={"newcomers": 2})
    summary = run_experiment(config, tmp_path / "run", report=lines.append)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    promised = {"config.toml", "environment.json", "rounds.jsonl", "transcript", "secrets", "summary.json", "checkpoints"}
    assert promised <= names
    assert not [name for name in names if name.endswith(".part")]
    assert load_config(tmp_path / "run" / "config.toml") == config
    for key in (
        "algorithm", "dataset", "protection", "accuracy_mean", "accuracy_std", "accuracy_worst", "local_accuracy_mean",
        "local_accuracy_std",
        "local_accuracy_worst", "ari", "clusters", "rounds", "upload_bytes", "download_bytes", "seconds", "epsilon", "delta",
    ):  # fmt: skip
        assert key in summary
    assert summary["newcomers"]["clients"] == [6, 7]
    assert summary["newcomers"]["newcomer_accuracy_mean"] is not None
    assert [path.name for path in (tmp_path / "run" / "secrets").iterdir()] == ["client_1.json"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["round"] for row in rows] == [0, 1]
    assert rows[-1]["accuracy_mean"] == summary["accuracy_mean"]
    evidence = np.load(tmp_path / "run" / "evidence.npz", allow_pickle=False)
    assert evidence["distance"].shape == (6, 6)
    arrays = load_file(tmp_path / "run" / "checkpoints" / "final.safetensors")
    assert all(np.isfinite(array).all() for array in arrays.values())
    assert any("recording payloads" in line for line in lines)


@pytest.mark.parametrize("gram", [[], ["haar"], ["ckks"]], ids="+".join)
def test_the_estimate_of_a_record_counts_what_is_compared(gram: list[str]) -> None:
    if "ckks" in gram:
        pytest.importorskip("tenseal", reason="TenSEAL is not installed: CKKS needs it")
    config = small_config(protection={"gram": gram}, run={"record": "full"}, data={"newcomers": 0}, training={"rounds": 0})
    simulation = start(config)
    said = sum(message.total_bytes for message in simulation.federation.transcript.messages if message.operation == "gram")
    assert 0.5 < estimate_record_bytes(config, simulation.population) / said < 1.5
    assert estimate_record_bytes(config.with_("run", record="headers"), simulation.population) == 0
    fedavg = small_config(algorithm={"name": "fedavg"}, run={"record": "full"}, training={"rounds": 0})
    assert estimate_record_bytes(fedavg, simulation.population) == 0, "it compares nothing"


def test_accuracy_is_that_of_each_clients_own_model() -> None:
    simulation = start(small_config(algorithm={"name": "local"}))
    advance(simulation)
    row = advance(simulation)
    served, own = row["per_client"]["accuracy"], row["per_client"]["local_accuracy"]
    trained = [i for i, value in enumerate(own) if value is not None]
    assert trained
    for i in trained:  # a local client's served model is its last trained one
        assert served[i] == own[i]
    assert finish(simulation)["ari"] is None


@pytest.mark.parametrize("normalise", [True, False])
def test_pixels_go_in_normalised_or_as_they_are(normalise: bool) -> None:
    config = small_config(model={"normalise": normalise, "dtype": "float64"}, algorithm={"name": "fedavg"})
    digits = replace(build_population(config.data), mean=(0.25,), std=(0.5,))
    by_hand = replace(
        digits,
        clients=tuple(replace(one, x_train=(one.x_train - 0.25) / 0.5, x_test=(one.x_test - 0.25) / 0.5) for one in digits.clients),
        mean=(0.0,),
        std=(1.0,),
    )
    same = by_hand if normalise else replace(digits, mean=(7.0,))
    accuracies = [advance(start(config, population=one))["per_client"]["local_accuracy"] for one in (digits, same)]
    assert accuracies[0] == accuracies[1]
    prior = prior_of(digits, 0, config=config)
    assert public_model(prior) == config.model_for(digits)
    assert (public_model(prior).mean == digits.mean) is normalise


def test_a_round_below_the_minimum_cohort_size_changes_nothing_and_is_recorded() -> None:
    simulation = start(small_config(protection={"min_cohort": 8}))
    row = advance(simulation)
    assert "minimum cohort size of 8" in row["skipped"]
    assert finish(simulation)["rounds_skipped"] == 1
    federation, model = simulation.federation, simulation.state.models[0]
    np.testing.assert_array_equal(model.value(), simulation.state.initial.value())
    assert not [m for m in federation.transcript.messages if m.operation == "mean"]


@pytest.mark.slow
def test_newcomers_do_not_disturb_the_training() -> None:
    with_, without = start(small_config(data={"newcomers": 2})), start(small_config(data={"newcomers": 2}))
    advance(with_), advance(without)
    admit(with_)
    np.testing.assert_array_equal(with_.state.models[0].value(), without.state.models[0].value())
    assert isinstance(with_.state.groupings.held, Held)


@pytest.mark.parametrize("name", ["pacfl", "fedavg"])
def test_too_few_clients_to_agree_on_a_transform_end_the_run_at_its_start(name: str, tmp_path: Path) -> None:
    """FedAvg would skip every round for want of clients."""
    config = small_config(data={"clients": 6, "newcomers": 3}, protection=HAAR, algorithm={"name": name})
    words = r"protection haar: 3 of 6 clients are there; to agree on the secret of their transform 4 are needed \(data\.newcomers = 3"
    with pytest.raises(InputError, match=words):
        run_experiment(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert run_experiment(config.with_("data", newcomers=2), tmp_path / "run")["rounds_skipped"] == 0


@pytest.mark.slow
def test_withheld_evidence_is_recomputed_and_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def withheld(simulation: Experiment) -> None:
        begin(simulation)
        simulation.state = replace(simulation.state, evidence=None)

    run_experiment(small_config(), tmp_path / "seen")
    monkeypatch.setattr("cflpriv.experiments.run.folder.begin", withheld)
    run_experiment(small_config(), tmp_path / "withheld")
    measured = [json.loads((tmp_path / name / "measured.json").read_text(encoding="utf-8")) for name in ("seen", "withheld")]
    assert [one["evidence_source"] for one in measured] == ["server", "recomputed"]
    arrays = [np.load(tmp_path / name / "evidence.npz")["distance"] for name in ("seen", "withheld")]
    np.testing.assert_allclose(arrays[0], arrays[1], atol=1e-9)


def test_an_unevaluated_round_is_left_out() -> None:
    simulation = start(small_config(training={"rounds": 15}, run={"evaluate_every": 4}))
    rows = [advance(simulation) for _ in range(6)]
    assert [row.get("accuracy_mean") is not None for row in rows] == [True, False, False, False, True, True]


# --- the command line


@pytest.mark.slow
def test_run_list_and_errors_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    path = tmp_path / "small.toml"
    path.write_text(small_config().to_toml(), encoding="utf-8")
    done = command("run", str(path), "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "round 2/2" in done.stdout
    assert "ARI" in done.stdout
    monkeypatch.chdir(tmp_path)
    for arguments, words in [
        (["run", str(path), "--out", str(tmp_path / "run")], "output folder exists"),
        (["run", str(tmp_path / "none.toml")], "no such file"),
        (["run", str(path), "--set", "data.clint=3"], "did you mean 'clients'"),
        (["run", str(path), "--set", "nonsense"], "section.key=value"),
        (["run", str(path), "--set", "training.rounds=3\nfoo=1"], "one value"),
        (["run", str(path), "--set", "algorithm.p=60"], "small.toml: client 0"),
        (["audit", str(tmp_path / "run"), "--attacks", ""], "known are"),
        (["run", str(path), "--set", "data.source=npz", "--set", 'data.paths=["no.npz"]'], "no.npz"),
        (["audit", str(tmp_path)], "not a run folder"),
        (["report", str(tmp_path / "nowhere")], "nowhere"),
    ]:
        code, said = in_process(monkeypatch, *arguments), capsys.readouterr()
        assert code == 2, (arguments, said)
        assert words in said.err
        assert len(said.err.strip().splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"small.toml", "run"}
    assert in_process(monkeypatch, "list") == 0
    listed = capsys.readouterr().out
    for name in ("pacfl", "haar", "signature_inversion", "fashion_mnist", "pathological", "lenet5"):
        assert name in listed


def test_an_unforeseen_error_shows_no_clients_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its traceback names lines, not the values of locals: those are clients, their images and models."""

    def broken(*given: Any, **more: Any) -> None:
        clients_data = "a client's own image"
        raise RuntimeError(f"unforeseen, with {len(clients_data)} characters at hand")

    monkeypatch.setattr("cflpriv.experiments.run_experiment", broken)
    path = tmp_path / "small.toml"
    path.write_text(small_config().to_toml(), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["cflpriv", "run", str(path), "--out", str(tmp_path / "run")])
    with pytest.raises(RuntimeError, match="unforeseen") as caught:
        main()
    sys.excepthook(caught.type, caught.value, caught.tb)
    said = capsys.readouterr().err
    assert "unforeseen" in said
    assert "own image" not in said.replace('clients_data = "a client\'s own image"', "")


def test_how_many_hidden_models_are_in_use_is_not_made_up() -> None:
    """Under an oblivious sum the server does not know who chose what, so it cannot count the clusters."""
    hidden: dict[str, Any] = {
        "protection": {"sum": "secagg-oblivious"},
        "training": {"weights": "equal", "rounds": 1},
        "data": {"newcomers": 0},
    }
    for algorithm, clusters in (({"name": "ifca", "k": 2}, None), ({"name": "fedavg"}, 1)):
        simulation = start(small_config(algorithm=algorithm, **hidden))
        advance(simulation)
        summary = finish(simulation)
        assert (summary["clusters"], summary["ari"]) == (clusters, None)


def test_divergence_ends_with_one_line_and_keeps_what_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wild.toml"
    path.write_text(small_config(training={"lr": 1e30, "epochs": 20, "momentum": 0.9}).to_toml(), encoding="utf-8")
    assert in_process(monkeypatch, "run", str(path), "--out", str(tmp_path / "run")) == 1
    failed = capsys.readouterr().err
    assert "not finite" in failed
    assert len(failed.strip().splitlines()) == 1
    assert (tmp_path / "run" / "config.toml").is_file()


def test_ctrl_c_saves_what_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "long.toml"
    path.write_text(small_config(training={"rounds": 100000}).to_toml(), encoding="utf-8")
    monkeypatch.setenv("COLUMNS", "200")
    with forked("run", str(path), "--out", str(tmp_path / "run")) as (pid, out):
        for line in out:
            if line.startswith("round 3/"):
                os.kill(pid, signal.SIGINT)
                break
        rest = out.read()
        assert os.waitpid(pid, 0)[1] == 0
    assert "interrupted" in rest
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    rows = (tmp_path / "run" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    assert summary["rounds"] == len(rows) >= 3
    assert summary["rounds_planned"] == 100000
    assert (tmp_path / "run" / "checkpoints" / f"round_{len(rows):07d}.json").is_file()


# --- real data


@pytest.mark.slow
def test_fashion_mnist_groups_are_found_without_their_number() -> None:
    folder = os.environ.get("CFLPRIV_DATA")
    if not folder or not (Path(folder) / "fashion_mnist").is_dir():
        pytest.skip("CFLPRIV_DATA does not hold fashion_mnist")
    config = load_config(
        ROOT / "examples" / "pacfl_fmnist.toml", ["training.rounds=1", "run.evaluate_every=1000", "data.test_samples_per_client=20"]
    )
    simulation = start(config, folder)
    summary = finish(simulation)
    assert (summary["ari"], summary["clusters"], summary["clear_structure"]) == (1.0, 5, True)


def test_the_published_label_skew_setting_is_the_examples() -> None:
    config = load_config(ROOT / "examples" / "pacfl_label_skew_fmnist.toml")
    t = config.training
    assert (config.data.clients, config.data.skew_percent, config.data.partition) == (100, 20.0, "label_skew")
    assert (t.participation, t.lr, t.momentum, t.rounds, t.epochs, t.batch_size) == (0.1, 0.01, 0.5, 200, 10, 10)
