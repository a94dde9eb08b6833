"""Every fast way equals the sequential reference: over random shapes, options and ragged clients."""

import copy
import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import eye, federation
from scipy import stats
from torch import nn

from cflpriv.algorithms import ALGORITHMS
from cflpriv.data import build_population
from cflpriv.engine import Engine, ManyTask, Streams, TaskInput, compiled, fast, span
from cflpriv.engine.models import Model, Residual
from cflpriv.engine.run import chunks
from cflpriv.errors import InputError, TrainingDiverged, WorkerLost
from cflpriv.experiments.config.config import parse_config
from cflpriv.tasks.evaluation import Evaluate, Losses
from cflpriv.tasks.training import Gradient, Train
from cflpriv.types import Array, ClientData

SMALL_MODELS = {
    "linear": Model("linear", (1, 4, 4), 3, dtype="float64"),
    "mlp": Model("mlp", (1, 4, 4), 3, hidden=5, dtype="float64"),
    "lenet5": Model("lenet5", (1, 16, 16), 3, dtype="float64"),
    "colour": Model("lenet5", (3, 16, 16), 3, dtype="float64", mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 0.5)),
}


def clients(shape: tuple[int, ...], sizes: list[int], classes: int = 3, seed: int = 0, dtype: Any = np.float64) -> list[ClientData]:
    rng = np.random.default_rng(seed)
    data = []
    for i, n in enumerate(sizes):
        x, y = rng.random((n, *shape)).astype(dtype), rng.integers(classes, size=n)
        data.append(ClientData(i, x, y, x[:2], y[:2]))
    return data


def inputs(model: Model, data: list[ClientData], own: bool = False, **vectors: Array) -> list[TaskInput]:
    """Everyone's input, with one model for all or each its own."""
    shared = model.init(0)
    return [
        TaskInput(one, {"model": model.init(one.id) if own else shared, **vectors}, {}, Streams(1, 2, one.id)) for one in data
    ]  # fmt: skip


def compare(task: ManyTask, given_to: list[TaskInput], atol: float, expected: str | None = None) -> None:
    """torch's ways against the plain loop; `test_native.py` has the compiled kernel."""
    engine = Engine("torch")
    fast, plain = engine.run(task, given_to), Engine("sequential").run(task, given_to)
    for a, b in zip(fast, plain, strict=True):
        assert set(a) == set(b)
        for name in a:
            assert a[name].dtype == b[name].dtype
            np.testing.assert_allclose(a[name], b[name], rtol=0, atol=atol, err_msg=name)
    if expected is not None:
        assert {path for _, path in engine.paths} == {expected}


options = st.fixed_dictionaries({
    "epochs": st.integers(1, 3), "batch_size": st.integers(0, 7), "lr": st.floats(0.01, 0.1), "momentum": st.sampled_from([0.0, 0.5, 0.9]),
    "weight_decay": st.sampled_from([0.0, 0.01]), "prox": st.sampled_from([0.0, 0.1]), "maml_lr": st.sampled_from([0.0, 0.05]),
})  # fmt: skip
sgd_or_adam = st.tuples(options, st.booleans()).map(lambda drawn: by_adam(drawn[0]) if drawn[1] else drawn[0])


def by_adam(chosen: dict[str, Any]) -> dict[str, Any]:
    """With small rates: Adam divides a gradient by its own size, down to 1e-8, and with it the last digit in which two ways differ."""
    return chosen | {"optimizer": "adam", "momentum": 0.0, "lr": chosen["lr"] / 200}


any_training = given(
    st.sampled_from(list(SMALL_MODELS)), sgd_or_adam, st.lists(st.integers(1, 12), min_size=2, max_size=6), st.booleans(), st.booleans()
)


def check_stacked(name: str, chosen: dict[str, Any], sizes: list[int], own: bool, extra: bool) -> None:
    if chosen["maml_lr"]:  # two epochs make a pair of batches for every client; fewer are refused
        chosen = chosen | {"epochs": max(2, chosen["epochs"])}
    model = SMALL_MODELS[name]
    rng = np.random.default_rng(len(sizes))
    vectors = {key: 0.01 * rng.normal(size=model.dimension) for key in ("anchor", "correction")} if extra else {}
    compare(Train(model, **chosen), inputs(model, clients(model.shape, sizes), own, **vectors), 1e-12)


@pytest.mark.slow
@any_training
@settings(max_examples=30, deadline=None)
def test_stacked_equals_sequential(name: str, chosen: dict[str, Any], sizes: list[int], own: bool, extra: bool) -> None:
    check_stacked(name, chosen, sizes, own, extra)


@pytest.mark.slow
@any_training
@settings(max_examples=300, deadline=None)
def test_stacked_equals_sequential_in_many_more_cases(name: str, chosen: dict[str, Any], sizes: list[int], own: bool, extra: bool) -> None:
    check_stacked(name, chosen, sizes, own, extra)


@given(st.lists(st.integers(1, 20), min_size=2, max_size=5), options, st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_span_form_equals_sequential(sizes: list[int], chosen: dict[str, Any], own: bool, anchored: bool) -> None:
    model = Model("mlp", (1, 5, 5), 4, hidden=6, dtype="float64")
    chosen = chosen | {"batch_size": 0, "maml_lr": 0.0}
    vectors = {"anchor": 0.3 * model.init(9)} if anchored else {}
    compare(Train(model, **chosen), inputs(model, clients(model.shape, sizes, 4), own, **vectors), 1e-12, "span")


@pytest.mark.slow
@given(st.sampled_from(list(SMALL_MODELS)), st.integers(1, 3), st.integers(0, 5), st.sampled_from([0.0, 0.01]), st.sampled_from([0.0, 0.1]))
@settings(max_examples=20, deadline=None)
def test_the_plain_loop_with_adam_is_torch_s(name: str, epochs: int, batch_size: int, weight_decay: float, prox: float) -> None:
    """Against `torch.optim.Adam` on the written-out loss, prox term included; two calls in a row, so nothing of the first is left."""
    model = SMALL_MODELS[name]
    (given_to,) = inputs(model, clients(model.shape, [11]))
    task = Train(model, epochs, batch_size, 0.0005, weight_decay=weight_decay, prox=prox, optimizer="adam")
    for _ in range(2):
        update = Engine("sequential").run(task, [given_to])[0]["update"]
    module = copy.deepcopy(model.load(given_to.array("model"), training=True))
    anchor = [parameter.detach().clone() for parameter in module.parameters()]
    adam = torch.optim.Adam(module.parameters(), 0.0005, weight_decay=weight_decay)
    x, y = model.inputs(given_to.data.x_train), torch.from_numpy(given_to.data.y_train)
    for batch in task.batches(given_to):
        adam.zero_grad()
        loss = nn.functional.cross_entropy(module(x[batch]), y[batch])
        apart = sum(((p - a).square().sum() for p, a in zip(module.parameters(), anchor, strict=True)), torch.zeros(()))
        torch.autograd.backward([loss + prox / 2 * apart])
        adam.step()
    np.testing.assert_allclose(update, model.store(module) - given_to.array("model"), rtol=0, atol=1e-12)
    if not prox:
        np.testing.assert_array_equal(update, model.store(module) - given_to.array("model"))


def test_adam_in_every_way() -> None:
    """A user's module under vmap, clipped and Poisson batches, frozen parameters, full batches, for which the span form is not Adam's."""
    odd, lenet, mlp = Model("odd adam", (6,), 3, dtype="float64", factory=Odd), SMALL_MODELS["lenet5"], SMALL_MODELS["mlp"]
    adam: dict[str, Any] = {"optimizer": "adam", "lr": 0.0005}
    compare(Train(odd, batch_size=3, **adam), inputs(odd, clients((6,), [7, 5, 4, 9, 3, 8, 6])), 1e-12, "vmap")
    compare(Train(lenet, epochs=2, clip_norm=0.5, sampling_rate=0.3, **adam), inputs(lenet, clients(lenet.shape, [5, 9])), 1e-12, "stacked")
    compare(Train(lenet, batch_size=4, frozen=("0.",), **adam), inputs(lenet, clients(lenet.shape, [6, 9])), 1e-12, "stacked")
    compare(Train(mlp, epochs=3, batch_size=0, **adam), inputs(mlp, clients(mlp.shape, [6, 9])), 1e-12, "stacked")


def test_what_adam_cannot_be_is_refused_by_name() -> None:
    model = SMALL_MODELS["linear"]
    for arguments, words in [
        ({"optimizer": "lion"}, "optimizer = 'lion': expected 'sgd' or 'adam'"),
        ({"optimizer": "adam", "momentum": 0.5}, "momentum: 0.5"),
    ]:
        with pytest.raises(InputError, match=words):
            Train(model, **arguments)  # type: ignore[arg-type]
    adam = Train(model, optimizer="adam")
    for name, arguments in [("fednova", {}), ("scaffold", {}), ("ifca", {"averaging": "gradient"})]:
        with pytest.raises(InputError, match="optimizer: 'adam'"):
            ALGORITHMS[name].make(adam, **arguments)
    config = parse_config({"training": {"optimizer": "adam"}, "algorithm": {"name": "fedavg"}})
    assert config.train_for(build_population(config.data)).optimizer == "adam"
    with pytest.raises(InputError, match="optimizer"):
        parse_config({"training": {"optimizer": "lion"}})


def test_the_span_form_in_float32_is_within_1e_6() -> None:
    model = Model("mlp", (1, 28, 28), 10, hidden=50)
    data = clients(model.shape, [50, 50, 30], 10, dtype=np.float32)
    compare(Train(model, epochs=5, batch_size=0, lr=0.1), inputs(model, data), 1e-6, "span")


def test_two_models_that_scale_the_same_data_otherwise_do_not_share_a_kernel() -> None:
    model = Model("mlp", (1, 5, 5), 4, hidden=6, dtype="float64")
    data = clients(model.shape, [5, 7, 3], 4)
    for one in (model, replace(model, mean=(0.5,), std=(0.1,)), model):
        compare(Train(one, epochs=3, batch_size=0, lr=0.1), inputs(one, data), 1e-12, "span")


def test_kernels_are_kept_as_long_as_their_data_and_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("mlp", (1, 5, 5), 4, hidden=6, dtype="float64")
    gc.collect()
    before = span._kept_bytes

    def train(data: list[ClientData], model: Model = model) -> int:
        Engine().run(Train(model, epochs=3, batch_size=0, lr=0.1), inputs(model, data))
        return span._kept_bytes - before

    data = clients(model.shape, [5, 7, 3], 4)
    bytes_of = [8 * n * n for n in (5, 7, 3)]
    assert train(data) == train(data) == sum(bytes_of)
    assert train(data, replace(model, mean=(0.5,), std=(0.1,))) == sum(bytes_of), "another kernel takes the place of the first"
    del data[1]
    gc.collect()
    assert span._kept_bytes - before == bytes_of[0] + bytes_of[2]
    more = clients(model.shape, [5, 4], 4, seed=1)
    monkeypatch.setattr(span, "_KERNEL_BYTES", span._kept_bytes + 8 * 4 * 4)
    assert train(more) == bytes_of[0] + bytes_of[2] + 8 * 4 * 4, "there was room for the smaller one"
    del data, more
    gc.collect()
    assert span._kept_bytes == before


def test_float32_is_within_1e_4() -> None:
    model = Model("lenet5", (1, 28, 28), 10)
    data = clients(model.shape, [40, 35, 40], 10, dtype=np.float32)
    compare(Train(model, epochs=2, lr=0.05, momentum=0.5), inputs(model, data), 1e-4, "stacked")


@pytest.mark.parametrize(
    "model",
    [Model("cnn", (3, 16, 16), 5, hidden=8, dtype="float64"), Model("femnist_cnn", (1, 8, 8), 5, dtype="float64"),
     pytest.param(Model("resnet9", (3, 32, 32), 4, dtype="float64"), marks=pytest.mark.slow)],
    ids=lambda model: model.name,
)  # fmt: skip
def test_the_larger_networks_equal_sequential(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    given_to = inputs(model, clients(model.shape, [3, 4], model.classes))
    with monkeypatch.context() as patch:  # so that the large ones are stacked, too
        patch.setattr(fast, "LARGEST_IMAGE_NETWORK", 10**9)
        compare(Train(model, batch_size=2, lr=0.05, momentum=0.9), given_to, 1e-12, "stacked")


def test_frozen_parameters_stay() -> None:
    model = SMALL_MODELS["lenet5"]
    task = Train(model, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.1, frozen=("0.", "3."))
    given_to = inputs(model, clients(model.shape, [6, 9]), own=True)
    compare(task, given_to, 1e-12, "stacked")
    update = Engine().run(task, given_to)[0]["update"]
    for name, shape, offset in model.layout:
        moved = np.abs(update[offset : offset + int(np.prod(shape))]).max() > 0
        assert moved != name.startswith(("0.", "3."))


def test_freezing_all_or_nothing_is_refused() -> None:
    for frozen, words in [(("0.", "2."), "every parameter"), (("3.", "fc"), "none of the parameters")]:
        model = Model("two layers", (4,), 3, factory=lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)))
        with pytest.raises(InputError, match=f"training.frozen.*{words}.*0.weight, 0.bias, 2.weight, 2.bias"):
            Train(model, frozen=frozen)


@pytest.mark.slow
@given(
    st.sampled_from([*SMALL_MODELS, "norm"]), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.floats(0.01, 3.0),
    st.sampled_from([0.0, 0.3, 1.0]), st.booleans(),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_clipping_by_book_keeping_equals_clipping_sample_by_sample(
    name: str, sizes: list[int], clip: float, rate: float, own: bool
) -> None:
    model = SMALL_MODELS.get(name) or Model("norm", (2, 6, 6), 3, dtype="float64", factory=with_norm)
    task = Train(model, batch_size=4, lr=0.1, momentum=0.5, clip_norm=clip, sampling_rate=rate)
    compare(task, inputs(model, clients(model.shape, sizes), own), 1e-12, "stacked")


def with_norm() -> nn.Module:
    inner = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(inner, Residual(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.Tanh()), nn.Flatten(), nn.Linear(36, 3))


def test_clipping_holds_for_every_sample() -> None:
    """Batches of one: each step's movement is at most lr × clip_norm, whatever the sample."""
    model = SMALL_MODELS["lenet5"]
    data = clients(model.shape, [1, 1, 1])
    wild = [ClientData(one.id, one.x_train * 100.0, one.y_train, one.x_test, one.y_test) for one in data]
    for result in Engine().run(Train(model, batch_size=1, lr=1.0, clip_norm=0.5), inputs(model, wild, own=True)):
        assert float(np.linalg.norm(result["update"])) <= 0.5 * (1 + 1e-12)


def test_poisson_batches() -> None:
    """Each sample is in a batch with probability q: 4 000 draws, a two-sided binomial test at 1e-6; empty batches are legal."""
    model = SMALL_MODELS["linear"]
    (given_to,) = inputs(model, clients(model.shape, [40]))
    batches = Train(model, epochs=10, sampling_rate=0.1).batches(given_to)
    assert len(batches) == 100
    assert stats.binomtest(sum(len(batch) for batch in batches), 4000, 0.1).pvalue > 1e-6
    (tiny,) = inputs(model, clients(model.shape, [1]))
    assert any(len(batch) == 0 for batch in Train(model, epochs=5, sampling_rate=0.1).batches(tiny))
    compare(Train(model, epochs=5, sampling_rate=0.1), inputs(model, clients(model.shape, [1, 2, 5])), 1e-12, "stacked")


@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.sampled_from([0.5, 0.9, 1.0]), st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_poisson_batches_that_are_full_by_chance(sizes: list[int], rate: float, epochs: int) -> None:
    """They are of another number than epochs, and divided by the expected size: not for the span form."""
    model = SMALL_MODELS["mlp"]
    compare(Train(model, epochs, sampling_rate=rate), inputs(model, clients(model.shape, sizes)), 1e-12, "stacked")


class Odd(nn.Module):
    """A module that is no Sequential: torch's vmap takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.second(hidden * torch.sigmoid(hidden))  # type: ignore[no-any-return]


class Branching(nn.Module):
    """A module whose forward looks at values: only the plain loop takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out if out.sum() > 0 else 2 * out


def mixing() -> nn.Module:
    """BatchNorm without running statistics: a sample's output depends on its batch, so none may be padded."""
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize(("factory", "path"), [(Odd, "vmap"), (Branching, "sequential"), (mixing, "sequential")])
def test_any_module_works_unchanged(factory: Any, path: str) -> None:
    model = Model(f"mine {path}", (6,), 3, dtype="float64", factory=factory)
    compare(Train(model, batch_size=3, lr=0.1, momentum=0.5), inputs(model, clients((6,), [8, 5, 6, 9, 3, 8, 6])), 1e-12, path)


@pytest.mark.slow
def test_the_lstm_learns_in_the_plain_loop() -> None:
    rng = np.random.default_rng(0)
    data = []
    for i in range(5):
        start = rng.integers(4, size=(60, 1))
        x = ((start + np.arange(3)) % 4).astype(np.float32)  # words in a circle: what comes next is certain
        data.append(ClientData(i, x, ((x[:, -1] + 1) % 4).astype(np.int64), x[:20], ((x[:20, -1] + 1) % 4).astype(np.int64)))
    model = Model("lstm", (3,), 4, hidden=16)
    engine = Engine()
    results = engine.run(Train(model, epochs=30, lr=0.5, momentum=0.5), inputs(model, data))
    assert {path for _, path in engine.paths} == {"sequential"}
    evaluated = Evaluate(model).run(TaskInput(data[0], {"model": np.asarray(results[0]["trained"])}, {}, Streams(0, 0, 0)))
    assert evaluated["correct"] == 20
    with pytest.raises(InputError, match="word numbers"):
        _ = Model("lstm", (1, 4, 4), 4).dimension


def test_a_module_that_looks_stackable_but_is_not_is_found_out() -> None:
    """Linear before Flatten acts on the last axis: the trial catches what the layer list does not say."""
    model = Model("odd", (1, 4, 4), 3, dtype="float64", factory=lambda: nn.Sequential(nn.Linear(4, 2), nn.Flatten(), nn.Linear(8, 3)))
    compare(Train(model, batch_size=3, lr=0.1), inputs(model, clients((1, 4, 4), [5, 5])), 1e-12)


@given(st.lists(st.integers(1, 12), min_size=2, max_size=5), st.sampled_from(list(SMALL_MODELS)), st.booleans())
@settings(max_examples=20, deadline=None)
def test_gradients_equal_sequential(sizes: list[int], name: str, own: bool) -> None:
    model = SMALL_MODELS[name]
    compare(Gradient(model), inputs(model, clients(model.shape, sizes), own), 1e-12)


def test_losses_of_k_models() -> None:
    model = SMALL_MODELS["mlp"]
    data = clients(model.shape, [5, 30, 2, 17])
    models: list[Array] = [model.init(i) for i in range(3)]
    given_to = [TaskInput(one, {"model": models}, {}, Streams(0, 0, one.id)) for one in data]
    results = Engine().run(Losses(model), given_to)
    for one, result in zip(data, results, strict=True):
        expected = []
        for vector in models:
            evaluated = Evaluate(model, "train").run(TaskInput(one, {"model": vector}, {}, Streams(0, 0, 0)))
            expected.append(float(evaluated["loss"]) / len(one.y_train))
        np.testing.assert_allclose(result["losses"], expected, atol=1e-12)
        assert result["choice"] == np.argmin(expected)


def test_chunks_cover_everyone_once_and_group_like_sizes() -> None:
    model = SMALL_MODELS["linear"]
    rng = np.random.default_rng(0)
    given_to = inputs(model, clients(model.shape, [int(n) for n in rng.integers(1, 40, size=101)]))
    task = Train(model)
    pieces = chunks(task, given_to)
    assert sorted(i for piece in pieces for i in piece) == list(range(101))
    costs = [task.cost(given_to[i]) for piece in pieces for i in piece]
    assert costs == sorted(costs, reverse=True)
    backwards = chunks(task, given_to[::-1])
    assert [[given_to[i].data.id for i in piece] for piece in pieces] == [[given_to[::-1][i].data.id for i in piece] for piece in backwards]


@pytest.mark.slow
def test_workers_change_nothing() -> None:
    model = Model("lenet5", (1, 16, 16), 3)
    given_to = inputs(model, clients(model.shape, [9, 14, 3, 30, 12] * 9, dtype=np.float32))
    task = Train(model, batch_size=5, lr=0.1, momentum=0.5)
    alone = Engine().run(task, given_to)
    engine = Engine(workers=2)
    try:
        for _ in range(2):  # the second time, the data are already there
            together = engine.run(task, given_to)
            for a, b in zip(alone, together, strict=True):
                np.testing.assert_array_equal(a["update"], b["update"])
        broken = [TaskInput(given_to[0].data, {"model": np.full(model.dimension, np.nan, dtype=np.float32)}, {}, given_to[0].streams)] * 2
        with pytest.raises(TrainingDiverged, match="client 0"):
            engine.run(task, broken)
        engine.run(task, given_to[:3])
        assert engine._pool is not None
        engine._pool._processes[0].kill()
        engine._pool._processes[0].join()
        with pytest.raises(WorkerLost, match="ended by itself"):
            engine.run(task, given_to)
    finally:
        engine.close()


def test_an_engine_that_cannot_be_is_refused() -> None:
    for arguments, words in [
        ({"kind": "fast"}, "'fast'"),
        ({"workers": 0}, "workers = 0"),
        ({"device": "tpu"}, "'tpu'"),
    ]:
        with pytest.raises(InputError, match=words):
            Engine(**arguments)  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="no CUDA device"):
            Engine(device="cuda")
        assert Engine(device="auto").device == "cpu"


def test_a_federation_records_the_way_taken() -> None:
    model = SMALL_MODELS["lenet5"]
    fed = federation(clients(model.shape, [8, 8, 8]))
    fed.compute(Train(model, lr=0.1), {"model": model.init(0)})
    assert eye(fed).engine.paths == {("Train", "stacked" if compiled.library() is None else "native"): 3}


def test_no_more_processes_start_than_a_machine_bears(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many there are changes no result, so a configuration from a larger machine runs here, and is resumed here, too."""
    started: list[int] = []

    class Counted:
        def __init__(self, count: int) -> None:
            started.append(count)
            raise InputError("counted")

    monkeypatch.setattr("cflpriv.engine.run.Workers", Counted)
    monkeypatch.setattr("cflpriv.engine.run.os.cpu_count", lambda: 2)
    model = Model("mlp", (4,), 3, hidden=4)
    given_to = inputs(model, clients(model.shape, [5] * 40))
    for workers in (3, 512):
        with pytest.raises(InputError, match="counted"):
            Engine(workers=workers).run(Train(model, lr=0.1), given_to)
    assert started == [3, 32]
