"""Groups found from one noisy vector a client: what the vector is, the law of its noise, and that the number of groups needs no telling.

Statistical tests run on fixed public entropy and reject at p < 1e-6.
"""

import tomllib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scenes import population
from scipy import stats

from cflpriv.algorithms.shared.grouping import FindGroups, JoinGroups
from cflpriv.clustering.scores import ari
from cflpriv.clustering.similarity import Gram
from cflpriv.engine import Streams, TaskInput
from cflpriv.engine.models import Model
from cflpriv.engine.sample_gradients import sample_gradients
from cflpriv.experiments import parse_config, run_experiment
from cflpriv.privacy.private_signatures import NoisyMeanGradient, NoisyMoment, sketch_directions, unit_rows
from cflpriv.privacy.settings import Noise
from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.events import GaussianEvent
from cflpriv.protocols.mechanisms import gaussian_multiplier
from cflpriv.protocols.sketch import public_sketch
from cflpriv.tasks.fold_gradients import FoldGradients
from cflpriv.types import Array, ClientData

NOISE = Noise("add_remove", 0.0, 1e-9, 0.0, 1.0, 1.0, 20, 16, 4.0, 3)
SCENE = population(groups=2, clients_per_group=6)
MODEL = Model("linear", SCENE.shape, SCENE.classes)


def input_of_draw(data: ClientData, params: dict[str, Any], draw: int = 0) -> TaskInput:
    return TaskInput(data, params, {}, Streams(0, 0, 0), secret=public_entropy(f"groups {draw}")(32))


def without_last(one: ClientData) -> ClientData:
    return replace(one, x_train=one.x_train[:-1], y_train=one.y_train[:-1])


def test_a_private_fold_is_one_mean_of_sketched_gradients_of_norm_one() -> None:
    one, start = SCENE.clients[0], MODEL.init(0)
    task = FoldGradients(MODEL, True, 1024, 3).private(NOISE)
    assert task == NoisyMeanGradient(MODEL, 16, 1e-9, "add_remove", 20, 3)
    made = task.run(input_of_draw(one, {"model": start}))["folds"]
    whole = np.concatenate([block.double().numpy() for block in sample_gradients(MODEL, start, one)])
    short = public_sketch("crossfit", 3, MODEL.dimension, 16).apply(whole)
    np.testing.assert_allclose(made, unit_rows(short).sum(0) / 20, atol=1e-6)
    fewer = task.run(input_of_draw(without_last(one), {"model": start}))["folds"]
    assert np.linalg.norm(made - fewer) == pytest.approx(1 / 20, abs=1e-6), "one sample moves it by its full bound, and no more"
    assert task.events == {"gradient": GaussianEvent(1e-9, 1.0, "add_remove", "sample")}
    assert replace(task, relation="replace_one").events == {"gradient": GaussianEvent(1e-9, 2.0, "replace_one", "sample")}


def test_a_private_moment_is_its_matrix_with_its_products() -> None:
    one, other = SCENE.clients[:2]
    task = NoisyMoment(5, 1e-9, "add_remove", 20, 3)
    directions = sketch_directions(3, 8, 5)
    rows = [unit_rows(data.x_train.reshape(20, -1).astype(np.float64) @ directions) for data in (one, other)]
    matrices = [x.T @ x / 20 for x in rows]
    vectors = [task.run(input_of_draw(data, {}))["signature"] for data in (one, other)]
    assert vectors[0].shape == (15,)
    assert vectors[0] @ vectors[1] == pytest.approx((matrices[0] * matrices[1]).sum(), abs=1e-6)
    fewer = task.run(input_of_draw(without_last(one), {}))["signature"]
    assert np.linalg.norm(vectors[0] - fewer) == pytest.approx(1 / 20, abs=1e-6)
    assert task.events == {"moment": GaussianEvent(1e-9, 1.0, "add_remove", "sample")}


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize("kind", ["gradient", "moment"])
def test_the_law_that_the_test_is_told_is_that_of_the_noise(relation: Any, kind: str) -> None:
    noise = replace(NOISE, relation=relation, signature=2.0, sketch_dim=5)
    if kind == "gradient":
        task: Any = NoisyMeanGradient(MODEL, 5, 2.0, relation, 20, 3)
        find, name = FindGroups(numbers=MODEL.dimension).private(noise), "folds"
    else:
        task, name = NoisyMoment(5, 2.0, relation, 20, 3), "signature"
        find = FindGroups(subspaces=3, numbers=8).private(noise)
    one, params = SCENE.clients[0], {"model": MODEL.init(0)}
    clean = replace(task, noise_multiplier=1e-9).run(input_of_draw(one, params))[name]
    errors = np.array([task.run(input_of_draw(one, params, draw))[name] - clean for draw in range(200)])
    assert errors.shape[1] == find.dimensions
    assert stats.chi2.sf((errors**2).sum() / find.sigma**2, errors.size) > 1e-6
    assert stats.chi2.cdf((errors**2).sum() / find.sigma**2, errors.size) > 1e-6


def view_of(vectors: Array, new: int = 0, memory: dict[str, Any] | None = None) -> Any:
    clients = tuple(range(len(vectors)))
    gram = Gram.of_vectors(clients, vectors[:, None, :])
    return SimpleNamespace(gram=gram, new=clients[len(clients) - new :], memory={} if memory is None else memory)


def noisy(groups: int, clients: int, noise: Noise, rng: np.random.Generator, apart: float = 0.5) -> tuple[FindGroups, Array, Array]:
    """Means of samples of norm 1 in 16 dimensions, by groups, released under noise."""
    find = FindGroups(numbers=16).private(noise)
    centres = unit_rows(rng.normal(size=(groups, 16)))
    labels = np.arange(clients) % groups
    samples = unit_rows(apart * centres[labels][:, None, :] + rng.normal(size=(clients, noise.samples, 16)) / 4)
    return find, samples.mean(1) + find.sigma * rng.normal(size=(clients, 16)), labels


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [8.0, 1.0])
def test_groups_and_newcomers_of_noisy_vectors(epsilon: float) -> None:
    noise = replace(NOISE, samples=200, signature=gaussian_multiplier(epsilon, 1e-5))
    for seed in range(3):
        find, vectors, labels = noisy(3, 45, noise, np.random.default_rng(seed))
        view = view_of(vectors[:36])
        found, evidence = find(view)
        assert ari(labels[:36].tolist(), found["labels"].tolist()) == 1.0
        joined, _ = JoinGroups(find)(view_of(vectors, 9, view.memory))
        assert ari(labels.tolist(), [*found["labels"].tolist(), *joined["labels"].tolist()]) == 1.0
        assert evidence["edge"] < evidence["spectrum"][0]


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [8.0, 1.0])
def test_noisy_clients_without_groups_are_left_whole(epsilon: float) -> None:
    """At α = 0.05, 300 draws: rejects at p < 1e-6 if the rate of false groups is above α."""
    noise = replace(NOISE, samples=200, signature=gaussian_multiplier(epsilon, 1e-5))
    split = 0
    for seed in range(300):
        find, vectors, _ = noisy(1, 30, noise, np.random.default_rng(seed))
        split += int(replace(find, alpha=0.05, draws=99)(view_of(vectors))[0]["k"]) > 1
    assert stats.binomtest(split, 300, 0.05, alternative="greater").pvalue > 1e-6


@pytest.mark.slow
def test_a_client_that_sends_a_long_vector_hides_no_groups() -> None:
    noise = replace(NOISE, samples=200, signature=1.0)
    find, vectors, labels = noisy(2, 40, noise, np.random.default_rng(0))
    vectors[0] *= 1e6
    found, _ = find(view_of(vectors))
    assert ari(labels[1:].tolist(), found["labels"][1:].tolist()) == 1.0


@pytest.mark.slow
def test_a_run_under_sample_level_privacy_finds_groups_and_spends_its_budget(tmp_path: Any) -> None:
    config = parse_config(
        tomllib.loads("""
        [data]
        source = "digits"
        partition = "pathological"
        groups = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
        clients = 16
        samples_per_client = 80
        test_samples_per_client = 20
        [model]
        name = "linear"
        [training]
        rounds = 1
        batch_size = 20
        weights = "equal"
        [algorithm]
        name = "crossfit"
        [privacy]
        unit = "sample"
        epsilon = 20.0
        delta = 1e-5
        samples = 80
        signature_share = 0.6
        """)
    )
    summary = run_experiment(config, tmp_path / "run")
    assert summary["ari"] == 1.0
    assert 0 < summary["epsilon"] <= 20.0
