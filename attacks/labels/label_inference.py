"""Label inference: which labels a client has, and how many of each, from its updates.

Source: how an update of the head's bias is read as label shares is in `label_readings`; it takes the loss to be softmax cross-entropy.

What it proves: an update in the clear shows a client's labels. The mean update of a cluster follows from two of its models and shows the
labels of the cluster as a whole, also where the members are hidden (`aggregate_histogram_l1`: one figure a cluster, nothing about a
member), and so those of the members where the members are alike. Sums over changing cohorts are one system of equations for single clients'
shares (`label_sums`): many rounds of secure sums show labels of clients that no single sum shows. If each round has noise of its own
(unit = "sample"), all rounds of the view are one system of equations, solved once around the auxiliary shares (`noisy_shares`).

What it does not prove: anything about single samples. With unknown numbers of samples or another loss, the shares are wrong, the label sets
less so. Updates under a transform whose secret the adversary lacks are not attempted: their coordinates have no names.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy import stats

from ...engine.models import Model
from ...randomness import stream
from ...types import Array
from ..adversary import AdversaryView, same_messages
from ..evidence.coalition import cohorts_assumed
from ..evidence.local_training import trainings_in
from ..evidence.noisy_shares import Readings, shares_under_noise
from ..evidence.sums import CohortSum
from ..evidence.trained_by import trained_by
from ..evidence.trained_models import label_shares_sent
from ..evidence.updates import (
    ClientStep,
    hidden_updates,
    less_known,
    mean_updates,
    public_model,
    step_of,
    steps_in,
    unread,
    unread_movement,
)
from ..figures.leakage import Case, Cell, Prior, Truth, cell, chance_of_names, nothing, popular_set
from ..figures.significance import RATE, CellStatus, chance, chance_of_count, chance_of_matching, chance_of_reading, chance_of_renaming
from .class_owners import cells as owner_cells
from .class_owners import owned_in
from .label_readings import (
    auxiliary_shares,
    bias_span,
    class_probabilities,
    counts_from_bias,
    is_learned,
    is_summed,
    labels_from_bias,
    readings_of,
    shares_of,
    steps_scale,
    top_labels,
)
from .label_sums import SumRead, distinct_sums, noisy_shares_in, planted, shares_in, sums_read, words_of
from .sparse_shares import least_labels

__all__ = [
    "auxiliary_shares", "bias_span", "cells", "class_probabilities", "counts_from_bias", "guess", "labels_from_bias", "perfect_chances",
    "readings_of", "score_l1", "shares_of", "steps_scale", "top_labels",
]  # fmt: skip

NAME = "label_inference"
AGGREGATE = "aggregate_histogram_l1"
MARGIN = {"label_set_accuracy": 0.1, "histogram_l1": 0.1, AGGREGATE: 0.1}
PLANTS, POWER = 30, 0.9
"""So many leaks are planted to show an attack's power, and the least power that lets a figure be called at its baseline."""
TOSSED = 40
"""So many leaks are planted by tosses, which need no attack."""


# --- the attack ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LabelGuess:
    """Label shares (classes,) by client."""

    shares: Mapping[int, Array] = field(default_factory=dict)


def guess(view: AdversaryView | None, prior: Prior, clients: Sequence[int], model: Model, rounds: int) -> LabelGuess:
    """Label shares from the first `rounds` steps of each client, or from all of them where they have noise (`is_summed`).

    Without a view: the shares of the auxiliary data, for everyone.
    """
    return _guess(None if view is None else steps_in(view, model.dimension), prior, clients, model, rounds)


def _guess(steps: Mapping[int, Sequence[ClientStep]] | None, prior: Prior, clients: Sequence[int], model: Model, rounds: int) -> LabelGuess:
    blank = auxiliary_shares(prior)
    if steps is None:
        return LabelGuess(dict.fromkeys(clients, blank))
    if not are_single(steps):
        sums = distinct_sums(steps, prior)
        return _of_members(sums, sums_read(sums, prior, model), {}, clients, prior, model)
    if is_summed(prior):
        return _summed({client: less_known(steps[client], prior, model) for client in clients}, prior, model)
    shares = {}
    for client in clients:
        first = less_known(steps[client], prior, model)[:rounds]
        estimates = [shares_of(step, prior, model, prior.labels_per_client[client]) for step in first]
        shares[client] = least_labels(np.mean(estimates, axis=0), prior.labels_per_client[client]) if estimates else blank
    return LabelGuess(shares)


def _of_members(
    sums: Sequence[ClientStep], read: Sequence[SumRead], own: Mapping[int, Array], clients: Sequence[int], prior: Prior, model: Model
) -> LabelGuess:
    """From all sums, as they are `read`, as one system; `own` are the label shares (classes,) of colluders."""
    blank = auxiliary_shares(prior)
    if is_summed(prior):
        shares = noisy_shares_in(read, readings_of(sums, prior, model), own, blank)
    else:
        shares = shares_in(read, own, blank, prior.labels_per_client)
    return LabelGuess({client: shares.get(client, blank) for client in clients})


def are_single(steps: Mapping[int, Sequence[ClientStep]]) -> bool:
    """Whether each step is one client's own."""
    return all(len(step.members) == 1 for client_steps in steps.values() for step in client_steps)


def _summed(steps: Mapping[int, Sequence[ClientStep]], prior: Prior, model: Model) -> LabelGuess:
    """From all rounds at once, where updates have noise."""
    made: dict[tuple[int, ...], Readings] = {}  # what mean updates say is the same for all who were in the same ones
    predicted: dict[int, Array] = {}
    readings = {}
    for client, client_steps in steps.items():
        if client_steps:
            same = tuple(id(step.update) for step in client_steps)
            if same not in made:
                made[same] = readings_of(client_steps, prior, model, made=predicted)
            readings[client] = made[same]
    shares = shares_under_noise(readings, auxiliary_shares(prior)) if readings else {}
    return LabelGuess({client: shares.get(client, auxiliary_shares(prior)) for client in steps})


def score_sets(guess: LabelGuess, truth: Truth, prior: Prior, clients: Sequence[int]) -> Array:
    """1 where the labels of largest share are a client's label set."""
    sizes = prior.labels_per_client
    return np.array([float(top_labels(guess.shares[c], sizes[c]) == truth.label_sets[c]) for c in clients])


def score_l1(guess: LabelGuess, truth: Truth, clients: Sequence[int]) -> Array:
    """Σ |q̂ − q| by client, at most 2."""
    return np.array([float(np.abs(guess.shares[c] - truth.histogram(c)).sum()) for c in clients])


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """Label sets and histograms from updates, or from the mean updates of clusters where only these can be seen."""
    prior = case.prior
    if owned_in(case.reference):
        return owner_cells(case, NAME), None
    model = None if prior.config is None else public_model(prior)
    if model is None:
        return [nothing(case, NAME, "histogram_l1", "not attempted: the training settings are not known")], None
    same = same_messages(case.view, case.reference)
    observed = steps_in(case.view, model.dimension, case, parts=True)
    reference = observed if same else steps_in(case.reference, model.dimension, case, parts=True)
    whole = aggregate_cell(case, model)
    known = sorted((set(observed) & set(reference)) - set(case.view.coalition))
    clients = [client for client in known if less_known(observed[client], prior, model)]
    hidden = hidden_updates(case.view)
    if hidden or not clients:
        why = "no single update, and no mean update of a cluster whose members are known, can be read in this view"
        if hidden:
            why = (
                f"not attempted: updates are under a secret {hidden}, which hides their coordinates; key_recovery reads permuted ones, "
                "gram_updates the inner products of all"
            )
        why = unread(case.view, model.dimension) or why
        if known and not hidden:
            why = "not attempted: updates are in this view, but not the turns before them, from which clients' corrections follow"
        return [nothing(case, NAME, "histogram_l1", why), whole], None
    rounds, trainings = case.budget.rounds, trainings_in(case.view)
    own = {client: case.truth.histogram(client) for client in case.view.coalition}
    apart = are_single({client: observed[client] for client in clients})
    others = {client: steps for client, steps in observed.items() if client not in own}
    sums = [] if apart else distinct_sums(others, prior)
    read = sums_read(sums, prior, model)
    source = f"from single updates, {_which_rounds(prior, rounds)}"
    if not apart:
        which = f"{words_of(read, own)}{', with its noise' if is_summed(prior) else ''}"
        source = f"from mean updates: members that no sum tells apart get one guess{trainings.not_modelled()}; {which}"
    source += "; who was in a sum is assumed to be known to its members" if cohorts_assumed(case) else ""
    if learned := next((training.train for training in trainings.all if is_learned(training)), None):
        why = f"{learned.optimizer.capitalize()} is not linear in gradients" if learned.optimizer != "sgd" else "the last layer has no bias"
        source += f", learned from the attacker's own clients, since {why}"
    first = _of_members(sums, read, own, clients, prior, model) if read else _guess(observed, prior, clients, model, rounds)
    guesses = [first, _guess(None, prior, clients, model, rounds)]
    guesses.append(first if reference is observed else _guess(reference, prior.unprotected(), clients, model, rounds))
    sent = [label_shares_sent(view, model.dimension, prior.classes) for view in (case.view, case.reference)]
    if any(sent):
        source += "; where clients send sums of weights by label beside models, these are read, not inferred"
        guesses = [LabelGuess({**guesses[0].shares, **sent[0]}), guesses[1], LabelGuess({**guesses[2].shares, **sent[1]})]
    figures, arrays = label_cells(case, NAME, clients, guesses, f"{source}; {prior.description}", together=not apart)
    if not apart and any(figure.status == "at_baseline" for figure in figures):
        updates = reference if are_single(reference) else {}
        single = {(step.round, client): step.update for client, client_steps in updates.items() for step in client_steps}
        blank = auxiliary_shares(prior)
        made = iter(()) if prior.private else planted(
            read, single, bias_span(model), own, blank, prior.labels_per_client, case.seed, PLANTS
        )  # fmt: skip
        weaker = (LabelGuess({client: shares.get(client, guesses[1].shares[client]) for client in clients}) for shares in made)
        figures = _with_power(case, figures, clients, guesses[1], weaker)
    return [*figures, whole], arrays


def _with_power(
    case: Case, figures: Sequence[Cell], clients: list[int], blank: LabelGuess, weaker: Iterable[LabelGuess]
) -> list[Cell]:  # fmt: skip
    """Figures at their baseline with their power, from what was found where leaks were planted (`weaker`); below `POWER` inconclusive.

    All of `PLANTS` have to be shown for it, so that none is attacked after each figure has missed a leak.
    """
    open_ = [figure.metric for figure in figures if figure.status == "at_baseline"]
    scored: dict[str, list[tuple[float, bool]]] = {metric: [] for metric in open_}
    for guessed in weaker:
        for metric in open_:
            scored[metric].append(_planted_score(case, metric, clients, blank, guessed))
        if all(not all(shown for _, shown in pairs) for pairs in scored.values()):
            break
    return [_of_planted(figure, scored[figure.metric]) if figure.metric in scored else figure for figure in figures]


def _planted_score(case: Case, metric: str, clients: list[int], blank: LabelGuess, guessed: LabelGuess) -> tuple[float, bool]:
    """The figure where a leak was planted, and whether it is significant."""
    prior, truth = case.prior, case.truth
    if metric == "histogram_l1":
        beside, scores = score_l1(blank, truth, clients), score_l1(guessed, truth, clients)
        luck = share_chance(guessed, beside, blank.shares[clients[0]], case, clients)
    else:
        clients = partial_sets(case, clients)
        popular = popular_set([truth.label_sets[client] for client in clients])
        beside = np.array([float(truth.label_sets[client] == popular) for client in clients])
        scores = score_sets(guessed, truth, prior, clients)
        luck = set_chance(
            [top_labels(guessed.shares[client], prior.labels_per_client[client]) for client in clients], beside, case, clients
        )
    return float(np.mean(scores)), luck < RATE


def _of_planted(figure: Cell, scored: Sequence[tuple[float, bool]]) -> Cell:
    """A figure at its baseline with its power, from the figures of planted leaks and whether these are significant."""
    if not scored:
        words = f"{figure.note}; its power is not known, since no leak of such sums could be planted"
        return replace(figure, status="inconclusive", note=words)
    shown = sum(significant for _, significant in scored)
    low = float(stats.binomtest(shown, len(scored), alternative="greater").proportion_ci(0.95, method="exact").low)
    words = (
        f"{figure.note}; planted leak: each sum without one member drawn at random, shown in {shown} of {len(scored)} "
        f"(figure there {float(np.mean([score for score, _ in scored])):.2f}), conservative power {low:.2f}"
    )
    status: CellStatus = "at_baseline" if low >= POWER else "inconclusive"
    return replace(figure, status=status, power=shown / len(scored), power_low=low, note=words)


def _which_rounds(prior: Prior, rounds: int) -> str:
    """Which rounds are attacked, for a note."""
    return "all rounds as one system of equations, with its noise" if is_summed(prior) else f"the first {rounds} round(s)"


# --- clusters as a whole ------------------------------------------------------------------------------------------------------------


def aggregate_cell(case: Case, model: Model) -> Cell:
    """The label histogram of each cluster as a whole, from the successive models it was sent."""
    prior = case.prior
    scored = [_aggregated(case, view, model) for view in (case.view, case.reference)]
    tables = [np.array([[float(np.abs(shares - truth).sum()) for _, truth in pairs] for shares, _ in pairs]) for pairs in scored]
    errors = [np.diag(table) if len(table) else np.zeros(0) for table in tables]
    if not len(errors[0]) or not len(errors[1]):
        why = "no two models of one cluster can be read in this view, or it is unknown who trained them"
        return nothing(case, NAME, AGGREGATE, unread_movement(case.view, model.dimension) or why)
    blanks = [np.array([float(np.abs(auxiliary_shares(prior) - truth).sum()) for _, truth in estimates]) for estimates in scored]
    note = (
        f"{len(errors[0])} cluster(s), each as a whole: nothing about a member; {_which_rounds(prior, case.budget.rounds)}; "
        f"{prior.description}; baseline: the label shares of the auxiliary data"
    )
    first, second = (chance_of_clusters(table, blank, case.seed) for table, blank in zip(tables, blanks, strict=True))
    note += trainings_in(case.view).not_modelled()
    return cell(
        case, NAME, AGGREGATE, errors[0], blanks[0], errors[1], reference_blank=blanks[1], margin=MARGIN[AGGREGATE], lower_is_better=True,
        note=note, chances=(first, second),
    )  # fmt: skip


def chance_of_clusters(table: Array, blank: Array, seed: int) -> float:
    """How probable it is that k histograms err as little as the diagonal of `table` (k, k), of guess i for cluster j, beside `blank` (k,).

    Few clusters, and the shares of one histogram, are not as many independent scores: the same guesses dealt to the clusters at random
    have to err more seldom as little, and a test over clusters has to show the gain as well. The larger p counts.
    """
    dealt = chance_of_matching(table, stream(seed, "clusters dealt again"))
    return max(dealt, chance(-np.diag(table), -blank, MARGIN[AGGREGATE]))


def _aggregated(case: Case, view: AdversaryView, model: Model) -> list[tuple[Array, Array]]:
    """Label shares guessed and true, by cluster that the view shows two models of."""
    means = mean_updates(view, model.dimension)
    prior = case.prior.unprotected() if view is case.reference else case.prior
    by_label: dict[int, list[tuple[CohortSum, list[int]]]] = {}
    for mean, people in zip(means, trained_by(case, view, means), strict=True):
        if set(people) - set(case.view.coalition):
            by_label.setdefault(mean.label, []).append((mean, people))
    kept = {label: line if is_summed(prior) else line[: case.budget.rounds] for label, line in by_label.items()}
    guesses = _of_clusters({label: [mean for mean, _ in line] for label, line in kept.items()}, view, prior, model)
    pairs = []
    for label, line in kept.items():
        counts = np.sum([case.truth.label_counts[client] for _, people in line for client in people], axis=0)
        pairs.append((guesses[label], counts / counts.sum()))
    return pairs


def _of_clusters(sums: Mapping[int, Sequence[CohortSum]], view: AdversaryView, prior: Prior, model: Model) -> dict[int, Array]:
    """Label shares of each cluster by its mean updates."""
    steps: dict[int, list[ClientStep]] = {}
    gaps: dict[int, list[int]] = {}
    for label, means in sums.items():
        for mean in means:
            steps.setdefault(label, []).append(step_of(mean))
            gaps.setdefault(label, []).append(mean.sums(view))
    if is_summed(prior):
        readings = {label: readings_of(cluster_steps, prior, model, gaps[label]) for label, cluster_steps in steps.items()}
        return shares_under_noise(readings, auxiliary_shares(prior)) if readings else {}
    return {
        label: np.mean([shares_of(step, prior, model, prior.classes, gap) for step, gap in zip(line, gaps[label], strict=True)], axis=0)
        for label, line in steps.items()
    }


def partial_sets(case: Case, clients: Sequence[int]) -> list[int]:
    """The clients that lack a label."""
    return [client for client in clients if case.prior.labels_per_client[client] < case.prior.classes]


def set_chance(sets: Sequence[frozenset[int]], beside: Array, case: Case, clients: Sequence[int], *, together: bool = True) -> float:
    """How probable it is that label sets are right so much more often than the guesses right `beside` (n,).

    `together`: they were named at once (`chance_of_names`). Else each was read by itself: the larger p of their number
    (`chance_of_count`) and of `chance_of_reading`.
    """
    real, margin, classes = [case.truth.label_sets[client] for client in clients], MARGIN["label_set_accuracy"], case.prior.classes
    if together:
        return chance_of_names(sets, real, beside, margin, classes, case.seed)
    right = np.array([float(named == true) for named, true in zip(sets, real, strict=True)])
    named, true = (np.array([[float(label in one) for label in range(classes)] for one in many]) for many in (sets, real))
    rng = stream(case.seed, "label sets renamed")
    return max(chance_of_count(right, beside, margin), chance_of_reading(named, true, np.zeros(classes), _groups(case, clients), rng))


def share_chance(
    inferred: LabelGuess, beside: Array, centre: Array, case: Case, clients: Sequence[int], *, together: bool = True
) -> float:  # fmt: skip
    """How probable it is that label shares err so much less than the errors `beside` (n,): by a test over clients and by one of dependent
    clients, the larger p.

    The second is a random renaming of all labels around the `centre` (classes,), the best guess without a view, where shares were named
    `together`; else `chance_of_reading`.
    """
    guessed, real = (np.stack([of(client) for client in clients]) for of in (inferred.shares.__getitem__, case.truth.histogram))
    rng = stream(case.seed, "shares renamed")
    luck = chance_of_renaming(guessed, real, centre, rng) if together else (
        chance_of_reading(guessed, real, centre, _groups(case, clients), rng)
    )  # fmt: skip
    return max(chance(-np.abs(guessed - real).sum(axis=1), -beside, MARGIN["histogram_l1"]), luck)


def _groups(case: Case, clients: Sequence[int]) -> Array:
    """The true group (n,) of each client; each client its own where groups are not known."""
    return np.array([case.truth.groups.get(client, -1 - client) for client in clients])


def perfect_chances(case: Case, clients: Sequence[int], blank: LabelGuess) -> dict[str, float]:
    """The p of a perfect recovery, each client read by itself, by figure of `label_cells`.

    Where the guesses `blank` are nearly right, even a perfect recovery is no leak.
    """
    partial, truth = partial_sets(case, clients), case.truth
    perfect = LabelGuess({client: truth.histogram(client) for client in clients})
    chances = {
        "histogram_l1": share_chance(perfect, score_l1(blank, truth, clients), blank.shares[clients[0]], case, clients, together=False)
    }
    if partial:
        sets = [truth.label_sets[client] for client in partial]
        popular = popular_set(sets)
        beside = np.array([float(labels == popular) for labels in sets])
        chances["label_set_accuracy"] = set_chance(sets, beside, case, partial, together=False)
    return chances


def _planted_power(made: Cell, case: Case, chance_where: Callable[[Array], float], clients: Sequence[int]) -> Cell:
    """A figure at its baseline with its power: how often a leak half as large would be significant.

    A toss decides for each client whether it is guessed as on the unprotected run; `chance_where` gives the p of such guesses.
    """
    if made.status != "at_baseline":
        return made
    rng = stream(case.seed, "label leaks planted by tosses")
    return replace(made, power=float(np.mean([chance_where(rng.random(len(clients)) < 0.5) < RATE for _ in range(TOSSED)])))


def label_set_cell(
    case: Case, name: str, clients: Sequence[int], guesses: Sequence[Mapping[int, frozenset[int]]], note: str, *, together: bool
) -> Cell:  # fmt: skip
    """Label sets of the clients that lack a label, guessed with the view and on the unprotected view; `together` as in `set_chance`."""
    metric, truth = "label_set_accuracy", case.truth
    partial = partial_sets(case, clients)
    if not partial:
        return nothing(case, name, metric, "every client has all labels: there is no label set to find")
    popular = popular_set([truth.label_sets[client] for client in partial])
    observed, reference = ([sets[client] for client in partial] for sets in guesses)
    real = [truth.label_sets[client] for client in partial]
    scores, beside = (
        np.array([float(a == b) for a, b in zip(sets, real, strict=True)]) for sets in (observed, reference)
    )  # fmt: skip
    blank = np.array([float(labels == popular) for labels in real])

    def chance_where(tossed: Array) -> float:
        mixed = [b if toss else a for a, b, toss in zip(observed, reference, tossed, strict=True)]
        return set_chance(mixed, blank, case, partial, together=together)

    none, all_ = np.zeros(len(partial), bool), np.ones(len(partial), bool)
    made = cell(
        case, name, metric, scores, blank, beside, margin=MARGIN[metric], share=True, chances=(chance_where(none), chance_where(all_)),
        note=f"{note}; baseline: the most common label set for everyone",
    )  # fmt: skip
    return _planted_power(made, case, chance_where, partial)


def histogram_cell(case: Case, name: str, clients: list[int], guesses: Sequence[LabelGuess], note: str, *, together: bool) -> Cell:
    """Histograms of clients by `guesses` with the view, without it and on the unprotected view; `together` as in `share_chance`."""
    l1, margin = [score_l1(guessed, case.truth, clients) for guessed in guesses], MARGIN["histogram_l1"]
    observed, blank, reference = guesses
    centre = blank.shares[clients[0]]

    def chance_where(tossed: Array) -> float:
        mixed = {client: (reference if toss else observed).shares[client] for client, toss in zip(clients, tossed, strict=True)}
        return share_chance(LabelGuess(mixed), l1[1], centre, case, clients, together=together)

    chances = (chance_where(np.zeros(len(clients), bool)), chance_where(np.ones(len(clients), bool)))
    made = cell(case, name, "histogram_l1", *l1, margin=margin, lower_is_better=True, note=note, chances=chances)
    return _planted_power(made, case, chance_where, clients)


def label_cells(
    case: Case, name: str, clients: list[int], guesses: list[LabelGuess], note: str, *, together: bool = False
) -> tuple[list[Cell], dict[str, Array]]:  # fmt: skip
    """Histograms and label sets of clients, guessed with, without and on the unprotected view; the cells and what a picture needs.

    `together`: guesses of several clients are of one reading, so that they are right or wrong together.
    """
    prior, truth = case.prior, case.truth
    both = (guesses[0], guesses[2])
    words = f"{note}; baseline: the label shares of the auxiliary data"
    made = histogram_cell(case, name, clients, guesses, words, together=together)

    sets = [{client: top_labels(guessed.shares[client], prior.labels_per_client[client]) for client in clients} for guessed in both]
    scored = label_set_cell(case, name, clients, sets, note, together=together)
    arrays = {
        "clients": np.array(clients),
        "label_truth": np.stack([truth.histogram(c) for c in clients]),
        "label_guess": np.stack([guesses[0].shares[c] for c in clients]),
    }
    return [made, scored], arrays
