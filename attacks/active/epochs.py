"""Attacks on shared transforms: two comparisons in one clustering epoch, and a comparison that contains vectors of the server's choice.

A training with learning rate r and weight decay 1/r, one step over all data, ends near zero: its update is the model that the server sent,
with the other sign, whatever the data. So a client can be made to send any vector, such as a multiple of a unit vector e_i; under an
orthonormal transform its inner product with another row is that row's coordinate i.

Checks: "each transform serves one epoch, sum or fold, and is applied to one value of a client" (aggregation/transformed.py, Guarantee).
`chosen_rows` checks what is written beside it: a server that lies "gets everybody's inner product with each vector that it has another
client send" (docs/guarantees.md).
"""

from dataclasses import replace

import numpy as np

from ...contract.handles import Held, HeldKey
from ...experiments.config.config import Config
from ...federation import messages as m
from ...federation.values import trace
from ...federation.work import request_digest
from ...tasks.training import Train
from ...types import Array
from .outcome import ActiveAttack, ActiveGuess
from .scene import AttackRun

__all__ = ["CHOSEN_ROWS", "OPENED_BY_ANOTHER", "REPEATED_EPOCH"]

RATE = 1e-6
SIZE = 1.0
MOST = 64
"""So many coordinates of an update are read at most."""
NUMBER = 1 << 30
ALIASES = ("gram/0", "gram/00", "gram/0@0", "gram/0@1", "gram/+0")


def unit_row(run: AttackRun, client: int, coordinate: int, number: int) -> bool:
    """Have a client hold −SIZE times a unit vector as its update; whether it does."""
    model = np.zeros_like(run.scene.model)
    model[coordinate] = SIZE
    sent = ("model", m.Addends(model, (), ()))
    ask = m.Compute(run.fed.session, 0, run.scene.config.run.seed, number, (number, FIRST), m.Carried(_to_zero(run)), (sent,), None)
    answer = run.liar.ask({client: ask}, "compute").get(client)
    return isinstance(answer, m.Computed) and answer.result


def _to_zero(run: AttackRun) -> Train:
    """The training whose update is the given model with the other sign."""
    return replace(run.scene.train, epochs=1, batch_size=0, lr=RATE, weight_decay=1 / RATE, momentum=0.0, optimizer="sgd")


FIRST = NUMBER - 1
"""The number of the update that is to be read."""


def row_answered(run: AttackRun, client: int, number: int, transform: str) -> Array | None:
    """What a client gives of a value for comparison under a transform."""
    ask = m.Give(run.fed.session, "gram", number, ("update",), transform, False)
    answer = run.liar.ask({client: ask}, "gram").get(client)
    if not isinstance(answer, m.Given) or len(answer.values) != 1:
        return None
    return np.ravel(np.asarray(answer.values[0].value, np.float64))


def _first_row(run: AttackRun) -> Array | None:
    """The victim's update, trained from the honest model, under the epoch's transform."""
    sent = ("model", m.Addends(run.scene.model, (), ()))
    ask = m.Compute(run.fed.session, 0, run.scene.config.run.seed, FIRST, (), m.Carried(run.scene.train), (sent,), None)
    run.liar.ask({run.victim: ask}, "compute")
    return row_answered(run, run.victim, FIRST, ALIASES[0])


def repeated_epoch(run: AttackRun) -> ActiveGuess:
    """The victim is asked for its update and then, under the same transform or another name of it, for unit vectors."""
    wanted, dimension = _first_row(run), run.scene.train.model.dimension
    guess, names = np.zeros(dimension), list(ALIASES)
    read = 0
    for coordinate in range(min(dimension, MOST)) if wanted is not None else ():
        if not unit_row(run, run.victim, coordinate, NUMBER):
            break
        row = None
        for name in names:
            row = row_answered(run, run.victim, NUMBER, name)
            if row is not None and wanted is not None and row.shape == wanted.shape:
                guess[coordinate] = -float(row @ wanted) / SIZE
                read, names = read + 1, [name]
                break
        if row is None:
            break
    return ActiveGuess(guess if read else None, "update", note=f"{read} of {dimension} coordinates", at=range(read))


def chosen_rows(run: AttackRun) -> ActiveGuess:
    """Each other client is made to send one unit vector into the victim's epoch."""
    wanted, dimension = _first_row(run), run.scene.train.model.dimension
    guess, read = np.zeros(dimension), 0
    for client in run.others[:dimension] if wanted is not None else ():
        if unit_row(run, client, read, NUMBER):
            row = row_answered(run, client, NUMBER, ALIASES[0])
            if row is not None and wanted is not None and row.shape == wanted.shape:
                guess[read], read = -float(row @ wanted) / SIZE, read + 1
    note = f"{read} of {dimension} coordinates, one for each other client"
    return ActiveGuess(guess if read else None, "update", note=note, at=range(read))


def opened_by_another(run: AttackRun) -> ActiveGuess:
    """What the victim gave for comparison is sent to all others as a model, whose negative they are to hold as an update and add up."""
    row, dimension = _first_row(run), run.scene.train.model.dimension
    guess = None
    if row is not None:
        sent = m.Transformed(ALIASES[0], row.astype(run.scene.model.dtype), 0, dimension, (dimension,), dimension)
        model = ("model", m.Addends(None, (sent,), ()))
        ask = m.Compute(run.fed.session, 0, run.scene.config.run.seed, NUMBER, (), m.Carried(_to_zero(run)), (model,), None)
        answers = run.liar.ask(dict.fromkeys(run.others, ask), "compute")
        clients = tuple(sorted(client for client, answer in answers.items() if isinstance(answer, m.Computed) and answer.result))
        if clients:
            layout = [["update", run.scene.model.dtype.str, [dimension]]]
            held = Held(HeldKey("opened"), clients, ("update",))
            models = [[client, trace([request_digest(ask)]).hex()] for client in clients]
            run.fed.know(held.key, {"number": NUMBER, "layout": layout, "models": models})
            summed = run.sum(held, clients)
            guess = None if summed is None else -summed.total / len(summed.survivors)
    return ActiveGuess(guess, "update")


def _summed_securely(config: Config) -> str:
    if not config.protection.secure:
        return "what another client opens leaves it under a transform again, or is not hidden in the first place"
    return transformed_comparisons(config)


def transformed_comparisons(config: Config) -> str:
    """Why there is no shared transform to work out."""
    if not config.protection.comparison.transformed:
        return f"what is compared travels under no shared transform (gram = {list(config.protection.gram)})"
    if config.privacy.unit != "none":
        return "clients demand noise in all that they send; a training with a weight decay of the server's choice has none"
    return ""


REPEATED_EPOCH = ActiveAttack(
    "a second value of a client under the transform of an epoch",
    "transformed: each transform is applied to one value of a client", repeated_epoch, transformed_comparisons,
    claimed=lambda config: True, accomplices=False,
)  # fmt: skip
OPENED_BY_ANOTHER = ActiveAttack(
    "what a client gave for comparison, opened by the others", "docs/guarantees.md: a server that lies cannot have a signature opened by "
    "another client", opened_by_another, _summed_securely, claimed=lambda config: True, accomplices=False,
)  # fmt: skip
CHOSEN_ROWS = ActiveAttack(
    "coordinates of an update from vectors that other clients are made to send",
    "docs/guarantees.md: a server that lies may get inner products with vectors of its choice, one for each row", chosen_rows,
    transformed_comparisons, claimed=lambda config: False, accomplices=False,
)  # fmt: skip
