"""The experimenter's eye: it may see data and truth, it is outside the protocol, and nothing it sees reaches the transcript."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..algorithm import Algorithm, Served
from ..engine import Streams, TaskInput, Value
from ..evaluation import Evaluate
from ..local import LocalFederation
from ..models import Model
from ..types import Array

__all__ = ["local_accuracy", "local_scores", "recomputed", "served_accuracy", "served_scores"]


def served_accuracy(federation: LocalFederation, served: Served, clients: Sequence[int]) -> Array:
    """The share of each client's own test data that the model it would use gets right, shape (clients,). NaN without test data."""
    return served_scores(federation, served, clients)[0]


def served_scores(federation: LocalFederation, served: Served, clients: Sequence[int]) -> tuple[Array, Array]:
    """As `served_accuracy`, and the mean loss in nats a sample, whose exponential is the perplexity; each (clients,)."""
    inputs = federation.resolve(served.task, served.params, served.which, clients)
    return _scores(federation.engine.run(served.task, inputs))


def local_accuracy(federation: LocalFederation, model: Model, clients: Sequence[int]) -> Array:
    """The same of each client's last locally trained model (the metric of the clustering papers); NaN for clients that never trained."""
    return local_scores(federation, model, clients)[0]


def local_scores(federation: LocalFederation, model: Model, clients: Sequence[int]) -> tuple[Array, Array]:
    """As `local_accuracy`, and the mean loss in nats a sample; each (clients,)."""
    accuracy, loss = np.full(len(clients), np.nan), np.full(len(clients), np.nan)
    trained = [(i, client, federation.recall(client, "trained")) for i, client in enumerate(clients)]
    known = [(i, client, vector) for i, client, vector in trained if vector is not None]
    inputs = [_input(federation, client, {"model": vector}) for _, client, vector in known]
    if inputs:
        at = [i for i, _, _ in known]
        accuracy[at], loss[at] = _scores(federation.engine.run(Evaluate(model), inputs))
    return accuracy, loss


def recomputed(algorithm: Algorithm, federation: LocalFederation, clients: Sequence[int]) -> Mapping[str, Any] | None:
    """The evidence of a clustering that a release withheld: the algorithm's start, run again on the same clients in the clear."""
    eye = LocalFederation([federation.data(client) for client in clients], seed=federation.seed)
    evidence: Mapping[str, Any] | None = algorithm.describe(algorithm.init(eye)).get("evidence")
    return evidence


def _input(federation: LocalFederation, client: int, params: Mapping[str, Value]) -> TaskInput:
    return TaskInput(federation.data(client), params, {}, Streams(federation.seed, federation.round, client))


def _scores(results: Sequence[Mapping[str, Array]]) -> tuple[Array, Array]:
    """The share that is correct and the mean loss, NaN for a client without test data or (the loss) for tasks that tell none."""
    counts = np.array([float(result.get("count", 0.0)) for result in results])
    correct = np.array([float(result.get("correct", 0.0)) for result in results])
    loss = np.array([float(result.get("loss", np.nan)) for result in results])
    return tuple(np.where(counts > 0, one / np.maximum(counts, 1), np.nan) for one in (correct, loss))  # type: ignore[return-value]
