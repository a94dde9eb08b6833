"""What colluding clients subtract from a sum: their own updates, which they know.

Source: textbook; a minimum cohort size of m clients is one of m − N clients to a server with N of them in the sum. No transcript holds what
a client put into a secure sum, and the secrets of a run folder hold no updates. They follow from what the client does have: the model it
was sent, its data and its batches, so it trains again. That makes the very update that it sent, where the update is plain local training of
that model.

What is left alone: runs in which a client's update holds more than such a training, by the tasks that the transcript records
(`LocalTraining.alone`), sums of which the view does not have the model (transformed ones, oblivious totals, models of which only a part
travels), and runs with `[privacy]`, whose noise is not on record.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..engine import Engine, Streams, TaskInput
from ..errors import TrainingDiverged
from ..types import Array, ClientData
from .leakage import Case
from .local_training import trainings_in
from .sums import CohortSum

__all__ = ["sums_of_others"]


def sums_of_others(case: Case, sums: Sequence[CohortSum]) -> list[CohortSum]:
    """The sums without the coalition's part: members and mean are those of the others. Sums of colluders alone are left out.

    The same for sums of the view and of the reference, since the colluders' training goes by the model that each sum began with.
    """
    plain = case.prior.config is not None and not case.prior.private
    if not case.view.coalition or not plain or not all(one.alone for one in trainings_in(case.view).all):
        return list(sums)
    found = [_of_others(case, one) for one in sums]
    return [one for one in found if one is not None]


def _of_others(case: Case, one: CohortSum) -> CohortSum | None:
    assert case.prior.config is not None  # checked by the caller
    own = [client for client in one.members if client in case.view.coalition]
    others = tuple(client for client in one.members if client not in case.view.coalition)
    if (
        not own or one.mean is None or one.start is None or not one.mean.any()
    ):  # a sum below the minimum cohort size leaves the model as it was
        return one
    if not others:
        return None
    updates = trained_again(case, own, one)
    if updates is None:
        return one
    by_count = case.prior.config.training.weights == "examples"
    weights = {client: case.prior.samples_per_client[client] if by_count else 1 for client in one.members}
    total = one.mean * sum(weights.values()) - np.sum([weights[client] * updates[client] for client in own], axis=0)
    return replace(one, members=others, mean=total / sum(weights[client] for client in others))


def trained_again(case: Case, clients: Sequence[int], one: CohortSum) -> dict[int, Array] | None:
    """The updates (d,) of colluding clients in a sum; None where not all of them train a whole model to an end."""
    assert case.prior.config is not None  # checked by the caller
    if one.local is None or one.start is None or one.start.shape != (one.local.train.model.dimension,):
        return None
    train = replace(one.local.train, on_divergence="stop")
    given = {"model": one.start.astype(train.model.init(0).dtype)}
    inputs = []
    for client in clients:
        x, y = case.truth.data[client]
        inputs.append(TaskInput(ClientData(client, x, y, x[:0], y[:0]), given, {}, Streams(case.prior.config.run.seed, one.round, client)))
    try:
        results = Engine().run(train, inputs)
    except TrainingDiverged:
        return None
    return {client: np.asarray(result["update"], np.float64) for client, result in zip(clients, results, strict=True)}
