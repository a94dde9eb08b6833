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
from .outcome import ActiveAttack, Figure, Guess
from .scene import Play

__all__ = ["CHOICES", "DRESSED_TASK", "OTHER_OPERATION", "OTHER_OPERATION_COMPARED", "RELAY"]

LEAVES = "federation/client.py: values leave only under the protection of the client's own settings; it refuses a server that asks for more"
NUMBER = 1 << 30
"""The number of a value that the server's honest part knows nothing of."""


def _given(play: Play, held: int, part: str, operations: tuple[str, ...]) -> Array | None:
    """What the victim gives of a held value by one of these operations, in the clear."""
    found = None
    for operation in operations:
        transforms = ("",) if operation != "gram" else ("", "gram/0")
        for transform in transforms:
            ask = m.Give(play.fed.session, operation, held, (part,), transform, False)  # type: ignore[arg-type]
            answer = play.liar.ask({play.victim: ask}, operation).get(play.victim)
            if isinstance(answer, m.Given) and answer.values and found is None:
                found = np.ravel(np.asarray(answer.values[0].value, np.float64))
    return found


def other_operation(play: Play) -> Guess:
    """An update is gathered, compared, and summed in the clear."""
    number = play.number(play.compute())
    return Guess(_given(play, number, "update", ("gather", "gram", "sum")), "update", play.honest)


def other_operation_compared(play: Play) -> Guess:
    """A signature is gathered, summed in the clear, and compared in the clear."""
    number = play.number(play.fed.compute(play.scene.signature))
    return Guess(_given(play, number, "signature", ("gather", "sum")), "signature")


def dressed_task(play: Play) -> Guess:
    """A training whose update is declared as a score, and functions that the clients do not have; then what they made is gathered."""
    known = json.loads(task_to_bytes(play.scene.train))
    tasks = (
        json.dumps({**known, "parts": {"update": "score"}}), json.dumps({**known, "": "Leak"}),
        json.dumps({"": "Foreign", "name": "leak", "asked": ["update"], "layout": [], "config": []}),
        json.dumps({"": "Foreign", "name": "signature", "asked": ["update"], "layout": [], "config": []}),
    )  # fmt: skip
    found = None
    for number, task in enumerate(tasks, NUMBER):
        sent = ("model", m.Addends(play.scene.model, (), ()))
        ask = m.Compute(
            play.fed.session, 0, play.scene.config.run.seed, number, (), m.Carried(UnknownTask(task.encode())), (sent,), None
        )  # fmt: skip
        answer = play.liar.ask({play.victim: ask}, "compute").get(play.victim)
        if isinstance(answer, m.Computed) and answer.result and found is None:
            found = _given(play, number, "update", ("gather",))
    return Guess(found, "update", play.honest)


def relay(play: Play) -> Guess:
    """An update is sealed for an accomplice, as where clients send each other models."""
    if not play.accomplices:
        return Guess(None, "update", play.honest, "no accomplices")
    number, friend = play.number(play.compute()), play.accomplices[0]
    victim, target = (_recipient(play, client) for client in (play.victim, friend))
    ask = m.Seal(play.fed.session, number, ("update",), NUMBER, (target,))
    answer = play.liar.ask({play.victim: ask}, "seal").get(play.victim)
    if not isinstance(answer, m.SealedBoxes):
        return Guess(None, "update", play.honest, "one accomplice on the roster")
    play.liar.ask({friend: m.Take(play.fed.session, NUMBER, ("update",), (m.Boxed(victim, answer.boxes[0]),))}, "take")
    value = play.puppets[friend].values.parts(NUMBER, ("update",))["update"][play.victim]
    return Guess(np.ravel(np.asarray(value, np.float64)), "update", play.honest, "one accomplice on the roster")


def _recipient(play: Play, client: int) -> m.Recipient:
    """A client as the server names it to others: its public encryption key and its signature."""
    known = play.liar.enrolled(client)
    return m.Recipient(client, known.encryption_key, known.signature)


# --- choices as probes

STEPS = 32
"""So finely a share of labels is read: each client chooses among so many models at once."""


def choices(play: Play) -> Figure:
    """The share of each label, from which of some models without weights fits best.

    With the head's bias β on class y and 0 on the others the mean loss is log(e^β + C − 1) − β p_y, least where p_y = e^β / (e^β + C − 1).
    """
    model, truth = play.scene.train.model, _shares(play, play.victim)
    guess: Array | None = np.zeros(model.classes)
    for label in range(model.classes):
        share = _share(play, model, label)
        if share is None or guess is None:
            guess = None
            break
        guess[label] = share
    blank = np.mean([_shares(play, one) for one in play.honest], axis=0)
    value = None if guess is None else float(np.abs(guess - truth).sum())
    return Figure("label_shares_l1", value, float(np.abs(blank - truth).sum()), note=f"{model.classes} choices, each among {STEPS} models")


def _share(play: Play, model: Model, label: int) -> float | None:
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
    before = len(play.liar.refused)
    try:
        held = play.fed.compute(Losses(model), {"model": made}, on=[play.victim])["choice"]
        chosen = play.fed.gather(held)
    except (ProtocolError, InputError):
        if len(play.liar.refused) == before:
            raise
        return None
    return float(shares[int(chosen[play.victim]["choice"])]) if play.victim in chosen else None


def _shares(play: Play, client: int) -> Array:
    classes = play.scene.population.classes
    return np.bincount(play.scene.data(client).y_train, minlength=classes) / len(play.scene.data(client).y_train)


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
    "docs/guarantees.md, secagg: colluding clients subtract their own updates; below the threshold nothing else", relay, _relays,
)  # fmt: skip
CHOICES = ActiveAttack(
    "label shares from which of some crafted models a client chooses",
    "federation/release_policy.py: what the rule does not protect (a choice is a number about the data at models that the server names)",
    choices, _choices_apply, claimed=lambda config: False,
)  # fmt: skip
