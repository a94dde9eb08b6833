"""The inversion ladder: each rung against PyTorch's gradients, what it refuses, the figures of an audit, and real data."""

import gzip
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attack_scenes import case, config, figures_of
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.linear_model import Ridge
from torch import nn
from torch.nn import functional

from cflpriv.attacks import ATTACKS
from cflpriv.attacks.figures.leakage import psnr_db
from cflpriv.attacks.figures.significance import judge
from cflpriv.attacks.inversion import closed_form, feature_decoder, gradient_inversion, spear
from cflpriv.attacks.inversion.closed_form import first_linear, input_from_gradients
from cflpriv.attacks.inversion.gradient_inversion import matched
from cflpriv.attacks.inversion.gradient_matching import labels_of_inputs
from cflpriv.attacks.inversion.inversion_ladder import DECODER, MATCHING, fitting_layer, images_by_layer, most_samples
from cflpriv.attacks.inversion.spear import MOST_DRAWN, MOST_SAMPLES, inputs_of_batch
from cflpriv.attacks.inversion.token_recovery import tokens_from_rows, window_from_rows
from cflpriv.engine import Streams, TaskInput
from cflpriv.engine.device import CPU, using
from cflpriv.engine.models import Model
from cflpriv.errors import InputError
from cflpriv.randomness import stream
from cflpriv.tasks.training import Train
from cflpriv.types import Array, ClientData

Layer = tuple[Array, Array]


def gradients(net: nn.Sequential, x: Array, y: Array) -> tuple[Layer, Layer]:
    """Parameters and gradients, by autograd, of the first layer of `net`, which is linear."""
    first = net[0]
    assert isinstance(first, nn.Linear)
    loss = functional.cross_entropy(net(torch.from_numpy(x)), torch.from_numpy(y))
    weight, bias = torch.autograd.grad(loss, [first.weight, first.bias])
    return (first.weight.detach().numpy(), first.bias.detach().numpy()), (weight.numpy(), bias.numpy())


def network(seed: int, inputs: int, hidden: int, classes: int = 10, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, hidden), activation(), nn.Linear(hidden, classes)).double()


def update(model: Model, start: Array, x: Array, y: Array, **more: Any) -> Array:
    """What a client sends, by the trainer of the project."""
    train = Train(model, more.pop("epochs", 1), 0, more.pop("lr", 0.1), **more)
    data = ClientData(0, x, y, x[:0], y[:0])
    return np.asarray(train.run(TaskInput(data, {"model": start}, {}, Streams(0, 0, 0)))["update"], np.float64)


# --- closed form --------------------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(2, 30), st.sampled_from([nn.ReLU, nn.Tanh, nn.Sigmoid]), st.floats(1e-6, 1e6))
def test_one_sample_is_its_gradient(seed: int, inputs: int, hidden: int, activation: type[nn.Module], scale: float) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(1, inputs)), rng.integers(10, size=1)
    _, (weight, bias) = gradients(network(seed, inputs, hidden, activation=activation), x, y)
    if not bias.any():  # every unit of the ReLU is off
        return
    found, residual = input_from_gradients(-scale * weight, -scale * bias)
    assert np.allclose(found, x[0], rtol=1e-9, atol=1e-9)
    assert residual < 1e-9


def test_a_batch_shows_in_the_residual() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 20)), np.array([1, 2])
    assert input_from_gradients(*gradients(network(0, 20, 12), x, y)[1])[1] > 0.1


@pytest.mark.parametrize(("weight", "bias", "why"), [
    (np.ones((3, 2)), np.ones(2), "2 values for 3 rows"), (np.ones((3, 2)), np.zeros(3), "zero in all units"),
    (np.full((3, 2), np.nan), np.ones(3), "finite"), (np.ones(3), np.ones(3), "2 axes"),
])  # fmt: skip
def test_the_closed_form_refuses(weight: Array, bias: Array, why: str) -> None:
    with pytest.raises(InputError, match=why):
        input_from_gradients(weight, bias)


@pytest.mark.parametrize("more", [{}, {"epochs": 5, "momentum": 0.9}, {"weight_decay": 0.1}])
@pytest.mark.parametrize("name", ["mlp", "linear"])
def test_one_image_is_its_update(name: str, more: dict[str, Any]) -> None:
    model = Model(name, (2, 4, 4), 10, hidden=30, mean=(0.3, 0.5), std=(0.7, 0.2), dtype="float64")
    x, y = np.random.default_rng(1).random((1, 2, 4, 4)), np.array([3])
    start, layer = model.init(0), first_linear(model)
    assert layer is not None
    assert most_samples(layer) == (MOST_DRAWN if name == "mlp" else 1)
    moved = update(model, start, x, y, **more)
    (one,) = images_by_layer(
        model, layer, start[None], moved[None], 1, x, stream(0, "test"), steps=more.get("epochs", 1), lr=0.1,
        weight_decay=more.get("weight_decay", 0.0),
    )  # fmt: skip
    assert one is not None
    assert psnr_db(x[0], one[0][0]) > 99
    assert one[1] == "closed form"


def test_weight_decay_over_steps_and_dead_layers_are_left_to_the_optimisation() -> None:
    model = Model("mlp", (1, 4, 4), 10, hidden=30, dtype="float64")
    x, start, layer = np.zeros((1, 1, 4, 4)), model.init(0)[None], first_linear(model)
    assert layer is not None
    rest = (1, x, stream(0, "test"))
    assert images_by_layer(model, layer, start, np.ones_like(start), *rest, steps=2, weight_decay=0.1) == [None]
    assert images_by_layer(model, layer, start, np.zeros_like(start), *rest) == [None]


def test_which_layer_is_read() -> None:
    assert fitting_layer(Model("sigmoid_lenet", (1, 8, 8), 10)) is None  # smooth: the optimisation is exact
    assert fitting_layer(Model("resnet9", (3, 32, 32), 10)) is None  # too much before its only linear layer
    assert fitting_layer(Model("mine", (4,), 2, factory=lambda: nn.Sequential(nn.Linear(4, 2, bias=False)))) is None
    lenet = fitting_layer(Model("lenet5", (1, 28, 28), 10))
    assert lenet is not None
    assert (lenet.outputs, lenet.inputs, lenet.is_first, lenet.is_rectified) == (120, 256, False, True)


# --- SPEAR --------------------------------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.sampled_from([1.0, -0.1, 1e-4]))
def test_a_batch_is_its_gradient(seed: int, count: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(count, 40)), rng.integers(10, size=count)
    held, (weight, bias) = gradients(network(seed, 40, 64), x, y)
    found = inputs_of_batch(scale * weight, scale * bias, [held], count, stream(seed, "test of SPEAR"))
    assert found.is_recovered, found
    apart = np.abs(x[:, None] - found.inputs[None]).max(axis=2)
    assert apart.min(axis=1).max() < 1e-6
    assert sorted(apart.argmin(axis=1)) == list(range(count))


@pytest.mark.parametrize(("count", "hidden"), [(12, 200), (16, 200), pytest.param(20, 256, marks=pytest.mark.slow)])
def test_a_large_batch_of_images_is_its_gradient_at_float32(count: int, hidden: int) -> None:
    """Digits of ten labels, so that samples of a batch share labels; the gradient is PyTorch's in single precision."""
    digits = load_digits()
    x = ((digits.images[:, None] - 4.9) / 6.0).repeat(2, axis=2).repeat(2, axis=3).reshape(len(digits.images), -1)
    x = np.column_stack([x, np.random.default_rng(0).normal(size=(len(x), 64))]).astype(np.float32)
    for seed in range(2):
        pick = np.random.default_rng(seed).permutation(len(x))[:count]
        held, (weight, bias) = gradients(network(seed, x.shape[1], hidden).float(), x[pick], digits.target[pick].astype(np.int64))
        seen = inputs_of_batch(weight, bias, [held], count, stream(seed, "test of SPEAR"))
        assert seen.is_recovered, seen
        apart = np.abs(x[pick][:, None] - seen.inputs[None]).max(axis=2)
        assert apart.min(axis=1).max() < 1e-2
        assert sorted(apart.argmin(axis=1)) == list(range(count))


def test_large_batches_need_units() -> None:
    layers = [first_linear(Model("mlp", (1, 4, 4), 10, hidden=hidden)) for hidden in (30, 144, 192, 1000)]
    assert [most_samples(layer) for layer in layers] == [8, 12, 16, MOST_SAMPLES]


@given(st.integers(0, 10**6), st.floats(-3, 3).filter(lambda c: abs(c) > 0.01))
@settings(max_examples=20)
def test_a_column_with_a_multiple_of_another_is_freed_of_it(seed: int, multiple: float) -> None:
    """D is zero in half of the units; L = D Q⁻¹ for an orthonormal Q, so Q's columns are the directions with zeros."""
    rng = np.random.default_rng(seed)
    zeros = rng.random((60, 4)) < 0.5
    left = np.where(zeros, 0.0, rng.standard_normal((60, 4)))
    live = np.asarray(~zeros.all(axis=1))
    columns = np.linalg.qr(rng.standard_normal((4, 4)))[0]
    factors = spear._Factors(left @ columns, np.zeros((4, 1)), live, 1e-9)
    mixed = columns.copy()
    mixed[1] += multiple * columns[0]
    mixed[1] /= np.linalg.norm(mixed[1])
    np.testing.assert_allclose(np.abs((spear._freed(factors, mixed, np.array([1])) * columns).sum(axis=1)), 1.0, atol=1e-6)


def test_spear_says_where_it_does_not_fit() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4, 40)), rng.integers(10, size=4)
    held, (weight, bias) = gradients(network(0, 40, 64), x, y)
    ask = partial(inputs_of_batch, rng=stream(0, "test of SPEAR"))
    assert "rank is below 5" in ask(weight, bias, [held], 5).refusal
    assert "not one of 3 samples" in ask(weight, bias, [held], 3).refusal
    noisy = weight + 0.1 * np.abs(weight).max() * rng.normal(size=weight.shape)
    assert "noise hides" in ask(noisy, bias, [held], 4).refusal
    assert "too few units" in ask(weight[:3], bias[:3], [(held[0][:3], held[1][:3])], 4).refusal
    smooth, (sloped, offset) = gradients(network(0, 40, 64, activation=nn.Tanh), x, y)
    assert not ask(sloped, offset, [smooth], 4, searches=2).is_recovered  # no zeros to be found
    with pytest.raises(InputError, match=f"1 to {MOST_SAMPLES}"):
        ask(weight, bias, [held], MOST_SAMPLES + 1)
    with pytest.raises(InputError, match="parameters"):
        ask(weight, bias, [(held[0][:5], held[1][:5])], 4)


def test_the_same_stream_gives_the_same_inputs() -> None:
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(4, 40)), rng.integers(10, size=4)
    held, seen = gradients(network(3, 40, 64), x, y)
    first, second = (inputs_of_batch(*seen, [held], 4, stream(3, "test of SPEAR")) for _ in range(2))
    assert np.array_equal(first.inputs, second.inputs)


def test_inputs_that_do_not_pass_the_check_are_the_mean_image(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("mlp", (1, 4, 4), 10, hidden=64, dtype="float64")
    rng = np.random.default_rng(4)
    x, y, start, layer = rng.random((3, 1, 4, 4)), np.array([1, 2, 3]), model.init(0), first_linear(model)
    assert layer is not None
    others = rng.random((5, 1, 4, 4))

    def one_fails(*given: Any, **more: Any) -> Any:
        found = inputs_of_batch(*given, **more)
        found.agreement[1] = 0.5
        return found

    monkeypatch.setattr("cflpriv.attacks.inversion.inversion_ladder.inputs_of_batch", one_fails)
    (one,) = images_by_layer(model, layer, start[None], update(model, start, x, y)[None], 3, others, stream(0, "test"), lr=0.1)
    assert one is not None
    scores = sorted(psnr_db(*pair) for pair in matched(x, one[0]))
    assert np.array_equal(one[0][2], others.mean(axis=0))
    assert scores[0] < 30 < 90 < scores[1]


# --- feature decoder ----------------------------------------------------------------------------------------------------------------


def test_the_decoder_is_ridge_regression() -> None:
    rng = np.random.default_rng(0)
    images, new = rng.normal(size=(60, 12)), rng.normal(size=(5, 8))
    features = images @ rng.normal(size=(12, 8)) + 0.5 * rng.normal(size=(60, 8))
    found = feature_decoder.fit_decoder(features, images)
    centred = features - features.mean(axis=0)
    left, values, _ = np.linalg.svd(centred, full_matrices=False)

    def score(penalty: float) -> float:
        hat = left @ np.diag(values**2 / (values**2 + penalty)) @ left.T
        rest = images - images.mean(axis=0) - hat @ (images - images.mean(axis=0))
        return float(np.square(rest).sum()) / (60 - 1 - float(np.trace(hat))) ** 2

    best = min(feature_decoder.PENALTIES * np.square(values).mean(), key=score)
    theirs = Ridge(alpha=best, solver="svd").fit(features, images).predict(new)
    assert np.allclose(feature_decoder.decode_linearly(found, new), theirs, rtol=1e-8, atol=1e-8)
    with pytest.raises(InputError, match="expected as many"):
        feature_decoder.fit_decoder(features[:5], images)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10)
    )


@pytest.mark.parametrize("count", [1, 3])
def test_images_behind_convolutions(count: int) -> None:
    model = Model("small_cnn", (1, 8, 8), 10, mean=(0.3,), std=(0.4,), dtype="float64", factory=convolutional)
    digits = load_digits()
    x, y = digits.images[:, None] / 16.0, digits.target.astype(np.int64)
    truth, known, start, layer = x[:count], x[1000:1600], model.init(0), fitting_layer(model)
    assert layer is not None
    (one,) = images_by_layer(
        model, layer, start[None], update(model, start, truth, y[:count])[None], count, known, stream(0, "test"), lr=0.1
    )
    assert one is not None
    assert one[1] == MATCHING
    (weighted,) = images_by_layer(
        model, layer, start[None], update(model, start, truth, y[:count])[None], count, known, stream(0, "test"), lr=0.1, is_mean=False
    )
    assert weighted is not None
    assert weighted[1] == DECODER
    assert (
        labels_of_inputs(
            model, start, layer, -update(model, start, truth, y[:count]), feature_decoder.features_of(model, start, layer, truth)
        ).tolist()
        == y[:count].tolist()
    )
    features = feature_decoder.features_of(model, start, layer, truth)
    assert np.allclose(features, _inner(model, start, truth), atol=1e-12)
    mean = known.mean(axis=0)
    for image, found in matched(truth, one[0]):
        assert psnr_db(image, found) > psnr_db(image, mean) + 6
    decoded, closer = (np.mean([psnr_db(*pair) for pair in matched(truth, images)]) for images in (weighted[0], one[0]))
    assert closer > decoded + 3


def test_labels_of_inputs_leave_the_shared_module_as_it_is() -> None:
    """A network of float32 is read in float64, and the module that others load stays one of float32."""
    model = Model("small_cnn", (1, 8, 8), 10, factory=convolutional)
    digits = load_digits()
    x, y, start, layer = digits.images[:3, None] / 16.0, digits.target[:3].astype(np.int64), model.init(0), fitting_layer(model)
    assert layer is not None
    features = feature_decoder.features_of(model, start, layer, x)
    assert labels_of_inputs(model, start, layer, -update(model, start, x.astype(np.float32), y), features).tolist() == y.tolist()
    assert {parameter.dtype for parameter in model.load(start).parameters()} == {torch.float32}


def _inner(model: Model, start: Array, x: Array) -> Array:
    layers = closed_form.layers_of(model)[:4]
    with torch.no_grad(), using(CPU):
        model.load(start)
        return np.asarray(nn.Sequential(*layers)(model.inputs(x)).numpy())


# --- words --------------------------------------------------------------------------------------------------------------------------

LSTM = Model("lstm", (6,), 30, hidden=16)


def first_rows(moved: Array) -> Array:
    return moved[: 30 * 16].reshape(30, 16)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.sampled_from([0.0, 0.9]))
def test_the_words_of_a_client_are_the_rows_that_move(seed: int, windows: int, momentum: float) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.integers(12, size=(windows, 6)), rng.integers(30, size=windows)
    moved = update(LSTM, LSTM.init(0), x.astype(np.float32), y, epochs=2, momentum=momentum)
    assert tokens_from_rows(first_rows(moved)).tolist() == np.unique(x).tolist()


@pytest.mark.slow
def test_adam_moves_the_same_rows() -> None:
    """Slow for what `torch.optim` imports."""
    x = np.array([[3, 4, 5, 6, 7, 8]])
    moved = update(LSTM, LSTM.init(0), x.astype(np.float32), np.array([9]), epochs=3, optimizer="adam")
    assert tokens_from_rows(first_rows(moved)).tolist() == x[0].tolist()


def test_rounding_does_not_hide_words() -> None:
    rng = np.random.default_rng(0)
    x = np.array([[3, 4, 5, 6, 7, 8]])
    moved = first_rows(update(LSTM, LSTM.init(0), x.astype(np.float32), np.array([9]), lr=1.0))
    rounded = moved + 1e-9 * rng.uniform(-1, 1, size=moved.shape)
    assert tokens_from_rows(rounded).tolist() == x[0].tolist()


def test_the_order_of_a_window() -> None:
    right = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        x, y, start = rng.integers(2, 30, size=(1, 6)), rng.integers(30, size=1), LSTM.init(seed)
        found, left = window_from_rows(LSTM, start, -first_rows(update(LSTM, start, x.astype(np.float32), y, lr=1.0)), int(y[0]), 6)
        right.append(float((found == x[0]).mean()))
        assert left >= -1e-9
    assert np.mean(right) == 1.0, right
    with pytest.raises(InputError, match="words, for a window of 6"):
        window_from_rows(LSTM, LSTM.init(0), np.random.default_rng(0).random((30, 16)) * np.arange(30)[:, None] ** 9 + 1e-300, 0, 6)
    with pytest.raises(InputError, match="no embedding"):
        window_from_rows(Model("linear", (4,), 2), np.zeros(10), np.ones((3, 2)), 0, 4)


# --- the figures of an audit --------------------------------------------------------------------------------------------------------


def ladder_figures(**more: Any) -> dict[str, Any]:
    """The cells of gradient inversion by metric, on the scene of `test_gradient_inversion` with another model."""
    parts: dict[str, dict[str, Any]] = {
        "training": {"rounds": 1, "epochs": 1, "batch_size": 0}, "model": {"name": "mlp", "hidden": 64}, "data": {},
    }  # fmt: skip
    made = {key: {**value, **more.pop(key, {})} for key, value in parts.items()}
    scene = config(more.pop("algorithm", {"name": "fedavg"}), more.pop("protection", {}), 0, **made, **more)
    return figures_of("gradient_inversion", case(scene))


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "method", "least"), [(1, "by closed form", 90), (4, "by SPEAR", 60), (8, "by SPEAR", 50)])
def test_an_audit_climbs_the_ladder(samples: int, method: str, least: float) -> None:
    found = ladder_figures(data={"samples_per_client": samples, "groups": [list(range(10))], "clients": 4})
    cell = found["image_psnr_db"]
    assert method in cell.note
    assert cell.value > least, cell.line()
    assert cell.status == "leaks", cell.line()


def test_a_secure_sum_of_many_clients_is_no_batch_for_any_rung() -> None:
    found = ladder_figures(data={"samples_per_client": 1}, protection={"sum": "secagg"})
    assert found["cohort_image_psnr_db"].status == "not_attempted"
    assert "a sum is of 20 samples at least" in found["cohort_image_psnr_db"].note


def test_more_than_eight_are_not_attempted() -> None:
    found = ladder_figures(data={"samples_per_client": 9})
    assert "at most 8 samples" in found["image_psnr_db"].note


def test_a_refused_batch_too_large_for_the_optimisation_gets_the_mean_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_inversion, "images_by_layer", lambda model, layer, starts, *more, **options: [None] * len(starts))
    found = ladder_figures(data={"samples_per_client": 8, "clients": 8, "groups": [list(range(10))]})
    assert found["image_psnr_db"].value == pytest.approx(found["image_psnr_db"].baseline)
    assert "by mean image" in found["image_psnr_db"].note


def test_few_clients_cannot_validate_a_yes_or_no_figure() -> None:
    found = ladder_figures(data={"samples_per_client": 1, "clients": 4})["labels_exact"]
    assert found.status == "not_validated"
    assert "4 client(s) of one run cannot validate a yes-or-no figure, which takes 6" in found.note
    assert "yes-or-no" not in ladder_figures(data={"samples_per_client": 1, "clients": 8})["labels_exact"].note


# --- texts --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sentences of 12 words drawn from 60, unlike in three languages."""
    rng = np.random.default_rng(0)
    (tmp_path / "nordic_wiki").mkdir()
    names = [a + b for a in "bdfgklmnpr" for b in "aeiouy"]
    for place, language in enumerate(("nb", "sv", "da")):
        weights = rng.permutation(np.arange(1, 61)) ** 2.0
        for part in ("train", "test"):
            lines = [" ".join(rng.choice(names, 12, p=weights / weights.sum())) for _ in range(24 + place)]
            (tmp_path / "nordic_wiki" / f"{language}_{part}.txt.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    monkeypatch.setenv("CFLPRIV_DATA", str(tmp_path))
    return tmp_path


def of_texts(samples: int, **more: Any) -> dict[str, Any]:
    data = {
        "source": "nordic_wiki", "partition": "kinds", "clients": 6, "vocabulary": 64, "sequence_length": 6, "samples_per_client": samples,
        "groups": [],
    }  # fmt: skip
    return ladder_figures(data=data, model={"name": "lstm", "hidden": 16}, **more)


def test_words_of_a_client_leak(texts: Path) -> None:
    found = of_texts(1)
    assert set(found) == {"token_share", "token_precision", "words_in_place"}
    assert (found["token_share"].value, found["token_precision"].value) == (1.0, 1.0)
    assert {cell.status for cell in found.values()} == {"leaks"}, [cell.line() for cell in found.values()]
    assert found["words_in_place"].value > 0.8
    many = of_texts(40, training={"batch_size": 8, "epochs": 2})
    assert set(many) == {"token_share", "token_precision"}
    assert (many["token_share"].value, many["token_precision"].value) == (1.0, 1.0)


def test_words_that_are_not_read_say_so(texts: Path) -> None:
    found = of_texts(1, privacy={"unit": "client", "epsilon": 10.0, "delta": 1e-3, "clip_norm": 1.0})["token_share"]
    assert found.status == "not_attempted"
    assert "noise" in found.note


@pytest.mark.parametrize("local", [{"optimizer": "sgd"}, {"optimizer": "adam", "lr": 0.01}])
def test_words_are_told_from_weight_decay(texts: Path, local: dict[str, Any]) -> None:
    found = of_texts(10, training={"weight_decay": 0.01, "batch_size": 4, **local})
    assert found["cohort_token_precision"].value == 1.0
    assert (found["cohort_token_share"].value or 0.0) > 0.95
    assert found["token_share"].status == "leaks", found["token_share"].line()


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_a_released_model_shows_the_words_of_those_who_trained_it(texts: Path, decay: float) -> None:
    """Rows of the embedding that did not move since the public start: words that nobody has, and samples that are nobody's."""
    data = {"source": "nordic_wiki", "partition": "kinds", "clients": 12, "vocabulary": 256, "sequence_length": 6, "samples_per_client": 2}
    seen = case(config(
        {"name": "fedavg"}, {"sum": "secagg"}, 0, data=data | {"groups": []},
        training={"rounds": 3, "optimizer": "adam", "lr": 0.01, "epochs": 2, "weight_decay": decay}, model={"name": "lstm", "hidden": 8},
    ), "released")  # fmt: skip
    words = figures_of("gradient_inversion", seen)
    assert set(words) == {"cohort_token_share", "cohort_token_precision"}
    assert (words["cohort_token_share"].value, words["cohort_token_precision"].value) == (1.0, 1.0)
    excluded = figures_of("exact_zeros", seen)["excluded_words_auc"]
    assert excluded.status == "leaks", excluded.line()


def test_sums_of_texts_are_the_words_of_their_cohorts(texts: Path) -> None:
    """Twelve clients, half of them in each of eight secure sums: what only one client has is named as its, and nothing else is."""
    training = {"rounds": 8, "participation": 0.5, "batch_size": 4, "optimizer": "adam", "lr": 0.01}
    data = {"source": "nordic_wiki", "partition": "kinds", "clients": 12, "vocabulary": 64, "sequence_length": 6, "samples_per_client": 2}
    seen = case(config(
        {"name": "fedavg"}, {"sum": "secagg"}, 0, data=data | {"groups": []}, training=training, model={"name": "lstm", "hidden": 8}
    ))  # fmt: skip
    words = figures_of("gradient_inversion", seen)
    assert set(words) == {"cohort_token_share", "cohort_token_precision", "token_share", "token_precision"}
    assert (words["cohort_token_share"].value, words["cohort_token_precision"].value) == (1.0, 1.0)
    assert "nothing about a member" in words["cohort_token_share"].note
    assert words["token_share"].status == "leaks", words["token_share"].line()
    own = figures_of("exact_zeros", seen)
    assert set(own) == {"own_words_share", "own_words_precision", "excluded_words_auc"}
    assert (own["own_words_share"].value or 0.0) > 0.7, own["own_words_share"].line()
    assert own["own_words_precision"].value == 1.0
    assert own["own_words_share"].reference == 1.0
    excluded = own["excluded_words_auc"]
    assert excluded.status == "leaks", excluded.line()
    assert (excluded.value or 0.0) > 0.6
    assert (excluded.value or 0.0) <= (excluded.reference or 0.0)


# --- real data: constants were chosen on EMNIST letters ---------------------------------------------------------------------------------


def images(name: str) -> tuple[Array, Array]:
    """Images (n, 1, 28, 28) in [0, 1] and labels of a test file."""
    folder = Path(os.environ.get("CFLPRIV_DATA", "")) / name
    if not (folder / "t10k-images-idx3-ubyte.gz").is_file():
        pytest.skip(f"{name}: not found under CFLPRIV_DATA")
    raw = np.frombuffer(gzip.decompress((folder / "t10k-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16)
    y = np.frombuffer(gzip.decompress((folder / "t10k-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)
    return raw.reshape(-1, 1, 28, 28) / 255, y.astype(np.int64)


def scores_of(name: str, network: str, count: int, sets: int = 20, dtype: Any = "float64", **more: Any) -> tuple[Array, Array]:
    """Mean PSNR of each of `sets` batches of `count` test images, whose network has the seed of its place, and of the mean image.

    Auxiliary images are 2,000 of the file's second half, the batches are of the first.
    """
    x, y = images(name)
    known = x[5000:][stream(0, "auxiliary images").permutation(5000)[:2000]]
    model = Model(network, (1, 28, 28), 10, hidden=64, dtype=dtype)
    layer = fitting_layer(model)
    assert layer is not None
    found, blank = [], []
    for seed in range(sets):
        which = stream(seed, "images of a batch").permutation(5000)[:count]
        start = model.init(seed)
        moved = update(model, start, x[which], y[which], **more)
        rng = stream(seed, "inversion ladder of a batch")
        (one,) = images_by_layer(model, layer, start[None], moved[None], count, known, rng, steps=more.get("epochs", 1), lr=0.1)
        guess = np.repeat(known.mean(axis=0)[None], count, axis=0)
        found.append(np.mean([psnr_db(*pair) for pair in matched(x[which], guess if one is None else one[0])]))
        blank.append(np.mean([psnr_db(*pair) for pair in matched(x[which], guess)]))
    scores, baseline = np.array(found), np.array(blank)
    print(
        f"{network}, {name}, {count} image(s), {dtype}, {more}: median {np.median(scores):.1f} dB, least {scores.min():.1f}, "
        f"mean image {np.median(baseline):.1f}"
    )
    return scores, baseline


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
@pytest.mark.parametrize("count", [1, 4, 8])
def test_batches_of_real_images_are_exact(name: str, count: int) -> None:
    scores, _ = scores_of(name, "mlp", count)
    assert np.median(scores) >= 57
    if count == 1:
        assert scores.min() > 99


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_images_behind_lenet_come_out(name: str) -> None:
    scores, baseline = scores_of(name, "lenet5", 1)
    assert np.median(scores) >= 16
    assert np.median(scores) >= np.median(baseline) + 4
    assert judge(scores, baseline, scores, baseline, 3.0) == "leaks"


@pytest.mark.slow
def test_beyond_one_step_and_one_image() -> None:
    """What is approximate: float32 with eight images, five steps, and batches behind LeNet-5; each beats the mean image by 3 dB."""
    tried: list[tuple[str, int, dict[str, Any]]] = [
        ("mlp", 8, {"dtype": "float32"}), ("mlp", 4, {"epochs": 5}), ("mlp", 8, {"epochs": 5}), ("lenet5", 1, {"epochs": 5}),
        ("lenet5", 4, {}), ("lenet5", 8, {}),
    ]  # fmt: skip
    for network, count, more in tried:
        scores, baseline = scores_of("mnist", network, count, **more)
        assert judge(scores, baseline, scores, baseline, 3.0) == "leaks"


@pytest.mark.slow
def test_words_of_real_texts() -> None:
    """Twenty clients with one window of ten words each, the vocabulary of 2,000 and the 200 units of the reproductions."""
    if not (Path(os.environ.get("CFLPRIV_DATA", "")) / "nordic_ud").is_dir():
        pytest.skip("nordic_ud: not found under CFLPRIV_DATA")
    data = {"source": "nordic_ud", "partition": "iid", "clients": 20, "samples_per_client": 1, "test_samples_per_client": 100, "groups": []}
    training = {"rounds": 1, "epochs": 1, "batch_size": 0}
    seen = case(config({"name": "fedavg"}, {}, 0, data=data, model={"name": "lstm", "hidden": 200}, training=training))
    cells = ATTACKS["gradient_inversion"].cells(replace(seen, budget=replace(seen.budget, draws=5)))[0]
    for cell in cells:
        print(cell.line())
        assert cell.status == "leaks"
    share, precision, order = (cell.value for cell in cells)
    assert share == precision == 1.0
    assert order is not None
    assert order > 0.95
