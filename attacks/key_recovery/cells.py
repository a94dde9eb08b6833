"""Key recovery on a recorded run: what the view holds, what the attack infers from it, and how that is scored."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from ...contract.transcript import payload_rows
from ...errors import InputError
from ...randomness import stream
from ...types import Array
from ..adversary import AdversaryView, updates_sent
from ..evidence.local_training import LocalTraining, NotRecorded, training_of
from ..evidence.sums import models_sent
from ..evidence.updates import hidden_updates, public_model
from ..figures.leakage import DEALS, Case, Cell, Prior, Truth, cell, nothing
from ..figures.significance import CellStatus, chance, power
from ..labels.label_inference import LabelGuess, histogram_cell, label_set_cell, top_labels
from .attack import Recovery, match_coordinates, recover_in_clear, recover_labels
from .mixed import of_update
from .naming import Knowledge

__all__ = [
    "PERMUTATIONS", "KeyRecoveryGuess", "TransformedUpdates", "cells", "guess", "guess_of", "knowledge", "score_histograms",
    "score_label_sets", "score_structure", "structure_at_random", "structure_chance", "transformed_rounds",
]  # fmt: skip

NAME = "key_recovery"
MARGIN = {"histogram_l1": 0.1, "structure_l1": 0.1, "coordinates_exact": 0.05}
FEWEST_CLIENTS = 4
PERMUTATIONS = ("permutation", "signed_permutation")
"""The transforms that this attack is made for."""


@dataclass(frozen=True, eq=False)
class TransformedUpdates:
    """Updates of one secret transform in a view: `rounds` (n_t, d), the first those of `clients`, in `round`; the model it started from.

    `signed` is public: the kind of the transform. `clear` says that no transform hides the places of coordinates. `parts` are the names of
    what one vector under the transform holds. `local` is the training that was asked for in `round`, None where the view does not say.
    """

    clients: tuple[int, ...]
    rounds: tuple[Array, ...]
    theta0: Array | None
    signed: bool = False
    clear: bool = False
    round: int = 0
    parts: frozenset[str] = frozenset()
    local: LocalTraining | None = None


@dataclass(frozen=True, eq=False)
class KeyRecoveryGuess:
    """Label `histograms` (classes,) by client, uniform where the attacker abstains, and the `structure` it found, shares without names.

    `coordinates` maps seen to true coordinates.
    """

    histograms: Mapping[int, Array] = field(default_factory=dict)
    structure: Mapping[int, Array] = field(default_factory=dict)
    coordinates: Mapping[int, int] = field(default_factory=dict)
    recovery: Recovery | None = None


def transformed_rounds(view: AdversaryView, dimension: int) -> TransformedUpdates | None:
    """The updates of the first round and all later ones under the same transform; None where there are none, one by one.

    The clients of the first sum over enough of them are attacked. Where a colluding client's secret opens the updates, they are clear.
    """
    rounds: dict[str, list[tuple[int, tuple[int, ...], Array, LocalTraining | None]]] = {}
    kinds: dict[str, str] = {}
    parts: dict[str, frozenset[str]] = {}
    theta0 = local = None
    for message in view.messages:
        if message.payload is None:
            continue
        if message.operation == "compute" and message.kind == "parameters":
            local = training_of(message) or local
        if message.operation == "compute" and message.kind == "parameters" and not rounds:
            models = [model for model in models_sent(view, message).values() if model.shape == (dimension,)]
            theta0 = models[0] if models and all(np.array_equal(model, models[0]) for model in models) else None
        if message.operation != "mean" or message.kind not in ("update", "blind update"):
            continue
        rows = updates_sent(view, message)
        if rows is None:
            continue
        name = str(message.context.get("transform", ""))
        kinds.setdefault(name, "" if view.secret_of(name) is not None else str(message.context.get("kind", "")))
        parts.setdefault(name, frozenset(message.context.get("parts", ())))
        rounds.setdefault(name, []).append((message.round, payload_rows(message), rows, local))
    sums = [(name, *entries) for name, entry in rounds.items() for entries in entry]
    enough = [sum_ for sum_ in sums if sum_[1] == sums[0][1] and len(sum_[3]) >= FEWEST_CLIENTS]
    if not enough:
        return None
    name, number, clients, first, asked = enough[0]
    alike = (rows for other, _, _, rows, _ in sums if other == name and rows is not first and rows.shape[1] == first.shape[1])
    later = [rows for rows in alike if len(rows) >= 2]  # a single client has nothing to be compared with
    kind = kinds.get(name, "")
    return TransformedUpdates(clients, (first, *later), theta0, kind == "signed_permutation", kind == "", number, parts[name], asked)


def unmixed(seen: TransformedUpdates, prior: Prior) -> TransformedUpdates:
    """The updates alone, where other parts travel in the same vectors under a permutation and can be separated from them."""
    if seen.clear or prior.config is None or seen.local is None or len(seen.parts) < 2:
        return seen
    samples = np.array([prior.samples_per_client[client] for client in seen.clients])
    columns, factors, lost = of_update(seen.parts, seen.rounds[0], seen.local.clipped(prior.config), samples)
    first, *later = (rows[:, columns] for rows in seen.rounds)
    rounds = (first * factors[:, None], *(rows * np.median(factors) for rows in later))
    return replace(seen, rounds=rounds, signed=seen.signed or lost)


def knowledge(prior: Prior, theta0: Array | None, local: LocalTraining | None = None) -> Knowledge:
    """What the prior and the view say, for the attack on the updates of a round. Without the initial model the attacker takes one of its
    own, which names nothing; without the training that was asked for, what [training] says."""
    if prior.config is None:
        raise InputError(f"{NAME}: the prior has no public configuration, so that nothing can be simulated")
    model = public_model(prior)
    local = (local or LocalTraining(prior.config.train_on(model))).clipped(prior.config)
    train = replace(local.train, on_divergence="stop")
    samples = local.samples(round(float(np.median(list(prior.samples_per_client.values())))))
    sizes = set(prior.labels_per_client.values())
    known = sizes.pop() if len(sizes) == 1 else prior.classes
    start = model.init(prior.seed + 1) if theta0 is None else theta0
    return Knowledge(train, start.astype(model.init(0).dtype), prior.x, prior.y, samples, known if known < prior.classes else None)


def guess(view: AdversaryView | None, prior: Prior) -> KeyRecoveryGuess:
    """The attack. Without a view it knows no clients, and `score` takes equal shares for everyone."""
    if view is None:
        return KeyRecoveryGuess()
    seen = transformed_rounds(view, public_model(prior).dimension)
    if seen is None:
        return KeyRecoveryGuess()
    if seen.local is None:
        raise NotRecorded("the transcript does not say how clients were asked to train")
    seen = unmixed(seen, prior)
    known, rng = knowledge(prior, seen.theta0, seen.local), stream(prior.seed, "key recovery")
    if seen.clear:
        recovery = recover_in_clear(seen.rounds[0][:, : known.theta0.size], known, rng)
    else:
        recovery = recover_labels(seen.rounds, known, rng, signed=seen.signed)
    return guess_of(recovery, seen)


def guess_of(recovery: Recovery, seen: TransformedUpdates) -> KeyRecoveryGuess:
    """The attack's guesses by client; none where it abstains."""
    shares = dict(zip(seen.clients, recovery.structure.proportions, strict=True))
    if recovery.histograms is None or recovery.response is None or recovery.abstains:
        return KeyRecoveryGuess({}, shares, {}, recovery)
    pairs = match_coordinates(seen.rounds[0], recovery.response.predict(recovery.histograms), signed=seen.signed)
    return KeyRecoveryGuess(dict(zip(seen.clients, recovery.histograms, strict=True)), shares, pairs, recovery)


def _histogram(guessed: KeyRecoveryGuess, client: int, classes: int) -> Array:
    return guessed.histograms.get(client, np.full(classes, 1.0 / classes))


def sets_of(guessed: KeyRecoveryGuess, prior: Prior, clients: list[int]) -> list[frozenset[int]]:
    """The labels of largest share of each client; none for one without a guess."""
    sizes, histograms = prior.labels_per_client, guessed.histograms
    return [top_labels(histograms[client], sizes[client]) if client in histograms else frozenset() for client in clients]


def score_label_sets(guessed: KeyRecoveryGuess, truth: Truth, prior: Prior, clients: list[int]) -> Array:
    """1 where the labels of largest share are a client's label set; 0 for one without a guess."""
    sets = sets_of(guessed, prior, clients)
    return np.array([float(labels == truth.label_sets[client]) for labels, client in zip(sets, clients, strict=True)])


def score_histograms(guessed: KeyRecoveryGuess, truth: Truth, clients: list[int], classes: int) -> Array:
    """Σ |q̂ − q| by client, at most 2."""
    return np.array([float(np.abs(_histogram(guessed, client, classes) - truth.histogram(client)).sum()) for client in clients])


def score_structure(guessed: KeyRecoveryGuess, truth: Truth, clients: list[int], classes: int) -> Array:
    """The same under the best renaming of all columns, which the scorer chooses: what is known before anything has a name."""
    flat = np.full(classes, 1.0 / classes)
    shares = np.stack([guessed.structure.get(client, flat) for client in clients])
    real = np.stack([truth.histogram(client) for client in clients])
    cost = np.abs(shares[:, :, None] - real[:, None, :]).sum(axis=0)
    columns, labels = linear_sum_assignment(cost)
    named = np.empty_like(shares)
    named[:, labels] = shares[:, columns]
    return np.asarray(np.abs(named - real).sum(axis=1))


def structure_at_random(guessed: KeyRecoveryGuess, truth: Truth, clients: list[int], classes: int, seed: int, times: int = DEALS) -> Array:
    """`score_structure` of the same structure with its clients permuted, each time under its own best renaming, (times, n).

    Their mean is the no-view baseline: some renaming fits any structure in part, so equal shares, which none helps, would be less than
    ignorance gives. How many are as good is its p: few clients in few groups are often permuted to what they were.
    """
    rng = stream(seed, "structure dealt at random")
    flat = np.full(classes, 1.0 / classes)
    shares = [guessed.structure.get(client, flat) for client in clients]
    dealt = [dict(zip(clients, [shares[i] for i in rng.permutation(len(shares))], strict=True)) for _ in range(times)]
    return np.array([score_structure(KeyRecoveryGuess({}, structure), truth, clients, classes) for structure in dealt])


def structure_chance(real: Array, dealt: Array) -> float:
    """The p of a structure with scores (n,), from the same permuted (t, n), and by a test over clients: the larger one."""
    as_good = int((dealt.mean(axis=1) <= real.mean() + 1e-9).sum())
    return max((1 + as_good) / (1 + len(dealt)), chance(-real, -dealt.mean(axis=0), MARGIN["structure_l1"]))


def exact_share(guessed: KeyRecoveryGuess, seen: TransformedUpdates, clear: TransformedUpdates, clients: list[int]) -> float:
    """Of the coordinates the attacker places, the share that is right for `clients`, by the same run in the clear; 0 if it places none."""
    if not guessed.coordinates:
        return 0.0
    pairs = np.array(list(guessed.coordinates.items()))
    rows, clear_rows = ([of.clients.index(client) for client in clients] for of in (seen, clear))
    observed, reference = seen.rounds[0][rows][:, pairs[:, 0]], clear.rounds[0][clear_rows][:, pairs[:, 1]]
    return float(np.mean(np.abs(np.abs(observed) - np.abs(reference)).max(axis=0) <= 1e-4 * np.abs(reference).max(axis=0)))


def _structure_cell(case: Case, observed: KeyRecoveryGuess, reference: KeyRecoveryGuess, clients: list[int], note: str) -> Cell:
    """Structure alone, beside the same structure of permuted clients; the reference beside its own."""
    truth, classes, guesses = case.truth, case.prior.classes, (observed, reference)
    real = [score_structure(guessed, truth, clients, classes) for guessed in guesses]
    dealt = [structure_at_random(guessed, truth, clients, classes, case.seed) for guessed in guesses]
    blank, margin = [scores.mean(axis=0) for scores in dealt], MARGIN["structure_l1"]
    first, second = (structure_chance(*pair) for pair in zip(real, dealt, strict=True))
    words = f"under the best renaming of all labels; {note}; baseline: the same structure, its clients permuted, each time so renamed"
    made = cell(
        case, NAME, "structure_l1", real[0], blank[0], real[1], reference_blank=blank[1], margin=margin, lower_is_better=True, note=words,
        chances=(first, second),
    )  # fmt: skip
    return replace(made, power=power(-real[0], -blank[0], -real[1], -blank[1], margin))


def _open(figure: Cell) -> Cell:
    """A figure of an attack that abstains, or was not made for this transform: never at its baseline, since that would show nothing."""
    return replace(figure, status="inconclusive", power=None) if figure.status == "at_baseline" else figure


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """Structure, label sets, histograms and coordinates from updates under a secret permutation of their coordinates."""
    prior, truth = case.prior, case.truth
    if prior.config is None:
        return [nothing(case, NAME, "label_set_accuracy", "not attempted: the prior has no public configuration")], None
    dimension = public_model(prior).dimension
    seen, clear = transformed_rounds(case.view, dimension), transformed_rounds(case.reference, dimension)
    if seen is None or clear is None:
        why = f"updates of single clients, {FEWEST_CLIENTS} or more under one transform, are not in this view"
        why = f"not attempted: {why}; fewer are" if hidden_updates(case.view) else why
        return [nothing(case, NAME, "label_set_accuracy", why)], None
    if seen.clear:
        why = "updates are in the clear here: there is no key to recover, and label_inference reads them"
        return [nothing(case, NAME, "label_set_accuracy", why)], None
    if clear.rounds[0].shape[1] != dimension:
        why = "not attempted: updates are in this view, but of a part of the model only; this part may show labels"
        return [nothing(case, NAME, "label_set_accuracy", why)], None
    if len(np.unique(prior.y)) < prior.classes:
        why = "not attempted: the auxiliary data lack samples of some labels, of which the attacker's own clients need all"
        return [nothing(case, NAME, "label_set_accuracy", why)], None
    clients = sorted((set(seen.clients) & set(clear.clients)) - set(case.view.coalition))
    if not clients:
        return [nothing(case, NAME, "label_set_accuracy", "the updates of clients that do not collude are not in this view")], None
    seen = unmixed(seen, prior)
    observed, reference = guess(case.view, prior), guess(case.reference, prior.unprotected())
    recovery = observed.recovery
    assert recovery is not None  # there were updates
    sure = f"the attacker's own confidence {recovery.confidence:.2f}" + (", so it abstains" if recovery.abstains else "")
    note = f"structure by {recovery.structure.by}; {sure}; {len(seen.rounds)} round(s) under one transform; {prior.description}"
    both = (observed, reference)
    guesses = (observed, KeyRecoveryGuess(), reference)
    label_sets = [dict(zip(clients, sets_of(guessed, prior, clients), strict=True)) for guessed in both]
    named = [LabelGuess({client: _histogram(guessed, client, prior.classes) for client in clients}) for guessed in guesses]
    figures = [
        histogram_cell(case, NAME, clients, named, f"{note}; baseline: equal shares", together=True),
        _structure_cell(case, observed, reference, clients, note),
        label_set_cell(case, NAME, clients, label_sets, note, together=True),
    ]  # fmt: skip
    if recovery.abstains or case.view.protection.sum not in PERMUTATIONS:
        figures = [_open(figure) for figure in figures]
    exact = exact_share(observed, seen, clear, clients)
    placed = f"of {len(observed.coordinates)} coordinates placed" if observed.coordinates else "no coordinate placed"
    status: CellStatus = "leaks" if exact > MARGIN["coordinates_exact"] else "inconclusive"
    figures.append(
        Cell(
            NAME, case.view.adversary, case.protection, "coordinates_exact", exact, None, None, 0.0, 1.0, status, seeds=(case.seed,),
            note=f"{placed} (a seed in which none is counts as 0); {note}", margin=MARGIN["coordinates_exact"], reference_baseline=0.0,
            exact=True,
        )
    )  # fmt: skip
    shown = [client for client in clients if client in observed.histograms]
    if not shown:
        return figures, None
    return figures, {
        "clients": np.array(shown),
        "label_truth": np.stack([truth.histogram(client) for client in shown]),
        "label_guess": np.stack([observed.histograms[client] for client in shown]),
    }
