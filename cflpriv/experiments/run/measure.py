"""The experimenter's measurements: they use data and ground truth outside the protocol, and nothing of them reaches the transcript."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
from weakref import ref

import numpy as np

from ...algorithms.interface import Served
from ...contract.portions import PORTION_BYTES
from ...engine import Result, Streams, TaskInput
from ...engine.models import Model
from ...engine.span import in_span
from ...federation.postponed import together
from ...tasks.evaluation import Evaluate
from ...transports.hosts import Evaluated, LocalHost
from ...transports.simulation import Simulated, simulate
from ...types import Array, ClientData
from .loop import Experiment

__all__ = ["chosen", "local_results", "local_scores", "recomputed", "scores_of", "served_accuracy", "served_results"]


def served_accuracy(simulated: Simulated, served: Served, clients: Sequence[int]) -> Array:
    """The share of each client's own test data that the model it would use gets right, shape (clients,). NaN without test data."""
    return scores_of(served_results(simulated, served, clients))[0]


def served_results(simulated: Simulated, served: Served, clients: Sequence[int]) -> list[Result]:
    """What each client computes to be served, in the order of `clients`."""
    return simulated.measure(served.task, served.params, served.which, clients)


def chosen(results: Sequence[Result]) -> list[int] | None:
    """The cluster that each client chose by itself where it was served; None where clients do not choose."""
    return [int(result["choice"]) for result in results] if results and all("choice" in result for result in results) else None


def local_scores(simulated: Simulated, model: Model, clients: Sequence[int]) -> tuple[Array, Array]:
    """The same two of each client's last locally trained model (the metric of the clustering papers), each (clients,).

    A model that did not change since it was last evaluated is not evaluated again, and none is counted in the engine's paths.
    A client that has not trained yet holds the initial model, as in PACFL's authors' code, where every client's own network starts as that
    one: so a mean is over the same clients in every round. Local is what local work ended with: own and shared layers together (LG-FedAvg),
    the model before the personal step (Per-FedAvg), the shared model trained on (Ditto), the own model (FedProto). NaN for all as long as
    there is none: before the first training, and where clients send gradients (IFCA's gradient averaging).
    """
    return scores_of(local_results(simulated, model, clients) or [{}] * len(clients))


def local_results(simulated: Simulated, model: Model, clients: Sequence[int]) -> list[Result]:
    """What `Evaluate` gives for each client's last locally trained model, see `local_scores`; empty as long as there is none."""
    trained: list[bool] = simulated.each(clients, _have_trained)
    if not any(trained):
        return []
    fed = simulated.federation
    results: list[Result] = simulated.each(clients, _local_results, model, fed.seed, fed.round)
    return results


def _have_trained(host: LocalHost, clients: Sequence[int]) -> list[bool]:
    return [host.client(client).values.kept("trained") is not None for client in clients]


def _local_results(host: LocalHost, clients: Sequence[int], model: Model, seed: int, round: int) -> list[Result]:
    """What clients score with their local models, at their host."""
    initial, task, known, held = _initial(model, seed), Evaluate(model), host.evaluated, dict[int, Any]()
    for client in clients:
        kept = host.client(client).values.kept("trained")
        held[client] = initial if kept is None else kept[0]
    changed = [client for client in clients if client not in known or not known[client].is_of(task, held[client])]
    size = max(1, host.engine.workers, min(AT_ONCE, PORTION_BYTES // initial.nbytes))
    for some in (changed[at : at + size] for at in range(0, len(changed), size)):
        inputs = [
            TaskInput(
                host.members.data[client], {"model": _given(vector, host.members.data[client], model)}, {}, Streams(seed, round, client)
            )
            for client, vector in zip(some, together([held[client] for client in some]), strict=True)
        ]
        results = zip(some, host.engine.run(task, inputs, Counter()), strict=True)
        known.update({client: Evaluated(task, ref(held[client]), result) for client, result in results})
    return [known[client].result for client in clients]


def _given(vector: Any, data: ClientData, model: Model) -> Any:
    """A local model as `Evaluate` takes one: formed, unless its outputs follow from the client's samples without that."""
    return vector if in_span(vector, data, model) else np.asarray(vector)


AT_ONCE = 256
"""Local models whose vectors are in memory together, at most; few if they are large."""


@lru_cache(maxsize=4)
def _initial(model: Model, seed: int) -> Array:
    """The initial model of every algorithm's clients: one object, so that each client evaluates it once."""
    return model.init(seed)


def recomputed(run: Experiment) -> Mapping[str, Any] | None:
    """The evidence of a clustering that a release withheld: the algorithm's start, run again on the clients that trained in the clear."""
    trained = [run.simulated.data[client] for client in run.federation.clients if client not in run.newcomers]
    clear = simulate(trained, seed=run.federation.seed).federation
    evidence: Mapping[str, Any] | None = run.algorithm.describe(run.algorithm.init(clear)).get("evidence")
    return evidence


def scores_of(results: Sequence[Mapping[str, Array]]) -> tuple[Array, Array]:
    """The share that is correct, and the mean loss in nats a sample, whose exponential is the perplexity; each (clients,).

    NaN for a client without test data, and for tasks that report no such part.
    """
    counts = np.array([float(result.get("count", 0.0)) for result in results])
    correct = np.array([float(result.get("correct", np.nan)) for result in results])
    loss = np.array([float(result.get("loss", np.nan)) for result in results])
    return tuple(np.where(counts > 0, total / np.maximum(counts, 1), np.nan) for total in (correct, loss))  # type: ignore[return-value]
