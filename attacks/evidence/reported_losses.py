"""The mean losses that clients report of models that everybody knows, and the losses of single samples by such models."""

import numpy as np
import torch

from ...contract.transcript import payload_rows
from ...engine.device import tensor
from ...engine.losses import loss_of
from ...engine.models import Model
from ...types import Array
from ..adversary import AdversaryView
from .sums import models_sent

__all__ = ["losses_of", "losses_reported"]

MOST_MODELS = 32
"""A client's losses of so many models are read, the first ones."""


def losses_reported(view: AdversaryView, dimension: int) -> dict[int, list[tuple[Array, float]]]:
    """By client that does not collude the models (dimension,) whose mean losses it reported, with these.

    A row of losses is of the models that the client was sent last, in their order. What follows is of models that nobody else has.
    """
    sent: dict[int, list[Array]] = {}
    reported: dict[int, list[tuple[Array, float]]] = {}
    for message in view.messages:
        if message.payload is None:
            continue
        if message.operation == "compute" and message.source == "server":
            named = models_sent(view, message)
            models = [named[name] for name in sorted(named, key=lambda name: int(name.partition("/")[2] or 0))]
            if models and all(model.shape == (dimension,) for model in models):
                sent |= dict.fromkeys(message.clients, models)
        losses = message.payload.get("losses")
        if message.operation != "gather" or losses is None or losses.ndim != 2:
            continue
        for client, row in zip(payload_rows(message), np.asarray(losses, np.float64), strict=False):
            pairs = [(model, float(loss)) for model, loss in zip(sent.get(client, []), row, strict=False) if np.isfinite(loss)]
            if client not in view.coalition and pairs:
                known = reported.setdefault(client, [])
                known += pairs[: MOST_MODELS - len(known)]
    return reported


def losses_of(model: Model, vector: Array, x: Array, y: Array) -> Array:
    """The loss (n,) of each sample by the model of these parameters (d,)."""
    module = model.lent(vector.astype(model.init(0).dtype))
    with torch.no_grad():
        return np.asarray(loss_of(model.loss, module(model.inputs(x)).double(), tensor(y), "none").cpu().numpy())
