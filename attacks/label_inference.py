"""Label inference: which labels a client has, and how many of each, from its updates.

Source: the gradient of softmax cross-entropy by the head's bias is the mean predicted probability less the share of each label (Zhao et al.
2020, iDLG, for one sample; Wainakh et al. 2022 for batches). Local SGD adds up such gradients, so an update's bias part divided by rate and
steps is q − p̄ with q the label shares; p̄ comes from auxiliary data on the way from the model sent to the model that came back.

What it proves: an update in the clear shows a client's labels, and the mean update of a cluster, which two models of it tell, shows those
of the cluster as a whole (`aggregate_histogram_l1`: one figure a cluster, nothing about a member; also where it is hidden who is in it),
hence of its members where these are alike. What it does not: nothing about single samples; with unknown numbers of samples or another
loss the shares are off, the label sets less so. Steps and rates are those of the task that was asked (`local_training`). Weight decay and
heads without a bias are outside what is modelled. Momentum is inside, and so are clipping and Poisson batches of `[privacy]`, which are
public: the attacker clips its own samples' gradients alike. Where each round has noise of its own (unit = "sample") all rounds of the view
are one system of equations, solved once around the auxiliary shares (`noisy_shares`). Adam is not linear in gradients: its updates are read
by comparison with clients of the attacker's own (`simulated_shares`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import is_

import numpy as np
import torch
from scipy.optimize import nnls

from ..engine.models import Model
from ..randomness import stream
from ..types import Array
from .adversary import AdversaryView
from .class_owners import cells as owner_cells
from .class_owners import owned_in
from .clipped import clipped_probabilities
from .leakage import Case, Cell, Prior, Truth, cell, nothing, popular_set
from .local_training import LocalTraining, trainings_in
from .noisy_shares import Readings, shares_under_noise
from .simulated_shares import shares_by_simulation
from .sums import CohortSum, means_in, sizes_in, sums_in
from .updates import Step, less_known, local_of, public_model, steps_in, updates_in

__all__ = ["cells", "class_probabilities", "counts_from_bias", "labels_from_bias", "top_labels"]

NAME = "label_inference"
AGGREGATE = "aggregate_histogram_l1"
MARGIN = {"label_set_accuracy": 0.1, "histogram_l1": 0.1, AGGREGATE: 0.1}
PATH = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Where on the way from the model sent to the model returned p̄ is taken."""
CLIPPED_PATH = (0.5,)
"""The same where gradients are clipped: single samples' gradients cost more."""
PREDICTED = 5
"""Of so many rounds, evenly spaced, predictions are taken where all rounds are one system: they change slowly and cost the most."""
ONE_STEP = (0.0,)
"""The same for a single step, whose gradient is taken at the model sent."""


# --- the mathematics, for updates and gradients from anywhere -----------------------------------------------------------------------


def labels_from_bias(bias_update: Array, probabilities: Array, scale: float) -> Array:
    """Label shares q (classes,) from the update of a head's bias (classes,) by SGD on softmax cross-entropy.

    `probabilities[c]` (classes,) is what the model predicts on average for samples of label c; `scale` is learning rate × steps. Solves
    update / scale = q − Σ_c q_c probabilities[c] for shares: q ≥ 0, Σ q = 1, by least squares.
    """
    classes = len(bias_update)
    system = np.vstack([np.eye(classes) - np.asarray(probabilities, np.float64).T, 10.0 * np.ones((1, classes))])
    shares, _ = nnls(system, np.append(np.asarray(bias_update, np.float64) / scale, 10.0))
    return np.asarray(shares / max(float(shares.sum()), 1e-12))


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
    module = model.load(vector.astype(np.float32 if model.dtype == "float32" else np.float64))
    with torch.no_grad():
        predicted = torch.softmax(module(model.inputs(x)), dim=1).double().numpy()
    uniform = np.full(model.classes, 1 / model.classes)
    return np.stack([predicted[y == label].mean(axis=0) if (y == label).any() else uniform for label in range(model.classes)])


# --- the attack ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Guess:
    """Label shares (classes,) by client."""

    shares: Mapping[int, Array] = field(default_factory=dict)


def guess(view: AdversaryView | None, prior: Prior, clients: Sequence[int], model: Model, rounds: int) -> Guess:
    """Label shares from the first `rounds` steps of each client, or from all of them where they have noise (`is_summed`).

    Without a view: the shares of the auxiliary data, for everyone.
    """
    return _guess(None if view is None else steps_in(view, model.dimension), prior, clients, model, rounds)


def _guess(steps: Mapping[int, Sequence[Step]] | None, prior: Prior, clients: Sequence[int], model: Model, rounds: int) -> Guess:
    if steps is None:
        return Guess(dict.fromkeys(clients, auxiliary_shares(prior)))
    if is_summed(prior):
        return _summed({client: less_known(steps[client], prior, model) for client in clients}, prior, model)
    made: dict[int, Array] = {}  # what a mean update says is the same for a whole cluster
    shares = {}
    for client in clients:
        estimates = []
        for step in less_known(steps[client], prior, model)[:rounds]:
            alike = prior.labels_per_client[client]
            if len(step.members) == 1 or id(step.update) not in made:
                made[id(step.update)] = shares_of(step, prior, model, alike)
            estimates.append(made[id(step.update)])
        shares[client] = np.mean(estimates, axis=0) if estimates else auxiliary_shares(prior)
    return Guess(shares)


def _summed(steps: Mapping[int, Sequence[Step]], prior: Prior, model: Model) -> Guess:
    """From all rounds at once, where updates have noise."""
    made: dict[tuple[int, ...], Readings] = {}  # what mean updates say is the same for all who were in the same ones
    predicted: dict[int, Array] = {}
    readings = {}
    for client, several in steps.items():
        if several:
            same = tuple(id(step.update) for step in several)
            if same not in made:
                made[same] = readings_of(several, prior, model, made=predicted)
            readings[client] = made[same]
    found = shares_under_noise(readings, auxiliary_shares(prior)) if readings else {}
    return Guess({client: found.get(client, auxiliary_shares(prior)) for client in steps})


def shares_of(step: Step, prior: Prior, model: Model, labels: int, sums: int = 1) -> Array:
    """Label shares (classes,) of those who made one update, in `sums` rounds. `labels` they have matters where its scale is unknown."""
    assert prior.config is not None  # checked by the caller
    bias, privacy, local = bias_span(model), prior.config.privacy, local_of(step, prior)
    if local.train.optimizer == "adam":
        anchor, members = step.beside.get("anchor"), _members(step, prior)
        samples = float(np.median([prior.samples_per_client[member] for member in members]))
        nearly = round(2 ** (round(4 * np.log2(samples)) / 4))  # to 9 %: one reader serves clients of about the same size
        towards = None if anchor is None else anchor.tobytes()
        return _reader(prior, step.start.tobytes(), local, nearly, labels, towards)(step.update[bias] / sums)
    moved, probabilities = _moved(step, model), _predictions(step, prior, model, sums)
    if privacy.unit == "client" or (local.gradient and len(step.members) != 1):  # of unknown length: clipped, or scaled by the share
        return counts_from_bias(-moved, probabilities, labels)
    return labels_from_bias(moved, probabilities, _scale(step, prior, sums))


def _members(step: Step, prior: Prior) -> tuple[int, ...]:
    """Who made a step's update; all clients where that is not known."""
    return step.members or tuple(prior.samples_per_client)


def _moved(step: Step, model: Model) -> Array:
    """The update of the head's bias (classes,) less what of it does not depend on data."""
    return (step.update if step.known is None else step.update - step.known)[bias_span(model)]


def _predictions(step: Step, prior: Prior, model: Model, sums: int = 1) -> Array:
    """What the model predicts for samples of each label (classes, classes), on the way of one step's training; clipped as clients clip."""
    assert prior.config is not None  # checked by the caller
    sampled, clip_norm = prior.config.privacy.unit == "sample", prior.config.privacy.clip_norm
    local = local_of(step, prior)
    once = sums == 1 and max(local.steps(prior.samples_per_client[one]) for one in _members(step, prior)) == 1
    path = [step.start + share * step.update for share in (ONE_STEP if once else CLIPPED_PATH if sampled else PATH)]
    if sampled:
        return np.asarray(np.mean([clipped_probabilities(model, at, prior.x, prior.y, clip_norm) for at in path], axis=0))
    return np.asarray(np.mean([class_probabilities(model, at, prior.x, prior.y) for at in path], axis=0))


def _scale(step: Step, prior: Prior, sums: int = 1) -> float:
    """How far a constant unit gradient would have carried the mean of those who made the update."""
    return sums * float(np.mean([steps_scale(prior, one, local_of(step, prior)) for one in _members(step, prior)]))


def is_summed(prior: Prior) -> bool:
    """Whether updates have noise of their own in every round and are linear in label shares, so that all rounds are one system."""
    assert prior.config is not None  # checked by the caller
    return prior.config.privacy.unit == "sample" and prior.config.training.optimizer != "adam"


def readings_of(
    steps: Sequence[Step], prior: Prior, model: Model, sums: Sequence[int] = (), made: dict[int, Array] | None = None
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


def _silent(step: Step, model: Model) -> Array:
    """The head's update summed over classes, (1 + inputs,), over √classes: gradients add up to 0 there, so that all there is is noise."""
    update, (_, shape, offset) = step.update if step.known is None else step.update - step.known, model.layout[-2]
    sums = [update[bias_span(model)].sum(keepdims=True)]
    if len(shape) == 2 and shape[0] == model.classes:
        sums.append(update[offset : offset + int(np.prod(shape))].reshape(shape).sum(axis=0))
    return np.asarray(np.concatenate(sums) / np.sqrt(model.classes))


@lru_cache(maxsize=32)
def _reader(
    prior: Prior, start: bytes, local: LocalTraining, samples: int, labels: int, anchor: bytes | None = None
) -> Callable[[Array], Array]:
    """What turns bias updates from one model into label shares, under Adam: the same for all clients that were sent it."""
    assert prior.config is not None  # checked by the caller
    span = bias_span(local.train.model)
    assert span is not None  # checked by the caller
    return shares_by_simulation(
        replace(local.train, on_divergence="skip"), np.frombuffer(start), prior.x, prior.y, local.samples(samples), labels, span,
        stream(prior.seed, "simulated clients, Adam"), directions=prior.config.privacy.unit == "client",
        anchor=None if anchor is None else np.frombuffer(anchor),
    )  # fmt: skip


def auxiliary_shares(prior: Prior) -> Array:
    """The label shares (classes,) of the auxiliary data: what the prior alone says of any client."""
    return np.asarray(np.bincount(prior.y, minlength=prior.classes) / len(prior.y))


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


def score_sets(guess: Guess, truth: Truth, prior: Prior, clients: Sequence[int]) -> Array:
    """1 where the labels of largest share are a client's label set."""
    sizes = prior.labels_per_client
    return np.array([float(top_labels(guess.shares[c], sizes[c]) == truth.label_sets[c]) for c in clients])


def score_l1(guess: Guess, truth: Truth, clients: Sequence[int]) -> Array:
    """Σ |q̂ − q| by client, at most 2."""
    return np.array([float(np.abs(guess.shares[c] - truth.histogram(c)).sum()) for c in clients])


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """Label sets and histograms from updates, or from the mean updates of clusters where only these can be seen."""
    prior = case.prior
    if owned_in(case.reference):
        return owner_cells(case, NAME), None
    model = None if prior.config is None else public_model(prior)
    if model is None or bias_span(model) is None:
        return [nothing(case, NAME, "histogram_l1", "not attempted: the model's head has no bias to read")], None
    mine = steps_in(case.view, model.dimension, case)
    theirs = mine if _same(case.view, case.reference) else steps_in(case.reference, model.dimension, case)
    whole = aggregate_cell(case, model)
    known = sorted((set(mine) & set(theirs)) - set(case.view.coalition))
    clients = [client for client in known if less_known(mine[client], prior, model)]
    if not clients:
        why = "no single update, and no mean update of a cluster whose members are known, can be read in this view"
        if any(row.shape != (model.dimension,) for row in updates_in(case.view, model.dimension).values()):
            why = "not attempted: updates are in this view, but of a part of the model only; that part may well show labels"
        if known:
            why = "not attempted: updates are in this view, but not the turns before them, from which clients' corrections follow"
        return [nothing(case, NAME, "histogram_l1", why), whole], None
    apart = all(len(step.members) == 1 for client in clients for step in mine[client])
    source = "from single updates" if apart else "from the mean update of the client's cluster: all members get one guess"
    trainings = trainings_in(case.view)
    source += "" if apart else trainings.not_modelled()
    if any(one.train.optimizer == "adam" for one in trainings.all):
        source += ", by regression on the attacker's own clients, since Adam is not linear in gradients"
    rounds = case.budget.rounds
    guesses = [_guess(steps, prior, clients, model, rounds) for steps in (mine, None)]
    guesses.append(guesses[0] if theirs is mine else _guess(theirs, prior.unprotected(), clients, model, rounds))
    figures, arrays = label_cells(case, NAME, clients, guesses, f"{source}, {_which_rounds(prior, rounds)}; {prior.description}")
    return [*figures, whole], arrays


def _which_rounds(prior: Prior, rounds: int) -> str:
    """Which rounds are attacked, for a note."""
    return "all rounds as one system of equations, with its noise" if is_summed(prior) else f"the first {rounds} round(s)"


# --- clusters as a whole ------------------------------------------------------------------------------------------------------------


def aggregate_cell(case: Case, model: Model) -> Cell:
    """The label histogram of each cluster as a whole, from the successive models it was sent."""
    prior = case.prior
    scored = [_aggregated(case, view, model) for view in (case.view, case.reference)]
    errors = [np.array([float(np.abs(shares - truth).sum()) for shares, truth in found]) for found in scored]
    if not len(errors[0]) or not len(errors[1]):
        return nothing(case, NAME, AGGREGATE, "no two models of one cluster can be read in this view, or it is unknown who trained them")
    blanks = [np.array([float(np.abs(auxiliary_shares(prior) - truth).sum()) for _, truth in found]) for found in scored]
    note = (
        f"{len(errors[0])} cluster(s), each as a whole: nothing about a member; {_which_rounds(prior, case.budget.rounds)}; "
        f"{prior.description}; baseline: the label shares of the auxiliary data"
    )
    note += trainings_in(case.view).not_modelled()
    return cell(
        case, NAME, AGGREGATE, errors[0], blanks[0], errors[1], theirs_blank=blanks[1], margin=MARGIN[AGGREGATE], lower_is_better=True,
        note=note,
    )  # fmt: skip


def _aggregated(case: Case, view: AdversaryView, model: Model) -> list[tuple[Array, Array]]:
    """Label shares guessed and true, by cluster that the view shows two models of."""
    members = _trained_by(case, view)
    prior = case.prior.unprotected() if view is case.reference else case.prior
    by_label: dict[int, list[tuple[CohortSum, list[int]]]] = {}
    for one in means_in(view, model.dimension):
        people = [client for number in range(one.round, max(one.until, one.round + 1)) for client in members.get((number, one.label), ())]
        if view.adversary != "client":
            people = list(members.get((one.round, one.label), ()))
        if set(people) - set(case.view.coalition):
            by_label.setdefault(one.label, []).append((one, people))
    kept = {label: several if is_summed(prior) else several[: case.budget.rounds] for label, several in by_label.items()}
    guesses = _of_clusters({label: [one for one, _ in several] for label, several in kept.items()}, view, prior, model)
    found = []
    for label, several in kept.items():
        counts = np.sum([case.truth.label_counts[client] for _, people in several for client in people], axis=0)
        found.append((guesses[label], counts / counts.sum()))
    return found


def _of_clusters(sums: Mapping[int, Sequence[CohortSum]], view: AdversaryView, prior: Prior, model: Model) -> dict[int, Array]:
    """Label shares of each cluster by its mean updates."""
    steps: dict[int, list[Step]] = {}
    gaps: dict[int, list[int]] = {}
    for label, several in sums.items():
        for one in several:
            assert one.start is not None  # there is a mean
            assert one.mean is not None
            steps.setdefault(label, []).append(Step(one.start, one.mean, one.members, one.round, local=one.local))
            gaps.setdefault(label, []).append(max(1, one.until - one.round) if view.adversary == "client" else 1)
    if is_summed(prior):
        readings = {label: readings_of(several, prior, model, gaps[label]) for label, several in steps.items()}
        return shares_under_noise(readings, auxiliary_shares(prior)) if readings else {}
    return {
        label: np.mean([shares_of(step, prior, model, prior.classes, gap) for step, gap in zip(several, gaps[label], strict=True)], axis=0)
        for label, several in steps.items()
    }


def _trained_by(case: Case, view: AdversaryView) -> dict[tuple[int, int], tuple[int, ...]]:
    """Who was in the sum of each cluster, by round and label: for scoring only.

    Where sums are oblivious no message says so. In the first round it is as without protection, since clients choose among the same
    models; later ones are not scored, nor are choices with noise.
    """
    record = case.reference if view is case.reference else case.record or case.view
    known: dict[tuple[int, int], tuple[int, ...]] = {}
    hidden = bool(sizes_in(record)) or record.protection.sum == "secagg-oblivious"
    if hidden and case.prior.private:
        return {}
    for one in sums_in(case.reference if hidden else record):
        if not hidden or one.round == 0:
            known.setdefault((one.round, one.label), one.members)
    return known


def _same(a: AdversaryView, b: AdversaryView) -> bool:
    """Whether two views are of the very same messages, so that an attack need not be made twice."""
    return a.coalition == b.coalition and len(a.messages) == len(b.messages) and all(map(is_, a.messages, b.messages))


def label_set_cell(case: Case, name: str, clients: Sequence[int], score: Callable[[list[int]], list[Array]], note: str) -> Cell:
    """Label sets of the clients that lack a label; `score` of these gives scores with the view and on the unprotected view."""
    metric, truth = "label_set_accuracy", case.truth
    partial = [client for client in clients if case.prior.labels_per_client[client] < case.prior.classes]
    if not partial:
        return nothing(case, name, metric, "every client has all labels: there is no label set to find")
    popular = popular_set([truth.label_sets[client] for client in partial])
    mine, theirs = score(partial)
    blank = np.array([float(truth.label_sets[client] == popular) for client in partial])
    words = f"{note}; baseline: the most common label set for everyone"
    return cell(case, name, metric, mine, blank, theirs, margin=MARGIN[metric], share=True, note=words)


def label_cells(case: Case, name: str, clients: list[int], guesses: list[Guess], note: str) -> tuple[list[Cell], dict[str, Array]]:
    """Histograms and label sets of clients, guessed with, without and on the unprotected view; the cells and what a picture needs."""
    prior, truth = case.prior, case.truth
    l1 = [score_l1(one, truth, clients) for one in guesses]
    words = f"{note}; baseline: the label shares of the auxiliary data"
    figures = [cell(case, name, "histogram_l1", *l1, margin=MARGIN["histogram_l1"], lower_is_better=True, note=words)]
    mine, _, theirs = guesses
    figures.append(label_set_cell(case, name, clients, lambda some: [score_sets(one, truth, prior, some) for one in (mine, theirs)], note))
    arrays = {
        "clients": np.array(clients),
        "label_truth": np.stack([truth.histogram(c) for c in clients]),
        "label_guess": np.stack([guesses[0].shares[c] for c in clients]),
    }
    return figures, arrays
