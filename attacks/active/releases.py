"""Repeated requests for a private step: does the client's own ledger count each one?

Checks: "releases under unit = "sample", and secure sums and single rows under unit = "client", are (ε, δ)-private as the client's settings
say, whatever a server asks for" (federation/client_ledger.py, Guarantee). The figure is the ε of all that the server got, by the project's
accountant, beside the ε that the client's settings allow.
"""

from ...errors import InputError, TrainingDiverged
from ...experiments.config.config import Config
from ...protocols.errors import ProtocolError
from .outcome import ActiveAttack, ActiveFigure
from .scene import AttackRun

__all__ = ["REPEATED_RELEASE"]

MOST = 200


def repeated_release(run: AttackRun) -> ActiveFigure:
    """The first round's training and its sum, three times as often as the run has rounds."""
    rounds, ledger, budget = run.scene.config.training.rounds, run.ledger, run.scene.config.privacy.epsilon
    assert ledger is not None  # `_private` says so
    spent = 0.0
    asked = 0
    while asked < min(MOST, 3 * max(1, rounds)) and not run.liar.refused:
        asked += 1
        try:
            summed = run.sum(run.compute(), run.clients)
        except (ProtocolError, InputError, TrainingDiverged):  # the last: no client gives a result
            break
        if summed is not None and not run.liar.refused:
            spent = ledger.spent(run.victim)
    note = f"{asked} releases asked for, of a run of {rounds} rounds"
    return ActiveFigure("epsilon", spent or None, budget, lower_is_better=False, margin=1e-6 * budget, note=note)


def _private(config: Config) -> str:
    return "clients demand no privacy" if config.privacy.unit == "none" else ""


REPEATED_RELEASE = ActiveAttack(
    "a private training and its sum, again and again",
    "client_ledger: what a client releases is private as its settings say, whatever a server asks for", repeated_release, _private,
    claimed=lambda config: True, accomplices=False,
)  # fmt: skip
