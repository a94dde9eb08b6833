"""Coordinates of a client's vectors: an accomplice deposits unit vectors, and the first holder of shares opens its products with them.

Checks what is written beside the guarantee of aggregation/shares.py: clients that choose their vectors learn "with the first holder
coordinates: of each epoch, and a client lets its vectors into `most_epochs` at most".
"""

from contextlib import suppress

import numpy as np

from ...aggregation.share_holders import terms_of
from ...algorithms.pacfl import ClusterByAngles
from ...errors import InputError
from ...federation import messages as m
from ...federation.transforms import sketched
from ...protocols.errors import ProtocolError
from ...protocols.shared_gram import LEAD, deposit
from ...types import Array
from .liar import HOLDER
from .outcome import ActiveAttack, ActiveGuess
from .scene import AttackRun
from .shared_vectors import own_holder, shared_comparisons

__all__ = ["CHOSEN_DEPOSITS"]

EPOCHS = 4
"""So many epochs are opened. As many as clients allow (`most_epochs`) would show more."""


def chosen_deposits(run: AttackRun) -> ActiveGuess:
    """The victim's vectors are compared in several epochs, each time with other unit vectors. Raises `InputError` without an accomplice."""
    if not run.accomplices:
        raise InputError(f"of {len(run.clients)} clients none can be an accomplice; more are needed")
    held = run.fed.compute(run.scene.signature)["signature"]
    p, dimension = run.scene.signature.width, int(np.prod(run.scene.population.shape))
    length = min(1.0, run.scene.config.protection.share_bound)
    helper, holder = run.accomplices[0], own_holder(run, LEAD)
    run.liar.controlled[HOLDER - LEAD] = holder
    guess, opened = np.zeros((p, dimension)), 0

    def receive(client: int, ask: m.PartyRequest, answer: m.Answer, stage: str) -> m.Answer:
        if client != helper or not isinstance(ask, m.Give) or ask.epoch is None:
            return answer
        return _deposited(run, ask, helper, length * np.eye(dimension)[opened * p : (opened + 1) * p])

    run.liar.receive = receive
    with suppress(ProtocolError, InputError):
        while opened < min(EPOCHS, dimension // p):
            run.fed.gram(held, ClusterByAngles())
            order, gram = holder.seen(run.fed.session, opened)
            helper_row, victim_row = order.index(helper) * p, order.index(run.victim) * p
            guess[:, opened * p : (opened + 1) * p] = gram[victim_row : victim_row + p, helper_row : helper_row + p] / length
            opened += 1
    at = [row * dimension + column for row in range(p) for column in range(opened * p)]
    note = f"{len(at)} of {guess.size} coordinates in {opened} epochs, one accomplice"
    return ActiveGuess(np.ravel(guess) if opened else None, "signature", note=note, at=at)


def _deposited(run: AttackRun, ask: m.Give, client: int, rows: Array) -> m.Given:
    """An accomplice's deposit of these rows (p, d)."""
    protection, epoch = run.scene.config.protection, ask.epoch
    assert epoch is not None
    terms = terms_of(protection, ask.session, epoch.number, run.roster, *rows.shape)
    reduced = np.atleast_2d(sketched(epoch.number, protection.sketched)(rows))
    upload = deposit(terms, epoch.announcement, run.roster, run.identities[client], reduced)
    return m.Given((m.NamedArray("bytes", np.frombuffer(upload, dtype=np.uint8)),), 0)


CHOSEN_DEPOSITS = ActiveAttack(
    "coordinates of a client's vectors from an accomplice's unit vectors, opened by the first holder of shares",
    "docs/guarantees.md: a client that colludes with the first holder reads coordinates in each epoch", chosen_deposits, shared_comparisons,
    claimed=lambda config: False,
)  # fmt: skip
