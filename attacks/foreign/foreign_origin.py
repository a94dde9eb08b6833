"""Check where updates come from: from the client's own samples, or from others' data, from several clients, or at another rate.

An update is written as a sum, with weights of 0 or more, of directions: negative gradients of the mean loss along its own way
(`foreign_fit`). The gain of such a sum is its cosine with the update, less the cosine of the direction of the client's own samples. What
correct input would need to fail:

- several clients: the samples of one other client explain the updates of half of the clients better than their own alone by `MIXED`, and
  nearly (`ONE`) as well as those of all clients; or those of all explain one update better by `MIXED_ONE`, and hardly (`USUAL`) the
  updates of half. Gains count if they are more than isotropic noise of the length of all that is not explained can give. Under variance
  reduction (SCAFFOLD) all other clients together are in each update, and one gave at most .86 of what all gave;
- foreign samples: auxiliary samples with the client's labels explain the updates of half of at least `FEWEST_CLIENTS` clients better than
  the client's own by `FOREIGN` (.07 in correct audits of `benchmarks/doubtful_evidence.py`); or, with any shares of labels, by `RELABELLED`
  where own samples explain less than `POOR`, and better than all clients' samples do by `BEYOND` (no correct audit had these);
- rate: updates that own samples explain (`EXPLAINED`) are more than `LONG` times as long, or `SHORT` times, as the declared rate and
  steps make of the gradient. SGD alone is judged; clipping made updates 1/14 as long, momentum and noise up to 13 times.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from scipy.optimize import nnls

from ...types import Array
from .foreign_fit import DEVIATIONS, MOST_CLIENTS, cosine, moved, towards, towards_samples
from .foreign_states import ForeignModel
from .foreign_system import System, UpdateRecord

__all__ = ["foreign_samples", "mixed_updates", "other_rate"]

MIXED, ONE, MIXED_ONE, USUAL = 0.25, 0.9, 0.45, 0.05
FOREIGN, RELABELLED, POOR, BEYOND = 0.15, 0.4, 0.5, 0.25
FEWEST_CLIENTS = 3
EXPLAINED, LONG, SHORT = 0.5, 30.0, 1 / 300
FEWEST_OF_LABEL, MOST_LABELS = 2, 12


@dataclass(frozen=True, eq=False)
class UpdateOrigin:
    """What explains an update of one client: the cosine with the own direction, and the gains of others' data.

    `clients`: of the samples of all clients together; `another`: of one other client's; `same`: of auxiliary samples with the client's
    labels; `labels`: of auxiliary samples with any labels. `noise` is what noise alone may gain, `ratio` the length of the update in
    lengths that rate and steps declare (NaN: not known).
    """

    client: int
    own: float
    clients: float
    another: float
    same: float
    labels: float
    noise: float
    ratio: float


_ORIGINS: WeakKeyDictionary[System, list[list[UpdateOrigin]]] = WeakKeyDictionary()
"""What was found for a system, which several checks ask for."""


def _fitted(update: Array, directions: list[Array]) -> float:
    """The cosine of an update (d,) of length 1 with the nearest sum of directions."""
    lengths = [float(np.linalg.norm(direction)) for direction in directions]
    unit = [direction / length for direction, length in zip(directions, lengths, strict=True) if length > 0]
    if not unit:
        return 0.0
    weights, _ = nnls(np.stack(unit, axis=1), update)
    return cosine(update, np.stack(unit, axis=1) @ weights)


def _origins(system: System) -> list[list[UpdateOrigin]]:
    """The origins of the clients' first updates, and those of their last ones.

    The two are judged apart, so that what is wrong in the one does not look right beside the other.
    """
    if system not in _ORIGINS:
        clients, model = system.scored[:MOST_CLIENTS], system.model
        several = [client for client in clients if len(system.records[client]) > 1]
        _ORIGINS[system] = [
            [
                _origin(system, model, system.records[client][place], update, clients)
                for client in asked
                if model is not None and (update := moved(system, model, system.records[client][place])).any()
            ]
            for place, asked in ((0, clients), (-1, several))
        ]
    return _ORIGINS[system]


def _first_reason(system: System, reason: Callable[[Sequence[UpdateOrigin]], str]) -> str:
    """The first reason that the origins of first or last updates give; "" if none does."""
    return next((words for origins in _origins(system) if (words := reason(origins))), "")


def _origin(system: System, model: ForeignModel, record: UpdateRecord, update: Array, clients: list[int]) -> UpdateOrigin:
    """The origin of an update (d,)."""
    length = float(np.linalg.norm(update))
    unit, x, y = update / length, system.case.prior.x, system.case.prior.y
    own = towards(system, model, record, record.client)[0]
    others = [towards(system, model, record, client)[0] for client in clients if client != record.client]
    labels = [label for label in np.unique(y).tolist() if (y == label).sum() >= FEWEST_OF_LABEL][:MOST_LABELS]
    by_label = [towards_samples(system, model, record, x[y == label], y[y == label])[0] for label in labels]
    mine = np.isin(y, np.unique(system.case.truth.data[record.client][1]))
    explained = cosine(unit, own)
    same = cosine(unit, towards_samples(system, model, record, x[mine], y[mine])[0]) if mine.sum() >= FEWEST_OF_LABEL else explained
    left = math.sqrt(max(0.0, 1 - explained**2) / len(update))
    expected = (record.scale or math.nan) * float(np.linalg.norm(own))
    ratio = length / expected if record.settings.optimizer.lower() == "sgd" and expected > 0 else math.nan
    return UpdateOrigin(
        record.client, explained, _fitted(unit, [own, *others]) - explained,
        max((_fitted(unit, [own, other]) for other in others), default=explained) - explained, same - explained,
        _fitted(unit, [own, *by_label]) - explained, left * (math.sqrt(len(others) + len(by_label)) + DEVIATIONS), ratio,
    )  # fmt: skip


def mixed_updates(system: System) -> str:
    """Updates that contain other clients' training."""
    return _first_reason(system, _mixed)


def _mixed(origins: Sequence[UpdateOrigin]) -> str:
    if len({origin.client for origin in origins}) < FEWEST_CLIENTS:
        return ""
    gains = np.array([origin.clients if origin.clients > origin.noise else 0.0 for origin in origins])
    another = np.array([origin.another if origin.another > origin.noise else 0.0 for origin in origins])
    share = float(np.median([origin.another / max(origin.clients, 1e-9) for origin in origins]))
    usual = float(np.median([origin.clients for origin in origins]))
    if not (float(np.median(another)) > MIXED and share > ONE) and not (gains.max() > MIXED_ONE and usual < USUAL):
        return ""
    worst = origins[int(np.argmax(gains))]
    return (
        f"client {worst.client}: samples of several clients explain its update better than its own alone (cosine "
        f"{worst.own + worst.clients:.2f} against {worst.own:.2f}); record the state after local training, before any averaging, and "
        "give each client the samples that it trained on"
    )


def foreign_samples(system: System) -> str:
    """Samples that did not train the updates."""
    return _first_reason(system, _foreign)


def _foreign(origins: Sequence[UpdateOrigin]) -> str:
    if len({origin.client for origin in origins}) < FEWEST_CLIENTS:
        return ""
    same = float(np.median([origin.same if origin.same > origin.noise else 0.0 for origin in origins]))
    labels = float(np.median([origin.labels if origin.labels > origin.noise else 0.0 for origin in origins]))
    beyond = float(np.median([origin.labels - origin.clients for origin in origins]))
    own = float(np.median([origin.own for origin in origins]))
    if same < FOREIGN and (labels < RELABELLED or beyond < BEYOND or own >= POOR):
        return ""
    return (
        f"auxiliary samples explain the clients' updates better than the clients' own x and y do (cosine {own + max(same, labels):.2f} "
        f"against {own:.2f}); give the samples that each client trained on, as the model took them, and states without a factor"
    )


def other_rate(system: System) -> str:
    """Updates far longer, or far shorter, than the declared rate and steps make them."""
    return _first_reason(system, _other_rate)


def _other_rate(origins: Sequence[UpdateOrigin]) -> str:
    ratios = [origin.ratio for origin in origins if origin.own > EXPLAINED and math.isfinite(origin.ratio)]
    if not ratios or SHORT <= (middle := float(np.median(ratios))) <= LONG:
        return ""
    return (
        f"updates are {middle:.3g} times as long as the declared rate and steps make them; check lr, epochs and batch_size, and that "
        "states have no factor"
    )
