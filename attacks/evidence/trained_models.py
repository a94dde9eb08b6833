"""Where messages hold what single clients trained: updates, whole models, blocks with a weight, and models that clients relay.

Every attack on single clients reads the same few forms. A form is known by the operation, the kind and the shape of a message, and by
checks that hold for that form alone:

update            a row (d,), or one model of several behind each other: the movement from the model that the client was sent
block             a row (k, d) or (k, d + 1) with one block that is not zero: the movement from model number s, perhaps beside a count
weighted blocks   a row (k, d + 1), block s being u_s (w − c_s), u_s for the model c_s that was sent: all blocks give the same w
packed models     a row (k (d + classes),): k movements, then sums of weights by label, which come to the client's label shares
compared          the rows of a Gram matrix in the clear whose kind is that of updates: the last row is the movement of this round
relayed           another client's update, or the whole vector that it keeps as its own ("own")
part              a row shorter than d: the movement of the last parameters, where the client was sent only these

Source of the attacks: any message that determines a client's model is that model (Zhang et al. 2021, FedFomo; Ruan & Joe-Wong 2022,
FedSoft: a block over its weight).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any

import numpy as np

from ...contract.transcript import Message, payload_rows
from ...engine.models import Model
from ...errors import InputError
from ...experiments.config.config import Config
from ...federation.task_encoding import task_of
from ...tasks.training import Start
from ...types import Array
from ..adversary import UPDATES, AdversaryView, hidden_by, opened_rows, parts_in, updates_sent
from .local_training import LocalTraining, training_in
from .sums import models_sent, packed_models, stated_shares

__all__ = [
    "OWN", "Declared", "Trained", "declared_by", "label_shares_sent", "models_of_round", "own_initial_model", "trained_in",
]  # fmt: skip

COMPARED = ("update", "rows")
"""Kinds of a Gram matrix whose rows are a client's updates; the last one is of the round."""
OWN, BLOCKS = "own", "blocks"
"""The whole vector that a client keeps for itself, and an update in the block of a model."""
SAME = 1e-3
"""Relative difference up to which models from several blocks are one: weights below 1e-3 in float32 leave so much."""


@dataclass(frozen=True, eq=False)
class Trained:
    """What one message holds of one client's training: its movement (d,) from the model of number `label`, or its `whole` model (d,).

    `weights` (k,) are those of weighted blocks; `part` is where the known parameters begin, 0 for all (others are 0 in `vector`).
    """

    client: int
    label: int
    vector: Array
    whole: bool = False
    weights: Array | None = None
    part: int = 0


def trained_in(
    view: AdversaryView, message: Message, dimension: int, models: Sequence[Array], classes: int = 0, named: Sequence[str] = UPDATES
) -> list[Trained]:
    """What a message holds of single clients' training; `models` are those (d,) that they were sent, by number.

    Of updates that stay transformed, as many numbers as a model has.
    """
    if message.payload is None:
        return []
    if message.operation == "mean" and message.kind in ("update", "blind update"):
        return _summed(view, message, dimension, models, classes, named)
    if message.operation == "relay":
        return _relayed(message, dimension)
    return _compared(view, message, dimension) if message.operation == "gram" else []


def models_of_round(view: AdversaryView, message: Message, dimension: int, classes: int) -> dict[str, Array]:
    """The models (dimension,) in a message of parameters by name; several behind each other in one vector are "model/0" and on."""
    sent = models_sent(view, message)
    models = {name: vector for name, vector in sent.items() if vector.shape == (dimension,)}
    packed = sent.get("model")
    if models or packed is None or not (count := packed_models(len(packed), dimension, classes)):
        return models
    return {f"model/{label}": packed[label * dimension : (label + 1) * dimension] for label in range(count)}


def _summed(
    view: AdversaryView, message: Message, dimension: int, models: Sequence[Array], classes: int, named: Sequence[str]
) -> list[Trained]:
    """What clients send for a mean."""
    context, rows = message.context, updates_sent(view, message, named)
    clients = payload_rows(message)
    if rows is None:
        blocks = parts_in(view, message).get(BLOCKS)
        return [] if blocks is None or named is not UPDATES else _of_blocks(clients, np.asarray(blocks, np.float64), dimension, models)
    if "transform" in context:
        rows = rows[:, :dimension]  # a blind one may be padded, or hold other parts as well
    if rows.shape[1] != dimension and (count := packed_models(rows.shape[1], dimension, classes)):
        return [of for client, row in zip(clients, rows, strict=False) for of in _of_packed(client, row, dimension, count)]
    groups = context.get("labels") or [[context.get("group", 0)]] * len(message.clients)
    labels = {client: int(listed[0]) if listed else 0 for client, listed in zip(message.clients, groups, strict=False)}
    return [Trained(client, labels.get(client, 0), row) for client, row in zip(clients, rows, strict=False)]


def _of_blocks(clients: Sequence[int], rows: Array, dimension: int, models: Sequence[Array]) -> list[Trained]:
    """Movements from updates in blocks, (m, k, d or d + 1) or the same flat."""
    sizes = [size for size in (dimension, dimension + 1) if models and rows.size == len(rows) * len(models) * size]
    if not sizes:
        return []
    trained = []
    for client, row in zip(clients, rows.reshape(len(rows), len(models), sizes[0]), strict=False):
        filled = np.flatnonzero(row[:, :dimension].any(axis=1))
        if len(filled) == 1:
            trained.append(Trained(client, int(filled[0]), row[filled[0], :dimension]))
        elif sizes[0] > dimension and (model := _of_weighted(row, models)) is not None:
            trained.append(Trained(client, int(row[:, -1].argmax()), model, whole=True, weights=row[:, -1]))
    return trained


def _of_weighted(row: Array, models: Sequence[Array]) -> Array | None:
    """The model (d,) that blocks u_s (w − c_s) and u_s, (k, d + 1), are of; None where they do not agree on one."""
    weights = row[:, -1]
    if not (weights > 0).all():
        return None
    each = np.stack([block[:-1] / weight + centre for block, weight, centre in zip(row, weights, models, strict=True)])
    best = each[weights.argmax()]
    moved = max(float(np.linalg.norm(best - centre)) for centre in models)
    return best if float(np.linalg.norm(each - best, axis=1).max()) <= SAME * moved else None


def _of_packed(client: int, row: Array, dimension: int, count: int) -> list[Trained]:
    """The movements of several models at once; the last is of the model that moved most."""
    moved = row[: count * dimension].reshape(count, dimension)
    order = np.argsort(np.linalg.norm(moved, axis=1), kind="stable")
    return [Trained(client, int(label), moved[label]) for label in order if moved[label].any()]


def label_shares_sent(view: AdversaryView, dimension: int, classes: int) -> dict[int, Array]:
    """Label shares (classes,) of clients that send sums of weights by label behind several models (`stated_shares`)."""
    shares: dict[int, Array] = {}
    sent: Array | None = None
    for message in view.messages:
        if message.operation == "compute" and message.payload is not None and "model" in message.payload:
            sent = np.asarray(message.payload["model"], np.float64)
        if sent is None or message.operation != "mean" or message.kind not in ("update", "blind update") or message.payload is None:
            continue
        rows = updates_sent(view, message)
        is_blind = "transform" in message.context and "blind" in parts_in(view, message)
        if rows is None or rows.shape[1:] != sent.shape or is_blind:
            continue
        for client, row in zip(payload_rows(message), rows + sent, strict=False):
            if (of_client := stated_shares(row, dimension, classes)) is not None:
                shares.setdefault(client, of_client)
    return shares


def _relayed(message: Message, dimension: int) -> list[Trained]:
    """Vectors that clients relay to others: their updates, or what they keep as their own."""
    part = (message.payload or {}).get(message.kind)
    if part is None or part.ndim != 2 or part.shape[1] != dimension or message.kind not in (*UPDATES, OWN):
        return []
    rows = np.asarray(part, np.float64)
    return [Trained(client, 0, row, whole=message.kind == OWN) for client, row in zip(payload_rows(message), rows, strict=False)]


def _compared(view: AdversaryView, message: Message, dimension: int) -> list[Trained]:
    """Updates that are compared in the clear, or under a transform that the coalition opens."""
    rows, name = (message.payload or {}).get("rows"), f"gram/{message.context.get('epoch')}"
    if rows is None or rows.ndim != 3 or message.kind not in COMPARED or hidden_by(view, name, "gram"):
        return []
    opened = opened_rows(view, np.asarray(rows, np.float64), name, "gram", dimension)
    if opened is None or opened.shape[2] != dimension:
        return []
    return [Trained(client, 0, row[-1]) for client, row in zip(payload_rows(message), opened, strict=False)]


# --- what clients start from, and how they train, where no message says so -------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Declared:
    """What the public schedule of a run declares: the `initial` model (d,) that clients make themselves, and their training of a round."""

    initial: Array | None = None
    local: LocalTraining | None = None


def declared_by(config: Config, model: Model) -> Declared:
    """What is declared for a run of `config` that trains `model`; nothing where the algorithm declares no schedule."""
    offered: dict[str, Any] = {"seed": config.run.seed, "weights": config.training.weights, "groups": {}}
    wanted = signature(config.spec.make).parameters
    try:
        made = config.spec.make(
            config.train_on(model), **{name: value for name, value in offered.items() if name in wanted}, **config.hyper
        )
    except InputError:
        return Declared()
    asked = [] if made.schedule is None else list(made.schedule.requests())
    starts = (request.task for _, request in asked if isinstance(request.task, Start))
    trainings = (training_in(request.task) for phase, request in asked if phase == "round")
    start = next(starts, None)
    return Declared(
        None if start is None else np.asarray(start.model.init(start.seed), np.float64),
        next((training for training in trainings if training is not None), None),
    )


def own_initial_model(message: Message) -> Array | None:
    """The initial model (d,) that clients make themselves by the public seed of the task in a message; None where it names none."""
    settings = message.context.get("settings")
    return None if settings is None else _initial_of(json.dumps(settings))


@lru_cache(maxsize=64)
def _initial_of(settings: str) -> Array | None:
    task = task_of(json.loads(settings))
    seed, model = getattr(task, "seed", None), getattr(getattr(task, "train", None), "model", None)
    return None if seed is None or model is None else np.asarray(model.init(int(seed)), np.float64)
