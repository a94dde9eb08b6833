"""Signature inversion: a client's mean image and its labels from PACFL's signature U_p.

Source: the signature is the leading left singular vectors of uncentred pixels (PACFL, Sec. 3), and the first of these points almost
exactly at the mean image; the span of all of them fits that of a simulated client with the same labels best.

What it proves: signatures in the clear are pictures of the data. What it does not: nothing about single samples; a client whose labels are
all labels has no label set to find. Under a shared permutation the places of pixels are found first (`signature_places`). Where signatures
alone leave doubt, label sets that `key_recovery` reads off updates in the same view are one more start. A shared rotation, or a sketch,
leaves inner products only: from these come label sets, and from label sets mean images (`signature_labels`). A coalition with one client
undoes either transform.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import comb

import numpy as np

from ...contract.transcript import payload_rows
from ...tasks.signatures import principal_vectors
from ...types import Array
from ..adversary import AdversaryView, hidden_by, opened_rows
from ..evidence.updates import public_model
from ..figures.leakage import Case, Cell, Prior, cell, label_sets_of, nothing, popular_set
from ..key_recovery.cells import PERMUTATIONS, transformed_rounds
from ..key_recovery.cells import guess as recover
from ..labels.label_inference import set_chance
from ..labels.label_readings import top_labels
from .gram_geometry import compared
from .signature_labels import COMPARISONS, IMAGE_MARGIN, cells_of_labels
from .signature_places import Placed, agreements, mean_directions, place_signatures

__all__ = ["cells", "invert_signature", "recover_label_set", "rows_in", "signatures_in"]

NAME = "signature_inversion"
MARGIN = 0.1
MOST_SETS = 1000


@dataclass(frozen=True, eq=False)
class SignatureGuess:
    """What the attacker says of each client: an image, and a set of labels."""

    images: Mapping[int, Array] = field(default_factory=dict)
    label_sets: Mapping[int, frozenset[int]] = field(default_factory=dict)


def invert_signature(signature: Array, shape: tuple[int, ...], norm: float = 1.0, rows_per_part: int = 0) -> Array:
    """The mean image that a signature (p, d) shows: its first row with a positive sum, scaled to `norm`, in `shape`.

    A signature may have `rows_per_part` rows for each label, or for each half of the data. Then the first rows of all parts are averaged.
    """
    return np.asarray(norm * mean_directions(np.asarray(signature)[None], rows_per_part)[0]).reshape(shape)


def recover_label_set(signature: Array, templates: Mapping[frozenset[int], Array]) -> frozenset[int]:
    """The label set whose simulated signature spans nearly the space of `signature` (p, d): the largest ‖U_S Uᵀ‖_F, first row doubled.

    `templates` maps candidate label sets to the signatures (p, d) of simulated clients.
    """
    sets = sorted(templates, key=sorted, reverse=True)
    fits = agreements(np.asarray(signature)[None], np.stack([templates[label_set] for label_set in sets]))
    return sets[int(fits[0].argmax())]


def simulated_signatures(prior: Prior, labels: int, p: int) -> dict[frozenset[int], Array]:
    """The signature of a simulated client for each set of `labels` labels that the auxiliary data can make."""
    flat = prior.x.reshape(len(prior.x), -1)
    templates = {}
    for chosen in label_sets_of(range(prior.classes), labels):
        samples = flat[np.isin(prior.y, list(chosen))]
        if len(samples) >= p:
            templates[chosen] = principal_vectors(samples, p, name="auxiliary data")
    return templates


def signatures_in(view: AdversaryView, prior: Prior) -> dict[int, Array]:
    """The signatures (p, d) that the adversary holds, of halves with rows of norm 1.

    Of a second moment, where that is what clients send, the leading eigenvectors.
    """
    dimension = int(np.prod(prior.shape))
    if not prior.moments:
        signatures = rows_in(view, dimension)
        if not prior.halves:
            return signatures
        return {client: rows / np.linalg.norm(rows, axis=1, keepdims=True) for client, rows in signatures.items()}
    upper = np.triu_indices(dimension)
    vectors: dict[int, Array] = {}
    for client, rows in rows_in(view, len(upper[0])).items():
        moment = np.zeros((dimension, dimension))
        moment[upper] = moment[upper[::-1]] = rows[0] / np.where(upper[0] == upper[1], 1.0, np.sqrt(2))
        vectors[client] = np.linalg.eigh(moment)[1][:, : -prior.rows_per_part - 1 : -1].T
    return vectors


def rows_in(view: AdversaryView, dimension: int) -> dict[int, Array]:
    """The rows (p, dimension) of signatures that the adversary holds, turned back where a colluding client's secret allows it.

    Padded rows are cut to `dimension`: who takes them for signatures has no other use for what is beyond. Sketched ones are left out.
    """
    client_rows: dict[int, Array] = {}
    for message in view.select("gram", "signature"):
        if message.payload is None or "rows" not in message.payload:
            continue
        sent = np.asarray(message.payload["rows"], dtype=np.float64)
        rows = opened_rows(view, sent, f"gram/{message.context['epoch']}", "gram", dimension)
        if rows is not None and rows.shape[-1] >= dimension:
            client_rows |= dict(zip(payload_rows(message), rows[..., :dimension], strict=True))
    return client_rows


def transforms_in(view: AdversaryView) -> dict[int, str]:
    """By clustering epoch the kind of the transform that hides its signatures from the adversary, for all that have one."""
    epochs = {int(message.context["epoch"]) for message in view.select("gram", "signature")}
    kinds = {epoch: hidden_by(view, f"gram/{epoch}", "gram") for epoch in epochs}
    return {epoch: kind for epoch, kind in kinds.items() if kind}


def unpermuted(view: AdversaryView, prior: Prior, signatures: Mapping[int, Array]) -> dict[int, Array]:
    """Signatures (p, d) by client with coordinates in their places, as the attack finds them; unchanged where no permutation hides them."""
    rebuilt = dict(signatures)
    last = {client: int(message.context["epoch"]) for message in view.select("gram", "signature") for client in payload_rows(message)}
    for epoch, kind in transforms_in(view).items():
        clients = [client for client in sorted(rebuilt) if last[client] == epoch]
        if clients and kind in PERMUTATIONS:
            rows = np.stack([rebuilt[client] for client in clients])
            rebuilt |= dict(zip(clients, _placed(view, prior, clients, rows, kind).undone(rows), strict=True))
    return rebuilt


def _placed(view: AdversaryView, prior: Prior, clients: Sequence[int], rows: Array, kind: str) -> Placed:
    """Places and labels of signatures (n, p, d). Where these leave doubt, from label sets that updates in the view show, too."""
    sizes = [prior.labels_per_client[client] for client in clients]
    p = prior.rows_per_part or rows.shape[1]
    templates = {
        label_set: made for size in sorted(set(sizes)) if size == prior.classes or _has_set_to_find(prior, size)
        for label_set, made in simulated_signatures(prior, size, p).items()
    }  # fmt: skip
    known = {len(label_set) for label_set in templates}
    if not known:  # for clients with too many possible sets, all labels are the nearest
        templates, known = simulated_signatures(prior, prior.classes, p), {prior.classes}
    sizes = [size if size in known else max(known) for size in sizes]
    place = partial(
        place_signatures, rows, templates, sizes, rows_per_part=prior.rows_per_part, signed=kind == "signed_permutation", seed=prior.seed
    )
    placed = place()
    shares = {} if placed.settled else _shares_of_updates(view, prior)
    if not set(shares) & set(clients):
        return placed
    known_sets = zip(clients, sizes, placed.label_sets, strict=True)
    again = place(starts=[[top_labels(shares[client], size) if client in shares else own for client, size, own in known_sets]])
    return again if again.fit > placed.fit else placed


def _shares_of_updates(view: AdversaryView, prior: Prior) -> Mapping[int, Array]:
    """Label shares (classes,) by client, as key recovery reads them off updates in the same view; empty where it has nothing to read."""
    if prior.config is None or len(np.unique(prior.y)) < prior.classes:
        return {}
    dimension = public_model(prior).dimension
    seen = transformed_rounds(view, dimension)
    if seen is None or seen.local is None or (seen.clear and seen.rounds[0].shape[1] != dimension):
        return {}
    return recover(view, prior).histograms


def guess(view: AdversaryView | None, prior: Prior, clients: tuple[int, ...]) -> SignatureGuess:
    """The attack. Without a view it says what the prior alone says: the mean auxiliary image for everyone, and no labels."""
    mean = prior.x.mean(axis=0, dtype=np.float64)
    if view is None:
        return SignatureGuess(dict.fromkeys(clients, mean))
    signatures = unpermuted(view, prior, signatures_in(view, prior))
    images, labels = {}, {}
    templates: dict[tuple[int, int], dict[frozenset[int], Array]] = {}
    for client in clients:
        signature = signatures[client]
        images[client] = invert_signature(signature, prior.shape, float(np.linalg.norm(mean)), prior.rows_per_part)
        size = prior.labels_per_client[client]
        if _has_set_to_find(prior, size):
            key = (size, prior.rows_per_part or len(signature))
            if key not in templates:
                templates[key] = simulated_signatures(prior, *key)
            labels[client] = recover_label_set(signature, templates[key])
    return SignatureGuess(images, labels)


def _has_set_to_find(prior: Prior, size: int) -> bool:
    return size < prior.classes and comb(prior.classes, size) <= MOST_SETS


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """Cells and recovered arrays for the report."""
    prior, truth = case.prior, case.truth
    view = case.view
    seen = signatures_in(view, prior)
    if not seen and not _sent(view):
        return [nothing(case, NAME, "mean_image_cosine", "no signature is in this view")], None
    clients = tuple(sorted(set(seen) - set(view.coalition)))
    if seen and not clients:
        why = "the client sees its own signature only" if view.adversary == "client" else "every signature is of a colluding client"
        return [nothing(case, NAME, "mean_image_cosine", why)], None
    hidden = set(transforms_in(view).values())
    if why := _unread(case, seen, hidden):
        return _by_labels(case, why)
    permuted = bool(hidden)
    note = f"{'places and labels from the values of signatures alone; ' if permuted else ''}{prior.description}"
    observed, reference = guess(view, prior, clients), guess(case.reference, prior.unprotected(), clients)
    blank = guess(None, prior, clients)
    figures = []
    for metric, compare in COMPARISONS.items():
        scored = [np.array([compare(truth.mean_images[c], guessed.images[c]) for c in clients]) for guessed in (observed, blank, reference)]
        if not np.isnan(scored[1]).any():  # images, and not too small
            figures.append(cell(case, NAME, metric, *scored, margin=IMAGE_MARGIN[metric], note=note))
    figures.append(_label_cell(case, clients, observed, reference, note, renamed=permuted))
    arrays = {
        "clients": np.array(clients),
        "truth": np.stack([truth.mean_images[c] for c in clients]),
        "recovered": np.stack([observed.images[c] for c in clients]),
        "baseline": blank.images[clients[0]],
    }
    if observed.label_sets:
        for name, sets in (("label_truth", truth.label_sets), ("label_guess", observed.label_sets)):
            arrays[name] = np.array([[float(label in sets.get(c, ())) for label in range(prior.classes)] for c in clients])
    return figures, arrays


def _sent(view: AdversaryView) -> bool:
    """Whether rows of signatures are in the view, in any form."""
    return any("rows" in (message.payload or {}) for message in view.select("gram", "signature"))


def _unread(case: Case, seen: Mapping[int, Array], hidden: set[str]) -> str:
    """Why signatures under transforms of these kinds are not read as vectors; empty where they are."""
    if not seen:
        return "signatures were sketched, which leaves inner products only"
    if rotations := sorted(hidden - set(PERMUTATIONS)):
        return f"signatures are under a secret {rotations[0]}, which leaves inner products only"
    if hidden and case.prior.moments:
        return "second moments are under a permutation of their entries"
    if "signed_permutation" in hidden and bool((case.prior.x < 0).any()):
        return "samples have negative values, so that nothing shows the signs of coordinates"
    return ""


def _by_labels(case: Case, why: str) -> tuple[list[Cell], dict[str, Array] | None]:
    """Mean images by way of label sets, where signatures are not read as vectors and `why`."""
    seen = compared(case)
    if isinstance(seen, str):
        words = f"not attempted: {why}, and no label sets lead from these to images: {seen.removeprefix('not attempted: ')}"
        return [nothing(case, NAME, "mean_image_cosine", words)], None
    if not set(seen.judged) <= set(signatures_in(case.reference, case.prior.unprotected())):
        words = f"not attempted: {why}, in the unprotected run, too, so that no reference shows images"
        return [nothing(case, NAME, "mean_image_cosine", words)], None
    return cells_of_labels(case, NAME, seen, guess(case.reference, case.prior.unprotected(), seen.judged).images)


def _label_cell(
    case: Case, clients: tuple[int, ...], observed: SignatureGuess, reference: SignatureGuess, note: str, *, renamed: bool
) -> Cell:
    """Label sets; `renamed`: labels were named together, so that chance is that of a renaming of all."""
    metric, truth = "label_set_accuracy", case.truth
    judged = [client for client in clients if client in observed.label_sets]
    if not judged:
        whole = all(case.prior.labels_per_client[client] == case.prior.classes for client in clients)
        why = "every client has all labels: there is no label set to find" if whole else "not attempted: too many label sets are possible"
        return nothing(case, NAME, metric, why)
    popular = popular_set([truth.label_sets[c] for c in judged])
    sets = [observed.label_sets, dict.fromkeys(judged, popular), reference.label_sets]
    right = [np.array([float(label_sets[c] == truth.label_sets[c]) for c in judged]) for label_sets in sets]
    words = f"{note}; baseline: the most common label set for everyone"
    named = [[guessed.label_sets[c] for c in judged] for guessed in (observed, reference)]
    first, second = (set_chance(label_sets, right[1], case, judged, together=renamed) for label_sets in named)
    return cell(case, NAME, metric, *right, margin=MARGIN, share=True, note=words, chances=(first, second))
