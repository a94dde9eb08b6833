"""Cross-fitted clustering as a system: the folds that clients make, what the server finds, newcomers, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import PROTECTIONS, model, population, training
from torch import nn
from torch.nn import functional

from cflpriv import ALGORITHMS, Model, Train, simulate
from cflpriv.algorithms import crossfit
from cflpriv.algorithms.shared import grouping
from cflpriv.clustering.group_test import Groups, groups_of
from cflpriv.clustering.scores import ari
from cflpriv.clustering.unbiased_gram import UnbiasedGram
from cflpriv.engine import Streams, TaskInput
from cflpriv.engine.sample_gradients import _dense, gradients_by_sample, sample_gradients, summed_directions
from cflpriv.errors import InputError
from cflpriv.protocols.sketch import public_seed, sketch
from cflpriv.randomness import stream
from cflpriv.tasks.fold_gradients import FoldGradients, fold_weights
from cflpriv.types import Array, ClientData

SCENE = population(groups=2, clients_per_group=6)
MODEL, TRAIN = model(SCENE, "float32"), training(SCENE, dtype="float32", batch_size=0)


# --- folds


@settings(max_examples=50, deadline=None)
@given(labels=st.lists(st.integers(0, 4), min_size=2, max_size=40), balanced=st.booleans(), seed=st.integers(0, 2**20))
def test_a_sample_is_in_one_fold_and_weights_add_up(labels: list[int], balanced: bool, seed: int) -> None:
    y = np.array(labels)
    weights = fold_weights(y, balanced, stream(seed, "t"))
    assert weights.shape == (2, len(y))
    np.testing.assert_allclose(weights.sum(1), 1.0)
    assert not np.any((weights > 0).all(0))
    assert ((weights > 0).sum(1) == [-(-len(y) // 2), len(y) // 2]).all()
    for fold in weights:
        present = set(y[fold > 0].tolist())
        for label in present:
            share = fold[y == label].sum()
            assert share == pytest.approx(1 / len(present) if balanced else (fold[y == label] > 0).sum() / (fold > 0).sum())


def test_one_sample_cannot_be_split() -> None:
    with pytest.raises(InputError, match="1 sample cannot be split into 2 halves"):
        fold_weights(np.zeros(1, np.int64), False, stream(0, "t"))


def by_hand(weights: Array, start: Array) -> Array:
    """Weighted sums of the samples' gradients, each scaled to norm 1, one sample at a time."""
    one = SCENE.clients[0]
    module = MODEL.load(start)
    total = np.zeros((2, MODEL.dimension))
    for place in range(len(one.y_train)):
        x, y = MODEL.inputs(one.x_train[place : place + 1]), torch.from_numpy(one.y_train[place : place + 1])
        made = torch.autograd.grad(functional.cross_entropy(module(x), y), list(module.parameters()))
        row = torch.cat([part.reshape(-1) for part in made]).double().numpy()
        total += weights[:, place : place + 1] * row / np.linalg.norm(row)
    return total


@pytest.mark.parametrize("balanced", [True, False])
def test_folds_are_means_of_gradients_of_norm_one(balanced: bool) -> None:
    start, streams = MODEL.init(3), Streams(5, -1, 0)
    weights = fold_weights(SCENE.clients[0].y_train, balanced, streams("folds"))
    expected = by_hand(weights, start)
    given = TaskInput(SCENE.clients[0], {"model": start}, {}, streams)
    whole = FoldGradients(MODEL, balanced, sketch=MODEL.dimension).run(given)["folds"]
    np.testing.assert_allclose(whole, expected, atol=1e-6)
    short = FoldGradients(MODEL, balanced, sketch=16, seed=9).run(given)["folds"]
    np.testing.assert_allclose(short, sketch(public_seed("crossfit", 9), MODEL.dimension, 16).apply(whole), atol=1e-12)
    assert (np.linalg.norm(whole, axis=1) <= 1 + 1e-9).all()


def test_samples_come_in_blocks_that_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    start = MODEL.init(0)
    whole = torch.cat(list(sample_gradients(MODEL, start, SCENE.clients[0])))
    monkeypatch.setattr("cflpriv.engine.sample_gradients.SAMPLES_AT_ONCE", 3)
    blocks = list(sample_gradients(MODEL, start, SCENE.clients[0]))
    assert max(map(len, blocks)) == 3
    torch.testing.assert_close(torch.cat(blocks), whole)


class SharedLayer(nn.Module):
    """A layer that a sample passes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(64, 64), nn.Linear(64, 10, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.layer(self.layer(x.flatten(1)).relu()))


@pytest.mark.parametrize(
    ("name", "factory", "dense"), [("linear", None, True), ("mlp", None, True), ("lenet5", None, False), ("shared", SharedLayer, False)]
)
def test_sums_of_directions_need_no_single_gradients(
    name: str, factory: Callable[[], nn.Module] | None, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (1, 16, 16) if name == "lenet5" else (1, 8, 8)
    made = Model(name, shape, 10, hidden=7, factory=factory)
    start, rng = made.init(2), np.random.default_rng(1)
    assert _dense(made.load(start)) is dense
    x, y = rng.standard_normal((13, *shape)).astype(np.float32), rng.integers(0, 10, 13)
    x[4] = np.finfo(np.float32).max * np.sign(start[: x[4].size].reshape(shape))  # overflows: such a gradient counts as zero
    x[5] = 0.0
    data, weights = ClientData(0, x, y, x[:0], y[:0]), rng.random((3, 13))
    rows = torch.cat(list(sample_gradients(made, start, data))).double().numpy()
    norms = np.linalg.norm(rows, axis=1)
    assert not (dense and np.isfinite(norms[4]))
    rows = np.where(np.isfinite(norms)[:, None], rows, 0.0) / np.where(np.isfinite(norms), norms, 1.0)[:, None]
    monkeypatch.setattr("cflpriv.engine.sample_gradients.SAMPLES_AT_ONCE", 5)
    np.testing.assert_allclose(summed_directions(made, start, data, weights), weights @ rows, atol=2e-6)


# --- the system


def test_groups_are_found_and_newcomers_join_theirs() -> None:
    groups = dict(zip((one.id for one in SCENE.clients), SCENE.groups, strict=True))
    simulated = simulate(SCENE.clients, present=[one for one in groups if one not in (1, 10)])
    algorithm = crossfit(TRAIN)
    state = algorithm.init(simulated.federation)
    described = algorithm.describe(state)
    found = described["clustering"]
    assert ari([groups[one] for one in found.clients], found.labels) == 1.0
    assert (described["answer"], described["clear"], described["directions"]) == ("groups", True, 1)
    assert described["p"] == 1 / 500
    simulated.join([1, 10])
    assert algorithm.admit is not None
    state, notes = algorithm.admit(simulated.federation, state, [1, 10])
    assert len(notes["joined"]) == 2
    everyone = state.clustering
    assert ari([groups[one] for one in everyone.clients], everyone.labels) == 1.0


def test_one_group_is_one_cluster_and_says_so() -> None:
    alike = population(groups=1, clients_per_group=12)
    algorithm = crossfit(TRAIN)
    described = algorithm.describe(algorithm.init(simulate(alike.clients).federation))
    assert described["clustering"].k == 1
    assert described["answer"] in ("all alike", "no clear groups")
    assert not described["clear"]


def test_a_given_number_of_groups_is_taken() -> None:
    algorithm = crossfit(TRAIN, k=3)
    described = algorithm.describe(algorithm.init(simulate(SCENE.clients).federation))
    assert described["clustering"].k == 3
    assert described["rule"] == "k = 3"
    with pytest.raises(InputError, match="13 groups of 12 clients"):
        crossfit(TRAIN, k=13).init(simulate(SCENE.clients).federation)


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_landmarks_find_the_groups_and_all_others_join_them(protection: str) -> None:
    scene = population(groups=2, clients_per_group=20)
    groups = dict(zip((one.id for one in scene.clients), scene.groups, strict=True))
    simulated = simulate(scene.clients, present=[one for one in groups if one != 5], protection=PROTECTIONS[protection])
    algorithm = crossfit(Train(Model("linear", scene.shape, scene.classes), epochs=1, lr=0.1), landmarks=12, weights="equal")
    state = algorithm.init(simulated.federation)
    described = algorithm.describe(state)
    assert len(described["evidence"]["clients"]) + described.get("set_aside", 0) == described["landmarks"] == 12
    assert described["clustering"].clients == tuple(one for one in groups if one != 5)
    assert ari([groups[one] for one in described["clustering"].clients], described["clustering"].labels) == 1.0
    simulated.join([5])
    assert algorithm.admit is not None
    state, _ = algorithm.admit(simulated.federation, state, [5])
    assert ari([groups[one] for one in state.clustering.clients], state.clustering.labels) == 1.0
    state, _ = algorithm.round(simulated.federation, state)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pacfl", "stocfl", "ifca", "cfl"])
def test_many_clients_are_compared_with_landmarks_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit only landmarks are tested; the others join the nearest group."""
    monkeypatch.setattr(grouping, "MOST_COMPARED", 30)
    monkeypatch.setattr(grouping, "LANDMARKS", 16)
    tested: list[int] = []
    whole = groups_of

    def counted(unbiased: UnbiasedGram, *given: Any, **named: Any) -> Groups:
        tested.append(len(unbiased.traces))
        return whole(unbiased, *given, **named)

    monkeypatch.setattr(grouping, "groups_of", counted)
    scene = population(groups=2, clients_per_group=20, samples=60)
    groups = dict(zip((one.id for one in scene.clients), scene.groups, strict=True))
    simulated = simulate(scene.clients)
    given = {"eps1": 1e3} if name == "cfl" else {}  # stands still, and so is tested, in the first round
    algorithm = ALGORITHMS[name].make(Train(Model("linear", scene.shape, scene.classes), epochs=1, lr=0.1), **given)
    state = algorithm.init(simulated.federation)
    simulated.federation.begin_round(0)
    state, _ = algorithm.round(simulated.federation, state)
    assert tested
    assert max(tested) <= 16
    labels = [algorithm.describe(state)["clustering"][one] for one in groups]
    assert ari(list(groups.values()), labels) == 1.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"variant": "other"}, "algorithm.variant = 'other': expected 'balanced' or 'plain'"),
        ({"alpha": 0.0}, "algorithm.alpha = 0.0: expected a number in "),
        ({"draws": 50}, "algorithm.draws: 50 draws cannot show a level of 0.01; take at least 99"),
        ({"k": 0}, "algorithm.k = 0: expected an integer ≥ 1"),
        ({"sketch": 0}, "algorithm.sketch = 0: expected an integer ≥ 1"),
        ({"landmarks": 3}, "algorithm.landmarks = 3: expected an integer ≥ 4"),
    ],
)
def test_parameters_that_cannot_be_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        crossfit(TRAIN, **given)  # type: ignore[arg-type]


def test_small_clients_of_the_same_data_are_no_group() -> None:
    """One client of 12 samples among clients of 120, five seeds: at α = 1 % any false split has a chance of about 5 %."""
    found = 0
    for seed in range(5):
        scene = population(groups=1, clients_per_group=16, samples=120, classes=6, seed=seed)
        small = replace(scene.clients[3], x_train=scene.clients[3].x_train[:12], y_train=scene.clients[3].y_train[:12])
        clients = [small if one.id == 3 else one for one in scene.clients]
        algorithm = crossfit(Train(Model("linear", scene.shape, scene.classes), epochs=1, batch_size=0, lr=0.1), seed=seed)
        found += algorithm.describe(algorithm.init(simulate(clients).federation))["clustering"].k > 1
    assert found <= 1


def test_recurrent_models_have_folds() -> None:
    module = torch.nn.LSTM(4, 3, batch_first=True)

    class Last(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            last: torch.Tensor = self.inner(x)[0][:, -1]
            return last

    whole = Last().double()
    x, y = torch.randn(5, 6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    made = gradients_by_sample(whole, x, y)
    for place in range(5):
        alone = torch.autograd.grad(functional.cross_entropy(whole(x[place : place + 1]), y[place : place + 1]), list(whole.parameters()))
        for one, other in zip(made.values(), alone, strict=True):
            torch.testing.assert_close(one[place], other)
