"""Find the columns of the update where clients put other parts into the same permuted vector.

All but the update is public in a first round: FedNova sends the update divided by ‖a‖₁, and ‖a‖₁ itself in units of `STEPS_UNIT`; SCAFFOLD,
whose controls begin at zero, sends the update and a known negative multiple of it. So the column of that number is known by what it holds,
and those of a control by those of its update. Under a rotation no column matches, and all stay.

Deviation from what could be known: in later rounds, under one transform for all, numbers of steps are taken as alike. Of columns that are
equal (pixels that never vary) not all of a control's are recognised; those stay.
"""

import numpy as np

from ...algorithms.fednova import STEPS_UNIT
from ...algorithms.scaffold import TrainControlled
from ...algorithms.shared.around import weight_of_steps
from ...types import Array
from ..evidence.local_training import LocalTraining

__all__ = ["multiples_in", "of_update"]

ALIKE = 1e-5
"""How far columns may lie apart, in units of their norm, to be taken for one another: rounding to single precision is far below."""
NEAREST = (-2, -1, 0, 1, 2)
"""Places in the order of norms at which a column's multiple is looked for."""


def of_update(parts: frozenset[str], first: Array, local: LocalTraining, samples: Array) -> tuple[Array, Array, bool]:
    """Of vectors (n, m) with these parts under a permutation, from a first round: which columns (m,) are the update's, what to multiply
    the rows by (n,), and whether signs are lost on the way. `samples` (n,) are the clients' numbers of samples."""
    weights = np.array([weight_of_steps(local.steps(int(count)), local.train.momentum) for count in samples])
    if parts == {"direction", "steps"}:
        steps = (weights / STEPS_UNIT)[:, None]
        return np.abs(np.abs(first) - steps).max(axis=0) > ALIKE * steps.max(), weights, False
    if parts == {"update", "control"}:
        controls, swapped = multiples_in(first, -TrainControlled(local.train).unit / (weights * local.train.lr))
        return ~controls, np.ones(len(first)), swapped
    return np.ones(first.shape[1], bool), np.ones(len(first)), False


def multiples_in(rows: Array, factors: Array) -> tuple[Array, bool]:
    """Which columns (m,) of `rows` (n, m) are another one with its entries times `factors` (n,), up to the sign of the column.

    Where two are each other's multiple (all factors −1) the second is, and the answer's second part says that this was so.
    """
    images = rows * factors[:, None]
    norms, sizes = np.linalg.norm(rows, axis=0), np.linalg.norm(images, axis=0)
    order = np.argsort(norms)
    near = np.searchsorted(norms[order], sizes)
    partner = np.full(rows.shape[1], -1)
    for offset in NEAREST:
        other = order[np.clip(near + offset, 0, len(order) - 1)]
        there = rows[:, other]
        apart = np.minimum(np.linalg.norm(there - images, axis=0), np.linalg.norm(there + images, axis=0))
        is_multiple = (apart <= ALIKE * sizes) & (sizes > 0) & (other != np.arange(len(order))) & (partner < 0)
        partner[is_multiple] = other[is_multiple]
    has = np.flatnonzero(partner >= 0)
    mutual = partner[partner[has]] == has
    made = np.zeros(rows.shape[1], bool)
    made[partner[has[~mutual]]] = True
    made[np.maximum(has, partner[has])[mutual]] = True
    return made, bool(mutual.any())
