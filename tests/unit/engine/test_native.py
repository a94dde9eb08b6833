"""The compiled kernel equals the plain loop, over random networks, options and ragged clients, and reads nothing outside of its arrays."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from checkout import ROOT
from drawn_networks import graphs
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from cflpriv.engine import Engine, Streams, TaskInput, compiled, native, step_noise
from cflpriv.engine.compute import Kind
from cflpriv.engine.device import Device, in_use
from cflpriv.engine.models import Model, Residual
from cflpriv.engine.run import chunks
from cflpriv.engine.sgd import Local, Options
from cflpriv.errors import CflprivWarning, TrainingDiverged
from cflpriv.tasks.evaluation import Evaluate
from cflpriv.tasks.training import Train
from cflpriv.types import Array, ClientData

pytestmark = pytest.mark.skipif(compiled.library() is None, reason="the kernel is not built, or this processor has no AVX2")

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}


def with_everything(dtype: Any) -> Model:
    """Odd sizes: padding, strides, pools that overlap and reach outside, layers without biases, and one output more than whole vectors."""
    return Model("everything", (3, 13, 11), 9, dtype=dtype, factory=_everything)


def _everything() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 7, (3, 2), (2, 1), (2, 1), bias=False), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(7, 17, 3, padding=1),
        nn.MaxPool2d(2, 1), nn.Tanh(), nn.Flatten(), nn.Linear(17 * 3 * 5, 25), nn.Sigmoid(), nn.Linear(25, 9, bias=False),
    )  # fmt: skip


def with_a_residual(dtype: Any) -> Model:
    return Model("residual", (3, 12, 12), 10, dtype=dtype, factory=_residual_network)


def _residual_network() -> nn.Module:
    """Dense convolutions of odd widths and strides, sums, GroupNorm, pools of both kinds over values of other layers, features added."""
    body = [nn.Conv2d(18, 18, 3, padding=1, bias=False), nn.GroupNorm(3, 18), nn.ReLU(), nn.Conv2d(18, 18, (1, 3), padding=(0, 1))]
    return nn.Sequential(
        nn.GroupNorm(3, 3), nn.Conv2d(3, 18, (3, 2), (1, 2), (2, 1)), nn.AvgPool2d(3, 1, 1), Residual(*body), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(18, 9, 3, 2, 1), nn.Sigmoid(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), Residual(nn.Linear(9, 9), nn.Tanh()),
        nn.Linear(9, 10),
    )  # fmt: skip


@st.composite
def networks(draw: st.DrawFn) -> Model:
    """Convolutions with their pools, then linear layers, of any sizes, with and without biases."""
    layers: list[nn.Module] = []
    shape: tuple[int, ...] = (draw(st.integers(1, 3)), draw(st.integers(5, 12)), draw(st.integers(5, 12)))
    sides = st.tuples(st.integers(1, 4), st.integers(1, 4))
    x = torch.zeros(1, *shape)
    for _ in range(draw(st.integers(0, 2))):
        size, pool = draw(sides), draw(st.integers(1, 3))
        padding = (draw(st.integers(0, 2)), draw(st.integers(0, 1)))
        stride = (draw(st.integers(1, 2)), draw(st.integers(1, 2)))
        convolution = nn.Conv2d(x.shape[1], draw(st.integers(1, 11)), size, stride, padding, bias=draw(st.booleans()))
        pooling = nn.MaxPool2d(pool, draw(st.integers(1, 3)), draw(st.integers(0, pool // 2)))
        order = draw(st.sampled_from(["relu first", "relu last", "tanh last", "none"]))
        block = [convolution, *([nn.ReLU()] * (order == "relu first")), pooling, *([nn.ReLU()] * (order == "relu last"))]
        block += [nn.Tanh()] * (order == "tanh last")
        try:
            x = nn.Sequential(*block)(x)
        except RuntimeError:  # nothing is left of the image
            break
        layers += block
    layers.append(nn.Flatten())
    width = x[0].numel()
    for _ in range(draw(st.integers(0, 2))):
        units = draw(st.integers(1, 40))
        layers += [nn.Linear(width, units, bias=draw(st.booleans())), ACTIVATIONS[draw(st.sampled_from(list(ACTIVATIONS)))]()]
        width = units
    classes = draw(st.integers(2, 11))
    layers.append(nn.Linear(width, classes, bias=draw(st.booleans())))
    module = nn.Sequential(*layers)
    return Model("drawn", shape, classes, dtype="float64", factory=partial(deepcopy, module))


training = st.fixed_dictionaries({
    "epochs": st.integers(1, 3), "batch_size": st.integers(0, 7), "lr": st.floats(0.01, 0.1), "momentum": st.sampled_from([0.0, 0.5, 0.9]),
    "weight_decay": st.sampled_from([0.0, 0.01]), "prox": st.sampled_from([0.0, 0.1]), "sampling_rate": st.sampled_from([0.0, 0.0, 0.3]),
    "clip_norm": st.sampled_from([0.0, 0.0, 0.2, 3.0]),
})  # fmt: skip
sizes = st.lists(st.integers(1, 12), min_size=1, max_size=5)


def inputs(model: Model, counts: list[int], extra: bool = False) -> list[TaskInput]:
    rng = np.random.default_rng(len(counts))
    vectors = {key: (0.01 * rng.normal(size=model.dimension)).astype(model.dtype) for key in ("anchor", "correction")} if extra else {}
    made = []
    for i, n in enumerate(counts):
        x, y = rng.random((n, *model.shape)).astype(model.dtype), rng.integers(model.classes, size=n)
        made.append(
            TaskInput(ClientData(i, x, y, x[:1], y[:1]), {"model": model.init(i), **vectors}, {}, Streams(1, 2, i), secret=bytes([i]) * 32)
        )
    return made


def updates(engine: Engine, task: Train, given_to: list[TaskInput]) -> list[Array]:
    return [np.asarray(result["update"]) for result in engine.run(task, given_to)]


@contextmanager
def served() -> Iterator[None]:
    """While inside, the kernel takes every model that it knows, also where torch is faster."""
    with patch.object(native, "_is_faster", lambda model, pairs: native.described(model) is not None):
        yield


def check(model: Model, chosen: dict[str, Any], counts: list[int], extra: bool, frozen: bool) -> None:
    task = Train(model, **chosen)
    if frozen and len(model.layout) > 1 and not task.clip_norm:
        task = replace(task, frozen=(model.layout[0][0],))
    rng, engine = np.random.default_rng(0), Engine()
    given_to = [  # at a new model's zeros, rounding alone decides the side of a kink
        replace(one, params={**one.params, "model": one.array("model") + rng.normal(0, 0.03, model.dimension)})
        for one in inputs(model, counts, extra)
    ]
    try:
        plain = updates(Engine("sequential"), task, given_to)
    except TrainingDiverged:
        assume(False)
    with served():
        made = updates(engine, task, given_to)
    moved = [replace(one, params={**one.params, "model": one.array("model") * (1 + 1e-14)}) for one in given_to]
    for ours, theirs, other in zip(made, plain, updates(Engine("sequential"), task, moved), strict=True):
        assert ours.dtype == theirs.dtype
        amplified = np.abs(theirs - other).max()  # rounding of 1e-14 in the first parameters, at the end of training
        assume(amplified < 1e-10)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12 + amplified)
    assert {path for _, path in engine.paths} <= {"native", "span"}


@given(networks() | graphs(), training, sizes, st.booleans(), st.booleans())
@settings(max_examples=20)
def test_the_kernel_equals_the_plain_loop(model: Model, chosen: dict[str, Any], counts: list[int], extra: bool, frozen: bool) -> None:
    check(model, chosen, counts, extra, frozen)


@pytest.mark.slow
@given(networks() | graphs(), training, sizes, st.booleans(), st.booleans())
@settings(max_examples=500)
def test_it_does_in_many_more_cases(model: Model, chosen: dict[str, Any], counts: list[int], extra: bool, frozen: bool) -> None:
    check(model, chosen, counts, extra, frozen)


@pytest.mark.parametrize(
    "model", [Model("linear", (1, 28, 28), 10), Model("mlp", (1, 28, 28), 10), Model("lenet5", (1, 28, 28), 10),
              Model("lenet5", (3, 32, 32), 10, mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 0.5)),
              Model("residual", (3, 12, 12), 10, factory=_residual_network)], ids=lambda model: f"{model.name} {model.shape}",
)  # fmt: skip
def test_float32_is_within_rounding(model: Model) -> None:
    """Relative to the largest number of the update. These clients meet no kink of a ReLU and no tie of a pool."""
    given_to, engine, most = inputs(model, [23, 9]), Engine(), 1e-5 if model.name == "residual" else 1e-6
    task = Train(model, epochs=2, batch_size=10, lr=0.05, momentum=0.5, weight_decay=0.001)
    for ours, theirs in zip(updates(engine, task, given_to), updates(Engine("sequential"), task, given_to), strict=True):
        assert np.abs(ours - theirs).max() <= most * np.abs(theirs).max()
    assert engine.paths == {("Train", "native"): 2}


def test_an_update_has_the_same_bits_beside_any_other_clients() -> None:
    model = Model("lenet5", (1, 16, 16), 3)
    task, given_to = Train(model, epochs=2, batch_size=4, momentum=0.5), inputs(model, [9, 4, 12, 7, 5, 9])
    for ours, given_one in zip(updates(Engine(), task, given_to), given_to, strict=True):
        np.testing.assert_array_equal(ours, updates(Engine(), task, [given_one])[0])


@pytest.mark.slow
def on_threads(pool: ThreadPoolExecutor, many: int, some: Callable[[], None], parts: int) -> None:
    assert parts >= 1
    for thread in [pool.submit(copy_context().run, some) for _ in range(many)]:
        thread.result()


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, clipped = (
        Model("lenet5", (1, 16, 16), 3),
        {"clip_norm": 1.0, "noise_multiplier": 1.0, "sampling_rate": 0.5, "public_samples": 20},
    )
    given_to = inputs(model, [40, 3, 35, 20, 1, 28])
    for options in ({}, clipped):
        task = Train(model, epochs=2, **options)  # type: ignore[arg-type]
        monkeypatch.setattr(native, "together", lambda some, parts: some())
        alone = updates(Engine(), task, given_to)
        for many in (2, 5, 16):
            with ThreadPoolExecutor(many) as pool:
                monkeypatch.setattr(native, "together", partial(on_threads, pool, many))
                for ours, theirs in zip(updates(Engine(), task, given_to), alone, strict=True):
                    np.testing.assert_array_equal(ours, theirs)


def test_only_processes_get_the_last_chunk_in_halves() -> None:
    model = Model("lenet5", (1, 16, 16), 3)
    for task, halves in ((Train(model, batch_size=2), False), (Train(model, batch_size=0), True), (Evaluate(model), True)):
        given_to = inputs(model, [8] * 10)
        alone, shared = chunks(task, given_to), chunks(task, given_to, processes=2)
        assert sorted(place for piece in alone for place in piece) == list(range(10))
        assert (alone == shared) is halves
        assert chunks(task, given_to, "torch", Device("cpu", native=False)) == shared, (
            "where the kernel does not train, results depend on it"
        )


@pytest.mark.parametrize(("worth", "together", "parts"), [(0, 1 << 40, 6), (0, 2, 2), (0, 0, 1), (1 << 40, 1 << 40, 1)])
def test_short_work_and_large_models_have_fewer_threads(worth: int, together: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = Model("lenet5", (1, 16, 16), 3), list[int]()
    monkeypatch.setattr(native, "WORTH_A_THREAD", worth)
    monkeypatch.setattr(native, "TOGETHER", together * model.dimension)
    monkeypatch.setattr(native, "together", lambda some, parts: [asked.append(parts), some()])  # type: ignore[func-returns-value]
    updates(Engine(), Train(model), inputs(model, [4] * 6))
    assert max(asked) == parts


def test_an_update_has_the_same_bits_in_any_number_of_workers() -> None:
    model = Model("lenet5", (1, 16, 16), 3)
    task, given_to = Train(model, epochs=2, batch_size=4, momentum=0.5), inputs(model, [9, 4, 12, 7, 5, 9])
    two = Engine(workers=2)
    try:
        for ours, theirs in zip(updates(two, task, given_to), updates(Engine(), task, given_to), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert two.paths == {("Train", "native"): 6}
    finally:
        two.close()


@given(networks() | graphs(), sizes)
@settings(max_examples=8)
def test_outputs_are_the_module_s(model: Model, counts: list[int]) -> None:
    vectors = [model.init(i) for i in range(len(counts))]
    samples = [torch.from_numpy(client.data.x_train) for client in inputs(model, [10 * count for count in counts])]
    for vector, x, made in zip(vectors, samples, native.outputs(model, vectors, samples), strict=True):
        with torch.no_grad():
            torch.testing.assert_close(made, model.load(vector)(x), rtol=0, atol=1e-12)


def test_networks_for_images_are_evaluated_by_the_kernel() -> None:
    """Others stay with torch, which is quicker for small ones, for many samples under one model, and for dense convolutions."""
    for name, path in (("lenet5", "native"), ("mlp", "stacked")):
        model = Model(name, (1, 16, 16), 3)
        kernel, plain, given_to = Engine(), Engine("sequential"), inputs(model, [40, 3])
        for ours, theirs in zip(kernel.run(Evaluate(model), given_to), plain.run(Evaluate(model), given_to), strict=True):
            np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-5)
        assert kernel.paths == {("Evaluate", path): 2}


@pytest.mark.parametrize("name", ["mlp", "lenet5"])
def test_noise_is_rounded_to_the_grid_as_torch_rounds_it(name: str) -> None:
    """Equal bits with both: sums that differ in their last digits are rounded to the same multiples of the grid."""
    model = Model(name, (1, 16, 16), 3, dtype="float64")
    task = Train(model, 2, 0, 0.1, 0.5, 0.01, clip_norm=0.5, sampling_rate=0.3, noise_multiplier=1.0, public_samples=30)
    kernel, without, given_to = Engine(), Engine("torch"), inputs(model, [30, 1, 12])
    ours, theirs, plain = (updates(engine, task, given_to) for engine in (kernel, without, Engine("sequential")))
    assert (kernel.paths, without.paths) == ({("Train", "native"): 3}, {("Train", "stacked"): 3})
    for a, b, c in zip(ours, theirs, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)
        np.testing.assert_allclose(a, c, rtol=0, atol=1e-12)


def test_a_sample_without_a_finite_gradient_adds_nothing() -> None:
    model = Model("lenet5", (1, 16, 16), 3)
    task, (client,) = Train(model, clip_norm=0.5, sampling_rate=1.0, noise_multiplier=1.0, public_samples=7, shares=2), inputs(model, [7])
    kept = np.arange(7) != 3
    without = replace(
        client, data=ClientData(0, client.data.x_train[kept], client.data.y_train[kept], client.data.x_test, client.data.y_test)
    )
    client.data.x_train[3] = np.inf
    (first,), (second,) = updates(Engine(), task, [client]), updates(Engine(), task, [without])
    np.testing.assert_array_equal(first, second)


def test_a_client_that_diverges_does_not_reach_the_next() -> None:
    model = Model("lenet5", (1, 16, 16), 3)
    task, (first, second) = Train(model, batch_size=4, on_divergence="skip"), inputs(model, [6, 6])
    first.data.x_train[2] = np.inf
    broken, whole = Engine().run(task, [first, second])
    assert broken == {}
    np.testing.assert_array_equal(whole["update"], updates(Engine(), task, [second])[0])
    with pytest.raises(TrainingDiverged):
        Engine().run(replace(task, on_divergence="stop"), [first])


def pooled(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), *between, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3))


def test_networks_that_the_kernel_does_not_know_stay_with_torch() -> None:
    others = {
        "dropout": nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Dropout()),
        "ends otherwise": nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.ReLU()),
        "last axis": nn.Sequential(nn.Linear(8, 2), nn.Flatten(), nn.Linear(16, 3)),
        "dilated": nn.Sequential(nn.Conv2d(1, 4, 2, dilation=2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)),
    }
    assert native.described(Model("known", (1, 8, 8), 3, factory=lambda: pooled(nn.ReLU()))) is not None
    for name, module in others.items():
        assert native.described(Model(name, (1, 8, 8), 3, factory=partial(deepcopy, module))) is None, name


def test_networks_that_torch_trains_faster_stay_with_torch() -> None:
    """Those with wide convolutions whose gradient is dense. Clipping by torch costs more, so the kernel takes wider ones."""

    def wide(channels: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.Tanh(), nn.Conv2d(32, channels, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16 * channels, 3)
        )

    for channels, plain, clipped in ((32, True, True), (33, False, True), (257, False, False)):
        model = Model("wide", (1, 8, 8), 3, factory=partial(wide, channels))
        assert (native.serves(model, Options(0.1)), native.serves(model, Options(0.1, clip_norm=1.0))) == (plain, clipped), channels
        assert not native.evaluates(model)
    assert native.evaluates(Model("known", (1, 8, 8), 3, factory=lambda: pooled(nn.ReLU())))
    resnet = Model("resnet9", (3, 32, 32), 3)
    assert not native.serves(resnet, Options(0.1))
    assert not native.serves(resnet, Options(0.1, clip_norm=1.0))


def test_options_that_the_kernel_lacks_stay_with_torch() -> None:
    model = Model("mlp", (1, 5, 5), 3, hidden=4)
    assert native.serves(model, Options(0.1, 0.5, 0.01, 0.1))
    assert native.serves(model, Options(0.1, clip_norm=1.0, grid=2.0**-20, deviation=1.0))
    half_frozen = {"clip_norm": 1.0, "frozen": (True, False, False, False)}
    for other in ({"optimizer": "adam"}, {"maml_lr": 0.1}, half_frozen, {"pull": 0.1}, {"grid": 0.1, "deviation": 1.0}):
        assert not native.serves(model, Options(0.1, **other))
    assert not native.serves(replace(model, classes=1, loss="squared"), Options(0.1))


@pytest.mark.parametrize(("kind", "path"), [("torch", "stacked"), ("sequential", "sequential")])
def test_the_other_engines_use_no_library(kind: Kind, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for training nor for its noise."""

    def fails() -> None:
        raise AssertionError

    for module in (native, step_noise):
        monkeypatch.setattr(module, "library", fails)
    model, engine = Model("lenet5", (1, 16, 16), 3), Engine(kind)
    private: dict[str, Any] = {"clip_norm": 0.5, "sampling_rate": 0.3, "noise_multiplier": 1.0, "public_samples": 6}
    for task in (Train(model, batch_size=4), Train(model, **private)):
        engine.run(task, inputs(model, [6, 6]))
    assert engine.paths == {("Train", path): 4}
    with pytest.raises(AssertionError):
        Engine().run(Train(model, **private), inputs(model, [6, 6]))


def test_the_plain_loop_of_the_engine_takes_its_noise_from_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that the kernel and the stacked form lack."""
    model = Model("sigmoid", (4,), 3, factory=lambda: nn.Sequential(nn.Linear(4, 3), nn.GELU()))
    task = Train(model, clip_norm=0.5, sampling_rate=0.3, noise_multiplier=1.0, public_samples=6)
    engine, filled, fill = Engine(), list[bool](), step_noise._fill

    def counted(*arguments: Any) -> None:
        filled.append(in_use().native)
        fill(*arguments)

    monkeypatch.setattr(step_noise, "_fill", counted)
    engine.run(task, inputs(model, [6, 6]))
    assert engine.paths == {("Train", "sequential"): 2}
    assert filled
    assert all(filled)


def test_the_trial_finds_weights_that_leak_from_their_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by a thousandth in the second step alone, as padding once was, while the first step is right."""
    model, right = Model("lenet5", (1, 16, 16), 3), native.train

    def leaking(model: Model, clients: list[Local], options: Options) -> list[Array]:
        (whole,) = right(model, clients, options)
        (first,) = right(model, [replace(clients[0], batches=clients[0].batches[:1])], options)
        return [first + (whole - first) * 1.001]

    native._agrees.cache_clear()
    monkeypatch.setattr(native, "train", leaking)
    assert not native.serves(model, Options(0.1))
    native._agrees.cache_clear()
    monkeypatch.undo()
    assert native.serves(model, Options(0.1))


def local(model: Model, **other: Any) -> Local:
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.random((5, *model.shape), dtype=np.float32)), torch.from_numpy(rng.integers(model.classes, size=5))
    return replace(Local(x, y, [np.array([0, 4])], model.init(0)), **other)


@pytest.mark.parametrize(
    ("other", "error", "words"),
    [
        ({"batches": [np.array([0, 5])]}, IndexError, "sample 5 of 5"),
        ({"batches": [np.array([-1])]}, IndexError, "sample -1 of 5"),
        ({"y": torch.tensor([0, 1, 2, 3, 0])}, IndexError, "labels from 0 to 3, expected 0 to 2"),
        ({"y": torch.tensor([0, 1, 2, -1, 0])}, IndexError, "labels from -1"),
        ({"y": torch.zeros(4, dtype=torch.int64)}, ValueError, "samples of shape"),
        ({"y": torch.zeros(5, dtype=torch.int32)}, ValueError, "labels"),
        ({"x": torch.zeros(5, 1, 4, 5)}, ValueError, "samples of shape"),
        ({"x": torch.zeros(5, 1, 4, 4, dtype=torch.float64)}, ValueError, "float64"),
        ({"start": np.zeros(7, np.float32)}, ValueError, "start: shape"),
        ({"anchor": np.zeros(7, np.float32)}, ValueError, "anchor: shape"),
        ({"correction": np.zeros(7, np.float32)}, ValueError, "correction: shape"),
    ],
)
def test_what_would_reach_outside_of_an_array_is_refused(other: dict[str, Any], error: type[Exception], words: str) -> None:
    model = Model("mlp", (1, 4, 4), 3, hidden=5)
    with pytest.raises(error, match=words):
        native.train(model, [local(model, **other)], Options(0.1, prox=0.1))


def test_arrays_in_any_order_are_read_as_they_are() -> None:
    model = Model("mlp", (1, 4, 4), 3, hidden=5)
    plain = local(model, batches=[np.array([0, 3]), np.array([4, 1, 2])])
    turned = replace(
        plain, x=plain.x.transpose(2, 3).contiguous().transpose(2, 3), batches=[np.array([0, 9, 3, 9])[::2], np.array([4, 1, 2], np.int32)]
    )
    (first,), (second,) = (native.train(model, [client], Options(0.1)) for client in (plain, turned))
    np.testing.assert_array_equal(first, second)


def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changed = tmp_path / "native.cpp"
    changed.write_bytes(compiled.SOURCES[0].read_bytes() + b"\n")
    compiled.library.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "SOURCES", (changed, *compiled.SOURCES[1:]))
        with pytest.warns(CflprivWarning, match="other sources"):
            assert compiled.library() is None
    compiled.library.cache_clear()
    assert compiled.library() is not None


def test_a_missing_library_and_a_processor_without_avx2_leave_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = Model("lenet5", (1, 16, 16), 3)
    for change in ("file", "processor"):
        compiled.library.cache_clear()
        with monkeypatch.context() as patch:
            if change == "file":
                patch.setattr(compiled, "FILE", tmp_path / "libnative.so")
            else:
                patch.setattr("platform.machine", lambda: "x86_64")
                patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
            engine = Engine()
            engine.run(Train(model, batch_size=4), inputs(model, [6, 6]))
            assert engine.paths == {("Train", "stacked"): 2}
        compiled.library.cache_clear()


CHILD = """
import sys
from pathlib import Path

from cflpriv.engine import compiled, native

compiled.FILE = Path(sys.argv[1])
assert compiled.library() is not None
import test_native

private = {"clip_norm": 0.5, "sampling_rate": 0.3, "noise_multiplier": 1.0, "public_samples": 40, "momentum": 0.5}
models = [make(dtype) for make in (test_native.with_everything, test_native.with_a_residual) for dtype in ("float32", "float64")]
for model in models:
    pulled = {"momentum": 0.9, "weight_decay": 0.01, "prox": 0.1, "batch_size": 7}
    for options in ({}, {"momentum": 0.5}, pulled, {"sampling_rate": 0.2}, {"clip_norm": 0.1}, private):
        engine = test_native.Engine()
        engine.run(test_native.Train(model, epochs=2, **options), test_native.inputs(model, [1, 13, 40], extra=True))
        assert engine.paths == {("Train", "native"): 3}, engine.paths
    vectors, samples = [model.init(i) for i in range(2)], [model.inputs(given.data.x_train) for given in test_native.inputs(model, [1, 70])]
    native.outputs(model, vectors, samples)
print("done")
"""


NOISE_CHILD = """
import sys
from pathlib import Path

import torch

from cflpriv.engine import compiled, step_noise

compiled.FILE = Path(sys.argv[1])
assert compiled.library() is not None
keys = step_noise.keys_of([bytes([i]) * 32 for i in range(3)])
for count in (1, 7, 64, 65_536 + 13):
    assert step_noise.normals(keys, torch.tensor([1]), count, 2.0).isfinite().all()
print("done")
"""


def sanitised(folder: Path, child: str, old: str = "", new: str = "") -> subprocess.CompletedProcess[str]:
    """A process with the library, built with the address and undefined-behaviour sanitisers; with `new` for `old` in its sources."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    sources = {source.name: source.read_text(encoding="utf-8") for source in compiled.SOURCES}
    assert sum(text.count(old) for text in sources.values()) == 1 or not old
    for name, text in sources.items():
        (folder / name).write_text(text.replace(old, new) if old else text, encoding="utf-8")
    library = folder / "libnative.so"
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in compiled.SOURCES)).hexdigest()
    flags = ["-std=c++17", "-O1", "-g", "-mavx2", "-mfma", "-fPIC", "-shared", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    if platform.machine().lower() not in compiled.X86:
        flags = [flag for flag in flags if not flag.startswith("-m")]
    subprocess.run([compiler, *flags, f'-DSOURCES="{digest}"', str(folder / compiled.SOURCES[0].name), "-o", str(library)], check=True)
    runtime = [
        subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, encoding="utf-8", check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    here = Path(__file__)
    path = os.pathsep.join(str(folder) for folder in (ROOT, here.parent, ROOT / "tests" / "helpers"))
    settings_of_sanitisers = {"LD_PRELOAD": " ".join(runtime), "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return subprocess.run(
        [sys.executable, "-c", child, str(library)], env=os.environ | settings_of_sanitisers | {"PYTHONPATH": path}, capture_output=True,
        encoding="utf-8", check=False, cwd=folder,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("child", [CHILD, NOISE_CHILD], ids=["training", "noise"])
def test_sanitisers_find_no_access_outside_of_memory_and_nothing_undefined(child: str, tmp_path: Path) -> None:
    done = sanitised(tmp_path, child)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "done\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("child", "old", "new"),
    [
        (NOISE_CHILD, "for (int64_t i = 0; i < count; i++) {", "for (int64_t i = 0; i <= count; i++) {"),
        (CHILD, "for (size_t k = 0; k < count; k++, sum += step)", "for (size_t k = 0; k <= count; k++, sum += step)"),
    ],
    ids=["normals", "noise that is added"],
)
def test_sanitisers_find_a_number_too_many(child: str, old: str, new: str, tmp_path: Path) -> None:
    done = sanitised(tmp_path, child, old, new)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


def test_a_layer_whose_weight_is_not_that_of_its_settings_stays_with_torch() -> None:
    """A head cut to three classes keeps its `out_features`; the kernel would write beyond the vector."""

    def cut() -> nn.Module:
        head = nn.Linear(16, 40)
        head.weight, head.bias = nn.Parameter(head.weight[:3].detach()), nn.Parameter(head.bias[:3].detach())
        return nn.Sequential(nn.Flatten(), head)

    model = Model("cut", (1, 4, 4), 3, dtype="float64", factory=cut)
    assert native.described(model) is None
    given_to = inputs(model, [6, 5])
    for one, other in zip(Engine().run(Train(model), given_to), Engine("sequential").run(Train(model), given_to), strict=True):
        np.testing.assert_allclose(one["update"], other["update"], rtol=0, atol=1e-12)


ODD_POOLS: Any = [
    {"kernel_size": (2,)},
    {"kernel_size": np.int64(2)},
    {"kernel_size": 2, "stride": ()},
    {"kernel_size": 2, "padding": (1,)},
]


@pytest.mark.parametrize("setting", ODD_POOLS, ids=str)
def test_settings_that_torch_reads_in_a_way_of_its_own_do_not_stop_training(setting: dict[str, Any]) -> None:
    pool = nn.MaxPool2d(**setting)
    side = pool(torch.zeros(1, 2, 6, 6)).shape[-1]
    layers = nn.Sequential(nn.Conv2d(1, 2, 3), pool, nn.Flatten(), nn.Linear(2 * side * side, 3))
    model = Model("pooled", (1, 8, 8), 3, factory=lambda: deepcopy(layers))
    assert len(Engine().run(Train(model, batch_size=4), inputs(model, [6, 5]))) == 2


def test_a_class_without_any_probability_has_no_slope() -> None:
    """At a score 1,000 below the largest the exponential is 0, as torch's; times a large input anything else would move the weights."""
    model = Model("linear", (4,), 3, dtype="float64")
    start = np.zeros(model.dimension)
    start[-3] = 1000.0
    x = torch.full((1, 4), 1e300, dtype=torch.float64)
    client = Local(x, torch.zeros(1, dtype=torch.int64), [np.zeros(1, np.int64)], start)
    assert np.abs(native.train(model, [client], Options(0.1))[0]).max() == 0.0
