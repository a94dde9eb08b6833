"""Batched L-BFGS: many small minimisations at once, with a line search for each row of the batch.

Source: Nocedal & Wright 2006, Algorithm 7.4 (two loops), with the bisecting weak-Wolfe search of Lewis & Overton 2013. A row stops when no
step lowers it, and from then on is no part of the batch. Rows share nothing: each goes its way as if it were alone.
"""

from collections.abc import Callable

import torch

__all__ = ["minimise"]

Objective = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(points (r, n), which rows these are (r,)) -> values (r,), gradients (r, n)."""
DECREASE, CURVATURE, SEARCHES = 1e-4, 0.9, 20


def minimise(
    objective: Objective, start: torch.Tensor, iterations: int = 200, memory: int = 50, tolerance: float = -torch.inf
) -> tuple[torch.Tensor, torch.Tensor]:
    """The points (m, n) reached from `start` (m, n), and their values (m,). Rows at or below `tolerance` are done.

    Values that are not finite are refused by the search, so a row never ends above where it started.
    """
    x = start.detach().clone()
    value, slope = objective(x, torch.arange(len(x), device=x.device))
    rows = torch.nonzero(torch.isfinite(value) & (value > tolerance)).flatten()  # those under way; what follows is theirs alone
    ended, left = x.clone(), value.clone()
    x, value, slope = x[rows], value[rows], slope[rows]
    pairs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    scale = 1 / slope.norm(dim=1).clamp_min(1e-300)  # the first step has length 1
    for _ in range(iterations):
        if not len(rows):
            break
        direction = _direction(slope, pairs, scale)
        downhill = (direction * slope).sum(1)
        direction = torch.where((downhill < 0)[:, None], direction, -scale[:, None] * slope)
        step, after, turned = _search(objective, x, value, slope, direction, rows)
        change, difference = step[:, None] * direction, turned - slope
        product = (change * difference).sum(1)
        useful = product > 1e-12 * change.norm(dim=1) * difference.norm(dim=1)
        weight = torch.where(useful, 1 / torch.where(useful, product, 1.0), 0.0)  # 0: this row keeps no pair
        pairs = [*pairs, (change, difference, weight)][-memory:]
        scale = torch.where(useful, product / difference.square().sum(1).clamp_min(1e-300), scale)
        x, value, slope = x + change, after, turned
        going = (step > 0) & (value > tolerance)
        if not going.all():
            ended[rows], left[rows] = x, value
            rows, x, value, slope, scale = rows[going], x[going], value[going], slope[going], scale[going]
            pairs = [(change[going], difference[going], weight[going]) for change, difference, weight in pairs]
    ended[rows], left[rows] = x, value
    return ended, left


def _direction(slope: torch.Tensor, pairs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], scale: torch.Tensor) -> torch.Tensor:
    q, parts = slope, []
    for change, difference, weight in reversed(pairs):
        part = weight * (change * q).sum(1)
        q = q - part[:, None] * difference
        parts.append(part)
    r = scale[:, None] * q
    for (change, difference, weight), part in zip(pairs, reversed(parts), strict=True):
        r = r + (part - weight * (difference * r).sum(1))[:, None] * change
    return -r


def _search(
    objective: Objective, x: torch.Tensor, value: torch.Tensor, slope: torch.Tensor, direction: torch.Tensor, names: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Step lengths (m,), 0 for a row that does not move, with values and gradients there: the best point of each that is low enough.

    `names` is which rows these are, for the objective.
    """
    downhill = (direction * slope).sum(1)
    low, high = torch.zeros_like(value), torch.full_like(value, torch.inf)
    step, taken = torch.ones_like(value), torch.zeros_like(value)
    after, turned = value.clone(), slope.clone()
    rows = torch.arange(len(x), device=x.device)
    for _ in range(SEARCHES):
        if not len(rows):
            break
        there, gradient = objective(x[rows] + step[rows, None] * direction[rows], names[rows])
        fine = torch.isfinite(there) & (there <= value[rows] + DECREASE * step[rows] * downhill[rows]) & (there < value[rows])
        good = rows[fine]
        taken[good], after[good], turned[good], low[good] = step[good], there[fine], gradient[fine], step[good]
        high[rows[~fine]] = step[rows[~fine]]
        flat = (gradient * direction[rows]).sum(1) >= CURVATURE * downhill[rows]
        rows = rows[~(fine & flat)]
        step[rows] = torch.where(torch.isinf(high[rows]), 2 * low[rows], (low[rows] + high[rows]) / 2)
    return taken, after, turned
