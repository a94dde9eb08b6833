"""Sums of controls: SCAFFOLD's second vector weighs clients by their numbers of steps, so that update and control are two equations.

A client's change of its control is −c − Δ / (K η), with c the control that was sent, Δ its update and K the weight of its steps
(`algorithms.scaffold`). For a single client that is a function of its update. In sums it is not: the next control gives the mean of Δ / K,
the next model the mean of Δ. Where clients have two different numbers of steps, which follow from their numbers of samples, the two means
determine the sum of each group of clients: a client with a number of its own is alone in its group.

Source: linear algebra. Not read: sums weighted by numbers of samples, global rates other than 1, and cohorts with three or more numbers of
steps. Two equations do not determine three sums. They weigh label shares by K and alike, but even exact ones leave an L1 of 1.39 for nine
clients of three among ten labels (1.41 without the second, 1.42 without a view), and readings err by .1 to .3. Later rounds add nothing:
who took part before moves by the change of its gradients, and labels cancel there.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...algorithms.shared.around import weight_of_steps
from ...types import Array
from ..adversary import AdversaryView
from ..figures.leakage import Prior
from .sums import CohortSum, models_sent

__all__ = ["sums_by_steps"]


def sums_by_steps(sums: Sequence[CohortSum], view: AdversaryView, prior: Prior) -> list[CohortSum]:
    """The sums, and in place of each that its control takes apart the sums of the two groups of clients."""
    config, controls = prior.config, _controls(view)
    if config is None or not controls or config.training.weights != "equal" or config.algorithm.get("global_lr", 1.0) != 1.0:
        return list(sums)
    return [part for sum_ in sums for part in _parts(sum_, controls, prior)]


def _controls(view: AdversaryView) -> dict[int, Array]:
    """The control (d,) that was sent in each round."""
    return {
        message.round: sent for message in view.select("compute", "parameters")
        for sent in models_sent(view, message, "control").values()
    }  # fmt: skip


def _parts(sum_: CohortSum, controls: dict[int, Array], prior: Prior) -> list[CohortSum]:
    sent, following = controls.get(sum_.round), controls.get(sum_.round + 1)
    if sent is None or following is None or sum_.mean is None or sum_.local is None or sum_.mean.shape != sent.shape:
        return [sum_]
    local, m = sum_.local, len(sum_.members)
    weights = {client: weight_of_steps(local.steps(prior.samples_per_client[client]), local.train.momentum) for client in sum_.members}
    if len(distinct := sorted(set(weights.values()))) != 2 or np.array_equal(following, sent):
        return [sum_]
    count = len(prior.samples_per_client)
    divided = -local.train.lr * (sent + (following - sent) * (count / m))  # the mean of Δ / K
    parts = []
    for own, other in (distinct, distinct[::-1]):
        members = tuple(client for client in sum_.members if weights[client] == own)
        share = m / len(members) / (1 / own - 1 / other)
        half = float(np.finfo(local.train.model.dtype).eps) / 2
        rounded = local.train.lr * half * (count / m) * float(np.sqrt(np.mean(following**2) * 2 / 3))
        deviation = float(abs(share) * np.hypot(rounded, sum_.deviation / other))
        parts.append(replace(sum_, members=members, mean=share * (divided - sum_.mean / other), deviation=deviation))
    return parts
