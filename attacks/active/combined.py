"""Requests that are each permitted, and together isolate one client: a private model in a list that all receive, a value in a block of its
own, one value in two sessions, another algorithm's scores.

Checks: "a value's name is that of the model that was used" (federation/work.py, `alternatives_of`); "the effective number of clients of
every sum is at least the minimum cohort size" (protocols/secagg/effective.py); "the record of sums outlives sessions"
(aggregation/secagg.py); "a client answers what its contract declares and nothing else" (federation/client_contract.py).
"""

from dataclasses import replace

import numpy as np

from ...algorithms.pfedlia.influence import Influence
from ...contract.handles import Held
from ...errors import InputError
from ...federation import messages as m
from ...protocols.errors import ProtocolError
from ...tasks.cluster_shares import TrainInBlock
from ...tasks.evaluation import Losses
from .other_settings import sum_under
from .outcome import ActiveAttack, ActiveFigure, ActiveGuess
from .scene import AttackRun, Summed
from .unequal import useless

__all__ = ["NEW_SESSION", "OWN_BLOCK", "PRIVATE_CHOICE", "UNDECLARED_SCORES"]

BOUND = "secagg: every sum binds to the list of what its members were sent, and to what each chose of it"
WEIGHED = "secagg: the effective number of clients of every sum is at least the minimum cohort size (protocols/secagg/effective.py)"
RECORDED = "secagg: the record of sums outlives sessions, which a server opens at will"
DECLARED = "federation/client_contract.py: a client answers what its contract declares and nothing else"
PROBES = 8
"""Scores that are asked for at once, each of the loss at another model."""


def chosen_by(run: AttackRun) -> Held | None:
    """A choice of 1 by the victim and of 0 by all others, which the server makes by the order of two models."""
    good = run.scene.model
    bad = (1e3 * np.random.default_rng(0).standard_normal(good.size)).astype(good.dtype)

    def send(client: int, ask: m.PartyRequest, stage: str) -> m.PartyRequest:
        if not isinstance(ask, m.Compute) or client != run.victim:
            return ask
        ((name, models),) = ask.params
        assert isinstance(models, m.Many)
        return m.Compute(
            ask.session, ask.round, ask.seed, ask.held, ask.live, ask.task, ((name, m.Many(models.values[::-1])),), None, ask.noise
        )  # fmt: skip

    run.liar.send = send
    try:
        return run.fed.compute(Losses(run.scene.train.model), {"model": [good, bad]})["choice"]
    except (ProtocolError, InputError):
        return None
    finally:
        run.liar.send = lambda client, ask, stage: ask


def private_choice(run: AttackRun) -> ActiveGuess:
    """All receive one list, and train the model that they chose; the one that moves at all is chosen by the victim alone."""
    guess, choice = None, chosen_by(run)
    if choice is not None:
        held = run.fed.compute(run.scene.train, {"model": [useless(run), run.scene.model]}, which=choice)["update"]
        known = run.fed.known(held.key)
        models = [[client, [names[0]]] for client, names in known["models"]]  # the name of what most chose
        run.fed.know(held.key, {**known, "models": models, "chosen": []})
        summed = run.sum(held, run.clients)
        if summed is not None and run.victim in summed.survivors:
            guess = summed.total
    return ActiveGuess(guess, "update", run.honest)


def own_block(run: AttackRun) -> ActiveGuess:
    """Clients put their updates into blocks of their own choice, and the victim's choice is that of nobody else."""
    guess, choice, model = None, chosen_by(run), run.scene.model
    if choice is not None:
        task = TrainInBlock(run.scene.train, 2)
        held = run.fed.compute(task, {"model": [model, model.copy()]}, which=choice)["blocks"]
        summed = sum_under(run, held, run.clients, 1)
        if summed is not None and run.victim in summed.survivors:
            guess = summed.total[model.size : 2 * model.size]
    return ActiveGuess(guess, "update", run.honest)


def new_session(run: AttackRun) -> ActiveGuess:
    """A sum over all clients; then, in another session, the same training from the same model over all but the victim."""
    whole: Summed | None = run.sum(run.compute(), run.clients)
    guess = None
    if whole is not None:
        run.another_session()
        try:
            rest = run.sum(run.compute(), run.others)
        except ProtocolError:
            rest = None
        if rest is not None and set(whole.survivors) - set(rest.survivors) == {run.victim}:
            guess = whole.total - rest.total
    return ActiveGuess(guess, "update", run.honest)


def undeclared_scores(run: AttackRun) -> ActiveFigure:
    """pFedLIA's scores, asked of a client of any algorithm: its loss at models of the server's choice, in float64."""
    model = replace(run.scene.train.model, dtype="float64")
    start = run.scene.model.astype(np.float64)
    others = [start + 1e-3 * (np.arange(start.size) == place) for place in range(PROBES)]
    before, read = len(run.liar.refused), None
    try:
        task = Influence(model, 0.5, tuple(range(PROBES)))
        held = run.fed.compute(task, {"model": start, "without": others}, on=[run.victim])["scores"]
        answer = run.fed.gather(held).get(run.victim)
        if answer is not None:
            read = float(np.count_nonzero(answer["scores"]))
    except (ProtocolError, InputError):
        if len(run.liar.refused) == before:
            raise
    return ActiveFigure("losses_read", read, 0.0, lower_is_better=False, margin=0.5, note=f"{PROBES} models in one request")


PRIVATE_CHOICE = ActiveAttack(
    "a private model in a list that all clients receive, where only one client chooses it", BOUND, private_choice, accomplices=False
)
OWN_BLOCK = ActiveAttack("one client alone in a block of a sum", WEIGHED, own_block, accomplices=False)
NEW_SESSION = ActiveAttack(
    "one value summed in two sessions over cohorts that differ by its client", RECORDED, new_session, accomplices=False
)
UNDECLARED_SCORES = ActiveAttack(
    "losses at models of the server's choice, by a task of another algorithm", DECLARED, undeclared_scores,
    lambda config: "" if config.protection.sums.hides else "updates travel in the clear", claimed=lambda config: True, accomplices=False,
)  # fmt: skip
