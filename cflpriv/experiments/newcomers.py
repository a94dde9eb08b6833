"""The newcomer protocol's second figure: newcomers train the model they were given a little on their own data, and use that.

It happens on the client, with nothing sent, after the federation has ended; so it is computed here, outside the protocol, for every
algorithm alike. Source: Vahidian et al. 2023, section "Generalization to newcomers" (5 epochs).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..algorithm import Served
from ..engine import Streams, TaskInput
from ..evaluation import Evaluate
from ..local import LocalFederation
from ..training import Train
from ..types import Array

__all__ = ["fine_tuned_accuracy"]


def fine_tuned_accuracy(federation: LocalFederation, served: Served, train: Train, clients: Sequence[int]) -> Array:
    """The share of each client's test data that its model gets right after `train` on its training data, shape (clients,); NaN without any.

    What a client starts from is the model it would use: what the served task says (`used`), else the "model" it is given.
    """
    given = federation.resolve(served.task, served.params, served.which, clients)
    used = getattr(served.task, "used", lambda one: one.array("model"))
    starts = [np.asarray(used(one)) for one in given]
    train = replace(train, on_divergence="skip")

    def inputs(models: Sequence[Array]) -> list[TaskInput]:
        streams = [Streams(federation.seed, federation.round, client) for client in clients]
        return [TaskInput(one.data, {"model": model}, {}, own) for one, model, own in zip(given, models, streams, strict=True)]

    trained = federation.engine.run(train, inputs(starts))
    ends = [start + np.asarray(one["update"]) if one else start for start, one in zip(starts, trained, strict=True)]
    scores = federation.engine.run(Evaluate(train.model), inputs(ends))
    counts = np.array([float(one["count"]) for one in scores])
    return np.where(counts > 0, np.array([float(one["correct"]) for one in scores]) / np.maximum(counts, 1), np.nan)
