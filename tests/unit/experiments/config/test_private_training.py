"""Values that sample-level private training gets where they are left out: which, when, and that they learn where the usual ones do not."""

import json
import re
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from small_runs import configured

from cflpriv.data.scattering import FEATURE_MEAN, FEATURE_STD, features
from cflpriv.engine.models import Model
from cflpriv.engine.sample_gradients import sample_gradients
from cflpriv.engine.views import as_views
from cflpriv.errors import InputError
from cflpriv.experiments import Config, advance, finish, parse_config, run_experiment, start
from cflpriv.experiments.config.private_training import DRIFT, LARGEST, LARGEST_OF_NUMBERS, PATH, DerivedFloat, derived_lr
from cflpriv.experiments.run.agreed import contract_of_config
from cflpriv.experiments.run.training_noise import CLIPPED, RATIO, training_noise
from cflpriv.types import ClientData, Loss, Population

PRIVATE: dict[str, Any] = {
    "data": {"clients": 20},
    "model": {"name": "linear", "normalise": False},
    "training": {"weights": "equal"},
    "algorithm": {"name": "fedavg"},
    "privacy": {"unit": "sample", "epsilon": 8.0, "delta": 1e-5, "samples": 100},
}
private = partial(configured, PRIVATE)


def table(scale: float = 1.0, clients: int = 20) -> Population:
    """Clients of 100 training rows, 82 % of one class, with features of about this size."""
    rng = np.random.default_rng(7)

    def rows(count: int) -> tuple[Any, Any]:
        y = (rng.random(count) > 0.82).astype(np.int64)
        return (scale * (rng.standard_normal((count, 8)) + 1.2 * y[:, None])).astype(np.float32), y

    return Population("table", tuple(ClientData(i, *rows(100), *rows(40)) for i in range(clients)), (0,) * clients, 2)


TABLE = table()


def lr_of(config: Config) -> float:
    return config.train_for(TABLE).lr


def test_values_are_set_for_sample_level_privacy_alone_and_only_where_they_are_left_out() -> None:
    training = private().training
    assert (training.rounds, training.batch_size) == (100, 0)
    assert lr_of(private()) == LARGEST
    for other in (configured({**PRIVATE, "privacy": {}}),):
        assert (other.training.rounds, other.training.batch_size, other.training.lr) == (20, 10, 0.01)
        assert other.fitted(TABLE) == (other, "")
    given = private(training={"rounds": 7, "batch_size": 20, "lr": 0.3})
    assert (given.training.rounds, given.training.batch_size, lr_of(given)) == (7, 20, 0.3)
    assert given.fitted(TABLE) == (given, "")
    assert lr_of(private(training={"optimizer": "adam"})) == 0.01, "steps of Adam do not depend on the length of gradients"


def test_the_line_names_what_was_set_and_nothing_else() -> None:
    config, line = private(training={"rounds": 40}).fitted(TABLE)
    assert "training.batch_size = 0" in line
    assert "training.lr = 8" in line
    assert "training.rounds" not in line
    assert not isinstance(config.training.lr, DerivedFloat)
    assert tomllib.loads(config.to_toml())["training"]["lr"] == LARGEST
    assert parse_config(tomllib.loads(config.to_toml())).training == config.training


def test_the_learning_rate_falls_with_steps_noise_parameters_momentum_and_clip() -> None:
    config = private()
    noise = config.noise()
    assert noise is not None

    def rate(inputs: int, clients: int, loss: Loss = "cross_entropy") -> float:
        return derived_lr(config.training, noise, Model("linear", (inputs,), 1, loss=loss), clients)

    small, large = rate(17, 20), rate(199_999, 20)
    assert small == LARGEST
    assert large == pytest.approx(DRIFT / (noise.training / (100 * np.sqrt(20)) * np.sqrt(100 * 200_000)))
    assert rate(199_999, 5) == pytest.approx(large / 2)
    assert rate(17, 20, "squared") == LARGEST_OF_NUMBERS
    assert lr_of(private(training={"momentum": 0.75})) == pytest.approx(LARGEST / 4)
    assert lr_of(private(privacy={"clip_norm": 4.0})) == pytest.approx(LARGEST / 4)
    assert lr_of(private(training={"rounds": 20, "batch_size": 10})) == pytest.approx(PATH / 200)
    assert lr_of(private(privacy={"epsilon": 0.01})) < 1


def test_shared_noise_counts_once_a_sum() -> None:
    shared = private(privacy={"noise": "shared", "epsilon": 0.1}, protection={"sum": "secagg", "min_cohort": 17})
    alone = private(privacy={"epsilon": 0.1})
    assert lr_of(alone) < lr_of(shared) <= LARGEST


def test_a_run_writes_prints_and_resumes_with_the_values(tmp_path: Path) -> None:
    config, lines = private(training={"rounds": 2}, privacy={"epsilon": 0.002}), list[str]()
    run_experiment(config, tmp_path / "run", population=TABLE, report=lines.append)
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text(encoding="utf-8"))["training"]
    assert written["lr"] == lr_of(config) < LARGEST
    assert any(line.startswith("set for private training") and f"training.lr = {written['lr']:.4g}" in line for line in lines)
    run_experiment(config, tmp_path / "run", population=TABLE, resume=True, report=lines.append)
    assert lines[-1].endswith("this run is done")


def test_a_contract_has_the_rate_of_the_run() -> None:
    config = private(data={"clients": 4}, privacy={"epsilon": 0.05})
    text = repr(contract_of_config(config))
    assert f"{config.train_for(_digits(config)).lr!r}"[:8] in text


def _digits(config: Config) -> Population:
    from cflpriv.data import build_population

    return build_population(config.data)


def test_defaults_learn_where_the_usual_values_predict_one_class_and_that_run_is_named() -> None:
    scores, people = {}, table(0.2)
    for name, training in {"rule": {}, "usual": {"lr": 0.01, "batch_size": 10, "rounds": 10}}.items():
        run = start(private(training=training, run={"evaluate_every": 50}, model={"init_scale": 0.01}), population=people)
        for _ in range(run.config.training.rounds):
            advance(run)
        scores[name] = finish(run)
    rule, usual = scores["rule"], scores["usual"]
    assert rule["balanced_accuracy"] > 0.8
    assert rule["warnings"] == []
    assert usual["balanced_accuracy"] < 0.53
    assert "majority class" in usual["warnings"][0] or "predicts class 0 for all" in usual["warnings"][0]
    assert "the noise of privacy is not the reason" in usual["warnings"][1]
    assert 0 <= usual[CLIPPED] <= 1
    assert usual[RATIO] < 0.3


def test_noise_that_swamps_the_signal_is_named() -> None:
    run = start(private(privacy={"epsilon": 0.01}, training={"rounds": 20}, run={"evaluate_every": 5}), population=TABLE)
    for _ in range(20):
        advance(run)
    summary = finish(run)
    assert summary[RATIO] > 2
    assert any("noise swamps the signal" in line for line in summary["warnings"])
    assert not any("not the reason" in line for line in summary["warnings"])


def test_figures_of_the_noise_are_of_gradients_that_are_averaged_over_views() -> None:
    """Training clips the mean over the views of a sample. The mean is shorter than the gradient of the image alone."""
    model, rng = Model("linear", (1, 8, 8), 3), np.random.default_rng(3)
    x, y, vector, views = rng.random((5, 1, 8, 8)).astype(np.float32), np.array([0, 1, 2, 0, 1]), model.init(1), ("flip", "shift")
    images = as_views(torch.from_numpy(x)[None], views)[0].numpy()
    rows = []
    for image, label in zip(images, y, strict=True):
        one = ClientData(0, image, np.full(len(image), label), x[:0], y[:0])
        rows.append(np.mean([block.double().numpy().mean(0) for block in sample_gradients(model, vector, one)], axis=0))
    kept = SimpleNamespace(kept=lambda name: (vector,))
    host = SimpleNamespace(
        client=lambda client: SimpleNamespace(values=kept), members=SimpleNamespace(data={0: ClientData(0, x, y, x[:0], y[:0])})
    )
    simulated = SimpleNamespace(each=lambda clients, call, *more: call(host, clients, *more))
    norms = np.linalg.norm(rows, axis=1)
    clip = float(norms.max()) * 1.001
    noise = SimpleNamespace(clip_norm=clip, shares=0, sampling_rate=1.0, training=1.0, samples=5)
    figures = training_noise(cast("Any", simulated), model, cast("Any", noise), 1, [0], None, 1.0, views)
    assert figures[CLIPPED] == 0
    signal = float(np.sum(np.mean(rows, axis=0) ** 2))
    assert figures[RATIO] == pytest.approx(clip / 5 * np.sqrt(np.mean(norms**2)) / signal, rel=1e-4)
    assert training_noise(cast("Any", simulated), model, cast("Any", noise), 1, [0], None, 1.0)[CLIPPED] > 0


def test_figures_of_the_noise_are_the_experimenters_alone() -> None:
    plain = start(configured({**PRIVATE, "privacy": {}}, training={"rounds": 1}), population=TABLE)
    assert not {CLIPPED, RATIO} & advance(plain).keys()
    run = start(private(training={"rounds": 1}), population=TABLE)
    before = len(run.federation.transcript.messages)
    row = advance(run)
    assert 0 <= row[CLIPPED] <= 1
    assert row[RATIO] > 0
    kinds = {message.kind for message in run.federation.transcript.messages[before:]}
    assert not any("clipped" in kind or "confusion" in kind for kind in kinds), json.dumps(sorted(kinds))


def test_data_that_were_not_made_from_the_configuration_have_to_be_features_where_it_names_some() -> None:
    config = configured({**PRIVATE, "model": {}, "training": {"recipe": "private", "weights": "equal"}})
    x, y = np.random.default_rng(0).random((20, 4, 8, 8)).astype(np.float32)[:, :1], np.arange(20) % 3
    images = Population("own", tuple(ClientData(i, x, y, x, y) for i in range(4)), (0,) * 4, 3)
    with pytest.raises(
        InputError, match=r"data\.features = 'whitened_scattering' with data that were not made from \[data\], of shape \(1, 8, 8\)"
    ):
        start(config, population=images)
    assert start(config.with_("data", features="none"), population=images).population.shape == (1, 8, 8)
    made = features(x)
    clients = tuple(ClientData(i, made, y, made, y) for i in range(4))
    own = replace(images, clients=clients, mean=FEATURE_MEAN, std=FEATURE_STD)
    assert config.model_for(own).shape == (81, 2, 2)


def test_a_recipe_sets_what_is_left_out_and_no_more() -> None:
    recipe = partial(configured, {**PRIVATE, "model": {}, "training": {"recipe": "private", "weights": "equal"}})
    config = recipe()
    assert (config.data.features, config.model.name) == ("whitened_scattering", "linear")
    assert (config.training.rounds, config.training.batch_size) == (100, 0)
    assert (recipe(model={"name": "mlp"}).model.name, recipe(model={"name": "mlp"}).data.features) == ("mlp", "whitened_scattering")
    assert recipe(data={"features": "none"}).data.features == "none"
    assert parse_config(tomllib.loads(config.to_toml())) == config
    assert configured({**PRIVATE, "model": {}}).data.features == "none"


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"privacy": {"unit": "client", "samples": 0}}, "privacy.unit = 'client': is for unit = 'sample'"),
        ({"data": {"source": "csv", "paths": ["t.csv"], "label_column": "y"}}, "data.source = 'csv': its features are of images"),
        ({"data": {"source": "ag_news", "partition": "kinds"}}, "data.source = 'ag_news': its features are of images"),
        ({"training": {"recipe": "privata"}}, "training.recipe = 'privata': known are 'none', 'private'"),
        ({"training": {"recipe": ["private"]}}, "training.recipe = ['private']: known are 'none', 'private'"),
    ],
)
def test_a_recipe_is_refused_by_name_where_it_makes_no_sense(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=re.escape(named)):
        configured({**PRIVATE, "training": {"recipe": "private", "weights": "equal"}}, **keys)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"data": {"features": "scattering"}}, "data.features = 'scattering': views are of images, not of their features"),
        ({"data": {"source": "csv", "paths": ["t.csv"], "label_column": "y"}}, "data.source = 'csv': views are of images"),
        ({"training": {"augment": ["turn"]}}, "training.augment"),
    ],
)
def test_views_are_refused_by_name_where_there_are_no_images(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=re.escape(named)):
        configured({**PRIVATE, "training": {"augment": ["flip"], "weights": "equal"}}, **keys)


@pytest.mark.slow
def test_a_run_by_the_recipe_learns_and_keeps_its_budget(tmp_path: Path) -> None:
    """On the small digits runs had 95.5 to 96.9 %, those of a linear model of pixels 93.3 to 95.8 %: which is better is not asserted."""
    made = {}
    for name in ("private", "none"):
        keys = {"recipe": name, "rounds": 20, "weights": "equal"}
        privacy = {"epsilon": 3.0, "samples": 140, "noise": "shared"}
        shared = {"sum": "secagg", "min_cohort": 9}
        config = private(training=keys, data={"clients": 10}, privacy=privacy, protection=shared, model={"normalise": True})
        run_experiment(config, tmp_path / name)
        summary = json.loads((tmp_path / name / "summary.json").read_text(encoding="utf-8"))
        made[name] = summary["accuracy_mean"]
        assert 2.9 < summary["epsilon"] <= 3.0
    assert made["private"] > max(made["none"] - 0.03, 0.92), made
