"""Gram matrix of updates: label sets from the inner products of updates alone, with no known client.

Source: an orthonormal transform keeps all inner products (Sattler et al. 2019, Algorithm 5), and what the attacker trains from the same
public model has the inner products of clients with the same labels. The attacker trains several clients of its own for every label set from
the model that was sent, and gives label sets to the clients so that the cosines of all pairs fit (a quadratic assignment, `assignment`),
each weighted by its variance among own clients; lengths count beside them, by their logarithms. Own clients draw samples with repetition,
so that they vary as much as clients with samples of their own.

What it proves: no shared transform of updates hides labels from a server that knows the model clients started from. What it does not: that
a wrong answer means safety. How well the best answer fits is compared with clients of the attacker's own that have the same label sets;
where it fits much worse, auxiliary data or training are not those of the clients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb

import numpy as np

from ...contract.transcript import Message, payload_rows
from ...errors import InputError
from ...federation.transforms import sketched
from ...randomness import Stream, stream
from ...types import Array
from ..adversary import UPDATES, AdversaryView, updates_sent
from ..evidence.local_training import LocalTraining, NotRecorded, training_of
from ..evidence.sums import models_sent
from ..evidence.updates import hidden_updates, public_model, updates_in
from ..figures.leakage import Case, Cell, Prior, Truth, cell, chance_of_names, label_sets_of, nothing, popular_set
from ..figures.significance import FEWEST_SCORES, CellStatus
from ..key_recovery.cells import knowledge
from ..key_recovery.naming import Knowledge, simulate_updates
from .assignment import assign, renamings_of
from .gram_geometry import KINDS

__all__ = ["FittedLabelSets", "UpdateProducts", "cells", "compared_updates", "guess", "labels_from_update_gram", "own_updates"]

NAME = "gram_updates"
METRIC = "label_set_accuracy"
MARGIN = 0.1
FEWEST_CLIENTS = 2 * FEWEST_SCORES
MOST_SETS = 260
OWN_PER_SET, FEWEST_PER_SET = 20, 3
"""Clients of the attacker's own for each label set; fewer where their updates would take more than `MOST_NUMBERS` numbers."""
MOST_NUMBERS = 100_000_000
VARIED = 20.0
"""The shape of the gamma distribution by which own clients' numbers of samples of a label vary."""
LENGTHS = 0.35
"""What a length says beside the n cosines of a client, as a share of n: these hang on each other."""
LEAST_VARIANCE = 1e-18
"""Below this, variances and squares of lengths are rounding."""
DRAWS, TYPICAL = 200, 0.975
"""The fit is compared with so many draws of own clients, by this quantile."""
MISFIT = 2.0
"""A fit worse than own clients' by more than this factor says that these are not like the clients attacked."""


# --- the mathematics, for updates from anywhere -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FittedLabelSets:
    """The label set of each client, and how much worse they fit than the attacker's own clients with these label sets would.

    `misfit` is in units of the `TYPICAL` quantile of what own clients give.
    """

    label_sets: tuple[frozenset[int], ...]
    misfit: float

    @property
    def fits(self) -> bool:
        return self.misfit <= MISFIT


@dataclass(frozen=True, eq=False)
class _Own:
    """What r own clients of each of K kinds look like: all their cosines (K, r, K, r), the mean and the variance of cosines between kinds
    (K, K), the logarithms of lengths (K, r), their mean by kind (K,) and the variance about it."""

    cosines: Array
    between: Array
    variance: Array
    logs: Array
    lengths: Array
    length_variance: float


def labels_from_update_gram(
    products: Array, updates: Mapping[frozenset[int], Array], sizes: Sequence[int] | None = None, *, seed: int = 0
) -> FittedLabelSets:
    """The label sets of n clients from the inner products (n, n) of their updates from one model.

    `updates` are updates of simulated clients from the same model, by label set: (r, d), with the same r ≥ 2 for each set. `sizes` are the
    clients' numbers of labels, if known. Raises `InputError` for a client whose number of labels no simulated client has.
    """
    sets = list(updates)
    own = _own(np.stack([np.asarray(updates[label_set]) for label_set in sets]))
    seen, lengths = _cosines(np.asarray(products, np.float64))
    logs = np.log(lengths)
    single = LENGTHS * len(seen) * (logs[:, None] - own.lengths) ** 2 / own.length_variance
    if sizes is not None:
        single = np.where(np.array([[len(label_set) == size for label_set in sets] for size in sizes]), single, np.inf)
    assignment = assign(seen, own.between, single=single, variance=own.variance, renamings=renamings_of(sets), seed=seed)
    return FittedLabelSets(
        tuple(sets[kind] for kind in assignment.kinds), _misfit(seen, logs, own, assignment.kinds, stream(seed, "own clients drawn"))
    )


def _own(updates: Array) -> _Own:
    """From updates (K, r, d). An error of the means is as large as that of a client, or so, hence the second term of the variance."""
    count, each = updates.shape[:2]
    if each < 2:
        raise InputError("labels_from_update_gram: two simulated clients or more of each label set are needed")
    flat = updates.reshape(count * each, -1)
    cosines, lengths = _cosines((flat @ flat.T).astype(np.float64))
    cosines = cosines.reshape(count, each, count, each)
    between, variance = cosines.mean(axis=(1, 3)), cosines.var(axis=(1, 3))
    for kind in range(count):  # without those with themselves
        inside = cosines[kind, :, kind][~np.eye(each, dtype=bool)]
        between[kind, kind], variance[kind, kind] = inside.mean(), inside.var()
    logs = np.log(lengths).reshape(count, each)
    variance = variance + max(float(np.median(variance)), LEAST_VARIANCE)
    return _Own(cosines, between, variance, logs, logs.mean(axis=1), max(float(logs.var(axis=1).mean()), LEAST_VARIANCE))


def _cosines(products: Array) -> tuple[Array, Array]:
    """Cosines (n, n) and lengths (n,) from inner products (n, n)."""
    lengths = np.sqrt(np.maximum(np.diag(products), LEAST_VARIANCE))
    return np.asarray(products / np.outer(lengths, lengths)), lengths


def _misfit(seen: Array, logs: Array, own: _Own, kinds: Array, rng: Stream) -> float:
    """How far cosines (n, n) and logarithms of lengths (n,) are from their means under `kinds` (n,), in standard deviations squared, in
    units of the `TYPICAL` quantile of own clients drawn instead."""
    each, off = own.cosines.shape[1], ~np.eye(len(kinds), dtype=bool)
    at = np.ix_(kinds, kinds)

    def apart(cosines: Array, lengths: Array, pairs: Array) -> float:
        angles = ((cosines - own.between[at]) ** 2 / own.variance[at])[pairs].mean()
        return float(angles + ((lengths - own.lengths[kinds]) ** 2).mean() / own.length_variance)

    distances = []
    for _ in range(DRAWS):
        drawn = np.empty(len(kinds), np.int64)
        for kind in np.unique(kinds):
            places = np.flatnonzero(kinds == kind)
            drawn[places] = np.resize(rng.permutation(each), len(places))
        twice = (kinds[:, None] == kinds[None]) & (drawn[:, None] == drawn[None])  # an own client with itself
        made = own.cosines[kinds[:, None], drawn[:, None], kinds[None], drawn[None]]
        distances.append(apart(made, own.logs[kinds, drawn], off & ~twice))
    outside = (each + 1) / (each - 1)  # own clients are in their means, and so nearer to them than others
    return float(apart(seen, logs, off) / max(outside * float(np.quantile(distances, TYPICAL)), LEAST_VARIANCE))


# --- the attack ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class UpdateProducts:
    """Inner products (n, n) of the updates of `clients` in `round`, all from the model `start` (d,), trained as `local` says.

    `epoch` is the clustering epoch whose public sketch the updates went through, None where they went through none.
    """

    clients: tuple[int, ...]
    products: Array
    start: Array
    local: LocalTraining
    round: int
    epoch: int | None = None


def compared_updates(view: AdversaryView, dimension: int) -> UpdateProducts | None:
    """The updates under one transform, of the most clients that started from one known model; the first such in the view.

    None where there are none of `FEWEST_CLIENTS`. Raises `NotRecorded` where the transcript does not say how clients trained.
    """
    started: dict[int, tuple[Array, LocalTraining | None]] = {}
    candidates: list[UpdateProducts] = []
    taken: dict[str, tuple[list[int], list[Array], Message]] = {}
    for message in view.messages:
        if message.operation == "compute" and message.kind == "parameters" and message.payload is not None:
            models = list(models_sent(view, message).values())
            for client in message.clients:
                started.pop(client, None)
            if models and all(model.shape == (dimension,) and np.array_equal(model, models[0]) for model in models):
                started |= dict.fromkeys(message.clients, (models[0], training_of(message)))
            taken = {}
            continue
        name, rows = _hidden_rows(view, message)
        if rows is None:
            continue
        clients, vectors, _ = taken.setdefault(name, ([], [], message))
        for client, row in zip(payload_rows(message), rows, strict=True):
            if client in started and client not in clients and np.array_equal(started[client][0], started[(clients or [client])[0]][0]):
                clients.append(client)
                vectors.append(row)
        if len(clients) >= FEWEST_CLIENTS:
            candidates.append(_seen(view, clients, np.stack(vectors), started[clients[0]], message))
    return max(candidates, key=lambda candidate: len(candidate.clients), default=None)


def _hidden_rows(view: AdversaryView, message: Message) -> tuple[str, Array | None]:
    """The name of a transform that the adversary cannot undo, and the updates (m, size) under it; None for other messages."""
    if message.payload is None:
        return "", None
    if message.operation == "mean" and message.kind == "blind update":
        name = str(message.context.get("transform", ""))
        one_part = len(message.context.get("parts", ())) == 1
        return name, updates_sent(view, message) if one_part and view.secret_of(name) is None else None
    if message.operation == "gram" and message.kind in UPDATES and "rows" in message.payload and view.protection.gram:
        name = f"gram/{message.context['epoch']}"
        rows = np.asarray(message.payload["rows"], np.float64)
        return name, rows[:, 0] if rows.shape[1] == 1 and view.secret_of(name) is None else None
    return "", None


def _seen(
    view: AdversaryView, clients: Sequence[int], rows: Array, started: tuple[Array, LocalTraining | None], message: Message
) -> UpdateProducts:  # fmt: skip
    start, local = started
    if local is None:
        raise NotRecorded("the transcript does not say how clients were asked to train")
    epoch = int(message.context["epoch"]) if message.operation == "gram" else None
    return UpdateProducts(tuple(clients), rows @ rows.T, start, local, message.round, epoch)


def own_updates(known: Knowledge, sets: Sequence[frozenset[int]], each: int, rng: Stream) -> dict[frozenset[int], Array]:
    """Updates (each, d) of the attacker's own clients with each label set, in about equal shares of its labels."""
    shares = np.repeat([[float(label in label_set) for label in range(known.classes)] for label_set in sets], each, axis=0)
    shares *= rng.gamma(VARIED, size=shares.shape)
    made = simulate_updates(known, shares / shares.sum(axis=1, keepdims=True), rng, repeated=True).astype(np.float32)
    return dict(zip(sets, made.reshape(len(sets), each, -1), strict=True))


def guess(
    seen: UpdateProducts, prior: Prior, clients: Sequence[int], templates: Mapping[frozenset[int], Array], sketch_dim: int | None
) -> FittedLabelSets:
    """Label sets of `clients`, some of those seen, by the `templates` of own clients."""
    places = [seen.clients.index(client) for client in clients]
    if seen.epoch is not None:
        reduce = sketched(seen.epoch, sketch_dim)
        templates = {labels: reduce(np.asarray(rows, np.float64)) for labels, rows in templates.items()}
    sizes = [prior.labels_per_client[client] for client in clients]
    return labels_from_update_gram(seen.products[np.ix_(places, places)], templates, sizes, seed=prior.seed)


def score(fitted: FittedLabelSets, truth: Truth, clients: Sequence[int]) -> Array:
    """1 where a client's label set is right."""
    return np.array([float(labels == truth.label_sets[client]) for client, labels in zip(clients, fitted.label_sets, strict=True)])


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """Label sets from the Gram matrix of updates, beside those from the Gram matrix of the same clients' clear updates."""
    prior = case.prior
    if prior.config is None:
        return [nothing(case, NAME, METRIC, "not attempted: the prior has no public configuration", 0)], None
    dimension = public_model(prior).dimension
    seen, clear = compared_updates(case.view, dimension), updates_in(case.reference, dimension)
    if seen is None:
        return [nothing(case, NAME, METRIC, _why_not(case.view, dimension), 0)], None
    rows = {client: clear.get((seen.round, client), np.zeros(0)) for client in seen.clients}
    sizes = prior.labels_per_client
    clients = [client for client in seen.clients if rows[client].shape == (dimension,) and client not in case.view.coalition]
    labels = np.unique(prior.y).tolist()
    partial = [client for client in clients if sizes[client] < len(labels) and comb(len(labels), sizes[client]) <= MOST_SETS]
    sets = [label_set for size in sorted({sizes[client] for client in partial}) for label_set in label_sets_of(labels, size)]
    each = min(OWN_PER_SET, MOST_NUMBERS // max(1, len(sets) * dimension))
    why = _too_little(case, clients, partial, each)
    if why:
        return [nothing(case, NAME, METRIC, why, 0)], None
    templates = own_updates(knowledge(prior, seen.start, seen.local), sets, each, stream(prior.seed, NAME))
    observed = guess(seen, prior, partial, templates, case.view.protection.sketched)
    flat = np.stack([rows[client] for client in partial])
    reference = guess(replace(seen, clients=tuple(partial), products=flat @ flat.T, epoch=None), prior, partial, templates, None)
    return [_figure(case, partial, observed, reference, each)], None


def _why_not(view: AdversaryView, dimension: int) -> str:
    """Why there is nothing to attack."""
    if hidden_updates(view):
        return "not attempted: updates are in this view, but not those of enough clients under one transform from one known model"
    if updates_in(view, dimension):
        return "updates are in the clear here: label_inference reads them"
    rows = [message for message in view.select("gram") if "rows" in (message.payload or {})]
    rows = [message for message in rows if set(payload_rows(message)) - set(view.coalition)]
    if other := sorted({message.kind for message in rows if message.kind not in KINDS}):
        names = ", ".join(map(repr, other))
        return f"not attempted: what clients compare is in this view, as {names}, but not as one update of enough of them"
    return f"updates of {FEWEST_CLIENTS} clients or more under one transform are not in this view"


def _too_little(case: Case, clients: Sequence[int], partial: Sequence[int], each: int) -> str:
    """Why an attack on the updates of `clients` is not made; empty where it is."""
    prior = case.prior
    if len(clients) < FEWEST_CLIENTS:
        return "not attempted: updates are in this view, but of a part of the model only; this part may show labels"
    if len(partial) < FEWEST_CLIENTS:
        whole = all(prior.labels_per_client[client] >= len(np.unique(prior.y)) for client in clients)
        return "every client has all labels: there is no label set to find" if whole else "not attempted: too many label sets are possible"
    if prior.private:
        return "not attempted: clients clip and add noise, which is not modelled"
    if each < FEWEST_PER_SET:
        return "not attempted: the model is too large for own clients of every label set"
    return ""


def _figure(case: Case, clients: Sequence[int], observed: FittedLabelSets, reference: FittedLabelSets, each: int) -> Cell:
    """The figure. Without a leak it is never at its baseline: a fit that is bad, or a wrong answer that fits, shows no safety."""
    truth, classes = [case.truth.label_sets[client] for client in clients], case.prior.classes
    popular = popular_set(truth)
    blank = np.array([float(labels == popular) for labels in truth])
    chances = [chance_of_names(fitted.label_sets, truth, blank, MARGIN, classes, case.seed) for fitted in (observed, reference)]
    fit = f"fit {observed.misfit:.2f} times as bad as own clients' at worst"
    note = (
        f"no known client; {each} own clients for each label set from the model that was sent; {fit}; {case.prior.description}; "
        "baseline: the most common label set for everyone"
    )
    right = [score(fitted, case.truth, clients) for fitted in (observed, reference)]
    figure = cell(
        case, NAME, METRIC, right[0], blank, right[1], margin=MARGIN, share=True, k_known=0, note=note, chances=(chances[0], chances[1]),
    )  # fmt: skip
    if figure.status == "leaks":
        return figure
    why = "the model of clients does not fit" if not observed.fits else "the power to show a leak is not known"
    status: CellStatus = "not_validated" if figure.status == "not_validated" else "inconclusive"
    return replace(figure, status=status, note=f"{why}; {figure.note}")
