"""Exported models: a module of one's own with the file's weights does what the run reported."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from command_line import in_process
from safetensors.torch import load_file
from torch import nn

from cflpriv import ClientData, Population, build_population
from cflpriv.data import DataSpec
from cflpriv.data.scattering import features
from cflpriv.errors import InputError
from cflpriv.experiments import parse_config, run_experiment
from cflpriv.experiments.config.config import Config
from cflpriv.experiments.digests import digest_of
from cflpriv.experiments.run import export
from cflpriv.experiments.run.export import export_model, exported_model

BASE: dict[str, Any] = {
    "data": {"clients": 6, "rotations": [0, 90], "test_samples_per_client": 40},
    "model": {"hidden": 8},
    "training": {"rounds": 3, "lr": 0.3, "weights": "equal", "batch_size": 60},
    "run": {"insecure_test_entropy": True},
}


def module() -> nn.Module:
    """What a user has: the architecture, written anew."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))


def accuracies(config: Config, state: dict[str, torch.Tensor]) -> list[float]:
    """Of a fresh module on each client's test data."""
    mine, population = module(), build_population(config.data)
    mine.load_state_dict(state)
    found = []
    for one in population.clients:
        x = (torch.from_numpy(one.x_test).float() - population.mean[0]) / population.std[0]
        found.append(float((mine(x).argmax(1).numpy() == one.y_test).mean()))
    return found


HAAR = {"gram": ["haar"], "sum": "haar"}


@pytest.mark.parametrize(
    ("name", "protection", "several"),
    [("oracle", {}, True), ("pacfl", HAAR, False), ("ifca", {}, False), ("fedavg", {}, False)],
)
def test_a_fresh_module_has_the_reported_accuracy(name: str, protection: dict[str, Any], several: bool, tmp_path: Path) -> None:
    config = parse_config({**BASE, "algorithm": {"name": name}, "protection": protection})
    summary = run_experiment(config, tmp_path / "run")
    row = json.loads((tmp_path / "run" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    labels, models = row["labels"] or [0] * 6, {}
    count, digest = max(labels) + 1, digest_of(tmp_path / "run")
    assert count > 1 or not several
    for cluster in range(count):
        files = [tmp_path / f"{cluster}.safetensors", tmp_path / f"{cluster}.pt"]
        for file in files:
            export_model(tmp_path / "run", file, cluster=None if count == 1 else cluster)
        models[cluster] = load_file(files[0])
        packed = torch.load(files[1], weights_only=True)
        assert all(torch.equal(models[cluster][key], packed[key]) for key in packed)
    each = {cluster: accuracies(config, state) for cluster, state in models.items()}
    by_client = [each[label][place] for place, label in enumerate(labels)]
    assert by_client == pytest.approx(row["per_client"]["accuracy"], abs=1e-9)
    assert np.mean(by_client) == pytest.approx(summary["accuracy_mean"], abs=1e-9)
    export_model(tmp_path / "run", tmp_path / "own.pt", client=4)
    own = accuracies(config, torch.load(tmp_path / "own.pt", weights_only=True))
    assert digest_of(tmp_path / "run") == digest
    assert own[4] == pytest.approx(row["per_client"]["local_accuracy"][4], abs=1e-9)


@pytest.mark.parametrize(
    "algorithm", [{"name": "fedrc"}, {"name": "ifca", "k": 2, "shared": ["all_but_last"]}, {"name": "r_dpcfl", "k": 2}]
)
def test_models_that_clients_pick_from_are_whole(algorithm: dict[str, Any], tmp_path: Path) -> None:
    """They are sent in one vector, in parts, or one to a client; each client's accuracy is that of some exported model."""
    config = parse_config({**BASE, "algorithm": algorithm})
    summary, k = run_experiment(config, tmp_path / "run"), algorithm.get("k", 3)
    row = json.loads((tmp_path / "run" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert summary["clusters"] is None or algorithm["name"] != "fedrc", "which models are in use is not known"
    each = []
    for cluster in range(k):
        export_model(tmp_path / "run", tmp_path / f"{cluster}.pt", cluster=cluster)
        each.append(accuracies(config, torch.load(tmp_path / f"{cluster}.pt", weights_only=True)))
    assert np.isclose(np.array(each), row["per_client"]["accuracy"], atol=1e-9).any(axis=0).all()
    with pytest.raises(InputError, match=f"there are several; known are {', '.join(map(str, range(k)))}$"):
        export_model(tmp_path / "run", tmp_path / "one.pt")


@pytest.mark.parametrize("name", ["local", "fedfomo", "fedproto", "lg_fedavg"])
def test_no_client_stands_for_others(name: str, tmp_path: Path) -> None:
    run_experiment(parse_config({**BASE, "algorithm": {"name": name}, "training": {**BASE["training"], "rounds": 1}}), tmp_path / "run")
    with pytest.raises(InputError, match=f"under '{name}' every client has a model of its own; --client N"):
        export_model(tmp_path / "run", tmp_path / "one.pt")
    assert export_model(tmp_path / "run", tmp_path / "one.pt", client=4).name == "client 4"


@pytest.mark.parametrize(("algorithm", "alone"), [({"name": "oracle"}, 1), ({"name": "ifca", "k": 2}, 0)])
def test_a_cluster_whose_members_trained_alone_has_no_model(algorithm: dict[str, Any], alone: int, tmp_path: Path) -> None:
    protection = {"sum": "secagg", "min_cohort": 3, "small_clusters": "local"}
    changes = {"algorithm": algorithm, "protection": protection, "data": {**BASE["data"], "clients": 5}}
    run_experiment(parse_config({**BASE, **changes, "training": {**BASE["training"], "rounds": 1}}), tmp_path / "run")
    with pytest.raises(InputError, match=f"--model {alone}: each client of this cluster has a model of its own; --client N"):
        export_model(tmp_path / "run", tmp_path / "one.pt", cluster=alone)
    assert export_model(tmp_path / "run", tmp_path / "one.pt", cluster=1 - alone).name == f"cluster {1 - alone}"


def test_what_cannot_be_exported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_config({**BASE, "algorithm": {"name": "oracle"}, "training": {**BASE["training"], "rounds": 0}})
    run_experiment(config, tmp_path / "run")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    for run, out, more, words in [
        ("run", "a.onnx", {}, "--out .*a.onnx: expected a file that ends in .safetensors or .pt"),
        ("run", "a.pt", {}, "--model: there are several; known are 0, 1"),
        ("run", "a.pt", {"cluster": 2}, "--model 2: there is no such cluster; known are 0, 1"),
        ("run", "a.pt", {"client": 9}, "--client 9: is not one of the run; known are 0, 1, 2"),
        ("run", "a.pt", {"client": 1}, "--client 1: has not trained"),
        ("run", "a.pt", {"client": 1, "cluster": 0}, "give one of them"),
        ("run", "no/a.pt", {"cluster": 0}, "no/a.pt: cannot be written"),
        ("none", "a.pt", {"cluster": 0}, "none: is not a run folder"),
    ]:
        with pytest.raises(InputError, match=words) as caught:
            export_model(tmp_path / run, tmp_path / out, **more)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    assert in_process(monkeypatch, "export", str(tmp_path / "run"), "--model", "1", "--out", str(tmp_path / "b.pt")) == 0
    assert "cluster 1: mlp, input 1 x 8 x 8 as (x - [" in capsys.readouterr().out
    assert (tmp_path / "b.pt").is_file()


@pytest.mark.parametrize("name", ["fedavg", "oracle"])
def test_a_run_of_a_population_is_exported_with_it_and_refused_without(name: str, tmp_path: Path) -> None:
    config, draws = parse_config({**BASE, "algorithm": {"name": name}}), np.random.default_rng(0)
    clients = tuple(
        ClientData(i, draws.random((12, 1, 8, 8), np.float32), np.arange(12) % 2, draws.random((4, 1, 8, 8), np.float32), np.arange(4) % 2)
        for i in range(9)  # more than the configuration names
    )
    people = Population("own", clients, (0,) * 9, 2)
    run_experiment(config, tmp_path / "run", population=people)
    exported = export_model(tmp_path / "run", tmp_path / "m.pt", cluster=0, population=people)
    assert exported.state.keys() == torch.load(tmp_path / "m.pt", weights_only=True).keys()
    for again in (lambda: export_model(tmp_path / "run", tmp_path / "m.pt"), lambda: run_experiment(config, tmp_path / "run", resume=True)):
        (tmp_path / "run" / "summary.json").unlink(missing_ok=True)  # else the run is done
        with pytest.raises(InputError, match=r"other data than are found now; .*the same population"):
            again()


@pytest.mark.slow
def test_a_model_of_features_names_the_map_that_makes_its_input_of_images(tmp_path: Path) -> None:
    """Images by the named map through the exported weights have the accuracy of the run."""
    config = parse_config(
        {
            "data": {"source": "digits", "clients": 4},
            "training": {"recipe": "private", "rounds": 2, "weights": "equal"},
            "algorithm": {"name": "fedavg"},
            "privacy": {"unit": "sample", "epsilon": 8.0, "delta": 1e-5, "samples": 350},
        }
    )
    run_experiment(config, tmp_path / "run")
    exported = export_model(tmp_path / "run", tmp_path / "model.safetensors")
    assert "made of images by cflpriv.data.scattering.features" in exported.line
    images = build_population(DataSpec("digits", clients=4))
    weight, bias = (exported.state[name].numpy() for name in ("1.weight", "1.bias"))
    shares = []
    for client in images.clients:
        x = (features(client.x_test).reshape(len(client.y_test), -1) - exported.model.mean[0]) / exported.model.std[0]
        shares.append(float(np.mean((x @ weight.T + bias).argmax(1) == client.y_test)))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert np.mean(shares) == pytest.approx(summary["accuracy_mean"], abs=0.01)


def test_all_that_a_prediction_lacks_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_experiment(parse_config({**BASE, "algorithm": {"name": "oracle"}, "training": {**BASE["training"], "rounds": 0}}), tmp_path / "run")
    standardising = SimpleNamespace(scaling=SimpleNamespace(per_client=True), mean=())
    monkeypatch.setattr(export, "pipeline_of", lambda *whose: standardising)
    with pytest.raises(InputError, match="--model: there are several; known are 0, 1; and --own: the model takes features"):
        exported_model(tmp_path / "run", own=False)
    with pytest.raises(InputError, match=r"^--own: "):
        exported_model(tmp_path / "run", cluster=1, own=False)
    assert exported_model(tmp_path / "run", cluster=1).name == "cluster 1"
