"""Signature inversion: a client's mean image and its labels from PACFL's signature U_p.

Source: the signature is the leading left singular vectors of uncentred pixels (PACFL, Sec. 3), and the first of these points almost
exactly at the mean image; the span of all of them fits that of a simulated client with the same labels best.

What it proves: signatures in the clear are pictures of the data. What it does not: nothing about single samples; a client whose labels are
all labels has no label set to find. Under a shared rotation the server attacks the rotated rows as if they were clear; a coalition with one
client undoes the rotation first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from math import comb

import numpy as np

from ..contract.transcript import payload_rows
from ..tasks.signatures import principal_vectors
from ..types import Array
from .adversary import AdversaryView, opened
from .leakage import Case, Cell, Prior, cell, cosine, nothing, popular_set, psnr_db, ssim

__all__ = ["cells", "invert_signature", "recover_label_set", "rows_in", "signatures_in"]

NAME = "signature_inversion"
MARGIN = {"mean_image_cosine": 0.01, "mean_image_psnr_db": 1.0, "mean_image_ssim": 0.02, "label_set_accuracy": 0.1}
MOST_SETS = 1000


@dataclass(frozen=True, eq=False)
class Guess:
    """What the attacker says of each client: an image, and a set of labels."""

    images: Mapping[int, Array] = field(default_factory=dict)
    label_sets: Mapping[int, frozenset[int]] = field(default_factory=dict)


def invert_signature(signature: Array, shape: tuple[int, ...], norm: float = 1.0, rows_per_part: int = 0) -> Array:
    """The mean image that a signature (p, d) shows: its first row with a positive sum, scaled to `norm`, in `shape`.

    Of a signature made of `rows_per_part` rows for each label, or each half of the data, the first rows of these are averaged.
    """
    rows = np.asarray(signature, dtype=np.float64)
    firsts = rows[::rows_per_part] if rows_per_part else rows[:1]
    firsts = firsts[np.linalg.norm(firsts, axis=1) > 0]
    total = (firsts * np.where(firsts.sum(axis=1) < 0, -1.0, 1.0)[:, None]).sum(axis=0)
    length = float(np.linalg.norm(total))
    return np.asarray(norm * (total / length if length > 0 else total)).reshape(shape)


def recover_label_set(signature: Array, templates: Mapping[frozenset[int], Array]) -> frozenset[int]:
    """The label set whose simulated signature spans nearly what `signature` (p, d) spans: the largest ‖U_S Uᵀ‖_F, first row doubled.

    `templates` maps candidate label sets to the signatures (p, d) of simulated clients.
    """

    def agreement(template: Array) -> float:
        product = template @ signature.T
        return float((product**2).sum() + product[0, 0] ** 2)

    return max(templates, key=lambda labels: (agreement(templates[labels]), sorted(labels)))


def simulated_signatures(prior: Prior, labels: int, p: int) -> dict[frozenset[int], Array]:
    """The signature of a simulated client for each set of `labels` labels that the auxiliary data can make."""
    flat = prior.x.reshape(len(prior.x), -1)
    templates = {}
    for chosen in combinations(range(prior.classes), labels):
        samples = flat[np.isin(prior.y, chosen)]
        if len(samples) >= p:
            templates[frozenset(chosen)] = principal_vectors(samples, p, name="auxiliary data")
    return templates


def signatures_in(view: AdversaryView, prior: Prior) -> dict[int, Array]:
    """The signatures (p, d) that the adversary holds, of halves with rows of norm 1.

    Of a second moment, where that is what clients send, the leading eigenvectors.
    """
    dimension = int(np.prod(prior.shape))
    if not prior.moments:
        found = rows_in(view, dimension)
        return {client: rows / np.linalg.norm(rows, axis=1, keepdims=True) for client, rows in found.items()} if prior.halves else found
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
    found: dict[int, Array] = {}
    for message in view.select("gram", "signature"):
        if message.payload is None or "rows" not in message.payload:
            continue
        sent = np.asarray(message.payload["rows"], dtype=np.float64)
        rows = opened(view, sent, f"gram/{message.context['epoch']}", "gram", dimension)
        if rows is not None and rows.shape[-1] >= dimension:
            found |= dict(zip(payload_rows(message), rows[..., :dimension], strict=True))
    return found


def guess(view: AdversaryView | None, prior: Prior, clients: tuple[int, ...]) -> Guess:
    """The attack. Without a view it says what the prior alone says: the mean auxiliary image for everyone, and no labels."""
    mean = prior.x.mean(axis=0, dtype=np.float64)
    if view is None:
        return Guess(dict.fromkeys(clients, mean))
    signatures = signatures_in(view, prior)
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
    return Guess(images, labels)


def _has_set_to_find(prior: Prior, size: int) -> bool:
    return size < prior.classes and comb(prior.classes, size) <= MOST_SETS


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """Cells and recovered arrays for the report."""
    prior, truth = case.prior, case.truth
    view = case.view
    seen = signatures_in(view, prior)
    if not seen:
        why = "no signature is in this view"
        if any("rows" in (message.payload or {}) for message in view.select("gram", "signature")):
            why = "not attempted: signatures were sketched, which is not undone here (gram_geometry reads inner products of sketches)"
        return [nothing(case, NAME, "mean_image_cosine", why)], None
    clients = tuple(sorted(set(seen) - set(view.coalition)))
    if not clients:
        why = "the client sees its own signature only" if view.adversary == "client" else "every signature is of a colluding client"
        return [nothing(case, NAME, "mean_image_cosine", why)], None
    mine, theirs = guess(view, prior, clients), guess(case.reference, prior.unprotected(), clients)
    blank = guess(None, prior, clients)
    figures = []
    comparisons = {"mean_image_cosine": cosine, "mean_image_psnr_db": psnr_db, "mean_image_ssim": ssim}
    if np.isnan(ssim(truth.mean_images[clients[0]], blank.images[clients[0]])):
        del comparisons["mean_image_ssim"]  # not images, or too small
    for metric, compare in comparisons.items():
        scored = [np.array([compare(truth.mean_images[c], one.images[c]) for c in clients]) for one in (mine, blank, theirs)]
        figures.append(cell(case, NAME, metric, *scored, margin=MARGIN[metric], note=prior.description))
    figures.append(_label_cell(case, clients, mine, theirs))
    arrays = {
        "clients": np.array(clients),
        "truth": np.stack([truth.mean_images[c] for c in clients]),
        "recovered": np.stack([mine.images[c] for c in clients]),
        "baseline": blank.images[clients[0]],
    }
    if mine.label_sets:
        for name, sets in (("label_truth", truth.label_sets), ("label_guess", mine.label_sets)):
            arrays[name] = np.array([[float(label in sets.get(c, ())) for label in range(prior.classes)] for c in clients])
    return figures, arrays


def _label_cell(case: Case, clients: tuple[int, ...], mine: Guess, theirs: Guess) -> Cell:
    metric, truth = "label_set_accuracy", case.truth
    judged = [client for client in clients if client in mine.label_sets]
    if not judged:
        whole = all(case.prior.labels_per_client[client] == case.prior.classes for client in clients)
        why = "every client has all labels: there is no label set to find" if whole else "not attempted: too many label sets are possible"
        return nothing(case, NAME, metric, why)
    popular = popular_set([truth.label_sets[c] for c in judged])
    sets = [mine.label_sets, dict.fromkeys(judged, popular), theirs.label_sets]
    right = [np.array([float(one[c] == truth.label_sets[c]) for c in judged]) for one in sets]
    note = f"{case.prior.description}; baseline: the most common label set for everyone"
    return cell(case, NAME, metric, *right, margin=MARGIN[metric], share=True, note=note)
