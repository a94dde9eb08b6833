"""Clusters from noisy sums over clients, where the server sees no client's vector: directions, cells, and a test of the partition.

The order is: the eigenvectors of a noisy second moment of which the noise is known (`directions_of`), scaled so that clients' means vary
alike along each (`whitened`); counts and means of cells, of clients that chose the nearest of public points there, refined a few times
(`moved_cells`); Ward's tree of the cells (`tree_of`); and a test of the tree against simulated clients without groups, Gaussian with the
same moment, whose cells are found in the same way with the same noise (`partition_of`). Everything here is computed from sums that carry
their noise already, so it costs no privacy.

Source: this project. Known are the edge of a symmetric Gaussian matrix (Wigner), shrinking of eigenvalues above it (Benaych-Georges &
Nadakuditi 2011), and a test against one Gaussian with the same spectrum (SigClust, Liu et al. 2008). `clustering.group_test` is the same
idea for clients that can be compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..randomness import Stream
from ..types import Array

__all__ = [
    "MOST_DIRECTIONS",
    "Alike",
    "CellPartition",
    "Directions",
    "directions_of",
    "first_cells",
    "moved_cells",
    "partition_of",
    "tree_of",
    "whitened",
]

MOST_DIRECTIONS = 8
"""More directions than this are left out: cells would hold too few clients."""
CELLS_A_CLUSTER = 4
"""So many cells are drawn for each cluster that there may be."""
WEAKEST = 0.1
"""Directions are scaled alike if their variance is at least this share of the largest; weaker ones stay weaker."""
BULK = 0.404
"""The median of the absolute eigenvalues of a symmetric Gaussian matrix, over its edge (of the semicircle law)."""
ABOVE = 0.5
"""The largest eigenvalue of noise exceeds the edge by more than this times r^(−2/3) in one of about twenty matrices."""
FEWEST_NULLS = 0.5
"""A number of clusters is considered where at least this share of simulated cases without groups has a tree with as many."""


@dataclass(frozen=True, eq=False)
class Directions:
    """The directions in which clients differ: `basis` (r, s), the variances (s,) of their means along these.

    `spectrum` (r,) are all eigenvalues, in descending order, and `edge` is what those of noise alone stay below.
    """

    basis: Array
    variances: Array
    spectrum: Array
    edge: float


def directions_of(moment: Array, noise: float, offset: float = 0.0, fewest: int = 0) -> Directions:
    """The eigenvectors of a noisy second moment (r, r) above the edge of its noise, at most `MOST_DIRECTIONS`.

    `noise` is the standard deviation of the noise on the diagonal (off the diagonal it is smaller by √2). The edge is that of the known
    noise or that of the spectrum's bulk, whichever is larger: the bulk has the sampling noise of clients in it. `offset` is the squared
    length of the error of the centre that moments are taken around, which all clients share: from half the edge on it makes an eigenvalue
    of its own, and the edge is raised to that. Variances are shrunk by what noise adds to an eigenvalue above its edge. With `fewest` so
    many directions are taken at least.
    """
    r = len(moment)
    values, vectors = np.linalg.eigh(moment)
    values, vectors = values[::-1], vectors[:, ::-1]
    known = noise * np.sqrt(2 * r)
    edge = max(known, float(np.median(np.abs(values))) / BULK)
    edge = edge if offset <= edge / 2 else offset + edge**2 / (4 * offset)
    edge *= 1 + ABOVE * r ** (-2 / 3)
    s = min(max(int((values > edge).sum()), fewest), MOST_DIRECTIONS, r)
    top = values[:s]
    variances = (top + np.sqrt(np.maximum(top**2 - known**2, 0.0))) / 2
    least = max(known, 1e-12) / 4  # of directions that were asked for and are not above the noise
    return Directions(np.ascontiguousarray(vectors[:, :s]), np.maximum(variances, least), values, edge)


def whitened(directions: Directions) -> Directions:
    """The directions, each divided by the deviation of clients' means along it, so that these have variance 1 along every one.

    Else cells and radius would follow the strongest direction, and groups that differ in a weak one would share cells. The variance of a
    direction counts as no less than `WEAKEST` of the largest: far beside strong ones it is sampling noise of the clients. Computed from a
    moment that was released with its noise, it costs no privacy.
    """
    scales = np.maximum(directions.variances, WEAKEST * directions.variances.max(initial=0.0))
    return replace(directions, basis=directions.basis / np.sqrt(scales), variances=directions.variances / scales)


def first_cells(s: int, draws: Stream) -> Array:
    """Random points (m, s) with the variance of the clients' means in whitened directions, for clients to choose from."""
    return draws.standard_normal((CELLS_A_CLUSTER * (s + 1), s))


def moved_cells(cells: Array, counts: Array, residuals: Array, noise: float) -> Array:
    """Cells (m, s) moved by the noisy mean residual of their clients, at most by √s, the deviation of clients' means.

    `counts` (m,) and `residuals` (m, s), in units of √s, are noisy sums; `noise` is the standard deviation of a count. A mean is shrunk
    where a cell's count is not well above it.
    """
    radius = np.sqrt(cells.shape[1])
    counts = np.maximum(counts, 1.0)
    steps = residuals * (radius / (counts + noise))[:, None]
    clipped = np.minimum(1.0, radius / np.maximum(np.linalg.norm(steps, axis=1), 1e-12))
    return np.asarray(cells + steps * clipped[:, None])


# --- Ward's tree of cells, and the test


@dataclass(frozen=True)
class Tree:
    """Ward's tree of weighted points: for each number of parts the parts, as tuples of points, and what the merge to one fewer costs."""

    parts: Mapping[int, tuple[tuple[int, ...], ...]]
    heights: Mapping[int, float]

    def left_inside(self, k: int) -> float:
        """The share of the sum of squares that is left inside k parts."""
        return sum(height for parts, height in self.heights.items() if parts > k) / max(sum(self.heights.values()), 1e-300)


def tree_of(points: Array, weights: Array) -> Tree:
    """Ward's tree of points (m, s) with weights (m,)."""
    groups: list[tuple[int, ...]] = [(i,) for i in range(len(points))]
    centres, masses = np.array(points, dtype=float), np.array(weights, dtype=float)
    parts, heights = {len(groups): tuple(groups)}, dict[int, float]()
    while len(groups) > 1:
        squares = np.square(centres[:, None] - centres[None]).sum(-1)
        costs = squares * masses[:, None] * masses[None] / (masses[:, None] + masses[None])
        np.fill_diagonal(costs, np.inf)
        first, second = sorted(int(at) for at in np.unravel_index(int(costs.argmin()), costs.shape))
        heights[len(groups)] = float(costs[first, second])
        mass = masses[first] + masses[second]
        centres[first] = (centres[first] * masses[first] + centres[second] * masses[second]) / mass
        masses[first] = mass
        groups[first] += groups.pop(second)
        centres, masses = np.delete(centres, second, 0), np.delete(masses, second)
        parts[len(groups)] = tuple(groups)
    return Tree(parts, heights)


@dataclass(frozen=True, eq=False)
class CellPartition:
    """The clusters found among cells: `centres` (k, s), and the share p of simulated clients without groups that look as grouped.

    `p` is None where nothing was tested.
    """

    centres: Array
    p: float | None

    @property
    def k(self) -> int:
        """The number of clusters."""
        return len(self.centres)


@dataclass(frozen=True, eq=False)
class Alike:
    """What clients without groups would be: `clients` of them, Gaussian with `variances` (s,).

    Cells are found in `steps` sums; `noise_of_counts` and `noise_of_residuals` are the standard deviations of the noise in the sums of
    counts, and of residuals over √s.
    """

    clients: int
    variances: Array
    steps: int
    noise_of_counts: float
    noise_of_residuals: float

    def cells(self, draws: Stream) -> tuple[Array, Array]:
        """Cells (m, s) and their noisy counts (m,), found as those of real clients are."""
        s = len(self.variances)
        places = draws.standard_normal((self.clients, s)) * np.sqrt(self.variances)
        cells = first_cells(s, draws)
        counts = np.zeros(len(cells))
        for _ in range(self.steps):
            nearest = (np.square(cells).sum(1) - 2 * places @ cells.T).argmin(1)
            residuals = (places - cells[nearest]) / np.sqrt(s)
            residuals /= np.maximum(1.0, np.linalg.norm(residuals, axis=1))[:, None]
            sums = np.zeros_like(cells)
            np.add.at(sums, nearest, residuals)
            counts = np.bincount(nearest, minlength=len(cells)) + draws.standard_normal(len(cells)) * self.noise_of_counts
            sums += draws.standard_normal(cells.shape) * self.noise_of_residuals
            cells = moved_cells(cells, counts, sums, self.noise_of_counts)
        return cells, counts


def partition_of(
    cells: Array, counts: Array, alike: Alike, alpha: float, draws: int, rng: Stream, k: int | None = None
) -> CellPartition:  # fmt: skip
    """The clusters of cells (m, s) with noisy counts (m,), if a test at level `alpha` finds any.

    The number is that of 2 to s + 1 (k means in general position span k − 1 directions) whose parts leave the least of the sum of squares
    inside, in standard deviations of `draws` simulated cases without groups. p is the share of these (with
    +1 / +1) that leave as little at any number of parts. Above `alpha` the answer is one cluster. With `k` nothing is tested.
    """
    points, weights = _kept(cells, counts, alike.noise_of_counts)
    tree = tree_of(points, weights)
    if k is not None:
        return CellPartition(_centres(points, weights, tree, min(k, len(points))), None)
    simulated = [tree_of(*_kept(*alike.cells(rng), alike.noise_of_counts)) for _ in range(draws)]
    usual = {number: [null for null in simulated if number + 1 in null.heights] for number in range(2, cells.shape[1] + 2)}
    numbers = [number for number, nulls in usual.items() if number + 1 in tree.heights and len(nulls) > FEWEST_NULLS * draws]
    if not numbers:
        return CellPartition(_centres(points, weights, tree, 1), 1.0)
    inside = {number: [np.log(max(null.left_inside(number), 1e-300)) for null in usual[number]] for number in numbers}
    laws = {number: (float(np.mean(values)), float(np.std(values)) or 1e-12) for number, values in inside.items()}

    def grouped(candidate: Tree) -> tuple[float, int]:
        there = [(number, np.log(max(candidate.left_inside(number), 1e-300))) for number in numbers if number + 1 in candidate.heights]
        return max(((float((laws[number][0] - left) / laws[number][1]), number) for number, left in there), default=(-np.inf, 1))

    observed, best = grouped(tree)
    p = (1 + sum(grouped(null)[0] >= observed for null in simulated)) / (1 + draws)
    return CellPartition(_centres(points, weights, tree, best if p <= alpha else 1), p)


def _kept(cells: Array, counts: Array, noise: float) -> tuple[Array, Array]:
    """The cells whose count is above its noise, with their counts; the two largest at least."""
    keep = counts > max(noise, 0.5)
    if keep.sum() < min(2, len(counts)):
        keep = counts >= np.sort(counts)[-min(2, len(counts))]
    return cells[keep], np.maximum(counts[keep], 1.0)


def _centres(points: Array, weights: Array, tree: Tree, k: int) -> Array:
    return np.array([np.average(points[list(part)], axis=0, weights=weights[list(part)]) for part in tree.parts[k]])
