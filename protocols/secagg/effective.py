"""The effective number of clients in a weighted sum, and the least weight that keeps it large.

A sum in which one client has nearly all of the weight shows that client's value, however many clients take part. The effective number of
clients of weights w is (Σ w)² / Σ w²: n for n equal weights, 1 if one weight is all. Weights are private, so nobody can compute it. But
where all weights lie between a public least weight a and a public limit W, r = W / a, it has a minimum: that of m weights W and n − m
weights a,

    (m r + n − m)² / (m r² + n − m),    m = n / (1 + r) rounded down or up,

which is at least n · 4r / (1 + r)² (the Kantorovich inequality), and equal to it where n / (1 + r) is a whole number. To leave out the
lightest client never raises the effective number, so the minimum over n clients is no larger than that over n + 1: what holds for the
fewest survivors holds for all.

Guarantee: `reaches` is exact (rational numbers). Reveals: all of this is public. Source: Kish 1965 (the effective sample size); Pólya &
Szegő 1925 (the inequality).
"""

import math
from fractions import Fraction
from functools import lru_cache

__all__ = ["FEWEST_LEVELS", "effective_number", "largest_ratio", "reaches", "smallest_least_weight"]

FEWEST_LEVELS = 64
"""A weight that is quantised to fewer levels distorts its client's share by more than about one per cent."""
_STEPS = 60


def effective_number(clients: int, limit: float, least: float, spread: float = 1.0) -> Fraction:
    """The smallest (Σ w)² / Σ w² of `clients` weights in [least, limit · spread]; 1 for an infinite spread.

    Args:
        clients: at least 1. limit, least: 0 < least ≤ limit.
        spread: largest ratio of the weights that values have inside themselves (1: none).
    """
    if math.isinf(spread):
        return Fraction(1)
    ratio = Fraction(limit) / Fraction(least) * Fraction(spread)
    heavy = math.floor(clients / (1 + ratio))
    return min((m * ratio + clients - m) ** 2 / (m * ratio**2 + clients - m) for m in (heavy, min(heavy + 1, clients)))


def reaches(clients: int, needed: int, limit: float, least: float, spread: float = 1.0) -> bool:
    """Whether the effective number of `clients` weights in [least, limit] is `needed` at least, whatever the weights are."""
    return clients >= needed and effective_number(clients, limit, least, spread) >= needed


@lru_cache(maxsize=1 << 10)
def smallest_least_weight(clients: int, needed: int, limit: float, spread: float = 1.0) -> float:
    """The smallest least weight (to about 15 digits) for which `reaches` holds.

    Raises:
        ValueError: if it does not hold for equal weights either.
    """
    if not reaches(clients, needed, limit, limit, spread):
        raise ValueError(
            f"spread: values weigh inside themselves by up to {spread:g} to 1, and the effective number of {clients} clients could fall "
            f"below {needed}; at most {largest_ratio(clients, needed):.4g} to 1 keeps it"
        )
    low, high = 0.0, limit
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if middle > 0 and reaches(clients, needed, limit, middle, spread):
            high = middle
        else:
            low = middle
    return high


def largest_ratio(clients: int, needed: int) -> float:
    """The largest ratio of two weights (to about 15 digits) that keeps the effective number of `clients` at `needed`; 1 without clients to
    spare."""
    return 1 / smallest_least_weight(clients, needed, 1.0) if clients > needed else 1.0
