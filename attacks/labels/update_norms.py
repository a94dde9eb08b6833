"""Sample counts from the lengths of updates, which every orthonormal transform keeps, and from weights (`sample_totals`).

A client with more samples takes more steps, or steps of less noise, so the length of its first update depends on their number. The attacker
trains clients of its own with known numbers of auxiliary samples from the public initial model, and reads a victim's number off the curve
of lengths.

Source: ours; that orthonormal transforms keep lengths is stated by every scheme that uses them (Sattler et al. 2019 among others).

What it proves: a transform hides directions, not lengths. What it does not prove: anything where all clients take equally many steps, and
lengths depend on labels more than on numbers. The length of a clipped update means little, so clipped updates are not attempted.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ...engine import Engine, Streams, TaskInput
from ...engine.threads import one_thread
from ...randomness import Stream, stream
from ...tasks.training import Train
from ...types import Array, ClientData
from ..adversary import UPDATES, AdversaryView, parts_in, updates_sent
from ..evidence.local_training import NotRecorded
from ..evidence.updates import hidden_updates, public_model, single_steps, steps_in, trainings_of, unread
from ..figures.leakage import Case, Cell, Prior, cell, nothing
from ..figures.significance import FEWEST_SCORES, chance_of_orders, orders
from .sample_totals import counts_in, totals_in

__all__ = ["cells", "counts_from_lengths", "lengths_in"]

NAME = "update_norms"
ERROR, ORDER, EXACT = "samples_error", "samples_order_auc", "samples_exact"
"""|log(n̂ / n)|, of which the median is the best guess for everyone: of |n̂ − n| / n a smaller number would be, whatever it is made from."""
MARGIN = {ERROR: 0.1, ORDER: 0.05, EXACT: 0.1}
PRETENDED, FEWEST, MOST = 96, 4, 512
"""So many clients of the attacker's own, with from `FEWEST` to `MOST` samples."""


# --- the mathematics, for lengths from anywhere -------------------------------------------------------------------------------------


def counts_from_lengths(lengths: Array, made_lengths: Array, made_counts: Array) -> Array:
    """Numbers of samples (n,) from the `lengths` (n,) of updates, given the lengths (m,) and counts (m,) of known clients.

    Fits a parabola of log count over log length. Results are clipped to the range of the known counts.
    """
    x = np.log(np.maximum(made_lengths, 1e-300))
    curve = np.polynomial.Polynomial.fit(x, np.log(made_counts), 2)
    logs = curve(np.clip(np.log(np.maximum(lengths, 1e-300)), x.min(), x.max()))
    return np.asarray(np.exp(np.clip(logs, np.log(made_counts.min()), np.log(made_counts.max()))))


# --- the attack ---------------------------------------------------------------------------------------------------------------------


def lengths_in(view: AdversaryView) -> dict[int, float]:
    """The length of each client's update of the first round with updates, as far as the view has updates in any form.

    Transformed vectors that hold other parts as well, and are not opened, are left out.
    """
    lengths: dict[int, float] = {}
    first: int | None = None
    for message in view.messages:
        if message.payload is None or message.operation != "mean" or message.kind not in ("update", "blind update"):
            continue
        if first is not None and message.round != first:
            break
        parts = parts_in(view, message)
        if "blind" in parts and not set(message.context.get("parts", ())) <= set(UPDATES):
            continue
        rows = updates_sent(view, message)
        if rows is not None:
            first = message.round
            clients = message.payload["clients"].tolist() if "clients" in message.payload else message.clients
            lengths |= dict(zip(map(int, clients), np.linalg.norm(rows, axis=1).tolist(), strict=True))
    return lengths


def lengths_of(case: Case, view: AdversaryView) -> dict[int, float]:
    """As `lengths_in`; where a view has no updates of others, of those that follow from its sums of the first round."""
    lengths = lengths_in(view)
    if set(lengths) - set(view.coalition) or hidden_updates(view):
        return lengths
    steps = single_steps(steps_in(view, public_model(case.prior).dimension, case))
    first = min((step.round for client_steps in steps.values() for step in client_steps), default=0)
    return {client: float(np.linalg.norm(step.update)) for client, (step, *_) in steps.items() if step.round == first}


def pretended_lengths(train: Train, prior: Prior, rng: Stream) -> tuple[Array, Array]:
    """Lengths (m,) of the updates of clients of the attacker's own, and their numbers of samples (m,)."""
    assert prior.config is not None  # checked by the caller
    start = train.model.init(prior.config.run.seed)
    pools = {int(label): np.flatnonzero(prior.y == label) for label in np.unique(prior.y)}
    sizes = sorted(prior.labels_per_client.values())
    inputs, counts = [], np.unique(np.geomspace(FEWEST, MOST, PRETENDED).round().astype(int))
    key = int(rng.integers(2**31))
    for i, count in enumerate(counts):
        chosen = rng.choice(list(pools), min(int(rng.choice(sizes)), len(pools)), replace=False)
        places = np.array([rng.choice(pools[int(rng.choice(chosen))]) for _ in range(count)])
        data = ClientData(i, prior.x[places], prior.y[places], prior.x[:1], prior.y[:1])
        inputs.append(TaskInput(data, {"model": start}, {}, Streams(key, 0, i)))
    with one_thread():
        results = Engine().run(train, inputs)
    kept = [i for i, result in enumerate(results) if "update" in result]
    return np.array([np.linalg.norm(np.asarray(results[i]["update"], np.float64)) for i in kept]), counts[kept].astype(np.float64)


def guess(seen: Mapping[int, float] | None, prior: Prior, clients: Sequence[int], train: Train) -> dict[int, float]:
    """How many samples each client has, by the lengths of updates that are seen. Without these: the median of all clients."""
    if seen is None:
        return dict.fromkeys(clients, float(np.median(list(prior.samples_per_client.values()))))
    made, counts = pretended_lengths(train, prior, stream(prior.seed, "clients of known numbers of samples"))
    estimates = counts_from_lengths(np.array([seen[client] for client in clients]), made, counts)
    return dict(zip(clients, estimates.tolist(), strict=True))


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """The numbers of samples, exactly, from weights; their order and size from lengths of first updates, or from weights without these."""
    prior = case.prior
    if prior.config is None:
        return [nothing(case, NAME, ORDER, "not attempted: the training settings are not known")], None
    everybody = float(np.median(list(prior.samples_per_client.values())))
    weighed = [counts_in(view, everybody) for view in (case.view, case.reference)]
    exact = [] if not _known(case, weighed) else [_exact_cell(case, weighed, everybody)]
    if why := _refusal(case):
        return exact or [nothing(case, NAME, ORDER, why)], None
    observed, reference = (lengths_of(case, view) for view in (case.view, case.reference))
    clients = _known(case, (observed, reference))
    if not clients and exact:  # no lengths, but weights
        return [*_size_cells(case, _known(case, weighed), [weighed[0], None, weighed[1]], "weights of sums"), *exact], None
    if len(clients) < FEWEST_SCORES:
        why = f"not attempted: single updates of {len(clients)} clients are in this view, fewer than {FEWEST_SCORES}"
        if not clients:
            why = "no single updates of others, in any form, and no weights of sums by samples are in this view"
            why = unread(case.view, public_model(prior).dimension) or why
        return exact or [nothing(case, NAME, ORDER, why)], None
    train = trainings_of(case, public_model(prior).dimension).first
    if train is None:
        raise NotRecorded("the transcript does not say how clients were asked to train")
    guesses = [None if seen is None else guess(seen, prior, clients, train.train) for seen in (observed, None, reference)]
    return [*_size_cells(case, clients, guesses, "lengths of updates of the first round"), *exact], None


def _known(case: Case, both: Sequence[Mapping[int, float]]) -> list[int]:
    """The clients but colluders that both have a number of."""
    return sorted((set(both[0]) & set(both[1])) - set(case.view.coalition))


def _counts(case: Case, clients: Sequence[int]) -> Array:
    return np.array([case.truth.label_counts[client].sum() for client in clients], np.float64)


def _size_cells(case: Case, clients: Sequence[int], guesses: Sequence[Mapping[int, float] | None], source: str) -> list[Cell]:
    """The order of clients by number of samples and the numbers, from guesses with the view, without it (None) and on the reference."""
    true = _counts(case, clients)
    if len(np.unique(true)) < 2:
        return [nothing(case, NAME, ORDER, "all clients have the same number of samples: there is nothing to find")]
    median = float(np.median(list(case.prior.samples_per_client.values())))
    made = [np.array([median if guessed is None else guessed[client] for client in clients]) for guessed in guesses]
    note = f"{len(clients)} clients, from {source}; {case.prior.description.partition(';')[0]}; baseline: the median number for everyone"
    first, second = (chance_of_orders(estimates, true, stream(case.seed, "numbers of samples dealt again")) for estimates in made[::2])
    order, errors = [orders(estimates, true) for estimates in made], [errors_of(estimates, true) for estimates in made]
    return [
        cell(case, NAME, ORDER, *order, margin=MARGIN[ORDER], note=note, chances=(first, second)),
        cell(case, NAME, ERROR, *errors, margin=MARGIN[ERROR], lower_is_better=True, note=f"|log(n̂/n)|; {note}"),
    ]


def _exact_cell(case: Case, weighed: Sequence[Mapping[int, float]], everybody: float) -> Cell:
    """The share of clients whose number of samples follows exactly from weights."""
    clients = _known(case, weighed)
    true, cohorts = _counts(case, clients), totals_in(case.view)
    if len(np.unique(true)) < 2:
        return nothing(case, NAME, EXACT, "all clients have the same number of samples: there is nothing to find")
    scores = [
        np.array([float(round(of_view[client]) == count) for client, count in zip(clients, true, strict=True)]) for of_view in weighed
    ]
    blank = (true == round(everybody)).astype(np.float64)
    note = (
        f"{len(clients)} clients, from {len(cohorts)} weights of cohorts of {min(len(total.members) for total in cohorts)} to "
        f"{max(len(total.members) for total in cohorts)} clients, all rounds; baseline: the median number for everyone"
    )
    return cell(case, NAME, EXACT, scores[0], blank, scores[1], margin=MARGIN[EXACT], share=True, note=note)


def errors_of(guessed: Array, true: Array) -> Array:
    """|log(n̂ / n)| (n,) of guessed and true numbers of samples."""
    return np.asarray(np.abs(np.log(guessed / true)))


def _refusal(case: Case) -> str:
    """Why this run is not attempted; empty if it is."""
    assert case.prior.config is not None  # checked by the caller
    if case.prior.config.privacy.unit != "none":
        return "not attempted: clients clip, so that the length of an update says little of its client"
    model = public_model(case.prior)  # one that cannot be built is named here
    if any(training.gradient or training.held_back for training in trainings_of(case, model.dimension).all):
        return "not attempted: clients send gradients, or hold samples back"
    return ""
