"""Batched L-BFGS: many small minimisations at once, with a line search for each row of the batch.

Source: Nocedal & Wright 2006, Algorithm 7.4 (two loops), with the bisecting weak-Wolfe search of Lewis & Overton 2013. A row stops when no
step lowers it, and from then on is no part of the searches. Rows share nothing: each goes its way as if it were alone.

Points, gradients and directions stay where `start` is. Values and step lengths are on the host, which decides: it waits for a CUDA device
once for each call of the objective.
"""

from collections.abc import Callable, Sequence

import torch

from ...engine.device import Device, sent
from ...engine.graphs import FEWEST_STEPS, Replayed

__all__ = ["minimise"]

Objective = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(points (r, n), which rows these are (r,)) -> values (r,), gradients (r, n)."""
Pair = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Changes of points and of gradients (r, n), weights (r,). Pairs, too: with a leading axis."""
DECREASE, CURVATURE, SEARCHES = 1e-4, 0.9, 20
STAY = 0.25
"""On a CUDA device, done rows leave the batch when at most this share of it is left: a batch of another size is captured anew."""


def minimise(
    objective: Objective, start: torch.Tensor, iterations: int = 200, memory: int = 50, tolerance: float = -torch.inf
) -> tuple[torch.Tensor, torch.Tensor]:
    """The points (m, n) reached from `start` (m, n), and their values (m,), on the host. Rows at or below `tolerance` are done.

    Values that are not finite are refused by the search, so a row never ends above where it started.
    """
    ended = start.detach().clone()
    share = STAY if ended.is_cuda else 1.0
    first, slope = objective(ended.clone(), torch.arange(len(ended), device=ended.device))
    left = first.cpu().clone()
    rows = torch.nonzero(torch.isfinite(left) & (left > tolerance)).flatten()  # the batch; what follows is theirs alone
    if not len(rows):
        return ended, left
    names = _there(rows, ended)
    x, value, slope = ended.index_select(0, names), left[rows], slope.index_select(0, names)
    going = torch.ones_like(rows, dtype=torch.bool)
    places = max(1, min(memory, iterations))
    pairs: Pair = (x.new_empty(places, *x.shape), x.new_empty(places, *x.shape), x.new_empty(places, len(x)))
    two_loops = _two_loops(pairs)
    scale = 1 / slope.norm(dim=1).clamp_min(1e-300)  # the first step has length 1
    for number in range(iterations):
        direction = two_loops(slope, scale, number, iterations)
        downhill = (direction * slope).sum(1)
        direction = torch.where((downhill < 0)[:, None], direction, -scale[:, None] * slope)
        step, after, turned = _search(objective, x, value, slope, direction, names, going)
        change, difference, weight = (part[number % places] for part in pairs)
        length = _there(step, x)
        torch.mul(length[:, None], direction, out=change)
        torch.sub(turned, slope, out=difference)
        product = (change * difference).sum(1)
        useful = product > 1e-12 * change.norm(dim=1) * difference.norm(dim=1)
        weight.copy_(torch.where(useful, 1 / torch.where(useful, product, 1.0), 0.0))  # 0: this row keeps no pair
        scale = torch.where(useful, product / difference.square().sum(1).clamp_min(1e-300), scale)
        x, value, slope = torch.where((length > 0)[:, None], x + change, x), after, turned
        going &= (step > 0) & (value > tolerance)
        if not going.any():
            break
        if going.sum() <= share * len(rows) and not going.all():
            ended.index_copy_(0, names, x)
            left[rows] = value
            kept = torch.nonzero(going).flatten()
            rows, value, going, at = rows[kept], value[kept], going[kept], _there(kept, x)
            names, x, slope, scale = (part.index_select(0, at) for part in (names, x, slope, scale))
            pairs = (pairs[0].index_select(1, at), pairs[1].index_select(1, at), pairs[2].index_select(1, at))
            two_loops = _two_loops(pairs)
    ended.index_copy_(0, names, x)
    left[rows] = value
    return ended, left


def _there(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Values of the host where `like` is; the host does not wait."""
    return sent(values, Device(like.device.type))


def _two_loops(pairs: Pair) -> Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]:
    """(slopes (r, n), scales (r,), number of the iteration, of how many) -> directions (r, n), by these pairs, which are stored in turn.

    On a CUDA device the two loops are captured once all places are taken; a new pair then takes the place of the oldest.
    """
    memory = len(pairs[0])
    places: Sequence[Pair] = list(zip(*(part.unbind(0) for part in pairs), strict=True))
    order = torch.zeros(memory, dtype=torch.int64, device=pairs[0].device)

    def by_order(slope: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor]:
        parts = (part.index_select(0, order).unbind(0) for part in pairs)
        return (_direction(slope, list(zip(*parts, strict=True)), scale),)

    replayed = Replayed(by_order, "the direction of L-BFGS")

    def direction(slope: torch.Tensor, scale: torch.Tensor, number: int, iterations: int) -> torch.Tensor:
        oldest_first = [at % memory for at in range(max(0, number - memory), number)]
        pays = replayed.graph is not None or iterations - number >= FEWEST_STEPS
        if slope.is_cuda and number >= memory and pays and not replayed.failed:
            order.copy_(_there(torch.tensor(oldest_first), slope))
            return replayed(slope, scale)[0]
        return _direction(slope, [places[at] for at in oldest_first], scale)

    return direction


def _direction(slope: torch.Tensor, pairs: Sequence[Pair], scale: torch.Tensor) -> torch.Tensor:
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
    objective: Objective, x: torch.Tensor, value: torch.Tensor, slope: torch.Tensor, direction: torch.Tensor, names: torch.Tensor,
    going: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Step lengths (m,), 0 for a row that does not move, with values and gradients there: the best point of each that is low enough.

    `names` is which rows these are, for the objective; rows that are not `going` are not searched. Lengths and values are on the host.
    """
    downhill = (direction * slope).sum(1)
    low, high = torch.zeros_like(value), torch.full_like(value, torch.inf)
    step, taken = torch.ones_like(value), torch.zeros_like(value)
    after, turned = value.clone(), slope.clone()
    rows = torch.nonzero(going).flatten()
    for _ in range(SEARCHES):
        if not len(rows):
            break
        at = _there(rows, x)
        toward = direction.index_select(0, at)
        point = x.index_select(0, at) + _there(step[rows], x)[:, None] * toward
        value_there, gradient = objective(point, names.index_select(0, at))
        fetched = torch.stack([value_there, (gradient * toward).sum(1), downhill.index_select(0, at)]).cpu()  # the one wait
        there, incline, fall = fetched.unbind(0)
        fine = torch.isfinite(there) & (there <= value[rows] + DECREASE * step[rows] * fall) & (there < value[rows])
        good, chosen = rows[fine], torch.nonzero(fine).flatten()
        taken[good], after[good], low[good] = step[good], there[fine], step[good]
        if len(good):
            turned.index_copy_(0, _there(good, x), gradient.index_select(0, _there(chosen, x)))
        high[rows[~fine]] = step[rows[~fine]]
        rows = rows[~(fine & (incline >= CURVATURE * fall))]
        step[rows] = torch.where(torch.isinf(high[rows]), 2 * low[rows], (low[rows] + high[rows]) / 2)
    return taken, after, turned
