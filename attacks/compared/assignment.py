"""Quadratic assignment: a kind for each client, so that a matrix over pairs of clients fits a matrix over pairs of kinds.

Minimised is Σ_{i≠j} (seen[i, j] − between[s_i, s_j])² + Σ_i single[i, s_i] over the kinds s. With variances of kinds' entries each square
is divided by its variance and the variance's logarithm is added: twice the negative Gaussian log-likelihood, but for a constant.

Source: the problem is NP-hard (Sahni & Gonzalez 1976), so the search is a heuristic. A beam search assigns the clients one by one, those
least like each other first, and keeps the best partial assignments. A heat bath (Geman & Geman 1984) cools many random assignments at once.
Their ends descend over changes of one client; the best of these also over changes of two clients, of all clients of one kind, and over
renamings of the kinds. How often the result costs more than the truth is measured in `tests/unit/attacks/compared/test_assignment.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from ...errors import InputError
from ...randomness import Stream, stream
from ...types import Array

__all__ = ["Assignment", "assign", "assignment_cost", "renamings_of"]

CHAINS = 24
"""Assignments that are cooled at once."""
SWEEPS = 120
"""Temperatures of a cooling; each client is drawn again at each."""
COLDEST = 1e-3
"""The last temperature, in units of the first."""
BEAM_WORK = 4e7
"""The beam is as wide as this many operations allow, at about n² · K for each partial assignment."""
WIDEST, NARROWEST = 2000, 50
POLISHED = 4
"""So many of the best ends are improved by larger changes."""
ENERGIES_AT_ONCE = 4_000_000
"""Numbers in one array of a batch of energies."""
GAIN = 1e-9
"""A cost counts as lower if it is so by more than this share."""
FORBIDDEN = 1e15
"""The cost of a kind that a client cannot be of."""


@dataclass(frozen=True, eq=False)
class Assignment:
    """The kind of each client, (n,), and its cost."""

    kinds: Array
    cost: float


@dataclass(frozen=True, eq=False)
class _Problem:
    """Costs of pairs as quadratic functions of what was seen: x² square[k, l] + x line[k, l] + rest[k, l].

    `seen` (n, n) is symmetric with a zero diagonal; `single` (n, K) are costs of one client,
    and `allowed` (n, K) says which kinds it may be of.
    """

    seen: Array
    square: Array
    line: Array
    rest: Array
    single: Array
    allowed: Array

    @property
    def n(self) -> int:
        return len(self.seen)

    @property
    def kinds(self) -> int:
        return len(self.line)


def assign(
    seen: Array, between: Array, *, single: Array | None = None, variance: Array | None = None, renamings: Array | None = None,
    starts: Sequence[Array] = (), seed: int = 0, chains: int = CHAINS, sweeps: int = SWEEPS,
) -> Assignment:  # fmt: skip
    """A kind for each of n clients (n,): the kinds whose matrix `between` (K, K) explains the symmetric matrix `seen` (n, n) best.

    The diagonal of `seen` does not count. `single` (n, K) are further costs of a client's kind, infinite for an impossible kind. `variance`
    (K, K) is the variance of an entry between two kinds. The search also tries `renamings` (M, K), permutations of all kinds, and descends
    from the assignments `starts` (n,). The result depends on the arguments alone. Raises `InputError` for shapes that do not fit.
    """
    problem = _problem(seen, between, single, variance)
    rng = stream(seed, "quadratic assignment")
    candidates = [_beam(problem), _cooled(problem, rng, chains, sweeps), *(np.asarray(start, np.int64)[None] for start in starts)]
    ends = _descended(problem, np.unique(np.concatenate(candidates), axis=0))
    costs = _energies(problem, ends)
    best = [_polished(problem, ends[place], renamings) for place in np.argsort(costs, kind="stable")[:POLISHED]]
    kinds = min(best, key=lambda row: float(_energies(problem, row[None])[0]))
    return Assignment(kinds, float(_energies(problem, kinds[None])[0]))


def assignment_cost(
    kinds: Array, seen: Array, between: Array, *, single: Array | None = None, variance: Array | None = None
) -> float:  # fmt: skip
    """What `assign` minimises, for given `kinds` (n,)."""
    return float(_energies(_problem(seen, between, single, variance), np.asarray(kinds, np.int64)[None])[0])


def renamings_of(sets: Sequence[frozenset[int]]) -> Array:
    """Permutations (M, K) of K label sets that exchange two labels each; a set without an image among them stays."""
    place = {labels: i for i, labels in enumerate(sets)}
    renamings = []
    for a, b in combinations(sorted(set().union(*sets)), 2):
        names = {a: b, b: a}
        images = [place.get(frozenset(names.get(label, label) for label in labels), i) for i, labels in enumerate(sets)]
        if len(set(images)) == len(sets):
            renamings.append(images)
    return np.array(renamings, np.int64).reshape(-1, len(sets))


def _problem(seen: Array, between: Array, single: Array | None, variance: Array | None) -> _Problem:
    n, kinds = len(seen), len(between)
    single = np.zeros((n, kinds)) if single is None else np.asarray(single, np.float64)
    spread = np.ones((kinds, kinds)) if variance is None else np.asarray(variance, np.float64)
    if seen.shape != (n, n) or between.shape != (kinds, kinds) or single.shape != (n, kinds) or spread.shape != (kinds, kinds):
        raise InputError(f"assign: shapes {seen.shape}, {between.shape}, {single.shape} and {spread.shape} do not fit together")
    if not n or not kinds or not np.isfinite(single).any(axis=1).all():
        raise InputError("assign: there are no clients, or some client can be of no kind")
    pairs, means, spread = ((np.asarray(matrix, np.float64) + matrix.T) / 2 for matrix in (seen, between, spread))
    np.fill_diagonal(pairs, 0.0)
    allowed = np.isfinite(single)
    rest = means**2 / spread + np.log(spread)
    return _Problem(pairs, 1.0 / spread, -2.0 * means / spread, rest, np.where(allowed, single, FORBIDDEN), allowed)


def _energies(problem: _Problem, kinds: Array) -> Array:
    """Costs (R,) of assignments (R, n)."""
    n, energies = problem.n, []
    off = ~np.eye(n, dtype=bool)
    for part in np.array_split(kinds, max(1, -(-len(kinds) * n * n // ENERGIES_AT_ONCE))):
        at = (part[:, :, None], part[:, None, :])
        pairs = problem.seen**2 * problem.square[at] + problem.seen * problem.line[at] + problem.rest[at]
        energies.append(pairs[:, off].sum(axis=1) + problem.single[np.arange(n), part].sum(axis=1))
    return np.concatenate(energies)


def _fields(problem: _Problem, kinds: Array) -> Array:
    """What each kind of each client would cost with all others as they are, (R, n, K), of assignments (R, n)."""
    others = 1.0 - np.eye(problem.n)
    pairs = problem.seen**2 @ problem.square[kinds] + problem.seen @ problem.line[kinds] + others @ problem.rest[kinds]
    return np.asarray(problem.single + 2.0 * pairs)


def _move(problem: _Problem, fields: Array, kinds: Array, i: int, to: Array) -> None:
    """Change client i to kinds `to` (R,) in all assignments, in place."""
    before = kinds[:, i]
    moved = np.flatnonzero(before != to)
    if not len(moved):
        return
    new, old = to[moved], before[moved]
    column = problem.seen[:, i][None, :, None]
    step = column**2 * (problem.square[new] - problem.square[old])[:, None] + column * (problem.line[new] - problem.line[old])[:, None]
    step = step + (problem.rest[new] - problem.rest[old])[:, None]
    step[:, i] = 0.0
    fields[moved] += 2.0 * step
    kinds[moved, i] = new


def _cooled(problem: _Problem, rng: Stream, chains: int, sweeps: int) -> Array:
    """Assignments (chains, n) from random ones, each client's kind drawn by a heat bath at falling temperatures."""
    kinds: Array = np.where(problem.allowed, rng.random((chains, *problem.allowed.shape)), -1.0).argmax(axis=2)
    fields = _fields(problem, kinds)
    spread = np.where(problem.allowed, fields, np.nan)
    warmest = max(float(np.nanmedian(np.nanstd(spread, axis=2))), 1e-300)
    for temperature in warmest * np.geomspace(1.0, COLDEST, max(2, sweeps)):
        for i in rng.permutation(problem.n):
            noise = rng.gumbel(size=(chains, problem.kinds))
            _move(problem, fields, kinds, int(i), (fields[:, i] - temperature * noise).argmin(axis=1))
    return kinds


def _descended(problem: _Problem, kinds: Array) -> Array:
    """Assignments (R, n) in which no change of one client lowers the cost."""
    kinds = kinds.copy()
    fields, rows = _fields(problem, kinds), np.arange(len(kinds))
    while True:
        before = kinds.copy()
        for i in range(problem.n):
            best = fields[:, i].argmin(axis=1)
            current = fields[rows, i, kinds[:, i]]
            better = fields[rows, i, best] < current - GAIN * np.abs(current)
            _move(problem, fields, kinds, i, np.where(better, best, kinds[:, i]))
        if np.array_equal(before, kinds):
            return kinds


def _beam(problem: _Problem) -> Array:
    """The best assignments (W, n) of a beam search that takes the clients in the order of `_order`."""
    n, count = problem.n, problem.kinds
    width = int(np.clip(BEAM_WORK / (n * n * count), NARROWEST, WIDEST))
    order = _order(problem.seen)
    partial, costs = np.zeros((1, 0), np.int64), np.zeros(1)
    for t, i in enumerate(order):
        added = np.repeat(problem.single[i][None], len(partial), axis=0)
        for j, place in zip(order[:t], range(t), strict=True):
            x, theirs = problem.seen[i, j], partial[:, place]
            table = x * x * problem.square + x * problem.line + problem.rest
            added += 2.0 * table[theirs]
        whole = (costs[:, None] + added).ravel()
        kept = np.argpartition(whole, width)[:width] if len(whole) > width else np.arange(len(whole))
        partial = np.concatenate([partial[kept // count], (kept % count)[:, None]], axis=1)
        costs = whole[kept]
    ordered = np.empty_like(partial)
    ordered[:, order] = partial
    return np.asarray(ordered[np.argsort(costs, kind="stable")[:CHAINS]])


def _order(seen: Array) -> list[int]:
    """Clients such that each is as unlike all before it as can be: what they have in common says the least about kinds."""
    apart = np.square(seen[:, None] - seen[None]).sum(axis=2)
    chosen = [int(apart.sum(axis=1).argmax())]
    nearest = apart[chosen[0]].copy()
    while len(chosen) < len(seen):
        nearest[chosen] = -1.0
        chosen.append(int(nearest.argmax()))
        nearest = np.minimum(nearest, apart[chosen[-1]])
    return chosen


def _polished(problem: _Problem, kinds: Array, renamings: Array | None) -> Array:
    """The assignment (n,) after the larger changes, one after the other as long as one lowers the cost."""
    cost = float(_energies(problem, kinds[None])[0])
    while True:
        changes = [_of_groups(problem, kinds)]
        if renamings is not None and len(renamings):
            changes.append(renamings[:, kinds])
        options = _descended(problem, np.unique(_lowest(problem, np.concatenate(changes)), axis=0))
        options = np.concatenate([options, _of_pairs(problem, kinds)[None]])
        costs = _energies(problem, options)
        place = int(costs.argmin())
        if not costs[place] < cost - GAIN * abs(cost):
            return kinds
        kinds, cost = options[place], float(costs[place])


def _lowest(problem: _Problem, options: Array) -> Array:
    """The cheapest of the assignments (R, n)."""
    return np.asarray(options[np.argsort(_energies(problem, options), kind="stable")[:CHAINS]])


def _of_groups(problem: _Problem, kinds: Array) -> Array:
    """Assignments in which all clients of one kind take another, or exchange kinds with all those of the other."""
    used, every = np.unique(kinds), np.arange(problem.kinds)
    moved = [np.where(kinds == kind, every[:, None], kinds) for kind in used]
    swapped = [np.where(kinds == a, b, np.where(kinds == b, a, kinds))[None] for a, b in combinations(used.tolist(), 2)]
    return np.concatenate([*moved, *swapped])


def _of_pairs(problem: _Problem, kinds: Array) -> Array:
    """The best assignment (n,) that differs in two clients at most."""
    fields, n = _fields(problem, kinds[None])[0], problem.n
    gains = fields - fields[np.arange(n), kinds][:, None]
    best, lowest = kinds, 0.0
    for i in range(n):
        for j in range(i + 1, n):
            x = problem.seen[i, j]
            table = x * x * problem.square + x * problem.line + problem.rest
            both = table - table[:, [kinds[j]]] - table[[kinds[i]]] + table[kinds[i], kinds[j]]
            change = gains[i][:, None] + gains[j][None] + 2.0 * both
            place = int(change.argmin())
            if change.ravel()[place] < lowest:
                lowest, best = float(change.ravel()[place]), kinds.copy()
                best[i], best[j] = divmod(place, problem.kinds)
    return best
