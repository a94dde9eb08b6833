"""Scattering against sums over all pixels, and against kymatio's values; a sample's features depend on this sample alone."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from torch.nn import functional

from cflpriv.data import build_population
from cflpriv.data import whitened_scattering as whitened
from cflpriv.data.datasets import Dataset
from cflpriv.data.scattering import FEATURE_MEAN, FEATURE_STD, RANGE, feature_shape, features, scattering
from cflpriv.data.spec import DataSpec, register_dataset
from cflpriv.engine.models import Model
from cflpriv.errors import InputError
from cflpriv.types import Array

KYMATIO = {
    (1, 8, 8): {
        (0, 0, 0): 0.64148969, (0, 1, 1): 0.50566118, (3, 0, 1): 0.04510079, (9, 1, 0): 0.02713324, (16, 1, 1): 0.01379336,
        (40, 0, 0): 0.00990704, (80, 1, 1): 0.01411932,
    },
    (1, 28, 28): {
        (0, 3, 3): 0.49889375, (1, 0, 0): 0.06088398, (5, 2, 6): 0.07838661, (12, 6, 1): 0.07952596, (17, 3, 3): 0.01895597,
        (50, 4, 2): 0.00245037, (80, 5, 5): 0.00519918,
    },
}  # fmt: skip
"""`Scattering2D(J=2, shape=…)` of kymatio 0.3.0 (numpy), of `waves` of this shape: a channel, a row and a column, and the value."""


def waves(shape: tuple[int, int, int]) -> Array:
    """One image (1, channels, h, w) in [0, 1], by a formula."""
    channel, row, column = np.indices(shape)
    return np.asarray(0.5 + 0.5 * np.sin(1.3 * row + 0.4 * column * column + channel))[None]


def wavelet(side: int, scale: int, angle: int) -> Array:
    """A Morlet wavelet: a Gaussian envelope, wider across than along, times a wave, less what has its mean; on a torus."""
    sigma, slant, frequency = 0.8 * 2**scale, 0.5, 3 * np.pi / 4 / 2**scale
    turn = (3 - angle) * np.pi / 8
    wave, bell = np.zeros((side, side), complex), np.zeros((side, side))
    for rows, columns in product(range(-2, 3), repeat=2):
        row, column = np.mgrid[:side, :side] + side * np.array([rows, columns])[:, None, None]
        along, across = row * np.cos(turn) + column * np.sin(turn), -row * np.sin(turn) + column * np.cos(turn)
        height = np.exp(-(along**2 + slant**2 * across**2) / (2 * sigma**2)) * slant / (2 * np.pi * sigma**2)
        bell += height
        wave += height * np.exp(1j * frequency * along)
    return np.asarray(wave - wave.sum() / bell.sum() * bell)


def low_pass(side: int) -> Array:
    bell = np.zeros((side, side))
    for rows, columns in product(range(-2, 3), repeat=2):
        row, column = np.mgrid[:side, :side] + side * np.array([rows, columns])[:, None, None]
        bell += np.exp(-(row**2 + column**2) / (2 * 1.6**2)) / (2 * np.pi * 1.6**2)
    return bell


def convolved(image: Array, kernel: Array) -> Array:
    """The circular convolution as a sum over all pixels."""
    side = len(image)
    made = np.zeros((side, side), complex)
    for row, column in product(range(side), repeat=2):
        made += image[row, column] * np.roll(kernel, (row, column), (0, 1))
    return made


def every_second_zeroed(image: Array) -> Array:
    """Every other pixel, four times as high, on the grid of all: a sum over it is the sum over the half grid."""
    made = np.zeros_like(image)
    made[::2, ::2] = 4 * image[::2, ::2]
    return made


def test_it_is_the_sum_over_all_pixels() -> None:
    side = 16  # 8, and four of the border on each side
    image = np.pad(waves((1, 8, 8))[0, 0], 4, mode="reflect")
    fine = [np.abs(convolved(image, wavelet(side, 0, angle))) for angle in range(8)]
    second = [wavelet(side, 1, angle) for angle in range(8)]
    coarse = [every_second_zeroed(np.abs(convolved(image, kernel))) for kernel in second]
    both = [every_second_zeroed(np.abs(convolved(layer, kernel))) for layer in fine for kernel in second]
    smooth = low_pass(side)
    expected = np.stack([convolved(layer, smooth).real[4:12:4, 4:12:4] for layer in (image, *fine, *coarse, *both)])
    np.testing.assert_allclose(scattering(waves((1, 8, 8)))[0], expected, atol=2e-6)


@pytest.mark.parametrize("shape", KYMATIO)
def test_values_are_those_of_kymatio(shape: tuple[int, int, int]) -> None:
    made = scattering(waves(shape))[0]
    for place, value in KYMATIO[shape].items():
        assert made[place] == pytest.approx(value, abs=1e-3)


def test_channels_are_by_themselves_and_sides_need_not_be_multiples_of_four() -> None:
    image = waves((3, 11, 9))
    made = scattering(image)
    assert made.shape == (1, *feature_shape((3, 11, 9))) == (1, 243, 3, 3)
    for channel in range(3):
        alone = scattering(image[:, channel : channel + 1])
        np.testing.assert_allclose(made[0, 81 * channel : 81 * channel + 81], alone[0], atol=1e-6)


@pytest.mark.parametrize("made_of", [features, whitened.features])
def test_a_sample_has_the_same_features_to_the_bit_beside_any_others(made_of: Callable[[Array], Array]) -> None:
    x = np.random.default_rng(0).random((5, 1, 12, 12)).astype(np.float32)
    whole = made_of(x)
    assert np.array_equal(made_of(x[[3, 1]]), whole[[3, 1]])
    assert whole.dtype == np.float32
    assert 0 <= whole.min() < whole.max() <= 1


def test_the_model_is_given_group_normalised_scattering() -> None:
    x = np.random.default_rng(1).random((4, 2, 16, 16))
    model = Model("linear", feature_shape(x.shape[1:]), 3, mean=FEATURE_MEAN, std=FEATURE_STD)
    expected = functional.group_norm(torch.from_numpy(scattering(x)), 54)
    np.testing.assert_allclose(model.inputs(features(x)).numpy(), expected.numpy(), atol=2e-5)


def test_whitened_features_of_drawings_are_centred_and_level() -> None:
    """Along each direction of their own moment, whose mean is subtracted, drawings vary by no more than the level; nothing else changes."""
    shape = (1, 12, 12)
    x = whitened.drawn_images(shape, whitened.DRAWINGS)
    assert x.min() == 0
    assert x.max() <= 1
    assert np.array_equal(x[:3], whitened.drawn_images(shape, 3)), "always the same"
    plain, made = ((map_(x).reshape(len(x), -1) - 0.5) * 2 * RANGE for map_ in (features, whitened.features))
    np.testing.assert_allclose(made.mean(0), 0, atol=1e-3)
    before, after = (np.linalg.eigvalsh(np.cov(rows.T, bias=True))[::-1] for rows in (plain, made))
    level = whitened.LEVEL * before.mean()
    np.testing.assert_allclose(np.sort(after), np.sort(np.minimum(before, level)), rtol=1e-2, atol=1e-3 * level)
    assert before[0] > 5 * level, "there is something to level"


def test_clients_hold_features_of_their_rotated_images_and_public_statistics() -> None:
    spec = DataSpec("usps_like", clients=4, rotations=(0, 90), features="scattering")
    plain, mapped = build_population(DataSpec("usps_like", clients=4, rotations=(0, 90))), build_population(spec)
    assert (mapped.mean, mapped.std, mapped.shape) == (FEATURE_MEAN, FEATURE_STD, (81, 4, 4))
    for before, after in zip(plain.clients, mapped.clients, strict=True):
        assert np.array_equal(features(before.x_train), after.x_train)
        assert np.array_equal(features(before.x_test), after.x_test)
        assert np.array_equal(before.y_train, after.y_train)


@pytest.mark.parametrize(
    "keys",
    [
        {"source": "csv", "paths": ("t.csv",), "label_column": "y"},
        {"source": "ag_news", "partition": "kinds"},
        {"source": "npz", "paths": ("t.npz",), "standardise": "per_client"},
    ],
)
def test_tables_and_texts_have_none(keys: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"\[data\] features = 'scattering': is a map of images"):
        build_population(DataSpec(**keys, features="scattering"))  # type: ignore[arg-type]


def test_clients_hold_whitened_features() -> None:
    plain = build_population(DataSpec("usps_like", clients=4))
    mapped = build_population(DataSpec("usps_like", clients=4, features="whitened_scattering"))
    assert (mapped.mean, mapped.std, mapped.shape) == (FEATURE_MEAN, FEATURE_STD, (81, 4, 4))
    assert np.array_equal(whitened.features(plain.clients[0].x_train), mapped.clients[0].x_train)


def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(InputError, match=r"data\.features.*at least 8×8.*\(1, 1, 60\)"):
        features(np.zeros((2, 1, 1, 60)))


def _usps_like(_: object) -> Dataset:
    rng = np.random.default_rng(2)
    x, y = rng.random((60, 1, 16, 16)).astype(np.float32), np.arange(60) % 3
    return Dataset("usps_like", x[:40], y[:40], x[40:], y[40:], 3, (0.2,), (0.3,))


@pytest.fixture(autouse=True)
def _registered() -> None:
    register_dataset("usps_like", _usps_like)
