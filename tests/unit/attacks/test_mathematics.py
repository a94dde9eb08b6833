"""The attacks as plain functions of arrays: exact where the algebra says so, on made-up numbers and on real gradients."""

import runpy
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkout import ROOT
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scenes import orthonormal_rows

from cflpriv.attacks import groups_from_scores, labels_from_bias, labels_from_gram, labels_from_templates, rows_from_products
from cflpriv.attacks.evidence.local_training import LocalTraining
from cflpriv.attacks.figures.leakage import grouping_accuracy, prior_of
from cflpriv.attacks.labels.label_inference import bias_span, class_probabilities, counts_from_bias, steps_scale, top_labels
from cflpriv.data import DataSpec, build_population
from cflpriv.engine import Streams, TaskInput
from cflpriv.engine.models import Model
from cflpriv.experiments import parse_config
from cflpriv.protocols.orthonormal import haar
from cflpriv.tasks.training import Gradient
from cflpriv.types import Array

SEEDS = st.integers(0, 2**32 - 1)


def predictions(rng: np.random.Generator, classes: int) -> Array:
    """What a model that has learnt a little predicts on average for samples of each label."""
    rows = rng.dirichlet(np.full(classes, 5.0), size=classes) + 0.3 * np.eye(classes)
    return np.asarray(rows / rows.sum(axis=1, keepdims=True))


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.floats(1e-3, 1e3))
def test_shares_from_a_bias_update_are_exact_for_known_predictions(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    p, q = predictions(rng, 10), rng.dirichlet(np.full(10, 0.3))
    update = scale * (q - p.T @ q)
    assert labels_from_bias(update, p, scale) == pytest.approx(q, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.floats(1e-3, 1e3), st.integers(1, 8))
def test_shares_from_a_gradient_of_unknown_length_are_exact_where_labels_are_absent(seed: int, scale: float, labels: int) -> None:
    rng = np.random.default_rng(seed)
    p, q = predictions(rng, 10), np.zeros(10)
    q[rng.permutation(10)[:labels]] = rng.dirichlet(np.full(labels, 3.0))
    assume(q[q > 0].min() > 1e-3)
    assert counts_from_bias(scale * (p.T @ q - q), p, labels) == pytest.approx(q, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(SEEDS)
def test_shares_from_templates_are_exact_in_their_span(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = rng.normal(size=(6, 40)) * rng.uniform(0.2, 5, size=(6, 1))  # labels' gradients have different lengths
    q = rng.dirichlet(np.full(6, 0.5))
    unit = parts / np.linalg.norm(parts, axis=1, keepdims=True)
    mixture, vector = parts.mean(axis=0), q @ parts
    found = labels_from_templates(vector / np.linalg.norm(vector), unit, mixture / np.linalg.norm(mixture))
    assert found == pytest.approx(q, abs=1e-6)


def test_a_real_gradient_gives_its_labels_away() -> None:
    """Oracle: torch's gradient of the mean loss of a batch; predictions of the very samples make the answer exact."""
    scene = build_population(DataSpec(clients=2))
    data = scene.clients[0]
    model = Model("mlp", scene.shape, scene.classes, 8, scene.mean, scene.std, "float64")
    vector = model.init(0)
    given = TaskInput(data, {"model": vector}, {}, Streams(0, 0, data.id))
    gradient = np.asarray(Gradient(model).run(given)["gradient"])
    bias = bias_span(model)
    assert bias is not None
    p = class_probabilities(model, vector, data.x_train, data.y_train)
    real = np.bincount(data.y_train, minlength=10) / len(data.y_train)
    assert labels_from_bias(-gradient[bias], p, 1.0) == pytest.approx(real, abs=1e-8)
    assert top_labels(real, 3) == frozenset(np.argsort(-real, kind="stable")[:3].tolist())


def test_a_head_without_a_bias_is_noticed() -> None:
    free = Model("linear", (4,), 3, factory=lambda: torch.nn.Linear(4, 3, bias=False))
    assert bias_span(Model("linear", (4,), 3)) == slice(12, 15)
    assert bias_span(free) is None


def test_the_scale_of_an_update_counts_steps_decay_and_momentum() -> None:
    scene = build_population(DataSpec(clients=4, samples_per_client=25))
    training = {"epochs": 2, "batch_size": 10, "lr": 0.5, "lr_decay": 0.9, "weights": "equal"}
    prior = prior_of(scene, 0, config=parse_config({"training": training}))
    train = parse_config({"training": training}).train_for(scene)
    assert steps_scale(prior, 0, LocalTraining(train.at(0))) == pytest.approx(0.5 * 6)
    assert steps_scale(prior, 0, LocalTraining(train.at(2))) == pytest.approx(0.5 * 0.81 * 6)
    velocity, moved = 0.0, 0.0
    for _ in range(6):
        velocity = 0.5 * velocity + 1.0
        moved += 0.5 * velocity
    assert steps_scale(prior, 0, LocalTraining(replace(train, momentum=0.5))) == pytest.approx(moved)
    assert steps_scale(prior, 0, LocalTraining(replace(train, batch_size=0))) == pytest.approx(0.5 * 2)


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(1, 3), st.booleans())
def test_rows_are_exact_once_known_vectors_span_the_space(seed: int, p: int, rotated: bool) -> None:
    rng = np.random.default_rng(seed)
    d = 9
    known, secret = rng.normal(size=(d, d)), rng.normal(size=(p, d))
    assume(np.linalg.cond(known) < 1e6)
    turn = haar(b"k" * 32, "test", d)
    seen, beside = (turn.apply(secret), turn.apply(known)) if rotated else (secret, known)
    assert rows_from_products(seen @ beside.T, known) == pytest.approx(secret, abs=1e-6)
    few = rows_from_products(secret @ known[:4].T, known[:4])
    assert few @ known[:4].T == pytest.approx(secret @ known[:4].T, abs=1e-8)  # the least-norm guess explains what was seen
    assert np.linalg.norm(few) <= np.linalg.norm(secret) * (1 + 1e-9)


@pytest.mark.parametrize("p", [1, 3])
def test_labels_from_a_gram_with_known_clients(p: int) -> None:
    rng = np.random.default_rng(0)
    kinds = [frozenset([i]) for i in range(6)]
    bases = orthonormal_rows(rng, 6, p, 30)
    clients = [bases[i % 6] + 0.01 * rng.normal(size=(p, 30)) for i in range(18)]
    flat = np.concatenate(clients)
    products = (flat @ flat.T).reshape(18, p, 18, p)
    known = {i: clients[i] for i in range(3)}
    found = labels_from_gram(products, known, dict(zip(kinds, bases, strict=True)))
    assert [one == kinds[i % 6] for i, one in enumerate(found)] == [True] * 18
    turned = haar(b"s" * 32, "test", 30).apply(flat)
    again = labels_from_gram((turned @ turned.T).reshape(18, p, 18, p), known, dict(zip(kinds, bases, strict=True)))
    assert again == found  # a rotation changes nothing


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(2, 4))
def test_groups_from_scores(seed: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.arange(k * 5) % k)
    scores = (groups[:, None] == groups[None]) * 1.0 + 0.2 * rng.random((k * 5, k * 5))
    scores *= rng.uniform(0.1, 10, size=(k * 5, 1))  # every client on a scale of its own
    assert grouping_accuracy(groups_from_scores(scores, k), groups).all()


@pytest.mark.slow
def test_the_example_for_other_systems_runs(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "examples" / "attack_other_systems.py"
    runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().out
    assert "label set [3, 8], really [3, 8]" in said
    assert "[62, 63, 64, 65]" in said
