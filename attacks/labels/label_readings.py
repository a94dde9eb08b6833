"""Label shares from the updates of a head's bias: how a single update, or a mean of several, is read.

Source: the gradient of softmax cross-entropy by the head's bias is the mean predicted probability less the share of each label (Zhao et al.
2020, iDLG, for one sample; Wainakh et al. 2022 for batches). Local SGD adds up such gradients, so an update's bias part divided by rate and
steps is q − p̄ with q the label shares; p̄ comes from auxiliary data on the way from the model sent to the model that came back.

Steps and rates are those of the task that was asked (`local_training`). Weight decay is outside what is modelled. Momentum is inside, and
so are clipping and Poisson batches of `[privacy]`, which are public: the attacker clips its own samples' gradients alike. What is not
linear in gradients (Adam), and heads without a bias, are read by comparison with clients of the attacker's own (`simulated_shares`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from scipy.optimize import nnls

from ...engine.models import Model
from ...errors import InputError
from ...randomness import stream
from ...types import Array
from ..evidence.clipped import clipped_probabilities
from ..evidence.coalition import weights_of
from ..evidence.local_training import LocalTraining
from ..evidence.noisy_shares import Readings
from ..evidence.simulated_shares import LinearReading, clients_by_simulation, linear_reading, response_of, shares_by_simulation
from ..evidence.updates import ClientStep, local_of, public_model
from ..figures.leakage import Prior

__all__ = [
    "Reader", "auxiliary_shares", "bias_span", "class_probabilities", "counts_from_bias", "is_learned", "is_read_better", "is_summed",
    "labels_from_bias", "reader_of", "readings_of", "shares_of", "steps_scale", "top_labels", "trained_reader",
]  # fmt: skip

PATH = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Where on the way from the model sent to the model returned p̄ is taken."""
CLIPPED_PATH = (0.5,)
"""The same where gradients are clipped: single samples' gradients cost more."""
PREDICTED = 5
"""Of so many rounds, evenly spaced, predictions are taken where all rounds are one system: they change slowly and cost the most."""
TRIED = 4
"""One of so many own clients is kept to try readers on."""
ONE_STEP = (0.0,)
"""The same for a single step, whose gradient is taken at the model sent."""


# --- the mathematics, for updates and gradients from anywhere -----------------------------------------------------------------------


def labels_from_bias(bias_update: Array, probabilities: Array, scale: float) -> Array:
    """Label shares q (classes,) from the update of a head's bias (classes,) by SGD on softmax cross-entropy.

    `probabilities[c]` (classes,) is what the model predicts on average for samples of label c; `scale` is learning rate × steps. Solves
    update / scale = q − Σ_c q_c probabilities[c] for shares: q ≥ 0, Σ q = 1, by least squares.
    """
    shares, _ = nnls(shares_system(probabilities), np.append(np.asarray(bias_update, np.float64) / scale, 10.0))
    return np.asarray(shares / max(float(shares.sum()), 1e-12))


def shares_system(probabilities: Array) -> Array:
    """The equations (classes + 1, classes) for shares: one a class, and the last that they add up to 1."""
    classes = len(probabilities)
    return np.vstack([np.eye(classes) - np.asarray(probabilities, np.float64).T, 10.0 * np.ones((1, classes))])


def counts_from_bias(bias_gradient: Array, probabilities: Array, labels: int) -> Array:
    """Label shares q (classes,) from a bias gradient of unknown scale s > 0: s·(Σ_c q_c probabilities[c] − q), `labels` classes present.

    The scale is that at which the classes − `labels` smallest shares are zero. With all labels present this does not determine it; then the
    scale that makes the smallest share zero is taken, which overstates differences between shares.
    """
    classes = len(bias_gradient)
    system = np.asarray(probabilities, np.float64).T - np.eye(classes)
    w = np.linalg.lstsq(system, np.asarray(bias_gradient, np.float64), rcond=None)[0]
    v = np.linalg.svd(system)[2][-1]  # the stationary shares: what a zero gradient means
    v = v / v.sum()
    # q = v + z·u with z = 1/s; a class that is absent has v_c + z u_c = 0
    u = w - v * w.sum()
    absent = np.argsort(u / v)[: max(1, classes - labels)]
    z = max(0.0, -float(v[absent] @ u[absent]) / max(float(u[absent] @ u[absent]), 1e-300))
    q = v + z * u
    q[absent] = 0.0
    q = np.maximum(q, 0.0)
    return np.asarray(q / max(float(q.sum()), 1e-12))


def top_labels(shares: Array, labels: int) -> frozenset[int]:
    """The `labels` labels of largest share."""
    return frozenset(int(label) for label in np.argsort(-shares, kind="stable")[:labels])


def class_probabilities(model: Model, vector: Array, x: Array, y: Array) -> Array:
    """What a model predicts on average for samples of each label, (classes, classes); uniform for labels without samples."""
    module = model.lent(vector.astype(np.float32 if model.dtype == "float32" else np.float64))
    with torch.no_grad():
        predicted = torch.softmax(module(model.inputs(x)), dim=1).double().cpu().numpy()
    uniform = np.full(model.classes, 1 / model.classes)
    return np.stack([predicted[y == label].mean(axis=0) if (y == label).any() else uniform for label in range(model.classes)])


# --- reading updates ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Reader:
    """`read` turns the movement of a head's bias (classes,), or of a part (size,), over its scale, into label shares (classes,).

    `deviation` is how far an error of the movement moves the shares, root mean square. `is_scaled`: the scale is known, else it is 1.
    `span`: the part of a model whose movement is read, if not the head's bias alone.
    """

    read: Callable[[Array], Array]
    deviation: float = 1.0
    is_scaled: bool = False
    span: slice | None = None


def shares_of(step: ClientStep, prior: Prior, model: Model, labels: int, sums: int = 1) -> Array:
    """Label shares (classes,) of those who made one update, in `sums` rounds. `labels` they have matters where its scale is unknown."""
    reader = reader_of(step, prior, model, labels, sums)
    return reader.read(step.update[reader.span or bias_span(model)] / (_scale(step, prior, sums) if reader.is_scaled else 1.0))


def is_learned(local: LocalTraining) -> bool:
    """Whether updates of a training are read by comparison with simulated clients: no formula reads label shares off them."""
    return local.train.optimizer != "sgd" or bias_span(local.train.model) is None


def reader_of(step: ClientStep, prior: Prior, model: Model, labels: int, sums: int = 1) -> Reader:
    """What reads an update like that of a step, the update of so many `sums`; `labels` as in `shares_of`.

    Label shares that come beside an update are not inferred.
    """
    if (stated := step.stated) is not None:
        return Reader(lambda moved: stated)
    assert prior.config is not None  # checked by the caller
    bias, privacy, local = bias_span(model), prior.config.privacy, local_of(step, prior)
    if is_learned(local):
        anchor, members = step.beside.get("anchor"), _members(step, prior)
        towards = None if anchor is None else anchor.tobytes()
        read = _reader(prior, step.start.tobytes(), local, towards, len(members) > 1)
        named = labels if len(members) == 1 else model.classes
        return Reader(lambda update: read(update / sums, named), span=slice(0, model.dimension))
    probabilities = _predictions(step, prior, model, sums)
    known = np.zeros(model.classes) if step.known is None else step.known[bias]
    unscaled = privacy.unit == "client" or (local.gradient and len(step.members) != 1)  # of unknown length: clipped, or scaled by the share
    if unscaled or _is_short(step, prior, model, labels, sums):
        return Reader(lambda moved: counts_from_bias(known - moved, probabilities, labels))
    drift = known / _scale(step, prior, sums)
    inverse = np.linalg.pinv(shares_system(probabilities))[:, : model.classes]
    deviation = float(np.linalg.norm(inverse) / np.sqrt(model.classes))
    return Reader(lambda moved: labels_from_bias(moved - drift, probabilities, 1.0), deviation, True)


def _is_short(step: ClientStep, prior: Prior, model: Model, labels: int, sums: int) -> bool:
    """Whether a client's update is read by the labels that it lacks, not by rate × steps.

    After several steps on few samples gradients are smaller than predictions on other samples say, so that an update ends short of its
    scale.
    """
    assert prior.config is not None  # checked by the caller
    alone = len(step.members) == 1 and sums == 1 and prior.config.privacy.unit == "none"
    return alone and labels < model.classes and local_of(step, prior).steps(prior.samples_per_client[step.members[0]]) > 1


def trained_reader(step: ClientStep, prior: Prior, model: Model, count: int) -> Reader | None:
    """What reads a mean over unlike clients: by how `count` clients of the attacker's own would have moved, one by one.

    Each client trains away from the others, towards its own labels. So the mean of updates is not what the mean model's predictions say
    (`reader_of`), the less the more steps there are. The whole head is read, weighted by the noise of simulated clients.

    None for updates of one client or of one step, for those of unknown length, and where simulated clients diverge.
    """
    wanted = _own_clients_of(step, prior, model, count)
    reading = None if wanted is None else _trained(*wanted)
    if reading is None:
        return None
    unit = local_of(step, prior).carried(_usual(step, prior.samples_per_client))
    return Reader(lambda moved: reading.shares(unit * moved), reading.deviation, True, head_span(model))


def is_read_better(step: ClientStep, prior: Prior, model: Model, count: int) -> bool:
    """Whether `trained_reader` errs less than `reader_of`, in means over own clients that it was not made from.

    A response is learned from the clients that have a label, so that of many labels it is noise.
    """
    wanted, formula = _own_clients_of(step, prior, model, count), reader_of(step, prior, model, model.classes)
    seen = None if wanted is None else _own_clients(*wanted)
    if seen is None or not formula.is_scaled:
        return seen is not None
    moved, shares = seen
    kept = len(moved) - len(moved) // TRIED
    left = len(moved) - kept
    if left < 1:
        return True
    reading = linear_reading(*response_of(moved[:kept], shares[:kept]))
    unit = local_of(step, prior).carried(_usual(step, prior.samples_per_client))
    known = np.zeros(model.classes) if step.known is None else step.known[bias_span(model)]
    size = max(1, min(len(_members(step, prior)), left // 2))
    errors = np.zeros(2)
    for begin in range(kept, len(moved) - size + 1, size):
        mean, truth = moved[begin : begin + size].mean(axis=0), shares[begin : begin + size].mean(axis=0)
        by_formula = formula.read((mean[-model.classes :] + known) / unit)
        errors += [np.abs(reading.shares(mean) - truth).sum(), np.abs(by_formula - truth).sum()]
    return bool(errors[0] <= errors[1])


def _usual(step: ClientStep, counts: Mapping[int, int]) -> int:
    """The median of the members' `counts`."""
    return round(float(np.median([counts[member] for member in step.members])))


Wanted = tuple[Prior, bytes, int, LocalTraining, int, int, int]
"""The prior, the model, the round, the training, numbers of samples and labels of own clients, and how many there are."""


def _own_clients_of(step: ClientStep, prior: Prior, model: Model, count: int) -> Wanted | None:
    """The `count` own clients that a step is compared with; None as `trained_reader`."""
    local, samples = local_of(step, prior), _usual(step, prior.samples_per_client)
    if len(step.members) == 1 or local.gradient or prior.private or local.steps(samples) == 1 or head_span(model) is None:
        return None
    start = np.asarray(step.start, np.float64).tobytes()
    return prior, start, step.round, local, local.samples(samples), _usual(step, prior.labels_per_client), count


def _members(step: ClientStep, prior: Prior) -> tuple[int, ...]:
    """Who made a step's update; all clients where that is not known."""
    return step.members or tuple(prior.samples_per_client)


def _moved(step: ClientStep, model: Model) -> Array:
    """The update of the head's bias (classes,) less what of it does not depend on data."""
    return (step.update if step.known is None else step.update - step.known)[bias_span(model)]


def _predictions(step: ClientStep, prior: Prior, model: Model, sums: int = 1) -> Array:
    """What the model predicts for samples of each label (classes, classes), on the way of one step's training; clipped as clients clip."""
    assert prior.config is not None  # checked by the caller
    sampled, clip_norm = prior.config.privacy.unit == "sample", prior.config.privacy.clip_norm
    local = local_of(step, prior)
    once = sums == 1 and max(local.steps(prior.samples_per_client[member]) for member in _members(step, prior)) == 1
    path = [step.start + share * step.update for share in (ONE_STEP if once else CLIPPED_PATH if sampled else PATH)]
    if sampled:
        return np.asarray(np.mean([clipped_probabilities(model, at, prior.x, prior.y, clip_norm) for at in path], axis=0))
    return np.asarray(np.mean([class_probabilities(model, at, prior.x, prior.y) for at in path], axis=0))


def _scale(step: ClientStep, prior: Prior, sums: int = 1) -> float:
    """How far a constant unit gradient would have carried the weighted mean of those who made the update."""
    weights, local = weights_of(prior, _members(step, prior)), local_of(step, prior)
    return sums * float(np.average([steps_scale(prior, member, local) for member in weights], weights=list(weights.values())))


def is_summed(prior: Prior) -> bool:
    """Whether updates have noise of their own in every round and are linear in label shares, so that all rounds are one system."""
    assert prior.config is not None  # checked by the caller
    is_sgd = prior.config.training.optimizer == "sgd"
    return prior.config.privacy.unit == "sample" and is_sgd and bias_span(public_model(prior)) is not None


def readings_of(
    steps: Sequence[ClientStep], prior: Prior, model: Model, sums: Sequence[int] = (), made: dict[int, Array] | None = None
) -> Readings:
    """What all `steps` of a client, or cluster, say of its label shares; each is the update of so many `sums` (one, if none are given).

    `made` keeps predictions for other clients that share a mean update.
    """
    counts, made = list(sums) or [1] * len(steps), {} if made is None else made
    scales = [_scale(step, prior, count) for step, count in zip(steps, counts, strict=True)]
    rows = np.stack([_moved(step, model) / scale for step, scale in zip(steps, scales, strict=True)])
    silent = np.stack([_silent(step, model) / scale for step, scale in zip(steps, scales, strict=True)])
    some = np.unique(np.linspace(0, len(steps) - 1, min(PREDICTED, len(steps))).round().astype(int))
    for i in some:
        if id(steps[i].update) not in made:
            made[id(steps[i].update)] = _predictions(steps[i], prior, model, counts[i])
    probabilities = np.mean([made[id(steps[i].update)] for i in some], axis=0)
    return Readings(rows, np.array([max(1, len(step.members)) for step in steps]), np.eye(model.classes) - probabilities.T, silent)


def _silent(step: ClientStep, model: Model) -> Array:
    """The head's update summed over classes, (1 + inputs,), over √classes: gradients add up to 0 there, so that all there is is noise."""
    update, (_, shape, offset) = step.update if step.known is None else step.update - step.known, model.layout[-2]
    sums = [update[bias_span(model)].sum(keepdims=True)]
    if len(shape) == 2 and shape[0] == model.classes:
        sums.append(update[offset : offset + int(np.prod(shape))].reshape(shape).sum(axis=0))
    return np.asarray(np.concatenate(sums) / np.sqrt(model.classes))


@lru_cache(maxsize=32)
def _reader(
    prior: Prior, start: bytes, local: LocalTraining, anchor: bytes | None = None, is_mean: bool = False
) -> Callable[[Array, int], Array]:  # fmt: skip
    """What turns updates (d,) from one model into label shares by comparison: the same for all clients that were sent it."""
    assert prior.config is not None  # checked by the caller
    counts = prior.samples_per_client
    people = [(local.samples(counts[client]), prior.labels_per_client[client]) for client in sorted(counts)]
    rng = stream(prior.seed, "simulated clients, learned")
    mixed = [people[i] for i in rng.permutation(len(people))]
    return shares_by_simulation(
        replace(local.train, on_divergence="skip"), np.frombuffer(start), prior.x, prior.y, mixed,
        rng, None if anchor is None else np.frombuffer(anchor), is_mean=is_mean, directions=prior.config.privacy.unit == "client",
    )  # fmt: skip


@lru_cache(maxsize=256)
def _trained(*wanted: *Wanted) -> LinearReading | None:
    """How the head's movement is read by comparison with own clients: the same for all adversaries on a run."""
    seen = _own_clients(*wanted)
    return None if seen is None else linear_reading(*response_of(*seen))


@lru_cache(maxsize=8)
def _own_clients(
    prior: Prior, start: bytes, number: int, local: LocalTraining, samples: int, labels: int, count: int
) -> tuple[Array, Array] | None:  # fmt: skip
    """How own clients move the head in round `number` (m, size), and their label shares (m, classes); None where none ends finite."""
    span = head_span(local.train.model)
    assert span is not None  # checked by the caller
    train, key = replace(local.train, on_divergence="skip"), stream(prior.seed, "simulated clients of sums", number)
    try:
        return clients_by_simulation(train, np.frombuffer(start), prior.x, prior.y, samples, labels, span, key, count)
    except InputError:
        return None


def auxiliary_shares(prior: Prior) -> Array:
    """The label shares (classes,) of the auxiliary data: what the prior alone says of any client."""
    return np.asarray(np.bincount(prior.y, minlength=prior.classes) / len(prior.y))


def head_span(model: Model) -> slice | None:
    """Where the head lies in the parameter vector, weights and bias; its bias alone where the weights are not before it, None without."""
    bias = bias_span(model)
    if bias is None or len(model.layout) < 2:
        return bias
    _, shape, offset = model.layout[-2]
    whole = len(shape) == 2 and shape[0] == model.classes and offset + int(np.prod(shape)) == bias.start
    return slice(offset, bias.stop) if whole else bias


def bias_span(model: Model) -> slice | None:
    """Where the head's bias lies in the parameter vector; None if the last layer has none."""
    name, shape, offset = model.layout[-1]
    return slice(offset, offset + model.classes) if name.endswith("bias") and shape == (model.classes,) else None


def steps_scale(prior: Prior, client: int, local: LocalTraining) -> float:
    """How far a constant unit gradient would carry a client's parameters in one round of `local`, as clients of the run clip."""
    assert prior.config is not None  # checked by the caller
    count, privacy = prior.samples_per_client[client], prior.config.privacy
    # Poisson batches' sums are divided by the public number of samples
    share = local.samples(count) / privacy.samples if privacy.unit == "sample" else 1.0
    return local.carried(count) * share
