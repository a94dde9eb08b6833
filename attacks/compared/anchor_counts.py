"""Anchor counts: how many samples of each label a client has, from its gradient at a public anchor model: StoCFL's, or crossfit's folds.

Source: in the gradient of softmax cross-entropy the coordinates of the head's bias are Σ_c q_c p_c − q, with q the label shares and p_c
what the model predicts for label c (see `label_inference`). StoCFL's Ψ is that gradient at a public anchor model, normalised and perhaps
sketched. Where the bias coordinates are there, the scale that normalising took is found from the labels that are absent; where a sketch
hides them, Ψ is split into the gradients of clients with a single label, which the attacker makes itself. Folds (`tasks.fold_gradients`)
are always split so, their mean, since each sample's gradient in them has a length of its own.

What it proves: representations at an anchor model, and plain folds, reveal label counts; balanced folds which labels there are, and no
more. What it does not: anything about single samples. Where all labels are present Ψ's scale is unknown, and differences between shares
are overstated.
"""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from ...contract.transcript import payload_rows
from ...engine.models import Model
from ...federation.transforms import sketched
from ...randomness import stream
from ...types import Array
from ..adversary import AdversaryView, hidden_by, opened_rows
from ..evidence.sums import models_sent
from ..evidence.updates import public_model
from ..figures.leakage import Case, Cell, Prior, Truth, cell, nothing
from ..figures.significance import chance_of_matching
from ..labels.label_inference import LabelGuess, label_cells
from ..labels.label_readings import auxiliary_shares, bias_span, class_probabilities, counts_from_bias
from .fold_release import folds_in

__all__ = ["cells", "labels_from_templates"]

NAME, EXACT = "anchor_counts", "label_counts_exact"
MARGIN = 0.1


def labels_from_templates(vector: Array, templates: Array, mixture: Array) -> Array:
    """Label shares (classes,) from a vector (d,) that is linear in them up to its length, such as a normalised, sketched gradient.

    `templates` (classes, d) are the vectors of simulated clients with a single label. `mixture` (d,) is the vector of a simulated client
    with equal shares of all labels; it gives the length of each label's part. Non-negative least squares.
    """
    parts, whole = nnls(templates.T, np.asarray(vector, np.float64))[0], nnls(templates.T, np.asarray(mixture, np.float64))[0]
    shares = np.divide(parts, whole, out=np.zeros_like(parts), where=whole > 0)
    return np.asarray(shares / max(float(shares.sum()), 1e-12))


def representations_in(view: AdversaryView, dimension: int) -> dict[int, Array]:
    """StoCFL's Ψ by client, the first of each; the mean of two halves where these are sent. None under a transform it cannot undo."""
    representations: dict[int, Array] = {}
    for message in view.select("gram", "representation"):
        name = f"gram/{message.context['epoch']}"
        if message.payload is None or "rows" not in message.payload or hidden_by(view, name, "gram"):
            continue
        rows = opened_rows(view, np.asarray(message.payload["rows"], dtype=np.float64), name, "gram", dimension)
        if rows is None:
            continue
        for client, row in zip(payload_rows(message), rows, strict=True):
            representations.setdefault(client, row.mean(axis=0))
    return representations


def _vectors_in(view: AdversaryView, dimension: int) -> dict[int, Array]:
    """Ψ by client, else the means of folds."""
    return representations_in(view, dimension) or {client: folds.mean(0) for client, folds in folds_in(view, dimension).items()}


def anchor_of(view: AdversaryView) -> Array | None:
    """The public model at which representations were taken."""
    for message in view.select("compute", "parameters"):
        if message.context.get("task") == "Represent":
            return models_sent(view, message).get("model")
    return None


def guess(view: AdversaryView | None, prior: Prior, clients: Sequence[int], model: Model) -> LabelGuess:
    """Label shares from Ψ: by the bias coordinates where they are there, else by templates; none where the pipeline cannot be imitated."""
    if view is None:
        return LabelGuess(dict.fromkeys(clients, auxiliary_shares(prior)))
    seen, anchor = _vectors_in(view, model.dimension), anchor_of(view)
    whole = all(seen[client].shape == (model.dimension,) for client in clients)
    bias = bias_span(model)
    if whole and anchor is not None and bias is not None:
        predicted = class_probabilities(model, anchor, prior.x, prior.y)
        return LabelGuess({client: counts_from_bias(seen[client][bias], predicted, prior.labels_per_client[client]) for client in clients})
    present = [int(label) for label in np.unique(prior.y)]
    pools = [np.flatnonzero(prior.y == label) for label in present]
    equal = min(len(pool) for pool in pools)
    places = [*pools, np.concatenate([pool[:equal] for pool in pools])]
    made = prior.simulate([(prior.x[place], prior.y[place]) for place in places])
    if made is not None:
        made = made.mean(axis=1, keepdims=True)  # one vector each, or two halves
    if made is not None and "sketch" in view.protection.gram:
        made = sketched(0, view.protection.sketch_dim)(made)
    if made is None or made.shape[2:] != seen[clients[0]].shape:
        return LabelGuess()
    shares = {}
    for client in clients:
        shares[client] = np.zeros(prior.classes)
        shares[client][present] = labels_from_templates(seen[client], made[:-1, 0], made[-1, 0])
    return LabelGuess(shares)


def right_counts(guess: LabelGuess, truth: Truth, clients: Sequence[int]) -> Array:
    """1 where all counts, shares × samples rounded, guessed for a client are those of another: (m, m), the guess first."""
    counts = np.stack([truth.label_counts[client] for client in clients])
    shares = np.stack([guess.shares[client] for client in clients])
    guessed = np.rint(shares[:, None] * counts.sum(axis=1)[None, :, None])
    return np.asarray((guessed == counts[None]).all(axis=2), np.float64)


def exact_cell(case: Case, clients: Sequence[int], observed: LabelGuess, reference: LabelGuess) -> Cell:
    """Whether all counts of a client are right, beside the same guesses dealt to the clients at random.

    Clients of a cluster are right or wrong together, so how probable that is without a view comes from such deals as well.
    """
    right = [right_counts(guessed, case.truth, clients) for guessed in (observed, reference)]
    first, second = (chance_of_matching(1 - table, stream(case.seed, "label counts dealt again")) for table in right)
    return cell(
        case, NAME, EXACT, np.diag(right[0]), right[0].mean(axis=0), np.diag(right[1]), reference_blank=right[1].mean(axis=0),
        margin=MARGIN, share=True, chances=(first, second),
        note=f"{case.prior.description}; all counts of a client right; baseline: the same guesses dealt to the clients at random",
    )  # fmt: skip


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """Label counts from gradients at the anchor."""
    prior = case.prior
    model = None if prior.config is None else public_model(prior)
    view = case.view
    observed, reference = ({}, {}) if model is None else (_vectors_in(recording, model.dimension) for recording in (view, case.reference))
    clients = sorted((set(observed) & set(reference)) - set(case.view.coalition))
    if model is None or not clients:
        why = "no representation at an anchor model, and no folds, can be read in this view"
        kinds = [message.kind for message in view.messages if message.operation == "gram"]
        sent = next((kind for kind in kinds if kind in ("representation", "folds")), "")
        if not observed and sent:
            hidden = f"{sent.removesuffix('s')}s are transformed or encrypted here"
            why = f"not attempted: {hidden}; gram_geometry reads their inner products, where it has them"
        return [nothing(case, NAME, "histogram_l1", why)], None
    pairs = ((view, prior), (None, prior), (case.reference, prior.unprotected()))
    guesses = [guess(vectors, knows, clients, model) for vectors, knows in pairs]
    if not all(guessed.shares for guessed in guesses):
        return [nothing(case, NAME, "histogram_l1", "not attempted: auxiliary data cannot imitate the public pipeline")], None
    figures, arrays = label_cells(case, NAME, clients, guesses, prior.description)
    return [exact_cell(case, clients, guesses[0], guesses[2]), *figures], arrays
