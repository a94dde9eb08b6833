"""Clusterings made by a test, for a report: what the evidence of a run holds, in numbers and in words. `tested_pictures` draws it.

Any algorithm may give such evidence: the eigenvalues `spectrum`, the `edge` that noise alone reaches, the `tests` in their order (the first
is that of all clients), and with `distance` and `tree` what `run_files` reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...algorithms.shared.grouping import p_words
from ...types import Array
from .pictures import ClusteringEvidence
from .run_files import RunFiles, require

__all__ = ["GroupTest", "RunTests", "cut_height", "node_of", "released_words", "tested_of"]

LISTED = 30
"""So many tests are listed; the others are counted."""
NAMED = 12
"""So many clients of a test are named in the table."""


@dataclass(frozen=True)
class GroupTest:
    """One test: its clients, the number of directions in which they differ, and whether k groups are significant: p ≤ level.

    Without a direction there is no test, so p and level say nothing; with level 0 the number of groups was given.
    """

    clients: tuple[int, ...]
    directions: int
    k: int
    p: float
    level: float

    @property
    def given(self) -> bool:
        return self.directions > 0 and self.level == 0

    @property
    def cut(self) -> bool:
        """Whether the clients were cut into `k` groups."""
        return self.k > 1 and (self.given or (self.directions > 0 and self.p <= self.level))

    @property
    def words(self) -> str:
        """The outcome, short enough to stand in a picture."""
        if self.given:
            return f"cut into {self.k}, as given"
        if not self.directions:
            return "all alike"
        return f"p = {self.p:.2g}, {f'cut into {self.k}' if self.cut else 'not cut'}"


@dataclass(frozen=True, eq=False)
class RunTests:
    """The tests of a run: eigenvalues (m,), the largest first, the edge of noise, and at least one test."""

    spectrum: Array
    edge: float
    tests: tuple[GroupTest, ...]

    @property
    def first(self) -> GroupTest:
        return self.tests[0]

    @property
    def above(self) -> int:
        """How many eigenvalues are above the edge."""
        return int((self.spectrum > self.edge).sum())

    @property
    def groups(self) -> int:
        """How many groups the tests found, before any were merged."""
        return 1 + sum(test.k - 1 for test in self.tests if test.cut)

    def caption(self, k: int) -> str:
        """What was found, in sentences; `k` clusters are in use."""
        root, later = self.first, self.tests[1:]
        n = len(root.clients)
        if root.given:
            return f"The number of groups, {root.k}, was given, so nothing was tested: the tree is cut there whether or not groups exist."
        if not root.directions:
            return (
                f"All alike: no eigenvalue is above the edge of noise, so there is no direction in which the {n} clients differ, no tree "
                "of them and nothing to test. One model is trained."
            )
        differ = f"the {n} clients differ in {_count(root.directions, 'direction')}"
        if not root.cut:
            return (
                f"No clear groups: {differ}, but clients that vary continuously, without groups, look as grouped (p = {root.p:.2g}, above "
                f"the level {root.level:.2g}). The tree is not cut, and its branches are not groups. One model is trained."
            )
        rejected = f"the test rejects that they vary continuously (p = {root.p:.2g}, level {root.level:.2g})"
        sentence = f"Groups: {differ}, and {rejected}: {root.k} groups."
        again = sum(test.cut for test in later)
        if again:
            parts = "its part" if again == 1 else "their parts"
            sentence += f" Of the {len(later)} tests of parts, {again} cut {parts} again: {self.groups} groups."
        elif later:
            sentence += f" {_count(len(later), 'test')} of single groups found nothing more to cut."
        else:
            sentence += " No group was tested again: each is too small for that."
        merged = f" Groups below the minimum cohort size were merged, which leaves {k}." if k < self.groups else ""
        return sentence + merged

    def rows(self) -> list[dict[str, str]]:
        """The tests as a table."""
        return [
            {
                "number": str(number),
                "clients": f"all {len(test.clients)}" if number == 1 else _names(test.clients),
                "directions": str(test.directions),
                "p": f"{test.p:.3g}" if test.directions and not test.given else "–",
                "level": f"{test.level:.2g}" if test.directions and not test.given else "–",
                "result": _result(test),
            }
            for number, test in enumerate(self.tests[:LISTED], 1)
        ]  # fmt: skip

    def spectrum_words(self) -> str:
        """The picture of the spectrum for those who do not see it."""
        some = self.spectrum[: self.above]
        rest = self.spectrum[self.above : self.above + 1]
        largest = f", from {some[-1]:.3g} to {some[0]:.3g}" if self.above > 1 else f", at {some[0]:.3g}" if self.above else ""
        below = f"; the largest below it is {rest[0]:.3g}" if len(rest) else ""
        return f"Eigenvalues in decreasing order: {self.above} above the edge of noise at {self.edge:.3g}{largest}{below}"

    def tree_words(self, evidence: ClusteringEvidence) -> str:
        """The picture of the tree for those who do not see it."""
        where = f"cut into {self.first.k} branches" if self.first.cut else "not cut"
        clusters = "; ".join(
            f"test {number} of {len(test.clients)} clients: {test.words}" for number, test in enumerate(self.tests[:LISTED], 1)
        )
        colours = "cluster; true groups unknown" if evidence.groups is None else "cluster and by true group"
        return f"Ward's tree of {len(evidence.clients)} clients, {where}, leaves coloured by {colours}. {clusters}"

    def beside_tree(self, evidence: ClusteringEvidence) -> bool:
        """Whether the clients of some test are no whole branch of the tree, which is that of the first test."""
        if evidence.tree is None:
            return False
        position = {int(client): place for place, client in enumerate(evidence.clients)}
        return not all(node_of(evidence.tree, [position[client] for client in test.clients])[1] for test in self.tests)


def tested_of(run: RunFiles) -> RunTests | None:
    """The tests of a run's clustering, None without. Raises `InputError` naming measured.json if they are damaged."""
    scalars: Mapping[str, Any] = (run.measured or {}).get("evidence") or {}
    path = run.folder / "measured.json"
    if not {"spectrum", "edge", "tests"} <= set(scalars) or not scalars["tests"]:
        return None
    try:
        spectrum, edge = np.array(scalars["spectrum"], dtype=np.float64), float(scalars["edge"])
        tests = tuple(
            GroupTest(tuple(map(int, test["clients"])), int(test["directions"]), int(test["k"]), float(test["p"]), float(test["level"]))
            for test in scalars["tests"]
        )
    except (KeyError, TypeError, ValueError) as error:
        require(False, path, f"the tests of the clustering are damaged ({type(error).__name__}: {error})")
        raise AssertionError from error
    require(spectrum.ndim == 1 and bool(np.isfinite([*spectrum, edge]).all()), path, "'spectrum' and 'edge' are not finite numbers")
    known = set(scalars.get("clients", tests[0].clients))
    require(all(test.clients and set(test.clients) <= known for test in tests), path, "a test is of clients that are not in 'clients'")
    require(all(1 <= test.k <= len(test.clients) for test in tests), path, "a test has more groups than clients")
    return RunTests(np.sort(spectrum)[::-1], edge, tests)


def released_words(run: RunFiles) -> str | None:
    """One line on what a protection released of a test, where that is less than all of its evidence; else None."""
    measured = run.measured or {}
    scalars, source = measured.get("evidence") or {}, measured.get("evidence_source")
    seen = scalars if source == "server" else {}
    if "answer" not in measured or "tests" in seen:
        return None
    released, kept = ["the labels", f"the answer ({measured['answer']})"], ["the spectrum", "the tree", "the tests of parts"]
    if p_words(measured):
        released.append(p_words(measured))
    if measured.get("directions") is not None:
        released.append(f"the number of directions ({measured['directions']})")
    (released if seen else kept).append("the distances, with noise" if seen else "the distances")
    return f"Released to the server: {_listed(released)}. Not released: {_listed(kept)}."


def cut_height(tree: Array, k: int) -> float:
    """The middle between the merges that a cut of the tree (n − 1, 4) into k branches, 2 ≤ k ≤ n, separates."""
    heights = np.concatenate([[0.0], tree[:, 2]])
    return float(heights[-k + 1] + heights[-k]) / 2


def node_of(tree: Array, members: Sequence[int]) -> tuple[int, bool]:
    """The lowest node of a linkage tree (n − 1, 4) above all `members`, positions of leaves, and whether these are all below it."""
    n = len(tree) + 1
    inside = np.zeros(2 * n - 1, dtype=np.int64)
    inside[list(members)] = 1
    for merge in range(n - 1):
        inside[n + merge] = inside[int(tree[merge, 0])] + inside[int(tree[merge, 1])]
    node = int(np.flatnonzero(inside == len(members))[0])
    size = 1 if node < n else int(tree[node - n, 3])
    return node, size == len(members)


def _result(test: GroupTest) -> str:
    if test.given:
        return f"cut into {test.k} groups, as given; not tested"
    if not test.directions:
        return "all alike: no direction above the noise"
    return f"cut into {_count(test.k, 'group')}" if test.cut else f"not cut: {test.k} groups are not significant"


def _names(clients: Sequence[int]) -> str:
    few = ", ".join(map(str, clients[:NAMED]))
    return f"{len(clients)}: {few}{', …' if len(clients) > NAMED else ''}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"
