"""Rotations, label shifts and frames move values about; nothing is lost or interpolated."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from scenes import population

from cflpriv.data import conform, label_permutations, mixture_layout, rotate, shift_labels, swap_labels
from cflpriv.errors import InputError
from cflpriv.types import Array

IMAGES = arrays(np.float32, array_shapes(min_dims=4, max_dims=4, max_side=5), elements=st.floats(0, 1, width=32))
LABELS = arrays(np.int64, st.integers(0, 20), elements=st.integers(0, 9))


@pytest.mark.slow
@given(x=IMAGES, a=st.integers(-5, 5), b=st.integers(-5, 5))
def test_rotations_are_a_cyclic_group(x: Array, a: int, b: int) -> None:
    np.testing.assert_array_equal(rotate(rotate(x, a), b), rotate(x, a + b))
    np.testing.assert_array_equal(rotate(x, 4), x)
    assert rotate(x, a).flags.c_contiguous


@given(x=IMAGES)
def test_a_quarter_turn_pixel_by_pixel(x: Array) -> None:
    """Counter-clockwise: the pixel at (row, column) goes to (width - 1 - column, row)."""
    turned, (height, width) = rotate(x, 1), x.shape[2:]
    for row in range(height):
        for column in range(width):
            np.testing.assert_array_equal(turned[:, :, width - 1 - column, row], x[:, :, row, column])


@given(y=LABELS, shift=st.integers(-30, 30))
def test_label_shift(y: Array, shift: int) -> None:
    shifted = shift_labels(y, shift, 10)
    assert shifted.tolist() == [(int(label) + shift) % 10 for label in y]
    np.testing.assert_array_equal(shift_labels(shifted, -shift, 10), y)


@given(y=LABELS, a=st.integers(0, 9), b=st.integers(0, 9))
def test_label_swap(y: Array, a: int, b: int) -> None:
    before = y.copy()
    swapped = swap_labels(y, a, b)
    np.testing.assert_array_equal(y, before)
    assert swapped.tolist() == [{a: b, b: a}.get(int(label), int(label)) for label in y]


@given(x=IMAGES, more=st.tuples(st.integers(0, 4), st.integers(0, 4)), channels=st.sampled_from([1, 3]))
def test_frame(x: Array, more: tuple[int, int], channels: int) -> None:
    _, own, height, width = x.shape
    shape = (channels if own == 1 else own, height + more[0], width + more[1])
    framed = conform(x, shape)
    assert framed.shape == (len(x), *shape)
    top, left = more[0] // 2, more[1] // 2
    inner = framed[:, :, top : top + height, left : left + width]
    for channel in range(shape[0]):
        np.testing.assert_array_equal(inner[:, channel], x[:, 0 if own == 1 else channel])
    assert np.count_nonzero(framed) == np.count_nonzero(inner)


def test_frame_refuses_what_does_not_fit() -> None:
    for shape in ((3, 4, 4), (2, 3, 4), (2, 4, 3)):
        with pytest.raises(InputError, match="do not fit"):
            conform(np.zeros((1, 2, 4, 4), np.float32), shape)


def test_layout_of_mix_4() -> None:
    layout = mixture_layout([(3, 32, 32), (1, 28, 28), (1, 16, 40)], [10, 10, 26])
    assert (layout.shape, layout.offsets, layout.classes) == ((3, 32, 40), (0, 10, 20), 46)
    shared = mixture_layout([(3, 32, 32), (1, 28, 28), (1, 16, 40)], [10, 10, 26], shared_labels=True)
    assert (shared.shape, shared.offsets, shared.classes) == ((3, 32, 40), (0, 0, 0), 26)


@given(seed=st.integers(0, 2**32), groups=st.integers(1, 6), classes=st.integers(3, 12))
def test_label_permutations(seed: int, groups: int, classes: int) -> None:
    """Each is a permutation, no two are alike (all six of three labels if need be), and more groups leave the first ones as they are."""
    found = label_permutations(seed, groups, classes)
    assert len(set(found)) == len(found) == groups
    assert all(sorted(one) == list(range(classes)) for one in found)
    assert label_permutations(seed, groups - 1, classes) == found[: groups - 1]


def test_too_many_permutations() -> None:
    with pytest.raises(InputError, match="label_permutations = 7: 3 labels have only 6"):
        label_permutations(0, 7, 3)


def test_gaussian_clusters() -> None:
    scene = population(2, 3, seed=1, samples=400, classes=2, shape=(1, 2, 2), separation=5.0)
    again = population(2, 3, seed=1, samples=400, classes=2, shape=(1, 2, 2), separation=5.0)
    assert scene.groups == (0, 1, 0, 1, 0, 1)
    assert "synthetic" in scene.name
    assert "synthetic" in scene.notes[0]
    means = np.array([[c.x_train[c.y_train == label].mean(axis=0).ravel() for label in range(2)] for c in scene.clients])
    spread = np.array([c.x_train[c.y_train == 0].std(axis=0).mean() for c in scene.clients])
    for i in range(6):
        np.testing.assert_array_equal(scene.clients[i].x_test, again.clients[i].x_test)
        # 150 samples or more a class: a mean is within 5.5/sqrt(150) = 0.45 of its centre but for 1 in 10^7 (48 of them are drawn).
        np.testing.assert_allclose(means[i], means[i % 2], atol=0.9)
    assert np.abs(means[0] - means[1]).max() > 2
    np.testing.assert_allclose(spread, 1, atol=0.2)
    different = population(2, 3, seed=2, samples=400, classes=2, shape=(1, 2, 2), separation=5.0)
    assert not np.array_equal(scene.clients[0].x_train, different.clients[0].x_train)
