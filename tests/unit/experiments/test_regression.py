"""Runs whose labels are numbers: every algorithm, protections, privacy, the ways of the engine, the command's files, and audits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cflpriv.algorithms import ALGORITHMS
from cflpriv.engine import Engine, Streams, TaskInput
from cflpriv.engine.models import Model
from cflpriv.errors import InputError
from cflpriv.experiments import Config, advance, finish, parse_config, start
from cflpriv.experiments.report.report import write_report
from cflpriv.experiments.run.folder import run_experiment
from cflpriv.experiments.run.verify import verify
from cflpriv.tasks.evaluation import Evaluate
from cflpriv.tasks.training import Train
from cflpriv.types import Array, ClientData, Population

REFUSED = ("fedproto", "fedrc")
SPREAD = 50.0
"""What 1 of the model's numbers stands for in the label's unit."""


TREE: dict[str, Any] = {
    "data": {"source": "npz", "paths": ["made.npz"], "label_type": "number", "label_range": [0, 2 * SPREAD], "clients": 6},
    "model": {"name": "linear"}, "training": {"rounds": 2, "epochs": 2, "lr": 0.2, "weights": "equal"}, "algorithm": {"name": "fedavg"},
}  # fmt: skip


def sloped_clients(clients: int = 6, samples: int = 60, noise: float = 0.02) -> Population:
    """Two groups with opposite slopes."""
    rng, made = np.random.default_rng(0), []
    for i in range(clients):
        x = rng.random((samples + 20, 1, 1, 4)).astype(np.float32)
        slopes = np.array([1.2, -0.8, 0.5, 0.0]) * (1 if i % 2 else -1)
        y = np.clip((x[:, 0, 0] - 0.5) @ slopes + noise * rng.normal(size=len(x)), -1, 1)
        made.append(ClientData(i, x[:samples], y[:samples], x[samples:], y[samples:]))
    return Population("made", tuple(made), tuple(i % 2 for i in range(clients)), 1, (0.5,), (0.3,), label_range=(0.0, 2 * SPREAD))


def config(algorithm: str = "fedavg", **sections: dict[str, Any]) -> Config:
    keys = {"k": 2} if algorithm in ("ifca", "hypcluster", "fesem", "fedsoft") else {}
    tree = {**TREE, "algorithm": {"name": algorithm, **keys}}
    return parse_config({name: {**tree.get(name, {}), **sections.get(name, {})} for name in {*tree, *sections}})


def summary_of(settings: Config, population: Population | None = None) -> dict[str, Any]:
    run = start(settings, population=population or sloped_clients())
    for _ in range(settings.training.rounds):
        assert advance(run)["skipped"] is None
    return finish(run)


@pytest.mark.filterwarnings("ignore:.*will form no clusters")
@pytest.mark.parametrize("algorithm", ALGORITHMS.names())
def test_every_algorithm_trains_on_numbers_or_says_why_not(algorithm: str) -> None:
    if algorithm in REFUSED:
        with pytest.raises(InputError, match="label_type = 'number'"):
            config(algorithm)
        return
    summary = summary_of(config(algorithm))
    assert np.isfinite([summary["r2"], summary["error_mean"], summary["constant_error"]]).all()
    assert summary["accuracy_mean"] is None


@pytest.mark.parametrize(
    "protection",
    [{}, {"sum": "haar", "gram": ["haar"]}, {"sum": "secagg", "gram": ["haar"]}, {"sum": "secagg-oblivious", "gram": ["ckks"]}],
    ids=str,
)
def test_protections_do_not_change_what_is_learned(protection: dict[str, Any]) -> None:
    algorithm = "ifca" if protection.get("sum") == "secagg-oblivious" else "oracle"
    sections: dict[str, Any] = {"training": {"rounds": 5}, "model": {"name": "mlp", "hidden": 8}}
    plain, protected = summary_of(config(algorithm, **sections)), summary_of(config(algorithm, **sections, protection=protection))
    assert protected["r2"] == pytest.approx(plain["r2"], abs=1e-2)


@pytest.mark.slow
def test_groups_with_other_slopes_need_clusters() -> None:
    """The true function is linear, so a right model has an error near the noise, .02 of the range's half."""
    population = sloped_clients(clients=12, samples=100)
    settings = (config(name, data={"clients": 12}, training={"rounds": 60}) for name in ("fedavg", "crossfit"))
    shared, clustered = (summary_of(setting, population) for setting in settings)
    assert (clustered["clusters"], clustered["ari"]) == (2, 1.0)
    assert clustered["r2"] > 0.95
    assert clustered["root_mean_square_error"] < 2 * 0.02 * SPREAD
    assert shared["r2"] < 0.2
    assert set(clustered["numbers"]["clusters"]) == {"0", "1"}
    assert not any("variance" in line for line in clustered["warnings"])
    assert any("variance" in line for line in shared["warnings"])


@pytest.mark.parametrize("error", ["squared", "absolute"])
def test_scores_are_those_of_plain_torch(error: str) -> None:
    settings = config("oracle", model={"error": error}, training={"rounds": 3, "batch_size": 0})
    run = start(settings, population=sloped_clients())
    for _ in range(3):
        row = advance(run)
    served = run.algorithm.serve(run.state)
    model, errors, squares, labels = run.config.model_for(run.population), [], [], []
    for client in run.population.clients:
        models: Any = served.params["model"]
        vector = run.simulated.peek(client.id, models[served.which[client.id]])  # type: ignore[index]
        made = model.load(np.asarray(vector))(model.inputs(client.x_test))[:, 0].detach().double().numpy()
        off = client.y_test - made
        errors.append(np.sqrt((off**2).mean()) if error == "squared" else np.abs(off).mean())
        squares.append(off**2)
        labels.append(client.y_test)
    whole = np.concatenate(labels)
    assert row["per_client"]["error"] == pytest.approx([SPREAD * value for value in errors], rel=1e-5)
    assert row["r2"] == pytest.approx(1 - np.concatenate(squares).sum() / ((whole - whole.mean()) ** 2).sum(), rel=1e-5)
    assert row["error_worst"] == max(row["per_client"]["error"])


def own_step(model: Model, data: ClientData, lr: float) -> Array:
    """One step on all samples by torch itself."""
    module = model.load(model.init(0), training=True)
    output = module(model.inputs(data.x_train))[:, 0]
    target = torch.from_numpy(data.y_train).to(output.dtype)
    loss = (output - target).square().mean() if model.loss == "squared" else (output - target).abs().mean()
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    return -lr * np.concatenate([gradient.numpy().ravel() for gradient in gradients])


@pytest.mark.parametrize("loss", ["squared", "absolute"])
@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_all_ways_of_the_engine_take_the_step_of_torch(name: str, loss: Any) -> None:
    model, clients = Model(name, (1, 1, 4), 1, hidden=7, loss=loss), sloped_clients().clients
    train = Train(model, epochs=1, batch_size=0, lr=0.3)
    for mode in ("auto", "sequential"):
        inputs = [TaskInput(client, {"model": model.init(0)}, {}, Streams(0, 0, client.id)) for client in clients]
        for client, result in zip(clients, Engine(mode).run(train, inputs), strict=True):
            assert np.asarray(result["update"]) == pytest.approx(own_step(model, client, 0.3), rel=1e-4, abs=1e-6)


def test_a_client_without_test_samples_has_no_error() -> None:
    model, client = Model("linear", (1, 1, 4), 1, loss="squared"), sloped_clients().clients[0]
    empty = ClientData(0, client.x_train, client.y_train, client.x_test[:0], client.y_test[:0])
    result = Evaluate(model).run(TaskInput(empty, {"model": model.init(0)}, {}, Streams(0, 0, 0)))
    assert float(result["count"]) == 0
    assert set(result) == set(Evaluate(model).parts)


@pytest.mark.slow
def test_private_training_with_the_rules_values_learns() -> None:
    privacy = {"unit": "sample", "epsilon": 8.0, "delta": 1e-5, "samples": 200}
    plain = {**TREE, "data": {**TREE["data"], "clients": 20}, "training": {"weights": "equal"}, "privacy": privacy}
    summary = summary_of(parse_config({**plain, "algorithm": {"name": "oracle"}}), sloped_clients(clients=20, samples=200))
    assert summary["r2"] > 0.8
    assert summary["epsilon"] <= 8.0


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"run": {"metrics": ["anything"]}}, "run.metrics"),
        ({"run": {"target_accuracy": 0.5}}, "run.target_accuracy"),
        ({"model": {"name": "lstm"}}, "lstm"),
        ({"algorithm": {"name": "pacfl", "variant": "authors"}}, "per_label"),
    ],
)
def test_what_has_no_meaning_for_numbers_is_refused_by_name(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_config({**TREE, **{name: {**TREE.get(name, {}), **section} for name, section in sections.items()}})


def test_keys_of_numbers_are_refused_for_classes() -> None:
    with pytest.raises(InputError, match=r"model\.error"):
        parse_config({"model": {"error": "absolute"}})
    with pytest.raises(InputError, match="outputs"):
        Model("linear", (1, 1, 4), 3, loss="squared")


def test_the_folder_its_verification_and_its_report(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_experiment(config("oracle", training={"rounds": 3}), folder, population=sloped_clients())
    assert not list(verify(folder).problems)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    page = write_report(folder).read_text(encoding="utf-8")
    assert f"{summary['r2']:.3g}" in page
    assert "Error of the mean label" in page
