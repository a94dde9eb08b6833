"""Requests that are each permitted, and together isolate one client: a private model in a list that all receive, a value in a block of its
own, one value in two sessions, another algorithm's scores.

Checks: "a value's name is that of the model that was used" (federation/work.py, `alternatives_of`); "the effective number of clients of
every sum is at least the minimum cohort size" (protocols/secagg/effective.py); "the record of sums outlives sessions"
(aggregation/secagg.py); "a client answers what its contract declares and nothing else" (federation/client_contract.py).
"""

from collections import Counter
from dataclasses import replace

import numpy as np

from ...algorithms.pfedlia.influence import Influence
from ...contract.handles import Held
from ...errors import InputError
from ...protocols.errors import ProtocolError
from ...tasks.cluster_shares import BLOCK_COUNT, TrainInBlock
from ...tasks.evaluation import Losses
from .other_settings import sum_under
from .outcome import ActiveAttack, ActiveFigure, ActiveGuess, pairwise_sums
from .scene import AttackRun, Summed
from .unequal import useless

__all__ = ["NEW_SESSION", "OWN_BLOCK", "PRIVATE_CHOICE", "UNDECLARED_SCORES"]

BOUND = "secagg: every sum binds to the list of what its members were sent, and to what each chose of it"
WEIGHED = "secagg: the effective number of clients of every sum is at least the minimum cohort size (protocols/secagg/effective.py)"
RECORDED = "secagg: the record of sums outlives sessions, which a server opens at will"
DECLARED = "federation/client_contract.py: a client answers what its contract declares and nothing else"
TRIES, OFFERED, FAR = 20, 8, 1.0
"""Tries, models offered in each, and how far, at random, these are from the honest model."""
PROBES = 8
"""Scores that are asked for at once, each of the loss at another model."""


def unique_choice(run: AttackRun) -> tuple[Held | None, int]:
    """Choices among random models, by one identical request to all, until one is that of a single client, who becomes the victim.

    The choices and that client's; None where clients refuse, −1 where no choice is a single client's.
    """
    rng, model = np.random.default_rng(0), run.scene.model
    choice: Held | None = None
    for _ in range(TRIES):
        offered = [(model + FAR * rng.standard_normal(model.size)).astype(model.dtype) for _ in range(OFFERED)]
        try:
            choice = run.fed.compute(Losses(run.scene.train.model), {"model": offered})["choice"]
            labels = {client: int(values["choice"]) for client, values in run.fed.gather(choice).items()}
        except (ProtocolError, InputError):
            return None, -1
        counts = Counter(labels.values())
        alone = [client for client, label in labels.items() if counts[label] == 1 and client in run.honest]
        if alone:
            run.victim = alone[0]
            return choice, labels[run.victim]
    return choice, -1


def private_choice(run: AttackRun) -> ActiveGuess:
    """All receive one list, and train the model that they chose; the one that moves at all is chosen by the victim alone."""
    choice, own = unique_choice(run)
    guess, note = None, "" if own >= 0 or choice is None else "no choice is a single client's"
    if choice is not None and own >= 0:
        stuck = useless(run)
        models = [run.scene.model if place == own else stuck for place in range(OFFERED)]
        held = run.fed.compute(run.scene.train, {"model": models}, which=choice)["update"]
        known = run.fed.known(held.key)
        other = next(pair for pair in known["models"][0][1] if pair[0] != own)  # the name of the useless models is that of all but one
        run.fed.know(held.key, {**known, "models": [[client, [other]] for client, _ in known["models"]], "chosen": []})
        summed = run.sum(held, run.clients)
        if summed is not None and run.victim in summed.survivors:
            guess = summed.total
    return ActiveGuess(guess, "update", run.honest, note)


def own_block(run: AttackRun) -> ActiveGuess:
    """Clients put their updates into blocks of their own choice, and the victim's choice is that of nobody else."""
    choice, own = unique_choice(run)
    guess, note, model = None, "" if own >= 0 or choice is None else "no choice is a single client's", run.scene.model
    if choice is not None and own >= 0:
        task = TrainInBlock(
            run.scene.train, OFFERED, run.fed.protection.secagg_clip / BLOCK_COUNT
        )  # its count is the largest number of a sum
        held = run.fed.compute(task, {"model": [model] * OFFERED}, which=choice)["blocks"]
        summed = sum_under(run, held, run.clients, 1)
        if summed is not None and run.victim in summed.survivors:
            guess = summed.total.reshape(OFFERED, -1)[own, :-1]
    return ActiveGuess(guess, "update", run.honest, note)


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
OWN_BLOCK = ActiveAttack("one client alone in a block of a sum", WEIGHED, own_block, pairwise_sums, accomplices=False)
NEW_SESSION = ActiveAttack(
    "one value summed in two sessions over cohorts that differ by its client", RECORDED, new_session, accomplices=False
)
UNDECLARED_SCORES = ActiveAttack(
    "losses at models of the server's choice, by a task of another algorithm", DECLARED, undeclared_scores,
    lambda config: "" if config.protection.sums.hides else "updates travel in the clear", claimed=lambda config: False, accomplices=False,
)  # fmt: skip
