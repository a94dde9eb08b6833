"""Requests that are made again and again: to read data from whether a training fails, and to have more privacy spent than is allowed.

`overflow_oracle`. Parameters for which a training fails on some data only: does the client's answer tell whether it did?

Checks: "whether a client has a result, its error code, its size and its shape do not depend on its data" (docs/guarantees.md, answers).
Two large steps of a network with one hidden unit, which is on for samples with a coordinate above a threshold and off for all others: if it
is on for any sample, the second step overflows. Each answer that tells so is one bit, and bisection reads the largest value.

`repeated_release`. Repeated requests for a private step: does the client's own ledger count each one?

Checks: "releases under unit = "sample", and secure sums and single rows under unit = "client", are (ε, δ)-private as the client's settings
say, whatever a server asks for" (federation/client_ledger.py, Guarantee). The figure is the ε of all that the server got, by the project's
accountant, beside the ε that the client's settings allow.
"""

from dataclasses import replace

import numpy as np

from ...engine.models import Model
from ...errors import InputError, TrainingDiverged
from ...experiments.config.config import Config
from ...federation import messages as m
from ...protocols.errors import ProtocolError
from ...tasks.training import Train
from .outcome import ActiveAttack, ActiveFigure
from .scene import AttackRun

__all__ = ["OVERFLOW_ORACLE", "REPEATED_RELEASE"]

QUESTIONS = 12
LARGE_STEP = 1e30
SPAN = 64.0
"""Values are looked for on both sides of zero up to this."""
NUMBER = 1 << 30


def overflow_oracle(run: AttackRun) -> ActiveFigure:
    """The largest value of one coordinate of the victim's samples, by bisection over thresholds."""
    shape, classes = run.scene.population.shape, run.scene.population.classes
    model = Model("mlp", shape, classes, hidden=1)
    task = replace(Train(model), epochs=2, batch_size=0, lr=LARGE_STEP, on_divergence="stop")
    place = int(np.prod(shape)) // 2
    low, high, read = -SPAN, SPAN, 0
    usual = _answers(run, task, place, 2 * SPAN)
    for _ in range(QUESTIONS if _answers(run, task, place, -2 * SPAN) != usual else 0):
        middle = (low + high) / 2
        if _answers(run, task, place, middle) != usual:
            low = middle
        else:
            high = middle
        read += 1
    samples = run.scene.data(run.victim).x_train
    largest = float(samples.reshape(len(samples), -1)[:, place].max())
    right = read if low - 1e-3 <= largest <= high + 1e-3 else 0
    note = f"{classes * (QUESTIONS + 2)} trainings at most, none of which is summed"
    return ActiveFigure("bits_of_a_value_read", float(right), 0.0, lower_is_better=False, margin=0.5, note=note)


def _answers(run: AttackRun, task: Train, place: int, threshold: float) -> list[bytes]:
    """The victim's answers to trainings in which the hidden unit moves the score of one class each: one of them is a sample's own."""
    answers = []
    for label in range(task.model.classes):
        vector = np.zeros(task.model.dimension, np.float32)
        first, bias, second, _ = (offset for _, _, offset in task.model.layout)
        vector[first + place], vector[bias], vector[second + label] = 1.0, -threshold, 1.0
        sent = (("model", m.Addends(vector, (), ())),)
        ask = m.Compute(run.fed.session, 0, run.scene.config.run.seed, NUMBER, (), m.Carried(task), sent, None)
        answer = run.liar.ask({run.victim: ask}, "compute").get(run.victim)
        answers.append(b"" if answer is None else m.encode(answer))
    return answers


def _hidden(config: Config) -> str:
    if not config.protection.sums.hides and config.privacy.unit == "none":
        return "updates travel in the clear"
    return ""


OVERFLOW_ORACLE = ActiveAttack(
    "a value of a sample, from whether trainings with large steps fail",
    "docs/guarantees.md: an answer depends on the client's data by the released value only",
    overflow_oracle, _hidden, claimed=lambda config: True, accomplices=False,
)  # fmt: skip


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
