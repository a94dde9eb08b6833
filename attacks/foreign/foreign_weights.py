"""Check that each declared sample has its share in its client's update: samples that were never trained on have none.

An update is written as a sum of the gradients of the client's samples along its way (least squares). So are `TRAININGS` trainings of the
declared samples. A sample's weight in the update, in shares of the upper quartile of the client's, is compared with its mean weight in the
trainings. Its error is that of the trainings' weights and that of the part of the update that no sample explains, taken as isotropic noise,
so that private updates decide nothing. A sample lacks its share if its weight and `DEVIATIONS` errors are below `LEAST` of its mean weight.
Samples whose error could not show that are left out.

What correct input would need to fail: `SHARE` of all samples that can be judged, or `OF_CLIENT` of one client's, and `FEWEST`, lack their
share. The numbers were taken from audits of `benchmarks/doubtful_evidence.py` with seeds 303 and 304, before other seeds were run.
Not read: updates that are compressed, reduced or partly fixed (`foreign_replay.plain_replays`), and normalisation by the batch.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from ...engine.threads import one_thread
from ...randomness import stream
from ...types import Array
from .foreign_fit import moved, towards_samples
from .foreign_replay import plain_replays
from .foreign_simulation import PASSES, STEP, train_again
from .foreign_states import ForeignModel, flat
from .foreign_system import System, UpdateRecord

__all__ = ["untrained_samples"]

TRAININGS = 4
MOST_CLIENTS, MOST_SAMPLES, MOST_NUMBERS, SECONDS = 8, 64, 20_000_000, 20.0
DEVIATIONS, LEAST, UPPER = 2.0, 0.7, 0.75
FEWEST, SHARE, OF_CLIENT = 3, 0.1, 0.4


@dataclass(frozen=True)
class SampleShares:
    """How many of a client's samples can be judged, and how many of them lack their share in its update."""

    client: int
    judged: int
    lacking: int


def untrained_samples(system: System) -> str:
    """Samples that have no share in the updates of the clients that are declared to have trained on them."""
    model, spent = system.model, 0.0
    made = list[SampleShares]()
    if model is None:
        return ""
    size = sum(math.prod(shape) for shape in model.shapes.values())
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(stream(system.case.seed, "another system: shares of samples").integers(2**63)))
        for replay in plain_replays(system)[:MOST_CLIENTS]:
            record = system.records[replay.client][0]
            x, y = system.case.truth.data[replay.client]
            most = min(len(y), MOST_SAMPLES, MOST_NUMBERS // size)
            spent += TRAININGS * len(y) * record.settings.epochs / PASSES + 3 * most * STEP
            if most < FEWEST or spent > SECONDS or (model.norms and record.settings.batch_norm == "train"):
                continue
            made.append(_shares(system, model, record, x, y, most))
    lacking, judged = sum(shares.lacking for shares in made), sum(shares.judged for shares in made)
    worst = max(made, key=lambda shares: (shares.lacking >= FEWEST, shares.lacking / max(shares.judged, 1)), default=None)
    if worst is None or not (_are_many(lacking, judged, SHARE) or _are_many(worst.lacking, worst.judged, OF_CLIENT)):
        return ""
    return (
        f"client {worst.client}: {worst.lacking} of {worst.judged} samples hardly count in its update, although they do in the declared "
        "training, done again; give each client the samples that it trained on, and no others"
    )


def _are_many(lacking: int, judged: int, share: float) -> bool:
    return lacking >= FEWEST and lacking >= share * judged


def _shares(system: System, model: ForeignModel, record: UpdateRecord, x: Array, y: Array, most: int) -> SampleShares:
    names = list(model.shapes)
    rows = [moved(system, model, record)]
    rows += [flat(train_again(model, record, x, y, names), names) for _ in range(TRAININGS)]
    parts = [(x[place : place + 1], y[place : place + 1]) for place in range(most)]
    parts += [(x[most:], y[most:])] if most < len(y) else []
    slopes = np.stack([towards_samples(system, model, record, *part)[0] for part in parts])
    gram = slopes @ slopes.T
    inverse = np.linalg.inv(gram + 1e-6 * (np.trace(gram) / len(gram) + 1e-300) * np.eye(len(gram)))
    weights = inverse @ (slopes @ np.stack(rows).T)  # (samples, 1 + trainings)
    left = rows[0] - weights[:, 0] @ slopes
    error = np.sqrt(float(left @ left) / max(len(left) - len(gram), 1) * np.diag(inverse))[:most]
    seen, again = weights[:most, 0], weights[:most, 1:]
    usual, spread = again.mean(axis=1), again.std(axis=1, ddof=1)
    steady = (usual > 0) & (3 * spread < LEAST * usual)
    whole = float(np.quantile(seen[steady] / usual[steady], UPPER)) if steady.sum() >= FEWEST else 0.0
    if not (whole > 0 and np.isfinite(whole)):
        return SampleShares(record.client, 0, 0)
    bound = DEVIATIONS * np.hypot(error / whole, spread)
    judged = (usual > 0) & (bound < LEAST * usual)
    return SampleShares(record.client, int(judged.sum()), int((judged & (seen / whole + bound < LEAST * usual)).sum()))
