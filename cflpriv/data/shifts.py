"""Shifts between groups of clients with images from one source: rotated pixels, renamed labels, another domain."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InputError
from ..randomness import stream
from ..types import Array

__all__ = ["MixtureLayout", "conform", "label_permutations", "mixture_layout", "rotate", "shift_labels", "swap_labels"]


def rotate(x: Array, quarter_turns: int) -> Array:
    """Images (n, C, H, W) turned counter-clockwise by `quarter_turns` × 90°, exactly (pixels are moved, never interpolated).

    Odd turns swap H and W. Source: rotated MNIST and CIFAR of IFCA (K = 4 and K = 2), also in StoCFL.
    """
    return np.ascontiguousarray(np.rot90(x, quarter_turns, axes=(-2, -1)))


def shift_labels(y: Array, shift: int, classes: int) -> Array:
    """(y + shift) mod classes. Source: the shifted labels of StoCFL, s in {0, 3, 6, 9}."""
    return (y + shift) % classes


def swap_labels(y: Array, first: int, second: int) -> Array:
    """Labels with `first` and `second` exchanged; equal labels change nothing. Source: CFL's label-swap experiments."""
    swapped = y.copy()
    swapped[y == first] = second
    swapped[y == second] = first
    return swapped


def label_permutations(seed: int, groups: int, classes: int) -> tuple[tuple[int, ...], ...]:
    """A random permutation of the labels for each of `groups`, no two alike: label y becomes permutation[y].

    Source: CFL's permuted labels (section VI), CIFAR-10 with four groups. Raises `InputError` if there are not as many permutations.
    """
    if groups > math.factorial(min(classes, 20)):
        raise InputError(f"label_permutations = {groups}: {classes} labels have only {math.factorial(classes)} permutations")
    permutations: list[tuple[int, ...]] = []
    for group in range(groups):
        draws = stream(seed, f"data.label_permutation{group}")
        while (permutation := tuple(map(int, draws.permutation(classes)))) in permutations:
            pass
        permutations.append(permutation)
    return tuple(permutations)


@dataclass(frozen=True)
class MixtureLayout:
    """The common form of several data sets: the `shape` (C, H, W) that holds each, its label `offsets`, and the sum of their `classes`."""

    shape: tuple[int, int, int]
    offsets: tuple[int, ...]
    classes: int


def mixture_layout(shapes: Sequence[tuple[int, int, int]], classes: Sequence[int], shared_labels: bool = False) -> MixtureLayout:
    """The layout of PACFL's MIX-k: largest channels, height and width; data set i's labels begin after those of the sets before it.

    With `shared_labels` (StoCFL's hybrid) all sets begin at 0 and the classes are the most that any has.
    """
    channels, height, width = (max(shape[axis] for shape in shapes) for axis in range(3))
    if shared_labels:
        return MixtureLayout((channels, height, width), (0,) * len(shapes), max(classes))
    offsets = np.concatenate([[0], np.cumsum(classes)])
    return MixtureLayout((channels, height, width), tuple(map(int, offsets[:-1])), int(offsets[-1]))


def conform(x: Array, shape: tuple[int, int, int]) -> Array:
    """Images (n, C, H, W) in the frame `shape`: a single channel repeated, black added around (the odd pixel below and to the right).

    Raises `InputError` for images larger than the frame, or with several channels but not as many as the frame.
    """
    count, channels, height, width = x.shape
    if channels not in (1, shape[0]) or height > shape[1] or width > shape[2]:
        raise InputError(f"mixture: images of shape {x.shape[1:]} do not fit into {shape}")
    framed = np.zeros((count, *shape), x.dtype)
    top, left = (shape[1] - height) // 2, (shape[2] - width) // 2
    framed[:, :, top : top + height, left : left + width] = x
    return framed
