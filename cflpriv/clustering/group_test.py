"""Groups of clients by cross-fitted inner products: how many there are, and whether there are any, without a threshold.

The number of directions in which clients differ, and a test for groups, follow from the Gram matrix of folds of their data
(`unbiased_gram`).

The test of n clients. Eigenvalues of the centred unbiased products above the largest that noise alone gives are directions of
difference. Ward's tree is made in these. Its null hypothesis is that clients vary continuously: Gaussian means with the same spectrum,
and errors with the measured noise. Where it is rejected, the clients are cut into parts and each part is tested, at a level that adds up
over the tree.

Source: the test against one Gaussian is Liu et al. 2008 (SigClust), down a tree Kimes et al. 2017, with Meinshausen's levels (2008).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ..errors import InputError
from ..randomness import Stream
from ..types import Array
from .cuts import ordered_labels
from .unbiased_gram import TINY, UnbiasedGram, centred

__all__ = ["LEAST_TESTED", "LOOK", "Answer", "Groups", "Node", "groups_given", "groups_of"]

Answer = Literal["untested", "alike", "continuum", "groups"]
EDGE_DRAWS, EDGE_LEVEL = 49, 0.95
LOOK = 99
"""After so many draws a test that will find nothing ends."""
HOPELESS = 0.1
LEAST_TESTED = 4
"""Fewer clients are not tested: three points make no groups."""
MOST_DIMENSIONS = 2048
"""Noise is simulated in at most so many dimensions. Fewer than there are make the edge higher, never lower."""
TOGETHER = 24
"""Simulations of up to so many clients are computed together: one by one, calls cost more than their arithmetic."""
DENSE = 400
"""Up to so many clients all eigenvalues are computed; beyond, the leading ones by Lanczos."""
LEADING = 8
"""So many leading eigenvalues are asked for first."""
TOLERANCE_OF_EDGE, TOLERANCE_OF_DRAWS = 1e-3, 1e-4
"""Relative errors of Lanczos in simulations. Those of eigenvalues that stand apart are far smaller; the data's own have none."""
ROUNDING = 1e-9
MOST_DRAWS = 10
"""A small part gets as many draws as can show its level, up to so many times the draws of the first test."""


@dataclass(frozen=True, eq=False)
class Node:
    """One test: its members by position, directions of difference, and what came of the test.

    p = (1 + exceeding) / (1 + draws): so many of the simulations without groups looked as grouped as the members at `k`. `spectrum`: the
    leading eigenvalues, `edge`: the largest that noise alone gives, `tree`: Ward's, as scipy writes it (None without a direction).
    """

    members: Array
    directions: int
    k: int = 1
    exceeding: int = 0
    draws: int = 0
    level: float = 0.0
    edge: float = 0.0
    spectrum: Array = field(default_factory=lambda: np.zeros(0), repr=False)
    tree: Array | None = field(default=None, repr=False)

    @property
    def p(self) -> float:
        return (1 + self.exceeding) / (1 + self.draws)

    @property
    def cut(self) -> bool:
        """Whether the members were found to have groups."""
        return self.directions > 0 and self.draws > 0 and self.p <= self.level


@dataclass(frozen=True, eq=False)
class Groups:
    """Labels from 0 by first member, and the tests in the order in which they were made; the first is that of all clients.

    `set_aside`: positions of clients with too much noise to be tested; they have the label of the nearest group.
    """

    labels: Array
    nodes: tuple[Node, ...]
    set_aside: Array

    @property
    def k(self) -> int:
        return int(self.labels.max()) + 1

    @property
    def answer(self) -> Answer:
        if not self.nodes:
            return "untested"
        if not self.nodes[0].directions:
            return "alike"
        return "groups" if self.nodes[0].cut else "continuum"


def groups_of(unbiased: UnbiasedGram, rng: Stream, *, alpha: float = 0.01, draws: int = 499) -> Groups:
    """Test clients for groups, cut them where there are some, and go on with each part.

    A part of m of n clients is tested at the level alpha (m − 1) / (n − 1), so that the chance of any false cut is about alpha. Small parts
    get as many draws as can show their level, at most `MOST_DRAWS` times `draws`; smaller ones are not tested. Clients with `NOISIER` times
    the median noise are not tested and join the nearest group.
    """
    tested, kept, others = unbiased.usable()
    n = len(kept)
    labels = np.zeros(n, dtype=np.int64)
    nodes: list[Node] = []
    waiting = [np.arange(n)]
    while waiting:
        members = waiting.pop(0)
        level = alpha * ((len(members) - 1) / max(1, n - 1)) * (1 + ROUNDING)
        needed = int(np.ceil(1 / level)) - 1 if level > 0 else np.inf
        if len(members) < LEAST_TESTED or needed > MOST_DRAWS * draws:
            continue
        node = _tested(tested.part(members), kept[members], level, max(draws, int(needed)), rng.spawn(1)[0])
        nodes.append(node)
        if node.cut:
            assert node.tree is not None
            parts = _parts(node.tree, node.k)
            for part in range(1, node.k):
                labels[members[parts == part]] = labels.max() + 1
            waiting += [members[parts == part] for part in range(node.k)]
    return Groups(_with_others(unbiased, kept, others, labels), tuple(nodes), others)


def _with_others(unbiased: UnbiasedGram, kept: Array, others: Array, labels: Array) -> Array:
    """Labels (n,) of all clients: as given for kept clients, else the label of the group with the nearest mean."""
    every = np.zeros(len(unbiased.traces), dtype=np.int64)
    every[kept] = labels
    if len(others):
        member = np.eye(int(labels.max()) + 1)[:, labels]
        member /= member.sum(1, keepdims=True)
        within = np.einsum("gi,ij,gj->g", member, unbiased.products[np.ix_(kept, kept)], member, optimize=True)
        every[others] = (within - 2 * unbiased.products[np.ix_(others, kept)] @ member.T).argmin(1)
    return ordered_labels(every)


def groups_given(unbiased: UnbiasedGram, k: int, rng: Stream) -> Groups:
    """The cut of all clients into k groups, by Ward's tree in the directions above the noise (at least one). Nothing is tested.

    Raises `InputError` for more groups than clients.
    """
    n = len(unbiased.traces)
    if k > n:
        raise InputError(f"crossfit: {k} groups of {n} clients")
    tested, kept, others = unbiased.usable()
    if k > len(kept):
        tested, kept, others = unbiased, np.arange(n), others[:0]
    edge = _edge(tested, rng)
    values, vectors = _above(_dense(tested.products), len(kept), edge)
    r = max(1, int((values > edge).sum()))
    tree = _ward(_coordinates(values[:r], vectors[:, :r], edge))
    node = Node(kept, r, k, edge=edge, spectrum=values, tree=tree)
    return Groups(_with_others(unbiased, kept, others, _parts(tree, k)), (node,), others)


def _tested(unbiased: UnbiasedGram, members: Array, level: float, draws: int, rng: Stream) -> Node:
    """One test: do these clients vary continuously, as measured, or are there groups among them?"""
    n, mean = len(unbiased.traces), float(unbiased.traces.mean())
    edge = _edge(unbiased, rng)
    values, vectors = _above(_dense(unbiased.products), n, edge)
    r = int((values > edge).sum())
    if r == 0:
        return Node(members, 0, edge=edge, spectrum=values)
    points = _coordinates(values[:r], vectors[:, :r], edge)
    most = max(2, min(r + 1, n // 2))  # k means in general position span k − 1 directions
    tree = _ward(points)
    breaks, left = _curves(_gains(tree), most)
    along = np.full(r, unbiased.spread / mean)
    if unbiased.cross is not None:  # the noise along each direction of difference
        across = vectors[:, :r].T.astype(unbiased.cross.dtype) @ unbiased.cross
        along = np.minimum((across.astype(np.float64) ** 2).mean(1) / values[:r], mean)
    rest = max(mean - float(along.sum()), 0.05 * mean)
    spread = max(unbiased.spread - float((along**2).sum()), 0.05 * unbiased.spread)
    law = _Noise(along, rest, _dimensions(rest, spread, n))
    signal = np.sqrt((points**2).sum(0) / (n - 1))
    simulate = _simulation(unbiased, law, signal)
    null_breaks, null_left = np.empty((draws, most - 1)), np.empty((draws, most - 1))
    k, exceeding, done = 1, 0, 0
    while done < draws:
        block = slice(done, min(done + LOOK, draws))
        simulated = map(simulate, rng.spawn(block.stop - done))
        null_breaks[block], null_left[block] = _simulated_curves(simulated, n, edge, r + 2, most)
        done = block.stop
        if done not in (min(LOOK, draws), draws):
            continue
        k = int((breaks - null_breaks[:done].mean(0)).argmax()) + 2  # where the tree breaks more than that of a simulation
        centre, scale = null_left[:done].mean(0), null_left[:done].std(0) + 1e-9
        reached = float(((centre - left) / scale)[k - 2])
        exceeding = done - int((((centre - null_left[:done]) / scale).max(1) < reached).sum())
        if (1 + exceeding) / (1 + done) > HOPELESS:
            break
    return Node(members, r, k, exceeding, done, level, edge, values, tree)


@dataclass(frozen=True, eq=False)
class _Noise:
    """Noise of the average client: variances `along` the directions of difference, and `rest` spread evenly over `dimensions` others."""

    along: Array
    rest: float
    dimensions: int


def _dimensions(trace: float, spread: float, n: int) -> int:
    """Noise of this trace and spread is as if spread evenly over so many dimensions."""
    return int(np.clip(round(trace**2 / max(spread, TINY)), 1, min(4 * n + 200, MOST_DIMENSIONS)))


def _edge(unbiased: UnbiasedGram, rng: Stream) -> float:
    """The largest eigenvalue that noise alone gives: if it is spread evenly (the 95 % quantile of draws), or has favourite directions."""
    n, mean = len(unbiased.traces), float(unbiased.traces.mean())
    simulate = _simulation(unbiased, _Noise(np.zeros(0), mean, _dimensions(mean, unbiased.spread, n)), np.zeros(0))
    simulated = map(simulate, rng.spawn(EDGE_DRAWS))
    largest = _spectra(simulated)[0][:, 0] if n <= TOGETHER else [_leading(one, n, 1, TOLERANCE_OF_EDGE)[0][0] for one in simulated]
    # what rounding makes of equal products is no difference, however small the noise
    rounding = n * 100 * float(np.finfo(unbiased.products.dtype).eps) * float(np.abs(np.diag(unbiased.products)).max())
    edge = max(float(np.quantile(largest, EDGE_LEVEL)), rounding)
    if unbiased.noise is None:
        return edge
    own = np.diag(unbiased.noise)
    between = _dense(unbiased.noise, -own)
    return max(edge, float(_leading(between, n, 1)[0][0]))


Operator = tuple[Callable[[Array], Array], Callable[[], Array]]
"""A symmetric matrix: centred times a vector, and as a whole, not centred."""


def _simulation(unbiased: UnbiasedGram, law: _Noise, signal: Array) -> Callable[[Stream], Operator]:
    """Draws unbiased products of clients without groups: Gaussian true means of deviations `signal`, errors by the law of noise."""
    n, folds = len(unbiased.traces), unbiased.folds
    size = unbiased.traces / unbiased.traces.mean()
    variances = np.concatenate([law.along, np.full(law.dimensions, law.rest / law.dimensions)])
    by_client, by_dimension = np.sqrt(size), np.sqrt(variances)[:, None]

    def draw(rng: Stream) -> Operator:
        # by dimension, so that rounding the number of dimensions otherwise adds or takes a few and leaves all others as they are
        means = (rng.standard_normal((len(variances), n)) * by_client * by_dimension).T
        others, of_folds = rng.spawn(2)
        means[:, : len(signal)] += others.standard_normal((len(signal), n)).T * signal
        if folds:  # |g|² less what the folds differ by: independent of g, and a sum of chi-squares
            degrees = folds - 1
            squares = of_folds.chisquare(degrees, (n, len(law.along))) @ law.along if len(law.along) else np.zeros(n)
            squares += of_folds.chisquare(degrees * law.dimensions, n) * (law.rest / law.dimensions)
            correction = -size * squares / degrees
        else:
            correction = -unbiased.traces

        def times(x: Array) -> Array:
            x = x - x.mean()
            y = means @ (means.T @ x) + correction * x
            return np.asarray(y - y.mean())

        def whole() -> Array:
            products = means @ means.T
            products.ravel()[:: n + 1] += correction
            return np.asarray(products)

        return times, whole

    return draw


def _dense(matrix: Array, correction: Array | float = 0.0) -> Operator:
    """A matrix, with `correction` (n,) added on its diagonal."""

    def times(x: Array) -> Array:
        x = x - x.mean()
        y = (matrix @ x.astype(matrix.dtype)).astype(np.float64) + correction * x
        return np.asarray(y - y.mean())

    return times, lambda: matrix + np.diag(np.broadcast_to(correction, len(matrix)))


def _leading(of: Operator, n: int, count: int, tolerance: float = 0.0) -> tuple[Array, Array]:
    """The `count` largest eigenvalues, or all of a small matrix, and their vectors as columns; the largest first."""
    times, whole = of
    if n <= DENSE or count >= n // 2:
        values, vectors = np.linalg.eigh(centred(whole()))
    else:
        from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh  # slow to import

        start = np.sin(np.arange(1.0, n + 1.0))  # any vector that is not special; the same for all, so that results repeat
        if not times(start).any():
            return np.zeros(count), np.eye(n, count)
        try:
            values, vectors = eigsh(LinearOperator((n, n), matvec=times, dtype=np.float64), k=count, which="LA", v0=start, tol=tolerance)
        except ArpackError:
            values, vectors = np.linalg.eigh(centred(whole()))
    order = np.argsort(values)[::-1]
    return np.asarray(values[order]), np.asarray(vectors[:, order])


def _spectra(simulated: Iterable[Operator]) -> tuple[Array, Array]:
    """All eigenvalues (draws, n) of small matrices, the largest first, and their vectors as columns."""
    values, vectors = np.linalg.eigh(centred(np.array([whole() for _, whole in simulated])))
    return np.asarray(values[:, ::-1]), np.asarray(vectors[:, :, ::-1])


def _above(of: Operator, n: int, edge: float, count: int = LEADING, tolerance: float = 0.0) -> tuple[Array, Array]:
    """Leading eigenvalues and vectors, with all above the edge among them."""
    while True:
        values, vectors = _leading(of, n, count, tolerance)
        if values[-1] <= edge or len(values) >= n // 2:
            return values, vectors
        count *= 2


def _coordinates(values: Array, vectors: Array, edge: float) -> Array:
    """Clients as points (n, r) in their directions of difference, with the part of noise in each eigenvalue taken off."""
    shrunk = (np.maximum(values, 0.0) + np.sqrt(np.maximum(values**2 - edge**2, 0.0))) / 2
    return np.asarray(vectors * np.sqrt(shrunk + TINY))


def _ward(points: Array) -> Array:
    """Ward's tree of points (n, r)."""
    from scipy.cluster.hierarchy import linkage  # slow to import

    return np.asarray(linkage(points, "ward"))


def _parts(tree: Array, k: int) -> Array:
    """The part (n,) of each point in the cut of a tree into k."""
    from scipy.cluster.hierarchy import cut_tree  # slow to import

    return np.asarray(cut_tree(tree, n_clusters=[k]).ravel())


def _gains(tree: Array) -> Array:
    """What each merge (n − 1,) of Ward's tree adds to the variation within clusters."""
    return np.asarray(tree[:, 2] ** 2 / 2)


def _gains_of_many(points: Array) -> Array:
    """The gains (draws, n − 1) of Ward's trees of many sets of points (draws, n, r), by one step of all trees after the other."""
    draws, n, _ = points.shape
    squares = ((points[:, :, None] - points[:, None]) ** 2).sum(3)
    squares[:, np.arange(n), np.arange(n)] = np.inf
    sizes, gains, row = np.ones((draws, n)), np.empty((draws, n - 1)), np.arange(draws)
    for step in range(n - 1):
        one, other = np.divmod(squares.reshape(draws, -1).argmin(1), n)
        least = squares[row, one, other]
        gains[:, step] = least / 2
        size_one, size_other = sizes[row, one][:, None], sizes[row, other][:, None]
        merged = (size_one + sizes) * squares[row, one] + (size_other + sizes) * squares[row, other] - sizes * least[:, None]
        squares[row, one] = squares[row, :, one] = merged / (size_one + size_other + sizes)  # Lance and Williams
        squares[row, other] = squares[row, :, other] = np.inf
        sizes[row, one] += sizes[row, other]
    return gains


def _simulated_curves(simulated: Iterable[Operator], n: int, edge: float, count: int, most: int) -> tuple[Array, Array]:
    """The curves (draws, most − 1) of simulations. At least one direction counts in each."""
    if n > TOGETHER:
        made = []
        for one in simulated:
            values, vectors = _above(one, n, edge, count, TOLERANCE_OF_DRAWS)
            directions = max(1, int((values > edge).sum()))
            made.append(_gains(_ward(_coordinates(values[:directions], vectors[:, :directions], edge))))
        return _curves(np.array(made), most)
    values, vectors = _spectra(simulated)
    counted = values > edge
    counted[:, 0] = True
    points = _coordinates(values[:, None], vectors, edge) * counted[:, None]
    return _curves(_gains_of_many(points[:, :, : int(counted.sum(1).max())]), most)


def _curves(gains: Array, most: int) -> tuple[Array, Array]:
    """For k = 2..most, each (..., most − 1): the log ratio of merge k → k − 1 to the one before, and the log share of variation within
    k clusters. `gains` (..., n − 1) are those of a tree."""
    n = gains.shape[-1] + 1
    within = np.concatenate([np.zeros((*gains.shape[:-1], 1)), np.cumsum(gains, axis=-1)], axis=-1)[..., ::-1]
    k, whole = np.arange(2, most + 1), within[..., :1]
    shares = np.where(whole > 0, within[..., k - 1] / np.where(whole > 0, whole, 1.0), 1.0)  # points that are all equal have no groups
    return np.log(gains[..., n - k] + TINY) - np.log(gains[..., n - k - 1] + TINY), np.log(shares + TINY)
