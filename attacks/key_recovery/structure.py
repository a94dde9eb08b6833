"""Structure that a shared permutation keeps: sums of coordinates that are zero in every update, and with them the unnamed classes.

Softmax cross-entropy: the gradients by the scores z_c of a sample are p_c − [y = c], which add up to zero over the classes c. The head's
gradients by its biases are their sums, those by the weights of a hidden unit their sums times the unit's activation. So in every step,
hence in every update, the C biases of the head add up to zero, and so do the C weights out of each hidden unit. Permuted, the places of
these C coordinates are unknown; the vector that is 1 there and 0 elsewhere is orthogonal to all updates, and shows as a block of entries
1/C in the projector on the null space of the stacked updates, as soon as so few columns are looked at that nothing else is orthogonal to
all rows. Where rows are too few for that, small models are searched through: all sums of half a block are matched with those of the other
half (Horowitz & Sahni 1974).

Updates are centred over the clients of a round and group first, which takes out what all have in common (weight decay above all).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Literal

import numpy as np
from scipy.cluster import hierarchy
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components
from scipy.spatial.distance import squareform

from ...errors import InputError
from ...types import Array

__all__ = ["ZeroSumBlock", "Structure", "find_structure", "rough_proportions", "zero_sum_blocks"]

LARGEST = 150
"""Coordinates of the largest updates that are clustered by their traces over clients and rounds."""
LOOKED_AT = 4000
"""Coordinates, by the size of their updates, among which blocks are looked for."""
NULL = 1e-4
"""A singular value below this share of what a column of the largest size would have belongs to the null space: rounding is far below, the
noise of training far above."""
FEW_BLOCKS = 3
"""Where a window has less than so many blocks' columns, halves of blocks are matched first."""
MOST_SUMS, BY_CHANCE, PART, MIXED = 300_000, 1e-3, 50_000, 4.0
"""Most sums of half a block that are made, how many blocks may be found by chance, how many candidates are looked at together, and how many
standard deviations mixed sums may be apart."""
FEWEST_IN_CLASS = 4
FURTHEST = 8
"""Slices of lists go this many slices deep."""
APART = 0.3
"""Groups of clients that train alike must have cosines this much higher inside than across."""


@dataclass(frozen=True)
class ZeroSumBlock:
    """C coordinates whose updates, with these signs, add up to zero: one for each class, in an order that means nothing."""

    coordinates: tuple[int, ...]
    signs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Structure:
    """What the server knows without names: `traces` (n, C), the first round's updates of one coordinate a class; `proportions` (n, C), the
    share of each class in each client's data. The columns' order is arbitrary.

    `by` says how: "zero sums" (proved by a block), "clusters" (of coordinates that move alike; if no block was found), "groups" (clients
    that train alike; if their number of labels is known) or "nothing". `signed` says that the transform also changes signs.
    """

    traces: Array
    proportions: Array
    by: Literal["zero sums", "clusters", "groups", "nothing"]
    blocks: tuple[ZeroSumBlock, ...] = ()
    signed: bool = False


def find_structure(rounds: Sequence[Array], classes: int, labels_per_client: int | None = None) -> Structure:
    """The classes in updates that share one secret order of coordinates: `rounds` are arrays (n_t, d), one a round and group, the first
    that of the clients to be attacked.

    Raises `InputError` for arrays of different widths.
    """
    widths = {rows.shape[1] for rows in rounds}
    if len(widths) != 1:
        raise InputError(f"updates: rounds have different dimensions {sorted(widths)}")
    first = rounds[0]
    blocks = zero_sum_blocks(rounds, classes)
    if blocks:
        signs = np.array(blocks[0].signs)
        traces = first[:, list(blocks[0].coordinates)] * signs
        if (traces**3).sum() < 0:  # the sign of a block is arbitrary; present labels grow more than absent ones shrink
            traces = -traces
        signed = any(len(set(block.signs)) > 1 for block in blocks)
        return Structure(traces, rough_proportions(traces, labels_per_client), "zero sums", tuple(blocks), signed)
    stacked = _stacked(rounds)
    lists = next((classes_found for cut in CUTS if len(classes_found := _classes(stacked, cut)) == classes), None)
    if lists is not None:
        traces = np.stack([_centre(first - first.mean(axis=0), members) for members in lists], axis=1)
        return Structure(traces, rough_proportions(traces, labels_per_client), "clusters")
    if labels_per_client and (groups := _groups(first, classes // labels_per_client)) is not None:
        share = np.zeros((len(first), classes))
        for client, group in enumerate(groups):
            share[client, group * labels_per_client : (group + 1) * labels_per_client] = 1.0 / labels_per_client
        return Structure(share, share, "groups")
    flat = np.full((len(first), classes), 1.0 / classes)
    return Structure(np.zeros_like(flat), flat, "nothing")


def rough_proportions(traces: Array, labels_per_client: int | None) -> Array:
    """Rough label proportions (n, C) from traces: what grew, in parts of 1; equal parts of the
    `labels_per_client` largest if that is known."""
    if labels_per_client:
        return (np.argsort(np.argsort(-traces, axis=1), axis=1) < labels_per_client) / labels_per_client
    grown = np.maximum(traces, 0.0)
    total = grown.sum(axis=1, keepdims=True)
    return np.where(total > 0, grown / np.where(total > 0, total, 1.0), 1.0 / traces.shape[1])


CUTS = (0.5, 0.4, 0.6, 0.3, 0.2)


def zero_sum_blocks(rounds: Sequence[Array], classes: int) -> list[ZeroSumBlock]:
    """Blocks of `classes` coordinates whose updates add up to zero in every round and for every client, up to signs.

    A window of fewer columns than there are independent rows has only such vectors in its null space. Windows are cut from the coordinates
    in the order of their size, then from lists of coordinates that move alike (one list a class, or a few), a slice of each.
    """
    stacked = _stacked(rounds)
    independent = sum(len(rows) - 1 for rows in rounds)
    width = max(classes, independent * 4 // 5)
    size = np.sqrt((stacked**2).mean(axis=0))
    order = np.argsort(-size)[:LOOKED_AT]
    threshold = NULL * float(size[order[:LARGEST]].mean())
    few = width < FEW_BLOCKS * classes
    if few and (met := _met_in_the_middle(stacked, order, classes, threshold, independent)):
        return met
    blocks: dict[tuple[int, ...], ZeroSumBlock] = {}
    for columns in _windows(stacked, order, width, classes):
        for block in null_blocks(stacked, columns, classes, threshold):
            blocks.setdefault(tuple(sorted(block.coordinates)), block)
        if blocks:
            break
    if not blocks:
        return [] if few else _met_in_the_middle(stacked, order, classes, threshold, independent)
    # with one block the classes are known: slices of the coordinates that move like each of its members hold further blocks
    seed_block = next(iter(blocks.values()))
    for columns in _slices(_alike(stacked, order, stacked[:, list(seed_block.coordinates)] * np.array(seed_block.signs)), width, classes):
        for block in null_blocks(stacked, columns, classes, threshold):
            blocks.setdefault(tuple(sorted(block.coordinates)), _aligned(stacked, seed_block, block))
    return list(blocks.values())


def _met_in_the_middle(
    stacked: Array, order: Array, classes: int, threshold: float, independent: int
) -> list[ZeroSumBlock]:  # fmt: skip
    """Blocks without signs among so many of the largest coordinates that `MOST_SUMS` sums are half a block's.

    None where other coordinates may add up to zero as well.
    """
    half = classes - classes // 2
    moving = order[np.sqrt((stacked[:, order] ** 2).mean(axis=0)) > threshold]
    count = next((count for count in range(len(moving), classes - 1, -1) if comb(count, half) <= MOST_SUMS), 0)
    if not count or comb(count, classes) * NULL ** min(independent, len(stacked)) > BY_CHANCE:
        return []
    rows = stacked[:, moving[:count]]
    first, second = (np.array(list(combinations(range(count), size))) for size in (classes // 2, half))
    mixed, checked = np.random.default_rng(0).normal(size=(2, len(rows))) @ rows  # two numbers a coordinate: equal sums have equal ones
    sums, wanted = mixed[first].sum(axis=1), -mixed[second].sum(axis=1)
    ascending = np.argsort(sums)
    near = threshold * np.sqrt(len(rows)) * MIXED
    begin, end = (np.searchsorted(sums[ascending], wanted + shift) for shift in (-near, near))
    met = np.repeat(np.arange(len(wanted)), end - begin)
    places = ascending[np.arange(len(met)) - np.repeat(np.cumsum(end - begin) - (end - begin), end - begin) + begin[met]]
    same = np.abs(checked[first].sum(axis=1)[places] + checked[second].sum(axis=1)[met]) < near
    met, places = met[same], places[same]
    blocks: dict[int, tuple[int, ...]] = {}
    for part in np.array_split(np.arange(len(met)), max(1, len(met) // PART)):
        chosen = np.hstack([first[places[part]], second[met[part]]])
        exact = (rows[:, chosen].sum(axis=2) ** 2).mean(axis=0) < threshold**2
        for members in np.unique(np.sort(chosen[exact], axis=1), axis=0).tolist():
            if len(set(members)) == classes and not set(members) & set(blocks):
                blocks |= dict.fromkeys(members, tuple(int(moving[member]) for member in members))
    plain = [ZeroSumBlock(block, (1,) * classes) for block in dict.fromkeys(blocks.values())]
    return [plain[0], *(_aligned(stacked, plain[0], block) for block in plain[1:])] if plain else []


def _stacked(rounds: Sequence[Array]) -> Array:
    """All rounds, each centred over its clients, (Σ n_t, d)."""
    return np.concatenate([rows - rows.mean(axis=0) for rows in rounds]).astype(np.float64)


def _windows(stacked: Array, order: Array, width: int, classes: int) -> Iterator[Array]:
    for at in range(0, min(len(order), 1500), max(1, width // 4)):
        yield order[at : at + width]
    for cut in CUTS:
        lists = _classes(stacked, cut)
        if len(lists) >= 2:
            centres = np.stack([_centre(stacked, members) for members in lists], axis=1)
            yield from _slices(_alike(stacked, order, centres), width, classes)


def _slices(lists: Sequence[Array], width: int, classes: int) -> Iterator[Array]:
    """Windows of an equal slice of each list, at growing offsets."""
    each = max(1, width // len(lists))
    longest = max(len(members) for members in lists)
    for at in range(0, min(longest, FURTHEST * each), max(1, each // 4)):
        columns = np.concatenate([members[at : at + each] for members in lists])
        if len(columns) < classes:
            return
        yield columns


def _classes(stacked: Array, cut: float) -> list[Array]:
    """The largest coordinates in clusters of like traces (1 − |correlation| up to `cut`, average linkage)."""
    size = np.einsum("rd,rd->d", stacked, stacked)
    top = np.argsort(-size)[:LARGEST]
    unit = stacked[:, top] / np.linalg.norm(stacked[:, top], axis=0)
    apart = np.maximum(1.0 - np.abs(unit.T @ unit), 0.0)
    np.fill_diagonal(apart, 0.0)
    labels = hierarchy.fcluster(hierarchy.linkage(squareform(apart, checks=False), "average"), cut, "distance")
    lists = [top[labels == label] for label in np.unique(labels)]
    return [members for members in lists if len(members) >= FEWEST_IN_CLASS]


def _centre(rows: Array, members: Array) -> Array:
    """The common trace of coordinates that move alike, (rows,), in units of its own mean size."""
    unit = rows[:, members] / np.maximum(np.linalg.norm(rows[:, members], axis=0), 1e-300)
    total: Array = (unit * np.where(unit.T @ unit[:, 0] < 0, -1.0, 1.0)).sum(axis=1)
    if (total**3).sum() < 0:
        total = -total
    return total / max(float(np.sqrt((total**2).mean())), 1e-300)


def _groups(first: Array, k: int) -> Array | None:
    """The group (n,) of each client, where updates fall into `k` groups by their cosines; None where they do not. Any Gram
    matrix shows this."""
    if not 2 <= k < len(first):
        return None
    centred = first - first.mean(axis=0)
    unit = centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-300)
    cosines = unit @ unit.T
    apart = np.maximum(1.0 - cosines, 0.0)
    np.fill_diagonal(apart, 0.0)
    groups = hierarchy.fcluster(hierarchy.linkage(squareform(apart, checks=False), "average"), k, "maxclust") - 1
    same = groups[:, None] == groups[None, :]
    off = ~np.eye(len(first), dtype=bool)
    if len(np.unique(groups)) < k or not (same & off).any() or cosines[same & off].mean() - cosines[~same].mean() < APART:
        return None
    return np.asarray(groups)


def _alike(stacked: Array, order: Array, centres: Array, least: float = 0.6) -> list[Array]:
    """For each column of `centres` the coordinates of `order` that move most like it, largest first."""
    unit = stacked[:, order] / np.maximum(np.linalg.norm(stacked[:, order], axis=0), 1e-300)
    cosines = np.abs(unit.T @ (centres / np.linalg.norm(centres, axis=0)))
    best = cosines.argmax(axis=1)
    lists = [order[(best == k) & (cosines[:, k] > least)] for k in range(centres.shape[1])]
    return [members for members in lists if len(members)]


def null_blocks(stacked: Array, columns: Array, classes: int, threshold: float) -> list[ZeroSumBlock]:
    """The blocks among a window's columns."""
    window = stacked[:, columns]
    squares, vectors = np.linalg.eigh(window.T @ window)
    null = vectors[:, squares < threshold**2 * len(stacked)]
    if null.shape[1] == 0:
        return []
    projector = null @ null.T
    _, labels = connected_components(csr_matrix(np.abs(projector) > 0.5 / classes), directed=False)
    blocks = []
    for label in np.flatnonzero(np.bincount(labels) == classes):
        members = np.flatnonzero(labels == label)
        inside = projector[np.ix_(members, members)]
        if np.abs(np.abs(inside) - 1.0 / classes).max() < 0.2 / classes:
            signs = tuple(1 if value > 0 else -1 for value in inside[0])
            if ((window[:, members] @ np.array(signs)) ** 2).mean() > classes * threshold**2:
                continue  # with fewer rows than columns other vectors are orthogonal to all rows
            blocks.append(ZeroSumBlock(tuple(int(column) for column in columns[members]), signs))
    return blocks


def _aligned(stacked: Array, to: ZeroSumBlock, block: ZeroSumBlock) -> ZeroSumBlock:
    """The same block with its classes in the order of another's, and its overall sign that of the other."""
    columns, others = (stacked[:, list(of.coordinates)] * np.array(of.signs) for of in (block, to))
    cosines = columns.T @ others / np.outer(np.linalg.norm(columns, axis=0), np.linalg.norm(others, axis=0))
    options = []
    for sign in (1, -1):
        rows, columns = linear_sum_assignment(-sign * cosines)
        options.append((float((sign * cosines)[rows, columns].sum()), sign, rows[np.argsort(columns)]))
    _, sign, place = max(options, key=lambda option: option[0])
    return ZeroSumBlock(tuple(block.coordinates[i] for i in place), tuple(sign * block.signs[i] for i in place))
