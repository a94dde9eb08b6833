"""Whose words, or inputs, are whose: from the exact zeros of sums over changing cohorts.

How zeros are read and whose features follow is in `inversion.zeros`. A single update in the clear is a sum over one client.

What it proves: a secure sum shows which words of an embedding, or inputs of a first linear layer, nobody in its cohort has. Sums over
changing cohorts therefore name the owner of what only one client has, for any number of samples, batches and steps. Adam has to take two
steps or more where inputs are standardised or weights decay. What it does not prove: anything of cohorts
that never differ, under noise that moves every parameter, or of standardised inputs under Adam with weight decay. Features that many
clients have are attributed only as far as sums separate their owners.

A sample with a feature that a client certainly lacks is none of the client's. So the same evidence tells samples that a client trained on
from others of its distribution: membership, with an error on one side only.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...randomness import stream
from ...types import Array
from ..evidence.coalition import cohorts_assumed
from ..evidence.updates import blind, public_model, unread_movement
from ..figures.leakage import Case, Cell, cell, nothing
from ..figures.significance import chance, chance_of_matching, power
from .token_recovery import refusal
from .zeros import Feature, Owners, features_of, owners_of, pools_in

__all__ = ["cells"]

NAME = "exact_zeros"
MARGIN, MARGIN_OF_MEMBERSHIP = 0.1, 0.02
MOST_SAMPLES, DEALS = 200, 1999


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """The features that only one client has: the share that is attributed to it, and how many of those attributed to it it has."""
    feature = None if case.prior.config is None else features_of(public_model(case.prior))
    if feature is None:
        why = "not attempted: the model begins neither with an embedding nor with a linear layer of inputs that can be zero"
        return [nothing(case, NAME, "own_features_share", why)], None
    metrics = (f"own_{feature.name}s_share", f"own_{feature.name}s_precision")
    model = public_model(case.prior)
    decays = ("sgd", "adam") if feature.is_exact else ("sgd",)
    if why := refusal(case, feature.name, decays=decays, is_zero=feature.is_exact) or blind(case.view):
        return [nothing(case, NAME, metrics[0], why)], None
    pools = [pools_in(case, view, model, feature) for view in (case.view, case.reference)]
    known = {client: feature.of(case.truth.data[client][0]) for client in case.view.coalition}
    both = [owners_of(of_view, known) for of_view in pools]
    taking_part = set(both[0].clients) & set(both[1].clients)
    truth = {client: feature.of(case.truth.data[client][0]) for client in taking_part | set(known)}
    number = np.sum(list(truth.values()), axis=0) if truth else np.zeros(feature.count)
    clients = [client for client in sorted(taking_part - set(known)) if (truth[client] & (number == 1)).any()]
    if not taking_part - set(known):
        why = unread_movement(case.view, model.dimension) or "no sum over known clients is in this view"
        return [nothing(case, NAME, metrics[0], why)], None
    member = _membership_cell(case, feature, both, sorted(taking_part - set(known)), len(pools[0]))
    if len(clients) < 2 or case.view.adversary == "released":  # there is nothing to attribute, or nobody to attribute it to
        return [member], None
    own = [truth[client] & (number == 1) for client in clients]
    tables = [_tables(owners, clients, own, [truth[client] for client in clients]) for owners in both]
    note = _note(feature, clients, own, [pool.members for pool in pools[0]], case)
    figures = [_figure(case, metric, [of_view[i] for of_view in tables], note) for i, metric in enumerate(metrics)]
    return [*figures, member], None


def _tables(owners: Owners, clients: Sequence[int], own: Sequence[Array], truth: Sequence[Array]) -> tuple[Array, Array]:
    """Of what is attributed to client i, by client j: the share of j's own features that it holds, and the share of it that j has."""
    given = np.stack([owners.attributed_to(client) for client in clients]).astype(np.float64)
    alone, every = (np.stack(list(features)).astype(np.float64) for features in (own, truth))
    share = given @ alone.T / alone.sum(axis=1)
    precision = given @ every.T / np.maximum(given.sum(axis=1, keepdims=True), 1.0)
    return share, precision


def _figure(case: Case, metric: str, tables: Sequence[Array], note: str) -> Cell:
    """A figure from such a table of the view and of the reference; without a view the same features are dealt at random."""
    scores = [np.diag(table) for table in tables]
    blanks = [table.mean(axis=0) for table in tables]
    chances = [
        max(chance_of_matching(-table, stream(case.seed, f"{metric} dealt again")), chance(score, blank, MARGIN))
        for table, score, blank in zip(tables, scores, blanks, strict=True)
    ]
    made = cell(
        case, NAME, metric, scores[0], blanks[0], scores[1], reference_blank=blanks[1], margin=MARGIN, note=note,
        chances=(chances[0], chances[1]),
    )  # fmt: skip
    return replace(made, power=power(scores[0], blanks[0], scores[1], blanks[1], MARGIN))


def _membership_cell(case: Case, feature: Feature, both: Sequence[Owners], clients: Sequence[int], sums: int) -> Cell:
    """How well samples of a client differ from its test samples: those with a feature that it certainly lacks are none of its own."""
    metric = f"excluded_{feature.name}s_auc"
    clients = [client for client in clients if len(case.truth.outside[client][1])]
    if not clients:
        return nothing(case, NAME, metric, "not attempted: no client has samples that nobody trained on")
    samples = [[case.truth.data[client][0], case.truth.outside[client][0]] for client in clients]
    marks = [[np.stack([feature.of(x[i : i + 1]) for i in range(min(len(x), MOST_SAMPLES))]) for x in pair] for pair in samples]
    out = []  # of the view and of the reference, by client: which samples of its own, and which of others, have a feature that it lacks
    for owners in both:
        lacking = [owners.excluded_of(client) for client in clients]
        out.append([[np.asarray((features & lacks).any(axis=1)) for features in pair] for pair, lacks in zip(marks, lacking, strict=True)])
    scores = [np.array([_auc(own, others) for own, others in of_view]) for of_view in out]
    chances = [_chance_of_membership(of_view, stream(case.seed, f"{metric} dealt again")) for of_view in out]
    what = "released model(s), which any of those who trained one would have moved" if case.view.adversary == "released" else "sums"
    note = (
        f"samples of {len(clients)} client(s) and test samples of the same, up to {MOST_SAMPLES} each, by {feature.name}s that the client "
        f"certainly lacks, from the zeros of {sums} {what}, all rounds; baseline .5"
    )
    blank = np.full(len(clients), 0.5)
    margin = MARGIN_OF_MEMBERSHIP
    made = cell(case, NAME, metric, scores[0], blank, scores[1], margin=margin, note=note, chances=(chances[0], chances[1]))
    return replace(made, power=power(scores[0], blank, scores[1], blank, margin))


def _auc(own: Array, others: Array) -> float:
    """The area under the curve of telling samples (n,) of a client from others (m,) by whether they are excluded, bool."""
    return float((1 + others.mean() - own.mean()) / 2)


def _chance_of_membership(excluded: Sequence[Sequence[Array]], rng: np.random.Generator) -> float:
    """How probable so large a mean AUC is if each client's samples, its own and others, are dealt to both sides at random.

    How many of the excluded samples of a client are then on its own side has a hypergeometric distribution.
    """
    own, others, marked = np.array([(len(pair[0]), len(pair[1]), pair[0].sum() + pair[1].sum()) for pair in excluded]).T
    reached = float(np.mean([_auc(*pair) for pair in excluded]))
    inside = rng.hypergeometric(marked, own + others - marked, own, size=(DEALS, len(own)))
    dealt = ((1 + (marked - inside) / others - inside / own) / 2).mean(axis=1)
    return (1 + int((dealt >= reached - 1e-9).sum())) / (1 + DEALS)


def _note(feature: Feature, clients: Sequence[int], own: Sequence[Array], cohorts: Sequence[tuple[int, ...]], case: Case) -> str:
    number = int(np.sum([features.sum() for features in own]))
    assumed = "; who was in a sum is assumed to be known to its members" if cohorts_assumed(case) else ""
    return (
        f"{number} {feature.name}s that only one of {len(clients)} clients has, from the zeros of {len(cohorts)} sums over "
        f"{min(map(len, cohorts))} to {max(map(len, cohorts))} clients, all rounds{assumed}; baseline: the same {feature.name}s dealt to "
        "clients at random"
    )
