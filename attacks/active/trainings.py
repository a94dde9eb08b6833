"""Trainings that a server crafts: to read data from whether one fails, or to have more privacy spent than is allowed.

`overflow_oracle`. Parameters for which a training fails on some data only: does the client's answer tell whether it did?

Checks: of answers "their presence, error code, size and shape are the same for all data" (docs/guarantees.md, answers).
Two large steps of a network with one hidden unit, which is on for samples with a coordinate above a threshold and off for all others: if it
is on for any sample, the second step overflows. Each answer that tells so is one bit, and bisection reads the largest value.

`repeated_release`. Repeated requests for a private step: does the client's own ledger count each one?

Checks: "releases under unit = "sample", and secure sums and single rows under unit = "client", are (ε, δ)-private as the client's settings
say, whatever a server asks for" (federation/client_ledger.py, Guarantee). The figure is the ε of all that the server got, by the project's
accountant, beside the ε that the client's settings allow.

`cancelling_parameters`. Parameters at which rounding decides the gradients of a client's samples: does one more sample change what the
others add to a sum?

Checks: "one sample moves a clipped sum by at most its clip norm, at any parameters" (docs/differential_privacy.md, Guarantees). The
server looks for such parameters on samples that it makes up: equal rows of classes at many sizes, then an evolution of the best. It sends
them to the victim for a private training. The figure: by how many clip norms a sample of the victim moves the sum, at the parameters that
the victim accepted; the scorer computes it as the client would, without noise. 1 is what the noise is calibrated for.
"""

from dataclasses import replace

import numpy as np

from ...engine import Engine, Streams, TaskInput
from ...engine.models import Model
from ...errors import InputError, TrainingDiverged
from ...experiments.config.config import Config
from ...federation import messages as m
from ...protocols.errors import ProtocolError
from ...tasks.training import Train
from ...types import Array, ClientData
from .outcome import ActiveAttack, ActiveFigure
from .scene import AttackRun

__all__ = ["CANCELLING_PARAMETERS", "OVERFLOW_ORACLE", "REPEATED_RELEASE", "shift"]

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


SIZES = tuple(10.0**power for power in range(3, 10))
STEPS, PLACES = 24, 4
ROUNDING = 1e-3


def shift(task: Train, vector: Array, data: ClientData) -> float:
    """By how many clip norms leaving out one sample of the data moves the sum of clipped gradients at `vector` (d,), at most."""
    step = replace(
        task, lr=1.0, lr_decay=1.0, momentum=0.0, weight_decay=0.0, prox=0.0, maml_lr=0.0, epochs=1, optimizer="sgd", clip_norm=1.0,
        sampling_rate=1.0, noise_multiplier=1.0, public_samples=max(1, len(data.y_train)), shares=1, on_divergence="stop",
    )  # fmt: skip

    def total(keep: Array) -> Array:
        some = replace(data, x_train=data.x_train[keep], y_train=data.y_train[keep])
        made = Engine().run(step, [TaskInput(some, {"model": vector}, {}, Streams(0, 0, data.id), secret=bytes(32))])[0]
        return step.public_samples * np.asarray(made["update"], np.float64)

    everything = np.arange(len(data.y_train))
    whole, places = total(everything), np.linspace(0, len(everything) - 1, min(PLACES, len(everything) - 1)).astype(int)
    return max((float(np.linalg.norm(whole - total(np.delete(everything, place)))) for place in places), default=0.0)


def equal_rows(task: Train, size: float, rng: np.random.Generator) -> Array:
    """Parameters (d,) whose last matrix has one row for all classes, of about this size."""
    vector = task.model.init(0).copy()
    matrices = [(shape, offset) for _, shape, offset in task.model.layout if len(shape) == 2]
    if matrices:
        (rows, width), offset = matrices[-1]
        vector[offset : offset + rows * width] = np.tile(rng.standard_normal(width) * size, rows)
    return vector


def searched(task: Train, like: ClientData, rng: np.random.Generator) -> Array:
    """The parameters (d,) that move the sum of made-up data most, of equal rows of all sizes and what an evolution makes of the best."""
    low, high = float(like.x_train.min()), float(like.x_train.max())
    data = replace(like, x_train=rng.uniform(low, high, like.x_train.shape).astype(like.x_train.dtype))
    tried = [equal_rows(task, size, rng) for size in SIZES]
    moved = [shift(task, vector, data) for vector in tried]
    best, most = tried[int(np.argmax(moved))], max(moved)
    for _ in range(STEPS):
        factors = np.where(rng.random(len(best)) < 0.1, rng.choice([-1.0, 0.5, 2.0, 10.0], len(best)), 1.0)
        vector = np.clip(best * factors, -SIZES[-1], SIZES[-1]).astype(best.dtype)
        if (now := shift(task, vector, data)) > most:
            best, most = vector, now
    return best


def cancelling_parameters(run: AttackRun) -> ActiveFigure:
    """The shift of the victim's own sum at parameters that it accepted."""
    victim = run.scene.data(run.victim)
    vector = searched(run.scene.train, victim, np.random.default_rng(run.scene.config.run.seed))
    try:
        run.fed.compute(run.scene.train, {"model": vector}, on=[run.victim])
    except (ProtocolError, InputError, TrainingDiverged):  # refused: the figure is of nothing that was sent
        return ActiveFigure("clip_norms", None, 1.0, lower_is_better=False, margin=ROUNDING)
    moved = shift(run.scene.train, vector, victim)
    return ActiveFigure("clip_norms", moved, 1.0, lower_is_better=False, margin=ROUNDING, note="of one sample; 1 is what noise covers")


def _no_samples(config: Config) -> str:
    return "" if config.privacy.unit == "sample" else "the unit of privacy is no sample"


CANCELLING_PARAMETERS = ActiveAttack(
    "a larger part of a sum for one sample, by parameters that cancel",
    "docs/differential_privacy.md: one sample moves a clipped sum by at most its clip norm, at any parameters",
    cancelling_parameters, _no_samples, claimed=lambda config: True, accomplices=False,
)  # fmt: skip
