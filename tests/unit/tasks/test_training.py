"""Local SGD against torch's own optimiser, models as vectors, random streams, client data."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import federation, population, training
from torch import nn

from cflpriv.engine import Engine, Streams, TaskInput
from cflpriv.engine.models import Model, build_module
from cflpriv.errors import InputError, TrainingDiverged
from cflpriv.randomness import stream
from cflpriv.tasks.evaluation import Evaluate
from cflpriv.tasks.training import Start, Train
from cflpriv.types import Array, ClientData, Clustering, Population


def given_to(data: ClientData, model: Array) -> TaskInput:
    return TaskInput(data, {"model": model}, {}, Streams(7, 3, data.id))


@given(st.integers(1, 3), st.integers(0, 12), st.floats(0.001, 0.5), st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.0, 0.01]))
@settings(max_examples=30, deadline=None)
def test_training_is_torch_sgd(epochs: int, batch: int, lr: float, momentum: float, decay: float) -> None:
    scene = population()
    data = scene.clients[2]
    train = training(scene, epochs=epochs, batch_size=batch, lr=lr, momentum=momentum, weight_decay=decay)
    start = train.model.init(0)
    result = train.run(given_to(data, start))
    module = train.model.load(start)
    optimiser = torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum, weight_decay=decay)
    x, y = train.model.inputs(data.x_train), torch.from_numpy(data.y_train)
    draws, size = stream(7, "batches", 3, data.id), batch or len(y)
    for _ in range(epochs):
        order = np.arange(len(y)) if size >= len(y) else draws.permutation(len(y))
        for at in range(0, len(y), size):
            optimiser.zero_grad()
            nn.functional.cross_entropy(module(x[order[at : at + size]]), y[order[at : at + size]]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    expected = train.model.store(module)
    np.testing.assert_allclose(result["trained"], expected, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(result["update"], result["trained"] - start)
    assert result["count"] == len(y)


def test_initial_models_are_scaled_and_several_that_are_zero_are_refused() -> None:
    model = replace(training(population()).model, name="linear")
    for attempt in (0, 3):
        np.testing.assert_allclose(replace(model, init_scale=0.25).init(1, attempt), 0.25 * model.init(1, attempt), rtol=1e-6)
    zero = replace(model, init_scale=0.0)
    assert zero.init(1).dtype == model.init(1).dtype
    assert not zero.init(1).any()
    with pytest.raises(InputError, match=r"model\.init_scale = 0: .* all be the same"):
        zero.init(1, 1)


def test_evaluation_counts_right_answers() -> None:
    scene = population()
    data = scene.clients[0]
    model = training(scene).model
    vector = model.init(1)
    result = Evaluate(model).run(given_to(data, vector))
    with torch.no_grad():
        logits = model.load(vector)(model.inputs(data.x_test))
    assert result["correct"] == (logits.argmax(1).numpy() == data.y_test).sum()
    assert result["loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, torch.from_numpy(data.y_test), reduction="sum")))
    on_train = Evaluate(model, split="train").run(given_to(data, vector))
    assert on_train["count"] == len(data.y_train)


def test_divergence_names_the_client() -> None:
    scene = population()
    train = training(scene, lr=1e308, epochs=5, momentum=0.9)
    inputs = [given_to(scene.clients[1], train.model.init(0))]
    kinds: tuple[Literal["auto", "sequential"], ...] = ("auto", "sequential")
    for kind in kinds:
        with pytest.raises(TrainingDiverged, match=r"client 1: .* training\.lr"):
            Engine(kind).run(train, inputs)
    assert Engine().run(replace(train, on_divergence="skip"), inputs) == [{}]


def test_a_diverged_client_is_left_out_and_never_averaged() -> None:
    scene = population()
    wild = replace(scene.clients[3], x_train=scene.clients[3].x_train.astype(np.float64) * 1e200)
    clients = [wild if client.id == 3 else client for client in scene.clients]
    fed = federation(clients)
    train = training(scene, epochs=5, on_divergence="skip")
    held = fed.compute(replace(train, lr=0.1), {"model": train.model.init(0)})
    assert held.clients == (0, 1, 2, 4, 5, 6, 7)
    (mean,) = fed.mean(held["update"])
    assert mean is not None
    assert mean.count == 7
    with pytest.raises(TrainingDiverged, match="no client"):
        fed.compute(replace(train, lr=0.1), {"model": train.model.init(0)}, on=[3])


class Dropping(nn.Module):
    """A module that draws at random while it trains."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(nn.functional.dropout(x.flatten(1), 0.5, self.training))  # type: ignore[no-any-return]


def test_dropout_is_on_in_training_off_in_evaluation_and_reproducible() -> None:
    scene = population()
    width = int(np.prod(scene.shape))
    model = Model("dropping", scene.shape, scene.classes, dtype="float64", factory=lambda: Dropping(width, scene.classes))
    start = model.init(0)
    train = Train(model, batch_size=5, lr=0.1)
    inputs = [given_to(client, start) for client in scene.clients]
    first, second = Engine().run(train, inputs), Engine().run(train, inputs)
    plain = training(scene).run(given_to(scene.clients[0], start))
    np.testing.assert_array_equal(first[0]["update"], second[0]["update"])
    assert not np.allclose(first[0]["update"], plain["update"])
    losses = {float(Evaluate(model).run(inputs[0])["loss"]) for _ in range(3)}
    assert len(losses) == 1


def test_models_of_different_factories_are_different() -> None:
    one = Model("mine", (4,), 2, factory=lambda: nn.Linear(4, 2))
    two = Model("mine", (4,), 2, factory=lambda: nn.Linear(4, 2, bias=False))
    assert (one.dimension, two.dimension) == (10, 8)
    assert two.load(two.init(0)).state_dict().keys() == {"weight"}


def test_lr_decay() -> None:
    train = training(population(), lr=0.1, lr_decay=0.5)
    assert train.at(3).lr == pytest.approx(0.0125)
    assert train.at(-1).lr == 0.1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 0}, "epochs = 0: expected an integer ≥ 1"),
        ({"batch_size": -1}, "batch_size"), ({"lr": 0.0}, "lr"), ({"lr": float("nan")}, "lr"),
        ({"momentum": 1.0}, "momentum"), ({"weight_decay": -1.0}, "weight_decay"), ({"lr_decay": 0.0}, "lr_decay"),
    ],
)  # fmt: skip
def test_bad_training_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        training(population(), **options)


# --- models


def test_lenet5_is_table_10() -> None:
    assert Model("lenet5", (1, 28, 28), 10).dimension == 44_426
    assert Model("lenet5", (3, 32, 32), 10).dimension == 62_006
    shapes = [shape for _, shape, _ in Model("lenet5", (3, 32, 32), 40).layout]
    assert shapes[4] == (120, 400)
    assert shapes[-1] == (40,)


@pytest.mark.parametrize("model", [Model("linear", (1, 8, 8), 10), Model("mlp", (1, 8, 8), 10, hidden=7), Model("lenet5", (1, 28, 28), 10)])
def test_vectors_and_modules_are_the_same(model: Model) -> None:
    vector = model.init(5)
    assert vector.shape == (model.dimension,)
    assert vector.dtype == np.float32
    np.testing.assert_array_equal(model.store(model.load(vector)), vector)
    np.testing.assert_array_equal(vector, model.init(5))
    assert not np.array_equal(vector, model.init(6))
    assert not np.array_equal(vector, model.init(5, attempt=1))
    before = torch.random.get_rng_state()
    model.init(7)
    assert torch.equal(before, torch.random.get_rng_state())
    np.testing.assert_array_equal(Start(model, 5).run(given_to(population().clients[0], vector))["model"], vector)


def test_inputs_are_normalised_per_channel() -> None:
    x = np.ones((2, 3, 4, 4), dtype=np.float32)
    model = Model("linear", (3, 4, 4), 2, mean=(0.0, 0.5, 1.0), std=(1.0, 0.5, 2.0))
    np.testing.assert_allclose(model.inputs(x)[0, :, 0, 0].numpy(), [1.0, 1.0, 0.0])


def frozen() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).requires_grad_(False)


def twice() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (frozen, r"all parameters are frozen, such as '0\.weight'"),
        (twice, "layers '0' and '2' are one; give it one name, and call it twice"),
        (lambda: nn.LazyLinear(2), "parameter 'weight' has no size before a first pass"),
        (nn.Flatten, "has no parameters"),
        (lambda: None, "its factory gives a NoneType"),
        (lambda: nn.Linear(4, 3), r"gives \(2, 3\) for two samples, expected \(2, 2\)"),
    ],
)
def test_a_module_that_cannot_be_trained_as_it_is_is_refused(factory: Any, words: str) -> None:
    """A layer of two names was left with another client's parameters."""
    with pytest.raises(InputError, match=f"^model 'mine': {words}"):
        build_module(Model("mine", (4,), 2, factory=factory))
    relu = nn.ReLU()
    build_module(Model("mine", (4,), 2, factory=lambda: nn.Sequential(relu, nn.Linear(4, 4), relu, nn.Linear(4, 2))))


def test_models_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="16×16"):
        _ = Model("lenet5", (1, 8, 8), 10).dimension
    with pytest.raises(InputError, match="'lenet6'"):
        _ = Model("lenet6", (1, 28, 28), 10).dimension
    with pytest.raises(InputError, match=r"\(3,\), expected"):
        Model("linear", (4,), 2).load(np.zeros(3, dtype=np.float32))
    normed = Model("mine", (4,), 2, factory=lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
    with pytest.raises(InputError, match="running statistics"):
        _ = normed.dimension


def test_each_loaded_model_is_one_of_its_own() -> None:
    model = Model("mlp", (4,), 2, hidden=3)
    vectors = [model.init(seed) for seed in range(3)]
    modules = [model.load(vector) for vector in vectors]
    for module, vector in zip(modules, vectors, strict=True):
        np.testing.assert_array_equal(model.store(module), vector)


def test_a_users_module_works_unchanged() -> None:
    scene = population()
    mine = Model("mine", scene.shape, scene.classes, dtype="float64", factory=lambda: nn.Linear(int(np.prod(scene.shape)), scene.classes))
    start = mine.init(0)
    a = Train(mine, batch_size=5, lr=0.1).run(given_to(scene.clients[0], start))["update"]
    b = training(scene).run(given_to(scene.clients[0], start))["update"]
    np.testing.assert_array_equal(a, b)


# --- streams and nouns


def test_streams_are_keyed() -> None:
    draws = {
        (purpose, number, client): float(stream(1, purpose, number, client).random())
        for purpose in ("a", "b") for number in (0, 1) for client in (0, 1)
    }  # fmt: skip
    assert len(set(draws.values())) == len(draws)
    assert float(stream(1, "a", 0, 1).random()) == draws["a", 0, 1]
    assert stream(1, "a|0", 1, 0).random() != stream(1, "a", 0, 10).random()


def test_client_data_is_checked() -> None:
    x, y = np.zeros((3, 2)), np.zeros(3, dtype=np.int64)
    ClientData(0, x, y, x[:0], y[:0])
    bad = x.copy()
    bad[1, 0] = np.nan
    for arrays, words in [
        ((bad, y, x, y), r"client 4: x_train: value at index \(1, 0\) is nan"),
        ((x, y[:2], x, y), "3 samples but y_train has 2"),
        ((x[:0], y[:0], x, y), "no training samples"),
        ((x.astype(np.int64), y, x, y), "int64"),
        ((x, x[:, 0], x, y), "y_train"),
        ((x, y, np.zeros((3, 5)), y), "shape"),
    ]:
        with pytest.raises(InputError, match=words):
            ClientData(4, *arrays)


def test_populations_are_checked() -> None:
    scene = population()
    with pytest.raises(InputError, match=r"label 2, not in 0\.\.1"):
        Population("x", scene.clients, scene.groups, 2)
    with pytest.raises(InputError, match="8 clients but 1 groups"):
        Population("x", scene.clients, (0,), 3)
    with pytest.raises(InputError, match="repeat"):
        Population("x", (scene.clients[0],) * 2, (0, 0), 3)


def test_clusterings_partition() -> None:
    clustering = Clustering((3, 5, 9), (0, 2, 0), 3)
    assert clustering.members(0) == (3, 9)
    assert clustering.members(1) == ()
    assert clustering[5] == 2
    assert clustering.extended((11,), (3,)).k == 4
    for arguments in (((1, 1), (0, 0), 1), ((1,), (1,), 1), ((1, 2), (0,), 1)):
        with pytest.raises(InputError):
            Clustering(*arguments)
