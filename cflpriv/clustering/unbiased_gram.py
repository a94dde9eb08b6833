"""What the test for groups takes of clients: unbiased products of their true means, and how much of these is noise.

Each client gives the means of its data's signature over disjoint random parts (folds). Products of different folds are unbiased for the
products of the clients' true means, and differences of folds are noise of the same law as a mean's error. Errors that a protection leaves
in the released products count as noise in the same way: the products of these differences have them too, so the edge rises with them.

Source: Walther et al. 2016 (cross-validated Mahalanobis distance) and Chen & Qin 2010; that of the test is in `group_test`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..errors import InputError
from ..types import Array
from .similarity import Gram

__all__ = [
    "LONGEST", "NOISIER", "TINY", "UnbiasedGram", "bounded", "centred",
    "distances_to_groups", "spread_of", "unbiased_of_folds", "unbiased_of_vectors",
]  # fmt: skip

SINGLE_ABOVE = 4096
"""More clients' products are kept in float32: three matrices (n, n) of 10,000 clients are 1.2 GB. Their sums are made in float64."""
ROWS_AT_ONCE = 128
MEDIAN_OF_SEMICIRCLE = 0.404
"""The median distance of noise eigenvalues from zero, as a share of the largest (Wigner's semicircle)."""
LONGEST = 2.0
"""The squared norm of a sketched vector of norm 1 is below this: it errs by √(2 / sketch)."""
LONGER = 8.0
"""No squared norm is above so many times the median: clients of few labels have longer means, but not by more."""
NOISIER = 8.0
"""A client with more than this many times the median noise is not tested: its noise would hide the structure of the other clients."""
TINY = 1e-300


@dataclass(frozen=True, eq=False)
class UnbiasedGram:
    """What the test takes of n clients.

    products: (n, n), unbiased for the inner products of the clients' true means, also on the diagonal; values below 0 there are right.
    traces: (n,), each client's noise E|error|². spread: the mean over pairs of tr(Σᵢ Σⱼ) of their noise, for two clients of average trace.
    folds: how many means each client gave; 0 where the law of the noise is public.
    noise: (n, n), the Gram of noise vectors; cross: (n, n), products of client i's mean with client j's noise. None with `folds` = 0.
    """

    products: Array
    traces: Array
    spread: float
    folds: int
    noise: Array | None = None
    cross: Array | None = None

    def part(self, at: Array) -> "UnbiasedGram":
        """Some of the clients. Relative to its size, the spread of noise stays at least that of all: a few pairs tell little of it."""
        if len(at) == len(self.traces):
            return self
        made = self._block(at)
        spread = self.spread * float(made.traces.mean() / self.traces.mean()) ** 2
        if made.noise is not None:
            spread = max(spread_of(made.noise, made.traces), spread)
        return replace(made, spread=spread)

    def usable(self) -> "tuple[UnbiasedGram, Array, Array]":
        """The products of the clients that can be tested, the positions of these clients, and the positions of clients with too much noise.

        One client's noise would raise the edge for all: a lie of one vector, or a client with next to no samples, would hide all groups.
        """
        quiet = self.traces <= NOISIER * np.median(self.traces)
        kept, others = np.flatnonzero(quiet), np.flatnonzero(~quiet)
        if not len(others):
            return self, kept, others
        spread = self.spread if self.noise is None else spread_of(self.noise[np.ix_(kept, kept)], self.traces[kept])
        return replace(self, spread=max(spread, TINY))._block(kept), kept, others

    def _block(self, at: Array) -> "UnbiasedGram":
        both = np.ix_(at, at)
        noise, cross = (None if term is None else term[both] for term in (self.noise, self.cross))
        return replace(self, products=self.products[both], traces=self.traces[at], noise=noise, cross=cross)


def bounded(gram: Gram, longest: float = LONGEST) -> Gram:
    """The same Gram, with all vectors of a client scaled down if one has a squared norm above `longest`, or `LONGER` times the median.

    Honest means are no longer than `longest`. A client that sends long vectors would hide all differences between others.
    """
    squares = np.array([np.diagonal(gram.block(slice(i, i + 1), slice(i, i + 1))[0, :, 0, :]).max() for i in range(gram.n)], np.float64)
    most = min(longest, LONGER * float(np.median(squares)))
    scale = np.sqrt(np.where(squares > most, most / np.maximum(squares, TINY), 1.0))

    def block(rows: slice, cols: slice) -> Array:
        return np.asarray(gram.block(rows, cols) * scale[rows][:, None, None, None] * scale[cols][None, None, :, None])

    return Gram(gram.clients, gram.p, block, gram.error) if (scale < 1).any() else gram


def unbiased_of_folds(gram: Gram) -> UnbiasedGram:
    """The products of clients that gave the means of p ≥ 2 folds each, p even, as the p vectors of `gram`.

    Of fold means f_ia the client's mean is g_i. Off the diagonal ⟨g_i, g_j⟩ is unbiased as it is; on it the products of different folds of
    one client are. The noise vector is half the difference between the means of the two halves of its folds.

    Raises `InputError` for an odd number of folds, or fewer than two clients.
    """
    n, p = gram.n, gram.p
    if p < 2 or p % 2:
        raise InputError(f"crossfit: clients gave {p} folds each, expected an even number of them")
    if n < 2:
        raise InputError(f"crossfit: {n} clients cannot be compared")
    mean, half = np.full(p, 1 / p), np.repeat([1 / p, -1 / p], p // 2)
    products, noise, cross = (np.empty((n, n), np.float64 if n <= SINGLE_ABOVE else np.float32) for _ in range(3))
    for start in range(0, n, ROWS_AT_ONCE):
        rows = slice(start, min(start + ROWS_AT_ONCE, n))
        block = np.asarray(gram.block(rows, slice(0, n)), np.float64)  # (rows, p, n, p)
        means = np.einsum("iajb,b->iaj", block, mean)
        halves = np.einsum("iajb,b->iaj", block, half)
        products[rows] = np.einsum("iaj,a->ij", means, mean)
        noise[rows] = np.einsum("iaj,a->ij", halves, half)
        cross[rows] = np.einsum("iaj,a->ij", halves, mean)
        for i in range(rows.start, rows.stop):
            own = block[i - start, :, i, :]
            products[i, i] = (own.sum() - np.trace(own)) / (p * (p - 1))
    traces = np.maximum(np.diag(noise).astype(np.float64), TINY)
    return UnbiasedGram(products, traces, max(spread_of(noise, traces), TINY), p, noise, cross)


def unbiased_of_vectors(gram: Gram, traces: Array, dimensions: int) -> UnbiasedGram:
    """The products of clients that gave one vector each, whose error has the public trace E|error|² (one for all, or one a client).

    How the noise is spread over the `dimensions` of a vector is read off the bulk of the spectrum: for few clients it follows a semicircle
    of radius 2 √(n v). Noise in D dimensions has a spread of at least trace² / D, which is what counts for many.

    Raises `InputError` for more than one vector a client, or fewer than two clients.
    """
    if gram.p != 1 or gram.n < 2:
        raise InputError(f"crossfit: {gram.n} clients with {gram.p} vectors each, expected two or more with one")
    products = np.array(gram.matrix(), np.float64)
    noise = np.broadcast_to(np.asarray(traces, np.float64), gram.n).copy()
    np.fill_diagonal(products, np.diag(products) - noise)
    eigenvalues = np.linalg.eigvalsh(centred(products))
    radius = np.median(np.abs(eigenvalues - np.median(eigenvalues))) / MEDIAN_OF_SEMICIRCLE
    spread = float(np.clip((radius / 2) ** 2 / gram.n, noise.mean() ** 2 / dimensions, noise.mean() ** 2))
    return UnbiasedGram(products, np.maximum(noise, TINY), max(spread, TINY), 0)


def distances_to_groups(gram: Gram, clients: range, labels: Array, k: int, traces: Array) -> Array:
    """The squared distances (clients, k) of some clients to the means of groups: unbiased, whatever the clients' sizes.

    `clients` are positions in `gram`, of two folds each. The first clients of it have `labels` (−1: in no group); these may be among them.
    Clients may have one vector each instead, of which `traces` (n,) has the noise E|error|².
    """
    old, single = len(labels), gram.p == 1
    member = np.array([labels == group for group in range(k)], np.float64)  # (k, old)
    member /= np.maximum(member.sum(1, keepdims=True), 1.0)
    within = -(member**2 @ traces[:old]) if single else np.zeros(k)  # ⟨ā, b̄⟩ of the groups, unbiased for the squared norms of true means
    for rows in _slices(range(old)):
        products = np.asarray(gram.block(rows, slice(0, old)), np.float64)[:, 0, :, -1]
        within += np.einsum("kr,rk->k", member[:, rows], products @ member.T)
    distances = np.empty((len(clients), k))
    for rows in _slices(clients):
        others = np.asarray(gram.block(rows, slice(0, old)), np.float64)  # (rows, p, old, p)
        towards = (others[:, 0, :, -1] + others[:, -1, :, 0]) @ member.T
        own = np.array([gram.block(slice(row, row + 1), slice(row, row + 1))[0, 0, 0, -1] for row in range(rows.start, rows.stop)])
        if single:  # a client's product with itself holds its noise
            own = own - traces[rows]
            inside = np.arange(rows.start, min(rows.stop, old))
            towards[: len(inside)] -= 2 * (traces[inside] * member[:, inside]).T
        distances[rows.start - clients.start : rows.stop - clients.start] = own[:, None] - towards + within
    return distances


def _slices(positions: range) -> Iterator[slice]:
    """The positions, `ROWS_AT_ONCE` at a time."""
    for start in range(positions.start, positions.stop, ROWS_AT_ONCE):
        yield slice(start, min(start + ROWS_AT_ONCE, positions.stop))


def spread_of(noise: Array, traces: Array) -> float:
    """The mean square of the noise's Gram off the diagonal, for clients of average trace: large and small clients are not alike in it."""
    own = np.diag(noise).astype(np.float64)
    squares = float(np.einsum("ij,ij->", noise, noise, dtype=np.float64) - own @ own)
    pairs = float(traces.sum() ** 2 - traces @ traces)
    return squares / max(pairs, TINY) * float(traces.mean()) ** 2


def centred(matrix: Array) -> Array:
    """H M H with H = I − 11ᵀ/n, of one symmetric matrix or several (..., n, n)."""
    rows = matrix.mean(-1)
    return np.asarray(matrix - rows[..., :, None] - rows[..., None, :] + rows.mean(-1)[..., None, None])
