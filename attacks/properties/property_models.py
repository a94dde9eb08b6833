"""Properties from the models that clients were sent: on which auxiliary samples, with or without the property, a model does better."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.nn import functional

from ...engine.device import tensor
from ...types import Array
from ..adversary import AdversaryView
from ..evidence.sums import models_sent
from ..evidence.updates import public_model
from ..figures.leakage import Prior
from .property_statements import FEWEST, Statement

__all__ = ["from_models", "last_models", "loss_gap"]


def from_models(models: Mapping[int, Array], prior: Prior, clients: Sequence[int], statement: Statement) -> Array:
    """Scores from the model that each client was sent last: how much smaller its loss is on samples with the property."""
    model, holds = public_model(prior), statement.holds(prior.x, prior.y)
    known: dict[bytes, float] = {}
    scores = []
    for client in clients:
        vector = models[client]
        if (key := vector.tobytes()) not in known:
            module = model.lent(vector.astype(model.init(0).dtype))
            with torch.no_grad():
                logits = module(model.inputs(prior.x)).double()
            losses = functional.cross_entropy(logits, tensor(prior.y), reduction="none").cpu().numpy()
            known[key] = loss_gap(losses, prior.y, holds)
        scores.append(known[key])
    return np.array(scores)


def loss_gap(losses: Array, y: Array, holds: Array) -> float:
    """How much smaller losses (n,) are where `holds` (n,), within labels, on average over these.

    A label weighs as much as the model knows it, e^(−loss) on its better side: on labels that nobody trained on a model says nothing. A
    property that labels decide is compared over all samples.
    """
    sides = [(losses[(y == label) & ~holds], losses[(y == label) & holds]) for label in np.unique(y)]
    means = np.array([(without.mean(), with_it.mean()) for without, with_it in sides if min(len(without), len(with_it)) >= FEWEST])
    if not len(means):
        return float(losses[~holds].mean() - losses[holds].mean())
    weights = np.exp(means.min() - means.min(axis=1))
    return float(weights @ (means[:, 0] - means[:, 1]) / weights.sum())


def last_models(view: AdversaryView, dimension: int) -> dict[int, Array]:
    """The last model that each client was sent, where it was sent one alone."""
    by_client: dict[int, Array] = {}
    for message in view.select("compute", "parameters"):
        models = [model for model in models_sent(view, message).values() if model.shape == (dimension,)]
        if len(models) == 1:
            by_client |= dict.fromkeys(message.clients, models[0])
    return by_client
