"""Simulated clients with and without a property, and what they would have sent: signatures or updates, as features."""

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from ...engine import Engine, Streams, TaskInput
from ...randomness import stream
from ...types import Array, ClientData
from ..adversary import AdversaryView
from ..evidence.clipped import engine_for
from ..evidence.local_training import trainings_in
from ..evidence.updates import ClientStep, local_of, public_model
from ..figures.leakage import Case, Prior
from .property_signatures import Frame, frame_of, sent_by
from .property_statements import Statement

__all__ = ["Imitation", "pretended_count", "pretended_signatures", "pretended_updates", "seconds_each", "simulated_data", "update_features"]

NAME = "property_inference"
PRETENDED, FEWEST_PRETENDED = 40, 30
"""Pretended clients for each draw of the budget, and the fewest of all."""
SECONDS = 1.5
PASSES, DOUBLES = 1.0e5, 2.0e4
"""A second trains about so many samples; a model of so many parameters takes twice as long as one of none."""


def simulated_data(statement: Statement, prior: Prior, count: int) -> tuple[list[tuple[Array, Array]], Array]:
    """Data (x, y) of `count` simulated clients from auxiliary samples, and the share of samples with the property of each, (count,).

    Sizes and numbers of labels are the real clients', who they are of is not. Samples repeat where the auxiliary data have too few.
    """
    rng = stream(prior.seed, f"{NAME}: {statement.name}")
    holds, present = statement.holds(prior.x, prior.y), np.unique(prior.y)
    real = sorted(prior.samples_per_client)
    clients, shares = [], []
    for _ in range(count):
        like = real[int(rng.integers(len(real)))]
        labels = rng.choice(present, min(prior.labels_per_client[like], len(present)), replace=False)
        inside = np.isin(prior.y, labels)
        pools = [np.flatnonzero(inside & (holds == side)) for side in (False, True)]
        size = prior.samples_per_client[like]
        many = round(float(rng.random()) * size) if len(pools[0]) and len(pools[1]) else size * bool(len(pools[1]))
        places = np.concatenate([_drawn(pool, n, rng) for pool, n in zip(pools, (size - many, many), strict=True)])
        places = rng.permutation(places)
        clients.append((prior.x[places], prior.y[places]))
        shares.append(many / size)
    return clients, np.array(shares)


def _drawn(pool: Array, count: int, rng: np.random.Generator) -> Array:
    if count <= len(pool):
        return rng.permutation(pool)[:count]
    return np.concatenate([np.tile(pool, count // len(pool)), rng.permutation(pool)[: count % len(pool)]])


@dataclass(frozen=True, eq=False)
class Imitation:
    """Features (k, f) of simulated clients, how much of the property each has (k,), and the frame of features that are of signatures."""

    features: Array
    share: Array
    frame: Frame | None = None


def pretended_signatures(view: AdversaryView, statement: Statement, prior: Prior, count: int, shape: tuple[int, ...]) -> Imitation | None:
    """What simulated clients would have let be compared; None where the public pipeline cannot be imitated as `shape` (p, d)."""
    data, share = simulated_data(statement, prior, count)
    rows, frame = sent_by(view, prior, data), frame_of(view, prior)
    return None if rows is None or frame is None or rows.shape[1:] != shape else Imitation(frame.features(rows), share, frame)


def pretended_updates(statement: Statement, prior: Prior, count: int, step: ClientStep) -> Imitation:
    """What simulated clients would have sent from the model and in the round of `step`."""
    config = prior.config
    assert config is not None  # checked by the caller
    data, share = simulated_data(statement, prior, count)
    model = public_model(prior)
    local = local_of(step, prior)
    # what every client was sent; in a client's first turn SCAFFOLD's c_i is zero
    names = {"anchor": "anchor", "control": "correction"}
    sent = {"model": step.start} | {names[name]: vector for name, vector in step.beside.items() if name in names}
    vectors = {name: vector.astype(model.init(0).dtype) for name, vector in sent.items()}
    first = 1 + max(prior.samples_per_client, default=0)  # batches of their own: in those no client's id is used again
    inputs = [
        TaskInput(local.part(ClientData(i, x, y, x[:0], y[:0])), vectors, {}, Streams(prior.seed, step.round, first + i), secret=_secret(i))
        for i, (x, y) in enumerate(data)
    ]
    done = engine_for(config, Engine()).run(local.train, inputs)
    kept = [i for i, result in enumerate(done) if result]
    return Imitation(update_features(np.stack([np.asarray(done[i]["update"], np.float64) for i in kept]), prior), share[kept])


def update_features(updates: Array, prior: Prior) -> Array:
    """Updates (m, d) as they are; where clients clip them only their direction, since the length says nothing."""
    if not prior.private:
        return updates
    return np.asarray(updates / np.maximum(np.linalg.norm(updates, axis=1, keepdims=True), 1e-12))


def _secret(client: int) -> bytes:
    """Of the noise of simulated clients nothing has to stay secret."""
    return blake2b(f"{NAME}|{client}".encode(), digest_size=32).digest()


def pretended_count(case: Case, sums: int = 1) -> int:
    """How many simulated clients the budget allows to be trained for one round, or for each of so many `sums`, at least 30."""
    return max(FEWEST_PRETENDED, min(PRETENDED * case.budget.draws, int(SECONDS / seconds_each(case) / sums)))


def seconds_each(case: Case) -> float:
    """About how long a simulated client takes to train."""
    assert case.prior.config is not None  # checked by the caller
    size = float(np.mean(list(case.prior.samples_per_client.values())))
    model = public_model(case.prior)
    first = trainings_in(case.reference).first  # of the first update that any client sends
    epochs = case.prior.config.training.epochs if first is None else first.train.epochs
    return size * epochs / PASSES * (1 + model.dimension / DOUBLES)
