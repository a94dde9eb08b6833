"""Asking for a hidden value by another route: another operation, another task, or another client.

Checks: "values leave the client through `give`, `seal` and secure sums only, under the protection that its own settings name; the client
refuses a server that asks for more" (federation/client.py, Guarantee); "below the threshold nothing else" for colluding clients under
secure sums, and "It cannot have a signature handed over by another operation, or opened by another client" (docs/guarantees.md).
`choices_as_probes` checks what `federation/release_policy.py` says that the rule does not protect.
"""

import json

import numpy as np

from ...contract.handles import Held
from ...engine.models import Model
from ...errors import InputError
from ...experiments.config.config import Config
from ...federation import messages as m
from ...federation.task_encoding import UnknownTask, task_to_bytes
from ...protocols.errors import ProtocolError
from ...tasks.evaluation import Losses
from ...types import Array
from .outcome import ActiveAttack, ActiveFigure, ActiveGuess
from .scene import AttackRun

__all__ = ["CHOICES", "DRESSED_TASK", "OTHER_OPERATION", "OTHER_OPERATION_COMPARED", "RELAY"]

LEAVES = "federation/client.py: values leave only under the protection of the client's own settings; it refuses a server that asks for more"
NUMBER = 1 << 30
"""The number of a value that the server's honest part knows nothing of."""


def _given(run: AttackRun, held: int, part: str, operations: tuple[str, ...]) -> Array | None:
    """What the victim gives of a held value by one of these operations, in the clear."""
    released = None
    for operation in operations:
        transforms = ("",) if operation != "gram" else ("", "gram/0")
        for transform in transforms:
            ask = m.Give(run.fed.session, operation, held, (part,), transform, False)  # type: ignore[arg-type]
            answer = run.liar.ask({run.victim: ask}, operation).get(run.victim)
            if isinstance(answer, m.Given) and answer.values and released is None:
                released = np.ravel(np.asarray(answer.values[0].value, np.float64))
    return released


def other_operation(run: AttackRun) -> ActiveGuess:
    """An update is gathered, compared, and summed in the clear."""
    number = run.number(run.compute())
    return ActiveGuess(_given(run, number, "update", ("gather", "gram", "sum")), "update", run.honest)


def other_operation_compared(run: AttackRun) -> ActiveGuess:
    """A signature is gathered, summed in the clear, and compared in the clear."""
    number = run.number(run.fed.compute(run.scene.signature))
    return ActiveGuess(_given(run, number, "signature", ("gather", "sum")), "signature")


def dressed_task(run: AttackRun) -> ActiveGuess:
    """A training whose update is declared as a score, and functions that the clients do not have; then what they made is gathered."""
    known = json.loads(task_to_bytes(run.scene.train))
    tasks = (
        json.dumps({**known, "parts": {"update": "score"}}), json.dumps({**known, "": "Leak"}),
        json.dumps({"": "Foreign", "name": "leak", "asked": ["update"], "layout": [], "config": []}),
        json.dumps({"": "Foreign", "name": "signature", "asked": ["update"], "layout": [], "config": []}),
    )  # fmt: skip
    released = None
    for number, task in enumerate(tasks, NUMBER):
        sent = ("model", m.Addends(run.scene.model, (), ()))
        ask = m.Compute(
            run.fed.session, 0, run.scene.config.run.seed, number, (), m.Carried(UnknownTask(task.encode())), (sent,), None
        )  # fmt: skip
        answer = run.liar.ask({run.victim: ask}, "compute").get(run.victim)
        if isinstance(answer, m.Computed) and answer.result and released is None:
            released = _given(run, number, "update", ("gather",))
    return ActiveGuess(released, "update", run.honest)


def relay_to_accomplice(run: AttackRun) -> ActiveGuess:
    """An update is sealed for an accomplice, as where clients send each other models."""
    if not run.accomplices:
        return ActiveGuess(None, "update", run.honest, "no accomplices")
    number, friend = run.number(run.compute()), run.accomplices[0]
    victim, target = (_recipient(run, client) for client in (run.victim, friend))
    ask = m.Seal(run.fed.session, number, ("update",), NUMBER, (target,))
    answer = run.liar.ask({run.victim: ask}, "seal").get(run.victim)
    if not isinstance(answer, m.SealedBoxes):
        return ActiveGuess(None, "update", run.honest, "one accomplice on the roster")
    run.liar.ask({friend: m.Take(run.fed.session, NUMBER, ("update",), (m.Boxed(victim, answer.boxes[0]),))}, "take")
    value = run.controlled[friend].values.parts(NUMBER, ("update",))["update"][run.victim]
    return ActiveGuess(np.ravel(np.asarray(value, np.float64)), "update", run.honest, "one accomplice on the roster")


def _recipient(run: AttackRun, client: int) -> m.Recipient:
    """A client as the server names it to others: its public encryption key and its signature."""
    known = run.liar.enrolled(client)
    return m.Recipient(client, known.encryption_key, known.signature)


# --- choices as probes

STEPS = 32
"""So finely a share of labels is read: each client chooses among so many models at once."""


def choices_as_probes(run: AttackRun) -> ActiveFigure:
    """The share of each label, from which of some models without weights fits best.

    With the head's bias β on class y and 0 on the others the mean loss is log(e^β + C − 1) − β p_y, least where p_y = e^β / (e^β + C − 1).
    """
    model, truth = run.scene.train.model, _shares(run, run.victim)
    guess: Array | None = np.zeros(model.classes)
    for label in range(model.classes):
        share = _share(run, model, label)
        if share is None or guess is None:
            guess = None
            break
        guess[label] = share
    blank = np.mean([_shares(run, client) for client in run.honest], axis=0)
    value = None if guess is None else float(np.abs(guess - truth).sum())
    return ActiveFigure(
        "label_shares_l1", value, float(np.abs(blank - truth).sum()), note=f"{model.classes} choices, each among {STEPS} models"
    )


def _share(run: AttackRun, model: Model, label: int) -> float | None:
    """One label's share at the victim, None where it does not answer."""
    from ..labels.label_readings import bias_span  # loads scipy

    span = bias_span(model)
    assert span is not None  # `_choices_apply` says so
    shares = (np.arange(STEPS) + 0.5) / STEPS
    made = []
    for share in shares:
        vector = np.zeros(model.dimension, dtype=model.init(0).dtype)
        vector[span.start + label] = np.log(share * (model.classes - 1) / (1 - share))
        made.append(vector)
    held: Held | None = None
    before = len(run.liar.refused)
    try:
        held = run.fed.compute(Losses(model), {"model": made}, on=[run.victim])["choice"]
        chosen = run.fed.gather(held)
    except (ProtocolError, InputError):
        if len(run.liar.refused) == before:
            raise
        return None
    return float(shares[int(chosen[run.victim]["choice"])]) if run.victim in chosen else None


def _shares(run: AttackRun, client: int) -> Array:
    classes = run.scene.population.classes
    return np.bincount(run.scene.data(client).y_train, minlength=classes) / len(run.scene.data(client).y_train)


def _hidden_sums(config: Config) -> str:
    if not config.protection.sums.hides and config.protection.smallest_sum <= 1:
        return "updates travel in the clear"
    return ""


def _hidden_comparisons(config: Config) -> str:
    return "" if config.protection.comparison.hides else "what is compared travels in the clear"


def _relays(config: Config) -> str:
    if not config.protection.sums.hides:
        return "updates travel in the clear"
    if config.protection.transformed:
        return "an accomplice has the clients' secret, which opens everything"
    return ""


def _choices_apply(config: Config) -> str:
    if config.privacy.unit == "client":
        return "nothing but means leaves under privacy.unit = 'client'"
    if config.spec.sample_releases is not None and config.privacy.unit == "sample":
        noise = config.noise()
        if noise is None or not noise.choice:
            return "under privacy.unit = 'sample' this algorithm's clients have no private form of a choice"
    return ""


OTHER_OPERATION = ActiveAttack(
    "an update gathered, compared or summed in the clear", LEAVES, other_operation, _hidden_sums, claimed=lambda config: True
)
OTHER_OPERATION_COMPARED = ActiveAttack(
    "a signature gathered or summed", "docs/guarantees.md: a server that lies cannot have a signature handed over by another operation",
    other_operation_compared, _hidden_comparisons, claimed=lambda config: True, accomplices=False,
)  # fmt: skip
DRESSED_TASK = ActiveAttack(
    "a task that declares its update as a score, and tasks that clients do not know", LEAVES, dressed_task, _hidden_sums,
    claimed=lambda config: True,
)  # fmt: skip
RELAY = ActiveAttack(
    "an update sealed for an accomplice on the roster",
    "docs/guarantees.md, secagg: colluding clients subtract their own updates; below the threshold nothing else",
    relay_to_accomplice, _relays,
)  # fmt: skip
CHOICES = ActiveAttack(
    "label shares from which of some crafted models a client chooses",
    "federation/release_policy.py: what the rule does not protect (a choice is a number about the data at models that the server names)",
    choices_as_probes, _choices_apply, claimed=lambda config: False,
)  # fmt: skip
