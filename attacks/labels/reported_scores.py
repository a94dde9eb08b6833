"""Labels from the scores that clients report: losses of models that everybody knows, and counts of test samples by class.

Source: a mean loss over a client's samples is the mean of its labels' losses, weighted by the label shares, so losses of several models are
linear equations for the shares; how losses of a label vary is learned from clients that the attacker makes of auxiliary samples. A matrix
of counts by true class is read, not inferred.

What it proves: losses under secure sums of the updates show label shares, the better the more models they are of. What it does not:
training samples have lower losses than auxiliary ones once a model fits them, which is not modelled, so late rounds mislead.
"""

from collections.abc import Mapping

import numpy as np

from ...contract.transcript import payload_rows
from ...engine.models import Model
from ...randomness import stream
from ...types import Array
from ..adversary import AdversaryView
from ..evidence.learned_shares import ridge_shares
from ..evidence.reported_losses import losses_of, losses_reported
from ..evidence.simulated_shares import simulated_samples
from ..evidence.updates import public_model
from ..figures.leakage import Case, Cell, Prior, cell, nothing
from ..figures.significance import chance, chance_of_reading

__all__ = ["cells", "counts_reported", "shares_by_losses"]

NAME, LOSSES = "reported_scores", "losses_histogram_l1"
PRETENDED = 400
MARGIN = 0.1


def shares_by_losses(reported: Mapping[int, list[tuple[Array, float]]], prior: Prior, model: Model) -> dict[int, Array]:
    """Label shares (classes,) of each client by the losses that it reported."""
    place: dict[bytes, int] = {}
    vectors: list[Array] = []
    for pairs in reported.values():
        for vector, _ in pairs:
            if place.setdefault(vector.tobytes(), len(vectors)) == len(vectors):
                vectors.append(vector)
    of_samples = np.stack([losses_of(model, vector, prior.x, prior.y) for vector in vectors])
    people = [(prior.samples_per_client[client], prior.labels_per_client[client]) for client in sorted(reported)]
    places, shares = simulated_samples(prior.y, prior.classes, people, stream(prior.seed, "clients by losses"), PRETENDED)
    simulated = np.stack([of_samples[:, chosen].mean(axis=1) for chosen in places])
    found, fits = dict[int, Array](), dict[tuple[int, ...], tuple[Array, Array]]()
    for client, pairs in reported.items():
        which = tuple(place[vector.tobytes()] for vector, _ in pairs)
        rows = simulated[:, which]
        fit = fits.setdefault(which, (rows, np.maximum(rows.std(axis=0), 1e-12)))
        middle, spread = fit[0].mean(axis=0), fit[1]
        read = ridge_shares((rows - middle) / spread, shares, 1.0)
        own = np.array([loss for _, loss in pairs])
        found[client] = read.read(((own - middle) / spread)[None], [prior.labels_per_client[client]])[0]
    return found


def counts_reported(view: AdversaryView, classes: int) -> dict[int, Array]:
    """Shares (classes,) of a client's test samples by label, from the last counts by true class that it reported."""
    shares: dict[int, Array] = {}
    for message in view.select("gather"):
        confusion = (message.payload or {}).get("confusion")
        if message.source != "clients" or confusion is None or confusion.ndim < 2 or len(confusion) != len(payload_rows(message)):
            continue
        for client, table in zip(payload_rows(message), np.asarray(confusion, np.float64), strict=True):
            if table.size not in (classes**2, 3 * classes) or client in view.coalition:
                continue
            counts = table.reshape(classes, classes).sum(axis=1) if table.size == classes**2 else table.reshape(3, classes)[0]
            if np.isfinite(counts).all() and counts.min() >= 0 and counts.sum() > 0:
                shares[client] = counts / counts.sum()
    return shares


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """Label shares of clients by their losses, and of their test samples by their counts."""
    prior, figures = case.prior, list[Cell]()
    if prior.config is None:
        return [nothing(case, NAME, LOSSES, "not attempted: the training settings are not known")], None
    blank = np.bincount(prior.y, minlength=prior.classes) / len(prior.y)
    model = public_model(prior)
    both = [losses_reported(view, model.dimension) for view in (case.view, case.reference)]
    clients = sorted(set(both[0]) & set(both[1]))
    if clients and model.loss == "cross_entropy":
        guessed = [shares_by_losses({client: of[client] for client in clients}, prior, model) for of in both]
        number = max(len(both[0][client]) for client in clients)
        note = f"from the losses of up to {number} models that clients report, beside {PRETENDED} clients made of auxiliary samples"
        real = {client: case.truth.histogram(client) for client in clients}
        figures.append(_cell(case, LOSSES, clients, guessed, real, blank, note))
    tables = [counts_reported(view, prior.classes) for view in (case.view, case.reference)]
    clients = sorted(client for client in set(tables[0]) & set(tables[1]) if len(case.truth.outside.get(client, ((), ()))[1]))
    if clients:
        held = {client: np.bincount(case.truth.outside[client][1], minlength=prior.classes) for client in clients}
        note = "read, not inferred: clients report counts of test samples by true class"
        real = {client: counts / counts.sum() for client, counts in held.items()}
        figures.append(_cell(case, "test_histogram_l1", clients, tables, real, blank, note))
    why = "clients report no losses of models that others have, and no counts of samples by class, in this view"
    return figures or [nothing(case, NAME, LOSSES, why)], None


def _cell(
    case: Case, metric: str, clients: list[int], guessed: list[dict[int, Array]], real: Mapping[int, Array], blank: Array, note: str
) -> Cell:  # fmt: skip
    observed, reference = (np.array([float(np.abs(of[client] - real[client]).sum()) for client in clients]) for of in guessed)
    beside = np.array([float(np.abs(blank - real[client]).sum()) for client in clients])
    words = f"{note}; {case.prior.description}; baseline: the label shares of the auxiliary data"
    true, groups = (
        np.stack([real[client] for client in clients]),
        np.array([case.truth.groups.get(client, -1 - client) for client in clients]),
    )
    first, second = (
        max(
            chance(-errors, -beside, MARGIN),
            chance_of_reading(np.stack([of[client] for client in clients]), true, blank, groups, stream(case.seed, f"{metric}: renamed")),
        )
        for errors, of in zip((observed, reference), guessed, strict=True)
    )
    return cell(
        case, NAME, metric, observed, beside, reference, margin=MARGIN, lower_is_better=True, note=words, chances=(first, second)
    )  # fmt: skip
