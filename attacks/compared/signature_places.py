"""Places of permuted coordinates: signatures under one secret permutation that all clients share, with no known client.

Source: a permutation keeps the values of a signature's rows, not their places. So sorted values are features of a client's labels, and so
are inner products between clients. Both give first label sets (by `assignment`). Given label sets, templates of simulated clients show how
each pixel varies over clients; pixels and coordinates are matched by this variation (linear assignment, Kuhn 1955). With the places undone,
label sets are recovered as from clear signatures. Both steps alternate until nothing changes, from several starts; the best fit counts.

Changed signs add no protection where samples are not negative: then the first row, which points at the mean image, is not negative either
(Perron-Frobenius), and shows the signs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from ...errors import InputError
from ...types import Array
from .assignment import assign, renamings_of

__all__ = ["Placed", "agreements", "mean_directions", "place_signatures"]

STEPS = 30
"""Most alternations of places and labels from one start."""
WEIGHTS = (1.0, 10.0, 100.0)
"""What sorted values weigh beside inner products in the first label sets; a start for each."""
LOOKED_AT = 128
"""Coordinates, the largest, by which other names of labels are compared."""
GAIN = 1e-9
"""A fit counts as better if it is so by more than this share."""


@dataclass(frozen=True, eq=False)
class Placed:
    """What was found: pixel q was sent at coordinate `order[q]`, times `signs[q]`; the clients' label sets; how well templates fit.

    `fit` is the mean share of a signature that its template explains, in [0, 1]. `settled`: the search found the same label sets from all
    of its own starts.
    """

    order: Array
    signs: Array
    label_sets: tuple[frozenset[int], ...]
    fit: float
    settled: bool

    def undone(self, rows: Array) -> Array:
        """Rows (..., d) with their coordinates back in place."""
        return np.asarray(rows[..., self.order] * self.signs)


def mean_directions(signatures: Array, rows_per_part: int = 0) -> Array:
    """The directions (n, d) of the mean images in signatures (n, p, d): the first row of each part, averaged, with a sum that is ≥ 0."""
    firsts = np.asarray(signatures, np.float64)[:, :: rows_per_part or signatures.shape[1]]
    total = (firsts * np.where(firsts.sum(axis=2) < 0, -1.0, 1.0)[:, :, None]).sum(axis=1)
    return np.asarray(total / np.maximum(np.linalg.norm(total, axis=1, keepdims=True), 1e-300))


def agreements(signatures: Array, templates: Array) -> Array:
    """How well each of K templates (K, p, d) spans what each of n signatures (n, p', d) spans, (n, K): ‖U_S Uᵀ‖²_F, first row doubled."""
    n, k = len(signatures), len(templates)
    flat = signatures.reshape(-1, signatures.shape[2]) @ templates.reshape(-1, templates.shape[2]).T
    products = flat.reshape(n, signatures.shape[1], k, templates.shape[1])
    return np.asarray((products**2).sum(axis=(1, 3)) + products[:, 0, :, 0] ** 2)


def place_signatures(
    signatures: Array, templates: Mapping[frozenset[int], Array], sizes: Sequence[int], *, rows_per_part: int = 0, signed: bool = False,
    starts: Sequence[Sequence[frozenset[int]]] = (), seed: int = 0,
) -> Placed:  # fmt: skip
    """Places and label sets from signatures (n, p, d) under one permutation of coordinates, `signed` or not.

    `templates` are signatures (p', d) of simulated clients by label set. `sizes` are the clients' numbers of labels. `rows_per_part` is as
    in `invert_signature`. `starts` are label sets of other attacks, from which the search starts as well. Raises `InputError` if no
    template has the size of a client's label set, or if `signed` and samples are negative, since then nothing shows the signs.
    """
    sets = list(templates)
    stacked = np.stack([np.asarray(templates[label_set], np.float64) for label_set in sets])
    allowed = np.array([[len(label_set) == size for label_set in sets] for size in sizes])
    if not allowed.any(axis=1).all():
        raise InputError("place_signatures: some client has a number of labels of which there is no template")
    rows = np.asarray(signatures, np.float64)
    signs = _signs(rows, stacked, rows_per_part) if signed else np.ones(rows.shape[2])
    search = _Search(rows * signs, mean_directions(rows * signs, rows_per_part), stacked, mean_directions(stacked), allowed)
    index = {label_set: i for i, label_set in enumerate(sets)}
    start_kinds = [np.array([index[labels] for labels in start]) for start in starts if all(labels in index for labels in start)]
    own = [_alternated(search, kinds) for kinds in np.unique(_first_kinds(search, seed), axis=0)]
    best = max([*own, *(_alternated(search, kinds) for kinds in start_kinds)], key=lambda end: end.fit)
    best = _renamed(search, best, renamings_of(sets))
    settled = all(np.array_equal(end.kinds, best.kinds) for end in own)
    whole = (rows**2).sum() + (search.firsts**2).sum()
    return Placed(best.order, signs[best.order], tuple(sets[kind] for kind in best.kinds), best.fit / float(whole), settled)


@dataclass(frozen=True, eq=False)
class _Search:
    """Signatures (n, p, d) and their mean directions (n, d), templates (K, p', d) and theirs (K, d), and allowed kinds (n, K)."""

    rows: Array
    firsts: Array
    templates: Array
    means: Array
    allowed: Array


@dataclass(frozen=True, eq=False)
class _End:
    """Kinds (n,), the order (d,) of coordinates, and the sum of the clients' agreements."""

    kinds: Array
    order: Array
    fit: float


def _signs(rows: Array, templates: Array, rows_per_part: int) -> Array:
    """The sign (d,) of each coordinate, from first rows, which have one sign each where samples have."""
    if (mean_directions(templates) < -1e-6).any():
        raise InputError("place_signatures: samples have negative values, so that nothing shows the signs of coordinates")
    firsts = rows[:, :: rows_per_part or rows.shape[1]].reshape(-1, rows.shape[2])
    common = np.linalg.svd(firsts, full_matrices=False)[2][0]
    return np.where(common < 0, -1.0, 1.0)


def _first_kinds(search: _Search, seed: int) -> list[Array]:
    """Kinds (n,) from what no permutation changes: sorted values, and inner products of mean directions."""
    profiles, template_profiles = np.sort(search.firsts, axis=1), np.sort(search.means, axis=1)
    apart = (profiles**2).sum(axis=1)[:, None] + (template_profiles**2).sum(axis=1)[None] - 2.0 * profiles @ template_profiles.T
    profile = np.where(search.allowed, apart, np.inf)
    products, between = search.firsts @ search.firsts.T, search.means @ search.means.T
    kinds = [assign(products, between, single=weight * profile, seed=seed).kinds for weight in WEIGHTS]
    return [profile.argmin(axis=1), *kinds]


def _places(search: _Search, kinds: Array, order: Array | None) -> Array:
    """The order (d,) of coordinates that fits the templates of `kinds` (n,) best; with an earlier order by all rows, else by the first."""
    profit = search.means[kinds].T @ search.firsts  # (pixel, coordinate)
    if order is not None:
        templates = search.templates[kinds]
        turned = np.einsum("iad,ibd->iab", search.rows[:, :, order], templates)
        expected = np.einsum("iab,ibd->iad", turned, templates)
        profit = profit + expected.reshape(-1, expected.shape[2]).T @ search.rows.reshape(-1, search.rows.shape[2])
    return np.asarray(linear_sum_assignment(profit, maximize=True)[1])


def _labelled(search: _Search, order: Array) -> tuple[Array, float]:
    """The kinds (n,) that fit best under an order of coordinates, and the sum of the clients' agreements."""
    fits = np.where(search.allowed, agreements(search.rows[:, :, order], search.templates), -np.inf)
    return fits.argmax(axis=1), float(fits.max(axis=1).sum())


def _alternated(search: _Search, kinds: Array) -> _End:
    """The end of alternating between places and labels."""
    best: _End | None = None
    order: Array | None = None
    for _ in range(STEPS):
        order = _places(search, kinds, order)
        kinds, fit = _labelled(search, order)
        if best is not None and fit <= best.fit * (1 + GAIN):
            break
        best = _End(kinds, order, fit)
    assert best is not None  # there is a first step
    return best


def _renamed(search: _Search, end: _End, renamings: Array) -> _End:
    """The best end that exchanges of two labels' names, and alternating from there, lead to."""
    while len(renamings):
        other = max((renaming[end.kinds] for renaming in renamings), key=lambda kinds: _matched(search, kinds))
        trial = _alternated(search, other)
        if trial.fit <= end.fit * (1 + GAIN):
            break
        end = trial
    return end


def _matched(search: _Search, kinds: Array) -> float:
    """How well the largest coordinates of mean directions can be matched to pixels, by the templates of `kinds` (n,)."""
    means = search.means[kinds]
    pixels, coordinates = (np.argsort(-(matrix**2).sum(axis=0), kind="stable")[:LOOKED_AT] for matrix in (means, search.firsts))
    profit = means[:, pixels].T @ search.firsts[:, coordinates]
    chosen = linear_sum_assignment(profit, maximize=True)
    return float(2.0 * profit[chosen].sum() - (means[:, pixels] ** 2).sum())
