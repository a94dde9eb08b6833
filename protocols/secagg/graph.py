"""The masking graph: who masks with whom, and the threshold of keepers of a secret.

Complete graph: everybody with everybody; t = n//2 + 1 against a server that follows the protocol (both kinds
of share of one client would need 2t > n answers), t = 2n//3 + 1 against one that lies (it may report
different survivors to two halves; colluders, fewer than n/3, answer both).

k-regular graph (honest-but-curious server, n > 32): the Harary graph on a random cyclic order of the cohort,
neighbours at distance 1 … k/2 (and opposite, for odd k). (k, t) is the smallest pair for which, with 20 %
corrupt and 10 % dropping clients chosen before the graph,

    n · P[at least t of k neighbours are corrupt]  ≤ 2^-40      somebody's secrets could be rebuilt without the honest
    C(n,2) · P[2 · (k//2) given places are all lost] ≤ 2^-40    the honest survivors fall apart into parts with sums of their own
    n · P[more than k − t neighbours drop]         ≤ 2^-30      the sum cannot be unmasked

Everything is integer arithmetic, so all parties agree on (k, t) on every machine.

Source: Bell et al. 2020, sections 3.1-3.3 (the graph and its three conditions; we bound them by exact
hypergeometric tails and, for connectivity, by the union over pairs of cuts of the cycle). Deviation: the
graph is drawn over the invited cohort, not over those that advertised; a client that never advertises counts
as a dropout.
"""

from functools import lru_cache
from hashlib import sha256
from math import comb

__all__ = ["COMPLETE_UP_TO", "complete_threshold", "neighbours", "sparse_parameters"]

COMPLETE_UP_TO = 32


def complete_threshold(n: int, mode: str) -> int:
    """t of the complete graph on n clients: n//2 + 1 in mode "passive", 2n//3 + 1 in mode "active"."""
    return 2 * n // 3 + 1 if mode == "active" else n // 2 + 1


@lru_cache(maxsize=256)
def sparse_parameters(n: int, security: int = 40, correctness: int = 30) -> tuple[int, int]:
    """The smallest (k, t) for n clients, 20 % corrupt, 10 % dropping; failure 2^-security and 2^-correctness. (n−1, n//2+1) if none."""
    corrupt, dropped = n // 5, n // 10
    for k in range(2, n - 1):
        if n * k % 2:
            continue
        # Fewer than k losses never disconnect a Harary graph.
        lost, cut = corrupt + dropped, 2 * (k // 2)
        apart = comb(n - cut, lost - cut) if lost >= k else 0
        if comb(n, 2) * apart << security > comb(n, lost):
            continue
        ways = comb(n - 1, k)
        t = k + 1
        while t > 1 and n * _at_least(n - 1, corrupt, k, t - 1) << security <= ways:
            t -= 1
        if t <= k and n * _at_least(n - 1, dropped, k, k - t + 1) << correctness <= ways:
            return k, t
    return n - 1, complete_threshold(n, "passive")


def _at_least(population: int, marked: int, drawn: int, count: int) -> int:
    """In how many of the C(population, drawn) draws at least `count` are marked."""
    return sum(comb(marked, i) * comb(population - marked, drawn - i) for i in range(count, min(marked, drawn) + 1))


@lru_cache(maxsize=8)
def _cycle(seed: bytes, cohort: tuple[int, ...]) -> tuple[tuple[int, ...], dict[int, int]]:
    order = tuple(sorted(cohort, key=lambda client: sha256(seed + client.to_bytes(8, "big")).digest()))
    return order, {client: place for place, client in enumerate(order)}


def neighbours(seed: bytes, cohort: tuple[int, ...], degree: int, client: int) -> frozenset[int]:
    """The clients with which `client` shares masks and secrets (never itself). `seed` fixes the cyclic order of the sparse graph."""
    n = len(cohort)
    if degree == n - 1:
        return frozenset(cohort) - {client}
    order, place = _cycle(seed, cohort)
    here = place[client]
    near = {order[(here + step) % n] for distance in range(1, degree // 2 + 1) for step in (distance, -distance)}
    if degree % 2:
        near.add(order[(here + n // 2) % n])
    return frozenset(near)
