"""Property inference: whether a client's data have a property that the training task does not ask about.

Source: Ateniese et al. 2015 and Ganju et al. 2018: simulate clients with and without the property, and learn to distinguish what they
would have sent. Melis et al. 2019 for updates of federated learning. Deviations: the meta-classifier is a ridge regression whose penalty is
chosen by exact leave-one-out, on the share of samples that a simulated client has, not on yes and no; hidden units need no sorting
(Ganju et al., Sec. 4), because updates of one round start at one model whose units are named by their place; a cluster's model is not
compared with shadow models: its losses on auxiliary samples with and without the property are compared.

Properties are public statements about single samples (`property_statements`). They are read from signatures, from updates and from the
models that clients are sent. Updates are a client's own, sent or solved from sums. If a view has sums only, clients' shares of a property
solve all sums together (`property_sums`).

What it proves: views show properties that no algorithm asked about. Under secure sums, a cluster's model shows them for all its members
alike, and sums over changing cohorts show them for single clients. What it does not prove: anything about single samples, or about other
properties.

Significance. If whole groups share a property, the trials of one run are its groups. Under a transform that the view does not undo, the run
is one trial: all clients' scores flip together, and a figure may be near 0 or 1 by the toss of a coin. So one run is `leaks` by a
permutation test over these trials. Otherwise the permutation test is within groups, whose clients share more than the property. If one run
is a toss, each seed is a toss: five seeds that agree have probability 1 in 32, and fewer claim nothing. Intervals of one run count the
clients of a group as one, as far as they share property and score (Kish's design effect). If a view has too few clients for an AUC, the
figure is the error of the clients' shares.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from ...engine.models import build_module
from ...protocols.orthonormal import TRANSFORMS
from ...randomness import stream
from ...types import Array
from ..adversary import AdversaryView
from ..evidence.local_training import trainings_in
from ..evidence.updates import ClientStep, public_model, steps_in, unread
from ..figures.leakage import Case, Cell, Prior, cell, nothing
from ..figures.significance import RATE, CellStatus
from ..membership.member_scores import auc_interval
from .property_clients import Imitation, pretended_count, pretended_signatures, pretended_updates, update_features
from .property_models import from_models, last_models
from .property_regression import infer_property
from .property_signatures import read
from .property_statements import FEWEST, Statement, shares_held, statements, who_has
from .property_sums import distinct, shares_in_sums, tells_apart
from .property_trials import chance_dealt, interval_over_groups, is_toss, score, trials_of

__all__ = ["cells", "infer_property"]

NAME = "property_inference"
MARGIN, ERROR_MARGIN = 0.05, 0.02
"""Of an AUC, and of the error of a share."""


# --- what the attacker has ----------------------------------------------------------------------------------------------------------


NOT_IMITATED = "not attempted: auxiliary data cannot imitate the public pipeline"
MEAN = "baseline: the auxiliary samples' share"
UNSEEN = {
    "signature": "no signature can be read in this view",
    "update": "no single client's first update can be read in this view, and no sums in it tell clients apart",
    "model": "this view shows fewer than two models, so there is nothing to compare clients by",
}
"""What is read -> why there may be nothing to read."""


def first_steps(view: AdversaryView, dimension: int, case: Case | None = None) -> dict[int, ClientStep]:
    """The update of each client in the round in which most send their first, as far as there are single ones, sent or solved from sums.

    Of SCAFFOLD's clients later ones do not serve: their corrections differ.
    """
    by_client = steps_in(view, dimension, case)
    steps = {client: steps[0] for client, steps in by_client.items()}
    steps = {c: step for c, step in steps.items() if len(step.members) == 1 and int(step.beside.get("summed", np.array(-1))) < 0}
    rounds = [step.round for step in steps.values()]
    best = max(set(rounds), key=lambda number: (rounds.count(number), -number), default=0)
    return {client: step for client, step in steps.items() if step.round == best}


def held_in(case: Case, view: AdversaryView, prior: Prior, source: str) -> Mapping[int, Any]:
    """What the attacker has of each client except the colluding ones: signatures, first updates, or models."""
    features: Mapping[int, Any]
    if source == "signature":
        features = read(view, prior)
    elif source == "update":
        features = first_steps(view, public_model(prior).dimension, case)
    else:
        features = last_models(view, public_model(prior).dimension)
    features = {client: value for client, value in features.items() if client not in view.coalition}
    return {} if source == "model" and len({value.tobytes() for value in features.values()}) < 2 else features


def imitated(held: Mapping[int, Any], view: AdversaryView, prior: Prior, source: str, statement: Statement, count: int) -> Imitation | None:
    """What simulated clients would have sent in place of what is `held`; None where the public pipeline cannot be imitated."""
    like = next(iter(held.values()))
    if source == "signature":
        return pretended_signatures(view, statement, prior, count, like.shape)
    return pretended_updates(statement, prior, count, like)


def guess(
    held: Mapping[int, Any] | None, prior: Prior, source: str, clients: Sequence[int], statement: Statement, made: Imitation | None = None
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


def _sums(case: Case) -> list[ClientStep]:
    """The sums of a view, where not all clients' updates can be read alone and some tell clients apart. Of noisy ones none."""
    if case.prior.private:
        return []
    steps = steps_in(case.view, public_model(case.prior).dimension, case)
    others = [steps[client] for client in steps if client not in case.view.coalition]
    if all(len(step.members) == 1 for client_steps in others for step in client_steps):
        return []
    sums = distinct({client: steps[client] for client in steps if client not in case.view.coalition}, case)
    return sums if tells_apart(sums) else []


# --- figures ------------------------------------------------------------------------------------------------------------------------


def _is_transformed(view: AdversaryView, source: str) -> bool:
    """Whether a transform that the adversary cannot undo stands before what it reads: then a whole run is one trial."""
    stages = {"signature": view.protection.gram, "update": (view.protection.sum,)}.get(source, ())
    return not view.secrets and any(stage in TRANSFORMS for stage in stages)


def _cell(case: Case, source: str, name: str, clients: Sequence[int], scores: Array, has: Array, note: str) -> Cell:
    """One figure from the scores (3, m) of the view, of no view and of the reference."""
    groups = np.array([case.truth.groups[client] for client in clients])
    value, blank, reference = (score(row, has) for row in scores)
    tried, transformed = trials_of(scores, has, groups), _is_transformed(case.view, source)
    rng = stream(case.seed, f"{NAME}: dealt again")
    p, reference_p = (chance_dealt(tried.scores[which], tried.has, tried.blocks, rng) for which in (0, 2))
    p = p if value > blank + MARGIN else 1.0
    status: CellStatus = "at_baseline"
    if not (reference_p < RATE and reference > blank + MARGIN) or (transformed and value > blank + MARGIN):
        status = "not_validated"  # a reference that shows nothing, or a toss that may have been luck
    elif p < RATE:
        status = "leaks"
    low, high = auc_interval(value, 1, 1) if transformed else interval_over_groups(scores[0], has, groups)
    return Cell(
        NAME, case.view.adversary, case.protection, f"{source}_{name}_auc", value, low, high, baseline=blank, reference=reference,
        status=status, k_known=len(case.view.coalition), seeds=(case.seed,), note=note, margin=MARGIN, reference_baseline=blank,
        p=p, coin=transformed or is_toss(has, groups),
    )  # fmt: skip


def _error_cell(case: Case, metric: str, clients: Sequence[int], statement: Statement, scores: Array, note: str) -> Cell:
    """How far the share of samples with a property is off, where clients are too few for an AUC; from scores (3, m) that are shares."""
    shares = shares_held(statement, case.truth)
    real = np.array([shares[client] for client in clients])
    observed, reference = (np.abs(np.clip(scores[which], 0.0, 1.0) - real) for which in (0, 2))
    blank, words = np.abs(statement.share - real), f"{note[: note.rindex(';')]}; {MEAN}"
    return cell(case, NAME, metric, observed, blank, reference, margin=ERROR_MARGIN, lower_is_better=True, note=words)


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """The AUC over clients of each property that varies, from signatures, from first updates, and from the models clients are sent."""
    prior = case.prior
    why = "not attempted: the training settings are not known" if prior.config is None else ""
    if not why and any(isinstance(layer, nn.LSTM | nn.Embedding) for layer in build_module(public_model(prior)).modules()):
        why = "not attempted: inputs are words, and these properties are of images"
    if not why and any(training.gradient for training in trainings_in(case.reference).all):
        why = "not attempted: clients send gradients, which pretended local training does not imitate"
    if why:
        return [nothing(case, NAME, "update_auc", why)], None
    asked = [(statement, has) for statement in statements(prior) if (has := who_has(statement, case.truth)) is not None]
    if not asked:
        words = ", ".join(statement.name for statement in statements(prior)) or "none can be stated of such samples"
        return [nothing(case, NAME, "update_auc", f"no property varies between these clients ({words})")], None
    figures: list[Cell] = []
    for source in UNSEEN:
        figures += _figures(case, source, asked)
    return figures, None


def _figures(case: Case, source: str, asked: Sequence[tuple[Statement, Mapping[int, bool]]]) -> list[Cell]:
    prior, sums = case.prior, _sums(case) if source == "update" else []
    observed = {} if sums else held_in(case, case.view, prior, source)
    reference = held_in(case, case.reference, prior.unprotected(), source)
    members = {client for sum_ in sums for client in sum_.members} - set(case.view.coalition)
    clients = sorted((members or set(observed)) & set(reference))
    figures: list[Cell] = []
    for statement, truth in asked:
        has = np.array([truth[client] for client in clients], dtype=bool)
        few = min(has.sum(), (~has).sum()) < FEWEST
        if few and (source != "update" or not clients or len(clients) >= 2 * FEWEST):
            continue
        made: Imitation | None = None
        if sums:
            own = {client: shares_held(statement, case.truth)[client] for client in case.view.coalition}
            shares = shares_in_sums(sums, statement, case, own)
            seen = np.array([shares[client] for client in clients])
            by = f"{len(sums)} sums as one system, {pretended_count(case, len(sums))} simulated clients each"
            by += trainings_in(case.view).not_modelled()
        else:
            made = None if source == "model" else imitated(observed, case.view, prior, source, statement, pretended_count(case))
            if source != "model" and made is None:
                return [nothing(case, NAME, f"{source}_auc", NOT_IMITATED)]
            seen = guess(observed, prior, source, clients, statement, made)
            by = f"{pretended_count(case)} simulated clients" if source != "model" else f"{len(set(map(bytes, observed.values())))} models"
        beside = made if observed and source != "model" and _alike(observed, reference, prior) else None
        if source != "model" and beside is None:
            beside = imitated(reference, case.reference, prior.unprotected(), source, statement, pretended_count(case))
            if beside is None:
                return [nothing(case, NAME, f"{source}_auc", NOT_IMITATED)]
        unseen = guess(None, prior, source, clients, statement)
        scores = np.stack([seen, unseen, guess(reference, prior.unprotected(), source, clients, statement, beside)])
        words = f"{int(has.sum())} of {len(clients)} clients have {statement.name!r} in more than {statement.share:.0%} of samples"
        note = f"{words}; {by}; {prior.description}; baseline: one score for all"
        if few:
            figures.append(_error_cell(case, f"{source}_{statement.name}_share_error", clients, statement, scores, note))
        else:
            figures.append(_cell(case, source, statement.name, clients, scores, has, note))
    other = unread(case.view, public_model(prior).dimension) if source == "update" and not figures else ""
    return figures or [nothing(case, NAME, f"{source}_auc", other or UNSEEN[source])]


def _alike(observed: Mapping[int, Any], reference: Mapping[int, Any], prior: Prior) -> bool:
    """Whether the same simulated clients serve for a view and its reference."""
    first, other = next(iter(observed.values())), next(iter(reference.values()))
    if prior.private:
        return False
    if isinstance(first, ClientStep):
        return first.round == other.round and np.array_equal(first.start, other.start)
    return bool(first.shape == other.shape)
