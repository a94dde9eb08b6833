"""Model inconsistency: an active server reads one client's update from a secure sum.

Source: Pasquini, Francati & Ateniese 2022 ("Eluding secure aggregation in federated learning via model inconsistency"): the victim is sent
the true model, everybody else one whose hidden units are all dead, so that their updates are zero except in the head's bias, and the sum is
the victim's update. Deviation: dead units by zero weights and a bias of −1 before every ReLU; what the others add to the head's bias, and
what weight decay does to their dead weights, is left in (under Adam that is a whole step for each of these weights).

What it proves: a secure sum protects only among clients that trained the same model, so the sum has to be bound to it. What it does not:
the binding is to a *list* of models; where sums over clients of several clusters list k models (oblivious sums), a private model planted as
one of the k is not refused by it.

No recorded transcript contains this attack, since recorded servers follow the protocol: it runs against the real machines of
`protocols.secagg`, with clients that hold the run's data. Only an audit may do that; the server's part sees messages alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise

import numpy as np
from torch import nn

from ...engine import Streams, TaskInput
from ...engine.models import Model, build_module
from ...errors import InputError
from ...protocols import secagg
from ...protocols.entropy import Entropy, system_entropy
from ...protocols.keys import Identity, Roster
from ...tasks.training import Train
from ...types import Array, ClientData
from ..evidence.updates import public_model
from ..figures.leakage import Case, Cell, Truth, cell, nothing
from ..labels.label_readings import bias_span

__all__ = ["Attempt", "cells", "deadened", "isolate"]

NAME = "model_inconsistency"
MARGIN = {"update_relative_error": 0.1, "update_cosine": 0.1}
COHORT, VICTIMS = 8, 4
SESSION = b"model inconsist."


@dataclass(frozen=True, eq=False)
class Attempt:
    """The server's result: the victim's update (d,), None if there was no sum; and the error codes of clients that refused."""

    update: Array | None
    refused: tuple[str, ...] = ()


def deadened(model: Model, vector: Array) -> Array:
    """Parameters (d,) like `vector` whose hidden units are dead: each linear map before a ReLU has weight 0 and bias −1.

    Raises `InputError` for a model without one, or one whose maps lack a bias.
    """
    layers = list(build_module(model).named_modules())
    before = {name for (name, layer), (_, after) in pairwise(layers) if _has_bias(layer) and isinstance(after, nn.ReLU)}
    if not before:
        raise InputError(f"model {model.name!r}: no linear map with a bias stands before a ReLU; this attack cannot disable it")
    made = np.array(vector)
    for name, shape, at in model.layout:
        if name.rpartition(".")[0] in before:
            made[at : at + int(np.prod(shape))] = -1.0 if name.endswith("bias") else 0.0
    return made


def _has_bias(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear | nn.Conv2d) and sum(1 for _ in layer.parameters()) == 2  # frozen ones are not sent


def isolate(
    updates: Mapping[int, Array], held: Mapping[int, bytes], victim: int, *, clip: float = 1.0, min_cohort: int = 3, binding: bool = True,
    entropy: Entropy = system_entropy,
) -> Attempt:  # fmt: skip
    """Asks clients for the secure sum of `updates` (d,), where the victim alone was sent the model whose hash `held` has for it.

    With `binding` each client insists on the hash of the model that it was sent itself: who is shown another one refuses, and the sum goes
    on without it, as with any dropout. Without, it accepts the hash that the server names: for this experiment only, no configuration
    allows it.
    """
    numbers = {client: number for number, client in enumerate(sorted(updates))}
    by_number = {number: client for client, number in numbers.items()}
    identities = {number: Identity.create(number, entropy) for number in by_number}
    roster = Roster(tuple(identities[number].public() for number in sorted(identities)))
    terms = secagg.make_terms(
        session=SESSION, slot=(1, 0), cohort=by_number, models=[held[victim]], dimension=len(updates[victim]), clip=clip,
        min_cohort=min_cohort, roster=roster, entropy=entropy,
    )  # fmt: skip
    policies = {
        number: secagg.Policy(SESSION, "active", held[client] if binding else held[victim], 1, min_cohort, None, terms.dimension)
        for number, client in by_number.items()
    }
    refusals: dict[int, str] = {}
    while True:
        try:
            done = secagg.simulate(
                terms, identities, lambda number: secagg.Contribution(updates[by_number[number]]), roster=roster,
                policy=policies.__getitem__, drops=dict.fromkeys(refusals, "Advert"), entropy=entropy,
            )  # fmt: skip
        except secagg.TooFewClients as error:
            return Attempt(None, (*refusals.values(), str(error)))
        except secagg.RemoteError as error:
            refused = [number for number, policy in policies.items() if policy.model not in terms.models and number not in refusals]
            if not refused:
                return Attempt(None, (*refusals.values(), str(error)))
            refusals |= dict.fromkeys(refused, f"unlisted-model ({error})")
            continue
        return Attempt(done.sum.total())


# --- the attack ---------------------------------------------------------------------------------------------------------------------


def attack_victim(
    clients: Sequence[ClientData], train: Train, start: Array, victim: int, *, clip: float, min_cohort: int, binding: bool
) -> Attempt:
    """The whole attack: send crafted models, train updates on them, take their secure sum."""
    dead = deadened(train.model, start)
    sent = {client.id: start if client.id == victim else dead for client in clients}
    updates = {client.id: trained(client, train, sent[client.id]) for client in clients}
    held = {client: sha256(np.ascontiguousarray(vector).tobytes()).digest() for client, vector in sent.items()}
    return isolate(updates, held, victim, clip=clip, min_cohort=min_cohort, binding=binding)


def trained(client: ClientData, train: Train, start: Array) -> Array:
    """The update (d,) of one client."""
    return np.asarray(train.run(TaskInput(client, {"model": start}, {}, Streams(0, 0, client.id)))["update"], np.float64)


def score(attempt: Attempt, truth: Array, metric: str, inside: int) -> float:
    """‖û − u‖ / ‖u‖, or the cosine, of the first `inside` coordinates; without a sum û = 0, which is the guess without a view."""
    truth = truth[:inside]
    guess = np.zeros_like(truth) if attempt.update is None else attempt.update[:inside]
    length = max(float(np.linalg.norm(truth)), 1e-300)
    if metric == "update_relative_error":
        return float(np.linalg.norm(guess - truth)) / length
    return float(guess @ truth) / (length * max(float(np.linalg.norm(guess)), 1e-300))


def clients_of(truth: Truth) -> list[ClientData]:
    """Clients with the run's training data, for the audit."""
    return [ClientData(client, x, y, x[:0], y[:0]) for client, (x, y) in sorted(truth.data.items())]


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """One victim after the other in secure sums of a few clients: with the binding (the view) and without (the reference)."""
    config = case.prior.config
    why = ""
    if case.view.adversary != "active-server":
        why = "not attempted: only an active server can do this (--adversary active-server)"
    elif config is not None and config.protection.sums.oblivious:
        why = "not attempted: sums that list several models"
    elif config is None or config.protection.sum != "secagg":
        why = "no secure sum over clients of one model: single updates reach the server"
    elif config.privacy.unit != "none":
        why = "not attempted: updates have noise of their own"
    if why:
        return [nothing(case, NAME, "update_relative_error", why)], None
    assert config is not None
    model, protection = public_model(case.prior), config.protection
    start = model.init(config.run.seed)
    try:
        deadened(model, start)
    except InputError as error:
        return [nothing(case, NAME, "update_relative_error", f"not attempted: {error}")], None
    t = config.training
    train = Train(model, t.epochs, t.batch_size, t.lr, t.momentum, t.weight_decay, optimizer=t.optimizer)
    people = clients_of(case.truth)[:COHORT]
    min_cohort = protection.smallest_sum
    if len(people) < max(min_cohort, VICTIMS):
        return [nothing(case, NAME, "update_relative_error", f"not attempted: fewer than {max(min_cohort, VICTIMS)} clients")], None
    victims = [client.id for client in people[:VICTIMS]]
    head = bias_span(model)
    inside = model.dimension if head is None else head.start  # the head's bias comes last
    exact = {client.id: trained(client, train, start) for client in people if client.id in victims}
    tries = {
        binding: [
            attack_victim(people, train, start, victim, clip=protection.secagg_clip, min_cohort=min_cohort, binding=binding)
            for victim in victims
        ]
        for binding in (True, False)
    }
    codes = sorted({code for attempt in tries[True] for code in attempt.refused})
    note = (
        f"{len(victims)} victims in turn, {len(people)} clients, first round, {inside} of {model.dimension} coordinates (all but the "
        "head's bias); run against the real machines; error codes with the binding: "
        f"{'; '.join(codes) or 'nothing'}; reference: the binding off; baseline: no sum (û = 0)"
    )
    figures = []
    for metric in MARGIN:
        observed, reference = (
            np.array([score(attempt, exact[v], metric, inside) for attempt, v in zip(tries[b], victims, strict=True)])
            for b in (True, False)
        )
        blank = np.array([score(Attempt(None), exact[v], metric, inside) for v in victims])
        figures.append(
            cell(case, NAME, metric, observed, blank, reference, margin=MARGIN[metric], lower_is_better=metric.endswith("error"), note=note)
        )
    return figures, None
