"""One sample more moves a clipped sum by at most the clip norm, at any parameters, also those that an optimiser finds for it."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from cflpriv.engine import Engine, Streams, TaskInput, clipped_sums, compiled, fast
from cflpriv.engine.clipped_sums import LARGEST_BLOCK, block_size
from cflpriv.engine.compute import Kind
from cflpriv.engine.device import CPU
from cflpriv.engine.models import Model
from cflpriv.privacy.private_signatures import NoisyGradient, NoisyMeanGradient
from cflpriv.tasks.evaluation import sample_losses
from cflpriv.tasks.training import Train
from cflpriv.types import Array, ClientData

MOST = 1.001
KINDS: tuple[Kind, ...] = ("auto", "torch", "sequential")
"""With the compiled kernel, where it serves; by torch in blocks; sample by sample."""
SAMPLES = 37


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 13), nn.Tanh(), nn.Linear(13, 5)
    )


MODELS = {
    "linear": Model("linear", (60,), 5),
    "odd widths": Model("mlp", (61,), 5, hidden=37),
    "wide": Model("mlp", (784,), 10, hidden=200),
    "float64": Model("mlp", (61,), 5, hidden=7, dtype="float64"),
    "lenet5": Model("lenet5", (1, 16, 16), 3),
    "group norm": Model("grouped", (1, 8, 8), 5, factory=grouped),
    "numbers": Model("mlp", (30,), 1, hidden=9, loss="squared"),
    "lstm": Model("lstm", (6,), 3, hidden=5),
}
VIEWED = {
    "linear, two views": (Model("linear", (1, 9, 9), 5), ("flip",)),
    "mlp, ten views": (Model("mlp", (3, 8, 8), 5, hidden=13), ("flip", "shift")),
    "lenet5, five views": (Model("lenet5", (2, 16, 16), 3), ("shift",)),
    "group norm, two views": (Model("grouped", (1, 8, 8), 5, hidden=1, factory=grouped), ("flip",)),
}
AUGMENT = dict(VIEWED.values())
MODELS |= {name: model for name, (model, _) in VIEWED.items()}
WAYS: dict[str, tuple[Kind, ...]] = {"lstm": ("sequential",), **dict.fromkeys(VIEWED, ("torch",)), "linear, two views": KINDS}


def data_of(model: Model, samples: int, seed: int) -> ClientData:
    rng = np.random.default_rng(seed)
    x = rng.random((samples, *model.shape)) if model.name != "lstm" else rng.integers(0, 3, (samples, *model.shape))
    y = rng.integers(0, model.classes, samples) if model.classes > 1 else rng.random(samples)
    return ClientData(0, x.astype(np.float32), y, x[:1].astype(np.float32), y[:1])


def left_out(data: ClientData, place: int) -> ClientData:
    keep = np.arange(len(data.y_train)) != place
    return ClientData(0, data.x_train[keep], data.y_train[keep], data.x_test, data.y_test)


def given(data: ClientData, theta: Array) -> TaskInput:
    return TaskInput(data, {"model": theta}, {}, Streams(0, 0, 0), secret=b"s" * 32)


def total(model: Model, theta: Array, data: ClientData, kind: Kind = "auto") -> Array:
    """The sum (d,) of clipped gradients of a private step, before its noise."""
    task = Train(
        model, lr=1.0, clip_norm=1.0, sampling_rate=1.0, noise_multiplier=1.0, public_samples=SAMPLES, shares=2,
        augment=AUGMENT.get(model, ()),
    )  # fmt: skip
    return SAMPLES * np.asarray(Engine(kind).run(task, [given(data, theta)])[0]["update"], np.float64)


def shift(model: Model, theta: Array, data: ClientData, kind: Kind = "auto") -> float:
    """By how many clip norms the first, a middle or the last sample moves the sum, at most."""
    whole, places = total(model, theta, data, kind), (0, len(data.y_train) // 2, len(data.y_train) - 1)
    return max(float(np.linalg.norm(whole - total(model, theta, left_out(data, place), kind))) for place in places)


def cancelling(model: Model, scale: float, seed: int) -> Array:
    """Parameters whose last layer has equal and large rows."""
    theta, rng = model.init(seed).copy(), np.random.default_rng(seed)
    shape, offset = [(shape, offset) for _, shape, offset in model.layout if len(shape) == 2][-1]
    theta[offset : offset + shape[0] * shape[1]] = np.tile(rng.standard_normal(shape[1]) * scale, shape[0])
    return theta


def at_the_kink(model: Model, data: ClientData, scale: float) -> Array:
    """Parameters of a network with one hidden layer whose units are zero, up to rounding, at one sample each."""
    theta, x = model.init(0).copy(), model.inputs(data.x_train).double().flatten(1).numpy()
    (_, shape, at), (_, _, bias), (_, _, last) = model.layout[:3]
    weights = theta[at : at + shape[0] * shape[1]].reshape(shape).astype(np.float64)
    theta[bias : bias + shape[0]] = [-weights[i] @ x[i % len(x)] for i in range(shape[0])]
    theta[last:] *= scale
    return theta


def searched(model: Model, data: ClientData, steps: int, seed: int, kind: Kind) -> Iterator[float]:
    """An evolution of parameters towards those at which a sample moves the sum most: the figure of each that was tried."""
    rng, best, worst = np.random.default_rng(seed), cancelling(model, 1e5, seed), 0.0
    for step in range(steps):
        theta = best * np.where(rng.random(len(best)) < 0.1, rng.choice([-1.0, 0.5, 2.0, 10.0], len(best)), 1.0) if step else best
        if step % 3 == 2:  # equal rows again, at another scale
            theta = cancelling(model, float(10 ** rng.uniform(2, 9)), seed + step)
        now = shift(model, np.clip(theta, -1e9, 1e9).astype(model.dtype), data, kind)
        if now > worst:
            best, worst = theta, now
        yield now


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=pytest.mark.slow if kind == "sequential" and name not in ("mlp", "lstm") else ())
        for name in MODELS
        for kind in KINDS
        if kind in WAYS.get(name, KINDS)
    ],
)
def test_one_sample_moves_the_sum_by_its_clip_norm_at_cancelling_parameters(name: str, kind: Kind) -> None:
    model = MODELS[name]
    for scale in (1e3, 1e5, 1e7, 1e9):
        assert shift(model, cancelling(model, scale, 1), data_of(model, SAMPLES, 0), kind) <= MOST


@pytest.mark.parametrize("kind", ["auto", "torch"])
@pytest.mark.parametrize("name", ["odd widths", "wide", "float64"])
def test_it_does_at_the_kinks_of_hidden_units(name: str, kind: Kind) -> None:
    data = data_of(MODELS[name], SAMPLES, 3)
    for scale in (1.0, 1e4):
        assert shift(MODELS[name], at_the_kink(MODELS[name], data, scale), data, kind) <= MOST


@pytest.mark.parametrize(
    ("name", "kind"), [("linear", "auto"), ("linear", "torch"), ("linear, two views", "torch"), ("group norm, two views", "torch")]
)
def test_a_search_gets_no_further(name: str, kind: Kind) -> None:
    model = MODELS[name]
    assert max(searched(model, data_of(model, SAMPLES, 5), 40, 0, kind)) <= MOST


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "torch"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "lstm"])
def test_a_long_search_gets_no_further(name: str, kind: Kind) -> None:
    for seed in range(3):
        assert max(searched(MODELS[name], data_of(MODELS[name], SAMPLES + seed, seed), 100, seed, kind)) <= MOST


@pytest.mark.skipif(compiled.library() is None, reason="the kernel is not built, or this processor has no AVX2")
@pytest.mark.parametrize("name", ["linear", "odd widths", "wide", "float64", "lenet5"])
def test_these_are_sums_of_the_compiled_kernel(name: str) -> None:
    """Which "auto" is above. And one sample's sum has the same bits at every place and beside any others, whose sums are exact zeros."""
    model, data, theta = MODELS[name], data_of(MODELS[name], SAMPLES, 7), cancelling(MODELS[name], 1e3, 1)
    alone = total(model, theta, ClientData(0, data.x_train[:1], data.y_train[:1], data.x_test, data.y_test))
    assert np.abs(alone).max() > 0
    for place in (0, 5, SAMPLES - 1):
        x, y = data.x_train.copy(), data.y_train.copy()
        y[place], one = y[0], ClientData(0, x, y, data.x_test, data.y_test)
        x[:], x[place] = np.nan, data.x_train[0]  # the others have no finite norm and add nothing
        np.testing.assert_array_equal(alone, total(model, theta, one))
    engine = Engine()
    task = Train(model, lr=1.0, clip_norm=1.0, sampling_rate=1.0, noise_multiplier=1.0, public_samples=SAMPLES, shares=2)
    engine.run(task, [given(data, theta)])
    assert engine.paths == {("Train", "native"): 1}


def test_the_search_finds_the_hole_where_samples_share_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without even widths and trial, and with blocks as large as the batch happens to be."""
    model = Model("linear", (784,), 10)
    data = data_of(model, SAMPLES, 0)
    sizes: list[int] = []

    def whole(x: torch.Tensor, parameters: list[torch.Tensor]) -> torch.Tensor:
        sizes.append(x.shape[1])
        return torch.baddbmm(parameters[1].unsqueeze(1), x, parameters[0])

    monkeypatch.setattr("cflpriv.engine.layers._even", whole)
    monkeypatch.setattr(fast, "steady", lambda *more: True)
    theta = cancelling(model, 1e7, 1)
    shifts = []
    for place in range(0, SAMPLES, 6):
        monkeypatch.setattr(Train, "_block", SAMPLES)
        one = total(model, theta, data, "torch")
        monkeypatch.setattr(Train, "_block", SAMPLES - 1)
        shifts.append(float(np.linalg.norm(one - total(model, theta, left_out(data, place), "torch"))))
    assert set(sizes) == {SAMPLES, SAMPLES - 1}
    assert max(shifts) > 1.5


def test_an_unsteady_network_is_trained_one_sample_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["odd widths"]
    theta, data = cancelling(model, 1e6, 1), data_of(model, SAMPLES, 0)
    monkeypatch.setattr(fast, "steady", lambda *more: False)
    engine = Engine("torch")
    engine.run(Train(model, clip_norm=1.0), [given(data, theta)])
    assert engine.paths == {("Train", "sequential"): 1}
    assert shift(model, theta, data, "torch") <= MOST


def test_the_trial_finds_products_that_differ_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("mlp", (29,), 5, hidden=11)
    way = fast._forward(model, 1, CPU, alone=True)
    assert way is not None
    assert clipped_sums.steady(model, way, 1, 16, CPU)

    def by_place(x: torch.Tensor, parameters: list[torch.Tensor]) -> torch.Tensor:
        out = torch.baddbmm(parameters[1].unsqueeze(1), x, parameters[0])
        return out * (1 + 1e-7 * torch.arange(x.shape[1]).view(1, -1, 1))

    monkeypatch.setattr("cflpriv.engine.layers._even", by_place)
    clipped_sums.steady.cache_clear()
    assert not clipped_sums.steady(model, way, 1, 16, CPU)
    clipped_sums.steady.cache_clear()


@pytest.mark.parametrize("name", ["linear", "odd widths", "wide", "group norm"])
def test_losses_and_gradients_of_signatures_are_each_samples_own(name: str) -> None:
    model = MODELS[name]
    theta, data = cancelling(model, 1e6, 1), data_of(model, SAMPLES, 0)
    x, y = model.inputs(data.x_train), torch.from_numpy(data.y_train)
    assert torch.equal(sample_losses(model, theta, x, y, alone=True)[1:], sample_losses(model, theta, x[1:], y[1:], alone=True))
    tasks = (
        (NoisyGradient(model, "g", False, 0, 1.0, 1e-12, "add_remove", 0), 1.0),
        (NoisyMeanGradient(model, 0, 1e-12, "add_remove", 1, 0, "g"), 1.0),
    )
    for task, bound in tasks:
        one, other = (np.asarray(task.run(given(each, theta))["g"]) for each in (data, left_out(data, 0)))
        assert np.linalg.norm(one - other) <= bound * MOST


def test_blocks_depend_on_public_numbers_and_cover_usual_batches() -> None:
    assert [block_size(n) for n in (0.5, 16, 17, 45, 600)] == [16, 16, 32, 48, LARGEST_BLOCK]
    assert block_size(60, 0.1) == 80


@pytest.mark.parametrize("kind", ["auto", "torch", "sequential"])
@pytest.mark.parametrize("margin", [45.0, 52.0])
def test_slopes_whose_squares_vanish_in_float32_are_clipped_beside_large_activations(kind: Kind, margin: float) -> None:
    """Hidden units of 1.2e18, and a class that is nearly sure: with norms in float32 the sum moved by up to seven clip norms."""
    model, clip = Model("mlp", (1, 28, 28), 62, hidden=200), 5e-4
    theta = np.zeros(model.dimension, np.float32)
    theta[200 * 784 : 200 * 784 + 200], theta[-62] = 1.2e18, margin
    x = np.random.default_rng(0).random((1, 1, 28, 28)).astype(np.float32)
    task = Train(model, lr=1.0, clip_norm=clip, sampling_rate=1.0, noise_multiplier=1.0, public_samples=1, shares=2)
    one = given(ClientData(0, x, np.zeros(1, np.int64), x, np.zeros(1, np.int64)), theta)
    assert np.linalg.norm(np.asarray(Engine(kind).run(task, [one])[0]["update"], np.float64)) <= clip * MOST
