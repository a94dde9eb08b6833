"""Property inference: whether a client's data have a property that the training task does not ask about.

Source: Ateniese et al. 2015 and Ganju et al. 2018: simulate clients with and without the property, and learn to distinguish what they
would have sent. Melis et al. 2019 for updates of federated learning. Deviations: the meta-classifier is a ridge regression whose penalty is
chosen by exact leave-one-out, on the share of samples that a simulated client has, not on yes and no; hidden units need no sorting
(Ganju et al., Sec. 4), because updates of one round start at one model whose units are named by their place; a cluster's model is not
compared with shadow models, but asked on which auxiliary samples, with or without, it does better.

A property is a public statement about single samples, and a client has it if more of its samples do than of the population at large:

bold          strokes are thick: ink over outline
wide          the image is wider than tall, as digits that were turned by 90° are
slanted       to the right: ink's covariance of column and row, a trait of a hand
label_0       the label is the first one

What it proves: views show properties that no algorithm asked about; a cluster's model does so under secure sums as well, for all its
members alike. What it does not: nothing about single samples, or properties not listed. Where a property is that of whole groups the trials
of one run are its groups, and under a transform that nobody undoes the run is one trial: all clients' scores flip together, and a figure
may be near 0 or 1 by the toss of a coin. So one run says `leaks` by a permutation test over such trials only, else by one within groups,
whose clients are alike in more than the property; and where a run is a toss, so are seeds: five that agree are 1 in 32, fewer claim
nothing. Intervals of one run count clients of a group as one as far as these have the property, and the score, in common (Kish's design
effect).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import nn
from torch.nn import functional

from ..engine import Engine, Streams, TaskInput
from ..engine.device import tensor
from ..engine.models import build_module
from ..errors import InputError
from ..protocols.orthonormal import TRANSFORMS
from ..randomness import stream
from ..types import Array, ClientData, check_array
from .adversary import AdversaryView
from .clipped import engine_for
from .leakage import Case, Cell, Prior, Truth, nothing
from .local_training import trainings_in
from .membership import auc_interval
from .property_signatures import Frame, frame_of, read, sent_by
from .property_trials import chance_dealt, interval, is_toss, score, trials_of
from .significance import RATE, Status
from .sums import models_sent
from .updates import Step, local_of, public_model, steps_in

__all__ = ["PROPERTIES", "cells", "infer_property"]

NAME = "property_inference"
MARGIN = 0.05
FEWEST = 3
VARIES = 0.01
"""How improbable the spread of clients' shares must be for random draws from one pool, for the property to vary at all."""
PRETENDED = 40
"""Pretended clients for each draw of the budget."""
SECONDS = 1.5
PASSES, DOUBLES = 1.0e5, 2.0e4
"""A second trains about so many samples; a model of so many parameters takes twice as long as one of none."""
PENALTIES = 10.0 ** np.arange(-6, 4)


# --- properties: public statements about samples ------------------------------------------------------------------------------------


def _thickness(x: Array, y: Array) -> Array:
    planes = x.mean(axis=1, dtype=np.float64)
    outline = np.abs(np.diff(planes, axis=1)).sum((1, 2)) + np.abs(np.diff(planes, axis=2)).sum((1, 2))
    return np.asarray(planes.sum((1, 2)) / np.maximum(outline, 1e-9))


def _moments(x: Array) -> tuple[Array, Array, Array]:
    """The ink's variance over rows, over columns, and their covariance, by image."""
    planes = np.maximum(x.mean(axis=1, dtype=np.float64), 0.0)
    total = np.maximum(planes.sum((1, 2)), 1e-9)
    rows, columns = np.arange(planes.shape[1], dtype=np.float64), np.arange(planes.shape[2], dtype=np.float64)
    down, across = planes.sum(2) / total[:, None], planes.sum(1) / total[:, None]
    r, c = down @ rows, across @ columns
    return down @ rows**2 - r**2, across @ columns**2 - c**2, np.einsum("nij,i,j->n", planes, rows, columns) / total - r * c


def _width(x: Array, y: Array) -> Array:
    down, across, _ = _moments(x)
    return across - down


def _slant(x: Array, y: Array) -> Array:
    return -_moments(x)[2]


def _first_label(x: Array, y: Array) -> Array:
    return np.asarray(y == 0, np.float64)


PROPERTIES: dict[str, tuple[Callable[[Array, Array], Array], float | None]] = {
    "bold": (_thickness, None), "wide": (_width, 0.0), "slanted": (_slant, None), "label_0": (_first_label, 0.5),
}  # fmt: skip
"""Name -> a measure (n,) of samples (n, *shape) with labels (n,), and the bar that those with the property exceed; None: the median of
auxiliary samples. All but the last are of images."""


@dataclass(frozen=True, eq=False)
class Statement:
    """A property as the attacker states it: a sample has it above `bar`, a client if more than `share` of its samples do."""

    name: str
    bar: float
    share: float

    def holds(self, x: Array, y: Array) -> Array:
        """Which samples have it, (n,) bool."""
        return np.asarray(PROPERTIES[self.name][0](x, y) > self.bar)


def statements(prior: Prior) -> list[Statement]:
    """What can be asked about samples of this shape, from auxiliary data alone."""
    found = []
    for name, (measure, bar) in PROPERTIES.items():
        if name != "label_0" and len(prior.shape) != 3:
            continue
        values = measure(prior.x, prior.y)
        bar = float(np.median(values)) if bar is None else bar
        share = float((values > bar).mean())
        if 0.02 < share < 0.98:
            found.append(Statement(name, bar, share))
    return found


def who_has(statement: Statement, truth: Truth) -> dict[int, bool] | None:
    """The truth by client; None where it does not vary: shares that random draws from one pool would have (χ² test), or too few."""
    held = {client: statement.holds(x, y) for client, (x, y) in truth.data.items()}
    has = {client: bool(one.mean() > statement.share) for client, one in held.items()}
    if not FEWEST <= sum(has.values()) <= len(has) - FEWEST:
        return None
    pooled = float(np.concatenate(list(held.values())).mean())
    excess = sum(len(one) * (float(one.mean()) - pooled) ** 2 for one in held.values()) / (pooled * (1 - pooled))
    return has if stats.chi2.sf(excess, len(held) - 1) < VARIES else None


# --- the meta-classifier, for views of anything -------------------------------------------------------------------------------------


def infer_property(seen: Array, made: Array, share: Array) -> Array:
    """Scores (m,), larger for clients likelier to have a property, from their features (m, f).

    `made` (k, f) are the features of simulated clients and `share` (k,) how much of the property each has: 0 or 1, or between. Ridge
    regression, the penalty by exact leave-one-out. Raises `InputError` for arrays that do not fit or are not finite.
    """
    seen = check_array("seen", np.asarray(seen, np.float64), ndim=2)
    made = check_array("made", np.asarray(made, np.float64), ndim=2)
    share = check_array("share", np.asarray(share, np.float64), ndim=1)
    if seen.shape[1] != made.shape[1] or len(made) != len(share) or len(made) < FEWEST:
        raise InputError(f"infer_property: seen {seen.shape}, made {made.shape}, share {share.shape} do not fit")
    centre, middle = made.mean(axis=0), share.mean()
    known, asked = made - centre, seen - centre
    values, vectors = np.linalg.eigh(known @ known.T)
    values = np.maximum(values, 0.0)
    scale = max(float(values.mean()), 1e-300)
    turned = vectors.T @ (share - middle)
    best, weights = np.inf, np.zeros(len(made))
    for penalty in PENALTIES * scale:
        shrunk = 1.0 / (values + penalty)
        dual = vectors @ (shrunk * turned)
        left = dual / ((vectors**2) @ shrunk)  # leave-one-out residuals of kernel ridge regression
        if (error := float(left @ left)) < best:
            best, weights = error, dual
    return np.asarray(asked @ (known.T @ weights) + middle)


# --- simulated clients --------------------------------------------------------------------------------------------------------------


def pretended(statement: Statement, prior: Prior, count: int) -> tuple[list[tuple[Array, Array]], Array]:
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


# --- three views --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Made:
    """Features (k, f) of simulated clients, how much of the property each has (k,), and the frame of features that are of signatures."""

    features: Array
    share: Array
    frame: Frame | None = None


def pretended_signatures(view: AdversaryView, statement: Statement, prior: Prior, count: int, shape: tuple[int, ...]) -> Made | None:
    """What simulated clients would have let be compared; None where the public pipeline cannot be imitated as `shape` (p, d)."""
    data, share = pretended(statement, prior, count)
    rows, frame = sent_by(view, prior, data), frame_of(view, prior)
    return None if rows is None or frame is None or rows.shape[1:] != shape else Made(frame.features(rows), share, frame)


def pretended_updates(statement: Statement, prior: Prior, count: int, step: Step) -> Made:
    """What simulated clients would have sent from the model and in the round of `step`."""
    config = prior.config
    assert config is not None  # checked by the caller
    data, share = pretended(statement, prior, count)
    model = public_model(prior)
    local = local_of(step, prior)
    # what every client was sent; in a client's first turn SCAFFOLD's c_i is zero
    names = {"anchor": "anchor", "control": "correction"}
    sent = {"model": step.start} | {names[name]: vector for name, vector in step.beside.items() if name in names}
    given = {name: vector.astype(model.init(0).dtype) for name, vector in sent.items()}
    first = 1 + max(prior.samples_per_client, default=0)  # batches of their own: in those no client's id is used again
    inputs = [
        TaskInput(local.part(ClientData(i, x, y, x[:0], y[:0])), given, {}, Streams(prior.seed, step.round, first + i), secret=_secret(i))
        for i, (x, y) in enumerate(data)
    ]
    done = engine_for(config, Engine()).run(local.train, inputs)
    kept = [i for i, one in enumerate(done) if one]
    return Made(update_features(np.stack([np.asarray(done[i]["update"], np.float64) for i in kept]), prior), share[kept])


def update_features(updates: Array, prior: Prior) -> Array:
    """Updates (m, d) as they are; where clients clip them only their direction, since the length says nothing."""
    if not prior.private:
        return updates
    return np.asarray(updates / np.maximum(np.linalg.norm(updates, axis=1, keepdims=True), 1e-12))


def _secret(client: int) -> bytes:
    """Of the noise of simulated clients nothing has to stay secret."""
    return blake2b(f"{NAME}|{client}".encode(), digest_size=32).digest()


def from_models(models: Mapping[int, Array], prior: Prior, clients: Sequence[int], statement: Statement) -> Array:
    """Scores from the model that each client was sent last: how much smaller its loss is on samples with the property."""
    model, holds = public_model(prior), statement.holds(prior.x, prior.y)
    known: dict[bytes, float] = {}
    scores = []
    for client in clients:
        vector = models[client]
        if (key := vector.tobytes()) not in known:
            module = model.load(vector.astype(model.init(0).dtype))
            with torch.no_grad():
                logits = module(model.inputs(prior.x)).double()
            losses = functional.cross_entropy(logits, tensor(prior.y), reduction="none").cpu().numpy()
            known[key] = loss_gap(losses, prior.y, holds)
        scores.append(known[key])
    return np.array(scores)


def loss_gap(losses: Array, y: Array, holds: Array) -> float:
    """How much smaller losses (n,) are where `holds` (n,), within labels, on average over these.

    A label weighs as much as the model knows it, e^(−loss) on its better side: on labels that nobody trained on a model says nothing. A
    property that labels decide is compared over all samples.
    """
    sides = [(losses[(y == label) & ~holds], losses[(y == label) & holds]) for label in np.unique(y)]
    means = np.array([(without.mean(), with_it.mean()) for without, with_it in sides if min(len(without), len(with_it)) >= FEWEST])
    if not len(means):
        return float(losses[~holds].mean() - losses[holds].mean())
    weights = np.exp(means.min() - means.min(axis=1))
    return float(weights @ (means[:, 0] - means[:, 1]) / weights.sum())


def last_models(view: AdversaryView, dimension: int) -> dict[int, Array]:
    """The last model that each client was sent, where it was sent one alone."""
    found: dict[int, Array] = {}
    for message in view.select("compute", "parameters"):
        models = [one for one in models_sent(view, message).values() if one.shape == (dimension,)]
        if len(models) == 1:
            found |= dict.fromkeys(message.clients, models[0])
    return found


def first_steps(view: AdversaryView, dimension: int) -> dict[int, Step]:
    """The update of each client in the round in which most send their first, as far as single ones can be read.

    Of SCAFFOLD's clients later ones do not serve: their corrections differ.
    """
    several = steps_in(view, dimension)
    steps = {c: one[0] for c, one in several.items() if len(one[0].members) == 1 and int(one[0].beside.get("summed", np.array(-1))) < 0}
    rounds = [one.round for one in steps.values()]
    best = max(set(rounds), key=lambda number: (rounds.count(number), -number), default=0)
    return {client: one for client, one in steps.items() if one.round == best}


# --- the attack ---------------------------------------------------------------------------------------------------------------------


UNSEEN = {
    "signature": "no signature can be read in this view",
    "update": "no single client's first update can be read in this view",
    "model": "fewer than two models can be distinguished in this view, so clients are alike",
}
"""What is read -> why there may be nothing to read."""


def held_in(view: AdversaryView, prior: Prior, source: str) -> Mapping[int, Any]:
    """What the attacker has of each client except the colluding ones: signatures, first updates, or models."""
    found: Mapping[int, Any]
    if source == "signature":
        found = read(view, prior)
    else:
        found = (first_steps if source == "update" else last_models)(view, public_model(prior).dimension)
    found = {client: one for client, one in found.items() if client not in view.coalition}
    return {} if source == "model" and len({one.tobytes() for one in found.values()}) < 2 else found


def imitated(held: Mapping[int, Any], view: AdversaryView, prior: Prior, source: str, statement: Statement, count: int) -> Made | None:
    """What simulated clients would have sent in place of what is `held`; None where the public pipeline cannot be imitated."""
    like = next(iter(held.values()))
    if source == "signature":
        return pretended_signatures(view, statement, prior, count, like.shape)
    return pretended_updates(statement, prior, count, like)


def guess(
    held: Mapping[int, Any] | None, prior: Prior, source: str, clients: Sequence[int], statement: Statement, made: Made | None = None
) -> Array:
    """Scores (m,) of `clients` from what is `held` of them and, unless that is models, of simulated clients; without a view all alike."""
    if held is None:
        return np.zeros(len(clients))
    if source == "model":
        return from_models(held, prior, clients, statement)
    assert made is not None  # checked by the caller
    if source == "signature":
        assert made.frame is not None  # of signatures
        seen = made.frame.features(np.stack([held[client] for client in clients]))
    else:
        seen = update_features(np.stack([held[client].update for client in clients]), prior)
    return infer_property(seen, made.features, made.share)


def _is_transformed(view: AdversaryView, source: str) -> bool:
    """Whether a transform that the adversary cannot undo stands before what it reads: then a whole run is one trial."""
    stages = {"signature": view.protection.gram, "update": (view.protection.sum,)}.get(source, ())
    return not view.secrets and any(stage in TRANSFORMS for stage in stages)


def _cell(case: Case, source: str, name: str, clients: Sequence[int], scores: Array, has: Array, note: str) -> Cell:
    """One figure from the scores (3, m) of the view, of no view and of the reference."""
    groups = np.array([case.truth.groups[client] for client in clients])
    value, blank, reference = (score(one, has) for one in scores)
    tried, transformed = trials_of(scores, has, groups), _is_transformed(case.view, source)
    rng = stream(case.seed, f"{NAME}: dealt again")
    p, reference_p = (chance_dealt(tried.scores[which], tried.has, tried.blocks, rng) for which in (0, 2))
    p = p if value > blank + MARGIN else 1.0
    status: Status = "at_baseline"
    if not (reference_p < RATE and reference > blank + MARGIN) or (transformed and value > blank + MARGIN):
        status = "not_validated"  # a reference that shows nothing, or a toss that may have been luck
    elif p < RATE:
        status = "leaks"
    low, high = auc_interval(value, 1, 1) if transformed else interval(scores[0], has, groups)
    return Cell(
        NAME, case.view.adversary, case.protection, f"{source}_{name}_auc", value, low, high, baseline=blank, reference=reference,
        status=status, k_known=len(case.view.coalition), seeds=(case.seed,), note=note, margin=MARGIN, reference_baseline=blank,
        p=p, coin=transformed or is_toss(has, groups),
    )  # fmt: skip


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """The AUC over clients of each property that varies, from signatures, from first updates, and from the models clients are sent."""
    prior = case.prior
    why = "not attempted: the training settings are not known" if prior.config is None else ""
    if not why and any(isinstance(layer, nn.LSTM | nn.Embedding) for layer in build_module(public_model(prior)).modules()):
        why = "not attempted: inputs are words, and these properties are of images"
    if not why and any(one.gradient for one in trainings_in(case.reference).all):
        why = "not attempted: clients send gradients, which pretended local training does not imitate"
    if why:
        return [nothing(case, NAME, "update_auc", why)], None
    asked = [(one, has) for one in statements(prior) if (has := who_has(one, case.truth)) is not None]
    if not asked:
        words = ", ".join(one.name for one in statements(prior)) or "none can be stated of such samples"
        return [nothing(case, NAME, "update_auc", f"no property varies between these clients ({words})")], None
    figures: list[Cell] = []
    for source in UNSEEN:
        figures += _figures(case, source, asked)
    return figures, None


def _figures(case: Case, source: str, asked: Sequence[tuple[Statement, Mapping[int, bool]]]) -> list[Cell]:
    prior, count = case.prior, pretended_count(case)
    mine = held_in(case.view, prior, source)
    theirs = held_in(case.reference, prior.unprotected(), source)
    clients = sorted(set(mine) & set(theirs))
    figures: list[Cell] = []
    for statement, truth in asked:
        has = np.array([truth[client] for client in clients], dtype=bool)
        if min(has.sum(), (~has).sum()) < FEWEST:
            continue
        made = beside = None
        if source != "model":
            made = beside = imitated(mine, case.view, prior, source, statement, count)
            if not _alike(mine, theirs, prior):
                beside = imitated(theirs, case.reference, prior.unprotected(), source, statement, count)
            if made is None or beside is None:
                return [nothing(case, NAME, f"{source}_auc", "not attempted: auxiliary data cannot imitate the public pipeline")]
        seen = guess(mine, prior, source, clients, statement, made)
        unseen = guess(None, prior, source, clients, statement)
        scores = np.stack([seen, unseen, guess(theirs, prior.unprotected(), source, clients, statement, beside)])
        by = f"{count} simulated clients" if source != "model" else f"{len({mine[client].tobytes() for client in clients})} models"
        note = (
            f"{int(has.sum())} of {len(clients)} clients have {statement.name!r} in more than {statement.share:.0%} of samples; "
            f"{by}; {prior.description}; baseline: one score for all"
        )
        figures.append(_cell(case, source, statement.name, clients, scores, has, note))
    return figures or [nothing(case, NAME, f"{source}_auc", UNSEEN[source])]


def _alike(mine: Mapping[int, Any], theirs: Mapping[int, Any], prior: Prior) -> bool:
    """Whether the same simulated clients serve for a view and its reference."""
    one, other = next(iter(mine.values())), next(iter(theirs.values()))
    if prior.private:
        return False
    return one.shape == other.shape if not isinstance(one, Step) else one.round == other.round and np.array_equal(one.start, other.start)


def pretended_count(case: Case) -> int:
    """How many simulated clients the budget allows to be trained for one round, at least 30."""
    assert case.prior.config is not None  # checked by the caller
    size = float(np.mean(list(case.prior.samples_per_client.values())))
    model = public_model(case.prior)
    first = trainings_in(case.reference).first  # of the first update that any client sends
    epochs = case.prior.config.training.epochs if first is None else first.train.epochs
    each = size * epochs / PASSES * (1 + model.dimension / DOUBLES)
    return max(30, min(PRETENDED * case.budget.draws, int(SECONDS / each)))
