"""Members of one sum that receive different requests: another model, task, uploaded value or weight.

All but the victim are made to add nearly zero, so that the sum is the victim's update. In `unequal_weights` terms allow weights so
different that one client can be nearly all of a sum.

Checks: "Every sum binds to the list of what its members were sent: one model, unless the algorithm declares more in public"
(aggregation/secagg.py, Guarantee); "a server that hands one client a private model gets no sum" (docs/guarantees.md, Averaging, "binds
to"). Source: Pasquini, Francati & Ateniese 2022. Where clients' settings allow several models a sum, one can be planted.
"""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np

from ...contract.handles import Held
from ...errors import InputError
from ...federation import messages as m
from ...protocols.secagg.messages import Deliver, decode_server
from ...types import Array
from .liar import honest_ask
from .other_settings import plain_sums, sum_under
from .outcome import ActiveAttack, ActiveFigure, ActiveGuess, pairwise_sums
from .scene import AttackRun, Summed

__all__ = ["LISTED_MODEL", "OTHER_MODEL", "OTHER_TASK", "SWITCHED_VALUE", "UNEQUAL_WEIGHTS"]

BOUND = "secagg: every sum binds to the list of what its members were sent"
WEIGHED = "secagg: the effective number of clients of every sum is at least the minimum cohort size (protocols/secagg/effective.py)"
STUCK = 1e8
"""Parameters so large that a step of training is lost in rounding (float32); alike for all classes, so that losses stay finite."""
SLOW = 1e-30
LARGE, SMALL = 1e9, 1e-6
"""The limit of weights where clients have none of their own, and the least weight as a share of it, such that a weight still has levels."""


def useless(run: AttackRun) -> Array:
    """A model (d,) from which training leads nowhere."""
    try:
        from ..inversion.model_inconsistency import deadened  # loads scipy

        return deadened(run.scene.train.model, run.scene.model)
    except InputError:  # no hidden units to silence
        return np.full_like(run.scene.model, STUCK)


def isolated(run: AttackRun, change: Callable[[m.Compute], m.Compute]) -> ActiveGuess:
    """All but the victim compute something else than the server's part of the sum knows of."""

    def send(client: int, ask: m.PartyRequest, stage: str) -> m.PartyRequest:
        return change(ask) if isinstance(ask, m.Compute) and client != run.victim else ask

    run.liar.send = send
    held = run.compute()
    return _among_next_to_nothing(run, held, run.sum(held, run.clients))


def _among_next_to_nothing(run: AttackRun, held: Held, summed: Summed | None) -> ActiveGuess:
    guess = None
    if summed is not None and run.victim in summed.survivors:
        theirs = [run.known(client, held) for client in summed.survivors if client in run.accomplices]
        guess = summed.total - np.sum([np.zeros_like(summed.total), *theirs], axis=0)
    return ActiveGuess(guess, "update", run.honest)


def other_model(run: AttackRun) -> ActiveGuess:
    """All but the victim are sent a model that training does not move; the sum names the victim's."""
    sent = ("model", m.Addends(useless(run), (), ()))
    return isolated(run, lambda ask: msgspec.structs.replace(ask, params=(sent,)))


def listed_model(run: AttackRun) -> ActiveGuess:
    """The same, and the sum names both."""
    models = [run.scene.model, useless(run)]
    which = {client: int(client != run.victim) for client in run.clients}
    held = run.fed.compute(run.scene.train, {"model": models}, which=which, on=run.clients)["update"]
    return _among_next_to_nothing(run, held, run.sum(held, run.clients, models=2))


def other_task(run: AttackRun) -> ActiveGuess:
    """All but the victim train at a rate near zero."""
    slow = m.Carried(replace(run.scene.train, lr=SLOW))
    return isolated(run, lambda ask: msgspec.structs.replace(ask, task=slow))


def switched_value(run: AttackRun) -> ActiveGuess:
    """All were invited for one value, and all but the victim are asked to upload another, which is nearly zero."""
    held, nothing = run.compute(), run.compute(lr=SLOW)
    number = run.number(nothing)

    def send(client: int, ask: m.PartyRequest, stage: str) -> m.PartyRequest:
        late = isinstance(ask, m.SumStep) and client != run.victim and isinstance(decode_server(ask.message), Deliver)
        return msgspec.structs.replace(ask, held=number) if late and isinstance(ask, m.SumStep) else ask

    run.liar.send = send
    summed = run.sum(held, run.clients)
    run.liar.send = honest_ask
    return _among_next_to_nothing(run, nothing, summed)


def unequal_weights(run: AttackRun) -> ActiveFigure:
    """Terms by which clients weigh by any sample count. The figure: the effective number of clients in the sum.

    Baseline: the minimum cohort size, which no sum should fall below.
    """
    limit = run.scene.config.protection.max_weight or LARGE
    summed = sum_under(run, run.compute(), run.clients, 0, weight_limit=limit, least_weight=SMALL * limit)
    value = None
    if summed is not None:
        weights = np.array([run.scene.data(client).samples for client in summed.survivors], np.float64)
        value = float(weights.sum() ** 2 / np.square(weights).sum())
    return ActiveFigure("effective_clients", value, float(run.scene.config.protection.smallest_sum))


OTHER_MODEL = ActiveAttack("another model for all but one client of a sum, which names that one's", BOUND, other_model)
LISTED_MODEL = ActiveAttack("another model for all but one client of a sum, which names both", BOUND, listed_model)
OTHER_TASK = ActiveAttack("another task, a learning rate of nothing, for all but one client of a sum", BOUND, other_task)
SWITCHED_VALUE = ActiveAttack("another value at the upload than at the invitation", BOUND, switched_value, pairwise_sums)
UNEQUAL_WEIGHTS = ActiveAttack("nearly all of the weight of a sum for one client", WEIGHED, unequal_weights, plain_sums)
