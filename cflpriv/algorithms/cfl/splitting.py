"""CFL, where the Gram may be seen: the optimal bipartition, the tests of a split, and which child a newcomer is more like.

Source: Sattler, Müller, Samek 2019, Algorithms 1 and 4, equations 17, 25, 28, 33, 39 and 44; deviations are listed in `cfl`. Public code on
inner products alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from ...clustering.cuts import linkage_tree, ordered_labels
from ...clustering.similarity import SimilarityMatrix, cosines, drowned
from ...contract.operations import GramView, Results
from ...errors import InputError
from ...types import Array

__all__ = ["REFUSED_BY", "SPLIT", "Bipartition", "MoreSimilar", "bipartition", "cross_similarity", "pictured", "separation_gap"]

MOVING, CONGRUENT, TOO_NOISY, TOO_SMALL, SPLIT, DROWNED = range(6)
"""Outcomes of a test: mean norm at or above ε₁; no client norm above ε₂; γ_max; a side too small; split; the protection's errors are too
large for norms like these.
"""
REFUSED_BY = {CONGRUENT: "eps2", TOO_NOISY: "gamma_max", TOO_SMALL: "smallest", DROWNED: "error"}
"""The parameter, or "error", that refuses the split of a cluster that stands still."""


def bipartition(alpha: Array, linkage: Literal["single", "complete"] = "single") -> Array:
    """Sides 0 and 1 of m ≥ 2 clients such that the largest similarity across is smallest (eq. 25), exactly; client 0 is on side 0.

    The optimum removes the weakest edge of the maximum spanning tree of `alpha` (m, m): any other bipartition cuts an edge of the tree that
    is at least as strong. "complete" is the authors' agglomeration on −α instead, which does not minimise eq. 25.

    Raises `InputError` for fewer than two clients.
    """
    m = len(alpha)
    if m < 2:
        raise InputError(f"bipartition: {m} client(s) cannot be split")
    if linkage == "complete":
        from scipy.cluster import hierarchy  # slow to import
        from scipy.spatial.distance import squareform

        distance = 1.0 - (alpha + alpha.T) / 2
        np.fill_diagonal(distance, 0.0)
        tree = hierarchy.linkage(squareform(distance, checks=False), method="complete")
        return ordered_labels(hierarchy.cut_tree(tree, n_clusters=[2])[:, 0])
    reach, parent = alpha[0].astype(np.float64), np.zeros(m, dtype=int)  # Prim's algorithm: the strongest edge from the tree to each
    reach[0] = -np.inf
    edges: list[tuple[float, int, int]] = []
    outside = np.ones(m, dtype=bool)
    outside[0] = False
    for _ in range(m - 1):
        new = int(np.where(outside, reach, -np.inf).argmax())
        edges.append((float(reach[new]), int(parent[new]), new))
        outside[new] = False
        nearer = outside & (alpha[new] > reach)
        reach[nearer], parent[nearer] = alpha[new][nearer], new
    weakest = min(range(m - 1), key=lambda i: (edges[i][0], i))
    side = np.zeros(m, dtype=int)
    for i, (_, near, far) in enumerate(edges):  # edges grow from client 0: a side is known before it is passed on
        side[far] = 1 if i == weakest else side[near]
    return side


def cross_similarity(alpha: Array, side: Array) -> float:
    """α_cross^max: the largest similarity between clients on different sides (eq. 17)."""
    return float(alpha[np.ix_(side == 0, side == 1)].max())


def separation_gap(alpha: Array, groups: Sequence[int]) -> float:
    """g(α): the smallest similarity inside the true groups minus α_cross^max of the optimal bipartition (eq. 28).

    Positive exactly if the bipartition is correct by a margin. For experimenters: it needs the truth. A group of one has similarity 1.
    """
    truth = np.asarray(groups)
    return float(alpha[truth[:, None] == truth[None, :]].min()) - cross_similarity(alpha, bipartition(alpha))


@dataclass(frozen=True)
class Bipartition:
    """Public code run where the Gram may be seen: norms, cosines, bipartition, and whether to accept it (Alg. 5, l. 16 to 22).

    Result: "outcome" (one of MOVING, CONGRUENT, DROWNED, TOO_NOISY, TOO_SMALL, SPLIT) and "side" of each client; evidence: the rest.
    """

    results: ClassVar[Results] = {"outcome": "one", "side": "all"}

    stationary: bool
    eps2: float
    gamma_max: float
    linkage: Literal["single", "complete"] = "single"
    at_least: int = 1

    def __call__(self, view: GramView) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        alpha = cosines(view.gram)  # α_ij = ⟨Δθ_i, Δθ_j⟩ / (‖Δθ_i‖ ‖Δθ_j‖)  (eq. 44)
        squares = np.maximum(np.diag(view.gram.matrix()), 0.0)  # noise makes some of them negative
        largest = float(np.sqrt(squares.max()))
        side = bipartition(alpha.values, self.linkage)  # (eq. 25)
        cross = cross_similarity(alpha.values, side)
        if not self.stationary:
            outcome = MOVING
        elif not largest > self.eps2:  # max_i ‖Δθ_i‖ > ε₂  (eq. 33)
            outcome = CONGRUENT
        elif drowned(squares, view.gram.error):
            outcome = DROWNED
        elif not self.gamma_max < np.sqrt(max(0.0, 1.0 - cross) / 2.0):  # γ_max < sqrt((1 − α_cross^max) / 2)  (eq. 39)
            outcome = TOO_NOISY
        elif min(int((side == 0).sum()), int((side == 1).sum())) < self.at_least:
            outcome = TOO_SMALL
        else:
            outcome = SPLIT
            view.memory["sides"] = dict(zip(view.gram.clients, side.tolist(), strict=True))
        evidence = {"alpha": alpha.values, "clients": alpha.clients, "largest_norm": largest, "alpha_cross": cross}
        return {"outcome": outcome, "side": side}, evidence


@dataclass(frozen=True)
class MoreSimilar:
    """Algorithm 4: which child holds the pre-split update most similar to a newcomer's. Result: "side" of each newcomer.

    An update that is zero, or cannot be distinguished from zero under errors, is as similar to both and goes to child 1.
    """

    results: ClassVar[Results] = {"side": "new"}

    def __call__(self, view: GramView) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        alpha = cosines(view.gram)
        sides: Mapping[int, int] = view.memory["sides"]  # of the clients that were there at the split, whose updates are Δ_e (eq. 47)
        side = np.array([sides.get(client, -1) for client in alpha.clients])
        new = np.isin(alpha.clients, view.new)
        best = np.stack([alpha.values[np.ix_(new, side == child)].max(axis=1) for child in (0, 1)])  # α_0, α_1 (l. 6, 7)
        return {"side": np.where(best[0] > best[1], 0, 1)}, {"best": best}  # l. 8 to 12


def pictured(evidence: Mapping[str, Any]) -> Mapping[str, Any]:
    """Evidence as reports show it: 1 − cos as a distance, and its single-linkage tree, whose last merge is the split."""
    values = np.maximum(1.0 - (evidence["alpha"] + evidence["alpha"].T) / 2, 0.0)
    np.fill_diagonal(values, 0.0)
    distance = SimilarityMatrix(values, tuple(evidence["clients"]), "1 − cosine", "distance")
    tree = linkage_tree(distance, "single")
    height = float(tree[-2:, 2].mean())
    return {"distance": values, "tree": tree, "clients": distance.clients, "height": height, "alpha_cross": evidence["alpha_cross"]}
