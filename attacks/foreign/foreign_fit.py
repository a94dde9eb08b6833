"""Check whether updates fit the samples on which clients are declared to have trained.

An update is compared with gradients of the mean loss of a client's samples, at the states before and after and half way. The gain of the
loss along the way is the product of update and mean negative gradient, so that one cosine shows direction and sign.

What correct input would need to fail, with its probability:

- direction: the loss of the client's own samples rises (`RISES`, one-sided paired t-test over samples), and the cosine is below −`AWAY` and
  below −`DEVIATIONS` deviations of the cosine of isotropic noise, 1 / √d (p < 1e-9 for private updates however noisy). An update that
  goes where other clients' updates go is excepted: variance reduction as in SCAFFOLD moves a client towards all clients' mean.
- exchange: another assignment of data to clients explains each update that changes places better than the declared one, by `GAP` in the
  mean of the cosines, and by more than isotropic noise of the length of all that no data explain can, over all assignments. Updates
  that are much less apart than gradients (`APART`) are excepted, as under variance reduction.
"""

import math
from itertools import islice

import numpy as np
import torch
from scipy import stats
from scipy.optimize import linear_sum_assignment
from torch.nn import functional

from ...engine.models import Model
from ...randomness import stream
from ...types import Array
from .foreign_labels import settled_vector
from .foreign_states import ForeignModel, vector_of
from .foreign_system import System, UpdateRecord

__all__ = ["alike", "cosine", "exchanged", "is_rounded_away", "misled", "moved", "towards", "towards_samples"]

WAY = (0.0, 0.5, 1.0)
"""Where gradients are taken between the states before and after."""
MOST_SAMPLES = 512
MOST_CLIENTS = 12
MOST_UPDATES = 48
RISES = 1e-3
AWAY = 0.05
TOGETHER = 0.5
DEVIATIONS = 6.0
GAP = 0.1
APART = 0.3


def _form(system: System, model: ForeignModel, record: UpdateRecord) -> tuple[Model, Array, Array]:
    """The model as clients trained it, and its vectors (d,) before and after."""
    if record.settings.batch_norm == "eval" or not model.norms:
        start, end = (settled_vector(system, model, record, state) for state in (record.before, record.after))
        return model.evaluated, start, end
    return model.in_training, vector_of(model.in_training, record.before), vector_of(model.in_training, record.after)


def _losses(form: Model, vector: Array, x: Array, y: Array, slopes: bool = True) -> tuple[Array, Array]:
    """Each sample's loss (n,), and the gradient (d,) of their mean, float64."""
    module = form.lent(vector.astype(np.float32))
    parameters = list(module.parameters())
    for parameter in parameters:
        parameter.requires_grad_(True)
    losses = functional.cross_entropy(module(form.inputs(x)), torch.from_numpy(y).to(parameters[0].device), reduction="none")
    if not slopes:
        return losses.detach().double().cpu().numpy(), np.zeros(0)
    made = torch.autograd.grad(losses.mean(), parameters, allow_unused=True)
    gradient = torch.cat([
        (torch.zeros_like(parameter) if slope is None else slope).reshape(-1) for parameter, slope in zip(parameters, made, strict=True)
    ])  # fmt: skip
    return losses.detach().double().cpu().numpy(), gradient.double().cpu().numpy()


def _data(system: System, client: int) -> tuple[Array, Array]:
    """A client's samples, some of them where there are many."""
    x, y = system.case.truth.data[client]
    if len(y) <= MOST_SAMPLES:
        return x, y
    kept = stream(system.case.seed, "another system: samples examined", client=client).permutation(len(y))[:MOST_SAMPLES]
    return x[kept], y[kept]


def _trained(model: ForeignModel, form: Model) -> Array:
    """Which entries of the form's vector are parameters, (d,) bool: running statistics are no part of an update."""
    return np.concatenate([np.full(math.prod(shape), name in model.shapes) for name, shape, _ in form.layout])


def cosine(u: Array, v: Array) -> float:
    """The cosine of two vectors, 0 if one is zero."""
    lengths = float(np.linalg.norm(u) * np.linalg.norm(v))
    return float(u @ v) / lengths if lengths > 0 else 0.0


def is_rounded_away(system: System, record: UpdateRecord) -> bool:
    """Whether a training at the declared rate would leave these states equal: it moves no parameter by as much as its last digit."""
    model = system.model
    if model is None or record.client not in system.case.truth.data:
        return False
    form, start, _ = _form(system, model, record)
    _, gradient = _losses(form, start, *_data(system, record.client))
    moved = (record.scale or 1.0) * gradient
    dtype = next(iter(record.after.parameters.values())).dtype
    return bool(np.isfinite(moved).all() and ((start - moved).astype(dtype) == start.astype(dtype)).all())


def towards(system: System, model: ForeignModel, record: UpdateRecord, client: int) -> tuple[Array, Array]:
    """(the negative gradient (d,) of a client's samples along an update, how much each sample's loss falls (n,))."""
    return towards_samples(system, model, record, *_data(system, client))


def towards_samples(system: System, model: ForeignModel, record: UpdateRecord, x: Array, y: Array) -> tuple[Array, Array]:
    """The same of samples x (n, *shape) with labels y (n,)."""
    form, start, end = _form(system, model, record)
    mask = _trained(model, form)
    made = [_losses(form, start + share * (end - start), x, y) for share in WAY]
    slopes = [gradient[mask] for _, gradient in made]
    return -np.mean(slopes, axis=0), made[0][0] - made[-1][0]


def moved(system: System, model: ForeignModel, record: UpdateRecord) -> Array:
    """What the parameters (d,) moved by, in the model's order."""
    form, start, end = _form(system, model, record)
    return np.asarray((end - start)[_trained(model, form)])


def misled(system: System) -> str:
    """Updates that lead away from the client's own samples."""
    model = system.model
    if model is None:
        return ""
    longest = max((len(system.records[client]) for client in system.scored), default=0)
    in_order = (
        records[number] for number in range(longest) for records in map(system.records.__getitem__, system.scored) if len(records) > number
    )
    records = list(islice(in_order, MOST_UPDATES))  # later rounds displace no client
    updates = [moved(system, model, record) for record in records]
    away = list[int]()
    for place, (record, update) in enumerate(zip(records, updates, strict=True)):
        slope, falls = towards(system, model, record, record.client)
        if cosine(update, slope) >= -max(AWAY, DEVIATIONS / math.sqrt(len(update))) or not _rises(falls):
            continue
        others = [u for other, u in zip(records, updates, strict=True) if other.client != record.client]
        together = bool(others) and cosine(update, np.mean(others, axis=0)) > TOGETHER
        if not together or _is_common(system, model, records, updates):
            away.append(place)
    if not away:
        return ""
    clients = ", ".join(map(str, dict.fromkeys(records[place].client for place in away)))
    return (
        f"client(s) {clients}: the loss on x, y is higher at the state after than before, and the update leads away from these samples; "
        "are before and after exchanged, or x and y those of another client?"
    )


def _rises(falls: Array) -> bool:
    """Whether losses rise over samples (n,) that fall by so much."""
    if len(falls) < 3 or float(falls.std()) == 0:
        return bool(len(falls)) and float(falls.max()) < 0
    return bool(stats.ttest_1samp(falls, 0.0, alternative="less").pvalue < RISES) or float(falls.max()) < 0


def _is_common(system: System, model: ForeignModel, records: list[UpdateRecord], updates: list[Array]) -> bool:
    """Whether even the mean update leads away from all clients' samples."""
    slopes = [towards(system, model, record, record.client)[0] for record in records[:MOST_CLIENTS]]
    mean = np.mean(updates[:MOST_CLIENTS], axis=0)
    return cosine(mean, np.mean(slopes, axis=0)) < -max(AWAY, DEVIATIONS / math.sqrt(len(mean)))


def exchanged(system: System) -> str:
    """Updates that fit other clients' samples better than those that are declared."""
    model, clients = system.model, system.scored[:MOST_CLIENTS]
    if model is None or len(clients) < 2:
        return ""
    m = len(clients)
    fit, left = np.zeros((m, m)), np.zeros(m)
    updates, slopes = list[Array](), list[Array]()
    for place, client in enumerate(clients):
        record = system.records[client][0]
        update = moved(system, model, record)
        length = float(np.linalg.norm(update))
        if length == 0:
            continue
        rows = np.stack([towards(system, model, record, other)[0] for other in clients])
        fit[place] = [cosine(update, row) for row in rows]
        updates.append(update)
        slopes.append(rows[place])
        explained = np.linalg.lstsq(rows.T, update, rcond=None)[0] @ rows
        left[place] = float(np.linalg.norm(update - explained)) / length / math.sqrt(len(update))
    best = linear_sum_assignment(-fit)[1]
    changed = np.flatnonzero(best != np.arange(m))
    if not len(changed) or 1 - alike(updates) < APART * (1 - alike(slopes)):
        return ""
    gaps = fit[changed, best[changed]] - fit[changed, changed]
    gap = float(gaps.sum())
    # the sum of 2 c cosines of noise, over all assignments that change c of m places, and over all c
    assignments = math.lgamma(m + 1) - math.lgamma(m - len(changed) + 1) + math.log(m)
    noise = float(np.sqrt(2 * np.square(left[changed]).sum())) * (math.sqrt(2 * assignments) + DEVIATIONS)
    if gap / len(changed) < GAP or gap <= noise or gaps.min() <= 0:
        return ""
    pairs = ", ".join(f"client {clients[place]} those of client {clients[best[place]]}" for place in changed[:4])
    return f"the updates fit other clients' samples better than the client's own: {pairs}; give each client's x and y with its own states"


def alike(rows: list[Array]) -> float:
    """The mean cosine of two of these vectors."""
    n = len(rows)
    if n < 2:
        return 1.0
    unit = [row / max(float(np.linalg.norm(row)), 1e-300) for row in rows]
    return float((np.square(np.linalg.norm(np.sum(unit, axis=0))) - n) / (n * (n - 1)))
