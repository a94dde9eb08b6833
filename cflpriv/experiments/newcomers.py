"""New clients: which clients join late, and their accuracy after a little training of the assigned model on their own data.

That happens on the client, with nothing sent, after the federation has ended; so it is computed here, outside the protocol, for every
algorithm alike. Source: Vahidian et al. 2023, section "Generalization to newcomers" (5 epochs).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..algorithms.interface import Served
from ..engine import Result, Streams, TaskInput
from ..federation.messages import Compute
from ..tasks.evaluation import Evaluate
from ..tasks.training import Train
from ..transports.hosts import LocalHost
from ..transports.simulation import Simulated, resolved
from ..types import Array

__all__ = ["fine_tuned_results", "held_back"]


def held_back(groups: Mapping[int, int], count: int) -> tuple[int, ...]:
    """The ids of `count` clients (by id their true group) that come after training: of each group its last ones, in proportion to its size.

    In ascending order.

    A group that is only to be met after training would be another experiment, and ids may be sorted by group (mixtures, files with their
    own clients). What is left after rounding down goes to the largest remainders, so groups that are too small for it give none; among
    equals to the group with the last id. If groups of equal size alternate over the clients, if each client is its own group, or if there
    is one group, these are the last ids. Nothing is drawn: whom a seed holds back does not depend on the seed.
    """
    members: dict[int, list[int]] = {}
    for client, group in sorted(groups.items()):
        members.setdefault(group, []).append(client)
    shares = {group: divmod(count * len(ids), len(groups)) for group, ids in members.items()}
    order = sorted(members, key=lambda group: (shares[group][1], members[group][-1]), reverse=True)
    more = set(order[: count - sum(whole for whole, _ in shares.values())])
    return tuple(sorted(client for group, ids in members.items() for client in ids[len(ids) - shares[group][0] - (group in more) :]))


def fine_tuned_results(simulated: Simulated, served: Served, train: Train, clients: Sequence[int]) -> list[Result]:
    """What `Evaluate` gives for each client's model after `train` on its training data.

    What a client starts from is the model it would use: what the served task declares (`used`), else the "model" it is given.
    """
    asks = simulated.federation.asks(served.task, served.params, served.which, clients)
    fed = simulated.federation
    results: list[Result] = simulated.each(clients, _fine_tuned, asks, replace(train, on_divergence="skip"), fed.seed, fed.round)
    return results


def _fine_tuned(
    host: LocalHost, clients: Sequence[int], asks: Mapping[int, Compute], train: Train, seed: int, round: int
) -> list[Result]:  # fmt: skip
    """What clients score after `train`, at their host."""
    task_inputs = resolved(host, clients, asks)
    starts = [np.asarray(getattr(asks[client].task.task, "used", _model)(own)) for client, own in zip(clients, task_inputs, strict=True)]

    def inputs(models: Sequence[Array]) -> list[TaskInput]:
        streams = [Streams(seed, round, client) for client in clients]
        return [TaskInput(entry.data, {"model": model}, {}, own) for entry, model, own in zip(task_inputs, models, streams, strict=True)]

    trained = host.engine.run(train, inputs(starts))
    ends = [start + np.asarray(result["update"]) if result else start for start, result in zip(starts, trained, strict=True)]
    return host.engine.run(Evaluate(train.model), inputs(ends))


def _model(task_input: TaskInput) -> Array:
    return task_input.array("model")
